//! What needs one host only.

use super::*;
use crate::networks::pass::segments;

/// A host alone, with the gateway of the networks 1 and 2.
pub fn alone() -> Option<(Runtime, Host, HostNetworks)> {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let one = namespace();
    enter(&one);
    let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.expect("ip runs").success());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let host = Host::start(&runtime, one, 1)?;
    let end = host.networks.tunnel().expect("it is known");
    let mut wanted = wanted(1, 1, [&end, &end], &[(1, "web", 2, 1), (2, "other", 2, 1)]);
    wanted.peers.clear();
    Some((runtime, host, wanted))
}

pub fn in_a_thread(test: fn()) {
    if nix::unistd::Uid::effective().is_root() {
        std::thread::spawn(test).join().expect("no panic");
    }
}

impl Host {
    /// The agent is started again.
    fn restart(&mut self, runtime: &Runtime) {
        enter(&self.namespace);
        let cards = std::mem::take(&mut runtime.block_on(self.networks.turn.lock()).cards);
        self.networks.alone.lock().expect("no panic").take();
        let (id, ip) = (host_id(self.number), format!("10.99.0.{}", self.number));
        let networks = Networks::prepare(self.state.path(), &id, &ip, true);
        self.networks = runtime.block_on(networks);
        runtime.block_on(self.networks.turn.lock()).cards = cards;
    }

    fn has_link(&self, runtime: &Runtime, name: &str) -> bool {
        enter(&self.namespace);
        let links = list("ip", &["-json", "link", "show"]);
        let links: Vec<plan::Link> = runtime.block_on(links).expect("links");
        links.iter().any(|link| link.ifname == name)
    }
}

#[test]
fn what_can_t_be_read_or_found_out_removes_nothing() {
    in_a_thread(|| {
        let Some((runtime, mut host, wanted)) = alone() else { return };
        host.networks.store(wanted.clone()).expect("it is kept");
        let _web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        let (bridge, gateways) = (host.networks.tag.bridge(1), host.processes("dnsmasq"));
        assert_eq!(gateways.len(), 2);
        let dir = host.state.path().join("networks");
        std::fs::write(dir.join(WANTED), "{ torn").expect("a file");
        // A key that can't be read once.
        std::fs::rename(dir.join("tunnel.key"), dir.join("key")).expect("a file");
        std::fs::create_dir(dir.join("tunnel.key")).expect("a directory");
        host.restart(&runtime);
        assert!(host.networks.trouble().is_some_and(|why| why.contains("tunnel.key")));
        assert!(host.networks.tunnel().is_some(), "what others know of it is still right");
        for flushed in [false, true] {
            if flushed {
                host.run("nft flush ruleset");
            }
            enter(&host.namespace);
            let passed = runtime.block_on(host.networks.pass(Cards::Those));
            assert!(passed.is_err_and(|why| why.contains("not known")));
            assert!(host.has_link(&runtime, &bridge));
            assert_eq!(host.processes("dnsmasq"), gateways);
            let table = host.networks.tag.table();
            host.run(&format!("nft list table bridge {table}"));
        }
        let late = runtime.block_on(host.networks.connect(&vm_id("db"), &card(1, 3)));
        assert_eq!(late.map(drop).expect_err("not now").kind, ProblemKind::Unavailable);
        // The controller says it again, and the key is there again.
        std::fs::remove_dir(dir.join("tunnel.key")).expect("a directory");
        std::fs::rename(dir.join("key"), dir.join("tunnel.key")).expect("a file");
        enter(&host.namespace);
        runtime.block_on(host.networks.look_at_end());
        assert_eq!(host.networks.trouble(), None);
        host.networks.store(wanted).expect("it is kept");
        host.pass(&runtime);
        assert_eq!(host.processes("dnsmasq"), gateways, "the same ones go on");
    });
}

/// Until now the filter cut the host off from this address: a VPN may have given it.
#[test]
fn a_host_with_an_address_of_the_tunnels_has_no_networks_and_says_why() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let _web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        runtime.block_on(host.networks.look_at_end());
        assert_eq!(
            host.networks.trouble(),
            None,
            "its own tunnel and gateways have such addresses"
        );
        for address in ["100.127.3.4", "100.124.3.4"] {
            host.run(&format!("ip address add {address}/32 dev lo"));
            runtime.block_on(host.networks.look_at_end());
            assert!(host.networks.trouble().is_some_and(|why| why.contains(address)));
            host.run(&format!("ip address delete {address}/32 dev lo"));
        }
        runtime.block_on(host.networks.look_at_end());
        assert_eq!(host.networks.trouble(), None);
    });
}

/// Until now an agent that started then removed the tunnel under the VMs that used it.
#[test]
fn a_tunnel_goes_on_while_its_end_can_t_be_found_out() {
    in_a_thread(|| {
        let Some((runtime, mut host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let _web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        let dir = host.state.path().join("networks");
        std::fs::write(dir.join(END), "{ torn").expect("a file");
        std::fs::remove_file(dir.join("tunnel.key")).expect("a file");
        std::fs::create_dir(dir.join("tunnel.key")).expect("a directory");
        host.restart(&runtime);
        assert_eq!(host.networks.tunnel(), None);
        host.pass(&runtime);
        assert!(host.has_link(&runtime, &host.networks.tag.tunnel()));
    });
}

/// Another program has made the packet filter's table its own, so the agent can't change it.
#[test]
fn a_gateway_that_is_elsewhere_now_ends_also_where_there_can_t_be_a_filter() {
    in_a_thread(|| {
        let Some((runtime, host, mut wanted)) = alone() else { return };
        host.networks.store(wanted.clone()).expect("it is kept");
        let _web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        assert_eq!(host.processes("gateway-0001").len(), 1);
        let table = host.networks.tag.table();
        host.run(&format!("nft delete table bridge {table}"));
        let mut owner = std::process::Command::new("nft");
        let owner = owner.arg("-i").stdin(std::process::Stdio::piped());
        let mut owner = owner.stdout(std::process::Stdio::null()).spawn().expect("nft runs");
        // It is the owner for as long as it reads.
        let mut input = owner.stdin.take().expect("it was asked for");
        let line = format!("add table bridge {table} {{ flags owner; }}\n");
        input.write_all(line.as_bytes()).expect("it reads");
        let list = format!("list table bridge {table}");
        let is_owned = || {
            let listed = runtime.block_on(run("nft", &list.split(' ').collect::<Vec<_>>(), ""));
            listed.is_ok_and(|listed| listed.contains("owner"))
        };
        for _ in 0..TRIES {
            if is_owned() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(is_owned(), "nft has made the table its own");
        wanted.networks[0].gateway = Some(host_id(2));
        host.networks.store(wanted).expect("it is kept");
        let passed = runtime.block_on(host.networks.pass(Cards::Those));
        assert!(passed.is_err_and(|why| why.contains("nft")));
        assert_eq!(host.processes("gateway-0001").len(), 0);
        drop(input);
        owner.wait().expect("it ends");
        host.pass(&runtime);
    });
}

#[test]
fn a_gateway_that_can_t_start_holds_up_no_other() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        let way = host.state.path().join("networks/gateway-0001");
        std::fs::write(&way, "in the way").expect("a file");
        host.networks.store(wanted).expect("it is kept");
        let pass = || {
            enter(&host.namespace);
            runtime.block_on(host.networks.pass(Cards::Those))
        };
        assert!(pass().is_err_and(|why| why.contains("gateway-0001")));
        assert_eq!(host.processes("gateway-0002").len(), 1);
        assert_eq!(host.networks.failing_gateways(), [1], "the controller hears of it");
        std::fs::remove_file(way).expect("a file");
        let wait = |wait: Duration| {
            let mut made = runtime.block_on(host.networks.turn.lock());
            made.failed.get_mut(&1).expect("it has failed").wait = wait;
        };
        wait(Duration::from_secs(3600));
        assert!(pass().is_err(), "it is not tried again at once");
        wait(Duration::ZERO);
        host.pass(&runtime);
        assert_eq!(host.processes("gateway-0001").len(), 1);
        assert!(host.networks.failing_gateways().is_empty());
    });
}

/// Its agent was ended after the cables were made, and before they had addresses.
#[test]
fn a_gateway_that_was_left_half_made_is_completed() {
    in_a_thread(|| {
        let Some((runtime, mut host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let mut web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        let gateways = host.processes("dnsmasq");
        let own = web.card.mac();
        assert_eq!(again(|| web.asks_dhcp(own)), web.card.address);
        let gateway = host.processes("gateway-0001")[0];
        host.run(&format!("nsenter --net=/proc/{gateway}/ns/net ip address flush dev inner"));
        host.restart(&runtime);
        host.pass(&runtime);
        assert_eq!(host.processes("dnsmasq"), gateways, "the same ones go on");
        assert_eq!(again(|| web.asks_dhcp(own)), web.card.address);
    });
}

/// Until now their cards had no filter until the next look, 2 s later at most.
#[test]
fn who_flushes_the_filter_of_tenants_networks_is_heard_at_once() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let _web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        let watch = runtime.block_on(async { Watch::new() });
        let heard = |within: Duration| {
            let heard =
                async { timeout(within, host.networks.is_to_pass(&watch, Instant::now())).await };
            runtime.block_on(heard).is_ok()
        };
        host.pass(&runtime);
        host.run("nft add table inet other");
        host.run("nft delete table inet other");
        assert!(!heard(Duration::from_millis(200)), "it looks for nothing of its own or of others");
        host.run("nft flush ruleset");
        assert!(heard(Duration::from_secs(60)));
        host.pass(&runtime);
        assert!(host.has("packet filter"));
    });
}

/// Each message brought about a pass. To load the rules of many cards anew is dozens of messages.
#[test]
fn all_that_was_removed_meanwhile_is_heard_once() {
    in_a_thread(|| {
        let Some((runtime, host, _)) = alone() else { return };
        let watch = runtime.block_on(async { Watch::new() }).expect("the kernel tells");
        let heard = |within: Duration| {
            let heard = async { timeout(within, watch.removed()).await };
            runtime.block_on(heard).is_ok()
        };
        for _ in 0..3 {
            host.run("nft add table inet perigee_net_other");
            host.run("nft delete table inet perigee_net_other");
        }
        assert!(heard(Duration::from_secs(60)));
        assert!(!heard(Duration::from_millis(200)), "nothing was removed since");
    });
}

/// Until now two networks of one tenant had all the connections that guests may have outside.
#[test]
fn the_networks_of_one_tenant_leave_connections_to_another_one() {
    in_a_thread(|| {
        let Some((runtime, host, mut wanted)) = alone() else { return };
        host.run("ip link add eth0 type veth peer name far");
        host.run("ip address add 10.99.0.1/24 dev eth0");
        host.run("ip link set eth0 up");
        host.run("ip link set far up");
        host.run("ip neighbour replace 10.99.0.2 lladdr 02:00:00:00:00:09 dev eth0");
        let of_acme =
            Card { network: NetworkName::new("acme~net3").expect("a name"), ..card(3, 2) };
        let member =
            Member { vm: vm_id("acme~web"), address: of_acme.address, host: Some(host_id(1)) };
        wanted.networks.push(HostNetwork {
            name: of_acme.network.clone(),
            vni: 3,
            members: vec![member],
            published: Vec::new(),
            ..wanted.networks[1].clone()
        });
        host.networks.store(wanted).expect("it is kept");
        let guests = [("web", card(1, 2)), ("other", card(2, 2)), ("acme~web", of_acme)];
        let mut guests = guests.map(|(vm, card)| host.connect(&runtime, vm, card));
        host.pass(&runtime);
        let [one, two, acme] = guests.each_mut().map(|guest| {
            assert_eq!(again(|| guest.name("gateway")), subnet().gateway());
            a_flood(&host, guest);
            let own = names::uplink_addresses(guest.card.vni).1.to_string();
            enter(&host.namespace);
            let line = ["-L", "-f", "ipv4", "-s", &own];
            let listed = runtime.block_on(run("conntrack", &line, "")).expect("connections");
            listed.lines().count()
        });
        assert!((100..260).contains(&(one + two)), "{one} and {two} of one tenant");
        assert!(acme >= 100, "{acme} of another tenant");
    });
}

#[test]
fn a_guest_that_asks_only_its_gateway_for_addresses_is_limited_too() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let mut web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        let own = web.card.mac();
        assert_eq!(again(|| web.asks_dhcp(own)), web.card.address);
        let gateway = subnet().gateway();
        let to = (mac(1, subnet(), gateway), gateway, 67);
        let frame = web.dhcp_question(own, web.card.address, to);
        let offers =
            |web: &mut Guest| web.received().iter().filter(|f| f.len() > 62 && f[42] == 2).count();
        let (mut seen, begun) = (0, std::time::Instant::now());
        for _ in 0..60 {
            for _ in 0..50 {
                web.send(&frame);
            }
            // Neither the card's queue nor dnsmasq's socket has room for all of them.
            std::thread::sleep(Duration::from_millis(10));
            seen += offers(&mut web);
        }
        let most = 2 * (200 + 100 * usize::try_from(begun.elapsed().as_secs()).expect("some"));
        std::thread::sleep(Duration::from_secs(2));
        seen += offers(&mut web);
        assert!(seen > 0 && seen <= most, "{seen} offers, at most {most}");
    });
}

#[test]
fn a_second_agent_has_no_networks_and_says_why() {
    in_a_thread(|| {
        let Some((runtime, host, _)) = alone() else { return };
        let state = tempfile::tempdir().expect("a directory");
        let id = host_id(2);
        let second = Networks::prepare(state.path(), &id, "10.99.0.2", true);
        let second = runtime.block_on(second);
        assert!(second.trouble().is_some_and(|why| why.contains("another agent")));
        drop(host);
        runtime.block_on(second.look_at_end());
        assert_eq!(second.trouble(), None);
    });
}

#[test]
fn what_vms_of_a_job_send_to_each_other_is_counted_for_each_pair() {
    in_a_thread(|| {
        let Some((runtime, mut host, mut wanted)) = alone() else { return };
        let (first, second, web) = ("g-0001-n0", "g-0001-n1", "web");
        let member = |vm: &str, number| Member {
            vm: vm_id(vm),
            address: subnet().address(number),
            host: Some(host_id(1)),
        };
        wanted.networks[0].members = vec![member(first, 2), member(second, 3), member(web, 4)];
        host.networks.store(wanted).expect("it is kept");
        let mut guests = [(first, 2), (second, 3), (web, 4)]
            .map(|(vm, number)| host.connect(&runtime, vm, card(1, number)));
        host.pass(&runtime);
        let sent = |host: &Host, vm: &str| -> Vec<(String, u64)> {
            host.pass(&runtime);
            let sent = host.networks.sent(&vm_id(vm)).into_iter();
            sent.map(|sent| (sent.to.to_string(), sent.bytes)).collect()
        };
        assert_eq!(sent(&host, first), [(second.to_owned(), 0)]);
        assert_eq!(sent(&host, web), [], "it is of no job with several VMs");
        let [one, two, other] = &mut guests;
        let payload = [7; 400];
        for to in [&*two, &*other] {
            let frame = one.packet_to(to, &payload);
            one.send(&frame);
        }
        // One that claims to be another VM's does not count for that one.
        let forged = udp(two.at(1), one.at(2), &payload);
        other.send(&forged);
        let counted = sent(&host, first)[0].1;
        assert!((428..600).contains(&counted), "{counted}");
        assert_eq!(sent(&host, second), [(first.to_owned(), 0)]);
        // What an earlier agent has counted stays.
        host.restart(&runtime);
        assert_eq!(sent(&host, first), [(second.to_owned(), counted)]);
        let frame = two.packet_to(one, &payload);
        two.send(&frame);
        assert_eq!(sent(&host, second), [(first.to_owned(), counted)]);
        host.run(&format!("nft delete table bridge {}", host.networks.tag.talk()));
        assert_eq!(sent(&host, second), [(first.to_owned(), 0)], "counted anew");
    });
}

#[test]
fn a_card_that_is_no_vm_s_is_removed_after_a_while() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let strange = host.networks.tag.tap(&card(1, 99));
        host.run(&format!("ip tuntap add mode tap name {strange}"));
        let _web = host.connect(&runtime, "web", card(1, 2));
        host.pass(&runtime);
        // A VM that starts may be about to use it, so it is not removed at once.
        std::thread::sleep(2 * tap::STRANGE_FOR);
        host.pass(&runtime);
        assert!(!host.has_link(&runtime, &strange));
        assert!(host.has_link(&runtime, &host.networks.tag.tap(&card(1, 2))));
    });
}

/// Until now it was cut off from its network at once, and its card was removed after a while.
#[test]
fn a_vm_of_which_nothing_can_be_read_keeps_its_card_and_its_network() {
    in_a_thread(|| {
        let Some((runtime, host, wanted)) = alone() else { return };
        host.networks.store(wanted).expect("it is kept");
        let mut web = host.connect(&runtime, "web", card(1, 2));
        let mut db = host.connect(&runtime, "db", card(1, 3));
        {
            let mut made = runtime.block_on(host.networks.turn.lock());
            made.cards.remove(&vm_id("web"));
            made.cards_unknown = true;
        }
        for _ in 0..2 {
            host.pass(&runtime);
            std::thread::sleep(2 * tap::STRANGE_FOR);
        }
        assert!(reaches(&mut web, &mut db) && reaches(&mut db, &mut web));
        only_its_own_addresses_are_sent(&mut web, &mut db);
    });
}

#[test]
fn what_is_older_changes_nothing_and_the_controller_learns_it() {
    in_a_thread(|| {
        let Some((_runtime, host, wanted)) = alone() else { return };
        let at = |made_ms| HostNetworks { made_ms, ..wanted.clone() };
        let take = |made_ms| host.networks.take(at(made_ms)).expect("it is answered").made_ms;
        assert_eq!(take(50), 50);
        assert_eq!(take(40), 50, "the clock of the controller was set back");
        assert_eq!(take(51), 51);
    });
}

/// The controller may be away, and has said last that the VM is about to run at the other host.
#[test]
fn a_vm_that_runs_here_has_its_card_here() {
    let tag = Tag::new(&host_id(1), Path::new("/state"));
    let key = format!("{}=", "a".repeat(43));
    let end = TunnelEnd { public_key: key, endpoint: "10.99.0.2:1".to_owned(), mtu: 1500 };
    let wanted = wanted(1, 1, [&end, &end], &[(1, "web", 2, 2)]);
    let others = |at: Option<u8>| {
        let at = at.map(host_id);
        let here = CardHere { card: card(1, 2), at };
        let cards = [(vm_id("web"), here)].into();
        let all = segments(&tag, &host_id(1), &wanted, &cards);
        let of_one = all.iter().find(|segment| segment.vni == 1).expect("the network");
        of_one.others.get(&subnet().address(2)).copied()
    };
    let there = TUNNEL_NETWORK.address(2);
    assert_eq!((others(None), others(Some(1))), (Some(there), None));
    assert_eq!(others(Some(2)), Some(there), "in the pause of a move to there");
    assert_eq!(others(Some(3)), Some(there), "a host to which no tunnel leads");
}
