//! What a page cache of a given size would have spared a volume server, by a trace of requests.
//!
//! Zhu's SonD found a server whose memory was smaller than what its clients boot from: each client read again what another one had read just
//! before. [`simulate`] answers for which sizes that happens: least recently used pages of 4 KiB leave first, nothing is read ahead, and a
//! page of the clients' common image is there once for all of them. Linux keeps pages by more than their last use and reads ahead, so what a
//! server really reads again differs most near the size from which on nothing is read again.

use std::collections::{BTreeMap, HashMap, HashSet};

use perigee_model::trace::{Operation, TraceRecord, TraceRequest};
use serde::Serialize;

/// The unit in which Linux keeps files in memory, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// What a server with so much memory would have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CacheOutcome {
    /// For cached pages, in bytes.
    pub memory_bytes: u64,
    /// What the clients read of layers, in whole pages.
    pub read_bytes: u64,
    /// What came from the disk for the first time.
    pub first_bytes: u64,
    /// What came from the disk again, because it had left memory.
    pub again_bytes: u64,
}

impl CacheOutcome {
    /// The part of what was read that was in memory, from 0 to 1; `None` if nothing was read.
    pub fn hit_ratio(&self) -> Option<f64> {
        let missed = self.first_bytes + self.again_bytes;
        #[expect(clippy::cast_precision_loss, reason = "bytes of a trace are far below 2^52")]
        (self.read_bytes > 0).then(|| 1.0 - missed as f64 / self.read_bytes as f64)
    }
}

/// A page of the common image, or of a client that has written it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Page {
    /// The number of the client whose own it is, and which of its copies that client is.
    own: Option<(u16, u32)>,
    number: u64,
}

/// Plays the requests of a trace against a cache. Each client of the trace is there `copies` times, and all of them ask at the same moments: a
/// storm of clients by a trace of one.
pub fn simulate(records: &[TraceRecord], copies: u32, memory_bytes: u64) -> CacheOutcome {
    let mut requests: Vec<&TraceRequest> = records
        .iter()
        .filter_map(|record| match record {
            TraceRecord::Request(request) => Some(request),
            TraceRecord::Client(_) => None,
        })
        .collect();
    requests.sort_by_key(|request| request.at_ns);
    let mut server = Server {
        cache: Lru::new(usize::try_from(memory_bytes / PAGE_BYTES).unwrap_or(usize::MAX)),
        seen: HashSet::new(),
        written: HashSet::new(),
        outcome: CacheOutcome { memory_bytes, read_bytes: 0, first_bytes: 0, again_bytes: 0 },
    };
    for request in requests {
        for copy in 0..copies {
            server.serve(request, copy);
        }
    }
    server.outcome
}

struct Server {
    cache: Lru,
    /// What was in memory before.
    seen: HashSet<Page>,
    /// Pages that a client has of its own.
    written: HashSet<Page>,
    outcome: CacheOutcome,
}

impl Server {
    fn serve(&mut self, request: &TraceRequest, copy: u32) {
        let first = request.offset / PAGE_BYTES;
        let end = request.offset.saturating_add(u64::from(request.length_bytes));
        for number in first..end.div_ceil(PAGE_BYTES) {
            let own = Page { own: Some((request.client, copy)), number };
            match request.operation {
                Operation::Read if request.served.source || request.served.private => {
                    let shared = Page { own: None, number };
                    self.read(if self.written.contains(&own) { own } else { shared });
                }
                Operation::Write => {
                    self.written.insert(own);
                    self.seen.insert(own);
                    self.cache.touch(own);
                }
                Operation::Zero => {
                    self.written.insert(own);
                    self.cache.remove(own);
                }
                // Zeros, and what another host has, are read of no layer here.
                Operation::Read | Operation::Flush | Operation::Other => {}
            }
        }
    }

    fn read(&mut self, page: Page) {
        self.outcome.read_bytes += PAGE_BYTES;
        if self.cache.touch(page) {
            return;
        }
        match self.seen.insert(page) {
            true => self.outcome.first_bytes += PAGE_BYTES,
            false => self.outcome.again_bytes += PAGE_BYTES,
        }
    }
}

/// The pages in memory, by when they were used last.
struct Lru {
    pages_max: usize,
    clock: u64,
    used: HashMap<Page, u64>,
    by_use: BTreeMap<u64, Page>,
}

impl Lru {
    fn new(pages_max: usize) -> Self {
        Self { pages_max, clock: 0, used: HashMap::new(), by_use: BTreeMap::new() }
    }

    /// Uses a page. Whether it was in memory.
    fn touch(&mut self, page: Page) -> bool {
        let was_there = self.remove(page);
        if self.pages_max == 0 {
            return was_there;
        }
        if self.used.len() == self.pages_max
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.used.remove(&oldest);
        }
        self.clock += 1;
        self.used.insert(page, self.clock);
        self.by_use.insert(self.clock, page);
        was_there
    }

    /// Whether it was in memory.
    fn remove(&mut self, page: Page) -> bool {
        let used = self.used.remove(&page);
        if let Some(used) = used {
            self.by_use.remove(&used);
        }
        used.is_some()
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::trace::Served;
    use proptest::prelude::*;

    use super::*;

    const SOURCE: Served =
        Served { at_once: false, source: true, private: false, remote: false, held: false };

    fn request(at_ns: u64, operation: Operation, page: u64, pages: u32) -> TraceRecord {
        TraceRecord::Request(TraceRequest {
            at_ns,
            offset: page * PAGE_BYTES,
            length_bytes: pages * 4096,
            duration_us: 1,
            client: 0,
            operation,
            served: SOURCE,
        })
    }

    /// The pages that were read, that came for the first time, and that came again.
    fn pages(records: &[TraceRecord], copies: u32, memory_pages: u64) -> (u64, u64, u64) {
        let outcome = simulate(records, copies, memory_pages * PAGE_BYTES);
        let [read, first, again] =
            [outcome.read_bytes, outcome.first_bytes, outcome.again_bytes].map(|b| b / PAGE_BYTES);
        (read, first, again)
    }

    #[test]
    fn a_set_that_fits_is_read_once_however_many_clients_there_are() {
        let boot = [request(1, Operation::Read, 0, 8), request(2, Operation::Read, 8, 8)];
        assert_eq!(pages(&boot, 64, 16), (64 * 16, 16, 0));
        assert_eq!(pages(&boot, 0, 16), (0, 0, 0));
    }

    #[test]
    fn a_set_that_is_one_page_too_large_is_read_again_each_time() {
        let turn = [request(1, Operation::Read, 0, 4), request(2, Operation::Read, 4, 1)];
        let twice: Vec<TraceRecord> = turn
            .iter()
            .chain(&turn)
            .cloned()
            .enumerate()
            .map(|(at, record)| match record {
                TraceRecord::Request(request) => {
                    TraceRecord::Request(TraceRequest { at_ns: at as u64, ..request })
                }
                client @ TraceRecord::Client(_) => client,
            })
            .collect();
        assert_eq!(pages(&twice, 1, 5), (10, 5, 0));
        assert_eq!(pages(&twice, 1, 4), (10, 5, 5));
        assert_eq!(pages(&twice, 1, 0), (10, 5, 5));
    }

    #[test]
    fn what_a_client_has_written_is_its_own() {
        let records = [
            request(1, Operation::Read, 0, 1),
            request(2, Operation::Write, 0, 1),
            request(3, Operation::Read, 0, 1),
            request(4, Operation::Flush, 0, 0),
        ];
        assert_eq!(pages(&records, 2, 3), (4, 1, 0));
        // The two written pages leave no room for each other.
        assert_eq!(pages(&records, 2, 1), (4, 1, 2));
    }

    #[test]
    fn a_read_of_no_layer_needs_no_memory() {
        let mut zeros = request(1, Operation::Read, 0, 4);
        if let TraceRecord::Request(request) = &mut zeros {
            request.served = Served::default();
        }
        assert_eq!(pages(&[zeros], 1, 4), (0, 0, 0));
        let empty = simulate(&[], 1, PAGE_BYTES);
        assert_eq!(empty.hit_ratio(), None);
    }

    #[test]
    fn part_of_a_page_is_the_page() {
        let TraceRecord::Request(whole) = request(1, Operation::Read, 0, 1) else { return };
        let part = TraceRequest { offset: 4000, length_bytes: 200, ..whole };
        assert_eq!(pages(&[TraceRecord::Request(part)], 1, 9), (2, 2, 0));
    }

    proptest! {
        /// Least recently used is a stack algorithm (Mattson et al., IBM Systems Journal 9:2, 1970): more memory never misses more.
        #[test]
        fn more_memory_is_never_worse(
            asked in proptest::collection::vec((0_u64..20, 1_u32..4, 0_u8..3), 0..60),
            copies in 1_u32..4,
        ) {
            let records: Vec<TraceRecord> = (0..).zip(asked).map(|(at, (page, pages, kind))| {
                let operations = [Operation::Read, Operation::Write, Operation::Read];
                request(at, operations[usize::from(kind)], page, pages)
            }).collect();
            let outcomes: Vec<_> = (0..24).map(|memory| pages(&records, copies, memory)).collect();
            prop_assert!(outcomes.is_sorted_by(|less, more| less.2 >= more.2), "{outcomes:?}");
            prop_assert!(outcomes.iter().all(|one| (one.0, one.1) == (outcomes[0].0, outcomes[0].1)));
        }
    }
}
