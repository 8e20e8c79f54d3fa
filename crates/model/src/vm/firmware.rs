//! What a VM's machine begins with.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a VM's machine begins with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Firmware {
    /// SeaBIOS: the root disk's boot record.
    #[default]
    Bios,
    /// OVMF, without Secure Boot: the boot loader on the root disk's EFI system partition.
    Uefi,
    /// The same with Secure Boot: the boot loader has to be signed with one of Microsoft's keys, as distributions' are.
    /// A job file names it as the CLI does.
    #[serde(alias = "uefi-secure")]
    UefiSecure,
}

impl Firmware {
    /// Whether it keeps variables, for which the VM has a disk [`DiskRole::Nvram`](super::DiskRole::Nvram).
    pub fn has_variables(self) -> bool {
        self != Self::Bios
    }
}

impl std::str::FromStr for Firmware {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "bios" => Ok(Self::Bios),
            "uefi" => Ok(Self::Uefi),
            "uefi-secure" => Ok(Self::UefiSecure),
            _ => Err(format!("{text:?} is not known: use bios, uefi or uefi-secure")),
        }
    }
}
