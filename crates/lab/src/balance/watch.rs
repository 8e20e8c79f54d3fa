//! What the balancer shows while VMs move, and when its rule would move the next one.

use perigee_model::VmId;
use perigee_model::balance::SiteBalance;

/// A look of the controller at a site's loads.
#[derive(Debug, Clone)]
pub struct Look {
    pub at_ms: u64,
    pub balance: SiteBalance,
}

impl Look {
    fn saved_s(&self, vm: &VmId) -> Option<(f64, f64)> {
        let found = self.balance.vms.iter().find(|one| one.vm == *vm)?;
        Some((found.saved_s, found.needed_s))
    }

    /// Whether the loads of all hosts are known and no VM moves.
    pub fn is_calm(&self) -> bool {
        self.balance.not_known.is_empty() && self.balance.vms.iter().all(|one| !one.moves)
    }
}

/// All looks of a run, in their order.
#[derive(Debug, Default)]
pub struct Looks {
    looks: Vec<Look>,
}

impl Looks {
    /// Adds a look if it is another one than the last; returns it then.
    pub fn add(&mut self, balance: SiteBalance) -> Option<&Look> {
        let at_ms = balance.looked_ms?;
        if self.looks.last().is_some_and(|last| last.at_ms == at_ms) {
            return None;
        }
        self.looks.push(Look { at_ms, balance });
        self.looks.last()
    }

    /// Whether a move was decided in a look.
    pub fn shows_a_move(&self) -> bool {
        self.looks.iter().any(|look| look.balance.vms.iter().any(|one| one.moves))
    }

    /// How many looks at the end were calm, one after the other.
    pub fn calm(&self) -> usize {
        self.looks.iter().rev().take_while(|look| look.is_calm()).count()
    }

    /// When an account of the VM reaches its price, if it grows as in the first look with one: the time of that look of the balancer, Unix
    /// time. Looks until `after_ms`, when hosts were in another move, do not count. `None` without two looks before `decided_ms`.
    pub fn predicted_ms(&self, vm: &VmId, after_ms: u64, decided_ms: u64) -> Option<u64> {
        let in_time = |look: &&[Look]| look[1].at_ms > after_ms && look[0].at_ms <= decided_ms;
        let mut pairs = self.looks.windows(2).filter(in_time);
        let (first, (saved_s, needed_s)) = pairs.find_map(|pair| {
            Some((pair, pair[1].saved_s(vm).filter(|(saved, _)| *saved > 0.0)?))
        })?;
        let every_ms = first[1].at_ms.saturating_sub(first[0].at_ms);
        let looks = (1_u32..1000).find(|looks| saved_s * f64::from(*looks) >= needed_s)?;
        Some(first[0].at_ms + u64::from(looks) * every_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perigee_model::auto_mode::AutoMode;
    use perigee_model::balance::{LoadNotKnown, VmBalance};
    use perigee_model::{HostId, SiteId};

    fn vm() -> VmId {
        VmId::new("busy1").expect("a name")
    }

    fn host(name: &str) -> HostId {
        HostId::new(name).expect("a name")
    }

    /// A look at this second, in which the VM has saved so much of 7 s, and moves.
    fn balance(at_s: u64, saved_s: Option<f64>, moves: bool) -> SiteBalance {
        let of_vm = |saved_s| VmBalance {
            vm: vm(),
            host: host("home1"),
            to: host("home2"),
            moves,
            saved_s,
            needed_s: 7.0,
            reason: String::new(),
        };
        SiteBalance {
            site: SiteId::new("home").expect("a name"),
            mode: AutoMode::On,
            looked_ms: Some(at_s * 1000),
            vms: saved_s.map(of_vm).into_iter().collect(),
            not_known: Vec::new(),
        }
    }

    #[test]
    fn a_move_is_predicted_from_the_first_look_in_which_its_account_grows() {
        let mut looks = Looks::default();
        for (at_s, saved_s) in [(10, None), (20, Some(3.0)), (30, Some(6.0)), (40, Some(9.0))] {
            looks.add(balance(at_s, saved_s, saved_s == Some(9.0)));
        }
        assert_eq!(looks.predicted_ms(&vm(), 0, 40_000), Some(40_000));
        // Looks before the end of another move say nothing.
        assert_eq!(looks.predicted_ms(&vm(), 40_000, 90_000), None);
    }

    #[test]
    fn the_same_look_counts_once_and_a_look_at_loads_that_are_not_known_is_not_calm() {
        let mut looks = Looks::default();
        assert!(looks.add(balance(10, None, false)).is_some());
        assert!(looks.add(balance(10, None, false)).is_none());
        assert!(looks.add(balance(20, Some(1.0), false)).is_some());
        assert_eq!(looks.calm(), 2);
        let unknown = LoadNotKnown { host: host("home2"), why: String::new() };
        let mut balance = balance(30, None, false);
        balance.not_known.push(unknown);
        looks.add(balance);
        assert_eq!(looks.calm(), 0);
    }
}
