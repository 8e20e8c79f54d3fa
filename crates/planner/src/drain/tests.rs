use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

fn demand(mib: u64) -> Demand {
    Demand { cpus: 1, memory_bytes: mib * MIB }
}

fn site(name: &str) -> SiteId {
    SiteId::new(name).expect("a name")
}

fn other(name: &str, free_mib: u64) -> Other {
    Other {
        id: host(name),
        site: site("home"),
        free: Demand { cpus: 16, memory_bytes: free_mib * MIB },
        packs: false,
        pool_free_bytes: Some(1000 * MIB),
        refusal: None,
    }
}

fn way(to: &str, seconds: f64) -> Way {
    Way { to: host(to), cost: Ok(Cost { seconds, bytes: 100 * MIB }) }
}

fn refused(to: &str, why: &str, passes: bool) -> Way {
    Way { to: host(to), cost: Err(Refusal { why: why.to_owned(), passes }) }
}

fn vm(name: &str, mib: u64, ways: Vec<Way>) -> LeavingVm {
    LeavingVm {
        name: name.to_owned(),
        demand: demand(mib),
        now: Now::Ready,
        left: None,
        disk_bytes: Some(10 * MIB),
        ways,
        together: None,
    }
}

fn volume(name: &str, ways: Vec<Way>) -> LeavingVolume {
    LeavingVolume {
        name: name.to_owned(),
        bytes: Some(10 * MIB),
        now: Now::Ready,
        with: None,
        beside: None,
        group: None,
        ways,
    }
}

fn leaving(others: Vec<Other>, vms: Vec<LeavingVm>) -> Leaving {
    let (gangs, volumes, gateways) = (Vec::new(), Vec::new(), Vec::new());
    let (host, site) = (host("old"), site("home"));
    Leaving { host, site, others, waits_for_ends: true, vms, gangs, volumes, gateways }
}

/// A step in short: what becomes of which thing, and where.
fn short(steps: &[DrainStep]) -> Vec<String> {
    let one = |step: &DrainStep| {
        let to: Vec<&str> = step.to.iter().map(HostId::as_str).collect();
        format!("{} {:?} {}", step.name, step.fate, to.join(",")).trim_end().to_owned()
    };
    steps.iter().map(one).collect()
}

fn why<'a>(steps: &'a [DrainStep], name: &str) -> &'a str {
    &steps.iter().find(|step| step.name == name).expect("a step").why
}

#[test]
fn what_leaves_soonest_leaves_first_and_large_vms_choose_first() {
    let ways = |seconds| vec![way("h1", seconds), way("h2", seconds)];
    let vms = vec![vm("small", 100, ways(1.0)), vm("large", 900, ways(9.0))];
    let steps = plan(&leaving(vec![other("h1", 1000), other("h2", 500)], vms));
    assert_eq!(short(&steps), ["small Moves h2", "large Moves h1"], "h1 has not room for both");
}

#[test]
fn of_hosts_that_are_as_near_the_emptiest_one_is_taken() {
    let vms = vec![vm("vm", 100, vec![way("h1", 4.0), way("h2", 4.4), way("h3", 40.0)])];
    let others = vec![other("h1", 200), other("h2", 300), other("h3", 9000)];
    assert_eq!(short(&plan(&leaving(others, vms))), ["vm Moves h2"]);
}

#[test]
fn a_host_of_the_same_site_is_taken_before_one_beyond_the_wan_that_has_more_room() {
    let far = Other { site: site("cloud"), pool_free_bytes: Some(9000 * MIB), ..other("h1", 9000) };
    let ways = || vec![way("h1", 0.1), way("h2", 0.4)];
    let of_vm = leaving(vec![far.clone(), other("h2", 300)], vec![vm("vm", 100, ways())]);
    assert_eq!(short(&plan(&of_vm)), ["vm Moves h2"]);
    let volumes = vec![volume("data", ways())];
    let of_volume = Leaving { volumes, ..leaving(vec![far, other("h2", 300)], Vec::new()) };
    assert_eq!(short(&plan(&of_volume)), ["data Moves h2"]);
}

#[test]
fn hosts_that_were_not_looked_at_are_no_refusal() {
    let others = vec![other("h1", 50), other("h2", 9000)];
    let steps = plan(&leaving(others, vec![vm("vm", 100, vec![way("h1", 1.0)])]));
    assert_eq!(short(&steps), ["vm Waits"]);
    assert!(why(&steps, "vm").ends_with("further hosts are looked at later"), "{steps:?}");
}

#[test]
fn a_job_that_ends_before_its_move_would_be_over_is_waited_for() {
    let estimate = |expected_s| Some(Estimate { expected_s, low_s: 0.0, high_s: 100.0 });
    let ends_in = |name: &str, seconds, left_s| LeavingVm {
        left: estimate(left_s),
        ..vm(name, 100, vec![way("h1", seconds)])
    };
    // The second one has its turn after 4 s, and would be there after 9.
    let vms =
        vec![ends_in("first", 4.0, 60.0), ends_in("second", 5.0, 8.0), ends_in("third", 6.0, 11.0)];
    let steps = plan(&leaving(vec![other("h1", 1000)], vms));
    assert_eq!(short(&steps), ["first Moves h1", "third Moves h1", "second Waits"]);
    assert!(
        why(&steps, "second").starts_with("it ends in about 8.0 s"),
        "{}",
        why(&steps, "second")
    );
}

#[test]
fn a_job_whose_end_is_not_known_is_not_waited_for() {
    let steps =
        plan(&leaving(vec![other("h1", 1000)], vec![vm("vm", 100, vec![way("h1", 500.0)])]));
    assert_eq!(short(&steps), ["vm Moves h1"]);
}

#[test]
fn each_reason_why_a_vm_cant_leave_is_named_once_with_its_hosts() {
    let ways = vec![
        refused("h1", "its processor differs", false),
        refused("h2", "its processor differs", false),
        way("h3", 1.0),
    ];
    let drained = Refusal { why: "it is drained too".to_owned(), passes: false };
    let others = vec![
        other("h1", 1000),
        other("h2", 1000),
        other("h3", 50),
        Other { refusal: Some(drained), ..other("h4", 1000) },
    ];
    let steps = plan(&leaving(others, vec![vm("vm", 100, ways)]));
    assert_eq!(short(&steps), ["vm Stays"]);
    let why = why(&steps, "vm");
    assert!(why.starts_with("h1, h2: its processor differs; h3: no room"), "{why}");
    assert!(why.ends_with("h4: it is drained too"), "{why}");
}

#[test]
fn the_last_host_says_that_there_is_no_other_one() {
    let mut facts = leaving(Vec::new(), vec![vm("vm", 100, Vec::new())]);
    facts.volumes = vec![volume("data", Vec::new())];
    let steps = plan(&facts);
    assert_eq!(short(&steps), ["vm Stays", "data Stays"]);
    assert!(steps.iter().all(|step| step.why == "there is no other host"), "{steps:?}");
}

#[test]
fn a_gateway_whose_vms_are_elsewhere_is_waited_for() {
    let gateways = vec!["blue".to_owned()];
    let steps = plan(&Leaving { gateways, ..leaving(vec![other("h2", 100)], Vec::new()) });
    assert_eq!(short(&steps), ["blue Waits"]);
    assert!(why(&steps, "blue").contains("gateway"), "{steps:?}");
}

#[test]
fn figures_that_are_missing_make_a_host_no_target_and_are_waited_for() {
    let silent = Refusal { why: "it has not reported yet".to_owned(), passes: true };
    let others = vec![
        Other { refusal: Some(silent), ..other("h1", 1000) },
        Other { pool_free_bytes: None, ..other("h2", 1000) },
    ];
    let ways = vec![way("h1", 1.0), way("h2", 1.0)];
    let steps = plan(&leaving(others.clone(), vec![vm("vm", 100, ways.clone())]));
    assert_eq!(short(&steps), ["vm Waits"]);
    assert!(why(&steps, "vm").contains("h2: how much its pool has free is not known yet"));
    let unknown = LeavingVm { disk_bytes: None, ..vm("vm", 100, ways) };
    let steps = plan(&leaving(vec![other("h1", 1000)], vec![unknown]));
    assert_eq!(short(&steps), ["vm Waits"]);
}

#[test]
fn what_moves_already_comes_first_and_takes_no_room_twice() {
    let moving = LeavingVm { now: Now::Moving(vec![host("h1")]), ..vm("a", 900, Vec::new()) };
    let waits =
        LeavingVm { now: Now::Waits("it is starting".to_owned()), ..vm("b", 100, Vec::new()) };
    let vms = vec![waits, vm("c", 100, vec![way("h1", 1.0)]), moving];
    let steps = plan(&leaving(vec![other("h1", 150)], vms));
    assert_eq!(short(&steps), ["a Moving h1", "c Moves h1", "b Waits"]);
}

/// With a VM at each of these hosts, that may go to `h1` and `h2`.
fn gang(hosts: &[&str], groups: &Groups) -> LeavingGang {
    LeavingGang {
        name: "gang".to_owned(),
        demand: demand(100),
        now: Now::Ready,
        left: None,
        disk_bytes: Some(10 * MIB),
        hosts: hosts.iter().map(|name| host(name)).collect(),
        sent: Vec::new(),
        ways: vec![way("h1", 2.0), way("h2", 3.0)],
        groups: groups.clone(),
    }
}

#[test]
fn a_gang_moves_as_a_whole_or_says_why_not() {
    let gang = |hosts: &[&str]| gang(hosts, &Groups::default());
    let mut facts = leaving(vec![other("h1", 150), other("h2", 150)], Vec::new());
    facts.gangs = vec![gang(&["old", "h2", "old"])];
    let steps = plan(&facts);
    let mut to = steps[0].to.iter().map(HostId::as_str).collect::<Vec<_>>();
    assert_eq!((steps[0].fate, to[1], steps[0].takes_s), (DrainFate::Moves, "h2", Some(5.0)));
    to.sort_unstable();
    assert_eq!(to, ["h1", "h2", "h2"], "the one that was there, and one more at each");
    facts.gangs = vec![gang(&["old", "old", "old"])];
    let steps = plan(&facts);
    assert_eq!(short(&steps), ["gang Stays"]);
    assert!(why(&steps, "gang").starts_with("no site has room for all 3 of its VMs"), "{steps:?}");
}

#[test]
fn a_gang_goes_only_where_the_pools_have_room_for_its_disks() {
    let mut facts = leaving(vec![other("h1", 900), other("h2", 900)], Vec::new());
    facts.gangs = vec![gang(&["old", "old"], &Groups::default())];
    facts.others[0].pool_free_bytes = Some(15 * MIB);
    facts.others[1].pool_free_bytes = Some(5 * MIB);
    let steps = plan(&facts);
    assert_eq!(short(&steps), ["gang Stays"], "h1 has room for the disks of one, h2 for none");
    facts.others[0].pool_free_bytes = Some(25 * MIB);
    assert_eq!(short(&plan(&facts)), ["gang Moves h1,h1"]);
    facts.gangs[0].disk_bytes = None;
    let steps = plan(&facts);
    assert_eq!(short(&steps), ["gang Waits"]);
    assert!(why(&steps, "gang").contains(DISKS_NOT_KNOWN), "{steps:?}");
}

#[test]
fn a_pool_keeps_the_room_for_disks_whose_vms_have_left_for_there_or_leave_now() {
    let mut facts = leaving(vec![other("h1", 900)], vec![vm("next", 100, vec![way("h1", 2.0)])]);
    facts.others[0].pool_free_bytes = Some(100 * MIB);
    facts.vms[0].disk_bytes = Some(60 * MIB);
    let beside = Some(("gone".to_owned(), host("h1")));
    let disk = volume("of-gone", vec![way("h1", 1.0)]);
    facts.volumes = vec![LeavingVolume { bytes: Some(80 * MIB), beside, ..disk }];
    let steps = plan(&facts);
    assert_eq!(short(&steps), ["of-gone Moves h1", "next Waits"]);
    let said = "h1: no room on the disk: 20 MiB are free in its pool, and 60 MiB would come, after 80 MiB that come there now";
    assert_eq!(why(&steps, "next"), said);
    // It is copied: some of it may be there, and is not free already.
    facts.volumes[0].now = Now::Moving(vec![host("h1")]);
    assert_eq!(short(&plan(&facts)), ["of-gone Moving h1", "next Waits"]);
    facts.volumes.clear();
    facts.gangs = vec![gang(&["old", "h1", "old"], &Groups::default())];
    facts.gangs[0].disk_bytes = Some(30 * MIB);
    facts.gangs[0].now = Now::Moving(vec![host("h1"); 3]);
    assert_eq!(short(&plan(&facts)), ["gang Moving h1,h1,h1", "next Waits"]);
    facts.gangs[0].disk_bytes = Some(20 * MIB);
    assert_eq!(short(&plan(&facts)), ["gang Moving h1,h1,h1", "next Moves h1"]);
}

#[test]
fn a_pool_keeps_no_room_for_a_disk_that_can_t_follow_its_vm() {
    let mut facts = leaving(vec![other("h1", 900)], vec![vm("next", 100, vec![way("h1", 2.0)])]);
    facts.others[0].pool_free_bytes = Some(100 * MIB);
    facts.vms[0].disk_bytes = Some(60 * MIB);
    let beside = Some(("gone".to_owned(), host("h1")));
    let refused = Err(Refusal { why: "may not leave its site".to_owned(), passes: false });
    let ways = vec![Way { to: host("h1"), cost: refused }];
    facts.volumes =
        vec![LeavingVolume { bytes: Some(80 * MIB), beside, ..volume("of-gone", ways) }];
    assert_eq!(short(&plan(&facts)), ["next Moves h1", "of-gone Stays"]);
    // Nor for one that is larger than what is free.
    facts.volumes[0].ways = vec![way("h1", 1.0)];
    facts.volumes[0].bytes = Some(200 * MIB);
    assert_eq!(short(&plan(&facts)), ["next Moves h1", "of-gone Stays"]);
}

#[test]
fn at_a_site_that_packs_a_vm_goes_to_the_fullest_host_that_has_room() {
    let packs = |name, mib| Other { packs: true, ..other(name, mib) };
    let ways = vec![way("h1", 1.0), way("h2", 1.0), way("h3", 1.0)];
    let others = vec![packs("h1", 900), packs("h2", 300), packs("h3", 50)];
    let steps = plan(&leaving(others, vec![vm("a", 100, ways)]));
    assert_eq!(short(&steps), ["a Moves h2"]);
}

#[test]
fn the_vms_of_a_gang_that_are_kept_apart_go_to_different_hosts_or_stay() {
    let groups = Groups { apart: Some("default~db".to_owned()), ..Groups::default() };
    let gang = |hosts: &[&str]| gang(hosts, &groups);
    let mut facts = leaving(vec![other("h1", 150), other("h2", 950)], Vec::new());
    facts.gangs = vec![gang(&["old", "h2"])];
    assert_eq!(short(&plan(&facts)), ["gang Moves h1,h2"]);
    facts.others.remove(0);
    assert_eq!(short(&plan(&facts)), ["gang Stays"]);
}

fn kept_together(vm: LeavingVm) -> LeavingVm {
    LeavingVm { together: Some("default~web".to_owned()), ..vm }
}

#[test]
fn vms_that_are_kept_together_leave_for_one_host_that_has_room_for_all() {
    let ways = vec![way("h1", 1.0), way("h2", 1.0)];
    let vms = ["a", "b"].map(|name| kept_together(vm(name, 200, ways.clone())));
    let facts = leaving(vec![other("h1", 300), other("h2", 500)], vms.to_vec());
    assert_eq!(short(&plan(&facts)), ["a Moves h2", "b Moves h2"]);
    let full = leaving(vec![other("h1", 300), other("h2", 350)], vms.to_vec());
    let steps = plan(&full);
    assert_eq!(short(&steps), ["a Stays", "b Stays"]);
    let said = why(&steps, "b");
    assert!(
        said.starts_with("the VMs of group web are kept together, and no host can take all 2: "),
        "{said}"
    );
    let alone = leaving(vec![other("h1", 300)], vms[..1].to_vec());
    assert_eq!(short(&plan(&alone)), ["a Moves h1"]);
}

#[test]
fn a_vm_that_can_not_leave_holds_those_that_are_kept_together_with_it() {
    let stays = LeavingVm {
        now: Now::Stays("its file says move: never".to_owned()),
        ..kept_together(vm("b", 100, Vec::new()))
    };
    let vms = vec![kept_together(vm("a", 100, vec![way("h1", 1.0)])), stays];
    let steps = plan(&leaving(vec![other("h1", 900)], vms.clone()));
    assert_eq!(short(&steps), ["a Stays", "b Stays"]);
    assert_eq!(why(&steps, "a"), "it is kept together with b, which can't leave");
    let moves = LeavingVm { now: Now::Moving(vec![host("h1")]), ..vms[1].clone() };
    let steps = plan(&leaving(vec![other("h1", 900)], vec![vms[0].clone(), moves]));
    assert_eq!(short(&steps), ["b Moving h1", "a Moves h1"], "it follows");
}

#[test]
fn a_volume_comes_after_its_vm_and_before_the_next_one_leaves() {
    let ways = vec![way("h1", 1.0)];
    let mut facts = leaving(
        vec![other("h1", 1000)],
        vec![vm("next", 100, ways.clone()), vm("stays", 5000, ways.clone())],
    );
    let with = |name: &str| Some((DrainedKind::Vm, name.to_owned()));
    let beside = Some(("gone".to_owned(), host("h1")));
    facts.volumes = vec![
        LeavingVolume { with: with("next"), ..volume("of-next", ways.clone()) },
        LeavingVolume { with: with("stays"), ..volume("of-stays", ways.clone()) },
        LeavingVolume { beside, ..volume("of-gone", vec![way("h1", 50.0)]) },
    ];
    let steps = plan(&facts);
    assert_eq!(
        short(&steps),
        ["of-gone Moves h1", "next Moves h1", "of-next Waits", "stays Stays", "of-stays Stays"]
    );
    assert_eq!(why(&steps, "of-next"), "it comes after VM next, which uses it");
}

#[test]
fn the_disks_of_a_vm_that_is_off_go_to_one_host() {
    let ways = vec![way("h1", 1.0), way("h2", 1.0)];
    let disk = |name: &str| LeavingVolume {
        group: Some("vm".to_owned()),
        bytes: Some(400 * MIB),
        ..volume(name, ways.clone())
    };
    let mut facts = leaving(vec![other("h1", 10), other("h2", 10)], Vec::new());
    facts.volumes = vec![disk("root"), disk("data")];
    let steps = plan(&facts);
    assert_eq!(steps[0].to, steps[1].to, "{steps:?}");
    // One after the other has left, the rest follows it.
    facts.volumes =
        vec![LeavingVolume { beside: Some(("vm".to_owned(), host("h2"))), ..disk("data") }];
    assert_eq!(short(&plan(&facts)), ["data Moves h2"]);
}

proptest! {
    /// Whatever is planned fits where it goes, all together.
    #[test]
    fn no_target_is_given_more_than_it_has(
        vms in proptest::collection::vec((1u64..400, 0.1..90.0f64, 0.1..90.0f64), 0..12),
        free in (0u64..1200, 0u64..1200),
    ) {
        let of = |(number, (mib, one_s, other_s)): (usize, &(u64, f64, f64))| {
            vm(&format!("vm{number}"), *mib, vec![way("h1", *one_s), way("h2", *other_s)])
        };
        let all: Vec<LeavingVm> = vms.iter().enumerate().map(of).collect();
        let steps = plan(&leaving(vec![other("h1", free.0), other("h2", free.1)], all.clone()));
        prop_assert_eq!(steps.len(), all.len());
        for (name, free) in [("h1", free.0), ("h2", free.1)] {
            let there = steps.iter().filter(|step| step.to == [host(name)]);
            let taken: u64 = there
                .map(|step| all.iter().find(|vm| vm.name == step.name).expect("it").demand.memory_bytes)
                .sum();
            prop_assert!(taken <= free * MIB, "{} takes {} of {} MiB", name, taken / MIB, free);
        }
    }
}
