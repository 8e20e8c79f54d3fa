//! A job: what was predicted beside what came true, why it is where it is, and what it has left.

use perigee_model::HostId;
use perigee_model::gang::moving::GangMove;
use perigee_model::job::{Job, Member, Migration, Sample};
use perigee_model::money::Money;
use perigee_model::plan::{Decision, NOT_WELL_KNOWN, Part, PlanOption};
use perigee_model::units::{format_bytes, format_seconds};

use crate::curves;
use crate::front::job_host;
use crate::parts::{Cell, Page, Section, Tone};
use crate::trouble::job_tone;
use crate::words::{DASH, ago, count, maybe_bytes, maybe_thing, or_dash, short, thing, time, word};

/// So many decisions are shown, the newest ones.
const DECISIONS: usize = 10;
/// So many ways of a decision are shown, the best ones.
const WAYS: usize = 8;
/// So many migrations are shown, the newest ones.
const MIGRATIONS: usize = 20;
/// So many VMs of a job with several ones are shown.
const MEMBERS: usize = 200;

/// A job's page, without its log.
pub fn page(job: &Job, decisions: &[Decision], samples: &[Sample], now_ms: u64) -> Page {
    let id = &job.id;
    let mut sections = vec![state(job, now_ms)];
    sections.push(came_true(job, decisions));
    sections.extend(curves::section(samples, format!("perigee job explain {id}")));
    if !job.members.is_empty() {
        sections.push(members(id.as_str(), &job.members));
    }
    if !job.migrations.is_empty() || job.gang_move.is_some() {
        sections.push(migrations(&job.migrations, job.gang_move.as_ref(), now_ms));
    }
    let first = decisions.len().saturating_sub(DECISIONS);
    let newest = decisions.iter().enumerate().skip(first).rev();
    sections.extend(newest.map(|(number, one)| decision(id.as_str(), number, one, now_ms)));
    sections.push(spec(job));
    Page::new(format!("Job {id}"), format!("perigee job status {id}"), sections)
}

fn state(job: &Job, now_ms: u64) -> Section {
    let id = &job.id;
    let at = |at_ms: Option<u64>| {
        at_ms.map_or_else(String::new, |ms| format!("{} ({})", ago(ms, now_ms), time(ms)))
    };
    let exit = job.exit_code.map_or_else(String::new, |code| code.to_string());
    let progress = job
        .progress
        .as_ref()
        .map_or_else(String::new, |p| format!("{} of {} {}", p.done, p.total, p.label));
    let end = job.predicted_end.as_ref().map_or_else(String::new, ToString::to_string);
    let mut section = Section::new("state", "Where it stands", "").facts(vec![
        ("state", Cell::status(word(&job.state), job_tone(job))),
        ("why", Cell::text(&job.reason)),
        (
            "place in the queue",
            Cell::text(job.queue_place.map(|p| p.to_string()).unwrap_or_default()),
        ),
        ("host", job_host(job)),
        ("VM", maybe_thing("vms", job.vm.as_ref().filter(|_| !job.state.is_final()))),
        ("progress", Cell::text(progress)),
        ("ends", Cell::text(end)),
        ("exit code", Cell::text(exit)),
        (
            "submitted",
            Cell::text(at(Some(job.submitted_ms))).note(format!("by {}", job.spec.owner)),
        ),
        ("VM started", Cell::text(at(job.started_ms))),
        ("command started", Cell::text(at(job.running_ms))),
        ("ended", Cell::text(at(job.ended_ms))),
        ("outputs", outputs(job)),
        ("left out", left_out(job)),
    ]);
    if job.outputs.is_some() {
        section = section.linked("Download the outputs (tar)", format!("/jobs/{id}/output.tar"));
    }
    if !job.state.is_final() {
        section = section.linked("Cancel this job …", format!("/jobs/{id}/cancel"));
    }
    section
}

fn outputs(job: &Job) -> Cell {
    let Some(outputs) = &job.outputs else { return Cell::default() };
    let until = outputs.kept_until_ms.map(|at_ms| format!("kept until {}", time(at_ms)));
    let (files, bytes) = (outputs.files, format_bytes(outputs.bytes));
    Cell::text(format!("{} ({files} files, {bytes})", outputs.at)).note(until.unwrap_or_default())
}

fn left_out(job: &Job) -> Cell {
    if job.left_out == 0 {
        return Cell::default();
    }
    let next = format!("their names: perigee job explain {}", job.id);
    Cell::status(count(usize::try_from(job.left_out).unwrap_or(usize::MAX), "file"), Tone::Warn)
        .note(next)
}

/// The prediction with which the job began, beside what was measured, part by part.
fn came_true(job: &Job, decisions: &[Decision]) -> Section {
    let command = format!("perigee job explain {}", job.id);
    let section = Section::new("predicted", "Prediction and truth", command);
    let measured = job.measured_s;
    let predicted = job.predicted.map(|predicted| {
        let shown = predicted.or_at_least();
        if predicted.helps() { shown } else { format!("{NOT_WELL_KNOWN} {shown}") }
    });
    let judged = job.predicted.zip(measured).map(|(predicted, seconds)| {
        if predicted.holds(seconds) {
            Cell::status("as predicted", Tone::Good)
        } else {
            Cell::status("outside the range", Tone::Warn)
        }
    });
    let mut facts = vec![
        ("predicted", Cell::text(predicted.unwrap_or_default())),
        ("measured", Cell::text(measured.map(format_seconds).unwrap_or_default())),
        ("came true", judged.unwrap_or_default()),
    ];
    if let Some(cost) = &job.cost {
        facts.push(("predicted to cost", Cell::text(cost.predicted)));
        facts.push((
            "spent",
            Cell::text(cost.spent.as_ref().map(Money::to_string).unwrap_or_default()),
        ));
    }
    let section = section.facts(facts);
    let first = decisions.first().and_then(|first| Some((first.plan.chosen()?, first.measured)));
    let Some((chosen, measured)) = first else {
        let texts = vec!["Nothing was predicted yet.".to_owned()];
        return if section.facts.is_empty() { Section { texts, ..section } } else { section };
    };
    let rows = Part::ALL.iter().map(|part| {
        let unknown = chosen.unknown.iter().find(|unknown| unknown.part == *part);
        vec![
            Cell::text(part.name()),
            Cell::number(format_seconds(chosen.predicted.of(*part)))
                .note(unknown.map(|_| "a guess").unwrap_or_default()),
            Cell::number(or_dash(measured.map(|measured| format_seconds(measured.of(*part))))),
        ]
    });
    let total = vec![
        Cell::text("all"),
        Cell::number(format_seconds(chosen.predicted.total_s)),
        Cell::number(or_dash(measured.map(|measured| format_seconds(measured.total_s)))),
    ];
    let rows = rows.chain([total]).collect();
    section.table(&["part", "#predicted", "#measured"], rows, "")
}

fn members(id: &str, all: &[Member]) -> Section {
    let rows = all.iter().take(MEMBERS).map(|member| {
        let code = member.exit_code.map(|code| format!("exit code {code}")).unwrap_or_default();
        vec![
            Cell::link(member.rank, format!("/jobs/{id}?rank={}", member.rank)),
            thing("vms", &member.vm),
            maybe_thing("hosts", member.host.as_ref()),
            Cell::text(or_dash(member.address)),
            Cell::text(word(&member.state)).note(code),
            Cell::text(short(&member.reason)),
        ]
    });
    let heads = ["rank", "VM", "host", "address", "state", "why"];
    let mut section = Section::new("members", "Its VMs", "").table(&heads, rows.collect(), "");
    if all.len() > MEMBERS {
        section.texts.push(format!("{MEMBERS} of {} are shown.", all.len()));
    }
    section
}

/// Migrations of a job's VMs, or of a VM, the newest first.
pub fn migrations(all: &[Migration], gang: Option<&GangMove>, now_ms: u64) -> Section {
    let rows = all.iter().rev().take(MIGRATIONS).map(|one| {
        let tone = match (one.state.is_final(), one.error.is_empty()) {
            (_, false) => Tone::Warn,
            (true, true) => Tone::Muted,
            (false, true) => Tone::Good,
        };
        let predicted = one.predicted_total_ms.map(|ms| format!("{ms} ms predicted"));
        vec![
            Cell::text(&one.id),
            thing("hosts", &one.from),
            thing("hosts", &one.to),
            Cell::status(word(&one.state), tone).note(short(&one.error)),
            Cell::number(format!("{} ms", one.total_ms)).note(predicted.unwrap_or_default()),
            Cell::number(format!("{} ms", one.downtime_ms)),
            Cell::number(format_bytes(one.bytes)),
            Cell::text(short(&one.reason)),
            Cell::text(ago(one.started_ms, now_ms)),
        ]
    });
    let heads = ["move", "from", "to", "state", "#took", "#pause", "#sent", "why", "began"];
    let mut section =
        Section::new("migrations", "Moves", "").table(&heads, rows.collect(), "It has not moved.");
    if all.len() > MIGRATIONS {
        section.texts.push(format!("The last {MIGRATIONS} of {} are shown.", all.len()));
    }
    if let Some(moved) = gang {
        let how =
            if moved.ended_ms.is_some() { "The last move of all VMs" } else { "All VMs move" };
        let undone = if moved.undone.is_empty() {
            String::new()
        } else {
            format!("; they go back: {}", moved.undone)
        };
        section.texts.push(format!("{how}: {}{undone}", moved.reason));
    }
    section
}

fn decision(job: &str, number: usize, one: &Decision, now_ms: u64) -> Section {
    let heading = format!("Decision {}: {}", number + 1, word(&one.trigger));
    let command = format!("perigee job explain {job}");
    let rows = one.plan.options.iter().take(WAYS).map(way).collect();
    let heads = ["way", "from", "to", "#time", "#longer by", "#sent", "#cost", "why"];
    let mut section = Section::new(format!("decision-{number}"), heading, command);
    section.texts.push(format!("{} ({})", one.summary, ago(one.at_ms, now_ms)));
    if !one.outcome.is_empty() {
        section.texts.push(format!("What became of it: {}", one.outcome));
    }
    if !one.plan.figures.is_empty() {
        section.texts.push(format!("From: {}", one.plan.figures.join("; ")));
    }
    if one.plan.options.is_empty() { section } else { section.table(&heads, rows, "") }
}

fn way(option: &PlanOption) -> Vec<Cell> {
    let name = if option.chosen {
        Cell::status(word(&option.way), Tone::Good).note("chosen")
    } else {
        Cell::text(word(&option.way))
    };
    let cost = option.cost.as_ref().map(|cost| or_dash(cost.total));
    let longer = match (option.chosen, option.longer) {
        (true, _) => String::new(),
        (false, Some(longer)) => longer.to_string(),
        (false, None) => "not possible".to_owned(),
    };
    vec![
        name,
        at_hosts(option, &option.start, option.starts_at()),
        at_hosts(option, &option.end, option.ends_at()),
        Cell::number(option.total.or_at_least()),
        Cell::number(longer),
        maybe_bytes(option.shipped_bytes),
        Cell::number(cost.unwrap_or_else(|| DASH.to_owned())),
        Cell::text(short(&option.reason)),
    ]
}

/// Of several VMs all hosts, and else the only one.
fn at_hosts(option: &PlanOption, host: &HostId, all: String) -> Cell {
    if option.hosts.len() > 1 { Cell::text(all) } else { thing("hosts", host) }
}

fn spec(job: &Job) -> Section {
    let spec = &job.spec;
    let volumes = spec
        .volumes
        .iter()
        .map(|one| format!("{} at {} ({})", one.volume, one.mount, word(&one.access)));
    let env = spec.env.keys().cloned().collect::<Vec<_>>().join(", ");
    let most =
        |most: Option<String>| most.map(|most| format!(", up to {most}")).unwrap_or_default();
    let cpus = format!("{}{}", spec.cpus, most(spec.cpus_max.map(|most| most.to_string())));
    let memory = format!(
        "{}{}",
        format_bytes(spec.memory_bytes),
        most(spec.memory_max_bytes.map(format_bytes))
    );
    Section::new("spec", "As it was submitted", "").facts(vec![
        ("image", Cell::text(&spec.image)),
        ("command", Cell::code(spec.command.join(" "))),
        ("environment", Cell::text(env)),
        ("VMs", Cell::text(spec.count)),
        ("vCPUs", Cell::text(cpus)),
        ("memory", Cell::text(memory)),
        ("volumes", Cell::text(volumes.collect::<Vec<_>>().join("; "))),
        ("outputs", Cell::text(spec.outputs.join(", "))),
        ("network", Cell::text(word(&spec.network))),
        ("may migrate", Cell::text(if spec.may_migrate { "yes" } else { "never" })),
        ("priority", Cell::text(spec.priority)),
        ("rules", Cell::text(&spec.rules)),
    ])
}
