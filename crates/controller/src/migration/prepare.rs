//! The preparation before the source is asked: epochs, attachments, and the waiting QEMU.
//!
//! It takes these round trips: the homes issue epochs while the destination attaches the volumes (one), then
//! its agent starts QEMU and answers when QEMU listens (one, plus those that QEMU needs to open its disks).

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use perigee_model::phases::Prepare;
use perigee_model::vm::{Disk, EpochRaise, VmReport, VmSpec, VmStatus};
use perigee_model::{Problem, ProblemKind};

use super::Run;
use crate::cluster::{Cluster, HostLink};
use crate::records::{MovePlan, PlacedDisk};
use crate::storage::{attach, leave_site, volumes};

/// The time from the start of the destination's QEMU until it listens.
const LISTEN_DEADLINE: Duration = Duration::from_secs(60);
/// The longest request to a destination that does not listen yet. It is shorter than the client's deadline.
const LISTEN_WAIT: Duration = Duration::from_secs(10);
/// From the beginning of the preparation until a host that does not answer is not asked again. The migration keeps its
/// place on the link meanwhile.
const PREPARE_PATIENCE: Duration = Duration::from_secs(60);
/// Between two tries; doubled each time up to this.
const PAUSE_MAX: Duration = Duration::from_secs(5);

impl Run {
    /// As [`Self::prepare`], and asks again while a host does not answer. Each part of the preparation can be done again.
    pub(super) async fn prepare_patiently(&mut self) -> Result<VmReport, Problem> {
        let (begun, mut pause) = (Instant::now(), self.cluster.timing.poll);
        loop {
            let problem = match self.prepare().await {
                Err(problem)
                    if problem.kind == ProblemKind::Unavailable
                        && begun.elapsed() < PREPARE_PATIENCE =>
                {
                    problem
                }
                done => return done,
            };
            tracing::info!("{} is prepared again: {problem}", self.record.value.migration.id);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
            // A host that is unreachable by now is not waited for.
            if self.check_while_it_waits().await.is_err() {
                return Err(problem);
            }
        }
    }

    /// Does everything before the source is asked, and measures each part. Returns the destination's report
    /// that it waits.
    async fn prepare(&mut self) -> Result<VmReport, Problem> {
        let begun = Instant::now();
        let placed = self.disks()?;
        let attach = attach(Arc::clone(&self.cluster), self.destination()?, placed.clone());
        let plan = async {
            self.plan(&placed).await?;
            Ok(begun.elapsed())
        };
        let (epochs, ()) = tokio::try_join!(plan, attach)?;
        let both = begun.elapsed();
        let report = self.start_destination().await?;
        self.record.value.migration.phases.prepare = Some(Prepare {
            epochs_ms: milliseconds(epochs),
            attach_ms: milliseconds(both) - milliseconds(epochs),
            qemu_ms: milliseconds(begun.elapsed()) - milliseconds(both),
            begin_ms: 0,
        });
        Ok(report)
    }

    fn disks(&self) -> Result<Vec<PlacedDisk>, Problem> {
        let job = self.cluster.index.of_vm(&self.vm);
        job.and_then(|job| job.placement.clone()).map(|placement| placement.disks).ok_or_else(
            || Problem::conflict(format!("can't move VM {}", self.vm), "its job has ended"),
        )
    }

    /// Issues a new epoch for every disk that the VM writes.
    async fn plan(&mut self, placed: &[PlacedDisk]) -> Result<(), Problem> {
        if self.record.value.plan.is_some() {
            return Ok(());
        }
        let source = self.source()?;
        let report: VmReport = source.agent.get(&self.path()).await?;
        let arrives_by = Some(self.record.value.migration.id.clone());
        let to = self.record.value.migration.to.clone();
        let tunnels = |id| self.cluster.hosts.report(id).is_some_and(|said| said.tunnels_moves);
        let mut spec = VmSpec {
            arrives_by,
            arrives_from: Some(source.id.clone()),
            arrives_compressed: self.record.value.migration.compressed,
            arrives_tunnelled: tunnels(&source.id) && tunnels(&to),
            start: self.record.value.start,
            ..leave_site::confine_arriving(&self.cluster, placed, report.spec, &to)?
        };
        let written = spec.disks.iter_mut().filter(|disk| !disk.read_only);
        let raises = try_join_all(written.map(|disk| self.issue(disk, placed))).await?;
        self.record.value.plan = Some(MovePlan { spec, raises });
        self.record.save().await
    }

    /// Gives a disk its next epoch, issued at its volume's home.
    async fn issue(&self, disk: &mut Disk, placed: &[PlacedDisk]) -> Result<EpochRaise, Problem> {
        let placed =
            placed.iter().find(|placed| placed.volume == disk.volume).ok_or_else(|| {
                Problem::internal(format!("can't move VM {}", self.vm), "it has a disk of no job")
            })?;
        let home = volumes::reachable(&self.cluster, &placed.home)?;
        let from = disk.epoch;
        disk.epoch = attach::issue_epoch(&home, placed).await?;
        Ok(EpochRaise {
            volume: disk.volume.clone(),
            volume_url: home.addresses.volume_url.clone(),
            from,
            to: disk.epoch,
        })
    }

    pub(super) fn planned(&self) -> Result<&MovePlan, Problem> {
        self.record.value.plan.as_ref().ok_or_else(|| {
            Problem::internal(format!("can't move VM {}", self.vm), "its epochs are not issued")
        })
    }

    /// Starts the QEMU that waits for the VM, and waits until it listens.
    async fn start_destination(&mut self) -> Result<VmReport, Problem> {
        let destination = self.destination()?;
        let spec = self.planned()?.spec.clone();
        let mut report: VmReport = destination.agent_slow.put(&self.path(), &spec).await?;
        if self.record.value.io_before.is_empty() {
            // This is stored together with the next change.
            self.record.value.io_before.clone_from(&report.io);
        }
        self.record.value.boot_id.clone_from(&report.boot_id);
        let begun = Instant::now();
        while report.incoming_uri.is_none() {
            if report.status == VmStatus::Gone {
                // To ask again would only show the same.
                let why = format!("QEMU at {} ended: {}", destination.id, report.reason);
                return Err(Problem::internal("can't start the destination", why));
            }
            if begun.elapsed() > LISTEN_DEADLINE {
                let why = format!(
                    "QEMU at {} did not listen within {} s",
                    destination.id,
                    LISTEN_DEADLINE.as_secs()
                );
                return Err(Problem::unavailable("can't start the destination", why));
            }
            let question = format!(
                "{}?after={}&wait_ms={}",
                self.path(),
                report.revision,
                LISTEN_WAIT.as_millis()
            );
            let asked = Instant::now();
            report = destination.agent_wait.get(&question).await?;
            // The pause is for an agent that answers at once.
            let poll = self.cluster.timing.poll;
            if report.incoming_uri.is_none() && asked.elapsed() < poll {
                tokio::time::sleep(poll).await;
            }
        }
        Ok(report)
    }
}

/// Attaches the disks at the destination.
async fn attach(
    cluster: Arc<Cluster>,
    destination: Arc<HostLink>,
    placed: Vec<PlacedDisk>,
) -> Result<(), Problem> {
    attach::attach(&cluster, &placed, &destination.id).await
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
