//! Predicts what it costs to bring a job's data volumes to its VM's host while it runs.
//!
//! A volume's home moves first, and then the new home copies what it lacks. Its requests wait for the switch only;
//! while it is copied, those that need a block that is still missing wait for the old home, and share the link
//! with the background.

use perigee_model::HostId;
use perigee_model::read_ahead::{FILL_BYTES_PER_S, FILL_PIECE_BLOCKS, FILL_PIECES_IN_FLIGHT};
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::volume::BLOCK_BYTES;

use crate::facts::Cluster;
use crate::figures::Figures;
use crate::moving::{MoveCost, SPEED_WHILE_COPIED};
use crate::refused::Refused;

/// The switch holds the volume's requests at most for two round trips and this time.
const SWITCH_ROUND_TRIPS: f64 = 2.0;
const SWITCH_S: f64 = 0.05;
/// Round trips before the switch: the old home seals and tells what it has.
const PREPARE_ROUND_TRIPS: f64 = 8.0;

const IN_FLIGHT_BYTES: f64 =
    (FILL_PIECE_BLOCKS * BLOCK_BYTES * FILL_PIECES_IN_FLIGHT as u64) as f64;

/// Predicts how the volumes of these homes come to a host, one after the other, each with at most these bytes.
///
/// # Errors
/// [`Refused`] if a link is not measured.
pub(crate) fn copy_cost(
    cluster: &Cluster,
    to: &HostId,
    volumes: &[(&HostId, u64)],
) -> Result<MoveCost, Refused> {
    let mut figures = Figures::default();
    let mut cost = MoveCost::default();
    for (home, copy_bytes) in volumes {
        let link = cluster.link(to, home)?;
        figures.link(link, cluster.probe_request_bytes);
        let rtt_s = link.probe.rtt_ms / 1e3;
        let by_window = if rtt_s > 0.0 { IN_FLIGHT_BYTES / rtt_s } else { f64::INFINITY };
        let link_rate = link.probe.rate_bytes_per_s as f64;
        let rate = link_rate.min(by_window).min(FILL_BYTES_PER_S as f64);
        let copy_s = *copy_bytes as f64 / rate;
        cost.prepare_s += PREPARE_ROUND_TRIPS * rtt_s;
        cost.copy_s += copy_s;
        cost.pause_s += SWITCH_ROUND_TRIPS * rtt_s + SWITCH_S;
        cost.bytes += *copy_bytes as f64;
        figures.measured(format!(
            "a copy from {home} to {to}: {} for at most {}",
            format_seconds(copy_s),
            format_bytes(*copy_bytes)
        ));
    }
    figures.assumed("the job works at half of its speed while its volumes are copied");
    cost.total_s = cost.prepare_s + cost.copy_s + cost.pause_s;
    cost.job_s = cost.pause_s + cost.copy_s * (1.0 - SPEED_WHILE_COPIED);
    cost.figures = figures.into_vec();
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    #[test]
    fn a_copy_takes_its_bytes_at_the_rate_of_its_window() {
        let (to, home) = (host_id("home1"), host_id("cloud1"));
        let cost = copy_cost(&cluster(), &to, &[(&home, 256 * MIB)]).unwrap();
        // 1 MiB in flight at 16 ms are 62.5 MiB/s.
        assert_close(cost.copy_s, 4.096);
        assert_close(cost.pause_s, 0.082);
        assert_close(cost.job_s, 0.082 + 2.048);
        let near = copy_cost(&cluster(), &to, &[(&host_id("home2"), 256 * MIB)]).unwrap();
        assert_close(near.copy_s, 2.56);
        let both = copy_cost(&cluster(), &to, &[(&home, MIB), (&home, 3 * MIB)]).unwrap();
        assert_close(both.copy_s, 0.064);
        assert_close(both.pause_s, 0.164);
    }
}
