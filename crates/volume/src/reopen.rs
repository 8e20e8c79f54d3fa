//! Sessions that are held until they have their volume again: a local device where it is here, a proxy where it
//! is elsewhere.
//!
//! A session that has a local device is listed in [`LocalSessions`], one with a proxy in [`crate::proxies`], and
//! one that is held in neither. It is listed within the [turn](crate::turns) in which it gets its device, so a
//! step of a move finds every session that is open, with the device that it has.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use perigee_block::device::Device;
use perigee_block::lease::NO_HOST;
use perigee_block::locking;
use perigee_block::switch::{Held, Switch};
use perigee_model::leave_site::LeaveSite;
use perigee_model::{Problem, ProblemKind, VolumeName};
use perigee_store::Data;
use tokio::sync::OwnedRwLockReadGuard;
use tokio::time::Instant;

use crate::exports::{PoolExports, epoch_of};
use crate::proxy::ProxySession;
use crate::sites;

/// How long a session waits until its volume is found again. After that its client has to connect again.
const REOPEN_MAX: Duration = Duration::from_secs(600);
const REOPEN_PAUSE_MAX: Duration = Duration::from_millis(500);

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
        let mut open = locking::lock(&self.0);
        open.retain(|session| session.switch.strong_count() > 0);
        open.push(session);
    }

    /// The number of a volume's sessions.
    pub fn count(&self, volume: &VolumeName) -> usize {
        let open = locking::lock(&self.0);
        let of_volume = open.iter().filter(|session| session.volume == *volume);
        of_volume.filter(|session| session.switch.strong_count() > 0).count()
    }

    /// Ends a volume's sessions. They are not listed any more.
    pub fn hang_up(&self, volume: &VolumeName) {
        let mut open = locking::lock(&self.0);
        let of_volume: Vec<_> = open.extract_if(.., |session| session.volume == *volume).collect();
        drop(open);
        of_volume.iter().filter_map(|one| one.switch.upgrade()).for_each(|open| open.hang_up());
    }

    /// Holds a volume's sessions. From now on they are not listed any more.
    pub fn hold(&self, volume: &VolumeName) -> Vec<HeldSession> {
        let mut open = locking::lock(&self.0);
        let mut held = Vec::new();
        open.retain(|session| {
            let Some(switch) = session.switch.upgrade() else { return false };
            if session.volume != *volume {
                return true;
            }
            let one = HeldSession::new(&session.export, switch, None);
            let is_busy = one.is_none();
            held.extend(one);
            is_busy
        });
        held
    }
}

/// A session that is held until it has its volume again.
pub struct HeldSession {
    export: String,
    switch: Arc<Switch>,
    held: Held,
    /// The proxy that it had. Requests that did not end there are sent again.
    old: Option<Arc<ProxySession>>,
}

impl HeldSession {
    /// `None` when somebody else holds it.
    fn new(export: &str, switch: Arc<Switch>, old: Option<Arc<ProxySession>>) -> Option<Self> {
        let held = switch.hold()?;
        Some(Self { export: export.to_owned(), switch, held, old })
    }

    /// Its client may not have the data.
    fn end(self) {
        self.switch.hang_up();
        sites::withdraw(&self.switch);
    }

    fn open(self, device: Arc<dyn Device>) {
        match self.old {
            Some(old) => self.held.recall(|| old.recall(), device),
            None => self.held.change(device),
        }
    }
}

impl PoolExports {
    /// Holds the sessions that have proxies, for a volume that is here now or comes here. The old home does nothing of
    /// what they ask any more. The caller has a turn.
    pub(crate) fn hold_proxied(&self, volume: &VolumeName) -> Vec<HeldSession> {
        self.ahead.forget(volume);
        let sessions = self.proxies.sessions(volume).into_iter();
        let hold = |(switch, old): (_, Arc<ProxySession>)| {
            HeldSession::new(&old.export, switch, Some(Arc::clone(&old)))
        };
        sessions.filter_map(hold).collect()
    }

    /// Gives each session a device for where the volume is now, and waits until all have one.
    pub(crate) async fn reopen(self: Arc<Self>, volume: VolumeName, mut waiting: Vec<HeldSession>) {
        let deadline = Instant::now() + REOPEN_MAX;
        let mut pause = Duration::from_millis(10);
        while !waiting.is_empty() {
            if let Ok(_turn) = self.turns.opening(&volume).await {
                waiting = self.reopen_here(&volume, waiting).await;
            }
            let elsewhere = waiting.into_iter().map(|one| self.reopen_elsewhere(&volume, one));
            waiting = join_all(elsewhere).await.into_iter().flatten().collect();
            if !waiting.is_empty() && Instant::now() >= deadline {
                let after_s = REOPEN_MAX.as_secs();
                tracing::error!(%volume, after_s, "sessions did not find their volume");
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(REOPEN_PAUSE_MAX);
        }
    }

    /// Gives the sessions the volume that is here. Returns those that do not find it here, except for those that
    /// nobody uses any more. The caller has a turn.
    pub(crate) async fn reopen_here(
        &self,
        volume: &VolumeName,
        waiting: Vec<HeldSession>,
    ) -> Vec<HeldSession> {
        let mut left = Vec::new();
        let policy = self.pool.leave_site(&Data::Volume(volume.clone())).await;
        let is_confined = !matches!(policy, Ok(None | Some(LeaveSite::Allowed)));
        for one in waiting {
            match self.pool.open_session(volume, epoch_of(&one.export), NO_HOST).await {
                Ok(_) if is_confined && !self.may_have_confined(&one.switch) => one.end(),
                Ok(device) => {
                    self.proxies.leave(volume, &one.switch);
                    self.local.enter(volume, &one.export, &one.switch);
                    one.open(device);
                }
                Err(_) if one.switch.is_hung_up() => {}
                Err(problem) => {
                    tracing::debug!(%volume, %problem, "a session does not find its volume here");
                    left.push(one);
                }
            }
        }
        left
    }

    /// Gives the session a proxy. Returns the session if it has to wait longer.
    async fn reopen_elsewhere(&self, volume: &VolumeName, one: HeldSession) -> Option<HeldSession> {
        match self.find_elsewhere(volume, &one).await {
            Ok((device, _turn))
                if device.upstream.is_confined() && !self.may_have_confined(&one.switch) =>
            {
                one.end();
                None
            }
            Ok((device, _turn)) => {
                one.open(device);
                None
            }
            Err(problem) => {
                tracing::debug!(%volume, %problem, "a session waits for its volume");
                if problem.kind == ProblemKind::Conflict {
                    // Another volume has its name now.
                    one.switch.hang_up();
                }
                (!one.switch.is_hung_up()).then_some(one)
            }
        }
    }

    async fn find_elsewhere(
        &self,
        volume: &VolumeName,
        one: &HeldSession,
    ) -> Result<(Arc<ProxySession>, OwnedRwLockReadGuard<()>), Problem> {
        let nbd_addr = self.attachment(volume).await?.ok_or_else(|| {
            Problem::not_found(format!("volume {volume}"), "it is neither here nor attached")
        })?;
        let device = self.open_moving(volume, &one.export, &nbd_addr).await?;
        let turn = self.enter_proxied(volume, &one.switch, &device).await?;
        Ok((device, turn))
    }

    /// The session has this proxy from now on. A step of a move that begins after the turn finds it.
    ///
    /// # Errors
    /// Unavailable when the volume came here meanwhile.
    pub(crate) async fn enter_proxied(
        &self,
        volume: &VolumeName,
        switch: &Arc<Switch>,
        device: &Arc<ProxySession>,
    ) -> Result<OwnedRwLockReadGuard<()>, Problem> {
        let turn = self.turns.opening(volume).await?;
        if self.pool.is_here(volume).await? {
            let what = format!("can't open volume {volume} at {}", device.nbd_addr);
            return Err(Problem::unavailable(what, "it came here meanwhile").next("open it again"));
        }
        self.proxies.enter(volume, switch, device);
        self.watch(volume, device);
        Ok(turn)
    }

    /// The volume is here, and a session still has a proxy, which nobody answers any more.
    pub(crate) async fn bring_home(self: &Arc<Self>, volume: &VolumeName) -> Result<(), Problem> {
        let _turn = self.turns.opening(volume).await?;
        if self.pool.is_here(volume).await? {
            let held = self.hold_proxied(volume);
            let left = self.reopen_here(volume, held).await;
            tokio::spawn(Arc::clone(self).reopen(volume.clone(), left));
        }
        Ok(())
    }
}
