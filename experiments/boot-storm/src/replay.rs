//! Many clients boot at the same time. Each replays the same script on its own disk.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use perigee_block::device::{Device, Zeroing};
use perigee_http::Listen;
use perigee_model::trace::Operation;
use perigee_model::volume::BLOCK_BYTES;
use perigee_nbd::{NbdDevice, RemoteExport};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::initiator::Initiator;
use crate::script::{Script, Step};

/// A storm that takes longer has failed.
const DEADLINE: Duration = Duration::from_secs(900);

/// The address of a client's disk.
#[derive(Debug, Clone)]
pub enum Disk {
    Nbd { address: SocketAddr, export: String },
    Iscsi { address: SocketAddr, target: String, lun: u8 },
}

enum Connection {
    Nbd(NbdDevice),
    Iscsi(Initiator),
}

impl Connection {
    async fn open(disk: &Disk, number: usize) -> Result<Self> {
        Ok(match disk {
            Disk::Nbd { address, export } => {
                let remote = RemoteExport::new(Listen::Tcp(address.to_string()), export);
                Self::Nbd(NbdDevice::open(remote).await?)
            }
            Disk::Iscsi { address, target, lun } => {
                let name = format!("iqn.2026-11.org.perigee.storm:client-{number}");
                let session = Initiator::open(*address, target, *lun, &name).await;
                Self::Iscsi(session.with_context(|| format!("can't log in to {target}"))?)
            }
        })
    }

    async fn run(&self, step: &Step) -> Result<()> {
        let Step { operation, offset, length_bytes, .. } = *step;
        let data = || Bytes::from(vec![0x5a; length_bytes as usize]);
        match (self, operation) {
            (Self::Nbd(disk), Operation::Read) => {
                disk.read(offset, length_bytes).await?;
            }
            (Self::Nbd(disk), Operation::Write) => disk.write(offset, data(), false).await?,
            (Self::Nbd(disk), Operation::Zero) => {
                disk.zero(offset, length_bytes.into(), Zeroing::FreeSpace, false).await?;
            }
            (Self::Nbd(disk), Operation::Flush) => disk.flush().await?,
            (Self::Iscsi(disk), Operation::Read) => disk.read(offset, length_bytes).await?,
            (Self::Iscsi(disk), Operation::Write) => disk.write(offset, data()).await?,
            (Self::Iscsi(disk), Operation::Flush) => disk.flush().await?,
            // A discard is a hint that not every target supports.
            (Self::Iscsi(_), Operation::Zero) | (_, Operation::Other) => {}
        }
        Ok(())
    }
}

/// One request as the client measured it.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// The time since the start of the storm.
    pub at: Duration,
    pub took: Duration,
    pub operation: Operation,
}

/// The result of a storm.
pub struct Storm {
    pub requests: Vec<Seen>,
    /// The times of each client's last answer since the start of the storm, in ascending order.
    pub up: Vec<Duration>,
}

/// Every client writes the first block that its boot writes, so that it has private data.
///
/// # Errors
/// If a client can't connect or a request fails.
pub async fn touch(script: &Script, disks: &[Disk]) -> Result<()> {
    let Some(block) = script.blocks(Operation::Write).first().copied() else { return Ok(()) };
    let length_bytes = u32::try_from(BLOCK_BYTES)?;
    let write = Step {
        operation: Operation::Write,
        offset: block * BLOCK_BYTES,
        length_bytes,
        after: None,
        think: Duration::ZERO,
    };
    for (number, disk) in disks.iter().enumerate() {
        let connection = Connection::open(disk, number).await?;
        connection.run(&write).await?;
        connection.run(&Step { operation: Operation::Flush, ..write }).await?;
    }
    Ok(())
}

/// Connects all clients, then lets them boot at the same time. `pace` scales the times between an answer and
/// the next request.
///
/// # Errors
/// If a client can't connect, a request fails, or the storm takes longer than [`DEADLINE`].
pub async fn run(script: &Arc<Script>, disks: &[Disk], pace: f64) -> Result<Storm> {
    let mut connections = Vec::new();
    for (number, disk) in disks.iter().enumerate() {
        connections.push(Connection::open(disk, number).await?);
    }
    let begin = Instant::now();
    let mut clients = JoinSet::new();
    for connection in connections {
        clients.spawn(boot(Arc::clone(script), Arc::new(connection), begin, pace));
    }
    let (mut requests, mut up) = (Vec::new(), Vec::new());
    let all = async {
        while let Some(client) = clients.join_next().await {
            let seen = client.context("a client died")??;
            up.extend(seen.iter().map(|seen| seen.at + seen.took).max());
            requests.extend(seen);
        }
        Ok::<(), anyhow::Error>(())
    };
    let deadline = tokio::time::timeout(DEADLINE, all).await;
    deadline.map_err(|_| anyhow!("waited {} s for all clients", DEADLINE.as_secs()))??;
    requests.sort_by_key(|seen| seen.at);
    up.sort_unstable();
    Ok(Storm { requests, up })
}

/// One client's boot.
async fn boot(
    script: Arc<Script>,
    connection: Arc<Connection>,
    begin: Instant,
    pace: f64,
) -> Result<Vec<Seen>> {
    // When each step was answered, for the steps that wait for it.
    let ends = Arc::new(watch::Sender::new(vec![None; script.steps.len()]));
    let mut running = JoinSet::new();
    for (number, step) in script.steps.iter().copied().enumerate() {
        let step = Step { think: step.think.mul_f64(pace), ..step };
        wait_for(&ends, step, begin).await;
        let (connection, ends) = (Arc::clone(&connection), Arc::clone(&ends));
        running.spawn(async move {
            let asked = Instant::now();
            let result = connection.run(&step).await;
            let took = asked.elapsed();
            ends.send_modify(|ends| ends[number] = Some(asked + took));
            let operation = step.operation;
            result.map(|()| Seen { at: asked.duration_since(begin), took, operation })
        });
    }
    let mut seen = Vec::new();
    while let Some(ended) = running.join_next().await {
        seen.push(ended??);
    }
    Ok(seen)
}

async fn wait_for(ends: &watch::Sender<Vec<Option<Instant>>>, step: Step, begin: Instant) {
    let since = match step.after {
        None => begin,
        Some(after) => {
            let mut ended = ends.subscribe();
            let found = ended.wait_for(|ends| ends[after].is_some()).await;
            found.ok().and_then(|ends| ends[after]).unwrap_or(begin)
        }
    };
    tokio::time::sleep_until((since + step.think).into()).await;
}
