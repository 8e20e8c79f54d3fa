//! The logs and samples of jobs, in files beside the store. An append writes what is appended, and no record grows.
//!
//! | in the state directory | |
//! |---|---|
//! | `jobs/JOB.SUBMITTED/log/N` | a segment of the job's log ([`segments`]); N is the number of its first line |
//! | `jobs/JOB.SUBMITTED/samples` | the job's time series ([`sample_file`]) |
//!
//! SUBMITTED is when the job was submitted, in milliseconds of Unix time, hexadecimal. So another job or VM of the same name has other files: a later one,
//! or one of a controller that was restored from an older backup.
//!
//! **What survives.** Lines are on the disk before the job's record says that the guest's messages were taken, and so before the agent may forget them
//! (`fdatasync`). Samples are synced when the file is written anew, and at the job's end: a power cut costs those of the last seconds, a kill none.
//!
//! **What bounds it.** A tenant has at most [`perigee_model::limits::JOBS`] jobs. A job has at most [`segments::LOG_BYTES_MAX`] of log, each line counted with
//! its text and 80 bytes, and beyond that one segment and one answer of its agent; control characters take up to six times their size. Its samples are
//! at most 1,000. While a backup of the controller copies these files, nothing is removed.
//!
//! Before `perigee upgrade finish` both are records, so that the version before can go back ([`crate::level::JOB_FILES`]).

mod sample_file;
mod segments;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use perigee_model::gang::member_of;
use perigee_model::job::{LogLine, Sample};
use perigee_model::{JobId, Problem};

use crate::records::{JobRecord, LogKept, state_problem};

pub use sample_file::SampleFile;
pub use segments::{LOG_BYTES_MAX, LogPart, MESSAGES_PER_PIECE, size_of};
use segments::{Segments, damaged_line};

/// The directory in the state directory.
pub const JOBS: &str = "jobs";

const LOG: &str = "log";
const SAMPLES: &str = "samples";

/// The files of all jobs; cheap to clone.
#[derive(Debug, Clone)]
pub struct JobFiles {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    /// Those that somebody has.
    used: Mutex<BTreeMap<String, Weak<JobDirectory>>>,
    /// Whoever removes something takes turns.
    removing: Mutex<()>,
    /// Tests have the disk full.
    #[cfg(test)]
    is_full: AtomicBool,
}

/// The files of one job. They are there from the first write on.
#[derive(Debug)]
pub struct JobDirectory {
    pub job: JobId,
    name: String,
    path: PathBuf,
    files: JobFiles,
    /// The directory is on the disk.
    is_made: AtomicBool,
    /// Writes are made one after the other, also when nobody waits for one any more. The log as it was last written, if that is known.
    log: Mutex<Option<Segments>>,
    /// The same of the samples, which do not wait for the log.
    samples: Mutex<()>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of the directory of a job that was submitted then (Unix time).
pub fn name_of(job: &JobId, submitted_ms: u64) -> String {
    format!("{job}.{submitted_ms:x}")
}

/// The jobs and VMs whose files are there for this record. Of a gang that waits to start again only the logs of its VMs are there.
pub fn with_files(record: &JobRecord) -> Vec<JobId> {
    let id = &record.job.id;
    let members = record.kind.gang().into_iter().flat_map(|_| 0..record.job.spec.count);
    members.map(|rank| member_of(id, rank)).chain([id.clone()]).collect()
}

/// From now on nothing is removed of the files of the controller with this state directory, until the answer is dropped. `None` if there are none.
///
/// # Errors
/// When the directory can't be read.
pub fn hold(state_dir: &Path) -> io::Result<Option<File>> {
    match File::open(state_dir.join(JOBS)) {
        Ok(dir) => dir.lock_shared().map(|()| Some(dir)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The number of a damaged line ([`damaged_line`]) in the text of a file, which has this path below the state directory.
pub fn damage_in(path: &str, text: &[u8]) -> Option<usize> {
    match path.split('/').collect::<Vec<_>>()[..] {
        [_, _, LOG, _] => damaged_line::<LogLine>(text),
        [_, _, SAMPLES] => damaged_line::<Sample>(text),
        _ => None,
    }
}

impl JobFiles {
    /// Those in this state directory, which is not read yet.
    pub fn new(state_dir: &Path) -> Self {
        let (used, removing) = (Mutex::default(), Mutex::default());
        let inner = Inner {
            dir: state_dir.join(JOBS),
            used,
            removing,
            #[cfg(test)]
            is_full: Default::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The files of a job that was submitted then (Unix time).
    pub fn of(&self, job: &JobId, submitted_ms: u64) -> Arc<JobDirectory> {
        let name = name_of(job, submitted_ms);
        let mut used = lock(&self.inner.used);
        if let Some(known) = used.get(&name).and_then(Weak::upgrade) {
            return known;
        }
        let made = Arc::new(JobDirectory {
            job: job.clone(),
            path: self.inner.dir.join(&name),
            name: name.clone(),
            files: self.clone(),
            is_made: AtomicBool::new(false),
            log: Mutex::default(),
            samples: Mutex::default(),
        });
        used.insert(name, Arc::downgrade(&made));
        made
    }

    /// The names of all directories.
    ///
    /// # Errors
    /// When they can't be read; all functions here fail so.
    pub async fn names(&self) -> Result<Vec<String>, Problem> {
        let dir = self.inner.dir.clone();
        off_thread("can't list the files of jobs".to_owned(), move || {
            let entries = match fs::read_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                entries => entries?,
            };
            let name = |entry: io::Result<fs::DirEntry>| {
                entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
            };
            entries.map(name).collect()
        })
        .await
    }

    /// Removes the directory with this name and all in it. During a backup nothing happens: the cleaner comes again.
    pub async fn remove(&self, name: &str) -> Result<(), Problem> {
        let (files, path) = (self.clone(), self.inner.dir.join(name));
        off_thread(format!("can't remove {}", path.display()), move || {
            files.removing(|| remove_directory(&path))
        })
        .await
    }

    /// Removes something, unless a backup holds it.
    fn removing(&self, remove: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _turn = lock(&self.inner.removing);
        let dir = match File::open(&self.inner.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            dir => dir?,
        };
        match dir.try_lock() {
            Ok(()) => remove(),
            Err(TryLockError::WouldBlock) => Ok(()),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// From now on, or no more, there is no room for any write.
    #[cfg(test)]
    pub fn set_full(&self, is_full: bool) {
        self.inner.is_full.store(is_full, Ordering::SeqCst);
    }
}

impl Drop for JobDirectory {
    fn drop(&mut self) {
        let mut used = lock(&self.files.inner.used);
        // Somebody else may have begun to use it.
        if used.get(&self.name).is_some_and(|known| known.strong_count() == 0) {
            used.remove(&self.name);
        }
    }
}

impl JobDirectory {
    /// Whether its log is in files.
    pub async fn has_log(self: &Arc<Self>) -> Result<bool, Problem> {
        let act = |of: &Self, log: &mut Option<Segments>| match log {
            Some(_) => Ok(true),
            None => of.path.join(LOG).try_exists(),
        };
        self.with_log("read", act).await
    }

    /// Adds lines to the log, whose numbers grow. Returns what the record is to say of the log, and whether the log was just opened or made. All
    /// of them are on the disk then. A log that is not there begins with `older`.
    pub async fn add_lines(
        self: &Arc<Self>,
        older: Vec<LogLine>,
        lines: Vec<LogLine>,
        kept: LogKept,
    ) -> Result<(LogKept, bool), Problem> {
        let act = move |of: &Self, log: &mut Option<Segments>| {
            of.check_room()?;
            let is_new = log.is_none();
            let opened = match log.take() {
                Some(log) => log,
                None => of.open_log(&older)?,
            };
            let log = log.insert(opened);
            log.append(&lines)?;
            if log.forget_dropped(kept.dropped_seq) {
                of.files.removing(|| log.remove_dropped(kept.dropped_seq))?;
            }
            Ok((log.limited(kept), is_new))
        };
        self.with_log("write", act).await
    }

    fn open_log(&self, older: &[LogLine]) -> io::Result<Segments> {
        self.make()?;
        let dir = self.path.join(LOG);
        match dir.try_exists()? {
            true => Segments::open(&dir),
            false => Segments::make(&dir, older),
        }
    }

    /// The first lines with a higher number than `after`. The part ends after the line that reaches one of the limits: a number of lines, and their size
    /// ([`size_of`]). `None` if the log is not in files.
    pub async fn log_after(
        self: &Arc<Self>,
        after: u64,
        limits: (usize, u64),
    ) -> Result<Option<LogPart>, Problem> {
        let dir = self.path.join(LOG);
        let read = move || segments::read_after(&dir, after, limits);
        off_thread(self.what("read", LOG), read).await
    }

    /// Its samples; `None` if they are not in files.
    pub async fn samples(self: &Arc<Self>) -> Result<Option<SampleFile>, Problem> {
        self.with_samples("read", |of| sample_file::read(&of.path.join(SAMPLES))).await
    }

    /// Appends samples to a file of this length. Returns its length afterwards.
    pub async fn add_samples(
        self: &Arc<Self>,
        length: u64,
        samples: Vec<Sample>,
        is_synced: bool,
    ) -> Result<u64, Problem> {
        let act = move |of: &Self| {
            of.check_room()?;
            sample_file::append(&of.path.join(SAMPLES), length, &samples, is_synced)
        };
        self.with_samples("write", act).await
    }

    /// Replaces the samples, which are on the disk then. Returns the length of the file.
    pub async fn set_samples(self: &Arc<Self>, samples: Vec<Sample>) -> Result<u64, Problem> {
        let act = move |of: &Self| {
            of.check_room()?;
            of.make()?;
            sample_file::replace(&of.path.join(SAMPLES), &samples)
        };
        self.with_samples("write", act).await
    }

    /// Removes the samples; the log stays.
    pub async fn remove_samples(self: &Arc<Self>) -> Result<(), Problem> {
        let act = |of: &Self| match fs::remove_file(of.path.join(SAMPLES)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        self.with_samples("remove", act).await
    }

    /// Does something with the samples when it is the turn.
    async fn with_samples<T: Send + 'static>(
        self: &Arc<Self>,
        does: &str,
        act: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Problem> {
        let own = Arc::clone(self);
        off_thread(self.what(does, SAMPLES), move || {
            let _turn = lock(&own.samples);
            act(&own).inspect_err(|_| own.is_made.store(false, Ordering::Relaxed))
        })
        .await
    }

    /// Does something with the log when it is the turn. After an error the log is opened anew.
    async fn with_log<T: Send + 'static>(
        self: &Arc<Self>,
        does: &str,
        act: impl FnOnce(&Self, &mut Option<Segments>) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Problem> {
        let own = Arc::clone(self);
        off_thread(self.what(does, LOG), move || {
            let mut log = lock(&own.log);
            let done = act(&own, &mut log);
            if done.is_err() {
                *log = None;
                own.is_made.store(false, Ordering::Relaxed);
            }
            done
        })
        .await
    }

    fn what(&self, does: &str, file: &str) -> String {
        format!("can't {does} {}", self.path.join(file).display())
    }

    /// Makes the directory, which is there after a power cut.
    fn make(&self) -> io::Result<()> {
        if !self.is_made.load(Ordering::Relaxed) {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
            self.path.ancestors().take(3).try_for_each(sync_directory)?;
            self.is_made.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn check_room(&self) -> io::Result<()> {
        #[cfg(test)]
        if self.files.inner.is_full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }
}

/// Works with files on a thread where that is allowed.
async fn off_thread<T: Send + 'static>(
    what: String,
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Problem> {
    match tokio::task::spawn_blocking(act).await {
        Ok(done) => done.map_err(|error| {
            use io::ErrorKind::{QuotaExceeded, StorageFull};
            state_problem(what, matches!(error.kind(), StorageFull | QuotaExceeded), error)
        }),
        Err(error) => Err(Problem::internal(what, error)),
    }
}

/// Has the names in a directory be there after a power cut.
pub fn sync_directory(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Removes a directory and all in it, if there is one.
pub fn remove_directory(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
