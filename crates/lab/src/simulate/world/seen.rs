//! What a rule sees of the simulated cluster.

use perigee_model::{HostId, VmId};
use perigee_planner::balance::{Comes, Elsewhere, HostLoad, Look, VmLoad, price_s};

use super::World;

impl World<'_> {
    /// What agents would report.
    pub(super) fn measured(&self) -> Look {
        let passed_s = ((self.now_ms - self.looked_ms) as f64 / 1000.0).max(1.0);
        let mut vms = Vec::new();
        let mut others = vec![0.0; self.hosts.len()];
        for (number, vm) in self.vms.iter() {
            let Some(host) = vm.host else { continue };
            if vm.moving_to.is_some() {
                others[host] += (vm.used_s + vm.waited_s) / passed_s;
                continue;
            }
            // A job has copied its data to where it is.
            let data = vm.data.filter(|_| vm.work.is_none());
            vms.push(VmLoad {
                vm: vm.id.clone(),
                host: self.hosts[host].id.clone(),
                vcpus: vm.size.cpus,
                memory_bytes: vm.size.memory_bytes,
                used_cpus: Some(vm.used_s / passed_s),
                waited_cpus: Some(vm.waited_s / passed_s),
                data_lost: Some(self.network_lost(number, host)),
                data_at: data.map(|home| self.hosts[home].id.clone()).into_iter().collect(),
                taken_from: None,
                together: None,
                apart: None,
                may_move: self.may_move(number),
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
            comes: Comes::All,
            in_a_move: host.in_a_move,
        });
        Look { passed_s, hosts: hosts.collect(), vms }
    }

    pub(super) fn elsewhere(&self, vm: &VmId, host: &HostId) -> Option<Elsewhere> {
        let (vm, to) = (self.vms.number(vm)?, *self.host_numbers.get(host)?);
        let from = self.vms[vm].host?;
        let price_s = price_s(self.cost(vm, from, to), self.vms[vm].wanted);
        Some(Elsewhere { price_s, data_lost: self.data_lost(vm, to) })
    }
}
