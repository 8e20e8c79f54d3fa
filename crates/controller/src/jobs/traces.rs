//! The block trace of a job's command. Replaying it shows what the job would wait for far from its data.
//!
//! Only a job at its data is traced, and only until this is known. A trace that cannot be had never delays a
//! job. It is replayed once, when the command has ended, and then dropped: what the replay finds is a few numbers, and a
//! trace has 28 bytes for each request. So a better replay of a later version learns nothing from old runs.

use perigee_model::job::JobState;
use perigee_model::trace::{BadTrace, HELD_BACK_US, Operation, TraceRecord, read_trace};
use perigee_model::volume::CollectTrace;
use perigee_model::{HostId, JobId, Problem};
use perigee_planner::replay::{Kind, Replay, Replayed, Request};

use super::driver::Run;
use crate::clock::now_ms;
use crate::cluster::HostLink;
use crate::planning;
use crate::records::{Placement, Traced};

impl Run {
    /// Starts the trace when the command has started, and replays it when the command has ended.
    pub(super) async fn trace(&mut self, host: &HostLink) -> Result<(), Problem> {
        match (self.record.value.traced, self.job().state) {
            (Traced::NotYet, JobState::Running) => self.begin_trace(host).await,
            (Traced::Since { at_ms }, JobState::Collecting) => self.end_trace(host, at_ms).await,
            _ => Ok(()),
        }
    }

    async fn begin_trace(&mut self, host: &HostLink) -> Result<(), Problem> {
        let mut traced = Traced::Not;
        if planning::wants_trace(&self.cluster, &self.record.value).await? {
            let disks = &self.placement()?.disks;
            let volumes = disks.iter().map(|disk| disk.volume.clone()).collect();
            let data = disks.iter().filter(|disk| disk.data_of.is_some());
            let hold_back = data.map(|disk| disk.volume.clone()).collect();
            let ask = CollectTrace { volumes, hold_back };
            match host.volume.put::<()>(&path(&self.id), &ask).await {
                Ok(()) => traced = Traced::Since { at_ms: now_ms() },
                Err(problem) => tracing::debug!("job {} is not traced: {problem}", self.id),
            }
        }
        self.record.value.traced = traced;
        self.record.save().await
    }

    async fn end_trace(&mut self, host: &HostLink, since_ms: u64) -> Result<(), Problem> {
        let replayed = self.replayed(host, since_ms).await;
        if let Err(problem) = &replayed {
            tracing::debug!("job {} has no trace: {problem}", self.id);
        }
        self.drop_trace(&host.id).await;
        self.record.value.traced = replayed.map_or(Traced::Not, Traced::Replayed);
        self.record.save().await
    }

    /// Drops the trace of a job that ends in another way, or whose VM has left this host.
    pub(super) async fn drop_trace(&self, host: &HostId) {
        if !matches!(self.record.value.traced, Traced::Since { .. }) {
            return;
        }
        let Ok(host) = self.cluster.hosts.get(host) else { return };
        if let Err(problem) = host.volume.delete(&path(&self.id)).await {
            tracing::debug!(
                "job {}: its trace stays until others need its place: {problem}",
                self.id
            );
        }
    }

    async fn replayed(&self, host: &HostLink, since_ms: u64) -> Result<Replayed, Problem> {
        let job = self.job();
        let running_ms = job.started_ms.zip(job.measured_s);
        let ended_ms = running_ms.map_or(since_ms, |(start, s)| start + planning::milliseconds(s));
        let trace = host.volume.get_bytes(&path(&self.id)).await?;
        let data = data_disks(self.placement()?);
        let end_us = ended_ms.saturating_sub(since_ms) as f64 * 1e3;
        let replay = tokio::task::spawn_blocking(move || far(&trace, &data, end_us));
        let what = || format!("replay the trace of job {}", self.id);
        replay
            .await
            .map_err(|error| Problem::internal(what(), error))?
            .map_err(|error| Problem::internal(what(), error))
    }
}

fn path(job: &JobId) -> String {
    format!("/v1/traces/{job}")
}

/// For each of the VM's disks, whether it has data.
fn data_disks(placement: &Placement) -> Vec<bool> {
    placement.disks.iter().map(|disk| disk.data_of.is_some()).collect()
}

/// What a command that ended at `end_us` of its trace would wait for far from its data.
fn far(trace: &[u8], data: &[bool], end_us: f64) -> Result<Replayed, BadTrace> {
    let mut requests: Vec<Request> =
        read_trace(trace)?.iter().filter_map(request).filter(|r| r.at_us <= end_us).collect();
    requests.sort_by(|a, b| a.at_us.total_cmp(&b.at_us));
    Ok(Replay::new(&requests, end_us).far(data))
}

fn request(record: &TraceRecord) -> Option<Request> {
    let TraceRecord::Request(traced) = record else { return None };
    let kind = match traced.operation {
        Operation::Read => Kind::Read,
        Operation::Write | Operation::Zero => Kind::Write,
        Operation::Flush => Kind::Flush,
        Operation::Other => return None,
    };
    let at_us = traced.at_ns as f64 / 1e3;
    Some(Request {
        disk: traced.client,
        kind,
        offset: traced.offset,
        length_bytes: traced.length_bytes,
        at_us,
        answered_us: at_us + f64::from(traced.duration_us),
        held_us: if traced.served.held { f64::from(HELD_BACK_US) } else { 0.0 },
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use perigee_model::trace::{Served, TRACE_MAGIC, TraceRequest};

    use super::*;

    /// Sequential reads of this disk: each takes 100 us, and 900 us are between them.
    pub fn serial_reads(client: u16, reads: u64) -> Vec<u8> {
        let mut bytes = TRACE_MAGIC.to_vec();
        for number in 0..reads {
            let request = TraceRequest {
                at_ns: number * 1_000_000,
                offset: number * 7_919 * 8192,
                length_bytes: 8192,
                duration_us: 100,
                client,
                operation: Operation::Read,
                served: Served::default(),
            };
            TraceRecord::Request(request).encode(&mut bytes);
        }
        bytes
    }

    #[test]
    fn each_read_of_a_data_disk_that_is_waited_for_is_a_round_trip() {
        let counted = |client, end_us| {
            let far = far(&serial_reads(client, 50), &[false, true], end_us).expect("a trace");
            far.round_trips
        };
        assert!((counted(1, 60_000.0) - 50.0).abs() < 1e-6);
        assert!(counted(0, 60_000.0).abs() < 1e-6, "the root disk comes along");
        assert!(
            (counted(1, 9_500.0) - 10.0).abs() < 1e-6,
            "what the end of the VM reads is not it"
        );
        assert!(far(b"no trace", &[], 1.0).is_err());
    }
}
