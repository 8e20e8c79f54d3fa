//! Runs commands that need no waiting at once, directly from and into the buffers.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use perigee_block::device::Device;
use perigee_block::measured::Measured;
use perigee_block::stream::AT_ONCE_BYTES_MAX;
use perigee_block::stream::connection::{Exchange, Taken};
use perigee_block::stream::input::{self, Input};
use perigee_block::stream::output::Output;

use super::super::super::wire::{Answer, AnswerTo, Dialect, Request, command};
use super::super::ConnectionError;
use super::super::command::{Command, Refusal, Rules, check};
use super::waiting::{Waiting, refusal};

type Frame = input::Frame<Request>;

/// The requests of one connection.
pub(super) struct Requests {
    device: Arc<Measured>,
    rules: Rules,
    input: Input<Dialect>,
    output: Output,
    waiting: Waiting,
}

impl Exchange for Requests {
    type Framing = Dialect;
    type Error = ConnectionError;

    fn input(&mut self) -> &mut Input<Dialect> {
        &mut self.input
    }

    fn output(&mut self) -> &mut Output {
        &mut self.output
    }

    fn device(&self) -> Option<&Measured> {
        Some(&self.device)
    }

    fn take(&mut self, frame: Frame, now: Instant) -> Result<Taken, ConnectionError> {
        Ok(self.request(frame, now))
    }

    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        let reply = ready!(self.waiting.poll_next(cx))?;
        self.output.push(reply.pieces);
        Poll::Ready(Ok(()))
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    fn panicked() -> ConnectionError {
        ConnectionError::Panicked("a request".into())
    }
}

impl Requests {
    /// The connection's state when its negotiation has ended.
    pub fn new(device: Measured, rules: Rules) -> Self {
        let device = Arc::new(device);
        let waiting = Waiting::new(device.clone(), rules.dialect);
        let (input, output) = (Input::new(rules.dialect), Output::default());
        Self { device, rules, input, output, waiting }
    }

    fn request(&mut self, frame: Frame, now: Instant) -> Taken {
        let request = frame.head;
        if request.command == command::DISCONNECT {
            return Taken::Goodbye;
        }
        if self.waiting.is_full() || !self.output.accepts() {
            return Taken::Full;
        }
        let to = AnswerTo { cookie: request.cookie, offset: request.offset };
        let cost_bytes = match check(&request, &self.rules, self.device.size_bytes()) {
            Err(Refusal { errno, message }) => {
                self.input.skip(frame);
                self.answer(to, Answer::Error(errno, message));
                0
            }
            // The protocol does not define an empty range. Here it succeeds and does nothing.
            Ok(Command::Read { length_bytes: 0, .. } | Command::Zero { length_bytes: 0, .. }) => {
                self.input.skip(frame);
                self.done(to);
                0
            }
            Ok(command @ Command::Read { compressed: true, .. }) => {
                self.input.skip(frame);
                self.waiting.start(to, command, Bytes::new(), now);
                0
            }
            Ok(command @ Command::Read { length_bytes, .. }) => {
                if !self.read(to, command, length_bytes as usize, now) {
                    return Taken::Full;
                }
                self.input.skip(frame);
                length_bytes as usize
            }
            Ok(command @ Command::Write { .. }) => self.write(to, command, frame, now),
            Ok(command) => {
                self.input.skip(frame);
                self.waiting.start(to, command, Bytes::new(), now);
                0
            }
        };
        Taken::Done { cost_bytes }
    }

    /// Returns false if the output has no room for the data now.
    fn read(&mut self, to: AnswerTo, command: Command, length: usize, now: Instant) -> bool {
        let dialect = self.rules.dialect;
        let head_bytes = dialect.data_head_bytes();
        let reply_bytes = head_bytes + length + dialect.data_end_bytes();
        let Some(room) = self.output.room(reply_bytes) else {
            let begins = self.output.is_empty();
            if begins {
                self.read_long(to, command, length, now);
            }
            return begins;
        };
        let (mut head, data) = room.split_at_mut(head_bytes);
        let (data, mut end) = data.split_at_mut(length);
        match self.device.try_read(to.offset, data) {
            Some(Ok(())) => {
                dialect.put_data_head(&mut head, to, length);
                dialect.put_data_end(&mut end, to);
                self.output.commit(reply_bytes);
            }
            Some(Err(error)) => self.answer(to, refusal(&error)),
            None => self.waiting.start(to, command, Bytes::new(), now),
        }
        true
    }

    /// A read that does not fit the output's buffer.
    fn read_long(&mut self, to: AnswerTo, command: Command, length: usize, now: Instant) {
        let mut data = Vec::new();
        let tried = if length > AT_ONCE_BYTES_MAX {
            None
        } else {
            data = vec![0; length];
            self.device.try_read(to.offset, &mut data)
        };
        match tried {
            Some(Ok(())) => {
                self.answer(to, Answer::Data { offset: to.offset, data: data.into() });
            }
            Some(Err(error)) => self.answer(to, refusal(&error)),
            None => self.waiting.start(to, command, Bytes::new(), now),
        }
    }

    /// Returns the number of bytes that were written or are being written.
    fn write(&mut self, to: AnswerTo, command: Command, frame: Frame, now: Instant) -> usize {
        let payload = self.input.payload(&frame);
        let length = payload.len();
        let tried = match command {
            _ if payload.is_empty() => Some(Ok(())),
            Command::Write { fua: false, .. } if length <= AT_ONCE_BYTES_MAX => {
                self.device.try_write(to.offset, payload)
            }
            _ => None,
        };
        let Some(result) = tried else {
            let payload = self.input.take(frame);
            self.waiting.start(to, command, payload, now);
            return length;
        };
        self.input.skip(frame);
        match result {
            Ok(()) => self.done(to),
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
        self.output.push(self.rules.dialect.encode_answer(to, answer));
    }
}
