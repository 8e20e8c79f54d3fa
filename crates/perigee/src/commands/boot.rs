//! `perigee boot`

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Args, Subcommand};
use perigee_boot::{Config, Dhcp, Finding};
use perigee_model::Problem;

use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::CONTROL_SOCKET;

/// `perigee boot VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Boot the clients of a pool over the network: DHCP and TFTP with dnsmasq, scripts over HTTP
    Serve {
        #[command(flatten)]
        options: Box<Options>,
    },
    /// Check whether clients can boot over this network. Exit code 0: yes; 1: something is missing
    Check {
        #[command(flatten)]
        options: Box<Options>,
    },
}

/// What the boot service is started with.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("volumes").required(true).args(["pool", "control"]))]
#[command(group = ArgGroup::new("dhcp").required(true).args(["range", "proxy_dhcp"]))]
pub struct Options {
    /// The pool whose volume server runs on this machine
    #[arg(long, value_name = "DIR")]
    pool: Option<PathBuf>,
    /// The volume server's control API, if it is not in the pool: `unix:PATH`, or `http://HOST:PORT` of one that runs
    /// with --insecure
    #[arg(long, value_name = "ADDRESS", requires = "state")]
    control: Option<String>,
    /// The network interface that leads to the machines
    #[arg(long, value_name = "INTERFACE")]
    interface: String,
    /// This machine's address there [default: the interface's first one]
    #[arg(long)]
    address: Option<Ipv4Addr>,
    /// Give the machines addresses from this range
    #[arg(long, value_name = "FIRST-LAST", value_parser = range)]
    range: Option<Dhcp>,
    /// Only say what to boot; another DHCP server gives the machines their addresses
    #[arg(long)]
    proxy_dhcp: bool,
    /// HTTP port for scripts and kernels
    #[arg(long, value_name = "PORT", default_value_t = 7003)]
    http_port: u16,
    /// The volume server's iSCSI port at this machine's address
    #[arg(long, value_name = "PORT", default_value_t = 3260)]
    iscsi_port: u16,
    /// The volume server's NBD port at this machine's address
    #[arg(long, value_name = "PORT", default_value_t = 10809)]
    nbd_port: u16,
    /// The kernel for machines with their root over NBD
    #[arg(long, value_name = "FILE", requires = "initrd")]
    kernel: Option<PathBuf>,
    /// The initramfs for that kernel; it must understand nbdroot=
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Arguments to add to that kernel's command line
    #[arg(long, value_name = "TEXT", default_value = "console=tty0 console=ttyS0 quiet panic=30")]
    append: String,
    /// Directory for dnsmasq's configuration and leases [default: `boot` in the pool]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Directory of undionly.kpxe and snponly.efi, for machines that have only PXE
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/ipxe")]
    ipxe: PathBuf,
}

fn range(text: &str) -> Result<Dhcp, String> {
    let (first, last) = text.split_once('-').ok_or("a range is FIRST-LAST, two addresses")?;
    let address = |text: &str| text.parse().map_err(|_| format!("{text:?} is not an IPv4 address"));
    Ok(Dhcp::Serve { first: address(first)?, last: address(last)? })
}

impl Options {
    fn config(self) -> Result<Config, Problem> {
        let pool = self.pool.map(std::path::absolute).transpose();
        let pool = pool.map_err(|error| Problem::invalid("can't use --pool", error))?;
        let in_pool = |name: &str| pool.as_ref().map(|pool| pool.join(name));
        let socket = in_pool(CONTROL_SOCKET).map(|path| format!("unix:{}", path.display()));
        let needed = |option: &str| {
            let what = "can't configure the boot server";
            Problem::invalid(what, format!("neither {option} nor --pool is given"))
        };
        Ok(Config {
            control: self.control.or(socket).ok_or_else(|| needed("--control"))?,
            interface: self.interface,
            address: self.address,
            dhcp: self.range.unwrap_or(Dhcp::Proxy),
            http_port: self.http_port,
            iscsi_port: self.iscsi_port,
            nbd_port: self.nbd_port,
            kernel: self.kernel,
            initrd: self.initrd,
            append: self.append,
            state: self.state.or(in_pool("boot")).ok_or_else(|| needed("--state"))?,
            ipxe: self.ipxe,
        })
    }
}

const FINDINGS: &[Column<Finding>] = &[
    ("", |f| if f.ok { "ok" } else { "missing" }.to_owned()),
    ("what", |f| f.what.clone()),
    ("found", |f| f.found.clone()),
    ("do", |f| f.next.clone()),
];

/// Serves DHCP, TFTP and boot scripts until SIGTERM or SIGINT, or says what is wrong with the machine. Exit code 1:
/// something is.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    match verb {
        Verb::Serve { options } => perigee_boot::serve(options.config()?).await?,
        Verb::Check { options } => {
            let findings = perigee_boot::check(&options.config()?).await;
            output::list(context.format, &findings, FINDINGS)?;
            if findings.iter().any(|finding| !finding.ok) {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
