//! What is wrong, and what to do about it. Pure: it is told all that is known, and the time.

use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::backup_schedule::BackupSchedule;
use perigee_model::job::{Host, HostState, Job, JobState, Vm};
use perigee_model::persistent_vm::VmState;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::replica::Replica;
use perigee_model::tasks::TaskStatus;
use perigee_model::units::{format_bytes, format_duration};
use perigee_model::waiting::in_words;

use crate::known::Known;
use crate::parts::{Tone, Trouble};
use crate::words::{ago, count, page_of, short};

/// So many are shown of one kind; the others are counted.
const OF_A_KIND_MAX: usize = 8;
/// A pool with a smaller part free is nearly full.
const POOL_LOW: f64 = 0.10;
/// A pool with a smaller part free is full.
const POOL_FULL: f64 = 0.03;
/// The same where the pool's size is not known.
const POOL_LOW_BYTES: u64 = 5 << 30;
/// A replica whose newest complete point is older than so many of its intervals is behind.
const INTERVALS_LATE: u64 = 3;
/// A job that has failed is told for so long.
const FAILED_FOR_MS: u64 = 86_400_000;

/// All that is wrong, the worst first.
pub fn all(known: &Known) -> Vec<Trouble> {
    let mut all = Vec::new();
    let problems = known.problems.iter().map(|problem| Trouble {
        tone: Tone::Bad,
        what: short(&problem.what),
        why: short(&problem.why),
        next: short(&problem.next),
        ..Trouble::default()
    });
    add(&mut all, "more parts of this page", "", problems);
    let hosts = known.hosts.iter().flatten();
    add(&mut all, "more hosts", "/hosts", hosts.flat_map(|host| of_host(host, known.now_ms)));
    let tasks = known.tasks.iter().flatten().filter_map(of_task);
    add(&mut all, "more tasks", "", tasks);
    add(&mut all, "more volumes", "/volumes", of_homes(known).into_iter());
    let replicas = known.volumes.iter().flatten().flat_map(|volume| &volume.replicas);
    let replicas = replicas.filter_map(|replica| of_replica(replica, known.now_ms));
    add(&mut all, "more replicas", "/volumes", replicas);
    let schedules = known.schedules.iter().flatten();
    let schedules = schedules.filter_map(|schedule| of_schedule(schedule, known.now_ms));
    add(&mut all, "more schedules of backups", "", schedules);
    add(&mut all, "more rentals", "/rentals", known.rentals.iter().flatten().filter_map(of_rental));
    add(&mut all, "more VMs", "/vms", known.vms.iter().flatten().filter_map(of_vm));
    let jobs = known.jobs.iter().flatten().rev().filter_map(|job| of_job(job, known.now_ms));
    add(&mut all, "more jobs", "/jobs", jobs);
    // What is equally bad stays in its order.
    all.sort_by_key(|trouble| std::cmp::Reverse(trouble.tone));
    all
}

/// The first ones of a kind, and how many more there are.
fn add(all: &mut Vec<Trouble>, more: &str, href: &str, mut of: impl Iterator<Item = Trouble>) {
    all.extend(of.by_ref().take(OF_A_KIND_MAX));
    let rest: Vec<Trouble> = of.collect();
    if let Some(worst) = rest.iter().map(|trouble| trouble.tone).max() {
        let what = format!("{} {more}", rest.len());
        let why = "have trouble of these kinds".to_owned();
        all.push(Trouble { tone: worst, what, why, href: href.to_owned(), ..Trouble::default() });
    }
}

fn of_host(host: &Host, now_ms: u64) -> Vec<Trouble> {
    let id = &host.id;
    let href = page_of("hosts", id);
    let told = |tone, what: String, why: &str, next: String| Trouble {
        tone,
        what,
        href: href.clone(),
        why: short(why),
        next,
    };
    let mut all = Vec::new();
    let info = format!("perigee host info {id}");
    if host.state == HostState::Unreachable {
        let seen = format!("it was last seen {}", ago(host.last_seen_ms, now_ms));
        let why = host.warnings.first().unwrap_or(&seen);
        let next = format!("start its agent; if it is gone for good: perigee host remove {id}");
        all.push(told(Tone::Bad, format!("host {id} does not answer"), why, next));
    } else if !host.waits.is_empty() {
        let why = in_words(&host.waits);
        all.push(told(
            Tone::Bad,
            format!("a part of host {id} does not answer"),
            &why,
            info.clone(),
        ));
    } else if host.cpus == 0 {
        let why = "it is registered, and has not reported its figures";
        all.push(told(Tone::Warn, format!("nothing is known of host {id}"), why, info.clone()));
    }
    if let Some(drain) = host.drain.as_ref().filter(|drain| drain.is_stuck()) {
        let why = drain.left.iter().flatten().find(|step| !step.why.is_empty());
        let why = why
            .map_or_else(String::new, |step| format!("{} {}: {}", step.kind, step.name, step.why));
        let what = format!("the drain of host {id} is stuck: {}", drain.in_words());
        all.push(told(Tone::Bad, what, &why, info.clone()));
    }
    if let Some(notice) = &host.notice {
        all.push(told(
            Tone::Warn,
            format!("host {id} is taken back"),
            &notice.in_words(),
            info.clone(),
        ));
    }
    all.extend(pool(host).map(|(tone, why)| {
        let next =
            "delete volumes or images that nobody needs, or move volumes: perigee volume list"
                .to_owned();
        told(
            tone,
            format!(
                "the pool of host {id} is {}",
                if tone == Tone::Bad { "full" } else { "nearly full" }
            ),
            &why,
            next,
        )
    }));
    let skip = usize::from(host.state == HostState::Unreachable);
    if let Some(first) = host.warnings.get(skip) {
        let what = format!("host {id} has {}", count(host.warnings.len() - skip, "warning"));
        all.push(told(Tone::Warn, what, first, info));
    }
    all
}

/// How full a host's pool is, if that is much.
fn pool(host: &Host) -> Option<(Tone, String)> {
    let free = host.pool_free_bytes?;
    let Some(size) = host.pool_size_bytes.filter(|size| *size > 0) else {
        let why = format!("{} are free", format_bytes(free));
        return (free < POOL_LOW_BYTES).then_some((Tone::Warn, why));
    };
    let share = free as f64 / size as f64;
    let why = format!("{} of {} are free", format_bytes(free), format_bytes(size));
    match share {
        share if share < POOL_FULL => Some((Tone::Bad, why)),
        share if share < POOL_LOW => Some((Tone::Warn, why)),
        _ => None,
    }
}

fn of_task(task: &TaskStatus) -> Option<Trouble> {
    (!task.problem.is_empty()).then(|| Trouble {
        tone: Tone::Bad,
        what: format!("{} fails", short(&task.name)),
        why: short(&task.problem),
        next: "it tries again by itself: perigee controller tasks".to_owned(),
        ..Trouble::default()
    })
}

/// Volumes whose home does not answer, one trouble for each home.
fn of_homes(known: &Known) -> Vec<Trouble> {
    let mut silent: BTreeMap<&HostId, Vec<&str>> = BTreeMap::new();
    for volume in known.volumes.iter().flatten().filter(|volume| !volume.waits.is_empty()) {
        silent.entry(&volume.home).or_default().push(volume.name.as_str());
    }
    let told = |(home, volumes): (&HostId, Vec<&str>)| {
        let first = volumes.iter().take(3).copied().collect::<Vec<_>>().join(", ");
        let more = if volumes.len() > 3 { " …" } else { "" };
        Trouble {
            tone: Tone::Bad,
            what: format!("{} without a home that answers", count(volumes.len(), "volume")),
            href: "/volumes".to_owned(),
            why: format!("{home} does not answer for {first}{more}"),
            next: format!(
                "start the volume server of {home}; where there is a replica and {home} is lost: perigee volume promote VOLUME"
            ),
        }
    };
    silent.into_iter().map(told).collect()
}

fn of_replica(replica: &Replica, now_ms: u64) -> Option<Trouble> {
    let Replica { volume, site, every_s, .. } = replica;
    if replica.stopping || replica.kept.is_some() {
        return None;
    }
    let late = replica.age(now_ms).filter(|age| age.as_secs() > every_s * INTERVALS_LATE);
    let why = match (replica.problem.as_str(), late) {
        ("", None) => return None,
        ("", Some(age)) => {
            let minutes = age.as_secs() / 60 * 60;
            format!("its newest complete point is {} old", format_duration(minutes))
        }
        (problem, _) => short(problem),
    };
    Some(Trouble {
        tone: Tone::Warn,
        what: format!("the replica of volume {volume} at {site} is behind"),
        href: page_of("volumes", volume),
        why,
        next: format!("perigee volume info {volume}"),
    })
}

fn of_schedule(schedule: &BackupSchedule, now_ms: u64) -> Option<Trouble> {
    let BackupSchedule { name, volume, vm, to, .. } = schedule;
    let late_ms = schedule.every_s.saturating_mul(1000 * INTERVALS_LATE);
    let newest_ms = schedule.last_success_ms.unwrap_or(schedule.made_ms);
    let why = match (schedule.ended.as_str(), schedule.problem.as_str()) {
        ("", "") if newest_ms.abs_diff(now_ms) <= late_ms => return None,
        ("", "") if newest_ms > now_ms => {
            "its newest complete backup is of a time that is still to come: a clock was ahead"
                .to_owned()
        }
        ("", "") => match schedule.last_success_ms {
            Some(at_ms) => format!("its newest complete backup was taken {}", ago(at_ms, now_ms)),
            None => "no backup is complete yet".to_owned(),
        },
        ("", problem) => short(problem),
        (ended, _) => short(ended),
    };
    let (what, next) = match schedule.ended.is_empty() {
        true => (
            format!("the backups of {} to {} are behind", schedule.of_in_words(), to.address),
            "perigee backup schedules; perigee backup list".to_owned(),
        ),
        false => (
            format!("the schedule {name} of backups has ended"),
            format!("perigee backup unschedule {name}"),
        ),
    };
    let href = match (volume, vm) {
        (_, Some(vm)) => page_of("vms", vm),
        (Some(volume), None) => page_of("volumes", volume),
        (None, None) => String::new(),
    };
    Some(Trouble { tone: Tone::Warn, what, href, why, next })
}

fn of_rental(rental: &Rental) -> Option<Trouble> {
    let Rental { id, state, why, .. } = rental;
    let is_stuck =
        !matches!(state, RentalState::Joined | RentalState::Draining | RentalState::Gone);
    let is_refused = rental.refused.is_some() && *state != RentalState::Gone;
    ((is_stuck && !why.is_empty()) || is_refused).then(|| {
        let refused = rental.refused.as_ref().map(|refused| refused.why.as_str());
        Trouble {
            tone: Tone::Warn,
            what: format!("rental {id} does not come forward"),
            href: page_of("rentals", id),
            why: short(if why.is_empty() { refused.unwrap_or_default() } else { why }),
            next: format!("perigee rent explain {id}"),
        }
    })
}

fn of_vm(vm: &Vm) -> Option<Trouble> {
    let tone = vm_tone(vm);
    (tone >= Tone::Warn).then(|| Trouble {
        tone,
        what: format!("VM {} stands still", vm.id),
        href: page_of("vms", &vm.id),
        why: short(&vm.reason),
        next: format!("perigee vm info {}", vm.id),
    })
}

/// Whether a VM does what it is meant to.
pub fn vm_tone(vm: &Vm) -> Tone {
    match vm.status {
        VmState::IoError => Tone::Bad,
        _ if !vm.waits.is_empty() => Tone::Bad,
        VmState::Running => Tone::Good,
        VmState::Paused if vm.migration.is_none() => Tone::Warn,
        VmState::Stopped | VmState::Shutdown | VmState::Gone | VmState::Migrated => Tone::Muted,
        _ => Tone::Plain,
    }
}

/// Whether a job does what it is meant to.
pub fn job_tone(job: &Job) -> Tone {
    match job.state {
        JobState::Failed => Tone::Bad,
        _ if !job.waits.is_empty() => Tone::Bad,
        JobState::Succeeded | JobState::Running => Tone::Good,
        JobState::Cancelled => Tone::Muted,
        JobState::Queued | JobState::Staging | JobState::Starting | JobState::Collecting => {
            Tone::Plain
        }
    }
}

fn of_job(job: &Job, now_ms: u64) -> Option<Trouble> {
    let id = &job.id;
    let is_fresh = job.ended_ms.is_some_and(|at_ms| now_ms.saturating_sub(at_ms) < FAILED_FOR_MS);
    let what = match job.state {
        JobState::Failed if is_fresh => format!("job {id} failed"),
        state if !state.is_final() && !job.waits.is_empty() => format!("job {id} stands still"),
        _ => return None,
    };
    let tone = if job.state.is_final() { Tone::Warn } else { Tone::Bad };
    let next = match job.state.is_final() {
        true => format!("perigee job explain {id}"),
        false => format!("perigee job status {id}"),
    };
    Some(Trouble { tone, what, href: page_of("jobs", id), why: short(&job.reason), next })
}
