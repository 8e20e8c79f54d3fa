//! Tasks that can't be answered at once: commands that wait for a disk, a lock or another host, task
//! management that waits for commands to end, and lists of targets.
//!
//! An aborted task is never answered. It may still run for a while. The initiator that asked to abort it gets
//! its answer only when the task has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use perigee_block::trace;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;

use super::ConnectionError;
use super::execute::Disk;
use super::scsi::Outcome;
use super::scsi::command::Command;
use super::session::COMMANDS_MAX;
use super::transfer::Task;
use super::unit::Abort;

/// The most bytes that are read at a time. Other reads wait, without memory.
const READ_BYTES_MAX: usize = 64 << 20;
/// The unit in which reads are counted.
const READ_UNIT_BYTES: usize = 512;
/// All unanswered commands of an initiator may run, so that no command waits for an earlier one.
const RUNNING_MAX: usize = COMMANDS_MAX as usize;
/// The deadline of task management.
pub const MANAGEMENT_MAX: Duration = Duration::from_secs(30);

/// How a task management function ended (RFC 7143, 11.6.1).
pub mod managed {
    /// The function is done; of the aborted tasks none answers any more.
    pub const COMPLETE: u8 = 0;
    /// There is no such task: it has ended, or never came.
    pub const NO_TASK: u8 = 1;
    /// There is no unit with this LUN.
    pub const NO_UNIT: u8 = 2;
    /// The target does not know the function.
    pub const NOT_SUPPORTED: u8 = 5;
    /// The function can't be carried out, for example because it did not end in time.
    pub const REJECTED: u8 = 255;
}

/// A finished task.
pub enum Ready {
    Command(Task, Outcome),
    Management { itt: u32, response: u8 },
    Text { itt: u32, text: Vec<u8> },
}

enum Ending {
    Command { number: u64, task: Task, outcome: Outcome, _room: Option<OwnedSemaphorePermit> },
    Other(Ready),
}

struct Running {
    itt: u32,
    held_bytes: usize,
    aborted: bool,
}

/// Waits for the end of tasks.
struct Waiter {
    numbers: Vec<u64>,
    /// Dropping this notifies the waiting session.
    _done: Abort,
}

/// The commands of one session that run. They end in any order. Their number and the memory of their data are
/// bounded.
pub struct Tasks {
    set: JoinSet<Ending>,
    running: HashMap<u64, Running>,
    next_number: u64,
    /// The bytes of the data of running writes.
    held_bytes: usize,
    /// Permits for the bytes of reads, until their answers are sent.
    room: Arc<Semaphore>,
    waiters: Vec<Waiter>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self {
            set: JoinSet::new(),
            running: HashMap::new(),
            next_number: 0,
            held_bytes: 0,
            room: Arc::new(Semaphore::new(READ_BYTES_MAX / READ_UNIT_BYTES)),
            waiters: Vec::new(),
        }
    }
}

impl Tasks {
    /// Whether no command runs.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    /// Whether as many commands run as the window of CmdSN allows; then no more are read from the connection.
    pub fn is_full(&self) -> bool {
        self.set.len() >= RUNNING_MAX
    }

    /// The bytes of the data of running commands.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// The number of commands that are not aborted.
    pub fn len(&self) -> usize {
        self.running.values().filter(|running| !running.aborted).count()
    }

    /// Starts a command that was read from the socket at `since`.
    pub fn start(&mut self, disk: &Disk, task: Task, data: Bytes, since: Instant) {
        let Task { command, .. } = task;
        let number = self.next_number;
        self.next_number += 1;
        let read_bytes = match command {
            Command::Read { range, .. } | Command::Verify { range, .. } => range.transfer_bytes(),
            _ => 0,
        };
        let units = read_bytes.min(READ_BYTES_MAX) / READ_UNIT_BYTES;
        let units = u32::try_from(units).expect("bounded");
        let room = Arc::clone(&self.room);
        let held_bytes = data.len();
        self.held_bytes += held_bytes;
        self.running.insert(number, Running { itt: task.itt, held_bytes, aborted: false });
        let disk = disk.clone();
        self.set.spawn(async move {
            let room = match units {
                0 => None,
                _ => room.acquire_many_owned(units).await.ok(),
            };
            let outcome = trace::queued(since, disk.execute(command, data)).await;
            Ending::Command { number, task, outcome, _room: room }
        });
    }

    /// Starts work that is not a command and ends with something to send.
    pub fn start_other(&mut self, work: impl Future<Output = Ready> + Send + 'static) {
        self.set.spawn(async move { Ending::Other(work.await) });
    }

    /// Runs a task management function that waits for others.
    pub fn manage(&mut self, itt: u32, work: impl Future<Output = ()> + Send + 'static) {
        self.start_other(async move {
            let response = match tokio::time::timeout(MANAGEMENT_MAX, work).await {
                Ok(()) => managed::COMPLETE,
                Err(_) => managed::REJECTED,
            };
            Ready::Management { itt, response }
        });
    }

    /// Aborts one command. Returns `None` if it is not running.
    pub fn abort(&mut self, itt: u32) -> Option<oneshot::Receiver<()>> {
        let found = self.running.iter_mut().find(|(_, r)| r.itt == itt && !r.aborted)?;
        found.1.aborted = true;
        let numbers = vec![*found.0];
        let (done, ended) = oneshot::channel();
        self.waiters.push(Waiter { numbers, _done: done });
        Some(ended)
    }

    /// Aborts all commands. `done` is dropped when none runs any more.
    pub fn abort_all(&mut self, done: Abort) {
        self.running.values_mut().for_each(|running| running.aborted = true);
        if !self.running.is_empty() {
            let numbers = self.running.keys().copied().collect();
            self.waiters.push(Waiter { numbers, _done: done });
        }
    }

    /// The next finished task that has an answer. Pending if nothing runs.
    ///
    /// # Errors
    /// When a task panicked: it will never be answered.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Ready, ConnectionError>> {
        while !self.set.is_empty() {
            let Some(ended) = ready!(self.set.poll_join_next(cx)) else { break };
            match ended {
                Ok(Ending::Command { number, task, outcome, .. }) => {
                    if let Some(outcome) = self.ended(number, outcome) {
                        return Poll::Ready(Ok(Ready::Command(task, outcome)));
                    }
                }
                Ok(Ending::Other(ready)) => return Poll::Ready(Ok(ready)),
                Err(error) => {
                    return Poll::Ready(Err(ConnectionError::Panicked(error.to_string())));
                }
            }
        }
        Poll::Pending
    }

    /// The outcome, unless the task was aborted.
    fn ended(&mut self, number: u64, outcome: Outcome) -> Option<Outcome> {
        let running = self.running.remove(&number)?;
        self.held_bytes -= running.held_bytes;
        for waiter in &mut self.waiters {
            waiter.numbers.retain(|other| *other != number);
        }
        self.waiters.retain(|waiter| !waiter.numbers.is_empty());
        (!running.aborted).then_some(outcome)
    }
}
