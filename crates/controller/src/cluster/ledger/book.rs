//! What the lines of the ledger add up to. No I/O.

use std::collections::BTreeMap;

use perigee_model::TenantName;
use perigee_model::budget::Spending;
use perigee_model::money::Money;
use perigee_model::units::format_time;
use serde::{Deserialize, Serialize};

/// Of the entries that are settled, so many are known one by one. Older ones are known by their sums.
const SETTLED_KEPT: usize = 10_000;
/// For so many months the sums of each tenant are known.
const MONTHS_KEPT: usize = 120;
/// The owners that are rented hosts begin with this. Their budget is that of the last days, so their entries are known one by one until
/// somebody forgets them.
const RENTED: &str = "rental/";

/// A line of the ledger. No line is ever changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// From 1 on, without gaps.
    pub number: u64,
    /// Unix time.
    pub at_ms: u64,
    /// What it is for. Each owner has one entry.
    pub owner: String,
    pub what: What,
}

/// What a line says of its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// This much more is reserved. `None`: it is no tenant's. If it was settled, it is not over after all, and what was spent is reserved too.
    Reserved { tenant: Option<TenantName>, micros: Money },
    /// It is over, and this much was spent. If it was settled before, this counts instead.
    Settled { micros: Money },
    /// It has not begun, and nothing is reserved any more. It may be reserved again.
    Released,
    /// It was settled long ago, and is known by its sums only.
    Forgotten,
}

/// What was reserved for an owner, and what was spent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub tenant: Option<TenantName>,
    pub reserved: Money,
    /// `None` until it is settled.
    pub spent: Option<Money>,
    /// Unix time of its last line.
    pub at_ms: u64,
}

/// The sum of all lines up to one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    /// The number of the last line that it has in it; 0 before the first one.
    pub last: u64,
    open: BTreeMap<String, Entry>,
    settled: BTreeMap<String, Entry>,
    /// What was spent in each month (`2026-11`), by tenant. What is no tenant's is under an empty name.
    spent: BTreeMap<String, BTreeMap<String, Money>>,
    /// The sum over `open`, by tenant.
    reserved: BTreeMap<String, Money>,
}

fn key(tenant: Option<&TenantName>) -> String {
    tenant.map(ToString::to_string).unwrap_or_default()
}

/// The month of a Unix time, UTC, as `2026-11`.
pub fn month_of(at_ms: u64) -> String {
    format_time(at_ms).chars().take("2026-11".len()).collect()
}

impl Book {
    /// Adds the next line. One that it has already changes nothing.
    pub fn add(&mut self, line: &Line) {
        if line.number <= self.last {
            return;
        }
        self.last = line.number;
        match &line.what {
            What::Reserved { tenant, micros } => {
                let before = self.take_settled(&line.owner).and_then(|entry| entry.spent);
                let micros = micros.plus(before.unwrap_or_default());
                let sum = self.reserved.entry(key(tenant.as_ref())).or_default();
                *sum = sum.plus(micros);
                let new =
                    Entry { tenant: tenant.clone(), reserved: Money::ZERO, spent: None, at_ms: 0 };
                let entry = self.open.entry(line.owner.clone()).or_insert(new);
                (entry.reserved, entry.at_ms) = (entry.reserved.plus(micros), line.at_ms);
            }
            What::Settled { micros } => {
                let entry = self.close(&line.owner).or_else(|| self.take_settled(&line.owner));
                let Some(entry) = entry else { return };
                let months = self.spent.entry(month_of(line.at_ms)).or_default();
                let sum = months.entry(key(entry.tenant.as_ref())).or_default();
                *sum = sum.plus(*micros);
                let entry = Entry { spent: Some(*micros), at_ms: line.at_ms, ..entry };
                self.settled.insert(line.owner.clone(), entry);
            }
            What::Released => drop(self.close(&line.owner)),
            What::Forgotten => drop(self.settled.remove(&line.owner)),
        }
    }

    /// Takes back that an owner was settled.
    fn take_settled(&mut self, owner: &str) -> Option<Entry> {
        let entry = self.settled.remove(owner)?;
        let month = self.spent.get_mut(&month_of(entry.at_ms));
        if let Some(sum) = month.and_then(|month| month.get_mut(&key(entry.tenant.as_ref()))) {
            *sum = sum.less(entry.spent.unwrap_or_default());
        }
        Some(entry)
    }

    fn close(&mut self, owner: &str) -> Option<Entry> {
        let entry = self.open.remove(owner)?;
        if let Some(sum) = self.reserved.get_mut(&key(entry.tenant.as_ref())) {
            *sum = sum.less(entry.reserved);
        }
        Some(entry)
    }

    /// Forgets what is older than the limits say, but for its sums.
    pub fn shorten(&mut self) {
        let others = self.settled.iter().filter(|(owner, _)| !owner.starts_with(RENTED));
        let mut oldest: Vec<(u64, String)> =
            others.map(|(owner, entry)| (entry.at_ms, owner.clone())).collect();
        let excess = oldest.len().saturating_sub(SETTLED_KEPT);
        if excess > 0 {
            oldest.sort();
            for (_, owner) in oldest.into_iter().take(excess) {
                self.settled.remove(&owner);
            }
        }
        while self.spent.len() > MONTHS_KEPT {
            self.spent.pop_first();
        }
    }

    /// The entry of an owner, as far as it is known one by one.
    pub fn entry(&self, owner: &str) -> Option<&Entry> {
        self.open.get(owner).or_else(|| self.settled.get(owner))
    }

    /// What is reserved for rented hosts, and what those have cost of whose end `counts` says so (Unix time); without the one of `but`.
    pub fn rented(&self, but: &str, counts: impl Fn(u64) -> bool) -> Spending {
        let of = |entries: &BTreeMap<String, Entry>, amount: &dyn Fn(&Entry) -> Money| {
            let all = entries.range(RENTED.to_owned()..);
            let rented = all.take_while(|(owner, _)| owner.starts_with(RENTED));
            rented.filter(|(owner, _)| *owner != but).map(|(_, entry)| amount(entry)).sum()
        };
        let spent = |entry: &Entry| entry.spent.filter(|_| counts(entry.at_ms)).unwrap_or_default();
        Spending {
            spent: of(&self.settled, &spent),
            reserved: of(&self.open, &|entry| entry.reserved),
        }
    }

    /// How many entries are not settled.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// What a tenant has spent in the month of this Unix time, and what is reserved for it.
    pub fn spending(&self, tenant: Option<&TenantName>, now_ms: u64) -> Spending {
        let key = key(tenant);
        let spent = self.spent.get(&month_of(now_ms)).and_then(|month| month.get(&key));
        let reserved = self.reserved.get(&key);
        Spending {
            spent: spent.copied().unwrap_or_default(),
            reserved: reserved.copied().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u64, owner: &str, what: What) -> Line {
        Line { number, at_ms: 0, owner: owner.to_owned(), what }
    }

    fn reserved(micros: u64) -> What {
        What::Reserved { tenant: None, micros: Money::from_micros(micros) }
    }

    #[test]
    fn old_entries_are_summed_up_and_the_sums_stay() {
        let mut book = Book::default();
        let many = SETTLED_KEPT as u64 + 5;
        for n in 0..many {
            let owner = format!("job/{n}");
            let at_ms = n;
            book.add(&Line { at_ms, ..line(2 * n + 1, &owner, reserved(3)) });
            let spent = What::Settled { micros: Money::from_micros(2) };
            book.add(&Line { at_ms, ..line(2 * n + 2, &owner, spent) });
        }
        let before = book.spending(None, 0);
        book.shorten();
        assert_eq!(book.spending(None, 0), before);
        assert_eq!(before, Spending { spent: Money::from_micros(2 * many), reserved: Money::ZERO });
        assert_eq!((book.entry("job/4"), book.settled.len()), (None, SETTLED_KEPT));
        assert!(book.entry("job/5").is_some());
    }

    #[test]
    fn a_line_counts_once_and_what_is_released_may_be_reserved_again() {
        let mut book = Book::default();
        let first = line(1, "a", reserved(5));
        book.add(&first);
        book.add(&first);
        book.add(&line(2, "a", What::Released));
        assert_eq!((book.spending(None, 0), book.entry("a")), (Spending::default(), None));
        book.add(&line(3, "a", reserved(7)));
        book.add(&line(4, "a", reserved(1)));
        assert_eq!(book.entry("a").map(|entry| entry.reserved), Some(Money::from_micros(8)));
    }

    #[test]
    fn rented_hosts_are_known_one_by_one_until_they_are_forgotten() {
        let mut book = Book::default();
        let settled = |micros| What::Settled { micros: Money::from_micros(micros) };
        let lines = [
            ("rental/a", reserved(9)),
            ("rental/a", settled(5)),
            ("rental/b", reserved(7)),
            ("rentals", reserved(100)),
        ];
        for (owner, what) in lines {
            book.add(&line(book.last + 1, owner, what));
        }
        let sums = |book: &Book, but: &str, counts: bool| {
            let sums = book.rented(but, |_| counts);
            (sums.spent.micros, sums.reserved.micros)
        };
        assert_eq!(sums(&book, "", true), (5, 7));
        assert_eq!(sums(&book, "", false), (0, 7), "its end was long ago");
        assert_eq!(sums(&book, "rental/b", true), (5, 0));
        book.shorten();
        // Its provider still has it: what was spent is reserved, and counts once.
        book.add(&line(book.last + 1, "rental/a", reserved(2)));
        assert_eq!(sums(&book, "", true), (0, 14));
        assert_eq!(book.spending(None, 0).spent, Money::ZERO);
        book.add(&line(book.last + 1, "rental/a", settled(6)));
        book.add(&line(book.last + 1, "rental/a", settled(8)));
        assert_eq!(sums(&book, "", true), (8, 7));
        assert_eq!(book.spending(None, 0).spent, Money::from_micros(8));
        book.add(&line(book.last + 1, "rental/a", What::Forgotten));
        assert_eq!((book.entry("rental/a"), sums(&book, "", true)), (None, (0, 7)));
    }

    #[test]
    fn a_month_begins_at_midnight_utc() {
        assert_eq!(month_of(1_764_547_199_999), "2025-11");
        assert_eq!(month_of(1_764_547_200_000), "2025-12");
    }
}
