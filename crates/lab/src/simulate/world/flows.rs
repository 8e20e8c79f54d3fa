//! What is sent from host to host: moves, the data of jobs before they begin, and what VMs read of their data while they run.
//!
//! Each host has a card, and each site a way to the others, with as much room in each direction.

use super::{Event, World};
use crate::simulate::network::{FlowId, LinkId, Network, Wish};
use crate::simulate::scenario::Scenario;

/// Whose a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The memory of a VM that moves.
    Move(usize),
    /// The data of a VM's job, before the job begins.
    Copy(usize),
    /// What a VM reads.
    Read(usize),
}

/// What a VM reads of its data at another host.
pub struct Reads {
    flow: FlowId,
    rate: f64,
}

/// Without any flow.
pub fn network(scenario: &Scenario) -> Network<Owner> {
    let card = scenario.link_bytes_per_s as f64;
    let uplink = scenario.uplink_bytes_per_s.map_or(f64::INFINITY, |uplink| uplink as f64);
    let (cards, uplinks) = (vec![card; 2 * scenario.hosts], vec![uplink; 2 * scenario.sites]);
    Network::new([cards, uplinks].concat())
}

impl World<'_> {
    /// How fast something is sent between two hosts that is alone on the way, in bytes per second.
    pub(super) fn alone(&self, from: usize, to: usize) -> f64 {
        let is_one_site = self.hosts[from].site_number == self.hosts[to].site_number;
        self.scenario.rate_bytes_per_s(is_one_site) as f64
    }

    fn way(&self, from: usize, to: usize) -> Vec<LinkId> {
        let mut links = vec![2 * from, 2 * to + 1];
        let [from, to] = [from, to].map(|host| self.hosts[host].site_number);
        // A way that never limits would only connect what does not matter to each other.
        if from != to && self.scenario.uplink_bytes_per_s.is_some() {
            let cards = 2 * self.hosts.len();
            links.extend([cards + 2 * from, cards + 2 * to + 1]);
        }
        links
    }

    /// Begins to send so many bytes, or without an end.
    pub(super) fn send(
        &mut self,
        owner: Owner,
        (from, to): (usize, usize),
        most: f64,
        bytes: Option<f64>,
    ) -> FlowId {
        let links = self.way(from, to);
        self.network.begin(owner, Wish { links, most }, bytes, self.now_ms)
    }

    /// The VM reads its data from where they are, if they are elsewhere. A job has copied its data before.
    pub(super) fn begin_to_read(&mut self, vm: usize, host: usize) {
        let Some(data) = self.vms[vm].data.filter(|data| *data != host) else { return };
        let most = self.scenario.reads_bytes_per_s as f64;
        if most > 0.0 && self.vms[vm].work.is_none() {
            let flow = self.send(Owner::Read(vm), (data, host), most, None);
            self.vms[vm].reads = Some(Reads { flow, rate: most });
        }
    }

    pub(super) fn end_to_read(&mut self, vm: usize) {
        if let Some(reads) = self.vms[vm].reads.take() {
            self.network.end(reads.flow);
        }
    }

    /// Shares the links anew, where something has begun or ended.
    pub(super) fn share_links(&mut self) {
        for changed in self.network.share(self.now_ms) {
            let ends_ms = changed.ends_in_ms.map(|in_ms| self.now_ms + in_ms);
            match (changed.owner, ends_ms) {
                (Owner::Move(vm), Some(ends_ms)) => {
                    self.vms[vm].move_turn += 1;
                    let turn = self.vms[vm].move_turn;
                    self.at(ends_ms, Event::Moved { vm, turn });
                }
                (Owner::Copy(vm), Some(ends_ms)) => self.step_ends(vm, ends_ms),
                (Owner::Read(vm), _) => {
                    if let Some(host) = self.vms[vm].host {
                        self.settle(host);
                    }
                    if let Some(reads) = &mut self.vms[vm].reads {
                        reads.rate = changed.rate;
                    }
                }
                (Owner::Move(_) | Owner::Copy(_), None) => {}
            }
        }
    }

    /// The share of its time that the VM loses to the network now.
    pub(super) fn network_lost(&self, vm: usize, host: usize) -> f64 {
        if let Some(work) = &self.vms[vm].work {
            return work.waits_for_data();
        }
        let far = self.data_lost(vm, host);
        let starved = |reads: &Reads| 1.0 - reads.rate / self.scenario.reads_bytes_per_s as f64;
        self.vms[vm].reads.as_ref().map_or(far, |reads| far.max(starved(reads)))
    }

    /// The share of its time that the VM loses there to the distance from its data.
    pub(super) fn data_lost(&self, vm: usize, host: usize) -> f64 {
        let (Some(home), Some(far)) = (self.vms[vm].data, self.scenario.far) else { return 0.0 };
        if self.vms[vm].work.is_some() {
            return 0.0;
        }
        match (home == host, self.hosts[home].site == self.hosts[host].site) {
            (true, _) => 0.0,
            (false, true) => far / 10.0,
            (false, false) => far,
        }
    }
}
