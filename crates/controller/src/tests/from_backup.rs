//! Backups of VMs without a job, and VMs that are made of them.

use perigee_model::backup::{
    Backup, BackupState, BackupTarget, NewBackup, RestoreBackup, RestoreVmBackup, VmBackupPart,
};
use perigee_model::job::{JobState, NewVolume, Start, Vm};
use perigee_model::persistent_vm::{CloudInit, NewVm, PowerRequest, VmState};
use perigee_model::vm::Hardware;
use perigee_model::volume::{Snapshot, VolumeSource};
use perigee_model::{BackupName, DiskRole, ImageName, Problem, ProblemKind, VmId, VolumeName};

use super::backup_schedules::TO;
use super::persistent_vms::{new_vm, web};
use super::{Lab, wait_for};
use crate::clock::now_ms;
use crate::guest::nvram;
use crate::records::declared;
use crate::storage::backups::{self, BackupRecord};
use crate::storage::volumes;
use crate::vms::{self, from_backup};

/// A VM with UEFI whose disks are at the same host, which runs.
pub async fn with_a_vm() -> Lab {
    with(Hardware::default()).await
}

async fn with(hardware: Hardware) -> Lab {
    let lab = Lab::up().await;
    let cloud_init = CloudInit { user: Some("ann".to_owned()), ..CloudInit::default() };
    let new = new_vm("cloud1");
    lab.make_vm(NewVm { start: Start::Anywhere, cloud_init, hardware, ..new }).await;
    lab.runs().await;
    lab
}

fn of_web() -> NewBackup {
    let to = BackupTarget { address: TO.to_owned(), endpoint: None };
    let (volume, image, whole, encrypted) = Default::default();
    NewBackup { volume, vm: Some(web()), image, to, whole, encrypted }
}

fn web2() -> VmId {
    VmId::new("web2").expect("a name")
}

fn volume(name: &str) -> VolumeName {
    VolumeName::new(name).expect("a name")
}

impl Lab {
    pub async fn ended(&self, backup: &Backup) -> Backup {
        wait_for("the backup to end", async || {
            let known = backups::get(&self.cluster, &backup.name).await.expect("the backup");
            (known.state != BackupState::Shipping).then_some(known)
        })
        .await
    }

    async fn backed_up(&self) -> Backup {
        let begun = backups::create(&self.cluster, of_web(), None).await.expect("a backup");
        let done = self.ended(&begun).await;
        assert_eq!(done.state, BackupState::Completed, "{done:?}");
        done
    }

    async fn restored(&self, backup: &BackupName) -> Result<Vm, Problem> {
        let ask = RestoreVmBackup { vm: web2(), host: None, from: None, whole: false };
        from_backup::restore(&self.cluster, backup, ask, "ann".to_owned(), None).await
    }

    /// What a volume of either host begins with.
    fn bytes_of(&self, name: &str) -> Option<Vec<u8>> {
        let of = |host: &super::fake::FakeHost| {
            host.inside().volumes.get(&volume(name)).map(|volume| volume.data.clone())
        };
        of(&self.home).or_else(|| of(&self.cloud))
    }

    /// What hosts have that was made for the second VM.
    fn of_web2(&self) -> Vec<VolumeName> {
        let all = [&self.home, &self.cloud].map(|host| {
            let inside = host.inside();
            let names = inside.volumes.keys().filter(|name| name.as_str().starts_with("web2-"));
            names.cloned().collect::<Vec<_>>()
        });
        all.concat()
    }

    fn both(&self, change: impl Fn(&mut super::fake::Inside)) {
        [&self.home, &self.cloud].iter().for_each(|host| change(&mut host.inside()));
    }

    /// The second VM has its disks.
    async fn is_whole(&self) {
        wait_for("the disks of the VM", async || {
            let record = self.cluster.index.of_vm(&web2())?;
            (!record.kind.is_made_of_backup()).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_vm_is_backed_up_with_its_disks_of_one_moment_and_restored_beside_itself() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    assert_eq!((done.parts.len(), done.size_bytes), (2, Some(3 << 30)), "{done:?}");
    let key = format!("backups/{}", done.name);
    let record = lab.cluster.records.read::<BackupRecord>(&key).await.expect("the store");
    assert!(record.expect("its record").vm.is_none(), "what may be secret is at the target only");
    let sealed: Vec<_> = [&lab.home, &lab.cloud]
        .iter()
        .flat_map(|host| host.inside().backups.sealed.clone())
        .collect();
    assert_eq!(sealed.iter().map(Vec::len).sum::<usize>(), 3, "{sealed:?}");
    let made = lab.restored(&done.name).await.expect("a VM");
    assert_eq!((made.status, made.reason.as_str()), (VmState::Stopped, ""));
    let record = lab.cluster.index.of_vm(&web2()).expect("its record");
    let new = declared(&record).expect("a VM without a job");
    assert_eq!((new.image.as_str(), new.disk_bytes), ("debian", Some(1 << 30)));
    assert_eq!(new.volumes.len(), 1);
    assert_eq!(new.volumes[0].volume.as_str(), "web2-data0");
    let persistent = record.kind.persistent_vm().expect("a VM without a job");
    assert_eq!(persistent.cloud_init.user.as_deref(), Some("ann"));
    let again = lab.restored(&done.name).await;
    assert_eq!(again.expect_err("it is there").kind, ProblemKind::Conflict);
    // A part alone makes a volume, and is not deleted alone.
    let ask = RestoreBackup { volume: volume("alone"), host: None, from: None, whole: true };
    backups::restore(&lab.cluster, &done.parts[0], ask).await.expect("a volume");
    let part = backups::delete(&lab.cluster, &done.parts[0], false).await.expect_err("a part");
    assert_eq!(part.kind, ProblemKind::Conflict);
    // What is still to come has not come.
    let needed = backups::delete(&lab.cluster, &done.name, false).await.expect_err("it is needed");
    assert!(needed.why.contains("still to come from it"), "{needed}");
    lab.both(|inside| inside.restores.layers.clear());
    let reading = backups::begin_reading(&done.parts[0]);
    let read = backups::delete(&lab.cluster, &done.name, false).await.expect_err("it is read");
    assert_eq!(read.kind, ProblemKind::Conflict);
    drop(reading);
    // It stays listed until all of it is gone.
    lab.both(|inside| inside.backups.stays = Some(done.parts[0].clone()));
    wait_for("the deletion to begin", async || {
        backups::delete(&lab.cluster, &done.name, false).await.ok()
    })
    .await;
    let failed = wait_for("the part to stay", async || {
        let known = backups::get(&lab.cluster, &done.name).await.expect("the backup");
        (known.state == BackupState::Failed).then_some(known)
    })
    .await;
    assert!(failed.problem.contains("its directory is damaged"), "{failed:?}");
    lab.both(|inside| inside.backups.stays = None);
    backups::delete(&lab.cluster, &done.name, false).await.expect("it is deleted");
    wait_for("all of it to be gone", async || {
        (lab.backups().await.is_empty() && lab.at_target() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_vm_starts_with_the_disks_of_its_backup_while_their_bytes_are_still_to_come() {
    let lab = with(Hardware { tpm: true, ..Hardware::default() }).await;
    let done = lab.backed_up().await;
    lab.restored(&done.name).await.expect("a VM");
    let shown = volumes::volumes(&lab.cluster).await.expect("volumes");
    let of_web2 = shown.iter().filter(|volume| volume.name.as_str().starts_with("web2-"));
    let to_come: Vec<bool> = of_web2.map(|volume| volume.restoring.is_some()).collect();
    assert_eq!(to_come, [true; 4], "{shown:?}");
    let image = ImageName::new("image").expect("a name");
    let snapshot = vms::guest::snapshot(&lab.cluster, &web2(), &Snapshot { image }).await;
    let refused = snapshot.expect_err("bytes are to come");
    assert!(refused.why.contains("still to come from"), "{refused}");
    vms::persistent::request_power(&lab.cluster, &web2(), PowerRequest::Start).await.expect("on");
    let spec = wait_for("it to run", async || {
        let of = |host: &super::fake::FakeHost| {
            host.inside().vms.get(&web2()).map(|vm| vm.report.spec.clone())
        };
        of(&lab.home).or_else(|| of(&lab.cloud))
    })
    .await;
    let roles: Vec<DiskRole> = spec.disks.iter().map(|disk| disk.role).collect();
    for role in [DiskRole::Root, DiskRole::Nvram, DiskRole::Tpm, DiskRole::Data(0)] {
        assert!(roles.contains(&role), "{roles:?}");
    }
    for (disk, of) in [("root", ""), ("nvram", ".nvram"), ("tpm", ".tpm"), ("data0", ".data0")] {
        let wanted = format!("{}{of}", done.name).into_bytes();
        assert_eq!(lab.bytes_of(&format!("web2-{disk}")), Some(wanted), "{disk}");
    }
    vms::persistent::delete(&lab.cluster, &web2(), true).await.expect("deleted");
    wait_for("its own disks to be gone", async || {
        (lab.of_web2() == [volume("web2-data0")]).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_backup_of_an_older_version_gives_a_vm_new_variables() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    lab.both(|inside| {
        let all = inside.backups.at.get_mut(TO).into_iter().flat_map(|at| at.values_mut());
        for of_vm in all.filter_map(|asked| asked.vm.as_mut()) {
            of_vm.parts.retain(|part| !part.backup.as_str().ends_with("nvram"));
        }
    });
    lab.restored(&done.name).await.expect("a VM");
    assert_eq!(lab.bytes_of("web2-nvram").map(|flash| flash.len()), Some(nvram::BYTES));
}

/// Whoever can write to the target can write this.
#[tokio::test]
async fn a_backup_of_a_vm_with_parts_of_others_or_without_a_disk_is_damaged() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    let change = |change: fn(&mut Vec<VmBackupPart>)| {
        lab.both(|inside| {
            let all = inside.backups.at.get_mut(TO).into_iter().flat_map(|at| at.values_mut());
            all.filter_map(|asked| asked.vm.as_mut()).for_each(|of_vm| change(&mut of_vm.parts));
        });
    };
    change(|parts| parts[0].backup = BackupName::new("other-1.data0").expect("a name"));
    let other = lab.restored(&done.name).await.expect_err("it is another one's");
    assert!(other.why.contains("damaged: it names backup other-1.data0"), "{other}");
    change(|parts| parts.retain(|part| part.backup.as_str().ends_with(".nvram")));
    let without = lab.restored(&done.name).await.expect_err("a disk is missing");
    assert_eq!(without.kind, ProblemKind::Conflict);
    assert!(without.why.contains("damaged: it has no part for volume"), "{without}");
}

#[tokio::test]
async fn what_a_restore_of_a_vm_can_refuse_is_refused_before_anything_is_made() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    let refused = async |vm: &str| {
        let vm = VmId::new(vm).expect("a name");
        let ask = RestoreVmBackup { vm, host: None, from: None, whole: false };
        let made =
            from_backup::restore(&lab.cluster, &done.name, ask, "ann".to_owned(), None).await;
        made.expect_err("it is refused").kind
    };
    assert_eq!(refused("web-0001").await, ProblemKind::Invalid, "it could be a job's");
    let taken = NewVolume {
        name: volume("web2-data0"),
        host: Some(lab.home.id.clone()),
        size_bytes: Some(4096),
        source: VolumeSource::Empty,
        leave_site: Default::default(),
    };
    volumes::create(&lab.cluster, taken).await.expect("a volume");
    assert_eq!(refused("web2").await, ProblemKind::Conflict);
    lab.both(|inside| {
        if let Some(at) = inside.backups.at.get_mut(TO) {
            at.remove(&done.parts[1]);
        }
    });
    assert_eq!(refused("web3").await, ProblemKind::NotFound, "a part is not at the target");
    let asked = [&lab.home, &lab.cloud].map(|host| host.inside().restores.asked.len());
    assert_eq!(asked, [0, 0], "no host was asked to make a disk");
}

#[tokio::test]
async fn a_restore_of_a_vm_that_fails_leaves_no_disks() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    // The last one, when there are all others.
    lab.both(|inside| inside.restores.refuses = Some(volume("web2-data0")));
    let failed = lab.restored(&done.name).await.expect_err("it is damaged");
    assert!(failed.why.contains("not what was shipped"), "{failed}");
    let asked = [&lab.home, &lab.cloud].map(|host| host.inside().restores.asked.len());
    assert_eq!(asked.iter().sum::<usize>(), 3, "its other disks were made");
    assert!(lab.of_web2().is_empty());
    assert!(lab.cluster.index.of_vm(&web2()).is_none());
    let left = volumes::volumes(&lab.cluster).await.expect("volumes");
    assert!(left.iter().all(|one| !one.name.as_str().starts_with("web2-")), "{left:?}");
    lab.both(|inside| inside.restores.refuses = None);
    lab.restored(&done.name).await.expect("its name is free");
}

#[tokio::test]
async fn a_host_of_an_older_version_makes_no_vm_of_a_backup() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    lab.both(|inside| inside.restores.is_older = true);
    let refused = lab.restored(&done.name).await.expect_err("its disks would be nobody's");
    assert_eq!(refused.kind, ProblemKind::Unsupported, "{refused}");
    assert!(lab.of_web2().is_empty());
}

/// The controller is killed instead of this write, and started again.
async fn killed_at(write: u64) {
    let mut lab = with_a_vm().await;
    let done = lab.backed_up().await;
    let cut = lab.cluster.records.counts.cut_at("web2", write);
    tokio::select! {
        made = lab.restored(&done.name) => panic!("there is no write {write}: {made:?}"),
        () = wait_for("the cut", async || cut.is_reached().then_some(())) => {}
    }
    lab.restart_controller().await;
    if lab.cluster.index.of_vm(&web2()).is_none() {
        assert_eq!((write, lab.of_web2()), (1, Vec::new()), "nothing is made without a record");
        return;
    }
    lab.is_whole().await;
    let mut names = lab.of_web2();
    names.sort();
    assert_eq!(names, ["web2-data0", "web2-nvram", "web2-root"].map(volume), "at write {write}");
    let data = volumes::find(&lab.cluster, &volume("web2-data0")).await.expect("it has a record");
    assert!(data.seen.is_some(), "at write {write}");
    assert_eq!(vms::get(&lab.cluster, &web2()).await.expect("the VM").status, VmState::Stopped);
    lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_restore_goes_on_with_it() {
    futures_util::future::join_all((1..=7).map(killed_at)).await;
}

#[tokio::test]
async fn a_vm_that_is_deleted_while_its_disks_are_made_leaves_none_of_its_own() {
    let lab = with_a_vm().await;
    let done = lab.backed_up().await;
    lab.both(|inside| inside.restores.hangs = true);
    let deleted = async {
        wait_for("its record", async || lab.cluster.index.of_vm(&web2()).map(drop)).await;
        let refused =
            backups::create(&lab.cluster, NewBackup { vm: Some(web2()), ..of_web() }, None);
        assert_eq!(refused.await.expect_err("it has none").kind, ProblemKind::Unavailable);
        vms::persistent::delete(&lab.cluster, &web2(), true).await.expect("deleted");
    };
    let (made, ()) = tokio::join!(lab.restored(&done.name), deleted);
    assert!(made.expect_err("it was deleted").why.contains("was deleted"));
    lab.both(|inside| inside.restores.hangs = false);
    wait_for("its disks to be gone", async || lab.of_web2().is_empty().then_some(())).await;
}

#[tokio::test]
async fn a_second_backup_of_a_vm_to_the_same_target_is_refused_while_the_first_is_shipped() {
    let lab = with_a_vm().await;
    lab.both(|inside| inside.backups.hangs = true);
    let first = backups::create(&lab.cluster, of_web(), None).await.expect("a backup");
    wait_for("the next second, in which a backup has another name", async || {
        (now_ms() / 1000 > first.begun_ms / 1000).then_some(())
    })
    .await;
    let second =
        backups::create(&lab.cluster, of_web(), None).await.expect_err("it would take its pins");
    assert_eq!(second.kind, ProblemKind::Conflict);
    assert!(second.why.contains("is being shipped to the same target"), "{second}");
    lab.both(|inside| inside.backups.hangs = false);
    assert_eq!(lab.ended(&first).await.state, BackupState::Completed);
}

/// The variables of its firmware are as little left out as its disks.
#[tokio::test]
async fn a_backup_waits_for_the_host_of_a_vm_s_disks() {
    let lab = with_a_vm().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    wait_for("its record", async || {
        let record = lab.cluster.index.of_vm(&web())?;
        (record.job.state == JobState::Queued).then_some(())
    })
    .await;
    lab.both(|inside| inside.down = true);
    let begun = backups::create(&lab.cluster, of_web(), None).await.expect("a backup");
    wait_for("the reason", async || {
        let known = backups::get(&lab.cluster, &begun.name).await.expect("the backup");
        assert_eq!(known.state, BackupState::Shipping, "{known:?}");
        (!known.problem.is_empty()).then_some(())
    })
    .await;
    lab.both(|inside| inside.down = false);
    assert_eq!(lab.ended(&begun).await.state, BackupState::Completed);
}
