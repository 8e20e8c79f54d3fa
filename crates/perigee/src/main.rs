//! `perigee`, the only binary. It parses arguments, calls the other crates and prints their results.
//!
//! | question | file |
//! |---|---|
//! | What may a guest's output do to a terminal? | nothing: `terminal.rs` |
//! | Which input files may a job file name? | `commands/inputs.rs` |
//! | What does a command do that waits for work while the controller is away? | `commands/asking.rs` |
//! | How does a newcomer run everything in one process? | `commands/dev.rs` |
//! | What may stand in a daemon's file, and where is that said? | the daemon's flags, and nowhere else: `config.rs`; what changes without a restart: `commands/daemon.rs` |
//! | How is a first controller made, and how does a host join it? | `commands/init.rs`, `commands/join.rs`; what is looked at before: `commands/doctor.rs` |
//! | What can somebody see who listens between the sites? | nothing of the data: `perigee/tests/system/listening.rs` |
//!
//! `scripts/check-floors` refuses an import that runs up this list:
//!
//! ```text
//! floors, from the ground up:
//! arguments, terminal, logging
//! output, config
//! context
//! kept_login
//! servers
//! commands
//! ```

mod arguments;
mod commands;
mod config;
mod context;
mod kept_login;
mod logging;
mod output;
mod servers;
mod terminal;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use perigee_model::Problem;
use perigee_model::upgrade::DaemonVersion;
use tracing_subscriber::filter::LevelFilter;

use crate::commands::{
    agent, backup, balancing, boot, client, cluster_network, configuration, controller, data, dev,
    host, image, job, lab, login, planner, pool, price, rent, slurm, tenant, top, upgrade, user,
    vm, volume,
};
use crate::config::{Refused, Told};
use crate::context::Context;
use crate::output::Format;

/// The commit of which this program was built, if whoever has built it said the commit.
const COMMIT: Option<&str> = option_env!("PERIGEE_COMMIT");

/// As the daemons say it too.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    DaemonVersion::built_of(COMMIT);
    DaemonVersion::own().to_string()
});

/// Runs virtual-machine jobs where their data is.
#[derive(Debug, Parser)]
#[command(version = VERSION.as_str(), propagate_version = true, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    /// Address of the controller's API: `unix:PATH`, `https://HOST:PORT` or `http://HOST:PORT` [default: that of
    /// `perigee login`, else unix:/run/perigee/controller.sock]
    #[arg(long, global = true, env = "PERIGEE_API", value_name = "ADDRESS")]
    api: Option<String>,
    /// The certificate with which a person reaches the controller over https
    #[arg(
        long,
        global = true,
        env = "PERIGEE_OPERATOR",
        default_value = "/etc/perigee/operator",
        value_name = "DIR"
    )]
    operator: PathBuf,
    /// Format of the output
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    format: Format,
    #[command(subcommand)]
    noun: Noun,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 internal, 2 wrong usage, 3 invalid, 4 not found, 5 conflict, 6 no space, \
7 unavailable, 8 not supported by this host, 9 not allowed. `job submit --wait`, `lab run` and `vm exec` end with the code of the \
program that they ran.";

#[derive(Debug, Subcommand)]
enum Noun {
    /// Jobs: submit, plan, watch, explain
    #[command(subcommand)]
    Job(job::Verb),
    /// Golden images and snapshots
    #[command(subcommand)]
    Image(image::Verb),
    /// Volumes, and the volume server
    #[command(subcommand)]
    Volume(volume::Verb),
    /// Backups of volumes
    #[command(subcommand)]
    Backup(backup::Verb),
    /// Pools: directories that hold volumes and images
    #[command(subcommand)]
    Pool(pool::Verb),
    /// Machines without disks that boot from a pool
    #[command(subcommand)]
    Client(client::Verb),
    /// Network boot for machines without disks
    #[command(subcommand)]
    Boot(boot::Verb),
    /// Virtual machines
    #[command(subcommand)]
    Vm(vm::Verb),
    /// Networks of a tenant, which span hosts and sites
    #[command(subcommand)]
    Network(cluster_network::Verb),
    /// Files of the repository: send, fetch, share
    #[command(subcommand)]
    Data(data::Verb),
    /// Programs that Slurm calls for nodes that are VMs
    #[command(subcommand)]
    Slurm(slurm::Verb),
    /// How well the planner predicts
    #[command(subcommand)]
    Planner(planner::Verb),
    /// What hosts, disks and traffic cost
    #[command(subcommand)]
    Price(price::Verb),
    /// Hosts that are rented from a cloud, and given back
    #[command(subcommand)]
    Rent(rent::Verb),
    /// Hosts
    #[command(subcommand)]
    Host(host::HostVerb),
    /// Sites
    #[command(subcommand)]
    Site(host::SiteVerb),
    /// Which VMs would lose less at another host
    #[command(subcommand)]
    Cluster(balancing::Verb),
    /// Network measurements between hosts
    #[command(subcommand)]
    Link(host::LinkVerb),
    /// Sites and hosts on this one machine, with real VMs and a WAN
    #[command(subcommand)]
    Lab(lab::Verb),
    /// Run everything on this machine, in one process, to try Perigee or to develop it
    Dev(dev::Options),
    /// The agent of a host
    #[command(subcommand)]
    Agent(agent::Verb),
    /// The controller of a cluster
    #[command(subcommand)]
    Controller(controller::Verb),
    /// An upgrade of the cluster to another version of Perigee
    #[command(subcommand)]
    Upgrade(upgrade::Verb),
    /// The files of the daemons in /etc/perigee
    #[command(subcommand)]
    Config(configuration::Verb),
    /// Tenants: people who share their volumes, images and jobs, and a quota
    #[command(subcommand)]
    Tenant(tenant::Verb),
    /// Users of tenants, and their SSH keys
    #[command(subcommand)]
    User(user::Verb),
    /// Tokens with which users log in
    #[command(subcommand)]
    Token(user::TokenVerb),
    /// Keep a token, so that the other commands use it. The token is read from standard input
    Login(login::Login),
    /// Forget the token that `perigee login` has kept
    Logout,
    /// Show who you are for the controller
    Whoami,
    /// Show who has asked for what: changes, and what was refused
    Audit(tenant::Audit),
    /// Show what hosts and VMs do, again and again until Ctrl-C
    Top(top::Options),
    /// Print completions for a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let (cli, told) = match arguments() {
        Ok(arguments) => arguments,
        Err(Refused::Usage(error)) => with_follow(error).exit(),
        Err(Refused::Problem(problem)) => return fail(&problem, problem.exit_code()),
    };
    // A newcomer's terminal shows what is wrong, and nothing else of three daemons.
    let is_dev = matches!(cli.noun, Noun::Dev(_));
    logging::start(if is_dev { LevelFilter::WARN } else { LevelFilter::INFO });
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&Problem::internal("can't start the runtime", error), 1),
    };
    let context = Context { api: cli.api, operator: cli.operator, format: cli.format };
    let planning = matches!(cli.noun, Noun::Job(job::Verb::Plan { .. }));
    match runtime.block_on(run(cli.noun, &context, told)) {
        Ok(code) => code,
        Err(problem) => {
            let code = if planning { 255 } else { problem.exit_code() };
            fail(&problem, code)
        }
    }
}

/// What the command is told, by its arguments and, if it runs a daemon, by the daemon's file.
fn arguments() -> Result<(Cli, Option<Told>), Refused> {
    let (matches, told) = config::arguments(Cli::command(), std::env::args_os().collect())?;
    let cli = Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut Cli::command()))?;
    Ok((cli, told))
}

/// Who follows logs with other programs writes `perigee job log -f JOB`.
fn with_follow(mut error: clap::Error) -> clap::Error {
    let is_format = error.kind() == ErrorKind::InvalidValue
        && matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::String(arg)) if arg.starts_with("--format"));
    let words: Vec<_> = std::env::args_os().collect();
    if is_format && words.windows(2).any(|pair| pair[0] == "job" && pair[1] == "log") {
        let tip = "-f is --format; to print new lines until the job has ended, say `perigee job log JOB --follow`";
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

async fn run(noun: Noun, context: &Context, told: Option<Told>) -> Result<ExitCode, Problem> {
    match noun {
        Noun::Job(verb) => return job::run(verb, context).await,
        Noun::Image(verb) => return image::run(verb, context).await,
        Noun::Volume(verb) => return volume::run(verb, context, told).await,
        Noun::Pool(verb) => pool::run(verb, context).await?,
        Noun::Backup(verb) => backup::run(verb, context).await?,
        Noun::Boot(verb) => return boot::run(verb, context).await,
        Noun::Client(verb) => client::run(verb, context).await?,
        Noun::Vm(verb) => return vm::run(verb, context).await,
        Noun::Network(verb) => return cluster_network::run(verb, context).await,
        Noun::Data(verb) => data::run(verb, context).await?,
        Noun::Slurm(verb) => return slurm::run(verb, context).await,
        Noun::Planner(verb) => planner::run(verb, context).await?,
        Noun::Price(verb) => price::run(verb, context).await?,
        Noun::Host(verb) => return host::run(verb, context, Cli::command()).await,
        Noun::Rent(verb) => rent::run(verb, context).await?,
        Noun::Cluster(verb) => return balancing::run(verb, context).await,
        Noun::Site(verb) => host::run_site(verb, context).await?,
        Noun::Link(verb) => host::run_link(verb, context).await?,
        Noun::Lab(verb) => return lab::run(verb, context).await,
        Noun::Dev(options) => dev::run(options, context).await?,
        Noun::Agent(verb) => agent::run(verb, told).await?,
        Noun::Controller(verb) => controller::run(verb, context, (Cli::command(), told)).await?,
        Noun::Upgrade(verb) => upgrade::run(verb, context).await?,
        Noun::Config(verb) => return configuration::run(verb, context, Cli::command()),
        Noun::Tenant(verb) => tenant::run(verb, context).await?,
        Noun::User(verb) => user::run(verb, context).await?,
        Noun::Token(verb) => user::run_token(verb, context).await?,
        Noun::Login(ask) => login::login(ask, context).await?,
        Noun::Logout => login::logout()?,
        Noun::Whoami => login::whoami(context).await?,
        Noun::Audit(ask) => tenant::audit(ask, context).await?,
        Noun::Top(options) => top::run(&options, context).await?,
        Noun::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "perigee", &mut script);
            output::put(&script);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn fail(problem: &Problem, code: u8) -> ExitCode {
    output::note(&format!("perigee: {problem}"));
    ExitCode::from(code)
}
