//! Measures live migrations by Perigee and by bare QEMU, with the same machine, guest, WAN and volume servers.
//!
//! Each round-trip time has its own lab. Both systems run the same guest in it. While one guest is measured,
//! the QEMU of the other is stopped. In each round both guests are moved over the WAN, and the systems take
//! turns in going first. The way back is not measured.

mod bare;
mod guest;
mod perigee;
mod report;
mod results;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::{Definition, Lab, LabId, Options, Steps, import_everywhere, with_lab};
use perigee_model::job::NewImage;
use perigee_model::{HostId, ImageName, Problem};

use bare::Bare;
use guest::Guest;
use perigee::Perigee;
use results::{Measured, Measurement, Results, System};

pub const MEMORY_BYTES: u64 = 256 << 20;
pub const DATA_BYTES: u64 = 64 << 20;
pub const OUTPUT_BYTES: u64 = 1 << 20;

pub const BOOT_DEADLINE: Duration = Duration::from_secs(300);
/// How long a guest works again before it is moved.
const SETTLE: Duration = Duration::from_millis(1500);

const SETTING: &str = "One vCPU and 256 MiB, root disk at home1, data disk at cloud1, moved from home1 to cloud1 of a lab on \
     one machine. Bare QEMU has the command line of Perigee's QEMU but for its paths, and its disks are volumes of the same \
     volume servers, opened without an epoch and attached at both hosts beforehand; a script starts the destination and \
     migrates over QMP with Perigee's parameters. Both guests are in one lab, and while one moves the other's QEMU is stopped. \
     Medians; the load of the machine stands beside each measurement.";

const GOALS: &str = "Goals: the whole migration takes no longer than bare QEMU's (ratio at most 1), and the pause is at most \
     50 ms longer.";

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long)]
    program: PathBuf,
    /// The golden image's directory
    #[arg(long)]
    image: PathBuf,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/migration")]
    out: PathBuf,
    /// Round-trip times in ms [default: 0, 4 and 16]
    #[arg(long)]
    rtt: Vec<u32>,
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// One round at 16 ms, which only shows that it works
    #[arg(long)]
    quick: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let rtts_ms = match (&arguments.rtt[..], arguments.quick) {
        ([], true) => vec![16],
        ([], false) => vec![0, 4, 16],
        (given, _) => given.to_vec(),
    };
    let rounds = if arguments.quick { 1 } else { arguments.rounds };
    let mut results = Results::load(&arguments.out, &rtts_ms)?;
    (results.setting, results.goals) = (SETTING.to_owned(), GOALS.to_owned());
    results.cpus = std::thread::available_parallelism()?.get();
    results.versions = measuring::versions(measuring::version_of(&arguments.program), &[QEMU]);
    for rtt_ms in rtts_ms {
        let mut definition = Definition::default_demo(LabId::random(), rtt_ms);
        definition.probe_kernel = Some(arguments.image.join("vmlinuz"));
        let program = std::path::absolute(&arguments.program)?;
        let options = Options { program, ..Options::new()? };
        let work = async |lab: Lab| {
            let measured = measure(&lab, &arguments, rtt_ms, rounds, &mut results).await;
            measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
        };
        with_lab(definition, &options, &Steps::default(), work).await?;
    }
    print(&results);
    Ok(())
}

async fn measure(
    lab: &Lab,
    arguments: &Arguments,
    rtt_ms: u32,
    rounds: u32,
    results: &mut Results,
) -> Result<()> {
    let (near, far) = (HostId::new("home1")?, HostId::new("cloud1")?);
    let image = ImageName::new("debian")?;
    let source = std::path::absolute(arguments.image.join("debian-pg.raw"))?;
    let source = source.display().to_string();
    let leave_site = Default::default();
    let import = NewImage { name: image.clone(), source, format: None, host: None, leave_site };
    let client = lab.client(Duration::from_secs(600))?;
    import_everywhere(&client, &import).await?;
    for guest in Guest::ALL {
        eprintln!("{rtt_ms} ms, {}: booting", guest.name());
        let hosts = [&near, &far];
        let perigee = Perigee::boot(lab, guest, &image, hosts).await?;
        let machine = perigee.machine(&near)?;
        let held = Stopped::hold(perigee.pid(&near)?)?;
        let mut bare = Bare::boot(lab, guest, &image, machine, hosts).await?;
        drop(held);
        for round in 1..=rounds {
            let order = if round % 2 == 1 {
                [System::Bare, System::Perigee]
            } else {
                [System::Perigee, System::Bare]
            };
            for system in order {
                let load_1min = measuring::load_1min()?;
                let measured = move_one(&perigee, &mut bare, system, hosts).await?;
                eprintln!(
                    "{rtt_ms} ms, {}, round {round}: {system:?} {:.0} ms, QEMU {} ms, pause {} ms",
                    guest.name(),
                    measured.whole_ms,
                    measured.qemu_total_ms,
                    measured.pause_ms
                );
                results.measurements.push(Measurement {
                    rtt_ms,
                    guest,
                    system,
                    round,
                    load_1min,
                    measured,
                });
                results.compare();
                results.write(&arguments.out)?;
            }
        }
        drop(bare);
        perigee.end().await?;
    }
    Ok(())
}

/// Moves the guest over the WAN, which is measured, and back.
async fn move_one(
    perigee: &Perigee<'_>,
    bare: &mut Bare<'_>,
    system: System,
    [near, far]: [&HostId; 2],
) -> Result<Measured> {
    let _other = Stopped::hold(match system {
        System::Bare => perigee.pid(near)?,
        System::Perigee => bare.pid(),
    })?;
    tokio::time::sleep(SETTLE).await;
    match system {
        System::Bare => {
            let measured = bare.move_to(far)?;
            bare.move_to(near)?;
            Ok(measured)
        }
        System::Perigee => {
            let measured = perigee.move_to(far).await?;
            perigee.move_to(near).await?;
            Ok(measured)
        }
    }
}

/// A process that is stopped (SIGSTOP) while this lives.
struct Stopped(Pid);

impl Stopped {
    fn hold(pid: u32) -> Result<Self> {
        let pid = Pid::from_raw(i32::try_from(pid)?);
        kill(pid, Signal::SIGSTOP).context("stop the other QEMU")?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

#[expect(clippy::print_stdout, reason = "the medians are what it is for")]
fn print(results: &Results) {
    println!(
        "{:<8} {:>6} {:>6}  {:>24}  {:>24}  {:>22}",
        "guest",
        "RTT ms",
        "rounds",
        "whole ms: bare, Perigee",
        "QEMU ms: bare, Perigee",
        "pause ms"
    );
    for c in &results.comparisons {
        println!(
            "{:<8} {:>6} {:>6}  {:>8.0} {:>8.0} {:>6.2}  {:>8.0} {:>8.0} {:>6.2}  {:>7.0} {:>7.0} {:>+6.0}",
            c.guest.name(),
            c.rtt_ms,
            c.rounds,
            c.bare.whole_ms,
            c.perigee.whole_ms,
            c.whole_ratio,
            c.bare.qemu_total_ms,
            c.perigee.qemu_total_ms,
            c.qemu_total_ratio,
            c.bare.pause_ms,
            c.perigee.pause_ms,
            c.pause_longer_ms
        );
    }
    for missed in results.comparisons.iter().flat_map(report::missed) {
        println!("{missed}");
    }
}
