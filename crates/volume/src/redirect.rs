//! Finds a volume that has left the home which is known here. That home says where the volume went, and so does each
//! later home. A volume has only one head, so the server at which it was found last is the right one.

use std::sync::Arc;
use std::time::Duration;

use perigee_block::device::Device;
use perigee_block::exports::{Export, Opener, Peer};
use perigee_block::switch::Switch;
use perigee_model::home::HomeState;
use perigee_model::{Epoch, Problem, ProblemKind, VolumeName};
use tokio::time::Instant;

use crate::exports::PoolExports;
use crate::proxy::ProxySession;

/// The most homes that are asked for one volume. Only homes that name each other in a circle need more.
const HOPS_MAX: usize = 4;
/// The pause before a home is asked again that is not ready yet.
const AGAIN_PAUSE: Duration = Duration::from_millis(300);
/// How often a session without a connection checks whether the volume is known to be elsewhere by now.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// How long a client that opens a volume waits for the volume's new home.
const MOVE_MAX: Duration = Duration::from_secs(30);
const MOVE_PAUSE: Duration = Duration::from_millis(50);

/// Why a volume was not found.
pub(crate) struct NotFound {
    problem: Problem,
    /// A home has said that the volume went elsewhere, and its new home may not be ready yet.
    moves: bool,
}

impl From<Problem> for NotFound {
    fn from(problem: Problem) -> Self {
        Self { problem, moves: false }
    }
}

impl From<NotFound> for Problem {
    fn from(not_found: NotFound) -> Self {
        not_found.problem
    }
}

impl PoolExports {
    /// A session on a volume that has just come to this pool.
    async fn come_back(
        &self,
        volume: &VolumeName,
        name: &str,
        epoch: Option<Epoch>,
        peer: Peer,
    ) -> Result<Export, Problem> {
        self.local(volume, name, epoch, (Opener::Client, peer.is_own)).await
    }

    /// Opens a session on an attached volume. If the volume is on its way to a new home, this waits for it.
    pub(crate) async fn proxy(
        &self,
        volume: &VolumeName,
        name: &str,
        epoch: Option<Epoch>,
        peer: Peer,
    ) -> Result<Export, Problem> {
        let deadline = Instant::now() + MOVE_MAX;
        loop {
            let opened = match self.proxied(volume, name).await {
                // The data may be another site's. What this host gets of it does not leave this host.
                Ok(Some(export))
                    if export.confined && peer.address.is_some_and(|at| !at.is_loopback()) =>
                {
                    let why = "its policy is leave-site: never, and another host asks for it here";
                    return Err(Problem::conflict(format!("can't open volume {volume}"), why)
                        .next("open it through the volume server of the host that asks"));
                }
                Ok(Some(export)) => return Ok(export),
                Ok(None) => self.come_back(volume, name, epoch, peer).await.map_err(NotFound::from),
                Err(not_found) => Err(not_found),
            };
            match opened {
                Err(NotFound { problem, moves })
                    if problem.kind != ProblemKind::Conflict
                        && Instant::now() < deadline
                        && (moves || self.is_moving(volume).await) =>
                {
                    tracing::debug!(%volume, %problem, "the volume moves; looking for it again");
                    tokio::time::sleep(MOVE_PAUSE).await;
                }
                opened => return Ok(opened?),
            }
        }
    }

    /// Returns `None` if the volume is not attached any more.
    async fn proxied(&self, volume: &VolumeName, name: &str) -> Result<Option<Export>, NotFound> {
        let Some(nbd_addr) = self.attachment(volume).await? else { return Ok(None) };
        let device = match self.ahead.take(name).await {
            Some(device) if device.nbd_addr == nbd_addr => device,
            _ => self.open_moving(volume, name, &nbd_addr).await?,
        };
        let (read_only, counters) = (device.upstream.read_only(), self.stats.of(volume));
        let switch = Switch::new(device.clone());
        drop(self.enter_proxied(volume, &switch, &device).await?);
        // The home's address may have changed since it was looked up.
        if let Some(nbd_addr) = self.attachment(volume).await?
            && nbd_addr != device.nbd_addr
            && let Err(problem) = self.repoint(volume, None).await
        {
            tracing::info!(%volume, %problem, "a session goes on at the address that was known");
        }
        let home = device.upstream.home().cloned();
        let confined = device.upstream.is_confined();
        Ok(Some(Export { device: switch, read_only, counters, home, confined }))
    }

    /// Whether to look again for a volume that was not found. It may have departed and its new home may not be ready
    /// yet, or it may have come here in the meantime.
    async fn is_moving(&self, volume: &VolumeName) -> bool {
        let home = self.pool.home(volume).await;
        home.is_ok_and(|home| !matches!(home.home, HomeState::NotHere { .. }))
    }

    /// Opens a session on an attached volume, wherever it is now, and records its new address.
    pub(crate) async fn open_moving(
        &self,
        volume: &VolumeName,
        export: &str,
        attached: &str,
    ) -> Result<Arc<ProxySession>, NotFound> {
        let device = self.chase(volume, export, attached).await?;
        if device.nbd_addr != attached {
            self.pool.attach_where_found(volume, attached, &device.nbd_addr).await?;
        }
        Ok(device)
    }

    /// Opens a session on a volume that is or was at this address. The address may also be this server's.
    async fn chase(
        &self,
        volume: &VolumeName,
        export: &str,
        from: &str,
    ) -> Result<Arc<ProxySession>, NotFound> {
        let mut at = from.to_owned();
        for hops in 0..HOPS_MAX {
            let key = self.new_key(volume, export);
            let opened = self.try_open_proxy(volume, export, at.clone(), key, None).await;
            match opened.map_err(|problem| NotFound { problem, moves: hops > 0 })? {
                Ok(device) => {
                    if hops > 0 {
                        tracing::info!(%volume, from, to = at, "the volume has moved");
                    }
                    return Ok(device);
                }
                Err(next) => at = next,
            }
        }
        let what = format!("can't open volume {volume} at {from}");
        let why = format!("it was said to be elsewhere {HOPS_MAX} times, at last at {at}");
        let problem = Problem::unavailable(what, why).next("attach it at its home");
        Err(NotFound { problem, moves: true })
    }

    /// Follows the volume when the session's home says that it has moved, or has been away for a while.
    pub(crate) fn watch(&self, volume: &VolumeName, device: &Arc<ProxySession>) {
        let mut moves = device.upstream.moves();
        let (exports, volume, device) = (self.this.clone(), volume.clone(), Arc::downgrade(device));
        tokio::spawn(async move {
            while !matches!(tokio::time::timeout(LOOK_EVERY, moves.changed()).await, Ok(Err(_))) {
                let to = moves.borrow_and_update().clone();
                let (Some(exports), Some(device)) = (exports.upgrade(), device.upgrade()) else {
                    return;
                };
                if device.upstream.is_away()
                    && let Err(problem) = exports.follow(&volume, &device, to.as_deref()).await
                {
                    tracing::info!(%volume, to, %problem, "can't follow the volume yet");
                }
                drop((exports, device));
                tokio::time::sleep(AGAIN_PAUSE).await;
            }
        });
    }

    /// `to` is the address to which the volume went, as the session's home says.
    async fn follow(
        self: &Arc<Self>,
        volume: &VolumeName,
        device: &Arc<ProxySession>,
        to: Option<&str>,
    ) -> Result<(), Problem> {
        if self.pool.is_here(volume).await? {
            return self.bring_home(volume).await;
        }
        let attached = self.attachment(volume).await?;
        let from = device.nbd_addr.as_str();
        let elsewhere = attached.as_deref().filter(|at| *at != from);
        let (mut lost, mut is_replaced) = (Ok(()), true);
        for at in elsewhere.into_iter().chain(to) {
            match self.chase(volume, &device.export, at).await {
                Ok(found) => {
                    let found = found.nbd_addr.clone();
                    if let Some(attached) = attached.filter(|attached| *attached != found) {
                        self.pool.attach_where_found(volume, &attached, &found).await?;
                    }
                    return self.repoint(volume, Some(&found)).await;
                }
                Err(NotFound { problem, .. }) => {
                    is_replaced &= problem.kind == ProblemKind::Conflict;
                    lost = Err(problem);
                }
            }
        }
        if lost.is_err() && is_replaced {
            // Another volume has its name now, so the session's own one will not be found again.
            let sessions = self.proxies.sessions(volume).into_iter();
            let of_device = sessions.filter(|(_, its)| Arc::ptr_eq(its, device));
            of_device.for_each(|(switch, _)| switch.hang_up());
        }
        lost
    }
}

#[cfg(test)]
mod tests;
