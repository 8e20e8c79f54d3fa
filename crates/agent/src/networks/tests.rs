//! Two hosts with a cable between them, each a network namespace with the real kernel, WireGuard, VXLAN and dnsmasq. The
//! guests are this test: it reads and writes the frames of their cards.

mod alone;
mod ports;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use perigee_model::network::{
    HostNetwork, Mac, Member, Protocol, Publish, Published, Subnet, TUNNEL_NETWORK, TunnelPeer, mac,
};
use perigee_model::{NetworkName, ProblemKind};
use tokio::runtime::Runtime;

use self::alone::{alone, in_a_thread};
use self::ports::{
    a_port_fills_nothing, a_port_leads, a_port_leads_to, connections, dials,
    what_has_begun_follows_its_port,
};
use super::*;

const MARKER: &[u8] = b"plain-marker-4711";
/// Before a frame on a card: QEMU's virtio-net header.
const HEADER_BYTES: usize = 10;
const TRIES: u32 = 100;

/// A network namespace, for as long as the file is open.
fn namespace() -> File {
    let open = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
        File::open("/proc/thread-self/ns/net").expect("its file")
    };
    std::thread::spawn(open).join().expect("no panic")
}

fn enter(namespace: &File) {
    setns(namespace, CloneFlags::CLONE_NEWNET).expect("the namespace");
}

struct Host {
    namespace: File,
    number: u8,
    state: tempfile::TempDir,
    networks: Networks,
}

/// Ends what the host's processes are, whatever becomes of the test.
impl Drop for Host {
    fn drop(&mut self) {
        for pid in self.processes("") {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

impl Host {
    fn start(runtime: &Runtime, namespace: File, number: u8) -> Option<Self> {
        enter(&namespace);
        let state = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(state.path(), std::fs::Permissions::from_mode(0o711))
            .expect("passable");
        let id = host_id(number);
        let ip = format!("10.99.0.{number}");
        let networks = runtime.block_on(Networks::prepare(state.path(), &id, &ip, true));
        if let Some(why) = networks.trouble() {
            eprintln!("not tried: {why}");
            return None;
        }
        Some(Self { namespace, number, state, networks })
    }

    /// Its processes with this word in their command lines.
    fn processes(&self, word: &str) -> Vec<i32> {
        let own = [self.networks.tag.tunnel(), self.state.path().display().to_string()];
        let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
        let numbers = entries.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
        let is_own = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            own.iter().any(|own| line.contains(own)) && line.contains(word)
        };
        numbers.filter(is_own).filter(|pid| *pid != std::process::id().cast_signed()).collect()
    }

    fn kill(&self, word: &str) {
        let found = self.processes(word);
        assert!(!found.is_empty(), "{word} runs");
        for pid in found {
            kill(Pid::from_raw(pid), Signal::SIGKILL).expect("a process of ours");
        }
    }

    /// What the agent does every few seconds.
    fn pass(&self, runtime: &Runtime) {
        enter(&self.namespace);
        // A process that was killed has no interface a moment later.
        for _ in 0..TRIES {
            let cards = Cards::Those;
            match runtime.block_on(self.networks.pass(cards)) {
                Ok(()) => return,
                Err(why) => eprintln!("host{}: {why}", self.number),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("host{}: {:?}", self.number, self.networks.warnings());
    }

    fn connect(&self, runtime: &Runtime, vm: &str, card: Card) -> Guest {
        enter(&self.namespace);
        let made = runtime.block_on(self.networks.connect(&vm_id(vm), &card));
        Guest { card, tap: File::from(made.expect("a card")) }
    }

    fn has(&self, said: &str) -> bool {
        self.networks.warnings().iter().any(|warning| warning.contains(said))
    }

    fn run(&self, line: &str) {
        enter(&self.namespace);
        let mut words = line.split(' ');
        let mut command = std::process::Command::new(words.next().expect("a program"));
        assert!(command.args(words).status().expect("it runs").success(), "{line}");
    }
}

fn host_id(number: u8) -> HostId {
    HostId::new(format!("host{number}")).expect("a name")
}

fn vm_id(name: &str) -> VmId {
    VmId::new(name).expect("a name")
}

fn subnet() -> Subnet {
    "10.7.0.0/24".parse().expect("addresses")
}

fn card(vni: u16, number: u16) -> Card {
    let network = NetworkName::new(format!("net{vni}")).expect("a name");
    let address = subnet().address(number);
    Card { network, vni, subnet: subnet(), address, mtu: 1370 }
}

/// A card whose frames this test reads and writes.
struct Guest {
    card: Card,
    tap: File,
}

fn checksum(header: &[u8]) -> [u8; 2] {
    let words = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).expect("16 bits")).to_be_bytes()
}

/// A UDP packet without the UDP checksum.
fn udp(from: (Mac, Ipv4Addr, u16), to: (Mac, Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    let length = |bytes: usize| u16::try_from(bytes).expect("a short one").to_be_bytes();
    let mut ip = vec![0x45, 0];
    ip.extend(length(28 + payload.len()));
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    ip.extend(from.1.octets());
    ip.extend(to.1.octets());
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    let mut frame = [to.0.0, from.0.0].concat();
    frame.extend([8, 0]);
    frame.extend(ip);
    frame.extend(from.2.to_be_bytes());
    frame.extend(to.2.to_be_bytes());
    frame.extend(length(8 + payload.len()));
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}

impl Guest {
    fn send(&mut self, frame: &[u8]) {
        let text = [&[0; HEADER_BYTES], frame].concat();
        self.tap.write_all(&text).expect("the card is there");
    }

    /// What has come to it. Who asks for its hardware address is answered.
    fn received(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; 65_536];
        loop {
            match self.tap.read(&mut buffer) {
                Ok(bytes) => frames.push(buffer[HEADER_BYTES..bytes].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        let own = self.card.address.octets();
        for asked in &frames {
            if asked.len() >= 42
                && asked[12..14] == [8, 6]
                && asked[21] == 1
                && asked[38..42] == own
            {
                let mac = self.card.mac().0;
                let mut answer = [&asked[6..12], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2]].concat();
                answer.extend([&mac[..], &own, &asked[22..32]].concat());
                self.send(&answer);
            }
        }
        frames
    }

    fn at(&self, port: u16) -> (Mac, Ipv4Addr, u16) {
        (self.card.mac(), self.card.address, port)
    }

    /// A UDP packet to another one.
    fn packet_to(&self, other: &Guest, payload: &[u8]) -> Vec<u8> {
        udp(self.at(9), other.at(9), payload)
    }

    /// Asks who has an address, and gives the answer.
    fn who_has(&mut self, address: Ipv4Addr) -> Option<Vec<u8>> {
        let own = self.card.mac();
        let mut frame = [[0xff; 6], own.0].concat();
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(own.0);
        frame.extend(self.card.address.octets());
        frame.extend([0; 6]);
        frame.extend(address.octets());
        self.received();
        for _ in 0..TRIES {
            self.send(&frame);
            std::thread::sleep(Duration::from_millis(20));
            let answers = self.received().into_iter();
            let mut answers = answers.filter(|f| f[12..14] == [8, 6] && f[21] == 2);
            if let Some(answer) = answers.next() {
                return Some(answer[22..28].to_vec());
            }
        }
        None
    }

    /// Asks for an address for who has this hardware address.
    fn dhcp_question(&self, mac: Mac, from: Ipv4Addr, to: (Mac, Ipv4Addr, u16)) -> Vec<u8> {
        const TYPE: [u8; 3] = [53, 1, 1];
        let mut message = vec![1, 1, 6, 0, 0x47, 0x11, 0, 0, 0, 0, 0x80, 0];
        message.extend([0; 16]);
        message.extend(mac.0);
        message.extend([0; 10 + 64 + 128]);
        message.extend([99, 130, 83, 99]);
        message.extend(TYPE);
        message.push(255);
        udp((self.card.mac(), from, 68), to, &message)
    }

    /// The address that is offered to who has this hardware address.
    fn asks_dhcp(&mut self, mac: Mac) -> Option<Ipv4Addr> {
        let to = (Mac([0xff; 6]), Ipv4Addr::BROADCAST, 67);
        let frame = self.dhcp_question(mac, Ipv4Addr::UNSPECIFIED, to);
        self.received();
        for _ in 0..TRIES / 4 {
            self.send(&frame);
            std::thread::sleep(Duration::from_millis(100));
            let offers = self.received().into_iter();
            let mut offers =
                offers.filter(|f| f.len() > 62 && f[42] == 2 && f[46..48] == [0x47, 0x11]);
            if let Some(offer) = offers.next() {
                let address: [u8; 4] = offer[58..62].try_into().expect("four");
                return Some(Ipv4Addr::from(address));
            }
        }
        None
    }

    /// The gateway's answer to a question for a name.
    fn name(&mut self, name: &str) -> Option<Ipv4Addr> {
        let gateway = subnet().gateway();
        let mut question = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        question.push(u8::try_from(name.len()).expect("a short name"));
        question.extend(name.bytes());
        question.extend([0, 0, 1, 0, 1]);
        let to = (mac(self.card.vni, subnet(), gateway), gateway, 53);
        let frame = udp(self.at(5353), to, &question);
        for _ in 0..TRIES {
            self.send(&frame);
            std::thread::sleep(Duration::from_millis(50));
            let answers = self.received().into_iter();
            let mut answers = answers.filter(|f| f.len() > 42 && f[42..44] == [0x12, 0x34]);
            if let Some(answer) = answers.next() {
                let last: [u8; 4] = answer[answer.len() - 4..].try_into().expect("four");
                return (answer[49] > 0).then(|| Ipv4Addr::from(last));
            }
        }
        None
    }
}

/// Asks until there is an answer. WireGuard sends a lost handshake again after 5 s, and a busy machine is late.
fn again<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    (0..20).find_map(|_| ask()).expect("an answer to one of twenty questions")
}

/// Whether packets of one guest come to another one.
fn reaches(from: &mut Guest, to: &mut Guest) -> bool {
    let frame = from.packet_to(to, MARKER);
    for _ in 0..12 * TRIES {
        from.send(&frame);
        std::thread::sleep(Duration::from_millis(50));
        if to.received().iter().any(|got| got.ends_with(MARKER)) {
            return true;
        }
    }
    false
}

fn wanted(
    made_ms: u64,
    own: u8,
    hosts: [&TunnelEnd; 2],
    members: &[(u16, &str, u16, u8)],
) -> HostNetworks {
    let address = |number: u8| TUNNEL_NETWORK.address(u16::from(number));
    let other = 3 - own;
    let network = |vni: u16| HostNetwork {
        name: card(vni, 0).network,
        vni,
        subnet: subnet(),
        mtu: 1370,
        nat: true,
        gateway: Some(host_id(1)),
        members: members
            .iter()
            .filter(|member| member.0 == vni)
            .map(|(_, vm, number, host)| Member {
                vm: vm_id(vm),
                address: subnet().address(*number),
                host: Some(host_id(*host)),
            })
            .collect(),
        published: match vni {
            1 => [Protocol::Tcp, Protocol::Udp]
                .map(|protocol| Published {
                    publish: Publish { outside: 8080, inside: 80, protocol },
                    address: subnet().address(3),
                })
                .into(),
            _ => Vec::new(),
        },
    };
    HostNetworks {
        made_ms,
        address: Some(address(own)),
        peers: vec![TunnelPeer {
            host: host_id(other),
            address: address(other),
            end: hosts[usize::from(other) - 1].clone(),
        }],
        networks: vec![network(1), network(2)],
        hosts: vec!["10.99.0.1".parse().expect("an address")],
    }
}

/// Reads all that passes on the cable between the hosts.
fn tap_the_cable(namespace: &File) -> nix::Result<std::os::fd::OwnedFd> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
    enter(namespace);
    let all = SockProtocol::EthAll;
    socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK, all)
}

fn passes(socket: &std::os::fd::OwnedFd) -> Vec<Vec<u8>> {
    use std::os::fd::AsRawFd as _;
    let mut frames = Vec::new();
    let mut buffer = vec![0; 65_536];
    while let Ok(bytes) =
        nix::sys::socket::recv(socket.as_raw_fd(), &mut buffer, nix::sys::socket::MsgFlags::empty())
    {
        frames.push(buffer[..bytes].to_vec());
    }
    frames
}

/// What can't be kept over a restart counts all the same, and is kept when it is said again.
fn check_full_disk(networks: &Networks, kept: &Path) {
    let host = Ipv4Addr::new(192, 0, 2, 1);
    let wanted = HostNetworks { made_ms: 2, hosts: vec![host.into()], ..HostNetworks::default() };
    std::fs::remove_file(kept).expect("it was kept");
    std::fs::create_dir_all(kept.join("in its place")).expect("a directory");
    networks.store(wanted.clone()).expect_err("it can't be kept");
    assert_eq!(networks.hosts(), Some(vec![host.into()]));
    std::fs::remove_dir_all(kept).expect("an empty directory");
    networks.store(HostNetworks { made_ms: 3, ..wanted }).expect("it is kept");
    assert!(kept.is_file());
}

/// In a thread of its own, because it goes from one namespace to another.
/// A guest reaches what nobody has said to be a host.
#[tokio::test]
async fn the_cluster_s_hosts_are_not_known_before_the_controller_has_said_them() {
    let (state, id) = (tempfile::tempdir().expect("a directory"), host_id(1));
    let prepare = async || {
        let mut networks = Networks::prepare(state.path(), &id, "10.99.0.1", false).await;
        // As one of root, who keeps what is wanted.
        networks.wanted = Mutex::new(read_wanted(&networks.dir));
        networks
    };
    std::fs::create_dir(state.path().join("networks")).expect("a directory");
    let networks = prepare().await;
    assert_eq!(networks.hosts(), None);
    let wanted = HostNetworks { made_ms: 1, ..HostNetworks::default() };
    networks.store(wanted).expect("it is kept");
    assert_eq!(networks.hosts(), Some(Vec::new()), "there are none, as in one process");
    assert_eq!(prepare().await.hosts(), Some(Vec::new()));
    check_full_disk(&networks, &state.path().join("networks").join(WANTED));
    std::fs::write(state.path().join("networks").join(WANTED), "damaged").expect("written");
    assert_eq!(prepare().await.hosts(), None);
}

#[test]
fn guests_of_a_network_reach_each_other_and_nobody_else_and_what_is_removed_comes_back() {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    std::thread::spawn(two_hosts).join().expect("no panic");
}

fn two_hosts() {
    // As the daemons have it.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let (one, two, between) = (namespace(), namespace(), namespace());
    // What passes here is what somebody on the way sees.
    enter(&between);
    let ip = |line: &str| {
        let status = std::process::Command::new("ip").args(line.split(' ')).status();
        assert!(status.expect("ip runs").success(), "{line}");
    };
    ip("link add br0 type bridge");
    ip("link set br0 up");
    for (number, host) in [(1, &one), (2, &two)] {
        enter(&between);
        use std::os::fd::AsRawFd as _;
        let at = format!("/proc/{}/fd/{}", std::process::id(), host.as_raw_fd());
        ip(&format!("link add port{number} type veth peer name eth0 netns {at}"));
        ip(&format!("link set port{number} master br0 up"));
        enter(host);
        ip("link set lo up");
        ip(&format!("address add 10.99.0.{number}/24 dev eth0"));
        ip("link set eth0 up");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let Some(one) = Host::start(&runtime, one, 1) else { return };
    let Some(two) = Host::start(&runtime, two, 2) else { return };
    let ends = [one.networks.tunnel(), two.networks.tunnel()].map(Option::unwrap);
    let all = [(1, "web", 2, 1), (1, "db", 3, 2), (1, "near", 4, 2), (2, "other", 3, 2)];
    let tell = |made_ms, members: &[(u16, &str, u16, u8)]| {
        for host in [&one, &two] {
            let wanted = wanted(made_ms, host.number, [&ends[0], &ends[1]], members);
            host.networks.store(wanted).expect("it is kept");
        }
    };
    tell(1, &all);
    let mut web = one.connect(&runtime, "web", card(1, 2));
    let mut db = two.connect(&runtime, "db", card(1, 3));
    let mut other = two.connect(&runtime, "other", card(2, 3));
    [&one, &two].iter().for_each(|host| host.pass(&runtime));

    // Addresses are known without asking anybody, and frames arrive.
    assert_eq!(again(|| web.who_has(db.card.address)), db.card.mac().0);
    let seen = tap_the_cable(&between).expect("a socket");
    assert!(reaches(&mut web, &mut db) && reaches(&mut db, &mut web));
    let seen = passes(&seen);
    assert!(seen.len() > 2, "the way is the cable's");
    let has_marker = |frame: &Vec<u8>| frame.windows(MARKER.len()).any(|part| part == MARKER);
    assert!(!seen.iter().any(has_marker), "and nothing on it can be read");

    // The other network has the same addresses, and hears nothing.
    assert!(other.received().iter().all(|frame| !has_marker(frame)));
    assert_ne!(other.who_has(subnet().address(2)), Some(web.card.mac().0.to_vec()));

    only_its_own_addresses_are_sent(&mut web, &mut db);
    the_host_itself_is_not_reached(&one, &mut web, &mut db);

    // Two VMs ask for one address.
    enter(&one.namespace);
    let same = runtime.block_on(one.networks.connect(&vm_id("same"), &card(1, 2)));
    assert_eq!(same.map(drop).expect_err("it is web's").kind, ProblemKind::Unavailable);

    // An address over DHCP, for itself and for nobody else.
    let own = db.card.mac();
    assert_eq!(again(|| db.asks_dhcp(own)), db.card.address);
    assert_eq!(db.asks_dhcp(web.card.mac()), None, "it can't ask as another one");

    // Names, and the gateway, which is at the first host.
    assert_eq!(again(|| db.name("web")), web.card.address);
    assert_eq!(again(|| web.name("db")), db.card.address);
    assert_eq!(other.name("web"), None, "another network's");

    // Port 22 of a VM is reached from its gateway, also if the VM is elsewhere.
    dials(&one, &mut db);
    dials(&one, &mut web);
    enter(&one.namespace);
    let nobody = runtime.block_on(one.networks.dial(1, subnet().address(9)));
    assert_eq!(nobody.map(drop).expect_err("there is none").kind, ProblemKind::NotFound);
    let elsewhere = runtime.block_on(two.networks.dial(1, db.card.address));
    assert_eq!(elsewhere.map(drop).expect_err("not here").kind, ProblemKind::Unavailable);

    // A port of the gateway's host leads to the VM, for others and for the host's own programs.
    enter(&between);
    ip("address add 10.99.0.9/24 dev br0");
    a_port_leads_to(&between, &mut db, Ipv4Addr::new(10, 99, 0, 9));
    a_port_leads_to(&one.namespace, &mut db, Ipv4Addr::new(10, 99, 0, 1));
    // Also for a client with an address like those of the network's VMs.
    enter(&between);
    let like = subnet().address(9);
    ip(&format!("address add {like}/32 dev br0"));
    one.run(&format!("ip route add {like}/32 dev eth0"));
    a_port_leads(&between, like, &mut db, names::uplink_addresses(1).0);
    a_port_fills_nothing(&runtime, &one, &between);
    a_flood_fills_nothing(&one, &mut web);
    let guests = [&mut web, &mut db, &mut other];
    what_has_begun_follows_its_port(&runtime, &one, &between, guests);
    assert!(reaches(&mut web, &mut db) && reaches(&mut db, &mut web));
    assert!(other.received().iter().all(|frame| !has_marker(frame)));

    // What others remove comes back.
    two.kill("--foreground");
    std::thread::sleep(Duration::from_millis(300));
    // On a busy machine the process may end only after a pass has looked at it.
    let comes_back = |_| {
        two.pass(&runtime);
        reaches(&mut web, &mut db)
    };
    assert!((0..3).any(comes_back) && two.has(&two.networks.tag.tunnel()));
    one.kill("dnsmasq");
    one.pass(&runtime);
    assert_eq!(again(|| db.name("web")), web.card.address);
    assert!(one.has("dnsmasq"), "{:?}", one.networks.warnings());
    two.run("nft flush ruleset");
    two.pass(&runtime);
    assert!(two.has("packet filter"));
    only_its_own_addresses_are_sent(&mut db, &mut web);
    two.run(&format!("ip link delete {}", two.networks.tag.bridge(1)));
    two.run(&format!("ip link delete {}", two.networks.tag.vxlan(2)));
    two.pass(&runtime);
    assert!(reaches(&mut web, &mut db) && reaches(&mut db, &mut web));

    // The way between the hosts is gone for a while. Nobody has to do anything.
    two.run("ip link set eth0 down");
    [&one, &two].iter().for_each(|host| host.pass(&runtime));
    web.send(&web.packet_to(&db, MARKER));
    two.run("ip link set eth0 up");
    assert!(reaches(&mut web, &mut db) && reaches(&mut db, &mut web));

    // A VM moves: its card at the other host is there before, and the frames follow what the controller says.
    let mut moved = one.connect(&runtime, "db", card(1, 3));
    assert!(reaches(&mut web, &mut db), "it is where it was");
    let mut near = two.connect(&runtime, "near", card(1, 4));
    in_the_pause_frames_wait_at_the_other_host(
        &runtime,
        [&one, &two],
        [&mut web, &mut near],
        [&mut moved, &mut db],
    );
    tell(2, &[(1, "web", 2, 1), (1, "db", 3, 1), (1, "near", 4, 2), (2, "other", 3, 2)]);
    [&one, &two].iter().for_each(|host| host.pass(&runtime));
    assert!(reaches(&mut web, &mut moved) && reaches(&mut moved, &mut web));
    assert!(db.received().iter().all(|frame| !has_marker(frame)), "the old one hears nothing");

    // A card is removed under its QEMU. It is said, and the others go on.
    two.run(&format!("ip link delete {}", two.networks.tag.tap(&other.card)));
    enter(&two.namespace);
    let passed = runtime.block_on(two.networks.pass(Cards::Those));
    assert!(passed.is_err_and(|why| why.contains("the card of VM other") && why.contains("move")));
    assert!(reaches(&mut web, &mut moved));

    // Nothing is left.
    drop((web, db, moved, other, near));
    for host in [&one, &two] {
        runtime.block_on(async { host.networks.turn.lock().await.cards.clear() });
        host.networks.store(HostNetworks { made_ms: 3, ..HostNetworks::default() }).expect("kept");
        host.pass(&runtime);
        let links: Vec<plan::Link> =
            runtime.block_on(list("ip", &["-json", "link", "show"])).expect("links");
        let left = links.iter().filter(|link| host.networks.tag.is_own(&link.ifname));
        assert_eq!(left.count(), 0, "{links:?}");
        for _ in 0..TRIES {
            if host.processes("").is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(host.processes("").is_empty());
    }
}

/// The controller has said nothing yet. One sender is at the destination, and the other one at the source.
fn in_the_pause_frames_wait_at_the_other_host(
    runtime: &Runtime,
    hosts: [&Host; 2],
    senders: [&mut Guest; 2],
    [moved, old]: [&mut Guest; 2],
) {
    let card = old.card.clone();
    let send_to = |at: u8| {
        for host in hosts {
            enter(&host.namespace);
            let at = host_id(at);
            let sent = host.networks.send_to(&card, &at);
            runtime.block_on(sent).expect("the kernel does so");
        }
    };
    let [web, near] = senders;
    send_to(1);
    assert!(reaches(web, moved) && reaches(near, moved));
    for host in hosts {
        runtime.block_on(async {
            let mut made = host.networks.turn.lock().await;
            made.cards.get_mut(&vm_id("db")).expect("its card").at = Some(host_id(1));
        });
        host.pass(runtime);
    }
    old.received();
    assert!(reaches(web, moved) && reaches(near, moved), "the pass keeps it");
    assert!(old.received().iter().all(|frame| !frame.ends_with(MARKER)));
    // The move has failed.
    send_to(2);
    assert!(reaches(web, old) && reaches(near, old));
    for host in hosts {
        runtime.block_on(async {
            let mut made = host.networks.turn.lock().await;
            made.cards.get_mut(&vm_id("db")).expect("its card").at = None;
        });
    }
}

/// Neither over the bridge's own hardware address, nor over those that a bridge does not carry.
fn the_host_itself_is_not_reached(host: &Host, from: &mut Guest, other: &mut Guest) {
    enter(&host.namespace);
    let socket = std::net::UdpSocket::bind("0.0.0.0:9999").expect("a port");
    socket.set_nonblocking(true).expect("it waits for nothing");
    let address = Ipv4Addr::new(10, 99, 0, host.number);
    let bridge = mac(from.card.vni, subnet(), subnet().address(0));
    for to in [bridge, Mac([0x01, 0x80, 0xc2, 0, 0, 0x0e]), Mac([0x01, 0x80, 0xc2, 0, 0, 3])] {
        from.send(&udp(from.at(9), (to, address, 9999), MARKER));
    }
    // These frames have come as far as they do.
    assert!(reaches(from, other));
    let got = socket.recv(&mut [0; 64]);
    assert!(got.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "the host hears it");
}

fn only_its_own_addresses_are_sent(from: &mut Guest, to: &mut Guest) {
    let (own, other) = (from.at(9), to.at(9));
    let strange = Mac([2, 0x50, 0, 1, 0, 77]);
    let address = subnet().address(77);
    let dhcp = udp(from.at(67), to.at(68), MARKER);
    // It says that it has the gateway's address.
    let mut arp = [[0xff; 6], own.0.0].concat();
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    arp.extend(
        [&own.0.0[..], &subnet().gateway().octets(), &other.0.0, &other.1.octets()].concat(),
    );
    arp.extend(MARKER);
    let mut ipv6 = from.packet_to(to, MARKER);
    ipv6[12..14].copy_from_slice(&[0x86, 0xdd]);
    let to_all = (Mac([0xff; 6]), Ipv4Addr::BROADCAST, 9);
    let spoofed = [
        udp((strange, own.1, 9), other, MARKER),
        udp((own.0, address, 9), other, MARKER),
        udp(own, to_all, MARKER),
        dhcp,
        ipv6,
        arp,
    ];
    to.received();
    for frame in &spoofed {
        from.send(frame);
    }
    // What comes after them has not overtaken them.
    let last = from.packet_to(to, b"the end");
    let mut got = Vec::new();
    for _ in 0..TRIES {
        from.send(&last);
        std::thread::sleep(Duration::from_millis(50));
        got.extend(to.received());
        if got.iter().any(|frame: &Vec<u8>| frame.ends_with(b"the end")) {
            break;
        }
    }
    assert!(got.iter().any(|frame| frame.ends_with(b"the end")), "its own ones arrive");
    assert!(!got.iter().any(|frame| frame.ends_with(MARKER)), "and no others");
}

/// A guest with a way out sends to more addresses than the host's table of connections has room for.
fn a_flood_fills_nothing(host: &Host, from: &mut Guest) {
    a_flood(host, from);
    let count = connections(host);
    assert!((100..260).contains(&count), "{count} connections");
}

fn a_flood(host: &Host, from: &mut Guest) {
    host.run("ip route replace 10.98.0.0/16 via 10.99.0.2");
    let gateway = mac(from.card.vni, subnet(), subnet().gateway());
    for number in 0..20_000_u16 {
        let [high, low] = number.to_be_bytes();
        from.send(&udp(from.at(9), (gateway, Ipv4Addr::new(10, 98, high, low), 9), b"flood"));
    }
    // What is sent after it has come as far as it does.
    from.name("web");
}

/// As fast as it can, a guest sends a million frames from addresses that are not its own, to nobody, to all, and as a DHCP server.
#[test]
fn a_flood_of_a_million_frames_reaches_no_other_tenant_and_keeps_nobody_from_the_network() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let mut web = host.connect(&runtime, "web", card(1, 2));
        let mut db = host.connect(&runtime, "db", card(1, 3));
        let mut bad = host.connect(&runtime, "bad", card(1, 4));
        let mut other = host.connect(&runtime, "other", card(2, 2));
        host.pass(&runtime);
        assert!(reaches(&mut web, &mut db));
        let learnt = || {
            enter(&host.namespace);
            let entries = list::<serde_json::Value>("bridge", &["-json", "fdb", "show"]);
            runtime.block_on(entries).expect("entries").len()
        };
        let (before, own) = (learnt(), bad.card.clone());
        let (to_db, to_other) = (db.at(9), other.at(9));
        let nobody = (Mac([2, 0x50, 0, 1, 0, 99]), subnet().address(99), 9);
        let to_all = (Mac([0xff; 6]), Ipv4Addr::BROADCAST, 68);
        let flood = std::thread::spawn(move || {
            let at = |port| (own.mac(), own.address, port);
            for number in 0..250_000_u32 {
                let [_, a, b, c] = number.to_be_bytes();
                let strange = (Mac([2, 0x51, 0, a, b, c]), Ipv4Addr::new(10, a, b, c), 9);
                bad.send(&udp(strange, to_db, MARKER));
                bad.send(&udp(at(9), nobody, MARKER));
                bad.send(&udp(at(67), to_all, MARKER));
                bad.send(&udp(at(9), to_other, MARKER));
            }
            bad
        });
        // The others go on meanwhile.
        let mut rounds = 0;
        let mut heard = Vec::new();
        while !flood.is_finished() || rounds == 0 {
            let frame = web.packet_to(&db, b"of web");
            let came = (0..TRIES).any(|_| {
                web.send(&frame);
                std::thread::sleep(Duration::from_millis(50));
                heard.extend(db.received());
                heard.iter().any(|frame: &Vec<u8>| frame.ends_with(b"of web"))
            });
            assert!(came, "round {rounds}");
            heard.retain(|frame| !frame.ends_with(b"of web"));
            rounds += 1;
        }
        let mut bad = flood.join().expect("it has sent all");
        assert_eq!(again(|| db.name("web")), web.card.address, "the gateway answers");
        heard.extend(db.received());
        heard.extend(web.received());
        let has_marker = |frame: &&Vec<u8>| frame.windows(MARKER.len()).any(|part| part == MARKER);
        assert_eq!(heard.iter().filter(has_marker).count(), 0, "of its own network");
        assert_eq!(other.received().iter().filter(has_marker).count(), 0, "another tenant");
        assert_eq!(learnt(), before, "no address was learnt");
        // It does not mean that it is cut off.
        assert!(reaches(&mut bad, &mut db));
    });
}
