//! Tests of the store as a whole. `power` compares it with plain arrays through crashes.

mod admissions;
mod check;
mod clients;
mod compact;
mod copies;
mod costs;
mod damaged;
mod directories;
pub(crate) mod full;
mod handover;
mod images;
mod incoming_layers;
mod map;
mod pool;
mod power;
mod released;
mod resize;
mod restoring;
mod rules;
mod space;
mod under_load;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::lease::NO_HOST;
use perigee_model::home::DepartedLayer;
use perigee_model::volume::{CreateVolume, VolumeSource};
use perigee_model::{ImageName, LayerId, Problem, VolumeName};
use uuid::Uuid;

use crate::catalog::{LayerRow, NewVolume, first_epoch};
use crate::sim::SimFiles;
use crate::{Connector, Pool, PoolConfig};

/// The other host: a device of fixed bytes.
struct FakeRemote(Vec<u8>, Option<LayerId>);

impl Device for FakeRemote {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn layer(&self) -> Option<LayerId> {
        self.1
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let from = usize::try_from(offset).unwrap();
        let part = Bytes::copy_from_slice(&self.0[from..from + length_bytes as usize]);
        Box::pin(async move { Ok(part) })
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

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        // One block per answer, as a lazy server may do.
        let length_bytes = length.min(4096);
        Box::pin(async move { Ok(vec![Extent { length_bytes, hole: false, zero: false }]) })
    }
}

fn remote_bytes() -> Vec<u8> {
    (1..=251_u8).cycle().take(5 * 4096 + 512).collect()
}

/// What a sealed layer of the other host itself has: for each block a letter, `d` data, `0` data that are zeros,
/// `z` zeros, or `.` nothing.
struct FakeOwn {
    layer: LayerId,
    blocks: &'static [u8],
}

/// The other host's volume `zmoved`: its layers, topmost first.
const FAKE_OWN: [FakeOwn; 2] = [
    FakeOwn { layer: LayerId(Uuid::from_u128(0xa)), blocks: b".dz.0d." },
    FakeOwn { layer: LayerId(Uuid::from_u128(0xb)), blocks: b"dddd.0" },
];

impl FakeOwn {
    fn byte(&self, block: usize) -> u8 {
        let number = u8::try_from(self.layer.0.as_u128()).unwrap() * 16;
        if self.blocks[block] == b'd' { number + u8::try_from(block).unwrap() } else { 0 }
    }

    /// What the whole chain shows.
    fn shown() -> Vec<u8> {
        let [top, below] = &FAKE_OWN;
        let block = |block: usize| match (top.blocks[block], below.blocks.get(block)) {
            (b'.', Some(_)) => below.byte(block),
            _ => top.byte(block),
        };
        (0..top.blocks.len()).flat_map(|at| [block(at); 4096]).collect()
    }

    fn chain() -> Vec<DepartedLayer> {
        let size_bytes = |own: &Self| own.blocks.len() as u64 * 4096;
        let departed = |own: &Self| DepartedLayer {
            layer: own.layer,
            size_bytes: size_bytes(own),
            data_bytes: 0,
            leave_site: Default::default(),
            own: None,
        };
        FAKE_OWN.iter().map(departed).collect()
    }
}

impl Device for FakeOwn {
    fn size_bytes(&self) -> u64 {
        self.blocks.len() as u64 * 4096
    }

    fn layer(&self) -> Option<LayerId> {
        Some(self.layer)
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let bytes = (offset..offset + u64::from(length_bytes))
            .map(|at| self.byte(usize::try_from(at / 4096).unwrap()));
        let bytes = bytes.collect::<Vec<_>>().into();
        Box::pin(async move { Ok(bytes) })
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

    fn extents(&self, offset: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        let state = self.blocks[usize::try_from(offset / 4096).unwrap()];
        let (hole, zero) = (state == b'.' || state == b'z', state == b'z');
        Box::pin(async move { Ok(vec![Extent { length_bytes: 4096, hole, zero }]) })
    }
}

/// Reaches the layers of a pool, at any address.
fn layers_of(pool: &Arc<Pool>) -> Connector {
    let pool = Arc::downgrade(pool);
    let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
        let own = export.ends_with("@own");
        let is_sums = export.ends_with("@sums");
        let layer = export.trim_end_matches("@own").strip_prefix("layer:").map(str::parse);
        let found = pool.upgrade().zip(layer.and_then(Result::ok));
        Box::pin(async move {
            if is_sums {
                return Err(Problem::not_found(nbd_addr, "it has no checksums"));
            }
            let away = || Problem::unavailable(nbd_addr, "it is away, or has no such layer");
            let (pool, layer): (_, LayerId) = found.ok_or_else(away)?;
            if own { pool.open_own(layer).await } else { pool.open_layer(layer).await }
        })
    };
    Connector { patience: Duration::from_secs(10), connect: Arc::new(connect) }
}

/// Reaches a [`FakeRemote`] at `there:1`, and the layers of [`FAKE_OWN`].
fn connector() -> Connector {
    let other = reach(Arc::new(FakeRemote(remote_bytes(), None)));
    let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
        let own = FAKE_OWN.iter().find(|own| export == format!("layer:{}@own", own.layer));
        match own {
            Some(FakeOwn { layer, blocks }) => {
                let own: Arc<dyn Device> = Arc::new(FakeOwn { layer: *layer, blocks });
                Box::pin(async { Ok(own) })
            }
            None if export == format!("layer:{}", FAKE_OWN[0].layer) => {
                let whole: Arc<dyn Device> =
                    Arc::new(FakeRemote(FakeOwn::shown(), Some(FAKE_OWN[0].layer)));
                Box::pin(async { Ok(whole) })
            }
            None => (other.connect)(nbd_addr, export),
        }
    };
    Connector { patience: other.patience, connect: Arc::new(connect) }
}

/// Reaches this device at `there:1` and nothing else.
fn reach(device: Arc<dyn Device>) -> Connector {
    let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
        let device = Arc::clone(&device);
        let (there, is_sums) = (nbd_addr == "there:1", export.ends_with("@sums"));
        Box::pin(async move {
            match (there, is_sums) {
                (true, false) => Ok(device),
                (true, true) => Err(Problem::not_found("checksums", "it has none")),
                (false, _) => Err(Problem::unavailable("can't connect", nbd_addr)),
            }
        })
    };
    Connector { patience: Duration::from_secs(10), connect: Arc::new(connect) }
}

pub(crate) async fn open_real(dir: &Path) -> Arc<Pool> {
    Pool::open(PoolConfig { private: None, dir: dir.to_owned(), connect: connector() })
        .await
        .unwrap()
}

fn open_sim(dir: &Path, files: &Arc<SimFiles>, boot: u128) -> Arc<Pool> {
    let config = PoolConfig { private: None, dir: dir.to_owned(), connect: connector() };
    Pool::open_with(config, Arc::clone(files) as _, Uuid::from_u128(boot)).unwrap()
}

fn volume_name(text: &str) -> VolumeName {
    VolumeName::new(text).unwrap()
}

fn image_name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn create(name: &str, size_bytes: Option<u64>, source: VolumeSource) -> CreateVolume {
    CreateVolume::new(volume_name(name), size_bytes, source)
}

/// An empty volume and a session of it.
async fn empty(pool: &Arc<Pool>, name: &str, size_bytes: u64) -> Arc<dyn Device> {
    pool.create_volume(create(name, Some(size_bytes), VolumeSource::Empty)).await.unwrap();
    session(pool, name).await
}

/// Puts a new head on a sealed layer.
fn put_head(pool: &Arc<Pool>, name: &str, size_bytes: u64, parent: Option<LayerId>) {
    let (tenant, cache) = Default::default();
    let volume = NewVolume {
        name: volume_name(name),
        head: LayerRow::new_head(size_bytes, parent),
        epoch: first_epoch(),
        tenant,
        cache,
        owner: None,
    };
    pool.catalog.add_volumes(&[volume]).unwrap();
}

async fn session(pool: &Arc<Pool>, name: &str) -> Arc<dyn Device> {
    pool.open_session(&volume_name(name), None, NO_HOST).await.unwrap()
}

async fn all(device: &Arc<dyn Device>) -> Vec<u8> {
    device.read(0, u32::try_from(device.size_bytes()).unwrap()).await.unwrap().to_vec()
}

fn bytes(byte: u8, length: usize) -> Bytes {
    vec![byte; length].into()
}
