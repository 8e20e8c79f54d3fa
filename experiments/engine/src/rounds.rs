//! Rounds: in each, the servers take turns, so that a slow minute of the machine affects all of them.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::measure::measure;
use crate::results::Measurement;
use crate::servers::{Fixtures, Server};
use crate::workloads::{WORKLOADS, Workload};

/// Where a peer's fastest round is more than this many times its slowest one, there are more rounds.
const SPREAD_MAX: f64 = 1.3;
/// At most so many times the planned rounds.
const ROUNDS_TIMES_MAX: u32 = 2;

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
        let (first, mut round) = (all.len(), 0);
        while round < rounds
            || (!workload.once && round < ROUNDS_TIMES_MAX * rounds && varies(&all[first..]))
        {
            all.extend(round_of(fixtures, plan, workload, round)?);
            round += 1;
        }
    }
    Ok(all)
}

/// Whether a peer differs so much between its rounds that their median says little.
fn varies(of_workload: &[Measurement]) -> bool {
    of_workload.iter().filter(|m| Server::is_peer(&m.server)).any(|fast| {
        let same = of_workload.iter().filter(|m| m.server == fast.server);
        same.into_iter().any(|slow| fast.iops > SPREAD_MAX * slow.iops)
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::measurement;

    #[test]
    fn there_are_more_rounds_where_a_peer_differs_from_itself() {
        let rounds = |server: &str, iops: [f64; 2]| {
            iops.map(|iops| measurement("read", server, "unix", iops))
        };
        let (steady, wild) = ([100.0, 120.0], [100.0, 140.0]);
        assert!(!varies(
            &[rounds("nbdkit file", steady), rounds("qemu-nbd", [300.0, 301.0])].concat()
        ));
        assert!(varies(&rounds("nbdkit file", wild)));
        assert!(!varies(&rounds("perigee", wild)), "its own rounds are no reason");
    }
}
