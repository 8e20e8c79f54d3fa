//! What a move costs, by the planner.

use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, SiteId};
use perigee_planner::{Cluster, Dirty, LinkFacts, LinkForMoves, MoveCost, move_cost};

use super::scenario::Scenario;

/// How fast a VM changes its memory.
const DIRTY_BYTES_PER_S: f64 = 4.0 * 1024.0 * 1024.0;
/// The round trip inside a site, and between two.
const RTT_MS: [f64; 2] = [0.2, 16.0];

/// The costs of moves inside a site and between sites. All VMs of a scenario have as much memory, and all links are alike.
pub struct Prices([MoveCost; 2]);

impl Prices {
    pub fn of(scenario: &Scenario) -> Self {
        Self(RTT_MS.map(|rtt_ms| {
            let cluster = two_hosts(scenario, rtt_ms);
            let [from, to] = ["from", "to"].map(name);
            let dirty = Dirty::Measured(DIRTY_BYTES_PER_S);
            let cost = move_cost(&cluster, &from, &to, scenario.vm_memory_bytes, dirty);
            cost.expect("the link is measured, and faster than the memory changes")
        }))
    }

    pub fn of_move(&self, from: &SiteId, to: &SiteId) -> &MoveCost {
        &self.0[usize::from(from != to)]
    }
}

fn name(name: &str) -> HostId {
    HostId::new(name).expect("letters")
}

fn two_hosts(scenario: &Scenario, rtt_ms: f64) -> Cluster {
    let site = SiteId::new("site").expect("letters");
    let host = |id: &str| scenario.host(name(id), site.clone());
    let link = |from: &str, to: &str| LinkFacts {
        from: name(from),
        to: name(to),
        from_site: site.clone(),
        to_site: site.clone(),
        probe: LinkProbe { rtt_ms, rate_bytes_per_s: scenario.link_bytes_per_s },
        blocks: None,
        moves: LinkForMoves { wait_s: Some(0.0), max_bytes_per_s: None },
    };
    Cluster {
        hosts: ["from", "to"].map(host).into_iter().collect(),
        links: vec![link("from", "to"), link("to", "from")].into(),
        probe_request_bytes: 8192,
        past_moves: Vec::new(),
    }
}
