//! PDU to effect, at once: answers what needs no waiting, straight from and into the buffers.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use bytes::Bytes;
use perigee_block::stats::BatchCounts;
use perigee_block::stream::AT_ONCE_BYTES_MAX;
use perigee_block::stream::buffers::BUFFER_BYTES;
use perigee_block::stream::input::{self, Input};
use perigee_block::trace::Sampler;

use super::ConnectionError;
use super::answers::Answers;
use super::execute::Disk;
use super::pdu::{Head, PduFraming, flag, reject, request};
use super::requests::Requests;
use super::scsi::command::{Command, Range, parse};
use super::scsi::sense::Sense;
use super::scsi::{Outcome, inquiry, report};
use super::session::{COMMANDS_MAX, Session, Turn};
use super::tasks::{Ready, Tasks};
use super::text::OUR_DATA_BYTES_MAX;
use super::transfer::{Taken, Task, Transfers};

type Frame = input::Frame<Head>;

/// What one PDU costs besides its bytes, in bytes: a turn's work is counted in these.
const PDU_COST_BYTES: usize = 4 << 10;
/// After so much work a connection lets others run.
const TURN_BYTES: usize = 4 << 20;

/// Why a batch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchEnd {
    /// All whole PDUs are taken.
    NeedsInput,
    /// Answers have to be sent, or tasks have to end, before the next one is taken.
    Full,
    /// The connection had its turn.
    TurnOver,
    /// The initiator has logged out.
    LoggedOut,
}

pub struct Batch {
    pub input: Input<PduFraming>,
    pub answers: Answers,
    pub tasks: Tasks,
    pub transfers: Transfers,
    pub requests: Requests,
    disk: Option<Disk>,
    turn_bytes: usize,
    /// When the PDUs of this batch were taken.
    taken: Instant,
    sampler: Sampler,
}

impl Batch {
    pub fn new(session: &Session, requests: Requests) -> Self {
        let digests = session.digests();
        let framing = PduFraming { digests, data_bytes_max: OUR_DATA_BYTES_MAX };
        let answers = Answers {
            output: Default::default(),
            numbers: session.numbers,
            digests,
            parameters: session.parameters,
            descriptor_sense: false,
        };
        Self {
            input: Input::new(framing),
            answers,
            tasks: Tasks::default(),
            transfers: Transfers::new(session.parameters),
            requests,
            disk: session.disk().cloned(),
            turn_bytes: TURN_BYTES,
            taken: Instant::now(),
            sampler: Sampler::default(),
        }
    }

    pub fn new_turn(&mut self) {
        self.turn_bytes = TURN_BYTES;
    }

    /// Takes whole PDUs from the input and answers or starts them.
    ///
    /// # Errors
    /// When the input is not iSCSI, or the device panicked.
    pub fn run(&mut self) -> Result<BatchEnd, ConnectionError> {
        let Some(first) = self.input.first()? else { return Ok(BatchEnd::NeedsInput) };
        let counters = self.disk.as_ref().map(|disk| disk.counters.clone());
        self.taken = counters.as_ref().map_or_else(Instant::now, |counters| counters.begin_batch());
        let mut counts = BatchCounts::default();
        // A panic must not close the socket before the connection is drained.
        let end = catch_unwind(AssertUnwindSafe(|| self.take_all(first, &mut counts)));
        if let Some(counters) = counters {
            counters.end_batch(self.taken, &counts);
        }
        end.unwrap_or_else(|_| Err(ConnectionError::Panicked("a command".into())))
    }

    fn take_all(
        &mut self,
        first: Frame,
        counts: &mut BatchCounts,
    ) -> Result<BatchEnd, ConnectionError> {
        let mut next = Some(first);
        while let Some(frame) = next {
            if let Some(end) = self.one(frame, counts)? {
                return Ok(end);
            }
            next = self.input.first()?;
        }
        Ok(BatchEnd::NeedsInput)
    }

    /// Takes one PDU, or says why not.
    fn one(
        &mut self,
        frame: Frame,
        counts: &mut BatchCounts,
    ) -> Result<Option<BatchEnd>, ConnectionError> {
        if self.turn_bytes == 0 {
            return Ok(Some(BatchEnd::TurnOver));
        }
        let head = frame.head;
        let starts = matches!(head.opcode(), request::SCSI_COMMAND | request::TEXT);
        // Pings and task management are taken as long as their answers are.
        if !self.answers.output.accepts() || starts && self.tasks.is_full() {
            return Ok(Some(BatchEnd::Full));
        }
        if head.opcode() == request::SCSI_COMMAND {
            if !self.has_room(&head) {
                return Ok(Some(BatchEnd::Full));
            }
            // What was granted does not bound these.
            if head.is_immediate() && self.open() >= COMMANDS_MAX as usize {
                self.answers.reject(reject::TOO_MANY_IMMEDIATE, &head);
                self.input.skip(frame);
                self.turn_bytes = self.turn_bytes.saturating_sub(PDU_COST_BYTES);
                return Ok(None);
            }
        }
        let mut cost_bytes = head.data_bytes() as usize;
        if is_numbered(&head) {
            match self.answers.numbers.judge(head.cmd_sn(), head.is_immediate()) {
                Turn::Now => self.answers.numbers.take(head.is_immediate()),
                Turn::Never => {
                    self.input.skip(frame);
                    return Ok(None);
                }
                Turn::Gap => return Err(ConnectionError::Protocol("a command is missing")),
            }
        }
        let payload = self.input.payload(&frame);
        let data = match self.answers.digests.data(&head, payload) {
            Ok(data) => data,
            Err(error) => {
                self.answers.reject(reject::DATA_DIGEST, &head);
                return Err(error.into());
            }
        };
        let mut work = Work {
            head,
            disk: self.disk.as_ref(),
            answers: &mut self.answers,
            tasks: &mut self.tasks,
            transfers: &mut self.transfers,
            sampler: &mut self.sampler,
            counts,
            taken: self.taken,
        };
        let mut logged_out = false;
        match head.opcode() {
            request::SCSI_COMMAND => cost_bytes += work.command(data),
            request::DATA_OUT => work.data_out(data),
            _ => logged_out = self.requests.take(&head, data, &mut work)?,
        }
        self.input.skip(frame);
        let open = self.open();
        self.answers.numbers.grant(open);
        self.turn_bytes = self.turn_bytes.saturating_sub(PDU_COST_BYTES + cost_bytes);
        Ok(logged_out.then_some(BatchEnd::LoggedOut))
    }

    /// To be called when tasks have ended: writes may have waited for that.
    pub fn ask_for_data(&mut self) {
        ask_for_data(&mut self.transfers, &self.tasks, &mut self.answers);
    }

    /// Commands that are not answered yet.
    fn open(&self) -> usize {
        self.tasks.len() + self.transfers.len()
    }

    /// Whether a read's data fit the output now, or never will.
    fn has_room(&mut self, head: &Head) -> bool {
        if !head.has(flag::READ) || self.answers.output.is_empty() {
            return true;
        }
        let length = self.answers.data_in_bytes(head.ttt() as usize);
        length > BUFFER_BYTES || self.answers.output.room(length).is_some()
    }

    /// Adds the answer to what has ended.
    pub fn ended(&mut self, ready: Ready) {
        // There is room for one more command now, and the answer says so.
        self.answers.numbers.grant(self.open());
        match ready {
            Ready::Command(task, outcome) => {
                if let Some(disk) = &self.disk {
                    self.answers.descriptor_sense = disk.unit.settings().descriptor_sense;
                }
                self.answers.outcome(&task, outcome);
            }
            Ready::Management { itt, response } => self.answers.managed(itt, response),
            Ready::Text { itt, text } => self.requests.begin_text(itt, text, &mut self.answers),
        }
    }
}

/// Whether the PDU has a place in the order of commands.
fn is_numbered(head: &Head) -> bool {
    matches!(
        head.opcode(),
        request::SCSI_COMMAND
            | request::TASK_MANAGEMENT
            | request::TEXT
            | request::LOGOUT
            | request::NOP_OUT
    )
}

/// One PDU, and what it may change.
pub struct Work<'a> {
    pub head: Head,
    pub disk: Option<&'a Disk>,
    pub answers: &'a mut Answers,
    pub tasks: &'a mut Tasks,
    pub transfers: &'a mut Transfers,
    sampler: &'a mut Sampler,
    counts: &'a mut BatchCounts,
    taken: Instant,
}

impl Work<'_> {
    /// A SCSI command. The bytes that were read for it.
    fn command(&mut self, data: &[u8]) -> usize {
        let head = self.head;
        let Some(disk) = self.disk else {
            self.answers.reject(reject::PROTOCOL, &head);
            return 0;
        };
        let expected = head.ttt();
        let cdb = head.cdb();
        let blocks = disk.blocks();
        let expected_in = if head.has(flag::READ) { expected } else { 0 };
        let expected_out = if head.has(flag::WRITE) { expected } else { 0 };
        let task = |command| Task::new(head.itt(), command, expected_in, expected_out);
        let parsed = parse(&cdb, blocks);
        if head.lun() != [0; 8] {
            let command = parsed.unwrap_or(Command::TestUnitReady);
            let outcome = of_no_unit(&command, self.answers.descriptor_sense);
            self.answers.outcome(&task(command), outcome);
            return 0;
        }
        let admitted = parsed
            .map_err(Outcome::from)
            .and_then(|command| disk.admit(&command).map(|()| command));
        match admitted {
            Ok(Command::Read { range, fua: false })
                if u64::from(expected_in) == range.length_bytes && expected_out == 0 =>
            {
                return self.read(disk, task(Command::Read { range, fua: false }), range);
            }
            Ok(command) if command.data_out_bytes() > 0 || expected_out > 0 && command.writes() => {
                self.write(disk, task(command), data, !head.has(flag::FINAL));
            }
            Ok(command) => match disk.answer_now(&command, blocks) {
                Some(outcome) => self.answers.outcome(&task(command), outcome),
                None => self.tasks.start(disk, task(command), Bytes::new(), self.taken),
            },
            Err(outcome) => {
                self.answers.descriptor_sense = disk.unit.settings().descriptor_sense;
                self.answers.outcome(&task(Command::TestUnitReady), outcome);
            }
        }
        0
    }

    fn read(&mut self, disk: &Disk, task: Task, range: Range) -> usize {
        let length = range.transfer_bytes();
        if length == 0 {
            self.answers.outcome(&task, Outcome::DONE);
            return 0;
        }
        let Self { answers, sampler, taken, .. } = self;
        let filled = answers.fill_data_in(task.itt, length, |at, piece| {
            let (offset, size) = (range.offset + at as u64, piece.len());
            let read = || disk.device.try_read(offset, piece);
            let tried = sampler.measure(&disk.counters, "read", offset, size, read);
            tried.map_or(Err(None), |result| result.map_err(Some))
        });
        match filled {
            Some(Ok(())) => self.counts.read(length),
            Some(Err(Some(error))) => {
                self.answers.outcome(&task, Sense::of(&error, false).into());
            }
            Some(Err(None)) | None => self.tasks.start(disk, task, Bytes::new(), *taken),
        }
        length
    }

    /// A command that comes with data, or some of them.
    fn write(&mut self, disk: &Disk, task: Task, data: &[u8], more: bool) {
        let complete = data.len() == task.expected_out as usize;
        if complete && !more && data.len() <= task.wanted_out {
            return self.gathered(disk, task, Cow::Borrowed(data));
        }
        let taken = self.transfers.begin(task, data, more);
        self.transferred(disk, taken);
    }

    fn data_out(&mut self, data: &[u8]) {
        let Some(disk) = self.disk else {
            let head = self.head;
            return self.answers.reject(reject::PROTOCOL, &head);
        };
        let taken = self.transfers.data_out(&self.head, data);
        self.transferred(disk, taken);
    }

    fn transferred(&mut self, disk: &Disk, taken: Taken) {
        match taken {
            Taken::Part | Taken::Unknown => {}
            Taken::Whole(task, data) => self.gathered(disk, task, Cow::Owned(data)),
            Taken::Misfit(task) => self.answers.outcome(&task, Sense::DATA_PHASE.into()),
        }
        self.ask_for_data();
    }

    /// To be called when writes have changed: others may have their turn.
    pub fn ask_for_data(&mut self) {
        ask_for_data(self.transfers, self.tasks, self.answers);
    }

    /// A command whose data are all here.
    fn gathered(&mut self, disk: &Disk, task: Task, data: Cow<'_, [u8]>) {
        let Some((task, length)) = task.cut_to(data.len()) else {
            return self.answers.outcome(&task, Sense::invalid_field(0).into());
        };
        if !self.write_now(disk, &task, &data[..length]) {
            let mut data = Bytes::from(data.into_owned());
            data.truncate(length);
            self.tasks.start(disk, task, data, self.taken);
        }
    }

    /// False when the write has to wait, or is none.
    fn write_now(&mut self, disk: &Disk, task: &Task, data: &[u8]) -> bool {
        let Command::Write { range, fua: false } = task.command else { return false };
        if data.len() > AT_ONCE_BYTES_MAX {
            return false;
        }
        let write = || disk.try_write(range, data);
        let (counters, length) = (&disk.counters, data.len());
        let tried = self.sampler.measure(counters, "write", range.offset, length, write);
        let Some(result) = tried else { return false };
        counters.note(&result);
        match result {
            Ok(()) => {
                self.counts.write(length);
                self.answers.outcome(task, Outcome::DONE);
            }
            Err(error) => self.answers.outcome(task, Sense::of(&error, true).into()),
        }
        true
    }
}

fn ask_for_data(transfers: &mut Transfers, tasks: &Tasks, answers: &mut Answers) {
    for ready in transfers.ready(tasks.held_bytes()) {
        answers.ready_to_transfer(&ready);
    }
}

/// What a unit that is not there still answers.
fn of_no_unit(command: &Command, descriptors: bool) -> Outcome {
    match *command {
        Command::Inquiry { page: None, allocated_bytes } => {
            Outcome::answer(inquiry::standard(false), allocated_bytes)
        }
        Command::ReportLuns { select, allocated_bytes } => report::luns(select, allocated_bytes),
        Command::RequestSense { allocated_bytes, .. } => {
            Outcome::answer(Sense::UNKNOWN_UNIT.encode(descriptors), allocated_bytes)
        }
        _ => Sense::UNKNOWN_UNIT.into(),
    }
}
