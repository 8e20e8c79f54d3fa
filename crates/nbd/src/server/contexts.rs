//! The metadata contexts that `BLOCK_STATUS` reports, and their negotiation.
//!
//! | context | flags of a run |
//! |---|---|
//! | `base:allocation` | as the protocol says: 1 no data here, 2 reads as zeros |
//! | `perigee:origin` | 1 the volume's own head, 2 an image from which it was cloned, 4 another host; 0 no layer, so it reads as zeros |

use perigee_block::device::{Device, IoError, Origin, OriginRun};

use super::super::wire::{CONTEXT_COMPRESSION, ContextRuns, Dialect, Run};

const ALLOCATION_ID: u32 = 1;
const ORIGIN_ID: u32 = 2;
const ALLOCATION: &str = "base:allocation";
const ORIGIN: &str = "perigee:origin";
/// Never in a reply to `BLOCK_STATUS`. See [`CONTEXT_COMPRESSION`].
const COMPRESSION_ID: u32 = 3;

/// The most runs of one context in one reply.
const RUNS_MAX: usize = 1 << 16;
/// A device is asked for the extents of this much at a time.
const STEP_BYTES: u64 = 1 << 30;
/// Longest range of one reply; a client asks again for the rest. Lengths have to fit 32 bits
/// without extended headers.
const RANGE_BYTES_MAX: u64 = 1 << 30;
const EXTENDED_RANGE_BYTES_MAX: u64 = 1 << 40;

/// The contexts that a client chose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contexts {
    allocation: bool,
    origin: bool,
    /// Reads may be answered compressed.
    pub compression: bool,
}

impl Contexts {
    /// The contexts that the queries name. A query for everything, or for a namespace, lists the contexts.
    /// Only our own namespace can also be chosen as a whole.
    pub fn matching(queries: &[String], listing: bool) -> Self {
        let asked = |query: &str| queries.iter().any(|q| q == query);
        let everything = listing && queries.is_empty();
        Self {
            allocation: everything || asked(ALLOCATION) || listing && asked("base:"),
            origin: everything || asked(ORIGIN) || asked("perigee:"),
            compression: !listing && asked(CONTEXT_COMPRESSION),
        }
    }

    /// What the server answers to the negotiation.
    pub fn chosen(self) -> impl Iterator<Item = (u32, &'static str)> {
        let compression = self.compression.then_some((COMPRESSION_ID, CONTEXT_COMPRESSION));
        self.iter().chain(compression)
    }

    /// The contexts that have runs.
    pub fn iter(self) -> impl Iterator<Item = (u32, &'static str)> {
        let allocation = self.allocation.then_some((ALLOCATION_ID, ALLOCATION));
        allocation.into_iter().chain(self.origin.then_some((ORIGIN_ID, ORIGIN)))
    }

    /// Whether the client has chosen none that `BLOCK_STATUS` could report.
    pub fn is_empty(self) -> bool {
        !self.allocation && !self.origin
    }

    /// Both contexts that have runs.
    #[cfg(test)]
    pub fn all() -> Self {
        Self { allocation: true, origin: true, compression: false }
    }
}

/// The part of a requested range that one reply covers.
pub fn cut(length_bytes: u64, dialect: Dialect) -> u64 {
    length_bytes.min(match dialect {
        Dialect::Simple | Dialect::Structured => RANGE_BYTES_MAX,
        Dialect::Extended => EXTENDED_RANGE_BYTES_MAX,
    })
}

/// The runs of each chosen context from `offset` on. With `only_one` only the first run is returned.
pub async fn describe(
    device: &dyn Device,
    contexts: Contexts,
    offset: u64,
    length_bytes: u64,
    only_one: bool,
) -> Result<Vec<ContextRuns>, IoError> {
    let max = if only_one { 1 } else { RUNS_MAX };
    let mut told = Vec::new();
    for (context, _) in contexts.iter() {
        let mut gathered = Gathered { runs: Vec::new(), max, full: false };
        let mut at = offset;
        let end = offset + length_bytes;
        while at < end && !gathered.full {
            let step = (end - at).min(STEP_BYTES);
            let runs = if context == ALLOCATION_ID {
                device.extents(at, step).await?.into_iter().map(Run::from).collect()
            } else {
                device.origins(at, step).await?.into_iter().map(origin_run).collect()
            };
            at += gathered.add(runs);
        }
        told.push(ContextRuns { context, runs: gathered.runs });
    }
    Ok(told)
}

fn origin_run(run: OriginRun) -> Run {
    let flags = match run.origin {
        Origin::Nobody => 0,
        Origin::Head => 1,
        Origin::Source => 2,
        Origin::Remote => 4,
    };
    Run { length_bytes: run.length_bytes, flags }
}

/// Merges neighbouring runs of one kind, and keeps the first `max` runs.
struct Gathered {
    runs: Vec<Run>,
    max: usize,
    /// There was one run too many, or no run at all.
    full: bool,
}

impl Gathered {
    /// The bytes that were added.
    fn add(&mut self, runs: Vec<Run>) -> u64 {
        let mut added = 0;
        self.full = runs.is_empty();
        for run in runs {
            let at_most = self.runs.len() == self.max;
            match self.runs.last_mut() {
                Some(last) if last.flags == run.flags => last.length_bytes += run.length_bytes,
                _ if at_most => {
                    self.full = true;
                    return added;
                }
                _ => self.runs.push(run),
            }
            added += run.length_bytes;
        }
        added
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(length_bytes: u64, flags: u64) -> Run {
        Run { length_bytes, flags }
    }

    fn queries(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn names(contexts: Contexts) -> Vec<&'static str> {
        contexts.iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn neighbours_of_one_kind_are_one_run_across_steps() {
        let mut gathered = Gathered { runs: Vec::new(), max: 9, full: false };
        assert_eq!(gathered.add(vec![run(4096, 3), run(4096, 3), run(4096, 0)]), 12288);
        assert_eq!(gathered.add(vec![run(4096, 0)]), 4096);
        assert_eq!(gathered.runs, [run(8192, 3), run(8192, 0)]);
        assert!(!gathered.full);
    }

    #[test]
    fn the_first_run_alone_is_as_long_as_it_can_be() {
        let mut gathered = Gathered { runs: Vec::new(), max: 1, full: false };
        gathered.add(vec![run(4096, 3), run(4096, 3), run(4096, 0), run(4096, 3)]);
        assert_eq!((gathered.runs, gathered.full), (vec![run(8192, 3)], true));
    }

    #[test]
    fn contexts_are_chosen_by_name_and_ours_by_namespace_too() {
        assert_eq!(names(Contexts::matching(&queries(&[ALLOCATION]), false)), [ALLOCATION]);
        assert_eq!(names(Contexts::matching(&queries(&["perigee:"]), false)), [ORIGIN]);
        assert!(Contexts::matching(&queries(&["base:", "qemu:x", "perigee:x"]), false).is_empty());
        assert!(Contexts::matching(&[], false).is_empty());
    }

    #[test]
    fn contexts_are_listed_by_namespace_or_all() {
        assert_eq!(names(Contexts::matching(&queries(&["base:"]), true)), [ALLOCATION]);
        assert_eq!(names(Contexts::matching(&[], true)), [ALLOCATION, ORIGIN]);
    }
}
