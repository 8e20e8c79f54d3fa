//! The same job in bare QEMU, which reads its data over the WAN without Perigee: by QEMU's iSCSI initiator from
//! Perigee's target, or by QEMU's NBD client from qemu-nbd. Its own disks are volumes at its host, as with Perigee.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_http::{Client, Method};
use perigee_lab::bare::{Machine, Qemu, Running, SEED_BYTES, seed_disk, wait_for_console};
use perigee_lab::measuring::load_1min;
use perigee_model::DiskRole;
use perigee_model::guest::{Mount, Seed};
use perigee_model::volume::{CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{ImageName, VolumeName};
use serde_json::{Value, json};

use crate::bench::{Bench, MOUNT, OUTPUT_BYTES};
use crate::case::{BEGUN, DONE, Way, Work};
use crate::perigee::said;
use crate::results::Run;

const ISCSI_PORT: u16 = 3260;
const NBD_PORT: u16 = 10900;
const BOOT_DEADLINE: Duration = Duration::from_secs(180);
const WORK_DEADLINE: Duration = Duration::from_secs(900);
const SERVER_DEADLINE: Duration = Duration::from_secs(60);

/// The servers without Perigee's controller, at the far host, and copies of the data for them.
pub struct Plain<'a> {
    bench: &'a Bench<'a>,
    program: PathBuf,
    dir: PathBuf,
    _iscsi: Running,
}

impl<'a> Plain<'a> {
    /// Copies the data into plain files, and starts the iSCSI target over a pool with the same data.
    pub async fn prepare(bench: &'a Bench<'a>, program: &Path, works: &[Work]) -> Result<Self> {
        let step = bench.step("copy the data for the servers without Perigee");
        let dir = bench.lab.dir().join("plain");
        std::fs::create_dir_all(&dir)?;
        let pool = dir.join("pool");
        let line = [
            program.display().to_string(),
            "volume".to_owned(),
            "serve".to_owned(),
            "--insecure".to_owned(),
            "--pool".to_owned(),
            pool.display().to_string(),
            "--iscsi".to_owned(),
            format!("{}:{ISCSI_PORT}", address(bench)?),
        ];
        let iscsi = Running::start(bench.lab, &bench.far, &line, &dir.join("iscsi.log"))?;
        let plain = Self { bench, program: program.to_owned(), dir, _iscsi: iscsi };
        plain.wait_for("the iSCSI target", || pool.join("control.sock").exists()).await?;
        for work in works {
            plain.copy(*work)?;
        }
        step.done("");
        Ok(plain)
    }

    /// Waits until a server is there.
    async fn wait_for(&self, what: &str, is_there: impl Fn() -> bool) -> Result<()> {
        let end = Instant::now() + SERVER_DEADLINE;
        while !is_there() {
            ensure!(Instant::now() < end, "{what} was not there within {SERVER_DEADLINE:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn raw(&self, work: Work) -> PathBuf {
        self.dir.join(format!("{}.raw", work.name()))
    }

    fn copy(&self, work: Work) -> Result<()> {
        let bench = self.bench;
        let socket = bench.lab.dir().join("hosts").join(bench.far.as_str()).join("volume.sock");
        let from = format!("nbd+unix:///{}?socket={}", bench.data(work), socket.display());
        let raw = self.raw(work).display().to_string();
        run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &from, &raw])?;
        self.perigee(&["image", "import", "--pool"], &[work.name(), &raw])
    }

    /// Runs `perigee` on the target's pool.
    fn perigee(&self, verb: &[&str], rest: &[&str]) -> Result<()> {
        let pool = self.dir.join("pool").display().to_string();
        run(&self.program.display().to_string(), &[verb, &[&pool], rest].concat())
    }

    /// Runs the job once, on its own clone of the data.
    pub async fn run(
        &self,
        (rtt_ms, round): (u32, u32),
        work: Work,
        way: Way,
        machine: &Machine,
    ) -> Result<Run> {
        let bench = self.bench;
        let mut step = bench.step(format!("{rtt_ms} ms, {}: {}", work.name(), way.words()));
        let name = bench.unique("plain");
        let (data, server) = match way {
            Way::Iscsi => (self.iscsi(work, &name)?, None),
            _ => {
                let (node, server) = self.nbd(work, &name).await?;
                (node, Some(server))
            }
        };
        let disks = Disks::make(bench, work, &name).await?;
        let dir = self.dir.join(&name);
        std::fs::create_dir_all(dir.join("run"))?;
        let line = machine.line_for(&dir, |disk, node| {
            Ok(match disk {
                "root" | "seed" | "output" => disks.node(disk, node),
                // A bare VM's inputs are on its seed disk.
                "inputs" => json!({
                    "driver": "null-co", "node-name": disk, "size": 1 << 20, "read-only": true,
                }),
                _ => data.clone(),
            })
        })?;
        let load_1min = load_1min()?;
        let before = bench.wan_bytes();
        let started = Instant::now();
        let qemu = Qemu::start(bench.lab, &bench.near, &line, &dir)?;
        step.at("booting");
        wait_for_console(&qemu.console(), BEGUN, BOOT_DEADLINE).await?;
        let begun = Instant::now();
        step.at("at work");
        let result = wait_for_console(&qemu.console(), DONE, WORK_DEADLINE).await?;
        let work_s = begun.elapsed().as_secs_f64();
        let boot_s = (begun - started).as_secs_f64();
        let wan_bytes = bench.wan_bytes_since(before);
        drop(qemu);
        drop(server);
        disks.delete().await?;
        step.done(&format!("work {work_s:.1} s"));
        Ok(Run { rtt_ms, round, way, boot_s, work_s, wan_bytes, load_1min, ..said(work, &result)? })
    }

    fn iscsi(&self, work: Work, name: &str) -> Result<Value> {
        self.perigee(&["volume", "create", "--pool"], &[name, "--image", work.name()])?;
        Ok(json!({
            "driver": "iscsi",
            "node-name": "data0",
            "transport": "tcp",
            "portal": format!("{}:{ISCSI_PORT}", address(self.bench)?),
            "target": format!("iqn.2026-11.org.perigee:{name}"),
            "lun": 0,
            "discard": "unmap",
        }))
    }

    async fn nbd(&self, work: Work, name: &str) -> Result<(Value, Running)> {
        let overlay = self.dir.join(format!("{name}.qcow2")).display().to_string();
        let raw = self.raw(work).display().to_string();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw", &overlay])?;
        let address = address(self.bench)?;
        let pid_file = self.dir.join(format!("{name}.pid"));
        let line = [
            "qemu-nbd".to_owned(),
            "--persistent".to_owned(),
            "--format=qcow2".to_owned(),
            "--discard=unmap".to_owned(),
            format!("--bind={address}"),
            format!("--port={NBD_PORT}"),
            format!("--pid-file={}", pid_file.display()),
            overlay,
        ];
        let log = self.dir.join(format!("{name}.log"));
        let server = Running::start(self.bench.lab, &self.bench.far, &line, &log)?;
        // qemu-nbd writes it when it listens.
        self.wait_for("qemu-nbd", || pid_file.exists()).await?;
        let server_node = json!({"type": "inet", "host": address, "port": NBD_PORT.to_string()});
        let node = json!({
            "driver": "nbd",
            "node-name": "data0",
            "server": server_node,
            "export": "",
            "discard": "unmap",
        });
        Ok((node, server))
    }
}

/// The address of the data's host.
fn address(bench: &Bench<'_>) -> Result<String> {
    let address = bench.lab.definition.host_address(&bench.far).context("a host has an address")?;
    Ok(address.to_string())
}

pub fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().context(program.to_owned())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}

/// A bare VM's own disks: volumes of the volume server at its host, without an epoch.
struct Disks {
    client: Client,
    socket: PathBuf,
    name: String,
}

impl Disks {
    async fn make(bench: &Bench<'_>, work: Work, name: &str) -> Result<Self> {
        let home = bench.lab.dir().join("hosts").join(bench.near.as_str());
        let control = format!("unix:{}", home.join("volume-control.sock").display());
        let client = Client::new(&control, Duration::from_secs(60))?;
        let disks = Self { client, socket: home.join("volume.sock"), name: name.to_owned() };
        let image: ImageName = bench.stage.image.clone();
        let all = [
            ("root", VolumeSource::Image(image), None),
            ("seed", VolumeSource::Empty, Some(SEED_BYTES as u64)),
            ("output", VolumeSource::Empty, Some(OUTPUT_BYTES)),
        ];
        for (disk, source, size_bytes) in all {
            let new = CreateVolume::new(disks.volume(disk)?, size_bytes, source);
            disks.client.post::<VolumeInfo>("/v1/volumes", &new).await?;
        }
        let seed = Seed {
            job: name.to_owned(),
            command: work.command(),
            env: Default::default(),
            mounts: vec![Mount {
                role: DiskRole::Data(0),
                path: MOUNT.to_owned(),
                read_only: false,
            }],
            outputs: Vec::new(),
            timeout_s: None,
            output_bytes: None,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            network: None,
            gang: None,
            collect: false,
        };
        let bundle = (work == Work::Tpch).then_some(bench.bundle.as_path());
        let path = format!("/v1/volumes/{}/data", disks.volume("seed")?);
        disks.client.send_body::<Value>(Method::PUT, &path, seed_disk(&seed, bundle)?).await?;
        Ok(disks)
    }

    fn volume(&self, disk: &str) -> Result<VolumeName> {
        Ok(VolumeName::new(format!("{}-{disk}", self.name))?)
    }

    fn node(&self, disk: &str, mut node: Value) -> Value {
        node["export"] = format!("{}-{disk}", self.name).into();
        node["server"]["path"] = self.socket.display().to_string().into();
        node
    }

    async fn delete(self) -> Result<()> {
        for disk in ["root", "seed", "output"] {
            self.client.delete(&format!("/v1/volumes/{}", self.volume(disk)?)).await?;
        }
        Ok(())
    }
}
