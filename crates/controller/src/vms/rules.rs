//! What a person says later of the VMs beside which a VM without a job is to be, or never: the VM may run, wait or be off.

use std::sync::Arc;

use perigee_model::job::Vm;
use perigee_model::{HostId, HostRules, Problem, VmId};

use super::live;
use super::persistent::not_deleted;
use crate::cluster::Cluster;
use crate::records::{JobIntent, job_intent_key};
use crate::vms;

/// Gives a VM these rules in place of its own ones. They hold at once, and no VM moves for them.
///
/// # Errors
/// `Invalid` for rules that contradict each other; `Conflict` if they do not hold where the VM is, if it is a job's, or if it is being
/// deleted; `NotFound` if there is none.
pub async fn set(cluster: &Arc<Cluster>, vm: &VmId, rules: HostRules) -> Result<Vm, Problem> {
    let what = format!("can't give VM {vm} these rules");
    rules.check(1).map_err(|why| Problem::invalid(&what, why.to_string()))?;
    let before = not_deleted(cluster, vm).await?;
    let binds = |host: &HostId| cluster.hosts.binds(host);
    let _held = cluster.index.begin_rules(&before, &rules, binds).map_err(|why| {
        Problem::conflict(&what, why)
            .next("move this VM or the others first (perigee vm move), or stop it and give it the rules then")
    })?;
    let next = |old: Option<JobIntent>| {
        let old = old.unwrap_or_default();
        let number = old.rules.as_ref().map_or(1, |(number, _)| number + 1);
        JobIntent { rules: Some((number, rules.clone())), ..old }
    };
    let asked = cluster.records.update(&job_intent_key(&before.job.id), next).await?;
    let number = asked.rules.map_or(0, |(number, _)| number);
    live::until_heeded(cluster, &before, |persistent| persistent.ruled >= number).await?;
    vms::get(cluster, vm).await
}
