//! What an admin says of a site: in which order its hosts get VMs, and whether VMs leave overloaded hosts by themselves; and what the last look at them has shown.
//!
//! The planner decides (`planner/src/balance/`); the controller measures and carries out (`controller/src/balance/`).

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::auto_mode::AutoMode;
use crate::ids::{HostId, JobId, SiteId, VmId};
use crate::job::MigrationState;

/// Which of the hosts of a site that are as good for a VM gets it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlacePolicy {
    /// The least busy one, so that each VM has much of its host.
    #[default]
    Spread,
    /// The fullest one that has room, so that other hosts stay free for large VMs, or can be given back.
    Pack,
}

impl FromStr for PlacePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "spread" => Ok(Self::Spread),
            "pack" => Ok(Self::Pack),
            _ => Err("it is spread or pack".to_owned()),
        }
    }
}

/// Sets in which order the hosts of a site get VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetPlace {
    /// From now on.
    pub place: PlacePolicy,
}

/// Sets the mode of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetBalance {
    /// The new mode.
    pub mode: AutoMode,
}

/// What the last look at the loads of a site has shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SiteBalance {
    /// Which site.
    pub site: SiteId,
    /// What the controller does there.
    pub mode: AutoMode,
    /// When it looked last, Unix time; `None` if it has not looked since it was started, or since the mode was set.
    pub looked_ms: Option<u64>,
    /// The VMs that would lose less at another host, of the site or of another one that has their data: those that move first.
    pub vms: Vec<VmBalance>,
    /// The hosts whose loads are not known. No VM comes to them or leaves them by itself.
    pub not_known: Vec<LoadNotKnown>,
}

/// A VM that would lose less elsewhere.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmBalance {
    /// Which VM.
    pub vm: VmId,
    /// Where the VM runs.
    pub host: HostId,
    /// The host where it would lose least.
    pub to: HostId,
    /// Whether the VM moves there, or would with [`AutoMode::On`] at both hosts' sites.
    pub moves: bool,
    /// What would have been saved there so far, in seconds: the VM's own and its neighbours'.
    pub saved_s: f64,
    /// The saving in seconds at which the VM moves.
    pub needed_s: f64,
    /// The figures in plain words.
    pub reason: String,
}

/// Where a VM stands: what it loses at its host, what it would have saved at others, and what comes next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmStanding {
    /// Which VM.
    pub vm: VmId,
    /// The job whose VM it is.
    pub job: Option<JobId>,
    /// Where it is; `None` for one that is off.
    pub host: Option<HostId>,
    /// The host's site.
    pub site: Option<SiteId>,
    /// What the controller does about overloaded hosts of the site.
    pub mode: Option<AutoMode>,
    /// When it has looked there last, Unix time.
    pub looked_ms: Option<u64>,
    /// Whether the VM may move by itself.
    pub may_migrate: bool,
    /// What was measured, and its accounts.
    pub figures: VmFigures,
    /// Its last moves, the newest first; at most [`MOVES_SHOWN`].
    pub moves: Vec<Moved>,
    /// What would happen next, and why, in plain words.
    pub next: String,
}

/// So many moves of a VM are shown beside where it stands.
pub const MOVES_SHOWN: usize = 5;

/// What the last look has measured of a VM, and its accounts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmFigures {
    /// What was measured; `None` if it was not looked at.
    pub measured: Option<VmMeasured>,
    /// So many times its cost the next move must save: each move doubles that, and it halves with time.
    pub price_factor: f64,
    /// The last move, whose gain is being judged.
    pub on_trial: Option<MoveTrial>,
    /// The move whose gain was judged last.
    pub judged: Option<MoveTrial>,
    /// The other hosts that count for it, the best first.
    pub targets: Vec<BalanceTarget>,
}

/// What was measured of a VM and its host, as means of a minute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmMeasured {
    /// The CPUs that its vCPUs used; `None` if that is not known.
    pub used_cpus: Option<f64>,
    /// Its vCPUs that wanted a CPU and got none; `None` if that is not known.
    pub waited_cpus: Option<f64>,
    /// The share of its time that it lost to the network between itself and its data, 0 to 1; `None` if that is not known.
    pub data_lost: Option<f64>,
    /// The other hosts that have its data.
    pub data_at: Vec<HostId>,
    /// How many other VMs are at its host.
    pub neighbours: usize,
    /// The host's CPUs.
    pub host_cpus: f64,
    /// The CPUs that are wanted at the host, by the VM too; `None` if that is not known.
    pub host_wanted_cpus: Option<f64>,
    /// The share of the time in which something at the host waited for memory, 0 to 1; `None` if that is not known.
    pub host_memory_stalled: Option<f64>,
}

/// A move by itself whose gain is judged for some time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveTrial {
    /// The host that the VM has left.
    pub from: HostId,
    /// What the move was predicted to cost, in seconds.
    pub price_s: f64,
    /// What being away from the old host has saved since, in seconds.
    pub gained_s: f64,
    /// For how many seconds it is judged still; 0 or less if that is over.
    pub left_s: f64,
}

/// Another host, and what being there would have saved a VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BalanceTarget {
    /// Which host.
    pub host: HostId,
    /// What being there would have saved so far, in seconds: the VM's own and its neighbours'.
    pub saved_s: f64,
    /// In how many seconds.
    pub for_s: f64,
    /// What a move there costs, in seconds; `None` if that is not known.
    pub price_s: Option<f64>,
    /// The saving in seconds at which the VM moves: the price with the surcharge.
    pub needed_s: Option<f64>,
    /// Why the VM does not go there whatever it would save; empty if it may.
    pub why_not: String,
}

/// A move of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moved {
    /// When it began, Unix time.
    pub at_ms: u64,
    /// From where.
    pub from: HostId,
    /// To where.
    pub to: HostId,
    /// How far it has come.
    pub state: MigrationState,
    /// Why, in plain words.
    pub reason: String,
}

/// A host whose load is not known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadNotKnown {
    /// Which host.
    pub host: HostId,
    /// What is not known, in plain words.
    pub why: String,
}
