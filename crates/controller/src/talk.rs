//! What the VMs of a gang have sent to each other.
//!
//! The agent of a sender's host counts it, from the moment when the VM's card was made there. So the counters begin anew when the VM comes
//! to another host, and the differences are added up here.

use std::collections::BTreeMap;

use perigee_model::gang::of_member;
use perigee_model::vm::SentTo;
use perigee_model::{HostId, JobId, Problem};
use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, now_ms};

/// The talk of as many kinds of gangs is remembered.
const KINDS_MAX: usize = 1000;
const PREFIX: &str = "talk/";

/// What one member has sent to the others, by their ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Talk {
    /// Since its VM was first started.
    pub bytes: BTreeMap<u32, u64>,
    /// Where it was counted last, and how far the counters were.
    at: Option<HostId>,
    last: BTreeMap<u32, u64>,
}

impl Talk {
    pub fn read(&mut self, host: &HostId, sent: &[SentTo]) {
        if self.at.as_ref() != Some(host) {
            self.at = Some(host.clone());
            self.last.clear();
        }
        for SentTo { to, bytes } in sent {
            let Some((_, rank)) = of_member(to.as_str()) else { continue };
            let last = self.last.insert(rank, *bytes).unwrap_or_default();
            // Counters that are smaller than before have begun anew.
            let more = bytes.checked_sub(last).unwrap_or(*bytes);
            *self.bytes.entry(rank).or_default() += more;
        }
    }

    /// To each rank. Empty if nothing was counted.
    pub fn by_rank(&self, count: u32) -> Vec<u64> {
        let of = |rank| self.bytes.get(&rank).copied().unwrap_or_default();
        if self.bytes.is_empty() { Vec::new() } else { (0..count).map(of).collect() }
    }
}

/// What the last run of a kind of gang has shown: a row for each rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Known {
    pub sent: Vec<Vec<u64>>,
    ended_ms: u64,
}

/// Jobs of the same name and with as many VMs are of one kind.
fn key(gang: &JobId, count: u32) -> String {
    let name = gang.as_str().rsplit_once('-').map_or(gang.as_str(), |(name, _)| name);
    format!("{PREFIX}{name}/{count}")
}

pub async fn known(cluster: &Cluster, gang: &JobId, count: u32) -> Result<Known, Problem> {
    Ok(cluster.records.read(&key(gang, count)).await?.unwrap_or_default())
}

/// Remembers what a gang's run has shown, if it was counted. The oldest kind is forgotten for one too many.
pub async fn remember(cluster: &Cluster, gang: &JobId, sent: Vec<Vec<u64>>) -> Result<(), Problem> {
    if sent.iter().flatten().all(|bytes| *bytes == 0) {
        return Ok(());
    }
    let count = u32::try_from(sent.len()).unwrap_or(u32::MAX);
    let keys = cluster.records.keys(PREFIX).await?;
    if keys.len() >= KINDS_MAX {
        let mut oldest: Option<(u64, String)> = None;
        for key in keys {
            let known: Option<Known> = cluster.records.read(&key).await?;
            let at = known.map_or(0, |known| known.ended_ms);
            if oldest.as_ref().is_none_or(|(least, _)| at < *least) {
                oldest = Some((at, key));
            }
        }
        if let Some((_, key)) = oldest {
            cluster.records.remove(&key).await?;
        }
    }
    cluster.records.put(&key(gang, count), &Known { sent, ended_ms: now_ms() }).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_added_up_over_hosts_and_new_beginnings() {
        let host = |name: &str| HostId::new(name).expect("a name");
        let sent = |to: u32, bytes| {
            let to = format!("g-0001-n{to}").parse().expect("a name");
            vec![SentTo { to, bytes }]
        };
        let mut talk = Talk::default();
        assert!(talk.by_rank(3).is_empty(), "nothing was counted");
        talk.read(&host("home1"), &sent(1, 100));
        talk.read(&host("home1"), &sent(1, 150));
        talk.read(&host("home1"), &[]);
        talk.read(&host("cloud1"), &sent(1, 30));
        talk.read(&host("cloud1"), &sent(2, 5));
        // The table was made anew.
        talk.read(&host("cloud1"), &sent(1, 7));
        assert_eq!(talk.by_rank(3), [0, 187, 5]);
    }
}
