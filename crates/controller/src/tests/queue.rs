//! Jobs that wait, and jobs that lose their host.

use std::sync::atomic::Ordering;

use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState, Restart, Start};
use perigee_model::persistent_vm::NewVm;
use perigee_model::vm::{Cpu, Hardware};
use perigee_model::{ProblemKind, VmId};

use super::fake::FakeHost;
use super::{Lab, PATIENCE, TIMING, data_volume, finish, running_as, spec, vm_of, wait_for};
use crate::cluster::Timing;
use crate::cluster::moved;
use crate::{hosts, jobs, planning};

/// A job of a quarter of a GiB without data, that starts anywhere.
fn small() -> JobSpec {
    let volumes = Vec::new();
    JobSpec { start: Start::Anywhere, memory_bytes: 256 << 20, volumes, ..spec(Access::Read) }
}

pub async fn unreachable(lab: &Lab, host: &FakeHost) {
    host.inside().down = true;
    wait_for("the host to be unreachable", async || {
        let host = hosts::info(&lab.cluster, &host.id).await.expect("host");
        (host.state == perigee_model::job::HostState::Unreachable).then_some(())
    })
    .await;
}

#[tokio::test]
async fn jobs_submitted_at_once_boot_a_few_at_a_time_and_say_their_places() {
    let lab = Lab::up().await;
    let mut ids = Vec::new();
    for _ in 0..12 {
        ids.push(lab.submit(small()).await);
    }
    let last =
        lab.wait_for_job(ids.last().expect("jobs"), "the last", |job| job.queue_place == Some(8));
    let reason = last.await.reason;
    assert!(reason.contains("as many jobs as it may at once"), "{reason}");
    let vms = || lab.home.inside().vms.len() + lab.cloud.inside().vms.len();
    wait_for("4 VMs", async || (vms() == 4).then_some(())).await;
    for id in &ids {
        let vm = vm_of(id);
        wait_for("the VM in its turn", async || {
            let host =
                [&lab.home, &lab.cloud].into_iter().find(|h| h.inside().vms.contains_key(&vm))?;
            assert!(vms() <= 4, "{} VMs", vms());
            host.say(&vm, GuestBody::Started);
            finish(host, host, &vm);
            Some(())
        })
        .await;
        lab.wait_for_state(id, JobState::Succeeded).await;
    }
    assert_eq!(lab.cluster.counters.placed.load(Ordering::Relaxed), 12);
}

/// It was asked about all of them at once.
#[tokio::test]
async fn a_home_is_asked_about_a_few_queued_jobs_at_a_time() {
    let mut lab = Lab::up().await;
    // No host is large enough for them.
    let waits = JobSpec { memory_bytes: 64 << 30, ..spec(Access::Read) };
    for _ in 0..16 {
        lab.submit(waits.clone()).await;
    }
    lab.cloud.inside().holds_infos = true;
    lab.restart_controller().await;
    wait_for("it to be asked", async || (lab.cloud.inside().infos_open >= 8).then_some(())).await;
    let other = lab.submit(JobSpec { start: Start::Host(lab.home.id.clone()), ..small() }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&other)).await;
    let max = lab.cloud.inside().infos_open_max;
    assert!(max < 16, "about {max} at once");
    lab.cloud.inside().holds_infos = false;
}

/// A plan waited for it at the host where it had been.
#[tokio::test]
async fn a_plan_waits_for_a_vm_where_it_has_arrived() {
    let mut lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Read)).await;
    lab.supervisor.stop().await;
    lab.start_controller(Timing { host_deadline: PATIENCE, ..TIMING }).await;
    let known = async || {
        let reports = [&lab.home, &lab.cloud].map(|host| lab.cluster.hosts.report(&host.id));
        reports.iter().all(Option::is_some).then_some(())
    };
    wait_for("the hosts' reports", known).await;
    lab.wait_for_state(&id, JobState::Running).await;
    // Nobody looks at what follows but the plan.
    lab.supervisor.stop().await;
    let waited_for = || {
        let hosts = planning::hosts_that_are_waited_for(&lab.cluster, &Default::default());
        let busy = hosts.into_iter().filter(|(_, (_, running))| !running.is_empty());
        busy.map(|(host, _)| host).collect::<Vec<_>>()
    };
    assert_eq!(waited_for(), [lab.home.id.clone()]);
    lab.cluster.index.put_migration(&moved(vm.as_str(), 1));
    assert_eq!(waited_for(), [lab.cloud.id.clone()]);
}

/// A job that fills `home1`, with a timeout that makes it a kind of its own.
fn fills_home(timeout_s: u64) -> JobSpec {
    JobSpec { memory_bytes: 900 << 20, timeout_s: Some(timeout_s), ..spec(Access::Read) }
}

#[tokio::test]
async fn a_plan_names_the_limit_of_the_kinds_of_jobs_that_it_predicts() {
    let lab = Lab::up().await;
    running_as(&lab, fills_home(60)).await;
    let why = async || {
        // On a busy machine a host may not answer for a moment.
        let waits = async || {
            let planned = planning::plan(&lab.cluster, &fills_home(60)).await.ok()?;
            let [wait] = planned.waits.as_slice() else { return None };
            Some(wait.why.clone())
        };
        wait_for("a plan that waits for one host", waits).await
    };
    for _ in 0..40 {
        lab.submit(fills_home(60)).await;
    }
    let of_one_kind = why().await;
    assert!(!of_one_kind.contains("kinds of jobs wait"), "{of_one_kind}");
    for kind in 1..=32 {
        lab.submit(fills_home(60 + kind)).await;
    }
    let limit = "33 kinds of jobs wait, and a plan predicts 32 of them at most";
    let of_many = why().await;
    assert!(of_many.contains(limit), "{of_many}");
    lab.supervisor.stop().await;
}

/// Its host was kept free, and was not given to it.
#[tokio::test]
async fn no_host_is_kept_for_a_job_whose_data_can_not_be_reached() {
    let lab = Lab::up().await;
    let at_home = || JobSpec { start: Start::Host(lab.home.id.clone()), ..small() };
    let first = lab.submit(at_home()).await;
    lab.wait_for_vm(&lab.home, &vm_of(&first)).await;
    lab.home.say(&vm_of(&first), GuestBody::Started);
    unreachable(&lab, &lab.cloud).await;
    // Beside the first one there is no room for it.
    let large = lab.submit(JobSpec { memory_bytes: 900 << 20, ..spec(Access::Write) }).await;
    lab.wait_for_job(&large, "waiting for its data", |job| job.reason.contains("cloud1")).await;
    let second = lab.submit(at_home()).await;
    lab.wait_for_vm(&lab.home, &vm_of(&second)).await;
}

#[tokio::test]
async fn a_queued_job_is_cancelled_without_a_driver() {
    let lab = Lab::up().await;
    let mut huge = small();
    huge.memory_bytes = 64 << 30;
    let id = lab.submit(huge).await;
    let job = lab.wait_for_job(&id, "queued", |job| job.queue_place == Some(1)).await;
    assert!(job.reason.contains("the largest host is"), "{}", job.reason);
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&id, JobState::Cancelled).await;
}

#[tokio::test]
async fn a_job_whose_host_went_away_before_its_vm_started_is_placed_again() {
    let lab = Lab::up().await;
    // It can make no disk: nothing was started when the host goes.
    lab.home.inside().no_new_volumes = true;
    lab.cloud.inside().no_new_volumes = true;
    let id = lab.submit(small()).await;
    let job = lab.wait_for_state(&id, JobState::Staging).await;
    let (first, second) = match job.host.as_ref() == Some(&lab.home.id) {
        true => (&lab.home, &lab.cloud),
        false => (&lab.cloud, &lab.home),
    };
    second.inside().no_new_volumes = false;
    unreachable(&lab, first).await;
    lab.wait_for_vm(second, &vm_of(&id)).await;
    second.say(&vm_of(&id), GuestBody::Started);
    finish_again(second, &id);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

pub fn finish_again(host: &FakeHost, id: &perigee_model::JobId) {
    let vm = vm_of(id);
    let out = perigee_model::VolumeName::new(format!("{vm}-r1-out")).expect("name");
    super::finish_with(host, host, &vm, out);
}

#[tokio::test]
async fn a_job_that_may_restart_begins_anew_when_its_host_is_fenced() {
    let lab = Lab::up().await;
    let third = FakeHost::start("home2", "home").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let mut job = spec(Access::Write);
    job.start = Start::Site(perigee_model::SiteId::new("home").expect("name"));
    job.restart = Restart::OnHostFailure;
    let id = lab.submit(job).await;
    let vm = vm_of(&id);
    let placed = lab.wait_for_job(&id, "starting", |job| job.started_ms.is_some()).await;
    let (first, second) = match placed.host.as_ref() == Some(&lab.home.id) {
        true => (&lab.home, &third),
        false => (&third, &lab.home),
    };
    lab.wait_for_vm(first, &vm).await;
    first.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    let before = lab.cloud.inside().volumes[&data_volume()].info.epoch;
    first.inside().down = true;
    lab.wait_for_vm(second, &vm).await;
    let after = lab.cloud.inside().volumes[&data_volume()].info.epoch;
    assert!(after > before, "the lost VM's epoch is of the past: {before} and {after}");
    second.say(&vm, GuestBody::Started);
    finish_again(second, &id);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    first.inside().down = false;
    wait_for("what the lost VM left to be removed", async || {
        let inside = first.inside();
        (inside.vms.is_empty() && inside.volumes.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_host_is_removed_by_force_and_says_what_is_lost() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    unreachable(&lab, &lab.cloud).await;
    let refused = hosts::remove(&lab.cluster, &lab.cloud.id, false).await.expect_err("a volume");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("tpch") && refused.why.contains(id.as_str()), "{refused}");
    let removal = hosts::remove(&lab.cluster, &lab.cloud.id, true).await.expect("removed");
    assert_eq!(removal.lost_volumes, [data_volume()]);
    assert_eq!(removal.failed_jobs, [id]);
    assert!(lab.cluster.hosts.get(&lab.cloud.id).is_err());
}

#[tokio::test]
async fn a_host_that_hangs_keeps_no_other_job_from_its_place() {
    let lab = Lab::up().await;
    let first = lab.submit(spec(Access::Clone)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&first)).await;
    lab.home.inside().hangs = true;
    // Its end removes an attachment, which is not answered.
    jobs::intend(&lab.cluster, &first, |intent| intent.cancel = true).await.expect("cancel");
    // A third site: its links are not measured, and measuring them hangs.
    let third = FakeHost::start("edge1", "edge").await;
    third.inside().hangs = true;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let mut reader = spec(Access::Read);
    reader.start = Start::Anywhere;
    lab.submit(reader).await;
    let mut other = small();
    other.start = Start::Host(lab.cloud.id.clone());
    let other = lab.submit(other).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&other)).await;
    for host in [&lab.home, &third] {
        host.inside().hangs = false;
    }
}

#[tokio::test]
async fn a_vm_is_not_moved_to_another_processor() {
    let lab = Lab::up().await;
    for (host, processor) in [(&lab.home, "EPYC"), (&lab.cloud, "Xeon")] {
        host.inside().kvm_on = Some(processor.to_owned());
        wait_for("the processor to be reported", async || {
            let info = hosts::info(&lab.cluster, &host.id).await.expect("host");
            (info.cpu_model == processor).then_some(())
        })
        .await;
    }
    let (_, vm) = running_as(&lab, spec(Access::Clone)).await;
    let moved =
        crate::vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await;
    let refused = moved.expect_err("the processors differ");
    assert!(refused.why.contains("\"EPYC\" is not \"Xeon\""), "{refused}");
}

/// As its guest does not see which processor its host has.
#[tokio::test]
async fn a_vm_with_a_common_cpu_moves_to_another_processor_of_the_same_maker() {
    let lab = Lab::up().await;
    let is_on = async |host: &FakeHost, processor: &str| {
        host.inside().kvm_on = Some(processor.to_owned());
        wait_for("the processor to be reported", async || {
            let info = hosts::info(&lab.cluster, &host.id).await.expect("host");
            (info.cpu_model == processor).then_some(())
        })
        .await;
    };
    is_on(&lab.home, "AMD EPYC 7001").await;
    is_on(&lab.cloud, "Intel(R) Xeon(R)").await;
    let new = super::persistent_vms::new_vm("home1");
    lab.make_vm(NewVm { volumes: Vec::new(), ..new.clone() }).await;
    lab.runs().await;
    let to = lab.cloud.id.clone();
    let moved = crate::vms::move_to(&lab.cluster, &new.name, to.clone(), Default::default()).await;
    let refused = moved.expect_err("the makers differ");
    assert!(refused.why.contains("\"AMD\" is not \"Intel\""), "{refused}");
    is_on(&lab.cloud, "AMD EPYC 9004").await;
    crate::vms::move_to(&lab.cluster, &new.name, to.clone(), Default::default())
        .await
        .expect("it moves");

    let hardware = Hardware { cpu: Cpu::Host, ..Hardware::default() };
    let name = VmId::new("other").expect("a name");
    let vm = NewVm { name: name.clone(), volumes: Vec::new(), hardware, ..new };
    lab.make_vm(vm).await;
    wait_for("it to run", async || {
        let record = lab.cluster.index.of_vm(&name).expect("its record");
        (record.job.state == JobState::Running).then_some(())
    })
    .await;
    let moved = crate::vms::move_to(&lab.cluster, &name, to, Default::default()).await;
    let refused = moved.expect_err("it has its host's CPU");
    assert!(refused.why.contains("\"AMD EPYC 7001\" is not"), "{refused}");
}
