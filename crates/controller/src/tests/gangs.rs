//! Gangs: jobs with several VMs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use perigee_model::guest::{GuestBody, LogStream, Seed};
use perigee_model::job::{Access, Job, JobSpec, JobState, MoveJob, Restart, Start};
use perigee_model::persistent_vm::NewVm;
use perigee_model::vm::{NetworkKind, VmNetwork, VmStatus};
use perigee_model::{JobId, LeaveSite, ProblemKind, VmId, VolumeName};
use sha2::Digest;

use super::fake::FakeHost;
use super::gone::second_home;
use super::queue::unreachable;
use super::{Lab, PATIENCE, TIMING, data_volume, persistent_vms, spec, vm_of, wait_for};
use crate::cluster::Timing;
use crate::records::{JobRecord, Kind};
use crate::storage::leave_site;
use crate::{cleaner, jobs, networks};

mod addresses;
mod copies;
mod costs;
mod drained;
mod elsewhere;
mod killed;
mod moves;
mod outputs;
mod waits;

fn gang(count: u32) -> JobSpec {
    JobSpec {
        name: "g".into(),
        volumes: Vec::new(),
        start: Start::Anywhere,
        memory_bytes: 64 << 20,
        count,
        ..spec(Access::Read)
    }
}

fn member(id: &JobId, rank: u32) -> VmId {
    vm_of(&perigee_model::gang::member_of(id, rank))
}

/// What a guest does when its command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Ends(i32),
    RunsOn,
    /// It is ready, and never begins.
    Hangs,
    /// It does not end when it is asked to.
    Stays,
}

fn said(vm: &super::fake::FakeVm, is: impl Fn(&GuestBody) -> bool) -> bool {
    vm.events.iter().any(|message| is(&message.body))
}

/// Writes a rank's output on its disk, which has its home at one of the hosts. Returns what the guest says of it.
fn put_output(hosts: &[&FakeHost], at: &FakeHost, vm: &VmId) -> GuestBody {
    let disks = at.inside().vms[vm].report.spec.disks.clone();
    let output = disks.iter().find(|disk| disk.role == perigee_model::DiskRole::Output);
    let volume: VolumeName = output.expect("an output").volume.clone();
    let tar = crate::files::outputs::tests::tar_of(&[("output/who", vm.as_str().as_bytes())]);
    let output_sha256 = crate::hash::hex(&sha2::Sha256::digest(&tar));
    let output_bytes = tar.len() as u64;
    for host in hosts {
        if let Some(volume) = host.inside().volumes.get_mut(&volume) {
            volume.data.clone_from(&tar);
        }
    }
    GuestBody::Finished { output_bytes, output_sha256, lacks: None }
}

/// Each guest does what it can do next. No command runs before all guests were ready.
fn play(hosts: &[&FakeHost], does: &impl Fn(u32) -> Does) {
    let mut ready: BTreeMap<VmId, bool> = BTreeMap::new();
    let is_member = |vm: &VmId| perigee_model::gang::of_member(vm.as_str()).is_some();
    for host in hosts {
        for (vm, guest) in host.inside().vms.iter().filter(|(vm, _)| is_member(vm)) {
            ready.insert(vm.clone(), said(guest, |body| *body == GuestBody::Ready));
        }
    }
    for host in hosts.iter().filter(|host| !host.inside().down) {
        let all: Vec<VmId> = host.inside().vms.keys().cloned().collect();
        for vm in all.into_iter().filter(is_member) {
            let (has, next) = {
                let inside = host.inside();
                let Some(guest) = inside.vms.get(&vm) else { continue };
                if guest.report.status != VmStatus::Running {
                    continue;
                }
                let exited = |body: &GuestBody| matches!(body, GuestBody::Exited { .. });
                let finished = |body: &GuestBody| matches!(body, GuestBody::Finished { .. });
                let rank = perigee_model::gang::of_member(vm.as_str()).expect("a member").1;
                // It was started once more, only for its outputs.
                let is_last = guest.report.spec.start.migration == u32::MAX;
                let has = (is_last || said(guest, exited), said(guest, finished));
                let next = if is_last {
                    None
                } else if !said(guest, |body| *body == GuestBody::Ready) {
                    Some(GuestBody::Ready)
                } else if does(rank) == Does::Hangs {
                    None
                } else if !said(guest, |body| *body == GuestBody::Started) {
                    guest.may_begin.then_some(GuestBody::Started)
                } else if has.0 {
                    None
                } else if guest.is_to_end && does(rank) != Does::Stays {
                    Some(GuestBody::exited(0))
                } else {
                    match does(rank) {
                        Does::Ends(code) => Some(GuestBody::exited(code)),
                        Does::RunsOn | Does::Hangs | Does::Stays => None,
                    }
                };
                (has, next)
            };
            if next == Some(GuestBody::Started) {
                assert!(ready.values().all(|ready| *ready), "{vm} begins too early: {ready:?}");
            }
            if let Some(body) = next {
                host.say(&vm, body);
            } else if has == (true, false) {
                let body = put_output(hosts, host, &vm);
                host.say(&vm, body);
            }
        }
    }
}

/// Plays the guests until the job is so.
async fn until(
    lab: &Lab,
    hosts: &[&FakeHost],
    id: &JobId,
    does: impl Fn(u32) -> Does,
    is: impl Fn(&Job) -> bool,
) -> Job {
    let begun = Instant::now();
    loop {
        play(hosts, &does);
        let job = lab.job(id).await;
        if is(&job) {
            return job;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not come to that: {job:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn starts(hosts: &[&FakeHost], vm: &VmId) -> u32 {
    hosts.iter().map(|host| host.inside().starts.get(vm).copied().unwrap_or_default()).sum()
}

fn seed_of(lab: &Lab, vm: &VmId) -> Seed {
    let name = VolumeName::new(format!("{vm}-seed")).expect("a name");
    for host in [&lab.home, &lab.cloud] {
        if let Some(volume) = host.inside().volumes.get(&name) {
            let mut tar = tar::Archive::new(&volume.data[..]);
            let first = tar.entries().expect("a tar").next().expect("an entry").expect("an entry");
            return serde_json::from_reader(first).expect("a seed");
        }
    }
    panic!("no host has {name}");
}

#[tokio::test]
async fn a_gang_starts_at_one_barrier_and_leaves_its_outputs_by_rank() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(gang(3)).await;
    for rank in 0..3 {
        let vm = member(&id, rank);
        wait_for("its VM", async || {
            hosts.iter().any(|host| host.inside().vms.contains_key(&vm)).then_some(())
        })
        .await;
    }
    let seeds: Vec<Seed> = (0..3).map(|rank| seed_of(&lab, &member(&id, rank))).collect();
    let gangs: Vec<_> = seeds.iter().map(|seed| seed.gang.as_ref().expect("a gang")).collect();
    assert_eq!(gangs.iter().map(|gang| gang.rank).collect::<Vec<_>>(), [0, 1, 2]);
    for gang in &gangs {
        assert_eq!(gang.members, gangs[0].members, "all know the same of each other");
        assert!(gang.user == gangs[0].user && gang.host != gang.user);
        assert!(gang.user.public.starts_with("ssh-ed25519 "));
        assert!(gang.user.private.starts_with("-----BEGIN OPENSSH PRIVATE KEY-----"));
    }
    let at: Vec<_> = lab.job(&id).await.members.into_iter().map(|member| member.host).collect();
    assert!(at.iter().all(|host| *host == at[0]), "at one site: {at:?}");
    for ((rank, seed), own) in (0..3).zip(&seeds).zip(&gangs[0].members) {
        let network = seed.network.as_ref().expect("a network");
        assert_eq!((network.address, own.name.clone()), (own.address, format!("{id}-n{rank}")));
    }
    until(&lab, &hosts, &id, |_| Does::RunsOn, |job| job.state == JobState::Running).await;
    let all_run = |job: &Job| job.members.iter().all(|one| one.state == JobState::Running);
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let second = member(&id, 1);
    let host = hosts.iter().find(|host| host.inside().vms.contains_key(&second)).expect("a host");
    host.say(&second, GuestBody::log(LogStream::Stdout, "I am 1"));
    let log = |rank| jobs::log_of(&lab.cluster, &id, Some(rank), (0, 100));
    wait_for("its line", async || (!log(1).await.expect("a log").is_empty()).then_some(())).await;
    // What comes after that has arrived later, by the clock of the same controller.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let third = member(&id, 2);
    let host = hosts.iter().find(|host| host.inside().vms.contains_key(&third)).expect("a host");
    host.say(&third, GuestBody::log(LogStream::Stderr, "I am 2"));
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!((job.state, job.reason.as_str()), (JobState::Succeeded, ""));
    assert_eq!((job.exit_code, job.members.len()), (Some(0), 3));
    let all = jobs::log_of_all(&lab.cluster, &id, &[], 100).await.expect("all logs");
    let ranks: Vec<_> = all.iter().map(|line| (line.rank, line.line.as_str())).collect();
    assert_eq!(ranks, [(Some(1), "I am 1"), (Some(2), "I am 2")]);
    let rest = jobs::log_of_all(&lab.cluster, &id, &[0, all[0].seq], 100).await.expect("the rest");
    assert_eq!(rest.iter().map(|line| line.rank).collect::<Vec<_>>(), [Some(2)]);
    let few = jobs::log_of_all(&lab.cluster, &id, &[0; 4], 100).await.expect_err("too many");
    assert_eq!(few.kind, ProblemKind::Invalid);
    let outputs = job.outputs.expect("outputs");
    assert_eq!((outputs.at.as_str(), outputs.files), ("repo://default/jobs/g-0001", 3));
    let tree = lab.dir.path().join("data/tenants/default/tree/jobs/g-0001");
    for rank in 0..3 {
        let who = std::fs::read_to_string(tree.join(format!("rank-{rank}/output/who")));
        assert_eq!(who.expect("its output"), member(&id, rank).to_string());
    }
    let lines = log(1).await.expect("a log");
    assert_eq!(lines.iter().map(|line| line.line.as_str()).collect::<Vec<_>>(), ["I am 1"]);
    assert!(log(0).await.expect("a log").is_empty());
    assert_eq!(log(3).await.expect_err("no such rank").kind, ProblemKind::Invalid);
    lab.wait_for_clean_hosts().await;
    let own = networks::own_name(&id).expect("a name");
    networks::find(&lab.cluster, &own).await.expect_err("its network went with it");
    let list = jobs::list(&lab.cluster).await.expect("jobs");
    assert_eq!(list.len(), 1, "members are no jobs of their own");
    jobs::delete(&lab.cluster, &id, false).await.expect("delete");
    assert!(!tree.exists());
    assert!(lab.cluster.records.keys("jobs/").await.expect("keys").is_empty());
}

#[tokio::test]
async fn what_the_vms_of_a_gang_send_to_each_other_is_shown_and_remembered() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(gang(2)).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let [first, second] = [0, 1].map(|rank| member(&id, rank));
    let sends = |from: &VmId, to: &VmId, bytes| {
        let host = host_of(&hosts, from);
        let sent = vec![perigee_model::vm::SentTo { to: to.clone(), bytes }];
        host.inside().vms.get_mut(from).expect("it is there").report.sent = sent;
    };
    sends(&first, &second, 700);
    sends(&second, &first, 30);
    let shown = |job: &Job| {
        let sent: Vec<_> = job.members.iter().map(|one| one.sent_bytes.clone()).collect();
        sent == [vec![0, 700], vec![30, 0]]
    };
    until(&lab, &hosts, &id, |_| Does::RunsOn, shown).await;
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert!(shown(&job), "{job:?}");
    let next = JobId::new("g-0007").expect("a name");
    let known =
        crate::planning::gang_traffic::known(&lab.cluster, &next, 2).await.expect("a record");
    assert_eq!(known.sent, [vec![0, 700], vec![30, 0]]);
    let other =
        crate::planning::gang_traffic::known(&lab.cluster, &next, 3).await.expect("no record");
    assert!(other.sent.is_empty(), "with another number of VMs it is another kind");
    let first = job.predicted.expect("by one pass over no data");
    assert!(first.high_s - first.low_s > 10.0, "no such job had run: {first}");
    let measured_s = job.measured_s.expect("it has succeeded");
    let again = lab.submit(gang(2)).await;
    let again = until(&lab, &hosts, &again, |_| Does::Ends(0), |job| job.state.is_final()).await;
    let predicted = again.predicted.expect("by the run before it");
    assert!((predicted.expected_s - measured_s).abs() < 0.1, "{predicted:?}, {measured_s} s");
    let decisions = crate::planning::decisions(&lab.cluster, &again.id).await.expect("decisions");
    let [decision] = &decisions[..] else { panic!("{decisions:?}") };
    let plan = &decision.plan;
    assert_eq!(plan.basis, perigee_model::plan::Basis::History);
    let hosts: Vec<_> = again.members.iter().filter_map(|one| one.host.clone()).collect();
    assert_eq!(plan.chosen().expect("a choice").hosts, hosts);
    assert_eq!(decision.measured_s, again.measured_s);
    assert!(decision.measured.is_some() && decision.came_true().is_some(), "{decision:?}");
    let score = crate::planning::score(&lab.cluster, |_| true, true).await.expect("a score");
    assert_eq!((score.gangs.jobs, score.all.jobs), (2, 2));
}

#[tokio::test]
async fn with_mpi_the_others_are_there_until_the_first_has_ended() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(JobSpec { mpi: true, timeout_s: Some(60), ..gang(2) }).await;
    let all_run = |job: &Job| {
        job.members.len() == 2 && job.members.iter().all(|one| one.state == JobState::Running)
    };
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let second = seed_of(&lab, &member(&id, 1));
    assert_eq!((second.timeout_s, seed_of(&lab, &member(&id, 0)).timeout_s), (None, Some(60)));
    let does = |rank| if rank == 0 { Does::Ends(0) } else { Does::RunsOn };
    let job = until(&lab, &hosts, &id, does, |job| job.state.is_final()).await;
    assert_eq!((job.state, job.reason.as_str()), (JobState::Succeeded, ""));
}

#[tokio::test]
async fn a_guest_that_does_not_end_when_the_first_one_has_ended_undoes_nothing() {
    let mut lab = Lab::up().await;
    let id = lab.submit(JobSpec { mpi: true, ..gang(2) }).await;
    let hosts = [&lab.home, &lab.cloud];
    until(&lab, &hosts, &id, |_| Does::Stays, all_run).await;
    lab.supervisor.stop().await;
    let timing =
        Timing { boot_deadline: Duration::from_millis(200), collect_deadline: PATIENCE, ..TIMING };
    lab.start_controller(timing).await;
    let hosts = [&lab.home, &lab.cloud];
    let does = |rank| if rank == 0 { Does::Ends(0) } else { Does::Stays };
    let job = until(&lab, &hosts, &id, does, |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    assert!(job.reason.contains("rank 1 did not end within 0.2 s"), "{}", job.reason);
    let files = job.outputs.map(|outputs| outputs.files);
    assert_eq!(files, Some(2), "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_released_member_whose_vm_ends_undoes_nothing() {
    let lab = Lab::up().await;
    let id = lab.submit(JobSpec { mpi: true, ..gang(2) }).await;
    let hosts = [&lab.home, &lab.cloud];
    let does = |rank| if rank == 0 { Does::Ends(0) } else { Does::Stays };
    let first_is_over =
        |job: &Job| job.members.first().is_some_and(|one| one.state == JobState::Succeeded);
    until(&lab, &hosts, &id, does, first_is_over).await;
    let vm = member(&id, 1);
    if let Some(ended) = host_of(&hosts, &vm).inside().vms.get_mut(&vm) {
        ended.report.status = VmStatus::Gone;
    }
    let job = until(&lab, &hosts, &id, does, |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    assert!(job.reason.contains("the VM ended"), "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_gang_fails_as_one_and_keeps_what_the_others_had() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(gang(2)).await;
    let does = |rank| if rank == 1 { Does::Ends(3) } else { Does::RunsOn };
    let job = until(&lab, &hosts, &id, does, |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert_eq!(job.reason, "rank 1: the command ended with code 3");
    assert_eq!(job.exit_code, Some(3));
    assert_eq!(job.members[0].state, JobState::Cancelled, "{:?}", job.members);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_gang_is_cancelled_as_one_in_each_of_its_states() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let cancel = |id: JobId| {
        let cluster = lab.cluster.clone();
        async move { jobs::intend(&cluster, &id, |intent| intent.cancel = true).await }
    };
    let huge = JobSpec { memory_bytes: 500 << 20, ..gang(2) };
    let runs = lab.submit(huge.clone()).await;
    let waits = lab.submit(huge).await;
    until(&lab, &hosts, &runs, |_| Does::RunsOn, |job| job.state == JobState::Running).await;
    let queued = lab.job(&waits).await;
    assert!(queued.state == JobState::Queued && !queued.reason.is_empty(), "{queued:?}");
    let one = perigee_model::gang::member_of(&runs, 1);
    let refused = cancel(one.clone()).await.expect_err("not one alone");
    assert!(refused.kind == ProblemKind::Conflict && !refused.next.is_empty(), "{refused}");
    jobs::delete(&lab.cluster, &one, false).await.expect_err("not one alone");
    for id in [&waits, &runs] {
        cancel(id.clone()).await.expect("cancel");
        let job = until(&lab, &hosts, id, |_| Does::RunsOn, |job| job.state.is_final()).await;
        assert_eq!((job.state, job.reason.as_str()), (JobState::Cancelled, "cancelled on request"));
    }
    hosts.iter().for_each(|host| host.inside().no_new_volumes = true);
    let id = lab.submit(gang(2)).await;
    lab.wait_for_state(&id, JobState::Staging).await;
    cancel(id.clone()).await.expect("cancel");
    lab.wait_for_state(&id, JobState::Cancelled).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_gang_that_can_never_fit_or_makes_no_sense_is_refused() {
    let lab = Lab::up().await;
    wait_for("the hosts' reports", async || {
        [&lab.home, &lab.cloud]
            .iter()
            .all(|h| lab.cluster.hosts.report(&h.id).is_some())
            .then_some(())
    })
    .await;
    let refused = |spec: JobSpec| {
        let cluster = lab.cluster.clone();
        async move { jobs::submit(&cluster, spec).await.expect_err("refused").why }
    };
    let why = refused(JobSpec { memory_bytes: 400 << 20, ..gang(5) }).await;
    assert!(why.contains("5 VMs") && why.contains("room for 4: cloud1 2, home1 2"), "{why}");
    let why = refused(JobSpec { volumes: spec(Access::Write).volumes, ..gang(2) }).await;
    assert!(why.contains("several VMs can't write volume tpch"), "{why}");
    let why = refused(JobSpec { network: NetworkKind::User, ..gang(2) }).await;
    assert!(why.starts_with("network: "), "{why}");
}

#[tokio::test]
async fn two_gangs_that_want_all_hosts_run_one_after_the_other() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let large = JobSpec { memory_bytes: 400 << 20, ..gang(3) };
    let ids = [lab.submit(large.clone()).await, lab.submit(large).await];
    for id in &ids {
        let job = until(&lab, &hosts, id, |_| Does::Ends(0), |job| job.state.is_final()).await;
        assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    }
}

/// The one of two hosts of a site where this VM is.
fn host_of<'a>(hosts: &[&'a FakeHost], vm: &VmId) -> &'a FakeHost {
    hosts.iter().find(|host| host.inside().vms.contains_key(vm)).expect("it is at a host")
}

#[tokio::test]
async fn a_gang_that_loses_a_host_starts_again_as_one() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    let hosts = [&lab.home, &lab.cloud, &second];
    let restart = Restart::OnHostFailure;
    let id = lab.submit(JobSpec { restart, memory_bytes: 400 << 20, ..gang(3) }).await;
    let all_run = |job: &Job| {
        job.members.len() == 3 && job.members.iter().all(|one| one.state == JobState::Running)
    };
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let (stream, line) = (LogStream::Stdout, "the last words".to_owned());
    host_of(&hosts, &member(&id, 0)).say(&member(&id, 0), GuestBody::log(stream, line));
    let log = async || jobs::log_of(&lab.cluster, &id, Some(0), (0, 100)).await.expect("a log");
    wait_for("the line", async || (!log().await.is_empty()).then_some(())).await;
    let lost = host_of(&hosts, &member(&id, 2));
    unreachable(&lab, lost).await;
    // The program of another member ends, because it misses the lost one.
    let stays = job.members.iter().find(|one| one.host.as_ref() != Some(&lost.id)).expect("one");
    host_of(&hosts, &stays.vm).say(&stays.vm, GuestBody::exited(1));
    let again = |job: &Job| job.reason.contains("start again") || job.state.is_final();
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, again).await;
    assert!(!job.state.is_final(), "{job:?}");
    lost.inside().down = false;
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    for rank in 0..3 {
        assert_eq!(starts(&hosts, &member(&id, rank)), 2, "rank {rank}");
    }
    let lines: Vec<String> = log().await.into_iter().map(|line| line.line).collect();
    assert_eq!(lines[0], "the last words", "the log of the lost run is kept");
    assert!(lines[1].ends_with("what follows is of its start 2"), "{lines:?}");
    lab.wait_for_clean_hosts().await;
}

fn all_run(job: &Job) -> bool {
    !job.members.is_empty() && job.members.iter().all(|one| one.state == JobState::Running)
}

#[tokio::test]
async fn a_volume_of_one_rank_is_written_by_its_vm_and_in_no_other() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let mut volumes = spec(Access::Write).volumes;
    volumes[0].ranks = vec![1];
    let id = lab.submit(JobSpec { volumes, ..gang(3) }).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    for rank in 0..3 {
        let vm = member(&id, rank);
        let disks = host_of(&hosts, &vm).inside().vms[&vm].report.spec.disks.clone();
        let data = disks.into_iter().filter(|disk| disk.role.is_data());
        let data: Vec<(VolumeName, bool)> =
            data.map(|disk| (disk.volume, disk.read_only)).collect();
        let has = if rank == 1 { vec![(data_volume(), false)] } else { Vec::new() };
        assert_eq!(data, has, "rank {rank}");
    }
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

/// The data are at `cloud1`, and each of the other hosts has more room.
#[tokio::test]
async fn all_vms_of_a_gang_with_confined_data_are_at_the_site_of_the_data_and_stay_there() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let data = data_volume();
    lab.cloud.inside().volumes.get_mut(&data).expect("it").info.leave_site = LeaveSite::Never;
    let volumes = spec(Access::Read).volumes;
    let elsewhere = Start::Host(lab.home.id.clone());
    let wrong = JobSpec { volumes: volumes.clone(), start: elsewhere, ..gang(2) };
    let wrong = lab.submit(wrong).await;
    let says = async || {
        let job = lab.job(&wrong).await;
        job.reason.contains("may not leave site cloud").then_some(())
    };
    wait_for("the reason why it waits", says).await;
    let id = lab.submit(JobSpec { volumes: volumes.clone(), ..gang(2) }).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    for rank in 0..2 {
        let vm = member(&id, rank);
        assert_eq!(host_of(&hosts, &vm).id, lab.cloud.id, "rank {rank}");
        let record = jobs::record(&lab.cluster, &perigee_model::gang::member_of(&id, rank)).await;
        let record = record.expect("its record");
        let refused = leave_site::check_way_in(&vm, &record).expect_err("nobody logs in");
        assert!(refused.why.contains("may not leave"), "{refused}");
        let disks = record.placement.expect("its disks").disks;
        let written: Vec<_> =
            disks.iter().filter(|disk| disk.temporary && !disk.read_only).collect();
        assert!(!written.is_empty() && written.iter().all(|disk| disk.leave_site.is_never()));
    }
    let ask = MoveJob { hosts: vec![lab.home.id.clone()], ..MoveJob::default() };
    let refused = jobs::ask_to_move(&lab.cluster, &id, ask).await.expect_err("it stays");
    assert!(refused.why.contains("leave-site: never"), "{refused}");
    let writes = JobSpec { volumes, writes: LeaveSite::Allowed, ..gang(2) };
    let refused = leave_site::confined_of(&lab.cluster, &writes).await.expect_err("it carries it");
    assert!(refused.next.contains("leave `writes` out"), "{refused}");
}

/// Nothing of any job is left there.
async fn wait_until_clean(hosts: &[&FakeHost]) {
    wait_for("clean hosts", async || {
        let is_clean = |host: &&FakeHost| {
            let inside = host.inside();
            let own = inside.volumes.keys().filter(|name| **name != data_volume()).count();
            inside.vms.is_empty() && inside.attachments.is_empty() && own == 0
        };
        hosts.iter().all(is_clean).then_some(())
    })
    .await;
}

#[tokio::test]
async fn each_start_of_a_gang_is_taken_down_also_while_a_lost_host_stays_away() {
    for at_once in [false, true] {
        let lab = Lab::up().await;
        let second = second_home(&lab).await;
        let hosts = [&lab.home, &lab.cloud, &second];
        let restart = Restart::OnHostFailure;
        let id = lab.submit(JobSpec { restart, memory_bytes: 400 << 20, ..gang(3) }).await;
        until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
        let lost = host_of(&hosts, &member(&id, 2));
        unreachable(&lab, lost).await;
        let starts_of = || (0..3).map(|rank| starts(&hosts, &member(&id, rank)));
        let again = |job: &Job| starts_of().all(|starts| starts == 2) && all_run(job);
        until(&lab, &hosts, &id, |_| Does::RunsOn, again).await;
        if at_once {
            let cancel = jobs::intend(&lab.cluster, &id, |intent| {
                (intent.cancel, intent.now) = (true, true);
            });
            cancel.await.expect("cancel");
        }
        let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
        let expected = if at_once { JobState::Cancelled } else { JobState::Succeeded };
        assert_eq!(job.state, expected, "{}", job.reason);
        let others: Vec<&FakeHost> = hosts.into_iter().filter(|host| host.id != lost.id).collect();
        wait_until_clean(&others).await;
        assert!(!lost.inside().vms.is_empty(), "it was away");
        lost.inside().down = false;
        wait_until_clean(&hosts).await;
    }
}

#[tokio::test]
async fn a_host_that_comes_back_gets_a_gang_again_only_when_nothing_of_it_is_left_there() {
    let lab = Lab::up().await;
    let host = &lab.home.id;
    let record = JobRecord {
        kind: Kind::Gang(Default::default()),
        avoid: vec![host.clone()],
        ..jobs::new_record(JobId::new("g-0001").expect("a name"), gang(3))
    };
    wait_for("the host to be up", async || {
        let state = lab.cluster.hosts.state(host);
        (state == perigee_model::job::HostState::Up).then_some(())
    })
    .await;
    assert_eq!(crate::scheduler::avoided(&lab.cluster, &record).await, []);
    let last = perigee_model::gang::member_of(&record.job.id, 2);
    let left = cleaner::Cleanup::of_host(&last, "x-end", Default::default(), host, &[]);
    // Nobody else takes it down meanwhile.
    let key = format!("{}x-end", cleaner::prefix(&last));
    let _held = lab.cluster.index.begin_cleanup(&key).expect("nobody has it");
    cleaner::hand_over(&lab.cluster, &left).await.expect("recorded");
    assert_eq!(crate::scheduler::avoided(&lab.cluster, &record).await, std::slice::from_ref(host));
}

#[tokio::test]
async fn a_lost_member_with_nothing_left_to_do_does_not_start_a_gang_again() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    let hosts = [&lab.home, &lab.cloud, &second];
    let restart = Restart::OnHostFailure;
    let spec = JobSpec { restart, memory_bytes: 400 << 20, mpi: true, ..gang(3) };
    let id = lab.submit(spec).await;
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let first = host_of(&hosts, &member(&id, 0));
    let lost = job.members.iter().find(|one| one.host.as_ref() != Some(&first.id));
    let lost = host_of(&hosts, &lost.expect("another host").vm);
    first.say(&member(&id, 0), GuestBody::exited(0));
    let is_done = |job: &Job| job.members[0].state == JobState::Collecting;
    lab.wait_for_job(&id, "done", is_done).await;
    unreachable(&lab, lost).await;
    let finished = put_output(&hosts, first, &member(&id, 0));
    first.say(&member(&id, 0), finished);
    let job = until(
        &lab,
        &hosts,
        &id,
        |_| Does::RunsOn,
        |job| job.state.is_final() || job.reason.contains("start again"),
    )
    .await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    assert!(job.reason.contains("was lost at host"), "people are told: {}", job.reason);
    for rank in 0..3 {
        assert_eq!(starts(&hosts, &member(&id, rank)), 1, "rank {rank}");
    }
}

#[tokio::test]
async fn a_gang_that_waits_for_a_vm_without_a_job_stops_nobody_else() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let vm =
        NewVm { memory_bytes: 600 << 20, volumes: Vec::new(), ..persistent_vms::new_vm("home1") };
    lab.make_vm(vm).await;
    lab.runs().await;
    let id = lab.submit(JobSpec { memory_bytes: 400 << 20, ..gang(4) }).await;
    let why = |job: &Job| job.reason.contains("VMs without a job");
    let job = lab.wait_for_job(&id, "waiting", why).await;
    assert_eq!(job.state, JobState::Queued);
    let small = lab.submit(JobSpec { count: 1, ..gang(1) }).await;
    lab.wait_for_job(&small, "starting", |job| job.started_ms.is_some()).await;
    jobs::intend(&lab.cluster, &small, |intent| intent.cancel = true).await.expect("cancel");
    let web = VmId::new("web").expect("a name");
    crate::vms::persistent::delete(&lab.cluster, &web, true).await.expect("deleted");
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
}

/// A job with one VM runs.
async fn run_alone(lab: &Lab, hosts: &[&FakeHost], id: &JobId) {
    let vm = vm_of(id);
    let host = wait_for(&format!("VM {vm}"), async || {
        hosts.iter().find(|host| host.inside().vms.contains_key(&vm)).copied()
    })
    .await;
    host.say(&vm, GuestBody::Started);
    lab.wait_for_state(id, JobState::Running).await;
}

#[tokio::test]
async fn behind_the_barrier_each_member_has_a_limit() {
    let mut lab = Lab::up().await;
    for lets_nothing_begin in [false, true] {
        let id = lab.submit(gang(2)).await;
        let does = |rank| if rank == 0 { Does::RunsOn } else { Does::Hangs };
        let hosts = [&lab.home, &lab.cloud];
        hosts.iter().for_each(|h| h.inside().lets_nothing_begin = lets_nothing_begin);
        let begun = |job: &Job| match lets_nothing_begin {
            false => job.members[..].first().is_some_and(|one| one.state == JobState::Running),
            true => job.state == JobState::Running && job.reason.contains("begin-command"),
        };
        until(&lab, &hosts, &id, does, begun).await;
        lab.supervisor.stop().await;
        let short = Duration::from_millis(200);
        lab.start_controller(Timing { boot_deadline: short, ..TIMING }).await;
        let hosts = [&lab.home, &lab.cloud];
        let job = until(&lab, &hosts, &id, does, |job| job.state.is_final()).await;
        assert_eq!(job.state, JobState::Failed, "{}", job.reason);
        assert!(job.reason.contains("did not begin its command"), "{}", job.reason);
        assert_eq!(job.reason.contains("begin-command"), lets_nothing_begin, "{}", job.reason);
        lab.wait_for_clean_hosts().await;
        lab.supervisor.stop().await;
        lab.start_controller(TIMING).await;
    }
}

#[tokio::test]
async fn a_guest_that_does_not_wait_for_the_others_ends_its_gang() {
    for early in [GuestBody::Started, GuestBody::exited(0)] {
        let lab = Lab::up().await;
        let hosts = [&lab.home, &lab.cloud];
        let id = lab.submit(gang(2)).await;
        let vm = member(&id, 1);
        let host = wait_for("its VM", async || {
            hosts.iter().find(|host| host.inside().vms.contains_key(&vm)).copied()
        })
        .await;
        host.say(&vm, GuestBody::Ready);
        host.say(&vm, early);
        let job = lab.wait_for_job(&id, "over", |job| job.state.is_final()).await;
        assert_eq!(job.state, JobState::Failed);
        assert!(job.reason.contains("before the other VMs were ready"), "{}", job.reason);
        lab.wait_for_clean_hosts().await;
    }
}

#[tokio::test]
async fn a_gang_that_no_host_can_start_fails_with_the_reason() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    hosts.iter().for_each(|host| host.inside().starts_no_vm = true);
    let id = lab.submit(gang(2)).await;
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.contains("no host can start its VM"), "{}", job.reason);
}

#[tokio::test]
async fn a_member_that_is_stopped_fails_its_gang_as_it_would_a_job() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(gang(2)).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let stop = perigee_model::persistent_vm::StopVm { force: false };
    crate::vms::stop(&lab.cluster, &member(&id, 1), stop).await.expect("stopped");
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, |job| job.state.is_final()).await;
    let reason = "its VM was stopped on request";
    assert_eq!((job.state, job.reason.as_str()), (JobState::Failed, reason));
}
