//! Rules that move VMs: Perigee's balancer, and others beside it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use perigee_model::{HostId, SiteId, VmId};
use perigee_planner::balance::{Accounts, Comes, Elsewhere, HostLoad, Look, VmLoad, balance};

use crate::random::Random;

/// A rule that moves VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// No VM moves.
    None,
    /// Every 10 minutes a VM of the busiest host goes to any host.
    Random,
    /// A host that is too full gives its largest VM to the first host with room.
    FirstFit,
    /// A host that is too full gives its largest VM to the least loaded host.
    LeastLoaded,
    /// A VM goes to its data, and a job starts only where they are, however full that host is.
    DataLocal,
    /// Every 10 minutes the largest VM of the host with the highest use goes to the one with the lowest use, if they differ by a tenth.
    ProxLb,
    /// If the hosts' use has differed by more than 0.3 (the standard deviation by the mean) in three looks, the move that makes it differ least.
    Crs,
    /// An account of what the least loaded host would have saved, for each VM at a host that is too full.
    HotHost,
    /// The balancer of the planner.
    Perigee,
}

impl Rule {
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Random,
        Self::FirstFit,
        Self::LeastLoaded,
        Self::DataLocal,
        Self::ProxLb,
        Self::Crs,
        Self::HotHost,
        Self::Perigee,
    ];

    /// All rules that differ in a cluster where VMs or jobs have data, or where they have none.
    pub fn all(has_data: bool) -> Vec<Self> {
        Self::ALL.into_iter().filter(|rule| has_data || *rule != Self::DataLocal).collect()
    }

    /// The name in a scenario.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Random => "random",
            Self::FirstFit => "first-fit",
            Self::LeastLoaded => "least-loaded",
            Self::DataLocal => "data-local",
            Self::ProxLb => "proxlb",
            Self::Crs => "crs",
            Self::HotHost => "hot-host",
            Self::Perigee => "perigee",
        }
    }

    /// The name in a report.
    pub fn title(self) -> &'static str {
        match self {
            Self::None => "no moves",
            Self::Random => "random, every 10 min",
            Self::FirstFit => "first fit, when too full",
            Self::LeastLoaded => "least loaded, when too full",
            Self::DataLocal => "only where the data are",
            Self::ProxLb => "by host use every 10 min, as ProxLB",
            Self::Crs => "by imbalance with hold, as Proxmox CRS",
            Self::HotHost => "account of the hot host",
            Self::Perigee => "Perigee: account for each pair",
        }
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        let words = Self::ALL.map(Self::word).join(", ");
        let found = Self::ALL.into_iter().find(|rule| rule.word() == text);
        found.ok_or_else(|| format!("it is one of {words}"))
    }
}

/// What a rule sees. All rules see the same.
pub struct View<'a> {
    pub now_s: u64,
    pub look: &'a Look,
    pub elsewhere: &'a dyn Fn(&VmId, &HostId) -> Option<Elsewhere>,
}

impl<'a> View<'a> {
    /// Processors that each host's VMs and the rest of it want.
    fn wanted(&self) -> BTreeMap<&'a HostId, f64> {
        let others =
            self.look.hosts.iter().map(|load| (&load.host, load.other_cpus.unwrap_or(0.0)));
        let mut wanted: BTreeMap<&'a HostId, f64> = others.collect();
        for load in &self.look.vms {
            *wanted.entry(&load.host).or_default() += wants(load);
        }
        wanted
    }

    fn at(&self, host: &HostId) -> Vec<&'a VmLoad> {
        self.look.vms.iter().filter(|load| load.host == *host).collect()
    }

    fn largest(&self, host: &HostId) -> Option<&'a VmLoad> {
        self.at(host).into_iter().max_by(|a, b| wants(a).total_cmp(&wants(b)))
    }
}

fn wants(load: &VmLoad) -> f64 {
    load.used_cpus.unwrap_or(0.0) + load.waited_cpus.unwrap_or(0.0)
}

/// A VM, and where the VM goes.
pub type Move = (VmId, HostId);

/// A rule with what the rule remembers.
pub struct Mover {
    rule: Rule,
    random: Random,
    accounts: BTreeMap<SiteId, Accounts>,
    hot: BTreeMap<VmId, Hot>,
    rounds: u32,
    next_s: u64,
}

#[derive(Default)]
struct Hot {
    saved_s: f64,
    doublings: i32,
    moved_s: u64,
}

/// How often the rules that have a period move a VM.
const EVERY_S: u64 = 600;

impl Mover {
    pub fn new(rule: Rule, seed: u64) -> Self {
        let (accounts, hot) = (BTreeMap::new(), BTreeMap::new());
        Self { rule, random: Random(seed), accounts, hot, rounds: 0, next_s: 0 }
    }

    /// The VM has ended.
    pub fn forget(&mut self, vm: &VmId) {
        self.hot.remove(vm);
    }

    /// Whether a look would neither move a VM nor change what the rule remembers. `none_loses`: whether no VM has lost anything since the look
    /// before.
    pub fn has_nothing_to_do(&self, none_loses: impl FnOnce() -> bool) -> bool {
        match self.rule {
            Rule::None => true,
            Rule::Perigee => {
                self.accounts.values().all(|of| *of == Accounts::default()) && none_loses()
            }
            _ => false,
        }
    }

    pub fn moves(&mut self, view: &View) -> Vec<Move> {
        match self.rule {
            Rule::None => Vec::new(),
            Rule::Perigee => self.by_accounts(view),
            Rule::Random | Rule::ProxLb if view.now_s < self.next_s => Vec::new(),
            Rule::Random => self.random(view),
            Rule::FirstFit => relieve(view, false),
            Rule::LeastLoaded => relieve(view, true),
            Rule::DataLocal => to_the_data(view),
            Rule::ProxLb => self.by_use(view).into_iter().collect(),
            Rule::Crs => self.by_imbalance(view).into_iter().collect(),
            Rule::HotHost => self.by_hot_host(view).into_iter().collect(),
        }
    }

    /// A look is of one site, as the controller looks.
    fn by_accounts(&mut self, view: &View) -> Vec<Move> {
        let sites: BTreeSet<&SiteId> = view.look.hosts.iter().map(|load| &load.site).collect();
        let (mut moves, mut in_moves) = (Vec::new(), BTreeSet::new());
        for site in &sites {
            let mut own = self.accounts.remove(*site).unwrap_or_default();
            let seen = (sites.len() > 1).then(|| of_site(view.look, site, (&own, &in_moves)));
            let look = seen.as_ref().unwrap_or(view.look);
            self.adopt(&mut own, look, site);
            let decisions = balance(&mut own, look, view.elsewhere).decisions;
            for decision in decisions.into_iter().filter(|decision| decision.moves) {
                in_moves.extend([decision.host, decision.to.clone()]);
                moves.push((decision.vm, decision.to));
            }
            self.accounts.insert((*site).clone(), own);
        }
        moves
    }

    /// Takes over what other sites remember of VMs that are at this one now.
    fn adopt(&mut self, own: &mut Accounts, look: &Look, site: &SiteId) {
        if self.accounts.is_empty() {
            return;
        }
        let hosts = look.hosts.iter().filter(|load| load.site == *site);
        let hosts: BTreeSet<&HostId> = hosts.map(|load| &load.host).collect();
        let here = look.vms.iter().filter(|load| hosts.contains(&load.host));
        let here: HashMap<&VmId, &HostId> = here.map(|load| (&load.vm, &load.host)).collect();
        for other in self.accounts.values_mut() {
            let come = other.known().filter(|vm| here.contains_key(vm));
            let come: Vec<VmId> = come.cloned().collect();
            come.iter().for_each(|vm| own.adopt(other, (vm, here[vm]), (0.0, 0.0)));
        }
    }

    fn random(&mut self, view: &View) -> Vec<Move> {
        self.next_s = view.now_s + EVERY_S;
        let wanted = view.wanted();
        let Some((busiest, _)) = wanted.iter().max_by(|a, b| a.1.total_cmp(b.1)) else {
            return Vec::new();
        };
        let vm = self.random.pick(&view.at(busiest)).map(|load| load.vm.clone());
        let to = self.random.pick(&view.look.hosts).map(|load| load.host.clone());
        vm.zip(to).into_iter().collect()
    }

    fn by_use(&mut self, view: &View) -> Option<Move> {
        self.next_s = view.now_s + EVERY_S;
        let wanted = view.wanted();
        let share = |load: &HostLoad| wanted[&load.host] / load.cpus;
        let by_use = |a: &&HostLoad, b: &&HostLoad| share(a).total_cmp(&share(b));
        let highest = view.look.hosts.iter().max_by(by_use)?;
        let lowest = view.look.hosts.iter().filter(|load| load.takes_vms).min_by(by_use)?;
        let vm = view.largest(&highest.host)?;
        (share(highest) - share(lowest) >= 0.1).then(|| (vm.vm.clone(), lowest.host.clone()))
    }

    fn by_imbalance(&mut self, view: &View) -> Option<Move> {
        const MOST: f64 = 0.3;
        const ROUNDS: u32 = 3;
        const LEAST_GAIN: f64 = 0.1;
        let wanted = view.wanted();
        let mean = wanted.values().sum::<f64>() / wanted.len() as f64;
        let square = |wanted: f64| (wanted - mean).powi(2);
        let squares: f64 = wanted.values().copied().map(square).sum();
        let imbalance =
            |squares: f64| (squares.max(0.0) / wanted.len() as f64).sqrt() / mean.max(0.1);
        let now = imbalance(squares);
        self.rounds = if now > MOST { self.rounds + 1 } else { 0 };
        if self.rounds < ROUNDS {
            return None;
        }
        let (from, from_wanted) = wanted.iter().max_by(|a, b| a.1.total_cmp(b.1))?;
        let targets = view.look.hosts.iter().filter(|load| load.takes_vms && load.host != **from);
        let moves =
            view.at(from).into_iter().flat_map(|vm| targets.clone().map(move |to| (vm, &to.host)));
        let after = |(vm, to): &(&VmLoad, &HostId)| {
            let (here, there, own) = (*from_wanted, wanted[to], wants(vm));
            let new = square(here - own) + square(there + own);
            imbalance(squares - square(here) - square(there) + new)
        };
        let (vm, to) = moves.min_by(|a, b| after(a).total_cmp(&after(b)))?;
        if now - after(&(vm, to)) < LEAST_GAIN * now {
            return None;
        }
        self.rounds = 0;
        Some((vm.vm.clone(), to.clone()))
    }

    fn by_hot_host(&mut self, view: &View) -> Option<Move> {
        let wanted = view.wanted();
        let hosts = view.look.hosts.iter().filter(|load| load.takes_vms);
        let idle = hosts.min_by(|a, b| wanted[&a.host].total_cmp(&wanted[&b.host]))?;
        let cpus: BTreeMap<&HostId, f64> =
            view.look.hosts.iter().map(|load| (&load.host, load.cpus)).collect();
        let lost = |host: &HostId, wanted: f64| (wanted - cpus[host]).max(0.0);
        let mut best: Option<(f64, &VmLoad)> = None;
        for load in &view.look.vms {
            let (own, here, there) = (wants(load), wanted[&load.host], wanted[&idle.host]);
            let account = self.hot.entry(load.vm.clone()).or_default();
            if account.doublings > 0 && view.now_s - account.moved_s > 3600 {
                (account.doublings, account.moved_s) = (account.doublings - 1, view.now_s);
            }
            if here <= cpus[&load.host] {
                account.saved_s *= 0.995;
                continue;
            }
            let before = lost(&load.host, here) + lost(&idle.host, there);
            let after = lost(&load.host, here - own) + lost(&idle.host, there + own);
            account.saved_s += (before - after).max(0.0) * view.look.passed_s;
            let price_s = (view.elsewhere)(&load.vm, &idle.host)?.price_s;
            let is_due = account.saved_s >= price_s * 2f64.powi(account.doublings);
            let is_best = best.is_none_or(|(saved_s, _)| account.saved_s > saved_s);
            if is_due && is_best && there + own <= 0.95 * cpus[&idle.host] {
                best = Some((account.saved_s, load));
            }
        }
        let (_, vm) = best?;
        for neighbour in view.at(&vm.host) {
            self.hot.entry(neighbour.vm.clone()).or_default().saved_s = 0.0;
        }
        let account = self.hot.entry(vm.vm.clone()).or_default();
        (account.doublings, account.moved_s) = (account.doublings + 1, view.now_s);
        Some((vm.vm.clone(), idle.host.clone()))
    }
}

/// What the controller sees of one site: its hosts, those of other sites that have data of its VMs or that such a VM has left a short time ago,
/// and the VMs at all of these.
fn of_site(
    look: &Look,
    site: &SiteId,
    (accounts, in_moves): (&Accounts, &BTreeSet<HostId>),
) -> Look {
    let sites: HashMap<&HostId, &SiteId> =
        look.hosts.iter().map(|load| (&load.host, &load.site)).collect();
    let is_own = |host: &HostId| sites.get(host).is_some_and(|of| *of == site);
    let own_vms = look.vms.iter().filter(|load| is_own(&load.host));
    let data_at = own_vms.flat_map(|load| &load.data_at);
    let others: BTreeSet<&HostId> = accounts.left_on_trial().chain(data_at).collect();
    let is_seen = |host: &HostId| is_own(host) || others.contains(host);
    let hosts = look.hosts.iter().filter(|load| is_seen(&load.host)).map(|load| HostLoad {
        comes: if load.site == *site { Comes::All } else { Comes::ForData },
        in_a_move: load.in_a_move || in_moves.contains(&load.host),
        ..load.clone()
    });
    let vms = look.vms.iter().filter(|load| is_seen(&load.host));
    let vms =
        vms.map(|load| VmLoad { may_move: load.may_move && is_own(&load.host), ..load.clone() });
    Look { passed_s: look.passed_s, hosts: hosts.collect(), vms: vms.collect() }
}

/// Each VM that is not where its data are goes there, as far as hosts can move VMs at once.
fn to_the_data(view: &View) -> Vec<Move> {
    let hosts: BTreeMap<&HostId, &HostLoad> =
        view.look.hosts.iter().map(|load| (&load.host, load)).collect();
    let in_a_move = view.look.hosts.iter().filter(|load| load.in_a_move);
    let mut busy: BTreeSet<&HostId> = in_a_move.map(|load| &load.host).collect();
    let mut moves = Vec::new();
    for vm in view.look.vms.iter().filter(|vm| !vm.data_at.contains(&vm.host)) {
        let has_room = |to: &&HostId| {
            let room = hosts[to].free_memory_bytes >= vm.memory_bytes;
            room && hosts[to].takes_vms && hosts[to].free_vcpus >= vm.vcpus && !busy.contains(to)
        };
        if busy.contains(&vm.host) {
            continue;
        }
        if let Some(to) = vm.data_at.iter().find(has_room) {
            busy.extend([&vm.host, to]);
            moves.push((vm.vm.clone(), to.clone()));
        }
    }
    moves
}

/// Each host that is too full gives its largest VM away.
fn relieve(view: &View, to_the_emptiest: bool) -> Vec<Move> {
    let mut wanted = view.wanted();
    let mut moves = Vec::new();
    for full in
        view.look.hosts.iter().filter(|load| wanted[&load.host] > load.cpus).collect::<Vec<_>>()
    {
        let Some(vm) = view.largest(&full.host) else { continue };
        let own = wants(vm);
        let has_room = |to: &&HostLoad| {
            to.takes_vms && to.host != full.host && wanted[&to.host] + own <= to.cpus
        };
        let mut targets = view.look.hosts.iter().filter(has_room);
        let to = if to_the_emptiest {
            targets.min_by(|a, b| wanted[&a.host].total_cmp(&wanted[&b.host]))
        } else {
            targets.next()
        };
        if let Some(to) = to {
            *wanted.entry(&to.host).or_default() += own;
            moves.push((vm.vm.clone(), to.host.clone()));
        }
    }
    moves
}
