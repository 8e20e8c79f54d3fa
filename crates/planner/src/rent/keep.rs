//! Whether the disk of a rented host that is given back is worth to be kept at the provider, so that its replicas need not be shipped again.
//!
//! What is compared is money: what the snapshot costs until a host is likely rented there again, and what shipping the same bytes once more would
//! cost: what leaves their homes' sites, and the time by the word of who waits. Once keeping has cost as much as shipping, it ends: whatever
//! comes next, both together cost at most twice what the better of the two does (the ski-rental rule). A price of a snapshot that is not known
//! is never free, and what shipping would cost beyond what is known does not count: nothing is paid for a gain that nobody knows.

use perigee_model::kept::KeptDisk;
use perigee_model::money::Money;
use perigee_model::units::{format_bytes, format_seconds};

use super::idle::whole_s;

/// If nobody knows when a host is rented there again: a week.
pub const UNKNOWN_NEED_S: f64 = 7.0 * 86_400.0;

/// A replica at the host.
#[derive(Debug, Clone)]
pub struct Shipped {
    /// What its volume has, all of which would be shipped again.
    pub bytes: u64,
    /// What each GiB costs that leaves the home's site; `None`: not known.
    pub egress_per_gib: Option<Money>,
    /// How many bytes a second come from there; `None`: not known.
    pub bytes_per_s: Option<u64>,
}

/// What is known of a disk.
#[derive(Debug, Clone)]
pub struct KeepFacts {
    /// What would be paid for.
    pub stored_bytes: u64,
    /// The snapshot's price for each GiB and month; `None`: not known.
    pub per_gib_month: Option<Money>,
    /// For how long no host was rented there before, each time, in seconds.
    pub gaps_s: Vec<f64>,
    /// What an hour of waiting costs.
    pub waiting_per_hour: Money,
    /// The replicas.
    pub replicas: Vec<Shipped>,
}

/// It is worth its price.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worth {
    /// What shipping the replicas again would cost.
    pub shipping: Money,
    /// The figures in words.
    pub why: String,
}

/// What shipping all of them again costs, as far as that is known.
fn shipping(facts: &KeepFacts) -> Money {
    let egress = |one: &Shipped| one.egress_per_gib.unwrap_or_default().of(one.bytes, 1 << 30);
    let seconds = |one: &Shipped| match one.bytes_per_s {
        Some(rate) if rate > 0 => one.bytes.div_ceil(rate),
        _ => 0,
    };
    let egress: Money = facts.replicas.iter().map(egress).sum();
    let waits_s = facts.replicas.iter().map(seconds).fold(0, u64::saturating_add);
    egress.plus(facts.waiting_per_hour.of(waits_s, 3600))
}

/// In how many seconds a host is likely rented there again: the median of the gaps.
fn needed_in_s(gaps_s: &[f64]) -> Option<f64> {
    let mut sorted = gaps_s.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// Whether keeping it is worth its price.
///
/// # Errors
/// Why not, in words.
pub fn is_worth(facts: &KeepFacts) -> Result<Worth, String> {
    let bytes = facts.replicas.iter().map(|one| one.bytes).fold(0, u64::saturating_add);
    let what = format!("{} of replicas", format_bytes(bytes));
    let per_gib_month = facts.per_gib_month.ok_or_else(|| {
        format!("{what} are not kept: the price of a snapshot is not known, and is not taken for nothing")
    })?;
    let known_s = needed_in_s(&facts.gaps_s);
    let needed_s = known_s.unwrap_or(UNKNOWN_NEED_S);
    let keeping = KeptDisk::cost(per_gib_month, facts.stored_bytes, whole_s(needed_s));
    let shipping = shipping(facts);
    let until = match known_s {
        Some(_) => {
            format!("the {} until a host is likely rented there again", format_seconds(needed_s))
        }
        None => "a week, for nobody knows when a host is rented there again".to_owned(),
    };
    let figures = format!("keeping costs {keeping} for {until}, and shipping again {shipping}");
    let unknown = facts.replicas.iter().any(|one| one.egress_per_gib.is_none());
    let figures = match unknown {
        true => {
            format!("{figures} without what is not known: the price of what leaves a home's site")
        }
        false => figures,
    };
    match keeping < shipping {
        true => Ok(Worth { shipping, why: format!("{what} are kept: {figures}") }),
        false => Err(format!("{what} are not kept: {figures}")),
    }
}

/// Why keeping it is not worth its price any more; `None` if it is. `price` is what counts now.
pub fn ends(kept: &KeptDisk, price: Option<Money>, spent: Money) -> Option<String> {
    let Some(price) = price else {
        return Some("the price of a snapshot is not known any more".to_owned());
    };
    if price > kept.per_gib_month {
        let (now, before) = (price.exact(), kept.per_gib_month.exact());
        return Some(format!("a GiB costs {now} a month now, and {before} were reserved"));
    }
    let shipping = kept.shipping;
    (spent >= shipping).then(|| {
        format!("keeping it has cost {spent}, as much as shipping again would ({shipping})")
    })
}

#[cfg(test)]
mod tests {
    use perigee_model::kept::KeptState;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn facts() -> KeepFacts {
        KeepFacts {
            stored_bytes: 10 * GIB,
            per_gib_month: Some(Money::from_micros(50_000)),
            gaps_s: vec![86_400.0, 86_400.0 * 60.0, 3600.0],
            waiting_per_hour: Money::ZERO,
            replicas: vec![Shipped {
                bytes: 10 * GIB,
                egress_per_gib: Some(Money::from_micros(90_000)),
                bytes_per_s: Some(GIB / 8),
            }],
        }
    }

    #[test]
    fn it_is_kept_if_it_costs_less_than_shipping_until_it_is_likely_needed() {
        let worth = is_worth(&facts()).expect("a day for 2 cents, and 90 cents");
        assert_eq!(worth.shipping.micros, 900_000);
        assert!(worth.why.contains("$0.02 for") && worth.why.contains("$0.90"), "{}", worth.why);
        let seldom = KeepFacts { gaps_s: vec![86_400.0 * 90.0], ..facts() };
        let why = is_worth(&seldom).expect_err("three months cost more");
        assert!(why.contains("not kept") && why.contains("$1.48"), "{why}");
    }

    #[test]
    fn without_earlier_hosts_a_week_counts() {
        let never = KeepFacts { gaps_s: Vec::new(), ..facts() };
        let worth = is_worth(&never).expect("12 cents");
        assert!(worth.why.contains("a week"), "{}", worth.why);
    }

    #[test]
    fn a_price_that_is_not_known_is_never_free() {
        let unknown = KeepFacts { per_gib_month: None, ..facts() };
        let why = is_worth(&unknown).expect_err("nobody knows");
        assert!(why.contains("is not known"), "{why}");
        let mut own = facts();
        own.replicas[0].egress_per_gib = None;
        let why = is_worth(&own).expect_err("no gain is known");
        assert!(why.contains("without what is not known"), "{why}");
    }

    #[test]
    fn where_waiting_has_a_price_the_time_of_shipping_counts() {
        let mut own = facts();
        own.replicas[0].egress_per_gib = Some(Money::ZERO);
        is_worth(&own).expect_err("shipping is free");
        own.waiting_per_hour = Money::from_micros(3_600_000);
        assert_eq!(is_worth(&own).expect("80 s for a dollar each 1000 s").shipping.micros, 80_000);
    }

    #[test]
    fn once_keeping_has_cost_as_much_as_shipping_it_ends() {
        let kept = KeptDisk {
            id: "rent-1".parse().expect("a name"),
            provider: "p".to_owned(),
            site: "s".parse().expect("a name"),
            host: "rent-1".parse().expect("a name"),
            instance: "i".to_owned(),
            volumes: Vec::new(),
            state: KeptState::Kept,
            why: String::new(),
            wanted_ms: 0,
            asked_ms: Some(0),
            kept_ms: Some(0),
            ended_ms: None,
            snapshot: Some("snap".to_owned()),
            disk_bytes: GIB,
            stored_bytes: GIB,
            per_gib_month: Money::from_micros(50_000),
            shipping: Money::from_micros(900_000),
            used_by: None,
            spent: None,
            reserved: Money::ZERO,
        };
        let (price, less) = (Some(Money::from_micros(50_000)), Money::from_micros(899_999));
        assert_eq!(ends(&kept, price, less), None);
        assert!(ends(&kept, price, kept.shipping).is_some());
        assert!(ends(&kept, None, less).is_some(), "not known");
        assert!(ends(&kept, Some(Money::from_micros(50_001)), less).is_some(), "dearer");
    }
}
