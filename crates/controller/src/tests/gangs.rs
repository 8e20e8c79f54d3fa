//! Gangs: jobs with several VMs.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use perigee_model::guest::{GuestBody, LogStream, Seed};
use perigee_model::job::{Access, Job, JobSpec, JobState, Restart, Start};
use perigee_model::vm::{NetworkKind, VmNetwork, VmStatus};
use perigee_model::{JobId, ProblemKind, VmId, VolumeName};
use sha2::Digest;

use super::fake::{FakeHost, Inside};
use super::gone::second_home;
use super::queue::unreachable;
use super::{Lab, PATIENCE, spec, vm_of, wait_for};
use crate::{jobs, networks};

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
}

fn said(vm: &super::fake::FakeVm, is: impl Fn(&GuestBody) -> bool) -> bool {
    vm.events.iter().any(|message| is(&message.body))
}

/// Writes a rank's output on its disk. Returns what the guest says of it.
fn put_output(inside: &mut Inside, vm: &VmId) -> GuestBody {
    let disks = &inside.vms[vm].report.spec.disks;
    let output = disks.iter().find(|disk| disk.role == perigee_model::DiskRole::Output);
    let volume: VolumeName = output.expect("an output").volume.clone();
    let tar = crate::outputs::tests::tar_of(&[("output/who", vm.as_str().as_bytes())]);
    let output_sha256 = crate::files::hex(&sha2::Sha256::digest(&tar));
    let output_bytes = tar.len() as u64;
    if let Some(volume) = inside.volumes.get_mut(&volume) {
        volume.data = tar;
    }
    GuestBody::Finished { output_bytes, output_sha256, lacks: None }
}

/// Each guest does what it can do next. No command runs before all guests were ready.
fn play(hosts: &[&FakeHost], does: &impl Fn(u32) -> Does) {
    let mut ready: BTreeMap<VmId, bool> = BTreeMap::new();
    for host in hosts {
        for (vm, guest) in &host.inside().vms {
            ready.insert(vm.clone(), said(guest, |body| *body == GuestBody::Ready));
        }
    }
    for host in hosts.iter().filter(|host| !host.inside().down) {
        let all: Vec<VmId> = host.inside().vms.keys().cloned().collect();
        for vm in all {
            let (has, next) = {
                let inside = host.inside();
                let Some(guest) = inside.vms.get(&vm) else { continue };
                if guest.report.status != VmStatus::Running {
                    continue;
                }
                let exited = |body: &GuestBody| matches!(body, GuestBody::Exited { .. });
                let finished = |body: &GuestBody| matches!(body, GuestBody::Finished { .. });
                let rank = perigee_model::gang::of_member(vm.as_str()).expect("a member").1;
                let has = (said(guest, exited), said(guest, finished));
                let next = if !said(guest, |body| *body == GuestBody::Ready) {
                    Some(GuestBody::Ready)
                } else if !said(guest, |body| *body == GuestBody::Started) {
                    guest.may_begin.then_some(GuestBody::Started)
                } else if has.0 {
                    None
                } else if guest.is_to_end {
                    Some(GuestBody::Exited { code: 0 })
                } else {
                    match does(rank) {
                        Does::Ends(code) => Some(GuestBody::Exited { code }),
                        Does::RunsOn => None,
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
                let body = put_output(&mut host.inside(), &vm);
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
    host.say(&second, GuestBody::Log { stream: LogStream::Stdout, line: "I am 1".into() });
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!((job.state, job.reason.as_str()), (JobState::Succeeded, ""));
    assert_eq!((job.exit_code, job.members.len()), (Some(0), 3));
    let outputs = job.outputs.expect("outputs");
    assert_eq!((outputs.at.as_str(), outputs.files), ("repo://default/jobs/g-0001", 3));
    let tree = lab.dir.path().join("data/tenants/default/tree/jobs/g-0001");
    for rank in 0..3 {
        let who = std::fs::read_to_string(tree.join(format!("rank-{rank}/output/who")));
        assert_eq!(who.expect("its output"), member(&id, rank).to_string());
    }
    let log = |rank| jobs::log_of(&lab.cluster, &id, Some(rank), (0, 100));
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
    let lost = host_of(&hosts, &member(&id, 2));
    unreachable(&lab, lost).await;
    // The program of another member ends, because it misses the lost one.
    let stays = job.members.iter().find(|one| one.host.as_ref() != Some(&lost.id)).expect("one");
    host_of(&hosts, &stays.vm).say(&stays.vm, GuestBody::Exited { code: 1 });
    let again = |job: &Job| job.reason.contains("start again") || job.state.is_final();
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, again).await;
    assert!(!job.state.is_final(), "{job:?}");
    lost.inside().down = false;
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    for rank in 0..3 {
        assert_eq!(starts(&hosts, &member(&id, rank)), 2, "rank {rank}");
    }
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_gang_in_a_named_network_leaves_it_there() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let name: perigee_model::NetworkName = "blue".parse().expect("a name");
    let subnet = "10.7.0.0/24".parse().expect("addresses");
    let new = perigee_model::network::NewNetwork { name: name.clone(), subnet, nat: false };
    networks::create(&lab.cluster, new).await.expect("a network");
    let id = lab.submit(JobSpec { network: NetworkKind::Cluster(name.clone()), ..gang(2) }).await;
    let running = |job: &Job| job.state == JobState::Running;
    until(&lab, &hosts, &id, |_| Does::RunsOn, running).await;
    let vm = member(&id, 1);
    let network = host_of(&hosts, &vm).inside().vms[&vm].report.spec.network.clone();
    assert!(matches!(network, VmNetwork::Cluster(card) if card.network == name));
    let shown = networks::info(&lab.cluster, &name).await.expect("a network");
    assert_eq!(shown.vms.len(), 2, "the gang itself is no VM: {shown:?}");
    networks::delete(&lab.cluster, &name).await.expect_err("it is used");
    until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    networks::find(&lab.cluster, &name).await.expect("it stays");
}

#[tokio::test]
async fn two_gangs_in_a_small_network_never_wait_for_each_other_s_addresses() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let name: perigee_model::NetworkName = "tiny".parse().expect("a name");
    let subnet = "10.7.0.0/29".parse().expect("addresses");
    let new = perigee_model::network::NewNetwork { name: name.clone(), subnet, nat: false };
    networks::create(&lab.cluster, new).await.expect("a network");
    let network = NetworkKind::Cluster(name);
    let few = JobSpec { network: network.clone(), ..gang(3) };
    let ids = [lab.submit(few.clone()).await, lab.submit(few).await];
    for id in &ids {
        let job = until(&lab, &hosts, id, |_| Does::Ends(0), |job| job.state.is_final()).await;
        assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    }
    let many = JobSpec { network, memory_bytes: 64 << 20, ..gang(6) };
    let refused = jobs::submit(&lab.cluster, many).await.expect_err("it never fits");
    assert!(refused.why.contains("tiny has 5 addresses"), "{refused}");
}

/// What happens to a gang while its controller is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Story {
    Ends,
    Fails,
    IsCancelled,
}

fn written(lab: &Lab) -> u64 {
    lab.cluster.records.counts.writes.load(Ordering::Relaxed)
}

/// The controller is killed after so many of its writes, and started again.
async fn killed_after(writes: u64, story: Story) -> bool {
    let mut lab = Lab::up().await;
    let before = written(&lab);
    let id = lab.submit(gang(2)).await;
    let does = |rank| match story {
        Story::Ends => Does::Ends(0),
        Story::Fails if rank == 1 => Does::Ends(3),
        Story::Fails | Story::IsCancelled => Does::RunsOn,
    };
    let (mut was_killed, mut was_cancelled) = (false, false);
    let begun = Instant::now();
    let job = loop {
        play(&[&lab.home, &lab.cloud], &does);
        let job = lab.job(&id).await;
        if job.state.is_final() {
            break job;
        }
        if story == Story::IsCancelled && !was_cancelled && job.state == JobState::Running {
            was_cancelled = true;
            let cancel = jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true);
            cancel.await.expect("cancel");
        }
        if !was_killed && written(&lab) >= before + writes {
            was_killed = true;
            lab.restart_controller().await;
        }
        assert!(begun.elapsed() < PATIENCE, "{story:?} after {writes} writes: {job:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    let expected = match story {
        Story::Ends => JobState::Succeeded,
        Story::Fails => JobState::Failed,
        Story::IsCancelled => JobState::Cancelled,
    };
    assert_eq!(job.state, expected, "{story:?} after {writes} writes: {}", job.reason);
    for rank in 0..2 {
        let started = starts(&[&lab.home, &lab.cloud], &member(&id, rank));
        assert_eq!(started, 1, "{story:?} after {writes} writes: rank {rank}");
    }
    lab.wait_for_clean_hosts().await;
    let own = networks::own_name(&id).expect("a name");
    networks::find(&lab.cluster, &own).await.expect_err("its network went with it");
    lab.supervisor.stop().await;
    was_killed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_step_of_a_gang_neither_loses_nor_doubles_a_member() {
    for story in [Story::Ends, Story::Fails, Story::IsCancelled] {
        let mut writes = 1;
        // Until the gang ends before that.
        while killed_after(writes, story).await {
            writes += 3;
        }
        assert!(writes > 10, "{story:?}: it was killed {writes} times only");
    }
}
