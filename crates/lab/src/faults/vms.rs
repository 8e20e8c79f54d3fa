//! Cells with a VM: a guest writes and verifies files while its VM migrates and a fault comes.
//!
//! One VM goes from cell to cell and back and forth between the sites. When a cell ends it, a new one is started on the
//! same volume.

use std::path::Path;
use std::time::{Duration, Instant};

use perigee_model::job::{
    ClusterImage, Job, JobState, LogLine, Migration, MigrationState, MoveVm, Vm, VmVolume,
};
use perigee_model::volume::VolumeInfo;
use perigee_model::volume_move::{VolumeMoveState, VolumesOnMove};
use perigee_model::{Epoch, HostId, ImageName, JobId, Problem, VmId, VolumeName, job_file};

use super::ground::{Ground, STEP_MAX, until};
use super::inflict::{Ends, inflict, qemu_of};
use super::outcome::Ran;
use super::table::{Cell, Fault, Phase, Placement};
use super::watch::Watch;
use super::writer::QemuIo;
use crate::soak::left;

const WORK: &str = include_str!("work.sh");
const DATA: &str = "faults-data";
const DATA_BYTES: u64 = 64 << 20;
const BOOT_MAX: Duration = Duration::from_secs(400);
/// A migration or a move goes on or is undone within this time after the fault has gone.
const MOVE_MAX: Duration = Duration::from_secs(400);
/// For requests that wait for an import.
const IMPORT_MAX: Duration = Duration::from_secs(600);
const LOOK_FOR_PHASE_EVERY: Duration = Duration::from_millis(3);
/// The guest must finish this many rounds after the fault. The first one may have begun before the fault ended.
const ROUNDS: u64 = 2;

/// The guest of the cells, and where it is.
pub struct Guest<'a> {
    ground: &'a Ground<'a>,
    job: JobId,
    vm: VmId,
}

/// Imports the image and makes the volume of the guests.
///
/// # Errors
/// The import fails.
pub async fn prepare(ground: &Ground<'_>, image: &Path) -> Result<(), Problem> {
    let name =
        ImageName::new("debian").map_err(|e| Problem::internal("can't name the image", e))?;
    let client = ground.lab.client(IMPORT_MAX)?;
    let new = crate::images::image_of(&client, name, image).await?;
    let _: ClusterImage = client.post("/v1/images", &new).await?;
    ground.empty_volume(&data()?, &ground.cloud, DATA_BYTES).await.map(drop)
}

fn data() -> Result<VolumeName, Problem> {
    VolumeName::new(DATA).map_err(|error| Problem::internal("can't name a volume", error))
}

impl<'a> Guest<'a> {
    /// Starts a VM at the first host of site `home`.
    ///
    /// # Errors
    /// It does not work in time.
    pub async fn start(ground: &'a Ground<'a>) -> Result<Self, Problem> {
        let script: String = WORK.lines().map(|line| format!("    {line}\n")).collect();
        let text = format!(
            "name: faults\nimage: debian\nmemory: 200MiB\noutput: 16MiB\nvolumes:\n  - volume: {DATA}\n\
             placement:\n  host: {}\n  move: never\ncommand:\n  - /bin/sh\n  - -c\n  - |\n{script}",
            ground.home
        );
        let spec = job_file::parse(&text, "faults.yaml")?.spec;
        let job: Job = ground.controller.post("/v1/jobs", &spec).await?;
        let vm = VmId::new(job.id.as_str())
            .map_err(|error| Problem::internal("can't name the VM", error))?;
        let guest = Self { ground, job: job.id, vm };
        guest.works(1, BOOT_MAX).await?;
        Ok(guest)
    }

    /// Moves the VM to the other site, causes the fault in the cell's phase, and checks the result.
    ///
    /// # Errors
    /// Something that was waited for did not come.
    pub async fn run(&self, cell: Cell) -> Result<Ran, Problem> {
        let ends = self.ends().await?;
        let before = self.data_volume().await?.1.epoch;
        let watch = Watch::vcpus(self.ground.lab, &self.vm, &ends.old, &ends.new);
        let migration = self.begin(cell.placement, &ends).await?;
        let mut ran = Ran { is_seen: self.sees(cell, &migration, &ends).await?, ..Ran::default() };
        if ran.is_seen {
            inflict(self.ground.lab, cell.fault, &ends).await?;
        }
        let ended = self.ended(&migration).await?;
        let is_there = ended.state == MigrationState::Completed;
        ran.ended = match is_there {
            true => "completed".to_owned(),
            false => format!("undone: {}", ended.error),
        };
        if !is_there && ended.error.is_empty() {
            ran.faults.push("the migration does not say why it was undone".to_owned());
        }
        if self.is_over().await? {
            return self.lost(cell, ran).await;
        }
        if is_there && cell.placement == Placement::Follow {
            self.volumes_are_at(&ends.new).await?;
        }
        self.works(ROUNDS, STEP_MAX + MOVE_MAX).await?;
        ran.faults.extend(watch.end().await?);
        let expected = if is_there { &ends.new } else { &ends.old };
        // The job's driver sees the end of a migration later than the one that records it.
        let is_at = async || Ok((self.vm().await?.host.as_ref() == Some(expected)).then_some(()));
        if let Err(problem) = until("the VM's host", STEP_MAX, is_at).await {
            ran.faults
                .push(format!("{}, and the VM is not at {expected}: {}", ran.ended, problem.why));
        }
        if is_there {
            ran.faults.extend(self.stale_write(before).await?);
        }
        ran.faults.extend(self.left_elsewhere().await?);
        Ok(ran)
    }

    /// Judges a job that has ended. That is right only if the killed QEMU was the VM already and the job says so.
    async fn lost(&self, cell: Cell, mut ran: Ran) -> Result<Ran, Problem> {
        let job: Job = self.ground.controller.get(&format!("/v1/jobs/{}", self.job)).await?;
        let is_its_end = cell.fault == Fault::KillNewQemu && cell.phase == Phase::Switching;
        if is_its_end && job.exit_code.is_none() && !job.reason.is_empty() {
            ran.ended = format!("the VM was killed: {}", job.reason);
        } else {
            ran.faults.push(self.failure(&job).await);
        }
        Ok(ran)
    }

    async fn failure(&self, job: &Job) -> String {
        let path = format!("/v1/jobs/{}/log?after=0", self.job);
        let log: Vec<LogLine> = self.ground.controller.get(&path).await.unwrap_or_default();
        let last: Vec<String> = log.into_iter().rev().take(3).map(|line| line.line).collect();
        format!("the job has ended: {:?} {}; its log ends with {last:?}", job.state, job.reason)
    }

    /// Whether the job has ended, in whatever way.
    pub async fn is_over(&self) -> Result<bool, Problem> {
        until("the state of the job", STEP_MAX, async || {
            let job: Job = self.ground.controller.get(&format!("/v1/jobs/{}", self.job)).await?;
            Ok(Some(job.state.is_final()))
        })
        .await
    }

    /// Cancels the job, and waits until nothing of it is left. Returns what is left, for people.
    ///
    /// # Errors
    /// It does not end.
    pub async fn end(self) -> Result<Vec<String>, Problem> {
        let path = format!("/v1/jobs/{}", self.job);
        until("the end of the job", STEP_MAX, async || {
            let job: Job = self.ground.controller.get(&path).await?;
            if !job.state.is_final() {
                let none = serde_json::json!({});
                let _: serde_json::Value =
                    self.ground.controller.post(&format!("{path}/cancel"), &none).await?;
            }
            Ok(job.state.is_final().then_some(()))
        })
        .await?;
        left::wait_until_nothing(self.ground.lab, STEP_MAX).await
    }

    async fn vm(&self) -> Result<Vm, Problem> {
        let path = format!("/v1/vms/{}", self.vm);
        until("the VM", STEP_MAX, async || self.ground.controller.get(&path).await.map(Some)).await
    }

    async fn ends(&self) -> Result<Ends, Problem> {
        let old = self
            .vm()
            .await?
            .host
            .ok_or_else(|| Problem::internal(format!("VM {}", self.vm), "it is at no host"))?;
        let Ground { home, cloud, .. } = self.ground;
        let new = if old == *cloud { home } else { cloud };
        Ok(Ends { old, new: new.clone(), vm: Some(self.vm.clone()) })
    }

    /// The data volume at its home.
    async fn data_volume(&self) -> Result<(HostId, VolumeInfo), Problem> {
        let name = data()?;
        until("the data volume", STEP_MAX, async || {
            let home = self.ground.volume(&name).await?.home;
            let info = self.ground.server(&home)?.get(&format!("/v1/volumes/{name}")).await?;
            Ok(Some((home, info)))
        })
        .await
    }

    /// Asks for the migration again and again, because it is refused until what an earlier one has left is removed.
    async fn begin(&self, placement: Placement, ends: &Ends) -> Result<Migration, Problem> {
        let volumes = match placement {
            Placement::Follow => VolumesOnMove::Follow,
            _ => VolumesOnMove::Stay,
        };
        let request = MoveVm { host: ends.new.clone(), volumes, confirmed: false };
        let path = format!("/v1/vms/{}/move", self.vm);
        until("the migration to begin", STEP_MAX, async || {
            self.ground.controller.post::<Migration>(&path, &request).await.map(Some)
        })
        .await
    }

    async fn migration(&self, id: &Migration) -> Result<Migration, Problem> {
        let path = format!("/v1/vms/{}/migrations", self.vm);
        let all: Vec<Migration> = self.ground.controller.get(&path).await?;
        let found = all.into_iter().find(|migration| migration.id == id.id);
        found.ok_or_else(|| Problem::not_found("can't find the migration", "it is not listed"))
    }

    /// Waits for the phase. Returns whether it was seen.
    async fn sees(&self, cell: Cell, begun: &Migration, ends: &Ends) -> Result<bool, Problem> {
        let end = Instant::now() + MOVE_MAX;
        while Instant::now() < end {
            let migration = self.migration(begun).await?;
            let (is_now, is_past) = match (cell.phase, migration.state) {
                (Phase::Preparing, MigrationState::Preparing)
                | (Phase::Copying, MigrationState::Copying)
                | (Phase::Switching, MigrationState::Switching) => (true, false),
                (Phase::Copying | Phase::Switching, MigrationState::Preparing)
                | (Phase::Switching, MigrationState::Copying) => (false, false),
                (Phase::Filling | Phase::Drop, state) if !state.is_final() => (false, false),
                (Phase::Drop, MigrationState::Completed) if cell.placement == Placement::Stay => {
                    (true, false)
                }
                (Phase::Filling | Phase::Drop, MigrationState::Completed) => {
                    self.sees_volumes(cell.phase, ends).await?
                }
                _ => (false, true),
            };
            let is_ready = cell.fault != Fault::KillNewQemu
                || qemu_of(self.ground.lab, &ends.new, &self.vm).is_some();
            if is_past || (is_now && is_ready) {
                return Ok(is_now);
            }
            tokio::time::sleep(LOOK_FOR_PHASE_EVERY).await;
        }
        let why = format!("waited {} s for {cell}", MOVE_MAX.as_secs());
        Err(Problem::unavailable("can't see the migration's phase", why))
    }

    /// Whether a volume that follows is in the phase, and whether the phase is over for all.
    async fn sees_volumes(&self, phase: Phase, ends: &Ends) -> Result<(bool, bool), Problem> {
        let vm = self.vm().await?;
        let to_new: Vec<VolumeMoveState> = vm
            .volumes
            .iter()
            .filter_map(|volume| volume.last_move.as_ref())
            .filter(|last| last.to == ends.new)
            .map(|last| last.state)
            .collect();
        let wanted = match phase {
            Phase::Filling => VolumeMoveState::Filling,
            _ => VolumeMoveState::Completed,
        };
        let is_now = to_new.contains(&wanted);
        let is_moving = vm.volumes.iter().any(VmVolume::is_moving);
        Ok((
            is_now,
            !is_now && !is_moving && vm.host.as_ref() == Some(&ends.new) && !to_new.is_empty(),
        ))
    }

    async fn ended(&self, begun: &Migration) -> Result<Migration, Problem> {
        let mut last = String::new();
        let ended = until("the migration's end", MOVE_MAX, async || {
            let now = self.migration(begun).await?;
            last = format!("{:?}: {}", now.state, now.error);
            Ok(now.state.is_final().then_some(now))
        })
        .await;
        ended.map_err(|problem| {
            let why = format!("{}; the migration is {last}", problem.why);
            Problem::unavailable(problem.what, why)
        })
    }

    /// Waits until the volumes that follow have their homes and all of their data at the host.
    async fn volumes_are_at(&self, host: &HostId) -> Result<(), Problem> {
        let mut last = String::new();
        let done = until("the volumes of the VM at its host", MOVE_MAX, async || {
            let vm: Vm = self.ground.controller.get(&format!("/v1/vms/{}", self.vm)).await?;
            let is_there = |volume: &VmVolume| !volume.is_moving() && volume.home == *host;
            let elsewhere = vm.volumes.iter().find(|volume| !is_there(volume));
            last = elsewhere.map_or_else(String::new, |volume| format!("{volume:?}"));
            Ok(elsewhere.is_none().then_some(()))
        })
        .await;
        done.map_err(|problem| {
            Problem::unavailable(problem.what, format!("{}; {last}", problem.why))
        })
    }

    /// Waits until the guest has written and verified more rounds.
    async fn works(&self, more: u64, deadline: Duration) -> Result<(), Problem> {
        let mut first = None;
        let mut last = String::new();
        let works = until("the guest's next rounds", deadline, async || {
            let job: Job = self.ground.controller.get(&format!("/v1/jobs/{}", self.job)).await?;
            if job.state.is_final() {
                // The caller reports it.
                return Ok(Some(Err(self.failure(&job).await)));
            }
            let done = job.progress.as_ref().filter(|_| job.state == JobState::Running);
            let done = done.map_or(0, |progress| progress.done);
            last = format!("{:?} {}, {done} rounds", job.state, job.reason);
            let start = *first.get_or_insert(done);
            Ok((done >= start + more).then_some(Ok(())))
        })
        .await;
        match works {
            Ok(Ok(())) => Ok(()),
            Ok(Err(ended)) => Err(Problem::internal("can't go on in the guest", ended)),
            Err(problem) => Err(Problem::unavailable(
                problem.what,
                format!("{}; the job is {last}", problem.why),
            )),
        }
    }

    /// A write of the epoch before the migration must be refused.
    async fn stale_write(&self, before: Epoch) -> Result<Option<String>, Problem> {
        let (home, info) = self.data_volume().await?;
        if info.epoch == before {
            return Ok(Some(format!("the epoch is {before} before and after the migration")));
        }
        let export = format!("{DATA}@{before}");
        let mut client = QemuIo::open(&self.ground.socket(&home), &export).await?;
        let said = client.tell(&format!("write -P 255 {} 4096", DATA_BYTES - 4096)).await?;
        let is_refused = said.contains("failed");
        Ok((!is_refused)
            .then(|| format!("a write with the old epoch {before} got through: {said}")))
    }

    /// What other hosts still have of the VM after a while.
    async fn left_elsewhere(&self) -> Result<Vec<String>, Problem> {
        let mut last = Vec::new();
        let gone = until("what the VM has left elsewhere to be gone", STEP_MAX, async || {
            last = left::elsewhere(self.ground.lab, &self.vm().await?).await?;
            Ok(last.is_empty().then_some(()))
        })
        .await;
        match gone {
            Ok(()) => Ok(Vec::new()),
            Err(problem) if last.is_empty() => Err(problem),
            Err(_) => Ok(last.iter().map(|what| format!("left behind: {what}")).collect()),
        }
    }
}
