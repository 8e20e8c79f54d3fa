//! The first page: what is wrong, and the whole cluster at a glance.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::gang::moving::GangMove;
use perigee_model::job::{ClusterVolume, Host, HostState, Job, JobState, Migration, Vm};
use perigee_model::tenant::AuditEntry;
use perigee_model::units::{format_bytes, format_duration};
use perigee_model::volume_move::VolumeMove;

use crate::known::Known;
use crate::lists::{self, Asked};
use crate::parts::{Bar, Cell, Page, Section, Tone};
use crate::trouble::{self, job_tone, vm_tone};
use crate::words::{
    self, DASH, ago, bytes, count, maybe_thing, or_dash, percent, short, thing, word,
};

/// So many rows of each list are on the first page; the rest is one link away.
const ROWS: usize = 25;
/// So many entries of the audit log.
const CHANGES: usize = 12;

/// The first page.
pub fn page(known: &Known) -> Page {
    let mut sections = vec![wrong(known)];
    if let Some(all) = &known.hosts {
        let held = Held::of(known.vms.iter().flatten(), known.volumes.iter().flatten());
        let mut section = hosts("hosts", all.iter().take(ROWS), &held);
        cut(&mut section, all.len(), "/hosts", "hosts");
        sections.push(section);
    }
    if let Some(all) = &known.jobs {
        sections.push(open_jobs(all, known.now_ms));
    }
    if let Some(all) = &known.vms {
        let mut first: Vec<&Vm> = all.iter().collect();
        first.sort_by_key(|vm| (Reverse(vm_tone(vm).max(Tone::Good)), Reverse(busy(vm))));
        let mut section = vms("vms", first.into_iter().take(ROWS));
        cut(&mut section, all.len(), "/vms", "VMs");
        sections.push(section);
    }
    sections.push(moves(known));
    if let Some(all) = &known.audit {
        sections.push(changes(all, CHANGES, known.now_ms).linked("All changes", "/audit"));
    }
    Page::new("Overview", "perigee top", sections)
}

/// Cuts a table, and says where the rest is.
fn cut(section: &mut Section, all: usize, href: &str, of: &str) {
    if let Some(table) = &mut section.table {
        table.rows.truncate(ROWS);
        if table.rows.len() < all {
            let shown = table.rows.len();
            section.texts.push(format!("{shown} of {all} are shown."));
        }
    }
    let text = format!("All {all} {of}");
    section.links.push(crate::parts::link(text, href));
}

fn wrong(known: &Known) -> Section {
    let troubles = trouble::all(known);
    let section = Section::new("wrong", "What is wrong", "");
    if !troubles.is_empty() {
        return Section { troubles, ..section };
    }
    let whose = if known.hosts.is_some() { "" } else { " with what is yours" };
    Section {
        texts: vec![format!("Nothing is wrong{whose}, as far as the controller knows.")],
        ..section
    }
}

/// What VMs and volumes have of each host.
#[derive(Debug, Default)]
pub struct Held {
    cpus: BTreeMap<HostId, u64>,
    volume_bytes: BTreeMap<HostId, u64>,
}

impl Held {
    /// Of all VMs and volumes that are known. Only an admin sees all of them, and only an admin sees hosts.
    pub fn of<'a>(
        vms: impl IntoIterator<Item = &'a Vm>,
        volumes: impl IntoIterator<Item = &'a ClusterVolume>,
    ) -> Self {
        let mut held = Self::default();
        for vm in vms {
            if let Some(host) = &vm.host {
                *held.cpus.entry(host.clone()).or_default() += u64::from(vm.cpus);
            }
        }
        for volume in volumes {
            *held.volume_bytes.entry(volume.home.clone()).or_default() += volume.size_bytes;
        }
        held
    }
}

/// The hosts, with what is allocated beside what is used.
pub fn hosts<'a>(id: &str, all: impl Iterator<Item = &'a Host>, held: &Held) -> Section {
    let rows = all.map(|host| host_row(host, held)).collect();
    let heads = ["host", "site", "state", "#CPUs", "#memory", "#pool", "#VMs wait for a CPU"];
    let empty = "No host has joined yet: perigee host token NAME";
    let mut section = Section::new(id, "Hosts", "perigee host list").table(&heads, rows, empty);
    if let Some(table) = &mut section.table {
        table.caption = "Hosts. Of CPUs, memory and pool: what VMs and volumes were promised, and what is used.".to_owned();
    }
    section
}

fn host_row(host: &Host, held: &Held) -> Vec<Cell> {
    let id = &host.id;
    vec![
        thing("hosts", id),
        Cell::text(&host.addresses.site),
        host_state(host),
        host_cpus(host, held),
        host_memory(host),
        host_pool(host, held),
        percent(host.vcpus_1m.map(|load| load.run_delay_share())),
    ]
}

/// Whether a host answers, and how far its drain is.
pub fn host_state(host: &Host) -> Cell {
    let drain = host.drain.as_ref().map(|drain| drain.in_words()).unwrap_or_default();
    let cell = match host.state {
        HostState::Unreachable => Cell::status("does not answer", Tone::Bad),
        HostState::Up if !host.waits.is_empty() => Cell::status("in part", Tone::Bad),
        HostState::Up if host.cpus == 0 => Cell::status("not known yet", Tone::Warn),
        HostState::Up => Cell::status("up", Tone::Good),
    };
    cell.note(drain)
}

/// vCPUs of VMs beside the CPUs that are in use.
pub fn host_cpus(host: &Host, held: &Held) -> Cell {
    let allocated = held.cpus.get(&host.id).copied().unwrap_or(0);
    let used = host.cpus_used_1m.map_or_else(|| DASH.to_owned(), |used| format!("{used:.1}"));
    let bar = Bar::of(Some(allocated as f64), host.cpus_used_1m, f64::from(host.cpus));
    Cell::number(format!("{allocated} of {}", host.cpus)).note(format!("{used} used")).bar(bar)
}

/// Memory of VMs beside the memory that is in use.
pub fn host_memory(host: &Host) -> Cell {
    let (all, allocated) = (host.memory_bytes, host.memory_used_bytes);
    let used = host.memory_available_bytes.map(|free| all.saturating_sub(free));
    let bar = Bar::of(Some(allocated as f64), used.map(|used| used as f64), all as f64);
    let used = used.map_or_else(|| DASH.to_owned(), format_bytes);
    Cell::number(format!("{} of {}", format_bytes(allocated), format_bytes(all)))
        .note(format!("{used} used"))
        .bar(bar)
}

/// The sizes of volumes beside what is in use of the pool.
pub fn host_pool(host: &Host, held: &Held) -> Cell {
    let allocated = held.volume_bytes.get(&host.id).copied().unwrap_or(0);
    match (host.pool_size_bytes, host.pool_free_bytes) {
        (Some(size), Some(free)) => {
            let used = size.saturating_sub(free);
            let bar = Bar::of(Some(allocated as f64), Some(used as f64), size as f64);
            Cell::number(format!("{} of {}", format_bytes(allocated), format_bytes(size)))
                .note(format!("{} used", format_bytes(used)))
                .bar(bar)
        }
        (None, Some(free)) => Cell::number(format!("{} free", format_bytes(free))),
        (_, None) => Cell::number(DASH),
    }
}

/// Jobs that have not ended, those that wait first, and the reasons.
fn open_jobs(all: &[Job], now_ms: u64) -> Section {
    let mut open: Vec<&Job> = all.iter().filter(|job| !job.state.is_final()).collect();
    let waiting = open.iter().filter(|job| job.state == JobState::Queued).count();
    open.sort_by_key(|job| (job.state != JobState::Queued, job.queue_place, job.submitted_ms));
    let number = open.len();
    let mut section = jobs("jobs", "Jobs that have not ended", open.into_iter().take(ROWS), now_ms);
    section.texts.push(format!("{} not ended, of which {waiting} wait for a host.", number));
    if number > ROWS {
        section.texts.push(format!("{ROWS} of {number} are shown."));
    }
    section.linked("The queue", "/queue").linked("All jobs", "/jobs")
}

/// Jobs in a table.
pub fn jobs<'a>(
    id: &str,
    heading: &str,
    jobs: impl Iterator<Item = &'a Job>,
    now_ms: u64,
) -> Section {
    let heads = ["job", "state", "why", "host", "owner", "submitted", "#ends"];
    let rows = jobs.map(|job| job_row(job, now_ms)).collect();
    Section::new(id, heading, "perigee job list").table(&heads, rows, "There is none.")
}

fn job_row(job: &Job, now_ms: u64) -> Vec<Cell> {
    let place =
        job.queue_place.map(|place| format!("place {place} in the queue")).unwrap_or_default();
    vec![
        thing("jobs", &job.id),
        Cell::status(word(&job.state), job_tone(job)).note(place),
        Cell::text(short(&job.reason)),
        job_host(job),
        Cell::text(short(&job.spec.owner)),
        Cell::text(ago(job.submitted_ms, now_ms)),
        Cell::number(job_end(job)),
    ]
}

/// Where a job is.
pub fn job_host(job: &Job) -> Cell {
    if job.members.is_empty() {
        return maybe_thing("hosts", job.host.as_ref());
    }
    let mut hosts: Vec<&str> =
        job.members.iter().filter_map(|member| Some(member.host.as_ref()?.as_str())).collect();
    hosts.sort_unstable();
    hosts.dedup();
    Cell::text(short(&hosts.join(", "))).note(count(job.members.len(), "VM"))
}

/// How far a job is, or how long it took.
fn job_end(job: &Job) -> String {
    if let Some(seconds) = job.measured_s.filter(|_| job.state.is_final()) {
        return format!("took {}", format_duration(whole(seconds)));
    }
    let left = job.predicted_end.as_ref().and_then(|end| end.left);
    match (left, job.progress_part()) {
        (Some(left), _) => format!("in {left}"),
        (None, Some(part)) => format!("{:.0} % done", part * 100.0),
        (None, None) => String::new(),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole(seconds: f64) -> u64 {
    seconds as u64
}

/// How many vCPUs of a VM run, in thousandths, for the order of the busiest.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn busy(vm: &Vm) -> u64 {
    vm.load.vcpus_1m.map_or(0, |load| (load.running_vcpus * 1000.0) as u64)
}

/// VMs in a table.
pub fn vms<'a>(id: &str, vms: impl Iterator<Item = &'a Vm>) -> Section {
    let heads = ["VM", "status", "host", "job", "#vCPUs", "#run", "#wait", "#memory", "why"];
    let rows = vms.map(vm_row).collect();
    Section::new(id, "VMs", "perigee vm list").table(&heads, rows, "There is none.")
}

fn vm_row(vm: &Vm) -> Vec<Cell> {
    let load = vm.load.vcpus_1m;
    vec![
        thing("vms", &vm.id),
        Cell::status(word(&vm.status), vm_tone(vm)),
        maybe_thing("hosts", vm.host.as_ref()),
        maybe_thing("jobs", vm.job.as_ref()),
        Cell::number(vm.cpus),
        Cell::number(
            load.map_or_else(|| DASH.to_owned(), |load| format!("{:.1}", load.running_vcpus)),
        ),
        percent(load.map(|load| load.run_delay_share())),
        bytes(vm.memory_bytes),
        Cell::text(short(&vm.reason)),
    ]
}

/// What is under way from one host to another.
fn moves(known: &Known) -> Section {
    let migrations = known.migrations.iter().map(|one| migration_row(one, known.now_ms));
    let jobs = known.jobs.iter().flatten();
    let gangs = jobs
        .filter_map(|job| Some((job, job.gang_move.as_ref().filter(|m| m.ended_ms.is_none())?)));
    let gangs = gangs.map(|(job, moved)| gang_row(job, moved, known.now_ms));
    let volumes = known.volumes.iter().flatten();
    let volumes = volumes.filter_map(|volume: &ClusterVolume| volume.moving.as_ref());
    let volumes = volumes.map(|moved| volume_row(moved, known.now_ms));
    let rows: Vec<Vec<Cell>> = migrations.chain(gangs).chain(volumes).collect();
    let all = rows.len() + known.more_migrations;
    let heads = ["what", "from", "to", "state", "#left", "why", "began"];
    let rows: Vec<Vec<Cell>> = rows.into_iter().take(ROWS).collect();
    let shown = rows.len();
    let mut section =
        Section::new("moves", "Moves under way", "").table(&heads, rows, "Nothing moves.");
    if all > shown {
        section.texts.push(format!("{shown} of {all} are shown."));
    }
    section
}

fn migration_row(one: &Migration, now_ms: u64) -> Vec<Cell> {
    let left = match (one.left_ms, one.moves_ahead) {
        (_, ahead) if ahead > 0 => format!("behind {}", count(ahead as usize, "move")),
        (Some(ms), _) => format_duration(ms.div_ceil(1000)),
        (None, _) => DASH.to_owned(),
    };
    vec![
        thing("vms", &one.vm).note("VM"),
        thing("hosts", &one.from),
        thing("hosts", &one.to),
        Cell::status(word(&one.state), if one.error.is_empty() { Tone::Good } else { Tone::Warn }),
        Cell::number(left).note(format!("{} to send", format_bytes(one.remaining_bytes))),
        Cell::text(short(&one.reason)).note(short(&one.error)),
        Cell::text(ago(one.started_ms, now_ms)),
    ]
}

fn gang_row(job: &Job, moved: &GangMove, now_ms: u64) -> Vec<Cell> {
    let hosts = |of: fn(&perigee_model::gang::moving::Leg) -> &HostId| {
        let mut names: Vec<&str> = moved.legs.iter().map(|leg| of(leg).as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Cell::text(short(&names.join(", ")))
    };
    let state = if moved.undone.is_empty() { "moving" } else { "going back" };
    let tone = if moved.undone.is_empty() { Tone::Good } else { Tone::Warn };
    vec![
        thing("jobs", &job.id).note("job with several VMs"),
        hosts(|leg| &leg.from),
        hosts(|leg| &leg.to),
        Cell::status(state, tone),
        Cell::number(DASH),
        Cell::text(short(&moved.reason)).note(short(&moved.undone)),
        Cell::text(ago(moved.started_ms, now_ms)),
    ]
}

fn volume_row(moved: &VolumeMove, now_ms: u64) -> Vec<Cell> {
    let left =
        moved.left_ms.map_or_else(|| DASH.to_owned(), |ms| format_duration(ms.div_ceil(1000)));
    let missing = moved.missing_bytes.map(|bytes| format!("{} to copy", format_bytes(bytes)));
    let tone = if moved.problem.is_empty() { Tone::Good } else { Tone::Warn };
    vec![
        thing("volumes", &moved.volume).note("volume"),
        thing("hosts", &moved.from),
        thing("hosts", &moved.to),
        Cell::status(word(&moved.state), tone),
        Cell::number(left).note(missing.unwrap_or_default()),
        Cell::text(&moved.cause).note(short(&moved.problem)),
        Cell::text(ago(moved.started_ms, now_ms)),
    ]
}

/// The last entries of the audit log, the newest first.
pub fn changes(all: &[AuditEntry], most: usize, now_ms: u64) -> Section {
    let rows = all.iter().rev().take(most).map(|entry| {
        let tone = if entry.status < 400 { Tone::Plain } else { Tone::Warn };
        vec![
            Cell::text(short(&entry.request)).note(short(&entry.thing)),
            Cell::text(short(&entry.who)),
            Cell { is_number: true, ..Cell::status(entry.status, tone) },
            Cell::text(ago(entry.at_ms, now_ms)).note(words::time(entry.at_ms)),
        ]
    });
    let heads = ["request", "who", "#answer", "when"];
    let empty = "Nothing was changed yet.";
    Section::new("changes", "Last changes", "perigee audit").table(&heads, rows.collect(), empty)
}

/// The queue: which jobs wait, in which order, and why.
pub fn queue(all: &[Job], asked: &Asked, now_ms: u64) -> Page {
    let mut waiting: Vec<&Job> = all.iter().filter(|job| job.state == JobState::Queued).collect();
    waiting.sort_by_key(|job| (perigee_model::tenant::tenant_of(job.id.as_str()), job.queue_place));
    let has =
        |job: &&Job, text: &str| job.id.as_str().contains(text) || job.spec.owner.contains(text);
    let rows = |shown: Vec<&&Job>| those_that_wait(&shown, now_ms);
    let mut page = lists::page("Queue", "/queue", "perigee job list", &waiting, asked, has, rows);
    let going = |job: &&Job| matches!(job.state, JobState::Staging | JobState::Starting);
    let number = all.iter().filter(going).count();
    let first = all.iter().filter(going).take(ROWS);
    let mut soon = jobs("going", "Jobs that start now", first, now_ms);
    if number > ROWS {
        soon.texts.push(format!("{ROWS} of {number} are shown."));
    }
    page.sections.push(soon.linked(format!("All {}", count(all.len(), "job")), "/jobs"));
    page
}

fn those_that_wait(shown: &[&&Job], now_ms: u64) -> Section {
    let rows = shown.iter().map(|job| {
        vec![
            thing("jobs", &job.id),
            Cell::number(or_dash(job.queue_place)),
            Cell::text(short(&job.reason)),
            Cell::number(job.spec.priority),
            Cell::number(job.spec.count),
            Cell::number(job.spec.cpus),
            bytes(job.spec.memory_bytes),
            Cell::text(short(&job.spec.owner)),
            Cell::text(ago(job.submitted_ms, now_ms)),
        ]
    });
    let heads = [
        "job",
        "#place",
        "why it waits",
        "#priority",
        "#VMs",
        "#vCPUs each",
        "#memory each",
        "owner",
        "submitted",
    ];
    let section = Section::new("queue", "Jobs that wait for a host", "perigee job list");
    let mut section = section.table(&heads, rows.collect(), "No job waits for a host.");
    section.texts.push("A place is that among the tenant's own jobs. The next turn is the tenant's with the smallest share of the cluster.".to_owned());
    section
}
