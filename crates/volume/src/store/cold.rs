//! Reads that have to wait for the disk.
//!
//! One thread hands them to the kernel's io_uring, however many there are: while it hands in and
//! takes out some, others gather, so that under load a read costs few system calls and wake-ups
//! (measured, 12 µs of CPU for each instead of 50 µs with a blocking thread for each). The thread
//! starts with the first such read, serves all pools of the process, and sleeps while there is
//! nothing to read. Where the kernel has no io_uring, or forbids it, a read blocks a thread.
//!
//! Clients that want the same block at once wait for one read of the device: the page cache, through
//! which all of these go, sees to that.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::blocking;
use super::files::BlockFile;

/// Entries of the ring.
const ENTRIES: u32 = 256;
/// Reads that the kernel has at a time; one entry is for waking the thread.
const IN_FLIGHT_MAX: usize = ENTRIES as usize - 1;
/// Marks the completion that only wakes the thread.
const WAKE: u64 = u64::MAX;
/// Longest read in one go.
const PART_BYTES_MAX: usize = 1 << 30;

/// Fills a buffer from a file, waiting for the disk.
pub(super) async fn read(
    file: Arc<dyn BlockFile>,
    offset: u64,
    length: usize,
) -> io::Result<Vec<u8>> {
    static READER: OnceLock<Option<Arc<Reader>>> = OnceLock::new();
    let mut buffer = vec![0; length];
    match READER.get_or_init(Reader::start) {
        Some(reader) if length > 0 && file.fd().is_some() => {
            let (done, result) = oneshot::channel();
            reader.hand_in(Read { file, offset, buffer, filled: 0, done });
            result.await.expect("the thread answers every read")
        }
        _ => blocking(move || file.read_at(offset, &mut buffer).map(|()| buffer)).await,
    }
}

struct Read {
    file: Arc<dyn BlockFile>,
    offset: u64,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are read.
    filled: usize,
    done: oneshot::Sender<io::Result<Vec<u8>>>,
}

/// What the thread and those who read share.
struct Reader {
    queue: Mutex<Queue>,
    /// Written when there is something to do for a thread that sleeps.
    wake: OwnedFd,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<Read>,
    /// The thread does not look here again before a completion wakes it.
    asleep: bool,
}

impl Reader {
    /// `None` when there is no io_uring for us.
    fn start() -> Option<Arc<Self>> {
        let started = || -> io::Result<Arc<Self>> {
            let ring = IoUring::new(ENTRIES)?;
            let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
            let reader = Arc::new(Self { queue: Mutex::default(), wake });
            let in_flight = (0..IN_FLIGHT_MAX).map(|_| None).collect();
            let free = (0..IN_FLIGHT_MAX).collect();
            let woken = Box::new([0; 8]);
            let thread = Ring { ring, reader: Arc::clone(&reader), in_flight, free, woken };
            std::thread::Builder::new().name("reader".into()).spawn(move || thread.run())?;
            Ok(reader)
        };
        started()
            .inspect_err(|error| tracing::info!(%error, "no io_uring: a read blocks a thread"))
            .ok()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no holder panics")
    }

    fn hand_in(&self, read: Read) {
        let mut queue = self.queue();
        queue.reads.push_back(read);
        let wake = std::mem::take(&mut queue.asleep);
        drop(queue);
        if wake {
            // It fails only when the counter is full, and then the thread wakes up anyway.
            let _full = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// The thread's side.
struct Ring {
    ring: IoUring,
    reader: Arc<Reader>,
    /// What the kernel has; a read's place here marks its completion.
    in_flight: Vec<Option<Read>>,
    free: Vec<usize>,
    /// What the kernel reads from the event file.
    woken: Box<[u8; 8]>,
}

impl Drop for Ring {
    /// Only a panic gets here, and the kernel may still write into the buffers.
    fn drop(&mut self) {
        std::process::abort();
    }
}

impl Ring {
    fn run(mut self) {
        self.listen();
        loop {
            self.take_new();
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_transient(&error) => {}
                Err(error) => panic!("can't wait for reads: {error}"),
            }
            let completed: Vec<_> =
                self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
            for (mark, result) in completed {
                match usize::try_from(mark) {
                    Ok(place) if mark != WAKE => self.ended(place, result),
                    _ => self.listen(),
                }
            }
        }
    }

    /// Hands the kernel as many reads as there is room for.
    fn take_new(&mut self) {
        let reader = Arc::clone(&self.reader);
        let mut queue = reader.queue();
        while !self.free.is_empty()
            && let Some(read) = queue.reads.pop_front()
        {
            self.submit(read);
        }
        // With all places taken, the next completion makes room.
        queue.asleep = queue.reads.is_empty();
    }

    fn submit(&mut self, mut read: Read) {
        let place = self.free.pop().expect("a read ends before the next one takes its place");
        let rest = &mut read.buffer[read.filled..];
        let length = u32::try_from(rest.len().min(PART_BYTES_MAX)).expect("bounded");
        let fd = read.file.fd().expect("checked before it was handed in").as_raw_fd();
        let entry = opcode::Read::new(types::Fd(fd), rest.as_mut_ptr(), length)
            .offset(read.offset + read.filled as u64)
            .build()
            .user_data(place as u64);
        self.in_flight[place] = Some(read);
        self.push(&entry);
    }

    /// Lets a write to the event file wake the thread.
    fn listen(&mut self) {
        let wake = types::Fd(self.reader.wake.as_raw_fd());
        let entry = opcode::Read::new(wake, self.woken.as_mut_ptr(), 8).build().user_data(WAKE);
        self.push(&entry);
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: file and buffer of a read stay as they are in `in_flight` until its completion,
        // those of the event file in `reader` and `woken`; if `self` goes, the process does.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("there is an entry for each place and for the event file");
    }

    fn ended(&mut self, place: usize, result: i32) {
        let Some(mut read) = self.in_flight[place].take() else { return };
        self.free.push(place);
        let failed = match usize::try_from(result) {
            Ok(0) => Some(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                read.filled += length;
                None
            }
            Err(_) => Some(io::Error::from_raw_os_error(-result)).filter(|e| !is_transient(e)),
        };
        let answer = match failed {
            Some(error) => Err(error),
            None if read.filled < read.buffer.len() => return self.submit(read),
            None => Ok(read.buffer),
        };
        // Nobody waits for it when the client has gone.
        let _gone = read.done.send(answer);
    }
}

fn is_transient(error: &io::Error) -> bool {
    let transient = [Errno::INTR, Errno::AGAIN, Errno::BUSY];
    transient.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::super::files::DiskFile;
    use super::*;

    fn file(length: usize) -> (Vec<u8>, Arc<dyn BlockFile>) {
        let bytes: Vec<u8> = (1..=251).cycle().take(length).collect();
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&bytes, 0).expect("written");
        (bytes, Arc::new(DiskFile::from(file)))
    }

    #[tokio::test]
    async fn more_reads_than_the_ring_has_places_are_all_answered() {
        let (bytes, file) = file(3 * IN_FLIGHT_MAX * 100);
        let reads = (0..3 * IN_FLIGHT_MAX).map(|n| read(Arc::clone(&file), n as u64 * 100, 100));
        let found = futures_util::future::try_join_all(reads).await.expect("all are read");
        assert_eq!(found.concat(), bytes);
    }

    #[tokio::test]
    async fn a_read_beyond_the_end_fails_and_nothing_else_does() {
        let (bytes, file) = file(5000);
        let beyond = read(Arc::clone(&file), 4000, 2000).await.expect_err("there is no more");
        assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(read(file, 0, 5000).await.expect("all of it"), bytes);
    }

    /// Bytes that this process has caused to be read from devices.
    fn device_bytes() -> u64 {
        let counters = std::fs::read_to_string("/proc/self/io").expect("the kernel counts it");
        let line = counters.lines().find_map(|line| line.strip_prefix("read_bytes: "));
        line.and_then(|n| n.parse().ok()).expect("a number")
    }

    #[tokio::test]
    async fn clients_that_want_the_same_blocks_at_once_read_them_from_the_device_once() {
        const CLIENTS: usize = 16;
        const BLOCK: usize = 4096;
        const BLOCKS: usize = 2048;
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&vec![7; BLOCKS * BLOCK], 0).expect("written");
        file.sync_all().expect("synced");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("not cached");
        let file: Arc<dyn BlockFile> = Arc::new(DiskFile::from(file));
        let before = device_bytes();
        for first in (0..BLOCKS).step_by(64) {
            let blocks = (0..CLIENTS).flat_map(|_| first..first + 64);
            let reads = blocks.map(|n| read(Arc::clone(&file), (n * BLOCK) as u64, BLOCK));
            futures_util::future::try_join_all(reads).await.expect("all are read");
        }
        let read_bytes = device_bytes() - before;
        // The other tests of this process are counted too.
        let bound = (CLIENTS / 4 * BLOCKS * BLOCK) as u64;
        assert!(read_bytes < bound, "{read_bytes} bytes for {CLIENTS} clients");
    }
}
