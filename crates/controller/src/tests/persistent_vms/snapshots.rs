//! Snapshots of VMs without a job.

use super::*;

#[tokio::test]
async fn a_snapshot_of_filesystems_that_went_on_says_so() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    let note = async |name: &str| {
        let ask = Snapshot { image: ImageName::new(name).expect("a name") };
        vms::guest::snapshot(&lab.cluster, &web(), &ask).await.expect("an image").note
    };
    assert_eq!(note("whole").await, "");
    lab.home.inside().goes_on = true;
    assert!(note("late").await.contains("went on"));
    // Somebody else has frozen them.
    lab.home.inside().still = 2;
    assert!(note("refused").await.contains("did not stand still"));
}

#[tokio::test]
async fn a_snapshot_of_a_vm_that_is_started_meanwhile_says_that_its_guest_may_have_written() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    let ask = |name: &str| Snapshot { image: ImageName::new(name).expect("a name") };
    let still = vms::guest::snapshot(&lab.cluster, &web(), &ask("still")).await.expect("an image");
    assert_eq!(still.note, "");
    lab.home.inside().holds_snapshots = true;
    let started = async {
        lab.power(PowerRequest::Start).await;
        lab.runs().await;
        lab.home.inside().holds_snapshots = false;
    };
    let (begun, vm) = (ask("begun"), web());
    let (made, ()) = tokio::join!(vms::guest::snapshot(&lab.cluster, &vm, &begun), started);
    assert!(made.expect("an image").note.contains("started meanwhile"));
}

/// Its guest stands still until the snapshot is made.
#[tokio::test]
async fn a_snapshot_goes_on_when_who_has_asked_for_it_goes_away() {
    let tenants = ann_has_a_vm().await;
    let hosts = [&tenants.lab.home, &tenants.lab.cloud];
    hosts.iter().for_each(|host| host.inside().holds_snapshots = true);
    let stands_still = || hosts.iter().any(|host| host.inside().still > 0);
    let ann = tenants.ann.clone();
    let mut asked = tokio::spawn(async move {
        let ask = Snapshot { image: ImageName::new("saved").expect("a name") };
        ann.post::<ClusterImage>("/v1/vms/web/snapshot", &ask).await
    });
    let still = async || stands_still().then_some(());
    wait_while(&mut asked, "its guest to stand still", still).await;
    asked.abort();
    asked.await.expect_err("it was not answered");
    hosts.iter().for_each(|host| host.inside().holds_snapshots = false);
    wait_for("its guest to go on", async || (!stands_still()).then_some(())).await;
}

#[tokio::test]
async fn two_snapshots_of_a_vm_are_not_made_at_the_same_time() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    let _first = lab.cluster.index.begin_snapshot(&web()).expect("nobody else makes one");
    let ask = Snapshot { image: ImageName::new("second").expect("a name") };
    let second = vms::guest::snapshot(&lab.cluster, &web(), &ask).await.expect_err("later");
    assert_eq!(second.kind, ProblemKind::Unavailable, "{second}");
}

#[tokio::test]
async fn a_vm_of_which_a_snapshot_is_made_is_not_moved() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let made = lab.cluster.index.begin_snapshot(&web()).expect("nobody else makes one");
    let to = lab.cloud.id.clone();
    let refused = vms::move_to(&lab.cluster, &web(), to.clone(), VolumesOnMove::Stay).await;
    let refused = refused.expect_err("its guest may stand still");
    assert!(refused.why.contains("a snapshot of it"), "{refused}");
    drop(made);
    vms::move_to(&lab.cluster, &web(), to, VolumesOnMove::Stay).await.expect("it moves");
    let ask = Snapshot { image: ImageName::new("moving").expect("a name") };
    let late = vms::guest::snapshot(&lab.cluster, &web(), &ask).await.expect_err("it moves");
    assert!(late.why.contains("being moved"), "{late}");
}
