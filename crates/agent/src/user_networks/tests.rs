use std::os::fd::AsRawFd as _;

use nix::sched::CloneFlags;
use nix::unistd::Uid;
use perigee_model::guest::USER_NETWORK;
use perigee_model::network::Protocol;
use tokio::time::timeout;

use super::*;
use crate::files::listen;
use crate::networks::watch::Watch;
use crate::process::{Process, QemuUser};

#[test]
fn guests_reach_the_resolvers_of_their_host() {
    let text = "# nameserver 127.0.0.1\nnameserver 127.0.0.53\nnameserver 10.1.1.1\n\
                options edns0\nnameserver ::1\nnameserver\n";
    assert_eq!(resolvers_in(text), [Ipv4Addr::new(127, 0, 0, 53), Ipv4Addr::new(10, 1, 1, 1)]);
}

#[test]
fn what_guests_may_reach_is_a_network_or_an_address() {
    let reach = |text: &str| text.parse::<GuestsReach>();
    let network = GuestsReach { address: Ipv4Addr::new(10, 1, 0, 0), prefix_bits: 16 };
    assert_eq!(reach("10.1.0.0/16"), Ok(network));
    assert_eq!(reach("10.1.0.7").map(|reach| reach.prefix_bits), Ok(32));
    assert!(reach("0.0.0.0/0").is_ok());
    for wrong in ["10.1.0.7/16", "10.1.0.0/33", "web", "::1", ""] {
        assert!(reach(wrong).is_err(), "{wrong}");
    }
}

/// Whether a process of this group connects to an address.
fn connects(group: u32, address: &str, port: u16) -> bool {
    use std::os::unix::process::CommandExt as _;
    let script = format!("exec 3<>/dev/tcp/{address}/{port}");
    let mut bash = std::process::Command::new("bash");
    bash.args(["-c", &script]).gid(group).stderr(std::process::Stdio::null());
    bash.status().expect("bash runs").success()
}

fn shell(line: &str) {
    let ended = std::process::Command::new("sh").args(["-c", line]).status();
    assert!(ended.expect("sh runs").success(), "{line}");
}

const GROUP: u32 = 1_900_065_535;

fn own_namespace() -> File {
    File::open("/proc/thread-self/ns/net").expect("a namespace")
}

fn enter(namespace: &File) {
    nix::sched::setns(namespace, CloneFlags::CLONE_NEWNET).expect("it is there");
}

/// The real kernel, in network namespaces of its own: one in which everything else is, at these addresses, and that of the host
/// (10.8.0.1), in which this thread is afterwards.
fn world(addresses: &[&str]) -> (File, File) {
    nix::sched::unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
    let outside = own_namespace();
    shell("ip link set lo up");
    for address in addresses {
        shell(&format!("ip address add {address}/32 dev lo"));
    }
    nix::sched::unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
    let host = own_namespace();
    let at = format!("/proc/{}/fd/{}", std::process::id(), outside.as_raw_fd());
    shell(
        "ip link set lo up; ip address add 10.8.8.8/32 dev lo; ip address add 198.51.100.2/24 dev lo",
    );
    shell(&format!("ip link add eth0 type veth peer name eth0 netns {at}"));
    shell(
        "ip address add 10.8.0.1/24 dev eth0; ip link set eth0 up; ip route add default via 10.8.0.2",
    );
    enter(&outside);
    shell(
        "ip address add 10.8.0.2/24 dev eth0; ip link set eth0 up; ip route add default via 10.8.0.1",
    );
    enter(&host);
    (outside, host)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// In a thread of its own, because it goes from one namespace to another.
fn as_root(test: fn()) {
    if nix::unistd::Uid::effective().is_root() {
        std::thread::spawn(test).join().expect("no panic");
    }
}

#[test]
fn guests_reach_neither_hosts_nor_private_addresses_unless_the_operator_allows_them() {
    as_root(|| {
        let all =
            ["10.9.9.9", "10.1.2.3", "192.0.2.9", "192.0.2.10", "203.0.113.5", "169.254.169.254"];
        let (outside, host) = world(&all);
        enter(&outside);
        let there = std::net::TcpListener::bind("0.0.0.0:0").expect("a port");
        let port = there.local_addr().expect("an address").port();
        enter(&host);
        let here = std::net::TcpListener::bind(("0.0.0.0", port)).expect("the same port");
        let (runtime, state) = (runtime(), tempfile::tempdir().expect("a directory"));
        let reach =
            ["10.1.0.0/16", "192.0.2.10", "10.8.0.0/24"].map(|text| text.parse().expect("one"));
        let networks = UserNetworks::new(
            Some(Gid::from_raw(GROUP)),
            VmUids::default(),
            reach.into(),
            state.path(),
        );
        let hosts =
            ["192.0.2.9", "192.0.2.10", "fd00::1"].map(|ip| ip.parse().expect("an address"));
        runtime.block_on(networks.filter(None)).expect("the kernel takes it");
        for address in ["192.0.2.9", "10.1.2.3"] {
            assert!(!connects(GROUP, address, port), "{address} could be a host");
        }
        assert!(connects(GROUP, "192.0.2.10", port), "the operator allows just this one");
        runtime.block_on(networks.filter(Some(&hosts))).expect("the kernel takes it");
        let refused = [
            "127.0.0.1",
            "10.8.8.8",
            "10.8.0.1",
            "198.51.100.2",
            "169.254.169.254",
            "10.9.9.9",
            "192.0.2.9",
        ];
        for address in refused {
            assert!(!connects(GROUP, address, port), "a guest reaches {address}");
            assert!(connects(0, address, port), "others reach {address}");
        }
        for address in ["203.0.113.5", "10.1.2.3", "192.0.2.10"] {
            assert!(connects(GROUP, address, port), "a guest reaches {address}");
        }
        // This host connects to a guest, and gets answers.
        let root = nix::unistd::setfsgid(Gid::from_raw(GROUP));
        let guest = std::net::TcpListener::bind("127.63.179.7:0").expect("a port");
        nix::unistd::setfsgid(root);
        assert!(connects(0, "127.63.179.7", guest.local_addr().expect("an address").port()));
        runtime.block_on(async {
            networks.look_at_filter(Some(&hosts)).await;
            assert_eq!(networks.warning(), None);
            for flush in [
                "flush ruleset",
                "flush table inet perigee_guests_1900065535",
                "delete table inet perigee_guests_1900065535",
            ] {
                shell(&format!("nft {flush}"));
                assert!(connects(GROUP, "10.9.9.9", port), "{flush}: the filter is gone");
                networks.look_at_filter(Some(&hosts)).await;
                assert!(!connects(GROUP, "10.9.9.9", port), "{flush}: it is back");
                let said = networks.warning().expect("it is said");
                assert!(said.contains("has set it up again"), "{said}");
            }
        });
        // Many connections at once, also if the rules are loaded again.
        let open = |from: u32| {
            let script = format!(
                "for n in $(seq 60); do exec {{fd}}<>/dev/tcp/203.0.113.5/{port} && echo $n; done; exit 0"
            );
            let mut bash = std::process::Command::new("bash");
            use std::os::unix::process::CommandExt as _;
            bash.args(["-c", &script]).gid(GROUP).uid(from).stderr(std::process::Stdio::null());
            String::from_utf8_lossy(&bash.output().expect("bash runs").stdout).lines().count()
        };
        assert!(
            (40..=51).contains(&open(1_900_000_001)),
            "a guest has no more connections than it may"
        );
        assert!((40..=51).contains(&open(1_900_000_002)), "and others have theirs");
        drop((there, here));
    });
}

#[test]
fn a_host_is_reached_through_no_larger_network() {
    let reach = ["0.0.0.0/0", "192.0.2.10"].map(|text| text.parse().expect("one"));
    let host = "192.0.2.9".parse().expect("an address");
    let text = rules(Gid::from_raw(7), &[], &reach, Some(&[host]));
    let at = |part: &str| text.find(part).expect(part);
    assert!(at("224.0.0.0/3 } goto refuse") < at("{ 192.0.2.10 } accept"), "{text}");
    assert!(at("{ 192.0.2.10 } accept") < at("fib daddr type local goto refuse"), "{text}");
    assert!(at("{ 192.0.2.9 } goto refuse") < at("0.0.0.0/0 accept"), "{text}");
    assert!(at("0.0.0.0/0 accept") < at("192.168.0.0/16, "), "{text}");
}

/// A guest behind a real `passt`: this test reads and writes the frames of its card.
struct Guest {
    card: std::os::unix::net::UnixStream,
    passt: Process,
    _dir: tempfile::TempDir,
}

const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const GATEWAY: [u8; 6] = [0x52, 0x55, 0x0a, 0, 2, 2];

impl Drop for Guest {
    fn drop(&mut self) {
        let pid = i32::try_from(self.passt.pid).expect("a pid");
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL);
    }
}

impl Guest {
    fn start(runtime: &tokio::runtime::Runtime, networks: &UserNetworks, uid: u32) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        nix::unistd::chown(dir.path(), Some(Uid::from_raw(uid)), None).expect("root may");
        let user = QemuUser { uid: Uid::from_raw(uid), gid: Gid::from_raw(GROUP) };
        let [at, ready, log] = ["card", "pid", "log"].map(|name| dir.path().join(name));
        let waits = listen(&at).expect("a socket");
        let begun = networks.begin((&at, &ready, &log), "10.8.0.1", Some(user), None);
        let passt = runtime.block_on(begun).expect("passt starts");
        let (card, _) = waits.accept().expect("its end");
        card.set_read_timeout(Some(Duration::from_millis(50))).expect("a deadline");
        Self { card, passt, _dir: dir }
    }

    fn send(&mut self, frame: &[u8]) {
        use std::io::Write as _;
        let length = u32::try_from(frame.len()).expect("a short one").to_be_bytes();
        self.card.write_all(&[&length, frame].concat()).expect("passt is there");
    }

    fn send_udp(&mut self, port: u16, to: std::net::SocketAddrV4, payload: &[u8]) {
        let length = |bytes: usize| u16::try_from(bytes).expect("a short one").to_be_bytes();
        let mut ip =
            [&[0x45, 0][..], &length(28 + payload.len()), &[0, 0, 0, 0, 64, 17, 0, 0]].concat();
        ip.extend(USER_NETWORK.address.octets());
        ip.extend(to.ip().octets());
        let sum: u32 = ip.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum();
        let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("a short header");
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let ports =
            [port.to_be_bytes(), to.port().to_be_bytes(), length(8 + payload.len()), [0, 0]];
        self.send(&[&GATEWAY[..], &GUEST_MAC, &[8, 0], &ip, &ports.concat(), payload].concat());
    }

    /// The next datagram that comes to it: its port here, and what it says. Who asks for its hardware address is answered.
    fn received(&mut self) -> (u16, Vec<u8>) {
        use std::io::Read as _;
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let mut card = &self.card;
        let mut exact = |count: usize| {
            let mut bytes = vec![0; count];
            let mut at = 0;
            while at < count {
                assert!(
                    std::time::Instant::now() < deadline,
                    "nothing has come to the guest for 60 s"
                );
                match card.read(&mut bytes[at..]) {
                    Ok(0) => panic!("passt has ended"),
                    Ok(more) => at += more,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(error) => panic!("{error}"),
                }
            }
            bytes
        };
        let frame = loop {
            let length = u32::from_be_bytes(exact(4).try_into().expect("four"));
            let frame = exact(length as usize);
            if frame[12..14] == [8, 6] && frame[21] == 1 {
                let answer = [
                    &frame[6..12],
                    &GUEST_MAC,
                    &frame[12..20],
                    &[0, 2],
                    &GUEST_MAC,
                    &frame[38..42],
                    &frame[22..32],
                ];
                let answer = answer.concat();
                let length = u32::try_from(answer.len()).expect("a short one").to_be_bytes();
                use std::io::Write as _;
                (&self.card).write_all(&[&length[..], &answer].concat()).expect("passt is there");
            } else if frame[12..14] == [8, 0] && frame[23] == 17 {
                break frame;
            }
        };
        (u16::from_be_bytes([frame[36], frame[37]]), frame[42..].to_vec())
    }
}

fn comes_to(socket: &std::net::UdpSocket) -> (Vec<u8>, std::net::SocketAddr) {
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a deadline");
    let mut bytes = [0; 2000];
    let (count, from) = socket.recv_from(&mut bytes).expect("a datagram within 60 s");
    (bytes[..count].to_vec(), from)
}

/// `passt` binds a port with the guest's own number at all addresses, and shares it: so strangers reached the guest, it had the
/// ports of daemons, and one guest the answers to another one.
#[test]
fn what_a_guest_sends_from_is_no_port_of_its_host_and_only_answers_come_to_it() {
    as_root(|| {
        let (outside, host) = world(&["203.0.113.5", "203.0.113.9"]);
        enter(&outside);
        let peer = std::net::UdpSocket::bind("203.0.113.5:4000").expect("a port");
        let stranger = std::net::UdpSocket::bind("203.0.113.9:4000").expect("a port");
        let other_port = std::net::UdpSocket::bind("203.0.113.5:4001").expect("a port");
        let to = "203.0.113.5:4000".parse().expect("an address");
        enter(&host);
        let (runtime, state) = (runtime(), tempfile::tempdir().expect("a directory"));
        let networks =
            UserNetworks::prepare(true, VmUids::default(), Vec::new(), state.path(), Some(&[]));
        let networks = runtime.block_on(networks);
        assert_eq!(networks.cannot(), None);
        // Another agent here would load its own filter for the same guests.
        let second = UserNetworks::prepare(true, VmUids::default(), Vec::new(), state.path(), None);
        let why = runtime.block_on(second).cannot().expect("it has no cards");
        assert!(why.contains("--vm-uids"), "{why}");
        let mut one = Guest::start(&runtime, &networks, 1_900_000_001);
        let mut two = Guest::start(&runtime, &networks, 1_900_000_002);
        let mut at = Vec::new();
        // The second one has a port of a daemon, too, which starts later, and one that only root has.
        for (number, port) in [(1, 28_000), (2, 28_000), (2, 51_871), (2, 123)] {
            let guest = if number == 1 { &mut one } else { &mut two };
            guest.send_udp(port, to, b"asked");
            let (said, from) = comes_to(&peer);
            assert_eq!((&said[..], from.ip().to_string()), (&b"asked"[..], "10.8.0.1".to_owned()));
            assert_ne!(from.port(), 51_871, "the port of the tunnels");
            at.push(from);
        }
        let ports: BTreeSet<u16> = at.iter().map(std::net::SocketAddr::port).collect();
        assert_eq!(ports.len(), 4, "nobody shares a port: {ports:?}");
        for port in [28_000, 51_871] {
            std::net::UdpSocket::bind(("0.0.0.0", port)).expect("a daemon has it");
        }
        let taken = doors::taken(VmUids::default()).expect("they are known");
        let udp = taken.iter().filter(|(protocol, _)| *protocol == Protocol::Udp);
        assert_eq!(udp.count(), 0, "no published port is withdrawn for them");
        let asks = |guest: &mut Guest, from, why: &str| {
            let here = std::net::UdpSocket::bind("10.8.8.8:0").expect("a port");
            for other in [&stranger, &other_port, &here] {
                other.send_to(b"from a stranger", from).expect("it is sent");
            }
            peer.send_to(b"answer", from).expect("it is sent");
            assert_eq!(guest.received().1, b"answer", "{why}");
        };
        asks(&mut one, at[0], "only who was asked answers");
        for (from, port) in at[1..].iter().zip([28_000, 51_871, 123]) {
            peer.send_to(b"answer", from).expect("it is sent");
            assert_eq!(two.received(), (port, b"answer".to_vec()));
        }
        let watch = runtime.block_on(async { Watch::new() }).expect("the kernel tells");
        shell("nft flush ruleset");
        let heard = async { timeout(Duration::from_secs(60), watch.removed()).await };
        runtime.block_on(heard).expect("it is heard").expect("the kernel tells");
        runtime.block_on(networks.look_at_filter(Some(&[])));
        assert!(networks.warning().is_some_and(|said| said.contains("has set it up again")));
        // The kernel knows what it has seen since: the guest asks again, from another port.
        asks(&mut two, at[1], "after somebody has flushed the rules");
        drop((one, two));
    });
}

#[test]
fn a_resolver_that_guests_know_is_reached_until_they_have_ended() {
    let state = tempfile::tempdir().expect("a directory");
    let new = || UserNetworks::new(None, VmUids::default(), Vec::new(), state.path());
    let [old, now] = [Ipv4Addr::new(10, 1, 1, 1), Ipv4Addr::new(10, 2, 2, 2)];
    let networks = new();
    networks.remember_resolvers(vec![old], true);
    assert_eq!(networks.resolvers(vec![now]), [old, now]);
    // Also after a restart of the agent.
    let networks = new();
    assert_eq!(networks.resolvers(vec![now]), [old, now]);
    networks.remember_resolvers(vec![now], false);
    assert_eq!(new().resolvers(vec![now]), [now]);
}
