//! Measures this pool's disk, an export as a VM of this host opens it, or a target of another host, for `perigee host measure`. It
//! also serves a volume over iSCSI to one other host that measures it.

mod bench;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use nix::unistd::Uid;
use perigee_block::locking::lock;
use perigee_iscsi::access::{Client, Clients};
use perigee_iscsi::{Listener, Options, Target as IscsiTarget};
use perigee_model::client::{export_of_target, target_name};
use perigee_model::limits::MEASURE_S;
use perigee_model::measurement::{
    DiskFigures, IscsiPortal, MEASURED_PREFIX, MeasureDisk, MeasuredDisk, OpenPortal,
    measured_bytes,
};
use perigee_model::{Problem, VolumeName};
use perigee_nbd::server::{OneVm, Server};
use perigee_store::{Pool, io_problem, open_direct};
use tokio_util::sync::CancellationToken;

use crate::exports::PoolExports;
use crate::iscsi_clients::Kept;
use crate::probe::Random;
use bench::{Bench, Part, Pattern, Target};

const WHAT: &str = "can't measure a disk";
const MIB: u64 = 1 << 20;
/// Random bytes that are written again and again.
const PIECE_BYTES: usize = 1 << 20;
/// Volumes that other hosts measure over iSCSI at one time.
const PORTALS_MAX: usize = 16;
/// A portal lives no longer; seconds.
const PORTAL_S_MAX: u64 = 3600;
/// After a measurement is called off, some time goes by until its programs have ended. The next one waits so long.
const TURN_MAX: Duration = Duration::from_secs(5);
/// Connections of one initiator, and of those who are disconnected.
const SESSIONS_MAX: usize = 4;

/// What a server needs to measure.
pub struct Measuring {
    pool: Arc<Pool>,
    exports: Arc<PoolExports>,
    server: Server,
    /// The pool's directory.
    dir: PathBuf,
    turn: tokio::sync::Mutex<()>,
    portals: Mutex<BTreeMap<VolumeName, CancellationToken>>,
}

impl Measuring {
    /// Nothing is measured yet.
    pub fn new(pool: Arc<Pool>, exports: Arc<PoolExports>, server: Server, dir: PathBuf) -> Self {
        let (turn, portals) = Default::default();
        Self { pool, exports, server, dir, turn, portals }
    }

    /// Measures a disk. When nobody waits for it any more, it ends.
    ///
    /// # Errors
    /// `Conflict` while another disk is measured; `NoSpace`; `Unsupported` without the programs; `Unavailable` if the disk does not answer.
    pub async fn disk(&self, ask: &MeasureDisk) -> Result<DiskFigures, Problem> {
        let Ok(_turn) = tokio::time::timeout(TURN_MAX, self.turn.lock()).await else {
            let why = "this volume server measures another one";
            return Err(Problem::conflict(WHAT, why).next("wait until that has ended"));
        };
        let too_long = |error: perigee_model::limits::OutOfLimits| error.problem(WHAT);
        MEASURE_S.check(ask.length_ms.div_ceil(1000)).map_err(too_long)?;
        match &ask.disk {
            MeasuredDisk::Pool => self.own(ask).await,
            MeasuredDisk::Export { export } => self.export(export, ask).await,
            MeasuredDisk::Iscsi { at, initiator } => {
                check_is_for_this(WHAT, &export_of_target(&at.target).unwrap_or_default())?;
                let (portal, target) = (at.portal.clone(), at.target.clone());
                let target = Target::Iscsi { portal, target, initiator: initiator.clone() };
                figures(&target, ask, (true, false)).await
            }
        }
    }

    async fn own(&self, ask: &MeasureDisk) -> Result<DiskFigures, Problem> {
        let room = measured_bytes(self.pool.info().await?.free_bytes)?;
        let ask = MeasureDisk { size_bytes: ask.size_bytes.min(room), ..ask.clone() };
        let (dir, size_bytes) = (self.dir.clone(), ask.size_bytes);
        let made = tokio::task::spawn_blocking(move || {
            let file = nameless_file(&dir, size_bytes)?;
            let direct = has_direct_io(&file)?;
            Ok((file, direct))
        });
        let made = made.await.map_err(std::io::Error::other).flatten();
        let (file, direct) = made.map_err(|error| Problem::internal(WHAT, error))?;
        figures(&Target::File(file), &ask, (direct, false)).await
    }

    /// Over a socket as each VM has one.
    async fn export(&self, export: &str, ask: &MeasureDisk) -> Result<DiskFigures, Problem> {
        check_is_for_this(WHAT, export)?;
        let socket = self.dir.join("measured.sock");
        let _unlink = Unlink(&socket);
        let listener = perigee_http::bind_unix(&socket).await.map_err(|error| {
            Problem::internal(WHAT, format!("can't listen on {}: {error}", socket.display()))
        })?;
        let vm = Arc::new(OneVm::new(Uid::effective().as_raw(), &[export.to_owned()]));
        let stop = CancellationToken::new();
        let _end = stop.clone().drop_guard();
        tokio::spawn(self.server.clone().serve_vm(listener, vm, stop));
        let target = Target::Nbd { socket: socket.clone(), export: export.to_owned() };
        figures(&target, ask, (true, true)).await
    }

    /// Writes random bytes to all of a volume here: what can't be compressed on its way, and is no hole.
    ///
    /// # Errors
    /// As the volume's.
    pub async fn fill(&self, volume: &VolumeName) -> Result<(), Problem> {
        let what = format!("can't fill volume {volume}");
        check_is_for_this(&what, volume.as_str())?;
        let device = self.pool.volume(volume).await?.session(None);
        let piece = Bytes::from(random_piece());
        let mut offset = 0;
        while offset < device.size_bytes() {
            let length = (device.size_bytes() - offset).min(MIB);
            let part = piece.slice(..usize::try_from(length).unwrap_or(0));
            let written = device.write(offset, part, false).await;
            written.map_err(|error| io_problem(&what, &error))?;
            offset += length;
        }
        device.flush().await.map_err(|error| io_problem(&what, &error))
    }

    /// Serves a volume over iSCSI to one initiator, until its time is over or [`Self::close_portal`].
    ///
    /// # Errors
    /// `NotFound` if the volume is not here; `Conflict` if there are too many, or the address can't be used.
    pub async fn open_portal(&self, ask: OpenPortal) -> Result<IscsiPortal, Problem> {
        let what = format!("can't serve volume {} over iSCSI", ask.volume);
        self.pool.volume(&ask.volume).await?;
        check_is_for_this(&what, ask.volume.as_str())?;
        let is_full = {
            let mut portals = lock(&self.portals);
            portals.retain(|_, stop| !stop.is_cancelled());
            portals.len() >= PORTALS_MAX
        };
        if is_full {
            let why = format!("{PORTALS_MAX} are served to hosts that measure, which is the limit");
            return Err(Problem::conflict(what, why).next("wait until one of them has ended"));
        }
        let listener = Listener::bind(&SocketAddr::new(ask.address, 0).to_string()).await?;
        let bound = listener.address().map_err(|error| Problem::internal(&what, error))?;
        let target = IscsiTarget::new(Options {
            exports: self.exports.clone(),
            clients: Arc::new(Only { initiator: ask.initiator, volume: ask.volume.clone() }),
            keep: Arc::new(Kept(self.pool.clone())),
            sessions_max: SESSIONS_MAX,
        });
        let stop = CancellationToken::new();
        let until = Duration::from_secs(ask.for_s.min(PORTAL_S_MAX));
        let (ends, serve) = (stop.clone(), target.serve(vec![listener], stop.clone()));
        tokio::spawn(async move {
            tokio::pin!(serve);
            if tokio::time::timeout(until, &mut serve).await.is_err() {
                ends.cancel();
                serve.await;
            }
        });
        lock(&self.portals).insert(ask.volume.clone(), stop);
        let target = target_name(ask.volume.as_str());
        Ok(IscsiPortal { portal: bound.to_string(), target })
    }

    /// Ends that.
    pub fn close_portal(&self, volume: &VolumeName) {
        if let Some(stop) = lock(&self.portals).remove(volume) {
            stop.cancel();
        }
    }
}

/// Removes a socket's name, also if nobody waits for the figures any more.
struct Unlink<'a>(&'a Path);

impl Drop for Unlink<'_> {
    fn drop(&mut self) {
        drop(std::fs::remove_file(self.0));
    }
}

/// What is measured is overwritten.
fn check_is_for_this(what: &str, name: &str) -> Result<(), Problem> {
    if name.starts_with(MEASURED_PREFIX) {
        return Ok(());
    }
    let why = format!("{name:?} is no volume that was made for a measurement: {MEASURED_PREFIX}…");
    Err(Problem::invalid(what, why))
}

/// The only initiator of a portal. Nobody else knows its name.
struct Only {
    initiator: String,
    volume: VolumeName,
}

impl Clients for Only {
    fn find<'a>(&'a self, initiator: &'a str) -> BoxFuture<'a, Result<Option<Client>, Problem>> {
        let client = || Client { targets: vec![self.volume.to_string()], chap: None };
        Box::pin(async move { Ok((initiator == self.initiator).then(client)) })
    }
}

/// All four. `once`: what was read before may be in memory, so each byte is read once, before it is written.
async fn figures(
    target: &Target,
    ask: &MeasureDisk,
    (direct, once): (bool, bool),
) -> Result<DiskFigures, Problem> {
    let half = ask.size_bytes / 2 / MIB * MIB;
    if half == 0 {
        return Err(Problem::invalid(WHAT, "it has less than 2 MiB"));
    }
    let length = Duration::from_millis(ask.length_ms);
    let bench = |offset_bytes, once| {
        let part = Part { offset_bytes, size_bytes: half };
        Bench { what: WHAT, target, part, direct, once, length }
    };
    #[expect(clippy::cast_precision_loss, reason = "a power of two")]
    let bytes = MIB as f64;
    Ok(DiskFigures {
        size_bytes: half * 2,
        read_bytes_per_s: bench(0, once).per_s(Pattern::Read).await? * bytes,
        random_reads_per_s: bench(half, once).per_s(Pattern::RandomRead).await?,
        write_bytes_per_s: bench(0, false).per_s(Pattern::Write).await? * bytes,
        random_writes_per_s: bench(half, false).per_s(Pattern::RandomWrite).await?,
        direct,
    })
}

/// A file in the directory that has no name any more: whatever ends this process, the file is gone with it.
fn nameless_file(dir: &Path, size_bytes: u64) -> std::io::Result<File> {
    let path = dir.join("measured");
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true).mode(0o600);
    let file = options.open(&path)?;
    std::fs::remove_file(&path)?;
    let piece = random_piece();
    for offset in (0..size_bytes).step_by(piece.len()) {
        file.write_all_at(&piece, offset)?;
    }
    file.sync_all()?;
    Ok(file)
}

/// Some filesystems have none.
fn has_direct_io(file: &File) -> std::io::Result<bool> {
    match open_direct(file) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(error),
    }
}

/// [`PIECE_BYTES`] of them.
fn random_piece() -> Vec<u8> {
    let mut random = Random::from_clock();
    std::iter::repeat_with(|| random.next().to_le_bytes()).take(PIECE_BYTES / 8).flatten().collect()
}

#[cfg(test)]
mod tests {
    use perigee_nbd::ServerOptions;
    use perigee_store::PoolConfig;
    use uuid::Uuid;

    use super::*;
    use crate::exports::Here;
    use crate::remotes::{RemoteOptions, Remotes};

    async fn measuring_at(dir: &Path) -> Measuring {
        let remotes = Remotes::load(&RemoteOptions::default()).expect("no files");
        let config = PoolConfig { private: None, dir: dir.into(), connect: remotes.connector() };
        let pool = Pool::open(config).await.expect("a pool");
        let here = Here { server_id: Uuid::new_v4(), boot: String::new() };
        let exports = PoolExports::new(Arc::clone(&pool), Arc::default(), here, remotes);
        let server = Server::new(exports.clone(), ServerOptions::default()).expect("a server");
        Measuring::new(pool, exports, server, dir.into())
    }

    #[test]
    fn a_file_that_is_measured_has_no_name_and_no_holes() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().expect("a directory");
        let file = nameless_file(dir.path(), 2 << 20).expect("a file");
        let meta = file.metadata().expect("its size");
        assert_eq!((meta.len(), meta.nlink()), (2 << 20, 0));
        assert!(meta.blocks() * 512 >= 2 << 20, "{meta:?}");
        assert_eq!(dir.path().read_dir().expect("it is there").count(), 0);
    }

    /// /proc has none on every machine.
    #[test]
    fn a_filesystem_without_direct_io_is_known_before_it_is_measured() {
        let file = File::options().read(true).write(true).open("/proc/self/comm").expect("a file");
        assert!(!has_direct_io(&file).expect("it is known"));
    }

    #[test]
    fn nothing_is_overwritten_that_was_not_made_to_be_measured() {
        check_is_for_this(WHAT, &format!("{MEASURED_PREFIX}1@1")).expect("it was made for this");
        for other in ["data", "acme~perigee-measured-1", "image:debian"] {
            check_is_for_this(WHAT, other).expect_err(other);
        }
    }

    #[test]
    fn a_socket_has_no_name_any_more_when_nobody_waits_for_the_figures() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("measured.sock");
        std::fs::write(&path, "").expect("written");
        drop(Unlink(&path));
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_target_that_was_not_made_to_be_measured_is_refused_before_it_is_asked() {
        let dir = tempfile::tempdir().expect("a directory");
        let measuring = measuring_at(dir.path()).await;
        for target in [target_name("data"), "iqn.2026-11.org.other:perigee-measured-1".to_owned()] {
            let at = IscsiPortal { portal: "127.0.0.1:1".to_owned(), target };
            let disk = MeasuredDisk::Iscsi { at, initiator: "iqn.secret".to_owned() };
            let ask = MeasureDisk { disk, size_bytes: 4 << 20, length_ms: 1000 };
            let refused = measuring.disk(&ask).await.expect_err("it was made for something else");
            assert!(refused.why.contains(MEASURED_PREFIX), "{refused}");
        }
    }

    #[tokio::test]
    async fn only_the_initiator_with_the_name_finds_the_volume_of_a_portal() {
        let volume: VolumeName = "perigee-measured-1".parse().expect("a name");
        let only = Only { initiator: "iqn.secret".to_owned(), volume };
        let client = only.find("iqn.secret").await.expect("found").expect("a client");
        assert!(client.may_use("perigee-measured-1") && !client.may_use("data"));
        assert_eq!(only.find("iqn.other").await.expect("found"), None);
    }
}
