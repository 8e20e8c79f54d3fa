//! All VMs of a gang move, or none.

use perigee_model::HostId;
use perigee_model::gang::moving::GangMove;
use perigee_model::job::{MigrationState, MoveJob};
use perigee_model::plan::Trigger;
use perigee_model::vm::MigrationPhase;
use perigee_model::volume_move::VolumesOnMove;

use super::*;
use crate::{planning, vms};

/// What becomes of a migration whose source was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Arrives,
    Fails,
    /// Nothing yet.
    Goes,
}

/// Each migration whose source was asked does what the test says.
pub fn carry(hosts: &[&FakeHost], way: &impl Fn(u32, &HostId) -> Way) {
    for source in hosts.iter().filter(|host| !host.inside().down) {
        let all: Vec<VmId> = source.inside().vms.keys().cloned().collect();
        for vm in all {
            let order = {
                let inside = source.inside();
                let Some(there) = inside.vms.get(&vm) else { continue };
                let phase = there.report.migration.as_ref().map(|migration| migration.phase);
                let copies = phase == Some(MigrationPhase::Copying);
                let Some(order) = there.asked.clone().filter(|_| copies) else { continue };
                order
            };
            let to = |host: &&&FakeHost| host.addresses.agent_url == order.destination_agent_url;
            let to = *hosts.iter().find(to).expect("its destination");
            let rank = perigee_model::gang::of_member(vm.as_str()).expect("a member").1;
            match way(rank, &to.id) {
                Way::Goes => {}
                Way::Fails => {
                    source.set_phase(&vm, MigrationPhase::Failed, VmStatus::Running);
                }
                Way::Arrives => {
                    for raise in &order.epochs {
                        for host in hosts {
                            if let Some(volume) = host.inside().volumes.get_mut(&raise.volume) {
                                volume.info.epoch = raise.to;
                            }
                        }
                    }
                    let (events, last_seq, begun) = {
                        let inside = source.inside();
                        let there = &inside.vms[&vm];
                        (there.events.clone(), there.report.last_seq, there.may_begin)
                    };
                    {
                        let mut inside = to.inside();
                        let Some(arrived) = inside.vms.get_mut(&vm) else { continue };
                        (arrived.events, arrived.may_begin) = (events, begun);
                    }
                    to.arrive(&vm, last_seq);
                    source.set_phase(&vm, MigrationPhase::Completed, VmStatus::Migrated);
                }
            }
        }
    }
}

/// As [`until`], and the migrations do what the test says.
pub async fn until_moved(
    lab: &Lab,
    hosts: &[&FakeHost],
    id: &JobId,
    way: impl Fn(u32, &HostId) -> Way,
    is: impl Fn(&Job) -> bool,
) -> Job {
    let begun = Instant::now();
    loop {
        play(hosts, &|_| Does::RunsOn);
        carry(hosts, &way);
        let job = lab.job(id).await;
        if is(&job) {
            return job;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not come to that: {job:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn at_home(count: u32) -> JobSpec {
    let start = Start::Site("home".parse().expect("a name"));
    JobSpec { start, memory_bytes: 400 << 20, ..gang(count) }
}

fn to(host: &FakeHost) -> MoveJob {
    MoveJob { hosts: vec![host.id.clone()], ..MoveJob::default() }
}

fn over(job: &Job) -> Option<&GangMove> {
    job.gang_move.as_ref().filter(|of| !of.is_open())
}

fn hosts_of(job: &Job) -> Vec<&str> {
    job.members.iter().filter_map(|one| Some(one.host.as_ref()?.as_str())).collect()
}

async fn running(lab: &Lab, hosts: &[&FakeHost], spec: JobSpec) -> JobId {
    let id = lab.submit(spec).await;
    until(lab, hosts, &id, |_| Does::RunsOn, all_run).await;
    id
}

#[tokio::test]
async fn all_vms_of_a_gang_move_one_after_another_and_the_way_back_is_kept_free() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = running(&lab, &hosts, at_home(2)).await;
    let asked = jobs::ask_to_move(&lab.cluster, &id, to(&lab.cloud)).await.expect("asked");
    assert_eq!(asked.hosts, [lab.cloud.id.clone(), lab.cloud.id.clone()]);
    let again = jobs::ask_to_move(&lab.cluster, &id, to(&lab.home)).await;
    // It may not have begun yet, and then its VMs are there already.
    assert_eq!(again.expect_err("it moves").kind, ProblemKind::Conflict);
    let first_only = |rank: u32, _: &HostId| if rank == 0 { Way::Arrives } else { Way::Goes };
    let half = |job: &Job| hosts_of(job) == ["cloud1", "home1"];
    let job = until_moved(&lab, &hosts, &id, first_only, half).await;
    assert!(job.gang_move.as_ref().is_some_and(GangMove::is_open), "{job:?}");
    let words = |job: &Job| job.reason.contains("1 of 2 are there");
    until_moved(&lab, &hosts, &id, first_only, words).await;
    // There would be room for it, if the first VM had no way back.
    let start = Start::Host(lab.home.id.clone());
    let small = lab.submit(JobSpec { start, count: 1, ..at_home(1) }).await;
    let second =
        |job: &Job| job.migrations.iter().any(|moved| moved.state == MigrationState::Copying);
    until_moved(&lab, &hosts, &id, first_only, second).await;
    assert_eq!(lab.job(&small).await.state, JobState::Queued);
    let job = until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, |job| over(job).is_some()).await;
    assert_eq!(hosts_of(&job), ["cloud1", "cloud1"]);
    let last = over(&job).expect("it is over");
    assert_eq!((last.asked, last.undone.as_str(), last.number), (Some(asked.request), "", 1));
    let factor = lab.cluster.balances.price_factor(&member(&id, 0));
    assert_eq!(factor, 1.0, "what a person asks for has no price");
    lab.wait_for_job(&small, "starting", |job| job.started_ms.is_some()).await;
    jobs::intend(&lab.cluster, &small, |intent| intent.cancel = true).await.expect("cancel");
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let moved = decisions.iter().find(|decision| decision.trigger == Trigger::Asked);
    assert!(
        moved.is_some_and(|moved| moved.summary.contains("to cloud1, cloud1")),
        "{decisions:?}"
    );
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.wait_for_state(&small, JobState::Cancelled).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn the_disks_of_all_vms_of_a_gang_come_after_them_if_that_was_asked_for() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = running(&lab, &hosts, at_home(2)).await;
    let ask = MoveJob { volumes: VolumesOnMove::Follow, ..to(&lab.cloud) };
    jobs::ask_to_move(&lab.cluster, &id, ask).await.expect("asked");
    let job = until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, |job| over(job).is_some()).await;
    assert_eq!(hosts_of(&job), ["cloud1", "cloud1"]);
    let all_came = |_: &Job| {
        (0..2).all(|rank| {
            let record = lab.cluster.index.job(&perigee_model::gang::member_of(&id, rank));
            let record = record.expect("a member");
            let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
            record.to_follow.is_empty() && disks.all(|disk| disk.home == lab.cloud.id)
        })
    };
    let job = until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, all_came).await;
    assert!(over(&job).is_some_and(|last| last.volumes == VolumesOnMove::Follow), "{job:?}");
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn if_one_vm_of_a_gang_does_not_move_those_that_have_moved_go_back() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = running(&lab, &hosts, at_home(2)).await;
    jobs::ask_to_move(&lab.cluster, &id, to(&lab.cloud)).await.expect("asked");
    let way = |rank: u32, _: &HostId| if rank == 1 { Way::Fails } else { Way::Arrives };
    let job = until_moved(&lab, &hosts, &id, way, |job| over(job).is_some()).await;
    assert_eq!(hosts_of(&job), ["home1", "home1"]);
    let last = over(&job).expect("it is over");
    assert!(last.undone.starts_with("rank 1 did not move: "), "{last:?}");
    assert_eq!(job.migrations.len(), 3, "there, not there, and back: {:?}", job.migrations);
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let last = decisions.last().expect("a decision");
    assert!(last.outcome.contains("its VMs went back"), "{last:?}");
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_move_of_a_gang_that_a_person_calls_off_is_undone() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = running(&lab, &hosts, at_home(2)).await;
    jobs::call_off_move(&lab.cluster, &id).await.expect_err("nothing moves");
    let asked = MoveJob { site: Some(lab.cloud.addresses.site.clone()), ..MoveJob::default() };
    jobs::ask_to_move(&lab.cluster, &id, asked).await.expect("asked");
    let first_only = |rank: u32, _: &HostId| if rank == 0 { Way::Arrives } else { Way::Goes };
    let second_goes = |job: &Job| {
        hosts_of(job) == ["cloud1", "home1"]
            && job.migrations.iter().any(|moved| moved.state == MigrationState::Copying)
    };
    until_moved(&lab, &hosts, &id, first_only, second_goes).await;
    jobs::call_off_move(&lab.cluster, &id).await.expect("called off");
    let job = until_moved(&lab, &hosts, &id, first_only, |job| over(job).is_some()).await;
    assert_eq!(hosts_of(&job), ["home1", "home1"]);
    assert_eq!(over(&job).expect("it is over").undone, "cancelled on request");
    // It may be asked for again.
    until_moved(&lab, &hosts, &id, first_only, |_| {
        let inside = lab.cloud.inside();
        inside.vms.is_empty() && inside.attachments.is_empty()
    })
    .await;
    wait_for("the remains to be removed", async || {
        jobs::ask_to_move(&lab.cluster, &id, to(&lab.cloud)).await.ok()
    })
    .await;
    let there = |job: &Job| over(job).is_some_and(|of| of.number == 2);
    let job = until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, there).await;
    assert_eq!(hosts_of(&job), ["cloud1", "cloud1"]);
}

#[tokio::test]
async fn a_vm_of_a_gang_that_can_t_go_back_is_said_and_goes_back_when_it_can() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = running(&lab, &hosts, at_home(2)).await;
    jobs::ask_to_move(&lab.cluster, &id, to(&lab.cloud)).await.expect("asked");
    let first_only = |rank: u32, _: &HostId| if rank == 0 { Way::Arrives } else { Way::Goes };
    let half = |job: &Job| hosts_of(job) == ["cloud1", "home1"];
    until_moved(&lab, &hosts, &id, first_only, half).await;
    lab.home.inside().starts_no_vm = true;
    let way = |rank: u32, _: &HostId| if rank == 1 { Way::Fails } else { Way::Arrives };
    let said = |job: &Job| job.reason.contains("can't yet and is tried again: rank 0: ");
    let job = until_moved(&lab, &hosts, &id, way, said).await;
    assert_eq!((job.state, hosts_of(&job)), (JobState::Running, vec!["cloud1", "home1"]));
    lab.home.inside().starts_no_vm = false;
    let job = until_moved(&lab, &hosts, &id, way, |job| over(job).is_some()).await;
    assert_eq!(hosts_of(&job), ["home1", "home1"]);
    assert_eq!(over(&job).expect("it is over").trouble, "");
}

#[tokio::test]
async fn a_gang_ends_while_it_moves_and_nothing_of_it_is_left() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    for cancels in [true, false] {
        let id = running(&lab, &hosts, at_home(2)).await;
        jobs::ask_to_move(&lab.cluster, &id, to(&lab.cloud)).await.expect("asked");
        let first_only = |rank: u32, _: &HostId| if rank == 0 { Way::Arrives } else { Way::Goes };
        let half = |job: &Job| hosts_of(job) == ["cloud1", "home1"];
        until_moved(&lab, &hosts, &id, first_only, half).await;
        if cancels {
            let cancel = jobs::intend(&lab.cluster, &id, |intent| {
                (intent.cancel, intent.now) = (true, true);
            });
            cancel.await.expect("cancel");
        } else {
            lab.cloud.say(&member(&id, 0), GuestBody::exited(3));
        }
        let job = until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, |job| job.state.is_final());
        let job = job.await;
        let expected = if cancels { JobState::Cancelled } else { JobState::Failed };
        assert_eq!(job.state, expected, "{}", job.reason);
        assert_eq!(over(&job).expect("it is over").undone, "the job ended");
        lab.wait_for_clean_hosts().await;
    }
}

/// No site has room for both of its VMs at first.
#[tokio::test]
async fn a_gang_whose_talk_crosses_sites_comes_together_when_a_site_has_room() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let spec = JobSpec { cpus: 5, may_migrate: true, ..gang(2) };
    let id = running(&lab, &hosts, spec).await;
    let mut before = hosts_of(&lab.job(&id).await).join(" ");
    assert!(["home1 cloud1", "cloud1 home1"].contains(&before.as_str()), "{before}");
    let second = second_home(&lab).await;
    let hosts = [&lab.home, &lab.cloud, &second];
    for rank in 0..2 {
        let (from, to) = (member(&id, rank), member(&id, 1 - rank));
        let sent = vec![perigee_model::vm::SentTo { to, bytes: 100 << 30 }];
        let host = host_of(&hosts, &from);
        host.inside().vms.get_mut(&from).expect("it is there").report.sent = sent;
        // With this its figures are recorded.
        host.say(&from, GuestBody::Progress { done: 0, total: 9, label: "sent".into() });
    }
    let job = until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, |job| over(job).is_some()).await;
    before = before.replace("cloud1", "home2");
    assert_eq!(hosts_of(&job).join(" "), before, "the one at home stays");
    let last = over(&job).expect("it is over");
    assert!(last.asked.is_none() && last.reason.contains("lost to talk between sites"), "{last:?}");
    let mut factors = [0, 1].map(|rank| lab.cluster.balances.price_factor(&member(&id, rank)));
    factors.sort_by(f64::total_cmp);
    assert!(factors[0] == 1.0 && factors[1] > 1.9, "the next move is dearer: {factors:?}");
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let moved = decisions.last().expect("a decision");
    assert_eq!(moved.trigger, Trigger::TimeLost);
    assert!(moved.plan.chosen().is_some() && moved.summary.contains(&last.reason), "{moved:?}");
    // What was sent before it came together does not count any more.
    assert_eq!(lab.job(&id).await.gang_move.expect("one").number, 1);
    let end = job.predicted_end.expect("it runs");
    assert!(end.left.is_none() && end.why.contains("no equal job"), "{end:?}");
}

#[tokio::test]
async fn a_move_of_a_gang_is_refused_with_the_reason_before_any_vm_moves() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    let hosts = [&lab.home, &lab.cloud, &second];
    let id = running(&lab, &hosts, at_home(3)).await;
    let refused = async |hosts: &[&str], site: Option<&str>| {
        let hosts = hosts.iter().map(|name| name.parse().expect("a name")).collect();
        let ask = MoveJob {
            hosts,
            site: site.map(|name| name.parse().expect("a name")),
            ..MoveJob::default()
        };
        jobs::ask_to_move(&lab.cluster, &id, ask).await.expect_err("it can't").to_string()
    };
    let why = refused(&["cloud1"], None).await;
    assert!(why.contains("host cloud1: its VMs that go there need 1200 MiB of memory and 3 virtual CPUs, and 960 MiB of memory"), "{why}");
    let why = refused(&[], Some("cloud")).await;
    assert!(why.contains("3 VMs have no room there") && why.contains("cloud1 2"), "{why}");
    let why = refused(&["cloud1", "cloud1"], None).await;
    assert!(why.contains("it has 3 VMs, and 2 hosts are named"), "{why}");
    refused(&["nowhere"], None).await;
    refused(&[], Some("nowhere")).await;
    let now = lab.job(&id).await;
    let why = refused(&hosts_of(&now), None).await;
    assert!(why.contains("there already"), "{why}");
    let (one, cloud) = (member(&id, 1), lab.cloud.id.clone());
    let alone = vms::move_to(&lab.cluster, &one, cloud, Default::default()).await;
    let alone = alone.expect_err("not one alone");
    assert!(alone.next.contains("perigee job move g-0001"), "{alone:?}");
    let single = lab.submit(JobSpec { count: 1, memory_bytes: 64 << 20, ..gang(1) }).await;
    let why = jobs::ask_to_move(&lab.cluster, &single, to(&lab.cloud)).await.expect_err("one VM");
    assert!(why.next.contains("perigee vm move"), "{why:?}");
    assert!(lab.job(&id).await.gang_move.is_none(), "nothing was begun");
}

/// What a guest has that says nothing may be the most.
#[tokio::test]
async fn memory_that_is_lent_to_the_vms_of_a_gang_needs_room_where_they_go() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let range =
        JobSpec { memory_bytes: 128 << 20, memory_max_bytes: Some(512 << 20), ..at_home(2) };
    let id = running(&lab, &hosts, range).await;
    let first = lab.cluster.index.of_vm(&member(&id, 0)).expect("its record");
    wait_for("what is lent to count", async || {
        (lab.cluster.index.demand_to_move(&first).memory_bytes == 512 << 20).then_some(())
    })
    .await;
    let ask = MoveJob { site: Some(lab.cloud.addresses.site.clone()), ..MoveJob::default() };
    let refused = jobs::ask_to_move(&lab.cluster, &id, ask).await.expect_err("no room for both");
    assert!(
        refused.why.contains("have no room there") && refused.why.contains("cloud1 1"),
        "{refused}"
    );
}

#[tokio::test]
async fn the_vms_of_a_gang_that_are_kept_apart_are_not_moved_to_one_host() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let apart = perigee_model::HostRules {
        apart: Some("db".parse().expect("a name")),
        ..Default::default()
    };
    let id = running(&lab, &hosts, JobSpec { rules: apart, ..gang(2) }).await;
    let asked = jobs::ask_to_move(&lab.cluster, &id, to(&lab.home)).await;
    let refused = asked.expect_err("each is at a host of its own");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("two of its VMs would be at home1"), "{refused}");
}
