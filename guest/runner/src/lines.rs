//! Lines of bounded length from an untrusted stream.

use std::io::{self, BufRead, Read};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// In JSON one byte may become six (`\u0001`), and a message must stay below
/// [`perigee_model::guest::LINE_BYTES_MAX`].
pub const TEXT_BYTES_MAX: usize = 8 * 1024;

/// What is there of a line is passed on when its end has not come for so long.
const PART_DELAY: Duration = Duration::from_secs(1);
/// What is read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// A line, or a part of one.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes that are not UTF-8 are replaced.
    pub text: String,
    /// The line goes on in the next piece.
    pub continues: bool,
}

/// Splits bytes into lines, and lines that are too long into pieces.
struct Lines {
    bytes_max: usize,
    line: Vec<u8>,
    /// A piece of this line was passed on.
    is_begun: bool,
}

impl Lines {
    fn new(bytes_max: usize) -> Self {
        Self { bytes_max, line: Vec::new(), is_begun: false }
    }

    fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(Piece)) {
        while let Some(first) = bytes.first() {
            if *first == b'\n' {
                each(self.take(self.line.len(), false));
                bytes = &bytes[1..];
                continue;
            }
            if self.line.len() >= self.bytes_max {
                each(self.take(character_boundary(&self.line), true));
            }
            let room = &bytes[..bytes.len().min(self.bytes_max - self.line.len())];
            let length = room.iter().position(|byte| *byte == b'\n').unwrap_or(room.len());
            self.line.extend_from_slice(&room[..length]);
            bytes = &bytes[length..];
        }
    }

    fn take(&mut self, length: usize, continues: bool) -> Piece {
        let rest = self.line.split_off(length);
        let text = String::from_utf8_lossy(&self.line).into_owned();
        (self.line, self.is_begun) = (rest, continues);
        Piece { text, continues }
    }

    /// What is there of a line, without a character of which a part has not come.
    fn part(&mut self) -> Option<Piece> {
        let is_character_begun = std::str::from_utf8(&self.line)
            .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none());
        let has_part = !self.line.is_empty() && !is_character_begun;
        has_part.then(|| self.take(character_boundary(&self.line), true))
    }

    /// The last line, at the end of the bytes.
    fn end(mut self) -> Option<Piece> {
        let is_open = !self.line.is_empty() || self.is_begun;
        is_open.then(|| self.take(self.line.len(), false))
    }
}

/// Calls `each` for every line of a stream.
pub fn read_lines(mut reader: impl BufRead, mut each: impl FnMut(Piece)) -> io::Result<()> {
    let mut lines = Lines::new(TEXT_BYTES_MAX);
    loop {
        let length = match reader.fill_buf() {
            Ok([]) => break,
            Ok(chunk) => {
                lines.feed(chunk, &mut each);
                chunk.len()
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        reader.consume(length);
    }
    lines.end().into_iter().for_each(each);
    Ok(())
}

/// The same while a program writes: a part of a line, such as a progress bar, is passed on after a moment.
pub fn read_lines_and_parts(
    reader: impl Read + Send + 'static,
    each: impl FnMut(Piece),
) -> io::Result<()> {
    read_with_delay(reader, PART_DELAY, each)
}

fn read_with_delay(
    mut reader: impl Read + Send + 'static,
    delay: Duration,
    mut each: impl FnMut(Piece),
) -> io::Result<()> {
    // A read can't be given a deadline, so it is in a thread of its own. Not more than one chunk waits.
    let (sender, chunks) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = match reader.read(&mut chunk) {
                Ok(0) => return,
                Ok(length) => Ok(chunk[..length].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let is_over = read.is_err();
            if sender.send(read).is_err() || is_over {
                return;
            }
        }
    });
    let mut lines = Lines::new(TEXT_BYTES_MAX);
    // When the first byte came that was not passed on.
    let mut since: Option<Instant> = None;
    loop {
        let next = match since {
            None => chunks.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(since) => chunks.recv_timeout(delay.saturating_sub(since.elapsed())),
        };
        match next {
            Ok(chunk) => {
                let mut has_new = since.is_none();
                lines.feed(&chunk?, |piece| {
                    has_new = true;
                    each(piece);
                });
                if has_new {
                    since = (!lines.line.is_empty()).then(Instant::now);
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                lines.part().into_iter().for_each(&mut each);
                since = None;
            }
            Err(RecvTimeoutError::Disconnected) => {
                lines.end().into_iter().for_each(each);
                return Ok(());
            }
        }
    }
}

/// `text`, shortened to what a message can carry.
pub fn shorten(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES_MAX);
    text[..end].to_owned()
}

/// Where to cut so that a character at the end stays whole if not all of its bytes have arrived yet.
fn character_boundary(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A piece after which its line goes on ends with `+`.
    fn shown(piece: Piece) -> String {
        if piece.continues { piece.text + "+" } else { piece.text }
    }

    fn lines(input: &[u8], bytes_max: usize) -> Vec<String> {
        let (mut lines, mut all) = (Lines::new(bytes_max), Vec::new());
        for byte in input {
            lines.feed(std::slice::from_ref(byte), |piece| all.push(shown(piece)));
        }
        all.extend(lines.end().map(shown));
        let (mut lines, mut at_once) = (Lines::new(bytes_max), Vec::new());
        lines.feed(input, |piece| at_once.push(shown(piece)));
        at_once.extend(lines.end().map(shown));
        assert_eq!(all, at_once, "byte by byte as all at once");
        all
    }

    #[test]
    fn every_line_comes_once_and_an_empty_one_is_a_line() {
        assert_eq!(lines(b"a\n\nb\n", 100), ["a", "", "b"]);
    }

    #[test]
    fn a_last_line_needs_no_line_end() {
        assert_eq!(lines(b"a\nb", 100), ["a", "b"]);
    }

    /// Its pieces were lines like all others: a line of JSON was 37 lines.
    #[test]
    fn a_long_line_is_cut_with_marks_and_nothing_of_it_is_lost() {
        assert_eq!(lines(b"abcdefgh\ni", 3), ["abc+", "def+", "gh", "i"]);
        assert_eq!(lines(b"abcdef\n\n", 3), ["abc+", "def", ""]);
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_one_line() {
        assert_eq!(lines(b"abc\nd\n", 3), ["abc", "d"]);
    }

    #[test]
    fn a_cut_does_not_split_a_character() {
        assert_eq!(lines("aé€x\n".as_bytes(), 4), ["aé+", "€x"]);
    }

    #[test]
    fn bytes_that_are_not_utf8_are_replaced() {
        assert_eq!(lines(b"a\xffb\n", 100), ["a\u{fffd}b"]);
    }

    #[test]
    fn bytes_that_never_become_a_character_do_not_stop_the_reading() {
        assert!(!lines(&[0xf0, 0x9f, 0x98, 0xf0], 3).concat().is_empty());
    }

    /// A progress bar was silent for its whole life.
    #[test]
    fn a_part_of_a_line_is_passed_on_when_its_end_does_not_come() {
        let (reader, mut writer) = io::pipe().unwrap();
        let (sender, pieces) = mpsc::channel();
        let reads = std::thread::spawn(move || {
            let delay = Duration::from_millis(10);
            read_with_delay(reader, delay, |piece| sender.send(shown(piece)).unwrap())
        });
        let next = || pieces.recv_timeout(Duration::from_secs(60)).expect("a piece");
        let mut say = |bytes: &[u8]| io::Write::write_all(&mut writer, bytes).unwrap();
        say(b"10 %\r");
        assert_eq!(next(), "10 %\r+");
        // A part of a character waits for the rest of it.
        say(b"20 %\xe2\x82");
        assert_eq!(next(), "20 %+");
        say(b"\xac\nnext\n");
        assert_eq!([next(), next()], ["€", "next"]);
        say(b"last");
        assert_eq!(next(), "last+");
        drop(writer);
        assert_eq!(next(), "", "the line has an end");
        reads.join().unwrap().unwrap();
    }

    #[test]
    fn shortening_keeps_whole_characters() {
        let long = "é".repeat(TEXT_BYTES_MAX);
        let short = shorten(&long);
        assert_eq!(short.len(), TEXT_BYTES_MAX);
        assert!(long.starts_with(&short));
    }
}
