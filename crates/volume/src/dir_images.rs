//! Trees of files that were sent as a tar, until an image was made of them.
//!
//! Whoever sends a tar chooses its id, so that it can be asked for also if the answer is lost. A tar is unpacked while it
//! comes, by a thread that lets VMs have the CPU and the disk first; the tree has its name when all of it is there. It is
//! removed if the tar is refused, breaks off or comes too slowly, when an image was made of it, when nobody wants one any
//! more, after an hour, and when the server starts.

use std::collections::HashSet;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use perigee_block::locking::lock;
use perigee_http::Clock;
use perigee_model::units::format_bytes;
use perigee_model::volume::{TREE_PREFIX, Upload};
use perigee_model::{Problem, ProblemKind};
use perigee_store::{ImportFrom, TreeError, TreeSize, lower_priority, unpack};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

/// A tree that no image was made of is removed after this time.
const KEPT_MAX: Duration = Duration::from_secs(3600);
/// The most trees at one time.
const TREES_MAX: usize = 8;
/// A tar from which nothing comes for this long ends.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How fast it has to come on average, after the first minute: others wait for its place.
const RATE_MIN_BYTES_PER_S: u64 = 64 << 10;
/// Pieces of a tar that wait for the disk.
const PIECES_MAX: usize = 16;

/// The directories that came as a tar and of which no image was made yet.
#[derive(Debug)]
pub struct DirImages {
    directory: PathBuf,
    in_use: InUse,
    clock: Arc<Clock>,
}

/// Trees that are being unpacked or read. They are not old, whatever the time of their directory.
type InUse = Arc<Mutex<HashSet<PathBuf>>>;

/// A tree in use, until this is dropped.
#[derive(Debug)]
struct Use {
    path: PathBuf,
    in_use: InUse,
}

impl Use {
    fn of(path: &Path, in_use: &InUse) -> Self {
        lock(in_use).insert(path.to_owned());
        Self { path: path.to_owned(), in_use: Arc::clone(in_use) }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        lock(&self.in_use).remove(&self.path);
    }
}

/// What the thread that unpacks is told.
enum Piece {
    Bytes(Bytes),
    /// The tar is complete. Without this it was cut.
    End,
}

/// The tar as it comes.
struct Incoming {
    pieces: mpsc::Receiver<Piece>,
    piece: Bytes,
    is_complete: bool,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.is_complete {
            match self.pieces.blocking_recv() {
                Some(Piece::Bytes(bytes)) => self.piece = bytes,
                Some(Piece::End) => self.is_complete = true,
                None => {
                    let why = "it ended before all of it had come";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
                }
            }
        }
        let length = self.piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}

/// A directory that is removed when this is dropped, unless it is kept.
struct Unpacking(Option<PathBuf>);

impl Drop for Unpacking {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            remove(&path);
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_dir_all(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "can't remove a tree");
    }
}

impl DirImages {
    /// What earlier servers have not finished is removed.
    ///
    /// # Errors
    /// When the directory can't be used.
    pub fn new(pool: &Path, clock: Arc<Clock>) -> Result<Self, Problem> {
        let directory = pool.join("trees");
        let fault = |error| {
            Problem::internal(format!("can't use the directory {}", directory.display()), error)
        };
        match std::fs::read_dir(&directory) {
            Ok(left) => left.flatten().for_each(|tree| remove(&tree.path())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match std::fs::DirBuilder::new().mode(0o700).create(&directory) {
                    // The volumes are served all the same. The next tree makes it.
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                        tracing::warn!(%error, "can't make the directory for trees");
                    }
                    made => made.map_err(fault)?,
                }
            }
            Err(error) => return Err(fault(error)),
        }
        Ok(Self { directory, in_use: InUse::default(), clock })
    }

    fn path(&self, what: &str, id: &str) -> Result<PathBuf, Problem> {
        let id: Uuid = id
            .parse()
            .map_err(|_| Problem::invalid(what, format!("{id:?} is not the id of a tree")))?;
        Ok(self.directory.join(id.to_string()))
    }

    /// The tree with this id.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn open(&self, what: &str, id: &str) -> Result<ImportFrom, Problem> {
        let path = self.path(what, id)?;
        let held = Use::of(&path, &self.in_use);
        ImportFrom::tree(what, path, held)
    }

    /// Removes a tree, if there is one: an image was made of it, or could not be, or nobody wants one.
    pub fn remove(&self, id: &str) {
        if let Ok(path) = self.path("", id) {
            remove(&path);
        }
    }

    /// Unpacks a tar that is sent. It becomes the tree with this id when all of it is there.
    ///
    /// # Errors
    /// `NoSpace` if the pool's disk has no room, `Unavailable` if the sender is gone or silent, a conflict if there
    /// are too many or the id is taken, `Invalid` if it is no tar or has what a tree can't have.
    pub async fn receive<E: std::fmt::Display>(
        &self,
        id: &str,
        body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    ) -> Result<Upload, Problem> {
        let what = "can't take a tree of files";
        let failed = |error| Problem::internal(what, error);
        let whole = self.path(what, id)?;
        if self.remove_old().map_err(failed)? >= TREES_MAX {
            let why = format!("{TREES_MAX} trees are being sent or imported, which is the limit");
            return Err(Problem::conflict(what, why).next("try again when some of them are done"));
        }
        let path = whole.with_extension("part");
        let taken = || Problem::conflict(what, format!("there is a tree {id}"));
        if whole.exists() {
            return Err(taken());
        }
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        builder.recursive(false).create(&path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => taken(),
            _ => failed(error),
        })?;
        // Who makes the filesystem begins in it, and can't pass through the directories above it.
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, mode).map_err(failed)?;
        let _held = Use::of(&path, &self.in_use);
        let unpacking = Unpacking(Some(path.clone()));
        let (sender, pieces) = mpsc::channel(PIECES_MAX);
        let (told, ended) = oneshot::channel();
        let incoming = Incoming { pieces, piece: Bytes::new(), is_complete: false };
        let thread = std::thread::Builder::new().name("unpack".to_owned());
        let started = thread.spawn(move || {
            lower_priority();
            // If nobody waits for it any more, it goes.
            drop(told.send(unpack_all(incoming, unpacking)));
        });
        started.map_err(failed)?;
        let passed = pass_on(what, body, &sender).await;
        // If it was not told that this is the end, it counts as cut.
        drop(sender);
        let unpacked = ended.await.map_err(|e| Problem::internal(what, e))?;
        match (unpacked, passed) {
            (Ok((mut unpacking, size)), Ok(())) => {
                std::fs::rename(&path, &whole).map_err(failed)?;
                unpacking.0 = None;
                let source = format!("{TREE_PREFIX}{id}");
                Ok(Upload { host: None, source, bytes: size.bytes })
            }
            (_, Err(problem)) => Err(problem),
            (Err(error), Ok(())) => Err(refused(what, &error)),
        }
    }

    /// Returns how many are left.
    pub fn remove_old(&self) -> io::Result<usize> {
        let mut left = 0;
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            if lock(&self.in_use).contains(&path) {
                left += 1;
                continue;
            }
            let changed = std::fs::metadata(&path).and_then(|meta| meta.modified());
            match changed {
                Ok(changed) if self.clock.age(changed) > KEPT_MAX => remove(&path),
                // An image was made of it just now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                _ => left += 1,
            }
        }
        Ok(left)
    }
}

fn unpack_all(
    incoming: Incoming,
    unpacking: Unpacking,
) -> Result<(Unpacking, TreeSize), TreeError> {
    let into = unpacking.0.clone().unwrap_or_default();
    let size = unpack(incoming, &into)?;
    // From now on its age counts.
    std::fs::File::open(&into)?.set_modified(std::time::SystemTime::now())?;
    Ok((unpacking, size))
}

/// Passes on what comes until its end, or until the other side wants no more.
async fn pass_on<E: std::fmt::Display>(
    what: &str,
    mut body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    to: &mpsc::Sender<Piece>,
) -> Result<(), Problem> {
    let begun = tokio::time::Instant::now();
    let (mut bytes, mut waited) = (0, Duration::ZERO);
    loop {
        let late = begun.elapsed().saturating_sub(SILENCE_MAX + waited);
        if bytes < late.as_secs() * RATE_MIN_BYTES_PER_S {
            let rate = format_bytes(RATE_MIN_BYTES_PER_S);
            let why = format!("it came slower than {rate}/s, and others wait for its place");
            return Err(Problem::unavailable(what, why));
        }
        let next = tokio::time::timeout(SILENCE_MAX, body.next()).await.map_err(|_| {
            let why = format!("no bytes arrived for {} s", SILENCE_MAX.as_secs());
            Problem::unavailable(what, why)
        })?;
        let piece = match next {
            None => Piece::End,
            Some(Ok(received)) => {
                bytes += received.len() as u64;
                Piece::Bytes(received)
            }
            Some(Err(error)) => return Err(Problem::unavailable(what, error)),
        };
        let is_end = matches!(piece, Piece::End);
        let handed = tokio::time::Instant::now();
        let sent = to.send(piece).await;
        // A slow disk here is not the sender's fault.
        waited += handed.elapsed();
        if sent.is_err() || is_end {
            return Ok(());
        }
    }
}

fn refused(what: &str, error: &TreeError) -> Problem {
    let TreeError::Io(fault) = error else { return Problem::invalid(what, error) };
    match fault.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            let why =
                "the pool's disk has no room for it beside what is left free for clients' writes";
            Problem::no_space(what, why).next("free space in the pool")
        }
        io::ErrorKind::UnexpectedEof => Problem::new(ProblemKind::Unavailable, what, error),
        // An error of the disk has a number, and one in the archive has none.
        _ if fault.raw_os_error().is_some() => Problem::internal(what, error),
        _ => Problem::invalid(what, error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use futures_util::stream;

    use super::*;

    const ID: &str = "00000000-0000-4000-8000-000000000001";

    fn tar() -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_size(5000);
        header.set_mode(0o644);
        let mut builder = tar::Builder::new(Vec::new());
        builder.append_data(&mut header, "a/b", &[7; 5000][..]).expect("in memory");
        builder.into_inner().expect("in memory")
    }

    fn sent(bytes: &[u8]) -> impl Stream<Item = Result<Bytes, String>> + Unpin {
        let pieces: Vec<_> =
            bytes.chunks(1000).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        stream::iter(pieces)
    }

    fn trees_in(pool: &Path) -> DirImages {
        let clock = Arc::new(Clock::new("a boot".to_owned()));
        DirImages::new(pool, clock).expect("a directory")
    }

    fn left(pool: &Path) -> BTreeSet<PathBuf> {
        let entries = std::fs::read_dir(pool.join("trees")).expect("a directory");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }

    #[tokio::test]
    async fn a_tree_is_there_until_it_was_used() {
        let pool = tempfile::tempdir().expect("a directory");
        let trees = trees_in(pool.path());
        let tree = trees.receive(ID, sent(&tar())).await.expect("a tree");
        assert_eq!(tree.bytes, 5000);
        let id = tree.source.strip_prefix(TREE_PREFIX).expect("a tree");
        assert_eq!(id, ID);
        let problem = trees.receive(ID, sent(&tar())).await.expect_err("it is there");
        assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
        let Ok(ImportFrom::Tree(open)) = trees.open("import", id) else { panic!("it is there") };
        assert_eq!(std::fs::read(open.directory().join("a/b")).expect("a file"), [7; 5000]);
        // However old it is, it is not removed while somebody reads it.
        trees.clock.pretend_passed(KEPT_MAX * 2);
        assert_eq!(trees.remove_old().expect("a list"), 1);
        drop(open);
        for bad in ["..", "../layers", "", "a"] {
            let refused = trees.open("import", bad).expect_err(bad);
            assert_eq!(refused.kind, ProblemKind::Invalid);
            let refused = trees.receive(bad, sent(&tar())).await.expect_err(bad);
            assert_eq!(refused.kind, ProblemKind::Invalid);
        }
        trees.remove(id);
        assert_eq!(trees.open("import", id).expect_err("gone").kind, ProblemKind::NotFound);
        assert!(left(pool.path()).is_empty());
    }

    #[tokio::test]
    async fn a_tar_that_breaks_or_is_refused_leaves_nothing() {
        let pool = tempfile::tempdir().expect("a directory");
        let trees = trees_in(pool.path());
        let whole = tar();
        let cut = stream::iter([Ok(Bytes::copy_from_slice(&whole[..3000])), Err("it is gone")]);
        let problem = trees.receive(ID, cut).await.expect_err("cut");
        assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
        assert!(left(pool.path()).is_empty());
        let problem = trees.receive(ID, sent(&[7; 100_000])).await.expect_err("no tar");
        assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
        assert!(left(pool.path()).is_empty());
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_tar_whose_sender_nobody_waits_for() {
        let pool = tempfile::tempdir().expect("a directory");
        let trees = trees_in(pool.path());
        let whole = tar();
        let begun = sent(&whole[..3000]).chain(stream::pending());
        let receiving = trees.receive(ID, begun);
        tokio::time::timeout(Duration::from_millis(100), receiving).await.expect_err("it waits");
        assert_eq!(
            trees.open("import", ID).expect_err("not whole").kind,
            ProblemKind::NotFound,
            "no image is made of a part"
        );
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !left(pool.path()).is_empty() {
            assert!(std::time::Instant::now() < deadline, "waited 60 s for its removal");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_server_that_starts_removes_trees_and_old_ones_go_by_themselves() {
        let pool = tempfile::tempdir().expect("a directory");
        let trees = trees_in(pool.path());
        trees.receive(ID, sent(&tar())).await.expect("a tree");
        assert_eq!(trees.remove_old().expect("a list"), 1);
        trees.clock.pretend_set(60 * 24 * 3600 * 1000);
        assert_eq!(trees.remove_old().expect("a list"), 1, "only the clock was set");
        trees.clock.pretend_passed(KEPT_MAX * 2);
        assert_eq!(trees.remove_old().expect("a list"), 0);
        assert!(left(pool.path()).is_empty());
        trees.receive(ID, sent(&tar())).await.expect("a tree");
        trees_in(pool.path());
        assert!(left(pool.path()).is_empty());
    }
}
