//! What a host will be: its addresses, its directories, and the files of its daemons.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use perigee_agent::VmUids;
use perigee_model::enrol::{HostSeen, JoinToken};
use perigee_model::{HostId, Problem, SiteId};

use super::JoinArgs;
use crate::commands::agent::STATE;
use crate::commands::doctor::Machine;
use crate::commands::network::IDENTITY_DIR;
use crate::config::{DIR, Daemon, Wanted};

/// The site of a cluster's first host, if nothing is said of sites.
const FIRST_SITE: &str = "home";

const VOLUME_PORT: u16 = 7001;
const AGENT_PORT: u16 = 7002;
const NBD_PORT: u16 = 10809;

/// What is known before the controller is asked.
pub struct Plan {
    host: HostId,
    controller_url: String,
    ip: IpAddr,
    pool: PathBuf,
    identity: PathBuf,
    config_dir: PathBuf,
}

impl Plan {
    pub fn new(args: &JoinArgs, token: &JoinToken, ip: IpAddr) -> Self {
        Self {
            host: token.host.clone(),
            controller_url: token.controller_url.clone(),
            ip,
            pool: args.pool.clone(),
            identity: args.identity.clone(),
            config_dir: args.config_dir.clone(),
        }
    }

    fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip, port)
    }

    /// Where the daemons will listen for other hosts.
    pub fn listening(&self) -> [SocketAddr; 3] {
        [VOLUME_PORT, AGENT_PORT, NBD_PORT].map(|port| self.at(port))
    }

    /// Whether this machine is a host already, whose daemons may run.
    pub fn is_there(&self) -> bool {
        [Daemon::Volume, Daemon::Agent].iter().any(|one| one.file_in(&self.config_dir).exists())
    }

    /// What is looked at.
    pub fn machine(&self) -> Machine {
        Machine {
            state: PathBuf::from(STATE),
            vm_uids: VmUids::default(),
            probe_kernel: None,
            pool: self.pool.clone(),
            ip: Some(self.ip),
        }
    }

    /// The files of the daemons of a host at this site.
    pub fn files(&self, site: &SiteId) -> [Wanted; 2] {
        let pool = self.pool.display();
        let nbd = self.at(NBD_PORT).to_string();
        let volume = vec![
            ("pool", vec![pool.to_string()]),
            ("nbd", vec!["unix:/run/perigee/volume.sock".to_owned(), nbd.clone()]),
            (
                "control",
                vec![
                    "unix:/run/perigee/volume-control.sock".to_owned(),
                    // Commands with --pool use it.
                    format!("unix:{pool}/control.sock"),
                    self.at(VOLUME_PORT).to_string(),
                ],
            ),
        ];
        let agent = vec![
            ("host", vec![self.host.to_string()]),
            ("site", vec![site.to_string()]),
            ("listen", vec![self.at(AGENT_PORT).to_string()]),
            ("controller", vec![self.controller_url.clone()]),
            ("volume-url", vec![format!("https://{}", self.at(VOLUME_PORT))]),
            ("nbd-addr", vec![nbd]),
        ];
        [(Daemon::Volume, volume), (Daemon::Agent, agent)].map(|(daemon, mut settings)| {
            if self.identity != Path::new(IDENTITY_DIR) {
                settings.push(("identity", vec![self.identity.display().to_string()]));
            }
            Wanted { daemon, file: daemon.file_in(&self.config_dir), settings }
        })
    }
}

/// Where the units let no daemon write, or where not both of them see the same: `ProtectSystem=`, `ProtectHome=` and `PrivateTmp=`.
const NOT_IN_UNITS: [&str; 9] =
    ["/boot", "/efi", "/etc", "/home", "/root", "/run/user", "/tmp", "/usr", "/var/tmp"];

/// Whether the agent's unit can renew the certificate in this directory.
///
/// # Errors
/// `Invalid` if it can't.
pub fn check_identity_dir(dir: &Path) -> Result<(), Problem> {
    let closed = NOT_IN_UNITS.iter().find(|closed| dir.starts_with(closed));
    let Some(closed) = closed.filter(|_| !dir.starts_with(DIR)) else { return Ok(()) };
    let what = format!("can't keep this host's certificate in {}", dir.display());
    let why = format!("the units of the daemons may not write below {closed}");
    Err(Problem::invalid(what, why).next(format!(
        "leave --identity out, for {IDENTITY_DIR}, or name a directory elsewhere, as /var/lib/perigee/identity; or with --no-start: allow it with `systemctl edit`, and start the daemons yourself"
    )))
}

/// The site where the host is.
///
/// # Errors
/// `Invalid` if the cluster has several, and nobody has said which one it is.
pub fn site(named: Option<&SiteId>, seen: &HostSeen, token: &JoinToken) -> Result<SiteId, Problem> {
    if let Some(site) = named.or(seen.site.as_ref()) {
        return Ok(site.clone());
    }
    let what = format!("can't choose a site for host {}", token.host);
    if seen.sites.is_empty() {
        return SiteId::new(FIRST_SITE).map_err(|e| Problem::internal(what, e));
    }
    let sites: Vec<&str> = seen.sites.iter().map(SiteId::as_str).collect();
    Err(Problem::invalid(what, format!("the cluster has the sites {}", sites.join(", ")))
        .next("say which one it is, or a new one: the same command with --site NAME; the token stays good"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(site: Option<&str>, sites: &[&str]) -> HostSeen {
        let name = |text: &str| SiteId::new(text).expect("a name");
        HostSeen {
            now_ms: 0,
            site: site.map(name),
            sites: sites.iter().map(|site| name(site)).collect(),
            unreached: Vec::new(),
            untried: Vec::new(),
        }
    }

    #[test]
    fn one_file_of_a_daemon_says_that_a_machine_is_a_host_already() {
        let dir = tempfile::tempdir().expect("a directory");
        let plan = Plan {
            host: HostId::new("home1").expect("a name"),
            controller_url: "https://10.0.0.1:7000".to_owned(),
            ip: [10, 0, 0, 2].into(),
            pool: PathBuf::from("/pool"),
            identity: PathBuf::from(IDENTITY_DIR),
            config_dir: dir.path().to_owned(),
        };
        assert!(!plan.is_there());
        std::fs::write(dir.path().join("volume.yaml"), "").expect("a file");
        assert!(plan.is_there());
    }

    #[test]
    fn a_certificate_is_not_put_where_the_agents_unit_can_not_renew_it() {
        let is_good = |dir: &str| check_identity_dir(Path::new(dir)).is_ok();
        assert!(["/etc/perigee/identity", "/var/lib/id", "/srv/etc"].into_iter().all(is_good));
        assert!(!["/etc/pki/perigee", "/etc/perigee2", "/root/id"].into_iter().any(is_good));
    }

    #[test]
    fn a_hosts_site_is_the_one_that_is_named_or_known_and_is_asked_for_only_where_there_are_several()
     {
        let token: JoinToken = "home1,5e,f1,https://10.0.0.1:7000".parse().expect("a token");
        let chosen = |named: Option<&SiteId>, seen: &HostSeen| {
            site(named, seen, &token).map(|site| site.to_string())
        };
        let cloud = SiteId::new("cloud").expect("a name");
        assert_eq!(chosen(Some(&cloud), &seen(Some("home"), &["home"])), Ok("cloud".to_owned()));
        assert_eq!(chosen(None, &seen(Some("lab"), &["lab", "b"])), Ok("lab".to_owned()));
        assert_eq!(chosen(None, &seen(None, &[])), Ok("home".to_owned()));
        let problem = chosen(None, &seen(None, &["a", "b"])).expect_err("nobody knows");
        assert!(problem.why.contains("a, b") && problem.next.contains("--site"), "{problem}");
    }
}
