//! Starts what waits, by the planner's queue. Where a job starts of the hosts with room, the rule says.

use std::collections::BTreeMap;

use perigee_model::{HostId, JobId, SiteId};
use perigee_planner::queue::{Demand, HostRoom, NotChosen, Queue, Turn, Waiting, schedule};
use perigee_planner::rent::Run as Predicted;

use super::arrivals;
use super::rules::RentRule;
use super::world::World;

/// Of how many waiting jobs a pass decides: the first ones.
const PASS_MOST: usize = 2_000;

pub(super) fn job_id(number: usize) -> JobId {
    JobId::new(format!("j-{number}")).expect("letters and digits")
}

impl World<'_> {
    /// How long the job would take at the host, by what is known when it starts.
    pub fn predicted(&self, job: usize, host: usize) -> Predicted {
        self.predicted_at(job, self.hosts[host].offer)
    }

    /// The same at an own host, or at one of an offer.
    pub fn predicted_at(&self, job: usize, offer: Option<usize>) -> Predicted {
        let arrival = &self.jobs[job].arrival;
        let way = self.scenario.uplink_bytes_per_s.unwrap_or(self.scenario.link_bytes_per_s);
        let rate = way as f64 / f64::from(1 + self.flows);
        let is_there = offer.is_some();
        let reads = if arrival.is_at_provider == is_there { 0 } else { arrival.reads_bytes };
        let writes = if is_there { arrival.writes_bytes } else { 0 };
        let sent_s = (reads + writes) as f64 / rate;
        let speed = offer.map_or(1.0, |offer| self.renting.offers[offer].speed);
        let other_s = sent_s + self.scenario.start.boot_s;
        Predicted {
            expected_s: other_s + arrival.predicted_s / speed,
            high_s: other_s + arrival.predicted_s * arrivals::high() / speed,
            egress_bytes: writes,
        }
    }

    /// What leaves the provider's site if the job runs at the host, in millionths of a dollar.
    pub fn egress(&self, job: usize, host: usize) -> f64 {
        let arrival = &self.jobs[job].arrival;
        let offers = &self.renting.offers;
        let per_gib = match self.hosts[host].offer {
            Some(offer) => offers[offer].offer.price.egress_per_gib_micros,
            None => offers.iter().find_map(|offered| offered.offer.price.egress_per_gib_micros),
        };
        let bytes = match self.hosts[host].offer {
            Some(_) => arrival.writes_bytes,
            None if arrival.is_at_provider => arrival.reads_bytes,
            None => 0,
        };
        per_gib.map_or(0.0, |per_gib| per_gib.get() as f64) * bytes as f64 / (1_u64 << 30) as f64
    }

    /// What leaves if the job starts at any host that is there, in millionths of a dollar.
    pub fn egress_at_most(&self, job: usize) -> f64 {
        let has_room = |host: &usize| {
            let (host, arrival) = (&self.hosts[*host], &self.jobs[job].arrival);
            host.takes_jobs() && host.free_cpus >= arrival.cpus
        };
        let hosts = (0..self.hosts.len()).filter(has_room);
        hosts.map(|host| self.egress(job, host)).fold(0.0, f64::max)
    }

    /// Whether the job may run at the host at all.
    pub fn may_run(&self, job: usize, host: usize) -> bool {
        let arrival = &self.jobs[job].arrival;
        let Some(offer) = self.hosts[host].offer else { return true };
        let has_kvm = self.renting.offers[offer].offer.kvm == Some(true);
        !arrival.is_confined && (has_kvm || arrival.without_kvm)
    }

    pub fn start_waiting(&mut self) {
        let least = self.waiting.iter().map(|job| self.jobs[*job].arrival.cpus).min();
        let takes = self.hosts.iter().filter(|host| host.takes_jobs());
        if takes.map(|host| host.free_cpus).max() < least {
            return;
        }
        let queue = self.queue();
        let numbers: BTreeMap<JobId, usize> =
            self.waiting.iter().map(|job| (job_id(*job), *job)).collect();
        let hosts: BTreeMap<HostId, usize> =
            self.hosts.iter().enumerate().map(|(number, host)| (host.id.clone(), number)).collect();
        let mut places = (self.rule == RentRule::Perigee).then(|| self.places());
        let world = &*self;
        let turns = schedule(&queue, |waiting, with_room| {
            let job = numbers[&waiting.job];
            let room = with_room.iter().map(|host| hosts[host]);
            let room: Vec<usize> = room.filter(|host| world.may_run(job, *host)).collect();
            let chosen = match &mut places {
                Some(places) => places.choose(world, job, &room),
                // An own host first, then the fullest rented one.
                None => room.into_iter().min_by_key(|host| {
                    (!world.hosts[*host].is_own(), world.hosts[*host].free_cpus, *host)
                }),
            };
            let refused = || NotChosen::from("no host that has room is worth it".to_owned());
            chosen.map(|host| world.hosts[host].id.clone()).ok_or_else(refused)
        });
        for (host, micros) in places.map(|places| places.reserved).unwrap_or_default() {
            self.hosts[host].reserved += micros;
        }
        for (job, turn) in turns {
            if let Turn::Start(host) = turn {
                let job = numbers[&job];
                self.waiting.retain(|one| *one != job);
                self.start(job, hosts[&host]);
            }
        }
    }

    fn queue(&self) -> Queue {
        let site = SiteId::new("home").expect("letters");
        let room = |host: &super::hosts::Host| HostRoom {
            id: host.id.clone(),
            site: site.clone(),
            total: Demand { cpus: host.cpus, memory_bytes: host.memory_bytes },
            free: Demand { cpus: host.free_cpus, memory_bytes: host.free_memory_bytes },
            persistent: Demand::default(),
            start_slots: u32::MAX,
        };
        let waits = |job: &usize| {
            let arrival = &self.jobs[*job].arrival;
            let demand = Demand { cpus: arrival.cpus, memory_bytes: arrival.memory_bytes };
            let waited_ms = self.now_ms - arrival.at_ms;
            let plain = self.scenario.waiting(job_id(*job));
            Waiting { submitted: *job as u64, waited_ms, demand, ..plain }
        };
        Queue {
            hosts: self.hosts.iter().filter(|host| host.takes_jobs()).map(room).collect(),
            waiting: self.waiting.iter().take(PASS_MOST).map(waits).collect(),
            ..Queue::default()
        }
    }
}
