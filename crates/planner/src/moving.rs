//! What one live migration takes.

use perigee_model::HostId;
use perigee_model::units::format_bytes;

use crate::facts::{Cluster, PastMove};
use crate::figures::Figures;
use crate::refused::Refused;

/// Round trips of a migration, counted in the protocol: attach the volumes (2), define the VM at
/// the destination and wait for its address (4), start (2), connect (1), hand the epochs over (2),
/// the last device state and its answer (1).
const ROUND_TRIPS: f64 = 12.0;

/// QEMU's default: what is left to send may take this long with the VM paused.
const DOWNTIME_LIMIT_S: f64 = 0.3;

const ROUNDS_MAX: u32 = 30;

/// A predicted live migration. The job is taken to stand still for `total_s`: an upper bound, for
/// it goes on while its memory is copied, more slowly.
#[derive(Debug, Clone, PartialEq)]
pub struct MoveCost {
    pub total_s: f64,
    /// Bytes sent, pages sent again included.
    pub bytes: f64,
    pub figures: Vec<String>,
}

/// How fast the VM changes its memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dirty {
    /// By an earlier migration.
    Measured(f64),
    /// At least the data it reads lands in its page cache.
    AsFastAsItReads(f64),
}

impl Dirty {
    pub(crate) fn new(measured: Option<u64>, data_bytes: f64, seconds: f64) -> Self {
        match measured {
            Some(rate) => Self::Measured(rate as f64),
            None if seconds > 0.0 => Self::AsFastAsItReads(data_bytes / seconds),
            None => Self::AsFastAsItReads(0.0),
        }
    }
}

/// What it takes to move a VM with this much memory, which changes `dirty_bytes_per_s` of it.
///
/// Pre-copy sends all pages, then again and again those changed meanwhile, until the rest fits in
/// the pause (Clark et al., Live Migration of Virtual Machines, NSDI 2005). With memory `V`, link
/// rate `R`, dirty rate `D` and `r = D / R` the rounds take `V/R`, `r V/R`, `r² V/R` …, a geometric
/// series. On top of it come the protocol's round trips and what earlier moves here took beside
/// their bytes (starting QEMU, looking for pages of zeros).
///
/// # Errors
/// [`Refused`] when the link is not measured or carries less than is changed.
pub fn move_cost(
    cluster: &Cluster,
    from: &HostId,
    to: &HostId,
    memory_bytes: u64,
    dirty_bytes_per_s: Option<u64>,
) -> Result<MoveCost, Refused> {
    move_cost_with(cluster, from, to, memory_bytes, Dirty::new(dirty_bytes_per_s, 0.0, 0.0))
}

pub(crate) fn move_cost_with(
    cluster: &Cluster,
    from: &HostId,
    to: &HostId,
    memory_bytes: u64,
    dirty: Dirty,
) -> Result<MoveCost, Refused> {
    let mut figures = Figures::default();
    // What flows from the source to the destination was probed by the destination.
    let link = cluster.link(to, from)?;
    figures.link(link, cluster.probe_request_bytes);
    let rate = link.probe.rate_bytes_per_s as f64;
    let dirty_rate = match dirty {
        Dirty::Measured(dirty_rate) if dirty_rate >= rate => {
            return Err(would_not_converge(from, to, dirty_rate, rate));
        }
        Dirty::Measured(dirty_rate) => {
            figures.measured(format!("memory changes at {}/s", whole_bytes(dirty_rate)));
            dirty_rate
        }
        Dirty::AsFastAsItReads(dirty_rate) => {
            figures.assumed(
                "memory changes as fast as the job reads its data, over half of the link at most",
            );
            dirty_rate.min(rate / 2.0)
        }
    };
    let experience = Experience::of(&cluster.past_moves, &mut figures);
    let first_bytes = memory_bytes as f64 * experience.share_sent;
    let bytes = precopy_bytes(first_bytes, rate, dirty_rate);
    figures.assumed("the job stands still while it is moved (upper bound)");
    let rtt_s = link.probe.rtt_ms / 1e3;
    let total_s = bytes / rate + ROUND_TRIPS * rtt_s + experience.fixed_s;
    Ok(MoveCost { total_s, bytes, figures: figures.into_vec() })
}

fn precopy_bytes(first_bytes: f64, rate: f64, dirty_rate: f64) -> f64 {
    let mut round_bytes = first_bytes;
    let mut sent = first_bytes;
    for _ in 0..ROUNDS_MAX {
        round_bytes *= dirty_rate / rate;
        sent += round_bytes;
        if round_bytes <= rate * DOWNTIME_LIMIT_S {
            break;
        }
    }
    sent
}

/// What earlier moves teach: means over them.
struct Experience {
    /// Bytes sent for each byte of memory; below 1 because pages of zeros are not sent.
    share_sent: f64,
    /// Time that is neither bytes nor round trips.
    fixed_s: f64,
}

impl Experience {
    fn of(moves: &[PastMove], figures: &mut Figures) -> Self {
        let usable: Vec<&PastMove> =
            moves.iter().filter(|m| m.memory_bytes > 0 && m.rate_bytes_per_s > 0).collect();
        if usable.is_empty() {
            figures.assumed("all of the memory is sent, and starting QEMU takes no time");
            return Self { share_sent: 1.0, fixed_s: 0.0 };
        }
        let count = usable.len() as f64;
        let share_sent =
            usable.iter().map(|m| m.bytes as f64 / m.memory_bytes as f64).sum::<f64>() / count;
        let fixed_s = usable.iter().map(|m| beside_bytes_s(m)).sum::<f64>() / count;
        figures.measured(format!(
            "{} earlier moves sent {:.0} % of the memory and took {fixed_s:.1} s beside that",
            usable.len(),
            share_sent * 100.0
        ));
        Self { share_sent: share_sent.min(1.0), fixed_s }
    }
}

fn beside_bytes_s(past: &PastMove) -> f64 {
    let bytes_s = past.bytes as f64 / past.rate_bytes_per_s as f64;
    (past.total_s - bytes_s - ROUND_TRIPS * past.rtt_ms / 1e3).max(0.0)
}

fn would_not_converge(from: &HostId, to: &HostId, dirty_rate: f64, rate: f64) -> Refused {
    Refused::WouldNotConverge {
        from: from.clone(),
        to: to.clone(),
        dirty: whole_bytes(dirty_rate),
        rate: whole_bytes(rate),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole_bytes(bytes: f64) -> String {
    format_bytes(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    const ROUND_TRIPS_S: f64 = 12.0 * 0.016;

    fn cost(cluster: &Cluster, dirty_bytes_per_s: u64) -> Result<MoveCost, Refused> {
        let (from, to) = (host_id("home1"), host_id("cloud1"));
        move_cost(cluster, &from, &to, 512 * MIB, Some(dirty_bytes_per_s))
    }

    #[test]
    fn memory_that_does_not_change_is_sent_once() {
        assert_close(cost(&cluster(), 0).unwrap().total_s, 4.0 + ROUND_TRIPS_S);
    }

    #[test]
    fn memory_that_changes_is_a_geometric_series() {
        // 512 + 256 + 128 + 64 + 32 MiB at 128 MiB/s; 32 MiB fit in the pause.
        let cost = cost(&cluster(), 64 * MIB).unwrap();
        assert_close(cost.bytes, 992.0 * MIB as f64);
        assert_close(cost.total_s, 7.75 + ROUND_TRIPS_S);
    }

    #[test]
    fn memory_that_changes_faster_than_the_link_is_a_refusal() {
        let refused = cost(&cluster(), 128 * MIB).unwrap_err();
        assert!(refused.to_string().contains("128 MiB/s of its memory"), "{refused}");
    }

    #[test]
    fn earlier_moves_tell_what_is_sent_and_what_comes_on_top() {
        let mut cluster = cluster();
        cluster.past_moves = vec![PastMove {
            memory_bytes: 1024 * MIB,
            bytes: 512 * MIB,
            total_s: 4.0 + ROUND_TRIPS_S + 1.5,
            rate_bytes_per_s: WAN_BYTES_PER_S,
            rtt_ms: 16.0,
        }];
        assert_close(cost(&cluster, 0).unwrap().total_s, 2.0 + ROUND_TRIPS_S + 1.5);
    }

    #[test]
    fn what_is_not_measured_is_named_as_an_assumption() {
        let figures = cost(&cluster(), 0).unwrap().figures;
        assert!(figures.iter().any(|f| f.starts_with("assumed: all of the memory")), "{figures:?}");
    }
}
