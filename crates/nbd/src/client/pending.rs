//! The unanswered requests, and the assembly of their replies. It never does any I/O.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use perigee_block::device::IoError;
use tokio::sync::{mpsc, oneshot};

use super::super::wire::{
    Answer, Chunk, Compressed, ContextRuns, Errno, FramingError, Request, command, command_flag,
};
use super::durability::Durability;

/// A request that the device sends to the link. The link sets its cookie.
pub struct Outgoing {
    pub request: Request,
    pub payload: Bytes,
    pub reply: oneshot::Sender<Result<Answer, IoError>>,
}

struct Pending {
    outgoing: Outgoing,
    since: Instant,
    gathered: Gathered,
    /// The connection that it was sent on.
    lane: usize,
    /// What a flush covers.
    covered: u64,
}

/// A request on its way from the table to a connection.
pub type Frame = (Request, Bytes);

/// What the table knows of one connection.
struct Lane {
    frames: mpsc::UnboundedSender<Frame>,
    load_bytes: u64,
    /// The server at its other end compresses reads.
    compresses: bool,
}

/// The cost of a request besides its data, as a number of bytes.
const REQUEST_COST_BYTES: u64 = 4 << 10;

/// The part of a reply that has arrived so far.
#[derive(Default)]
struct Gathered {
    /// A single chunk with all data of a read, which is not copied.
    whole: Option<Bytes>,
    parts: Option<BytesMut>,
    parts_bytes: u64,
    status: Vec<ContextRuns>,
    error: Option<(Errno, String)>,
}

/// Cookies grow with every request, so the order of the keys is the order of the requests.
#[derive(Default)]
pub struct PendingTable {
    pending: BTreeMap<u64, Pending>,
    next_cookie: u64,
    /// The connections. There are none while the server is away.
    lanes: Vec<Lane>,
    /// The reason why no requests are accepted any more.
    closed: Option<String>,
    /// While there are no connections: since when the server has not answered.
    away_since: Option<Instant>,
    /// The number of answered requests.
    pub answered: u64,
    durability: Arc<Durability>,
}

impl PendingTable {
    /// A table without requests and without a connection.
    pub fn new(durability: Arc<Durability>) -> Self {
        Self { durability, ..Self::default() }
    }

    /// Takes a request and sends it on the connection with the least load. If there is no connection, the request
    /// waits for one.
    pub fn insert(&mut self, outgoing: Outgoing, now: Instant) -> Request {
        let lanes = self.lanes.iter().enumerate();
        let least = lanes.min_by_key(|(_, lane)| lane.load_bytes).map_or(0, |(number, _)| number);
        self.insert_on(least, outgoing, now)
    }

    /// Sends a question that needs no work on one connection: an empty read. The protocol does not define it. Our
    /// servers succeed and do nothing, and others may refuse it. Both are an answer.
    pub fn probe(&mut self, lane: usize) -> oneshot::Receiver<Result<Answer, IoError>> {
        let (reply, answer) = oneshot::channel();
        let request =
            Request { flags: 0, command: command::READ, cookie: 0, offset: 0, length_bytes: 0 };
        self.insert_on(lane, Outgoing { request, payload: Bytes::new(), reply }, Instant::now());
        answer
    }

    fn insert_on(&mut self, lane: usize, mut outgoing: Outgoing, now: Instant) -> Request {
        self.next_cookie += 1;
        outgoing.request.cookie = self.next_cookie;
        let request = outgoing.request;
        let gathered = Gathered::default();
        let covered = self.durability.flush_begins();
        let pending = Pending { outgoing, since: now, gathered, lane, covered };
        if let Some(why) = &self.closed {
            pending.fail(why);
            return request;
        }
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.take(&pending);
        }
        self.pending.insert(request.cookie, pending);
        request
    }

    /// Adds the first of new connections. All unanswered requests for which somebody still waits are sent on it,
    /// in their original order. Parts of replies that have arrived are dropped.
    pub fn connect(&mut self, frames: mpsc::UnboundedSender<Frame>, compresses: bool) {
        self.pending.retain(|_, p| !p.outgoing.reply.is_closed());
        let mut lane = Lane { frames, load_bytes: 0, compresses };
        for pending in self.pending.values_mut() {
            pending.gathered = Gathered::default();
            pending.lane = 0;
            lane.take(pending);
        }
        self.lanes = vec![lane];
        self.away_since = None;
    }

    /// Adds one more connection and returns its number.
    pub fn join(&mut self, frames: mpsc::UnboundedSender<Frame>, compresses: bool) -> usize {
        self.lanes.push(Lane { frames, load_bytes: 0, compresses });
        self.lanes.len() - 1
    }

    /// Removes all connections.
    pub fn disconnect(&mut self) {
        self.lanes.clear();
        let oldest = self.pending.values().next().map(|pending| pending.since);
        self.away_since.get_or_insert_with(|| oldest.unwrap_or_else(Instant::now));
    }

    /// Since when the server has not answered: it is away, or a request has waited for this long.
    pub fn unanswered_since(&self, at_least: Duration) -> Option<Instant> {
        let oldest = self.pending.values().next().map(|pending| pending.since);
        self.away_since.or(oldest.filter(|since| since.elapsed() >= at_least))
    }

    /// Whether at least one connection is there. Requests wait otherwise.
    pub fn is_connected(&self) -> bool {
        !self.lanes.is_empty()
    }

    /// The time since which the oldest request on a connection has been waiting.
    pub fn oldest(&self, lane: usize) -> Option<Instant> {
        self.pending.values().find(|pending| pending.lane == lane).map(|pending| pending.since)
    }

    fn remove(&mut self, cookie: u64) -> Option<Pending> {
        let pending = self.pending.remove(&cookie)?;
        self.answered += 1;
        if let Some(lane) = self.lanes.get_mut(pending.lane) {
            lane.load_bytes = lane.load_bytes.saturating_sub(pending.cost_bytes());
        }
        Some(pending)
    }

    fn answer(&self, pending: Pending, answer: Answer) {
        let Request { command, flags, .. } = pending.outgoing.request;
        let durable = flags & command_flag::FUA != 0;
        match command {
            _ if matches!(answer, Answer::Error(..)) => {}
            command::FLUSH => self.durability.flushed(pending.covered),
            command::WRITE | command::WRITE_ZEROES if !durable => self.durability.acknowledged(),
            _ => {}
        }
        pending.answer(answer);
    }

    /// The number of bytes that follow a simple reply without an error.
    pub fn simple_payload_bytes(&self, cookie: u64) -> Result<usize, FramingError> {
        let pending = self.pending.get(&cookie).ok_or(UNKNOWN_COOKIE)?;
        let request = pending.outgoing.request;
        Ok(if has_data(&request) { data_bytes(&request) } else { 0 })
    }

    /// Handles a complete simple reply.
    pub fn simple(
        &mut self,
        cookie: u64,
        error: Option<Errno>,
        data: Bytes,
    ) -> Result<(), FramingError> {
        let pending = self.remove(cookie).ok_or(UNKNOWN_COOKIE)?;
        let offset = pending.outgoing.request.offset;
        self.answer(
            pending,
            match error {
                Some(errno) => Answer::Error(errno, String::new()),
                None if data.is_empty() => Answer::Done,
                None => Answer::Data { offset, data },
            },
        );
        Ok(())
    }

    /// Whether a request is a read that may be answered compressed.
    pub fn may_be_compressed(&self, cookie: u64) -> bool {
        let pending = self.pending.get(&cookie);
        pending.is_some_and(|p| p.outgoing.request.flags & command_flag::PERIGEE_COMPRESS != 0)
    }

    /// Checks compressed data before memory is allocated for the decompressed data.
    pub fn check_compressed(&self, cookie: u64, data: &Compressed) -> Result<(), FramingError> {
        let pending = self.pending.get(&cookie).ok_or(UNKNOWN_COOKIE)?;
        if !self.may_be_compressed(cookie) {
            return Err(FramingError::Malformed("compressed data that was not asked for"));
        }
        pending.place(data.offset, data.length_bytes as usize).map(drop)
    }

    /// Handles one chunk of a structured reply. `done` is set for the last one.
    pub fn chunk(&mut self, cookie: u64, chunk: Chunk, done: bool) -> Result<(), FramingError> {
        let pending = self.pending.get_mut(&cookie).ok_or(UNKNOWN_COOKIE)?;
        pending.gather(chunk)?;
        if done {
            let answer = pending.complete()?;
            if let Some(pending) = self.remove(cookie) {
                self.answer(pending, answer);
            }
        }
        Ok(())
    }

    /// The time at which the oldest request will have waited for `patience`.
    pub fn next_expiry(&self, patience: Duration) -> Option<Instant> {
        self.pending.values().next().map(|p| p.since + patience)
    }

    /// Fails the requests that have waited for `patience`.
    pub fn expire(&mut self, now: Instant, patience: Duration, why: &str) {
        while let Some(first) = self.pending.first_entry()
            && now >= first.get().since + patience
        {
            first.remove().fail(why);
        }
    }

    /// Fails all waiting requests, and all later ones.
    pub fn close(&mut self, why: &str) {
        self.closed = Some(why.to_owned());
        self.lanes.clear();
        for (_, pending) in std::mem::take(&mut self.pending) {
            pending.fail(why);
        }
    }
}

/// Whether a reply without an error has data.
fn has_data(request: &Request) -> bool {
    matches!(request.command, command::READ | command::PERIGEE_LEASE)
}

/// The length of a read's data.
fn data_bytes(request: &Request) -> usize {
    usize::try_from(request.length_bytes).expect("the device bounds its reads")
}

const UNKNOWN_COOKIE: FramingError = FramingError::Malformed("a reply to an unknown request");

impl Lane {
    fn take(&mut self, pending: &Pending) {
        self.load_bytes += pending.cost_bytes();
        // If the connection was just lost, the request is sent on the next one.
        let mut request = pending.outgoing.request;
        if !self.compresses {
            request.flags &= !command_flag::PERIGEE_COMPRESS;
        }
        let _lost = self.frames.send((request, pending.outgoing.payload.clone()));
    }
}

impl Pending {
    fn cost_bytes(&self) -> u64 {
        let request = &self.outgoing.request;
        let moves = matches!(request.command, command::READ | command::WRITE);
        REQUEST_COST_BYTES + if moves { request.length_bytes } else { 0 }
    }

    // The caller may have stopped waiting; then the answer is dropped.

    fn answer(self, answer: Answer) {
        let _nobody_waits = self.outgoing.reply.send(Ok(answer));
    }

    fn fail(self, why: &str) {
        let _nobody_waits = self.outgoing.reply.send(Err(IoError::Unreachable(why.to_owned())));
    }

    /// The position of a chunk in the data of a read.
    fn place(&self, offset: u64, length: usize) -> Result<std::ops::Range<usize>, FramingError> {
        const OUTSIDE: FramingError =
            FramingError::Malformed("a chunk outside the requested range");
        let request = &self.outgoing.request;
        if !has_data(request) {
            return Err(FramingError::Malformed(
                "data in the reply to a request that is not a read",
            ));
        }
        let start = offset.checked_sub(request.offset).ok_or(OUTSIDE)?;
        let start = usize::try_from(start).map_err(|_| OUTSIDE)?;
        let end = start.checked_add(length).ok_or(OUTSIDE)?;
        if end > data_bytes(request) {
            return Err(OUTSIDE);
        }
        // Otherwise one answer could have the same part any number of times.
        if self.gathered.parts_bytes + length as u64 > request.length_bytes {
            return Err(FramingError::Malformed("a reply to a read with more data than the read"));
        }
        Ok(start..end)
    }

    fn gather(&mut self, chunk: Chunk) -> Result<(), FramingError> {
        let length = data_bytes(&self.outgoing.request);
        match chunk {
            Chunk::Nothing => {}
            Chunk::Data { offset, data } => {
                let place = self.place(offset, data.len())?;
                self.gathered.parts_bytes += data.len() as u64;
                if place == (0..length) {
                    self.gathered.whole = Some(data);
                } else {
                    let parts = self.gathered.parts.get_or_insert_with(|| BytesMut::zeroed(length));
                    parts[place].copy_from_slice(&data);
                }
            }
            Chunk::Zeros { offset, length_bytes } => {
                self.place(offset, length_bytes as usize)?;
                self.gathered.parts_bytes += u64::from(length_bytes);
                // New memory is zeros already, and chunks of one reply never overlap.
                self.gathered.parts.get_or_insert_with(|| BytesMut::zeroed(length));
            }
            Chunk::Compressed(_) => {
                return Err(FramingError::Malformed("compressed data that was not decompressed"));
            }
            Chunk::Status(runs) => {
                // Only one context was negotiated. Accepting others would allow the server to fill the memory.
                let asked = self.outgoing.request.command == command::BLOCK_STATUS;
                if !asked || !self.gathered.status.is_empty() {
                    return Err(FramingError::Malformed("a block status that was not asked for"));
                }
                self.gathered.status.push(runs);
            }
            Chunk::Error { errno, message } => self.gathered.error = Some((errno, message)),
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<Answer, FramingError> {
        let request = self.outgoing.request;
        let gathered = std::mem::take(&mut self.gathered);
        if let Some((errno, message)) = gathered.error {
            return Ok(Answer::Error(errno, message));
        }
        match request.command {
            _ if has_data(&request) && gathered.parts_bytes != request.length_bytes => {
                Err(FramingError::Malformed("the reply to a read lacks data"))
            }
            _ if has_data(&request) => {
                let data =
                    gathered.whole.or(gathered.parts.map(BytesMut::freeze)).unwrap_or_default();
                Ok(Answer::Data { offset: request.offset, data })
            }
            command::BLOCK_STATUS if gathered.status.is_empty() => {
                Err(FramingError::Malformed("a block status without an extent"))
            }
            command::BLOCK_STATUS => Ok(Answer::Status(gathered.status)),
            _ => Ok(Answer::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(
        table: &mut PendingTable,
        command: u16,
        offset: u64,
        length_bytes: u32,
    ) -> (u64, oneshot::Receiver<Result<Answer, IoError>>) {
        let (reply, receiver) = oneshot::channel();
        let request =
            Request { flags: 0, command, cookie: 0, offset, length_bytes: length_bytes.into() };
        let outgoing = Outgoing { request, payload: Bytes::new(), reply };
        (table.insert(outgoing, Instant::now()).cookie, receiver)
    }

    #[test]
    fn a_read_is_put_together_from_chunks_in_any_order() {
        let mut table = PendingTable::default();
        let (cookie, mut receiver) = ask(&mut table, command::READ, 100, 8);
        let tail = Chunk::Data { offset: 104, data: Bytes::from_static(b"tail") };
        table.chunk(cookie, tail, false).expect("the tail");
        let hole = Chunk::Zeros { offset: 100, length_bytes: 4 };
        table.chunk(cookie, hole, true).expect("the hole");
        match receiver.try_recv() {
            Ok(Ok(Answer::Data { data, .. })) => assert_eq!(&data[..], b"\0\0\0\0tail"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn data_outside_the_read_is_a_framing_error() {
        let mut table = PendingTable::default();
        let (cookie, _receiver) = ask(&mut table, command::READ, 100, 8);
        let data = Bytes::from_static(b"12345678");
        assert!(table.chunk(cookie, Chunk::Data { offset: 101, data }, true).is_err());
    }

    #[test]
    fn compressed_data_are_refused_where_they_were_not_asked_for_or_are_too_long() {
        let mut table = PendingTable::default();
        let (cookie, _receiver) = ask(&mut table, command::READ, 4096, 4096);
        let found = |offset, length_bytes| Compressed {
            offset,
            length_bytes,
            work: Duration::ZERO,
            data: Bytes::new(),
        };
        assert!(table.check_compressed(cookie, &found(4096, 4096)).is_err(), "nobody asked");
        let request = &mut table.pending.get_mut(&cookie).expect("it waits").outgoing.request;
        request.flags = command_flag::PERIGEE_COMPRESS;
        table.check_compressed(cookie, &found(4096, 4096)).expect("it was asked for");
        for (offset, length_bytes) in [(4096, 4097), (4095, 4096), (4097, 4096), (0, u32::MAX)] {
            let checked = table.check_compressed(cookie, &found(offset, length_bytes));
            assert!(checked.is_err(), "{length_bytes} at {offset}");
        }
        let (cookie, _receiver) = ask(&mut table, command::FLUSH, 0, 0);
        assert!(table.check_compressed(cookie, &found(0, 0)).is_err());
    }

    #[test]
    fn an_answer_that_has_the_same_part_again_and_again_is_cut_off() {
        let mut table = PendingTable::default();
        let (cookie, _receiver) = ask(&mut table, command::READ, 0, 8192);
        let request = &mut table.pending.get_mut(&cookie).expect("it waits").outgoing.request;
        request.flags = command_flag::PERIGEE_COMPRESS;
        let data = || Chunk::Data { offset: 0, data: vec![1; 4096].into() };
        table.chunk(cookie, data(), false).expect("the first half");
        let found = |length_bytes| {
            let (work, data) = (Duration::ZERO, Bytes::new());
            Compressed { offset: 0, length_bytes, work, data }
        };
        table.check_compressed(cookie, &found(4096)).expect("as much as is missing");
        assert!(table.check_compressed(cookie, &found(8192)).is_err());
        let zeros = |length_bytes| Chunk::Zeros { offset: 0, length_bytes };
        table.chunk(cookie, zeros(4096), false).expect("as much as was asked for");
        assert!(table.check_compressed(cookie, &found(4096)).is_err());
        assert!(table.chunk(cookie, data(), false).is_err());
        assert!(table.chunk(cookie, zeros(1), false).is_err());
    }

    #[test]
    fn a_server_that_does_not_compress_is_not_asked_to() {
        let (mut table, (frames, mut sent)) = (PendingTable::default(), mpsc::unbounded_channel());
        let (reply, _answer) = oneshot::channel();
        let flags = command_flag::PERIGEE_COMPRESS;
        let request =
            Request { flags, command: command::READ, cookie: 0, offset: 0, length_bytes: 4096 };
        table.insert(Outgoing { request, payload: Bytes::new(), reply }, Instant::now());
        table.connect(frames, false);
        assert_eq!(sent.try_recv().expect("a request").0.flags, 0);
        let (frames, mut sent) = mpsc::unbounded_channel();
        table.connect(frames, true);
        assert_eq!(sent.try_recv().expect("again, elsewhere").0.flags, flags);
    }

    #[test]
    fn a_read_that_lacks_data_is_a_framing_error() {
        let mut table = PendingTable::default();
        let (cookie, _receiver) = ask(&mut table, command::READ, 0, 8);
        assert!(table.chunk(cookie, Chunk::Nothing, true).is_err());
    }

    #[test]
    fn a_server_that_tells_the_block_status_without_end_is_cut_off() {
        let mut table = PendingTable::default();
        let status = || Chunk::Status(ContextRuns { context: 1, runs: Vec::new() });
        let (cookie, _receiver) = ask(&mut table, command::BLOCK_STATUS, 0, 4096);
        table.chunk(cookie, status(), false).expect("the context that was agreed on");
        assert!(table.chunk(cookie, status(), false).is_err());
        let (cookie, _receiver) = ask(&mut table, command::FLUSH, 0, 0);
        assert!(table.chunk(cookie, status(), false).is_err(), "nobody asked");
    }

    #[test]
    fn unanswered_requests_are_sent_again_in_their_order() {
        let mut table = PendingTable::default();
        let (first, _first) = ask(&mut table, command::WRITE, 0, 0);
        let (second, abandoned) = ask(&mut table, command::WRITE, 1, 0);
        let (third, _third) = ask(&mut table, command::FLUSH, 0, 0);
        let (fourth, _fourth) = ask(&mut table, command::READ, 0, 512);
        drop(abandoned);
        table.simple(first, None, Bytes::new()).expect("an answer");
        let (frames, mut sent) = mpsc::unbounded_channel();
        table.connect(frames, false);
        let again = [(); 2].map(|()| sent.try_recv().expect("a request").0.cookie);
        assert_eq!(again, [third, fourth]);
        assert!(sent.try_recv().is_err(), "that was all");
        assert!(table.simple_payload_bytes(second).is_err());
    }

    #[test]
    fn a_request_fails_when_it_has_waited_for_too_long() {
        let mut table = PendingTable::default();
        let (_, mut receiver) = ask(&mut table, command::FLUSH, 0, 0);
        let patience = Duration::from_secs(600);
        let expiry = table.next_expiry(patience).expect("one waits");
        table.expire(expiry - Duration::from_secs(1), patience, "gone");
        assert!(receiver.try_recv().is_err(), "it still waits");
        table.expire(expiry, patience, "gone");
        assert!(matches!(receiver.try_recv(), Ok(Err(IoError::Unreachable(_)))));
    }

    #[test]
    fn requests_go_to_the_connection_that_has_the_least_to_do() {
        let mut table = PendingTable::default();
        let mut sent = Vec::new();
        for number in 0..2 {
            let (frames, receiver) = mpsc::unbounded_channel();
            if number == 0 {
                table.connect(frames, false)
            } else {
                assert_eq!(table.join(frames, false), number)
            }
            sent.push(receiver);
        }
        let long = ask(&mut table, command::READ, 0, 1 << 20);
        let short = [(); 3].map(|()| ask(&mut table, command::READ, 0, 512));
        assert_eq!(sent.iter().map(mpsc::UnboundedReceiver::len).collect::<Vec<_>>(), [1, 3]);
        table.simple(long.0, Some(Errno::Io), Bytes::new()).expect("an answer");
        let _next = ask(&mut table, command::FLUSH, 0, 0);
        assert_eq!(sent[0].len(), 2);
        drop(short);
        table.disconnect();
        assert!(!table.is_connected());
        let (_, mut waiting) = ask(&mut table, command::FLUSH, 0, 0);
        table.close("gone");
        assert!(matches!(waiting.try_recv(), Ok(Err(IoError::Unreachable(_)))));
    }
}
