//! Jobs from submission to their end.

use std::time::Duration;

use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{Access, Job, JobSpec, JobState, Start};
use perigee_model::plan::PredictedEnd;
use perigee_model::vm::{Firmware, VmStatus};
use perigee_model::{DiskRole, ImageName, ProblemKind};

use super::{Lab, TIMING, answers, data_volume, finish, running_as, spec, vm_of, wait_for};
use crate::cluster::Settings;
use crate::cluster::Timing;
use crate::jobs::traces::tests::serial_reads;
use crate::storage::volumes;
use crate::{hosts, jobs, planning, rentals, vms};

#[tokio::test]
async fn a_job_goes_through_all_its_states_and_leaves_nothing() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    assert_eq!(id.as_str(), "q-0001");
    lab.wait_for_vm(&lab.home, &vm).await;
    {
        let cloud = lab.cloud.inside();
        let clone = cloud.volumes.keys().any(|name| name.as_str() == "q-0001-data0");
        assert!(clone, "the data is cloned at its home");
        let home = lab.home.inside();
        assert_eq!(home.attachments.len(), 1, "and attached where the VM is");
        let serials: Vec<_> =
            home.vms[&vm].report.spec.disks.iter().map(|disk| disk.role.to_string()).collect();
        assert_eq!(serials, ["root", "seed", "output", "data0"]);
    }
    lab.home.say(&vm, GuestBody::Started);
    lab.home.say(&vm, GuestBody::log(LogStream::Stdout, "hello"));
    lab.home.say(&vm, GuestBody::Progress { done: 1, total: 2, label: "q1".into() });
    lab.wait_for_job(&id, "half done", |job| job.progress.is_some()).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Succeeded).await;
    let outputs = job.outputs.expect("outputs");
    assert_eq!((outputs.at.as_str(), outputs.files), ("repo://default/jobs/q-0001", 1));
    assert_eq!((job.exit_code, outputs.bytes, job.reason.as_str()), (Some(0), 11, ""));
    assert!(job.measured_s.is_some() && job.predicted.is_some());
    lab.wait_for_clean_hosts().await;
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
    let lines = jobs::log(&lab.cluster, &id, 0, 100).await.expect("log");
    assert_eq!(lines.iter().map(|l| l.line.as_str()).collect::<Vec<_>>(), ["hello"]);
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    assert_eq!(decisions.len(), 1);
    assert_eq!(decisions[0].measured_s, job.measured_s);
    let parts = decisions[0].measured.expect("where its time went");
    assert!((parts.total_s - job.measured_s.expect("a time")).abs() < 0.01, "{parts:?}");
    assert_eq!(planning::score(&lab.cluster, |_| true, true).await.expect("a score").all.jobs, 1);
    let again = rentals::plan(&lab.cluster, &spec(Access::Clone)).await.expect("a plan").plan;
    assert_eq!(again.basis, perigee_model::plan::Basis::History);
    jobs::delete(&lab.cluster, &id, false).await.expect("delete");
    assert_eq!(answers(&lab, &id), None);
}

/// It failed, and the image was said to be old.
#[tokio::test]
async fn a_job_reads_a_clone_of_a_volume_whose_journal_wants_replaying_and_says_so() {
    let lab = Lab::up().await;
    let with_journal = |incompatible: u32| {
        let mut first = vec![0; 4096];
        first[0x438..0x43a].copy_from_slice(&0xef53_u16.to_le_bytes());
        first[0x460..0x464].copy_from_slice(&incompatible.to_le_bytes());
        lab.cloud.inside().volumes.get_mut(&data_volume()).expect("the data").data = first;
    };
    for (incompatible, disk) in [(0x2c6, "data0"), (0x2c2, "")] {
        with_journal(incompatible);
        let id = lab.submit(spec(Access::Read)).await;
        let vm = vm_of(&id);
        lab.wait_for_vm(&lab.home, &vm).await;
        let clone = format!("{id}-{disk}");
        {
            let home = lab.home.inside();
            let disks = &home.vms[&vm].report.spec.disks;
            let data = disks.iter().find(|disk| disk.role.is_data()).expect("the data");
            let is_clone = data.volume.as_str() == clone;
            assert_eq!((is_clone, data.read_only), (!disk.is_empty(), disk.is_empty()));
        }
        let said = lab.job(&id).await.reason;
        assert_eq!(said.contains("a clone of volume tpch"), !disk.is_empty(), "{said}");
        lab.home.say(&vm, GuestBody::Started);
        finish(&lab.home, &lab.home, &vm);
        lab.wait_for_state(&id, JobState::Succeeded).await;
        lab.wait_for_clean_hosts().await;
    }
}

#[tokio::test]
async fn a_job_that_asks_for_a_tpm_has_its_state_on_a_disk_until_its_end() {
    let lab = Lab::up().await;
    let id = lab.submit(JobSpec { tpm: true, ..spec(Access::Clone) }).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    {
        let home = lab.home.inside();
        let spec = &home.vms[&vm].report.spec;
        let state = spec.tpm().expect("a disk for the TPM");
        assert!(!state.read_only && home.volumes.contains_key(&state.volume));
    }
    lab.home.say(&vm, GuestBody::Started);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_job_whose_image_needs_uefi_has_the_firmwares_variables_until_its_end() {
    let lab = Lab::up().await;
    let id = lab.submit(JobSpec { firmware: Firmware::Uefi, ..spec(Access::Clone) }).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    {
        let home = lab.home.inside();
        let spec = &home.vms[&vm].report.spec;
        assert_eq!(spec.machine.firmware, Firmware::Uefi);
        assert!(spec.disks.iter().any(|disk| disk.role == DiskRole::Nvram));
    }
    lab.home.say(&vm, GuestBody::Started);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_job_beside_its_data_is_traced_until_its_round_trips_are_known() {
    let lab = Lab::up().await;
    // Of the first data disk.
    lab.cloud.inside().trace = serial_reads(3, 50);
    let mut beside = spec(Access::Clone);
    beside.start = Start::Host(lab.cloud.id.clone());
    for run in 0..2 {
        let id = lab.submit(beside.clone()).await;
        let vm = vm_of(&id);
        lab.wait_for_vm(&lab.cloud, &vm).await;
        lab.cloud.say(&vm, GuestBody::Started);
        lab.wait_for_state(&id, JobState::Running).await;
        if run == 0 {
            wait_for("a trace", async || (!lab.cloud.inside().traces.is_empty()).then_some(()))
                .await;
            assert_eq!(lab.cloud.inside().traces[id.as_str()].len(), 4, "all of the VM's disks");
            // Of its reads, ten at least are before the command's end.
            tokio::time::sleep(std::time::Duration::from_millis(60)).await;
        }
        finish(&lab.cloud, &lab.cloud, &vm);
        lab.wait_for_state(&id, JobState::Succeeded).await;
        assert!(lab.cloud.inside().traces.is_empty(), "the trace has ended with the job");
        let prepared = planning::prepare(&lab.cluster, &beside).await.expect("what is known");
        let known: Vec<bool> = prepared.history.iter().map(|run| run.replayed.is_some()).collect();
        assert_eq!(known, [vec![true], vec![true, false]][run]);
        assert!(prepared.history[0].replayed.is_some_and(|replayed| replayed.round_trips > 10.0));
    }
    let noise = planning::score(&lab.cluster, |_| true, true).await.expect("a score").noise;
    assert_eq!(noise.expect("the same job has run twice").runs, 2);
}

#[tokio::test]
async fn a_running_job_shows_its_predicted_end_and_says_when_it_is_not_known() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    assert_eq!(lab.job(&id).await.predicted_end, None, "its command does not run yet");
    lab.home.say(&vm, GuestBody::Started);
    let is_new = |job: &Job| {
        job.predicted_end.as_ref().is_some_and(|end| {
            end.left.is_none() && end.why.contains("no earlier run of such a job is known")
        })
    };
    lab.wait_for_job(&id, "of unknown length", is_new).await;
    lab.home.say(&vm, GuestBody::Progress { done: 1, total: 2, label: "q1".into() });
    let left = |end: Option<PredictedEnd>| end.and_then(|end| end.left);
    // As long as it has run until now, so it is known for a while.
    let knows = |job: &Job| left(job.predicted_end.clone()).is_some_and(|l| l.expected_s > 0.5);
    lab.wait_for_job(&id, "of known length", knows).await;
    let shown = vms::get(&lab.cluster, &vm).await.expect("VM").predicted_end.expect("it runs");
    assert!(shown.why.contains("progress"), "{shown}");
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(job.predicted_end, None);
}

#[tokio::test]
async fn a_job_that_is_cancelled_leaves_no_trace_behind() {
    let lab = Lab::up().await;
    let mut beside = spec(Access::Clone);
    beside.start = Start::Host(lab.cloud.id.clone());
    let id = lab.submit(beside).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    lab.cloud.say(&vm_of(&id), GuestBody::Started);
    wait_for("a trace", async || (!lab.cloud.inside().traces.is_empty()).then_some(())).await;
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&id, JobState::Cancelled).await;
    assert!(lab.cloud.inside().traces.is_empty());
}

#[tokio::test]
async fn a_controller_restart_in_the_middle_of_a_job_does_nothing_twice_and_loses_nothing() {
    let mut lab = Lab::up().await;
    let id = lab.submit(spec(Access::Write)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.home.say(&vm, GuestBody::log(LogStream::Stdout, "one"));
    lab.wait_for_state(&id, JobState::Running).await;
    lab.supervisor.stop().await;
    lab.home.say(&vm, GuestBody::log(LogStream::Stderr, "two"));
    lab.restart_controller().await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(lab.home.inside().starts[&vm], 1);
    let lines = jobs::log(&lab.cluster, &id, 0, 100).await.expect("log");
    assert_eq!(lines.iter().map(|l| l.line.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_guest_that_said_much_and_powered_off_has_not_lost_its_job() {
    let mut lab = Lab::up().await;
    let id = lab.submit(spec(Access::Write)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.supervisor.stop().await;
    lab.home.say(&vm, GuestBody::Started);
    for number in 0..10 {
        let line = format!("line {number}");
        lab.home.say(&vm, GuestBody::log(LogStream::Stdout, line));
    }
    finish(&lab.home, &lab.home, &vm);
    lab.home.inside().vms.get_mut(&vm).expect("the VM").report.status = VmStatus::Shutdown;
    lab.restart_controller().await;
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(jobs::log(&lab.cluster, &id, 0, 100).await.expect("log").len(), 10);
}

#[tokio::test]
async fn a_controller_restart_at_any_moment_of_staging_goes_on() {
    let mut lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    for _ in 0..10 {
        lab.restart_controller().await;
        tokio::time::sleep(std::time::Duration::from_millis(7)).await;
    }
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(lab.home.inside().starts[&vm], 1);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_written_volume_has_one_job_and_each_job_a_new_epoch() {
    let lab = Lab::up().await;
    let first = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&first)).await;
    let second = lab.submit(spec(Access::Write)).await;
    let waiting = lab.wait_for_job(&second, "waiting", |job| !job.reason.is_empty()).await;
    assert_eq!(waiting.state, JobState::Queued);
    assert!(waiting.reason.contains("in use by job q-0001"), "{}", waiting.reason);
    let refused = volumes::delete(&lab.cluster, &data_volume()).await.expect_err("it is in use");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    lab.home.say(&vm_of(&first), GuestBody::Started);
    finish(&lab.home, &lab.home, &vm_of(&first));
    lab.wait_for_vm(&lab.home, &vm_of(&second)).await;
    let epoch = lab.cloud.inside().volumes[&data_volume()].info.epoch;
    assert_eq!(epoch.0, 3, "one epoch for each job after the first");
    let opened = lab.home.inside().vms[&vm_of(&second)].report.spec.disks[3].epoch;
    assert_eq!(opened, epoch);
}

#[tokio::test]
async fn a_job_waits_for_memory_and_says_so() {
    let lab = Lab::up().await;
    let mut big = spec(Access::Read);
    big.memory_bytes = 900 << 20;
    let first = lab.submit(big.clone()).await;
    lab.wait_for_vm(&lab.home, &vm_of(&first)).await;
    let second = lab.submit(big).await;
    let waiting = lab.wait_for_job(&second, "waiting", |job| !job.reason.is_empty()).await;
    assert_eq!(waiting.state, JobState::Queued);
    jobs::intend(&lab.cluster, &first, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&first, JobState::Cancelled).await;
    lab.wait_for_vm(&lab.home, &vm_of(&second)).await;
}

#[tokio::test]
async fn a_cancel_ends_a_job_in_every_state() {
    let lab = Lab::up().await;
    let running = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&running)).await;
    let queued = lab.submit(spec(Access::Write)).await;
    lab.home.say(&vm_of(&running), GuestBody::Started);
    lab.wait_for_state(&running, JobState::Running).await;
    for id in [&queued, &running] {
        jobs::intend(&lab.cluster, id, |intent| intent.cancel = true).await.expect("cancel");
        let job = lab.wait_for_state(id, JobState::Cancelled).await;
        assert!(job.reason.starts_with("cancelled on request"), "{}", job.reason);
        let again = jobs::intend(&lab.cluster, id, |intent| intent.cancel = true).await;
        assert_eq!(again.expect_err("it has ended").kind, ProblemKind::Conflict);
    }
    lab.wait_for_clean_hosts().await;
    let soon = lab.submit(spec(Access::Clone)).await;
    jobs::intend(&lab.cluster, &soon, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&soon, JobState::Cancelled).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_lost_vm_fails_its_job_with_the_end_of_the_console() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.inside().vms.get_mut(&vm).expect("VM").report.status = VmStatus::Gone;
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("panic: no root"), "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_command_that_fails_fails_its_job_and_keeps_the_output() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.home.say(&vm, GuestBody::exited(3));
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    lab.home.say(
        &vm,
        GuestBody::Finished { output_bytes: 0, output_sha256: empty.into(), lacks: None },
    );
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert_eq!((job.exit_code, job.outputs.map(|outputs| outputs.files)), (Some(3), Some(0)));
    assert_eq!(job.reason, "the command ended with code 3");
}

#[tokio::test]
async fn a_job_outlives_its_silent_host() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    lab.home.inside().down = true;
    let is_gone = |job: &Job| job.reason.contains("home1 is unreachable");
    let job = lab.wait_for_job(&id, "waiting for home1", is_gone).await;
    assert_eq!(job.state, JobState::Running);
    lab.home.inside().down = false;
    lab.wait_for_job(&id, "going on", |job| job.reason.is_empty()).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn what_a_gone_host_keeps_is_removed_when_it_is_back() {
    let mut lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    lab.home.inside().down = true;
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&id, JobState::Cancelled).await;
    let refused = jobs::delete(&lab.cluster, &id, false).await.expect_err("parts of it are left");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    let clone_kept = lab.cloud.inside().volumes.len() == 2;
    assert!(clone_kept, "a VM that may run still has its volumes");
    lab.restart_controller().await;
    lab.home.inside().down = false;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_job_waits_for_the_home_of_its_volume() {
    let lab = Lab::up().await;
    lab.cloud.inside().down = true;
    wait_for("cloud1 to be unreachable", async || {
        let host = hosts::info(&lab.cluster, &lab.cloud.id).await.expect("host");
        (host.state == perigee_model::job::HostState::Unreachable).then_some(())
    })
    .await;
    let id = lab.submit(spec(Access::Write)).await;
    let job = lab.wait_for_job(&id, "waiting", |job| job.reason.contains("cloud1")).await;
    assert_eq!(job.state, JobState::Queued);
    let kept =
        hosts::remove(&lab.cluster, &lab.cloud.id, false).await.expect_err("it has a volume");
    assert_eq!(kept.kind, ProblemKind::Conflict);
    lab.cloud.inside().down = false;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

#[tokio::test]
async fn a_job_of_something_unknown_is_refused_at_once() {
    let lab = Lab::up().await;
    let mut unknown = spec(Access::Read);
    unknown.image = ImageName::new("nothing").expect("name");
    let problem = jobs::submit(&lab.cluster, unknown).await.expect_err("no such image");
    assert_eq!(problem.kind, ProblemKind::NotFound);
    let mut unknown = spec(Access::Read);
    unknown.inputs = Some("../../etc/passwd".into());
    let problem = jobs::submit(&lab.cluster, unknown).await.expect_err("no such list");
    assert_eq!(problem.kind, ProblemKind::Invalid);
}

#[tokio::test]
async fn a_plan_measures_the_links_it_needs() {
    let lab = Lab::up().await;
    let mut anywhere = spec(Access::Read);
    anywhere.start = Start::Anywhere;
    let plan = rentals::plan(&lab.cluster, &anywhere).await.expect("plan").plan;
    assert!(plan.options.iter().any(|option| option.chosen), "{plan:?}");
    assert!(plan.figures.iter().any(|figure| figure.contains("16.0 ms")), "{:?}", plan.figures);
}

#[tokio::test]
async fn a_state_directory_has_one_controller() {
    let lab = Lab::up().await;
    let second =
        crate::supervisor::Supervisor::start(lab.dir.path(), super::TIMING, super::Traffic::Plain)
            .await;
    assert_eq!(second.err().expect("refused").kind, ProblemKind::Conflict);
}

#[tokio::test]
async fn a_host_that_does_not_measure_keeps_no_plan_from_the_others() {
    let lab = Lab::up().await;
    let broken = super::fake::FakeHost::start("home2", "home").await;
    hosts::register(&lab.cluster, &broken.id, broken.addresses.clone()).await.expect("register");
    broken.inside().down = true;
    let plan = rentals::plan(&lab.cluster, &spec(Access::Read)).await.expect("plan").plan;
    let chosen = plan.options.iter().find(|option| option.chosen).expect("chosen");
    assert_eq!(chosen.start, lab.home.id);
}

/// A lab in which no image has the runner.
async fn lab_with_cloud_images() -> Lab {
    let dir = tempfile::tempdir().expect("tempdir");
    let runner = dir.path().join("runner");
    std::fs::write(&runner, b"\x7fELF runner").expect("written");
    let lab = Lab::up_in(dir, Settings { runner: Some(runner), ..Settings::default() }).await;
    lab.home.inside().has_cloud_images = true;
    lab
}

#[tokio::test]
async fn a_job_whose_image_has_neither_the_runner_nor_cloud_init_fails_and_says_so() {
    let mut lab = lab_with_cloud_images().await;
    let job = lab.submit(spec(Access::Read)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&job)).await;
    lab.supervisor.stop().await;
    let boot_deadline = Duration::from_millis(200);
    lab.start_controller(Timing { boot_deadline, ..TIMING }).await;
    let job = lab.wait_for_job(&job, "over", |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed, "{}", job.reason);
    assert!(job.reason.contains("cloud-init in it has to start the job"), "{}", job.reason);
    assert!(job.reason.contains("its console ends with:"), "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_job_whose_image_has_no_runner_gets_it_from_a_disk_for_cloud_init() {
    let lab = lab_with_cloud_images().await;
    let job = lab.submit(spec(Access::Read)).await;
    let vm = vm_of(&job);
    lab.wait_for_vm(&lab.home, &vm).await;
    {
        let inside = lab.home.inside();
        let disks = &inside.vms[&vm].report.spec.disks;
        let last = disks.last().expect("disks");
        assert_eq!((last.role, last.read_only), (DiskRole::CloudInit, true));
        let text = String::from_utf8_lossy(&inside.volumes[&last.volume].data).into_owned();
        assert!(text.contains("\x7fELF runner") && text.contains("bootcmd"));
    }
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&job, JobState::Running).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&job, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}
