//! `perigee top`: what hosts and VMs do.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use perigee_http::Client;
use perigee_model::job::{Host, Vm};
use perigee_model::load::VcpuUse;
use perigee_model::units::parse_duration;
use perigee_model::{HostId, Problem, ProblemKind, VmId};
use serde::Serialize;
use tokio::time::{Instant, sleep_until};

use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::controller_client;

/// How often, and how many times.
#[derive(Debug, Args)]
pub struct Options {
    /// The time over which the rates are measured
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "2s")]
    every: u64,
    /// Show it only once, as if the standard output were no terminal
    #[arg(long)]
    once: bool,
}

/// What the controller says at one moment.
struct Look {
    at: Instant,
    /// Users who are no admins see only their VMs.
    hosts: Option<Vec<Host>>,
    vms: Vec<Vm>,
}

/// A VM and what it has done between two looks.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    vm: Vm,
    /// Of one CPU; `None` if it was not at this host, in this QEMU, before.
    cpu_percent: Option<f64>,
    read_bytes_per_s: Option<f64>,
    written_bytes_per_s: Option<f64>,
    requests_per_s: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Page {
    #[serde(skip_serializing_if = "Option::is_none")]
    hosts: Option<Vec<Host>>,
    vms: Vec<Row>,
}

const HOSTS: &[Column<Host>] = &[
    ("host", |h| h.id.to_string()),
    ("site", |h| h.addresses.site.to_string()),
    ("state", |h| output::word(&h.state)),
    ("load", |h| h.load_1min.map_or_else(dash, |load| format!("{load:.2}"))),
    ("cpus", |h| h.cpus.to_string()),
    ("vms' cpu wait", |h| output::percent(h.vcpus_1m.map(VcpuUse::run_delay_share))),
    ("free memory", |h| h.memory_available_bytes.map_or_else(dash, output::bytes)),
    ("of", |h| output::bytes(h.memory_bytes)),
    ("for vms", |h| output::bytes(h.memory_used_bytes)),
];

const VMS: &[Column<Row>] = &[
    ("vm", |r| r.vm.id.to_string()),
    ("host", |r| output::or_dash(r.vm.host.as_ref())),
    ("status", |r| output::word(&r.vm.status)),
    ("cpu", |r| r.cpu_percent.map_or_else(dash, |percent| format!("{percent:.0} %"))),
    ("cpu wait", |r| output::percent(r.vm.load.vcpus_1m.map(VcpuUse::run_delay_share))),
    ("read", |r| rate(r.read_bytes_per_s)),
    ("written", |r| rate(r.written_bytes_per_s)),
    ("requests", |r| r.requests_per_s.map_or_else(dash, |each| format!("{each:.0}/s"))),
    ("memory", |r| output::bytes(r.vm.memory_bytes)),
    ("ends in", |r| r.vm.predicted_end.as_ref().map_or_else(dash, ToString::to_string)),
];

fn dash() -> String {
    "-".to_owned()
}

fn rate(bytes_per_s: Option<f64>) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate is shown")]
    bytes_per_s.map_or_else(dash, |rate| format!("{}/s", output::bytes(rate as u64)))
}

/// Prints anew until Ctrl-C. Into a pipe, with `--once`, and in another format than a table it prints once.
pub async fn run(options: &Options, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    let lasts = io::stdout().is_terminal() && !options.once && context.format == Format::Table;
    let every = Duration::from_secs(options.every.max(1));
    let mut before = look(&client).await?;
    let mut due = before.at + every;
    let mut said = None;
    loop {
        sleep_until(due).await;
        due = Instant::now() + every;
        let Some(now) = or_next_time(look(&client).await, lasts, &mut said)? else { continue };
        due = now.at + every;
        let page = page(&before, &now);
        if lasts {
            clear();
        }
        print(&page, context.format)?;
        if !lasts {
            return Ok(());
        }
        before = now;
    }
}

/// What was seen. If there will be another look, a problem is said, once, under the last page, and is none of the command's.
fn or_next_time(
    looked: Result<Look, Problem>,
    is_another: bool,
    said: &mut Option<String>,
) -> Result<Option<Look>, Problem> {
    match looked {
        Err(problem) if is_another => {
            let problem = problem.to_string();
            if said.as_ref() != Some(&problem) {
                output::note(&problem);
                *said = Some(problem);
            }
            Ok(None)
        }
        looked => {
            *said = None;
            looked.map(Some)
        }
    }
}

async fn look(client: &Client) -> Result<Look, Problem> {
    let (hosts, vms) = tokio::join!(client.get("/v1/hosts"), client.get("/v1/vms"));
    let hosts = match hosts {
        Ok(hosts) => Some(hosts),
        Err(Problem { kind: ProblemKind::Forbidden | ProblemKind::NotFound, .. }) => None,
        Err(problem) => return Err(problem),
    };
    Ok(Look { at: Instant::now(), hosts, vms: vms? })
}

fn page(before: &Look, now: &Look) -> Page {
    let seconds = now.at.duration_since(before.at).as_secs_f64();
    let earlier: BTreeMap<(&VmId, Option<&HostId>), &Vm> =
        before.vms.iter().map(|vm| ((&vm.id, vm.host.as_ref()), vm)).collect();
    let vms = now
        .vms
        .iter()
        .map(|vm| row(earlier.get(&(&vm.id, vm.host.as_ref())).copied(), vm, seconds));
    Page { hosts: now.hosts.clone(), vms: vms.collect() }
}

fn row(before: Option<&Vm>, vm: &Vm, seconds: f64) -> Row {
    // A QEMU that was started since counts from 0, and so does a volume server.
    let same = before.filter(|before| vm.uptime_ms > before.uptime_ms && before.uptime_ms > 0);
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a rate")]
    let per_s = |of: fn(&Vm) -> u64| {
        let grown = of(vm).checked_sub(of(same?))?;
        Some(grown as f64 / seconds)
    };
    Row {
        cpu_percent: per_s(|vm| vm.vcpu_ms).map(|ms| ms / 10.0),
        read_bytes_per_s: per_s(|vm| vm.io.read_bytes),
        written_bytes_per_s: per_s(|vm| vm.io.write_bytes),
        requests_per_s: per_s(|vm| vm.io.reads + vm.io.writes + vm.io.flushes),
        vm: vm.clone(),
    }
}

fn print(page: &Page, format: Format) -> Result<(), Problem> {
    match format {
        Format::Json | Format::Yaml => output::one(format, page, &[]),
        // The hosts have other columns.
        Format::Csv => output::list(format, &page.vms, VMS),
        Format::Table => {
            if let Some(hosts) = &page.hosts {
                output::list(format, hosts, HOSTS)?;
                output::text("");
            }
            output::list(format, &page.vms, VMS)
        }
    }
}

/// Moves the cursor home and clears the terminal (ECMA-48).
fn clear() {
    let mut stdout = io::stdout().lock();
    // What is printed next says if it can't be written.
    let _ = stdout.write_all(b"\x1b[H\x1b[2J");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(uptime_ms: u64, vcpu_ms: u64, read_bytes: u64) -> Vm {
        let io = serde_json::json!(perigee_model::volume::IoStats::default());
        let text = format!(
            r#"{{"id":"a","job":null,"host":"home1","status":"running","reason":"","cpus":1,"memory_bytes":1,"uptime_ms":{uptime_ms},
            "vcpu_ms":{vcpu_ms},"load":{{}},"migration":null,"waits":[],"run":0,"made_ms":0,"io":{io},"volumes":[],"addresses":[]}}"#
        );
        let mut vm: Vm = serde_json::from_str(&text).expect("a VM");
        vm.io.read_bytes = read_bytes;
        vm
    }

    #[test]
    fn a_look_that_fails_does_not_end_what_looks_again() {
        let failed = || Err(Problem::unavailable("the controller", "it does not answer"));
        let mut said = None;
        assert!(or_next_time(failed(), true, &mut said).expect("it goes on").is_none());
        assert!(said.is_some());
        let looked = Ok(Look { at: Instant::now(), hosts: None, vms: Vec::new() });
        assert!(or_next_time(looked, true, &mut said).expect("a look").is_some());
        assert!(said.is_none());
        assert!(or_next_time(failed(), false, &mut said).is_err());
    }

    #[test]
    fn rates_are_what_was_done_between_two_looks() {
        let row = row(Some(&vm(1000, 100, 50)), &vm(3000, 1100, 4050), 2.0);
        assert_eq!(row.cpu_percent, Some(50.0));
        assert_eq!(row.read_bytes_per_s, Some(2000.0));
    }

    #[test]
    fn a_vm_that_was_started_anew_has_no_rates_yet() {
        assert_eq!(row(Some(&vm(9000, 100, 50)), &vm(200, 30, 10), 2.0).cpu_percent, None);
        assert_eq!(row(None, &vm(200, 30, 10), 2.0).cpu_percent, None);
        let restarted_server = row(Some(&vm(1000, 0, 50)), &vm(3000, 100, 10), 2.0);
        assert_eq!(restarted_server.read_bytes_per_s, None);
        assert_eq!(restarted_server.cpu_percent, Some(5.0));
    }
}
