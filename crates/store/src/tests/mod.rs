//! Tests of the store as a whole. `power` compares it with plain arrays through crashes.

mod check;
mod clients;
mod compact;
mod copies;
mod costs;
mod damaged;
mod directories;
mod full;
mod images;
mod map;
mod pool;
mod power;
mod resize;
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
use perigee_model::volume::{CreateVolume, VolumeSource};
use perigee_model::{ImageName, VolumeName};
use uuid::Uuid;

use super::sim::SimFiles;
use super::{Connector, Pool, PoolConfig};

/// The other host: a device of fixed bytes.
struct FakeRemote(Vec<u8>);

impl Device for FakeRemote {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
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

/// Reaches a [`FakeRemote`] at `there:1` and nothing else.
fn connector() -> Connector {
    reach(Arc::new(FakeRemote(remote_bytes())))
}

/// Reaches this device at `there:1` and nothing else.
fn reach(device: Arc<dyn Device>) -> Connector {
    let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
        let device = Arc::clone(&device);
        let there = nbd_addr == "there:1" && !export.ends_with("@sums");
        Box::pin(
            async move { if there { Ok(device) } else { Err(IoError::Unreachable(nbd_addr)) } },
        )
    };
    Connector { patience: Duration::from_secs(10), connect: Arc::new(connect) }
}

async fn open_real(dir: &Path) -> Arc<Pool> {
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

async fn session(pool: &Arc<Pool>, name: &str) -> Arc<dyn Device> {
    pool.open_session(&volume_name(name), None, NO_HOST).await.unwrap()
}

async fn all(device: &Arc<dyn Device>) -> Vec<u8> {
    device.read(0, u32::try_from(device.size_bytes()).unwrap()).await.unwrap().to_vec()
}

fn bytes(byte: u8, length: usize) -> Bytes {
    vec![byte; length].into()
}
