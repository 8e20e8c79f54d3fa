//! How far the cluster goes by itself, where an admin decides that: when VMs leave overloaded hosts, and when hosts are rented.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How far the cluster goes by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AutoMode {
    /// It does nothing, and says nothing.
    Off,
    /// It says what it would do, and why.
    #[default]
    Advise,
    /// It does so.
    On,
}

impl FromStr for AutoMode {
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
