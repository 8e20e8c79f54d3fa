//! The jobs that are measured.

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use perigee_http::Client;
use perigee_lab::cluster::Cluster;
use perigee_lab::measuring::load_1min;
use perigee_lab::{Lab, Steps, netns};
use perigee_model::data::FileEntry;
use perigee_model::inputs::{Input, InputFrom, InputList};
use perigee_model::job::{
    ClusterImage, ClusterVolume, Job, JobSpec, JobState, MigrationState, MoveVm, NewVolume,
};
use perigee_model::volume::{Snapshot, VolumeSource};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, ImageName, Problem, VolumeName, job_file};

use crate::results::{Beside, Creation, FromInput, Migrated, Other, Probe, Run, Task};
use crate::series::Sampler;

/// The name of the image with ffmpeg.
const IMAGE: &str = "video";
const VOLUME_BYTES: u64 = 3 << 30;
const MEMORY: &str = "256MiB";
/// For requests that copy or sync.
const SLOW: Duration = Duration::from_secs(600);
/// How often a run is looked at that is to be migrated.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The part of the work after which it is migrated; the paper has about a half.
const MOVED_AT: f64 = 0.5;
/// What a reader reads at once.
const READ_BYTES: u64 = 16 << 20;
/// From the start of a reader on: what the guest does at its start is over then.
const SETTLES: Duration = Duration::from_secs(5);
/// How long a reader is alone.
const ALONE: Duration = Duration::from_secs(15);
const CLOCKS_DIFFER_S: f64 = 1.5;

#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub file_bytes: u64,
    pub frames: u32,
}

pub struct Bench<'a> {
    lab: &'a Lab,
    cluster: Cluster,
    client: Client,
    steps: &'a Steps,
    hosts: [HostId; 2],
    size: Size,
    pub video_bytes: u64,
    /// Its path in the repository.
    video: String,
    number: u32,
}

impl<'a> Bench<'a> {
    /// Makes a volume at each host, with the file and the video.
    pub async fn prepare(lab: &'a Lab, image: &Path, size: Size, steps: &'a Steps) -> Result<Self> {
        let mut bench = Self {
            lab,
            cluster: Cluster::new(lab)?,
            client: lab.client(SLOW)?,
            steps,
            hosts: [HostId::new("home1")?, HostId::new("cloud1")?],
            size,
            video_bytes: 0,
            video: String::new(),
            number: 0,
        };
        let step = steps.begin("import the image with ffmpeg");
        let disk = std::path::absolute(image.join("debian-pg.raw"))?;
        bench.cluster.import_image(&ImageName::new(IMAGE)?, &disk).await?;
        step.done("");
        // The video is made by one job, and the others get it out of the repository.
        let frames = size.frames;
        let make = format!(
            "ffmpeg -nostdin -v error -f lavfi -i testsrc2=size=640x360:rate=25 -frames:v {frames} -threads 1 \
             -c:v mjpeg -q:v 4 -y /output/video.avi && {}",
            probe("/output/video.avi")
        );
        let job = bench.job("make", &make, &bench.hosts[0].clone(), "", None).await?;
        let made = bench.end(job, "make the video").await?;
        let video = format!("jobs/{}/output/video.avi", made.id);
        let entry: FileEntry = bench.client.get(&format!("/v1/data/~/{video}?stat")).await?;
        bench.video_bytes = entry.size_bytes;
        bench.video = video;
        let inputs = bench.inputs("video.avi").await?;
        for host in bench.hosts.clone() {
            let volume = data_at(&host)?;
            bench.cluster.create_volume(&volume, &host, VOLUME_BYTES).await?;
            let load = format!(
                "set -e\nhead -c {} /dev/urandom > /data/file\ncp /job/inputs/video.avi /data/\nsync",
                size.file_bytes
            );
            let volumes = format!("volumes:\n  - volume: {volume}\n");
            let job = bench.job("load", &load, &host, &volumes, Some(inputs.clone())).await?;
            bench.end(job, &format!("load the data at {host}")).await?;
        }
        Ok(bench)
    }

    /// The video as the inputs of a job, under a name.
    async fn inputs(&self, to: &str) -> Result<String> {
        let from = InputFrom::Repository(self.video.clone());
        let inputs = vec![Input { to: to.to_owned(), from }];
        Ok(self.cluster.inputs(&InputList { inputs }).await?)
    }

    /// Encodes the video as an input out of the repository. The first time it is staged at the host for this; the second
    /// time it is there.
    pub async fn encode_input(&mut self, round: u32) -> Result<Vec<FromInput>> {
        let host = self.hosts[0].clone();
        // No other job has it under this name.
        let name = format!("round-{round}.avi");
        let inputs = self.inputs(&name).await?;
        let mut runs = Vec::new();
        for is_staged in [false, true] {
            let load_1min = load_1min()?;
            let command = encoder(&format!("/job/inputs/{name}"), self.size.frames);
            let job = self.job("input", &command, &host, "", Some(inputs.clone())).await?;
            let words = if is_staged { "staged" } else { "not staged" };
            let job = self.end(job, &format!("encode an input at {host}, {words}")).await?;
            let (seconds, probe) = self.outcome(&job, Task::Encode).await?;
            let running_ms = job.running_ms.context("a command that began")?;
            let begun_s = running_ms.saturating_sub(job.submitted_ms) as f64 / 1e3;
            let probe = probe.context("an encoder's result")?;
            runs.push(FromInput { round, is_staged, begun_s, seconds, probe, load_1min });
        }
        Ok(runs)
    }

    /// A VM that reads a remote disk over and over, first alone, then while something else goes over the same link.
    pub async fn beside(&mut self, round: u32, other: Other) -> Result<Beside> {
        let at = self.hosts[1].clone();
        let staged = match other {
            Other::Staging => Some(self.file_input(round).await?),
            Other::Copy => None,
        };
        let load_1min = load_1min()?;
        let volumes =
            format!("volumes:\n  - {{volume: {}, access: clone}}\n", data_at(&self.hosts[0])?);
        let reader = self.job("read", &reader(self.size.file_bytes), &at, &volumes, None).await?;
        let mut step = self.steps.begin(format!("read at {at}, with {other:?} beside"));
        self.cluster.wait(&reader.id, JobState::Running, &mut step).await?;
        tokio::time::sleep(SETTLES).await;
        let alone_from_s = now_s();
        tokio::time::sleep(ALONE).await;
        let (from_s, until_s) = match staged {
            Some(inputs) => self.stage(inputs, &at).await?,
            None => self.copy().await?,
        };
        // It gives its outputs.
        let path = format!("/v1/jobs/{}", reader.id);
        let _: serde_json::Value =
            self.client.post(&format!("{path}/cancel"), &serde_json::json!({})).await?;
        let deadline = Instant::now() + SLOW;
        while !self.client.get::<Job>(&path).await?.state.is_final() {
            ensure!(Instant::now() < deadline, "the cancelled job {} does not end", reader.id);
            tokio::time::sleep(LOOK_EVERY).await;
        }
        step.done(&format!("{:.1} s beside", until_s - from_s));
        let path = format!("/v1/data/~/jobs/{}/output/reads", reader.id);
        let reads = String::from_utf8(self.client.get_bytes(&path).await?.to_vec())?;
        let reads: Vec<(f64, f64)> = reads
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(began, ended)| Ok((began.parse()?, ended.parse()?)))
            .collect::<Result<_>>()?;
        Ok(Beside {
            round,
            other,
            other_s: until_s - from_s,
            alone_bytes_per_s: rate(&reads, alone_from_s, from_s),
            beside_bytes_per_s: rate(&reads, from_s, until_s),
            load_1min,
        })
    }

    /// A file in the repository as the inputs of a job. No host has them.
    async fn file_input(&mut self, round: u32) -> Result<String> {
        let make = format!("head -c {} /dev/urandom > /output/file", self.size.file_bytes);
        let at = self.hosts[0].clone();
        // The file is on the root disk before it is an output.
        let job = self.job("file", &make, &at, "root: 3GiB\n", None).await?;
        let job = self.end(job, "make a file").await?;
        let from = InputFrom::Repository(format!("jobs/{}/output/file", job.id));
        let inputs = vec![Input { to: format!("file-{round}"), from }];
        Ok(self.cluster.inputs(&InputList { inputs }).await?)
    }

    /// Has the inputs of a job staged. Returns when that began and ended.
    async fn stage(&mut self, inputs: String, at: &HostId) -> Result<(f64, f64)> {
        let job = self.job("staged", "true", at, "", Some(inputs)).await?;
        let from_s = now_s();
        let deadline = Instant::now() + SLOW;
        loop {
            let now: Job = self.client.get(&format!("/v1/jobs/{}", job.id)).await?;
            if !matches!(now.state, JobState::Queued | JobState::Staging) {
                ensure!(!now.state.is_final(), "the job with inputs: {}", now.reason);
                break;
            }
            ensure!(Instant::now() < deadline, "{} waits for its inputs: {}", job.id, now.reason);
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let until_s = now_s();
        // Its VM would take CPU time from what is measured next.
        self.cluster.cancel(&job.id).await?;
        Ok((from_s, until_s))
    }

    /// Sends as many bytes over a TCP connection from the one host to the other.
    async fn copy(&self) -> Result<(f64, f64)> {
        let definition = &self.lab.definition;
        let [source, target] = self.hosts.each_ref().map(|host| definition.host_namespace(host));
        let address = definition.host_address(&self.hosts[0]).context("an address of host A")?;
        let bytes = self.size.file_bytes;
        let failed = |error: std::io::Error| Problem::internal("can't copy between hosts", error);
        let listen = || TcpListener::bind((address, 0)).map_err(failed);
        let listener = netns::within(&source, listen)?;
        let port = listener.local_addr()?.port();
        let connect = || TcpStream::connect((address, port)).map_err(failed);
        let mut receiver = netns::within(&target, connect)?;
        let from_s = now_s();
        let send = tokio::task::spawn_blocking(move || {
            let (mut sender, _) = listener.accept()?;
            std::io::copy(&mut std::io::repeat(1).take(bytes), &mut sender)
        });
        let receive =
            tokio::task::spawn_blocking(move || std::io::copy(&mut receiver, &mut std::io::sink()));
        send.await??;
        ensure!(receive.await?? == bytes, "the copy was cut");
        Ok((from_s, now_s()))
    }

    /// Submits a job.
    async fn job(
        &mut self,
        name: &str,
        command: &str,
        at: &HostId,
        more: &str,
        inputs: Option<String>,
    ) -> Result<Job> {
        self.number += 1;
        let command = command.replace('\n', "\n  ");
        let own = more.contains("image:");
        let image = if own { String::new() } else { format!("image: {IMAGE}\n") };
        let text = format!(
            "name: {name}\n{image}memory: {MEMORY}\noutput: 2GiB\ntimeout: 1h\n\
             placement: {{host: {at}, move: never}}\n{more}command: |\n  {command}\n"
        );
        let spec = job_file::parse(&text, "job.yaml")?.spec;
        Ok(self.cluster.submit(&JobSpec { inputs, ..spec }).await?)
    }

    async fn end(&self, job: Job, what: &str) -> Result<Job> {
        let mut step = self.steps.begin(what);
        let job = self.cluster.wait(&job.id, JobState::Succeeded, &mut step).await?;
        step.done(&format!("{:.1} s", job.measured_s.unwrap_or_default()));
        Ok(job)
    }

    /// A VM from the request to its first command. The remote image is only at the other host when it begins.
    pub async fn create(&mut self, round: u32, host: usize, is_local: bool) -> Result<Creation> {
        let (at, other) = (self.hosts[host].clone(), self.hosts[1 - host].clone());
        let image = match is_local {
            true => ImageName::new(IMAGE)?,
            false => self.image_at(&other).await?,
        };
        let load_1min = load_1min()?;
        let more = format!("image: {image}\n");
        let job = self.job("create", "true", &at, &more, None).await?;
        let job = self.end(job, &format!("create a VM at {at}, {}", place(is_local))).await?;
        if !is_local {
            self.client.delete(&format!("/v1/images/{image}")).await?;
        }
        let running_ms = job.running_ms.context("a command that began")?;
        let started_ms = job.started_ms.context("a VM that was started")?;
        let seconds = |from: u64| (running_ms.saturating_sub(from)) as f64 / 1e3;
        Ok(Creation {
            round,
            host,
            is_local,
            seconds: seconds(job.submitted_ms),
            boot_s: seconds(started_ms),
            load_1min,
        })
    }

    /// An image that no other host has.
    async fn image_at(&mut self, host: &HostId) -> Result<ImageName> {
        self.number += 1;
        let name = VolumeName::new(format!("fresh-{}", self.number))?;
        let new = NewVolume {
            name: name.clone(),
            host: Some(host.clone()),
            size_bytes: None,
            source: VolumeSource::Image(ImageName::new(IMAGE)?),
            leave_site: Default::default(),
        };
        self.client.post::<ClusterVolume>("/v1/volumes", &new).await?;
        let image = ImageName::new(format!("image-{}", self.number))?;
        let path = format!("/v1/volumes/{name}/snapshot");
        let made: ClusterImage =
            self.client.post(&path, &Snapshot { image: image.clone() }).await?;
        ensure!(made.hosts == [host.clone()], "a snapshot is at its home only");
        self.cluster.delete_volume(&name).await?;
        Ok(image)
    }

    /// Submits a task on a clone of the data at one of the hosts.
    async fn begin(&mut self, task: Task, at: usize, data_at_host: usize) -> Result<Job> {
        let command = match task {
            Task::Copy => timed("cp /data/file /data/copy\nsync", "cmp /data/file /data/copy"),
            Task::Encode => encoder("/data/video.avi", self.size.frames),
        };
        let volume = data_at(&self.hosts[data_at_host])?;
        let volumes = format!("volumes:\n  - {{volume: {volume}, access: clone}}\n");
        let host = self.hosts[at].clone();
        self.job(task.name(), &command, &host, &volumes, None).await
    }

    pub async fn run(
        &mut self,
        round: u32,
        task: Task,
        host: usize,
        is_local: bool,
    ) -> Result<Run> {
        let load_1min = load_1min()?;
        let job = self.begin(task, host, if is_local { host } else { 1 - host }).await?;
        let what = format!("{} at {}, {}", task.name(), self.hosts[host], place(is_local));
        let job = self.end(job, &what).await?;
        let (seconds, probe) = self.outcome(&job, task).await?;
        Ok(Run { round, task, host, is_local, seconds, probe, load_1min })
    }

    /// The encoder, migrated from a host where its data is to the other one.
    pub async fn migrate(&mut self, round: u32, from: usize) -> Result<Migrated> {
        let load_1min = load_1min()?;
        let job = self.begin(Task::Encode, from, from).await?;
        let to = self.hosts[1 - from].clone();
        let mut step = self.steps.begin(format!("encode at {}, moved to {to}", self.hosts[from]));
        let running = self.cluster.wait(&job.id, JobState::Running, &mut step).await?;
        let vm = running.vm.context("a running job has a VM")?;
        let sampler = Sampler::start(self.lab, &self.hosts, &vm)?;
        let done_before = loop {
            let now: Job = self.client.get(&format!("/v1/jobs/{}", job.id)).await?;
            ensure!(!now.state.is_final(), "the encoder ended before it was moved: {}", now.reason);
            let progress = now.progress.as_ref();
            let done = progress.map_or(0.0, |p| p.done as f64 / p.total.max(1) as f64);
            if done >= MOVED_AT {
                break done;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        let moved_at_s = sampler.elapsed_s();
        let wish = MoveVm { host: to, volumes: VolumesOnMove::Stay, confirmed: false };
        let asked = self.cluster.ask_to_move(&vm, &wish).await?;
        let moved = self.cluster.moved(&asked).await?;
        ensure!(moved.state == MigrationState::Completed, "the migration: {}", moved.error);
        let there_at_s = sampler.elapsed_s();
        let job = self.cluster.wait(&job.id, JobState::Succeeded, &mut step).await?;
        let series = sampler.stop().await?;
        let (seconds, probe) = self.outcome(&job, Task::Encode).await?;
        step.done(&format!("{seconds:.1} s, paused for {} ms", moved.downtime_ms));
        Ok(Migrated {
            round,
            from,
            seconds,
            done_before,
            moved_at_s,
            there_at_s,
            migration_ms: moved.total_ms,
            downtime_ms: moved.downtime_ms,
            memory_bytes: moved.bytes,
            probe: probe.context("an encoder's result")?,
            series,
            load_1min,
        })
    }

    /// The seconds of work, by the guest's clock, and what ffprobe says of the result in the repository.
    async fn outcome(&self, job: &Job, task: Task) -> Result<(f64, Option<Probe>)> {
        let read = async |name: &str| -> Result<String> {
            let path = format!("/v1/data/~/jobs/{}/output/{name}", job.id);
            Ok(String::from_utf8(self.client.get_bytes(&path).await?.to_vec())?)
        };
        let times = read("times").await?;
        let mut times = times.split_whitespace().map(str::parse::<f64>);
        let (Some(Ok(began)), Some(Ok(ended))) = (times.next(), times.next()) else {
            anyhow::bail!("job {} has no times", job.id);
        };
        let probe = match task {
            Task::Copy => None,
            Task::Encode => {
                let path = format!("/v1/data/~/jobs/{}/output/encoded.avi?stat", job.id);
                let entry: FileEntry = self.client.get(&path).await?;
                let said = read("probe").await?;
                let probe = Probe::parse(&said, entry.size_bytes, entry.sha256.as_deref())?;
                ensure!(probe.frames == self.size.frames, "the result has {} frames", probe.frames);
                Some(probe)
            }
        };
        Ok((ended - began, probe))
    }
}

/// Unix time.
fn now_s() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// Reads a file over and over, past the guest's page cache, and writes when each read began and ended.
fn reader(file_bytes: u64) -> String {
    let pieces = (file_bytes / READ_BYTES).max(1);
    format!(
        "set -e\ni=0\nwhile true; do\n  began=$(date +%s.%N)\n  \
         dd if=/data/file of=/dev/null bs=1M count={} skip=$((i % {pieces} * {})) iflag=direct status=none\n  \
         echo \"$began $(date +%s.%N)\" >> /output/reads\n  i=$((i + 1))\ndone",
        READ_BYTES >> 20,
        READ_BYTES >> 20
    )
}

/// What was read in a time, of reads that were wholly within it. The clocks of a guest and of its host differ by up to a
/// second.
fn rate(reads: &[(f64, f64)], from_s: f64, until_s: f64) -> Option<f64> {
    let is_within = |&&(began, ended): &&(f64, f64)| {
        began >= from_s + CLOCKS_DIFFER_S && ended <= until_s - CLOCKS_DIFFER_S
    };
    let within: Vec<&(f64, f64)> = reads.iter().filter(is_within).collect();
    let (first, last) = (within.first()?, within.last()?);
    Some(within.len() as f64 * READ_BYTES as f64 / (last.1 - first.0))
}

/// Work with its time, by the guest's clock, and what follows it.
fn timed(work: &str, check: &str) -> String {
    let now = "cut -d' ' -f1 /proc/uptime";
    format!(
        "set -e\nbegan=$({now})\n{work}\nended=$({now})\n{check}\necho \"$began $ended\" > /output/times"
    )
}

/// Encodes a video, to a file beside it.
fn encoder(video: &str, frames: u32) -> String {
    let to = "$(dirname \"$video\")/encoded.avi";
    let work = format!(
        "video={video}\nffmpeg -nostdin -v error -threads 1 -i \"$video\" -c:v mpeg4 -q:v 5 -threads 1 -progress - -y \
         \"{to}\" |\n  while IFS== read -r key value; do\n    \
         [ \"$key\" != frame ] || echo \"$value/{frames} frames\" > \"$PERIGEE_PROGRESS\"\n  done\nsync"
    );
    timed(&work, &format!("cp \"{to}\" /output/\n{}", probe("/output/encoded.avi")))
}

/// Writes what ffprobe says of a file, and its SHA-256, to the outputs.
fn probe(file: &str) -> String {
    format!(
        "ffprobe -v error -count_frames -select_streams v:0 -show_entries \
         stream=codec_name,width,height,nb_read_frames -of default=noprint_wrappers=1 {file} > /output/probe && \
         sha256sum {file} | sed 's/ .*//; s/^/sha256=/' >> /output/probe"
    )
}

fn data_at(host: &HostId) -> Result<VolumeName> {
    Ok(VolumeName::new(format!("data-{host}"))?)
}

pub fn place(is_local: bool) -> &'static str {
    if is_local { "local" } else { "remote" }
}
