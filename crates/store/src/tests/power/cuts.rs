//! A power cut and a kill at every point of a workload.

use perigee_block::device::Zeroing;
use proptest::prelude::*;

use crate::sim::{Cut, Dice, Disk};
use crate::tests::power::cases;
use crate::tests::power::check::{check, check_disk, say_if_it_fails};
use crate::tests::power::run::World;
use crate::tests::power::steps::*;

/// Runs the workload once, then looks at the disk after each of its operations.
async fn survives_cuts_at_every_point(steps: &[Step], seed: u64) {
    let mut world = World::new().await;
    world.record();
    let (mut disk, mut expected) = (world.files.disk(), world.expected());
    world.run(steps).await;
    let (log, history) = world.take_history();
    let mut events = history.iter().peekable();
    let mut dice = Dice(seed);
    for at in 0..=log.len() {
        while let Some((_, event)) = events.next_if(|(position, _)| *position <= at) {
            expected.apply(event);
        }
        let next = log.get(at);
        let until = disk.operations().saturating_sub(dice.below(12) as u64);
        let seeds = [dice.below(usize::MAX) as u64, dice.below(usize::MAX) as u64];
        let cuts =
            [Cut::Nothing, Cut::Before(until), Cut::ByFile(seeds[0]), Cut::BySector(seeds[1])];
        let mut outcomes: Vec<(String, Disk, bool)> =
            cuts.iter().map(|cut| (format!("{cut:?}"), disk.after(*cut), true)).collect();
        outcomes.push(("a kill".to_owned(), disk.clone(), false));
        if let Some(torn) = next.and_then(|op| op.torn()) {
            let mut within = disk.clone();
            within.apply(&torn);
            outcomes.push(("a kill within it".to_owned(), within, false));
        }
        for (how, left, power_cut) in outcomes {
            let checked = check_disk(left, &expected, power_cut, seeds[1]);
            let what = || {
                let before = next.map_or("the end".to_owned(), |op| disk.describe(op));
                format!("{}\n{how} before operation {at}: {before}", world.story())
            };
            say_if_it_fails(what, checked).await;
        }
        if let Some(op) = next {
            disk.apply(op);
        }
    }
}

fn run(steps: &[Step], seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(survives_cuts_at_every_point(steps, seed));
}

#[test]
fn writes_flushes_and_discards_survive_a_cut_at_every_point() {
    let steps = [
        write(1, 0, 8192),
        flush(1),
        write(1, 4096, 8192),
        write(1, 100, 1000),
        discard(1, 4096, 4096),
        flush(1),
        write(1, 5000, 100),
        zero(1, 8192, 8192),
        write_fua(1, 12_288, 4096),
        Step::Kill,
        flush(1),
        write(0, 3000, 9000),
        discard(0, 0, 4096),
        flush(0),
        write(2, 0, 40_000),
        write(2, 12_000, 60_000),
        flush(2),
        discard(2, 4096, 20_000),
        flush(2),
    ];
    run(&steps, 1);
}

#[test]
fn resizes_and_merged_chains_survive_a_cut_at_every_point() {
    let steps = [
        write(1, 0, 12_288),
        Step::Resize { volume: 1, blocks: 9 },
        write(1, 24_576, 12_288),
        Step::Resize { volume: 1, blocks: 2 },
        write(1, 4096, 100),
        Step::Resize { volume: 1, blocks: 4 },
        discard(1, 0, 4096),
        Step::Snapshot { volume: 1 },
        write(1, 100, 5000),
        Step::Resize { volume: 1, blocks: 5 },
        write(1, 0, 600),
        Step::Resize { volume: 1, blocks: 6 },
        Step::Compact { volume: 1, ios: Vec::new() },
        write(1, 0, 100),
        Step::Kill,
    ];
    run(&steps, 4);
}

#[test]
fn snapshots_clones_and_deletions_survive_a_cut_at_every_point() {
    let steps = [
        write(1, 0, 8192),
        Step::Snapshot { volume: 1 },
        write(1, 4096, 8192),
        Step::Clone { volume: 1, grow_blocks: 1 },
        write(0, 0, 5000),
        Step::CloneImage { image: 0 },
        discard(1, 0, 8192),
        flush(1),
        Step::Delete { volume: 0 },
        Step::PowerCut { seed: 3 },
        write(0, 0, 5000),
        Step::Delete { volume: 1 },
        Step::DeleteImage { image: 0 },
    ];
    run(&steps, 2);
}

#[test]
fn deleted_snapshots_that_are_merged_survive_a_cut_at_every_point() {
    let ios = |at: usize| {
        let (zero, how) = (at + 4096, Zeroing::FreeSpace);
        vec![
            Io::Write { at, length: 5000, fua: false },
            Io::Zero { at: zero + 4096, length: 3000, how, fua: false },
            Io::Flush,
        ]
    };
    let steps = [
        write(1, 0, 8192),
        Step::Snapshot { volume: 1 },
        discard(1, 0, 4096),
        write(1, 10_000, 3000),
        Step::Snapshot { volume: 1 },
        write(1, 4096, 100),
        // The older one, whose layer is below a name, and then that name.
        Step::DeleteImage { image: 0 },
        Step::Merge { volume: 1, ios: ios(0) },
        Step::DeleteImage { image: 0 },
        Step::Kill,
        Step::Merge { volume: 1, ios: ios(8192) },
        write(1, 0, 100),
        Step::Snapshot { volume: 1 },
        Step::CloneImage { image: 0 },
        Step::Resize { volume: 1, blocks: 9 },
        write(1, 5000, 100),
        Step::DeleteImage { image: 0 },
        Step::Merge { volume: 1, ios: ios(0) },
        Step::Delete { volume: 0 },
        Step::Merge { volume: 0, ios: ios(4096) },
        Step::Kill,
    ];
    run(&steps, 11);
}

#[test]
fn copies_of_another_host_s_image_survive_a_cut_at_every_point() {
    let steps = [
        read(3, 0, 4096),
        write(3, 5000, 100),
        read(3, 12_000, 600),
        Step::Kill,
        read(3, 4096, 4096),
        flush(3),
        Step::PowerCut { seed: 5 },
        read(3, 0, 9000),
        Step::Snapshot { volume: 3 },
        Step::Fill,
        write(3, 0, 100),
        read(3, 16_384, 4096),
        Step::Kill,
        Step::Delete { volume: 3 },
        Step::DeleteImage { image: 0 },
        Step::DeleteImage { image: 0 },
    ];
    run(&steps, 6);
}

#[test]
fn copies_of_own_blocks_survive_a_cut_at_every_point() {
    let steps = [
        read(4, 4096, 4096),
        write(4, 5000, 100),
        read(4, 12_000, 600),
        Step::Kill,
        read(4, 0, 4096),
        flush(4),
        Step::PowerCut { seed: 5 },
        read(4, 0, 30_000),
        Step::Snapshot { volume: 4 },
        Step::FillOwn,
        write(4, 0, 100),
        Step::Kill,
        read(4, 0, 30_000),
        Step::Delete { volume: 4 },
    ];
    run(&steps, 6);
}

#[test]
fn volumes_that_depart_and_arrive_survive_a_cut_at_every_point() {
    let steps = [
        write(1, 0, 8192),
        Step::CallOff { volume: 1 },
        write(1, 4096, 8192),
        write(1, 100, 1000),
        flush(1),
        discard(1, 4096, 4096),
        Step::CallOff { volume: 1 },
        Step::Kill,
        Step::CallOff { volume: 1 },
        write(0, 0, 5000),
        Step::CallOff { volume: 0 },
        Step::Arrive { fill: false },
        read(0, 0, 4096),
        write(0, 5000, 100),
        Step::PowerCut { seed: 7 },
        write(0, 0, 100),
        Step::Arrive { fill: true },
        flush(0),
        Step::CallOff { volume: 5 },
        Step::Kill,
        Step::Delete { volume: 0 },
    ];
    run(&steps, 8);
}

/// The volume's new home could not ask what its layers hold: the export ends within a block.
#[test]
fn a_volume_departs_whose_parent_s_size_is_no_multiple_of_a_block() {
    run(&[write(3, 24_583, 355), Step::CallOff { volume: 3 }, read(3, 20_000, 9000)], 1);
}

/// A cut that left only the map of a head whose first flush was not acknowledged; the head's new
/// data would have stood beside that map after the next cut.
#[test]
fn files_of_a_flush_that_was_not_acknowledged_never_come_back() {
    for seed in 0..12 {
        run(&[Step::Fill], seed);
        run(&[write(0, 0, 8192), flush(0)], seed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: cases(6),
        max_shrink_iters: 150,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_long_workload_equals_its_reference(steps in workload(60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new().await;
            world.run(&steps).await;
            check(&world.pool(), &world.expected(), false).await;
        });
    }

    #[test]
    fn any_workload_survives_a_cut_at_every_point(steps in workload(14), seed in any::<u64>()) {
        run(&steps, seed);
    }
}
