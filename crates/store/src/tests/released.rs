//! Deleted snapshots: the name goes at once, the layer is merged into what stands on it, and nobody sees that.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use perigee_model::ProblemKind;
use perigee_model::volume::{CheckScope, DeletedImage, Resize, Snapshot, VolumeSource};
use proptest::prelude::*;

use super::*;
use crate::Work;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 32;

async fn snapshot(pool: &Arc<Pool>, volume: &str, name: &str) {
    let request = Snapshot { image: image_name(name) };
    pool.snapshot(&volume_name(volume), request).await.unwrap();
}

async fn delete(pool: &Arc<Pool>, name: &str) -> DeletedImage {
    pool.delete_image(&image_name(name)).await.unwrap()
}

/// What the keeper does.
async fn merge(pool: &Arc<Pool>) {
    for layer in pool.catalog.released().unwrap() {
        pool.merge_released(layer, Arc::default()).await.unwrap();
    }
}

async fn depth(pool: &Arc<Pool>, volume: &str) -> usize {
    pool.volume_info(&volume_name(volume)).await.unwrap().chain.len()
}

async fn is_sound(pool: &Arc<Pool>) {
    let report = pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert_eq!((report.faults, report.leftovers), (vec![], vec![]));
}

/// Volume `v` with the snapshots `s0`, `s1` and `s2`, each of which has hidden a part of the one below.
async fn with_snapshots(pool: &Arc<Pool>) -> Arc<dyn Device> {
    let device = empty(pool, "v", BLOCKS * 4096).await;
    device.write(0, bytes(9, 20 * BLOCK), false).await.unwrap();
    for number in 0..3_u8 {
        snapshot(pool, "v", &format!("s{number}")).await;
        let at = u64::from(number) * 3 * 4096;
        device.write(at, bytes(number + 1, 8 * BLOCK), false).await.unwrap();
        device.zero(at + 2 * 4096, 4096, Zeroing::FreeSpace, false).await.unwrap();
        device.write(at + 100, bytes(number + 100, 300), false).await.unwrap();
    }
    device
}

#[tokio::test]
async fn all_snapshots_of_a_volume_in_use_are_deleted_and_its_chain_is_one_layer() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = with_snapshots(&pool).await;
    let expected = all(&device).await;
    assert_eq!(depth(&pool, "v").await, 4);
    for name in ["s1", "s2", "s0"] {
        let deleted = delete(&pool, name).await;
        assert!(deleted.stands_on_it.contains(&"volume v".to_owned()), "{deleted:?}");
        let gone = pool.delete_image(&image_name(name)).await.unwrap_err();
        assert_eq!(gone.kind, ProblemKind::NotFound, "its name is free at once");
        merge(&pool).await;
        assert_eq!(all(&device).await, expected, "{name}");
    }
    assert_eq!(depth(&pool, "v").await, 1);
    let taken = pool.info().await.unwrap().data_bytes;
    let shown = expected.chunks(BLOCK).filter(|block| block.iter().any(|byte| *byte != 0)).count();
    assert_eq!(taken, (shown * BLOCK) as u64, "what was hidden takes no space any more");
    is_sound(&pool).await;
    drop((device, pool));
    let pool = open_real(dir.path()).await;
    assert_eq!(all(&session(&pool, "v").await).await, expected, "opened again");
}

#[tokio::test]
async fn the_last_two_snapshots_are_kept_and_the_chain_does_not_grow() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", BLOCKS * 4096).await;
    let mut kept = std::collections::VecDeque::new();
    for day in 0..12_u8 {
        device.write(u64::from(day % 5) * 4096, bytes(day + 1, 3 * BLOCK), false).await.unwrap();
        let name = format!("day-{day}");
        snapshot(&pool, "v", &name).await;
        kept.push_back((name, all(&device).await));
        if kept.len() > 2 {
            delete(&pool, &kept.pop_front().unwrap().0).await;
        }
        merge(&pool).await;
        for (name, content) in &kept {
            let image = pool.open_image(&image_name(name)).await.unwrap();
            assert_eq!(all(&image).await, *content, "{name}");
        }
        let layers = depth(&pool, "v").await;
        assert!(layers <= 4, "{layers} layers: the head, two with names, and all others as one");
    }
    is_sound(&pool).await;
}

#[tokio::test]
async fn a_layer_on_which_several_stand_waits_for_the_last_one() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = empty(&pool, "v", BLOCKS * 4096).await;
    device.write(0, bytes(1, 9 * BLOCK), false).await.unwrap();
    snapshot(&pool, "v", "s").await;
    let clone = create("c", None, VolumeSource::Image(image_name("s")));
    pool.create_volume(clone).await.unwrap();
    device.write(0, bytes(2, BLOCK), false).await.unwrap();
    let expected = all(&device).await;
    let deleted = delete(&pool, "s").await;
    assert_eq!(deleted.stands_on_it, ["volume c", "volume v"]);
    merge(&pool).await;
    assert_eq!((depth(&pool, "v").await, depth(&pool, "c").await), (2, 2), "both need it");
    assert_eq!(all(&session(&pool, "c").await).await[..BLOCK], [1; BLOCK]);
    pool.delete_volume(&volume_name("c")).await.unwrap();
    merge(&pool).await;
    assert_eq!(depth(&pool, "v").await, 1);
    assert_eq!(all(&device).await, expected);
    is_sound(&pool).await;
}

#[tokio::test]
async fn layers_below_one_that_several_need_become_one_for_all_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = with_snapshots(&pool).await;
    let clone = create("c", None, VolumeSource::Image(image_name("s2")));
    pool.create_volume(clone).await.unwrap();
    let (v, c) = (all(&device).await, all(&session(&pool, "c").await).await);
    for name in ["s0", "s1", "s2"] {
        delete(&pool, name).await;
    }
    merge(&pool).await;
    assert_eq!((depth(&pool, "v").await, depth(&pool, "c").await), (2, 2));
    assert_eq!(all(&device).await, v);
    assert_eq!(all(&session(&pool, "c").await).await, c);
    is_sound(&pool).await;
}

#[tokio::test]
async fn what_a_larger_or_smaller_volume_shows_beyond_a_deleted_snapshot_s_end_stays() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    drop(with_snapshots(&pool).await);
    for blocks in [5, BLOCKS, BLOCKS + 9] {
        let request = Resize { size_bytes: blocks * 4096, shrink: true };
        pool.resize_volume(&volume_name("v"), request).await.unwrap();
    }
    let device = session(&pool, "v").await;
    let expected = all(&device).await;
    assert!(expected[5 * BLOCK..].iter().all(|byte| *byte == 0));
    // The older ones have names: zeros must hide what they have.
    delete(&pool, "s2").await;
    merge(&pool).await;
    assert_eq!((depth(&pool, "v").await, all(&device).await), (3, expected.clone()));
    delete(&pool, "s0").await;
    delete(&pool, "s1").await;
    merge(&pool).await;
    assert_eq!((depth(&pool, "v").await, all(&device).await), (1, expected));
}

#[tokio::test]
async fn a_merge_that_was_stopped_goes_on_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = with_snapshots(&pool).await;
    let expected = all(&device).await;
    delete(&pool, "s2").await;
    let released = pool.catalog.released().unwrap();
    let work = Arc::new(Work::default());
    work.stop();
    let stopped = pool.merge_released(released[0], work).await.unwrap_err();
    assert_eq!(stopped.kind, ProblemKind::Unavailable, "{stopped}");
    assert_eq!((depth(&pool, "v").await, all(&device).await), (4, expected.clone()));
    drop((device, pool));
    let pool = open_real(dir.path()).await;
    merge(&pool).await;
    let device = session(&pool, "v").await;
    assert_eq!((depth(&pool, "v").await, all(&device).await), (3, expected));
    is_sound(&pool).await;
}

#[tokio::test]
async fn a_layer_that_a_replica_needs_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    let device = with_snapshots(&pool).await;
    let (expected, site) = (all(&device).await, perigee_model::SiteId::new("cloud").unwrap());
    let info = pool.image_info(&image_name("s2")).await.unwrap();
    pool.catalog.pin_filling(&volume_name("v"), site.as_str(), info.layer).unwrap();
    for name in ["s0", "s1", "s2"] {
        delete(&pool, name).await;
    }
    merge(&pool).await;
    assert_eq!(depth(&pool, "v").await, 4, "the replica copies all of them");
    pool.catalog.pin_complete(&volume_name("v"), site.as_str(), Some(info.layer)).unwrap();
    merge(&pool).await;
    assert_eq!(depth(&pool, "v").await, 3, "the replica's newest stays as it is");
    pool.catalog.pin_complete(&volume_name("v"), site.as_str(), None).unwrap();
    merge(&pool).await;
    assert_eq!((depth(&pool, "v").await, all(&device).await), (1, expected));
}

#[tokio::test]
async fn a_volume_that_reads_the_layer_from_another_host_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let layer = LayerId(Uuid::from_u128(7));
    let config = PoolConfig {
        private: None,
        dir: dir.path().to_owned(),
        connect: reach(Arc::new(FakeRemote(remote_bytes(), Some(layer)))),
    };
    let pool = Pool::open(config).await.unwrap();
    let there = VolumeSource::Remote { nbd_addr: "there:1".into(), export: "layer:x".into() };
    pool.create_volume(create("far", Some(8 * 4096), there)).await.unwrap();
    let find = perigee_model::leave_site::FindLayers { layers: vec![layer], volume: None };
    assert_eq!(pool.find_layers(find).await.unwrap().readers, ["volume far"]);
}

/// Sessions write, discard and read all the time while their snapshots come and go: each reads what it wrote last.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clients_see_nothing_of_merges_under_them() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    drop(empty(&pool, "v", BLOCKS * 4096).await);
    let keeper = tokio::spawn(Arc::clone(&pool).keep());
    let stop = Arc::new(AtomicBool::new(false));
    // Each has a part of the volume of its own, which ends within a block.
    let part_bytes = BLOCKS * 4096 / 4 - 1000;
    let writers: Vec<_> = (0..4_u64)
        .map(|writer| {
            let (pool, stop) = (Arc::clone(&pool), Arc::clone(&stop));
            tokio::spawn(async move {
                let device = session(&pool, "v").await;
                let from = writer * part_bytes;
                let mut model = vec![0; usize::try_from(part_bytes).unwrap()];
                let mut dice = crate::sim::Dice(writer + 1);
                let mut rounds = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let at = dice.below(model.len());
                    let length = (1 + dice.below(9000)).min(model.len() - at);
                    let byte = u8::try_from(1 + dice.below(255)).unwrap();
                    let offset = from + at as u64;
                    if dice.below(4) == 0 {
                        let how = Zeroing::FreeSpace;
                        device.zero(offset, length as u64, how, false).await.unwrap();
                        model[at..at + length].fill(0);
                    } else {
                        device
                            .write(offset, bytes(byte, length), rounds.is_multiple_of(7))
                            .await
                            .unwrap();
                        model[at..at + length].fill(byte);
                    }
                    let found =
                        device.read(from, u32::try_from(part_bytes).unwrap()).await.unwrap();
                    assert!(found == model, "writer {writer}, round {rounds}");
                    rounds += 1;
                }
                (from, model)
            })
        })
        .collect();
    for number in 0..12 {
        let name = format!("s{number}");
        snapshot(&pool, "v", &name).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        // Every third one stays a while.
        if number % 3 != 0 {
            delete(&pool, &name).await;
        }
    }
    for number in [0, 3, 6, 9] {
        delete(&pool, &format!("s{number}")).await;
    }
    let begun = std::time::Instant::now();
    while depth(&pool, "v").await > 1 {
        assert!(begun.elapsed().as_secs() < 60, "waited 60 s for the layers to be merged");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.store(true, Ordering::Relaxed);
    keeper.abort();
    drop(keeper.await);
    let mut models = Vec::new();
    for writer in writers {
        models.push(writer.await.unwrap());
    }
    pool.flush().await.unwrap();
    drop(pool);
    let pool = loop {
        let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect: connector() };
        match Pool::open(config).await {
            Ok(pool) => break pool,
            // What the keeper was just doing ends soon.
            Err(problem) => {
                assert!(begun.elapsed().as_secs() < 60, "waited 60 s for the pool: {problem}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let device = session(&pool, "v").await;
    for (from, model) in models {
        let found = device.read(from, u32::try_from(part_bytes).unwrap()).await.unwrap();
        assert!(found == model, "opened again: the part from {from}");
    }
    is_sound(&pool).await;
}

#[derive(Debug, Clone)]
enum Do {
    Write { which: usize, at: usize, length: usize },
    Zero { which: usize, at: usize, length: usize },
    Snapshot { which: usize },
    Clone { which: usize },
    CloneImage { which: usize },
    DeleteImage { which: usize },
    DeleteVolume { which: usize },
    Merge,
    Compact { which: usize },
    Reopen { power_cut: bool },
}

fn steps() -> impl Strategy<Value = Vec<Do>> {
    let some = any::<usize>;
    let place = || (some(), 0..12 * BLOCK, 1..9000_usize);
    let step = prop_oneof![
        8 => place().prop_map(|(which, at, length)| Do::Write { which, at, length }),
        3 => place().prop_map(|(which, at, length)| Do::Zero { which, at, length }),
        4 => some().prop_map(|which| Do::Snapshot { which }),
        1 => some().prop_map(|which| Do::Clone { which }),
        2 => some().prop_map(|which| Do::CloneImage { which }),
        4 => some().prop_map(|which| Do::DeleteImage { which }),
        1 => some().prop_map(|which| Do::DeleteVolume { which }),
        3 => Just(Do::Merge),
        1 => some().prop_map(|which| Do::Compact { which }),
        1 => any::<bool>().prop_map(|power_cut| Do::Reopen { power_cut }),
    ];
    prop::collection::vec(step, 1..40)
}

/// A pool, and beside it what its volumes and images must show.
struct Reference {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    pool: Arc<Pool>,
    boot: u128,
    shown: BTreeMap<String, Vec<u8>>,
    names: u32,
}

impl Reference {
    async fn new() -> Self {
        let (dir, files) = (crate::sim::scratch_dir(), Arc::default());
        let pool = open_sim(dir.path(), &files, 1);
        drop(empty(&pool, "v", 12 * 4096).await);
        let shown = BTreeMap::from([("v".to_owned(), vec![0; 12 * BLOCK])]);
        Self { dir, files, pool, boot: 1, shown, names: 0 }
    }

    fn choose(&self, which: usize, images: bool) -> Option<String> {
        let names = self.shown.keys().filter(|name| name.starts_with("s") == images);
        let names: Vec<_> = names.collect();
        (!names.is_empty()).then(|| names[which % names.len()].clone())
    }

    fn copy(&mut self, of: &str, prefix: &str) -> String {
        self.names += 1;
        let name = format!("{prefix}{}", self.names);
        self.shown.insert(name.clone(), self.shown[of].clone());
        name
    }

    async fn change(&mut self, name: &str, at: usize, length: usize, byte: u8) {
        let length = length.min(12 * BLOCK - at);
        let device = session(&self.pool, name).await;
        match byte {
            0 => device.zero(at as u64, length as u64, Zeroing::FreeSpace, false).await.unwrap(),
            _ => device.write(at as u64, bytes(byte, length), false).await.unwrap(),
        }
        self.shown.get_mut(name).unwrap()[at..at + length].fill(byte);
    }

    async fn apply(&mut self, step: &Do, number: usize) {
        let byte = u8::try_from(number % 255 + 1).unwrap();
        match *step {
            Do::Write { which, at, length } => {
                let name = self.choose(which, false);
                if let Some(name) = name {
                    self.change(&name, at, length, byte).await;
                }
            }
            Do::Zero { which, at, length } => {
                if let Some(name) = self.choose(which, false) {
                    self.change(&name, at, length, 0).await;
                }
            }
            Do::Snapshot { which } => {
                if let Some(of) = self.choose(which, false) {
                    let name = self.copy(&of, "s");
                    snapshot(&self.pool, &of, &name).await;
                }
            }
            Do::Clone { which } => {
                if let Some(of) = self.choose(which, false) {
                    let name = self.copy(&of, "c");
                    let source = VolumeSource::Volume(volume_name(&of));
                    self.pool.create_volume(create(&name, None, source)).await.unwrap();
                }
            }
            Do::CloneImage { which } => {
                if let Some(of) = self.choose(which, true) {
                    let name = self.copy(&of, "c");
                    let source = VolumeSource::Image(image_name(&of));
                    self.pool.create_volume(create(&name, None, source)).await.unwrap();
                }
            }
            Do::DeleteImage { which } => {
                if let Some(name) = self.choose(which, true) {
                    self.shown.remove(&name);
                    delete(&self.pool, &name).await;
                }
            }
            Do::DeleteVolume { which } => {
                if let Some(name) = self.choose(which, false) {
                    self.shown.remove(&name);
                    self.pool.delete_volume(&volume_name(&name)).await.unwrap();
                }
            }
            Do::Merge => merge(&self.pool).await,
            Do::Compact { which } => {
                if let Some(name) = self.choose(which, false) {
                    let volume = volume_name(&name);
                    self.pool.compact_volume(&volume, Arc::default()).await.unwrap();
                }
            }
            Do::Reopen { power_cut } => self.reopen(power_cut).await,
        }
    }

    async fn reopen(&mut self, power_cut: bool) {
        if power_cut {
            self.pool.flush().await.unwrap();
        }
        // The pool's directory has one user at a time.
        self.pool = open_sim(crate::sim::scratch_dir().path(), &Arc::default(), 1);
        if power_cut {
            self.files
                .power_cut(&mut crate::sim::Dice(u64::try_from(self.boot).expect("few boots")));
            self.boot += 1;
        }
        self.pool = open_sim(self.dir.path(), &self.files, self.boot);
    }

    async fn check(&self) {
        for (name, shown) in &self.shown {
            let device = match name.starts_with('s') {
                true => self.pool.open_image(&image_name(name)).await.unwrap(),
                false => session(&self.pool, name).await,
            };
            assert!(all(&device).await == *shown, "{name} shows something else");
        }
    }

    /// When all names are gone, each volume that shares nothing is one layer.
    async fn end(mut self) {
        while let Some(name) = self.choose(0, true) {
            self.shown.remove(&name);
            delete(&self.pool, &name).await;
        }
        while self.shown.len() > 1 {
            let name = self.choose(0, false).unwrap();
            self.shown.remove(&name);
            self.pool.delete_volume(&volume_name(&name)).await.unwrap();
        }
        merge(&self.pool).await;
        self.check().await;
        assert_eq!(self.pool.catalog.released().unwrap(), []);
        let Some(last) = self.shown.keys().next() else { return };
        let done = self.pool.compact_volume(&volume_name(last), Arc::default()).await.unwrap();
        assert_eq!(done.layers_after, 1);
        self.check().await;
        assert_eq!(self.pool.info().await.unwrap().volumes, 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 60,
        max_shrink_iters: 300,
        ..ProptestConfig::default()
    })]

    #[test]
    fn volumes_and_images_show_what_they_should_whatever_is_deleted_and_merged(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut reference = Reference::new().await;
            for (number, step) in steps.iter().enumerate() {
                reference.apply(step, number).await;
                reference.check().await;
            }
            reference.end().await;
        });
    }
}
