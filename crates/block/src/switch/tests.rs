//! Clients, a volume that several devices reach, and switches between these, against a history.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::device::{Extent, Zeroing};

const BLOCKS: usize = 4;
/// A block of these tests.
const BLOCK_BYTES: u64 = 8;
const DRAIN_MAX: Duration = Duration::from_millis(60);

/// What all devices reach: the volume at its home.
#[derive(Default)]
struct Home(Mutex<Contents>);

#[derive(Default)]
struct Contents {
    cached: [u64; BLOCKS],
    durable: [u64; BLOCKS],
    /// How often each write came.
    came: HashMap<u64, u32>,
}

impl Home {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.0.lock().expect("no holder panics")
    }
}

/// One way to the home. Every request takes a while each way.
struct Route {
    home: Arc<Home>,
    delays_ms: Mutex<Vec<u64>>,
    /// Requests neither arrive nor are answered.
    away: bool,
    /// Every so-manieth request fails.
    fails: u64,
    asked: AtomicU64,
    given_up: CancellationToken,
    /// Another one has taken its place, and nothing was in flight.
    replaced: AtomicBool,
}

impl Route {
    async fn pass(&self) {
        let delay_ms = {
            let mut delays_ms = self.delays_ms.lock().expect("no holder panics");
            delays_ms.rotate_left(1);
            delays_ms[0]
        };
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
    }

    async fn ask<T>(&self, work: impl FnOnce(&mut Contents) -> T) -> Result<T, IoError> {
        let asked = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = async {
            self.pass().await;
            if self.away {
                std::future::pending::<()>().await;
            }
            let answer = work(&mut self.home.lock());
            self.pass().await;
            assert!(!self.replaced.load(Ordering::SeqCst), "it was not drained");
            answer
        };
        tokio::select! {
            () = self.given_up.cancelled() => Err(IoError::Unreachable("given up".into())),
            answer = answer => match asked.is_multiple_of(self.fails) {
                true => Err(std::io::Error::other("as asked").into()),
                false => Ok(answer),
            },
        }
    }
}

fn index(offset: u64) -> usize {
    usize::try_from(offset / BLOCK_BYTES).expect("a small volume")
}

impl Device for Route {
    fn size_bytes(&self) -> u64 {
        BLOCKS as u64 * BLOCK_BYTES
    }

    fn read(&self, offset: u64, _: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            let value = self.ask(|home| home.cached[index(offset)]).await?;
            Ok(Bytes::copy_from_slice(&value.to_be_bytes()))
        })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        if self.away || !self.asked.fetch_add(1, Ordering::SeqCst).is_multiple_of(3) {
            return None;
        }
        buffer.copy_from_slice(&self.home.lock().cached[index(offset)].to_be_bytes());
        Some(Ok(()))
    }

    fn write(&self, offset: u64, data: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        let value = u64::from_be_bytes(data[..].try_into().expect("a block"));
        Box::pin(self.ask(move |home| {
            *home.came.entry(value).or_default() += 1;
            home.cached[index(offset)] = value;
        }))
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::NoSpace) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(self.ask(|home| home.durable = home.cached))
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// Who wrote what when. A moment is a number that grows with each event.
#[derive(Default)]
struct History {
    now: u64,
    writes: Vec<Write>,
}

struct Write {
    block: usize,
    value: u64,
    begun: u64,
    /// Never, if it failed.
    ended: u64,
}

impl History {
    fn moment(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Whether a read from `begun` until now may have found this.
    fn allows(&self, block: usize, value: u64, begun: u64) -> bool {
        let of_block = || self.writes.iter().filter(move |write| write.block == block);
        let found = of_block().find(|write| write.value == value);
        let since = if value == 0 { Some(0) } else { found.map(|write| write.ended) };
        // Nothing that was answered before the read began came wholly after it.
        since.is_some_and(|since| {
            !of_block().any(|other| other.begun > since && other.ended < begun)
        })
    }
}

#[derive(Debug, Clone)]
enum Action {
    Read(u64),
    Write(u64),
    Flush,
    Rest(u64),
}

#[derive(Debug, Clone)]
struct Change {
    after_ms: u64,
    delays_ms: Vec<u64>,
    away: bool,
    fails: u64,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        3 => (0..BLOCKS as u64).prop_map(Action::Read),
        3 => (0..BLOCKS as u64).prop_map(Action::Write),
        1 => Just(Action::Flush),
        1 => (0_u64..20).prop_map(Action::Rest),
    ];
    prop::collection::vec(action, 1..40)
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    // Some delays are longer than a drain may take.
    let delays_ms = prop::collection::vec(prop_oneof![8 => 0_u64..20, 1 => 40_u64..90], 1..8);
    let parts =
        (0_u64..50, delays_ms, prop::bool::weighted(0.2), prop_oneof![Just(u64::MAX), 2_u64..9]);
    let change = parts.prop_map(|(after_ms, delays_ms, away, fails)| Change {
        after_ms,
        delays_ms,
        away,
        fails,
    });
    prop::collection::vec(change, 1..20)
}

fn route(home: &Arc<Home>, change: &Change) -> Arc<Route> {
    Arc::new(Route {
        home: Arc::clone(home),
        delays_ms: Mutex::new(change.delays_ms.clone()),
        away: change.away,
        fails: change.fails,
        asked: AtomicU64::new(0),
        given_up: CancellationToken::new(),
        replaced: AtomicBool::new(false),
    })
}

async fn client(
    number: u64,
    actions: Vec<Action>,
    switch: Arc<Switch>,
    home: Arc<Home>,
    history: Arc<Mutex<History>>,
) {
    let history = || history.lock().expect("no holder panics");
    for (step, action) in actions.into_iter().enumerate() {
        match action {
            Action::Rest(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            Action::Read(block) => {
                let begun = history().moment();
                let offset = block * BLOCK_BYTES;
                let mut buffer = [0; 8];
                let read = match switch.at_once(|device| device.try_read(offset, &mut buffer)) {
                    Some(read) => read.map(|()| buffer),
                    None => switch
                        .run(move |device| device.read(offset, 8))
                        .await
                        .map(|bytes| bytes[..].try_into().expect("a block")),
                };
                if let Ok(value) = read.map(u64::from_be_bytes) {
                    assert!(history().allows(index(offset), value, begun), "an old block");
                }
            }
            Action::Write(block) => {
                let (block, value) =
                    (index(block * BLOCK_BYTES), (number << 32) | (step as u64 + 1));
                let place = {
                    let mut history = history();
                    let begun = history.moment();
                    history.writes.push(Write { block, value, begun, ended: u64::MAX });
                    history.writes.len() - 1
                };
                let data = Bytes::copy_from_slice(&value.to_be_bytes());
                let offset = block as u64 * BLOCK_BYTES;
                let done =
                    switch.run(move |device| device.write(offset, data.clone(), false)).await;
                let mut history = history();
                if done.is_ok() {
                    history.writes[place].ended = history.moment();
                    assert!(home.lock().came.contains_key(&value), "answered and not done");
                }
            }
            Action::Flush => {
                let begun = history().moment();
                if switch.run(|device| device.flush()).await.is_ok() {
                    let durable = home.lock().durable;
                    for (block, value) in durable.into_iter().enumerate() {
                        assert!(history().allows(block, value, begun), "answered, not durable");
                    }
                }
            }
        }
    }
}

/// Whether anything was asked twice on purpose.
async fn switches(changes: Vec<Change>, switch: Arc<Switch>, first: Arc<Route>) -> bool {
    let (mut present, mut recalled) = (first, false);
    for change in changes {
        tokio::time::sleep(Duration::from_millis(change.after_ms)).await;
        let next = route(&present.home, &change);
        let began = Instant::now();
        let held = switch.hold().expect("nobody else holds it");
        if present.away {
            recalled = true;
            held.recall(|| present.given_up.cancel(), next.clone());
        } else if held.drained_until(began + DRAIN_MAX).await {
            present.replaced.store(true, Ordering::SeqCst);
            held.change(next.clone());
        } else {
            drop(held);
            continue;
        }
        assert!(began.elapsed() <= DRAIN_MAX, "held for too long");
        present = next;
    }
    // Nobody waits for ever.
    if present.away {
        let back = Change { after_ms: 0, delays_ms: vec![1], away: false, fails: u64::MAX };
        let held = switch.hold().expect("nobody else holds it");
        held.recall(|| present.given_up.cancel(), route(&present.home, &back));
        recalled = true;
    }
    recalled
}

async fn case(first: Change, clients: Vec<Vec<Action>>, changes: Vec<Change>) {
    let (home, history) = (Arc::<Home>::default(), Arc::<Mutex<History>>::default());
    let first = route(&home, &first);
    let switch = Switch::new(first.clone());
    let switching = tokio::spawn(switches(changes, switch.clone(), first));
    let clients: Vec<_> = (1..)
        .zip(clients)
        .map(|(number, actions)| {
            tokio::spawn(client(number, actions, switch.clone(), home.clone(), history.clone()))
        })
        .collect();
    let ended = async {
        for client in clients {
            client.await.expect("a client finds what it should");
        }
        switching.await.expect("switches that keep their time")
    };
    let hour = Duration::from_secs(3600);
    let recalled = tokio::time::timeout(hour, ended).await.expect("every request is answered");
    let doubled = home.lock().came.values().any(|times| *times > 1);
    assert!(recalled || !doubled, "a request came twice");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn requests_are_answered_once_and_rightly_through_any_switches(
        first in changes(),
        clients in prop::collection::vec(actions(), 1..5),
        changes in changes(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(case(first[0].clone(), clients, changes));
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_takes_too_long_is_undone_and_still_counts_for_the_next() {
    let home = Arc::<Home>::default();
    let slow = Change { after_ms: 0, delays_ms: vec![100], away: false, fails: u64::MAX };
    let switch = Switch::new(route(&home, &slow));
    let writing = tokio::spawn({
        let switch = switch.clone();
        async move { switch.run(|device| device.write(0, vec![7; 8].into(), false)).await }
    });
    tokio::task::yield_now().await;
    let held = switch.hold().expect("nobody else holds it");
    assert!(switch.hold().is_none(), "it is held already");
    assert!(!held.drained_until(Instant::now() + DRAIN_MAX).await);
    drop(held);
    let held = switch.hold().expect("it was undone");
    let deadline = Instant::now() + 2 * DRAIN_MAX;
    assert!(!held.drained_until(deadline).await, "the write is still in flight");
    let reading = switch.run(|device| device.read(0, 8));
    drop(held);
    assert_eq!(&reading.await.expect("a read")[..], [7; 8]);
    writing.await.expect("the task").expect("the write");
}

#[tokio::test(start_paused = true)]
async fn a_session_with_its_last_device_gets_no_other_one() {
    let home = Arc::<Home>::default();
    let slow = Change { after_ms: 0, delays_ms: vec![100], away: false, fails: u64::MAX };
    let last = Change { fails: 1, ..slow.clone() };
    for undone in [false, true] {
        let switch = Switch::new(route(&home, &slow));
        let writing = tokio::spawn({
            let switch = switch.clone();
            async move { switch.run(|device| device.write(0, vec![7; 8].into(), false)).await }
        });
        tokio::task::yield_now().await;
        let held = switch.hold().expect("nobody else holds it");
        switch.end(route(&home, &last));
        if undone {
            drop(held)
        } else {
            held.change(route(&home, &slow))
        }
        switch.run(|device| device.read(0, 8)).await.expect_err("the last one fails");
        assert!(switch.hold().is_none(), "there is no later change");
        writing.await.expect("the task").expect("the write, which was under way");
    }
}
