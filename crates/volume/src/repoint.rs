//! Moves open sessions to the new address of their volume's home.
//!
//! 1. Each session is opened at the new address. It must be the same volume there.
//! 2. New requests of all sessions are held, and requests in flight are awaited, for at most twice the round trip and
//!    [`DRAIN_EXTRA`]. If some have not ended by then, all sessions stay as they were.
//! 3. The sessions get their new devices, and the held requests go on.
//!
//! If the home confines the volume, the sessions that began before are opened again at the same address, in the same way: this
//! host knows then what it has, and closes those that may not have it ([`crate::sites`]).
//!
//! If the connection to the old address is lost, requests in flight can't end. Then the new connection belongs to the
//! same session: the home first ends what is left of the old connection, and unanswered requests are sent again, as
//! after any lost connection.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use perigee_block::device::Device;
use perigee_block::switch::{Held, Switch};
use perigee_model::{Problem, ProblemKind, VolumeName};
use tokio::time::Instant;

use crate::exports::PoolExports;
use crate::proxies::Proxies;
use crate::proxy::ProxySession;
use crate::sites;

/// Requests in flight have two round trips to the home to end, and this time.
pub const DRAIN_EXTRA: Duration = Duration::from_millis(50);
/// A long request, for example a flush, may be in flight now, and will have ended a moment later.
const TRIES: u32 = 10;
const TRIES_PAUSE: Duration = Duration::from_millis(100);

/// A session that gets another device.
struct Move {
    switch: Arc<Switch>,
    old: Arc<ProxySession>,
    new: Arc<ProxySession>,
    /// Whether the connection of the old device is lost.
    away: bool,
}

impl Move {
    /// Whether the session still has the same device.
    fn is_among(&self, sessions: &[(Arc<Switch>, Arc<ProxySession>)]) -> bool {
        let is_it =
            |switch: &_, old: &_| Arc::ptr_eq(switch, &self.switch) && Arc::ptr_eq(old, &self.old);
        sessions.iter().any(|(switch, old)| is_it(switch, old))
    }
}

impl PoolExports {
    /// Moves open sessions to the address at which the volume is attached now. If it is not attached any more, they
    /// move to the address where it was `found`.
    ///
    /// # Errors
    /// If the volume is not reached at the address, or is another one, or if requests in flight do not end in time.
    /// Then all sessions stay as they were.
    pub async fn repoint(&self, volume: &VolumeName, found: Option<&str>) -> Result<(), Problem> {
        let mut tried = 1;
        loop {
            match self.try_repoint(volume, found).await? {
                Ok(()) => return Ok(()),
                Err(why) if tried == TRIES => {
                    let what = format!("can't move open sessions of volume {volume} to its home");
                    let why = format!("{why}; tried {TRIES} times");
                    return Err(Problem::unavailable(what, why).next("attach it again"));
                }
                Err(_) => tokio::time::sleep(TRIES_PAUSE).await,
            }
            tried += 1;
        }
    }

    /// If this did not succeed now but may in a moment, returns the reason.
    async fn try_repoint(
        &self,
        volume: &VolumeName,
        found: Option<&str>,
    ) -> Result<Result<(), String>, Problem> {
        // The home would close one of two connections of one session.
        let Some(_one) = Proxies::change(&self.proxies, volume) else {
            return Ok(Err("they are being moved already".to_owned()));
        };
        let Some(nbd_addr) = self.address(volume, found).await? else { return Ok(Ok(())) };
        let sessions = self.proxies.elsewhere(volume, &nbd_addr).into_iter();
        let moves = sessions
            .filter(|(switch, _)| !switch.is_hung_up())
            .map(|(switch, old)| self.open_again(volume, &nbd_addr, switch, old));
        let moves: Vec<Move> = try_join_all(moves).await?.into_iter().flatten().collect();
        // A move that begins after this waits, and then finds each session with its new device.
        let _turn = self.turns.opening(volume).await?;
        if self.pool.is_here(volume).await? {
            return Ok(Ok(()));
        }
        // If two addresses were set, the last one must win.
        let is_latest = self.address(volume, found).await?.as_ref() == Some(&nbd_addr);
        let listed = self.proxies.elsewhere(volume, &nbd_addr);
        if !is_latest || !moves.iter().all(|one| one.is_among(&listed)) {
            return Ok(Err("its address or its sessions have changed meanwhile".to_owned()));
        }
        let changed = change(&moves).await;
        if changed.is_ok() {
            for Move { switch, new, .. } in &moves {
                self.proxies.enter(volume, switch, new);
                self.watch(volume, new);
            }
        }
        Ok(changed)
    }

    async fn address(
        &self,
        volume: &VolumeName,
        found: Option<&str>,
    ) -> Result<Option<String>, Problem> {
        Ok(self.attachment(volume).await?.or_else(|| found.map(str::to_owned)))
    }

    /// `None` if the session ends: another volume has its name there and it has lost its own one, or its client may not have the
    /// data any more.
    async fn open_again(
        &self,
        volume: &VolumeName,
        nbd_addr: &str,
        switch: Arc<Switch>,
        old: Arc<ProxySession>,
    ) -> Result<Option<Move>, Problem> {
        let away = old.upstream.is_away();
        let key = if away {
            (Arc::clone(&old.key), Arc::clone(&old.slot))
        } else {
            self.new_key(volume, &old.export)
        };
        let at = nbd_addr.to_owned();
        let new = match self.try_open_proxy(volume, &old.export, at, key, Some(&old)).await {
            Ok(Ok(new)) => new,
            Ok(Err(to)) => {
                let what = format!("can't move open sessions of volume {volume} to {nbd_addr}");
                let why = format!("it has another home now, at {to}");
                return Err(Problem::unavailable(what, why).next("attach it at its home"));
            }
            Err(problem) if problem.kind == ProblemKind::Conflict && away => {
                tracing::warn!(%volume, %problem, "a session ends");
                switch.hang_up();
                return Ok(None);
            }
            // Who attaches the volume can do it again: the session may have ended by then.
            Err(problem) if problem.kind == ProblemKind::Conflict => {
                return Err(Problem { kind: ProblemKind::Unavailable, ..problem });
            }
            Err(problem) => return Err(problem),
        };
        let is_confined_since = new.upstream.is_confined() && !old.upstream.is_confined();
        if is_confined_since && !self.goes_on_confined(&switch, nbd_addr).await {
            tracing::warn!(%volume, "a session ends: its data are confined since it began");
            if away && let Some(held) = switch.hold() {
                // What is in flight is not answered: a client that may open the volume again sends it again.
                held.recall(|| old.recall(), sites::withdrawn(&switch));
            }
            switch.hang_up();
            sites::withdraw(&switch);
            return Ok(None);
        }
        if !new.upstream.is_same(&old.upstream) {
            let what = format!("volume {volume} at {nbd_addr}");
            let why = format!("it is another one than that at {}", old.nbd_addr);
            return Err(Problem::conflict(what, why).next("stop what uses it, then attach it"));
        }
        Ok(Some(Move { switch, old, new, away }))
    }
}

/// Changes all sessions or none. Returns the reason if none was changed.
async fn change(moves: &[Move]) -> Result<(), String> {
    let mut held = Vec::with_capacity(moves.len());
    for one in moves {
        let hold = one.switch.hold().ok_or("somebody else changes a session's device")?;
        held.push((hold, one));
    }
    let staying = || moves.iter().filter(|one| !one.away);
    let round_trip = staying().map(|one| one.old.upstream.round_trip()).max().unwrap_or_default();
    let drain_max = 2 * round_trip + DRAIN_EXTRA;
    let deadline = Instant::now() + drain_max;
    for (hold, _) in held.iter().filter(|(_, one)| !one.away) {
        if !hold.drained_until(deadline).await {
            let limit_ms = drain_max.as_millis();
            return Err(format!("requests in flight did not end within {limit_ms} ms"));
        }
    }
    for (hold, one) in held {
        open(hold, one);
    }
    Ok(())
}

fn open(hold: Held, one: &Move) {
    let new = Arc::clone(&one.new);
    if one.away { hold.recall(|| one.old.recall(), new) } else { hold.change(new) }
}
