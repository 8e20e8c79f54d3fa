//! What requests cost, in operations on files: these may not grow with a volume's size, the depth
//! of its chain or the number of its clones. Counted, never timed.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Mutex;

use perigee_model::volume::Snapshot;

use super::*;
use crate::disk::files::{BlockFile, LayerFiles};

const BLOCK: usize = 4096;

/// Operations and bytes since they were last taken, by file and kind: `data.write`, `live.write`.
type Counts = BTreeMap<String, (u64, u64)>;

#[derive(Default)]
struct Meter(Mutex<Counts>);

impl Meter {
    fn count(&self, name: &str, what: &str, bytes: u64) {
        let kind = name.rsplit('.').next().unwrap();
        let mut counts = self.0.lock().unwrap();
        let (operations, total) = counts.entry(format!("{kind}.{what}")).or_default();
        *operations += 1;
        *total += bytes;
    }

    fn take(&self) -> Counts {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn counts<const N: usize>(expected: [(&str, (u64, u64)); N]) -> Counts {
    expected.into_iter().map(|(what, counts)| (what.to_owned(), counts)).collect()
}

/// Files that count what is done to them.
struct CountedFiles {
    inner: SimFiles,
    meter: Arc<Meter>,
}

struct CountedFile {
    inner: Arc<dyn BlockFile>,
    name: String,
    meter: Arc<Meter>,
}

impl CountedFiles {
    fn wrap(&self, name: &str, inner: Arc<dyn BlockFile>) -> Arc<dyn BlockFile> {
        Arc::new(CountedFile { inner, name: name.to_owned(), meter: Arc::clone(&self.meter) })
    }
}

impl LayerFiles for CountedFiles {
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>> {
        self.meter.count(name, "create", 0);
        Ok(self.wrap(name, self.inner.create(name, length_bytes)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        let inner = self.inner.open(name)?;
        self.meter.count(name, "open", 0);
        Ok(self.wrap(name, inner))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn allocated_bytes(&self, name: &str) -> io::Result<u64> {
        self.inner.allocated_bytes(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.inner.names()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.meter.count("names", "sync", 0);
        self.inner.sync_names()
    }
}

impl CountedFile {
    fn count(&self, what: &str, bytes: u64) {
        self.meter.count(&self.name, what, bytes);
    }
}

impl BlockFile for CountedFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.count("read", buffer.len() as u64);
        self.inner.read_at(offset, buffer)
    }

    fn try_read_at(&self, offset: u64, buffer: &mut [u8]) -> Option<io::Result<()>> {
        self.count("try_read", buffer.len() as u64);
        Some(self.inner.read_at(offset, buffer))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.count("write", data.len() as u64);
        self.inner.write_at(offset, data)
    }

    /// Only counted: the simulated disk would walk through every sector of the range.
    fn punch_hole(&self, _: u64, length_bytes: u64) -> io::Result<()> {
        self.count("punch", length_bytes);
        Ok(())
    }

    fn reserve(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        self.count("reserve", length_bytes);
        self.inner.reserve(offset, length_bytes)
    }

    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        self.inner.next_data(from)
    }

    fn sync(&self) -> io::Result<()> {
        self.count("sync", 0);
        self.inner.sync()
    }

    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
}

/// A pool whose files count.
struct Counted {
    pool: Arc<Pool>,
    meter: Arc<Meter>,
    _dir: tempfile::TempDir,
}

impl Counted {
    fn new() -> Self {
        let dir = crate::sim::scratch_dir();
        let meter = Arc::<Meter>::default();
        let files = CountedFiles { inner: SimFiles::default(), meter: Arc::clone(&meter) };
        let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect: connector() };
        let pool = Pool::open_with(config, Arc::new(files), Uuid::from_u128(1)).unwrap();
        Self { pool, meter, _dir: dir }
    }

    async fn snapshot(&self, name: &str) {
        let request = Snapshot { image: image_name(name) };
        self.pool.snapshot(&volume_name("v"), request).await.unwrap();
    }

    async fn clone_of(&self, image: &str, name: &str) -> Arc<dyn Device> {
        let source = VolumeSource::Image(image_name(image));
        self.pool.create_volume(create(name, None, source)).await.unwrap();
        session(&self.pool, name).await
    }
}

#[tokio::test]
async fn a_rewrite_is_one_write_and_a_new_block_two() {
    let counted = Counted::new();
    let device = empty(&counted.pool, "v", 1 << 30).await;
    device.write(0, bytes(1, BLOCK), false).await.unwrap();
    counted.meter.take();
    device.try_write(0, &[2; BLOCK]).expect("at once").unwrap();
    device.try_write(100, &[3; 200]).expect("at once").unwrap();
    assert_eq!(counted.meter.take(), counts([("data.write", (2, 4296))]));
    device.try_write(8 * 4096, &[2; BLOCK]).expect("at once").unwrap();
    let new = counts([("data.write", (1, 4096)), ("live.write", (1, 1))]);
    assert_eq!(counted.meter.take(), new);
}

#[tokio::test]
async fn a_read_is_one_read_however_deep_the_chain_is() {
    let counted = Counted::new();
    let device = empty(&counted.pool, "v", 1 << 30).await;
    for depth in 1..=32_u64 {
        device.write(depth * 4096, bytes(1, BLOCK), false).await.unwrap();
        counted.snapshot(&format!("s{depth}")).await;
    }
    for image in ["s1", "s32"] {
        let clone = counted.clone_of(image, &format!("of-{image}")).await;
        counted.meter.take();
        let mut found = [0; BLOCK];
        clone.try_read(4096, &mut found).expect("at once").unwrap();
        assert_eq!(found, [1; BLOCK]);
        let one = counts([("data.try_read", (1, 4096))]);
        assert_eq!(counted.meter.take(), one, "below {image}");
    }
}

#[tokio::test]
async fn a_clone_touches_no_file_until_it_is_written() {
    let counted = Counted::new();
    let device = empty(&counted.pool, "v", 1 << 30).await;
    device.write(0, bytes(1, BLOCK), false).await.unwrap();
    counted.snapshot("s").await;
    let first = counted.clone_of("s", "a").await;
    counted.meter.take();
    let second = counted.clone_of("s", "b").await;
    assert_eq!(counted.meter.take(), Counts::new());
    first.flush().await.unwrap();
    second.zero(1 << 20, 1 << 20, Zeroing::FreeSpace, true).await.unwrap();
    assert_eq!(counted.meter.take(), Counts::new(), "there was nothing to make zero");
    second.write(0, bytes(2, BLOCK), false).await.unwrap();
    let files = ["data.create", "live.create", "map.create"];
    let made = counted.meter.take();
    assert!(files.iter().all(|file| made.contains_key(*file)), "{made:?}");
    assert!(!made.keys().any(|what| what.ends_with("sync")), "a flush syncs: {made:?}");
}

#[tokio::test]
async fn a_flush_writes_the_map_pages_that_changed_and_little_else() {
    let counted = Counted::new();
    let device = empty(&counted.pool, "v", 1 << 30).await;
    device.write(0, bytes(1, BLOCK), true).await.unwrap();
    counted.meter.take();
    for block in (0..128_u64).map(|n| 1 + 7 * n) {
        device.try_write(block * 4096, &[2; BLOCK]).expect("at once").unwrap();
    }
    device.flush().await.unwrap();
    let flushed = counted.meter.take();
    let expected = counts([
        ("data.sync", (1, 0)),
        ("data.write", (128, 128 * 4096)),
        ("live.write", (128, 128)),
        ("map.sync", (1, 0)),
        ("map.write", (1, 4096)),
    ]);
    assert_eq!(flushed, expected);
}

/// The same work on a volume of this size, which begins and ends it with a discard of the whole.
async fn work(size_bytes: u64) -> Counts {
    let counted = Counted::new();
    let device = empty(&counted.pool, "v", size_bytes).await;
    device.zero(0, size_bytes, Zeroing::FreeSpace, true).await.unwrap();
    for at in [0, size_bytes / 2, size_bytes - 4096] {
        device.write(at, bytes(1, BLOCK), false).await.unwrap();
        device.flush().await.unwrap();
    }
    counted.snapshot("s").await;
    let clone = counted.clone_of("s", "c").await;
    clone.write(size_bytes / 4, bytes(2, BLOCK), true).await.unwrap();
    let mut found = [0; BLOCK];
    clone.try_read(size_bytes / 2, &mut found).expect("at once").unwrap();
    assert_eq!(found, [1; BLOCK]);
    for device in [device, clone] {
        device.zero(0, size_bytes, Zeroing::FreeSpace, true).await.unwrap();
        let extents = device.extents(0, size_bytes).await.unwrap();
        assert_eq!(extents, [Extent { length_bytes: size_bytes, hole: true, zero: true }]);
    }
    counted.meter.take()
}

#[tokio::test]
async fn sixteen_gib_and_sixteen_tib_cost_the_same() {
    let [small, large] = [work(16 << 30).await, work((16 << 40) - (4 << 12)).await];
    let operations = |counts: &Counts| {
        counts.iter().map(|(what, (operations, _))| (what.clone(), *operations)).collect::<Vec<_>>()
    };
    assert_eq!(operations(&small), operations(&large));
    let total: u64 = large.values().map(|(operations, _)| operations).sum();
    assert!(total < 120, "{large:?}");
}
