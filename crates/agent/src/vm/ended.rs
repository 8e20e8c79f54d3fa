//! What became of VMs that came by migration and are deleted: so that a source that asks late
//! hears what is known, and "did not run" is never said of a VM of which nothing is known.

use std::path::{Path, PathBuf};

use perigee_model::switchover::Arrival;
use perigee_model::{MigrationId, Problem, VmId};
use serde::{Deserialize, Serialize};

use crate::files::{read_json, write_json};

/// What is kept longest is removed first: of that VM nothing is known then.
const KEPT_MAX: usize = 1000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    pub migration: MigrationId,
    pub arrival: Arrival,
}

fn path(state: &Path, vm: &VmId) -> PathBuf {
    state.join("ended").join(format!("{vm}.json"))
}

pub fn write(state: &Path, vm: &VmId, ended: &Ended) -> Result<(), Problem> {
    write_json(&path(state, vm), ended)?;
    if let Err(error) = thin_out(&state.join("ended")) {
        tracing::debug!(%error, "old ends of VMs are not removed");
    }
    Ok(())
}

pub fn read(state: &Path, vm: &VmId) -> Result<Option<Ended>, Problem> {
    read_json(&path(state, vm))
}

fn thin_out(dir: &Path) -> std::io::Result<()> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        all.push((entry.metadata()?.modified()?, entry.path()));
    }
    let surplus = all.len().saturating_sub(KEPT_MAX);
    all.sort();
    all.iter().take(surplus).try_for_each(|(_, path)| std::fs::remove_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_became_of_a_vm_is_read_again_and_the_oldest_is_forgotten() {
        let state = tempfile::tempdir().unwrap();
        std::fs::create_dir(state.path().join("ended")).unwrap();
        let vm = |number: usize| VmId::new(format!("vm-{number}")).unwrap();
        let migration = MigrationId::new("m-1").unwrap();
        let ended = Ended { migration, arrival: Arrival::Waits };
        for number in 0..=KEPT_MAX {
            let text = serde_json::to_vec(&ended).unwrap();
            std::fs::write(path(state.path(), &vm(number)), text).unwrap();
        }
        write(state.path(), &vm(KEPT_MAX), &ended).unwrap();
        let kept = std::fs::read_dir(state.path().join("ended")).unwrap().count();
        assert_eq!(kept, KEPT_MAX);
        assert_eq!(read(state.path(), &vm(KEPT_MAX)).unwrap(), Some(ended));
        assert_eq!(read(state.path(), &vm(KEPT_MAX + 1)).unwrap(), None);
    }
}
