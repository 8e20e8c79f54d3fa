//! Jobs with several VMs, at two hosts.

use std::collections::BTreeSet;
use std::time::Instant;

use perigee_model::job::{ClusterImage, Job, JobState, LogLine, NewImage, Vm};
use perigee_model::job_file;
use perigee_model::job_plan::JobPlan;
use perigee_model::plan::Basis;

use super::{Checked, System, ensure, until, with_system};

pub async fn log_of(system: &System, job: &str, rank: u32) -> Checked<Vec<String>> {
    let lines: Vec<LogLine> = system.get(&format!("/v1/jobs/{job}/log?rank={rank}")).await?;
    Ok(lines.into_iter().map(|line| line.line).collect())
}

const PAIR: &str = "name: pair\nimage: debian\nmemory: 200MiB\ncount: 2\nplacement: {site: home}\ncommand:\n  - /bin/sh\n  - -c\n  - |\n    \
                 cat $PERIGEE_HOSTS\n    \
                 if [ $PERIGEE_RANK = 0 ]; then\n      mkfifo /tmp/open; exec 3<>/tmp/open\n      \
                 busybox nc -l -p 7000 <&3 > /output/heard\n      cat /output/heard\n    else\n      \
                 until echo from $(cat /proc/sys/kernel/hostname) of $PERIGEE_COUNT | busybox nc n0 7000; do sleep 1; done\n    fi\n";

/// The one who listens has an input without an end: otherwise it may end the connection before the other one has sent anything.
#[test]
fn the_vms_of_a_job_begin_together_and_reach_each_other_by_name() {
    with_system(async |system| {
        let job = system.submit(PAIR).await?;
        let ended = system.ended(&job.id).await?;
        let log = log_of(&system, job.id.as_str(), 0).await?;
        ensure!(ended.state == JobState::Succeeded, "{}; {log:?}", ended.reason);
        let expected = ["pair-0001-n0 slots=1", "pair-0001-n1 slots=1", "from pair-0001-n1 of 2"];
        ensure!(log == expected, "{log:?}");
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let to = scratch.path().to_string_lossy().into_owned();
        let fetched = system.perigee(&["job", "output", job.id.as_str(), "--to", &to]);
        ensure!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
        let heard = std::fs::read_to_string(scratch.path().join("rank-0/output/heard"));
        ensure!(heard.as_deref().is_ok_and(|text| text == "from pair-0001-n1 of 2\n"), "{heard:?}");
        let shown = system.perigee(&["job", "status", job.id.as_str()]);
        eprintln!("{}", String::from_utf8_lossy(&shown.stdout));
        let networks = system.perigee(&["network", "list"]);
        let networks = String::from_utf8_lossy(&networks.stdout).into_owned();
        ensure!(!networks.contains("pair"), "its network is still there: {networks}");
        predicted_beside_truth(&system, &ended).await
    });
}

/// The first run was predicted without any run before it, and the next one is by that run.
async fn predicted_beside_truth(system: &System, ended: &Job) -> Checked<()> {
    let explained = system.perigee(&["job", "explain", ended.id.as_str()]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    eprintln!("{explained}");
    ensure!(explained.contains("measured: "), "{explained}");
    let next: JobPlan =
        system.post("/v1/jobs/plan", &job_file::parse(PAIR, "pair.yaml")?.spec).await?;
    let plan = next.plan;
    let chosen = plan.chosen().ok_or_else(|| super::failed(format!("{plan:?}")))?;
    let measured_s = ended.measured_s.unwrap_or_default();
    eprintln!(
        "planned next: {} at {}; measured: {measured_s:.1} s",
        chosen.total,
        chosen.starts_at()
    );
    ensure!(plan.basis == Basis::History && chosen.hosts.len() == 2, "{plan:?}");
    ensure!(chosen.total.holds(measured_s), "{} and {measured_s}", chosen.total);
    let score = system.perigee(&["planner", "score"]);
    let score = String::from_utf8_lossy(&score.stdout).into_owned();
    ensure!(score.contains("of these: several VMs"), "{score}");
    Ok(())
}

/// All that one says to the other goes over one connection. If that ends, rank 0 ends, and the job with it.
#[test]
fn the_vms_of_a_job_talk_which_is_counted_and_go_on_when_all_of_them_have_moved() {
    with_system(async |system| {
        let job = system
            .submit(
                "name: talkers\nimage: debian\nmemory: 200MiB\ncount: 2\nplacement: {site: home, move: never}\ncommand:\n  - /bin/sh\n  - -c\n  - |\n    \
                 if [ $PERIGEE_RANK = 0 ]; then\n      mkfifo /tmp/open; exec 3<>/tmp/open\n      \
                 busybox nc -l -p 7000 <&3 | (\n        head -c 1000000 > /dev/null; n=0\n        \
                 while read line; do n=$((n+1)); echo \"$n/1000000 lines\" > $PERIGEE_PROGRESS; done\n      )\n      exit 9\n    else\n      \
                 until (head -c 1000000 /dev/zero; while sleep 0.2; do echo a line; done) | busybox nc n0 7000; do sleep 1; done\n      exit 8\n    fi\n",
            )
            .await?;
        // More than the megabyte that one has sent, and little of the other.
        let sent = until("the megabyte to be counted", async || {
            let job = system.job(&job.id).await?;
            ensure!(!job.state.is_final(), "it has ended: {}", job.reason);
            let sent: Vec<_> = job.members.iter().map(|one| one.sent_bytes.clone()).collect();
            let is_counted =
                sent.get(1).and_then(|row| row.first()).is_some_and(|it| *it > 1_000_000);
            Ok(is_counted.then_some(sent))
        })
        .await?;
        ensure!(sent[0][1] < sent[1][0] && sent[0][0] == 0 && sent[1][1] == 0, "{sent:?}");
        let shown = system.perigee(&["job", "status", job.id.as_str()]);
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        eprintln!("{shown}");
        ensure!(shown.contains("between hosts") && shown.contains("1 to 0: "), "{shown}");
        let one = format!("{}-n1", job.id);
        let alone = system.perigee(&["vm", "move", &one, "cloud1"]);
        let why = String::from_utf8_lossy(&alone.stderr).into_owned();
        ensure!(!alone.status.success() && why.contains("perigee job move"), "{why}");
        system.progresses(&job.id, 5).await?;
        let begun = Instant::now();
        // Each at a host of its own, wherever they have started.
        let apart = system.perigee(&["job", "move", job.id.as_str(), "home1", "home2"]);
        let said = String::from_utf8_lossy(&apart.stderr).into_owned();
        eprintln!("{said}after {:.1} s", begun.elapsed().as_secs_f64());
        ensure!(apart.status.success() || said.contains("there already"), "{said}");
        system.progresses(&job.id, 20).await?;
        let begun = Instant::now();
        let moved = system.perigee(&["job", "move", job.id.as_str(), "--site", "cloud"]);
        let said = String::from_utf8_lossy(&moved.stderr).into_owned();
        eprintln!("{said}after {:.1} s", begun.elapsed().as_secs_f64());
        ensure!(moved.status.success(), "{said}");
        system.progresses(&job.id, 20).await?;
        let there = system.job(&job.id).await?;
        let hosts: BTreeSet<_> = there.members.iter().filter_map(|one| one.host.clone()).collect();
        ensure!(hosts.len() == 1 && hosts.contains(&super::host("cloud1")), "{:?}", there.members);
        let pauses: Vec<u64> = there.migrations.iter().map(|one| one.downtime_ms).collect();
        eprintln!("pauses in ms: {pauses:?}");
        ensure!(pauses.len() >= 2, "{:?}", there.migrations);
        // The second one gives up the outputs.
        for _ in 0..2 {
            let cancelled = system.perigee(&["job", "cancel", "--now", job.id.as_str()]);
            ensure!(cancelled.status.success(), "{}", String::from_utf8_lossy(&cancelled.stderr));
        }
        let ended = system.ended(&job.id).await?;
        ensure!(ended.state == JobState::Cancelled, "{:?} {}", ended.state, ended.reason);
        Ok(())
    });
}

const MPI: &str = "from mpi4py import MPI; import socket; c = MPI.COMM_WORLD; \
                   print(*sorted(c.allgather(socket.gethostname())), c.allreduce(c.rank)) if c.rank == 0 else c.allgather(socket.gethostname()) and c.allreduce(c.rank)";

#[test]
fn mpirun_starts_processes_in_vms_at_two_hosts() {
    with_system(async |system| {
        let dir = std::env::var("PERIGEE_TEST_MPI_IMAGE")
            .expect("PERIGEE_TEST_MPI_IMAGE names the directory of an image with Open MPI; make test sets it");
        let new = NewImage {
            name: "mpi".parse().expect("a name"),
            source: format!("{dir}/debian-pg.raw"),
            host: None,
            leave_site: Default::default(),
            format: None,
        };
        let _: ClusterImage = system.post("/v1/images", &new).await?;
        let job = system
            .submit(&format!(
                "name: sum\nimage: mpi\nmemory: 320MiB\ncount: 2\napart: sum\nmpi: true\nplacement: {{site: home}}\ntimeout: 3m\n\
                 command: [mpirun, -n, '4', --oversubscribe, /usr/bin/python3, -c, '{MPI}']\n"
            ))
            .await?;
        let ended = system.ended(&job.id).await?;
        let log = log_of(&system, job.id.as_str(), 0).await?;
        ensure!(ended.state == JobState::Succeeded, "{}; {log:?}", ended.reason);
        let (first, second) = (format!("{}-n0", job.id), format!("{}-n1", job.id));
        let all = [&first, &first, &second, &second].map(String::as_str).join(" ");
        ensure!(log.last() == Some(&format!("{all} 6")), "{log:?}");
        let hosts: BTreeSet<_> = ended.members.iter().filter_map(|one| one.host.clone()).collect();
        ensure!(hosts.len() == 2, "{:?}", ended.members);
        let timed = ended.measured_s.unwrap_or_default();
        eprintln!("from the VMs' start to the command's end: {timed:.1} s");
        Ok(())
    });
}

/// A panic is the guest's own end, and no loss of a host: the job does not start again, whatever its file says of lost hosts.
#[test]
fn a_vm_of_a_job_whose_kernel_panics_ends_the_job_as_one() {
    with_system(async |system| {
        let job = system
            .submit(
                "name: doomed\nimage: debian\nmemory: 200MiB\ncount: 2\nplacement: {site: home}\nrestart: on-host-failure\ntimeout: 3m\n\
                 command:\n  - /bin/sh\n  - -c\n  - |\n    \
                 echo here > /output/kept; sync\n    \
                 if [ $PERIGEE_RANK = 1 ]; then\n      echo about to panic\n      sleep 1\n      echo c > /proc/sysrq-trigger\n    fi\n    \
                 sleep 600\n",
            )
            .await?;
        let ended = system.ended(&job.id).await?;
        let log = log_of(&system, job.id.as_str(), 1).await?;
        ensure!(ended.state == JobState::Failed, "{:?} {}; {log:?}", ended.state, ended.reason);
        let because = "rank 1: the VM ended before the job did: the guest's kernel panicked";
        ensure!(ended.reason.starts_with(because), "{}", ended.reason);
        ensure!(ended.members.len() == 2, "{:?}", ended.members);
        ensure!(log == ["about to panic"], "{log:?}");
        let shown = system.perigee(&["job", "log", job.id.as_str()]);
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        ensure!(shown.contains("1: about to panic"), "{shown}");
        // The other VM's command was ended, and what both had written is there.
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let to = scratch.path().to_string_lossy().into_owned();
        let fetched = system.perigee(&["job", "output", job.id.as_str(), "--to", &to]);
        ensure!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
        for rank in 0..2 {
            let kept = scratch.path().join(format!("rank-{rank}/output/kept"));
            let kept = std::fs::read_to_string(kept);
            ensure!(kept.as_deref().is_ok_and(|text| text == "here\n"), "rank {rank}: {kept:?}");
        }
        until("its VMs and its network to be removed", async || {
            let vms: Vec<Vm> = system.get("/v1/vms").await?;
            let networks = system.perigee(&["network", "list"]);
            let networks = String::from_utf8_lossy(&networks.stdout).into_owned();
            let is_gone = vms.iter().all(|vm| vm.host.is_none()) && !networks.contains("doomed");
            Ok(is_gone.then_some(()))
        })
        .await?;
        let next = "name: next\nimage: debian\nmemory: 200MiB\ncount: 2\nplacement: {site: home}\ncommand: \"true\"\n";
        let next = system.submit(next).await?;
        let next = system.ended(&next.id).await?;
        ensure!(next.state == JobState::Succeeded, "{}", next.reason);
        Ok(())
    });
}
