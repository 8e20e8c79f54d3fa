//! Command to effect, at once: answers what needs no waiting, straight from and into the buffers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use perigee_block::device::Device;
use perigee_block::stats::{BatchCounts, Counters};
use perigee_block::stream::output::Output;
use perigee_block::stream::{AT_ONCE_BYTES_MAX, input};
use perigee_block::trace::Sampler;

use super::super::super::wire::{Answer, AnswerTo, Dialect, Request, command};
use super::super::ConnectionError;
use super::super::command::{Command, Refusal, Rules, check};
use super::waiting::{Waiting, refusal};

/// What one request costs besides its bytes, in bytes: a turn's work is counted in these.
const REQUEST_COST_BYTES: usize = 4 << 10;
/// After so much work a connection lets others run.
const TURN_BYTES: usize = 4 << 20;

type Input = input::Input<Dialect>;
type Frame = input::Frame<Request>;

/// Why a batch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchEnd {
    /// All whole requests are taken.
    NeedsInput,
    /// Replies have to be sent, or requests have to end, before the next one is taken.
    Full,
    /// The connection had its turn.
    TurnOver,
    /// The client said goodbye.
    Disconnect,
}

pub struct Batch {
    pub device: Arc<dyn Device>,
    pub counters: Arc<Counters>,
    pub rules: Rules,
    pub input: Input,
    pub output: Output,
    pub waiting: Waiting,
    /// What is left of this turn.
    turn_bytes: usize,
    /// When the requests of this batch were taken.
    taken: Instant,
    sampler: Sampler,
}

impl Batch {
    pub fn new(device: Arc<dyn Device>, counters: Arc<Counters>, rules: Rules) -> Self {
        let waiting = Waiting::new(device.clone(), counters.clone(), rules.dialect);
        let (input, output) = (Input::new(rules.dialect), Output::default());
        let (turn_bytes, taken) = (TURN_BYTES, Instant::now());
        let sampler = Sampler::default();
        Self { device, counters, rules, input, output, waiting, turn_bytes, taken, sampler }
    }

    pub fn new_turn(&mut self) {
        self.turn_bytes = TURN_BYTES;
    }

    /// Takes whole requests from the input and answers or starts them.
    ///
    /// # Errors
    /// When the input is not NBD, or the device panicked.
    pub fn run(&mut self) -> Result<BatchEnd, ConnectionError> {
        let Some(first) = self.input.first()? else { return Ok(BatchEnd::NeedsInput) };
        self.taken = self.counters.begin_batch();
        let mut counts = BatchCounts::default();
        // A panic must not close the socket before the connection is drained.
        let end = catch_unwind(AssertUnwindSafe(|| self.take_all(first, &mut counts)));
        self.counters.end_batch(self.taken, &counts);
        end.unwrap_or_else(|_| Err(ConnectionError::Panicked("a request".into())))
    }

    fn take_all(
        &mut self,
        first: Frame,
        counts: &mut BatchCounts,
    ) -> Result<BatchEnd, ConnectionError> {
        let mut next = Some(first);
        while let Some(frame) = next {
            if let Some(end) = self.one(frame, counts) {
                return Ok(end);
            }
            next = self.input.first()?;
        }
        Ok(BatchEnd::NeedsInput)
    }

    /// Takes one request, or says why not.
    fn one(&mut self, frame: Frame, counts: &mut BatchCounts) -> Option<BatchEnd> {
        let request = frame.head;
        if request.command == command::DISCONNECT {
            return Some(BatchEnd::Disconnect);
        }
        if self.turn_bytes == 0 {
            return Some(BatchEnd::TurnOver);
        }
        if self.waiting.is_full() || !self.output.accepts() {
            return Some(BatchEnd::Full);
        }
        let to = AnswerTo { cookie: request.cookie, offset: request.offset };
        let cost_bytes = match check(&request, &self.rules, self.device.size_bytes()) {
            Err(Refusal { errno, message }) => {
                self.input.skip(frame);
                self.answer(to, Answer::Error(errno, message));
                0
            }
            // The protocol leaves open what an empty range means. Here it means nothing to do.
            Ok(Command::Read { length_bytes: 0, .. } | Command::Zero { length_bytes: 0, .. }) => {
                self.input.skip(frame);
                self.done(to);
                0
            }
            Ok(command @ Command::Read { length_bytes, .. }) => {
                if !self.read(to, command, length_bytes as usize, counts) {
                    return Some(BatchEnd::Full);
                }
                self.input.skip(frame);
                length_bytes as usize
            }
            Ok(command @ Command::Write { .. }) => self.write(to, command, frame, counts),
            Ok(command) => {
                self.input.skip(frame);
                self.waiting.start(to, command, Bytes::new(), self.taken);
                0
            }
        };
        self.turn_bytes = self.turn_bytes.saturating_sub(REQUEST_COST_BYTES + cost_bytes);
        None
    }

    /// False when there is no room for the data now.
    fn read(
        &mut self,
        to: AnswerTo,
        command: Command,
        length: usize,
        counts: &mut BatchCounts,
    ) -> bool {
        let dialect = self.rules.dialect;
        let head_bytes = dialect.data_head_bytes();
        let Some(room) = self.output.room(head_bytes + length) else {
            let begins = self.output.is_empty();
            if begins {
                self.read_long(to, command, length, counts);
            }
            return begins;
        };
        let (mut head, data) = room.split_at_mut(head_bytes);
        let read = || self.device.try_read(to.offset, data);
        match self.sampler.measure(&self.counters, command.name(), to.offset, length, read) {
            Some(Ok(())) => {
                dialect.put_data_head(&mut head, to, length);
                self.output.commit(head_bytes + length);
                counts.read(length);
            }
            Some(Err(error)) => self.answer(to, refusal(&error)),
            None => self.waiting.start(to, command, Bytes::new(), self.taken),
        }
        true
    }

    /// A read that does not fit the output's buffer.
    fn read_long(
        &mut self,
        to: AnswerTo,
        command: Command,
        length: usize,
        counts: &mut BatchCounts,
    ) {
        let mut data = Vec::new();
        let read = || {
            if length > AT_ONCE_BYTES_MAX {
                return None;
            }
            data = vec![0; length];
            self.device.try_read(to.offset, &mut data)
        };
        match self.sampler.measure(&self.counters, command.name(), to.offset, length, read) {
            Some(Ok(())) => {
                self.answer(to, Answer::Data { offset: to.offset, data: data.into() });
                counts.read(length);
            }
            Some(Err(error)) => self.answer(to, refusal(&error)),
            None => self.waiting.start(to, command, Bytes::new(), self.taken),
        }
    }

    /// The bytes that were written or are being written.
    fn write(
        &mut self,
        to: AnswerTo,
        command: Command,
        frame: Frame,
        counts: &mut BatchCounts,
    ) -> usize {
        let payload = self.input.payload(&frame);
        let length = payload.len();
        let tried = match command {
            _ if payload.is_empty() => Some(Ok(())),
            Command::Write { fua: false, .. } if length <= AT_ONCE_BYTES_MAX => {
                let write = || self.device.try_write(to.offset, payload);
                self.sampler.measure(&self.counters, command.name(), to.offset, length, write)
            }
            _ => None,
        };
        let Some(result) = tried else {
            let payload = self.input.take(frame);
            self.waiting.start(to, command, payload, self.taken);
            return length;
        };
        self.input.skip(frame);
        self.counters.note(&result);
        match result {
            Ok(()) => {
                counts.write(length);
                self.done(to);
            }
            Err(error) => self.answer(to, refusal(&error)),
        }
        length
    }

    fn done(&mut self, to: AnswerTo) {
        let dialect = self.rules.dialect;
        match self.output.room(dialect.done_bytes()) {
            Some(mut room) => {
                dialect.put_done(&mut room, to);
                self.output.commit(dialect.done_bytes());
            }
            None => self.answer(to, Answer::Done),
        }
    }

    fn answer(&mut self, to: AnswerTo, answer: Answer) {
        let (head, payload) = self.rules.dialect.encode_answer(to, answer);
        self.output.push(head, payload);
    }
}
