//! What each party may do next, in every way that it can turn out.

use super::world::*;
use crate::job::MigrationState;
use crate::states::{MigrationEvent, VmEvent};
use crate::switchover::*;
use crate::vm::{MigrationPhase, VmStatus};
use crate::volume::EpochChange;

/// How the second move goes on from the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scenario {
    pub volumes: usize,
    pub targets: &'static [usize],
    /// QEMUs are killed and agents lose their disks.
    pub has_faults: bool,
}

impl World {
    /// Every world that can follow when a message comes late, or once more.
    pub fn next_late(&self) -> Vec<World> {
        let mut all = self.late();
        all.iter_mut().for_each(World::settle);
        all
    }

    /// Every world that can follow by what somebody does now.
    pub fn next(&self, scenario: Scenario) -> Vec<World> {
        let mut all = self.controller(scenario);
        for host in 0..HOSTS {
            if self.hosts[host].vm.is_some() {
                all.extend(self.qemu(host));
                all.extend(self.agent(host));
                if scenario.has_faults {
                    all.extend(self.fault(host));
                }
            }
        }
        for world in &mut all {
            world.settle();
        }
        all
    }

    /// Owners look at their QEMUs; what runs is noted.
    fn settle(&mut self) {
        for host in &mut self.hosts {
            let Some(vm) = &mut host.vm else { continue };
            if !host.is_down {
                vm.look();
            }
            if vm.guest == Guest::Running {
                self.line_max = self.line_max.max(vm.line);
            }
        }
    }

    /// What QEMU does by itself. A migration that fails in the pause lets the guest run.
    fn qemu(&self, host: usize) -> Vec<World> {
        let vm = self.hosts[host].vm.expect("asked for it");
        let mut all = Vec::new();
        let mut with = |change: &dyn Fn(&mut World)| {
            let mut world = *self;
            change(&mut world);
            all.push(world);
        };
        if let Some(number) = vm.arrives_by
            && vm.guest == Guest::Awaited
            && self.the_move(number).is_sent
        {
            with(&|world| world.vm(host).guest = Guest::Stopped);
        }
        if vm.guest == Guest::Dead {
            return all;
        }
        let fails = |world: &mut World| {
            let vm = world.vm(host);
            (vm.sending, vm.guest) = (Sending::Ended, Guest::Running);
        };
        match vm.sending {
            Sending::Copying => {
                with(&|world| {
                    let vm = world.vm(host);
                    (vm.sending, vm.guest) = (Sending::AtSwitch, Guest::Stopped);
                });
                with(&fails);
            }
            Sending::AtSwitch => with(&fails),
            Sending::BehindSwitch => {
                let number = vm.stored.expect("it was ordered").number;
                let there = self.hosts[self.the_move(number).to].vm;
                let there = there.filter(|there| there.arrives_by == Some(number));
                if there.is_some_and(|there| there.guest == Guest::Awaited) {
                    with(&|world| world.move_mut(number).is_sent = true);
                }
                let loaded = |guest| matches!(guest, Guest::Stopped | Guest::Running);
                if there.is_some_and(|there| loaded(there.guest)) {
                    with(&|world| world.vm(host).sending = Sending::Completed);
                }
                with(&fails);
            }
            Sending::Ending | Sending::Completed | Sending::Ended => {}
        }
        all
    }

    fn fault(&self, host: usize) -> Vec<World> {
        let mut killed = *self;
        killed.is_hurt = true;
        let vm = killed.vm(host);
        (vm.guest, vm.sending) = (Guest::Dead, Sending::Ended);
        let mut lost = *self;
        lost.is_hurt = true;
        lost.hosts[host].is_down = true;
        (lost.hosts[host].ended, lost.hosts[host].ended_start) = (None, None);
        let vm = lost.vm(host);
        if vm.arrives_by.is_some() {
            vm.arrival = Arrival::NotKnown;
        }
        (vm.known, vm.task) = (None, None);
        vec![killed, lost]
    }

    fn agent(&self, host: usize) -> Vec<World> {
        let mut all = Vec::new();
        if self.hosts[host].is_down {
            let mut back = *self;
            back.hosts[host].is_down = false;
            back.vm(host).adopt();
            return vec![back];
        }
        let mut crashed = *self;
        crashed.hosts[host].is_down = true;
        let vm = crashed.vm(host);
        (vm.known, vm.task, vm.status) = (None, None, VmStatus::Starting);
        all.push(crashed);
        match self.hosts[host].vm.expect("asked for it").on_arrival() {
            ArrivalStep::Nothing => {}
            ArrivalStep::Store => {
                let mut stored = *self;
                stored.vm(host).arrival = Arrival::Ran;
                all.push(stored);
            }
            ArrivalStep::Run => {
                let mut runs = *self;
                runs.vm(host).guest = Guest::Running;
                all.push(runs);
            }
        }
        if self.hosts[host].vm.is_some_and(|vm| vm.task.is_some()) {
            all.extend(self.migrate(host));
        }
        all
    }

    /// The next step of an outgoing migration at its source.
    fn migrate(&self, host: usize) -> Vec<World> {
        let mut world = *self;
        let vm = *world.vm(host);
        let number = vm.known.expect("it has a record").number;
        let mut task = vm.task.expect("asked for it");
        if !task.begun {
            return world.begin(host);
        }
        let mut all = Vec::new();
        if !task.machine.is_greeted() && !task.machine.is_given_up() {
            all.extend(world.greet(host, number));
        }
        let step = task.machine.step(vm.sending).expect("QEMU is as far as it was told");
        world.vm(host).task = Some(task);
        all.extend(world.take_step(host, number, step));
        all
    }

    fn take_step(mut self, host: usize, number: u8, step: Step) -> Vec<World> {
        let vm = self.vm(host);
        match step {
            // The agent may see at any time of the copying that the switch comes soon.
            Step::Wait if vm.sending == Sending::Copying => {
                let mut near = self;
                near.vm(host).task.as_mut().unwrap().machine.near_switch();
                vec![self, near]
            }
            Step::Wait => vec![self],
            Step::Store => self.store_switch(host),
            Step::Raise => {
                self.vm(host).task.as_mut().unwrap().machine.raising().expect("it is due");
                let mut all = self.ask_homes(host, number, Message::Raise);
                let mut late = self;
                late.vm(host).task.as_mut().unwrap().machine.give_up();
                all.push(late);
                all
            }
            Step::LetGo => self.let_go(host),
            Step::StopSending => {
                let vm = self.vm(host);
                (vm.sending, vm.guest) = (Sending::Ended, Guest::Running);
                vec![self]
            }
            Step::AskDestination => {
                self.hold(host);
                self.ask_destination(host, number)
            }
            Step::FlipBack => {
                self.hold(host);
                self.vm(host).note(true);
                self.ask_homes(host, number, Message::FlipBack)
            }
            Step::Resume => self.end_task(host, MigrationPhase::Failed),
            Step::Complete => self.end_task(host, MigrationPhase::Completed),
        }
    }

    /// QEMU is told to send; whether that is right is asked meanwhile.
    fn begin(mut self, host: usize) -> Vec<World> {
        self.vm(host).task.as_mut().unwrap().begun = true;
        let (mut sends, mut refused) = (self, self);
        sends.vm(host).sending = Sending::Copying;
        refused.vm(host).task.as_mut().unwrap().machine.give_up();
        if self.vm(host).guest == Guest::Dead { vec![refused] } else { vec![sends, refused] }
    }

    /// The homes and the destination are asked: they agree, or not, or do not answer.
    fn greet(&self, host: usize, number: u8) -> Vec<World> {
        let Move { to, epochs, .. } = self.the_move(number);
        let there = self.hosts[to];
        let waits = there.vm.is_some_and(|vm| {
            vm.arrives_by == Some(number) && vm.guest == Guest::Awaited && !there.is_down
        });
        let homes = self.homes[..self.volumes].iter().all(|home| home.current == epochs.from);
        let (mut agreed, mut not) = (*self, *self);
        not.vm(host).task.as_mut().unwrap().machine.give_up();
        if !(waits && homes) {
            return vec![not];
        }
        agreed.vm(host).task.as_mut().unwrap().machine.greeted();
        vec![agreed, not]
    }

    fn store_switch(self, host: usize) -> Vec<World> {
        let (mut stored, mut failed) = (self, self);
        let vm = stored.vm(host);
        let machine = &mut vm.task.as_mut().unwrap().machine;
        machine.noted().expect("it is due");
        let at = machine.at().stored();
        vm.keep(Record { at, ..vm.known.unwrap() });
        failed.vm(host).task.as_mut().unwrap().machine.give_up();
        vec![stored, failed]
    }

    /// Told, or told without an answer, or not told and without an answer.
    fn let_go(mut self, host: usize) -> Vec<World> {
        self.vm(host).task.as_mut().unwrap().machine.letting_go().expect("it is due");
        let mut told = self;
        told.vm(host).sending = Sending::BehindSwitch;
        let (mut unanswered, mut untold) = (told, self);
        for world in [&mut unanswered, &mut untold] {
            world.vm(host).task.as_mut().unwrap().machine.give_up();
        }
        vec![told, unanswered, untold]
    }

    fn hold(&mut self, host: usize) {
        let vm = self.vm(host);
        if vm.guest == Guest::Running {
            vm.guest = Guest::Stopped;
        }
    }

    /// One home after the other, in any order; the next step is taken when all have answered.
    fn ask_homes(self, host: usize, number: u8, ask: fn(usize) -> Message) -> Vec<World> {
        let is_raise = ask(0) == Message::Raise(0);
        let mut all = Vec::new();
        for volume in 0..self.volumes {
            for (mut world, answer) in self.call(number, ask(volume)) {
                let volumes = world.volumes;
                let vm = world.vm(host);
                let task = vm.task.as_mut().unwrap();
                let answered = if is_raise { &mut task.raised } else { &mut task.flipped_back };
                match answer {
                    Answer::None | Answer::Fate(_) => {}
                    Answer::Refused if is_raise => task.machine.give_up(),
                    Answer::Refused | Answer::Ok => answered[volume] = true,
                }
                if answered[..volumes].iter().all(|answered| *answered) {
                    if is_raise {
                        task.machine.raised();
                    } else {
                        task.machine.flipped_back().expect("it is due");
                    }
                }
                all.push(world);
            }
        }
        all
    }

    /// The destination, or a home whose epoch was never raised: then QEMU was never let go.
    fn ask_destination(self, host: usize, number: u8) -> Vec<World> {
        let mut all = Vec::new();
        let from = self.the_move(number).epochs.from;
        if self.homes[..self.volumes].iter().any(|home| home.current == from) {
            let mut never = self;
            let machine = &mut never.vm(host).task.as_mut().unwrap().machine;
            machine.answered(Fate::DidNotRun).expect("it is due");
            let mut unsaved = never;
            unsaved.vm(host).note(false);
            never.vm(host).note(true);
            all.extend([never, unsaved]);
        }
        for (mut world, answer) in self.call(number, Message::EndUnlessRan) {
            if let Answer::Fate(fate) = answer {
                let machine = &mut world.vm(host).task.as_mut().unwrap().machine;
                machine.answered(fate).expect("it is due");
                let mut unsaved = world;
                unsaved.vm(host).note(false);
                all.push(unsaved);
                world.vm(host).note(true);
            }
            all.push(world);
        }
        all
    }

    fn end_task(mut self, host: usize, phase: MigrationPhase) -> Vec<World> {
        if phase == MigrationPhase::Completed {
            self.hold(host);
        }
        let vm = self.vm(host);
        vm.note(true);
        let before = vm.stored;
        if phase == MigrationPhase::Completed {
            vm.status = vm.status.next(VmEvent::HandedOver).expect("it was handed over");
        } else if vm.guest == Guest::Stopped {
            vm.guest = Guest::Running;
        }
        vm.task = None;
        vm.keep(Record { phase, ..vm.known.unwrap() });
        let mut unsaved = self;
        unsaved.vm(host).stored = before;
        vec![self, unsaved]
    }

    fn controller(&self, scenario: Scenario) -> Vec<World> {
        let mut all = Vec::new();
        if let Some(number) = self.open_move() {
            let mut calls_off = *self;
            calls_off.move_mut(number).calls_off = true;
            let mut crashed = *self;
            crashed.move_mut(number).calls_off = false;
            all.extend([calls_off, crashed]);
            for (hears_source, hears_destination) in [(true, true), (true, false), (false, true)] {
                all.extend(self.watch_over(number, hears_source, hears_destination));
            }
            return all;
        }
        all.extend(self.clean());
        all.extend(self.request(scenario));
        all
    }

    /// Deletes what the last move left: at its source, or at its destination.
    fn clean(&self) -> Option<World> {
        let last = self.moves.iter().flatten().count().checked_sub(1)?;
        let Move { from, to, .. } = self.moves[last]?;
        let host = if from == self.at { to } else { from };
        self.send(u8::try_from(last).unwrap(), Message::Delete(host))
    }

    fn request(&self, scenario: Scenario) -> Option<World> {
        let number = self.moves.iter().flatten().count();
        let target = *scenario.targets.get(number)?;
        let to = if target == self.at { 1 } else { target };
        let is_clean = (0..HOSTS).all(|host| host == self.at || self.hosts[host].vm.is_none());
        let here = self.hosts[self.at];
        if to == self.at || !is_clean || here.is_down || self.hosts[to].is_down {
            return None;
        }
        let vm = here.vm.filter(|vm| vm.status == VmStatus::Running)?;
        let mut world = *self;
        world.homes = world.homes.map(WriterEpochs::issue);
        let epochs = EpochChange { from: crate::Epoch(vm.epoch), to: world.homes[0].issued_max };
        world.moves[number] = Some(Move {
            from: self.at,
            to,
            epochs,
            state: MigrationState::Preparing,
            calls_off: false,
            line: vm.line + 1,
            is_sent: false,
        });
        // The source is asked only when the destination has answered that it waits.
        world.send(u8::try_from(number).unwrap(), Message::Start)
    }

    fn watch_over(&self, number: u8, source: bool, destination: bool) -> Vec<World> {
        let Move { from, to, calls_off, .. } = self.the_move(number);
        let seen = |host: usize, hears: bool| match self.hosts[host] {
            Host { is_down: true, .. } => Seen::NotKnown,
            _ if !hears => Seen::NotKnown,
            Host { vm: None, .. } => Seen::NotThere,
            Host { vm: Some(vm), .. } => Seen::Vm(vm.seen()),
        };
        let mut world = *self;
        let mut all = match judge(id(number), &seen(from, source), &seen(to, destination)) {
            Verdict::Completed => {
                world.end_move(number, MigrationEvent::Arrived);
                world.at = to;
                return vec![world];
            }
            Verdict::Aborted => {
                world.end_move(number, MigrationEvent::GivenUp);
                return vec![world];
            }
            Verdict::SourceEnded => self.end_destination(number),
            Verdict::NotBegun if !calls_off => {
                self.call(number, Message::Order).into_iter().map(|(world, _)| world).collect()
            }
            Verdict::CallOff => {
                world.move_mut(number).calls_off = true;
                vec![world]
            }
            Verdict::NotBegun | Verdict::UnderWay | Verdict::NotKnown => Vec::new(),
        };
        if calls_off {
            all.extend(self.call(number, Message::Cancel).into_iter().map(|(world, _)| world));
        }
        all
    }

    fn end_destination(&self, number: u8) -> Vec<World> {
        let mut all = Vec::new();
        for (mut world, answer) in self.call(number, Message::EndUnlessRan) {
            match answer {
                Answer::Fate(Fate::Ran) => {
                    world.end_move(number, MigrationEvent::Arrived);
                    world.at = world.the_move(number).to;
                }
                Answer::Fate(Fate::DidNotRun) => world.end_move(number, MigrationEvent::GivenUp),
                _ => {}
            }
            all.push(world);
        }
        all
    }
}

impl Vm {
    /// As an agent finds it that starts.
    fn adopt(&mut self) {
        self.known = self.stored;
        self.status = match self.stored {
            Some(record) if record.at == Switchover::Destination => VmStatus::Migrated,
            _ => VmStatus::Starting,
        };
        self.task = self.stored.filter(|record| !record.phase.is_final()).map(|record| {
            let machine = Outgoing::new(record.at);
            Task::new(machine, true)
        });
        self.look();
    }

    /// Brings the record up to date, on the disk only where that succeeds.
    fn note(&mut self, saved: bool) {
        let at = self.task.as_ref().unwrap().machine.at().stored();
        let record = Record { at, ..self.known.unwrap() };
        self.known = Some(record);
        if saved {
            self.stored = Some(record);
        }
    }
}
