//! The balancer's rule on small clusters.

use super::*;

const PRICE_S: f64 = 7.0;
const STEP_S: f64 = 10.0;
const GIB: u64 = 1 << 30;
const CPUS: f64 = 8.0;

fn host_id(number: usize) -> HostId {
    HostId::new(format!("h{number}")).expect("a name")
}

fn vm_id(number: usize) -> VmId {
    VmId::new(format!("vm{number}")).expect("a name")
}

fn host(number: usize) -> HostLoad {
    HostLoad {
        host: host_id(number),
        site: SiteId::new("home").expect("a name"),
        cpus: CPUS,
        other_cpus: Some(0.0),
        memory_stalled: Some(0.0),
        free_vcpus: 32,
        free_memory_bytes: 16 * GIB,
        takes_vms: true,
        comes: Comes::All,
        in_a_move: false,
    }
}

fn vm(number: usize, at: usize, wanted_cpus: f64) -> VmLoad {
    VmLoad {
        vm: vm_id(number),
        host: host_id(at),
        vcpus: 8,
        memory_bytes: GIB,
        used_cpus: Some(wanted_cpus),
        waited_cpus: Some(0.0),
        data_lost: Some(0.0),
        data_at: Vec::new(),
        taken_from: None,
        together: None,
        apart: None,
        may_move: true,
    }
}

fn look(hosts: Vec<HostLoad>, vms: Vec<VmLoad>) -> Look {
    Look { passed_s: STEP_S, hosts, vms }
}

/// Three VMs at the first host want 12 of its 8 processors; the second host is idle.
fn overloaded() -> Look {
    look(vec![host(0), host(1)], (0..3).map(|number| vm(number, 0, 4.0)).collect())
}

fn same_data(_: &VmId, _: &HostId) -> Option<Elsewhere> {
    Some(Elsewhere { price_s: PRICE_S, data_lost: 0.0 })
}

/// The look and the decision of the first move in so many looks.
fn first_move(look: &Look, looks: usize) -> Option<(usize, VmBalance)> {
    let mut accounts = Accounts::default();
    (0..looks).find_map(|number| {
        let decisions = balance(&mut accounts, look, same_data).decisions;
        decisions.into_iter().find(|decision| decision.moves).map(|decision| (number, decision))
    })
}

#[test]
fn accounts_that_were_kept_say_how_dear_moves_are_and_nothing_of_old_loads() {
    let mut accounts = Accounts::default();
    let look = overloaded();
    let moves = (0..5).any(|_| {
        balance(&mut accounts, &look, same_data).decisions.iter().any(|decision| decision.moves)
    });
    assert!(moves);
    let moved = accounts.clone().after(0.0);
    assert!((0..3).any(|number| moved.factor(&vm_id(number)) > 1.9), "{moved:?}");
    assert!((0..3).all(|number| moved.open(&vm_id(number)).count() == 0), "{moved:?}");
    assert_eq!(accounts.after(SURCHARGE_HALVES_IN_S), Accounts::default());
}

/// An idle host has programs too, so a VM that wants one processor never finds a whole one at a host with one.
#[test]
fn a_host_that_is_not_quite_idle_takes_a_vm_from_a_crowded_one_and_no_second_one() {
    let small = |number| HostLoad { cpus: 1.0, other_cpus: Some(0.1), ..host(number) };
    let at = |hosts: [usize; 4]| {
        let vms = hosts.iter().enumerate().map(|(number, at)| vm(number, *at, 1.0));
        look(vec![small(0), small(1)], vms.collect())
    };
    let moves = |look: &Look| {
        let mut accounts = Accounts::default();
        let decided = (0..30).map(|_| balance(&mut accounts, look, same_data).decisions);
        decided.flatten().filter(|decision| decision.moves).count()
    };
    assert!(moves(&at([0, 0, 0, 0])) > 0, "3.1 processors are wanted there, and 1.1 here");
    assert_eq!(moves(&at([0, 0, 0, 1])), 0, "2.1 processors are wanted at both");
}

#[test]
fn four_vms_of_a_crowded_host_end_two_and_two_and_stay_there() {
    let small = |number| HostLoad { cpus: 1.0, other_cpus: Some(0.15), ..host(number) };
    let mut at = [0; 4];
    let mut accounts = Accounts::default();
    let mut moves = Vec::new();
    for _ in 0..500 {
        let vms = at.iter().enumerate().map(|(number, at)| vm(number, *at, 0.47)).collect();
        let look = look(vec![small(0), small(1)], vms);
        let decisions = balance(&mut accounts, &look, same_data).decisions;
        if let Some(moved) = decisions.into_iter().find(|decision| decision.moves) {
            let number = (0..4).find(|number| vm_id(*number) == moved.vm).expect("it is there");
            at[number] = usize::from(moved.to == host_id(1));
            moves.push(number);
        }
    }
    assert_eq!(at.iter().sum::<usize>(), 2, "{at:?}");
    assert!(moves.len() == 2 && moves[0] != moves[1], "{moves:?}");
}

#[test]
fn a_vm_moves_when_its_host_has_lost_what_the_move_costs() {
    let mut short = overloaded();
    short.passed_s = 1.0;
    // 4 seconds are lost each second.
    let (looks, decision) = first_move(&short, 10).expect("a move");
    assert_eq!((looks, decision.to), (1, host_id(1)));
    assert!((decision.saved_s - 8.0).abs() < 1e-9 && (decision.needed_s - PRICE_S).abs() < 1e-9);
    let said = "moves h0 → h1: h1 would have saved 8.0 s in the last 2.0 s, its own and of 2 neighbours; a move costs 7.0 s";
    assert_eq!(decision.reason, said);
}

#[test]
fn a_vm_that_stays_says_its_figures() {
    let mut short = overloaded();
    short.passed_s = 1.0;
    let stays = balance(&mut Accounts::default(), &short, same_data).decisions;
    let said = "stays at h0: h1 would have saved 4.0 s in the last 1.0 s, its own and of 2 neighbours; a move costs 7.0 s";
    assert!(stays.iter().all(|decision| decision.reason == said), "{stays:?}");
}

#[test]
fn nothing_moves_where_nothing_is_lost() {
    let skewed = look(vec![host(0), host(1)], vec![vm(0, 0, 4.0), vm(1, 0, 4.0)]);
    assert_eq!(first_move(&skewed, 1000), None);
}

#[test]
fn an_unknown_load_is_not_idle() {
    let unknown = |change: fn(&mut Look)| {
        let mut look = overloaded();
        change(&mut look);
        first_move(&look, 100)
    };
    assert_eq!(unknown(|look| look.hosts[1].other_cpus = None), None, "of the target");
    assert_eq!(unknown(|look| look.hosts[0].other_cpus = None), None, "of the host");
    assert_eq!(unknown(|look| look.hosts[1].other_cpus = Some(f64::NAN)), None, "nonsense");
    assert_eq!(unknown(|look| look.hosts[1].other_cpus = Some(-100.0)), None, "below zero");
    assert_eq!(unknown(|look| look.vms[1].used_cpus = None), None, "of a neighbour");
    assert_eq!(unknown(|look| look.vms[1].used_cpus = Some(f64::INFINITY)), None, "endless");
}

#[test]
fn hosts_with_an_unknown_load_are_named() {
    let mut look = overloaded();
    look.vms[1].waited_cpus = None;
    assert_eq!(balance(&mut Accounts::default(), &look, same_data).not_known, [host_id(0)]);
}

#[test]
fn run_delay_is_wanted_and_not_more_than_the_vcpus() {
    let mut starved = overloaded();
    for load in &mut starved.vms {
        (load.used_cpus, load.waited_cpus) = (Some(2.7), Some(1.3));
    }
    starved.passed_s = 1.0;
    assert_eq!(first_move(&starved, 10).map(|(looks, _)| looks), Some(1));
    starved.vms.iter_mut().for_each(|load| load.waited_cpus = Some(1000.0));
    starved.vms[0].vcpus = 4;
    starved.vms[1].vcpus = 2;
    starved.vms[2].vcpus = 2;
    assert_eq!(first_move(&starved, 100), None);
}

#[test]
fn a_vm_goes_only_where_it_may_and_where_there_is_room() {
    let stays = |change: fn(&mut Look)| {
        let mut look = overloaded();
        change(&mut look);
        first_move(&look, 100).is_none()
    };
    assert!(stays(|look| look.hosts[1].takes_vms = false));
    assert!(stays(|look| look.hosts[1].free_memory_bytes = GIB - 1));
    assert!(stays(|look| look.hosts[1].free_vcpus = 7));
    assert!(stays(|look| look.hosts[1].other_cpus = Some(5.5)));
    assert!(stays(|look| look.hosts[1].in_a_move = true));
    assert!(stays(|look| look.hosts[0].in_a_move = true));
    assert!(stays(|look| look.vms.iter_mut().for_each(|vm| vm.may_move = false)));
    let nowhere = |_: &VmId, _: &HostId| None;
    assert_eq!(balance(&mut Accounts::default(), &overloaded(), nowhere), Balanced::default());
}

#[test]
fn a_move_that_a_person_made_is_not_undone() {
    let mut look = overloaded();
    look.hosts.push(host(2));
    look.vms.iter_mut().for_each(|vm| vm.taken_from = Some(host_id(1)));
    assert_eq!(first_move(&look, 100).expect("a move").1.to, host_id(2));
}

#[test]
fn groups_stay_together_and_apart() {
    fn group() -> Option<String> {
        Some("g".to_owned())
    }
    let grouped = |change: fn(&mut Look)| {
        let mut look = overloaded();
        look.vms.push(vm(3, 1, 0.5));
        change(&mut look);
        first_move(&look, 100).map(|(_, decision)| decision.vm)
    };
    assert_eq!(grouped(|look| look.vms.iter_mut().for_each(|vm| vm.apart = group())), None);
    assert_eq!(grouped(|look| look.vms[..3].iter_mut().for_each(|vm| vm.together = group())), None);
    let joins = grouped(|look| {
        look.vms.iter_mut().for_each(|vm| vm.may_move = vm.vm == vm_id(2));
        look.vms[2..].iter_mut().for_each(|vm| vm.together = group());
    });
    assert_eq!(joins, Some(vm_id(2)));
}

#[test]
fn a_vm_leaves_a_host_that_is_short_of_memory() {
    let mut short = look(vec![host(0), host(1)], vec![vm(0, 0, 1.0), vm(1, 0, 1.0)]);
    short.hosts[0].memory_stalled = Some(0.4);
    short.vms[1].memory_bytes = 3 * GIB;
    assert_eq!(first_move(&short, 100).map(|(_, decision)| decision.vm), Some(vm_id(1)));
    short.hosts[1].memory_stalled = Some(0.6);
    assert_eq!(first_move(&short, 100), None);
}

#[test]
fn the_next_best_target_is_taken_if_the_best_is_in_a_move() {
    let mut crowded = look(
        (0..4).map(host).collect(),
        (0..6).map(|number| vm(number, number / 3, 4.0)).collect(),
    );
    // What is lost to the network there makes the last host worse than the third.
    crowded.passed_s = 20.0;
    let third = |_: &VmId, host: &HostId| {
        let data_lost = if *host == host_id(3) { 0.1 } else { 0.0 };
        Some(Elsewhere { price_s: PRICE_S, data_lost })
    };
    let decisions = balance(&mut Accounts::default(), &crowded, third).decisions;
    let moves = decisions.iter().filter(|decision| decision.moves);
    let mut targets: Vec<&HostId> = moves.map(|decision| &decision.to).collect();
    targets.sort();
    assert_eq!(targets, [&host_id(2), &host_id(3)]);
}

#[test]
fn a_vm_goes_to_its_data_and_not_away_from_them() {
    let mut far = look(vec![host(0), host(1)], vec![vm(0, 0, 1.0)]);
    far.vms[0].data_lost = Some(0.5);
    let near = |_: &VmId, _: &HostId| Some(Elsewhere { price_s: PRICE_S, data_lost: 0.0 });
    let mut accounts = Accounts::default();
    let moves = |accounts: &mut Accounts| balance(accounts, &far, near).decisions[0].moves;
    assert_eq!([moves(&mut accounts), moves(&mut accounts)], [false, true]);
    // What the network costs there is more than what the processors cost here.
    let mut slight = overloaded();
    slight.vms.iter_mut().for_each(|vm| vm.used_cpus = Some(2.8));
    let away = |_: &VmId, _: &HostId| Some(Elsewhere { price_s: PRICE_S, data_lost: 0.6 });
    assert!(balance(&mut Accounts::default(), &slight, away).decisions.is_empty());
}

#[test]
fn a_host_takes_part_in_one_move_at_a_time() {
    let mut crowded = overloaded();
    crowded.hosts.push(host(2));
    let decisions = balance(&mut Accounts::default(), &crowded, same_data).decisions;
    assert_eq!(decisions.iter().filter(|decision| decision.moves).count(), 1);
    let said = decisions[1].reason.clone();
    assert!(said.contains("until another move is over"), "{said}");
}

#[test]
fn a_move_that_gained_nothing_makes_the_next_one_dearer() {
    let mut accounts = Accounts::default();
    let mut look = overloaded();
    let moved = balance(&mut accounts, &look, same_data).decisions.remove(0);
    let number = look.vms.iter().position(|vm| vm.vm == moved.vm).expect("it is there");
    look.vms[number].host = moved.to;
    // From then on both hosts are idle, so the move gains nothing.
    look.vms.iter_mut().for_each(|vm| vm.used_cpus = Some(0.1));
    let before = accounts.factor(&moved.vm);
    for _ in 0..=60 {
        balance(&mut accounts, &look, same_data);
    }
    assert!(accounts.factor(&moved.vm) > before * 1.5, "{accounts:?}");
}

#[test]
fn the_surcharge_goes_with_time() {
    let mut accounts = Accounts::default();
    let mut look = overloaded();
    let moved = balance(&mut accounts, &look, same_data).decisions.remove(0);
    look.vms.retain(|vm| vm.vm != moved.vm);
    look.vms.iter_mut().for_each(|vm| vm.used_cpus = Some(0.1));
    balance(&mut accounts, &look, same_data);
    assert!(accounts.factor(&moved.vm) > 1.9, "a VM on its way keeps its surcharge");
    look.passed_s = SURCHARGE_HALVES_IN_S;
    balance(&mut accounts, &look, same_data);
    assert_eq!(accounts, Accounts::default());
}

#[test]
fn a_vm_that_is_elsewhere_begins_with_empty_accounts() {
    let mut look = overloaded();
    look.passed_s = 1.0;
    let mut accounts = Accounts::default();
    balance(&mut accounts, &look, same_data);
    assert_eq!(accounts.open(&vm_id(0)).count(), 1);
    look.vms[0].host = host_id(1);
    look.vms[1].used_cpus = Some(0.1);
    balance(&mut accounts, &look, same_data);
    assert_eq!(accounts.open(&vm_id(0)).count(), 0);
    assert_eq!(accounts.open(&vm_id(2)).count(), 1);
}

#[test]
fn an_account_is_bounded_and_empties_when_the_load_is_elsewhere() {
    let mut accounts = Accounts::default();
    let mut look = overloaded();
    // No processors are left at the other host, but less is lost there.
    look.hosts[1].other_cpus = Some(6.0);
    for _ in 0..100 {
        balance(&mut accounts, &look, same_data);
    }
    let decision = balance(&mut accounts, &look, same_data).decisions.remove(0);
    assert!(!decision.moves && decision.saved_s <= MOST * PRICE_S, "{decision:?}");
    assert!(decision.reason.contains("no processors left"), "{}", decision.reason);
    look.hosts[0].cpus = 16.0;
    look.hosts[1].other_cpus = Some(16.0);
    balance(&mut accounts, &look, same_data);
    balance(&mut accounts, &look, same_data);
    assert_eq!(accounts, Accounts::default());
}

#[test]
fn a_look_that_comes_late_does_not_count_for_all_of_its_time() {
    let mut look = overloaded();
    look.passed_s = 1e6;
    look.vms.iter_mut().for_each(|vm| vm.used_cpus = Some(2.7));
    // 0.1 s is lost each second.
    assert_eq!(first_move(&look, 1), None);
}

#[test]
fn a_price_of_nothing_does_not_make_moves_free() {
    let free = |_: &VmId, _: &HostId| Some(Elsewhere { price_s: 0.0, data_lost: 0.0 });
    let decision = balance(&mut Accounts::default(), &overloaded(), free).decisions.remove(0);
    assert_eq!(decision.needed_s, LEAST_PRICE_S);
    let nonsense = |_: &VmId, _: &HostId| Some(Elsewhere { price_s: f64::NAN, data_lost: 0.0 });
    assert!(balance(&mut Accounts::default(), &overloaded(), nonsense).decisions.is_empty());
}

mod adversary;
mod data;

#[test]
fn a_change_that_was_decided_elsewhere_makes_the_next_one_dearer_until_that_is_long_ago() {
    let mut accounts = Accounts::default();
    let (vm, half_s) = (vm_id(7), SURCHARGE_HALVES_IN_S / 2.0);
    let [from, to] = [host_id(0), host_id(1)];
    accounts.note(&vm, (&from, &to), 0.0, half_s);
    assert!((accounts.doublings(&vm, half_s) - 1.0).abs() < 1e-9, "from when it was noted on");
    let before = accounts.doublings(&vm, half_s);
    accounts.note(&vm, (&to, &from), before, half_s);
    assert!((accounts.doublings(&vm, half_s) - 2.0).abs() < 1e-9);
    let later_s = half_s + SURCHARGE_HALVES_IN_S;
    assert!((accounts.doublings(&vm, later_s) - 1.0).abs() < 1e-9);
    assert_eq!(accounts.doublings(&vm, 10.0 * SURCHARGE_HALVES_IN_S), 0.0);
    // What is long ago is not kept.
    let age_s = 10.0 * SURCHARGE_HALVES_IN_S;
    accounts.note(&vm_id(8), (&from, &to), 0.0, age_s);
    assert_eq!(accounts.doublings(&vm, 0.0), 0.0);
}

#[test]
fn what_is_said_of_a_vm_is_what_was_decided_with() {
    let mut accounts = Accounts::default();
    let mut look = overloaded();
    (look.passed_s, look.vms[0].taken_from) = (1.0, Some(host_id(1)));
    let decision = balance(&mut accounts, &look, same_data).decisions.remove(0);
    let there = |_: &HostId| Ok(Elsewhere { price_s: PRICE_S, data_lost: 0.0 });
    let said = explain(&accounts, &look, &decision.vm, there).expect("it is there");
    assert_eq!((said.targets[0].host.clone(), said.price_factor), (decision.to, 1.0));
    assert_eq!(said.targets[0].saved_s, decision.saved_s);
    assert_eq!(said.targets[0].needed_s, Some(decision.needed_s));
    assert_eq!(said.measured.expect("measured").neighbours, 2);
    let taken = explain(&accounts, &look, &vm_id(0), there).expect("it is there");
    assert_eq!(taken.targets[0].why_not, TAKEN);
    assert!(explain(&accounts, &look, &vm_id(9), there).is_none());
}
