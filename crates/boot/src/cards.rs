//! The network cards of the pool's clients. Only these machines get an address, and one each: a lease never ends, so
//! otherwise anybody in the network could take them all.

use std::collections::BTreeSet;
use std::time::Duration;

use perigee_http::Client;
use perigee_model::Problem;
use perigee_model::client::{ClientInfo, MacAddress};

/// A machine that has just become a client gets its address after this time. Firmware asks for longer.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The cards of the present clients.
pub type Cards = BTreeSet<MacAddress>;

async fn ask(volumes: &Client) -> Result<Cards, Problem> {
    let clients: Vec<ClientInfo> = volumes.get("/v1/clients").await?;
    Ok(clients.into_iter().filter_map(|client| client.mac).collect())
}

/// None while the volume server does not answer: no machine can boot then.
pub async fn known(volumes: &Client) -> Cards {
    ask(volumes).await.unwrap_or_else(|problem| {
        tracing::warn!(%problem, "no machine gets an address yet");
        Cards::new()
    })
}

/// Waits until there is a card that is not known yet, and returns all. A card that is no client's any more stays known
/// until then.
pub async fn added(volumes: &Client, known: &Cards) -> Cards {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        match ask(volumes).await {
            Ok(cards) if !cards.is_subset(known) => return cards,
            Ok(_) => {}
            Err(problem) => tracing::debug!(%problem, "new clients get no address yet"),
        }
    }
}
