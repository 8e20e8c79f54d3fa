//! A VM's guest messages in a file: JSON lines with consecutive numbers, only appended.
//!
//! A message is in the file before it is acknowledged (`fdatasync`). So a line that a crash tore was never
//! acknowledged, and is cut off when the file is opened.
//!
//! The file's size is limited. Messages that the controller has stored are removed, in large pieces. If the log
//! is full of messages that it has not stored, no more are accepted. The guest waits, because its messages
//! are not acknowledged.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use perigee_model::Problem;
use perigee_model::guest::{GuestEvent, GuestMessage};
use serde::{Deserialize, Serialize};

use crate::changes::Changed;

/// An answer ends after the message that reaches this size.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// The limit for messages that the controller has not stored yet.
const LOG_BYTES_MAX: u64 = 64 << 20;

/// Messages that it has stored are removed when they take this much.
const TAKEN_BYTES_MAX: u64 = 8 << 20;

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    /// Unix time of this host when the message came.
    arrived_ms: u64,
    #[serde(flatten)]
    message: GuestMessage,
}

/// The messages of one guest, in a file.
#[derive(Debug)]
pub struct GuestLog {
    inner: Mutex<Inner>,
    /// The command's own words are not stored.
    drops_words: bool,
    /// Notified of new messages.
    changed: OnceLock<Arc<Changed>>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    file: File,
    /// Number of the first message.
    first_seq: u64,
    /// The offset of the end of each message.
    ends: Vec<u64>,
    /// A write failed half way. The file is cut to the last end before the next write.
    torn: bool,
}

impl GuestLog {
    /// Opens the file, which is made if there is none. What a crash has left of a message is cut off.
    ///
    /// # Errors
    /// `Internal` if the file can't be read or written.
    pub fn open(path: &Path, drops_words: bool) -> Result<Self, Problem> {
        let fail =
            |e: std::io::Error| Problem::internal(format!("can't open {}", path.display()), e);
        let open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(path);
        let mut inner = Inner {
            path: path.to_owned(),
            file: open.map_err(fail)?,
            first_seq: 1,
            ends: Vec::new(),
            torn: true,
        };
        inner.scan().map_err(fail)?;
        Ok(Self { inner: Mutex::new(inner), drops_words, changed: OnceLock::new() })
    }

    /// From now on also reports new messages to `changed`.
    pub fn tell(&self, changed: Arc<Changed>) {
        // Only the first call counts, because a log belongs to one VM.
        drop(self.changed.set(changed));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the last message; 0 if there is none.
    pub fn last_seq(&self) -> u64 {
        let inner = self.lock();
        inner.first_seq + inner.ends.len() as u64 - 1
    }

    /// Whether no more messages are accepted until the controller has stored these.
    pub fn is_full(&self) -> bool {
        self.lock().end() >= LOG_BYTES_MAX
    }

    /// Records that the controller has stored everything up to this number.
    pub fn taken(&self, seq: u64) -> Result<(), Problem> {
        let dropped = self.lock().drop_through(seq);
        dropped.map_err(|e| Problem::internal("can't shorten the log of a guest's messages", e))
    }

    /// Stores messages whose numbers continue after the last one. They are on disk when this returns.
    pub fn append(&self, messages: &[GuestMessage]) -> Result<(), Problem> {
        let without_words: Vec<GuestMessage>;
        let messages = if self.drops_words {
            without_words = messages.iter().cloned().map(GuestMessage::without_words).collect();
            &without_words
        } else {
            messages
        };
        let mut inner = self.lock();
        inner
            .append(messages)
            .map_err(|e| Problem::internal("can't store a guest's messages", e))?;
        drop(inner);
        if let Some(changed) = self.changed.get() {
            changed.note();
        }
        Ok(())
    }

    /// The messages after a number, at most about a MiB. The caller asks again for the rest.
    pub fn after(&self, seq: u64) -> Result<Vec<GuestEvent>, Problem> {
        let text = self.lock().read_after(seq);
        let text = text.map_err(|e| Problem::internal("can't read a guest's messages", e))?;
        let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let now_ms = now_ms();
        lines
            .map(|line| {
                let Stored { arrived_ms, message } = serde_json::from_slice(line)
                    .map_err(|e| Problem::internal("can't read a guest's messages", e))?;
                Ok(GuestEvent { age_ms: now_ms.saturating_sub(arrived_ms), message })
            })
            .collect()
    }
}

impl Inner {
    fn end(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Finds where each message ends; stops at the first line that is torn or out of order.
    fn scan(&mut self) -> std::io::Result<()> {
        let mut reader = BufReader::new(&self.file);
        let mut line = Vec::new();
        let mut end = 0;
        loop {
            line.clear();
            end += reader.read_until(b'\n', &mut line)? as u64;
            if line.last() != Some(&b'\n') {
                return Ok(());
            }
            let Ok(Stored { message, .. }) = serde_json::from_slice(&line) else { return Ok(()) };
            if self.ends.is_empty() {
                self.first_seq = message.seq;
            } else if message.seq != self.first_seq + self.ends.len() as u64 {
                return Ok(());
            }
            self.ends.push(end);
        }
    }

    fn append(&mut self, messages: &[GuestMessage]) -> std::io::Result<()> {
        let Some(first) = messages.first() else { return Ok(()) };
        let start = self.end();
        if self.torn {
            self.file.set_len(start)?;
        }
        let mut text = Vec::new();
        let mut ends = Vec::with_capacity(messages.len());
        let arrived_ms = now_ms();
        for message in messages {
            serde_json::to_writer(&mut text, &Stored { arrived_ms, message: message.clone() })?;
            text.push(b'\n');
            ends.push(start + text.len() as u64);
        }
        self.torn = true;
        self.file.write_all_at(&text, start)?;
        self.file.sync_data()?;
        self.torn = false;
        if self.ends.is_empty() {
            self.first_seq = first.seq;
        }
        self.ends.extend(ends);
        Ok(())
    }

    /// Drops messages up to this number if that frees enough space: the rest is written to a new file. The last
    /// message always stays, because its number must not be forgotten.
    fn drop_through(&mut self, seq: u64) -> std::io::Result<()> {
        let taken = seq.saturating_add(1).saturating_sub(self.first_seq);
        let taken = usize::try_from(taken).unwrap_or(usize::MAX);
        let dropped = taken.min(self.ends.len().saturating_sub(1));
        let start = if dropped == 0 { 0 } else { self.ends[dropped - 1] };
        if start < TAKEN_BYTES_MAX {
            return Ok(());
        }
        let new_path = self.path.with_extension("new");
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).read(true).write(true).mode(0o600);
        let mut new = options.open(&new_path)?;
        self.file.seek(SeekFrom::Start(start))?;
        let left = self.end() - start;
        if std::io::copy(&mut (&self.file).take(left), &mut new)? != left {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        new.sync_all()?;
        std::fs::rename(&new_path, &self.path)?;
        self.file = new;
        self.torn = false;
        self.ends.drain(..dropped);
        for end in &mut self.ends {
            *end -= start;
        }
        self.first_seq += dropped as u64;
        match self.path.parent() {
            Some(parent) => File::open(parent)?.sync_all(),
            None => Ok(()),
        }
    }

    fn read_after(&self, seq: u64) -> std::io::Result<Vec<u8>> {
        let skip = seq.saturating_add(1).saturating_sub(self.first_seq);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX).min(self.ends.len());
        let start = if skip == 0 { 0 } else { self.ends[skip - 1] };
        let mut end = start;
        for message_end in &self.ends[skip..] {
            end = *message_end;
            if end - start >= ANSWER_BYTES_MAX {
                break;
            }
        }
        let mut text = vec![0; usize::try_from(end - start).unwrap_or(0)];
        self.file.read_exact_at(&mut text, start)?;
        Ok(text)
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use perigee_model::guest::{GuestBody, LogStream};

    use super::*;

    fn message(seq: u64, length_bytes: usize) -> GuestMessage {
        let body = GuestBody::log(LogStream::Stdout, "x".repeat(length_bytes));
        GuestMessage { seq, uptime_ms: seq, body }
    }

    fn numbers(log: &GuestLog, after: u64) -> Vec<u64> {
        log.after(after).unwrap().iter().map(|event| event.message.seq).collect()
    }

    #[test]
    fn messages_are_read_again_after_a_restart_from_any_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let log = GuestLog::open(&path, false).unwrap();
        assert_eq!(log.last_seq(), 0);
        log.append(&[message(40, 3), message(41, 3)]).unwrap();
        log.append(&[message(42, 3)]).unwrap();
        let log = GuestLog::open(&path, false).unwrap();
        assert_eq!(log.last_seq(), 42);
        assert_eq!(numbers(&log, 0), [40, 41, 42]);
        assert_eq!(numbers(&log, 40), [41, 42]);
        assert_eq!(numbers(&log, 42), [0; 0]);
        assert_eq!(numbers(&log, 99), [0; 0]);
    }

    #[test]
    fn a_torn_line_is_cut_off_and_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        GuestLog::open(&path, false).unwrap().append(&[message(1, 50)]).unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"seq\": 2, \"upti").unwrap();
        let log = GuestLog::open(&path, false).unwrap();
        assert_eq!(log.last_seq(), 1);
        log.append(&[message(2, 1)]).unwrap();
        assert_eq!(numbers(&GuestLog::open(&path, false).unwrap(), 0), [1, 2]);
    }

    #[test]
    fn what_the_controller_has_goes_and_a_full_log_takes_more_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let log = GuestLog::open(&path, false).unwrap();
        let mut seq = 0;
        while !log.is_full() {
            let next = seq + 1..=seq + 20;
            log.append(&next.map(|seq| message(seq, 60_000)).collect::<Vec<_>>()).unwrap();
            seq += 20;
        }
        let full_bytes = std::fs::metadata(&path).unwrap().len();
        assert!(full_bytes < LOG_BYTES_MAX + (2 << 20), "{full_bytes} bytes");
        log.taken(10).unwrap();
        assert!(log.is_full(), "so little is not worth the work");
        log.taken(seq - 1).unwrap();
        assert!(!log.is_full());
        assert!(std::fs::metadata(&path).unwrap().len() < 1 << 20);
        assert_eq!(numbers(&log, 0), [seq]);
        log.append(&[message(seq + 1, 3)]).unwrap();
        let log = GuestLog::open(&path, false).unwrap();
        assert_eq!(numbers(&log, 0), [seq, seq + 1]);
        log.taken(u64::MAX).unwrap();
        assert_eq!(log.last_seq(), seq + 1, "its number is not forgotten");
    }

    #[test]
    fn a_message_tells_how_long_ago_it_came() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let line = |seq: u64, arrived_ms: u64| {
            let stored = Stored { arrived_ms, message: message(seq, 1) };
            serde_json::to_string(&stored).unwrap() + "\n"
        };
        std::fs::write(&path, line(1, now_ms() - 50_000) + &line(2, u64::MAX)).unwrap();
        let ages: Vec<u64> = GuestLog::open(&path, false)
            .unwrap()
            .after(0)
            .unwrap()
            .iter()
            .map(|e| e.age_ms)
            .collect();
        assert!((50_000..500_000).contains(&ages[0]), "{ages:?}");
        assert_eq!(ages[1], 0, "the clock was set back");
    }

    #[test]
    fn a_long_log_is_answered_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let log = GuestLog::open(&dir.path().join("events.jsonl"), false).unwrap();
        let messages: Vec<_> = (1..=40).map(|seq| message(seq, 60_000)).collect();
        log.append(&messages).unwrap();
        let first = numbers(&log, 0);
        assert!((10..30).contains(&first.len()), "{} messages", first.len());
        let next = numbers(&log, first.len() as u64);
        assert_eq!(next[0], first.len() as u64 + 1);
    }
}
