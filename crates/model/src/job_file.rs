//! The job file, in YAML. Only `image` and `command` are required.
//!
//! ```yaml
//! name: tpch                # default: the file's name
//! image: debian
//! command: /opt/run.sh      # a text runs in a shell; a list is run as it is
//! env: {SCALE: "1"}
//! cpus: 1                   # or 1..4: it has 4 vCPUs, and while others want its host's CPUs the part of 1 of them
//! memory: 512MiB           # or 512MiB..2GiB: while it runs it gets up to 2 GiB, if its host and its tenant's quota have them
//! root: 4GiB                # default: the image's size
//! output: 1GiB              # of all outputs together; where it is given, /output has as much room
//! volumes:
//!   - volume: tpch-data
//!     mount: /data          # then /data1, /data2 …
//!     access: write         # write | read | clone
//!     ranks: [0]            # which VMs of a job with several ones have it; default: all
//! inputs:                   # files and directories, in the job's directory `inputs`
//!   - queries.sql           # of the submitter's machine, relative to the job file
//!   - {from: lib/run.sh, to: run.sh}
//!   - repo://physics/measured   # of the data repository
//! outputs: [/output]        # also patterns: /output/*.csv, results/** (relative to the job's directory)
//! outputs-to: runs/today    # a directory of the repository; default: jobs/JOB
//! keep-outputs: 30d         # then they are deleted; default: as the controller is told, else they stay
//! placement:
//!   start: anywhere         # anywhere | {site: NAME} | {host: NAME}
//!   move: auto              # auto | never
//! writes: {leave-site: never}   # or allowed, where it uses data that may not leave its site
//! ranks: {leave-site: never}    # or allowed: with such data VMs of a job with several may be at other sites
//! timeout: 10m              # of the command, from its start
//! stop-grace: 10s           # a process that is to end gets SIGTERM, and SIGKILL so much later
//! oom-kill: fail            # fail | ignore: if a process is killed because no memory is left, and the command goes on
//! priority: 0              # of a tenant's jobs, those with a higher number start first
//! restart: never           # never | on-host-failure
//! network: default         # default | none | user | the name of a network | bridge:NAME
//! publish: ["8080:80"]     # ports of the VM that are reached at the host of the network's gateway
//! count: 1                 # how many VMs: a gang of them starts and ends as one
//! firmware: bios           # bios | uefi | uefi-secure: what boots the image
//! tpm: false               # true: its VM has a TPM 2.0
//! together: web            # at one host with the other VMs of the tenant that say so
//! apart: db                # at no host that has another VM of the tenant that says so
//! mpi: false               # true: only the first VM runs the command, which starts the others' processes itself
//! budget: $1                # it starts only where the high end of its predicted price is not above that
//! deadline: 18:00           # the next such time, UTC; or in 2h, from its submission: the cheapest way that keeps it is chosen
//! waiting-costs: $0.25/h    # what an hour until its end is worth
//! ```
//!
//! `start` may also be written flat, `placement: {site: home}`. Sizes and durations are those of
//! [`crate::units`]. An error names its line and field.

use std::collections::BTreeMap;
use std::path::Path;

use crate::amounts::Range;
use crate::budget::MoneyRules;
use crate::data::{FileAddress, REPOSITORY_SCHEME};
use crate::inputs::check_input_path;
use crate::job::{
    Access, DEFAULT_OWNER, JobSpec, JobVolume, OomKill, Restart, STOP_GRACE_S_DEFAULT, Start,
};
use crate::limits::{
    CPUS, JOB_DISK_BYTES, JOB_VOLUMES, KEEP_OUTPUTS_S, Limit, MEMBERS, MEMORY_BYTES, OUTPUTS,
    PRIORITY, PUBLISHED, STOP_GRACE_S, TIMEOUT_S,
};
use crate::network::Publish;
use crate::prices::{HOUR, per};
use crate::spec::{
    check_beside, check_command, check_env, check_job_name, check_mount, check_output_path,
    check_outputs_to,
};
use crate::units::{parse_bytes, parse_duration};
use crate::vm::NetworkKind;
use crate::volume::BLOCK_BYTES;
use crate::yaml::{Document, Field};
use crate::{GroupName, HostId, HostRules, ImageName, LeaveSite, Problem, SiteId, VolumeName};

const MEMORY_BYTES_DEFAULT: u64 = 512 << 20;
const OUTPUT_BYTES_DEFAULT: u64 = 1 << 30;

/// The content of a job file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFile {
    /// The job to submit, checked ([`JobSpec::check`]).
    pub spec: JobSpec,
    /// What the job is given. [`JobSpec::inputs`] names the list that is made of it.
    pub inputs: Vec<InputFile>,
}

/// A file or directory that goes into the job's directory of inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Where it is.
    pub from: InputSource,
    /// Relative to the directory of the inputs.
    pub to: String,
}

/// Where an input is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputSource {
    /// On the submitter's machine, relative to the job file.
    Local(String),
    /// In the data repository.
    Repository(FileAddress),
}

/// The fields of a job file, in the order in which an error lists them.
const FIELDS: [&str; 32] = [
    "name",
    "image",
    "command",
    "env",
    "cpus",
    "memory",
    "root",
    "output",
    "volumes",
    "inputs",
    "outputs",
    "outputs-to",
    "keep-outputs",
    "placement",
    "writes",
    "ranks",
    "timeout",
    "stop-grace",
    "oom-kill",
    "priority",
    "restart",
    "network",
    "publish",
    "count",
    "mpi",
    "firmware",
    "tpm",
    "together",
    "apart",
    "budget",
    "deadline",
    "waiting-costs",
];

/// The fields that one job file has. Those that are left empty are not among them.
struct Fields<'a>(BTreeMap<&'static str, Field<'a>>);

impl<'a> Fields<'a> {
    fn of(root: &Field<'a>) -> Result<Self, Problem> {
        let found = FIELDS.into_iter().zip(root.fields(FIELDS)?);
        Ok(Self(found.filter_map(|(name, field)| Some((name, field?))).collect()))
    }

    /// `name` is one of [`FIELDS`].
    fn get(&self, name: &str) -> Option<&Field<'a>> {
        debug_assert!(FIELDS.contains(&name), "FIELDS lacks {name}");
        self.0.get(name)
    }

    fn read<T>(
        &self,
        name: &str,
        reader: impl FnOnce(&Field<'a>) -> Result<T, Problem>,
    ) -> Result<Option<T>, Problem> {
        self.get(name).map(reader).transpose()
    }
}

/// Parses a job file. Errors name `file_name`. Its stem is the job's default name.
///
/// # Errors
/// A [`Problem`] that names the line and the field.
pub fn parse(text: &str, file_name: &str) -> Result<JobFile, Problem> {
    let document = Document::parse(file_name, text)?;
    let root = document.root();
    let fields = Fields::of(&root)?;
    let image = fields.get("image").ok_or_else(|| missing(&root, "image", "image: debian"))?;
    let command =
        fields.get("command").ok_or_else(|| missing(&root, "command", "command: echo hello"))?;
    let (start, may_migrate) =
        fields.read("placement", read_placement)?.unwrap_or((Start::Anywhere, true));
    let cpus = fields
        .read("cpus", |f| read_number_range(f, &CPUS))?
        .unwrap_or(Range { least: 1, most: None });
    let memory = fields
        .read("memory", |f| read_size_range(f, &MEMORY_BYTES))?
        .unwrap_or(Range { least: MEMORY_BYTES_DEFAULT, most: None });
    let spec = JobSpec {
        name: read_name(fields.get("name"), &root, file_name)?,
        image: image.parse(ImageName::new)?,
        command: read_command(command)?,
        env: fields.read("env", read_env)?.unwrap_or_default(),
        cpus: cpus.least,
        cpus_max: cpus.most,
        memory_bytes: memory.least,
        memory_max_bytes: memory.most,
        root_bytes: fields.read("root", |f| read_size(f, &JOB_DISK_BYTES))?,
        output_bytes: fields
            .read("output", |f| read_size(f, &JOB_DISK_BYTES))?
            .unwrap_or(OUTPUT_BYTES_DEFAULT),
        has_output_room: fields.get("output").is_some(),
        volumes: fields.read("volumes", read_volumes)?.unwrap_or_default(),
        outputs: fields
            .read("outputs", read_outputs)?
            .unwrap_or_else(|| vec!["/output".to_owned()]),
        outputs_to: fields.read("outputs-to", read_outputs_to)?,
        keep_outputs_s: fields.read("keep-outputs", read_keep_outputs)?,
        start,
        may_migrate,
        writes: fields.read("writes", read_leave_site)?.unwrap_or(LeaveSite::Never),
        ranks: fields.read("ranks", read_leave_site)?.unwrap_or(LeaveSite::Never),
        timeout_s: fields.read("timeout", read_timeout)?,
        stop_grace_s: fields.read("stop-grace", read_stop_grace)?.unwrap_or(STOP_GRACE_S_DEFAULT),
        oom_kill: fields.read("oom-kill", read_oom_kill)?.unwrap_or_default(),
        inputs: None,
        owner: DEFAULT_OWNER.to_owned(),
        priority: fields.read("priority", |f| read_number(f, &PRIORITY))?.unwrap_or_default(),
        restart: fields.read("restart", read_restart)?.unwrap_or_default(),
        network: fields.read("network", read_network)?.unwrap_or_default(),
        publish: fields.read("publish", read_publish)?.unwrap_or_default(),
        count: fields.read("count", |f| read_number(f, &MEMBERS))?.unwrap_or(1),
        mpi: fields.read("mpi", read_bool)?.unwrap_or_default(),
        firmware: fields.read("firmware", |f| f.parse(str::parse))?.unwrap_or_default(),
        tpm: fields.read("tpm", read_bool)?.unwrap_or_default(),
        rules: HostRules {
            together: fields.read("together", |f| f.parse(GroupName::new))?,
            apart: fields.read("apart", |f| f.parse(GroupName::new))?,
        },
        money: read_money(&fields)?,
    };
    let inputs = fields.read("inputs", read_inputs)?.unwrap_or_default();
    spec.check()?;
    Ok(JobFile { spec, inputs })
}

fn read<T>(
    field: Option<Field<'_>>,
    reader: impl FnOnce(&Field<'_>) -> Result<T, Problem>,
) -> Result<Option<T>, Problem> {
    field.as_ref().map(reader).transpose()
}

fn missing(parent: &Field<'_>, name: &str, example: &str) -> Problem {
    parent.problem(format!("the field {name:?} is missing")).next(format!("add a line `{example}`"))
}

fn read_name(
    name: Option<&Field<'_>>,
    root: &Field<'_>,
    file_name: &str,
) -> Result<String, Problem> {
    match name {
        Some(field) => field.parse(|name| check_job_name(name).map(|()| name.to_owned())),
        None => {
            let stem = Path::new(file_name).file_stem().and_then(|stem| stem.to_str());
            let name = stem.unwrap_or_default();
            check_job_name(name).map(|()| name.to_owned()).map_err(|why| {
                root.problem(format!("the file's name can't name the job: {why}"))
                    .next("add a line `name: …`")
            })
        }
    }
}

fn read_command(field: &Field<'_>) -> Result<Vec<String>, Problem> {
    let words = if field.is_list() {
        texts(field)?
    } else {
        let script = field.text()?;
        if script.trim().is_empty() {
            return Err(field.problem("it is empty"));
        }
        vec!["/bin/sh".to_owned(), "-c".to_owned(), script.to_owned()]
    };
    check_command(&words).map_err(|why| field.problem(why))?;
    Ok(words)
}

fn texts(field: &Field<'_>) -> Result<Vec<String>, Problem> {
    field.list()?.iter().map(|item| item.text().map(str::to_owned)).collect()
}

fn read_env(field: &Field<'_>) -> Result<BTreeMap<String, String>, Problem> {
    let mut env = BTreeMap::new();
    for (name, value) in field.entries()? {
        let text = if value.is_null() { "" } else { value.text()? };
        check_env(name, text).map_err(|why| value.problem(why))?;
        env.insert(name.to_owned(), text.to_owned());
    }
    Ok(env)
}

/// A whole number within its limits.
fn read_number<T: TryFrom<i64>>(field: &Field<'_>, limit: &'static Limit) -> Result<T, Problem> {
    number_of(field, limit, field.parse(|text| parse_number(text, limit))?)
}

/// A whole number or a range of whole numbers, each end within its limits.
fn read_number_range(field: &Field<'_>, limit: &'static Limit) -> Result<Range<u32>, Problem> {
    let range = field.parse(|text| Range::parse(text, |end| parse_number(end, limit)))?;
    let end = |number: i64| number_of(field, limit, number);
    Ok(Range { least: end(range.least)?, most: range.most.map(end).transpose()? })
}

fn parse_number(text: &str, limit: &Limit) -> Result<i64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number of {}", limit.range()))
}

fn number_of<T: TryFrom<i64>>(
    field: &Field<'_>,
    limit: &'static Limit,
    number: i64,
) -> Result<T, Problem> {
    limit.check(number).map_err(|why| field.problem(why))?;
    T::try_from(number).map_err(|_| field.problem("it is too large"))
}

/// A size, rounded up to whole blocks.
fn read_size(field: &Field<'_>, limit: &'static Limit) -> Result<u64, Problem> {
    let bytes = limit.check(field.parse(parse_bytes)?).map_err(|why| field.problem(why))?;
    Ok(bytes.next_multiple_of(BLOCK_BYTES))
}

/// A size or a range of sizes, each end within its limits and rounded up to whole blocks.
fn read_size_range(field: &Field<'_>, limit: &'static Limit) -> Result<Range<u64>, Problem> {
    let range = field.parse(|text| Range::parse(text, parse_bytes))?;
    let end = |bytes: u64| {
        let bytes = limit.check(bytes).map_err(|why| field.problem(why))?;
        Ok::<_, Problem>(bytes.next_multiple_of(BLOCK_BYTES))
    };
    let (least, most) = (end(range.least)?, range.most.map(end).transpose()?);
    Ok(Range { least, most: most.filter(|most| *most > least) })
}

fn read_timeout(field: &Field<'_>) -> Result<u64, Problem> {
    TIMEOUT_S.check(field.parse(parse_duration)?).map_err(|why| field.problem(why))
}

fn read_stop_grace(field: &Field<'_>) -> Result<u64, Problem> {
    STOP_GRACE_S.check(field.parse(parse_duration)?).map_err(|why| field.problem(why))
}

fn read_oom_kill(field: &Field<'_>) -> Result<OomKill, Problem> {
    field.parse(|text| match text {
        "fail" => Ok(OomKill::Fail),
        "ignore" => Ok(OomKill::Ignore),
        _ => Err(format!("{text:?} is not known: use fail or ignore")),
    })
}

fn read_bool(field: &Field<'_>) -> Result<bool, Problem> {
    field.parse(|text| match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(format!("{text:?} is not known: use true or false")),
    })
}

fn read_network(field: &Field<'_>) -> Result<NetworkKind, Problem> {
    field.parse(|text| {
        text.parse().map_err(|why| format!("{why}; or use default, none, user or bridge:NAME"))
    })
}

fn read_money(fields: &Fields<'_>) -> Result<MoneyRules, Problem> {
    Ok(MoneyRules {
        budget: fields.read("budget", |f| f.parse(str::parse))?,
        deadline: fields.read("deadline", |f| f.parse(str::parse))?,
        waiting_costs_per_hour: fields
            .read("waiting-costs", |f| f.parse(|text| per(text, HOUR)))?,
    })
}

fn read_publish(field: &Field<'_>) -> Result<Vec<Publish>, Problem> {
    PUBLISHED.check(field.list()?.len()).map_err(|why| field.problem(why))?;
    field.list()?.iter().map(|item| item.parse(str::parse)).collect()
}

fn read_restart(field: &Field<'_>) -> Result<Restart, Problem> {
    field.parse(|text| match text {
        "never" => Ok(Restart::Never),
        "on-host-failure" => Ok(Restart::OnHostFailure),
        _ => Err(format!("{text:?} is not known: use never or on-host-failure")),
    })
}

fn read_volumes(field: &Field<'_>) -> Result<Vec<JobVolume>, Problem> {
    let mut volumes: Vec<JobVolume> = Vec::new();
    JOB_VOLUMES.check(field.list()?.len()).map_err(|why| field.problem(why))?;
    for (index, item) in field.list()?.iter().enumerate() {
        let [volume, mount, access, ranks] = item.fields(["volume", "mount", "access", "ranks"])?;
        let volume = volume.ok_or_else(|| missing(item, "volume", "volume: NAME"))?;
        let name = volume.parse(VolumeName::new)?;
        let default_mount = if index == 0 { "/data".to_owned() } else { format!("/data{index}") };
        let mount_path = read(mount, read_mount)?.unwrap_or(default_mount);
        let access = read(access, read_access)?.unwrap_or_default();
        let ranks = read(ranks, read_ranks)?.unwrap_or_default();
        let volume = JobVolume { volume: name, mount: mount_path, access, ranks };
        check_beside(&volume, &volumes).map_err(|why| item.problem(why))?;
        volumes.push(volume);
    }
    Ok(volumes)
}

fn read_ranks(field: &Field<'_>) -> Result<Vec<u32>, Problem> {
    let ranks = field.list()?;
    MEMBERS.check(ranks.len()).map_err(|why| field.problem(why))?;
    ranks.iter().map(|rank| rank.parse(|text| text.parse::<u32>())).collect()
}

fn read_access(field: &Field<'_>) -> Result<Access, Problem> {
    field.parse(|text| match text {
        "write" => Ok(Access::Write),
        "read" => Ok(Access::Read),
        "clone" => Ok(Access::Clone),
        _ => Err(format!("{text:?} is not an access: use write, read or clone")),
    })
}

fn read_mount(field: &Field<'_>) -> Result<String, Problem> {
    field.parse(|path| check_mount(path).map(|()| path.trim_end_matches('/').to_owned()))
}

fn read_output(field: &Field<'_>) -> Result<String, Problem> {
    field.parse(|path| check_output_path(path).map(|()| path.trim_end_matches('/').to_owned()))
}

fn read_outputs(field: &Field<'_>) -> Result<Vec<String>, Problem> {
    OUTPUTS.check(field.list()?.len()).map_err(|why| field.problem(why))?;
    field.list()?.iter().map(read_output).collect()
}

fn read_outputs_to(field: &Field<'_>) -> Result<String, Problem> {
    field.parse(|text| check_outputs_to(text).map(|_| text.to_owned()))
}

fn read_keep_outputs(field: &Field<'_>) -> Result<u64, Problem> {
    KEEP_OUTPUTS_S.check(field.parse(parse_duration)?).map_err(|why| field.problem(why))
}

fn read_inputs(field: &Field<'_>) -> Result<Vec<InputFile>, Problem> {
    let mut inputs: Vec<InputFile> = Vec::new();
    for item in field.list()? {
        let input = read_input(&item)?;
        if inputs.iter().any(|i| i.to == input.to) {
            return Err(item.problem(format!("two inputs can't both become {:?}", input.to)));
        }
        inputs.push(input);
    }
    Ok(inputs)
}

fn read_input(item: &Field<'_>) -> Result<InputFile, Problem> {
    if !item.is_map() {
        let from = item.text()?;
        return Ok(InputFile { from: read_source(item)?, to: default_to(item, from)? });
    }
    let [from, to] = item.fields(["from", "to"])?;
    let from = from.ok_or_else(|| missing(item, "from", "from: PATH"))?;
    let to = match to {
        None => default_to(&from, from.text()?)?,
        Some(to) => to.parse(|text| check_input_path(text).map(|()| text.to_owned()))?,
    };
    Ok(InputFile { from: read_source(&from)?, to })
}

fn read_source(field: &Field<'_>) -> Result<InputSource, Problem> {
    field.parse(|text| match text.starts_with(REPOSITORY_SCHEME) {
        true => text.parse().map(InputSource::Repository),
        false => Ok(InputSource::Local(text.to_owned())),
    })
}

/// The default destination of an input: the file's own name.
fn default_to(field: &Field<'_>, from: &str) -> Result<String, Problem> {
    let path = match from.strip_prefix(REPOSITORY_SCHEME) {
        // Without the tenant, which names no file.
        Some(rest) => rest.split_once('/').map_or("", |(_, path)| path),
        None => from,
    };
    match Path::new(path).file_name().and_then(|name| name.to_str()) {
        Some(name) => {
            check_input_path(name).map_err(|why| field.problem(why))?;
            Ok(name.to_owned())
        }
        None => Err(field
            .problem(format!("{from:?} has no file name"))
            .next("write {from: PATH, to: NAME}")),
    }
}

fn read_placement(field: &Field<'_>) -> Result<(Start, bool), Problem> {
    let [start, site, host, may_move] = field.fields(["start", "site", "host", "move"])?;
    let start = match (start, site, host) {
        (None, None, None) => Start::Anywhere,
        (None, Some(site), None) => Start::Site(site.parse(SiteId::new)?),
        (None, None, Some(host)) => Start::Host(host.parse(HostId::new)?),
        (Some(start), None, None) => read_start(&start)?,
        _ => return Err(field.problem("only one of start, site and host can be given")),
    };
    let may_migrate = read(may_move, |f| {
        f.parse(|text| match text {
            "auto" => Ok(true),
            "never" => Ok(false),
            _ => Err(format!("{text:?} is not known: use auto or never")),
        })
    })?;
    Ok((start, may_migrate.unwrap_or(true)))
}

fn read_leave_site(field: &Field<'_>) -> Result<LeaveSite, Problem> {
    let [leave_site] = field.fields(["leave-site"])?;
    let leave_site = leave_site.ok_or_else(|| missing(field, "leave-site", "leave-site: never"))?;
    leave_site.parse(str::parse)
}

fn read_start(field: &Field<'_>) -> Result<Start, Problem> {
    if !field.is_map() {
        return field.parse(|text| match text.split_once(' ') {
            None if text == "anywhere" => Ok(Start::Anywhere),
            Some(("site", name)) => SiteId::new(name).map(Start::Site).map_err(|e| e.to_string()),
            Some(("host", name)) => HostId::new(name).map(Start::Host).map_err(|e| e.to_string()),
            _ => Err(format!("{text:?} is not a place: use anywhere, site NAME or host NAME")),
        });
    }
    let [site, host] = field.fields(["site", "host"])?;
    match (site, host) {
        (Some(site), None) => Ok(Start::Site(site.parse(SiteId::new)?)),
        (None, Some(host)) => Ok(Start::Host(host.parse(HostId::new)?)),
        _ => Err(field.problem("one of site and host is wanted")),
    }
}

#[cfg(test)]
mod tests;
