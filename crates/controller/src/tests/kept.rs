//! What is kept of a VM's past.

use perigee_model::VmStart;
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobState, MigrationState};
use perigee_model::plan::Trigger;
use perigee_planner::Refused;

use super::{Lab, spec, vm_of, wait_for};
use crate::records::{
    MigrationIntent, MigrationRecord, migration_intent_key, migration_intent_prefix,
    migration_prefix,
};
use crate::{migration, planning, vms};

/// Of a VM that lives for ever there would be ever more.
#[tokio::test]
async fn of_many_moves_and_decisions_the_last_ones_are_kept() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Write)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    let last = migration::KEPT + 3;
    for number in 1..=last {
        let wish = migration::Wish {
            to: lab.cloud.id.clone(),
            reason: String::new(),
            job_progress: None,
            volumes: Default::default(),
        };
        let start = VmStart::default().by_migration(number);
        let unknown = Err(Refused::HostNotUp(lab.cloud.id.clone()));
        let mut record =
            migration::new_record(&vm, start, lab.home.id.clone(), wish, None, unknown)
                .expect("record");
        record.migration.state = MigrationState::Aborted;
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
