//! Attachments: volumes of other hosts that clients can reach through this host.

use std::sync::Arc;

use perigee_model::{Problem, VolumeName};

use super::blocking;
use super::pool::Pool;

impl Pool {
    /// The attached volumes: their names, and the `HOST:PORT` of their homes.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn attachments(self: &Arc<Self>) -> Result<Vec<(VolumeName, String)>, Problem> {
        let pool = Arc::clone(self);
        blocking(move || {
            pool.catalog
                .attachments()
                .map_err(|error| Problem::internal("can't list the attachments", error))
        })
        .await
    }

    /// Records the address of a volume of another host. A repeated call changes the address.
    ///
    /// # Errors
    /// A conflict when this pool has a volume of that name.
    pub async fn attach(
        self: &Arc<Self>,
        volume: &VolumeName,
        nbd_addr: &str,
    ) -> Result<(), Problem> {
        let guard = Arc::clone(&self.changes).lock_owned().await;
        let (pool, volume, nbd_addr) = (Arc::clone(self), volume.clone(), nbd_addr.to_owned());
        blocking(move || {
            let _guard = guard;
            let what = format!("can't attach volume {volume}");
            let here =
                pool.catalog.volume(&volume).map_err(|error| Problem::internal(&what, error))?;
            if here.is_some() {
                return Err(Problem::conflict(what, "this pool has a volume with that name"));
            }
            pool.catalog.attach(&volume, &nbd_addr).map_err(|error| Problem::internal(what, error))
        })
        .await
    }

    /// Records that an attached volume was found at another address than the known one. Nothing is recorded if the
    /// volume was detached, has come here, or was attached anew since.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn attach_where_found(
        self: &Arc<Self>,
        volume: &VolumeName,
        known: &str,
        found: &str,
    ) -> Result<(), Problem> {
        let (pool, volume) = (Arc::clone(self), volume.clone());
        let (known, found) = (known.to_owned(), found.to_owned());
        blocking(move || {
            let what = format!("can't record where volume {volume} is");
            let done = pool.catalog.attach_where_found(&volume, &known, &found);
            done.map_err(|error| Problem::internal(what, error))
        })
        .await
    }

    /// # Errors
    /// Not found when it is not attached.
    pub async fn detach(self: &Arc<Self>, volume: &VolumeName) -> Result<(), Problem> {
        let (pool, volume) = (Arc::clone(self), volume.clone());
        blocking(move || {
            let what = format!("can't detach volume {volume}");
            match pool.catalog.detach(&volume) {
                Ok(true) => Ok(()),
                Ok(false) => Err(Problem::not_found(what, "it is not attached")),
                Err(error) => Err(Problem::internal(what, error)),
            }
        })
        .await
    }
}
