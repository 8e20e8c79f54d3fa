//! A cluster as a lab measures it: two hosts at site `home` and one at site `cloud`, 16 ms apart.

use std::num::NonZeroU64;
use std::sync::Arc;

use perigee_model::job::Start;
use perigee_model::money::Price;
use perigee_model::read_ahead::PROXY_GENERATION;
use perigee_model::vm::{Accelerator, LinkProbe};
use perigee_model::volume::{BlockProbe, IoStats};
use perigee_model::{HostId, SiteId, VolumeName};

use crate::facts::*;
use crate::runs::{PastRun, Traits, VolumeRun};
use crate::work::VolumeWork;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const LOCAL_US: u64 = 200;
pub(crate) const REMOTE_US: u64 = 16_400;
pub(crate) const WAN_BYTES_PER_S: u64 = 128 * MIB;

pub(crate) fn host_id(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

pub(crate) fn volume_name(name: &str) -> VolumeName {
    VolumeName::new(name).unwrap()
}

pub(crate) fn probe(latency_us: u64) -> BlockProbe {
    BlockProbe {
        latency_median_us: latency_us,
        latency_p95_us: latency_us * 2,
        rate_bytes_per_s: 100 * MIB,
    }
}

/// A boot of the image that all fixtures use.
pub(crate) fn booted_in(seconds: f64) -> Boot {
    Boot { image: "debian".to_owned(), seconds, cpu_s: 6.0 }
}

fn host(id: &str, site: &str) -> HostFacts {
    HostFacts {
        id: host_id(id),
        site: SiteId::new(site).unwrap(),
        cpus: 2,
        memory_free_bytes: 4096 * MIB,
        running_vcpus: 0,
        cpu_load: None,
        takes_jobs: true,
        packs: false,
        accelerator: Accelerator::Kvm,
        cpu_model: "EPYC".to_owned(),
        boots: vec![booted_in(12.0)].into(),
        local_blocks: Some(probe(LOCAL_US)),
        pool_free_bytes: None,
        price: None,
        measured: None,
    }
}

/// A machine at so many millionths of a dollar an hour; $0.09 for each GiB that leaves its site, and $0.73 for a month of a GiB.
pub(crate) fn price(per_hour_micros: u64) -> Arc<Price> {
    Arc::new(Price {
        per_hour_micros: NonZeroU64::new(per_hour_micros),
        minimum_s: 0,
        egress_per_gib_micros: NonZeroU64::new(90_000),
        disk_per_gib_month_micros: NonZeroU64::new(730_000),
        source: "test".to_owned(),
        as_of_unix_s: 0,
    })
}

fn site_of(host: &str) -> SiteId {
    SiteId::new(if host == "cloud1" { "cloud" } else { "home" }).unwrap()
}

fn link(from: &str, to: &str) -> LinkFacts {
    let wan = (from == "cloud1") != (to == "cloud1");
    let (rtt_ms, rate_bytes_per_s, latency_us) =
        if wan { (16.0, WAN_BYTES_PER_S, REMOTE_US) } else { (0.2, 1024 * MIB, 500) };
    let probe_of_link = LinkProbe { rtt_ms, rate_bytes_per_s };
    LinkFacts {
        from: host_id(from),
        to: host_id(to),
        from_site: site_of(from),
        to_site: site_of(to),
        probe: probe_of_link,
        blocks: Some(probe(latency_us)),
        moves: LinkForMoves { wait_s: Some(0.0), max_bytes_per_s: None },
    }
}

pub(crate) fn cluster() -> Cluster {
    let names = ["home1", "home2", "cloud1"];
    let pairs = names.iter().flat_map(|from| names.iter().map(move |to| (from, to)));
    Cluster {
        hosts: [host("home1", "home"), host("home2", "home"), host("cloud1", "cloud")]
            .into_iter()
            .collect(),
        links: pairs.filter(|(from, to)| from != to).map(|(from, to)| link(from, to)).collect(),
        probe_request_bytes: 8192,
        past_moves: Arc::default(),
    }
}

/// A job with 512 MiB of memory and its data in the cloud.
pub(crate) fn job() -> JobFacts {
    JobFacts {
        traits: traits(),
        memory_bytes: 512 * MIB,
        start: Start::Anywhere,
        may_migrate: true,
        uses_confined: false,
        volumes: vec![VolumeFacts {
            volume: volume_name("data"),
            home: host_id("cloud1"),
            allocated_bytes: 256 * MIB,
            only_read: true,
            copy: CopyFacts { bytes: 256 * MIB, ..stays() },
        }],
        dirty_bytes_per_s: Some(0),
        money: MoneyFacts::default(),
        gang: None,
    }
}

/// Of a volume whose home can't move.
fn stays() -> CopyFacts {
    CopyFacts { stays: Some("others read it".to_owned()), ..CopyFacts::default() }
}

pub(crate) fn traits() -> Traits {
    Traits {
        name: "job".to_owned(),
        cpus: 1,
        memory_bytes: 512 * MIB,
        image: "debian".to_owned(),
        inputs: "inputs".to_owned(),
        data_bytes: vec![256 * MIB],
    }
}

/// How much longer a block read takes from the cloud than in the cloud.
pub(crate) const ROUND_TRIP_S: f64 = (REMOTE_US - LOCAL_US) as f64 / 1e6;

/// The work of this many reads of 8 KiB, one at a time, measured at the volume's home.
pub(crate) fn work(reads: f64) -> VolumeWork {
    VolumeWork {
        reads,
        bytes: reads * 8192.0,
        home_latency_us: LOCAL_US as f64,
        ..VolumeWork::default()
    }
}

/// A run with 20 s of computing, 1 s of other time, and this many very small reads, one at a time, over this
/// round trip.
pub(crate) fn past_run(round_trip_s: f64, reads: f64) -> PastRun {
    let local_io_s = reads * LOCAL_US as f64 / 1e6;
    let network_s = reads * round_trip_s;
    let remote = round_trip_s > 0.0;
    PastRun {
        traits: traits(),
        host: host_id(if remote { "home1" } else { "cloud1" }),
        moved: false,
        boot_s: 12.0,
        wall_s: 21.0 + local_io_s + network_s,
        cpu_s: 20.0,
        run_delay_s: None,
        busy_s: local_io_s + network_s,
        local_io_s,
        network_s,
        volumes: vec![VolumeRun {
            requests: reads,
            reads: Some(reads),
            read_time_share: Some(1.0),
            bytes: 0.0,
            queue_depth: 1.0,
            remote_share: if remote { 1.0 } else { 0.0 },
            round_trip_s,
            rate_bytes_per_s: remote.then_some(WAN_BYTES_PER_S),
        }],
        replayed: None,
        distance_changed: false,
        proxy_generation: PROXY_GENERATION,
    }
}

/// Two runs at the data and two far from it.
pub(crate) fn history(reads: f64) -> Vec<PastRun> {
    [0.0, ROUND_TRIP_S, 0.0, ROUND_TRIP_S].map(|s| past_run(s, reads)).into()
}

/// The counters after `reads` reads of 8 KiB with `in_flight` at a time, for a VM at the volume's home or 16 ms
/// away.
pub(crate) fn disk(name: &str, home: &str, reads: u64, in_flight: u64, remote: bool) -> DiskFacts {
    let at = |latency_us: u64| IoStats {
        reads,
        read_bytes: reads * 8192,
        read_ns: reads * latency_us * 1000,
        busy_ns: reads * latency_us * 1000 / in_flight,
        ..IoStats::default()
    };
    let mut client = at(LOCAL_US);
    if remote {
        client = at(REMOTE_US);
        client.network_requests = reads;
        client.network_ns = client.read_ns;
        client.network_busy_ns = client.busy_ns;
        client.network_bytes = client.read_bytes;
    }
    let (volume, home, at_home) = (volume_name(name), host_id(home), at(LOCAL_US));
    let far_requests = if remote { reads } else { 0 };
    DiskFacts {
        volume,
        home,
        client,
        at_home,
        far_requests,
        copy: stays(),
        coming: None,
        outage_ns: 0,
    }
}

#[track_caller]
pub(crate) fn assert_close(measured: f64, expected: f64) {
    let limit = 1e-6 * expected.abs().max(1.0);
    assert!((measured - expected).abs() < limit, "{measured} is not {expected}");
}
