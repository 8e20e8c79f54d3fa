//! Renews the lease of a rented host when the controller asks this agent for something, and ends the host when the lease is over.

use std::sync::Arc;

use crate::host::Host;

/// Keeps the lease as long as the agent runs, if the host has one.
pub async fn keep(host: Arc<Host>) {
    match &host.lease {
        Some(lease) => lease.keep(|| host.terms.commanded_ms()).await,
        None => std::future::pending().await,
    }
}
