//! Several hosts with caches, one home, and a history: no read is ever stale.
//!
//! The home is a small volume in memory behind the real [`Lease`], which is used as the store uses it.
//! Every message takes a while, and some take many seconds, as when a connection is lost and made again
//! while the lease goes on to its end. Some requests fail after they were done, or without being done.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::lease::{
    HostTag, Lease, LeaseAnswer, LeaseAsk, LeaseDecision, LeaseRequest, NO_HOST, SEVERAL,
};
use perigee_model::volume::BLOCK_BYTES;
use proptest::prelude::*;
use tokio::sync::RwLock;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::proxy::{Requests, hold_lease};

const BLOCKS: usize = 6;

struct Home {
    values: Mutex<[u64; BLOCKS]>,
    /// Another one after each restart.
    lease: Mutex<Arc<Lease>>,
    /// Who is remembered over a restart.
    durable: Mutex<Option<HostTag>>,
    /// As a volume's: writes have its read side.
    gate: RwLock<()>,
    /// The writer epoch; sessions of another one may not write.
    epoch: AtomicU64,
}

impl Home {
    fn lease(&self) -> Arc<Lease> {
        Arc::clone(&self.lease.lock().expect("no holder panics"))
    }

    /// Whether the server with this lease still runs.
    fn runs(&self, lease: &Arc<Lease>) -> bool {
        Arc::ptr_eq(&self.lease(), lease)
    }

    fn remember(&self, host: Option<HostTag>) {
        *self.durable.lock().expect("no holder panics") = host;
    }

    fn remembered(&self) -> Option<HostTag> {
        *self.durable.lock().expect("no holder panics")
    }

    /// The server is killed and started again. Writes in flight are done before or are not done.
    async fn restart(&self) {
        let _gate = self.gate.write().await;
        *self.lease.lock().expect("no holder panics") =
            Arc::new(Lease::remembered(self.remembered()));
    }
}

/// One host's session, and the way to the home.
struct Session {
    home: Arc<Home>,
    host: HostTag,
    epoch: u64,
    delays_ms: Mutex<Vec<u64>>,
    /// Whether the answer to a question about the lease is lost, one after the other. The question
    /// is then sent again.
    unheard: Mutex<Vec<bool>>,
    /// What is sent in this time arrives at its end: the connection is lost.
    lost: (Instant, Instant),
    /// Answers come from memory now and then.
    kept: Arc<AtomicU64>,
}

impl Session {
    async fn pass(&self) {
        let delay_ms = {
            let mut delays_ms = self.delays_ms.lock().expect("no holder panics");
            delays_ms.rotate_left(1);
            delays_ms[0]
        };
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        if Instant::now() >= self.lost.0 {
            tokio::time::sleep_until(self.lost.1).await;
        }
    }

    async fn end_leases(&self) {
        let lease = self.home.lease();
        while let Some(grant) = lease.recall(self.host).await {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if !self.home.runs(&lease) {
                return;
            }
            if lease.is_recalled(grant) {
                self.home.remember(lease.forgetting(self.host));
                lease.forget();
            }
        }
    }

    /// `None`: the server was killed before it answered.
    async fn ask_lease(&self, ask: LeaseAsk) -> Option<LeaseAnswer> {
        let lease = self.home.lease();
        let answer = self.ask_this_lease(&lease, ask).await;
        self.home.runs(&lease).then_some(answer)
    }

    async fn ask_this_lease(
        &self,
        lease: &Arc<Lease>,
        LeaseAsk { request, number }: LeaseAsk,
    ) -> LeaseAnswer {
        if request == LeaseRequest::GiveBack {
            lease.give_back(self.host, number);
            return LeaseAnswer::Refused;
        }
        let keeps = request == LeaseRequest::Keep;
        match lease.decide(self.host, keeps, number) {
            LeaseDecision::Answer(LeaseAnswer::Still) if keeps => {
                lease.keep(self.host, number).await
            }
            _ if keeps => LeaseAnswer::Recalled,
            LeaseDecision::Answer(answer) => answer,
            LeaseDecision::MayBeGranted => {
                let _gate = self.home.gate.write().await;
                match lease.decide(self.host, false, number) {
                    LeaseDecision::Answer(answer) => answer,
                    LeaseDecision::MayBeGranted if self.home.runs(lease) => {
                        self.home.remember(Some(lease.remembered_with(self.host)));
                        lease.grant(self.host, number)
                    }
                    LeaseDecision::MayBeGranted => LeaseAnswer::Refused,
                }
            }
        }
    }
}

fn values(data: &[u8]) -> impl Iterator<Item = u64> {
    let blocks = data.chunks_exact(4096);
    blocks.map(|block| u64::from_be_bytes(block[..8].try_into().expect("eight bytes")))
}

fn first_block(offset: u64) -> usize {
    usize::try_from(offset / BLOCK_BYTES).expect("a small volume")
}

impl Device for Session {
    fn size_bytes(&self) -> u64 {
        BLOCKS as u64 * BLOCK_BYTES
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            self.kept.fetch_sub(1, Ordering::SeqCst);
            self.pass().await;
            let values = *self.home.values.lock().expect("no holder panics");
            let mut data = vec![0; length_bytes as usize];
            for (block, place) in data.chunks_exact_mut(4096).enumerate() {
                place[..8].copy_from_slice(&values[first_block(offset) + block].to_be_bytes());
            }
            self.pass().await;
            Ok(data.into())
        })
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.pass().await;
            loop {
                self.end_leases().await;
                let gate = self.home.gate.read().await;
                if !self.home.lease().allows(self.host) {
                    drop(gate);
                    continue;
                }
                if self.epoch != self.home.epoch.load(Ordering::SeqCst) {
                    break Err(IoError::Refused("another epoch".into()));
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
                for (block, value) in values(&data).enumerate() {
                    let place = first_block(offset) + block;
                    self.home.values.lock().expect("no holder panics")[place] = value;
                }
                drop(gate);
                self.pass().await;
                // As a flush after it that fails.
                break if fua { Err(IoError::NoSpace) } else { Ok(()) };
            }
        })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::NoSpace) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn lease(&self, ask: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        Box::pin(async move {
            loop {
                self.pass().await;
                let Some(answer) = self.ask_lease(ask).await else { continue };
                self.pass().await;
                let mut unheard = self.unheard.lock().expect("no holder panics");
                unheard.rotate_left(1);
                if !unheard[0] {
                    break Ok(answer);
                }
            }
        })
    }
}

/// Who wrote what when. A moment is a number that grows with each event.
#[derive(Default)]
struct History {
    now: u64,
    writes: Vec<(usize, u64, u64, u64)>,
}

impl History {
    fn moment(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Whether a read that began then may have found this: nothing that was acknowledged before it
    /// began came wholly after it.
    fn allows(&self, block: usize, value: u64, begun: u64) -> bool {
        let of_block = || self.writes.iter().filter(move |write| write.0 == block);
        let ended = of_block().find(|write| write.1 == value).map(|write| write.3);
        let since = if value == 0 { Some(0) } else { ended };
        since.is_some_and(|since| !of_block().any(|other| other.2 > since && other.3 < begun))
    }
}

#[derive(Debug, Clone)]
enum Action {
    Read {
        first: usize,
        blocks: usize,
    },
    Write {
        first: usize,
        blocks: usize,
        fails: bool,
    },
    Raise,
    /// Of the home.
    Restart,
    Rest(u64),
}

#[derive(Debug, Clone)]
struct Client {
    /// 0: of the home.
    host: HostTag,
    epoch: u64,
    delays_ms: Vec<u64>,
    unheard: Vec<bool>,
    /// From when on the connection is lost, and for how long.
    lost_ms: (u64, u64),
    actions: Vec<Action>,
}

fn clients() -> impl Strategy<Value = Vec<Client>> {
    let range = || (0..BLOCKS).prop_flat_map(|first| (Just(first), 1..=BLOCKS - first));
    let action = prop_oneof![
        12 => range().prop_map(|(first, blocks)| Action::Read { first, blocks }),
        3 => (range(), prop::bool::weighted(0.1))
            .prop_map(|((first, blocks), fails)| Action::Write { first, blocks, fails }),
        1 => Just(Action::Raise),
        1 => Just(Action::Restart),
        4 => prop_oneof![8 => 0_u64..30, 2 => 0_u64..4000, 1 => 4000_u64..15_000].prop_map(Action::Rest),
    ];
    let delay_ms = prop_oneof![30 => 0_u64..20, 1 => 500_u64..14_000];
    let client = (
        prop_oneof![1 => Just(NO_HOST), 8 => 1_u64..4],
        0_u64..2,
        prop::collection::vec(delay_ms, 1..30),
        prop::collection::vec(prop::bool::weighted(0.3), 1..10)
            .prop_map(|unheard| [vec![false], unheard].concat()),
        (0_u64..5000, prop_oneof![Just(0), 0_u64..30_000]),
        prop::collection::vec(action, 1..60),
    );
    let client = client.prop_map(|(host, epoch, delays_ms, unheard, lost_ms, actions)| Client {
        host,
        epoch,
        delays_ms,
        unheard,
        lost_ms,
        actions,
    });
    prop::collection::vec(client, 1..6)
}

/// A layer at each host that shows what the volume had at first.
struct AtFirst;

impl Device for AtFirst {
    fn size_bytes(&self) -> u64 {
        BLOCKS as u64 * BLOCK_BYTES
    }

    fn read(&self, _: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move { Ok(vec![0; length_bytes as usize].into()) })
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// Asks again and again what is common. The home tells it block by block.
async fn learn(home: Arc<Home>, cached: Arc<CachedVolume>, delays_ms: Vec<u64>) {
    let mut delays_ms = delays_ms.into_iter().cycle();
    let mut pass = async || {
        tokio::time::sleep(Duration::from_millis(delays_ms.next().unwrap_or(1))).await;
    };
    let _turn = cached.learning.lock().await;
    loop {
        if let Some((number, _)) = cached.learn() {
            pass().await;
            let mut changed = Vec::new();
            for block in 0..BLOCKS {
                if home.values.lock().expect("no holder panics")[block] != 0 {
                    changed.push(block as u64..block as u64 + 1);
                }
                pass().await;
            }
            let layer = LayerId(uuid::Uuid::from_u128(7));
            let common = SharedLayers::new(layer, Arc::new(AtFirst), BLOCKS as u64, &changed);
            cached.learned(number, Compared::Other(common));
        }
        let again = Duration::from_millis(700);
        let _late = tokio::time::timeout(again, cached.unlearned.notified()).await;
    }
}

struct Scene {
    home: Arc<Home>,
    /// Whether the hosts have a layer on which the volume stands.
    replica: bool,
    history: Mutex<History>,
    hosts: Vec<Arc<CachedVolume>>,
    stale: AtomicBool,
    kept: Arc<AtomicU64>,
}

impl Scene {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().expect("no holder panics")
    }

    async fn client(self: Arc<Self>, number: u64, client: Client) {
        let to_learn = client.delays_ms.clone();
        let (delays_ms, unheard) = (Mutex::new(client.delays_ms), Mutex::new(client.unheard));
        let from = Instant::now() + Duration::from_millis(client.lost_ms.0);
        let lost = (from, from + Duration::from_millis(client.lost_ms.1));
        let (home, kept) = (self.home.clone(), self.kept.clone());
        let session = Session {
            home,
            host: client.host,
            epoch: client.epoch,
            delays_ms,
            unheard,
            lost,
            kept,
        };
        let upstream: Arc<dyn Device> = Arc::new(session);
        let host = usize::try_from(client.host).expect("a few hosts");
        let cached = (client.host != NO_HOST).then(|| self.hosts[host].clone());
        let ended = CancellationToken::new();
        if let Some(cached) = cached.clone() {
            tokio::spawn(hold_lease(upstream.clone(), cached.clone(), ended.clone()));
            if self.replica {
                let learning = learn(Arc::clone(&self.home), cached, to_learn);
                let ended = ended.clone();
                tokio::spawn(async move { ended.run_until_cancelled(learning).await });
            }
        }
        let requests = Arc::new(Requests::new(upstream, cached, Arc::default()));
        for (step, action) in client.actions.into_iter().enumerate() {
            let value = (number << 32) | (step as u64 + 1);
            self.act(&requests, action, value).await;
        }
        ended.cancel();
    }

    async fn act(&self, requests: &Arc<Requests>, action: Action, value: u64) {
        match action {
            Action::Rest(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            Action::Restart => self.home.restart().await,
            Action::Raise => {
                let _gate = self.home.gate.write().await;
                self.home.epoch.fetch_xor(1, Ordering::SeqCst);
            }
            Action::Read { first, blocks } => {
                let begun = self.history().moment();
                let length = u32::try_from(blocks * 4096).expect("a small volume");
                self.kept.fetch_add(1, Ordering::SeqCst);
                let read = requests.read(first as u64 * BLOCK_BYTES, length).await;
                for (place, value) in values(&read.expect("bytes")).enumerate() {
                    if !self.history().allows(first + place, value, begun) {
                        self.stale.store(true, Ordering::SeqCst);
                    }
                }
            }
            Action::Write { first, blocks, fails } => {
                let begun = self.history().moment();
                let mut block = vec![0; 4096];
                block[..8].copy_from_slice(&value.to_be_bytes());
                let write = (first..first + blocks).map(|block| (block, value, begun, u64::MAX));
                self.history().writes.extend(write);
                let data = Bytes::from(block.repeat(blocks));
                let done = requests.write(first as u64 * BLOCK_BYTES, data, fails).await;
                let mut history = self.history();
                let ended = history.moment();
                if done.is_ok() {
                    let own = history.writes.iter_mut().filter(|write| write.1 == value);
                    own.for_each(|write| write.3 = ended);
                }
            }
        }
    }
}

/// How many reads were answered from memory.
async fn case(clients: Vec<Client>, remembered: Option<HostTag>) -> u64 {
    case_with(clients, remembered, false).await
}

async fn case_with(clients: Vec<Client>, remembered: Option<HostTag>, replica: bool) -> u64 {
    let home = Arc::new(Home {
        values: Mutex::default(),
        lease: Mutex::new(Arc::new(Lease::remembered(remembered))),
        durable: Mutex::new(remembered),
        gate: RwLock::default(),
        epoch: AtomicU64::new(0),
    });
    let hosts =
        (0..4).map(|_| Arc::new(CachedVolume::new(Arc::new(ReadCache::new(1 << 20))))).collect();
    let (history, stale) = Default::default();
    let kept = Arc::new(AtomicU64::new(0));
    let scene = Arc::new(Scene { home, replica, history, hosts, stale, kept });
    let running: Vec<_> = (1..)
        .zip(clients)
        .map(|(number, client)| tokio::spawn(scene.clone().client(number, client)))
        .collect();
    let ended = async {
        for client in running {
            client.await.expect("a client");
        }
    };
    tokio::time::timeout(Duration::from_secs(24 * 3600), ended).await.expect("every answer");
    assert!(!scene.stale.load(Ordering::SeqCst), "an old block was read");
    scene.kept.load(Ordering::SeqCst)
}

fn run(case: impl Future<Output = u64>) -> u64 {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::pause();
        case.await
    })
}

fn remembered() -> impl Strategy<Value = Option<HostTag>> {
    prop::option::of(prop_oneof![3 => 1_u64..4, 1 => Just(SEVERAL)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_read_is_ever_stale(clients in clients(), remembered in remembered()) {
        run(case(clients, remembered));
    }

    #[test]
    fn no_read_from_a_replica_is_ever_stale(
        clients in clients(),
        remembered in remembered(),
    ) {
        run(case_with(clients, remembered, true));
    }
}

#[test]
fn a_host_with_a_replica_reads_there_what_has_not_changed() {
    let write = Action::Write { first: 1, blocks: 1, fails: false };
    let reads = vec![Action::Rest(100), read(), Action::Rest(1000), write, read(), read()];
    let kept = run(case_with(vec![quiet(1, reads.clone())], None, true));
    assert_eq!(kept, 3, "what it wrote is in memory, and the rest is in the replica");
    let cached = Arc::new(CachedVolume::new(Arc::new(ReadCache::new(1 << 20))));
    let common = || SharedLayers::new(LayerId(uuid::Uuid::nil()), Arc::new(AtFirst), 6, &[]);
    assert!(cached.learn().is_none(), "it has no lease");
    run(async {
        cached.granted(Instant::now(), false);
        let (number, _) = cached.learn().expect("it has the lease");
        let written = cached.write(BLOCK_BYTES, BLOCK_BYTES);
        assert!(cached.learned(number, Compared::Other(common())));
        written.done(BLOCK_BYTES, &[1; 4096]);
        let known = cached.common().expect("it is known");
        assert!(known.has(&(0..1)) && !known.has(&(1..2)), "written while the home told it");
        let (number, _) = cached.learn().expect("it has the lease");
        cached.granted(Instant::now(), false);
        assert!(
            !cached.learned(number, Compared::Other(common())),
            "others may have written since"
        );
        assert!(cached.common().is_none());
        0
    });
}

/// Reads and writes in turn, at rest in between.
fn quiet(host: HostTag, actions: Vec<Action>) -> Client {
    Client { host, epoch: 0, delays_ms: vec![8], unheard: vec![false], lost_ms: (0, 0), actions }
}

fn read() -> Action {
    Action::Read { first: 0, blocks: BLOCKS }
}

#[test]
fn a_second_reading_of_one_host_is_answered_from_memory_even_much_later() {
    let (rest, long) = (Action::Rest(100), Action::Rest(60_000));
    let first = vec![rest.clone(), read(), read(), read()];
    // The first read after a long rest asks for the lease, and the home for the bytes.
    let second = vec![long, read(), rest, read(), read(), read()];
    let kept = run(case(vec![quiet(1, [first, second].concat())], None));
    assert_eq!(kept, 5);
}

#[test]
fn two_hosts_read_from_memory_at_the_same_time() {
    let reads = || [Action::Rest(100), read(), read(), read(), read()].to_vec();
    let kept = run(case(vec![quiet(1, reads()), quiet(2, reads())], None));
    assert_eq!(kept, 6, "only the first reading of each goes to the home");
}

/// A disk that never answers.
struct Hangs;

impl Device for Hangs {
    fn size_bytes(&self) -> u64 {
        BLOCKS as u64 * BLOCK_BYTES
    }

    fn read(&self, _: u64, _: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(std::future::pending())
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(std::future::pending())
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(std::future::pending())
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(std::future::pending())
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn a_layer_here_whose_disk_hangs_is_given_up_and_read_at_the_home() {
    let cached = Arc::new(CachedVolume::new(Arc::new(ReadCache::new(1 << 20))));
    let layer = LayerId(uuid::Uuid::from_u128(7));
    let common = || SharedLayers::new(layer, Arc::new(Hangs), BLOCKS as u64, &[]);
    cached.granted(Instant::now(), false);
    let (number, _) = cached.learn().expect("it has the lease");
    assert!(cached.learned(number, Compared::Other(common())));
    let requests = Requests::new(Arc::new(AtFirst), Some(cached.clone()), Arc::default());
    let (requests, begun) = (Arc::new(requests), Instant::now());
    let read = requests.read(0, 4096);
    let read = tokio::time::timeout(Duration::from_secs(60), read).await.expect("an end");
    assert_eq!(read.expect("the home's")[..], [0; 4096]);
    assert!(begun.elapsed() >= Duration::from_secs(5), "a busy disk is not one that hangs");
    assert_eq!(cached.unreadable(), [layer]);
    cached.granted(Instant::now(), false);
    assert!(cached.learn().is_none(), "the layers below it are probably on that disk too");
    cached.enter();
    cached.leave().expect("it was the last session");
    cached.granted(Instant::now(), false);
    cached.learn().expect("the disk may work again");
}

#[test]
fn a_host_whose_lease_is_recalled_reads_what_the_other_wrote() {
    let reader = vec![Action::Rest(100), read(), read(), Action::Rest(1000), read(), read()];
    let write = Action::Write { first: 0, blocks: 2, fails: false };
    let writer = vec![Action::Rest(500), write.clone(), write];
    run(case(vec![quiet(1, reader), quiet(2, writer)], None));
}

#[test]
fn a_host_s_last_session_gives_the_lease_back_so_that_the_next_writer_does_not_wait() {
    let reader = quiet(1, vec![Action::Rest(100), read(), read(), read()]);
    let write = Action::Write { first: 0, blocks: 2, fails: false };
    let writer = quiet(2, vec![Action::Rest(1000), write]);
    run(async {
        let begun = Instant::now();
        let kept = case(vec![reader, writer], None).await;
        assert!(kept > 0, "the reader held the lease");
        let took_ms = begun.elapsed().as_millis();
        assert!(took_ms < 1000 + 2 * 2 * 8 + 50, "the write was done after {took_ms} ms");
        kept
    });
}

#[test]
fn a_host_that_hears_of_no_recall_stops_reading_from_memory_before_others_write() {
    let reads = [read(), Action::Rest(50)].into_iter().cycle().take(600);
    let reader = [Action::Rest(100), read()].into_iter().chain(reads).collect();
    let reader = Client { lost_ms: (1000, 60_000), ..quiet(1, reader) };
    let write = Action::Write { first: 0, blocks: 2, fails: false };
    let writer = vec![Action::Rest(1500), write];
    run(case(vec![reader, quiet(2, writer)], None));
}

#[test]
fn a_grant_that_the_host_did_not_hear_of_makes_nothing_old_readable() {
    let write = Action::Write { first: 0, blocks: 2, fails: false };
    let rest = Action::Rest(200);
    let long = Action::Rest(60_000);
    let reader = vec![rest.clone(), read(), rest.clone(), read(), long, read(), rest, read()];
    // The answers that it hears: granted, still held; then a grant that it does not.
    let unheard = vec![false, false, false, false, true, false];
    for shift in 0..unheard.len() {
        let mut reader = quiet(1, reader.clone());
        reader.unheard.clone_from(&unheard);
        reader.unheard.rotate_left(shift);
        run(case(vec![reader, quiet(2, vec![Action::Rest(30_000), write.clone()])], None));
    }
}

#[tokio::test(start_paused = true)]
async fn a_give_back_that_comes_after_a_new_session_s_question_does_not_end_its_lease() {
    const HOST: HostTag = 1;
    let lease = Lease::default();
    let cached = CachedVolume::new(Arc::new(ReadCache::new(1 << 20)));
    let asks = || {
        let (asked, number) = (Instant::now(), cached.number());
        let answer = match lease.decide(HOST, false, number) {
            LeaseDecision::Answer(answer) => answer,
            LeaseDecision::MayBeGranted => lease.grant(HOST, number),
        };
        assert!(matches!(answer, LeaseAnswer::Granted | LeaseAnswer::Still), "{answer:?}");
        cached.granted(asked, false);
    };
    cached.enter();
    asks();
    let given_back = cached.leave().expect("the last one");
    cached.enter();
    asks();
    // The give-back of the session that has ended comes last.
    lease.give_back(HOST, given_back);
    assert!(cached.is_held(), "this host reads from memory");
    let begun = Instant::now();
    lease.recall(2).await;
    assert!(!cached.is_held(), "another host writes after {:?}", begun.elapsed());
}

#[tokio::test]
async fn of_two_writes_at_once_neither_is_kept() {
    let cached = Arc::new(CachedVolume::new(Arc::new(ReadCache::new(1 << 20))));
    cached.granted(Instant::now(), true);
    let (mut buffer, block) = ([0; 4096], |byte: u8| [byte; 4096]);
    cached.write(0, 4096).done(0, &block(1));
    assert!(cached.read(0, &mut buffer) && buffer == block(1), "one alone is");
    let (first, second) = (cached.write(0, 4096), cached.write(0, 4096));
    // The home may have done the second one first.
    second.done(0, &block(3));
    first.done(0, &block(2));
    assert!(!cached.read(0, &mut buffer));
    drop(cached.write(4096, 4096));
    cached.write(0, 4096).done(0, &block(4));
    assert!(!cached.read(0, &mut buffer), "a write of unknown fate may still come");
}
