//! Migrations whose memory is compressed on its way.

use perigee_model::MigrationId;
use perigee_model::switchover::Fate;
use perigee_model::vm::{MigrateOut, MigrationPhase, VmSpec, VmStatus};

use super::support::{kill_9, order, spec, start};
use super::{Scene, scene};

/// The VM runs at the first agent, and its compressed migration to the second one has begun.
fn moving() -> Scene {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    scene.home.open(false);
    let waiting = there.put(&VmSpec { arrives_compressed: true, ..spec(2, true) }).unwrap();
    let uri = waiting.incoming_uri.expect("it waits for the migration");
    let order = MigrateOut { compressed: true, ..order("m-1", 1, uri, there, &scene.home) };
    here.post("migrate", &order).unwrap();
    scene.home.wait_until_asked();
    scene
}

/// It came compressed and leaves as most do, so both QEMUs change their settings.
#[test]
fn a_vm_that_came_compressed_runs_and_can_move_on() {
    let scene = moving();
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Completed);
    assert_eq!(scene.home.epoch(), 2);
    there.wait_for_status(VmStatus::Running);
    here.delete().unwrap();

    let back = VmSpec { arrives_by: Some(MigrationId::new("m-2").unwrap()), ..spec(3, true) };
    let back = VmSpec { start: start(0).by_migration(2), ..back };
    let uri = here.put(&back).unwrap().incoming_uri.expect("it waits for the migration");
    there.order("m-2", 2, uri, here, &scene.home);
    there.wait_for_phase(MigrationPhase::Completed);
    here.wait_for_status(VmStatus::Running);
}

#[test]
fn a_compressed_migration_cancelled_in_the_pause_gives_the_vm_back() {
    let scene = moving();
    let here = &scene.agents[0];
    here.cancel("m-1").unwrap();
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Cancelled);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
}

#[test]
fn a_destination_of_a_compressed_migration_killed_in_the_pause_gives_the_vm_back() {
    let scene = moving();
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    kill_9(there.get().unwrap().qemu_pid);
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Failed);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(there.end_unless_ran("m-1").unwrap(), Fate::DidNotRun);
}
