//! The same guest as a job of Perigee, moved as `perigee vm move` moves it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use perigee_http::Client;
use perigee_lab::Lab;
use perigee_lab::bare::{Machine, wait_for_console};
use perigee_model::job::{
    Access, ClusterVolume, DEFAULT_OWNER, Job, JobSpec, JobVolume, Migration, MigrationState,
    MoveVm, NewVolume, Restart, Start,
};
use perigee_model::volume::VolumeSource;
use perigee_model::{HostId, ImageName, JobId, VmId, VolumeName};

use crate::guest::{Guest, MOUNT, READY};
use crate::results::Measured;
use crate::{BOOT_DEADLINE, DATA_BYTES, MEMORY_BYTES, OUTPUT_BYTES};

const LOOK_EVERY: Duration = Duration::from_millis(20);
const DEADLINE: Duration = Duration::from_secs(300);

pub struct Perigee<'a> {
    lab: &'a Lab,
    client: Client,
    job: JobId,
    vm: VmId,
}

impl<'a> Perigee<'a> {
    /// Submits the job and waits until its guest works.
    pub async fn boot(
        lab: &'a Lab,
        guest: Guest,
        image: &ImageName,
        [near, far]: [&HostId; 2],
    ) -> Result<Self> {
        let client = lab.client(Duration::from_secs(120))?;
        let volume = VolumeName::new(format!("data-{}", guest.name()))?;
        let new = NewVolume {
            name: volume.clone(),
            host: Some(far.clone()),
            size_bytes: Some(DATA_BYTES),
            source: VolumeSource::Empty,
            leave_site: Default::default(),
        };
        client.post::<ClusterVolume>("/v1/volumes", &new).await?;
        let spec = JobSpec {
            name: guest.name().to_owned(),
            image: image.clone(),
            command: guest.command(),
            env: Default::default(),
            cpus: 1,
            memory_bytes: MEMORY_BYTES,
            cpus_max: None,
            memory_max_bytes: None,
            root_bytes: None,
            output_bytes: OUTPUT_BYTES,
            volumes: vec![JobVolume {
                volume,
                mount: MOUNT.to_owned(),
                access: Access::Write,
                ranks: Vec::new(),
            }],
            outputs: Vec::new(),
            outputs_to: None,
            keep_outputs_s: None,
            publish: Vec::new(),
            start: Start::Host(near.clone()),
            may_migrate: false,
            writes: perigee_model::LeaveSite::Never,
            ranks: perigee_model::LeaveSite::Never,
            timeout_s: None,
            has_output_room: false,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            oom_kill: Default::default(),
            inputs: None,
            owner: DEFAULT_OWNER.to_owned(),
            priority: 0,
            restart: Restart::Never,
            network: Default::default(),
            count: 1,
            mpi: false,
            firmware: Default::default(),
            tpm: false,
            rules: Default::default(),
            money: Default::default(),
        };
        let job: Job = client.post("/v1/jobs", &spec).await?;
        let vm = VmId::new(job.id.as_str())?;
        let running = Self { lab, client, job: job.id, vm };
        let console = running.dir(near).join("run/console.log");
        wait_for_console(&console, READY, BOOT_DEADLINE).await?;
        Ok(running)
    }

    /// The directory of the VM at a host.
    fn dir(&self, host: &HostId) -> PathBuf {
        let host = self.lab.dir().join("hosts").join(host.as_str());
        host.join("agent/vms").join(self.vm.as_str())
    }

    /// The process of its QEMU at a host.
    pub fn pid(&self, host: &HostId) -> Result<u32> {
        Ok(Machine::of(self.lab, host, &self.vm)?.1)
    }

    /// QEMU's command line at a host.
    pub fn machine(&self, host: &HostId) -> Result<Machine> {
        Ok(Machine::of(self.lab, host, &self.vm)?.0)
    }

    /// Measures from the request until the API reports that the move has ended.
    pub async fn move_to(&self, to: &HostId) -> Result<Measured> {
        let path = format!("/v1/vms/{}/move", self.vm);
        let wish = MoveVm { host: to.clone(), volumes: Default::default(), confirmed: false };
        let deadline = Instant::now() + DEADLINE;
        let (begun, asked) = loop {
            let begun = Instant::now();
            match self.client.post::<Migration>(&path, &wish).await {
                Ok(migration) => break (begun, migration),
                // The remains of an earlier move are still being removed there. That is not part of this move.
                Err(problem) if Instant::now() > deadline => return Err(problem.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        };
        let migrations = format!("/v1/vms/{}/migrations", self.vm);
        while Instant::now() < deadline {
            let all: Vec<Migration> = self.client.get(&migrations).await?;
            let found = all.into_iter().find(|m| m.id == asked.id).context("the migration")?;
            if found.state.is_final() {
                let whole_ms = begun.elapsed().as_secs_f64() * 1e3;
                return measured(whole_ms, found);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("the migration {} did not end within {DEADLINE:?}", asked.id)
    }

    /// Cancels the job and waits until nothing is left to be cleaned up.
    pub async fn end(self) -> Result<()> {
        let path = format!("/v1/jobs/{}", self.job);
        let _: serde_json::Value =
            self.client.post(&format!("{path}/cancel"), &serde_json::json!({})).await?;
        let deadline = Instant::now() + DEADLINE;
        while Instant::now() < deadline {
            let job: Job = self.client.get(&path).await?;
            if job.state.is_final() {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("the job {} did not end within {DEADLINE:?}", self.job)
    }
}

fn measured(whole_ms: f64, moved: Migration) -> Result<Measured> {
    ensure!(moved.state == MigrationState::Completed, "the move ended so: {}", moved.error);
    let prepare_ms = moved.phases.prepare.map_or(0, |prepare| prepare.total_ms());
    Ok(Measured {
        whole_ms,
        qemu_total_ms: moved.total_ms.saturating_sub(prepare_ms),
        pause_ms: moved.downtime_ms,
        bytes: moved.bytes,
        phases: Some(moved.phases),
    })
}
