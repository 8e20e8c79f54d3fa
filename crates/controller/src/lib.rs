//! The controller: API, store, job queue, placement, and the drivers that carry jobs and
//! migrations from intent to end.
//!
//! One task owns each unfinished job and each unfinished migration. It stores each decision before it acts, so
//! that a restarted controller continues where the last one was stopped. VMs, volumes and figures are at the
//! hosts; the controller only has their last reports.
//!
//! Each top-level module is a room, and each room has a floor. A room imports only from lower floors, and from no other room of
//! its own. `scripts/check-floors` reads this list and refuses other imports:
//!
//! ```text
//! floors, from the ground up:
//! clock, hash, guest, store, meter, audit, live
//! records
//! term, level, job_files
//! backup, cluster
//! accounts, ledger, prices, networks, admissions, console, tpm, restored
//! cleaner
//! storage
//! files, planning
//! migration, scheduler
//! jobs
//! vms, hosts, tenants
//! amounts, drain, balance, measuring, upgrade
//! rentals
//! api
//! web
//! supervisor
//! fuzzing
//! ```
//!
//! What [`cluster::Cluster`] holds is in `cluster` (for example `cluster/accounts.rs`); what acts on that state stands in the room of its
//! name above (`accounts.rs`).
//!
//! | question | file |
//! |---|---|
//! | What is in a backup of the controller, and how is one restored? | `backup/mod.rs`, `backup/restore.rs`; what does not begin before each host was heard: `restored.rs`, `begin` in `supervisor.rs` |
//! | What do hosts have that no record names, and what is done with it? | `storage/unknown.rs`; why a host does not end it for a new VM of its name: `model/src/starts.rs` |
//! | How does a job run in an image without the runner? | `add_runner` in `jobs/stage.rs`; in the guest: `START_RUNNER` in `guest/nocloud.rs`, `guest/runner/src/cloud_init.rs` |
//! | What does cloud-init read in such a VM, and in a job's whose image has no runner? | `guest/nocloud.rs`; the filesystem of that disk: `guest/fat.rs`; which user-data is refused: `guest/user_data.rs` |
//! | What becomes of a copy whose source host is gone? | `storage/images/sources.rs` (another source is chosen), `store/src/copies/sources.rs` (whether it will do), `store/src/layers/remote.rs` (the copy goes on from it) |
//! | Which VM has which network card? | `kind_of` in `networks.rs` |
//! | How did a command end, and which files are not among a job's outputs? | `jobs/ended.rs`, `files/outputs/left_out.rs`; in the guest: `guest/runner/src/command.rs`, `guest/runner/src/processes.rs`, `guest/runner/src/outputs.rs`; the guest's clock: `guest/runner/src/clock.rs` |
//! | How is a VM changed while it runs? | `vms/live.rs`; at the host: `agent/src/vm/owner/change.rs`, `agent/src/vm/since.rs` (what differs from the VM's spec since) |
//! | How does a volume come to a VM and go from it while it runs? | `vms/attachments.rs`, `begin_attachment` in `cluster/index/holds.rs`; at the host: `agent/src/vm/owner/change.rs` |
//! | What has a VM printed on its console, and where is that when it has left its host? | `vms/console.rs`, `console.rs`; at the host: `agent/src/vm/console.rs` |
//! | How does `perigee vm ssh` reach a guest? | `ssh` in `vms.rs`; at the host: `dial` in `agent/src/vm/network.rs` and `agent/src/networks.rs` |
//! | Which ports may a VM publish, and how does a client get from a port of a host to the VM? | `networks/publish.rs`; at the host: `agent/src/networks/doors.rs`, `agent/src/networks/rules.rs` |
//! | Which hosts can have VMs in networks, and what becomes of a job when one can't any more? | `refusal` in `networks.rs`, `start_vm` in `jobs/follow.rs`; at the host: `look_at_end` in `agent/src/networks.rs` |
//! | Who says at which site a host is? | its agent the first time, then an admin: `check_site` in `hosts/mod.rs` |
//! | How is staging kept from starving VMs on the network? | `files/pace.rs`, `cluster/paces.rs` |
//! | How do inputs get to the job's host, and when are they removed? | `files/inputs/staging.rs`, `files/inputs/ahead.rs`, `files/inputs/collect.rs` |
//! | Which volumes and images of another host may a host open over NBD? | images and layers whose layer's id it was told (`by_layer` in `storage/images.rs`), and the volumes that the controller has let it: `store/src/homes/admissions.rs`; checked: `check_admission` in `volume/src/exports.rs`; told, and let out again: `admissions.rs`; what it has open ends: `volume/src/admissions.rs` |
//! | Whose is a volume that a host has and the controller does not know? | nobody's: `find` and `adopt` in `storage/volumes.rs` |
//! | What waits for a volume that moves, and what does the volume wait for? | `cluster/index/homes.rs`, `jobs/follow_moves.rs` |
//! | How do migrations share a link? | `migration/sharing.rs` (turns), `planning/shared_links.rs` (the largest share, the time left); the queues: `cluster/lanes.rs` |
//! | What happens to a job, step by step? | `jobs/driver.rs` |
//! | How is a VM made of the backup of one, and what if the controller is killed meanwhile? | `vms/from_backup.rs`, `jobs/from_backup.rs`; each disk: `storage/backups/restore.rs` |
//! | What happens to a job whose host is gone? | `jobs/restart.rs` |
//! | What leaves a host that is drained, and what keeps it there? | `drain/mod.rs`, `drain/facts.rs`; what becomes of each: `planner/src/drain.rs`; which hosts those are: `cluster/drains.rs` |
//! | When does the cluster rent a host by itself, and for which jobs? | `rentals/automatic/mod.rs`; what the rule sees: `planning/renting.rs`; what is remembered: `cluster/renter.rs`; the rule: `planner/src/rent/mod.rs`; which jobs start there: `planner/src/queue/rented.rs` |
//! | How is a host measured, and when by itself? | `measuring/mod.rs`, `measuring/steps.rs`; what is remembered: `cluster/measurements.rs`; what of it counts for predictions: `planning/measured.rs`; at the hosts: `volume/src/measure/`, `agent/src/link.rs` |
//! | What becomes of a rented host, and what keeps an instance from being made twice or forgotten? | `rentals/mod.rs`; the rules: `model/src/rental/states.rs`; what is remembered: `cluster/rentals.rs` |
//! | What holds for all moves that nobody has asked for? | `migration/by_itself.rs`; how dear a VM's moves are: `cluster/balance.rs` |
//! | Which VMs leave an overloaded host, or go to their data, by themselves? | `balance/mod.rs`, `balance/look.rs`, `balance/data.rs`, `balance/ways.rs`; what is said of one VM: `balance/explain.rs`; the rule: `planner/src/balance/mod.rs`; what is remembered: `cluster/balance.rs` |
//! | How much memory has a VM that may have more or less of it while it runs? | `amounts.rs`; the rule: `planner/src/amounts.rs`; what is remembered: `cluster/amounts.rs`; at the host: `agent/src/vm/memory.rs` |
//! | What of a removed host is remembered, for the case that it comes back? | `cleaner.rs` (its VMs), `storage/given_up.rs` (its volumes) |
//! | What do all parts of the controller share, and what starts the drivers? | `cluster/` (the state below), `supervisor.rs` (the drivers above) |
//! | What do the endless tasks do, and at what does one fail? | started in `supervisor.rs`; reported by `cluster/tasks.rs`, shown by `api/tasks.rs` |
//! | Which records are stored, and under which keys? | `records.rs`, `store/mod.rs`; fields of a newer version: `records/unknown_fields.rs` |
//! | Which daemons are older, and what is held back until an upgrade ends? | `upgrade.rs`, `level.rs` |
//! | Which messages may a guest send in which state of its job? | `jobs/guest.rs` |
//! | Which image does a name mean, and how does a host get its copy? | `storage/images.rs`, `storage/images/ensure.rs` |
//! | Which volumes are a job's own? | `owner_of` in `records.rs`, `create` in `jobs/stage.rs` |
//! | Which problems end a job, and which does it wait for? | `troubled` in `jobs/driver.rs` |
//! | How are tenants, users and tokens kept, and what counts for a quota? | `cluster/accounts.rs`, `accounts.rs`, `tenants.rs`, `accounts/usage.rs`; VMs, vCPUs and memory: `planner/src/queue/mod.rs` |
//! | What may a job cost, what has it cost, and what does a budget allow? | `ledger.rs`, `cluster/ledger.rs`, `jobs/cost.rs`; what hosts cost: `prices.rs`, `cluster/price_list.rs`, `model/src/prices.rs`; which way is chosen: `planner/src/options/cost.rs`; rented hosts: `rentals/money.rs`, and what leaves their sites: `ledger/left_site.rs` |
//! | What does a person see in a browser, and how does one log in there? | `web/mod.rs`; the HTML: the crate `web` |
//! | What is in the audit log? | `audit.rs`, `api/callers.rs` |
//! | Does a user learn anything of another tenant? | `tests/tenant_walk.rs` |
//! | Who may send which request to which daemon? | `api/callers.rs`, `agent/src/callers.rs`, `volume/src/control/callers.rs` |
//! | How does a host join, get its next certificate, and lose what it has? | `hosts/enrol.rs`, `hosts/look_back.rs` (how the controller sees it before), `agent/src/certificate.rs`, `perigee/src/commands/join.rs` |
//! | How are the logs of a job's VMs shown as one? | `merged` in `jobs/log.rs` |
//! | What bounds a job's log and samples, and what of them survives a crash? | `job_files/mod.rs`, `jobs/samples.rs` |
//! | How do a job's outputs come into the repository, and how long do they stay there? | `files/outputs.rs`; what a hostile guest may have written: `files/outputs/entries.rs`; in the guest: `guest/runner/src/outputs.rs`, `guest/runner/src/globs.rs` |
//! | What becomes of the outputs of a job whose VM ends under it? | `jobs/collect.rs`; in the guest: `collect` in `guest/runner/src/job.rs` |
//! | What happens to a running job that is cancelled? | `jobs/cancel.rs`; how the guest hears of it: `agent/src/guest/intents.rs` |
//! | How does the root disk of a running VM become an image? | `vms/save.rs` |
//! | Who carries that out, and what follows when it is refused? | `jobs/decide_move.rs`; volumes that come to their VM: `jobs/follow_moves.rs`; to all VMs of a job: `jobs/gang/copying.rs` |
//! | Which jobs are traced for that, how does the trace get there, and why is it not kept? | `jobs/traces.rs`, `block/src/collection.rs` |

mod accounts;
mod admissions;
mod amounts;
mod api;
mod audit;
mod backup;
mod balance;
mod cleaner;
mod clock;
mod cluster;
mod console;
mod drain;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guest;
mod hash;
mod hosts;
mod job_files;
mod jobs;
mod ledger;
mod level;
mod live;
mod measuring;
mod meter;
mod migration;
mod networks;
mod planning;
mod prices;
mod records;
mod rentals;
mod restored;
mod scheduler;
mod storage;
mod store;
mod supervisor;
mod tenants;
mod term;
mod tpm;
mod upgrade;
mod vms;
mod web;

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_http::{BrowserCertificate, Listen, notify};
use perigee_model::money::Money;
use perigee_model::network::PublishPorts;
use perigee_model::{Problem, SiteId};
use perigee_repository::Objects;

use api::doors;
pub use api::doors::Doors;
pub use backup::{Made, Restored, make as back_up, restore};
use cluster::rentals::Renting;
use cluster::{Settings, Timing, Traffic};
pub use guest::tars::{TarError, check_output};
pub use guest::user_data;
pub use jobs::runner_places;
pub use live::Live;
pub use store::directory::authority;
use supervisor::Supervisor;
pub use term::take_over;

/// What a controller is told at its start.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory of the store, the repository and outputs. It is created if it does not exist.
    pub state: PathBuf,
    pub listen: Vec<Listen>,
    /// DNS names at which people and programs call it over https, beside the addresses where it listens.
    pub names: Vec<String>,
    /// The controller's site, if it is at one. Outputs that may not leave their site come to the controller only if
    /// it is at that site.
    pub site: Option<SiteId>,
    /// Whether it talks plain TCP with the hosts and with clients.
    pub insecure: bool,
    /// What browsers are shown that call the controller by a name of this certificate.
    pub web_certificate: Option<Arc<BrowserCertificate>>,
    /// Where files are served, beside the API.
    pub doors: Doors,
    /// The S3 store with the contents of files, if they are not on the controller's disk.
    pub data: Option<perigee_repository::Address>,
    /// For how many seconds outputs of jobs are kept that do not say it; `None`: until somebody deletes them.
    pub keep_outputs_s: Live<Option<u64>>,
    /// The ports of hosts that tenants may publish.
    pub publish_ports: PublishPorts,
    /// The file that says what hosts, disks and traffic cost; `None`: nothing costs anything.
    pub prices: Option<PathBuf>,
    /// The text of the file that names the providers of rented hosts, if there are any.
    pub providers: Option<String>,
    /// What all rented hosts of 30 days together may cost; `None`: none is rented.
    pub rent_budget: Live<Option<Money>>,
}

/// The S3 store at `s3://BUCKET/PREFIX`.
///
/// # Errors
/// If it is no such address.
pub fn store_address(
    text: &str,
    endpoint: Option<String>,
    credentials: Option<PathBuf>,
) -> Result<perigee_repository::Address, Problem> {
    let address = perigee_repository::Address::parse(text, endpoint)?;
    Ok(perigee_repository::Address { credentials, ..address })
}

/// Runs until SIGTERM or SIGINT. The future is boxed, so that it is compiled in this crate only.
///
/// # Errors
/// When the state directory cannot be used or an address is taken.
pub fn run(config: Config) -> BoxFuture<'static, Result<(), Problem>> {
    async { run_until(config, perigee_http::stopped()?).await }.boxed()
}

/// As [`run`], until `stop` ends.
///
/// # Errors
/// As [`run`].
pub fn run_until(
    config: Config,
    stop: BoxFuture<'static, ()>,
) -> BoxFuture<'static, Result<(), Problem>> {
    until(config, stop).boxed()
}

/// The addresses and names at which the controller is called: those where it listens, and those it was told.
fn called(config: &Config) -> Result<Vec<String>, Problem> {
    let mut called = config.names.clone();
    for listen in &config.listen {
        let Listen::Tcp(address) = listen else { continue };
        let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
        let host = host.trim_matches(['[', ']']);
        match host.parse::<IpAddr>() {
            Ok(ip) if ip.is_unspecified() => called.extend(own_addresses()?),
            _ => called.push(host.to_owned()),
        }
    }
    called.sort();
    called.dedup();
    Ok(called)
}

/// Where other machines call the controller: by the first name that it was told, else by an address that others reach.
fn own_url(config: &Config) -> Result<Option<String>, Problem> {
    let mut urls = Vec::new();
    for listen in &config.listen {
        let Listen::Tcp(address) = listen else { continue };
        let Some((host, port)) = address.rsplit_once(':') else { continue };
        let host = host.trim_matches(['[', ']']);
        let hosts = match host.parse::<IpAddr>() {
            _ if !config.names.is_empty() => config.names.clone(),
            Ok(ip) if ip.is_unspecified() => own_addresses()?,
            _ => vec![host.to_owned()],
        };
        urls.extend(hosts.into_iter().filter_map(|host| match host.parse::<IpAddr>() {
            Ok(ip) if ip.is_loopback() => None,
            // An address of one link means nothing without the link.
            Ok(IpAddr::V6(ip)) if ip.is_unicast_link_local() => None,
            Ok(IpAddr::V6(ip)) => Some(format!("https://[{ip}]:{port}")),
            _ => Some(format!("https://{host}:{port}")),
        }));
    }
    // Most machines have both, and more people know their IPv4 addresses.
    urls.sort_by_key(|url| url.starts_with("https://["));
    Ok(urls.into_iter().next())
}

/// The addresses of this machine.
fn own_addresses() -> Result<Vec<String>, Problem> {
    let interfaces = nix::ifaddrs::getifaddrs()
        .map_err(|e| Problem::internal("can't list this machine's addresses", e))?;
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| v4.ip().to_string());
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| v6.ip().to_string()))
    });
    Ok(addresses.collect())
}

/// Of the FTPS gateway, as its unit file has them. It is a program of its own, and may run on any host.
const FTPS_PORTS: [std::ops::RangeInclusive<u16>; 2] = [21..=21, 50_000..=50_999];

/// The TCP ports on which this controller and its doors listen.
fn own_ports(config: &Config) -> Vec<u16> {
    let tcp = config.listen.iter().filter_map(|listen| match listen {
        Listen::Tcp(address) => Some(address),
        Listen::Unix(_) => None,
    });
    let ports =
        tcp.chain(&config.doors.sftp).map(|address| address.rsplit_once(':')?.1.parse().ok());
    ports.flatten().chain(FTPS_PORTS.into_iter().flatten()).collect()
}

/// Who has machines for rent.
fn renting(config: &Config) -> Result<Renting, Problem> {
    let providers = config.providers.as_deref().map(perigee_cloud::providers).transpose();
    let providers = providers.map_err(|bad| bad.0)?;
    Ok(Renting { providers: providers.unwrap_or_default(), budget: config.rent_budget.clone() })
}

async fn until(config: Config, stop: BoxFuture<'static, ()>) -> Result<(), Problem> {
    perigee_http::prepare_daemon();
    let traffic = if config.insecure { Traffic::Plain } else { Traffic::Tls(called(&config)?) };
    let objects = match &config.data {
        Some(address) => Some(Objects::open(address).await?),
        None => None,
    };
    let settings = Settings {
        site: config.site.clone(),
        keep_outputs_s: config.keep_outputs_s.clone(),
        publish_ports: config.publish_ports,
        own_ports: own_ports(&config),
        own_url: own_url(&config)?,
        runner: None,
        prices: config.prices.clone(),
        renting: renting(&config)?,
    };
    let timing = Timing::default();
    let started = Supervisor::start_with(&config.state, timing, traffic, settings, objects);
    let supervisor = started.await?;
    let router = web::router(supervisor.cluster.clone());
    let network = &supervisor.cluster.network;
    if let (Some(identity), Some(certificate)) = (network.identity(), &config.web_certificate) {
        identity.show_besides(Arc::clone(certificate));
    }
    let serve = async {
        let bound = perigee_http::bind(router, &config.listen, network).await?;
        notify::ready("");
        bound.serve().await
    };
    let doors = doors::doors(&supervisor.cluster, &config.doors);
    let tidy = supervisor.cluster.repository.clone().tidy();
    // A controller that does not command any more changes no files either; another one may use the same S3 store.
    let while_it_commands = async {
        tokio::select! {
            biased;
            _ = supervisor.cluster.claim.until_refused() => std::future::pending().await,
            ended = doors => ended,
            () = tidy => Ok(()),
        }
    };
    let ended = tokio::select! {
        ended = serve => ended,
        ended = while_it_commands => ended,
        () = stop => Ok(()),
    };
    supervisor.stop().await;
    ended
}
