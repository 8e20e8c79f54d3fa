//! `perigee host doctor`: looks at this machine as a host, and says what to do about what is wrong. `perigee host join` looks at the same before it
//! changes anything.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Command};
use nix::sys::statvfs::statvfs;
use perigee_agent::{Examined, VmUids};
use perigee_http::{Client, Expected, Identity, Network, PeerIdentity, authority_of};
use perigee_model::enrol::{CheckHost, HostSeen, Unreached};
use perigee_model::finding::{Finding, Verdict};
use perigee_model::job::{Host, HostState};
use perigee_model::limits::CHECKED_ADDRESSES;
use perigee_model::waiting::in_words;
use perigee_model::{HostId, Problem, SiteId};
use tokio::net::TcpListener;

use crate::commands::agent::STATE;
use crate::commands::network::IDENTITY_DIR;
use crate::config::{self, DIR, Daemon, Told};
use crate::context::Context;
use crate::output::{self, Column, Format};

/// Clocks that differ by more are told of, and by more than the second, certificates do not count.
const CLOCK_WARN: Duration = Duration::from_secs(10);
const CLOCK_MAX: Duration = Duration::from_secs(3600);
/// With less room under the pool a host can't work, and with less than the second it can do little.
const ROOM_LEAST: u64 = 1 << 30;
const ROOM_WARN: u64 = 20 << 30;
const MTU_LEAST: u32 = 1280;
const MTU_USUAL: u32 = 1500;
const ANSWER_MAX: Duration = Duration::from_secs(30);
const FROM_CONTROLLER: &str = "from the controller";

/// What `perigee host doctor` takes.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The directory with volume.yaml and agent.yaml
    #[arg(long, value_name = "DIR", default_value = DIR)]
    config_dir: PathBuf,
}

const FINDINGS: &[Column<Finding>] = &[
    ("check", |one| one.check.clone()),
    ("verdict", |one| output::word(&one.verdict)),
    ("found", |one| one.found.clone()),
    ("what to do", |one| one.next.clone()),
];

/// Prints what is found. Exit code 1: errors.
pub async fn run(args: DoctorArgs, context: &Context, root: &Command) -> Result<ExitCode, Problem> {
    let mut findings = Vec::new();
    let mut told = |daemon: Daemon| {
        let file = daemon.file_in(&args.config_dir);
        let told = file.exists().then(|| config::of_file(root.clone(), daemon, &file))?;
        told.inspect_err(|problem| {
            let found = format!("{}: {}", problem.what, problem.why);
            findings.push(Finding::error("settings", found, problem.next.clone()));
        })
        .ok()
    };
    let (volume, agent) = (told(Daemon::Volume), told(Daemon::Agent));
    let listening = agent.as_ref().map(|agent| addresses(agent, volume.as_ref()));
    let listening = listening.unwrap_or_default();
    let machine = Machine::of(volume.as_ref(), agent.as_ref(), listening.first());
    findings.extend(machine.examine().await);
    match agent {
        Some(agent) => findings.extend(of_host(&agent, &listening).await),
        None => findings.push(Finding::warning(
            "cluster",
            format!(
                "{} has no agent.yaml: this machine is no host, or its daemons are started with flags",
                args.config_dir.display()
            ),
            "to make it a host: perigee host token NAME at the controller, and here perigee host join",
        )),
    }
    match context.format {
        Format::Table => findings.iter().for_each(|one| output::text(&in_lines(one))),
        format => output::list(format, &findings, FINDINGS)?,
    }
    let has_errors = findings.iter().any(|one| one.verdict == Verdict::Error);
    Ok(if has_errors { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One finding: what was looked at and found, and below it what to do.
fn in_lines(finding: &Finding) -> String {
    let Finding { check, verdict, found, next } = finding;
    let verdict = output::word(verdict);
    match next.is_empty() {
        true => format!("{verdict:8} {check}: {found}"),
        false => {
            format!("{verdict:8} {check}: {found}\n         {}", next.replace('\n', "\n         "))
        }
    }
}

/// Prints a finding where results go elsewhere.
pub fn note(finding: &Finding) {
    output::note(&in_lines(finding));
}

/// What keeps a machine from being a host.
pub fn problem(findings: &[Finding]) -> Option<Problem> {
    let errors = || findings.iter().filter(|one| one.verdict == Verdict::Error);
    errors().next()?;
    let why: Vec<String> = errors().map(|one| format!("{}: {}", one.check, one.found)).collect();
    let next: Vec<&str> = errors().map(|one| one.next.as_str()).collect();
    Some(
        Problem::unsupported("this machine can't be a host yet", why.join("; "))
            .next(next.join("\n  ")),
    )
}

/// What of a machine is looked at.
pub struct Machine {
    /// The agent's directory.
    pub state: PathBuf,
    pub vm_uids: VmUids,
    pub probe_kernel: Option<PathBuf>,
    pub pool: PathBuf,
    /// The address where the daemons listen, if it is known.
    pub ip: Option<IpAddr>,
}

impl Machine {
    fn of(volume: Option<&Told>, agent: Option<&Told>, first: Option<&SocketAddr>) -> Self {
        let path = |told: Option<&Told>, id: &str| told.and_then(|told| told.value::<PathBuf>(id));
        Self {
            state: path(agent, "state").unwrap_or_else(|| STATE.into()),
            vm_uids: agent.and_then(|agent| agent.value("vm_uids")).unwrap_or_default(),
            probe_kernel: path(agent, "probe_kernel"),
            pool: path(volume, "pool").unwrap_or_else(|| "/var/lib/perigee/pool".into()),
            ip: first.map(SocketAddr::ip),
        }
    }

    /// Looks at what does not depend on other machines.
    pub async fn examine(&self) -> Vec<Finding> {
        let passable = std::fs::Permissions::from_mode(0o711);
        let scratch = tempfile::Builder::new().permissions(passable).tempdir_in("/var/tmp");
        let mut findings = match &scratch {
            Ok(scratch) => {
                let examined = Examined {
                    state: &self.state,
                    scratch: scratch.path(),
                    vm_uids: self.vm_uids,
                    probe_kernel: self.probe_kernel.as_deref(),
                };
                perigee_agent::examine(&examined).await
            }
            Err(error) => vec![Finding::error(
                "files",
                format!("/var/tmp can't be used: {error}"),
                "make it, with mode 1777",
            )],
        };
        findings.push(room(&self.pool));
        findings.extend(self.ip.and_then(mtu));
        findings
    }
}

/// The room on the disk under the pool, which may not exist yet.
fn room(pool: &Path) -> Finding {
    const ROOM: &str = "disk";
    let there = pool.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    let free = match statvfs(there) {
        Ok(disk) => disk.blocks_available().saturating_mul(disk.fragment_size()),
        Err(error) => {
            let found = format!("not known how much is free in {}: {error}", there.display());
            return Finding::warning(ROOM, found, "check the directory");
        }
    };
    let found = format!("{} free for the pool {}", output::bytes(free), pool.display());
    let next =
        "free space there, or put the pool on another disk: --pool DIR, or pool in volume.yaml";
    match free {
        free if free < ROOM_LEAST => Finding::error(ROOM, found, next),
        free if free < ROOM_WARN => Finding::warning(ROOM, found, next),
        _ => Finding::good(ROOM, found),
    }
}

/// The MTU of the interface with this address; `None` if no interface has it.
fn mtu(ip: IpAddr) -> Option<Finding> {
    const MTU: &str = "mtu";
    let has = |interface: &nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    let mut interfaces = nix::ifaddrs::getifaddrs().ok()?;
    let name = interfaces.find(|interface| has(interface) == Some(ip))?.interface_name;
    let read = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu")).ok();
    let Some(mtu) = read.and_then(|text| text.trim().parse::<u32>().ok()) else {
        return Some(Finding::warning(MTU, format!("that of {name} is not known"), ""));
    };
    let found = format!("{mtu} at {name}");
    let next = format!("raise it, if the network can: ip link set {name} mtu {MTU_USUAL}");
    Some(match mtu {
        mtu if mtu < MTU_LEAST => Finding::error(MTU, found, next),
        mtu if mtu < MTU_USUAL => Finding::warning(MTU, found, next),
        _ => Finding::good(MTU, found),
    })
}

/// Ports where somebody listens now, so that the controller can try to reach them.
pub struct Listening {
    /// They are closed with this.
    _held: Vec<TcpListener>,
    pub findings: Vec<Finding>,
}

impl Listening {
    /// Listens at each address where no daemon does. `has_daemons`: the machine is a host already, whose daemons may run.
    pub async fn at(addresses: &[SocketAddr], has_daemons: bool) -> Self {
        let (mut held, mut findings) = (Vec::new(), Vec::new());
        for address in addresses {
            match TcpListener::bind(address).await {
                Ok(listener) => held.push(listener),
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && has_daemons => {}
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                    let port = address.port();
                    findings.push(Finding::error(
                        "ports",
                        format!("another program listens at {address}"),
                        format!("stop it; this shows which one it is: ss -ltnp sport = :{port}"),
                    ));
                }
                Err(error) => findings.push(Finding::error(
                    "address",
                    format!("can't listen at {address}: {error}"),
                    "name an address of this machine: --address IP",
                )),
            }
        }
        if findings.is_empty() {
            let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            findings
                .push(Finding::good("ports", format!("free, or this host's: {}", all.join(", "))));
        }
        Self { _held: held, findings }
    }
}

/// What follows from what the controller sees.
pub fn of_seen(seen: &HostSeen) -> Vec<Finding> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let apart = now.abs_diff(Duration::from_millis(seen.now_ms));
    let found = format!("{:.1} s from the controller's", apart.as_secs_f64());
    let next = "set the clocks of both machines: timedatectl set-ntp true";
    let clock = match apart {
        apart if apart > CLOCK_MAX => Finding::error("clock", found, next),
        apart if apart > CLOCK_WARN => Finding::warning("clock", found, next),
        _ => Finding::good("clock", found),
    };
    let mut reached: Vec<Finding> = seen.unreached.iter().map(of_unreached).collect();
    if !seen.untried.is_empty() {
        let all: Vec<String> = seen.untried.iter().map(ToString::to_string).collect();
        reached.push(Finding::warning(
            FROM_CONTROLLER,
            format!(
                "it does not know these addresses as this host's, and has not tried them: {}",
                all.join(", ")
            ),
            "after the host has joined with them: perigee host doctor",
        ));
    }
    if reached.is_empty() {
        reached.push(Finding::good(FROM_CONTROLLER, "it reaches this machine"));
    }
    [vec![clock], reached].concat()
}

fn of_unreached(unreached: &Unreached) -> Finding {
    let (address, why) = (unreached.address, &unreached.why);
    Finding::error(
        FROM_CONTROLLER,
        format!("it can't connect to {address}: {why}"),
        format!(
            "open TCP port {} of this machine for the other hosts and the controller; if they reach it at another address: --address IP",
            address.port()
        ),
    )
}

/// Where the daemons of this host listen for others.
fn addresses(agent: &Told, volume: Option<&Told>) -> Vec<SocketAddr> {
    let of = |told: &Told, keys: &[&str]| -> Vec<SocketAddr> {
        let all = told.all().unwrap_or_default();
        let values = all.iter().filter(|one| keys.contains(&one.key.as_str()));
        values.flat_map(|one| &one.values).filter_map(|text| text.parse().ok()).collect()
    };
    let volume = volume.map(|volume| of(volume, &["control", "nbd"])).unwrap_or_default();
    [of(agent, &["listen"]), volume].concat()
}

/// What is found of a host that has joined.
async fn of_host(agent: &Told, listening: &[SocketAddr]) -> Vec<Finding> {
    let identity = agent.value("identity").unwrap_or_else(|| PathBuf::from(IDENTITY_DIR));
    let (Some(host), Some(url)) = (agent.value::<HostId>("host"), agent.value("controller")) else {
        let next = "name it in agent.yaml, as `controller: https://HOST:7000`";
        return vec![Finding::error("cluster", "agent.yaml names no controller", next)];
    };
    match ask(&host, url, &identity, listening).await {
        Ok((seen, of_host)) => {
            let site = agent.value::<SiteId>("site");
            [of_seen(&seen), vec![is_up(&of_host, site)]].concat()
        }
        Err(problem) => {
            vec![Finding::error(
                "controller",
                format!("{}: {}", problem.what, problem.why),
                problem.next,
            )]
        }
    }
}

async fn ask(
    host: &HostId,
    url: String,
    identity: &Path,
    listening: &[SocketAddr],
) -> Result<(HostSeen, Host), Problem> {
    let expected = Expected::Identity(PeerIdentity::Controller);
    let hint = "check that the controller runs, and that this machine reaches it";
    let client: Client =
        Network::Tls(Identity::load(identity)?).client(&url, expected, ANSWER_MAX)?.hint(hint);
    let known: Host = client.get(&format!("/v1/hosts/{host}")).await?;
    let registered = authority_of(&known.addresses.agent_url).and_then(|at| at.parse().ok());
    let check = CheckHost { reach: for_others(listening, registered) };
    Ok((client.post(&format!("/v1/hosts/{host}/check"), &check).await?, known))
}

/// Where the controller can try to reach daemons that listen at these addresses, of a host that is registered with that one.
fn for_others(listening: &[SocketAddr], registered: Option<SocketAddr>) -> Vec<SocketAddr> {
    let reached = |address: &SocketAddr| match address.ip().to_canonical() {
        ip if ip.is_loopback() => None,
        ip if ip.is_unspecified() => Some(SocketAddr::new(registered?.ip(), address.port())),
        ip => Some(SocketAddr::new(ip, address.port())),
    };
    let all: BTreeSet<SocketAddr> = listening.iter().filter_map(reached).collect();
    let most = usize::try_from(CHECKED_ADDRESSES.max).unwrap_or(usize::MAX);
    all.into_iter().take(most).collect()
}

/// Whether the controller uses this host.
fn is_up(host: &Host, site: Option<SiteId>) -> Finding {
    let next = "see what the daemons say: journalctl -u perigee-volume -u perigee-agent -n 30";
    let (id, registered) = (&host.id, &host.addresses.site);
    match host.state {
        HostState::Unreachable => Finding::error(
            "cluster",
            format!("host {id} is not up: its agent does not answer"),
            next,
        ),
        HostState::Up if !host.waits.is_empty() => Finding::error(
            "cluster",
            format!("host {id} waits for {}", in_words(&host.waits)),
            next,
        ),
        HostState::Up if site.as_ref().is_some_and(|site| site != registered) => Finding::error(
            "cluster",
            format!(
                "host {id} is at site {registered} for the controller, and elsewhere in agent.yaml"
            ),
            format!("correct agent.yaml, or at the controller: perigee host site {id} SITE"),
        ),
        HostState::Up => Finding::good("cluster", format!("host {id} is up at site {registered}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(findings: &[Finding]) -> Vec<&str> {
        let errors = findings.iter().filter(|one| one.verdict == Verdict::Error);
        errors.map(|one| one.check.as_str()).collect()
    }

    #[tokio::test]
    async fn a_port_that_another_program_has_keeps_a_machine_from_being_a_host() {
        let taken = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = [taken.local_addr().expect("its address")];
        let found = Listening::at(&address, false).await.findings;
        assert_eq!(errors(&found), ["ports"]);
        assert!(problem(&found).expect("an error").next.contains("ss -ltnp"), "{found:?}");
        assert!(errors(&Listening::at(&address, true).await.findings).is_empty());
        // TEST-NET-1 of RFC 5737.
        let foreign = ["192.0.2.1:0".parse().expect("an address")];
        assert_eq!(errors(&Listening::at(&foreign, true).await.findings), ["address"]);
    }

    #[test]
    fn what_the_controller_sees_is_an_error_only_where_certificates_or_connections_fail() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let now_ms = u64::try_from(now.as_millis()).expect("it fits");
        let seen = |behind_ms: u64, unreached: Vec<Unreached>| HostSeen {
            now_ms: now_ms - behind_ms,
            site: None,
            sites: Vec::new(),
            unreached,
            untried: Vec::new(),
        };
        assert!(problem(&of_seen(&seen(0, Vec::new()))).is_none());
        let found = of_seen(&seen(600_000, Vec::new()));
        assert_eq!((found[0].verdict, errors(&found).len()), (Verdict::Warning, 0));
        assert_eq!(errors(&of_seen(&seen(7_200_000, Vec::new()))), ["clock"]);
        let address = "10.0.0.2:7001".parse().expect("an address");
        let found = of_seen(&seen(0, vec![Unreached { address, why: "refused".to_owned() }]));
        assert!(problem(&found).expect("an error").why.contains("10.0.0.2:7001: refused"));
    }

    #[test]
    fn what_the_controller_has_not_tried_is_neither_reached_nor_an_error() {
        let untried = vec!["10.0.0.2:7001".parse().expect("an address")];
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let now_ms = u64::try_from(now.as_millis()).expect("it fits");
        let (site, sites, unreached) = (None, Vec::new(), Vec::new());
        let found = of_seen(&HostSeen { now_ms, site, sites, unreached, untried });
        assert_eq!((found[1].verdict, errors(&found).len()), (Verdict::Warning, 0), "{found:?}");
    }

    #[test]
    fn the_controller_is_asked_for_addresses_that_other_machines_can_reach() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let listening = ["0.0.0.0:7001", "127.0.0.1:7003", "[::]:7001", "10.0.0.2:7002"].map(at);
        let asked = for_others(&listening, Some(at("10.0.0.2:1")));
        assert_eq!(asked, ["10.0.0.2:7001", "10.0.0.2:7002"].map(at));
        assert_eq!(for_others(&listening, None), [at("10.0.0.2:7002")]);
        let many: Vec<SocketAddr> = (1..20).map(|port| ([10, 0, 0, 2], port).into()).collect();
        CHECKED_ADDRESSES.check(for_others(&many, None).len()).expect("the controller takes them");
    }

    #[test]
    fn the_room_under_a_pool_that_is_not_there_yet_is_that_of_the_disk_above_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let found = room(&dir.path().join("below/pool"));
        assert!(found.found.contains("free for the pool"), "{found:?}");
    }
}
