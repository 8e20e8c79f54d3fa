mod groups;
mod properties;
mod rented;

use super::*;
use crate::fixture::{MIB, host_id, volume_name};

fn room(id: &str, cpus: u32, memory_mib: u64) -> HostRoom {
    let total = Demand { cpus, memory_bytes: memory_mib * MIB };
    let site = SiteId::new("home").unwrap();
    HostRoom {
        id: host_id(id),
        site,
        total,
        free: total,
        persistent: Demand::default(),
        start_slots: u32::MAX,
    }
}

fn holder(tenant: &str, owner: &str) -> Holder {
    Holder { tenant: tenant.to_owned(), owner: owner.to_owned() }
}

/// A job of another tenant than `default`.
fn job_of(tenant: &str, number: u64, owner: &str) -> Waiting {
    let id = JobId::new(format!("{tenant}~j-{number:04}")).unwrap();
    Waiting { holder: Holder::of(&id, owner), job: id, ..job(number, owner, 1) }
}

fn job(number: u64, owner: &str, cpus: u32) -> Waiting {
    Waiting {
        job: JobId::new(format!("j-{number:04}")).unwrap(),
        holder: holder("default", owner),
        priority: 0,
        submitted: number,
        waited_ms: 0,
        demand: Demand { cpus, memory_bytes: u64::from(cpus) * 256 * MIB },
        quota_cpus: cpus,
        start: Start::Anywhere,
        count: 1,
        volumes: Vec::new(),
        avoid: BTreeSet::new(),
        groups: Default::default(),
        lost_at: Vec::new(),
        blocked: None,
    }
}

fn first(_: &Waiting, hosts: &[HostId]) -> Result<HostId, NotChosen> {
    Ok(hosts[0].clone())
}

fn at_site(name: &str, room: HostRoom) -> HostRoom {
    HostRoom { site: SiteId::new(name).unwrap(), ..room }
}

/// With a VM without a job.
fn persistent(cpus: u32, room: HostRoom) -> HostRoom {
    let taken = Demand { cpus, memory_bytes: u64::from(cpus) * 256 * MIB };
    let (mut free, mut persistent) = (room.free, room.persistent);
    free.take(taken);
    persistent.add(taken);
    HostRoom { free, persistent, ..room }
}

fn gang(number: u64, count: u32, cpus: u32) -> Waiting {
    Waiting { count, ..job(number, "ann", cpus) }
}

fn hosts_of(turns: &[(JobId, Turn)], number: u64) -> Vec<&str> {
    let id = format!("j-{number:04}");
    match &turns.iter().find(|(job, _)| job.as_str() == id).unwrap().1 {
        Turn::StartAll(hosts) => hosts.iter().map(HostId::as_str).collect(),
        Turn::Start(host) => vec![host.as_str()],
        Turn::Wait { .. } => Vec::new(),
    }
}

#[test]
fn a_gang_is_not_torn_apart_where_a_site_is_large_enough() {
    let free = |cpus: u32| Demand { cpus, memory_bytes: u64::from(cpus) * 256 * MIB };
    let hosts = vec![
        HostRoom { free: free(1), ..room("h1", 2, 2048) },
        room("h2", 2, 2048),
        at_site("cloud", room("c1", 1, 2048)),
    ];
    let queue = Queue { hosts, waiting: vec![gang(1, 4, 1), gang(2, 3, 1)], ..Queue::default() };
    let turns = schedule(&queue, first);
    assert_eq!(hosts_of(&turns, 1), [""; 0], "home could hold it, and does not now");
    let why = reason(&turns, "j-0001");
    assert!(
        why.contains("4 VMs with 1 CPU") && why.contains("3 have room now at site home"),
        "{why}"
    );
    assert!(why.contains("reserved for it: h2, h1"), "{why}");
    assert!(reason(&turns, "j-0002").contains("reserved for job j-0001"));
    let queue = Queue { waiting: vec![gang(2, 3, 1)], ..queue };
    assert_eq!(hosts_of(&schedule(&queue, first), 2), ["h1", "h2", "h2"]);
    let queue = Queue { waiting: vec![gang(3, 5, 1)], ..queue };
    let why = "it needs 5 VMs with 1 CPU and 256 MiB of memory each, all at once; 4 have room now";
    assert!(reason(&schedule(&queue, first), "j-0003").starts_with(why), "no site is large enough");
    let queue = Queue { waiting: vec![gang(4, 6, 1)], ..queue };
    let turns = schedule(&queue, first);
    assert!(
        reason(&turns, "j-0004").ends_with("room for 5 at most"),
        "{}",
        reason(&turns, "j-0004")
    );
}

#[test]
fn nothing_is_reserved_for_what_vms_without_a_job_keep() {
    let small = job(2, "ann", 1);
    for large in [gang(1, 4, 1), job(1, "ann", 2)] {
        let hosts = ["h1", "h2"].map(|id| persistent(1, room(id, 2, 512)));
        let waiting = vec![large.clone(), small.clone()];
        let turns = schedule(&Queue { hosts: hosts.into(), waiting, ..Queue::default() }, first);
        assert_eq!(hosts_of(&turns, 2), ["h1"], "{}", reason(&turns, "j-0001"));
        let why = reason(&turns, "j-0001");
        assert!(why.contains("VMs without a job") && !why.contains("reserved"), "{why}");
    }
}

#[test]
fn a_gang_reserves_no_host_that_a_vm_without_a_job_makes_too_small() {
    let busy = |id: &str| HostRoom { free: Demand::default(), ..room(id, 2, 512) };
    let hosts = vec![persistent(1, busy("h1")), busy("h2"), busy("h3")];
    let queue = Queue { hosts, waiting: vec![gang(1, 2, 2)], ..Queue::default() };
    let turns = schedule(&queue, first);
    assert!(reason(&turns, "j-0001").ends_with("reserved for it: h2, h3"), "{turns:?}");
    // Beside the same VM there is room for smaller ones.
    let queue = Queue { waiting: vec![gang(1, 5, 1)], ..queue };
    let turns = schedule(&queue, first);
    assert!(reason(&turns, "j-0001").ends_with("reserved for it: h1, h2, h3"), "{turns:?}");
}

#[test]
fn a_gang_that_waits_for_hosts_to_start_jobs_keeps_those_that_are_free() {
    let busy = HostRoom { start_slots: 0, ..room("h3", 1, 256) };
    let hosts = vec![room("h1", 1, 256), room("h2", 1, 256), busy];
    let waiting = vec![gang(1, 3, 1), job(2, "ann", 1)];
    let turns = schedule(&Queue { hosts, waiting, ..Queue::default() }, first);
    assert_eq!(hosts_of(&turns, 2), [""; 0], "it is kept");
    let why = reason(&turns, "j-0001");
    assert!(why.contains("as many jobs as they may") && why.contains("reserved for it"), "{why}");
}

#[test]
fn a_gang_reserves_the_hosts_beside_one_that_is_reserved_for_another_job() {
    let busy = |id: &str| HostRoom { free: Demand::default(), ..room(id, 2, 512) };
    let pinned = Waiting { start: Start::Host(host_id("h2")), ..job(1, "ann", 1) };
    let hosts = vec![busy("h1"), busy("h2"), busy("h3")];
    let queue = Queue { hosts, waiting: vec![pinned, gang(2, 4, 1)], ..Queue::default() };
    let turns = schedule(&queue, first);
    assert!(reason(&turns, "j-0002").ends_with("reserved for it: h1, h3"), "{turns:?}");
    let queue = Queue { waiting: vec![queue.waiting[0].clone(), gang(2, 5, 1)], ..queue };
    let turns = schedule(&queue, first);
    let why = reason(&turns, "j-0002");
    assert!(why.ends_with("and hosts there are reserved for job j-0001"), "{why}");
}

#[test]
fn a_quota_counts_all_vms_of_a_gang() {
    let quota = Quota { vms: Some(3), ..Quota::default() };
    let used = Running { vms: 1, ..Running::default() };
    let quotas = [("default".to_owned(), QuotaUse { quota, used, ..QuotaUse::default() })];
    let queue =
        Queue { hosts: vec![room("h1", 8, 8192)], quotas: quotas.into(), ..Queue::default() };
    for (count, starts) in [(3, 0), (2, 2)] {
        let queue = Queue { waiting: vec![gang(1, count, 1)], ..queue.clone() };
        assert_eq!(hosts_of(&schedule(&queue, first), 1).len(), starts);
    }
}

#[test]
fn a_gang_that_is_refused_takes_nothing() {
    let queue = Queue {
        hosts: vec![room("h1", 4, 4096)],
        waiting: vec![gang(1, 3, 1), job(2, "ann", 4)],
        ..Queue::default()
    };
    let mut asked = 0;
    let turns = schedule(&queue, |waiting: &Waiting, hosts: &[HostId]| {
        asked += 1;
        if waiting.count > 1 && asked == 3 {
            Err(NotChosen::Refused("not now".to_owned()))
        } else {
            first(waiting, hosts)
        }
    });
    assert_eq!((hosts_of(&turns, 1).len(), hosts_of(&turns, 2)), (0, vec!["h1"]));
}

#[test]
fn room_is_kept_for_a_job_while_what_its_plan_needs_is_read() {
    for large in [job(1, "ann", 3), gang(1, 3, 1)] {
        let queue = Queue {
            hosts: vec![room("h1", 4, 4096)],
            waiting: vec![using(Access::Write, large), job(2, "ann", 2)],
            quotas: vcpus(4, 0, 0),
            ..Queue::default()
        };
        let start_unless = |not_chosen: &NotChosen| {
            let turns =
                schedule(&queue, |waiting: &Waiting, hosts: &[HostId]| match waiting.submitted {
                    1 => Err(not_chosen.clone()),
                    _ => first(waiting, hosts),
                });
            assert_eq!(reason(&turns, "j-0001"), "why");
            hosts_of(&turns, 2).len()
        };
        assert_eq!(start_unless(&NotChosen::NotYet("why".to_owned())), 0);
        assert_eq!(start_unless(&NotChosen::Refused("why".to_owned())), 1);
    }
}

fn started(turns: &[(JobId, Turn)]) -> Vec<&str> {
    let starts = turns.iter().filter(|(_, turn)| matches!(turn, Turn::Start(_)));
    starts.map(|(job, _)| job.as_str()).collect()
}

fn reason<'a>(turns: &'a [(JobId, Turn)], job: &str) -> &'a str {
    let (_, turn) = turns.iter().find(|(id, _)| id.as_str() == job).unwrap();
    match turn {
        Turn::Wait { reason, .. } => reason,
        Turn::Start(host) => panic!("{job} starts at {host}"),
        Turn::StartAll(hosts) => panic!("{job} starts at {hosts:?}"),
    }
}

#[test]
fn a_higher_priority_starts_first() {
    let mut urgent = job(2, "ann", 1);
    urgent.priority = 1;
    let queue = Queue {
        hosts: vec![room("h1", 1, 1024)],
        waiting: vec![job(1, "ann", 1), urgent],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0002"]);
    assert_eq!(
        reason(&turns, "j-0001"),
        "it needs 1 CPU and 256 MiB of memory; the most that is free is 0 CPUs and 768 MiB of \
         memory at h1, which is reserved for it"
    );
}

#[test]
fn a_wait_is_worth_priority_but_no_share_of_another_owner() {
    let old = |mut job: Waiting| {
        job.waited_ms = 2 * AGEING_STEP_MS;
        job
    };
    let mut urgent = job(3, "cid", 1);
    urgent.priority = 1;
    let queue = Queue {
        hosts: vec![room("h1", 2, 2048)],
        waiting: vec![old(job(1, "ann", 1)), old(job(2, "ann", 1)), urgent, job(4, "bob", 1)],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0001", "j-0003"], "bob comes before ann's second");
    assert!(reason(&turns, "j-0002").ends_with("raised its priority from 0 to 2"));
}

#[test]
fn the_owner_with_the_smallest_share_comes_next() {
    let many = (1..=10).map(|number| job(number, "ann", 1));
    let queue = Queue {
        hosts: vec![room("h1", 4, 4096)],
        waiting: many.chain([job(11, "bob", 1), job(12, "bob", 1)]).collect(),
        held: [(holder("default", "bob"), Demand::default())].into(),
        ..Queue::default()
    };
    assert_eq!(started(&schedule(&queue, first)), ["j-0001", "j-0011", "j-0002", "j-0012"]);
}

#[test]
fn a_tenant_with_many_users_gets_no_more_than_one_with_a_single_user() {
    let crowd =
        (1..=9).map(|number| job_of("acme", number, if number % 2 == 0 { "ann" } else { "bob" }));
    let queue = Queue {
        hosts: vec![room("h1", 4, 4096)],
        waiting: crowd.chain([job_of("blue", 11, "dan"), job_of("blue", 12, "dan")]).collect(),
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["acme~j-0001", "blue~j-0011", "acme~j-0002", "blue~j-0012"]);
}

#[test]
fn a_priority_overtakes_no_other_tenant_s_job() {
    let urgent = |number| Waiting { priority: 100, ..job_of("acme", number, "ann") };
    let queue = Queue {
        hosts: vec![room("h1", 4, 4096)],
        waiting: vec![
            job_of("blue", 1, "dan"),
            job_of("blue", 2, "dan"),
            urgent(3),
            urgent(4),
            urgent(5),
        ],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["blue~j-0001", "acme~j-0003", "blue~j-0002", "acme~j-0004"]);
}

#[test]
fn a_job_waits_for_its_tenant_s_quota_and_keeps_no_host_meanwhile() {
    let quota = Quota { vms: Some(2), ..Quota::default() };
    let used = Running { vms: 1, ..Running::default() };
    let queue = Queue {
        hosts: vec![room("h1", 8, 8192)],
        waiting: vec![job_of("acme", 1, "ann"), job_of("acme", 2, "ann"), job_of("blue", 3, "dan")],
        quotas: [("acme".to_owned(), QuotaUse { quota, used, ..QuotaUse::default() })].into(),
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["acme~j-0001", "blue~j-0003"]);
    let why = "it needs 1 of the tenant's 2 VMs, and 2 are in use; the rest of the quota is reserved for it";
    assert_eq!(reason(&turns, "acme~j-0002"), why);
}

/// Of so many vCPUs, of which some are in use, and some of these by VMs without a job.
fn vcpus(limit: u32, used: u32, persistent: u32) -> BTreeMap<String, QuotaUse> {
    let running = |cpus| Running { cpus, ..Running::default() };
    let quota = Quota { cpus: Some(limit), ..Quota::default() };
    let (used, persistent) = (running(used), running(persistent));
    let of = QuotaUse { quota, used, persistent, ..QuotaUse::default() };
    [("default".to_owned(), of)].into()
}

#[test]
fn what_is_left_of_a_quota_is_reserved_for_the_first_job_that_needs_more() {
    let blocked = Waiting { blocked: Some("no network".to_owned()), ..job(1, "ann", 8) };
    let nowhere = job(2, "ann", 7);
    let waiting = vec![blocked, nowhere, job(3, "ann", 6), job(4, "ann", 1), job(5, "ann", 6)];
    let other = job_of("blue", 6, "dan");
    let queue = Queue {
        hosts: vec![room("h1", 6, 8192), room("h2", 6, 8192)],
        waiting: waiting.into_iter().chain([other]).collect(),
        quotas: vcpus(8, 4, 0),
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["blue~j-0006"]);
    let lacks = |cpus: u32| format!("it needs {cpus} of the tenant's 8 vCPUs, and 4 are in use");
    assert_eq!(reason(&turns, "j-0002"), lacks(7), "no host is so large");
    let kept = format!("{}; the rest of the quota is reserved for it", lacks(6));
    assert_eq!(reason(&turns, "j-0003"), kept);
    let why = "the rest of the tenant's quota is reserved for job j-0003";
    assert_eq!(reason(&turns, "j-0004"), why);
    assert_eq!(reason(&turns, "j-0005"), lacks(6));
}

#[test]
fn no_quota_is_reserved_for_what_vms_without_a_job_have() {
    let queue = Queue {
        hosts: vec![room("h1", 8, 8192)],
        waiting: vec![job(1, "ann", 6), job(2, "ann", 1)],
        quotas: vcpus(8, 4, 3),
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0002"]);
    let why = "it needs 6 of the tenant's 8 vCPUs, and 4 are in use; VMs without a job leave less than it needs";
    assert_eq!(reason(&turns, "j-0001"), why);
}

/// Else small jobs at the other host would have the quota when its host has room.
#[test]
fn a_job_for_which_a_host_is_kept_keeps_its_part_of_the_quota() {
    let free = Demand { cpus: 2, memory_bytes: 512 * MIB };
    let queue = Queue {
        hosts: vec![HostRoom { free, ..room("h1", 4, 1024) }, room("h2", 3, 768)],
        waiting: vec![job(1, "ann", 4), job(2, "ann", 2), job(3, "ann", 1)],
        quotas: vcpus(5, 0, 0),
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0003"], "{turns:?}");
    let why = "the rest of the tenant's quota is reserved for job j-0001";
    assert_eq!(reason(&turns, "j-0002"), why);
}

#[test]
fn a_job_s_reason_to_wait_names_no_job_of_another_tenant() {
    let mut large = job_of("acme", 1, "ann");
    large.demand.cpus = 4;
    let mut host = room("h1", 4, 4096);
    host.free.cpus = 2;
    let queue = Queue {
        hosts: vec![host],
        waiting: vec![large, job_of("acme", 2, "ann"), job_of("blue", 3, "dan")],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    let (own, other) = (reason(&turns, "acme~j-0002"), reason(&turns, "blue~j-0003"));
    assert_eq!(own, "the hosts with room are reserved for job acme~j-0001");
    assert_eq!(other, "the hosts with room are reserved for another job");
}

#[test]
fn a_host_is_kept_for_the_large_job_and_the_others_stay_open() {
    let mut full = room("h1", 4, 4096);
    full.free = Demand { cpus: 2, memory_bytes: 1024 * MIB };
    let mut other = room("h2", 4, 4096);
    other.free = Demand { cpus: 1, memory_bytes: 1024 * MIB };
    let queue = Queue {
        hosts: vec![full, other],
        waiting: vec![job(1, "ann", 4), job(2, "ann", 1), job(3, "ann", 1)],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(turns[1].1, Turn::Start(host_id("h2")));
    assert!(reason(&turns, "j-0001").ends_with("at h1, which is reserved for it"));
    assert_eq!(reason(&turns, "j-0003"), "the hosts with room are reserved for job j-0001");
}

#[test]
fn a_bound_on_starts_makes_jobs_wait_and_keeps_no_host() {
    let mut host = room("h1", 8, 8192);
    host.start_slots = 1;
    let queue = Queue {
        hosts: vec![host],
        waiting: vec![job(1, "ann", 1), job(2, "ann", 1)],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0001"]);
    assert!(reason(&turns, "j-0002").contains("as many jobs as it may"));
}

#[test]
fn a_job_that_fits_nowhere_says_so_and_holds_nobody_up() {
    let queue = Queue {
        hosts: vec![room("h1", 2, 8192)],
        waiting: vec![job(1, "ann", 9), job(2, "ann", 1)],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0002"]);
    assert!(reason(&turns, "j-0001").contains("the largest host is h1 with 2 CPUs"));
}

fn using(access: Access, job: Waiting) -> Waiting {
    let volume =
        JobVolume { volume: volume_name("data"), mount: "/data".into(), access, ranks: Vec::new() };
    Waiting { volumes: vec![volume], ..job }
}

/// Else the readers at the other host would have the volume when its own host has room.
#[test]
fn readers_do_not_start_while_a_host_is_kept_for_a_writer_of_their_volume() {
    let free = |cpus: u32| Demand { cpus, memory_bytes: u64::from(cpus) * 256 * MIB };
    let hosts = vec![
        HostRoom { free: free(2), ..room("h1", 4, 4096) },
        HostRoom { free: free(1), ..room("h2", 4, 4096) },
    ];
    let writer = using(Access::Write, job(1, "ann", 4));
    let reader = using(Access::Read, job(2, "ann", 1));
    let queue =
        Queue { hosts, waiting: vec![writer, reader, job(3, "ann", 1)], ..Queue::default() };
    let turns = schedule(&queue, first);
    assert_eq!(reason(&turns, "j-0002"), "volume data is in use by job j-0001");
    assert_eq!(started(&turns), ["j-0003"]);
}

#[test]
fn readers_do_not_starve_a_writer_of_their_volume() {
    let using = |number, access| using(access, job(number, "ann", 1));
    let queue = Queue {
        hosts: vec![room("h1", 8, 8192)],
        waiting: vec![using(1, Access::Write), using(2, Access::Read), using(3, Access::Clone)],
        uses: vec![VolumeUse {
            volume: volume_name("data"),
            job: JobId::new("reader-0001").unwrap(),
            writes: false,
        }],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    assert_eq!(started(&turns), ["j-0003"]);
    assert_eq!(reason(&turns, "j-0001"), "volume data is in use by job reader-0001");
    assert_eq!(reason(&turns, "j-0002"), "volume data is in use by job j-0001");
}

#[test]
fn a_job_that_only_a_drained_host_could_take_says_so_and_others_wait_as_ever() {
    let pinned = Waiting { start: Start::Host(host_id("h2")), ..job(1, "ann", 1) };
    let large = job(2, "ann", 8);
    let queue = Queue {
        hosts: vec![room("h1", 2, 1024)],
        drained: vec![room("h2", 8, 4096)],
        waiting: vec![pinned, large, job(3, "ann", 2), job(4, "ann", 2), gang(5, 4, 2)],
        ..Queue::default()
    };
    let turns = schedule(&queue, first);
    let why = "host h2 is drained: perigee host undrain h2";
    assert_eq!(reason(&turns, "j-0001"), why);
    assert_eq!(reason(&turns, "j-0002"), why, "it is too large for the other one");
    assert_eq!(hosts_of(&turns, 3), ["h1"]);
    let waits = reason(&turns, "j-0004");
    assert!(!waits.contains("drained"), "it starts at h1 when that has room: {waits}");
    let gang = reason(&turns, "j-0005");
    assert!(gang.ends_with(why) && gang.starts_with("it needs 4 VMs"), "{gang}");
}
