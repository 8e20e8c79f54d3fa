//! A volume's home moves while sessions are open.
//!
//! The new home (`take`) holds its sessions, which are proxied to the old one, and asks the old one to let
//! the volume depart. The old home (`depart`) holds its own sessions; when the volume is gone from there,
//! both give their sessions another device (`settle`): a local one at the new home, a proxy
//! at the old one, which waits for the new home to be ready. What was in flight at a volume that departed is
//! asked of the new device.
//!
//! No step waits for another host without a deadline, and each can be asked for again.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use perigee_block::device::Device;
use perigee_block::lease::NO_HOST;
use perigee_block::switch::{Held, Switch};
use perigee_http::Client;
use perigee_model::client::Over;
use perigee_model::home::{
    CallOff, Depart, Departed, DepartedLayer, HomeState, ServerAddresses, TakeVolume, VolumeHome,
};
use perigee_model::volume::FlushVolumes;
use perigee_model::{Problem, ProblemKind, VolumeName};
use perigee_store::io_problem;
use tokio::time::Instant;

use crate::exports::{PoolExports, epoch_of};
use crate::proxy::ProxySession;
use crate::repoint::DRAIN_EXTRA;

/// So long the old home may take to say where the volume is, before the sessions here are held.
const ASK_MAX: Duration = Duration::from_secs(1);
/// So long the old home may take to let a volume go, while the sessions here are held.
const DEPART_MAX: Duration = Duration::from_secs(5);
/// So long the old home may take to flush the volume before, while the sessions go on.
const FLUSH_MAX: Duration = Duration::from_secs(60);
/// So long the maps of the volume's layers may take to come from the old home, before the sessions are held.
const PREPARE_MAX: Duration = Duration::from_secs(60);
/// So long the map of what was written since may take, while the sessions are held.
const STAGE_MAX: Duration = Duration::from_secs(5);
/// So often the old home is asked in one request.
const TRIES: u32 = 5;
const TRIES_PAUSE: Duration = Duration::from_millis(300);
/// So long a session waits for its volume to be found again. Then its client has to connect again.
const SETTLE_MAX: Duration = Duration::from_secs(600);
const SETTLE_PAUSE_MAX: Duration = Duration::from_millis(500);

/// A session on a volume of this pool.
struct LocalSession {
    volume: VolumeName,
    export: String,
    switch: Weak<Switch>,
}

/// The clients' sessions on volumes of this pool. Those of other hosts' servers are not among them.
#[derive(Default)]
pub struct LocalSessions(Mutex<Vec<LocalSession>>);

impl LocalSessions {
    /// A session that is open from now on, or has a volume of this pool from now on.
    pub fn enter(&self, volume: &VolumeName, export: &str, switch: &Arc<Switch>) {
        let session = LocalSession {
            volume: volume.clone(),
            export: export.to_owned(),
            switch: Arc::downgrade(switch),
        };
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|session| session.switch.strong_count() > 0);
        open.push(session);
    }

    fn take(&self, volume: &VolumeName) -> Vec<(String, Arc<Switch>)> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_volume = open.extract_if(.., |session| session.volume == *volume);
        of_volume.filter_map(|session| Some((session.export, session.switch.upgrade()?))).collect()
    }
}

/// A session that is held until it has its volume again.
pub struct HeldSession {
    export: String,
    switch: Arc<Switch>,
    held: Held,
    /// The connection to the old home, whose requests are asked again where they did not end in time.
    old: Option<Arc<ProxySession>>,
}

impl HeldSession {
    fn open(self, device: Arc<dyn Device>) {
        match self.old {
            Some(old) => self.held.recall(|| old.recall(), device),
            None => self.held.change(device),
        }
    }
}

fn client(address: &ServerAddresses, timeout: Duration) -> Result<Client, Problem> {
    let client = Client::new(&address.control_url, timeout)?;
    Ok(client.hint("does that host's volume server run, and is this its address?"))
}

impl PoolExports {
    /// Lets the volume go. Sessions here go on with its new home as soon as that is ready.
    ///
    /// # Errors
    /// As [`perigee_store::Pool::depart`]; a conflict while iSCSI sessions are open.
    pub async fn depart(
        self: &Arc<Self>,
        volume: &VolumeName,
        ask: &Depart,
    ) -> Result<Departed, Problem> {
        let what = format!("can't let volume {volume} go to {}", ask.to.nbd_addr);
        let here = match self.pool.volume(volume).await {
            Ok(here) => here,
            // A repeated request, perhaps.
            Err(_) => return self.pool.depart(volume, ask).await,
        };
        // What is written now need not be waited for while the sessions are held.
        here.flush().await.map_err(|error| io_problem(&what, &error))?;
        drop(here);
        let _turn = self.turns.moving(volume).await?;
        let initiators = self.logins.list().into_iter();
        let initiators =
            initiators.filter(|login| login.volume == *volume && login.over == Over::Iscsi).count();
        if initiators > 0 {
            let why = format!("{initiators} iSCSI sessions on it are open");
            return Err(Problem::conflict(what, why).next("log the initiators out first"));
        }
        let sessions = self.local.take(volume);
        let (held, busy) = hold(sessions);
        busy.iter().for_each(|(export, switch)| self.local.enter(volume, export, switch));
        let departed = self.pool.depart(volume, ask).await;
        if departed.is_ok() {
            self.attached(volume);
        }
        let held = match &departed {
            // The new home is ready only when it has this answer.
            Ok(_) => held,
            Err(_) => self.settle_now(volume, held).await,
        };
        tokio::spawn(Arc::clone(self).settle(volume.clone(), held));
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
        if !self.pool.may_arrive(volume, take.tenure).await? {
            return self.pool.home(volume).await;
        }
        let all = FlushVolumes { volumes: vec![volume.clone()] };
        let flushed = client(&take.from, FLUSH_MAX)?.post::<()>("/v1/batch/flush", &all).await;
        match flushed {
            // No session is held for a home that can't be asked.
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

    /// Makes copies of what the volume has until now, while its sessions go on: then only the map of what is
    /// written since has to come while they are held.
    async fn prepare(&self, volume: &VolumeName, take: &TakeVolume) -> Result<(), Problem> {
        let path = format!("/v1/volumes/{volume}/seal");
        let sealed = client(&take.from, PREPARE_MAX)?.post::<Vec<DepartedLayer>>(&path, &()).await;
        let prepared = match sealed {
            Ok(chain) => self.stage(volume, take, &chain, PREPARE_MAX).await,
            Err(problem) => Err(problem),
        };
        match prepared {
            Err(problem) if problem.kind == ProblemKind::NoSpace => Err(problem),
            Err(problem) => {
                // It may have departed already.
                tracing::info!(%volume, %problem, "can't make copies of its layers ahead");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Makes copies of the layers that this host lacks. Where one can't be made of each, the volume comes
    /// with one copy of everything.
    async fn stage(
        &self,
        volume: &VolumeName,
        take: &TakeVolume,
        chain: &[DepartedLayer],
        max: Duration,
    ) -> Result<(), Problem> {
        let staged = self.pool.stage_layers(volume, &take.from.nbd_addr, chain);
        match tokio::time::timeout(max, staged).await {
            Ok(Err(problem))
                if !matches!(problem.kind, ProblemKind::Unavailable | ProblemKind::NoSpace) =>
            {
                tracing::warn!(%volume, %problem, "the volume comes with one copy of all its layers");
                Ok(())
            }
            Ok(done) => done,
            Err(_) => {
                let what = format!("can't take volume {volume}");
                let at = &take.from.nbd_addr;
                let why = format!("{at} did not tell what is in its layers in {} s", max.as_secs());
                Err(Problem::unavailable(what, why).next("try again: the volume is kept there"))
            }
        }
    }

    async fn try_take(
        self: &Arc<Self>,
        volume: &VolumeName,
        take: &TakeVolume,
    ) -> Result<VolumeHome, Problem> {
        // No session is held for a home that does not answer.
        let path = format!("/v1/volumes/{volume}/home");
        client(&take.from, ASK_MAX)?.get::<VolumeHome>(&path).await?;
        let _turn = self.turns.moving(volume).await?;
        self.ahead.forget(volume);
        let sessions = self.proxies.sessions(volume);
        let old = sessions.iter().map(|(_, old)| Arc::clone(old)).collect::<Vec<_>>();
        let sessions = sessions.into_iter().map(|(switch, old)| (old.export.clone(), switch));
        let (mut held, busy) = hold(sessions.collect());
        let (began, sessions) = (Instant::now(), held.len());
        if !busy.is_empty() {
            let what = format!("can't take volume {volume}");
            let why = "somebody else changes a session's device";
            return Err(Problem::unavailable(what, why).next("try again in a moment"));
        }
        let round_trip = old.iter().map(|old| old.upstream.round_trip()).max().unwrap_or_default();
        let deadline = Instant::now() + 2 * round_trip + DRAIN_EXTRA;
        for one in &held {
            // What does not end in time, as what a lost connection carries, is asked again here: by then
            // nothing can be done with it at the old home any more.
            one.held.drained_until(deadline).await;
        }
        let depart = Depart { tenure: take.tenure, to: take.to.clone() };
        let path = format!("/v1/volumes/{volume}/depart");
        let departed = client(&take.from, DEPART_MAX)?.post::<Departed>(&path, &depart).await?;
        self.stage(volume, take, &departed.chain, STAGE_MAX).await?;
        let arrived = self.pool.arrive(volume, take, departed).await?;
        for (one, old) in held.iter_mut().zip(old) {
            one.old = Some(old);
        }
        self.proxies.moved_here(volume);
        let left = self.settle_now(volume, held).await;
        let held_ms = began.elapsed().as_millis();
        tracing::info!(%volume, sessions, held_ms, "the volume's home is here now");
        tokio::spawn(Arc::clone(self).settle(volume.clone(), left));
        Ok(arrived)
    }

    /// The volume is here again, after the other server has refused it. Sessions that wait for it find it.
    ///
    /// # Errors
    /// As [`perigee_store::Pool::return_home`].
    pub async fn return_home(
        self: &Arc<Self>,
        volume: &VolumeName,
        call_off: CallOff,
    ) -> Result<VolumeHome, Problem> {
        let _turn = self.turns.moving(volume).await?;
        self.pool.return_home(volume, call_off).await
    }

    /// Gives each session a device for where the volume is now, and waits until all have one.
    async fn settle(self: Arc<Self>, volume: VolumeName, mut waiting: Vec<HeldSession>) {
        let deadline = Instant::now() + SETTLE_MAX;
        let mut pause = Duration::from_millis(10);
        while !waiting.is_empty() {
            if let Ok(_turn) = self.turns.opening(&volume).await {
                waiting = self.settle_now(&volume, waiting).await;
            }
            if !waiting.is_empty() && Instant::now() >= deadline {
                let after_s = SETTLE_MAX.as_secs();
                tracing::error!(%volume, after_s, "sessions did not find their volume");
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(SETTLE_PAUSE_MAX);
        }
    }

    /// Those that have to wait come back. The caller has a turn.
    async fn settle_now(&self, volume: &VolumeName, waiting: Vec<HeldSession>) -> Vec<HeldSession> {
        let found = join_all(waiting.iter().map(|one| self.find_again(volume, one))).await;
        let mut left = Vec::new();
        for (one, found) in waiting.into_iter().zip(found) {
            match found {
                Ok(device) => one.open(device),
                // Nobody waits for it any more.
                Err(_) if one.switch.is_hung_up() => {}
                Err(problem) => {
                    tracing::debug!(%volume, %problem, "a session waits for its volume");
                    left.push(one);
                }
            }
        }
        left
    }

    /// The session's new device. It is entered where such sessions are listed.
    async fn find_again(
        &self,
        volume: &VolumeName,
        one: &HeldSession,
    ) -> Result<Arc<dyn Device>, Problem> {
        match self.pool.open_session(volume, epoch_of(&one.export), NO_HOST).await {
            Ok(device) => {
                self.local.enter(volume, &one.export, &one.switch);
                Ok(device)
            }
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                let nbd_addr = self.attachment(volume).await?.ok_or(problem)?;
                let device = self.open_moving(volume, &one.export, nbd_addr).await?;
                self.proxies.enter(volume, &one.switch, &device);
                self.watch(volume, &device);
                Ok(device)
            }
            Err(problem) => Err(problem),
        }
    }

    /// Whether who did not find the volume should look again: it departed, and its new home may not be ready
    /// yet; or it came here meanwhile.
    pub async fn is_moving(&self, volume: &VolumeName) -> bool {
        let home = self.pool.home(volume).await;
        home.is_ok_and(|home| !matches!(home.home, HomeState::NotHere { .. }))
    }
}

/// Those that somebody else holds come back.
fn hold(sessions: Vec<(String, Arc<Switch>)>) -> (Vec<HeldSession>, Vec<(String, Arc<Switch>)>) {
    let (mut held, mut busy) = (Vec::new(), Vec::new());
    for (export, switch) in sessions {
        match switch.hold() {
            Some(hold) => held.push(HeldSession { export, switch, held: hold, old: None }),
            None => busy.push((export, switch)),
        }
    }
    (held, busy)
}
