//! Requests that can't be answered at once: each runs in a task until its reply is ready.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use perigee_block::device::{Device, IoError};
use perigee_block::stats::{Counters, Kind, Timer};
use perigee_block::trace::{Ended, Span, Stage};
use tokio::task::JoinSet;

use super::super::super::wire::{Answer, AnswerTo, Dialect, Errno};
use super::super::ConnectionError;
use super::super::command::Command;
use super::super::contexts::describe;

const REQUESTS_MAX: usize = 64;
/// No request is begun while so many bytes of payload are in flight.
const PAYLOAD_BYTES_MAX: usize = 64 << 20;

pub struct Reply {
    pub head: Bytes,
    pub payload: Bytes,
    /// The request's share of the payload in flight.
    share_bytes: usize,
}

pub struct Waiting {
    device: Arc<dyn Device>,
    counters: Arc<Counters>,
    dialect: Dialect,
    tasks: JoinSet<Reply>,
    payload_bytes: usize,
}

impl Waiting {
    pub fn new(device: Arc<dyn Device>, counters: Arc<Counters>, dialect: Dialect) -> Self {
        Self { device, counters, dialect, tasks: JoinSet::new(), payload_bytes: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.tasks.len() >= REQUESTS_MAX || self.payload_bytes >= PAYLOAD_BYTES_MAX
    }

    /// `since`: when the request was taken.
    pub fn start(&mut self, to: AnswerTo, command: Command, payload: Bytes, since: Instant) {
        let share_bytes = match command {
            Command::Read { length_bytes, .. } => length_bytes as usize,
            _ => payload.len(),
        };
        self.payload_bytes += share_bytes;
        let (device, counters) = (self.device.clone(), self.counters.clone());
        let dialect = self.dialect;
        let mut timer = kind(command).map(|kind| counters.time(kind, since));
        let length_bytes = length_bytes(command, payload.len());
        self.tasks.spawn(async move {
            let span = Span::new(since);
            span.add(Stage::Queue, since);
            let work = execute(&*device, &counters, &mut timer, command, payload);
            let answer = span.follow(work).await;
            drop(timer);
            let error = match &answer {
                Answer::Error(_, text) => Some(text.clone()),
                _ => None,
            };
            let (command, offset) = (command.name(), to.offset);
            let ended = Ended { command, offset, length_bytes, at_once: false, error };
            counters.tracing.end(&span, ended, 1);
            let (head, payload) = dialect.encode_answer(to, answer);
            Reply { head, payload, share_bytes }
        });
    }

    /// The next reply, in the order in which requests end. Pending when there is no request.
    ///
    /// # Errors
    /// When a request's task panicked: it will never be answered.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reply, ConnectionError>> {
        if self.tasks.is_empty() {
            return Poll::Pending;
        }
        match ready!(self.tasks.poll_join_next(cx)) {
            Some(Ok(reply)) => {
                self.payload_bytes -= reply.share_bytes;
                Poll::Ready(Ok(reply))
            }
            Some(Err(error)) => Poll::Ready(Err(ConnectionError::Panicked(error.to_string()))),
            None => Poll::Pending,
        }
    }
}

async fn execute(
    device: &dyn Device,
    counters: &Counters,
    timer: &mut Option<Timer>,
    command: Command,
    payload: Bytes,
) -> Answer {
    let carried_bytes = payload.len();
    let result = match command {
        Command::Read { offset, length_bytes } => {
            device.read(offset, length_bytes).await.map(|data| Answer::Data { offset, data })
        }
        Command::Write { offset, fua } => done(counters, device.write(offset, payload, fua).await),
        Command::Flush => done(counters, device.flush().await),
        Command::Zero { offset, length_bytes, how, fua } => {
            done(counters, device.zero(offset, length_bytes, how, fua).await)
        }
        Command::Status { offset, length_bytes, only_one, contexts } => {
            let told = describe(device, contexts, offset, length_bytes, only_one).await;
            told.map(Answer::Status)
        }
        Command::Cache { offset, length_bytes } => {
            device.prefetch(offset, length_bytes).await.map(|()| Answer::Done)
        }
    };
    if let (Some(timer), Ok(answer)) = (timer, &result) {
        timer.carried(if let Answer::Data { data, .. } = answer {
            data.len()
        } else {
            carried_bytes
        });
    }
    result.unwrap_or_else(|error| refusal(&error))
}

fn done(counters: &Counters, result: Result<(), IoError>) -> Result<Answer, IoError> {
    counters.note(&result);
    result.map(|()| Answer::Done)
}

fn length_bytes(command: Command, payload: usize) -> u64 {
    match command {
        Command::Read { length_bytes, .. } => length_bytes.into(),
        Command::Write { .. } => payload as u64,
        Command::Flush => 0,
        Command::Zero { length_bytes, .. }
        | Command::Status { length_bytes, .. }
        | Command::Cache { length_bytes, .. } => length_bytes,
    }
}

/// What a command counts as.
fn kind(command: Command) -> Option<Kind> {
    match command {
        Command::Read { .. } => Some(Kind::Read),
        Command::Write { .. } | Command::Zero { .. } => Some(Kind::Write),
        Command::Flush => Some(Kind::Flush),
        Command::Status { .. } | Command::Cache { .. } => None,
    }
}

pub fn refusal(error: &IoError) -> Answer {
    Answer::Error(Errno::from(error), error.to_string())
}
