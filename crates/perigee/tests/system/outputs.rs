//! Outputs of jobs that end in every way, and images of running VMs.

use std::time::Duration;

use perigee_model::data::FileEntry;
use perigee_model::job::{Job, JobState, LogLine};

use super::{Checked, System, ensure, kill_9, succeeded, until, with_system};

const MIB: u64 = 1 << 20;

impl System {
    /// A job that runs at one host and has the given command, and further fields.
    async fn output_job(&self, name: &str, more: &str, command: &str) -> Checked<Job> {
        let command = command.replace('\n', "\n  ");
        self.submit(&format!(
            "name: {name}\nimage: debian\nmemory: 256MiB\nplacement: {{host: home1, move: never}}\n\
             {more}command: |\n  {command}\n"
        ))
        .await
    }

    /// The content of one of a job's files in the repository.
    async fn output_file(&self, job: &Job, name: &str) -> Checked<String> {
        let path = format!("/v1/data/~/jobs/{}/output/{name}", job.id);
        let bytes = self.client.get_bytes(&path).await?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}

#[test]
fn a_job_that_fails_or_is_stopped_gives_its_outputs() {
    with_system(async |system| {
        fails(&system).await?;
        times_out(&system).await?;
        has_no_memory(&system).await?;
        is_cancelled(&system).await?;
        controller_is_killed(&system).await?;
        root_disk_is_saved(&system).await
    });
}

async fn fails(system: &System) -> Checked<()> {
    let more = "output: 400MiB\noutputs: [\"/output/*.csv\", /output/dev, \"none/*\"]\n";
    let command = "echo one > /output/a.csv; ln -s a.csv /output/latest.csv; echo no > /output/b.txt\n\
                   echo lost > $(printf '/output/caf\\351.csv'); truncate -s 450M /output/holes.csv\n\
                   free=$(df --output=avail -m /output | tail -n 1); [ $free -lt 400 ] || echo 'has room'\n\
                   mkfifo /output/pipe.csv; mknod /output/dev c 1 3; exit 3";
    let job = system.output_job("fails", more, command).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Failed && job.exit_code == Some(3), "{}", job.reason);
    ensure!(system.output_file(&job, "a.csv").await? == "one", "{:?}", job.outputs);
    ensure!(system.output_file(&job, "latest.csv").await? == "one", "a link is a copy");
    ensure!(system.output_file(&job, "b.txt").await.is_err(), "no pattern names it");
    let reason = "its outputs are not complete: \"output/caf\\\\xe9.csv\" (its name is not UTF-8); \
                  left out of the outputs: \"/output/dev\" (a device), \"/output/pipe.csv\" (a FIFO)";
    ensure!(job.reason.ends_with(reason) && job.left_out == 3, "{}", job.reason);
    let holes: FileEntry =
        system.get(&format!("/v1/data/~/jobs/{}/output/holes.csv?stat", job.id)).await?;
    ensure!(holes.size_bytes == 450 * MIB, "{holes:?}");
    let explained = system.perigee(&["job", "explain", job.id.as_str()]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    ensure!(explained.contains("left out: /output/pipe.csv (a FIFO)"), "{explained}");
    let log = system.log(&job.id).await?;
    ensure!(log.iter().any(|line| line == "has room"), "{log:?}");
    ensure!(log.iter().any(|line| line.contains("no file matches the output none/*")), "{log:?}");
    let dir = tempfile::tempdir().expect("a directory");
    let to = dir.path().join("files");
    let done =
        system.perigee(&["job", "output", job.id.as_str(), "--to", &to.display().to_string()]);
    ensure!(succeeded(&done), "{done:?}");
    let fetched = std::fs::read_to_string(to.join("output/a.csv")).unwrap_or_default();
    ensure!(fetched == "one\n", "{fetched:?}");
    Ok(())
}

/// The command exits with a code of its own when it is stopped. What it leaves behind heeds no SIGTERM.
async fn times_out(system: &System) -> Checked<()> {
    let command = "trap 'echo half > /output/half; exit 1' TERM\n\
                   (trap '' TERM; while :; do sleep 1; done) &\nwhile :; do sleep 1; done";
    let job = system.output_job("late", "timeout: 3s\nstop-grace: 4s\n", command).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Failed && job.exit_code == Some(1), "{job:?}");
    ensure!(
        job.reason
            == "the command ran longer than its timeout of 3s and was stopped; \
                it had not ended within its stop-grace of 4s and was killed",
        "{}",
        job.reason
    );
    ensure!(system.output_file(&job, "half").await? == "half", "{:?}", job.outputs);
    Ok(())
}

/// The guest's kernel kills a process of the job, which goes on without it.
async fn has_no_memory(system: &System) -> Checked<()> {
    let command = "printf 'reading '; tail /dev/zero; echo 'is over'; echo there > /output/there";
    let job = system.output_job("hungry", "", command).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Failed && job.exit_code == Some(0), "{job:?}");
    ensure!(job.oom_kills.is_some_and(|kills| kills.processes == 1), "{job:?}");
    ensure!(
        job.reason.starts_with("out of memory: the guest's kernel killed a process of the job"),
        "{}",
        job.reason
    );
    ensure!(system.output_file(&job, "there").await? == "there", "{:?}", job.outputs);
    let log: Vec<LogLine> = system.get(&format!("/v1/jobs/{}/log", job.id)).await?;
    ensure!(log.iter().any(|line| line.line.contains("out of memory")), "{log:?}");
    // The part of a line that had no end for a while.
    ensure!(log.iter().any(|line| line.line == "reading " && line.continues), "{log:?}");
    let explained = system.perigee(&["job", "explain", job.id.as_str()]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    ensure!(explained.contains("failed: out of memory"), "{explained}");
    Ok(())
}

async fn is_cancelled(system: &System) -> Checked<()> {
    let command = "trap 'echo bye; sleep 1; echo end >> /output/end; exit 0' TERM\necho begin > /output/begin\n\
                   echo 1/2 > $PERIGEE_PROGRESS\nwhile :; do sleep 1; done";
    let job = system.output_job("stopped", "", command).await?;
    until("the command to begin", async || Ok(system.job(&job.id).await?.progress.map(drop)))
        .await?;
    let done = system.perigee(&["job", "cancel", job.id.as_str()]);
    ensure!(succeeded(&done), "{done:?}");
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Cancelled, "{:?} {}", job.state, job.reason);
    ensure!(job.reason == "cancelled on request", "{}", job.reason);
    for name in ["begin", "end"] {
        ensure!(system.output_file(&job, name).await? == name, "{name}: {:?}", job.outputs);
    }
    let log = system.log(&job.id).await?;
    // A program may take a second SIGTERM as an order to leave its work as it is.
    ensure!(log.iter().filter(|line| *line == "bye").count() == 1, "{log:?}");
    Ok(())
}

async fn controller_is_killed(system: &System) -> Checked<()> {
    let command = "head -c 150M /dev/urandom > /output/large\n\
                   for n in $(seq 200); do echo $n > /output/small-$n; done\n\
                   sha256sum < /output/large | cut -d' ' -f1 > /output/sum";
    let job = system.output_job("large", "", command).await?;
    for pause_ms in [300, 900] {
        until("the outputs to be fetched", async || {
            let job = system.job(&job.id).await?;
            Ok((job.state == JobState::Collecting || job.state.is_final()).then_some(()))
        })
        .await?;
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        system.kill_daemon("controller", None).await?;
    }
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded && job.reason.is_empty(), "{}", job.reason);
    let files = job.outputs.as_ref().map(|outputs| outputs.files);
    ensure!(files == Some(202), "{:?}", job.outputs);
    let path = format!("/v1/data/~/jobs/{}/output/large?stat", job.id);
    let large: FileEntry = system.get(&path).await?;
    ensure!(large.size_bytes == 150 * MIB, "{large:?}");
    ensure!(large.sha256 == Some(system.output_file(&job, "sum").await?), "{large:?}");
    Ok(())
}

async fn root_disk_is_saved(system: &System) -> Checked<()> {
    let command = "echo saved > /root/marker; echo kept > /output/kept; sync\n\
                   echo 1/2 > $PERIGEE_PROGRESS\nsleep 100000";
    let job = system.output_job("saved", "", command).await?;
    until("the command to begin", async || Ok(system.job(&job.id).await?.progress.map(drop)))
        .await?;
    let done = system.perigee(&["image", "save", job.id.as_str(), "mine"]);
    ensure!(succeeded(&done), "{done:?}");
    let done = system.perigee(&["job", "cancel", "--now", job.id.as_str()]);
    ensure!(succeeded(&done), "{done:?}");
    let ended = system.ended(&job.id).await?;
    ensure!(ended.state == JobState::Cancelled, "{:?} {}", ended.state, ended.reason);
    ensure!(system.output_file(&ended, "kept").await? == "kept", "{}", ended.reason);
    let job = system
        .submit(
            "name: again\nimage: mine\nmemory: 256MiB\nplacement: {site: cloud}\n\
             command: cat /root/marker > /output/marker",
        )
        .await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{}", job.reason);
    ensure!(system.output_file(&job, "marker").await? == "saved", "the image has what was written");
    Ok(())
}

#[test]
fn a_vm_that_ends_under_its_job_gives_what_is_on_its_disks() {
    with_system(async |system| {
        kernel_panics(&system).await?;
        qemu_is_killed(&system).await?;
        guest_is_hostile(&system).await
    });
}

/// Says a line when its outputs are on the disks, and panics when the first byte of its seed is an `S`.
const PANICS: &str = r#"echo half > /output/half; echo part > /data/part.csv; sync; echo begun
seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)
while [ "$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)" != S ]; do sleep 1; done
echo c > /proc/sysrq-trigger"#;

async fn has_begun(system: &System, job: &Job) -> Checked<()> {
    until("the command to begin", async || {
        let log = system.log(&job.id).await?;
        Ok(log.iter().any(|line| line == "begun").then_some(()))
    })
    .await
}

/// The job has ended with the VM's end, its command ran once, and its outputs are there.
async fn has_half(system: &System, job: &Job, why: &str) -> Checked<()> {
    ensure!(job.state == JobState::Failed && job.exit_code.is_none(), "{job:?}");
    ensure!(job.reason.contains(why), "{}", job.reason);
    ensure!(job.reason.contains("what was on its disks then"), "{}", job.reason);
    ensure!(system.output_file(job, "half").await? == "half", "{:?}", job.outputs);
    let log = system.log(&job.id).await?;
    ensure!(log.iter().filter(|line| *line == "begun").count() == 1, "{log:?}");
    Ok(())
}

/// Meanwhile the controller and the agent are killed.
async fn kernel_panics(system: &System) -> Checked<()> {
    system.volume("parts", "home1", 64 * MIB).await?;
    let more = "outputs: [/output, \"/data/*.csv\"]\nvolumes: [{volume: parts, mount: /data}]\n";
    let job = system.output_job("panics", more, PANICS).await?;
    has_begun(system, &job).await?;
    system.stop_writer(&job.id).await?;
    until("the VM to be started once more", async || {
        let job = system.job(&job.id).await?;
        Ok((job.state == JobState::Collecting).then_some(()))
    })
    .await?;
    system.kill_daemon("controller", None).await?;
    system.kill_daemon("agent", Some("home1")).await?;
    let job = system.ended(&job.id).await?;
    has_half(system, &job, "panicked").await?;
    let part =
        system.client.get_bytes(&format!("/v1/data/~/jobs/{}/data/part.csv", job.id)).await?;
    ensure!(part == "part\n", "{part:?}");
    Ok(())
}

async fn qemu_is_killed(system: &System) -> Checked<()> {
    let command = "echo half > /output/half; sync; echo begun; sleep 100000";
    let job = system.output_job("killed", "", command).await?;
    has_begun(system, &job).await?;
    let pid = system.host_file("home1", &format!("agent/vms/{}/run/qemu.pid", job.id));
    let pid = std::fs::read_to_string(&pid).unwrap_or_default();
    kill_9(pid.trim().parse().expect("its QEMU runs"));
    let job = system.ended(&job.id).await?;
    has_half(system, &job, "its QEMU is gone").await
}

/// One header of a tar, as GNU tar writes it.
fn header(name: &str, kind: u8, size_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    let mut put = |at: usize, text: &[u8]| bytes[at..at + text.len()].copy_from_slice(text);
    put(0, name.as_bytes());
    for (at, text) in [(100, "0000644"), (108, "0000000"), (116, "0000000"), (136, "00000000000")] {
        put(at, text.as_bytes());
    }
    // The size in base 256: 16 GiB has too many octal digits.
    put(124, &[0x80, 0, 0, 0]);
    put(128, &size_bytes.to_be_bytes());
    put(148, b"        ");
    put(156, &[kind]);
    put(257, b"ustar  \0");
    let sum: u32 = bytes.iter().map(|byte| u32::from(*byte)).sum();
    bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    bytes
}

/// In the place of the runner of a guest that was taken over: it writes what it likes to the output disk, fills it to its end,
/// and reports that with the right hash.
const TAKEN_OVER: &str = r#"#!/bin/sh
disk=/dev/$(grep -lx output /sys/block/*/serial | cut -d/ -f4)
port=/dev/$(grep -lx org.perigee.job /sys/class/virtio-ports/*/name | cut -d/ -f5)
cat /root/evil > $disk; sync
bytes=$(blockdev --getsize64 $disk); sum=$(sha256sum < $disk | cut -d' ' -f1)
while :; do
  printf '\n{"seq":1,"uptime_ms":1,"type":"finished","output_bytes":%s,"output_sha256":"%s"}\n' $bytes $sum
  sleep 1
done > $port"#;

async fn guest_is_hostile(system: &System) -> Checked<()> {
    let with = |name: &str, kind: u8, text: &str| {
        let mut bytes = header(name, kind, text.len() as u64);
        bytes.extend(text.bytes());
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    };
    let evil = [
        with("output/good", b'0', "good"),
        with("/output/absolute", b'0', "evil"),
        with("../../../output/above", b'0', "evil"),
        with("output/disk", b'4', ""),
        header("output/endless", b'0', 16 << 30),
    ]
    .concat();
    let hex: String = evil.iter().map(|byte| format!("{byte:02x}")).collect();
    let command = format!(
        "perl -e 'print pack(\"H*\", \"{hex}\")' > /root/evil\ncat > /root/runner <<'END'\n{TAKEN_OVER}\nEND\n\
         chmod 755 /root/runner; mv /root/runner /usr/sbin/perigee-runner; sync; echo c > /proc/sysrq-trigger"
    );
    let job = system.output_job("hostile", "output: 16MiB\n", &command).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Failed, "{job:?}");
    ensure!(job.outputs.as_ref().is_some_and(|outputs| outputs.files == 1), "{job:?}");
    ensure!(system.output_file(&job, "good").await? == "good", "{}", job.reason);
    for why in ["its path is absolute", "goes up", "a device", "the tar ends within it"] {
        ensure!(job.reason.contains(why), "{why}: {}", job.reason);
    }
    Ok(())
}
