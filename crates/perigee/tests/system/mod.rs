//! A lab for one test, and what the tests do with it.

mod amounts;
mod backups;
mod balance;
mod by_itself;
mod confined;
mod drain;
mod ec2;
mod gangs;
pub mod inputs;
mod links;
mod listening;
mod network;
mod outputs;
pub mod parts;
mod persistent_vms;
mod qemus;
mod slurm;
mod tenant_network;
mod upgrade;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_lab::{Definition, Lab, LabId, Options, Steps};
use perigee_model::job::{
    ClusterImage, ClusterVolume, Job, JobSpec, JobState, LogLine, Migration, MigrationState,
    MoveVm, NewImage, NewVolume, Vm, VmVolume,
};
use perigee_model::volume::{Attachment, VolumeInfo, VolumeSource};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, JobId, VolumeName, job_file};
use serde::de::DeserializeOwned;

pub use crate::patience::{Checked, failed, until, until_within};

/// Fails the test with a sentence; an error and not a panic, so that the lab is taken down.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::patience::failed(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;

pub struct System {
    pub lab: Lab,
    client: Client,
    /// When its lab was up; tests print how long their steps take.
    begun: Instant,
}

/// Runs a test in a lab with the golden image `debian` on every host.
pub fn with_system<W>(test: impl FnOnce(System) -> W)
where
    W: Future<Output = Checked<()>>,
{
    with_system_of(Definition::default_demo(LabId::random(), 16), test);
}

pub fn with_system_of<W>(definition: Definition, test: impl FnOnce(System) -> W)
where
    W: Future<Output = Checked<()>>,
{
    with_system_and(definition, env!("CARGO_BIN_EXE_perigee").into(), test);
}

/// The same with a program of which the lab's daemons are made.
pub fn with_system_and<W>(
    mut definition: Definition,
    program: PathBuf,
    test: impl FnOnce(System) -> W,
) where
    W: Future<Output = Checked<()>>,
{
    let image_dir = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let image_dir = PathBuf::from(image_dir);
    definition.probe_kernel = Some(image_dir.join("vmlinuz"));
    let options = Options { program, ..Options::new().expect("this test has a path") };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let outcome = runtime.block_on(perigee_lab::with_lab(
        definition,
        &options,
        &Steps::default(),
        async |lab: Lab| {
            let client = lab.client(Duration::from_secs(120))?;
            let system = System { lab, client, begun: Instant::now() };
            let source = image_dir.join("debian-pg.raw").display().to_string();
            let name = "debian".parse().expect("a name");
            let new =
                NewImage { name, source, host: None, leave_site: Default::default(), format: None };
            // A host that has just come has not said yet how much room it has.
            until("the image", async || {
                let made: ClusterImage = system.client.post("/v1/images", &new).await?;
                Ok(Some(made))
            })
            .await?;
            eprintln!("the image is there after {:.1} s", system.begun.elapsed().as_secs_f64());
            test(system).await
        },
    ));
    if let Err(problem) = outcome {
        panic!("{problem}");
    }
}

pub fn host(name: &str) -> HostId {
    name.parse().expect("a host's name")
}

impl System {
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Checked<T> {
        self.client.get(path).await
    }

    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl serde::Serialize,
    ) -> Checked<T> {
        self.client.post(path, body).await
    }

    pub async fn volume(&self, name: &str, home: &str, size_bytes: u64) -> Checked<ClusterVolume> {
        let new = NewVolume {
            name: name.parse().expect("a name"),
            host: Some(host(home)),
            size_bytes: Some(size_bytes),
            source: VolumeSource::Empty,
            leave_site: Default::default(),
        };
        self.client.post("/v1/volumes", &new).await
    }

    pub async fn submit(&self, yaml: &str) -> Checked<Job> {
        let spec: JobSpec = job_file::parse(yaml, "test.yaml")?.spec;
        self.client.post("/v1/jobs", &spec).await
    }

    pub async fn job(&self, id: &JobId) -> Checked<Job> {
        self.get(&format!("/v1/jobs/{id}")).await
    }

    pub async fn log(&self, id: &JobId) -> Checked<Vec<String>> {
        let lines: Vec<LogLine> = self.get(&format!("/v1/jobs/{id}/log?after=0")).await?;
        Ok(lines.into_iter().map(|l| l.line).collect())
    }

    pub async fn ended(&self, id: &JobId) -> Checked<Job> {
        until("the job's end", async || {
            let job = self.job(id).await?;
            Ok(job.state.is_final().then_some(job))
        })
        .await
    }

    /// Waits until the job's own count has grown by `more`.
    pub async fn progresses(&self, id: &JobId, more: u64) -> Checked<()> {
        let mut first = None;
        until("the job to go on", async || {
            let job = self.job(id).await?;
            ensure!(
                !job.state.is_final(),
                "the job ended too early: {:?} {}; its log: {:?}",
                job.state,
                job.reason,
                self.log(id).await?
            );
            let Some(progress) = job.progress.filter(|_| job.state == JobState::Running) else {
                return Ok(None);
            };
            let start = *first.get_or_insert(progress.done);
            Ok((progress.done >= start + more).then_some(()))
        })
        .await
    }

    /// Waits for what an earlier move left at the destination to be removed: until then it is
    /// refused.
    pub async fn begin_move(&self, job: &Job, to: &str) -> Checked<Migration> {
        self.begin_move_with(job, to, VolumesOnMove::Stay).await
    }

    /// As [`System::begin_move`], and says what becomes of the VM's volumes.
    pub async fn begin_move_with(
        &self,
        job: &Job,
        to: &str,
        volumes: VolumesOnMove,
    ) -> Checked<Migration> {
        let vm = job.vm.as_ref().unwrap_or_else(|| panic!("job {} has no VM", job.id));
        let (path, request) =
            (format!("/v1/vms/{vm}/move"), MoveVm { host: host(to), volumes, confirmed: false });
        until("the move to begin", async || self.client.post(&path, &request).await.map(Some)).await
    }

    /// The migration once it has ended, and once its job knows where the VM is: the job's driver sees the end of
    /// a migration later than the one that records it.
    pub async fn migration_ended(&self, id: &JobId, migration: &Migration) -> Checked<Migration> {
        until("the migration's end", async || {
            let job = self.job(id).await?;
            let last = job.migrations.last().is_some_and(|m| m.id == migration.id);
            let follows = last && !job.state.is_final();
            let found = job.migrations.into_iter().find(|m| m.id == migration.id);
            Ok(found.filter(|m| match m.state {
                MigrationState::Completed => !follows || job.host.as_ref() == Some(&m.to),
                state => state == MigrationState::Aborted,
            }))
        })
        .await
    }

    /// The VM at the host, once its job knows that it is there.
    async fn arrived(&self, job: &Job, to: &str) -> Checked<Option<Vm>> {
        let now = self.job(&job.id).await?;
        ensure!(!now.state.is_final(), "the job ended: {:?} {}", now.state, now.reason);
        let vm: Vm = self.get(&format!("/v1/vms/{}", job.id)).await?;
        Ok((vm.host == Some(host(to))).then_some(vm))
    }

    /// Waits until the first volume that follows the VM has its home at the host.
    pub async fn first_volume_is_taken(&self, job: &Job, to: &str) -> Checked<()> {
        until("the first volume to be taken", async || {
            let Some(vm) = self.arrived(job, to).await? else { return Ok(None) };
            let mut moves = vm.volumes.iter().filter_map(|volume| volume.last_move.as_ref());
            Ok(moves.any(|last| last.to == host(to) && last.state.is_taken()).then_some(()))
        })
        .await
    }

    /// Waits until all volumes of the VM have their homes at its host, with all of their data.
    pub async fn volumes_followed(&self, job: &Job, to: &str) -> Checked<()> {
        until("the volumes to follow", async || {
            let Some(vm) = self.arrived(job, to).await? else { return Ok(None) };
            if vm.volumes.iter().any(VmVolume::is_moving) {
                return Err(failed(format!("{:?}", vm.volumes)));
            }
            let elsewhere = vm.volumes.iter().find(|volume| volume.home != host(to));
            ensure!(elsewhere.is_none(), "{elsewhere:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Waits until a host's volume server has neither a volume nor an attachment of the job.
    pub async fn has_no_volume_of(&self, job: &Job, at: &str) -> Checked<()> {
        let socket = self.host_file(at, "volume-control.sock");
        let server = Client::new(&format!("unix:{}", socket.display()), Duration::from_secs(30))?;
        let is_of_job = |name: &VolumeName| name.as_str().starts_with(&format!("{}-", job.id));
        until(&format!("nothing of {} to be left at {at}", job.id), async || {
            let volumes: Vec<VolumeInfo> = server.get("/v1/volumes").await?;
            let attachments: Vec<Attachment> = server.get("/v1/attachments").await?;
            let volumes = volumes.into_iter().map(|volume| volume.name);
            let names = volumes.chain(attachments.into_iter().map(|own| own.volume));
            let left: Vec<VolumeName> = names.filter(is_of_job).collect();
            ensure!(left.is_empty(), "{left:?} is left at {at}");
            Ok(Some(()))
        })
        .await
    }

    /// Kills a daemon with SIGKILL and waits until another process has taken its place.
    pub async fn kill_daemon(&self, name: &str, host_name: Option<&str>) -> Checked<()> {
        let pid_of = || match host_name {
            Some(host_name) => self.lab.host_pid(&host(host_name), name),
            None => self.lab.controller_pid(),
        };
        let old = pid_of()?;
        kill_9(old);
        until("the daemon's restart", async || Ok(pid_of().ok().filter(|pid| *pid != old)))
            .await
            .map(drop)
    }

    /// A command that must fail or succeed, through the real CLI.
    pub fn perigee(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_perigee"))
            .args(args)
            .env("PERIGEE_API", &self.lab.api)
            .output()
            .expect("the perigee binary runs")
    }

    pub fn host_file(&self, host: &str, path: &str) -> PathBuf {
        self.lab.dir().join("hosts").join(host).join(path)
    }

    /// Runs `qemu-io` on an export of a host's volume server.
    pub fn qemu_io(&self, host: &str, export: &str, command: &str) -> Output {
        let socket = self.host_file(host, "volume.sock");
        Command::new("timeout")
            .args(["30", "qemu-io", "-f", "raw", "-c", command])
            .arg(format!("nbd+unix:///{export}?socket={}", socket.display()))
            .output()
            .expect("qemu-io runs")
    }

    /// Tells a job that polls its seed disk to stop: see [`WRITER`]. The seed is written at its home, which may change meanwhile.
    pub async fn stop_writer(&self, id: &JobId) -> Checked<()> {
        let seed = format!("{id}-seed");
        until("the seed to be overwritten", async || {
            let vm: Vm = self.get(&format!("/v1/vms/{id}")).await?;
            let mut volumes = vm.volumes.iter();
            let Some(volume) = volumes.find(|one| one.volume.as_str() == seed) else {
                return Err(failed(format!("no {seed} in {:?}", vm.volumes)));
            };
            let written = self.qemu_io(volume.home.as_str(), &seed, "write -P 0x53 0 512");
            Ok(succeeded(&written).then_some(()))
        })
        .await
    }
}

/// `qemu-io` ends with 0 even when its command failed; then it says so.
pub fn succeeded(output: &Output) -> bool {
    output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
}

pub fn kill_9(pid: i32) {
    let killed = Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill runs");
    assert!(killed.success(), "process {pid} could not be killed");
}

/// A guest that writes files with checksums until the first byte of its seed disk is an `S`, then
/// drops its caches and checks every file. Its progress counts the files.
pub const WRITER: &str = r#"
set -eu
seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)
count=0
while [ "$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)" != S ]; do
  count=$((count + 1))
  dd if=/dev/urandom of=/data/part bs=16k count=8 2>/dev/null
  mv /data/part /data/file$((count % 200))
  sync /data/file$((count % 200))
  sha256sum /data/file$((count % 200)) > /data/file$((count % 200)).sum
  echo "$count/1000000 files" > "$PERIGEE_PROGRESS"
done
sync
echo 3 > /proc/sys/vm/drop_caches
for sum in /data/*.sum; do sha256sum --quiet -c "$sum"; done
echo "checked $(ls /data/*.sum | wc -l) files of $count" | tee /output/result.txt
"#;

/// A job file that runs [`WRITER`] on the volume `data`, starting at a host.
pub fn writer_job(start: &str) -> String {
    let script: String = WRITER.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "name: writer\nimage: debian\nmemory: 256MiB\ncommand:\n  - /bin/sh\n  - -c\n  - |\n{script}\
         volumes:\n  - volume: data\nplacement:\n  host: {start}\n  move: never\n"
    )
}
