//! Outputs of VMs that end under their jobs: they are started once more, only to write them.

use perigee_model::guest::{GuestBody, LogStream, Seed};
use perigee_model::job::{Access, JobState};
use perigee_model::vm::VmStatus;
use perigee_model::{JobId, VmId, VolumeName};

use super::fake::FakeHost;
use super::queue::unreachable;
use super::{Lab, PATIENCE, TIMING, answers, data_volume, finish, running, spec, vm_of, wait_for};
use crate::cluster::Timing;
use crate::jobs;
use crate::records::{JobIntent, last_start_of};

/// A controller that gives a guest time for its outputs.
const PATIENT: Timing = Timing { cancel_deadline: PATIENCE, collect_deadline: PATIENCE, ..TIMING };

async fn patient() -> Lab {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    lab.start_controller(PATIENT).await;
    lab
}

fn end_vm(host: &FakeHost, vm: &VmId) {
    host.inside().vms.get_mut(vm).expect("VM").report.status = VmStatus::Gone;
}

fn starts(lab: &Lab, vm: &VmId) -> u32 {
    lab.home.inside().starts.get(vm).copied().unwrap_or_default()
}

/// Waits until the VM was started once more.
async fn started_again(lab: &Lab, id: &JobId) {
    let vm = vm_of(id);
    let last = last_start_of(&jobs::record(&lab.cluster, id).await.expect("record"));
    wait_for("the VM to start once more", async || {
        let inside = lab.home.inside();
        inside.vms.get(&vm).filter(|vm| vm.report.spec.start == last).map(drop)
    })
    .await;
}

fn seed_of(lab: &Lab, vm: &VmId) -> Seed {
    let name = VolumeName::new(format!("{vm}-seed")).expect("name");
    let inside = lab.home.inside();
    let mut tar = tar::Archive::new(&inside.volumes[&name].data[..]);
    let first = tar.entries().expect("a tar").next().expect("an entry").expect("an entry");
    serde_json::from_reader(first).expect("a seed")
}

fn log(line: &str) -> GuestBody {
    GuestBody::log(LogStream::Stdout, line)
}

async fn lines(lab: &Lab, id: &JobId) -> Vec<String> {
    let lines = jobs::log(&lab.cluster, id, 0, 10).await.expect("log");
    lines.into_iter().map(|line| line.line).collect()
}

async fn cancel_now(lab: &Lab, id: &JobId) {
    // As the API does it.
    let request = |intent: &mut JobIntent| {
        intent.gives_up |= intent.now;
        (intent.cancel, intent.now) = (true, true);
    };
    jobs::intend(&lab.cluster, id, request).await.expect("cancel");
}

#[tokio::test]
async fn a_vm_that_ended_under_its_job_is_started_once_more_for_its_outputs() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    lab.home.say(&vm, log("first"));
    let epoch = || lab.cloud.inside().volumes[&data_volume()].info.epoch;
    let before = epoch();
    end_vm(&lab.home, &vm);
    started_again(&lab, &id).await;
    let seed = seed_of(&lab, &vm);
    assert!(seed.collect && seed.command.is_empty() && seed.outputs == ["/job/out"]);
    assert!(epoch() > before, "the VM of before could write");
    let job = lab.wait_for_state(&id, JobState::Collecting).await;
    assert!(job.reason.contains("started once more"), "{}", job.reason);
    // Its messages are numbered from 1 again.
    lab.home.say(&vm, log("second"));
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    for said in ["its QEMU is gone", "what was on its disks then", "panic: no root"] {
        assert!(job.reason.contains(said), "{}", job.reason);
    }
    assert_eq!((job.exit_code, starts(&lab, &vm)), (None, 2));
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
    assert_eq!(lines(&lab, &id).await, ["first", "second"]);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_vm_that_ends_before_its_command_has_begun_is_not_started_again() {
    let lab = patient().await;
    let id = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    end_vm(&lab.home, &vm_of(&id));
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(!job.reason.contains("outputs"), "{}", job.reason);
    assert_eq!(starts(&lab, &vm_of(&id)), 1);
}

#[tokio::test]
async fn a_vm_that_ends_once_more_has_lost_its_outputs() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    end_vm(&lab.home, &vm);
    started_again(&lab, &id).await;
    end_vm(&lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("outputs are lost: the VM that was to write"), "{}", job.reason);
    assert_eq!(starts(&lab, &vm), 2);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_runner_that_can_t_write_the_outputs_says_why_they_are_lost() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    end_vm(&lab.home, &vm);
    started_again(&lab, &id).await;
    lab.home.say(&vm, GuestBody::Failed { reason: "the command is empty".into() });
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("its QEMU is gone"), "{}", job.reason);
    assert!(job.reason.contains("lost: the runner in the guest: the command is"), "{}", job.reason);
}

#[tokio::test]
async fn a_host_that_is_silent_for_a_while_costs_no_outputs() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    end_vm(&lab.home, &vm);
    started_again(&lab, &id).await;
    unreachable(&lab, &lab.home).await;
    lab.wait_for_job(&id, "the reason", |job| job.reason.contains("is down")).await;
    lab.home.inside().down = false;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Failed).await;
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

#[tokio::test]
async fn who_cancels_now_does_not_wait_for_a_host_that_is_silent() {
    let lab = patient().await;
    let (id, _) = running(&lab).await;
    unreachable(&lab, &lab.home).await;
    cancel_now(&lab, &id).await;
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert!(job.reason.contains("outputs are lost: host home1 does not answer"), "{}", job.reason);
}

#[tokio::test]
async fn who_cancels_waits_for_a_host_that_is_silent() {
    let mut lab = patient().await;
    lab.supervisor.stop().await;
    lab.start_controller(Timing { cancel_deadline: TIMING.cancel_deadline, ..PATIENT }).await;
    let (id, vm) = running(&lab).await;
    unreachable(&lab, &lab.home).await;
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    wait_for("the time of its guest to be over", async || {
        jobs::record(&lab.cluster, &id).await.expect("record").collect.map(drop)
    })
    .await;
    lab.home.inside().down = false;
    started_again(&lab, &id).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"), "{}", job.reason);
}

#[tokio::test]
async fn a_runner_that_fails_while_its_command_runs_costs_no_outputs() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    lab.home.say(&vm, GuestBody::Failed { reason: "can't stop all processes".into() });
    started_again(&lab, &id).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("can't stop all processes"), "{}", job.reason);
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

#[tokio::test]
async fn a_reboot_of_its_host_costs_a_job_its_end_and_not_its_outputs() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    lab.home.reboot(false);
    started_again(&lab, &id).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("home1 rebooted"), "{}", job.reason);
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

#[tokio::test]
async fn a_cancel_now_stops_the_vm_and_fetches_what_is_on_its_disks() {
    let lab = patient().await;
    let (id, vm) = running(&lab).await;
    cancel_now(&lab, &id).await;
    started_again(&lab, &id).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert_eq!(job.reason, "cancelled on request; its outputs are what was on its disks then");
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

#[tokio::test]
async fn a_second_cancel_now_gives_up_the_outputs() {
    let lab = patient().await;
    let (id, _) = running(&lab).await;
    cancel_now(&lab, &id).await;
    started_again(&lab, &id).await;
    cancel_now(&lab, &id).await;
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert!(job.reason.contains("given up on request"), "{}", job.reason);
    assert_eq!(job.outputs, None);
    lab.wait_for_clean_hosts().await;
}

/// The controller is killed instead of this write among those of the job after its VM has ended. Returns false if there are fewer.
async fn killed_at(write: u64) -> bool {
    let mut lab = patient().await;
    let (id, vm) = running(&lab).await;
    lab.home.say(&vm, log("first"));
    let cut = lab.cluster.records.counts.cut_at(id.as_str(), write);
    end_vm(&lab.home, &vm);
    let begun = std::time::Instant::now();
    let (mut is_cut, mut is_told) = (false, false);
    let last = last_start_of(&jobs::record(&lab.cluster, &id).await.expect("record"));
    let job = loop {
        if !is_cut && cut.is_reached() {
            is_cut = true;
            lab.supervisor.stop().await;
            lab.start_controller(PATIENT).await;
        }
        let starts_again = {
            let inside = lab.home.inside();
            inside.vms.get(&vm).is_some_and(|vm| vm.report.spec.start == last)
        };
        if starts_again && !is_told {
            is_told = true;
            finish(&lab.home, &lab.home, &vm);
        }
        let job = lab.job(&id).await;
        if job.state.is_final() {
            break job;
        }
        let waited_s = PATIENCE.as_secs();
        assert!(
            begun.elapsed() < PATIENCE,
            "write {write}: waited {waited_s} s for the end: {job:?}"
        );
        tokio::time::sleep(TIMING.poll).await;
    };
    assert_eq!(job.state, JobState::Failed, "write {write}: {}", job.reason);
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"), "write {write}");
    assert_eq!((starts(&lab, &vm), lines(&lab, &id).await), (2, vec!["first".to_owned()]));
    lab.wait_for_clean_hosts().await;
    is_cut
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_starts_the_vm_once_more_and_not_twice() {
    let mut write = 1;
    while killed_at(write).await {
        write += 1;
    }
    assert!(write > 4, "only {write} writes");
}
