//! What the kernel says of the load of the host and of a VM's vCPUs. What can't be read, or is nonsense, is not known.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};
use perigee_model::load::{HostPressure, Pressure, StalledTime, VcpuUse};

/// How often the vCPUs of a VM are looked at.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The least and the most time over which their use is a mean.
const WINDOW_MIN: Duration = Duration::from_secs(10);
const WINDOW: Duration = Duration::from_secs(60);

/// More samples are never kept.
const SAMPLES_MAX: usize = 16;

/// The times of a process's vCPU threads since they started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VcpuTimes {
    /// On a CPU, all threads together.
    pub running_ns: u64,
    /// Ready to run and without a CPU, all threads together.
    pub waiting_ns: u64,
    /// The same of the thread that has waited longest.
    pub longest_waiting_ns: u64,
}

impl VcpuTimes {
    /// From the `schedstat` of each thread; `None` if one is not as expected, or if there is none.
    pub fn of_threads(schedstats: impl Iterator<Item = String>) -> Option<Self> {
        let (mut all, mut is_any) = (Self::default(), false);
        for text in schedstats {
            let (running_ns, waiting_ns) = thread_times(&text)?;
            all.running_ns = all.running_ns.checked_add(running_ns)?;
            all.waiting_ns = all.waiting_ns.checked_add(waiting_ns)?;
            all.longest_waiting_ns = all.longest_waiting_ns.max(waiting_ns);
            is_any = true;
        }
        is_any.then_some(all)
    }
}

/// A thread's time on a CPU and its time waiting for one, in ns, of `running waiting slices`. A kernel without scheduler statistics
/// says `0 0 0`. A thread that is there has run.
fn thread_times(schedstat: &str) -> Option<(u64, u64)> {
    let figures: Option<Vec<u64>> =
        schedstat.split_whitespace().map(|word| word.parse().ok()).collect();
    match figures?.as_slice() {
        [_, _, 0] => None,
        [running_ns, waiting_ns, _] => Some((*running_ns, *waiting_ns)),
        _ => None,
    }
}

/// What the vCPUs of one QEMU did in the last minute, from samples of their times.
#[derive(Debug, Default)]
pub struct LastMinute {
    samples: VecDeque<(Instant, VcpuTimes)>,
}

impl LastMinute {
    /// Takes what was seen at this moment. Times that are not known, or that went back, are of another QEMU, or of other threads:
    /// what was seen before them does not count.
    pub fn take(&mut self, at: Instant, times: Option<VcpuTimes>) {
        let Some(times) = times else {
            self.samples.clear();
            return;
        };
        let went_back = |(_, last): &(Instant, VcpuTimes)| {
            times.running_ns < last.running_ns || times.waiting_ns < last.waiting_ns
        };
        if self.samples.back().is_some_and(went_back) {
            self.samples.clear();
        }
        self.samples.push_back((at, times));
        // The oldest one is as old as the window, or the first one.
        let is_old = |sample: Option<&(Instant, VcpuTimes)>| {
            sample.is_some_and(|(then, _)| at.saturating_duration_since(*then) >= WINDOW)
        };
        while is_old(self.samples.get(1)) || self.samples.len() > SAMPLES_MAX {
            self.samples.pop_front();
        }
    }

    /// The means; `None` if the vCPUs were not looked at for long enough.
    pub fn vcpus(&self) -> Option<VcpuUse> {
        let ((begun, first), (ended, last)) = (self.samples.front()?, self.samples.back()?);
        let window = ended.saturating_duration_since(*begun);
        if window < WINDOW_MIN {
            return None;
        }
        let vcpus = |first_ns: u64, last_ns: u64| {
            Duration::from_nanos(last_ns.saturating_sub(first_ns)).as_secs_f64()
                / window.as_secs_f64()
        };
        Some(VcpuUse {
            running_vcpus: vcpus(first.running_ns, last.running_ns),
            waiting_vcpus: vcpus(first.waiting_ns, last.waiting_ns),
        })
    }
}

/// How long the CPUs that the agent may use were used since the boot, by all programs of the machine. `None` if the agent has a share of their
/// time only (a quota of its cgroup).
pub fn cpu_times() -> Option<VcpuTimes> {
    let mine = sched_getaffinity(Pid::from_raw(0)).ok()?;
    // Of a share of the CPUs' time nobody knows how much of it others take.
    let may_use = std::thread::available_parallelism().ok()?.get();
    let listed = (0..CpuSet::count()).filter(|cpu| mine.is_set(*cpu).unwrap_or(false)).count();
    if may_use != listed {
        return None;
    }
    let ticks_per_s = sysconf(SysconfVar::CLK_TCK).ok()??;
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let is_mine = |cpu: usize| mine.is_set(cpu).unwrap_or(false);
    used_ns(&stat, is_mine, u64::try_from(ticks_per_s).ok()?)
        .map(|running_ns| VcpuTimes { running_ns, ..VcpuTimes::default() })
}

/// From `/proc/stat` (proc(5)): `cpu0 user nice system idle iowait irq softirq steal guest guest_nice`. `user` and `nice` have the time
/// of guests in them. The kernel sometimes lets `iowait` go back, which is no time in use.
fn used_ns(stat: &str, is_mine: impl Fn(usize) -> bool, ticks_per_s: u64) -> Option<u64> {
    let (mut all, mut is_any) = (0_u64, false);
    for line in stat.lines() {
        let mut words = line.split_whitespace();
        let cpu = words.next().and_then(|word| word.strip_prefix("cpu")?.parse().ok());
        if !cpu.is_some_and(&is_mine) {
            continue;
        }
        let ticks: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = ticks.as_slice() else {
            return None;
        };
        for used in [user, nice, system, irq, softirq, steal] {
            all = all.checked_add(*used)?;
        }
        is_any = true;
    }
    is_any.then(|| all.checked_mul(1_000_000_000 / ticks_per_s.max(1))).flatten()
}

/// What the host's tasks wait for now.
pub fn pressure() -> HostPressure {
    let read = |resource: &str| {
        let text = std::fs::read_to_string(format!("/proc/pressure/{resource}")).ok()?;
        parse_pressure(&text)
    };
    HostPressure { cpu: read("cpu"), memory: read("memory"), io: read("io") }
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and the same with `full`.
fn parse_pressure(text: &str) -> Option<Pressure> {
    let line = |kind: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(word, _)| *word == kind).map(|(_, figures)| figures)
    };
    let full = match line("full") {
        Some(figures) => Some(parse_stalled(figures)?),
        None => None,
    };
    Some(Pressure { some: parse_stalled(line("some")?)?, full })
}

fn parse_stalled(figures: &str) -> Option<StalledTime> {
    let figure = |name: &str| {
        let mut words = figures.split_whitespace().filter_map(|word| word.split_once('='));
        words.find(|(word, _)| *word == name).map(|(_, value)| value)
    };
    let share = |name: &str| {
        let percent: f64 = figure(name)?.parse().ok()?;
        (0.0..=100.0).contains(&percent).then_some(percent / 100.0)
    };
    Some(StalledTime {
        share_10s: share("avg10")?,
        share_60s: share("avg60")?,
        total_us: figure("total")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use nix::sched::sched_setaffinity;
    use nix::unistd::gettid;

    use super::*;
    use crate::process::Process;

    fn times(running_s: u64, waiting_s: u64) -> Option<VcpuTimes> {
        let [running_ns, waiting_ns] = [running_s, waiting_s].map(|s| s * 1_000_000_000);
        Some(VcpuTimes { running_ns, waiting_ns, longest_waiting_ns: waiting_ns })
    }

    fn of_threads(texts: &[&str]) -> Option<VcpuTimes> {
        VcpuTimes::of_threads(texts.iter().map(|text| (*text).to_owned()))
    }

    #[test]
    fn the_times_of_threads_are_added_up_and_the_longest_wait_stands_alone() {
        let added = of_threads(&["484468 112142 2\n", "1000 7 1\n"]);
        let expected =
            VcpuTimes { running_ns: 485_468, waiting_ns: 112_149, longest_waiting_ns: 112_142 };
        assert_eq!(added, Some(expected));
    }

    #[test]
    fn what_a_kernel_does_not_tell_of_threads_is_not_known() {
        // The first is a kernel without scheduler statistics.
        for text in ["0 0 0\n", "", "1 2", "1 2 3 4", "-1 2 3", "1 x 3", "18446744073709551616 1 1"]
        {
            assert_eq!(of_threads(&["484468 112142 2\n", text]), None, "{text:?}");
        }
        assert_eq!(of_threads(&[]), None);
    }

    #[test]
    fn the_last_minute_is_a_mean_over_a_minute_and_keeps_no_more_samples() {
        let (begun, mut minute) = (Instant::now(), LastMinute::default());
        // 1 vCPU runs all the time; from second 300 on another one waits.
        for s in (0..=360).step_by(5) {
            minute.take(begun + Duration::from_secs(s), times(s, s.saturating_sub(300)));
        }
        let mean = minute.vcpus().expect("it was looked at for a minute");
        assert!((mean.running_vcpus - 1.0).abs() < 1e-9, "{mean:?}");
        assert!((mean.waiting_vcpus - 1.0).abs() < 1e-9, "{mean:?}");
        assert!(minute.samples.len() <= SAMPLES_MAX);
    }

    #[test]
    fn the_cpus_in_use_are_those_that_the_agent_may_use_and_nonsense_is_not_known() {
        let stat = "cpu  30 0 30 300 0 0 0 0 0 0\n\
            cpu0 10 1 2 300 40 3 4 5 6 7\ncpu1 100 0 0 0 0 0 0 0 0 0\nintr 7 0\n";
        let ms = |stat: &str, cpu| used_ns(stat, |id| id == cpu, 100).map(|ns| ns / 1_000_000);
        assert_eq!((ms(stat, 0), ms(stat, 1)), (Some(250), Some(1000)));
        assert_eq!(ms(stat, 2), None, "no such CPU");
        assert_eq!(ms("cpu0 1 2 3\n", 0), None, "too few figures");
        assert_eq!(ms("cpu0 1 2 x 4 5 6 7 8\n", 0), None);
        assert_eq!(ms("cpu0 18446744073709551615 0 1 0 0 0 0 0\n", 0), None);
        let now = cpu_times().expect("a machine with /proc/stat");
        assert!(now.running_ns > 0);
    }

    #[test]
    fn what_was_not_looked_at_for_long_enough_is_not_known() {
        let (begun, mut minute) = (Instant::now(), LastMinute::default());
        assert_eq!(minute.vcpus(), None);
        minute.take(begun, times(0, 0));
        minute.take(begun + Duration::from_secs(5), times(5, 0));
        assert_eq!(minute.vcpus(), None);
        minute.take(begun + Duration::from_secs(10), times(10, 0));
        assert!(minute.vcpus().is_some());
        minute.take(begun + Duration::from_secs(15), None);
        assert_eq!(minute.vcpus(), None, "the kernel does not tell any more");
    }

    #[test]
    fn a_qemu_that_was_started_anew_begins_its_minute_anew() {
        let (begun, mut minute) = (Instant::now(), LastMinute::default());
        for s in [0, 10, 20] {
            minute.take(begun + Duration::from_secs(s), times(100 + s, 50));
        }
        minute.take(begun + Duration::from_secs(30), times(1, 0));
        assert_eq!(minute.vcpus(), None);
    }

    #[test]
    fn pressure_is_read_as_shares_of_the_time() {
        let text = "some avg10=87.17 avg60=47.71 avg300=32.40 total=19547636270\n\
            full avg10=0.50 avg60=0.00 avg300=0.00 total=7\n";
        let pressure = parse_pressure(text).expect("a pressure");
        assert!((pressure.some.share_10s - 0.8717).abs() < 1e-9);
        assert!((pressure.some.share_60s - 0.4771).abs() < 1e-9);
        assert_eq!(pressure.some.total_us, 19_547_636_270);
        assert!(pressure.full.is_some_and(|full| full.total_us == 7 && full.share_60s == 0.0));
        // Linux before 5.13 has no `full` for the CPU.
        let some_alone = text.lines().next().expect("a line");
        assert_eq!(parse_pressure(some_alone).expect("a pressure").full, None);
    }

    #[test]
    fn nonsense_is_no_pressure_of_zero() {
        let some = |figures: &str| parse_pressure(&format!("some {figures}\n"));
        assert!(some("avg10=1.00 avg60=1.00 avg300=1.00 total=1").is_some());
        for figures in [
            "avg10=NaN avg60=1.00 avg300=1.00 total=1",
            "avg10=1.00 avg60=100.01 avg300=1.00 total=1",
            "avg10=-1.00 avg60=1.00 avg300=1.00 total=1",
            "avg10=1.00 avg300=1.00 total=1",
            "avg10=1.00 avg60=1.00 avg300=1.00 total=-1",
            "avg10=1.00 avg60=1.00 avg300=1.00",
            "",
        ] {
            assert_eq!(some(figures), None, "{figures:?}");
        }
        assert_eq!(parse_pressure(""), None);
        assert_eq!(parse_pressure("full avg10=1.00 avg60=1.00 avg300=1.00 total=1"), None);
    }

    /// The first CPU that this process may use.
    fn one_cpu() -> CpuSet {
        let all = sched_getaffinity(Pid::from_raw(0)).expect("the CPUs of this process");
        let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu).unwrap_or(false));
        let mut one = CpuSet::new();
        one.set(first.expect("a CPU")).expect("a set of CPUs");
        one
    }

    /// What the kernel counts for this thread, in ns.
    fn own_wait_ns() -> u64 {
        let text = std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", gettid()));
        thread_times(&text.expect("the schedstat of this thread")).map_or(0, |(_, waiting)| waiting)
    }

    #[test]
    fn threads_that_share_one_cpu_starve_as_the_kernel_counts_it() {
        let own = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
        if thread_times(&own).is_none() {
            eprintln!("this kernel has no scheduler statistics");
            return;
        }
        let cpu = one_cpu();
        let ends = AtomicBool::new(false);
        let me = Process::of_pid(std::process::id()).expect("this process");
        let compute = || {
            sched_setaffinity(Pid::from_raw(0), &cpu).expect("a CPU that this process may use");
            while !ends.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            own_wait_ns()
        };
        let (seen, counted_ns) = std::thread::scope(|scope| {
            // As QEMU names its vCPU threads.
            let names = ["CPU 0/TCG", "CPU 1/TCG"].map(str::to_owned);
            let threads = names.map(|name| {
                let thread = std::thread::Builder::new().name(name);
                thread.spawn_scoped(scope, compute).expect("a thread")
            });
            let deadline = Instant::now() + Duration::from_secs(60);
            let seen = loop {
                let seen = me.vcpu_times().unwrap_or_default();
                // Both have waited: one that was alone would wait for nothing.
                if seen.waiting_ns > 50_000_000 && seen.waiting_ns > seen.longest_waiting_ns {
                    break Some(seen);
                }
                if Instant::now() > deadline {
                    break None;
                }
                std::thread::sleep(Duration::from_millis(10));
            };
            ends.store(true, Ordering::Relaxed);
            (seen, threads.map(|thread| thread.join().expect("no panic")))
        });
        let seen = seen.expect("in 60 s two threads on one CPU have waited 50 ms for it");
        assert!(seen.waiting_ns <= counted_ns.iter().sum(), "{seen:?}, then {counted_ns:?}");
        assert!(seen.longest_waiting_ns <= counted_ns.into_iter().max().unwrap_or(0), "{seen:?}");
    }
}
