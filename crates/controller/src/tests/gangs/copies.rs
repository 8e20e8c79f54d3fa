//! The data of a gang come to its VMs, where the planner wants that.

use perigee_model::HostId;
use perigee_model::gang::member_of;
use perigee_model::money::Money;
use perigee_model::plan::{Decision, Trigger, Way};
use perigee_model::volume_move::VolumeMoveState;

use super::super::copies::wait_for_the_network;
use super::*;
use crate::planning;
use crate::records::{Gang, GangCopy};
use crate::tests::money::{PRICES, lab_with};

/// Two VMs at `home1`, each with a clone of a volume at `cloud1`. Their memory is dearer to move than these little data.
fn far_from_its_data() -> JobSpec {
    JobSpec {
        start: Start::Site("home".parse().expect("a name")),
        volumes: spec(Access::Clone).volumes,
        memory_bytes: 400 << 20,
        may_migrate: true,
        ..gang(2)
    }
}

fn record_of(lab: &Lab, id: &JobId, rank: u32) -> std::sync::Arc<JobRecord> {
    lab.cluster.index.job(&member_of(id, rank)).expect("a member")
}

/// The homes of the clones, by rank.
fn homes(lab: &Lab, id: &JobId) -> Vec<HostId> {
    let home = |rank| {
        let record = record_of(lab, id, rank);
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        let data: Vec<&HostId> =
            disks.filter(|disk| disk.role.is_data()).map(|disk| &disk.home).collect();
        data[0].clone()
    };
    (0..2).map(home).collect()
}

fn copy_of(lab: &Lab, id: &JobId) -> Option<GangCopy> {
    lab.cluster.index.job(id)?.kind.gang()?.last_copy.clone()
}

/// Whether the new home of each clone still copies what it lacks.
fn fills(lab: &Lab, id: &JobId) -> bool {
    (0..2).all(|rank| {
        let record = record_of(lab, id, rank);
        let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
        let data = disks.find(|disk| disk.role.is_data());
        let last = data.and_then(|disk| lab.cluster.index.volume_move(&disk.volume));
        last.is_some_and(|last| last.view.state == VolumeMoveState::Filling)
    })
}

/// As [`until`], while the VMs wait for what they read over the network.
async fn until_lost(lab: &Lab, hosts: &[&FakeHost], id: &JobId, is: impl Fn(&Job) -> bool) -> Job {
    let begun = Instant::now();
    loop {
        play(hosts, &|_| Does::RunsOn);
        for rank in 0..2 {
            let vm = member(id, rank);
            let host = host_of(hosts, &vm);
            wait_for_the_network(host, &vm, 3);
            // With this its figures are recorded.
            host.say(&vm, GuestBody::Progress { done: 0, total: 9, label: "reads".into() });
        }
        let job = lab.job(id).await;
        if is(&job) {
            return job;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not come to that: {job:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn copy_decided(lab: &Lab, id: &JobId) -> Decision {
    let decisions = planning::decisions(&lab.cluster, id).await.expect("decisions");
    let is_copy = |one: &Decision| one.plan.chosen().is_some_and(|option| option.way == Way::Copy);
    let copies = decisions.into_iter().filter(|one| one.trigger == Trigger::TimeLost);
    copies.into_iter().find(is_copy).expect("a copy was decided")
}

#[tokio::test]
async fn the_data_of_a_gang_come_to_its_vms_when_waiting_for_them_has_cost_as_much() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(far_from_its_data()).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    assert_eq!(homes(&lab, &id), [lab.cloud.id.clone(), lab.cloud.id.clone()]);
    let is_over = |_: &Job| copy_of(&lab, &id).is_some_and(|copy| !copy.is_open());
    until_lost(&lab, &hosts, &id, is_over).await;
    assert_eq!(homes(&lab, &id), [lab.home.id.clone(), lab.home.id.clone()]);
    let copy = copy_of(&lab, &id).expect("one");
    assert_eq!((copy.number, copy.undone.as_str()), (1, ""));
    for rank in 0..2 {
        let record = record_of(&lab, &id, rank);
        // What was lost before has paid for it, and the next change must save more.
        assert_eq!((record.moves, record.to_follow.len()), (1, 0));
        assert!(lab.cluster.balances.price_factor(&member(&id, rank)) > 1.9);
        assert!(lab.home.inside().vms[&member(&id, rank)].asked.is_none(), "no VM moves");
    }
    let decided = copy_decided(&lab, &id).await;
    assert!(decided.summary.contains("copying 2 volumes costs"), "{decided:?}");
    assert!(decided.outcome.is_empty(), "{decided:?}");
    let first = planning::decisions(&lab.cluster, &id).await.expect("decisions").remove(0);
    let planned = first.plan.options.iter().find(|option| option.way == Way::Copy);
    assert!(planned.is_some_and(|copy| copy.is_possible()), "{first:?}");
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn data_of_a_gang_that_may_not_go_stay_and_the_decision_says_why() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(far_from_its_data()).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    lab.cloud.inside().moves.lets_none_go = true;
    let is_over = |_: &Job| copy_of(&lab, &id).is_some_and(|copy| !copy.is_open());
    until_lost(&lab, &hosts, &id, is_over).await;
    assert_eq!(homes(&lab, &id), [lab.cloud.id.clone(), lab.cloud.id.clone()]);
    let why = "a client's clone stands on it";
    let copy = copy_of(&lab, &id).expect("one");
    assert!(copy.undone.starts_with("rank 0: ") && copy.undone.contains(why), "{copy:?}");
    assert_eq!(copy_decided(&lab, &id).await.outcome, copy.undone);
    assert_eq!((copy.run, copy.undone_in_a_row), (0, 1));
    let moves: u32 = (0..2).map(|rank| record_of(&lab, &id, rank).moves).sum();
    assert_eq!(moves, 0, "nothing has come");
}

/// What the clones share is paid for once, if the job ends when they have come or `while_they_come`.
async fn are_paid_for_once(while_they_come: bool) {
    let lab = lab_with(PRICES).await;
    let hosts = [&lab.home, &lab.cloud];
    let new = JobSpec { root_bytes: Some(1 << 30), timeout_s: Some(600), ..far_from_its_data() };
    let id = lab.submit(new).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    lab.home.inside().moves.missing_bytes = if while_they_come { 1 << 20 } else { 0 };
    let have_come = || copy_of(&lab, &id).is_some_and(|copy| !copy.is_open());
    let is_due = |_: &Job| if while_they_come { fills(&lab, &id) } else { have_come() };
    until_lost(&lab, &hosts, &id, is_due).await;
    let placement = record_of(&lab, &id, 0).placement.clone().expect("a placement");
    let [bytes] = placement.traits.data_bytes[..] else { panic!("one volume: {placement:?}") };
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    let once = Money::from_micros(90_000).of(bytes, 1 << 30);
    assert!(once > Money::ZERO, "{bytes} bytes");
    let spent = job.cost.and_then(|cost| cost.spent);
    assert_eq!(spent, Some(once), "while they come: {while_they_come}");
    lab.home.inside().moves.missing_bytes = 0;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clones_of_one_volume_share_is_paid_for_once_whenever_the_job_ends() {
    tokio::join!(are_paid_for_once(false), are_paid_for_once(true));
}

/// The volumes stay where they are then, and the decision says that of itself.
#[tokio::test]
async fn a_move_that_a_person_asks_for_ends_that_the_data_come() {
    let lab = Lab::up().await;
    let id = lab.submit(far_from_its_data()).await;
    let hosts = [&lab.home, &lab.cloud];
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    lab.home.inside().moves.missing_bytes = 1 << 20;
    until_lost(&lab, &hosts, &id, |_| fills(&lab, &id)).await;
    let ask = MoveJob { hosts: vec![lab.cloud.id.clone()], ..MoveJob::default() };
    jobs::ask_to_move(&lab.cluster, &id, ask).await.expect("asked");
    let moves = |job: &Job| job.gang_move.is_some();
    until(&lab, &hosts, &id, |_| Does::RunsOn, moves).await;
    let copy = copy_of(&lab, &id).expect("one");
    assert_eq!((copy.is_open(), copy.undone_in_a_row), (false, 0));
    assert!(copy.undone.contains("the VMs of its job move"), "{copy:?}");
    assert_eq!(copy_decided(&lab, &id).await.outcome, copy.undone);
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let asked = decisions.iter().find(|one| one.trigger == Trigger::Asked).expect("the move");
    assert!(asked.outcome.is_empty(), "{asked:?}");
    lab.supervisor.stop().await;
}

#[test]
fn a_copy_of_another_run_is_none() {
    let copy = GangCopy {
        number: 1,
        run: 0,
        hosts: Vec::new(),
        reason: String::new(),
        started_ms: 0,
        ended_ms: None,
        undone: String::new(),
        undone_in_a_row: 0,
    };
    let gang = Gang { last_copy: Some(copy), ..Gang::default() };
    assert!(gang.open_copy(0).is_some() && gang.open_copy(1).is_none());
}

#[tokio::test]
async fn a_gang_ends_while_its_data_come_and_nothing_of_it_is_left() {
    let mut lab = Lab::up().await;
    let id = lab.submit(far_from_its_data()).await;
    until(&lab, &[&lab.home, &lab.cloud], &id, |_| Does::RunsOn, all_run).await;
    lab.home.inside().moves.missing_bytes = 1 << 20;
    let says = |job: &Job| {
        job.reason.starts_with("its data come to its VMs (") && job.reason.contains("0 of 2")
    };
    until_lost(&lab, &[&lab.home, &lab.cloud], &id, says).await;
    // Another controller goes on with it, and does not begin it again.
    lab.restart_controller().await;
    let hosts = [&lab.home, &lab.cloud];
    let have_come = |_: &Job| homes(&lab, &id).iter().all(|home| *home == lab.home.id);
    until_lost(&lab, &hosts, &id, have_come).await;
    assert!(copy_of(&lab, &id).is_some_and(|copy| copy.is_open() && copy.number == 1));
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.home.inside().moves.missing_bytes = 0;
    lab.wait_for_clean_hosts().await;
}

/// The controller is killed instead of this write while the data come, and another one goes on.
async fn killed_at(of: &str, write: u64) {
    let mut lab = Lab::up().await;
    let id = lab.submit(far_from_its_data()).await;
    until(&lab, &[&lab.home, &lab.cloud], &id, |_| Does::RunsOn, all_run).await;
    let cut = lab.cluster.records.counts.cut_at(of, write);
    until_lost(&lab, &[&lab.home, &lab.cloud], &id, |_| cut.is_reached()).await;
    lab.restart_controller().await;
    let is_over = |_: &Job| copy_of(&lab, &id).is_some_and(|copy| !copy.is_open());
    until_lost(&lab, &[&lab.home, &lab.cloud], &id, is_over).await;
    let copy = copy_of(&lab, &id).expect("one");
    assert_eq!((copy.number, copy.undone.as_str()), (1, ""), "{of} {write}");
    assert!(homes(&lab, &id).iter().all(|home| *home == lab.home.id), "{of} {write}");
    let moves = [0, 1].map(|rank| record_of(&lab, &id, rank).moves);
    assert_eq!(moves, [1, 1], "{of} {write}: each has paid for its copy once");
    lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_data_of_a_gang_come_has_them_come_once() {
    // The decision, the request of a member's volume, and the first step of its move.
    tokio::join!(
        killed_at("decisions/g-0001", 1),
        killed_at("volume_moves/g-0001-n0", 1),
        killed_at("volume_moves/g-0001-n0", 2)
    );
}
