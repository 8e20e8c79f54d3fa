//! The parts of a pool that its iSCSI target uses: the clients, and the reservations of volumes.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use perigee_iscsi::access::{Client, ClientFile, Clients};
use perigee_iscsi::chap::{Chap, Credentials, Secret};
use perigee_iscsi::unit::Keep;
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
    /// For the log, if nobody is served: in a cluster, an initiator gets nothing until it is added.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn warning(&self) -> Result<Option<String>, Problem> {
        if !self.in_cluster || self.file.is_some() || self.pool.has_known_clients().await? {
            return Ok(None);
        }
        let count = self.pool.volumes().await?.len();
        Ok((count > 0).then(|| {
            format!(
                "iSCSI serves nobody: this host is in a cluster, its pool has volumes ({count}), and knows no client; `perigee client \
                 add` makes one known, or `--iscsi-clients` names a file with them"
            )
        }))
    }

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

/// Keeps persistent reservations, and what initiators have seen, in the catalog, so that they survive a restart of the server.
pub struct Kept(pub Arc<Pool>);

impl Keep for Kept {
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

    fn seen<'a>(
        &'a self,
        export: &'a str,
        port: &'a str,
    ) -> BoxFuture<'a, Result<Option<String>, Problem>> {
        Box::pin(self.0.seen_by_initiator(export, port))
    }

    fn see<'a>(
        &'a self,
        export: &'a str,
        port: &'a str,
        serial: String,
    ) -> BoxFuture<'a, Result<(), Problem>> {
        Box::pin(self.0.keep_seen_by_initiator(export, port, serial))
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::volume::{CreateVolume, VolumeSource};
    use perigee_store::PoolConfig;

    use super::*;
    use crate::remotes::{RemoteOptions, Remotes};

    #[tokio::test]
    async fn a_target_that_serves_nobody_says_so_when_it_starts() {
        let dir = tempfile::tempdir().expect("a directory");
        let remotes = Remotes::load(&RemoteOptions::default()).expect("remotes");
        let config =
            PoolConfig { private: None, dir: dir.path().into(), connect: remotes.connector() };
        let pool = Pool::open(config).await.expect("a pool");
        let known = |in_cluster| KnownClients { in_cluster, file: None, pool: Arc::clone(&pool) };
        assert_eq!(known(true).warning().await.expect("it is read"), None, "it has nothing");
        let name = VolumeName::new("v").expect("a name");
        let new = CreateVolume::new(name, Some(4096), VolumeSource::Empty);
        pool.create_volume(new).await.expect("a volume");
        let warning = known(true).warning().await.expect("it is read").expect("a warning");
        assert!(warning.contains("has volumes (1), and knows no client"), "{warning}");
        assert_eq!(known(false).warning().await.expect("it is read"), None, "everybody is served");
    }
}
