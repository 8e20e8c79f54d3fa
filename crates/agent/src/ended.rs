//! The records of VMs that ended at this host: up to which start no VM begins here any more, and the fate of a
//! VM that came by migration. So a late start starts nothing, a source that asks late gets an answer, and "did
//! not run" is never answered for a VM about which nothing is known.
//!
//! There is one file for each VM, and the newest [`KEPT_MAX`] are kept. A host needs hours to end that many
//! VMs, and no request takes that long.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use perigee_model::switchover::Arrival;
use perigee_model::{HostId, MigrationId, Problem, VmId, VmStart};
use serde::{Deserialize, Serialize};

use crate::files::{read_json, write_json};

/// If there are more, the oldest are removed, down to [`KEPT_MIN`].
const KEPT_MAX: usize = 10_000;
const KEPT_MIN: usize = 9_000;

/// What is kept of a VM that ended at this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// No start up to this one begins here any more.
    pub start: VmStart,
    /// The last VM that came by migration.
    pub arrived: Option<Arrived>,
}

/// The fate of a VM that came by migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrived {
    pub migration: MigrationId,
    pub arrival: Arrival,
    /// The host from which it came.
    pub from: Option<HostId>,
}

/// The directory with these files. A decision from a file stays valid while the file is held.
#[derive(Debug)]
pub struct Ends {
    dir: PathBuf,
    one_at_a_time: Mutex<()>,
}

impl Ends {
    /// The records below the agent's state directory. Nothing is read yet.
    pub fn new(state: &Path) -> Self {
        Self { dir: state.join("ended"), one_at_a_time: Mutex::new(()) }
    }

    /// Reads the record of a VM, and keeps others from changing it until it is dropped. The holder must not
    /// wait.
    pub fn hold(&self, vm: &VmId) -> HeldEnd<'_> {
        let alone = self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.dir.join(format!("{vm}.json"));
        HeldEnd { dir: &self.dir, kept: read_json(&path), path, _alone: alone }
    }
}

/// The record of one VM.
pub struct HeldEnd<'a> {
    dir: &'a Path,
    path: PathBuf,
    kept: Result<Option<Ended>, Problem>,
    _alone: MutexGuard<'a, ()>,
}

impl HeldEnd<'_> {
    /// # Errors
    /// If the file exists and cannot be read.
    pub fn get(&self) -> Result<Option<&Ended>, Problem> {
        match &self.kept {
            Ok(ended) => Ok(ended.as_ref()),
            Err(problem) => Err(Problem::internal(
                format!("can't tell which starts of the VM were ended: {}", problem.what),
                &problem.why,
            )
            .next(format!("delete {} when nothing of the VM runs there", self.path.display()))),
        }
    }

    /// Adds an end. A file that cannot be read is replaced.
    pub fn add(&mut self, start: VmStart, arrived: Option<Arrived>) -> Result<(), Problem> {
        let before = match &self.kept {
            Ok(ended) => ended.clone(),
            Err(problem) => {
                tracing::error!(%problem, "which starts of a VM were ended before is not known");
                None
            }
        };
        let new = match before.clone() {
            Some(old) => Ended { start: old.start.max(start), arrived: arrived.or(old.arrived) },
            None => Ended { start, arrived },
        };
        if before.as_ref() == Some(&new) {
            return Ok(());
        }
        write_json(&self.path, &new)?;
        self.kept = Ok(Some(new));
        if let Err(error) = thin_out(self.dir) {
            tracing::debug!(%error, "old ends of VMs are not removed");
        }
        Ok(())
    }
}

fn thin_out(dir: &Path) -> std::io::Result<()> {
    if std::fs::read_dir(dir)?.count() <= KEPT_MAX {
        return Ok(());
    }
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        all.push((entry.metadata()?.modified()?, entry.path()));
    }
    let surplus = all.len().saturating_sub(KEPT_MIN);
    all.sort();
    all.iter().take(surplus).try_for_each(|(_, path)| std::fs::remove_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (tempfile::TempDir, Ends) {
        let state = tempfile::tempdir().unwrap();
        std::fs::create_dir(state.path().join("ended")).unwrap();
        let ends = Ends::new(state.path());
        (state, ends)
    }

    fn vm(number: usize) -> VmId {
        VmId::new(format!("vm-{number}")).unwrap()
    }

    fn start(migration: u32) -> VmStart {
        VmStart::default().by_migration(migration)
    }

    #[test]
    fn what_became_of_a_vm_is_read_again_and_the_oldest_is_forgotten() {
        let (state, ends) = ends();
        let ended = Ended { start: start(1), arrived: None };
        let text = serde_json::to_vec(&ended).unwrap();
        for number in 0..KEPT_MAX {
            std::fs::write(state.path().join(format!("ended/vm-{number}.json")), &text).unwrap();
        }
        ends.hold(&vm(KEPT_MAX)).add(start(1), None).unwrap();
        let kept = std::fs::read_dir(state.path().join("ended")).unwrap().count();
        assert_eq!(kept, KEPT_MIN);
        assert_eq!(ends.hold(&vm(KEPT_MAX)).get().unwrap(), Some(&ended));
        assert_eq!(ends.hold(&vm(KEPT_MAX + 1)).get().unwrap(), None);
    }

    #[test]
    fn an_earlier_end_that_is_added_later_takes_nothing_back() {
        let (_state, ends) = ends();
        let migration = MigrationId::new("m-2").unwrap();
        let arrived = Some(Arrived { migration, arrival: Arrival::Ran, from: None });
        ends.hold(&vm(1)).add(start(2), arrived.clone()).unwrap();
        ends.hold(&vm(1)).add(start(1), None).unwrap();
        let kept = Ended { start: start(2), arrived };
        assert_eq!(ends.hold(&vm(1)).get().unwrap(), Some(&kept));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_not_known_until_the_next_end() {
        let (state, ends) = ends();
        std::fs::write(state.path().join("ended/vm-1.json"), "{").unwrap();
        let problem = ends.hold(&vm(1)).get().unwrap_err();
        assert!(problem.next.contains("vm-1.json"), "{problem}");
        ends.hold(&vm(1)).add(start(1), None).unwrap();
        assert!(ends.hold(&vm(1)).get().unwrap().is_some());
    }
}
