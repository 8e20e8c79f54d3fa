//! `perigee host`, `perigee site` and `perigee link`

use std::process::ExitCode;

use clap::{Command, Subcommand};
use perigee_http::{Client, Method};
use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{PlacePolicy, SetPlace};
use perigee_model::enrol::{HostRevoked, JoinToken, MadeToken, NewToken, SetSite};
use perigee_model::job::{Host, HostRemoval, Link, Site};
use perigee_model::lease::{HostLease, HostNotice};
use perigee_model::load::{HostPressure, Pressure, VcpuUse};
use perigee_model::measurement::MeasureHost;
use perigee_model::units::parse_duration;
use perigee_model::waiting::{Waiting, WaitsFor, in_words};
use perigee_model::{HostId, Problem, SiteId};

use crate::commands::doctor::{self, DoctorArgs};
use crate::commands::join::{self, JoinArgs};
use crate::commands::shutting_down::{self, ShutdownArgs};
use crate::commands::{balancing, draining, measuring, unknown};
use crate::context::Context;
use crate::kept_login;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee host VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum HostVerb {
    /// List hosts
    #[command(visible_alias = "ls")]
    List,
    /// Show one host
    Info {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
    },
    /// Show what hosts have that no record of the controller names there, with what can be done with each: VMs, volumes, images
    Unknown,
    /// Make a token with which a host joins the cluster. It is good for one time and one hour
    Token {
        /// The name that the host gets
        host: HostId,
        /// Where the host reaches the controller [default: where you do, if that is https, else the first name or address that the
        /// controller has]
        #[arg(long, value_name = "URL")]
        controller: Option<String>,
    },
    /// Join a cluster: run this on the new host. It looks at the machine, gets a certificate, writes the files of the daemons, and starts them
    Join(Box<JoinArgs>),
    /// Look at this machine as a host: KVM, programs, clock, ports, disk, what the controller reaches; and say what to do about what is wrong. Exit
    /// code 0: no errors; 1: errors
    Doctor(DoctorArgs),
    /// Refuse the certificates that a host has. It may join again with a new token
    Revoke {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
    },
    /// Agree that a host is at another site from now on. Start its agent with that site too
    Site {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
        /// The site where it is now
        site: SiteId,
    },
    /// Empty a host while all goes on: no new VM or volume comes to it, and what it has moves away. It prints what leaves in which order,
    /// and what can't
    Drain {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
        /// Show the progress until the host is drained, or until all that is left can't leave. Ctrl-C ends only the display
        #[arg(long, conflicts_with = "dry_run")]
        wait: bool,
        /// Only print what would happen
        #[arg(long)]
        dry_run: bool,
    },
    /// Call the drain of a host off. What has left stays where it is
    Undrain {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
    },
    /// Take this machine down when all has left it: run this on the host, as root
    Shutdown(ShutdownArgs),
    /// Measure a host: its links, its pool's disk, and disks of other hosts over NBD and iSCSI. It prints the figures
    Measure {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
        /// Other hosts to measure against [default: another one of its site, and one of each other site]
        #[arg(long, value_name = "HOST,…", value_delimiter = ',')]
        against: Vec<HostId>,
        /// For how long each figure is measured, 1 to 60 s; a slow disk takes longer
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
        length: u64,
        /// Also while VMs are there, which disturb it and are disturbed
        #[arg(long)]
        beside_vms: bool,
        /// Only show what was measured last, or is measured now
        #[arg(long, conflicts_with_all = ["against", "beside_vms", "cancel"])]
        show: bool,
        /// Call the measurement that is under way off. What was measured is kept
        #[arg(long, conflicts_with_all = ["against", "beside_vms"])]
        cancel: bool,
    },
    /// After a restore of the controller: do not wait for this host. What it has since the backup is not known
    GiveUp {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
    },
    /// Remove a host that will not come back
    #[command(visible_alias = "rm")]
    Remove {
        /// The host's name, as `perigee host list` shows it
        host: HostId,
        /// Give up the volumes that live on it, the jobs that need it, and the moves from and to it
        #[arg(long)]
        force: bool,
    },
}

/// `perigee site VERB`.
#[derive(Debug, Subcommand)]
pub enum SiteVerb {
    /// List sites
    #[command(visible_alias = "ls")]
    List,
    /// Show or set what is done about overloaded hosts of a site: `off`, `advise` (say which VMs without a job would move, and why) or
    /// `on` (move them)
    Balance {
        /// The site
        site: SiteId,
        /// off, advise or on
        mode: Option<AutoMode>,
    },
    /// Show or set which of the hosts of a site that are as good for a VM gets it: `spread` (the least busy one) or `pack` (the fullest one, so
    /// that other hosts stay free). VMs that run stay where they are
    Place {
        /// The site
        site: SiteId,
        /// spread or pack
        policy: Option<PlacePolicy>,
    },
}

/// `perigee link VERB`.
#[derive(Debug, Subcommand)]
pub enum LinkVerb {
    /// List the latest measurements from host to host
    #[command(visible_alias = "ls")]
    List {
        /// Measure now, and list the results
        #[arg(long)]
        probe: bool,
    },
}

const HOSTS: &[Column<Host>] = &[
    ("host", |h| h.id.to_string()),
    ("site", |h| h.addresses.site.to_string()),
    ("state", state),
    ("cpus", |h| h.cpus.to_string()),
    ("memory", |h| output::bytes(h.memory_bytes)),
    ("used", |h| output::bytes(h.memory_used_bytes)),
    ("accelerator", |h| h.accelerator.map_or_else(|| "-".to_owned(), |a| output::word(&a))),
    ("waits", |h| in_words(&h.waits)),
];

/// In which part of the last minute a task waited for what; a dash for what is not known.
fn pressure(pressure: &HostPressure) -> String {
    let share = |of: Option<Pressure>| output::percent(of.map(|of| of.some.share_60s));
    let (cpu, memory, io) = (share(pressure.cpu), share(pressure.memory), share(pressure.io));
    format!("for a cpu {cpu}, for memory {memory}, for a disk {io} of the last minute")
}

/// Whether it answers, and how far its drain is.
fn state(host: &Host) -> String {
    let answers = output::word(&host.state);
    host.drain.as_ref().map_or(answers.clone(), |drain| format!("{answers}, {}", drain.in_words()))
}

/// The further columns of one host.
const DETAILS: &[Column<Host>] = &[
    ("processor", |h| h.cpu_model.clone()),
    ("agent", |h| h.addresses.agent_url.clone()),
    ("volumes", |h| h.addresses.volume_url.clone()),
    ("nbd", |h| h.addresses.nbd_addr.clone()),
    ("cpus in use", |h| h.cpus_used_1m.map_or_else(|| "-".to_owned(), |used| format!("{used:.1}"))),
    ("waiting tasks", |h| pressure(&h.pressure)),
    ("vms wait for a cpu", |h| output::percent(h.vcpus_1m.map(VcpuUse::run_delay_share))),
    ("free memory", |h| h.memory_available_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("free in its pool", |h| h.pool_free_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("size of its pool", |h| h.pool_size_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("lease", |h| h.lease.as_ref().map_or_else(|| "-".to_owned(), HostLease::in_words)),
    ("taken back", |h| h.notice.as_ref().map_or_else(|| "-".to_owned(), HostNotice::in_words)),
    ("warnings", |h| h.warnings.join("\n")),
    ("still there", draining::left),
    ("measured", measuring::known),
];

const REMOVAL: &[Column<HostRemoval>] = &[
    ("lost volumes", |r| names(&r.lost_volumes)),
    ("failed jobs", |r| names(&r.failed_jobs)),
    ("placed again", |r| names(&r.placed_again)),
    ("moving jobs", |r| names(&r.moving_jobs)),
];

fn names<T: ToString>(all: &[T]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

const SITES: &[Column<Site>] = &[
    ("site", |s| s.id.to_string()),
    ("hosts", |s| s.hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
    ("place", |s| output::word(&s.place)),
];

const LINKS: &[Column<Link>] = &[
    ("from", |l| l.from.to_string()),
    ("to", |l| l.to.to_string()),
    ("rtt", |l| format!("{:.2} ms", l.probe.rtt_ms)),
    ("rate", |l| format!("{}/s", output::bytes(l.probe.rate_bytes_per_s))),
    ("block latency", |l| {
        l.blocks.map_or_else(|| "-".to_owned(), |b| format!("{} us", b.latency_median_us))
    }),
    ("block rate", |l| {
        l.blocks
            .map_or_else(|| "-".to_owned(), |b| format!("{}/s", output::bytes(b.rate_bytes_per_s)))
    }),
];

/// Asks the controller, or works on this host. `root` is the whole command line.
pub async fn run(verb: HostVerb, context: &Context, root: Command) -> Result<ExitCode, Problem> {
    let client = || controller_client(context);
    let done = match verb {
        HostVerb::Join(args) => join::run(*args, &root).await,
        HostVerb::Doctor(args) => return doctor::run(args, context, &root).await,
        HostVerb::Shutdown(args) => shutting_down::run(args, &root).await,
        HostVerb::Token { host, controller } => token(host, controller, context).await,
        HostVerb::Revoke { host } => {
            let path = format!("/v1/hosts/{host}/revoke");
            let revoked: HostRevoked = client()?.post(&path, &serde_json::json!({})).await?;
            if !revoked.was_enrolled {
                output::note(&format!("no host {host} has joined; is this its name?"));
            }
            Ok(())
        }
        HostVerb::Site { host, site } => {
            client()?.put(&format!("/v1/hosts/{host}/site"), &SetSite { site }).await
        }
        HostVerb::Drain { host, wait, dry_run } => {
            draining::drain(&client()?, &host, (dry_run, wait), context.format).await
        }
        HostVerb::Measure { host, show: true, .. } => {
            measuring::show(&client()?, &host, context.format).await
        }
        HostVerb::Measure { host, cancel: true, .. } => measuring::cancel(&client()?, &host).await,
        HostVerb::Measure { host, against, length, beside_vms, .. } => {
            let ask = MeasureHost { against, length_s: length, beside_vms };
            measuring::measure(&client()?, &host, &ask, context.format).await
        }
        HostVerb::Undrain { host } => draining::undrain(&client()?, &host).await,
        HostVerb::Unknown => unknown::list(context, None).await,
        HostVerb::List => {
            let hosts: Vec<Host> = client()?.get("/v1/hosts").await?;
            output::list(context.format, &hosts, HOSTS)
        }
        HostVerb::Info { host } => {
            let host: Host = client()?.get(&format!("/v1/hosts/{host}")).await?;
            output::one(context.format, &host, &[HOSTS, DETAILS].concat())
        }
        HostVerb::GiveUp { host } => {
            client()?.post::<()>(&format!("/v1/hosts/{host}/give-up"), &()).await
        }
        HostVerb::Remove { host, force } => {
            let removal: HostRemoval = client()?
                .send_body(Method::DELETE, &format!("/v1/hosts/{host}?force={force}"), "")
                .await?;
            output::one(context.format, &removal, REMOVAL)
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Prints a token with which a host joins.
async fn token(host: HostId, controller: Option<String>, context: &Context) -> Result<(), Problem> {
    let is_named = controller.is_some();
    let controller_url = match controller {
        None => kept_login::https_url(context)?,
        named => named,
    };
    let (path, ask) = (format!("/v1/hosts/{host}/token"), NewToken { controller_url });
    let made: MadeToken = controller_client(context)?.post(&path, &ask).await?;
    if let (false, Ok(token)) = (is_named, made.token.parse::<JoinToken>()) {
        let url = token.controller_url;
        output::note(&format!(
            "the host will look for the controller at {url}; if it is reached elsewhere: perigee host token {host} --controller URL"
        ));
    }
    output::text(&made.token);
    Ok(())
}

/// Prints the sites and their hosts, or what is said of a site.
pub async fn run_site(verb: SiteVerb, context: &Context) -> Result<(), Problem> {
    match verb {
        SiteVerb::List => {
            let sites: Vec<Site> = controller_client(context)?.get("/v1/sites").await?;
            output::list(context.format, &sites, SITES)
        }
        SiteVerb::Balance { site, mode } => balancing::mode(site, mode, context).await,
        SiteVerb::Place { site, policy } => {
            let client = controller_client(context)?;
            let shown: Site = match policy {
                Some(place) => {
                    client.put(&format!("/v1/sites/{site}/place"), &SetPlace { place }).await?
                }
                None => {
                    let sites: Vec<Site> = client.get("/v1/sites").await?;
                    let known = sites.into_iter().find(|known| known.id == site);
                    known.ok_or_else(|| balancing::unknown_site(&site))?
                }
            };
            output::one(context.format, &shown, SITES)
        }
    }
}

/// Prints what hosts have measured of their links to others.
pub async fn run_link(verb: LinkVerb, context: &Context) -> Result<(), Problem> {
    let LinkVerb::List { probe } = verb;
    let client = controller_client(context)?;
    let links: Vec<Link> = if probe {
        client.post("/v1/links/probe", &serde_json::json!({})).await?
    } else {
        client.get("/v1/links").await?
    };
    output::list(context.format, &links, LINKS)
}

/// Says which hosts could not be asked for a list of what the hosts have. Only an admin is told.
pub async fn note_silent(client: &Client) {
    let Ok(hosts) = client.get::<Vec<Host>>("/v1/hosts").await else { return };
    let is_server = |w: &Waiting| matches!(w.waits_for, WaitsFor::VolumeServer { .. });
    for host in hosts.iter().filter(|host| host.waits.iter().any(is_server)) {
        output::note(&format!(
            "the volume server of host {} does not answer: what only it has is not listed",
            host.id
        ));
    }
}
