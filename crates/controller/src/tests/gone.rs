//! Jobs whose host is gone and comes back at a bad time.

use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, HostState, JobSpec, JobState, JobVolume, NewVolume, Restart, Start,
};
use perigee_model::volume::VolumeSource;
use perigee_model::{JobId, SiteId, VmStart, VolumeName};

use super::fake::FakeHost;
use super::migrations::{copying_of, switch};
use super::queue::{finish_again, unreachable};
use super::{Lab, data_volume, spec, vm_of, wait_for};
use crate::cleaner::Cleanup;
use crate::records::JobRecord;
use crate::storage::volumes;
use crate::{cleaner, hosts, jobs, migration};

/// A job at site `home` that writes the data volume and may begin anew.
pub fn restarting() -> JobSpec {
    let start = Start::Site(SiteId::new("home").expect("name"));
    JobSpec { start, restart: Restart::OnHostFailure, ..spec(Access::Write) }
}

pub async fn second_home(lab: &Lab) -> FakeHost {
    let second = FakeHost::start("home2", "home").await;
    hosts::register(&lab.cluster, &second.id, second.addresses.clone()).await.expect("register");
    second
}

/// The host where the job's VM runs, and the other one of the site.
pub async fn running<'a>(lab: &'a Lab, other: &'a FakeHost, id: &JobId) -> [&'a FakeHost; 2] {
    let placed = lab.wait_for_job(id, "starting", |job| job.started_ms.is_some()).await;
    let pair = match placed.host.as_ref() == Some(&lab.home.id) {
        true => [&lab.home, other],
        false => [other, &lab.home],
    };
    lab.wait_for_vm(pair[0], &vm_of(id)).await;
    pair[0].say(&vm_of(id), GuestBody::Started);
    lab.wait_for_state(id, JobState::Running).await;
    pair
}

pub async fn up(lab: &Lab, host: &FakeHost) {
    host.inside().down = false;
    wait_for("the host to be up", async || {
        (lab.cluster.hosts.state(&host.id) == HostState::Up).then_some(())
    })
    .await;
}

/// The job starts once more, at whichever host, and ends well.
pub async fn ends_anew(lab: &Lab, hosts: [&FakeHost; 2], id: &JobId) {
    let out = VolumeName::new(format!("{id}-r1-out")).expect("name");
    let host = wait_for("the job to begin anew", async || {
        let job = lab.job(id).await;
        assert_ne!(job.state, JobState::Failed, "{}", job.reason);
        hosts.into_iter().find(|host| {
            let inside = host.inside();
            let vm = inside.vms.get(&vm_of(id));
            vm.is_some_and(|vm| vm.report.spec.disks.iter().any(|disk| disk.volume == out))
        })
    })
    .await;
    host.say(&vm_of(id), GuestBody::Started);
    finish_again(host, id);
    lab.wait_for_state(id, JobState::Succeeded).await;
}

async fn record(lab: &Lab, id: &JobId) -> JobRecord {
    jobs::record(&lab.cluster, id).await.expect("record")
}

/// A job that writes a volume at a third host: while that one is silent, it cannot leave its own host.
async fn with_third_home(lab: &Lab) -> (FakeHost, JobSpec) {
    let edge = FakeHost::start("edge1", "edge").await;
    hosts::register(&lab.cluster, &edge.id, edge.addresses.clone()).await.expect("register");
    let name = VolumeName::new("words").expect("name");
    let new = NewVolume {
        name: name.clone(),
        host: Some(edge.id.clone()),
        size_bytes: Some(1 << 20),
        source: VolumeSource::Empty,
        leave_site: Default::default(),
    };
    volumes::create(&lab.cluster, new).await.expect("create");
    let mut job = restarting();
    job.volumes.push(JobVolume {
        volume: name,
        mount: "/words".into(),
        access: Access::Write,
        ranks: Vec::new(),
    });
    (edge, job)
}

#[tokio::test]
async fn a_job_that_lost_a_right_to_write_begins_anew_though_its_host_is_back() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    let (edge, job) = with_third_home(&lab).await;
    let id = lab.submit(job).await;
    let [first, second] = running(&lab, &other, &id).await;
    let epoch = || lab.cloud.inside().volumes[&data_volume()].info.epoch;
    let before = epoch();
    for host in [&edge, first] {
        host.inside().down = true;
    }
    wait_for("the first home to be fenced", async || (epoch() > before).then_some(())).await;
    lab.wait_for_job(&id, "waiting for edge1", |job| !job.reason.is_empty()).await;
    up(&lab, first).await;
    up(&lab, &edge).await;
    ends_anew(&lab, [first, second], &id).await;
    assert_eq!(record(&lab, &id).await.leaving, None);
}

/// Whoever asks for the move has read the job's record before the job left its host.
#[tokio::test]
async fn a_vm_whose_job_begins_anew_is_not_moved() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    let (edge, job) = with_third_home(&lab).await;
    let id = lab.submit(job).await;
    let [first, second] = running(&lab, &other, &id).await;
    let before = record(&lab, &id).await;
    for host in [&edge, first] {
        host.inside().down = true;
    }
    lab.wait_for_job(&id, "waiting for edge1", |job| !job.reason.is_empty()).await;
    // The store has it a moment before the rest of the controller knows it.
    wait_for("the job to leave its host", async || lab.cluster.index.job(&id)?.leaving.clone())
        .await;
    let request = migration::Request {
        to: second.id.clone(),
        reason: "asked".into(),
        job_progress: None,
        volumes: Default::default(),
    };
    wait_for("the move to be refused because the job begins anew", async || {
        let asked = migration::request(&lab.cluster, &before, request.clone()).await;
        // On a busy machine the destination may seem to be away for a moment.
        asked.expect_err("it leaves").why.contains("begins anew").then_some(())
    })
    .await;
    up(&lab, &edge).await;
    ends_anew(&lab, [first, second], &id).await;
}

#[tokio::test]
async fn a_controller_that_ends_while_a_job_leaves_its_host_fails_no_job() {
    let mut lab = Lab::up().await;
    let other = second_home(&lab).await;
    let id = lab.submit(restarting()).await;
    let at_home = running(&lab, &other, &id).await[0].id == lab.home.id;
    let store = rusqlite::Connection::open(lab.dir.path().join("state.db")).expect("open");
    store.busy_timeout(super::PATIENCE).expect("patience");
    // The cleanup is stored, and what comes after is not.
    let stop = "CREATE TRIGGER stop_1 BEFORE INSERT ON entries
                WHEN NEW.key LIKE 'jobs/%' AND json_extract(NEW.value, '$.job.state') = 'queued'
                BEGIN SELECT RAISE(ABORT, 'it ended here'); END;";
    store
        .execute_batch(&format!(
            "{stop}{}",
            stop.replace("stop_1", "stop_2").replace("INSERT", "UPDATE")
        ))
        .expect("trigger");
    let host = if at_home { &lab.home } else { &other };
    host.inside().down = true;
    wait_for("the cleanup", async || {
        let keys = lab.cluster.records.keys(&cleaner::prefix(&id)).await.expect("keys");
        (!keys.is_empty()).then_some(())
    })
    .await;
    lab.supervisor.stop().await;
    store.execute_batch("DROP TRIGGER stop_1; DROP TRIGGER stop_2").expect("drop");
    host.inside().down = false;
    lab.start_controller(super::TIMING).await;
    ends_anew(&lab, [&lab.home, &other], &id).await;
}

#[tokio::test]
async fn a_job_that_begins_anew_leaves_somebody_elses_volume_of_its_name_alone() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    let theirs = VolumeName::new("q-0001-root").expect("name");
    for host in [&lab.home, &other] {
        host.make_volume(&theirs);
        // The job waits before it comes to that volume.
        host.inside().no_new_volumes = true;
    }
    let id = lab.submit(restarting()).await;
    let job = lab.wait_for_state(&id, JobState::Staging).await;
    let [first, second] = match job.host.as_ref() == Some(&lab.home.id) {
        true => [&lab.home, &other],
        false => [&other, &lab.home],
    };
    second.inside().no_new_volumes = false;
    first.inside().down = true;
    lab.wait_for_vm(second, &vm_of(&id)).await;
    up(&lab, first).await;
    wait_for("the cleanup to be done", async || {
        let keys = lab.cluster.records.keys(&cleaner::prefix(&id)).await.expect("keys");
        keys.is_empty().then_some(())
    })
    .await;
    assert!(first.inside().volumes.contains_key(&theirs), "it was never the job's");
}

#[tokio::test]
async fn a_job_goes_back_to_its_only_host_when_nothing_of_it_is_left_there() {
    let lab = Lab::up().await;
    lab.home.inside().no_new_volumes = true;
    let id = lab.submit(restarting()).await;
    lab.wait_for_state(&id, JobState::Staging).await;
    unreachable(&lab, &lab.home).await;
    lab.wait_for_state(&id, JobState::Queued).await;
    lab.home.inside().no_new_volumes = false;
    up(&lab, &lab.home).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

#[tokio::test]
async fn a_host_that_reboots_before_its_answer_to_the_start_is_heard_has_failed() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    for host in [&lab.home, &other] {
        host.inside().loses_answers = true;
    }
    let id = lab.submit(restarting()).await;
    let job = lab.wait_for_job(&id, "starting", |job| job.started_ms.is_some()).await;
    let [first, second] = match job.host.as_ref() == Some(&lab.home.id) {
        true => [&lab.home, &other],
        false => [&other, &lab.home],
    };
    lab.wait_for_vm(first, &vm_of(&id)).await;
    first.reboot(true);
    for host in [first, second] {
        host.inside().loses_answers = false;
    }
    ends_anew(&lab, [first, second], &id).await;
}

#[tokio::test]
async fn a_destination_that_reboots_before_its_vm_is_seen_there_has_failed() {
    let (mut lab, id, vm) = copying_of(restarting()).await;
    let other = second_home(&lab).await;
    lab.supervisor.stop().await;
    switch(&lab, &vm);
    lab.cloud.reboot(false);
    lab.start_controller(super::TIMING).await;
    ends_anew(&lab, [&lab.home, &other], &id).await;
}

#[tokio::test]
async fn each_start_of_a_vm_is_later_than_those_before_it() {
    let (mut lab, id, vm) = copying_of(restarting()).await;
    let start = |host: &FakeHost| host.inside().vms[&vm].report.spec.start;
    let (first, second) = (start(&lab.home), start(&lab.cloud));
    assert_eq!(first.submitted_ms, lab.job(&id).await.submitted_ms);
    assert_eq!((first.run, first.migration), (0, 0));
    assert_eq!(second, first.by_migration(1));
    let other = second_home(&lab).await;
    lab.supervisor.stop().await;
    switch(&lab, &vm);
    lab.cloud.reboot(false);
    lab.start_controller(super::TIMING).await;
    let third = wait_for("the job to begin anew", async || {
        let hosts = [&lab.home, &other];
        let starts = hosts.map(|host| host.inside().vms.get(&vm).map(|vm| vm.report.spec.start));
        starts.into_iter().flatten().find(|start| start.run == 1)
    })
    .await;
    assert!(second < third);
    ends_anew(&lab, [&lab.home, &other], &id).await;
}

#[tokio::test]
async fn a_cleanup_of_an_earlier_start_leaves_the_vm_that_runs_alone() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let earlier = VmStart::default().whole_run();
    let late = Cleanup::of_host(&id, "late", earlier, &lab.home.id, &[]);
    cleaner::hand_over(&lab.cluster, &late).await.expect("hand over");
    wait_for("the cleanup to be done", async || {
        let keys = lab.cluster.records.keys(&cleaner::prefix(&id)).await.expect("keys");
        keys.is_empty().then_some(())
    })
    .await;
    assert!(lab.home.inside().vms.contains_key(&vm_of(&id)), "it was not meant");
}
