//! Asks the metadata address of a rented host whether the provider takes the host back.

use std::sync::Arc;

use crate::host::Host;

/// Asks as long as the agent runs, if the host has such an address.
pub async fn keep(host: Arc<Host>) {
    match &host.notices {
        Some(notices) => notices.keep().await,
        None => std::future::pending().await,
    }
}
