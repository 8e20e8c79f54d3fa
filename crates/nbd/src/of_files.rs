//! What was made of files, and is made again when they have changed: an operator's certificates, which are renewed
//! while the server runs.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use perigee_block::locking::lock;
use perigee_model::Problem;

/// What tells a file from the one that was there before. `None`: there is none.
type Stamp = Option<[i64; 6]>;

/// What failed is tried again after so long, also if the files have not changed: it may have been for want of memory or
/// descriptors.
const AGAIN: Duration = Duration::from_secs(60);

type Make<T> = dyn Fn() -> Result<T, Problem> + Send + Sync;

/// What is made of files, with the files' stamps. If making it fails after a change, the old one stays in use, and
/// making is tried again every minute.
pub struct OfFiles<T>(Arc<Inner<T>>);

struct Inner<T> {
    paths: Vec<PathBuf>,
    make: Box<Make<T>>,
    last: Mutex<Last<T>>,
    again: Duration,
}

struct Last<T> {
    stamps: Vec<Stamp>,
    made: T,
    /// When it could not be made of these files.
    failed: Option<Instant>,
}

impl<T> Clone for OfFiles<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

fn stamp(path: &Path) -> Stamp {
    let meta = std::fs::metadata(path).ok()?;
    let inode = i64::from_ne_bytes(meta.ino().to_ne_bytes());
    // A certificate is short, so its length is no such number.
    let size = i64::try_from(meta.size()).unwrap_or(i64::MAX);
    Some([inode, size, meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()])
}

impl<T: Clone + Send + 'static> OfFiles<T> {
    /// # Errors
    /// When it can't be made of the files.
    pub fn load(
        paths: Vec<PathBuf>,
        make: impl Fn() -> Result<T, Problem> + Send + Sync + 'static,
    ) -> Result<Self, Problem> {
        Self::load_with(paths, make, AGAIN)
    }

    fn load_with(
        paths: Vec<PathBuf>,
        make: impl Fn() -> Result<T, Problem> + Send + Sync + 'static,
        again: Duration,
    ) -> Result<Self, Problem> {
        // What changes from here on is seen as a change later.
        let stamps = paths.iter().map(|path| stamp(path)).collect();
        let last = Mutex::new(Last { stamps, made: make()?, failed: None });
        Ok(Self(Arc::new(Inner { paths, make: Box::new(make), last, again })))
    }

    /// As the files are now. While they can't be used, say because a certificate is there and its key is not yet, what was
    /// made before goes on.
    pub async fn get(&self) -> T {
        let this = self.clone();
        let now = tokio::task::spawn_blocking(move || this.get_now());
        // A panic while the files are read harms nobody.
        now.await.unwrap_or_else(|_| lock(&self.0.last).made.clone())
    }

    fn get_now(&self) -> T {
        let stamps: Vec<Stamp> = self.0.paths.iter().map(|path| stamp(path)).collect();
        {
            let mut last = lock(&self.0.last);
            let rests = last.failed.is_none_or(|failed| failed.elapsed() < self.0.again);
            if last.stamps == stamps && rests {
                return last.made.clone();
            }
            // The others do not try it at the same time, and the log is not filled.
            last.failed = last.failed.map(|_| Instant::now());
        }
        let made = (self.0.make)();
        let mut last = lock(&self.0.last);
        last.stamps = stamps;
        match made {
            Ok(made) => {
                tracing::info!(files = ?self.0.paths, "the certificates were read again");
                (last.made, last.failed) = (made, None);
            }
            Err(problem) => {
                last.failed = Some(Instant::now());
                tracing::error!(%problem, "the changed certificates can't be used; the earlier ones go on");
            }
        }
        last.made.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_changed_files_say_counts_and_what_cannot_be_used_does_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
        let write = |path: &Path, text: &str| std::fs::write(path, text).expect("a file");
        write(&one, "a");
        write(&other, "a");
        let paths = vec![one.clone(), other.clone()];
        let read = paths.clone();
        let make = move || {
            let texts: Result<Vec<_>, _> = read.iter().map(std::fs::read_to_string).collect();
            match texts.map_err(|e| Problem::invalid("can't read", e))?.as_slice() {
                [one, other] if one == other => Ok(one.clone()),
                _ => Err(Problem::invalid("can't use them", "they do not belong together")),
            }
        };
        let of_files = OfFiles::load(paths, make).expect("it is made");
        assert_eq!(of_files.get().await, "a");
        write(&one, "next");
        assert_eq!(of_files.get().await, "a", "only one was changed yet");
        write(&other, "next");
        assert_eq!(of_files.get().await, "next");
        std::fs::remove_file(&one).expect("a file");
        assert_eq!(of_files.get().await, "next", "it is away for a moment");
        write(&other, "last one");
        write(&one, "last one");
        assert_eq!(of_files.get().await, "last one");
    }

    #[tokio::test]
    async fn what_failed_once_is_tried_again_although_no_file_has_changed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        std::fs::write(&path, "a").expect("a file");
        let is_full = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (read, full) = (path.clone(), Arc::clone(&is_full));
        let make = move || match full.load(std::sync::atomic::Ordering::SeqCst) {
            true => Err(Problem::internal("can't read", "too many open files")),
            false => std::fs::read_to_string(&read).map_err(|e| Problem::internal("can't read", e)),
        };
        let of_files = OfFiles::load_with(vec![path.clone()], make, Duration::ZERO);
        let of_files = of_files.expect("it is made");
        is_full.store(true, std::sync::atomic::Ordering::SeqCst);
        std::fs::write(&path, "next").expect("a file");
        assert_eq!(of_files.get().await, "a");
        is_full.store(false, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(of_files.get().await, "next");
    }
}
