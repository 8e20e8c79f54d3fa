//! A scenario as people write it.
//!
//! ```yaml
//! title: Skewed from the start
//! about: All VMs start at the first half of the hosts, and want what they want.
//! load: steady           # see `loads.rs`
//! start: half            # of the hosts have all VMs; or even: each host as many
//! hours: 6
//! look: 10s              # how often a rule looks at the cluster
//! hosts: 8
//! cpus: 8                # of each host
//! memory: 64GiB
//! sites: 1               # to which the hosts belong in turn
//! vms: 48
//! vm-memory: 1GiB
//! link: 100MiB           # in each second, between any two hosts
//! far: 0.3               # what a VM loses of its time at another site than its data; without this field VMs have no data
//! jobs: 60               # arrive in each hour, beside the VMs that are there all the time
//! failures: 1            # hosts that are away, each for 10 minutes
//! rules: [none, perigee] # instead of all
//! sizes: [10, 100]       # hosts, with VMs in proportion: how long decisions take
//! ```

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;

use perigee_model::job::Start;
use perigee_model::units::{parse_bytes, parse_duration};
use perigee_model::vm::Accelerator;
use perigee_model::yaml::{Document, Field};
use perigee_model::{HostId, JobId, Problem, SiteId};
use perigee_planner::HostFacts;
use perigee_planner::queue::{Demand, Holder, Waiting};

use super::loads::Kind;
use super::rules::Rule;

/// How many hosts there may be.
const HOSTS: RangeInclusive<usize> = 2..=20_000;

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
    pub link_bytes_per_s: u64,
    /// The share of its time that a VM loses at another site than its data; `None` if VMs have no data.
    pub far: Option<f64>,
    pub jobs_per_hour: u64,
    pub failures: u64,
    pub rules: Vec<Rule>,
    /// Numbers of hosts with which decisions are timed.
    pub sizes: Vec<usize>,
}

impl Scenario {
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
            boots: Vec::new(),
            local_blocks: None,
            pool_free_bytes: None,
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
    let [
        title,
        about,
        load,
        start,
        hours,
        look,
        hosts,
        cpus,
        memory,
        sites,
        vms,
        vm_memory,
        link,
        far,
        jobs,
        failures,
        rules,
        sizes,
    ] = root.fields([
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
        "far",
        "jobs",
        "failures",
        "rules",
        "sizes",
    ])?;
    let needed = |field: Option<Field>, name: &str| {
        let missing = || root.problem(format!("the field {name:?} is missing"));
        field.ok_or_else(missing)?.text().map(str::to_owned)
    };
    let starts_skewed = start.map(|field| field.parse(skewed)).transpose()?.unwrap_or(false);
    let rules = rules.map(|field| list(&field)).transpose()?;
    Ok(Scenario {
        title: needed(title, "title")?,
        about: needed(about, "about")?,
        load: load.map(|field| field.parse(Kind::parse)).transpose()?.unwrap_or(Kind::Steady),
        starts_skewed,
        length_s: number(hours, 6, 1..=168)? * 3600,
        look_s: look.map(|field| field.parse(look_s)).transpose()?.unwrap_or(10),
        hosts: number(hosts, 8, HOSTS)?,
        cpus: number(cpus, 8, 1..=1024)?,
        memory_bytes: bytes(memory, 64 << 30)?,
        sites: number(sites, 1, 1..=100)?,
        vms: number(vms, 48, 0..=200_000)?,
        vm_memory_bytes: bytes(vm_memory, 1 << 30)?,
        link_bytes_per_s: bytes(link, 100 << 20)?,
        far: far.map(|field| field.parse(share)).transpose()?,
        jobs_per_hour: number(jobs, 0, 0..=100_000)?,
        failures: number(failures, 0, 0..=1000)?,
        rules: rules.unwrap_or_else(|| Rule::ALL.to_vec()),
        sizes: sizes.map(|field| read_sizes(&field)).transpose()?.unwrap_or_default(),
    })
}

fn read_sizes(field: &Field<'_>) -> Result<Vec<usize>, Problem> {
    field.list()?.into_iter().map(|size| number(Some(size), 8, HOSTS)).collect()
}

fn skewed(text: &str) -> Result<bool, String> {
    match text {
        "half" => Ok(true),
        "even" => Ok(false),
        _ => Err("it is half or even".to_owned()),
    }
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

fn number<T>(field: Option<Field<'_>>, default: T, range: RangeInclusive<T>) -> Result<T, Problem>
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

fn bytes(field: Option<Field<'_>>, default: u64) -> Result<u64, Problem> {
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
    fn what_is_wrong_is_named_with_its_line() {
        for (line, said) in [
            ("load: heavy", "steady, noise"),
            ("hosts: 1", "from 2 to 20000"),
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
