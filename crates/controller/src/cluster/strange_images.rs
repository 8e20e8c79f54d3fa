//! Images of hosts that nobody has made here.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use perigee_model::{HostId, ImageName};

/// The images of hosts that are not shown, because the controller does not know them or knows another one by that name. The log says each
/// once, for as long as it is there.
#[derive(Default)]
pub struct StrangeImages(Mutex<BTreeSet<(HostId, ImageName)>>);

impl StrangeImages {
    /// `now`: all of them.
    pub fn log_new(&self, now: BTreeSet<(HostId, ImageName)>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (host, image) in now.difference(&known) {
            tracing::warn!(
                "host {host} has an image {image} that is not the one of that name here, or that nobody has made here; \
                 `perigee image delete --pool` deletes it there"
            );
        }
        *known = now;
    }
}
