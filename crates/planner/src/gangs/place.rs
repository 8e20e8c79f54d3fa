//! To which hosts of a site the VMs of a gang could go.

use std::collections::BTreeMap;

use perigee_model::{HostId, SiteId};

use crate::queue::Groups;

/// A host, and for how many more VMs of the gang it has room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The host.
    pub host: HostId,
    /// The host's.
    pub site: SiteId,
    /// So many more.
    pub holds: u32,
}

/// What the rules of a gang's VMs among themselves leave of the rooms. `now` are the hosts of its VMs.
pub fn ruled(mut rooms: Vec<Room>, groups: &Groups, now: &[HostId]) -> Vec<Room> {
    if groups.apart.is_some() {
        for room in &mut rooms {
            room.holds = if now.contains(&room.host) { 0 } else { room.holds.min(1) };
        }
    }
    if groups.together.is_some() {
        let holds_all = |room: &Room| room.holds as usize >= now.len();
        let mut most: BTreeMap<SiteId, Room> = BTreeMap::new();
        for room in rooms.drain(..).filter(holds_all) {
            let of_site = most.entry(room.site.clone()).or_insert_with(|| room.clone());
            if room.holds > of_site.holds {
                *of_site = room;
            }
        }
        rooms.extend(most.into_values());
    }
    rooms
}

/// A host of the site for each rank. `now` are the present ones: a VM that is at the site stays where it is. `sent[i][j]` is what rank
/// `i` has sent to rank `j`. Each VM that comes gets the host where those are that it talks with most, and else the one with most room.
/// `None` if not all have room.
pub fn at_site(
    rooms: &[Room],
    site: &SiteId,
    now: &[HostId],
    sent: &[Vec<u64>],
) -> Option<Vec<HostId>> {
    let mut left: BTreeMap<&HostId, u32> = BTreeMap::new();
    left.extend(
        rooms.iter().filter(|room| room.site == *site).map(|room| (&room.host, room.holds)),
    );
    let one_way = |from: usize, to: usize| {
        sent.get(from).and_then(|row| row.get(to)).copied().unwrap_or_default()
    };
    let talk = |one: usize, other: usize| {
        u128::from(one_way(one, other)) + u128::from(one_way(other, one))
    };
    let stays = |host: &&HostId| left.contains_key(host);
    let mut places: Vec<Option<&HostId>> =
        now.iter().map(|host| Some(host).filter(stays)).collect();
    for rank in 0..now.len() {
        if places[rank].is_some() {
            continue;
        }
        let talk_at = |host: &HostId| -> u128 {
            let there = places.iter().enumerate().filter(|(_, at)| **at == Some(host));
            there.map(|(other, _)| talk(rank, other)).sum()
        };
        let free = left.iter().filter(|(_, holds)| **holds > 0);
        // Of equal ones the first by name, so that the same question has the same answer.
        let best = free.rev().max_by_key(|(host, holds)| (talk_at(host), **holds));
        let host = best.map(|(host, _)| *host)?;
        if let Some(holds) = left.get_mut(host) {
            *holds -= 1;
        }
        places[rank] = Some(host);
    }
    places.into_iter().map(|host| host.cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> HostId {
        HostId::new(name).unwrap()
    }

    fn room(name: &str, site: &str, holds: u32) -> Room {
        Room { host: host(name), site: SiteId::new(site).unwrap(), holds }
    }

    #[test]
    fn the_rules_of_a_gang_leave_one_vm_a_host_or_one_host() {
        let group = |name: &str| Some(format!("default~{name}"));
        let rooms = vec![
            room("a", "home", 4),
            room("c", "cloud", 2),
            room("d", "cloud", 3),
            room("e", "cloud", 1),
        ];
        let left = |groups: &Groups, now: &[&str]| {
            let now: Vec<HostId> = now.iter().map(|name| host(name)).collect();
            let left = ruled(rooms.clone(), groups, &now).into_iter();
            left.map(|room| format!("{} {}", room.host, room.holds)).collect::<Vec<_>>().join(", ")
        };
        let apart = Groups { apart: group("db"), ..Groups::default() };
        assert_eq!(left(&apart, &["a", "c"]), "a 0, c 0, d 1, e 1");
        let together = Groups { together: group("web"), ..Groups::default() };
        assert_eq!(left(&together, &["a", "a"]), "d 3, a 4");
        assert_eq!(left(&together, &["b"; 5]), "");
    }

    #[test]
    fn all_come_to_the_site_or_none_and_those_that_talk_come_together() {
        let rooms = [room("a", "home", 0), room("c", "cloud", 2), room("d", "cloud", 3)];
        let cloud = SiteId::new("cloud").unwrap();
        let now = ["a", "a", "d", "a"].map(host);
        let names = |hosts: Option<Vec<HostId>>| {
            hosts.map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
        };
        // The one that is there stays.
        assert_eq!(names(at_site(&rooms, &cloud, &now, &[])).as_deref(), Some("d c d d"));
        let mut sent = vec![vec![0; 4]; 4];
        (sent[0][1], sent[3][0]) = (100, 100);
        assert_eq!(names(at_site(&rooms, &cloud, &now, &sent)).as_deref(), Some("d d d d"));
        let few = [room("c", "cloud", 2), room("d", "cloud", 0)];
        assert_eq!(at_site(&few, &cloud, &now, &[]), None);
        assert_eq!(
            names(at_site(&few, &cloud, &["d", "d"].map(host), &[])).as_deref(),
            Some("d d")
        );
    }
}
