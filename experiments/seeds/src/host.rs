//! The cell of the host itself: all programs without a VM, and TPC-H also with its database on iSCSI disks at the site's target. QEMU's storage
//! daemon is the initiator, since this machine's kernel may have none: it shows each disk as a file, which is mounted.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_lab::bare::{Running, nbd};
use perigee_lab::measuring::load_1min;

use crate::bench::Bench;
use crate::cell::{Cell, Kind, VM_COUNT};
use crate::dilation::Pace;
use crate::domain0::{self, run};
use crate::found::{self, Outputs};
use crate::gang::now_ms;
use crate::iscsi::{Disk, Targets};
use crate::results::{Measured, Side, Work};

const DEADLINE: Duration = Duration::from_secs(30);

/// iSCSI disks, mounted on the host. They are unmounted when this is dropped.
struct Mounted {
    files: Vec<PathBuf>,
    dirs: Vec<PathBuf>,
    _daemon: Running,
}

impl Mounted {
    async fn new(bench: &Bench<'_>, disks: &[Disk], dir: &Path) -> Result<Self> {
        let address = nbd::address(bench.lab, &bench.targets[0])?;
        let mut line = vec!["qemu-storage-daemon".to_owned()];
        let mut files = Vec::new();
        for (number, disk) in disks.iter().enumerate() {
            let file = dir.join(format!("disk-{number}"));
            std::fs::write(&file, "")?;
            line.push("--blockdev".to_owned());
            line.push(format!("driver=iscsi,node-name=d{number},transport=tcp,portal={address}:{},target={},lun=0", disk.port, disk.iqn));
            line.push("--export".to_owned());
            line.push(format!(
                "type=fuse,id=e{number},node-name=d{number},writable=on,mountpoint={}",
                file.display()
            ));
            files.push(file);
        }
        let server = bench.servers(0)?.remove(0);
        let log = dir.join("storage-daemon.log");
        let daemon = Running::start(bench.lab, &server, &line, &log)?;
        let mut mounted = Self { files, dirs: Vec::new(), _daemon: daemon };
        let end = Instant::now() + DEADLINE;
        for number in 0..mounted.files.len() {
            let file = mounted.files[number].clone();
            while std::fs::metadata(&file)?.len() == 0 {
                let said = || std::fs::read_to_string(&log).unwrap_or_default();
                ensure!(Instant::now() < end, "no disk after {DEADLINE:?}: {}", said());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let to = dir.join(format!("mount-{number}"));
            std::fs::create_dir(&to)?;
            run(Command::new("mount").args(["-t", "ext4", "-o", "loop"]).arg(&file).arg(&to))?;
            mounted.dirs.push(to.clone());
            // In the guests that made it, the user may have had another number.
            run(Command::new("chown").args(["-R", "postgres:"]).arg(to.join("pg")))?;
        }
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for path in self.dirs.iter().chain(&self.files) {
            // What was never mounted can't be unmounted.
            drop(Command::new("umount").arg("-l").arg(path).output());
        }
    }
}

impl Bench<'_> {
    /// Measures the programs on the host itself. If the disks over iSCSI can't be had, the cell says so.
    ///
    /// # Errors
    /// A program is missing or fails.
    pub async fn host(
        &mut self,
        cell: Cell,
        pace: Pace,
        works: &[Work],
        targets: &mut Targets,
    ) -> Result<Measured> {
        let step = self.steps.begin(cell.to_string());
        self.set_network(cell, pace).await?;
        let (load_1min, at_ms) = (load_1min()?, now_ms()?);
        // PostgreSQL runs as another user.
        let dir = tempfile::Builder::new().prefix("perigee-seeds").tempdir()?;
        run(Command::new("chmod").arg("755").arg(dir.path()))?;
        let mut measured = Measured {
            cell,
            at_ms,
            load_1min,
            fixed_s: None,
            clock: 1.0,
            runs: Vec::new(),
            moved: None,
            lacks: Vec::new(),
        };
        let mut words: Vec<String> =
            works.iter().map(|work| format!("{}:near", work.name())).collect();
        let mut databases = Vec::new();
        let mut disks = Vec::new();
        let mut mounted = None;
        if works.contains(&Work::Tpch) {
            databases.push((Side::Near.name(), self.host_databases(dir.path())?));
            for _ in 0..VM_COUNT {
                disks.push(targets.clone_at(Kind::IscsiPerigee, Side::Near)?);
            }
            match Mounted::new(self, &disks, dir.path()).await {
                Ok(these) => {
                    databases.push((Side::Far.name(), these.dirs.clone()));
                    words.push("tpch:far".to_owned());
                    mounted = Some(these);
                }
                Err(error) => {
                    measured.lacks.push(format!("TPC-H on the host over iSCSI: {error:#}."))
                }
            }
        }
        let from = domain0::From {
            programs: &self.scratch.join("programs"),
            mining: &self.scratch,
            databases: &databases,
        };
        let outputs = domain0::measure(from, &words.join(" "))?;
        let is_mounted = mounted.take().is_some();
        for disk in &disks {
            targets.delete(disk)?;
        }
        let outputs = Outputs(&outputs);
        let marks = outputs.marks(0)?;
        let far = [Work::Tpch].into_iter().filter(|_| is_mounted).map(|work| (work, Side::Far));
        for (work, side) in works.iter().map(|work| (*work, Side::Near)).chain(far) {
            let label = found::label(work, side);
            let (began, ended) =
                *marks.get(&label).with_context(|| format!("{label} is missing"))?;
            let mut run =
                found::run(&self.right, (work, side, ended - began), outputs, &[], VM_COUNT)?;
            run.guests = Vec::new();
            measured.runs.push(run);
        }
        self.free_network().await?;
        step.done("");
        Ok(measured)
    }

    /// A database for each process, on the host's own disk.
    fn host_databases(&self, dir: &Path) -> Result<Vec<PathBuf>> {
        let first = dir.join("database-0");
        std::fs::create_dir(&first)?;
        let script = self.scratch.join("programs/tpch/load.sh");
        let tables = self.scratch.join("tables");
        run(Command::new("sh").arg(script).arg(tables).arg(first.join("pg")))?;
        let mut all = vec![first.clone()];
        for rank in 1..VM_COUNT {
            let to = dir.join(format!("database-{rank}"));
            run(Command::new("cp").arg("-a").arg(&first).arg(&to))?;
            all.push(to);
        }
        Ok(all)
    }
}
