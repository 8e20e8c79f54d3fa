//! What of the measurements of hosts (`perigee host measure`) counts for predictions: figures that can be and that are not too old, of the host
//! itself or of another one of its kind.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use perigee_model::measurement::{DiskFigures, DiskPath, HostMeasurement};
use perigee_model::units::format_duration;
use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, SiteId};
use perigee_planner::{Cluster as Facts, HostFacts, LinkFacts, LinkForMoves, MeasuredHost};

use crate::cluster::Cluster;
use crate::cluster::renter::kind_key;

/// Older figures are not known any more: providers and people change their machines. The rentals of this time are kept, too.
const COUNTS_MS: u64 = 30 * 86_400_000;

/// No disk and no link is faster, in bytes per second.
const RATE_MAX: f64 = 1e12;

/// What was read less fast than this share of what its link carries was bounded by the volume servers.
const LINK_WAS_BOUND: f64 = 0.8;

/// A volume is measured with so many bytes in flight, so a link far away carries no more than that in a round trip.
const IN_FLIGHT_BYTES: f64 = (4 << 20) as f64;

/// All that counts now.
#[derive(Default)]
pub struct Known {
    hosts: BTreeMap<HostId, Arc<MeasuredHost>>,
    kinds: BTreeMap<String, Arc<MeasuredHost>>,
    /// The kinds of the rented hosts.
    kind_of: BTreeMap<HostId, String>,
}

impl Known {
    pub fn of(cluster: &Cluster) -> Self {
        let (hosts, kinds) = cluster.measurements.all();
        if hosts.is_empty() && kinds.is_empty() {
            return Self::default();
        }
        let measured = |view: &HostMeasurement| {
            let site = cluster.rentals.of_host(&view.host).map(|rental| rental.site);
            measured(view, site.as_ref(), age_ms(cluster, view))
        };
        let of_host = |view: HostMeasurement| {
            // Only of a host that is not there yet nobody probes the links.
            let own = MeasuredHost { links: Vec::new(), ..measured(&view)? };
            says_something(&own).then(|| (view.host, Arc::new(own)))
        };
        let of_kind = |view: HostMeasurement| {
            let kind = view.kind.as_ref()?;
            let of_kind = measured(&view)?;
            says_something(&of_kind)
                .then(|| (kind_key(&kind.provider, &kind.kind), Arc::new(of_kind)))
        };
        let kind_of = cluster.rentals.all_alive().into_iter().map(|rental| {
            let kind = kind_key(&rental.provider, &rental.offer.kind);
            (rental.host, kind)
        });
        Self {
            hosts: hosts.into_iter().filter_map(of_host).collect(),
            kinds: kinds.into_iter().filter_map(of_kind).collect(),
            kind_of: kind_of.collect(),
        }
    }

    /// Of a host that is there.
    pub fn host(&self, host: &HostId) -> Option<Arc<MeasuredHost>> {
        let of_kind = || {
            let known = self.kinds.get(self.kind_of.get(host)?)?;
            let without = MeasuredHost { links: Vec::new(), ..known.as_ref().clone() };
            says_something(&without).then(|| Arc::new(without))
        };
        self.hosts.get(host).cloned().or_else(of_kind)
    }

    /// Notes with the hosts what was measured of each. Hosts of one kind share what was measured of that.
    pub fn note(&self, hosts: &mut [HostFacts]) {
        let mut shared: BTreeMap<&String, Option<Arc<MeasuredHost>>> = BTreeMap::new();
        for host in hosts {
            let kind = self.kind_of.get(&host.id).filter(|_| !self.hosts.contains_key(&host.id));
            host.measured = match kind {
                Some(kind) => shared.entry(kind).or_insert_with(|| self.host(&host.id)).clone(),
                None => self.host(&host.id),
            };
        }
    }

    /// Of one more host of a kind, by [`kind_key`]. Of a host of the kind that is there (`like`) the links were probed since, and count as those of its site.
    pub fn one_more(
        &self,
        kind: &str,
        like: Option<&HostFacts>,
        facts: &Facts,
    ) -> Option<Arc<MeasuredHost>> {
        let known = self.kinds.get(kind)?;
        let is_probed = |link: &LinkFacts| {
            let Some(like) = like else { return false };
            let is_its = |probed: &&LinkFacts| probed.from == like.id || probed.to == like.id;
            facts.links.iter().filter(is_its).any(|probed| {
                (&probed.from_site, &probed.to_site) == (&link.from_site, &link.to_site)
            })
        };
        if !known.links.iter().any(is_probed) {
            return Some(Arc::clone(known));
        }
        let mut rest = known.as_ref().clone();
        rest.links.retain(|link| !is_probed(link));
        Some(Arc::new(rest))
    }
}

/// Whether figures are not too old.
pub fn counts(cluster: &Cluster, view: &HostMeasurement) -> bool {
    age_ms(cluster, view) < COUNTS_MS
}

fn age_ms(cluster: &Cluster, view: &HostMeasurement) -> u64 {
    cluster.clock.age_ms(view.ended_ms.unwrap_or(view.begun_ms))
}

/// The same number for the same figures.
pub fn digest(measured: Option<&MeasuredHost>) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Some(MeasuredHost {
        host,
        read_bytes_per_s,
        write_bytes_per_s,
        remote_reads,
        links,
        ..
    }) = measured
    {
        (host, read_bytes_per_s, write_bytes_per_s, remote_reads).hash(&mut hasher);
        for link in links {
            (&link.from_site, &link.to_site, link.probe.rate_bytes_per_s).hash(&mut hasher);
            link.probe.rtt_ms.to_bits().hash(&mut hasher);
        }
    }
    hasher.finish()
}

fn says_something(measured: &MeasuredHost) -> bool {
    let MeasuredHost { read_bytes_per_s, write_bytes_per_s, remote_reads, links, .. } = measured;
    let has_disk = read_bytes_per_s.is_some() || write_bytes_per_s.is_some();
    has_disk || !remote_reads.is_empty() || !links.is_empty()
}

/// What counts of a measurement that is so old; `None` if it is too old. `site`: that of the host, if it was rented.
fn measured(view: &HostMeasurement, site: Option<&SiteId>, age_ms: u64) -> Option<MeasuredHost> {
    if age_ms >= COUNTS_MS {
        return None;
    }
    let pool = pool(view);
    Some(MeasuredHost {
        host: view.host.clone(),
        source: source(view, age_ms / 1000),
        read_bytes_per_s: pool.and_then(|pool| rate(pool.read_bytes_per_s)),
        write_bytes_per_s: pool.and_then(|pool| rate(pool.write_bytes_per_s)),
        remote_reads: remote_reads(view),
        links: site.map(|site| links(view, site)).unwrap_or_default(),
    })
}

/// A rate that can be, in bytes per second.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is within limits")]
fn rate(bytes_per_s: f64) -> Option<u64> {
    (1.0..=RATE_MAX).contains(&bytes_per_s).then_some(bytes_per_s as u64)
}

/// The same of a link.
fn link_rate(bytes_per_s: Option<u64>) -> Option<u64> {
    rate(bytes_per_s? as f64)
}

fn rtt_ms(rtt_ms: Option<f64>) -> Option<f64> {
    rtt_ms.filter(|rtt_ms| rtt_ms.is_finite() && *rtt_ms >= 0.0)
}

/// Figures of its own disk. Where the page cache could not be passed by, they are those of its memory.
fn pool(view: &HostMeasurement) -> Option<DiskFigures> {
    let pool = view.disks.iter().find(|disk| disk.path == DiskPath::Pool);
    pool?.figures.filter(|figures| figures.direct)
}

/// Where the volume servers were slower than the link.
fn remote_reads(view: &HostMeasurement) -> Vec<(SiteId, u64)> {
    let mut slow = BTreeMap::new();
    for link in &view.networks {
        let disk = view
            .disks
            .iter()
            .find(|disk| disk.path == DiskPath::Nbd && disk.at == link.with)
            .and_then(|disk| rate(disk.figures?.read_bytes_per_s));
        let carries = link_rate(link.from_bytes_per_s).zip(rtt_ms(link.rtt_ms));
        let Some((read, (link_rate, rtt_ms))) = disk.zip(carries) else { continue };
        let by_flight = IN_FLIGHT_BYTES / (rtt_ms / 1e3).max(1e-6);
        if (read as f64) < LINK_WAS_BOUND * (link_rate as f64).min(by_flight) {
            slow.insert(link.site.clone(), read);
        }
    }
    slow.into_iter().collect()
}

/// Both directions of each link that was measured.
fn links(view: &HostMeasurement, site: &SiteId) -> Vec<LinkFacts> {
    let mut links = Vec::new();
    for link in &view.networks {
        let Some(rtt_ms) = rtt_ms(link.rtt_ms) else { continue };
        let here = (&view.host, site);
        let there = (&link.with, &link.site);
        let ways = [(here, there, link.from_bytes_per_s), (there, here, link.to_bytes_per_s)];
        links.extend(ways.into_iter().filter_map(|((from, from_site), (to, to_site), rate)| {
            Some(LinkFacts {
                from: from.clone(),
                to: to.clone(),
                from_site: from_site.clone(),
                to_site: to_site.clone(),
                probe: LinkProbe { rtt_ms, rate_bytes_per_s: link_rate(rate)? },
                blocks: None,
                moves: LinkForMoves::default(),
            })
        }));
    }
    links
}

/// On what it was measured, and when.
fn source(view: &HostMeasurement, age_s: u64) -> String {
    let on = view.kind.as_ref().map(|kind| format!(" on {}", kind.kind)).unwrap_or_default();
    let whole = [86_400, 3600, 60].into_iter().find(|unit_s| age_s >= *unit_s);
    let ago = match whole {
        Some(unit_s) => format!("{} ago", format_duration(age_s / unit_s * unit_s)),
        None => "just now".to_owned(),
    };
    format!("measured{on} {ago}")
}

#[cfg(test)]
mod tests {
    use perigee_model::measurement::{
        DiskMeasurement, MeasurementState, NetworkFigures, RentedKind,
    };

    use super::*;

    const DAY_MS: u64 = 86_400_000;

    fn host(name: &str) -> HostId {
        HostId::new(name).expect("a name")
    }

    fn site(name: &str) -> SiteId {
        SiteId::new(name).expect("a name")
    }

    /// A pool that reads 200 MB/s and writes 100 MB/s; a link of 4 ms and 50 MB/s from `home1`, and a volume there that is read at `remote`.
    fn view(remote: f64) -> HostMeasurement {
        let figures = |read_bytes_per_s: f64| DiskFigures {
            size_bytes: 1 << 28,
            read_bytes_per_s,
            write_bytes_per_s: 1e8,
            random_reads_per_s: 1000.0,
            random_writes_per_s: 100.0,
            direct: true,
        };
        let disk = |path, at: &str, read| DiskMeasurement {
            path,
            at: host(at),
            figures: Some(figures(read)),
            problem: String::new(),
        };
        HostMeasurement {
            host: host("rent-1"),
            kind: Some(RentedKind { provider: "lab".to_owned(), kind: "m1".to_owned() }),
            state: MeasurementState::Done,
            now: String::new(),
            by: "ann".to_owned(),
            begun_ms: 0,
            ended_ms: Some(1),
            length_s: 3,
            networks: vec![NetworkFigures {
                with: host("home1"),
                site: site("home"),
                rtt_ms: Some(4.0),
                to_bytes_per_s: Some(20_000_000),
                from_bytes_per_s: Some(50_000_000),
                to_streams_bytes_per_s: None,
                from_streams_bytes_per_s: None,
                problem: String::new(),
            }],
            disks: vec![
                disk(DiskPath::Pool, "rent-1", 2e8),
                disk(DiskPath::Nbd, "home1", remote),
                disk(DiskPath::Iscsi, "home1", 1.0),
            ],
        }
    }

    fn now(view: &HostMeasurement) -> MeasuredHost {
        measured(view, Some(&site("lab")), 3 * DAY_MS + 7_200_000).expect("it is not old")
    }

    #[test]
    fn figures_count_with_their_source_until_they_are_a_month_old() {
        let known = now(&view(49e6));
        assert_eq!(known.source, "measured on m1 3d ago");
        let disk = (known.read_bytes_per_s, known.write_bytes_per_s);
        assert_eq!(disk, (Some(200_000_000), Some(100_000_000)));
        let links: Vec<_> = known
            .links
            .iter()
            .map(|link| (link.from.as_str(), link.to_site.as_str(), link.probe.rate_bytes_per_s))
            .collect();
        assert_eq!(links, [("rent-1", "home", 50_000_000), ("home1", "lab", 20_000_000)]);
        let own = HostMeasurement { kind: None, ..view(1.0) };
        assert_eq!(source(&own, 59), "measured just now");
        assert_eq!(source(&own, 7_300), "measured 2h ago");
        assert!(measured(&own, None, 30 * DAY_MS - 1).is_some());
        assert!(measured(&own, None, 30 * DAY_MS).is_none());
    }

    #[test]
    fn what_can_t_be_and_what_memory_answered_is_not_known() {
        let is_known = |read: f64, direct: bool| {
            let mut view = view(1e6);
            let figures = view.disks[0].figures.as_mut().expect("figures");
            (figures.read_bytes_per_s, figures.direct) = (read, direct);
            now(&view).read_bytes_per_s.is_some()
        };
        assert!(is_known(1e6, true) && !is_known(1e6, false));
        for nonsense in [0.0, -5.0, f64::INFINITY, f64::NAN, 1e15] {
            assert!(!is_known(nonsense, true), "{nonsense}");
            assert!(now(&view(nonsense)).remote_reads.is_empty(), "{nonsense}");
        }
        for nonsense in [-1.0, f64::INFINITY, f64::NAN] {
            let mut bad = view(1e6);
            bad.networks[0].rtt_ms = Some(nonsense);
            assert!(now(&bad).links.is_empty(), "{nonsense}");
        }
        let mut dead = view(1e6);
        dead.networks[0].from_bytes_per_s = Some(0);
        dead.networks[0].to_bytes_per_s = None;
        assert!(now(&dead).links.is_empty());
    }

    #[test]
    fn volume_servers_bound_what_is_read_only_where_the_link_did_not() {
        let slow = |remote: f64| now(&view(remote)).remote_reads;
        assert_eq!(slow(30e6), [(site("home"), 30_000_000)]);
        assert!(slow(45e6).is_empty(), "nearly as fast as the link");
        let mut far = view(30e6);
        // 4 MiB in each 0.13 s are 32 MB/s.
        far.networks[0].rtt_ms = Some(130.0);
        assert!(now(&far).remote_reads.is_empty(), "the requests in flight were the bound");
        far.networks[0].from_bytes_per_s = None;
        assert!(now(&far).remote_reads.is_empty(), "what the link carries is not known");
    }

    #[test]
    fn a_host_has_its_own_figures_and_else_those_of_its_kind() {
        let of = |name: &str, read| {
            let read_bytes_per_s = Some(read);
            Arc::new(MeasuredHost { read_bytes_per_s, host: host(name), ..now(&view(1e6)) })
        };
        let known = Known {
            hosts: [(host("rent-2"), of("rent-2", 7))].into(),
            kinds: [("lab/m1".to_owned(), of("rent-1", 5))].into(),
            kind_of: ["rent-2", "rent-3"].map(|name| (host(name), "lab/m1".to_owned())).into(),
        };
        let read = |name: &str| known.host(&host(name)).and_then(|one| one.read_bytes_per_s);
        assert_eq!([read("rent-2"), read("rent-3"), read("home1")], [Some(7), Some(5), None]);
        let of_kind = known.host(&host("rent-3")).expect("it is known");
        assert!(of_kind.links.is_empty(), "the links of a host that is there are probed");
        let new = known.one_more("lab/m1", None, &Facts::default()).expect("it is known");
        assert_eq!(new.links.len(), 2);
        assert!(known.one_more("lab/m2", None, &Facts::default()).is_none());
    }

    #[test]
    fn links_that_were_probed_at_a_host_of_the_kind_count_before_its_measurement() {
        let kinds = [("lab/m1".to_owned(), Arc::new(now(&view(1e6))))].into();
        let known = Known { kinds, ..Known::default() };
        let mut like = perigee_planner::offers::idle_host(
            host("rent-3"),
            site("lab"),
            &crate::tests::rental("rent-3").offer,
            (0, 0),
            (None, None),
        );
        let mut facts = Facts::default();
        let mut probed = known.kinds["lab/m1"].links[0].clone();
        probed.from = host("rent-3");
        facts.links.push(probed);
        let links = |like: &HostFacts| {
            let one = known.one_more("lab/m1", Some(like), &facts).expect("it is known");
            one.links.iter().map(|link| link.from.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(links(&like), ["home1"], "the other direction");
        like.id = host("rent-4");
        assert_eq!(links(&like), ["rent-1", "home1"], "another kind was probed");
    }
}
