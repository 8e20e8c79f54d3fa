//! `perigee agent`

use std::net::Ipv4Addr;
use std::path::PathBuf;

use clap::Subcommand;
use perigee_agent::{GuestsReach, Leased, VmUids};
use perigee_http::{Listen, Network, PeerIdentity};
use perigee_model::limits::LEASE_S;
use perigee_model::network::BridgeName;
use perigee_model::units::parse_duration;
use perigee_model::{HostId, Problem, SiteId};

use crate::commands::daemon::{self, Live};
use crate::commands::network::NetworkFlags;
use crate::config::{DaemonOptions, Told};

/// The agent's directory.
pub const STATE: &str = "/var/lib/perigee/agent";

/// `perigee agent VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the agent of this host. Its virtual machines keep running when it stops
    Run(Box<RunArgs>),
    /// The process that carries a virtual machine's migration, encrypted; the agent starts it
    #[command(hide = true)]
    Tunnel {
        /// The file with the migration's key
        key: PathBuf,
        /// `source` or `destination`
        end: String,
        /// Where it listens
        at: String,
        /// Where it connects to
        to: String,
    },
}

/// What [`Verb::Run`] takes.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// This host's name in the cluster
    #[arg(long)]
    host: HostId,
    /// The site it belongs to
    #[arg(long)]
    site: SiteId,
    /// Address of the agent's API; may be given more than once. Other hosts must reach the first one
    #[arg(long, required = true, value_name = "IP:PORT")]
    listen: Vec<String>,
    /// Directory for the agent's records of its virtual machines
    #[arg(long, default_value = STATE, value_name = "DIR")]
    state: PathBuf,
    /// The users of QEMU: each VM has one of these for itself
    #[arg(long, default_value_t, env = "PERIGEE_VM_UIDS", value_name = "FIRST-LAST")]
    vm_uids: VmUids,
    /// Addresses that VMs in user networks reach beside those of the internet: private ones of the operator's. This host and the
    /// cluster's others they reach only if it is just one address. May be given more than once
    #[arg(long, value_name = "ADDRESS[/BITS]")]
    guests_reach: Vec<GuestsReach>,
    /// An address of this host that is on none of its interfaces, because a cloud translates it. Guests of all hosts are kept from
    /// it. May be given more than once
    #[arg(long = "outside-address", value_name = "ADDRESS")]
    outside_addresses: Vec<Ipv4Addr>,
    /// A bridge of this host in which VMs may have cards (`network: bridge:NAME`). May be given more than once
    #[arg(long = "bridge", value_name = "NAME")]
    bridges: Vec<BridgeName>,
    /// The control API of this host's volume server
    #[arg(long, default_value = "unix:/run/perigee/volume-control.sock", value_name = "ADDRESS")]
    volume_control: String,
    /// The same control API's address for other hosts
    #[arg(long, value_name = "URL")]
    volume_url: String,
    /// The NBD address of this host's volume server for other hosts
    #[arg(long, value_name = "IP:PORT")]
    nbd_addr: String,
    /// The cluster's controller
    #[arg(long, value_name = "URL")]
    controller: Option<String>,
    /// The kernel to boot for a test of KVM [default: the newest in /boot]
    #[arg(long, env = "PERIGEE_PROBE_KERNEL", value_name = "FILE")]
    probe_kernel: Option<PathBuf>,
    /// The file with the id of this boot; hosts that share a kernel need one file each
    #[arg(long, default_value = perigee_http::BOOT_ID, value_name = "FILE")]
    boot_id: PathBuf,
    /// This host is rented: when the controller has asked it for nothing for so long, the host ends itself
    #[arg(long, value_name = "TIME", value_parser = lease)]
    leased: Option<u64>,
    /// What ends a rented host, for `sh -c`. The provider must then charge nothing any more. `perigee host info` shows the command, so it must
    /// have no secrets
    #[arg(long, value_name = "COMMAND", default_value = "systemctl poweroff", requires = "leased")]
    lease_end: String,
    /// Where a rented host hears that its provider takes it back, as EC2 says so; `none` if the provider does not
    #[arg(long, value_name = "URL", default_value = perigee_agent::METADATA, requires = "leased")]
    metadata: String,
    #[command(flatten)]
    network: NetworkFlags,
    #[command(flatten)]
    daemon: DaemonOptions,
}

fn lease(text: &str) -> Result<u64, String> {
    let length_s = parse_duration(text).map_err(|error| error.to_string())?;
    LEASE_S.check(length_s).map_err(|error| error.to_string())
}

/// Runs the agent until SIGTERM or SIGINT. VMs go on, and the next agent finds them again.
pub async fn run(verb: Verb, told: Option<Told>) -> Result<(), Problem> {
    let args = match verb {
        Verb::Run(args) => args,
        Verb::Tunnel { key, end, at, to } => {
            return perigee_agent::carry_for_ever(&key, &end, &at, &to)
                .map_err(|error| Problem::internal("can't carry a migration", error));
        }
    };
    let log = args.daemon.log.clone();
    daemon::run(told, log, Live::log_only(), serve(*args)).await
}

async fn serve(args: RunArgs) -> Result<(), Problem> {
    let (end, metadata) = (args.lease_end, Some(args.metadata).filter(|url| url != "none"));
    let leased = args.leased.map(|length_s| Leased { length_s, end, metadata });
    let network = args.network.network();
    let network =
        network.and_then(|network| is_identity_of(&args.host, &network).map(|()| network));
    let network = match (network, &leased) {
        (Err(problem), Some(leased)) => {
            // It may fail at each restart, and nobody would end the host.
            let looked = perigee_agent::look_at_lease(&args.state, &args.boot_id, leased).await;
            if let Err(why) = looked {
                tracing::warn!("the lease of this host was not looked at: {why}");
            }
            return Err(problem);
        }
        (network, _) => network?,
    };
    let agent_url = format!("{}{}", network.scheme(), args.listen[0]);
    perigee_agent::run(perigee_agent::Config {
        host: args.host,
        site: args.site,
        listen: args.listen.into_iter().map(Listen::Tcp).collect(),
        state: args.state,
        vm_uids: args.vm_uids,
        guests_reach: args.guests_reach,
        outside_addresses: args.outside_addresses,
        bridges: args.bridges,
        volume_control: args.volume_control,
        volume_url: args.volume_url,
        nbd_addr: args.nbd_addr,
        agent_url,
        controller: args.controller,
        probe_kernel: args.probe_kernel,
        boot_id: args.boot_id,
        network,
        leased,
    })
    .await
}

/// The controller would refuse a host with the certificate of another one.
fn is_identity_of(host: &HostId, network: &Network) -> Result<(), Problem> {
    let Some(own) = network.identity().map(|identity| identity.own().identity) else {
        return Ok(());
    };
    if own == PeerIdentity::Host(host.clone()) {
        return Ok(());
    }
    let what = format!("can't run the agent of host {host}");
    Err(Problem::invalid(what, format!("its certificate is for {own}"))
        .next("start it with the name with which this host has joined, or name another --identity"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(subcommand)]
        verb: Verb,
    }

    #[tokio::test]
    async fn an_agent_that_cannot_run_looks_at_the_lease_of_its_host() {
        let dir = tempfile::tempdir().expect("a directory");
        let (state, identity) = (dir.path().join("state"), dir.path().join("none"));
        let paths = [state.display().to_string(), identity.display().to_string()];
        let words = "perigee run --host home1 --site home --listen 127.0.0.1:1 --volume-url http://127.0.0.1:2 --nbd-addr 127.0.0.1:3";
        let words = words.split(' ').chain(["--state", &paths[0], "--identity", &paths[1]]);
        let run = async |more: &[&'static str]| {
            let words = words.clone().chain(more.iter().copied()).map(str::to_owned);
            let cli = Cli::try_parse_from(words.collect::<Vec<_>>());
            run(cli.expect("its words").verb, None).await.expect_err("it has no identity")
        };
        let problem = run(&[]).await;
        assert!(!state.exists(), "a host that is not rented has no lease");
        assert_eq!(run(&["--leased", "1m"]).await, problem);
        assert!(state.join("lease").exists(), "what is left is kept, so the next start goes on");
    }
}
