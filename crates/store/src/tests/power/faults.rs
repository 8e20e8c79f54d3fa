//! Every operation of a workload failing, one after the other: with an I/O error, with no space,
//! and with a disk that fails from there on.
//!
//! The request that meets it fails, or it does no harm. What was answered before stays answered:
//! it is there after a kill, and what was flushed is there after a power cut.

use perigee_model::volume::VolumeHealth;
use proptest::prelude::*;

use crate::sim::{Cut, Fault, Faults};
use crate::tests::power::cases;
use crate::tests::power::check::{check, check_disk, say_if_it_fails};
use crate::tests::power::run::World;
use crate::tests::power::steps::*;

/// Runs the workload with a fault and checks what is left, now, after a kill and after a cut.
/// `false` once the workload ends before the fault comes.
async fn survives(steps: &[Step], at: u64, fault: Fault, lasts: u64, seed: u64) -> bool {
    let mut world = World::new().await;
    world.record();
    let from = world.files.operations() + at;
    world.fail(Faults { fault, operations: from..from.saturating_add(lasts) });
    world.run(steps).await;
    let reached = world.files.operations() > from;
    world.files.fail(None);
    let expected = world.expected();
    if !world.files.sync_failed() {
        for info in world.pool().volumes().await.unwrap() {
            assert_eq!(info.health, VolumeHealth::Ok, "{}: no sync has failed", info.name);
        }
    }
    let after = |what: &str| format!("{}\nafter {what}", world.story());
    let now = async { drop(check(&world.pool(), &expected, false).await) };
    say_if_it_fails(|| after("nothing"), now).await;
    world.files.recorded();
    let disk = world.files.disk();
    let killed = check_disk(disk.clone(), &expected, false, seed);
    say_if_it_fails(|| after("a kill"), killed).await;
    for cut in [Cut::Nothing, Cut::BySector(seed)] {
        let left = check_disk(disk.after(cut), &expected, true, seed);
        say_if_it_fails(|| after(&format!("a power cut: {cut:?}")), left).await;
    }
    reached
}

fn run(steps: &[Step], fault: Fault, lasts: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut at = 0;
        while survives(steps, at, fault, lasts, at).await {
            at += 1;
        }
        assert!(at > 20, "the workload has {at} operations");
    });
}

fn mixed() -> [Step; 12] {
    [
        write(1, 0, 8192),
        write(1, 9000, 100),
        flush(1),
        discard(1, 4096, 4096),
        flush(1),
        Step::Snapshot { volume: 1 },
        write(1, 100, 5000),
        write_fua(0, 100, 5000),
        Step::Clone { volume: 1, grow_blocks: 0 },
        write(0, 0, 4096),
        Step::Kill,
        flush(0),
    ]
}

/// With a copy of another host's image.
fn hydrating() -> [Step; 6] {
    let read_all = read(3, 0, 6 * 4096);
    [read(3, 0, 4096), write(3, 5000, 100), flush(3), Step::Fill, Step::Kill, read_all]
}

#[test]
fn a_copy_loses_nothing_whichever_operation_fails() {
    run(&hydrating(), Fault::Io, 1);
    run(&hydrating(), Fault::Io, u64::MAX);
}

/// With copies of the own blocks of another host's layers.
#[test]
fn copies_of_own_blocks_lose_nothing_whichever_operation_fails() {
    let read_all = || read(4, 0, 7 * 4096);
    let (some, change) = (read(4, 4096, 4096), write(4, 5000, 100));
    let steps = [some, change, Step::FillOwn, Step::Kill, read_all(), Step::FillOwn];
    run(&steps, Fault::Io, 1);
    run(&steps, Fault::Io, u64::MAX);
}

/// With the head that takes a deleted snapshot's layer, and with layers that become one.
fn merging() -> [Step; 10] {
    let ios = vec![Io::Write { at: 4096, length: 3000, fua: false }, Io::Flush];
    [
        write(1, 0, 8192),
        Step::Snapshot { volume: 1 },
        discard(1, 4096, 4096),
        write(1, 9000, 100),
        Step::DeleteImage { image: 0 },
        Step::Merge { volume: 1, ios: ios.clone() },
        Step::Snapshot { volume: 1 },
        write(1, 100, 5000),
        Step::DeleteImage { image: 0 },
        Step::Compact { volume: 1, ios },
    ]
}

#[test]
fn a_merge_loses_nothing_whichever_operation_fails() {
    run(&merging(), Fault::Io, 1);
    run(&merging(), Fault::NoSpace, 1);
    run(&merging(), Fault::Io, u64::MAX);
}

#[test]
fn an_io_error_of_any_operation_loses_nothing() {
    run(&mixed(), Fault::Io, 1);
}

#[test]
fn no_space_for_any_operation_loses_nothing() {
    run(&mixed(), Fault::NoSpace, 1);
}

#[test]
fn a_disk_that_fails_from_any_operation_on_loses_nothing_flushed() {
    run(&mixed(), Fault::Io, u64::MAX);
}

/// The bytes of a failed write may be in the file. A clone seals them with the rest: what it reads
/// must not change with a power cut.
#[test]
fn what_a_failed_write_left_is_durable_in_a_sealed_layer() {
    let steps = [
        write(0, 29_910, 123),
        flush(0),
        write(0, 28_448, 344),
        Step::Clone { volume: 0, grow_blocks: 0 },
        Step::Kill,
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for (at, seed) in (8..24).flat_map(|at| [1, 2].map(|seed| (at, seed))) {
        runtime.block_on(survives(&steps, at, Fault::Io, 1, seed));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 20 * cases(6),
        max_shrink_iters: 150,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_workload_survives_a_fault(
        steps in workload(20),
        at in 0..300_u64,
        fault in prop_oneof![Just(Fault::Io), Just(Fault::NoSpace)],
        lasts in prop_oneof![Just(1), 1..20_u64, Just(u64::MAX)],
        seed in any::<u64>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(survives(&steps, at, fault, lasts, seed));
    }
}
