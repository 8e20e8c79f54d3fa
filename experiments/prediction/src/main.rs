//! Predicts jobs at one round trip from their runs at another one, runs them there, and compares.
//!
//! One lab is used for all of it, and its WAN is changed while it runs. The jobs of each round trip have a history of
//! their own, because their command names the round trip. Predictions are asked for (`job plan`) at three times: before
//! the job has ever run, when it has run beside its data, and when it has run in all placements. The last two are for
//! the other round trips. So the runs from which one prediction has learned are also those with which the predictions
//! for that round trip are compared.

mod ends;
mod report;
mod results;
mod workload;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::cluster::Cluster;
use perigee_lab::demo::{self, Stage, Tables, query_bundle};
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::wan::{self, Change};
use perigee_lab::{Lab, Options, Steps, tpch, with_lab};
use perigee_model::job::{
    Access, DEFAULT_OWNER, Job, JobSpec, JobState, JobVolume, MigrationState, MoveVm, Restart,
    Start,
};
use perigee_model::plan::{PlanOption, Trigger, Way};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem, SiteId, VolumeName};

use ends::Looks;
use results::{Learned, Placement, Prediction, Question, Results, Run};
use workload::{Workload, files_script};

const MEMORY_BYTES: u64 = 256 << 20;
const OUTPUT_BYTES: u64 = 16 << 20;
const FILES_BYTES: u64 = 1 << 30;
/// How often a running job is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long)]
    program: PathBuf,
    /// The golden image's directory
    #[arg(long)]
    image: PathBuf,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/prediction")]
    out: PathBuf,
    /// Round-trip times in ms, at least two; the whole grid is 0,1,2,4,8,16
    #[arg(long, value_delimiter = ',', default_value = "4,16")]
    rtts: Vec<u32>,
    /// Runs of each case. Three show how much runs differ, and take three times as long as one (`minutes` in
    /// results.json)
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Only these workloads: tpch, scan, think, depth8, mix, writer, merge, and with two VMs gang-tpch, gang-scan, gang-talk
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// How each job is run beside `beside`: remote, auto, migrate, copy, follow, replica. Data of jobs with two VMs come only by the planner, and
    /// `follow` is `migrate` for them
    #[arg(long, value_delimiter = ',', default_value = "remote,auto,copy,follow,replica")]
    placements: Vec<String>,
    /// The size of the tables; 1 is about 1 GB
    #[arg(long, default_value_t = 0.1)]
    scale_factor: f64,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// Small data and few workloads, which only shows that it works
    #[arg(long)]
    quick: bool,
}

impl Arguments {
    fn checked(mut self) -> Result<Self> {
        for word in &self.only {
            let known = Workload::ALL.iter().any(|workload| workload.name() == word);
            ensure!(known, "--only {word}: there is no such workload");
        }
        for word in &self.placements {
            let known = Placement::ALL.iter().any(|placement| placement.name() == word);
            ensure!(known, "--placements {word}: there is no such placement");
        }
        if self.quick {
            (self.scale_factor, self.rounds) = (0.01, 1);
            if self.only.is_empty() {
                self.only = ["think", "merge", "gang-talk"].map(str::to_owned).to_vec();
            }
        }
        self.rtts.sort_unstable();
        self.rtts.dedup();
        ensure!(
            self.rtts.len() >= 2,
            "--rtts needs two round trips: one is predicted from the other"
        );
        Ok(self)
    }

    /// The placements other than beside the data. Beside the data always comes first.
    fn placements(&self, workload: Workload) -> Vec<Placement> {
        let is_named = |p: Placement| self.placements.iter().any(|word| word == p.name());
        let wanted = |p: &Placement| match p {
            Placement::Beside => false,
            Placement::Copy | Placement::Follow => is_named(*p) && !workload.is_gang(),
            Placement::Migrate if workload.is_gang() => {
                is_named(Placement::Migrate) || is_named(Placement::Follow)
            }
            _ => is_named(*p),
        };
        Placement::ALL.into_iter().filter(wanted).collect()
    }

    fn has_replicas(&self) -> bool {
        self.placements.iter().any(|word| word == Placement::Replica.name())
    }

    fn workloads(&self) -> Vec<Workload> {
        let wanted = |workload: &Workload| {
            self.only.is_empty() || self.only.iter().any(|word| word == workload.name())
        };
        Workload::ALL.into_iter().filter(wanted).collect()
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse().checked()?;
    let mut results = Results::load(&arguments.out)?;
    if arguments.report_only {
        results.write(&arguments.out)?;
        print(&results);
        return Ok(());
    }
    results.cpus = std::thread::available_parallelism()?.get();
    let perigee = measuring::version_of(&arguments.program);
    results.versions = measuring::versions(perigee, &[QEMU]);
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let steps = Steps::default();
    let work = async |lab: Lab| {
        let measured = measure(&lab, &arguments, &steps, &mut results).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    with_lab(measuring::two_sites(&arguments.image), &options, &steps, work).await?;
    print(&results);
    Ok(())
}

/// The lab, and the data at its far host.
struct Bench<'a> {
    lab: &'a Lab,
    cluster: Cluster,
    steps: &'a Steps,
    near: HostId,
    stage: Stage,
    files: VolumeName,
    bundle: String,
    /// The site without the data, if replicas of it are made there.
    replica_site: Option<SiteId>,
}

async fn measure(
    lab: &Lab,
    arguments: &Arguments,
    steps: &Steps,
    results: &mut Results,
) -> Result<()> {
    let begun = Instant::now();
    let bench = prepare(lab, arguments, steps).await?;
    let workloads = arguments.workloads();
    for rtt_ms in &arguments.rtts {
        let others: Vec<u32> = arguments.rtts.iter().copied().filter(|r| r != rtt_ms).collect();
        bench.set_rtt(*rtt_ms).await?;
        bench.plan(&workloads, *rtt_ms, *rtt_ms, Learned::Nothing, results).await?;
        for learned in [Learned::Beside, Learned::All] {
            for workload in &workloads {
                let placements = match learned {
                    Learned::All => arguments.placements(*workload),
                    _ => vec![Placement::Beside],
                };
                for round in 1..=arguments.rounds {
                    for placement in &placements {
                        let run = bench.run(*workload, *rtt_ms, *placement, round).await?;
                        results.add_run(run);
                        results.minutes = begun.elapsed().as_secs() / 60;
                        results.write(&arguments.out)?;
                    }
                }
            }
            for other in &others {
                bench.set_rtt(*other).await?;
                bench.plan(&workloads, *rtt_ms, *other, learned, results).await?;
            }
            bench.set_rtt(*rtt_ms).await?;
        }
        results.write(&arguments.out)?;
    }
    Ok(())
}

/// Loads the tables and writes the workloads' files, both at the far host.
async fn prepare<'a>(lab: &'a Lab, arguments: &Arguments, steps: &'a Steps) -> Result<Bench<'a>> {
    let cluster = Cluster::new(lab)?;
    let stage = demo::stage(&lab.definition)?;
    let (site, near) = lab.definition.hosts().next().context("a lab has hosts")?;
    let (site, near) = (site.clone(), near.clone());
    let replica_site = arguments.has_replicas().then_some(site);
    let scratch = lab.dir().join("prediction");
    std::fs::create_dir_all(&scratch)?;
    let image = arguments.image.join("debian-pg.raw");
    let tables = Tables { image: &image, scale_factor: arguments.scale_factor };
    demo::prepare(&cluster, &stage, &scratch, tables, steps).await?;
    let bundle = scratch.join("query.tar");
    query_bundle(&bundle, &tpch::QUERIES)?;
    let bundle = cluster.upload(&bundle).await?;
    let files = VolumeName::new("files")?;
    let bench = Bench { lab, cluster, steps, near, stage, files, bundle, replica_site };
    bench.cluster.create_volume(&bench.files, &bench.stage.near, FILES_BYTES).await?;
    let write = async {
        let mut step = steps.begin("write the workloads' files");
        let (scan_mib, sorted_mib) = if arguments.quick { (200, 4) } else { (200, 24) };
        let script = files_script(scan_mib, sorted_mib);
        let command = vec!["sh".to_owned(), "-c".to_owned(), script];
        let start = Start::Host(bench.stage.near.clone());
        let mut spec = bench.spec("files-write", command, &bench.files, start);
        spec.volumes[0].access = Access::Write;
        bench.cluster.run(&spec, &mut step).await?;
        step.done("");
        Ok(())
    };
    let load = demo::load(&bench.cluster, &bench.stage, &scratch, steps);
    tokio::try_join!(load, write)?;
    Ok(bench)
}

impl Bench<'_> {
    /// Changes the WAN, and has the controller measure it.
    async fn set_rtt(&self, rtt_ms: u32) -> Result<()> {
        let step = self.steps.begin(format!("set the WAN to {rtt_ms} ms and measure it"));
        let sites = &self.lab.definition.sites;
        let rtt_us = Some(u64::from(rtt_ms) * 1000);
        let change = Change { rtt_us, ..Change::default() };
        wan::set(self.lab, &sites[0].name, &sites[1].name, change).await?;
        self.cluster.probe_links().await?;
        step.done("");
        Ok(())
    }

    fn spec(&self, name: &str, command: Vec<String>, volume: &VolumeName, start: Start) -> JobSpec {
        let (volume, mount) = (volume.clone(), "/data".to_owned());
        JobSpec {
            name: name.to_owned(),
            image: self.stage.image.clone(),
            command,
            env: Default::default(),
            cpus: 1,
            memory_bytes: MEMORY_BYTES,
            cpus_max: None,
            memory_max_bytes: None,
            root_bytes: None,
            output_bytes: OUTPUT_BYTES,
            volumes: vec![JobVolume { volume, mount, access: Access::Clone, ranks: Vec::new() }],
            outputs: Vec::new(),
            outputs_to: None,
            keep_outputs_s: None,
            publish: Vec::new(),
            start,
            may_migrate: false,
            writes: perigee_model::LeaveSite::Never,
            ranks: perigee_model::LeaveSite::Never,
            timeout_s: Some(900),
            has_output_room: false,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            oom_kill: Default::default(),
            inputs: None,
            owner: DEFAULT_OWNER.to_owned(),
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

    /// The job with the history of a round trip.
    fn job(&self, workload: Workload, learned_at_ms: u32, start: Start) -> JobSpec {
        let inputs = workload.is_tpch().then(|| self.bundle.clone());
        let (command, count) = (workload.command(learned_at_ms), workload.vms());
        let spec = self.spec(workload.name(), command, self.volume_of(workload), start);
        JobSpec { inputs, count, ..spec }
    }

    fn volume_of(&self, workload: Workload) -> &VolumeName {
        if workload.is_tpch() { &self.stage.volume } else { &self.files }
    }

    async fn plan(
        &self,
        workloads: &[Workload],
        learned_at_ms: u32,
        rtt_ms: u32,
        learned: Learned,
        results: &mut Results,
    ) -> Result<()> {
        for (workload, question) in workloads
            .iter()
            .flat_map(|workload| Question::ALL.map(|question| (*workload, question)))
        {
            let start = match question {
                Question::Anywhere => Start::Anywhere,
                Question::Home => Start::Host(self.near.clone()),
            };
            let job = self.job(workload, learned_at_ms, start);
            let plan = self.cluster.plan(&JobSpec { may_migrate: true, ..job }).await?;
            for option in plan.options {
                let of = (workload, learned, question);
                results.add_prediction(prediction(of, (learned_at_ms, rtt_ms), option));
            }
        }
        let Some(site) = &self.replica_site else { return Ok(()) };
        // The other ways are predicted and run without a replica.
        let step = self.steps.begin(format!("plan with replicas at {site}"));
        let volumes: BTreeSet<_> = workloads.iter().map(|w| self.volume_of(*w)).collect();
        for volume in &volumes {
            self.cluster.replicate(volume, site).await?;
        }
        for workload in workloads {
            let job = self.job(*workload, learned_at_ms, Start::Anywhere);
            let plan = self.cluster.plan(&JobSpec { may_migrate: true, ..job }).await?;
            for option in plan.options.into_iter().filter(|option| option.way == Way::Replica) {
                let option = PlanOption { chosen: false, ..option };
                let of = (*workload, learned, Question::Anywhere);
                results.add_prediction(prediction(of, (learned_at_ms, rtt_ms), option));
            }
        }
        for volume in &volumes {
            self.cluster.stop_replica(volume, site).await?;
        }
        step.done("");
        Ok(())
    }

    async fn run(
        &self,
        workload: Workload,
        rtt_ms: u32,
        placement: Placement,
        round: u32,
    ) -> Result<Run> {
        let words = format!("{rtt_ms} ms, {}: {}", workload.words(), placement.name());
        let mut step = self.steps.begin(words);
        let at = if placement == Placement::Beside { &self.stage.near } else { &self.near };
        let job = self.job(workload, rtt_ms, Start::Host(at.clone()));
        let replica_site = self.replica_site.as_ref().filter(|_| placement == Placement::Replica);
        if let Some(site) = replica_site {
            self.cluster.replicate(self.volume_of(workload), site).await?;
        }
        let load_1min = measuring::load_1min()?;
        let spec = JobSpec { may_migrate: placement == Placement::Auto, ..job };
        let job = self.cluster.submit(&spec).await?;
        let mut looks = Looks::default();
        let mut note = |job: &Job| looks.note(job, now_ms());
        let mut began_ms = None;
        if matches!(placement, Placement::Migrate | Placement::Copy | Placement::Follow) {
            let look = (LOOK_EVERY, &mut note as _);
            let running = self.cluster.watch(&job.id, JobState::Running, &mut step, look).await?;
            began_ms = Some(self.change(&running, placement).await?);
        }
        let look = (LOOK_EVERY, &mut note as _);
        let job = self.cluster.watch(&job.id, JobState::Succeeded, &mut step, look).await?;
        if let Some(site) = replica_site {
            self.cluster.stop_replica(self.volume_of(workload), site).await?;
        }
        let (way, decided_ms) = self.what_happened(&job, placement).await?;
        let total_s = job.measured_s.context("a measured time")?;
        let running_ms = job.running_ms.context("a job that has run")?;
        let boot_s = seconds(running_ms - job.started_ms.unwrap_or(running_ms));
        let began_ms = began_ms.or(decided_ms);
        let change_began_s = began_ms.map(|ms| seconds(ms.saturating_sub(running_ms)));
        let shown_ends = looks.compare(running_ms, total_s - boot_s);
        step.done(&format!("{total_s:.1} s, {}", results::way_name(way)));
        Ok(Run {
            workload,
            rtt_ms,
            placement,
            way,
            round,
            total_s,
            boot_s,
            load_1min,
            change_began_s,
            shown_ends,
            perigee: String::new(),
        })
    }

    /// Moves the VM to its data, or its data to the VM. Returns when that began.
    async fn change(&self, running: &Job, placement: Placement) -> Result<u64> {
        if running.spec.is_gang() {
            let hosts = vec![self.stage.near.clone(); running.spec.count as usize];
            return Ok(self.cluster.move_job(&running.id, &hosts).await?.started_ms);
        }
        let vm = running.vm.clone().context("a running job has a VM")?;
        if placement != Placement::Copy {
            let follow = placement == Placement::Follow;
            let volumes = if follow { VolumesOnMove::Follow } else { VolumesOnMove::Stay };
            let wish = MoveVm { host: self.stage.near.clone(), volumes, confirmed: false };
            return Ok(self.cluster.ask_to_move(&vm, &wish).await?.started_ms);
        }
        let volumes = self.cluster.vm(&vm).await?.volumes;
        let data = volumes.iter().find(|volume| volume.home == self.stage.near);
        let data = &data.context("its data are far away")?.volume;
        Ok(self.cluster.move_volume(data, &self.near).await?.started_ms)
    }

    /// What happened in a run. In `auto` the planner's decision says it, and when it was made.
    async fn what_happened(&self, job: &Job, placement: Placement) -> Result<(Way, Option<u64>)> {
        let decided = self.cluster.decisions(&job.id).await?;
        // Of a change with an outcome at least a part was not made.
        let mut changes = decided.iter().filter(|d| d.trigger == Trigger::TimeLost);
        let changed = changes.find(|decision| decision.outcome.is_empty());
        let moved = match &job.gang_move {
            Some(of) => of.ended_ms.is_some() && !of.is_undone(),
            None => job.migrations.iter().any(|m| m.state == MigrationState::Completed),
        };
        let way = match placement {
            Placement::Beside => Way::Beside,
            Placement::Remote => Way::Remote,
            // A job that ended before its VM was at the destination was remote.
            Placement::Migrate | Placement::Follow if !moved => Way::Remote,
            Placement::Migrate => Way::Migrate,
            Placement::Follow => Way::Follow,
            Placement::Copy => Way::Copy,
            Placement::Replica => Way::Replica,
            Placement::Auto => {
                changed.and_then(|d| d.plan.chosen()).map_or(Way::Remote, |option| option.way)
            }
        };
        Ok((way, changed.filter(|_| placement == Placement::Auto).map(|d| d.at_ms)))
    }
}

fn prediction(
    (workload, learned, question): (Workload, Learned, Question),
    (learned_at_ms, rtt_ms): (u32, u32),
    option: PlanOption,
) -> Prediction {
    Prediction {
        workload,
        learned,
        learned_at_ms,
        rtt_ms,
        question,
        way: option.way,
        total: option.total,
        parts: option.predicted,
        unknown: option.unknown.iter().map(|u| u.part.name().to_owned()).collect(),
        chosen: option.chosen,
        perigee: String::new(),
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn seconds(ms: u64) -> f64 {
    Duration::from_millis(ms).as_secs_f64()
}

#[expect(clippy::print_stdout, reason = "the figures are what it is for")]
fn print(results: &Results) {
    for (name, score) in &results.scores {
        println!("{name}: {}", report::score_words(score));
    }
    for shown in &results.shown_ends {
        println!("{}: {}", report::shown_words(shown), report::score_words(&shown.score));
    }
    for choices in &results.choices {
        println!(
            "{}, {}: {} of {} choices good",
            results::score_name(choices.learned, choices.of_gangs),
            choices.question.words(),
            choices.good,
            choices.plans
        );
    }
}
