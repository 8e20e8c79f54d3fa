//! Writes whose data has not fully arrived: unsolicited data, or data that an R2T asks for.
//!
//! ```text
//! command -> unsolicited data, until the final one -> R2T -> burst -> R2T -> burst ... -> complete
//! ```
//!
//! Data come in order (DataPDUInOrder, DataSequenceInOrder). Data in a wrong order end the task, not the
//! connection. The memory for requested data is limited: further writes wait for their first R2T.

use std::collections::VecDeque;

use super::pdu::{Head, NO_TAG, flag};
use super::scsi::command::{Command, Range};
use super::text::Parameters;

/// The limit for the data of running writes and of writes with an R2T, together. If there are none, one write
/// may always get its R2T.
const SOLICITED_BYTES_MAX: usize = 32 << 20;

/// A SCSI command of this session.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    pub itt: u32,
    pub command: Command,
    /// The bytes that the initiator expects to receive.
    pub expected_in: u32,
    pub expected_out: u32,
    /// The bytes that the initiator has to send according to the command.
    pub wanted_out: usize,
}

impl Task {
    /// `expected_in` and `expected_out` are the bytes that the initiator expects to move, in the directions that it
    /// has set.
    pub fn new(itt: u32, command: Command, expected_in: u32, expected_out: u32) -> Self {
        let wanted_out = command.data_out_bytes();
        Self { itt, command, expected_in, expected_out, wanted_out }
    }

    /// If the initiator sends fewer bytes than a write's blocks have, only these bytes are written, and the
    /// rest of the last block stays. Other commands need all of their data, and some accept no more than they
    /// need. Returns the number of bytes to use.
    pub fn cut_to(self, bytes: usize) -> Option<(Self, usize)> {
        let exact =
            matches!(self.command, Command::CompareAndWrite { .. } | Command::WriteSame { .. });
        if exact && self.expected_out as usize != self.wanted_out {
            return None;
        }
        if bytes >= self.wanted_out {
            return Some((self, self.wanted_out));
        }
        let length_bytes = bytes as u64;
        let cut = |range: Range| Range { length_bytes, ..range };
        let command = match self.command {
            Command::Write { range, fua } => Command::Write { range: cut(range), fua },
            Command::WriteVerify { range, compare } => {
                Command::WriteVerify { range: cut(range), compare }
            }
            Command::OrWrite { range, fua } => Command::OrWrite { range: cut(range), fua },
            _ => return None,
        };
        Some((Self { command, ..self }, command.data_out_bytes()))
    }
}

/// One R2T whose data has not fully arrived.
#[derive(Debug, Clone, Copy)]
struct Burst {
    ttt: u32,
    end: usize,
    next_data_sn: u32,
}

/// An R2T to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    pub itt: u32,
    pub ttt: u32,
    pub number: u32,
    pub offset: u32,
    pub length_bytes: u32,
}

struct Transfer {
    task: Task,
    data: Vec<u8>,
    /// The number of bytes that the command needs.
    wanted: usize,
    /// The number of bytes that have arrived, whether they are needed or not.
    received: usize,
    /// The number of the next unsolicited PDU, until the final one has come.
    unsolicited: Option<u32>,
    /// Whether an R2T may be sent for it.
    solicited: bool,
    asked_to: usize,
    asked: u32,
    bursts: VecDeque<Burst>,
}

/// The result of taking a Data-Out PDU.
#[derive(Debug)]
pub enum Taken {
    /// More has to come.
    Part,
    Whole(Task, Vec<u8>),
    /// It does not fit the order, and the task has ended.
    Misfit(Task),
    /// Its task is unknown; it may have just ended.
    Unknown,
}

/// The writes whose data have not all come: what was sent unasked, and what R2Ts have asked for.
pub struct Transfers {
    parameters: Parameters,
    all: Vec<Transfer>,
    next_ttt: u32,
}

impl Transfers {
    /// `parameters` say how much may come unasked, and how much one R2T asks for.
    pub fn new(parameters: Parameters) -> Self {
        Self { parameters, all: Vec::new(), next_ttt: 0 }
    }

    /// How many writes wait for data.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Begins a write with the data that came with the command. `more` says whether unsolicited data follow.
    pub fn begin(&mut self, task: Task, immediate: &[u8], more: bool) -> Taken {
        let wanted = task.wanted_out.min(task.expected_out as usize);
        let unasked = self.parameters.first_burst_bytes as usize;
        let allowed = self.parameters.immediate_data || immediate.is_empty();
        if !allowed || immediate.len() > unasked || more && self.parameters.initial_r2t {
            return Taken::Misfit(task);
        }
        let mut transfer = Transfer {
            task,
            data: Vec::new(),
            wanted,
            received: 0,
            unsolicited: more.then_some(0),
            solicited: false,
            asked_to: 0,
            asked: 0,
            bursts: VecDeque::new(),
        };
        transfer.add(immediate);
        if transfer.is_whole() {
            return Taken::Whole(transfer.task, transfer.data);
        }
        transfer.asked_to = transfer.received;
        self.all.push(transfer);
        Taken::Part
    }

    /// Takes a Data-Out PDU. Data that do not fit the burst they belong to end their task.
    pub fn data_out(&mut self, head: &Head, data: &[u8]) -> Taken {
        let Some(at) = self.all.iter().position(|t| t.task.itt == head.itt()) else {
            return Taken::Unknown;
        };
        let unasked = self.parameters.first_burst_bytes as usize;
        let transfer = &mut self.all[at];
        if !transfer.take(head, data, unasked) {
            return Taken::Misfit(self.all.remove(at).task);
        }
        if transfer.is_whole() {
            let whole = self.all.remove(at);
            return Taken::Whole(whole.task, whole.data);
        }
        Taken::Part
    }

    /// The R2Ts that can be sent now. `held_bytes` is the size of the data of running commands.
    pub fn ready(&mut self, held_bytes: usize) -> Vec<Ready> {
        let asked = self.all.iter().filter(|t| t.solicited).map(|transfer| transfer.wanted);
        let mut solicited = held_bytes + asked.sum::<usize>();
        let mut ready = Vec::new();
        for transfer in self.all.iter_mut().filter(|t| t.unsolicited.is_none()) {
            if !transfer.solicited {
                if solicited > 0 && solicited + transfer.wanted > SOLICITED_BYTES_MAX {
                    break;
                }
                solicited += transfer.wanted;
                transfer.solicited = true;
            }
            transfer.ask(&self.parameters, &mut self.next_ttt, &mut ready);
        }
        ready
    }

    /// Ends one task. Returns whether it existed.
    pub fn abort(&mut self, itt: u32) -> bool {
        let before = self.all.len();
        self.all.retain(|transfer| transfer.task.itt != itt);
        self.all.len() < before
    }

    /// Forgets all of them. What still comes for them is unknown then.
    pub fn abort_all(&mut self) {
        self.all.clear();
    }
}

impl Transfer {
    fn is_whole(&self) -> bool {
        self.received >= self.wanted && self.unsolicited.is_none()
    }

    fn add(&mut self, data: &[u8]) {
        let needed = self.wanted.saturating_sub(self.received).min(data.len());
        if self.data.is_empty() && needed > 0 && needed < self.wanted {
            // Not more than 1 MiB at once, because the rest may never come.
            self.data.reserve(self.wanted.min(1 << 20));
        }
        self.data.extend_from_slice(&data[..needed]);
        self.received += data.len();
    }

    /// Returns false if the PDU is not the next one.
    fn take(&mut self, head: &Head, data: &[u8], unasked: usize) -> bool {
        let (data_sn, offset) = (head.u32_at(36), head.u32_at(40) as usize);
        let last = head.has(flag::FINAL);
        let end = self.received + data.len();
        if offset != self.received || end > self.task.expected_out as usize {
            return false;
        }
        if head.ttt() == NO_TAG {
            if self.unsolicited != Some(data_sn) || end > unasked {
                return false;
            }
            self.unsolicited = (!last).then(|| data_sn.wrapping_add(1));
            self.add(data);
            self.asked_to = self.received;
            return true;
        }
        let Some(burst) = self.bursts.front_mut() else { return false };
        let fits = burst.ttt == head.ttt()
            && burst.next_data_sn == data_sn
            && if last { end == burst.end } else { end < burst.end };
        if !fits {
            return false;
        }
        burst.next_data_sn = data_sn.wrapping_add(1);
        if last {
            self.bursts.pop_front();
        }
        self.add(data);
        true
    }

    fn ask(&mut self, parameters: &Parameters, next_ttt: &mut u32, ready: &mut Vec<Ready>) {
        let length_u32 = |length: usize| u32::try_from(length).expect("a transfer is bounded");
        while self.asked_to < self.wanted
            && self.bursts.len() < parameters.max_outstanding_r2t as usize
        {
            let length = (self.wanted - self.asked_to).min(parameters.max_burst_bytes as usize);
            let ttt = *next_ttt;
            *next_ttt = if ttt == NO_TAG - 1 { 0 } else { ttt + 1 };
            ready.push(Ready {
                itt: self.task.itt,
                ttt,
                number: self.asked,
                offset: length_u32(self.asked_to),
                length_bytes: length_u32(length),
            });
            self.asked += 1;
            self.asked_to += length;
            self.bursts.push_back(Burst { ttt, end: self.asked_to, next_data_sn: 0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pdu::request;
    use super::*;

    fn parameters() -> Parameters {
        Parameters {
            initial_r2t: false,
            first_burst_bytes: 2048,
            max_burst_bytes: 1024,
            max_outstanding_r2t: 2,
            ..Parameters::default()
        }
    }

    fn task(itt: u32, length: u32) -> Task {
        let range = Range { offset: 0, length_bytes: length.into() };
        let command = Command::Write { range, fua: false };
        Task::new(itt, command, 0, length)
    }

    fn out(itt: u32, ttt: u32, data_sn: u32, offset: u32, last: bool) -> Head {
        Head::new(request::DATA_OUT, if last { flag::FINAL } else { 0 })
            .with_u32(16, itt)
            .with_u32(20, ttt)
            .with_u32(36, data_sn)
            .with_u32(40, offset)
    }

    #[test]
    fn a_write_with_all_its_data_is_whole_at_once() {
        let mut transfers = Transfers::new(parameters());
        let taken = transfers.begin(task(1, 512), &[7; 512], false);
        assert!(matches!(taken, Taken::Whole(_, data) if data == [7; 512]));
        assert_eq!(transfers.len(), 0);
    }

    #[test]
    fn several_r2ts_are_out_at_once_and_answered_in_order() {
        let mut transfers = Transfers::new(parameters());
        assert!(matches!(transfers.begin(task(1, 4096), &[1; 512], false), Taken::Part));
        let ready = transfers.ready(0);
        let places: Vec<_> = ready.iter().map(|r| (r.number, r.offset, r.length_bytes)).collect();
        assert_eq!(places, [(0, 512, 1024), (1, 1536, 1024)]);
        assert!(transfers.ready(0).is_empty());
        let burst = |at: usize, data_sn, offset, last| out(1, ready[at].ttt, data_sn, offset, last);
        assert!(matches!(transfers.data_out(&burst(0, 0, 512, false), &[2; 512]), Taken::Part));
        assert!(matches!(transfers.data_out(&burst(0, 1, 1024, true), &[3; 512]), Taken::Part));
        let more = transfers.ready(0);
        assert_eq!((more[0].number, more[0].offset, more[0].length_bytes), (2, 2560, 1024));
        assert!(matches!(transfers.data_out(&burst(1, 0, 1536, true), &[4; 1024]), Taken::Part));
        let last = transfers.ready(0);
        assert_eq!((last[0].offset, last[0].length_bytes), (3584, 512));
        let out_2 = out(1, more[0].ttt, 0, 2560, true);
        assert!(matches!(transfers.data_out(&out_2, &[5; 1024]), Taken::Part));
        let out_3 = out(1, last[0].ttt, 0, 3584, true);
        let Taken::Whole(_, data) = transfers.data_out(&out_3, &[6; 512]) else {
            panic!("it is whole")
        };
        assert_eq!(data.len(), 4096);
        assert_eq!(
            [data[0], data[512], data[1024], data[1536], data[2560], data[3584]],
            [1, 2, 3, 4, 5, 6]
        );
    }

    #[test]
    fn data_out_of_order_end_the_task() {
        for wrong in
            [out(1, NO_TAG, 1, 0, true), out(1, NO_TAG, 0, 512, true), out(1, 3, 0, 0, true)]
        {
            let mut transfers = Transfers::new(parameters());
            assert!(matches!(transfers.begin(task(1, 1024), &[], true), Taken::Part));
            assert!(matches!(transfers.data_out(&wrong, &[0; 512]), Taken::Misfit(_)));
            assert!(matches!(transfers.data_out(&wrong, &[0; 512]), Taken::Unknown));
        }
    }

    #[test]
    fn more_than_was_announced_or_allowed_ends_the_task() {
        let mut transfers = Transfers::new(parameters());
        assert!(matches!(transfers.begin(task(1, 512), &[], true), Taken::Part));
        assert!(matches!(
            transfers.data_out(&out(1, NO_TAG, 0, 0, true), &[0; 513]),
            Taken::Misfit(_)
        ));
        assert!(matches!(transfers.begin(task(1, 8192), &[0; 4096], false), Taken::Misfit(_)));
        let mut asking = Transfers::new(Parameters { initial_r2t: true, ..parameters() });
        assert!(matches!(asking.begin(task(1, 8192), &[], true), Taken::Misfit(_)));
    }

    #[test]
    fn writes_beyond_the_bound_wait_for_their_first_r2t() {
        let mut transfers = Transfers::new(parameters());
        let large = 8 << 20;
        for itt in 0..6 {
            assert!(matches!(transfers.begin(task(itt, large), &[], false), Taken::Part));
        }
        let asked: std::collections::BTreeSet<u32> =
            transfers.ready(0).iter().map(|r| r.itt).collect();
        assert_eq!(asked.len(), 4);
        assert!(transfers.abort(0) && !transfers.abort(0));
        assert!(transfers.ready(1).is_empty(), "a command runs with its data");
        assert_eq!(transfers.ready(0)[0].itt, 4);
    }
}
