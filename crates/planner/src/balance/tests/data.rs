//! VMs whose data are at another site.

use super::*;

/// The first host is at the site that is looked at; the second one is at another site, and has the VM's data.
fn far(comes: Comes) -> Look {
    let there = HostLoad { site: SiteId::new("cloud").expect("a name"), comes, ..host(1) };
    let mut reads = vm(0, 0, 0.2);
    (reads.data_lost, reads.data_at) = (Some(0.5), vec![host_id(1)]);
    look(vec![host(0), there], vec![reads])
}

/// The network to the data at the second host costs 1 % of the time from beside it.
fn near(_: &VmId, to: &HostId) -> Option<Elsewhere> {
    let data_lost = if *to == host_id(1) { 0.01 } else { 0.5 };
    Some(Elsewhere { price_s: PRICE_S, data_lost })
}

#[test]
fn a_vm_goes_to_its_data_at_another_site_and_says_what_it_has_lost() {
    let (mut accounts, look) = (Accounts::default(), far(Comes::ForData));
    let mut decide = || balance(&mut accounts, &look, near).decisions.remove(0);
    let stays = decide();
    assert!(!stays.moves, "{stays:?}");
    let said = "stays at h0: has lost 5.0 s of the last 10 s to the network to its data at h1, would have lost 0.10 s at h1; a move costs 7.0 s";
    assert_eq!(stays.reason, said);
    let moves = decide();
    let said = "moves h0 → h1: has lost 10 s of the last 20 s to the network to its data at h1, would have lost 0.20 s at h1; a move costs 7.0 s";
    assert_eq!((moves.moves, moves.reason.as_str()), (true, said));
    assert!(accounts.factor(&vm_id(0)) > 1.9, "the next one is dearer");
}

#[test]
fn processors_that_are_not_left_beside_the_data_do_not_stand_against_a_move_there() {
    let (mut accounts, mut look) = (Accounts::default(), far(Comes::ForData));
    look.hosts[1].other_cpus = Some(CPUS);
    let decision = balance(&mut accounts, &look, near).decisions.remove(0);
    assert_eq!(decision.to, host_id(1));
    let there = |_: &HostId| Ok(Elsewhere { price_s: PRICE_S, data_lost: 0.01 });
    let why_not = |accounts: &Accounts| {
        let said = explain(accounts, &look, &vm_id(0), there).expect("it is there");
        said.targets[0].why_not.clone()
    };
    assert_eq!(why_not(&accounts), "");
    assert!(why_not(&Accounts::default()).contains("no processors left"));
}

#[test]
fn a_site_that_is_not_switched_on_gets_no_vm_and_is_advised() {
    let (mut accounts, look) = (Accounts::default(), far(Comes::ForDataAdvised));
    for _ in 0..3 {
        balance(&mut accounts, &look, near);
    }
    let decision = balance(&mut accounts, &look, near).decisions.remove(0);
    assert!(decision.moves && decision.reason.starts_with("would move h0 → h1: "), "{decision:?}");
    assert_eq!(accounts.factor(&vm_id(0)), 1.0, "nothing has moved");
    // It is as dear when that site is switched on.
    let decision = balance(&mut accounts, &far(Comes::ForData), near).decisions.remove(0);
    assert!(decision.reason.starts_with("moves h0 → h1: "), "{decision:?}");
}

#[test]
fn a_move_that_is_only_advised_keeps_no_vm_from_a_host_where_it_loses_less() {
    let mut look = far(Comes::ForDataAdvised);
    look.hosts.push(host(2));
    look.vms.extend((1..3).map(|number| vm(number, 0, 4.0)));
    look.vms[0].used_cpus = Some(4.0);
    let mut accounts = Accounts::default();
    let decisions = balance(&mut accounts, &look, near).decisions;
    let moves: Vec<&VmBalance> = decisions.iter().filter(|decision| decision.moves).collect();
    let real: Vec<&&VmBalance> = moves.iter().filter(|one| one.to == host_id(2)).collect();
    assert!(real.len() == 1 && real[0].reason.starts_with("moves h0 → h2: "), "{decisions:?}");
}

#[test]
fn a_vm_without_data_there_does_not_go_to_another_site() {
    let mut look = overloaded();
    look.hosts[1].comes = Comes::ForData;
    assert_eq!(first_move(&look, 100), None);
    let said = explain(&Accounts::default(), &look, &vm_id(0), |_| Err(String::new()));
    assert!(said.expect("it is there").targets.is_empty(), "and the host is not named");
}

/// Its host is overloaded, and the one that has its data is idle.
#[test]
fn a_vm_does_not_leave_its_site_for_a_cpu_because_it_has_data_there_that_it_does_not_wait_for() {
    let mut look = far(Comes::ForData);
    look.vms.extend((1..3).map(|number| vm(number, 0, 4.0)));
    (look.vms[0].used_cpus, look.vms[0].data_lost) = (Some(4.0), Some(0.0));
    let idle = |_: &VmId, _: &HostId| Some(Elsewhere { price_s: PRICE_S, data_lost: 0.0 });
    let mut accounts = Accounts::default();
    for _ in 0..100 {
        assert_eq!(balance(&mut accounts, &look, idle).decisions, [], "{accounts:?}");
    }
    // With a host of its own site it is the CPU that counts.
    look.hosts.push(host(2));
    let decisions = (0..3).flat_map(|_| balance(&mut accounts, &look, idle).decisions);
    let moved = decisions.into_iter().find(|one| one.moves).expect("a move");
    assert_eq!(moved.to, host_id(2));
}

#[test]
fn what_the_network_to_its_data_costs_has_to_pay_alone_for_a_move_to_another_site() {
    let mut look = far(Comes::ForData);
    look.vms.extend((1..3).map(|number| vm(number, 0, 4.0)));
    look.vms.iter_mut().for_each(|vm| vm.may_move = vm.vm == vm_id(0));
    // In each second 4 s are lost for want of a CPU, and 0.15 s more to the network than there.
    (look.vms[0].used_cpus, look.vms[0].data_lost) = (Some(4.0), Some(0.16));
    let mut accounts = Accounts::default();
    let mut decide = |_| balance(&mut accounts, &look, near).decisions.remove(0);
    let decisions: Vec<VmBalance> = (0..5).map(&mut decide).collect();
    let moves: Vec<bool> = decisions.iter().map(|decision| decision.moves).collect();
    assert_eq!(moves, [false, false, false, false, true], "the move costs 7.0 s");
    let said = "moves h0 → h1: has lost 8.0 s of the last 50 s to the network to its data at h1, would have lost 0.50 s at h1; a move costs 7.0 s";
    assert_eq!(decisions[4].reason, said);
}

#[test]
fn what_is_remembered_of_a_move_goes_with_the_vm_to_the_accounts_of_the_other_site() {
    let (mut home, mut look) = (Accounts::default(), far(Comes::ForData));
    let moved =
        (0..5).flat_map(|_| balance(&mut home, &look, near).decisions).find(|one| one.moves);
    assert!(moved.is_some());
    let mut cloud = Accounts::default();
    cloud.adopt(&mut home, (&vm_id(0), &host_id(1)), (0.0, SURCHARGE_HALVES_IN_S / 2.0));
    assert!(!home.has(&vm_id(0)) && cloud.on_trial(&vm_id(0)) == Some(&host_id(0)));
    assert!((cloud.doublings(&vm_id(0), 0.0) - 0.5).abs() < 0.01, "{cloud:?}");
    // Beside its data it loses nothing, and would where it was: the move was right.
    look.vms[0].host = host_id(1);
    look.vms[0].data_lost = Some(0.0);
    (look.hosts[0].comes, look.hosts[1].comes) = (Comes::ForData, Comes::All);
    for _ in 0..=60 {
        let decisions = balance(&mut cloud, &look, near).decisions;
        assert!(decisions.is_empty(), "it has no data there any more: {decisions:?}");
    }
    let judged = cloud.trials(&vm_id(0)).1.expect("it was judged");
    assert!(judged.gained_s > judged.price_s, "{judged:?}");
    assert!(cloud.factor(&vm_id(0)) < 1.5, "{cloud:?}");
}
