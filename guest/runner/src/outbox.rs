//! Messages to the host, numbered from 1. Each is kept until the host has stored it.
//!
//! One thread writes the batches of [`Outbox::next_batch`]; another applies the host's messages. Whatever
//! happens to the connection, a message leaves the outbox only when it is acknowledged. The outbox is bounded:
//! [`Outbox::push_when_room`] blocks, so a command blocks in its own `write` if nobody stores its output.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use perigee_model::guest::{GuestBody, GuestMessage, HostMessage};

pub const UNACKED_MESSAGES_MAX: usize = 50_000;
/// The most bytes that are sent without an acknowledgement. They fit into the socket between QEMU and the host,
/// so a host that closes a connection because of a torn line finds the start of a line soon after.
const WINDOW_BYTES: usize = 64 * 1024;
/// The limit in bytes, so that long lines don't fill the memory of a small guest before the limit on their
/// number applies.
pub const UNACKED_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The messages that the host has not acknowledged yet. They are sent again after a break.
pub struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    clock_ms: fn() -> u64,
}

#[derive(Default)]
struct State {
    /// Encoded lines; the first has the number `acked + 1`.
    unacked: VecDeque<Vec<u8>>,
    unacked_bytes: usize,
    acked: u64,
    /// The number of messages of `unacked` that the writer got since the last resume.
    sent: usize,
    sent_bytes: usize,
}

impl Outbox {
    /// `clock_ms` returns the milliseconds since the guest booted.
    pub fn new(clock_ms: fn() -> u64) -> Self {
        Self { state: Mutex::new(State::default()), changed: Condvar::new(), clock_ms }
    }

    /// Adds a message at once, even without room. This is for the few messages that mark the job's phases.
    /// Returns its number.
    pub fn push(&self, body: GuestBody) -> u64 {
        let mut state = self.lock();
        let seq = state.append(body, (self.clock_ms)());
        drop(state);
        self.changed.notify_all();
        seq
    }

    /// Adds a message as soon as there is room.
    pub fn push_when_room(&self, body: GuestBody) {
        let mut state = self
            .changed
            .wait_while(self.lock(), |state| state.is_full())
            .expect("no thread panics with the outbox locked");
        state.append(body, (self.clock_ms)());
        drop(state);
        self.changed.notify_all();
    }

    /// Takes in a message of the host about what it has, and ignores the others.
    pub fn apply(&self, message: &HostMessage) {
        let mut state = self.lock();
        match message {
            HostMessage::Resume => state.resume(),
            HostMessage::Ack(seq) => state.ack(*seq),
            HostMessage::Begin
            | HostMessage::EndCommand
            | HostMessage::SyncNumber(_)
            | HostMessage::Sync
            | HostMessage::Clock { .. } => {}
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until there are messages and the window is open. Returns whole lines of about `bytes_max` bytes in
    /// total.
    pub fn next_batch(&self, bytes_max: usize) -> Vec<u8> {
        let mut state = self
            .changed
            .wait_while(self.lock(), |state| !state.may_send())
            .expect("no thread panics with the outbox locked");
        state.take_batch(bytes_max)
    }

    /// Whether `seq` was acknowledged before `deadline`.
    pub fn wait_acked(&self, seq: u64, deadline: Instant) -> bool {
        let mut state = self.lock();
        while state.acked < seq {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .expect("no thread panics with the outbox locked")
                .0;
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the outbox locked")
    }
}

impl State {
    fn is_full(&self) -> bool {
        self.unacked.len() >= UNACKED_MESSAGES_MAX || self.unacked_bytes >= UNACKED_BYTES_MAX
    }

    fn may_send(&self) -> bool {
        self.sent < self.unacked.len() && self.sent_bytes < WINDOW_BYTES
    }

    fn append(&mut self, body: GuestBody, uptime_ms: u64) -> u64 {
        let seq = self.acked + self.unacked.len() as u64 + 1;
        let message = GuestMessage { seq, uptime_ms, body };
        let mut line = serde_json::to_vec(&message).expect("a guest message is plain JSON");
        line.push(b'\n');
        self.unacked_bytes += line.len();
        self.unacked.push_back(line);
        seq
    }

    fn resume(&mut self) {
        self.sent = 0;
        self.sent_bytes = 0;
    }

    /// Acknowledges messages. A number that was never sent acknowledges only existing messages.
    fn ack(&mut self, seq: u64) {
        while self.acked < seq {
            let Some(line) = self.unacked.pop_front() else {
                return;
            };
            self.acked += 1;
            self.unacked_bytes -= line.len();
            if self.sent > 0 {
                self.sent -= 1;
                self.sent_bytes -= line.len();
            }
        }
    }

    fn take_batch(&mut self, bytes_max: usize) -> Vec<u8> {
        let mut batch = Vec::new();
        while let Some(line) = self.unacked.get(self.sent) {
            batch.extend_from_slice(line);
            self.sent += 1;
            self.sent_bytes += line.len();
            if batch.len() >= bytes_max {
                break;
            }
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;

    use perigee_model::guest::LogStream;

    use super::*;

    fn log(line: &str) -> GuestBody {
        GuestBody::log(LogStream::Stdout, line.to_owned())
    }

    fn outbox_with(messages: usize) -> Outbox {
        let outbox = Outbox::new(|| 7);
        for number in 0..messages {
            outbox.push(log(&number.to_string()));
        }
        outbox
    }

    fn numbers(batch: &[u8]) -> Vec<u64> {
        batch
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice::<GuestMessage>(line).unwrap().seq)
            .collect()
    }

    #[test]
    fn messages_are_numbered_from_one() {
        let outbox = outbox_with(3);
        assert_eq!(numbers(&outbox.next_batch(usize::MAX)), [1, 2, 3]);
    }

    #[test]
    fn a_batch_ends_with_a_whole_line() {
        let outbox = outbox_with(3);
        let batch = outbox.next_batch(1);
        assert_eq!(numbers(&batch), [1]);
        assert_eq!(batch.last(), Some(&b'\n'));
        assert_eq!(numbers(&outbox.next_batch(1)), [2]);
    }

    #[test]
    fn resume_sends_again_what_is_not_acknowledged() {
        let outbox = outbox_with(4);
        outbox.next_batch(usize::MAX);
        outbox.apply(&HostMessage::Ack(2));
        outbox.apply(&HostMessage::Resume);
        assert_eq!(numbers(&outbox.next_batch(usize::MAX)), [3, 4]);
    }

    #[test]
    fn an_acknowledgement_is_cumulative_and_old_ones_change_nothing() {
        let outbox = outbox_with(3);
        outbox.apply(&HostMessage::Ack(2));
        outbox.apply(&HostMessage::Ack(1));
        assert_eq!(numbers(&outbox.next_batch(usize::MAX)), [3]);
    }

    #[test]
    fn an_acknowledgement_from_the_future_does_not_skip_numbers() {
        let outbox = outbox_with(1);
        outbox.apply(&HostMessage::Ack(100));
        assert_eq!(outbox.push(log("next")), 2);
        assert_eq!(numbers(&outbox.next_batch(usize::MAX)), [2]);
    }

    #[test]
    fn the_window_opens_by_an_acknowledgement_or_a_resume() {
        let mut state = State::default();
        for _ in 0..3 {
            state.append(log(&"x".repeat(WINDOW_BYTES)), 0);
        }
        state.take_batch(1);
        assert!(!state.may_send());
        state.ack(1);
        assert!(state.may_send());
        state.take_batch(1);
        assert!(!state.may_send());
        state.resume();
        assert!(state.may_send());
    }

    #[test]
    fn waiting_for_an_acknowledgement_has_a_deadline() {
        let outbox = outbox_with(1);
        assert!(!outbox.wait_acked(1, Instant::now()));
        outbox.apply(&HostMessage::Ack(1));
        assert!(outbox.wait_acked(1, Instant::now()));
    }

    #[test]
    fn a_full_outbox_holds_the_sender_until_an_acknowledgement() {
        let outbox = Arc::new(outbox_with(UNACKED_MESSAGES_MAX));
        let (done, added) = mpsc::channel();
        let sender = Arc::clone(&outbox);
        let thread = std::thread::spawn(move || {
            sender.push_when_room(log("late"));
            done.send(()).unwrap();
        });
        assert!(added.recv_timeout(Duration::from_millis(50)).is_err());
        outbox.apply(&HostMessage::Ack(1));
        added
            .recv_timeout(Duration::from_secs(30))
            .expect("the sender goes on after an acknowledgement");
        thread.join().unwrap();
    }

    #[test]
    fn large_messages_fill_the_outbox_before_their_count_does() {
        let mut state = State::default();
        let line = "x".repeat(UNACKED_BYTES_MAX / 2);
        state.append(log(&line), 0);
        assert!(!state.is_full());
        state.append(log(&line), 0);
        assert!(state.is_full());
    }
}
