//! Walks every world that production's functions can bring about: source, destination, homes and
//! controller, with messages lost, doubled and late, writes to disks that fail, crashes of agents
//! and controller at every step, and two moves in a row.
//!
//! Some things are taken from QEMU: the destination has the VM's state only when the whole stream
//! has come; a source that is `completed` has heard so; one whose migration fails in the pause
//! lets the guest run. Requests to start and to delete a VM come late as all others do; what their
//! agents do then is decided by [`crate::starts`], whose own walk has jobs that begin anew.

mod actors;
mod world;

use std::collections::HashMap;

use actors::Scenario;
use world::{Guest, HOSTS, World};

use crate::job::MigrationState;
use crate::vm::VmStatus;

const THERE_AND_BACK: Scenario = Scenario { volumes: 1, targets: &[1, 0], has_faults: false };
const TWICE_ON: Scenario = Scenario { volumes: 1, targets: &[1, 2], has_faults: false };
const TWO_VOLUMES: Scenario = Scenario { volumes: 2, targets: &[1], has_faults: false };
const FAULTS: Scenario = Scenario { volumes: 2, targets: &[1], has_faults: true };

/// Every world that can be reached, with those that follow it by their numbers. Messages that come
/// late lead to worlds as well, but nobody may have to wait for one: they are not among `next`.
#[derive(Default)]
struct Walk {
    worlds: Vec<World>,
    numbers: HashMap<World, u32>,
    next: Vec<Vec<u32>>,
}

impl Walk {
    fn number(&mut self, world: World) -> u32 {
        let fresh = u32::try_from(self.worlds.len()).unwrap();
        let number = *self.numbers.entry(world).or_insert(fresh);
        if number == fresh {
            self.worlds.push(world);
        }
        number
    }
}

fn walk(scenario: Scenario) -> Walk {
    let mut walk = Walk::default();
    walk.number(World::start(scenario.volumes));
    while let Some(world) = walk.worlds.get(walk.next.len()).copied() {
        check(&world);
        for after in world.next_late() {
            walk.number(after);
        }
        let mut next: Vec<u32> =
            world.next(scenario).into_iter().map(|after| walk.number(after)).collect();
        next.sort_unstable();
        next.dedup();
        walk.next.push(next);
    }
    assert!(walk.worlds.len() > 1000, "{scenario:?} is not walked");
    walk
}

/// At no moment may two VMs write one volume, nor one that has gone on elsewhere since.
fn check(world: &World) {
    for home in &world.homes[..world.volumes] {
        let mut writers = 0;
        for vm in (0..HOSTS).filter_map(|host| world.hosts[host].vm) {
            if vm.guest == Guest::Running && vm.epoch == home.current.0 {
                writers += 1;
                assert!(vm.line == world.line_max, "an old VM writes: {world:?}");
            }
        }
        assert!(writers < 2, "two VMs write: {world:?}");
    }
}

/// The VM runs where the job believes, it can write, and nothing is under way.
fn is_settled(world: &World) -> bool {
    world.open_move().is_none()
        && world.hosts[world.at].vm.is_some_and(|vm| {
            let writes = |home: &super::WriterEpochs| home.current.0 == vm.epoch;
            vm.guest == Guest::Running
                && vm.status == VmStatus::Running
                && world.homes[..world.volumes].iter().all(writes)
        })
}

/// The worlds from which none that is `good` can be reached.
fn stuck(walk: &Walk, good: impl Fn(&World) -> bool) -> Vec<World> {
    let mut before: Vec<Vec<u32>> = vec![Vec::new(); walk.worlds.len()];
    for (number, next) in walk.next.iter().enumerate() {
        for after in next {
            before[usize::try_from(*after).unwrap()].push(u32::try_from(number).unwrap());
        }
    }
    let mut can: Vec<bool> = walk.worlds.iter().map(good).collect();
    let mut waiting: Vec<usize> = (0..can.len()).filter(|number| can[*number]).collect();
    while let Some(number) = waiting.pop() {
        for earlier in &before[number] {
            let earlier = usize::try_from(*earlier).unwrap();
            if !can[earlier] {
                can[earlier] = true;
                waiting.push(earlier);
            }
        }
    }
    (0..can.len()).filter(|number| !can[*number]).map(|number| walk.worlds[number]).collect()
}

fn assert_never_lost(scenario: Scenario) {
    let walk = walk(scenario);
    let ends = [MigrationState::Completed, MigrationState::Aborted];
    for end in ends {
        let ended = |world: &&World| world.moves.iter().flatten().any(|moved| moved.state == end);
        assert!(walk.worlds.iter().find(ended).is_some(), "no move is {end:?}");
    }
    let stuck = stuck(&walk, is_settled);
    assert!(stuck.is_empty(), "{} worlds are stuck, one of them: {:?}", stuck.len(), stuck[0]);
}

#[test]
fn a_vm_with_two_volumes_is_never_written_twice_and_never_lost() {
    assert_never_lost(TWO_VOLUMES);
}

#[test]
fn a_vm_that_goes_there_and_back_is_never_written_twice_and_never_lost() {
    assert_never_lost(THERE_AND_BACK);
}

#[test]
fn a_vm_that_goes_on_to_a_third_host_is_never_written_twice_and_never_lost() {
    assert_never_lost(TWICE_ON);
}

/// QEMUs are killed, and agents lose what they stored: then a VM may be lost, or stand still.
#[test]
fn whatever_is_killed_or_forgotten_never_do_two_vms_write_one_volume() {
    let walk = walk(FAULTS);
    assert!(walk.worlds.iter().any(|world| world.is_hurt));
}
