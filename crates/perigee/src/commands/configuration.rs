//! `perigee config`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Command, Subcommand};
use perigee_model::Problem;

use crate::config::{self, Counts, Daemon};
use crate::context::Context;
use crate::output::{self, Column};

/// `perigee config VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Look for faults in files of daemons. No daemon is started or asked. Exit code 0: no faults; 3: faults
    Check {
        /// The files. The name says whose one is: controller.yaml, volume.yaml, agent.yaml [default: those of them that are in /etc/perigee]
        files: Vec<PathBuf>,
        /// Whose files these are, whatever their names
        #[arg(long, value_name = "DAEMON", requires = "files")]
        daemon: Option<Daemon>,
    },
    /// Show what counts for a daemon that starts now: each key with its value, and where that is from
    Show {
        /// The daemon
        daemon: Daemon,
        /// The file [default: the daemon's own in /etc/perigee]
        #[arg(long, value_name = "FILE", conflicts_with = "defaults")]
        file: Option<PathBuf>,
        /// Print instead an example of the file: each key as a comment with its meaning and its default
        #[arg(long)]
        defaults: bool,
    },
}

const COUNTS: &[Column<Counts>] = &[
    ("key", |one| one.key.clone()),
    ("value", |one| if one.values.is_empty() { "-".to_owned() } else { one.values.join(", ") }),
    ("from", |one| one.from.clone()),
];

/// Reads files, and prints what is in them or wrong with them.
pub fn run(verb: Verb, context: &Context, root: Command) -> Result<ExitCode, Problem> {
    match verb {
        Verb::Check { files, daemon } => return check(&files, daemon, &root),
        Verb::Show { daemon, defaults: true, .. } => {
            output::put(config::example(&root, daemon)?.as_bytes());
        }
        Verb::Show { daemon, file, .. } => {
            let told = config::of_file(root, daemon, &file.unwrap_or_else(|| daemon.file()))?;
            output::list(context.format, &told.all()?, COUNTS)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says of each file whether it is sound, and of the others what is wrong.
fn check(files: &[PathBuf], of: Option<Daemon>, root: &Command) -> Result<ExitCode, Problem> {
    let own: Vec<PathBuf> =
        Daemon::ALL.into_iter().map(Daemon::file).filter(|file| file.exists()).collect();
    let files = if files.is_empty() { &own[..] } else { files };
    if files.is_empty() {
        let why =
            format!("{} has none of controller.yaml, volume.yaml and agent.yaml", config::DIR);
        return Err(Problem::not_found("no file to check", why).next(
            "name one, or make them: perigee controller init --listen ADDRESS, or perigee host join",
        ));
    }
    let mut code = ExitCode::SUCCESS;
    for file in files {
        let sound = match of.or_else(|| Daemon::of_file(file)) {
            Some(daemon) => config::of_file(root.clone(), daemon, file).map(drop),
            None => Err(Problem::invalid(
                format!("can't check {}", file.display()),
                "its name is none of controller.yaml, volume.yaml and agent.yaml",
            )
            .next("say whose file it is: --daemon controller")),
        };
        match sound {
            Ok(()) => output::text(&format!("{}: sound", file.display())),
            Err(problem) => {
                output::note(&problem.to_string());
                code = ExitCode::from(problem.exit_code());
            }
        }
    }
    Ok(code)
}
