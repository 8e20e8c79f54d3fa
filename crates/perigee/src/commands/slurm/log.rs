//! Writes what was done where an operator finds it: programs that Slurm starts have no terminal.

use std::io::Write as _;
use std::os::unix::net::UnixDatagram;
use std::time::{SystemTime, UNIX_EPOCH};

use super::config::Log;
use crate::output;

/// Facility daemon, severity informational or error (RFC 5424, 6.2.1).
const INFORMATIONAL: u8 = 3 * 8 + 6;
const ERROR: u8 = 3 * 8 + 3;

/// One line. A log that can't be written ends nothing: it is said on standard error.
pub fn write(log: &Log, line: &str, is_error: bool) {
    let line = line.replace('\n', " ");
    let written = match log {
        Log::Syslog => {
            let priority = if is_error { ERROR } else { INFORMATIONAL };
            let message = format!("<{priority}>perigee-slurm[{}]: {line}", std::process::id());
            UnixDatagram::unbound()
                .and_then(|socket| socket.send_to(message.as_bytes(), "/dev/log").map(drop))
                .map_err(|error| format!("/dev/log: {error}"))
        }
        Log::File(path) => {
            let line = format!("{} {line}\n", output::time(now_ms()));
            std::fs::File::options()
                .append(true)
                .create(true)
                .open(path)
                // One write, so that lines of several programs don't mix.
                .and_then(|mut file| file.write_all(line.as_bytes()))
                .map_err(|error| format!("{}: {error}", path.display()))
        }
    };
    if let Err(why) = written {
        output::note(&format!("perigee: can't write the log: {why}"));
    }
}

/// Unix time.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
