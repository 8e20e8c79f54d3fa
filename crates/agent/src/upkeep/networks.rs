//! Brings about the networks of tenants that the controller wants here, now and then and when something has changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::VmId;
use perigee_model::vm::VmStatus;
use tokio::time::Instant;

use crate::host::Host;
use crate::networks::watch::Watch;
use crate::networks::{CardHere, Cards, FIND_AGAIN};
use crate::vms::Vms;

const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// After a pass it is heard no sooner that somebody has removed rules: it may have been the pass itself.
const REST: Duration = Duration::from_millis(500);

/// Brings about what is wanted now and then. It does not end.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    let networks = &host.networks;
    if !networks.are_possible() {
        return std::future::pending().await;
    }
    let watch = Watch::new();
    if let Err(error) = &watch {
        tracing::warn!(%error, "the agent sees only every {} s whether somebody has changed the filter of tenants' networks", LOOK_AGAIN.as_secs());
    }
    let mut looked = Instant::now();
    loop {
        if networks.trouble().is_some() && looked.elapsed() > FIND_AGAIN {
            networks.look_at_end().await;
            looked = Instant::now();
        }
        let cards = cards_of(&host, &vms);
        // It is said in the host's report.
        let _ = networks.pass(Cards::Of(cards.clone(), vms.are_readable())).await;
        let (rested, until) = (Instant::now() + REST, Instant::now() + LOOK_AGAIN);
        loop {
            // A VM that runs here from now on is not waited for: what is sent to it still goes to its old host.
            let seen = host.changes.now();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || cards_of(&host, &vms) != cards {
                break;
            }
            tokio::select! {
                () = networks.is_to_pass(&watch, rested) => break,
                () = host.changes.wait(seen, left) => {}
            }
        }
    }
}

/// The cards of the VMs that have a QEMU here.
fn cards_of(host: &Host, vms: &Vms) -> BTreeMap<VmId, CardHere> {
    let here = vms.list().into_iter().filter(|vm| vm.status() != VmStatus::Gone);
    here.filter_map(|vm| {
        let card = vm.spec.network.card()?.clone();
        let at = vm.frames_go_to(&host.name);
        Some((vm.id().clone(), CardHere { card, at }))
    })
    .collect()
}
