//! Which hosts the homes let open their volumes. What a real home does about it is tested with real volume servers.

use std::collections::BTreeSet;
use std::time::Duration;

use perigee_model::job::{Access, JobState, MigrationState, NewVolume};
use perigee_model::volume::VolumeSource;
use perigee_model::{HostId, VolumeName};

use super::fake::FakeHost;
use super::migrations::{copying_of, switch};
use super::{Lab, data_volume, finish, running, spec, wait_for};
use crate::cluster::Detachment;
use crate::storage::volumes;

fn host(name: &str) -> HostId {
    HostId::new(name).expect("name")
}

fn let_in(home: &FakeHost, volume: &VolumeName) -> BTreeSet<HostId> {
    home.inside().admissions.get(volume).cloned().unwrap_or_default()
}

async fn wait_until_let_in(home: &FakeHost, volume: &VolumeName, hosts: &[&str]) {
    let wanted: BTreeSet<HostId> = hosts.iter().map(|name| host(name)).collect();
    wait_for(&format!("{} to let in {hosts:?}", home.id), async || {
        (let_in(home, volume) == wanted).then_some(())
    })
    .await;
}

#[tokio::test]
async fn both_hosts_of_a_migration_are_let_in_and_the_one_that_it_left_is_let_out() {
    let (lab, id, vm) = copying_of(spec(Access::Write)).await;
    let output = VolumeName::new(format!("{vm}-out")).expect("name");
    // `home1` is the home of the job's own volumes, and `cloud1` that of the data.
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
    wait_until_let_in(&lab.home, &output, &["cloud1"]).await;
    switch(&lab, &vm);
    let job = lab.wait_for_job(&id, "at cloud1", |job| job.host == Some(host("cloud1"))).await;
    assert_eq!(job.migrations[0].state, MigrationState::Completed);
    wait_until_let_in(&lab.cloud, &data_volume(), &[]).await;
    wait_until_let_in(&lab.home, &output, &["cloud1"]).await;
}

#[tokio::test]
async fn a_home_that_was_restored_is_told_again_while_the_controller_runs() {
    let lab = Lab::up().await;
    let (_id, _vm) = running(&lab).await;
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
    lab.cloud.inside().admissions.clear();
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
}

#[tokio::test]
async fn a_host_that_needs_a_volume_no_more_is_let_out_and_one_that_has_it_attached_is_not() {
    let lab = Lab::up().await;
    let (_id, _vm) = running(&lab).await;
    let (other, gone) = (VolumeName::new("other").expect("name"), host("gone1"));
    {
        let mut cloud = lab.cloud.inside();
        let all = [gone.clone(), lab.home.id.clone()];
        cloud.admissions.insert(other.clone(), all.clone().into());
        cloud.admissions.entry(data_volume()).or_default().extend(all);
    }
    // Somebody at the host uses it without a VM.
    lab.home.inside().attachments.insert(other.clone(), "there:1".to_owned());
    wait_until_let_in(&lab.cloud, &other, &["home1"]).await;
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
    let told = lab.cloud.inside().told_of_admissions;
    wait_for("two more rounds", async || {
        (lab.cloud.inside().told_of_admissions > told + 1).then_some(())
    })
    .await;
    wait_until_let_in(&lab.cloud, &other, &["home1"]).await;
    lab.home.inside().attachments.remove(&other);
    wait_until_let_in(&lab.cloud, &other, &[]).await;
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
}

/// The controller has no record of an attachment without a VM, but for what the home has said before.
#[tokio::test]
async fn a_home_that_was_restored_lets_in_again_who_has_a_volume_attached_without_a_vm() {
    let lab = Lab::up().await;
    let (other, gone) =
        (VolumeName::new("other").expect("name"), VolumeName::new("gone").expect("name"));
    let home1: BTreeSet<HostId> = [lab.home.id.clone()].into();
    for volume in [&other, &gone] {
        lab.cloud.inside().admissions.insert(volume.clone(), home1.clone());
        let at = lab.cloud.addresses.nbd_addr.clone();
        lab.home.inside().attachments.insert(volume.clone(), at);
    }
    let key = crate::admissions::let_in_key(&lab.cloud.id);
    wait_for("the controller to know them", async || {
        let known: Option<serde_json::Value> = lab.cluster.records.read(&key).await.expect("read");
        (known?["hosts"].as_array()?.len() == 2).then_some(())
    })
    .await;
    lab.home.inside().attachments.remove(&gone);
    // From a backup that was made before.
    lab.cloud.inside().admissions.clear();
    wait_until_let_in(&lab.cloud, &other, &["home1"]).await;
    let told = lab.cloud.inside().told_of_admissions;
    wait_for("two more rounds", async || {
        (lab.cloud.inside().told_of_admissions > told + 1).then_some(())
    })
    .await;
    assert!(let_in(&lab.cloud, &gone).is_empty(), "nobody has it attached");
    wait_until_let_in(&lab.cloud, &other, &["home1"]).await;
}

/// A volume at `home1` of this export of `cloud1`.
async fn make_of(lab: &Lab, export: &str) -> VolumeName {
    let name = VolumeName::new("reader").expect("name");
    let (nbd_addr, export) = (lab.cloud.addresses.nbd_addr.clone(), export.to_owned());
    let new = NewVolume {
        name: name.clone(),
        host: Some(lab.home.id.clone()),
        size_bytes: None,
        source: VolumeSource::Remote { nbd_addr, export },
        leave_site: Default::default(),
    };
    volumes::create(&lab.cluster, new).await.expect("a volume");
    name
}

#[tokio::test]
async fn the_end_of_a_vm_does_not_let_out_a_host_whose_volume_reads_the_same_one() {
    let lab = Lab::up().await;
    make_of(&lab, &format!("{}@1", data_volume())).await;
    let (id, vm) = running(&lab).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    wait_for("the attachment to be removed", async || {
        lab.home.inside().attachments.is_empty().then_some(())
    })
    .await;
    let told = lab.cloud.inside().told_of_admissions;
    wait_for("three more rounds", async || {
        assert_eq!(let_in(&lab.cloud, &data_volume()), [host("home1")].into());
        (lab.cloud.inside().told_of_admissions > told + 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volume_made_of_another_one_reads_it_until_it_is_deleted() {
    let mut lab = Lab::up().await;
    let name = make_of(&lab, &format!("{}@1", data_volume())).await;
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
    lab.restart_controller().await;
    lab.cloud.inside().admissions.clear();
    wait_until_let_in(&lab.cloud, &data_volume(), &["home1"]).await;
    volumes::delete(&lab.cluster, &name).await.expect("deleted");
    wait_until_let_in(&lab.cloud, &data_volume(), &[]).await;
    assert!(lab.cluster.records.keys("volume_readers/").await.expect("keys").is_empty());
}

/// Its answer would be waited for before every other home is told.
#[tokio::test]
async fn a_host_that_is_away_is_not_asked_what_it_needs() {
    let lab = Lab::up().await;
    lab.cloud.inside().admissions.insert(data_volume(), [lab.home.id.clone()].into());
    lab.home.inside().down = true;
    wait_for("three rounds", async || (lab.cloud.inside().told_of_admissions > 3).then_some(()))
        .await;
    assert_eq!(let_in(&lab.cloud, &data_volume()), [host("home1")].into(), "it is not known");
    lab.home.inside().down = false;
    wait_until_let_in(&lab.cloud, &data_volume(), &[]).await;
}

/// Else any host could let itself in.
#[tokio::test]
async fn a_home_is_told_nothing_of_what_hosts_say_they_use() {
    let lab = Lab::up().await;
    let there = lab.cloud.addresses.nbd_addr.clone();
    lab.home.inside().attachments.insert(data_volume(), there);
    let told = lab.cloud.inside().told_of_admissions;
    wait_for("two more rounds", async || {
        (lab.cloud.inside().told_of_admissions > told + 1).then_some(())
    })
    .await;
    assert!(let_in(&lab.cloud, &data_volume()).is_empty());
}

#[tokio::test]
async fn a_home_that_never_answers_keeps_no_other_one_waiting() {
    let lab = Lab::up().await;
    lab.home.inside().admissions_hang = true;
    let told = lab.cloud.inside().told_of_admissions;
    wait_for("two more rounds", async || {
        (lab.cloud.inside().told_of_admissions > told + 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_record_of_a_reader_that_can_t_be_read_keeps_no_home_from_being_told() {
    let lab = Lab::up().await;
    let key = format!("volume_readers/{}/home1/reader", data_volume());
    lab.cluster.records.put(&key, &"no reader".to_owned()).await.expect("a record");
    lab.cloud.inside().admissions.insert(data_volume(), [host("home1")].into());
    let told = lab.cloud.inside().told_of_admissions;
    wait_for("three more rounds", async || {
        (lab.cloud.inside().told_of_admissions > told + 2).then_some(())
    })
    .await;
    assert_eq!(let_in(&lab.cloud, &data_volume()), [host("home1")].into(), "it is not known");
}

#[tokio::test]
async fn a_reader_is_let_in_after_whoever_lets_its_host_out_at_this_moment() {
    let lab = Lab::up().await;
    let export = format!("{}@1", data_volume());
    let Detachment::Held(hold) = lab.cluster.index.begin_detachment(&lab.home.id, &data_volume())
    else {
        panic!("nobody needs it");
    };
    let out = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        lab.cloud.inside().admissions.clear();
        drop(hold);
    };
    tokio::join!(make_of(&lab, &export), out);
    assert_eq!(let_in(&lab.cloud, &data_volume()), [host("home1")].into());
}
