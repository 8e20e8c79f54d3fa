//! INQUIRY and its pages of vital product data.

use md5::{Digest, Md5};
use perigee_model::{Incarnation, LayerId};

use super::sense::Sense;
use super::{PHYSICAL_EXPONENT, TRANSFER_BLOCKS_MAX, UNMAP_RANGES_MAX, WRITE_SAME_BLOCKS_MAX};

const VENDOR: &[u8; 8] = b"PERIGEE ";
const PRODUCT: &[u8; 16] = b"VOLUME          ";
const REVISION: &[u8; 4] = b"0001";
const PAGES: [u8; 6] = [0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2];
/// SAM-5, SPC-4, SBC-3 and iSCSI, none of a particular revision.
const STANDARDS: [u16; 4] = [0x00a0, 0x0460, 0x04c0, 0x0960];
const COMPARE_AND_WRITE_BLOCKS_MAX: u8 = 255;
/// The optimal transfer length of one command: 1 MiB.
const OPTIMAL_BLOCKS: u32 = 1 << 11;

/// The identity of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The iSCSI name of its target.
    pub target: String,
    id: [u8; 16],
}

impl Identity {
    /// The identity of a volume, which is the same at every host and no other volume has, also not the next one of its name; or of a
    /// sealed layer, under whatever name. Its hash is not a secret and need not be strong.
    pub fn new(
        target: String,
        export: &str,
        incarnation: Option<Incarnation>,
        layer: Option<LayerId>,
    ) -> Self {
        let id = match layer {
            Some(layer) => Md5::new().chain_update(layer.0),
            None => {
                let number = incarnation.map_or(0, |incarnation| incarnation.0);
                Md5::new().chain_update(export).chain_update([0]).chain_update(number.to_be_bytes())
            }
        };
        Self { target, id: id.finalize().into() }
    }

    /// As 32 hex digits.
    pub fn serial(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The standard data. `present` says whether a unit with that number exists.
pub fn standard(present: bool) -> Vec<u8> {
    let mut data = vec![0; 96];
    data[0] = if present { 0x00 } else { 0x7f };
    // SPC-4; numbers of units are hierarchical; response data of the one known format.
    data[2] = 0x06;
    data[3] = 0x12;
    data[4] = 96 - 5;
    // Commands are queued.
    data[7] = 0x02;
    data[8..16].copy_from_slice(VENDOR);
    data[16..32].copy_from_slice(PRODUCT);
    data[32..36].copy_from_slice(REVISION);
    for (at, standard) in STANDARDS.iter().enumerate() {
        data[58 + at * 2..60 + at * 2].copy_from_slice(&standard.to_be_bytes());
    }
    data
}

/// # Errors
/// When the page does not exist.
pub fn page(page: u8, identity: &Identity) -> Result<Vec<u8>, Sense> {
    let body = match page {
        0x00 => PAGES.to_vec(),
        0x80 => identity.serial().into_bytes(),
        0x83 => identification(identity),
        0xb0 => block_limits(),
        0xb1 => characteristics(),
        0xb2 => provisioning(),
        _ => return Err(Sense::invalid_field(2)),
    };
    let length = u16::try_from(body.len()).expect("a page is short");
    let mut data = vec![0x00, page];
    data.extend(length.to_be_bytes());
    data.extend(body);
    Ok(data)
}

/// Names of the unit, and of the target's only port.
fn identification(identity: &Identity) -> Vec<u8> {
    const ISCSI: u8 = 0x50;
    const OF_PORT: u8 = 0x90;
    let mut data = Vec::new();
    let mut add = |set: u8, kind: u8, value: &[u8]| {
        let length = u8::try_from(value.len()).expect("a name is shorter than 256 bytes");
        data.extend([set, kind, 0, length]);
        data.extend(value);
    };
    let vendor = [&VENDOR[..], identity.serial().as_bytes()].concat();
    add(0x02, 0x01, &vendor);
    // NAA 3: assigned here.
    let mut naa = [0; 8];
    naa.copy_from_slice(&identity.id[..8]);
    naa[0] = 0x30 | naa[0] & 0x0f;
    add(0x01, 0x03, &naa);
    let mut port = format!("{},t,0x0001", identity.target).into_bytes();
    port.resize((port.len() + 1).next_multiple_of(4), 0);
    add(ISCSI | 0x03, OF_PORT | 0x08, &port);
    add(ISCSI | 0x01, OF_PORT | 0x04, &[0, 0, 0, 1]);
    data
}

fn block_limits() -> Vec<u8> {
    let number = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes();
    let granularity: u16 = 1 << PHYSICAL_EXPONENT;
    let mut data = vec![0; 60];
    // WSNZ: a WRITE SAME of 0 blocks does not mean all blocks.
    data[0] = 0x01;
    data[1] = COMPARE_AND_WRITE_BLOCKS_MAX;
    data[2..4].copy_from_slice(&granularity.to_be_bytes());
    data[4..8].copy_from_slice(&number(TRANSFER_BLOCKS_MAX));
    data[8..12].copy_from_slice(&OPTIMAL_BLOCKS.to_be_bytes());
    data[12..16].copy_from_slice(&number(TRANSFER_BLOCKS_MAX));
    data[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    data[20..24].copy_from_slice(&u32::from(UNMAP_RANGES_MAX).to_be_bytes());
    data[24..28].copy_from_slice(&u32::from(granularity).to_be_bytes());
    // The alignment that follows is valid, and 0.
    data[28] = 0x80;
    data[32..40].copy_from_slice(&WRITE_SAME_BLOCKS_MAX.to_be_bytes());
    data
}

fn characteristics() -> Vec<u8> {
    let mut data = vec![0; 60];
    // The medium does not rotate.
    data[1] = 0x01;
    data
}

fn provisioning() -> Vec<u8> {
    // UNMAP and both WRITE SAME with UNMAP; what is unmapped reads as zeros; thin.
    vec![0, 0xe4, 0x02, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(volume: &str, incarnation: u32) -> Identity {
        let target = format!("iqn.2026-11.org.perigee:{volume}");
        Identity::new(target, volume, Some(Incarnation(incarnation)), None)
    }

    fn identity(volume: &str) -> Identity {
        of(volume, 1)
    }

    #[test]
    fn every_page_that_is_listed_is_there_and_says_its_length() {
        for number in PAGES {
            let data = page(number, &identity("data")).expect("a page");
            assert_eq!(data[1], number);
            assert_eq!(usize::from(u16::from_be_bytes([data[2], data[3]])), data.len() - 4);
        }
        assert_eq!(page(0x81, &identity("data")), Err(Sense::invalid_field(2)));
    }

    #[test]
    fn volumes_have_serial_numbers_of_their_own_that_stay() {
        assert_eq!(identity("data").serial(), identity("data").serial());
        assert_ne!(identity("data").serial(), identity("other").serial());
        assert_ne!(of("data", 1).serial(), of("data", 2).serial(), "it was made anew");
    }

    #[test]
    fn a_long_name_of_a_target_fits() {
        assert!(page(0x83, &identity(&"v".repeat(63))).is_ok());
    }
}
