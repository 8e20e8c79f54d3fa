//! Traces: the time of each step of a request, from the socket to the disk and back.
//!
//! A traced request has a [`Span`]. Code that does a part of its work measures this part with [`stage`],
//! without knowing the request. Without a span this only reads a thread-local variable. [`carry`] passes
//! the span on to a thread that does work for a task.
//!
//! [`crate::measured`] decides which requests are traced: all that have to wait, some of those that are
//! answered at once, and all if a client follows the trace.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use perigee_model::volume::{StageTime, TracedRequest};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::collection::Collector;
use crate::recording::Recorder;

/// The length of a follower's queue. A slow follower misses further requests.
const FOLLOWER_REQUESTS_MAX: usize = 4096;

/// A step of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// From the socket until a task begins its work.
    Queue,
    /// The round trip of a request to the volume's home.
    Network,
    /// Recording which blocks the head has.
    Map,
    /// Reading blocks from a sealed layer of this pool.
    SourceRead,
    /// Reading blocks from the volume's own layer.
    HeadRead,
    /// Reading from another host the blocks that were never written here.
    RemoteRead,
    /// Writing data into the volume's own layer, up to the page cache.
    Write,
    /// Syncing the data.
    Flush,
}

/// Every stage, in the order of the discriminants: `stage as usize` is its index.
const STAGES: [Stage; 8] = [
    Stage::Queue,
    Stage::Network,
    Stage::Map,
    Stage::SourceRead,
    Stage::HeadRead,
    Stage::RemoteRead,
    Stage::Write,
    Stage::Flush,
];

impl Stage {
    /// The stage's name in traces and metrics. Clients read it, so it does not change.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Network => "network",
            Self::Map => "map",
            Self::SourceRead => "source_read",
            Self::HeadRead => "head_read",
            Self::RemoteRead => "remote_read",
            Self::Write => "write",
            Self::Flush => "flush",
        }
    }
}

/// One request's time so far.
pub struct Span {
    /// The moment when the request was read from its socket, or when its work began.
    pub(crate) since: Instant,
    /// Its answer was held back ([`crate::held_back`]).
    pub(crate) held: AtomicBool,
    stages_ns: [AtomicU64; STAGES.len()],
}

tokio::task_local! {
    static CURRENT: Arc<Span>;
    static QUEUED_SINCE: Cell<Option<Instant>>;
}

/// Runs the work of a request in another task than that of its connection. The request was read from its
/// socket at `since`.
pub async fn queued<T>(since: Instant, work: impl Future<Output = T>) -> T {
    QUEUED_SINCE.scope(Cell::new(Some(since)), work).await
}

/// The time when the current request was read from its socket. It is returned only once, because only the
/// first part of the work had to wait for the task.
pub(crate) fn queued_since() -> Option<Instant> {
    QUEUED_SINCE.try_with(Cell::take).ok().flatten()
}

impl Span {
    /// A request that began at `since`, with no time in any stage yet.
    pub fn new(since: Instant) -> Arc<Self> {
        Arc::new(Self { since, held: AtomicBool::new(false), stages_ns: Default::default() })
    }

    /// Runs work whose measurements go to this span.
    pub(crate) fn enter<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(Arc::clone(self), work)
    }

    /// As [`Self::enter`], for async work.
    pub(crate) async fn follow<T>(self: &Arc<Self>, work: impl Future<Output = T>) -> T {
        CURRENT.scope(Arc::clone(self), work).await
    }

    /// Records that a stage lasted from `since` until now.
    pub fn add(&self, stage: Stage, since: Instant) {
        self.stages_ns[stage as usize].fetch_add(elapsed_ns(since), Ordering::Relaxed);
    }

    fn traced(&self, ended: Ended) -> TracedRequest {
        let total_ns = elapsed_ns(self.since);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        TracedRequest {
            ended_us: u64::try_from(now.as_micros()).unwrap_or(u64::MAX),
            command: ended.command.to_owned(),
            offset: ended.offset,
            length_bytes: ended.length_bytes,
            at_once: ended.at_once,
            total_ns,
            stages: self
                .stages()
                .map(|(stage, ns)| StageTime { stage: stage.name().to_owned(), ns })
                .collect(),
            error: ended.error,
        }
    }

    /// The stages that took time, with their durations in nanoseconds.
    pub(crate) fn stages(&self) -> impl Iterator<Item = (Stage, u64)> {
        let times = self.stages_ns.iter().map(|ns| ns.load(Ordering::Relaxed));
        STAGES.into_iter().zip(times).filter(|(_, ns)| *ns > 0)
    }
}

fn elapsed_ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Measures a stage until it is dropped.
pub struct StageTimer {
    span: Arc<Span>,
    stage: Stage,
    since: Instant,
}

impl Drop for StageTimer {
    fn drop(&mut self) {
        self.span.add(self.stage, self.since);
    }
}

/// Begins a stage of the current request, if it is traced.
pub fn stage(stage: Stage) -> Option<StageTimer> {
    let span = CURRENT.try_with(Arc::clone).ok()?;
    Some(StageTimer { span, stage, since: Instant::now() })
}

/// Passes the span on to another thread.
pub fn carry<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = CURRENT.try_with(Arc::clone).ok();
    move || match span {
        Some(span) => CURRENT.sync_scope(span, work),
        None => work(),
    }
}

/// Buckets of a histogram; the last one is for everything longer.
pub const BUCKETS: usize = 24;

/// A histogram of durations. Bucket `n` counts those below 2 to the n microseconds that are not in an
/// earlier bucket.
#[derive(Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl Histogram {
    /// Counts `weight` durations of `ns` nanoseconds each.
    fn record(&self, ns: u64, weight: u64) {
        let bucket = (u64::BITS - (ns / 1000).leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)].fetch_add(weight, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns.saturating_mul(weight), Ordering::Relaxed);
    }

    /// The number of durations in each bucket, not cumulated.
    pub fn counts(&self) -> [u64; BUCKETS] {
        std::array::from_fn(|bucket| self.buckets[bucket].load(Ordering::Relaxed))
    }

    /// The sum of all durations in nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns.load(Ordering::Relaxed)
    }
}

/// The result and size of a request that has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// The request's name in traces: `read`, `write`, `zero`, `flush`, `status` or `cache`.
    pub command: &'static str,
    /// The first byte of its range; 0 for a flush.
    pub offset: u64,
    /// The length of its range; 0 for a flush.
    pub length_bytes: u64,
    /// Whether it was answered without waiting for anything.
    pub at_once: bool,
    /// The text of its [`crate::device::IoError`], if it failed.
    pub error: Option<String>,
}

/// The stages of one volume's requests, and the followers of its trace.
#[derive(Default)]
pub struct Tracing {
    stages: [Histogram; STAGES.len()],
    following: AtomicUsize,
    followers: Mutex<Followers>,
}

#[derive(Default)]
struct Followers {
    lines: Vec<mpsc::Sender<TracedRequest>>,
    recorder: Option<Recorder>,
    collectors: Vec<Collector>,
}

impl Tracing {
    /// The time in each stage since the server started, over all traced requests. Requests without time in a
    /// stage do not count there.
    pub fn histograms(&self) -> impl Iterator<Item = (Stage, &Histogram)> {
        STAGES.into_iter().zip(&self.stages)
    }

    /// Whether anybody gets every request, so that all have to be traced.
    pub(crate) fn is_followed(&self) -> bool {
        self.following.load(Ordering::Relaxed) > 0
    }

    /// Follows every request from now on, until the receiver is dropped.
    pub fn follow(&self) -> mpsc::Receiver<TracedRequest> {
        let (sender, receiver) = mpsc::channel(FOLLOWER_REQUESTS_MAX);
        self.change(|followers| followers.lines.push(sender));
        receiver
    }

    /// Also sends every request to this recorder from now on; `None` stops that.
    pub(crate) fn record(&self, recorder: Option<Recorder>) {
        self.change(|followers| followers.recorder = recorder);
    }

    /// Every request from now on goes to this collector too, until its trace is taken.
    pub(crate) fn collect(&self, collector: Collector) {
        self.change(|followers| followers.collectors.push(collector));
    }

    /// Whether a read that arrives now would be held back.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.any_collector(|collector| collector.is_due(now))
    }

    /// Whether the answer to a read that arrives now is held back.
    pub(crate) fn holds(&self, now: Instant) -> bool {
        self.any_collector(|collector| collector.hold(now))
    }

    fn any_collector(&self, is: impl Fn(&Collector) -> bool) -> bool {
        if !self.is_followed() {
            return false;
        }
        let followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        followers.collectors.iter().any(is)
    }

    fn change(&self, change: impl FnOnce(&mut Followers)) {
        let mut followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut followers);
        let following = followers.lines.len()
            + usize::from(followers.recorder.is_some())
            + followers.collectors.len();
        self.following.store(following, Ordering::Relaxed);
    }

    /// Records the end of a request, which counts as `weight` requests in the histograms.
    pub fn end(&self, span: &Span, ended: Ended, weight: u32) {
        if weight > 0 {
            for (stage, ns) in span.stages() {
                self.stages[stage as usize].record(ns, weight.into());
            }
        }
        if self.is_followed() {
            self.tell(span, ended);
        }
    }

    fn tell(&self, span: &Span, ended: Ended) {
        self.change(|followers| {
            if let Some(recorder) = &followers.recorder {
                recorder.record(span, &ended);
            }
            followers.collectors.retain(Collector::is_wanted);
            for collector in &followers.collectors {
                collector.collect(span, &ended);
            }
            if followers.lines.is_empty() {
                return;
            }
            let request = span.traced(ended);
            followers.lines.retain(|follower| {
                // A follower with a full queue misses this request and stays.
                !matches!(follower.try_send(request.clone()), Err(TrySendError::Closed(_)))
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended() -> Ended {
        Ended { command: "read", offset: 0, length_bytes: 512, at_once: true, error: None }
    }

    #[test]
    fn durations_fall_into_the_bucket_of_the_next_power_of_two() {
        let histogram = Histogram::default();
        for ns in [0, 999, 1_000, 1_999, 2_000, 4_000_000_000, u64::MAX / 4] {
            histogram.record(ns, 1);
        }
        let counts = histogram.counts();
        assert_eq!((counts[0], counts[1], counts[2]), (2, 2, 1));
        assert_eq!((counts[22], counts[BUCKETS - 1]), (1, 1));
    }

    #[tokio::test]
    async fn a_stage_is_measured_in_another_thread_too() {
        let span = Span::new(Instant::now());
        let work = async {
            let measured = carry(|| {
                let _timer = stage(Stage::Write);
                std::thread::sleep(std::time::Duration::from_millis(1));
            });
            tokio::task::spawn_blocking(measured).await.expect("the work");
        };
        span.follow(work).await;
        let stages: Vec<_> = span.stages().collect();
        assert!(matches!(stages[..], [(Stage::Write, 1_000_000..)]), "{stages:?}");
    }

    #[test]
    fn without_a_span_nothing_is_measured() {
        assert!(stage(Stage::Write).is_none());
        assert!(carry(|| stage(Stage::Map).is_none())());
    }

    #[test]
    fn a_sampled_request_counts_as_many() {
        let tracing = Tracing::default();
        let span = Span::new(Instant::now());
        span.enter(|| {
            let _timer = stage(Stage::HeadRead);
            std::thread::sleep(std::time::Duration::from_micros(10));
        });
        tracing.end(&span, ended(), 64);
        let read = tracing.histograms().find(|(stage, _)| *stage == Stage::HeadRead);
        let (_, histogram) = read.expect("the stage");
        assert_eq!(histogram.counts().iter().sum::<u64>(), 64);
    }

    #[test]
    fn who_follows_hears_of_each_request_until_they_go() {
        let tracing = Tracing::default();
        assert!(!tracing.is_followed());
        let mut follower = tracing.follow();
        assert!(tracing.is_followed());
        tracing.end(&Span::new(Instant::now()), ended(), 0);
        assert_eq!(follower.try_recv().expect("a request").command, "read");
        drop(follower);
        tracing.end(&Span::new(Instant::now()), ended(), 0);
        assert!(!tracing.is_followed());
    }
}
