//! Lines of bounded length from an untrusted stream.

use std::io::{self, BufRead};

/// In JSON one byte may become six (`\u0001`), and a message must stay below
/// [`perigee_model::guest::LINE_BYTES_MAX`].
pub const TEXT_BYTES_MAX: usize = 8 * 1024;

/// Calls `each` for every line. A line longer than `bytes_max` is split; bytes that are not UTF-8 are replaced.
pub fn read_lines(
    mut reader: impl BufRead,
    bytes_max: usize,
    mut each: impl FnMut(String),
) -> io::Result<()> {
    let mut line = Vec::new();
    // The last piece was cut: a line end right after it is not another, empty line.
    let mut was_cut = false;
    loop {
        let chunk = match reader.fill_buf() {
            Ok(chunk) => chunk,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if chunk.is_empty() {
            if !line.is_empty() {
                each(text(&line));
            }
            return Ok(());
        }
        let room = &chunk[..chunk.len().min(bytes_max - line.len())];
        if let Some(end) = room.iter().position(|byte| *byte == b'\n') {
            line.extend_from_slice(&room[..end]);
            reader.consume(end + 1);
            if !(line.is_empty() && was_cut) {
                each(text(&line));
            }
            line.clear();
            was_cut = false;
        } else {
            let used = room.len();
            line.extend_from_slice(room);
            reader.consume(used);
            if line.len() >= bytes_max {
                let rest = line.split_off(character_boundary(&line));
                each(text(&line));
                line = rest;
                was_cut = true;
            }
        }
    }
}

/// `text`, shortened to what a message can carry.
pub fn shorten(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES_MAX);
    text[..end].to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
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

    fn lines(input: &[u8], bytes_max: usize) -> Vec<String> {
        let mut lines = Vec::new();
        read_lines(input, bytes_max, |line| lines.push(line)).unwrap();
        lines
    }

    #[test]
    fn every_line_comes_once_and_an_empty_one_is_a_line() {
        assert_eq!(lines(b"a\n\nb\n", 100), ["a", "", "b"]);
    }

    #[test]
    fn a_last_line_needs_no_line_end() {
        assert_eq!(lines(b"a\nb", 100), ["a", "b"]);
    }

    #[test]
    fn a_long_line_is_cut_and_nothing_of_it_is_lost() {
        assert_eq!(lines(b"abcdefgh\ni", 3), ["abc", "def", "gh", "i"]);
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_one_line() {
        assert_eq!(lines(b"abc\nd\n", 3), ["abc", "d"]);
    }

    #[test]
    fn a_cut_does_not_split_a_character() {
        assert_eq!(lines("aé€x\n".as_bytes(), 4), ["aé", "€x"]);
    }

    #[test]
    fn bytes_that_are_not_utf8_are_replaced() {
        assert_eq!(lines(b"a\xffb\n", 100), ["a\u{fffd}b"]);
    }

    #[test]
    fn bytes_that_never_become_a_character_do_not_stop_the_reading() {
        assert!(!lines(&[0xf0, 0x9f, 0x98, 0xf0], 3).concat().is_empty());
    }

    #[test]
    fn shortening_keeps_whole_characters() {
        let long = "é".repeat(TEXT_BYTES_MAX);
        let short = shorten(&long);
        assert_eq!(short.len(), TEXT_BYTES_MAX);
        assert!(long.starts_with(&short));
    }
}
