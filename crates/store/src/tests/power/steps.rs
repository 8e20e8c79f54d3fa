//! What a workload does. Indices are taken modulo what there is.

use perigee_block::device::Zeroing;
use proptest::prelude::*;

/// One request of a client.
#[derive(Debug, Clone)]
pub(super) enum Io {
    Write { at: usize, length: usize, fua: bool },
    Zero { at: usize, length: usize, how: Zeroing, fua: bool },
    Read { at: usize, length: usize },
    Flush,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Io {
        volume: usize,
        io: Io,
    },
    /// Requests in flight at the same time.
    Together {
        volume: usize,
        ios: Vec<Io>,
    },
    Snapshot {
        volume: usize,
    },
    /// A snapshot while requests are in flight.
    SnapshotUnder {
        volume: usize,
        ios: Vec<Io>,
    },
    Clone {
        volume: usize,
        grow_blocks: u64,
    },
    CloneImage {
        image: usize,
    },
    Resize {
        volume: usize,
        blocks: u64,
    },
    /// Merges the layers below a volume while requests are in flight.
    Compact {
        volume: usize,
        ios: Vec<Io>,
    },
    /// Merges the layers whose names were deleted while requests are in flight.
    Merge {
        volume: usize,
        ios: Vec<Io>,
    },
    /// A volume departs and comes back.
    CallOff {
        volume: usize,
    },
    /// A volume comes from another host. Its layers are copied, or read from there.
    Arrive {
        fill: bool,
    },
    /// Completes the image that is a copy of another host's.
    Fill,
    /// Completes the copies of the own blocks of another host's layers.
    FillOwn,
    Delete {
        volume: usize,
    },
    DeleteImage {
        image: usize,
    },
    Kill,
    PowerCut {
        seed: u64,
    },
}

pub(super) fn write(volume: usize, at: usize, length: usize) -> Step {
    Step::Io { volume, io: Io::Write { at, length, fua: false } }
}

pub(super) fn write_fua(volume: usize, at: usize, length: usize) -> Step {
    Step::Io { volume, io: Io::Write { at, length, fua: true } }
}

pub(super) fn discard(volume: usize, at: usize, length: usize) -> Step {
    let io = Io::Zero { at, length, how: Zeroing::FreeSpace, fua: false };
    Step::Io { volume, io }
}

pub(super) fn zero(volume: usize, at: usize, length: usize) -> Step {
    let io = Io::Zero { at, length, how: Zeroing::KeepSpace, fua: false };
    Step::Io { volume, io }
}

pub(super) fn read(volume: usize, at: usize, length: usize) -> Step {
    Step::Io { volume, io: Io::Read { at, length } }
}

pub(super) fn flush(volume: usize) -> Step {
    Step::Io { volume, io: Io::Flush }
}

/// Whole blocks, parts of one, and runs across several: each as often.
fn range() -> impl Strategy<Value = (usize, usize)> {
    let block = (0..64_usize, 1..4_usize).prop_map(|(block, blocks)| (block * 4096, blocks * 4096));
    prop_oneof![block, (any::<usize>(), 1..600_usize), (any::<usize>(), 1..20_000_usize)]
}

fn io() -> impl Strategy<Value = Io> {
    let how = prop_oneof![Just(Zeroing::FreeSpace), Just(Zeroing::KeepSpace)];
    let fua = || prop::bool::weighted(0.15);
    prop_oneof![
        6 => (range(), fua()).prop_map(|((at, length), fua)| Io::Write { at, length, fua }),
        3 => (range(), how, fua())
            .prop_map(|((at, length), how, fua)| Io::Zero { at, length, how, fua }),
        2 => range().prop_map(|(at, length)| Io::Read { at, length }),
        3 => Just(Io::Flush),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let some = any::<usize>;
    let ios = || prop::collection::vec(io(), 2..5);
    prop_oneof![
        24 => (some(), io()).prop_map(|(volume, io)| Step::Io { volume, io }),
        3 => (some(), ios()).prop_map(|(volume, ios)| Step::Together { volume, ios }),
        2 => some().prop_map(|volume| Step::Snapshot { volume }),
        1 => (some(), ios()).prop_map(|(volume, ios)| Step::SnapshotUnder { volume, ios }),
        2 => (some(), 0..3_u64)
            .prop_map(|(volume, grow_blocks)| Step::Clone { volume, grow_blocks }),
        2 => some().prop_map(|image| Step::CloneImage { image }),
        2 => (some(), 1..12_u64).prop_map(|(volume, blocks)| Step::Resize { volume, blocks }),
        1 => (some(), ios()).prop_map(|(volume, ios)| Step::Compact { volume, ios }),
        2 => (some(), ios()).prop_map(|(volume, ios)| Step::Merge { volume, ios }),
        1 => Just(Step::Fill),
        1 => some().prop_map(|volume| Step::CallOff { volume }),
        1 => any::<bool>().prop_map(|fill| Step::Arrive { fill }),
        1 => Just(Step::FillOwn),
        1 => some().prop_map(|volume| Step::Delete { volume }),
        2 => some().prop_map(|image| Step::DeleteImage { image }),
        1 => Just(Step::Kill),
        1 => any::<u64>().prop_map(|seed| Step::PowerCut { seed }),
    ]
}

pub(super) fn workload(steps_max: usize) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..steps_max)
}
