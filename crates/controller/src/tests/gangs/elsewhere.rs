//! VMs of a gang at other sites than confined data that they use.

use perigee_model::job::{Access, JobSpec, MoveJob, Start};
use perigee_model::{HostId, LeaveSite};

use super::super::{Lab, data_volume, spec, wait_for};
use super::moves::{Way, until_moved};
use super::{Does, all_run, gang, member, until};
use crate::jobs;

/// The data are at `cloud1`.
#[tokio::test]
async fn vms_of_a_gang_whose_file_lets_them_go_keep_nothing_away_from_confined_data() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    lab.cloud.inside().volumes.get_mut(&data_volume()).expect("it").info.leave_site =
        LeaveSite::Never;
    let (volumes, ranks) = (spec(Access::Read).volumes, LeaveSite::Allowed);
    let start = Start::Host(lab.home.id.clone());
    let id = lab.submit(JobSpec { volumes, start, ranks, ..gang(2) }).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    for rank in 0..2 {
        let spec = lab.home.inside().vms[&member(&id, rank)].report.spec.clone();
        assert!(spec.locks_memory && spec.hides_output && spec.machine.keeps_free_memory);
        let record = jobs::record(&lab.cluster, &perigee_model::gang::member_of(&id, rank)).await;
        let disks = record.expect("its record").placement.expect("its disks").disks;
        let mut written = disks.iter().filter(|disk| disk.temporary && !disk.read_only);
        assert!(written.all(|disk| disk.home == lab.cloud.id && disk.leave_site.is_never()));
    }
    let all_locked_at = async |to: &HostId, locked: bool| {
        let ask = MoveJob { hosts: vec![to.clone()], ..MoveJob::default() };
        // What the move before has left may not be removed yet.
        wait_for("their move", async || {
            jobs::ask_to_move(&lab.cluster, &id, ask.clone()).await.ok()
        })
        .await;
        let moved = |job: &perigee_model::job::Job| {
            all_run(job) && job.members.iter().all(|one| one.host.as_ref() == Some(to))
        };
        until_moved(&lab, &hosts, &id, |_, _| Way::Arrives, moved).await;
        let host = hosts.into_iter().find(|host| host.id == *to).expect("it");
        let is = |rank| host.inside().vms[&member(&id, rank)].report.spec.locks_memory == locked;
        assert!((0..2).all(is), "at {to}");
        wait_for("the move to be over", async || {
            let record = jobs::record(&lab.cluster, &id).await.expect("its record");
            record.kind.gang().expect("a gang").open_move().is_none().then_some(())
        })
        .await;
    };
    all_locked_at(&lab.cloud.id, false).await;
    all_locked_at(&lab.home.id, true).await;
}
