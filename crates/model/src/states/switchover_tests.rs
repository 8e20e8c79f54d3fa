//! A small model of one migration of a VM with two writable volumes: source and destination QEMU,
//! the volumes' homes, the source's agent. Every state that any sequence of events can reach is
//! looked at, with raises that are interrupted half way and a destination that dies at any moment.
//!
//! One thing is taken from QEMU: the destination runs the VM only when the whole stream has
//! arrived, and the source that has sent it all is `completed` and no longer gives up.

use std::collections::{HashMap, HashSet};

use super::*;

const SOURCE: Epoch = Epoch(1);
const DESTINATION: Epoch = Epoch(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    migration: MigrationState,
    right: WriteRight,
    /// At the volumes' homes.
    epochs: [Epoch; 2],
    source: VmStatus,
    destination: VmStatus,
    /// The source's agent has decided to go back.
    giving_up: bool,
    destination_ran: bool,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Send,
    Pause,
    Raise(usize),
    SendTheRest,
    GiveUp,
    DestinationFoundGone,
    FlipBack(usize),
    AllFlippedBack,
    ResumeSource,
    // What happens by itself:
    DestinationRuns,
    DestinationDies,
}

const ACTIONS: [Action; 13] = [
    Action::Send,
    Action::Pause,
    Action::Raise(0),
    Action::Raise(1),
    Action::SendTheRest,
    Action::GiveUp,
    Action::DestinationFoundGone,
    Action::FlipBack(0),
    Action::FlipBack(1),
    Action::AllFlippedBack,
    Action::ResumeSource,
    Action::DestinationRuns,
    Action::DestinationDies,
];

const START: World = World {
    migration: MigrationState::Preparing,
    right: WriteRight::Source,
    epochs: [SOURCE; 2],
    source: VmStatus::Running,
    destination: VmStatus::Incoming,
    giving_up: false,
    destination_ran: false,
};

impl World {
    /// The world after an action, or `None` where the machines or the facts do not allow it.
    fn after(mut self, action: Action) -> Option<World> {
        let going_on = !self.giving_up && !self.migration.is_final();
        let going_back = self.giving_up && !self.migration.is_final();
        match action {
            Action::Send if going_on => {
                self.migration = self.migration.next(MigrationEvent::Sending).ok()?;
            }
            Action::Pause if going_on => {
                self.migration = self.migration.next(MigrationEvent::Paused).ok()?;
                self.source = self.source.next(VmEvent::Stopped).ok()?;
            }
            Action::Raise(volume) if going_on && self.migration == MigrationState::Switching => {
                if self.right == WriteRight::Source {
                    self.right = self.right.next(WriteRightEvent::Raise).ok()?;
                }
                let raise = EpochChange { from: SOURCE, to: DESTINATION };
                self.epochs[volume] = raise.apply(self.epochs[volume], DESTINATION).ok()?;
            }
            Action::SendTheRest if going_on && self.epochs == [DESTINATION; 2] => {
                if self.destination != VmStatus::Incoming {
                    return None;
                }
                self.migration = self.migration.next(MigrationEvent::Arrived).ok()?;
                self.source = self.source.next(VmEvent::HandedOver).ok()?;
            }
            Action::GiveUp if going_on => self.giving_up = true,
            Action::DestinationFoundGone if going_back => {
                self.destination = VmStatus::Gone;
                self.right = self.right.next(WriteRightEvent::DestinationGone).ok()?;
            }
            Action::FlipBack(volume) if going_back && self.right == WriteRight::Nobody => {
                let flip = EpochChange { from: DESTINATION, to: SOURCE };
                self.epochs[volume] = flip.apply(self.epochs[volume], DESTINATION).ok()?;
            }
            Action::AllFlippedBack if going_back && self.epochs == [SOURCE; 2] => {
                self.right = self.right.next(WriteRightEvent::FlippedBack).ok()?;
            }
            Action::ResumeSource if going_back => {
                let back = MigrationEvent::RolledBack(self.right);
                self.migration = self.migration.next(back).ok()?;
                self.source = self.source.next(VmEvent::Resumed).ok()?;
            }
            Action::DestinationRuns if self.migration == MigrationState::Completed => {
                self.destination = self.destination.next(VmEvent::Resumed).ok()?;
                self.destination_ran = true;
            }
            Action::DestinationDies => {
                self.destination = self.destination.next(VmEvent::ProcessEnded).ok()?;
            }
            _ => return None,
        }
        Some(self)
    }

    fn can_write(&self, status: VmStatus, epoch: Epoch, volume: usize) -> bool {
        status == VmStatus::Running && self.epochs[volume] == epoch
    }
}

/// Every world that can be reached, with the worlds that follow it.
fn reachable() -> HashMap<World, Vec<World>> {
    let mut graph = HashMap::new();
    let mut waiting = vec![START];
    while let Some(world) = waiting.pop() {
        if graph.contains_key(&world) {
            continue;
        }
        let next: Vec<World> = ACTIONS.iter().filter_map(|action| world.after(*action)).collect();
        waiting.extend(&next);
        graph.insert(world, next);
    }
    graph
}

#[test]
fn never_can_both_sides_write() {
    let worlds = reachable();
    assert!(worlds.len() > 30, "the model is walked: {} worlds", worlds.len());
    for world in worlds.keys() {
        for volume in 0..2 {
            let source = world.can_write(world.source, SOURCE, volume);
            let destination = world.can_write(world.destination, DESTINATION, volume);
            assert!(!(source && destination), "{world:?}");
        }
        let running = [world.source, world.destination].map(|s| s == VmStatus::Running);
        assert_ne!(running, [true, true], "two VMs run: {world:?}");
    }
}

#[test]
fn a_vm_that_runs_can_write_all_its_volumes() {
    for world in reachable().keys() {
        if world.source == VmStatus::Running {
            assert_eq!(world.epochs, [SOURCE; 2], "{world:?}");
        }
        if world.destination == VmStatus::Running {
            assert_eq!(world.epochs, [DESTINATION; 2], "{world:?}");
        }
    }
}

#[test]
fn an_aborted_migration_leaves_the_source_running_and_able_to_write() {
    let worlds = reachable();
    let aborted: Vec<&World> =
        worlds.keys().filter(|w| w.migration == MigrationState::Aborted).collect();
    assert!(!aborted.is_empty());
    for world in aborted {
        assert_eq!((world.source, world.epochs), (VmStatus::Running, [SOURCE; 2]), "{world:?}");
        assert!(!world.destination_ran, "{world:?}");
    }
}

#[test]
fn a_migration_that_is_given_up_can_always_be_aborted() {
    let graph = reachable();
    let mut can_end: HashSet<World> =
        graph.keys().filter(|w| w.migration == MigrationState::Aborted).copied().collect();
    loop {
        let more: Vec<World> = graph
            .iter()
            .filter(|(world, next)| {
                !can_end.contains(world) && next.iter().any(|n| can_end.contains(n))
            })
            .map(|(world, _)| *world)
            .collect();
        if more.is_empty() {
            break;
        }
        can_end.extend(more);
    }
    for world in graph.keys().filter(|w| w.migration != MigrationState::Completed) {
        assert!(can_end.contains(world), "stuck: {world:?}");
    }
}
