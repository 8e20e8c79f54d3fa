//! Volumes that come after their VM.

use std::time::Duration;

use super::*;
use crate::tests::PATIENCE;

#[tokio::test]
async fn volumes_that_follow_their_vm_leave_nothing_behind() {
    let mut lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &vm, to, VolumesOnMove::Follow).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    lab.cloud.inside().moves.missing_bytes = MISSING;
    switch(&lab, &vm);
    wait_for_move(&lab, &own(&vm, "root"), VolumeMoveState::Filling).await;
    let shown = vms::get(&lab.cluster, &vm).await.expect("VM");
    let follow: Vec<&str> =
        shown.volumes.iter().filter(|v| v.follows).map(|v| v.volume.as_str()).collect();
    assert_eq!(follow, ["q-0001-root", "q-0001-seed", "q-0001-out"], "the data is there");
    lab.restart_controller().await;
    lab.cloud.inside().moves.missing_bytes = 0;
    wait_for("both to be there", async || {
        let record = jobs::record(&lab.cluster, &id).await.expect("record");
        record.to_follow.is_empty().then_some(())
    })
    .await;
    for part in ["root", "seed", "out"] {
        assert!(lab.cloud.inside().volumes.contains_key(&own(&vm, part)), "{part}");
        assert_eq!(home_in_record(&lab, &id, own(&vm, part).as_str()).await, lab.cloud.id);
    }
    {
        let home = lab.home.inside();
        let left: Vec<&str> = home.volumes.keys().map(|name| name.as_str()).collect();
        assert_eq!(left, [""; 0]);
        assert!(home.moves.departed.is_empty() && home.attachments.is_empty());
    }
    finish(&lab.cloud, &lab.cloud, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
    assert!(lab.cluster.records.keys("volume_moves/").await.expect("keys").is_empty());
}

/// The store has it a moment before the rest of the controller knows it.
async fn wait_for_no_followers(lab: &Lab, vm: &VmId) {
    wait_for("nothing to follow", async || {
        lab.cluster.index.of_vm(vm)?.to_follow.is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn volumes_that_follow_their_vm_stay_when_a_person_calls_it_off() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &vm, to, VolumesOnMove::Follow).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    lab.cloud.inside().moves.stands_still = true;
    switch(&lab, &vm);
    wait_for_move(&lab, &own(&vm, "root"), VolumeMoveState::Taking).await;
    let ended = migration::cancel(&lab.cluster, &vm).await.expect("volumes follow it");
    assert_eq!(ended.state, MigrationState::Completed);
    wait_for_move(&lab, &own(&vm, "root"), VolumeMoveState::CalledOff).await;
    wait_for_no_followers(&lab, &vm).await;
    lab.cloud.inside().moves.stands_still = false;
    let again = migration::cancel(&lab.cluster, &vm).await.expect_err("nothing follows");
    assert_eq!(again.kind, ProblemKind::Conflict);
    for part in ["root", "seed", "out"] {
        assert_eq!(home_in_record(&lab, &id, own(&vm, part).as_str()).await, lab.home.id);
    }
    finish(&lab.cloud, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn disks_that_follow_a_vm_without_a_job_stay_when_a_person_calls_it_off() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &web(), to, VolumesOnMove::Follow).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&web()].asked.is_some().then_some(())
    })
    .await;
    lab.cloud.inside().moves.stands_still = true;
    switch(&lab, &web());
    wait_for_move(&lab, &own(&web(), "root"), VolumeMoveState::Taking).await;
    let ended = migration::cancel(&lab.cluster, &web()).await.expect("disks follow it");
    assert_eq!(ended.state, MigrationState::Completed);
    wait_for_move(&lab, &own(&web(), "root"), VolumeMoveState::CalledOff).await;
    wait_for_no_followers(&lab, &web()).await;
    lab.cloud.inside().moves.stands_still = false;
}

#[tokio::test]
async fn calling_off_what_follows_a_vm_leaves_a_person_s_own_move_of_a_volume() {
    let lab = Lab::up().await;
    let third = FakeHost::start("edge1", "edge").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let (id, vm) = running(&lab).await;
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &vm, to, VolumesOnMove::Follow).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    lab.cloud.inside().moves.stands_still = true;
    third.inside().moves.stands_still = true;
    switch(&lab, &vm);
    wait_for_move(&lab, &own(&vm, "root"), VolumeMoveState::Taking).await;
    begin(&lab, &own(&vm, "out"), &third.id).await.expect("an admin moves it");
    migration::cancel(&lab.cluster, &vm).await.expect("volumes follow it");
    wait_for_move(&lab, &own(&vm, "root"), VolumeMoveState::CalledOff).await;
    wait_for_no_followers(&lab, &vm).await;
    let asked = moves::of_volume(&lab.cluster, &own(&vm, "out")).await.expect("a move");
    assert_eq!(asked.state, VolumeMoveState::Taking, "{asked:?}");
    third.inside().moves.stands_still = false;
    lab.cloud.inside().moves.stands_still = false;
    wait_for_move(&lab, &own(&vm, "out"), VolumeMoveState::Completed).await;
    wait_for("the job to know it", async || {
        (home_in_record(&lab, &id, own(&vm, "out").as_str()).await == third.id).then_some(())
    })
    .await;
    finish(&lab.cloud, &third, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_volume_follows_its_vm_when_a_host_that_was_silent_for_too_long_answers_again() {
    let mut lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.supervisor.stop().await;
    let take_patience = Duration::from_millis(100);
    lab.start_controller(Timing { take_patience, follow_patience: PATIENCE, ..TIMING }).await;
    // The hosts have to report first.
    wait_for("the move to begin", async || {
        let to = lab.cloud.id.clone();
        vms::move_to(&lab.cluster, &vm, to, VolumesOnMove::Follow).await.ok()
    })
    .await;
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    lab.cloud.inside().moves.stands_still = true;
    switch(&lab, &vm);
    wait_for("its second move to be called off", async || {
        let last = lab.cluster.index.volume_move(&own(&vm, "root"))?;
        (last.number > 1 && last.view.state == VolumeMoveState::CalledOff).then_some(())
    })
    .await;
    lab.cloud.inside().moves.stands_still = false;
    wait_for_no_followers(&lab, &vm).await;
    for part in ["root", "seed", "out"] {
        assert_eq!(home_in_record(&lab, &id, own(&vm, part).as_str()).await, lab.cloud.id);
    }
    finish(&lab.cloud, &lab.cloud, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}
