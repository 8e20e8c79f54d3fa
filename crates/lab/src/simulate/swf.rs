//! Reads logs in the Standard Workload Format of the Parallel Workloads Archive, version 2.2 (Feitelson and others,
//! <https://www.cs.huji.ac.il/labs/parallel/workload/swf.html>).
//!
//! A line is a job with 18 numbers; -1 is a value that is not known. Lines that begin with `;` are comments. Of these numbers count:
//!
//! | number | field | here |
//! |---|---|---|
//! | 2 | submit time, s | when the job arrives |
//! | 4 | run time, s | how long the job computes, where its hosts are not crowded; 0 is less than half a second |
//! | 5, 8 | processors that were allocated, requested | the job's vCPUs: the first that is known |
//! | 6 | mean CPU time of each processor, s | which share of the run time the vCPUs compute; not known: all of it |
//! | 10, 7 | memory for each processor that was requested, used, KiB | the job's memory: the first that is known, else that of the scenario's VMs |
//! | 11 | status | 2, 3 and 4 are parts of a job that has a line of its own, and do not count |
//! | 13, 12 | group, user | tenant and owner; a user without a group is a tenant |
//!
//! A job with more processors than a host has several VMs, which start together. A job without a run time or without processors, as when it
//! was cancelled in the queue, is left out. Waits in the log, requested times, and think times after other jobs do not count: the jobs
//! arrive when they did.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use perigee_model::Problem;

use super::jobs::{JOBS_MOST, Job, Listed};
use super::scenario::{MORE_ROOM, Machine};

const FIELDS: [&str; 18] = [
    "job number",
    "submit time",
    "wait time",
    "run time",
    "allocated processors",
    "average CPU time used",
    "used memory",
    "requested processors",
    "requested time",
    "requested memory",
    "status",
    "user ID",
    "group ID",
    "executable",
    "queue",
    "partition",
    "preceding job",
    "think time",
];
/// Lines are longer than this in no log.
const LINE_BYTES_MOST: usize = 4096;
/// A vCPU computes for at least this share of its time, so that a job comes to its end.
const LEAST_SHARE: f64 = 0.01;

/// The jobs of the log that were submitted in the scenario's length, counted from `from_s`.
///
/// # Errors
/// The file can't be read, or a line is none of the format: then the problem names the line.
pub fn read(file: &Path, from_s: u64, machine: &Machine) -> Result<Listed, Problem> {
    let name = file.display();
    let what = || format!("can't read the log {name}");
    let opened = File::open(file).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Problem::not_found(what(), error).next("the file's name is relative to the scenario")
        }
        _ => Problem::invalid(what(), error),
    })?;
    parse(BufReader::new(opened), &name.to_string(), from_s, machine)
}

fn parse(
    mut log: impl BufRead,
    name: &str,
    from_s: u64,
    machine: &Machine,
) -> Result<Listed, Problem> {
    let mut listed = Listed::default();
    let window = from_s as f64..from_s.saturating_add(machine.length_s) as f64;
    for number in 1_u64.. {
        let wrong = |why: String| {
            Problem::invalid(format!("{name}:{number}"), why)
                .next("each line has the 18 numbers of a job, or begins with `;`")
        };
        let mut bytes = Vec::new();
        let most = LINE_BYTES_MOST as u64 + 1;
        let read = log.by_ref().take(most).read_until(b'\n', &mut bytes);
        if read.map_err(|error| wrong(error.to_string()))? == 0 {
            break;
        }
        if bytes.len() > LINE_BYTES_MOST {
            return Err(wrong(format!("the line has more than {LINE_BYTES_MOST} bytes")));
        }
        // Comments may be in any encoding.
        let line = String::from_utf8_lossy(&bytes);
        if line.trim_start().starts_with(';') || line.trim().is_empty() {
            continue;
        }
        let values = values(&line).map_err(wrong)?;
        let submitted_s = values[1].ok_or_else(|| wrong("the submit time is -1".to_owned()))?;
        let is_part = values[10].is_some_and(|status| (2.0..=4.0).contains(&status));
        if is_part || !window.contains(&submitted_s) {
            continue;
        }
        let Some(job) = job(&values, submitted_s - window.start, machine) else {
            listed.left_out += 1;
            continue;
        };
        machine.check(&job).map_err(|why| {
            let job = values[0].unwrap_or(-1.0);
            let next = format!("{MORE_ROOM}, or take the job out of the log");
            Problem::invalid(format!("{name}:{number}"), format!("job {job}: {why}")).next(next)
        })?;
        if listed.jobs.len() >= JOBS_MOST {
            return Err(wrong(format!("these are more than {JOBS_MOST} jobs"))
                .next("simulate fewer hours, or a later part of the log (`from`)"));
        }
        listed.jobs.push(job);
    }
    Ok(listed)
}

/// The values of a line; `None` for -1.
fn values(line: &str) -> Result<[Option<f64>; 18], String> {
    let mut values = [None; FIELDS.len()];
    let words: Vec<&str> = line.split_whitespace().collect();
    if words.len() != FIELDS.len() {
        return Err(format!("the line has {} fields, not {}", words.len(), FIELDS.len()));
    }
    for ((value, word), field) in values.iter_mut().zip(words).zip(FIELDS) {
        let number: f64 =
            word.parse().map_err(|_| format!("the {field} is {word:?}, and no number"))?;
        let is_unknown = number.total_cmp(&-1.0).is_eq();
        if !number.is_finite() || number < 0.0 && !is_unknown {
            return Err(format!(
                "the {field} is {word}; it is at least 0, or -1 if it is not known"
            ));
        }
        *value = (!is_unknown).then_some(number);
    }
    Ok(values)
}

/// `None` if the log does not say how long the job ran, or with how many processors.
fn job(values: &[Option<f64>; 18], at_s: f64, machine: &Machine) -> Option<Job> {
    let run_s = values[3]?.max(0.5);
    let is_some = |number: &f64| *number > 0.0;
    let processors = values[4].filter(is_some).or(values[7].filter(is_some))?;
    let vms = (processors / f64::from(machine.cpus)).ceil();
    let cpus = (processors / vms).ceil();
    let share = values[5].map_or(1.0, |cpu_s| cpu_s / run_s).clamp(LEAST_SHARE, 1.0);
    let memory_kib = values[9].filter(is_some).or(values[6].filter(is_some));
    let memory_bytes = memory_kib.map_or(machine.vm_memory_bytes, |kib| whole(kib * cpus * 1024.0));
    let id = |letter: char, id: Option<f64>| id.map(|id| format!("{letter}{id}"));
    let (group, user) = (id('g', values[12]), id('u', values[11]));
    let not_known = || "unknown".to_owned();
    Some(Job {
        at_ms: whole(at_s * 1000.0),
        vms: u32::try_from(whole(vms)).unwrap_or(u32::MAX),
        cpus: u32::try_from(whole(cpus)).unwrap_or(u32::MAX),
        memory_bytes,
        uses_cpus: cpus * share,
        compute_s: cpus * share * run_s,
        reads_bytes: 0,
        owner: user.clone().unwrap_or_else(not_known),
        tenant: group.or(user).unwrap_or_else(not_known),
    })
}

/// A number that is not negative, as a whole one.
fn whole(number: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(number).map_or(u64::MAX, |whole| whole.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let (memory_bytes, vm_memory_bytes) = (64 << 30, 1 << 30);
        let (hosts, cpus, vcpus, vms) = (4, 8, 8, 0);
        Machine { hosts, cpus, vcpus, memory_bytes, vms, vm_memory_bytes, length_s: 3600 }
    }

    fn parsed(log: &str, from_s: u64) -> Result<Listed, Problem> {
        parse(log.as_bytes(), "log.swf", from_s, &machine())
    }

    const LOG: &str = "\
        ; Version: 2.2\n\
        ; MaxProcs: 32\n\
        \n\
        1 10 5 100 4 50 -1 4 200 2048 1 7 3 -1 1 -1 -1 -1\n\
        2 20 0 60.5 -1 -1 1024 16 -1 -1 0 8 -1 -1 -1 -1 -1 -1\n\
        3 30 9 -1 -1 -1 -1 8 -1 -1 5 -1 -1 -1 -1 -1 -1 -1\n\
        4 40 0 70 1 -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 -1 -1\n\
        4 40 0 30 1 -1 -1 1 -1 -1 2 -1 -1 -1 -1 -1 -1 -1\n\
        5 7200 0 1 1 -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 -1 -1\n";

    #[test]
    fn a_job_has_what_its_line_says() {
        let listed = parsed(LOG, 0).expect("a log");
        let first = Job {
            at_ms: 10_000,
            vms: 1,
            cpus: 4,
            memory_bytes: 4 * 2048 * 1024,
            uses_cpus: 2.0,
            compute_s: 200.0,
            reads_bytes: 0,
            tenant: "g3".to_owned(),
            owner: "u7".to_owned(),
        };
        assert_eq!(listed.jobs[0], first);
    }

    #[test]
    fn what_is_not_known_is_taken_from_what_is() {
        let jobs = parsed(LOG, 0).expect("a log").jobs;
        let second = &jobs[1];
        assert_eq!((second.vms, second.cpus), (2, 8), "the requested processors, at two hosts");
        assert_eq!(second.memory_bytes, 8 * 1024 * 1024, "the used memory");
        assert!((second.compute_s - 8.0 * 60.5).abs() < 1e-9, "all of its time");
        assert_eq!((second.tenant.as_str(), second.owner.as_str()), ("u8", "u8"));
        let last = &jobs[2];
        assert_eq!(last.memory_bytes, 1 << 30, "that of the scenario's VMs");
        assert_eq!((last.tenant.as_str(), last.owner.as_str()), ("unknown", "unknown"));
    }

    #[test]
    fn jobs_that_never_ran_and_parts_of_jobs_are_left_out() {
        let listed = parsed(LOG, 0).expect("a log");
        assert_eq!((listed.jobs.len(), listed.left_out), (3, 1));
    }

    #[test]
    fn a_later_part_of_a_log_begins_at_0() {
        let jobs = parsed(LOG, 7000).expect("a log").jobs;
        assert_eq!(jobs.iter().map(|job| job.at_ms).collect::<Vec<_>>(), [200_000]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let with = |submit: &str, run: &str, processors: &str| {
            format!(
                "; a log\n1 {submit} 0 {run} {processors} -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 -1 -1\n"
            )
        };
        for (log, said) in [
            ("; a log\n1 2 3\n".to_owned(), "3 fields, not 18"),
            (with("soon", "1", "1"), "the submit time is"),
            (with("0", "-2", "1"), "the run time is -2"),
            (with("-1", "1", "1"), "the submit time is -1"),
            (with("0", "nan", "1"), "the run time is nan"),
            (with("0", "1", "64"), "job 1: the cluster has room for 4"),
        ] {
            let shown = format!("{:?}", parsed(&log, 0).expect_err(said));
            assert!(shown.contains("log.swf:2") && shown.contains(said), "{shown}");
        }
    }
}
