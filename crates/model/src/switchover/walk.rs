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

use actors::Scenario;
use world::{Guest, HOSTS, World};

use crate::job::MigrationState;
use crate::vm::VmStatus;
use crate::walker::Walk;

const THERE_AND_BACK: Scenario = Scenario { volumes: 1, targets: &[1, 0], has_faults: false };
const TWICE_ON: Scenario = Scenario { volumes: 1, targets: &[1, 2], has_faults: false };
const TWO_VOLUMES: Scenario = Scenario { volumes: 2, targets: &[1], has_faults: false };
const FAULTS: Scenario = Scenario { volumes: 2, targets: &[1], has_faults: true };

fn walk(scenario: Scenario) -> Walk<World> {
    let start = World::start(scenario.volumes);
    let walk = Walk::all(start, check, |world| world.next(scenario), World::next_late);
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

fn assert_never_lost(scenario: Scenario) {
    let walk = walk(scenario);
    let ends = [MigrationState::Completed, MigrationState::Aborted];
    for end in ends {
        let ended = |world: &&World| world.moves.iter().flatten().any(|moved| moved.state == end);
        assert!(walk.worlds.iter().find(ended).is_some(), "no move is {end:?}");
    }
    let stuck = walk.stuck(is_settled);
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
