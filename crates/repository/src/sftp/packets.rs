//! What goes into SFTP's packets and comes out of them.

use std::collections::HashMap;

use perigee_model::data::FileEntry;
use perigee_model::{Problem, ProblemKind};
use russh_sftp::extensions::LimitsExtension;
use russh_sftp::protocol::{FileAttributes, Status, StatusCode};
use russh_sftp::server::StatusReply;

/// The longest packet from a client: 255 KiB of a file, as OpenSSH's server takes, and its header.
pub const PACKET_BYTES_MAX: u32 = 256 << 10;
pub const DATA_BYTES_MAX: u32 = 255 << 10;
/// Files and directories that one session has open.
pub const HANDLES_MAX: usize = 128;

/// OpenSSH's extensions that are spoken here.
pub const POSIX_RENAME: &str = "posix-rename@openssh.com";
pub const FSYNC: &str = "fsync@openssh.com";
pub const LIMITS: &str = "limits@openssh.com";

pub fn extensions() -> HashMap<String, String> {
    [POSIX_RENAME, FSYNC, LIMITS].map(|name| (name.to_owned(), "1".to_owned())).into()
}

pub fn limits() -> LimitsExtension {
    LimitsExtension {
        max_packet_len: u64::from(PACKET_BYTES_MAX),
        max_read_len: u64::from(DATA_BYTES_MAX),
        max_write_len: u64::from(DATA_BYTES_MAX),
        max_open_handles: HANDLES_MAX as u64,
    }
}

pub fn done(id: u32) -> Status {
    Status {
        id,
        status_code: StatusCode::Ok,
        error_message: String::new(),
        language_tag: "en".to_owned(),
    }
}

pub fn refused(problem: Problem) -> StatusReply {
    let code = match problem.kind {
        ProblemKind::NotFound => StatusCode::NoSuchFile,
        ProblemKind::Forbidden => StatusCode::PermissionDenied,
        ProblemKind::Unsupported => StatusCode::OpUnsupported,
        _ => StatusCode::Failure,
    };
    code.with_message(problem.to_string())
}

pub fn attributes(entry: &FileEntry) -> FileAttributes {
    let modified_s = u32::try_from(entry.modified_ms / 1000).unwrap_or(u32::MAX);
    FileAttributes {
        size: Some(entry.size_bytes),
        permissions: Some(if entry.is_directory() { 0o040_755 } else { 0o100_644 }),
        atime: Some(modified_s),
        mtime: Some(modified_s),
        ..FileAttributes::default()
    }
}

/// Two texts, each with its length before it.
pub fn two_texts(data: &[u8]) -> Option<(String, String)> {
    let (first, rest) = text(data)?;
    let (second, _) = text(rest)?;
    Some((first, second))
}

fn text(data: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    let (text, rest) = rest.split_at_checked(length)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::two_texts;

    #[test]
    fn texts_are_not_longer_than_their_packet() {
        assert_eq!(two_texts(b"\0\0\0\x01a\0\0\0\x02bc"), Some(("a".into(), "bc".into())));
        for bad in [
            &b""[..],
            b"\0\0\0",
            b"\0\0\0\x01a",
            b"\0\0\0\x01a\xff\xff\xff\xffb",
            b"\0\0\0\x01\xff\0\0\0\0",
        ] {
            assert_eq!(two_texts(bad), None, "{bad:?}");
        }
    }
}
