//! In a large cluster a close look is taken at some hosts only. The plan is that of a close look at each.

use std::sync::Arc;

use perigee_model::SiteId;
use perigee_model::job::Start;
use perigee_model::load::VcpuUse;
use perigee_model::money::Money;
use perigee_model::vm::{Accelerator, LinkProbe};
use proptest::prelude::*;

use super::*;
use crate::facts::{Boot, Cluster, CopyFacts, CpuLoad, HostFacts, LinkFacts, MoneyFacts};
use crate::fixture::*;

const SITES: usize = 3;

/// By so much longer may the plan be predicted to take, if the best of all plans moves the job or its data.
const MISSES_MOST: f64 = 0.1;

/// A host among many: some figures are the same at several of them.
fn host() -> impl Strategy<Value = HostFacts> {
    let one_of_ten = || prop::bool::weighted(0.1);
    let kind = (0..SITES, one_of_ten(), prop::sample::select(vec![2_u32, 8]), one_of_ten());
    let boot_s = prop_oneof![Just(10.0), Just(12.0), 1.0..60.0_f64];
    let boot = (0..2_usize, boot_s, prop_oneof![Just(5.0), 0.0..20.0_f64]);
    let boot = boot.prop_map(|(image, seconds, cpu_s)| {
        let image = ["debian", "other"][image].to_owned();
        Boot { image, seconds, cpu_s }
    });
    let wanted = (0.0..4.0_f64, prop_oneof![Just(0.0), 0.0..4.0_f64]);
    let load = wanted.prop_map(|(running_vcpus, waiting_vcpus)| CpuLoad {
        measured_vcpus: 4,
        vcpus_1m: VcpuUse { running_vcpus, waiting_vcpus },
        pressure_share: None,
    });
    let room = (
        prop_oneof![Just(4096 * MIB), 0..8192 * MIB],
        prop_oneof![Just(0), 0..9_u32],
        prop::option::of(prop_oneof![Just(1024 * MIB), 0..512 * MIB]),
        (prop::bool::weighted(0.8), prop::option::weighted(0.3, 0..2_usize)),
    );
    // An entry of a site is for that site only.
    let prices: Vec<_> = (0..2 * SITES as u64).map(|n| price(85_000 * (n + 1))).collect();
    (kind, prop::collection::vec(boot, 0..5), prop::option::of(load), room).prop_map(
        move |((site, is_xeon, cpus, is_tcg), boots, cpu_load, room)| HostFacts {
            id: host_id("named-later"),
            site: SiteId::new(format!("s{site}")).unwrap(),
            cpus,
            memory_free_bytes: room.0,
            running_vcpus: room.1,
            cpu_load,
            takes_jobs: room.3.0,
            packs: false,
            accelerator: if is_tcg { Accelerator::Tcg } else { Accelerator::Kvm },
            cpu_model: if is_xeon { "Xeon" } else { "EPYC" }.to_owned(),
            boots: boots.into(),
            local_blocks: None,
            pool_free_bytes: room.2,
            price: room.3.1.map(|which| Arc::clone(&prices[2 * site + which])),
            measured: None,
        },
    )
}

prop_compose! {
    /// Hosts at some sites, one link for each two sites, and some links of single hosts.
    fn cluster_of_many()(
        mut hosts in prop::collection::vec(host(), 3..32),
        rtts_ms in prop::collection::vec(prop_oneof![Just(0.2), Just(16.0), 0.0..50.0_f64], SITES * SITES),
        apart in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0.0..50.0_f64), 0..4),
        missing in prop::option::weighted(0.1, 0..SITES * SITES),
    ) -> Cluster {
        for (number, host) in hosts.iter_mut().enumerate() {
            host.id = host_id(&format!("h{number:02}"));
        }
        let link = |from: &HostFacts, to: &HostFacts, rtt_ms| LinkFacts {
            from: from.id.clone(),
            to: to.id.clone(),
            from_site: from.site.clone(),
            to_site: to.site.clone(),
            probe: LinkProbe { rtt_ms, rate_bytes_per_s: WAN_BYTES_PER_S },
            blocks: None,
            moves: Default::default(),
        };
        let at = |site: usize| hosts.iter().filter(move |host| host.site.as_str() == format!("s{site}"));
        let mut links = Vec::new();
        for (number, rtt_ms) in rtts_ms.iter().enumerate().filter(|(number, _)| Some(*number) != missing) {
            let (from, to) = (number / SITES, number % SITES);
            let from_host = at(from).next();
            let to_host = at(to).find(|host| from_host.is_none_or(|from| from.id != host.id));
            links.extend(from_host.zip(to_host).map(|(from, to)| link(from, to, *rtt_ms)));
        }
        for (from, to, rtt_ms) in &apart {
            let (from, to) = (from.get(&hosts), to.get(&hosts));
            if from.id != to.id {
                links.push(link(from, to, *rtt_ms));
            }
        }
        Cluster { hosts: hosts.into(), links: links.into(), probe_request_bytes: 8192, past_moves: Arc::default() }
    }
}

prop_compose! {
    fn snapshot_of_many()(
        cluster in cluster_of_many(),
        (home, replica) in (any::<prop::sample::Index>(), prop::option::of(any::<prop::sample::Index>())),
        bytes in prop_oneof![Just(32 * MIB), 0..2048 * MIB],
        reads in prop_oneof![Just(0.0), 0.0..5000.0_f64],
        runs in 0..3_usize,
        start in prop_oneof![4 => Just(None), 1 => (0..SITES).prop_map(Some)],
        (may_migrate, stays, dirty) in (prop::bool::weighted(0.8), any::<bool>(), prop::option::of(0..64 * MIB)),
    ) -> Snapshot {
        let mut job = job();
        let volume = &mut job.volumes[0];
        volume.home = home.get(&cluster.hosts).id.clone();
        volume.allocated_bytes = bytes;
        let lacking = replica.map(|at| (at.get(&cluster.hosts).id.clone(), bytes / 4));
        let stays = stays.then(|| "others read it".to_owned());
        volume.copy = CopyFacts { bytes, lacking: lacking.into_iter().collect(), stays, ..CopyFacts::default() };
        if let Some(site) = start {
            job.start = Start::Site(SiteId::new(format!("s{site}")).unwrap());
        }
        (job.may_migrate, job.dirty_bytes_per_s) = (may_migrate, dirty);
        Snapshot { cluster, job, history: history(reads).split_off(4 - 2 * runs.min(2)), others: Vec::new() }
    }
}

proptest! {
    #[test]
    fn the_plan_is_that_of_a_close_look_at_each_host(snapshot in snapshot_of_many()) {
        let each = plan_looking_at(&snapshot, usize::MAX);
        let some = plan_looking_at(&snapshot, 0);
        let (each, some) = match (each, some) {
            (Ok(each), Ok(some)) => (each, some),
            (each, some) => {
                prop_assert_eq!(each.err(), some.err());
                return Ok(());
            }
        };
        for way in [Way::Beside, Way::Replica, Way::Remote] {
            let of = |plan: &Plan| {
                let option = plan.options.iter().find(|option| option.way == way)?;
                let cost = option.cost.as_ref().map(|cost| cost.total);
                Some((option.start.clone(), option.predicted, option.total, cost))
            };
            prop_assert_eq!(of(&each), of(&some));
        }
        let (each, some) = (&each.options[0], &some.options[0]);
        let moves = |option: &PlanOption| matches!(option.way, Way::Migrate | Way::Copy | Way::Follow);
        prop_assert!(each.way == some.way || moves(each), "{:?} is not {:?}", each, some);
        // Of moves the exception holds that `alike.rs` names; and where several starts of a move end equally soon, any of them may be named.
        let may_miss = if moves(each) { MISSES_MOST } else { 1e-9 };
        let longer_s = some.total.expected_s - each.total.expected_s;
        let is_near = (-1e-9 * each.total.expected_s..=may_miss * each.total.expected_s).contains(&longer_s);
        prop_assert!(is_near, "{:?} is not {:?}", each, some);
    }
}

proptest! {
    /// A job that stays where it starts, so that nothing is only almost the best.
    #[test]
    fn the_cheapest_of_a_close_look_at_each_host_is_found(mut snapshot in snapshot_of_many(), waiting_micros in 0..2_000_000_u64) {
        snapshot.job.may_migrate = false;
        let waiting_per_hour = Some(Money::from_micros(waiting_micros));
        snapshot.job.money = MoneyFacts { waiting_per_hour, disk_bytes: Some(1 << 30), ..MoneyFacts::default() };
        let each = plan_looking_at(&snapshot, usize::MAX);
        let some = plan_looking_at(&snapshot, 0);
        if let (Ok(each), Ok(some)) = (each, some) {
            let chosen = |plan: &Plan| {
                let option = plan.chosen()?;
                Some((option.cost.as_ref().map(|cost| cost.total), option.total))
            };
            prop_assert_eq!(chosen(&each), chosen(&some));
        }
    }
}

#[test]
fn what_is_changed_in_a_list_is_found_as_it_is_then() {
    let mut cluster = cluster();
    let (home1, cloud1) = (host_id("home1"), host_id("cloud1"));
    assert!(cluster.link(&home1, &cloud1).is_ok());
    cluster.links.clear();
    assert!(cluster.link(&home1, &cloud1).is_err());
    cluster.hosts.remove(0);
    assert!(cluster.host(&home1).is_err());
    assert_eq!(cluster.host(&cloud1).map(|host| &host.id), Ok(&cloud1));
}

/// As many hosts as nobody looks at closely one by one.
#[test]
fn of_many_equal_hosts_the_least_busy_is_taken() {
    let mut cluster = cluster();
    let home = cluster.hosts[0].clone();
    for number in 0..100 {
        let id = host_id(&format!("home{}", 100 + number));
        cluster.hosts.push(HostFacts { id, running_vcpus: 1, ..home.clone() });
    }
    cluster.hosts[70].running_vcpus = 0;
    cluster.hosts[0].running_vcpus = 1;
    cluster.hosts[1].running_vcpus = 1;
    let least_busy = cluster.hosts[70].id.clone();
    let mut job = job();
    job.start = Start::Site(SiteId::new("home").unwrap());
    let snapshot = Snapshot { cluster, job, history: history(10.0), others: Vec::new() };
    assert_eq!(plan(&snapshot).unwrap().options[0].start, least_busy);
}
