//! The measurements of links between hosts, and the requests to measure them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::job::Link;
use perigee_model::volume::BlockProbe;
use perigee_model::{HostId, Problem, SiteId};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};

use crate::records::Records;

/// Block reads of a host from itself.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Local {
    /// `None` when it has nothing to read.
    pub blocks: Option<BlockProbe>,
    pub measured_ms: u64,
}

/// The prefix of the records of what was measured between two sites.
const OF_SITES: &str = "links_of_sites/";

/// So many pairs of sites are remembered.
const OF_SITES_MAX: usize = 1000;

/// What a host that is removed has measured between two sites.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct LinkOfSites {
    sites: (SiteId, SiteId),
    link: Link,
}

/// The most requests to measure that wait.
const ASKS_MAX: usize = 1000;

/// A request to measure a link unless it was measured since `oldest_ms`. If `from` and `to` are the same host,
/// its reads from itself are measured.
#[derive(Debug)]
pub struct Ask {
    pub from: HostId,
    pub to: HostId,
    pub oldest_ms: u64,
    /// `None`: nobody waits for it.
    pub answer: Option<oneshot::Sender<Result<(), Problem>>>,
}

impl Ask {
    /// Whoever has waited for it does not any more.
    fn is_given_up(&self) -> bool {
        self.answer.as_ref().is_some_and(oneshot::Sender::is_closed)
    }

    fn is_of_same(&self, from: &HostId, to: &HostId) -> bool {
        (&self.from, &self.to) == (from, to)
    }

    /// Answers whoever waits for it, if somebody does.
    pub fn answer(self, measured: Result<(), Problem>) {
        if let Some(answer) = self.answer {
            // The caller may no longer wait.
            drop(answer.send(measured));
        }
    }
}

/// The last measurement of each link, and the queue of those who ask for another one.
#[derive(Debug, Default)]
pub struct Links {
    known: Mutex<LinkTable>,
    asks: Mutex<VecDeque<Ask>>,
    /// Notified when there is one.
    asked: Notify,
}

#[derive(Debug, Default)]
struct LinkTable {
    links: BTreeMap<(HostId, HostId), Link>,
    locals: BTreeMap<HostId, Local>,
    /// The last measurement between two sites by a host that is removed, from the first site, which read.
    of_sites: BTreeMap<(SiteId, SiteId), Link>,
    /// When somebody wanted a missing measurement last.
    wanted: BTreeMap<(HostId, HostId), Instant>,
}

impl Links {
    /// Reads all measurements from the store.
    ///
    /// # Errors
    /// If the store does not answer, or a record can't be read.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let mut known = LinkTable::default();
        for link in records.list::<Link>("links/").await? {
            known.links.insert((link.from.clone(), link.to.clone()), link);
        }
        for kept in records.list::<LinkOfSites>(OF_SITES).await? {
            known.of_sites.insert(kept.sites, kept.link);
        }
        for key in records.keys("local_blocks/").await? {
            let Ok(host) = HostId::new(key.trim_start_matches("local_blocks/")) else { continue };
            if let Some(local) = records.read::<Local>(&key).await? {
                known.locals.insert(host, local);
            }
        }
        Ok(Self { known: Mutex::new(known), ..Self::default() })
    }

    fn lock(&self) -> MutexGuard<'_, LinkTable> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asks(&self) -> MutexGuard<'_, VecDeque<Ask>> {
        self.asks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request, for the one task that measures. Nothing is measured for somebody who does not wait any more.
    pub async fn next_ask(&self) -> Ask {
        loop {
            let next = {
                let mut asks = self.asks();
                asks.retain(|ask| !ask.is_given_up());
                asks.pop_front()
            };
            match next {
                Some(ask) => return ask,
                None => self.asked.notified().await,
            }
        }
    }

    /// Puts a request in the queue, unless the same one waits there and nobody waits for this one's answer. Beyond
    /// [`ASKS_MAX`] it is answered with `Unavailable` at once.
    pub fn ask(&self, ask: Ask) {
        let mut asks = self.asks();
        asks.retain(|ask| !ask.is_given_up());
        let is_twice = |other: &Ask| other.is_of_same(&ask.from, &ask.to);
        if ask.answer.is_none() && asks.iter().any(is_twice) {
            return;
        }
        if asks.len() >= ASKS_MAX {
            drop(asks);
            let what = format!("can't measure the link from {} to {}", ask.from, ask.to);
            let why = format!("{ASKS_MAX} measurements are waited for");
            return ask.answer(Err(Problem::unavailable(what, why).next("try again in a minute")));
        }
        asks.push_back(ask);
        self.asked.notify_one();
    }

    /// Gives the problem to all who wait for the same measurement, which would fail for each of them again.
    pub fn fail_others(&self, from: &HostId, to: &HostId, problem: &Problem) {
        let same = {
            let mut asks = self.asks();
            let (same, others) =
                asks.drain(..).partition::<VecDeque<Ask>, _>(|ask| ask.is_of_same(from, to));
            *asks = others;
            same
        };
        for ask in same {
            ask.answer(Err(problem.clone()));
        }
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

    /// All measured links, sorted by their hosts.
    pub fn all(&self) -> Vec<Link> {
        self.lock().links.values().cloned().collect()
    }

    /// The last measurement from one host to the other, in this direction; `None` if there is none.
    pub fn get(&self, from: &HostId, to: &HostId) -> Option<Link> {
        self.lock().links.get(&(from.clone(), to.clone())).cloned()
    }

    /// The last measurement of a host's reads from itself; `None` if there is none.
    pub fn local(&self, host: &HostId) -> Option<Local> {
        self.lock().locals.get(host).copied()
    }

    /// Writes a measurement to the store, and then to memory.
    pub async fn put(&self, records: &Records, link: Link) -> Result<(), Problem> {
        records.put(&format!("links/{}/{}", link.from, link.to), &link).await?;
        self.lock().links.insert((link.from.clone(), link.to.clone()), link);
        Ok(())
    }

    /// As [`Self::put`], for a host's reads from itself.
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

    /// What hosts that are removed have measured between their sites, with the site that read and the other one.
    pub fn of_sites(&self) -> Vec<((SiteId, SiteId), Link)> {
        let known = self.lock();
        known.of_sites.iter().map(|(sites, link)| (sites.clone(), link.clone())).collect()
    }

    /// Remembers what a host has measured between two sites. Of [`OF_SITES_MAX`] the oldest one is forgotten.
    pub async fn keep_of_sites(
        &self,
        records: &Records,
        sites: (SiteId, SiteId),
        link: Link,
    ) -> Result<(), Problem> {
        let key = |sites: &(SiteId, SiteId)| format!("{OF_SITES}{}/{}", sites.0, sites.1);
        let oldest = {
            let known = self.lock();
            let is_full = known.of_sites.len() >= OF_SITES_MAX;
            let others = known.of_sites.iter().filter(|(of, _)| is_full && **of != sites);
            others.min_by_key(|(_, link)| link.measured_ms).map(|(of, _)| of.clone())
        };
        if let Some(oldest) = oldest {
            records.remove(&key(&oldest)).await?;
            self.lock().of_sites.remove(&oldest);
        }
        let kept = LinkOfSites { sites, link };
        records.put(&key(&kept.sites), &kept).await?;
        self.lock().of_sites.insert(kept.sites, kept.link);
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

#[cfg(test)]
mod tests {
    use super::*;

    type Answered = oneshot::Receiver<Result<(), Problem>>;

    fn host(name: &str) -> HostId {
        HostId::new(name).expect("a name")
    }

    /// Somebody wants the link from `home1` to this host measured.
    fn ask(links: &Links, to: &str) -> Answered {
        let (answer, answered) = oneshot::channel();
        links.ask(Ask { from: host("home1"), to: host(to), oldest_ms: 0, answer: Some(answer) });
        answered
    }

    /// Plans that were asked for again and again held up all other measurements while one host hung.
    #[tokio::test]
    async fn what_nobody_waits_for_any_more_is_not_measured() {
        let links = Links::default();
        for _ in 0..10 {
            drop(ask(&links, "hangs1"));
        }
        let _answered = ask(&links, "cloud1");
        assert_eq!(links.next_ask().await.to, host("cloud1"));
    }

    #[tokio::test]
    async fn what_fails_is_tried_once_for_all_who_wait_for_it() {
        let links = Links::default();
        let first = [ask(&links, "hangs1"), ask(&links, "hangs1")];
        let _other = ask(&links, "cloud1");
        let failed = links.next_ask().await;
        let problem = Problem::unavailable("can't measure", "it hangs");
        links.fail_others(&failed.from, &failed.to, &problem);
        failed.answer(Err(problem.clone()));
        for answered in first {
            assert_eq!(answered.await.expect("an answer"), Err(problem.clone()));
        }
        assert_eq!(links.next_ask().await.to, host("cloud1"));
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_wanted_once() {
        let links = Links::default();
        for to in ["cloud1", "cloud1", "cloud2"] {
            links.ask(Ask { from: host("home1"), to: host(to), oldest_ms: 0, answer: None });
        }
        assert_eq!(links.next_ask().await.to, host("cloud1"));
        assert_eq!(links.next_ask().await.to, host("cloud2"));
    }

    #[tokio::test]
    async fn more_requests_than_may_wait_are_refused() {
        let links = Links::default();
        let mut waiting: Vec<Answered> = (0..ASKS_MAX).map(|_| ask(&links, "hangs1")).collect();
        let problem = ask(&links, "cloud1").await.expect("an answer").expect_err("too many");
        assert!(problem.to_string().contains("1000 measurements"), "{problem}");
        drop(waiting.pop());
        let mut answered = ask(&links, "cloud1");
        assert!(answered.try_recv().is_err(), "it waits for its turn");
    }

    #[tokio::test]
    async fn what_was_measured_between_sites_outlives_the_host_and_the_controller() {
        let dir = tempfile::tempdir().expect("tempdir");
        let store = crate::store::SqliteStore::open(&dir.path().join("state.db")).expect("a store");
        let records = Records::new(std::sync::Arc::new(store));
        let links = Links::load(&records).await.expect("links");
        let site = |name: String| SiteId::new(name).expect("a name");
        let probe = perigee_model::vm::LinkProbe { rtt_ms: 16.0, rate_bytes_per_s: 1 << 20 };
        for number in 0..=OF_SITES_MAX as u64 {
            let sites = (site("cloud".to_owned()), site(format!("s{number}")));
            let (from, to) = (host("rent-1"), host("home1"));
            let link = Link { from, to, probe, blocks: None, measured_ms: number };
            links.keep_of_sites(&records, sites, link).await.expect("kept");
        }
        links.forget(&records, &host("rent-1")).await.expect("forgotten");
        for links in [links, Links::load(&records).await.expect("links")] {
            let kept = links.of_sites();
            assert_eq!(kept.len(), OF_SITES_MAX);
            let oldest = kept.iter().map(|(_, link)| link.measured_ms).min();
            assert_eq!(oldest, Some(1), "the first one made room");
        }
    }
}
