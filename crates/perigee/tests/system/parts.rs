//! A long partition, and daemons that are stopped in order: who waits says what for, and goes on.

use perigee_lab::wan::{self, Change};
use perigee_lab::{Definition, LabId};
use perigee_model::HostId;
use perigee_model::job::{ClusterVolume, Host, HostState, Job, JobState};
use perigee_model::waiting::{Waiting, WaitsFor};

use super::{Checked, System, ensure, host, until, writer_job};

/// A VM's request waits for so long for the home of its volume: 600 s by default. So a partition of half a minute is here as
/// long as one of an hour.
const PATIENCE_S: u64 = 5;

/// A lab in which VMs do not wait for long for the homes of their volumes.
pub fn impatient() -> Definition {
    let definition = Definition::default_demo(LabId::random(), 16);
    Definition { home_patience_s: Some(PATIENCE_S), ..definition }
}

fn has_home(waits: &[Waiting]) -> bool {
    waits.iter().any(|w| matches!(&w.waits_for, WaitsFor::Home { home, .. } if home == "cloud1"))
}

async fn wan_is_down(system: &System, down: bool) -> Checked<()> {
    wan::set_all(&system.lab, Change { down: Some(down), ..Change::default() }).await
}

/// A guest writes at one site to a volume at the other one. The link is away for longer than QEMU waits for its disk.
pub async fn a_vm_goes_on_after_a_long_partition(system: &System, job: &Job) -> Checked<()> {
    wan_is_down(system, true).await?;
    let waiting = until("the job to say what it waits for", async || {
        Ok(Some(system.job(&job.id).await?).filter(|job| has_home(&job.waits)))
    })
    .await?;
    ensure!(waiting.state == JobState::Running, "{waiting:?}");
    ensure!(waiting.reason.contains("its home cloud1 does not answer (since "), "{waiting:?}");
    until("QEMU to have given up", async || {
        let log = std::fs::read_to_string(system.host_file("home1", "agent.log"));
        let stood = log.is_ok_and(|log| log.contains("the VM does not run"));
        Ok(stood.then_some(()))
    })
    .await?;
    until("the parts of the other host to be told", async || {
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        let cloud = hosts.iter().find(|h| h.id == host("cloud1"));
        let told: Vec<&str> =
            cloud.into_iter().flat_map(|h| &h.waits).map(|w| w.waits_for.word()).collect();
        Ok((told == ["agent", "volume_server"]).then_some(()))
    })
    .await?;
    let volumes: Vec<ClusterVolume> = system.get("/v1/volumes").await?;
    let data = volumes.iter().find(|volume| volume.name.as_str() == "data");
    ensure!(data.is_some_and(|data| !data.waits.is_empty()), "{volumes:?}");
    wan_is_down(system, false).await?;
    system.progresses(&job.id, 3).await?;
    until("the job to wait no more", async || {
        let job = system.job(&job.id).await?;
        Ok((job.waits.is_empty() && job.reason.is_empty()).then_some(()))
    })
    .await
}

/// A host whose daemons were stopped in order, with the job whose VM goes on there.
pub struct Stopped {
    job: Job,
    at: HostId,
}

impl Stopped {
    /// Stops the agent and then the volume server, as an upgrade does.
    pub async fn begin(system: &System, at: &str) -> Checked<Self> {
        let file = format!("{}restart: on-host-failure\n", writer_job(at));
        let job = system.submit(&file).await?;
        system.progresses(&job.id, 1).await?;
        let (job, at) = (system.job(&job.id).await?, host(at));
        for daemon in ["agent", "volume"] {
            system.lab.keep_away(&at, daemon, true)?;
            let pid = system.lab.host_pid(&at, daemon)?;
            let sent = std::process::Command::new("kill").arg(pid.to_string()).status();
            ensure!(sent.is_ok_and(|sent| sent.success()), "{daemon} could not be stopped");
            until("the daemon to end", async || {
                Ok(system.lab.host_pid(&at, daemon).is_err().then_some(()))
            })
            .await?;
        }
        Ok(Self { job, at })
    }

    /// A host that is silent for so long is lost, and the job begins anew, if nobody has said that its agent stops.
    pub async fn outlasts_a_lost_host(self, system: &System) -> Checked<()> {
        let Self { job, at } = self;
        let said = format!("the agent of host {at}, which was stopped");
        until("the host's silence to be long", async || {
            let hosts: Vec<Host> = system.get("/v1/hosts").await?;
            let host = hosts.iter().find(|known| known.id == at);
            Ok(host.filter(|host| host.state == HostState::Unreachable).map(drop))
        })
        .await?;
        until("the job to say that its VM goes on", async || {
            let now = system.job(&job.id).await?;
            ensure!(now.state == JobState::Running && now.started_ms == job.started_ms, "{now:?}");
            let goes_on = now.reason.contains(&said) && now.reason.contains("its VM goes on");
            Ok(goes_on.then_some(()))
        })
        .await?;
        for daemon in ["volume", "agent"] {
            system.lab.keep_away(&at, daemon, false)?;
        }
        system.progresses(&job.id, 2).await?;
        let now = system.job(&job.id).await?;
        ensure!(now.started_ms == job.started_ms, "it has begun anew: {now:?}");
        Ok(())
    }
}
