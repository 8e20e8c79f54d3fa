//! Damaged files for the fuzz targets, as a disk may have them when a pool is opened.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use perigee_block::device::Device;
use perigee_model::volume::{CreateVolume, Snapshot, VolumeSource};
use perigee_model::{ImageName, LayerId, Problem, VolumeName};
use rusqlite::Connection;
use uuid::Uuid;

use crate::disk::blocks::{PAGE_BLOCKS, index};
use crate::disk::files::BlockFile;
use crate::disk::live::LiveMap;
use crate::disk::map::{self, Magic, MapFile, PAGE_BYTES};
use crate::layers::remote::Connector;
use crate::pool::{Pool, PoolConfig};

const LAYER: LayerId = LayerId(Uuid::from_u128(7));
const BOOT: Uuid = Uuid::from_u128(9);

/// Bytes from the fuzzer, taken from the front; zeros when there are no more.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(4);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }
}

struct MemoryFile(Mutex<Vec<u8>>);

impl BlockFile for MemoryFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.lock().expect("no holder panics");
        let from = index(offset);
        let found = bytes.get(from..from + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(found);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let from = index(offset);
        self.0.lock().expect("no holder panics")[from..from + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn punch_hole(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().expect("no holder panics").len() as u64)
    }
}

/// Loads a durable map and a live map with bytes from the fuzzer, where some pages have a right checksum.
/// Loading must return states or an error. States can be stored and loaded again.
pub fn map_files(input: &[u8]) {
    let mut input = Input(input);
    let blocks = 1 + input.number() % (2 * PAGE_BLOCKS + 9);
    load_durable(&mut input, blocks);
    load_live(&mut input, blocks);
}

fn load_durable(input: &mut Input<'_>, blocks: u64) {
    let mut bytes = vec![0; index(map::file_bytes(blocks))];
    bytes[..PAGE_BYTES].copy_from_slice(&map::header(Magic::Durable, LAYER, blocks, &[0; 16]));
    let pages = bytes.len() / PAGE_BYTES;
    for _ in 0..input.byte() % 6 {
        let page = &mut bytes[usize::from(input.byte()) % pages * PAGE_BYTES..][..PAGE_BYTES];
        let how = input.byte();
        if how & 2 != 0 {
            page[4..8].copy_from_slice(&u32::from(input.byte() % 3).to_le_bytes());
            page[8..16].copy_from_slice(&input.number().to_le_bytes());
            page[16..32].copy_from_slice(LAYER.0.as_bytes());
        }
        let at = index(input.number()) % PAGE_BYTES;
        let some = input.take(usize::from(how >> 2).min(PAGE_BYTES - at));
        page[at..at + some.len()].copy_from_slice(some);
        if how & 1 != 0 {
            map::seal(page);
        }
    }
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile(Mutex::new(bytes)));
    let damaged = map::damaged_pages(&*file, LAYER, blocks);
    let Ok((mut loaded, states)) = MapFile::load(Arc::clone(&file), LAYER, blocks) else { return };
    assert!(damaged.expect("it could be loaded").is_empty(), "a damaged page was believed");
    let used: Vec<_> = states.pages_in_use().map(|page| (page, states.payload(page))).collect();
    assert!(states.runs(0..blocks).all(|(run, _)| run.end <= blocks));
    // A generation can't be raised beyond the last one, which a real map never reaches.
    loaded.store(&used).expect("memory has room");
    let (_, again) = MapFile::load(file, LAYER, blocks).expect("what was just stored");
    for (page, payload) in used {
        assert_eq!(again.payload(page), payload, "page {page}");
    }
}

fn load_live(input: &mut Input<'_>, blocks: u64) {
    let mut bytes = map::header(Magic::Live, LAYER, blocks, BOOT.as_bytes());
    bytes.resize(PAGE_BYTES + index(blocks.div_ceil(4)), 0);
    for _ in 0..input.byte() % 6 {
        let at = index(input.number()) % bytes.len();
        let some = input.take(usize::from(input.0.first().copied().unwrap_or(0)));
        let end = bytes.len().min(at + some.len());
        bytes[at..end].copy_from_slice(&some[..end - at]);
    }
    let file = Arc::new(MemoryFile(Mutex::new(bytes)));
    if let Ok(Some((_, states))) = LiveMap::load(file, LAYER, BOOT, blocks) {
        assert!(states.runs(0..blocks).all(|(run, _)| run.end <= blocks));
    }
}

/// A directory in memory that is removed when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("perigee-fuzz-{}-{number}", std::process::id());
        let shm = Path::new("/dev/shm");
        let within = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let dir = within.join(name);
        std::fs::create_dir(&dir).expect("a directory");
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Files that could not be removed are only in memory.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn config(dir: &Path) -> PoolConfig {
    let connect = |nbd_addr: String, _| {
        let gone =
            async { Err::<Arc<dyn Device>, _>(Problem::unavailable("can't connect", nbd_addr)) };
        Box::pin(gone) as futures_util::future::BoxFuture<'static, _>
    };
    let connect = Connector { patience: Duration::ZERO, connect: Arc::new(connect) };
    PoolConfig { private: None, dir: dir.to_owned(), connect }
}

/// A healthy pool's files, by path below its directory.
fn template() -> &'static Vec<(PathBuf, Vec<u8>)> {
    static TEMPLATE: OnceLock<Vec<(PathBuf, Vec<u8>)>> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let dir = Scratch::new();
        runtime().block_on(fill(&dir.0));
        let catalog = Connection::open(dir.0.join("catalog.sqlite")).expect("a catalog");
        catalog.pragma_update(None, "journal_mode", "DELETE").expect("one file");
        drop(catalog);
        let layers = std::fs::read_dir(dir.0.join("layers")).expect("layers");
        let names = layers.map(|entry| Path::new("layers").join(entry.expect("one").file_name()));
        let names = names.chain([PathBuf::from("catalog.sqlite")]);
        names.map(|name| (name.clone(), std::fs::read(dir.0.join(&name)).expect("it"))).collect()
    })
}

async fn fill(dir: &Path) {
    let pool = Pool::open(config(dir)).await.expect("a pool");
    let volume = |name: &str| VolumeName::new(name).expect("a name");
    let image = ImageName::new("s").expect("a name");
    let empty = CreateVolume::new(volume("v"), Some(8 * 4096), VolumeSource::Empty);
    pool.create_volume(empty).await.expect("a volume");
    let opened = pool.volume(&volume("v")).await.expect("a volume");
    opened.session(None).write(0, vec![1; 8192].into(), true).await.expect("a write");
    pool.snapshot(&volume("v"), Snapshot { image: image.clone() }).await.expect("a snapshot");
    let clone = CreateVolume::new(volume("c"), None, VolumeSource::Image(image));
    pool.create_volume(clone).await.expect("a clone");
    let opened = pool.volume(&volume("c")).await.expect("a volume");
    opened.session(None).write(4096, vec![2; 100].into(), true).await.expect("a write");
    pool.attach(&volume("a"), "there:1").await.expect("an attachment");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Opens a pool with a damaged catalog: changed bytes of the file, or rows that our programs never write.
/// The pool and each of its volumes must be opened or refused in finite time.
pub fn catalog(input: &[u8]) {
    let mut input = Input(input);
    let dir = Scratch::new();
    std::fs::create_dir(dir.0.join("layers")).expect("a directory");
    for (name, bytes) in template() {
        std::fs::write(dir.0.join(name), bytes).expect("a file");
    }
    let path = dir.0.join("catalog.sqlite");
    if input.byte() & 1 == 0 {
        change_rows(&path, &mut input);
    } else {
        change_bytes(&path, &mut input);
    }
    runtime().block_on(use_pool(&dir.0));
}

fn change_bytes(path: &Path, input: &mut Input<'_>) {
    let mut bytes = std::fs::read(path).expect("the catalog");
    while !input.0.is_empty() {
        let at = index(input.number()) % bytes.len();
        let length = usize::from(input.byte() % 16);
        for (byte, new) in bytes[at..].iter_mut().zip(input.take(length)) {
            *byte = *new;
        }
    }
    std::fs::write(path, bytes).expect("the catalog");
}

fn change_rows(path: &Path, input: &mut Input<'_>) {
    const COLUMNS: [(&str, &str); 20] = [
        ("layers", "id"),
        ("layers", "size_bytes"),
        ("layers", "parent"),
        ("layers", "poisoned"),
        ("layers", "data_bytes"),
        ("remote_parents", "size_bytes"),
        ("remote_parents", "nbd_addr"),
        ("remote_parents", "own"),
        ("images", "name"),
        ("images", "layer"),
        ("volumes", "name"),
        ("volumes", "head"),
        ("volumes", "size_bytes"),
        ("volumes", "epoch"),
        ("volumes", "epoch_issued_max"),
        ("volumes", "tenant"),
        ("volumes", "owner"),
        ("volumes", "cache"),
        ("attachments", "volume"),
        ("stores", "dir"),
    ];
    let connection = Connection::open(path).expect("a healthy catalog");
    connection.pragma_update(None, "foreign_keys", false).expect("a pragma");
    while !input.0.is_empty() {
        let (table, column) = COLUMNS[usize::from(input.byte()) % COLUMNS.len()];
        let row = input.byte() % 4;
        let value = match input.byte() % 6 {
            0 => "NULL".to_owned(),
            1 => format!("(SELECT id FROM layers LIMIT 1 OFFSET {})", input.byte() % 4),
            2 => input.number().to_string(),
            3 => (input.number() << 32 | input.number()).cast_signed().to_string(),
            4 => {
                let length = usize::from(input.byte());
                format!("'{}'", String::from_utf8_lossy(input.take(length)).replace('\'', "''"))
            }
            _ => {
                let sql = format!("DELETE FROM {table} WHERE rowid % 4 = {row}");
                drop(connection.execute(&sql, []));
                continue;
            }
        };
        // The schema may refuse the value.
        let sql = format!("UPDATE {table} SET {column} = {value} WHERE rowid % 4 = {row}");
        drop(connection.execute(&sql, []));
    }
}

async fn use_pool(dir: &Path) {
    let Ok(pool) = Pool::open(config(dir)).await else { return };
    drop(pool.info().await);
    drop(pool.attachments().await);
    for info in pool.images().await.unwrap_or_default() {
        if let Ok(image) = pool.open_image(&info.name).await {
            let first_bytes = image.size_bytes().min(512);
            drop(image.read(0, u32::try_from(first_bytes).expect("512 at most")).await);
            drop(image.extents(0, image.size_bytes().min(1 << 20)).await);
        }
        drop(pool.delete_image(&info.name).await);
    }
    for info in pool.volumes().await.unwrap_or_default() {
        if let Ok(volume) = pool.volume(&info.name).await {
            let session = volume.session(None);
            drop(session.read(0, 512).await);
            drop(session.write(0, vec![3; 512].into(), true).await);
        }
        drop(pool.delete_volume(&info.name).await);
    }
}
