//! A volume that may not leave its site, used by a VM at another site: nothing of it is on that site's disks. Used by a job with several VMs:
//! they reach each other, and nothing of it is on the WAN.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;

use super::gangs::log_of;
use super::{Checked, System, ensure, host, until, with_system};
use perigee_lab::capture::Capture;
use perigee_model::JobId;
use perigee_model::job::{ClusterVolume, JobState, MigrationState, NewVolume};
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

/// Copies the volume's text to its root disk and its output, and then reads it again and again until its seed begins with an S.
fn read_job(volume: &str) -> String {
    format!(
        "name: read-{volume}\nimage: debian\nmemory: 256MiB\nplacement: {{host: cloud1, move: auto}}\n\
         volumes: [{{volume: {volume}, access: read}}]\n\
         command: |\n  set -eu\n  seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)\n  \
         cp /data/text /output/text; cp /data/text /var/text; sync; tail -1 /var/text\n  \
         n=$(wc -l < /var/text)\n  \
         while [ \"$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)\" != S ]; do\n    \
         echo \"$n/1000000 $(tail -1 /data/text)\" > $PERIGEE_PROGRESS; n=$((n+1))\n    \
         echo 3 > /proc/sys/vm/drop_caches; sleep 0.2\n  done\n"
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
        Ok(now.progress.is_some_and(|progress| progress.done >= 4000).then_some(()))
    })
    .await?;
    if volume == "secret" {
        refuses_what_would_carry_it(system)?;
        goes_home_and_back(system, &job.id).await?;
    }
    let found = marked(&system.host_file("cloud1", ""));
    if volume == "secret" {
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

/// Its memory crosses the WAN, where a listener sees nothing of the data.
async fn goes_home_and_back(system: &System, id: &JobId) -> Checked<()> {
    let site = "cloud".parse().expect("a name");
    let wan = Capture::begin(&system.lab.definition.site_namespace(&site), &[MARKER])?;
    for to in ["home1", "cloud1"] {
        let migration = system.begin_move(&system.job(id).await?, to).await?;
        let migration = system.migration_ended(id, &migration).await?;
        ensure!(migration.state == MigrationState::Completed, "to {to}: {}", migration.error);
        system.progresses(id, 2).await?;
    }
    let wan = wan.end()?;
    ensure!(wan.bytes > 8 * MIB && wan.found == [0], "{wan:?}");
    Ok(())
}

fn refuses_what_would_carry_it(system: &System) -> Checked<()> {
    for args in [
        &["volume", "move", "secret", "cloud1"][..],
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

/// One VM sends the text to the other one. Both try to reach the address, also by a way that they make themselves.
fn pair_job(volume: &str, outside: Ipv4Addr, more: &str) -> String {
    format!(
        "name: pair\nimage: debian\nmemory: 200MiB\ncount: 2\napart: pair\ntimeout: 3m\n{more}\
         volumes: [{{volume: {volume}, access: read}}]\ncommand:\n  - /bin/sh\n  - -c\n  - |\n    \
         if [ $PERIGEE_RANK = 0 ]; then\n      mkfifo /tmp/open; exec 3<>/tmp/open\n      \
         busybox nc -l -p 7000 <&3 > /output/heard\n      sort /output/heard | uniq -c\n    else\n      \
         until busybox nc n0 7000 < /data/text 2>/dev/null; do sleep 1; done\n    fi\n    \
         card=$(ls /sys/class/net | grep -v '^lo$')\n    \
         for way in given made; do\n      \
         ! busybox ping -c 1 -W 2 {outside} >/dev/null 2>&1 || echo a way out is $way\n      \
         busybox ip route add {outside} dev $card 2>/dev/null || true\n    done\n"
    )
}

/// Each VM is at its own host of the site. A listener at a VM's host sees what the VMs say, and one at the other site sees nothing.
async fn is_used_by_several_vms(system: &System) -> Checked<()> {
    let lab = &system.lab.definition;
    let listens = |namespace: &str| Capture::begin(namespace, &[MARKER]);
    let (inside, wan) = (
        listens(&lab.host_namespace(&host("home1")))?,
        listens(&lab.site_namespace(&"cloud".parse().expect("a name")))?,
    );
    let outside = lab.host_address(&host("cloud1")).expect("an address");
    let job = system.submit(&pair_job("secret", outside, "")).await?;
    let job = system.ended(&job.id).await?;
    let logs =
        [log_of(system, job.id.as_str(), 0).await?, log_of(system, job.id.as_str(), 1).await?];
    ensure!(job.state == JobState::Succeeded, "{:?}: {}; {logs:?}", job.state, job.reason);
    let heard: Vec<&str> = logs[0].iter().map(|line| line.trim()).collect();
    ensure!(heard == [format!("4000 {MARKER}")] && logs[1].is_empty(), "{logs:?}");
    let hosts: BTreeSet<_> = job.members.iter().filter_map(|one| one.host.clone()).collect();
    ensure!(hosts == BTreeSet::from([host("home1"), host("home2")]), "{:?}", job.members);
    let (inside, wan) = (inside.end()?, wan.end()?);
    ensure!(inside.found[0] > 0, "the listener hears nothing where there is something: {inside:?}");
    ensure!(wan.frames > 0 && wan.found == [0], "on the WAN: {wan:?}");
    let found = marked(&system.host_file("cloud1", ""));
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

/// One of the two is at the other site, because one host of the data's site takes no VMs.
async fn is_used_by_a_vm_elsewhere(system: &System) -> Checked<()> {
    let lab = &system.lab.definition;
    let wan = Capture::begin(&lab.site_namespace(&"cloud".parse().expect("a name")), &[MARKER])?;
    let outside = lab.host_address(&host("home2")).expect("an address");
    system.does(&["host", "drain", "home2"])?;
    let more = "ranks: {leave-site: allowed}\n";
    let job = system.submit(&pair_job("secret", outside, more)).await?;
    let job = system.ended(&job.id).await?;
    system.does(&["host", "undrain", "home2"])?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
    let hosts: BTreeSet<_> = job.members.iter().filter_map(|one| one.host.clone()).collect();
    ensure!(hosts == BTreeSet::from([host("home1"), host("cloud1")]), "{:?}", job.members);
    ensure!(job.outputs.is_some_and(|outputs| outputs.bytes > 0), "rank 0 heard nothing");
    let wan = wan.end()?;
    ensure!(wan.frames > 0 && wan.found == [0], "on the WAN: {wan:?}");
    let found = marked(&system.host_file("cloud1", ""));
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

#[test]
fn nothing_of_a_confined_volume_is_at_another_site() {
    with_system(async |system| {
        make(&system, "secret", LeaveSite::Never).await?;
        let found = marked_while_read(&system, "secret").await?;
        ensure!(found.is_empty(), "{found:?}");
        let found = marked(&system.host_file("cloud1", ""));
        ensure!(found.is_empty(), "after its end: {found:?}");
        ensure!(!marked(&system.host_file("home1", "pool")).is_empty(), "it is at its home");
        is_used_by_several_vms(&system).await?;
        is_used_by_a_vm_elsewhere(&system).await?;
        // The scan finds what is there: the same job with a volume that may leave.
        make(&system, "free", LeaveSite::Allowed).await?;
        let found = marked_while_read(&system, "free").await?;
        ensure!(!found.is_empty(), "the scan finds nothing where there is something");
        Ok(())
    });
}
