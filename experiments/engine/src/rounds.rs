//! Rounds: in each, the servers take turns, so that a slow minute of the machine affects all of them.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::measure::measure;
use crate::results::Measurement;
use crate::servers::{Fixtures, Server};
use crate::workloads::{WORKLOADS, Workload};

/// The length and the number of the runs.
#[derive(Debug, Clone)]
pub struct Plan {
    pub rounds: u32,
    pub duration: Duration,
    /// Only workloads whose name contains this.
    pub only: Option<String>,
    /// Only servers whose name contains one of these; all when there are none.
    pub servers: Vec<String>,
    /// Without the variants of a server.
    pub few_servers: bool,
}

impl Plan {
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|part| name.contains(part))
    }

    fn includes(&self, server: Server) -> bool {
        let name = server.name();
        (self.servers.is_empty() || self.servers.iter().any(|part| name.contains(part)))
            && (!self.few_servers || Server::MAIN.contains(&server))
    }
}

/// Runs all selected workloads, either the warm or the cold ones.
pub fn run(
    fixtures: &Fixtures,
    plan: &Plan,
    cold: bool,
    say: impl Fn(&str),
) -> Result<Vec<Measurement>> {
    let mut all = Vec::new();
    for workload in WORKLOADS.iter().filter(|w| w.cold == cold && plan.wants(w.name)) {
        say(&format!("{} over {}", workload.name, workload.transport.word()));
        let rounds = if workload.once { 1 } else { plan.rounds };
        for round in 0..rounds {
            all.extend(round_of(fixtures, plan, workload, round)?);
        }
    }
    Ok(all)
}

fn round_of(
    fixtures: &Fixtures,
    plan: &Plan,
    workload: &Workload,
    round: u32,
) -> Result<Vec<Measurement>> {
    let mut servers = workload.servers();
    servers.retain(|server| plan.includes(*server));
    if servers.is_empty() {
        return Ok(Vec::new());
    }
    // The order changes, so that no server is always the first after the pause between two workloads.
    let turn = usize::try_from(round).expect("a small number") % servers.len();
    servers.rotate_left(turn);
    let one = |server: Server| {
        measure(fixtures, workload, server, round, plan.duration)
            .with_context(|| format!("{} on {}", workload.name, server.name()))
    };
    servers.into_iter().map(one).collect()
}
