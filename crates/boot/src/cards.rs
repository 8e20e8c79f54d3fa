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

/// `None` while the volume server does not answer: no machine can boot then.
pub async fn known(volumes: &Client) -> Option<Cards> {
    let asked = ask(volumes).await;
    asked.inspect_err(|problem| tracing::warn!(%problem, "no machine gets an address yet")).ok()
}

/// Waits until there is a card that is not known yet, or one is no client's any more, and returns all. `None` is what is
/// known while the volume server has not answered yet.
pub async fn changed(volumes: &Client, known: Option<&Cards>) -> Cards {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        match ask(volumes).await {
            Ok(cards) if Some(&cards) != known => return cards,
            Ok(_) => {}
            Err(problem) => tracing::debug!(%problem, "new clients get no address yet"),
        }
    }
}
