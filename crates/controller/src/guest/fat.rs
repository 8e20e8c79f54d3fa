//! Writes a small FAT16 filesystem with some files in its root directory: the disk that cloud-init reads.
//!
//! Only a writer: nobody here reads a filesystem that a guest may have written. The layout, in sectors of 512 bytes
//! (Microsoft's "FAT: General Overview of On-Disk Format", 1.03):
//!
//! | part | sectors |
//! |---|---|
//! | boot sector | 1 |
//! | two equal allocation tables, one entry of 16 bits for each cluster | 2 * [`Layout::fat_sectors`] |
//! | root directory, [`ROOT_ENTRIES`] entries of 32 bytes | 32 |
//! | clusters of 4 KiB, the first one is number 2 | 8 each |
//!
//! A filesystem counts as FAT16 if it has 4085 to 65524 clusters, so the smallest one has 16 MiB. Nothing is written behind
//! the last file, and a volume has no blocks there.

const SECTOR: usize = 512;
const CLUSTER_SECTORS: u8 = 8;
const CLUSTER: usize = CLUSTER_SECTORS as usize * SECTOR;
const ROOT_ENTRIES: usize = 512;
const ENTRY: usize = 32;
const ROOT_SECTORS: usize = ROOT_ENTRIES * ENTRY / SECTOR;
const FIRST_CLUSTER: usize = 2;
/// 4085 is the least; a few more keep away from programs that miscount.
const CLUSTERS_MIN: usize = 4104;
const CLUSTERS_MAX: usize = 65_524;
/// Of a long name, in one entry of the directory.
const NAME_PART: usize = 13;

const ATTRIBUTE_LABEL: u8 = 0x08;
const ATTRIBUTE_LONG_NAME: u8 = 0x0f;
const ATTRIBUTE_FILE: u8 = 0x20;
/// 2026-01-01, as FAT writes it. The filesystem of the same files is the same at any time.
const DATE: u16 = ((2026 - 1980) << 9) | (1 << 5) | 1;

/// A filesystem: its bytes up to the end of the last file, and the size of its disk.
#[derive(Debug)]
pub struct Fat {
    pub bytes: Vec<u8>,
    pub disk_bytes: u64,
}

struct Layout {
    clusters: usize,
    fat_sectors: usize,
}

impl Layout {
    fn root_at(&self) -> usize {
        (1 + 2 * self.fat_sectors) * SECTOR
    }

    fn data_at(&self) -> usize {
        self.root_at() + ROOT_SECTORS * SECTOR
    }

    fn sectors(&self) -> usize {
        self.data_at() / SECTOR + self.clusters * usize::from(CLUSTER_SECTORS)
    }
}

/// A filesystem with this label and these files, by their names.
///
/// # Errors
/// If the files, or their names, do not fit.
pub fn filesystem(label: &str, files: &[(&str, &[u8])]) -> Result<Fat, String> {
    let used: usize = files.iter().map(|(_, content)| content.len().div_ceil(CLUSTER)).sum();
    let entries: usize = files.iter().map(|(name, _)| 1 + name.len().div_ceil(NAME_PART)).sum();
    if used > CLUSTERS_MAX || entries + 1 > ROOT_ENTRIES {
        let max_mib = (CLUSTERS_MAX * CLUSTER) >> 20;
        return Err(format!("the files have more than {max_mib} MiB, or too many names"));
    }
    if let Some((name, _)) = files.iter().find(|(name, _)| !is_name(name)) {
        return Err(format!("{name:?} is no name of a file in FAT"));
    }
    let clusters = used.max(CLUSTERS_MIN);
    let fat_sectors = ((clusters + FIRST_CLUSTER) * 2).div_ceil(SECTOR);
    let layout = Layout { clusters, fat_sectors };
    let mut bytes = vec![0; layout.data_at() + used * CLUSTER];
    bytes[..SECTOR].copy_from_slice(&boot_sector(label, &layout));
    let mut table: Vec<u16> = vec![0xfff8, 0xffff];
    let mut directory = label_entry(label).to_vec();
    for (number, (name, content)) in files.iter().enumerate() {
        let first = table.len();
        let count = content.len().div_ceil(CLUSTER);
        let next = (1..count).map(|index| number16(first + index));
        table.extend(next.chain((count > 0).then_some(0xffff)));
        directory.extend(entries_of(
            name,
            number,
            if count == 0 { 0 } else { first },
            content.len(),
        ));
        let at = layout.data_at() + (first - FIRST_CLUSTER) * CLUSTER;
        bytes[at..at + content.len()].copy_from_slice(content);
    }
    let table: Vec<u8> = table.into_iter().flat_map(u16::to_le_bytes).collect();
    for copy in 0..2 {
        let at = (1 + copy * layout.fat_sectors) * SECTOR;
        bytes[at..at + table.len()].copy_from_slice(&table);
    }
    bytes[layout.root_at()..layout.root_at() + directory.len()].copy_from_slice(&directory);
    let disk_bytes = (layout.sectors() * SECTOR).next_multiple_of(CLUSTER) as u64;
    Ok(Fat { bytes, disk_bytes })
}

fn is_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !name.is_empty() && name.len() <= 64 && name.chars().all(is_letter) && !name.ends_with('.')
}

/// What was bounded by [`CLUSTERS_MAX`] before.
fn number16(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

/// The label in the form of a short name: filled up with spaces.
fn padded(label: &str) -> [u8; 11] {
    let mut name = [b' '; 11];
    for (to, from) in name.iter_mut().zip(label.bytes()) {
        *to = from;
    }
    name
}

fn boot_sector(label: &str, layout: &Layout) -> [u8; SECTOR] {
    let mut sector = [0; SECTOR];
    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    // A jump over what follows, as every FAT begins.
    put(0, &[0xeb, 0x3c, 0x90]);
    put(3, b"PERIGEE ");
    put(11, &number16(SECTOR).to_le_bytes());
    put(13, &[CLUSTER_SECTORS]);
    put(14, &1_u16.to_le_bytes());
    put(16, &[2]);
    put(17, &number16(ROOT_ENTRIES).to_le_bytes());
    let sectors = layout.sectors();
    match u16::try_from(sectors) {
        Ok(few) => put(19, &few.to_le_bytes()),
        Err(_) => put(32, &u32::try_from(sectors).unwrap_or(u32::MAX).to_le_bytes()),
    }
    // A fixed disk.
    put(21, &[0xf8]);
    put(22, &number16(layout.fat_sectors).to_le_bytes());
    put(24, &32_u16.to_le_bytes());
    put(26, &64_u16.to_le_bytes());
    put(36, &[0x80, 0, 0x29]);
    put(39, b"PERI");
    put(43, &padded(label));
    put(54, b"FAT16   ");
    put(510, &[0x55, 0xaa]);
    sector
}

fn label_entry(label: &str) -> [u8; ENTRY] {
    entry(padded(label), ATTRIBUTE_LABEL, 0, 0)
}

fn entry(name: [u8; 11], attribute: u8, cluster: usize, length: usize) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[..11].copy_from_slice(&name);
    entry[11] = attribute;
    for at in [16, 18, 24] {
        entry[at..at + 2].copy_from_slice(&DATE.to_le_bytes());
    }
    entry[26..28].copy_from_slice(&number16(cluster).to_le_bytes());
    entry[28..].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    entry
}

/// A file's entries: its long name, the last part first, and then the short one.
fn entries_of(name: &str, number: usize, cluster: usize, length: usize) -> Vec<u8> {
    let short = short_name(number);
    let sum = checksum(&short);
    let letters: Vec<u16> = name.encode_utf16().collect();
    let parts = letters.len().div_ceil(NAME_PART);
    let mut entries = Vec::new();
    for part in (0..parts).rev() {
        let mut units = [0xffff_u16; NAME_PART];
        let own = &letters[part * NAME_PART..letters.len().min((part + 1) * NAME_PART)];
        units[..own.len()].copy_from_slice(own);
        // A zero ends a name that does not fill its last part.
        if let Some(end) = units.get_mut(own.len()) {
            *end = 0;
        }
        let mut entry = [0; ENTRY];
        let is_last = if part + 1 == parts { 0x40 } else { 0 };
        entry[0] = is_last | u8::try_from(part + 1).unwrap_or(0);
        entry[11] = ATTRIBUTE_LONG_NAME;
        entry[13] = sum;
        let places = (1..11).step_by(2).chain((14..26).step_by(2)).chain((28..32).step_by(2));
        for (at, unit) in places.zip(units) {
            entry[at..at + 2].copy_from_slice(&unit.to_le_bytes());
        }
        entries.extend(entry);
    }
    entries.extend(entry(short, ATTRIBUTE_FILE, cluster, length));
    entries
}

/// A short name that no other file here has. Everybody uses the long one.
fn short_name(number: usize) -> [u8; 11] {
    padded(&format!("FILE{:04}", number.min(9999)))
}

/// Of a short name, in the entries of its long one.
fn checksum(short: &[u8; 11]) -> u8 {
    short.iter().fold(0, |sum: u8, byte| sum.rotate_right(1).wrapping_add(*byte))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn written(files: &[(&str, &[u8])]) -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("disk");
        let fat = filesystem("cidata", files).expect("it fits");
        std::fs::write(&path, &fat.bytes).expect("written");
        let disk = std::fs::OpenOptions::new().write(true).open(&path).expect("opened");
        disk.set_len(fat.disk_bytes).expect("its size");
        let path = path.display().to_string();
        (dir, path)
    }

    fn run(program: &str, arguments: &[&str]) -> Vec<u8> {
        let output = Command::new(program).args(arguments).output().expect("it is installed");
        assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
        output.stdout
    }

    /// What others say of it: dosfstools, mtools and blkid.
    #[test]
    fn other_programs_find_no_fault_and_read_the_files() {
        let long = vec![7_u8; 3 * CLUSTER + 1];
        let files: [(&str, &[u8]); 5] = [
            ("meta-data", b"{}"),
            ("user-data", b"#cloud-config\n"),
            ("exactly-13-13", &long),
            ("network-config-of-a-long-name", &long[..CLUSTER]),
            ("empty", b""),
        ];
        let (_dir, path) = written(&files);
        run("fsck.vfat", &["-n", &path]);
        for (name, content) in files {
            assert_eq!(run("mtype", &["-i", &path, &format!("::{name}")]), content, "{name}");
        }
        let said = String::from_utf8(run("blkid", &["-p", "-o", "export", &path])).expect("text");
        assert!(said.contains("LABEL=cidata") && said.contains("TYPE=vfat"), "{said}");
        assert!(said.contains("VERSION=FAT16"), "{said}");
    }

    #[test]
    fn a_large_filesystem_has_more_clusters() {
        let content = vec![1_u8; 40 << 20];
        let (_dir, path) = written(&[("runner", &content)]);
        run("fsck.vfat", &["-n", &path]);
        assert_eq!(run("mtype", &["-i", &path, "::runner"]), content);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for name in ["", "a/b", "a.", "ä"] {
            assert!(filesystem("cidata", &[(name, b"")]).is_err(), "{name:?}");
        }
        let many: Vec<(&str, &[u8])> = (0..300).map(|_| ("a", &b""[..])).collect();
        assert!(filesystem("cidata", &many).is_err());
    }
}
