use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

fn host_id(number: usize) -> HostId {
    HostId::new(format!("h{number}")).expect("a name")
}

fn host(number: usize, for_vms_mib: u64) -> HostMemory {
    HostMemory {
        host: host_id(number),
        for_vms_bytes: for_vms_mib * MIB,
        taken_bytes: 0,
        reserve_bytes: 256 * MIB,
        available_bytes: Some(64 * GIB),
        stalled: Some(0.0),
    }
}

/// With 1 GiB to 4 GiB, of which it has and uses so much.
fn vm(number: usize, at: usize, has_mib: u64, used_mib: u64) -> VmMemory {
    VmMemory {
        vm: VmId::new(format!("vm{number}")).expect("a name"),
        host: host_id(at),
        tenant: "default".to_owned(),
        least_bytes: GIB,
        most_bytes: 4 * GIB,
        has_bytes: Some(has_mib * MIB),
        available_bytes: Some((has_mib - used_mib) * MIB),
        asked: Some((has_mib * MIB, 1000)),
        may_change: true,
    }
}

fn look(hosts: Vec<HostMemory>, vms: Vec<VmMemory>) -> Look {
    Look { hosts, vms, tenants: BTreeMap::new() }
}

fn only(look: &Look) -> Decided {
    let [decided] = decide(look).try_into().expect("one VM");
    decided
}

/// In MiB; `None` where nothing is asked.
fn asked(look: &Look) -> Vec<Option<u64>> {
    decide(look).iter().map(|decided| decided.bytes.map(|bytes| bytes / MIB)).collect()
}

#[test]
fn a_vm_that_needs_memory_gets_it_while_its_host_has_some() {
    let decided = only(&look(vec![host(0, 8192)], vec![vm(0, 0, 1024, 1000)]));
    assert_eq!(decided.bytes, Some(1250 * MIB), "a quarter of what it uses is to be available");
    assert_eq!(decided.reason, "gets 226 MiB more: only 24 MiB were available to its programs");
}

#[test]
fn a_vm_that_uses_little_keeps_what_it_has_until_somebody_lacks_it() {
    let mut look = look(vec![host(0, 8192)], vec![vm(0, 0, 3000, 200)]);
    let decided = only(&look);
    assert_eq!(decided.bytes, None);
    assert_eq!(decided.reason, "needs no more: 2.7 GiB are available to its programs");
    look.hosts[0].taken_bytes = 7168 * MIB;
    let decided = only(&look);
    assert_eq!(decided.bytes, Some(1024 * MIB), "another VM has come");
    assert_eq!(decided.reason, "gives 1.9 GiB back: h0 has it for other VMs");
}

#[test]
fn no_guest_is_asked_for_what_its_programs_use() {
    let mut look = look(vec![host(0, 2048)], vec![vm(0, 0, 1800, 1500), vm(1, 0, 1200, 1190)]);
    look.hosts[0].taken_bytes = 1024 * MIB;
    assert_eq!(asked(&look), [Some(1532), None], "what is left to give is 32 MiB above use");
}

#[test]
fn a_host_under_pressure_gets_memory_back_before_its_tasks_swap() {
    let mut look = look(vec![host(0, 16384)], vec![vm(0, 0, 3000, 1000), vm(1, 0, 2000, 1990)]);
    look.hosts[0].stalled = Some(0.14);
    let decided = decide(&look);
    assert_eq!(decided[0].bytes, Some((3000 - 512) * MIB), "a 32nd of the host's memory");
    let why = "tasks of h0 waited for memory in 14 % of the last 10 s";
    assert_eq!(decided[0].reason, format!("gives 512 MiB back: {why}"));
    assert_eq!(decided[1].bytes, None, "nothing is lent meanwhile");
    assert_eq!(decided[1].reason, "needs 487.5 MiB more: h0 lacks memory");

    look.hosts[0].stalled = None;
    look.hosts[0].available_bytes = Some(156 * MIB);
    assert_eq!(asked(&look)[0], Some(2900), "its reserve lacks 100 MiB");
}

#[test]
fn a_host_of_which_it_is_not_known_what_is_available_lends_nothing() {
    let mut look = look(vec![host(0, 8192)], vec![vm(0, 0, 1024, 1000)]);
    look.hosts[0].available_bytes = None;
    let decided = only(&look);
    assert_eq!(decided.bytes, None);
    assert!(decided.reason.ends_with("how much memory h0 has is not known"), "{decided:?}");
}

#[test]
fn what_does_not_do_for_all_is_shared_by_need() {
    let vms = vec![vm(0, 0, 1024, 1024), vm(1, 0, 2048, 2048)];
    let look = look(vec![host(0, 3072 + 384)], vms);
    assert_eq!(asked(&look), [Some(1024 + 128), Some(2048 + 256)]);
    assert_eq!(
        decide(&look)[0].reason,
        "gets 128 MiB more of the 256 MiB that it needs: h0 has no more"
    );
}

#[test]
fn a_tenant_s_quota_holds_over_all_hosts() {
    let vms = vec![vm(0, 0, 1024, 1024), vm(1, 1, 1024, 1024)];
    let mut look = look(vec![host(0, 8192), host(1, 8192)], vms);
    let tenant = |quota_mib: u64| TenantMemory { quota_bytes: quota_mib * MIB, taken_bytes: GIB };
    look.tenants = [("default".to_owned(), tenant(3072 + 256))].into();
    assert_eq!(asked(&look), [Some(1024 + 128), Some(1024 + 128)]);
    assert!(decide(&look)[0].reason.ends_with("its tenant's quota has no more"));
    // An admin has made it smaller.
    look.vms = vec![vm(0, 0, 2048, 100), vm(1, 1, 1024, 100)];
    look.tenants = [("default".to_owned(), tenant(3072 + 256))].into();
    assert_eq!(asked(&look), [Some(2048 - 768), None]);
}

#[test]
fn what_a_guest_does_not_say_changes_nothing() {
    let mut look = look(vec![host(0, 2048)], vec![vm(0, 0, 3000, 200)]);
    look.vms[0].available_bytes = None;
    let decided = only(&look);
    assert_eq!(decided.bytes, None, "although its host lacks memory");
    assert!(decided.reason.contains("does not say what it uses"), "{decided:?}");
    assert_eq!(decided.keeps_bytes, 3000 * MIB);
    look.vms[0].has_bytes = None;
    let decided = only(&look);
    assert_eq!((decided.bytes, decided.keeps_bytes), (None, 4 * GIB), "it may have all");
}

#[test]
fn a_vm_that_moves_stays_as_it_is() {
    let mut look = look(vec![host(0, 8192)], vec![vm(0, 0, 1024, 1000)]);
    look.vms[0].may_change = false;
    let decided = only(&look);
    assert_eq!(decided.bytes, None);
    assert!(decided.reason.contains("while it moves"), "{decided:?}");
}

#[test]
fn a_guest_that_does_not_give_back_in_time_is_counted_with_what_it_has_and_that_is_said() {
    let mut look = look(vec![host(0, 3072)], vec![vm(0, 0, 2048, 100), vm(1, 0, 1024, 1000)]);
    look.vms[0].asked = Some((GIB, 10));
    let decided = decide(&look);
    assert_eq!(decided[0].reason, "its guest was asked for 1 GiB");
    assert_eq!(decided[1].bytes, None, "it is not there yet");
    look.vms[0].asked = Some((GIB, 70));
    let decided = decide(&look);
    assert!(
        decided[0].reason.starts_with("its guest was asked for 1 GiB 1m10s ago"),
        "{decided:?}"
    );
}

#[test]
fn a_vm_that_has_just_started_counts_with_its_least_until_its_guest_could_give_back() {
    let mut look = look(vec![host(0, 8192)], vec![vm(0, 0, 4096, 0)]);
    (look.vms[0].available_bytes, look.vms[0].asked) = (None, Some((GIB, 5)));
    assert_eq!(only(&look).keeps_bytes, GIB);
    look.vms[0].asked = Some((GIB, GIVES_BACK_IN_S));
    assert_eq!(only(&look).keeps_bytes, 4 * GIB);
}

prop_compose! {
    fn any_vm(number: usize)(
        at in 0..3_usize,
        tenant in 0..2_usize,
        least in 1..64_u64,
        more in 1..128_u64,
        has in proptest::option::of(0..=100_u64),
        available in proptest::option::of(0..=100_u64),
        asked in proptest::option::of((0..=100_u64, 0..120_u64)),
        may_change in any::<bool>(),
    ) -> VmMemory {
        let (least_bytes, most_bytes) = (least * 16 * MIB, (least + more) * 16 * MIB);
        let percent = |percent: u64| least_bytes + (most_bytes - least_bytes) / 100 * percent;
        let has_bytes = has.map(percent);
        VmMemory {
            vm: VmId::new(format!("vm{number}")).expect("a name"),
            host: host_id(at),
            tenant: format!("t{tenant}"),
            least_bytes,
            most_bytes,
            has_bytes,
            available_bytes: has_bytes.and_then(|has| Some(has / 100 * available?)),
            asked: asked.map(|(part, age_s)| (percent(part), age_s)),
            may_change,
        }
    }
}

fn any_look() -> impl Strategy<Value = Look> {
    let vms = (0..8_usize).map(any_vm).collect::<Vec<_>>();
    let of_host = (0..8192_u64, 0..4096_u64, proptest::option::of(0..8192_u64), 0.0..0.3);
    let quotas = proptest::collection::vec((0..8192_u64, 0..2048_u64), 2);
    (vms, proptest::collection::vec(of_host, 3), quotas).prop_map(|(vms, hosts, quotas)| {
        let hosts =
            hosts.into_iter().enumerate().map(|(number, (total, taken, available, stalled))| {
                HostMemory {
                    taken_bytes: taken * MIB,
                    available_bytes: available.map(|mib| mib * MIB),
                    stalled: Some(stalled),
                    ..host(number, total)
                }
            });
        let quotas = quotas.into_iter().enumerate().map(|(number, (quota, taken))| {
            let of = TenantMemory { quota_bytes: quota * MIB, taken_bytes: taken * MIB };
            (format!("t{number}"), of)
        });
        Look { hosts: hosts.collect(), vms, tenants: quotas.collect() }
    })
}

proptest! {
    #[test]
    fn every_amount_is_in_its_range_and_nobody_lends_what_is_not_there(look in any_look()) {
        let all = decide(&look);
        prop_assert_eq!(all.len(), look.vms.len());
        let is_in_range = |(vm, decided): (&VmMemory, &Decided)| {
            let range = vm.least_bytes..=vm.most_bytes;
            let kept = decided.bytes.is_none_or(|bytes| range.contains(&bytes));
            kept && decided.keeps_bytes >= vm.least_bytes && !decided.reason.is_empty()
        };
        prop_assert!(look.vms.iter().zip(&all).all(is_in_range), "{:?}", all);
        // What a VM may have had before, and may have afterwards: what is asked for counts only where that is more.
        let sums = |of: &dyn Fn(&VmMemory) -> bool| {
            let these = look.vms.iter().zip(&all).filter(|(vm, _)| of(vm));
            these.fold((0, 0), |(before, after), (vm, decided)| {
                let had = vm.may_have();
                (before + had, after + decided.bytes.unwrap_or(0).max(had))
            })
        };
        for host in &look.hosts {
            let (before, after) = sums(&|vm| vm.host == host.host);
            let lent = after - before;
            prop_assert!(lent == 0 || host.taken_bytes + after <= host.for_vms_bytes);
            let available = host.available_bytes.unwrap_or(0).saturating_sub(host.reserve_bytes);
            prop_assert!(lent <= available, "{} {}", lent, available);
        }
        for (tenant, of) in &look.tenants {
            let (before, after) = sums(&|vm| vm.tenant == *tenant);
            prop_assert!(after == before || of.taken_bytes + after <= of.quota_bytes);
        }
    }

    #[test]
    fn nobody_is_asked_for_what_its_programs_use_and_what_is_not_known_stays(look in any_look()) {
        for (vm, decided) in look.vms.iter().zip(decide(&look)) {
            let Some(bytes) = decided.bytes else { continue };
            prop_assert!(vm.may_change);
            let used = vm.used();
            prop_assert!(used.is_some_and(|used| bytes >= used.min(vm.surely_has())), "{:?}", decided);
        }
    }
}
