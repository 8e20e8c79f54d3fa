//! The parts of a pool that its iSCSI target uses: the clients, and the reservations of volumes.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use perigee_iscsi::access::{Client, ClientFile, Clients};
use perigee_iscsi::chap::{Chap, Credentials, Secret};
use perigee_iscsi::unit::KeepReservations;
use perigee_model::{Problem, VolumeName};
use perigee_store::{Grant, Pool};

/// The clients of the file, and then those of the catalog. If there are neither, every initiator may use
/// every target, but not at a host of a cluster: there volumes are tenants'.
pub struct KnownClients {
    pub in_cluster: bool,
    pub file: Option<ClientFile>,
    pub pool: Arc<Pool>,
}

impl KnownClients {
    async fn client(&self, initiator: &str) -> Result<Option<Client>, Problem> {
        if let Some(file) = &self.file
            && let Some(client) = file.find(initiator).await?
        {
            return Ok(Some(client));
        }
        if let Ok(name) = initiator.parse()
            && let Some(grant) = self.pool.grant(&name).await?
        {
            return Ok(Some(granted(grant)));
        }
        let open =
            !self.in_cluster && self.file.is_none() && !self.pool.has_known_clients().await?;
        Ok(open.then(Client::unrestricted))
    }
}

fn granted(grant: Grant) -> Client {
    let credentials = |chap: perigee_model::client::Chap| Credentials {
        user: chap.user.to_string(),
        secret: Secret::new(chap.secret.reveal()),
    };
    let target = grant.target_chap.map(credentials);
    let chap = grant.chap.map(|own| Chap { initiator: credentials(own), target });
    let targets = grant.volumes.iter().map(ToString::to_string).collect();
    Client { targets, chap }
}

impl Clients for KnownClients {
    fn find<'a>(&'a self, initiator: &'a str) -> BoxFuture<'a, Result<Option<Client>, Problem>> {
        Box::pin(self.client(initiator))
    }
}

/// Keeps persistent reservations in the catalog, so that they survive a restart of the server.
pub struct KeptReservations(pub Arc<Pool>);

impl KeepReservations for KeptReservations {
    fn load<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<Option<String>, Problem>> {
        Box::pin(async move {
            match VolumeName::new(volume) {
                Ok(name) => self.0.reservations(&name).await,
                // An image is read-only and has no reservations.
                Err(_) => Ok(None),
            }
        })
    }

    fn save<'a>(
        &'a self,
        volume: &'a str,
        state: Option<String>,
    ) -> BoxFuture<'a, Result<(), Problem>> {
        Box::pin(async move {
            match VolumeName::new(volume) {
                Ok(name) => self.0.keep_reservations(&name, state).await,
                Err(_) => Ok(()),
            }
        })
    }
}
