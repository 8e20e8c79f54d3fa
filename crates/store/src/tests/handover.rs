//! Volumes that move between two pools: what arrives, what is kept, and which requests are refused.

use std::sync::Mutex;

use perigee_model::client::{Binding, NewClient, Service};
use perigee_model::home::{
    CallOff, Depart, Departed, HomeState, ServerAddresses, TakeVolume, Tenure, VolumeHome,
};
use perigee_model::volume::{EpochChange, Snapshot};
use perigee_model::{Problem, ProblemKind};
use proptest::prelude::*;

use super::*;
use crate::disk::files::LayerFiles;
use crate::sim::Dice;

const BLOCK: usize = 4096;
const BLOCKS: usize = 12;

/// The pools by their servers' addresses: each reaches the others' layers.
#[derive(Clone, Default)]
struct Hosts(Arc<Mutex<Vec<std::sync::Weak<Pool>>>>);

impl Hosts {
    fn connector(&self) -> Connector {
        let hosts = self.clone();
        let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
            let number: usize = nbd_addr.trim_start_matches("host:").parse().unwrap();
            let pool = hosts.0.lock().unwrap()[number].upgrade();
            Box::pin(async move {
                let mut parts = export.splitn(2, '@');
                let layer = parts.next().and_then(|layer| layer.strip_prefix("layer:"));
                let found = pool.zip(layer.and_then(|id| id.parse().ok()));
                let away = || Problem::unavailable(&nbd_addr, "it is away, or has no such layer");
                let (pool, layer) = found.ok_or_else(away)?;
                match parts.next() {
                    None => pool.open_layer(layer).await,
                    Some("sums") => pool.open_checksums(layer, false).await,
                    Some("visible@sums") => pool.open_visible_checksums(layer).await,
                    Some(_) => Err(away()),
                }
            })
        };
        Connector { patience: Duration::from_secs(10), connect: Arc::new(connect) }
    }
}

fn addresses(number: usize) -> ServerAddresses {
    let control_url = format!("http://host:{number}");
    ServerAddresses { nbd_addr: format!("host:{number}"), control_url }
}

/// Two pools on simulated files.
struct Two {
    dirs: [tempfile::TempDir; 2],
    files: [Arc<SimFiles>; 2],
    pools: Vec<Arc<Pool>>,
    hosts: Hosts,
}

impl Two {
    fn new() -> Self {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let files = [(); 2].map(|()| Arc::default());
        let mut two = Self { dirs, files, pools: Vec::new(), hosts: Hosts::default() };
        two.pools = (0..2).map(|number| two.open(number, 1)).collect();
        two.meet();
        two
    }

    fn open(&self, number: usize, boot: u128) -> Arc<Pool> {
        let dir = self.dirs[number].path().to_owned();
        let config = PoolConfig { private: None, dir, connect: self.hosts.connector() };
        Pool::open_with(config, Arc::clone(&self.files[number]) as _, Uuid::from_u128(boot))
            .unwrap()
    }

    fn meet(&self) {
        *self.hosts.0.lock().unwrap() = self.pools.iter().map(Arc::downgrade).collect();
    }

    /// Kills a server, or cuts its power, and starts it again.
    async fn restart(&mut self, number: usize, boot: u128) {
        self.pools[number].settle_copies().await;
        let old = self.pools.remove(number);
        let ended = Arc::downgrade(&old);
        drop(old);
        while ended.strong_count() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.pools.insert(number, self.open(number, boot));
        self.meet();
    }

    async fn tenure(&self, number: usize) -> Tenure {
        match home(&self.pools[number]).await {
            HomeState::Here { tenure, .. } => tenure,
            other => panic!("{other:?}"),
        }
    }

    async fn depart(&self, from: usize) -> (TakeVolume, Departed) {
        let (tenure, to) = (self.tenure(from).await, addresses(1 - from));
        let ask = Depart { tenure, to: to.clone() };
        let departed = self.pools[from]
            .move_step(&volume_name("v"))
            .await
            .unwrap()
            .depart(&ask)
            .await
            .unwrap();
        (TakeVolume { from: addresses(from), to, tenure, grant: None }, departed)
    }

    async fn carry(&self, from: usize) -> VolumeHome {
        let (take, departed) = self.depart(from).await;
        self.pools[1 - from]
            .move_step(&volume_name("v"))
            .await
            .unwrap()
            .arrive(&take, departed)
            .await
            .unwrap()
    }

    /// Completes what the volume lacks, and forgets it where it came from.
    async fn complete(&self, at: usize) {
        self.fill(at).await;
        let tenure = self.tenure(at).await;
        self.pools[1 - at].forget_departed(&volume_name("v"), tenure).await.unwrap();
    }

    async fn fill(&self, at: usize) {
        self.pools[at].fill_all_copies().await;
        let missing = home(&self.pools[at]).await;
        assert!(matches!(missing, HomeState::Here { missing_bytes: 0, .. }), "{missing:?}");
    }
}

async fn home(pool: &Arc<Pool>) -> HomeState {
    pool.home(&volume_name("v")).await.unwrap().home
}

async fn of_blocks(pool: &Arc<Pool>, blocks: usize) -> Arc<dyn Device> {
    empty(pool, "v", (blocks * BLOCK) as u64).await
}

#[tokio::test]
async fn a_volume_that_departed_is_read_and_written_at_its_new_home_only() {
    let two = Two::new();
    let old = of_blocks(&two.pools[0], BLOCKS).await;
    old.write(0, bytes(1, 3 * BLOCK), false).await.unwrap();
    let before = two.pools[0].volume_info(&volume_name("v")).await.unwrap();
    let arrived = two.carry(0).await;
    let HomeState::Here { tenure, missing_bytes } = arrived.home else { panic!("{arrived:?}") };
    assert_eq!(missing_bytes, (BLOCKS * BLOCK) as u64);
    let gone = HomeState::Departed { tenure, to: addresses(1) };
    assert_eq!(home(&two.pools[0]).await, gone);
    assert!(matches!(old.read(0, 512).await, Err(IoError::Moved)));
    assert!(matches!(old.write(0, bytes(2, 512), false).await, Err(IoError::Moved)));
    assert!(matches!(old.flush().await, Err(IoError::Moved)));
    assert!(old.try_read(0, &mut [0; 512]).is_none() && old.try_write(0, &[0; 512]).is_none());
    assert_eq!(
        two.pools[0].attachments().await.unwrap(),
        [(volume_name("v"), "host:1".to_owned())]
    );

    let new = session(&two.pools[1], "v").await;
    new.write(512, bytes(9, 1024), false).await.unwrap();
    let mut expected = vec![0; BLOCKS * BLOCK];
    expected[..3 * BLOCK].fill(1);
    expected[512..1536].fill(9);
    assert_eq!(all(&new).await, expected);
    let after = two.pools[1].volume_info(&volume_name("v")).await.unwrap();
    assert_eq!((after.epoch, after.size_bytes), (before.epoch, before.size_bytes));
    two.complete(1).await;
    assert_eq!(all(&new).await, expected);
    let nothing: [String; 0] = [];
    assert_eq!(two.files[0].names().unwrap().into_iter().collect::<Vec<_>>(), nothing);
}

#[tokio::test]
async fn a_copy_lacks_blocks_until_the_catalog_has_it_as_complete() {
    let two = Two::new();
    of_blocks(&two.pools[0], BLOCKS).await.write(0, bytes(1, BLOCK), false).await.unwrap();
    two.carry(0).await;
    all(&session(&two.pools[1], "v").await).await;
    two.pools[1].settle_copies().await;
    let fetched = home(&two.pools[1]).await;
    let HomeState::Here { missing_bytes, .. } = fetched else { panic!("{fetched:?}") };
    assert_eq!(missing_bytes, BLOCK as u64, "a power cut may still lose what was fetched");
    two.complete(1).await;
}

#[tokio::test(start_paused = true)]
async fn the_new_home_says_why_it_can_t_copy_the_rest() {
    let mut two = Two::new();
    of_blocks(&two.pools[0], BLOCKS).await.write(0, bytes(1, BLOCK), false).await.unwrap();
    assert_eq!(two.carry(0).await.failed, None);
    // It connects anew.
    two.restart(1, 1).await;
    two.hosts.0.lock().unwrap()[0] = std::sync::Weak::new();
    let background = tokio::spawn(Arc::clone(&two.pools[1]).fill_copies(u64::MAX));
    let failed = loop {
        let home = two.pools[1].home(&volume_name("v")).await.unwrap();
        if let Some(failed) = home.failed {
            break failed;
        }
        let is_complete = matches!(home.home, HomeState::Here { missing_bytes: 0, .. });
        assert!(!is_complete, "nobody was there to copy from");
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    background.abort();
    assert!(failed.contains("it is away"), "{failed}");
}

#[tokio::test]
async fn an_arriving_volume_can_t_stand_on_what_another_volume_writes() {
    let two = Two::new();
    of_blocks(&two.pools[0], BLOCKS).await.write(0, bytes(1, BLOCK), false).await.unwrap();
    let other = empty(&two.pools[1], "w", (BLOCKS * BLOCK) as u64).await;
    other.write(0, bytes(7, 2 * BLOCK), false).await.unwrap();
    other.flush().await.unwrap();
    let expected = all(&other).await;
    let files = two.files[1].names().unwrap();
    let head = two.pools[1].volume_info(&volume_name("w")).await.unwrap().chain[0];
    let (take, departed) = two.depart(0).await;
    let mut lie = departed.clone();
    lie.chain[0].layer = head;
    let refused = two.pools[1]
        .move_step(&volume_name("v"))
        .await
        .unwrap()
        .arrive(&take, lie)
        .await
        .unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert_eq!(two.files[1].names().unwrap(), files);
    assert_eq!(all(&other).await, expected);
    two.pools[1].move_step(&volume_name("v")).await.unwrap().arrive(&take, departed).await.unwrap();
}

#[tokio::test]
async fn requests_of_a_move_can_be_repeated_and_come_late() {
    let two = Two::new();
    of_blocks(&two.pools[0], BLOCKS).await.write(0, bytes(1, BLOCK), false).await.unwrap();
    let v = volume_name("v");
    let (take, departed) = two.depart(0).await;
    let ask = Depart { tenure: take.tenure, to: addresses(1) };
    assert_eq!(two.pools[0].move_step(&v).await.unwrap().depart(&ask).await.unwrap(), departed);
    let elsewhere = Depart { to: addresses(7), ..ask.clone() };
    let refused = two.pools[0].move_step(&v).await.unwrap().depart(&elsewhere).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict);
    let arrived =
        two.pools[1].move_step(&v).await.unwrap().arrive(&take, departed.clone()).await.unwrap();
    let written = session(&two.pools[1], "v").await;
    written.write(0, bytes(2, BLOCK), false).await.unwrap();
    let again =
        two.pools[1].move_step(&v).await.unwrap().arrive(&take, departed.clone()).await.unwrap();
    assert_eq!(again, arrived);
    assert_eq!(&all(&written).await[..BLOCK], bytes(2, BLOCK));
    two.complete(1).await;
    two.pools[0].forget_departed(&v, two.tenure(1).await).await.unwrap();
    drop(written);
    two.pools[1].delete_volume(&v).await.unwrap();
    let late = two.pools[1].move_step(&v).await.unwrap().arrive(&take, departed).await.unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    // It was deleted there, and is never taken back because of that.
    let had = take.tenure.next();
    let off = CallOff { tenure: take.tenure };
    let deleted = two.pools[1].refuse_home(&v, off).await.unwrap();
    assert_eq!(deleted.home, HomeState::NotHere { refused: had, had });
    two.pools[0].detach(&v).await.unwrap();
    of_blocks(&two.pools[0], BLOCKS).await;
    let late = two.pools[0].move_step(&v).await.unwrap().depart(&ask).await.unwrap_err();
    assert_eq!(late.kind, ProblemKind::NotFound, "it is another volume: {late}");
}

#[tokio::test]
async fn a_move_that_is_called_off_leaves_everything_as_it_was() {
    let two = Two::new();
    let v = volume_name("v");
    let device = of_blocks(&two.pools[0], BLOCKS).await;
    device.write(100, bytes(1, 9000), false).await.unwrap();
    let expected = all(&device).await;
    let volume = two.pools[0].volume(&v).await.unwrap();
    let first = volume.epoch();
    let issued = volume.issue_epoch().await.unwrap().epoch;
    let back = EpochChange { from: issued, to: first };
    volume.change_epoch(back).await.unwrap();
    drop((device, volume));
    let (take, departed) = two.depart(0).await;
    let off = CallOff { tenure: take.tenure };
    let refused = two.pools[1].refuse_home(&v, off).await.unwrap();
    let never = HomeState::NotHere { refused: take.tenure.next(), had: Tenure(0) };
    assert_eq!(refused.home, never);
    let late = two.pools[1].move_step(&v).await.unwrap().arrive(&take, departed).await.unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict);
    for _ in 0..2 {
        let here = two.pools[0].move_step(&v).await.unwrap().return_home(off).await.unwrap();
        let tenure = take.tenure.next().next();
        assert_eq!(here.home, HomeState::Here { tenure, missing_bytes: 0 });
    }
    let ask = Depart { tenure: take.tenure, to: addresses(1) };
    assert!(two.pools[0].move_step(&v).await.unwrap().depart(&ask).await.is_err(), "it comes late");
    assert_eq!(all(&session(&two.pools[0], "v").await).await, expected);
    let volume = two.pools[0].volume(&v).await.unwrap();
    assert_eq!(volume.epoch(), first);
    let raise = EpochChange { from: first, to: issued };
    volume.change_epoch(raise).await.expect_err("it was given back before the move");
    assert!(volume.issue_epoch().await.unwrap().epoch > issued);
    assert!(two.pools[0].attachments().await.unwrap().is_empty());
    drop(volume);
    two.carry(0).await;
    two.pools[1].refuse_home(&v, off).await.unwrap();
    assert_eq!(all(&session(&two.pools[1], "v").await).await, expected, "the next move");
}

#[tokio::test]
async fn a_volume_to_which_nothing_was_written_moves_without_a_layer() {
    let two = Two::new();
    of_blocks(&two.pools[0], BLOCKS).await;
    let (take, departed) = two.depart(0).await;
    assert_eq!(departed.chain, []);
    two.pools[1].move_step(&volume_name("v")).await.unwrap().arrive(&take, departed).await.unwrap();
    assert_eq!(all(&session(&two.pools[1], "v").await).await, vec![0; BLOCKS * BLOCK]);
    two.complete(1).await;
    two.carry(1).await;
    assert_eq!(all(&session(&two.pools[0], "v").await).await, vec![0; BLOCKS * BLOCK]);
}

#[tokio::test]
async fn a_volume_that_can_t_move_is_refused_with_what_to_do() {
    let two = Two::new();
    let v = volume_name("v");
    of_blocks(&two.pools[0], BLOCKS).await;
    let pool = &two.pools[0];
    let ask = Depart { tenure: two.tenure(0).await, to: addresses(1) };
    let refused = async || {
        let problem = pool.move_step(&v).await.unwrap().depart(&ask).await.unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Conflict);
        assert!(!problem.next.is_empty());
        problem.why
    };
    pool.keep_reservations(&v, Some("{}".to_owned())).await.unwrap();
    assert!(refused().await.contains("reservation"));
    pool.keep_reservations(&v, None).await.unwrap();
    let name = perigee_model::ClientName::new("m").unwrap();
    let (mac, initiator, chap, target_chap) = Default::default();
    let client = NewClient { name: name.clone(), mac, initiator, chap, target_chap };
    pool.add_client(client).await.unwrap();
    let binding = Binding { service: Service::Volume(v.clone()), over: Default::default() };
    pool.bind_client(&name, Some(binding)).await.unwrap();
    assert!(refused().await.contains("boots from it"));
    pool.bind_client(&name, None).await.unwrap();
    pool.move_step(&v).await.unwrap().depart(&ask).await.unwrap();
    assert_eq!(
        pool.move_step(&volume_name("w")).await.unwrap().depart(&ask).await.unwrap_err().kind,
        ProblemKind::NotFound
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_departs_while_another_one_is_flushed_to_be_sealed() {
    let two = Two::new();
    let pool = &two.pools[0];
    of_blocks(pool, BLOCKS).await;
    let other = empty(pool, "w", (BLOCKS * BLOCK) as u64).await;
    other.write(0, bytes(1, BLOCK), false).await.unwrap();
    let head = pool.catalog.volume(&volume_name("w")).unwrap().unwrap().head;
    let ((go, wait), (begun, flushes)) =
        (std::sync::mpsc::channel(), tokio::sync::oneshot::channel());
    let hook = move || {
        begun.send(()).unwrap();
        wait.recv().unwrap();
    };
    let data = two.files[0].file(&crate::layers::layer::data_name(head));
    *data.on_sync.lock().unwrap() = Some(Box::new(hook));
    let sealing = tokio::spawn({
        let pool = Arc::clone(pool);
        async move { pool.snapshot(&volume_name("w"), Snapshot { image: image_name("i") }).await }
    });
    flushes.await.unwrap();
    two.depart(0).await;
    go.send(()).unwrap();
    sealing.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_step_of_a_move_does_not_wait_for_others_without_a_deadline() {
    let two = Two::new();
    let v = volume_name("v");
    of_blocks(&two.pools[0], BLOCKS).await;
    let held = two.pools[0].changes.lock().await;
    let late = two.pools[0].move_step(&v).await.err().expect("somebody else changes something");
    assert_eq!(late.kind, ProblemKind::Unavailable, "{late}");
    drop(held);
    two.depart(0).await;
}

#[tokio::test]
async fn an_image_below_a_volume_that_departed_is_not_deleted() {
    let two = Two::new();
    of_blocks(&two.pools[0], BLOCKS).await.write(0, bytes(1, BLOCK), false).await.unwrap();
    let snapshot = Snapshot { image: image_name("i") };
    two.pools[0].snapshot(&volume_name("v"), snapshot).await.unwrap();
    session(&two.pools[0], "v").await.write(BLOCK as u64, bytes(2, BLOCK), false).await.unwrap();
    two.carry(0).await;
    let refused = two.pools[0].delete_image(&image_name("i")).await.unwrap_err();
    assert!(refused.why.contains("volume v, which departed,"), "{refused}");
    two.complete(1).await;
    two.pools[0].delete_image(&image_name("i")).await.unwrap();
}

#[derive(Debug, Clone)]
enum Step {
    Write { at: usize, length: usize },
    Zero { at: usize, length: usize },
    Snapshot,
    Move { complete: bool },
    CallOff,
    Kill { which: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = BLOCKS * BLOCK;
    let range = move || (0..size, 1..3 * BLOCK);
    let step = prop_oneof![
        6 => range().prop_map(|(at, length)| Step::Write { at, length }),
        2 => range().prop_map(|(at, length)| Step::Zero { at, length }),
        1 => Just(Step::Snapshot),
        3 => any::<bool>().prop_map(|complete| Step::Move { complete }),
        1 => Just(Step::CallOff),
        1 => (0..2_usize).prop_map(|which| Step::Kill { which }),
    ];
    prop::collection::vec(step, 1..40)
}

async fn run(steps: Vec<Step>, seed: u64) {
    let mut two = Two::new();
    let (v, mut dice) = (volume_name("v"), Dice(seed));
    drop(of_blocks(&two.pools[0], BLOCKS).await);
    let mut expected = vec![0; BLOCKS * BLOCK];
    let (mut at, mut images, mut complete) = (0, 0, true);
    for step in steps {
        match step {
            Step::Write { at: from, length } => {
                let to = (from + length).min(expected.len());
                let byte = u8::try_from(dice.below(255)).unwrap() + 1;
                expected[from..to].fill(byte);
                let device = session(&two.pools[at], "v").await;
                device.write(from as u64, bytes(byte, to - from), false).await.unwrap();
            }
            Step::Zero { at: from, length } => {
                let to = (from + length).min(expected.len());
                expected[from..to].fill(0);
                let device = session(&two.pools[at], "v").await;
                device
                    .zero(from as u64, (to - from) as u64, Zeroing::FreeSpace, false)
                    .await
                    .unwrap();
            }
            Step::Snapshot => {
                images += 1;
                let snapshot = Snapshot { image: image_name(&format!("s{images}")) };
                two.pools[at].snapshot(&v, snapshot).await.unwrap();
            }
            Step::Move { complete: now } => {
                if !complete {
                    two.complete(at).await;
                }
                two.carry(at).await;
                (at, complete) = (1 - at, now);
                if now {
                    two.complete(at).await;
                }
            }
            Step::CallOff => {
                if !complete {
                    two.complete(at).await;
                    complete = true;
                }
                let (take, _) = two.depart(at).await;
                let off = CallOff { tenure: take.tenure };
                two.pools[1 - at].refuse_home(&v, off).await.unwrap();
                two.pools[at].move_step(&v).await.unwrap().return_home(off).await.unwrap();
            }
            Step::Kill { which } => two.restart(which, 1).await,
        }
        assert_eq!(all(&session(&two.pools[at], "v").await).await, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 40, ..Default::default() })]

    #[test]
    fn a_volume_that_moves_about_has_what_was_written(steps in steps(), seed in any::<u64>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(run(steps, seed));
    }
}
