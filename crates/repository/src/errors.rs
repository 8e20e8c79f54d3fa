//! Errors of files as problems that people understand.

use perigee_model::Problem;
use rustix::io::Errno;

/// What failed (`can't read repo://…`), with the reason in the system's error.
pub fn problem(what: impl Into<String>, error: Errno) -> Problem {
    let what = what.into();
    match error {
        Errno::NOENT => missing(what),
        Errno::NOTDIR => Problem::conflict(what, "a part of its path is a file"),
        Errno::ISDIR => Problem::conflict(what, "it is a directory"),
        Errno::EXIST => Problem::conflict(what, "it exists already"),
        Errno::NOTEMPTY => Problem::conflict(what, "the directory is not empty"),
        Errno::NOSPC | Errno::DQUOT => no_room(what, "the disk of the repository is full"),
        Errno::NAMETOOLONG => Problem::invalid(what, "a name is too long"),
        // A link or another disk, which someone has put into the tree from outside.
        Errno::LOOP | Errno::XDEV => missing(what),
        Errno::INVAL => Problem::invalid(what, "a directory can't be moved into itself"),
        error => Problem::internal(what, std::io::Error::from(error)),
    }
}

/// Something that does not exist, or that the user may not know of: both look the same.
pub fn missing(what: impl Into<String>) -> Problem {
    Problem::not_found(what, "there is no such file or directory")
}

/// The repository's disk is full.
pub fn no_room(what: impl Into<String>, why: impl std::fmt::Display) -> Problem {
    Problem::no_space(what, why).next("delete files that nobody needs, or ask an admin for room")
}
