//! What guests and other users have written, on a terminal.
//!
//! A terminal obeys escape sequences: they can change what was printed, set the window's title, or put text where the
//! shell reads it. So no control character but newline and tab reaches a terminal; each is shown as text. Files and
//! pipes get the bytes as they are.

use std::borrow::Cow;
use std::io::{self, IsTerminal};

/// Makes text harmless if standard output is a terminal.
pub fn for_stdout(bytes: &[u8]) -> Cow<'_, [u8]> {
    if io::stdout().is_terminal() { harmless(bytes) } else { Cow::Borrowed(bytes) }
}

/// Makes text harmless if standard error is a terminal.
pub fn for_stderr(text: &str) -> String {
    let bytes =
        if io::stderr().is_terminal() { harmless(text.as_bytes()) } else { text.as_bytes().into() };
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Shows each control character as `\x1b` or `\u{202e}`, and each byte that is no text as `\xff`.
fn harmless(bytes: &[u8]) -> Cow<'_, [u8]> {
    if bytes.iter().all(|byte| matches!(byte, b'\n' | b'\t' | b' '..=b'~')) {
        return Cow::Borrowed(bytes);
    }
    let mut shown = String::with_capacity(bytes.len() + 16);
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                '\n' | '\t' => shown.push(letter),
                '\0'..='\x1f' | '\x7f' => shown.push_str(&format!("\\x{:02x}", u32::from(letter))),
                _ if letter.is_control() || turns_text_around(letter) => {
                    shown.extend(letter.escape_unicode());
                }
                _ => shown.push(letter),
            }
        }
        for byte in chunk.invalid() {
            shown.push_str(&format!("\\x{byte:02x}"));
        }
    }
    Cow::Owned(shown.into_bytes())
}

/// Characters that change the direction of the text after them, so that it looks like another text.
fn turns_text_around(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_control_character_but_newline_and_tab_gets_out(bytes in any::<Vec<u8>>(), text in any::<String>()) {
            for bytes in [&bytes[..], text.as_bytes()] {
                let shown = harmless(bytes);
                let shown = std::str::from_utf8(&shown).expect("text");
                prop_assert!(shown.chars().all(|c| matches!(c, '\n' | '\t') || !c.is_control()), "{shown:?}");
                prop_assert!(!shown.chars().any(turns_text_around), "{shown:?}");
            }
        }

        #[test]
        fn other_text_stays_as_it_is(text in "[ -~\n\täöü€日本]*") {
            prop_assert_eq!(&*harmless(text.as_bytes()), text.as_bytes());
        }
    }

    #[test]
    fn escapes_are_shown_as_text() {
        let shown = harmless(b"\x1b]0;title\x07 \x1b[2J\r\xff \xc2\x9b5m \xe2\x80\xae");
        let expected = r"\x1b]0;title\x07 \x1b[2J\x0d\xff \u{9b}5m \u{202e}";
        assert_eq!(std::str::from_utf8(&shown), Ok(expected));
    }
}
