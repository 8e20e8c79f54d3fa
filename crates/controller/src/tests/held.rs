//! Jobs and moves with a volume that may not leave its site. `tpch` is at `cloud1`, jobs start at `home1`.

use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState};
use perigee_model::plan::Way;
use perigee_model::volume_move::{VolumeMoveCause, VolumesOnMove};
use perigee_model::{DiskRole, LeaveSite, ProblemKind};

use super::{Lab, data_volume, spec, vm_of};
use crate::{jobs, planning, vms, volume_moves};

async fn held() -> Lab {
    let lab = Lab::up().await;
    let name = data_volume();
    lab.cloud.inside().volumes.get_mut(&name).expect("it").info.leave_site = LeaveSite::Never;
    lab
}

#[tokio::test]
async fn what_a_job_writes_stays_at_the_site_of_held_data() {
    let lab = held().await;
    let id = lab.submit(spec(Access::Read)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let disks = jobs::record(&lab.cluster, &id).await.expect("record").placement.expect("it").disks;
    for disk in disks {
        let is_held = disk.role != DiskRole::Seed;
        let home = if is_held { &lab.cloud.id } else { &lab.home.id };
        assert_eq!((&disk.home, disk.leave_site), (home, LeaveSite::held(is_held)), "{disk:?}");
        if disk.temporary {
            let host = if is_held { &lab.cloud } else { &lab.home };
            let made = host.inside().volumes[&disk.volume].info.leave_site;
            assert_eq!(made, disk.leave_site, "{disk:?}");
        }
    }
    let vm = vm_of(&id);
    assert!(
        lab.home.inside().vms[&vm].report.spec.locks_memory,
        "its memory stays off the disks there"
    );
}

#[tokio::test]
async fn a_job_file_may_let_what_it_writes_leave_and_a_free_volume_is_no_way_out() {
    let lab = held().await;
    let writes = LeaveSite::Allowed;
    let id = lab.submit(JobSpec { writes, ..spec(Access::Read) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let disks = jobs::record(&lab.cluster, &id).await.expect("record").placement.expect("it").disks;
    let output = disks.iter().find(|disk| disk.role == DiskRole::Output).expect("an output");
    assert_eq!((&output.home, output.leave_site), (&lab.home.id, LeaveSite::Allowed));
    let vm = vm_of(&id);
    assert!(
        lab.home.inside().vms[&vm].report.spec.locks_memory,
        "what it reads is held all the same"
    );
}

#[tokio::test]
async fn no_move_is_begun_or_planned_that_the_home_would_refuse() {
    let lab = held().await;
    let cause = VolumeMoveCause::Asked;
    let refused = volume_moves::request(&lab.cluster, &data_volume(), &lab.home.id, cause).await;
    let refused = refused.expect_err("another site");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    for part in ["tpch", "leave-site: never", "site cloud", "home1 is at home"] {
        assert!(refused.to_string().contains(part), "{refused}");
    }
    let plan = planning::plan(&lab.cluster, &spec(Access::Read)).await.expect("a plan");
    let migrate = plan.options.iter().find(|option| option.way == Way::Migrate);
    if let Some(migrate) = migrate {
        assert!(migrate.reason.contains("leave-site: never"), "{}", migrate.reason);
    }
    let id = lab.submit(spec(Access::Read)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    let (to, stay) = (lab.cloud.id.clone(), VolumesOnMove::Stay);
    let refused = vms::move_to(&lab.cluster, &vm, to, stay).await;
    let refused = refused.expect_err("its memory has some of it");
    assert!(refused.to_string().contains("leave-site: never"), "{refused}");
}
