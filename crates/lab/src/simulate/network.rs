//! The network: links that flows share fairly.
//!
//! Each flow goes over a few links. The shares are max-min fair (Bertsekas and Gallager, Data Networks, 1992): no flow can have more
//! without another one having less that has no more than the first. They are found by progressive filling: all flows grow together until a
//! link is full or a flow has all that it can use, and those flows stay there while the others go on growing.
//!
//! Flows that share no link, not even through others, do not matter to each other. So when a flow begins or ends, only those change that
//! are connected with it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// The number of a flow, for as long as the flow is there.
pub type FlowId = usize;
/// The number of a link.
pub type LinkId = usize;

/// What a flow wants.
#[derive(Debug, Clone, PartialEq)]
pub struct Wish {
    /// The links that the flow goes over, each once.
    pub links: Vec<LinkId>,
    /// More than this it cannot use, in bytes per second.
    pub most: f64,
}

/// A flow whose share has changed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Changed<T> {
    pub owner: T,
    /// Bytes per second.
    pub rate: f64,
    /// In how many milliseconds all of it has been sent at this rate; `None` if the flow has no end.
    pub ends_in_ms: Option<u64>,
}

struct Flow<T> {
    owner: T,
    wish: Wish,
    /// Bytes that were left at `since_ms`; `None` if the flow has no end.
    left: Option<f64>,
    rate: f64,
    since_ms: u64,
}

/// Links, and the flows over them.
pub struct Network<T> {
    /// Bytes per second of each link.
    capacity: Vec<f64>,
    flows: BTreeMap<FlowId, Flow<T>>,
    /// The flows over each link.
    over: Vec<BTreeSet<FlowId>>,
    next: FlowId,
    /// Links with a flow that has begun or ended since the shares were found.
    touched: Vec<LinkId>,
}

impl<T: Copy> Network<T> {
    pub fn new(capacity: Vec<f64>) -> Self {
        let over = vec![BTreeSet::new(); capacity.len()];
        Self { capacity, flows: BTreeMap::new(), over, next: 0, touched: Vec::new() }
    }

    /// Begins a flow of so many bytes, or one without an end. Its share is found by [`Self::share`].
    pub fn begin(&mut self, owner: T, wish: Wish, bytes: Option<f64>, now_ms: u64) -> FlowId {
        let id = self.next;
        self.next += 1;
        for link in &wish.links {
            self.over[*link].insert(id);
        }
        self.touched.extend(&wish.links);
        self.flows.insert(id, Flow { owner, wish, left: bytes, rate: 0.0, since_ms: now_ms });
        id
    }

    /// Ends a flow, whatever was left of it.
    pub fn end(&mut self, id: FlowId) {
        let Some(flow) = self.flows.remove(&id) else { return };
        for link in &flow.wish.links {
            self.over[*link].remove(&id);
        }
        self.touched.extend(flow.wish.links);
    }

    /// Finds the shares anew where flows have begun or ended. Returns the flows whose shares are others than before.
    pub fn share(&mut self, now_ms: u64) -> Vec<Changed<T>> {
        if self.touched.is_empty() {
            return Vec::new();
        }
        let connected = self.connected();
        let wishes: Vec<&Wish> = connected.iter().map(|id| &self.flows[id].wish).collect();
        let shares = fair_shares(&wishes, &self.capacity);
        let mut changed = Vec::new();
        for (id, rate) in connected.iter().zip(shares) {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            if flow.rate.total_cmp(&rate).is_eq() {
                continue;
            }
            let passed_s = (now_ms - flow.since_ms) as f64 / 1000.0;
            flow.left = flow.left.map(|left| (left - flow.rate * passed_s).max(0.0));
            (flow.rate, flow.since_ms) = (rate, now_ms);
            let ends_in_ms = flow.left.map(|left| whole_ms(left / rate));
            changed.push(Changed { owner: flow.owner, rate, ends_in_ms });
        }
        changed
    }

    /// The flows that share links with those that have begun or ended, also through others.
    fn connected(&mut self) -> Vec<FlowId> {
        let mut links: BTreeSet<LinkId> = self.touched.iter().copied().collect();
        let mut to_see = std::mem::take(&mut self.touched);
        let mut flows = BTreeSet::new();
        while let Some(link) = to_see.pop() {
            for id in &self.over[link] {
                if flows.insert(*id) {
                    let others = self.flows[id].wish.links.iter().copied();
                    to_see.extend(others.filter(|link| links.insert(*link)));
                }
            }
        }
        flows.into_iter().collect()
    }
}

/// The milliseconds until so many seconds have passed.
pub fn whole_ms(seconds: f64) -> u64 {
    std::time::Duration::try_from_secs_f64((seconds * 1000.0).ceil())
        .map_or(u64::MAX / 2, |ms| ms.as_secs())
}

/// What limits flows: a link that they share, or what one flow can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Most(usize),
    Link(LinkId),
}

/// The max-min fair shares of flows, in bytes per second. All capacities and wishes are above 0.
fn fair_shares(wishes: &[&Wish], capacity: &[f64]) -> Vec<f64> {
    let mut over: BTreeMap<LinkId, Vec<usize>> = BTreeMap::new();
    for (flow, wish) in wishes.iter().enumerate() {
        for link in &wish.links {
            over.entry(*link).or_default().push(flow);
        }
    }
    // What is left of each link, and the flows over it that still grow.
    let mut left: BTreeMap<LinkId, (f64, usize)> =
        over.iter().map(|(link, flows)| (*link, (capacity[*link], flows.len()))).collect();
    // The bits of numbers that are not negative are in the order of the numbers.
    let of_link = |(free, growing): (f64, usize)| (free / growing as f64).to_bits();
    let by_links = left.iter().map(|(link, of)| Reverse((of_link(*of), Limit::Link(*link))));
    let by_most = wishes.iter().enumerate();
    let by_most = by_most.map(|(flow, wish)| Reverse((wish.most.to_bits(), Limit::Most(flow))));
    let mut next: BinaryHeap<_> = by_links.chain(by_most).collect();
    let mut shares: Vec<Option<f64>> = vec![None; wishes.len()];
    while let Some(Reverse((bits, limit))) = next.pop() {
        let stay: &[usize] = match limit {
            Limit::Most(ref flow) => std::slice::from_ref(flow),
            Limit::Link(link) => match left[&link] {
                (_, 0) => continue,
                // Flows that stay below the link's share leave the others more.
                of if of_link(of) > bits => {
                    next.push(Reverse((of_link(of), limit)));
                    continue;
                }
                _ => &over[&link],
            },
        };
        for &flow in stay.iter().filter(|flow| shares[**flow].is_none()).collect::<Vec<_>>() {
            let share = f64::from_bits(bits);
            shares[flow] = Some(share);
            for link in &wishes[flow].links {
                if let Some((free, growing)) = left.get_mut(link) {
                    (*free, *growing) = ((*free - share).max(0.0), *growing - 1);
                }
            }
        }
    }
    shares.into_iter().map(Option::unwrap_or_default).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wish(links: &[LinkId], most: f64) -> Wish {
        Wish { links: links.to_vec(), most }
    }

    #[test]
    fn flows_over_one_link_share_it_and_what_one_leaves_the_others_have() {
        let wishes = [wish(&[0], 1e9), wish(&[0], 1e9), wish(&[0, 1], 1e9), wish(&[2], 5.0)];
        let all: Vec<&Wish> = wishes.iter().collect();
        assert_eq!(fair_shares(&all, &[90.0, 10.0, 100.0]), [40.0, 40.0, 10.0, 5.0]);
    }

    #[test]
    fn a_flow_ends_later_when_another_one_comes_and_sooner_when_it_has_gone() {
        let mut network = Network::new(vec![100.0]);
        let first = network.begin('a', wish(&[0], 1e9), Some(1000.0), 0);
        let ends = |changed: &[Changed<char>]| {
            changed.iter().map(|one| (one.owner, one.ends_in_ms)).collect::<Vec<_>>()
        };
        assert_eq!(ends(&network.share(0)), [('a', Some(10_000))]);
        let second = network.begin('b', wish(&[0], 1e9), None, 4000);
        assert_eq!(ends(&network.share(4000)), [('a', Some(12_000)), ('b', None)]);
        network.end(second);
        assert_eq!(ends(&network.share(6000)), [('a', Some(5000))]);
        network.end(first);
        assert!(network.share(11_000).is_empty());
    }

    #[test]
    fn a_flow_that_shares_no_link_is_left_alone() {
        let mut network = Network::new(vec![100.0, 100.0]);
        network.begin('a', wish(&[0], 1e9), Some(1000.0), 0);
        network.share(0);
        network.begin('b', wish(&[1], 1e9), Some(1000.0), 1);
        let owners: Vec<char> = network.share(1).iter().map(|one| one.owner).collect();
        assert_eq!(owners, ['b']);
    }

    /// Links with capacities, and flows over some of them.
    fn networks() -> impl Strategy<Value = (Vec<f64>, Vec<Wish>)> {
        proptest::collection::vec(1.0..1000.0f64, 1..8).prop_flat_map(|capacity| {
            let links = proptest::sample::subsequence(
                (0..capacity.len()).collect::<Vec<_>>(),
                1..=capacity.len(),
            );
            let flow = (links, 0.1..2000.0f64).prop_map(|(links, most)| Wish { links, most });
            (Just(capacity), proptest::collection::vec(flow, 1..30))
        })
    }

    proptest! {
        /// The definition of max-min fairness: no flow can have more, unless a flow that has no more than this one has less. That is so
        /// if each flow has all that it can use, or goes over a full link where none has more.
        #[test]
        fn no_flow_can_have_more_without_a_smaller_one_having_less((capacity, wishes) in networks()) {
            let all: Vec<&Wish> = wishes.iter().collect();
            let shares = fair_shares(&all, &capacity);
            let over = |link: LinkId| -> Vec<f64> {
                let flows = wishes.iter().zip(&shares);
                flows.filter(|(wish, _)| wish.links.contains(&link)).map(|(_, share)| *share).collect()
            };
            let used = |link: LinkId| over(link).iter().sum::<f64>();
            for (link, most) in capacity.iter().enumerate() {
                prop_assert!(used(link) <= most * (1.0 + 1e-9), "link {link} has {} of {most}", used(link));
            }
            for (flow, wish) in wishes.iter().enumerate() {
                let share = shares[flow];
                prop_assert!(share > 0.0 && share <= wish.most);
                let is_held = |link: &LinkId| {
                    let is_full = used(*link) >= capacity[*link] * (1.0 - 1e-9);
                    let most = over(*link).into_iter().fold(0.0, f64::max);
                    is_full && most <= share * (1.0 + 1e-9)
                };
                let has_all = share >= wish.most;
                prop_assert!(has_all || wish.links.iter().any(is_held), "flow {flow} could have more than {share}");
            }
        }

        /// The shares found piece by piece are those of all flows at once.
        #[test]
        fn flows_that_come_and_go_have_the_shares_of_those_that_are_there(
            (capacity, wishes) in networks(), gone in proptest::collection::vec(any::<bool>(), 30),
        ) {
            let mut network = Network::new(capacity.clone());
            let mut rates = BTreeMap::new();
            let mut note = |changed: Vec<Changed<usize>>| rates.extend(changed.iter().map(|one| (one.owner, one.rate)));
            let ids: Vec<FlowId> = wishes.iter().enumerate().map(|(flow, wish)| {
                let id = network.begin(flow, wish.clone(), None, 0);
                note(network.share(0));
                id
            }).collect();
            for (id, _) in ids.iter().zip(&gone).filter(|(_, gone)| **gone) {
                network.end(*id);
                note(network.share(0));
            }
            let there: Vec<usize> = (0..wishes.len()).filter(|flow| !gone[*flow]).collect();
            let left: Vec<&Wish> = there.iter().map(|flow| &wishes[*flow]).collect();
            for (flow, share) in there.iter().zip(fair_shares(&left, &capacity)) {
                prop_assert!((rates[flow] - share).abs() <= 1e-6 * share, "{} and {share}", rates[flow]);
            }
        }
    }
}
