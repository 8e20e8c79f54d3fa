//! Whether a running VM moves now.
//!
//! The remaining work of a job is unknown, so the rule is the one for renting or buying skis: pay
//! by the day until what was paid equals the price, then buy. Here: stay until the time lost to
//! the network, that the other place would have saved, equals the predicted cost of the move.
//! Whenever the job ends, it then has lost at most twice what the best choice in hindsight would
//! have (Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, Algorithmica 1988; no
//! deterministic rule does better).
//!
//! After a move the account starts anew and the next move must save [`AFTER_A_MOVE`] times its
//! cost. As no more time can be lost than passes, the VM stays at least so long; and all the moves
//! of a job together, after the first, cost at most half of what it lost to the network.

use perigee_model::HostId;
use perigee_model::plan::{Basis, Plan, PlanOption, Seconds, Way};
use perigee_model::units::format_seconds;

use crate::facts::{DiskFacts, Running};
use crate::figures::Figures;
use crate::moving::{Dirty, MoveCost, move_cost_with};
use crate::network::{io_s, lost_s, not_computing_s, seconds};
use crate::options::add_up;
use crate::profile::VolumeWork;
use crate::refused::Refused;

/// How many times its cost a move must save when the VM was moved before.
pub const AFTER_A_MOVE: f64 = 2.0;

/// A place counts as better when it would lose at most this share of what is lost here: probes of
/// two equal links differ a little, and that is no reason to move.
const CLEARLY_LESS: f64 = 0.8;

#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Stay {
        reason: String,
        /// Lost to the network since the VM came to this host.
        lost_s: f64,
        /// Of the best move, if there is a better place.
        cost_s: Option<f64>,
    },
    Move {
        to: HostId,
        reason: String,
        plan: Plan,
    },
}

/// A place where the job would have lost less.
struct Better<'a> {
    to: &'a HostId,
    lost_there_s: f64,
    saved_s: f64,
    cost: MoveCost,
}

/// Decides with what was measured since the VM came to its host. To be asked again and again while
/// the job runs: the answer is late by the time between two calls.
pub fn consider(running: &Running) -> Verdict {
    let lost_s = lost_s(&running.disks, running.wall_s, running.vcpu_s, running.cpus);
    let stay = |reason: String, cost_s| Verdict::Stay { reason, lost_s, cost_s };
    if !running.may_migrate {
        return stay("the job file says that it may not move".to_owned(), None);
    }
    let best = match best_place(running, lost_s) {
        Ok(Some(best)) => best,
        Ok(None) => return stay("no host with room would lose less".to_owned(), None),
        Err(why) => return stay(format!("no move can be judged: {why}"), None),
    };
    let factor = if running.moves == 0 { 1.0 } else { AFTER_A_MOVE };
    let needed_s = best.cost.total_s * factor;
    let account = account(running, lost_s, &best);
    if best.saved_s < needed_s {
        let reason = if running.moves == 0 {
            account
        } else {
            format!("{account}; after a move the next must save {AFTER_A_MOVE:.0} times its cost")
        };
        return stay(reason, Some(best.cost.total_s));
    }
    let plan = plan(running, lost_s, &best, &account);
    Verdict::Move { to: best.to.clone(), reason: account, plan }
}

fn account(running: &Running, lost_s: f64, best: &Better) -> String {
    format!(
        "{} of {} lost to the network at {}, {} would have been at {}; moving there costs {}",
        format_seconds(lost_s),
        format_seconds(running.wall_s),
        running.host,
        format_seconds(best.lost_there_s),
        best.to,
        format_seconds(best.cost.total_s)
    )
}

/// The place for which the most is saved beyond its cost. An error only when every place fails.
fn best_place(running: &Running, lost_s: f64) -> Result<Option<Better<'_>>, Refused> {
    let mut best: Option<Better> = None;
    let mut refused = None;
    for host in &running.cluster.hosts {
        if host.id == running.host || host.memory_free_bytes < running.memory_bytes {
            continue;
        }
        match place(running, lost_s, &host.id) {
            Ok(place) if place.lost_there_s > lost_s * CLEARLY_LESS || lost_s == 0.0 => {}
            Ok(place) if best.as_ref().is_none_or(|b| surplus_s(&place) > surplus_s(b)) => {
                best = Some(place);
            }
            Ok(_) => {}
            Err(why) => refused = Some(why),
        }
    }
    match (best, refused) {
        (None, Some(why)) => Err(why),
        (best, _) => Ok(best),
    }
}

fn surplus_s(place: &Better) -> f64 {
    place.saved_s - place.cost.total_s
}

fn place<'a>(running: &'a Running, lost_s: f64, to: &'a HostId) -> Result<Better<'a>, Refused> {
    let mut figures = Figures::default();
    let here_s = network_s(running, &running.host, &mut figures)?;
    let there_s = network_s(running, to, &mut figures)?;
    let bound_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let lost_there_s =
        if here_s > 0.0 { (lost_s * there_s / here_s).min(bound_s) } else { bound_s };
    let data_bytes = running.disks.iter().map(data_bytes).sum();
    let dirty = Dirty::new(running.dirty_bytes_per_s, data_bytes, running.wall_s);
    let (cluster, from) = (&running.cluster, &running.host);
    let mut cost = move_cost_with(cluster, from, to, running.memory_bytes, dirty)?;
    for figure in figures.into_vec() {
        if !cost.figures.contains(&figure) {
            cost.figures.push(figure);
        }
    }
    Ok(Better { to, lost_there_s, saved_s: lost_s - lost_there_s, cost })
}

/// What the network should add to this job's I/O at a host, by the probes. Only the ratio between
/// two hosts is used, so that what the probes get wrong at both is of no effect.
fn network_s(running: &Running, at: &HostId, figures: &mut Figures) -> Result<f64, Refused> {
    let mut total_s = 0.0;
    for disk in &running.disks {
        let work = VolumeWork::learn(disk);
        total_s += io_s(&running.cluster, at, &disk.home, &work, figures)? - work.home_s();
    }
    Ok(total_s.max(0.0))
}

fn data_bytes(disk: &DiskFacts) -> f64 {
    (disk.client.read_bytes + disk.client.write_bytes) as f64
}

/// Both ways for the rest of the job, of which nothing is known but what was done.
fn plan(running: &Running, lost_s: f64, best: &Better, account: &str) -> Plan {
    let waiting_s = not_computing_s(running.wall_s, running.vcpu_s, running.cpus);
    let busy_s: f64 = running.disks.iter().map(|d| seconds(d.client.busy_ns)).sum();
    let local_io_s = (busy_s.min(waiting_s) - lost_s).max(0.0);
    let mut stay = Seconds {
        cpu_s: running.wall_s - waiting_s,
        local_io_s,
        network_s: lost_s,
        other_s: waiting_s - lost_s - local_io_s,
        ..Seconds::default()
    };
    let mut there = stay;
    there.network_s = best.lost_there_s;
    there.migration_s = best.cost.total_s;
    add_up(&mut stay);
    add_up(&mut there);
    let start = running.host.clone();
    let option = |way, end, predicted, chosen, reason| PlanOption {
        way,
        start: start.clone(),
        end,
        predicted,
        chosen,
        reason,
    };
    let mut figures = vec!["assumed: as much work is left as was done here".to_owned()];
    figures.extend(best.cost.figures.iter().cloned());
    let saved = format!("would lose {} more", format_seconds(best.saved_s));
    let migrate = option(Way::Migrate, best.to.clone(), there, true, account.to_owned());
    let remote = option(Way::Remote, start.clone(), stay, false, saved);
    Plan { basis: Basis::Running, options: vec![migrate, remote], figures, moves: true }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixture::*;

    /// By hand: 512 MiB at 128 MiB/s and twelve round trips of 16 ms.
    const COST_S: f64 = 4.192;

    /// At home1, computing half of the time, after these reads of 16.4 ms in the cloud.
    fn reading(reads: u64, wall_s: f64) -> Running {
        Running {
            cluster: cluster(),
            host: host_id("home1"),
            memory_bytes: 512 * MIB,
            cpus: 1,
            may_migrate: true,
            moves: 0,
            dirty_bytes_per_s: Some(0),
            wall_s,
            vcpu_s: 0.0,
            disks: vec![disk("data", "cloud1", reads, 1, true)],
        }
    }

    fn moved_to(verdict: &Verdict) -> Option<&str> {
        match verdict {
            Verdict::Move { to, .. } => Some(to.as_str()),
            Verdict::Stay { .. } => None,
        }
    }

    fn why_stay(running: &Running) -> String {
        match consider(running) {
            Verdict::Stay { reason, .. } => reason,
            Verdict::Move { to, .. } => panic!("it moves to {to}"),
        }
    }

    #[test]
    fn it_stays_until_the_time_lost_reaches_the_cost_of_moving() {
        // 16.2 ms are lost with each read: 258 reads lose 4.18 s, 259 lose 4.196 s.
        let Verdict::Stay { lost_s, cost_s, .. } = consider(&reading(258, 10.0)) else {
            panic!("it moves before the cost is reached");
        };
        assert_close(lost_s, 258.0 * 0.0162);
        assert_close(cost_s.unwrap(), COST_S);
        assert_eq!(moved_to(&consider(&reading(259, 10.0))), Some("cloud1"));
    }

    #[test]
    fn a_move_comes_with_a_plan_and_a_reason_in_figures() {
        let Verdict::Move { reason, plan, .. } = consider(&reading(500, 20.0)) else {
            panic!("8.1 s are lost");
        };
        assert_eq!(
            reason,
            "8.1 s of 20 s lost to the network at home1, 0 s would have been at cloud1; moving \
             there costs 4.2 s"
        );
        assert_eq!(plan.basis, Basis::Running);
        let [migrate, remote] = plan.options.as_slice() else { panic!("two options") };
        assert!(migrate.chosen && migrate.way == Way::Migrate && plan.moves);
        assert_close(remote.predicted.total_s, 20.0);
        assert_close(migrate.predicted.total_s, 20.0 - 8.1 + COST_S);
    }

    #[test]
    fn computing_is_not_lost_to_the_network() {
        let mut running = reading(500, 20.0);
        running.vcpu_s = 17.0;
        assert_eq!(moved_to(&consider(&running)), None);
    }

    #[test]
    fn a_job_that_reads_from_two_sites_equally_gains_nothing() {
        let mut running = reading(1000, 30.0);
        running.disks.push(disk("other", "home1", 1000, 1, false));
        assert_eq!(why_stay(&running), "no host with room would lose less");
    }

    #[test]
    fn a_host_as_far_away_gains_nothing_whatever_the_probes_differ() {
        let mut running = reading(100_000, 2000.0);
        running.cluster.hosts[2].memory_free_bytes = 0;
        for link in running.cluster.links.iter_mut().filter(|l| l.from.as_str() == "home2") {
            link.blocks = Some(probe(REMOTE_US * 9 / 10));
        }
        assert_eq!(why_stay(&running), "no host with room would lose less");
    }

    #[test]
    fn it_stays_where_the_job_file_or_the_memory_says_so() {
        let mut running = reading(1000, 30.0);
        running.cluster.hosts[2].memory_free_bytes = 100 * MIB;
        assert_eq!(why_stay(&running), "no host with room would lose less");
        let mut running = reading(1000, 30.0);
        running.may_migrate = false;
        assert_eq!(why_stay(&running), "the job file says that it may not move");
    }

    #[test]
    fn it_stays_where_no_other_host_has_its_processor() {
        let mut running = reading(1000, 30.0);
        for host in &mut running.cluster.hosts[1..] {
            host.accelerator = perigee_model::vm::Accelerator::Tcg;
        }
        let why = why_stay(&running);
        assert!(why.contains("their processors differ"), "{why}");
        for host in &mut running.cluster.hosts {
            host.accelerator = perigee_model::vm::Accelerator::Tcg;
            host.cpu_model = host.id.to_string();
        }
        assert_eq!(moved_to(&consider(&running)), Some("cloud1"), "TCG makes its own processor");
    }

    #[test]
    fn it_stays_and_says_why_when_a_link_is_not_measured() {
        let mut running = reading(1000, 30.0);
        running.cluster.links.clear();
        assert!(why_stay(&running).contains("is not measured yet"));
    }

    #[test]
    fn after_a_move_the_next_must_save_twice_its_cost() {
        let mut running = reading(259, 10.0);
        running.moves = 1;
        assert!(why_stay(&running).contains("must save 2 times its cost"));
        assert_eq!(
            moved_to(&consider(&Running { moves: 1, ..reading(518, 10.0) })),
            Some("cloud1")
        );
    }

    #[test]
    fn nothing_measured_yet_is_a_reason_to_stay() {
        assert_eq!(moved_to(&consider(&reading(0, 0.0))), None);
    }

    /// Reads in the time of one look at the job, when this share of it is lost to the network.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small, positive")]
    fn reads_in(step_s: f64, share_lost: f64) -> u64 {
        (step_s * share_lost / 0.0162).floor() as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn never_worse_than_twice_the_best_in_hindsight(
            share_lost in 0.0..0.98f64,
            steps in 1u64..400,
            step_s in 0.05..5.0f64,
        ) {
            let reads_a_step = reads_in(step_s, share_lost);
            let lost_a_step_s = reads_a_step as f64 * 0.0162;
            let mut paid_s = 0.0;
            for step in 1..=steps {
                paid_s += lost_a_step_s;
                let running = reading(reads_a_step * step, step_s * step as f64);
                if moved_to(&consider(&running)) == Some("cloud1") {
                    paid_s += COST_S;
                    break;
                }
            }
            let best_s = (lost_a_step_s * steps as f64).min(COST_S);
            let limit_s = 2.0 * best_s + lost_a_step_s + 1e-6;
            prop_assert!(paid_s <= limit_s, "paid {}, the best was {}", paid_s, best_s);
        }

        /// The job reads now here, now there; its moves never cost more than what it loses.
        #[test]
        fn alternating_loads_do_not_make_it_ping_pong(
            phases in proptest::collection::vec((any::<bool>(), 1u64..60), 1..40),
        ) {
            let reads_a_step = reads_in(1.0, 0.9);
            let (mut at_cloud, mut moves, mut lost_s) = (false, 0u32, 0.0);
            let (mut cloud_reads, mut home_reads, mut wall_s) = (0, 0, 0.0);
            for (reads_cloud, steps) in phases {
                for _ in 0..steps {
                    if reads_cloud { cloud_reads += reads_a_step } else { home_reads += reads_a_step }
                    wall_s += 1.0;
                    if reads_cloud != at_cloud {
                        lost_s += reads_a_step as f64 * 0.0162;
                    }
                    let running = Running {
                        host: host_id(if at_cloud { "cloud1" } else { "home1" }),
                        moves,
                        disks: vec![
                            disk("a", "cloud1", cloud_reads, 1, !at_cloud),
                            disk("b", "home1", home_reads, 1, at_cloud),
                        ],
                        ..reading(0, wall_s)
                    };
                    if moved_to(&consider(&running)).is_some() {
                        at_cloud = !at_cloud;
                        moves += 1;
                        (cloud_reads, home_reads, wall_s) = (0, 0, 0.0);
                    }
                }
            }
            let paid_after_the_first_s = f64::from(moves.saturating_sub(1)) * COST_S;
            prop_assert!(paid_after_the_first_s <= lost_s / AFTER_A_MOVE, "{} moves", moves);
        }
    }
}
