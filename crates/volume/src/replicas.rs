//! Replicas of volumes: a round of one, and the end of the volume at a home that was lost.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::home::VolumeHome;
use perigee_model::replica::{
    PinReplica, PromoteReplica, PullReplica, PulledReplica, SealReplica, SealedReplica, Supersede,
    Superseded,
};
use perigee_model::{Problem, VolumeName};

use crate::exports::PoolExports;

/// How long the home may take to flush and seal the volume.
const SEAL_MAX: Duration = Duration::from_secs(60);
/// How long it may take to get the maps of the layers that are lacking here from the home.
const STAGE_MAX: Duration = Duration::from_secs(120);

impl PoolExports {
    /// Begins a round of a replica. When this returns, what the replica lacks is known, and is fetched in the
    /// background.
    ///
    /// # Errors
    /// Unavailable when the home does not answer; as [`perigee_store::Pool::add_point`].
    pub async fn pull_replica(
        self: &Arc<Self>,
        volume: &VolumeName,
        ask: &PullReplica,
    ) -> Result<PulledReplica, Problem> {
        let round = self.pool.begin_pull(volume, ask.keep).await?;
        let path = format!("/v1/volumes/{volume}/replica/seal");
        let seal = SealReplica { replica: ask.replica.clone() };
        let home = self.remotes.client(&ask.from, ask.grant.as_ref(), SEAL_MAX)?;
        // An answer that was lost may have been one that keeps layers there.
        let sealed = home.post::<SealedReplica>(&path, &seal).await;
        let added = async { self.pool.add_point(volume, ask, round, sealed?).await };
        let ships_bytes = tokio::time::timeout(STAGE_MAX, added).await.unwrap_or_else(|_| {
            let (at, limit_s) = (&ask.from.nbd_addr, STAGE_MAX.as_secs());
            let what = format!("can't make a replica of volume {volume}");
            let why = format!("{at} did not say within {limit_s} s what is in its layers");
            Err(Problem::unavailable(what, why).next("it is tried again"))
        });
        if ships_bytes.is_err() && !self.pool.is_pulled(volume) {
            // The replica was dropped while the home sealed the volume for it: nobody else would tell the home.
            let pin = PinReplica { replica: ask.replica.clone(), layer: None };
            if let Err(problem) =
                home.post::<()>(&format!("/v1/volumes/{volume}/replica/pins"), &pin).await
            {
                tracing::warn!("{}: {problem}", ask.from.control_url);
            }
        }
        Ok(PulledReplica { ships_bytes: ships_bytes? })
    }

    /// A point of the replica becomes the volume. Sessions here that were proxied to the lost home end, because the
    /// point is older than what they have seen.
    ///
    /// # Errors
    /// As [`perigee_store::Pool::promote`].
    pub async fn promote(
        self: &Arc<Self>,
        volume: &VolumeName,
        ask: PromoteReplica,
    ) -> Result<VolumeHome, Problem> {
        let _turn = self.turns.moving(volume).await?;
        let promoted = self.pool.promote(volume, ask).await?;
        self.ahead.forget(volume);
        for (switch, _) in self.proxies.sessions(volume) {
            switch.hang_up();
        }
        self.proxies.moved_here(volume);
        Ok(promoted)
    }

    /// A replica has become the volume, which is removed here. Its sessions end, because the replica is older than what
    /// they have seen.
    ///
    /// # Errors
    /// As [`perigee_store::Pool::supersede`].
    pub async fn supersede(
        self: &Arc<Self>,
        volume: &VolumeName,
        ask: &Supersede,
    ) -> Result<Superseded, Problem> {
        let _turn = self.turns.moving(volume).await?;
        let superseded = self.pool.supersede(volume, ask).await?;
        self.local.hang_up(volume);
        self.attached(volume);
        Ok(superseded)
    }
}
