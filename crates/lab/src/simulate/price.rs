//! What a move costs, by the planner.

use std::sync::Arc;

use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, SiteId};
use perigee_planner::{Cluster, Dirty, LinkFacts, LinkForMoves, MoveCost, move_cost};

use super::scenario::Scenario;

/// How fast a VM changes its memory.
const DIRTY_BYTES_PER_S: f64 = 4.0 * 1024.0 * 1024.0;
/// The round trip inside a site, and between two.
const RTT_MS: [f64; 2] = [0.2, 16.0];

/// The costs of moves of VMs with the same memory, inside a site and between sites. All links are alike.
pub struct Prices([MoveCost; 2]);

impl Prices {
    pub fn of(scenario: &Scenario, memory_bytes: u64) -> Self {
        Self([true, false].map(|is_one_site| {
            let cluster = two_hosts(scenario, is_one_site);
            let [from, to] = ["from", "to"].map(name);
            let dirty = Dirty::Measured(DIRTY_BYTES_PER_S);
            let cost = move_cost(&cluster, &from, &to, memory_bytes, dirty);
            cost.expect("the link is measured, and faster than the memory changes")
        }))
    }

    pub fn of_move(&self, from: &SiteId, to: &SiteId) -> &MoveCost {
        &self.0[usize::from(from != to)]
    }
}

/// What a probe would find between two hosts while nothing else is sent.
pub fn probe(scenario: &Scenario, is_one_site: bool) -> LinkProbe {
    let rate_bytes_per_s = scenario.rate_bytes_per_s(is_one_site);
    LinkProbe { rtt_ms: RTT_MS[usize::from(!is_one_site)], rate_bytes_per_s }
}

fn name(name: &str) -> HostId {
    HostId::new(name).expect("letters")
}

fn two_hosts(scenario: &Scenario, is_one_site: bool) -> Cluster {
    let site = SiteId::new("site").expect("letters");
    let host = |id: &str| scenario.host(name(id), site.clone());
    let link = |from: &str, to: &str| LinkFacts {
        from: name(from),
        to: name(to),
        from_site: site.clone(),
        to_site: site.clone(),
        probe: probe(scenario, is_one_site),
        blocks: None,
        moves: LinkForMoves { wait_s: Some(0.0), max_bytes_per_s: None },
    };
    Cluster {
        hosts: ["from", "to"].map(host).into_iter().collect(),
        links: vec![link("from", "to"), link("to", "from")].into(),
        probe_request_bytes: 8192,
        past_moves: Arc::default(),
    }
}
