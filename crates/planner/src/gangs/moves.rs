//! Decides whether all VMs of a running gang move to another site.
//!
//! It is the rule for one VM ([`crate::consider`]) with the time that the whole gang loses. Its VMs wait for each other, so that is what
//! the one loses to its data that loses most, and the time for which the link was busy with what they sent to each other between sites. The
//! price is that of all migrations, because they take turns and the others wait for the VM that moves. It has the largest factor that one of
//! its VMs has for its earlier moves ([`Running::price_factor`]).

use perigee_model::plan::{Basis, Estimate, Plan, PlanOption, Seconds, Way};
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{HostId, SiteId};

use super::{Room, Talked, at_site};
use crate::facts::{Cluster, Running};
use crate::moving::MoveCost;
use crate::network::lost_s;
use crate::refused::Refused;
use crate::running::{is_clearly_less, moves_at_s, of_host, price_s, with_surcharge};
use crate::spread::Spread;

/// What a gang does now.
#[derive(Debug, Clone)]
pub struct RunningGang {
    /// Its VMs, in the order of their ranks.
    pub members: Vec<Running>,
    /// What each has sent to each since all of them are where they are.
    pub sent: Vec<Vec<u64>>,
    /// For how long they have been there.
    pub wall_s: f64,
    /// When it ends, if that is known.
    pub left: Option<Estimate>,
    /// Room for more of its VMs.
    pub rooms: Vec<Room>,
}

/// What all its VMs do now.
#[derive(Debug, Clone, PartialEq)]
pub enum GangVerdict {
    /// They stay where they are.
    Stay {
        /// Why, in plain words.
        reason: String,
    },
    /// They move now.
    Move {
        /// The host of each rank.
        to: Vec<HostId>,
        /// What was lost and what it costs, in plain words.
        reason: String,
        /// The ways for as much work as was done here.
        plan: Plan,
    },
}

/// All VMs at one site.
struct Place<'a> {
    site: &'a SiteId,
    to: Vec<HostId>,
    talk_s: f64,
    data_s: f64,
    saved_s: f64,
    price_s: f64,
    moved: usize,
    impossible: Option<String>,
    figures: Vec<String>,
}

impl Place<'_> {
    fn lost_s(&self) -> f64 {
        self.talk_s + self.data_s
    }
}

/// Decides from what was measured since the VMs came where they are. The caller repeats this while the gang runs.
pub fn consider(gang: &RunningGang) -> GangVerdict {
    let stay = |reason: String| GangVerdict::Stay { reason };
    let Some(first) = gang.members.first() else { return stay("it has no VMs".to_owned()) };
    let cluster = &first.cluster;
    let now: Vec<HostId> = gang.members.iter().map(|member| member.host.clone()).collect();
    let talk_s = match talk_s(cluster, &now, gang) {
        Ok(talk_s) => talk_s,
        Err(why) => return stay(format!("no move can be planned: {why}")),
    };
    let lost_lately_s = |member| lost_to_data_s(member) * lately(gang, member);
    let data_s = gang.members.iter().map(lost_lately_s).fold(0.0, f64::max);
    let lost_s = talk_s + data_s;
    let mut sites: Vec<&SiteId> = gang.rooms.iter().map(|room| &room.site).collect();
    sites.sort();
    sites.dedup();
    let mut refused = None;
    let mut places = Vec::new();
    for site in sites {
        let to = at_site(&gang.rooms, site, &now, &gang.sent).filter(|to| *to != now);
        match to.map(|to| place(gang, site, to, lost_s)) {
            Some(Ok(place)) if is_clearly_less(place.lost_s(), lost_s) => places.push(place),
            Some(Ok(_)) | None => {}
            Some(Err(why)) => refused = Some(why),
        }
    }
    let is_better = |one: &Place, other: &Place| {
        let rank = |place: &Place| (place.impossible.is_none(), place.saved_s - place.price_s);
        rank(one) > rank(other)
    };
    let best = places.into_iter();
    let best = best.reduce(|best, next| if is_better(&next, &best) { next } else { best });
    let Some(best) = best else {
        if let Some(why) = refused {
            return stay(format!("no move can be planned: {why}"));
        }
        return stay("no site with room for all of its VMs would lose less".to_owned());
    };
    if let Some(why) = best.impossible {
        return stay(format!("a move to site {} is not possible: {why}", best.site));
    }
    let factor = gang.members.iter().map(|member| member.price_factor).fold(1.0, f64::max);
    let to_lose = gang.left.filter(|_| gang.wall_s > 0.0).map(|left| {
        let share = best.saved_s / gang.wall_s;
        Spread::between(left.low_s * share, left.expected_s * share, left.high_s * share)
    });
    let reason = reason(gang, &best, (talk_s, data_s), to_lose);
    if best.saved_s < moves_at_s(best.price_s * factor, to_lose) {
        return stay(with_surcharge(reason, factor));
    }
    let plan = plan(gang, &now, &best, (lost_s, &reason));
    GangVerdict::Move { to: best.to, reason, plan }
}

fn lost_to_data_s(member: &Running) -> f64 {
    lost_s(&member.disks, member.wall_s, member.vcpu_s, member.cpus)
}

/// The share of what is known of a member that counts: a member which stayed where it was in the gang's last move has figures of
/// a longer time than the others.
fn lately(gang: &RunningGang, member: &Running) -> f64 {
    if member.wall_s > gang.wall_s { gang.wall_s / member.wall_s } else { 1.0 }
}

/// For how long the busiest link between two sites carries what the VMs have sent to each other; never longer than they took for it.
fn talk_s(cluster: &Cluster, at: &[HostId], gang: &RunningGang) -> Result<f64, Refused> {
    Ok(Talked::at(cluster, at, &gang.sent)?.link_s.min(gang.wall_s))
}

fn place<'a>(
    gang: &RunningGang,
    site: &'a SiteId,
    to: Vec<HostId>,
    lost_now_s: f64,
) -> Result<Place<'a>, Refused> {
    let cluster = &gang.members[0].cluster;
    let talk_s = talk_s(cluster, &to, gang)?;
    let (mut data_s, mut slower_s) = (0.0_f64, 0.0_f64);
    let mut cost = MoveCost { wait_s: Some(0.0), ..MoveCost::default() };
    let (mut moved, mut impossible, mut figures) = (0, None, Vec::<String>::new());
    for (member, host) in gang.members.iter().zip(&to) {
        let (here_s, lately) = (lost_to_data_s(member), lately(gang, member));
        if *host == member.host {
            data_s = data_s.max(here_s * lately);
            continue;
        }
        let there = of_host(member, here_s, member.cluster.host(host)?)?;
        data_s = data_s.max(there.lost_there_s * lately);
        slower_s = slower_s.max((here_s - there.lost_there_s - there.saved_s) * lately);
        cost.job_s += there.cost.job_s;
        cost.total_s += there.cost.total_s;
        cost.wait_s = cost.wait_s.zip(there.cost.wait_s).map(|(one, other)| one.max(other));
        moved += 1;
        impossible = impossible.or(there.impossible);
        for figure in there.cost.figures {
            if !figures.contains(&figure) {
                figures.push(figure);
            }
        }
    }
    let saved_s = lost_now_s - talk_s - data_s - slower_s;
    let price_s = price_s(&cost, saved_s, gang.wall_s);
    Ok(Place { site, to, talk_s, data_s, saved_s, price_s, moved, impossible, figures })
}

fn reason(
    gang: &RunningGang,
    best: &Place,
    (talk_s, data_s): (f64, f64),
    to_lose: Option<Spread>,
) -> String {
    let [talk, data, there, price, wall] =
        [talk_s, data_s, best.lost_s(), best.price_s, gang.wall_s].map(format_seconds);
    let more = to_lose.map_or_else(String::new, |left| {
        format!("; {} more would be lost until its end", left.estimate())
    });
    format!(
        "{talk} of {wall} lost to talk between sites and {data} to its data; {there} would have been with all VMs at site {}; \
         moving {} of {} there costs {price}{more}",
        best.site,
        best.moved,
        gang.members.len()
    )
}

fn plan(gang: &RunningGang, now: &[HostId], best: &Place, (lost_s, reason): (f64, &str)) -> Plan {
    let other_s = (gang.wall_s - lost_s).max(0.0);
    let stay = Seconds { network_s: lost_s, other_s, ..Seconds::default() }.added_up();
    let (network_s, migration_s) = (best.lost_s(), best.price_s);
    let moved = Seconds { network_s, migration_s, other_s, ..Seconds::default() }.added_up();
    let option = |way, end: &HostId, predicted: Seconds, chosen, reason| PlanOption {
        way,
        start: now[0].clone(),
        end: end.clone(),
        predicted,
        total: Spread::between(0.0, predicted.total_s, 2.0 * predicted.total_s).estimate(),
        shipped_bytes: None,
        unknown: Vec::new(),
        longer: None,
        chosen,
        reason,
        cost: None,
        hosts: Vec::new(),
        end_hosts: Vec::new(),
    };
    let sent: u64 = gang.sent.iter().flatten().sum();
    let mut figures = vec![
        "assumed: as much work is left as was done here".to_owned(),
        "assumed: its VMs wait for each other, also for the one that moves".to_owned(),
        format!("measured: its VMs have sent {} to each other", format_bytes(sent)),
    ];
    figures.extend(best.figures.iter().cloned());
    let saved = format!("would lose {} more", format_seconds(best.saved_s));
    let options = vec![
        option(Way::Migrate, &best.to[0], moved, true, reason.to_owned()),
        option(Way::Remote, &now[0], stay, false, saved),
    ];
    Plan { basis: Basis::Running, options, figures, moves: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    /// Two VMs, one at `home1` and one at `cloud1`, that have sent so much to each other in 100 s. `home2` has room.
    fn torn(sent_mib: u64) -> RunningGang {
        let bytes = sent_mib * MIB;
        RunningGang {
            members: vec![idle("home1"), idle("cloud1")],
            sent: vec![vec![0, bytes], vec![bytes / 10, 0]],
            wall_s: 100.0,
            left: None,
            rooms: [("home1", "home", 0), ("home2", "home", 1), ("cloud1", "cloud", 0)]
                .map(|(host, site, holds)| Room {
                    host: host_id(host),
                    site: SiteId::new(site).unwrap(),
                    holds,
                })
                .to_vec(),
        }
    }

    fn idle(at: &str) -> Running {
        Running {
            cluster: cluster(),
            traits: traits(),
            history: Vec::new(),
            others: Vec::new(),
            progress: None,
            progress_at_arrival: 0.0,
            requests: 0.0,
            host: host_id(at),
            moving: None,
            memory_bytes: 512 * MIB,
            cpus: 1,
            may_migrate: true,
            uses_confined: false,
            refused: Vec::new(),
            moves: 0,
            price_factor: 1.0,
            dirty_bytes_per_s: Some(0),
            wall_s: 100.0,
            vcpu_s: 50.0,
            run_delay_s: None,
            disks: Vec::new(),
        }
    }

    fn why(verdict: GangVerdict) -> String {
        match verdict {
            GangVerdict::Stay { reason } => reason,
            GangVerdict::Move { to, .. } => panic!("it moves to {to:?}"),
        }
    }

    #[test]
    fn a_gang_whose_talk_crosses_sites_comes_together_when_that_has_cost_as_much_as_the_move() {
        // 512 MiB at 128 MiB/s, at half of its speed: about 2 s.
        let reason = why(consider(&torn(128)));
        assert!(reason.starts_with("1.0 s of 100 s lost to talk between sites"), "{reason}");
        let GangVerdict::Move { to, reason, plan } = consider(&torn(1024)) else {
            panic!("it stays: {}", why(consider(&torn(1024))))
        };
        assert_eq!(to, [host_id("home1"), host_id("home2")], "the one that is there stays");
        assert!(reason.contains("moving 1 of 2 there"), "{reason}");
        assert!(plan.chosen().is_some_and(|option| option.way == Way::Migrate));
    }

    #[test]
    fn a_gang_that_is_about_to_end_or_has_just_moved_is_left_where_it_is() {
        let soon = Estimate { expected_s: 2.0, low_s: 1.0, high_s: 3.0 };
        why(consider(&RunningGang { left: Some(soon), ..torn(400) }));
        let GangVerdict::Move { .. } = consider(&torn(400)) else {
            panic!("without that it moves")
        };
        let mut moved = torn(400);
        moved.members[1].price_factor = 2.0;
        let why = why(consider(&moved));
        assert!(why.ends_with("after its last moves it must save 2.0 times that"), "{why}");
    }

    #[test]
    fn a_gang_that_has_no_room_at_one_site_or_talks_within_one_stays() {
        let mut full = torn(10_000);
        full.rooms.iter_mut().for_each(|room| room.holds = 0);
        assert!(why(consider(&full)).starts_with("no site with room"));
        let mut together = torn(10_000);
        together.members[1].host = host_id("home2");
        why(consider(&together));
    }

    #[test]
    fn a_refused_destination_is_not_asked_again_at_once() {
        let mut refused = torn(1024);
        refused.members[1].refused.push(crate::RefusedWay {
            way: Way::Migrate,
            to: host_id("home2"),
            why: "its migration was aborted".to_owned(),
        });
        assert!(why(consider(&refused)).contains("its migration was aborted"));
    }
}
