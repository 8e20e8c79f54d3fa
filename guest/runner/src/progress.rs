//! The command's progress: lines `DONE/TOTAL LABEL` that it writes to a FIFO.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nix::sys::stat::Mode;
use perigee_model::guest::{GuestBody, LogStream};

use crate::error::Error;
use crate::lines::{self, Piece};
use crate::outbox::Outbox;

pub const FIFO_PATH: &str = "/run/perigee-progress";

/// Reads the FIFO until [`ProgressReader::finish`].
pub struct ProgressReader {
    fifo: File,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl ProgressReader {
    /// Makes the FIFO into which every user of the guest may write, and begins to read it.
    pub fn start(path: &Path, outbox: Arc<Outbox>) -> Result<Self, Error> {
        let doing = || format!("make the progress FIFO {}", path.display());
        nix::unistd::mkfifo(path, Mode::from_bits_truncate(0o622)).map_err(Error::io(doing()))?;
        // This ignores the umask, so that a command that gives up root can still report progress.
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o622))
            .map_err(Error::io(doing()))?;
        // The FIFO is opened for reading and writing, so that a read never returns the end of the file between
        // two writers.
        let fifo =
            OpenOptions::new().read(true).write(true).open(path).map_err(Error::io(doing()))?;
        let input = fifo.try_clone().map_err(Error::io(doing()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let until_stopped = UntilStopped { input, stopped };
            let read =
                lines::read_lines(BufReader::new(until_stopped), |Piece { text, .. }| {
                    if !text.is_empty() {
                        outbox.push_when_room(message(&text));
                    }
                });
            if let Err(error) = read {
                let line = format!("perigee: reading progress stopped: {error}");
                outbox.push(GuestBody::log(LogStream::Stderr, line));
            }
        });
        Ok(Self { fifo, stop, thread })
    }

    /// The caller calls this when no process of the command is left. Everything that was written before is
    /// sent.
    pub fn finish(mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // This wakes the reader. If the write would block, the reader is awake already.
        if let Err(error) = self.fifo.write_all(b"\n")
            && error.kind() != std::io::ErrorKind::WouldBlock
        {
            crate::console(&format!("waking the progress reader: {error}"));
        }
        if self.thread.join().is_err() {
            crate::console("the progress reader panicked");
        }
    }
}

/// Ends the stream when [`ProgressReader::finish`] was called and everything was read.
struct UntilStopped {
    input: File,
    stopped: Arc<AtomicBool>,
}

impl std::io::Read for UntilStopped {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.stopped.load(Ordering::SeqCst) {
            // `finish` has written its line end, or is about to: read everything that is there.
            let flags = nix::fcntl::OFlag::O_NONBLOCK;
            nix::fcntl::fcntl(&self.input, nix::fcntl::FcntlArg::F_SETFL(flags))?;
            return match self.input.read(buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
                other => other,
            };
        }
        self.input.read(buffer)
    }
}

/// A line that is not a valid progress line goes to the log.
fn message(line: &str) -> GuestBody {
    match parse(line) {
        Some((done, total, label)) => GuestBody::Progress { done, total, label: label.to_owned() },
        None => {
            let why = format!("perigee: not a progress line `DONE/TOTAL LABEL`: {line}");
            GuestBody::log(LogStream::Stderr, lines::shorten(&why))
        }
    }
}

fn parse(line: &str) -> Option<(u64, u64, &str)> {
    let (counts, label) = match line.trim().split_once(char::is_whitespace) {
        Some((counts, label)) => (counts, label.trim()),
        None => (line.trim(), ""),
    };
    let (done, total) = counts.split_once('/')?;
    let (done, total) = (done.parse().ok()?, total.parse().ok()?);
    (total > 0 && done <= total).then_some((done, total, label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_progress_line_has_counts_and_a_label() {
        assert_eq!(parse("3/10 query 6"), Some((3, 10, "query 6")));
        assert_eq!(parse("3/10"), Some((3, 10, "")));
    }

    #[test]
    fn what_is_no_progress_is_refused() {
        for line in ["", "3", "x/10 a", "3/0 a", "11/10 a", "-1/10 a", "3 / 10"] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_line_that_is_no_progress_goes_to_the_log() {
        assert!(matches!(message("hello"), GuestBody::Log { .. }));
    }

    #[test]
    fn all_that_was_written_before_the_end_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("progress");
        let outbox = Arc::new(Outbox::new(|| 0));
        let reader = ProgressReader::start(&path, Arc::clone(&outbox)).unwrap();
        let mut writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all(b"1/2 half\n2/2 whole").unwrap();
        drop(writer);
        reader.finish();
        let sent = String::from_utf8(outbox.next_batch(usize::MAX)).unwrap();
        assert!(sent.contains("half") && sent.contains("whole"), "{sent}");
    }
}
