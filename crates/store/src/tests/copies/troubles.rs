//! How copies are completed in the background over a slow link, and while the other host's disk fails.

use perigee_model::read_ahead::FILL_BYTES_PER_S;
use tokio::time::Instant;

use super::*;
use crate::copies::fill::Flow;

const ROUND_TRIP: Duration = Duration::from_millis(16);
/// The background asks for the extents of so much at once.
const WINDOW_BYTES: u64 = 256 << 20;

/// Another host with a large image, behind a link with a rate and a round trip.
struct Far {
    size_bytes: u64,
    bytes_per_s: u64,
    /// Of each [`WINDOW_BYTES`] only so many have data.
    dense_bytes: u64,
    /// The link is in use until then.
    busy_until: Mutex<Instant>,
    /// The disk there fails.
    broken: AtomicBool,
    /// It tells extents of one byte.
    shreds: AtomicBool,
    /// It answers nothing any more.
    silent: AtomicBool,
    /// How often its extents were asked for.
    asked: AtomicUsize,
    layer: u128,
}

impl Far {
    fn new(size_bytes: u64, bytes_per_s: u64) -> Arc<Self> {
        Self::with_holes(size_bytes, bytes_per_s, u64::MAX)
    }

    fn with_holes(size_bytes: u64, bytes_per_s: u64, dense_bytes: u64) -> Arc<Self> {
        Arc::new(Self::of(size_bytes, bytes_per_s, dense_bytes))
    }

    fn of(size_bytes: u64, bytes_per_s: u64, dense_bytes: u64) -> Self {
        Self {
            size_bytes,
            bytes_per_s,
            dense_bytes,
            busy_until: Mutex::new(Instant::now()),
            broken: AtomicBool::default(),
            shreds: AtomicBool::default(),
            silent: AtomicBool::default(),
            asked: AtomicUsize::default(),
            layer: 77,
        }
    }

    fn pool(self: &Arc<Self>, dir: &tempfile::TempDir) -> Arc<Pool> {
        let (dir, connect) = (dir.path().to_owned(), reach(self.clone()));
        let config = PoolConfig { private: None, dir, connect };
        Pool::open_with(config, Arc::new(SimFiles::default()), Uuid::from_u128(1)).unwrap()
    }

    async fn unless_silent(&self) {
        if self.silent.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    /// What an answer of so many bytes waits for.
    fn arrives(&self, bytes: u64) -> Instant {
        let mut busy_until = self.busy_until.lock().unwrap();
        let micros = bytes * 1_000_000 / self.bytes_per_s;
        *busy_until = Instant::now().max(*busy_until) + Duration::from_micros(micros);
        *busy_until + ROUND_TRIP
    }
}

impl Device for Far {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn layer(&self) -> Option<LayerId> {
        Some(LayerId(Uuid::from_u128(self.layer)))
    }

    fn read(&self, _: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            self.unless_silent().await;
            tokio::time::sleep_until(self.arrives(length_bytes.into())).await;
            if self.broken.load(Ordering::SeqCst) {
                return Err(std::io::Error::from_raw_os_error(nix::libc::EIO).into());
            }
            Ok(bytes(7, length_bytes as usize))
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

    fn extents(&self, at: u64, length_bytes: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let shreds = self.shreds.load(Ordering::SeqCst);
        let place = at % WINDOW_BYTES;
        let hole = place >= self.dense_bytes;
        let left_bytes = if hole { WINDOW_BYTES - place } else { self.dense_bytes - place };
        Box::pin(async move {
            self.unless_silent().await;
            tokio::time::sleep(ROUND_TRIP).await;
            let byte = |number| Extent { length_bytes: 1, hole: number % 2 == 0, zero: false };
            match shreds {
                true => Ok((0..1 << 16).map(byte).collect()),
                false => {
                    let length_bytes = length_bytes.min(left_bytes);
                    Ok(vec![Extent { length_bytes, hole, zero: hole }])
                }
            }
        })
    }

    fn round_trip(&self) -> Duration {
        ROUND_TRIP
    }
}

async fn copy_in(pool: &Arc<Pool>) {
    let (nbd_addr, export, layer) = ("there:1".to_owned(), None, None);
    let request = CopyImage { content: None, nbd_addr, export, keep: Keep::All, layer };
    pool.copy_image(&image_name("i"), request).await.unwrap();
}

/// Waits until the background has completed the image, and returns the time that this took.
async fn completed(pool: &Arc<Pool>) -> Duration {
    let began = Instant::now();
    loop {
        let info = pool.image_info(&image_name("i")).await.unwrap();
        if info.remote.is_none() {
            return began.elapsed();
        }
        assert!(began.elapsed() < Duration::from_secs(600), "{info:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The clock stands still while anything works, so this measures the waits only.
#[tokio::test(start_paused = true)]
async fn round_trips_do_not_keep_the_background_from_the_link_s_rate() {
    const SIZE_BYTES: u64 = 48 << 20;
    // The second link is thinner than the background's limit.
    for bytes_per_s in [125_000_000, 12_500_000] {
        let (dir, far) = (tempfile::tempdir().unwrap(), Far::new(SIZE_BYTES, bytes_per_s));
        let pool = far.pool(&dir);
        copy_in(&pool).await;
        let background = tokio::spawn(Arc::clone(&pool).fill_copies(FILL_BYTES_PER_S));
        let took = completed(&pool).await;
        background.abort();
        let rate = FILL_BYTES_PER_S.min(bytes_per_s);
        let best = Duration::from_micros(SIZE_BYTES * 1_000_000 / rate);
        assert!(took < best * 13 / 10, "{took:?} at {bytes_per_s} bytes/s; the best is {best:?}");
    }
}

/// How long the background takes for this much data in each of these windows, while so many readers read here and there,
/// each with a pause between two reads.
async fn filled_beside(windows: u64, dense_bytes: u64, readers: u64, pause: Duration) -> Duration {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::with_holes(windows * WINDOW_BYTES, 125_000_000, dense_bytes);
    let pool = far.pool(&dir);
    copy_in(&pool).await;
    let device = pool.open_image(&image_name("i")).await.unwrap();
    let background = tokio::spawn(Arc::clone(&pool).fill_copies(FILL_BYTES_PER_S));
    let readers: Vec<_> = (0..readers)
        .map(|reader| {
            let (device, mut dice) = (Arc::clone(&device), Dice(reader));
            tokio::spawn(async move {
                for turn in 0.. {
                    let block = dice.below(usize::try_from(dense_bytes / 4096).unwrap()) as u64;
                    let at = (reader + turn) % windows * WINDOW_BYTES + block * 4096;
                    device.read(at, 4096).await.unwrap();
                    tokio::time::sleep(pause).await;
                }
            })
        })
        .collect();
    let took = completed(&pool).await;
    background.abort();
    readers.iter().for_each(|reader| reader.abort());
    took
}

/// The clock stands still while anything works, so this measures the waits only.
#[tokio::test(start_paused = true)]
async fn a_reader_that_misses_blocks_here_and_there_does_not_empty_the_background_s_pipeline() {
    const DATA_BYTES: u64 = 32 << 20;
    let pause = Duration::from_millis(20);
    let near = filled_beside(1, DATA_BYTES, 1, pause).await;
    let far = filled_beside(4, DATA_BYTES / 4, 1, pause).await;
    // Each window is asked about once, which takes a round trip.
    assert!(far < near * 3 / 2, "{far:?}, and {near:?} beside a reader of one window");
}

/// In a real pool these come from the page cache, thousands of times as fast as from a thin link.
#[tokio::test(start_paused = true)]
async fn blocks_that_a_reader_has_fetched_meanwhile_do_not_make_the_link_seem_fast() {
    const PIECE_BLOCKS: u64 = 32;
    let (dir, far) = (tempfile::tempdir().unwrap(), Far::new(4 << 20, 1_000_000));
    let pool = far.pool(&dir);
    copy_in(&pool).await;
    let copy = pool.layer_copy(pool.image_info(&image_name("i")).await.unwrap().layer).unwrap();
    let flow = Flow::default();
    let pipe_bytes = || flow.pipe_bytes(Duration::from_secs(2));
    let unknown = pipe_bytes();
    for piece in 0..16 {
        let blocks = piece * PIECE_BLOCKS..(piece + 1) * PIECE_BLOCKS;
        copy.read(&(blocks.start * 4096..blocks.end * 4096)).await.unwrap();
        pool.settle_copies().await;
        flow.fetch_now(&copy, blocks).await.unwrap();
        assert_eq!(pipe_bytes(), unknown);
    }
    // Half of this piece is here.
    copy.read(&(16 * PIECE_BLOCKS * 4096..(16 * PIECE_BLOCKS + 16) * 4096)).await.unwrap();
    pool.settle_copies().await;
    flow.fetch_now(&copy, 16 * PIECE_BLOCKS..17 * PIECE_BLOCKS).await.unwrap();
    let known = pipe_bytes();
    assert!(known > unknown && known <= 2 * 2 * 1_000_000 + unknown, "{known}");
}

#[tokio::test]
async fn another_host_that_tells_extents_of_one_byte_does_not_fill_the_memory() {
    let (dir, far) = (tempfile::tempdir().unwrap(), Far::new(16 << 20, 125_000_000));
    let pool = far.pool(&dir);
    copy_in(&pool).await;
    far.shreds.store(true, Ordering::SeqCst);
    far.asked.store(0, Ordering::SeqCst);
    let failed = pool.fill_image(&image_name("i"), Arc::default()).await.unwrap_err();
    assert!(failed.why.contains("a part of a sector"), "{failed}");
    assert_eq!(far.asked.load(Ordering::SeqCst), 1, "the first answer is the last");
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fails_at_the_other_host_poisons_nothing_and_the_background_goes_on_later() {
    let (dir, far) = (tempfile::tempdir().unwrap(), Far::new(4 << 20, 125_000_000));
    let pool = far.pool(&dir);
    copy_in(&pool).await;
    pool.create_volume(create("c", None, VolumeSource::Image(image_name("i")))).await.unwrap();
    let device = session(&pool, "c").await;
    device.write(0, bytes(1, 4096), true).await.unwrap();
    far.broken.store(true, Ordering::SeqCst);
    let background = tokio::spawn(Arc::clone(&pool).fill_copies(FILL_BYTES_PER_S));
    let failed = device.read(1 << 20, 4096).await;
    let Err(IoError::Io(error)) = failed else { panic!("{failed:?}") };
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    let why = loop {
        let info = pool.image_info(&image_name("i")).await.unwrap();
        if let Some(why) = info.remote.expect("it can't be complete").failed {
            break why;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    assert!(why.contains("Input/output error"), "{why}");
    assert_eq!(device.read(0, 4096).await.unwrap(), bytes(1, 4096), "what is here is served");
    device.write(4096, bytes(2, 4096), true).await.expect("writes go on");
    far.broken.store(false, Ordering::SeqCst);
    assert_eq!(device.read(1 << 20, 4096).await.unwrap(), bytes(7, 4096));
    completed(&pool).await;
    background.abort();
    far.broken.store(true, Ordering::SeqCst);
    assert_eq!(device.read(3 << 20, 4096).await.unwrap(), bytes(7, 4096), "nobody is asked");
}

/// Two other hosts with an image each. After they were copied, one of them does not answer any more.
#[tokio::test(start_paused = true)]
async fn a_source_that_does_not_answer_holds_up_only_its_own_copies() {
    for is_first_silent in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let far = [77, 78].map(|layer| Far { layer, ..Far::of(4 << 20, 125_000_000, u64::MAX) });
        let far = far.map(Arc::new);
        let hosts = far.clone();
        let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
            let device = Arc::clone(&hosts[usize::from(nbd_addr == "second:1")]);
            let is_sums = export.ends_with("@sums");
            Box::pin(async move {
                match is_sums {
                    true => Err(Problem::not_found("checksums", "it has none")),
                    false => Ok(device as Arc<dyn Device>),
                }
            })
        };
        let connect = Connector { patience: Duration::from_secs(60), connect: Arc::new(connect) };
        let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
        let files = Arc::new(SimFiles::default());
        let pool = Pool::open_with(config, files, Uuid::from_u128(1)).unwrap();
        for (name, nbd_addr) in [("i", "first:1"), ("j", "second:1")] {
            let (nbd_addr, export, layer) = (nbd_addr.to_owned(), None, None);
            let request = CopyImage { content: None, nbd_addr, export, keep: Keep::All, layer };
            pool.copy_image(&image_name(name), request).await.unwrap();
        }
        let (silent, good) = if is_first_silent { (0, "j") } else { (1, "i") };
        far[silent].silent.store(true, Ordering::SeqCst);
        let background = tokio::spawn(Arc::clone(&pool).fill_copies(FILL_BYTES_PER_S));
        let began = Instant::now();
        while pool.image_info(&image_name(good)).await.unwrap().remote.is_some() {
            assert!(began.elapsed() < Duration::from_secs(10), "the silent host holds it up");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        background.abort();
    }
}
