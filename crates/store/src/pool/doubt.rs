//! What a server remembers of a copy that was not the image's content.

use std::time::Duration;

use tokio::time::Instant;

use crate::catalog::Verdict;

/// After so many times, from whatever sources, there is a pause before each, which grows.
const DROPS_AT_ONCE: u32 = 6;
/// How often all of a copy is fetched again from one source, if it is not the image's content and nobody knows why.
const DROPS_MAX: u32 = 2;
/// The background reads a copy again after this time, if it can't be compared for a reason that may pass.
pub(crate) const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// What this server remembers of a copy that was not the image's content, or could not be compared with it.
#[derive(Default)]
pub(crate) struct Doubt {
    /// The last source, and how often what had come was dropped since then.
    from: (String, u32),
    /// How often it was dropped at all.
    drops: u32,
    /// The background reads all of it again only then.
    pub(crate) not_before: Option<Instant>,
}

impl Doubt {
    /// What has come from there was dropped, and nobody knows whose fault it was.
    pub(crate) fn drop_from(&mut self, source: &str) -> Option<Verdict> {
        if self.from.0 != source {
            self.from = (source.to_owned(), 0);
        }
        self.from.1 += 1;
        self.drops = self.drops.saturating_add(1);
        if let Some(late) = self.drops.checked_sub(DROPS_AT_ONCE) {
            self.pause(AGAIN_AFTER * (1 << late.min(7)));
        }
        (self.from.1 > DROPS_MAX).then_some(Verdict::Unclear)
    }

    /// The background does not read the copy again before this time is over.
    pub(crate) fn pause(&mut self, pause: Duration) {
        self.not_before = Some(Instant::now() + pause);
    }
}
