//! What a program may answer. An answer that makes no sense is refused as a whole: nobody knows then what was done.

use std::collections::HashSet;

use perigee_model::rental::{Instance, ListedInstance, NewInstance, Notice, Offer, is_machine};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::provider::{CloudError, CloudErrorKind};
use crate::time;

/// Offers, instances or notices in an answer.
const ITEMS_MAX: usize = 10_000;
/// Bytes of a name or an id.
const WORD_BYTES_MAX: usize = 256;
/// Clocks differ. A price of next week would never be old.
const AHEAD_S: u64 = 24 * 3600;
/// What is not known if it is 0, in [`perigee_model::money::Price`].
const PRICES: [&str; 3] = ["per_hour_micros", "egress_per_gib_micros", "disk_per_gib_month_micros"];

/// The answer to `offers`.
#[derive(Debug, Deserialize)]
pub struct OffersAnswer {
    offers: Vec<Offer>,
}

/// The answer to `create`.
#[derive(Debug, Deserialize)]
pub struct InstanceAnswer {
    instance: Instance,
}

/// The answer to `list`.
#[derive(Debug, Deserialize)]
pub struct InstancesAnswer {
    instances: Vec<ListedInstance>,
}

/// The answer to `notices`.
#[derive(Debug, Deserialize)]
pub struct NoticesAnswer {
    notices: Vec<Notice>,
}

/// The answer to `end`: an object with nothing in it.
#[derive(Debug, Deserialize)]
pub struct Done {}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: Said,
}

#[derive(Deserialize)]
struct Said {
    kind: CloudErrorKind,
    message: String,
}

/// The answer on a program's standard output.
///
/// # Errors
/// The program's own error, or [`CloudErrorKind::Unclear`] and what makes no sense.
pub fn read<T: DeserializeOwned>(output: &[u8], is_success: bool) -> Result<T, CloudError> {
    let unclear = |why: String| CloudError::new(CloudErrorKind::Unclear, why);
    let answer: Result<Value, _> = serde_json::from_slice(output);
    if let Ok(answer) = &answer
        && answer.get("error").is_some()
    {
        let said = ErrorAnswer::deserialize(answer);
        let said = said.map_err(|error| unclear(format!("its error makes no sense: {error}")))?;
        return Err(CloudError::new(said.error.kind, said.error.message));
    }
    if !is_success {
        return Err(unclear("it failed without saying why".to_owned()));
    }
    let no_sense =
        |error: serde_json::Error| unclear(format!("its answer makes no sense: {error}"));
    let mut answer = answer.map_err(no_sense)?;
    forget_zeros(&mut answer);
    serde_json::from_value(answer).map_err(no_sense)
}

/// A price of 0 is one that is not known.
fn forget_zeros(answer: &mut Value) {
    let offers = answer.get_mut("offers").and_then(Value::as_array_mut);
    for offer in offers.into_iter().flatten() {
        for name in PRICES {
            if let Some(price) = offer.pointer_mut(&format!("/price/{name}"))
                && price.as_f64() == Some(0.0)
            {
                *price = Value::Null;
            }
        }
    }
}

impl OffersAnswer {
    /// The offers.
    ///
    /// # Errors
    /// What makes no sense.
    pub fn checked(self) -> Result<Vec<Offer>, String> {
        few(&self.offers)?;
        let latest = time::now_unix_s() + AHEAD_S;
        let mut seen = HashSet::new();
        for offer in &self.offers {
            word("kind", &offer.kind)?;
            word("zone", &offer.zone)?;
            word("source", &offer.price.source)?;
            if !is_machine(offer.cpus, offer.memory_bytes) {
                return Err(format!("its {} has no CPU or no memory", offer.kind));
            }
            if offer.price.as_of_unix_s > latest {
                return Err(format!("its price of {} is from the future", offer.kind));
            }
            if !seen.insert((&offer.kind, &offer.zone, offer.spot)) {
                return Err(format!("it offers {} in {} twice", offer.kind, offer.zone));
            }
        }
        Ok(self.offers)
    }
}

impl InstanceAnswer {
    /// The instance that was asked for.
    ///
    /// # Errors
    /// What makes no sense.
    pub fn checked(self, new: &NewInstance) -> Result<Instance, String> {
        instance(&self.instance)?;
        match &self.instance.rental {
            Some(rental) if *rental == new.rental => Ok(self.instance),
            _ => Err(format!("its instance is not the one of the rental {}", new.rental)),
        }
    }
}

impl InstancesAnswer {
    /// The instances, all of which are of this cluster: those that nobody owns are ended.
    ///
    /// # Errors
    /// What makes no sense.
    pub fn checked(self, of: &str) -> Result<Vec<Instance>, String> {
        few(&self.instances)?;
        let mut seen = HashSet::new();
        for ListedInstance { cluster, instance: listed } in &self.instances {
            instance(listed)?;
            if cluster != of {
                return Err(format!("it lists the instance {} of another cluster", listed.id));
            }
            if !seen.insert(&listed.id) {
                return Err(format!("it lists the instance {} twice", listed.id));
            }
        }
        Ok(self.instances.into_iter().map(|listed| listed.instance).collect())
    }
}

impl NoticesAnswer {
    /// The notices.
    ///
    /// # Errors
    /// What makes no sense.
    pub fn checked(self) -> Result<Vec<Notice>, String> {
        few(&self.notices)?;
        self.notices.iter().try_for_each(|notice| word("instance", &notice.instance))?;
        Ok(self.notices)
    }
}

pub(super) fn few<T>(items: &[T]) -> Result<(), String> {
    match items.len() {
        0..=ITEMS_MAX => Ok(()),
        count => Err(format!("its list has {count} items; at most {ITEMS_MAX} are possible")),
    }
}

fn instance(instance: &Instance) -> Result<(), String> {
    word("id", &instance.id)?;
    word("kind", &instance.kind)?;
    word("zone", &instance.zone)?;
    let address = instance.address.as_deref().map_or(Ok(()), |address| word("address", address));
    address.and(instance.rental.as_deref().map_or(Ok(()), |rental| word("rental", rental)))
}

pub(super) fn word(name: &str, text: &str) -> Result<(), String> {
    let is_word = (1..=WORD_BYTES_MAX).contains(&text.len()) && !text.contains(char::is_control);
    match is_word {
        true => Ok(()),
        false => {
            Err(format!("`{name}` has to be a text of 1 to {WORD_BYTES_MAX} bytes in one line"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OFFER: &str = r#"{"offers": [{"kind": "k", "zone": "z", "spot": false, "cpus": 2, "memory_bytes": 1024, "kvm": null,
        "price": {"per_hour_micros": 0, "minimum_s": 60, "egress_per_gib_micros": 0.0, "disk_per_gib_month_micros": 5,
        "source": "s", "as_of_unix_s": 7}}]}"#;

    fn offers(text: &str) -> Result<Vec<Offer>, String> {
        let answer: Result<OffersAnswer, _> = read(text.as_bytes(), true);
        answer.map_err(|error| error.message)?.checked()
    }

    #[test]
    fn a_price_of_0_is_not_known() {
        let offers = offers(OFFER).expect("offers");
        let price = &offers[0].price;
        assert_eq!((price.per_hour_micros, price.egress_per_gib_micros), (None, None));
        assert_eq!(price.disk_per_gib_month_micros.map(u64::from), Some(5));
    }

    #[test]
    fn nonsense_is_refused_and_named() {
        for (from, to, why) in [
            ("\"per_hour_micros\": 0", "\"per_hour_micros\": -1", "-1"),
            ("\"per_hour_micros\": 0", "\"per_hour_micros\": 0.5", "0.5"),
            ("\"cpus\": 2", "\"cpus\": 0", "no CPU"),
            ("\"cpus\": 2", "\"cpus\": 99999999999", "99999999999"),
            ("\"kind\": \"k\"", "\"kind\": \"\"", "`kind`"),
            ("\"zone\": \"z\"", "\"zone\": \"a\\nb\"", "`zone`"),
            ("\"as_of_unix_s\": 7", "\"as_of_unix_s\": 99999999999", "future"),
            ("\"zone\": \"z\", ", "", "zone"),
            ("}]}", "}]} more", "no sense"),
            ("{\"offers\"", "{\"offer\"", "offers"),
        ] {
            assert!(OFFER.contains(from), "{from}");
            let error = offers(&OFFER.replace(from, to)).expect_err(to);
            assert!(error.contains(why), "{to}: {error}");
        }
        let list = OFFER.trim_end_matches("]}").trim_start_matches("{\"offers\": [");
        let error = offers(&format!("{{\"offers\": [{list}, {list}]}}")).expect_err("twice");
        assert!(error.contains("twice"), "{error}");
    }

    #[test]
    fn an_error_counts_whatever_the_exit_code() {
        let said = br#"{"error": {"kind": "no-capacity", "message": "none left"}}"#;
        for is_success in [true, false] {
            let error = read::<Done>(said, is_success).expect_err("an error");
            assert_eq!(error, CloudError::new(CloudErrorKind::NoCapacity, "none left"));
        }
        for text in ["{}", "", r#"{"error": {"kind": "free-beer", "message": ""}}"#] {
            let error = read::<Done>(text.as_bytes(), false).expect_err("an error");
            assert_eq!(error.kind, CloudErrorKind::Unclear, "{text}");
        }
        assert!(read::<Done>(b"{}", true).is_ok());
        assert!(read::<Done>(b"[1]", true).is_err());
    }

    /// What the page for authors of programs shows.
    #[test]
    fn the_documented_objects_are_read() {
        let page = include_str!("../../../../docs/providers.md");
        let blocks = page.split("```json\n").skip(1).map(|rest| rest.split("```").next());
        let [offer, new, listed]: [&str; 3] =
            blocks.flatten().collect::<Vec<_>>().try_into().expect("three blocks");
        let offers = offers(&format!("{{\"offers\": [{offer}]}}")).expect("an offer");
        assert_eq!(offers[0].price.per_hour_micros.map(u64::from), Some(27_400));
        let new: NewInstance = serde_json::from_str(new).expect("an order");
        assert_eq!(new.disk_bytes, 50 << 30);
        let (instance, notice) = listed.trim().rsplit_once('\n').expect("two objects");
        let answer = format!("{{\"instances\": [{instance}]}}");
        let answer: InstancesAnswer = read(answer.as_bytes(), true).expect("an answer");
        assert_eq!(answer.checked("c1").expect("instances")[0].id, "4711");
        let answer = format!("{{\"notices\": [{notice}]}}");
        let answer: NoticesAnswer = read(answer.as_bytes(), true).expect("an answer");
        assert_eq!(answer.checked().expect("notices")[0].ends_unix_s, 1_795_953_720);
    }

    proptest! {
        #[test]
        fn damaged_answers_end_in_no_panic(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            end in any::<prop::sample::Index>(),
        ) {
            let mut bytes = OFFER.as_bytes().to_vec();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(end.index(bytes.len() + 1));
            if let Ok(answer) = read::<OffersAnswer>(&bytes, true) {
                let _ = answer.checked();
            }
            let _ = read::<InstancesAnswer>(&bytes, false);
        }
    }
}
