//! The versions of a cluster's daemons, and what of an upgrade is held back until its end.
//!
//! A cluster has a *format level*. A controller writes nothing that a version of a lower level can't read, until a person ends the upgrade
//! and so raises the level: until then all daemons can go back to the version of before. `docs/dev/upgrade.md` says what a change of a format
//! has to do for that.

use std::fmt;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::HostId;

/// The newest format level that this version knows.
pub const FORMAT_LEVEL: u32 = 3;

static COMMIT: OnceLock<Option<&'static str>> = OnceLock::new();

/// Which program a daemon is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DaemonVersion {
    /// The product's version, as `0.1.0`.
    pub product: String,
    /// The commit of its sources; `None` if whoever has built it did not say the commit.
    pub commit: Option<String>,
    /// The newest format level that it knows.
    pub format_level: u32,
}

impl DaemonVersion {
    /// The version of this process, with the commit that [`DaemonVersion::built_of`] was told.
    pub fn own() -> Self {
        Self {
            product: env!("CARGO_PKG_VERSION").to_owned(),
            commit: COMMIT.get().copied().flatten().map(str::to_owned),
            format_level: FORMAT_LEVEL,
        }
    }

    /// Says of which commit this program was built. A program says so once, when it begins.
    pub fn built_of(commit: Option<&'static str>) {
        COMMIT.get_or_init(|| commit.filter(|commit| !commit.is_empty()));
    }

    /// Whether this is another version; `None`: a commit is not known, and all else is the same.
    pub fn differs(&self, other: &Self) -> Option<bool> {
        let release = |of: &Self| (of.product.clone(), of.format_level);
        match (&self.commit, &other.commit) {
            _ if release(self) != release(other) => Some(true),
            (Some(commit), Some(of_other)) => Some(commit != of_other),
            _ => None,
        }
    }
}

impl fmt::Display for DaemonVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.commit {
            Some(commit) => write!(f, "{} (commit {commit})", self.product),
            None => f.write_str(&self.product),
        }
    }
}

/// The versions of a host's daemons, as the daemons last said them; `None`: not known. Versions before format levels do not say it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostVersions {
    /// Of its agent.
    pub agent: Option<DaemonVersion>,
    /// Of its volume server.
    pub volume_server: Option<DaemonVersion>,
}

/// A daemon of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostDaemon {
    /// As the daemon last said it; `None`: not known, because the daemon does not say it, as older ones, or was never heard.
    pub version: Option<DaemonVersion>,
    /// Whether that is another version than the controller's; `None` while it is not known.
    pub differs: Option<bool>,
    /// Why it does not answer; `None`: it has answered just now.
    pub silent: Option<String>,
}

impl HostDaemon {
    /// Why the format level can't become `level`, if it is because of this daemon.
    fn blocks(&self, level: u32) -> Option<String> {
        if let Some(why) = &self.silent {
            return Some(format!("does not answer: {why}"));
        }
        match &self.version {
            None => {
                Some("does not say its version, so it is older than versions that do".to_owned())
            }
            Some(version) if version.format_level < level => Some(format!(
                "has version {version}, which knows format level {} and not {level}",
                version.format_level
            )),
            Some(_) => None,
        }
    }
}

/// A host with its daemons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostUpgrade {
    /// The host.
    pub host: HostId,
    /// Its agent.
    pub agent: HostDaemon,
    /// Its volume server.
    pub volume_server: HostDaemon,
}

impl HostUpgrade {
    /// Why the format level can't become `level`, as far as that is because of this host.
    pub fn blocks(&self, level: u32) -> Vec<String> {
        let daemons = [("agent", &self.agent), ("volume server", &self.volume_server)];
        let why = daemons.into_iter().filter_map(|(name, daemon)| {
            daemon.blocks(level).map(|why| format!("host {}: its {name} {why}", self.host))
        });
        why.collect()
    }
}

/// `GET /v1/upgrade`: where an upgrade of the cluster stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Upgrade {
    /// The version of the controller.
    pub controller: DaemonVersion,
    /// The format level in force.
    pub format_level: u32,
    /// The level to which the end of the upgrade raises it: what is new in that level is held back until then; `None`: nothing is held back.
    pub held_back_level: Option<u32>,
    /// Sorted by name.
    pub hosts: Vec<HostUpgrade>,
    /// Why the upgrade can't be ended now; empty if it can.
    pub blocks: Vec<String>,
}

/// `POST /v1/upgrade/finish`: ends the upgrade of the cluster. From then on no daemon can go back to the version of before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FinishUpgrade {
    /// Hosts that are given up: nobody looks at their versions.
    #[serde(default)]
    pub without: Vec<HostId>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::vm::{HostAddresses, HostReport};
    use crate::volume::PoolInfo;

    fn daemon(version: Option<DaemonVersion>) -> HostDaemon {
        HostDaemon { version, differs: None, silent: None }
    }

    #[test]
    fn a_daemon_that_is_older_or_not_known_or_silent_blocks_and_its_host_is_named() {
        let own = DaemonVersion::own();
        let newer = DaemonVersion { format_level: FORMAT_LEVEL + 1, ..own.clone() };
        let blocks = |agent: HostDaemon| {
            let host = HostId::new("home1").expect("a name");
            let volume_server = daemon(Some(newer.clone()));
            HostUpgrade { host, agent, volume_server }.blocks(FORMAT_LEVEL + 1).join("; ")
        };
        assert_eq!(blocks(daemon(Some(newer.clone()))), "");
        let silent = Some("it is off".to_owned());
        let knows = format!("knows format level {FORMAT_LEVEL} and not {}", FORMAT_LEVEL + 1);
        let off = HostDaemon { version: Some(newer.clone()), differs: None, silent };
        for (agent, why) in [
            (daemon(Some(own)), knows.as_str()),
            (daemon(None), "does not say its version"),
            (off, "does not answer: it is off"),
        ] {
            let said = blocks(agent);
            assert!(said.starts_with("host home1: its agent ") && said.contains(why), "{said}");
        }
    }

    #[test]
    fn two_builds_of_which_one_does_not_say_its_commit_may_differ() {
        let of = |commit: Option<&str>| DaemonVersion {
            commit: commit.map(str::to_owned),
            ..DaemonVersion::own()
        };
        assert_eq!(of(Some("a")).differs(&of(Some("a"))), Some(false));
        assert_eq!(of(Some("a")).differs(&of(Some("b"))), Some(true));
        assert_eq!(of(Some("a")).differs(&of(None)), None);
        let other = DaemonVersion { product: "9.0.0".to_owned(), ..of(None) };
        assert_eq!(other.differs(&of(None)), Some(true));
    }

    fn report() -> serde_json::Value {
        json!({
            "host": "home1", "site": "home", "cpus": 2, "memory_bytes": 1, "pressure": {},
            "accelerator": "tcg", "cpu_model": "", "qemu_version": "7.2", "boot_id": "",
            "warnings": [], "failing_gateways": [], "bridges": [], "addresses": [],
        })
    }

    fn pool() -> serde_json::Value {
        json!({
            "path": "/pool", "total_bytes": 1, "free_bytes": 1, "images": 0, "volumes": 0,
            "format_version": 1, "data_bytes": 0, "shared_bytes": 0, "tenants": [],
        })
    }

    /// What an agent of before says has no version, and is read.
    #[test]
    fn a_version_that_a_daemon_does_not_say_is_not_known() {
        let report: HostReport = serde_json::from_value(report()).expect("a report");
        let pool: PoolInfo = serde_json::from_value(pool()).expect("a pool");
        assert_eq!((report.version, pool.version), (None, None));
    }

    #[test]
    fn what_a_newer_daemon_says_beside_what_this_version_knows_is_no_error() {
        let more = |mut said: serde_json::Value| {
            said["invented_later"] = json!({"a": [1]});
            said
        };
        let version = json!({"product": "9.0.0", "commit": "abc", "format_level": 9});
        let mut said = more(report());
        said["version"] = more(version);
        let said: HostReport = serde_json::from_value(said).expect("a report");
        let version = said.version.expect("a version");
        assert_eq!((version.format_level, version.to_string().as_str()), (9, "9.0.0 (commit abc)"));
        serde_json::from_value::<PoolInfo>(more(pool())).expect("a pool");
        let addresses = json!({
            "site": "home", "agent_url": "https://10.0.0.1:1", "volume_url": "https://10.0.0.1:2",
            "nbd_addr": "10.0.0.1:3", "tunnel": null,
        });
        serde_json::from_value::<HostAddresses>(more(addresses)).expect("addresses");
    }
}
