//! Cells over plain iSCSI: Linux' initiator in the guest, and no Perigee in the data's way. The targets are `perigee volume serve` with a pool of its
//! own, and tgt, at the hosts of the targets. Each VM is a job of its own with a card in a bridge of its host, which passes its packets on to the targets:
//! so the guest's TCP reaches as far as the target. (With a user network `passt` would end the guest's connections at the host; the one of Debian 12 leaves what a guest
//! sends unacknowledged until the guest sends it again, if the far end is more than 50 ms away.)

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use perigee_lab::bare::{Running, nbd};
use perigee_lab::measuring::load_1min;
use perigee_lab::netns;
use perigee_model::job::{Job, JobSpec, JobState};
use perigee_model::{Problem, job_file};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::bench::{Bench, DATABASE_MEMORY_BYTES, FIXED, STEPS, STREAMS, SUPPORT};
use crate::cell::{Cell, Kind, VM_COUNT};
use crate::dilation::Pace;
use crate::domain0;
use crate::found::{self, Outputs};
use crate::results::{Measured, Side, Work};
use crate::series::{Sampler, Target};

const PERIGEE_PORT: u16 = 3261;
const TGT_PORT: u16 = 3262;
/// tgt's sockets for `tgtadm` are files of the machine: each target has a number.
const TGT_CONTROL: u16 = 3381;
/// At which the guests wait for each other.
const GATE_PORT: u16 = 3270;
/// Of each server, for its guest.
pub const BRIDGE: &str = "br0";
const DEADLINE: Duration = Duration::from_secs(3600);
/// Those of three cells.
const UNUSED_MAX: usize = 3 * 8;
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// So long after a guest's connection has ended, its job has failed too.
const FAILURE_SEEN: Duration = Duration::from_secs(20);

/// The targets at both hosts, and the database that they serve clones of.
pub struct Targets {
    program: PathBuf,
    dir: PathBuf,
    raw: PathBuf,
    /// By side.
    perigee: Vec<Running>,
    tgt: Vec<Running>,
    number: u32,
    /// Clones of Perigee's that could not be deleted yet.
    unused: Vec<(Side, String)>,
}

impl Targets {
    /// Copies the database, and starts all targets.
    ///
    /// # Errors
    /// A target does not start.
    pub async fn start(bench: &Bench<'_>, program: &Path) -> Result<Self> {
        let step = bench.steps.begin("start the iSCSI targets: Perigee's and tgt, at both sites");
        make_bridges(bench)?;
        let dir = bench.scratch.join("iscsi");
        std::fs::create_dir_all(&dir)?;
        let raw = dir.join("tables.raw");
        nbd::copy_volume(bench.lab, &bench.targets[1], &bench.data[1].tables, &raw)?;
        let program = program.to_owned();
        let (perigee, tgt, unused) = (Vec::new(), Vec::new(), Vec::new());
        let mut targets = Self { program, dir, raw, perigee, tgt, number: 0, unused };
        for side in Side::BOTH {
            let host = &bench.targets[side.index()];
            let address = nbd::address(bench.lab, host)?;
            let pool = targets.pool(side);
            let line = [
                targets.program.display().to_string(),
                "volume".to_owned(),
                "serve".to_owned(),
                "--insecure".to_owned(),
                "--pool".to_owned(),
                pool.display().to_string(),
                "--iscsi".to_owned(),
                format!("{address}:{PERIGEE_PORT}"),
            ];
            let log = targets.dir.join(format!("perigee-{}.log", side.name()));
            targets.perigee.push(Running::start(bench.lab, host, &line, &log)?);
            nbd::wait_for(&pool.join("control.sock"), "Perigee's iSCSI target").await?;
            targets.perigee(
                side,
                &["image", "import"],
                &["tables", &targets.raw.display().to_string()],
            )?;
            let line = [
                "tgtd".to_owned(),
                "-f".to_owned(),
                "--iscsi".to_owned(),
                format!("portal={address}:{TGT_PORT}"),
                "--control-port".to_owned(),
                control(side),
            ];
            let log = targets.dir.join(format!("tgt-{}.log", side.name()));
            targets.tgt.push(Running::start(bench.lab, host, &line, &log)?);
            targets.wait_for_tgt(side).await?;
        }
        step.done("");
        Ok(targets)
    }

    fn pool(&self, side: Side) -> PathBuf {
        self.dir.join(format!("pool-{}", side.name()))
    }

    fn perigee(&self, side: Side, verb: &[&str], rest: &[&str]) -> Result<()> {
        let pool = self.pool(side).display().to_string();
        Ok(nbd::run(
            &self.program.display().to_string(),
            &[verb, &["--pool", &pool], rest].concat(),
        )?)
    }

    fn tgt(side: Side, words: &[&str]) -> Result<()> {
        let control = control(side);
        let begin = ["--control-port", &control, "--lld", "iscsi"];
        Ok(nbd::run("tgtadm", &[&begin[..], words].concat())?)
    }

    async fn wait_for_tgt(&self, side: Side) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(30);
        while Self::tgt(side, &["--op", "show", "--mode", "target"]).is_err() {
            ensure!(Instant::now() < end, "tgt did not start within 30 s");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Makes a clone of the database at a target, and returns the target's name.
    pub fn clone_at(&mut self, kind: Kind, side: Side) -> Result<Disk> {
        self.number += 1;
        let number = self.number;
        let name = format!("tables-{number}");
        if kind == Kind::IscsiTgt {
            let file = self.dir.join(format!("{name}.raw"));
            let words = ["--sparse=always", "--reflink=auto"];
            domain0::run(std::process::Command::new("cp").args(words).arg(&self.raw).arg(&file))?;
            let (tid, iqn) = (number.to_string(), format!("iqn.2026-11.org.perigee.tgt:{name}"));
            Self::tgt(side, &["--op", "new", "--mode", "target", "--tid", &tid, "-T", &iqn])?;
            let path = file.display().to_string();
            let unit =
                ["--op", "new", "--mode", "logicalunit", "--tid", &tid, "--lun", "1", "-b", &path];
            Self::tgt(side, &unit)?;
            Self::tgt(side, &["--op", "bind", "--mode", "target", "--tid", &tid, "-I", "ALL"])?;
            return Ok(Disk { kind, side, name, tid, iqn, port: TGT_PORT });
        }
        self.perigee(side, &["volume", "create"], &[&name, "--image", "tables"])?;
        let iqn = format!("iqn.2026-11.org.perigee:{name}");
        Ok(Disk { kind, side, name, tid: String::new(), iqn, port: PERIGEE_PORT })
    }

    /// Deletes a clone that nobody uses any more. Perigee's target deletes none while it believes that an initiator is there, as after
    /// a guest that was switched off; such a clone is deleted with a later one.
    pub fn delete(&mut self, disk: &Disk) -> Result<()> {
        if disk.kind == Kind::IscsiTgt {
            let words = ["--op", "delete", "--mode", "target", "--force", "--tid", &disk.tid];
            Self::tgt(disk.side, &words)?;
            std::fs::remove_file(self.dir.join(format!("{}.raw", disk.name)))?;
            return Ok(());
        }
        self.unused.push((disk.side, disk.name.clone()));
        let unused = std::mem::take(&mut self.unused);
        let is_left = |(side, name): &(Side, String)| {
            self.perigee(*side, &["volume", "delete"], &[name]).is_err()
        };
        self.unused = unused.into_iter().filter(is_left).collect();
        ensure!(self.unused.len() <= UNUSED_MAX, "Perigee's target keeps {:?}", self.unused);
        Ok(())
    }

    /// Both targets of a kind, which have forgotten what they had read.
    fn cold(&self, bench: &Bench<'_>, kind: Kind) -> Result<[Target; 2]> {
        domain0::forget(&self.dir)?;
        let all = if kind == Kind::IscsiTgt { &self.tgt } else { &self.perigee };
        let of = |side: Side| bench.target(side, vec![all[side.index()].pid()]);
        Ok([of(Side::Near)?, of(Side::Far)?])
    }
}

fn control(side: Side) -> String {
    (usize::from(TGT_CONTROL) + side.index()).to_string()
}

/// A clone of the database behind iSCSI.
pub struct Disk {
    kind: Kind,
    pub side: Side,
    name: String,
    tid: String,
    pub iqn: String,
    pub port: u16,
}

/// A bridge at each server, whose guest reaches what its server reaches.
fn make_bridges(bench: &Bench<'_>) -> Result<()> {
    for (rank, server) in bench.servers(0)?.iter().enumerate() {
        let namespace = bench.lab.definition.host_namespace(server);
        let own = address_of(rank, 1);
        for line in [
            format!("link add {BRIDGE} type bridge"),
            format!("address add {own} dev {BRIDGE}"),
            format!("link set {BRIDGE} up"),
        ] {
            let words: Vec<&str> = ["-n", &namespace].into_iter().chain(line.split(' ')).collect();
            nbd::run("ip", &words)?;
        }
        let rules = "add table ip seeds; \
             add chain ip seeds out { type nat hook postrouting priority srcnat; }; \
             add rule ip seeds out ip saddr 192.0.2.0/24 ip daddr != 192.0.2.0/24 masquerade";
        for line in [&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"][..], &["nft", rules]] {
            nbd::run("ip", &[&["netns", "exec", &namespace], line].concat())?;
        }
    }
    Ok(())
}

/// In the bridge of the rank's server: 1 is the server, 2 the guest.
fn address_of(rank: usize, number: usize) -> String {
    format!("192.0.2.{}/29", 8 * rank + number)
}

/// Where guests wait for each other: each says a line, and when all have, each gets one.
struct Gate {
    listener: TcpListener,
    guests: Vec<BufReader<TcpStream>>,
}

impl Gate {
    fn open(bench: &Bench<'_>) -> Result<Self> {
        let host = &bench.targets[0];
        let address = format!("{}:{GATE_PORT}", nbd::address(bench.lab, host)?);
        let listener = netns::within(&bench.lab.definition.host_namespace(host), || {
            let failed = |e: io::Error| Problem::internal(format!("can't listen at {address}"), e);
            let listener = std::net::TcpListener::bind(&address).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            Ok(listener)
        })?;
        Ok(Self { listener: TcpListener::from_std(listener)?, guests: Vec::new() })
    }

    /// Waits until all guests are here, and lets them go on. Returns when that was.
    async fn pass(&mut self) -> Result<Instant> {
        while self.guests.len() < VM_COUNT as usize {
            self.guests.push(BufReader::new(self.listener.accept().await?.0));
        }
        for guest in &mut self.guests {
            let mut line = String::new();
            guest.read_line(&mut line).await?;
            ensure!(line == "ready\n", "a guest said {line:?}");
        }
        let now = Instant::now();
        for guest in &mut self.guests {
            guest.get_mut().write_all(b"go\n").await?;
        }
        Ok(now)
    }
}

impl Bench<'_> {
    /// Measures a cell over iSCSI.
    ///
    /// # Errors
    /// A VM can't log in, TPC-H fails or does not find what it should, or the time for it is over.
    pub async fn iscsi(
        &mut self,
        cell: Cell,
        pace: Pace,
        targets: &mut Targets,
    ) -> Result<Measured> {
        self.free_network().await?;
        let load_1min = load_1min()?;
        let at_ms = crate::gang::now_ms()?;
        let mut sides = Side::BOTH;
        if cell.begins_far() {
            sides.reverse();
        }
        let labels: Vec<String> = std::iter::once("fixed-0".to_owned())
            .chain(sides.iter().map(|side| found::label(Work::Tpch, *side)))
            .collect();
        let mut disks = Vec::new();
        for side in std::iter::repeat_n(Side::BOTH, VM_COUNT as usize).flatten() {
            disks.push(targets.clone_at(cell.kind, side)?);
        }
        let gate = Gate::open(self)?;
        let sampler = Sampler::start(self.lab, targets.cold(self, cell.kind)?);
        self.set_network(cell, pace).await?;
        let words = labels.join(" ").replace('-', ":");
        let jobs = self.guests(&words, &disks).await?;
        let step = self.steps.begin(format!("{cell}: {words}"));
        let seen = tokio::select! {
            seen = passes(gate, &labels, &sampler) => seen,
            error = self.failure(&jobs) => Err(error),
            () = tokio::time::sleep(DEADLINE) => Err(anyhow!("it has not ended after {DEADLINE:?}")),
        };
        let seen = match seen {
            Ok(seen) => seen,
            Err(error) => {
                // A guest that has gone says why in its job's log.
                let why = tokio::time::timeout(FAILURE_SEEN, self.failure(&jobs)).await;
                for job in &jobs {
                    // The next cell needs its hosts.
                    drop(self.cluster.cancel(&job.id).await);
                }
                return Err(why.map_or(error, |why| why.context("a guest has gone")));
            }
        };
        let outputs = self.all_outputs(&jobs).await?;
        let servers = sampler.stop().await?;
        self.free_network().await?;
        for disk in &disks {
            targets.delete(disk)?;
        }
        step.done("");
        let outputs = Outputs(&outputs);
        let fixed_s = seen.first().map(|(_, seconds)| *seconds);
        let own_s: f64 = outputs.marks(0)?.values().map(|(began, ended)| ended - began).sum();
        let clock = own_s / seen.iter().map(|(_, seconds)| seconds).sum::<f64>();
        let mut runs = Vec::new();
        for side in Side::BOTH {
            let label = found::label(Work::Tpch, side);
            let took = seen.iter().find(|(of, _)| *of == label).context("a side is missing")?.1;
            let of = (Work::Tpch, side, took);
            let mut run = found::run(&self.right, of, outputs, &servers, VM_COUNT)?;
            if !cell.has_series() {
                (run.guests, run.servers) = (Vec::new(), Vec::new());
            }
            runs.push(found::rounded(run));
        }
        Ok(Measured {
            cell,
            at_ms,
            load_1min,
            fixed_s,
            clock,
            runs,
            moved: None,
            lacks: Vec::new(),
        })
    }

    /// Submits a job for each VM.
    async fn guests(&mut self, words: &str, disks: &[Disk]) -> Result<Vec<Job>> {
        let gate = nbd::address(self.lab, &self.targets[0])?;
        let servers = self.servers(0)?;
        let mut jobs = Vec::new();
        for (rank, disks) in disks.chunks(Side::BOTH.len()).enumerate() {
            let server = servers.get(rank).context("more VMs than servers")?;
            let (own, gateway) = (address_of(rank, 2), address_of(rank, 1));
            let gateway = gateway.trim_end_matches("/29");
            let mut logins = Vec::new();
            for disk in disks {
                let address = nbd::address(self.lab, &self.targets[disk.side.index()])?;
                logins.push(format!("{},{address},{},{}", disk.side.name(), disk.port, disk.iqn));
            }
            let text = format!(
                "name: {}\nimage: {}\nmemory: {}MiB\noutput: 64MiB\ntimeout: 1h\nnetwork: 'bridge:{BRIDGE}'\n\
                 placement: {{host: {server}, move: never}}\n\
                 env: {{CARD: '{own},{gateway}', WORKS: '{words}', SUPPORT: '{SUPPORT}', STEPS: '{STEPS}', STREAMS: '{}', FIXED: '{FIXED}', DATABASE_MEMORY: '{DATABASE_MEMORY_BYTES}', CONTROL: '{gate},{GATE_PORT}', ISCSI: '{}', RANK: '{rank}'}}\n\
                 command: [/usr/bin/python3, inputs/works.py]\n",
                self.unique("seeds-iscsi"),
                self.image,
                self.size.memory_bytes >> 20,
                STREAMS.join(";"),
                logins.join(" "),
            );
            let spec = job_file::parse(&text, "seeds.yaml")?.spec;
            let inputs = Some(self.inputs.clone());
            let spec = JobSpec { inputs, outputs: vec!["/output".into()], ..spec };
            jobs.push(self.cluster.submit(&spec).await?);
        }
        Ok(jobs)
    }

    /// Returns only when one of the jobs has failed, with the reason.
    async fn failure(&self, jobs: &[Job]) -> anyhow::Error {
        loop {
            for job in jobs {
                match self.cluster.job(&job.id).await {
                    Ok(now) if now.state.is_final() && now.state != JobState::Succeeded => {
                        let said = self.cluster.log_tail(&job.id).await.unwrap_or_default();
                        return anyhow!("job {}: {}:\n{said}", job.id, now.reason);
                    }
                    Ok(_) => {}
                    Err(problem) => return problem.into(),
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until all have ended, and returns what they have left, in the order of the VMs.
    async fn all_outputs(&self, jobs: &[Job]) -> Result<Vec<(String, String)>> {
        let mut outputs = Vec::new();
        let end = Instant::now() + DEADLINE;
        for job in jobs {
            loop {
                let now = self.cluster.job(&job.id).await?;
                if now.state == JobState::Succeeded {
                    break;
                }
                ensure!(!now.state.is_final(), "job {}: {}", job.id, now.reason);
                ensure!(Instant::now() < end, "job {} does not end", job.id);
                tokio::time::sleep(LOOK_EVERY).await;
            }
            outputs.extend(self.cluster.output(&job.id).await?);
        }
        Ok(outputs)
    }
}

/// Lets the guests go through all programs. Returns how long each took, by the machine's clock.
async fn passes(
    mut gate: Gate,
    labels: &[String],
    sampler: &Sampler,
) -> Result<Vec<(String, f64)>> {
    let mut seen = Vec::new();
    for label in labels {
        let began = gate.pass().await?;
        sampler.name(label);
        let ended = gate.pass().await?;
        sampler.name("");
        seen.push((label.clone(), (ended - began).as_secs_f64()));
    }
    gate.pass().await?;
    Ok(seen)
}
