//! The audit log: who asked for what, when, and the answer's status.
//!
//! It has the requests that change something, and those that were refused. Each tenant has a file of its own, a line of
//! JSON for each request. A file that has reached [`FILE_BYTES_MAX`] becomes the old one, and the old one before it goes.
//! So a tenant can only push out entries of its own. What operators with a certificate, hosts and the unix socket ask for
//! is in the file of the tenant `default`. Bodies are never written, so no token, secret or content is.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use perigee_model::secret::without_tokens;
use perigee_model::tenant::AuditEntry;
use perigee_model::{Problem, TenantName};

/// The size of one file; each tenant has two.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// The most entries of one answer.
pub const PAGE_ENTRIES_MAX: usize = 1000;

/// How much of a log's end is read for its last entries.
const TAIL_BYTES: u64 = 32 << 10;

/// The longest path or name in an entry.
const TEXT_BYTES_MAX: usize = 512;

/// The log's directory. Each tenant has at most two files of [`FILE_BYTES_MAX`] in it.
#[derive(Debug)]
pub struct Audit {
    dir: PathBuf,
    /// Entries are written one after the other.
    turn: Mutex<()>,
}

impl Audit {
    /// # Errors
    /// When the directory can't be made.
    pub fn open(state_dir: &Path) -> Result<Self, Problem> {
        let dir = state_dir.join("audit");
        perigee_http::private_directory(&dir)?;
        Ok(Self { dir, turn: Mutex::default() })
    }

    fn path(&self, tenant: &TenantName) -> PathBuf {
        self.dir.join(format!("{tenant}.log"))
    }

    /// Adds an entry. The request has been answered, so a disk that is full does not fail it.
    pub fn add(&self, tenant: &TenantName, mut entry: AuditEntry) {
        for text in [&mut entry.request, &mut entry.thing] {
            *text = without_tokens(text);
            text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        }
        if let Err(error) = self.write(&self.path(tenant), &entry) {
            let (who, request) = (&entry.who, &entry.request);
            tracing::error!(%error, %who, %request, "can't write the audit log");
        }
    }

    fn write(&self, path: &Path, entry: &AuditEntry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let open = || File::options().create(true).read(true).append(true).mode(0o600).open(path);
        let mut file = open()?;
        if file.metadata()?.len() >= FILE_BYTES_MAX {
            std::fs::rename(path, old(path))?;
            file = open()?;
        }
        // A disk that was full, or a power cut, may have cut the last line. This one does not become a part of it.
        let mut last = [b'\n'];
        if let Some(at) = file.metadata()?.len().checked_sub(1) {
            file.read_exact_at(&mut last, at)?;
        }
        if last != [b'\n'] {
            line.insert(0, b'\n');
        }
        // In one piece: a reader never sees half of it, unless the disk is full.
        file.write_all(&line)
    }

    /// The last entries of a tenant since then, the oldest first, at most [`PAGE_ENTRIES_MAX`].
    ///
    /// # Errors
    /// When a file can't be read.
    pub fn read(&self, tenant: &TenantName, since_ms: u64) -> Result<Vec<AuditEntry>, Problem> {
        let path = self.path(tenant);
        let mut entries = Vec::new();
        for path in [old(&path), path] {
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(Problem::internal("can't read the audit log", error)),
            };
            for line in BufReader::new(file).split(b'\n') {
                let line = line.map_err(|e| Problem::internal("can't read the audit log", e))?;
                // A line that a full disk has cut is no entry.
                let Ok(entry) = serde_json::from_slice::<AuditEntry>(&line) else { continue };
                if entry.at_ms >= since_ms {
                    entries.push(entry);
                }
            }
        }
        entries.drain(..entries.len().saturating_sub(PAGE_ENTRIES_MAX));
        Ok(entries)
    }

    /// As [`Self::read`], but only what stands in the last [`TAIL_BYTES`] of the present file.
    ///
    /// # Errors
    /// When the file can't be read.
    pub fn last(&self, tenant: &TenantName, since_ms: u64) -> Result<Vec<AuditEntry>, Problem> {
        let unread = |error: io::Error| Problem::internal("can't read the audit log", error);
        let mut file = match File::open(self.path(tenant)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(unread(error)),
        };
        let from = file.metadata().map_err(unread)?.len().saturating_sub(TAIL_BYTES);
        let mut tail = Vec::new();
        file.seek(SeekFrom::Start(from))
            .and_then(|_| file.take(TAIL_BYTES).read_to_end(&mut tail))
            .map_err(unread)?;
        // Of a line that begins before this a part would be read, which is no entry either.
        let lines = tail.split(|byte| *byte == b'\n');
        let entries = lines.filter_map(|line| serde_json::from_slice::<AuditEntry>(line).ok());
        Ok(entries.filter(|entry| entry.at_ms >= since_ms).collect())
    }
}

fn old(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at_ms: u64, request: &str) -> AuditEntry {
        let (who, thing) = ("acme/ann".to_owned(), String::new());
        AuditEntry { at_ms, who, request: request.to_owned(), thing, status: 200 }
    }

    #[test]
    fn a_line_that_was_cut_costs_no_later_entry() {
        let dir = tempfile::tempdir().expect("a directory");
        let audit = Audit::open(dir.path()).expect("a log");
        let acme = TenantName::new("acme").expect("a name");
        let add = |at_ms| audit.add(&acme, entry(at_ms, "POST /v1/jobs"));
        add(1);
        let mut file = File::options().append(true).open(audit.path(&acme)).expect("the log");
        file.write_all(b"{\"at_ms\":2,").expect("the disk is full");
        add(3);
        add(4);
        let times: Vec<u64> =
            audit.read(&acme, 0).expect("entries").iter().map(|entry| entry.at_ms).collect();
        assert_eq!(times, [1, 3, 4]);
    }

    #[test]
    fn a_token_that_somebody_has_put_into_a_path_is_not_written_down() {
        let dir = tempfile::tempdir().expect("a directory");
        let audit = Audit::open(dir.path()).expect("a log");
        let acme = TenantName::new("acme").expect("a name");
        let secret = "5e".repeat(32);
        audit.add(&acme, entry(1, &format!("DELETE /v1/tokens/perigee_0123456789abcdef_{secret}")));
        let log = std::fs::read_to_string(audit.path(&acme)).expect("the log");
        assert!(log.contains("perigee_0123456789abcdef_…") && !log.contains(&secret), "{log}");
    }

    #[test]
    fn a_log_keeps_its_last_entries_in_two_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let audit = Audit::open(dir.path()).expect("a log");
        let [acme, blue] = ["acme", "blue"].map(|name| TenantName::new(name).expect("a name"));
        let long = "x".repeat(10 * TEXT_BYTES_MAX);
        let in_a_file = FILE_BYTES_MAX / TEXT_BYTES_MAX as u64;
        audit.add(&blue, entry(1, "POST /v1/jobs"));
        for at_ms in 0..3 * in_a_file {
            audit.add(&acme, entry(at_ms, &long));
        }
        for name in ["acme.log", "acme.log.1"] {
            let bytes = std::fs::metadata(dir.path().join("audit").join(name)).expect("it").len();
            assert!(bytes <= FILE_BYTES_MAX + 2 * TEXT_BYTES_MAX as u64, "{name}: {bytes}");
        }
        let all = audit.read(&acme, 0).expect("entries");
        assert_eq!(all.len(), PAGE_ENTRIES_MAX);
        assert_eq!(all.last().map(|last| last.at_ms), Some(3 * in_a_file - 1));
        assert_eq!(audit.read(&acme, 3 * in_a_file - 5).expect("entries").len(), 5);
        assert_eq!(audit.read(&blue, 0).expect("entries").len(), 1, "another tenant's are kept");
        let last = audit.last(&acme, 0).expect("the end");
        assert!((1..200).contains(&last.len()), "{} entries", last.len());
        assert_eq!(last, all[all.len() - last.len()..]);
        assert_eq!(audit.last(&blue, 0).expect("its end"), audit.read(&blue, 0).expect("all"));
    }
}
