//! VMs that are kept on one host leave it for one other host.

use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::drain::{DrainFate, DrainedKind};
use perigee_model::tenant::SEPARATOR;

use super::{Cost, LeavingVm, Now, Planned, Refusal, Refusals, Rooms, Way, lacks, of_vm};
use crate::queue::Demand;

/// The groups of which several VMs are at the host, in the order of the VMs.
pub(super) fn groups<'a>(vms: &[&'a LeavingVm]) -> BTreeMap<String, Vec<&'a LeavingVm>> {
    let mut groups: BTreeMap<String, Vec<&LeavingVm>> = BTreeMap::new();
    for vm in vms {
        if let Some(group) = &vm.together {
            groups.entry(group.clone()).or_default().push(vm);
        }
    }
    groups.retain(|_, vms| vms.len() > 1);
    groups
}

/// All of a group's VMs move to one host that has room for all, or none does. When one is on its way, the others follow it: they can go
/// nowhere else.
pub(super) fn of_group(vms: &[&LeavingVm], rooms: &mut Rooms) -> Vec<Planned> {
    let of_now = |vm: &LeavingVm| Planned::of_now(DrainedKind::Vm, &vm.name, &vm.now);
    if vms.iter().any(|vm| matches!(vm.now, Now::Moving(_))) {
        return vms.iter().map(|vm| of_vm(vm, rooms)).collect();
    }
    let held_by = vms.iter().find_map(|vm| match &vm.now {
        Now::Stays(_) => Some((DrainFate::Stays, format!("{}, which can't leave", vm.name))),
        _ => None,
    });
    let held_by = held_by.or_else(|| {
        vms.iter().find_map(|vm| match &vm.now {
            Now::Waits(why) => Some((DrainFate::Waits, format!("{}, which waits: {why}", vm.name))),
            _ => None,
        })
    });
    if let Some((fate, other)) = held_by {
        let why = format!("it is kept together with {other}");
        let planned = |vm: &&LeavingVm| {
            of_now(vm).unwrap_or_else(|| Planned::new(DrainedKind::Vm, &vm.name, fate, why.clone()))
        };
        return vms.iter().map(planned).collect();
    }
    match target(vms, rooms) {
        Ok(to) => vms.iter().map(|vm| moves(vm, &to, rooms)).collect(),
        Err(refusals) => {
            let group = vms[0].together.as_deref().unwrap_or_default();
            let group = group.rsplit(SEPARATOR).next().unwrap_or_default();
            let why = format!(
                "the VMs of group {group} are kept together, and no host can take all {}: {}",
                vms.len(),
                refusals.in_words()
            );
            let fate = if refusals.may_pass() { DrainFate::Waits } else { DrainFate::Stays };
            let planned =
                |vm: &&LeavingVm| Planned::new(DrainedKind::Vm, &vm.name, fate, why.clone());
            vms.iter().map(planned).collect()
        }
    }
}

/// The host that can take all of them soonest.
fn target(vms: &[&LeavingVm], rooms: &Rooms) -> Result<HostId, Refusals> {
    let mut demand = Demand::default();
    vms.iter().for_each(|vm| demand.add(vm.demand));
    let disk_bytes: Option<u64> = vms.iter().map(|vm| vm.disk_bytes).sum();
    let whole: Vec<Way> = vms[0]
        .ways
        .iter()
        .map(|way| Way { to: way.to.clone(), cost: cost(vms, &way.to) })
        .collect();
    let mut refusals = Refusals::default();
    let open = rooms.open(&whole, &mut refusals, |other| {
        lacks(other, demand).or_else(|| rooms.lacks_pool(other, disk_bytes))
    });
    let best = rooms.nearest(open, |other| Some(other.rank()));
    best.map(|(to, _)| to).ok_or(refusals)
}

fn way<'a>(vm: &'a LeavingVm, to: &HostId) -> Option<&'a Result<Cost, Refusal>> {
    vm.ways.iter().find(|way| way.to == *to).map(|way| &way.cost)
}

/// What all of their moves take together, or why one of them can't go there.
fn cost(vms: &[&LeavingVm], to: &HostId) -> Result<Cost, Refusal> {
    let mut whole = Cost::default();
    for vm in vms {
        let not_looked_at =
            || Refusal { why: format!("not looked at yet for VM {}", vm.name), passes: true };
        let one = way(vm, to).cloned().unwrap_or_else(|| Err(not_looked_at()))?;
        whole.seconds += one.seconds;
        whole.bytes = whole.bytes.saturating_add(one.bytes);
    }
    Ok(whole)
}

fn moves(vm: &LeavingVm, to: &HostId, rooms: &mut Rooms) -> Planned {
    let cost = way(vm, to).and_then(|cost| cost.as_ref().ok()).copied().unwrap_or_default();
    rooms.take(to, vm.demand, vm.disk_bytes.unwrap_or_default());
    Planned {
        left_s: vm.left.map(|left| left.expected_s),
        ..Planned::moves(DrainedKind::Vm, &vm.name, vec![to.clone()], cost)
    }
}
