//! VMs without a job whose data are at another host or another site.

use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{SetBalance, SiteBalance, VmFigures};
use perigee_model::job::{JobState, NewVolume, Start};
use perigee_model::load::{VcpuUse, VmLoad};
use perigee_model::persistent_vm::{NewVm, NewVmVolume};
use perigee_model::volume::VolumeSource;
use perigee_model::{HostRules, LeaveSite, SiteId, VmId, VolumeName};

use super::balance::{arrives, at_home1, report, standing};
use super::fake::FakeHost;
use super::gone::second_home;
use super::persistent_vms::web;
use super::{Lab, wait_for};
use crate::planning::links;
use crate::storage::volumes;
use crate::{balance, vms};

fn far() -> VolumeName {
    VolumeName::new("far").expect("a name")
}

async fn set(lab: &Lab, site: &str, mode: AutoMode) {
    let site = SiteId::new(site).expect("a name");
    balance::set_mode(&lab.cluster, &site, SetBalance { mode }).await.expect("a site");
}

fn shown(lab: &Lab, site: &str) -> SiteBalance {
    lab.cluster.balances.shown(&SiteId::new(site).expect("a name"))
}

/// A VM at home1 that reads a volume at this host. Both hosts are idle.
async fn reads_far(lab: &Lab, there: &FakeHost, new: NewVm, leave_site: LeaveSite) {
    there.inside().pool_free_bytes = Some(1 << 40);
    links::probe_all(&lab.cluster).await.expect("figures");
    let new_volume = NewVolume {
        name: far(),
        host: Some(there.id.clone()),
        size_bytes: Some(1 << 30),
        source: VolumeSource::Empty,
        leave_site,
    };
    volumes::create(&lab.cluster, new_volume).await.expect("create");
    let volumes = vec![NewVmVolume { volume: far(), read_only: true, mount: None }];
    lab.make_vm(NewVm { volumes, ..new }).await;
    lab.runs().await;
    report(there, Some(0.0), None);
}

/// Its agent reports 20 ms more of waiting for the volume, the time of one read.
fn waits(host: &FakeHost) {
    let mut inside = host.inside();
    inside.cpus_used_1m = Some(0.2);
    let of = &mut inside.vms.get_mut(&web()).expect("the VM").report;
    let vcpus_1m = Some(VcpuUse { running_vcpus: 0.1, waiting_vcpus: 0.0 });
    of.load = VmLoad { vcpus_1m, ..VmLoad::default() };
    let disk = of.spec.disks.iter().position(|disk| disk.volume == far()).expect("its disk");
    let io = &mut of.io[disk];
    io.reads += 1;
    io.read_bytes += 8192;
    io.network_requests += 1;
    for ns in [&mut io.read_ns, &mut io.busy_ns, &mut io.network_ns, &mut io.network_busy_ns] {
        *ns += 20_000_000;
    }
}

/// While the VM waits for its data, until it is so.
async fn while_it_waits<T, F: Future<Output = Option<T>>>(
    lab: &Lab,
    what: &str,
    is: impl Fn() -> F,
) -> T {
    wait_for(what, || {
        waits(&lab.home);
        is()
    })
    .await
}

async fn is_sent(lab: &Lab, to: &FakeHost) {
    while_it_waits(lab, "the VM to be sent to its data", async || {
        lab.home.inside().vms[&web()].asked.as_ref().map(drop)
    })
    .await;
    assert_eq!(lab.cluster.index.migrations_of(&web())[0].migration.to, to.id);
}

/// It is known that it loses much, and nothing moves: the figures, and what comes next.
async fn stays(lab: &Lab) -> (VmFigures, String) {
    let loses = |figures: &VmFigures| {
        figures.measured.as_ref().is_some_and(|of| of.data_lost.is_some_and(|lost| lost > 0.1))
    };
    let known = while_it_waits(lab, "a look at what it loses", async || {
        let of = standing(lab, &web()).await;
        (loses(&of.figures) && of.figures.targets.iter().any(|to| to.host == lab.cloud.id))
            .then_some((of.figures, of.next))
    })
    .await;
    for _ in 0..5 {
        let before = shown(lab, "home").looked_ms;
        while_it_waits(lab, "the next look", async || {
            (shown(lab, "home").looked_ms != before).then_some(())
        })
        .await;
    }
    assert!(lab.cluster.index.migrations_of(&web()).is_empty(), "{known:?}");
    known
}

fn why_not(figures: &VmFigures, lab: &Lab) -> String {
    let to = figures.targets.iter().find(|to| to.host == lab.cloud.id);
    to.expect("its data are there").why_not.clone()
}

#[tokio::test]
async fn a_vm_without_a_job_goes_to_its_data_when_it_waits_for_them() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    reads_far(&lab, &second, at_home1(), LeaveSite::Allowed).await;
    set(&lab, "home", AutoMode::On).await;
    is_sent(&lab, &second).await;
}

#[tokio::test]
async fn a_vm_goes_to_its_data_at_another_site_when_both_sites_are_switched_on() {
    let mut lab = Lab::up().await;
    reads_far(&lab, &lab.cloud, at_home1(), LeaveSite::Allowed).await;
    set(&lab, "home", AutoMode::On).await;
    let advised = while_it_waits(&lab, "the advice", async || {
        shown(&lab, "home").vms.into_iter().find(|vm| vm.moves)
    })
    .await;
    let said = &advised.reason;
    assert!(said.starts_with("would move home1 → cloud1: has lost "), "{said}");
    assert!(said.contains(" to the network to its data at cloud1, would have lost "), "{said}");
    assert!(said.ends_with("switched on too: perigee site balance cloud on"), "{said}");
    assert!(lab.cluster.index.migrations_of(&web()).is_empty(), "it was only advised");
    assert_eq!(lab.cluster.balances.price_factor(&web()), 1.0, "that is no move");

    set(&lab, "cloud", AutoMode::On).await;
    is_sent(&lab, &lab.cloud).await;
    let moved = lab.cluster.index.migrations_of(&web())[0].migration.reason.clone();
    assert!(moved.starts_with("moves home1 → cloud1: has lost "), "{moved}");
    arrives(&lab, &lab.cloud).await;
    let trial = wait_for("a look at cloud1", async || {
        let of = standing(&lab, &web()).await;
        let dearer = of.figures.price_factor > 1.9;
        of.figures.on_trial.filter(|_| dearer)
    })
    .await;
    assert_eq!(trial.from, lab.home.id, "the other site's accounts have the move");
    lab.restart_controller().await;
    assert!(lab.cluster.balances.price_factor(&web()) > 1.9, "a restart forgets no move");
}

#[tokio::test]
async fn a_site_that_is_switched_off_gets_no_vm_and_its_hosts_are_not_weighed() {
    let lab = Lab::up().await;
    reads_far(&lab, &lab.cloud, at_home1(), LeaveSite::Allowed).await;
    set(&lab, "cloud", AutoMode::Off).await;
    set(&lab, "home", AutoMode::On).await;
    let of = while_it_waits(&lab, "a look at what it loses", async || {
        let of = standing(&lab, &web()).await;
        let lost = of.figures.measured.as_ref().and_then(|of| of.data_lost);
        lost.is_some_and(|lost| lost > 0.1).then_some(of)
    })
    .await;
    assert!(of.figures.targets.is_empty(), "{:?}", of.figures.targets);
    assert!(of.next.contains("perigee site balance cloud advise"), "{}", of.next);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
}

#[tokio::test]
async fn a_vm_that_was_made_for_a_site_does_not_leave_it_for_its_data() {
    let lab = Lab::up().await;
    let home = SiteId::new("home").expect("a name");
    let new = NewVm { start: Start::Site(home), ..at_home1() };
    reads_far(&lab, &lab.cloud, new, LeaveSite::Allowed).await;
    set(&lab, "home", AutoMode::On).await;
    set(&lab, "cloud", AutoMode::On).await;
    let (figures, _) = stays(&lab).await;
    assert_eq!(why_not(&figures, &lab), "the VM was made for site home");
}

#[tokio::test]
async fn a_vm_with_move_never_does_not_go_to_its_data() {
    let lab = Lab::up().await;
    let new = NewVm { may_migrate: false, ..at_home1() };
    reads_far(&lab, &lab.cloud, new, LeaveSite::Allowed).await;
    set(&lab, "home", AutoMode::On).await;
    set(&lab, "cloud", AutoMode::On).await;
    let (_, next) = stays(&lab).await;
    assert!(next.contains("perigee vm set web --move auto"), "{next}");
}

/// Nothing of the data leaves their site by that.
#[tokio::test]
async fn a_vm_may_go_to_data_that_may_not_leave_another_site() {
    let lab = Lab::up().await;
    let new = NewVm { network: perigee_model::vm::NetworkKind::None, ..at_home1() };
    reads_far(&lab, &lab.cloud, new, LeaveSite::Never).await;
    set(&lab, "home", AutoMode::On).await;
    set(&lab, "cloud", AutoMode::On).await;
    let (figures, _) = stays(&lab).await;
    assert!(!why_not(&figures, &lab).contains("leave-site"), "{figures:?}");
}

#[tokio::test]
async fn a_vm_does_not_go_to_its_data_beside_a_vm_from_which_it_is_kept_apart() {
    let lab = Lab::up().await;
    let apart = || HostRules { apart: Some("db".parse().expect("a name")), ..Default::default() };
    let other = VmId::new("other").expect("a name");
    let start = Start::Host(lab.cloud.id.clone());
    lab.make_vm(NewVm { name: other.clone(), start, rules: apart(), ..at_home1() }).await;
    wait_for("the other VM to run", async || {
        let record = lab.cluster.index.of_vm(&other)?;
        (record.job.state == JobState::Running).then_some(())
    })
    .await;
    let new = NewVm { rules: apart(), ..at_home1() };
    reads_far(&lab, &lab.cloud, new, LeaveSite::Allowed).await;
    report(&lab.cloud, Some(0.5), Some(&other));
    set(&lab, "home", AutoMode::On).await;
    set(&lab, "cloud", AutoMode::On).await;
    let (figures, _) = stays(&lab).await;
    assert!(why_not(&figures, &lab).contains("not with"), "{figures:?}");
}

/// The volume that it writes would come after it over the network between the sites.
#[tokio::test]
async fn a_vm_that_starves_does_not_go_where_its_data_of_another_site_would_follow() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    links::probe_all(&lab.cluster).await.expect("figures");
    let volumes = super::persistent_vms::new_vm("home1").volumes;
    lab.make_vm(NewVm { volumes, ..at_home1() }).await;
    lab.runs().await;
    report(&lab.home, Some(2.0), Some(&web()));
    report(&second, Some(0.0), None);
    set(&lab, "cloud", AutoMode::Off).await;
    set(&lab, "home", AutoMode::On).await;
    wait_for("home2 to be refused for the volume", async || {
        let figures = standing(&lab, &web()).await.figures;
        let to = figures.targets.into_iter().find(|to| to.host == second.id)?;
        to.why_not.ends_with("would come after it from another site").then_some(())
    })
    .await;
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
    let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
    assert_eq!(vm.host.as_ref(), Some(&lab.home.id));
}
