//! What goes into SFTP's packets and comes out of them.

use std::collections::HashMap;

use perigee_model::data::FileEntry;
use perigee_model::{Problem, ProblemKind};
use russh_sftp::extensions::LimitsExtension;
use russh_sftp::protocol::{FileAttributes, Status, StatusCode};
use russh_sftp::server::StatusReply;

use crate::path::not_utf8;

/// The longest packet from a client: 255 KiB of a file, as OpenSSH's server takes, and its header.
pub const PACKET_BYTES_MAX: u32 = 256 << 10;
/// The most data of one read or write, as OpenSSH has it: with the head it fits [`PACKET_BYTES_MAX`].
pub const DATA_BYTES_MAX: u32 = 255 << 10;
/// Files and directories that one session has open.
pub const HANDLES_MAX: usize = 128;

/// OpenSSH's extensions that are spoken here.
pub const POSIX_RENAME: &str = "posix-rename@openssh.com";
/// OpenSSH's extension that makes a file durable (its PROTOCOL, 4.4).
pub const FSYNC: &str = "fsync@openssh.com";
/// OpenSSH's extension by which a client asks for the limits (its PROTOCOL, 4.8).
pub const LIMITS: &str = "limits@openssh.com";

/// What the server says that it knows, each in version 1.
pub fn extensions() -> HashMap<String, String> {
    [POSIX_RENAME, FSYNC, LIMITS].map(|name| (name.to_owned(), "1".to_owned())).into()
}

/// The answer to [`LIMITS`].
pub fn limits() -> LimitsExtension {
    LimitsExtension {
        max_packet_len: u64::from(PACKET_BYTES_MAX),
        max_read_len: u64::from(DATA_BYTES_MAX),
        max_write_len: u64::from(DATA_BYTES_MAX),
        max_open_handles: HANDLES_MAX as u64,
    }
}

/// SSH_FX_OK.
pub fn done(id: u32) -> Status {
    Status {
        id,
        status_code: StatusCode::Ok,
        error_message: String::new(),
        language_tag: "en".to_owned(),
    }
}

/// The nearest code of SFTP's few, with the problem's own words.
pub fn refused(problem: Problem) -> StatusReply {
    let code = match problem.kind {
        ProblemKind::NotFound => StatusCode::NoSuchFile,
        ProblemKind::Forbidden => StatusCode::PermissionDenied,
        ProblemKind::Unsupported => StatusCode::OpUnsupported,
        _ => StatusCode::Failure,
    };
    code.with_message(problem.to_string())
}

/// Size, kind and time; nobody's user and group. SFTP's times are seconds of 32 bits.
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

/// When a client says that a file was last changed, in milliseconds since 1970.
pub fn modified_ms(attrs: &FileAttributes) -> Option<u64> {
    attrs.mtime.map(|seconds| u64::from(seconds) * 1000)
}

/// How many paths stand at the beginning of a request of this kind.
fn paths_of(kind: u8) -> usize {
    match kind {
        // OPEN, LSTAT, SETSTAT, OPENDIR, REMOVE to STAT, READLINK
        3 | 7 | 9 | 11 | 13..=17 | 19 => 1,
        // RENAME, SYMLINK
        18 | 20 => 2,
        _ => 0,
    }
}

/// Whether version 3 of SFTP has a request of this kind.
pub fn is_request(kind: u8) -> bool {
    matches!(kind, 1 | 3..=20 | 200)
}

/// Whether the paths of a request are UTF-8, as names are at every door. What is no request passes.
///
/// # Errors
/// With the path that is not.
pub fn check_paths(packet: &[u8]) -> Result<(), StatusReply> {
    let Some((kind, rest)) = packet.split_first() else { return Ok(()) };
    let mut rest = rest.get(4..).unwrap_or_default();
    for _ in 0..paths_of(*kind) {
        let Some((path, after)) = text(rest) else { break };
        path_of(path)?;
        rest = after;
    }
    Ok(())
}

/// Two paths, each with its length before it.
///
/// # Errors
/// If they are none.
pub fn two_paths(data: &[u8]) -> Result<(String, String), StatusReply> {
    let (first, rest) = text(data).ok_or(StatusCode::BadMessage)?;
    let (second, _) = text(rest).ok_or(StatusCode::BadMessage)?;
    Ok((path_of(first)?.to_owned(), path_of(second)?.to_owned()))
}

fn path_of(bytes: &[u8]) -> Result<&str, StatusReply> {
    std::str::from_utf8(bytes).map_err(|_| refused(not_utf8(bytes)))
}

fn text(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_not_longer_than_their_packet() {
        assert_eq!(two_paths(b"\0\0\0\x01a\0\0\0\x02bc"), Ok(("a".into(), "bc".into())));
        for bad in [&b""[..], b"\0\0\0", b"\0\0\0\x01a", b"\0\0\0\x01a\xff\xff\xff\xffb"] {
            assert_eq!(two_paths(bad), Err(StatusCode::BadMessage.into()), "{bad:?}");
        }
        let refused = two_paths(b"\0\0\0\x01\xff\0\0\0\0").expect_err("it is no UTF-8");
        assert_eq!(refused.status_code, StatusCode::Failure);
    }
}
