//! dnsmasq: its configuration, and its start and end.
//!
//! dnsmasq runs in the foreground and is ended by its process id. If the boot server is killed, dnsmasq
//! keeps running. The next start finds it by its pid file, checks its configuration file, and ends it.

use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use perigee_model::Problem;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};

use crate::cards::Cards;
use crate::config::{Config, Dhcp, Interface};
use crate::script::Places;

/// It answers DHCP and TFTP. It is found by PATH.
pub const PROGRAM: &str = "dnsmasq";
/// The file name in the directory [`Config::ipxe`].
pub const BIOS_IPXE: &str = "undionly.kpxe";
/// The iPXE for UEFI firmware that uses the firmware's own driver of the card.
pub const EFI_IPXE: &str = "snponly.efi";
/// The file with the leases, in the boot server's directory.
const LEASES: &str = "leases";
/// How long dnsmasq may take to end after it was asked to.
const END_MAX: Duration = Duration::from_secs(5);
/// The number of log lines that are kept for a problem.
const LOG_LINES_KEPT: usize = 5;

/// The configuration. iPXE, which alone sends DHCP option 175, gets the script. Other firmware gets iPXE over
/// TFTP. Only machines with these cards get an address.
pub fn configuration(
    config: &Config,
    interface: &Interface,
    places: &Places,
    cards: &Cards,
) -> String {
    let state = config.state.display();
    let first = places.url("/boot.ipxe");
    let mut lines = vec![
        "# Written by `perigee boot serve` at each start; changes to it are lost.".to_owned(),
        "port=0".to_owned(),
        format!("interface={}", interface.name),
        "except-interface=lo".to_owned(),
        "bind-interfaces".to_owned(),
        format!("pid-file={state}/dnsmasq.pid"),
        "enable-tftp".to_owned(),
        format!("tftp-root={}", config.ipxe.display()),
        "dhcp-match=set:ipxe,175".to_owned(),
        "dhcp-match=set:efi,option:client-arch,7".to_owned(),
        "dhcp-match=set:efi,option:client-arch,9".to_owned(),
    ];
    match config.dhcp {
        Dhcp::Serve { first: from, last } => {
            lines.extend(cards.iter().map(|card| format!("dhcp-host={card},set:client")));
            lines.extend([
                "dhcp-ignore=tag:!client".to_owned(),
                // A machine has one lease, whatever its firmware and its system call themselves.
                "dhcp-ignore-clid".to_owned(),
                // Leases never end, because a machine that loses its address also loses its root disk.
                format!("dhcp-range={from},{last},{},infinite", interface.netmask),
                format!("dhcp-leasefile={state}/{LEASES}"),
                // With pings dnsmasq would test each address for 3 s, one machine after the other. If eight
                // machines start together, some of them would give up in the meantime.
                "no-ping".to_owned(),
                // This machine is not a router.
                "dhcp-option=option:router".to_owned(),
                "dhcp-authoritative".to_owned(),
                format!("dhcp-boot=tag:ipxe,{first}"),
                format!("dhcp-boot=tag:!ipxe,tag:efi,{EFI_IPXE}"),
                format!("dhcp-boot=tag:!ipxe,tag:!efi,{BIOS_IPXE}"),
            ]);
        }
        Dhcp::Proxy => lines.extend([
            format!("dhcp-range={},proxy,{}", interface.network(), interface.netmask),
            format!("pxe-service=tag:ipxe,x86PC,Perigee,{first}"),
            format!("pxe-service=tag:ipxe,x86-64_EFI,Perigee,{first}"),
            format!("pxe-service=tag:ipxe,BC_EFI,Perigee,{first}"),
            format!("pxe-service=tag:!ipxe,x86PC,Perigee,{BIOS_IPXE}"),
            format!("pxe-service=tag:!ipxe,x86-64_EFI,Perigee,{EFI_IPXE}"),
            format!("pxe-service=tag:!ipxe,BC_EFI,Perigee,{EFI_IPXE}"),
        ]),
    }
    lines.join("\n") + "\n"
}

/// A running dnsmasq.
pub struct Dnsmasq {
    child: Child,
    log: tokio::task::JoinHandle<Vec<String>>,
}

impl Dnsmasq {
    /// # Errors
    /// Unavailable when it is not installed; internal when its configuration can't be written.
    pub async fn start(config: &Config, text: &str) -> Result<Self, Problem> {
        let path = configuration_file(config);
        let what = format!("write {}", path.display());
        std::fs::create_dir_all(&config.state)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|error| Problem::internal(what, error))?;
        let mut child = Command::new(PROGRAM)
            .args(["--keep-in-foreground", "--log-facility=-", "--no-hosts", "--no-resolv"])
            .arg(conf_argument(&path))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| cannot_start(&error))?;
        let stderr = child.stderr.take().ok_or_else(|| {
            Problem::internal("can't read dnsmasq's log", "its standard error is not connected")
        })?;
        Ok(Self { child, log: tokio::spawn(tell(stderr)) })
    }

    /// Returns when dnsmasq ends by itself, with the end of its log.
    pub async fn ended(&mut self) -> Problem {
        let status = self.child.wait().await;
        let last = (&mut self.log).await.unwrap_or_default().join("; ");
        let why = match status {
            Ok(status) => format!("it ended ({status}): {last}"),
            Err(error) => error.to_string(),
        };
        Problem::unavailable("can't serve DHCP and TFTP with dnsmasq", why)
            .next("`perigee boot check` finds the cause")
    }

    /// Ends dnsmasq.
    pub async fn stop(mut self) {
        if let Some(id) = self.child.id().and_then(|id| i32::try_from(id).ok())
            && kill(Pid::from_raw(id), Signal::SIGTERM).is_ok()
            && tokio::time::timeout(END_MAX, self.child.wait()).await.is_ok()
        {
            return;
        }
        if let Err(error) = self.child.kill().await {
            tracing::error!(%error, "can't end dnsmasq");
        }
    }
}

fn conf_argument(path: &Path) -> String {
    format!("--conf-file={}", path.display())
}

/// `Unavailable`, with the package to install.
pub fn cannot_start(error: &std::io::Error) -> Problem {
    Problem::unavailable(format!("can't start {PROGRAM}"), error)
        .next("install it: apt-get install dnsmasq-base")
}

/// Copies dnsmasq's log to ours, and keeps the last lines.
async fn tell(stderr: ChildStderr) -> Vec<String> {
    let mut lines = BufReader::new(stderr).lines();
    let mut last = Vec::new();
    while let Ok(Some(line)) = lines.next_line().await {
        // `dnsmasq-dhcp[123]: text`
        let text = line.split_once("]: ").map_or(line.as_str(), |(_, text)| text).to_owned();
        tracing::info!(target: "dnsmasq", "{text}");
        if last.len() == LOG_LINES_KEPT {
            last.remove(0);
        }
        last.push(text);
    }
    last
}

fn configuration_file(config: &Config) -> PathBuf {
    config.state.join("dnsmasq.conf")
}

/// Ends the leases of cards that are no client's any more, so that others can have their addresses: a lease never ends by
/// itself. No dnsmasq runs meanwhile.
///
/// # Errors
/// Internal when the file can't be written.
pub fn end_leases(state: &Path, clients: &Cards) -> Result<(), Problem> {
    let path = state.join(LEASES);
    let replace = || -> io::Result<()> {
        let all = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            all => all?,
        };
        let left = leases_of(&all, clients);
        if left == all {
            return Ok(());
        }
        let (new, owner) = (path.with_extension("new"), std::fs::metadata(&path)?);
        // Whoever may write there could have put a link in its place, and the file changes its owner below.
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = std::fs::File::create_new(&new)?;
        file.write_all(left.as_bytes())?;
        file.set_permissions(owner.permissions())?;
        std::os::unix::fs::fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
        file.sync_all()?;
        std::fs::rename(&new, &path)
    };
    replace().map_err(|error| {
        Problem::internal(format!("can't end leases in {}", path.display()), error)
    })
}

/// The lines that are no lease of another card: `EXPIRY CARD ADDRESS NAME CLIENT`.
fn leases_of(all: &str, clients: &Cards) -> String {
    let stays = |line: &&str| {
        let card = line.split(' ').nth(1).and_then(|card| card.parse().ok());
        card.is_none_or(|card| clients.contains(&card))
    };
    all.split_inclusive('\n').filter(stays).collect()
}

/// Ends a dnsmasq that a killed boot server has left. It is recognised by its configuration file.
pub async fn end_left_over(config: &Config) {
    let (pid_file, conf) = (&config.state.join("dnsmasq.pid"), &configuration_file(config));
    let Some(id) = left_over(pid_file, conf) else { return };
    tracing::info!(id, "ending the dnsmasq of an earlier boot server");
    let pid = Pid::from_raw(id);
    if kill(pid, Signal::SIGTERM).is_err() {
        return;
    }
    let ended = async {
        while left_over(pid_file, conf) == Some(id) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(END_MAX, ended).await.is_err()
        && let Err(error) = kill(pid, Signal::SIGKILL)
    {
        tracing::warn!(id, %error, "can't end the dnsmasq of an earlier boot server");
    }
}

fn left_over(pid_file: &Path, conf: &Path) -> Option<i32> {
    let id: i32 = std::fs::read_to_string(pid_file).ok()?.trim().parse().ok()?;
    let arguments = std::fs::read(PathBuf::from(format!("/proc/{id}/cmdline"))).ok()?;
    let wanted = conf_argument(conf);
    arguments.split(|byte| *byte == 0).any(|arg| arg == wanted.as_bytes()).then_some(id)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn config(dhcp: Dhcp) -> Config {
        Config {
            control: "unix:/none".into(),
            interface: "eth0".into(),
            address: None,
            dhcp,
            http_port: 7003,
            iscsi_port: 3260,
            nbd_port: 10809,
            kernel: None,
            initrd: None,
            append: String::new(),
            state: "/srv/pool/boot".into(),
            ipxe: "/usr/lib/ipxe".into(),
        }
    }

    fn text(dhcp: Dhcp) -> String {
        let address = Ipv4Addr::new(10, 1, 2, 1);
        let netmask = Ipv4Addr::new(255, 255, 255, 0);
        let interface = Interface { name: "eth0".into(), address, netmask, is_up: true };
        let places = Places {
            address,
            http_port: 7003,
            iscsi_port: 3260,
            nbd_port: 10809,
            append: String::new(),
        };
        let cards = ["52:54:00:77:00:01".parse().expect("a card")].into();
        configuration(&config(dhcp), &interface, &places, &cards)
    }

    #[test]
    fn ipxe_gets_the_script_and_other_firmware_gets_ipxe() {
        let range =
            Dhcp::Serve { first: Ipv4Addr::new(10, 1, 2, 100), last: Ipv4Addr::new(10, 1, 2, 200) };
        let text = text(range);
        for line in [
            "dhcp-range=10.1.2.100,10.1.2.200,255.255.255.0,infinite",
            "dhcp-boot=tag:ipxe,http://10.1.2.1:7003/boot.ipxe",
            "dhcp-boot=tag:!ipxe,tag:!efi,undionly.kpxe",
            "interface=eth0",
            "port=0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in {text}");
        }
    }

    #[test]
    fn a_proxy_gives_out_no_addresses() {
        let text = text(Dhcp::Proxy);
        assert!(text.contains("dhcp-range=10.1.2.0,proxy,255.255.255.0\n"), "{text}");
        assert!(!text.contains("leasefile") && !text.contains("authoritative"), "{text}");
    }

    #[test]
    fn nobody_takes_more_addresses_than_there_are_clients() {
        let range =
            Dhcp::Serve { first: Ipv4Addr::new(10, 1, 2, 100), last: Ipv4Addr::new(10, 1, 2, 200) };
        let text = text(range);
        let hosts: Vec<_> = text.lines().filter(|l| l.starts_with("dhcp-host=")).collect();
        assert_eq!(hosts, ["dhcp-host=52:54:00:77:00:01,set:client"]);
        for line in ["dhcp-ignore=tag:!client", "dhcp-ignore-clid"] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in {text}");
        }
    }

    #[test]
    fn the_leases_of_those_who_are_clients_stay_and_no_others() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(LEASES);
        let clients = ["52:54:00:77:00:01".parse().expect("a card")].into();
        end_leases(dir.path(), &clients).expect("there are none yet");
        let own = "0 52:54:00:77:00:01 10.1.2.100 * *\n";
        let all = format!("{own}0 52:54:00:77:00:02 10.1.2.101 web *\nduid 00:01\n");
        std::fs::write(&path, &all).expect("a file");
        end_leases(dir.path(), &clients).expect("it is written");
        let left = std::fs::read_to_string(&path).expect("a file");
        assert_eq!(left, format!("{own}duid 00:01\n"));
        end_leases(dir.path(), &Cards::new()).expect("it is written");
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "duid 00:01\n");
    }

    #[test]
    fn leases_are_written_to_no_file_that_a_link_names() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, other) = (dir.path().join(LEASES), dir.path().join("other"));
        std::fs::write(&path, "0 52:54:00:77:00:02 10.1.2.101 web *\n").expect("a file");
        std::fs::write(&other, "other").expect("a file");
        std::os::unix::fs::symlink(&other, path.with_extension("new")).expect("a link");
        end_leases(dir.path(), &Cards::new()).expect("it is written");
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "");
        assert_eq!(std::fs::read_to_string(&other).expect("a file"), "other");
    }

    #[test]
    fn another_process_of_that_id_is_no_left_over() {
        let dir = tempfile::tempdir().expect("a directory");
        let pid_file = dir.path().join("dnsmasq.pid");
        std::fs::write(&pid_file, format!("{}\n", std::process::id())).expect("a file");
        assert_eq!(left_over(&pid_file, Path::new("/srv/pool/boot/dnsmasq.conf")), None);
    }
}
