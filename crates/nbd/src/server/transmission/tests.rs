//! One connection over a stream that counts, and a device in memory.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::exports::Export;
use perigee_block::stream::buffers;
use perigee_block::switch::Switch;
use tokio::io::ReadBuf;
use tokio::sync::Semaphore;

use super::super::super::wire::{AnswerTo, Dialect, Request, command, command_flag};
use super::super::command::Rules;
use super::super::contexts::Contexts;
use super::*;

const SIZE_BYTES: usize = 4 << 20;
const DEADLINE: Duration = Duration::from_secs(120);

/// Answers at once when `at_once`; else each request waits for a permit of `gate`.
struct Disk {
    bytes: Mutex<Vec<u8>>,
    at_once: bool,
    gate: Semaphore,
    running: AtomicUsize,
    served: AtomicUsize,
}

impl Disk {
    fn new(at_once: bool) -> Arc<Self> {
        let bytes = (0..SIZE_BYTES).map(|at| pattern(at as u64)).collect();
        Arc::new(Self {
            bytes: Mutex::new(bytes),
            at_once,
            gate: Semaphore::new(0),
            running: AtomicUsize::new(0),
            served: AtomicUsize::new(0),
        })
    }

    async fn wait(&self) {
        self.running.fetch_add(1, Ordering::SeqCst);
        self.gate.acquire().await.expect("the gate is never closed").forget();
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    fn range(offset: u64, length: usize) -> std::ops::Range<usize> {
        let start = usize::try_from(offset).expect("an offset in memory");
        start..start + length
    }

    fn copy(&self, offset: u64, data: &[u8]) {
        assert_ne!(offset, PANIC_AT, "as asked");
        self.bytes.lock().expect("no holder panics")[Self::range(offset, data.len())]
            .copy_from_slice(data);
    }
}

/// A write here panics.
const PANIC_AT: u64 = 666;

fn pattern(at: u64) -> u8 {
    u8::try_from((at ^ (at >> 8) ^ (at >> 16)) & 0xff).expect("one byte")
}

impl Device for Disk {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES as u64
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            self.wait().await;
            let bytes = self.bytes.lock().expect("no holder panics");
            Ok(Bytes::copy_from_slice(&bytes[Self::range(offset, length_bytes as usize)]))
        })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        self.at_once.then(|| {
            self.served.fetch_add(1, Ordering::SeqCst);
            let bytes = self.bytes.lock().expect("no holder panics");
            buffer.copy_from_slice(&bytes[Self::range(offset, buffer.len())]);
            Ok(())
        })
    }

    fn try_write(&self, offset: u64, data: &[u8]) -> Option<Result<(), IoError>> {
        self.at_once.then(|| {
            self.copy(offset, data);
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.wait().await;
            self.copy(offset, &data);
            Ok(())
        })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::NoSpace) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// What a client sent, and what came back.
#[derive(Default)]
struct Wire {
    /// Each is what one read gives at most. With none left the client has gone, unless `endless`.
    pieces: VecDeque<Vec<u8>>,
    endless: bool,
    /// The client takes no answers.
    deaf: bool,
    /// With none left the client is there and says nothing.
    silent: bool,
    /// What is written is passed on a while later, as TLS may do it.
    keeps: bool,
    kept: bool,
    answers: Vec<u8>,
    reads: usize,
    writes: usize,
    read_bytes: usize,
}

#[derive(Clone, Default)]
struct Stream(Arc<Mutex<Wire>>);

impl Stream {
    fn of(pieces: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let stream = Self::default();
        stream.wire().pieces.extend(pieces);
        stream
    }

    fn wire(&self) -> std::sync::MutexGuard<'_, Wire> {
        self.0.lock().expect("no holder panics")
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let mut wire = self.wire();
        if wire.silent && wire.pieces.is_empty() {
            return Poll::Pending;
        }
        wire.reads += 1;
        if let Some(mut piece) = wire.pieces.pop_front() {
            let rest = piece.split_off(piece.len().min(buffer.remaining()));
            buffer.put_slice(&piece);
            wire.read_bytes += piece.len();
            let again = if wire.endless { piece } else { rest };
            if !again.is_empty() {
                wire.pieces.push_front(again);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let mut wire = self.wire();
        if wire.deaf {
            return Poll::Pending;
        }
        wire.writes += 1;
        wire.kept = wire.keeps;
        if !wire.endless {
            wire.answers.extend_from_slice(data);
        }
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if std::mem::take(&mut self.wire().kept) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited {DEADLINE:?} for {what}"),
    }
}

async fn serve(
    disk: &Arc<Disk>,
    stream: &Stream,
    dialect: Dialect,
    stop: CancellationToken,
) -> Result<(), ConnectionError> {
    let rules = Rules { read_only: false, dialect, contexts: Contexts::default() };
    let device = Switch::new(disk.clone());
    let export =
        Export { device, read_only: false, counters: Arc::default(), home: None, confined: false };
    let agreed = Agreed { export, rules, claim: None, login: None, admission: None, end: None };
    within("the connection to end", run(stream.clone(), agreed, stop)).await
}

fn request(dialect: Dialect, command: u16, cookie: u64, offset: u64, payload: &[u8]) -> Vec<u8> {
    let length_bytes = payload.len() as u64;
    let request = Request { flags: 0, command, cookie, offset, length_bytes };
    let mut bytes = request.encode(dialect).to_vec();
    if command == command::WRITE {
        bytes.extend_from_slice(payload);
    }
    bytes
}

const BLOCK: [u8; 4096] = [0xa5; 4096];

/// Reads of one block each, at different places.
fn reads(dialect: Dialect, count: u64) -> Vec<u8> {
    (0..count).flat_map(|i| request(dialect, command::READ, i, i * 8192, &BLOCK)).collect()
}

/// What the answers to [`reads`] are when they come in the order of the requests.
fn read_answers(dialect: Dialect, count: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for i in 0..count {
        let to = AnswerTo { cookie: i, offset: i * 8192 };
        dialect.put_data_head(&mut out, to, BLOCK.len());
        out.extend((to.offset..to.offset + 4096).map(pattern));
        dialect.put_data_end(&mut out, to);
    }
    out
}

#[tokio::test]
async fn a_batch_of_reads_is_one_read_and_one_write_of_the_socket() {
    for dialect in [Dialect::Simple, Dialect::Structured, Dialect::Extended] {
        let stream = Stream::of([reads(dialect, 32)]);
        serve(&Disk::new(true), &stream, dialect, CancellationToken::new()).await.expect("an end");
        let wire = stream.wire();
        assert_eq!((wire.reads - 1, wire.writes), (1, 1), "and a read for the end of the stream");
        assert!(wire.answers == read_answers(dialect, 32));
    }
}

#[tokio::test]
async fn a_batch_of_writes_is_one_read_and_one_write_of_the_socket() {
    let dialect = Dialect::Structured;
    let writes =
        (0..32).flat_map(|i| request(dialect, command::WRITE, i, i * 8192, &BLOCK)).collect();
    let (stream, disk) = (Stream::of([writes]), Disk::new(true));
    serve(&disk, &stream, dialect, CancellationToken::new()).await.expect("an end");
    let wire = stream.wire();
    assert_eq!((wire.reads - 1, wire.writes, wire.answers.len()), (1, 1, 32 * 20));
    let bytes = disk.bytes.lock().expect("no holder panics");
    assert!((0..32).all(|i| bytes[i * 8192..i * 8192 + 4096] == BLOCK));
}

#[tokio::test]
async fn requests_may_arrive_in_any_pieces() {
    let dialect = Dialect::Extended;
    let mut sent = reads(dialect, 40);
    sent.extend(request(dialect, command::WRITE, 40, 1 << 20, &[7; 300_000]));
    sent.extend(request(dialect, command::WRITE, 41, 2 << 20, &[8; 60_000]));
    let mut want = read_answers(dialect, 40);
    dialect.put_done(&mut want, AnswerTo { cookie: 40, offset: 1 << 20 });
    dialect.put_done(&mut want, AnswerTo { cookie: 41, offset: 2 << 20 });
    for piece in [1, 7, 31, 33, 4096, 70_000, 280_000] {
        let (stream, disk) = (Stream::of(sent.chunks(piece).map(<[u8]>::to_vec)), Disk::new(true));
        serve(&disk, &stream, dialect, CancellationToken::new()).await.expect("an end");
        assert!(stream.wire().answers == want, "pieces of {piece} bytes");
        let bytes = disk.bytes.lock().expect("no holder panics");
        assert!(bytes[1 << 20..(1 << 20) + 300_000] == [7; 300_000]);
        assert!(bytes[2 << 20..(2 << 20) + 60_000] == [8; 60_000]);
    }
}

#[tokio::test]
async fn more_answers_than_a_buffer_holds_arrive_whole_and_in_order() {
    let dialect = Dialect::Structured;
    let stream = Stream::of([reads(dialect, 500)]);
    serve(&Disk::new(true), &stream, dialect, CancellationToken::new()).await.expect("an end");
    assert!(stream.wire().answers == read_answers(dialect, 500));
}

#[tokio::test]
async fn a_stream_that_keeps_answers_for_a_while_keeps_no_request_waiting() {
    let dialect = Dialect::Structured;
    let (stream, stop) = (Stream::of([reads(dialect, 500)]), CancellationToken::new());
    (stream.wire().silent, stream.wire().keeps) = (true, true);
    let want = read_answers(dialect, 500);
    let answered = async {
        while stream.wire().answers.len() < want.len() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
    };
    let disk = Disk::new(true);
    let (served, ()) =
        tokio::join!(serve(&disk, &stream, dialect, stop.clone()), within("answers", answered));
    served.expect("an end");
    assert!(stream.wire().answers == want && !stream.wire().kept);
}

#[tokio::test]
async fn requests_that_wait_are_answered_when_they_can_be() {
    let dialect = Dialect::Structured;
    let (stream, disk) = (Stream::of([reads(dialect, 1)]), Disk::new(false));
    disk.gate.add_permits(1);
    serve(&disk, &stream, dialect, CancellationToken::new()).await.expect("an end");
    assert!(stream.wire().answers == read_answers(dialect, 1));
}

#[tokio::test]
async fn a_read_longer_than_a_buffer_is_answered() {
    let dialect = Dialect::Simple;
    let long = vec![0; 1 << 20];
    let (stream, disk) =
        (Stream::of([request(dialect, command::READ, 3, 4096, &long)]), Disk::new(true));
    disk.gate.add_permits(1);
    serve(&disk, &stream, dialect, CancellationToken::new()).await.expect("an end");
    let wire = stream.wire();
    assert_eq!(wire.answers.len(), 16 + long.len());
    assert!(wire.answers[16..].iter().zip(4096..).all(|(byte, at)| *byte == pattern(at)));
}

#[tokio::test]
async fn requests_in_flight_are_bounded_and_all_end_before_the_connection_does() {
    let (stream, disk) = (Stream::of([reads(Dialect::Structured, 200)]), Disk::new(false));
    let serving = tokio::spawn({
        let (disk, stream) = (disk.clone(), stream.clone());
        async move { serve(&disk, &stream, Dialect::Structured, CancellationToken::new()).await }
    });
    within("64 requests to run", async {
        while disk.running.load(Ordering::SeqCst) < 64 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(disk.running.load(Ordering::SeqCst), 64);
    assert!(!serving.is_finished());
    disk.gate.add_permits(200);
    serving.await.expect("the task").expect("an end");
    assert_eq!(disk.running.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_client_that_takes_no_answers_is_asked_for_no_more_requests() {
    let stream = Stream::of((0..100).map(|_| reads(Dialect::Structured, 400)));
    stream.wire().deaf = true;
    let (disk, stop) = (Disk::new(true), CancellationToken::new());
    let serving = tokio::spawn({
        let (disk, stream, stop) = (disk.clone(), stream.clone(), stop.clone());
        async move { serve(&disk, &stream, Dialect::Structured, stop).await }
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(stream.wire().read_bytes <= 2 * buffers::BUFFER_BYTES);
    assert!(disk.served.load(Ordering::SeqCst) <= 64, "as many answers as fit one buffer");
    stop.cancel();
    serving.await.expect("the task").expect("an end");
}

#[tokio::test]
async fn a_panic_ends_the_connection_and_only_after_what_ran_has_ended() {
    let dialect = Dialect::Structured;
    for at_once in [true, false] {
        let sent = request(dialect, command::WRITE, 1, PANIC_AT, &BLOCK);
        let (stream, disk) = (Stream::of([sent]), Disk::new(at_once));
        disk.gate.add_permits(1000);
        stream.wire().endless = !at_once;
        let ended = serve(&disk, &stream, dialect, CancellationToken::new()).await;
        assert!(matches!(ended, Err(ConnectionError::Panicked(_))), "{ended:?}");
        assert_eq!(disk.running.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_client_that_always_has_more_to_do_lets_others_run() {
    let stream = Stream::of([reads(Dialect::Structured, 10)]);
    stream.wire().endless = true;
    let (disk, stop) = (Disk::new(true), CancellationToken::new());
    let serving = tokio::spawn({
        let (disk, stream, stop) = (disk.clone(), stream.clone(), stop.clone());
        async move { serve(&disk, &stream, Dialect::Structured, stop).await }
    });
    let other = tokio::spawn(async move {
        while disk.served.load(Ordering::SeqCst) < 5000 {
            tokio::task::yield_now().await;
        }
    });
    within("another task to run", other).await.expect("the task");
    stop.cancel();
    serving.await.expect("the task").expect("an end");
}

#[tokio::test]
async fn a_fua_write_is_not_answered_at_once() {
    let write = Request {
        flags: command_flag::FUA,
        command: command::WRITE,
        cookie: 1,
        offset: 0,
        length_bytes: 4096,
    };
    let mut sent = write.encode(Dialect::Structured).to_vec();
    sent.extend_from_slice(&BLOCK);
    let (stream, disk) = (Stream::of([sent]), Disk::new(true));
    disk.gate.add_permits(1);
    serve(&disk, &stream, Dialect::Structured, CancellationToken::new()).await.expect("an end");
    assert_eq!(disk.gate.available_permits(), 0, "it went the way of requests that wait");
    assert_eq!(stream.wire().answers.len(), 20);
}
