//! Whether a pool that was opened again has what the reference says.

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use perigee_model::home::{CallOff, Depart, HomeState, TakeVolume, Tenure};

use crate::sim::{Cut, Disk, SECTOR_BYTES, Sector, scratch_dir};
use crate::tests::power::expect::{Expected, Presence, Twin};
use crate::tests::*;

/// Runs a check; when it fails, says what was checked before the failure goes on.
pub(super) async fn say_if_it_fails(
    what: impl FnOnce() -> String,
    check: impl Future<Output = ()>,
) {
    if let Err(panic) = AssertUnwindSafe(check).catch_unwind().await {
        eprintln!("{}", what());
        std::panic::resume_unwind(panic);
    }
}

/// What a volume or image was found to be.
pub(super) type Found = Vec<(String, Vec<(u64, Sector)>)>;

/// Everything that must be there is there, with one of its allowed contents; nothing else is.
pub(super) async fn check(pool: &Arc<Pool>, expected: &Expected, power_cut: bool) -> Found {
    let power_cut = power_cut || expected.unsettled;
    look_at_departed(pool, expected).await;
    let volumes = pool.volumes().await.unwrap();
    let images = pool.images().await.unwrap();
    let there: BTreeSet<String> = volumes
        .iter()
        .map(|info| info.name.to_string())
        .chain(images.iter().map(|info| format!("image:{}", info.name)))
        .collect();
    for name in &there {
        assert!(expected.twins.contains_key(name), "{name} is there and should not be");
    }
    let mut all_found = Vec::new();
    for (name, twin) in &expected.twins {
        if !there.contains(name) {
            assert!(twin.presence == Presence::Maybe, "{name} is missing");
            continue;
        }
        let device = match name.strip_prefix("image:") {
            Some(image) => pool.open_image(&image_name(image)).await.unwrap(),
            None => session(pool, name).await,
        };
        let found = contents(name, &device, twin).await;
        for (sector, now) in &found {
            let allowed = twin.allowed(*sector, power_cut);
            assert!(
                allowed.contains(now),
                "{name}: sector {sector} is {:?}… and none of {:?}",
                &now[..8],
                allowed.iter().map(|sector| &sector[..8]).collect::<Vec<_>>()
            );
        }
        all_found.push((name.clone(), found));
    }
    all_found
}

/// What departed is whole at its new home, whatever was cut: it departs only when it is durable. Then it
/// comes back, as after a move that was called off.
async fn look_at_departed(pool: &Arc<Pool>, expected: &Expected) {
    for (name, twin) in expected.twins.iter().filter(|(name, _)| !name.starts_with("image:")) {
        let volume = volume_name(name);
        let home = pool.home(&volume).await.unwrap().home;
        let HomeState::Departed { tenure, to } = home else { continue };
        let tenure = Tenure(tenure.0 - 1);
        let ask = Depart { tenure, to: to.clone() };
        let departed = pool.move_step(&volume).await.unwrap().depart(&ask).await.unwrap();
        let dir = scratch_dir();
        let config =
            PoolConfig { private: None, dir: dir.path().to_owned(), connect: layers_of(pool) };
        let files = Arc::<SimFiles>::default();
        let other = Pool::open_with(config, files, Uuid::from_u128(1)).unwrap();
        let take = TakeVolume { from: to.clone(), to, tenure, grant: None };
        other.move_step(&volume).await.unwrap().arrive(&take, departed).await.unwrap();
        for (sector, now) in contents(name, &session(&other, name).await, twin).await {
            let allowed = twin.allowed(sector, expected.unsettled);
            assert!(allowed.contains(&now), "{name}: sector {sector} is not what departed");
        }
        other.settle_copies().await;
        pool.move_step(&volume).await.unwrap().return_home(CallOff { tenure }).await.unwrap();
    }
}

/// The sectors of its windows; what its extents call zero must be.
async fn contents(name: &str, device: &Arc<dyn Device>, twin: &Twin) -> Vec<(u64, Sector)> {
    let size_bytes = device.size_bytes();
    let sizes = [Some(twin.size_bytes), twin.next_size_bytes];
    assert!(sizes.contains(&Some(size_bytes)), "{name} has {size_bytes} bytes, not {sizes:?}");
    let whole = std::iter::once(0..size_bytes).collect();
    let windows = if twin.next_size_bytes.is_some() { &whole } else { &twin.windows };
    let mut found = Vec::new();
    for window in windows {
        let length_bytes = u32::try_from(window.end - window.start).unwrap();
        let bytes = device.read(window.start, length_bytes).await.unwrap();
        let zeros = zero_extents(device, window).await;
        for (at, chunk) in bytes.chunks(SECTOR_BYTES).enumerate() {
            let sector = window.start / SECTOR_BYTES as u64 + at as u64;
            let offset = sector * SECTOR_BYTES as u64;
            let is_zero = chunk.iter().all(|byte| *byte == 0);
            let said_zero = zeros.iter().any(|zeros| zeros.contains(&offset));
            assert!(is_zero || !said_zero, "{name}: sector {sector} is said to be zero");
            found.push((sector, Arc::new(chunk.try_into().unwrap())));
        }
    }
    found
}

async fn zero_extents(device: &Arc<dyn Device>, window: &Range<u64>) -> Vec<Range<u64>> {
    let extents = device.extents(window.start, window.end - window.start).await.unwrap();
    let mut at = window.start;
    let mut zeros = Vec::new();
    for extent in extents {
        let end = at + extent.length_bytes;
        if extent.zero {
            zeros.push(at..end);
        }
        at = end;
    }
    zeros
}

/// Opens a disk as a server does that starts again, checks it, writes and flushes, cuts the
/// power once more, and checks that all is as it was found, with what was written.
pub(super) async fn check_disk(disk: Disk, expected: &Expected, power_cut: bool, seed: u64) {
    let dir = scratch_dir();
    let catalog = disk.catalog().expect("recording starts with the catalog's first state");
    std::fs::write(dir.path().join("catalog.sqlite"), &catalog[..]).unwrap();
    let files = Arc::new(SimFiles::new(disk));
    let boot = expected.boot + u128::from(power_cut);
    let pool = open_sim(dir.path(), &files, boot);
    let mut found = check(&pool, expected, power_cut).await;
    no_files_without_a_layer(&pool, &files).await;
    let mut unflushed = Vec::new();
    for (name, sectors) in &mut found {
        if !name.starts_with("image:") && !write_and_flush(&pool, name, sectors, seed).await {
            let may_be = expected.twins[name].may_be_poisoned;
            assert!(may_be, "{name} is read-only, and no flush of it has failed");
            unflushed.push(name.clone());
        }
    }
    found.retain(|(name, _)| !unflushed.contains(name));
    // What was read is written in the background; nothing may write when the power is cut.
    pool.settle_copies().await;
    drop(pool);
    files.cut(Cut::BySector(seed));
    let pool = open_sim(dir.path(), &files, boot + 1);
    for (name, sectors) in found {
        let device = match name.strip_prefix("image:") {
            Some(image) => pool.open_image(&image_name(image)).await.unwrap(),
            None => session(&pool, &name).await,
        };
        let again = contents(&name, &device, &expected.twins[&name]).await;
        for ((sector, was), (_, is)) in sectors.iter().zip(&again) {
            assert!(was == is, "{name}: sector {sector} changed by itself after it was flushed");
        }
    }
}

/// One sector gets new bytes; then all that was found is flushed. `false` when a failed sync has
/// made the volume read-only.
async fn write_and_flush(
    pool: &Arc<Pool>,
    name: &str,
    sectors: &mut [(u64, Sector)],
    seed: u64,
) -> bool {
    let device = session(pool, name).await;
    let some = usize::try_from(seed).unwrap_or(7) % sectors.len();
    let (sector, bytes) = &mut sectors[some];
    *bytes = Arc::new([0xee; SECTOR_BYTES]);
    let data = Bytes::copy_from_slice(&bytes[..]);
    match device.write(*sector * SECTOR_BYTES as u64, data, false).await {
        Err(IoError::Poisoned(_)) => return false,
        result => result.unwrap(),
    }
    device.flush().await.unwrap();
    true
}

/// What a crash left half-made or half-removed is gone.
async fn no_files_without_a_layer(pool: &Arc<Pool>, files: &SimFiles) {
    let volumes = pool.volumes().await.unwrap().into_iter().flat_map(|info| info.chain);
    let images = pool.images().await.unwrap().into_iter().flat_map(|info| info.chain);
    let layers: BTreeSet<String> = volumes.chain(images).map(|layer| layer.to_string()).collect();
    for name in files.disk().names() {
        let layer = name.split('.').next().unwrap();
        assert!(layers.contains(layer), "{name} is left over");
    }
}
