//! Where backups are: a directory of this host, or an S3 store. What is written there appears whole or not at all, also after a kill or a power cut.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::backup::{BackupTarget, ShipBackup};
use perigee_model::backup_key::BackupKey;
use perigee_repository::{Address, NotDone, Objects};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::format::{LAYERS, MARKER, MARKER_KEY, piece_name};
use super::sealing::{self, SEALED_MARKER_KEY, Seal, id_of_marker, sealed_bytes, start_bytes};

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
    /// With what its objects are encrypted; `None`: they are not.
    seal: Option<Arc<Seal>>,
}

/// What shows that there are backups.
enum Marker {
    None,
    Plain,
    /// The id of their key.
    Sealed(String),
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
        Ok(Self { address: at.address.clone(), place, seal: None })
    }

    /// A target that has backups, which are encrypted with this key if they are encrypted.
    ///
    /// # Errors
    /// `Unavailable` if there are none; `Conflict` without the right key.
    pub async fn open(at: &BackupTarget, key: Option<&BackupKey>) -> Result<Self, Problem> {
        let mut target = Self::new(at)?;
        match target.marker().await? {
            Marker::None => return Err(target.not_there()),
            Marker::Plain => {}
            Marker::Sealed(id) => target.unlock(at, &id, key)?,
        }
        Ok(target)
    }

    /// Whether its backups are encrypted.
    pub fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Refuses a target whose backups are not encrypted, if they were.
    ///
    /// # Errors
    /// `Conflict`.
    pub fn check_encrypted(&self, was_encrypted: bool) -> Result<(), Problem> {
        if self.seal.is_some() || !was_encrypted {
            return Ok(());
        }
        let why = "the backup was encrypted, and those that are there are not: somebody has replaced them";
        Err(Problem::conflict(self.what(), why)
            .next("use another backup, and look after the target"))
    }

    /// As [`Self::open`], for a layer that gets its bytes from there, with the key that was right before.
    ///
    /// # Errors
    /// `Unavailable` if there are none, or the key was not sent since the start; `Conflict` if they were encrypted when the layer was made, and are not.
    pub async fn open_again(at: &BackupTarget, was_sealed: bool) -> Result<Self, Problem> {
        let mut target = Self::new(at)?;
        match target.marker().await? {
            Marker::None => return Err(target.not_there()),
            Marker::Plain => target.check_encrypted(was_sealed)?,
            Marker::Sealed(id) => {
                let key = sealing::sent(at).ok_or_else(|| {
                    let why = "they are encrypted, and the controller has not sent their key since this volume server has started";
                    Problem::unavailable(target.what(), why)
                        .next("look after the controller; it sends the key by itself")
                })?;
                target.unlock(at, &id, Some(&key))?;
            }
        }
        Ok(target)
    }

    /// From now on objects are opened with this key, if it is the one with this id.
    fn unlock(
        &mut self,
        at: &BackupTarget,
        id: &str,
        key: Option<&BackupKey>,
    ) -> Result<(), Problem> {
        let refused = |why: String| {
            Problem::conflict(self.what(), why).next(
                "give the tenant the key with which they were encrypted: perigee backup key import",
            )
        };
        let Some(key) = key else {
            return Err(refused(format!(
                "they are encrypted with key {id}, and the tenant has none"
            )));
        };
        let own = self.seal_with(key)?;
        if own.id() != id {
            let why =
                format!("they are encrypted with key {id}, and the tenant's key is {}", own.id());
            return Err(refused(why));
        }
        sealing::remember(at, key);
        self.seal = Some(Arc::new(own));
        Ok(())
    }

    fn seal_with(&self, key: &BackupKey) -> Result<Seal, Problem> {
        Seal::new(key).map_err(|error| Problem::internal(self.what(), error))
    }

    async fn marker(&self) -> Result<Marker, Problem> {
        if let Some(marker) = self.get_raw(SEALED_MARKER_KEY, MARKER_BYTES_MAX).await? {
            let id = id_of_marker(&marker).ok_or_else(|| {
                Problem::conflict(
                    format!("{SEALED_MARKER_KEY} of {}", self.what()),
                    "it is damaged",
                )
            })?;
            return Ok(Marker::Sealed(id.to_owned()));
        }
        let plain = self.get_raw(MARKER_KEY, MARKER_BYTES_MAX).await?;
        Ok(if plain.is_some() { Marker::Plain } else { Marker::None })
    }

    /// The last part of a piece's key.
    pub fn piece_name(&self, number: usize, sha256: &str) -> String {
        match &self.seal {
            Some(seal) => piece_name(number, &seal.name_of(sha256)),
            None => piece_name(number, sha256),
        }
    }

    /// How many bytes an object of so many bytes has there.
    pub fn stored_bytes(&self, bytes: u64) -> u64 {
        if self.seal.is_some() { sealed_bytes(bytes) } else { bytes }
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

    /// Prepares the target of a backup. One that is known has its marker: else its disk is not mounted. A directory that does not exist is not made.
    ///
    /// # Errors
    /// `Unavailable` if it is away; `Conflict` without the key of encrypted backups, or if a backup is to be encrypted beside others that are not.
    pub async fn begin(ask: &ShipBackup) -> Result<Self, Problem> {
        let mut target = Self::new(&ask.to)?;
        match target.marker().await? {
            Marker::None if ask.is_known => return Err(target.not_there()),
            Marker::None if ask.encrypted => {
                let why = "the backup is to be encrypted, and the tenant has no key";
                let key = ask.key.as_ref().ok_or_else(|| {
                    Problem::conflict(target.what(), why).next("make one: perigee backup key make")
                })?;
                let seal = target.seal_with(key)?;
                target.put_raw(SEALED_MARKER_KEY, seal.marker()).await?;
                target.unlock(&ask.to, seal.id(), Some(key))?;
            }
            Marker::None => target.put_raw(MARKER_KEY, MARKER.to_vec()).await?,
            Marker::Plain if ask.encrypted => {
                let why = "the backup is to be encrypted, and those that are there are not";
                return Err(Problem::conflict(target.what(), why)
                    .next("name an empty directory, or another prefix of the store"));
            }
            Marker::Plain => {}
            Marker::Sealed(id) => target.unlock(&ask.to, &id, ask.key.as_ref())?,
        }
        if let Place::Directory(dir) = &target.place {
            target.run(dir, remove_old_parts).await?;
        }
        Ok(target)
    }

    /// Makes sure that there are backups.
    ///
    /// # Errors
    /// `Unavailable` if there are none.
    pub async fn look(&self) -> Result<(), Problem> {
        match self.get_raw(self.marker_key(), MARKER_BYTES_MAX).await? {
            Some(_) => Ok(()),
            None => Err(self.not_there()),
        }
    }

    /// Makes sure that the backups there are encrypted as this one is, or are all in clear as this one is: each of two first backups that begin at once may find none.
    ///
    /// # Errors
    /// `Conflict` if they are not; `Unavailable` if there are none.
    pub async fn check_marker(&self) -> Result<(), Problem> {
        match (self.marker().await?, &self.seal) {
            (Marker::None, _) => return Err(self.not_there()),
            (Marker::Plain, None) => return Ok(()),
            (Marker::Sealed(id), Some(seal)) if id == seal.id() => return Ok(()),
            _ => {}
        }
        let why = "another first backup has begun there at the same moment, and is not encrypted as this one is";
        Err(Problem::conflict(self.what(), why)
            .next("make the backup again, encrypted as the other one is"))
    }

    fn marker_key(&self) -> &'static str {
        if self.seal.is_some() { SEALED_MARKER_KEY } else { MARKER_KEY }
    }

    fn not_there(&self) -> Problem {
        let why = format!("there is no {}: these are not the backups", self.marker_key());
        Problem::unavailable(self.what(), why)
            .next("mount the disk with the backups there, or name another target")
    }

    /// What is there under a key, if something is.
    ///
    /// # Errors
    /// When the target fails, or has more there than can be.
    pub async fn get(&self, key: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, Problem> {
        let got = self.get_raw(key, self.stored_bytes(bytes_max)).await?;
        self.opened(key, got, |seal, key, bytes| seal.open(key, bytes)).await
    }

    /// The content of what was read, if it is encrypted.
    async fn opened(
        &self,
        key: &str,
        got: Option<Vec<u8>>,
        open: impl FnOnce(&Seal, &str, &[u8]) -> Result<Vec<u8>, String> + Send + 'static,
    ) -> Result<Option<Vec<u8>>, Problem> {
        let (seal, bytes) = match (self.seal.clone(), got) {
            (Some(seal), Some(bytes)) => (seal, bytes),
            (_, got) => return Ok(got),
        };
        let place = key.to_owned();
        let opened = tokio::task::spawn_blocking(move || open(&seal, &place, &bytes)).await;
        let what = format!("{key} of {}", self.what());
        let opened = opened.map_err(|error| Problem::internal(&what, error))?;
        opened.map(Some).map_err(|why| {
            Problem::conflict(what, format!("the backup is damaged: {why}"))
                .next("use another backup")
        })
    }

    /// The bytes as they are there.
    async fn get_raw(&self, key: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, Problem> {
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
        let asked = if self.seal.is_some() { start_bytes(bytes) } else { bytes };
        let got = self.get_start_raw(key, asked).await?;
        self.opened(key, got, move |seal, key, read| seal.open_start(key, read, bytes)).await
    }

    async fn get_start_raw(&self, key: &str, bytes: u64) -> Result<Option<Vec<u8>>, Problem> {
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
        let Some(seal) = self.seal.clone() else { return self.put_raw(key, bytes).await };
        let place = key.to_owned();
        let sealed = tokio::task::spawn_blocking(move || seal.seal(&place, &bytes)).await;
        let sealed = sealed.map_err(|error| Problem::internal(self.what(), error))?;
        let no_random = |error| Problem::internal(self.what(), error);
        self.put_raw(key, sealed.map_err(no_random)?).await
    }

    async fn put_raw(&self, key: &str, bytes: Vec<u8>) -> Result<(), Problem> {
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
            Place::Directory(dir) => self.bytes_in(dir).await,
            Place::S3(objects) => objects.bytes(&self.what()).await.map_err(of_store),
        }
    }

    /// Each layer has a deadline of its own: a directory with many may need longer than one request may take.
    async fn bytes_in(&self, dir: &Arc<PathBuf>) -> Result<u64, Problem> {
        let mut bytes = self.run(dir, |dir| bytes_below(dir, Some(LAYERS))).await?;
        for layer in self.names(LAYERS).await? {
            let below = Path::new(LAYERS).join(layer);
            let of_layer = self.run(dir, move |dir| bytes_of(&dir.join(below))).await?;
            bytes = bytes.saturating_add(of_layer);
        }
        Ok(bytes)
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

/// The bytes of all files below, but for the entry of this name.
fn bytes_below(dir: &Path, but: Option<&str>) -> io::Result<u64> {
    let mut bytes = 0_u64;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let is_left_out = but.is_some() && entry.file_name().to_str() == but;
        if !is_left_out {
            bytes = bytes.saturating_add(bytes_of(&entry.path())?);
        }
    }
    Ok(bytes)
}

/// The bytes of a file, or of all files below a directory. What goes meanwhile does not count.
fn bytes_of(path: &Path) -> io::Result<u64> {
    let counted = match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => bytes_below(path, None),
        meta => meta.map(|meta| meta.len()),
    };
    match counted {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        counted => counted,
    }
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

    fn put_marker(dir: &Path, key: &str, marker: &[u8]) {
        std::fs::write(dir.join(key), marker).expect("a marker");
    }

    #[tokio::test]
    async fn what_was_encrypted_is_not_read_in_clear_later() {
        let dir = tempfile::tempdir().expect("a directory");
        put_marker(dir.path(), MARKER_KEY, MARKER);
        let at = BackupTarget { address: dir.path().display().to_string(), endpoint: None };
        Target::open_again(&at, false).await.expect("it was in clear");
        let replaced = Target::open_again(&at, true).await.expect_err("it was encrypted");
        assert_eq!(replaced.kind, ProblemKind::Conflict, "{replaced}");
    }

    #[tokio::test]
    async fn of_two_first_backups_that_begin_at_once_only_one_ends_if_one_is_encrypted() {
        let dir = tempfile::tempdir().expect("a directory");
        let plain = target(dir.path());
        put_marker(dir.path(), MARKER_KEY, MARKER);
        plain.check_marker().await.expect("it is in clear too");
        let seal = Seal::new(&BackupKey::new([1; BackupKey::BYTES])).expect("a key");
        put_marker(dir.path(), SEALED_MARKER_KEY, &seal.marker());
        let refused = plain.check_marker().await.expect_err("the others are encrypted");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        let sealed = Target { seal: Some(Arc::new(seal)), ..plain };
        sealed.check_marker().await.expect("it is encrypted too");
    }

    #[tokio::test]
    async fn all_objects_of_a_directory_are_counted() {
        let dir = tempfile::tempdir().expect("a directory");
        let target = target(dir.path());
        for (key, bytes) in [("backups/a", 1), ("layers/x/index", 10), ("layers/y/index", 100)] {
            target.put(key, vec![0; bytes]).await.expect("it is put");
        }
        assert_eq!(target.bytes().await.expect("its bytes"), 111);
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
