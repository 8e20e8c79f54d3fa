//! Entries for the fuzz targets, with bytes that people could send.

use axum::http::HeaderMap;
use axum::http::header::{CONTENT_RANGE, IF_NONE_MATCH, IF_RANGE, RANGE};
use futures_util::FutureExt as _;
use perigee_model::TenantName;
use perigee_model::data::{FileEntry, FileKind};
use russh_sftp::protocol::Packet;

use crate::http::headers::{Wanted, content_range, is_unchanged, wanted};
use crate::path::Location;
use crate::sftp::packets::{PACKET_BYTES_MAX, two_paths};
use crate::sftp::serve::{next_packet, request};

/// What a client sends over SFTP: packets, and paths in them. No packet is longer than it may be, paths are what was sent,
/// and none leads out of its tenant's tree.
pub fn sftp(input: &[u8]) {
    drop(two_paths(input));
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
    let mut stream = input;
    while let Some(Some(packet)) = next_packet(&mut stream).now_or_never() {
        assert!(packet.len() <= PACKET_BYTES_MAX as usize);
        let parsed = request(packet.clone());
        let mut paths = Vec::new();
        match &parsed {
            Ok(Packet::Open(open)) => paths.push(&open.filename),
            Ok(Packet::Stat(stat)) => paths.push(&stat.path),
            Ok(Packet::Rename(rename)) => paths.extend([&rename.oldpath, &rename.newpath]),
            _ => {}
        }
        // After kind and number: each with its length before it, and as it was sent.
        let mut rest = packet.get(5..).unwrap_or_default();
        for path in paths {
            let (length, after) = rest.split_first_chunk::<4>().expect("it was parsed");
            assert_eq!(u32::from_be_bytes(*length) as usize, path.len());
            assert!(after.starts_with(path.as_bytes()));
            rest = &after[path.len()..];
        }
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
