//! `perigee lab`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use perigee_lab::wan::{LinkSettings, Rate, parse_loss, parse_rtt};
use perigee_lab::{Definition, LabId, LabSummary, Options, Steps, lab_file};
use perigee_model::Problem;

use crate::arguments::BaseOption;
use crate::commands::burst::{self, BurstOptions};
use crate::commands::faults::{self, FaultsOptions};
use crate::commands::lab_balance::{self, LabBalanceOptions};
use crate::commands::rented::{self, InstanceOptions, ProviderOptions};
use crate::commands::simulate::{self, SimulateOptions};
use crate::commands::soak::{self, SoakOptions};
use crate::commands::storm::{self, StormOptions};
use crate::commands::wan;
use crate::context::Context;
use crate::output::{self, Column, Format};

/// `perigee lab VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Start a lab: several sites and hosts on this machine, with a WAN between the sites
    Up {
        #[command(flatten)]
        shape: Shape,
    },
    /// Remove a lab and everything that carries its id, also after a crash
    Down {
        /// The lab's id, as `perigee lab list` shows it
        #[arg(required_unless_present = "all")]
        lab: Option<LabId>,
        /// Every lab on this machine
        #[arg(long, conflicts_with = "lab")]
        all: bool,
        #[command(flatten)]
        base: BaseOption,
    },
    /// List labs
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        base: BaseOption,
    },
    /// Start a lab, run a command or a shell with PERIGEE_API set, and remove the lab; or run an
    /// experiment in a lab of its own
    #[command(args_conflicts_with_subcommands = true)]
    Run {
        #[command(subcommand)]
        experiment: Option<Experiment>,
        #[command(flatten)]
        shape: Shape,
        /// The command and its arguments, after `--` [default: your shell]
        #[arg(last = true)]
        command: Vec<String>,
    },
    /// Show how a running VM moves to its data, as `make demo` does
    Demo {
        #[command(flatten)]
        shape: Shape,
        /// The golden image
        #[arg(long)]
        image: PathBuf,
        /// TPC-H scale factor; 1 is about 1 GB of tables
        #[arg(long, default_value_t = 0.05)]
        scale_factor: f64,
        /// Directory for report.html and results.json
        #[arg(long, default_value = "out/demo", value_name = "DIR")]
        out: PathBuf,
    },
    /// Simulate hosts and VMs without a lab: the balancer and the queue of the planner, beside other rules. The same seed gives the same run
    Simulate(SimulateOptions),
    /// The network between a lab's sites
    #[command(subcommand)]
    Wan(wan::Verb),
    /// Rent hosts of a running lab: the program of a provider, which takes a verb and reads one JSON object. `provider` in the lab's directory is
    /// the same for that lab
    Provider(ProviderOptions),
    /// What runs in a rented host; the provider starts it
    #[command(hide = true)]
    Instance(InstanceOptions),
    /// The process that carries frames between a lab's sites; its supervisor starts it
    #[command(hide = true)]
    Relay {
        lab: LabId,
        #[command(flatten)]
        base: BaseOption,
    },
    /// The process that keeps a lab's daemons alive; `up` starts it
    #[command(hide = true)]
    Supervise {
        lab: LabId,
        #[command(flatten)]
        base: BaseOption,
    },
}

/// Experiments that build a lab of their own and remove it.
#[derive(Debug, Subcommand)]
pub enum Experiment {
    /// Boot many VMs without disks at the same time over the network, each from its own clone
    BootStorm(StormOptions),
    /// Run jobs and moves while daemons are killed and the WAN is cut. Every job must end with the
    /// right answer, and nothing may be left behind
    Soak(SoakOptions),
    /// Inject each fault in each phase of each placement of a job's data. Afterwards no acknowledged data may be lost,
    /// the move must have completed or been undone with a reason, and nothing may be left behind
    Faults(FaultsOptions),
    /// Let busy VMs at one host balance to an idle one, while the controller is killed. No VM may move twice, and no guest may notice
    Balance(LabBalanceOptions),
    /// Let the rule rent hosts for a queue that is long for two small hosts, and give them back, as `make demo-burst` does
    Burst(BurstOptions),
}

/// What a lab is like: sites, hosts and links from a file or by default.
#[derive(Debug, clap::Args)]
pub struct Shape {
    /// The lab's definition, YAML: its sites, hosts and links
    /// [default: site `home` with two hosts, site `cloud` with one]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The lab's id, four hexadecimal digits [default: random]
    #[arg(long)]
    id: Option<LabId>,
    /// Round-trip time of the links for which FILE sets none
    #[arg(long, default_value = "16ms", value_name = "TIME", value_parser = parse_rtt)]
    rtt: u64,
    /// Bits per second in each direction: 100Mbit, 1Gbit, unlimited
    #[arg(long, default_value = "unlimited")]
    rate: Rate,
    /// Share of frames that is lost in each direction: 0.1%
    #[arg(long, default_value = "0%", value_name = "SHARE", value_parser = parse_loss)]
    loss: u32,
    /// The kernel to boot for a test of KVM [default: the newest in /boot]
    #[arg(long, value_name = "FILE")]
    probe_kernel: Option<PathBuf>,
    /// Encrypt nothing between the hosts, to see what encryption costs
    #[arg(long)]
    insecure: bool,
    #[command(flatten)]
    base: BaseOption,
}

impl Shape {
    fn lab(self) -> Result<(Definition, Options), Problem> {
        let id = self.id.unwrap_or_else(LabId::random);
        let settings = LinkSettings {
            rate: self.rate,
            loss_ppm: self.loss,
            ..LinkSettings::of_rtt_us(self.rtt)
        };
        let mut definition = match &self.file {
            Some(file) => lab_file::read(file, id, settings)?,
            None => Definition::new(id, Definition::default_sites(), settings),
        };
        definition.probe_kernel = self.probe_kernel;
        definition.insecure = self.insecure;
        Ok((definition, Options { base: self.base.base, ..Options::new()? }))
    }
}

const LABS: &[Column<LabSummary>] = &[
    ("lab", |l| l.id.to_string()),
    ("hosts", |l| {
        let names = |s: &perigee_lab::SiteDef| {
            let hosts: Vec<_> = s.hosts.iter().map(ToString::to_string).collect();
            format!("{}: {}", s.name, hosts.join(", "))
        };
        l.sites.iter().map(names).collect::<Vec<_>>().join("; ")
    }),
    ("links", |l| {
        let links = l.links.iter().map(|link| format!("{link}: {}", link.settings));
        links.collect::<Vec<_>>().join("; ")
    }),
    ("supervised", |l| if l.supervised { "yes" } else { "no: remove it" }.to_owned()),
    ("api", |l| l.api.clone()),
];

/// Builds, lists or removes labs, with a line on standard error for each step. The exit code is that of the command
/// of `lab run`, or says whether an experiment has found something wrong.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    let steps = Steps::default();
    if matches!(verb, Verb::Run { .. } | Verb::Demo { .. } | Verb::Simulate(_)) {
        output::outlive_reader();
    }
    match verb {
        Verb::Up { shape } => {
            let (definition, options) = shape.lab()?;
            let lab = perigee_lab::up(definition, &options, &steps).await?;
            if context.format == Format::Table {
                output::text(&format!("export PERIGEE_API={}", lab.api));
            } else {
                let labs = perigee_lab::list(&options.base)?;
                let up = labs.into_iter().filter(|l| l.id == lab.definition.id).collect::<Vec<_>>();
                output::list(context.format, &up, LABS)?;
            }
            output::note(&format!("remove it with: perigee lab down {}", lab.definition.id));
        }
        Verb::Down { lab: Some(lab), base, .. } => {
            if !perigee_lab::down(&base.base, &lab).await? {
                return Err(Problem::not_found(
                    format!("can't remove lab {lab}"),
                    "nothing on this machine has this id",
                )
                .next("`perigee lab list` shows the labs of this machine"));
            }
        }
        Verb::Down { base, .. } => {
            for id in perigee_lab::down_all(&base.base).await? {
                output::text(&id.to_string());
            }
        }
        Verb::List { base } => {
            output::list(context.format, &perigee_lab::list(&base.base)?, LABS)?;
        }
        Verb::Run { experiment: Some(Experiment::BootStorm(options)), .. } => {
            storm::run(options, context.format, &steps).await?;
        }
        Verb::Run { experiment: Some(Experiment::Soak(options)), .. } => {
            return soak::run(options, context, &steps).await;
        }
        Verb::Run { experiment: Some(Experiment::Faults(options)), .. } => {
            return faults::run(options, context, &steps).await;
        }
        Verb::Run { experiment: Some(Experiment::Balance(options)), .. } => {
            return lab_balance::run(options, context, &steps).await;
        }
        Verb::Run { experiment: Some(Experiment::Burst(options)), .. } => {
            burst::run(options, context, &steps).await?;
        }
        Verb::Run { experiment: None, shape, command } => {
            let (definition, options) = shape.lab()?;
            let code = perigee_lab::run(definition, &options, &steps, &command).await?;
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
        Verb::Demo { shape, image, scale_factor, out } => {
            let (definition, lab) = shape.lab()?;
            let options = perigee_lab::demo::Options { definition, lab, image, scale_factor, out };
            perigee_lab::demo::demo(options, &steps).await?;
        }
        Verb::Simulate(options) => simulate::run(options, context.format, &steps).await?,
        Verb::Wan(verb) => wan::run(verb, context, &steps).await?,
        Verb::Provider(options) => return rented::provider(options).await,
        Verb::Instance(options) => rented::instance(options).await?,
        Verb::Relay { lab, base } => perigee_lab::wan::relay(&base.base, &lab)?,
        Verb::Supervise { lab, base } => perigee_lab::supervise(&base.base, &lab).await?,
    }
    Ok(ExitCode::SUCCESS)
}
