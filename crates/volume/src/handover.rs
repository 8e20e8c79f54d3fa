//! A volume's home moves while sessions are open.
//!
//! The new home (`take`) asks the old one to let the volume depart. The old home (`depart`) holds its own
//! sessions meanwhile. When the volume has come, the new home holds its sessions too, which were proxied to the
//! old one. Both give their sessions another device ([`crate::reopen`]): a local one at the new home, a proxy at
//! the old one, which waits for the new home to be ready. Requests that were in flight when the volume departed are
//! sent to the new device.
//!
//! Every wait for another host has a deadline, and each step can be asked for again. While another host is asked, no
//! session is held and no [turn](crate::turns) is taken: two hosts that wait for each other would both wait until
//! their deadlines.
//!
//! The log says for each step how many sessions were held and for how long (`sessions`, `held_ms`). At the new home
//! it also says how long after the question to the old one the sessions went on (`moved_ms`).

use std::sync::Arc;
use std::time::Duration;

use perigee_model::client::Over;
use perigee_model::home::{CallOff, Depart, Departed, DepartedLayer, TakeVolume, VolumeHome};
use perigee_model::volume::FlushVolumes;
use perigee_model::{Problem, ProblemKind, VolumeName};
use tokio::time::Instant;

use crate::exports::PoolExports;
use crate::preconnected::Arriving;

/// How long the old home may take to let a volume go.
const DEPART_MAX: Duration = Duration::from_secs(5);
/// How long the old home may take to flush the volume before that, while the sessions go on.
const FLUSH_MAX: Duration = Duration::from_secs(60);
/// How long it may take to get the maps of the volume's layers from the old home, before the sessions are held.
const PREPARE_MAX: Duration = Duration::from_secs(60);
/// How long it may take to get the map of what was written since, while the volume is nowhere.
const STAGE_MAX: Duration = Duration::from_secs(5);
/// How often the old home is asked within one request.
const TRIES: u32 = 5;
const TRIES_PAUSE: Duration = Duration::from_millis(300);

impl PoolExports {
    /// Lets the volume go. Sessions here go on with its new home as soon as that is ready.
    ///
    /// # Errors
    /// As [`perigee_store::MoveStep::depart`]; a conflict while iSCSI sessions are open.
    pub async fn depart(
        self: &Arc<Self>,
        volume: &VolumeName,
        ask: &Depart,
    ) -> Result<Departed, Problem> {
        let what = format!("can't let volume {volume} go to {}", ask.to.nbd_addr);
        // What takes long is done before the sessions are held.
        self.pool.prepare_departure(volume).await?;
        let to = &ask.to.nbd_addr;
        self.preconnected.make(to, self.local.count(volume), &self.remotes).await;
        let _turn = self.turns.moving(volume).await?;
        let initiators = self.logins.list().into_iter();
        let initiators =
            initiators.filter(|login| login.volume == *volume && login.over == Over::Iscsi).count();
        if initiators > 0 {
            let why = format!("{initiators} iSCSI sessions on it are open");
            return Err(Problem::conflict(what, why).next("log the initiators out first"));
        }
        let step = self.pool.move_step(volume).await?;
        let (began, held) = (Instant::now(), self.local.hold(volume));
        let sessions = held.len();
        let departed = step.depart(ask).await;
        if departed.is_ok() {
            self.attached(volume);
        }
        let held = match &departed {
            // The new home is ready only when it has this answer.
            Ok(_) => held,
            Err(_) => self.reopen_here(volume, held).await,
        };
        let held_ms = began.elapsed().as_millis();
        tracing::info!(%volume, departed = departed.is_ok(), sessions, held_ms, "asked to depart");
        tokio::spawn(Arc::clone(self).reopen(volume.clone(), held));
        departed
    }

    /// Becomes the volume's home. Sessions here, which were proxied to the old home, go on with the volume
    /// that is here.
    ///
    /// # Errors
    /// A conflict when the tenure was refused here or the old home does not let it go; unavailable when the
    /// old home has not answered. Then it is asked for again, or called off.
    pub async fn take(
        self: &Arc<Self>,
        volume: &VolumeName,
        take: &TakeVolume,
    ) -> Result<VolumeHome, Problem> {
        let taken = self.take_or_leave(volume, take).await;
        // After "unavailable" it is asked for again, and then what was staged is of use.
        if taken.as_ref().is_err_and(|problem| problem.kind != ProblemKind::Unavailable) {
            self.pool.forget_staged(volume).await;
        }
        taken
    }

    async fn take_or_leave(
        self: &Arc<Self>,
        volume: &VolumeName,
        take: &TakeVolume,
    ) -> Result<VolumeHome, Problem> {
        if !self.pool.may_arrive(volume, take.tenure).await? {
            return self.pool.home(volume).await;
        }
        let all = FlushVolumes { volumes: vec![volume.clone()] };
        let flushed = self.remotes.client(&take.from, take.grant.as_ref(), FLUSH_MAX)?;
        let flushed = flushed.post::<()>("/v1/batch/flush", &all).await;
        match flushed {
            Err(problem) if problem.kind == ProblemKind::Unavailable => return Err(problem),
            // It may have departed already.
            Err(problem) => tracing::debug!(%volume, %problem, "the old home does not flush"),
            Ok(()) => {}
        }
        self.prepare(volume, take).await?;
        let mut tried = 1;
        loop {
            match self.try_take(volume, take).await {
                Err(problem) if problem.kind == ProblemKind::Unavailable && tried < TRIES => {
                    tracing::info!(%volume, %problem, "can't take the volume yet");
                    tokio::time::sleep(TRIES_PAUSE).await;
                }
                done => return done,
            }
            tried += 1;
        }
    }

    /// Makes copies of what the volume has now, while its sessions go on. Then only the map of what is written
    /// after this has to come while they are held.
    async fn prepare(&self, volume: &VolumeName, take: &TakeVolume) -> Result<(), Problem> {
        let path = format!("/v1/volumes/{volume}/seal");
        let sealed = self.remotes.client(&take.from, take.grant.as_ref(), PREPARE_MAX)?;
        let sealed = sealed.post::<Vec<DepartedLayer>>(&path, &()).await;
        let prepared = match sealed {
            Ok(chain) => self.stage(volume, take, &chain, PREPARE_MAX).await,
            Err(problem) => Err(problem),
        };
        match prepared {
            // The volume is still there, and its clients would stand still while the same is tried in vain.
            Err(problem)
                if matches!(problem.kind, ProblemKind::NoSpace | ProblemKind::Unavailable) =>
            {
                Err(problem)
            }
            Err(problem) => {
                // It may have departed already.
                tracing::info!(%volume, %problem, "can't make copies of its layers ahead");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Makes copies of the layers that this host lacks. If a layer can't be copied on its own, the volume comes
    /// with one copy of everything.
    async fn stage(
        &self,
        volume: &VolumeName,
        take: &TakeVolume,
        chain: &[DepartedLayer],
        max: Duration,
    ) -> Result<(), Problem> {
        let staged = self.pool.stage_arrival(volume, take, chain);
        match tokio::time::timeout(max, staged).await {
            Ok(Err(problem))
                if !matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::NoSpace) =>
            {
                tracing::warn!(%volume, %problem, "the volume comes with one copy of all its layers");
                Ok(())
            }
            Ok(done) => done.map(drop),
            Err(_) => {
                let what = format!("can't take volume {volume}");
                let at = &take.from.nbd_addr;
                let why =
                    format!("{at} did not say within {} s what is in its layers", max.as_secs());
                Err(Problem::unavailable(what, why).next("try again: the volume is kept there"))
            }
        }
    }

    /// While the old home is asked, no session is held and no turn is taken. Requests of sessions here that reach the
    /// old home after it has let the volume go wait in their connections. They are sent to the volume here when it has
    /// come.
    async fn try_take(
        self: &Arc<Self>,
        volume: &VolumeName,
        take: &TakeVolume,
    ) -> Result<VolumeHome, Problem> {
        // The move may have been called off meanwhile.
        if !self.pool.may_arrive(volume, take.tenure).await? {
            return self.pool.home(volume).await;
        }
        let _arrival = Arriving::begin(&self.arriving, volume);
        let (asked, depart) = (Instant::now(), Depart { tenure: take.tenure, to: take.to.clone() });
        let path = format!("/v1/volumes/{volume}/depart");
        let departed = self.remotes.client(&take.from, take.grant.as_ref(), DEPART_MAX)?;
        let departed = departed.post::<Departed>(&path, &depart).await?;
        self.stage(volume, take, &departed.chain, STAGE_MAX).await?;
        let _turn = self.turns.moving(volume).await?;
        let step = self.pool.move_step(volume).await?;
        let (began, held) = (Instant::now(), self.hold_proxied(volume));
        let arrived = step.arrive(take, departed).await?;
        let sessions = held.len();
        self.proxies.moved_here(volume);
        let left = self.reopen_here(volume, held).await;
        let (held_ms, moved_ms) = (began.elapsed().as_millis(), asked.elapsed().as_millis());
        tracing::info!(%volume, sessions, held_ms, moved_ms, "the volume's home is here now");
        tokio::spawn(Arc::clone(self).reopen(volume.clone(), left));
        Ok(arrived)
    }

    /// The volume is here again, after the other server has refused it. Sessions that wait for it find it.
    ///
    /// # Errors
    /// As [`perigee_store::MoveStep::return_home`].
    pub async fn return_home(
        self: &Arc<Self>,
        volume: &VolumeName,
        call_off: CallOff,
    ) -> Result<VolumeHome, Problem> {
        let _turn = self.turns.moving(volume).await?;
        self.pool.move_step(volume).await?.return_home(call_off).await
    }
}
