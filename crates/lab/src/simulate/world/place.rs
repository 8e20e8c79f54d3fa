//! Where a job starts, of the hosts that have room for it: as the rule says.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::job::Start;
use perigee_model::{HostId, VolumeName};
use perigee_planner::queue::NotChosen;
use perigee_planner::{
    Cluster, CopyFacts, JobFacts, LinkFacts, LinkForMoves, Snapshot, Traits, VolumeFacts, plan,
};

use super::World;
use super::start::Waits;
use super::work::Work;
use crate::random::Random;
use crate::simulate::price::probe;
use crate::simulate::rules::Rule;

/// The hosts, as the rule sees them at one pass of the queue.
pub(super) struct Places<'w> {
    world: &'w World<'w>,
    /// Processors that the VMs at each host want, from the first job on whose place depends on that.
    wanted: Option<Vec<f64>>,
    /// What the jobs want that this pass has placed, each with the number of its host.
    placed: Vec<(usize, f64)>,
    /// What the planner knows, from the first job on for which the planner is asked. The hosts' index is kept from one pass to the next,
    /// as the controller does.
    cluster: Option<Cluster>,
    /// Whether this pass has told the planner what is placed at each host.
    is_current: bool,
}

impl<'w> Places<'w> {
    /// `cluster` is what the pass before has left, if the same hosts are up.
    pub fn of(world: &'w World<'w>, cluster: Option<Cluster>) -> Self {
        Self { world, wanted: None, placed: Vec::new(), cluster, is_current: false }
    }

    /// For the next pass.
    pub fn into_cluster(self) -> Option<Cluster> {
        self.cluster
    }

    fn wanted(&mut self) -> &[f64] {
        let (world, placed) = (self.world, &self.placed);
        self.wanted.get_or_insert_with(|| {
            let of_vm = |vm: &usize| {
                let vm = &world.vms[*vm];
                vm.work.as_ref().map_or(vm.wanted, Work::will_want)
            };
            let hosts = world.hosts.iter();
            let mut wanted: Vec<f64> =
                hosts.map(|host| host.vms.iter().map(of_vm).sum::<f64>()).collect();
            for (host, more) in placed {
                wanted[*host] += more;
            }
            wanted
        })
    }

    /// One of the hosts. The next one is chosen as if a job that computes ran there.
    ///
    /// # Errors
    /// Why it waits.
    pub fn choose(
        &mut self,
        waits: &Waits,
        hosts: &[HostId],
        luck: &mut Random,
    ) -> Result<HostId, NotChosen> {
        let chosen = self.by_rule(waits, hosts, luck)?;
        let world = self.world;
        if let Some(work) = &world.vms[waits.vms[0]].work {
            let (host, more) = (world.host_numbers[&chosen], work.will_want());
            self.placed.push((host, more));
            if let Some(wanted) = &mut self.wanted {
                wanted[host] += more;
            }
        }
        Ok(chosen)
    }

    fn by_rule(
        &mut self,
        waits: &Waits,
        hosts: &[HostId],
        luck: &mut Random,
    ) -> Result<HostId, NotChosen> {
        let world = self.world;
        let data = world.vms[waits.vms[0]].data.map(|home| &world.hosts[home].id);
        let no_room = || NotChosen::from("no host has room".to_owned());
        let chosen = match (world.rule, data) {
            (Rule::DataLocal, Some(home)) => {
                let full = || NotChosen::from(format!("{home}, which has its data, has no room"));
                return hosts.iter().find(|host| *host == home).cloned().ok_or_else(full);
            }
            (Rule::Perigee, Some(home)) if waits.job.is_some() => {
                return self.planned(waits, home, hosts);
            }
            (Rule::FirstFit, _) => hosts.first(),
            (Rule::Random, _) => luck.pick(hosts),
            _ => {
                let wanted = self.wanted();
                let all = hosts.iter().map(|host| (wanted[world.host_numbers[host]], host));
                all.min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, host)| host)
            }
        };
        chosen.cloned().ok_or_else(no_room)
    }

    /// Where the planner would start the job.
    fn planned(
        &mut self,
        waits: &Waits,
        home: &HostId,
        hosts: &[HostId],
    ) -> Result<HostId, NotChosen> {
        let mut cluster = self.cluster.take().unwrap_or_else(|| cluster(self.world));
        if !std::mem::replace(&mut self.is_current, true) {
            for host in self.world.hosts.iter().filter(|host| host.is_up) {
                let placed = self.world.placed_vcpus(host);
                cluster.set_placed(&host.id, placed, host.free_memory_bytes);
            }
        }
        cluster.start_only_at(hosts);
        let (history, others) = (Vec::new(), Vec::new());
        let job = facts(self.world, waits, home);
        let snapshot = Snapshot { cluster, job, history, others };
        let planned = plan(&snapshot).map_err(|refused| refused.to_string());
        let start = planned.and_then(|plan| {
            let start = plan.chosen().map(|option| option.start.clone());
            start.filter(|host| hosts.contains(host)).ok_or_else(|| "no host has room".to_owned())
        });
        let mut cluster = snapshot.cluster;
        let size = self.world.vms[waits.vms[0]].size;
        // The next one is chosen as if this one ran there.
        if let Ok(host) = &start {
            cluster.occupy(host, size.cpus, size.memory_bytes);
        }
        self.cluster = Some(cluster);
        start.map_err(NotChosen::from)
    }
}

/// The hosts that are up, with no VM, and a pair of them for each two sites and for each site.
fn cluster(world: &World) -> Cluster {
    let scenario = world.scenario;
    let up = world.hosts.iter().filter(|host| host.is_up);
    let hosts = up.clone().map(|host| scenario.host(host.id.clone(), host.site.clone()));
    let mut links = BTreeMap::new();
    for from in up.clone() {
        // A site's first hosts stand for it.
        let of_site = |to: usize| {
            let mut there = up.clone().filter(|host| host.site_number == to);
            there.find(|host| host.id != from.id)
        };
        for to in 0..scenario.sites {
            if links.contains_key(&(from.site_number, to)) {
                continue;
            }
            let Some(to) = of_site(to) else { continue };
            let is_one_site = from.site_number == to.site_number;
            let link = LinkFacts {
                from: from.id.clone(),
                to: to.id.clone(),
                from_site: from.site.clone(),
                to_site: to.site.clone(),
                probe: probe(scenario, is_one_site),
                blocks: None,
                moves: LinkForMoves { wait_s: Some(0.0), max_bytes_per_s: None },
            };
            links.insert((from.site_number, to.site_number), link);
        }
    }
    Cluster {
        hosts: hosts.collect(),
        links: links.into_values().collect(),
        probe_request_bytes: 8192,
        past_moves: Arc::default(),
    }
}

/// A new kind of job, whose data are at that host.
fn facts(world: &World, waits: &Waits, home: &HostId) -> JobFacts {
    let size = world.vms[waits.vms[0]].size;
    let bytes = waits.job.map_or(0, |job| world.jobs[job].reads_bytes());
    let traits = Traits {
        name: "job".to_owned(),
        cpus: size.cpus,
        memory_bytes: size.memory_bytes,
        image: "image".to_owned(),
        inputs: String::new(),
        data_bytes: vec![bytes],
    };
    let volume = VolumeFacts {
        volume: VolumeName::new("data").expect("letters"),
        home: home.clone(),
        allocated_bytes: bytes,
        only_read: true,
        copy: CopyFacts { bytes, ..CopyFacts::default() },
    };
    JobFacts {
        traits,
        memory_bytes: size.memory_bytes,
        start: Start::Anywhere,
        may_migrate: true,
        uses_confined: false,
        volumes: vec![volume],
        dirty_bytes_per_s: Some(0),
        money: Default::default(),
        gang: None,
    }
}
