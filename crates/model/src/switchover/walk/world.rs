//! The world that is walked: hosts with their agents and QEMUs, the volumes' homes, the controller,
//! and the messages that were ever sent. What is decided in it, production's functions decide.

use std::sync::LazyLock;

use crate::job::MigrationState;
use crate::starts::{OnDelete, OnStart, Starts};
use crate::states::{MigrationEvent, VmEvent};
use crate::switchover::*;
use crate::vm::{MigrationPhase, VmStatus};
use crate::volume::EpochChange;
use crate::{Epoch, MigrationId, VmStart};

pub const HOSTS: usize = 3;
pub const MOVES: usize = 2;

static IDS: LazyLock<Vec<MigrationId>> = LazyLock::new(|| {
    (0..MOVES).map(|number| MigrationId::new(format!("vm-m{number}")).unwrap()).collect()
});

pub fn id(number: u8) -> &'static MigrationId {
    &IDS[usize::from(number)]
}

/// The start at the destination of the migration with this index; `None`: where the VM booted.
fn start(number: Option<u8>) -> VmStart {
    VmStart::default().by_migration(number.map_or(0, |number| u32::from(number) + 1))
}

/// What really happens to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guest {
    /// Its state has not come yet.
    Awaited,
    Stopped,
    Running,
    /// Its QEMU has ended.
    Dead,
}

/// An agent's record of an outgoing migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    pub number: u8,
    pub phase: MigrationPhase,
    pub at: Switchover,
}

/// The migration's task in an agent, with what the homes have answered to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Task {
    pub machine: Outgoing,
    pub begun: bool,
    pub raised: [bool; 2],
    pub flipped_back: [bool; 2],
}

impl Task {
    pub fn new(machine: Outgoing, begun: bool) -> Self {
        Self { machine, begun, raised: [false; 2], flipped_back: [false; 2] }
    }
}

/// One VM at one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Vm {
    pub arrives_by: Option<u8>,
    pub epoch: u64,
    /// How often the VM was handed over before it came here.
    pub line: u8,
    // QEMU:
    pub guest: Guest,
    pub sending: Sending,
    // On the agent's disk:
    pub arrival: Arrival,
    pub stored: Option<Record>,
    // In the agent's memory:
    pub known: Option<Record>,
    pub status: VmStatus,
    pub task: Option<Task>,
}

impl Vm {
    /// It waits for a migration.
    fn awaited(number: u8, epoch: u64, line: u8) -> Self {
        Self {
            arrives_by: Some(number),
            epoch,
            line,
            guest: Guest::Awaited,
            sending: Sending::Ended,
            arrival: Arrival::Waits,
            stored: None,
            known: None,
            status: VmStatus::Incoming,
            task: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Host {
    pub vm: Option<Vm>,
    pub is_down: bool,
    // On the agent's disk:
    pub ended: Option<(u8, Arrival)>,
    pub ended_start: Option<VmStart>,
}

impl Host {
    fn starts(&self) -> Starts {
        Starts { here: self.vm.map(|vm| start(vm.arrives_by)), ended: self.ended_start }
    }
}

/// One migration as the controller's store has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Move {
    pub from: usize,
    pub to: usize,
    pub epochs: EpochChange,
    pub state: MigrationState,
    /// In the driver's memory only.
    pub calls_off: bool,
    /// How often the VM was handed over when it arrives.
    pub line: u8,
    /// QEMU has sent the last state: it may be loaded at any later time.
    pub is_sent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    Order,
    Cancel,
    Raise(usize),
    FlipBack(usize),
    EndUnlessRan,
    /// Start the VM that waits at the destination.
    Start,
    /// Delete what this host has of the starts up to this migration's.
    Delete(usize),
}

impl Message {
    const ALL: [Self; 11] = [
        Self::Order,
        Self::Cancel,
        Self::Raise(0),
        Self::Raise(1),
        Self::FlipBack(0),
        Self::FlipBack(1),
        Self::EndUnlessRan,
        Self::Start,
        Self::Delete(0),
        Self::Delete(1),
        Self::Delete(2),
    ];

    fn bit(self, number: u8) -> u32 {
        let at = Self::ALL.iter().position(|message| *message == self).unwrap();
        1 << (usize::from(number) * Self::ALL.len() + at)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct World {
    pub hosts: [Host; HOSTS],
    pub homes: [WriterEpochs; 2],
    pub volumes: usize,
    pub moves: [Option<Move>; MOVES],
    /// Where the job believes that its VM is.
    pub at: usize,
    /// Every message that was ever sent: each may come once more at any time.
    pub sent: u32,
    /// A QEMU was killed or an agent's disk was lost.
    pub is_hurt: bool,
    /// The VM runs that was handed over most often.
    pub line_max: u8,
}

/// The answer to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Ok,
    Refused,
    Fate(Fate),
    None,
}

impl World {
    pub fn start(volumes: usize) -> Self {
        let epochs =
            WriterEpochs { current: Epoch(1), issued_max: Epoch(1), returned_max: Epoch(0) };
        let vm = Vm {
            arrives_by: None,
            epoch: 1,
            line: 0,
            guest: Guest::Running,
            sending: Sending::Ended,
            arrival: Arrival::Ran,
            stored: None,
            known: None,
            status: VmStatus::Running,
            task: None,
        };
        let mut hosts = [Host::default(); HOSTS];
        hosts[0].vm = Some(vm);
        Self {
            hosts,
            homes: [epochs; 2],
            volumes,
            moves: [None; MOVES],
            at: 0,
            sent: 0,
            is_hurt: false,
            line_max: 0,
        }
    }

    pub fn the_move(&self, number: u8) -> Move {
        self.moves[usize::from(number)].expect("it was begun")
    }

    pub fn move_mut(&mut self, number: u8) -> &mut Move {
        self.moves[usize::from(number)].as_mut().expect("it was begun")
    }

    pub fn vm(&mut self, host: usize) -> &mut Vm {
        self.hosts[host].vm.as_mut().expect("the VM is here")
    }

    /// The last move, if it has not ended.
    pub fn open_move(&self) -> Option<u8> {
        let number = self.moves.iter().flatten().count().checked_sub(1)?;
        let open = !self.moves[number]?.state.is_final();
        open.then(|| u8::try_from(number).unwrap())
    }

    /// Sends a message: it is lost, or comes without the answer, or with it.
    pub fn call(&self, number: u8, message: Message) -> Vec<(Self, Answer)> {
        let mut lost = *self;
        lost.sent |= message.bit(number);
        let mut all = vec![(lost, Answer::None)];
        if let Some((after, answer)) = lost.deliver(number, message) {
            all.extend([(after, Answer::None), (after, answer)]);
        }
        all
    }

    /// Sends a message that arrives. From now on it may come late as well.
    pub fn send(&self, number: u8, message: Message) -> Option<Self> {
        let mut sent = *self;
        sent.sent |= message.bit(number);
        sent.deliver(number, message).map(|(after, _)| after)
    }

    /// Messages that come once more, or late.
    pub fn late(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for number in (0..MOVES).map(|number| u8::try_from(number).unwrap()) {
            for message in Message::ALL {
                if self.sent & message.bit(number) != 0 {
                    all.extend(self.deliver(number, message).map(|(after, _)| after));
                }
            }
        }
        all
    }

    /// What a message does where it arrives; `None` when nobody listens there.
    fn deliver(mut self, number: u8, message: Message) -> Option<(Self, Answer)> {
        let Move { from, to, epochs, .. } = self.the_move(number);
        let answer = match message {
            Message::Order => self.listening(from)?.begin(number),
            Message::Cancel => self.listening(from)?.cancel(number),
            Message::Raise(volume) => self.change(volume, epochs),
            Message::FlipBack(volume) => {
                self.change(volume, EpochChange { from: epochs.to, to: epochs.from })
            }
            Message::EndUnlessRan => Answer::Fate(self.end_unless_ran(to, number)?),
            Message::Start => self.start_awaited(number)?,
            Message::Delete(host) => self.delete(host, start(Some(number)))?,
        };
        Some((self, answer))
    }

    fn listening(&mut self, host: usize) -> Option<&mut Vm> {
        let host = &mut self.hosts[host];
        if host.is_down { None } else { host.vm.as_mut() }
    }

    fn change(&mut self, volume: usize, change: EpochChange) -> Answer {
        match self.homes[volume].apply(change) {
            Ok(after) => {
                self.homes[volume] = after;
                Answer::Ok
            }
            Err(_) => Answer::Refused,
        }
    }

    /// As the agent's owner of the VM does it.
    fn end_unless_ran(&mut self, host: usize, asked: u8) -> Option<Fate> {
        if self.hosts[host].is_down {
            return None;
        }
        let Some(mut vm) = self.hosts[host].vm else {
            let last = self.hosts[host].ended;
            return Some(fate(last.map(|(number, arrival)| (id(number), arrival)), id(asked)));
        };
        let Some(own) = vm.arrives_by else { return Some(Fate::NotKnown) };
        if own == asked && vm.arrival == Arrival::Waits {
            vm.look();
            if vm.on_arrival() == ArrivalStep::Store {
                vm.arrival = Arrival::Ran;
            }
            self.hosts[host].vm = Some(vm);
        }
        let answer = fate(Some((id(own), vm.arrival)), id(asked));
        if answer == Fate::DidNotRun {
            self.delete(host, start(Some(own)));
        }
        Some(answer)
    }

    /// The destination's agent is asked for the VM that waits.
    fn start_awaited(&mut self, number: u8) -> Option<Answer> {
        let Move { to, epochs, line, .. } = self.the_move(number);
        if self.hosts[to].is_down {
            return None;
        }
        Some(match self.hosts[to].starts().on_start(start(Some(number))) {
            Ok(OnStart::Begin) => {
                self.hosts[to].vm = Some(Vm::awaited(number, epochs.to.0, line));
                Answer::Ok
            }
            Ok(OnStart::Same) => Answer::Ok,
            Ok(OnStart::EndFirst(older)) => {
                self.delete(to, older);
                return self.start_awaited(number);
            }
            Err(_) => Answer::Refused,
        })
    }

    fn delete(&mut self, host: usize, up_to: VmStart) -> Option<Answer> {
        let host = &mut self.hosts[host];
        if host.is_down {
            return None;
        }
        let (act, ended) = host.starts().on_delete(up_to);
        host.ended_start = Some(ended);
        match act {
            OnDelete::Nothing => {}
            OnDelete::Leave(_) => return Some(Answer::Refused),
            OnDelete::End => {
                let vm = host.vm.take()?;
                if let Some(number) = vm.arrives_by {
                    host.ended = Some((number, vm.arrival));
                }
            }
        }
        Some(Answer::Ok)
    }

    pub fn end_move(&mut self, number: u8, event: MigrationEvent) {
        let state = &mut self.move_mut(number).state;
        if event == MigrationEvent::Arrived {
            for before in [MigrationEvent::Sending, MigrationEvent::Paused] {
                *state = state.next(before).unwrap_or(*state);
            }
        }
        *state = state.next(event).expect("it has not ended");
    }
}

impl Vm {
    /// The owner asks QEMU. No answer of QEMU may be one that the state machine refuses.
    pub fn look(&mut self) {
        let event = match self.guest {
            Guest::Awaited => VmEvent::Waits,
            Guest::Stopped => VmEvent::Stopped,
            Guest::Running => VmEvent::Resumed,
            Guest::Dead => VmEvent::ProcessEnded,
        };
        let moved_and_let_run = self.status == VmStatus::Migrated && event == VmEvent::Resumed;
        let was_gone = self.status == VmStatus::Gone;
        if moved_and_let_run || was_gone {
            return;
        }
        self.status = self.status.next(event).expect("QEMU says what is possible");
    }

    pub fn on_arrival(&self) -> ArrivalStep {
        let migrates = self.known.is_some_and(|record| !record.phase.is_final());
        let at = self.known.map_or(Switchover::Source, |record| record.at);
        on_arrival(self.status, self.arrival, !migrates && at.may_source_run())
    }

    /// What the agent tells the controller.
    pub fn seen(&self) -> SeenVm<'static> {
        SeenVm {
            status: self.arrival.told(self.status),
            outgoing: self.known.map(|record| (id(record.number), record.phase)),
            arrives_by: self.arrives_by.map(id),
        }
    }

    fn begin(&mut self, number: u8) -> Answer {
        match may_begin(self.status, self.last(), u32::from(number)) {
            Ok(false) => Answer::Ok,
            Err(_) => Answer::Refused,
            Ok(true) => {
                let record =
                    Record { number, phase: MigrationPhase::Setup, at: Switchover::Source };
                self.keep(record);
                let machine = Outgoing::new(Switchover::Source);
                self.task = Some(Task::new(machine, false));
                Answer::Ok
            }
        }
    }

    fn cancel(&mut self, number: u8) -> Answer {
        let at = self.known.map_or(Switchover::Source, |record| record.at);
        match on_cancel(self.last(), at, u32::from(number)) {
            Err(_) => return Answer::Refused,
            Ok(OnCancel::Nothing) => {}
            Ok(OnCancel::Stop) => {
                if let Some(task) = &mut self.task {
                    task.machine.cancel();
                }
            }
            Ok(OnCancel::Store) => {
                let phase = MigrationPhase::Cancelled;
                self.keep(Record { number, phase, at: Switchover::Source });
            }
        }
        Answer::Ok
    }

    fn last(&self) -> Option<(u32, MigrationPhase)> {
        self.known.map(|record| (u32::from(record.number), record.phase))
    }

    pub fn keep(&mut self, record: Record) {
        (self.known, self.stored) = (Some(record), Some(record));
    }
}
