//! What a person is told of an error of the catalog.

use std::io::ErrorKind;
use std::path::Path;

use perigee_model::Problem;
use rusqlite::ErrorCode;

/// When the disk of the catalog fails.
const START_AGAIN: &str =
    "look at the disk (`dmesg` tells its errors), and start the volume server again when it works";
const RESTORE: &str = "restore a backup of catalog.sqlite that matches the pool's layers";

/// Converts an error of a catalog that is in use. SQLite calls a catalog damaged also when the disk has failed, so a
/// backup is advised only if the catalog is still damaged when the pool was opened again.
pub(crate) fn problem(what: &str, error: &rusqlite::Error) -> Problem {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Problem::no_space(what, error).next("free space in the pool"),
        Some(ErrorCode::SystemIoFailure) => disk_failed(what, error),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            let why = format!("the pool's catalog was read wrong, or is damaged: {error}");
            Problem::internal(what, why)
                .next(format!("{START_AGAIN}; if it is still so, {RESTORE}"))
        }
        _ => Problem::internal(what, error),
    }
}

/// The same for a catalog that is being opened. If the disk gives all of it, the catalog itself is damaged.
pub(crate) fn open_problem(what: &str, error: &rusqlite::Error, path: &Path) -> Problem {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => match read_all(path) {
            Err(error) => disk_failed(what, error),
            Ok(()) => Problem::internal(what, format!("the pool's catalog is damaged: {error}"))
                .next(RESTORE),
        },
        _ => problem(what, error),
    }
}

fn disk_failed(what: &str, error: impl std::fmt::Display) -> Problem {
    let why = format!("the disk with the pool's catalog failed: {error}");
    Problem::internal(what, why).next(START_AGAIN)
}

/// Reads the catalog, and the changes that are still to go into it.
fn read_all(path: &Path) -> std::io::Result<()> {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    for path in [path, Path::new(&log)] {
        match std::fs::File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            file => drop(std::io::copy(&mut file?, &mut std::io::sink())?),
        }
    }
    Ok(())
}

/// As [`problem`], for `map_err`.
pub(crate) fn failed(what: &str) -> impl Fn(rusqlite::Error) -> Problem {
    move |error| problem(what, &error)
}

/// Converts a catalog error to an I/O error.
pub(crate) fn io_error(error: rusqlite::Error) -> std::io::Error {
    if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
        nix::Error::ENOSPC.into()
    } else {
        std::io::Error::other(error)
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi;

    use super::*;

    fn error(code: i32) -> rusqlite::Error {
        rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
    }

    #[test]
    fn a_disk_that_fails_is_no_reason_to_restore_the_catalog() {
        let failed = problem("can't list the volumes", &error(ffi::SQLITE_IOERR_READ));
        assert!(failed.why.contains("the disk with the pool's catalog failed"), "{failed}");
        assert!(!failed.next.contains("backup"), "{failed}");
        let corrupt = problem("can't list the volumes", &error(ffi::SQLITE_CORRUPT));
        assert!(corrupt.next.contains("start the volume server again"), "{corrupt}");
        assert!(corrupt.next.contains("if it is still so, restore a backup"), "{corrupt}");
    }

    /// Reading a process's memory at address 0 fails as a bad disk does, with EIO.
    #[test]
    fn a_catalog_that_can_t_be_read_at_the_start_is_not_called_damaged() {
        let corrupt = error(ffi::SQLITE_CORRUPT);
        let failing = open_problem("can't open the pool", &corrupt, Path::new("/proc/self/mem"));
        assert!(failing.why.contains("Input/output error"), "{failing}");
        assert!(!failing.next.contains("backup"), "{failing}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog.sqlite");
        std::fs::write(&path, "damaged").unwrap();
        let damaged = open_problem("can't open the pool", &corrupt, &path);
        assert!(damaged.why.contains("catalog is damaged"), "{damaged}");
        assert!(damaged.next.starts_with("restore a backup"), "{damaged}");
    }
}
