//! The one error that crosses a process boundary: what failed, why, and what to do next.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The class of a problem; each has one HTTP status and one exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    /// The request itself is wrong (400).
    Invalid,
    /// Who asks may not have or do this (403).
    Forbidden,
    /// The thing named does not exist (404).
    NotFound,
    /// It exists already, is in use, or is in a state that does not allow this (409).
    Conflict,
    /// No room for it (507).
    NoSpace,
    /// Another process did not answer or refused (503). Trying again may help.
    Unavailable,
    /// This host cannot do it, now or later; another host may (501).
    Unsupported,
    /// Another controller commands the cluster, and not this one (421).
    Superseded,
    /// A fault of ours or of the machine (500).
    Internal,
}

/// An error as users and programs see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Programs go by this, people by the texts.
    pub kind: ProblemKind,
    /// What could not be done.
    pub what: String,
    /// Why not.
    pub why: String,
    /// What to do next; empty where there is nothing to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub next: String,
}

impl Problem {
    /// Without a word on what to do next; [`Problem::next`] adds it.
    pub fn new(kind: ProblemKind, what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { kind, what: what.into(), why: why.to_string(), next: String::new() }
    }

    /// A wrong request; see [`ProblemKind::Invalid`].
    pub fn invalid(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Invalid, what, why)
    }

    /// Something that the asker may not have or do; see [`ProblemKind::Forbidden`].
    pub fn forbidden(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Forbidden, what, why)
    }

    /// Something that is not there; see [`ProblemKind::NotFound`].
    pub fn not_found(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::NotFound, what, why)
    }

    /// A state that does not allow it; see [`ProblemKind::Conflict`].
    pub fn conflict(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Conflict, what, why)
    }

    /// No room; see [`ProblemKind::NoSpace`].
    pub fn no_space(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::NoSpace, what, why)
    }

    /// Another process that does not answer; see [`ProblemKind::Unavailable`].
    pub fn unavailable(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Unavailable, what, why)
    }

    /// What this host cannot do, now or later; see [`ProblemKind::Unsupported`].
    pub fn unsupported(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Unsupported, what, why)
    }

    /// What only the controller may do that commands the cluster; see [`ProblemKind::Superseded`].
    pub fn superseded(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Superseded, what, why)
    }

    /// A fault of ours or of the machine; see [`ProblemKind::Internal`].
    pub fn internal(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Internal, what, why)
    }

    /// What the operating system refused. A disk without room, or a full quota, is [`ProblemKind::NoSpace`], whatever `kind` the rest
    /// is.
    pub fn of_io(kind: ProblemKind, what: impl Into<String>, error: &std::io::Error) -> Self {
        let is_full = matches!(
            error.kind(),
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
        );
        match is_full {
            true => Self::no_space(what, error).next("free space there, or use another disk"),
            false => Self::new(kind, what, error),
        }
    }

    /// Adds what the user can do next.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = next.into();
        self
    }

    /// The status of an HTTP answer with this problem (RFC 9110, 15; 507 is RFC 4918's).
    pub fn http_status(&self) -> u16 {
        match self.kind {
            ProblemKind::Invalid => 400,
            ProblemKind::Forbidden => 403,
            ProblemKind::NotFound => 404,
            ProblemKind::Conflict => 409,
            ProblemKind::Superseded => 421,
            ProblemKind::NoSpace => 507,
            ProblemKind::Unavailable => 503,
            ProblemKind::Unsupported => 501,
            ProblemKind::Internal => 500,
        }
    }

    /// The CLI's exit code: 2 is kept for wrong usage, 255 for `job plan`.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            ProblemKind::Internal => 1,
            ProblemKind::Invalid => 3,
            ProblemKind::NotFound => 4,
            ProblemKind::Conflict => 5,
            ProblemKind::NoSpace => 6,
            ProblemKind::Unavailable => 7,
            ProblemKind::Unsupported => 8,
            ProblemKind::Forbidden => 9,
            ProblemKind::Superseded => 10,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        if !self.next.is_empty() {
            write!(f, "\n  {}", self.next)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_full_disk_has_the_exit_code_of_no_space_wherever_it_is() {
        for (kind, code) in [
            (ErrorKind::StorageFull, 6),
            (ErrorKind::QuotaExceeded, 6),
            (ErrorKind::PermissionDenied, 3),
        ] {
            let problem = Problem::of_io(ProblemKind::Invalid, "can't write", &Error::from(kind));
            assert_eq!(problem.exit_code(), code, "{kind}");
        }
    }
}
