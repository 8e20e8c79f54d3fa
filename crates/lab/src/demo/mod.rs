//! `make demo` runs the same database job six times: as people do today (QEMU's own NBD over the WAN), far from its data,
//! beside its data, twice under the planner, which brings the data to the VM or moves the running VM, and at a site with
//! a replica of its data.

pub mod outcome;
mod plain;
mod print;
mod work;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_model::job::{JobState, Link};
use perigee_model::{HostId, ImageName, Problem, SiteId, VolumeName, units};
use sha2::{Digest, Sha256};

use crate::bare::Machine;
use crate::cluster::Cluster;
use crate::definition::Definition;
use crate::down::remains;
use crate::measuring::{self, QEMU};
use crate::progress::Steps;
use crate::tpch::{self, Answer};
use crate::up::{self, Lab, with_lab};
use crate::wan::LinkSettings;
use outcome::{Evidence, Outcome, Run, RunName};

pub use print::{PLAIN_WORDS, basis_words, way_word};
pub use work::{Stage, query_bundle};

/// The order of the runs. The predictions of later runs use the measurements of earlier ones.
const ORDER: [RunName; 5] =
    [RunName::Beside, RunName::Remote, RunName::Planned, RunName::Large, RunName::Replica];
/// The order of the runs in the result.
const SHOWN: [RunName; 5] =
    [RunName::Remote, RunName::Planned, RunName::Large, RunName::Replica, RunName::Beside];

#[derive(Debug, Clone)]
pub struct Options {
    /// Jobs start in the first site. The first host of the last site has the data.
    pub definition: Definition,
    pub lab: up::Options,
    /// The golden image.
    pub image: PathBuf,
    /// 1 is about 1 GB of tables.
    pub scale_factor: f64,
    /// Directory for `report.html`, `bars.svg` and `results.json`.
    pub out: PathBuf,
}

/// Runs the whole demo in a lab of its own, which is always removed afterwards.
///
/// # Errors
/// The first step that failed, or that the result is wrong. Slowness is not an error.
pub async fn demo(options: Options, steps: &Steps) -> Result<Outcome, Problem> {
    let definition = options.definition.clone();
    let id = definition.id.clone();
    let story = async |lab: Lab| tell(&lab, &options, steps).await;
    let mut outcome = with_lab(definition, &options.lab, steps, story).await?;
    outcome.left_behind = remains(&options.lab.base, &id);
    write_results(&outcome, &options.out)?;
    print::outcome(&outcome, &options.out);
    let faults = outcome.faults();
    if faults.is_empty() {
        return Ok(outcome);
    }
    Err(Problem::internal("the demo ended with a wrong result", faults.join("; "))
        .next(format!("the measurements are in {}", options.out.join("report.html").display())))
}

async fn tell(lab: &Lab, options: &Options, steps: &Steps) -> Result<Outcome, Problem> {
    let cluster = Cluster::new(lab)?;
    let stage = stage(&options.definition)?;
    let scratch = lab.dir().join("tpch");
    std::fs::create_dir_all(&scratch)
        .map_err(|e| Problem::internal(format!("can't make {}", scratch.display()), e))?;

    let tables = Tables { image: &options.image, scale_factor: options.scale_factor };
    let table_bytes = prepare(&cluster, &stage, &scratch, tables, steps).await?;
    let right = right_answers(scratch.clone());
    load(&cluster, &stage, &scratch, steps).await?;
    // Else the next job would wait until the links are measured, and they would be measured again.
    let links = probe(&cluster, steps).await?;
    make_large(&cluster, &stage, steps).await?;
    let right =
        right.await.map_err(|e| Problem::internal("can't compute the right answers", e))??;
    let copied = plain::copy(lab, &stage, steps).await?;

    let bundle = scratch.join("query.tar");
    work::query_bundle(&bundle, &tpch::DEMO_QUERIES)?;
    let inputs = cluster.upload(&bundle).await?;
    let mut answers_checked = true;
    let mut runs = Vec::new();
    let mut without_perigee = None;
    let mut versions = measuring::versions(measuring::own_version(), &[QEMU]);
    versions.insert("sqlite".to_owned(), tpch::sqlite_version().to_owned());
    for name in ORDER {
        if name == RunName::Replica {
            // One host of the site has it, the other one has not: a plan shows all ways.
            let step =
                steps.begin(format!("make a replica of volume {} at {}", stage.volume, stage.far));
            cluster.replicate(&stage.volume, &stage.far).await?;
            step.done("");
        }
        let Queried { run, output, machine } =
            query(lab, &cluster, &stage, (name, &inputs), steps).await?;
        let answers = output.get("answers.txt").map_or("", String::as_str);
        if let Err(difference) = tpch::compare(&right, &tpch::parse(answers)) {
            steps.say(&format!("  wrong answer in the run {}: {difference}", name.word()));
            answers_checked = false;
        }
        for (file, key) in [("postgres.version", "postgres"), ("kernel.version", "guest_kernel")] {
            if let Some(text) = output.get(file) {
                versions.insert(key.to_owned(), text.trim().to_owned());
            }
        }
        runs.push(run);
        if let Some(machine) = &machine {
            let plain = plain::run(lab, &stage, &copied, machine, &bundle, steps).await?;
            without_perigee = Some(plain);
        }
    }
    runs.sort_by_key(|run| SHOWN.iter().position(|name| *name == run.name));
    let link = wan(&options.definition, &stage.far);
    Ok(Outcome {
        rtt_ms: link.map_or(0.0, |link| Duration::from_micros(link.rtt_us).as_secs_f64() * 1e3),
        rate: link.map(|link| link.rate.to_string()).unwrap_or_default(),
        scale_factor: options.scale_factor,
        table_bytes,
        archive_bytes: work::ARCHIVE_BYTES,
        data_home: stage.near,
        queries: tpch::DEMO_QUERIES.iter().map(|q| q.name.to_owned()).collect(),
        answers_checked,
        plain: without_perigee,
        runs,
        links,
        versions,
        left_behind: Vec::new(),
    })
}

async fn make_large(cluster: &Cluster, stage: &Stage, steps: &Steps) -> Result<(), Problem> {
    let volume = work::large()?;
    let (size, tables) = (units::format_bytes(work::ARCHIVE_BYTES), &stage.volume);
    let mut step =
        steps.begin(format!("make volume {volume}: a clone of {tables} with {size} more"));
    cluster.clone_volume(&volume, tables).await?;
    cluster.run(&stage.archive_job()?, &mut step).await?;
    step.done("");
    Ok(())
}

/// The settings between the jobs' first site and the data's site.
fn wan(definition: &Definition, far: &SiteId) -> Option<LinkSettings> {
    let near = &definition.sites.last()?.name;
    definition.link(far, near).ok().map(|link| link.settings)
}

/// The names of the demo's image and volume, and where they are.
///
/// # Errors
/// `Invalid` for a lab without hosts.
pub fn stage(definition: &Definition) -> Result<Stage, Problem> {
    let name = |e| Problem::internal("can't name the demo's image and volume", e);
    let sites = (definition.sites.first(), definition.sites.last());
    let (Some(far), Some(near)) = sites else {
        return Err(Problem::invalid("can't run the demo", "its lab has no sites"));
    };
    let near = near.hosts.first().cloned();
    Ok(Stage {
        image: ImageName::new("debian-pg").map_err(name)?,
        volume: VolumeName::new("tpch").map_err(name)?,
        far: far.name.clone(),
        near: near
            .ok_or_else(|| Problem::invalid("can't run the demo", "its last site has no host"))?,
    })
}

/// What the data volume is made of.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// The golden image.
    pub image: &'a Path,
    pub scale_factor: f64,
}

/// Makes the tables and packs them for the loading job, imports the golden image on every host, and
/// makes the data volume. The three run concurrently. Returns the size of the tables.
///
/// # Errors
/// The first step that failed.
pub async fn prepare(
    cluster: &Cluster,
    stage: &Stage,
    scratch: &Path,
    tables: Tables<'_>,
    steps: &Steps,
) -> Result<u64, Problem> {
    let Tables { image, scale_factor } = tables;
    let step = steps.begin(format!(
        "make the TPC-H tables, scale factor {scale_factor}, and import the golden image on every host"
    ));
    let dir = scratch.to_owned();
    let tables = tokio::task::spawn_blocking(move || {
        let bytes = tpch::write_tables(scale_factor, &dir)?;
        work::load_bundle(&dir, &load_bundle(&dir))?;
        Ok(bytes)
    });
    let tables = async { tables.await.map_err(|e| Problem::internal("can't make the tables", e))? };
    let volume = cluster.create_volume(&stage.volume, &stage.near, volume_bytes(scale_factor));
    let image = cluster.import_image(&stage.image, image);
    let (bytes, image, _) = tokio::try_join!(tables, image, volume)?;
    step.done(&format!(
        "{} of tables, {} on {} hosts",
        units::format_bytes(bytes),
        units::format_bytes(image.allocated_bytes),
        image.hosts.len()
    ));
    Ok(bytes)
}

fn load_bundle(scratch: &Path) -> PathBuf {
    scratch.join("load.tar")
}

/// Computes the right answers in the background; SQLite ends long before the guest does.
fn right_answers(dir: PathBuf) -> tokio::task::JoinHandle<Result<Vec<Answer>, Problem>> {
    tokio::task::spawn_blocking(move || tpch::expected(&dir, &tpch::DEMO_QUERIES))
}

/// Loads the tables that [`prepare`] made into the data volume.
///
/// # Errors
/// The loading job failed.
pub async fn load(
    cluster: &Cluster,
    stage: &Stage,
    scratch: &Path,
    steps: &Steps,
) -> Result<(), Problem> {
    let mut step = steps.begin(format!("load the tables into PostgreSQL at {}", stage.near));
    let bundle = cluster.upload(&load_bundle(scratch)).await?;
    let job = cluster.run(&stage.load_job(bundle), &mut step).await?;
    step.done(&format!("job {}", job.id));
    Ok(())
}

/// Room for rows, indexes, the log and the archive: 6 GiB for scale factor 1, at least 2 GiB.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
fn volume_bytes(scale_factor: f64) -> u64 {
    let mib = (scale_factor.clamp(0.0, 10.0) * 6144.0).ceil() as u64;
    mib.max(2048) << 20
}

async fn probe(cluster: &Cluster, steps: &Steps) -> Result<Vec<Link>, Problem> {
    let step = steps.begin("measure the links");
    let links = cluster.probe_links().await?;
    step.done(&format!("{} links", links.len()));
    Ok(links)
}

/// A run, and what it left.
struct Queried {
    run: Run,
    /// The output files and their contents.
    output: BTreeMap<String, String>,
    /// The command line of its QEMU, and the host where it began, of the run that QEMU repeats without Perigee.
    machine: Option<(Machine, HostId)>,
}

/// One run: makes the plan, runs the job, and collects its figures and output files.
async fn query(
    lab: &Lab,
    cluster: &Cluster,
    stage: &Stage,
    (name, inputs): (RunName, &str),
    steps: &Steps,
) -> Result<Queried, Problem> {
    let spec = stage.query_job(name, inputs.to_owned())?;
    let plan = cluster.plan(&spec).await?;
    print::plan(name, &plan);
    let mut step = steps.begin(format!("run {}", name.word()));
    let job = cluster.submit(&spec).await?;
    let machine = match name {
        RunName::Remote => Some(plain::machine_of(lab, cluster, &job.id, &mut step).await?),
        _ => None,
    };
    let job = cluster.wait(&job.id, JobState::Succeeded, &mut step).await?;
    let output: BTreeMap<String, String> = cluster.output(&job.id).await?.into_iter().collect();
    let answers = output.get("answers.txt").map_or("", String::as_str);
    let evidence = Evidence {
        plan,
        decisions: cluster.decisions(&job.id).await?,
        samples: cluster.samples(&job.id).await?,
        answers_sha256: Sha256::digest(answers).iter().map(|b| format!("{b:02x}")).collect(),
    };
    let run = Run::new(name, &job, evidence)?;
    step.done(&format!("{:.1} s from the VM's start", run.measured_s));
    Ok(Queried { run, output, machine })
}

fn write_results(outcome: &Outcome, out: &Path) -> Result<(), Problem> {
    let fail = |e: &dyn std::fmt::Display| {
        Problem::internal(format!("can't write to {}", out.display()), e)
    };
    std::fs::create_dir_all(out).map_err(|e| fail(&e))?;
    let json = serde_json::to_vec_pretty(outcome).map_err(|e| fail(&e))?;
    std::fs::write(out.join("results.json"), json).map_err(|e| fail(&e))?;
    std::fs::write(out.join("bars.svg"), crate::report::picture(outcome)).map_err(|e| fail(&e))?;
    std::fs::write(out.join("report.html"), crate::report::html(outcome)).map_err(|e| fail(&e))
}
