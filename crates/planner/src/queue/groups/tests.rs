use proptest::prelude::*;

use super::*;

fn id(name: &str) -> JobId {
    JobId::new(name).unwrap()
}

fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

fn groups(of: &str, together: Option<&str>, apart: Option<&str>) -> Groups {
    let group = |name: &str| name.parse().unwrap();
    Groups::of(of, &HostRules { together: together.map(group), apart: apart.map(group) })
}

#[test]
fn a_vm_is_kept_apart_from_the_others_of_its_group_and_of_its_tenant() {
    let mut all = Grouped::default();
    all.add(&id("acme~a"), &groups("acme~a", None, Some("db")), &host("h1"));
    let bounds =
        |of: &str, group: &str| all.bounds(&id(of), &groups(of, None, Some(group)), |_| true);
    let why = bounds("acme~b", "db").why_not(&host("h1")).expect("another one is there");
    assert_eq!(why, "acme~a is there, and the VMs of group db are kept apart");
    assert!(bounds("acme~b", "db").allow(&host("h2")));
    assert!(bounds("acme~b", "web").allow(&host("h1")), "another group");
    assert!(bounds("blue~b", "db").allow(&host("h1")), "another tenant");
    assert!(bounds("acme~a", "db").allow(&host("h1")), "the VM itself");
    assert_eq!(bounds("acme~b", "db").in_words(), "it is kept apart from acme~a at h1");
}

#[test]
fn a_vm_goes_where_its_group_is_unless_nothing_binds_it_there() {
    let of = |name: &str| groups(name, Some("web"), None);
    let mut all = Grouped::default();
    assert!(all.bounds(&id("a"), &of("a"), |_| true).allow(&host("h1")), "it is the first one");
    all.add(&id("a"), &of("a"), &host("h1"));
    let bounds = all.bounds(&id("b"), &of("b"), |_| true);
    assert!(bounds.allow(&host("h1")));
    let why = bounds.why_not(&host("h2")).expect("the group is at h1");
    assert_eq!(why, "the VMs of group web are kept together: a at h1");
    let drained = all.bounds(&id("b"), &of("b"), |at| *at != host("h1"));
    assert!(drained.allow(&host("h2")));
    assert!(all.bounds(&id("a"), &of("a"), |_| true).allow(&host("h2")), "it is alone");
}

/// What happens to a VM of a tenant.
#[derive(Debug, Clone)]
enum Event {
    Comes { vm: usize, host: usize },
    Goes { vm: usize },
}

proptest! {
    /// Whatever comes and goes in which order: where the bounds are kept, no host has two VMs of a group that is kept apart, and a group
    /// that is kept together is at one host.
    #[test]
    fn whoever_keeps_to_the_bounds_keeps_the_rules(
        rules in proptest::collection::vec((0usize..3, 0usize..3), 6),
        events in proptest::collection::vec(
            (any::<bool>(), 0usize..6, 0usize..4).prop_map(|(comes, vm, host)| match comes {
                true => Event::Comes { vm, host },
                false => Event::Goes { vm },
            }),
            0..60,
        ),
    ) {
        let name = |vm: usize| id(&format!("vm{vm}"));
        let at = |number: usize| host(&format!("h{number}"));
        let group = |number: usize| ["a", "b"].get(number).copied();
        let of = |vm: usize| {
            let (together, apart) = rules[vm];
            groups(name(vm).as_str(), group(together), group(apart))
        };
        let mut places: BTreeMap<usize, usize> = BTreeMap::new();
        for event in events {
            match event {
                Event::Goes { vm } => drop(places.remove(&vm)),
                Event::Comes { vm, host } => {
                    let mut all = Grouped::default();
                    places.iter().for_each(|(vm, host)| all.add(&name(*vm), &of(*vm), &at(*host)));
                    // The model: each other VM is asked.
                    let others = || places.iter().filter(|(other, _)| **other != vm);
                    let is_of = |one: &Option<String>, other: &Option<String>| one.is_some() && one == other;
                    let is_apart = others().all(|(other, there)| *there != host || !is_of(&of(vm).apart, &of(*other).apart));
                    let group: Vec<usize> = others()
                        .filter(|(other, _)| is_of(&of(vm).together, &of(**other).together))
                        .map(|(_, there)| *there)
                        .collect();
                    let joins = group.is_empty() || group.contains(&host);
                    let bounds = all.bounds(&name(vm), &of(vm), |_| true);
                    prop_assert_eq!(bounds.allow(&at(host)), is_apart && joins);
                    prop_assert_eq!(bounds.why_not(&at(host)).is_none(), is_apart && joins);
                    if bounds.allow(&at(host)) {
                        places.insert(vm, host);
                    }
                    for (one, there) in &places {
                        for (other, host) in places.iter().filter(|(other, _)| *other > one) {
                            prop_assert!(there != host || !is_of(&of(*one).apart, &of(*other).apart));
                            prop_assert!(there == host || !is_of(&of(*one).together, &of(*other).together));
                        }
                    }
                }
            }
        }
    }
}
