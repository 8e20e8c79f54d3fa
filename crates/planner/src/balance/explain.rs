//! Where one VM stands: the figures behind a decision, for people.

use perigee_model::balance::{BalanceTarget, VmFigures, VmMeasured};
use perigee_model::{HostId, VmId};

use super::load::Loads;
use super::{Accounts, Elsewhere, Look, TARGETS, sound, targets};

/// What a look has shown of a VM, with the accounts after that look. `elsewhere` is what the look was decided with; the error says in plain
/// words why the VM can't be at the host, and is empty where nothing is known of it. `None` if the VM was not looked at.
pub fn explain(
    accounts: &Accounts,
    look: &Look,
    vm: &VmId,
    elsewhere: impl Fn(&HostId) -> Result<Elsewhere, String>,
) -> Option<VmFigures> {
    let loads = Loads::of(look);
    let number = look.vms.iter().position(|load| load.vm == *vm)?;
    let here = loads.host_of(number)?;
    let factor = accounts.factor(vm);
    let mut hosts = targets(accounts, &loads, number, here);
    // Of few hosts each is named, with what stands against it.
    let others = (0..look.hosts.len()).filter(|host| *host != here && loads.is_near(number, *host));
    for host in others.take(TARGETS) {
        if hosts.len() < TARGETS && !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let of_host = |to: usize| {
        let host = look.hosts[to].host.clone();
        let there = elsewhere(&host);
        let why_not = loads.why_not(number, here, to, accounts.is_by_data(vm, &host));
        let price_s = there.as_ref().ok().copied().and_then(sound).map(|there| there.price_s);
        let (saved_s, for_s) = accounts.saved(vm, &host);
        let why_not = why_not.or(there.err()).unwrap_or_default();
        let needed_s = price_s.map(|price_s| price_s * factor);
        BalanceTarget { host, saved_s, for_s, price_s, needed_s, why_not }
    };
    let mut targets: Vec<BalanceTarget> = hosts.into_iter().map(of_host).collect();
    let left_s = |target: &BalanceTarget| target.saved_s - target.needed_s.unwrap_or(f64::MAX);
    targets.sort_by(|a, b| {
        let is_out = |target: &BalanceTarget| !target.why_not.is_empty();
        is_out(a).cmp(&is_out(b)).then_with(|| left_s(b).total_cmp(&left_s(a)))
    });
    let load = &look.vms[number];
    let measured = VmMeasured {
        used_cpus: load.used_cpus,
        waited_cpus: load.waited_cpus,
        data_lost: load.data_lost,
        data_at: load.data_at.iter().filter(|host| **host != load.host).cloned().collect(),
        neighbours: loads.neighbours(number),
        host_cpus: look.hosts[here].cpus,
        host_wanted_cpus: loads.wanted(here),
        host_memory_stalled: look.hosts[here].memory_stalled,
    };
    let (on_trial, judged) = accounts.trials(vm);
    Some(VmFigures { measured: Some(measured), price_factor: factor, on_trial, judged, targets })
}
