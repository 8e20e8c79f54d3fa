//! The same programs on the host itself, without any VM (the paper's Domain0), with as many processes as there are VMs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::bench::{FIXED, STEPS, STREAMS, SUPPORT};
use crate::cell::VM_COUNT;

/// For all programs.
const DEADLINE_S: &str = "3600";

/// Where the programs and their data are.
#[derive(Debug, Clone, Copy)]
pub struct From<'a> {
    pub programs: &'a Path,
    /// Has the directory `mining-near`.
    pub mining: &'a Path,
    /// For each side that TPC-H is to run on, the directories of the ranks' databases: each has `pg` in it.
    pub databases: &'a [(&'static str, Vec<PathBuf>)],
}

/// Runs the programs that these words name, one after the other, each with its data cold. Returns the files that they have left, in the order of the ranks.
///
/// # Errors
/// The host lacks a program, or one has failed.
pub fn measure(from: From<'_>, words: &str) -> Result<Vec<(String, String)>> {
    // PostgreSQL runs as another user, and sockets' paths are short.
    let dir = tempfile::Builder::new().prefix("perigee-seeds").tempdir()?;
    let dir = dir.path();
    run(Command::new("chmod").arg("755").arg(dir))?;
    let ranks = dir.join("ranks");
    let of_rank = |rank: u32| ranks.join(rank.to_string());
    for rank in 0..VM_COUNT {
        std::fs::create_dir_all(of_rank(rank))?;
    }
    for (side, databases) in from.databases {
        for (rank, database) in (0..VM_COUNT).zip(databases) {
            std::os::unix::fs::symlink(database, of_rank(rank).join(format!("data-{side}")))?;
            forget(database)?;
        }
    }
    forget(&from.mining.join("mining-near"))?;
    run(Command::new("timeout")
        .args(["--verbose", DEADLINE_S, "mpirun", "-n", &VM_COUNT.to_string()])
        .arg("/usr/bin/python3")
        .arg(from.programs.join("works.py"))
        .current_dir(dir)
        .env("WORKS", words)
        .env("SUPPORT", SUPPORT)
        .env("STEPS", STEPS)
        .env("STREAMS", STREAMS.join(";"))
        .env("FIXED", FIXED)
        .env("MINE", from.mining.join("mining"))
        .env("DATABASE", "data")
        .env("RANKS", &ranks)
        .env("PERIGEE_PROGRESS", "/dev/null")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1"))?;
    let mut outputs = Vec::new();
    for rank in 0..VM_COUNT {
        for file in std::fs::read_dir(of_rank(rank))? {
            let file = file?;
            if file.file_type()?.is_file() {
                let name = file.file_name().to_string_lossy().into_owned();
                outputs.push((name, std::fs::read_to_string(file.path())?));
            }
        }
    }
    Ok(outputs)
}

/// What the fixed computation takes on the host itself, alone.
///
/// # Errors
/// Python is missing.
pub fn fixed_s(programs: &Path) -> Result<f64> {
    let mut command = Command::new("/usr/bin/python3");
    command.arg(programs.join("works.py")).args(["fixed", FIXED]).stdin(Stdio::null());
    let output = command.output().context("can't start python3")?;
    let said = String::from_utf8(output.stdout)?;
    said.trim().parse().with_context(|| format!("the fixed computation said {said:?}"))
}

/// Nothing of the files below is in the host's memory any more.
pub fn forget(dir: &Path) -> Result<()> {
    run(Command::new("sync").arg("-f").arg(dir))?;
    let each =
        ["-type", "f", "-exec", "dd", "if={}", "iflag=nocache", "count=0", "status=none", ";"];
    run(Command::new("find").arg(dir).args(each))
}

pub fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("can't start {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {said}");
    Ok(())
}
