//! Shows what a long command is doing, its progress and the time it has taken.
//!
//! On a terminal each step under way has a line that changes; elsewhere each step prints a line at its start and at its end.

use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Prints one line for each step, on standard error: with a clock while it runs if that is a terminal.
#[derive(Debug, Clone)]
pub struct Steps {
    terminal: bool,
    /// The lines of all steps under way.
    bars: MultiProgress,
}

impl Default for Steps {
    fn default() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), bars: MultiProgress::new() }
    }
}

impl Steps {
    /// Shows that a step has begun. A step that is dropped without [`Step::done`] has failed.
    pub fn begin(&self, what: impl Into<String>) -> Step {
        let what = what.into();
        let bar = self.terminal.then(|| {
            let bar = self.bars.add(ProgressBar::new_spinner());
            if let Ok(style) =
                ProgressStyle::with_template("  {spinner} {prefix}  {elapsed}  {msg}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(what.clone());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        if bar.is_none() {
            print(&format!("  … {what}"));
        }
        let bars = self.bars.clone();
        Step { what, began: Instant::now(), bar, bars, said: String::new(), ended: false }
    }

    /// Prints a line that stays.
    pub fn say(&self, line: &str) {
        self.bars.suspend(|| print(line));
    }
}

/// Whether anybody reads it does not matter: a lab is taken down all the same.
fn print(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}

/// A step of the work. If it is dropped before [`Step::done`], it prints that it was not finished.
#[derive(Debug)]
pub struct Step {
    what: String,
    began: Instant,
    bar: Option<ProgressBar>,
    bars: MultiProgress,
    said: String,
    ended: bool,
}

impl Step {
    /// Shows the progress, for example "2/3 hosts up".
    pub fn at(&mut self, how_far: &str) {
        if self.said == how_far {
            return;
        }
        how_far.clone_into(&mut self.said);
        match &self.bar {
            Some(bar) => bar.set_message(self.said.clone()),
            None => print(&format!(
                "    {} ({:.0} s): {how_far}",
                self.what,
                self.began.elapsed().as_secs_f64()
            )),
        }
    }

    /// Shows that the step is done, with its time and what came of it.
    pub fn done(mut self, result: &str) {
        self.end("✓", result);
    }

    fn end(&mut self, sign: &str, result: &str) {
        self.ended = true;
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let gap = if result.is_empty() { "" } else { "  " };
        let took_s = self.began.elapsed().as_secs_f64();
        let line = format!("  {sign} {} ({took_s:.1} s){gap}{result}", self.what);
        self.bars.suspend(|| print(&line));
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.ended {
            self.end("✗", "not finished");
        }
    }
}
