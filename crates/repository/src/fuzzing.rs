//! Entries for the fuzz targets, with bytes that people could send.

use std::pin::Pin;
use std::task::{Context, Waker};

use axum::http::HeaderMap;
use axum::http::header::{CONTENT_RANGE, IF_NONE_MATCH, IF_RANGE, RANGE};
use perigee_model::TenantName;
use perigee_model::data::{FileEntry, FileKind};
use tokio::io::{AsyncRead as _, ReadBuf};

use crate::http::headers::{Wanted, content_range, is_unchanged, wanted};
use crate::path::Location;
use crate::sftp::frames::Frames;
use crate::sftp::packets::{PACKET_BYTES_MAX, two_texts};

/// What a client sends over SFTP: packets, and texts and paths in them. No packet is longer than it may be, and no path
/// leads out of its tenant's tree.
pub fn sftp(input: &[u8]) {
    drop(two_texts(input));
    if let Ok(text) = std::str::from_utf8(input) {
        let home = TenantName::default();
        if let Ok(Location::In(tenant, path)) = Location::resolve(text, &home) {
            let names = path.names().iter();
            assert!(names.clone().all(|name| !matches!(name.as_str(), "" | "." | "..")));
            assert!(names.clone().all(|name| !name.contains(['/', '\0'])));
            let location = Location::In(tenant, path);
            assert_eq!(Location::resolve(&location.to_string(), &home).ok(), Some(location));
        }
    }
    // The first byte says how much is read at once.
    let Some((step, stream)) = input.split_first() else { return };
    let mut frames = Frames::new(stream);
    let mut read = Vec::new();
    let mut piece = vec![0; usize::from(*step) + 1];
    loop {
        let mut buffer = ReadBuf::new(&mut piece);
        let mut cx = Context::from_waker(Waker::noop());
        let polled = Pin::new(&mut frames).poll_read(&mut cx, &mut buffer);
        assert!(polled.is_ready(), "all bytes are there");
        if buffer.filled().is_empty() {
            break;
        }
        read.extend_from_slice(buffer.filled());
    }
    assert!(stream.starts_with(&read));
    let mut rest = &read[..];
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length);
        assert!(length <= PACKET_BYTES_MAX);
        rest = after.get(length as usize..).unwrap_or_default();
    }
}

/// Headers about parts of files, one in a line. What is to be read is in the file, and what is to be written has an end.
pub fn ranges(input: &[u8]) {
    let mut headers = HeaderMap::new();
    let names = [CONTENT_RANGE, RANGE, IF_RANGE, IF_NONE_MATCH];
    for (name, line) in names.into_iter().zip(input.split(|byte| *byte == b'\n')) {
        if let Ok(value) = line.try_into() {
            headers.insert(name, value);
        }
    }
    if let Ok(Some(range)) = content_range(&headers) {
        assert!(range.from < range.until);
        assert!(range.total.is_none_or(|total| range.until <= total));
    }
    for size_bytes in [0, 1, 1000, u64::MAX] {
        let (name, kind, sha256) = ("f".to_owned(), FileKind::File, Some("a".repeat(64)));
        let entry = FileEntry { name, kind, size_bytes, modified_ms: 0, sha256 };
        let _: bool = is_unchanged(&headers, &entry);
        if let Wanted::Part(from, until) = wanted(&headers, &entry) {
            assert!(from < until && until <= size_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_seeds_of_the_targets_pass() {
        let seeds = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
        for (target, run) in
            [("sftp_packets", super::sftp as fn(&[u8])), ("http_ranges", super::ranges)]
        {
            let found = std::fs::read_dir(seeds.join(target)).expect("seeds");
            for seed in found {
                run(&std::fs::read(seed.expect("an entry").path()).expect("a seed"));
            }
        }
    }
}
