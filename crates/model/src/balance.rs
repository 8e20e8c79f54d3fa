//! Whether the VMs of a site leave overloaded hosts by themselves, and what the last look at them has shown.
//!
//! The planner decides (`planner/src/balance/`); the controller measures and carries out (`controller/src/balance/`).

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::{HostId, SiteId, VmId};

/// What the controller does about an overloaded host of a site.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BalanceMode {
    /// Nothing, and nothing is said.
    Off,
    /// It says which VM would move, and why.
    #[default]
    Advise,
    /// It moves the VM.
    On,
}

impl FromStr for BalanceMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "advise" => Ok(Self::Advise),
            "on" => Ok(Self::On),
            _ => Err("it is off, advise or on".to_owned()),
        }
    }
}

/// Sets the mode of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetBalance {
    /// The new mode.
    pub mode: BalanceMode,
}

/// What the last look at the loads of a site has shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SiteBalance {
    /// Which site.
    pub site: SiteId,
    /// What the controller does there.
    pub mode: BalanceMode,
    /// When it looked last, Unix time; `None` if it has not looked since it was started, or since the mode was set.
    pub looked_ms: Option<u64>,
    /// The VMs that would lose less at another host of the site: those that move first.
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
    /// Whether the VM moves there, or would with [`BalanceMode::On`].
    pub moves: bool,
    /// What would have been saved there so far, in seconds: the VM's own and its neighbours'.
    pub saved_s: f64,
    /// The saving in seconds at which the VM moves.
    pub needed_s: f64,
    /// The figures in plain words.
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
