//! What was found at a machine that is to run Perigee, and what to do about it.

use serde::{Deserialize, Serialize};

/// Whether the machine can do without what was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Good,
    /// It works, and something is slow, or can't be done here.
    Warning,
    /// The machine can't be a host like this.
    Error,
}

/// What was found of one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub check: String,
    /// What that means.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do about it; empty where nothing is to be done.
    pub next: String,
}

impl Finding {
    /// It is as it should be.
    pub fn good(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Verdict::Good, found, "")
    }

    /// Something is slow, or can't be done.
    pub fn warning(check: &str, found: impl Into<String>, next: impl Into<String>) -> Self {
        Self::new(check, Verdict::Warning, found, next)
    }

    /// The machine can't be a host like this.
    pub fn error(check: &str, found: impl Into<String>, next: impl Into<String>) -> Self {
        Self::new(check, Verdict::Error, found, next)
    }

    fn new(
        check: &str,
        verdict: Verdict,
        found: impl Into<String>,
        next: impl Into<String>,
    ) -> Self {
        Self { check: check.to_owned(), verdict, found: found.into(), next: next.into() }
    }
}
