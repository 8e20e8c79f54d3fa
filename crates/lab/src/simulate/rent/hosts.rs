//! The hosts of the simulated cluster, what they cost, and what is reserved for them.

use perigee_model::HostId;
use perigee_model::money::Money;
use perigee_model::rental::Offer;
use perigee_planner::rent::SPOT_RISES;

use super::world::World;
use crate::simulate::scenario::Scenario;

/// A host, its own or a rented one.
pub(super) struct Host {
    pub id: HostId,
    /// The number of its offer; `None` for an own host.
    pub offer: Option<usize>,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub free_cpus: u32,
    pub free_memory_bytes: u64,
    pub is_gone: bool,
    /// It takes no jobs any more.
    pub is_leaving: bool,
    pub has_started: bool,
    pub asked_ms: u64,
    paid_ms: u64,
    pub idle_since_ms: Option<u64>,
    pub jobs: Vec<usize>,
    /// What an hour of waiting would cost the jobs that it had last together, in dollars.
    pub waiting_per_hour: f64,
    /// Millionths of a dollar that are reserved for it and not spent.
    pub reserved: f64,
}

impl Host {
    pub fn own(number: usize, scenario: &Scenario) -> Self {
        Self {
            id: HostId::new(format!("h{number}")).expect("letters and digits"),
            offer: None,
            cpus: scenario.cpus,
            memory_bytes: scenario.memory_bytes,
            free_cpus: scenario.cpus,
            free_memory_bytes: scenario.memory_bytes,
            is_gone: false,
            is_leaving: false,
            has_started: true,
            asked_ms: 0,
            paid_ms: 0,
            idle_since_ms: None,
            jobs: Vec::new(),
            waiting_per_hour: 0.0,
            reserved: 0.0,
        }
    }

    pub fn rented(number: usize, offer: usize, of: &Offer, now_ms: u64) -> Self {
        Self {
            id: HostId::new(format!("r{number}")).expect("letters and digits"),
            offer: Some(offer),
            cpus: of.cpus,
            memory_bytes: of.memory_bytes,
            free_cpus: of.cpus,
            free_memory_bytes: of.memory_bytes,
            is_gone: false,
            is_leaving: false,
            has_started: false,
            asked_ms: now_ms,
            paid_ms: now_ms,
            idle_since_ms: None,
            jobs: Vec::new(),
            waiting_per_hour: 0.0,
            reserved: 0.0,
        }
    }

    pub fn is_own(&self) -> bool {
        self.offer.is_none()
    }

    pub fn takes_jobs(&self) -> bool {
        !self.is_gone && self.has_started && !self.is_leaving
    }

    pub fn has_started(&mut self, now_ms: u64) {
        if !self.is_gone {
            self.has_started = true;
            self.idle_since_ms = Some(now_ms);
        }
    }

    pub fn take(&mut self, job: usize, cpus: u32, memory_bytes: u64) {
        self.free_cpus -= cpus;
        self.free_memory_bytes -= memory_bytes;
        self.jobs.push(job);
        self.idle_since_ms = None;
    }

    pub fn release(&mut self, job: usize, cpus: u32, memory_bytes: u64, now_ms: u64) {
        self.free_cpus += cpus;
        self.free_memory_bytes += memory_bytes;
        self.jobs.retain(|one| *one != job);
        if self.jobs.is_empty() {
            self.idle_since_ms = Some(now_ms);
        }
    }
}

/// What may be spent, and what is.
pub(super) struct Ledger {
    budget: Option<f64>,
}

impl Ledger {
    pub fn new(budget: Option<Money>) -> Self {
        Self { budget: budget.map(|budget| budget.micros as f64) }
    }
}

impl World<'_> {
    /// Millionths of a dollar that were spent.
    pub fn spent(&self) -> f64 {
        1e6 * (self.bill.machines + self.bill.egress)
    }

    /// What nobody has reserved, in millionths of a dollar.
    pub fn budget_left(&self) -> f64 {
        /// As much as nothing limits: a million dollars.
        const MUCH: f64 = 1e12;
        let Some(budget) = self.ledger.budget else { return MUCH };
        let reserved: f64 = self.hosts.iter().map(|host| host.reserved).sum();
        budget - self.spent() - reserved
    }

    /// Whether a rule that only looks at what was spent would rent.
    pub fn may_spend(&self) -> bool {
        self.ledger.budget.is_none_or(|budget| self.spent() < budget)
    }

    /// Whether the budget is spent before the look after the next one, with all that the jobs send then.
    pub fn is_nearly_spent(&self) -> bool {
        let each_s: f64 = self.rented().map(|(_, offer, _)| self.high_per_s(offer)).sum();
        let looks_s = 2.0 * self.scenario.look_s as f64;
        let waiting = self.waiting.iter().map(|job| self.egress_at_most(*job)).sum::<f64>();
        let soon = self.spent() + each_s * looks_s + waiting;
        // What arrives until the next look may send something, too.
        self.ledger.budget.is_some_and(|budget| soon > 0.98 * budget)
    }

    /// Millionths of a dollar for each second now.
    pub fn per_s(&self, offer: usize) -> f64 {
        let of = &self.renting.offers[offer].offer;
        let per_hour = of.price.per_hour_micros.map_or(0.0, |per_hour| per_hour.get() as f64);
        let part = if of.spot { self.market.price(offer, self.now_ms) } else { 1.0 };
        per_hour * part / 3600.0
    }

    /// The most that a second may cost, by the maximum price that the provider was told.
    pub fn high_per_s(&self, offer: usize) -> f64 {
        let rises = if self.renting.offers[offer].offer.spot { SPOT_RISES } else { 1 };
        self.per_s(offer) * rises as f64
    }

    /// The host is paid for until now.
    pub fn pay(&mut self, host: usize) {
        let Some(offer) = self.hosts[host].offer.filter(|_| !self.hosts[host].is_gone) else {
            return;
        };
        let seconds = (self.now_ms - self.hosts[host].paid_ms) as f64 / 1000.0;
        self.spend(host, self.per_s(offer) * seconds);
        self.hosts[host].paid_ms = self.now_ms;
    }

    fn spend(&mut self, host: usize, micros: f64) {
        self.bill.machines += micros / 1e6;
        self.hosts[host].reserved = (self.hosts[host].reserved - micros).max(0.0);
    }

    /// The host is given back, or the provider takes it. Whoever gives it back pays its minimum time.
    pub fn end_host(&mut self, host: usize, is_taken: bool) {
        let Some(offer) = self.hosts[host].offer.filter(|_| !self.hosts[host].is_gone) else {
            return;
        };
        self.pay(host);
        let had_s = (self.now_ms - self.hosts[host].asked_ms) as f64 / 1000.0;
        let minimum_s = f64::from(self.renting.offers[offer].offer.price.minimum_s);
        if had_s < minimum_s && !is_taken {
            self.spend(host, self.per_s(offer) * (minimum_s - had_s));
        }
        self.bill.host_hours += had_s.max(minimum_s) / 3600.0;
        (self.hosts[host].is_gone, self.hosts[host].reserved) = (true, 0.0);
    }

    /// How much faster than an own host it computes.
    pub fn speed(&self, host: usize) -> f64 {
        self.hosts[host].offer.map_or(1.0, |offer| self.renting.offers[offer].speed)
    }

    /// Rented hosts that are there or starting.
    pub fn rented(&self) -> impl Iterator<Item = (usize, usize, &Host)> {
        let all = self.hosts.iter().enumerate().filter(|(_, host)| !host.is_gone);
        all.filter_map(|(number, host)| Some((number, host.offer?, host)))
    }
}
