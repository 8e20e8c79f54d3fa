//! The inputs of jobs that are being staged, and the jobs that are being submitted. Who stages: `files/inputs/staging.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::tenant::tenant_of;
use perigee_model::{HostId, ImageName, Problem, TenantName};
use tokio::sync::RwLock;

use crate::records::JobInputs;

/// How many images of inputs are made at a host at the same time. The others wait, so that VMs which run there have
/// most of its disk. The network has a limit of its own ([`crate::files::pace`]).
const AT_ONCE: usize = 3;

/// How many of them are one tenant's: whoever has much to stage does not hold up the others.
const AT_ONCE_OF_ONE: usize = 2;

/// An image that could not be made is tried again after this, and then after twice as long each time.
const AGAIN_MIN: Duration = Duration::from_secs(2);

const AGAIN_MAX: Duration = Duration::from_secs(300);

/// What is being staged.
#[derive(Debug, Default)]
pub struct Staging {
    running: Mutex<BTreeMap<ImageName, Progress>>,
    /// What could not be made, until it is tried again.
    failed: Mutex<BTreeMap<(HostId, ImageName), Failed>>,
    submissions: Mutex<BTreeMap<TenantName, Arc<Submissions>>>,
}

/// A tenant's jobs that are being submitted.
#[derive(Debug, Default)]
pub struct Submissions {
    /// Held by whoever reads a list of inputs, and looks for what it names: each may take much memory.
    pub resolving: tokio::sync::Mutex<()>,
    /// Held to read by those who submit a job, from before they look for its inputs until it is recorded. Whoever removes
    /// uploaded files takes it without waiting for it, and only for a moment: nobody who submits waits for long.
    pub under_way: RwLock<()>,
    /// How many have begun.
    pub count: AtomicU64,
}

/// An image that could not be made.
#[derive(Debug)]
struct Failed {
    tries: u32,
    again: Instant,
    why: String,
}

/// How far the staging of one image of inputs is.
#[derive(Debug)]
pub struct Progress {
    host: HostId,
    pub sent_bytes: u64,
    bytes: u64,
    pub is_sent: bool,
}

/// A place at a host, until this is dropped.
pub struct StagingPlace<'a> {
    staging: &'a Staging,
    pub image: ImageName,
}

impl Drop for StagingPlace<'_> {
    fn drop(&mut self) {
        self.staging.lock().remove(&self.image);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Staging {
    /// A tenant's submissions.
    pub fn submissions(&self, tenant: &TenantName) -> Arc<Submissions> {
        Arc::clone(locked(&self.submissions).entry(tenant.clone()).or_default())
    }

    /// The image could not be made: the next try is later each time, because each sends all files again.
    pub fn note_failure(&self, host: &HostId, image: &ImageName, problem: &Problem) {
        let mut failed = locked(&self.failed);
        let now = Instant::now();
        failed.retain(|_, failed| now < failed.again + AGAIN_MAX);
        let entry = failed.entry((host.clone(), image.clone()));
        let entry = entry.or_insert_with(|| Failed { tries: 0, again: now, why: String::new() });
        let wait = AGAIN_MIN.saturating_mul(1 << entry.tries.min(16)).min(AGAIN_MAX);
        (entry.tries, entry.again) = (entry.tries + 1, now + wait);
        entry.why = format!("{}: {}", problem.what, problem.why);
    }

    /// Why it is not tried again yet.
    pub fn waits_after_failure(&self, host: &HostId, image: &ImageName) -> Option<String> {
        let failed = locked(&self.failed);
        let Failed { again, why, .. } = failed.get(&(host.clone(), image.clone()))?;
        let left = again.checked_duration_since(Instant::now())?;
        Some(format!("{why}; its inputs are staged again in {} s", left.as_secs() + 1))
    }

    /// The image was made.
    pub fn forget_failure(&self, host: &HostId, image: &ImageName) {
        locked(&self.failed).remove(&(host.clone(), image.clone()));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ImageName, Progress>> {
        locked(&self.running)
    }

    /// How far the image is, in words, while it is made.
    pub fn in_words(&self, image: &ImageName) -> Option<String> {
        let running = self.lock();
        let Progress { sent_bytes, bytes, is_sent, .. } = running.get(image)?;
        let mb = |bytes: u64| bytes.div_ceil(1_000_000);
        Some(match is_sent {
            true => format!("staging inputs: making a disk of {} MB", mb(*bytes)),
            false => format!("staging inputs: {} of {} MB", mb(*sent_bytes), mb(*bytes)),
        })
    }

    /// Why nothing can be done for this image at this host now, unless it is there.
    pub fn waits(&self, host: &HostId, image: &ImageName) -> Option<String> {
        let running = why_it_waits(&self.lock(), host, image);
        running.or_else(|| self.waits_after_failure(host, image))
    }

    /// # Errors
    /// Why it has to wait.
    pub fn take(&self, host: &HostId, inputs: &JobInputs) -> Result<StagingPlace<'_>, String> {
        let mut running = self.lock();
        if let Some(why) = why_it_waits(&running, host, &inputs.image) {
            return Err(why);
        }
        let progress =
            Progress { host: host.clone(), sent_bytes: 0, bytes: inputs.bytes, is_sent: false };
        running.insert(inputs.image.clone(), progress);
        Ok(StagingPlace { staging: self, image: inputs.image.clone() })
    }

    /// Changes the progress of an image that is being staged; nothing happens if it is not.
    pub fn note(&self, image: &ImageName, note: impl FnOnce(&mut Progress)) {
        if let Some(progress) = self.lock().get_mut(image) {
            note(progress);
        }
    }
}

fn why_it_waits(
    running: &BTreeMap<ImageName, Progress>,
    host: &HostId,
    image: &ImageName,
) -> Option<String> {
    if let Some(other) = running.get(image) {
        let at = &other.host;
        return Some(format!("another job's inputs, which are the same, are staged at {at}"));
    }
    let tenant = tenant_of(image.as_str());
    let at_host = running.iter().filter(|(_, progress)| progress.host == *host);
    let (all, own) = at_host.fold((0, 0), |(all, own), (other, _)| {
        (all + 1, own + usize::from(tenant_of(other.as_str()) == tenant))
    });
    let others = match (all >= AT_ONCE, own >= AT_ONCE_OF_ONE) {
        (_, true) => own,
        (true, false) => all,
        (false, false) => return None,
    };
    Some(format!("the inputs of {others} other jobs are being staged at {host}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_does_not_take_all_places_of_a_host() {
        let host = HostId::new("home1").expect("a name");
        let image = |name: &str| ImageName::new(name).expect("a name");
        let mut running = BTreeMap::new();
        let progress = || Progress { host: host.clone(), sent_bytes: 0, bytes: 1, is_sent: false };
        for name in ["acme~inputs-1", "acme~inputs-2"] {
            assert_eq!(why_it_waits(&running, &host, &image(name)), None);
            running.insert(image(name), progress());
        }
        assert!(why_it_waits(&running, &host, &image("acme~inputs-3")).is_some());
        assert_eq!(why_it_waits(&running, &host, &image("blue~inputs-1")), None);
        running.insert(image("blue~inputs-1"), progress());
        let why = why_it_waits(&running, &host, &image("blue~inputs-2")).expect("it is full");
        assert!(why.contains("of 3 other jobs"), "{why}");
        let elsewhere = HostId::new("home2").expect("a name");
        assert_eq!(why_it_waits(&running, &elsewhere, &image("acme~inputs-3")), None);
    }
}
