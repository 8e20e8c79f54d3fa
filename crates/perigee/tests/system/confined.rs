//! A volume that may not leave its site, used by a VM at another site: nothing of it is on that site's disks.

use std::path::Path;

use super::{Checked, System, ensure, host, until, with_system};
use perigee_model::job::{ClusterVolume, JobState, NewVolume};
use perigee_model::leave_site::LeaveSite;
use perigee_model::volume::VolumeSource;

const MIB: u64 = 1 << 20;
/// No job file has it: the guest puts it together.
const MARKER: &str = "held-marker-4711";

/// The files of a host that have the marker.
fn marked(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory").flatten() {
        let path = entry.path();
        let Ok(kind) = std::fs::symlink_metadata(&path) else { continue };
        if kind.is_dir() {
            found.extend(marked(&path));
        } else if kind.is_file() && has_marker(&path) {
            found.push(path.display().to_string());
        }
    }
    found
}

/// grep reads holes fast, and does not keep a disk in memory.
fn has_marker(path: &Path) -> bool {
    let found =
        std::process::Command::new("grep").args(["-q", "-a", "-F", MARKER]).arg(path).status();
    found.expect("grep runs").success()
}

fn write_job(volume: &str) -> String {
    format!(
        "name: fill-{volume}\nimage: debian\nmemory: 256MiB\nplacement: {{host: home1, move: never}}\n\
         volumes: [{{volume: {volume}}}]\n\
         command: for n in $(seq 4000); do echo held-marker-$((4700 + 11)); done > /data/text; sync\n"
    )
}

/// Copies the volume's text to its root disk and its output, and then waits until its seed begins with an S.
fn read_job(volume: &str) -> String {
    format!(
        "name: read-{volume}\nimage: debian\nmemory: 256MiB\nplacement: {{host: cloud1, move: auto}}\n\
         volumes: [{{volume: {volume}, access: read}}]\n\
         command: |\n  set -eu\n  seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)\n  \
         cp /data/text /output/text; cp /data/text /var/text; sync; tail -1 /var/text\n  \
         echo \"$(wc -l < /var/text)/4000 $(tail -1 /var/text)\" > $PERIGEE_PROGRESS\n  \
         while [ \"$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)\" != S ]; do\n    \
         sleep 0.2\n  done\n"
    )
}

async fn make(system: &System, name: &str, leave_site: LeaveSite) -> Checked<()> {
    let new = NewVolume {
        name: name.parse().expect("a name"),
        host: Some(host("home1")),
        size_bytes: Some(64 * MIB),
        source: VolumeSource::Empty,
        leave_site,
    };
    let made: ClusterVolume = system.post("/v1/volumes", &new).await?;
    ensure!(made.leave_site == leave_site, "{made:?}");
    let job = system.submit(&write_job(name)).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
    Ok(())
}

/// Runs the reading job at cloud1. Returns the files there that have the marker while it runs.
async fn marked_while_read(system: &System, volume: &str) -> Checked<Vec<String>> {
    let job = system.submit(&read_job(volume)).await?;
    until("the job to have copied the text", async || {
        let now = system.job(&job.id).await?;
        ensure!(!now.state.is_final(), "{:?}: {}", now.state, now.reason);
        Ok(now.progress.is_some_and(|progress| progress.done == 4000).then_some(()))
    })
    .await?;
    let found = marked(&system.host_file("cloud1", ""));
    if volume == "secret" {
        refuses_what_would_carry_it(system, job.id.as_str())?;
        let volumes: Vec<ClusterVolume> = system.get("/v1/volumes").await?;
        let own = volumes.iter().filter(|one| one.name.as_str().starts_with(job.id.as_str()));
        for own in own.filter(|one| !one.name.as_str().ends_with("-seed")) {
            ensure!(own.home == host("home1") && own.leave_site.is_never(), "{own:?}");
        }
    }
    system.stop_writer(&job.id).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
    ensure!(job.outputs.is_some_and(|outputs| outputs.bytes > 0), "the controller is at that site");
    Ok(found)
}

fn refuses_what_would_carry_it(system: &System, job: &str) -> Checked<()> {
    for args in [
        &["volume", "move", "secret", "cloud1"][..],
        &["vm", "move", job, "home1"],
        &["volume", "update", "secret", "--leave-site", "allowed"],
    ] {
        let refused = system.perigee(args);
        let said = String::from_utf8_lossy(&refused.stderr);
        ensure!(!refused.status.success(), "{args:?} was done");
        let named = said.contains("leave-site: never") || said.contains("--yes");
        ensure!(named, "{args:?}: {said}");
    }
    Ok(())
}

#[test]
fn a_vm_elsewhere_leaves_nothing_of_a_confined_volume_on_the_disks_there() {
    with_system(async |system| {
        make(&system, "secret", LeaveSite::Never).await?;
        let found = marked_while_read(&system, "secret").await?;
        ensure!(found.is_empty(), "{found:?}");
        let found = marked(&system.host_file("cloud1", ""));
        ensure!(found.is_empty(), "after its end: {found:?}");
        ensure!(!marked(&system.host_file("home1", "pool")).is_empty(), "it is at its home");
        // The scan finds what is there: the same job with a volume that may leave.
        make(&system, "free", LeaveSite::Allowed).await?;
        let found = marked_while_read(&system, "free").await?;
        ensure!(!found.is_empty(), "the scan finds nothing where there is something");
        Ok(())
    });
}
