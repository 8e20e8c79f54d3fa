//! Runs commands that need no waiting at once, directly from and into the buffers.

use std::borrow::Cow;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use perigee_block::device::Device;
use perigee_block::measured::Measured;
use perigee_block::stream::AT_ONCE_BYTES_MAX;
use perigee_block::stream::buffers::BUFFER_BYTES;
use perigee_block::stream::connection::{Exchange, Taken};
use perigee_block::stream::input::{self, Input};
use perigee_block::stream::output::Output;

use super::answers::Answers;
use super::execute::Disk;
use super::pdu::{Head, PduFraming, flag, reject, request};
use super::requests::Requests;
use super::scsi::command::{Command, Range, parse};
use super::scsi::sense::Sense;
use super::scsi::{Outcome, inquiry, report};
use super::session::{COMMANDS_MAX, CommandOrder, Session};
use super::tasks::{Ready, Tasks};
use super::text::OUR_DATA_BYTES_MAX;
use super::transfer::{self, Task, Transfers};
use super::unit::Place;
use super::{ConnectionError, Shared};

type Frame = input::Frame<Head>;

/// The PDUs of one session.
pub(super) struct Batch {
    input: Input<PduFraming>,
    answers: Answers,
    tasks: Tasks,
    transfers: Transfers,
    requests: Requests,
    disk: Option<Disk>,
    /// The session's place at its unit, through which other sessions may end its tasks. A discovery session
    /// has none.
    place: Option<Place>,
    silence_max: Duration,
}

impl Exchange for Batch {
    type Framing = PduFraming;
    type Error = ConnectionError;

    /// Each read of the socket brings about one long write, and sending its answer at once would take a tenth
    /// of the cost of the write.
    const HELD_BYTES_MAX: usize = 256;

    fn input(&mut self) -> &mut Input<PduFraming> {
        &mut self.input
    }

    fn output(&mut self) -> &mut Output {
        &mut self.answers.output
    }

    fn device(&self) -> Option<&Measured> {
        self.disk.as_ref().map(|disk| &*disk.device)
    }

    fn take(&mut self, frame: Frame, now: Instant) -> Result<Taken, ConnectionError> {
        self.pdu(frame, now)
    }

    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        let ended = self.tasks.poll_next(cx).map_ok(|ready| self.ended(ready));
        // Also after aborted tasks, which have no answer: writes may have waited for them.
        ask_for_data(&mut self.transfers, &self.tasks, &mut self.answers);
        ended
    }

    fn is_idle(&self) -> bool {
        self.tasks.is_empty()
    }

    fn panicked() -> ConnectionError {
        ConnectionError::Panicked("a command".into())
    }

    fn silence_max(&self) -> Option<Duration> {
        Some(self.silence_max)
    }

    fn ask(&mut self) {
        self.answers.ping(0);
    }

    /// Another session, or this one, has asked to abort this session's tasks.
    fn poll_aborts(&mut self, cx: &mut Context<'_>) -> bool {
        let mut aborted = false;
        while let Some(place) = &mut self.place
            && let Poll::Ready(Some(done)) = place.aborts.poll_recv(cx)
        {
            self.transfers.abort_all();
            self.tasks.abort_all(done);
            aborted = true;
        }
        aborted
    }

    fn close(&mut self, because: Option<&ConnectionError>) -> bool {
        self.transfers.abort_all();
        // After a framing error the initiator still gets the answers that are in the output.
        because.is_none_or(|error| matches!(error, ConnectionError::Framing(_)))
    }
}

impl Batch {
    pub(super) fn new(
        shared: Arc<Shared>,
        session: Session,
        attached: Option<(Disk, Place)>,
    ) -> Self {
        let digests = session.digests();
        let framing = PduFraming { digests, data_bytes_max: OUR_DATA_BYTES_MAX };
        let answers = Answers {
            output: Output::default(),
            numbers: session.numbers,
            digests,
            parameters: session.parameters,
            descriptor_sense: false,
        };
        let silence_max = shared.silence_max;
        let (disk, place) = attached.unzip();
        Self {
            input: Input::new(framing),
            answers,
            tasks: Tasks::default(),
            transfers: Transfers::new(session.parameters),
            requests: Requests::new(shared, session.client, session.portal),
            disk,
            place,
            silence_max,
        }
    }

    /// Takes one PDU, or returns why it can't be taken.
    fn pdu(&mut self, frame: Frame, now: Instant) -> Result<Taken, ConnectionError> {
        let head = frame.head;
        let starts = matches!(head.opcode(), request::SCSI_COMMAND | request::TEXT);
        // Pings and task management are taken as long as there is room for their answers.
        if !self.answers.output.accepts() || starts && self.tasks.is_full() {
            return Ok(Taken::Full);
        }
        if head.opcode() == request::SCSI_COMMAND {
            if !self.has_room(&head) {
                return Ok(Taken::Full);
            }
            // The granted numbers do not limit immediate commands.
            if head.is_immediate() && self.open() >= COMMANDS_MAX as usize {
                self.answers.reject(reject::TOO_MANY_IMMEDIATE, &head);
                self.input.skip(frame);
                return Ok(Taken::Done { cost_bytes: 0 });
            }
        }
        let mut cost_bytes = head.data_bytes() as usize;
        if is_numbered(&head) {
            match self.answers.numbers.judge(head.cmd_sn(), head.is_immediate()) {
                CommandOrder::Next => self.answers.numbers.take(head.is_immediate()),
                CommandOrder::Ignore => {
                    self.input.skip(frame);
                    return Ok(Taken::Done { cost_bytes: 0 });
                }
                CommandOrder::Gap => return Err(ConnectionError::Protocol("a command is missing")),
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
            now,
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
        Ok(if logged_out { Taken::Goodbye } else { Taken::Done { cost_bytes } })
    }

    /// The number of unanswered commands.
    fn open(&self) -> usize {
        self.tasks.len() + self.transfers.len()
    }

    /// Whether a read's data fits the output now, or is too large for it anyway.
    fn has_room(&mut self, head: &Head) -> bool {
        if !head.has(flag::READ) || self.answers.output.is_empty() {
            return true;
        }
        let length = self.answers.data_in_bytes(head.ttt() as usize);
        length > BUFFER_BYTES || self.answers.output.room(length).is_some()
    }

    /// Adds the answer of a task that has ended.
    fn ended(&mut self, ready: Ready) {
        // There is room for one more command now, which the answer grants.
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

/// Whether the PDU has a command number.
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

/// One PDU, and the state that it may change.
pub struct Work<'a> {
    pub head: Head,
    pub disk: Option<&'a Disk>,
    pub answers: &'a mut Answers,
    pub tasks: &'a mut Tasks,
    pub transfers: &'a mut Transfers,
    /// When the batch began.
    now: Instant,
}

impl Work<'_> {
    /// Runs a SCSI command. Returns the number of bytes that were read for it.
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
                None => self.tasks.start(disk, task(command), Bytes::new(), self.now),
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
        let read = |device: &dyn Device| {
            self.answers.fill_data_in(task.itt, length, |at, piece| {
                device.try_read(range.offset + at as u64, piece)
            })
        };
        match disk.device.try_read_into(range.offset, length, read) {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                self.answers.outcome(&task, Sense::of(&error, false).into());
            }
            None => self.tasks.start(disk, task, Bytes::new(), self.now),
        }
        length
    }

    /// Runs a command that comes with all or a part of its data.
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

    fn transferred(&mut self, disk: &Disk, taken: transfer::Taken) {
        match taken {
            transfer::Taken::Part | transfer::Taken::Unknown => {}
            transfer::Taken::Whole(task, data) => self.gathered(disk, task, Cow::Owned(data)),
            transfer::Taken::Misfit(task) => self.answers.outcome(&task, Sense::DATA_PHASE.into()),
        }
        self.ask_for_data();
    }

    /// Asks for the data of waiting writes. It must be called when writes have changed.
    pub fn ask_for_data(&mut self) {
        ask_for_data(self.transfers, self.tasks, self.answers);
    }

    /// Runs a command whose data has fully arrived.
    fn gathered(&mut self, disk: &Disk, task: Task, data: Cow<'_, [u8]>) {
        let Some((task, length)) = task.cut_to(data.len()) else {
            return self.answers.outcome(&task, Sense::invalid_field(0).into());
        };
        if !self.write_now(disk, &task, &data[..length]) {
            let mut data = Bytes::from(data.into_owned());
            data.truncate(length);
            self.tasks.start(disk, task, data, self.now);
        }
    }

    /// Returns false if the write has to wait, or if the command is not a write.
    fn write_now(&mut self, disk: &Disk, task: &Task, data: &[u8]) -> bool {
        let Command::Write { range, fua: false } = task.command else { return false };
        if data.len() > AT_ONCE_BYTES_MAX {
            return false;
        }
        let Some(result) = disk.try_write(range, data) else { return false };
        match result {
            Ok(()) => self.answers.outcome(task, Outcome::DONE),
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

/// The answers for a unit number that does not exist.
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
