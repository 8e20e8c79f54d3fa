//! VMs that live without a job.

mod snapshots;

use std::process::Stdio;

use axum::body::Bytes;
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, ClusterImage, JobSpec, JobState, Start, Vm};
use perigee_model::persistent_vm::{
    AttachVolume, DetachVolume, NewVm, NewVmVolume, PowerRequest, ResizeVm, StopVm, VmState,
};
use perigee_model::tenant::{AuditEntry, Quota};
use perigee_model::vm::{ChangeVm, Firmware, Hardware, VmStatus};
use perigee_model::volume::{Snapshot, VolumeSource};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{DiskRole, HostId, ImageName, ProblemKind, VmId, VolumeName};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::fake::FakeHost;
use super::migrations::switch;
use super::queue::unreachable;
use super::tenants::{Tenants, make_token};
use super::{Lab, TIMING, data_volume, spec, wait_for, wait_while};
use crate::cluster::Timing;
use crate::storage::volumes;
use crate::vms::{self, attachments, change, guest_files, persistent};
use crate::{hosts, jobs};

pub fn web() -> VmId {
    VmId::new("web").expect("a name")
}

pub fn new_vm(host: &str) -> NewVm {
    NewVm {
        name: web(),
        image: ImageName::new("debian").expect("a name"),
        cpus: 1,
        memory_bytes: 256 << 20,
        cpus_max: None,
        memory_max_bytes: None,
        disk_bytes: Some(2 << 30),
        network: Default::default(),
        publish: Vec::new(),
        volumes: vec![NewVmVolume { volume: data_volume(), read_only: false, mount: None }],
        start: Start::Host(HostId::new(host).expect("a name")),
        may_migrate: true,
        restart_elsewhere: false,
        stopped: false,
        cloud_init: Default::default(),
        firmware: Firmware::Uefi,
        hardware: Hardware::default(),
        rules: Default::default(),
        labels: Default::default(),
    }
}

impl Lab {
    pub async fn make_vm(&self, new: NewVm) -> Vm {
        let owner = "ann".to_owned();
        persistent::create(&self.cluster, new, owner).await.expect("a VM")
    }

    pub async fn vm_is(&self, state: VmState) -> Vm {
        wait_for(&format!("the VM to be {state:?}"), async || {
            let vm = vms::get(&self.cluster, &web()).await.expect("the VM");
            (vm.status == state).then_some(vm)
        })
        .await
    }

    pub async fn runs(&self) -> Vm {
        let vm = self.vm_is(VmState::Running).await;
        // Its driver knows too.
        wait_for("the VM's record", async || {
            let record = self.cluster.index.of_vm(&web()).expect("its record");
            (record.job.state == JobState::Running).then_some(())
        })
        .await;
        vm
    }

    pub async fn power(&self, request: PowerRequest) {
        persistent::request_power(&self.cluster, &web(), request).await.expect("it is taken down");
    }
}

/// A VM of a tenant's user, which runs.
async fn ann_has_a_vm() -> Tenants {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let new = NewVm { volumes: Vec::new(), start: Start::Anywhere, ..new_vm("home1") };
    let _: Vm = tenants.ann.post("/v1/vms", &new).await.expect("a VM");
    wait_for("it to run", async || {
        let vm: Vm = tenants.ann.get("/v1/vms/web").await.expect("its VM");
        (vm.status == VmState::Running).then_some(())
    })
    .await;
    tenants
}

fn root() -> VolumeName {
    VolumeName::new("web-root").expect("a name")
}

fn has_root(host: &FakeHost) -> bool {
    host.inside().volumes.contains_key(&root())
}

#[tokio::test]
async fn a_vm_without_a_job_is_started_stopped_and_started_again_with_the_same_disk() {
    let mut lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    let vm = lab.runs().await;
    assert_eq!(vm.host.as_ref().map(HostId::as_str), Some("home1"));
    assert_eq!(vm.job, None);
    let (first, roles) = {
        let inside = lab.home.inside();
        let spec = &inside.vms[&web()].report.spec;
        assert!(spec.machine.persistent);
        (spec.clone(), spec.disks.iter().map(|disk| disk.role).collect::<Vec<_>>())
    };
    assert_eq!(roles, [DiskRole::Root, DiskRole::CloudInit, DiskRole::Nvram, DiskRole::Data(0)]);
    {
        let inside = lab.home.inside();
        let seed = inside.volumes.values().find(|v| v.info.name.as_str().ends_with("-cidata"));
        let text = String::from_utf8_lossy(&seed.expect("its disk").data).into_owned();
        assert!(text.contains("\"local-hostname\":\"web\""), "{text}");
    }
    lab.home.inside().volumes.get_mut(&root()).expect("its disk").data = b"kept".to_vec();

    lab.power(PowerRequest::Stop { force: false }).await;
    let off = lab.vm_is(VmState::Stopped).await;
    assert_eq!((off.host, off.reason.as_str()), (None, ""));
    assert!(lab.home.inside().pressed > 0, "the guest was asked");
    let console = async |lab: &Lab| vms::console::read(&lab.cluster, &web()).await.expect("kept");
    assert_eq!(console(&lab).await, "panic: no root");
    assert!(lab.home.inside().vms.is_empty() && lab.home.inside().attachments.is_empty());
    assert!(has_root(&lab.home));
    assert_eq!(lab.home.inside().volumes.len(), 2, "what is made for each start is gone");
    lab.restart_controller().await;
    assert_eq!(lab.vm_is(VmState::Stopped).await.image.expect("its image").as_str(), "debian");

    lab.power(PowerRequest::Start).await;
    lab.runs().await;
    {
        let inside = lab.home.inside();
        let second = &inside.vms[&web()].report.spec;
        assert!(second.start > first.start);
        assert!(second.disks[0].epoch > first.disks[0].epoch, "nobody else writes it");
        assert_eq!(inside.volumes[&root()].data, b"kept");
        assert_eq!(inside.starts[&web()], 2);
    }
    assert_eq!(console(&lab).await, "panic: no root", "of this start only");
    let refused = persistent::delete(&lab.cluster, &web(), false).await.expect_err("it runs");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    lab.wait_for_clean_hosts().await;
    wait_for("the VM to be unknown", async || vms::get(&lab.cluster, &web()).await.err()).await;
    // Its name is free again.
    lab.make_vm(new_vm("cloud1")).await;
    lab.runs().await;
}

/// It starts only where a TPM is possible, and moves only there.
#[tokio::test]
async fn a_vm_with_a_tpm_keeps_its_state_and_is_only_at_hosts_that_can_have_it() {
    let lab = Lab::up().await;
    let none = || Some("swtpm is not installed".to_owned());
    let says = async |host: &FakeHost, why: Option<String>| {
        host.inside().no_tpm.clone_from(&why);
        wait_for("the report", async || {
            (lab.cluster.hosts.report(&host.id)?.no_tpm == why).then_some(())
        })
        .await;
    };
    says(&lab.home, none()).await;
    says(&lab.cloud, none()).await;
    let hardware = Hardware { tpm: true, ..Hardware::default() };
    let new = NewVm { hardware, start: Start::Anywhere, volumes: Vec::new(), ..new_vm("home1") };
    lab.make_vm(new).await;
    wait_for("the reason", async || {
        let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
        vm.reason.contains("can have VMs with a TPM").then_some(())
    })
    .await;
    says(&lab.cloud, None).await;
    assert_eq!(lab.runs().await.host, Some(lab.cloud.id.clone()));
    let state = VolumeName::new("web-tpm").expect("a name");
    {
        let mut inside = lab.cloud.inside();
        let disks = &inside.vms[&web()].report.spec.disks;
        assert!(disks.iter().any(|d| d.role == DiskRole::Tpm && d.volume == state && !d.read_only));
        inside.volumes.get_mut(&state).expect("its state").data = b"kept".to_vec();
    }
    let to = lab.home.id.clone();
    let refused = vms::move_to(&lab.cluster, &web(), to, VolumesOnMove::Stay).await;
    let refused = refused.expect_err("it has no TPMs");
    assert!(refused.why.contains("swtpm is not installed"), "{refused}");
    lab.power(PowerRequest::Restart { force: true }).await;
    wait_for("another start", async || (lab.cloud.inside().starts[&web()] == 2).then_some(()))
        .await;
    lab.runs().await;
    assert_eq!(lab.cloud.inside().volumes[&state].data, b"kept");
}

#[tokio::test]
async fn a_guest_that_powers_off_by_itself_is_off_and_its_vm_says_so() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    lab.home.inside().vms.get_mut(&web()).expect("VM").report.status = VmStatus::Shutdown;
    let off = lab.vm_is(VmState::Stopped).await;
    assert_eq!(off.reason, "the guest powered off");
    assert!(has_root(&lab.home));
    assert!(lab.home.inside().vms.is_empty());
}

#[tokio::test]
async fn a_vm_is_stopped_at_once_and_restarted_when_its_guest_does_not_listen() {
    let lab = Lab::up().await;
    lab.home.inside().guests_are_deaf = true;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: false }).await;
    lab.vm_is(VmState::Stopping).await;
    wait_for("the button", async || (lab.home.inside().pressed > 0).then_some(())).await;
    lab.power(PowerRequest::Restart { force: true }).await;
    wait_for("its second start", async || (lab.home.inside().starts[&web()] == 2).then_some(()))
        .await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
}

#[tokio::test]
async fn a_vm_that_stands_still_is_shown_to_be_stopped_too() {
    let lab = Lab::up().await;
    lab.home.inside().guests_are_deaf = true;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    lab.home.inside().vms.get_mut(&web()).expect("VM").report.status = VmStatus::IoError;
    lab.vm_is(VmState::IoError).await;
    lab.power(PowerRequest::Stop { force: false }).await;
    lab.vm_is(VmState::Stopping).await;
}

#[tokio::test]
async fn a_vm_without_a_job_moves_and_what_its_guest_says_is_nothing_to_its_record() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &web(), to.clone(), VolumesOnMove::Stay).await.expect("it moves");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&web()].asked.is_some().then_some(())
    })
    .await;
    lab.home.say(&web(), GuestBody::exited(1));
    switch(&lab, &web());
    wait_for("the VM to be there", async || {
        let record = lab.cluster.index.of_vm(&web()).expect("its record");
        (record.job.host.as_ref() == Some(&to)).then_some(())
    })
    .await;
    assert_eq!(lab.runs().await.host, Some(to));
    assert!(has_root(&lab.home) && !has_root(&lab.cloud));
    wait_for("what it has printed at both hosts", async || {
        let said = vms::console::read(&lab.cluster, &web()).await.expect("its console");
        (said == "panic: no rootpanic: no root").then_some(())
    })
    .await;
    lab.power(PowerRequest::Restart { force: true }).await;
    wait_for("its start where it was moved to", async || {
        (lab.cloud.inside().starts[&web()] == 2).then_some(())
    })
    .await;
    assert_eq!(lab.runs().await.host, Some(lab.cloud.id.clone()));
    assert!(lab.home.inside().vms.is_empty());
}

#[tokio::test]
async fn a_vm_that_may_start_anywhere_starts_beside_its_disk() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { start: Start::Anywhere, volumes: Vec::new(), ..new_vm("home1") }).await;
    let first = lab.runs().await.host;
    for _ in 0..3 {
        lab.power(PowerRequest::Stop { force: true }).await;
        lab.vm_is(VmState::Stopped).await;
        lab.power(PowerRequest::Start).await;
        assert_eq!(lab.runs().await.host, first);
    }
}

#[tokio::test]
async fn a_vm_whose_host_has_booted_again_starts_again_there() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    lab.home.reboot(false);
    wait_for("its second start", async || (lab.home.inside().starts[&web()] == 2).then_some(()))
        .await;
    lab.runs().await;
    assert!(has_root(&lab.home));
}

#[tokio::test]
async fn a_vm_whose_disk_was_at_a_removed_host_says_so() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    unreachable(&lab, &lab.home).await;
    let removed = hosts::remove(&lab.cluster, &lab.home.id, true).await.expect("removed");
    assert_eq!(removed.failed_jobs.len(), 1);
    let lost = wait_for("the VM to be off", async || {
        let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
        (vm.status == VmState::Stopped && vm.reason.contains("lost")).then_some(vm)
    })
    .await;
    assert!(lost.reason.contains("home1"), "{}", lost.reason);
    persistent::delete(&lab.cluster, &web(), false).await.expect("deleted");
    wait_for("the VM to be unknown", async || vms::get(&lab.cluster, &web()).await.err()).await;
}

#[tokio::test]
async fn a_vm_without_a_job_is_no_job_and_a_jobs_vm_is_none_of_these() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    assert!(jobs::list(&lab.cluster).await.expect("jobs").is_empty());
    let id = "web".parse().expect("an id");
    assert_eq!(jobs::get(&lab.cluster, &id).await.expect_err("none").kind, ProblemKind::NotFound);
    let again = persistent::create(&lab.cluster, new_vm("home1"), "ann".to_owned()).await;
    assert_eq!(again.expect_err("the name is taken").kind, ProblemKind::Conflict);
    let like_a_job = NewVm { name: VmId::new("web-0001").expect("a name"), ..new_vm("home1") };
    let refused = persistent::create(&lab.cluster, like_a_job, "ann".to_owned()).await;
    assert_eq!(refused.expect_err("a job may get it").kind, ProblemKind::Invalid);
    let own = JobSpec { volumes: Vec::new(), memory_bytes: 256 << 20, ..spec(Access::Read) };
    let job = lab.submit(own).await;
    let vm = super::vm_of(&job);
    lab.wait_for_vm(&lab.home, &vm).await;
    let refused = persistent::request_power(&lab.cluster, &vm, PowerRequest::Start)
        .await
        .expect_err("a job's");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    let in_use = volumes::delete(&lab.cluster, &data_volume()).await.expect_err("the VM has it");
    assert!(in_use.why.contains("VM web uses it"), "{in_use}");
    assert_eq!(in_use.kind, ProblemKind::Conflict);
}

#[tokio::test]
async fn the_disk_of_a_vm_counts_for_its_tenant_and_its_memory_only_while_it_runs() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let quota = Quota { volume_bytes: Some(3 << 30), ..Quota::default() };
    tenants.set_quota("acme", quota).await;
    let new = NewVm { volumes: Vec::new(), start: Start::Anywhere, ..new_vm("home1") };
    let made: Vm = tenants.ann.post("/v1/vms", &new).await.expect("a VM");
    assert_eq!(made.id.as_str(), "acme~web");
    let second = NewVm { name: VmId::new("second").expect("a name"), ..new.clone() };
    let full = tenants.ann.post::<Vm>("/v1/vms", &second).await.expect_err("no room");
    assert_eq!(full.kind, ProblemKind::NoSpace, "{full}");
    wait_for("it to run", async || {
        let vm: Vm = tenants.ann.get("/v1/vms/web").await.expect("its VM");
        (vm.status == VmState::Running).then_some(())
    })
    .await;
    let of_acme = || tenants.lab.cluster.index.taken().running.get("acme").map(|used| used.vms);
    assert_eq!(of_acme(), Some(1));
    // A member sees its own VMs only; bob sees none of acme's.
    for other in [&tenants.amy, &tenants.bob] {
        let vms: Vec<Vm> = other.get("/v1/vms").await.expect("VMs");
        assert!(vms.is_empty(), "{vms:?}");
        let hidden = other.get::<Vm>("/v1/vms/acme~web").await.expect_err("not theirs");
        assert_eq!(hidden.kind, ProblemKind::NotFound);
    }
    let ask = StopVm { force: true };
    let _: serde_json::Value = tenants.ann.post("/v1/vms/web/stop", &ask).await.expect("stopped");
    wait_for("it to be off", async || {
        let vm: Vm = tenants.ann.get("/v1/vms/web").await.expect("its VM");
        (vm.status == VmState::Stopped).then_some(())
    })
    .await;
    assert_eq!(of_acme(), None);
    let attached =
        tenants.ann.get_bytes("/v1/vms/web/console/attach").await.expect_err("it is off");
    assert_eq!(attached.kind, ProblemKind::Conflict, "{attached}");
    let login = tenants.ann.get_bytes("/v1/vms/web/ssh").await.expect_err("it is off");
    assert_eq!(login.kind, ProblemKind::Conflict, "{login}");
    let hidden = tenants.bob.get_bytes("/v1/vms/acme~web/ssh").await.expect_err("not his");
    assert_eq!(hidden.kind, ProblemKind::NotFound, "{hidden}");
    wait_for("the audit log", async || {
        let log: Vec<AuditEntry> = tenants.ann.get("/v1/audit").await.expect("the log");
        let has = |end| log.iter().any(|entry| entry.request.ends_with(end));
        (has("/console/attach") && has("/web/ssh")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_vm_that_cannot_start_is_tried_later_each_time_and_says_when() {
    let lab = Lab::up().await;
    lab.home.inside().fails_starts = true;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    // After 50 ms, and then after twice as long each time.
    let vm = wait_for("a longer pause", async || {
        let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
        vm.reason.ends_with("it is tried again in 2 s").then_some(vm)
    })
    .await;
    assert!(vm.reason.contains("QEMU ended"), "{}", vm.reason);
    let tries = lab.home.inside().failed_starts;
    assert!(tries <= 8, "{tries} in pauses that take 3 s together");
    lab.home.inside().fails_starts = false;
    lab.runs().await;
}

/// python3-websockets: a client that knows nothing of Perigee.
#[tokio::test]
async fn a_console_and_a_screen_are_websockets_for_any_client() {
    let tenants = ann_has_a_vm().await;
    let made = make_token(&tenants.admin, "acme/ann").await;
    let url = tenants.url.replacen("http", "ws", 1);
    let mut client = tokio::process::Command::new("/usr/bin/python3")
        .args(["-I", "-c", include_str!("websocket.py"), &url, &made.token])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("python3; `make setup` installs it");
    let mut said = BufReader::new(client.stdout.take().expect("it was asked for")).lines();
    let mut next = async || {
        let line = tokio::time::timeout(super::PATIENCE, said.next_line()).await;
        line.expect("it says something").expect("text").unwrap_or_default()
    };
    assert_eq!(next().await, "a console of bytes");
    assert_eq!(next().await, "a screen: binary RFB 003.008");
    assert_eq!(next().await, "too long: 1009");
    assert_eq!(next().await, "without a token: 403");
    assert_eq!(next().await, "attached");
    let token = format!("/v1/tenants/acme/users/ann/tokens/{}", made.id);
    tenants.admin.delete(&token).await.expect("revoked");
    assert_eq!(next().await, "revoked: 1008");
    let ended = tokio::time::timeout(super::PATIENCE, client.wait()).await;
    assert!(ended.expect("it ends").expect("a status").success());
}

#[tokio::test]
async fn a_vm_is_deleted_also_where_the_cleanup_of_an_earlier_one_of_its_name_waits() {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    unreachable(&lab, &lab.home).await;
    hosts::remove(&lab.cluster, &lab.home.id, true).await.expect("removed");
    lab.vm_is(VmState::Stopped).await;
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    wait_for("the VM to be unknown", async || vms::get(&lab.cluster, &web()).await.err()).await;

    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("cloud1") }).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    assert!(lab.cloud.inside().vms.is_empty(), "it is off");
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    wait_for("its disk to be gone", async || (!has_root(&lab.cloud)).then_some(())).await;
}

#[tokio::test]
async fn a_stop_ends_when_the_host_is_removed_before_the_guest_has_powered_off() {
    let lab = Lab::up().await;
    lab.home.inside().guests_are_deaf = true;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: false }).await;
    wait_for("the button", async || (lab.home.inside().pressed > 0).then_some(())).await;
    unreachable(&lab, &lab.home).await;
    hosts::remove(&lab.cluster, &lab.home.id, true).await.expect("removed");
    lab.vm_is(VmState::Stopped).await;
}

#[tokio::test]
async fn a_stop_waits_for_no_host_where_nothing_was_started() {
    let lab = Lab::up().await;
    lab.home.inside().starts_no_vm = true;
    lab.home.inside().no_new_volumes = true;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    wait_for("it to be placed", async || {
        lab.cluster
            .index
            .of_vm(&web())
            .is_some_and(|record| record.placement.is_some())
            .then_some(())
    })
    .await;
    unreachable(&lab, &lab.home).await;
    lab.power(PowerRequest::Stop { force: false }).await;
    let off = lab.vm_is(VmState::Stopped).await;
    assert_eq!(off.host, None);
}

#[tokio::test]
async fn a_vm_that_is_being_stopped_is_not_moved() {
    let lab = Lab::up().await;
    lab.home.inside().guests_are_deaf = true;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: false }).await;
    wait_for("the button", async || (lab.home.inside().pressed > 0).then_some(())).await;
    let to = lab.cloud.id.clone();
    let refused = vms::move_to(&lab.cluster, &web(), to, VolumesOnMove::Stay).await;
    let refused = refused.expect_err("it goes down");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("stopped"), "{refused}");
}

#[tokio::test]
async fn an_erasure_that_comes_late_leaves_a_new_vm_of_the_name_alone() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let id = "web".parse().expect("an id");
    let mut old = jobs::any_record(&lab.cluster, &id).await.expect("its record");
    old.job.submitted_ms -= 1;
    old.job.state = JobState::Cancelled;
    jobs::erase(&lab.cluster, &old).await.expect("nothing to do");
    jobs::any_record(&lab.cluster, &id).await.expect("its record is there");
}

#[tokio::test]
async fn a_vm_that_runs_is_deleted_at_once_and_waits_for_no_outputs() {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    let cancel_deadline = std::time::Duration::from_secs(3600);
    lab.start_controller(Timing { cancel_deadline, ..TIMING }).await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_vm_is_restored_from_an_image_when_it_is_off() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let image = ImageName::new("debian").expect("a name");
    let refused = change::restore(&lab.cluster, &web(), image.clone()).await.expect_err("it runs");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    lab.home.inside().volumes.get_mut(&root()).expect("its disk").data = b"broken".to_vec();
    change::restore(&lab.cluster, &web(), image.clone()).await.expect("restored");
    wait_for("the old disk to be gone", async || (!has_root(&lab.home)).then_some(())).await;
    lab.power(PowerRequest::Start).await;
    lab.runs().await;
    let disk = lab.home.inside().vms[&web()].report.spec.disks[0].clone();
    assert_ne!(disk.volume, root());
    assert!(lab.home.inside().volumes.contains_key(&disk.volume));
    // What it writes from now on is kept again.
    lab.home.inside().volumes.get_mut(&disk.volume).expect("its disk").data = b"kept".to_vec();
    lab.power(PowerRequest::Restart { force: true }).await;
    wait_for("its third start", async || (lab.home.inside().starts[&web()] == 3).then_some(()))
        .await;
    lab.runs().await;
    assert_eq!(lab.home.inside().volumes[&disk.volume].data, b"kept");
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_vm_is_resized_when_it_is_off_and_its_disk_only_grows() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let ask = ResizeVm {
        cpus: Some(2),
        memory_bytes: Some(512 << 20),
        disk_bytes: Some(3 << 30),
        ..ResizeVm::default()
    };
    let refused = change::resize(&lab.cluster, &web(), ask).await.expect_err("it runs");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    let smaller = ResizeVm { disk_bytes: Some(1 << 30), ..ResizeVm::default() };
    let refused = change::resize(&lab.cluster, &web(), smaller).await.expect_err("it is smaller");
    assert_eq!(refused.kind, ProblemKind::Invalid);
    let sized = change::resize(&lab.cluster, &web(), ask).await.expect("resized");
    assert_eq!((sized.cpus, sized.memory_bytes), (2, 512 << 20));
    assert_eq!(lab.home.inside().volumes[&root()].info.size_bytes, 3 << 30);
    lab.power(PowerRequest::Start).await;
    lab.runs().await;
    let spec = lab.home.inside().vms[&web()].report.spec.clone();
    assert_eq!((spec.cpus, spec.memory_bytes), (2, 512 << 20));
}

#[tokio::test]
async fn of_two_who_resize_a_vm_at_once_each_gets_what_was_asked_for() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    lab.home.inside().holds_resizes = true;
    let cluster = lab.cluster.clone();
    let larger = ResizeVm { disk_bytes: Some(3 << 30), ..ResizeVm::default() };
    let mut larger = tokio::spawn(async move { change::resize(&cluster, &web(), larger).await });
    wait_while(&mut larger, "the disk's home to be asked", async || {
        (lab.home.inside().resizes_asked > 0).then_some(())
    })
    .await;
    let cpus = ResizeVm { cpus: Some(2), ..ResizeVm::default() };
    change::resize(&lab.cluster, &web(), cpus).await.expect("resized");
    lab.home.inside().holds_resizes = false;
    let both = larger.await.expect("it ends").expect("resized");
    assert_eq!(both.cpus, 2);
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    assert_eq!(record.job.spec.root_bytes, Some(3 << 30));
}

#[tokio::test]
async fn a_vm_that_runs_gets_cpus_and_a_larger_disk_and_gives_memory_back() {
    let mut lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let resize = async |lab: &Lab, ask: ResizeVm| change::resize(&lab.cluster, &web(), ask).await;
    let nothing = ResizeVm::default();
    for (ask, why) in [
        (ResizeVm { memory_bytes: Some(512 << 20), ..nothing }, "it was started with 256 MiB"),
        (ResizeVm { cpus: Some(0), ..nothing }, "1 to 255"),
        (ResizeVm { cpus: Some(200), ..nothing }, "more are free at its host"),
        (ResizeVm { disk_bytes: Some(1 << 30), ..nothing }, "it can only grow"),
    ] {
        let refused = resize(&lab, ask).await.expect_err("it can't be done");
        assert!(refused.why.contains(why), "{refused}");
    }
    assert_eq!(lab.home.inside().changed, [], "nothing was done");

    lab.home.inside().refuses_changes = true;
    let ask = ResizeVm { cpus: Some(3), ..nothing };
    resize(&lab, ask).await.expect_err("its host refuses");
    let cpus_of = |lab: &Lab| {
        let record = lab.cluster.index.of_vm(&web()).expect("its record");
        (record.job.spec.cpus, record.job.spec.root_bytes, record.job.spec.memory_bytes)
    };
    assert_eq!(cpus_of(&lab).0, 1, "as before");
    lab.home.inside().refuses_changes = false;

    let memory_bytes = Some(128 << 20);
    let ask = ResizeVm { cpus: Some(3), memory_bytes, disk_bytes: Some(3 << 30), ..nothing };
    let sized = resize(&lab, ask).await.expect("resized");
    assert_eq!((sized.cpus, sized.memory_bytes), (3, 128 << 20));
    assert!(sized.reason.contains("its guest still has 256 MiB"), "{sized:?}");
    assert!(sized.reason.contains("grows at its next boot"), "{sized:?}");
    assert_eq!(lab.home.inside().volumes[&root()].info.size_bytes, 3 << 30);
    let grown = ChangeVm::GrowDisk { role: DiskRole::Root, size_bytes: 3 << 30 };
    let less = ChangeVm::Memory { bytes: 128 << 20 };
    assert_eq!(lab.home.inside().changed, [grown, ChangeVm::Cpus { count: 3 }, less]);
    assert_eq!(cpus_of(&lab), (3, Some(3 << 30), 256 << 20), "its host still has that memory");
    lab.restart_controller().await;
    assert_eq!(lab.runs().await.memory_bytes, 128 << 20);

    // What is moved is not changed.
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &web(), to, VolumesOnMove::Stay).await.expect("it moves");
    let refused = resize(&lab, ResizeVm { cpus: Some(4), ..nothing }).await.expect_err("it moves");
    assert!(refused.why.contains("moved"), "{refused}");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&web()].asked.is_some().then_some(())
    })
    .await;
    switch(&lab, &web());
    wait_for("it to be there", async || {
        let spec = lab.cloud.inside().vms.get(&web()).map(|vm| vm.report.spec.clone());
        spec.is_some_and(|spec| spec.cpus == 3).then_some(())
    })
    .await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    assert_eq!(cpus_of(&lab).2, 128 << 20);
}

#[tokio::test]
async fn a_volume_comes_to_a_vm_that_runs_and_goes_and_the_others_keep_their_places() {
    let mut lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let further = VolumeName::new("further").expect("a name");
    let new = perigee_model::job::NewVolume {
        name: further.clone(),
        size_bytes: Some(1 << 20),
        source: VolumeSource::Empty,
        host: Some(lab.cloud.id.clone()),
        leave_site: Default::default(),
    };
    volumes::create(&lab.cluster, new).await.expect("a volume");
    let ask = AttachVolume { volume: further.clone(), read_only: false };
    let unknown = AttachVolume { volume: VolumeName::new("no").expect("a name"), ..ask.clone() };
    let none = attachments::attach(&lab.cluster, &web(), unknown).await.expect_err("there is none");
    assert_eq!(none.kind, ProblemKind::NotFound);

    lab.home.inside().refuses_changes = true;
    let refused = attachments::attach(&lab.cluster, &web(), ask.clone()).await;
    let refused = refused.expect_err("its host refuses");
    assert!(refused.why.contains("the test wants it so"), "{refused}");
    assert!(refused.next.contains("perigee vm detach"), "{refused}");
    lab.home.inside().refuses_changes = false;
    let disks = |host: &FakeHost| -> Vec<(DiskRole, VolumeName)> {
        let disks = host.inside().vms[&web()].report.spec.disks.clone();
        let data = disks.into_iter().filter(|disk| disk.role.is_data());
        data.map(|disk| (disk.role, disk.volume)).collect()
    };
    let first = (DiskRole::Data(0), data_volume());
    let second = (DiskRole::Data(1), further.clone());
    let record = || lab.cluster.index.of_vm(&web()).expect("its record");
    let left: Vec<_> = record().job.spec.volumes.iter().map(|v| v.volume.clone()).collect();
    assert!(left.contains(&further), "what became of it is not known");
    let gone = DetachVolume { volume: further.clone() };
    attachments::detach(&lab.cluster, &web(), gone).await.expect("detached");
    attachments::attach(&lab.cluster, &web(), ask.clone()).await.expect("attached");
    assert_eq!(disks(&lab.home), [first.clone(), second.clone()]);
    assert!(lab.home.inside().attachments.contains_key(&further));
    let twice = attachments::attach(&lab.cluster, &web(), ask).await.expect_err("it has it");
    assert_eq!(twice.kind, ProblemKind::Conflict, "{twice}");
    // It is the VM's as one that was there from the start.
    let used = volumes::delete(&lab.cluster, &further).await.expect_err("it is used");
    assert_eq!(used.kind, ProblemKind::Conflict, "{used}");

    let ask = DetachVolume { volume: data_volume() };
    attachments::detach(&lab.cluster, &web(), ask.clone()).await.expect("detached");
    assert_eq!(disks(&lab.home), std::slice::from_ref(&second));
    let gone = attachments::detach(&lab.cluster, &web(), ask).await.expect_err("it has gone");
    assert_eq!(gone.kind, ProblemKind::NotFound);
    lab.restart_controller().await;
    lab.power(PowerRequest::Restart { force: true }).await;
    wait_for("its second start", async || (lab.home.inside().starts[&web()] == 2).then_some(()))
        .await;
    lab.runs().await;
    assert_eq!(disks(&lab.home), std::slice::from_ref(&second), "it is the disk that it was");

    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    let ask = AttachVolume { volume: data_volume(), read_only: true };
    attachments::attach(&lab.cluster, &web(), ask).await.expect("it is off");
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    let persistent = record.kind.persistent_vm().expect("it lives without a job");
    let volumes = record.job.spec.volumes.iter().enumerate();
    let mut both: Vec<_> =
        volumes.filter_map(|(at, v)| Some((persistent.role_of(at)?, v.volume.clone()))).collect();
    both.sort();
    assert_eq!(both, [first, second]);
}

#[tokio::test]
async fn a_vm_that_is_being_changed_is_not_moved() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let (held, _, host) = lab.cluster.index.begin_change(&web()).expect("it runs");
    assert_eq!(host, lab.home.id);
    lab.cluster.index.begin_change(&web()).expect_err("one at a time");
    let to = lab.cloud.id.clone();
    let refused = vms::move_to(&lab.cluster, &web(), to.clone(), VolumesOnMove::Stay).await;
    let refused = refused.expect_err("it is being changed");
    assert!(refused.why.contains("being changed"), "{refused}");
    drop(held);
    vms::move_to(&lab.cluster, &web(), to, VolumesOnMove::Stay).await.expect("it moves");
}

#[tokio::test]
async fn a_file_is_copied_into_a_guest_and_out_of_it() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let content: Vec<u8> = (0..300_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let parts = content.chunks(70_000).map(|part| Ok(Bytes::copy_from_slice(part)));
    let parts: Vec<_> = parts.collect();
    let parts = futures_util::stream::iter(parts);
    let copied = guest_files::write(&lab.cluster, &web(), "/srv/file", parts).await;
    assert_eq!(copied.expect("it is copied").bytes, 300_000);
    assert!(lab.home.inside().guest_file.content == content);
    let body = guest_files::read(&lab.cluster, &web(), "/srv/file").await.expect("it is there");
    let read = axum::body::to_bytes(body, usize::MAX).await.expect("all of it");
    assert!(read == content);
    wait_for("it to be closed", async || (lab.home.inside().guest_file.open == 0).then_some(()))
        .await;
    let refused = guest_files::read(&lab.cluster, &web(), "srv/../file").await;
    assert_eq!(refused.expect_err("no such path").kind, ProblemKind::Invalid);
}
