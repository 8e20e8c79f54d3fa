//! How much equal runs differ: the floor below which no prediction's error can be.

use perigee_model::plan::Noise;

use crate::runs::{FAR_S, PastRun, SAME_JOB};

/// Round trips that differ by this share are equally far.
const EQUALLY_FAR: f64 = 0.1;
/// A volume with shares of far requests that differ by this much was in the same place.
const SAME_SHARE: f64 = 0.05;

/// How much runs of the same job in the same placement differ from their own mean. Each list has the runs of one image
/// and command. `None` if no job has run twice in one placement.
pub fn noise<'a>(lists: impl IntoIterator<Item = &'a [PastRun]>) -> Option<Noise> {
    let mut apart = Vec::new();
    for runs in lists {
        for group in groups(runs) {
            let count = group.len() as f64;
            let mean_s = group.iter().map(|run| total_s(run)).sum::<f64>() / count;
            if group.len() > 1 && mean_s > 0.0 {
                // The mean of few runs is nearer to them than the true one; a standard deviation has the same factor.
                let factor = (count / (count - 1.0)).sqrt();
                apart.extend(group.iter().map(|run| (total_s(run) / mean_s - 1.0).abs() * factor));
            }
        }
    }
    apart.sort_by(f64::total_cmp);
    let at = |tenths: usize| apart.get(apart.len() * tenths / 10).copied();
    Some(Noise { runs: apart.len() as u64, median: at(5)?, nine_of_ten: at(9)? })
}

/// From VM start to the command's end.
fn total_s(run: &PastRun) -> f64 {
    run.boot_s + run.wall_s
}

/// The runs at one distance to their data, those that are equal together.
fn groups(runs: &[PastRun]) -> Vec<Vec<&PastRun>> {
    let mut groups: Vec<Vec<&PastRun>> = Vec::new();
    for run in runs.iter().filter(|run| run.is_at_one_distance() && !run.moved) {
        match groups.iter_mut().find(|group| is_same(group[0], run)) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    groups
}

/// Whether runs at these two distances were equally far from their data.
pub(crate) fn is_as_far(a: f64, b: f64) -> bool {
    (a - b).abs() <= FAR_S.max(EQUALLY_FAR * a.max(b))
}

fn is_same(one: &PastRun, other: &PastRun) -> bool {
    let volumes = || one.volumes.iter().zip(&other.volumes);
    one.host == other.host
        && one.traits.relation(&other.traits) >= SAME_JOB
        && one.volumes.len() == other.volumes.len()
        && volumes().all(|(a, b)| is_as_far(a.round_trip_s, b.round_trip_s))
        && volumes().all(|(a, b)| (a.remote_share - b.remote_share).abs() <= SAME_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    /// A run of so many seconds from its VM's start.
    fn run(round_trip_s: f64, seconds: f64) -> PastRun {
        let run = past_run(round_trip_s, 1000.0);
        PastRun { wall_s: seconds - run.boot_s, ..run }
    }

    #[test]
    fn equal_runs_are_compared_with_their_own_mean() {
        let runs = [run(0.0, 18.0), run(ROUND_TRIP_S, 50.0), run(0.0, 22.0), run(0.0, 20.0)];
        let noise = noise([&runs[..]]).expect("three are equal");
        assert_eq!(noise.runs, 3);
        assert_close(noise.median, 0.1 * 1.5_f64.sqrt());
        let other_job = [run(0.0, 100.0)];
        assert_eq!(super::noise([&runs[..], &other_job[..]]), Some(noise));
    }

    #[test]
    fn runs_in_different_placements_are_no_noise() {
        let moved = PastRun { moved: true, ..run(0.0, 90.0) };
        let mut other = run(0.0, 80.0);
        other.traits.inputs = "other".to_owned();
        let elsewhere = PastRun { host: host_id("home2"), ..run(0.0, 70.0) };
        let farther = run(2.0 * ROUND_TRIP_S, 60.0);
        let runs = [run(0.0, 20.0), run(ROUND_TRIP_S, 40.0), moved, other, elsewhere, farther];
        assert_eq!(noise([&runs[..]]), None);
    }
}
