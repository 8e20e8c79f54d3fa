//! Shows what a long command is doing, its progress and the time it has taken.
//!
//! On a terminal one line changes; elsewhere each step prints a line at its start and at its end.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

#[derive(Debug, Clone)]
pub struct Steps {
    terminal: bool,
}

impl Default for Steps {
    fn default() -> Self {
        Self { terminal: std::io::stderr().is_terminal() }
    }
}

impl Steps {
    pub fn begin(&self, what: impl Into<String>) -> Step {
        let what = what.into();
        let bar = self.terminal.then(|| {
            let bar = ProgressBar::new_spinner();
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
            eprintln!("  … {what}");
        }
        Step { what, began: Instant::now(), bar, said: String::new(), ended: false }
    }

    /// Prints a line that stays.
    pub fn say(&self, line: &str) {
        eprintln!("{line}");
    }
}

/// A step of the work. If it is dropped before [`Step::done`], it prints that it was not finished.
#[derive(Debug)]
pub struct Step {
    what: String,
    began: Instant,
    bar: Option<ProgressBar>,
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
            None => eprintln!(
                "    {} ({:.0} s): {how_far}",
                self.what,
                self.began.elapsed().as_secs_f64()
            ),
        }
    }

    pub fn done(mut self, result: &str) {
        self.end("✓", result);
    }

    fn end(&mut self, sign: &str, result: &str) {
        self.ended = true;
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let gap = if result.is_empty() { "" } else { "  " };
        eprintln!(
            "  {sign} {} ({:.1} s){gap}{result}",
            self.what,
            self.began.elapsed().as_secs_f64()
        );
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.ended {
            self.end("✗", "not finished");
        }
    }
}
