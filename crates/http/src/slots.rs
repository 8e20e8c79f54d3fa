//! A small record that is replaced where it stands: its file takes its space when it is made, so it can be replaced on a full disk.
//!
//! The file has two slots of a page each: a digest in hexadecimal, a blank, the record, and zeros. A new record is written over the older one, so
//! a power cut leaves the record of before.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::certificate::hex;
use crate::files::keep_entry;

const SLOT_BYTES: usize = 4096;
const SLOTS: u64 = 2;
const DIGEST_CHARS: usize = 64;

/// The file.
#[derive(Debug)]
pub struct Slots(File);

impl Slots {
    /// Makes the file if it does not exist.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        let whole = SLOT_BYTES as u64 * SLOTS;
        if length < whole {
            // One that a power cut has left unfinished holds nothing yet.
            let missing = usize::try_from(whole - length).unwrap_or_default();
            file.write_all_at(&vec![0; missing], length)?;
            file.sync_all()?;
            keep_entry(path)?;
        }
        Ok(Self(file))
    }

    /// The records, each with its slot. A slot that was never written has none.
    ///
    /// # Errors
    /// Also when something was written and no slot can be read.
    pub fn read(&self) -> io::Result<Vec<(u64, Vec<u8>)>> {
        let (mut found, mut damaged) = (Vec::new(), false);
        for slot in 0..SLOTS {
            let mut page = [0; SLOT_BYTES];
            self.0.read_exact_at(&mut page, slot * SLOT_BYTES as u64)?;
            match record(&page) {
                Some(record) => found.push((slot, record.to_vec())),
                None => damaged |= page.iter().any(|byte| *byte != 0),
            }
        }
        if found.is_empty() && damaged {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its content is damaged"));
        }
        Ok(found)
    }

    /// Replaces a slot. When this returns, the record stays.
    pub fn write(&self, slot: u64, record: &[u8]) -> io::Result<()> {
        let mut page = digest(record).into_bytes();
        page.push(b' ');
        page.extend_from_slice(record);
        if page.len() > SLOT_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the record is too long"));
        }
        page.resize(SLOT_BYTES, 0);
        self.0.write_all_at(&page, slot % SLOTS * SLOT_BYTES as u64)?;
        self.0.sync_data()
    }
}

fn digest(record: &[u8]) -> String {
    hex(&Sha256::digest(record))
}

fn record(page: &[u8]) -> Option<&[u8]> {
    let end = page.iter().position(|byte| *byte == 0).unwrap_or(page.len());
    let (shown, rest) = page[..end].split_at_checked(DIGEST_CHARS)?;
    let record = rest.strip_prefix(b" ")?;
    (digest(record).as_bytes() == shown).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_replaced_in_place_and_a_torn_one_leaves_that_of_before() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        let slots = Slots::open(&path).expect("made");
        assert!(slots.read().expect("nothing yet").is_empty());
        slots.write(0, b"one").expect("written");
        slots.write(1, b"two").expect("written");
        let whole = vec![(0, b"one".to_vec()), (1, b"two".to_vec())];
        assert_eq!(Slots::open(&path).expect("opened").read().expect("both"), whole);
        slots.0.write_all_at(b"torn", SLOT_BYTES as u64).expect("a power cut");
        assert_eq!(slots.read().expect("one of them"), whole[..1]);
        slots.0.write_all_at(b"torn", 0).expect("a damaged disk");
        slots.read().expect_err("it is not known what was there");
    }
}
