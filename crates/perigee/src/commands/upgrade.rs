//! `perigee upgrade`

use clap::Subcommand;
use perigee_model::upgrade::{FinishUpgrade, HostDaemon, Upgrade};
use perigee_model::{HostId, Problem};

use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee upgrade VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show the versions of the controller and of each host's daemons, what is held back until the upgrade ends, and what is still in the way of that
    Status,
    /// End an upgrade: from then on no daemon can go back to the version of before. It is refused while a daemon is older, off or of a version that is
    /// not known
    Finish {
        /// A host that is given up: nobody looks at its version; may be given more than once
        #[arg(long, value_name = "HOST")]
        without: Vec<HostId>,
    },
}

const STATUS: &[Column<Upgrade>] = &[
    ("controller", |upgrade| upgrade.controller.to_string()),
    ("hosts", |upgrade| {
        let hosts = upgrade.hosts.iter().map(|of| {
            format!(
                "{}: agent {}; volume server {}",
                of.host,
                said(&of.agent),
                said(&of.volume_server)
            )
        });
        hosts.collect::<Vec<_>>().join("\n")
    }),
    ("format level", |upgrade| upgrade.format_level.to_string()),
    ("held back", |upgrade| match upgrade.held_back_level {
        Some(level) => {
            format!("what is new in format level {level}, until `perigee upgrade finish`")
        }
        None => "nothing".to_owned(),
    }),
    ("in the way", |upgrade| match upgrade.blocks.is_empty() {
        true => "nothing: `perigee upgrade finish` can end the upgrade".to_owned(),
        false => upgrade.blocks.join("\n"),
    }),
];

fn said(daemon: &HostDaemon) -> String {
    let version = match &daemon.version {
        Some(version) => version.to_string(),
        None => "not known".to_owned(),
    };
    let differs = if daemon.differs == Some(true) { ", which differs" } else { "" };
    match daemon.silent {
        Some(_) => format!("does not answer (last {version}{differs})"),
        None => format!("{version}{differs}"),
    }
}

/// Carries out the command.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    let shown: Upgrade = match verb {
        Verb::Status => client.get("/v1/upgrade").await?,
        Verb::Finish { without } => {
            client.post("/v1/upgrade/finish", &FinishUpgrade { without }).await?
        }
    };
    output::one(context.format, &shown, STATUS)
}
