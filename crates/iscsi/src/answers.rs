//! The PDUs that a session sends in the full feature phase.

use bytes::Bytes;
use perigee_block::device::IoError;
use perigee_block::stream::output::Output;

use super::pdu::{Digests, Head, NO_TAG, flag, response};
use super::scsi::{Outcome, status};
use super::session::Numbers;
use super::text::Parameters;
use super::transfer::{Ready, Task};

/// What one connection writes: each PDU gets the session's next numbers and the digests that the login has agreed on.
pub struct Answers {
    pub output: Output,
    pub numbers: Numbers,
    pub digests: Digests,
    pub parameters: Parameters,
    /// The format of sense data.
    pub descriptor_sense: bool,
}

/// The difference between the bytes that were moved and those that the initiator expected.
fn residual(expected: u32, moved: usize) -> (u8, u32) {
    let moved = u32::try_from(moved).unwrap_or(u32::MAX);
    match expected.cmp(&moved) {
        std::cmp::Ordering::Greater => (flag::UNDERFLOW, expected - moved),
        std::cmp::Ordering::Less => (flag::OVERFLOW, moved - expected),
        std::cmp::Ordering::Equal => (0, 0),
    }
}

impl Answers {
    /// Adds the numbers that every answer carries.
    fn numbered(&self, head: Head, stat_sn: u32) -> Head {
        head.with_u32(24, stat_sn)
            .with_u32(28, self.numbers.exp_cmd_sn())
            .with_u32(32, self.numbers.max_cmd_sn())
    }

    /// Sends a PDU with its own status number.
    pub fn send(&mut self, head: Head, data: &[u8]) {
        let stat_sn = self.numbers.next_stat_sn();
        self.put(self.numbered(head, stat_sn), data);
    }

    /// Sends a PDU with the next status number, which it does not use.
    fn send_unnumbered(&mut self, head: Head) {
        let stat_sn = self.numbers.stat_sn();
        self.put(self.numbered(head, stat_sn), &[]);
    }

    fn put(&mut self, head: Head, data: &[u8]) {
        self.numbers.told();
        let length = self.digests.pdu_bytes(data.len());
        if let Some(room) = self.output.room(length) {
            let head = head.with_data_bytes(data.len());
            let (front, rest) = room.split_at_mut(self.digests.head_bytes());
            self.digests.put_head(front, &head);
            let (middle, tail) = rest.split_at_mut(data.len());
            middle.copy_from_slice(data);
            self.digests.put_tail(tail, data);
            self.output.commit(length);
        } else {
            self.output.push([self.digests.encode(head, data).into()]);
        }
    }

    /// Sends a ping that asks for an answer.
    pub fn ping(&mut self, ttt: u32) {
        let head = Head::new(response::NOP_IN, flag::FINAL).with_u32(16, NO_TAG);
        self.send_unnumbered(head.with_u32(20, ttt));
    }

    /// Answers a NOP-Out (RFC 7143, 11.19) with its own data, cut to what the initiator takes in one PDU.
    pub fn pong(&mut self, itt: u32, lun: [u8; 8], data: &[u8]) {
        let data = &data[..data.len().min(self.parameters.their_data_bytes_max as usize)];
        let head = Head::new(response::NOP_IN, flag::FINAL).with(8, &lun).with_u32(16, itt);
        self.send(head.with_u32(20, NO_TAG), data);
    }

    /// Refuses a PDU: `reason` is one of [`super::pdu::reject`], and the header of what is refused goes with it (RFC
    /// 7143, 11.17).
    pub fn reject(&mut self, reason: u8, of: &Head) {
        let head = Head::new(response::REJECT, flag::FINAL).with(2, &[reason]);
        self.send(head.with_u32(16, NO_TAG), &of.0);
    }

    /// Answers a task management request; `how` is one of [`super::tasks::managed`].
    pub fn managed(&mut self, itt: u32, how: u8) {
        let head = Head::new(response::TASK_MANAGEMENT, flag::FINAL).with(2, &[how]);
        self.send(head.with_u32(16, itt), &[]);
    }

    /// Answers a Logout; `how` is 0 for a session that is closed, and 2 if the initiator wants recovery, which there
    /// is not (RFC 7143, 11.15.1).
    pub fn logged_out(&mut self, itt: u32, how: u8) {
        let head = Head::new(response::LOGOUT, flag::FINAL).with(2, &[how]);
        self.send(head.with_u32(16, itt), &[]);
    }

    /// Sends a text. The initiator asks for the rest of it with `ttt`.
    pub fn text(&mut self, itt: u32, text: &[u8], ttt: Option<u32>) {
        let flags = if ttt.is_some() { flag::CONTINUE } else { flag::FINAL };
        let head = Head::new(response::TEXT, flags).with_u32(16, itt);
        self.send(head.with_u32(20, ttt.unwrap_or(NO_TAG)), text);
    }

    /// Asks the initiator for a part of a write's data (R2T). It takes no StatSN, because the task has not ended.
    pub fn ready_to_transfer(&mut self, ready: &Ready) {
        let head = Head::new(response::R2T, flag::FINAL)
            .with_u32(16, ready.itt)
            .with_u32(20, ready.ttt)
            .with_u32(36, ready.number)
            .with_u32(40, ready.offset)
            .with_u32(44, ready.length_bytes);
        self.send_unnumbered(head);
    }

    /// Ends a task: its data, if it reads, and then its status. A residual count says how much less or more the
    /// command moved than the initiator expected (RFC 7143, 11.4.5).
    pub fn outcome(&mut self, task: &Task, outcome: Outcome) {
        match outcome {
            Outcome::Good(data) if !data.is_empty() && task.expected_in > 0 => {
                self.data_in(task, data);
            }
            Outcome::Good(data) => {
                let (expected, moved) = if task.expected_out > 0 || task.wanted_out > 0 {
                    (task.expected_out, task.wanted_out)
                } else {
                    (task.expected_in, data.len())
                };
                self.status(task.itt, status::GOOD, residual(expected, moved), &[]);
            }
            Outcome::Check(sense) => {
                let sense = sense.encode(self.descriptor_sense);
                let length = u16::try_from(sense.len()).expect("sense data are short");
                let data = [&length.to_be_bytes()[..], &sense].concat();
                let unmoved = residual(task.expected_in.max(task.expected_out), 0);
                self.status(task.itt, status::CHECK_CONDITION, unmoved, &data);
            }
            Outcome::Conflict => {
                let unmoved = residual(task.expected_in.max(task.expected_out), 0);
                self.status(task.itt, status::RESERVATION_CONFLICT, unmoved, &[]);
            }
        }
    }

    fn status(&mut self, itt: u32, status: u8, (flags, residual): (u8, u32), sense: &[u8]) {
        let head = Head::new(response::SCSI_RESPONSE, flag::FINAL | flags)
            .with(3, &[status])
            .with_u32(16, itt)
            .with_u32(44, residual);
        self.send(head, sense);
    }

    /// The length of the pieces in which data is sent. It is limited by the initiator, and by a burst.
    fn piece_bytes(&self) -> usize {
        let Parameters { their_data_bytes_max, max_burst_bytes, .. } = self.parameters;
        // A multiple of 4, so that only the last piece needs padding.
        (their_data_bytes_max.min(max_burst_bytes) & !3) as usize
    }

    /// The bytes of all complete pieces of a burst.
    fn burst_bytes(&self) -> usize {
        let (piece, max) = (self.piece_bytes(), self.parameters.max_burst_bytes as usize);
        max / piece * piece
    }

    /// The size of a reply with this much data.
    pub fn data_in_bytes(&self, length: usize) -> usize {
        let (piece, digests) = (self.piece_bytes(), self.digests);
        let whole = length / piece * digests.pdu_bytes(piece);
        let rest = length % piece;
        whole + if rest > 0 { digests.pdu_bytes(rest) } else { 0 }
    }

    /// Adds the reply to a read of exactly as many bytes as the initiator expects. `fill` fills it piece by
    /// piece. Nothing is added if `fill` fails, if it has to wait (`None`), or if there is no room (`None`).
    pub fn fill_data_in(
        &mut self,
        itt: u32,
        length: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Option<Result<(), IoError>>,
    ) -> Option<Result<(), IoError>> {
        let (piece, digests) = (self.piece_bytes(), self.digests);
        let total = self.data_in_bytes(length);
        let first = self.first_data_in(itt);
        let burst_bytes = self.burst_bytes();
        let mut room = self.output.room(total)?;
        let mut offset = 0;
        let mut number = 0;
        while offset < length {
            let size = piece.min(length - offset);
            let (pdu, rest) = room.split_at_mut(digests.pdu_bytes(size));
            let (front, back) = pdu.split_at_mut(digests.head_bytes());
            let (data, tail) = back.split_at_mut(size);
            if let Err(error) = fill(offset, data)? {
                return Some(Err(error));
            }
            let place = Piece { offset, size, number, length, burst_bytes };
            digests.put_head(front, &place.head(first, (0, 0)));
            digests.put_tail(tail, data);
            (offset, number, room) = (offset + size, number + 1, rest);
        }
        self.output.commit(total);
        self.numbers.next_stat_sn();
        self.numbers.told();
        Some(Ok(()))
    }

    fn first_data_in(&self, itt: u32) -> Head {
        let head = Head::new(response::DATA_IN, 0).with_u32(16, itt).with_u32(20, NO_TAG);
        self.numbered(head, self.numbers.stat_sn())
    }

    /// Adds the reply to a read whose data is in separate memory.
    fn data_in(&mut self, task: &Task, data: Bytes) {
        let residual = residual(task.expected_in, data.len());
        let length = data.len().min(task.expected_in as usize);
        let (piece, digests) = (self.piece_bytes(), self.digests);
        let burst_bytes = self.burst_bytes();
        let first = self.first_data_in(task.itt);
        let mut offset = 0;
        let mut number = 0;
        while offset < length {
            let size = piece.min(length - offset);
            let place = Piece { offset, size, number, length, burst_bytes };
            let data = data.slice(offset..offset + size);
            let mut front = vec![0; digests.head_bytes()];
            digests.put_head(&mut front, &place.head(first, residual));
            let mut tail = vec![0; digests.tail_bytes(size)];
            digests.put_tail(&mut tail, &data);
            self.output.push([front.into(), data]);
            if !tail.is_empty() {
                self.output.push([tail.into()]);
            }
            (offset, number) = (offset + size, number + 1);
        }
        self.numbers.next_stat_sn();
        self.numbers.told();
    }
}

/// One Data-In PDU of a reply.
struct Piece {
    offset: usize,
    size: usize,
    number: u32,
    length: usize,
    burst_bytes: usize,
}

impl Piece {
    /// The header. The last piece has the status and the residual count.
    fn head(&self, head: Head, (residual_flag, residual): (u8, u32)) -> Head {
        let length_u32 = |length: usize| u32::try_from(length).expect("a transfer is bounded");
        let end = self.offset + self.size;
        let last = end == self.length;
        let burst_ends = last || end.is_multiple_of(self.burst_bytes);
        let mut flags = if burst_ends { flag::FINAL } else { 0 };
        if last {
            flags |= flag::STATUS | residual_flag;
        }
        let mut head = head;
        head.0[1] = flags;
        if !last {
            // Only a PDU with a status has a number of its own.
            head = head.with_u32(24, 0);
        }
        head.with_data_bytes(self.size)
            .with_u32(36, self.number)
            .with_u32(40, length_u32(self.offset))
            .with_u32(44, if last { residual } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_burst_is_longer_than_was_agreed() {
        let (max_burst_bytes, length) = (262_144, 1 << 20);
        let answers = Answers {
            output: Output::default(),
            numbers: Numbers::new(1, 1),
            digests: Digests::default(),
            parameters: Parameters {
                their_data_bytes_max: 100_000,
                max_burst_bytes,
                ..Parameters::default()
            },
            descriptor_sense: false,
        };
        let (piece, burst_bytes) = (answers.piece_bytes(), answers.burst_bytes());
        let mut in_burst = 0;
        for offset in (0..length).step_by(piece) {
            let size = piece.min(length - offset);
            let place = Piece { offset, size, number: 0, length, burst_bytes };
            in_burst += size;
            assert!(in_burst <= max_burst_bytes as usize, "at {offset}");
            if place.head(answers.first_data_in(1), (0, 0)).has(flag::FINAL) {
                in_burst = 0;
            }
        }
        assert_eq!(in_burst, 0, "the last one is final");
    }
}
