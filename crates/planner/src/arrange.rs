//! Which VM of a gang gets which of its hosts, by what its VMs have sent to each other in an earlier run.
//!
//! The queue has chosen the hosts, at one site wherever one is large enough. Here only the ranks change places: those that talk most come to
//! one host, or at least to one site.

use std::collections::BTreeSet;

use perigee_model::{HostId, SiteId};

/// How much dearer a byte between sites is than one between hosts of a site.
const BETWEEN_SITES: u128 = 100;

/// A place for one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The VM starts there.
    pub host: HostId,
    /// The host's.
    pub site: SiteId,
}

fn distance(one: &Place, other: &Place) -> u128 {
    match (one.site == other.site, one.host == other.host) {
        (false, _) => BETWEEN_SITES,
        (true, false) => 1,
        (true, true) => 0,
    }
}

/// Whether all are at one host, or each at its own host of one site.
fn are_equally_far(places: &[Place]) -> bool {
    let Some((first, rest)) = places.split_first() else { return true };
    let hosts: BTreeSet<&HostId> = places.iter().map(|place| &place.host).collect();
    let is_one_site = rest.iter().all(|place| place.site == first.site);
    is_one_site && (hosts.len() == 1 || hosts.len() == places.len())
}

/// The places in the order of the ranks. `sent[i][j]` is what rank `i` has sent to rank `j`; what is missing counts as nothing.
///
/// It swaps the two ranks whose swap saves most until none saves anything. Each swap makes the sum smaller, and there are at most
/// as many as there are ranks, so a large gang takes no long time. Where all places are equally far from each other, nothing is to be saved.
pub(crate) fn arrange(mut places: Vec<Place>, sent: &[Vec<u64>]) -> Vec<Place> {
    if are_equally_far(&places) {
        return places;
    }
    let both = |i: usize, j: usize| {
        let of = |i: usize, j: usize| sent.get(i).and_then(|row| row.get(j)).copied();
        u128::from(of(i, j).unwrap_or_default()) + u128::from(of(j, i).unwrap_or_default())
    };
    let count = places.len();
    for _ in 0..count {
        let mut best: Option<(u128, usize, usize)> = None;
        for one in 0..count {
            for other in one + 1..count {
                if places[one].host == places[other].host {
                    continue;
                }
                let (mut now, mut then) = (0, 0);
                for third in (0..count).filter(|third| *third != one && *third != other) {
                    let [with_one, with_other] = [both(one, third), both(other, third)];
                    let [to_one, to_other] =
                        [one, other].map(|rank| distance(&places[rank], &places[third]));
                    now += with_one * to_one + with_other * to_other;
                    then += with_one * to_other + with_other * to_one;
                }
                let saved = u128::saturating_sub(now, then);
                if saved > best.map_or(0, |(most, ..)| most) {
                    best = Some((saved, one, other));
                }
            }
        }
        let Some((_, one, other)) = best else { break };
        places.swap(one, other);
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &[(&str, &str)]) -> Vec<Place> {
        let place = |(site, host): &(&str, &str)| Place {
            host: HostId::new(*host).expect("a name"),
            site: SiteId::new(*site).expect("a name"),
        };
        text.iter().map(place).collect()
    }

    fn hosts(places: &[Place]) -> Vec<&str> {
        places.iter().map(|place| place.host.as_str()).collect()
    }

    #[test]
    fn ranks_that_talk_come_to_one_site() {
        // 0 talks with 2, and 1 with 3.
        let mut sent = vec![vec![0; 4]; 4];
        (sent[0][2], sent[3][1]) = (1000, 800);
        let given = places(&[("home", "a"), ("home", "b"), ("cloud", "c"), ("cloud", "d")]);
        let found = arrange(given.clone(), &sent);
        assert_eq!(found[0].site, found[2].site);
        assert_eq!(found[1].site, found[3].site);
        let sorted = |all: &[Place]| {
            let mut all: Vec<String> = all.iter().map(|one| one.host.to_string()).collect();
            all.sort();
            all
        };
        assert_eq!(sorted(&found), sorted(&given), "the same places");
    }

    #[test]
    fn within_a_site_they_come_to_one_host() {
        let mut sent = vec![vec![0; 4]; 4];
        (sent[0][3], sent[1][2]) = (10, 10);
        let given = places(&[("home", "a"), ("home", "a"), ("home", "b"), ("home", "b")]);
        let found = arrange(given, &sent);
        assert_eq!(
            (found[0].host.as_str(), found[1].host.as_str()),
            (found[3].host.as_str(), found[2].host.as_str())
        );
    }

    #[test]
    fn places_that_are_equally_far_from_each_other_stay_as_they_are() {
        let same = places(&[("home", "a"), ("home", "a"), ("home", "a")]);
        let each = places(&[("home", "a"), ("home", "b"), ("home", "c")]);
        let two = places(&[("home", "a"), ("home", "a"), ("home", "b")]);
        let apart = places(&[("home", "a"), ("home", "b"), ("cloud", "c")]);
        assert!(are_equally_far(&same) && are_equally_far(&each));
        assert!(!are_equally_far(&two) && !are_equally_far(&apart));
    }

    #[test]
    fn without_figures_or_gain_nothing_changes() {
        let given = places(&[("home", "a"), ("cloud", "b"), ("home", "c")]);
        assert_eq!(hosts(&arrange(given.clone(), &[])), ["a", "b", "c"]);
        let all_alike = vec![vec![5; 3]; 3];
        assert_eq!(hosts(&arrange(given, &all_alike)), ["a", "b", "c"]);
    }
}
