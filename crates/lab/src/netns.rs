//! Runs a closure inside a network namespace, in a thread that enters the namespace and then ends.

use std::fs::File;

use nix::sched::{CloneFlags, setns};
use perigee_model::Problem;

/// # Errors
/// The namespace cannot be entered, or the closure fails.
pub fn within<T: Send>(
    namespace: &str,
    work: impl FnOnce() -> Result<T, Problem> + Send,
) -> Result<T, Problem> {
    let inside = || {
        let enter = |error: std::io::Error| {
            Problem::internal(format!("can't enter the network namespace {namespace}"), error)
        };
        let file = File::open(format!("/run/netns/{namespace}")).map_err(enter)?;
        setns(file, CloneFlags::CLONE_NEWNET).map_err(|errno| enter(errno.into()))?;
        work()
    };
    std::thread::scope(|scope| match scope.spawn(inside).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
