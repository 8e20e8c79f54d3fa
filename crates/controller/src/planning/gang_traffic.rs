//! What the VMs of a gang have sent to each other, and what is remembered of a kind of gangs: that, how long they took, and what each rank did.
//!
//! The agent of a sender's host counts it, from the moment when the VM's card was made there. So the counters begin anew when the VM comes
//! to another host, and the differences are added up here.

use perigee_model::job::{Job, JobSpec};
use perigee_model::plan::Estimate;
use perigee_model::{ImageName, JobId, Problem, TenantName};
use perigee_planner::Traits;
use perigee_planner::gangs::{self, GangRun, RanksRun, predict};
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::planning::digest;

/// As many kinds of gangs of each tenant are remembered.
const KINDS_MAX: usize = 1000;
/// And as many runs of each.
const RUNS_MAX: usize = 10;
const PREFIX: &str = "talk/";

/// What earlier runs of a kind of gang have shown.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct GangHistory {
    /// What the VMs sent to each other in the last one of which this is known: a row for each rank.
    pub sent: Vec<Vec<u64>>,
    /// Those that have succeeded, with a digest of their image and command, the oldest first.
    runs: Vec<(String, GangRun)>,
    /// Those of which it is known what each rank did, the oldest first. The planner says how many are kept.
    #[serde(default)]
    ranks: Vec<RanksRun>,
    ended_ms: u64,
}

impl GangHistory {
    /// How long such a gang takes; `None` if no equal one has succeeded.
    pub fn predicted(&self, spec: &JobSpec, traits: &Traits) -> Option<Estimate> {
        let program = program(&spec.image, &spec.command, spec.mpi);
        let equal = self.runs.iter().filter(|(of, _)| *of == program);
        let runs: Vec<GangRun> = equal.map(|(_, run)| run.clone()).collect();
        predict(&runs, traits)
    }

    /// The runs of this program of which it is known what each rank did, the oldest first.
    pub fn runs_of(&self, program: &str) -> Vec<RanksRun> {
        self.ranks.iter().filter(|run| run.program == program).cloned().collect()
    }
}

/// A digest of what a gang runs.
pub fn program(image: &ImageName, command: &[String], mpi: bool) -> String {
    digest(&serde_json::json!([image, command, mpi]))
}

/// Jobs of the same name and with as many VMs are of one kind.
fn key(gang: &JobId, count: u32) -> String {
    key_of_name(gang.as_str().rsplit_once('-').map_or(gang.as_str(), |(name, _)| name), count)
}

fn key_of_name(name: &str, count: u32) -> String {
    format!("{PREFIX}{name}/{count}")
}

/// What earlier runs of gangs of this name with `count` VMs have shown; empty if there was none.
pub async fn known(cluster: &Cluster, gang: &JobId, count: u32) -> Result<GangHistory, Problem> {
    Ok(cluster.records.read(&key(gang, count)).await?.unwrap_or_default())
}

/// The same by the whole name in the job file, with its tenant.
pub async fn known_of_name(
    cluster: &Cluster,
    name: &str,
    count: u32,
) -> Result<GangHistory, Problem> {
    Ok(cluster.records.read(&key_of_name(name, count)).await?.unwrap_or_default())
}

/// Remembers what a gang's run has shown: what its VMs sent, if it was counted, and how long it took, if it has succeeded, with what each
/// rank did, if that is known. Its tenant's oldest kind is forgotten for one too many. A step that was cut may repeat this: the run counts twice then, which changes little.
pub async fn remember(
    cluster: &Cluster,
    gang: &Job,
    sent: Vec<Vec<u64>>,
    (run, ranks): (Option<GangRun>, Option<RanksRun>),
) -> Result<(), Problem> {
    let is_counted = sent.iter().flatten().any(|bytes| *bytes > 0);
    if !is_counted && run.is_none() {
        return Ok(());
    }
    let key = key(&gang.id, gang.spec.count);
    let mut known: GangHistory = cluster.records.read(&key).await?.unwrap_or_default();
    let is_new = known.ended_ms == 0;
    known.ended_ms = now_ms();
    if is_counted {
        known.sent = sent;
    }
    let spec = &gang.spec;
    let program = program(&spec.image, &spec.command, spec.mpi);
    known.runs.extend(run.map(|run| (program, run)));
    let too_many = known.runs.len().saturating_sub(RUNS_MAX);
    known.runs.drain(..too_many);
    if let Some(ranks) = ranks {
        gangs::keep(&mut known.ranks, ranks);
    }
    if is_new {
        make_room(cluster, &TenantName::of(gang.id.as_str()), KINDS_MAX).await?;
    }
    cluster.records.put(&key, &known).await
}

/// Forgets the oldest kind of a tenant's gangs if it has so many. Those of other tenants stay.
async fn make_room(cluster: &Cluster, tenant: &TenantName, max: usize) -> Result<(), Problem> {
    let mut keys = cluster.records.keys(&format!("{PREFIX}{}", tenant.full(""))).await?;
    // The names of the default tenant have no mark.
    keys.retain(|key| key.strip_prefix(PREFIX).is_some_and(|name| tenant.owns(name)));
    if keys.len() < max {
        return Ok(());
    }
    let mut oldest: Option<(u64, String)> = None;
    for key in keys {
        let known: Option<GangHistory> = cluster.records.read(&key).await?;
        let at = known.map_or(0, |known| known.ended_ms);
        if oldest.as_ref().is_none_or(|(least, _)| at < *least) {
            oldest = Some((at, key));
        }
    }
    match oldest {
        Some((_, key)) => cluster.records.remove(&key).await,
        None => Ok(()),
    }
}

/// Forgets what a deleted tenant's gangs have taught.
///
/// # Errors
/// If the store fails.
pub async fn forget_tenant(cluster: &Cluster, tenant: &TenantName) -> Result<(), Problem> {
    cluster.records.remove_all(&format!("{PREFIX}{}", tenant.full(""))).await
}

#[cfg(test)]
mod tests {
    use perigee_model::HostId;
    use perigee_model::vm::SentTo;
    use std::sync::Arc;

    use super::*;
    use crate::records::Talk;

    /// A cluster with a gang of each of these ids. The first one is the oldest.
    async fn knowing(dir: &std::path::Path, ids: &[JobId]) -> Arc<Cluster> {
        let (wanted, _drivers) = tokio::sync::mpsc::unbounded_channel();
        let (timing, traffic) = (crate::cluster::Timing::default(), crate::cluster::Traffic::Plain);
        let cluster = Cluster::open(dir, timing, traffic, Default::default(), wanted)
            .await
            .expect("a cluster");
        for (id, ended_ms) in ids.iter().zip(1..) {
            let known = GangHistory { ended_ms, ..GangHistory::default() };
            cluster.records.put(&key(id, 2), &known).await.expect("put");
        }
        cluster
    }

    async fn kept(cluster: &Cluster, ids: &[JobId]) -> Vec<u64> {
        let mut kept = Vec::new();
        for id in ids {
            kept.push(known(cluster, id, 2).await.expect("a record").ended_ms);
        }
        kept
    }

    /// A new tenant of that name got it.
    #[tokio::test]
    async fn what_a_deleted_tenant_s_gangs_have_taught_is_forgotten() {
        let dir = tempfile::tempdir().expect("a directory");
        let ids =
            ["acme~g-0001", "acmes~g-0001", "g-0001"].map(|id| JobId::new(id).expect("a name"));
        let cluster = knowing(dir.path(), &ids).await;
        let acme: TenantName = "acme".parse().expect("a name");
        crate::planning::forget_tenant(&cluster, &acme).await.expect("forgotten");
        assert_eq!(kept(&cluster, &ids).await, [0, 2, 3]);
    }

    #[tokio::test]
    async fn the_gangs_of_one_tenant_make_nobody_forget_those_of_another() {
        let dir = tempfile::tempdir().expect("a directory");
        let ids = ["acme~a-0001", "a-0001", "b-0001", "acme~b-0001"]
            .map(|id| JobId::new(id).expect("a name"));
        let cluster = knowing(dir.path(), &ids).await;
        for _ in 0..2 {
            make_room(&cluster, &TenantName::default(), 2).await.expect("room");
        }
        assert_eq!(kept(&cluster, &ids).await, [1, 0, 3, 4]);
        make_room(&cluster, &"acme".parse().expect("a name"), 2).await.expect("room");
        assert_eq!(kept(&cluster, &ids).await, [0, 0, 3, 4]);
    }

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
