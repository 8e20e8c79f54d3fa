//! Which other hosts of the cluster may open a volume here. The controller says so before it has a host attach the volume.
//! A volume that moves has the same ones at its new home, because the controller tells that before.

use std::sync::Arc;

use perigee_model::limits::OPENERS;
use perigee_model::{HostId, Problem, VolumeName};

use super::catalog::failed;
use super::pool::Pool;

impl Pool {
    /// # Errors
    /// When the catalog can't be read.
    pub async fn openers(self: &Arc<Self>, volume: &VolumeName) -> Result<Vec<HostId>, Problem> {
        let volume = volume.clone();
        let what = "can't look up which hosts may open a volume";
        self.run(move |pool| pool.catalog.openers(&volume).map_err(failed(what))).await
    }

    /// # Errors
    /// When the catalog can't be read.
    pub async fn may_open(
        self: &Arc<Self>,
        volume: &VolumeName,
        host: &HostId,
    ) -> Result<bool, Problem> {
        let (volume, host) = (volume.clone(), host.clone());
        let what = "can't look up which hosts may open a volume";
        self.run(move |pool| pool.catalog.may_open(&volume, &host).map_err(failed(what))).await
    }

    /// Lets these hosts open the volume, and no others. The volume may come here later.
    ///
    /// # Errors
    /// Invalid when there are too many; when the catalog can't be written.
    pub async fn set_openers(
        self: &Arc<Self>,
        volume: &VolumeName,
        hosts: Vec<HostId>,
    ) -> Result<(), Problem> {
        let (volume, what) = (volume.clone(), "can't store which hosts may open a volume");
        OPENERS.check(hosts.len()).map_err(|error| error.problem(what))?;
        self.run(move |pool| pool.catalog.set_openers(&volume, &hosts).map_err(failed(what))).await
    }

    /// Lets a host open the volume, or ends that. What it has open stays open.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn set_opener(
        self: &Arc<Self>,
        volume: &VolumeName,
        host: &HostId,
        may: bool,
    ) -> Result<(), Problem> {
        let (volume, host) = (volume.clone(), host.clone());
        let what = "can't store which hosts may open a volume";
        let count = self.openers(&volume).await?.len();
        if may {
            OPENERS.check(count).map_err(|error| error.problem(what))?;
        }
        self.run(move |pool| pool.catalog.set_opener(&volume, &host, may).map_err(failed(what)))
            .await
    }
}
