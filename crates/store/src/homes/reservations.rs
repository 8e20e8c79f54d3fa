//! Persistent reservations of volumes, and what iSCSI initiators have seen, both of which survive a restart of the server.

use std::sync::Arc;

use perigee_model::{Problem, VolumeName};

use crate::catalog::failed;
use crate::pool::Pool;

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

    /// The serial number that this port of an initiator has last found under an export's name, also if that was a volume that is not there any
    /// more.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn seen_by_initiator(
        self: &Arc<Self>,
        export: &str,
        port: &str,
    ) -> Result<Option<String>, Problem> {
        let (export, port) = (export.to_owned(), port.to_owned());
        self.run(move |pool| {
            let what = format!("can't read what initiators have seen of {export}");
            pool.catalog.seen_by_initiator(&export, &port).map_err(failed(&what))
        })
        .await
    }

    /// Stores it durably.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn keep_seen_by_initiator(
        self: &Arc<Self>,
        export: &str,
        port: &str,
        serial: String,
    ) -> Result<(), Problem> {
        let (export, port) = (export.to_owned(), port.to_owned());
        self.run(move |pool| {
            let what = format!("can't keep what an initiator has seen of {export}");
            pool.catalog.keep_seen_by_initiator(&export, &port, &serial).map_err(failed(&what))
        })
        .await
    }
}
