//! `perigee network`

use std::process::ExitCode;

use clap::Subcommand;
use perigee_model::network::{ClusterNetwork, NetworkVm, NewNetwork, Subnet};
use perigee_model::{NetworkName, Problem};

use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee network VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make a network of the tenant, which spans all hosts and sites. VMs get their cards in it with `--network NAME`
    Create {
        /// The new network's name
        name: NetworkName,
        /// Its private addresses, for example 10.7.0.0/24. Networks may have the same ones: they don't reach each other
        #[arg(long)]
        subnet: Subnet,
        /// Its VMs reach what its gateway's host reaches, but not the cluster's hosts
        #[arg(long)]
        nat: bool,
    },
    /// List the networks
    List,
    /// Show a network and its VMs
    Info {
        /// The network's name
        name: NetworkName,
    },
    /// Delete a network that no VM uses
    Delete {
        /// The network's name
        name: NetworkName,
    },
}

const COLUMNS: &[Column<ClusterNetwork>] = &[
    ("NAME", |n| n.name.to_string()),
    ("SUBNET", |n| n.subnet.to_string()),
    ("NAT", |n| if n.nat { "yes" } else { "no" }.to_owned()),
    ("MTU", |n| n.mtu.to_string()),
    ("GATEWAY", |n| output::or_dash(n.gateway_host.as_ref())),
    ("VMS", |n| n.vms.len().to_string()),
];

const FIELDS: &[Column<ClusterNetwork>] = &[
    ("network", |n| n.name.to_string()),
    ("subnet", |n| n.subnet.to_string()),
    ("nat", |n| if n.nat { "yes" } else { "no" }.to_owned()),
    ("mtu", |n| n.mtu.to_string()),
    ("gateway", |n| format!("{} at {}", n.gateway, output::or_dash(n.gateway_host.as_ref()))),
    ("published", |n| output::or_dash(published(n).as_ref())),
    ("vms", |n| n.vms.iter().map(in_words).collect::<Vec<_>>().join(", ")),
];

/// At the gateway's host.
fn published(network: &ClusterNetwork) -> Option<String> {
    let all = network
        .vms
        .iter()
        .flat_map(|vm| vm.publish.iter().map(|publish| format!("{publish} of {}", vm.vm)));
    let all: Vec<String> = all.collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn in_words(vm: &NetworkVm) -> String {
    match (&vm.address, &vm.host) {
        (Some(address), Some(host)) => format!("{} {address} at {host}", vm.vm),
        (Some(address), None) => format!("{} {address}", vm.vm),
        (None, _) => vm.vm.to_string(),
    }
}

/// Asks the controller, and prints the networks or what was done.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Create { name, subnet, nat } => {
            let new = NewNetwork { name, subnet, nat };
            let made: ClusterNetwork = client.create("/v1/networks", &new).await?;
            output::one(context.format, &made, FIELDS)?;
        }
        Verb::List => {
            let all: Vec<ClusterNetwork> = client.get("/v1/networks").await?;
            output::list(context.format, &all, COLUMNS)?;
        }
        Verb::Info { name } => {
            let found: ClusterNetwork = client.get(&format!("/v1/networks/{name}")).await?;
            output::one(context.format, &found, FIELDS)?;
        }
        Verb::Delete { name } => client.delete(&format!("/v1/networks/{name}")).await?,
    }
    Ok(ExitCode::SUCCESS)
}
