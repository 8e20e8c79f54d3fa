//! Figures for Prometheus: the controller's own at `/metrics`, each host's at `/v1/hosts/HOST/metrics`, and at
//! `/v1/metrics/targets` where they are. A scraper needs to reach only the controller, with an admin's token: the daemons of
//! the hosts speak only with the controller.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::response::{IntoResponse, Response};
use perigee_http::{Client, Failure, Reply};
use perigee_model::backup_schedule::BackupSchedule;
use perigee_model::exposition::{self, Kind, Page};
use perigee_model::job::{Host, HostState, JobState};
use perigee_model::waiting::{Waiting, WaitsFor};
use perigee_model::{HostId, Problem};
use serde::Serialize;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::{Name, Shared, json};
use crate::clock::now_ms;
use crate::cluster::{Cluster, ERROR_BUCKETS, HostLink};
use crate::hosts;
use crate::storage::backups::schedules;

/// Prometheus waits 10 s for a page by default.
const PAGE_DEADLINE: Duration = Duration::from_secs(8);

/// The controller's own figures, and what it knows of hosts, links, VMs and jobs.
pub async fn metrics(State(cluster): Shared) -> Result<Response, Failure> {
    Ok(answer(page(&cluster).await?))
}

/// The text of [`metrics`], in the format of Prometheus.
///
/// # Errors
/// If the store does not answer.
pub async fn page(cluster: &Cluster) -> Result<String, Problem> {
    let hosts = hosts::list(cluster).await?;
    let mut page = Page::default();
    write_hosts(&mut page, &hosts);
    write_links(&mut page, cluster);
    write_jobs(&mut page, cluster);
    write_migrations(&mut page, cluster);
    write_predictions(&mut page, cluster);
    write_own(&mut page, cluster);
    write_tasks(&mut page, cluster);
    // The figures of hosts and jobs are shown without those of schedules, too.
    match schedules::list(cluster).await {
        Ok(all) => write_schedules(&mut page, &all),
        Err(problem) => tracing::warn!(%problem, "the metrics are without schedules of backups"),
    }
    Ok(page.into_text())
}

fn answer(text: String) -> Response {
    ([(CONTENT_TYPE, exposition::CONTENT_TYPE)], text).into_response()
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// A family of figures of hosts, and its value for one of them.
type HostFigure = (&'static str, &'static str, fn(&Host) -> u64);

const HOST_FIGURES: [HostFigure; 4] = [
    ("perigee_host_up", "Whether the host answers.", |host| u64::from(host.state == HostState::Up)),
    ("perigee_host_cpus", "CPUs of the host.", |host| u64::from(host.cpus)),
    ("perigee_host_memory_bytes", "Memory of the host.", |host| host.memory_bytes),
    ("perigee_host_vm_memory_bytes", "Memory of the VMs that were placed there.", |host| {
        host.memory_used_bytes
    }),
];

fn write_hosts(page: &mut Page, hosts: &[Host]) {
    for (name, help, value) in HOST_FIGURES {
        page.family(name, Kind::Gauge, help);
        for host in hosts {
            page.figure(&[("host", &host.id), ("site", &host.addresses.site)], value(host));
        }
    }
    let name = "perigee_host_last_seen_timestamp_seconds";
    page.family(name, Kind::Gauge, "When the host answered last.");
    for host in hosts {
        let labels: [(&str, &dyn Display); 2] =
            [("host", &host.id), ("site", &host.addresses.site)];
        page.figure(&labels, seconds(host.last_seen_ms));
    }
    page.family(
        "perigee_host_part_up",
        Kind::Gauge,
        "Whether a part of the host answers: its agent, its volume server.",
    );
    for host in hosts {
        let is_server = |w: &&Waiting| matches!(w.waits_for, WaitsFor::VolumeServer { .. });
        let silent = host.waits.iter().filter(is_server).count();
        for (part, silent) in [("agent", host.waits.len() - silent), ("volume_server", silent)] {
            let labels: [(&str, &dyn Display); 3] =
                [("host", &host.id), ("site", &host.addresses.site), ("part", &part)];
            page.figure(&labels, u8::from(silent == 0));
        }
    }
    page.family("perigee_host_warnings", Kind::Gauge, "What `perigee host info` warns of.");
    for host in hosts {
        let labels: [(&str, &dyn Display); 2] =
            [("host", &host.id), ("site", &host.addresses.site)];
        page.figure(&labels, host.warnings.len());
    }
}

fn write_links(page: &mut Page, cluster: &Cluster) {
    let links = cluster.links.all();
    page.family("perigee_link_rtt_seconds", Kind::Gauge, "Round trip between two hosts.");
    for link in &links {
        page.figure(&[("from", &link.from), ("to", &link.to)], link.probe.rtt_ms / 1e3);
    }
    let name = "perigee_link_rate_bytes_per_second";
    page.family(name, Kind::Gauge, "Rate of one TCP connection between two hosts.");
    for link in &links {
        page.figure(&[("from", &link.from), ("to", &link.to)], link.probe.rate_bytes_per_s);
    }
}

fn write_jobs(page: &mut Page, cluster: &Cluster) {
    let unfinished = cluster.unfinished_jobs();
    page.family("perigee_jobs", Kind::Gauge, "Jobs that have not ended, by state.");
    for (state, name) in [
        (JobState::Queued, "queued"),
        (JobState::Staging, "staging"),
        (JobState::Starting, "starting"),
        (JobState::Running, "running"),
        (JobState::Collecting, "collecting"),
    ] {
        let jobs = unfinished.iter();
        let jobs = jobs.filter(|record| record.kind.is_a_job());
        page.figure(&[("state", &name)], jobs.filter(|record| record.job.state == state).count());
    }
    page.family("perigee_jobs_ended_total", Kind::Counter, "Jobs that have ended.");
    let tally = &cluster.index.tally;
    for (state, count) in [
        ("succeeded", &tally.jobs_succeeded),
        ("failed", &tally.jobs_failed),
        ("cancelled", &tally.jobs_cancelled),
    ] {
        page.figure(&[("state", &state)], read(count));
    }
    let name = "perigee_job_waiting_seconds";
    page.family(
        name,
        Kind::Gauge,
        "How long a job, or a VM without one, has waited for a part that does not answer.",
    );
    let now_ms = now_ms();
    for record in &unfinished {
        for waiting in &record.job.waits {
            let waited = seconds(now_ms.saturating_sub(waiting.since_ms));
            page.figure(&[("job", &record.job.id), ("for", &waiting.waits_for.word())], waited);
        }
    }
    let persistent = unfinished.iter().filter(|record| record.kind.is_persistent_vm()).count();
    page.one(
        "perigee_vms_without_a_job",
        Kind::Gauge,
        "VMs without a job, also stopped ones.",
        persistent,
    );
}

fn write_migrations(page: &mut Page, cluster: &Cluster) {
    let tally = &cluster.index.tally;
    let under_way = cluster.unfinished_migrations();
    page.one("perigee_migrations", Kind::Gauge, "Migrations under way.", under_way.len());
    page.family("perigee_migrations_ended_total", Kind::Counter, "Migrations that have ended.");
    page.figure(&[("state", &"completed")], read(&tally.moves_completed));
    page.figure(&[("state", &"aborted")], read(&tally.moves_aborted));
    let help = "Memory and state that completed migrations have sent.";
    page.one("perigee_migration_bytes_total", Kind::Counter, help, read(&tally.moved_bytes));
    let (name, help) =
        ("perigee_migration_downtime_seconds_total", "How long their guests stood still.");
    page.one(name, Kind::Counter, help, seconds(read(&tally.downtime_ms)));
    let name = "perigee_migration_remaining_bytes";
    page.family(name, Kind::Gauge, "Memory that a migration has still to send.");
    for record in &under_way {
        page.figure(&[("vm", &record.migration.vm)], record.migration.remaining_bytes);
    }
    let name = "perigee_migration_dirty_bytes_per_second";
    page.family(name, Kind::Gauge, "How fast the guest changes its memory meanwhile.");
    for record in &under_way {
        page.figure(&[("vm", &record.migration.vm)], record.migration.dirty_bytes_per_s);
    }
}

fn write_predictions(page: &mut Page, cluster: &Cluster) {
    let counters = &cluster.counters;
    let help = "Predictions of jobs that have succeeded since.";
    page.one("perigee_predictions_total", Kind::Counter, help, read(&counters.predictions));
    let (name, help) =
        ("perigee_predictions_in_range_total", "Those whose job ended in the stated range.");
    page.one(name, Kind::Counter, help, read(&counters.predictions_in_range));
    let help = "Difference between predicted and measured time, as a share of the measured time.";
    page.family("perigee_prediction_error_ratio", Kind::Histogram, help);
    let mut below = 0;
    for (most, count) in ERROR_BUCKETS.iter().zip(&counters.prediction_errors) {
        below += read(count);
        page.figure_of("_bucket", &[("le", most)], below);
    }
    let all = read(&counters.predictions);
    page.figure_of("_bucket", &[("le", &"+Inf")], all);
    page.figure_of("_sum", &[], float(read(&counters.prediction_error_millionths)) / 1e6);
    page.figure_of("_count", &[], all);
}

fn write_own(page: &mut Page, cluster: &Cluster) {
    let (counters, counter) = (&cluster.counters, Kind::Counter);
    let help = "The number of this start of the controller.";
    page.one("perigee_controller_term", Kind::Gauge, help, cluster.claim.term().number);
    let help = "Whether another controller commands the hosts, so that this one does nothing.";
    let is_superseded = u64::from(cluster.claim.refusal().is_some());
    page.one("perigee_controller_superseded", Kind::Gauge, help, is_superseded);
    let help = "Decisions over the whole queue.";
    page.one("perigee_scheduler_passes_total", counter, help, read(&counters.passes));
    let spent = Duration::from_micros(read(&counters.pass_us)).as_secs_f64();
    page.one("perigee_scheduler_pass_seconds_total", counter, "Time they took.", spent);
    let help = "Jobs that were given a host.";
    page.one("perigee_jobs_placed_total", counter, help, read(&counters.placed));
    let seen = cluster.clock.seen();
    let help = "How often the controller's system clock was set by a minute or more.";
    page.one("perigee_clock_jumps_total", counter, help, seen.jumps);
    let help = "By how much it was set the last time; negative: back.";
    let by_s = seen.last_jump.map_or(0.0, |jump| seconds(jump.to_ms) - seconds(jump.from_ms));
    page.one("perigee_clock_last_jump_seconds", Kind::Gauge, help, by_s);
    page.family("perigee_store_operations_total", counter, "Operations of the store.");
    let counts = &cluster.records.counts;
    for (operation, count) in
        [("get", &counts.gets), ("list", &counts.lists), ("write", &counts.writes)]
    {
        page.figure(&[("operation", &operation)], read(count));
    }
}

fn write_tasks(page: &mut Page, cluster: &Cluster) {
    let all = cluster.tasks.all();
    let help = "Rounds of the controller's endless tasks.";
    page.family("perigee_task_rounds_total", Kind::Counter, help);
    for task in &all {
        page.figure(&[("task", &task.name)], task.rounds);
    }
    page.family("perigee_task_failures_total", Kind::Counter, "Those that have failed.");
    for task in &all {
        page.figure(&[("task", &task.name)], task.failures);
    }
    let help = "When the last round of the task ended.";
    page.family("perigee_task_last_end_timestamp_seconds", Kind::Gauge, help);
    for (task, ended_ms) in all.iter().filter_map(|task| Some((task, task.ended_ms?))) {
        page.figure(&[("task", &task.name)], seconds(ended_ms));
    }
    let help = "When the round began that is under way.";
    page.family("perigee_task_busy_since_timestamp_seconds", Kind::Gauge, help);
    for (task, since_ms) in all.iter().filter_map(|task| Some((task, task.busy_since_ms?))) {
        page.figure(&[("task", &task.name)], seconds(since_ms));
    }
    page.family("perigee_task_last_duration_seconds", Kind::Gauge, "How long it took.");
    for task in &all {
        page.figure(&[("task", &task.name)], seconds(task.took_ms));
    }
}

fn write_schedules(page: &mut Page, all: &[BackupSchedule]) {
    let help = "When the disks were sealed for the newest complete backup of the schedule.";
    page.family("perigee_backup_last_success_timestamp_seconds", Kind::Gauge, help);
    for (schedule, at_ms) in all.iter().filter_map(|one| Some((one, one.last_success_ms?))) {
        page.figure(&[("schedule", &schedule.name)], seconds(at_ms));
    }
    let help = "Whether the schedule has ended, or its last backup has failed or waits.";
    page.family("perigee_backup_schedule_problem", Kind::Gauge, help);
    for schedule in all {
        let has_problem = !schedule.problem.is_empty() || !schedule.ended.is_empty();
        page.figure(&[("schedule", &schedule.name)], u8::from(has_problem));
    }
}

#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a figure")]
fn float(value: u64) -> f64 {
    value as f64
}

fn seconds(ms: u64) -> f64 {
    float(ms) / 1e3
}

/// The figures of a host, its VMs and its volumes.
#[utoipa::path(get, path = "/hosts/{host}/metrics", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn of_host(
    State(cluster): Shared,
    Name(host): Name<HostId>,
) -> Result<Response, Failure> {
    let link = cluster.hosts.get(&host)?;
    let (agent, volumes) = tokio::join!(page_of(&link, &link.agent), page_of(&link, &link.volume));
    match (agent, volumes) {
        (Ok(agent), Ok(volumes)) => Ok(answer(agent + &volumes)),
        // Half a page is worth more than none. What is missing shows as absent.
        (Ok(page), Err(problem)) | (Err(problem), Ok(page)) => {
            tracing::debug!(%host, %problem, "a daemon gives no figures");
            Ok(answer(page))
        }
        (Err(problem), Err(_)) => Err(problem.into()),
    }
}

async fn page_of(link: &Arc<HostLink>, daemon: &Client) -> Result<String, Problem> {
    let late = || Problem::unavailable(format!("figures of {}", link.id), "it does not answer");
    let bytes =
        timeout(PAGE_DEADLINE, daemon.get_bytes("/metrics")).await.map_err(|_| late())??;
    String::from_utf8(bytes.into()).map_err(|e| Problem::internal("can't read its figures", e))
}

/// Where a page of figures is, as Prometheus' HTTP service discovery wants it
/// (<https://prometheus.io/docs/prometheus/latest/http_sd/>).
#[derive(Debug, Serialize, ToSchema)]
pub struct Target {
    targets: Vec<String>,
    labels: BTreeMap<&'static str, String>,
}

/// The pages of the controller and of all hosts. Their address is the one that this request was sent to.
#[utoipa::path(get, path = "/metrics/targets", tag = "hosts",
    responses((status = 200, body = Vec<Target>)))]
pub async fn targets(State(cluster): Shared, headers: HeaderMap) -> Reply<Vec<Target>> {
    let address = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let target = |labels: Vec<(&'static str, String)>| Target {
        targets: vec![address.to_owned()],
        labels: labels.into_iter().collect(),
    };
    let mut targets = vec![target(vec![("__metrics_path__", "/metrics".to_owned())])];
    for host in cluster.hosts.all() {
        targets.push(target(vec![
            ("__metrics_path__", format!("/v1/hosts/{}/metrics", host.id)),
            ("host", host.id.to_string()),
            ("site", host.addresses.site.to_string()),
        ]));
    }
    json(targets)
}
