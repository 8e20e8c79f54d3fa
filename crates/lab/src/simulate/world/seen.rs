//! What a rule sees of the simulated cluster.

use perigee_model::{HostId, VmId};
use perigee_planner::balance::{Elsewhere, HostLoad, Look, VmLoad, price_s};

use super::{VCPUS, World};

impl World<'_> {
    /// What agents would report.
    pub(super) fn measured(&self) -> Look {
        let passed_s = (self.now_s - self.looked_s).max(1) as f64;
        let mut vms = Vec::new();
        let mut others = vec![0.0; self.hosts.len()];
        for (number, vm) in self.vms.iter().enumerate() {
            let Some(host) = vm.host else { continue };
            if vm.moving_to.is_some() {
                others[host] += (vm.used_s + vm.waited_s) / passed_s;
                continue;
            }
            vms.push(VmLoad {
                vm: vm.id.clone(),
                host: self.hosts[host].id.clone(),
                vcpus: VCPUS,
                memory_bytes: self.scenario.vm_memory_bytes,
                used_cpus: Some(vm.used_s / passed_s),
                waited_cpus: Some(vm.waited_s / passed_s),
                data_lost: Some(self.data_lost(number, host)),
                data_at: vm.data.map(|home| self.hosts[home].id.clone()).into_iter().collect(),
                taken_from: None,
                together: None,
                apart: None,
                may_move: true,
            });
        }
        let hosts = self.hosts.iter().zip(others).map(|(host, moving)| HostLoad {
            host: host.id.clone(),
            site: host.site.clone(),
            cpus: f64::from(self.scenario.cpus),
            other_cpus: host.is_up.then_some(host.copying + moving),
            memory_stalled: Some(0.0),
            free_vcpus: host.free_vcpus,
            free_memory_bytes: host.free_memory_bytes,
            takes_vms: host.is_up,
            in_a_move: host.in_a_move,
        });
        Look { passed_s, hosts: hosts.collect(), vms }
    }

    pub(super) fn elsewhere(&self, vm: &VmId, host: &HostId) -> Option<Elsewhere> {
        let (vm, to) = (*self.vm_numbers.get(vm)?, *self.host_numbers.get(host)?);
        let from = self.vms[vm].host?;
        let cost = self.prices.of_move(&self.hosts[from].site, &self.hosts[to].site);
        let price_s = price_s(cost, self.vms[vm].wanted);
        Some(Elsewhere { price_s, data_lost: self.data_lost(vm, to) })
    }
}
