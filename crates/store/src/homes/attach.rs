//! Attachments: volumes of other hosts that clients can reach through this host.

use std::sync::Arc;

use perigee_model::{Problem, VolumeName};

use crate::catalog::failed;
use crate::pool::Pool;

impl Pool {
    /// The attached volumes: their names, and the `HOST:PORT` of their homes.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn attachments(self: &Arc<Self>) -> Result<Vec<(VolumeName, String)>, Problem> {
        self.run(move |pool| {
            pool.catalog.attachments().map_err(failed("can't list the attachments"))
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
        let (volume, nbd_addr) = (volume.clone(), nbd_addr.to_owned());
        self.change(move |pool| {
            let what = format!("can't attach volume {volume}");
            if pool.catalog.volume(&volume).map_err(failed(&what))?.is_some() {
                return Err(Problem::conflict(what, "this pool has a volume with that name"));
            }
            pool.catalog.attach(&volume, &nbd_addr).map_err(failed(&what))
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
        let volume = volume.clone();
        let (known, found) = (known.to_owned(), found.to_owned());
        self.run(move |pool| {
            let what = format!("can't record where volume {volume} is");
            let done = pool.catalog.attach_where_found(&volume, &known, &found);
            done.map_err(failed(&what))
        })
        .await
    }

    /// # Errors
    /// Not found when it is not attached.
    pub async fn detach(self: &Arc<Self>, volume: &VolumeName) -> Result<(), Problem> {
        let volume = volume.clone();
        self.run(move |pool| {
            let what = format!("can't detach volume {volume}");
            match pool.catalog.detach(&volume).map_err(failed(&what))? {
                true => Ok(()),
                false => Err(Problem::not_found(what, "it is not attached")),
            }
        })
        .await
    }
}
