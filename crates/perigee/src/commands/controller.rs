//! `perigee controller`

use std::path::{Path, PathBuf};

use clap::{Command, Subcommand};
use perigee_controller::Live;
use perigee_http::{BrowserCertificate, Listen, PeerIdentity};
use perigee_model::limits::KEEP_OUTPUTS_S;
use perigee_model::money::Money;
use perigee_model::network::PublishPorts;
use perigee_model::tasks::TaskStatus;
use perigee_model::units::parse_duration;
use perigee_model::{HostId, Problem, ProblemKind, SiteId};

use crate::commands::daemon;
use crate::commands::init::{self, InitArgs, STATE};
use crate::commands::network::warn_insecure;
use crate::commands::owner::{self, AsOwner};
use crate::config::{DaemonOptions, Told};
use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee controller VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the controller of a cluster
    Run(Box<RunArgs>),
    /// Make a cluster at this machine: its certificate authority, /etc/perigee/controller.yaml, the unit that runs the controller, and a token for
    /// the first host. Without --listen, only the authority is made, and its fingerprint is printed. It may be run again
    Init(Box<InitArgs>),
    /// Make a copy of a controller's directory the controller from its next start on, also a restored one. The hosts refuse the original and all
    /// other copies then
    TakeOver {
        /// The controller's directory. No controller may run on it now
        #[arg(long, default_value = STATE, value_name = "DIR")]
        state: PathBuf,
    },
    /// Write all that only the controller knows to a file, while the controller runs: its store, authority, audit log and the names of the repository's files.
    /// Whoever has the file can be anybody in the cluster
    Backup {
        /// The new file, or a directory in which it gets the present time as its name
        to: PathBuf,
        /// Also the contents of users' files that are on the controller's disk
        #[arg(long)]
        with_files: bool,
        /// The controller's directory
        #[arg(long, default_value = STATE, value_name = "DIR")]
        state: PathBuf,
    },
    /// Restore a backup. The controller with it commands the hosts from its next start on, and begins nothing before each host has said what it has
    Restore {
        /// The file with the backup
        file: PathBuf,
        /// The controller's new directory, which does not exist or is empty
        #[arg(long, default_value = STATE, value_name = "DIR")]
        state: PathBuf,
    },
    /// Make a certificate with which a person or program may do everything over https for 30 days
    Operator {
        /// The directory in which it is put
        dir: PathBuf,
        /// The controller's directory
        #[arg(long, default_value = STATE, value_name = "DIR")]
        state: PathBuf,
    },
    /// Refuse the certificates that operators have
    RevokeOperators,
    /// Show what each endless task of the controller did last, when, how long that took, and at what it failed
    Tasks,
}

/// What [`Verb::Run`] takes.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    daemon: DaemonOptions,
    /// Directory for jobs, decisions, inputs and the repository's files
    #[arg(long, default_value = STATE, value_name = "DIR")]
    state: PathBuf,
    /// Address of the API: `unix:PATH` or `IP:PORT`; may be given more than once
    #[arg(long, required = true, value_name = "ADDRESS")]
    listen: Vec<Listen>,
    /// A DNS name at which people and programs call it over https; may be given more than once. Its certificate
    /// names the addresses where it listens anyway
    #[arg(long = "name", value_name = "NAME", conflicts_with = "insecure")]
    names: Vec<String>,
    /// The controller's site. Outputs that may not leave their site come to the controller only if it is there
    #[arg(long)]
    site: Option<SiteId>,
    /// Talk plain HTTP over TCP: whoever reaches a port can do everything
    #[arg(long)]
    insecure: bool,
    /// A certificate of your own for browsers that call the controller by a name in it: a PEM file with those between it and its issuer. Hosts and
    /// perigee get the cluster's certificate as before. The file is read again at a reload
    #[arg(long, value_name = "FILE", requires = "web_key", conflicts_with = "insecure")]
    web_cert: Option<PathBuf>,
    /// The private key of that certificate: a PEM file that no other user can read
    #[arg(long, value_name = "FILE", requires = "web_cert")]
    web_key: Option<PathBuf>,
    /// Serve files over SFTP on this address
    #[arg(long, value_name = "HOST:PORT")]
    sftp: Option<String>,
    /// Keep the contents of users' files in an S3 store. Names stay in the controller's directory
    #[arg(long, value_name = "s3://BUCKET/PREFIX")]
    data: Option<String>,
    /// The address of the S3 store, if it is not AWS's
    #[arg(long, value_name = "URL", requires = "data")]
    data_endpoint: Option<String>,
    /// The credentials for the S3 store, as in `~/.aws/credentials` [default: those that AWS's tools would use]
    #[arg(long, value_name = "FILE", requires = "data")]
    data_credentials: Option<PathBuf>,
    /// Delete the outputs of a job so long after its end, as `30d`, if its file does not say it [default: keep them]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_outputs: Option<u64>,
    /// The ports of hosts that tenants may publish. The operator's own VMs may publish others too
    #[arg(long, value_name = "FIRST-LAST", default_value_t)]
    publish_ports: PublishPorts,
    /// What hosts, disks and traffic cost; the file is read again when it changes [default: nothing costs anything]
    #[arg(long, value_name = "FILE")]
    prices: Option<PathBuf>,
    /// The file that names who has machines for rent; docs/providers.md says what is in it
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
    /// What all rented hosts of 30 days together may cost, as `$20`; without it none is rented
    #[arg(long, value_name = "MONEY", requires = "providers")]
    rent_budget: Option<Money>,
}

const TASKS: &[Column<TaskStatus>] = &[
    ("task", |task| task.name.clone()),
    ("rounds", |task| task.rounds.to_string()),
    ("failed", |task| task.failures.to_string()),
    ("last ended", |task| task.ended_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("took", |task| format!("{} ms", task.took_ms)),
    ("busy since", |task| task.busy_since_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("did", |task| {
        if task.problem.is_empty() { task.did.clone() } else { format!("failed: {}", task.problem) }
    }),
    ("last failure", |task| {
        let last = task.last_failure.as_ref();
        last.map_or_else(
            || "-".to_owned(),
            |last| format!("{}: {}", output::time(last.at_ms), last.why),
        )
    }),
];

fn read_providers(file: Option<PathBuf>) -> Result<Option<String>, Problem> {
    let Some(file) = file else { return Ok(None) };
    let read = std::fs::read_to_string(&file).map_err(|e| {
        Problem::of_io(ProblemKind::Invalid, format!("can't read {}", file.display()), &e)
            .next("name the file of providers with --providers")
    });
    read.map(Some)
}

fn checked(keep_outputs_s: Option<u64>) -> Result<Option<u64>, Problem> {
    let checked = keep_outputs_s.map(|keep_s| KEEP_OUTPUTS_S.check(keep_s)).transpose();
    checked.map_err(|e| e.problem("can't take keep-outputs"))
}

/// Runs a controller until SIGTERM or SIGINT.
async fn serve(args: RunArgs, told: Option<Told>) -> Result<(), Problem> {
    if args.insecure {
        warn_insecure();
    }
    let data = args.data.map(|store| {
        perigee_controller::store_address(&store, args.data_endpoint, args.data_credentials)
    });
    let web = args.web_cert.zip(args.web_key);
    let web =
        web.map(|(certificate, key)| BrowserCertificate::load(certificate, key)).transpose()?;
    let keep_outputs_s = Live::new(checked(args.keep_outputs)?);
    let rent_budget = Live::new(args.rent_budget);
    let config = perigee_controller::Config {
        state: args.state,
        listen: args.listen,
        names: args.names,
        site: args.site,
        insecure: args.insecure,
        web_certificate: web.clone(),
        doors: perigee_controller::Doors { sftp: args.sftp },
        data: data.transpose()?,
        keep_outputs_s: keep_outputs_s.clone(),
        publish_ports: args.publish_ports,
        prices: args.prices,
        providers: read_providers(args.providers)?,
        rent_budget: rent_budget.clone(),
    };
    let take = move |new: &Told| {
        let keep_s = checked(new.value("keep_outputs"))?;
        if let Some(certificate) = &web {
            certificate.read_again()?;
        }
        keep_outputs_s.set(keep_s);
        rent_budget.set(new.value("rent_budget"));
        Ok(())
    };
    let live = daemon::Live { keys: &["keep-outputs", "rent-budget"], take: Box::new(take) };
    daemon::run(told, args.daemon.log, live, perigee_controller::run(config)).await
}

fn backup(state: &Path, to: &Path, with_files: bool) -> Result<(), Problem> {
    let made = perigee_controller::back_up(state, to, with_files)?;
    output::text(&format!("{} has {}", made.file.display(), output::bytes(made.bytes)));
    if made.left_out_files > 0 {
        output::note(&format!(
            "not in it: the contents of {} files of users ({}) on the controller's disk; --with-files adds them",
            made.left_out_files,
            output::bytes(made.left_out_bytes)
        ));
    }
    for damage in &made.damaged {
        output::note(&format!("damaged on the controller's disk, and so in the backup: {damage}"));
    }
    Ok(())
}

async fn restore(file: &Path, state: &Path) -> Result<(), Problem> {
    let restored = perigee_controller::restore(file, state).await?;
    owner::give_for_unit(state)?;
    let hosts: Vec<&str> = restored.hosts.iter().map(HostId::as_str).collect();
    output::text(&format!(
        "{} is the controller of {}, and commands the hosts from its next start on, with terms above {}",
        state.display(),
        output::time(restored.made_ms),
        restored.term
    ));
    output::note(&format!(
        "it begins nothing before these hosts have said what they have: {}; one that is gone: perigee host give-up NAME",
        hosts.join(", ")
    ));
    Ok(())
}

/// Runs the controller until SIGTERM or SIGINT, or works on the files of one. `root` is the whole command line.
pub async fn run(
    verb: Verb,
    context: &Context,
    (root, told): (Command, Option<Told>),
) -> Result<(), Problem> {
    match verb {
        Verb::Run(args) => serve(*args, told).await,
        Verb::Init(args) => init::run(*args, context, &root).await,
        Verb::TakeOver { state } => {
            let _owner = AsOwner::of(&state)?;
            let term = perigee_controller::take_over(&state).await?;
            output::text(&format!(
                "the controller in {} commands the hosts from its next start on, with terms above {term}",
                state.display()
            ));
            Ok(())
        }
        Verb::Backup { to, with_files, state } => backup(&state, &to, with_files),
        Verb::Restore { file, state } => restore(&file, &state).await,
        Verb::Operator { dir, state } => {
            let authority = {
                let _owner = AsOwner::of(&state)?;
                perigee_controller::authority(&state)?
            };
            authority.credentials(&PeerIdentity::Operator, &[])?.save(&dir)
        }
        Verb::RevokeOperators => {
            let client = controller_client(context)?;
            client.post("/v1/operators/revoke", &serde_json::json!({})).await
        }
        Verb::Tasks => {
            let all: Vec<TaskStatus> = controller_client(context)?.get("/v1/tasks").await?;
            output::list(context.format, &all, TASKS)
        }
    }
}
