//! When links between hosts are measured.

use perigee_model::job::Link;
use perigee_model::persistent_vm::NewVm;

use super::{Lab, running};
use crate::clock::now_ms;
use crate::planning::links;

const HOUR_MS: u64 = 3600 * 1000;

/// All links were measured so long ago.
async fn make_older(lab: &Lab, ms: u64) {
    for link in lab.cluster.links.all() {
        let link = Link { measured_ms: now_ms() - ms, ..link };
        lab.cluster.links.put(&lab.cluster.records, link).await.expect("a link");
    }
}

/// Whether a plan measures all links again that were measured so long ago, or none.
async fn are_measured_again(lab: &Lab, after_ms: u64) -> bool {
    make_older(lab, after_ms).await;
    let problem = links::ensure(&lab.cluster, &[]).await;
    assert!(problem.is_none(), "{problem:?}");
    let is_new = |link: &Link| link.measured_ms > now_ms() - after_ms / 2;
    let all = lab.cluster.links.all();
    let new = all.iter().filter(|link| is_new(link)).count();
    assert!(new == 0 || new == all.len(), "{all:?}");
    new > 0
}

/// One that runs for months kept all links from ever being measured again.
#[tokio::test]
async fn a_vm_that_uses_no_link_keeps_none_from_being_measured_again() {
    let lab = Lab::up().await;
    links::probe_all(&lab.cluster).await.expect("figures");
    let new = super::persistent_vms::new_vm("home1");
    lab.make_vm(NewVm { volumes: Vec::new(), ..new }).await;
    lab.runs().await;
    assert!(are_measured_again(&lab, HOUR_MS).await);
}

#[tokio::test]
async fn a_link_over_which_a_vm_reads_is_measured_once_a_day() {
    let lab = Lab::up().await;
    links::probe_all(&lab.cluster).await.expect("figures");
    running(&lab).await;
    assert!(!are_measured_again(&lab, HOUR_MS).await);
    assert!(are_measured_again(&lab, 25 * HOUR_MS).await);
}
