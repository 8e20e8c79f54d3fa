//! What is known about a host: how long a VM boots there, and how fast it computes.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use perigee_model::HostId;
use perigee_model::plan::{Part, Unknown};
use perigee_model::vm::Accelerator;

use crate::cpu_load::load_factor;
use crate::facts::{Cluster, HostFacts};
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

/// What the boots of all hosts show. Hosts and their processors have numbers.
#[derive(Debug)]
pub(crate) struct Booted {
    /// The numbers of the images that have booted.
    images: HashMap<String, usize>,
    /// Of each host, the boots of each image there, and of all.
    here: Vec<Vec<(usize, Times)>>,
    /// The same of the hosts with a processor.
    alike: HashMap<(usize, usize), Times>,
    /// The same of the hosts with an accelerator.
    elsewhere: HashMap<(bool, usize), Times>,
    processors: Vec<usize>,
    speeds: Vec<Speed>,
}

/// The number of all images together.
const ALL_IMAGES: usize = 0;

/// Of boots, of which there is at least one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    count: usize,
    least_s: f64,
    median_s: f64,
    most_s: f64,
}

impl Times {
    pub fn of(seconds: &mut [f64]) -> Option<Self> {
        let (count, middle) = (seconds.len(), seconds.len() / 2);
        if count == 0 {
            return None;
        }
        let (below, upper, above) = seconds.select_nth_unstable_by(middle, f64::total_cmp);
        let lower = match count % 2 {
            0 => below.iter().copied().max_by(f64::total_cmp).unwrap_or(*upper),
            _ => *upper,
        };
        let least_s = below.iter().copied().min_by(f64::total_cmp).unwrap_or(*upper);
        let most_s = above.iter().copied().max_by(f64::total_cmp).unwrap_or(*upper);
        Some(Self { count, least_s, median_s: f64::midpoint(lower, *upper), most_s })
    }

    /// How long the next boot takes at the same place. The range has all those that were measured.
    pub fn next_boot(self) -> Spread {
        let repeated = REPEATED * (1.0 + 1.0 / self.count as f64).sqrt();
        let spread = Spread::repeated(self.median_s, repeated);
        let (low_s, high_s) = (self.least_s.min(spread.low()), self.most_s.max(spread.high()));
        Spread::between(low_s, self.median_s, high_s)
    }
}

/// A boot that takes so long at one host, at another one with the same accelerator.
pub(crate) fn elsewhere(boot_s: f64) -> Spread {
    let (less, more) = ELSEWHERE;
    Spread::between(boot_s * less, boot_s, boot_s * more)
}

/// How fast a host is.
#[derive(Debug, Clone, Copy)]
enum Speed {
    /// As in [`cpu_factor`].
    Measured(f64),
    /// Only of others.
    NotKnown,
    /// Of no host.
    NowhereKnown,
}

impl Booted {
    pub fn of(hosts: &[HostFacts], processors: &[usize]) -> Self {
        let mut images: HashMap<String, usize> = HashMap::new();
        let mut alike: HashMap<(usize, usize), Vec<f64>> = HashMap::new();
        let mut elsewhere: HashMap<(bool, usize), Vec<f64>> = HashMap::new();
        let mut here = Vec::with_capacity(hosts.len());
        for (host, processor) in hosts.iter().zip(processors) {
            let mut of_host: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
            for boot in host.boots.iter() {
                let image = images.get(&boot.image).copied().unwrap_or_else(|| {
                    let image = ALL_IMAGES + 1 + images.len();
                    images.insert(boot.image.clone(), image);
                    image
                });
                for image in [ALL_IMAGES, image] {
                    of_host.entry(image).or_default().push(boot.seconds);
                    alike.entry((*processor, image)).or_default().push(boot.seconds);
                    elsewhere.entry((is_kvm(host), image)).or_default().push(boot.seconds);
                }
            }
            let times =
                |(image, mut seconds): (usize, Vec<f64>)| Some((image, Times::of(&mut seconds)?));
            here.push(of_host.into_iter().filter_map(times).collect());
        }
        Self {
            images,
            here,
            alike: all_times(alike),
            elsewhere: all_times(elsewhere),
            processors: processors.to_vec(),
            speeds: speeds(hosts, processors),
        }
    }

    /// The number of the image whose boots show how long this one boots at hosts with this accelerator.
    fn image(&self, image: &str, is_kvm: bool) -> usize {
        let own = self.images.get(image).copied();
        own.filter(|own| self.elsewhere.contains_key(&(is_kvm, *own))).unwrap_or(ALL_IMAGES)
    }

    /// The relative CPU time of this host, as [`cpu_factor`] expects it.
    pub fn cpu_factor(&self, host: usize) -> f64 {
        match self.speeds[host] {
            Speed::Measured(factor) => factor,
            Speed::NotKnown | Speed::NowhereKnown => 1.0,
        }
    }
}

fn all_times<K: Eq + Hash>(seconds: HashMap<K, Vec<f64>>) -> HashMap<K, Times> {
    let times = |(key, mut seconds): (K, Vec<f64>)| Some((key, Times::of(&mut seconds)?));
    seconds.into_iter().filter_map(times).collect()
}

fn is_kvm(host: &HostFacts) -> bool {
    host.accelerator == Accelerator::Kvm
}

/// Where boots of an image were seen that show how long it boots at a host.
enum Seen {
    Here(Spread),
    Elsewhere(Spread),
    Nowhere(Spread),
}

/// How long one image boots at each host.
pub(crate) struct Boots<'a> {
    booted: &'a Booted,
    /// The image whose boots count at hosts with TCG, and with KVM.
    images: [usize; 2],
}

impl<'a> Boots<'a> {
    pub fn of(cluster: &'a Cluster, image: &str) -> Self {
        let booted = &cluster.hosts.index().booted;
        Self { booted, images: [false, true].map(|is_kvm| booted.image(image, is_kvm)) }
    }

    /// The expected seconds at the host with this number.
    pub fn expected_s(&self, number: usize, host: &HostFacts) -> f64 {
        match self.seen(number, host) {
            Seen::Here(boot) | Seen::Elsewhere(boot) | Seen::Nowhere(boot) => boot.expected,
        }
    }

    fn seen(&self, number: usize, host: &HostFacts) -> Seen {
        let image = self.images[usize::from(is_kvm(host))];
        let here = self.booted.here[number].iter().find(|(of, _)| *of == image);
        let here = here.map(|(_, times)| match times.count < BOOTS_ENOUGH {
            // A few boots are mostly noise, so those of hosts that look the same say as much.
            true => &self.booted.alike[&(self.booted.processors[number], image)],
            false => times,
        });
        if let Some(here) = here {
            let next = here.next_boot();
            let mut low_s = next.low();
            if here.count < BOOTS_ENOUGH {
                low_s = low_s.min(here.median_s * WARM);
            }
            return Seen::Here(Spread::between(low_s, next.expected, next.high()));
        }
        if let Some(Times { median_s, .. }) = self.booted.elsewhere.get(&(is_kvm(host), image)) {
            return Seen::Elsewhere(elsewhere(*median_s));
        }
        let (low_s, expected_s, high_s) = match host.accelerator {
            Accelerator::Kvm => UNKNOWN_BOOT_KVM_S,
            Accelerator::Tcg => UNKNOWN_BOOT_TCG_S,
        };
        Seen::Nowhere(Spread::between(low_s, expected_s, high_s))
    }

    /// Predicts the time from the VM's start to the command's start. It uses the last boots of this image at this host; if
    /// they are few, also those at hosts that look the same; if there are none, those at other hosts with the same
    /// accelerator. If this image has booted at none of these, it uses the boots of all images, and else a guess.
    pub fn at(&self, number: usize, host: &HostFacts) -> (Spread, Option<Unknown>) {
        let unknown = |why| Some(Unknown { part: Part::Boot, why });
        match self.seen(number, host) {
            Seen::Here(boot) => (boot, None),
            Seen::Elsewhere(boot) => {
                let what = if host.boots.is_empty() { "no VM" } else { "no VM of this image" };
                let at = &host.id;
                (boot, unknown(format!("{what} has booted at {at} yet, only at other hosts")))
            }
            Seen::Nowhere(boot) => (boot, unknown("no VM has booted anywhere yet".to_owned())),
        }
    }
}

/// The CPU time that work needs at this host, relative to a host of mean speed. It is measured by the CPU time
/// of boots of the same images. Other VMs at the host are not considered; they are in [`load_factor`].
pub(crate) fn cpu_factor(cluster: &Cluster, host: &HostId) -> (Spread, Option<Unknown>) {
    let index = cluster.hosts.index();
    let speed = index.number(host).map(|number| index.booted.speeds[number]);
    match speed {
        Some(Speed::Measured(factor)) => (Spread::exactly(factor), None),
        Some(Speed::NotKnown) => {
            let (low, high) = UNKNOWN_SPEED;
            let why = format!("nothing has run at {host} yet, so its speed is not known");
            (Spread::between(low, 1.0, high), Some(Unknown { part: Part::Cpu, why }))
        }
        // Where nothing has booted, no job has run either, and its whole CPU time is unknown.
        Some(Speed::NowhereKnown) | None => (Spread::exactly(1.0), None),
    }
}

/// The speed of each host. Where nothing has booted, that of the first host with the same processor counts.
fn speeds(hosts: &[HostFacts], processors: &[usize]) -> Vec<Speed> {
    let boots: Vec<BTreeMap<&str, f64>> = hosts.iter().map(boot_cpu_s).collect();
    if boots.iter().all(BTreeMap::is_empty) {
        return vec![Speed::NowhereKnown; hosts.len()];
    }
    let mut sums: HashMap<&str, (usize, f64)> = HashMap::new();
    for (image, cpu_s) in boots.iter().flatten() {
        let (count, sum) = sums.entry(*image).or_default();
        (*count, *sum) = (*count + 1, *sum + cpu_s);
    }
    let measured: Vec<Option<f64>> =
        boots.iter().map(|here| measured_factor(here, &sums)).collect();
    let mut firsts: HashMap<usize, f64> = HashMap::new();
    for (processor, factor) in processors.iter().zip(&measured) {
        if let Some(factor) = factor {
            firsts.entry(*processor).or_insert(*factor);
        }
    }
    let speed = |(own, processor): (&Option<f64>, &usize)| {
        let factor = own.or_else(|| firsts.get(processor).copied());
        factor.map_or(Speed::NotKnown, |factor| {
            let is_one = (factor - 1.0).abs() < EQUALLY_FAST;
            Speed::Measured(if is_one { 1.0 } else { factor })
        })
    };
    measured.iter().zip(processors).map(speed).collect()
}

/// The host's CPU time relative to the mean of the hosts that booted the same image, of which the sums are. Of several images the
/// one in the middle counts: a guest may compute at one host and not at another.
fn measured_factor(here: &BTreeMap<&str, f64>, sums: &HashMap<&str, (usize, f64)>) -> Option<f64> {
    let factor = |(image, cpu_s): (&&str, &f64)| {
        let (count, sum) = sums.get(image)?;
        Some(cpu_s * *count as f64 / sum)
    };
    median(&mut here.iter().filter_map(factor).collect::<Vec<f64>>())
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
    use std::sync::Arc;

    use super::*;
    use crate::facts::Boot;
    use crate::fixture::*;

    fn boot(cluster: &Cluster, host: &HostFacts, image: &str) -> (Spread, Option<Unknown>) {
        let number = cluster.hosts.index().number(&host.id).expect("a host of the cluster");
        Boots::of(cluster, image).at(number, host)
    }

    fn booted(cluster: &mut Cluster, host: usize, seconds: f64, cpu_s: f64) {
        let image = "debian".to_owned();
        Arc::make_mut(&mut cluster.hosts[host].boots).push(Boot { image, seconds, cpu_s });
    }

    /// The last boot there was one of this image.
    fn last_was_of(cluster: &mut Cluster, host: usize, image: &str) {
        let boots = Arc::make_mut(&mut cluster.hosts[host].boots);
        boots.last_mut().expect("a boot").image = image.to_owned();
    }

    fn nothing_booted() -> Cluster {
        let mut cluster = cluster();
        cluster.hosts.iter_mut().for_each(|host| host.boots = Arc::default());
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
            last_was_of(&mut cluster, 0, "other");
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
                last_was_of(&mut cluster, host, image);
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
        last_was_of(&mut cluster, 0, "other");
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
