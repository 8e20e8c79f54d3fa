//! What holds for any hosts and jobs, and while jobs arrive without end.

use proptest::prelude::*;

use super::*;

fn hosts() -> impl Strategy<Value = Vec<HostRoom>> {
    proptest::collection::vec((1u32..8, 1u64..8, 0u32..4), 1..6).prop_map(|sizes| {
        let sizes = sizes.into_iter().enumerate();
        let rooms = sizes.map(|(index, (cpus, gib, start_slots))| HostRoom {
            start_slots,
            ..room(&format!("h{index}"), cpus, gib * 1024)
        });
        rooms.collect()
    })
}

fn jobs() -> impl Strategy<Value = Vec<Waiting>> {
    let count = prop_oneof![3 => Just(1u32), 1 => 2u32..6];
    let one = (0usize..3, 1u32..5, 1u64..16, -1i32..2, count);
    proptest::collection::vec(one, 0..40).prop_map(|jobs| {
        let jobs = jobs.into_iter().zip(1u64..);
        let jobs = jobs.map(|((owner, cpus, quarters, priority, count), number)| Waiting {
            priority,
            count,
            demand: Demand { cpus, memory_bytes: quarters * 256 * MIB },
            ..job(number, ["ann", "bob", "cid"][owner], cpus)
        });
        jobs.collect()
    })
}

/// Jobs of several tenants and owners, some of which have waited for long.
fn jobs_of_tenants() -> impl Strategy<Value = Vec<Waiting>> {
    let one = (0usize..3, 0usize..3, 1u32..5, -1i32..2, 0u64..4);
    proptest::collection::vec(one, 0..40).prop_map(|jobs| {
        let jobs = jobs.into_iter().zip(1u64..);
        let jobs = jobs.map(|((tenant, owner, cpus, priority, steps), number)| {
            let of = job_of(["acme", "beta", "corp"][tenant], number, ["ann", "bob", "cid"][owner]);
            let demand = Demand { cpus, ..of.demand };
            Waiting { priority, demand, waited_ms: steps * AGEING_STEP_MS, ..of }
        });
        jobs.collect()
    })
}

/// The job that comes next of all that wait, when each one is looked at.
fn next_of<'a>(
    left: &[&'a Waiting],
    held: &BTreeMap<Holder, Demand>,
    total: Demand,
) -> &'a Waiting {
    let share = |is_of: &dyn Fn(&Holder) -> bool| {
        let mut sum = Demand::default();
        held.iter().filter(|(holder, _)| is_of(holder)).for_each(|(_, demand)| sum.add(*demand));
        let of = |part: u64, whole: u64| part * 1_000_000 / whole.max(1);
        of(sum.cpus.into(), total.cpus.into()).max(of(sum.memory_bytes, total.memory_bytes))
    };
    let in_tenant = |one: &Waiting| (share(&|holder| *holder == one.holder), one.submitted);
    let mut tenants: BTreeMap<&str, BTreeMap<Reverse<i32>, &'a Waiting>> = BTreeMap::new();
    for one in left.iter().copied() {
        let firsts = tenants.entry(&one.holder.tenant).or_default();
        let first = firsts.entry(Reverse(one.priority)).or_insert(one);
        if in_tenant(one) < in_tenant(first) {
            *first = one;
        }
    }
    let firsts = tenants.values().filter_map(|firsts| {
        firsts.values().copied().min_by_key(|first| Reverse(first.aged_priority()))
    });
    let of_tenant = |one: &&Waiting| {
        let tenant = &one.holder.tenant;
        (share(&|holder| holder.tenant == *tenant), one.submitted)
    };
    firsts.min_by_key(of_tenant).unwrap()
}

/// A simulated cluster: every job runs for its number of steps, and the queue is decided at each step.
#[derive(Default)]
struct Run {
    hosts: Vec<HostRoom>,
    /// The host, the owner, the demand, and the step at which the job ends.
    running: Vec<(HostId, Holder, Demand, u64)>,
    /// The hosts that boot a VM in this step and the next one, as their slots allow.
    booting: Vec<(HostId, u64)>,
    /// Of the tenant `default`.
    quota: Option<Quota>,
}

impl Run {
    /// Starts jobs for this step and returns them.
    fn step(&mut self, now: u64, waiting: &mut Vec<Waiting>, steps: u64) -> Vec<Waiting> {
        self.running.retain(|(.., end)| *end > now);
        self.booting.retain(|(_, until)| *until > now);
        let mut queue = Queue { hosts: self.hosts.clone(), ..Queue::default() };
        for (host, _) in &self.booting {
            let host = queue.hosts.iter_mut().find(|h| h.id == *host).unwrap();
            host.start_slots = host.start_slots.saturating_sub(1);
        }
        for (host, owner, demand, _) in &self.running {
            queue.hosts.iter_mut().find(|h| h.id == *host).unwrap().free.take(*demand);
            queue.held.entry(owner.clone()).or_default().add(*demand);
        }
        if let Some(quota) = self.quota {
            let of = QuotaUse { quota, used: self.used(), ..QuotaUse::default() };
            queue.quotas.insert("default".to_owned(), of);
        }
        queue.waiting = std::mem::take(waiting);
        let turns: BTreeMap<JobId, Turn> = schedule(&queue, first).into_iter().collect();
        let mut starts = Vec::new();
        for job in queue.waiting {
            match &turns[&job.job] {
                Turn::Start(host) => {
                    let of = (host.clone(), job.holder.clone(), job.demand, now + steps);
                    self.running.push(of);
                    self.booting.push((host.clone(), now + 2));
                    starts.push(job);
                }
                Turn::StartAll(hosts) => {
                    assert_eq!(hosts.len(), job.count as usize, "all or none");
                    for host in hosts {
                        let of = (host.clone(), job.holder.clone(), job.demand, now + steps);
                        self.running.push(of);
                        self.booting.push((host.clone(), now + 2));
                    }
                    starts.push(job);
                }
                Turn::Wait { .. } => waiting.push(job),
            }
        }
        let over = self.quota.and_then(|quota| quota.lacks(self.used(), Running::default()));
        assert_eq!(over, None, "a quota holds");
        starts
    }

    /// What the jobs of the tenant `default` have.
    fn used(&self) -> Running {
        let mut used = Running::default();
        let own = self.running.iter().filter(|(_, holder, ..)| holder.tenant == "default");
        own.for_each(|(_, _, demand, _)| used.add(demand.running()));
        used
    }
}

/// Small jobs arrive in each step. In the 20th the large one does, behind eight of them at most.
fn arrive(
    waiting: &mut Vec<Waiting>,
    number: &mut u64,
    (now, smalls_a_step): (u64, u64),
    large: &Waiting,
) {
    for _ in 0..smalls_a_step {
        *number += 1;
        waiting.push(job(if now < 20 { *number } else { 1000 + *number }, "ann", 1));
    }
    if now == 20 {
        // Those that wait already may start first, because they were submitted before it.
        waiting.truncate(8);
        waiting.push(large.clone());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_order_is_the_same_as_when_each_job_is_looked_at_for_each_turn(
        hosts in hosts(),
        waiting in jobs_of_tenants(),
        others in jobs_of_tenants(),
    ) {
        let mut held: BTreeMap<Holder, Demand> = BTreeMap::new();
        for one in others {
            held.entry(one.holder.clone()).or_default().add(one.whole());
        }
        let queue = Queue { hosts, waiting, held: held.clone(), ..Queue::default() };
        let order = InOrder::new(&queue);
        let total = order.total;
        let mut left: Vec<&Waiting> = queue.waiting.iter().collect();
        for one in order {
            prop_assert_eq!(&one.job, &next_of(&left, &held, total).job);
            left.retain(|other| other.job != one.job);
            held.entry(one.holder.clone()).or_default().add(one.whole());
        }
        prop_assert!(left.is_empty());
    }

    #[test]
    fn no_host_gets_more_than_it_has(hosts in hosts(), waiting in jobs()) {
        let queue = Queue { hosts: hosts.clone(), waiting: waiting.clone(), ..Queue::default() };
        let turns = schedule(&queue, first);
        prop_assert_eq!(turns.len(), waiting.len());
        for host in hosts {
            let mut taken = Demand::default();
            let mut starts = 0;
            for (id, turn) in &turns {
                let at: &[HostId] = match turn {
                    Turn::Start(at) => std::slice::from_ref(at),
                    Turn::StartAll(at) => at,
                    Turn::Wait { .. } => &[],
                };
                let one = waiting.iter().find(|w| w.job == *id).unwrap();
                prop_assert!(at.is_empty() || at.len() == one.count as usize, "all or none");
                let here = at.iter().filter(|at| **at == host.id).count();
                (0..here).for_each(|_| taken.add(one.demand));
                // A gang takes one slot, or boots where one is left for its first VM.
                starts += u32::from(here > 0);
            }
            prop_assert!(taken.fits(host.total) && starts <= host.start_slots);
        }
    }

    #[test]
    fn what_starts_is_the_same_when_nobody_asks_why_the_others_wait(
        hosts in hosts(),
        waiting in jobs(),
        quota in proptest::option::of(1u32..20),
    ) {
        let mut queue = Queue { hosts, waiting, ..Queue::default() };
        if let Some(cpus) = quota {
            let quota = Quota { cpus: Some(cpus), ..Quota::default() };
            queue.quotas.insert("default".to_owned(), QuotaUse { quota, ..QuotaUse::default() });
        }
        let hosts = |turn| match turn {
            Turn::Start(host) => Some(vec![host]),
            Turn::StartAll(hosts) => Some(hosts),
            Turn::Wait { .. } => None,
        };
        let all = schedule(&queue, first).into_iter();
        let expected: Vec<(JobId, Vec<HostId>)> =
            all.filter_map(|(job, turn)| Some((job, hosts(turn)?))).collect();
        prop_assert_eq!(starts(&queue, first), expected);
    }

    #[test]
    fn of_equal_jobs_the_earlier_one_starts_first(hosts in hosts(), waiting in jobs()) {
        let queue = Queue { hosts, waiting: waiting.clone(), ..Queue::default() };
        let turns: BTreeMap<JobId, Turn> = schedule(&queue, first).into_iter().collect();
        let waits = |w: &Waiting| matches!(turns[&w.job], Turn::Wait { .. });
        for early in waiting.iter().filter(|w| waits(w)) {
            for late in waiting.iter().filter(|w| w.submitted > early.submitted && !waits(w)) {
                let equal = late.holder == early.holder
                    && (late.demand, late.count) == (early.demand, early.count)
                    && late.priority == early.priority;
                prop_assert!(!equal, "{} started before {}", late.job, early.job);
            }
        }
    }

    #[test]
    fn places_are_counted_without_a_gap(hosts in hosts(), waiting in jobs()) {
        let turns = schedule(&Queue { hosts, waiting, ..Queue::default() }, first);
        let places = turns.iter().filter_map(|(_, turn)| match turn {
            Turn::Wait { place, .. } => Some(*place),
            Turn::Start(_) | Turn::StartAll(_) => None,
        });
        for (index, place) in places.enumerate() {
            prop_assert_eq!(index + 1, place as usize);
        }
    }

    /// Small jobs arrive without end. The large job starts as soon as the jobs before it have ended.
    #[test]
    fn small_jobs_never_starve_a_large_one(
        smalls_a_step in 1u64..6,
        steps in 1u64..6,
        cpus in proptest::collection::vec(2u32..9, 1..4),
        large_of in 0u32..8,
        own_owner in any::<bool>(),
    ) {
        let sizes = cpus.iter().enumerate();
        let hosts: Vec<HostRoom> =
            sizes.map(|(i, cpus)| room(&format!("h{i}"), *cpus, u64::from(*cpus) * 256)).collect();
        let mut run = Run { hosts, ..Run::default() };
        let largest = cpus.iter().max().copied().unwrap();
        let large = job(500, if own_owner { "bob" } else { "ann" }, 2 + large_of % (largest - 1));
        let (mut waiting, mut number) = (Vec::new(), 0);
        // At most eight small jobs before it run one after the other, and the running ones.
        let limit = 20 + 12 * steps;
        let mut started_at = None;
        for now in 0..=limit {
            arrive(&mut waiting, &mut number, (now, smalls_a_step), &large);
            if run.step(now, &mut waiting, steps).iter().any(|w| w.job == large.job) {
                started_at = Some(now);
                break;
            }
        }
        prop_assert!(started_at.is_some(), "not started after {limit} steps");
    }

    /// Small jobs of the same tenant arrive without end, and the hosts have room for more than its quota.
    #[test]
    fn small_jobs_never_starve_a_large_one_that_needs_most_of_their_quota(
        smalls_a_step in 1u64..6,
        steps in 1u64..6,
        most in 2u32..9,
        large_of in 0u32..8,
        own_owner in any::<bool>(),
    ) {
        let quota = Some(Quota { cpus: Some(most), ..Quota::default() });
        let mut run = Run { hosts: vec![room("h1", 20, 8192)], quota, ..Run::default() };
        let large = job(500, if own_owner { "bob" } else { "ann" }, 2 + large_of % (most - 1));
        let (mut waiting, mut number) = (Vec::new(), 0);
        // As where hosts are short: at most eight small jobs before it, and the running ones.
        let limit = 20 + 12 * steps;
        let mut started = false;
        for now in 0..=limit {
            arrive(&mut waiting, &mut number, (now, smalls_a_step), &large);
            let other = job_of("blue", 5000 + now, "dan");
            waiting.push(other.clone());
            let starts = run.step(now, &mut waiting, steps);
            prop_assert!(starts.iter().any(|w| w.job == other.job), "another tenant's starts at once");
            if starts.iter().any(|w| w.job == large.job) {
                started = true;
                break;
            }
        }
        prop_assert!(started, "not started after {limit} steps");
    }

    /// A host of the site is always reserved for another tenant's jobs, and small jobs arrive without end.
    #[test]
    fn a_gang_is_not_starved_where_a_host_is_reserved_for_others(
        steps in 1u64..5,
        cpus in 1u32..5,
        count in 2u32..9,
    ) {
        let sized = |id: &str, cpus: u32| room(id, cpus, u64::from(cpus) * 256);
        let hosts = vec![sized("h0", cpus), sized("h1", cpus), sized("h2", cpus), sized("h3", 2 * cpus)];
        // It ends after all others. By it, the other tenant has the smaller share and comes first.
        let long = job(1, "ann", 2 * cpus);
        let running = vec![(host_id("h3"), long.holder, long.demand, u64::MAX)];
        let mut run = Run { hosts, running, ..Run::default() };
        let large = gang(500, count.min(2 * cpus), 1);
        let (mut waiting, mut number) = (Vec::new(), 1);
        let limit = 5 + 20 * steps;
        let mut started = false;
        for now in 0..=limit {
            for _ in 0..2 * cpus {
                number += 1;
                waiting.push(job(if now < 5 { number } else { 1000 + number }, "ann", 1));
            }
            for _ in 0..2 {
                number += 1;
                let (start, demand) = (Start::Host(host_id("h0")), job(0, "dan", cpus).demand);
                waiting.push(Waiting { start, demand, ..job_of("blue", number, "dan") });
            }
            if now == 5 {
                waiting.push(large.clone());
            }
            if run.step(now, &mut waiting, steps).iter().any(|w| w.job == large.job) {
                started = true;
                break;
            }
        }
        prop_assert!(started, "not started after {limit} steps");
    }

    /// Small jobs and other gangs arrive without end. Each gang starts, and all of its VMs with it.
    #[test]
    fn a_gang_is_never_starved_and_two_never_wait_for_each_other(
        steps in 1u64..5,
        cpus in proptest::collection::vec(1u32..6, 1..5),
        counts in proptest::collection::vec(1u32..6, 2..5),
        start_slots in 1u32..4,
    ) {
        let sizes = cpus.iter().enumerate();
        let hosts: Vec<HostRoom> = sizes
            .map(|(i, cpus)| {
                let room = room(&format!("h{i}"), *cpus, u64::from(*cpus) * 256);
                let room = HostRoom { start_slots, ..room };
                if i % 2 == 0 { room } else { at_site("cloud", room) }
            })
            .collect();
        let all: u32 = cpus.iter().sum();
        let gangs = counts.iter().zip(500u64..).map(|(count, number)| gang(number, (*count).min(all), 1));
        let gangs: Vec<Waiting> = gangs.collect();
        let mut run = Run { hosts, ..Run::default() };
        let (mut waiting, mut number) = (gangs.clone(), 1000);
        let mut left: Vec<JobId> = gangs.into_iter().map(|gang| gang.job).collect();
        let limit = 20 * steps * left.len() as u64;
        for now in 0..limit {
            for _ in 0..3 {
                number += 1;
                waiting.push(job(number, "ann", 1));
            }
            let started = run.step(now, &mut waiting, steps);
            left.retain(|job| !started.iter().any(|one| one.job == *job));
            if left.is_empty() {
                break;
            }
        }
        prop_assert!(left.is_empty(), "not started after {limit} steps: {left:?}");
    }

    /// More jobs of a higher priority arrive than can run, without end. Jobs may start first if they were
    /// submitted before the job's wait was worth the difference in priority. All later ones start after it.
    #[test]
    fn a_stream_of_higher_priority_starves_no_job(
        slots in 1u32..5,
        jobs_a_step in 1u64..4,
        steps in 1u64..4,
        difference in 1i32..6,
        steps_a_point in 1u64..4,
        owners in 1u64..3,
    ) {
        let mut run = Run { hosts: vec![room("h1", slots, u64::from(slots) * 256)], ..Run::default() };
        let low = job(1, "low", 1);
        let (mut waiting, mut number) = (vec![low.clone()], 1);
        let ahead = (u64::try_from(difference).unwrap() + 1) * steps_a_point * jobs_a_step;
        let limit = (ahead + 2) * steps + 1;
        let mut arrived: BTreeMap<JobId, u64> = [(low.job.clone(), 0)].into();
        let mut started = false;
        for now in 0..=limit {
            for _ in 0..jobs_a_step {
                number += 1;
                let owner = ["ann", "bob"][usize::try_from(number % owners).unwrap()];
                let one = Waiting { priority: difference, ..job(number, owner, 1) };
                arrived.insert(one.job.clone(), now);
                waiting.push(one);
            }
            for one in &mut waiting {
                one.waited_ms = (now - arrived[&one.job]) * AGEING_STEP_MS / steps_a_point;
            }
            started = run.step(now, &mut waiting, steps).iter().any(|w| w.job == low.job);
            if started {
                break;
            }
        }
        prop_assert!(started, "not started after {limit} steps");
    }

    /// Two owners who always have waiting jobs get equal shares, up to one job.
    #[test]
    fn owners_who_always_wait_get_equal_shares(slots in 2u32..9, first_has in 1u64..30) {
        let mut run = Run { hosts: vec![room("h1", slots, u64::from(slots) * 256)], ..Run::default() };
        let mut waiting: Vec<Waiting> = (1..=first_has).map(|n| job(n, "ann", 1)).collect();
        let mut number = first_has;
        for now in 0..40 {
            for owner in ["ann", "bob"] {
                for _ in 0..slots {
                    number += 1;
                    waiting.push(job(number, owner, 1));
                }
            }
            run.step(now, &mut waiting, 1);
            let of = |name: &str| run.running.iter().filter(|(_, holder, ..)| holder.owner == name).count();
            prop_assert!(of("ann").abs_diff(of("bob")) <= 1, "{} and {}", of("ann"), of("bob"));
        }
    }
}
