//! The imports that are under way, so that deleting an image ends its import.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use perigee_block::locking::lock;
use perigee_model::{ImageName, Problem};
use tokio::sync::Notify;

use crate::work::Work;

/// How long the end of a stopped import may take. It looks several times a second whether it is stopped.
const STOP_DEADLINE: Duration = Duration::from_secs(8);

/// The imports that are under way.
#[derive(Default)]
pub(crate) struct Imports {
    running: Mutex<Vec<(ImageName, Arc<Work>)>>,
    ended: Notify,
}

/// One import, until this is dropped.
pub struct Importing {
    imports: Arc<Imports>,
    work: Arc<Work>,
}

impl Drop for Importing {
    fn drop(&mut self) {
        let mut running = lock(&self.imports.running);
        running.retain(|(_, work)| !Arc::ptr_eq(work, &self.work));
        drop(running);
        self.imports.ended.notify_waiters();
    }
}

impl Imports {
    pub(crate) fn begin(self: &Arc<Self>, name: &ImageName, work: &Arc<Work>) -> Importing {
        lock(&self.running).push((name.clone(), Arc::clone(work)));
        Importing { imports: Arc::clone(self), work: Arc::clone(work) }
    }

    /// Stops the imports of an image, and waits until they have ended. Returns whether there was one.
    pub(crate) async fn stop(&self, name: &ImageName) -> Result<bool, Problem> {
        let mut was_running = false;
        loop {
            let ended = self.ended.notified();
            if !self.ask_to_stop(name) {
                return Ok(was_running);
            }
            was_running = true;
            tokio::time::timeout(STOP_DEADLINE, ended).await.map_err(|_| {
                let limit_s = STOP_DEADLINE.as_secs();
                let why =
                    format!("its import was told to stop and has not ended after {limit_s} s");
                Problem::unavailable(format!("can't delete image {name}"), why)
                    .next("try again; if this stays so, look at the disk of the pool")
            })?;
        }
    }

    fn ask_to_stop(&self, name: &ImageName) -> bool {
        let running = lock(&self.running);
        let mut its = running.iter().filter(|(of, _)| of == name).peekable();
        let any = its.peek().is_some();
        its.for_each(|(_, work)| work.stop());
        any
    }
}
