//! A job that has more or less memory while it runs.

use perigee_model::amounts::MemoryAmount;
use perigee_model::job::{Job, MigrationState};

use super::{Checked, System, ensure, until, with_system};

const MIB: u64 = 1 << 20;

/// Its guest waits until it has its least, and then fills so much memory that it needs more.
const FILLS: &str = "\
name: fills
image: debian
memory: 160MiB..384MiB
placement: {host: home1, move: never}
command: |
  free() { sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo; }
  while [ $(free) -gt 150000 ]; do sleep 0.1; done
  echo has its least
  mkdir /fill && mount -t tmpfs -o size=300M none /fill
  head -c 140M /dev/urandom >/fill/file && echo filled
  sum=$(md5sum </fill/file)
  while sleep 1; do
    [ \"$sum\" = \"$(md5sum </fill/file)\" ] || exit 1
    count=$((count + 1))
    echo $count/1000000 >$PERIGEE_PROGRESS
  done
";

async fn shows(
    system: &System,
    job: &Job,
    what: &str,
    is_right: impl Fn(&MemoryAmount) -> bool,
) -> Checked<MemoryAmount> {
    until(what, async || {
        let shown = system.job(&job.id).await?.memory;
        Ok(shown.filter(|memory| is_right(memory)))
    })
    .await
}

#[test]
fn a_job_gets_the_memory_that_its_guest_needs_and_takes_it_along_when_it_moves() {
    with_system(async |system| gets_more_memory(&system).await);
}

async fn gets_more_memory(system: &System) -> Checked<()> {
    let job = system.submit(FILLS).await?;
    until("the guest to have its least and to fill more", async || {
        let log = system.log(&job.id).await?;
        Ok(log.iter().any(|line| line == "filled").then_some(()))
    })
    .await?;
    let is_more = |memory: &MemoryAmount| {
        memory.has_bytes.is_some_and(|has| has > 190 * MIB)
            && memory.used_bytes.is_some_and(|used| used > 170 * MIB)
    };
    let shown = shows(system, &job, "more memory", is_more).await?;
    ensure!(!shown.reason.is_empty(), "{shown:?}");
    system.progresses(&job.id, 1).await?;
    let job = system.job(&job.id).await?;
    let migration = system.begin_move(&job, "home2").await?;
    let ended = system.migration_ended(&job.id, &migration).await?;
    ensure!(ended.state == MigrationState::Completed, "{}", ended.error);
    // Its guest says there what it uses, and its memory is whole.
    shows(system, &job, "what it has there", is_more).await?;
    system.progresses(&job.id, 2).await?;
    ensure!(system.perigee(&["job", "cancel", job.id.as_str()]).status.success(), "not cancelled");
    let ended = system.ended(&job.id).await?;
    ensure!(ended.oom_kills.is_none(), "{:?}", ended.oom_kills);
    Ok(())
}
