//! Which jobs are expected: as many as arrived lately, without bursts.
//!
//! A queue that is short because hosts take jobs as they come is no sign of little load. So the jobs that arrived in the last half hour are
//! expected again in the next one. A burst is not expected to come again: of each five minutes no more jobs count than of the five minutes
//! in the middle, by their number of jobs.

use super::{Arrived, EXPECTED_S, Job};

/// The parts of the time that are compared.
const PARTS: usize = 6;

/// A job that is expected in so many seconds.
pub(super) struct Expected<'s> {
    pub in_s: f64,
    pub job: &'s Job,
}

/// In the order of their arrival.
pub(super) fn expected(arrived: &[Arrived]) -> Vec<Expected<'_>> {
    let mut parts: [Vec<&Arrived>; PARTS] = Default::default();
    let part_s = EXPECTED_S / PARTS as f64;
    for one in arrived.iter().filter(|one| (0.0..EXPECTED_S).contains(&one.ago_s)) {
        let part = (0..PARTS).find(|part| one.ago_s < (*part as f64 + 1.0) * part_s);
        parts[part.unwrap_or(PARTS - 1)].push(one);
    }
    let mut counts = parts.each_ref().map(Vec::len);
    counts.sort_unstable();
    // The smaller one of the two in the middle: what came once in a while is not expected.
    let most = counts[PARTS / 2 - 1];
    let expected = |one: &&'_ Arrived| EXPECTED_S - one.ago_s;
    let mut all: Vec<Expected> = Vec::new();
    for part in parts {
        let them = part.into_iter().take(most);
        all.extend(them.map(|one| Expected { in_s: expected(&one), job: &one.job }));
    }
    all.sort_by(|one, other| one.in_s.total_cmp(&other.in_s));
    all
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;

    fn arrived(ago_s: &[f64]) -> Vec<Arrived> {
        ago_s.iter().map(|ago_s| Arrived { ago_s: *ago_s, job: job(0, 1.0) }).collect()
    }

    #[test]
    fn a_steady_stream_is_expected_to_go_on() {
        let all: Vec<f64> = (0..30).map(|minute| f64::from(minute) * 60.0).collect();
        let in_s: Vec<f64> = expected(&arrived(&all)).iter().map(|one| one.in_s).collect();
        assert_eq!(in_s.len(), 30);
        assert!(in_s.is_sorted() && in_s[0] <= 60.0 && in_s[29] >= 1740.0, "{in_s:?}");
    }

    #[test]
    fn a_burst_is_not_expected_again() {
        let burst = [100.0; 50];
        assert!(expected(&arrived(&burst)).is_empty());
        let stream: Vec<f64> = (0..30).map(|minute| f64::from(minute) * 60.0 + 1.0).collect();
        assert_eq!(expected(&arrived(&[&burst[..], &stream].concat())).len(), 30);
        assert!(expected(&arrived(&[1801.0, -1.0])).is_empty(), "too long ago, and not yet");
    }
}
