//! Room for all VMs of a gang, or for none.

use std::collections::BTreeSet;

use perigee_model::job::Start;
use perigee_model::{HostId, SiteId};

use super::room::{Room, Rooms, Ruled, may_use, words};
use super::{NotChosen, Waiting, named};

/// Where all VMs of a gang may be: at one site, or anywhere.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    Site(SiteId),
    Everywhere,
}

impl Scope {
    fn has(&self, room: &Room) -> bool {
        match self {
            Self::Site(site) => room.host.site == *site,
            Self::Everywhere => true,
        }
    }
}

/// The hosts of all its VMs, in the order of their ranks.
///
/// # Errors
/// Why it waits. Then nothing is taken, and some hosts may be reserved for it.
pub(super) fn start<C>(
    waiting: &Ruled,
    rooms: &mut Rooms,
    choose: &mut C,
) -> Result<Vec<HostId>, NotChosen>
where
    C: FnMut(&Waiting, &[HostId]) -> Result<HostId, NotChosen>,
{
    let scopes = scopes(waiting, rooms).map_err(|reason| waiting.with_rules(reason))?;
    let fits_now = |scope: &&Scope| count(waiting, rooms, scope, free) >= waiting.count;
    let ready: Vec<&Scope> = scopes.iter().filter(fits_now).collect();
    if ready.is_empty() {
        return Err(waiting.with_rules(reserve(waiting, rooms, &scopes)).into());
    }
    let mut candidates: BTreeSet<HostId> = BTreeSet::new();
    for scope in &ready {
        let of_scope = rooms.rooms.iter().filter(|room| scope.has(room) && free(waiting, room) > 0);
        candidates.extend(of_scope.map(|room| room.host.id.clone()));
    }
    let mut after = rooms.clone();
    let mut hosts = Vec::new();
    while hosts.len() < waiting.count as usize {
        // A host's start slots are for its first VM: the others boot beside it.
        let open = after
            .rooms
            .iter()
            .filter(|room| candidates.contains(&room.host.id) && waiting.holds(room.host.free) > 0);
        let open: Vec<HostId> = open.map(|room| room.host.id.clone()).collect();
        let host = choose(waiting, &open).inspect_err(|not_chosen| {
            if matches!(not_chosen, NotChosen::NotYet(_)) {
                reserve(waiting, rooms, &scopes);
            }
        })?;
        if hosts.is_empty() {
            let room = rooms.rooms.iter().find(|room| room.host.id == host);
            let scope = ready.iter().find(|scope| room.is_none_or(|room| scope.has(room)));
            if let Some(scope) = scope {
                let outside = rooms.rooms.iter().filter(|room| !scope.has(room));
                let outside: BTreeSet<&HostId> = outside.map(|room| &room.host.id).collect();
                candidates.retain(|id| !outside.contains(id));
            }
        }
        after.take(&host, waiting.demand);
        if waiting.is_one_each() {
            candidates.remove(&host);
        }
        hosts.push(host);
    }
    *rooms = after;
    Ok(hosts)
}

/// The sites that are large enough for it when all jobs have ended; all hosts together if no site is.
fn scopes(waiting: &Ruled, rooms: &Rooms) -> Result<Vec<Scope>, String> {
    let sites: BTreeSet<&SiteId> = rooms.rooms.iter().map(|room| &room.host.site).collect();
    let sites = sites.into_iter().map(|site| Scope::Site(site.clone()));
    let large: Vec<Scope> =
        sites.filter(|scope| count(waiting, rooms, scope, for_jobs) >= waiting.count).collect();
    if !large.is_empty() {
        return Ok(large);
    }
    if count(waiting, rooms, &Scope::Everywhere, for_jobs) >= waiting.count {
        return Ok(vec![Scope::Everywhere]);
    }
    if let Some(drained) = rooms.why_drained(waiting) {
        return Err(format!("{}; {drained}", too_large(waiting, rooms)));
    }
    Err(too_large(waiting, rooms))
}

/// Whether there is room for all of its VMs, or for its only one, when all jobs have ended.
pub(super) fn may_have_room(waiting: &Ruled, rooms: &Rooms) -> bool {
    if !waiting.is_one_host() {
        return scopes(waiting, rooms).is_ok();
    }
    let whole = Waiting { count: 1, ..waiting.as_one() };
    scopes(&rooms.ruled(&whole), rooms).is_ok()
}

fn total(waiting: &Ruled, room: &Room) -> u32 {
    if may_use(waiting, room) { waiting.holds(room.host.total) } else { 0 }
}

/// VMs without a job do not end by themselves, so what they have is not counted on.
fn for_jobs(waiting: &Ruled, room: &Room) -> u32 {
    if may_use(waiting, room) { waiting.holds(room.host.for_jobs()) } else { 0 }
}

/// How many of its VMs can start at a host now.
fn free(waiting: &Ruled, room: &Room) -> u32 {
    let is_open = may_use(waiting, room) && room.kept_for.is_none() && room.host.start_slots > 0;
    if is_open { waiting.holds(room.host.free) } else { 0 }
}

/// The same, also where a host is reserved, or starts as many jobs as it may.
fn free_there(waiting: &Ruled, room: &Room) -> u32 {
    if may_use(waiting, room) { waiting.holds(room.host.free) } else { 0 }
}

fn unreserved(waiting: &Ruled, room: &Room) -> u32 {
    if room.kept_for.is_none() { free_there(waiting, room) } else { 0 }
}

fn may_keep(waiting: &Ruled, room: &Room) -> u32 {
    if room.kept_for.is_none() { for_jobs(waiting, room) } else { 0 }
}

fn count(waiting: &Ruled, rooms: &Rooms, scope: &Scope, of: impl Fn(&Ruled, &Room) -> u32) -> u32 {
    let within = rooms.rooms.iter().filter(|room| scope.has(room));
    within.map(|room| of(waiting, room)).fold(0, u32::saturating_add)
}

/// Reserves the hosts of the scope where most is free already, as many as all of its VMs need. Nothing else starts there, so
/// what is free only grows. Hosts that are reserved for other jobs are left to these; if the others are too few, none is
/// reserved. Returns why the gang waits.
fn reserve(waiting: &Ruled, rooms: &mut Rooms, scopes: &[Scope]) -> String {
    let needs = words(waiting.demand);
    let wanted = waiting.count;
    let most = scopes.iter().max_by_key(|scope| {
        let is_enough = count(waiting, rooms, scope, may_keep) >= wanted;
        (is_enough, count(waiting, rooms, scope, unreserved))
    });
    let Some(scope) = most else { return "no host is up".to_owned() };
    let is_enough = count(waiting, rooms, scope, may_keep) >= wanted;
    let now = match is_enough {
        true => count(waiting, rooms, scope, unreserved),
        false => count(waiting, rooms, scope, free_there),
    };
    let mut others = rooms.rooms.iter().filter(|room| scope.has(room) && !is_enough);
    let other = others.find_map(|room| room.kept_for.as_ref());
    let other = other.map(|job| named(job, waiting));
    let place = match (scope, &waiting.start) {
        (_, Start::Host(host)) => format!(" at {host}"),
        (Scope::Site(site), _) => format!(" at site {site}"),
        (Scope::Everywhere, _) => String::new(),
    };
    let mut reason =
        format!("it needs {wanted} VMs with {needs} each, all at once; {now} have room now{place}");
    if let Some(other) = other {
        return format!("{reason}, and hosts there are reserved for {other}");
    }
    // There is room, and hosts with a part of it are starting as many jobs as they may: that changes soon.
    let is_starting = now >= wanted;
    if is_starting {
        reason = "hosts with room are starting as many jobs as they may at once".to_owned();
    }
    if rooms.kept.contains(&waiting.start) {
        return reason;
    }
    let holds =
        |room: &Room| if is_starting { unreserved(waiting, room) } else { may_keep(waiting, room) };
    let mut within: Vec<&mut Room> =
        rooms.rooms.iter_mut().filter(|room| scope.has(room) && holds(room) > 0).collect();
    within.sort_by_key(|room| std::cmp::Reverse(waiting.holds(room.host.free)));
    let mut kept = 0;
    let mut names = Vec::new();
    for room in within {
        if kept >= wanted {
            break;
        }
        kept = holds(room).saturating_add(kept);
        room.kept_for = Some(waiting.job.clone());
        names.push(room.host.id.to_string());
    }
    rooms.kept.push(waiting.start.clone());
    reason.push_str(&format!("; reserved for it: {}", names.join(", ")));
    reason
}

fn too_large(waiting: &Ruled, rooms: &Rooms) -> String {
    let (wanted, needs) = (waiting.count, words(waiting.demand));
    let all = count(waiting, rooms, &Scope::Everywhere, total);
    let most = count(waiting, rooms, &Scope::Everywhere, for_jobs);
    let beside = match all >= wanted {
        true => " beside the VMs without a job that are there",
        false => "",
    };
    let place = match &waiting.start {
        Start::Anywhere => String::new(),
        Start::Site(site) => format!(" of site {site}"),
        Start::Host(host) => format!(" named {host}"),
    };
    let each = if waiting.is_one_each() { ", one at each host" } else { "" };
    format!(
        "it needs {wanted} VMs with {needs} each{each}; the hosts{place} that are up have room for {most} at most{beside}"
    )
}
