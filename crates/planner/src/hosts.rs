//! What is known about a host: how long a VM boots there, and how fast it computes.

use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::plan::{Part, Unknown};
use perigee_model::vm::Accelerator;

use crate::cpu_load::load_factor;
use crate::facts::{Boot, Cluster, HostFacts};
use crate::spread::Spread;

/// Measured: in 9 of 10 cases a repeated boot differs from the others by less than this share.
const REPEATED: f64 = 0.24;
/// With at least this many boots at a host, the boots of other hosts are not considered.
const BOOTS_ENOUGH: usize = 3;
/// A boot at one host may take this much less or more time at another with the same accelerator.
const ELSEWHERE: (f64, f64) = (WARM, 2.0);
/// The first boot of an image takes long, because none of it is in memory: a later one took as little as this share of
/// its time.
const WARM: f64 = 0.25;
/// The assumed seconds of a boot if none was measured anywhere: low, expected, high.
const UNKNOWN_BOOT_KVM_S: (f64, f64, f64) = (1.0, 5.0, 40.0);
const UNKNOWN_BOOT_TCG_S: (f64, f64, f64) = (3.0, 12.0, 120.0);

/// Hosts whose speeds differ by less than this count as equally fast, because repeated boots differ as much.
const EQUALLY_FAST: f64 = 0.1;
/// How much faster or slower a host may be at which nothing has run.
const UNKNOWN_SPEED: (f64, f64) = (0.6, 1.7);

/// Predicts the time from the VM's start to the command's start. It uses the last boots of this image at this host; if
/// they are few, also those at hosts that look the same; if there are none, those at other hosts with the same
/// accelerator. If this image has booted at none of these, it uses the boots of all images, and else a guess.
pub(crate) fn boot(cluster: &Cluster, host: &HostFacts, image: &str) -> (Spread, Option<Unknown>) {
    let accelerator = host.accelerator;
    let alike = || cluster.hosts.iter().filter(move |other| other.accelerator == accelerator);
    let is_known = alike().flat_map(|other| &other.boots).any(|boot| boot.image == image);
    let boots_at = |at: &HostFacts| -> Vec<f64> {
        let counts = |boot: &&Boot| !is_known || boot.image == image;
        at.boots.iter().filter(counts).map(|boot| boot.seconds).collect()
    };
    let mut here = boots_at(host);
    if (1..BOOTS_ENOUGH).contains(&here.len()) {
        // A few boots are mostly noise, so those of hosts that look the same say as much.
        let same = alike().filter(|other| other.id != host.id && other.cpu_model == host.cpu_model);
        here.extend(same.flat_map(boots_at));
    }
    if let Some(median_s) = median(&mut here) {
        let repeated = REPEATED * (1.0 + 1.0 / here.len() as f64).sqrt();
        let spread = Spread::repeated(median_s, repeated);
        let (least_s, most_s) = (here[0], here[here.len() - 1]);
        let mut low_s = least_s.min(spread.low());
        if here.len() < BOOTS_ENOUGH {
            low_s = low_s.min(median_s * WARM);
        }
        return (Spread::between(low_s, median_s, most_s.max(spread.high())), None);
    }
    let unknown = |why| Some(Unknown { part: Part::Boot, why });
    let mut elsewhere: Vec<f64> = alike().flat_map(boots_at).collect();
    if let Some(median_s) = median(&mut elsewhere) {
        let (less, more) = ELSEWHERE;
        let spread = Spread::between(median_s * less, median_s, median_s * more);
        let what = if host.boots.is_empty() { "no VM" } else { "no VM of this image" };
        return (
            spread,
            unknown(format!("{what} has booted at {} yet, only at other hosts", host.id)),
        );
    }
    let (low_s, expected_s, high_s) = match host.accelerator {
        Accelerator::Kvm => UNKNOWN_BOOT_KVM_S,
        Accelerator::Tcg => UNKNOWN_BOOT_TCG_S,
    };
    let why = "no VM has booted anywhere yet".to_owned();
    (Spread::between(low_s, expected_s, high_s), unknown(why))
}

/// The CPU time that work needs at this host, relative to a host of mean speed. It is measured by the CPU time
/// of boots of the same images. Other VMs at the host are not considered; they are in [`load_factor`].
pub(crate) fn cpu_factor(cluster: &Cluster, host: &HostId) -> (Spread, Option<Unknown>) {
    let one = (Spread::exactly(1.0), None);
    let Some(facts) = cluster.hosts.iter().find(|other| other.id == *host) else { return one };
    let alike = cluster.hosts.iter().filter(|other| {
        other.accelerator == facts.accelerator && other.cpu_model == facts.cpu_model
    });
    // This host itself comes first.
    let mut tell = [facts].into_iter().chain(alike).filter_map(|h| measured_factor(cluster, h));
    if let Some(factor) = tell.next() {
        let factor = if (factor - 1.0).abs() < EQUALLY_FAST { 1.0 } else { factor };
        return (Spread::exactly(factor), None);
    }
    if cluster.hosts.iter().all(|other| boot_cpu_s(other).is_empty()) {
        // Then no job has run either, and its whole CPU time is unknown.
        return one;
    }
    let (low, high) = UNKNOWN_SPEED;
    let why = format!("nothing has run at {host} yet, so its speed is not known");
    (Spread::between(low, 1.0, high), Some(Unknown { part: Part::Cpu, why }))
}

/// The host's CPU time relative to the mean of the hosts that booted the same image. Of several images the one in the middle
/// counts: a guest may compute at one host and not at another.
fn measured_factor(cluster: &Cluster, facts: &HostFacts) -> Option<f64> {
    let here = boot_cpu_s(facts);
    if here.is_empty() {
        return None;
    }
    let mut factors = Vec::new();
    let of_hosts: Vec<_> = cluster.hosts.iter().map(boot_cpu_s).collect();
    for (image, cpu_s) in &here {
        let all: Vec<f64> = of_hosts.iter().filter_map(|boots| boots.get(image)).copied().collect();
        factors.push(cpu_s * all.len() as f64 / all.iter().sum::<f64>());
    }
    median(&mut factors)
}

/// For each image, the median of the boots whose CPU time was measured.
fn boot_cpu_s(host: &HostFacts) -> BTreeMap<&str, f64> {
    let mut by_image: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for boot in host.boots.iter().filter(|boot| boot.cpu_s > 0.0) {
        by_image.entry(&boot.image).or_default().push(boot.cpu_s);
    }
    by_image
        .into_iter()
        .filter_map(|(image, mut boots)| Some((image, median(&mut boots)?)))
        .collect()
}

/// The time that computing takes at this host beside the VMs there, relative to a host of mean speed that does nothing else. The
/// VM, with so many vCPUs, is not among those there.
pub(crate) fn computing_factor(cluster: &Cluster, host: &HostFacts, own_vcpus: u32) -> Spread {
    let (speed, _) = cpu_factor(cluster, &host.id);
    speed.by(load_factor(host, own_vcpus))
}

/// How much longer computing that took `computed_s` at the one factor takes at the other. It is never negative: how fast a host is
/// is known only roughly, so that alone is no reason to move. That a VM waits for a CPU is measured, and counts by itself
/// (`cpu_wait` in `running/changes.rs`).
pub(crate) fn slower_s(computed_s: f64, here: Spread, there: Spread) -> f64 {
    (computed_s * (there.expected / here.expected - 1.0)).max(0.0)
}

/// `None` of nothing.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values[(values.len() - 1) / 2];
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    fn booted(cluster: &mut Cluster, host: usize, seconds: f64, cpu_s: f64) {
        let image = "debian".to_owned();
        cluster.hosts[host].boots.push(Boot { image, seconds, cpu_s });
    }

    fn nothing_booted() -> Cluster {
        let mut cluster = cluster();
        cluster.hosts.iter_mut().for_each(|host| host.boots.clear());
        cluster
    }

    #[test]
    fn a_boot_is_never_no_time() {
        let mut cluster = nothing_booted();
        let (guess, unknown) = boot(&cluster, &cluster.hosts[0], "debian");
        assert!(guess.low() > 0.0 && guess.high() > 5.0 * guess.expected);
        assert_eq!(unknown.expect("a part").part, Part::Boot);
        booted(&mut cluster, 2, 10.0, 5.0);
        let (elsewhere, unknown) = boot(&cluster, &cluster.hosts[0], "debian");
        assert_close(elsewhere.expected, 10.0);
        assert_close(elsewhere.high(), 20.0);
        assert!(unknown.expect("a part").why.contains("only at other hosts"));
        let (there, unknown) = boot(&cluster, &cluster.hosts[2], "debian");
        assert!(unknown.is_none() && there.high() < elsewhere.high());
    }

    #[test]
    fn one_boot_is_weighed_with_those_of_hosts_that_look_the_same() {
        let mut cluster = nothing_booted();
        booted(&mut cluster, 0, 7.0, 5.0);
        booted(&mut cluster, 1, 12.0, 5.0);
        booted(&mut cluster, 2, 10.0, 5.0);
        assert_close(boot(&cluster, &cluster.hosts[0], "debian").0.expected, 10.0);
        cluster.hosts[1].cpu_model = "Xeon".to_owned();
        cluster.hosts[2].cpu_model = "Xeon".to_owned();
        assert_close(boot(&cluster, &cluster.hosts[0], "debian").0.expected, 7.0);
    }

    #[test]
    fn all_boots_that_were_seen_are_in_the_range() {
        let mut cluster = nothing_booted();
        for seconds in [10.0, 11.0, 40.0] {
            booted(&mut cluster, 0, seconds, 5.0);
        }
        let (range, _) = boot(&cluster, &cluster.hosts[0], "debian");
        assert_close(range.expected, 11.0);
        assert_close(range.high(), 40.0);
    }

    #[test]
    fn slow_boots_of_other_images_say_nothing_of_an_image_that_has_booted() {
        let mut cluster = nothing_booted();
        booted(&mut cluster, 0, 10.0, 5.0);
        for _ in 0..4 {
            booted(&mut cluster, 0, 600.0, 5.0);
            cluster.hosts[0].boots.last_mut().expect("a boot").image = "other".to_owned();
        }
        let boot_s = |host: usize, image| boot(&cluster, &cluster.hosts[host], image).0.expected;
        assert_close(boot_s(0, "debian"), 10.0);
        assert_close(boot_s(1, "debian"), 10.0);
        assert_close(boot_s(0, "new"), 600.0);
    }

    /// Such an image made its host look a third slower to all jobs.
    #[test]
    fn one_image_that_computes_at_one_host_only_does_not_make_that_host_slow() {
        let mut cluster = nothing_booted();
        for (image, cpu_s) in [("debian", 5.0_f64), ("alpine", 2.0), ("odd", 500.0)] {
            for host in [0, 2] {
                let cpu_s = if host == 0 { cpu_s } else { cpu_s.min(5.0) };
                booted(&mut cluster, host, 10.0, cpu_s);
                cluster.hosts[host].boots.last_mut().expect("a boot").image = image.to_owned();
            }
        }
        assert_close(cpu_factor(&cluster, &host_id("home1")).0.expected, 1.0);
        assert_close(cpu_factor(&cluster, &host_id("cloud1")).0.expected, 1.0);
    }

    #[test]
    fn a_host_that_boots_with_less_cpu_time_is_faster() {
        let mut cluster = nothing_booted();
        booted(&mut cluster, 0, 10.0, 3.0);
        booted(&mut cluster, 2, 10.0, 9.0);
        assert_close(cpu_factor(&cluster, &host_id("home1")).0.expected, 0.5);
        assert_close(cpu_factor(&cluster, &host_id("cloud1")).0.expected, 1.5);
        cluster.hosts[0].boots[0].image = "other".to_owned();
        assert_close(cpu_factor(&cluster, &host_id("home1")).0.expected, 1.0);
    }

    #[test]
    fn the_noise_of_boots_is_no_difference_of_hosts() {
        let mut cluster = nothing_booted();
        booted(&mut cluster, 0, 10.0, 5.0);
        booted(&mut cluster, 2, 10.0, 5.8);
        assert_eq!(cpu_factor(&cluster, &host_id("cloud1")).0, Spread::exactly(1.0));
    }

    #[test]
    fn a_host_without_boots_is_as_fast_as_one_with_the_same_processor() {
        let mut cluster = nothing_booted();
        booted(&mut cluster, 0, 10.0, 3.0);
        booted(&mut cluster, 2, 10.0, 9.0);
        cluster.hosts[2].cpu_model = "Xeon".to_owned();
        assert_close(cpu_factor(&cluster, &host_id("home2")).0.expected, 0.5);
        cluster.hosts[1].cpu_model = "POWER".to_owned();
        let (factor, unknown) = cpu_factor(&cluster, &host_id("home2"));
        assert!(factor.up > 0.5 && unknown.expect("a part").part == Part::Cpu);
    }

    #[test]
    fn boots_without_cpu_time_say_nothing_of_a_host_s_speed() {
        let mut cluster = nothing_booted();
        booted(&mut cluster, 0, 10.0, 0.0);
        booted(&mut cluster, 1, 10.0, 0.0);
        assert_eq!(cpu_factor(&cluster, &host_id("home1")).0, Spread::exactly(1.0));
    }
}
