//! The driver of a backup.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use perigee_model::backup::{
    Backup, BackupProgress, BackupState, DeleteBackup, ShipBackup, ShippedBackup,
};
use perigee_model::volume::Progress;
use perigee_model::{BackupName, HostId, Problem, ProblemKind, VolumeName};
use tokio::sync::Mutex;

use super::{
    BACKUPS_PREFIX, BackupRecord, backup_key, image, is_same_place, list, reader, restoring, room,
    vm,
};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::Owned;
use crate::storage::moves::in_words;
use crate::storage::volumes;

/// The longest pause between two tries; doubled each time up to this.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A backup that gets no further for so long is given up. The next one uses what was shipped.
const PATIENCE: Duration = Duration::from_secs(3600);
/// How often the record says how far it is.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Held while a backup or a restore looks for deletions and records that it asks, and while a deletion looks for those that ask: so one of both sees the other.
pub(super) static LOOKING: Mutex<()> = Mutex::const_new(());

/// Has the backup shipped until it is complete, or given up.
///
/// # Errors
/// When the store fails; the caller tries again.
pub async fn drive(cluster: Arc<Cluster>, name: BackupName) -> Result<(), Problem> {
    let (mut pause, mut failing_since) = (cluster.timing.poll, None::<Instant>);
    loop {
        let Some(record) = cluster.records.own::<BackupRecord>(&backup_key(&name)).await? else {
            return Ok(());
        };
        let mut run = Run::new(&cluster, record);
        let problem = match run.view().state {
            BackupState::Completed | BackupState::Failed => return Ok(()),
            BackupState::Shipping => match run.ship().await {
                Ok(shipped) => return run.completed(&shipped).await,
                Err(problem) => problem,
            },
            BackupState::Deleting => match run.delete().await {
                Ok(()) => match run.delete_parts().await? {
                    Ok(()) => return cluster.records.remove(&backup_key(&name)).await,
                    Err(problem) => problem,
                },
                Err(problem) => problem,
            },
        };
        run.stop_asking().await?;
        // A whole backup puts everything again at each try, so what it has put is no progress.
        if run.has_begun && !run.record.value.whole {
            (pause, failing_since) = (cluster.timing.poll, None);
        }
        // That others are in turn is no failure of this one.
        if run.waits_for_others {
            failing_since = None;
        }
        let since = *failing_since.get_or_insert_with(Instant::now);
        let may_pass = problem.kind == ProblemKind::Unavailable && since.elapsed() < PATIENCE;
        let is_deleted = run.view().state == BackupState::Deleting;
        if !may_pass && (is_deleted || !run.has_moved().await) {
            return run.failed(&problem).await;
        }
        run.note(&problem).await?;
        pause = (pause * 2).min(PAUSE_MAX);
        tokio::time::sleep(pause).await;
    }
}

struct Run<'a> {
    cluster: &'a Arc<Cluster>,
    record: Owned<BackupRecord>,
    /// Something was put at the target in this try.
    has_begun: bool,
    /// The home has said that it ships no more for this backup.
    has_answered: bool,
    /// Another backup is being deleted at the target, or one of the same tenant is being shipped.
    waits_for_others: bool,
}

impl<'a> Run<'a> {
    fn new(cluster: &'a Arc<Cluster>, record: Owned<BackupRecord>) -> Self {
        Self { cluster, record, has_begun: false, has_answered: false, waits_for_others: false }
    }
}

impl Run<'_> {
    fn view(&mut self) -> &mut Backup {
        &mut self.record.value.view
    }

    /// Asks the volume's home to ship the backup, and hears how far it is. Who asked is recorded before.
    async fn ship(&mut self) -> Result<ShippedBackup, Problem> {
        let sealed = vm::sealed(self.cluster, &mut self.record).await?;
        let asks = self.record.value.asks;
        let mut view = self.view().clone();
        let home = match &view.image {
            Some(image) => image::shipper(self.cluster, (&view, asks), image).await?,
            None => {
                let home = volumes::settled_home(self.cluster, &view.volume).await?;
                volumes::reachable(self.cluster, &home)?
            }
        };
        self.begin_asking(&home.id).await?;
        view.host = Some(home.id.clone());
        let encrypted = self.is_encrypted(&view).await?;
        let room = room::room_of(self.cluster, &view, &home.id).await?;
        let key = room::key_of(self.cluster, view.name.as_str());
        let ask = ShipBackup {
            is_known: self.is_known(&view, &home.id).await?,
            name: view.name,
            to: view.at,
            now_ms: now_ms(),
            whole: self.record.value.whole,
            sealed,
            vm: self.record.value.vm.as_ref().map(|of_vm| Box::new(of_vm.has.clone())),
            room,
            encrypted,
            key,
        };
        let path = match &view.image {
            Some(image) => format!("/v1/images/{image}/backup"),
            None => format!("/v1/volumes/{}/backup", view.volume),
        };
        let (done, total) = (AtomicU64::new(0), AtomicU64::new(0));
        let shipping = home.volume.hear_long::<ShippedBackup>(&path, &ask, |progress: Progress| {
            done.store(progress.done_bytes, Ordering::Relaxed);
            total.store(progress.total_bytes, Ordering::Relaxed);
        });
        tokio::pin!(shipping);
        loop {
            tokio::select! {
                ended = &mut shipping => {
                    self.has_answered = ended.is_ok();
                    let done_bytes = done.load(Ordering::Relaxed);
                    self.has_begun |= done_bytes > 0;
                    let shipped = ended.and_then(|ended| ended);
                    if shipped.is_err() {
                        room::add(self.cluster, self.view(), done_bytes).await?;
                    }
                    return shipped;
                }
                () = tokio::time::sleep(TELL_EVERY) => {}
            }
            let progress = BackupProgress {
                done_bytes: done.load(Ordering::Relaxed),
                total_bytes: total.load(Ordering::Relaxed),
            };
            self.has_begun |= progress.done_bytes > 0;
            if self.view().progress != Some(progress) {
                self.view().progress = Some(progress);
                self.view().problem.clear();
                self.record.save().await?;
            }
        }
    }

    async fn all(&self) -> Result<Vec<BackupRecord>, Problem> {
        self.cluster.records.list(BACKUPS_PREFIX).await
    }

    /// Records that this home is asked, unless something is being deleted at the target. A backup that was asked for already, and whose home may be shipping, goes on:
    /// what is to be deleted waits for that.
    async fn begin_asking(&mut self, home: &HostId) -> Result<(), Problem> {
        let _looking = LOOKING.lock().await;
        let mut view = self.view().clone();
        view.host = Some(home.clone());
        let all = match self.record.value.asks {
            true => Vec::new(),
            false => self.all().await?,
        };
        if let Some(why) = self.why_not_now(&view, &all) {
            self.waits_for_others = true;
            return Err(Problem::unavailable(format!("can't back up {}", view.of()), why));
        }
        self.view().host = Some(home.clone());
        self.record.value.asks = true;
        self.record.save().await
    }

    /// For which other backup this one waits; `None`: for none.
    fn why_not_now(&self, view: &Backup, all: &[BackupRecord]) -> Option<String> {
        let is_deleted = |one: &BackupRecord| {
            one.view.state == BackupState::Deleting
                && one.view.host.is_some()
                && is_same_place(&one.view, view)
        };
        if all.iter().any(is_deleted) {
            return Some("another backup is being deleted at the target".to_owned());
        }
        if let Some(first) = first_there(view, all) {
            return Some(format!(
                "backup {first} is being shipped to the same target, and decides whether the backups there are encrypted"
            ));
        }
        let other = self.other_in_turn(all)?;
        Some(format!(
            "backup {other} is being shipped, and the tenant's quota lets one be shipped at a time"
        ))
    }

    /// A backup after which this one is shipped: the tenant's quota is counted for one at a time.
    fn other_in_turn(&self, all: &[BackupRecord]) -> Option<BackupName> {
        let view = &self.record.value.view;
        let is_before =
            |one: &&BackupRecord| one.asks && room::is_shipped_after(self.cluster, view, &one.view);
        all.iter().find(is_before).map(|one| one.view.name.clone())
    }

    /// Nothing is shipped for this backup now, if its home has said so. If the answer was lost, the home may still ship.
    async fn stop_asking(&mut self) -> Result<(), Problem> {
        if !self.has_answered || !std::mem::take(&mut self.record.value.asks) {
            return Ok(());
        }
        self.record.save().await
    }

    /// Has the backup deleted at its target, while nobody ships to that.
    async fn delete(&mut self) -> Result<(), Problem> {
        let view = self.view().clone();
        if view.host.is_none() {
            // Nobody was asked to ship it, so nothing of it can be there.
            return Ok(());
        }
        let what = format!("can't delete backup {}", view.name);
        let ships = |one: &BackupRecord| one.asks && is_same_place(&one.view, &view);
        let looking = LOOKING.lock().await;
        if let Some(other) = self.all().await?.iter().find(|one| ships(one)) {
            let why = format!("backup {} is being shipped to the same target", other.view.name);
            return Err(Problem::unavailable(what, why));
        }
        if let Some(volume) = restoring::reader_of(self.cluster, &view.name, &view.at).await? {
            let why = format!("bytes of volume {volume} are still to come from it");
            return Err(Problem::unavailable(what, why));
        }
        drop(looking);
        if let Some(host) = restoring::host_that_reads(self.cluster, &view.name, &view.at).await {
            let why = format!("a volume of host {host} still gets bytes from it");
            return Err(Problem::unavailable(what, why));
        }
        let shipper = view.host.as_ref();
        // Any host reaches an S3 store.
        let shipper = shipper
            .filter(|host| !view.at.is_s3() || volumes::reachable(self.cluster, host).is_ok());
        let host = reader(self.cluster, &view.at, shipper).await?;
        let (counts, at) = (view.by.is_some(), view.at.clone());
        let key = room::key_of(self.cluster, view.name.as_str());
        let ask = DeleteBackup { backup: view.name.clone(), at, counts, key };
        let asked = host.volume.post_long("/v1/backups/delete", &ask, |_: Progress| {});
        let held_bytes: Option<u64> = asked.await?;
        if let Some(bytes) = held_bytes {
            room::counted(self.cluster, &view, bytes).await?;
        }
        self.let_go().await
    }

    /// Has the parts deleted, and waits until they are gone. Nothing of this one is at the target any more, so nobody waits for it meanwhile.
    async fn delete_parts(&mut self) -> Result<Result<(), Problem>, Problem> {
        if self.view().parts.is_empty() {
            return Ok(Ok(()));
        }
        if self.view().host.take().is_some() {
            self.record.save().await?;
        }
        vm::delete_parts(self.cluster, &self.record.value.view).await
    }

    /// Whether the target has had a backup, so that it is not a directory over which a disk should be mounted.
    async fn is_known(&self, view: &Backup, home: &HostId) -> Result<bool, Problem> {
        let all = list(self.cluster).await?;
        Ok(all.iter().any(|other| {
            let is_there =
                other.at == view.at && (view.at.is_s3() || other.host.as_ref() == Some(home));
            is_there && other.state == BackupState::Completed
        }))
    }

    /// Whether it is to be encrypted. Beside backups that a host has encrypted it is, also if that was not asked for: whoever takes these away gets no others in clear.
    async fn is_encrypted(&self, view: &Backup) -> Result<bool, Problem> {
        let is_sealed = |other: &Backup| {
            let is_there = other.state == BackupState::Completed && is_same_place(other, view);
            other.encrypted && is_there
        };
        Ok(view.encrypted || list(self.cluster).await?.iter().any(is_sealed))
    }

    /// Whether the volume has another home than the one that was asked, or is about to.
    async fn has_moved(&mut self) -> bool {
        if self.view().image.is_some() {
            return false;
        }
        let (volume, asked) = (self.view().volume.clone(), self.view().host.clone());
        let home = volumes::find(self.cluster, &volume).await.ok().map(|record| record.home);
        self.cluster.index.is_changing_home(&volume)
            || (asked.is_some() && home.is_some() && home != asked)
    }

    async fn completed(&mut self, shipped: &ShippedBackup) -> Result<(), Problem> {
        let view = self.view();
        view.state = BackupState::Completed;
        view.taken_ms = Some(shipped.taken_ms);
        view.ended_ms = Some(now_ms());
        view.size_bytes = Some(shipped.size_bytes);
        view.data_bytes = Some(shipped.data_bytes);
        view.shipped_bytes = shipped.shipped_bytes;
        view.encrypted |= shipped.encrypted;
        if let Some(bytes) = shipped.held_bytes {
            room::counted(self.cluster, &self.record.value.view, bytes).await?;
        }
        vm::add_parts(self.cluster, &mut self.record.value.view).await?;
        let view = self.view();
        view.progress = None;
        view.problem.clear();
        self.record.value.asks = false;
        // The target has it now. It may have secrets.
        self.record.value.vm = None;
        self.record.save().await
    }

    async fn failed(&mut self, problem: &Problem) -> Result<(), Problem> {
        tracing::warn!("backup {} has failed: {problem}", self.view().name);
        let view = self.view();
        view.state = BackupState::Failed;
        view.ended_ms = Some(now_ms());
        view.progress = None;
        view.problem = in_words(problem);
        self.record.value.asks = false;
        let of_vm = self.record.value.vm.take();
        self.record.save().await?;
        self.let_go().await?;
        // The other disks were sealed too. A part that has begun ends that by itself.
        for part in of_vm.into_iter().flat_map(|of_vm| of_vm.has.parts) {
            let key = backup_key(&part.backup);
            if self.cluster.records.read::<BackupRecord>(&key).await?.is_none() {
                self.let_go_of(&part.volume, None).await?;
            }
        }
        Ok(())
    }

    async fn let_go(&mut self) -> Result<(), Problem> {
        let Backup { volume, host, image, .. } = self.view().clone();
        // Nothing is kept for the backup of an image.
        if image.is_some() {
            return Ok(());
        }
        self.let_go_of(&volume, host).await
    }

    /// The volume's home, which was asked to ship it, keeps nothing for this backup any more. One that is away keeps that until the next backup to the same target.
    async fn let_go_of(&self, volume: &VolumeName, host: Option<HostId>) -> Result<(), Problem> {
        let view = self.record.value.view.clone();
        let other = |one: &BackupRecord| {
            let is_same_target = one.view.at.address == view.at.address
                && one.view.vm.is_some() == view.vm.is_some()
                && one.view.image.is_none();
            // The one of which this is a part waits for this one.
            let is_root = view.part_of.as_ref() == Some(&one.view.name);
            let mut parts = one.vm.iter().flat_map(|of_vm| &of_vm.has.parts);
            let has_sealed = parts.any(|part| part.volume == *volume) && !is_root;
            let is_same = is_same_target && (one.view.volume == *volume || has_sealed);
            is_same && one.view.state == BackupState::Shipping
        };
        if self.all().await?.iter().any(other) {
            return Ok(());
        }
        // A VM's disk was sealed before its home was asked to ship it.
        let host = match host {
            None if view.vm.is_some() => volumes::settled_home(self.cluster, volume).await.ok(),
            asked => asked,
        };
        let Some(host) = host else { return Ok(()) };
        let Ok(host) = volumes::reachable(self.cluster, &host) else { return Ok(()) };
        let path = format!("/v1/volumes/{volume}/backup/end");
        let at = if view.vm.is_some() { view.at.of_vms() } else { view.at };
        if let Err(problem) = host.volume_slow.post::<()>(&path, &at).await {
            tracing::warn!(%problem, "the layers of backup {} are kept at its home", view.name);
        }
        Ok(())
    }

    async fn note(&mut self, problem: &Problem) -> Result<(), Problem> {
        let words = in_words(problem);
        if self.view().problem == words {
            return Ok(());
        }
        self.view().problem = words;
        self.record.save().await
    }
}

/// A backup that is shipped as the first one to the place of this one, and is encrypted if this one is not, or the other way round. Of two that began at the same moment,
/// both would be refused in the end.
fn first_there<'a>(view: &Backup, all: &'a [BackupRecord]) -> Option<&'a BackupName> {
    let is_there = |one: &&BackupRecord| is_same_place(&one.view, view);
    let there = || all.iter().filter(is_there);
    if there().any(|one| one.view.state == BackupState::Completed) {
        return None;
    }
    let mut others = there().filter(|one| one.asks && one.view.name != view.name);
    others.find(|one| one.view.encrypted != view.encrypted).map(|one| &one.view.name)
}

#[cfg(test)]
mod tests {
    use perigee_model::backup::BackupTarget;

    use super::super::new_backup;
    use super::*;

    fn to_s3(name: &str, encrypted: bool) -> BackupRecord {
        let name = BackupName::new(name).expect("a name");
        let at = BackupTarget { address: "s3://bucket".to_owned(), endpoint: None };
        let volume = VolumeName::new("data").expect("a name");
        let view = Backup { encrypted, ..new_backup(name, volume, at, 1) };
        BackupRecord { view, whole: false, asks: false, schedule_made_ms: None, vm: None }
    }

    #[test]
    fn of_two_first_backups_at_a_target_the_one_that_asks_first_decides_whether_they_are_encrypted()
    {
        let (one, other) = (to_s3("one", true), to_s3("other", false));
        let asking = BackupRecord { asks: true, ..one.clone() };
        assert_eq!(first_there(&other.view, &[one.clone(), other.clone()]), None, "none asks yet");
        let all = [asking.clone(), other.clone()];
        assert_eq!(first_there(&other.view, &all), Some(&one.view.name));
        assert_eq!(first_there(&one.view, &all), None);
        let alike = to_s3("alike", true);
        assert_eq!(first_there(&alike.view, &all), None, "both are encrypted");
        // The place has backups, and each host finds out what they are.
        let mut done = to_s3("done", true);
        done.view.state = BackupState::Completed;
        assert_eq!(first_there(&other.view, &[asking, done]), None);
    }
}
