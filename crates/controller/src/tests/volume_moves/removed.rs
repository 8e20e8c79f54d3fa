//! The old or the new home of a volume that moves is removed, or another host is away.

use super::*;

#[tokio::test]
async fn the_new_home_is_removed_and_the_volume_is_what_it_was() {
    let lab = Lab::up().await;
    lab.home.inside().moves.missing_bytes = MISSING;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
    down(&lab, &lab.home).await;
    let refused = hosts::remove(&lab.cluster, &lab.home.id, false).await.expect_err("it moves");
    assert!(refused.why.contains("tpch"), "{refused}");
    let removal = hosts::remove(&lab.cluster, &lab.home.id, true).await.expect("removed");
    assert_eq!(removal.returned_volumes, [data_volume()]);
    assert!(removal.lost_volumes.is_empty(), "{removal:?}");
    let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::CalledOff).await;
    assert!(ended.problem.contains("home1 was removed"), "{}", ended.problem);
    let record: VolumeRecord =
        lab.cluster.records.read(&volume_key(&data_volume())).await.expect("read").expect("record");
    assert_eq!(record.home, lab.cloud.id);
    assert!(lab.cloud.inside().volumes.contains_key(&data_volume()));
}

/// The old home has it as it was when its move began.
#[tokio::test]
async fn a_vm_without_a_job_whose_disks_new_home_is_removed_starts_with_what_its_disk_was() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    lab.cloud.inside().moves.missing_bytes = MISSING;
    let root = own(&web(), "root");
    begin(&lab, &root, &lab.cloud.id).await.expect("move");
    wait_for_move(&lab, &root, VolumeMoveState::Filling).await;
    down(&lab, &lab.cloud).await;
    let removal = hosts::remove(&lab.cluster, &lab.cloud.id, true).await.expect("removed");
    assert!(removal.returned_volumes.contains(&root), "{removal:?}");
    wait_for_move(&lab, &root, VolumeMoveState::CalledOff).await;
    lab.vm_is(VmState::Stopped).await;
    wait_for("the reason", async || {
        let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
        vm.reason.contains("is what it was when it left home1").then_some(())
    })
    .await;
    wait_for("its disk's home", async || {
        let record = lab.cluster.index.of_vm(&web()).expect("its record");
        let disks = record.placement.clone().expect("placed").disks;
        disks.iter().any(|disk| disk.volume == root && disk.home == lab.home.id).then_some(())
    })
    .await;
    lab.power(PowerRequest::Start).await;
    lab.runs().await;
    assert!(lab.home.inside().volumes.contains_key(&root));
}

/// Its home does not let in a host that has never had it attached.
#[tokio::test]
async fn a_host_that_is_away_and_never_had_a_volume_does_not_keep_its_move_from_ending() {
    for was_let_in in [false, true] {
        let lab = Lab::up().await;
        let third = FakeHost::start("edge1", "edge").await;
        hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
        if was_let_in {
            let mut cloud = lab.cloud.inside();
            cloud.admissions.entry(data_volume()).or_default().insert(third.id.clone());
        }
        down(&lab, &third).await;
        begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
        if was_let_in {
            wait_for("the move to say what it waits for", async || {
                let shown = moves::of_volume(&lab.cluster, &data_volume()).await.ok()?;
                shown.problem.contains("may still look for it").then_some(())
            })
            .await;
            third.inside().down = false;
        }
        wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    }
}

#[tokio::test]
async fn the_old_home_is_removed_and_what_was_not_copied_is_named() {
    for is_taken in [true, false] {
        let lab = Lab::up().await;
        {
            let mut home = lab.home.inside();
            home.moves.missing_bytes = MISSING;
            home.moves.stands_still = !is_taken;
        }
        begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
        if is_taken {
            wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
        }
        down(&lab, &lab.cloud).await;
        let removal = hosts::remove(&lab.cluster, &lab.cloud.id, true).await.expect("removed");
        let named = (removal.incomplete_volumes.len(), removal.lost_volumes.len());
        assert_eq!(named, if is_taken { (1, 0) } else { (0, 1) }, "{removal:?}");
        let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::Lost).await;
        assert!(ended.problem.contains("cloud1 was removed"), "{}", ended.problem);
    }
}
