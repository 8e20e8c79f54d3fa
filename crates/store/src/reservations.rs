//! Persistent reservations of volumes, which survive a restart of the server.

use std::sync::Arc;

use perigee_model::{Problem, VolumeName};

use super::catalog::failed;
use super::pool::Pool;

impl Pool {
    /// The stored reservations of a volume.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn reservations(
        self: &Arc<Self>,
        volume: &VolumeName,
    ) -> Result<Option<String>, Problem> {
        let volume = volume.clone();
        self.run(move |pool| {
            let what = format!("can't read the reservations of volume {volume}");
            pool.catalog.reservations(&volume).map_err(failed(&what))
        })
        .await
    }

    /// Stores a volume's reservations durably; `None` deletes them.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn keep_reservations(
        self: &Arc<Self>,
        volume: &VolumeName,
        state: Option<String>,
    ) -> Result<(), Problem> {
        let volume = volume.clone();
        self.run(move |pool| {
            let what = format!("can't keep the reservations of volume {volume}");
            pool.catalog.keep_reservations(&volume, state.as_deref()).map_err(failed(&what))
        })
        .await
    }
}
