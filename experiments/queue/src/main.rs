//! Measures what many jobs and many hosts cost the controller: seconds for each placement, operations of its
//! store, memory and CPU time, and how each grows.
//!
//! The controller is a process of its own. The hosts are the test doubles of the controller's tests. They are
//! in memory, with the real APIs, and their guests boot for a fixed time and succeed.

#[expect(dead_code, reason = "the tests of the controller use more of it")]
#[path = "../../../crates/controller/src/tests/fake.rs"]
mod fake;
mod guests;
mod load;
mod pages;
mod report;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use perigee_lab::measuring::{self, load_1min};

use load::{Case, Results};

#[derive(Parser)]
struct Options {
    /// Only show that it works
    #[arg(long)]
    quick: bool,
    #[arg(long, default_value = "experiments/queue")]
    out: PathBuf,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Subcommand)]
enum Part {
    /// The controller of one case; the experiment starts it itself
    #[command(hide = true)]
    Controller { state: PathBuf, address: String },
    /// So many hosts of the controller with this directory and this unix socket; the test of the pages starts them
    #[command(hide = true)]
    Hosts { state: PathBuf, api: String, count: usize },
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(Part::Hosts { state, api, count }) = &options.part {
        return pages::hosts(state, api, *count).await;
    }
    if let Some(Part::Controller { state, address }) = options.part {
        let listen = address.parse().map_err(anyhow::Error::msg)?;
        let config = perigee_controller::Config {
            names: Vec::new(),
            keep_outputs_s: perigee_controller::Live::new(None),
            publish_ports: Default::default(),
            data: None,
            state,
            listen: vec![listen],
            site: None,
            insecure: true,
            doors: perigee_controller::Doors::default(),
            prices: None,
            providers: None,
            web_certificate: None,
            rent_budget: perigee_controller::Live::new(None),
        };
        return Ok(perigee_controller::run(config).await?);
    }
    let load_1min = load_1min()?;
    // Pairs of hosts and jobs. First the hosts grow, then the jobs.
    let sizes: &[(usize, usize)] = if options.quick {
        &[(2, 12), (4, 12)]
    } else {
        &[(5, 200), (10, 200), (20, 200), (50, 200), (50, 500), (50, 1000)]
    };
    let mut cases: Vec<Case> = Vec::new();
    for (hosts, jobs) in sizes {
        let case = load::run(*hosts, *jobs)
            .await
            .with_context(|| format!("{hosts} hosts, {jobs} jobs"))?;
        eprintln!("{}", case.line());
        ensure!(case.succeeded == *jobs, "{} of {jobs} jobs succeeded", case.succeeded);
        cases.push(case);
    }
    let build = if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let versions = measuring::versions(measuring::own_version(), &[]);
    let boot_ms = guests::BOOT.as_millis();
    let results = Results { versions, build, cpus, load_1min, boot_ms, cases };
    fs::create_dir_all(&options.out)?;
    fs::write(options.out.join("results.json"), serde_json::to_string_pretty(&results)? + "\n")?;
    fs::write(options.out.join("report.html"), report::html(&results))?;
    Ok(())
}
