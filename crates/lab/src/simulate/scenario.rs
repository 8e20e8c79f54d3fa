//! A scenario as people write it.
//!
//! ```yaml
//! title: Skewed from the start
//! about: All VMs start at the first half of the hosts, and want what they want.
//! load: steady           # see `loads.rs`
//! start: half            # of the hosts have all VMs; or even: each host as many
//! hours: 6                # at most 50000
//! look: 10s              # how often a rule looks at the cluster
//! hosts: 8
//! cpus: 8                # of each host
//! memory: 64GiB
//! sites: 1               # to which the hosts belong in turn
//! vms: 48
//! vm-memory: 1GiB
//! link: 100MiB           # in each second and direction: each host's card, which all shares that goes over it
//! uplink: 1GiB           # the same of each site's way to the others; without this field only the cards limit
//! far: 0.3               # what a VM loses of its time at another site than its data; without this field VMs have no data
//! reads: 10MiB           # what such a VM reads of its data in each second; what it does not get, it loses too
//! jobs: 60               # arrive in each hour, beside the VMs that are there all the time; also a log, or a list: `jobs.rs`
//! boot: 10s              # CPU seconds of the boot of a VM whose job computes
//! overcommit: 16         # vCPUs that are placed for each processor
//! starts: 1              # VMs of such jobs that start at a host at once; without this field as many as have room
//! failures: 1            # hosts that are away, each for 10 minutes
//! rules: [none, perigee] # instead of all
//! sizes: [10, 100]       # hosts, with VMs in proportion: how long decisions take
//! rent:                  # hosts that are rented, with jobs and rules of its own: `rent/file.rs`
//! ```

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

use perigee_model::job::Start;
use perigee_model::units::{format_bytes, parse_bytes, parse_duration};
use perigee_model::vm::Accelerator;
use perigee_model::yaml::{Document, Field};
use perigee_model::{HostId, JobId, Problem, SiteId};
use perigee_planner::HostFacts;
use perigee_planner::queue::{Demand, Holder, Waiting};

use super::jobs::{Job, Jobs, Like};
use super::loads::Kind;
use super::rent::{self, Renting};
use super::rules::Rule;

/// vCPUs of each VM that has no job which computes.
pub const VM_VCPUS: u32 = 8;
/// How many hosts there may be.
const HOSTS: RangeInclusive<usize> = 2..=20_000;
/// How long may be simulated. Logs are of months, and of a few years.
const HOURS: RangeInclusive<u64> = 1..=50_000;

/// What is simulated, without the seed.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub title: String,
    pub about: String,
    pub load: Kind,
    /// Whether only the first half of the hosts have VMs at first.
    pub starts_skewed: bool,
    pub length_s: u64,
    pub look_s: u64,
    pub hosts: usize,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub sites: usize,
    pub vms: usize,
    pub vm_memory_bytes: u64,
    /// Of each host's card, in each direction.
    pub link_bytes_per_s: u64,
    /// Of each site's way to the other sites, in each direction; `None`: it never limits.
    pub uplink_bytes_per_s: Option<u64>,
    /// The share of its time that a VM loses at another site than its data; `None` if VMs have no data.
    pub far: Option<f64>,
    /// What a VM reads of data at another host in each second.
    pub reads_bytes_per_s: u64,
    pub jobs: Jobs,
    pub start: StartOfJob,
    /// vCPUs that are placed for each processor.
    pub overcommit: u32,
    /// How many VMs of jobs that compute may start at a host at once.
    pub starts: u32,
    pub failures: u64,
    pub rules: Vec<Rule>,
    /// Numbers of hosts with which decisions are timed.
    pub sizes: Vec<usize>,
    /// What can be rented. Then the other jobs and rules do not count.
    pub rent: Option<Renting>,
}

/// What a job takes that computes, before and after that.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StartOfJob {
    /// Until its VM is started. That needs no processor.
    pub stage_s: f64,
    /// CPU seconds of the boot, with one processor.
    pub boot_s: f64,
    /// CPU seconds from the end of its command to its own.
    pub end_s: f64,
}

/// What of a scenario limits its jobs.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub hosts: usize,
    /// Processors of each host, and vCPUs that are placed there.
    pub cpus: u32,
    pub vcpus: u32,
    pub memory_bytes: u64,
    /// VMs that are there all the time, and what a VM has of which nothing else is said.
    pub vms: usize,
    pub vm_memory_bytes: u64,
    pub length_s: u64,
}

/// What to do if something never starts.
pub const MORE_ROOM: &str = "give the scenario more `hosts`, `cpus`, `overcommit` or `memory`, fewer `vms`, or VMs and jobs that need less";

impl Machine {
    /// # Errors
    /// Why the job would never start.
    pub fn check(&self, job: &Job) -> Result<(), String> {
        let vm = job.size();
        let room = self.room(vm)?;
        if room < u64::from(job.vms) {
            return Err(format!("the cluster has room for {room} of its {} VMs", job.vms));
        }
        self.check_beside_vms(vm, u64::from(job.vms))
    }

    /// # Errors
    /// Why a VM that is there all the time, or one that comes by itself, would never start.
    fn check_vms(&self, jobs: &Jobs) -> Result<(), String> {
        let vm = Demand { cpus: VM_VCPUS, memory_bytes: self.vm_memory_bytes };
        if self.vms > 0 {
            let room = self.room(vm)?;
            if room < self.vms as u64 {
                return Err(format!("the cluster has room for {room} of the {} VMs", self.vms));
            }
        }
        let Jobs::AtRandom(random) = jobs else { return Ok(()) };
        let one = match random.like {
            // The largest one.
            Like::Borg => Demand { cpus: self.cpus, ..vm },
            Like::Azure | Like::Pareto => vm,
        };
        match random.per_hour {
            0 => Ok(()),
            _ => self.room(one).and_then(|_| self.check_beside_vms(one, 1)),
        }
    }

    /// How many such VMs the cluster has room for, if no other is there.
    fn room(&self, vm: Demand) -> Result<u64, String> {
        let host = Demand { cpus: self.vcpus, memory_bytes: self.memory_bytes };
        match u64::from(host.holds(vm)) * self.hosts as u64 {
            0 => Err(format!(
                "no host has room for {} vCPUs and {}: each has {} vCPUs and {}",
                vm.cpus,
                format_bytes(vm.memory_bytes),
                host.cpus,
                format_bytes(host.memory_bytes)
            )),
            room => Ok(room),
        }
    }

    /// VMs that are there all the time never make room.
    fn check_beside_vms(&self, vm: Demand, count: u64) -> Result<(), String> {
        let (hosts, vms) = (self.hosts as u64, self.vms as u64);
        let left = |of_host: u64, of_vm: u64| {
            hosts.saturating_mul(of_host).saturating_sub(vms.saturating_mul(of_vm))
        };
        let cpus = left(self.vcpus.into(), VM_VCPUS.into());
        let memory_bytes = left(self.memory_bytes, self.vm_memory_bytes);
        let needs = (count * u64::from(vm.cpus), count.saturating_mul(vm.memory_bytes));
        if needs.0 > cpus || needs.1 > memory_bytes {
            return Err(format!(
                "it needs {} vCPUs and {}, and the {vms} VMs that are there all the time leave {cpus} vCPUs and {} of all hosts",
                needs.0,
                format_bytes(needs.1),
                format_bytes(memory_bytes)
            ));
        }
        Ok(())
    }
}

impl Scenario {
    /// Whether VMs or jobs have data at a host.
    pub fn has_data(&self) -> bool {
        self.far.is_some() || self.jobs.have_data()
    }

    /// How fast something is sent that is alone on the way.
    pub fn rate_bytes_per_s(&self, is_one_site: bool) -> u64 {
        let uplink = self.uplink_bytes_per_s.filter(|_| !is_one_site);
        uplink.map_or(self.link_bytes_per_s, |uplink| uplink.min(self.link_bytes_per_s))
    }

    /// A host on which nothing runs, as the planner knows one.
    pub fn host(&self, id: HostId, site: SiteId) -> HostFacts {
        HostFacts {
            id,
            site,
            cpus: self.cpus,
            memory_free_bytes: self.memory_bytes,
            running_vcpus: 0,
            cpu_load: None,
            takes_jobs: true,
            packs: false,
            accelerator: Accelerator::Kvm,
            cpu_model: String::new(),
            boots: Arc::default(),
            local_blocks: None,
            pool_free_bytes: None,
            price: None,
            measured: None,
        }
    }

    /// A job with one vCPU that has just begun to wait, and may start anywhere.
    pub fn waiting(&self, job: JobId) -> Waiting {
        Waiting {
            holder: Holder::of(&job, "simulated"),
            job,
            priority: 0,
            submitted: 1,
            waited_ms: 0,
            demand: Demand { cpus: 1, memory_bytes: self.vm_memory_bytes },
            quota_cpus: 1,
            count: 1,
            start: Start::Anywhere,
            volumes: Vec::new(),
            avoid: BTreeSet::new(),
            groups: Default::default(),
            lost_at: Vec::new(),
            blocked: None,
        }
    }
}

/// # Errors
/// The file cannot be read, or a field is wrong: then the problem names the line and the field.
pub fn read(path: &Path) -> Result<Scenario, Problem> {
    let name = path.display().to_string();
    let what = || format!("can't read the scenario {name}");
    let text = std::fs::read_to_string(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Problem::not_found(what(), error),
        _ => Problem::invalid(what(), error),
    })?;
    parse(&text, &name)
}

pub fn parse(text: &str, name: &str) -> Result<Scenario, Problem> {
    let document = Document::parse(name, text)?;
    let root = document.root();
    let mut given = Given { root: &root, fields: root.fields(FIELDS)? };
    let overcommit = number(given.take("overcommit").as_ref(), 16, 1..=64)?;
    let machine = Machine {
        hosts: number(given.take("hosts").as_ref(), 8, HOSTS)?,
        cpus: number(given.take("cpus").as_ref(), 8, 1..=1024)?,
        vcpus: 0,
        memory_bytes: bytes(given.take("memory"), 64 << 30)?,
        vms: number(given.take("vms").as_ref(), 48, 0..=200_000)?,
        vm_memory_bytes: bytes(given.take("vm-memory"), 1 << 30)?,
        length_s: number(given.take("hours").as_ref(), 6, HOURS)? * 3600,
    };
    let machine = Machine { vcpus: machine.cpus * overcommit, ..machine };
    let dir = Path::new(name).parent().unwrap_or(Path::new(""));
    let jobs = given.take("jobs").map(|jobs| Jobs::parse(&jobs, dir, &machine)).transpose()?;
    let rules = given.take("rules").map(|field| list(&field)).transpose()?;
    let mut scenario = Scenario {
        title: given.needed("title")?,
        about: given.needed("about")?,
        load: given.parsed("load", Kind::parse)?.unwrap_or(Kind::Steady),
        starts_skewed: given.parsed("start", skewed)?.unwrap_or(false),
        length_s: machine.length_s,
        look_s: given.parsed("look", look_s)?.unwrap_or(10),
        hosts: machine.hosts,
        cpus: machine.cpus,
        memory_bytes: machine.memory_bytes,
        sites: number(given.take("sites").as_ref(), 1, 1..=100)?,
        vms: machine.vms,
        vm_memory_bytes: machine.vm_memory_bytes,
        link_bytes_per_s: link(given.take("link"))?.unwrap_or(100 << 20),
        uplink_bytes_per_s: link(given.take("uplink"))?,
        far: given.parsed("far", share)?,
        reads_bytes_per_s: given.parsed("reads", parse_bytes)?.unwrap_or(0),
        jobs: jobs.unwrap_or(Jobs::at_random(0, Like::Pareto, 0)),
        start: StartOfJob {
            boot_s: given.parsed("boot", parse_duration)?.unwrap_or(0) as f64,
            ..StartOfJob::default()
        },
        overcommit,
        starts: number(given.take("starts").as_ref(), u32::MAX, 1..=1000)?,
        failures: number(given.take("failures").as_ref(), 0, 0..=1000)?,
        rules: Vec::new(),
        sizes: given.take("sizes").map(|field| read_sizes(&field)).transpose()?.unwrap_or_default(),
        rent: given.take("rent").map(|field| rent::parse(&field)).transpose()?,
    };
    machine.check_vms(&scenario.jobs).map_err(|why| {
        let what = format!("can't simulate {name}: some VMs would wait for ever");
        Problem::invalid(what, why).next(MORE_ROOM)
    })?;
    let all = || Rule::all(scenario.has_data());
    scenario.rules = rules.unwrap_or_else(all);
    Ok(scenario)
}

const FIELDS: [&str; 24] = [
    "title",
    "about",
    "load",
    "start",
    "hours",
    "look",
    "hosts",
    "cpus",
    "memory",
    "sites",
    "vms",
    "vm-memory",
    "link",
    "uplink",
    "far",
    "reads",
    "jobs",
    "boot",
    "overcommit",
    "starts",
    "failures",
    "rules",
    "sizes",
    "rent",
];

/// The fields of the file.
struct Given<'f, 'd> {
    root: &'f Field<'d>,
    fields: [Option<Field<'d>>; FIELDS.len()],
}

impl<'d> Given<'_, 'd> {
    /// A field that is read once.
    fn take(&mut self, name: &str) -> Option<Field<'d>> {
        let place = FIELDS.iter().position(|field| *field == name)?;
        self.fields[place].take()
    }

    fn needed(&mut self, name: &str) -> Result<String, Problem> {
        let field = self.take(name);
        let missing = || self.root.problem(format!("the field {name:?} is missing"));
        field.ok_or_else(missing)?.text().map(str::to_owned)
    }

    fn parsed<T, E: std::fmt::Display>(
        &mut self,
        name: &str,
        parse: impl FnOnce(&'d str) -> Result<T, E>,
    ) -> Result<Option<T>, Problem> {
        self.take(name).map(|field| field.parse(parse)).transpose()
    }
}

fn read_sizes(field: &Field<'_>) -> Result<Vec<usize>, Problem> {
    field.list()?.into_iter().map(|size| number(Some(&size), 8, HOSTS)).collect()
}

fn skewed(text: &str) -> Result<bool, String> {
    match text {
        "half" => Ok(true),
        "even" => Ok(false),
        _ => Err("it is half or even".to_owned()),
    }
}

/// A slower link would never have sent a VM that changes its memory.
fn link(field: Option<Field<'_>>) -> Result<Option<u64>, Problem> {
    const LEAST: u64 = 8 << 20;
    let Some(field) = field else { return Ok(None) };
    let bytes = field.parse(parse_bytes)?;
    if bytes < LEAST { Err(field.problem("it is at least 8MiB")) } else { Ok(Some(bytes)) }
}

fn look_s(text: &str) -> Result<u64, String> {
    let seconds = parse_duration(text).map_err(|error| error.to_string())?;
    if (1..=600).contains(&seconds) { Ok(seconds) } else { Err("it is 1s to 10m".to_owned()) }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "it is a share, 0 to 1".to_owned())
}

fn list(field: &Field<'_>) -> Result<Vec<Rule>, Problem> {
    field.list()?.iter().map(|rule| rule.parse(Rule::parse)).collect()
}

pub(super) fn number<T>(
    field: Option<&Field<'_>>,
    default: T,
    range: RangeInclusive<T>,
) -> Result<T, Problem>
where
    T: std::str::FromStr + PartialOrd + std::fmt::Display,
{
    let (least, most) = range.into_inner();
    let Some(field) = field else { return Ok(default) };
    field.parse(|text| {
        let number = text.parse().ok().filter(|number| (&least..=&most).contains(&number));
        number.ok_or_else(|| format!("it is a whole number from {least} to {most}"))
    })
}

pub(super) fn bytes(field: Option<Field<'_>>, default: u64) -> Result<u64, Problem> {
    let Some(field) = field else { return Ok(default) };
    let bytes = field.parse(parse_bytes)?;
    if bytes == 0 { Err(field.problem("it is more than 0")) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_that_names_little_has_the_rest_by_default() {
        let scenario =
            parse("title: T\nabout: A\nload: square\nrules: [none, perigee]\n", "s.yaml");
        let scenario = scenario.expect("a scenario");
        assert_eq!((scenario.load, scenario.hosts, scenario.look_s), (Kind::Square, 8, 10));
        assert_eq!(scenario.rules, [Rule::None, Rule::Perigee]);
    }

    #[test]
    fn what_would_wait_for_ever_is_said() {
        for (lines, said) in [
            (
                "cpus: 1\novercommit: 4\n",
                "no host has room for 8 vCPUs and 1 GiB: each has 4 vCPUs",
            ),
            ("memory: 512MiB\n", "no host has room"),
            ("hosts: 2\ncpus: 4\n", "room for 16 of the 48 VMs"),
            ("vms: 0\ncpus: 1\novercommit: 4\njobs: 60\n", "no host has room for 8 vCPUs"),
            ("vms: 128\novercommit: 16\nhosts: 8\njobs: 60\nmemory: 16GiB\n", "leave"),
            ("vms: 16\nhosts: 2\ncpus: 4\njobs: [{compute: 1s}]\n", "leave 0 vCPUs"),
        ] {
            let text = format!("title: T\nabout: A\n{lines}");
            let shown = format!("{:?}", parse(&text, "s.yaml").expect_err(lines));
            assert!(shown.contains(said) && shown.contains("more `hosts`"), "{shown}");
        }
        let small = "title: T\nabout: A\nvms: 0\ncpus: 1\novercommit: 4\n";
        parse(small, "s.yaml").expect("nothing waits");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (line, said) in [
            ("load: heavy", "steady, noise"),
            ("hosts: 1", "from 2 to 20000"),
            ("jobs: 401\nhours: 50000", "from 0 to 400"),
            ("rules: [best]", "none, random"),
            ("far: 2", "0 to 1"),
            ("colour: red", "no such field"),
        ] {
            let text = format!("title: T\nabout: A\n{line}\n");
            let problem = parse(&text, "s.yaml").expect_err(line);
            let shown = format!("{problem:?}");
            assert!(shown.contains("s.yaml:3") && shown.contains(said), "{shown}");
        }
    }
}
