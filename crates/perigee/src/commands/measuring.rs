//! `perigee host measure`: what a host can do, in figures.

use std::time::Duration;

use perigee_http::Client;
use perigee_model::job::Host;
use perigee_model::measurement::{
    DiskFigures, DiskPath, HostMeasurement, MeasureHost, MeasurementState, STREAMS,
};
use perigee_model::{HostId, Problem};
use serde::Serialize;

use crate::commands::asking::{self, Said};
use crate::output::{self, Column, Format};

const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A line for people.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Line {
    what: String,
    with: String,
    value: String,
}

const LINES: &[Column<Line>] = &[
    ("figure", |line| line.what.clone()),
    ("at", |line| line.with.clone()),
    ("value", |line| line.value.clone()),
];

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for people")]
fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", output::bytes(bytes_per_s as u64))
}

fn lines(measured: &HostMeasurement) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut line = |what: &str, with: &HostId, value: String| {
        lines.push(Line { what: what.to_owned(), with: with.to_string(), value });
    };
    for link in &measured.networks {
        let value = |bytes_per_s: Option<u64>| {
            bytes_per_s.map_or_else(|| "-".to_owned(), |it| format!("{}/s", output::bytes(it)))
        };
        let rtt = link.rtt_ms.map_or_else(|| "-".to_owned(), |rtt| format!("{rtt:.2} ms"));
        line("round trip", &link.with, rtt);
        line("sends", &link.with, value(link.to_bytes_per_s));
        line("receives", &link.with, value(link.from_bytes_per_s));
        let streams = format!("with {STREAMS} streams");
        line(&format!("sends {streams}"), &link.with, value(link.to_streams_bytes_per_s));
        line(&format!("receives {streams}"), &link.with, value(link.from_streams_bytes_per_s));
        if !link.problem.is_empty() {
            line("link", &link.with, format!("not all was measured: {}", link.problem));
        }
    }
    for disk in &measured.disks {
        let name = match disk.path {
            DiskPath::Pool => "own disk",
            DiskPath::Nbd => "disk over NBD",
            DiskPath::Iscsi => "disk over iSCSI",
        };
        match &disk.figures {
            Some(figures) => {
                let cached = if figures.direct { "" } else { " (through the page cache)" };
                let name = format!("{name}{cached}");
                for (what, value) in of_disk(figures) {
                    line(&format!("{name}: {what}"), &disk.at, value);
                }
            }
            None => line(name, &disk.at, format!("not measured: {}", disk.problem)),
        }
    }
    lines
}

fn of_disk(figures: &DiskFigures) -> [(&'static str, String); 4] {
    let per_s = |count: f64| format!("{count:.0}/s");
    [
        ("reads", rate(figures.read_bytes_per_s)),
        ("writes", rate(figures.write_bytes_per_s)),
        ("random reads", per_s(figures.random_reads_per_s)),
        ("random writes, each flushed", per_s(figures.random_writes_per_s)),
    ]
}

/// What was measured of a host, a line for each figure, as `host info` shows it.
pub fn known(host: &Host) -> String {
    let Some(measured) = &host.measurement else { return "-".to_owned() };
    let figures = lines(measured).into_iter();
    let figures = figures.map(|line| format!("{} ({}): {}", line.what, line.with, line.value));
    [headline(measured)].into_iter().chain(figures).collect::<Vec<_>>().join("\n")
}

/// Of which host, when, and how far.
fn headline(measured: &HostMeasurement) -> String {
    let HostMeasurement { host, begun_ms, now, .. } = measured;
    let at = output::time(*begun_ms);
    match measured.state {
        MeasurementState::Measuring => format!("host {host} is measured since {at}: now {now}"),
        MeasurementState::Done => format!("host {host} was measured at {at}"),
        MeasurementState::CalledOff => {
            format!("host {host} was measured at {at}, and not to the end: {now}")
        }
    }
}

/// Prints figures.
///
/// # Errors
/// If they can't be printed.
fn print(format: Format, measured: &HostMeasurement) -> Result<(), Problem> {
    match format {
        Format::Json | Format::Yaml => output::one(format, measured, &[]),
        Format::Table | Format::Csv => {
            output::list(format, &lines(measured), LINES)?;
            output::note(&headline(measured));
            Ok(())
        }
    }
}

/// Prints what was measured last.
///
/// # Errors
/// `NotFound` if the host was never measured.
pub async fn show(client: &Client, host: &HostId, format: Format) -> Result<(), Problem> {
    print(format, &client.get(&format!("/v1/hosts/{host}/measure")).await?)
}

/// Calls a measurement off.
///
/// # Errors
/// `Conflict` if none is under way.
pub async fn cancel(client: &Client, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/hosts/{host}/measure");
    client.delete_answered::<HostMeasurement>(&path).await.map(drop)
}

/// Has a host measured, shows the progress until that is over, and prints the figures. Ctrl-C ends only the display.
///
/// # Errors
/// As the controller's; `Conflict` if the measurement was called off.
pub async fn measure(
    client: &Client,
    host: &HostId,
    ask: &MeasureHost,
    format: Format,
) -> Result<(), Problem> {
    let path = format!("/v1/hosts/{host}/measure");
    client.post::<HostMeasurement>(&path, ask).await?;
    let goes_on = format!(
        "the measurement goes on; `perigee host measure {host} --show` shows it, `--cancel` calls it off"
    );
    let watching = watch(client, &path, &goes_on);
    let Some(ended) = asking::until_interrupted(watching, &goes_on).await? else { return Ok(()) };
    print(format, &ended)?;
    match ended.state {
        MeasurementState::CalledOff => {
            Err(Problem::conflict(format!("can't measure all of host {host}"), ended.now))
        }
        MeasurementState::Measuring | MeasurementState::Done => Ok(()),
    }
}

async fn watch(client: &Client, path: &str, goes_on: &str) -> Result<HostMeasurement, Problem> {
    let mut said = Said::default();
    loop {
        let now: HostMeasurement = asking::get(client, path, goes_on).await?;
        if now.state != MeasurementState::Measuring {
            return Ok(now);
        }
        if said.is_news(&now.now) {
            output::note(&format!("measuring {}", now.now));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::measurement::{DiskMeasurement, NetworkFigures};

    use super::*;

    #[test]
    fn what_was_not_measured_says_why_and_is_no_zero() {
        let host = HostId::new("cloud1").expect("a name");
        let measured = HostMeasurement {
            host: host.clone(),
            kind: None,
            state: MeasurementState::Done,
            now: String::new(),
            by: "ann".to_owned(),
            begun_ms: 0,
            ended_ms: Some(1),
            length_s: 10,
            networks: vec![NetworkFigures {
                with: host.clone(),
                site: "cloud".parse().expect("a name"),
                rtt_ms: Some(16.0),
                to_bytes_per_s: Some(1 << 20),
                from_bytes_per_s: None,
                to_streams_bytes_per_s: None,
                from_streams_bytes_per_s: None,
                problem: "no answer".to_owned(),
            }],
            disks: vec![
                DiskMeasurement {
                    path: DiskPath::Pool,
                    at: host.clone(),
                    figures: Some(DiskFigures {
                        size_bytes: 1 << 20,
                        read_bytes_per_s: 1e6,
                        random_reads_per_s: 250.0,
                        write_bytes_per_s: 1e6,
                        random_writes_per_s: 100.0,
                        direct: false,
                    }),
                    problem: String::new(),
                },
                DiskMeasurement {
                    path: DiskPath::Iscsi,
                    at: host,
                    figures: None,
                    problem: "no driver".to_owned(),
                },
            ],
        };
        let shown: Vec<String> =
            lines(&measured).iter().map(|line| format!("{}: {}", line.what, line.value)).collect();
        for line in [
            "round trip: 16.00 ms",
            "sends: 1 MiB/s",
            "receives: -",
            "link: not all was measured: no answer",
            "own disk (through the page cache): random reads: 250/s",
            "disk over iSCSI: not measured: no driver",
        ] {
            assert!(shown.iter().any(|shown| shown == line), "{line} in {shown:?}");
        }
    }
}
