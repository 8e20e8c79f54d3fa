//! Snapshots of the disks of pools: copies of directories. What is not changed later shares its blocks where the filesystem can do that.
//!
//! Only a disk that nobody writes to can be copied file by file, so what runs in the instance stands still meanwhile. A maker that was killed
//! half-way leaves a record that is pending, and an instance that stands still: whoever asks for the snapshot again goes on from there, and
//! who ends the instance kills all of it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use perigee_model::Problem;
use perigee_model::kept::{NewSnapshot, Snapshot, SnapshotState};
use serde::{Deserialize, Serialize};

use super::records::{Records, make_passable};
use super::verbs::Failure;
use crate::command::{run, run_within};
use crate::down::remove_dir;
use crate::process::Process;
use crate::up::Lab;

/// Snapshots of a lab.
const SNAPSHOTS_MAX: usize = 40;
/// A pool of a lab has some GiB.
const COPY_DEADLINE: Duration = Duration::from_secs(600);

/// What is kept of a snapshot, as `snap-….json` beside its directory `snap-…`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    id: String,
    rental: String,
    cluster: String,
    state: SnapshotState,
    stored_bytes: Option<u64>,
}

impl Record {
    fn told(&self) -> Snapshot {
        Snapshot {
            id: self.id.clone(),
            rental: Some(self.rental.clone()),
            state: self.state,
            stored_bytes: self.stored_bytes,
        }
    }
}

/// A snapshot in a list.
#[derive(Debug, Serialize)]
pub struct Listed {
    cluster: String,
    #[serde(flatten)]
    snapshot: Snapshot,
}

/// The directory that is the disk of an instance's pool.
pub fn disk(root: &Path) -> PathBuf {
    root.join("disk")
}

/// Makes the disk of a new instance: blank, or of a snapshot.
///
/// # Errors
/// If there is no such snapshot, or if the copy fails.
pub async fn make_disk(
    records: &Records,
    root: &Path,
    snapshot: Option<&str>,
) -> Result<(), Problem> {
    let disk = disk(root);
    let Some(id) = snapshot else { return make_passable(&disk) };
    let what = || format!("can't make a disk of snapshot {id:?}");
    let known = all(records)?.into_iter().find(|record| record.id == id);
    let known = known.filter(|record| record.state == SnapshotState::Complete);
    let known = known.ok_or_else(|| Problem::not_found(what(), "there is none, or none yet"))?;
    copy(&records.root(&known.id), &disk).await
}

async fn copy(from: &Path, to: &Path) -> Result<(), Problem> {
    let [from_text, to_text] = [from, to].map(|path| path.to_string_lossy().into_owned());
    let args = ["-a", "--reflink=auto", "--sparse=always", "-T", &from_text, &to_text];
    run_within(COPY_DEADLINE, "cp", &args).await.map(drop)
}

fn all(records: &Records) -> Result<Vec<Record>, Problem> {
    let ids = records.ids("snap-")?;
    let read = |id: &String| records.read::<Record>(id).transpose();
    ids.iter().filter_map(read).collect()
}

/// A snapshot of an instance's disk. Asked twice for one rental, the answer is the same.
///
/// # Errors
/// If there is no such instance, it has no such disk, or there are too many snapshots.
pub async fn take(lab: &Lab, records: &Records, new: &NewSnapshot) -> Result<Snapshot, Failure> {
    let _lock = records.lock().await?;
    let all = all(records)?;
    let known = all.iter().find(|r| r.rental == new.rental && r.cluster == new.cluster);
    let mut record = match known {
        Some(known) if known.state != SnapshotState::Pending => return Ok(known.told()),
        Some(half) => half.clone(),
        None if all.len() >= SNAPSHOTS_MAX => {
            let message = format!("a lab has room for {SNAPSHOTS_MAX} snapshots");
            return Err(Failure::new(perigee_model::rental::CloudErrorKind::Quota, message));
        }
        None => Record {
            id: format!("snap-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]),
            rental: new.rental.clone(),
            cluster: new.cluster.clone(),
            state: SnapshotState::Pending,
            stored_bytes: None,
        },
    };
    let instance = records.get(&new.instance)?.filter(super::records::Record::is_there);
    let disk = disk(&records.root(&new.instance));
    if instance.is_none() || !disk.is_dir() {
        let message = format!("there is no instance {:?} with a disk for its pool", new.instance);
        return Err(Failure::refused(message));
    }
    records.write(&record.id, &record)?;
    let at = records.root(&record.id);
    remove_dir(&at)?;
    let namespace = lab.definition.rented_namespace(&new.instance);
    let still = Still::stop(&namespace).await?;
    let copied = copy(&disk, &at).await;
    drop(still);
    copied?;
    record.stored_bytes = Some(size(&at).await?);
    record.state = SnapshotState::Complete;
    records.write(&record.id, &record)?;
    Ok(record.told())
}

async fn size(dir: &Path) -> Result<u64, Problem> {
    let path = dir.to_string_lossy();
    let told = run("du", &["-s", "--block-size=1", &path]).await?;
    let bytes = told.split_whitespace().next().and_then(|number| number.parse().ok());
    bytes.ok_or_else(|| Problem::internal(format!("can't tell the size of {path}"), told))
}

/// The snapshots of a cluster.
///
/// # Errors
/// If a record can't be read.
pub fn list(records: &Records, cluster: &str) -> Result<Vec<Listed>, Problem> {
    let mut all = all(records)?;
    all.retain(|record| record.cluster == cluster);
    let listed =
        |record: Record| Listed { snapshot: record.told(), cluster: record.cluster.clone() };
    Ok(all.into_iter().map(listed).collect())
}

/// Deletes a snapshot. One that is not known was deleted before.
///
/// # Errors
/// If it is no name of a snapshot, or its files can't be removed.
pub async fn delete(records: &Records, id: &str) -> Result<(), Failure> {
    if !id.starts_with("snap-") || id.contains('/') {
        return Err(Failure::refused(format!("{id:?} is no snapshot of a lab")));
    }
    let _lock = records.lock().await?;
    remove_dir(&records.root(id))?;
    Ok(records.remove(id)?)
}

/// All that runs in an instance stands still until this is dropped.
struct Still(Vec<Process>);

impl Still {
    async fn stop(namespace: &str) -> Result<Self, Problem> {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let listed = run("ip", &["netns", "pids", namespace]).await?;
        let pids = listed.lines().filter_map(|line| line.trim().parse().ok());
        let all: Vec<Process> = pids.filter(|pid| *pid != own).filter_map(Process::of).collect();
        let still = Self(all);
        still.0.iter().try_for_each(|one| one.signal(Signal::SIGSTOP))?;
        Ok(still)
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        for one in &self.0 {
            if let Err(problem) = one.signal(Signal::SIGCONT) {
                tracing::warn!("{problem}");
            }
        }
    }
}
