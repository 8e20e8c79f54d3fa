//! A VM with random bytes in its memory that migrates.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use perigee_lab::Lab;
use perigee_lab::bare::Machine;
use perigee_lab::cluster::Cluster;
use perigee_lab::usage::Usage;
use perigee_model::job::{Job, JobState, Migration, MigrationState, MoveVm};
use perigee_model::{HostId, ImageName, VmId, job_file};

use crate::DEADLINE;

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Boots it, and waits until its memory has the bytes.
pub async fn boot(lab: &Lab, image: &Path, at: &HostId, bytes: u64) -> Result<VmId> {
    let cluster = Cluster::new(lab)?;
    let disk = std::path::absolute(image.join("debian-pg.raw"))?;
    cluster.import_image(&ImageName::new("debian")?, &disk).await?;
    let memory_mib = (bytes >> 20) + 192;
    let text = format!(
        "name: full\nimage: debian\nmemory: {memory_mib}MiB\nplacement: {{host: {at}, move: never}}\n\
         command: |\n  set -e\n  mkdir -p /mnt/memory; mount -t tmpfs -o size={bytes} tmpfs /mnt/memory\n  \
         head -c {bytes} /dev/urandom > /mnt/memory/random\n  \
         echo \"1/1 full\" > $PERIGEE_PROGRESS\n  sleep 100000\n"
    );
    let job = cluster.submit(&job_file::parse(&text, "full.yaml")?.spec).await?;
    let deadline = Instant::now() + DEADLINE;
    let client = lab.client(Duration::from_secs(30))?;
    while Instant::now() < deadline {
        let now: Job = client.get(&format!("/v1/jobs/{}", job.id)).await?;
        ensure!(!now.state.is_final(), "the job has ended: {}", now.reason);
        let is_full = now.progress.is_some_and(|progress| progress.done == 1);
        if now.state == JobState::Running && is_full {
            return Ok(VmId::new(job.id.as_str())?);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    bail!("the guest has not filled its memory within {DEADLINE:?}")
}

/// Moves it to the second host. Returns bytes, seconds, and the CPU seconds of both QEMUs and of what encrypts beside them.
pub async fn there(lab: &Lab, vm: &VmId, [from, to]: &[HostId; 2]) -> Result<(u64, f64, f64)> {
    let cluster = Cluster::new(lab)?;
    let source = Machine::of(lab, from, vm)?.1;
    let before = Usage::of(source)?.cpu_s;
    let wish = MoveVm { host: to.clone(), volumes: Default::default(), confirmed: false };
    let asked = cluster.ask_to_move(vm, &wish).await?;
    // These processes end with the migration, so their figures are read meanwhile.
    let last = async {
        let (mut last, mut tunnels) = (before, BTreeMap::new());
        while let Ok(usage) = Usage::of(source) {
            last = usage.cpu_s;
            look_at_tunnels(lab, &mut tunnels)?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok::<f64, anyhow::Error>(last + tunnels.values().sum::<f64>())
    };
    let (moved, last) = tokio::join!(cluster.moved(&asked), last);
    let moved = completed(moved?)?;
    let destination = Usage::of(Machine::of(lab, to, vm)?.1)?.cpu_s;
    let prepare_ms = moved.phases.prepare.map_or(0, |prepare| prepare.total_ms());
    let millis = u32::try_from(moved.total_ms.saturating_sub(prepare_ms))?;
    Ok((moved.bytes, f64::from(millis) / 1e3, last? - before + destination))
}

/// The CPU seconds of each process of this lab that encrypts a migration.
fn look_at_tunnels(lab: &Lab, seen: &mut BTreeMap<u32, f64>) -> Result<()> {
    let of_lab = lab.dir().display().to_string();
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        let line = std::fs::read_to_string(path.join("cmdline")).unwrap_or_default();
        let is_one = line.contains("\0agent\0tunnel\0") && line.contains(&of_lab);
        // It may have ended meanwhile.
        if let (true, Some(pid)) = (is_one, pid)
            && let Ok(usage) = Usage::of(pid)
        {
            seen.insert(pid, usage.cpu_s);
        }
    }
    Ok(())
}

/// Moves it to where it was.
pub async fn back(lab: &Lab, vm: &VmId, [from, _]: &[HostId; 2]) -> Result<()> {
    let cluster = Cluster::new(lab)?;
    let wish = MoveVm { host: from.clone(), volumes: Default::default(), confirmed: false };
    let asked = cluster.ask_to_move(vm, &wish).await?;
    completed(cluster.moved(&asked).await?).map(drop)
}

fn completed(moved: Migration) -> Result<Migration> {
    ensure!(moved.state == MigrationState::Completed, "the move ended so: {}", moved.error);
    Ok(moved)
}
