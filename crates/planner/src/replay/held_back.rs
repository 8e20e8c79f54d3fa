//! How many reads a program keeps in flight, from a local trace in which a few answers were held back.
//!
//! The reads that arrive in one window, while its first answer is held back, were all issued before any of them was
//! answered. Reads ahead are left out, because the rules of the replay say when those are issued. The mean number of
//! reads in a window is the depth `q`: a read waits for the answer to the `q`th read before it, and not to the last one.

use super::{Cause, Kind, Step};

/// The mean number of reads in a window; `None` if no answer to such a read was held back.
pub(super) fn depth(steps: &[Step]) -> Option<f64> {
    let (mut windows, mut reads) = (0.0, 0.0);
    let mut open_until_us = f64::NEG_INFINITY;
    for step in steps.iter().filter(|step| is_demanded(step) && step.request.held_us > 0.0) {
        if step.request.at_us >= open_until_us {
            windows += 1.0;
            open_until_us = step.request.at_us + step.request.held_us;
        }
        reads += 1.0;
    }
    (windows > 0.0).then(|| reads / windows)
}

/// Lets this many reads be in flight together. `false` if it is one, which changes nothing.
pub(super) fn read_together(steps: &mut [Step], depth: f64) -> bool {
    let depth = whole(depth);
    if depth < 2 {
        return false;
    }
    let reads: Vec<usize> = (0..steps.len()).filter(|index| is_demanded(&steps[*index])).collect();
    for (position, index) in reads.iter().enumerate() {
        let before = position.checked_sub(depth).map(|position| reads[position]);
        steps[*index].cause = Cause::Answer(before);
    }
    true
}

fn is_demanded(step: &Step) -> bool {
    step.request.kind == Kind::Read && matches!(step.cause, Cause::Answer(_))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a small positive number"
)]
fn whole(depth: f64) -> usize {
    depth.round() as usize
}

#[cfg(test)]
mod tests {
    use super::super::{Replay, Request};

    const HELD_US: f64 = 16_000.0;
    const WORK_US: f64 = 100.0;
    const READ_US: f64 = 50.0;

    /// Readers on one CPU: each works, then issues a random read and waits for it. In 16 ms of every second answers
    /// are held back if `held`. Returns the trace and its end.
    fn run(readers: usize, reads: usize, round_trip_us: f64, held: bool) -> (Vec<Request>, f64) {
        let mut ready_us = vec![0.0f64; readers];
        let (mut cpu_us, mut end_us, mut requests) = (0.0f64, 0.0f64, Vec::new());
        for read in 0..reads {
            let next = (0..readers).min_by(|a, b| ready_us[*a].total_cmp(&ready_us[*b])).unwrap();
            let at_us = ready_us[next].max(cpu_us) + WORK_US;
            cpu_us = at_us;
            let in_window = at_us % 1e6 >= 100_000.0 && at_us % 1e6 < 100_000.0 + HELD_US;
            let held_us = if held && in_window { HELD_US } else { 0.0 };
            let answered_us = at_us + READ_US + round_trip_us + held_us;
            let offset = (read as u64 * 7919 % 100_000) << 20;
            let (disk, kind, length_bytes) = (0, super::Kind::Read, 4096);
            requests.push(Request {
                disk,
                kind,
                offset,
                length_bytes,
                at_us,
                answered_us,
                held_us,
            });
            ready_us[next] = answered_us;
            end_us = end_us.max(answered_us);
        }
        (requests, end_us)
    }

    /// The error of the round trips that a local trace of so many readers shows.
    fn error(readers: usize, held: bool) -> f64 {
        let (local, local_us) = run(readers, 20_000, 0.0, held);
        let (_, home_us) = run(readers, 20_000, 0.0, false);
        let (_, far_us) = run(readers, 20_000, HELD_US, false);
        let truth = (far_us - home_us) / HELD_US;
        Replay::new(&local, local_us).far(&[true]).round_trips / truth - 1.0
    }

    #[test]
    fn held_back_answers_show_the_depth_that_a_local_run_hides() {
        assert!(error(8, false) > 4.0, "without them the error is {:.2}", error(8, false));
        for readers in [1, 2, 3, 8] {
            let error = error(readers, true);
            assert!(error.abs() < 0.1, "{readers} readers: {error}");
        }
    }

    #[test]
    fn the_probe_itself_is_no_work_of_the_job() {
        let (held, end_us) = run(1, 20_000, 0.0, true);
        let far = Replay::new(&held, end_us).far(&[true]);
        assert_eq!(far.depth, Some(1.0));
        assert!((far.round_trips / 20_000.0 - 1.0).abs() < 0.01, "{far:?}");
        assert!(far.held > 0 && far.requests == 20_000);
        assert_eq!(Replay::new(&run(1, 100, 0.0, false).0, end_us).far(&[true]).depth, None);
    }
}
