//! Measures one job in every placement of its data, against the round-trip time of the WAN, beside servers without
//! Perigee; and the move of a VM with its disk beside QEMU's own storage migration.
//!
//! One lab is used for all of it, and its WAN is changed while it runs. Each run has a clone of the data of its own.

mod bench;
mod case;
mod goals;
mod libvirt;
mod mirror;
mod moves;
mod paper;
mod perigee;
mod plain;
mod report;
mod results;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use perigee_lab::bare::Machine;
use perigee_lab::measuring::{self, QEMU};
use perigee_lab::wan::{Change, Rate};
use perigee_lab::{Lab, Options, Steps, with_lab};
use perigee_model::{Problem, VolumeName};

use bench::{Bench, Data, MEMORY_BYTES};
use case::{Way, Work};
use plain::Plain;
use results::Results;

/// The part of the experiment that moves a VM with its disk, in `--only`.
const MOVES: &str = "moves";
const MOVES_RTT_MS: u32 = 16;
const MOVES_RATE: &str = "1Gbit";

#[derive(Parser)]
struct Arguments {
    /// The `perigee` binary that the lab runs
    #[arg(long)]
    program: PathBuf,
    /// The golden image's directory
    #[arg(long)]
    image: PathBuf,
    /// The directory for results.json and report.html
    #[arg(long, default_value = "experiments/placement")]
    out: PathBuf,
    /// Round-trip times in ms; the whole grid is 0,1,2,4,8,16
    #[arg(long, value_delimiter = ',', default_value = "0,4,16")]
    rtts: Vec<u32>,
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Measure only these: tpch, scan, moves, and ways such as local, iscsi, nbd, remote, again, copy, stay, follow
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The size of the tables; 1 is about 1 GB
    #[arg(long, default_value_t = 0.1)]
    scale_factor: f64,
    #[arg(long, default_value_t = 384)]
    scan_mib: u64,
    /// What the VM that is moved with its disk has written
    #[arg(long, default_value_t = 2048)]
    overlay_mib: u64,
    /// Measure nothing: judge and draw what results.json has
    #[arg(long)]
    report_only: bool,
    /// Small data and one round trip, which only shows that it works
    #[arg(long)]
    quick: bool,
}

impl Arguments {
    fn small(mut self) -> Self {
        if self.quick {
            (self.rtts, self.rounds) = (vec![16], 1);
            (self.scale_factor, self.scan_mib, self.overlay_mib) = (0.01, 32, 64);
        }
        self
    }

    fn works(&self) -> Vec<Work> {
        let named = |work: &Work| self.only.iter().any(|word| word == work.name());
        let is_named = Work::ALL.iter().any(named);
        let only_moves = self.only.iter().all(|word| word == MOVES) && !self.only.is_empty();
        Work::ALL.into_iter().filter(|work| !only_moves && (!is_named || named(work))).collect()
    }

    fn ways(&self) -> Vec<Way> {
        let named = |way: &Way| self.only.iter().any(|word| word == way.name());
        let is_named = Way::ALL.iter().any(named);
        Way::ALL.into_iter().filter(|way| !is_named || named(way)).collect()
    }

    fn with_moves(&self) -> bool {
        self.only.is_empty() || self.only.iter().any(|word| word == MOVES)
    }

    fn check(&self) -> Result<()> {
        for word in &self.only {
            let known = word == MOVES
                || Work::ALL.iter().any(|work| work.name() == word)
                || Way::ALL.iter().any(|way| way.name() == word);
            ensure!(known, "--only {word}: there is no such work or way");
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse().small();
    arguments.check()?;
    let mut results = Results::load(&arguments.out)?;
    if arguments.report_only {
        results.write(&arguments.out)?;
        print(&results);
        return Ok(());
    }
    results.cpus = std::thread::available_parallelism()?.get();
    let perigee = measuring::version_of(&arguments.program);
    results.versions = measuring::versions(perigee, &[QEMU, ("qemu-nbd", "qemu-nbd")]);
    let program = std::path::absolute(&arguments.program)?;
    let options = Options { program, ..Options::new()? };
    let steps = Steps::default();
    let work = async |lab: Lab| {
        let measured = measure(&lab, &arguments, &options, &steps, &mut results).await;
        measured.map_err(|error| Problem::internal("the experiment", format!("{error:#}")))
    };
    with_lab(measuring::two_sites(&arguments.image), &options, &steps, work).await?;
    print(&results);
    Ok(())
}

async fn measure(
    lab: &Lab,
    arguments: &Arguments,
    options: &Options,
    steps: &Steps,
    results: &mut Results,
) -> Result<()> {
    let image = std::path::absolute(arguments.image.join("debian-pg.raw"))?;
    let scan_bytes = arguments.scan_mib << 20;
    let works = arguments.works();
    let data =
        (!works.is_empty()).then_some(Data { scale_factor: arguments.scale_factor, scan_bytes });
    let bench = Bench::prepare(lab, &image, data, steps).await?;
    if !works.is_empty() {
        (results.scale_factor, results.table_bytes) = (arguments.scale_factor, bench.table_bytes);
        results.scan_bytes = scan_bytes;
    }
    results.memory_bytes = MEMORY_BYTES;
    results.not_measured = not_measured();
    if !works.is_empty() {
        let ways = arguments.ways();
        let is_new = |work, way| works.contains(&work) && ways.contains(&way);
        let rtts = &arguments.rtts;
        results.runs.retain(|r| !(rtts.contains(&r.rtt_ms) && is_new(r.work, r.way)));
        let plain = Plain::prepare(&bench, &options.program, &works).await?;
        let mut known = Known::default();
        for round in 1..=arguments.rounds {
            for rtt_ms in rtts {
                let rtt_us = Some(u64::from(*rtt_ms) * 1000);
                bench.set_wan(Change { rtt_us, ..Change::default() }).await?;
                for work in &works {
                    let case =
                        Case { bench: &bench, plain: &plain, at: (*rtt_ms, round), work: *work };
                    case.run(&ways, &mut known, results, arguments).await?;
                }
            }
        }
    }
    if arguments.with_moves() {
        let rate = Some(MOVES_RATE.parse::<Rate>().map_err(anyhow::Error::msg)?);
        let rtt_us = Some(u64::from(MOVES_RTT_MS) * 1000);
        bench.set_wan(Change { rtt_us, rate, ..Change::default() }).await?;
        results.moves_wan = format!("{MOVES_RTT_MS} ms round trip, {MOVES_RATE}/s");
        results.disk_moves.clear();
        let mut machine = None;
        for overlay_bytes in [0, arguments.overlay_mib << 20] {
            let (moves, of) = moves::measure(&bench, overlay_bytes).await?;
            results.disk_moves.extend(moves);
            results.write(&arguments.out)?;
            machine = Some(of);
        }
        let machine = machine.context("a VM was moved")?;
        for overlay_bytes in [0, arguments.overlay_mib << 20] {
            results
                .disk_moves
                .push(mirror::measure(&bench, &machine, &image, overlay_bytes).await?);
            results.write(&arguments.out)?;
        }
        if libvirt::is_installed() {
            let moved = libvirt::measure(&bench, &image, arguments.overlay_mib << 20).await?;
            results.disk_moves.push(moved);
            results.write(&arguments.out)?;
        }
    }
    Ok(())
}

/// What the runs so far have shown.
#[derive(Default)]
struct Known {
    /// The command line of a VM of Perigee with a data volume.
    machine: Option<Machine>,
    /// All runs must give the same answers.
    answers: Option<String>,
}

/// One work at one round trip.
struct Case<'a> {
    bench: &'a Bench<'a>,
    plain: &'a Plain<'a>,
    /// The round trip in ms, and the round.
    at: (u32, u32),
    work: Work,
}

impl Case<'_> {
    async fn run(
        &self,
        ways: &[Way],
        known: &mut Known,
        results: &mut Results,
        arguments: &Arguments,
    ) -> Result<()> {
        let mut order: Vec<Way> =
            ways.iter().copied().filter(|way| way.is_measured_with(self.work)).collect();
        // The ones without Perigee need the command line of a VM of Perigee, and `again` comes after `remote`.
        order.sort_by_key(|way| (known.machine.is_none() && way.is_without_perigee(), *way));
        if known.machine.is_none() && order.first().is_some_and(|way| way.is_without_perigee()) {
            known.machine = Some(self.perigee(Way::Local, None).await?.1.machine);
        }
        let mut kept: Option<VolumeName> = None;
        for way in order {
            let run = match &known.machine {
                Some(machine) if way.is_without_perigee() => {
                    self.plain.run(self.at, self.work, way, machine).await?
                }
                _ => {
                    let used = kept.take().filter(|_| way == Way::Again);
                    let (volume, done) = self.perigee(way, used).await?;
                    known.machine = Some(done.machine);
                    if way == Way::Remote && ways.contains(&Way::Again) {
                        kept = Some(volume);
                    } else {
                        self.bench.cluster.delete_volume(&volume).await?;
                    }
                    done.run
                }
            };
            if self.work == Work::Tpch {
                let answers = known.answers.get_or_insert_with(|| run.answers_sha256.clone());
                ensure!(*answers == run.answers_sha256, "{}: other answers", way.words());
            }
            results.runs.push(run);
            results.write(&arguments.out)?;
        }
        Ok(())
    }

    /// Runs the job on a volume of an earlier run, or on a new clone.
    async fn perigee(
        &self,
        way: Way,
        used: Option<VolumeName>,
    ) -> Result<(VolumeName, perigee::Done)> {
        let volume = match used {
            Some(volume) => volume,
            None => {
                let name = VolumeName::new(self.bench.unique("data"))?;
                let of = self.bench.data(self.work);
                self.bench.cluster.clone_volume(&name, &of).await?;
                name
            }
        };
        let done = perigee::run(self.bench, self.at, self.work, way, &volume).await?;
        Ok((volume, done))
    }
}

fn not_measured() -> Vec<String> {
    let mut missing = Vec::new();
    if !libvirt::is_installed() {
        missing.push("libvirt's --copy-storage-inc: libvirt is not installed here.".to_owned());
    }
    missing
}

#[expect(clippy::print_stdout, reason = "the figures are what it is for")]
fn print(results: &Results) {
    for work in Work::ALL {
        println!("{}, seconds of work by round trip:", work.name());
        for way in Way::ALL.into_iter().filter(|way| way.is_measured_with(work)) {
            let cells: Vec<String> = results
                .rtts_ms()
                .into_iter()
                .map(|rtt_ms| {
                    let found = results.work_s(work, rtt_ms, way);
                    let found = found.map_or_else(|| "-".to_owned(), |s| format!("{s:.1}"));
                    format!("{rtt_ms} ms: {found}")
                })
                .collect();
            println!("  {:<16} {}", way.words(), cells.join("   "));
        }
    }
    for goal in &results.goals {
        let met = match goal.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "-",
        };
        println!("{met:<7} {}: {}", goal.goal, goal.measured);
    }
}
