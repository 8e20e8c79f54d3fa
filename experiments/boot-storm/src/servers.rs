//! The servers of a storm. Each client has a disk, which is a clone of the golden image if the server supports
//! clones.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use perigee_lab::interrupt;
use perigee_lab::usage::Usage;
use perigee_model::trace::Operation;
use perigee_model::volume::{BLOCK_BYTES, VolumeInfo};
use serde::{Deserialize, Serialize};

use crate::extents::{Extents, Layers};
use crate::machine::{Group, run};
use crate::replay::Disk;
use crate::script::Script;

const READY_MAX: Duration = Duration::from_secs(60);
const GOLDEN: &str = "golden";
const TARGET: &str = "iqn.2026-11.org.perigee";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    PerigeeNbd,
    PerigeeIscsi,
    /// One process for each client, each with a qcow2 overlay.
    QemuNbd,
    /// It has no clones, so each client has a copy of the blocks that a boot reads.
    Tgt,
}

impl Server {
    pub const ALL: [Self; 4] = [Self::PerigeeNbd, Self::QemuNbd, Self::PerigeeIscsi, Self::Tgt];

    pub fn name(self) -> &'static str {
        match self {
            Self::PerigeeNbd => "perigee, NBD",
            Self::PerigeeIscsi => "perigee, iSCSI",
            Self::QemuNbd => "qemu-nbd, an overlay each (NBD)",
            Self::Tgt => "tgt, a copy each (iSCSI)",
        }
    }

    pub fn is_perigee(self) -> bool {
        matches!(self, Self::PerigeeNbd | Self::PerigeeIscsi)
    }
}

/// The directories of the servers' files.
pub struct Places<'a> {
    pub perigee: &'a Path,
    /// The golden image, raw.
    pub image: &'a Path,
    /// The directory on the disk of the source.
    pub source: &'a Path,
    /// The directory on the disk of the private data, which may be the same disk.
    pub private: &'a Path,
    /// A directory that is not on those disks.
    pub scratch: &'a Path,
}

impl Places<'_> {
    fn pool(&self) -> PathBuf {
        self.source.join("pool")
    }

    fn base(&self) -> PathBuf {
        self.source.join("base.raw")
    }

    pub fn perigee(&self, arguments: &[&str]) -> Result<String> {
        let pool = text(&self.pool());
        run(&text(self.perigee), &[arguments, &["--pool", &pool]].concat())
    }

    /// Puts the golden image where every server finds it.
    pub fn prepare(&self) -> Result<()> {
        self.perigee(&["pool", "create"])?;
        self.perigee(&["image", "import", GOLDEN, &text(self.image)])?;
        run("cp", &["--sparse=always", &text(self.image), &text(&self.base())])?;
        Ok(())
    }

    /// Makes a disk for each client.
    pub fn make_disks(&self, server: Server, clients: usize, script: &Script) -> Result<()> {
        match server {
            Server::PerigeeNbd | Server::PerigeeIscsi => {
                let count = clients.to_string();
                self.perigee(&[
                    "volume", "create", "client", "--image", GOLDEN, "--count", &count,
                ])?;
            }
            Server::QemuNbd => {
                for client in 0..clients {
                    let overlay = text(&self.overlay(client));
                    let base = text(&self.base());
                    run(
                        "qemu-img",
                        &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &overlay],
                    )?;
                }
            }
            Server::Tgt => {
                for client in 0..clients {
                    copy_boot(&self.base(), &self.copy(client), script)?;
                }
            }
        }
        Ok(())
    }

    /// Allocates the whole size of every client's private file on the disk. The file must exist, so something
    /// must have been written.
    pub fn allocate_all(&self, clients: usize) -> Result<()> {
        for client in 0..clients {
            let [head, _] = self.layers_of(client)?;
            let length = head.metadata()?.len().to_string();
            run("fallocate", &["--length", &length, &text(&head)])?;
        }
        Ok(())
    }

    /// The positions of all blocks of Perigee's volumes on the disk.
    pub fn layers(&self, clients: usize) -> Result<Layers> {
        let [_, source] = self.layers_of(0)?;
        let private = |client| Ok((volume(client), Extents::of(&self.layers_of(client)?[0])?));
        let private: Result<_> = (0..clients).map(private).collect();
        Ok(Layers { source: Extents::of(&source)?, private: private? })
    }

    /// The data files of a volume's head and of the image below it.
    fn layers_of(&self, client: usize) -> Result<[PathBuf; 2]> {
        let said = self.perigee(&["volume", "info", &volume(client), "--format", "json"])?;
        let info: VolumeInfo = serde_json::from_str(&said)?;
        let [head, source, ..] = info.chain[..] else { bail!("a clone has an image below it") };
        let dirs = [text(self.source), text(self.private)];
        let found = |layer| {
            let name = format!("{layer}.data");
            let said = run("find", &[&dirs[0], &dirs[1], "-name", &name])?;
            said.lines().next().map(PathBuf::from).with_context(|| format!("no file {name}"))
        };
        Ok([found(head)?, found(source)?])
    }

    pub fn remove_disks(&self, server: Server, clients: usize) -> Result<()> {
        for client in 0..clients {
            match server {
                Server::PerigeeNbd | Server::PerigeeIscsi => {
                    self.perigee(&["volume", "delete", &volume(client)])?;
                }
                Server::QemuNbd => fs::remove_file(self.overlay(client))?,
                Server::Tgt => fs::remove_file(self.copy(client))?,
            }
        }
        Ok(())
    }

    fn overlay(&self, client: usize) -> PathBuf {
        self.private.join(format!("{client}.qcow2"))
    }

    fn copy(&self, client: usize) -> PathBuf {
        self.private.join(format!("{client}.raw"))
    }
}

fn volume(client: usize) -> String {
    format!("client-{:04}", client + 1)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A sparse file with the blocks of the golden image that a boot reads.
fn copy_boot(from: &Path, to: &Path, script: &Script) -> io::Result<()> {
    let (from, to) = (File::open(from)?, File::create(to)?);
    to.set_len(from.metadata()?.len())?;
    for run in runs(script.blocks(Operation::Read)) {
        let length = (run.end - run.start) * BLOCK_BYTES;
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        from.read_exact_at(&mut bytes, run.start * BLOCK_BYTES)?;
        to.write_all_at(&bytes, run.start * BLOCK_BYTES)?;
    }
    Ok(())
}

/// Merges neighbouring blocks into ranges.
fn runs(blocks: BTreeSet<u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some(run) if run.end == block => run.end += 1,
            _ => runs.push(block..block + 1),
        }
    }
    runs
}

/// The servers of one storm. They are stopped when this is dropped.
pub struct Running {
    children: Vec<Child>,
    pub disks: Vec<Disk>,
}

fn unused_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, perigee_http::unused_port()).into()
}

impl Running {
    pub fn start(server: Server, places: &Places, group: &Group, clients: usize) -> Result<Self> {
        let mut running = Self { children: Vec::new(), disks: Vec::new() };
        match server {
            Server::PerigeeNbd | Server::PerigeeIscsi => {
                running.start_perigee(server, places, group, clients)?;
            }
            Server::QemuNbd => running.start_qemu(places, group, clients)?,
            Server::Tgt => running.start_tgt(places, group, clients)?,
        }
        Ok(running)
    }

    fn start_perigee(
        &mut self,
        server: Server,
        places: &Places,
        group: &Group,
        clients: usize,
    ) -> Result<()> {
        let (nbd, iscsi) = (unused_address(), unused_address());
        let mut command = group.command(&text(places.perigee));
        command.args(["volume", "serve", "--insecure", "--pool", &text(&places.pool())]);
        command.args(["--nbd", &nbd.to_string()]);
        if server == Server::PerigeeIscsi {
            command.args(["--iscsi", &iscsi.to_string()]);
        }
        if places.private != places.source {
            command.args(["--private", &text(places.private)]);
        }
        self.spawn(&mut command, places, "perigee")?;
        let address = if server == Server::PerigeeIscsi { iscsi } else { nbd };
        self.wait_for(address)?;
        self.disks = (0..clients)
            .map(|client| match server {
                Server::PerigeeIscsi => {
                    let target = format!("{TARGET}:{}", volume(client));
                    Disk::Iscsi { address, target, lun: 0 }
                }
                _ => Disk::Nbd { address, export: volume(client) },
            })
            .collect();
        Ok(())
    }

    fn start_qemu(&mut self, places: &Places, group: &Group, clients: usize) -> Result<()> {
        for client in 0..clients {
            let address = unused_address();
            let mut command = group.command("qemu-nbd");
            command.args(["--format=qcow2", "--persistent", "--shared=2", "--export-name=disk"]);
            command.args(["--cache=writeback", "--aio=io_uring", "--bind=127.0.0.1"]);
            command.arg(format!("--port={}", address.port())).arg(places.overlay(client));
            self.spawn(&mut command, places, &format!("qemu-nbd-{client}"))?;
            self.disks.push(Disk::Nbd { address, export: "disk".into() });
            self.wait_for(address)?;
        }
        Ok(())
    }

    fn start_tgt(&mut self, places: &Places, group: &Group, clients: usize) -> Result<()> {
        let address = unused_address();
        // The number of its management socket, which must be unique among all tgtd processes.
        let control = (std::process::id() % 30_000).to_string();
        let mut command = group.command("tgtd");
        command.args(["-f", "-C", &control, "--iscsi", &format!("portal={address}")]);
        self.spawn(&mut command, places, "tgtd")?;
        self.wait_for(address)?;
        let admin = |arguments: &[&str]| {
            let common = ["-C", &control, "--lld", "iscsi"];
            run("tgtadm", &[&common[..], arguments].concat())
        };
        for client in 0..clients {
            let (id, name) = ((client + 1).to_string(), format!("{TARGET}.peer:{client}"));
            admin(&["--op", "new", "--mode", "target", "--tid", &id, "-T", &name])?;
            let copy = text(&places.copy(client));
            admin(&[
                "--op",
                "new",
                "--mode",
                "logicalunit",
                "--tid",
                &id,
                "--lun",
                "1",
                "-b",
                &copy,
            ])?;
            admin(&["--op", "bind", "--mode", "target", "--tid", &id, "-I", "ALL"])?;
            self.disks.push(Disk::Iscsi { address, target: name, lun: 1 });
        }
        Ok(())
    }

    fn spawn(&mut self, command: &mut Command, places: &Places, name: &str) -> Result<()> {
        let log = File::create(places.scratch.join(format!("{name}.log")))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.children.push(command.spawn().with_context(|| format!("can't start {name}"))?);
        Ok(())
    }

    fn wait_for(&mut self, address: SocketAddr) -> Result<()> {
        let deadline = Instant::now() + READY_MAX;
        while TcpStream::connect(address).is_err() {
            if let Some(child) = self.children.last_mut()
                && let Some(status) = child.try_wait()?
            {
                bail!("the server ended with {status} before it listened");
            }
            if Instant::now() > deadline {
                bail!("waited {} s for the server to listen", READY_MAX.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Waits until a server ends unexpectedly or a signal arrives, and returns the reason.
    pub async fn ended(&mut self) -> anyhow::Error {
        loop {
            if let Err(signal) = interrupt::check() {
                return signal.into();
            }
            for child in &mut self.children {
                match child.try_wait() {
                    Ok(None) => {}
                    Ok(Some(status)) => {
                        return anyhow!(
                            "a server ended with {status} in the storm; SIGKILL can mean that its memory is limited too much"
                        );
                    }
                    Err(error) => return error.into(),
                }
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// The CPU time of all servers since they were started.
    pub fn cpu_s(&self) -> Result<f64> {
        self.children.iter().map(|child| Ok(Usage::of(child.id())?.cpu_s)).sum()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.children {
            let id = i32::try_from(child.id()).unwrap_or_default();
            // A server that has ended already is only waited for.
            if matches!(child.try_wait(), Ok(None)) && id > 0 {
                let _gone = kill(Pid::from_raw(id), Signal::SIGTERM);
            }
        }
        let deadline = Instant::now() + READY_MAX;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > deadline {
                    let _gone = child.kill();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run() {
        assert_eq!(runs(BTreeSet::from([1, 2, 3, 7, 9])), [1..4, 7..8, 9..10]);
    }
}
