//! Images: one name, one layer, wherever they are copied to.

use perigee_model::job::{Access, HostState, Job, JobSpec, JobState, NewImage};
use perigee_model::volume::{ImageInfo, ImageSource, Keep};
use perigee_model::{ImageName, LayerId, ProblemKind, SiteId};

use super::fake::{FakeHost, image};
use super::{Lab, spec, vm_of, wait_for, wait_while};
use crate::records::{ImageRecord, PendingImport, image_key};
use crate::storage::images;
use crate::{hosts, jobs};

fn other_layer() -> LayerId {
    LayerId(uuid::Uuid::new_v4())
}

fn name(text: &str) -> ImageName {
    ImageName::new(text).expect("name")
}

fn import(source: &str) -> NewImage {
    let leave_site = Default::default();
    NewImage { name: name("db"), source: source.into(), host: None, leave_site, format: None }
}

#[tokio::test]
async fn two_imports_at_once_never_give_one_name_two_contents() {
    let lab = Lab::up().await;
    let import = |host: &FakeHost| NewImage {
        source: format!("/images/{}.raw", host.id),
        host: Some(host.id.clone()),
        ..import("")
    };
    let (home, cloud) = tokio::join!(
        images::import(&lab.cluster, import(&lab.home)),
        images::import(&lab.cluster, import(&lab.cloud)),
    );
    let refused = match (home, cloud) {
        (Ok(_), Err(refused)) | (Err(refused), Ok(_)) => refused,
        both => panic!("one of them has the name: {both:?}"),
    };
    assert_eq!(refused.kind, ProblemKind::Conflict);
    let layer = |host: &FakeHost| host.inside().images[&name("db")].layer;
    assert_eq!(layer(&lab.home), layer(&lab.cloud));
}

#[tokio::test]
async fn a_new_host_starts_vms_from_a_copy_by_layer_before_it_is_complete() {
    let lab = Lab::up().await;
    lab.home.inside().images.clear();
    let layer = other_layer();
    let info = ImageInfo { layer, ..image() };
    lab.cloud.inside().images.insert(info.name.clone(), info);
    let id = lab.submit(spec(Access::Clone)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let copied = lab.home.inside().copied.clone();
    assert_eq!(copied.len(), 1, "{copied:?}");
    assert_eq!((copied[0].layer, copied[0].keep), (Some(layer), Keep::All));
    assert_eq!(copied[0].nbd_addr, lab.cloud.addresses.nbd_addr);
    let image = images::image(&lab.cluster, &name("debian")).await.expect("image");
    assert_eq!((image.hosts.len(), image.missing_bytes), (2, 1000));
}

#[tokio::test]
async fn a_job_at_a_host_with_another_image_of_the_name_waits_until_that_is_deleted() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&id, JobState::Cancelled).await;
    // The name is known by now. Somebody makes another image of it at the host.
    lab.home.inside().images.get_mut(&name("debian")).expect("image").layer = other_layer();
    let id = lab.submit(spec(Access::Clone)).await;
    let job = lab
        .wait_for_job(&id, "waiting or ended", |job| {
            job.state.is_final() || job.reason.contains("a different image with this name")
        })
        .await;
    assert_eq!(job.state, JobState::Staging, "{}", job.reason);
    let image = images::image(&lab.cluster, &name("debian")).await.expect("image");
    assert_eq!(image.hosts, std::slice::from_ref(&lab.cloud.id));
    lab.home.inside().images.remove(&name("debian"));
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

#[tokio::test]
async fn a_job_whose_image_all_hosts_have_lost_ends_and_says_so() {
    let lab = Lab::up().await;
    images::layer_of(&lab.cluster, &name("debian")).await.expect("home1 has it");
    lab.home.inside().images.clear();
    lab.cloud.inside().images.clear();
    let id = lab.submit(spec(Access::Clone)).await;
    let job = lab.wait_for_job(&id, "ended", |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.contains("no host that is up has an image"), "{}", job.reason);
}

#[tokio::test]
async fn a_job_whose_copy_is_deleted_before_its_disk_is_made_gets_another_one() {
    let lab = Lab::up().await;
    lab.home.inside().image_vanishes = true;
    let id = lab.submit(spec(Access::Clone)).await;
    let is_over = |job: &Job| job.state.is_final() || job.started_ms.is_some();
    let job = lab.wait_for_job(&id, "started or ended", is_over).await;
    assert!(!job.state.is_final(), "{}", job.reason);
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    assert_eq!(lab.home.inside().copied.len(), 1);
}

#[tokio::test]
async fn a_deleted_images_name_can_be_taken_again() {
    let lab = Lab::up().await;
    let host = Some(lab.home.id.clone());
    let new = |source: &str| NewImage { host: host.clone(), ..import(source) };
    images::import(&lab.cluster, new("/a")).await.expect("import");
    images::delete(&lab.cluster, &name("db")).await.expect("delete");
    images::import(&lab.cluster, new("/b")).await.expect("import again");
}

async fn wait_until_unreachable(lab: &Lab, host: &FakeHost) {
    wait_for("the host to be unreachable", async || {
        let host = hosts::info(&lab.cluster, &host.id).await.expect("host");
        (host.state == HostState::Unreachable).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_job_waits_for_the_silent_host_that_has_its_image() {
    let lab = Lab::up().await;
    lab.home.inside().images.clear();
    images::layer_of(&lab.cluster, &name("debian")).await.expect("cloud1 has it");
    lab.cloud.inside().down = true;
    wait_until_unreachable(&lab, &lab.cloud).await;
    let mut alone = spec(Access::Clone);
    alone.volumes.clear();
    let id = lab.submit(alone).await;
    let job = lab
        .wait_for_job(&id, "waiting or ended", |job| {
            job.state.is_final() || job.reason.contains("cloud1")
        })
        .await;
    assert_eq!(job.state, JobState::Staging, "{}", job.reason);
    lab.cloud.inside().down = false;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

#[tokio::test]
async fn a_job_waits_for_the_image_that_is_being_imported() {
    let lab = Lab::up().await;
    let importing = lab.cluster.index.begin_import(&name("db")).expect("nobody imports it");
    let (host, source) = (lab.home.id.clone(), "/a".into());
    let import = PendingImport { host, source, format: None, backup: None };
    let record = ImageRecord {
        layer: Some(other_layer()),
        import: Some(import),
        ..ImageRecord::new(name("db"))
    };
    lab.cluster.records.put(&image_key(&name("db")), &record).await.expect("put");
    let id = lab.submit(JobSpec { image: name("db"), ..spec(Access::Clone) }).await;
    let job = lab
        .wait_for_job(&id, "waiting or ended", |job| {
            job.state.is_final() || job.reason.contains("is being imported at home1")
        })
        .await;
    assert_eq!(job.state, JobState::Staging, "{}", job.reason);
    drop(importing);
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

#[tokio::test]
async fn an_image_is_deleted_only_when_every_host_answers() {
    let lab = Lab::up().await;
    let new = import("/a");
    let new = NewImage { host: Some(lab.home.id.clone()), ..new };
    images::import(&lab.cluster, new).await.expect("import");
    lab.cloud.inside().down = true;
    wait_until_unreachable(&lab, &lab.cloud).await;
    let refused = images::delete(&lab.cluster, &name("db")).await.expect_err("cloud1 is silent");
    assert_eq!(refused.kind, ProblemKind::Unavailable);
    assert!(refused.why.contains("cloud1"), "{refused}");
    assert!(lab.home.inside().images.contains_key(&name("db")), "no copy is gone");
    lab.cloud.inside().down = false;
    wait_for("the image to be deleted", async || {
        images::delete(&lab.cluster, &name("db")).await.ok()
    })
    .await;
    assert!(!lab.cloud.inside().images.contains_key(&name("db")));
}

#[tokio::test]
async fn an_import_whose_answer_is_lost_is_done_all_the_same() {
    let mut lab = Lab::up().await;
    lab.home.inside().loses_answers = true;
    let new = NewImage { host: Some(lab.home.id.clone()), ..import("/a") };
    let lost = images::import(&lab.cluster, new).await.expect_err("no answer");
    assert_eq!(lost.kind, ProblemKind::Unavailable);
    lab.supervisor.stop().await;
    lab.home.inside().loses_answers = false;
    lab.home.inside().images.remove(&name("db"));
    lab.start_controller(super::TIMING).await;
    // Whether it was made or not, it is asked for again.
    wait_for("the image", async || {
        images::image(&lab.cluster, &name("db")).await.ok().filter(|i| i.hosts.len() == 2)
    })
    .await;
}

#[tokio::test]
async fn an_import_that_cannot_be_done_any_more_frees_its_name() {
    let lab = Lab::up().await;
    lab.home.inside().loses_answers = true;
    let host = Some(lab.home.id.clone());
    let new = |source: &str| NewImage { host: host.clone(), ..import(source) };
    images::import(&lab.cluster, new("/a")).await.expect_err("no answer");
    {
        let mut inside = lab.home.inside();
        inside.images.remove(&name("db"));
        (inside.loses_answers, inside.refuses_imports) = (false, true);
    }
    wait_for("the name to be free", async || {
        let key = image_key(&name("db"));
        let record = lab.cluster.records.read::<ImageRecord>(&key);
        record.await.expect("read").is_none().then_some(())
    })
    .await;
    lab.home.inside().refuses_imports = false;
    wait_for("the name to be taken again", async || {
        images::import(&lab.cluster, new("/b")).await.ok()
    })
    .await;
}

#[tokio::test]
async fn deleting_an_image_that_is_being_imported_ends_its_import() {
    let lab = Lab::up().await;
    lab.home.inside().imports_hang = true;
    let host = Some(lab.home.id.clone());
    let new = |source: &str| NewImage { host: host.clone(), ..import(source) };
    let (cluster, first) = (std::sync::Arc::clone(&lab.cluster), new("nbd://nobody"));
    let mut import = tokio::spawn(async move { images::import(&cluster, first).await });
    let key = image_key(&name("db"));
    wait_while(&mut import, "the name to be taken", async || {
        lab.cluster.records.read::<ImageRecord>(&key).await.expect("read")
    })
    .await;
    images::delete(&lab.cluster, &name("db")).await.expect("delete");
    let ended = import.await.expect("no panic").expect_err("it was deleted");
    assert!(ended.why.contains("was deleted"), "{ended}");
    lab.home.inside().imports_hang = false;
    images::import(&lab.cluster, new("/b")).await.expect("the name is free");
}

#[tokio::test]
async fn an_import_whose_source_is_silent_is_not_tried_for_ever() {
    let lab = Lab::up().await;
    lab.home.inside().has_silent_sources = true;
    let host = Some(lab.home.id.clone());
    let new = |source: &str| NewImage { host: host.clone(), ..import(source) };
    let failed = images::import(&lab.cluster, new("nbd://nobody")).await.expect_err("no source");
    assert_eq!(failed.why, "its source is silent");
    let key = image_key(&name("db"));
    let record = lab.cluster.records.read::<ImageRecord>(&key).await.expect("read");
    assert!(record.is_none(), "nobody tries it again");
    assert_eq!(lab.home.inside().imports, 1);
    lab.home.inside().has_silent_sources = false;
    images::import(&lab.cluster, new("/b")).await.expect("the name is free");
}

/// Makes the image a copy at `home1` that lacks blocks, which it reads from `cloud1`. A third host has all of it.
async fn copied_from_cloud(lab: &Lab) -> FakeHost {
    let third = FakeHost::start("home2", "home").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let nbd_addr = lab.cloud.addresses.nbd_addr.clone();
    let (export, keep) = (images::by_layer(image().layer), Keep::All);
    let remote = Some(ImageSource {
        nbd_addr,
        export,
        keep,
        missing_bytes: 1000,
        failed: None,
        refused: false,
        unclear: false,
    });
    lab.home.inside().images.insert(name("debian"), ImageInfo { remote, ..image() });
    third
}

async fn wait_for_source(lab: &Lab, host: &FakeHost) {
    wait_for("another source", async || {
        let remote = lab.home.inside().images[&name("debian")].remote.clone()?;
        (remote.nbd_addr == host.addresses.nbd_addr).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_copy_whose_source_host_is_silent_goes_on_from_another_host() {
    let lab = Lab::up().await;
    let third = copied_from_cloud(&lab).await;
    lab.cloud.inside().down = true;
    wait_for_source(&lab, &third).await;
    assert_eq!(lab.home.inside().copied.last().and_then(|ask| ask.layer), Some(image().layer));
}

#[tokio::test]
async fn a_copy_whose_source_host_was_removed_goes_on_from_another_host() {
    let lab = Lab::up().await;
    let third = copied_from_cloud(&lab).await;
    lab.cloud.inside().down = true;
    third.inside().down = true;
    wait_until_unreachable(&lab, &lab.cloud).await;
    hosts::remove(&lab.cluster, &lab.cloud.id, true).await.expect("remove");
    assert_eq!(lab.home.inside().copied.len(), 0, "nobody has all of it");
    third.inside().down = false;
    wait_for_source(&lab, &third).await;
}

#[tokio::test]
async fn a_copy_whose_source_has_the_image_no_more_goes_on_from_another_host() {
    let lab = Lab::up().await;
    let third = copied_from_cloud(&lab).await;
    lab.cloud.inside().images.clear();
    wait_for_source(&lab, &third).await;
}

#[tokio::test]
async fn a_copy_goes_on_from_the_next_host_where_the_first_one_is_refused() {
    let lab = Lab::up().await;
    let third = copied_from_cloud(&lab).await;
    lab.home.inside().refuses_source = Some(third.addresses.nbd_addr.clone());
    let fourth = FakeHost::start("home3", "home").await;
    hosts::register(&lab.cluster, &fourth.id, fourth.addresses.clone()).await.expect("register");
    lab.cloud.inside().down = true;
    wait_for_source(&lab, &fourth).await;
}

#[tokio::test]
async fn a_copy_that_reads_from_itself_goes_on_from_another_host() {
    let lab = Lab::up().await;
    let third = copied_from_cloud(&lab).await;
    let mut itself = lab.home.inside().images[&name("debian")].clone();
    let own = lab.home.addresses.nbd_addr.clone();
    itself.remote.as_mut().expect("it lacks blocks").nbd_addr = own;
    lab.home.inside().images.insert(name("debian"), itself);
    lab.cloud.inside().images.clear();
    wait_for_source(&lab, &third).await;
}

#[tokio::test]
async fn a_copy_does_not_go_on_from_a_copy_that_lacks_blocks_or_is_another_layer() {
    let lab = Lab::up().await;
    let third = copied_from_cloud(&lab).await;
    let partial = lab.home.inside().images[&name("debian")].clone();
    third.inside().images.insert(name("debian"), partial);
    let fourth = FakeHost::start("home3", "home").await;
    let other = ImageInfo { layer: other_layer(), ..image() };
    fourth.inside().images.insert(name("debian"), other);
    hosts::register(&lab.cluster, &fourth.id, fourth.addresses.clone()).await.expect("register");
    lab.cloud.inside().down = true;
    wait_until_unreachable(&lab, &lab.cloud).await;
    let looks = || lab.home.inside().lists_of_images;
    let before = looks();
    wait_for("two looks at the copies", async || (looks() > before + 1).then_some(())).await;
    for host in [&lab.home, &third] {
        assert_eq!(host.inside().copied.len(), 0);
    }
}

#[tokio::test]
async fn an_image_is_copied_to_the_hosts_of_a_site() {
    let lab = Lab::up().await;
    lab.home.inside().images.clear();
    lab.cloud.inside().images.insert(image().name, image());
    let site = lab.home.addresses.site.clone();
    for _ in 0..2 {
        let copied = images::replicate(&lab.cluster, &image().name, &site).await.expect("copies");
        assert_eq!(copied.hosts.len(), 2, "{copied:?}");
        assert_eq!(lab.home.inside().copied.len(), 1);
    }
    let nowhere = SiteId::new("nowhere").expect("a name");
    let refused = images::replicate(&lab.cluster, &image().name, &nowhere).await;
    assert_eq!(refused.expect_err("no such site").kind, ProblemKind::Unavailable);
}
