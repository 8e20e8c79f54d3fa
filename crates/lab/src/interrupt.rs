//! Lets a long program clean up after a signal. The signal is only recorded; the program checks for it
//! between two steps, and removes what it has made before it ends.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc::c_int;
use nix::sys::signal::{SigHandler, Signal, signal};
use perigee_model::Problem;

static CAME: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: c_int) {
    CAME.store(true, Ordering::Relaxed);
}

/// Records SIGINT and SIGTERM from now on; they no longer end this process.
///
/// # Errors
/// When the kernel refuses.
pub fn hold() -> Result<(), Problem> {
    for which in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: storing to an atomic is all that the handler does, which is safe at any time.
        unsafe { signal(which, SigHandler::Handler(note)) }
            .map_err(|error| Problem::internal(format!("can't wait for {which}"), error))?;
    }
    Ok(())
}

/// # Errors
/// When a signal has come.
pub fn check() -> Result<(), Problem> {
    if CAME.load(Ordering::Relaxed) {
        return Err(Problem::internal("the run was not finished", "a signal stopped it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::raise;

    use super::*;

    #[test]
    fn a_signal_is_noted_and_ends_nothing() {
        hold().expect("the kernel agrees");
        check().expect("nothing came");
        raise(Signal::SIGTERM).expect("a signal");
        check().expect_err("it came");
    }
}
