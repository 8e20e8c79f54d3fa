//! What is kept of a VM's past.

use std::sync::Arc;

use perigee_model::job::MigrationState;
use perigee_model::plan::Trigger;
use perigee_model::tenant::DEFAULT_TENANT;
use perigee_model::{VmStart, VolumeName};
use perigee_planner::Refused;

use super::{Lab, running, wait_for};
use crate::cluster::history_cache::{History, HistoryCache, OTHERS_MAX, RUNS};
use crate::records::{
    MigrationIntent, MigrationRecord, VolumeRecord, migration_intent_key, migration_intent_prefix,
    migration_prefix, volume_key,
};
use crate::storage::volumes;
use crate::{migration, planning, vms};

/// The controller was stopped before the home had made it.
#[tokio::test]
async fn a_volume_whose_making_was_cut_is_shown_and_can_be_deleted() {
    let lab = Lab::up().await;
    let name = VolumeName::new("cut").expect("a name");
    let record = VolumeRecord { name: name.clone(), home: lab.cloud.id.clone(), seen: None };
    lab.cluster.records.put(&volume_key(&name), &record).await.expect("as it was left");
    let is_shown = async || {
        let all = volumes::volumes(&lab.cluster).await.expect("volumes");
        all.iter().any(|volume| volume.name == name && volume.home == lab.cloud.id)
    };
    assert!(is_shown().await);
    volumes::delete(&lab.cluster, &name).await.expect("the name is free");
    assert!(!is_shown().await);
}

/// Of a VM that lives for ever there would be ever more.
#[tokio::test]
async fn of_many_moves_and_decisions_the_last_ones_are_kept() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let last = migration::KEPT + 3;
    for number in 1..=last {
        let request = migration::Request {
            to: lab.cloud.id.clone(),
            reason: String::new(),
            job_progress: None,
            volumes: Default::default(),
        };
        let start = VmStart::default().by_migration(number);
        let unknown = Err(Refused::HostNotUp(lab.cloud.id.clone()));
        let mut record =
            migration::new_record(&vm, start, lab.home.id.clone(), request, None, unknown)
                .expect("record");
        record.migration.state = MigrationState::Aborted;
        record.migration.downtime_ms = 2;
        assert!(lab.cluster.create_migration(&record).await.expect("create"));
        let intent = migration_intent_key(&vm, number);
        lab.cluster.records.put(&intent, &MigrationIntent::default()).await.expect("recorded");
        lab.cluster.drive_job(&id);
    }
    let numbers = async || {
        let prefix = migration_prefix(&vm);
        let kept: Vec<MigrationRecord> = lab.cluster.records.list(&prefix).await.expect("records");
        kept.iter().map(|record| record.number).collect::<Vec<u32>>()
    };
    let wanted: Vec<u32> = (4..=last).collect();
    let intents = migration_intent_prefix(&vm);
    wait_for("the first ones to be forgotten", async || {
        let intents = lab.cluster.records.keys(&intents).await.expect("keys").len();
        let known = lab.cluster.index.migrations_of(&vm).len();
        let all = (intents, known) == (wanted.len(), wanted.len());
        (all && numbers().await == wanted).then_some(())
    })
    .await;
    let record = lab.cluster.index.job(&id).expect("the job");
    assert_eq!(record.meter.paused_ms, 2 * u64::from(last), "also in those that are forgotten");
    wait_for("the next one", async || {
        let next = vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default());
        next.await.ok()
    })
    .await;
    assert_eq!(numbers().await.last(), Some(&(last + 1)));
    let before = planning::decisions(&lab.cluster, &id).await.expect("decisions").len();
    for at in 0..110 {
        let plan = planning::asked_plan(Vec::new());
        let recorded =
            planning::record(&lab.cluster, &id, Trigger::Asked, plan, format!("number {at}"));
        recorded.await.expect("recorded");
    }
    let kept = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    assert!(before < 110 && kept.len() <= 102, "{} of {}", kept.len(), before + 110);
    assert_eq!(kept[0].trigger, Trigger::Submitted);
    assert_eq!(kept.last().expect("one").summary, "number 109");
}

/// A program that is given another number each time is another kind each time.
#[tokio::test]
async fn of_many_kinds_of_jobs_the_last_ones_are_remembered() {
    let lab = Lab::up().await;
    let known = async |of: &str| {
        let key = format!("{RUNS}{of}");
        lab.cluster.records.read::<History>(&key).await.expect("read").is_some()
    };
    let learn = async |of: &str, tenant: &str, ended_ms: u64| {
        let mut run = super::sure::some_run(&lab);
        run.traits.name = format!("{tenant}q");
        let history = History { runs: vec![run], ended_ms, ..History::default() };
        lab.cluster.records.put(&format!("{RUNS}{of}"), &history).await.expect("put");
    };
    learn("other", "acme~", 1).await;
    for number in 0..20 {
        learn(&format!("own{number}"), "", 100 - number).await;
    }
    let make_room = async |of: &str| {
        let key = format!("{RUNS}{of}");
        planning::make_room(&lab.cluster, &key, DEFAULT_TENANT, 20).await.expect("room");
    };
    make_room("own3").await;
    assert!(known("own19").await, "it is none more");
    make_room("new").await;
    for (of, is_known) in [("other", true), ("own19", false), ("own18", false), ("own17", true)] {
        assert_eq!(known(of).await, is_known, "{of}");
    }
}

/// After a restart the ranges of first runs were those of other jobs' runs, and perhaps of none.
#[tokio::test]
async fn a_restart_does_not_change_from_which_jobs_a_new_one_is_predicted() {
    let lab = Lab::up().await;
    let before = HistoryCache::default();
    // The last ones come last in the store, behind those of other tenants.
    for number in 0..150_u32 {
        for (prefix, tenant) in [("0", "acme~"), ("1", "")] {
            let mut run = super::sure::some_run(&lab);
            (run.traits.name, run.boot_s) = (format!("{tenant}q"), f64::from(number));
            let ended_ms = u64::from(number);
            let history = History { runs: vec![run], ended_ms, ..History::default() };
            let key = format!("{RUNS}{prefix}{number:03}");
            lab.cluster.records.put(&key, &history).await.expect("put");
            before.set_history(&key, Arc::new(history));
        }
    }
    let after = HistoryCache::load(&lab.cluster.records).await.expect("read");
    for cache in [&before, &after] {
        let others = cache.others(&format!("{RUNS}1149"), DEFAULT_TENANT);
        assert_eq!(others.len(), OTHERS_MAX);
        assert!(others.iter().all(|run| run.traits.name == "q"), "{others:?}");
        let boots: Vec<f64> = others.iter().map(|run| run.boot_s).collect();
        assert_eq!((boots[0], boots[OTHERS_MAX - 1]), (148.0, 117.0));
    }
}
