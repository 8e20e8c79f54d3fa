//! How a VM differs from its spec because it was changed while it ran. It is kept for an agent that starts again, and what the agent says
//! of the VM has it, so the destination of a migration builds the machine that is there.

use perigee_model::Problem;
use perigee_model::vm::VmSpec;
use serde::{Deserialize, Serialize};

use crate::files::{VmDir, read_json, write_json};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Since {
    /// So many vCPUs it has.
    #[serde(default)]
    pub cpus: Option<u32>,
}

impl Since {
    /// # Errors
    /// If what an earlier agent has kept can't be read.
    pub fn load(dir: &VmDir) -> Result<Self, Problem> {
        Ok(read_json(&dir.since())?.unwrap_or_default())
    }

    pub fn save(&self, dir: &VmDir) -> Result<(), Problem> {
        write_json(&dir.since(), self)
    }

    /// The VM as it is now.
    pub fn applied(&self, spec: &VmSpec) -> VmSpec {
        VmSpec { cpus: self.cpus.unwrap_or(spec.cpus), ..spec.clone() }
    }
}
