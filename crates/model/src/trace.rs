//! A trace file: the requests of many clients, as a volume server saw them, to be looked at or
//! replayed.
//!
//! All numbers are little endian. The file begins with 8 bytes `PGTRACE1`; records follow.
//!
//! | bytes | a request | a new client |
//! |---|---|---|
//! | 8 | nanoseconds from the start of the trace until the server took it | the same |
//! | 8 | offset | 0 |
//! | 4 | length in bytes | length of its name, which follows the record |
//! | 4 | microseconds until it was answered; 4294967295 is that long or longer | 0 |
//! | 2 | the number of its client | the client's number |
//! | 1 | the operation, from 1 | 0 |
//! | 1 | where it was served: bits of [`Served`] | 0 |
//!
//! A trace whose server died ends with a whole record or within one; what is whole counts.

use std::fmt;

/// The first bytes of a trace file; the digit is the version of its format.
pub const TRACE_MAGIC: &[u8; 8] = b"PGTRACE1";
const RECORD_BYTES: usize = 28;
/// A client's name is that of its volume.
const NAME_BYTES_MAX: usize = 255;

/// How long an answer with [`Served::held`] was held back, in microseconds beside its own time. It is the round-trip time
/// of a WAN, the one at which a replay counts dependent round trips.
pub const HELD_BACK_US: u32 = 16_000;

/// What a client asked for, whichever protocol it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Reads data.
    Read,
    /// Writes data that came with the request.
    Write,
    /// Trims too.
    Zero,
    /// Makes durable what was written before.
    Flush,
    /// What moves no data: status, and bringing data closer.
    Other,
}

impl Operation {
    const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Zero, Self::Flush, Self::Other];

    /// In lower case, as it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Zero => "zero",
            Self::Flush => "flush",
            Self::Other => "other",
        }
    }

    /// From what [`crate::volume::TracedRequest`] calls it.
    pub fn from_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|operation| operation.name() == name).unwrap_or(Self::Other)
    }
}

/// Where a request was served. All false: from memory alone, as zeros or a write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Nothing had to be waited for: what it read was in the page cache.
    pub at_once: bool,
    /// From a sealed layer of the pool.
    pub source: bool,
    /// From the volume's own layer.
    pub private: bool,
    /// From another host.
    pub remote: bool,
    /// Its answer was held back by [`HELD_BACK_US`], to see what the client does meanwhile.
    pub held: bool,
}

impl Served {
    fn bits(self) -> u8 {
        [self.at_once, self.source, self.private, self.remote, self.held]
            .into_iter()
            .rev()
            .fold(0, |bits, bit| bits << 1 | u8::from(bit))
    }

    fn from_bits(bits: u8) -> Self {
        let has = |bit: u8| bits >> bit & 1 == 1;
        Self { at_once: has(0), source: has(1), private: has(2), remote: has(3), held: has(4) }
    }
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            (self.at_once, "at-once"),
            (self.source, "source"),
            (self.private, "private"),
            (self.remote, "remote"),
            (self.held, "held"),
        ];
        let words: Vec<_> = words.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
        f.write_str(&words.join(","))
    }
}

/// One request that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceRequest {
    /// Since the trace's start.
    pub at_ns: u64,
    /// Where in its volume, in bytes.
    pub offset: u64,
    /// How much of its volume; 0 for a flush.
    pub length_bytes: u32,
    /// From taking it until it was answered; `u32::MAX` is that long or longer.
    pub duration_us: u32,
    /// The number of a [`TraceClient`] that stands before it in the file.
    pub client: u16,
    /// What was asked for.
    pub operation: Operation,
    /// Where the data came from or went to.
    pub served: Served,
}

/// A client that the trace sees for the first time: one volume's, over one protocol or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceClient {
    /// Unique in the trace.
    pub number: u16,
    /// Since the trace's start.
    pub at_ns: u64,
    /// The volume's.
    pub name: String,
}

/// One record of a trace file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceRecord {
    /// Stands before the client's first request.
    Client(TraceClient),
    /// A request that was answered.
    Request(TraceRequest),
}

impl TraceRecord {
    /// Appends the record to `bytes`.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let (at_ns, place, length, duration_us, client, operation, served, name) = match self {
            Self::Client(TraceClient { number, at_ns, name }) => {
                let name = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX)];
                let length = u32::try_from(name.len()).expect("at most 255");
                (*at_ns, 0, length, 0, *number, 0, 0, name)
            }
            Self::Request(request) => {
                let TraceRequest { at_ns, offset, length_bytes, duration_us, client, .. } =
                    *request;
                let operation = request.operation as u8 + 1;
                let served = request.served.bits();
                (at_ns, offset, length_bytes, duration_us, client, operation, served, &[][..])
            }
        };
        bytes.extend(at_ns.to_le_bytes());
        bytes.extend(place.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(duration_us.to_le_bytes());
        bytes.extend(client.to_le_bytes());
        bytes.extend([operation, served]);
        bytes.extend(name);
    }

    /// The record at the front of `bytes`, and what follows it. `None`: there is no whole one.
    ///
    /// # Errors
    /// When the bytes are no record.
    fn decode(bytes: &[u8]) -> Result<Option<(Self, &[u8])>, BadTrace> {
        let Some((record, rest)) = bytes.split_first_chunk::<RECORD_BYTES>() else {
            return Ok(None);
        };
        let number = |from: usize, length: usize| {
            record[from..from + length].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
        };
        let half = |from| u32::try_from(number(from, 4)).expect("4 bytes");
        let (at_ns, place, length, client) = (number(0, 8), number(8, 8), half(16), number(24, 2));
        let client = u16::try_from(client).expect("2 bytes");
        let operation = usize::from(record[26]);
        if operation > 0 {
            let operation = Operation::ALL.get(operation - 1).ok_or(BadTrace::Operation)?;
            let request = TraceRequest {
                at_ns,
                offset: place,
                length_bytes: length,
                duration_us: half(20),
                client,
                operation: *operation,
                served: Served::from_bits(record[27]),
            };
            return Ok(Some((Self::Request(request), rest)));
        }
        let length = usize::try_from(length).ok().filter(|length| *length <= NAME_BYTES_MAX);
        let Some((name, rest)) = rest.split_at_checked(length.ok_or(BadTrace::Name)?) else {
            return Ok(None);
        };
        let name = String::from_utf8(name.to_vec()).map_err(|_| BadTrace::Name)?;
        let client = TraceClient { number: client, at_ns, name };
        Ok(Some((Self::Client(client), rest)))
    }
}

/// Why bytes are no trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadTrace {
    /// The file begins with other bytes than [`TRACE_MAGIC`].
    #[error("it does not begin as a trace of this version does")]
    Magic,
    /// The operation's number is none of [`Operation`].
    #[error("a record has an unknown operation")]
    Operation,
    /// The name is longer than 255 bytes or not UTF-8.
    #[error("a client's name is no name")]
    Name,
}

/// The records of a whole trace file, in the order in which they ended.
///
/// # Errors
/// When the bytes are no trace; a last record that is not whole is left out.
pub fn read_trace(bytes: &[u8]) -> Result<Vec<TraceRecord>, BadTrace> {
    let mut rest = bytes.strip_prefix(&TRACE_MAGIC[..]).ok_or(BadTrace::Magic)?;
    let mut records = Vec::new();
    while let Some((record, after)) = TraceRecord::decode(rest)? {
        records.push(record);
        rest = after;
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<TraceRecord> {
        let name = "client-7".to_owned();
        let client = TraceClient { number: 7, at_ns: 5, name };
        let request = TraceRequest {
            at_ns: u64::MAX,
            offset: 1 << 41,
            length_bytes: 4096,
            duration_us: u32::MAX,
            client: 7,
            operation: Operation::Zero,
            served: Served { private: true, held: true, ..Served::default() },
        };
        vec![TraceRecord::Client(client), TraceRecord::Request(request)]
    }

    fn file() -> Vec<u8> {
        let mut bytes = TRACE_MAGIC.to_vec();
        records().iter().for_each(|record| record.encode(&mut bytes));
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read_trace(&file()), Ok(records()));
    }

    #[test]
    fn a_record_that_is_not_whole_is_left_out() {
        let bytes = file();
        assert_eq!(read_trace(&bytes[..bytes.len() - 1]), Ok(records()[..1].to_vec()));
        assert_eq!(read_trace(&bytes[..8 + RECORD_BYTES + 3]), Ok(vec![]));
    }

    #[test]
    fn other_files_are_refused() {
        assert_eq!(read_trace(b"PGTRACE"), Err(BadTrace::Magic));
        let mut bytes = file();
        bytes[8 + 16..8 + 20].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(read_trace(&bytes), Err(BadTrace::Name));
        let mut bytes = file();
        let last = bytes.len() - 2;
        bytes[last] = 99;
        assert_eq!(read_trace(&bytes), Err(BadTrace::Operation));
    }

    #[test]
    fn a_place_is_shown_in_words() {
        let served = Served { at_once: true, source: true, ..Served::default() };
        assert_eq!(served.to_string(), "at-once,source");
    }
}
