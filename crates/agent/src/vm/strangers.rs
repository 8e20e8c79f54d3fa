//! Ends strangers' connections to a QEMU that waits for a VM.
//!
//! QEMU takes one connection at a time there, and its TLS handshake with whoever connects has no deadline: a program that
//! connects and says nothing keeps the VM's source waiting, which then gives up. The host from which the VM comes asks
//! for the migration's key before it connects. So what comes from another address, and has not shown the key after a moment,
//! is not the VM.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::vm::VmStatus;

use super::Vm;
use super::migrate::cut::{cut_from, peers_at};
use crate::process::Process;
use crate::qmp::{MigrateInfo, Qmp};

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A handshake takes some round trips. It is less than what the source waits for it.
const HANDSHAKE_MAX: Duration = Duration::from_secs(3);
/// QEMU answers at once, or it is in a handshake.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Until the VM comes, or QEMU ends.
pub async fn keep_away(vm: Arc<Vm>) {
    let waiting = || {
        vm.observed(|seen| {
            let uri = seen.incoming_uri.as_deref().filter(|_| seen.status() == VmStatus::Incoming);
            let (_, at) = uri?.split_once(':')?;
            let at = at.parse().ok()?;
            let process = seen.tunnel.or(seen.process)?;
            Some(Waiting { process, at, source: vm.source(), qmp: seen.qmp.clone() })
        })
    };
    keep_away_from(waiting).await;
}

/// A QEMU that waits for a VM.
pub struct Waiting {
    pub process: Process,
    /// Where it listens.
    pub at: SocketAddr,
    /// From where the key was asked for.
    pub source: Option<IpAddr>,
    pub qmp: Option<Qmp>,
}

/// Until there is none.
pub async fn keep_away_from(waiting: impl Fn() -> Option<Waiting>) {
    let mut since: BTreeMap<SocketAddr, Instant> = BTreeMap::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(Waiting { process, at, source, qmp }) = waiting() else { return };
        if process.has_ended() {
            return;
        }
        let looked = tokio::task::spawn_blocking(move || peers_at(&process, at)).await;
        let peers = match looked.map_err(std::io::Error::other).flatten() {
            Ok(peers) => peers,
            Err(error) => {
                tracing::warn!(%at, %error, "who is connected to a QEMU is not known");
                continue;
            }
        };
        since.retain(|peer, _| peers.contains(peer));
        for peer in peers.iter().filter(|peer| Some(peer.ip()) != source) {
            since.entry(*peer).or_insert_with(Instant::now);
        }
        // Only who has the key gets so far.
        if !peers.is_empty() && is_taking(qmp).await {
            return;
        }
        let strangers: BTreeSet<SocketAddr> = since
            .iter()
            .filter(|(_, since)| since.elapsed() > HANDSHAKE_MAX)
            .map(|(p, _)| *p)
            .collect();
        if strangers.is_empty() {
            continue;
        }
        tracing::warn!(%at, ?strangers, "QEMU waits for a VM, and connections that did not show its key are ended");
        let cut = tokio::task::spawn_blocking(move || cut_from(&process, at, &strangers)).await;
        if let Err(error) = cut.map_err(std::io::Error::other).flatten() {
            tracing::error!(%at, %error, "a stranger's connection to QEMU can't be ended");
        }
    }
}

async fn is_taking(qmp: Option<Qmp>) -> bool {
    let Some(qmp) = qmp else { return false };
    // It goes on by itself if it is late: QEMU answers when the handshake is over.
    let asked = tokio::spawn(async move { qmp.query::<MigrateInfo>("query-migrate").await });
    let answer = tokio::time::timeout(ANSWER_MAX, asked).await;
    matches!(answer, Ok(Ok(Ok(info))) if !["", "none", "setup", "failed"].contains(&info.status.as_str()))
}
