//! The store against a plain array, through kills of the server and power cuts.

use perigee_model::volume::{Snapshot, VolumeSource};
use proptest::prelude::*;

use super::*;
use crate::store::layer::{data_name, map_name};
use crate::store::sim::{Dice, SECTOR_BYTES, Versions};

/// One step; indices are taken modulo what there is.
#[derive(Debug, Clone)]
enum Step {
    Write {
        volume: usize,
        at: usize,
        length: usize,
        byte: u8,
        fua: bool,
    },
    Zero {
        volume: usize,
        at: usize,
        length: usize,
        how: Zeroing,
        fua: bool,
    },
    Read {
        volume: usize,
        at: usize,
        length: usize,
    },
    Flush {
        volume: usize,
    },
    Snapshot {
        volume: usize,
    },
    Clone {
        volume: usize,
        grow_blocks: u64,
    },
    Kill,
    PowerCut {
        seed: u64,
    },
    /// The server dies within a flush, while it syncs the data or the map; with a seed, in a
    /// power cut.
    DieInFlush {
        volume: usize,
        in_map: bool,
        power_cut: Option<u64>,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = || (any::<usize>(), any::<usize>(), prop_oneof![1..200_usize, 1..20_000_usize]);
    let how = prop_oneof![Just(Zeroing::FreeSpace), Just(Zeroing::KeepSpace)];
    let fua = || prop::bool::weighted(0.1);
    let step = prop_oneof![
        8 => (range(), any::<u8>(), fua()).prop_map(|((volume, at, length), byte, fua)| {
            Step::Write { volume, at, length, byte, fua }
        }),
        4 => (range(), how, fua()).prop_map(|((volume, at, length), how, fua)| {
            Step::Zero { volume, at, length, how, fua }
        }),
        4 => range().prop_map(|(volume, at, length)| Step::Read { volume, at, length }),
        3 => any::<usize>().prop_map(|volume| Step::Flush { volume }),
        1 => any::<usize>().prop_map(|volume| Step::Snapshot { volume }),
        1 => (any::<usize>(), 0..3_u64)
            .prop_map(|(volume, grow_blocks)| Step::Clone { volume, grow_blocks }),
        1 => Just(Step::Kill),
        2 => any::<u64>().prop_map(|seed| Step::PowerCut { seed }),
        2 => (any::<usize>(), any::<bool>(), any::<Option<u64>>()).prop_map(
            |(volume, in_map, power_cut)| Step::DieInFlush { volume, in_map, power_cut }
        ),
    ];
    prop::collection::vec(step, 1..50)
}

/// A volume and the array it should equal.
struct Twin {
    name: VolumeName,
    device: Option<Arc<dyn Device>>,
    bytes: Vec<u8>,
    /// What each sector may be after a power cut, where that is not just its byte in `bytes`.
    unflushed: Versions,
}

impl Twin {
    fn new(name: &str, bytes: Vec<u8>) -> Self {
        Self { name: volume_name(name), device: None, bytes, unflushed: Versions::default() }
    }

    async fn device(&mut self, pool: &Arc<Pool>) -> Arc<dyn Device> {
        if self.device.is_none() {
            self.device = Some(pool.volume(&self.name).await.unwrap().session(None));
        }
        Arc::clone(self.device.as_ref().unwrap())
    }

    fn fill(&mut self, at: usize, length: usize, byte: u8, fua: bool) {
        self.unflushed.record(&self.bytes, at, length);
        self.bytes[at..at + length].fill(byte);
        self.unflushed.record(&self.bytes, at, length);
        if fua {
            self.unflushed.clear();
        }
    }

    /// Where a request lies, at odd offsets more often than not.
    fn place(&self, at: usize, length: usize) -> (usize, usize) {
        let at = at % self.bytes.len();
        (at, length.min(self.bytes.len() - at))
    }

    async fn check(&mut self, pool: &Arc<Pool>) {
        let found = all(&self.device(pool).await).await;
        assert!(found == self.bytes, "{}: {}", self.name, first_difference(&found, &self.bytes));
    }

    /// Each sector is as flushed or as some write since left it, never anything else.
    async fn check_after_power_cut(&mut self, pool: &Arc<Pool>) {
        let found = all(&self.device(pool).await).await;
        for (sector, versions) in self.unflushed.iter() {
            let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            let now = &found[range.clone()];
            let known = versions.iter().any(|version| version == now);
            assert!(known, "{}: sector {sector} is neither old nor new", self.name);
            self.bytes[range.clone()].copy_from_slice(now);
        }
        self.unflushed.clear();
        assert!(found == self.bytes, "{}: {}", self.name, first_difference(&found, &self.bytes));
    }
}

fn first_difference(found: &[u8], expected: &[u8]) -> String {
    let at = found.iter().zip(expected).position(|(found, expected)| found != expected);
    at.map_or("other length".to_owned(), |at| {
        format!("byte {at} is {} and not {}", found[at], expected[at])
    })
}

struct World {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    pool: Option<Arc<Pool>>,
    boot: u128,
    volumes: Vec<Twin>,
    images: Vec<(ImageName, Vec<u8>)>,
}

impl World {
    /// An empty volume, and one over a remote parent that it outgrows.
    async fn new() -> Self {
        let (dir, files) = (tempfile::tempdir().unwrap(), Arc::default());
        let pool = open_sim(dir.path(), &files, 1);
        let nothing = create("empty", Some(6 * 4096), VolumeSource::Empty);
        pool.create_volume(nothing).await.unwrap();
        let source =
            VolumeSource::Remote { nbd_addr: "there:1".to_owned(), export: "x".to_owned() };
        pool.create_volume(create("remote", Some(8 * 4096), source)).await.unwrap();
        let mut remote = remote_bytes();
        remote.resize(8 * 4096, 0);
        let volumes = vec![Twin::new("empty", vec![0; 6 * 4096]), Twin::new("remote", remote)];
        Self { dir, files, pool: Some(pool), boot: 1, volumes, images: Vec::new() }
    }

    fn pool(&self) -> Arc<Pool> {
        Arc::clone(self.pool.as_ref().expect("open between steps"))
    }

    fn restart(&mut self, power_cut: Option<u64>) {
        for twin in &mut self.volumes {
            twin.device = None;
        }
        self.pool = None;
        if let Some(seed) = power_cut {
            self.files.power_cut(&mut Dice(seed));
            self.boot += 1;
        }
        self.pool = Some(open_sim(self.dir.path(), &self.files, self.boot));
    }

    async fn apply(&mut self, step: Step) {
        let pool = self.pool();
        let count = self.volumes.len();
        match step {
            Step::Write { volume, at, length, byte, fua } => {
                let twin = &mut self.volumes[volume % count];
                let (at, length) = twin.place(at, length);
                let device = twin.device(&pool).await;
                device.write(at as u64, bytes(byte, length), fua).await.unwrap();
                twin.fill(at, length, byte, fua);
            }
            Step::Zero { volume, at, length, how, fua } => {
                let twin = &mut self.volumes[volume % count];
                let (at, length) = twin.place(at, length);
                let device = twin.device(&pool).await;
                device.zero(at as u64, length as u64, how, fua).await.unwrap();
                twin.fill(at, length, 0, fua);
            }
            Step::Read { volume, at, length } => {
                let twin = &mut self.volumes[volume % count];
                let (at, length) = twin.place(at, length);
                let length_bytes = u32::try_from(length).unwrap();
                let found = twin.device(&pool).await.read(at as u64, length_bytes).await.unwrap();
                assert!(found == twin.bytes[at..at + length], "{}: a read differs", twin.name);
            }
            Step::Flush { volume } => {
                let twin = &mut self.volumes[volume % count];
                twin.device(&pool).await.flush().await.unwrap();
                twin.unflushed.clear();
            }
            Step::Snapshot { volume } => self.snapshot(&pool, volume % count).await,
            Step::Clone { volume, grow_blocks } => {
                self.clone_volume(&pool, volume % count, grow_blocks).await;
            }
            Step::Kill => {
                drop(pool);
                self.restart_and_check(None).await;
            }
            Step::PowerCut { seed } => {
                drop(pool);
                self.restart_and_check(Some(seed)).await;
            }
            Step::DieInFlush { volume, in_map, power_cut } => {
                self.die_in_flush(pool, volume % count, in_map).await;
                self.restart_and_check(power_cut).await;
            }
        }
    }

    async fn restart_and_check(&mut self, power_cut: Option<u64>) {
        self.restart(power_cut);
        let pool = self.pool();
        for twin in &mut self.volumes {
            match power_cut {
                None => twin.check(&pool).await,
                Some(_) => twin.check_after_power_cut(&pool).await,
            }
        }
    }

    async fn die_in_flush(&mut self, pool: Arc<Pool>, volume: usize, in_map: bool) {
        let twin = &mut self.volumes[volume];
        let device = twin.device(&pool).await;
        let head = pool.volume_info(&twin.name).await.unwrap().chain[0];
        let name = if in_map { map_name(head) } else { data_name(head) };
        // A head that was never written has no files.
        let file = self.files.has(&name).then(|| self.files.file(&name));
        if let Some(file) = &file {
            *file.on_sync.lock().unwrap() =
                Some(Box::new(|| std::panic::resume_unwind(Box::new(0))));
        }
        let flushed = tokio::spawn(async move { device.flush().await }).await;
        // It got to its end if there was nothing to sync in that file.
        if let Some(file) = &file {
            file.on_sync.lock().unwrap().take();
        }
        if let Ok(result) = flushed {
            result.unwrap();
            twin.unflushed.clear();
        }
    }

    async fn snapshot(&mut self, pool: &Arc<Pool>, volume: usize) {
        let image = image_name(&format!("s{}", self.images.len()));
        let twin = &mut self.volumes[volume];
        pool.snapshot(&twin.name, Snapshot { image: image.clone() }).await.unwrap();
        twin.unflushed.clear();
        self.images.push((image, twin.bytes.clone()));
    }

    async fn clone_volume(&mut self, pool: &Arc<Pool>, volume: usize, grow_blocks: u64) {
        let name = format!("c{}", self.volumes.len());
        let source = &mut self.volumes[volume];
        let size_bytes = source.bytes.len() as u64 + grow_blocks * 4096;
        let from = VolumeSource::Volume(source.name.clone());
        pool.create_volume(create(&name, Some(size_bytes), from)).await.unwrap();
        source.unflushed.clear();
        let mut expected = source.bytes.clone();
        expected.resize(usize::try_from(size_bytes).unwrap(), 0);
        self.volumes.push(Twin::new(&name, expected));
    }

    async fn check_all(&mut self) {
        let pool = self.pool();
        for twin in &mut self.volumes {
            twin.check(&pool).await;
        }
        for (image, expected) in &self.images {
            let found = all(&pool.open_image(image).await.unwrap()).await;
            assert!(found == *expected, "image {image} changed");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(100),
        max_shrink_iters: 400,
        ..ProptestConfig::default()
    })]

    #[test]
    fn volumes_equal_arrays_through_kills_and_power_cuts(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new().await;
            for step in steps {
                world.apply(step).await;
            }
            world.check_all().await;
        });
    }
}
