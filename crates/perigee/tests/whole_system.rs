//! The whole system with real processes: a lab of three hosts in two sites, real QEMU guests.
//!
//! Each test has a lab of its own and takes it down. They run one after the other (`make test`).

mod patience;
mod system;
mod walk;

use perigee_http::Client;
use perigee_lab::wan;
use perigee_model::ProblemKind;
use perigee_model::job::{
    ClusterImage, ClusterVolume, Host, HostState, JobState, MigrationState, Sample, Vm,
};
use perigee_model::persistent_vm::VmState;
use perigee_model::plan::{Decision, Way};
use perigee_model::replica::Replica;
use perigee_model::volume::ImageInfo;
use perigee_model::volume_move::VolumesOnMove;

use system::{ensure, kill_9, succeeded, until, with_system, with_system_of, writer_job};

const MIB: u64 = 1 << 20;

#[test]
fn a_job_runs_and_what_is_wrong_is_said_plainly() {
    with_system(async |system| {
        system.volume("data", "cloud1", 64 * MIB).await?;
        let job = system
            .submit(
                "name: hello\nimage: debian\nmemory: 256MiB\nvolumes: [{volume: data}]\n\
                 placement: {host: home1, move: never}\n\
                 command: |\n  \
                   echo to the log; echo kept > /data/file; echo result > /output/answer\n  \
                   echo reports: $(cut -c 6 /sys/bus/virtio/drivers/virtio_balloon/virtio*/features)\n",
            )
            .await?;
        let job = system.ended(&job.id).await?;
        ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
        ensure!(job.exit_code == Some(0), "exit code {:?}", job.exit_code);
        ensure!(job.measured_s.is_some() && job.predicted.is_some(), "no figures: {job:?}");
        let log = system.log(&job.id).await?;
        ensure!(log.iter().any(|l| l == "to the log"), "the log is {log:?}");
        // Bit 5 of the balloon's features (VIRTIO_BALLOON_F_REPORTING).
        ensure!(log.iter().any(|l| l == "reports: 1"), "it keeps its free memory: {log:?}");
        output_arrives(&system, job.id.as_str())?;

        let job = system
            .submit(
                "name: second\nimage: debian\nmemory: 256MiB\nvolumes: [{volume: data}]\n\
                 root: 3GiB\nplacement: {site: cloud}\n\
                 command: cat /data/file; df --output=size -B1M / | tail -n 1; exit 3",
            )
            .await?;
        let job = system.ended(&job.id).await?;
        ensure!(job.state == JobState::Failed, "exit 3 is a failure, not {:?}", job.state);
        ensure!(job.exit_code == Some(3), "exit code {:?}", job.exit_code);
        let log = system.log(&job.id).await?;
        ensure!(log.iter().any(|l| l == "kept"), "the volume did not keep it: {log:?}");
        let root_mib = log.iter().find_map(|line| line.trim().parse::<u32>().ok());
        ensure!(root_mib.is_some_and(|mib| mib > 2560), "the root disk did not grow: {log:?}");

        let job = system
            .submit(
                "name: panics\nimage: debian\nmemory: 256MiB\nplacement: {host: home1}\n\
                 command: echo c > /proc/sysrq-trigger",
            )
            .await?;
        let job = system.ended(&job.id).await?;
        ensure!(job.state == JobState::Failed, "a panic is a failure, not {:?}", job.state);
        ensure!(job.reason.contains("the guest's kernel panicked"), "{}", job.reason);

        nothing_is_open_to_other_users(&system)?;
        errors_are_clear(&system)?;
        let stopped = system::parts::Stopped::begin(&system, "cloud1").await?;
        a_gone_host_is_named(&system).await?;
        stopped.outlasts_a_lost_host(&system).await
    });
}

#[test]
fn a_job_has_its_inputs_and_the_next_one_the_same() {
    with_system(async |system| system::inputs::a_job_has_its_inputs(&system).await);
}

#[test]
fn a_job_that_begins_anew_sees_nothing_of_what_it_had_written() {
    with_system(async |system| system::inputs::a_retry_starts_clean(&system).await);
}

/// QEMU's users pass through some directories, and dnsmasq's group through that of the networks.
fn nothing_is_open_to_other_users(system: &system::System) -> system::Checked<()> {
    let lab = system.lab.dir();
    let open = walk::open_to_others(lab, |dir| {
        let parts = dir.strip_prefix(lab).into_iter().flatten();
        let parts: Vec<_> = parts.map(|part| part.to_str().unwrap_or_default()).collect();
        matches!(
            parts[..],
            [] | ["hosts"]
                | ["hosts", _]
                | ["hosts", _, "agent"]
                | ["hosts", _, "vms", ..]
                | ["hosts", _, "agent", "vms" | "networks"]
                | ["hosts", _, "agent", "vms", _]
        )
    });
    ensure!(open.is_empty(), "{}", open.join(", "));
    Ok(())
}

fn output_arrives(system: &system::System, job: &str) -> system::Checked<()> {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let to = scratch.path().to_string_lossy().into_owned();
    let fetched = system.perigee(&["job", "output", job, "--to", &to]);
    ensure!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
    let answer = std::fs::read_to_string(scratch.path().join("output/answer")).unwrap_or_default();
    ensure!(answer == "result\n", "the output holds {answer:?}");
    Ok(())
}

fn errors_are_clear(system: &system::System) -> system::Checked<()> {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let wrong = scratch.path().join("wrong.yaml");
    std::fs::write(&wrong, "image: debian\ncommand: \"true\"\nmemroy: 1GiB\n").expect("written");
    let text = scratch.path().join("notes.txt");
    std::fs::write(&text, "this is no disk image\n").expect("written");
    let wrong = wrong.to_string_lossy();
    let text = text.to_string_lossy();
    let cases: [(&[&str], i32, &str); 7] = [
        (&["job", "submit", &wrong], 3, "memroy"),
        (&["job", "plan", &wrong], 255, ":3"),
        (&["job", "status", "nothing-0001"], 4, "nothing-0001"),
        (&["job", "log", "-f", "nothing-0001"], 2, "--follow"),
        (&["image", "import", "notes", &text], 3, "notes"),
        (&["volume", "create", "x", "--image", "nothing", "--host", "home1"], 4, "nothing"),
        (&["volume", "create", "data", "--size", "1GiB"], 5, "data"),
    ];
    for (args, code, word) in cases {
        let output = system.perigee(args);
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(code), "{args:?}: {:?}: {said}", output.status);
        ensure!(said.contains(word), "{args:?} does not name {word:?}: {said}");
    }
    let unknown = system.qemu_io("home1", "nothing", "read 0 512");
    ensure!(!unknown.status.success(), "an export that does not exist opened");
    let said = String::from_utf8_lossy(&unknown.stderr);
    ensure!(said.contains("nothing"), "the server does not say which export: {said}");
    Ok(())
}

async fn a_gone_host_is_named(system: &system::System) -> system::Checked<()> {
    let namespace = system.lab.definition.host_namespace(&system::host("home2"));
    let cut = std::process::Command::new("ip")
        .args(["-n", &namespace, "link", "set", "eth0", "down"])
        .status()
        .expect("ip runs");
    ensure!(cut.success(), "the host could not be cut off");
    until("home2 to be unreachable", async || {
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        let home2 = hosts.iter().find(|known| known.id == system::host("home2"));
        Ok(home2.filter(|home2| home2.state == HostState::Unreachable).map(drop))
    })
    .await?;
    let hosts = command(system, &["host", "list"])?;
    let gone = hosts.lines().filter(|line| line.contains("unreachable"));
    ensure!(gone.clone().all(|line| !line.contains("home1")), "another host is gone:\n{hosts}");
    ensure!(gone.count() > 0, "no host is gone:\n{hosts}");
    let output = system.perigee(&["volume", "create", "lost", "--size", "1MiB", "--host", "home2"]);
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(7), "{:?}: {said}", output.status);
    ensure!(said.contains("home2"), "{said}");
    Ok(())
}

#[test]
fn ten_migrations_under_writes_lose_no_byte_and_leave_one_writer() {
    with_system(async |system| {
        let first = system.volume("data", "cloud1", 256 * MIB).await?.epoch;
        let job = system.submit(&writer_job("home1")).await?;
        system.progresses(&job.id, 2).await?;
        let job = system.job(&job.id).await?;
        for round in 0..10 {
            let to = if round % 2 == 0 { "cloud1" } else { "home1" };
            let migration = system.begin_move(&job, to).await?;
            let ended = system.migration_ended(&job.id, &migration).await?;
            ensure!(
                ended.state == MigrationState::Completed,
                "migration {round} to {to}: {:?} {}",
                ended.state,
                ended.error
            );
            ensure!(ended.downtime_ms > 0 && ended.bytes > 0, "no figures: {ended:?}");
            system.progresses(&job.id, 2).await?;
            if round == 0 && ended.downtime_ms > 200 {
                // The pause was missing from the guest's time from then on.
                until("the guest's clock to be set", async || {
                    let console =
                        system.host_file(to, &format!("agent/vms/{}/run/console.log", job.id));
                    let console = std::fs::read_to_string(console).unwrap_or_default();
                    Ok((console.contains("ms behind and is set")).then_some(()))
                })
                .await?;
            }
            // The epoch of the first session was given up with the first migration.
            let stale = system.qemu_io("cloud1", &format!("data@{first}"), "write -P 0xff 0 4096");
            ensure!(!succeeded(&stale), "a write with an old epoch got through: {stale:?}");
        }
        a_killed_destination_changes_nothing(&system, &job).await?;
        system.stop_writer(&job.id).await?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        ensure!(log.iter().any(|l| l.starts_with("checked ")), "{log:?}");
        Ok(())
    });
}

/// A guest whose memory changes all the time, its kernel's own structures most of all, and which
/// must arrive whole: with QEMU 7.2 under TCG it takes care, see `memory` in the agent's
/// `command.rs`. One migration in four went well without that.
#[test]
fn a_guest_that_reads_without_a_pause_goes_on_after_each_migration() {
    with_system(async |system| {
        system.volume("data", "cloud1", 256 * MIB).await?;
        let job = system
            .submit(
                "name: reader\nimage: debian\nmemory: 200MiB\nvolumes: [{volume: data}]\n\
                 placement: {host: home1, move: never}\n\
                 command: |\n  \
                   disk=$(grep -lx data0 /sys/block/*/serial | cut -d/ -f4)\n  \
                   count=0\n  \
                   while dd if=/dev/$disk of=/dev/null bs=64k skip=$((count % 40 * 100)) count=100; do\n    \
                     count=$((count + 1))\n    \
                     echo $count/1000000 > $PERIGEE_PROGRESS\n  \
                   done 2> /dev/null\n",
            )
            .await?;
        system.progresses(&job.id, 1).await?;
        let job = system.job(&job.id).await?;
        for to in ["cloud1", "home1", "cloud1", "home2"] {
            let migration = system.begin_move(&job, to).await?;
            let ended = system.migration_ended(&job.id, &migration).await?;
            ensure!(ended.state == MigrationState::Completed, "to {to}: {}", ended.error);
            system.progresses(&job.id, 2).await?;
        }
        Ok(())
    });
}

/// Kills the destination's QEMU while memory is being copied: the VM goes on at the source. Over
/// the WAN, where the memory that a running guest has touched takes seconds.
async fn a_killed_destination_changes_nothing(
    system: &system::System,
    job: &perigee_model::job::Job,
) -> system::Checked<()> {
    let vm = job.vm.as_ref().expect("a running job has a VM");
    let pid_file = system.host_file("cloud1", &format!("agent/vms/{vm}/run/qemu.pid"));
    let migration = system.begin_move(job, "cloud1").await?;
    let pid = until("the destination's QEMU", async || {
        let job = system.job(&job.id).await?;
        let copying = job
            .migrations
            .iter()
            .any(|m| m.id == migration.id && m.state != MigrationState::Preparing);
        let text = std::fs::read_to_string(&pid_file).unwrap_or_default();
        Ok(text.trim().parse().ok().filter(|_| copying))
    })
    .await?;
    kill_9(pid);
    let ended = system.migration_ended(&job.id, &migration).await?;
    ensure!(ended.state == MigrationState::Aborted, "{ended:?}");
    ensure!(!ended.error.is_empty(), "an aborted migration must say why");
    system.progresses(&job.id, 3).await?;
    let after = system.job(&job.id).await?;
    ensure!(after.host == Some(system::host("home1")), "the VM is at {:?}", after.host);
    Ok(())
}

#[test]
fn a_killed_daemon_or_a_long_partition_costs_no_job() {
    with_system_of(system::parts::impatient(), async |system| {
        system.volume("data", "cloud1", 256 * MIB).await?;
        let job = system.submit(&writer_job("home1")).await?;
        system.progresses(&job.id, 2).await?;
        let job = system.job(&job.id).await?;
        let daemons = [
            ("volume", Some("home1")),
            ("volume", Some("cloud1")),
            ("agent", Some("home1")),
            ("controller", None),
        ];
        for (daemon, at) in daemons {
            system.kill_daemon(daemon, at).await?;
            system.progresses(&job.id, 3).await?;
        }
        system::parts::a_vm_goes_on_after_a_long_partition(&system, &job).await?;
        // The controller and the source's agent, in the middle of a migration.
        for (round, (daemon, at)) in
            [("controller", None), ("agent", Some("cloud1"))].into_iter().enumerate()
        {
            let to = if round == 0 { "cloud1" } else { "home1" };
            let migration = system.begin_move(&job, to).await?;
            system.kill_daemon(daemon, at).await?;
            let ended = system.migration_ended(&job.id, &migration).await?;
            let expected = match ended.state {
                MigrationState::Completed => to,
                _ => ["home1", "cloud1"][round],
            };
            system.progresses(&job.id, 3).await?;
            let now = system.job(&job.id).await?;
            ensure!(
                now.host == Some(system::host(expected)),
                "after {daemon} was killed: {ended:?}, and the VM is at {:?}",
                now.host
            );
        }
        system.stop_writer(&job.id).await?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        ensure!(log.iter().any(|l| l.starts_with("checked ")), "{log:?}");
        Ok(())
    });
}

#[test]
fn a_full_pool_stops_the_vm_until_there_is_room_and_loses_nothing() {
    with_system(async |system| {
        // The pool that goes away may be the one that the image was imported to.
        until("the other hosts' copies of the image", async || {
            let image: ClusterImage = system.get("/v1/images/debian").await?;
            Ok((image.hosts.len() == 3 && image.missing_bytes == 0).then_some(()))
        })
        .await?;
        let pool = system.host_file("cloud1", "pool");
        mount_tmpfs(&pool, "size=48m")?;
        system.kill_daemon("volume", Some("cloud1")).await?;
        until("the volume server on the small pool", async || {
            match system.volume("data", "cloud1", 256 * MIB).await {
                // The answer to an earlier try was lost, so the controller keeps the name until somebody deletes it.
                Err(error) if error.kind == ProblemKind::Conflict => {
                    system.perigee(&["volume", "delete", "data"]);
                    Err(error)
                }
                made => made.map(Some),
            }
        })
        .await?;
        let job = system
            .submit(
                "name: fill\nimage: debian\nmemory: 256MiB\nvolumes: [{volume: data}]\n\
                 placement: {host: home1, move: never}\n\
                 command: |\n\
                 \x20 set -eu\n\
                 \x20 dd if=/dev/urandom of=/tmp/part bs=1M count=16 2>/dev/null\n\
                 \x20 for i in 1 2 3 4 5 6; do cp /tmp/part /data/$i; sync; done\n\
                 \x20 echo 3 > /proc/sys/vm/drop_caches\n\
                 \x20 for i in 1 2 3 4 5 6; do cmp /tmp/part /data/$i; done\n\
                 \x20 echo all is there\n",
            )
            .await?;
        // The agent lets the VM try again now and then, so a later look may find that the VM runs.
        until("the VM to stop for want of space, with its reason", async || {
            let job = system.job(&job.id).await?;
            ensure!(!job.state.is_final(), "it ended: {:?} {}", job.state, job.reason);
            let vms: Vec<Vm> = system.get("/v1/vms").await?;
            ensure!(
                vms.iter().all(|vm| vm.status != VmState::IoError || vm.reason.contains("space")),
                "it is not said why the VM stands: {vms:?}"
            );
            Ok(vms.iter().any(|vm| vm.status == VmState::IoError).then_some(()))
        })
        .await?;
        mount_tmpfs(&pool, "remount,size=512m")?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{:?} {} {log:?}", ended.state, ended.reason);
        ensure!(log.iter().any(|l| l == "all is there"), "{log:?}");
        Ok(())
    });
}

fn mount_tmpfs(at: &std::path::Path, options: &str) -> system::Checked<()> {
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(at)
        .status()
        .expect("mount runs");
    ensure!(mounted.success(), "tmpfs with {options} at {}", at.display());
    Ok(())
}

/// There and back. On the way back the old home's volume server is killed while the new home copies from it.
#[test]
fn volumes_follow_their_vm_and_leave_nothing_behind() {
    with_system(async |system| {
        system.volume("data", "home1", 256 * MIB).await?;
        let job = system.submit(&writer_job("home1")).await?;
        system.progresses(&job.id, 2).await?;
        let job = system.job(&job.id).await?;
        for (from, to) in [("home1", "cloud1"), ("cloud1", "home1")] {
            let migration = system.begin_move_with(&job, to, VolumesOnMove::Follow).await?;
            let ended = system.migration_ended(&job.id, &migration).await?;
            ensure!(ended.state == MigrationState::Completed, "to {to}: {}", ended.error);
            if to == "home1" {
                system.first_volume_is_taken(&job, to).await?;
                system.kill_daemon("volume", Some(from)).await?;
            }
            system.volumes_followed(&job, to).await?;
            system.progresses(&job.id, 2).await?;
            system.has_no_volume_of(&job, from).await?;
        }
        system.stop_writer(&job.id).await?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        ensure!(log.iter().any(|l| l.starts_with("checked ")), "{log:?}");
        for host in ["home1", "cloud1"] {
            system.has_no_volume_of(&job, host).await?;
        }
        let data: ClusterVolume = system.get("/v1/volumes/data").await?;
        ensure!(data.home == system::host("home1"), "{data:?}");
        Ok(())
    });
}

/// Two rounds with daemons killed in between; then the home is silent, and later goes on where it was.
#[test]
fn a_volume_whose_home_is_lost_lives_on_as_its_replica() {
    with_system(async |system| {
        system.volume("data", "cloud1", 64 * MIB).await?;
        write(&system, "cloud1", "write -P 1 0 16M")?;
        let every = ["--to", "home", "--every", "10s", "--keep", "2"];
        command(&system, &[&["volume", "replicate", "data"], &every[..]].concat())?;
        replicated(&system).await?;
        write(&system, "cloud1", "write -P 2 4M 1M")?;
        for (daemon, at) in [("controller", None), ("volume", Some("cloud1"))] {
            system.kill_daemon(daemon, at).await?;
        }
        let replica = replicated(&system).await?;
        system.kill_daemon("volume", Some(replica.host.as_str())).await?;
        let shipped = shipped_bytes(&system)?;
        ensure!(shipped.contains(&(16 * MIB)) && shipped.contains(&MIB), "{shipped:?}");
        eprintln!("{}", command(&system, &["volume", "info", "data"])?);
        write(&system, "cloud1", "write -P 3 8M 64k")?;
        signal(&system, "STOP")?;
        let slow = system.perigee(&["volume", "promote", "data", "--yes"]);
        ensure!(!slow.status.success(), "a home that is silent for a moment: {slow:?}");
        until("the home to count as lost", async || {
            let hosts: Vec<Host> = system.get("/v1/hosts").await?;
            let is_lost =
                |host: &Host| host.id.as_str() == "cloud1" && host.state == HostState::Unreachable;
            Ok(hosts.iter().any(is_lost).then_some(()))
        })
        .await?;

        let asked = system.perigee(&["volume", "promote", "data"]);
        let text = String::from_utf8_lossy(&asked.stderr).into_owned();
        ensure!(!asked.status.success() && text.contains("--yes"), "{text}");
        eprintln!("{text}");
        let promoted = system.perigee(&["volume", "promote", "data", "--yes"]);
        eprintln!("{}{}", String::from_utf8_lossy(&promoted.stderr), out(&promoted));
        ensure!(promoted.status.success(), "{promoted:?}");
        let volume: ClusterVolume = system.get("/v1/volumes/data").await?;
        ensure!(volume.home == replica.host && volume.replicas.is_empty(), "{volume:?}");
        let at = volume.home.as_str();
        for read in ["read -P 1 0 4M", "read -P 2 4M 1M", "read -P 1 5M 11M"] {
            write(&system, at, read)?;
        }
        write(&system, at, "write -P 9 32M 64k")?;

        signal(&system, "CONT")?;
        let socket = system.host_file("cloud1", "volume-control.sock");
        let patience = std::time::Duration::from_secs(30);
        let old = Client::new(&format!("unix:{}", socket.display()), patience)?;
        until("the old home to give the volume up", async || {
            let images: Vec<ImageInfo> = old.get("/v1/images").await?;
            let kept = |image: &ImageInfo| image.name.as_str().starts_with("data-lost-");
            Ok(images.iter().any(kept).then_some(()))
        })
        .await?;
        until("the volume to be found from its old home", async || {
            write(&system, "cloud1", "read -P 9 32M 64k").map(Some)
        })
        .await?;
        Ok(())
    });
}

/// Of 32 MiB and a small file that was written later, only the small file is read over the WAN.
#[test]
fn a_job_at_a_replica_s_host_reads_there_what_has_not_changed_and_finds_the_newest_content() {
    with_system(async |system| {
        system.volume("data", "cloud1", 64 * MIB).await?;
        let run = async |name: &str, place: &str, command: &str| {
            let yaml = format!(
                "name: {name}\nimage: debian\nmemory: 256MiB\nvolumes: [{{volume: data, mount: /data}}]\n\
                 placement: {{{place}, move: never}}\ncommand: {command}"
            );
            let job = system.submit(&yaml).await?;
            let job = system.ended(&job.id).await?;
            ensure!(job.state == JobState::Succeeded, "{name}: {:?}: {}", job.state, job.reason);
            Ok(job)
        };
        let sums = "cd /data; sha256sum big new";
        let first = "dd if=/dev/urandom of=/data/big bs=1M count=32 && echo old > /data/new";
        run("writes", "host: cloud1", first).await?;
        let replicate = ["volume", "replicate", "data", "--to", "home", "--every", "1h"];
        command(&system, &replicate)?;
        until("the replica to be complete", async || {
            let volume: ClusterVolume = system.get("/v1/volumes/data").await?;
            let is_complete = |r: &Replica| r.points > 0 && r.behind_bytes == Some(0);
            Ok(volume.replicas.iter().any(is_complete).then_some(()))
        })
        .await?;
        let more = format!("echo newest > /data/new; sync; {sums}");
        let changes = run("changes", "host: cloud1", &more).await?;
        until("what has changed to be known", async || {
            let volume: ClusterVolume = system.get("/v1/volumes/data").await?;
            let is_behind = |r: &Replica| r.behind_bytes.is_some_and(|bytes| bytes > 0);
            Ok(volume.replicas.iter().any(is_behind).then_some(()))
        })
        .await?;

        let before = wan_bytes(&system)?;
        let reads = run("reads", "site: home", sums).await?;
        let carried_bytes = wan_bytes(&system)? - before;
        let (expected, found) = (system.log(&changes.id).await?, system.log(&reads.id).await?);
        ensure!(expected.len() == 2 && expected == found, "{expected:?}, and here {found:?}");
        let decisions: Vec<Decision> =
            system.get(&format!("/v1/jobs/{}/decisions", reads.id)).await?;
        let chosen = decisions.first().and_then(|decision| decision.plan.chosen()).cloned();
        ensure!(chosen.as_ref().is_some_and(|c| c.way == Way::Replica), "{decisions:?}");
        let samples: Vec<Sample> = system.get(&format!("/v1/jobs/{}/samples", reads.id)).await?;
        let io = samples.last().map(|sample| sample.io).unwrap_or_default();
        eprintln!("{}", command(&system, &["job", "explain", reads.id.as_str()])?);
        eprintln!("{carried_bytes} bytes over the WAN; the job's I/O: {io:?}");
        ensure!(io.replica_reads > 0 && io.network_bytes < 16 * MIB, "{io:?}");
        ensure!(carried_bytes < 24 * MIB, "{carried_bytes} bytes came over the WAN");
        Ok(())
    });
}

/// What the lab's WAN has carried in both directions.
fn wan_bytes(system: &system::System) -> system::Checked<u64> {
    let links = wan::counts(&system.lab)?;
    Ok(links.iter().flat_map(|link| &link.counts).map(|count| count.carried_bytes).sum())
}

/// Waits until the replica has all that was written.
async fn replicated(system: &system::System) -> system::Checked<Replica> {
    let mut before = None;
    until("a round of the replica", async || {
        let volume: ClusterVolume = system.get("/v1/volumes/data").await?;
        let replica = volume.replicas.into_iter().next();
        let newest = replica.filter(|r| r.behind_bytes == Some(0) && r.missing_bytes.is_none());
        let Some(newest) = newest else { return Ok(None) };
        // What was seen before may be from before the last write.
        let first = *before.get_or_insert(newest.complete_ms);
        Ok((first != newest.complete_ms).then_some(newest))
    })
    .await
}

/// What each round had to ship, as the controller's log says.
fn shipped_bytes(system: &system::System) -> system::Checked<Vec<u64>> {
    let log = system.lab.dir().join("ctl/controller.log");
    let text = std::fs::read_to_string(&log)
        .map_err(|error| perigee_model::Problem::internal(log.display().to_string(), error))?;
    let rounds = text.lines().filter_map(|line| line.split_once(" ships "));
    Ok(rounds.filter_map(|(_, rest)| rest.split(' ').next()?.parse().ok()).collect())
}

fn out(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn command(system: &system::System, args: &[&str]) -> system::Checked<String> {
    let output = system.perigee(args);
    ensure!(output.status.success(), "{args:?}: {output:?}");
    Ok(out(&output))
}

/// A command of qemu-io on the volume `data` through a host's volume server.
fn write(system: &system::System, at: &str, what: &str) -> system::Checked<()> {
    let output = system.qemu_io(at, "data", what);
    let text = out(&output);
    ensure!(system::succeeded(&output) && text.contains(" bytes at offset"), "{what}: {output:?}");
    Ok(())
}

/// To the daemons of the host cloud1.
fn signal(system: &system::System, name: &str) -> system::Checked<()> {
    for daemon in ["volume", "agent"] {
        let pid = system.lab.host_pid(&system::host("cloud1"), daemon)?;
        let args = [format!("-{name}"), pid.to_string()];
        let told = std::process::Command::new("kill").args(args).status().expect("kill runs");
        ensure!(told.success(), "{daemon} gets no {name}");
    }
    Ok(())
}
