//! What images show: hosts that copy them are told, and copies of something else are not used.

use perigee_model::job::{Access, JobSpec, JobState, Start};
use perigee_model::volume::{ContentDigest, ImageInfo, ImageSource, Keep};
use perigee_model::{ImageName, LayerId, Problem, ProblemKind};

use super::fake::{FakeHost, image};
use super::{Lab, spec, vm_of, wait_for};
use crate::hosts;
use crate::records::{ImageRecord, RefusedSource, image_key};
use crate::storage::images;
use crate::storage::images::contents;

const CONTENT: ContentDigest = ContentDigest([7; 32]);
const OTHER: ContentDigest = ContentDigest([8; 32]);

fn debian() -> ImageName {
    ImageName::new("debian").expect("name")
}

/// A lab whose image `home1` has made, and a third host that has all of it too.
async fn lab() -> (Lab, FakeHost) {
    let lab = Lab::up().await;
    let third = FakeHost::start("home2", "home").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let record = ImageRecord {
        layer: Some(image().layer),
        made_at: Some(lab.home.id.clone()),
        ..ImageRecord::new(debian())
    };
    lab.cluster.records.put(&image_key(&debian()), &record).await.expect("put");
    for host in [&lab.home, &third] {
        show(host, Some(CONTENT));
    }
    lab.cloud.inside().images.clear();
    (lab, third)
}

fn show(host: &FakeHost, content: Option<ContentDigest>) {
    host.inside().images.insert(debian(), ImageInfo { content, ..image() });
}

/// A copy at this host that lacks blocks, which it gets from that one.
fn lacks(host: &FakeHost, from: &FakeHost, content: Option<ContentDigest>, refused: bool) {
    let (export, keep) = (images::by_layer(image().layer), Keep::All);
    let nbd_addr = from.addresses.nbd_addr.clone();
    let remote = Some(ImageSource {
        nbd_addr,
        export,
        keep,
        missing_bytes: 1000,
        failed: None,
        refused,
        unclear: false,
    });
    host.inside().images.insert(debian(), ImageInfo { remote, content, ..image() });
}

async fn record(lab: &Lab) -> ImageRecord {
    let record = lab.cluster.records.read(&image_key(&debian())).await.expect("read");
    record.expect("the image is known")
}

async fn ensure(lab: &Lab, host: &FakeHost) -> Result<ImageInfo, Problem> {
    let at = lab.cluster.hosts.get(&host.id).expect("it has joined");
    Ok(images::ensure(&lab.cluster, &at, &debian()).await?)
}

async fn wait_until_known(lab: &Lab) {
    wait_for("the content", async || (record(lab).await.content == Some(CONTENT)).then_some(()))
        .await;
}

#[tokio::test]
async fn a_host_that_copies_an_image_is_told_what_it_has_to_show() {
    let (lab, _third) = lab().await;
    ensure(&lab, &lab.cloud).await.expect("a copy");
    assert_eq!(lab.cloud.inside().copied.last().expect("it was asked").content, Some(CONTENT));
    assert_eq!(record(&lab).await.content, Some(CONTENT));
}

#[tokio::test]
async fn a_host_whose_copy_lacks_blocks_is_told_when_the_content_becomes_known() {
    let (lab, _third) = lab().await;
    lacks(&lab.cloud, &lab.home, None, false);
    wait_for("the host to be told", async || {
        let told = lab.cloud.inside().images.get(&debian())?.content;
        (told == Some(CONTENT)).then_some(())
    })
    .await;
    let from = lab.cloud.inside().copied.last().expect("it was asked").nbd_addr.clone();
    assert_eq!(from, lab.home.addresses.nbd_addr, "from the source that it has");
}

/// Until now, the first host that failed kept all others from being told.
#[tokio::test]
async fn a_host_that_fails_or_does_not_answer_keeps_no_other_one_from_being_told() {
    for hangs in [false, true] {
        let (lab, third) = lab().await;
        wait_until_known(&lab).await;
        {
            let mut cloud = lab.cloud.inside();
            cloud.copies_hang = hangs;
            cloud.refuses_source = Some(lab.home.addresses.nbd_addr.clone());
        }
        lacks(&lab.cloud, &lab.home, None, false);
        lacks(&third, &lab.home, None, false);
        wait_for("the other host to be told", async || {
            let told = third.inside().images.get(&debian())?.content;
            (told == Some(CONTENT)).then_some(())
        })
        .await;
        lab.cloud.inside().copies_hang = false;
    }
}

/// Until now, it was told again in each round.
#[tokio::test]
async fn what_came_with_a_volume_is_not_told_what_an_image_has_to_show() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    lacks(&lab.cloud, &lab.home, None, false);
    let own = |remote: &mut ImageSource| remote.export += "@own";
    lab.cloud.inside().images.get_mut(&debian()).and_then(|i| i.remote.as_mut()).map(own);
    for _ in 0..3 {
        lacks(&third, &lab.home, None, false);
        wait_for("the other host to be told", async || {
            let told = third.inside().images.get(&debian())?.content;
            (told == Some(CONTENT)).then_some(())
        })
        .await;
    }
    assert!(lab.cloud.inside().copied.is_empty());
}

/// It may be the disk of either host, or a host that was the source before.
#[tokio::test]
async fn a_copy_of_which_nobody_knows_who_spoiled_it_gets_another_source_and_nobody_is_accused() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    lab.cloud.inside().image_children = 1;
    lacks(&lab.cloud, &lab.home, Some(CONTENT), false);
    if let Some(remote) =
        lab.cloud.inside().images.get_mut(&debian()).and_then(|info| info.remote.as_mut())
    {
        remote.unclear = true;
    }
    wait_for("another source", async || {
        let remote = lab.cloud.inside().images.get(&debian())?.remote.clone()?;
        (remote.nbd_addr == third.addresses.nbd_addr && !remote.unclear).then_some(())
    })
    .await;
    assert_eq!(record(&lab).await.refused, []);
    let log = lab.cluster.audit.read(&Default::default(), 0).expect("the audit log");
    assert!(!log.iter().any(|entry| entry.request.starts_with("REFUSE")), "{log:?}");
}

#[tokio::test]
async fn a_copy_that_its_host_has_refused_is_deleted_and_made_from_another_host() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    lacks(&lab.cloud, &lab.home, Some(CONTENT), true);
    wait_for("the copy to be deleted", async || {
        (!lab.cloud.inside().images.contains_key(&debian())).then_some(())
    })
    .await;
    let pair = RefusedSource { at: lab.cloud.id.clone(), from: lab.home.id.clone() };
    assert_eq!(record(&lab).await.refused, [pair]);
    let log = lab.cluster.audit.read(&Default::default(), 0).expect("the audit log");
    let entry = log.iter().find(|entry| entry.request.starts_with("REFUSE")).expect("an entry");
    assert!(entry.who == "host cloud1" && entry.request.ends_with("host home1"), "{entry:?}");
    ensure(&lab, &lab.cloud).await.expect("another host has it");
    let from = lab.cloud.inside().copied.last().expect("it was asked").nbd_addr.clone();
    assert_eq!(from, third.addresses.nbd_addr, "also if another host has made it");
    // Who says this can keep only himself from copying.
    show(&third, None);
    third.inside().images.clear();
    ensure(&lab, &third).await.expect("from the host that has made it");
    assert_eq!(third.inside().copied.last().expect("asked").nbd_addr, lab.home.addresses.nbd_addr);
}

#[tokio::test]
async fn a_refused_copy_that_a_volume_stands_on_gets_another_source() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    lab.cloud.inside().image_children = 1;
    lacks(&lab.cloud, &lab.home, Some(CONTENT), true);
    wait_for("another source", async || {
        let remote = lab.cloud.inside().images.get(&debian())?.remote.clone()?;
        (remote.nbd_addr == third.addresses.nbd_addr && !remote.refused).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_complete_copy_that_shows_something_else_is_deleted_and_never_counts() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    // A volume keeps it there for now.
    third.inside().image_children = 1;
    show(&third, Some(OTHER));
    let image = images::image(&lab.cluster, &debian()).await.expect("the image");
    assert_eq!(image.hosts, std::slice::from_ref(&lab.home.id));
    let refused = ensure(&lab, &third).await.expect_err("nothing is made of it");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    third.inside().image_children = 0;
    wait_for("it to be deleted", async || {
        (!third.inside().images.contains_key(&debian())).then_some(())
    })
    .await;
    // The host that has made the image keeps what it has, whatever that shows now.
    show(&lab.home, Some(OTHER));
    let refused = ensure(&lab, &lab.home).await.expect_err("it is not what it was");
    assert!(refused.why.contains("has made the image"), "{refused}");
    assert!(lab.home.inside().images.contains_key(&debian()));
}

#[tokio::test]
async fn an_image_that_only_a_deceiving_host_has_is_refused_with_its_name() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    third.inside().images.clear();
    lacks(&lab.cloud, &lab.home, Some(CONTENT), true);
    let refused = ensure(&lab, &lab.cloud).await.expect_err("nobody else has it");
    assert!(refused.why.contains("what host home1 gave to cloud1"), "{refused}");
}

/// Until now, such a job has failed, because of what another host did.
#[tokio::test]
async fn a_job_at_a_host_that_nobody_gives_its_image_waits_and_says_why() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    third.inside().images.clear();
    lacks(&lab.cloud, &lab.home, Some(CONTENT), true);
    let start = Start::Host(lab.cloud.id.clone());
    let id = lab.submit(JobSpec { start, ..spec(Access::Clone) }).await;
    let job = lab
        .wait_for_job(&id, "waiting or ended", |job| {
            job.state.is_final() || job.reason.contains("what host home1 gave to cloud1")
        })
        .await;
    assert_eq!(job.state, JobState::Staging, "{}", job.reason);
    show(&third, Some(CONTENT));
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
}

/// Until now, what a host that answers had deceived about was taken for all that there is.
#[tokio::test]
async fn a_host_that_one_host_has_deceived_waits_for_the_silent_one_that_has_the_image() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    lacks(&lab.cloud, &third, Some(CONTENT), true);
    wait_for("the deceit to be noted", async || {
        (!record(&lab).await.refused.is_empty()).then_some(())
    })
    .await;
    lab.home.inside().down = true;
    let refused = ensure(&lab, &lab.cloud).await.expect_err("home1 has it");
    assert_eq!(refused.kind, ProblemKind::Unavailable, "{refused}");
    assert!(refused.why.contains("host home1 does not answer"), "{refused}");
}

#[tokio::test]
async fn the_silence_of_a_host_that_has_deceived_this_one_is_not_waited_for() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    lab.home.inside().images.clear();
    lacks(&lab.cloud, &third, Some(CONTENT), true);
    wait_for("the deceit to be noted", async || {
        (!record(&lab).await.refused.is_empty()).then_some(())
    })
    .await;
    third.inside().down = true;
    let refused = ensure(&lab, &lab.cloud).await.expect_err("nobody else has it");
    assert_eq!(refused.kind, ProblemKind::NotFound, "{refused}");
}

#[tokio::test]
async fn a_copy_that_another_job_has_made_anew_meanwhile_is_not_deleted() {
    let (lab, third) = lab().await;
    wait_until_known(&lab).await;
    let seen = ImageInfo { content: Some(OTHER), ..image() };
    lacks(&lab.cloud, &third, Some(CONTENT), false);
    let at = lab.cluster.hosts.get(&lab.cloud.id).expect("it has joined");
    contents::drop_bad(&lab.cluster, &at, &record(&lab).await, &seen).await.expect("looked at");
    assert!(lab.cloud.inside().images.contains_key(&debian()));
}

#[tokio::test]
async fn what_an_image_shows_is_not_kept_with_another_one_that_has_its_name_now() {
    let lab = Lab::up().await;
    let name = ImageName::new("db").expect("a name");
    let (old, new) = (LayerId(uuid::Uuid::new_v4()), LayerId(uuid::Uuid::new_v4()));
    let key = image_key(&name);
    let known = async || lab.cluster.records.read::<ImageRecord>(&key).await.expect("read");
    let gone = contents::keep(&lab.cluster, &name, old, CONTENT).await.expect_err("it was deleted");
    assert_eq!(gone.kind, ProblemKind::NotFound);
    assert!(known().await.is_none(), "its name stays free");
    let again = ImageRecord { layer: Some(new), ..ImageRecord::new(name.clone()) };
    lab.cluster.records.put(&key, &again).await.expect("put");
    contents::keep(&lab.cluster, &name, old, CONTENT).await.expect_err("that is another image");
    assert_eq!(known().await.expect("the new one").content, None);
    let kept = contents::keep(&lab.cluster, &name, new, CONTENT).await.expect("its own");
    assert_eq!(kept.content, Some(CONTENT));
}
