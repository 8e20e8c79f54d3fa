//! What a person says later of a VM without a job than when it was made: whether it moves by itself, and beside which other VMs it is, or
//! never. The VM may run, wait or be off.

use std::sync::Arc;

use perigee_model::job::Vm;
use perigee_model::persistent_vm::SetVm;
use perigee_model::{HostId, Problem, VmId};

use super::live;
use super::persistent::not_deleted;
use crate::cluster::Cluster;
use crate::records::{JobIntent, job_intent_key};
use crate::vms;

/// Says anew what was said of a VM when it was made. New rules hold at once, and no VM moves for them.
///
/// # Errors
/// `Invalid` if nothing is said, or for rules that contradict each other; `Conflict` if they do not hold where the VM is, if it is a job's, or
/// if it is being deleted; `NotFound` if there is none.
pub async fn set(cluster: &Arc<Cluster>, vm: &VmId, ask: SetVm) -> Result<Vm, Problem> {
    let what = format!("can't change VM {vm}");
    if ask == SetVm::default() {
        let why = "neither whether it moves by itself nor its rules are said";
        return Err(Problem::invalid(&what, why));
    }
    if let Some(rules) = &ask.rules {
        rules.check(1).map_err(|why| Problem::invalid(&what, why.to_string()))?;
    }
    let before = not_deleted(cluster, vm).await?;
    let binds = |host: &HostId| cluster.hosts.binds(host);
    let held = ask.rules.as_ref().map(|rules| cluster.index.begin_rules(&before, rules, binds));
    let _held = held.transpose().map_err(|why| {
        Problem::conflict(&what, why)
            .next("move this VM or the others first (perigee vm move), or stop it and give it the rules then")
    })?;
    let next = |old: Option<JobIntent>| {
        let old = old.unwrap_or_default();
        let (number, before) = old.set.clone().unwrap_or_default();
        JobIntent { set: Some((number + 1, ask.clone().after(before))), ..old }
    };
    let asked = cluster.records.update(&job_intent_key(&before.job.id), next).await?;
    let number = asked.set.map_or(0, |(number, _)| number);
    if let Some(rules) = &ask.rules {
        cluster.index.keep_rules(&before, number, rules);
    }
    live::until_heeded(cluster, &before, |persistent| persistent.set >= number).await?;
    vms::get(cluster, vm).await
}
