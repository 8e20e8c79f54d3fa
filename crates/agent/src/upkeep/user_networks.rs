//! Keeps the packet filter of user networks, and of cards in bridges of the operator, while VMs with such cards run.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::network::BridgeCard;
use perigee_model::vm::VmNetwork;
use tokio::time::{Instant, sleep, timeout};

use crate::host::Host;
use crate::networks::FIND_AGAIN;
use crate::networks::watch::Watch;
use crate::user_networks::{LOOK_AT_FILTER, resolvers};
use crate::vms::Vms;

/// The filters are looked at no oftener, whatever others change.
const REST: Duration = Duration::from_millis(20);

/// Looks at the filters for as long as VMs with cards run, and now and then whether VMs can have cards that couldn't.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    let networks = &host.user_networks;
    let watch = Watch::new();
    if let Err(error) = &watch {
        tracing::warn!(%error, "the agent sees only every {} s whether somebody has changed the packet filter", LOOK_AT_FILTER.as_secs());
    }
    let mut looked = Instant::now();
    loop {
        sleep(REST).await;
        let heard = async {
            let heard = watch.as_ref().map_err(drop)?.removed().await;
            heard.map_err(drop)
        };
        // Without a watch it is looked at now and then.
        if let Ok(Err(())) = timeout(LOOK_AT_FILTER, heard).await {
            sleep(LOOK_AT_FILTER).await;
        }
        host.bridged.look_for(bridge_cards(&vms)).await;
        if !networks.are_possible() {
            continue;
        }
        let hosts = host.networks.hosts();
        if networks.cannot().is_some() && looked.elapsed() > FIND_AGAIN {
            networks.look_again(hosts.as_deref()).await;
            looked = Instant::now();
        }
        let has_guests = vms.list().iter().any(|vm| vm.spec.network == VmNetwork::User);
        networks.remember_resolvers(resolvers(), has_guests);
        if has_guests && networks.be_alone().is_ok() {
            networks.look_at_filter(hosts.as_deref()).await;
        }
    }
}

/// The cards of this host's VMs in bridges of the operator.
fn bridge_cards(vms: &Vms) -> Vec<BridgeCard> {
    let all = vms.list();
    let cards = all.iter().filter_map(|vm| match &vm.spec.network {
        VmNetwork::Bridge(card) => Some(card.clone()),
        _ => None,
    });
    cards.collect()
}
