//! Staging leaves running VMs their links.
//!
//! Inputs and outputs of jobs go between the controller and a host as fast as they can, unless VMs run that read their
//! disks over the same link. Then they take at most a half of what the link was measured to carry, in small pieces with
//! pauses between them: no queue stands at the link, so that a VM's read waits for one piece at most. All that is staged
//! at a site in one direction shares this half.
//!
//! Images that hosts copy from each other have a limit of their own, at the volume server (`fill.rs` in `store`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use perigee_model::job::{JobState, Link};
use perigee_model::{HostId, SiteId};

use crate::cluster::paces::{Pace, Way};
use crate::cluster::{Cluster, HostLink};
use crate::records::JobRecord;

/// Staging takes this part of a link.
const PART: u64 = 2;
/// What a link carries that nobody has measured: one of 1 Gbit/s.
const UNKNOWN_BYTES_PER_S: u64 = 125_000_000;
/// Staging gets so much of a link, however slow that is.
const LEAST_BYTES_PER_S: u64 = 128 << 10;
/// What is sent at once. A link of 1 Gbit/s takes half a millisecond for it.
const PIECE_BYTES: usize = 64 << 10;
/// How often somebody looks whether VMs run.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A body that goes no faster than the pace.
pub fn paced<E>(
    body: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    pace: Arc<Pace>,
) -> impl Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static
where
    E: Send + 'static,
{
    let begin = (Box::pin(body), Bytes::new(), pace);
    Box::pin(stream::try_unfold(begin, |(mut body, mut left, pace)| async move {
        if left.is_empty() {
            match body.next().await.transpose()? {
                Some(piece) => left = piece,
                None => return Ok(None),
            }
        }
        let most = if pace.bytes_per_s().is_some() { PIECE_BYTES } else { left.len() };
        let piece = left.split_to(most.min(left.len()));
        pace.pass(piece.len()).await;
        Ok(Some((piece, (body, left, pace))))
    }))
}

/// Works while the pace follows what runs.
pub async fn while_kept<T>(
    cluster: &Cluster,
    host: &HostLink,
    way: Way,
    pace: &Pace,
    work: impl Future<Output = T>,
) -> T {
    let keep = async {
        loop {
            pace.set(limit(cluster, host, way));
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::select! {
        biased;
        never = keep => never,
        done = work => done,
    }
}

/// How fast staging at a host may be now; `None`: as fast as it can.
fn limit(cluster: &Cluster, host: &HostLink, way: Way) -> Option<u64> {
    let site_of = |id: &HostId| Some(cluster.hosts.get(id).ok()?.addresses.site.clone());
    let there = &host.addresses.site;
    let here = cluster.settings.site.as_ref();
    let ends: BTreeSet<&SiteId> = here.into_iter().chain([there]).collect();
    let jobs = cluster.unfinished_jobs();
    let is_there = |id: &HostId| site_of(id).is_some_and(|site| ends.contains(&site));
    if !jobs.iter().any(|record| runs_at(record, is_there)) {
        return None;
    }
    let links = cluster.links.all();
    // The host that asks reads from the other one.
    let carries = |link: &&Link| {
        let (reader, source) = match way {
            Way::In => (site_of(&link.from), site_of(&link.to)),
            Way::Out => (site_of(&link.to), site_of(&link.from)),
        };
        reader.as_ref() == Some(there) && (here.is_none() || source.as_ref() == here)
    };
    // Where the controller is not known, the slowest link to the site counts.
    let rates = links.iter().filter(carries).map(|link| link.probe.rate_bytes_per_s);
    Some(share(rates.min()))
}

/// Whether the VM of a job runs there, or reads a disk there.
fn runs_at(record: &JobRecord, is_there: impl Fn(&HostId) -> bool) -> bool {
    let job = &record.job;
    let runs = record.vm_started && matches!(job.state, JobState::Starting | JobState::Running);
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    runs && job.host.iter().chain(disks.map(|disk| &disk.home)).any(is_there)
}

fn share(measured_bytes_per_s: Option<u64>) -> u64 {
    let carries = measured_bytes_per_s.filter(|rate| *rate > 0).unwrap_or(UNKNOWN_BYTES_PER_S);
    (carries / PART).max(LEAST_BYTES_PER_S)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use tokio::time::Instant;

    use super::*;

    async fn time_of(pace: &Arc<Pace>, bytes: usize) -> Duration {
        let body = stream::iter([Ok::<_, Infallible>(Bytes::from(vec![0; bytes]))]);
        let begun = Instant::now();
        let mut sent = paced(body, Arc::clone(pace));
        let mut all = 0;
        while let Some(Ok(piece)) = sent.next().await {
            all += piece.len();
        }
        assert_eq!(all, bytes);
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn staging_takes_its_part_of_a_link_while_vms_run() {
        let pace = Arc::new(Pace::new());
        assert_eq!(time_of(&pace, 64 << 20).await, Duration::ZERO, "nothing runs");
        pace.set(Some(share(Some(2 << 20))));
        let took = time_of(&pace, 10 << 20).await.as_secs_f64();
        assert!((9.9..10.1).contains(&took), "{took} s");
        // Two at once have it together.
        let (first, second) = tokio::join!(time_of(&pace, 5 << 20), time_of(&pace, 5 << 20));
        let took = first.max(second).as_secs_f64();
        assert!((9.9..10.1).contains(&took), "{took} s");
    }

    #[tokio::test(start_paused = true)]
    async fn what_begins_late_is_not_sent_in_one_burst() {
        let pace = Arc::new(Pace::new());
        pace.set(Some(1 << 20));
        time_of(&pace, 1 << 20).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        let took = time_of(&pace, 1 << 20).await.as_secs_f64();
        assert!(took > 0.9, "{took} s");
    }

    #[test]
    fn a_link_that_nobody_has_measured_has_a_limit_too() {
        assert_eq!(share(None), UNKNOWN_BYTES_PER_S / 2);
        assert_eq!(share(Some(0)), UNKNOWN_BYTES_PER_S / 2);
        assert_eq!(share(Some(1)), LEAST_BYTES_PER_S);
    }
}
