//! The figures that are not measured per request: memory, idle CPU, creating many clones, opening large pools,
//! and how often the device is read for the same bytes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use perigee_model::volume::{BLOCK_BYTES, VolumeSource};

use crate::goals::{
    CACHE_GROWTH, CLIENT_GROWTH, CLONE_BYTES, CLONES_TIME, IDLE_CPU, OPEN_TIME, OPEN_TIME_MOST,
    SINGLE_FLIGHT,
};
use crate::load::offsets::Pattern;
use crate::load::{self, Load};
use crate::measure::{evict, load_of};
use crate::process::{cached_mib, live_threads_cpu_ms, usage};
use crate::results::Figure;
use crate::rounds::Plan;
use crate::servers::{Disk, Fixtures, GOLDEN, SECOND_POOL, Server, Started, Transport};
use crate::workloads::WORKLOADS;

const CLONES: u32 = 64;
const READ_BY_EACH_BYTES: u64 = 500 << 20;
const LONG_READ_BYTES: u32 = 128 << 10;
/// The bytes that 64 clients read at the same time from a cold disk.
const SHARED_BYTES: u64 = 32 << 20;

pub struct Figures<'a> {
    pub fixtures: &'a Fixtures,
    pub plan: &'a Plan,
}

fn figure(name: &str, server: &str, value: f64, unit: &str) -> Figure {
    Figure { name: name.into(), server: server.into(), value, unit: unit.into(), at: None }
}

impl Figures<'_> {
    pub fn run(&self, say: impl Fn(&str)) -> Result<Vec<Figure>> {
        let mut figures = Vec::new();
        if self.plan.wants("memory") {
            say("memory of 64 clones, and idle CPU");
            figures.extend(self.memory()?);
            figures.extend(self.memory_of_peers()?);
        }
        if self.plan.wants("single-flight") {
            say("64 clients read the same cold blocks");
            for server in [Server::Perigee, Server::QEMU, Server::NbdkitFile] {
                figures.push(self.single_flight(server)?);
            }
        }
        if self.plan.wants("many-clones") {
            say("1000 clones, pools of up to 10000 volumes");
            figures.extend(self.many_clones()?);
        }
        Ok(figures)
    }

    /// All 64 clones read the same bytes at the same time, starting with an empty page cache.
    fn memory(&self) -> Result<Vec<Figure>> {
        let started = self.fixtures.start_pool("pool", Transport::Unix, None)?;
        let control = started.control(self.fixtures, "pool")?;
        let names: Vec<String> = (0..CLONES).map(|n| format!("memory-{n}")).collect();
        for name in &names {
            control.create(name, VolumeSource::Image(GOLDEN.parse()?), None)?;
        }
        evict(&started.files(self.fixtures))?;
        let mut load = self.long_reads(&started, READ_BY_EACH_BYTES);
        load.exports.clone_from(&names);
        load.connections = names.len();
        let private_before_mib = usage(started.id())?.private_mib;
        let files = started.files(self.fixtures);
        let cache_before_mib = cached_mib(&files)?;
        let mut private_mib = Ok(0.0);
        load::run(
            &load,
            || (),
            || private_mib = usage(started.id()).map(|usage| usage.private_mib),
        )?;
        let cache_mib = cached_mib(&files)?;
        let idle_ms = idle_ms_per_s(&load, started.id())?;
        for name in &names {
            control.delete(name)?;
        }
        started.stop(self.fixtures)?;
        let growth_mib = (private_mib? - private_before_mib) / f64::from(CLONES);
        Ok(vec![
            figure(CACHE_GROWTH, "perigee", cache_mib - cache_before_mib, "MiB"),
            figure(CLIENT_GROWTH, "perigee", growth_mib, "MiB"),
            figure(IDLE_CPU, "perigee", idle_ms, "ms a second"),
        ])
    }

    /// One qemu-nbd for each clone, as users run it. Reading a part of the bytes is enough to show its memory.
    fn memory_of_peers(&self) -> Result<Vec<Figure>> {
        let base = self.fixtures.base();
        let mut servers = Vec::new();
        for number in 0..CLONES {
            let overlay = self.fixtures.path(&format!("memory-{number}.qcow2"));
            self.fixtures.make_overlay(
                &overlay,
                (&base, "raw"),
                self.fixtures.image_bytes,
                false,
            )?;
            let started = self.fixtures.start_overlay(Server::QEMU, &overlay)?;
            load::run(&self.long_reads(&started, READ_BY_EACH_BYTES / 10), || (), || ())?;
            servers.push(started);
        }
        let mut total_mib = 0.0;
        for started in servers {
            total_mib += usage(started.id())?.private_mib;
            started.stop(self.fixtures)?;
        }
        Ok(vec![figure(CLIENT_GROWTH, &Server::QEMU.name(), total_mib / f64::from(CLONES), "MiB")])
    }

    fn long_reads(&self, started: &Started, bytes: u64) -> Load {
        let bytes = bytes.min(self.fixtures.image_bytes);
        let mut load = load_of(self.fixtures, &WORKLOADS[0], started, Duration::from_secs(120));
        load.request_bytes = LONG_READ_BYTES;
        let units = bytes / u64::from(LONG_READ_BYTES);
        load.pattern = Pattern::OnceEach(Arc::new((0..units).collect()));
        load.depth = 2;
        load.warm_up = Duration::ZERO;
        load
    }

    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    fn single_flight(&self, server: Server) -> Result<Figure> {
        let started = self.fixtures.start(server, Disk::Fresh, Transport::Unix, None)?;
        evict(&started.files(self.fixtures))?;
        let mut load = load_of(self.fixtures, &WORKLOADS[0], &started, Duration::from_secs(60));
        // The end of the image, so that read-ahead finds no further blocks.
        let first = (self.fixtures.image_bytes - SHARED_BYTES) / BLOCK_BYTES;
        let mut blocks = Pattern::shuffled(SHARED_BYTES / BLOCK_BYTES, 13);
        blocks.iter_mut().for_each(|block| *block += first);
        load.pattern = Pattern::OnceEach(Arc::new(blocks));
        (load.connections, load.depth, load.warm_up) = (64, 1, Duration::ZERO);
        let before = usage(started.id())?;
        load::run(&load, || (), || ())?;
        let read_bytes = usage(started.id())?.device_read_bytes - before.device_read_bytes;
        started.stop(self.fixtures)?;
        let times = read_bytes as f64 / SHARED_BYTES as f64;
        Ok(figure(SINGLE_FLIGHT, &server.name(), times, "×"))
    }

    fn many_clones(&self) -> Result<Vec<Figure>> {
        let dir = self.fixtures.path(SECOND_POOL);
        let open = |volumes: f64| -> Result<(Started, Figure)> {
            let began = Instant::now();
            let started = self.fixtures.start_pool(SECOND_POOL, Transport::Unix, None)?;
            let seconds = began.elapsed().as_secs_f64();
            let mut time = figure(OPEN_TIME, "perigee", seconds, "s");
            time.at = Some(volumes);
            Ok((started, time))
        };
        let (started, none) = open(0.0)?;
        let control = started.control(self.fixtures, SECOND_POOL)?;
        let space_before_bytes = space_bytes(&dir)?;
        let began = Instant::now();
        control.create_clones("clone", 1000, GOLDEN)?;
        let clones_s = began.elapsed().as_secs_f64();
        let clone_kib = (space_bytes(&dir)? - space_before_bytes) / 1024.0 / 1000.0;
        started.stop(self.fixtures)?;
        let (started, thousand) = open(1000.0)?;
        let control = started.control(self.fixtures, SECOND_POOL)?;
        control.create_clones("more", 9000, GOLDEN)?;
        started.stop(self.fixtures)?;
        let (started, ten_thousand) = open(10_000.0)?;
        started.stop(self.fixtures)?;
        Ok(vec![
            figure(CLONES_TIME, "perigee", clones_s, "s"),
            figure(CLONE_BYTES, "perigee", clone_kib, "KiB"),
            figure(OPEN_TIME_MOST, "perigee", ten_thousand.value, "s"),
            none,
            thousand,
            ten_thousand,
        ])
    }
}

/// The CPU time of a server with connected, idle clients.
fn idle_ms_per_s(load: &Load, pid: u32) -> Result<f64> {
    let clients = load::connect(load)?;
    let idle = Duration::from_secs(5);
    // By then the work that the connections caused has ended.
    std::thread::sleep(Duration::from_millis(500));
    let before = live_threads_cpu_ms(pid)?;
    std::thread::sleep(idle);
    let spent_ms = live_threads_cpu_ms(pid)? - before;
    drop(clients);
    Ok(spent_ms / idle.as_secs_f64())
}

/// The space that a directory takes on its disk.
#[expect(clippy::cast_precision_loss, reason = "bytes of a directory")]
fn space_bytes(dir: &Path) -> Result<f64> {
    let mut bytes = 0.0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let data = entry.metadata()?;
        bytes += if data.is_dir() {
            data.blocks() as f64 * 512.0 + space_bytes(&entry.path())?
        } else {
            data.blocks() as f64 * 512.0
        };
    }
    Ok(bytes)
}
