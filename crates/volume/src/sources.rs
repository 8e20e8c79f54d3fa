//! Which files an image may be made of.
//!
//! The server's own user may name any file and any NBD server. Whoever comes through the network may name an upload, or
//! a file below a directory that the operator allowed. Such a file is opened once, without leaving the directory by a link or
//! by `..`, and what was opened is what is read.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use perigee_http::{BOOT_ID, Clock, boot_id};
use perigee_model::units::format_bytes;
use perigee_model::volume::{TREE_PREFIX, UPLOAD_PREFIX, Upload};
use perigee_model::{Problem, TenantName};
use perigee_store::{ImportFrom, give_to_qemu_img};
use tokio::io::AsyncWriteExt;
use uuid::Uuid;

use crate::dir_images::DirImages;

/// An upload that no image was made of is removed after this time.
const KEPT_MAX: Duration = Duration::from_secs(3600);
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// The most uploads at one time, and the most of them of one tenant: some places are left to others.
const UPLOADS_MAX: usize = 16;
const UPLOADS_OF_ONE_MAX: usize = 12;
/// An upload from which nothing comes for this long ends.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How fast a file has to come on average, after the first minute: others wait for its place.
const RATE_MIN_BYTES_PER_S: u64 = 64 << 10;
/// Uploads leave so much of the pool's disk free, for what clients write.
const RESERVE_BYTES: u64 = 256 << 20;
const LOOK_EVERY_BYTES: u64 = 64 << 20;

/// The files that images may be made of: those of the operator's directories, uploads, and directories that came as a tar.
#[derive(Debug)]
pub struct Sources {
    image_dirs: Vec<PathBuf>,
    uploads: PathBuf,
    /// The uploads that are coming, and those that are here and of which no image was made yet; each with its tenant, if the
    /// request named one.
    places: Mutex<BTreeMap<Uuid, Option<TenantName>>>,
    clock: Arc<Clock>,
    pub trees: DirImages,
}

/// The place of an upload that comes. It is removed with this, unless all of it has come.
struct Coming<'a> {
    sources: &'a Sources,
    id: Uuid,
    is_here: bool,
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        if !self.is_here {
            self.sources.remove(self.id);
        }
    }
}

impl Sources {
    /// What earlier servers have not finished is removed.
    ///
    /// # Errors
    /// When a directory can't be used.
    pub fn new(image_dirs: &[PathBuf], pool: &Path) -> Result<Self, Problem> {
        let real = |dir: &PathBuf| {
            dir.canonicalize().map_err(|error| {
                Problem::invalid(format!("can't take images from {}", dir.display()), error)
                    .next("give --image-dir a directory that exists")
            })
        };
        let image_dirs = image_dirs.iter().map(real).collect::<Result<_, _>>()?;
        let uploads = pool.join("uploads");
        // The directory itself stays: on a full disk it might not be made again.
        let emptied = match std::fs::read_dir(&uploads) {
            Ok(left) => left.flatten().try_for_each(|upload| match upload.file_type()?.is_dir() {
                true => std::fs::remove_dir_all(upload.path()),
                false => std::fs::remove_file(upload.path()),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => make(&uploads),
            Err(error) => Err(error),
        };
        match emptied {
            // The volumes are served all the same. The next upload makes it.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                tracing::warn!(%error, "can't make the directory for uploads");
            }
            emptied => emptied.map_err(|error| {
                Problem::internal(format!("can't make the directory {}", uploads.display()), error)
            })?,
        }
        let clock = Arc::new(Clock::new(boot_id(Path::new(BOOT_ID))));
        let trees = DirImages::new(pool, Arc::clone(&clock))?;
        Ok(Self { image_dirs, uploads, places: Mutex::default(), clock, trees })
    }

    /// Opens what an image is to be made of. `is_own` says that the server's own user asks.
    ///
    /// # Errors
    /// `NotFound` if there is no such file, `Invalid` if it may not be used.
    pub fn open(&self, what: &str, source: &str, is_own: bool) -> Result<ImportFrom, Problem> {
        if let Some(id) = source.strip_prefix(TREE_PREFIX) {
            return self.trees.open(what, id);
        }
        if let Some(id) = source.strip_prefix(UPLOAD_PREFIX) {
            let opened = File::open(self.path_of(upload_id(what, id)?));
            return match opened {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let why = "there is no such upload, or it was removed because no image was made of it";
                    Err(Problem::not_found(what, why).next("upload the file again"))
                }
                opened => ImportFrom::opened(what, opened),
            };
        }
        if is_own {
            return ImportFrom::open_any(what, source);
        }
        if source.contains("://") {
            let why = "it is an address, which would be read from this host's place in the network";
            return Err(Problem::invalid(what, why).next(
                "upload a file instead; or let an administrator of the host run there: perigee image import NAME \
                 ADDRESS --pool DIR",
            ));
        }
        let path = Path::new(source);
        let below = |dir: &&PathBuf| path.starts_with(dir);
        let Some(dir) = self.image_dirs.iter().find(below) else {
            let allowed = match self.image_dirs.as_slice() {
                [] => "this host allows none".to_owned(),
                dirs => {
                    let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
                    format!("this host allows: {}", dirs.join(", "))
                }
            };
            let why =
                format!("the file is not in a directory from which images are taken; {allowed}");
            return Err(Problem::invalid(what, why).next(
                "upload it: `perigee image import NAME FILE`; or let the host's operator start its volume server \
                 with --image-dir DIR",
            ));
        };
        let opened = open_below(dir, path).map_err(|error| match error.raw_os_error() {
            Some(nix::libc::EXDEV | nix::libc::ELOOP) => Problem::invalid(
                what,
                format!("a link or `..` in its path leads out of {}", dir.display()),
            ),
            _ => ImportFrom::opened(what, Err(error))
                .err()
                .unwrap_or_else(|| Problem::internal(what, "the file can't be opened")),
        })?;
        if !opened.metadata().is_ok_and(|meta: Metadata| meta.is_file()) {
            return Err(Problem::invalid(what, "the source is not a regular file"));
        }
        ImportFrom::opened(what, Ok(opened))
    }

    fn path_of(&self, upload: Uuid) -> PathBuf {
        self.uploads.join(upload.to_string())
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<Uuid, Option<TenantName>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, upload: Uuid) {
        match std::fs::remove_file(self.path_of(upload)) {
            // Its place stays taken, and this is tried again when it is old.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "can't remove an upload");
            }
            _ => drop(self.places().remove(&upload)),
        }
    }

    /// To be called when an image was made of a source, or could not be.
    pub fn used(&self, source: &str) {
        if let Some(id) = source.strip_prefix(TREE_PREFIX) {
            return self.trees.remove(id);
        }
        let id = source.strip_prefix(UPLOAD_PREFIX).and_then(|id| upload_id("", id).ok());
        id.into_iter().for_each(|id| self.remove(id));
    }

    /// Stores a file that is sent for a tenant.
    ///
    /// # Errors
    /// `NoSpace` if the pool's disk has no room, `Unavailable` if the sender is gone or silent, a conflict if there
    /// are too many.
    pub async fn receive<E: std::fmt::Display>(
        &self,
        tenant: Option<TenantName>,
        body: impl Stream<Item = Result<bytes::Bytes, E>> + Unpin,
    ) -> Result<Upload, Problem> {
        let what = "can't take an upload";
        self.remove_old().map_err(|error| Problem::internal(what, error))?;
        let mut coming = self.place_for(what, tenant)?;
        let bytes = self.write(what, &self.path_of(coming.id), body).await?;
        coming.is_here = true;
        Ok(Upload { host: None, source: format!("{UPLOAD_PREFIX}{}", coming.id), bytes })
    }

    fn place_for(&self, what: &str, tenant: Option<TenantName>) -> Result<Coming<'_>, Problem> {
        let mut places = self.places();
        if places.len() >= UPLOADS_MAX {
            let why =
                format!("{UPLOADS_MAX} files are being uploaded or imported, which is the limit");
            return Err(Problem::conflict(what, why).next("try again when some of them are done"));
        }
        let of_one = |tenant: &TenantName| {
            places.values().filter(|other| other.as_ref() == Some(tenant)).count()
        };
        if tenant.as_ref().is_some_and(|tenant| of_one(tenant) >= UPLOADS_OF_ONE_MAX) {
            let why = format!(
                "{UPLOADS_OF_ONE_MAX} uploads of the tenant are coming or wait to be imported, which is the limit"
            );
            return Err(Problem::conflict(what, why)
                .next("import them, or wait: what nobody imports is removed after an hour"));
        }
        let id = Uuid::new_v4();
        places.insert(id, tenant);
        Ok(Coming { sources: self, id, is_here: false })
    }

    /// Removes old uploads until the future is dropped.
    pub async fn keep_removing_old(self: Arc<Self>) {
        let mut moments = tokio::time::interval(SWEEP_EVERY);
        loop {
            moments.tick().await;
            if let Err(error) = self.remove_old() {
                tracing::warn!(%error, "can't remove uploads that no image was made of");
            }
            if let Err(error) = self.trees.remove_old() {
                tracing::warn!(%error, "can't remove trees that no image was made of");
            }
        }
    }

    fn remove_old(&self) -> io::Result<()> {
        let all: Vec<Uuid> = self.places().keys().copied().collect();
        for upload in all {
            match std::fs::metadata(self.path_of(upload)) {
                Ok(meta) if self.clock.age(meta.modified()?) > KEPT_MAX => {
                    self.remove(upload);
                }
                // An image was made of it just now, or nothing of it has come yet.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    async fn write<E: std::fmt::Display>(
        &self,
        what: &str,
        path: &Path,
        mut body: impl Stream<Item = Result<bytes::Bytes, E>> + Unpin,
    ) -> Result<u64, Problem> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::StorageFull => no_room(what),
            _ => Problem::internal(what, error),
        };
        make(&self.uploads).map_err(failed)?;
        let new = File::options().write(true).create_new(true).mode(0o600).open(path);
        let new = new.and_then(|new| give_to_qemu_img(&new).map(|()| new));
        let mut file = tokio::fs::File::from_std(new.map_err(failed)?);
        let (mut bytes, mut look_at) = (0, 0);
        let begun = tokio::time::Instant::now();
        loop {
            let late = begun.elapsed().saturating_sub(SILENCE_MAX);
            if bytes < late.as_secs() * RATE_MIN_BYTES_PER_S {
                let rate = format_bytes(RATE_MIN_BYTES_PER_S);
                let why =
                    format!("the file came slower than {rate}/s, and others wait for its place");
                return Err(Problem::unavailable(what, why).next("copy it to the host: --on-host"));
            }
            if bytes >= look_at {
                let disk =
                    nix::sys::statvfs::statvfs(&self.uploads).map_err(|e| failed(e.into()))?;
                if disk.blocks_available() * disk.fragment_size() < RESERVE_BYTES + LOOK_EVERY_BYTES
                {
                    return Err(no_room(what));
                }
                look_at = bytes + LOOK_EVERY_BYTES;
            }
            let next = tokio::time::timeout(SILENCE_MAX, body.next()).await.map_err(|_| {
                Problem::unavailable(
                    what,
                    format!("no bytes arrived for {} s", SILENCE_MAX.as_secs()),
                )
            })?;
            let Some(chunk) = next else { break };
            let chunk = chunk.map_err(|error| Problem::unavailable(what, error))?;
            bytes += chunk.len() as u64;
            file.write_all(&chunk).await.map_err(failed)?;
        }
        file.flush().await.map_err(failed)?;
        Ok(bytes)
    }
}

fn make(dir: &Path) -> io::Result<()> {
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn no_room(what: &str) -> Problem {
    let why = format!(
        "less than {} MiB are free on the pool's disk",
        (RESERVE_BYTES + LOOK_EVERY_BYTES) >> 20
    );
    Problem::no_space(what, why).next("free space in the pool, or import at another host")
}

fn upload_id(what: &str, id: &str) -> Result<Uuid, Problem> {
    id.parse().map_err(|_| Problem::invalid(what, format!("{id:?} is not the id of an upload")))
}

/// Opens a file below a directory. The kernel follows only links that stay below it.
fn open_below(dir: &Path, path: &Path) -> io::Result<File> {
    let relative = path.strip_prefix(dir).map_err(io::Error::other)?;
    let base = File::open(dir)?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let opened: OwnedFd = openat2(&base, relative, how)?;
    Ok(opened.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use perigee_model::ProblemKind;

    use super::*;

    fn sources(dir: &Path) -> Sources {
        for name in ["images/sub", "pool", "secret"] {
            std::fs::create_dir_all(dir.join(name)).expect("a directory");
        }
        std::fs::write(dir.join("images/sub/disk.raw"), [1; 512]).expect("a file");
        std::fs::write(dir.join("secret/state.db"), [2; 512]).expect("a file");
        Sources::new(&[dir.join("images")], &dir.join("pool")).expect("directories")
    }

    fn refused(sources: &Sources, path: &Path) -> Problem {
        sources.open("import", &path.display().to_string(), false).expect_err("a refusal")
    }

    #[test]
    fn a_server_that_starts_empties_the_uploads_and_keeps_their_directory() {
        use std::os::unix::fs::MetadataExt;

        let dir = tempfile::tempdir().expect("a directory");
        let uploads = sources(dir.path()).uploads;
        let inode = || std::fs::metadata(&uploads).expect("it is there").ino();
        let before = inode();
        std::fs::write(uploads.join("half"), [1; 512]).expect("an upload");
        sources(dir.path());
        assert_eq!(uploads.read_dir().expect("it is there").count(), 0);
        assert_eq!(inode(), before, "on a full disk it might not be made again");
    }

    #[test]
    fn the_network_names_no_file_outside_of_the_allowed_directories() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = sources(dir.path());
        let path = |name: &str| dir.path().canonicalize().expect("it exists").join(name);
        symlink(path("secret/state.db"), path("images/link")).expect("a link");
        symlink("../secret", path("images/out")).expect("a link");
        symlink("sub/disk.raw", path("images/inside")).expect("a link");
        symlink("/proc/self/fd/0", path("images/magic")).expect("a link");
        for bad in [
            "secret/state.db",
            "images/../secret/state.db",
            "images/sub/../../secret/state.db",
            "images/link",
            "images/out/state.db",
            "images/magic",
            "images/sub",
        ] {
            assert_eq!(refused(&sources, &path(bad)).kind, ProblemKind::Invalid, "{bad}");
        }
        for bad in ["/dev/sda", "/dev/zero", "/etc/shadow", "relative", "json:{}"] {
            let problem = refused(&sources, Path::new(bad));
            assert!(problem.next.contains("--image-dir"), "{problem}");
        }
        let inner = sources.open("import", "nbd://127.0.0.1:10809/secret", false);
        let inner = inner.expect_err("that is the host's own network");
        assert!(inner.why.contains("this host's place in the network"), "{inner}");
        assert!(sources.open("import", "nbd://127.0.0.1:10809/disk", true).is_ok());
        assert_eq!(refused(&sources, &path("images/missing")).kind, ProblemKind::NotFound);
        for good in ["images/sub/disk.raw", "images/inside"] {
            let opened = sources.open("import", &path(good).display().to_string(), false);
            assert!(matches!(opened, Ok(ImportFrom::File(_))), "{good}: {opened:?}");
        }
    }

    #[tokio::test]
    async fn an_upload_is_a_source_until_it_was_used() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = sources(dir.path());
        let chunks = ["ab", "cd"].map(|text| Ok::<_, String>(bytes::Bytes::from(text)));
        let upload =
            sources.receive(None, futures_util::stream::iter(chunks)).await.expect("an upload");
        assert_eq!(upload.bytes, 4);
        assert!(sources.open("import", &upload.source, false).is_ok());
        sources.used(&upload.source);
        let gone = sources.open("import", &upload.source, false).expect_err("it was used");
        assert_eq!(gone.kind, ProblemKind::NotFound);
        let odd = sources.open("import", "upload:../../secret/state.db", true).expect_err("no id");
        assert_eq!(odd.kind, ProblemKind::Invalid);
    }

    #[tokio::test]
    async fn one_tenant_leaves_places_for_uploads_to_others() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = sources(dir.path());
        let send = async |tenant: &str| {
            let chunks = [Ok::<_, String>(bytes::Bytes::from("ab"))];
            let tenant = Some(tenant.parse().expect("a name"));
            sources.receive(tenant, futures_util::stream::iter(chunks)).await
        };
        let mut sent = Vec::new();
        for _ in 0..UPLOADS_OF_ONE_MAX {
            sent.push(send("acme").await.expect("an upload"));
        }
        let refused = send("acme").await.expect_err("it has its share");
        assert!(refused.why.contains("12 uploads of the tenant"), "{refused}");
        send("blue").await.expect("another tenant's");
        sources.used(&sent[0].source);
        send("acme").await.expect("one of its own was used");
    }

    #[tokio::test]
    async fn nothing_is_left_of_an_upload_whose_sender_nobody_waits_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = sources(dir.path());
        let begun = futures_util::stream::iter([Ok::<_, String>(bytes::Bytes::from("ab"))]);
        let begun = Box::pin(begun.chain(futures_util::stream::pending()));
        let receiving = sources.receive(None, begun);
        tokio::time::timeout(Duration::from_millis(100), receiving).await.expect_err("it waits");
        assert_eq!(sources.uploads.read_dir().expect("it is there").count(), 0);
        assert!(sources.places().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_nobody_uses_goes_without_another_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = Arc::new(sources(dir.path()));
        let chunks = [Ok::<_, String>(bytes::Bytes::from("ab"))];
        let upload =
            sources.receive(None, futures_util::stream::iter(chunks)).await.expect("an upload");
        let sweeper = tokio::spawn(sources.clone().keep_removing_old());
        tokio::time::sleep(SWEEP_EVERY * 2).await;
        let ImportFrom::File(file) = sources.open("import", &upload.source, false).expect("new")
        else {
            panic!("a file");
        };
        let path = dir.path().join("pool/uploads");
        let left = || std::fs::read_dir(&path).expect("a directory").count();
        assert_eq!(left(), 1);
        // That the clock is set, and set right again, removes nothing.
        let days_60_ms = 60 * 24 * 3600 * 1000;
        for by_ms in [days_60_ms, -days_60_ms, -days_60_ms, days_60_ms] {
            sources.clock.pretend_set(by_ms);
            tokio::time::sleep(SWEEP_EVERY * 2).await;
            assert_eq!(left(), 1);
        }
        sources.clock.pretend_passed(KEPT_MAX * 2);
        tokio::time::sleep(SWEEP_EVERY * 2).await;
        assert_eq!(left(), 0);
        assert_eq!(file.metadata().expect("who reads it still can").len(), 2);
        sweeper.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_comes_byte_by_byte_keeps_its_place_for_minutes_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = sources(dir.path());
        let slow = futures_util::stream::unfold((), |()| async {
            tokio::time::sleep(SILENCE_MAX / 2).await;
            Some((Ok::<_, &str>(bytes::Bytes::from("a")), ()))
        });
        let begun = tokio::time::Instant::now();
        let problem = sources.receive(None, Box::pin(slow)).await.expect_err("it is too slow");
        assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
        assert!(begun.elapsed() < SILENCE_MAX * 3, "{:?}", begun.elapsed());
        assert!(sources.places().is_empty(), "its place is free");
    }

    #[tokio::test]
    async fn an_upload_that_breaks_leaves_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let sources = sources(dir.path());
        let chunks = [Ok(bytes::Bytes::from("ab")), Err("the client is gone")];
        let problem =
            sources.receive(None, futures_util::stream::iter(chunks)).await.expect_err("cut");
        assert_eq!(problem.kind, ProblemKind::Unavailable);
        assert!(sources.places().is_empty());
        assert_eq!(sources.uploads.read_dir().expect("it is there").count(), 0);
    }
}
