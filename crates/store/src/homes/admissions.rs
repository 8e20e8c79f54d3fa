//! Which other hosts of the cluster may open a volume here. The controller says so before it has a host attach the volume.
//! A volume that moves has the same ones at its new home, because the controller tells that before. Nobody else may: a new pool
//! lets in no other host.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::limits::ADMITTED_HOSTS;
use perigee_model::{HostId, ImageName, LayerId, Problem, VolumeName};

use crate::catalog::{TooMany, failed};
use crate::pool::Pool;

const LOOK_UP: &str = "can't look up which hosts may open a volume";
const STORE: &str = "can't store which hosts may open a volume";

impl Pool {
    /// # Errors
    /// When the catalog can't be read.
    pub async fn admitted_hosts(
        self: &Arc<Self>,
        volume: &VolumeName,
    ) -> Result<Vec<HostId>, Problem> {
        let volume = volume.clone();
        self.run(move |pool| pool.catalog.admitted_hosts(&volume).map_err(failed(LOOK_UP))).await
    }

    /// Those of all volumes, also of some that are not here.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn all_admitted_hosts(
        self: &Arc<Self>,
    ) -> Result<BTreeMap<VolumeName, Vec<HostId>>, Problem> {
        self.run(move |pool| pool.catalog.all_admitted_hosts().map_err(failed(LOOK_UP))).await
    }

    /// The images that are this layer, by their names.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn images_of(self: &Arc<Self>, layer: LayerId) -> Result<Vec<ImageName>, Problem> {
        let what = format!("can't look up which images are layer {layer}");
        self.run(move |pool| pool.catalog.images_of(layer).map_err(failed(&what))).await
    }

    /// # Errors
    /// When the catalog can't be read.
    pub async fn may_open(
        self: &Arc<Self>,
        volume: &VolumeName,
        host: &HostId,
    ) -> Result<bool, Problem> {
        let (volume, host) = (volume.clone(), host.clone());
        self.run(move |pool| pool.catalog.may_open(&volume, &host).map_err(failed(LOOK_UP))).await
    }

    /// Lets these hosts open the volume too. It may come here later.
    ///
    /// # Errors
    /// Invalid when there are too many; when the catalog can't be written.
    pub async fn admit(
        self: &Arc<Self>,
        volume: &VolumeName,
        hosts: Vec<HostId>,
    ) -> Result<(), Problem> {
        let volume = volume.clone();
        self.run(move |pool| {
            let done = pool.catalog.admit(&volume, &hosts).map_err(failed(STORE))?;
            done.map_err(|too_many| refusal(&volume, too_many))
        })
        .await
    }

    /// The same for all volumes at once. A volume that would have too many keeps its list, and keeps no other one from getting its
    /// own.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn admit_all(
        self: &Arc<Self>,
        added: BTreeMap<VolumeName, Vec<HostId>>,
    ) -> Result<(), Problem> {
        let refused =
            self.run(move |pool| pool.catalog.admit_all(&added).map_err(failed(STORE))).await?;
        for (volume, too_many) in refused {
            tracing::error!("{}", refusal(&volume, too_many));
        }
        Ok(())
    }

    /// The host may open the volume no more.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn end_admission(
        self: &Arc<Self>,
        volume: &VolumeName,
        host: &HostId,
    ) -> Result<(), Problem> {
        let (volume, host) = (volume.clone(), host.clone());
        self.run(move |pool| pool.catalog.end_admission(&volume, &host).map_err(failed(STORE)))
            .await
    }
}

fn refusal(volume: &VolumeName, TooMany(count): TooMany) -> Problem {
    let what = format!("{STORE}, of volume {volume}");
    match ADMITTED_HOSTS.check(count) {
        Err(error) => error.problem(what),
        Ok(_) => Problem::internal(what, "there were too many hosts"),
    }
}
