//! Measures a server while many diskless machines boot: SonD's experiment with today's software.
//!
//! One real boot is recorded as a trace of blocks. Many clients then replay it at its own pace over NBD and
//! iSCSI, against Perigee's volume server and against widely used servers.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]
#![expect(clippy::cast_precision_loss, reason = "figures for people")]

mod extents;
mod initiator;
mod machine;
mod outcome;
mod paper;
mod replay;
mod report;
mod script;
mod servers;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use perigee_lab::interrupt;
use perigee_lab::measuring::{self, median};
use perigee_model::trace::Operation;
use perigee_model::volume::BLOCK_BYTES;

use extents::Placement;
use machine::{Group, LoopDisk};
use outcome::{Allocation, Boot, Cache, Case, Layout, Responses, Results, mib};
use script::Script;
use servers::{Places, Running, Server};

/// Room for the golden image twice and once for each client, if private data are allocated completely. The disk
/// is sparse.
const DISK_BYTES: u64 = 96 << 30;
/// The server's own memory beside the page cache, in the cases with a memory limit. Most of it is for reads
/// that wait for the disk, and for the answers to each client.
const SERVER_MIB: u64 = 24;
const SERVER_CLIENT_MIB: f64 = 0.25;
/// Factors for the recorded times between an answer and the next request. The boot was recorded without
/// hardware virtualisation; with it a guest is about ten times faster.
const PACES: [f64; 2] = [1.0, 0.1];

#[derive(Parser)]
#[command(about = "Many diskless machines boot together")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Measure, and write `results.json` and `report.html` to --out
    Run(RunArgs),
    /// Judge an earlier run again, and draw its report
    Report { dir: PathBuf },
}

#[derive(Args)]
struct RunArgs {
    /// The program to measure
    #[arg(long, default_value = "target/release/perigee")]
    perigee: PathBuf,
    /// The recorded boot
    #[arg(long, default_value = "experiments/boot-storm/boot.trace")]
    trace: PathBuf,
    /// The golden image that was booted, raw
    #[arg(long)]
    image: PathBuf,
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// How many rounds to measure; in each the servers take turns
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// One round with fewer clients, which only shows that everything works
    #[arg(long)]
    quick: bool,
    /// How many reads a second a device answers, in the cases with a memory limit
    #[arg(long, default_value_t = 2000)]
    reads_per_s: u64,
    /// Only servers whose name contains this; may be given more than once
    #[arg(long)]
    server: Vec<String>,
    #[arg(long, default_value = "experiments/boot-storm")]
    out: PathBuf,
    /// The directory for disks and sockets while it runs; it must be on a real disk
    #[arg(long, default_value = "out/storm")]
    scratch: PathBuf,
}

fn main() -> ExitCode {
    match run_verb(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perigee-boot-storm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_verb(verb: Verb) -> Result<()> {
    match verb {
        Verb::Run(arguments) => measure(&arguments),
        Verb::Report { dir } => {
            let mut results: Results = measuring::earlier(&dir)?;
            results.write(&dir)
        }
    }
}

/// The settings that are the same for all storms.
struct Measure<'a> {
    arguments: &'a RunArgs,
    script: Arc<Script>,
    perigee: PathBuf,
    image: PathBuf,
    clients: usize,
    scratch: &'a Path,
    begin: Instant,
}

/// The settings of one storm.
#[derive(Clone, Copy)]
struct Setting {
    server: Server,
    round: u32,
    pace: f64,
    memory_max_mib: Option<u64>,
    reads_per_s_max: Option<u64>,
    allocation: Allocation,
    traced: bool,
}

fn measure(arguments: &RunArgs) -> Result<()> {
    interrupt::hold()?;
    fs::create_dir_all(&arguments.scratch).context("can't make the scratch directory")?;
    let scratch = tempfile::Builder::new().prefix("storm.").tempdir_in(&arguments.scratch)?;
    let trace = fs::read(&arguments.trace)
        .with_context(|| format!("can't read {}", arguments.trace.display()))?;
    let script = Arc::new(Script::parse(&trace)?);
    let perigee = arguments.perigee.canonicalize().context("the perigee binary")?;
    let image = arguments.image.canonicalize().context("the golden image")?;
    let dir = scratch.path().canonicalize()?;
    let measure = Measure {
        clients: if arguments.quick { 4 } else { arguments.clients },
        arguments,
        script,
        perigee,
        image,
        scratch: &dir,
        begin: Instant::now(),
    };
    let mut results = Results {
        versions: measuring::versions(
            measuring::version_of(&measure.perigee),
            &[("qemu-nbd", "qemu-nbd"), ("tgt", "tgtd")],
        ),
        clients: measure.clients,
        is_quick: arguments.quick,
        boot: boot_of(&measure.script),
        ..Results::default()
    };
    measure.all(&mut results)?;
    print_table(&results);
    scratch.close().context("can't remove the scratch directory")
}

fn boot_of(script: &Script) -> Boot {
    let blocks = |operation| mib(script.blocks(operation).len() as u64 * BLOCK_BYTES);
    Boot {
        requests: script.steps.len(),
        recorded_s: script.recorded.as_secs_f64(),
        read_mib: blocks(Operation::Read),
        written_mib: blocks(Operation::Write),
    }
}

/// What one storm showed.
struct Measured {
    storm: replay::Storm,
    server_cpu_s: f64,
    memory_peak_mib: f64,
    source_read_mib: f64,
    /// `None` without a disk for the clients' own data.
    private_read_mib: Option<f64>,
    /// `None` if the storm was not traced; so is `placement`.
    cache: Option<Cache>,
    placement: Option<Placement>,
}

impl Measure<'_> {
    fn all(&self, results: &mut Results) -> Result<()> {
        let rounds = if self.arguments.quick { 1 } else { self.arguments.rounds };
        for layout in [Layout::Together, Layout::Apart] {
            self.say(&format!("disks, source and private data {layout:?}"));
            let mut source =
                LoopDisk::make(self.scratch, &format!("source-{layout:?}"), DISK_BYTES)?;
            let mut private = match layout {
                Layout::Together => None,
                Layout::Apart => Some(LoopDisk::make(self.scratch, "private", DISK_BYTES)?),
            };
            self.places(&source, private.as_ref()).prepare()?;
            if layout == Layout::Together {
                let turns = (0..rounds).flat_map(|round| PACES.map(|pace| (round, pace)));
                for (round, pace) in turns {
                    for server in self.servers() {
                        let setting = Setting {
                            server,
                            round,
                            pace,
                            memory_max_mib: None,
                            reads_per_s_max: None,
                            allocation: Allocation::OnDemand,
                            traced: false,
                        };
                        let case = self.storm(setting, layout, &mut source, private.as_mut())?;
                        results.peers.push(case);
                        self.keep(results)?;
                    }
                }
            }
            let sizes = self.memory_sizes(results.boot.read_mib);
            for memory_max_mib in &sizes {
                let setting = self.limited(*memory_max_mib, Allocation::OnDemand);
                match self.storm(setting, layout, &mut source, private.as_mut()) {
                    Ok(case) => results.memory.push(case),
                    // This is too little memory for the server itself. The other sizes are still measured.
                    Err(error) => {
                        interrupt::check()?;
                        self.say(&format!("{memory_max_mib} MiB left out: {error:#}"));
                        results.too_small.push((layout, *memory_max_mib));
                    }
                }
                self.keep(results)?;
            }
            if layout == Layout::Together {
                // With this size both the source and the private data have to be read again.
                let memory_max_mib = sizes[sizes.len().min(2) - 1];
                for allocation in [Allocation::Fixed, Allocation::OnDemand] {
                    let setting = self.limited(memory_max_mib, allocation);
                    let case = self.storm(setting, layout, &mut source, private.as_mut())?;
                    results.allocation.push(case);
                    self.keep(results)?;
                }
            }
        }
        Ok(())
    }

    /// Perigee with little memory on slow devices.
    fn limited(&self, memory_max_mib: u64, allocation: Allocation) -> Setting {
        Setting {
            server: Server::PerigeeNbd,
            round: 0,
            pace: PACES[1],
            memory_max_mib: Some(memory_max_mib),
            reads_per_s_max: Some(self.arguments.reads_per_s),
            allocation,
            traced: true,
        }
    }

    fn servers(&self) -> impl Iterator<Item = Server> {
        let asked = &self.arguments.server;
        let wanted = move |server: &Server| asked.iter().any(|part| server.name().contains(part));
        Server::ALL.into_iter().filter(move |server| asked.is_empty() || wanted(server))
    }

    /// The memory sizes: a quarter, a half, the whole and twice of what one boot reads, plus the server's own
    /// memory.
    fn memory_sizes(&self, boot_mib: f64) -> Vec<u64> {
        let boot_mib = (1..).find(|mib| *mib as f64 >= boot_mib).unwrap_or(1);
        let cache_mib: &[u64] = if self.arguments.quick {
            &[boot_mib]
        } else {
            &[boot_mib / 4, boot_mib / 2, boot_mib, boot_mib * 2]
        };
        cache_mib.iter().map(|mib| self.server_mib() + mib).collect()
    }

    fn server_mib(&self) -> u64 {
        let clients_mib = self.clients as f64 * SERVER_CLIENT_MIB;
        SERVER_MIB + (1..).find(|mib| *mib as f64 >= clients_mib).unwrap_or(1)
    }

    fn places<'p>(&'p self, source: &'p LoopDisk, private: Option<&'p LoopDisk>) -> Places<'p> {
        Places {
            perigee: &self.perigee,
            image: &self.image,
            source: &source.dir,
            private: private.map_or(&source.dir, |disk| &disk.dir),
            scratch: self.scratch,
        }
    }

    fn storm(
        &self,
        setting: Setting,
        layout: Layout,
        source: &mut LoopDisk,
        mut private: Option<&mut LoopDisk>,
    ) -> Result<Case> {
        let Setting { server, round, pace, memory_max_mib, reads_per_s_max, allocation, .. } =
            setting;
        interrupt::check()?;
        self.places(source, private.as_deref()).make_disks(server, self.clients, &self.script)?;
        source.forget()?;
        if let Some(private) = &mut private {
            private.forget()?;
        }
        let private = private.as_deref();
        let places = self.places(source, private);
        // The server has ended when this returns, with an error too.
        let measured = self.measure(setting, &places, source, private);
        let removed = places.remove_disks(server, self.clients);
        let measured = measured?;
        removed?;
        let responses = Responses::of(&measured.storm);
        let up_s: Vec<f64> = measured.storm.up.iter().map(Duration::as_secs_f64).collect();
        let case = Case {
            server,
            round,
            pace,
            layout,
            allocation,
            memory_max_mib,
            reads_per_s_max,
            last_up_s: up_s.last().copied().context("a client that is up")?,
            median_up_s: median(up_s.iter().copied()).unwrap_or_default(),
            mean_response_ms: responses.mean_ms,
            p99_response_ms: responses.p99_ms,
            server_cpu_s: measured.server_cpu_s,
            memory_peak_mib: measured.memory_peak_mib,
            source_device_read_mib: measured.source_read_mib,
            private_device_read_mib: measured.private_read_mib,
            response_ms: responses.over_time,
            cache: measured.cache,
            placement: measured.placement,
        };
        self.say(&line(&case));
        Ok(case)
    }

    /// Starts the server, lets all clients boot, and reads the meters.
    fn measure(
        &self,
        setting: Setting,
        places: &Places<'_>,
        source: &LoopDisk,
        private: Option<&LoopDisk>,
    ) -> Result<Measured> {
        let Setting { server, pace, memory_max_mib, reads_per_s_max, allocation, traced, .. } =
            setting;
        let mut limits = vec![(source, reads_per_s_max)];
        limits.extend(private.map(|disk| (disk, reads_per_s_max)));
        let group = Group::make("server", memory_max_mib.map(|mib| mib << 20), &limits)?;
        let mut running = Running::start(server, places, &group, self.clients)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        if allocation == Allocation::Fixed {
            runtime.block_on(replay::touch(&self.script, &running.disks))?;
            places.allocate_all(self.clients)?;
        }
        let trace = self.scratch.join("storm.trace");
        if traced {
            places.start_trace()?;
        }
        let read_before = (source.read_bytes()?, private.map(LoopDisk::read_bytes).transpose()?);
        let cpu_before_s = running.cpu_s()?;
        let disks = running.disks.clone();
        let storm = runtime.block_on(async {
            tokio::select! {
                storm = replay::run(&self.script, &disks, pace) => storm,
                ended = running.ended() => Err(ended),
            }
        })?;
        drop(runtime);
        let private_read = private.map(LoopDisk::read_bytes).transpose()?;
        let private_read = private_read.zip(read_before.1).map(|(after, before)| after - before);
        let (server_cpu_s, memory_peak_mib) =
            (running.cpu_s()? - cpu_before_s, mib(group.memory_peak_bytes()?));
        let source_read_mib = mib(source.read_bytes()? - read_before.0);
        let (mut cache, mut placement) = (None, None);
        if traced {
            // What the server itself takes is not there for pages.
            let cache_mib = memory_max_mib.map(|mib| mib - self.server_mib());
            cache = Some(places.stop_trace(&trace, cache_mib.map(|mib| mib << 20))?);
            placement =
                Some(Placement::of_trace(&fs::read(&trace)?, &places.layers(self.clients)?)?);
        }
        Ok(Measured {
            storm,
            server_cpu_s,
            memory_peak_mib,
            source_read_mib,
            private_read_mib: private_read.map(mib),
            cache,
            placement,
        })
    }

    fn keep(&self, results: &mut Results) -> Result<()> {
        results.write(&self.arguments.out)
    }

    fn say(&self, what: &str) {
        println!("{:6.1} s  {what}", self.begin.elapsed().as_secs_f64());
    }
}

impl Places<'_> {
    fn start_trace(&self) -> Result<()> {
        self.perigee(&["volume", "trace", "start", "storm"])?;
        Ok(())
    }

    fn stop_trace(&self, file: &Path, cache_bytes: Option<u64>) -> Result<Cache> {
        let said = self.perigee(&["volume", "trace", "stop", "--format", "json"])?;
        let summary: perigee_model::volume::TraceSummary = serde_json::from_str(&said)?;
        if summary.lost > 0 {
            bail!("the trace lost {} requests", summary.lost);
        }
        fs::rename(&summary.file, file).or_else(|_| {
            fs::copy(&summary.file, file).and_then(|_| fs::remove_file(&summary.file))
        })?;
        Cache::of_trace(&fs::read(file)?, cache_bytes)
    }
}

fn line(case: &Case) -> String {
    let memory = case.memory_max_mib.map_or_else(String::new, |mib| format!(", {mib} MiB"));
    let reloads = case.cache.as_ref().map_or_else(String::new, |cache| {
        let Cache { source, private, .. } = cache;
        format!(
            "; source {} hits {} loads {} reloads; private {} hits {} reloads",
            source.hits, source.first_loads, source.reloads, private.hits, private.reloads
        )
    });
    format!(
        "{:?}{memory}, {:?}, pace {}: up after {:.1} s, mean response {:.2} ms, CPU {:.2} s, read {:.1} MiB, peak {:.0} MiB{reloads}",
        case.server,
        case.layout,
        case.pace,
        case.last_up_s,
        case.mean_response_ms,
        case.server_cpu_s,
        case.source_device_read_mib,
        case.memory_peak_mib,
    )
}

fn print_table(results: &Results) {
    println!("\n{} clients, medians of the rounds", results.clients);
    for (pace, server) in PACES.into_iter().flat_map(|pace| Server::ALL.map(|s| (pace, s))) {
        let of = |value: fn(&Case) -> f64| {
            let is_it = |case: &&Case| case.server == server && case.pace.total_cmp(&pace).is_eq();
            let cases = results.peers.iter().filter(is_it);
            median(cases.map(value)).unwrap_or_default()
        };
        println!(
            "  pace {pace:<4} {:<34} up {:6.2} s  CPU {:6.2} s  read {:8.1} MiB  peak {:6.1} MiB  response {:6.2} ms",
            server.name(),
            of(|case| case.last_up_s),
            of(|case| case.server_cpu_s),
            of(|case| case.source_device_read_mib),
            of(|case| case.memory_peak_mib),
            of(|case| case.mean_response_ms),
        );
    }
}
