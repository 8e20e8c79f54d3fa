//! What became of each cell: the content of `results.json` and of the page with the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use perigee_model::Problem;
use serde::{Deserialize, Serialize};

use super::table::{Cell, Fault, Placement, word};
use crate::report::page::{self, row};
use crate::report::svg::escape;

/// How a cell's work ended, before it is judged.
#[derive(Debug, Default)]
pub struct Ran {
    /// The phase was seen, and the fault came in it.
    pub is_seen: bool,
    /// How the move ended, for people.
    pub ended: String,
    /// The longest time that a client waited for an answer.
    pub longest_ms: u64,
    /// What is wrong.
    pub faults: Vec<String>,
}

/// What came of one cell of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Right,
    Wrong,
    /// The phase was over before the fault could come.
    NotSeen,
}

/// One cell of the table, as it is kept and shown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CellResult {
    #[serde(flatten)]
    pub cell: Cell,
    pub verdict: Verdict,
    /// How the move ended, for people.
    pub ended: String,
    /// What is wrong; empty if nothing is.
    pub faults: Vec<String>,
    /// The longest time that a client waited for an answer; 0 where a guest is the client.
    pub longest_ms: u64,
    pub took_s: f64,
    /// The version and the commit that were tested.
    pub perigee: String,
}

impl CellResult {
    /// What was found wrong, or an error of the experiment itself, makes it [`Verdict::Wrong`]. `took_s` is the
    /// cell's whole time.
    pub fn of(cell: Cell, ran: Result<Ran, Problem>, took_s: f64) -> Self {
        let ran = ran.unwrap_or_else(|problem| Ran {
            is_seen: true,
            faults: vec![problem.to_string()],
            ..Ran::default()
        });
        let Ran { is_seen, ended, longest_ms, faults } = ran;
        let verdict = match (faults.is_empty(), is_seen) {
            (false, _) => Verdict::Wrong,
            (true, true) => Verdict::Right,
            (true, false) => Verdict::NotSeen,
        };
        Self { cell, verdict, ended, faults, longest_ms, took_s, perigee: String::new() }
    }
}

/// The content of `results.json`. Results of earlier runs stay until their cell is run again.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub cells: Vec<CellResult>,
    pub versions: BTreeMap<String, String>,
}

impl Outcome {
    /// Reads what earlier runs have left in a directory.
    ///
    /// # Errors
    /// `Invalid` when it can't be read.
    pub fn read(dir: &Path) -> Result<Self, Problem> {
        let path = dir.join("results.json");
        let what = || format!("can't read {}", path.display());
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| {
                Problem::invalid(what(), e).next("remove it to begin with an empty table")
            }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(Problem::invalid(what(), e)),
        }
    }

    /// Writes `results.json` and `report.html`.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn write(&self, dir: &Path) -> Result<(), Problem> {
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(dir)?;
            let mut text = serde_json::to_vec_pretty(self)?;
            text.push(b'\n');
            std::fs::write(dir.join("results.json"), text)?;
            std::fs::write(dir.join("report.html"), self.html())
        };
        write()
            .map_err(|e| Problem::internal(format!("can't write results to {}", dir.display()), e))
    }

    /// Puts a result in the place of an earlier one of the same cell. The order is always that of the table.
    pub fn set(&mut self, result: CellResult) {
        self.cells.retain(|old| old.cell != result.cell);
        self.cells.push(result);
        let order = Cell::all();
        self.cells.sort_by_key(|result| order.iter().position(|cell| *cell == result.cell));
    }

    /// The last result of a cell.
    pub fn of(&self, cell: &Cell) -> Option<&CellResult> {
        self.cells.iter().find(|result| result.cell == *cell)
    }

    /// The versions and commits that were tested.
    pub fn perigees(&self) -> String {
        let all: BTreeSet<&str> = self.cells.iter().map(|cell| &cell.perigee[..]).collect();
        all.into_iter().collect::<Vec<_>>().join("; ")
    }

    /// The number of cells of each verdict, and of those that were not run.
    pub fn line(&self) -> String {
        let count = |verdict| self.cells.iter().filter(|cell| cell.verdict == verdict).count();
        let not_run = Cell::all().iter().filter(|cell| self.of(cell).is_none()).count();
        format!(
            "{} cells right, {} wrong, {} whose phase was over before the fault, {not_run} not run",
            count(Verdict::Right),
            count(Verdict::Wrong),
            count(Verdict::NotSeen),
        )
    }

    fn html(&self) -> String {
        let title = "Faults in every phase of every placement";
        let style = "td.table { white-space: normal; }\nbody { max-width: 1400px; }\n";
        let mut html = page::start(&format!("Perigee: {title}"), style);
        // Writing to a String cannot fail.
        let _ = writeln!(
            html,
            "<h1>{title}</h1>\n<p class=\"lead\">{}.</p>\n<p>In each cell a client or a guest writes and verifies data \
             while the fault comes. Right means: all that was acknowledged is there, there was one writer at any time, the \
             move ended or was undone and says why, and nothing was left behind on either side. A dash is a cell that was \
             not run; an empty one is not possible.</p>",
            escape(&self.line())
        );
        self.summary(&mut html);
        for placement in Placement::ALL {
            self.table(&mut html, placement);
        }
        self.details(&mut html);
        page::end(&mut html, &self.versions);
        html
    }

    /// One row for each placement.
    fn summary(&self, html: &mut String) {
        html.push_str(
            "<div class=\"scroll\"><table>\n<tr><th>placement</th><th>cells</th><th>right</th><th>wrong</th>\
             <th>phase too short</th><th>undone</th><th>longest wait of a client</th></tr>\n",
        );
        let possible = Cell::all();
        for placement in Placement::ALL {
            let all: Vec<&CellResult> =
                self.cells.iter().filter(|result| result.cell.placement == placement).collect();
            let count = |holds: &dyn Fn(&CellResult) -> bool| {
                all.iter().filter(|result| holds(result)).count().to_string()
            };
            let of = |verdict| count(&|result| result.verdict == verdict);
            let longest = all.iter().max_by_key(|result| result.longest_ms);
            let longest = longest.filter(|result| result.longest_ms > 0).map_or_else(
                || "not measured".to_owned(),
                |result| format!("{} ms ({})", result.longest_ms, result.cell),
            );
            row(
                html,
                "",
                &[
                    word(placement),
                    possible.iter().filter(|cell| cell.placement == placement).count().to_string(),
                    of(Verdict::Right),
                    of(Verdict::Wrong),
                    of(Verdict::NotSeen),
                    count(&|result| result.ended.starts_with("undone")),
                    longest,
                ],
            );
        }
        html.push_str("</table></div>\n");
    }

    fn table(&self, html: &mut String, placement: Placement) {
        let _ = writeln!(
            html,
            "<h2>{}</h2>\n<div class=\"scroll\"><table>\n<tr><th>fault</th>",
            word(placement)
        );
        for phase in placement.phases() {
            let _ = write!(html, "<th>{}</th>", word(phase));
        }
        html.push_str("</tr>\n");
        let possible = Cell::all();
        for fault in Fault::ALL {
            let cells = placement.phases().iter().map(|&phase| Cell { placement, phase, fault });
            let cells: Vec<Cell> = cells.collect();
            if cells.iter().any(|cell| possible.contains(cell)) {
                let texts = cells.iter().map(|cell| self.text(cell, &possible));
                row(html, "", &std::iter::once(word(fault)).chain(texts).collect::<Vec<_>>());
            }
        }
        html.push_str("</table></div>\n");
    }

    fn text(&self, cell: &Cell, possible: &[Cell]) -> String {
        match self.of(cell) {
            _ if !possible.contains(cell) => String::new(),
            None => "–".to_owned(),
            Some(result) => match result.verdict {
                Verdict::NotSeen => "phase too short".to_owned(),
                Verdict::Wrong => "WRONG".to_owned(),
                Verdict::Right => {
                    let ended = result.ended.split(':').next().unwrap_or_default();
                    format!("✓ {ended}, {:.0} s", result.took_s)
                }
            },
        }
    }

    fn details(&self, html: &mut String) {
        html.push_str("<h2>How each ended</h2>\n<ul>\n");
        for result in self.cells.iter().filter(|result| result.verdict != Verdict::NotSeen) {
            let wait = match result.longest_ms {
                0 => String::new(),
                ms => format!("; the longest wait of a client was {ms} ms"),
            };
            let faults: String = result
                .faults
                .iter()
                .map(|fault| format!(" <span class=\"fault\">{}</span>", escape(fault)))
                .collect();
            let _ = writeln!(
                html,
                "<li><code>{}</code>: {}{wait}{faults}</li>",
                result.cell,
                escape(&result.ended)
            );
        }
        html.push_str("</ul>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(is_seen: bool, faults: &[&str]) -> Ran {
        let faults = faults.iter().map(|fault| (*fault).to_owned()).collect();
        Ran { is_seen, ended: "undone: <why>".to_owned(), longest_ms: 7, faults }
    }

    #[test]
    fn a_cell_is_right_only_if_the_fault_came_and_nothing_is_wrong() {
        let cell = Cell::all()[0];
        let verdict = |ran| CellResult::of(cell, ran, 1.0).verdict;
        assert_eq!(verdict(Ok(ran(true, &[]))), Verdict::Right);
        assert_eq!(verdict(Ok(ran(false, &[]))), Verdict::NotSeen);
        assert_eq!(verdict(Ok(ran(false, &["lost"]))), Verdict::Wrong);
        assert_eq!(verdict(Err(Problem::internal("can't wait", "waited"))), Verdict::Wrong);
    }

    #[test]
    fn the_page_has_every_cell_and_stands_alone() {
        let mut outcome = Outcome::default();
        let all = Cell::all();
        outcome.set(CellResult::of(all[3], Ok(ran(true, &["<lost>"])), 2.0));
        outcome.set(CellResult::of(all[1], Ok(ran(true, &[])), 2.0));
        outcome.set(CellResult::of(all[1], Ok(ran(false, &[])), 3.0));
        assert_eq!(outcome.cells.len(), 2);
        assert_eq!(outcome.cells[0].cell, all[1]);
        let page = outcome.html();
        assert!(page.contains("&lt;lost&gt;") && page.contains("phase too short"), "{page}");
        assert_eq!(page.matches('–').count(), all.len() - 2);
        assert!(!page.contains("<script") && !page.contains("http://"));
    }

    #[test]
    fn results_of_earlier_runs_are_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(Outcome::read(dir.path()).expect("none").cells.is_empty());
        let mut outcome = Outcome::default();
        outcome.set(CellResult::of(Cell::all()[5], Ok(ran(true, &[])), 2.0));
        outcome.write(dir.path()).expect("written");
        let again = Outcome::read(dir.path()).expect("results");
        assert_eq!(again.cells[0].cell, Cell::all()[5]);
    }
}
