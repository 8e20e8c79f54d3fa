//! A VM with much data of its own on its root disk is moved with it, and back.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_lab::bare::{Machine, wait_for_console};
use perigee_lab::measuring::load_1min;
use perigee_model::job::{JobSpec, JobState, MigrationState, MoveVm, Sample};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, VmId};

use crate::bench::Bench;
use crate::case::BEGUN;
use crate::results::{Direction, DiskMove, System, Written, float};

/// The size of the root disk.
pub const ROOT_BYTES: u64 = 4 << 30;
/// The guest writes from here on, which is beyond the image.
const FIRST_MIB: u64 = 1024;
/// And from here on while it is moved.
const AFTER_MIB: u64 = 3200;
pub const FILL_DEADLINE: Duration = Duration::from_secs(300);
/// How long the VM stays at its destination before it moves back. What it writes meanwhile is much more than what it
/// writes between two samples.
const STAY: Duration = Duration::from_secs(30);

/// The guest fills its disk, and then writes 1 MiB a second of it.
pub fn command(overlay_bytes: u64) -> Vec<String> {
    let script = format!(
        "set -eu\n\
         for d in /sys/block/vd*; do [ \"$(cat \"$d/serial\")\" != root ] || disk=/dev/${{d##*/}}; done\n\
         head -c 3000 /dev/urandom | base64 -w 0 >/tmp/line\n\
         yes \"$(cat /tmp/line)\" | head -c {overlay_bytes} | \
         dd of=\"$disk\" bs=1M seek={FIRST_MIB} iflag=fullblock oflag=direct conv=notrunc status=none\n\
         head -c 1M /dev/urandom >/tmp/more; sync\n\
         echo '{BEGUN}' >/dev/console\n\
         n=0; while sleep 1; do \
         dd if=/tmp/more of=\"$disk\" bs=1M seek=$(({AFTER_MIB} + n % 512)) oflag=direct conv=notrunc status=none; \
         n=$((n + 1)); done\n"
    );
    vec!["sh".to_owned(), "-c".to_owned(), script]
}

/// Moves a VM there and back, with its disk coming after it. Returns the moves and the VM's command line.
pub async fn measure(bench: &Bench<'_>, overlay_bytes: u64) -> Result<(Vec<DiskMove>, Machine)> {
    let mib = overlay_bytes >> 20;
    let mut step = bench.step(format!("a VM with {mib} MiB on its disk: fill"));
    let name = bench.unique("moves");
    let spec = JobSpec {
        root_bytes: Some(ROOT_BYTES),
        outputs: Vec::new(),
        ..bench.job(&name, command(overlay_bytes), &bench.near, None)
    };
    let job = bench.cluster.submit(&spec).await?;
    let running = bench.cluster.wait(&job.id, JobState::Running, &mut step).await?;
    let vm = running.vm.clone().context("a running job has a VM")?;
    let (machine, _) = Machine::of(bench.lab, &bench.near, &vm)?;
    let home = bench.lab.dir().join("hosts").join(bench.near.as_str());
    let console = home.join("agent/vms").join(vm.as_str()).join("run/console.log");
    wait_for_console(&console, BEGUN, FILL_DEADLINE).await?;
    step.done("");
    let mut moves = Vec::new();
    for (direction, to) in [(Direction::There, &bench.far), (Direction::Back, &bench.near)] {
        let step = bench.step(format!("a VM with {mib} MiB on its disk: move to {to}"));
        let mut moved = one(bench, &vm, to, direction, overlay_bytes).await?;
        if direction == Direction::Back {
            moved.written_since = written(&bench.cluster.samples(&job.id).await?, &bench.far);
        }
        step.done(&format!(
            "runs after {:.1} s, complete after {:.1} s, pause {:.0} ms",
            moved.runs_after_ms / 1e3,
            moved.complete_after_ms / 1e3,
            moved.pause_ms
        ));
        moves.push(moved);
        tokio::time::sleep(STAY).await;
    }
    bench.cluster.cancel(&job.id).await?;
    Ok((moves, machine))
}

async fn one(
    bench: &Bench<'_>,
    vm: &VmId,
    to: &HostId,
    direction: Direction,
    overlay_bytes: u64,
) -> Result<DiskMove> {
    let load_1min = load_1min()?;
    let before = bench.wan_bytes();
    let wish = MoveVm { host: to.clone(), volumes: VolumesOnMove::Follow, confirmed: false };
    let asked = Instant::now();
    let migration = bench.cluster.ask_to_move(vm, &wish).await?;
    let migration = bench.cluster.moved(&migration).await?;
    let runs_after_ms = asked.elapsed().as_secs_f64() * 1e3;
    let wan_bytes_running = bench.wan_bytes_since(before);
    ensure!(
        migration.state == MigrationState::Completed,
        "the migration to {to} ended so: {}",
        migration.error
    );
    bench.cluster.volumes_followed(vm, to).await?;
    Ok(DiskMove {
        system: System::Perigee,
        direction,
        overlay_bytes,
        runs_after_ms,
        complete_after_ms: asked.elapsed().as_secs_f64() * 1e3,
        pause_ms: float(migration.downtime_ms),
        memory_bytes: migration.bytes,
        wan_bytes_running,
        wan_bytes_complete: bench.wan_bytes_since(before),
        written_since: None,
        load_1min,
        perigee: String::new(),
    })
}

/// What the VM wrote to its disks while it was at a host, by the samples of its counters. They only grow, on whatever
/// host the VM is. So what lies between the first and the last sample of this host was written there, and what lies
/// between the samples of the other host around them is all that can have been.
fn written(samples: &[Sample], host: &HostId) -> Option<Written> {
    let bytes = |at: usize| samples.get(at).map(|sample| sample.io.write_bytes);
    let first = samples.iter().position(|sample| sample.host == *host)?;
    let last = samples.iter().rposition(|sample| sample.host == *host)?;
    let between = |from: usize, to: usize| Some(bytes(to)?.saturating_sub(bytes(from)?));
    Some(Written {
        least_bytes: between(first, last)?,
        most_bytes: between(first.checked_sub(1)?, last + 1)?,
    })
}
