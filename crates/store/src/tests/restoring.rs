//! Volumes that are used while their bytes still come from a backup, beside plain arrays.
//!
//! A failure names its seed. `PERIGEE_POWER_CASES` is the number of seeds.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use perigee_model::backup::BackupTarget;
use perigee_model::home::{Depart, HomeState, ServerAddresses};
use perigee_model::volume::{CheckScope, Snapshot};
use perigee_model::{BackupName, LeaveSite, ProblemKind};
use tokio::sync::Semaphore;

use super::*;
use crate::NewIncoming;
use crate::copies::fill::Pace;
use crate::sim::Dice;

const BLOCK: u64 = 4096;
const LAYER: LayerId = LayerId(Uuid::from_u128(0xc));
/// The block `n` comes together with `n + PIECES`, and so on.
const PIECES: u64 = 3;

/// A backup at a target.
struct Backup {
    /// What each block has; `None`: nothing.
    blocks: Vec<Option<u8>>,
    is_away: AtomicBool,
    damaged: Mutex<BTreeSet<u64>>,
    /// A read of any other block waits here.
    only: Mutex<Option<u64>>,
    gate: Semaphore,
}

impl Backup {
    fn of(blocks: Vec<Option<u8>>) -> Arc<Self> {
        Arc::new(Self {
            blocks,
            is_away: AtomicBool::new(false),
            damaged: Mutex::default(),
            only: Mutex::default(),
            gate: Semaphore::new(0),
        })
    }

    fn bytes(&self) -> Vec<u8> {
        self.blocks.iter().flat_map(|byte| [byte.unwrap_or(0); 4096]).collect()
    }

    fn target() -> BackupTarget {
        BackupTarget { address: "/backups".to_owned(), endpoint: None }
    }

    fn connector(self: &Arc<Self>) -> Connector {
        let backup = Arc::clone(self);
        let connect = move |address: String, export: String| -> BoxFuture<'static, _> {
            let backup = Arc::clone(&backup);
            Box::pin(async move {
                if backup.is_away.load(Ordering::SeqCst) {
                    return Err(Problem::unavailable("the backups", "the target is away"));
                }
                if BackupTarget::of_source(&address) != Some(Self::target()) || export != "b" {
                    return Err(Problem::not_found(address, "it has no such backup"));
                }
                Ok(Arc::new(Source(backup)) as Arc<dyn Device>)
            })
        };
        Connector { patience: Duration::from_millis(20), connect: Arc::new(connect) }
    }
}

struct Source(Arc<Backup>);

impl Device for Source {
    fn size_bytes(&self) -> u64 {
        self.0.blocks.len() as u64 * BLOCK
    }

    fn layer(&self) -> Option<LayerId> {
        Some(LayerId(Uuid::from_u128(0xd)))
    }

    fn read(&self, at: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            let blocks = at / BLOCK..(at + u64::from(length_bytes)).div_ceil(BLOCK);
            let only = *self.0.only.lock().unwrap();
            if only.is_some_and(|only| blocks != (only..only + 1)) {
                self.0.gate.acquire().await.unwrap().forget();
            }
            if self.0.is_away.load(Ordering::SeqCst) {
                return Err(IoError::Unreachable("the target is away".to_owned()));
            }
            if self.0.damaged.lock().unwrap().range(blocks).next().is_some() {
                let why = "its bytes are not what was shipped";
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why).into());
            }
            let from = usize::try_from(at).unwrap();
            Ok(Bytes::copy_from_slice(&self.0.bytes()[from..from + length_bytes as usize]))
        })
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, at: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        let hole = self.0.blocks[usize::try_from(at / BLOCK).unwrap()].is_none();
        Box::pin(async move { Ok(vec![Extent { length_bytes: BLOCK, hole, zero: false }]) })
    }

    fn beside(&self, offset: u64) -> Vec<Range<u64>> {
        let together = (offset / BLOCK % PIECES..self.0.blocks.len() as u64).step_by(3);
        let has = |block: &u64| self.0.blocks[usize::try_from(*block).unwrap()].is_some();
        together.filter(has).map(|block| block * BLOCK..(block + 1) * BLOCK).collect()
    }
}

/// A pool on simulated files with a volume `v` of a backup.
struct Site {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    backup: Arc<Backup>,
    pool: Arc<Pool>,
    boot: u128,
}

fn open_at(dir: &Path, files: &Arc<SimFiles>, backup: &Arc<Backup>, boot: u128) -> Arc<Pool> {
    let connect = backup.connector();
    let config = PoolConfig { private: None, dir: dir.to_owned(), connect };
    Pool::open_with(config, Arc::clone(files) as _, Uuid::from_u128(boot)).unwrap()
}

impl Site {
    async fn restore(blocks: Vec<Option<u8>>) -> Self {
        let (dir, files, backup) = (crate::sim::scratch_dir(), Arc::default(), Backup::of(blocks));
        let pool = open_at(dir.path(), &files, &backup, 1);
        let (name, leave_site) = (volume_name("v"), LeaveSite::Allowed);
        let new = NewIncoming { name, tenant: Default::default(), leave_site, owner: None };
        let (from, name) = (Backup::target(), BackupName::new("b").unwrap());
        pool.restore_at_once(new, LAYER, &from, false, &name).await.unwrap();
        Self { dir, files, backup, pool, boot: 1 }
    }

    /// Ends the server, and begins another one on what is on the disk.
    async fn restart(self, power_cut: Option<u64>) -> Self {
        self.pool.settle_copies().await;
        // A server that has ended keeps nothing more of what came.
        self.pool.open_copies().iter().for_each(|copy| copy.close(true));
        let Self { dir, files, backup, pool, mut boot } = self;
        drop(pool);
        if let Some(seed) = power_cut {
            files.power_cut(&mut Dice(seed));
            boot += 1;
        }
        let pool = open_at(dir.path(), &files, &backup, boot);
        Self { dir, files, backup, pool, boot }
    }

    async fn fill(&self) -> Result<(), IoError> {
        for copy in self.pool.copies_to_fill() {
            self.pool.fill(&copy, &Arc::default(), &Pace::new(u64::MAX)).await?;
        }
        Ok(())
    }

    async fn check_nothing_is_left(&self) {
        assert!(self.pool.restoring().await.unwrap().is_empty());
        let report = self.pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
        assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
    }
}

/// A range of a disk of so many bytes, often of whole blocks.
fn range(length: usize, dice: &mut Dice) -> Range<usize> {
    let (mut start, mut end) = (dice.below(length), 1 + dice.below(length));
    if dice.below(2) == 0 {
        (start, end) = (start / 4096 * 4096, end.next_multiple_of(4096));
    }
    start..end.max(start + 1).min(length)
}

async fn change(device: &Arc<dyn Device>, twin: &mut [u8], site: &Site, dice: &mut Dice) {
    let within = range(twin.len(), dice);
    let (at, length) = (within.start as u64, within.len());
    let byte = u8::try_from(dice.below(200)).unwrap().saturating_sub(60);
    let act = async || match byte {
        0 => device.zero(at, length as u64, Zeroing::FreeSpace, false).await,
        byte => device.write(at, bytes(byte, length), false).await,
    };
    if let Err(error) = act().await {
        // The rest of a block that is changed in part was to come from the backup.
        assert!(site.backup.is_away.load(Ordering::SeqCst), "{error}");
        site.backup.is_away.store(false, Ordering::SeqCst);
        act().await.unwrap();
    }
    twin[within].fill(byte);
}

async fn use_while_it_comes(seed: u64) {
    let mut dice = Dice(seed);
    let blocks = 1 + dice.below(60);
    let block = |dice: &mut Dice| match dice.below(4) {
        0 => None,
        // Zeros that are data, too.
        _ => Some(u8::try_from(dice.below(200)).unwrap().saturating_sub(20)),
    };
    let mut site = Site::restore((0..blocks).map(|_| block(&mut dice)).collect()).await;
    let mut twin = site.backup.bytes();
    for step in 0..4 + dice.below(16) {
        let device = session(&site.pool, "v").await;
        match dice.below(11) {
            0..3 => change(&device, &mut twin, &site, &mut dice).await,
            3..5 => {
                let within = range(twin.len(), &mut dice);
                let length_bytes = u32::try_from(within.len()).unwrap();
                match device.read(within.start as u64, length_bytes).await {
                    Ok(found) => assert!(found == twin[within.clone()], "{within:?}"),
                    Err(error) => assert!(site.backup.is_away.load(Ordering::SeqCst), "{error}"),
                }
            }
            5 => {
                let is_away = dice.below(2) == 0;
                site.backup.is_away.store(is_away, Ordering::SeqCst);
            }
            6 => {
                let filled = site.fill().await;
                assert!(filled.is_ok() || site.backup.is_away.load(Ordering::SeqCst));
            }
            7 => {
                let request = Snapshot { image: image_name(&format!("s{step}")) };
                site.pool.snapshot(&volume_name("v"), request).await.unwrap();
            }
            8 => {
                let name = volume_name("v");
                site.pool.compact_volume(&name, Arc::default()).await.unwrap();
            }
            9 => {
                drop(device);
                site = site.restart(None).await;
            }
            _ => {
                device.flush().await.unwrap();
                drop(device);
                let seed = dice.below(usize::MAX) as u64;
                site = site.restart(Some(seed)).await;
            }
        }
    }
    site.backup.is_away.store(false, Ordering::SeqCst);
    site.fill().await.unwrap();
    site.backup.is_away.store(true, Ordering::SeqCst);
    assert!(all(&session(&site.pool, "v").await).await == twin);
    site.check_nothing_is_left().await;
}

#[test]
fn a_volume_that_comes_from_a_backup_has_what_was_in_it_and_what_was_written() {
    let asked = std::env::var("PERIGEE_POWER_CASES").ok().and_then(|n| n.parse().ok());
    for seed in 1..=asked.unwrap_or(60) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let run = std::panic::AssertUnwindSafe(|| {
            runtime.block_on(use_while_it_comes(seed * 7919));
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn full(blocks: u8) -> Vec<Option<u8>> {
    (1..=blocks).map(Some).collect()
}

#[tokio::test]
async fn a_block_is_read_before_the_others_have_come() {
    let site = Site::restore(full(30)).await;
    *site.backup.only.lock().unwrap() = Some(17);
    let background = tokio::spawn(Arc::clone(&site.pool).fill_copies(u64::MAX));
    let device = session(&site.pool, "v").await;
    assert_eq!(device.read(17 * BLOCK, 4096).await.unwrap(), bytes(18, 4096));
    // No other block has come: each waits for the gate, which opens only now.
    let missing_bytes = site.pool.restoring().await.unwrap()[0].missing_bytes;
    assert!(missing_bytes >= 29 * BLOCK, "{missing_bytes}");
    site.backup.gate.add_permits(1000);
    let whole = async {
        while !site.pool.restoring().await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), whole).await.expect("all comes");
    background.abort();
    site.backup.is_away.store(true, Ordering::SeqCst);
    assert_eq!(all(&device).await, site.backup.bytes());
}

#[tokio::test]
async fn what_is_damaged_in_a_backup_is_an_error_and_the_rest_comes() {
    let site = Site::restore(full(30)).await;
    site.backup.damaged.lock().unwrap().extend([4, 5]);
    let device = session(&site.pool, "v").await;
    let damaged = device.read(4 * BLOCK, 4096).await.expect_err("it is damaged");
    assert!(damaged.to_string().contains("not what was shipped"), "{damaged}");
    let filling = site.fill().await.expect_err("not all can come");
    assert!(filling.to_string().contains("not what was shipped"), "{filling}");
    let left = site.pool.restoring().await.unwrap();
    assert!(left[0].is_damaged && left[0].missing_bytes == 2 * BLOCK, "{left:?}");
    device.read(4 * BLOCK, 8192).await.expect_err("it is still damaged");
    device.write(4 * BLOCK, bytes(9, 4096), false).await.unwrap();
    assert_eq!(device.read(4 * BLOCK, 4096).await.unwrap(), bytes(9, 4096), "a write needs none");
    site.backup.damaged.lock().unwrap().clear();
    site.fill().await.expect("the backup was mended");
    assert_eq!(device.read(5 * BLOCK, 4096).await.unwrap(), bytes(6, 4096));
    site.check_nothing_is_left().await;
}

#[tokio::test]
async fn a_volume_that_is_deleted_before_all_has_come_leaves_nothing() {
    let site = Site::restore(full(30)).await;
    drop(session(&site.pool, "v").await.read(BLOCK, 4096).await.unwrap());
    site.pool.settle_copies().await;
    site.pool.delete_volume(&volume_name("v")).await.unwrap();
    site.check_nothing_is_left().await;
}

#[tokio::test]
async fn a_volume_does_not_move_before_all_has_come() {
    let site = Site::restore(full(3)).await;
    let name = volume_name("v");
    let home = site.pool.home(&name).await.unwrap().home;
    let HomeState::Here { tenure, missing_bytes } = home else { panic!("it is here: {home:?}") };
    assert_eq!(missing_bytes, 3 * BLOCK);
    let (nbd_addr, control_url) = ("host:1".to_owned(), "http://host:1".to_owned());
    let to = ServerAddresses { nbd_addr, control_url };
    let ask = Depart { tenure, to };
    let refused = site.pool.move_step(&name).await.unwrap().depart(&ask).await;
    let refused = refused.expect_err("bytes are to come");
    assert_eq!(refused.kind, ProblemKind::Unavailable, "{refused}");
    assert!(refused.why.contains("backup"), "{refused}");
}
