//! Requests to a lab's controller, with deadlines and progress.

use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

use perigee_http::certificate::hex;
use perigee_http::{Body, Client, Method, file_body};
use perigee_model::data::{FileAddress, FileEntry};
use perigee_model::gang::moving::GangMove;
use perigee_model::inputs::{Input, InputFrom, InputList, UPLOADED_INPUTS, UploadedFile};
use perigee_model::job::{
    ClusterImage, ClusterVolume, Job, JobMoveAsked, JobSpec, JobState, Link, LogLine, Migration,
    MoveJob, MoveVm, NewVolume, Sample, Vm, VmVolume,
};
use perigee_model::plan::{Decision, Plan};
use perigee_model::replica::{Replica, ReplicateVolume, StopReplica};
use perigee_model::volume::VolumeSource;
use perigee_model::volume_move::{MoveVolume, VolumeMove};
use perigee_model::{HostId, ImageName, JobId, Problem, ProblemKind, SiteId, VmId, VolumeName};
use sha2::{Digest, Sha256};

use crate::images::{image_of, import_everywhere};
use crate::progress::Step;
use crate::up::Lab;

const QUICK: Duration = Duration::from_secs(30);
/// For imports: the controller answers after the image is written.
const SLOW: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(400);
/// Longer than the job's own timeout, so that staging and collecting fit.
const JOB_DEADLINE: Duration = Duration::from_secs(1200);
/// For a move of a VM or a volume.
const MOVE_DEADLINE: Duration = Duration::from_secs(600);
const LOOK_AT_MOVE_EVERY: Duration = Duration::from_millis(20);
/// So long that no second round of a replica begins while something is measured.
const REPLICATE_EVERY_S: u64 = 3600;

/// The controller of a lab, for tests and experiments: every call has a deadline.
#[derive(Debug, Clone)]
pub struct Cluster {
    quick: Client,
    slow: Client,
}

impl Cluster {
    /// With a client for questions and one for what takes minutes.
    pub fn new(lab: &Lab) -> Result<Self, Problem> {
        Ok(Self { quick: lab.client(QUICK)?, slow: lab.client(SLOW)? })
    }

    /// Uploads the file, imports it, and returns when every host has all of it.
    pub async fn import_image(
        &self,
        name: &ImageName,
        file: &Path,
    ) -> Result<ClusterImage, Problem> {
        let new = image_of(&self.slow, name.clone(), file).await?;
        import_everywhere(&self.slow, &new).await
    }

    /// An empty volume at this host.
    pub async fn create_volume(
        &self,
        name: &VolumeName,
        home: &HostId,
        size_bytes: u64,
    ) -> Result<ClusterVolume, Problem> {
        let new = NewVolume {
            name: name.clone(),
            host: Some(home.clone()),
            size_bytes: Some(size_bytes),
            source: VolumeSource::Empty,
            leave_site: Default::default(),
        };
        self.quick.post("/v1/volumes", &new).await
    }

    /// Has all hosts measure their links anew, and returns what they have found.
    pub async fn probe_links(&self) -> Result<Vec<Link>, Problem> {
        self.slow.post("/v1/links/probe", &serde_json::json!({})).await
    }

    /// Uploads the files of a tar, and returns the id of their list for [`JobSpec::inputs`].
    pub async fn upload(&self, bundle: &Path) -> Result<String, Problem> {
        let path = bundle.to_owned();
        let unpacked = tokio::task::spawn_blocking(move || unpack(&path)).await;
        let files = unpacked
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(|e| Problem::internal(format!("can't read {}", bundle.display()), e))?;
        let mut list = InputList::default();
        for Unpacked { to, executable, sha256, size_bytes, file } in files {
            let body = file_body(tokio::fs::File::from_std(file));
            self.put_input(&sha256, body).await?;
            let from = InputFrom::File(UploadedFile { sha256, size_bytes, executable });
            list.inputs.push(Input { to, from });
        }
        self.inputs(&list).await
    }

    /// Uploads a list of inputs, and returns its id for [`JobSpec::inputs`].
    pub async fn inputs(&self, list: &InputList) -> Result<String, Problem> {
        let text = serde_json::to_vec(list)
            .map_err(|e| Problem::internal("can't write a list of inputs", e))?;
        let sha256 = hex(&Sha256::digest(&text));
        self.put_input(&sha256, text.into()).await?;
        Ok(sha256)
    }

    async fn put_input(&self, sha256: &str, body: Body) -> Result<(), Problem> {
        let address = FileAddress { tenant: None, path: format!("{UPLOADED_INPUTS}/{sha256}") };
        self.slow.send_body::<FileEntry>(Method::PUT, &address.url(), body).await.map(drop)
    }

    /// Where the job would run now, with a prediction for each way. Nothing starts.
    pub async fn plan(&self, spec: &JobSpec) -> Result<Plan, Problem> {
        self.slow.post("/v1/jobs/plan", spec).await
    }

    /// A copy-on-write clone of another volume, at the same home.
    pub async fn clone_volume(
        &self,
        name: &VolumeName,
        of: &VolumeName,
    ) -> Result<ClusterVolume, Problem> {
        let source = VolumeSource::Volume(of.clone());
        let leave_site = Default::default();
        let new =
            NewVolume { name: name.clone(), host: None, size_bytes: None, source, leave_site };
        self.quick.post("/v1/volumes", &new).await
    }

    /// Deletes a volume that was in use until now.
    pub async fn delete_volume(&self, name: &VolumeName) -> Result<(), Problem> {
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        loop {
            match self.quick.delete(&format!("/v1/volumes/{name}")).await {
                Err(_) if tokio::time::Instant::now() < end => {
                    tokio::time::sleep(LOOK_EVERY).await;
                }
                result => return result,
            }
        }
    }

    /// Submits a job and waits until it has succeeded.
    pub async fn run(&self, spec: &JobSpec, step: &mut Step) -> Result<Job, Problem> {
        let job = self.submit(spec).await?;
        self.wait(&job.id, JobState::Succeeded, step).await
    }

    /// Returns when the job is recorded; it runs later.
    pub async fn submit(&self, spec: &JobSpec) -> Result<Job, Problem> {
        self.slow.post("/v1/jobs", spec).await
    }

    /// Waits until a job's command runs (`Running`) or has succeeded (`Succeeded`).
    pub async fn wait(
        &self,
        id: &JobId,
        wanted: JobState,
        step: &mut Step,
    ) -> Result<Job, Problem> {
        self.watch(id, wanted, step, (LOOK_EVERY, &mut |_| ())).await
    }

    /// The same. It looks this often, and `seen` gets what it sees.
    pub async fn watch(
        &self,
        id: &JobId,
        wanted: JobState,
        step: &mut Step,
        (every, seen): (Duration, &mut (dyn FnMut(&Job) + Send)),
    ) -> Result<Job, Problem> {
        let end = tokio::time::Instant::now() + JOB_DEADLINE;
        loop {
            let job: Job = self.quick.get(&format!("/v1/jobs/{id}")).await?;
            step.at(&state_line(&job));
            seen(&job);
            match job.state {
                JobState::Failed | JobState::Cancelled => return Err(self.failure(&job).await),
                state if state == wanted || state == JobState::Succeeded => return Ok(job),
                _ => {}
            }
            if tokio::time::Instant::now() >= end {
                let why = format!("it has not ended after {JOB_DEADLINE:?}: {}", state_line(&job));
                return Err(Problem::unavailable(format!("can't run job {id}"), why));
            }
            tokio::time::sleep(every).await;
        }
    }

    /// Cancels a job, without its outputs, and waits until it has ended.
    pub async fn cancel(&self, id: &JobId) -> Result<(), Problem> {
        let path = format!("/v1/jobs/{id}");
        let cancel = format!("{path}/cancel?now=true");
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        while tokio::time::Instant::now() < end {
            let job: Job = self.quick.get(&path).await?;
            if job.state.is_final() {
                return Ok(());
            }
            // The second time, nobody waits for its outputs. It may have ended by then.
            match self.quick.post::<serde_json::Value>(&cancel, &serde_json::json!({})).await {
                Err(problem) if problem.kind == ProblemKind::Conflict => {}
                cancelled => drop(cancelled?),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err(late(format!("can't cancel job {id}")))
    }

    /// A job as it is now.
    pub async fn job(&self, id: &JobId) -> Result<Job, Problem> {
        self.quick.get(&format!("/v1/jobs/{id}")).await
    }

    /// Moves all VMs of a job with several ones, each rank to its host, and waits until they are there.
    ///
    /// # Errors
    /// The request is refused, or the VMs went back.
    pub async fn move_job(&self, id: &JobId, hosts: &[HostId]) -> Result<GangMove, Problem> {
        let ask = MoveJob { hosts: hosts.to_vec(), ..MoveJob::default() };
        let asked: JobMoveAsked = self.quick.post(&format!("/v1/jobs/{id}/move"), &ask).await?;
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        while tokio::time::Instant::now() < end {
            let last = self.job(id).await?.gang_move;
            if let Some(last) = last.filter(|m| m.asked == Some(asked.request) && !m.is_open()) {
                return match last.is_undone() {
                    false => Ok(last),
                    true => Err(Problem::internal(format!("can't move job {id}"), last.undone)),
                };
            }
            tokio::time::sleep(LOOK_AT_MOVE_EVERY).await;
        }
        Err(late(format!("can't end the move of job {id}")))
    }

    /// Asks for a VM's move. Waits before that until what an earlier move has left is removed.
    pub async fn ask_to_move(&self, vm: &VmId, request: &MoveVm) -> Result<Migration, Problem> {
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        loop {
            match self.quick.post::<Migration>(&format!("/v1/vms/{vm}/move"), request).await {
                Err(_) if tokio::time::Instant::now() < end => {
                    tokio::time::sleep(LOOK_AT_MOVE_EVERY).await;
                }
                asked => return asked,
            }
        }
    }

    /// What the controller last heard of a VM.
    pub async fn vm(&self, vm: &VmId) -> Result<Vm, Problem> {
        self.quick.get(&format!("/v1/vms/{vm}")).await
    }

    /// Waits until a VM's move has succeeded or failed.
    pub async fn moved(&self, asked: &Migration) -> Result<Migration, Problem> {
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        while tokio::time::Instant::now() < end {
            let path = format!("/v1/vms/{}/migrations", asked.vm);
            let all: Vec<Migration> = self.quick.get(&path).await?;
            if let Some(m) = all.into_iter().find(|m| m.id == asked.id && m.state.is_final()) {
                return Ok(m);
            }
            tokio::time::sleep(LOOK_AT_MOVE_EVERY).await;
        }
        Err(late(format!("can't end the migration {}", asked.id)))
    }

    /// Begins to move a volume, and returns at once. The move is refused where it needs a user's consent.
    pub async fn move_volume(&self, name: &VolumeName, to: &HostId) -> Result<VolumeMove, Problem> {
        let ask = MoveVolume { to: to.clone(), confirmed: false };
        self.quick.post(&format!("/v1/volumes/{name}/move"), &ask).await
    }

    /// Makes a replica of a volume at a site, and waits until it has all that the volume has.
    pub async fn replicate(&self, name: &VolumeName, to: &SiteId) -> Result<(), Problem> {
        let ask = ReplicateVolume { to: to.clone(), every_s: REPLICATE_EVERY_S, keep: 1 };
        let path = format!("/v1/volumes/{name}/replicas");
        let _begun: Replica = self.quick.post(&path, &ask).await?;
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        while tokio::time::Instant::now() < end {
            let volume: ClusterVolume = self.quick.get(&format!("/v1/volumes/{name}")).await?;
            let is_complete = |replica: &Replica| {
                replica.site == *to && replica.points > 0 && replica.behind_bytes == Some(0)
            };
            if volume.replicas.iter().any(is_complete) {
                return Ok(());
            }
            tokio::time::sleep(LOOK_AT_MOVE_EVERY).await;
        }
        Err(late(format!("can't complete the replica of volume {name} at {to}")))
    }

    /// Ends a volume's replica at a site, which drops it.
    pub async fn stop_replica(&self, name: &VolumeName, at: &SiteId) -> Result<(), Problem> {
        let ask = StopReplica { to: at.clone() };
        let path = format!("/v1/volumes/{name}/replicas/stop");
        self.quick.post::<Replica>(&path, &ask).await.map(drop)
    }

    /// Waits until the volumes that come after a VM have their homes and all of their data at the VM's new host. The
    /// seed, or what cloud-init reads, stays where it is.
    pub async fn volumes_followed(&self, vm: &VmId, to: &HostId) -> Result<(), Problem> {
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        while tokio::time::Instant::now() < end {
            let now = self.vm(vm).await?;
            let stays = |name: &str| name.ends_with("-seed") || name.ends_with("-cidata");
            let is_there =
                |v: &VmVolume| !v.is_moving() && (v.home == *to || stays(v.volume.as_str()));
            if now.host.as_ref() == Some(to) && now.volumes.iter().all(is_there) {
                return Ok(());
            }
            tokio::time::sleep(LOOK_AT_MOVE_EVERY).await;
        }
        Err(late(format!("can't complete the volumes of VM {vm} at {to}")))
    }

    /// Waits until a volume's last move has succeeded or failed.
    pub async fn volume_moved(&self, name: &VolumeName) -> Result<VolumeMove, Problem> {
        let end = tokio::time::Instant::now() + MOVE_DEADLINE;
        while tokio::time::Instant::now() < end {
            let found: VolumeMove = self.quick.get(&format!("/v1/volumes/{name}/move")).await?;
            if found.state.is_final() {
                return Ok(found);
            }
            tokio::time::sleep(LOOK_AT_MOVE_EVERY).await;
        }
        Err(late(format!("can't end the move of volume {name}")))
    }

    /// All decisions about a job so far, the oldest first.
    pub async fn decisions(&self, job: &JobId) -> Result<Vec<Decision>, Problem> {
        self.quick.get(&format!("/v1/jobs/{job}/decisions")).await
    }

    /// What was measured of a job's VM while it ran, the oldest first.
    pub async fn samples(&self, job: &JobId) -> Result<Vec<Sample>, Problem> {
        self.quick.get(&format!("/v1/jobs/{job}/samples")).await
    }

    /// The files of a job's output: their names without directories, and their contents.
    pub async fn output(&self, job: &JobId) -> Result<Vec<(String, String)>, Problem> {
        let bytes = self.slow.get_bytes(&format!("/v1/jobs/{job}/output")).await?;
        let read = || -> std::io::Result<Vec<(String, String)>> {
            let mut files = Vec::new();
            for entry in tar::Archive::new(&bytes[..]).entries()? {
                let mut entry = entry?;
                if entry.header().entry_type().is_file() {
                    let path = entry.path()?.into_owned();
                    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    files.push((name, std::io::read_to_string(&mut entry)?));
                }
            }
            Ok(files)
        };
        read().map_err(|e| Problem::internal(format!("can't read the output of job {job}"), e))
    }

    /// The last lines of a job's log.
    pub async fn log_tail(&self, id: &JobId) -> Result<String, Problem> {
        let lines: Vec<LogLine> = self.quick.get(&format!("/v1/jobs/{id}/log?after=0")).await?;
        let last = &lines[lines.len().saturating_sub(15)..];
        let texts: Vec<&str> = last.iter().map(|line| line.line.as_str()).collect();
        Ok(texts.join("\n    "))
    }

    /// A problem with the last lines of a failed job's log.
    async fn failure(&self, job: &Job) -> Problem {
        let tail = self.log_tail(&job.id).await.unwrap_or_default();
        let code = job.exit_code.map_or_else(String::new, |code| format!(" (exit code {code})"));
        let why = format!("{}{code}", job.reason);
        Problem::internal(format!("job {} failed", job.id), why).next(if tail.is_empty() {
            String::new()
        } else {
            format!("the end of its log:\n    {tail}")
        })
    }
}

fn late(what: String) -> Problem {
    Problem::unavailable(what, format!("it has not ended after {MOVE_DEADLINE:?}"))
}

fn state_line(job: &Job) -> String {
    let place = job.host.as_ref().map_or_else(String::new, |host| format!(" on {host}"));
    let state = match job.state {
        JobState::Queued => "queued",
        JobState::Staging => "staging",
        JobState::Starting => "booting",
        JobState::Running => "running",
        JobState::Collecting => "collecting outputs",
        JobState::Succeeded => "succeeded",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
    };
    let moving = job.migrations.iter().any(|m| m.ended_ms.is_none());
    let moving = if moving { ", migrating" } else { "" };
    match (&job.progress, job.state) {
        (Some(p), JobState::Running) => {
            format!("{state}{place}{moving}, {}/{} {}", p.done, p.total, p.label)
        }
        _ => format!("{state}{place}{moving}"),
    }
}

/// A file of a tar.
struct Unpacked {
    to: String,
    executable: bool,
    sha256: String,
    size_bytes: u64,
    file: std::fs::File,
}

fn unpack(bundle: &Path) -> std::io::Result<Vec<Unpacked>> {
    let mut files = Vec::new();
    for entry in tar::Archive::new(std::fs::File::open(bundle)?).entries()? {
        let mut entry = entry?;
        let to = entry.path()?.to_str().ok_or(std::io::ErrorKind::InvalidFilename)?.to_owned();
        let executable = entry.header().mode()? & 0o100 != 0;
        let mut file = std::fs::File::from(rustix::fs::open(
            std::env::temp_dir(),
            rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        )?);
        let (mut hasher, mut size_bytes) = (Sha256::new(), 0);
        let mut piece = vec![0; 1 << 20];
        loop {
            let length = entry.read(&mut piece)?;
            if length == 0 {
                break;
            }
            hasher.update(&piece[..length]);
            file.write_all(&piece[..length])?;
            size_bytes += length as u64;
        }
        file.rewind()?;
        files.push(Unpacked { to, executable, sha256: hex(&hasher.finalize()), size_bytes, file });
    }
    Ok(files)
}
