//! Rented hosts in any order of requests, ends and kills, against a reference that adds up each of them.

use super::*;

#[derive(Debug, Clone)]
enum Does {
    Reserve(u64),
    /// It may have cost more than was reserved.
    Settle(u64),
    Release,
    Forget,
}

#[derive(Debug, Clone)]
enum Step {
    /// What one of them does, and when the controller is killed, which does the same again then.
    Of(u8, Does, Killed),
    Passes(u64),
    SumUp,
}

#[derive(Debug, Clone, Copy)]
enum Killed {
    Never,
    BeforeTheLine,
    AfterTheLine,
}

fn step() -> impl Strategy<Value = Step> {
    let does = prop_oneof![
        4 => (0..70_u64).prop_map(Does::Reserve),
        3 => (1..70_u64).prop_map(Does::Settle),
        1 => Just(Does::Release),
        1 => Just(Does::Forget),
    ];
    let killed = prop_oneof![
        3 => Just(Killed::Never),
        1 => Just(Killed::BeforeTheLine),
        1 => Just(Killed::AfterTheLine),
    ];
    prop_oneof![
        8 => (0..4_u8, does, killed).prop_map(|(owner, does, killed)| Step::Of(owner, does, killed)),
        2 => (0..20_u64).prop_map(Step::Passes),
        1 => Just(Step::SumUp),
    ]
}

const PERIOD_DAYS: u64 = 30;

/// What each has reserved, or has spent and on which day its end was.
#[derive(Default)]
struct Reference {
    all: BTreeMap<u8, (u64, Option<u64>)>,
    today: u64,
}

impl Reference {
    fn taken(&self, but: Option<u8>) -> u64 {
        let others = self.all.iter().filter(|(owner, _)| Some(**owner) != but);
        let counts = |ended: &Option<u64>| ended.is_none_or(|day| self.today - day <= PERIOD_DAYS);
        others.filter(|(_, (_, ended))| counts(ended)).map(|(_, (amount, _))| amount).sum()
    }

    /// Whether it is possible, and what becomes of it.
    fn takes(&mut self, owner: u8, does: &Does) -> bool {
        let (had, others) = (self.all.get(&owner).copied(), self.taken(Some(owner)));
        match (does, had) {
            (Does::Reserve(high), Some((amount, _))) if amount >= *high => {}
            (Does::Reserve(high), _) if others + high <= BUDGET => {
                self.all.insert(owner, (*high, None));
            }
            (Does::Reserve(_), _) => return false,
            (Does::Settle(spent), Some((amount, ended))) if ended.is_none() || *spent > amount => {
                self.all.insert(owner, (*spent, Some(self.today)));
            }
            (Does::Release, Some((_, None))) | (Does::Forget, Some((_, Some(_)))) => {
                self.all.remove(&owner);
            }
            (Does::Settle(_) | Does::Release | Does::Forget, _) => {}
        }
        true
    }
}

/// When each day has begun, in milliseconds by the clock that the lines have.
struct Days(Vec<(u64, u64)>);

impl Days {
    fn counts(&self, at_ms: u64) -> bool {
        let day_of = |ms: u64| self.0.iter().rev().find(|(begun_ms, _)| *begun_ms <= ms);
        let day = day_of(at_ms).map_or(0, |(_, day)| *day);
        self.0.last().is_none_or(|(_, today)| today - day <= PERIOD_DAYS)
    }
}

async fn takes(ledger: &Ledger, owner: u8, does: &Does, days: &Days) -> Result<(), Problem> {
    let owner = format!("rental/{owner}");
    match does {
        Does::Reserve(high) => {
            let allows = |others: Spending| match others.taken().plus(micros(*high)) {
                sum if sum <= micros(BUDGET) => Ok(()),
                sum => Err(Problem::conflict("no room", sum)),
            };
            let counts = |at_ms| days.counts(at_ms);
            ledger.reserve_rented(&owner, micros(*high), counts, allows).await
        }
        Does::Settle(spent) => ledger.settle_rented(&owner, micros(*spent)).await,
        Does::Release => ledger.release(&owner).await,
        Does::Forget => ledger.forget(&owner).await,
    }
}

async fn walk(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut ledger = open(&dir).await;
    let (mut reference, mut days) = (Reference::default(), Days(vec![(0, 0)]));
    for step in steps {
        match &step {
            Step::Of(owner, does, killed) => {
                match killed {
                    Killed::Never => {}
                    Killed::BeforeTheLine => {
                        ledger.records.counts.cut_at(LINES, 1);
                        {
                            let mut asked = Box::pin(takes(&ledger, *owner, does, &days));
                            drop(futures_util::poll!(&mut asked));
                        }
                        ledger = open(&dir).await;
                    }
                    Killed::AfterTheLine => {
                        takes(&ledger, *owner, does, &days).await.ok();
                        ledger = open(&dir).await;
                    }
                }
                let taken = takes(&ledger, *owner, does, &days).await;
                prop_assert_eq!(taken.is_ok(), reference.takes(*owner, does), "{:?}", step);
            }
            Step::Passes(more) => {
                // The lines that come are of a later moment than those of the days before.
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                reference.today += more;
                days.0.push((now_ms(), reference.today));
            }
            Step::SumUp => drop(ledger.sum_up_beyond(0).await.expect("summed up")),
        }
        let counted = ledger.rented("", |at_ms| days.counts(at_ms));
        prop_assert_eq!(counted.taken().micros, reference.taken(None), "after {:?}", step);
        let owner = |owner: u8| format!("rental/{owner}");
        let is_open = |of: u8| ledger.entry(&owner(of)).map(|entry| entry.spent.is_none());
        for of in 0..4 {
            let expected = reference.all.get(&of).map(|(_, ended)| ended.is_none());
            prop_assert_eq!(is_open(of), expected, "{} after {:?}", of, step);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_rented_hosts_cost_in_30_days_is_never_over_their_budget_when_it_is_reserved(
        steps in prop::collection::vec(step(), 1..30),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(walk(steps))?;
    }
}
