mod rented;

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::ProblemKind;
use proptest::prelude::*;

use super::*;
use crate::store::SqliteStore;

fn micros(n: u64) -> Money {
    Money::from_micros(n)
}

fn acme() -> Option<TenantName> {
    TenantName::new("acme").ok()
}

async fn open(dir: &tempfile::TempDir) -> Ledger {
    let store = SqliteStore::open(&dir.path().join("state.db")).expect("a store");
    Ledger::load(&Records::new(Arc::new(store))).await.expect("a ledger")
}

#[tokio::test]
async fn the_same_again_changes_nothing_and_more_is_added() {
    let dir = tempfile::tempdir().expect("tempdir");
    let ledger = open(&dir).await;
    let budget = Some(micros(100));
    for high in [60, 60, 40] {
        ledger.reserve("a", acme(), micros(high), budget).await.expect("room");
    }
    assert_eq!(ledger.spending(acme().as_ref()).reserved, micros(60));
    let refused = ledger.reserve("b", acme(), micros(41), budget).await.expect_err("no room");
    assert_eq!(refused.kind, ProblemKind::NoSpace);
    assert!(refused.why.contains("of the tenant's $0.0001 for this month"), "{refused}");
    ledger.reserve("a", acme(), micros(100), budget).await.expect("room for the difference");
    for _ in 0..2 {
        ledger.settle("a", micros(30)).await.expect("settled");
        ledger.settle("nobody", micros(9)).await.expect("nothing is reserved");
    }
    let spending = Spending { spent: micros(30), reserved: Money::ZERO };
    assert_eq!(ledger.spending(acme().as_ref()), spending);
    assert_eq!(ledger.spending(None), Spending::default());
    let settled = ledger.reserve("a", acme(), micros(1), budget).await.expect_err("it is over");
    assert_eq!(settled.kind, ProblemKind::Conflict);
    drop(ledger);
    let again = open(&dir).await;
    assert_eq!(again.spending(acme().as_ref()), spending);
    assert_eq!(again.entry("a").and_then(|entry| entry.spent), Some(micros(30)));
}

/// Both have the same sum in memory when they decide.
#[tokio::test]
async fn of_two_controllers_that_reserve_at_once_the_second_one_sees_the_first() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (one, other) = (open(&dir).await, open(&dir).await);
    one.reserve("a", acme(), micros(60), Some(micros(100))).await.expect("room");
    let refused = other.reserve("b", acme(), micros(60), Some(micros(100))).await;
    assert_eq!(refused.expect_err("no room").kind, ProblemKind::NoSpace);
    other.reserve("c", acme(), micros(40), Some(micros(100))).await.expect("room");
    one.settle("a", micros(10)).await.expect("settled");
    let spending = Spending { spent: micros(10), reserved: micros(40) };
    assert_eq!(one.spending(acme().as_ref()), spending);
}

#[tokio::test]
async fn lines_are_summed_up_and_the_sum_is_read_again() {
    let dir = tempfile::tempdir().expect("tempdir");
    let ledger = open(&dir).await;
    for n in 0..5 {
        ledger.reserve(&format!("{n}"), acme(), micros(10), None).await.expect("room");
    }
    ledger.settle("0", micros(7)).await.expect("settled");
    assert_eq!(ledger.sum_up_beyond(6).await.expect("nothing to do"), 0);
    assert_eq!(ledger.sum_up_beyond(5).await.expect("summed up"), 6);
    ledger.settle("1", micros(1)).await.expect("settled");
    drop(ledger);
    let again = open(&dir).await;
    let spending = Spending { spent: micros(8), reserved: micros(30) };
    assert_eq!(again.spending(acme().as_ref()), spending);
    assert_eq!(again.records.keys(LINES).await.expect("keys").len(), 1);
}

#[derive(Debug, Clone)]
enum Step {
    Reserve {
        owner: u8,
        high: u64,
    },
    /// So many percent of what was reserved.
    Settle {
        owner: u8,
        percent: u64,
    },
    Release {
        owner: u8,
    },
    /// The controller is killed before the line is written.
    Killed {
        owner: u8,
        high: u64,
    },
    Restart,
    SumUp,
}

fn step() -> impl Strategy<Value = Step> {
    let (owner, high) = (0..6_u8, 0..60_u64);
    prop_oneof![
        4 => (owner.clone(), high.clone()).prop_map(|(owner, high)| Step::Reserve { owner, high }),
        3 => (owner.clone(), 0..=100_u64).prop_map(|(owner, percent)| Step::Settle { owner, percent }),
        1 => owner.clone().prop_map(|owner| Step::Release { owner }),
        1 => (owner, high).prop_map(|(owner, high)| Step::Killed { owner, high }),
        1 => Just(Step::Restart),
        1 => Just(Step::SumUp),
    ]
}

const BUDGET: u64 = 100;

/// A reference: what each owner has reserved or spent.
#[derive(Default)]
struct Reference(BTreeMap<String, (u64, Option<u64>)>);

impl Reference {
    fn taken(&self) -> u64 {
        self.0.values().map(|(reserved, spent)| spent.unwrap_or(*reserved)).sum()
    }

    /// Whether it is possible, and what becomes of it.
    fn reserve(&mut self, owner: &str, high: u64) -> bool {
        let taken = self.taken();
        match self.0.get_mut(owner) {
            Some((_, Some(_))) => false,
            Some((reserved, None)) => {
                let fits = taken + high.saturating_sub(*reserved) <= BUDGET;
                if fits {
                    *reserved = (*reserved).max(high);
                }
                fits
            }
            None => {
                let fits = taken + high <= BUDGET;
                if fits {
                    self.0.insert(owner.to_owned(), (high, None));
                }
                fits
            }
        }
    }
}

async fn walk(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut ledger = open(&dir).await;
    let mut reference = Reference::default();
    for step in steps {
        match &step {
            Step::Reserve { owner, high } => {
                let owner = owner.to_string();
                let reserved =
                    ledger.reserve(&owner, acme(), micros(*high), Some(micros(BUDGET))).await;
                prop_assert_eq!(reserved.is_ok(), reference.reserve(&owner, *high), "{:?}", step);
            }
            Step::Settle { owner, percent } => {
                let owner = owner.to_string();
                let open = reference.0.get_mut(&owner).filter(|(_, spent)| spent.is_none());
                let spent = open.as_ref().map_or(1, |(reserved, _)| reserved * percent / 100);
                if let Some((_, of)) = open {
                    *of = Some(spent);
                }
                ledger.settle(&owner, micros(spent)).await.expect("settled");
            }
            Step::Release { owner } => {
                let owner = owner.to_string();
                ledger.release(&owner).await.expect("released");
                if reference.0.get(&owner).is_some_and(|(_, spent)| spent.is_none()) {
                    reference.0.remove(&owner);
                }
            }
            Step::Killed { owner, high } => {
                let owner = owner.to_string();
                ledger.records.counts.cut_at(LINES, 1);
                {
                    let budget = Some(micros(BUDGET));
                    let mut asked = Box::pin(ledger.reserve(&owner, acme(), micros(*high), budget));
                    drop(futures_util::poll!(&mut asked));
                }
                ledger = open(&dir).await;
            }
            Step::Restart => ledger = open(&dir).await,
            Step::SumUp => drop(ledger.sum_up_beyond(0).await.expect("summed up")),
        }
        let spending = ledger.spending(acme().as_ref());
        prop_assert!(spending.taken() <= micros(BUDGET), "{:?} after {:?}", spending, step);
        prop_assert_eq!(spending.taken().micros, reference.taken(), "after {:?}", step);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_spent_and_reserved_is_never_over_the_budget(steps in prop::collection::vec(step(), 1..24)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(walk(steps))?;
    }
}

#[tokio::test]
async fn no_line_is_read_to_reserve_to_settle_or_to_sum() {
    use std::sync::atomic::Ordering;

    let dir = tempfile::tempdir().expect("tempdir");
    let ledger = open(&dir).await;
    let counts = &ledger.records.counts;
    let read = || (counts.lists.load(Ordering::Relaxed), counts.gets.load(Ordering::Relaxed));
    let before = read();
    for n in 0..50 {
        let owner = format!("job/{n}");
        ledger.reserve(&owner, acme(), micros(2), Some(micros(200))).await.expect("room");
        ledger.settle(&owner, micros(1)).await.expect("settled");
    }
    assert_eq!(ledger.spending(acme().as_ref()).spent, micros(50));
    assert_eq!(read(), before);
}
