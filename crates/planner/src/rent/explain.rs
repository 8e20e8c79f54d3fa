//! The figures of a decision, in words.

use perigee_model::money::Money;
use perigee_model::rental::Offer;
use perigee_model::units::format_seconds;

use super::drain::UseOf;
use super::{Host, Rented};

pub(super) fn rent(
    offer: &Offer,
    use_of: &UseOf,
    saves: Money,
    machine: Money,
    reserve: Money,
    left: Money,
) -> String {
    format!(
        "{} of {} jobs of the queue go there; all of them together save {saves} of waiting and egress, and the machine costs {machine} for {} \
         in {}, {}; {reserve} of {left} are reserved",
        use_of.jobs.len(),
        use_of.of,
        format_seconds(use_of.ends_s),
        offer.zone,
        if offer.spot { "as spot" } else { "on demand" },
    )
}

pub(super) fn no_budget(host: &Host, more: Option<Money>, left: Money) -> String {
    let busy = host.running.len();
    more.map_or_else(
        || "its price is not known any more".to_owned(),
        |more| format!("its {busy} jobs would need {more} more, and {left} of the budget are left"),
    )
}

pub(super) fn busy(host: &Host) -> String {
    match host.running.len() {
        0 => format!("it is starting: {} to go", format_seconds(host.ready_in_s)),
        jobs => format!("{jobs} jobs run there"),
    }
}

pub(super) fn minimum(paid_s: f64, minimum_s: f64) -> String {
    format!(
        "{} of the {} that are paid in any case",
        format_seconds(paid_s),
        format_seconds(minimum_s)
    )
}

pub(super) fn idle(idle_s: f64, most_s: f64, rented: &Rented) -> String {
    format!(
        "idle for {}: a new start would cost as much as {} of idling, with {}/h for those who wait",
        format_seconds(idle_s),
        format_seconds(most_s),
        rented.waiting_per_hour
    )
}

pub(super) fn idle_too_long(idle_s: f64, most_s: f64, rented: &Rented) -> String {
    format!(
        "idle for {}, and no job of the queue goes there: a new start would cost only as much as {} of idling, with {}/h for those who wait",
        format_seconds(idle_s),
        format_seconds(most_s),
        rented.waiting_per_hour
    )
}
