//! The log of a job in segments: files of JSON lines that are only appended to, each named after the number of its first line.
//!
//! Only the last segment may have a torn end, because a segment is synced before the next one begins. Of the last segment nothing counts from the
//! first bytes on that are no line: what a power cut has torn is cut short, or is zeros, which no line of JSON has. Of another segment a damaged line is
//! left out.
//!
//! A segment is removed when the record says that all of its lines were dropped. So a crash between the two loses no line, and no count of lines.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use perigee_model::job::LogLine;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{remove_directory, sync_directory};
use crate::records::LogKept;

/// The limit of one job's log. The oldest lines are dropped first.
pub const LOG_BYTES_MAX: u64 = 16 << 20;

/// Lines are dropped in pieces. A piece has the lines among so many consecutive messages of the guest.
pub const MESSAGES_PER_PIECE: u64 = 100;

/// The size of a line in addition to its text.
const LINE_BYTES: u64 = 80;

/// Another segment follows one that has reached this size.
const SEGMENT_BYTES: u64 = 1 << 20;

/// What lines count for the limits of a log.
pub fn size_of(lines: &[LogLine]) -> u64 {
    lines.iter().map(|line| line.line.len() as u64 + LINE_BYTES).sum()
}

#[derive(Debug)]
struct Segment {
    first_seq: u64,
    /// One less than the first one if it has no line.
    last_seq: u64,
    length: u64,
}

#[derive(Debug)]
struct Piece {
    number: u64,
    lines: u64,
    bytes: u64,
    last_seq: u64,
}

/// The log of a job, as whoever writes it knows it.
#[derive(Debug)]
pub struct Segments {
    dir: PathBuf,
    /// The oldest first.
    segments: VecDeque<Segment>,
    /// Those that the record has not dropped, the oldest first.
    pieces: VecDeque<Piece>,
}

impl Segments {
    /// Makes a log with these lines. The directory gets its name when all of them are on the disk.
    pub fn make(dir: &Path, lines: &[LogLine]) -> io::Result<Self> {
        let unfinished = dir.with_extension("new");
        remove_directory(&unfinished)?;
        DirBuilder::new().mode(0o700).create(&unfinished)?;
        let (segments, pieces) = (VecDeque::new(), VecDeque::new());
        let mut made = Self { dir: unfinished, segments, pieces };
        made.append(lines)?;
        fs::rename(&made.dir, dir)?;
        dir.clone_into(&mut made.dir);
        dir.parent().map_or(Ok(()), sync_directory)?;
        Ok(made)
    }

    /// Opens a log, and cuts off what a crash has torn.
    pub fn open(dir: &Path) -> io::Result<Self> {
        Self::open_before(dir, u64::MAX)
    }

    /// As [`Self::open`]; the lines from this number on are removed.
    fn open_before(dir: &Path, end_seq: u64) -> io::Result<Self> {
        let mut first_seqs = first_seqs(dir)?;
        let stay = first_seqs.partition_point(|first| *first < end_seq);
        // The newest first, so that a crash leaves the beginning of the log.
        for first_seq in first_seqs.drain(stay..).rev() {
            fs::remove_file(path_of(dir, first_seq))?;
        }
        let (segments, pieces) = (VecDeque::new(), VecDeque::new());
        let mut log = Self { dir: dir.to_owned(), segments, pieces };
        for (index, first_seq) in first_seqs.iter().copied().enumerate() {
            let is_last = index + 1 == first_seqs.len();
            let path = path_of(dir, first_seq);
            let text = fs::read(&path)?;
            let last_seq = first_seq.saturating_sub(1);
            let mut segment = Segment { first_seq, last_seq, length: 0 };
            let lines = lines_of::<LogLine>(&text, is_last);
            for (end, line) in lines.take_while(|(_, line)| line.seq < end_seq) {
                log.count(&line);
                (segment.last_seq, segment.length) = (line.seq, end as u64);
            }
            if is_last {
                cut(&path, text.len() as u64, segment.length)?;
            }
            log.segments.push_back(segment);
        }
        sync_directory(dir)?;
        Ok(log)
    }

    fn last_seq(&self) -> u64 {
        self.segments.back().map_or(0, |segment| segment.last_seq)
    }

    fn count(&mut self, line: &LogLine) {
        let (number, last_seq) = (line.seq / MESSAGES_PER_PIECE, line.seq);
        let bytes = size_of(std::slice::from_ref(line));
        match self.pieces.back_mut().filter(|piece| piece.number == number) {
            Some(piece) => {
                (piece.lines, piece.bytes) = (piece.lines + 1, piece.bytes + bytes);
                piece.last_seq = last_seq;
            }
            None => self.pieces.push_back(Piece { number, lines: 1, bytes, last_seq }),
        }
    }

    /// Adds lines, whose numbers grow. They are on the disk when this returns. They take the place of lines with their numbers or greater ones: no record
    /// says yet that those were stored.
    pub fn append(&mut self, lines: &[LogLine]) -> io::Result<()> {
        if let Some(first) = lines.first().filter(|first| first.seq <= self.last_seq()) {
            *self = Self::open_before(&self.dir, first.seq)?;
        }
        let mut rest = lines;
        while let Some(first) = rest.first() {
            let length = match self.segments.back().map(|last| last.length) {
                Some(length) if length < SEGMENT_BYTES => length,
                _ => {
                    let (first_seq, last_seq) = (first.seq, first.seq.saturating_sub(1));
                    self.segments.push_back(Segment { first_seq, last_seq, length: 0 });
                    0
                }
            };
            let (room, mut text, mut taken) = (SEGMENT_BYTES - length, Vec::new(), 0);
            while let Some(line) = rest.get(taken).filter(|_| (text.len() as u64) < room) {
                serde_json::to_writer(&mut text, line)?;
                text.push(b'\n');
                taken += 1;
            }
            let (new, later) = rest.split_at(taken);
            self.write(&text, new)?;
            rest = later;
        }
        Ok(())
    }

    /// Writes these lines, whose text this is, to the last segment. A sync that failed is not tried again: the bytes go, and are written anew.
    fn write(&mut self, text: &[u8], lines: &[LogLine]) -> io::Result<()> {
        let (Some(segment), Some(last_line)) = (self.segments.back_mut(), lines.last()) else {
            return Ok(());
        };
        let path = path_of(&self.dir, segment.first_seq);
        let mut file = File::options().append(true).create(true).mode(0o600).open(&path)?;
        if file.metadata()?.len() != segment.length {
            return Err(io::Error::other(format!("{} was changed meanwhile", path.display())));
        }
        let written = file.write_all(text).and_then(|()| file.sync_data());
        let written = match segment.length {
            0 => written.and_then(|()| sync_directory(&self.dir)),
            _ => written,
        };
        if let Err(error) = written {
            file.set_len(segment.length)?;
            return Err(error);
        }
        (segment.last_seq, segment.length) = (last_line.seq, segment.length + text.len() as u64);
        lines.iter().for_each(|line| self.count(line));
        Ok(())
    }

    /// Forgets the lines up to this number, which the record says were dropped. Returns whether segments can be removed ([`Self::remove_dropped`]).
    pub fn forget_dropped(&mut self, dropped_seq: u64) -> bool {
        while self.pieces.pop_front_if(|piece| piece.last_seq <= dropped_seq).is_some() {}
        self.segments.len() > 1 && self.segments[0].last_seq <= dropped_seq
    }

    /// Removes the segments that have only lines up to this number. The last segment stays.
    pub fn remove_dropped(&mut self, dropped_seq: u64) -> io::Result<()> {
        while self.segments.len() > 1 && self.segments[0].last_seq <= dropped_seq {
            fs::remove_file(path_of(&self.dir, self.segments[0].first_seq))?;
            self.segments.pop_front();
        }
        Ok(())
    }

    /// What the record is to say of this log: as many of the oldest pieces are dropped as are beyond the limit.
    pub fn limited(&self, mut kept: LogKept) -> LogKept {
        kept.bytes = self.pieces.iter().map(|piece| piece.bytes).sum();
        for piece in &self.pieces {
            if kept.bytes <= LOG_BYTES_MAX {
                break;
            }
            kept.bytes -= piece.bytes;
            kept.dropped_lines += piece.lines;
            kept.dropped_seq = piece.last_seq;
        }
        kept
    }
}

/// A part of a log.
#[derive(Debug, Default)]
pub struct LogPart {
    pub lines: Vec<LogLine>,
    /// There is more after it.
    pub is_cut: bool,
}

/// The first lines with a higher number than `after`; the part ends after the line that reaches a limit. `None` if there is no log. Somebody may write to it
/// meanwhile.
pub fn read_after(
    dir: &Path,
    after: u64,
    (lines_max, bytes_max): (usize, u64),
) -> io::Result<Option<LogPart>> {
    let first_seqs = match first_seqs(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    let from = first_seqs.partition_point(|first| *first <= after.saturating_add(1));
    let (mut part, mut bytes) = (LogPart::default(), 0);
    for (index, first_seq) in first_seqs.iter().enumerate().skip(from.saturating_sub(1)) {
        let text = match fs::read(path_of(dir, *first_seq)) {
            // Its lines were dropped a moment ago.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        let (begin, is_last) = (begin_after(&text, after), index + 1 == first_seqs.len());
        let lines = lines_of::<LogLine>(&text[begin..], is_last);
        for (_, line) in lines.filter(|(_, line)| line.seq > after) {
            if part.lines.len() >= lines_max || bytes >= bytes_max {
                part.is_cut = true;
                return Ok(Some(part));
            }
            bytes += size_of(std::slice::from_ref(&line));
            part.lines.push(line);
        }
    }
    Ok(Some(part))
}

/// What stands in the lines of a file, each with where it ends. In the last file that is written, a line that can't be read is the torn end.
pub fn lines_of<T: DeserializeOwned>(
    text: &[u8],
    is_last: bool,
) -> impl Iterator<Item = (usize, T)> {
    let mut end = 0;
    let lines = text.split_inclusive(|byte| *byte == b'\n').map(move |line| {
        end += line.len();
        let whole = line.strip_suffix(b"\n");
        (end, whole.and_then(|line| serde_json::from_slice::<T>(line).ok()))
    });
    let lines = lines.take_while(move |(_, line)| line.is_some() || !is_last);
    lines.filter_map(|(end, line)| Some((end, line?)))
}

/// The first line, counted from 1, that can't be read and has one after it that can be: no torn end is so, unless a power cut has torn the last lines and the controller
/// has not cut them off yet. Who reads the file leaves the line out, or all from there on.
pub fn damaged_line<T: DeserializeOwned>(text: &[u8]) -> Option<usize> {
    let lines = text.split_inclusive(|byte| *byte == b'\n');
    let is_line = |line: &[u8]| line.ends_with(b"\n") && serde_json::from_slice::<T>(line).is_ok();
    let mut first = None;
    for (number, line) in (1..).zip(lines) {
        match (is_line(line), first) {
            (false, None) => first = Some(number),
            (true, Some(_)) => return first,
            _ => {}
        }
    }
    None
}

/// Where the first line with a higher number begins, or an earlier one. The numbers grow, so few lines are looked at.
fn begin_after(text: &[u8], after: u64) -> usize {
    #[derive(Deserialize)]
    struct Numbered {
        seq: u64,
    }
    let (mut low, mut high) = (0, text.len());
    while low < high {
        let middle = low + (high - low) / 2;
        let before = text[low..middle].iter().rposition(|byte| *byte == b'\n');
        let begin = before.map_or(low, |at| low + at + 1);
        let line = text[middle..].iter().position(|byte| *byte == b'\n');
        let end = line.map_or(text.len(), |at| middle + at + 1);
        match serde_json::from_slice::<Numbered>(&text[begin..end]) {
            Ok(line) if line.seq <= after => low = end,
            _ => high = begin,
        }
    }
    low
}

/// The numbers of the first lines of all segments, sorted.
fn first_seqs(dir: &Path) -> io::Result<Vec<u64>> {
    let mut first_seqs = Vec::new();
    for entry in fs::read_dir(dir)? {
        first_seqs.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u64>().ok()));
    }
    first_seqs.sort_unstable();
    Ok(first_seqs)
}

fn path_of(dir: &Path, first_seq: u64) -> PathBuf {
    dir.join(format!("{first_seq:020}"))
}

/// Cuts off what is after so many bytes. The rest is on the disk afterwards: who wrote it may have been killed before.
fn cut(path: &Path, length: u64, whole: u64) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    if whole < length {
        let (path, bytes) = (path.display(), length - whole);
        tracing::warn!("{bytes} bytes at the end of {path} were never recorded, and are cut off");
        file.set_len(whole)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use perigee_model::guest::LogStream;

    use super::*;

    fn line(seq: u64, text: &str) -> LogLine {
        LogLine {
            seq,
            uptime_ms: 1,
            stream: LogStream::Stdout,
            continues: false,
            line: text.to_owned(),
            arrived_ms: seq,
            rank: None,
        }
    }

    fn numbered(seqs: impl IntoIterator<Item = u64>) -> Vec<LogLine> {
        seqs.into_iter().map(|seq| line(seq, &format!("line {seq}"))).collect()
    }

    const ALL: (usize, u64) = (usize::MAX, u64::MAX);

    fn shown(dir: &Path, after: u64) -> Vec<u64> {
        let part = read_after(dir, after, ALL).expect("read").expect("a log");
        for line in &part.lines {
            assert_eq!(line.line, format!("line {}", line.seq));
        }
        part.lines.iter().map(|line| line.seq).collect()
    }

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("log");
        (dir, log)
    }

    #[test]
    fn wherever_an_append_is_cut_off_what_was_stored_before_is_there_and_it_can_be_repeated() {
        let (_dir, log) = place();
        Segments::make(&log, &numbered([1, 2, 5])).expect("made");
        let file = path_of(&log, 1);
        let before = fs::read(&file).expect("the file");
        Segments::open(&log).and_then(|mut log| log.append(&numbered([6, 7]))).expect("appended");
        let after = fs::read(&file).expect("the file");
        for end in (before.len()..after.len()).step_by(7) {
            // The file ends there, or the disk has zeros from there on and has the end again.
            let mut zeros = after[..end].to_vec();
            zeros.resize(after.len(), 0);
            let hole_end = (end + 10).min(after.len());
            let mut hole = after.clone();
            hole[end..hole_end].fill(0);
            for torn in [after[..end].to_vec(), zeros, hole] {
                fs::write(&file, &torn).expect("torn");
                let seen = shown(&log, 0);
                assert!(seen == [1, 2, 5] || seen == [1, 2, 5, 6], "at {end}: {seen:?}");
                let mut opened = Segments::open(&log).expect("opened");
                assert_eq!(shown(&log, 0), seen, "at {end}");
                opened.append(&numbered([6, 7])).expect("repeated");
                assert_eq!(shown(&log, 0), [1, 2, 5, 6, 7], "at {end}");
                assert_eq!(fs::read(&file).expect("the file"), after, "at {end}");
            }
        }
    }

    #[test]
    fn lines_that_no_record_knows_give_way_to_those_that_come_with_their_numbers() {
        let (_dir, log) = place();
        let text = "x".repeat(300 << 10);
        let mut written = Segments::make(&log, &numbered(1..=10)).expect("made");
        let long: Vec<LogLine> = (11..=20).map(|seq| line(seq, &text)).collect();
        written.append(&long).expect("appended");
        assert!(first_seqs(&log).expect("a list").len() > 2, "several segments");
        // Another start of the VM: its messages have the numbers after those that were recorded.
        written.append(&numbered([8, 30])).expect("appended");
        assert_eq!(shown(&log, 0), (1..=8).chain([30]).collect::<Vec<_>>());
        let whole = size_of(&numbered((1..=8).chain([30])));
        assert_eq!(written.limited(LogKept::default()).bytes, whole);
        written.append(&numbered([1])).expect("appended");
        assert_eq!(shown(&log, 0), [1]);
        let opened = Segments::open(&log).expect("opened");
        assert_eq!(opened.limited(LogKept::default()).bytes, size_of(&numbered([1])));
    }

    #[test]
    fn a_log_is_read_from_any_line_on_across_its_segments() {
        let (_dir, log) = place();
        let text = "y".repeat(7 << 10);
        let all: Vec<LogLine> = (1..=400).map(|seq| line(3 * seq, &text)).collect();
        let mut written = Segments::make(&log, &[]).expect("made");
        all.chunks(7).for_each(|some| written.append(some).expect("appended"));
        assert!(first_seqs(&log).expect("a list").len() > 2, "several segments");
        for after in (0..=1201).step_by(5) {
            let part = read_after(&log, after, (2, u64::MAX)).expect("read").expect("a log");
            let next: Vec<u64> = (1..=400).map(|n| 3 * n).filter(|seq| *seq > after).collect();
            let seqs: Vec<u64> = part.lines.iter().map(|line| line.seq).collect();
            assert_eq!(seqs, next[..next.len().min(2)], "after {after}");
            assert_eq!(part.is_cut, next.len() > 2, "after {after}");
        }
        let by_size = read_after(&log, 0, (usize::MAX, 10 << 10)).expect("read").expect("a log");
        assert_eq!((by_size.lines.len(), by_size.is_cut), (2, true));
    }

    #[test]
    fn a_line_that_can_t_be_read_is_damage_if_another_one_comes_after_it() {
        let text = |line: &LogLine| serde_json::to_string(line).expect("JSON") + "\n";
        let lines: Vec<String> = numbered([1, 2, 3]).iter().map(text).collect();
        let (one, two, whole) = (lines[0].len(), lines[..2].concat().len(), lines.concat());
        let damaged = |bytes: &[u8]| damaged_line::<LogLine>(bytes);
        let flipped = |at: usize| {
            let mut bytes = whole.clone().into_bytes();
            bytes[at] ^= 0x80;
            damaged(&bytes)
        };
        assert_eq!(damaged(whole.as_bytes()), None);
        assert_eq!((flipped(2), flipped(one + 2)), (Some(1), Some(2)));
        assert_eq!(flipped(one - 1), Some(1), "two lines in one");
        // What an append or a power cut has torn.
        assert_eq!((flipped(two + 2), damaged(&whole.as_bytes()[..two + 5])), (None, None));
        assert_eq!(damaged(&[&whole.as_bytes()[..two], &[0; 8]].concat()), None);
    }

    #[test]
    fn a_damaged_line_hides_only_itself_unless_it_may_be_torn() {
        let (_dir, log) = place();
        let text = "z".repeat(600 << 10);
        let long: Vec<LogLine> = (1..=4).map(|seq| line(seq, &text)).collect();
        Segments::make(&log, &long).expect("made");
        let seqs = |after| {
            let part = read_after(&log, after, ALL).expect("read").expect("a log");
            part.lines.iter().map(|line| line.seq).collect::<Vec<_>>()
        };
        let first = path_of(&log, 1);
        let mut bytes = fs::read(&first).expect("the file");
        bytes[100] = 0;
        fs::write(&first, bytes).expect("damaged");
        assert_eq!(seqs(0), [2, 3, 4]);
        Segments::open(&log).expect("opened");
        assert_eq!(seqs(0), [2, 3, 4]);
    }
}
