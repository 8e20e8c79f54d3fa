//! Runs work that blocks on threads of its own.

use std::sync::{Arc, Mutex};

use perigee_block::locking::lock;
use perigee_block::trace;
use tokio::task::JoinHandle;

/// Runs blocking file or catalog work on another thread. The work runs to its end even if the caller is
/// dropped, so steps that must not be separated are put into one call.
pub(crate) async fn blocking<T, E>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E>
where
    T: Send + 'static,
    E: Send + 'static,
{
    let result = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&result);
    let work = trace::carry(move || {
        let done = work();
        *lock(&slot) = Some(done);
    });
    if let Err(failed) = spawn(Box::new(work)).await {
        std::panic::resume_unwind(failed.into_panic());
    }
    let done = lock(&result).take();
    done.expect("work that did not panic has a result")
}

/// This is not generic, so that the runtime's part is compiled only once.
fn spawn(work: Box<dyn FnOnce() + Send>) -> JoinHandle<()> {
    tokio::task::spawn_blocking(work)
}
