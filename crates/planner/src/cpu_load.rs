//! How much longer computing takes at a host whose CPUs others want too.
//!
//! Of a host whose load is measured, two figures count, and the larger one is expected:
//!
//! ```text
//! sharing:  (wanted + own) / CPUs           what the VMs there want now, with the VM that comes, beside what there is
//! waiting:  1 / (1 - run delay share)       the VMs there wait for this share of the time in which they want a CPU
//! ```
//!
//! The first one is there because the VM that comes may be the one that makes the CPUs too few. The second one also has what
//! other programs of the host take, which nobody counts: the VM that comes gets what the VMs there get. `wanted` is the time
//! on a CPU and the time waiting for one. A VM whose load is not measured yet, because it has just come, is taken to want half of
//! its vCPUs.
//!
//! The host's pressure counts if it says more, because other programs may compute while the VMs do nothing, or while no VM is there. In
//! this share of the time at least one task had no CPU, so at least one more than there are CPUs wanted one. With the VM that comes
//! they are two more. This is a least value, because it may have been many more tasks:
//!
//! ```text
//! pressure: 1 + share * 2 / CPUs
//! ```
//!
//! The range goes from an idle host, because the load of a minute may end, to all vCPUs computing at once.
//!
//! Of a host without figures the vCPUs are counted: if all of them compute, they share the CPUs, and half of that effect is expected.
//! Such a host is never taken for idle because nothing is known of it.

use crate::facts::HostFacts;
use crate::spread::Spread;

/// Less is no load: the kernel does not always give a CPU that is free at once.
const BUSY_SHARE: f64 = 0.05;
/// More is counted as this much: computing then takes 20 times as long.
const BUSY_SHARE_MAX: f64 = 0.95;
/// Hosts at which computing takes so little longer count as equal: a minute differs as much from the next one.
const HARDLY_LONGER: f64 = 0.1;

/// How much longer computing takes at the host for a VM with so many vCPUs, which is not among those there. A VM with more vCPUs
/// than the host has CPUs does not wait for itself: its runs show that already.
pub(crate) fn load_factor(host: &HostFacts, own_vcpus: u32) -> Spread {
    let cpus = f64::from(host.cpus.max(1));
    let own = own_vcpus.min(host.cpus);
    let all_compute = (f64::from(host.running_vcpus.saturating_add(own)) / cpus).max(1.0);
    let Some(load) = host.cpu_load else {
        return Spread::between(1.0, f64::midpoint(1.0, all_compute), all_compute);
    };
    let not_measured = host.running_vcpus.saturating_sub(load.measured_vcpus);
    let wanted = load.vcpus_1m.wanted_vcpus() + f64::from(not_measured) / 2.0;
    let sharing = (wanted + f64::from(own)) / cpus;
    let waiting = wait_share(host).map_or(1.0, |share| 1.0 / (1.0 - share));
    let pressure = 1.0 + load.pressure_share.unwrap_or(0.0) * 2.0 / cpus;
    let expected = sharing.max(waiting).max(pressure);
    let expected = if expected < 1.0 + HARDLY_LONGER { 1.0 } else { expected };
    Spread::between(1.0, expected, all_compute.max(expected))
}

/// The share of the time in which the VMs there want a CPU and wait for one; `None` if it is not known, or too small to count.
fn wait_share(host: &HostFacts) -> Option<f64> {
    let share = host.cpu_load?.vcpus_1m.run_delay_share();
    (share >= BUSY_SHARE).then(|| share.min(BUSY_SHARE_MAX))
}

/// Why computing takes longer there, in plain words: `home1 is busy: its VMs wait 35 % of their time for a CPU`. Empty if it does
/// not.
pub(crate) fn why_busy(host: &HostFacts, own_vcpus: u32) -> String {
    let Some(load) = host.cpu_load else { return String::new() };
    if load_factor(host, own_vcpus).expected <= 1.0 {
        return String::new();
    }
    let id = &host.id;
    if let Some(share) = wait_share(host) {
        let percent = share * 100.0;
        return format!("{id} is busy: its VMs wait {percent:.0} % of their time for a CPU");
    }
    let (wanted, cpus) = (load.vcpus_1m.wanted_vcpus(), host.cpus);
    match load.pressure_share {
        Some(share) if wanted < f64::from(cpus) / 2.0 => {
            let percent = share * 100.0;
            format!(
                "{id} is busy: in {percent:.0} % of the time one of its programs waits for a CPU"
            )
        }
        _ => format!("{id} is busy: its VMs want {wanted:.1} of its {cpus} CPUs"),
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::load::VcpuUse;

    use super::*;
    use crate::facts::CpuLoad;
    use crate::fixture::*;

    /// A host with 2 CPUs and VMs with so many vCPUs, which had CPUs and waited for CPUs like this.
    fn host(vcpus: u32, running_vcpus: f64, waiting_vcpus: f64) -> HostFacts {
        let vcpus_1m = VcpuUse { running_vcpus, waiting_vcpus };
        let load = CpuLoad { measured_vcpus: vcpus, vcpus_1m, pressure_share: None };
        let host = cluster().hosts.remove(0);
        HostFacts { running_vcpus: vcpus, cpu_load: Some(load), ..host }
    }

    fn expected(host: &HostFacts) -> f64 {
        load_factor(host, 1).expected
    }

    #[test]
    fn vcpus_beyond_the_cpus_of_a_host_without_figures_share_them() {
        let mut host = cluster().hosts.remove(0);
        assert_eq!(load_factor(&host, 8), Spread::exactly(1.0), "alone");
        (host.running_vcpus, host.cpu_load) = (4, None);
        // One VM with 4 vCPUs beside one with 2, on 2 CPUs.
        let shared = load_factor(&host, 2);
        assert_close(shared.expected, 2.0);
        assert_close(shared.high(), 3.0);
        assert_eq!(why_busy(&host, 2), "");
    }

    #[test]
    fn vms_that_do_nothing_slow_nobody_down() {
        let idle = host(8, 0.02, 0.001);
        assert_close(expected(&idle), 1.0);
        assert_close(load_factor(&idle, 1).high(), 4.5);
        assert_eq!(why_busy(&idle, 1), "");
    }

    #[test]
    fn a_vm_that_comes_gets_what_the_vms_there_get() {
        let busy = host(4, 1.3, 0.7);
        assert_close(expected(&busy), 1.0 / 0.65);
        assert_eq!(why_busy(&busy, 1), "home1 is busy: its VMs wait 35 % of their time for a CPU");
        assert_close(expected(&host(4, 0.0, 4.0)), 20.0);
    }

    #[test]
    fn a_vm_that_comes_may_be_the_one_that_makes_the_cpus_too_few() {
        let full = host(2, 2.0, 0.0);
        assert_close(expected(&full), 1.5);
        assert_eq!(why_busy(&full, 1), "home1 is busy: its VMs want 2.0 of its 2 CPUs");
    }

    #[test]
    fn a_vm_that_was_not_measured_yet_counts_as_half_its_vcpus() {
        let mut host = host(2, 1.0, 0.0);
        assert_close(expected(&host), 1.0);
        host.running_vcpus += 4;
        assert_close(expected(&host), 2.0);
    }

    #[test]
    fn the_pressure_counts_where_it_says_more_than_the_vms() {
        let mut host = host(0, 0.0, 0.0);
        let set = |host: &mut HostFacts, share| {
            host.cpu_load.as_mut().expect("a load").pressure_share = share;
        };
        set(&mut host, Some(0.8));
        assert_close(expected(&host), 1.8);
        let said = "home1 is busy: in 80 % of the time one of its programs waits for a CPU";
        assert_eq!(why_busy(&host, 1), said);
        let mut idle_vms = self::host(4, 0.02, 0.0);
        set(&mut idle_vms, Some(0.8));
        assert_close(expected(&idle_vms), 1.8);
        host.cpus = 64;
        assert_close(expected(&host), 1.0);
        set(&mut host, None);
        assert_close(expected(&host), 1.0);
    }

    proptest::proptest! {
        #[test]
        fn more_load_never_makes_a_host_faster(
            vcpus in 0..64_u32, running in 0.0..8.0_f64, waiting in 0.0..8.0_f64, more in 0.0..4.0_f64, own in 1..8_u32,
        ) {
            let less = load_factor(&host(vcpus, running, waiting), own);
            let most = load_factor(&host(vcpus, running, waiting + more), own);
            proptest::prop_assert!(less.expected >= 1.0 && less.expected <= less.high() + 1e-9);
            proptest::prop_assert!(most.expected >= less.expected - 1e-9);
            proptest::prop_assert!(most.expected.is_finite());
        }
    }
}
