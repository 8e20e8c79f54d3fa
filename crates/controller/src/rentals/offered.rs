//! What providers offer. A provider is asked at most once a minute, and waited for a few seconds: the answer of one that takes longer serves whoever
//! asks next, and no provider holds up who wants to know of the others.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt as _;
use perigee_cloud::{CloudError, CloudErrorKind, Provider};
use perigee_model::rental::Offer;

use super::ask::TEXT_MAX;
use super::within;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::rentals::OffersAnswer;
use crate::cluster::tasks::text_of;

/// Nobody waits longer for what a provider offers.
const PATIENCE: Duration = Duration::from_secs(3);

/// A list with more than this is no list of offers.
const OFFERS_MAX: usize = 10_000;

/// What a provider offers, or why it does not say; `None` if its answer takes longer than anybody waits.
pub async fn offered(
    cluster: &Arc<Cluster>,
    provider: &Arc<dyn Provider>,
) -> Option<Result<Arc<Vec<Offer>>, String>> {
    tokio::time::timeout(PATIENCE, answer(cluster, provider)).await.ok()
}

/// Why it is not known what a provider offers whose answer is late.
pub fn late() -> String {
    format!("it has not answered for {} s", PATIENCE.as_secs())
}

/// A provider's answer, which goes on to come when nobody waits for it any more, within the deadline for every answer.
fn answer(cluster: &Arc<Cluster>, provider: &Arc<dyn Provider>) -> OffersAnswer {
    cluster.rentals.offers(provider.name(), cluster.timing.renter.offers, || {
        let (cluster, provider) = (Arc::clone(cluster), Arc::clone(provider));
        let asked = async move {
            let said = ask(&cluster, &provider).await;
            said.map(Arc::new).map_err(|error| format!("{}: {}", error.kind, error.message))
        };
        // A panic would be the answer to everybody from then on. A problem is asked about again soon.
        let asked = AssertUnwindSafe(asked).catch_unwind().map(|said| {
            said.unwrap_or_else(|panic| {
                let text = text_of(&*panic);
                tracing::error!("asking a provider what it offers panicked: {text}");
                Err(format!("the controller has failed to ask: {text}"))
            })
        });
        let answer = asked.boxed().shared();
        tokio::spawn(answer.clone());
        answer
    })
}

/// Asks a provider what it offers. A price that is too old, or of later, is not known.
///
/// # Errors
/// Those of the provider; `Unclear` if its list can't be one.
pub async fn ask(
    cluster: &Cluster,
    provider: &Arc<dyn Provider>,
) -> Result<Vec<Offer>, CloudError> {
    let offers = within(cluster.timing.rentals.answer, provider.offers()).await?;
    let mut offers = sane(offers)?;
    let (now_s, max_age_s) = (now_ms() / 1000, provider.price_age_max_s());
    for offer in &mut offers {
        offer.price = offer.price.clone().as_known(now_s, max_age_s);
    }
    Ok(offers)
}

fn sane(offers: Vec<Offer>) -> Result<Vec<Offer>, CloudError> {
    let is_sane = |offer: &Offer| {
        let texts = [&offer.kind, &offer.zone, &offer.price.source];
        !offer.kind.is_empty() && texts.iter().all(|text| text.len() <= TEXT_MAX)
    };
    if offers.len() <= OFFERS_MAX && offers.iter().all(is_sane) {
        return Ok(offers);
    }
    let message = format!(
        "it offers more than {OFFERS_MAX} kinds, or one without a name or with a name, zone or source of more than {TEXT_MAX} bytes"
    );
    Err(CloudError { kind: CloudErrorKind::Unclear, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_offers_than_can_be_and_names_that_are_too_long_are_no_list_of_offers() {
        let offer = |kind: String| Offer { kind, ..crate::tests::rental("rent-1").offer };
        sane(vec![offer("k".repeat(TEXT_MAX)); OFFERS_MAX]).expect("as many as may be");
        for wrong in [
            vec![offer("k".to_owned()); OFFERS_MAX + 1],
            vec![offer("k".repeat(TEXT_MAX + 1))],
            vec![offer(String::new())],
        ] {
            let error = sane(wrong).expect_err("no list");
            let is_named = error.message.contains("10000") && error.message.contains("256");
            assert!(error.kind == CloudErrorKind::Unclear && is_named, "{error}");
        }
    }
}
