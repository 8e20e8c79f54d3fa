//! Volumes that move to another home, and what interrupts them. What the fake volume servers decide, they
//! decide with the model's own machine.

mod following;
mod removed;

use perigee_model::guest::GuestBody;
use perigee_model::home::{Place, Tenure};
use perigee_model::job::{Access, HostState, Job, JobState, MigrationState};
use perigee_model::persistent_vm::{NewVm, PowerRequest, VmState};
use perigee_model::volume_move::{VolumeMove, VolumeMoveCause, VolumeMoveState, VolumesOnMove};
use perigee_model::{HostId, JobId, Problem, ProblemKind, VmId, VolumeName};

use super::fake::FakeHost;
use super::migrations::switch;
use super::persistent_vms::{new_vm, web};
use super::{Lab, TIMING, data_volume, finish, running, spec, vm_of, wait_for};
use crate::cluster::Timing;
use crate::records::{VolumeRecord, volume_key};
use crate::storage::{images, moves, volumes};
use crate::{hosts, jobs, migration, vms};

const MISSING: u64 = 123 << 20;

async fn begin(lab: &Lab, volume: &VolumeName, to: &HostId) -> Result<VolumeMove, Problem> {
    moves::request(&lab.cluster, volume, to, VolumeMoveCause::Asked).await
}

async fn wait_for_move(lab: &Lab, volume: &VolumeName, state: VolumeMoveState) -> VolumeMove {
    wait_for(&format!("the move of {volume} to be {state:?}"), async || {
        let shown = moves::of_volume(&lab.cluster, volume).await.ok()?;
        (shown.state == state).then_some(shown)
    })
    .await
}

/// The data volume is only at its home, with nothing left at the other host.
async fn stands_only_at(lab: &Lab, home: &FakeHost, other: &FakeHost) {
    let name = data_volume();
    let record: VolumeRecord =
        lab.cluster.records.read(&volume_key(&name)).await.expect("read").expect("a record");
    assert_eq!(record.home, home.id);
    assert!(home.inside().volumes.contains_key(&name));
    assert!(!home.inside().attachments.contains_key(&name));
    let other = other.inside();
    assert!(!other.volumes.contains_key(&name) && !other.moves.departed.contains_key(&name));
}

pub async fn home_in_record(lab: &Lab, id: &JobId, volume: &str) -> HostId {
    let record = jobs::record(&lab.cluster, id).await.expect("record");
    let disks = record.placement.expect("placed").disks;
    disks.into_iter().find(|disk| disk.volume.as_str() == volume).expect("a disk").home
}

fn own(vm: &VmId, part: &str) -> VolumeName {
    VolumeName::new(format!("{vm}-{part}")).expect("name")
}

async fn down(lab: &Lab, host: &FakeHost) {
    host.inside().down = true;
    wait_for("the host to be unreachable", async || {
        (lab.cluster.hosts.state(&host.id) == HostState::Unreachable).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volume_s_info_says_why_the_rest_of_it_can_t_be_copied_now() {
    let lab = Lab::up().await;
    {
        let mut home = lab.home.inside();
        home.moves.missing_bytes = MISSING;
        home.moves.copying_fails = Some("Input/output error".to_owned());
    }
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    let filling = wait_for("a problem", async || {
        let shown = volumes::volume(&lab.cluster, &data_volume()).await.expect("volume");
        shown.moving.filter(|moving| moving.problem.contains("tries again: Input/output error"))
    })
    .await;
    assert_eq!((filling.state, filling.missing_bytes), (VolumeMoveState::Filling, Some(MISSING)));
    {
        let mut home = lab.home.inside();
        (home.moves.missing_bytes, home.moves.copying_fails) = (0, None);
    }
    let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    assert_eq!(ended.problem, "");
}

#[tokio::test]
async fn a_volume_that_nobody_uses_moves() {
    let lab = Lab::up().await;
    lab.home.inside().moves.missing_bytes = MISSING;
    let asked = begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    assert_eq!((&asked.from, &asked.to), (&lab.cloud.id, &lab.home.id));
    let filling = wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
    assert_eq!(filling.missing_bytes, Some(MISSING));
    let shown = volumes::volume(&lab.cluster, &data_volume()).await.expect("volume");
    assert_eq!(shown.home, lab.home.id);
    assert_eq!(shown.moving.expect("it moves").missing_bytes, Some(MISSING));
    let twice = begin(&lab, &data_volume(), &lab.cloud.id).await.expect_err("it is not over");
    assert_eq!(twice.kind, ProblemKind::Conflict);
    assert!(lab.cloud.inside().moves.departed.contains_key(&data_volume()), "it is still needed");
    lab.home.inside().moves.missing_bytes = 0;
    let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    assert!(ended.ended_ms.is_some() && ended.problem.is_empty());
    stands_only_at(&lab, &lab.home, &lab.cloud).await;
    assert!(!lab.cloud.inside().attachments.contains_key(&data_volume()));
    let shown = volumes::volumes(&lab.cluster).await.expect("volumes");
    assert_eq!(shown.len(), 1);
    assert!(shown[0].moving.is_none());
    begin(&lab, &data_volume(), &lab.cloud.id).await.expect("move back");
    wait_for("the way back", async || {
        let last = moves::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        (last.to == lab.cloud.id && last.state == VolumeMoveState::Completed).then_some(())
    })
    .await;
    stands_only_at(&lab, &lab.cloud, &lab.home).await;
}

#[tokio::test]
async fn a_controller_restart_at_any_moment_of_a_volumes_move_goes_on() {
    let mut lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    for _ in 0..10 {
        lab.restart_controller().await;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    stands_only_at(&lab, &lab.home, &lab.cloud).await;
    assert_eq!(home_in_record(&lab, &id, "tpch").await, lab.home.id);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn an_answer_that_is_lost_is_asked_for_again_and_never_taken_for_a_no() {
    let lab = Lab::up().await;
    lab.home.inside().moves.loses_answers = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for("the volume to be taken", async || {
        lab.home.inside().volumes.contains_key(&data_volume()).then_some(())
    })
    .await;
    let shown = moves::cancel(&lab.cluster, &data_volume()).await.expect("cancel");
    assert_eq!(shown.state, VolumeMoveState::Taking, "nobody knows yet");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::CallingOff).await;
    assert!(lab.cloud.inside().moves.departed.contains_key(&data_volume()), "not taken back");
    lab.home.inside().moves.loses_answers = false;
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    stands_only_at(&lab, &lab.home, &lab.cloud).await;
}

#[tokio::test]
async fn a_job_that_ends_says_which_host_the_move_of_its_volume_waits_for() {
    let lab = Lab::up().await;
    let third = FakeHost::start("edge1", "edge").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let (id, vm) = running(&lab).await;
    third.inside().moves.stands_still = true;
    begin(&lab, &data_volume(), &third.id).await.expect("move");
    third.inside().down = true;
    wait_for("the host to be unreachable", async || {
        (lab.cluster.hosts.state(&third.id) == HostState::Unreachable).then_some(())
    })
    .await;
    moves::cancel(&lab.cluster, &data_volume()).await.expect("cancel");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::CallingOff).await;
    finish(&lab.home, &lab.home, &vm);
    let says_why = |job: &Job| {
        ["volume tpch", "edge1 does not answer"].iter().all(|part| job.reason.contains(part))
    };
    lab.wait_for_job(&id, "its reason", says_why).await;
    hosts::remove(&lab.cluster, &third.id, true).await.expect("removed");
    let ended = lab.wait_for_state(&id, JobState::Succeeded).await;
    assert!(!says_why(&ended), "that is over: {ended:?}");
}

#[tokio::test]
async fn a_running_job_goes_on_with_a_volume_that_moves() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.cloud.inside().volumes.get_mut(&data_volume()).expect("data").data = b"kept".to_vec();
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    stands_only_at(&lab, &lab.home, &lab.cloud).await;
    assert_eq!(lab.home.inside().volumes[&data_volume()].data, b"kept");
    assert_eq!(home_in_record(&lab, &id, "tpch").await, lab.home.id);
    // The VM moves on afterwards: its epochs are issued at the new home.
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &vm, to, VolumesOnMove::Stay).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    let order = lab.home.inside().vms[&vm].asked.clone().expect("asked");
    let raise = order.epochs.iter().find(|raise| raise.volume == data_volume()).expect("raised");
    assert_eq!(raise.volume_url, lab.home.addresses.volume_url);
    assert_eq!(lab.cloud.inside().attachments[&data_volume()], "home1:10809");
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", |job| job.host.as_ref() == Some(&lab.cloud.id)).await;
    finish(&lab.cloud, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_host_that_has_the_volume_attached_is_told_its_new_home() {
    let lab = Lab::up().await;
    let third = FakeHost::start("edge1", "edge").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let (id, vm) = running(&lab).await;
    begin(&lab, &data_volume(), &third.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    assert_eq!(lab.home.inside().attachments[&data_volume()], "edge1:10809");
    stands_only_at(&lab, &third, &lab.cloud).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_move_that_is_cancelled_before_it_is_taken_leaves_the_volume_at_its_home() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.home.inside().moves.stands_still = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for("the move to say what it waits for", async || {
        let shown = moves::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        shown.problem.contains("its home is silent").then_some(())
    })
    .await;
    moves::cancel(&lab.cluster, &data_volume()).await.expect("cancel");
    let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::CalledOff).await;
    assert_eq!(ended.problem, "cancelled");
    stands_only_at(&lab, &lab.cloud, &lab.home).await;
    let refused = lab.home.inside().residence(&data_volume());
    assert!(refused.spent.0 > 0 && refused.place == Place::NotHere, "durably: {refused:?}");
    let again = moves::cancel(&lab.cluster, &data_volume()).await.expect_err("none");
    assert_eq!(again.kind, ProblemKind::Conflict);
    lab.home.inside().moves.stands_still = false;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("the next move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_move_that_is_done_says_how_to_move_the_volume_back() {
    let lab = Lab::up().await;
    lab.home.inside().moves.missing_bytes = MISSING;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
    let refused = moves::cancel(&lab.cluster, &data_volume()).await.expect_err("done");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.next.contains("perigee volume move tpch cloud1"), "{refused}");
}

#[tokio::test]
async fn a_volume_that_its_home_does_not_let_go_stays_and_says_why() {
    let lab = Lab::up().await;
    lab.cloud.inside().moves.lets_none_go = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::CalledOff).await;
    assert!(ended.problem.contains("a client's clone stands on it"), "{}", ended.problem);
    stands_only_at(&lab, &lab.cloud, &lab.home).await;
}

#[tokio::test]
async fn a_vm_and_its_volume_do_not_begin_to_move_at_the_same_time() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.home.inside().moves.stands_still = true;
    let mut moved = [0, 0];
    for round in 0..10 {
        let (cluster, of_vm) = (lab.cluster.clone(), vm.clone());
        let to = lab.cloud.id.clone();
        let vm_moves = async move { vms::move_to(&cluster, &of_vm, to, VolumesOnMove::Stay).await };
        let (cluster, to) = (lab.cluster.clone(), lab.home.id.clone());
        let volume_moves_too = async move {
            let cause = VolumeMoveCause::Asked;
            moves::request(&cluster, &data_volume(), &to, cause).await
        };
        // Whoever comes first wins, and both come first sometimes.
        let (of_vm, of_volume) = if round % 2 == 0 {
            tokio::join!(vm_moves, volume_moves_too)
        } else {
            let (of_volume, of_vm) = tokio::join!(volume_moves_too, vm_moves);
            (of_vm, of_volume)
        };
        match (of_vm, of_volume) {
            (Ok(migration), Err(refused)) => {
                assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
                moved[0] += 1;
                migration::cancel(&lab.cluster, &vm).await.expect("cancel");
                lab.wait_for_job(&id, "settled", |job| {
                    job.migrations
                        .iter()
                        .any(|m| m.id == migration.id && m.state == MigrationState::Aborted)
                })
                .await;
                wait_for("the job to settle it, and the cleaner to be done", async || {
                    let record = jobs::record(&lab.cluster, &id).await.expect("record");
                    let left = lab.cluster.records.keys("cleanups/").await.expect("keys");
                    let all = record.job.migrations.len() + moved[0];
                    (record.settled as usize >= all && left.is_empty()).then_some(())
                })
                .await;
                let mut home = lab.home.inside();
                let source = home.vms.get_mut(&vm).expect("VM");
                (source.asked, source.report.migration) = (None, None);
            }
            (Err(refused), Ok(_)) => {
                assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
                assert!(refused.why.contains("tpch"), "{refused}");
                moved[1] += 1;
                moves::cancel(&lab.cluster, &data_volume()).await.expect("cancel");
                wait_for_move(&lab, &data_volume(), VolumeMoveState::CalledOff).await;
            }
            (of_vm, of_volume) => panic!("{of_vm:?} and {of_volume:?}"),
        }
    }
    assert!(moved[0] + moved[1] == 10, "{moved:?}");
    lab.home.inside().moves.stands_still = false;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_job_whose_volume_moves_starts_when_its_new_home_is_known() {
    let lab = Lab::up().await;
    lab.home.inside().moves.stands_still = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    let id = lab.submit(spec(Access::Write)).await;
    lab.wait_for_job(&id, "waiting for the move", |job| job.reason.contains("being moved")).await;
    lab.home.inside().moves.stands_still = false;
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    assert_eq!(home_in_record(&lab, &id, "tpch").await, lab.home.id);
    assert!(lab.home.inside().attachments.is_empty(), "all is there");
    lab.home.say(&vm, GuestBody::Started);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_job_that_ends_while_its_volumes_move_leaves_nothing() {
    for stands_still in [true, false] {
        let lab = Lab::up().await;
        let (id, vm) = running(&lab).await;
        {
            let mut cloud = lab.cloud.inside();
            cloud.moves.missing_bytes = MISSING;
            cloud.moves.stands_still = stands_still;
        }
        let root = own(&vm, "root");
        begin(&lab, &root, &lab.cloud.id).await.expect("move");
        if !stands_still {
            wait_for_move(&lab, &root, VolumeMoveState::Filling).await;
        }
        finish(&lab.home, &lab.home, &vm);
        // The job does not wait for the copy.
        lab.wait_for_state(&id, JobState::Succeeded).await;
        if !stands_still {
            assert!(lab.cloud.inside().volumes.contains_key(&root), "clones may need the rest");
            assert!(lab.home.inside().moves.departed.contains_key(&root));
        }
        lab.cloud.inside().moves.missing_bytes = 0;
        lab.wait_for_clean_hosts().await;
        wait_for("nothing to be kept of the root", async || {
            let left = lab.cluster.records.keys("volume_moves/").await.expect("keys");
            (lab.home.inside().moves.departed.is_empty() && left.is_empty()).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_jobs_volume_that_lost_its_old_home_while_it_was_filled_is_deleted() {
    let lab = Lab::up().await;
    let third = FakeHost::start("edge1", "edge").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let (id, vm) = running(&lab).await;
    let root = own(&vm, "root");
    third.inside().moves.missing_bytes = MISSING;
    begin(&lab, &root, &third.id).await.expect("move");
    wait_for_move(&lab, &root, VolumeMoveState::Filling).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert!(third.inside().volumes.contains_key(&root));
    down(&lab, &lab.home).await;
    hosts::remove(&lab.cluster, &lab.home.id, true).await.expect("removed");
    wait_for("the root to be deleted", async || {
        let left = lab.cluster.records.keys("volume_moves/").await.expect("keys");
        (!third.inside().volumes.contains_key(&root) && left.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volume_is_not_deleted_while_its_clones_may_need_what_is_not_copied() {
    let lab = Lab::up().await;
    lab.home.inside().moves.missing_bytes = MISSING;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
    let refused = volumes::delete(&lab.cluster, &data_volume()).await.expect_err("it fills");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("123 MiB") && refused.why.contains("cloud1"), "{refused}");
    assert!(refused.next.contains("perigee volume info tpch"), "{refused}");
    assert!(lab.home.inside().volumes.contains_key(&data_volume()));
    lab.home.inside().moves.missing_bytes = 0;
    wait_for("the volume to be deleted", async || {
        volumes::delete(&lab.cluster, &data_volume()).await.ok()
    })
    .await;
    wait_for("nothing to be kept", async || {
        let left = lab.cluster.records.keys("volume_moves/").await.expect("keys");
        (lab.cloud.inside().moves.departed.is_empty() && left.is_empty()).then_some(())
    })
    .await;
    assert!(volumes::volumes(&lab.cluster).await.expect("volumes").is_empty());
}

/// A client at the old home had it open when the move ended, so it stayed attached there.
#[tokio::test]
async fn a_volume_that_was_deleted_is_attached_nowhere_any_more() {
    let lab = Lab::up().await;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    let address = "10.0.0.1:10809".to_owned();
    lab.cloud.inside().attachments.insert(data_volume(), address);
    volumes::delete(&lab.cluster, &data_volume()).await.expect("deleted");
    assert!(lab.cloud.inside().attachments.is_empty());
}

#[tokio::test]
async fn a_host_that_is_away_when_a_volume_is_deleted_detaches_it_later() {
    let mut lab = Lab::up().await;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    lab.cloud.inside().attachments.insert(data_volume(), "10.0.0.1:10809".to_owned());
    lab.cloud.inside().down = true;
    wait_for("the host to be unreachable", async || {
        let state = lab.cluster.hosts.state(&lab.cloud.id);
        (state == HostState::Unreachable).then_some(())
    })
    .await;
    volumes::delete(&lab.cluster, &data_volume()).await.expect("deleted");
    lab.restart_controller().await;
    lab.cloud.inside().down = false;
    wait_for("it to be detached", async || lab.cloud.inside().attachments.is_empty().then_some(()))
        .await;
}

/// The new home says in some way that it has not the volume; the old one keeps what it has.
async fn keeps_what_is_not_copied(lab: &Lab, said: &str) {
    wait_for("the move to say what it waits for", async || {
        let shown = moves::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        shown.problem.contains(said).then_some(())
    })
    .await;
    let shown = moves::of_volume(&lab.cluster, &data_volume()).await.expect("move");
    assert_eq!(shown.state, VolumeMoveState::Filling);
    assert!(lab.cloud.inside().moves.departed.contains_key(&data_volume()));
}

#[tokio::test]
async fn a_new_home_that_was_set_up_anew_does_not_cost_the_old_homes_copy() {
    let lab = Lab::up().await;
    lab.home.inside().moves.missing_bytes = MISSING;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
    lab.home.inside().wipe(&data_volume());
    keeps_what_is_not_copied(&lab, "NotHere").await;
    // Another volume of that name is not this one.
    lab.home.inside().moves.missing_bytes = 0;
    lab.home.make_volume(&data_volume());
    keeps_what_is_not_copied(&lab, "Here {").await;
}

#[tokio::test]
async fn what_somebody_deleted_at_its_new_home_too_early_stays_at_the_old_one() {
    let lab = Lab::up().await;
    lab.home.inside().moves.missing_bytes = MISSING;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Filling).await;
    {
        let mut home = lab.home.inside();
        home.remove_residence(&data_volume());
        home.volumes.remove(&data_volume());
    }
    keeps_what_is_not_copied(&lab, "was deleted at home1").await;
    // A person says that nothing else stands on it.
    lab.cloud.inside().wipe(&data_volume());
    lab.cloud.inside().moves.departed.clear();
    wait_for("the move to be forgotten", async || {
        let left = lab.cluster.records.keys("volume_moves/").await.expect("keys");
        left.is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volume_that_its_new_home_cannot_take_is_soon_at_its_old_one_again() {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    let take_patience = std::time::Duration::from_millis(200);
    lab.start_controller(Timing { take_patience, ..TIMING }).await;
    lab.home.inside().moves.stores_none = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    let ended = wait_for_move(&lab, &data_volume(), VolumeMoveState::CalledOff).await;
    for said in ["home1", "cloud1", "the pool's disk fails"] {
        assert!(ended.problem.contains(said), "{}", ended.problem);
    }
    stands_only_at(&lab, &lab.cloud, &lab.home).await;
    let Place::Here(tenure) = lab.cloud.inside().residence(&data_volume()).place else {
        panic!("it is at its old home")
    };
    assert!(tenure > Tenure::first(tenure.incarnation()).next(), "it had left");
}

#[tokio::test]
async fn a_volume_that_may_be_on_its_way_is_not_deleted() {
    let lab = Lab::up().await;
    lab.home.inside().moves.stands_still = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    let refused = volumes::delete(&lab.cluster, &data_volume()).await.expect_err("it moves");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("moved"), "{refused}");
}

#[tokio::test]
async fn the_move_of_a_volume_that_was_deleted_at_its_home_can_be_cancelled() {
    let lab = Lab::up().await;
    lab.home.inside().moves.stands_still = true;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for("the new home to be asked", async || {
        let shown = moves::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        shown.problem.contains("its home is silent").then_some(())
    })
    .await;
    {
        let mut cloud = lab.cloud.inside();
        cloud.remove_residence(&data_volume());
        cloud.volumes.remove(&data_volume());
    }
    moves::cancel(&lab.cluster, &data_volume()).await.expect("cancel");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::CalledOff).await;
}

#[tokio::test]
async fn what_a_move_left_behind_is_kept_for_a_while_and_goes_with_the_volume() {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    let shadow = std::time::Duration::from_secs(3600);
    lab.start_controller(Timing { shadow, ..TIMING }).await;
    for (to, from) in [(&lab.home, &lab.cloud), (&lab.cloud, &lab.home)] {
        begin(&lab, &data_volume(), &to.id).await.expect("move");
        wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
        assert!(from.inside().moves.departed.contains_key(&data_volume()), "it is a shadow");
    }
    wait_for("the shadow at the volume's home to be dropped", async || {
        let left = lab.cluster.records.keys("shadows/").await.expect("keys");
        (left.len() == 1).then_some(())
    })
    .await;
    assert!(lab.home.inside().moves.departed.contains_key(&data_volume()), "its time is not over");
    volumes::delete(&lab.cluster, &data_volume()).await.expect("deletion");
    wait_for("the last shadow to go", async || {
        lab.home.inside().moves.departed.is_empty().then_some(())
    })
    .await;
}

/// They may be other tenants'.
#[tokio::test]
async fn an_image_that_is_deleted_takes_only_what_stands_on_it() {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    let shadow = std::time::Duration::from_secs(3600);
    lab.start_controller(Timing { shadow, ..TIMING }).await;
    begin(&lab, &data_volume(), &lab.home.id).await.expect("move");
    wait_for_move(&lab, &data_volume(), VolumeMoveState::Completed).await;
    let left = || lab.cloud.inside().moves.departed.contains_key(&data_volume());
    let copy = |name: &str| {
        let image = perigee_model::ImageName::new(name).expect("a name");
        let info = perigee_model::volume::ImageInfo { name: image.clone(), ..super::fake::image() };
        lab.cloud.inside().images.insert(image.clone(), info);
        image
    };
    let (other, below) = (copy("other"), copy("below"));
    images::delete(&lab.cluster, &other).await.expect("deleted");
    assert!(left(), "it does not stand on that image");
    lab.cloud.inside().stand_on_images.push(data_volume());
    images::delete(&lab.cluster, &below).await.expect("deleted");
    assert!(!left());
}
