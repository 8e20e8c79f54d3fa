//! A list that may be long: looked through by name, and shown in pages.

use perigee_model::percent::encoded_path;

use crate::parts::{Find, Page, Section};

/// So many rows are on a page.
pub const ROWS: usize = 500;

/// What the one who looks has asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// What names have in them; empty: all.
    pub find: String,
    /// The number of the page, from 1 on; 0 is the first one too, and one beyond the last page is the last one.
    pub page: usize,
}

/// A page of a list. `has` says whether a row has what is looked for, `rows` makes the table of the rows that are shown.
pub fn page<'a, T>(
    title: &str,
    path: &str,
    command: &str,
    all: &'a [T],
    asked: &Asked,
    has: impl Fn(&T, &str) -> bool,
    rows: impl FnOnce(Vec<&'a T>) -> Section,
) -> Page {
    let find = asked.find.trim();
    let found: Vec<&T> = all.iter().filter(|one| has(one, find)).collect();
    let number = found.len();
    let shown = asked.page.clamp(1, number.div_ceil(ROWS).max(1));
    let first = (shown - 1) * ROWS;
    let last = (first + ROWS).min(number);
    let mut section = rows(found[first..last].to_vec());
    let of = if find.is_empty() { String::new() } else { format!(" with \u{201c}{find}\u{201d}") };
    section.texts.push(match (first, last) {
        (0, last) if last == number => format!("{number} in all{of}."),
        _ => format!("{} to {last} of {number}{of}.", first + 1),
    });
    section.find = Some(Find { action: path.to_owned(), value: asked.find.clone(), of: "by name" });
    let at = |page: usize| format!("{path}?find={}&page={page}", encoded_path(find));
    if first > 0 {
        section.links.push(crate::parts::link("Previous", at(shown - 1)));
    }
    if last < number {
        section.links.push(crate::parts::link("Next", at(shown + 1)));
    }
    Page::new(title, command, vec![Section { command: String::new(), ..section }])
}
