//! A replica becomes the volume: what is lost, what comes back, and what can't be done.

use std::time::Duration;

use perigee_model::home::{Tenure, VolumeHome};
use perigee_model::job::{Access, ClusterImage, ClusterVolume, HostState, NewVolume, Start};
use perigee_model::plan::Way;
use perigee_model::replica::{
    PromoteReplica, PromoteVolume, Promotion, ReplicaPin, ReplicaPoint, ReplicateVolume,
};
use perigee_model::vm::HostAddresses;
use perigee_model::volume::VolumeSource;
use perigee_model::volume_move::{VolumeMoveCause, VolumeMoveState};
use perigee_model::{Incarnation, Problem, ProblemKind, SiteId, VolumeName};

use super::fake::FakeHost;
use super::fake::replicas::point;
use super::tenants::{Tenants, new_volume};
use super::{Lab, PATIENCE, data_volume, spec, vm_of, wait_for};
use crate::storage::{moves, replicas, volumes};
use crate::{hosts, jobs, rentals, vms};

/// The data volume at `cloud1` has a complete replica at `home1`.
async fn replicated() -> Lab {
    let lab = Lab::up().await;
    lab.home.inside().pool_free_bytes = Some(1 << 40);
    let ask = ReplicateVolume { to: SiteId::new("home").expect("name"), every_s: 3600, keep: 1 };
    replicas::replicate(&lab.cluster, &data_volume(), &ask).await.expect("a replica");
    wait_for("the first round", async || {
        let shown = replicas::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        shown.first()?.behind_bytes
    })
    .await;
    lab
}

async fn is_unreachable(lab: &Lab, host: &FakeHost) {
    host.inside().down = true;
    wait_for("the host to be unreachable", async || {
        (lab.cluster.hosts.state(&host.id) == HostState::Unreachable).then_some(())
    })
    .await;
}

async fn promote(lab: &Lab, ask: PromoteVolume) -> Result<Promotion, Problem> {
    replicas::promote(&lab.cluster, &data_volume(), ask).await
}

fn forced() -> PromoteVolume {
    PromoteVolume { force: true, ..PromoteVolume::default() }
}

async fn is_over(lab: &Lab) {
    wait_for("the promotion to be over", async || {
        lab.cluster.records.keys("promotions/").await.expect("keys").is_empty().then_some(())
    })
    .await;
}

async fn home_of(lab: &Lab) -> String {
    volumes::find(&lab.cluster, &data_volume()).await.expect("the volume").home.to_string()
}

#[tokio::test]
async fn a_lost_volume_lives_on_as_its_replica_and_the_old_home_is_told() {
    let lab = replicated().await;
    let slow = promote(&lab, PromoteVolume::default()).await.expect_err("it answers");
    assert_eq!(slow.kind, ProblemKind::Conflict, "{slow}");
    lab.cloud.inside().down = true;
    let silent = promote(&lab, PromoteVolume::default()).await.expect_err("it may be slow");
    assert!(silent.kind == ProblemKind::Unavailable && silent.why.contains("slow"), "{silent}");
    is_unreachable(&lab, &lab.cloud).await;
    let done = promote(&lab, PromoteVolume::default()).await.expect("it is lost");
    assert_eq!((done.from.as_str(), done.to.as_str()), ("cloud1", "home1"));
    assert_eq!(home_of(&lab).await, "home1");
    assert!(lab.home.has(&data_volume()).is_some());
    lab.cloud.inside().down = false;
    wait_for("the old home to give it up", async || {
        lab.cloud.has(&data_volume()).is_none().then_some(())
    })
    .await;
    assert_eq!(lab.cloud.inside().replicas.lost.len(), 1);
    assert_eq!(home_of(&lab).await, "home1");
}

#[tokio::test]
async fn a_home_that_is_back_before_the_promotion_is_done_goes_on_as_the_home() {
    let mut lab = replicated().await;
    lab.home.inside().replicas.promotes_none = true;
    is_unreachable(&lab, &lab.cloud).await;
    promote(&lab, PromoteVolume::default()).await.expect_err("nobody answers");
    let refused = jobs::submit(&lab.cluster, spec(Access::Write)).await.expect_err("not now");
    assert!(refused.why.contains("becoming"), "{refused}");
    lab.restart_controller().await;
    let refused = jobs::submit(&lab.cluster, spec(Access::Write)).await.expect_err("not now");
    assert!(refused.why.contains("becoming"), "{refused}");
    lab.cloud.inside().down = false;
    is_over(&lab).await;
    assert!(lab.cloud.has(&data_volume()).is_some() && lab.cloud.inside().replicas.lost.is_empty());
    assert_eq!(home_of(&lab).await, "cloud1");
    // A request that comes late finds that it was called off.
    lab.home.inside().replicas.promotes_none = false;
    let over = lab.home.inside().replicas.over.clone();
    assert_eq!(over.len(), 1);
    for (_, incarnation) in over {
        let layer = lab.home.inside().replicas.points[0].layer;
        let late = PromoteReplica { layer, tenure: Tenure::first(incarnation) };
        let link = lab.cluster.hosts.get(&lab.home.id).expect("home1");
        let path = format!("/v1/volumes/{}/replica/promote", data_volume());
        link.volume.post::<VolumeHome>(&path, &late).await.expect_err("it is over");
    }
    lab.submit(spec(Access::Write)).await;
}

#[tokio::test]
async fn a_promotion_whose_host_does_not_answer_can_be_called_off() {
    let lab = replicated().await;
    lab.home.inside().replicas.promotes_none = true;
    is_unreachable(&lab, &lab.cloud).await;
    promote(&lab, PromoteVolume::default()).await.expect_err("nobody answers");
    let cancel = PromoteVolume { cancel: true, ..PromoteVolume::default() };
    let called_off = promote(&lab, cancel.clone()).await.expect("it is not done");
    assert_eq!(called_off.from.as_str(), "cloud1");
    let twice = promote(&lab, cancel).await.expect_err("there is none");
    assert_eq!(twice.kind, ProblemKind::Conflict, "{twice}");
    // It can be begun again, with the same point.
    lab.home.inside().replicas.promotes_none = false;
    promote(&lab, PromoteVolume::default()).await.expect("it is lost");
    assert_eq!(home_of(&lab).await, "home1");
}

/// Its move had not copied all of it when the new home was lost, so it could also go back to the old one.
#[tokio::test]
async fn a_volume_that_is_being_promoted_does_not_go_back_to_its_old_home_too() {
    let lab = replicated().await;
    let third = FakeHost::start("edge1", "edge").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    third.inside().moves.missing_bytes = 1 << 20;
    let asked = VolumeMoveCause::Asked;
    moves::request(&lab.cluster, &data_volume(), &third.id, asked).await.expect("a move");
    wait_for("the new home to copy", async || {
        let shown = moves::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        (shown.state == VolumeMoveState::Filling).then_some(())
    })
    .await;
    is_unreachable(&lab, &third).await;
    lab.home.inside().replicas.promotes_none = true;
    promote(&lab, PromoteVolume::default()).await.expect_err("nobody answers");
    hosts::remove(&lab.cluster, &third.id, true).await.expect("removed");
    // The driver of the move looks several times meanwhile.
    tokio::time::sleep(Duration::from_millis(300)).await;
    lab.home.inside().replicas.promotes_none = false;
    is_over(&lab).await;
    let homes = [&lab.home, &lab.cloud].map(|host| host.has(&data_volume()).is_some());
    assert_eq!((homes, home_of(&lab).await.as_str()), ([true, false], "home1"));
}

#[tokio::test]
async fn a_home_that_answers_gives_the_volume_up_before_the_replica_is_the_volume() {
    let lab = replicated().await;
    lab.cloud.inside().replicas.gives_none_up = true;
    let problem = promote(&lab, forced()).await.expect_err("it has the volume");
    assert!(problem.why.contains("did not give it up"), "{problem}");
    assert!(lab.home.has(&data_volume()).is_none(), "two homes");
    let cancel = PromoteVolume { cancel: true, ..PromoteVolume::default() };
    wait_for("the answer that there is no way back", async || {
        let refused = promote(&lab, cancel.clone()).await.expect_err("it may have been given up");
        refused.why.contains("given the volume up").then_some(())
    })
    .await;
    lab.cloud.inside().replicas.gives_none_up = false;
    is_over(&lab).await;
    assert!(lab.home.has(&data_volume()).is_some() && lab.cloud.has(&data_volume()).is_none());
    assert_eq!(home_of(&lab).await, "home1");
}

#[tokio::test]
async fn a_forced_promotion_to_a_silent_replica_is_not_done_at_some_later_time() {
    let lab = replicated().await;
    let shown = promote(&lab, PromoteVolume { dry_run: true, ..forced() }).await.expect("shown");
    lab.home.inside().down = true;
    let ask = PromoteVolume { host: Some(shown.to), layer: Some(shown.layer), ..forced() };
    promote(&lab, ask).await.expect_err("the replica's host is away");
    lab.home.inside().down = false;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(lab.cluster.records.keys("promotions/").await.expect("keys").is_empty());
    assert!(lab.cloud.has(&data_volume()).is_some() && lab.home.has(&data_volume()).is_none());
}

#[tokio::test]
async fn a_promotion_whose_point_is_gone_leaves_the_volume_where_it_was() {
    let lab = replicated().await;
    let shown = promote(&lab, PromoteVolume { dry_run: true, ..forced() }).await.expect("shown");
    lab.home.inside().replicas.points = vec![point(3), point(2)];
    let confirmed = PromoteVolume { layer: Some(shown.layer), ..forced() };
    let gone = promote(&lab, confirmed).await.expect_err("another one was confirmed");
    assert_eq!(gone.kind, ProblemKind::NotFound, "{gone}");
    assert!(lab.cloud.has(&data_volume()).is_some());
    promote(&lab, PromoteVolume { layer: Some(point(2).layer), ..forced() }).await.expect("it");
    assert!(lab.home.has(&data_volume()).is_some() && lab.cloud.has(&data_volume()).is_none());
}

#[tokio::test]
async fn no_round_drops_a_point_that_is_becoming_the_volume() {
    let lab = replicated().await;
    lab.home.inside().replicas.promotes_none = true;
    let ask = ReplicateVolume { to: SiteId::new("home").expect("name"), every_s: 60, keep: 1 };
    is_unreachable(&lab, &lab.cloud).await;
    promote(&lab, PromoteVolume::default()).await.expect_err("nobody answers");
    let before = lab.home.inside().replicas.pulls;
    // A round would be due: the newest point is from long ago.
    lab.home.inside().replicas.points = vec![point(5)];
    replicas::replicate(&lab.cluster, &data_volume(), &ask).await.ok();
    replicas::stop(&lab.cluster, &data_volume(), &ask.to).await.expect("wanted");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (pulls, points) = {
        let home = lab.home.inside();
        (home.replicas.pulls, home.replicas.points.len())
    };
    assert_eq!((pulls, points), (before, 1), "rounds, and the points that are left");
}

#[tokio::test]
async fn a_replica_that_is_asked_for_again_when_it_is_dropped_is_there() {
    let lab = replicated().await;
    let ask = ReplicateVolume { to: SiteId::new("home").expect("name"), every_s: 3600, keep: 1 };
    let is_pinned = || !lab.cloud.inside().replicas.pins.is_empty();
    for _ in 0..30 {
        wait_for("a complete round", async || is_pinned().then_some(())).await;
        replicas::stop(&lab.cluster, &data_volume(), &ask.to).await.expect("it is there");
        let dropped = async {
            while is_pinned() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, dropped).await.expect("that it is dropped");
        // Its records are removed at this moment.
        replicas::replicate(&lab.cluster, &data_volume(), &ask).await.expect("it is wanted");
    }
    wait_for("the last round", async || is_pinned().then_some(())).await;
}

#[tokio::test]
async fn a_volume_does_not_follow_its_vm_to_its_replica_unasked() {
    let lab = replicated().await;
    let mut spec = spec(Access::Write);
    spec.start = Start::Host(lab.cloud.id.clone());
    let id = lab.submit(spec).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.cloud, &vm).await;
    let near = vms::check_far(&lab.cluster, &vm, &lab.home.id).await.expect_err("its replica");
    assert_eq!(near.kind, ProblemKind::Conflict, "{near}");
    assert!(near.why.contains("no other site") && near.next.contains("vm move"), "{near}");
}

/// A round of which something is missing is under way. The replica's driver looks at once.
async fn is_filling(lab: &Lab, at_replica: ReplicaPoint) {
    let site = SiteId::new("home").expect("name");
    let pin = ReplicaPin {
        replica: site.clone(),
        layer: at_replica.layer,
        filling: true,
        newer_bytes: 0,
    };
    lab.cloud.inside().replicas.pins.insert(data_volume(), pin);
    lab.home.inside().replicas.points = vec![at_replica];
    let ask = ReplicateVolume { to: site, every_s: 7200, keep: 1 };
    replicas::replicate(&lab.cluster, &data_volume(), &ask).await.expect("it is there");
}

#[tokio::test]
async fn a_round_begins_anew_when_its_home_has_another_address() {
    let lab = replicated().await;
    let before = lab.home.inside().replicas.pulls;
    is_filling(&lab, ReplicaPoint { missing_bytes: 100, ..point(5) }).await;
    wait_for("the round to be seen", async || {
        let shown = replicas::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        (shown.first()?.missing_bytes == Some(100)).then_some(())
    })
    .await;
    assert_eq!(lab.home.inside().replicas.pulls, before, "it goes on");
    let moved = HostAddresses { nbd_addr: "10.9.9.9:10809".into(), ..lab.cloud.addresses.clone() };
    hosts::register(&lab.cluster, &lab.cloud.id, moved).await.expect("register");
    wait_for("the round to begin anew", async || {
        (lab.home.inside().replicas.pulls > before).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_round_whose_copy_is_broken_begins_anew_and_then_says_why_it_waits() {
    let lab = replicated().await;
    let before = lab.home.inside().replicas.pulls;
    let why = "the bytes differ";
    let broken = ReplicaPoint { missing_bytes: 100, problem: why.into(), broken: true, ..point(5) };
    lab.home.inside().replicas.pulls_nothing = true;
    is_filling(&lab, broken).await;
    wait_for("the reason", async || {
        let shown = replicas::of_volume(&lab.cluster, &data_volume()).await.ok()?;
        let problem = &shown.first()?.problem;
        (problem.contains(why) && problem.contains("--stop")).then_some(())
    })
    .await;
    assert_eq!(lab.home.inside().replicas.pulls, before + 1, "not again and again");
}

#[tokio::test]
async fn a_home_of_another_incarnation_gives_the_volume_up_too() {
    let lab = replicated().await;
    // It got the volume by a promotion of which the replica's record knows nothing.
    let other = Tenure::first(Incarnation(9));
    let here = perigee_model::home::Residence::here(other);
    lab.cloud.inside().put_residence(&data_volume(), here);
    is_unreachable(&lab, &lab.cloud).await;
    promote(&lab, PromoteVolume::default()).await.expect("it is lost");
    lab.cloud.inside().down = false;
    wait_for("the old home to give it up", async || {
        lab.cloud.has(&data_volume()).is_none().then_some(())
    })
    .await;
    assert_eq!(lab.cloud.inside().replicas.lost, [other]);
}

#[tokio::test]
async fn a_promotion_is_recorded_only_by_who_carries_it_out() {
    let lab = replicated().await;
    is_unreachable(&lab, &lab.cloud).await;
    {
        // Somebody else is at it, as the task that resumes promotions may be.
        let _step =
            lab.cluster.index.begin_promotion_step(&data_volume()).expect("nobody is at it");
        let refused = promote(&lab, PromoteVolume::default()).await.expect_err("it is taken");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        assert!(lab.cluster.records.keys("promotions/").await.expect("keys").is_empty());
        assert!(!lab.cluster.index.is_promoted(&data_volume()));
    }
    promote(&lab, PromoteVolume::default()).await.expect("it is lost");
}

#[tokio::test]
async fn a_job_is_planned_at_a_replica_and_a_volume_does_not_come_to_its_replica_s_site_unasked() {
    let lab = replicated().await;
    let spec = spec(Access::Read);
    let plan = rentals::plan(&lab.cluster, &spec).await.expect("a plan").plan;
    let replica = plan.options.iter().find(|option| option.way == Way::Replica);
    let replica = replica.expect("home1 has a replica");
    assert_eq!((replica.start.as_str(), replica.end.as_str()), ("home1", "home1"));
    assert!(!plan.options.iter().any(|option| option.way == Way::Remote), "{plan:?}");
    let near = replicas::check_far(&lab.cluster, &data_volume(), &lab.home.id).await;
    let near = near.expect_err("one site would have both");
    assert!(near.kind == ProblemKind::Conflict && near.next.contains("--yes"), "{near}");
    replicas::check_far(&lab.cluster, &data_volume(), &lab.cloud.id).await.expect("its own site");
}

/// The volume is a tenant's.
#[tokio::test]
async fn what_a_lost_home_keeps_is_an_image_of_the_volumes_tenant() {
    let tenants = Tenants::up().await;
    let (lab, ann) = (&tenants.lab, &tenants.ann);
    let mut new = new_volume("data", 1 << 20);
    new.host = Some(lab.cloud.id.clone());
    new.name = VolumeName::new("acme~data").expect("a name");
    let made: ClusterVolume = tenants.admin.post("/v1/volumes", &new).await.expect("a volume");
    let name = made.name;
    let ask = ReplicateVolume { to: SiteId::new("home").expect("name"), every_s: 3600, keep: 1 };
    replicas::replicate(&lab.cluster, &name, &ask).await.expect("a replica");
    wait_for("the first round", async || {
        replicas::of_volume(&lab.cluster, &name).await.ok()?.first()?.behind_bytes
    })
    .await;
    is_unreachable(lab, &lab.cloud).await;
    replicas::promote(&lab.cluster, &name, PromoteVolume::default()).await.expect("it is lost");
    lab.cloud.inside().down = false;
    let kept = |images: Vec<ClusterImage>| {
        let mut kept = images.into_iter().map(|image| image.name);
        kept.find(|name| name.as_str().contains("data-lost-"))
    };
    let image = wait_for("the tenant to see it", async || {
        kept(ann.get("/v1/images").await.expect("images"))
    })
    .await;
    let of_admin = kept(tenants.admin.get("/v1/images").await.expect("images")).expect("it");
    assert_eq!(of_admin.as_str(), format!("acme~{}", image.as_str().trim_start_matches("acme~")));
    assert_eq!(kept(tenants.bob.get("/v1/images").await.expect("images")), None);
    let source = VolumeSource::Image(image.clone());
    let again = NewVolume { source, size_bytes: None, ..new_volume("again", 0) };
    let again: ClusterVolume = ann.post("/v1/volumes", &again).await.expect("a volume of it");
    ann.delete(&format!("/v1/volumes/{}", again.name)).await.expect("deleted");
    let path = format!("/v1/images/{image}");
    tenants.bob.delete(&path).await.expect_err("another tenant's");
    ann.delete(&path).await.expect("its own");
    assert!(!lab.cloud.inside().images.contains_key(&of_admin), "it is gone at its host too");
}
