//! Predicts what a live migration costs.

use perigee_model::HostId;
use perigee_model::phases::TOTAL_MAX_S;
use perigee_model::units::{format_bytes, format_seconds};

use crate::experience::{Experience, PAUSE_ROUND_TRIPS, PREPARE_ROUND_TRIPS};
use crate::facts::{Cluster, DiskFacts, LinkFacts};
use crate::figures::Figures;
use crate::modes::{self, Memory, Mode};
use crate::refused::Refused;
use crate::spread::Spread;

/// The relative speed of a VM while its memory is copied: it waits for pages that are scanned, and shares the
/// CPUs with the threads that send them.
pub(crate) const SPEED_WHILE_COPIED: f64 = 0.5;

/// A predicted live migration, or a predicted move of volumes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MoveCost {
    /// The sum of the three phases, from the migration's turn on.
    pub total_s: f64,
    /// The time until the migrations before it on the same link have ended; `None` if that is not known. The job runs
    /// meanwhile as before.
    pub wait_s: Option<f64>,
    /// Time until the first byte of memory is sent.
    pub prepare_s: f64,
    /// Time for all rounds and for scanning the memory. It includes the last round, although that is sent in
    /// the pause.
    pub copy_s: f64,
    /// The pause without the last round: its round trips, and the time that it took in earlier moves.
    pub pause_s: f64,
    /// The time that the job loses: the pause, and its slower work while its memory is copied. It is at least
    /// the pause and at most `total_s`.
    pub job_s: f64,
    /// Bytes that are sent, including pages that are sent again; before compression.
    pub bytes: f64,
    /// How the memory is sent.
    pub mode: Mode,
    /// The measurements and assumptions behind it, in plain words, as in
    /// [`perigee_model::plan::Plan::figures`].
    pub figures: Vec<String>,
}

impl MoveCost {
    /// Why the migration would be cancelled before its end; `None` if it is in time.
    pub fn too_long(&self) -> Option<String> {
        let (takes, most) = (format_seconds(self.total_s), TOTAL_MAX_S / 60);
        (self.total_s > TOTAL_MAX_S as f64).then(|| {
            format!("the move would take {takes}, and one that takes longer than {most} min is cancelled")
        })
    }

    pub(crate) fn of_the_job(&self) -> Spread {
        Spread::between(self.pause_s, self.job_s, self.total_s)
    }

    /// What the job still loses if the migration takes so much longer: the copying that is over has been paid for.
    pub(crate) fn of_the_rest(&self, left_s: f64) -> Spread {
        let left_s = left_s.clamp(0.0, self.total_s);
        let pause_s = self.pause_s.min(left_s);
        let copy_left_s = (left_s - pause_s).min(self.copy_s);
        let share = if self.copy_s > 0.0 { copy_left_s / self.copy_s } else { 0.0 };
        let lost_s = pause_s + (self.job_s - self.pause_s) * share;
        Spread::between(pause_s, lost_s, left_s)
    }
}

/// How fast the VM changes its memory, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dirty {
    /// Measured by an earlier migration, or sampled by its host.
    Measured(f64),
    /// Not measured: the data that the job reads go to its page cache, so its memory changes at least this
    /// fast.
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

    /// Of a VM that has used its data volumes for so long.
    pub fn of_running(measured: Option<u64>, disks: &[DiskFacts], seconds: f64) -> Self {
        let bytes = |disk: &DiskFacts| (disk.client.read_bytes + disk.client.write_bytes) as f64;
        Self::new(measured, disks.iter().map(bytes).sum(), seconds)
    }
}

/// Predicts a live migration of a VM with this much memory, which changes so fast.
///
/// The rounds of the copying are those of [`modes`]. Added to them are the round trips, and the further time that
/// earlier moves took in each phase: for the preparation (starting QEMU), for scanning the memory in the first
/// round, and for the pause. Migrations over one link take turns. They leave a part of the link to VMs that use their
/// disks over it.
///
/// # Errors
/// [`Refused`] if the link is not measured, or if the memory changes faster than it can be sent in any mode.
pub fn move_cost(
    cluster: &Cluster,
    from: &HostId,
    to: &HostId,
    memory_bytes: u64,
    dirty: Dirty,
) -> Result<MoveCost, Refused> {
    Moves::of(cluster).cost(from, to, memory_bytes, dirty)
}

/// Predicts several moves, each as [`move_cost`] does, and goes through the earlier moves once.
pub(crate) struct Moves<'a> {
    cluster: &'a Cluster,
    experience: Experience,
    /// What is said of the earlier moves.
    figures: Vec<String>,
}

impl<'a> Moves<'a> {
    pub fn of(cluster: &'a Cluster) -> Self {
        let mut figures = Figures::default();
        let experience = Experience::of(&cluster.past_moves, &mut figures);
        Self { cluster, experience, figures: figures.into_vec() }
    }

    /// As [`move_cost`].
    pub fn cost(
        &self,
        from: &HostId,
        to: &HostId,
        memory_bytes: u64,
        dirty: Dirty,
    ) -> Result<MoveCost, Refused> {
        let mut figures = Figures::default();
        let cluster = self.cluster;
        cluster.host(from)?.can_send_to(cluster.host(to)?)?;
        // The destination has probed the direction from the source to the destination.
        let link = cluster.link(to, from)?;
        figures.link(link, cluster.probe_request_bytes);
        let rate = link.rate_for_moves();
        describe_sharing(link, &mut figures);
        let dirty_rate = match dirty {
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
        self.figures.iter().for_each(|figure| figures.measured(figure.clone()));
        let memory = Memory {
            first_bytes: memory_bytes as f64 * self.experience.share_sent,
            scan_s: memory_bytes as f64 * self.experience.scan_s_per_byte,
            dirty_bytes_per_s: dirty_rate,
        };
        // The last round is sent in the pause. The sum does not depend on which one that is.
        let is_limited = link.moves.max_bytes_per_s.is_some();
        let compression = self.experience.compression;
        let compression = if is_limited { compression.under_limit() } else { compression };
        let Some(copying) = modes::choose(memory, rate, compression) else {
            return Err(would_not_converge(from, to, dirty_rate, rate));
        };
        let (bytes, copy_s) = (copying.bytes, copying.copy_s);
        figures.measured(copying.mode.why.clone());
        figures.assumed("the job works at half of its speed while its memory is copied");
        let rtt_s = link.probe.rtt_ms / 1e3;
        let prepare_s = PREPARE_ROUND_TRIPS * rtt_s + self.experience.prepare_s;
        let pause_s = PAUSE_ROUND_TRIPS * rtt_s + self.experience.pause_s;
        figures.measured(format!(
            "a move from {from} to {to}: {} to prepare, {} to copy {}, {} of pause beside that",
            format_seconds(prepare_s),
            format_seconds(copy_s),
            whole_bytes(bytes),
            format_seconds(pause_s)
        ));
        let total_s = prepare_s + copy_s + pause_s;
        let job_s = pause_s + copying.lost_s;
        let (mode, figures) = (copying.mode, figures.into_vec());
        let wait_s = link.moves.wait_s;
        Ok(MoveCost { total_s, wait_s, prepare_s, copy_s, pause_s, job_s, bytes, mode, figures })
    }
}

/// What other VMs leave of a link to a move, and for how long moves before it have the link.
fn describe_sharing(link: &LinkFacts, figures: &mut Figures) {
    if let Some(most) = link.moves.max_bytes_per_s {
        let most = whole_bytes(most as f64);
        figures.measured(format!("other VMs use this link: a move gets {most}/s"));
    }
    match link.moves.wait_s {
        Some(wait_s) if wait_s > 0.0 => {
            let wait = format_seconds(wait_s);
            figures.measured(format!("moves before it over this link take {wait} more"));
        }
        Some(_) => {}
        None => {
            figures.measured("it is not known when the moves before it over this link end".into());
        }
    }
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
pub(crate) fn whole_bytes(bytes: f64) -> String {
    format_bytes(bytes as u64)
}

#[cfg(test)]
mod tests {
    use perigee_model::phases::{CopyRound, Pause, Phases, Prepare};

    use super::*;
    use crate::fixture::*;
    use crate::{LinkForMoves, PastMove};

    const ROUND_TRIPS_S: f64 = 12.0 * 0.016;

    fn cost(cluster: &Cluster, dirty_bytes_per_s: u64) -> Result<MoveCost, Refused> {
        let (from, to) = (host_id("home1"), host_id("cloud1"));
        move_cost(cluster, &from, &to, 512 * MIB, Dirty::Measured(dirty_bytes_per_s as f64))
    }

    #[test]
    fn memory_that_does_not_change_is_sent_once() {
        assert_close(cost(&cluster(), 0).unwrap().total_s, 4.0 + ROUND_TRIPS_S);
    }

    /// The whole cost of a move was added to a job's end while half of it was over.
    #[test]
    fn what_is_over_of_a_move_costs_nothing_more() {
        let cost = cost(&cluster(), 0).unwrap();
        assert_eq!(cost.of_the_rest(cost.total_s), cost.of_the_job());
        assert_eq!(cost.of_the_rest(100.0), cost.of_the_job(), "it waits for its turn");
        let half = cost.of_the_rest(2.0 + cost.pause_s);
        assert_close(half.expected, cost.pause_s + 1.0);
        assert_close(half.high(), 2.0 + cost.pause_s);
        assert_eq!(cost.of_the_rest(0.0), Spread::default());
    }

    #[test]
    fn memory_that_changes_is_a_geometric_series() {
        // 512 + 256 + 128 + 64 + 32 + 16 + 8 MiB at 128 MiB/s; 8 MiB fit in the pause.
        let cost = cost(&cluster(), 64 * MIB).unwrap();
        assert_close(cost.bytes, 1016.0 * MIB as f64);
        assert_close(cost.total_s, 7.9375 + ROUND_TRIPS_S);
    }

    #[test]
    fn memory_that_changes_faster_than_a_slowed_vm_can_send_it_is_a_refusal() {
        let slowed = cost(&cluster(), 128 * MIB).unwrap();
        assert_eq!(slowed.mode.throttle_percent, Some(50));
        let refused = cost(&cluster(), 128 * 1024 * MIB).unwrap_err();
        assert!(refused.to_string().contains("128 GiB/s of its memory"), "{refused}");
    }

    #[test]
    fn moves_take_turns_and_leave_a_part_of_the_link_to_others() {
        let mut shared = cluster();
        for link in &mut shared.links {
            link.moves =
                LinkForMoves { wait_s: Some(7.0), max_bytes_per_s: Some(WAN_BYTES_PER_S / 2) };
        }
        let cost = cost(&shared, 0).unwrap();
        assert_eq!(cost.wait_s, Some(7.0));
        assert_close(cost.total_s, 8.0 + ROUND_TRIPS_S);
        assert!(cost.figures.iter().any(|f| f.contains("take 7.0 s more")), "{:?}", cost.figures);
    }

    #[test]
    fn a_wait_that_is_not_known_is_not_said_to_be_none() {
        let mut shared = cluster();
        shared.links.iter_mut().for_each(|link| link.moves.wait_s = None);
        let cost = cost(&shared, 0).unwrap();
        assert_eq!(cost.wait_s, None);
        assert!(
            cost.figures.iter().any(|f| f.contains("it is not known when")),
            "{:?}",
            cost.figures
        );
    }

    /// 512 MiB at 0.25 MiB/s, and at twice that if they are compressed.
    #[test]
    fn a_move_that_would_be_cancelled_before_its_end_says_so() {
        let mut thin = cluster();
        thin.links.iter_mut().for_each(|link| link.probe.rate_bytes_per_s = MIB / 4);
        let why = cost(&thin, 0).unwrap().too_long().expect("17 min");
        assert!(why.ends_with("longer than 15 min is cancelled"), "{why}");
        assert_eq!(cost(&cluster(), 0).unwrap().too_long(), None);
    }

    #[test]
    fn a_thin_link_is_predicted_with_the_gain_of_earlier_compressed_moves() {
        let mut thin = cluster();
        for link in &mut thin.links {
            link.probe.rate_bytes_per_s = 8 * MIB;
        }
        thin.past_moves = vec![PastMove {
            compressed: true,
            // 96 MiB in 4 s over a link of 8 MiB/s: a gain of 3, beside the assumed one of 2.
            rate_bytes_per_s: 8 * MIB,
            memory_bytes: 128 * MIB,
            phases: Phases {
                rounds: vec![CopyRound {
                    first: 1,
                    last: 1,
                    duration_ms: 4000,
                    bytes: 96 * MIB,
                    dirty_bytes_per_s: 0,
                }],
                ..Phases::default()
            },
            ..PastMove::default()
        }]
        .into();
        let cost = cost(&thin, 0).unwrap();
        assert!(cost.mode.compressed, "{}", cost.mode.why);
        assert_close(cost.copy_s, 512.0 * 0.75 / 20.0);
    }

    #[test]
    fn a_move_costs_its_phases_on_the_link_of_today() {
        let mut cluster = cluster();
        let round = CopyRound {
            first: 1,
            last: 1,
            duration_ms: 2000,
            bytes: 512 * MIB,
            dirty_bytes_per_s: 0,
        };
        cluster.past_moves = vec![PastMove {
            memory_bytes: 1024 * MIB,
            // A link of 1 GiB/s without delay: 0.5 s for the bytes, 1.5 s for scanning 1 GiB.
            rate_bytes_per_s: 1024 * MIB,
            phases: Phases {
                prepare: Some(Prepare { qemu_ms: 700, ..Prepare::default() }),
                rounds: vec![round],
                pause: Some(Pause { device_us: 30_000, ..Pause::default() }),
            },
            ..PastMove::default()
        }]
        .into();
        let cost = cost(&cluster, 0).unwrap();
        assert_close(cost.prepare_s, 0.7 + 8.0 * 0.016);
        assert_close(cost.copy_s, 2.0 + 0.75);
        assert_close(cost.pause_s, 0.03 + 4.0 * 0.016);
        assert_close(cost.total_s, cost.prepare_s + cost.copy_s + cost.pause_s);
        assert_close(cost.job_s, cost.copy_s / 2.0 + cost.pause_s);
    }

    #[test]
    fn what_is_not_measured_is_named_as_an_assumption() {
        let figures = cost(&cluster(), 0).unwrap().figures;
        assert!(figures.iter().any(|f| f.starts_with("assumed: all of the memory")), "{figures:?}");
    }
}
