//! The same job in bare QEMU, which reads its data over the WAN without Perigee: by QEMU's iSCSI initiator from
//! Perigee's target, or by QEMU's NBD client from qemu-nbd. Its own disks are volumes at its host, as with Perigee.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use perigee_lab::bare::{
    self, Content, Disks, Machine, NbdServer, Qemu, Running, nbd, wait_for_console,
};
use perigee_lab::measuring::load_1min;
use serde_json::{Value, json};

use crate::bench::{Bench, MOUNT, OUTPUT_BYTES};
use crate::case::{BEGUN, DONE, Way, Work};
use crate::perigee::said;
use crate::results::Run;

const ISCSI_PORT: u16 = 3260;
const BOOT_DEADLINE: Duration = Duration::from_secs(180);
const WORK_DEADLINE: Duration = Duration::from_secs(900);

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
            format!("{}:{ISCSI_PORT}", nbd::address(bench.lab, &bench.far)?),
        ];
        let iscsi = Running::start(bench.lab, &bench.far, &line, &dir.join("iscsi.log"))?;
        let plain = Self { bench, program: program.to_owned(), dir, _iscsi: iscsi };
        nbd::wait_for(&pool.join("control.sock"), "the iSCSI target").await?;
        for work in works {
            plain.copy(*work)?;
        }
        step.done("");
        Ok(plain)
    }

    fn raw(&self, work: Work) -> PathBuf {
        self.dir.join(format!("{}.raw", work.name()))
    }

    fn copy(&self, work: Work) -> Result<()> {
        let (bench, raw) = (self.bench, self.raw(work));
        nbd::copy_volume(bench.lab, &bench.far, &bench.data(work), &raw)?;
        self.perigee(&["image", "import", "--pool"], &[work.name(), &raw.display().to_string()])
    }

    /// Runs `perigee` on the target's pool.
    fn perigee(&self, verb: &[&str], rest: &[&str]) -> Result<()> {
        let pool = self.dir.join("pool").display().to_string();
        Ok(nbd::run(&self.program.display().to_string(), &[verb, &[&pool], rest].concat())?)
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
                let raw = self.raw(work);
                let server =
                    NbdServer::start(bench.lab, &bench.far, &raw, &self.dir, &name).await?;
                (server.node(), Some(server))
            }
        };
        let content = Content {
            image: &bench.stage.image,
            seed: &bare::seed(&name, work.command(), MOUNT),
            bundle: (work == Work::Tpch).then_some(bench.bundle.as_path()),
            output_bytes: OUTPUT_BYTES,
        };
        let disks = Disks::make(bench.lab, &bench.near, &name, content).await?;
        let dir = self.dir.join(&name);
        std::fs::create_dir_all(dir.join("run"))?;
        let line = disks.line(machine, &dir, &data)?;
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
            "portal": format!("{}:{ISCSI_PORT}", nbd::address(self.bench.lab, &self.bench.far)?),
            "target": format!("iqn.2026-11.org.perigee:{name}"),
            "lun": 0,
            "discard": "unmap",
        }))
    }
}
