//! The data of a running job come to its VM, where the planner wants that, and what stands against it.

use perigee_model::job::{Access, JobSpec, JobState, JobVolume, NewVolume};
use perigee_model::plan::{Plan, PlanOption, Trigger, Way};
use perigee_model::replica::Replica;
use perigee_model::volume::VolumeSource;
use perigee_model::{LeaveSite, VmId, VolumeName};

use super::fake::FakeHost;
use super::volume_moves::home_in_record;
use super::{Lab, data_volume, finish, running_as, spec, wait_for};
use crate::storage::replicas::ReplicaRecord;
use crate::storage::volumes;
use crate::{jobs, planning, rentals};

/// The time lost is in the counters, so the test does not take that time.
#[tokio::test]
async fn the_data_of_a_job_that_loses_time_to_the_network_come_to_its_vm() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, JobSpec { may_migrate: true, ..spec(Access::Write) }).await;
    wait_for("the data to come", async || {
        let asked = lab.home.inside().vms[&vm].asked.is_some();
        assert!(!asked, "512 MiB of memory cost more than little data");
        wait_for_the_network(&lab.home, &vm, 3);
        (home_in_record(&lab, &id, "tpch").await == lab.home.id).then_some(())
    })
    .await;
    wait_for("the copy to be over", async || {
        let record = jobs::record(&lab.cluster, &id).await.expect("record");
        // The next change must save more.
        (record.to_follow.is_empty() && record.moves == 1).then_some(())
    })
    .await;
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let chosen = decisions.last().and_then(|decision| decision.plan.chosen()).expect("a decision");
    assert_eq!((chosen.way, &chosen.end), (Way::Copy, &lab.home.id));
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

/// A request that the VM waits for: 8 KiB from another host.
pub fn wait_for_the_network(host: &FakeHost, vm: &VmId, disk: usize) {
    let mut inside = host.inside();
    let io = &mut inside.vms.get_mut(vm).expect("VM").report.io[disk];
    io.reads += 1;
    io.read_bytes += 8192;
    io.network_requests += 1;
    for ns in [&mut io.read_ns, &mut io.busy_ns, &mut io.network_ns, &mut io.network_busy_ns] {
        *ns += 20_000_000;
    }
}

#[tokio::test]
async fn a_copy_that_is_refused_is_off_for_a_while_and_the_vm_moves_instead() {
    let lab = Lab::up().await;
    let wanted = JobSpec { may_migrate: true, memory_bytes: 256 << 20, ..spec(Access::Write) };
    let (id, vm) = running_as(&lab, wanted).await;
    let confined = LeaveSite::Never;
    lab.cloud.inside().volumes.get_mut(&data_volume()).expect("data").info.leave_site = confined;
    wait_for("the VM to be moved", async || {
        wait_for_the_network(&lab.home, &vm, 3);
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    let why = "can't move volume tpch to home1: its policy is leave-site: never";
    lab.wait_for_job(&id, "saying why", |job| job.reason.contains(why)).await;
    let decision = wait_for("the decision", async || {
        let all = planning::decisions(&lab.cluster, &id).await.expect("decisions");
        all.into_iter().find(|decision| decision.trigger == Trigger::TimeLost)
    })
    .await;
    assert_eq!(decision.plan.chosen().map(|chosen| chosen.way), Some(Way::Migrate));
    let copy = decision.plan.options.iter().find(|option| option.way == Way::Copy);
    let reason = &copy.expect("it is listed").reason;
    assert!(reason.starts_with("not possible") && reason.contains(why), "{reason}");
}

#[tokio::test]
async fn a_copy_that_its_home_calls_off_is_said_and_does_not_make_the_next_change_dearer() {
    let lab = Lab::up().await;
    let wanted = JobSpec { may_migrate: true, memory_bytes: 256 << 20, ..spec(Access::Write) };
    let (id, vm) = running_as(&lab, wanted).await;
    lab.cloud.inside().moves.lets_none_go = true;
    wait_for("the VM to be moved", async || {
        wait_for_the_network(&lab.home, &vm, 3);
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let mut decided = decisions.iter().filter(|decision| decision.trigger == Trigger::TimeLost);
    let copy = decided.next().expect("the copy was begun");
    assert_eq!(copy.plan.chosen().map(|chosen| chosen.way), Some(Way::Copy));
    assert!(copy.outcome.contains("a client's clone stands on it"), "{}", copy.outcome);
    let record = jobs::record(&lab.cluster, &id).await.expect("record");
    assert_eq!(record.moves, 0, "nothing has moved yet");
}

#[tokio::test]
async fn a_second_volume_that_is_refused_does_not_keep_the_planner_waiting() {
    let lab = Lab::up().await;
    let second = VolumeName::new("second").expect("name");
    let new = NewVolume {
        name: second.clone(),
        host: Some(lab.cloud.id.clone()),
        size_bytes: Some(1 << 30),
        source: VolumeSource::Empty,
        leave_site: LeaveSite::Allowed,
    };
    volumes::create(&lab.cluster, new).await.expect("create");
    let mut wanted = JobSpec { may_migrate: true, ..spec(Access::Write) };
    let mount = "/second".to_owned();
    wanted.volumes.push(JobVolume {
        volume: second.clone(),
        mount,
        access: Access::Write,
        ranks: Vec::new(),
    });
    let (id, vm) = running_as(&lab, wanted).await;
    let confined = LeaveSite::Never;
    lab.cloud.inside().volumes.get_mut(&second).expect("data").info.leave_site = confined;
    wait_for("the first volume to come", async || {
        wait_for_the_network(&lab.home, &vm, 3);
        (home_in_record(&lab, &id, "tpch").await == lab.home.id).then_some(())
    })
    .await;
    wait_for("the second one to be given up", async || {
        let record = jobs::record(&lab.cluster, &id).await.expect("record");
        record.to_follow.is_empty().then_some(())
    })
    .await;
    assert_eq!(home_in_record(&lab, &id, "second").await, lab.cloud.id);
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let outcome = &decisions.last().expect("a decision").outcome;
    assert!(outcome.starts_with("volume second stays at cloud1: can't move"), "{outcome}");
}

fn copy_of(plan: &Plan) -> &PlanOption {
    plan.options.iter().find(|option| option.way == Way::Copy).expect("it is listed")
}

#[tokio::test]
async fn data_that_have_no_room_at_the_vms_host_are_planned_to_stay() {
    let mut lab = Lab::up().await;
    let spec = JobSpec { may_migrate: true, ..spec(Access::Write) };
    let plan = rentals::plan(&lab.cluster, &spec).await.expect("a plan").plan;
    assert!(!copy_of(&plan).reason.starts_with("not possible"), "nothing is known of the room");
    lab.home.inside().pool_free_bytes = Some(1 << 20);
    lab.restart_controller().await;
    wait_for("both hosts to have answered", async || {
        lab.cluster.hosts.report(&lab.cloud.id)?;
        lab.cluster.hosts.pool_free_bytes(&lab.home.id)
    })
    .await;
    let plan = rentals::plan(&lab.cluster, &spec).await.expect("a plan").plan;
    let reason = &copy_of(&plan).reason;
    assert!(reason.contains("home1 has 1 MiB of disk space free"), "{reason}");
}

#[tokio::test]
async fn a_copy_to_a_host_with_a_replica_ships_only_what_that_lacks() {
    let lab = Lab::up().await;
    let spec = JobSpec { may_migrate: true, ..spec(Access::Write) };
    let whole = rentals::plan(&lab.cluster, &spec).await.expect("a plan").plan;
    let site = lab.home.addresses.site.clone();
    let view = Replica {
        volume: data_volume(),
        site: site.clone(),
        host: lab.home.id.clone(),
        every_s: 3600,
        keep: 1,
        complete_ms: Some(1),
        points: 1,
        behind_bytes: Some(1 << 20),
        missing_bytes: None,
        stopping: false,
        kept: None,
        problem: String::new(),
    };
    let record = ReplicaRecord::new(view);
    let key = format!("replicas/{}/{site}", data_volume());
    lab.cluster.records.put(&key, &record).await.expect("put");
    let rest = rentals::plan(&lab.cluster, &spec).await.expect("a plan").plan;
    let (whole, rest) = (copy_of(&whole).shipped_bytes, copy_of(&rest).shipped_bytes);
    assert!(whole >= Some(100 << 20) && rest < Some(20 << 20), "{whole:?} {rest:?}");
}
