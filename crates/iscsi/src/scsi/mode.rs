//! The settings of a unit: MODE SENSE and MODE SELECT.
//!
//! Two bits of the control page can be changed, for all initiators and until the server ends:
//! D_SENSE, the format of sense data, and SWP, write protection.

use super::command::ModeSense;
use super::sense::Sense;
use super::{BLOCK_BYTES, Outcome};

const RECOVERY: u8 = 0x01;
const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const EXCEPTIONS: u8 = 0x1c;
const ALL: u8 = 0x3f;
const D_SENSE: u8 = 0x04;
const SWP: u8 = 0x08;

/// The kinds of values for which MODE SENSE asks.
mod control {
    /// Not values but masks: the bits that MODE SELECT may change.
    pub const CHANGEABLE: u8 = 1;
    /// Values that survive a restart. There are none here.
    pub const SAVED: u8 = 3;
}

/// The two bits of the control page that an initiator may change. They hold for all initiators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    pub descriptor_sense: bool,
    pub write_protected: bool,
}

fn page(number: u8, of: u8, settings: Settings) -> Option<Vec<u8>> {
    let (length, values): (usize, Vec<(usize, u8)>) = match number {
        RECOVERY => (12, vec![]),
        // WCE: a write is answered before it is durable; a flush makes it durable.
        CACHING => (20, vec![(2, 0x04)]),
        CONTROL => {
            // Commands may be reordered; a task that is aborted by another initiator just ends;
            // a busy unit is not busy for long.
            (
                12,
                vec![
                    (2, if settings.descriptor_sense { D_SENSE } else { 0 }),
                    (3, 0x10),
                    (4, if settings.write_protected { SWP } else { 0 }),
                    (8, 0xff),
                    (9, 0xff),
                ],
            )
        }
        EXCEPTIONS => (12, vec![]),
        _ => return None,
    };
    let mut bytes = vec![0; length];
    bytes[0] = number;
    bytes[1] = u8::try_from(length - 2).expect("a page is short");
    match (of, number) {
        (control::CHANGEABLE, CONTROL) => (bytes[2], bytes[4]) = (D_SENSE, SWP),
        (control::CHANGEABLE, _) => {}
        _ => values.into_iter().for_each(|(at, value)| bytes[at] = value),
    }
    Some(bytes)
}

/// MODE SENSE. `protected` says whether the unit is read-only, for whatever reason.
pub fn sense(asked: &ModeSense, settings: Settings, protected: bool, blocks: u64) -> Outcome {
    if asked.control == control::SAVED {
        return Sense::NOT_SAVED.into();
    }
    if !matches!(asked.subpage, 0x00 | 0xff) || asked.subpage != 0 && asked.page != ALL {
        return Sense::invalid_field(3).into();
    }
    let wanted = |number| page(number, asked.control, settings);
    let pages = if asked.page == ALL {
        [RECOVERY, CACHING, CONTROL, EXCEPTIONS].into_iter().filter_map(wanted).collect()
    } else {
        match wanted(asked.page) {
            Some(page) => vec![page],
            None => return Sense::invalid_field(2).into(),
        }
    };
    let descriptor = if asked.block_descriptor { descriptor(blocks).to_vec() } else { Vec::new() };
    let body = [descriptor.as_slice(), &pages.concat()].concat();
    // DPOFUA: both bits of READ and WRITE are understood.
    let parameter = if protected { 0x90 } else { 0x10 };
    let descriptor_bytes = u8::try_from(descriptor.len()).expect("one descriptor");
    let mut data = if asked.long {
        let length = u16::try_from(body.len() + 6).expect("pages are short");
        let [high, low] = length.to_be_bytes();
        vec![high, low, 0, parameter, 0, 0, 0, descriptor_bytes]
    } else {
        let length = u8::try_from(body.len() + 3).expect("pages are short");
        vec![length, 0, parameter, descriptor_bytes]
    };
    data.extend(body);
    Outcome::answer(data, asked.allocated_bytes)
}

fn descriptor(blocks: u64) -> [u8; 8] {
    let count = u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes();
    let [_, _, high, low] = u32::try_from(BLOCK_BYTES).expect("512").to_be_bytes();
    [count[0], count[1], count[2], count[3], 0, 0, high, low]
}

/// The settings after a MODE SELECT.
///
/// # Errors
/// When the list is too short, or changes a setting that can't be changed. Then nothing is changed.
pub fn select(list: &[u8], long: bool, settings: Settings) -> Result<Settings, Sense> {
    if list.is_empty() {
        return Ok(settings);
    }
    let header_bytes = if long { 8 } else { 4 };
    let header = list.get(..header_bytes).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
    let descriptor_bytes = if long {
        usize::from(u16::from_be_bytes([header[6], header[7]]))
    } else {
        usize::from(header[3])
    };
    if !matches!(descriptor_bytes, 0 | 8) {
        return Err(Sense::INVALID_PARAMETER);
    }
    let rest = &list[header_bytes..];
    let mut rest = rest.get(descriptor_bytes..).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
    let mut new = settings;
    while let [number, length, ..] = *rest {
        let length = usize::from(length) + 2;
        let wanted = rest.get(..length).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        new = change(number & 0x7f, wanted, new)?;
        rest = &rest[length..];
    }
    if rest.is_empty() { Ok(new) } else { Err(Sense::PARAMETER_LIST_LENGTH) }
}

fn change(number: u8, wanted: &[u8], settings: Settings) -> Result<Settings, Sense> {
    let present = page(number, 0, settings).ok_or(Sense::INVALID_PARAMETER)?;
    let changeable = page(number, control::CHANGEABLE, settings).ok_or(Sense::INVALID_PARAMETER)?;
    let fits = wanted.len() == present.len()
        && (2..present.len()).all(|at| (present[at] ^ wanted[at]) & !changeable[at] == 0);
    if !fits {
        return Err(Sense::INVALID_PARAMETER);
    }
    if number != CONTROL {
        return Ok(settings);
    }
    Ok(Settings {
        descriptor_sense: wanted[2] & D_SENSE != 0,
        write_protected: wanted[4] & SWP != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(page: u8, control: u8) -> ModeSense {
        ModeSense {
            long: false,
            block_descriptor: true,
            control,
            page,
            subpage: 0,
            allocated_bytes: 255,
        }
    }

    fn sensed(page: u8, control: u8) -> Vec<u8> {
        match sense(&asked(page, control), Settings::default(), false, 1 << 20) {
            Outcome::Good(data) => data.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_pages_come_after_the_block_descriptor() {
        let data = sensed(ALL, 0);
        assert_eq!(usize::from(data[0]) + 1, data.len());
        assert_eq!(data[3..12], [8, 0, 0x10, 0, 0, 0, 0, 2, 0]);
        assert_eq!(
            (data[12], data[24], data[44], data[56]),
            (RECOVERY, CACHING, CONTROL, EXCEPTIONS)
        );
    }

    #[test]
    fn what_is_read_can_be_written_back_with_the_changeable_bits_changed() {
        let mut list = sensed(CONTROL, 0);
        list[0] = 0;
        let same = select(&list, false, Settings::default());
        assert_eq!(same, Ok(Settings::default()));
        list[12 + 4] |= SWP;
        let protected = Settings { write_protected: true, descriptor_sense: false };
        assert_eq!(select(&list, false, Settings::default()), Ok(protected));
        list[12 + 3] ^= 0x01;
        assert_eq!(select(&list, false, Settings::default()), Err(Sense::INVALID_PARAMETER));
    }

    #[test]
    fn a_list_that_is_cut_is_refused() {
        let list = sensed(CONTROL, 0);
        for length in 1..list.len() {
            if length != 4 + 8 {
                let refused = select(&list[..length], false, Settings::default());
                assert_eq!(refused, Err(Sense::PARAMETER_LIST_LENGTH), "{length}");
            }
        }
    }

    #[test]
    fn nothing_is_saved() {
        let refused = sense(&asked(ALL, control::SAVED), Settings::default(), false, 1);
        assert_eq!(refused, Outcome::Check(Sense::NOT_SAVED));
    }
}
