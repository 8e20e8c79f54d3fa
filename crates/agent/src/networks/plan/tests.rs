use std::path::Path;

use perigee_model::HostId;

use super::*;

fn tag() -> Tag {
    Tag::new(&HostId::new("home1").expect("a name"), Path::new("/state"))
}

fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 7, 0, last)
}

fn host(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(100, 127, 0, last)
}

fn segment() -> Segment {
    let subnet: Subnet = "10.7.0.0/24".parse().expect("addresses");
    let name = format!("{}0002", tag().bridge(1).replacen("pb", "pt", 1));
    Segment {
        vni: 1,
        subnet,
        mtu: 1370,
        tunnel: Some(host(1)),
        taps: vec![Tap { name, vni: 1, mac: mac(1, subnet, address(2)), address: address(2) }],
        others: [(address(3), host(2))].into(),
        gateway: Gateway::At(host(2)),
    }
}

fn link(name: String) -> Link {
    Link { ifname: name, ..Link::default() }
}

fn tap_is_there() -> There {
    There { links: vec![link(segment().taps[0].name.clone())], ..There::default() }
}

/// What the kernel has after the lines of `bridge -batch`.
fn apply(there: &mut There, lines: &[String]) {
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let ["fdb", verb, mac, "dev", name, rest @ ..] = &words[..] else { panic!("{line}") };
        let dst = match rest {
            ["dst", dst, ..] => Some((*dst).to_owned()),
            _ => None,
        };
        let is_same = |entry: &Entry| match &dst {
            Some(_) if *mac == TO_ALL => {
                entry.ifname == *name && entry.mac == *mac && entry.dst == dst
            }
            Some(_) => entry.ifname == *name && entry.mac == *mac && entry.dst.is_some(),
            None => entry.mac == *mac && entry.dst.is_none(),
        };
        match (*verb, &dst) {
            ("delete", Some(_)) => there.entries.retain(|e| !(is_same(e) && e.dst == dst)),
            ("delete", None) => there.entries.retain(|e| !(is_same(e) && e.ifname == *name)),
            _ => {
                there.entries.retain(|e| !is_same(e));
                there.entries.push(Entry {
                    mac: (*mac).to_owned(),
                    ifname: (*name).to_owned(),
                    master: dst.is_none().then(|| "bridge".to_owned()),
                    state: if dst.is_none() { "static" } else { "permanent" }.to_owned(),
                    dst,
                    flags: Vec::new(),
                });
            }
        }
    }
}

#[test]
fn a_host_without_networks_has_nothing_and_keeps_what_is_not_the_agents() {
    let (bridge, vxlan) = (tag().bridge(1), tag().vxlan(1));
    let links = ["eth0", "br0", &bridge, &vxlan].map(|name| link(name.to_owned()));
    let there = There { links: links.into(), ..There::default() };
    let lines = super::links(&tag(), &[], &there);
    assert_eq!(lines, [format!("link delete dev {bridge}"), format!("link delete dev {vxlan}")]);
    assert!(super::links(&tag(), &[], &There::default()).is_empty());
}

#[test]
fn a_network_s_interfaces_are_made_and_learn_nothing() {
    let lines = super::links(&tag(), &[segment()], &tap_is_there()).join("\n");
    for part in [
        "type bridge mcast_snooping 0",
        "type vxlan id 1 local 100.127.0.1 dstport 51872 nolearning",
        "mtu 1370 master",
        "learning off flood off mcast_flood off neigh_suppress on",
    ] {
        assert!(lines.contains(part), "{part}: {lines}");
    }
}

#[test]
fn where_frames_go_follows_a_vm_to_and_from_this_host() {
    let mut there = tap_is_there();
    let here = segment();
    let lines = entries(&tag(), std::slice::from_ref(&here), &there);
    let (tap, vxlan) = (&here.taps[0].name, tag().vxlan(1));
    assert!(lines.contains(&format!("fdb replace 02:50:00:01:00:02 dev {tap} master static")));
    assert!(lines.contains(&format!("fdb replace 02:50:00:01:00:03 dev {vxlan} master static")));
    let to = format!("fdb replace 02:50:00:01:00:03 dev {vxlan} dst 100.127.0.2 self permanent");
    assert!(lines.contains(&to), "{lines:?}");
    apply(&mut there, &lines);
    assert!(entries(&tag(), std::slice::from_ref(&here), &there).is_empty(), "it is done");
    // The VM that is here goes to the third host: no moment has no entry for it.
    let mut away = here.clone();
    away.others.insert(address(2), host(3));
    let lines = entries(&tag(), std::slice::from_ref(&away), &there);
    assert!(lines.iter().all(|line| line.contains("replace")), "{lines:?}");
    apply(&mut there, &lines);
    assert!(entries(&tag(), std::slice::from_ref(&away), &there).is_empty());
    // And back: only the entry behind the tunnel is left to remove.
    let lines = entries(&tag(), std::slice::from_ref(&here), &there);
    assert_eq!(
        lines,
        [
            format!("fdb replace 02:50:00:01:00:02 dev {tap} master static"),
            format!("fdb delete 02:50:00:01:00:02 dev {vxlan} dst 100.127.0.3 self"),
        ]
    );
}

#[test]
fn only_the_gateway_hears_what_is_for_all() {
    let to_all = |segment: Segment| {
        let lines = entries(&tag(), &[segment], &There::default());
        let lines = lines.into_iter().filter(|line| line.contains(TO_ALL));
        lines.filter_map(|line| Some(line.split(' ').nth(6)?.to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(to_all(segment()), ["100.127.0.2"]);
    let others = [(address(3), host(2)), (address(4), host(3)), (address(5), host(3))].into();
    let here = Segment { gateway: Gateway::Here, others, ..segment() };
    assert_eq!(to_all(here), ["100.127.0.2", "100.127.0.3"]);
    assert!(to_all(Segment { gateway: Gateway::Nowhere, ..segment() }).is_empty());
    assert!(to_all(Segment { tunnel: None, ..segment() }).is_empty());
}

#[test]
fn each_address_has_its_hardware_address_and_old_ones_go() {
    let bridge = tag().bridge(1);
    let lines = neighbours(&tag(), &[segment()], &There::default());
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines[0].starts_with("neighbour replace 10.7.0.1 lladdr 02:50:00:01:00:01"));
    let old = |dst: &str, mac: &str, dev: &str| Neighbour {
        dst: dst.to_owned(),
        dev: dev.to_owned(),
        lladdr: mac.to_owned(),
    };
    let neighbours_there = vec![
        old("10.7.0.2", "02:50:00:01:00:02", &bridge),
        old("10.7.0.9", "02:50:00:01:00:09", &bridge),
        old("10.7.0.9", "02:50:00:01:00:09", "eth0"),
    ];
    let there = There { neighbours: neighbours_there, ..There::default() };
    let lines = neighbours(&tag(), &[segment()], &there);
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines.contains(&format!("neighbour delete 10.7.0.9 dev {bridge}")));
}
