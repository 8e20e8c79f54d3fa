//! Which other hosts may open a volume.

use std::collections::BTreeMap;

use perigee_model::limits::ADMITTED_HOSTS;
use perigee_model::{HostId, ProblemKind};

use super::*;

fn host(number: usize) -> HostId {
    HostId::new(format!("host{number}")).unwrap()
}

#[tokio::test]
async fn the_next_volume_of_a_name_is_nobody_s_to_open() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_sim(dir.path(), &Arc::default(), 1);
    let name = volume_name("v");
    let make = async || pool.create_volume(create("v", Some(4096), VolumeSource::Empty)).await;
    make().await.unwrap();
    pool.admit(&name, vec![host(1)]).await.unwrap();
    assert!(pool.may_open(&name, &host(1)).await.unwrap());
    pool.delete_volume(&name).await.unwrap();
    assert!(!pool.may_open(&name, &host(1)).await.unwrap());
    // As if it had departed, or the order had come late.
    pool.admit(&name, vec![host(1)]).await.unwrap();
    make().await.unwrap();
    assert!(!pool.may_open(&name, &host(1)).await.unwrap(), "it is another volume");
}

#[tokio::test]
async fn a_list_that_is_full_takes_again_who_is_on_it_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_sim(dir.path(), &Arc::default(), 1);
    let name = volume_name("v");
    let max = usize::try_from(ADMITTED_HOSTS.max).unwrap();
    pool.admit(&name, (0..max).map(host).collect()).await.unwrap();
    pool.admit(&name, vec![host(7), host(8)]).await.unwrap();
    let refused = pool.admit(&name, vec![host(7), host(max)]).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
    pool.end_admission(&name, &host(0)).await.unwrap();
    pool.admit(&name, vec![host(max)]).await.unwrap();
    assert_eq!(pool.admitted_hosts(&name).await.unwrap().len(), max);
}

#[tokio::test]
async fn a_list_that_is_too_long_keeps_no_other_volume_from_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_sim(dir.path(), &Arc::default(), 1);
    let (v, w) = (volume_name("v"), volume_name("w"));
    let max = usize::try_from(ADMITTED_HOSTS.max).unwrap();
    let many = (0..=max).map(host).collect();
    let all = BTreeMap::from([(v.clone(), many), (w.clone(), vec![host(1)])]);
    pool.admit_all(all).await.unwrap();
    assert!(pool.may_open(&w, &host(1)).await.unwrap());
    assert!(!pool.may_open(&v, &host(1)).await.unwrap());
}

#[tokio::test]
async fn what_a_pool_is_told_is_added_to_what_it_knows_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (v, w) = (volume_name("v"), volume_name("w"));
    let files = Arc::default();
    {
        let pool = open_sim(dir.path(), &files, 1);
        pool.admit(&v, vec![host(1)]).await.unwrap();
        let all = BTreeMap::from([(v.clone(), vec![host(2)]), (w.clone(), vec![host(1)])]);
        pool.admit_all(all).await.unwrap();
    }
    let pool = open_sim(dir.path(), &files, 2);
    let all = pool.all_admitted_hosts().await.unwrap();
    assert_eq!(all, BTreeMap::from([(v, vec![host(1), host(2)]), (w, vec![host(1)])]));
}
