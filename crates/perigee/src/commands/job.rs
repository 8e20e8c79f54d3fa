//! `perigee job`

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use perigee_http::Client;
use perigee_model::budget::JobCost;
use perigee_model::guest::LeftOut;
use perigee_model::job::{DEFAULT_OWNER, Job, JobState, LeftOutFiles, LogLine, MoveJob, Sample};
use perigee_model::job_file::{self, JobFile};
use perigee_model::job_plan::JobPlan;
use perigee_model::plan::{Decision, NOT_WELL_KNOWN, Part};
use perigee_model::units::format_bytes;
use perigee_model::volume::IoStats;
use perigee_model::{HostId, JobId, Problem, ProblemKind, SiteId};

use crate::commands::asking::{self, Said};
use crate::commands::inputs::{Reach, upload};
use crate::commands::job_log::Printer;
use crate::commands::job_plan::{self, seconds_of};
use crate::commands::vm::Volumes;
use crate::commands::{moving, moving_jobs};
use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::controller_client;
use crate::terminal;

/// `perigee job VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Submit a job file
    Submit {
        /// The job file: YAML, as docs/jobs.md shows. `-` reads it from standard input; its inputs are then relative to this directory
        file: PathBuf,
        /// Wait until the job has ended; the exit code is then the job's. Ctrl-C ends only the waiting
        #[arg(long, short)]
        wait: bool,
        /// Let the job file name inputs that are not below its own directory
        #[arg(long)]
        inputs_from_anywhere: bool,
    },
    /// Predict how long a job would take, where it would run, and what it would take and cost at hosts that could be rented.
    /// Nothing starts, and nothing is rented.
    ///
    /// Exit code 0: nothing would move; 1: something would move; 255: error.
    Plan {
        /// The job file; `-` reads it from standard input
        file: PathBuf,
    },
    /// List jobs
    #[command(visible_alias = "ls")]
    List,
    /// Show one job
    Status {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
    },
    /// Print a job's log; with -f json, yaml or csv each line has its number and stream, and whether it is a part that continues
    Log {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
        /// Print new lines until the job has ended
        #[arg(long)]
        follow: bool,
        /// Of a job with several VMs: only this one's, from 0. Without it, the lines of all are shown as they arrived, each with its rank before it
        #[arg(long)]
        rank: Option<u32>,
    },
    /// Stop a job. Its command is ended, and its log and the outputs that it has are kept
    Cancel {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
        /// Stop its VM at once. It is started once more only to fetch the outputs that are on its disks; say it again to give them up
        #[arg(long)]
        now: bool,
    },
    /// Move all VMs of a job with several ones while they run, or none. If one can't move, those that have moved go back
    ///
    /// `perigee vm move` moves the VM of a job with one.
    Move {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
        /// Where to: one host for all of its VMs, or one for each, in the order of their ranks
        #[arg(required_unless_present_any = ["site", "cancel"])]
        hosts: Vec<HostId>,
        /// To whichever hosts of this site have room
        #[arg(long, conflicts_with_all = ["hosts", "cancel"])]
        site: Option<SiteId>,
        /// Call off the move that is under way: the VMs that have moved go back
        #[arg(long, conflicts_with = "hosts")]
        cancel: bool,
        /// What becomes of the VMs' volumes
        #[arg(long, value_enum, default_value_t = Volumes::Stay, conflicts_with = "cancel")]
        volumes: Volumes,
        /// Let the volumes follow although a replica of one is at the destination's site
        #[arg(long, conflicts_with = "cancel")]
        yes: bool,
    },
    /// Show every decision on a job: options, predictions, choice, reason, measurement
    Explain {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
    },
    /// Fetch a job's output files
    Output {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
        /// Unpack into this directory [default: ./JOB]; `-` writes the tar to standard output
        #[arg(long, value_name = "DIR")]
        to: Option<PathBuf>,
    },
    /// Delete an ended job, and what it has in `jobs/JOB` of the repository. What went to its `outputs-to` stays
    #[command(visible_alias = "rm")]
    Delete {
        /// The job's name, as `perigee job list` shows it
        job: JobId,
        /// Keep its outputs
        #[arg(long)]
        keep_outputs: bool,
    },
}

const JOBS: &[Column<Job>] = &[
    ("job", |j| j.id.to_string()),
    ("state", |j| output::word(&j.state)),
    ("place", place),
    ("host", hosts),
    ("progress", progress),
    ("predicted", |j| j.predicted.map_or_else(String::new, |p| p.or_at_least())),
    ("left", left),
    ("measured", |j| output::seconds(j.measured_s)),
    ("migrations", |j| j.migrations.len().to_string()),
    ("reason", |j| j.reason.clone()),
];

const JOB: &[Column<Job>] = &[
    ("job", |j| j.id.to_string()),
    ("state", |j| output::word(&j.state)),
    ("place in the queue", place),
    ("reason", |j| j.reason.clone()),
    ("owner", |j| j.spec.owner.clone()),
    ("priority", |j| j.spec.priority.to_string()),
    ("host", hosts),
    ("VMs", members),
    ("talk", talk),
    ("last move", |j| j.gang_move.as_ref().map_or_else(String::new, moving_jobs::summary)),
    ("image", |j| j.spec.image.to_string()),
    ("cpus", |j| match (&j.cpu_time, j.spec.cpus_max) {
        (Some(amount), _) => amount.to_string(),
        (None, Some(most)) => format!("{}..{most}", j.spec.cpus),
        (None, None) => j.spec.cpus.to_string(),
    }),
    ("memory", |j| match (&j.memory, j.spec.memory_max_bytes) {
        (Some(amount), _) => amount.to_string(),
        (None, Some(most)) => {
            format!("{}..{}", output::bytes(j.spec.memory_bytes), output::bytes(most))
        }
        (None, None) => output::bytes(j.spec.memory_bytes),
    }),
    ("rules", |j| j.spec.rules.to_string()),
    ("progress", progress),
    ("exit code", |j| j.exit_code.map_or_else(String::new, |c| c.to_string())),
    ("predicted", predicted),
    ("end", |j| j.predicted_end.as_ref().map_or_else(String::new, ToString::to_string)),
    ("measured", |j| output::seconds(j.measured_s)),
    ("cost", cost),
    ("outputs", outputs),
    ("left out", |j| {
        if j.left_out == 0 {
            String::new()
        } else {
            format!("{} files; `perigee job explain` names them", j.left_out)
        }
    }),
    ("migrations", |j| j.migrations.iter().map(moving::summary).collect::<Vec<_>>().join("\n")),
];

const LOG: &[Column<LogLine>] = &[
    ("seq", |l| l.seq.to_string()),
    ("stream", |l| output::word(&l.stream)),
    ("line", |l| l.line.clone()),
    ("continues", |l| l.continues.to_string()),
    ("rank", |l| l.rank.map_or_else(String::new, |rank| rank.to_string())),
];

/// What was predicted, reserved and spent.
fn cost(job: &Job) -> String {
    let Some(JobCost { predicted, spent }) = job.cost else { return String::new() };
    let so_far = if job.state.is_final() { "spent" } else { "spent by earlier starts" };
    let spent = spent.map_or_else(String::new, |spent| format!("; {so_far} {spent}"));
    format!("predicted {predicted}, reserved {}{spent}", predicted.high)
}

/// The predicted time of the whole job, or why none is shown.
fn predicted(job: &Job) -> String {
    let Some(predicted) = job.predicted else { return String::new() };
    let shown = predicted.or_at_least();
    if predicted.helps() { shown } else { format!("{NOT_WELL_KNOWN} {shown}") }
}

fn place(job: &Job) -> String {
    job.queue_place.map_or_else(String::new, |place| place.to_string())
}

/// Where its VM is, or its VMs are.
fn hosts(job: &Job) -> String {
    let mut all: Vec<&str> =
        job.members.iter().filter_map(|member| Some(member.host.as_ref()?.as_str())).collect();
    all.sort_unstable();
    all.dedup();
    if all.is_empty() { output::or_dash(job.host.as_ref()) } else { all.join(",") }
}

/// One line for each VM of a job with several ones.
fn members(job: &Job) -> String {
    let lines = job.members.iter().map(|member| {
        let state = output::word(&member.state);
        let host = output::or_dash(member.host.as_ref());
        let address = output::or_dash(member.address.as_ref());
        let code = member.exit_code.map_or_else(String::new, |code| format!(", exit code {code}"));
        let reason = match member.reason.as_str() {
            "" => String::new(),
            reason => format!(": {reason}"),
        };
        format!("{} {} at {host} {address} {state}{code}{reason}", member.rank, member.vm)
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// As many pairs of VMs are shown.
const PAIRS_SHOWN: usize = 5;

/// What the VMs of a job have sent to each other: all of it, what of it crosses from host to host now, and the pairs that have
/// sent most.
fn talk(job: &Job) -> String {
    let mut pairs: Vec<(u64, u32, u32)> = Vec::new();
    let (mut all, mut crosses) = (0, 0);
    for from in &job.members {
        for (to, bytes) in job.members.iter().zip(&from.sent_bytes) {
            all += bytes;
            if from.host != to.host {
                crosses += bytes;
            }
            pairs.push((*bytes, from.rank, to.rank));
        }
    }
    if all == 0 {
        return String::new();
    }
    pairs.retain(|(bytes, ..)| *bytes > 0);
    pairs.sort_unstable_by_key(|(bytes, from, to)| (std::cmp::Reverse(*bytes), *from, *to));
    let mut lines =
        vec![format!("{}, {} of it between hosts", output::bytes(all), output::bytes(crosses))];
    let shown = pairs.iter().take(PAIRS_SHOWN);
    lines.extend(
        shown.map(|(bytes, from, to)| format!("{from} to {to}: {}", output::bytes(*bytes))),
    );
    lines.join("\n")
}

/// The seconds until the end of a running command.
fn left(job: &Job) -> String {
    let Some(end) = &job.predicted_end else { return String::new() };
    end.left.map_or_else(|| "not known".to_owned(), |left| left.to_string())
}

/// The name of this process's user. For a user who has logged in, the controller puts that user's name in its place.
fn owner() -> String {
    let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten();
    user.map_or_else(|| DEFAULT_OWNER.to_owned(), |user| user.name)
}

fn progress(job: &Job) -> String {
    job.progress
        .as_ref()
        .map_or_else(String::new, |p| format!("{}/{} {}", p.done, p.total, p.label))
}

fn outputs(job: &Job) -> String {
    let Some(outputs) = &job.outputs else { return String::new() };
    let (files, bytes) = (outputs.files, format_bytes(outputs.bytes));
    let until = outputs.kept_until_ms.map(|until_ms| format!(", until {}", output::time(until_ms)));
    format!("{} ({files} files, {bytes}{})", outputs.at, until.unwrap_or_default())
}

/// Asks the controller. The exit code is 0; with `--wait` that of the job's command; of `job plan` 1 if the plan moves something.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    // Faults in a job file are reported even if no controller runs.
    match verb {
        Verb::Submit { file, wait, inputs_from_anywhere } => {
            let reach = if inputs_from_anywhere { Reach::Anywhere } else { Reach::BelowJobFile };
            return submit(&file, wait, reach, context).await;
        }
        Verb::Plan { file } => return plan(&file, context).await,
        _ => {}
    }
    let client = controller_client(context)?;
    match verb {
        Verb::Submit { .. } | Verb::Plan { .. } => {}
        Verb::List => {
            let jobs: Vec<Job> = client.get("/v1/jobs").await?;
            output::list(context.format, &jobs, JOBS)?;
        }
        Verb::Status { job } => {
            let job: Job = client.get(&format!("/v1/jobs/{job}")).await?;
            output::one(context.format, &job, JOB)?;
        }
        Verb::Log { job, follow, rank } => {
            log(&client, &job, rank, follow, context.format).await?;
        }
        Verb::Cancel { job, now } => {
            let path = format!("/v1/jobs/{job}/cancel?now={now}");
            let _: serde_json::Value = client.post(&path, &serde_json::json!({})).await?;
        }
        Verb::Move { job, cancel: true, .. } => moving_jobs::cancel(&client, &job).await?,
        Verb::Move { job, hosts, site, volumes, yes: confirmed, .. } => {
            let ask = MoveJob { hosts, site, volumes: volumes.into(), confirmed };
            moving_jobs::begin(&client, &job, &ask).await?;
        }
        Verb::Explain { job } => explain(&client, &job, context.format).await?,
        Verb::Output { job, to } => fetch_output(&client, &job, to).await?,
        Verb::Delete { job, keep_outputs } => {
            client.delete(&format!("/v1/jobs/{job}?keep_outputs={keep_outputs}")).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of a job whose file comes from standard input and names none.
const STDIN_NAME: &str = "stdin";

fn read_job_file(file: &Path) -> Result<JobFile, Problem> {
    if file == Path::new("-") {
        let mut text = String::new();
        let read = std::io::stdin().take(DOCUMENT_BYTES_READ).read_to_string(&mut text);
        read.map_err(|e| Problem::invalid("can't read the job file from standard input", e))?;
        return job_file::parse(&text, STDIN_NAME);
    }
    let text = std::fs::read_to_string(file).map_err(|e| {
        let what = format!("can't read the job file {}", file.display());
        match e.kind() {
            std::io::ErrorKind::NotFound => Problem::not_found(what, "there is no such file"),
            _ => Problem::invalid(what, e),
        }
    })?;
    job_file::parse(&text, &file.display().to_string())
}

/// More than a job file may have, so that a longer one is refused and not cut.
const DOCUMENT_BYTES_READ: u64 = 2 << 20;

async fn plan(file: &Path, context: &Context) -> Result<ExitCode, Problem> {
    let job = read_job_file(file)?;
    let plan: JobPlan = controller_client(context)?.post("/v1/jobs/plan", &job.spec).await?;
    job_plan::print(&plan, context.format)?;
    Ok(ExitCode::from(u8::from(plan.plan.moves)))
}

async fn submit(
    file: &Path,
    wait: bool,
    reach: Reach,
    context: &Context,
) -> Result<ExitCode, Problem> {
    let JobFile { mut spec, inputs } = read_job_file(file)?;
    spec.owner = owner();
    spec.check()?;
    let client = controller_client(context)?;
    if !inputs.is_empty() {
        let base = file.parent().unwrap_or(Path::new("")).to_owned();
        spec.inputs = Some(upload(&client, &base, inputs, reach).await?);
    }
    let job: Job = client.create("/v1/jobs", &spec).await?;
    if !wait {
        output::one(context.format, &job, JOB)?;
        return Ok(ExitCode::SUCCESS);
    }
    let id = &job.id;
    let goes_on = format!(
        "the job goes on; `perigee job status {id}` shows it, `perigee job cancel {id}` ends it"
    );
    let Some(job) = asking::until_interrupted(follow(&client, id), &goes_on).await? else {
        return Ok(ExitCode::from(asking::INTERRUPTED));
    };
    output::one(context.format, &job, JOB)?;
    Ok(match job.state {
        JobState::Succeeded => ExitCode::SUCCESS,
        _ => ExitCode::from(
            job.exit_code.and_then(|code| u8::try_from(code).ok()).filter(|c| *c != 0).unwrap_or(1),
        ),
    })
}

/// Shows a job's state and progress until the job has ended.
async fn follow(client: &Client, id: &JobId) -> Result<Job, Problem> {
    let bar = output::progress_bar(id, "{pos}/{len} {msg}");
    let mut said = Said::default();
    let goes_on = format!("the job goes on; `perigee job status {id}` shows it");
    loop {
        let job: Job = asking::get(client, &format!("/v1/jobs/{id}"), &goes_on).await?;
        let host = hosts(&job);
        if let Some(progress) = &job.progress {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
        }
        let label = job.progress.as_ref().map_or("", |p| p.label.as_str());
        let state = output::word(&job.state);
        bar.set_message(terminal::for_stderr(&format!("{state} on {host} {label} {}", job.reason)));
        bar.tick();
        if bar.is_hidden() && said.is_news(&format!("{state}{}", job.reason)) {
            let colon = if job.reason.is_empty() { "" } else { ": " };
            output::note(&format!("{id} {state} on {host}{colon}{}", job.reason));
        }
        if job.state.is_final() {
            bar.finish_and_clear();
            return Ok(job);
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

async fn log(
    client: &Client,
    id: &JobId,
    rank: Option<u32>,
    follow: bool,
    format: Format,
) -> Result<(), Problem> {
    let goes_on = format!("the job goes on; `perigee job log {id}` shows its log");
    let job: Job = asking::get(client, &format!("/v1/jobs/{id}"), &goes_on).await?;
    let is_merged = rank.is_none() && job.spec.count > 1;
    // The number of the last line that was shown, of each rank.
    let mut after = vec![0_u64; if is_merged { job.spec.count as usize } else { 1 }];
    let (mut kept, mut started_ms) = (Vec::new(), None);
    let mut printer = Printer::new(is_merged);
    loop {
        // The state is read before the lines. If it is final, the lines are complete.
        let job: Job = asking::get(client, &format!("/v1/jobs/{id}"), &goes_on).await?;
        if has_begun_anew(&mut started_ms, job.started_ms) {
            output::note("the job has begun anew, and its log too");
            after.fill(0);
        }
        let asked = match (is_merged, rank) {
            (true, _) => {
                let each: Vec<String> = after.iter().map(u64::to_string).collect();
                format!("after_each={}", each.join(","))
            }
            (false, Some(rank)) => format!("after={}&rank={rank}", after[0]),
            (false, None) => format!("after={}", after[0]),
        };
        let path = format!("/v1/jobs/{id}/log?{asked}");
        let lines: Vec<LogLine> = asking::get(client, &path, &goes_on).await?;
        let none = lines.is_empty();
        for line in lines {
            let rank = line.rank.filter(|_| is_merged);
            let shown = after.get_mut(rank.unwrap_or_default() as usize);
            if let Some(shown) = shown {
                *shown = line.seq.max(*shown);
            }
            match format {
                Format::Table => printer.print(&line),
                _ => kept.push(line),
            }
        }
        if none && (!follow || job.state.is_final()) {
            return if format == Format::Table { Ok(()) } else { output::list(format, &kept, LOG) };
        }
        if none {
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }
}

/// Whether a job was started once more since it was seen started last. Then its log begins anew, with the number 1.
fn has_begun_anew(seen_ms: &mut Option<u64>, started_ms: Option<u64>) -> bool {
    let before = *seen_ms;
    *seen_ms = started_ms.or(before);
    before.is_some() && *seen_ms != before
}

async fn explain(client: &Client, id: &JobId, format: Format) -> Result<(), Problem> {
    let decisions: Vec<Decision> = client.get(&format!("/v1/jobs/{id}/decisions")).await?;
    let job: Job = client.get(&format!("/v1/jobs/{id}")).await?;
    if format != Format::Table {
        return output::list(
            format,
            &decisions,
            &[
                ("at_ms", |d| d.at_ms.to_string()),
                ("trigger", |d| output::word(&d.trigger)),
                ("summary", |d| d.summary.clone()),
                ("outcome", |d| d.outcome.clone()),
                ("measured_s", |d| d.measured_s.map_or_else(String::new, |s| s.to_string())),
            ],
        );
    }
    let first_ms = decisions.first().map_or(0, |d| d.at_ms);
    for decision in &decisions {
        let after_s = decision.at_ms.saturating_sub(first_ms) / 1000;
        output::text(&format!(
            "+{after_s} s  {}: {}",
            output::word(&decision.trigger),
            decision.summary
        ));
        if !decision.outcome.is_empty() {
            output::text(&format!("but {}", decision.outcome));
        }
        job_plan::print_options(&decision.plan, Format::Table)?;
        print_measured(decision);
        output::text("");
    }
    let samples: Vec<Sample> = client.get(&format!("/v1/jobs/{id}/samples")).await?;
    if let Some(told) = samples.last().and_then(|last| network(&last.io)) {
        output::text(&told);
    }
    for migration in &job.migrations {
        output::text(&moving::summary(migration));
        for line in moving::lines(migration) {
            output::text(&format!("  {line}"));
        }
    }
    for line in left_out(client, &job).await? {
        output::text(&line);
    }
    if job.cost.is_some() {
        output::text(&format!("cost: {}", cost(&job)));
    }
    if job.state.is_final() && !job.reason.is_empty() {
        output::text(&format!("{}: {}", output::word(&job.state), job.reason));
    }
    Ok(())
}

/// What the job's disks have sent over the network until now, and what they were spared. `None` if all was beside the
/// VM.
fn network(io: &IoStats) -> Option<String> {
    if io.network_requests == 0 && io.replica_reads == 0 {
        return None;
    }
    let mut told = format!(
        "its disks: {} requests with {} to other hosts",
        io.network_requests,
        format_bytes(io.network_bytes)
    );
    if io.network_saved_bytes > 0 {
        let saved = format_bytes(io.network_saved_bytes);
        told = format!("{told}, of which compression kept {saved} off the network");
    }
    if io.replica_reads > 0 {
        let reads = io.replica_reads;
        told = format!(
            "{told}; {reads} reads answered from a replica, or another layer, beside the VM"
        );
    }
    Some(told)
}

/// Prediction and truth, part by part where the parts are known.
fn print_measured(decision: &Decision) {
    let Some(measured_s) = decision.measured_s else { return };
    let (Some(measured), Some(option)) = (decision.measured, decision.plan.chosen()) else {
        return output::text(&format!("measured: {measured_s:.1} s"));
    };
    let held = if option.total.holds(measured_s) { "in" } else { "not in" };
    output::text(&format!("\nmeasured: {measured_s:.1} s, {held} the range of {}", option.total));
    output::text(&format!("  {:<10} {:>10} {:>10}", "", "predicted", "measured"));
    for part in Part::ALL {
        let (name, measured_s) = (part.name(), measured.of(part));
        output::text(&format!("  {name:<10} {:>10} {measured_s:>10.1}", seconds_of(option, part)));
    }
}

/// The files of the job's VM that are not among its outputs.
async fn left_out(client: &Client, job: &Job) -> Result<Vec<String>, Problem> {
    if job.left_out == 0 {
        return Ok(Vec::new());
    }
    let left_out: LeftOutFiles = client.get(&format!("/v1/jobs/{}/left-out", job.id)).await?;
    let lines = left_out.files.into_iter().map(|LeftOut { path, why, is_lost }| {
        let what = if is_lost { "lost" } else { "left out" };
        format!("{what}: {path} ({why})")
    });
    let more = (left_out.more > 0).then(|| format!("and {} more", left_out.more));
    Ok(lines.chain(more).collect())
}

async fn fetch_output(client: &Client, id: &JobId, to: Option<PathBuf>) -> Result<(), Problem> {
    let mut response = client.get_response(&format!("/v1/jobs/{id}/output")).await?;
    let internal = |e: std::io::Error| {
        Problem::of_io(ProblemKind::Internal, format!("can't fetch the output of {id}"), &e)
    };
    let to_stdout = to.as_deref() == Some(Path::new("-"));
    let to = to.unwrap_or_else(|| PathBuf::from(id.as_str()));
    let unpack = |e: std::io::Error| {
        let what = format!("can't unpack the output of {id} into {}", to.display());
        Problem::of_io(ProblemKind::Conflict, what, &e).next("name another directory with --to")
    };
    // Where the files are to be there is room, and `/tmp` may be memory.
    let mut scratch = match to_stdout {
        true => None,
        false => {
            std::fs::create_dir_all(&to).map_err(unpack)?;
            Some(tempfile::tempfile_in(&to).map_err(unpack)?)
        }
    };
    loop {
        let chunk = response
            .chunk()
            .await
            .map_err(|e| Problem::unavailable(format!("can't fetch the output of {id}"), e))?;
        let Some(chunk) = chunk else { break };
        match &mut scratch {
            None => output::put(&chunk),
            Some(scratch) => std::io::Write::write_all(scratch, &chunk).map_err(internal)?,
        }
    }
    let job: Job = client.get(&format!("/v1/jobs/{id}")).await?;
    for line in left_out(client, &job).await? {
        output::note(&line);
    }
    let Some(mut scratch) = scratch else { return Ok(()) };
    std::io::Seek::rewind(&mut scratch).map_err(internal)?;
    // Whatever answered: `check_output` refuses headers that would fill the memory and files that claim to be huge;
    // `unpack` refuses paths that lead out of the directory.
    perigee_controller::check_output(&scratch).map_err(|e| unpack(std::io::Error::other(e)))?;
    std::io::Seek::rewind(&mut scratch).map_err(internal)?;
    let mut tar = tar::Archive::new(scratch);
    tar.set_preserve_permissions(false);
    tar.set_preserve_ownerships(false);
    tar.unpack(&to).map_err(unpack)?;
    output::text(&to.display().to_string());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_followed_from_its_begin_again_when_its_job_begins_anew() {
        let mut seen_ms = None;
        let looks = [None, Some(5), Some(5), None, Some(9), Some(9)];
        let anew = looks.map(|started_ms| has_begun_anew(&mut seen_ms, started_ms));
        assert_eq!(anew, [false, false, false, false, true, false]);
    }

    #[test]
    fn what_a_job_was_spared_on_the_network_is_told() {
        assert_eq!(network(&IoStats { reads: 5, ..IoStats::default() }), None);
        let io = IoStats {
            network_requests: 3,
            network_bytes: 2 << 20,
            network_saved_bytes: 1 << 20,
            replica_reads: 9,
            ..IoStats::default()
        };
        let told = network(&io).expect("something was sent");
        assert!(
            told.contains("3 requests with 2 MiB") && told.contains("kept 1 MiB off"),
            "{told}"
        );
        assert!(told.contains("9 reads"), "{told}");
    }
}
