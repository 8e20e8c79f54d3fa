//! Reads that have to wait for the disk.
//!
//! Each thread that runs requests has an io_uring, which is made with its first such read. The reads of a
//! batch of requests are submitted with one system call. Completions need no system call: the runtime
//! watches the ring like a socket. No other thread is woken, and none blocks. If the kernel has no
//! io_uring, or forbids it, a read blocks a thread.
//!
//! All these reads go through the page cache. So if several clients want the same block at the same time,
//! they wait for a single read of the device.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::{StreamExt, TryStreamExt};
use io_uring::{IoUring, cqueue, opcode, types};
use perigee_block::locking::lock;
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use crate::blocking::blocking;
use crate::disk::files::BlockFile;

/// Entries of a ring, which is the most reads of one thread in the kernel at a time.
const ENTRIES: u32 = 256;
/// The most bytes that one thread reads at a time. Other reads wait without memory, so the server's memory
/// for reads does not grow with its clients.
const IN_FLIGHT_BYTES_MAX: usize = 8 << 20;
/// A longer read is split into parts of this size, so that other clients' reads run between them.
const TURN_BYTES: usize = 1 << 20;
/// Parts of one read that are in flight.
const PARTS: usize = 4;

/// Fills a buffer from a file, and waits for the disk.
pub(crate) async fn read(
    file: Arc<dyn BlockFile>,
    offset: u64,
    length: usize,
) -> io::Result<Vec<u8>> {
    let reader = (length > 0 && file.fd().is_some()).then(Reader::of_this_thread).flatten();
    let Some(reader) = reader else {
        let whole = move || {
            let mut buffer = vec![0; length];
            file.read_at(offset, &mut buffer).map(|()| buffer)
        };
        return blocking(whole).await;
    };
    if length <= TURN_BYTES {
        let ahead = file.ahead_of(&(offset..offset + length as u64));
        return read_part(&reader, file, offset, length, ahead).await;
    }
    let parts = (0..length).step_by(TURN_BYTES).map(|at| {
        let part = TURN_BYTES.min(length - at);
        read_part(&reader, Arc::clone(&file), offset + at as u64, part, None)
    });
    let mut parts = futures_util::stream::iter(parts).buffered(PARTS);
    let mut whole = Vec::with_capacity(length);
    while let Some(part) = parts.try_next().await? {
        whole.extend(part);
    }
    Ok(whole)
}

async fn read_part(
    reader: &Arc<Reader>,
    file: Arc<dyn BlockFile>,
    offset: u64,
    length: usize,
    ahead: Option<Range<u64>>,
) -> io::Result<Vec<u8>> {
    let ahead = ahead.map(|range| (Arc::clone(&file), range));
    let (done, result) = oneshot::channel();
    if let Some(gathering) = reader.hand_in(Read { file, offset, length, done: Some(done) }) {
        // The other requests of the batch run first and add their reads.
        tokio::task::yield_now().await;
        drop(gathering);
    }
    if let Some((file, range)) = ahead {
        drop(tokio::task::spawn_blocking(move || file.bring_in(range)));
    }
    result.await.expect("every read is answered")
}

struct Read {
    file: Arc<dyn BlockFile>,
    offset: u64,
    length: usize,
    /// Taken when it is answered.
    done: Option<oneshot::Sender<io::Result<Vec<u8>>>>,
}

impl Read {
    fn answer(&mut self, result: io::Result<Vec<u8>>) {
        // If the client has gone, nobody receives this.
        let _gone = self.done.take().map(|done| done.send(result));
    }
}

/// A read in flight.
struct Begun {
    read: Read,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are already filled.
    filled: usize,
}

/// One thread's ring. Tasks that have moved to other threads use it too.
struct Reader {
    ring: Mutex<Ring>,
    /// The runtime that handles the completions has ended, or the ring has failed.
    abandoned: AtomicBool,
}

struct Ring {
    ring: IoUring,
    /// The reads that were submitted or are about to be. A read's index identifies its completion.
    in_flight: Vec<Option<Begun>>,
    in_flight_bytes: usize,
    free: Vec<usize>,
    /// Reads that wait for a free index, in their order.
    queue: VecDeque<Read>,
    /// A task is about to submit the reads that were added.
    is_gathering: bool,
    /// Why the kernel takes no more reads of this ring. Then nothing of it is used again.
    failed: Option<io::ErrorKind>,
}

/// Submits the gathered reads when it is dropped, also if its task is cancelled.
struct Gathering(Arc<Reader>);

impl Drop for Gathering {
    fn drop(&mut self) {
        let mut ring = self.0.ring();
        ring.is_gathering = false;
        ring.submit();
        if ring.failed.is_some() {
            self.0.abandoned.store(true, Ordering::Relaxed);
        }
    }
}

/// Marks the ring as abandoned when the runtime drops it.
struct Taker(Arc<Reader>);

impl Drop for Taker {
    fn drop(&mut self) {
        self.0.abandoned.store(true, Ordering::Relaxed);
    }
}

thread_local! {
    static READER: RefCell<Option<Arc<Reader>>> = const { RefCell::new(None) };
}

impl Reader {
    /// `None` if io_uring can't be used.
    fn of_this_thread() -> Option<Arc<Self>> {
        READER.with_borrow_mut(|reader| {
            reader.take_if(|reader| reader.abandoned.load(Ordering::Relaxed));
            if reader.is_none() {
                *reader = Self::start()
                    .inspect_err(
                        |error| tracing::debug!(%error, "can't use io_uring; reads block a thread"),
                    )
                    .ok();
            }
            reader.clone()
        })
    }

    fn start() -> io::Result<Arc<Self>> {
        let ring = IoUring::builder().setup_coop_taskrun().build(ENTRIES)?;
        let places = ENTRIES as usize;
        // SAFETY: the ring keeps the descriptor open.
        let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }.try_clone_to_owned()?;
        let ring = Mutex::new(Ring {
            ring,
            in_flight: (0..places).map(|_| None).collect(),
            in_flight_bytes: 0,
            free: (0..places).collect(),
            queue: VecDeque::new(),
            is_gathering: false,
            failed: None,
        });
        let reader = Arc::new(Self { ring, abandoned: AtomicBool::new(false) });
        // SAFETY: the descriptor of an `OwnedFd` stays open and the same as long as the `OwnedFd` exists.
        let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        tokio::spawn(Taker(Arc::clone(&reader)).run(watched));
        Ok(reader)
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        lock(&self.ring)
    }

    /// Adds a read. The caller whose read is the first after a submission makes the next submission.
    fn hand_in(self: &Arc<Self>, read: Read) -> Option<Gathering> {
        let mut ring = self.ring();
        ring.add(read);
        let first = !std::mem::replace(&mut ring.is_gathering, true);
        first.then(|| Gathering(Arc::clone(self)))
    }
}

impl Taker {
    async fn run(self, watched: AsyncFd<OwnedFd>) {
        loop {
            match watched.readable().await {
                // Cleared before the completions are taken: later ones make the ring ready again.
                Ok(mut ready) => ready.clear_ready(),
                Err(error) => return tracing::error!(%error, "can't wait for reads"),
            }
            self.0.ring().take_completed();
        }
    }
}

impl Ring {
    fn add(&mut self, mut read: Read) {
        if let Some(why) = self.failed {
            return read.answer(Err(why.into()));
        }
        self.queue.push_back(read);
        self.begin();
    }

    /// Starts waiting reads as long as the limits allow.
    fn begin(&mut self) {
        while let Some(next) = self.queue.front() {
            let bytes = self.in_flight_bytes + next.length;
            if self.free.is_empty() || bytes > IN_FLIGHT_BYTES_MAX {
                return;
            }
            if let (Some(read), Some(place)) = (self.queue.pop_front(), self.free.pop()) {
                self.in_flight_bytes = bytes;
                let buffer = vec![0; read.length];
                self.push(place, Begun { read, buffer, filled: 0 });
            }
        }
    }

    fn push(&mut self, place: usize, mut begun: Begun) {
        let rest = &mut begun.buffer[begun.filled..];
        let length = u32::try_from(rest.len()).expect("bounded");
        let fd = begun.read.file.fd().expect("checked before it was handed in").as_raw_fd();
        let entry = opcode::Read::new(types::Fd(fd), rest.as_mut_ptr(), length)
            .offset(begun.read.offset + begun.filled as u64)
            .build()
            .user_data(place as u64);
        self.in_flight[place] = Some(begun);
        // SAFETY: file and buffer of a read stay unchanged in `in_flight` until its completion. A ring waits
        // for all completions before it is dropped.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("there is an entry for each place");
    }

    /// Submits the added reads to the kernel.
    fn submit(&mut self) {
        while self.failed.is_none() {
            match self.ring.submit() {
                Ok(_) => return,
                Err(error) if is_transient(&error) => std::thread::yield_now(),
                Err(error) => self.fail(&error),
            }
        }
    }

    /// Answers all reads. The buffers stay, because the kernel may have some of the reads already.
    fn fail(&mut self, error: &io::Error) {
        tracing::error!(%error, "can't submit reads: they fail, and the next ones use another ring");
        self.failed = Some(error.kind());
        let in_flight = self.in_flight.iter_mut().flatten().map(|begun| &mut begun.read);
        for read in self.queue.iter_mut().chain(in_flight) {
            let again = error.raw_os_error().map(io::Error::from_raw_os_error);
            read.answer(Err(again.unwrap_or_else(|| error.kind().into())));
        }
        self.queue.clear();
    }

    fn take_completed(&mut self) {
        while let Some(entry) = self.next_completed() {
            let place = usize::try_from(entry.user_data()).expect("the place of a read");
            self.ended(place, entry.result());
        }
        // Submits reads that waited for a free index, and the rest of partial reads.
        if !self.is_gathering && !self.ring.submission().is_empty() {
            self.submit();
        }
    }

    fn next_completed(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    fn ended(&mut self, place: usize, result: i32) {
        let mut begun = self.in_flight[place].take().expect("one completion for each read");
        let failed = match usize::try_from(result) {
            Ok(0) => Some(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                begun.filled += length;
                None
            }
            Err(_) => Some(io::Error::from_raw_os_error(-result)).filter(|e| !is_transient(e)),
        };
        if failed.is_none() && begun.filled < begun.buffer.len() && self.failed.is_none() {
            return self.push(place, begun);
        }
        self.free.push(place);
        self.in_flight_bytes -= begun.read.length;
        begun.read.answer(failed.map_or(Ok(begun.buffer), Err));
        self.begin();
    }
}

impl Drop for Ring {
    /// Waits for all completions, because the kernel may still write into the buffers. Those of a ring that has
    /// failed are never freed.
    fn drop(&mut self) {
        if self.failed.is_some() {
            return std::mem::forget(std::mem::take(&mut self.in_flight));
        }
        while self.free.len() < self.in_flight.len() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => self.take_completed(),
                Err(error) if is_transient(&error) => {}
                Err(_) => std::process::abort(),
            }
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    let transient = [Errno::INTR, Errno::AGAIN, Errno::BUSY];
    transient.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use futures_util::FutureExt;
    use tokio::time::timeout;

    use super::*;
    use crate::disk::files::DiskFile;

    const DEADLINE: Duration = Duration::from_secs(60);

    fn file(length: usize) -> (Vec<u8>, Arc<dyn BlockFile>) {
        let bytes: Vec<u8> = (1..=251).cycle().take(length).collect();
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&bytes, 0).expect("written");
        (bytes, Arc::new(DiskFile::from(file)))
    }

    #[tokio::test]
    async fn more_reads_than_the_ring_has_places_are_all_answered() {
        let (bytes, file) = file(3 * ENTRIES as usize * 100);
        let reads = (0..3 * ENTRIES as usize).map(|n| read(Arc::clone(&file), n as u64 * 100, 100));
        let found = futures_util::future::try_join_all(reads).await.expect("all are read");
        assert_eq!(found.concat(), bytes);
    }

    #[tokio::test]
    async fn more_bytes_than_a_ring_reads_at_a_time_are_all_read() {
        let (bytes, file) = file(3 * IN_FLIGHT_BYTES_MAX);
        let part = |part: usize| {
            let length = IN_FLIGHT_BYTES_MAX / 2;
            read(Arc::clone(&file), (part * length) as u64, length)
        };
        let whole = read(Arc::clone(&file), 0, bytes.len());
        let (whole, parts) = tokio::join!(whole, futures_util::future::join_all((0..6).map(part)));
        assert!(whole.expect("all of it") == bytes, "a read that is longer than the bound");
        let parts: Vec<_> = parts.into_iter().map(|part| part.expect("a part")).collect();
        assert!(parts.concat() == bytes, "reads that are more than the bound together");
    }

    #[tokio::test]
    async fn a_read_beyond_the_end_fails_and_nothing_else_does() {
        let (bytes, file) = file(5000);
        let beyond = read(Arc::clone(&file), 4000, 2000).await.expect_err("there is no more");
        assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(read(file, 0, 5000).await.expect("all of it"), bytes);
    }

    #[test]
    fn a_thread_reads_on_after_its_runtime_has_gone() {
        let (bytes, file) = file(5000);
        for _ in 0..2 {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let read = async { timeout(DEADLINE, read(Arc::clone(&file), 0, 5000)).await };
            let found = runtime.expect("a runtime").block_on(read).expect("in time");
            assert_eq!(found.expect("all of it"), bytes);
        }
    }

    #[tokio::test]
    async fn a_read_that_is_given_up_keeps_no_other_waiting() {
        let (bytes, file) = file(5000);
        let mut first = Box::pin(read(Arc::clone(&file), 0, 5000));
        let mut second = Box::pin(read(file, 0, 5000));
        assert!((&mut first).now_or_never().is_none());
        assert!((&mut second).now_or_never().is_none());
        drop(first);
        let found = timeout(DEADLINE, second).await.expect("in time");
        assert_eq!(found.expect("all of it"), bytes);
    }

    #[tokio::test]
    async fn reads_that_can_t_be_submitted_fail_and_later_ones_are_read() {
        let (bytes, file) = file(5000);
        assert_eq!(read(Arc::clone(&file), 0, 5000).await.expect("all of it"), bytes);
        let Some(reader) = Reader::of_this_thread() else { return };
        let null = std::fs::File::open("/dev/null").expect("a file");
        let of_ring = reader.ring().ring.as_raw_fd();
        // SAFETY: the ring owns the descriptor and closes it; this owner is never dropped.
        let mut of_ring = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(of_ring) });
        rustix::io::dup2(&null, &mut of_ring).expect("the descriptor is another file's now");
        let failed = timeout(DEADLINE, read(Arc::clone(&file), 0, 5000)).await.expect("in time");
        failed.expect_err("the kernel does not take it");
        let found = timeout(DEADLINE, read(file, 0, 5000)).await.expect("in time");
        assert_eq!(found.expect("another ring"), bytes);
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
