//! What every provider can do, and how one says that something was not done.

use futures_util::future::BoxFuture;
use perigee_model::kept::{NewSnapshot, Snapshot, SnapshotPrice};
use perigee_model::money::PRICE_AGE_S_DEFAULT;
pub use perigee_model::rental::CloudErrorKind;
use perigee_model::rental::{Instance, NewInstance, Notice, Offer};

/// Somebody who has machines for rent. Each call ends within a deadline of the provider's own, and may be dropped at any time.
pub trait Provider: Send + Sync {
    /// Its name in `providers.yaml`.
    fn name(&self) -> &str;

    /// How old its prices may be; an older one is not known.
    fn price_age_max_s(&self) -> u64 {
        PRICE_AGE_S_DEFAULT
    }

    /// In which quota of the account the CPUs of such a kind count, in all zones of the provider: kinds with the same word share it. `None` if
    /// the provider can't tell.
    fn quota_of(&self, _kind: &str) -> Option<String> {
        None
    }

    /// What can be rented now, and for how much.
    ///
    /// # Errors
    /// If the provider does not say, or what it says makes no sense.
    fn offers(&self) -> BoxFuture<'_, Result<Vec<Offer>, CloudError>>;

    /// Asks for an instance. The caller has recorded the rental before, and after [`CloudErrorKind::Unclear`] looks for the
    /// rental's id in [`Provider::list`]: some providers give two instances to who asks twice.
    ///
    /// # Errors
    /// [`CloudErrorKind::Unclear`] if there may be an instance now; every other kind: there is none of this call.
    fn create<'a>(&'a self, new: &'a NewInstance) -> BoxFuture<'a, Result<Instance, CloudError>>;

    /// The cluster's instances in all states, those that are long gone excepted. An instance that was asked for a moment ago may be missing.
    ///
    /// # Errors
    /// If the provider does not list all of them: there is no half a list.
    fn list<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>>;

    /// Ends an instance. It is no error if the provider does not know the instance, as one that is gone, or one that it made a moment ago: only
    /// [`Provider::list`] shows that an instance is gone.
    ///
    /// # Errors
    /// If the provider does not say that it ends the instance.
    fn end<'a>(&'a self, instance: &'a str) -> BoxFuture<'a, Result<(), CloudError>>;

    /// Which of the cluster's instances the provider will take back soon.
    ///
    /// # Errors
    /// If the provider does not say.
    fn notices<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Notice>, CloudError>>;

    /// Keeps disks of pools; `None` if the provider never does.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }
}

/// A provider that keeps the disks of pools while no host is rented.
pub trait Snapshots: Send + Sync {
    /// What that costs, as `providers.yaml` says.
    fn price(&self) -> SnapshotPrice;

    /// Asks for a snapshot of the disk of an instance's pool, as it is at this moment. The caller has recorded that before, and after
    /// [`CloudErrorKind::Unclear`] looks for the rental's id in [`Snapshots::list`].
    ///
    /// # Errors
    /// [`CloudErrorKind::Unclear`] if there may be a snapshot now; every other kind: there is none of this call.
    fn take<'a>(&'a self, new: &'a NewSnapshot) -> BoxFuture<'a, Result<Snapshot, CloudError>>;

    /// The cluster's snapshots. One that was asked for a moment ago may be missing.
    ///
    /// # Errors
    /// If the provider does not list all of them.
    fn list<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Snapshot>, CloudError>>;

    /// Deletes a snapshot. It is no error if the provider does not know it.
    ///
    /// # Errors
    /// If the provider does not say that it deletes the snapshot.
    fn delete<'a>(&'a self, snapshot: &'a str) -> BoxFuture<'a, Result<(), CloudError>>;
}

/// Why a provider did not do what was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CloudError {
    /// What follows for whoever asked.
    pub kind: CloudErrorKind,
    /// Who could not do what, and why. It has no secret in it.
    pub message: String,
}

impl CloudError {
    pub(crate) fn new(kind: CloudErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

/// An error with all that it was caused by.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Characters of a provider's text that are shown.
const SHOWN_MAX: usize = 300;

/// A provider's text as one line of a length that people read.
pub(crate) fn short(text: &str) -> String {
    let words: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|w| !w.is_empty())
        .collect();
    let line = words.join(" ");
    match line.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
