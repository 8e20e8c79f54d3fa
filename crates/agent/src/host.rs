//! The host: its properties, and its report to the controller.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::Uid;
use perigee_http::clock::since_boot_ms;
use perigee_http::terms::Terms;
use perigee_http::{Client, Network};
use perigee_model::upgrade::DaemonVersion;
use perigee_model::vm::{HOST_ADDRESSES_MAX, HostReport};
use perigee_model::volume::{ExportStats, OpenAhead};
use perigee_model::{HostId, Problem, SiteId};

use crate::accelerator::{self, Found};
use crate::changes::Changes;
use crate::command::QEMU;
use crate::config::{Config, Leased};
use crate::ended::Ends;
use crate::files::{VmDir, closed_ancestor};
use crate::lease::Lease;
use crate::load::LastMinute;
use crate::networks::Networks;
use crate::networks::bridged::Bridged;
use crate::networks::interface::interfaces;
use crate::networks::names::Tag;
use crate::notices::Notices;
use crate::process::QemuUser;
use crate::user_networks::{UserNetworks, is_private};
use crate::users::Users;
use crate::{cgroup, confinement, link, load, programs};

/// 100.124.0.0/14: the addresses of tunnels and gateways.
const OWN_NETWORKS: std::ops::RangeInclusive<u32> = 0x647c_0000..=0x647f_ffff;

/// Properties of the host that are determined once, when the agent starts.
#[derive(Debug)]
pub struct Host {
    pub name: HostId,
    pub changes: Arc<Changes>,
    pub site: SiteId,
    pub state: PathBuf,
    /// The VMs that ended here.
    pub ends: Ends,
    pub agent_url: String,
    /// The address at which incoming migrations listen.
    pub ip: String,
    /// This host's volume server.
    pub volume: Client,
    /// How it talks with the controller and the other hosts.
    pub network: Network,
    /// The same, for requests that may take long when the host is busy.
    pub sockets: Client,
    /// Whoever asks for a VM's socket there, or ends one, takes turns: what was found out is so until it is asked for.
    pub sockets_turn: tokio::sync::Mutex<()>,
    pub accelerator: Found,
    qemu_version: String,
    /// Empty if it is not known.
    pub boot_id: String,
    cpu_model: String,
    /// The users of VMs. `None` means the agent's own user, which is not root.
    users: Option<Users>,
    pub has_cgroups: bool,
    pub user_networks: UserNetworks,
    /// Cards in bridges of the operator.
    pub bridged: Bridged,
    /// Networks of tenants.
    pub networks: Networks,
    /// Which controller commands it.
    pub terms: Arc<Terms>,
    /// That it ends itself without its controller; `None` if it does not.
    pub lease: Option<Lease>,
    /// That its provider takes it back; `None` if its provider is not asked.
    pub notices: Option<Notices>,
    warnings: Vec<String>,
    outside_addresses: Vec<Ipv4Addr>,
    last_minute: Mutex<LastMinute>,
}

impl Host {
    /// Finds out what this host can do, and what it lacks for VMs. This takes some seconds: a kernel is booted once to see whether KVM works.
    ///
    /// # Errors
    /// If QEMU is missing, its users can't enter the state directory, or an address can't be used.
    pub async fn find_out(config: &Config) -> Result<Self, Problem> {
        let mut warnings = Vec::new();
        // First, so that a host on which nothing else works ends too.
        let lease = match &config.leased {
            Some(leased) => Some(lease(&config.state, &config.boot_id, leased).await),
            None => None,
        };
        let metadata = config.leased.as_ref().and_then(|leased| leased.metadata.as_deref());
        let notices = metadata.map(Notices::new).transpose()?;
        let is_root = Uid::effective().is_root();
        if is_root {
            check_reachable(&config.state.join("vms"))?;
        } else {
            warnings.push(
                "the agent is not root: QEMU runs as the agent's own user, and VMs are not kept from each other"
                    .to_owned(),
            );
        }
        let mut users = is_root.then(|| Users::new(config.vm_uids)).transpose()?;
        let mut user = users.as_ref().map(Users::for_tests_of_the_host);
        let qemu_version = qemu_version().await?;
        let kernel = config.probe_kernel.as_deref();
        let accelerator = accelerator::find(&config.state, kernel, &qemu_version, &mut user).await;
        warnings.extend(accelerator.warning.clone());
        if let (Some(users), Some(user)) = (&mut users, user) {
            users.take_group(user);
        }
        warnings.extend(confinement::missing());
        let address = link::address_of(&config.agent_url)?;
        let ip = address.rsplit_once(':').map_or(address, |(ip, _)| ip).to_owned();
        let networks = Networks::prepare(&config.state, &config.host, &ip, is_root);
        let networks = networks.await.with_users(config.vm_uids);
        let (uids, reach, hosts) = (config.vm_uids, config.guests_reach.clone(), networks.hosts());
        let user_networks =
            UserNetworks::prepare(is_root, uids, reach, &config.state, hosts.as_deref()).await;
        if let Some(why) = user_networks.cannot() {
            tracing::warn!("{}", no_cards(&why));
        }
        let bridges = if is_root { config.bridges.clone() } else { Vec::new() };
        let bridged = Bridged::new(Tag::new(&config.host, &config.state), bridges);
        let limits = cgroup::available();
        let has_cgroups = limits.is_ok();
        warnings.extend(limits.err());
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        Ok(Self {
            name: config.host.clone(),
            changes: Arc::new(Changes::new()),
            site: config.site.clone(),
            state: config.state.clone(),
            ends: Ends::new(&config.state),
            agent_url: config.agent_url.clone(),
            ip,
            volume: Client::new(&config.volume_control, Duration::from_secs(3))?,
            network: config.network.clone(),
            sockets: Client::new(&config.volume_control, Duration::from_secs(30))?,
            sockets_turn: tokio::sync::Mutex::default(),
            accelerator,
            qemu_version,
            boot_id: perigee_http::boot_id(&config.boot_id),
            cpu_model: cpu_model(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            users,
            has_cgroups,
            user_networks,
            bridged,
            networks,
            terms: Terms::open(&config.state, &config.network),
            lease,
            notices,
            warnings,
            outside_addresses: config.outside_addresses.clone(),
            last_minute: Mutex::default(),
        })
    }

    fn last_minute(&self) -> MutexGuard<'_, LastMinute> {
        self.last_minute.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at how long this host's CPUs were used, for [`Host::report`].
    pub fn look_at_load(&self) {
        self.last_minute().take(Instant::now(), load::cpu_times());
    }

    /// What the controller is told of this host, as it is now.
    ///
    /// # Errors
    /// `Internal` if `/proc` can't be read.
    pub fn report(&self) -> Result<HostReport, Problem> {
        let read = |path: &str| {
            std::fs::read_to_string(path).map_err(|e| Problem::internal(format!("read {path}"), e))
        };
        let memory = read("/proc/meminfo")?;
        let no_total = || Problem::internal("read /proc/meminfo", "it has no MemTotal");
        let (addresses, left_out) = told(own_addresses(&self.outside_addresses, interfaces()));
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(HostReport {
            host: self.name.clone(),
            site: self.site.clone(),
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
            memory_bytes: memory_field(&memory, "MemTotal").ok_or_else(no_total)?,
            memory_available_bytes: memory_field(&memory, "MemAvailable"),
            load_1min: read("/proc/loadavg").ok().and_then(|load| load_1min(&load)),
            cpus_used_1m: self.last_minute().vcpus().map(|used| used.running_vcpus),
            pressure: load::pressure(),
            accelerator: self.accelerator.kind,
            cpu_model: self.cpu_model.clone(),
            qemu_version: self.qemu_version.clone(),
            boot_id: self.boot_id.clone(),
            warnings: [
                self.warnings.clone(),
                self.user_networks.cannot().iter().map(|why| no_cards(why)).collect(),
                self.user_networks.warning().into_iter().collect(),
                self.networks.warnings(),
                self.bridged.warnings(),
                self.terms.warnings(),
                self.lease.iter().filter_map(Lease::warning).collect(),
                self.notices.iter().filter_map(Notices::warning).collect(),
                left_out.into_iter().collect(),
            ]
            .concat(),
            no_networks: self.networks.trouble(),
            failing_gateways: self.networks.failing_gateways(),
            bridges: self.bridged.there(),
            no_user_networks: self.user_networks.cannot(),
            no_tpm: programs::no_tpm(),
            tunnels_moves: true,
            addresses,
            lease: self.lease.as_ref().map(Lease::report),
            notice: self.notices.as_ref().and_then(Notices::notice),
            version: Some(DaemonVersion::own()),
        })
    }

    /// The figures of this host's volume server; empty if it does not answer.
    pub async fn volume_stats(&self) -> Vec<ExportStats> {
        self.volume.get("/v1/stats").await.unwrap_or_default()
    }

    /// Asks this host's volume server to open the sessions of remote exports that QEMU will open one after the
    /// other. It does not wait for the result: a session that fails to open here is opened when QEMU connects.
    pub fn open_ahead(&self, exports: Vec<String>) {
        let volume = self.volume.clone();
        tokio::spawn(async move {
            let ask = OpenAhead { exports };
            if let Err(problem) = volume.post::<()>("/v1/batch/open", &ask).await {
                tracing::debug!(%problem, "QEMU opens its disks itself");
            }
        });
    }

    /// Makes the directories of a VM that is started, and gives it a user.
    pub fn create(&self, dir: &VmDir) -> Result<(), Problem> {
        match &self.users {
            Some(users) => users.create(dir, &self.state),
            None => dir.create(Uid::effective()),
        }
    }

    /// The user and group of a VM's QEMU; `None` if they are the agent's own.
    pub fn user_of(&self, dir: &VmDir) -> Result<Option<QemuUser>, Problem> {
        let Some(users) = &self.users else { return Ok(None) };
        let uid = dir.user().map_err(|error| {
            Problem::internal(format!("can't find out the user of {}", dir.run().display()), error)
        })?;
        Ok(Some(users.qemu_user(uid)))
    }
}

/// The lease of a rented host, looked at once.
pub async fn lease(state: &Path, boot_id: &Path, leased: &Leased) -> Lease {
    let boot_id = perigee_http::boot_id(boot_id);
    let lease = Lease::open(state, &boot_id, leased.length_s, &leased.end);
    lease.round(since_boot_ms(), None).await;
    lease
}

fn no_cards(why: &str) -> String {
    format!("VMs here have no network cards: {why}")
}

/// # Errors
/// If QEMU's users can't enter a directory above this path.
pub fn check_reachable(path: &Path) -> Result<(), Problem> {
    match closed_ancestor(path) {
        None => Ok(()),
        Some(dir) => Err(Problem::invalid(
            format!("can't let QEMU use {}", path.display()),
            format!("QEMU runs as a user of its own, which may not enter {}", dir.display()),
        )
        .next(format!("choose another directory, or run: chmod o+x {}", dir.display()))),
    }
}

/// The version of QEMU that is installed.
///
/// # Errors
/// If there is none.
pub async fn qemu_version() -> Result<String, Problem> {
    let output = tokio::process::Command::new(QEMU).arg("--version").output();
    let output = output.await.map_err(|e| {
        Problem::internal(format!("can't start {QEMU}"), e).next("apt-get install qemu-system-x86")
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version =
        text.strip_prefix("QEMU emulator version ").and_then(|rest| rest.split(' ').next());
    Ok(version.unwrap_or("unknown").to_owned())
}

fn cpu_model(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    line.and_then(|rest| rest.split_once(':')).map_or("", |(_, name)| name.trim()).to_owned()
}

/// A field of /proc/meminfo, in bytes; `None` if it is not there.
fn memory_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The first figure of /proc/loadavg; `None` if it is none.
fn load_1min(text: &str) -> Option<f64> {
    let load: f64 = text.split(' ').next()?.parse().ok()?;
    (load.is_finite() && load >= 0.0).then_some(load)
}

/// The addresses of this host, but for its loopback's. Those that a cloud translates for it come first, and then those of the
/// internet: from all others guests are kept anyway, unless the operator allows them.
fn own_addresses(
    outside: &[Ipv4Addr],
    interfaces: impl Iterator<Item = Ipv4Addr>,
) -> Vec<Ipv4Addr> {
    // Those of tunnels and gateways come and go, and guests never reach them.
    let is_own = |ip: &Ipv4Addr| OWN_NETWORKS.contains(&u32::from(*ip));
    let found = interfaces.chain(outside.iter().copied());
    let mut found: Vec<Ipv4Addr> = found.filter(|ip| !ip.is_loopback() && !is_own(ip)).collect();
    found.sort_by_key(|ip| (!outside.contains(ip), is_private(*ip), *ip));
    found.dedup();
    found
}

/// Those that the cluster is told, and a warning if these are not all.
fn told(mut all: Vec<Ipv4Addr>) -> (Vec<Ipv4Addr>, Option<String>) {
    let left_out = all.split_off(all.len().min(HOST_ADDRESSES_MAX));
    let warning = left_out.first().map(|first| {
        format!(
            "this host has {} addresses, and the cluster is told {HOST_ADDRESSES_MAX} of them: guests at other hosts may \
             reach the others, for example {first}, where these hosts' operators allow it (--guests-reach) or it is of the internet",
            all.len() + left_out.len()
        )
    });
    (all, warning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(memory_field(text, "MemAvailable"), Some(1 << 20));
        assert_eq!(memory_field(text, "Mem"), None);
    }

    #[test]
    fn a_load_that_is_no_number_is_not_known() {
        assert_eq!(load_1min("0.52 0.40 0.31 2/512 4711\n"), Some(0.52));
        for text in ["", "x 1 2", "-1.0 1 2", "NaN 1 2"] {
            assert_eq!(load_1min(text), None, "{text:?}");
        }
    }

    #[test]
    fn an_address_that_a_cloud_translates_is_one_of_the_host_s() {
        let outside = Ipv4Addr::new(198, 51, 100, 7);
        assert!(own_addresses(&[outside], interfaces()).contains(&outside));
        assert!(!own_addresses(&[], interfaces()).contains(&outside));
    }

    /// Until now, the first ones by their numbers were told.
    #[test]
    fn a_host_with_many_addresses_tells_those_that_guests_would_reach() {
        let private = (0..70).map(|n| Ipv4Addr::new(10, 0, n, 1));
        let [outside, public] = [[198, 51, 100, 7], [203, 0, 113, 5]].map(Ipv4Addr::from);
        let interfaces = private.chain([Ipv4Addr::LOCALHOST, public, public]);
        let (addresses, warning) = told(own_addresses(&[outside], interfaces));
        assert_eq!(addresses.len(), HOST_ADDRESSES_MAX);
        assert_eq!(addresses[..3], [outside, public, Ipv4Addr::new(10, 0, 0, 1)]);
        let warning = warning.expect("some are left out");
        assert!(warning.contains("72 addresses") && warning.contains("10.0.62.1"), "{warning}");
        assert_eq!(told(own_addresses(&[outside], [public].into_iter())).1, None);
    }

    #[test]
    fn a_processor_says_its_model() {
        let text = "processor\t: 0\nmodel name\t: EPYC 7B13 @ 2.4GHz\nflags\t: fpu\n";
        assert_eq!(cpu_model(text), "EPYC 7B13 @ 2.4GHz");
        assert_eq!(cpu_model("processor : 0"), "");
    }
}
