//! The sums over a file's content, which are kept beside the content: the SHA-256 names it, and the CRC-64/NVME finds damage when the file is
//! read. The CRC takes less than a tenth of the SHA-256's time, which is as much as that of sending the file over TLS.

use std::fs::File;

use crc_fast::CrcAlgorithm;
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use crate::listing::SHA256;

/// Extended attribute of a file: 16 hexadecimal digits. Files of before have none.
const CRC64: &str = "user.perigee.crc64";

/// Both sums over a content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sums {
    /// 64 hexadecimal digits.
    pub sha256: String,
    crc64: u64,
}

impl Sums {
    /// Keeps both with the file.
    ///
    /// # Errors
    /// If the disk fails.
    pub fn keep(&self, file: &File) -> Result<(), Errno> {
        let crc64 = format!("{:016x}", self.crc64);
        fsetxattr(file, CRC64, crc64.as_bytes(), XattrFlags::empty())?;
        fsetxattr(file, SHA256, self.sha256.as_bytes(), XattrFlags::empty())
    }
}

/// Sums up what is written.
#[derive(Debug, Clone)]
pub struct Summer {
    sha256: Sha256,
    crc64: crc_fast::Digest,
}

impl Summer {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self { sha256: Sha256::new(), crc64: crc64() }
    }

    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        self.crc64.update(bytes);
    }

    /// The sums over all bytes so far.
    pub fn sums(&self) -> Sums {
        let sha256 = hex(&self.sha256.clone().finalize());
        Sums { sha256, crc64: self.crc64.finalize() }
    }
}

fn crc64() -> crc_fast::Digest {
    crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme)
}

/// Compares what is read with what was written.
#[derive(Debug)]
pub enum Check {
    /// With the CRC, and the one that was written.
    Crc64(crc_fast::Digest, u64),
    /// With the SHA-256: the file has no CRC.
    Sha256(Sha256, String),
    /// The file has no sum.
    Nothing,
}

impl Check {
    /// By the sum that is kept with the file, else by the SHA-256.
    pub fn of(file: Option<&File>, sha256: Option<&str>) -> Self {
        match (file.and_then(kept), sha256) {
            (Some(written), _) => Self::Crc64(crc64(), written),
            (None, Some(written)) => Self::Sha256(Sha256::new(), written.to_owned()),
            (None, None) => Self::Nothing,
        }
    }

    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc64(digest, _) => digest.update(bytes),
            Self::Sha256(hasher, _) => hasher.update(bytes),
            Self::Nothing => {}
        }
    }

    /// All was read.
    ///
    /// # Errors
    /// What differs.
    pub fn end(&mut self) -> Result<(), String> {
        let (name, found, written) = match self {
            Self::Crc64(digest, written) => {
                ("CRC-64", format!("{:016x}", digest.finalize()), format!("{written:016x}"))
            }
            Self::Sha256(hasher, written) => {
                ("SHA-256", hex(&hasher.clone().finalize()), written.clone())
            }
            Self::Nothing => return Ok(()),
        };
        match found == written {
            true => Ok(()),
            false => Err(format!("the {name} is {found}, and was {written}")),
        }
    }
}

fn kept(file: &File) -> Option<u64> {
    let mut text = [0_u8; 16];
    let length = fgetxattr(file, CRC64, &mut text[..]).ok()?;
    let text = std::str::from_utf8(text.get(..length)?).ok()?;
    (length == text.len()).then(|| u64::from_str_radix(text, 16).ok())?
}

/// Two lowercase digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sums_are_those_that_everybody_else_computes() {
        let mut summer = Summer::new();
        summer.update(b"1234");
        summer.update(b"56789");
        let sums = summer.sums();
        // The check value of CRC-64/NVME in its specification (NVM Command Set, 5.2.1.3.4).
        assert_eq!(sums.crc64, 0xae8b_1486_0a79_9888);
        assert!(sums.sha256.starts_with("15e2b0d3c33891eb"), "{}", sums.sha256);
    }

    #[test]
    fn a_file_of_before_is_compared_with_its_sha256() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("f")).unwrap();
        let mut summer = Summer::new();
        summer.update(b"data");
        let sums = summer.sums();
        let sha256 = Some(sums.sha256.as_str());
        let ends = |mut check: Check, bytes: &[u8]| {
            check.update(bytes);
            check.end()
        };
        assert!(ends(Check::of(Some(&file), None), b"tada").is_ok(), "nothing is known");
        assert!(ends(Check::of(Some(&file), sha256), b"data").is_ok());
        assert!(ends(Check::of(Some(&file), sha256), b"tada").unwrap_err().contains("SHA-256"));
        sums.keep(&file).unwrap();
        assert!(ends(Check::of(Some(&file), sha256), b"data").is_ok());
        assert!(ends(Check::of(Some(&file), sha256), b"tada").unwrap_err().contains("CRC-64"));
    }
}
