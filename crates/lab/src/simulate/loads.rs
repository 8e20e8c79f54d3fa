//! What VMs want: processors, and for how long.
//!
//! | generator | statistics | source |
//! |---|---|---|
//! | [`job_s`] | most jobs are short, and the longest tenth runs for most of the time | none: a Pareto distribution |
//! | [`borg_s`] | the largest 1 % of the jobs use 99 % of the CPU time; the tail is a Pareto distribution with the shape 0.69 | Tirmazi and others, Borg: the Next Generation, EuroSys 2020 |
//! | [`azure_s`] | 34 % of the VMs live for at most 15 minutes, 61 % for an hour, 93 % for a day, 95 % for 50 hours, 97 % for 200 hours | Cortez and others, Resource Central, SOSP 2017; of 15 minutes: the trace that is public since then |
//!
//! `docs/dev/balance.md` says which figure was checked against what.

use std::time::Duration;

use crate::random::Random;

/// How the loads of a scenario change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Each VM wants the same all the time.
    Steady,
    /// Each VM wants something else every 30 s.
    Noise,
    /// Half of the VMs want much for 5 minutes, and then the other half.
    Square,
    /// Every 2 hours the VMs of another group want much.
    Shifting,
    /// In a day each VM wants more, and less again, with its own noon.
    Day,
    /// All VMs of a host want too much for 20 s, about twice in an hour, whichever VMs are there.
    Bursts,
    /// It knows the rule: a VM that moved wants little, and 10 minutes later much.
    Adversary,
    /// It knows the rule better: the VMs want too much wherever one came last, and nearly nothing elsewhere.
    Hunter,
}

const KINDS: [(&str, Kind); 8] = [
    ("steady", Kind::Steady),
    ("noise", Kind::Noise),
    ("square", Kind::Square),
    ("shifting", Kind::Shifting),
    ("day", Kind::Day),
    ("bursts", Kind::Bursts),
    ("adversary", Kind::Adversary),
    ("hunter", Kind::Hunter),
];

impl Kind {
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = KINDS.iter().find(|(name, _)| *name == text).map(|(_, kind)| *kind);
        found.ok_or_else(|| format!("it is one of {}", KINDS.map(|(name, _)| name).join(", ")))
    }
}

/// What a load depends on.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub now_s: u64,
    /// The VM's number, and how many groups there are.
    pub vm: usize,
    pub groups: usize,
    /// When the VM moved last; `None` if it never did.
    pub moved_s: Option<u64>,
    /// Where the VM is, and the host where a VM has come last.
    pub host: usize,
    pub hunted: usize,
}

/// The processors that the VM wants now, and until when. `base` is what the VM wants by itself, `seed` the scenario's.
pub fn wanted(kind: Kind, base: f64, seed: u64, at: Moment) -> (f64, u64) {
    let Moment { now_s, vm, .. } = at;
    let mixed = |part: u64| Random(seed ^ ((vm as u64) << 32) ^ part.wrapping_mul(0x9e37_79b9));
    let next = |every_s: u64| (now_s / every_s + 1) * every_s;
    let group = (vm % at.groups) as u64;
    let is_even = |number: u64| number.is_multiple_of(2);
    match kind {
        Kind::Steady => (base, u64::MAX),
        Kind::Noise => {
            let times = mixed(now_s / 30).pick(&[0.3, 0.6, 1.0, 1.6, 2.5]).copied();
            (base * times.unwrap_or(1.0), next(30))
        }
        Kind::Square => {
            let busy = is_even(now_s / 300 + vm as u64);
            (base * if busy { 2.2 } else { 0.3 }, next(300))
        }
        Kind::Shifting => {
            let busy = now_s / 7200 % at.groups as u64 == group;
            (base * if busy { 2.4 } else { 0.6 }, next(7200))
        }
        Kind::Day => {
            let noon = mixed(0).share();
            let turn = (now_s as f64 / 86_400.0 + noon) * std::f64::consts::TAU;
            (base * (1.0 + 0.9 * turn.sin()), next(300))
        }
        Kind::Bursts => {
            let there = (at.host as u64) << 40;
            let busy = Random(seed ^ there ^ (now_s / 20)).share() < 20.0 / 1800.0;
            (if busy { 3.0 } else { 0.4 }, next(20))
        }
        Kind::Adversary => {
            let since_s = at.moved_s.map(|moved_s| now_s - moved_s);
            match since_s {
                Some(since_s) if since_s < 300 => (0.1, now_s - since_s + 300),
                Some(since_s) if since_s < 600 => (0.6, now_s - since_s + 600),
                _ if vm % 4 == 0 => (3.2, u64::MAX),
                _ => (0.6, u64::MAX),
            }
        }
        Kind::Hunter => (if at.host == at.hunted { 3.2 } else { 0.1 }, next(10)),
    }
}

/// What a VM wants by itself.
pub fn base(random: &mut Random) -> f64 {
    random.pick(&[0.2, 0.4, 0.8, 1.6, 3.2]).copied().unwrap_or(0.8)
}

/// How long a job runs, in seconds: a few run for long, and together they need the most (a Pareto distribution with the shape 0.7, cut
/// at a minute and at 12 hours).
pub fn job_s(random: &mut Random) -> u64 {
    const SHAPE: f64 = 0.7;
    const LEAST_S: f64 = 60.0;
    let seconds = LEAST_S / (1.0 - random.share()).powf(1.0 / SHAPE);
    Duration::from_secs_f64(seconds.min(12.0 * 3600.0)).as_secs()
}

/// The CPU seconds of a job of Borg: a Pareto distribution with the published shape, from a second on. It is cut where the largest hundredth
/// of the jobs has the published share. So the squared coefficient of variation is ten times the published one: one cut can't give both.
pub fn borg_s(random: &mut Random) -> f64 {
    const SHAPE: f64 = 0.69;
    const LEAST_S: f64 = 1.0;
    const MOST_S: f64 = 1.5e9;
    let cut = 1.0 - (LEAST_S / MOST_S).powf(SHAPE);
    LEAST_S / (1.0 - random.share() * cut).powf(1.0 / SHAPE)
}

/// How long a VM of Azure lives, in seconds. Lifetimes of the same bucket differ by factors; the few longest ones are spread over the three
/// months of the study.
pub fn azure_s(random: &mut Random) -> u64 {
    const MINUTE: f64 = 60.0;
    const HOUR: f64 = 60.0 * MINUTE;
    let by_factor = |least: f64, most: f64, share: f64| least * (most / least).powf(share);
    let (bucket, share) = (random.share(), random.share());
    let seconds = match bucket {
        ..0.34 => by_factor(MINUTE, 15.0 * MINUTE, share),
        ..0.61 => by_factor(15.0 * MINUTE, HOUR, share),
        ..0.93 => by_factor(HOUR, 24.0 * HOUR, share),
        ..0.95 => by_factor(24.0 * HOUR, 50.0 * HOUR, share),
        ..0.97 => by_factor(50.0 * HOUR, 200.0 * HOUR, share),
        _ => (200.0 + (90.0 * 24.0 - 200.0) * share) * HOUR,
    };
    Duration::from_secs_f64(seconds).as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_the_same_until_it_says_that_it_changes() {
        for (name, kind) in KINDS {
            let moment =
                |now_s| Moment { now_s, vm: 3, groups: 8, moved_s: None, host: 1, hunted: 1 };
            let (first, until_s) = wanted(kind, 1.0, 7, moment(1234));
            assert!(until_s > 1234, "{name}");
            let last = wanted(kind, 1.0, 7, moment((until_s - 1).min(100_000)));
            assert!(kind == Kind::Day || last.0.total_cmp(&first).is_eq(), "{name}");
        }
    }

    #[test]
    fn a_few_jobs_run_for_most_of_the_time() {
        let mut random = Random(1);
        let mut all: Vec<u64> = (0..10_000).map(|_| job_s(&mut random)).collect();
        all.sort_unstable();
        let of = |jobs: &[u64]| jobs.iter().sum::<u64>();
        assert!(of(&all[9000..]) * 2 > of(&all), "the longest tenth");
        assert!(all[5000] < 300, "half are short");
    }

    #[test]
    fn the_largest_hundredth_of_the_jobs_of_borg_uses_nearly_all() {
        let mut random = Random(1);
        let mut all: Vec<f64> = (0..1_000_000).map(|_| borg_s(&mut random)).collect();
        all.sort_unstable_by(f64::total_cmp);
        let of = |jobs: &[f64]| jobs.iter().sum::<f64>();
        // The largest jobs of all are in few samples, so a sample has a little less than the published 99 %.
        let share = of(&all[990_000..]) / of(&all);
        assert!((0.97..0.995).contains(&share), "{share}");
        assert!(all[500_000] < 4.0, "half of them take seconds: {}", all[500_000]);
    }

    #[test]
    fn the_tail_of_the_jobs_of_borg_has_the_published_shape() {
        let mut random = Random(2);
        let mut all: Vec<f64> = (0..1_000_000).map(|_| borg_s(&mut random)).collect();
        all.sort_unstable_by(f64::total_cmp);
        // Hill's estimator, of the largest hundredth.
        let (least, tail) = (all[990_000].ln(), &all[990_000..]);
        let shape = tail.len() as f64 / tail.iter().map(|one| one.ln() - least).sum::<f64>();
        assert!((shape - 0.69).abs() < 0.03, "{shape}");
    }

    #[test]
    fn the_vms_of_azure_live_as_long_as_published() {
        let mut random = Random(1);
        let all: Vec<u64> = (0..100_000).map(|_| azure_s(&mut random)).collect();
        let up_to = |most_s: u64| all.iter().filter(|one| **one <= most_s).count() as f64 / 1e5;
        let published =
            [(900, 0.34), (3600, 0.61), (86_400, 0.93), (180_000, 0.95), (720_000, 0.97)];
        for (most_s, share) in published {
            assert!((up_to(most_s) - share).abs() < 0.01, "{most_s}: {}", up_to(most_s));
        }
        let long: u64 = all.iter().filter(|one| **one > 86_400).sum();
        let share = long as f64 / all.iter().sum::<u64>() as f64;
        assert!(share > 0.9, "those that live for more than a day have {share} of the hours");
    }
}
