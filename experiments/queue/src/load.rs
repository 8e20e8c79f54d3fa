//! One case: a controller, its hosts, and jobs that are submitted at once.

use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use perigee_http::Client;
use perigee_model::ImageName;
use perigee_model::job::{Job, JobSpec, JobState, Restart, Start};
use serde::Serialize;

use crate::fake::FakeHost;
use crate::guests;

/// The number of owners, who submit in turn.
const OWNERS: usize = 4;

/// The number of single jobs on the idle cluster, which measure the time from submission to placement.
const SINGLES: usize = 20;

/// The deadline of each wait in a case.
const DEADLINE: Duration = Duration::from_secs(1200);

#[derive(Debug, Serialize)]
pub struct Results {
    pub versions: BTreeMap<String, String>,
    /// The build profile: `release`, or `debug` without optimisation.
    pub build: String,
    pub cpus: usize,
    /// The machine's load at the start, which other processes caused.
    pub load_1min: f64,
    pub boot_ms: u128,
    pub cases: Vec<Case>,
}

#[derive(Debug, Serialize)]
pub struct Case {
    pub hosts: usize,
    pub jobs: usize,
    pub succeeded: usize,
    /// The time from the first submission to the last end.
    pub total_s: f64,
    pub submit_s: f64,
    /// The median time from the submission of one job to the idle cluster until its VM is requested.
    pub idle_start_ms: f64,
    pub passes: f64,
    /// The scheduler's time for each job that it placed.
    pub decision_ms_per_job: f64,
    pub decision_ms_per_pass: f64,
    pub store_operations_per_job: f64,
    pub store_operations_per_s: f64,
    pub controller_cpu_s: f64,
    pub controller_memory_mib: f64,
}

impl Case {
    pub fn line(&self) -> String {
        format!(
            "{:3} hosts {:5} jobs: {:.1} s, {:.2} ms of decisions a job, {:.0} store operations/s ({:.1} a job), \
             {:.1} s of CPU, {:.0} MiB, an idle start takes {:.0} ms",
            self.hosts,
            self.jobs,
            self.total_s,
            self.decision_ms_per_job,
            self.store_operations_per_s,
            self.store_operations_per_job,
            self.controller_cpu_s,
            self.controller_memory_mib,
            self.idle_start_ms
        )
    }
}

/// The process is stopped when this is dropped.
struct Controller {
    child: Child,
    client: Client,
}

impl Drop for Controller {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Controller {
    async fn start(state: &std::path::Path) -> Result<Self> {
        let port = perigee_http::unused_port();
        let address = format!("127.0.0.1:{port}");
        let child = Command::new(std::env::current_exe()?)
            .arg("controller")
            .arg(state)
            .arg(&address)
            .spawn()
            .context("start the controller")?;
        let client = Client::new(&format!("http://{address}"), Duration::from_secs(60))?;
        let controller = Self { child, client };
        let begun = Instant::now();
        while controller.metrics().await.is_err() {
            if begun.elapsed() > Duration::from_secs(60) {
                bail!("the controller did not answer within 60 s");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(controller)
    }

    async fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let text = self.client.get_bytes("/metrics").await?;
        let text = String::from_utf8_lossy(&text);
        let pairs = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Ok(pairs.collect())
    }

    /// How many jobs have not ended, whatever their state.
    async fn unfinished(&self) -> Result<f64> {
        let metrics = self.metrics().await?;
        let mut states =
            metrics.iter().filter(|(name, _)| name.starts_with("perigee_jobs{")).peekable();
        ensure!(
            states.peek().is_some(),
            "the controller does not say how many jobs have not ended"
        );
        Ok(states.map(|(_, count)| count).sum())
    }

    /// Waits until no job is unfinished.
    async fn wait_for_end(&self) -> Result<()> {
        let begun = Instant::now();
        while self.unfinished().await? > 0.0 {
            if begun.elapsed() > DEADLINE {
                bail!("the jobs did not end within {} s", DEADLINE.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    fn proc_file(&self, name: &str) -> Result<String> {
        Ok(std::fs::read_to_string(format!("/proc/{}/{name}", self.child.id()))?)
    }

    fn cpu_s(&self) -> Result<f64> {
        let stat = self.proc_file("stat")?;
        let fields: Vec<&str> = stat.split_whitespace().collect();
        let ticks: f64 = fields[13].parse::<f64>()? + fields[14].parse::<f64>()?;
        // A clock tick is 1/100 s on every current Linux.
        Ok(ticks / 100.0)
    }

    /// The peak of its memory.
    fn memory_mib(&self) -> Result<f64> {
        let status = self.proc_file("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kib.context("no VmHWM")? / 1024.0)
    }
}

pub async fn run(hosts: usize, jobs: usize) -> Result<Case> {
    let state = tempfile::tempdir()?;
    let controller = Controller::start(state.path()).await?;
    let mut fakes = Vec::new();
    for number in 0..hosts {
        let host = FakeHost::start(&format!("host{number}"), &format!("site{}", number / 10)).await;
        let path = format!("/v1/hosts/{}", host.id);
        controller.client.put::<serde_json::Value>(&path, &host.addresses).await?;
        fakes.push(host);
    }
    let fakes = Arc::new(fakes);
    let guests = tokio::spawn(guests::live(Arc::clone(&fakes)));
    let idle_start_ms = idle_start_ms(&controller, &fakes).await?;
    let before = controller.metrics().await?;
    let cpu_before = controller.cpu_s()?;
    let begun = Instant::now();
    for number in 0..jobs {
        let job = spec(&format!("owner{}", number % OWNERS));
        controller.client.post::<Job>("/v1/jobs", &job).await?;
    }
    let submit_s = begun.elapsed().as_secs_f64();
    controller.wait_for_end().await?;
    let total_s = begun.elapsed().as_secs_f64();
    let after = controller.metrics().await?;
    let grown = |name: &str| after.get(name).unwrap_or(&0.0) - before.get(name).unwrap_or(&0.0);
    let operations: f64 = ["get", "list", "write"]
        .iter()
        .map(|kind| grown(&format!("perigee_store_operations_total{{operation=\"{kind}\"}}")))
        .sum();
    let pass_ms = grown("perigee_scheduler_pass_seconds_total") * 1e3;
    let passes = grown("perigee_scheduler_passes_total");
    let (controller_cpu_s, controller_memory_mib) =
        (controller.cpu_s()? - cpu_before, controller.memory_mib()?);
    let all: Vec<Job> = controller.client.get("/v1/jobs").await?;
    let succeeded = all.iter().filter(|job| job.state == JobState::Succeeded).count() - SINGLES;
    guests.abort();
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let count = jobs as f64;
    Ok(Case {
        hosts,
        jobs,
        succeeded,
        total_s,
        submit_s,
        idle_start_ms,
        passes,
        decision_ms_per_job: pass_ms / count,
        decision_ms_per_pass: pass_ms / passes.max(1.0),
        store_operations_per_job: operations / count,
        store_operations_per_s: operations / total_s,
        controller_cpu_s,
        controller_memory_mib,
    })
}

async fn idle_start_ms(controller: &Controller, hosts: &[FakeHost]) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..SINGLES {
        let begun = Instant::now();
        let job: Job = controller.client.post("/v1/jobs", &spec("owner0")).await?;
        let vm = perigee_model::VmId::new(job.id.as_str())?;
        while !hosts.iter().any(|host| host.inside().vms.contains_key(&vm)) {
            if begun.elapsed() > DEADLINE {
                bail!("job {} was not started", job.id);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        controller.wait_for_end().await?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn spec(owner: &str) -> JobSpec {
    JobSpec {
        name: "small".to_owned(),
        image: ImageName::new("debian").expect("a name"),
        command: vec!["sleep".to_owned(), "1".to_owned()],
        env: BTreeMap::new(),
        cpus: 1,
        memory_bytes: 256 << 20,
        cpus_max: None,
        memory_max_bytes: None,
        root_bytes: None,
        output_bytes: 1 << 20,
        volumes: Vec::new(),
        outputs: vec!["/output".to_owned()],
        outputs_to: None,
        keep_outputs_s: None,
        publish: Vec::new(),
        start: Start::Anywhere,
        may_migrate: false,
        writes: perigee_model::LeaveSite::Never,
        ranks: perigee_model::LeaveSite::Never,
        timeout_s: None,
        has_output_room: false,
        stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
        oom_kill: Default::default(),
        inputs: None,
        owner: owner.to_owned(),
        priority: 0,
        restart: Restart::Never,
        network: Default::default(),
        count: 1,
        mpi: false,
        firmware: Default::default(),
        tpm: false,
        rules: Default::default(),
        money: Default::default(),
    }
}
