//! Where a storm's blocks are on the disk, and how far a disk head would have to move between reads.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result};
use perigee_model::trace::{Operation, TraceRecord, TraceRequest, read_trace};
use perigee_model::volume::BLOCK_BYTES;
use serde::{Deserialize, Serialize};

use crate::machine::run;
use crate::outcome::mib;

/// A file's blocks. For the first block of each piece: its position on the disk and the piece's length.
#[derive(Debug, Default)]
pub struct Extents(BTreeMap<u64, (u64, u64)>);

impl Extents {
    /// # Errors
    /// If e2fsprogs' filefrag fails.
    pub fn of(file: &Path) -> Result<Self> {
        // -s: data that are only in memory are first written to the disk.
        Ok(Self::parse(&run("filefrag", &["-s", "-v", "-b4096", &file.to_string_lossy()])?))
    }

    /// Parses lines such as `   0:        0..      15:      34816..     34831:     16:  32768: last,eof`.
    fn parse(said: &str) -> Self {
        let extent = |line: &str| {
            let fields: Vec<&str> = line.split(':').collect();
            let first = |range: &str| range.split("..").next()?.trim().parse().ok();
            let [_, logical, physical, length, ..] = fields[..] else { return None };
            Some((first(logical)?, (first(physical)?, length.trim().parse().ok()?)))
        };
        Self(said.lines().filter_map(extent).collect())
    }

    fn place(&self, block: u64) -> Option<u64> {
        let (first, (place, length)) = self.0.range(..=block).next_back()?;
        (block < first + length).then(|| place + block - first)
    }
}

/// The files of a storm's volumes.
pub struct Layers {
    pub source: Extents,
    /// By the volume's name.
    pub private: HashMap<String, Extents>,
}

/// How the data of a storm are placed on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Number of contiguous runs of private blocks that were written.
    pub private_runs: u64,
    /// The distance from the first of those blocks to the last.
    pub private_span_mib: f64,
    /// Number of reads that waited for the disk.
    pub disk_reads: u64,
    /// The mean distance from the end of one of them to the start of the next.
    pub mean_read_seek_mib: f64,
    /// The same including writes, as if each went to the disk when it was requested.
    pub mean_seek_mib: f64,
}

/// A disk head.
#[derive(Default)]
struct Head {
    at: Option<u64>,
    moves: u64,
    blocks_sum: u64,
}

impl Head {
    /// Moves over the blocks from the first to the last.
    fn pass(&mut self, (first, last): (u64, u64)) {
        if let Some(at) = self.at {
            self.moves += 1;
            self.blocks_sum += at.abs_diff(first);
        }
        self.at = Some(last + 1);
    }

    fn mean_mib(&self) -> f64 {
        mib(self.blocks_sum * BLOCK_BYTES / self.moves.max(1))
    }
}

impl Placement {
    /// # Errors
    /// If the bytes are no trace, or contain a read of a block without a position.
    pub fn of_trace(bytes: &[u8], layers: &Layers) -> Result<Self> {
        let (mut names, mut requests) = (HashMap::new(), Vec::<TraceRequest>::new());
        for record in read_trace(bytes)? {
            match record {
                TraceRecord::Client(client) => {
                    names.insert(client.number, client.name);
                }
                TraceRecord::Request(request) => requests.push(request),
            }
        }
        requests.sort_by_key(|request| request.at_ns);
        let (mut written, mut reads, mut all) = (Vec::new(), Head::default(), Head::default());
        let mut disk_reads = 0;
        for request in requests {
            let name = names.get(&request.client).context("a client's name")?;
            let private = layers.private.get(name).context("a client's extents")?;
            let blocks = request.offset / BLOCK_BYTES
                ..(request.offset + u64::from(request.length_bytes)).div_ceil(BLOCK_BYTES);
            let from = if request.served.source { &layers.source } else { private };
            let places = from.place(blocks.start).zip(from.place(blocks.end.saturating_sub(1)));
            match request.operation {
                Operation::Write => {
                    let places: Vec<u64> = blocks.filter_map(|at| private.place(at)).collect();
                    if let Some(ends) = places.first().copied().zip(places.last().copied()) {
                        all.pass(ends);
                    }
                    written.extend(places);
                }
                Operation::Read if !request.served.at_once => {
                    // A range may have zeros at one of its ends. They have no position, and nothing is read
                    // there.
                    if let Some(ends) = places {
                        disk_reads += 1;
                        reads.pass(ends);
                        all.pass(ends);
                    }
                }
                _ => {}
            }
        }
        written.sort_unstable();
        written.dedup();
        let span = written.last().zip(written.first()).map_or(0, |(last, first)| last - first + 1);
        let breaks = written.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count() as u64;
        Ok(Self {
            private_runs: breaks + u64::from(!written.is_empty()),
            private_span_mib: mib(span * BLOCK_BYTES),
            disk_reads,
            mean_read_seek_mib: reads.mean_mib(),
            mean_seek_mib: all.mean_mib(),
        })
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::trace::{Served, TRACE_MAGIC, TraceClient};

    use super::*;

    const SAID: &str = "Filesystem type is: ef53\n\
        File size of a is 40960 (10 blocks of 4096 bytes)\n \
        ext:     logical_offset:        physical_offset: length:   expected: flags:\n   \
        0:        0..       1:       1000..      1001:      2:            \n   \
        1:        4..       9:        500..       505:      6:       1002: last,eof\n\
        a: 2 extents found\n";

    #[test]
    fn a_block_in_a_hole_has_no_place() {
        let extents = Extents::parse(SAID);
        let places = [0, 1, 2, 4, 9, 10].map(|block| extents.place(block));
        assert_eq!(places, [Some(1000), Some(1001), None, Some(500), Some(505), None]);
    }

    #[test]
    fn a_seek_is_from_the_end_of_one_read_to_the_next() {
        let mut bytes = TRACE_MAGIC.to_vec();
        let name = "client-0001".to_owned();
        TraceRecord::Client(TraceClient { number: 0, at_ns: 0, name: name.clone() })
            .encode(&mut bytes);
        let mut put = |at_ns, operation, block, source, at_once| {
            let request = TraceRequest {
                at_ns,
                offset: block * BLOCK_BYTES,
                length_bytes: 8192,
                duration_us: 1,
                client: 0,
                operation,
                served: Served { source, at_once, private: !source, ..Served::default() },
            };
            TraceRecord::Request(request).encode(&mut bytes);
        };
        put(1, Operation::Read, 0, true, false); // ends at 1002
        put(2, Operation::Read, 8, true, true); // from memory: the head stays
        put(3, Operation::Write, 4, false, false);
        put(4, Operation::Read, 4, true, false); // begins at 500
        put(5, Operation::Read, 4, false, false); // private, at 500 again
        let private = HashMap::from([(name, Extents::parse(SAID))]);
        let layers = Layers { source: Extents::parse(SAID), private };
        let placement = Placement::of_trace(&bytes, &layers).unwrap();
        assert_eq!((placement.private_runs, placement.disk_reads), (1, 3));
        assert!((placement.private_span_mib - mib(8192)).abs() < 1e-9);
        // 502 and 2 blocks. The write at 500 comes between them, and after it the head is where the third read
        // starts.
        assert!((placement.mean_read_seek_mib - mib(252 * BLOCK_BYTES)).abs() < 1e-9);
        assert!((placement.mean_seek_mib - mib(506 * BLOCK_BYTES / 3)).abs() < 1e-9);
    }
}
