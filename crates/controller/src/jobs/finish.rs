//! The end of a job: ends its migration, fetches its output, removes its VM and volumes, and sets its final
//! state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::{Job, JobOutputs, JobState};
use perigee_model::states::JobEvent;
use perigee_model::{DiskRole, Problem, ProblemKind};

use super::driver::{Run, Step};
use super::stage;
use crate::cleaner::{self, Cleanup};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::paces::Way;
use crate::files::outputs::left_out::{self, LeftOutList};
use crate::files::outputs::{self, Expected, OutputPlace, OutputsTaken};
use crate::files::pace::{paced, while_kept};
use crate::planning;
use crate::records::{
    Ending, JobRecord, KeptOutputs, MigrationIntent, MigrationRecord, PlacedDisk,
    migration_intent_key, migration_prefix, owner_of, start_of, vm_of,
};
use crate::storage::{leave_site, volumes};

/// The name of the cleanup at a job's end. The members of a gang that starts again end once in each of its runs, with the
/// same ids, and the cleanups of earlier runs may still wait for hosts.
fn end_name(record: &JobRecord) -> String {
    let part = match record.restarts {
        0 => "end".to_owned(),
        run => format!("end-r{run}"),
    };
    cleaner::name_of(&record.job, &part)
}

/// The deadline for the first byte of an output. The others have the deadline of every received file.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// Outputs for which there was no room are fetched again after this, if nobody has made room earlier.
const NO_ROOM_AGAIN: Duration = Duration::from_secs(60);

/// The repository had no room for a job's outputs.
pub struct NoRoom {
    /// What the tenant's quota had left then.
    free_bytes: u64,
    since: Instant,
    problem: Problem,
}

impl Run {
    /// Removes everything that was made for the job. What remains at a host that does not answer is left to the
    /// cleaner, and the job does not wait for it.
    pub(super) async fn finish(&mut self) -> Result<Step, Problem> {
        // From now on no move of its VM begins.
        if self.cluster.index.is_move_being_recorded(&vm_of(&self.id)) {
            return Ok(Step::Wait(self.cluster.timing.poll));
        }
        let moves = self.unsettled().await?;
        if moves.iter().any(|record| !record.migration.state.is_final()) {
            return Ok(Step::Wait(self.cluster.timing.poll));
        }
        if self.homes_are_changing().await? {
            if let Some(why) = self.why_homes_wait() {
                self.say_end_waits(&why).await?;
            }
            return Ok(Step::Wait(self.cluster.timing.poll));
        }
        self.drop_restored_volumes().await?;
        if let Some(cleanup) = cleanup_of(&self.record.value, &moves) {
            cleaner::hand_over(&self.cluster, &cleanup).await?;
            cleaner::try_now(&self.cluster, &self.id).await?;
            self.fence_vms_left().await?;
        }
        if let Some(host) = self.job().host.clone() {
            self.drop_trace(&host).await;
        }
        self.samples.store(&self.cluster, &self.files).await?;
        self.forget_volume_moves().await?;
        self.drop_partial_outputs().await;
        let record = &mut self.record.value;
        let event = match record.ending {
            Some(Ending::Collected { exit_code }) if record.job.state == JobState::Collecting => {
                JobEvent::Collected { exit_code }
            }
            Some(Ending::Cancelled) => JobEvent::Cancelled,
            Some(Ending::Collected { .. } | Ending::Failed) | None => JobEvent::Failed,
        };
        if matches!(record.ending, Some(Ending::Collected { .. })) {
            let run = planning::run_of_member(&self.cluster, record);
            match record.kind.member_mut() {
                // The time of a gang's member says nothing of a job with one VM.
                Some(member) => member.run = run.map(Box::new),
                None => planning::job_ended(&self.cluster, record).await?,
            }
        }
        self.settle().await?;
        let record = &mut self.record.value;
        record.job.state = record.job.state.next(event)?;
        record.job.ended_ms = Some(now_ms());
        self.record.value.end_goes_on();
        self.record.save().await?;
        if self.persistent().is_some() && !cleaner::is_left(&self.cluster, &self.id).await? {
            super::erase(&self.cluster, &self.record.value).await?;
        }
        Ok(Step::Again)
    }

    /// A VM that could not be removed may still run, and after the job's end other jobs may use its volumes. So
    /// its writer epochs are changed, and it can't write any more. If a home does not answer, the job waits.
    async fn fence_vms_left(&self) -> Result<(), Problem> {
        let left: Vec<Cleanup> = self.cluster.records.list(&cleaner::prefix(&self.id)).await?;
        let name = end_name(&self.record.value);
        let end = left.iter().find(|cleanup| cleanup.name == name && !cleanup.vms.is_empty());
        let Some(end) =
            end.filter(|_| self.record.value.vm_started || self.job().started_ms.is_some())
        else {
            return Ok(());
        };
        let hosts: Vec<&str> = end.vms.iter().map(|(host, _)| host.as_str()).collect();
        let kept = self.placement()?.disks.iter().filter(|disk| !disk.read_only && !disk.temporary);
        for disk in kept {
            // A home that was removed has no volumes left to protect.
            let Ok(home) = self.cluster.hosts.get(&disk.home) else { continue };
            match stage::take_over(&home, disk).await {
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                Err(problem) => {
                    let (volume, hosts) = (&disk.volume, hosts.join(", "));
                    let what = format!(
                        "can't keep the VM that may still run at {hosts} from volume {volume}"
                    );
                    let why = format!("its home {}: {}", disk.home, problem.why);
                    return Err(Problem::unavailable(what, why));
                }
                Ok(epoch) => tracing::info!("volume {} has epoch {}", disk.volume, epoch.0),
            }
        }
        Ok(())
    }

    /// The migrations that were not yet taken into account. A running one is told to stop.
    pub(super) async fn unsettled(&self) -> Result<Vec<MigrationRecord>, Problem> {
        let vm = vm_of(&self.id);
        let mut moves: Vec<MigrationRecord> =
            self.cluster.records.list(&migration_prefix(&vm)).await?;
        moves.retain(|record| record.number > self.record.value.settled);
        for record in moves.iter().filter(|record| !record.migration.state.is_final()) {
            let key = migration_intent_key(&vm, record.number);
            let abandon = |intent: Option<MigrationIntent>| MigrationIntent {
                abandon: true,
                ..intent.unwrap_or_default()
            };
            self.cluster.records.update(&key, abandon).await?;
            // The task that recorded it may not have requested its driver yet.
            self.cluster.drive_migration(record);
        }
        Ok(moves)
    }

    /// Writes what is in the output tar, at the home of its disk, into the repository. Returns why the job failed if the
    /// tar is not what the guest has written, and what people are to know.
    pub(super) async fn fetch_output(&mut self) -> Result<Fetched, Problem> {
        let nothing = Fetched::default();
        let Some(output) = self.record.value.finished.clone() else { return Ok(nothing) };
        let placement = self.placement()?;
        let disk = placement.disks.iter().find(|disk| disk.role == DiskRole::Output);
        let Some(disk) = disk else { return Ok(nothing) };
        if disk.leave_site.is_never() && !leave_site::is_controller_at(&self.cluster, &disk.home) {
            self.keep_output().await?;
            let notes = self.kept_output().into_iter().collect();
            return Ok(Fetched { notes, ..nothing });
        }
        let (place, elsewhere) = outputs::place_for(&self.cluster, self.job()).await?;
        self.wait_for_room(&place).await?;
        let home = volumes::reachable(&self.cluster, &disk.home)?;
        let path = format!("/v1/volumes/{}/data?length_bytes={}", disk.volume, output.bytes);
        let answer = tokio::time::timeout(ANSWER_DEADLINE, home.volume.get_response(&path));
        let answer = answer.await.map_err(|_| {
            let why = format!("no answer within {} s", ANSWER_DEADLINE.as_secs());
            Problem::unavailable(format!("can't read volume {}", disk.volume), why)
        })??;
        let expected = Expected {
            bytes: output.bytes,
            sha256: output.sha256,
            room_bytes: self.job().spec.output_bytes,
        };
        let pace = self.cluster.paces.of(&home, Way::Out);
        let body = paced(answer.bytes_stream(), Arc::clone(&pace));
        // Measured before: what was written until the room ended is given free some time later.
        let free_bytes = outputs::free_bytes(&self.cluster, &place).await?;
        let taking = outputs::take(&self.cluster, &self.id, &place, body, &expected);
        let taken = while_kept(&self.cluster, &home, Way::Out, &pace, taking).await;
        if let Err(problem) = &taken
            && problem.kind == ProblemKind::NoSpace
        {
            self.no_room =
                Some(NoRoom { free_bytes, since: Instant::now(), problem: problem.clone() });
        }
        let taken = taken?;
        let OutputsTaken { files, bytes, left_out, damaged } = taken;
        self.record.value.kept_outputs = kept_outputs(&self.cluster, self.job(), &place);
        let kept_until_ms = self.record.value.kept_outputs.as_ref().map(KeptOutputs::until_ms);
        self.record.value.job.outputs =
            Some(JobOutputs { at: place.to_string(), files, bytes, kept_until_ms });
        self.record.save().await?;
        let damaged = damaged.map(|why| format!("its outputs in {place} may be damaged: {why}"));
        Ok(Fetched { damaged, notes: elsewhere.into_iter().collect(), refused: left_out })
    }

    /// When the repository had no room, all is read again only if it has more now, or after a while: more than a quota
    /// can be full.
    ///
    /// # Errors
    /// What it said then.
    async fn wait_for_room(&self, place: &OutputPlace) -> Result<(), Problem> {
        let Some(NoRoom { free_bytes, since, problem }) = &self.no_room else { return Ok(()) };
        let is_less = outputs::free_bytes(&self.cluster, place).await? <= *free_bytes;
        if is_less && since.elapsed() < NO_ROOM_AGAIN { Err(problem.clone()) } else { Ok(()) }
    }

    /// What was written into the repository before the fetching of its outputs was given up.
    pub(super) async fn drop_partial_outputs(&self) {
        if self.record.value.finished.is_none() || self.job().outputs.is_some() {
            return;
        }
        if let Err(problem) = outputs::remove_part(&self.cluster, self.job()).await {
            tracing::warn!("job {}: a part of its outputs stays: {problem}", self.id);
        }
    }

    /// A job that begins anew has no outputs yet.
    pub(super) async fn drop_outputs(&self) {
        let removed = match self.job().outputs {
            Some(_) => outputs::remove(&self.cluster, self.job()).await,
            None => outputs::remove_part(&self.cluster, self.job()).await,
        };
        let forgotten = left_out::forget(&self.cluster, &self.id).await;
        let removed = removed.and(forgotten);
        if let Err(problem) = removed {
            tracing::warn!("job {}: outputs of an earlier start stay: {problem}", self.id);
        }
    }
}

/// For how long a job's outputs are kept from now on, as its file says or else the controller was told.
pub(super) fn kept_outputs(
    cluster: &Cluster,
    job: &Job,
    place: &OutputPlace,
) -> Option<KeptOutputs> {
    let keep_s = job.spec.keep_outputs_s.or(cluster.settings.keep_outputs_s.get());
    let for_ms = keep_s.filter(|_| place.is_own)?.saturating_mul(1000);
    Some(KeptOutputs { since_ms: now_ms(), for_ms })
}

/// What there is to say of outputs that were fetched.
#[derive(Debug, Default)]
pub(super) struct Fetched {
    pub damaged: Option<String>,
    pub notes: Vec<String>,
    /// The files that the repository did not take.
    pub refused: LeftOutList,
}

impl Run {
    /// Keeps the output's volume: the output may not leave its site, and the controller is at another one.
    async fn keep_output(&mut self) -> Result<(), Problem> {
        let placement = self.record.value.placement.as_mut();
        let disks = placement.into_iter().flat_map(|placement| &mut placement.disks);
        for disk in disks.filter(|disk| disk.role == DiskRole::Output) {
            disk.temporary = false;
        }
        self.record.save().await
    }

    /// Where the output is, in words, if it did not come to the controller.
    fn kept_output(&self) -> Option<String> {
        let disks = self.record.value.placement.iter().flat_map(|placement| &placement.disks);
        let mut outputs = disks.filter(|disk| disk.role == DiskRole::Output && !disk.temporary);
        let PlacedDisk { volume, home, .. } = outputs.next()?;
        Some(format!(
            "its output may not leave its site: it is in volume {volume} at {home}, as a tar"
        ))
    }
}

/// Everything that was made for the job, and all hosts where its VM may be. `None` if the job was never placed.
fn cleanup_of(record: &JobRecord, unsettled: &[MigrationRecord]) -> Option<Cleanup> {
    let placement = record.placement.as_ref()?;
    let mut hosts: Vec<_> = record.job.host.iter().chain(&record.left).cloned().collect();
    for moved in unsettled.iter().filter(|moved| moved.may_have_begun()) {
        hosts.push(moved.migration.from.clone());
        hosts.push(moved.migration.to.clone());
    }
    hosts.push(placement.start.clone());
    hosts.sort();
    hosts.dedup();
    let name = end_name(record);
    let mut cleanup = Cleanup::new(&record.job.id, &name, start_of(record, 0).whole_run());
    cleanup.owner = Some(owner_of(&record.job));
    for host in hosts {
        cleanup.add_host(&record.job.id, &host, &placement.disks);
    }
    cleanup.volumes = placement
        .disks
        .iter()
        .filter(|disk| disk.temporary)
        .map(|disk| (disk.home.clone(), disk.volume.clone()))
        .collect();
    Some(cleanup)
}
