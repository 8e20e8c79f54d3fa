//! Machines without disks boot from their own clones: real firmware, real guests, one network.

mod diskless;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::Value;

use diskless::{Network, golden_image, until};

/// Where a machine's volumes are, in the list of all volumes.
fn volumes(network: &Network) -> Vec<String> {
    let list = network.ok(&["volume", "list"]);
    let names = list.as_array().expect("a list").iter();
    names.map(|volume| volume["name"].as_str().expect("a name").to_owned()).collect()
}

fn sessions(network: &Network, client: &str) -> Vec<String> {
    let clients = network.ok(&["client", "list"]);
    let mut clients = clients.as_array().expect("a list").iter();
    let client = clients.find(|c| c["name"] == client).expect("the client");
    let logins = client["sessions"].as_array().expect("a list").iter();
    logins.map(|login| login["over"].as_str().expect("a protocol").to_owned()).collect()
}

/// How long the volume server is away. `make soak` has longer pauses than open-iscsi waits by default, 120 s.
fn server_away() -> Duration {
    let seconds = std::env::var("PERIGEE_SERVER_AWAY_S").map(|text| text.parse());
    Duration::from_secs(seconds.map_or(0, |seconds| seconds.expect("a number of seconds")))
}

#[test]
fn machines_without_disks_boot_from_their_own_clones() {
    let image = golden_image();
    let path = |name: &str| image.join(name).to_str().expect("text").to_owned();
    let mut network = Network::new();
    network.ok(&["pool", "create"]);
    network.ok(&["image", "import", "debian", &path("debian-pg.raw")]);
    let secret = network.path("secret");
    std::fs::write(&secret, "correct-horse-battery\n").expect("a file");
    let [mut kept, mut fresh, mut nbd, mut stranger] =
        ["kept", "fresh", "nbd", "stranger"].map(|name| network.machine(name));
    fresh.uefi = true;
    let chap = ["--chap-user", "kept", "--chap-secret", secret.to_str().expect("text")];
    network.ok(&[&["client", "add", "kept", "--mac", &kept.mac][..], &chap].concat());
    for machine in [&fresh, &nbd, &stranger] {
        network.ok(&["client", "add", &machine.name, "--mac", &machine.mac]);
    }
    network.ok(&["client", "bind", "kept", "--image", "debian"]);
    network.ok(&["client", "bind", "fresh", "--image", "debian", "--ephemeral"]);
    network.ok(&["client", "bind", "nbd", "--image", "debian", "--over", "nbd"]);
    network.volume_server();
    let append = "console=ttyS0 quiet loglevel=4 mitigations=off audit=0 cryptomgr.notests panic=5";
    let (kernel, initrd) = (path("vmlinuz"), path("initrd-nbd"));
    network.boot_server(&["--kernel", &kernel, "--initrd", &initrd, "--append", append]);

    for machine in [&mut kept, &mut fresh, &mut nbd] {
        network.start(machine);
    }
    for (machine, over) in [(&kept, "iscsi"), (&fresh, "iscsi"), (&nbd, "nbd")] {
        network.says(machine, &format!("up, root over {over}, boot 1 of this disk"));
        network.says(machine, "perigee login:");
        assert!(sessions(&network, &machine.name).contains(&over.to_owned()), "{over}");
    }
    assert_eq!(volumes(&network), ["fresh.debian.1", "kept.debian", "nbd.debian"]);
    assert_eq!(sessions(&network, "stranger"), [""; 0]);

    // A server that is killed is only a pause for who has its root over iSCSI. Nobody has asked for a
    // password yet, so the program that does comes from the disk.
    network.end("volume", "-KILL");
    std::thread::sleep(server_away());
    network.volume_server();
    for machine in [&kept, &fresh] {
        machine.types("root");
        network.says(machine, "Password:");
    }

    // The plug is pulled; what the guests had synced is in the one clone and not in the other.
    kept.kill();
    fresh.kill();
    nbd.kill();
    for machine in [&mut kept, &mut fresh, &mut stranger] {
        network.start(machine);
    }
    network.says(&kept, "up, root over iscsi, boot 2 of this disk");
    network.says(&fresh, "up, root over iscsi, boot 1 of this disk");
    network.says(&stranger, "can't boot client stranger: it is not bound to anything");
    assert!(!stranger.console().contains("login:"));

    // Leases never end, so a machine that is no client gets none.
    let mut nobody = network.machine("nobody");
    network.start(&mut nobody);
    let ignored = format!("{} ignored", nobody.mac);
    until("its requests to be ignored", || network.log("boot").contains(&ignored).then_some(()));
    let leases = std::fs::read_to_string(network.pool().join("boot/leases")).expect("the leases");
    for (machine, count) in [(&kept, 1), (&fresh, 1), (&nbd, 1), (&stranger, 1), (&nobody, 0)] {
        let of_it = leases.lines().filter(|line| line.split(' ').nth(1) == Some(&machine.mac));
        assert_eq!(of_it.count(), count, "{}:\n{leases}", machine.name);
    }
    until("the spent clone to go", || {
        network.get("/boot/52-54-00-77-00-04");
        network.ok(&["client", "remove", "stranger"]);
        network.ok(&["client", "add", "stranger"]);
        (!volumes(&network).contains(&"fresh.debian.1".to_owned())).then_some(())
    });
}

#[test]
fn a_machine_is_told_plainly_what_it_boots_or_why_not() {
    let mut network = Network::new();
    network.ok(&["pool", "create"]);
    network.ok(&["volume", "create", "disk", "--size", "1MiB"]);
    network.ok(&["client", "add", "c1", "--mac", "52:54:00:77:00:01"]);
    network.volume_server();
    network.boot_server(&[]);
    let told = |network: &Network| network.get("/boot/52-54-00-77-00-01").expect("a script");
    assert!(told(&network).contains("echo Perigee: can't boot client c1: it is not bound"));
    network.ok(&["client", "bind", "c1", "--volume", "disk"]);
    let target = "sanboot iscsi:10.77.0.1::3260:0:iqn.2026-11.org.perigee:disk";
    assert!(told(&network).contains(target), "{}", told(&network));
    network.ok(&["volume", "create", "other", "--size", "1MiB"]);
    let own = network.targets("iqn.2026-11.org.perigee.client:c1");
    assert_eq!(own, ["iqn.2026-11.org.perigee:disk"]);
    assert_eq!(network.targets("iqn.2026-11.org.perigee.client:stranger"), [""; 0]);
    network.ok(&["client", "bind", "c1", "--volume", "disk", "--over", "nbd"]);
    assert!(told(&network).contains("has no kernel"), "{}", told(&network));
    let unknown = network.get("/boot/52-54-00-77-00-99").expect("a script");
    assert!(unknown.contains("no client has this network card"), "{unknown}");
    let check = ["boot", "check", "--interface", "br0", "--range", "10.77.0.100-10.77.0.200"];
    let (code, findings) = network.code(&check);
    let missing: Vec<_> = findings
        .as_array()
        .expect("a list")
        .iter()
        .filter(|f| f["ok"] == Value::Bool(false))
        .collect();
    assert!(code == 1 && missing.len() == 1, "{findings}");
    assert_eq!(missing[0]["what"], "kernel and initramfs for NBD");

    // A new client's card is one that gets an address, without a restart of the boot server.
    let boot = network.pool().join("boot");
    let read = |name: &str| std::fs::read_to_string(boot.join(name)).unwrap_or_default();
    let before = read("dnsmasq.pid");
    network.ok(&["client", "add", "c2", "--mac", "52:54:00:77:00:02"]);
    until("dnsmasq to know the new client's card", || {
        let id = read("dnsmasq.pid");
        let lives = Path::new("/proc").join(id.trim()).join("cmdline").exists();
        let knows = read("dnsmasq.conf").contains("dhcp-host=52:54:00:77:00:02,");
        (knows && lives && !id.is_empty() && id != before).then_some(())
    });

    network.end("volume", "-KILL");
    let waits = told(&network);
    assert!(waits.contains("no answer from") && waits.contains("chain --replace"), "{waits}");
}

#[test]
fn dnsmasq_ends_with_the_boot_server_and_what_a_killed_one_leaves_is_ended_by_the_next() {
    let mut network = Network::new();
    network.ok(&["pool", "create"]);
    let pid_file = network.pool().join("boot/dnsmasq.pid");
    let dnsmasq = |before: &str| {
        until("dnsmasq to say its id", || {
            let id = std::fs::read_to_string(&pid_file).ok()?.trim().to_owned();
            (!id.is_empty() && id != before).then_some(id)
        })
    };
    // An ended process that nobody has waited for has no command line any more.
    let lives = |id: &str| {
        std::fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|arguments| !arguments.is_empty())
    };
    network.boot_server(&[]);
    let first = dnsmasq("");
    network.end("boot", "-KILL");
    assert!(lives(&first), "nobody could end it");
    network.boot_server(&[]);
    let second = dnsmasq(&first);
    assert!(!lives(&first) && lives(&second));
    network.end("boot", "-TERM");
    assert!(!lives(&second));
}

/// A machine in the network that sends what it likes. It has a network namespace of its own.
struct Cable {
    namespace: String,
    socket: UdpSocket,
}

type Mac = [u8; 6];

/// DHCP's messages.
const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const ACK: u8 = 5;

fn ip(arguments: &[&str]) {
    let done = Command::new("ip").args(arguments).status().expect("iproute2");
    assert!(done.success(), "ip {arguments:?}");
}

impl Cable {
    fn plug_into(network: &Network) -> Self {
        let (at, namespace) = (network.namespace(), format!("{}x", network.namespace()));
        ip(&["netns", "add", &namespace]);
        ip(&[
            "-n", at, "link", "add", "cable", "type", "veth", "peer", "eth0", "netns", &namespace,
        ]);
        ip(&["-n", at, "link", "set", "cable", "master", "br0", "up"]);
        ip(&["-n", &namespace, "link", "set", "eth0", "up"]);
        let path = format!("/run/netns/{namespace}");
        let open = std::thread::spawn(move || {
            setns(std::fs::File::open(path).expect("it"), CloneFlags::CLONE_NEWNET).expect("root");
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 68)).expect("a socket");
            setsockopt(&socket, sockopt::BindToDevice, &"eth0".into()).expect("the card");
            socket.set_broadcast(true).expect("a broadcast");
            socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a deadline");
            socket
        });
        Self { namespace, socket: open.join().expect("it does not panic") }
    }

    /// `more`: DHCP options.
    fn send(&self, card: Mac, kind: u8, more: &[u8]) {
        let mut message = vec![0; 236];
        message[..3].copy_from_slice(&[1, 1, 6]);
        message[4..8].copy_from_slice(&card[2..]);
        // The answer is a broadcast, because nobody here has the address.
        message[10] = 0x80;
        message[28..34].copy_from_slice(&card);
        message.extend([99, 130, 83, 99, 53, 1, kind]);
        message.extend(more);
        message.push(255);
        self.socket.send_to(&message, (Ipv4Addr::BROADCAST, 67)).expect("it is sent");
    }

    /// The next answer: for which card, of which kind, with which address. `None` if there is none for a moment.
    fn hear(&self) -> Option<(Mac, u8, Ipv4Addr)> {
        let mut message = [0; 1500];
        let length = self.socket.recv(&mut message).ok()?;
        let card = message[28..34].try_into().expect("6 bytes");
        let address: [u8; 4] = message[16..20].try_into().expect("4 bytes");
        // dnsmasq says first of which kind it is.
        (length > 243 && message[240] == 53).then(|| (card, message[242], address.into()))
    }

    /// Asks until there is an answer of this kind for this card.
    fn ask(
        &self,
        card: Mac,
        kind: u8,
        more: &[u8],
        answer: u8,
        heard: &mut BTreeSet<Mac>,
    ) -> Ipv4Addr {
        until("an answer to DHCP", || {
            self.send(card, kind, more);
            let all: Vec<_> = std::iter::from_fn(|| self.hear()).collect();
            heard.extend(all.iter().map(|(card, ..)| *card));
            all.iter().find(|one| one.0 == card && one.1 == answer).map(|one| one.2)
        })
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        Command::new("ip").args(["netns", "delete", &self.namespace]).status().ok();
    }
}

#[test]
fn two_hundred_cards_do_not_take_the_five_addresses_of_the_clients() {
    const CLIENTS: u8 = 5;
    let mut network = Network::new();
    network.ok(&["pool", "create"]);
    let client = |number: u8| [0x52, 0x54, 0, 0x77, 1, number];
    for number in 1..=CLIENTS {
        let (name, mac) = (format!("c{number}"), format!("52:54:00:77:01:{number:02x}"));
        network.ok(&["client", "add", &name, "--mac", &mac]);
    }
    network.volume_server();
    network.boot_server_of("10.77.0.100-10.77.0.104", &[]);
    let cable = Cable::plug_into(&network);
    let mut heard = BTreeSet::new();
    // They ask for an address, and for each of the five by its name. One client's own card is used under many names too.
    for number in 0..200 {
        let card = [0x02, 0xbd, 0, 0, 1, number];
        cable.send(card, DISCOVER, &[]);
        cable.send(card, REQUEST, &[50, 4, 10, 77, 0, 100 + number % CLIENTS]);
        cable.send(client(1), DISCOVER, &[61, 3, 0, b'n', number]);
    }
    let mut given = BTreeSet::new();
    for number in 1..=CLIENTS {
        let card = client(number);
        let offered = cable.ask(card, DISCOVER, &[], OFFER, &mut heard);
        let wanted = [&[54, 4, 10, 77, 0, 1, 50, 4][..], &offered.octets()].concat();
        given.insert(cable.ask(card, REQUEST, &wanted, ACK, &mut heard));
    }
    assert_eq!(given.len(), usize::from(CLIENTS), "each has one of its own: {given:?}");
    assert!(heard.iter().all(|card| card[..5] == client(0)[..5]), "{heard:?}");
    let leases = std::fs::read_to_string(network.pool().join("boot/leases")).expect("the leases");
    let of_clients = leases.lines().filter(|line| line.contains(" 52:54:00:77:01:"));
    assert_eq!(of_clients.count(), usize::from(CLIENTS), "{leases}");
    assert_eq!(leases.lines().count(), usize::from(CLIENTS), "{leases}");

    // All addresses are given. A client that is removed leaves its address to the next one.
    network.ok(&["client", "remove", "c5"]);
    network.ok(&["client", "add", "c6", "--mac", "52:54:00:77:01:06"]);
    let next = cable.ask(client(6), DISCOVER, &[], OFFER, &mut heard);
    assert!(given.contains(&next), "{next} is the address that c5 had");
}
