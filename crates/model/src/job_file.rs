//! The job file: YAML, every field optional but `image` and `command`.
//!
//! ```yaml
//! name: tpch                # default: the file's name
//! image: debian
//! command: /opt/run.sh      # a text runs in a shell; a list is run as it is
//! env: {SCALE: "1"}
//! cpus: 1
//! memory: 512MiB
//! root: 4GiB                # default: the image's size
//! output: 1GiB
//! volumes:
//!   - volume: tpch-data
//!     mount: /data          # then /data1, /data2 …
//!     access: write         # write | read | clone
//! inputs:                   # from the machine that submits, to the job's directory
//!   - queries.sql
//!   - {from: lib/run.sh, to: run.sh}
//! outputs: [/output]
//! placement:
//!   start: anywhere         # anywhere | {site: NAME} | {host: NAME}
//!   move: auto              # auto | never
//! timeout: 10m
//! priority: 0              # the higher, the sooner
//! restart: never           # never | on-host-failure
//! ```
//!
//! `start` may also be written flat, `placement: {site: home}`. Sizes and durations are those of
//! [`crate::units`]. What is wrong is reported with its line and field.

use std::collections::BTreeMap;
use std::path::Path;

use crate::job::{Access, DEFAULT_OWNER, JobSpec, JobVolume, Restart, Start};
use crate::limits::{
    CPUS, JOB_DISK_BYTES, JOB_VOLUMES, Limit, MEMORY_BYTES, OUTPUTS, PRIORITY, TIMEOUT_S,
};
use crate::spec::{
    check_beside, check_command, check_env, check_guest_path, check_job_name, check_mount,
};
use crate::units::{parse_bytes, parse_duration};
use crate::volume::BLOCK_BYTES;
use crate::yaml::{Document, Field};
use crate::{HostId, ImageName, Problem, SiteId, VolumeName};

const MEMORY_BYTES_DEFAULT: u64 = 512 << 20;
const OUTPUT_BYTES_DEFAULT: u64 = 1 << 30;

/// What a job file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFile {
    /// The job to submit, checked ([`JobSpec::check`]).
    pub spec: JobSpec,
    /// To be uploaded by whoever submits the job; [`JobSpec::inputs`] then names the upload.
    pub inputs: Vec<InputFile>,
}

/// A file or directory on the submitter's machine that goes into the job's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Relative to the job file.
    pub from: String,
    /// Relative to the job's directory.
    pub to: String,
}

/// Reads a job file. `file_name` is what errors call it; its stem is the job's default name.
///
/// # Errors
/// [`Problem`] that names line and field.
pub fn parse(text: &str, file_name: &str) -> Result<JobFile, Problem> {
    let document = Document::parse(file_name, text)?;
    let root = document.root();
    let [
        name,
        image,
        command,
        env,
        cpus,
        memory,
        root_size,
        output,
        volumes,
        inputs,
        outputs,
        placement,
        timeout,
        priority,
        restart,
    ] = root.fields([
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
        "placement",
        "timeout",
        "priority",
        "restart",
    ])?;
    let image = image.ok_or_else(|| missing(&root, "image", "image: debian"))?;
    let command = command.ok_or_else(|| missing(&root, "command", "command: echo hello"))?;
    let (start, may_migrate) = read(placement, read_placement)?.unwrap_or((Start::Anywhere, true));
    let spec = JobSpec {
        name: read_name(name.as_ref(), &root, file_name)?,
        image: image.parse(ImageName::new)?,
        command: read_command(&command)?,
        env: read(env, read_env)?.unwrap_or_default(),
        cpus: read(cpus, |f| read_number(f, &CPUS))?.unwrap_or(1),
        memory_bytes: read(memory, |f| read_size(f, &MEMORY_BYTES))?
            .unwrap_or(MEMORY_BYTES_DEFAULT),
        root_bytes: read(root_size, |f| read_size(f, &JOB_DISK_BYTES))?,
        output_bytes: read(output, |f| read_size(f, &JOB_DISK_BYTES))?
            .unwrap_or(OUTPUT_BYTES_DEFAULT),
        volumes: read(volumes, read_volumes)?.unwrap_or_default(),
        outputs: read(outputs, read_outputs)?.unwrap_or_else(|| vec!["/output".to_owned()]),
        start,
        may_migrate,
        timeout_s: read(timeout, read_timeout)?,
        inputs: None,
        owner: DEFAULT_OWNER.to_owned(),
        priority: read(priority, |f| read_number(f, &PRIORITY))?.unwrap_or_default(),
        restart: read(restart, read_restart)?.unwrap_or_default(),
    };
    let inputs = read(inputs, read_inputs)?.unwrap_or_default();
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
    let number: i64 = field.parse(|text| {
        text.parse().map_err(|_| format!("{text:?} is not a whole number of {}", limit.range()))
    })?;
    limit.check(number).map_err(|why| field.problem(why))?;
    T::try_from(number).map_err(|_| field.problem("it is too large"))
}

/// A size, rounded up to whole blocks.
fn read_size(field: &Field<'_>, limit: &'static Limit) -> Result<u64, Problem> {
    let bytes = limit.check(field.parse(parse_bytes)?).map_err(|why| field.problem(why))?;
    Ok(bytes.next_multiple_of(BLOCK_BYTES))
}

fn read_timeout(field: &Field<'_>) -> Result<u64, Problem> {
    TIMEOUT_S.check(field.parse(parse_duration)?).map_err(|why| field.problem(why))
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
        let [volume, mount, access] = item.fields(["volume", "mount", "access"])?;
        let volume = volume.ok_or_else(|| missing(item, "volume", "volume: NAME"))?;
        let name = volume.parse(VolumeName::new)?;
        let default_mount = if index == 0 { "/data".to_owned() } else { format!("/data{index}") };
        let mount_path = read(mount, read_mount)?.unwrap_or(default_mount);
        let access = read(access, read_access)?.unwrap_or_default();
        let volume = JobVolume { volume: name, mount: mount_path, access };
        check_beside(&volume, &volumes).map_err(|why| item.problem(why))?;
        volumes.push(volume);
    }
    Ok(volumes)
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

fn read_guest_path(field: &Field<'_>) -> Result<String, Problem> {
    field.parse(|path| check_guest_path(path).map(|()| path.trim_end_matches('/').to_owned()))
}

fn read_outputs(field: &Field<'_>) -> Result<Vec<String>, Problem> {
    OUTPUTS.check(field.list()?.len()).map_err(|why| field.problem(why))?;
    field.list()?.iter().map(read_guest_path).collect()
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
        return Ok(InputFile { from: from.to_owned(), to: default_to(item, from)? });
    }
    let [from, to] = item.fields(["from", "to"])?;
    let from = from.ok_or_else(|| missing(item, "from", "from: PATH"))?;
    let to = match to {
        None => default_to(&from, from.text()?)?,
        Some(to) => to.parse(|text| {
            let stays_inside = !text.is_empty()
                && !text.contains('\0')
                && text.split('/').all(|part| !matches!(part, "" | "." | ".."));
            if stays_inside {
                Ok(text.to_owned())
            } else {
                Err(format!("{text:?} is not a path below the job's directory"))
            }
        })?,
    };
    Ok(InputFile { from: from.text()?.to_owned(), to })
}

/// An input keeps its own name.
fn default_to(field: &Field<'_>, from: &str) -> Result<String, Problem> {
    match Path::new(from).file_name().and_then(|name| name.to_str()) {
        Some(name) => Ok(name.to_owned()),
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SMALLEST: &str = "image: debian\ncommand: hostname\n";

    fn problem(extra: &str) -> String {
        let text = format!("{SMALLEST}{extra}");
        let problem = parse(&text, "jobs/scan.yaml").expect_err(extra);
        assert_eq!(problem.kind, crate::ProblemKind::Invalid);
        problem.to_string()
    }

    #[test]
    fn image_and_command_are_enough() {
        let job = parse(SMALLEST, "jobs/scan.yaml").unwrap();
        assert_eq!(job.spec.name, "scan");
        assert_eq!(job.spec.command, ["/bin/sh", "-c", "hostname"]);
        assert_eq!((job.spec.cpus, job.spec.memory_bytes), (1, 512 << 20));
        assert_eq!((job.spec.output_bytes, job.spec.root_bytes), (1 << 30, None));
        assert_eq!(job.spec.outputs, ["/output"]);
        assert_eq!((job.spec.start, job.spec.may_migrate), (Start::Anywhere, true));
        assert!(job.inputs.is_empty() && job.spec.timeout_s.is_none());
    }

    #[test]
    fn every_field_is_read() {
        let text = r#"
name: tpch
image: postgres
command: [/opt/run, 1, true]
env: {SCALE: 0.10, EMPTY: , QUOTED: "yes"}
cpus: 2
memory: 384MiB
root: 4 GiB
output: 100MiB
volumes:
  - {volume: tables, access: read}
  - {volume: scratch}
  - volume: more
    mount: /mnt/more/
    access: clone
inputs: [sql/q6.sql, {from: /tmp/x, to: bin/run}]
outputs: [/job/answers]
placement: {start: {site: home}, move: never}
timeout: 1h30m
"#;
        let JobFile { spec, inputs } = parse(text, "-").unwrap();
        assert_eq!(spec.command, ["/opt/run", "1", "true"]);
        assert_eq!(spec.env["SCALE"], "0.10");
        assert_eq!((spec.env["EMPTY"].as_str(), spec.env["QUOTED"].as_str()), ("", "yes"));
        assert_eq!((spec.cpus, spec.memory_bytes), (2, 384 << 20));
        assert_eq!((spec.root_bytes, spec.output_bytes), (Some(4 << 30), 100 << 20));
        let mounts: Vec<_> = spec.volumes.iter().map(|v| (v.mount.as_str(), v.access)).collect();
        let expected =
            [("/data", Access::Read), ("/data1", Access::Write), ("/mnt/more", Access::Clone)];
        assert_eq!(mounts, expected);
        let names: Vec<_> = inputs.iter().map(|i| (i.from.as_str(), i.to.as_str())).collect();
        assert_eq!(names, [("sql/q6.sql", "q6.sql"), ("/tmp/x", "bin/run")]);
        assert_eq!(spec.start, Start::Site(SiteId::new("home").unwrap()));
        assert_eq!((spec.may_migrate, spec.timeout_s), (false, Some(5400)));
    }

    #[test]
    fn the_start_can_be_written_in_three_ways() {
        let expected = Start::Host(HostId::new("cloud1").unwrap());
        for placement in ["host: cloud1", "start: host cloud1", "start: {host: cloud1}"] {
            let text = format!("{SMALLEST}placement: {{{placement}}}\n");
            assert_eq!(parse(&text, "a.yaml").unwrap().spec.start, expected, "{placement}");
        }
    }

    #[test]
    fn a_wrong_unit_names_line_field_and_the_right_units() {
        assert_eq!(
            problem("memory: \"512MB\"\n"),
            "jobs/scan.yaml:3: memory: \"512MB\" is not a size: use KiB, MiB, GiB or TiB \
             (512MiB = 512 × 1024² bytes)"
        );
        assert!(problem("memory: 512\n").starts_with("jobs/scan.yaml:3: memory: \"512\" is not"));
        assert!(problem("timeout: 10\n").contains("timeout: \"10\" is not a duration"));
    }

    #[test]
    fn what_is_beyond_a_limit_names_line_field_and_limit() {
        let text = problem("cpus: 256\n");
        let expected = "3: cpus: a VM's number of CPUs is 256; possible is 1 to 255";
        assert_eq!(text, format!("jobs/scan.yaml:{expected}"));
        for (extra, expected) in [
            ("memory: 1KiB\n", "memory is 1 KiB; possible is 64 MiB to 512 GiB"),
            ("root: 1KiB\n", "disk is 1 KiB; possible is 1 MiB to "),
            ("output: 16TiB\n", "disk is 16 TiB; possible is 1 MiB to "),
            ("timeout: 0s\n", "timeout is 0s; possible is 1s to 365d"),
            ("priority: -101\n", "priority is -101; possible is -100 to 100"),
            ("name: a b\n", "is not a job's name: 1 to 45 bytes"),
        ] {
            let text = problem(extra);
            assert!(text.starts_with("jobs/scan.yaml:3: ") && text.contains(expected), "{text}");
        }
        let volumes: Vec<_> = (0..18).map(|n| format!("{{volume: v{n}}}")).collect();
        let text = problem(&format!("volumes: [{}]\n", volumes.join(", ")));
        assert!(text.contains("volumes is 18; possible is 0 to 17"), "{text}");
    }

    #[test]
    fn an_unknown_field_is_named_with_its_line_and_the_known_ones() {
        let text = problem("cpus: 1\nmemroy: 1GiB\n");
        assert!(text.starts_with("jobs/scan.yaml:4: memroy: there is no such field"), "{text}");
        assert!(text.contains("cpus, memory,"), "{text}");
        let text = problem("volumes:\n  - volume: a\n    mout: /a\n");
        assert!(text.starts_with("jobs/scan.yaml:5: volumes[0].mout: "), "{text}");
    }

    #[test]
    fn a_wrong_type_names_line_and_field() {
        for (extra, expected) in [
            ("memory: [1]\n", "3: memory: one value is wanted, not a list"),
            ("cpus: two\n", "3: cpus: \"two\" is not a whole number of 1 to 255"),
            ("volumes: a\n", "3: volumes: a list is wanted"),
            ("env: [a]\n", "3: env: fields are wanted"),
            ("volumes: [{volume: a, mount: //proc/1}]\n", "3: volumes[0].mount: /proc belongs"),
            ("outputs: [out]\n", "3: outputs[0]: \"out\" is not an absolute path"),
            ("inputs: [{from: a, to: ../b}]\n", "3: inputs[0].to: \"../b\" is not a path below"),
            ("placement:\n  move: no\n", "4: placement.move: \"no\" is not known"),
            ("placement: {site: a, host: b}\n", "3: placement: only one of"),
        ] {
            let text = problem(extra);
            assert!(text.contains(&format!("scan.yaml:{expected}")), "{extra}: {text}");
        }
    }

    #[test]
    fn a_missing_field_says_what_to_add() {
        let text = parse("image: a\ncommand: ' '\n", "a.yaml").unwrap_err().to_string();
        assert_eq!(text, "a.yaml:2: command: it is empty");
        let text = parse("command: x\n", "a.yaml").unwrap_err().to_string();
        assert_eq!(text, "a.yaml:1: the field \"image\" is missing\n  add a line `image: debian`");
    }

    #[test]
    fn what_is_not_yaml_is_reported_with_its_line() {
        let problem = parse("image: debian\ncommand: [a\nb: }\n", "a.yaml").unwrap_err();
        assert!(problem.what.starts_with("a.yaml:"), "{problem}");
        assert!(!problem.why.contains('\n'), "one line: {problem}");
        assert!(parse("", "a.yaml").is_err());
        assert!(parse("image: a\nimage: b\ncommand: c\n", "a.yaml").is_err());
    }

    #[test]
    fn priority_and_restart_have_defaults_and_bounds() {
        let spec = |more: &str| {
            parse(&format!("image: debian\ncommand: x\n{more}"), "j.yaml").map(|file| file.spec)
        };
        let plain = spec("").unwrap();
        assert_eq!((plain.priority, plain.restart), (0, Restart::Never));
        let set = spec("priority: -3\nrestart: on-host-failure\n").unwrap();
        assert_eq!((set.priority, set.restart), (-3, Restart::OnHostFailure));
        for wrong in ["priority: 101", "priority: soon", "restart: always"] {
            assert!(spec(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_volume_or_mount_cannot_be_named_twice() {
        assert!(problem("volumes: [{volume: a}, {volume: a}]\n").contains("named twice"));
        assert!(problem("volumes: [{volume: a}, {volume: b, mount: /data}]\n").contains("both"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC*") {
            let _ = parse(&text, "a.yaml");
        }

        #[test]
        fn no_value_makes_the_parser_panic(
            field in "name|env|cpus|memory|volumes|inputs|outputs|placement|timeout",
            value in "[\\[\\]{}:,\"'&*!|>\\-? a-c0-9./~\n]{0,40}",
        ) {
            let _ = parse(&format!("{SMALLEST}{field}: {value}\n"), "a.yaml");
        }
    }
}
