//! How a VM differs from its spec because it was changed while it ran. It is kept for an agent that starts again, and what the agent says
//! of the VM has it, so the destination of a migration builds the machine that is there.

use perigee_model::vm::{Disk, VmSpec};
use perigee_model::{DiskRole, Problem};
use serde::{Deserialize, Serialize};

use crate::files::{VmDir, read_json, write_json};

/// How a VM differs from its spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Since {
    /// So many vCPUs it has.
    pub cpus: Option<u32>,
    /// Disks that came, and have not gone again.
    pub plugged: Vec<Disk>,
    /// Disks of its spec that have gone.
    pub unplugged: Vec<DiskRole>,
}

impl Since {
    /// # Errors
    /// If what an earlier agent has kept can't be read.
    pub fn load(dir: &VmDir) -> Result<Self, Problem> {
        Ok(read_json(&dir.since())?.unwrap_or_default())
    }

    /// Keeps it for an agent that starts later.
    ///
    /// # Errors
    /// `Internal` if it can't be written.
    pub fn save(&self, dir: &VmDir) -> Result<(), Problem> {
        write_json(&dir.since(), self)
    }

    /// The VM as it is now.
    pub fn applied(&self, spec: &VmSpec) -> VmSpec {
        let mut now = VmSpec { cpus: self.cpus.unwrap_or(spec.cpus), ..spec.clone() };
        now.disks.retain(|disk| !self.unplugged.contains(&disk.role));
        now.disks.extend(self.plugged.iter().cloned());
        now
    }

    /// Notes that the VM has got this disk.
    pub fn has_come(&mut self, disk: Disk) {
        self.plugged.retain(|other| other.role != disk.role);
        self.plugged.push(disk);
    }

    /// Notes that the VM has no disk in this role any more.
    pub fn has_gone(&mut self, spec: &VmSpec, role: DiskRole) {
        self.plugged.retain(|other| other.role != role);
        let is_new = !self.unplugged.contains(&role);
        if is_new && spec.disks.iter().any(|disk| disk.role == role) {
            self.unplugged.push(role);
        }
    }
}
