//! The variables of a VM's UEFI firmware, as they are before its first boot: what Debian's package `ovmf` has as
//! `OVMF_VARS_4M.fd`, without a need for that package at the controller. It is erased flash but for the headers of its three
//! parts (UEFI Platform Initialization 1.8, volume 3, 3.2.1: firmware volume; EDK II's `VariableFormat.h` and
//! `WorkingBlockHeader.h`). The keys of Secure Boot are that package's own, which the controller's machine then needs.

use perigee_model::Problem;
use perigee_model::vm::Firmware;

/// The whole flash.
pub const BYTES: usize = 0x84000;

/// The firmware volume's header and, in it, that of the store of variables.
const VOLUME: [u8; 0x64] = [
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, //
    0x8d, 0x2b, 0xf1, 0xff, 0x96, 0x76, 0x8b, 0x4c, 0xa9, 0x85, 0x27, 0x47, 0x07, 0x5b, 0x4f,
    0x50, //
    0x00, 0x40, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x5f, 0x46, 0x56, 0x48, 0xff, 0xfe, 0x04,
    0x00, //
    0x48, 0x00, 0xaf, 0xb8, 0x00, 0x00, 0x00, 0x02, 0x84, 0x00, 0x00, 0x00, 0x00, 0x10, 0x00,
    0x00, //
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x78, 0x2c, 0xf3, 0xaa, 0x7b, 0x94, 0x9a,
    0x43, //
    0xa1, 0x80, 0x2e, 0x14, 0x4e, 0xc3, 0x77, 0x92, 0xb8, 0xff, 0x03, 0x00, 0x5a, 0xfe, 0x00,
    0x00, //
    0x00, 0x00, 0x00, 0x00,
];

/// Where a change of the variables is written first.
const WORKING_AT: usize = 0x41000;
const WORKING: [u8; 0x20] = [
    0x2b, 0x29, 0x58, 0x9e, 0x68, 0x7c, 0x7d, 0x49, 0xa0, 0xce, 0x65, 0x00, 0xfd, 0x9f, 0x1b,
    0x95, //
    0x2c, 0xaf, 0x2c, 0x64, 0xfe, 0xff, 0xff, 0xff, 0xe0, 0x0f, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, //
];

/// Its variables are Microsoft's keys, and that Secure Boot is on.
const WITH_KEYS: &str = "/usr/share/OVMF/OVMF_VARS_4M.ms.fd";

/// The flash of a VM that has never booted.
///
/// # Errors
/// `Unsupported` if the keys of Secure Boot are not there.
pub fn at_first(firmware: Firmware) -> Result<Vec<u8>, Problem> {
    if firmware != Firmware::UefiSecure {
        return Ok(without_variables());
    }
    let problem = |why: String| {
        Problem::unsupported("can't make a VM with Secure Boot", why)
            .next("install the package ovmf on the controller's machine")
    };
    let flash =
        std::fs::read(WITH_KEYS).map_err(|error| problem(format!("{WITH_KEYS}: {error}")))?;
    match flash.len() {
        BYTES => Ok(flash),
        other => Err(problem(format!("{WITH_KEYS} has {other} bytes, and not {BYTES}"))),
    }
}

/// Flash without a variable.
fn without_variables() -> Vec<u8> {
    let mut flash = vec![0xff; BYTES];
    flash[..VOLUME.len()].copy_from_slice(&VOLUME);
    flash[WORKING_AT..WORKING_AT + WORKING.len()].copy_from_slice(&WORKING);
    flash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_debians_package_has() {
        let theirs = std::fs::read("/usr/share/OVMF/OVMF_VARS_4M.fd").expect("ovmf is installed");
        assert!(at_first(Firmware::Uefi).expect("it needs nothing") == theirs);
    }

    #[test]
    fn with_secure_boot_it_has_microsofts_keys() {
        let flash = at_first(Firmware::UefiSecure).expect("ovmf is installed");
        let name: Vec<u8> = "Microsoft Corporation".bytes().collect();
        assert!(flash.windows(name.len()).any(|bytes| bytes == name));
    }
}
