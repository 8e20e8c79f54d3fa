//! Copies of layers' own blocks, in any place of a chain: two pools, of which one gets the other's volumes.
//!
//! | file | |
//! |---|---|
//! | `common` | what another host's volume has in common with the layers here |
//! | `merged` | the other host merges layers of the volume |
//! | `rules` | one rule each |
//! | `random` | random chains, beside a plain array |
//! | `replicas` | replicas of volumes, through kills and power cuts |

mod merged;
mod random;
mod replicas;
mod rules;
mod shared_layers;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use perigee_block::exports::{
    CHECKSUMS_SUFFIX, LAYER_PREFIX, LAYERS_SUFFIX, OWN_SUFFIX, SINCE_INFIX,
    VISIBLE_CHECKSUMS_SUFFIX,
};
use perigee_model::volume::Snapshot;
use tokio::sync::Semaphore;

use super::*;
use crate::copies::fill::Pace;
use crate::sim::Dice;

const BLOCK: u64 = 4096;
const GATE: u32 = 1000;

/// What a host was asked to read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Read {
    export: String,
    at: u64,
    length_bytes: u32,
}

/// The way from one pool to another, whatever the address.
struct Way {
    to: Mutex<Option<Arc<Pool>>>,
    away: AtomicBool,
    /// Its checksums can't be opened.
    no_checksums: AtomicBool,
    /// The host at this address is gone.
    gone: Mutex<Option<String>>,
    reads: Mutex<Vec<Read>>,
    /// A read takes a permit and gives it back.
    gate: Semaphore,
    /// Every byte that is read on this way is this one, if it is set.
    damage: Mutex<Option<u8>>,
}

impl Way {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            to: Mutex::default(),
            away: AtomicBool::new(false),
            no_checksums: AtomicBool::new(false),
            gone: Mutex::default(),
            reads: Mutex::default(),
            gate: Semaphore::new(GATE as usize),
            damage: Mutex::default(),
        })
    }

    fn is_away(&self, nbd_addr: &str) -> bool {
        let gone = self.gone.lock().unwrap();
        self.away.load(Ordering::SeqCst) || gone.as_deref() == Some(nbd_addr)
    }

    fn lead(&self, pool: &Arc<Pool>) {
        *self.to.lock().unwrap() = Some(Arc::clone(pool));
    }

    /// The bytes that were read from exports whose name ends so.
    fn read_bytes(&self, suffix: &str) -> u64 {
        let reads = self.reads.lock().unwrap();
        let counted = reads.iter().filter(|read| read.export.ends_with(suffix));
        counted.map(|read| u64::from(read.length_bytes)).sum()
    }

    fn connector(self: &Arc<Self>) -> Connector {
        let way = Arc::clone(self);
        let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
            let way = Arc::clone(&way);
            Box::pin(async move {
                let to = way.to.lock().unwrap().clone();
                let is_away = way.is_away(&nbd_addr)
                    || (export.ends_with(CHECKSUMS_SUFFIX)
                        && way.no_checksums.load(Ordering::SeqCst));
                let (Some(pool), false) = (to, is_away) else {
                    return Err(Problem::unavailable("can't connect", "it is away"));
                };
                let device = open_export(&pool, &export).await?;
                Ok(Arc::new(Far { device, way, nbd_addr, export }) as Arc<dyn Device>)
            })
        };
        // A read that is to fail waits this long, and one that is not to fail may take this long on a busy machine.
        Connector { patience: Duration::from_secs(5), connect: Arc::new(connect) }
    }
}

/// As `PoolExports` of the volume server does.
async fn open_export(pool: &Arc<Pool>, export: &str) -> Result<Arc<dyn Device>, Problem> {
    if let Some(volume) = export.strip_suffix(LAYERS_SUFFIX) {
        return pool.open_layers_of(&volume_name(volume)).await;
    }
    if let Some((volume, layer)) = export.split_once(SINCE_INFIX) {
        return pool.open_since(&volume_name(volume), layer.parse().unwrap()).await;
    }
    if let Some(layer) = export.strip_suffix(VISIBLE_CHECKSUMS_SUFFIX) {
        let layer = match layer.strip_prefix("image:") {
            Some(image) => pool.image_info(&image_name(image)).await?.layer,
            None => layer.strip_prefix(LAYER_PREFIX).unwrap().parse().unwrap(),
        };
        return pool.open_visible_checksums(layer).await;
    }
    let (rest, sums) = export.strip_suffix(CHECKSUMS_SUFFIX).map_or((export, false), |r| (r, true));
    let (rest, own) = rest.strip_suffix(OWN_SUFFIX).map_or((rest, false), |r| (r, true));
    if let (Some(image), false) = (rest.strip_prefix("image:"), sums) {
        return pool.open_image(&image_name(image)).await;
    }
    let layer: LayerId = match rest.strip_prefix("image:") {
        Some(image) => pool.image_info(&image_name(image)).await?.layer,
        None => rest.strip_prefix(LAYER_PREFIX).unwrap().parse().unwrap(),
    };
    match (sums, own) {
        (true, own) => pool.open_checksums(layer, own).await,
        (false, true) => pool.open_own(layer).await,
        (false, false) => pool.open_layer(layer).await,
    }
}

/// An export on the way.
struct Far {
    device: Arc<dyn Device>,
    way: Arc<Way>,
    nbd_addr: String,
    export: String,
}

impl Far {
    fn reachable(&self) -> Result<(), IoError> {
        if self.way.is_away(&self.nbd_addr) {
            return Err(IoError::Unreachable("it is away".to_owned()));
        }
        Ok(())
    }
}

impl Device for Far {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn layer(&self) -> Option<LayerId> {
        self.device.layer()
    }

    fn read(&self, at: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            let export = self.export.clone();
            self.way.reads.lock().unwrap().push(Read { export, at, length_bytes });
            let _turn = self.way.gate.acquire().await.unwrap();
            self.reachable()?;
            let bytes = self.device.read(at, length_bytes).await?;
            let damage = *self.way.damage.lock().unwrap();
            let damage = damage.filter(|_| !self.export.ends_with(CHECKSUMS_SUFFIX));
            Ok(damage.map_or(bytes, |byte| vec![byte; length_bytes as usize].into()))
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

    fn extents(&self, at: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move {
            self.reachable()?;
            // One answer does not tell everything, as over the network.
            let told = self.device.extents(at, length).await?;
            Ok(told.into_iter().take(3).collect())
        })
    }
}

/// A pool on simulated files, whose copies come over a way.
struct Site {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    way: Arc<Way>,
    pool: Arc<Pool>,
    boot: u128,
}

impl Site {
    fn new() -> Self {
        let (dir, files, way) = (crate::sim::scratch_dir(), Arc::default(), Way::new());
        let pool = open_at(&dir, &files, &way, 1);
        Self { dir, files, way, pool, boot: 1 }
    }

    /// Ends the server, and begins another one on what is on the disk.
    async fn restart(self, power_cut: Option<u64>) -> Self {
        self.pool.settle_copies().await;
        let Self { dir, files, way, pool, mut boot } = self;
        drop(pool);
        if let Some(seed) = power_cut {
            files.power_cut(&mut Dice(seed));
            boot += 1;
        }
        let pool = open_at(&dir, &files, &way, boot);
        Self { dir, files, way, pool, boot }
    }

    /// Takes the sealed layers of another pool's volume, and puts a volume of the same name on them.
    async fn take(&self, from: &Arc<Pool>, name: &str) {
        self.take_chain(from, name, &sealed_chain(from, name)).await;
    }

    async fn take_chain(&self, from: &Arc<Pool>, name: &str, chain: &[DepartedLayer]) {
        self.pool.stage_layers(&volume_name(name), "there:1", chain).await.unwrap();
        let size_bytes = from.volume(&volume_name(name)).await.unwrap().size_bytes();
        put_head(&self.pool, name, size_bytes, chain.first().map(|top| top.layer));
    }

    async fn fill(&self) {
        fill_all(&self.pool).await.unwrap();
    }
}

fn open_at(
    dir: &tempfile::TempDir,
    files: &Arc<SimFiles>,
    way: &Arc<Way>,
    boot: u128,
) -> Arc<Pool> {
    let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect: way.connector() };
    Pool::open_with(config, Arc::clone(files) as _, Uuid::from_u128(boot)).unwrap()
}

async fn fill_all(pool: &Arc<Pool>) -> Result<(), IoError> {
    for copy in pool.copies_to_fill() {
        pool.fill(&copy, &Arc::default(), &Pace::new(u64::MAX)).await?;
    }
    Ok(())
}

/// The layers below a volume's head, topmost first.
fn sealed_chain(pool: &Arc<Pool>, name: &str) -> Vec<DepartedLayer> {
    chain_that_tells(pool, name, false)
}

/// As [`sealed_chain`], and perhaps what each layer has.
fn chain_that_tells(pool: &Arc<Pool>, name: &str, told: bool) -> Vec<DepartedLayer> {
    let head = pool.catalog.volume(&volume_name(name)).unwrap().unwrap().head;
    let rows = pool.catalog.chain(head).unwrap().into_iter().skip(1);
    rows.map(|row| DepartedLayer {
        layer: row.id,
        size_bytes: row.size_bytes,
        data_bytes: row.data_bytes.unwrap_or(0),
        leave_site: Default::default(),
        own: pool.own_blocks(&row).filter(|_| told),
    })
    .collect()
}

async fn snapshot(pool: &Arc<Pool>, volume: &str, image: &str) {
    let request = Snapshot { image: image_name(image) };
    pool.snapshot(&volume_name(volume), request).await.unwrap();
}

async fn checksums(pool: &Arc<Pool>) {
    for (row, head) in pool.catalog.layers().unwrap() {
        if !head && !row.is_copy() {
            pool.make_checksums(&row, &crate::work::Work::default()).unwrap();
        }
    }
}
