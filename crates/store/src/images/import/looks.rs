//! What a file looks like. `qemu-img` recognizes a format by the first bytes, and takes every other file for a raw disk. So what is
//! recognized by its end, is packed, or is encrypted would become a disk that nobody can use.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use nix::unistd::{Whence, lseek};
use perigee_model::Problem;
use perigee_model::volume::ImageFormat;

use crate::images::progress::SECTOR_BYTES;

/// As much of the beginning as is looked at: a vmdk's description is longer than a sector.
const START_BYTES: usize = 4096;

const MEANT_SO: &str = "if its bytes are the disk: --image-format raw";

/// How the files begin in which images are often published: where, with what, and which program unpacks them.
const PACKED: [(usize, &[u8], &str); 11] = [
    (0, b"\x1f\x8b\x08", "gunzip"),
    (0, b"\xfd7zXZ\0", "unxz"),
    (0, b"BZh", "bunzip2"),
    (0, b"\x28\xb5\x2f\xfd", "unzstd"),
    (0, b"\x04\x22\x4d\x18", "lz4 -d"),
    (0, b"LZIP", "lzip -d"),
    (0, b"PK\x03\x04", "unzip"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z x"),
    (0, b"Rar!\x1a\x07", "unrar x"),
    (0, b"\x3a\xff\x26\xed", "simg2img"),
    (257, b"ustar", "tar"),
];

/// What was found out before `qemu-img` sees the file.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// The format that `qemu-img` is told. `None`: it finds out.
    pub(super) format: Option<ImageFormat>,
    /// What the user is to know about it.
    pub(super) note: Option<String>,
    /// What the file has beside the description at its end.
    pub(super) content_bytes: Option<u64>,
}

impl Look {
    pub(super) fn of(format: ImageFormat) -> Self {
        Self { format: Some(format), ..Self::default() }
    }
}

/// A file's or a disk's length.
pub(super) fn length(file: &File) -> io::Result<u64> {
    Ok(lseek(file, 0, Whence::SeekEnd)?.cast_unsigned())
}

/// Up to so many bytes from an offset on.
fn bytes_at(file: &File, at: u64, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    let mut got = 0;
    while got < count {
        match file.read_at(&mut bytes[got..], at + got as u64)? {
            0 => break,
            more => got += more,
        }
    }
    bytes.truncate(got);
    Ok(bytes)
}

/// What a file is. Refuses one from which no disk can be made, unless its user has said that it is a raw one.
pub(super) fn look(what: &str, file: &File, said: Option<ImageFormat>) -> Result<Look, Problem> {
    if said == Some(ImageFormat::Raw) {
        return Ok(Look::of(ImageFormat::Raw));
    }
    let failed = |error: io::Error| Problem::invalid(what, error);
    let start = bytes_at(file, 0, START_BYTES).map_err(failed)?;
    let length_bytes = length(file).map_err(failed)?;
    let end = bytes_at(file, length_bytes.saturating_sub(SECTOR_BYTES), 512).map_err(failed)?;
    let refused = |why: String, next: String| Err(Problem::invalid(what, why).next(next));
    if let Some(extent) = extent_of_vmdk(&start) {
        let why = format!("it only describes a disk whose data is in other files{extent}");
        let next = "where all of them are: `qemu-img convert -O qcow2 FILE disk.qcow2`; then import disk.qcow2";
        return refused(why, next.to_owned());
    }
    if said.is_some() {
        return Ok(Look { format: said, ..Look::default() });
    }
    if start.starts_with(b"LUKS\xba\xbe") {
        let why = "it is a disk that is encrypted with LUKS".to_owned();
        let next = "for a guest that has its key, import it as it is: --image-format raw; for others, decrypt it \
                    first (`qemu-img convert`, `cryptsetup`)";
        return refused(why, next.to_owned());
    }
    let packed = |(at, begin, _): &&(usize, &[u8], &str)| {
        start.get(*at..).is_some_and(|from| from.starts_with(begin))
    };
    if let Some((_, _, program)) = PACKED.iter().find(packed) {
        let why = "it is a packed file, and not a disk image itself".to_owned();
        let next = format!("unpack it with {program} and import what is in it; or, {MEANT_SO}");
        return refused(why, next);
    }
    if end.starts_with(b"koly") {
        let why = "it is an Apple disk image (DMG)".to_owned();
        let next = "convert it: `qemu-img convert -f dmg -O qcow2 FILE disk.qcow2`";
        return refused(why, format!("{next}; or, {MEANT_SO}"));
    }
    // A dynamic one has a copy of it at its beginning.
    if end.starts_with(b"conectix") && !start.starts_with(b"conectix") {
        let note = format!(
            "the file is a VHD of fixed size: its last {SECTOR_BYTES} bytes describe it and are no part of the disk; {MEANT_SO}"
        );
        let content_bytes = Some(length_bytes.saturating_sub(SECTOR_BYTES));
        return Ok(Look { note: Some(note), content_bytes, ..Look::of(ImageFormat::Vhd) });
    }
    Ok(Look::default())
}

/// The first of the files that a VMDK's description names, if the file is such a description.
fn extent_of_vmdk(start: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(start);
    let mut lines = text.lines().map(str::trim).skip_while(|line| line.is_empty());
    if !lines.next()?.eq_ignore_ascii_case("# disk descriptorfile") {
        return None;
    }
    let extent = |line: &str| {
        let is_extent = ["RW ", "RDONLY ", "NOACCESS "].iter().any(|how| line.starts_with(how));
        let name = is_extent.then(|| line.split('"').nth(1)).flatten()?;
        Some(name.chars().take(80).collect::<String>())
    };
    Some(lines.find_map(extent).map(|name| format!(", {name:?} for example")).unwrap_or_default())
}

/// The length of a raw disk. One that nobody has called raw has whole sectors.
pub(super) fn check_raw(
    what: &str,
    file: &File,
    said: Option<ImageFormat>,
) -> Result<u64, Problem> {
    let length_bytes = length(file).map_err(|error| Problem::invalid(what, error))?;
    if said.is_some() || length_bytes.is_multiple_of(SECTOR_BYTES) {
        return Ok(length_bytes);
    }
    let why = format!(
        "it is not a disk image: qemu-img does not know its format, and its length of {length_bytes} bytes is no \
         whole number of {SECTOR_BYTES}-byte sectors"
    );
    Err(Problem::invalid(what, why)
        .next("`qemu-img info FILE` shows the format that qemu-img detects"))
}
