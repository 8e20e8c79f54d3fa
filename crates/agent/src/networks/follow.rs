//! In the pause of a move frames for the VM go to its destination, and wait there at its card until the VM runs: the kernel keeps as many as the
//! card's queue has places for (`txqueuelen`, 1000). So nobody has to send anything again that was sent in the pause. The first packet of a new TCP connection would be
//! sent again only after a second (RFC 6298, section 2.1).
//!
//! The source and the destination change their own entries at once. The other hosts hear of the pause from the controller.

use std::sync::PoisonError;

use perigee_model::HostId;
use perigee_model::network::Card;

use super::Networks;
use super::plan::{self, Way};
use super::tools::batch;

impl Networks {
    /// Sends frames for a card of this host to the host from now on. The next passes keep that while
    /// [`super::CardHere::at`] says so.
    ///
    /// # Errors
    /// The host is none with which this one shares a network, or `bridge` fails.
    pub async fn send_to(&self, card: &Card, host: &HostId) -> Result<(), String> {
        let way = match *host == self.host {
            true => Way::Card,
            false => {
                let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
                let peers = wanted.iter().flat_map(|wanted| &wanted.peers);
                let peer = peers.into_iter().find(|peer| peer.host == *host);
                Way::Host(peer.ok_or_else(|| format!("no tunnel leads to {host}"))?.address)
            }
        };
        batch("bridge", &plan::lead(&self.tag, card, way)).await
    }
}
