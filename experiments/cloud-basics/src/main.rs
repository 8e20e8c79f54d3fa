//! What an own host and a rented one can do, measured by `perigee host measure`, beside what Toyoshima and others found of their cluster and of
//! Amazon EC2.
//!
//! The lab has two sites with a WAN between them. The site `home` has two own hosts. The site `cloud` has one, and another one is rented there from
//! the lab as a provider.

mod paper;
mod report;
mod results;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use perigee_http::Client;
use perigee_lab::measuring::{self, load_1min};
use perigee_lab::wan::{LinkSettings, Rate};
use perigee_lab::{Definition, Lab, LabId, Options, Steps, with_lab};
use perigee_model::measurement::{HostMeasurement, MeasurementState};
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::{HostId, Problem, ProblemKind};
use serde_json::json;

use results::Results;

/// How long anything but a measurement may take.
const DEADLINE: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(500);
const OWN: &str = "home1";
const NEIGHBOUR: &str = "home2";
const CLOUD_NEIGHBOUR: &str = "cloud1";

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long, default_value = "target/release/perigee")]
    program: PathBuf,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/cloud-basics")]
    out: PathBuf,
    /// The round-trip time of the WAN in ms
    #[arg(long, default_value_t = 16)]
    rtt: u64,
    /// The rate of the WAN in Mbit/s
    #[arg(long, default_value_t = 200)]
    rate: u64,
    /// For how long each figure is measured, in seconds
    #[arg(long, default_value_t = 10)]
    length: u64,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// A second for each figure, which only shows that it works
    #[arg(long)]
    quick: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    if arguments.report_only {
        return finish(measuring::earlier(&arguments.out)?, &arguments.out);
    }
    if arguments.quick {
        arguments.length = 1;
    }
    let rate = Rate(Some(arguments.rate * 1_000_000));
    let wan = LinkSettings { rate, ..LinkSettings::of_rtt_us(arguments.rtt * 1000) };
    let mut definition = Definition::new(LabId::random(), Definition::default_sites(), wan);
    // No VM runs, so nothing is booted to find out whether KVM works.
    definition.probe_kernel = Some(PathBuf::from("/dev/null"));
    definition.rent.boot_s = 0;
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let versions =
        measuring::versions(measuring::version_of(&arguments.program), &[("qemu-img", "qemu-img")]);
    let work = async |lab: Lab| {
        let measured = measure(&lab, &arguments).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    let [own, rented] = with_lab(definition, &options, &Steps::default(), work).await?;
    let results = Results {
        versions,
        cpus: std::thread::available_parallelism()?.get(),
        load_1min: load_1min()?,
        is_quick: arguments.quick,
        rtt_ms: arguments.rtt,
        rate_bits_per_s: arguments.rate * 1_000_000,
        length_s: arguments.length,
        own,
        rented,
        paper: Vec::new(),
    };
    finish(results, &arguments.out)
}

/// Judges, writes and prints.
fn finish(mut results: Results, out: &Path) -> Result<()> {
    results.paper = paper::figures(&results);
    std::fs::create_dir_all(out)?;
    for (name, content) in [
        ("results.json", serde_json::to_string_pretty(&results)? + "\n"),
        ("report.html", report::html(&results)),
    ] {
        let path = out.join(name);
        std::fs::write(&path, content)
            .with_context(|| format!("can't write {}", path.display()))?;
    }
    print(&results);
    Ok(())
}

/// The own host and the rented one, each against its neighbour and against the other one.
async fn measure(lab: &Lab, arguments: &Arguments) -> Result<[HostMeasurement; 2]> {
    let client = lab.client(Duration::from_secs(30))?;
    let rented = rent(&client).await?;
    let measure = async |host: &str, against: [&str; 2]| {
        eprintln!("measuring {host} against {}", against.join(" and "));
        let ask = json!({"against": against, "length_s": arguments.length});
        let path = format!("/v1/hosts/{host}/measure");
        let begun = Instant::now();
        loop {
            match client.post::<HostMeasurement>(&path, &ask).await {
                Ok(_) => break,
                // A rented host of a new kind is measured by itself, for a shorter time.
                Err(problem)
                    if problem.kind == ProblemKind::Conflict && begun.elapsed() < DEADLINE =>
                {
                    free(&client, &rented).await?;
                }
                Err(problem) => return Err(problem.into()),
            }
        }
        // Twelve figures of disks and links for each other host, each of which may begin with slow runs.
        let most = Duration::from_secs(arguments.length * 32 * 4) + DEADLINE;
        let measured = until(&client, host, most).await?;
        ensure!(measured.state == MeasurementState::Done, "{host}: {}", measured.now);
        Ok::<_, anyhow::Error>(measured)
    };
    let own = measure(OWN, [NEIGHBOUR, rented.as_str()]).await?;
    let of_rented = measure(rented.as_str(), [CLOUD_NEIGHBOUR, OWN]).await?;
    Ok([own, of_rented])
}

async fn rent(client: &Client) -> Result<HostId> {
    let ask = json!({"provider": "lab", "kind": "lab.small", "zone": "cloud", "site": "cloud"});
    let rental: Rental = client.post("/v1/rentals", &ask).await?;
    let begun = Instant::now();
    while begun.elapsed() < DEADLINE {
        let now: Rental = client.get(&format!("/v1/rentals/{}", rental.id)).await?;
        match now.state {
            RentalState::Joined => return Ok(now.host),
            RentalState::Ending | RentalState::Gone => bail!("it did not join: {}", now.why),
            _ => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
    bail!("the rented host has not joined within {DEADLINE:?}")
}

/// Calls off what the host is measured for now.
async fn free(client: &Client, host: &HostId) -> Result<()> {
    let path = format!("/v1/hosts/{host}/measure");
    // The next request comes after a pause, also if the host is not measured any more.
    tokio::time::sleep(Duration::from_secs(5)).await;
    match client.delete_answered::<HostMeasurement>(&path).await {
        Ok(_) => until(client, host.as_str(), DEADLINE).await.map(drop),
        Err(problem) if problem.kind == ProblemKind::Conflict => Ok(()),
        Err(problem) => Err(problem.into()),
    }
}

/// Until the host is not measured any more.
async fn until(client: &Client, host: &str, most: Duration) -> Result<HostMeasurement> {
    let begun = Instant::now();
    let mut last = String::new();
    while begun.elapsed() < most {
        let now: HostMeasurement = client.get(&format!("/v1/hosts/{host}/measure")).await?;
        if now.state != MeasurementState::Measuring {
            return Ok(now);
        }
        if now.now != last {
            eprintln!("  {}", now.now);
            last = now.now;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bail!("the measurement of {host} has not ended within {most:?}: {last}")
}

#[expect(clippy::print_stdout, reason = "the comparison is what it is for")]
fn print(results: &Results) {
    for figure in &results.paper {
        println!("{}: {}: {}", figure.figure, figure.verdict.words(), figure.ours);
    }
}
