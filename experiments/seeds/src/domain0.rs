//! The same programs on the host itself, without any VM (the paper's Domain0), with as many processes as there are VMs.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use perigee_lab::measuring::load_1min;

use crate::bench::SUPPORT;
use crate::results::{VM_COUNT, Work};
use crate::series::of_guest;

/// For one program.
const DEADLINE_S: &str = "3600";

/// Where the programs and their data are.
#[derive(Debug, Clone, Copy)]
pub struct From<'a> {
    pub programs: &'a Path,
    pub mining: &'a Path,
    pub tables: &'a Path,
}

/// What one program took and found.
#[derive(Debug, Default)]
pub struct Found {
    pub seconds: f64,
    /// The share of its time in which the host's CPUs worked, for whomever.
    pub busy: f64,
    pub load_1min: f64,
    pub found: String,
    /// TPC-H's, of each process.
    pub answers: Vec<String>,
}

/// Runs the programs one after the other, each with its data cold.
///
/// # Errors
/// The host lacks a program, or one has failed.
pub fn measure(from: From<'_>, works: &[Work]) -> Result<Vec<(Work, Found)>> {
    // PostgreSQL runs as another user, and sockets' paths are short.
    let dir = tempfile::Builder::new().prefix("perigee-seeds").tempdir()?;
    let dir = dir.path();
    run(Command::new("chmod").arg("755").arg(dir))?;
    let ranks = dir.join("ranks");
    let of_rank = |rank: u32| ranks.join(rank.to_string());
    for rank in 0..VM_COUNT {
        std::fs::create_dir_all(of_rank(rank))?;
    }
    if works.contains(&Work::Tpch) {
        let first = of_rank(0).join("pg");
        let script = from.programs.join("tpch/load.sh");
        run(Command::new("sh").arg(script).arg(from.tables).arg(&first))?;
        for rank in 1..VM_COUNT {
            run(Command::new("cp").arg("-a").arg(&first).arg(of_rank(rank)))?;
        }
    }
    let mut all = Vec::new();
    for work in works {
        forget(dir)?;
        forget(from.mining)?;
        let (load_1min, began) = (load_1min()?, Instant::now());
        run(Command::new("timeout")
            .args(["--verbose", DEADLINE_S, "sh"])
            .arg(from.programs.join("works.sh"))
            .current_dir(dir)
            .env("WORKS", work.name())
            .env("SUPPORT", SUPPORT)
            .env("INPUTS", from.programs)
            .env("MINE", from.mining)
            .env("DATABASE", "pg")
            .env("PROCESSES", VM_COUNT.to_string())
            .env("RANKS", &ranks)
            .env("PERIGEE_OUTPUT", ".")
            .env("PERIGEE_PROGRESS", "/dev/null")
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1"))?;
        let seconds = began.elapsed().as_secs_f64();
        let read = |path: std::path::PathBuf| {
            std::fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        let usage = read(of_rank(0).join(format!("{}-usage-0", work.name())))?;
        let (length_s, points) = of_guest(&usage)?;
        let mut before_s = 0.0;
        let mut busy_s = 0.0;
        for point in &points {
            busy_s += point.busy * (point.at_s - before_s);
            before_s = point.at_s;
        }
        let answers: Result<Vec<String>> = match work {
            Work::Tpch => {
                (0..VM_COUNT).map(|rank| read(of_rank(rank).join("tpch-answers"))).collect()
            }
            _ => Ok(Vec::new()),
        };
        let found = read(dir.join(format!("{}-found", work.name())))?;
        let busy = busy_s / length_s.max(f64::MIN_POSITIVE);
        all.push((*work, Found { seconds, busy, load_1min, found, answers: answers? }));
    }
    Ok(all)
}

/// Nothing of the files below is in the host's memory any more.
fn forget(dir: &Path) -> Result<()> {
    run(Command::new("sync").arg("-f").arg(dir))?;
    let each =
        ["-type", "f", "-exec", "dd", "if={}", "iflag=nocache", "count=0", "status=none", ";"];
    run(Command::new("find").arg(dir).args(each))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("can't start {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {said}");
    Ok(())
}
