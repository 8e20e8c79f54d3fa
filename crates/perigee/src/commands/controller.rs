//! `perigee controller`

use std::path::PathBuf;

use clap::Subcommand;
use perigee_http::{Listen, Network};
use perigee_model::{Problem, SiteId};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the controller of a cluster
    Run {
        /// Directory for jobs, decisions, inputs and outputs
        #[arg(long, default_value = "/var/lib/perigee/controller", value_name = "DIR")]
        state: PathBuf,
        /// Address of the API: `unix:PATH` or `IP:PORT`; may be given more than once
        #[arg(long, required = true, value_name = "ADDRESS")]
        listen: Vec<Listen>,
        /// The controller's site. Outputs that may not leave their site come to the controller only if it is there
        #[arg(long)]
        site: Option<SiteId>,
    },
}

pub async fn run(verb: Verb) -> Result<(), Problem> {
    let Verb::Run { state, listen, site } = verb;
    perigee_controller::run(perigee_controller::Config {
        state,
        listen,
        site,
        network: Network::Plain,
    })
    .await
}
