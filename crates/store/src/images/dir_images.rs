//! A tree of files that becomes an image: it is unpacked from a tar of somebody else, and `mke2fs` makes a filesystem
//! of it. Nothing is mounted.
//!
//! A tree has directories and regular files, and nothing else: no links, no devices. So no path in it leads out, and
//! each file is made where there was none. It belongs to the user of the volume server. Where this is root, root is also
//! the owner of the files in the image: the guest's root, who runs the job. `mke2fs` reads the tree as the user of this
//! import, and writes only the file that becomes the image.

use std::cell::Cell;
use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use perigee_model::Problem;
use perigee_model::inputs::{BadInputPath, check_input_path};
use perigee_model::limits::{INPUT_BYTES, INPUT_FILES, OutOfLimits};
use perigee_model::tar_headers::{Bounded, TAR_HEADER_BYTES_MAX};
use perigee_model::volume::BLOCK_BYTES;

use crate::images::qemu_img::{self, INPUT, Program, Run, RunUser};
use crate::work::Work;

/// What the guest may write beside the files. It takes no room on the disk before it is written.
const FREE_BYTES: u64 = 1 << 30;
/// Files that the guest may make beside them, at least.
const FREE_INODES: u64 = 4096;
const INODE_BYTES: u64 = 256;
/// A directory with more entries gets an index.
const INDEXED_ENTRIES: u64 = 500;
/// All files have one time: who reads them sees no difference between two images of the same files. 2000-01-01.
const MODIFIED: Duration = Duration::from_secs(946_684_800);
/// Every so many bytes somebody looks at the free room of the disk.
const LOOK_EVERY_BYTES: u64 = 16 << 20;
const PIECE_BYTES: usize = 256 << 10;

/// Why a tar did not become a tree.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The archive is none or ended early, or the disk failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// An entry leaves the tree.
    #[error("{0}")]
    Path(#[from] BadInputPath),
    /// The name of an entry is no text.
    #[error("the name of an entry is not UTF-8: {0:?}")]
    Name(String),
    /// Links, devices, sparse files and the like.
    #[error("entry {0:?} is neither a file nor a directory")]
    Kind(String),
    /// Two entries have one name, or a file is above another one.
    #[error("entry {0:?} is there twice, or below a file")]
    Twice(String),
    /// Too many, or too large.
    #[error("{0}")]
    Limit(#[from] OutOfLimits),
}

/// What is in a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeSize {
    /// The files' lengths together.
    pub bytes: u64,
    /// Files and directories, without the tree's own.
    pub entries: u64,
    /// Blocks of files and directories.
    blocks: u64,
    /// The square of the number of entries, added up over the directories: `mke2fs` looks at all earlier ones for each.
    squares: u64,
    /// The most entries of one directory.
    widest: u64,
}

/// Unpacks a tar into an empty directory. What was unpacked before an error stays there.
///
/// # Errors
/// [`TreeError`].
pub fn unpack(archive: impl Read, into: &Path) -> Result<TreeSize, TreeError> {
    let budget = Cell::new(TAR_HEADER_BYTES_MAX);
    let mut archive = tar::Archive::new(Bounded::new(archive, &budget));
    let mut entries = archive.entries()?;
    let mut size = TreeSize::default();
    let mut look_at = 0;
    loop {
        // The iterator reads only headers here, because the previous entry was read completely.
        budget.set(TAR_HEADER_BYTES_MAX);
        let Some(entry) = entries.next() else { return Ok(size) };
        let mut entry = entry?;
        size.entries = INPUT_FILES.check(size.entries + 1)?;
        let path = path_of(&entry)?;
        let kind = entry.header().entry_type();
        if kind.is_dir() {
            make_directories(into, &path)?;
            continue;
        }
        // A sparse file and the like are other kinds.
        if kind != tar::EntryType::Regular {
            return Err(TreeError::Kind(path));
        }
        size.bytes = INPUT_BYTES.check(size.bytes.saturating_add(entry.size()))?;
        if let Some((above, _)) = path.rsplit_once('/') {
            make_directories(into, above)?;
        }
        let executable = entry.header().mode()? & 0o100 != 0;
        budget.set(u64::MAX);
        write_file(&mut entry, &into.join(&path), executable, &mut look_at)
            .map_err(|error| twice(error, &path))?;
    }
}

fn path_of<R: Read>(entry: &tar::Entry<'_, R>) -> Result<String, TreeError> {
    let bytes = entry.path_bytes();
    let text = std::str::from_utf8(&bytes)
        .map_err(|_| TreeError::Name(String::from_utf8_lossy(&bytes).chars().take(80).collect()))?;
    // A directory's name may end with a slash.
    let is_directory = entry.header().entry_type().is_dir();
    let path = if is_directory { text.trim_end_matches('/') } else { text };
    check_input_path(path)?;
    Ok(path.to_owned())
}

fn twice(error: io::Error, path: &str) -> TreeError {
    match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
            TreeError::Twice(path.chars().take(80).collect())
        }
        _ => error.into(),
    }
}

fn make_directories(into: &Path, path: &str) -> Result<(), TreeError> {
    let mut at = into.to_owned();
    for name in path.split('/') {
        at.push(name);
        match std::fs::create_dir(&at) {
            Ok(()) => std::fs::set_permissions(&at, Permissions::from_mode(0o755))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && at.is_dir() => {}
            Err(error) => return Err(twice(error, path)),
        }
    }
    Ok(())
}

fn write_file(
    from: &mut impl Read,
    path: &Path,
    executable: bool,
    look_at: &mut u64,
) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(path)?;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let length = from.read(&mut piece)?;
        if length == 0 {
            break;
        }
        *look_at = look_at.saturating_sub(length as u64);
        if *look_at == 0 {
            qemu_img::check_room(&file)?;
            *look_at = LOOK_EVERY_BYTES;
        }
        io::Write::write_all(&mut file, &piece[..length])?;
    }
    let mode = if executable { 0o755 } else { 0o644 };
    file.set_permissions(Permissions::from_mode(mode))?;
    file.set_modified(SystemTime::UNIX_EPOCH + MODIFIED)
}

/// Looks through a tree.
fn measure(tree: &Path) -> io::Result<TreeSize> {
    let mut size = TreeSize::default();
    let mut left = vec![tree.to_owned()];
    while let Some(directory) = left.pop() {
        let (mut entries, mut name_bytes) = (0_u64, 0);
        for entry in std::fs::read_dir(&directory)? {
            let entry = entry?;
            entries += 1;
            // Inode, lengths and kind, and what is left free at a block's end.
            name_bytes += entry.file_name().len() as u64 + 24;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                left.push(entry.path());
            } else {
                size.bytes += meta.len();
                size.blocks += meta.len().div_ceil(BLOCK_BYTES);
            }
        }
        size.entries += entries;
        size.blocks += 2 + name_bytes * 2 / BLOCK_BYTES;
        size.squares = size.squares.saturating_add(entries.saturating_mul(entries));
        size.widest = size.widest.max(entries);
    }
    Ok(size)
}

impl TreeSize {
    fn inodes(&self) -> u64 {
        let free = (self.entries / 4).max(FREE_INODES);
        (self.entries + free).next_multiple_of(64)
    }

    /// The size of a filesystem with room for the tree and for what the guest writes.
    fn disk_bytes(&self) -> u64 {
        let tables = self.inodes() * INODE_BYTES / BLOCK_BYTES;
        // Bitmaps and descriptors of the groups, and the blocks that index large files.
        let blocks = self.blocks + self.blocks / 64 + tables + 4096;
        (blocks * BLOCK_BYTES + FREE_BYTES).next_multiple_of(1 << 20)
    }

    /// `mke2fs` copies some hundred MB/s, and took 5 s for 10,000 files in one directory.
    fn cpu_s_max(&self) -> u64 {
        120 + self.bytes / (8 << 20) + self.entries / 100 + self.squares / 2_000_000
    }
}

/// Makes a file with a filesystem that has the tree's files. Returns its size.
///
/// # Errors
/// `NoSpace`, a conflict when it is stopped, `Invalid` with what `mke2fs` said.
pub(crate) async fn build(
    what: &str,
    tree: &Path,
    to: (&Path, &File),
    user: &RunUser,
    silence_max: Duration,
    work: &Work,
) -> Result<u64, Problem> {
    let failed = |error: io::Error| {
        if work.is_stopped() {
            crate::images::progress::stopped(what)
        } else {
            Problem::internal(what, error)
        }
    };
    let looked_at = tree.to_owned();
    let measured = tokio::task::spawn_blocking(move || measure(&looked_at)).await;
    let size = measured.map_err(|error| Problem::internal(what, error))?.map_err(failed)?;
    let disk_bytes = size.disk_bytes();
    work.expect(size.blocks * BLOCK_BYTES);
    to.1.set_len(disk_bytes).and_then(|()| user.give(to.1)).map_err(failed)?;
    let (blocks, inodes) = ((disk_bytes / BLOCK_BYTES).to_string(), size.inodes().to_string());
    let options = "lazy_itable_init=1,nodiscard,root_owner=0:0";
    let make = [
        &["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0"][..],
        // Whoever loses the VM loses the disk too, so there is nothing that a journal could bring back.
        &["-O", "^has_journal,^resize_inode", "-N", &inodes, "-E", options],
        &["-d", ".", INPUT, &blocks],
    ]
    .concat();
    let run = |program, arguments, directory| Run {
        what,
        user,
        program,
        arguments,
        directory,
        input: None,
        output: None,
        edits: Some((to.1, disk_bytes)),
        has_network: false,
        cpu_s_max: size.cpu_s_max(),
        silence_max,
    };
    let made = run(Program::Mke2fs, &make[..], Some(tree)).run(Some(to.0), work).await?;
    if !made.status.success() {
        return Err(refused(what, made.reason()));
    }
    if size.widest > INDEXED_ENTRIES {
        let index = ["-f", "-y", "-D", INPUT];
        let indexed = run(Program::E2fsck, &index[..], None).run(Some(to.0), work).await?;
        // 1: it has changed something.
        if !matches!(indexed.status.code(), Some(0 | 1)) {
            return Err(refused(what, indexed.reason()));
        }
    }
    qemu_img::take_back(to.1).map_err(failed)?;
    Ok(disk_bytes)
}

fn refused(what: &str, reason: String) -> Problem {
    if reason.contains("No space left on device") {
        return crate::images::progress::no_room(what);
    }
    Problem::internal(what, reason)
}

/// The directory of a tree, which is one that the volume server has made.
pub(crate) fn check_tree(what: &str, path: PathBuf) -> Result<PathBuf, Problem> {
    match std::fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_dir() => Ok(path),
        Ok(_) => Err(Problem::invalid(what, "the tree is not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = "there is no such tree, or it was removed because no image was made of it";
            Err(Problem::not_found(what, why).next("send the files again"))
        }
        Err(error) => Err(Problem::internal(what, error)),
    }
}

#[cfg(test)]
mod tests;
