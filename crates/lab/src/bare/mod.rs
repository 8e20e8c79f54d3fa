//! A bare QEMU that a script drives over QMP, for comparisons. It has no agent, no controller and no epochs.
//!
//! Its command line is that of Perigee's QEMU with the same guest, except for its paths and its disks.

mod disks;
mod machine;
pub mod nbd;
mod qmp;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use perigee_model::guest::{Mount, Seed};
use perigee_model::{DiskRole, HostId, Problem};

use crate::command::cannot_start;
use crate::up::Lab;

pub use disks::{Content, Disks};
pub use machine::{Machine, NETDEV};
pub use nbd::NbdServer;
pub use qmp::{Qmp, event_us};

/// The size of the seed disks that [`seed_disk`] makes.
pub const SEED_BYTES: usize = 1 << 20;

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A process that is stopped when this is dropped.
pub struct Running(Child);

impl Running {
    /// Starts a program in a host's network namespace. What it says is written to a log.
    ///
    /// # Errors
    /// The program or the log cannot be opened.
    pub fn start(lab: &Lab, host: &HostId, line: &[String], log: &Path) -> Result<Self, Problem> {
        let failed = |e| Problem::internal(format!("can't open {}", log.display()), e);
        let out = File::create(log).map_err(failed)?;
        let said = out.try_clone().map_err(failed)?;
        let namespace = lab.definition.host_namespace(host);
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{namespace}")).arg("--").args(line);
        command.stdin(Stdio::null()).stdout(out).stderr(said);
        command.spawn().map(Self).map_err(|e| cannot_start("nsenter", &e))
    }

    /// The QEMU process's id, for reading its meters in `/proc`.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// QEMU's stderr.
const LOG: &str = "qemu.log";

/// A QEMU with its monitor.
pub struct Qemu {
    pub process: Running,
    pub qmp: Qmp,
    dir: PathBuf,
}

impl Qemu {
    /// Starts QEMU at a host with a command line of [`Machine::line_for`], whose files are below `dir`.
    ///
    /// # Errors
    /// It does not start; the problem has what QEMU said.
    pub fn start(lab: &Lab, host: &HostId, line: &[String], dir: &Path) -> Result<Self, Problem> {
        let log = dir.join(LOG);
        let process = Running::start(lab, host, line, &log)?;
        let qmp = Qmp::connect(&dir.join("run/qmp.sock"));
        let qmp = qmp.map_err(|problem| with_words_of(&log, problem))?;
        Ok(Self { process, qmp, dir: dir.to_owned() })
    }

    /// The problem, and what this QEMU has said on its stderr.
    pub fn explains(&self, problem: Problem) -> Problem {
        with_words_of(&self.dir.join(LOG), problem)
    }

    /// The guest's serial console.
    pub fn console(&self) -> PathBuf {
        self.dir.join("run/console.log")
    }
}

fn with_words_of(log: &Path, problem: Problem) -> Problem {
    let said = std::fs::read_to_string(log).unwrap_or_default();
    Problem { why: format!("{}; QEMU said: {}", problem.why, said.trim()), ..problem }
}

/// Waits until the guest has written a mark to its serial console, and returns the rest of the line.
///
/// # Errors
/// `Unavailable` with the console's end after the deadline.
pub async fn wait_for_console(
    path: &Path,
    mark: &str,
    deadline: Duration,
) -> Result<String, Problem> {
    let end = Instant::now() + deadline;
    loop {
        let bytes = std::fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        // A line without its end may not be complete.
        if let Some((rest, _)) = text.split_once(mark).and_then(|(_, rest)| rest.split_once('\n')) {
            return Ok(rest.trim().to_owned());
        }
        if Instant::now() > end {
            let last: Vec<&str> = text.lines().rev().take(12).collect();
            let last: Vec<&str> = last.into_iter().rev().collect();
            let what = format!("can't go on without {mark:?} from the guest");
            let why = format!("it did not say so within {deadline:?}");
            let next = format!("{} ends so:\n    {}", path.display(), last.join("\n    "));
            return Err(Problem::unavailable(what, why).next(next));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The job of a bare VM with one data disk.
pub fn seed(job: &str, command: Vec<String>, mount: &str) -> Seed {
    let mounted = Mount { role: DiskRole::Data(0), path: mount.to_owned(), read_only: false };
    Seed {
        job: job.to_owned(),
        command,
        env: BTreeMap::new(),
        mounts: vec![mounted],
        outputs: Vec::new(),
        timeout_s: None,
        output_bytes: None,
        stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
        network: None,
        gang: None,
        collect: false,
    }
}

/// The content of a seed disk: the job, and the files of a bundle as its inputs.
///
/// # Errors
/// `Invalid` when they need more than [`SEED_BYTES`].
pub fn seed_disk(seed: &Seed, bundle: Option<&Path>) -> Result<Vec<u8>, Problem> {
    let made = |e: std::io::Error| Problem::internal("can't make a seed disk", e);
    let job = serde_json::to_vec(seed).map_err(|e| made(e.into()))?;
    let mut files = BTreeMap::new();
    if let Some(bundle) = bundle {
        let mut archive = tar::Archive::new(File::open(bundle).map_err(made)?);
        for entry in archive.entries().map_err(made)? {
            let mut entry = entry.map_err(made)?;
            let path = Path::new("inputs").join(entry.path().map_err(made)?);
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut content).map_err(made)?;
            files.insert(path, content);
        }
    }
    let mut tar = tar::Builder::new(Vec::new());
    append(&mut tar, Path::new("job.json"), &job).map_err(made)?;
    for (path, content) in &files {
        append(&mut tar, path, content).map_err(made)?;
    }
    let mut bytes = tar.into_inner().map_err(made)?;
    if bytes.len() > SEED_BYTES {
        let why = format!("it has {} bytes; the limit is {SEED_BYTES}", bytes.len());
        return Err(Problem::invalid("can't make a seed disk", why));
    }
    bytes.resize(SEED_BYTES, 0);
    Ok(bytes)
}

fn append(tar: &mut tar::Builder<Vec<u8>>, path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    // The guest sets the owner, and refuses a file without one.
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(content.len() as u64);
    tar.append_data(&mut header, path, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_disk_has_the_job_first_and_inputs_with_an_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let bundle = dir.path().join("query.tar");
        crate::demo::query_bundle(&bundle, &crate::tpch::QUERIES).expect("a bundle");
        let seed = seed("a", vec!["true".to_owned()], "/data");
        let bytes = seed_disk(&seed, Some(&bundle)).expect("a disk");
        assert_eq!(bytes.len(), SEED_BYTES);
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut paths = Vec::new();
        for entry in archive.entries().expect("entries") {
            let entry = entry.expect("an entry");
            assert!(entry.header().uid().is_ok() && entry.header().mtime().is_ok());
            paths.push(entry.path().expect("a path").display().to_string());
        }
        assert_eq!(paths[0], "job.json");
        assert!(paths.contains(&"inputs/query.sh".to_owned()), "{paths:?}");
    }
}
