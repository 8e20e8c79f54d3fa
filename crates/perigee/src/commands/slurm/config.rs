//! The file that says what the nodes of a Slurm cluster are: which VM each of them is.

use std::path::{Path, PathBuf};

use perigee_controller::user_data;
use perigee_model::amounts::Range;
use perigee_model::job::Start;
use perigee_model::labels::Labels;
use perigee_model::persistent_vm::{CloudInit, NewVm, NewVmVolume};
use perigee_model::units::{parse_bytes, parse_duration};
use perigee_model::vm::NetworkKind;
use perigee_model::yaml::{Document, Field};
use perigee_model::{ImageName, Problem, TenantName, VmId};

use crate::arguments::{count_range, size_range};
use crate::commands::{persistent, public_keys};

/// The key of the label by which a VM is known to be a node of Slurm; the value is the Slurm cluster's name.
pub const LABEL: &str = "slurm";

/// What stands in names of volumes and in user-data for the node's name.
const NODE: &str = "@NODE@";
/// What stands in user-data for the address of Slurm's controller.
const SLURMCTLD: &str = "@SLURMCTLD@";

/// The whole file.
#[derive(Debug)]
pub struct Config {
    /// `ClusterName` of slurm.conf.
    pub cluster: String,
    /// The address of slurmctld, as nodes reach it.
    slurmctld: Option<String>,
    /// Whose the VMs are; `None`: the tenant's of whoever asks.
    pub tenant: Option<TenantName>,
    /// Where it is written what was done.
    pub log: Log,
    /// The directory for what `reconcile` has seen before.
    pub state: PathBuf,
    /// How long `reconcile` sees a node that nobody uses before its VM ends.
    pub grace_s: u64,
    groups: Vec<Group>,
}

/// Where it is written what was done, beside standard output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Log {
    /// The system's log.
    Syslog,
    /// The end of this file.
    File(PathBuf),
}

/// Nodes whose names begin alike, and what their VMs are.
#[derive(Debug)]
struct Group {
    prefix: String,
    image: ImageName,
    cpus: Range<u32>,
    memory: Range<u64>,
    disk_bytes: Option<u64>,
    network: NetworkKind,
    /// As `VOLUME[:PATH][:ro]`.
    volumes: Vec<String>,
    start: Start,
    may_migrate: bool,
    user: Option<String>,
    ssh_keys: Vec<PathBuf>,
    user_data: Option<PathBuf>,
}

impl Config {
    /// # Errors
    /// `NotFound`, or `Invalid` with the line and the field.
    pub fn read(path: &Path) -> Result<Self, Problem> {
        let text = String::from_utf8(persistent::read(path)?).map_err(|_| {
            Problem::invalid(format!("can't read {}", path.display()), "it is no text")
        })?;
        Self::parse(&path.display().to_string(), &text)
    }

    fn parse(name: &str, text: &str) -> Result<Self, Problem> {
        let document = Document::parse(name, text)?;
        let root = document.root();
        let names = ["cluster", "slurmctld", "tenant", "log", "state", "grace", "nodes"];
        let [cluster, slurmctld, tenant, log, state, grace, nodes] = root.fields(names)?;
        let missing = |field: &str| root.problem(format!("{field} is missing"));
        let cluster = cluster.ok_or_else(|| missing("cluster"))?;
        let cluster = cluster.parse(|text| {
            Labels::parse_one(&format!("{LABEL}={text}")).map(|(_, cluster)| cluster)
        })?;
        let text = |field: &Field<'_>| field.text().map(str::to_owned);
        let nodes = nodes.ok_or_else(|| missing("nodes"))?;
        let groups: Vec<Group> = nodes.list()?.iter().map(group).collect::<Result<_, _>>()?;
        if groups.is_empty() {
            return Err(nodes.problem("it is empty"));
        }
        Ok(Self {
            cluster,
            slurmctld: slurmctld.as_ref().map(text).transpose()?,
            tenant: tenant.map(|field| field.parse(str::parse)).transpose()?,
            log: log.map_or(Ok(Log::Syslog), |field| field.parse(log_of))?,
            state: state
                .map_or(Ok("/var/lib/perigee-slurm".into()), |field| field.parse(absolute))?,
            grace_s: grace.map_or(Ok(120), |field| field.parse(grace_of))?,
            groups,
        })
    }

    /// Whether a node of this name is one of those that the file describes.
    pub fn has(&self, node: &str) -> bool {
        self.group(node).is_some()
    }

    /// The group with the longest prefix that fits.
    fn group(&self, node: &str) -> Option<&Group> {
        let fitting = self.groups.iter().filter(|group| node.starts_with(&group.prefix));
        fitting.max_by_key(|group| group.prefix.len())
    }

    fn of(&self, node: &str) -> Result<&Group, Problem> {
        self.group(node).ok_or_else(|| {
            let why = "no prefix in the configuration's `nodes` fits its name";
            Problem::not_found(format!("can't tell what node {node} is"), why)
        })
    }

    /// Whether the node's VM may have data of its guest's programs that no disk has yet, and that stays. What the file does not say is
    /// not known, and may be so.
    pub fn may_write_volumes(&self, node: &str) -> bool {
        self.group(node).is_none_or(|group| {
            let is_read_only = |text: &String| {
                persistent::volume(&text.replace(NODE, node)).is_ok_and(|volume| volume.read_only)
            };
            !group.volumes.iter().all(is_read_only)
        })
    }

    /// The VM that the node is.
    ///
    /// # Errors
    /// `NotFound` or `Invalid`, with what is wrong in the file or in one that the file names.
    pub fn vm(&self, node: &str, full_name: &str) -> Result<NewVm, Problem> {
        let what = format!("can't make node {node}");
        let group = self.of(node)?;
        let invalid = |why: String| Problem::invalid(&what, why);
        let name = VmId::new(full_name).map_err(|why| invalid(why.to_string()))?;
        let volume = |text: &String| persistent::volume(&text.replace(NODE, node));
        let volumes: Result<Vec<NewVmVolume>, String> = group.volumes.iter().map(volume).collect();
        let cloud_init = self.cloud_init(group, node)?;
        cloud_init.check(&what)?;
        Ok(NewVm {
            name,
            image: group.image.clone(),
            cpus: group.cpus.least,
            cpus_max: group.cpus.most,
            memory_bytes: group.memory.least,
            memory_max_bytes: group.memory.most,
            disk_bytes: group.disk_bytes,
            network: group.network.clone(),
            publish: Vec::new(),
            volumes: volumes.map_err(invalid)?,
            start: group.start.clone(),
            may_migrate: group.may_migrate,
            // Slurm has given the node's jobs to others by then.
            restart_elsewhere: false,
            stopped: false,
            cloud_init,
            firmware: Default::default(),
            hardware: Default::default(),
            rules: Default::default(),
            labels: [(LABEL.to_owned(), self.cluster.clone())].into_iter().collect(),
        })
    }

    fn cloud_init(&self, group: &Group, node: &str) -> Result<CloudInit, Problem> {
        let mut made = CloudInit { user: group.user.clone(), ..CloudInit::default() };
        for file in &group.ssh_keys {
            made.ssh_keys.extend(public_keys::read(file)?);
        }
        let Some(file) = &group.user_data else { return Ok(made) };
        let text = user_data::text_of(&persistent::read(file)?)?.replace(NODE, node);
        let text = match &self.slurmctld {
            Some(address) => text.replace(SLURMCTLD, address),
            None if text.contains(SLURMCTLD) => {
                let why = format!("{} has {SLURMCTLD}", file.display());
                return Err(Problem::invalid(format!("can't make node {node}"), why)
                    .next("name Slurm's controller in the configuration: slurmctld: ADDRESS"));
            }
            None => text,
        };
        user_data::check(&text)?;
        made.user_data = Some(text);
        Ok(made)
    }
}

/// Without one the first look would act, which may have come between two steps of Slurm.
fn grace_of(text: &str) -> Result<u64, String> {
    match parse_duration(text) {
        Ok(0) => Err("at least 1s is wanted".to_owned()),
        Ok(grace_s) => Ok(grace_s),
        Err(why) => Err(why.to_string()),
    }
}

fn log_of(text: &str) -> Result<Log, &'static str> {
    if text == "syslog" { Ok(Log::Syslog) } else { absolute(text).map(Log::File) }
}

fn absolute(text: &str) -> Result<PathBuf, &'static str> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("a path that begins with / is wanted") }
}

fn group(field: &Field<'_>) -> Result<Group, Problem> {
    let names = [
        "prefix",
        "image",
        "cpus",
        "memory",
        "disk",
        "network",
        "volumes",
        "host",
        "site",
        "move",
        "user",
        "ssh-keys",
        "user-data",
    ];
    let [prefix, image, cpus, memory, disk, network, volumes, host, site, moves, user, keys, data] =
        field.fields(names)?;
    let missing = |name: &str| field.problem(format!("{name} is missing"));
    let start = match (host, site) {
        (Some(_), Some(site)) => return Err(site.problem("only one of host and site is possible")),
        (Some(host), None) => Start::Host(host.parse(str::parse)?),
        (None, Some(site)) => Start::Site(site.parse(str::parse)?),
        (None, None) => Start::Anywhere,
    };
    let is_volume = |field: &Field<'_>| {
        let text = field.text()?;
        field.parse(|text| persistent::volume(&text.replace(NODE, "n")))?;
        Ok::<_, Problem>(text.to_owned())
    };
    let paths = |fields: Vec<Field<'_>>| -> Result<Vec<PathBuf>, Problem> {
        fields.iter().map(|field| field.parse(absolute)).collect()
    };
    Ok(Group {
        prefix: prefix.ok_or_else(|| missing("prefix"))?.text()?.to_owned(),
        image: image.ok_or_else(|| missing("image"))?.parse(str::parse)?,
        cpus: cpus.map_or(Ok(Range { least: 1, most: None }), |field| field.parse(count_range))?,
        memory: memory.ok_or_else(|| missing("memory"))?.parse(size_range)?,
        disk_bytes: disk.map(|field| field.parse(parse_bytes)).transpose()?,
        network: network.map(|field| field.parse(str::parse)).transpose()?.unwrap_or_default(),
        volumes: list(volumes)?.iter().map(is_volume).collect::<Result<_, _>>()?,
        start,
        may_migrate: moves.map_or(Ok(true), |field| field.parse(moves_of))?,
        user: user.map(|field| field.text().map(str::to_owned)).transpose()?,
        ssh_keys: paths(list(keys)?)?,
        user_data: data.map(|field| field.parse(absolute)).transpose()?,
    })
}

/// The values of a list that may be left out.
fn list(field: Option<Field<'_>>) -> Result<Vec<Field<'_>>, Problem> {
    field.map_or(Ok(Vec::new()), |field| field.list())
}

/// As in a job file.
fn moves_of(text: &str) -> Result<bool, &'static str> {
    match text {
        "auto" => Ok(true),
        "never" => Ok(false),
        _ => Err("auto or never is wanted"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
cluster: alpha
slurmctld: 192.0.2.1:6817
log: /var/log/slurm/perigee.log
grace: 5m
nodes:
  - prefix: cloud
    image: slurm-node
    cpus: 2
    memory: 2GiB
    network: bridge:br0
    volumes: ['books:/srv/books:ro']
  - prefix: cloudbig
    image: slurm-node
    memory: 1GiB..8GiB
    volumes: ['scratch-@NODE@:/scratch']
    site: home
    move: never
";

    #[test]
    fn a_node_is_the_vm_of_the_longest_prefix() {
        let config = Config::parse("slurm.yaml", FILE).expect("a configuration");
        assert_eq!((config.cluster.as_str(), config.grace_s), ("alpha", 300));
        assert_eq!(config.log, Log::File("/var/log/slurm/perigee.log".into()));
        let small = config.vm("cloud7", "acme~cloud7").expect("a VM");
        assert_eq!(
            (small.name.as_str(), small.cpus, small.memory_bytes),
            ("acme~cloud7", 2, 2 << 30)
        );
        assert_eq!(small.labels.get(LABEL), Some("alpha"));
        assert!(small.may_migrate && small.volumes[0].read_only);
        let big = config.vm("cloudbig1", "cloudbig1").expect("a VM");
        assert_eq!(big.volumes[0].volume.as_str(), "scratch-cloudbig1");
        assert_eq!((big.memory_max_bytes, big.may_migrate), (Some(8 << 30), false));
        assert!(config.may_write_volumes("cloudbig1") && !config.may_write_volumes("cloud7"));
        assert!(config.may_write_volumes("static1"), "the file does not say it");
        assert!(config.has("cloud1") && !config.has("static1"));
        assert!(config.vm("static1", "static1").is_err());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let wrong = |from: &str, to: &str| {
            let text = FILE.replacen(from, to, 1);
            Config::parse("slurm.yaml", &text).expect_err("it is wrong").to_string()
        };
        assert!(wrong("grace: 5m", "grace: 5").contains("slurm.yaml:4: grace"));
        assert!(wrong("grace: 5m", "grace: 0s").contains("at least 1s"));
        assert!(wrong("cluster: alpha", "cluster: a b").contains("slurm.yaml:1: cluster"));
        assert!(wrong("log: /var", "log: var").contains("begins with /"));
        assert!(wrong("books:/srv/books:ro", "books:rw").contains("nodes[0].volumes[0]"));
        assert!(wrong("    image: slurm-node\n", "").contains("image is missing"));
        assert!(wrong("    site: home", "    site: home\n    host: home1").contains("only one"));
        assert!(wrong("slurmctld", "slurm-ctld").contains("no such field"));
    }

    #[test]
    fn user_data_has_the_names_of_node_and_controller() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("user-data");
        std::fs::write(&file, "#!/bin/sh\necho @NODE@ @SLURMCTLD@\n").expect("written");
        let entry = format!("    image: slurm-node\n    user-data: {}", file.display());
        let text = FILE.replacen("    image: slurm-node", &entry, 1);
        let config = Config::parse("slurm.yaml", &text).expect("a configuration");
        let vm = config.vm("cloud1", "cloud1").expect("a VM");
        let said = vm.cloud_init.user_data.expect("user-data");
        assert_eq!(said, "#!/bin/sh\necho cloud1 192.0.2.1:6817\n");
        let without = text.replacen("slurmctld: 192.0.2.1:6817\n", "", 1);
        let config = Config::parse("slurm.yaml", &without).expect("a configuration");
        let problem = config.vm("cloud1", "cloud1").expect_err("nobody says where it is");
        assert!(problem.next.contains("slurmctld: ADDRESS"), "{problem}");
    }
}
