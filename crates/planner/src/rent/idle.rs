//! How long a rented host is kept, and what has to be reserved for it.

use perigee_model::money::{Money, Price};

use super::drain::Drains;
use super::{AHEAD_S, Decision, GiveBack, Host, Keep, Rented, SPOT_RISES, Start, drain, explain};

/// Whole seconds, rounded up.
pub(super) fn whole_s(seconds: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(seconds.ceil().max(0.0))
        .map_or(u64::MAX, |time| time.as_secs())
}

/// What a machine costs for so many seconds, at least its minimum; `None` if that is not known.
pub(super) fn machine(price: &Price, seconds: f64) -> Option<Money> {
    price.machine(whole_s(seconds))
}

/// The high end of the same.
pub(super) fn high(price: &Price, spot: bool, seconds: f64) -> Option<Money> {
    let rises = if spot { SPOT_RISES } else { 1 };
    machine(price, seconds).map(|money| Money::from_micros(money.micros.saturating_mul(rises)))
}

/// For how many seconds an idle host is kept: as long as idling costs less than a new start, which is paid for itself and for which jobs
/// wait that cost so much in an hour together.
pub(super) fn tail_s(price: &Price, start: Start, waiting_per_hour: Money) -> f64 {
    let Some(per_hour) = price.per_hour_micros else { return 0.0 };
    let per_hour = Money::from_micros(per_hour.get());
    start.expected_s * (1.0 + drain::micros(waiting_per_hour) / drain::micros(per_hour))
}

/// How far ahead the host's cost has to be reserved: until its jobs have ended in 9 of 10 cases, and then until the host has surely gone.
fn needed_s(host: &Host) -> f64 {
    let longest_s = host.running.iter().map(|job| job.left_high_s).fold(host.ready_in_s, f64::max);
    longest_s + AHEAD_S
}

/// What has to be reserved for the host beside what is; `None` if what is left does not pay for that, and the host has time until it must go.
///
/// # Errors
/// It must go now.
pub(super) fn reserved(host: &Host, left: Money) -> Result<Option<Money>, String> {
    let more = more(host);
    let has_time = host.rented.as_ref().is_some_and(|rented| rented.reserved_s > AHEAD_S);
    match more {
        Some(more) if more <= left => Ok(Some(more)),
        Some(_) if has_time => Ok(None),
        _ => Err(explain::no_budget(host, more, left)),
    }
}

fn more(host: &Host) -> Option<Money> {
    let Some(rented) = &host.rented else { return Some(Money::ZERO) };
    let more_s = needed_s(host) - rented.reserved_s;
    if more_s <= 0.0 {
        return Some(Money::ZERO);
    }
    // The minimum was paid at the start.
    let price = Price { minimum_s: 0, ..rented.price.clone() };
    high(&price, rented.spot, more_s)
}

/// Whether the host is kept, for which so much `more` is reserved, or given back.
pub(super) fn stay(
    host: &Host,
    rented: &Rented,
    is_used: bool,
    more: Money,
    drains: &Drains,
) -> Decision {
    let reaches_s = if more > Money::ZERO { needed_s(host) } else { 0.0 };
    let keep = |why: String| {
        Decision::Keep(Keep {
            host: host.host.clone(),
            reserve: more,
            reserved_s: reaches_s.max(rented.reserved_s),
            why,
        })
    };
    let Some(idle_s) = rented.idle_s else { return keep(explain::busy(host)) };
    if is_used {
        return keep("jobs of the queue will start there".to_owned());
    }
    let start = drains.start(&rented.kind);
    let most_s = tail_s(&rented.price, start, rented.waiting_per_hour);
    let minimum_s = f64::from(rented.price.minimum_s);
    if rented.paid_s < minimum_s {
        return keep(explain::minimum(rented.paid_s, minimum_s));
    }
    if idle_s < most_s {
        return keep(explain::idle(idle_s, most_s, rented));
    }
    let why = explain::idle_too_long(idle_s, most_s, rented);
    Decision::GiveBack(GiveBack { host: host.host.clone(), why })
}
