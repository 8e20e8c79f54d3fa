//! The golden image and its clones for all servers. They are made once for each run.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use perigee_model::volume::{BLOCK_BYTES, VolumeSource};

use super::{Aio, Disk, Server, Transport};
use crate::load::offsets::{Pattern, Random};
use crate::load::{self, Address, Kind, Load};

/// The image's name in a pool.
pub const GOLDEN: &str = "golden";
/// A pool for volumes that would disturb the others.
pub const SECOND_POOL: &str = "pool-2";

const RUN_BYTES: u32 = 1 << 20;
const FILL_SEED: u64 = 3;

pub struct Fixtures {
    pub dir: PathBuf,
    pub perigee: PathBuf,
    /// Size of the golden image and of most clones.
    pub image_bytes: u64,
}

impl Fixtures {
    /// Makes the image, the pool and the overlays in a directory.
    pub fn make(dir: &Path, perigee: &Path, image_bytes: u64, say: impl Fn(&str)) -> Result<Self> {
        let fixtures = Self { dir: dir.to_owned(), perigee: perigee.to_owned(), image_bytes };
        say("golden image");
        write_random(&fixtures.base(), image_bytes).context("can't write the golden image")?;
        for pool in ["pool", SECOND_POOL] {
            let server = fixtures.start_pool(pool, Transport::Unix, None)?;
            server.control(&fixtures, pool)?.import(GOLDEN, &fixtures.base())?;
            server.stop(&fixtures)?;
        }
        for disk in [Disk::Mixed, Disk::Runs] {
            fixtures.make_clone(disk, &say)?;
        }
        Ok(fixtures)
    }

    pub fn base(&self) -> PathBuf {
        self.dir.join("golden.raw")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn volume(disk: Disk) -> String {
        match disk {
            Disk::Mixed => "mixed".into(),
            Disk::Runs => "runs".into(),
            Disk::Fresh => "fresh".into(),
            Disk::Large(bytes) => format!("large-{bytes}"),
            Disk::Chain(layers) => format!("chain-{layers}"),
        }
    }

    pub fn overlay(&self, disk: Disk, extended_l2: bool) -> PathBuf {
        let extended = if extended_l2 { "-extended" } else { "" };
        self.path(&format!("{}{extended}.qcow2", Self::volume(disk)))
    }

    /// Makes a new overlay over `backing`.
    pub fn make_overlay(
        &self,
        overlay: &Path,
        backing: (&Path, &str),
        size_bytes: u64,
        extended_l2: bool,
    ) -> Result<()> {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-F", backing.1, "-b"]).arg(backing.0);
        if extended_l2 {
            command.args(["-o", "extended_l2=on,cluster_size=128k"]);
        }
        let status = command.arg(overlay).arg(size_bytes.to_string()).status()?;
        if !status.success() {
            bail!("qemu-img create ended with {status}");
        }
        Ok(())
    }

    fn make_clone(&self, disk: Disk, say: &impl Fn(&str)) -> Result<()> {
        let name = Self::volume(disk);
        let server = self.start_pool("pool", Transport::Unix, None)?;
        let image = VolumeSource::Image(GOLDEN.parse()?);
        server.control(self, "pool")?.create(&name, image, None)?;
        say(&format!("clone {name} of perigee"));
        self.fill(disk, &server.address, &name)?;
        server.stop(self)?;
        for extended_l2 in [false, true] {
            say(&format!("clone {name} as a qcow2 overlay"));
            let overlay = self.overlay(disk, extended_l2);
            self.make_overlay(&overlay, (&self.base(), "raw"), self.image_bytes, extended_l2)?;
            let server = Server::QemuNbd { aio: Aio::Threads, extended_l2 };
            let server = self.start(server, disk, Transport::Unix, None)?;
            self.fill(disk, &server.address, &server.export)?;
            server.stop(self)?;
        }
        Ok(())
    }

    /// Makes a clone on this many layers, including the golden image. The layers above the image share an
    /// eighth of the blocks, so most reads have to pass all of them.
    pub fn make_chain(&self, layers: u32) -> Result<()> {
        let disk = Disk::Chain(layers);
        let name = Self::volume(disk);
        let mut blocks = Pattern::shuffled(self.image_bytes / BLOCK_BYTES, FILL_SEED);
        blocks.truncate(blocks.len() / 8);
        let share = blocks.len().div_ceil(layers as usize);
        let shares: Vec<Vec<u64>> = blocks.chunks(share).map(<[u64]>::to_vec).collect();
        let top = shares.len() - 1;
        let server = self.start_pool("pool", Transport::Unix, None)?;
        let control = server.control(self, "pool")?;
        control.create(&name, VolumeSource::Image(GOLDEN.parse()?), None)?;
        for (number, share) in shares.iter().enumerate() {
            write_once(&server.address, &name, 4096, share.clone())?;
            if number < top {
                control.snapshot(&name, &format!("{name}-{number}"))?;
            }
        }
        server.stop(self)?;
        let (mut below, mut format) = (self.base(), "raw");
        for (number, share) in shares.into_iter().enumerate() {
            let overlay = if number == top {
                self.overlay(disk, false)
            } else {
                self.path(&format!("{name}-{number}.qcow2"))
            };
            self.make_overlay(&overlay, (&below, format), self.image_bytes, false)?;
            let server = self.start_overlay(Server::QEMU, &overlay)?;
            write_once(&server.address, &server.export, 4096, share)?;
            server.stop(self)?;
            (below, format) = (overlay, "qcow2");
        }
        Ok(())
    }

    /// Writes the half of a clone that is its own.
    pub fn fill(&self, disk: Disk, address: &Address, export: &str) -> Result<()> {
        let (request_bytes, units) = match disk {
            Disk::Runs => {
                let runs = self.image_bytes / u64::from(RUN_BYTES);
                (RUN_BYTES, (0..runs).step_by(2).collect())
            }
            _ => {
                let mut blocks = Pattern::shuffled(self.image_bytes / BLOCK_BYTES, FILL_SEED);
                blocks.truncate(blocks.len() / 2);
                (4096, blocks)
            }
        };
        write_once(address, export, request_bytes, units)
    }
}

/// Writes each of these units once, and flushes.
pub fn write_once(
    address: &Address,
    export: &str,
    request_bytes: u32,
    units: Vec<u64>,
) -> Result<()> {
    let load = Load {
        address: address.clone(),
        exports: vec![export.to_owned()],
        structured: false,
        kind: Kind::Write,
        request_bytes,
        pattern: Pattern::Once(Arc::new(units)),
        connections: 1,
        depth: if request_bytes > 4096 { 4 } else { 32 },
        threads: 1,
        warm_up: Duration::ZERO,
        duration: Duration::from_secs(120),
        flush: true,
        cpu: None,
        seed: 1,
    };
    load::run(&load, || (), || ()).context("can't write a clone's blocks")?;
    Ok(())
}

fn write_random(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut random = Random::new(1);
    for _ in 0..bytes / 8 {
        file.write_all(&random.next().to_ne_bytes())?;
    }
    file.into_inner()?.sync_all()
}
