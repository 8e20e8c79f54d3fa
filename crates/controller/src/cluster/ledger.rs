//! The ledger: what was reserved and what was spent, in lines that are only ever added.
//!
//! The lines are the truth, and their sum is in memory, so that a price or a pass of the scheduler reads no line. A line is stored under the
//! number after the last one that its writer knows, and only if nothing is there: of two that decide at the same time, the second one finds
//! the place taken, reads what the first one wrote, and decides again. So what is spent and reserved together is above a budget only if
//! more was spent than was reserved, or if the budget was lowered.
//!
//! From time to time the sum is stored, and the lines that it has in it are removed. Whoever reads lines leaves out those. A writer that has
//! not read anything since then would find the place of a removed line free, and what it writes there would not count. There is none: one
//! controller uses a store at a time, so a second writer is only one that was stopped.

pub mod book;

use std::sync::{Mutex, MutexGuard, PoisonError};

use perigee_model::budget::Spending;
use perigee_model::limits::LEDGER_LINES;
use perigee_model::money::Money;
use perigee_model::{Problem, TenantName};

use crate::clock::now_ms;
use crate::records::Records;
pub use book::Entry;
use book::{Book, Line, What};

/// `ledger/sum`: the [`Book`] at one time.
const SUM: &str = "ledger/sum";
/// `ledger/lines/NNNNNNNNNNNNNNNNNNNN`: the [`Line`]s since.
const LINES: &str = "ledger/lines/";

/// The ledger, with the sum of its lines in memory.
pub struct Ledger {
    records: Records,
    book: Mutex<Book>,
    /// The last line in the stored sum.
    summed: Mutex<u64>,
    /// Whoever adds a line takes turns. It is held over no call to a host.
    turn: tokio::sync::Mutex<()>,
}

fn line_key(number: u64) -> String {
    format!("{LINES}{number:020}")
}

impl Ledger {
    /// Reads the ledger of an earlier run.
    ///
    /// # Errors
    /// If the store does not answer, or a record can't be read.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let ledger = Self {
            records: records.clone(),
            book: Mutex::default(),
            summed: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        };
        ledger.read_again().await?;
        Ok(ledger)
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn summed(&self) -> MutexGuard<'_, u64> {
        self.summed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn read_again(&self) -> Result<(), Problem> {
        let mut book: Book = self.records.read(SUM).await?.unwrap_or_default();
        *self.summed() = book.last;
        for line in self.records.list::<Line>(LINES).await? {
            book.add(&line);
        }
        *self.lock() = book;
        Ok(())
    }

    /// What a tenant has spent in this month, and what is reserved. `None`: what is no tenant's.
    pub fn spending(&self, tenant: Option<&TenantName>) -> Spending {
        self.lock().spending(tenant, now_ms())
    }

    /// What was reserved for an owner and what was spent, unless that is long ago.
    pub fn entry(&self, owner: &str) -> Option<Entry> {
        self.lock().entry(owner).cloned()
    }

    /// Adds the line that `decide` wants, which is asked again if another line came first.
    ///
    /// # Errors
    /// That of `decide`; if the store fails.
    pub async fn add(
        &self,
        owner: &str,
        decide: impl Fn(&Book) -> Result<Option<What>, Problem>,
    ) -> Result<(), Problem> {
        let _turn = self.turn.lock().await;
        loop {
            let line = {
                let book = self.lock();
                let Some(what) = decide(&book)? else { return Ok(()) };
                Line { number: book.last + 1, at_ms: now_ms(), owner: owner.to_owned(), what }
            };
            if self.records.create(&line_key(line.number), &line).await? {
                self.lock().add(&line);
                return Ok(());
            }
            // The place is taken: by another writer, or by one that was stopped before it could say so.
            self.read_again().await?;
        }
    }

    /// Reserves so much more for an owner than it has. `budget` is its tenant's for the month.
    ///
    /// # Errors
    /// `NoSpace` if the budget has no room, or if there are too many entries; `Conflict` if the owner's entry is settled.
    pub async fn reserve(
        &self,
        owner: &str,
        tenant: Option<TenantName>,
        high: Money,
        budget: Option<Money>,
    ) -> Result<(), Problem> {
        let what = || format!("can't reserve {high} for {owner}");
        self.add(owner, |book| {
            // Each run of a job has an owner of its own.
            if book.entry(owner).is_some_and(|entry| entry.spent.is_some()) {
                return Err(Problem::conflict(what(), "its entry in the ledger is settled"));
            }
            let Some(more) = more(book, owner, high)? else { return Ok(None) };
            let spending = book.spending(tenant.as_ref(), now_ms());
            let lacks = budget.filter(|_| more > Money::ZERO);
            match lacks.and_then(|budget| spending.lacks(budget, more)) {
                None => Ok(Some(What::Reserved { tenant: tenant.clone(), micros: more })),
                Some(why) => Err(Problem::no_space(what(), why).next(
                    "wait for the next month, or ask an admin for more (perigee tenant quota --budget-month)",
                )),
            }
        })
        .await
    }

    /// Reserves so much for a rented host, `rental/ID`, in all. `allows` is told what is reserved and was spent for the other ones; `counts` says
    /// of the time of an end (Unix time) whether what was spent until then still counts. If the entry is settled, it is not over after all.
    ///
    /// # Errors
    /// That of `allows`; `NoSpace` if there are too many entries.
    pub async fn reserve_rented(
        &self,
        owner: &str,
        high: Money,
        counts: impl Fn(u64) -> bool,
        allows: impl Fn(Spending) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        self.add(owner, |book| {
            let Some(more) = more(book, owner, high)? else { return Ok(None) };
            allows(book.rented(owner, &counts))?;
            Ok(Some(What::Reserved { tenant: None, micros: more }))
        })
        .await
    }

    /// What is reserved for rented hosts and was spent for them; see [`Book::rented`].
    pub fn rented(&self, but: &str, counts: impl Fn(u64) -> bool) -> Spending {
        self.lock().rented(but, counts)
    }

    /// Notes what a rented host has cost. One that was settled and was there all the same is settled once more, for what it has cost in all.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn settle_rented(&self, owner: &str, spent: Money) -> Result<(), Problem> {
        self.add(owner, |book| {
            let entry = book.entry(owner);
            let entry = entry.filter(|entry| entry.spent.is_none_or(|before| before < spent));
            Ok(entry.map(|_| What::Settled { micros: spent }))
        })
        .await
    }

    /// Of an owner that was settled only its part in the sums is known from now on. Then its name may be given to another one.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn forget(&self, owner: &str) -> Result<(), Problem> {
        self.add(owner, |book| {
            let entry = book.entry(owner).filter(|entry| entry.spent.is_some());
            Ok(entry.map(|_| What::Forgotten))
        })
        .await
    }

    /// Notes what was spent, and reserves nothing any more. Without a reservation nothing happens: it was settled before.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn settle(&self, owner: &str, spent: Money) -> Result<(), Problem> {
        self.add(owner, |book| {
            let entry = book.entry(owner).filter(|entry| entry.spent.is_none());
            Ok(entry.map(|entry| {
                if spent > entry.reserved {
                    let reserved = entry.reserved;
                    tracing::warn!("{owner} has cost {spent}, and {reserved} were reserved");
                }
                What::Settled { micros: spent }
            }))
        })
        .await
    }

    /// Reserves nothing any more for what has not begun.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn release(&self, owner: &str) -> Result<(), Problem> {
        self.add(owner, |book| {
            let entry = book.entry(owner).filter(|entry| entry.spent.is_none());
            Ok(entry.map(|_| What::Released))
        })
        .await
    }

    /// Stores the sum if there are many lines, and removes those that a stored sum has in it. Returns how many were removed.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn sum_up(&self) -> Result<usize, Problem> {
        let many = u64::try_from(LEDGER_LINES.max).unwrap_or(u64::MAX);
        self.sum_up_beyond(many).await
    }

    /// As [`Self::sum_up`], if there are more lines than so many.
    pub(super) async fn sum_up_beyond(&self, many: u64) -> Result<usize, Problem> {
        {
            let _turn = self.turn.lock().await;
            let mut book = self.lock().clone();
            if book.last - *self.summed() > many {
                book.shorten();
                self.records.put(SUM, &book).await?;
                *self.summed() = book.last;
                *self.lock() = book;
            }
        }
        let last = line_key(*self.summed());
        let old = self.records.keys(LINES).await?;
        let old: Vec<String> = old.into_iter().filter(|key| *key <= last).collect();
        for key in &old {
            self.records.remove(key).await?;
        }
        Ok(old.len())
    }
}

/// How much more is to be reserved for an owner that needs so much in all; `None`: nothing.
///
/// # Errors
/// `NoSpace` if there are too many entries.
fn more(book: &Book, owner: &str, high: Money) -> Result<Option<Money>, Problem> {
    let entry = book.entry(owner);
    let had = entry.map(|entry| entry.spent.unwrap_or(entry.reserved));
    let more = had.map_or(high, |had| high.less(had));
    if had.is_some() && more == Money::ZERO {
        return Ok(None);
    }
    let open = book.open() + usize::from(entry.is_none_or(|entry| entry.spent.is_some()));
    perigee_model::limits::LEDGER_OPEN.check(open).map_err(|error| {
        Problem::no_space(format!("can't reserve {high} for {owner}"), error)
            .next("wait until some of them are over")
    })?;
    Ok(Some(more))
}

#[cfg(test)]
mod tests;
