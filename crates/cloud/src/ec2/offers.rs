//! What EC2 offers: the configured kinds in the zones that have them, on demand and as spot instances.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use perigee_model::money::Price;
use perigee_model::rental::Offer;

use super::answers::{self, Kind, SpotPrice};
use super::client::{Client, Form};
use super::{SHOWN, Settings};
use crate::provider::CloudError;
use crate::time;

/// EC2 bills Linux by the second, and at least a minute: "Amazon EC2 On-Demand Pricing".
const MINIMUM_S: u32 = 60;
const WHAT: &str = "can't list what EC2 offers";

/// Asks EC2 for all of it.
pub async fn ask(client: &Client, settings: &Settings) -> Result<Vec<Offer>, CloudError> {
    let form = Form::new("DescribeInstanceTypes", "instanceTypeSet");
    let form = form.filter(1, "instance-type", &settings.kinds);
    let kinds = client.pages(WHAT, &form, |page| Ok(answers::kinds(page))).await?;
    let kinds: BTreeMap<String, Kind> =
        kinds.into_iter().map(|kind| (kind.name.clone(), kind)).collect();
    let form = Form::new("DescribeInstanceTypeOfferings", "instanceTypeOfferingSet")
        .with("LocationType", "availability-zone")
        .filter(1, "instance-type", &settings.kinds);
    let mut places: Vec<Place> =
        client.pages(WHAT, &form, |page| Ok(answers::places(page).collect())).await?;
    places.retain(|(_, zone)| settings.has_zone(zone));
    places.sort();
    places.dedup();
    let form = Form::new("DescribeSpotPriceHistory", "spotPriceHistorySet")
        // The prices that hold since this moment are those of now.
        .with("StartTime", time::extended(time::now_unix_s()))
        .with("ProductDescription.1", "Linux/UNIX")
        .with_list("InstanceType", &settings.kinds);
    let prices: Vec<SpotPrice> =
        client.pages(WHAT, &form, |page| Ok(answers::spot_prices(page).collect())).await?;
    let spot = newest(prices.into_iter());
    Ok(all(&kinds, &places, &spot, settings))
}

type Place = (String, String);

fn newest(prices: impl Iterator<Item = SpotPrice>) -> BTreeMap<Place, SpotPrice> {
    let mut newest: BTreeMap<Place, SpotPrice> = BTreeMap::new();
    for price in prices {
        let place = (price.kind.clone(), price.zone.clone());
        match newest.get(&place) {
            Some(known) if known.as_of_unix_s >= price.as_of_unix_s => {}
            _ => {
                newest.insert(place, price);
            }
        }
    }
    newest
}

fn all(
    kinds: &BTreeMap<String, Kind>,
    places: &[Place],
    spot: &BTreeMap<Place, SpotPrice>,
    settings: &Settings,
) -> Vec<Offer> {
    let mut offers = Vec::new();
    for place in places {
        let (name, zone) = place;
        let Some(kind) = kinds.get(name) else { continue };
        let offer = |spot, price| Offer {
            kind: name.clone(),
            zone: zone.clone(),
            spot,
            cpus: kind.cpus,
            memory_bytes: kind.memory_bytes,
            kvm: kind.kvm,
            price,
        };
        if kind.on_demand {
            let known = settings.prices.get(name).copied();
            offers.push(offer(false, price(settings, known, SHOWN, settings.as_of_unix_s)));
        }
        if kind.spot {
            let known = spot.get(place);
            let (micros, as_of) = known.map_or((None, 0), |p| (p.per_hour_micros, p.as_of_unix_s));
            offers.push(offer(true, price(settings, micros, "ec2 spot history", as_of)));
        }
    }
    offers
}

fn price(
    settings: &Settings,
    per_hour_micros: Option<NonZeroU64>,
    source: &str,
    as_of_unix_s: u64,
) -> Price {
    Price {
        per_hour_micros,
        minimum_s: MINIMUM_S,
        egress_per_gib_micros: settings.egress_per_gib_micros,
        disk_per_gib_month_micros: settings.disk_per_gib_month_micros,
        source: source.to_owned(),
        as_of_unix_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spot_price(micros: u64, as_of_unix_s: u64) -> SpotPrice {
        SpotPrice {
            kind: "k".to_owned(),
            zone: "z".to_owned(),
            per_hour_micros: NonZeroU64::new(micros),
            as_of_unix_s,
        }
    }

    #[test]
    fn the_newest_spot_price_counts() {
        let prices = [spot_price(1, 10), spot_price(2, 30), spot_price(3, 20)];
        let newest = newest(prices.into_iter());
        let place = ("k".to_owned(), "z".to_owned());
        assert_eq!(newest[&place].per_hour_micros, NonZeroU64::new(2));
    }
}
