//! Locks on state that must be consistent: that of layers, volumes and connections.
//!
//! A holder that panics may leave a half-made change behind, and nobody may use it after that. So the process ends
//! when such a lock is wanted again. This costs no more than a kill: what was acknowledged is on the disk or in
//! the page cache, clients connect to the next server, and they send again what was not answered. A process that
//! went on could only fail every request, or serve a wrong state.

use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Locks it. The process ends if an earlier holder has panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|_| end())
}

/// Locks it for reading. The process ends if a writer has panicked.
pub fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(|_| end())
}

/// Locks it for writing. The process ends if an earlier writer has panicked.
pub fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(|_| end())
}

#[cold]
fn end() -> ! {
    tracing::error!(
        "a fault in the program, described above, left a state that can't be trusted; the process ends now, and \
         nothing that was acknowledged is lost: start it again, and report the fault with this log"
    );
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const CHILD: &str = "PERIGEE_TEST_LOCKING";

    #[test]
    fn a_process_ends_before_it_uses_what_a_panicked_holder_left() {
        if std::env::var_os(CHILD).is_some() {
            let state = Mutex::new(0);
            let holder = std::thread::scope(|scope| {
                let panics = || {
                    let mut half_made = lock(&state);
                    *half_made = 1;
                    panic!("in the middle of a change");
                };
                scope.spawn(panics).join().map(|(): ()| ())
            });
            assert!(holder.is_err());
            let seen = *lock(&state);
            unreachable!("the state {seen} was used");
        }
        let this = std::env::current_exe().expect("this program");
        let name = "locking::tests::a_process_ends_before_it_uses_what_a_panicked_holder_left";
        let child = Command::new(this).args([name, "--exact"]).env(CHILD, "1").output();
        let ended = child.expect("a child").status;
        assert_eq!(ended.signal(), Some(6), "it is ended by SIGABRT: {ended}");
    }
}
