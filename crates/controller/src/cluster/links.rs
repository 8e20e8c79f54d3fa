//! The measurements of links between hosts, and the requests to measure them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::job::Link;
use perigee_model::volume::BlockProbe;
use perigee_model::{HostId, Problem};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::records::Records;

/// Block reads of a host from itself.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Local {
    /// `None` when it has nothing to read.
    pub blocks: Option<BlockProbe>,
    pub measured_ms: u64,
}

/// A request to measure a link unless it was measured since `oldest_ms`. If `from` and `to` are the same host,
/// its reads from itself are measured.
#[derive(Debug)]
pub struct Ask {
    pub from: HostId,
    pub to: HostId,
    pub oldest_ms: u64,
    pub answer: oneshot::Sender<Result<(), Problem>>,
}

#[derive(Debug)]
pub struct Links {
    known: Mutex<Known>,
    asks: mpsc::UnboundedSender<Ask>,
    /// The receiver, for the one task that measures.
    asked: tokio::sync::Mutex<mpsc::UnboundedReceiver<Ask>>,
}

#[derive(Debug, Default)]
struct Known {
    links: BTreeMap<(HostId, HostId), Link>,
    locals: BTreeMap<HostId, Local>,
    /// When somebody wanted a missing measurement last.
    wanted: BTreeMap<(HostId, HostId), Instant>,
}

impl Links {
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let mut known = Known::default();
        for link in records.list::<Link>("links/").await? {
            known.links.insert((link.from.clone(), link.to.clone()), link);
        }
        for key in records.keys("local_blocks/").await? {
            let Ok(host) = HostId::new(key.trim_start_matches("local_blocks/")) else { continue };
            if let Some(local) = records.read::<Local>(&key).await? {
                known.locals.insert(host, local);
            }
        }
        let (asks, asked) = mpsc::unbounded_channel();
        Ok(Self { known: Mutex::new(known), asks, asked: tokio::sync::Mutex::new(asked) })
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The receiver for the task that measures. That task can be started again after a panic.
    pub async fn asked(&self) -> tokio::sync::MutexGuard<'_, mpsc::UnboundedReceiver<Ask>> {
        self.asked.lock().await
    }

    pub fn ask(&self, ask: Ask) {
        // Without a measuring task the answer's sender is dropped, so the waiting caller gets an error.
        drop(self.asks.send(ask));
    }

    /// Whether nobody wanted this missing measurement in the last `pause`. From now on somebody has.
    pub fn is_wanted_anew(&self, from: &HostId, to: &HostId, pause: Duration) -> bool {
        let mut known = self.lock();
        let pair = (from.clone(), to.clone());
        if known.wanted.get(&pair).is_some_and(|at| at.elapsed() < pause) {
            return false;
        }
        known.wanted.insert(pair, Instant::now());
        true
    }

    pub fn all(&self) -> Vec<Link> {
        self.lock().links.values().cloned().collect()
    }

    pub fn get(&self, from: &HostId, to: &HostId) -> Option<Link> {
        self.lock().links.get(&(from.clone(), to.clone())).cloned()
    }

    pub fn local(&self, host: &HostId) -> Option<Local> {
        self.lock().locals.get(host).copied()
    }

    /// Writes a measurement to the store, and then to memory.
    pub async fn put(&self, records: &Records, link: Link) -> Result<(), Problem> {
        records.put(&format!("links/{}/{}", link.from, link.to), &link).await?;
        self.lock().links.insert((link.from.clone(), link.to.clone()), link);
        Ok(())
    }

    pub async fn put_local(
        &self,
        records: &Records,
        host: &HostId,
        local: Local,
    ) -> Result<(), Problem> {
        records.put(&format!("local_blocks/{host}"), &local).await?;
        self.lock().locals.insert(host.clone(), local);
        Ok(())
    }

    /// Drops all measurements of a removed host.
    pub async fn forget(&self, records: &Records, host: &HostId) -> Result<(), Problem> {
        let gone: Vec<(HostId, HostId)> = {
            let known = self.lock();
            known.links.keys().filter(|(from, to)| from == host || to == host).cloned().collect()
        };
        for (from, to) in &gone {
            records.remove(&format!("links/{from}/{to}")).await?;
        }
        records.remove(&format!("local_blocks/{host}")).await?;
        let mut known = self.lock();
        known.links.retain(|(from, to), _| from != host && to != host);
        known.wanted.retain(|(from, to), _| from != host && to != host);
        known.locals.remove(host);
        Ok(())
    }
}
