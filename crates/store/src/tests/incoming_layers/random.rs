//! Random chains with copies in random places, beside a plain array.
//!
//! A failure names its seed. `PERIGEE_POWER_CASES` is the number of seeds.

use perigee_model::volume::{CheckScope, Resize};

use super::*;
use crate::disk::blocks::PAGE_BLOCKS;

/// What a volume has: bytes in its windows. The rest of it is never touched.
struct Twin {
    bytes: Vec<u8>,
    windows: Vec<std::ops::Range<u64>>,
}

/// A volume's blocks that are used. A large one has them around the ends of its pages of states.
fn windows(blocks: u64) -> Vec<std::ops::Range<u64>> {
    if blocks < PAGE_BLOCKS {
        return std::iter::once(0..blocks * BLOCK).collect();
    }
    let around = (PAGE_BLOCKS - 6) * BLOCK..(PAGE_BLOCKS + 6) * BLOCK;
    vec![0..4 * BLOCK, around, (blocks - 4) * BLOCK..blocks * BLOCK]
}

impl Twin {
    fn new(blocks: u64) -> Self {
        let windows = windows(blocks);
        let length = windows.iter().map(|window| window.end - window.start).sum::<u64>();
        Self { bytes: vec![0; usize::try_from(length).unwrap()], windows }
    }

    /// Some range within a window: its place on the disk and in the array.
    fn range(&self, dice: &mut Dice) -> (u64, std::ops::Range<usize>) {
        let nth = dice.below(self.windows.len());
        let before: u64 = self.windows[..nth].iter().map(|w| w.end - w.start).sum();
        let window = &self.windows[nth];
        let length = usize::try_from(window.end - window.start).unwrap();
        let (mut start, mut end) = (dice.below(length), 1 + dice.below(length));
        if dice.below(2) == 0 {
            (start, end) = (start / 4096 * 4096, end.next_multiple_of(4096));
        }
        let end = end.max(start + 1).min(length);
        let first = usize::try_from(before).unwrap();
        (window.start + start as u64, first + start..first + end)
    }

    async fn change(&mut self, device: &Arc<dyn Device>, dice: &mut Dice) {
        let (at, within) = self.range(dice);
        let length_bytes = within.len() as u64;
        if dice.below(3) == 0 {
            let how = [Zeroing::FreeSpace, Zeroing::KeepSpace][dice.below(2)];
            device.zero(at, length_bytes, how, false).await.unwrap();
            self.bytes[within].fill(0);
        } else {
            // Sometimes zeros that are data.
            let byte = u8::try_from(dice.below(200)).unwrap().saturating_sub(20);
            device.write(at, bytes(byte, within.len()), false).await.unwrap();
            self.bytes[within].fill(byte);
        }
    }

    async fn read(&self, device: &Arc<dyn Device>, dice: &mut Dice) {
        let (at, within) = self.range(dice);
        let found = device.read(at, u32::try_from(within.len()).unwrap()).await.unwrap();
        assert!(found == self.bytes[within.clone()], "{} bytes at {at}", within.len());
    }

    async fn check(&self, device: &Arc<dyn Device>) {
        let mut first = 0;
        for window in &self.windows {
            let length = usize::try_from(window.end - window.start).unwrap();
            let found = device.read(window.start, u32::try_from(length).unwrap()).await.unwrap();
            assert!(found == self.bytes[first..first + length], "from {} on", window.start);
            first += length;
        }
    }

    /// Only volumes with one window get another size.
    async fn resize(&mut self, pool: &Arc<Pool>, dice: &mut Dice) {
        if self.windows.len() > 1 {
            return;
        }
        let size_bytes = (1 + dice.below(40)) as u64 * BLOCK;
        let request = Resize { size_bytes, shrink: true };
        pool.resize_volume(&volume_name("v"), request).await.unwrap();
        self.bytes.resize(usize::try_from(size_bytes).unwrap(), 0);
        self.windows = windows(size_bytes / BLOCK);
    }
}

/// A chain at one host. On the way, the other host sometimes gets what is sealed by then.
async fn build(from: &Site, to: &Site, dice: &mut Dice) -> Twin {
    let blocks = if dice.below(3) == 0 { PAGE_BLOCKS + 20 } else { 1 + dice.below(40) as u64 };
    let mut twin = Twin::new(blocks);
    drop(empty(&from.pool, "v", blocks * BLOCK).await);
    for layer in 0..1 + dice.below(6) {
        if dice.below(4) == 0 {
            twin.resize(&from.pool, dice).await;
        }
        let device = session(&from.pool, "v").await;
        for _ in 0..dice.below(5) {
            twin.change(&device, dice).await;
        }
        drop(device);
        snapshot(&from.pool, "v", &format!("s{layer}")).await;
        if dice.below(2) == 0 {
            checksums(&from.pool).await;
        }
        match dice.below(5) {
            0 => {
                let chain = sealed_chain(&from.pool, "v");
                to.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap();
            }
            1 => {
                let chain = sealed_chain(&from.pool, "v");
                to.pool.stage_layers(&volume_name("v"), "there:1", &chain).await.unwrap();
                to.fill().await;
            }
            _ => {}
        }
    }
    twin
}

async fn compare_through_everything(seed: u64) {
    let mut dice = Dice(seed);
    let (from, mut to) = (Site::new(), Site::new());
    to.way.lead(&from.pool);
    let mut twin = build(&from, &to, &mut dice).await;
    let chain = chain_that_tells(&from.pool, "v", dice.below(2) == 0);
    to.take_chain(&from.pool, "v", &chain).await;
    if dice.below(2) == 0 {
        twin.check(&session(&to.pool, "v").await).await;
    }
    for step in 0..4 + dice.below(16) {
        let device = session(&to.pool, "v").await;
        match dice.below(12) {
            0..3 => twin.change(&device, &mut dice).await,
            3..5 => twin.read(&device, &mut dice).await,
            5 => {
                let copies = to.pool.copies_to_fill();
                if !copies.is_empty() {
                    let copy = &copies[dice.below(copies.len())];
                    let pace = Pace::new(u64::MAX);
                    to.pool.fill(copy, &Arc::default(), &pace).await.unwrap();
                }
            }
            6 => {
                drop(device);
                twin.resize(&to.pool, &mut dice).await;
            }
            7 => snapshot(&to.pool, "v", &format!("t{step}")).await,
            8 => drop(to.pool.compact_volume(&volume_name("v"), Arc::default()).await.unwrap()),
            9 => {
                drop(device);
                to = to.restart(None).await;
            }
            10 => {
                device.flush().await.unwrap();
                drop(device);
                let seed = dice.below(usize::MAX) as u64;
                to = to.restart(Some(seed)).await;
            }
            _ => {
                if let Some(copy) = to.pool.open_copies().first() {
                    let name = crate::layers::layer::data_name(copy.layer().id);
                    to.files.file(&name).fail_sync.store(true, Ordering::SeqCst);
                    // It fails only if something was fetched since the last flush.
                    drop(to.pool.flush_copies().await);
                    to.files.file(&name).fail_sync.store(false, Ordering::SeqCst);
                    drop(device);
                    to = to.restart(None).await;
                }
            }
        }
    }
    twin.check(&session(&to.pool, "v").await).await;
    to.fill().await;
    to.way.away.store(true, Ordering::SeqCst);
    twin.check(&session(&to.pool, "v").await).await;
    let info = to.pool.volume_info(&volume_name("v")).await.unwrap();
    assert_eq!(info.remote_bytes, 0);
    let report = to.pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
}

#[test]
fn chains_with_copies_anywhere_have_what_their_volume_had() {
    let asked = std::env::var("PERIGEE_POWER_CASES").ok().and_then(|n| n.parse().ok());
    for seed in 1..=asked.unwrap_or(60) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let run = std::panic::AssertUnwindSafe(|| {
            runtime.block_on(compare_through_everything(seed * 7919));
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
