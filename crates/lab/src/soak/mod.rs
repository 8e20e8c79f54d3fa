//! `perigee lab run soak`: runs jobs and moves while it kills daemons and cuts the WAN.
//!
//! Jobs write and check files on a few volumes, VMs move from host to host, and every few seconds
//! something breaks: an agent, a volume server or the controller is killed with SIGKILL, or the WAN
//! is down for a while. QEMU is never killed, so every job must end with the right answer, and at
//! the end nothing of the jobs may be left on any host. With power cuts, all that runs on a host is
//! killed at once: the jobs that ran there begin anew, and all must still end right.
//!
//! Every few minutes a trouble lasts for minutes: the WAN is down, or a volume server stays away. Guests stand still
//! then and must go on by themselves, and a job that stands still has to say why.

mod breaks;
mod jobs;
pub(crate) mod left;
mod outcome;
mod stall;
mod waits;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use perigee_model::Problem;
use perigee_model::job::Restart;

use crate::definition::{Definition, LabId};
use crate::progress::{Step, Steps};
use crate::up::{self, Lab, with_lab};
use jobs::Stream;
pub use left::cut_power;
pub use outcome::{Event, Outcome, SoakJob};
use stall::Stall;

/// How long a request to the controller may be tried again while daemons are being killed.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait after the last job until nothing of it is left.
const CLEAN_MAX: Duration = Duration::from_secs(180);

/// The options of a soak.
#[derive(Debug, Clone)]
pub struct Options {
    pub id: LabId,
    pub lab: up::Options,
    /// The golden image's disk.
    pub image: PathBuf,
    /// The kernel that the agents boot to find out whether KVM works.
    pub kernel: Option<PathBuf>,
    /// How long to break things. The soak then waits for the jobs that have begun.
    pub length: Duration,
    /// The number of unfinished jobs at any time, one more than the number of volumes.
    pub jobs: u16,
    /// The same seed breaks the same things in the same order.
    pub seed: u64,
    /// Also cut the power of hosts. A job whose host is lost then begins anew.
    pub power_cuts: bool,
    /// Directory for `results.json`.
    pub out: PathBuf,
}

/// Runs a soak in a lab of its own, which is always removed afterwards.
///
/// # Errors
/// The soak could not run. Wrong answers and leftovers are not errors here; [`Outcome::faults`] has
/// them.
pub async fn soak(options: &Options, steps: &Steps) -> Result<Outcome, Problem> {
    if options.jobs == 0 {
        return Err(Problem::invalid("can't soak", "--jobs 0 gives nothing to check")
            .next("give 1 or more"));
    }
    let mut definition = Definition::default_demo(options.id.clone(), 16);
    definition.probe_kernel.clone_from(&options.kernel);
    let outcome =
        with_lab(definition, &options.lab, steps, async |lab: Lab| run(options, &lab, steps).await)
            .await?;
    let path = options.out.join("results.json");
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(&options.out)?;
        fs::write(&path, serde_json::to_vec_pretty(&outcome)?)
    };
    write().map_err(|e| Problem::internal(format!("can't write {}", path.display()), e))?;
    Ok(outcome)
}

async fn run(options: &Options, lab: &Lab, steps: &Steps) -> Result<Outcome, Problem> {
    let step = steps.begin("import the image");
    let restart = if options.power_cuts { Restart::OnHostFailure } else { Restart::Never };
    let mut stream = Stream::prepare(lab, &options.image, options.jobs, restart).await?;
    step.done("");
    let began = Instant::now();
    let mut outcome = Outcome { seed: options.seed, ..Outcome::default() };
    let mut step = steps.begin("soak");
    let stall = go_on(options, lab, &mut stream, &mut outcome, began, &mut step).await?;
    stream.give_up(&mut outcome);
    step.done(&outcome.line());
    if let Some(stall) = stall {
        // What is left then is what stands still, and that is said.
        outcome.faults.push(stall);
    } else {
        let step = steps.begin("look for what is left");
        outcome.left = left::wait_until_nothing(lab, CLEAN_MAX).await?;
        step.done("");
    }
    outcome.length_s = began.elapsed().as_secs_f64();
    outcome.judge();
    Ok(outcome)
}

/// Breaks things for the length of the soak, and then waits for the jobs that have begun. Returns at once,
/// with where everything stands, when no job ends any more.
async fn go_on(
    options: &Options,
    lab: &Lab,
    stream: &mut Stream,
    outcome: &mut Outcome,
    began: Instant,
    step: &mut Step,
) -> Result<Option<String>, Problem> {
    let mut breaks = breaks::Breaks::new(lab, options.seed, options.power_cuts, options.length);
    let mut stall = Stall::default();
    let mut is_breaking = true;
    while is_breaking || stream.is_busy() {
        stream.look(outcome).await?;
        if is_breaking && began.elapsed() >= options.length {
            is_breaking = false;
            breaks.mend(outcome, began).await?;
        }
        if is_breaking {
            stream.fill(outcome).await?;
            breaks.act_if_due(stream, outcome, began).await?;
        }
        let where_it_stands = stall.check(began.elapsed(), outcome.jobs.len(), stream.unfinished());
        if where_it_stands.is_some() {
            return Ok(where_it_stands);
        }
        let waits = if is_breaking { "" } else { "; waiting for the last jobs" };
        step.at(&format!("{}{waits}", outcome.line()));
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(None)
}

/// Repeats a request that fails while a killed daemon restarts.
///
/// # Errors
/// The last error after [`PATIENCE`]. Errors that repeating cannot change are returned at once.
async fn patiently<T>(mut ask: impl AsyncFnMut() -> Result<T, Problem>) -> Result<T, Problem> {
    let end = Instant::now() + PATIENCE;
    loop {
        match ask().await {
            Err(problem)
                if problem.kind == perigee_model::ProblemKind::Unavailable
                    && Instant::now() < end =>
            {
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            answer => return answer,
        }
    }
}
