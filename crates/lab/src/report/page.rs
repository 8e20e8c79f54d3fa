//! The frame of a report: a single HTML file without scripts.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::svg::escape;
use crate::measuring::Goal;
use crate::paper::{Figure, Verdict};

const STYLE: &str = include_str!("style.css");

/// The page up to the first heading. `style` is added to the style that all reports share.
pub fn start(title: &str, style: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{}</title>\n<style>\n{STYLE}{style}</style>\n</head>\n<body>\n",
        escape(title)
    )
}

pub const END: &str = "</body>\n</html>\n";

// Writing to a String cannot fail, so the results of `write!` below are ignored.

/// The end of a page: the versions of the programs that were measured.
pub fn end(page: &mut String, versions: &BTreeMap<String, String>) {
    page.push_str("<h2>Versions</h2>\n<ul>\n");
    for (name, version) in versions {
        let _ = writeln!(page, "<li>{}: {}</li>", escape(name), escape(version));
    }
    page.push_str("</ul>\n");
    page.push_str(END);
}

/// The goals of an experiment, and whether they are met.
pub fn goals(page: &mut String, goals: &[Goal]) {
    page.push_str("<h2>Goals</h2>\n<ul>\n");
    for goal in goals {
        let (class, word) = match goal.met {
            Some(true) => ("", "Met"),
            Some(false) => (" class=\"fault\"", "Missed"),
            None => (" class=\"soft\"", "Not measured"),
        };
        let _ = writeln!(
            page,
            "<li{class}>{word}: {}: {}.</li>",
            escape(&goal.goal),
            escape(&goal.measured)
        );
    }
    page.push_str("</ul>\n");
}

/// The papers' figures beside ours. `text` is HTML.
pub fn papers(page: &mut String, text: &str, figures: &[Figure]) {
    if figures.is_empty() {
        return;
    }
    let columns = ["figure", "theirs", "ours", "verdict", "why not"];
    table(page, "Theirs and ours", text, &columns);
    for Figure { figure, theirs, ours, verdict, why } in figures {
        let class = if *verdict == Verdict::DoesNotAgree { " fault" } else { "" };
        let texts = [figure, theirs, ours].map(|text| escape(text));
        let why = why.as_deref().map(escape).unwrap_or_default();
        let _ = writeln!(
            page,
            "<tr><td class=\"text\">{}</td><td class=\"text{class}\">{}</td><td class=\"text\">{why}</td></tr>",
            texts.join("</td><td class=\"text\">"),
            verdict.words()
        );
    }
    page.push_str(TABLE_END);
}

/// A chart with its title and caption.
pub fn figure(page: &mut String, title: &str, caption: &str, svg: &str) {
    let _ = writeln!(
        page,
        "<figure><h3>{}</h3><figcaption>{}</figcaption>\n{svg}</figure>",
        escape(title),
        escape(caption)
    );
}

/// A section with a table: its heading, a text in HTML, and the names of the columns. [`row`]s follow, and then
/// [`TABLE_END`].
pub fn table(page: &mut String, title: &str, text: &str, columns: &[&str]) {
    let columns: String = columns.iter().map(|name| format!("<th>{}</th>", escape(name))).collect();
    let _ = writeln!(
        page,
        "<h2>{}</h2>\n<p>{text}</p>\n<div class=\"scroll\"><table>\n<tr>{columns}</tr>",
        escape(title)
    );
}

/// What follows the last row of a [`table`].
pub const TABLE_END: &str = "</table></div>\n";

/// A figure divided by another one, with two decimals.
pub fn ratio(above: Option<f64>, below: Option<f64>) -> String {
    match (above, below) {
        (Some(above), Some(below)) if below > 0.0 => format!("{:.2}", above / below),
        _ => "-".to_owned(),
    }
}

/// One row of a table; `class` may be empty.
pub fn row(page: &mut String, class: &str, cells: &[String]) {
    let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(page, "<tr{class}>{cells}</tr>");
}
