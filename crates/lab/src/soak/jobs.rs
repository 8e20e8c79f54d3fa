//! The stream of jobs. Each uses one of a few volumes, and its right answer is known.

use std::path::Path;
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_http::certificate::hex;
use perigee_model::job::{
    ClusterImage, ClusterVolume, Job, JobSpec, JobState, MigrationState, NewVolume, Restart,
};
use perigee_model::volume::VolumeSource;
use perigee_model::{HostId, ImageName, JobId, Problem, ProblemKind, VolumeName, job_file};
use sha2::{Digest, Sha256};

use super::outcome::{Outcome, SoakJob};
use super::patiently;
use super::waits::Still;
use crate::up::Lab;

const WORK: &str = include_str!("work.sh");
const VOLUME_BYTES: u64 = 256 << 20;
const MEMORY: &str = "200MiB";
/// Rounds of writing in one job. They take about 20 s on an idle machine.
const ROUNDS: u32 = 40;
const QUICK: Duration = Duration::from_secs(20);
/// For imports: the controller answers after the image is written.
const SLOW: Duration = Duration::from_secs(600);

/// Keeps jobs coming, on all volumes, and looks at each one until its end.
pub struct Stream {
    client: Client,
    volumes: Vec<VolumeName>,
    submitted: u32,
    unfinished: Vec<Running>,
    jobs_max: usize,
    /// Jobs begin anew when their host is lost.
    restart: Restart,
    began: Instant,
}

struct Running {
    job: Job,
    number: u32,
    volume: VolumeName,
    /// How often the job's VM was started. After the loss of its host a job begins anew.
    starts: u32,
    still: Still,
}

impl Stream {
    /// Imports the image and makes the volumes, spread over the hosts. There is one volume fewer than jobs
    /// at a time, so that one job always waits for another job's volume.
    pub async fn prepare(
        lab: &Lab,
        image: &Path,
        jobs: u16,
        restart: Restart,
    ) -> Result<Self, Problem> {
        let name =
            ImageName::new("debian").map_err(|e| Problem::internal("can't name the image", e))?;
        let client = lab.client(SLOW)?;
        let new = crate::images::image_of(&client, name, image).await?;
        let _: ClusterImage = client.post("/v1/images", &new).await?;
        let client = lab.client(QUICK)?;
        let hosts: Vec<_> = lab.definition.hosts().map(|(_, host)| host.clone()).collect();
        let mut volumes = Vec::new();
        for (number, host) in (1..jobs.max(2)).zip(hosts.iter().cycle()) {
            let name = VolumeName::new(format!("soak-{number}"))
                .map_err(|e| Problem::internal("can't name a volume", e))?;
            let new = NewVolume {
                name: name.clone(),
                host: Some(host.clone()),
                size_bytes: Some(VOLUME_BYTES),
                source: VolumeSource::Empty,
                leave_site: Default::default(),
            };
            let _: ClusterVolume = client.post("/v1/volumes", &new).await?;
            volumes.push(name);
        }
        let jobs_max = usize::from(jobs);
        let (unfinished, began) = (Vec::new(), Instant::now());
        Ok(Self { client, volumes, submitted: 0, unfinished, jobs_max, restart, began })
    }

    /// The controller's.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Whether a job has not ended.
    pub fn is_busy(&self) -> bool {
        !self.unfinished.is_empty()
    }

    /// The jobs that have not ended, as they were last seen.
    pub fn unfinished(&self) -> impl Iterator<Item = &Job> {
        self.unfinished.iter().map(|running| &running.job)
    }

    /// The jobs whose command is running.
    pub fn running(&self) -> Vec<&Job> {
        self.unfinished().filter(|job| job.state == JobState::Running).collect()
    }

    /// Whether a job is at this host that has lost a host before: a job that loses too many fails, as it should.
    pub fn is_spared(&self, host: &HostId) -> bool {
        let mut there = self.unfinished.iter().filter(|one| one.job.host.as_ref() == Some(host));
        there.any(|one| one.starts > 1)
    }

    /// Submits jobs until the wanted number is unfinished.
    pub async fn fill(&mut self, outcome: &mut Outcome) -> Result<(), Problem> {
        while self.unfinished.len() < self.jobs_max {
            let number = self.submitted + 1;
            let volume = self.volumes[number as usize % self.volumes.len()].clone();
            let spec = JobSpec { restart: self.restart, ..spec(number, &volume)? };
            // If the answer to a submission is lost, the controller may still have the job.
            let job = match self.client.post::<Job>("/v1/jobs", &spec).await {
                Err(problem) if problem.kind == ProblemKind::Unavailable => {
                    self.find(&spec.name).await?
                }
                submitted => Some(submitted?),
            };
            let Some(job) = job else { return Ok(()) };
            let starts = u32::from(job.started_ms.is_some());
            let still = Still::new(&job, Instant::now());
            self.unfinished.push(Running { job, number, volume, starts, still });
            self.submitted = number;
            outcome.jobs_submitted = self.submitted;
        }
        Ok(())
    }

    /// The job with this name, if the controller has one.
    async fn find(&self, name: &str) -> Result<Option<Job>, Problem> {
        let jobs: Vec<Job> = patiently(async || self.client.get("/v1/jobs").await).await?;
        Ok(jobs.into_iter().find(|job| job.spec.name == name))
    }

    /// Reads the state of each job, and judges the answers of the jobs that have ended.
    pub async fn look(&mut self, outcome: &mut Outcome) -> Result<(), Problem> {
        for at in (0..self.unfinished.len()).rev() {
            let path = format!("/v1/jobs/{}", self.unfinished[at].job.id);
            // The controller may be restarting; the next call tries again.
            let Ok(job) = self.client.get::<Job>(&path).await else { continue };
            let is_final = job.state.is_final();
            let running = &mut self.unfinished[at];
            if job.started_ms.is_some() && job.started_ms != running.job.started_ms {
                running.starts += 1;
            }
            let now = Instant::now();
            outcome.waits.extend(running.still.look(&job, self.began, now));
            running.job = job;
            if is_final {
                let ended = self.unfinished.remove(at);
                let judged = self.judge(ended).await?;
                outcome.add(judged);
            }
        }
        Ok(())
    }

    async fn judge(&self, ended: Running) -> Result<(SoakJob, Vec<MigrationState>), Problem> {
        let Running { job, number, volume, starts, .. } = ended;
        let answer = match job.state {
            JobState::Succeeded => self.answer(&job.id).await?,
            _ => String::new(),
        };
        let mut parts = answer.split_whitespace();
        let (count, runs, sum) = (parts.next(), parts.next(), parts.next());
        let number_in = |text: Option<&str>| text.and_then(|text| text.parse().ok());
        let moves: Vec<MigrationState> = job.migrations.iter().map(|m| m.state).collect();
        let judged = SoakJob {
            volume: volume.to_string(),
            state: job.state,
            reason: job.reason,
            count: number_in(count),
            runs: number_in(runs).unwrap_or(0),
            starts,
            is_right: sum == Some(&expected(number)),
            moves: u32::try_from(moves.len()).unwrap_or(u32::MAX),
            id: job.id,
        };
        Ok((judged, moves))
    }

    async fn answer(&self, id: &JobId) -> Result<String, Problem> {
        let path = format!("/v1/jobs/{id}/output");
        let bytes = patiently(async || self.client.get_bytes(&path).await).await?;
        let fail = |e| Problem::internal(format!("can't read the output of job {id}"), e);
        let mut archive = tar::Archive::new(&bytes[..]);
        for entry in archive.entries().map_err(fail)? {
            let mut entry = entry.map_err(fail)?;
            if entry.path().map_err(fail)?.ends_with("answer") {
                return std::io::read_to_string(&mut entry).map_err(fail);
            }
        }
        Ok(String::new())
    }

    /// Records the jobs that have not ended.
    pub fn give_up(&mut self, outcome: &mut Outcome) {
        for Running { job, volume, starts, still, .. } in self.unfinished.drain(..) {
            outcome.waits.extend(still.wait(&job, self.began, Instant::now()));
            let reason = format!("it has not ended: {}", job.reason);
            let judged = SoakJob {
                id: job.id,
                volume: volume.to_string(),
                state: job.state,
                reason,
                count: None,
                runs: 0,
                starts,
                is_right: false,
                moves: u32::try_from(job.migrations.len()).unwrap_or(u32::MAX),
            };
            outcome.add((judged, Vec::new()));
        }
    }
}

/// Each job has its own name, so that it can be found if its submission was not answered.
fn spec(number: u32, volume: &VolumeName) -> Result<JobSpec, Problem> {
    let script: String = WORK.lines().map(|line| format!("    {line}\n")).collect();
    let text = format!(
        "name: soak-job-{number}\nimage: debian\nmemory: {MEMORY}\noutput: 16MiB\n\
         env: {{JOB: \"{number}\", NUMBER: \"{number}\", ROUNDS: \"{ROUNDS}\"}}\n\
         volumes:\n  - volume: {volume}\n\
         command:\n  - /bin/sh\n  - -c\n  - |\n{script}"
    );
    Ok(job_file::parse(&text, "soak.yaml")?.spec)
}

/// The checksum that `seq NUMBER | sha256sum` prints.
fn expected(number: u32) -> String {
    let mut hash = Sha256::new();
    for line in 1..=number {
        hash.update(format!("{line}\n"));
    }
    hex(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_answer_is_what_seq_and_sha256sum_print() {
        // `seq 3 | sha256sum`
        let three = "14c5e74c4b96ccef41cd94db73a9ec3348038ac094feca4fd897cecffa07cdae";
        assert_eq!(expected(3), three);
    }

    #[test]
    fn the_job_file_is_one() {
        let volume = VolumeName::new("soak-1").expect("a name");
        let spec = spec(7, &volume).expect("a job");
        assert_eq!(spec.volumes[0].volume, volume);
        assert!(spec.command[2].contains("sha256sum"));
    }
}
