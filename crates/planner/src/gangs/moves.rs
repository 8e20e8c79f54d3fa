//! Decides whether all VMs of a running gang move to another site, or their data come to them.
//!
//! It is the rule for one VM ([`crate::consider`]) with the time that the whole gang loses. Its VMs wait for each other, so that is what
//! the one loses to its data that loses most, and the time for which the link was busy with what they sent to each other between sites. The
//! price of a move is that of all migrations, because they take turns and the others wait for the VM that moves. Copies of data to the VMs go
//! on at the same time, so the price of all copies is that of the VM that loses most by them. Each price has the largest factor that one of
//! the VMs has for its earlier changes ([`Running::price_factor`]). Of both changes the one that saves more is made.

use std::cmp::Ordering;

use perigee_model::plan::{Basis, Estimate, Plan, PlanOption, Seconds, Way};
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{HostId, SiteId};

use super::{Room, Talked, at_site};
use crate::copying::{ComingTo, copies_of};
use crate::facts::{Cluster, Running};
use crate::moving::MoveCost;
use crate::network::lost_s;
use crate::refused::Refused;
use crate::running::{
    coming, is_clearly_less, moves_at_s, of_host, price_s, reading_so_far, why_it_may_not_come,
    with_surcharge,
};
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
    /// They stay, and the data volumes of each come to its host.
    Copy {
        /// As of a move.
        reason: String,
        /// As of a move.
        plan: Plan,
    },
}

/// A change with which the gang would have lost less.
struct Better<'a> {
    /// Where all VMs would be; `None`: they stay, and their data come.
    site: Option<&'a SiteId>,
    to: Vec<HostId>,
    talk_s: f64,
    data_s: f64,
    saved_s: f64,
    price_s: f64,
    /// So many VMs move, or so many volumes come.
    count: usize,
    impossible: Option<String>,
    figures: Vec<String>,
}

impl Better<'_> {
    fn lost_s(&self) -> f64 {
        self.talk_s + self.data_s
    }

    fn surplus_s(&self) -> f64 {
        self.saved_s - self.price_s
    }

    fn way(&self) -> Way {
        if self.site.is_some() { Way::Migrate } else { Way::Copy }
    }

    /// The greater, the better: first of all it has to be possible.
    fn rank(&self) -> (bool, f64) {
        (self.impossible.is_none(), self.surplus_s())
    }

    fn why_not(&self) -> String {
        let why = self.impossible.as_deref().unwrap_or_default();
        match self.site {
            Some(site) => format!("a move to site {site} is not possible: {why}"),
            None => format!("copy is not possible: {why}"),
        }
    }
}

/// What a gang has lost since its VMs came where they are.
#[derive(Debug, Clone, Copy)]
struct Lost {
    /// To what its VMs sent to each other between sites.
    talk_s: f64,
    /// To its data.
    data_s: f64,
}

impl Lost {
    fn sum_s(self) -> f64 {
        self.talk_s + self.data_s
    }
}

/// Decides from what was measured since the VMs came where they are. The caller repeats this while the gang runs.
pub fn consider(gang: &RunningGang) -> GangVerdict {
    let stay = |reason: String| GangVerdict::Stay { reason };
    let Some(first) = gang.members.first() else { return stay("it has no VMs".to_owned()) };
    let now: Vec<HostId> = gang.members.iter().map(|member| member.host.clone()).collect();
    let no_plan = |why: Refused| stay(format!("no move can be planned: {why}"));
    let talk_s = match talk_s(&first.cluster, &now, gang) {
        Ok(talk_s) => talk_s,
        Err(why) => return no_plan(why),
    };
    let lost_lately_s = |member| lost_to_data_s(member) * lately(gang, member);
    let data_s = gang.members.iter().map(lost_lately_s).fold(0.0, f64::max);
    let lost = Lost { talk_s, data_s };
    let copy = copied(gang, &now, lost);
    let can_copy = copy.as_ref().is_some_and(|copy| copy.impossible.is_none());
    let moved = match best_move(gang, &now, lost) {
        Err(why) if !can_copy => return no_plan(why),
        moved => moved.unwrap_or_default(),
    };
    let mut changes: Vec<Better> = moved.into_iter().chain(copy).collect();
    // The sort is stable: of equally good ones the move is made.
    changes.sort_by(|one, other| other.rank().partial_cmp(&one.rank()).unwrap_or(Ordering::Equal));
    let Some(best) = changes.first().filter(|best| best.impossible.is_none()) else {
        return stay(why_none(&changes));
    };
    let factor = gang.members.iter().map(|member| member.price_factor).fold(1.0, f64::max);
    let to_lose = gang.left.filter(|_| gang.wall_s > 0.0).map(|left| {
        let share = best.saved_s / gang.wall_s;
        Spread::between(left.low_s * share, left.expected_s * share, left.high_s * share)
    });
    let reason = reason(gang, best, lost, to_lose);
    if best.saved_s < moves_at_s(best.price_s * factor, to_lose) {
        return stay(with_surcharge(reason, factor));
    }
    let plan = plan(gang, &now, &changes, (lost.sum_s(), &reason));
    match best.way() {
        Way::Copy => GangVerdict::Copy { reason, plan },
        _ => GangVerdict::Move { to: best.to.clone(), reason, plan },
    }
}

fn why_none(changes: &[Better]) -> String {
    let mut why = Vec::new();
    if changes.iter().all(|change| change.way() != Way::Migrate) {
        why.push("no site with room for all of its VMs would lose less".to_owned());
    }
    why.extend(changes.iter().map(Better::why_not));
    why.join("; ")
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

/// The site to which all VMs had best move; one that is not possible only if there is no other. An error only if the prediction failed for
/// one site, and no other is better than to stay.
fn best_move<'a>(
    gang: &'a RunningGang,
    now: &[HostId],
    lost: Lost,
) -> Result<Option<Better<'a>>, Refused> {
    let mut sites: Vec<&SiteId> = gang.rooms.iter().map(|room| &room.site).collect();
    sites.sort();
    sites.dedup();
    let mut refused = None;
    let mut best: Option<Better> = None;
    for site in sites {
        let to = at_site(&gang.rooms, site, now, &gang.sent).filter(|to| *to != now);
        match to.map(|to| moved(gang, site, to, lost)) {
            Some(Ok(moved)) if is_clearly_less(moved.lost_s(), lost.sum_s()) => {
                if best.as_ref().is_none_or(|best| moved.rank() > best.rank()) {
                    best = Some(moved);
                }
            }
            Some(Ok(_)) | None => {}
            Some(Err(why)) => refused = Some(why),
        }
    }
    match (best, refused) {
        (None, Some(why)) => Err(why),
        (best, _) => Ok(best),
    }
}

/// All VMs at one site.
fn moved<'a>(
    gang: &'a RunningGang,
    site: &'a SiteId,
    to: Vec<HostId>,
    lost: Lost,
) -> Result<Better<'a>, Refused> {
    let cluster = &gang.members[0].cluster;
    let talk_s = talk_s(cluster, &to, gang)?;
    let (mut data_s, mut slower_s) = (0.0_f64, 0.0_f64);
    let mut cost = MoveCost { wait_s: Some(0.0), ..MoveCost::default() };
    let (mut count, mut impossible, mut figures) = (0, None, Vec::<String>::new());
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
        count += 1;
        impossible = impossible.or(there.impossible);
        for figure in there.cost.figures {
            if !figures.contains(&figure) {
                figures.push(figure);
            }
        }
    }
    let saved_s = lost.sum_s() - talk_s - data_s - slower_s;
    let price_s = price_s(&cost, saved_s, gang.wall_s);
    let site = Some(site);
    Ok(Better { site, to, talk_s, data_s, saved_s, price_s, count, impossible, figures })
}

/// The data volumes of all VMs come to these. `None` if none is elsewhere, or if a link is not measured.
fn copied<'a>(gang: &'a RunningGang, now: &[HostId], lost: Lost) -> Option<Better<'a>> {
    let coming_to = |member: &'a Running| ComingTo {
        host: &member.host,
        volumes: coming(member),
        reading: reading_so_far(member, lost_to_data_s(member)),
    };
    let vms: Vec<ComingTo> = gang.members.iter().map(coming_to).collect();
    let count: usize = vms.iter().map(|vm| vm.volumes.len()).sum();
    if count == 0 || !is_clearly_less(0.0, lost.data_s) {
        return None;
    }
    let (cost, kept) = copies_of(&gang.members[0].cluster, &vms).ok()?;
    let (talk_s, data_s, saved_s) = (lost.talk_s, 0.0, lost.data_s);
    Some(Better {
        site: None,
        to: now.to_vec(),
        talk_s,
        data_s,
        saved_s,
        price_s: price_s(&cost, saved_s, gang.wall_s),
        count,
        impossible: kept.or_else(|| gang.members.iter().find_map(why_it_may_not_come)),
        figures: cost.figures,
    })
}

fn reason(gang: &RunningGang, best: &Better, lost: Lost, to_lose: Option<Spread>) -> String {
    let [talk, data, there, price, wall] =
        [lost.talk_s, lost.data_s, best.lost_s(), best.price_s, gang.wall_s].map(format_seconds);
    let more = to_lose.map_or_else(String::new, |left| {
        format!("; {} more would be lost until its end", left.estimate())
    });
    let (count, all) = (best.count, gang.members.len());
    let change = match best.site {
        Some(site) => format!(
            "{there} would have been with all VMs at site {site}; moving {count} of {all} there costs {price}"
        ),
        None => format!(
            "{there} would have been with each VM's data at its host; copying {count} volumes costs {price}"
        ),
    };
    format!("{talk} of {wall} lost to talk between sites and {data} to its data; {change}{more}")
}

/// `changes`: the best one first, which is chosen.
fn plan(
    gang: &RunningGang,
    now: &[HostId],
    changes: &[Better],
    (lost_s, reason): (f64, &str),
) -> Plan {
    let other_s = (gang.wall_s - lost_s).max(0.0);
    let stay = Seconds { network_s: lost_s, other_s, ..Seconds::default() }.added_up();
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
    let changed = |better: &Better, chosen, reason| {
        let (network_s, migration_s) = (better.lost_s(), better.price_s);
        let predicted = Seconds { network_s, migration_s, other_s, ..Seconds::default() };
        option(better.way(), &better.to[0], predicted.added_up(), chosen, reason)
    };
    let sent: u64 = gang.sent.iter().flatten().sum();
    let mut figures = vec![
        "assumed: as much work is left as was done here".to_owned(),
        "assumed: its VMs wait for each other, also for the one that moves".to_owned(),
        format!("measured: its VMs have sent {} to each other", format_bytes(sent)),
    ];
    let mut options = Vec::new();
    let Some((best, others)) = changes.split_first() else {
        return Plan { basis: Basis::Running, options, figures, moves: false };
    };
    figures.extend(best.figures.iter().cloned());
    options.push(changed(best, true, reason.to_owned()));
    let (possible, impossible): (Vec<&Better>, Vec<&Better>) =
        others.iter().partition(|other| other.impossible.is_none());
    for other in possible {
        let less = format_seconds(best.surplus_s() - other.surplus_s());
        options.push(changed(other, false, format!("would save {less} less, after its cost")));
    }
    let saved = format!("would lose {} more", format_seconds(best.saved_s));
    options.push(option(Way::Remote, &now[0], stay, false, saved));
    for other in impossible {
        let why = other.impossible.as_deref().unwrap_or_default();
        options.push(changed(other, false, format!("not possible: {why}")));
    }
    Plan { basis: Basis::Running, options, figures, moves: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{CopyFacts, RefusedWay};
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
            confined_to: None,
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
            GangVerdict::Copy { reason, .. } => panic!("its data come: {reason}"),
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
        refused.members[1].refused.push(refused_way(
            Way::Migrate,
            "home2",
            "its migration was aborted",
        ));
        assert!(why(consider(&refused)).contains("its migration was aborted"));
    }

    fn refused_way(way: Way, to: &str, why: &str) -> RefusedWay {
        RefusedWay { way, to: host_id(to), why: why.to_owned() }
    }

    /// Two VMs at `home1`. Each has read so often from its clone of one volume at `cloud1` in 100 s. Only the clones may come.
    fn far_from_its_data(reads: u64) -> RunningGang {
        let mut data = disk("data", "cloud1", reads, 1, true);
        data.copy = CopyFacts { bytes: 80 * MIB, ..CopyFacts::default() };
        let member = Running { disks: vec![data], ..idle("home1") };
        RunningGang { members: vec![member; 2], ..torn(0) }
    }

    #[test]
    fn the_data_of_a_gang_come_to_it_when_they_have_cost_as_much_as_their_copies() {
        // The copies cost the switch of one volume, and hardly any wait.
        let stays = why(consider(&far_from_its_data(5)));
        assert!(stays.contains("copying 2 volumes costs 0.08 s"), "{stays}");
        let verdict = consider(&far_from_its_data(100));
        let GangVerdict::Copy { reason, plan } = verdict else { panic!("{verdict:?}") };
        assert!(reason.contains("1.6 s to its data; 0 s would have been"), "{reason}");
        let ways: Vec<Way> = plan.options.iter().map(|option| option.way).collect();
        assert_eq!(ways, [Way::Copy, Way::Remote]);
        let copied = |figure: &&String| figure.starts_with("a copy from cloud1 to home1");
        let copied: Vec<&String> = plan.figures.iter().filter(copied).collect();
        assert_eq!(copied, ["a copy from cloud1 to home1: 0.80 s for at most 80 MiB"]);
    }

    #[test]
    fn of_a_move_and_a_copy_the_one_is_made_that_saves_more_and_may_be_made() {
        let mut gang = far_from_its_data(2000);
        gang.rooms[2].holds = 2;
        let verdict = consider(&gang);
        let GangVerdict::Copy { plan, .. } = verdict else { panic!("{verdict:?}") };
        let ways: Vec<Way> = plan.options.iter().map(|option| option.way).collect();
        assert_eq!(ways, [Way::Copy, Way::Migrate, Way::Remote]);
        assert!(plan.options[1].reason.contains("less, after its cost"), "{plan:?}");
        gang.members[1].refused.push(refused_way(Way::Copy, "home1", "its home lets none go"));
        let verdict = consider(&gang);
        let GangVerdict::Move { to, plan, .. } = verdict else { panic!("{verdict:?}") };
        assert_eq!(to, [host_id("cloud1"), host_id("cloud1")]);
        assert_eq!(plan.options[2].reason, "not possible: its home lets none go");
        gang.rooms[2].holds = 0;
        let why = why(consider(&gang));
        assert!(why.ends_with("copy is not possible: its home lets none go"), "{why}");
    }

    #[test]
    fn data_that_stay_are_not_copied_to_a_gang() {
        let mut gang = far_from_its_data(2000);
        for member in &mut gang.members {
            member.disks[0].copy.stays = Some("others read it".to_owned());
        }
        let why = why(consider(&gang));
        assert!(why.contains("volume data stays at cloud1: others read it"), "{why}");
    }
}
