//! `perigee lab provider` and `perigee lab instance`: hosts that a lab rents out

use std::io::Read as _;
use std::process::ExitCode;

use clap::ValueEnum;
use perigee_lab::rent::{Verb, answer};
use perigee_lab::{Lab, LabId};
use perigee_model::Problem;

use crate::arguments::BaseOption;
use crate::output;

/// What is asked is at most this long; the user-data are most of it.
const ASKED_BYTES_MAX: u64 = 1 << 20;

/// What [`provider`] takes.
#[derive(Debug, clap::Args)]
pub struct ProviderOptions {
    /// The verb. Its object is read from the standard input, as JSON
    verb: ProviderVerb,
    /// The lab's id, as `perigee lab list` shows it
    #[arg(long, env = "PERIGEE_LAB")]
    lab: LabId,
    #[command(flatten)]
    base: BaseOption,
}

/// What every provider's program can do.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ProviderVerb {
    /// What can be rented, and for how much
    Offers,
    /// Rent an instance
    Create,
    /// The instances of a cluster
    List,
    /// End an instance
    End,
    /// Which instances will be taken back
    Notices,
    /// Keep the disk of an instance's pool
    Snapshot,
    /// The disks of a cluster that are kept
    Snapshots,
    /// Delete one of them
    DeleteSnapshot,
}

/// What [`instance`] takes.
#[derive(Debug, clap::Args)]
pub struct InstanceOptions {
    lab: LabId,
    instance: String,
    #[command(flatten)]
    base: BaseOption,
}

/// Prints one object: the answer, or `error`. The exit code says which.
pub async fn provider(options: ProviderOptions) -> Result<ExitCode, Problem> {
    let lab = Lab::open(&options.base.base, &options.lab)?;
    let mut asked = String::new();
    let read = std::io::stdin().lock().take(ASKED_BYTES_MAX).read_to_string(&mut asked);
    read.map_err(|error| Problem::invalid("can't read what is asked of the provider", error))?;
    let verb = match options.verb {
        ProviderVerb::Offers => Verb::Offers,
        ProviderVerb::Create => Verb::Create,
        ProviderVerb::List => Verb::List,
        ProviderVerb::End => Verb::End,
        ProviderVerb::Notices => Verb::Notices,
        ProviderVerb::Snapshot => Verb::Snapshot,
        ProviderVerb::Snapshots => Verb::Snapshots,
        ProviderVerb::DeleteSnapshot => Verb::DeleteSnapshot,
    };
    let (answer, done) = answer(&lab, verb, &asked).await;
    output::text(&answer.to_string());
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs in the instance until it ends.
pub async fn instance(options: InstanceOptions) -> Result<(), Problem> {
    perigee_lab::rent::machine(&options.base.base, &options.lab, &options.instance).await
}
