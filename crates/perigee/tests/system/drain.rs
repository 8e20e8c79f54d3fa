//! A host that is drained under load.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use perigee_lab::balance::{VmAtEnd, make_image};
use perigee_lab::netns::within;
use perigee_model::drain::{DrainFate, HostDrain};
use perigee_model::job::{ClusterVolume, Host, Job, JobState};
use perigee_model::network::ClusterNetwork;
use perigee_model::{HostId, JobId};

use super::tenant_network::World;
use super::{Checked, System, ensure, failed, host, until, with_system, writer_job};

const MIB: u64 = 1 << 20;

/// May not move. It says of itself all the time that it ends in 2 s, and ends when its seed begins with an S.
const SOON: &str = r#"
name: soon
image: debian
memory: 200MiB
placement: {host: home1, move: never}
command:
  - /bin/sh
  - -c
  - |
    seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)
    begin=$(cut -d. -f1 /proc/uptime)
    until [ "$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)" = S ]; do
      sleep 1
      seconds=$(($(cut -d. -f1 /proc/uptime) - begin))
      echo "$seconds/$((seconds + 2)) seconds" > $PERIGEE_PROGRESS
    done
"#;

/// Its port is published at the host that has the gateway of its network. It sends back what comes over a connection.
const SERVES: &str = r#"
name: serves
image: debian
memory: 200MiB
network: blue
publish: ["30080:80"]
placement: {host: home1, move: auto}
command:
  - /bin/sh
  - -c
  - |
    count=0
    while :; do busybox nc -l -p 80 -e /bin/cat; count=$((count + 1)); echo "$count/1000000 clients" > $PERIGEE_PROGRESS; done
"#;

/// All that one says to the other goes over one connection. If that ends, rank 0 ends, and the job with it.
const GANG: &str = r#"
name: gang
image: debian
memory: 200MiB
count: 2
placement: {host: home1, move: auto}
command:
  - /bin/sh
  - -c
  - |
    if [ $PERIGEE_RANK = 0 ]; then
      mkfifo /tmp/open; exec 3<>/tmp/open
      busybox nc -l -p 7000 <&3 | (n=0; while read line; do n=$((n+1)); echo "$n/1000000 lines" > $PERIGEE_PROGRESS; done)
      exit 9
    else
      until (while sleep 0.5; do echo a line; done) | busybox nc n0 7000; do sleep 1; done
      exit 8
    fi
"#;

/// What is at the host: all of it notices if something goes wrong.
struct Load {
    /// A guest that sees one error of its disk ends, and so does one that reads what it has not written.
    writers: Vec<JobId>,
    soon: JobId,
    serves: JobId,
    gang: JobId,
    world: World,
}

const VM: &str = "kept";

impl System {
    async fn drain_of(&self, host: &str) -> Checked<Option<HostDrain>> {
        Ok(self.get::<Host>(&format!("/v1/hosts/{host}")).await?.drain)
    }

    /// What the guest of the VM without a job has said.
    async fn kept(&self) -> Checked<VmAtEnd> {
        let vm = self.vm(VM).await?;
        let said = self.client.get_bytes(&format!("/v1/vms/{VM}/console")).await?;
        Ok(VmAtEnd::of(vm.id, vm.host, &String::from_utf8_lossy(&said)))
    }
}

impl Load {
    async fn begin(system: &System) -> Checked<Self> {
        system.does(&["network", "create", "blue", "--subnet", "10.7.0.0/24", "--nat"])?;
        let world = World::make(system)?;
        let golden = std::env::var("PERIGEE_TEST_IMAGE").expect("with_system has it");
        let golden = std::path::Path::new(&golden).join("debian-pg.raw");
        let image = make_image(&golden, system.lab.dir(), 5).await?.display().to_string();
        system.does(&["image", "import", "busy", &image])?;
        system.volume("own", "home1", 64 * MIB).await?;
        let create = ["vm", "create", VM, "--image", "busy", "--memory", "200MiB"];
        let places = ["--host", "home1", "--volume", "own", "--network", "none"];
        system.does(&[&create[..], &places].concat())?;
        let mut writers = Vec::new();
        for name in ["data", "more"] {
            system.volume(name, "home1", 64 * MIB).await?;
            let of_its_own = format!("volume: {name}");
            let file = writer_job("home1").replace("volume: data", &of_its_own);
            writers.push(system.submit(&file.replace("move: never", "move: auto")).await?.id);
        }
        let soon = system.submit(SOON).await?.id;
        let serves = system.submit(SERVES).await?.id;
        let gang = system.submit(GANG).await?.id;
        let load = Self { writers, soon, serves, gang, world };
        for id in load.writers.iter().chain([&load.gang]) {
            system.progresses(id, 1).await?;
        }
        until("the job to say that it has almost ended", async || {
            Ok(system.job(&load.soon).await?.progress.map(drop))
        })
        .await?;
        load.is_served(system, "home1").await?;
        until("the VM's first file", async || Ok((system.kept().await?.rounds > 0).then_some(())))
            .await?;
        Ok(load)
    }

    /// Whether somebody outside is answered at the published port of this host.
    async fn is_served(&self, system: &System, at: &str) -> Checked<()> {
        let address = system.lab.definition.host_address(&host(at)).expect("a host");
        let ask = || {
            let address = (address, 30080).into();
            let mut stream =
                TcpStream::connect_timeout(&address, Duration::from_secs(5)).map_err(failed)?;
            stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(failed)?;
            let mut back = [0; 5];
            let done = stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut back));
            done.map_err(failed)?;
            ensure!(back == *b"hello", "{back:?}");
            Ok(Some(()))
        };
        let what = format!("an answer of the published port at {at}");
        until(&what, async || within(&self.world.namespace, ask)).await
    }

    /// The job whose end is near is waited for, and ends where it is.
    async fn soon_is_waited_for(&self, system: &System) -> Checked<()> {
        until("the drain to wait for the job's end", async || {
            let left = system.drain_of("home1").await?.and_then(|drain| drain.left);
            let steps = left.unwrap_or_default();
            let step = steps.iter().find(|step| step.name == self.soon.as_str());
            let waits = |why: &str| why.contains("it ends in about");
            Ok(step.filter(|step| step.fate == DrainFate::Waits && waits(&step.why)).map(drop))
        })
        .await?;
        system.stop_writer(&self.soon).await?;
        let ended = system.ended(&self.soon).await?;
        let right = ended.state == JobState::Succeeded && ended.migrations.is_empty();
        ensure!(right, "{:?} {} {:?}", ended.state, ended.reason, ended.migrations);
        Ok(())
    }

    /// All that has left goes on elsewhere.
    async fn has_left(&self, system: &System) -> Checked<()> {
        let kept = system.kept().await?;
        for id in self.writers.iter().chain([&self.gang]) {
            system.progresses(id, 2).await?;
        }
        let elsewhere = |at: Option<&HostId>| at.is_some_and(|at| *at != host("home1"));
        let network: ClusterNetwork = system.get("/v1/networks/blue").await?;
        ensure!(elsewhere(network.gateway_host.as_ref()), "{network:?}");
        let gateway = network.gateway_host.map(|at| at.to_string()).unwrap_or_default();
        self.is_served(system, &gateway).await?;
        let gang = system.job(&self.gang).await?;
        ensure!(gang.members.iter().all(|one| elsewhere(one.host.as_ref())), "{:?}", gang.members);
        let now = until("another file of the VM", async || {
            Ok(Some(system.kept().await?).filter(|now| now.rounds > kept.rounds + 1))
        })
        .await?;
        let right = elsewhere(now.host.as_ref()) && now.begun == 1 && now.broken.is_empty();
        ensure!(right, "{now:?}");
        Ok(())
    }

    /// Ends all of it. The writers read what they have written; the others would go on for ever.
    async fn end(&self, system: &System) -> Checked<()> {
        for id in &self.writers {
            let job = system.job(id).await?;
            let at = job.host.as_ref().filter(|at| **at != host("home1"));
            ensure!(at.is_some(), "{id} is at {:?}", job.host);
            let pauses: Vec<u64> = job.migrations.iter().map(|moved| moved.downtime_ms).collect();
            eprintln!("{id} is at {at:?}, pauses in ms: {pauses:?}");
            system.stop_writer(id).await?;
            let ended = system.ended(id).await?;
            let log = system.log(id).await?;
            ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
            ensure!(log.iter().any(|line| line.starts_with("checked ")), "{log:?}");
        }
        for id in [&self.serves, &self.gang] {
            let job: Job = system.job(id).await?;
            ensure!(job.state == JobState::Running, "{id}: {:?} {}", job.state, job.reason);
            // The second one gives up the outputs.
            for _ in 0..2 {
                system.does(&["job", "cancel", "--now", id.as_str()])?;
            }
            system.ended(id).await?;
        }
        Ok(())
    }
}

/// The controller is killed while the host is drained.
#[test]
fn a_host_is_drained_under_load_of_all_kinds_without_an_error_and_used_again() {
    with_system(async |system| {
        let load = Load::begin(&system).await?;
        let would = system.does(&["host", "drain", "home1", "--dry-run"])?;
        eprintln!("at {:.1} s: {would}", system.begun.elapsed().as_secs_f64());
        let listed = system.does(&["host", "list"])?;
        ensure!(!listed.contains("drain"), "{listed}");
        let begun = std::time::Instant::now();
        system.does(&["host", "drain", "home1"])?;
        load.soon_is_waited_for(&system).await?;
        system.kill_daemon("controller", None).await?;
        until("the controller to answer", async || {
            system.get::<Vec<ClusterVolume>>("/v1/volumes").await.map(Some)
        })
        .await?;
        let drained = system.does(&["host", "drain", "home1", "--wait"])?;
        eprintln!("{drained}after {:.1} s", begun.elapsed().as_secs_f64());
        let listed = system.does(&["host", "list"])?;
        ensure!(listed.contains("up, drained"), "{listed}");
        let volumes: Vec<ClusterVolume> = system.get("/v1/volumes").await?;
        let left = volumes.iter().find(|volume| volume.home == host("home1"));
        ensure!(left.is_none(), "{left:?}");
        let refused =
            system.perigee(&["volume", "create", "new", "--size", "1MiB", "--host", "home1"]);
        let why = String::from_utf8_lossy(&refused.stderr);
        ensure!(why.contains("perigee host undrain home1"), "{why}");
        load.has_left(&system).await?;
        // Once the host is not drained any more, a VM that lacks a CPU may go back.
        load.end(&system).await?;
        system.does(&["host", "undrain", "home1"])?;
        system.volume("new", "home1", MIB).await?;
        until("nothing of what has left to be at home1", async || {
            let volumes: Vec<ClusterVolume> = system.get("/v1/volumes").await?;
            let mut at_home1 = volumes.iter().filter(|volume| volume.home == host("home1"));
            Ok(at_home1.all(|volume| volume.name.as_str() == "new").then_some(()))
        })
        .await
    });
}
