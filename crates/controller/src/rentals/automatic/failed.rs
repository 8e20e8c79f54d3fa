//! Requests of the rule that failed before they were recorded. Each further one in a row makes the next one wait for longer.

use std::collections::BTreeMap;

use perigee_model::rental::Offer;
use perigee_planner::rent::Refusal;

/// So long after the last one nobody knows any more that there were some, in milliseconds: twice the longest wait.
const KEPT_MS: u64 = 2 * 3600 * 1000;

/// Beyond so many places that of the oldest request is forgotten.
const PLACES_MAX: usize = 1_000;

/// Kind, zone, and whether it is spot.
type Place = (String, String, bool);

/// When the last request failed, and how many did in a row, by what was asked for.
#[derive(Debug, Default)]
pub struct Failed(BTreeMap<Place, (u64, u32)>);

/// `offer`: as the rule sees it.
fn place(offer: &Offer) -> Place {
    (offer.kind.clone(), offer.zone.clone(), offer.spot)
}

impl Failed {
    /// A request has failed at this Unix time.
    pub fn note(&mut self, offer: &Offer, at_ms: u64) {
        let entry = self.0.entry(place(offer)).or_default();
        *entry = (at_ms, entry.1.saturating_add(1));
        if self.0.len() > PLACES_MAX {
            let oldest = self.0.iter().min_by_key(|(_, (at_ms, _))| *at_ms);
            if let Some(oldest) = oldest.map(|(place, _)| place.clone()) {
                self.0.remove(&oldest);
            }
        }
    }

    /// A request was recorded: what becomes of it its rental shows.
    pub fn forget(&mut self, offer: &Offer) {
        self.0.remove(&place(offer));
    }

    /// As the rule is told of them.
    pub fn refusals(&mut self, age_ms: impl Fn(u64) -> u64) -> Vec<Refusal> {
        self.0.retain(|_, (at_ms, _)| age_ms(*at_ms) < KEPT_MS);
        let refusal = |((kind, zone, spot), (at_ms, times)): (&Place, &(u64, u32))| Refusal {
            kind: kind.clone(),
            zone: zone.clone(),
            spot: *spot,
            ago_s: age_ms(*at_ms) as f64 / 1e3,
            times: *times,
        };
        self.0.iter().map(refusal).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(kind: &str) -> Offer {
        Offer { kind: kind.to_owned(), ..crate::tests::rental("rent-1").offer }
    }

    #[test]
    fn each_further_failure_in_a_row_is_waited_for_longer_until_a_request_is_recorded() {
        let mut failed = Failed::default();
        let (mut now_ms, m1) = (0, offer("lab/m1"));
        for waits_s in [300_u64, 600, 1200, 2400, 3600, 3600] {
            failed.note(&m1, now_ms);
            let all = failed.refusals(|at_ms| now_ms - at_ms);
            assert_eq!((all.len(), all[0].left_s()), (1, waits_s as f64));
            now_ms += waits_s * 1000;
            assert!(
                failed.refusals(|at_ms| now_ms - at_ms)[0].left_s() <= 0.0,
                "it is asked again"
            );
        }
        failed.forget(&m1);
        assert!(failed.refusals(|_| 0).is_empty());
        failed.note(&m1, now_ms);
        assert!(failed.refusals(|_| KEPT_MS).is_empty(), "long ago");
    }

    #[test]
    fn no_more_places_are_known_than_the_limit_says() {
        let mut failed = Failed::default();
        for number in 0..=PLACES_MAX {
            failed.note(&offer(&format!("lab/m{number}")), number as u64);
        }
        let all = failed.refusals(|_| 0);
        assert_eq!(all.len(), PLACES_MAX);
        assert!(all.iter().all(|one| one.kind != "lab/m0"), "the oldest one");
    }
}
