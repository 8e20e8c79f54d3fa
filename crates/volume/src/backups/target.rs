//! Where backups are: a directory of this host, or an S3 store. What is written there appears whole or not at all, also after a kill or a power cut.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::backup::BackupTarget;
use perigee_repository::{Address, NotDone, Objects};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::format::{MARKER, MARKER_KEY};

/// A directory that has not answered one request for so long counts as away.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// What is being written; a rename gives the object its key.
const PARTS: &str = "parts";
/// What a kill has left of that is removed after so long.
const PART_KEPT: Duration = Duration::from_secs(24 * 3600);
const MARKER_BYTES_MAX: u64 = 1 << 10;
/// So many requests at directories wait for an answer at once: one that hangs must not keep all threads of this server.
const WAITING_MAX: usize = 8;
static WAITING: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(WAITING_MAX)));

/// A target. Each request has a deadline: a directory may be of another machine that is away.
#[derive(Debug, Clone)]
pub struct Target {
    address: String,
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    Directory(Arc<PathBuf>),
    /// With the credentials that AWS's tools would use at this host.
    S3(Arc<Objects>),
}

impl Target {
    /// # Errors
    /// `Invalid` for an address that can't be used here.
    pub fn new(at: &BackupTarget) -> Result<Self, Problem> {
        at.check()?;
        let place = match at.is_s3() {
            true => {
                let store = Address::parse(&at.address, at.endpoint.clone())?;
                Place::S3(Objects::connect(&store)?)
            }
            false => Place::Directory(Arc::new(PathBuf::from(&at.address))),
        };
        Ok(Self { address: at.address.clone(), place })
    }

    fn what(&self) -> String {
        format!("the backups in {}", self.address)
    }

    fn problem(&self, error: &io::Error) -> Problem {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Problem::no_space(self.what(), "the target is full").next(
                    "free space there; earlier backups are whole, and the next one uses what was shipped",
                )
            }
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                Problem::unavailable(self.what(), "there is no such directory")
                    .next("make the directory, or mount its disk, at the host that was asked")
            }
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                Problem::invalid(self.what(), format!("the target refuses: {error}"))
                    .next("let the volume server of the host that was asked write there")
            }
            _ => Problem::unavailable(self.what(), format!("the target fails: {error}"))
                .next("look after the target; nothing that is complete there is changed"),
        }
    }

    /// Works on a directory, on a thread that may wait for a disk of another machine.
    async fn run<T: Send + 'static>(
        &self,
        dir: &Arc<PathBuf>,
        act: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Problem> {
        let dir = Arc::clone(dir);
        self.run_within(&WAITING, ANSWER_MAX, move || act(&dir)).await
    }

    /// The permit is given back when the directory has answered, however late that is.
    async fn run_within<T: Send + 'static>(
        &self,
        waiting: &Arc<Semaphore>,
        answer_max: Duration,
        act: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, Problem> {
        let away = |why: &str| {
            let why = format!("{why} for {} s", answer_max.as_secs());
            Problem::unavailable(self.what(), why)
                .next("look after the target; the backup goes on when it answers")
        };
        let permit = tokio::time::timeout(answer_max, Arc::clone(waiting).acquire_owned()).await;
        let permit = permit.map_err(|_| away("it is away: earlier requests have hung"))?;
        let acting = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            act()
        });
        match tokio::time::timeout(answer_max, acting).await {
            Ok(Ok(done)) => done.map_err(|error| self.problem(&error)),
            Ok(Err(panicked)) => Err(Problem::internal(self.what(), panicked)),
            Err(_) => Err(away("the target has not answered")),
        }
    }

    /// Prepares the target for a backup. One that is known has its marker: else its disk is not mounted. A directory that does not exist is not made.
    ///
    /// # Errors
    /// `Unavailable` if it is away.
    pub async fn begin(&self, is_known: bool) -> Result<(), Problem> {
        if self.get(MARKER_KEY, MARKER_BYTES_MAX).await?.is_none() {
            if is_known {
                return Err(self.not_there());
            }
            self.put(MARKER_KEY, MARKER.to_vec()).await?;
        }
        match &self.place {
            Place::Directory(dir) => self.run(dir, remove_old_parts).await,
            Place::S3(_) => Ok(()),
        }
    }

    /// Makes sure that there are backups.
    ///
    /// # Errors
    /// `Unavailable` if there are none.
    pub async fn look(&self) -> Result<(), Problem> {
        match self.get(MARKER_KEY, MARKER_BYTES_MAX).await? {
            Some(_) => Ok(()),
            None => Err(self.not_there()),
        }
    }

    fn not_there(&self) -> Problem {
        let why = format!("there is no {MARKER_KEY}: these are not the backups");
        Problem::unavailable(self.what(), why)
            .next("mount the disk with the backups there, or name another target")
    }

    /// What is there under a key, if something is.
    ///
    /// # Errors
    /// When the target fails, or has more there than can be.
    pub async fn get(&self, key: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, Problem> {
        let got = self.get_named(key, bytes_max).await;
        got.map_err(|problem| Problem { what: format!("{key} of {}", problem.what), ..problem })
    }

    async fn get_named(&self, key: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, Problem> {
        match &self.place {
            Place::Directory(dir) => {
                let key = key.to_owned();
                self.run(dir, move |dir| get(dir, &key, bytes_max)).await
            }
            Place::S3(objects) => {
                let got = objects.get_whole(&self.what(), key, bytes_max).await;
                Ok(got.map_err(of_store)?.map(Vec::from))
            }
        }
    }

    /// The first bytes of what is there under a key, or fewer if there are not so many; `None` if nothing is there.
    ///
    /// # Errors
    /// When the target fails.
    pub async fn get_start(&self, key: &str, bytes: u64) -> Result<Option<Vec<u8>>, Problem> {
        let got = match &self.place {
            Place::Directory(dir) => {
                let key = key.to_owned();
                self.run(dir, move |dir| get_start(dir, &key, bytes)).await
            }
            Place::S3(objects) => {
                let got = objects.get_start(&self.what(), key, bytes).await;
                got.map_err(of_store).map(|got| got.map(Vec::from))
            }
        };
        got.map_err(|problem| Problem { what: format!("{key} of {}", problem.what), ..problem })
    }

    /// Stores an object. It is durable when this returns.
    ///
    /// # Errors
    /// `NoSpace`; when the target fails.
    pub async fn put(&self, key: &str, bytes: Vec<u8>) -> Result<(), Problem> {
        match &self.place {
            Place::Directory(dir) => {
                let key = key.to_owned();
                self.run(dir, move |dir| put(dir, &key, &bytes)).await
            }
            Place::S3(objects) => {
                objects.put_whole(&self.what(), key, bytes).await.map_err(of_store)
            }
        }
    }

    /// The next parts of the keys below a prefix.
    ///
    /// # Errors
    /// When the target fails.
    pub async fn names(&self, prefix: &str) -> Result<BTreeSet<String>, Problem> {
        match &self.place {
            Place::Directory(dir) => {
                let prefix = prefix.to_owned();
                self.run(dir, move |dir| names(dir, &prefix)).await
            }
            Place::S3(objects) => objects.names(&self.what(), prefix).await.map_err(of_store),
        }
    }
}

impl Target {
    /// How many bytes all objects have.
    ///
    /// # Errors
    /// When the target fails.
    pub async fn bytes(&self) -> Result<u64, Problem> {
        match &self.place {
            Place::Directory(dir) => self.run(dir, bytes_below).await,
            Place::S3(objects) => objects.bytes(&self.what()).await.map_err(of_store),
        }
    }

    /// Deletes an object; one that is not there is no error.
    ///
    /// # Errors
    /// When the target fails.
    pub async fn delete(&self, key: &str) -> Result<(), Problem> {
        match &self.place {
            Place::Directory(dir) => {
                let key = key.to_owned();
                self.run(dir, move |dir| delete(dir, &key)).await
            }
            Place::S3(objects) => objects.delete(key, None).await.map_err(of_store),
        }
    }

    /// Removes a directory that is empty. An S3 store has none.
    ///
    /// # Errors
    /// When the target fails.
    pub async fn delete_directory(&self, prefix: &str) -> Result<(), Problem> {
        match &self.place {
            Place::Directory(dir) => {
                let prefix = prefix.to_owned();
                self.run(dir, move |dir| std::fs::remove_dir(dir.join(prefix))).await
            }
            Place::S3(_) => Ok(()),
        }
    }
}

/// A store that refuses these credentials is not asked again.
fn of_store(not_done: NotDone) -> Problem {
    match not_done {
        NotDone::Refused(problem) => Problem::invalid(problem.what, problem.why).next(
            "check the credentials for the store of the volume server's user at the host that was asked",
        ),
        NotDone::Failed(problem) => problem,
    }
}

/// The object is gone when this returns, also after a power cut: what it names is deleted next.
fn delete(dir: &Path, key: &str) -> io::Result<()> {
    let path = dir.join(key);
    match std::fs::remove_file(&path) {
        Ok(()) => File::open(path.parent().unwrap_or(dir))?.sync_all(),
        Err(error) => missing(dir, error, ()),
    }
}

/// What is missing in a directory that is there itself.
fn missing<T>(dir: &Path, error: io::Error, nothing: T) -> io::Result<T> {
    match error.kind() {
        io::ErrorKind::NotFound => std::fs::metadata(dir).map(|_| nothing),
        _ => Err(error),
    }
}

fn get(dir: &Path, key: &str, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    let bytes = get_start(dir, key, bytes_max + 1)?;
    match bytes.as_ref().is_some_and(|bytes| bytes.len() as u64 > bytes_max) {
        true => Err(io::Error::other(format!("{key} is larger than it can be"))),
        false => Ok(bytes),
    }
}

fn get_start(dir: &Path, key: &str, count: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(dir.join(key)) {
        Ok(file) => file,
        Err(error) => return missing(dir, error, None),
    };
    let mut bytes = Vec::new();
    file.take(count).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn names(dir: &Path, prefix: &str) -> io::Result<BTreeSet<String>> {
    let entries = match std::fs::read_dir(dir.join(prefix)) {
        Ok(entries) => entries,
        Err(error) => return missing(dir, error, BTreeSet::new()),
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// The bytes of all files below. What goes meanwhile does not count.
fn bytes_below(dir: &Path) -> io::Result<u64> {
    let mut bytes = 0_u64;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let of_entry = match entry.metadata() {
            Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
            meta => meta.map(|meta| meta.len()),
        };
        match of_entry {
            Err(error) if is_gone(&error) => {}
            counted => bytes = bytes.saturating_add(counted?),
        }
    }
    Ok(bytes)
}

fn put(dir: &Path, key: &str, bytes: &[u8]) -> io::Result<()> {
    let (to, parts) = (dir.join(key), dir.join(PARTS));
    let above = to.parent().unwrap_or(dir);
    for made in [above, &parts] {
        make_directory(dir, made)?;
    }
    let part = parts.join(Uuid::new_v4().to_string());
    let write = || {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&part, &to)?;
        File::open(above)?.sync_all()
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&part)))
}

/// Makes a directory below the target, durably. The target itself is not made.
fn make_directory(target: &Path, dir: &Path) -> io::Result<()> {
    if dir == target || dir.is_dir() {
        return Ok(());
    }
    let above = dir.parent().unwrap_or(target);
    make_directory(target, above)?;
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    File::open(above)?.sync_all()
}

fn remove_old_parts(dir: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(dir.join(PARTS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let age = entry.metadata().and_then(|meta| meta.modified()).map(|at| at.elapsed());
        if age.is_ok_and(|age| age.is_ok_and(|age| age > PART_KEPT)) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use perigee_model::ProblemKind;

    use super::*;

    fn target(dir: &Path) -> Target {
        Target::new(&BackupTarget { address: dir.display().to_string(), endpoint: None })
            .expect("a target")
    }

    #[tokio::test]
    async fn a_directory_that_hangs_keeps_no_more_threads_than_there_are_permits() {
        let dir = tempfile::tempdir().expect("a directory");
        let (target, waiting) = (target(dir.path()), Arc::new(Semaphore::new(1)));
        let soon = Duration::from_millis(10);
        let (answer, hangs) = mpsc::channel::<()>();
        let hung = target.run_within(&waiting, soon, move || {
            let _ended = hangs.recv();
            Ok(())
        });
        let hung = hung.await.expect_err("no answer");
        assert_eq!(hung.kind, ProblemKind::Unavailable, "{hung}");
        let next = target.run_within(&waiting, soon, || Ok(())).await.expect_err("no permit");
        assert!(next.kind == ProblemKind::Unavailable && next.why.contains("away"), "{next}");
        drop(answer);
        let later = Duration::from_secs(60);
        target.run_within(&waiting, later, || Ok(())).await.expect("a permit");
    }

    #[test]
    fn a_target_that_refuses_is_not_asked_again() {
        let target = target(Path::new("/srv/backups"));
        for refusal in [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem] {
            assert_eq!(target.problem(&refusal.into()).kind, ProblemKind::Invalid);
        }
        let fails = target.problem(&io::ErrorKind::TimedOut.into());
        assert_eq!(fails.kind, ProblemKind::Unavailable);
    }
}
