//! A host's ports that lead to guests, and guests' own that are asked from the gateway.

use super::*;

/// Whoever asks the host's port gets the VM's answer, and the VM sees who asks.
pub fn a_port_leads_to(from: &File, to: &mut Guest, asker: Ipv4Addr) {
    a_port_leads(from, Ipv4Addr::UNSPECIFIED, to, asker);
}

/// `at`: the address from which it is asked; `asker`: the one that the VM sees.
pub fn a_port_leads(from: &File, at: Ipv4Addr, to: &mut Guest, asker: Ipv4Addr) {
    enter(from);
    let socket = std::net::UdpSocket::bind((at, 0)).expect("a port");
    socket.connect("10.99.0.1:8080").expect("an address");
    socket.set_nonblocking(true).expect("it waits for nothing");
    let own = socket.local_addr().expect("an address").port();
    let gateway = mac(to.card.vni, subnet(), subnet().gateway());
    for _ in 0..TRIES {
        let _ = socket.send(b"question");
        std::thread::sleep(Duration::from_millis(50));
        let asked = to.received().into_iter().any(|frame| {
            frame.ends_with(b"question")
                && frame[26..30] == asker.octets()
                && frame[36..38] == [0, 80]
        });
        if asked {
            to.send(&udp(to.at(80), (gateway, asker, own), b"answer"));
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut answer = [0; 64];
        if socket.recv(&mut answer).is_ok_and(|bytes| answer[..bytes] == *b"answer") {
            return;
        }
    }
    panic!("{asker} gets no answer");
}

/// The guest answers who connects to its port 22, from its gateway.
pub fn dials(host: &Host, to: &mut Guest) {
    let gateway = mac(to.card.vni, subnet(), subnet().gateway());
    let address = to.card.address;
    std::thread::scope(|scope| {
        let dialled = scope.spawn(|| {
            enter(&host.namespace);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(host.networks.dial(1, address)).map(drop)
        });
        while !dialled.is_finished() {
            for asked in to.received() {
                let is_begin = asked.len() >= 54
                    && asked[23] == 6
                    && asked[26..30] == subnet().gateway().octets()
                    && asked[36..38] == [0, 22]
                    && asked[47] == 2;
                if is_begin {
                    to.send(&accepts(to, gateway, &asked));
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        dialled.join().expect("no panic").expect("it is answered");
    });
}

/// The second packet of a TCP connection.
fn accepts(from: &Guest, gateway: Mac, asked: &[u8]) -> Vec<u8> {
    let answer = udp(from.at(22), (gateway, subnet().gateway(), 0), &[0; 12]);
    let mut frame = answer;
    frame[23] = 6;
    frame[24..26].fill(0);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum);
    let number = u32::from_be_bytes(asked[38..42].try_into().expect("four")) + 1;
    let mut tcp = vec![0, 22, asked[34], asked[35], 0, 0, 0, 1];
    tcp.extend(number.to_be_bytes());
    // 20 bytes long; the connection is accepted.
    tcp.extend([0x50, 0x12, 0x20, 0, 0, 0, 0, 0]);
    let mut summed = [&frame[26..34], &[0, 6, 0, 20]].concat();
    summed.extend(&tcp);
    tcp[16..18].copy_from_slice(&checksum(&summed));
    frame[34..54].copy_from_slice(&tcp);
    frame
}

pub fn connections(host: &Host) -> u32 {
    enter(&host.namespace);
    let count = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    count.expect("it is tracked").trim().parse().expect("a number")
}

/// Many clients come to a published port. Meanwhile the filter is loaded again, and another agent begins.
pub fn a_port_fills_nothing(runtime: &Runtime, host: &Host, clients: &File) {
    let before = connections(host);
    for round in 0..3 {
        enter(clients);
        for _ in 0..1000 {
            let socket = std::net::UdpSocket::bind("10.99.0.9:0").expect("a port");
            let _ = socket.send_to(b"flood", "10.99.0.1:8080");
        }
        std::thread::sleep(Duration::from_millis(200));
        let count = connections(host).saturating_sub(before);
        assert!((100..260).contains(&count), "{count} connections in round {round}");
        host.run(&format!("nft delete table inet {}", host.networks.tag.table()));
        host.run(&format!("nft delete table bridge {}", host.networks.tag.table()));
        runtime.block_on(async { host.networks.turn.lock().await.counted.clear() });
        host.pass(runtime);
    }
    host.run("conntrack -F");
}

/// A client that never stops sending from one port comes to the VM that has the port now: another one of the network, or of
/// another network; also if the agent was away meanwhile.
pub fn what_has_begun_follows_its_port(
    runtime: &Runtime,
    host: &Host,
    client: &File,
    [web, db, other]: [&mut Guest; 3],
) {
    host.run("conntrack -F");
    enter(client);
    let socket = std::net::UdpSocket::bind("10.99.0.9:4711").expect("a port");
    socket.connect("10.99.0.1:8080").expect("an address");
    let comes_to = |guest: &mut Guest| {
        (0..TRIES).any(|_| {
            let _ = socket.send(b"again");
            std::thread::sleep(Duration::from_millis(50));
            guest.received().iter().any(|frame| frame.ends_with(b"again"))
        })
    };
    let known = host.networks.wanted.lock().expect("no panic").clone().expect("it is known");
    let published = known.networks[0].published.clone();
    let led_to = |guest: &Guest| {
        let mut wanted = known.clone();
        let address = guest.card.address;
        for network in &mut wanted.networks {
            let all = published.iter().filter(|_| network.vni == guest.card.vni);
            network.published = all.map(|one| Published { address, ..one.clone() }).collect();
        }
        host.networks.store(wanted).expect("it is kept");
    };
    assert!(comes_to(db));
    led_to(web);
    host.pass(runtime);
    assert!(comes_to(web));
    db.received();
    let _ = socket.send(b"again");
    std::thread::sleep(Duration::from_millis(200));
    assert!(db.received().iter().all(|frame| !frame.ends_with(b"again")), "the former one");
    led_to(other);
    host.pass(runtime);
    assert!(comes_to(other));
    web.received();
    led_to(db);
    runtime.block_on(async { host.networks.turn.lock().await.doors = None });
    host.pass(runtime);
    assert!(comes_to(db));
    assert!(web.received().iter().all(|frame| !frame.ends_with(b"again")), "the former one");
}
