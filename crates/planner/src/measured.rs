//! What `perigee host measure` has shown of a host, or of another host of its kind, and how much slower that lets data come.
//!
//! What probes say of a link now counts before it. So a measurement says something where no probe does: of disks, of what volume
//! servers read at most, and of the links of a host that is not there yet.

use perigee_model::units::{format_bytes, format_rate};
use perigee_model::{HostId, SiteId};

use crate::facts::{Cluster, HostFacts, LinkFacts};
use crate::figures::Figures;

/// What was measured of a host. What is missing is not known.
#[derive(Debug, Clone)]
pub struct MeasuredHost {
    /// The host on which it was measured.
    pub host: HostId,
    /// On what and when, in words: `measured on c8i.2xlarge 3d ago`.
    pub source: String,
    /// How fast its pool's disk is read; bytes per second, above 0.
    pub read_bytes_per_s: Option<u64>,
    /// How fast that is written; bytes per second, above 0.
    pub write_bytes_per_s: Option<u64>,
    /// How fast it read a volume of a host at each of these sites where the volume servers were slower than the link; bytes per
    /// second, above 0.
    pub remote_reads: Vec<(SiteId, u64)>,
    /// Its links with hosts of other sites and its own one, for a host of its kind that is not there yet.
    pub links: Vec<LinkFacts>,
}

impl MeasuredHost {
    /// As of another host of the kind.
    pub(crate) fn of_host(&self, id: &HostId) -> Self {
        let mut other = self.clone();
        for link in &mut other.links {
            for end in [&mut link.from, &mut link.to] {
                if *end == self.host {
                    end.clone_from(id);
                }
            }
        }
        other
    }

    /// How fast it reads volumes of hosts at a site at most; `None` if only the link bounds that.
    pub(crate) fn remote_read(&self, site: &SiteId) -> Option<u64> {
        self.remote_reads.iter().find(|(of, _)| of == site).map(|(_, rate)| *rate)
    }
}

impl HostFacts {
    /// The same for hosts of which the same was measured, and 0 for those of which nothing was.
    pub(crate) fn measured_number(&self) -> usize {
        self.measured.as_ref().map_or(0, |measured| std::sync::Arc::as_ptr(measured).addr())
    }

    /// The link between two hosts of which one is not there yet, as it was measured on another host of that one's kind.
    pub(crate) fn link_of_kind<'a>(from: &'a Self, to: &'a Self) -> Option<&'a LinkFacts> {
        let links = [from, to].into_iter().filter_map(|host| host.measured.as_ref());
        links.flat_map(|measured| &measured.links).find(|link| {
            let is_one_end = link.from == from.id || link.to == to.id;
            is_one_end
                && link.from_site == from.site
                && link.to_site == to.site
                && link.is_measured()
        })
    }
}

impl Cluster {
    /// How fast a host gets what it reads of volumes of another one, in bytes per second: as fast as the link, unless the volume servers are
    /// slower. Above 0 if the link is measured.
    pub(crate) fn read_rate(
        &self,
        link: &LinkFacts,
        at: &HostId,
        home: &HostId,
        figures: &mut Figures,
    ) -> u64 {
        let rate = link.probe.rate_bytes_per_s;
        let (Ok(at), Ok(home)) = (self.host(at), self.host(home)) else { return rate };
        let Some(measured) = &at.measured else { return rate };
        match measured.remote_read(&home.site) {
            Some(most) if most < rate => {
                let (at, site, most_s) = (&at.id, &home.site, format_rate(most));
                figures.measured(format!(
                    "{at} reads volumes of site {site} at {most_s}, {}",
                    measured.source
                ));
                most
            }
            _ => rate,
        }
    }

    /// How fast the disks of both hosts let a volume be copied, in bytes per second; `None` if that is not known.
    pub(crate) fn copy_rate_of_disks(
        &self,
        to: &HostId,
        home: &HostId,
        figures: &mut Figures,
    ) -> Option<u64> {
        let disk = |host: &HostId| self.host(host).ok()?.measured.as_deref();
        let (written, read) = (disk(to), disk(home));
        let written = written.and_then(|disk| Some((disk.write_bytes_per_s?, disk, to, "writes")));
        let read = read.and_then(|disk| Some((disk.read_bytes_per_s?, disk, home, "reads")));
        let slower = written.into_iter().chain(read).min_by_key(|(rate, ..)| *rate);
        let (rate, measured, host, does) = slower?;
        figures.measured(format!(
            "the disk of {host} {does} {}, {}",
            format_rate(rate),
            measured.source
        ));
        Some(rate)
    }
}

/// The seconds in which a home reads so many bytes from its own disk, and what is said of that; `None` if the disk was not measured.
pub(crate) fn disk_read_s(home: &HostFacts, bytes: u64, figures: &mut Figures) -> Option<f64> {
    let measured = home.measured.as_deref()?;
    let rate = measured.read_bytes_per_s?;
    figures.measured(format!(
        "the disk of {} reads {}, {}: {} in one pass",
        home.id,
        format_rate(rate),
        measured.source,
        format_bytes(bytes)
    ));
    Some(bytes as f64 / rate as f64)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use perigee_model::vm::LinkProbe;

    use super::*;
    use crate::fixture::*;
    use crate::network::path;

    /// Nothing of it is known.
    pub(crate) fn nothing(host: &str) -> MeasuredHost {
        MeasuredHost {
            host: host_id(host),
            source: "measured on k 3d ago".to_owned(),
            read_bytes_per_s: None,
            write_bytes_per_s: None,
            remote_reads: Vec::new(),
            links: Vec::new(),
        }
    }

    /// Both directions of a link with a host at the site of the fixture's data.
    pub(crate) fn linked(
        host: &str,
        site: &str,
        rtt_ms: f64,
        rate_bytes_per_s: u64,
    ) -> MeasuredHost {
        let mut one = cluster().links[0].clone();
        (one.probe, one.blocks) = (LinkProbe { rtt_ms, rate_bytes_per_s }, None);
        (one.from, one.from_site) = (host_id(host), SiteId::new(site).unwrap());
        (one.to, one.to_site) = (host_id("cloud1"), SiteId::new("cloud").unwrap());
        let mut other = one.clone();
        std::mem::swap(&mut other.from, &mut other.to);
        std::mem::swap(&mut other.from_site, &mut other.to_site);
        MeasuredHost { links: vec![one, other], ..nothing(host) }
    }

    fn rate(measured: Option<MeasuredHost>) -> u64 {
        let mut cluster = cluster();
        cluster.hosts[0].measured = measured.map(Arc::new);
        let (at, home) = (host_id("home1"), host_id("cloud1"));
        let path = path(&cluster, &at, &home, &mut Figures::default()).unwrap();
        path.unwrap().rate_bytes_per_s
    }

    #[test]
    fn volume_servers_that_are_slower_than_the_link_bound_what_is_read_from_there() {
        let reads = |site: &str, rate: u64| {
            let remote_reads = vec![(SiteId::new(site).unwrap(), rate)];
            Some(MeasuredHost { remote_reads, ..nothing("home1") })
        };
        assert_eq!(rate(None), WAN_BYTES_PER_S);
        assert_eq!(rate(reads("cloud", 20 * MIB)), 20 * MIB);
        assert_eq!(rate(reads("cloud", 1024 * MIB)), WAN_BYTES_PER_S, "the link is slower");
        assert_eq!(rate(reads("home", 20 * MIB)), WAN_BYTES_PER_S, "of another site");
    }

    #[test]
    fn the_slower_one_of_two_disks_bounds_a_copy_and_is_named() {
        let mut cluster = cluster();
        let (to, home) = (host_id("home1"), host_id("cloud1"));
        let rate = |cluster: &Cluster| {
            let mut figures = Figures::default();
            (cluster.copy_rate_of_disks(&to, &home, &mut figures), figures.into_vec())
        };
        assert_eq!(rate(&cluster), (None, Vec::new()));
        let writes = MeasuredHost { write_bytes_per_s: Some(30), ..nothing("home1") };
        cluster.hosts[0].measured = Some(Arc::new(writes));
        assert_eq!(rate(&cluster).0, Some(30));
        let reads = MeasuredHost { read_bytes_per_s: Some(20), ..nothing("cloud1") };
        cluster.hosts[2].measured = Some(Arc::new(reads));
        let said = "the disk of cloud1 reads 20 B/s, measured on k 3d ago".to_owned();
        assert_eq!(rate(&cluster), (Some(20), vec![said]));
    }

    #[test]
    fn the_link_of_a_host_that_is_there_is_as_it_was_probed() {
        let mut cluster = cluster();
        let (from, to) = (host_id("home2"), host_id("cloud1"));
        let rtt_ms = |cluster: &Cluster| cluster.link(&from, &to).unwrap().probe.rtt_ms;
        cluster.hosts[1].measured = Some(Arc::new(linked("home2", "home", 99.0, 7)));
        assert_close(rtt_ms(&cluster), 16.0);
        // Without a probe of its own it is as that of its kind, and not as that of its site.
        cluster.links.retain(|link| link.from != from && link.to != from);
        assert_close(rtt_ms(&cluster), 99.0);
        cluster.hosts[1].measured = None;
        assert_close(rtt_ms(&cluster), 16.0);
    }
}
