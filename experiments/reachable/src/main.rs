//! A web server and an application server in a guest answer while the guest moves over a WAN: with Perigee, in a network of its tenant, and with bare
//! QEMU on a plain bridge over both hosts.
//!
//! Both run the same guest in the same lab, one after the other. Its clients are in a network namespace of their own, beside the
//! first host: load generators with new connections, SSH sessions, and a download of one file.

mod bare;
mod clients;
mod ground;
mod guest;
mod paper;
mod perigee;
mod report;
mod results;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::measuring::{self, QEMU, two_sites};
use perigee_lab::wan::LinkSettings;
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::{HostId, Problem};

use bare::Bare;
use clients::Clients;
use ground::Ground;
use perigee::Perigee;
use results::{Moved, Results, Run, Sending, System};

const RTT_MS: u32 = 16;
/// How long the guest serves before its first move, between two, and after the last one.
const SETTLE: Duration = Duration::from_secs(4);

const SETTING: &str = "nginx and Tomcat in a guest of one vCPU and 512 MiB, whose root disk stays at home1, moves between home1 and cloud1 of a lab on \
     one machine with 16 ms of round trip between them. Its clients are beside home1: hey asks for a page of 1 KiB, 50 times a second over \
     10 workers, with a new connection each time, and for a page of a shop that Tomcat makes, 10 times a second over 2 workers; an SSH session prints ten lines a second; curl downloads a file of 1 GiB with at most 500 kB/s, until all moves are over; a second session is that of `perigee vm ssh`, through the controller. With Perigee \
     the guest is in a network of its tenant (WireGuard, VXLAN, filter) and the clients reach it at a published port of home1. Bare QEMU's guest \
     has the same command line and is on a bridge of both hosts that learns (a VXLAN without encryption), on which the clients are too; \
     it migrates over plain TCP with Perigee's parameters, and its root disk is a volume of the same volume server.";

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long, default_value = "target/release/perigee")]
    program: PathBuf,
    /// The golden image's directory; it has nginx and OpenSSH too
    #[arg(long)]
    image: Option<PathBuf>,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/reachable")]
    out: PathBuf,
    #[arg(long, default_value_t = 10)]
    moves: u32,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// Two moves, which only show that it works
    #[arg(long)]
    quick: bool,
    /// Perigee encrypts nothing between the hosts, to see what that costs
    #[arg(long)]
    insecure: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.report_only {
        let mut results: Results = measuring::earlier(&arguments.out)?;
        results.write(&arguments.out)?;
        print(&results);
        return Ok(());
    }
    let image = arguments.image.as_deref().context("--image is missing")?;
    let mut definition = two_sites(image);
    definition.insecure = arguments.insecure;
    for link in &mut definition.links {
        link.settings = LinkSettings::of_rtt_us(u64::from(RTT_MS) * 1000);
    }
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let work = async |lab: Lab| {
        let measured = measure(&lab, &arguments, image).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    with_lab(definition, &options, &Steps::default(), work).await?;
    Ok(())
}

async fn measure(lab: &Lab, arguments: &Arguments, image: &Path) -> Result<()> {
    let hosts = [HostId::new("home1")?, HostId::new("cloud1")?];
    let ground = Ground::make(lab, &hosts)?;
    let mut results = Results {
        cpus: std::thread::available_parallelism()?.get(),
        setting: SETTING.to_owned(),
        is_quick: arguments.quick,
        versions: measuring::versions(measuring::version_of(&arguments.program), &[QEMU]),
        ..Results::default()
    };
    if arguments.insecure {
        results.setting.push_str(" Here Perigee encrypts nothing between the hosts.");
    }
    results.versions.insert("nginx, Tomcat, sshd".to_owned(), "Debian's, in the guest".to_owned());
    let image = std::path::absolute(image.join("debian-pg.raw"))?;
    let perigee = Perigee::boot(lab, &ground, &image, &hosts[0]).await?;
    // It is taken before the VM is gone.
    let machine = perigee.machine(&hosts[0])?;
    let seed = perigee.seed(&hosts[0]).await?;
    let clients = Clients::begin(
        &ground,
        ground.published(),
        lab.dir(),
        Some((lab, &arguments.program, perigee.vm())),
    )?;
    let moves = drive(arguments, &hosts, async |to| perigee.move_to(to).await).await?;
    results.runs.push(clients.end(System::Perigee, moves)?);
    perigee.end().await?;
    results.write(&arguments.out)?;
    let mut bare = Bare::boot(lab, machine, seed, &hosts).await?;
    let clients = Clients::begin(&ground, ground.plain(), lab.dir(), None)?;
    let moves = drive(arguments, &hosts, async |to| bare.move_to(to)).await?;
    results.runs.push(clients.end(System::Bare, moves)?);
    results.write(&arguments.out)?;
    print(&results);
    Ok(())
}

/// Moves the guest to and fro.
async fn drive(
    arguments: &Arguments,
    [near, far]: &[HostId; 2],
    mut move_to: impl AsyncFnMut(&HostId) -> Result<Sending>,
) -> Result<Vec<Moved>> {
    let begun = Instant::now();
    let mut moves = Vec::new();
    let count = if arguments.quick { 2 } else { arguments.moves };
    ensure!(count > 0, "one move at least");
    tokio::time::sleep(SETTLE).await;
    for number in 0..count {
        let to = if number % 2 == 0 { far } else { near };
        let begun_s = begun.elapsed().as_secs_f64();
        let sending = move_to(to).await.with_context(|| format!("move {} to {to}", number + 1))?;
        let ended_s = begun.elapsed().as_secs_f64();
        let (whole_s, mib) = (ended_s - begun_s, sending.sent_bytes >> 20);
        let Sending { pause_ms, copy_ms, .. } = sending;
        eprintln!(
            "move {} to {to}: {whole_s:.1} s, {mib} MiB in {copy_ms} ms, pause {pause_ms} ms",
            number + 1
        );
        moves.push(Moved { to: to.to_string(), begun_s, ended_s, sending });
        tokio::time::sleep(SETTLE).await;
    }
    Ok(moves)
}

/// Where the lab has the files of a host.
pub fn dir_of(lab: &Lab, host: &HostId) -> PathBuf {
    Path::new(&lab.dir()).join("hosts").join(host.as_str())
}

#[expect(clippy::print_stdout, reason = "the figures are what it is for")]
fn print(results: &Results) {
    for Run { system, replies, failed, longest_gap_ms, tomcat, ssh, download, .. } in &results.runs
    {
        println!(
            "{system:?}: {replies} replies, {failed} failed, longest gap {longest_gap_ms:.0} ms; Tomcat: {} replies, {} failed, longest gap {:.0} ms; SSH went on: {}, longest gap {:.0} ms; \
             download: {} MiB, went on: {}",
            tomcat.replies,
            tomcat.failed,
            tomcat.longest_gap_ms,
            ssh.goes_on,
            ssh.longest_gap_ms,
            download.bytes >> 20,
            download.goes_on
        );
    }
    for goal in results.goals().iter().filter(|goal| goal.met != Some(true)) {
        println!("missed: {}: {}", goal.goal, goal.measured);
    }
}
