//! What earlier runs of a job are sure of is done when its command starts.

use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState};
use perigee_model::plan::{Basis, Trigger, Way};
use perigee_model::read_ahead::PROXY_GENERATION;
use perigee_planner::{PastRun, Traits, VolumeRun};

use super::{Lab, spec, vm_of, wait_for};
use crate::cluster::history_cache::History;
use crate::planning;

/// A run at the other host, which lost 80 s to the network.
fn long_run(traits: &Traits, lab: &Lab) -> PastRun {
    PastRun {
        traits: traits.clone(),
        host: lab.home.id.clone(),
        moved: false,
        boot_s: 5.0,
        wall_s: 100.0,
        cpu_s: 20.0,
        run_delay_s: None,
        busy_s: 80.0,
        local_io_s: 0.0,
        network_s: 80.0,
        volumes: vec![VolumeRun {
            requests: 5000.0,
            reads: Some(5000.0),
            read_time_share: Some(1.0),
            bytes: 0.0,
            queue_depth: 1.0,
            remote_share: 1.0,
            round_trip_s: 0.016,
            rate_bytes_per_s: Some(50 << 20),
        }],
        replayed: None,
        distance_changed: false,
        proxy_generation: PROXY_GENERATION,
    }
}

/// A run as a job's end would leave it.
pub fn some_run(lab: &Lab) -> PastRun {
    long_run(&Traits::default(), lab)
}

/// The counters of the test double's VM stay at 0, so only its history can have moved it.
#[tokio::test]
async fn a_job_with_a_sure_history_is_moved_when_its_command_starts() {
    let lab = Lab::up().await;
    let wanted = JobSpec { may_migrate: true, memory_bytes: 64 << 20, ..spec(Access::Read) };
    let prepared = planning::prepare(&lab.cluster, &wanted).await.expect("facts");
    let runs = vec![long_run(&prepared.job.traits, &lab); perigee_planner::SURE_RUNS];
    let history = History { runs, ..History::default() };
    let key = planning::history_key(&wanted);
    lab.cluster.history_cache.set_history(&key, std::sync::Arc::new(history));
    let id = lab.submit(wanted).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    wait_for("the VM to be moved", async || {
        lab.home.inside().vms.get(&vm).and_then(|vm| vm.asked.as_ref()).map(drop)
    })
    .await;
    let job = lab.job(&id).await;
    assert_eq!(job.migrations[0].to, lab.cloud.id);
    let planned = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let ways: Vec<_> = planned
        .iter()
        .map(|decision| (decision.trigger, decision.plan.chosen().map(|chosen| chosen.way)))
        .collect();
    let migrate = Some(Way::Migrate);
    assert_eq!(ways, [(Trigger::Submitted, migrate), (Trigger::TimeLost, migrate)]);
    assert_eq!(planned[1].plan.basis, Basis::History);
    assert!(planned[1].summary.contains("its last 2 runs show"), "{}", planned[1].summary);
}
