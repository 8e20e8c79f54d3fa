//! Simulated jobs with known times: each runs in a small simulator at two distances, and the trace of one run
//! must predict the time of the other.

use proptest::prelude::*;

use super::*;

const DATA: u16 = 0;

/// A small random generator with a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % limit
    }
}

/// The next step of a thread. Times are in microseconds.
#[derive(Debug, Clone)]
enum Do {
    Think(f64),
    /// A random read that the thread waits for.
    Read(u64),
    /// A file of this many windows that the kernel reads ahead; the thread works on each for this long.
    Scan {
        offset: u64,
        windows: u64,
        work_us: f64,
    },
    /// Random reads with this many in flight; the thread works on each answer for this long.
    Deep {
        offset: u64,
        reads: u64,
        depth: usize,
        work_us: f64,
    },
    /// Writes one after the other, as a database log has them, each with its flush.
    Log {
        offset: u64,
        writes: u64,
    },
}

const WINDOW: u32 = 128 << 10;

struct Disk {
    /// With the proxy of the VM's host before it.
    proxy: Option<(Proxy, Memory)>,
    /// The latency at the disk's home, with a little noise that is the same at each distance.
    service_us: f64,
    round_trip_us: f64,
    requests: Vec<Request>,
}

impl Disk {
    fn ask(&mut self, kind: Kind, offset: u64, length_bytes: u32, at_us: f64) -> f64 {
        let uneven = (offset / 4096 % 7) as f64 / 7.0;
        let own_us = self.service_us * (0.5 + uneven);
        let answered_us = at_us + own_us + self.round_trip_us;
        let (disk, held_us) = (DATA, 0.0);
        let mut request = Request { disk, kind, offset, length_bytes, at_us, answered_us, held_us };
        if let Some((proxy, memory)) = &mut self.proxy {
            request.answered_us = match kind {
                Kind::Read => proxy.read(memory, &request, at_us, own_us),
                Kind::Write => proxy.write(memory, &request, at_us, own_us),
                Kind::Flush => proxy.ask(0.0, at_us, own_us),
            };
        }
        self.requests.push(request);
        request.answered_us
    }

    fn act(&mut self, act: &Do, start_us: f64) -> f64 {
        let mut now_us = start_us;
        match act {
            Do::Think(us) => now_us += us,
            Do::Read(offset) => now_us = self.ask(Kind::Read, *offset, 4096, now_us),
            Do::Scan { offset, windows, work_us } => {
                let place = |window: u64| offset + window * u64::from(WINDOW);
                let mut came_us = self.ask(Kind::Read, place(0), WINDOW, now_us);
                for window in 0..*windows {
                    if window > 0 {
                        // The reader reaches this window: the next one is issued, and then the reader waits.
                        now_us = now_us.max(start_us);
                    } else {
                        now_us = came_us;
                    }
                    let next_us = (window + 1 < *windows)
                        .then(|| self.ask(Kind::Read, place(window + 1), WINDOW, now_us));
                    now_us = now_us.max(came_us) + work_us;
                    came_us = next_us.unwrap_or(came_us);
                }
            }
            Do::Deep { offset, reads, depth, work_us } => {
                let place = |read: u64| offset + (read * 7919 % 100_000) * (1 << 20);
                let mut in_flight = std::collections::VecDeque::new();
                for read in 0..*reads {
                    if in_flight.len() == *depth {
                        let came_us: f64 = in_flight.pop_front().unwrap();
                        now_us = now_us.max(came_us) + work_us;
                    }
                    in_flight.push_back(self.ask(Kind::Read, place(read), 4096, now_us));
                }
                for came_us in in_flight {
                    now_us = now_us.max(came_us) + work_us;
                }
            }
            Do::Log { offset, writes } => {
                for write in 0..*writes {
                    now_us = self.ask(Kind::Write, offset + write * 4096, 4096, now_us);
                    now_us = self.ask(Kind::Flush, 0, 0, now_us);
                    now_us += 50.0;
                }
            }
        }
        now_us
    }
}

/// Runs threads in parallel at a distance; returns the requests in order and the total time.
fn run(threads: &[Vec<Do>], round_trip_us: f64) -> (Vec<Request>, f64) {
    run_with(threads, round_trip_us, None)
}

/// Runs one thread behind a proxy, whose requests have to be in order.
fn run_far(thread: &[Do], way: Way) -> f64 {
    run_with(&[thread.to_vec()], 0.0, Some((Proxy::new(way), Memory::default()))).1
}

fn run_with(
    threads: &[Vec<Do>],
    round_trip_us: f64,
    proxy: Option<(Proxy, Memory)>,
) -> (Vec<Request>, f64) {
    let mut disk = Disk { proxy, service_us: 100.0, round_trip_us, requests: Vec::new() };
    let mut end_us: f64 = 0.0;
    for thread in threads {
        let mut now_us = 0.0;
        for act in thread {
            now_us = disk.act(act, now_us);
        }
        end_us = end_us.max(now_us);
    }
    disk.requests.sort_by(|a, b| a.at_us.total_cmp(&b.at_us));
    (disk.requests, end_us)
}

fn way(round_trip_us: f64) -> [Way; 1] {
    [Way { round_trip_us, ..Way::default() }]
}

/// The error of the replay from one distance to another, as a share of the true time.
fn error(threads: &[Vec<Do>], from_us: f64, to_us: f64) -> f64 {
    let (requests, end_us) = run(threads, from_us);
    let replay = Replay::new(&requests, end_us);
    let truth_us = run(threads, to_us).1;
    replay.through(&way(from_us), &way(to_us)) * 1e6 / truth_us - 1.0
}

#[track_caller]
fn assert_within(threads: &[Vec<Do>], from_us: f64, to_us: f64, limit: f64) {
    let error = error(threads, from_us, to_us);
    assert!(error.abs() <= limit, "from {from_us} to {to_us} us: an error of {error}");
}

fn serial(random: &mut Random, reads: u64) -> Vec<Do> {
    let read = |_| {
        let think_us = random.below(3000) as f64;
        [Do::Think(think_us), Do::Read(random.below(1 << 24) * 8192)]
    };
    (0..reads).flat_map(read).collect()
}

#[test]
fn reads_one_after_the_other_are_exact() {
    let job = [serial(&mut Random(7), 2000)];
    for (from_us, to_us) in [(0.0, 16_000.0), (4_000.0, 16_000.0), (16_000.0, 0.0)] {
        assert_within(&job, from_us, to_us, 1e-9);
    }
}

#[test]
fn reads_of_other_disks_are_no_round_trips() {
    let (mut requests, end_us) = run(&[serial(&mut Random(7), 200)], 0.0);
    let round_trips =
        |requests: &[Request]| Replay::new(requests, end_us).far(&[true, false]).round_trips;
    assert!((round_trips(&requests) - 200.0).abs() < 1e-6);
    requests.iter_mut().step_by(2).for_each(|request| request.disk = 1);
    assert!((round_trips(&requests) - 100.0).abs() < 1e-6);
}

#[test]
fn a_stream_that_is_read_ahead_is_exact() {
    for work_us in [10.0, 1_000.0, 20_000.0] {
        let job = [vec![Do::Scan { offset: 0, windows: 500, work_us }]];
        for to_us in [1_000.0, 4_000.0, 16_000.0] {
            assert_within(&job, 0.0, to_us, 0.005);
        }
    }
}

#[test]
fn what_follows_a_stream_waits_for_its_end() {
    let scan = |number: u64| Do::Scan { offset: number << 32, windows: 40, work_us: 500.0 };
    let job = [vec![scan(0), Do::Read(1 << 50), scan(1), Do::Think(5e5), scan(2), Do::Read(0)]];
    assert_within(&job, 0.0, 16_000.0, 0.04);
}

#[test]
fn a_depth_that_the_trace_shows_is_exact() {
    let job = [vec![Do::Deep { offset: 0, reads: 4000, depth: 8, work_us: 100.0 }]];
    assert_within(&job, 4_000.0, 16_000.0, 0.02);
    assert_within(&job, 16_000.0, 4_000.0, 0.02);
}

#[test]
fn a_depth_that_a_local_trace_hides_is_replayed_as_too_long_and_never_as_too_short() {
    let job = [vec![Do::Deep { offset: 0, reads: 4000, depth: 8, work_us: 100.0 }]];
    let error = error(&job, 0.0, 16_000.0);
    assert!(error > 1.0, "it is {error}: then the range of a prediction can be narrower");
}

#[test]
fn a_log_with_flushes_waits_for_each() {
    let job = [vec![Do::Log { offset: 1 << 40, writes: 1000 }]];
    assert_within(&job, 0.0, 16_000.0, 1e-9);
}

#[test]
fn several_threads_are_seen_where_windows_are_issued_while_another_waits() {
    let mut random = Random(99);
    let scan = vec![Do::Scan { offset: 1 << 45, windows: 500, work_us: 4_000.0 }];
    let both = [serial(&mut random, 800), scan.clone()];
    let (requests, end_us) = run(&both, 4_000.0);
    assert!(Replay::new(&requests, end_us).has_several_threads());
    let (requests, end_us) = run(&[scan], 4_000.0);
    assert!(!Replay::new(&requests, end_us).has_several_threads());
}

/// Measured here and stated: the rule makes several threads wait for each other although they do not.
#[test]
fn several_threads_are_near() {
    let mut random = Random(3);
    let two = [serial(&mut random, 1000), serial(&mut random, 1000)];
    assert_within(&two, 4_000.0, 8_000.0, 0.15);
    assert_within(&two, 8_000.0, 4_000.0, 0.15);
    let scan = vec![Do::Scan { offset: 1 << 45, windows: 600, work_us: 3_000.0 }];
    let both = [serial(&mut random, 400), scan];
    assert_within(&both, 4_000.0, 8_000.0, 0.15);
}

/// A workload that was not used to find the rules, a build. It walks a tree, reads whole files of many sizes,
/// computes, and writes its results with a flush from time to time.
#[test]
fn a_held_out_workload_is_predicted_at_greater_distances() {
    let job = [build()];
    for (from_us, to_us) in [(0.0, 16_000.0), (0.0, 4_000.0), (4_000.0, 16_000.0)] {
        assert_within(&job, from_us, to_us, 0.06);
    }
    // For shorter distances a job is predicted from its counters instead: see `learn`.
    assert!(error(&job, 16_000.0, 0.0) > 0.06);
}

fn build() -> Vec<Do> {
    let mut random = Random(20_261_122);
    let mut job = Vec::new();
    for file in 0..300 {
        for _ in 0..random.below(4) {
            job.push(Do::Read(random.below(1 << 20) << 12));
        }
        let (windows, work_us) = (1 + random.below(12), random.below(2_000) as f64);
        job.push(Do::Scan { offset: (file + 1) << 34, windows, work_us });
        job.push(Do::Think(random.below(40_000) as f64));
        if file % 10 == 0 {
            job.push(Do::Log { offset: 1 << 50, writes: 1 + random.below(4) });
        }
    }
    job
}

#[test]
fn bytes_take_their_time_on_a_thin_link() {
    let job = [vec![Do::Scan { offset: 0, windows: 100, work_us: 10.0 }]];
    let (requests, end_us) = run(&job, 0.0);
    let thin = [Way { round_trip_us: 1_000.0, us_per_byte: 0.1, through_proxy: false }];
    let seconds = Replay::new(&requests, end_us).through(&way(0.0), &thin);
    let bytes_s = 100.0 * f64::from(WINDOW) * 0.1 / 1e6;
    assert!((bytes_s..1.2 * bytes_s).contains(&seconds), "{seconds}, the bytes alone {bytes_s}");
}

fn far(round_trip_us: f64, us_per_byte: f64) -> Way {
    Way { round_trip_us, us_per_byte, through_proxy: true }
}

/// The replay of a local trace through the proxy, as a share of the true time there.
fn far_ratio(thread: &[Do], way: Way) -> f64 {
    let (requests, end_us) = run(&[thread.to_vec()], 0.0);
    Replay::new(&requests, end_us).through(&[], &[way]) * 1e6 / run_far(thread, way)
}

#[test]
fn a_stream_over_a_proxy_waits_for_few_round_trips() {
    let job = [Do::Scan { offset: 0, windows: 2000, work_us: 1_000.0 }];
    let (requests, end_us) = run(&[job.to_vec()], 0.0);
    let shown = Replay::new(&requests, end_us).far(&[true]);
    assert!(shown.round_trips < 40.0, "{shown:?}");
    assert!(shown.sent_bytes < 1.1 * 2000.0 * f64::from(WINDOW), "{shown:?}");
    for us_per_byte in [0.0, 0.008, 0.02] {
        let ratio = far_ratio(&job, far(16_000.0, us_per_byte));
        assert!((0.97..1.03).contains(&ratio), "{us_per_byte}: {ratio}");
    }
}

#[test]
fn what_was_read_once_is_in_memory() {
    let scan = |work_us| Do::Scan { offset: 1 << 30, windows: 500, work_us };
    let job = [scan(100.0), scan(100.0), scan(100.0)];
    let (requests, end_us) = run(&[job.to_vec()], 0.0);
    let shown = Replay::new(&requests, end_us).far(&[true]);
    assert!(shown.sent_bytes < 1.3 * 500.0 * f64::from(WINDOW), "{shown:?}");
    let once = Replay::new(&requests[..500], end_us / 3.0).far(&[true]);
    assert!((shown.round_trips - once.round_trips).abs() < 3.0, "{shown:?} {once:?}");
}

#[test]
fn more_than_the_memory_is_fetched_again() {
    // 768 MiB, twice.
    let scan = Do::Scan { offset: 0, windows: 6144, work_us: 100.0 };
    let (requests, end_us) = run(&[vec![scan.clone(), scan]], 0.0);
    let shown = Replay::new(&requests, end_us).far(&[true]);
    assert!(shown.sent_bytes > 1.9 * 6144.0 * f64::from(WINDOW), "{shown:?}");
}

/// A workload that was not used to find the rules: the build of below, behind a proxy.
#[test]
fn a_held_out_workload_is_predicted_over_a_proxy() {
    let job = build();
    for (round_trip_us, us_per_byte) in [(16_000.0, 0.0), (4_000.0, 0.008), (16_000.0, 0.08)] {
        let ratio = far_ratio(&job, far(round_trip_us, us_per_byte));
        assert!((0.94..1.06).contains(&ratio), "{round_trip_us} us: {ratio}");
    }
}

#[test]
fn nothing_is_nothing() {
    assert!((Replay::new(&[], 5e6).through(&[], &way(1e4)) - 5.0).abs() < 1e-9);
}

/// Doubling the trace doubles the work: the heap holds only the requests in flight.
#[test]
fn what_is_kept_does_not_grow_with_the_trace() {
    let (requests, _) = run(&[serial(&mut Random(5), 20_000)], 1_000.0);
    let mut tracer = Tracer::default();
    for index in 0..requests.len() {
        tracer.cause(&requests, index);
        assert!(tracer.in_flight.len() <= 2);
    }
}

fn any_requests() -> impl Strategy<Value = Vec<Request>> {
    let request = (0u16..2, 0u8..8, 0u64..64, 1u32..3, 0.0..2_000.0f64, 0.0..20_000.0f64);
    proptest::collection::vec(request, 0..200).prop_map(|requests| {
        let mut now_us = 0.0;
        let request = |(disk, kind, place, length, gap_us, took_us)| {
            now_us += gap_us;
            Request {
                disk,
                kind: match kind {
                    0 => Kind::Flush,
                    1 | 2 => Kind::Write,
                    _ => Kind::Read,
                },
                offset: place * 65_536,
                length_bytes: length * 65_536,
                at_us: now_us,
                answered_us: now_us + took_us,
                held_us: 0.0,
            }
        };
        requests.into_iter().map(request).collect()
    })
}

proptest! {
    #[test]
    fn at_its_own_distance_a_trace_takes_the_time_it_took(requests in any_requests()) {
        let end_us = requests.last().map_or(0.0, |r| r.at_us) + 50_000.0;
        let seconds = Replay::new(&requests, end_us).through(&way(0.0), &way(0.0));
        prop_assert!((seconds * 1e6 - end_us).abs() < 1e-3, "{} is not {}", seconds, end_us);
    }

    #[test]
    fn longer_latencies_never_make_it_shorter(
        requests in any_requests(),
        near_us in 0.0..50_000.0f64,
        more_us in 0.0..50_000.0f64,
    ) {
        let end_us = requests.last().map_or(0.0, |r| r.at_us) + 50_000.0;
        let replay = Replay::new(&requests, end_us);
        let ways = |us: f64| [Way { round_trip_us: us, us_per_byte: 0.001, through_proxy: false }; 2];
        let near = replay.through(&[], &ways(near_us));
        prop_assert!(replay.through(&[], &ways(near_us + more_us)) >= near - 1e-9);
        prop_assert!(near * 1e6 >= end_us - 1e-3);
    }

    #[test]
    fn over_a_proxy_it_is_never_shorter_than_at_home(
        requests in any_requests(), round_trip_us in 0.0..50_000.0f64, us_per_byte in 0.0..0.1f64,
    ) {
        let end_us = requests.last().map_or(0.0, |r| r.at_us) + 50_000.0;
        let replay = Replay::new(&requests, end_us);
        let seconds = replay.through(&[], &[far(round_trip_us, us_per_byte); 2]);
        prop_assert!(seconds * 1e6 >= end_us - 1e-3);
        let shown = replay.far(&[true, true]);
        prop_assert!(shown.waited_bytes <= shown.sent_bytes && shown.round_trips.is_finite());
    }

    #[test]
    fn serial_jobs_are_exact_at_every_distance(
        seed in 1u64..u64::MAX, reads in 1u64..200, from_us in 0.0..20_000.0f64, to_us in 0.0..20_000.0f64,
    ) {
        let job = [serial(&mut Random(seed), reads)];
        prop_assert!(error(&job, from_us, to_us).abs() < 1e-9);
    }
}
