//! What the rules decide at each look, and what the planner's rule sees.

use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::money::Money;
use perigee_planner::rent::{
    AHEAD_S, Arrived, Decision, EXPECTED_S, Host, Job, Period, Planned, Refusal, Rented, Running,
    Snapshot, Start, Worth, decide, planned,
};

use super::hosts;
use super::market;
use super::queue::job_id;
use super::rules::{RentRule, View, Waits, rents};
use super::world::World;

/// How long a peer asks for no offer that was refused, in milliseconds: the half hour of SkyPilot's and the autoscaler's back-offs.
const REFUSED_MS: u64 = 1_800_000;

fn money(micros: f64) -> Money {
    Money::from_micros(market::milliseconds(micros.max(0.0) / 1000.0))
}

fn dollars(dollars: f64) -> Money {
    money(dollars * 1e6)
}

impl World<'_> {
    /// Hosts are given back and asked for.
    pub fn rent(&mut self) {
        if self.rule == RentRule::Perigee {
            self.rent_by_planner();
        } else {
            self.rent_by_peer();
        }
        let empty: Vec<usize> = self
            .rented()
            .filter(|(_, _, host)| host.is_leaving && host.jobs.is_empty())
            .map(|(number, ..)| number)
            .collect();
        empty.into_iter().for_each(|host| self.end_host(host, false));
    }

    fn rent_by_peer(&mut self) {
        let now_ms = self.now_ms;
        let idle_ms = self.rule.idle_s() * 1000;
        let lease_ms = self.rule.lease_s().map(|lease_s| lease_s * 1000);
        for host in self.hosts.iter_mut().filter(|host| !host.is_own() && !host.is_gone) {
            let is_idle = host.idle_since_ms.is_some_and(|since_ms| now_ms - since_ms >= idle_ms);
            let is_over = lease_ms.is_some_and(|lease_ms| now_ms - host.asked_ms >= lease_ms);
            host.is_leaving |= is_idle || is_over;
        }
        if self.rule == RentRule::Stopped && self.is_nearly_spent() {
            for host in self.rented().map(|(number, ..)| number).collect::<Vec<_>>() {
                self.lose_jobs(host);
                self.end_host(host, false);
            }
            return;
        }
        if !self.may_spend() {
            return;
        }
        let waits = |job: &usize| {
            let arrival = &self.jobs[*job].arrival;
            Waits {
                cpus: arrival.cpus,
                memory_bytes: arrival.memory_bytes,
                without_kvm: arrival.without_kvm,
                may_leave: !arrival.is_confined,
            }
        };
        let waiting: Vec<Waits> = self.waiting.iter().map(waits).collect();
        let free = self.rented().filter(|(_, _, host)| !host.is_leaving);
        let free = free.map(|(_, _, host)| (host.free_cpus, host.free_memory_bytes)).collect();
        let can_be_asked = |offer: &usize| {
            let refused = self.refusals.get(offer);
            refused.is_none_or(|(last_ms, _)| now_ms - last_ms >= REFUSED_MS)
        };
        let offers = (0..self.renting.offers.len()).filter(can_be_asked).filter_map(|number| {
            let offered = &self.renting.offers[number];
            offered.offer.price.per_hour_micros?;
            Some((number, &offered.offer, offered.speed))
        });
        let rented = self.rented().count();
        let view = View { waiting: &waiting, free, rented, offers: offers.collect() };
        let most = self.renting.hosts_most.saturating_sub(rented);
        let mut refused = Vec::new();
        for offer in rents(self.rule, &view).into_iter().take(most) {
            if !refused.contains(&offer) && self.ask(offer).is_none() {
                refused.push(offer);
            }
        }
    }

    fn rent_by_planner(&mut self) {
        let (snapshot, numbers) = self.snapshot();
        if snapshot.jobs.is_empty() && snapshot.hosts.iter().all(|host| host.rented.is_none()) {
            return;
        }
        let decided = decide(&snapshot);
        for decision in decided.decisions {
            match decision {
                Decision::Rent(rent) => {
                    let offers = self.renting.offers.iter();
                    let same = offers.enumerate().find(|(_, offered)| {
                        let of = &offered.offer;
                        (&of.kind, &of.zone, of.spot)
                            == (&rent.offer.kind, &rent.offer.zone, rent.offer.spot)
                    });
                    let Some((offer, _)) = same else { continue };
                    if let Some(host) = self.ask(offer) {
                        self.hosts[host].reserved = rent.reserve.micros as f64;
                        self.refusals.remove(&offer);
                    }
                }
                Decision::Keep(keep) => {
                    self.hosts[numbers[&keep.host]].reserved += keep.reserve.micros as f64;
                }
                Decision::GiveBack(back) => {
                    self.hosts[numbers[&back.host]].is_leaving = true;
                }
            }
        }
        self.end_what_nothing_pays();
    }

    /// A host that is to be emptied ends when its reservation does, with its jobs.
    fn end_what_nothing_pays(&mut self) {
        let look_s = self.scenario.look_s as f64;
        let leaving = self.rented().filter(|(_, _, host)| host.is_leaving);
        let out = leaving
            .filter(|(_, offer, host)| host.reserved < 2.0 * look_s * self.high_per_s(*offer));
        for host in out.map(|(number, ..)| number).collect::<Vec<_>>() {
            self.lose_jobs(host);
            self.end_host(host, false);
        }
    }

    /// What the planner sees, and the hosts' numbers.
    fn snapshot(&self) -> (Snapshot, BTreeMap<HostId, usize>) {
        let there =
            self.hosts.iter().enumerate().filter(|(_, host)| !host.is_gone && !host.is_leaving);
        let numbers = there.clone().map(|(number, host)| (host.id.clone(), number)).collect();
        let renting = self.renting;
        let starts = renting.offers.iter().map(|offered| {
            let start = Start {
                expected_s: offered.boot_s as f64,
                high_s: market::start_high_s(offered.boot_s),
                taken_back_every_s: Some(market::TAKEN_BACK_EVERY_S),
            };
            (offered.offer.kind.clone(), start)
        });
        let offers = renting.offers.iter().enumerate().map(|(number, offered)| {
            let mut offer = offered.offer.clone();
            offer.price.per_hour_micros = self.price_now(number);
            offer
        });
        let refusals = self.refusals.iter().map(|(offer, (last_ms, times))| {
            let of = &renting.offers[*offer].offer;
            Refusal {
                kind: of.kind.clone(),
                zone: of.zone.clone(),
                spot: of.spot,
                ago_s: (self.now_ms - last_ms) as f64 / 1000.0,
                times: *times,
            }
        });
        let snapshot = Snapshot {
            jobs: self.waiting.iter().map(|job| self.job(*job)).collect(),
            arrived: self.arrived(),
            hosts: there.map(|(_, host)| self.host(host)).collect(),
            offers: offers.collect(),
            starts: starts.collect(),
            refusals: refusals.collect(),
            budget_left: Money::from_micros(money(self.budget_left()).micros.saturating_sub(1)),
            period: renting.budget.map(|_| self.period()),
            rented_most: renting.hosts_most,
        };
        (snapshot, numbers)
    }

    /// The budget is for the time in which jobs arrive.
    fn period(&self) -> Period {
        let past_s = self.now_ms as f64 / 1000.0;
        let left_s = (self.scenario.length_s as f64 - past_s).max(0.0);
        Period { left_s }
    }

    /// The jobs that arrived lately.
    fn arrived(&self) -> Vec<Arrived> {
        let ago_s = |job: usize| (self.now_ms - self.jobs[job].arrival.at_ms) as f64 / 1000.0;
        let lately = (0..self.jobs.len()).rev().take_while(|job| ago_s(*job) < EXPECTED_S);
        let arrived = lately.map(|number| {
            let (ago_s, mut job) = (ago_s(number), self.job(number));
            // As it was then.
            job.worth.deadline_in_s = job.worth.deadline_in_s.map(|in_s| in_s + ago_s);
            Arrived { ago_s, job }
        });
        arrived.collect()
    }

    fn price_now(&self, offer: usize) -> Option<std::num::NonZeroU64> {
        self.renting.offers[offer].offer.price.per_hour_micros?;
        std::num::NonZeroU64::new(money(self.per_s(offer) * 3600.0).micros)
    }

    fn job(&self, number: usize) -> Job {
        let arrival = &self.jobs[number].arrival;
        let offers = self.renting.offers.iter().enumerate();
        let rented = offers.map(|(offer, offered)| {
            (offered.offer.kind.clone(), self.predicted_at(number, Some(offer)))
        });
        let per_hour = Some(arrival.waiting_per_hour).filter(|per_hour| *per_hour > 0.0);
        let now_ms = self.now_ms as f64;
        Job {
            job: job_id(number),
            cpus: arrival.cpus,
            memory_bytes: arrival.memory_bytes,
            own: Some(self.predicted_at(number, None)),
            own_egress: money(self.egress(number, 0)),
            rented: rented.collect(),
            may_leave: !arrival.is_confined,
            without_kvm: arrival.without_kvm,
            worth: Worth {
                waiting_per_hour: per_hour.map(dollars),
                deadline_in_s: arrival.deadline_ms.map(|at_ms| (at_ms as f64 - now_ms) / 1000.0),
                budget: arrival.budget.map(dollars),
            },
        }
    }

    fn host(&self, host: &hosts::Host) -> Host {
        let seconds = |at_ms: u64| at_ms.saturating_sub(self.now_ms) as f64 / 1000.0;
        let since = |at_ms: u64| (self.now_ms - at_ms) as f64 / 1000.0;
        let running = host.jobs.iter().map(|job| {
            let job = &self.jobs[*job];
            // What has taken longer than predicted goes on for a while.
            Running {
                cpus: job.arrival.cpus,
                memory_bytes: job.arrival.memory_bytes,
                left_s: seconds(job.ends_ms).max(30.0),
                left_high_s: seconds(job.ends_high_ms).max(60.0),
            }
        });
        let rented = host.offer.map(|offer| {
            let of = &self.renting.offers[offer].offer;
            let mut price = of.price.clone();
            price.per_hour_micros = self.price_now(offer);
            Rented {
                kind: of.kind.clone(),
                spot: of.spot,
                price,
                paid_s: since(host.asked_ms),
                idle_s: host.idle_since_ms.map(since),
                reserved_s: host.reserved / self.high_per_s(offer).max(f64::MIN_POSITIVE),
                waiting_per_hour: dollars(host.waiting_per_hour),
            }
        });
        let boot_s = host.offer.map_or(0.0, |offer| self.renting.offers[offer].boot_s as f64);
        let ready_in_s =
            if host.has_started { 0.0 } else { (boot_s - since(host.asked_ms)).max(10.0) };
        Host {
            host: host.id.clone(),
            cpus: host.cpus,
            memory_bytes: host.memory_bytes,
            kvm: host.offer.is_none_or(|offer| self.renting.offers[offer].offer.kvm == Some(true)),
            ready_in_s,
            running: running.collect(),
            rented,
        }
    }

    /// Where the planner's rule would let jobs start in this pass.
    pub fn places(&self) -> Places {
        let is_rented = self.rented().any(|(_, _, host)| !host.is_leaving);
        let all = if is_rented { planned(&self.snapshot().0) } else { Vec::new() };
        let hosts: BTreeMap<&HostId, usize> =
            self.hosts.iter().enumerate().map(|(number, host)| (&host.id, number)).collect();
        let goes = all.into_iter().filter_map(|planned| {
            let host = *hosts.get(planned.host.as_ref()?)?;
            let number = planned.job.as_str().strip_prefix("j-")?.parse().ok()?;
            Some((number, (host, planned)))
        });
        Places { goes: goes.collect(), left: self.budget_left(), reserved: BTreeMap::new() }
    }
}

/// Where jobs start in a pass of the queue, by the planner's rule.
pub(super) struct Places {
    goes: BTreeMap<usize, (usize, Planned)>,
    left: f64,
    /// What has to be reserved beside what is, of each host, in millionths of a dollar.
    pub reserved: BTreeMap<usize, f64>,
}

impl Places {
    /// The host at which the job starts, of those with room. A job that is to go to a rented host soon leaves the own ones to others.
    pub fn choose(&mut self, world: &World, job: usize, room: &[usize]) -> Option<usize> {
        let Some((host, planned)) = self.goes.get(&job) else {
            return self.own(world, job, room);
        };
        if world.hosts[*host].is_own() {
            return self.own(world, job, room);
        }
        if planned.start_s > 1.0 || !room.contains(host) {
            return None;
        }
        let host = *host;
        let more = self.more(world, job, host)?;
        if more > self.left {
            return None;
        }
        self.left -= more;
        *self.reserved.entry(host).or_default() += more - world.egress(job, host);
        Some(host)
    }

    fn own(&mut self, world: &World, job: usize, room: &[usize]) -> Option<usize> {
        let own = room.iter().copied().find(|host| world.hosts[*host].is_own())?;
        let egress = world.egress(job, own);
        if egress > 0.0 && egress > self.left {
            return None;
        }
        self.left -= egress;
        Some(own)
    }

    /// What has to be reserved before the job starts there: what leaves, and the machine until the job has ended in 9 of 10 cases.
    fn more(&self, world: &World, job: usize, host: usize) -> Option<f64> {
        let offer = world.hosts[host].offer?;
        let held = world.hosts[host].reserved + self.reserved.get(&host).copied().unwrap_or(0.0);
        let needed_s = world.predicted(job, host).high_s + AHEAD_S;
        let machine = (needed_s * world.high_per_s(offer) - held).max(0.0);
        Some(machine + world.egress(job, host))
    }
}
