//! The new home copies what is still at the old one; then the old one keeps a shadow of the volume.

use std::sync::Arc;
use std::time::Instant;

use perigee_model::home::{HomeState, Tenure, VolumeHome};
use perigee_model::volume::AllAdmittedHosts;
use perigee_model::volume_move::VolumeMoveEvent;
use perigee_model::{HostId, Problem, ProblemKind};

use super::{Run, Step};
use crate::cluster::{Detachment, HostLink};
use crate::records::{VolumeRecord, volume_key};
use crate::storage::left_behind;

impl Run<'_> {
    pub(super) async fn fill(&mut self) -> Result<Step, Problem> {
        let Some(to) = self.to() else { return self.bring_back().await };
        let VolumeHome { home, failed, .. } = to.volume.get(&self.path("home")).await?;
        let (missing_bytes, is_deleted) = match home {
            HomeState::Here { tenure, missing_bytes } if self.is_of_move(tenure) => {
                (missing_bytes, false)
            }
            HomeState::NotHere { had, .. } if self.is_of_move(had) => {
                self.may_forget_deleted(&to).await?;
                (0, true)
            }
            home => return Err(self.odd(&to, &home)),
        };
        self.progress(missing_bytes, failed).await?;
        let Some(from) = self.from() else {
            return self.without_old_home(missing_bytes).await;
        };
        let left = self.tell_hosts().await;
        if missing_bytes > 0 {
            return Ok(Step::Wait(self.cluster.timing.figures));
        }
        let left = self.let_in(&from, left).await;
        if !is_deleted && !left.is_empty() {
            let names: Vec<&str> = left.iter().map(|host| host.as_str()).collect();
            let why =
                format!("these hosts may still look for it at {}: {}", from.id, names.join(", "));
            return Err(Problem::unavailable(
                format!("can't delete what is left of volume {} there", self.view().volume),
                why,
            ));
        }
        if is_deleted {
            self.forget_at(&from).await?;
        } else {
            self.leave_shadow(&from).await?;
        }
        self.end(VolumeMoveEvent::Filled, String::new()).await?;
        if is_deleted {
            super::request::forget(&self.cluster, &self.view().volume).await?;
        }
        Ok(Step::Again)
    }

    /// Of the hosts that could not be told of the new home, those that the old one lets in. The others can't have the volume
    /// open there, so nobody waits for them.
    async fn let_in(&self, from: &HostLink, mut left: Vec<HostId>) -> Vec<HostId> {
        if left.is_empty() {
            return left;
        }
        // If the old home does not say whom it lets in, all of them are waited for.
        let Ok(all) = from.volume.get::<AllAdmittedHosts>("/v1/admissions").await else {
            return left;
        };
        let hosts = all.volumes.get(&self.view().volume);
        let is_let_in = |host: &HostId| hosts.is_some_and(|hosts| hosts.contains(host));
        left.retain(|host| *host == from.id || is_let_in(host));
        left
    }

    /// Whether the volume has this tenure since it moved. A new home that was set up anew knows of none, and
    /// another volume of the name has others.
    fn is_of_move(&self, tenure: Tenure) -> bool {
        let before = self.record.value.tenure;
        before.is_some_and(|before| tenure > before && tenure.incarnation() == before.incarnation())
    }

    /// The controller lets nobody delete the volume before all of it is copied, but somebody may have asked
    /// the new home itself. Clones there may then still need what the old one keeps.
    async fn may_forget_deleted(&self, to: &HostLink) -> Result<(), Problem> {
        let view = self.view();
        if view.missing_bytes == Some(0) {
            return Ok(());
        }
        let Some(from) = self.from() else { return Ok(()) };
        let HomeState::Departed { tenure: Tenure(tenure), .. } = self.home_at(&from).await? else {
            return Ok(());
        };
        let why = format!(
            "the volume was deleted at {} before all of it was copied; {} keeps what clones may need",
            to.id, from.id
        );
        Err(Problem::unavailable(self.what(), why).next(format!(
            "when nothing at {} stands on the volume: curl -X DELETE '{}{}?tenure={tenure}'",
            to.id,
            from.addresses.volume_url,
            self.path("departed"),
        )))
    }

    async fn progress(
        &mut self,
        missing_bytes: u64,
        failed: Option<String>,
    ) -> Result<(), Problem> {
        let view = &mut self.record.value.view;
        let problem = failed.map_or_else(String::new, |why| {
            format!(
                "{} could not copy the rest when it last tried, and tries again: {why}",
                view.to
            )
        });
        let left = self.pace.left(Instant::now(), missing_bytes);
        let left_ms = left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        let before = (view.missing_bytes, view.left_ms.is_some());
        if before == (Some(missing_bytes), left_ms.is_some()) && view.problem == problem {
            return Ok(());
        }
        (view.missing_bytes, view.left_ms, view.problem) = (Some(missing_bytes), left_ms, problem);
        self.record.save().await
    }

    /// Whatever was not copied before the old home was removed is gone.
    async fn without_old_home(&mut self, missing_bytes: u64) -> Result<Step, Problem> {
        if missing_bytes == 0 {
            self.end(VolumeMoveEvent::Filled, String::new()).await?;
            return Ok(Step::Again);
        }
        let from = &self.view().from;
        let why = format!(
            "host {from} was removed, and with it {missing_bytes} bytes that were not copied yet"
        );
        self.lost(why).await
    }

    /// Drops the layers at the old home, and its attachment where no VM needs it.
    async fn forget_at(&self, from: &Arc<HostLink>) -> Result<(), Problem> {
        let Some(before) = self.record.value.tenure else { return Ok(()) };
        let Tenure(tenure) = before.next();
        unless_gone(
            from.volume.delete(&format!("{}?tenure={tenure}", self.path("departed"))).await,
        )?;
        self.detach_at(from).await
    }

    /// The old home keeps its layers for a while if it has room. Otherwise they are deleted.
    async fn leave_shadow(&self, from: &Arc<HostLink>) -> Result<(), Problem> {
        let Some(before) = self.record.value.tenure else { return Ok(()) };
        if !left_behind::has_room(&self.cluster, from).await {
            return self.forget_at(from).await;
        }
        left_behind::keep(&self.cluster, &self.view().volume, &from.id, before.next()).await?;
        self.detach_at(from).await
    }

    async fn detach_at(&self, from: &Arc<HostLink>) -> Result<(), Problem> {
        let volume = &self.view().volume;
        let Detachment::Held(_detaching) = self.cluster.index.begin_detachment(&from.id, volume)
        else {
            return Ok(());
        };
        match from.volume.delete(&format!("/v1/attachments/{volume}?unless_open=true")).await {
            // Clients of that host have it open, and need the attachment when their server starts again.
            Err(problem) if problem.kind == ProblemKind::Conflict => Ok(()),
            done => unless_gone(done),
        }
    }

    /// The new home was removed. The old one still has what the volume was when its move began; a
    /// job's own volume is no use like that. But a disk that a VM without a job keeps while it is off goes back too.
    pub(super) async fn bring_back(&mut self) -> Result<Step, Problem> {
        let to = self.view().to.clone();
        if self.cluster.index.is_promoted(&self.view().volume) {
            let why = "a replica of it is becoming the volume";
            return Err(Problem::unavailable(self.what(), why));
        }
        let is_listed = self.record.value.listed;
        let is_kept = is_listed || super::is_kept_by_a_vm(&self.cluster, &self.view().volume);
        let from = self.from().filter(|_| is_kept);
        let (Some(from), Some(tenure)) = (from, self.record.value.tenure) else {
            if let Some(from) = self.from() {
                self.forget_at(&from).await?;
            }
            return self.lost(format!("host {to} was removed, and the volume with it")).await;
        };
        self.return_to(&from, tenure).await?;
        let volume = self.view().volume.clone();
        let at_home = |_: Option<VolumeRecord>| VolumeRecord {
            name: volume.clone(),
            home: from.id.clone(),
            seen: None,
        };
        if is_listed {
            self.cluster.records.update(&volume_key(&volume), at_home).await?;
        }
        let why = format!("host {to} was removed; what was written to the volume there is lost");
        self.end(VolumeMoveEvent::Returned, why).await?;
        self.drive_users();
        Ok(Step::Again)
    }
}

fn unless_gone(done: Result<(), Problem>) -> Result<(), Problem> {
    match done {
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        done => done,
    }
}
