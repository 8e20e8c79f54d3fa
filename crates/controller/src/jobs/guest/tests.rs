use perigee_model::guest::{GuestMessage, LogStream};
use perigee_model::{HostId, ImageName, JobId};
use proptest::prelude::*;

use super::*;
use crate::jobs::new_record;

const SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

pub fn record(state: JobState) -> JobRecord {
    let spec = perigee_model::job::JobSpec {
        name: "q".into(),
        image: ImageName::new("debian").expect("name"),
        command: vec!["run".into()],
        env: Default::default(),
        cpus: 1,
        memory_bytes: 64 << 20,
        cpus_max: None,
        memory_max_bytes: None,
        root_bytes: None,
        output_bytes: 1 << 20,
        volumes: Vec::new(),
        outputs: Vec::new(),
        outputs_to: None,
        keep_outputs_s: None,
        publish: Vec::new(),
        start: Default::default(),
        may_migrate: false,
        writes: perigee_model::LeaveSite::Never,
        ranks: perigee_model::LeaveSite::Never,
        timeout_s: None,
        has_output_room: false,
        stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
        oom_kill: Default::default(),
        inputs: None,
        owner: "ann".into(),
        priority: 0,
        restart: Default::default(),
        network: Default::default(),
        count: 1,
        mpi: false,
        firmware: Default::default(),
        tpm: false,
        rules: Default::default(),
        money: Default::default(),
    };
    let mut record = new_record(JobId::new("q-0001").expect("name"), spec);
    record.job.state = state;
    record.job.host = Some(HostId::new("h").expect("name"));
    record.job.started_ms = Some(1_000_000);
    record.job.exit_code = (state == JobState::Collecting).then_some(0);
    record
}

fn event(seq: u64, age_ms: u64, body: GuestBody) -> GuestEvent {
    GuestEvent { age_ms, message: GuestMessage { seq, uptime_ms: seq, body } }
}

fn any_body() -> impl Strategy<Value = GuestBody> {
    let stream = prop_oneof![Just(LogStream::Stdout), Just(LogStream::Stderr)];
    let sha256 = prop_oneof![Just(SHA256.to_owned()), ".{0,70}"];
    let bytes = prop_oneof![0..3_u64 << 20, any::<u64>()];
    prop_oneof![
        Just(GuestBody::Started),
        Just(GuestBody::Synced { number: None }),
        (stream, ".{0,20}").prop_map(|(stream, line)| GuestBody::log(stream, line)),
        (any::<u64>(), any::<u64>(), ".{0,2000}")
            .prop_map(|(done, total, label)| GuestBody::Progress { done, total, label }),
        any::<i32>().prop_map(GuestBody::exited),
        (any::<u64>(), any::<u64>())
            .prop_map(|(killed, memory_bytes)| GuestBody::OutOfMemory { killed, memory_bytes }),
        (bytes, sha256, proptest::option::of(".{0,2000}")).prop_map(
            |(output_bytes, output_sha256, lacks)| GuestBody::Finished {
                output_bytes,
                output_sha256,
                lacks
            }
        ),
        ".{0,2000}".prop_map(|reason| GuestBody::Failed { reason }),
    ]
}

/// The job can still come to an end: what its driver would do next is allowed.
fn check_not_stuck(record: &JobRecord) {
    let state = record.job.state;
    let possible = match (state.is_final(), record.ending, &record.finished) {
        (true, ..) => true,
        (_, Some(Ending::Failed), _) => state.next(JobEvent::Failed).is_ok(),
        (_, Some(Ending::Cancelled), _) => state.next(JobEvent::Cancelled).is_ok(),
        (_, Some(Ending::Collected { exit_code }), _) => {
            state.next(JobEvent::Collected { exit_code }).is_ok()
        }
        (_, None, Some(output)) => {
            let exit_code = record.job.exit_code.expect("a command that ended has a code");
            hash::is_sha256(&output.sha256)
                && output.bytes <= record.job.spec.output_bytes
                && state.next(JobEvent::Collected { exit_code }).is_ok()
        }
        // These have deadlines.
        (_, None, None) => true,
    };
    assert!(possible, "stuck: {record:?}");
}

proptest! {
    #[test]
    fn no_message_in_any_state_leaves_a_job_that_cannot_end(
        state in proptest::sample::select(JobState::ALL.to_vec()),
        bodies in proptest::collection::vec((0..3_u64, any::<u64>(), any_body()), 0..20),
        now_ms in any::<u64>(),
    ) {
        let mut record = record(state);
        let mut seq = 0;
        for (step, age_ms, body) in bodies {
            seq += step;
            let before = record.job.state;
            apply(&mut record, now_ms, vec![event(seq, age_ms, body)]);
            check_not_stuck(&record);
            prop_assert!(!before.is_final() || record.job.state == before);
            prop_assert!(record.job.reason.len() <= TEXT_BYTES_MAX + OLD_RUNNER.len() + 100);
        }
    }
}

proptest! {
    /// Nothing that the guest says while it only writes the outputs changes how the job ends.
    #[test]
    fn a_guest_that_is_started_once_more_decides_only_what_the_outputs_are(
        bodies in proptest::collection::vec(any_body(), 0..20),
    ) {
        let mut record = record(JobState::Collecting);
        record.job.exit_code = None;
        let collect = Collect::new(Ending::Cancelled, "its reason".to_owned());
        record.collect = Some(collect.clone());
        for (seq, body) in (1..).zip(bodies) {
            apply(&mut record, 0, vec![event(seq, 0, body)]);
        }
        let after = record.collect.expect("it stays");
        prop_assert!((record.ending, record.job.exit_code) == (None, None));
        prop_assert_eq!(record.job.state, JobState::Collecting);
        prop_assert_eq!(Collect { failed: None, ..after }, collect);
        let fits = |output: &Output| output.bytes <= record.job.spec.output_bytes;
        prop_assert!(record.finished.as_ref().is_none_or(fits));
    }
}

#[test]
fn a_message_that_is_read_late_counts_from_when_it_came() {
    let mut record = record(JobState::Starting);
    let now_ms = 1_100_000;
    let said = vec![event(1, 90_000, GuestBody::Started), event(2, 60_000, GuestBody::exited(0))];
    apply(&mut record, now_ms, said);
    assert_eq!(record.job.running_ms, Some(1_010_000));
    assert_eq!(record.job.measured_s, Some(40.0));
    assert!(!record.meter.is_sharp(30_000), "nobody read the counters when it started and ended");
}

#[test]
fn a_message_from_before_the_vm_started_counts_from_its_start() {
    let mut record = record(JobState::Starting);
    apply(&mut record, 1_000_500, vec![event(1, u64::MAX, GuestBody::Started)]);
    assert_eq!(record.job.running_ms, Some(1_000_000));
}
