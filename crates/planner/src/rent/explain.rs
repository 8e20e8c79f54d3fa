//! The figures of a decision, in words.

use perigee_model::money::Money;
use perigee_model::rental::Offer;
use perigee_model::units::format_seconds;

use super::drain::UseOf;
use super::{Host, Rented, Snapshot};

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

/// Why nothing is rented for the jobs that wait, whatever it would cost; `None` if something may be.
pub(super) fn nobody_waits(snapshot: &Snapshot) -> Option<String> {
    let jobs = &snapshot.jobs;
    if jobs.is_empty() {
        return Some("no job waits for room".to_owned());
    }
    let costs = |worth: &super::Worth| {
        let super::Worth { waiting_per_hour, deadline_in_s, budget } = worth;
        waiting_per_hour.is_some() || deadline_in_s.is_some() || budget.is_some()
    };
    (!jobs.iter().any(|job| costs(&job.worth))).then(|| {
        format!("{} jobs wait for room, and waiting costs none of them anything", jobs.len())
    })
}

pub(super) fn enough(snapshot: &Snapshot, rented: usize) -> String {
    let most = snapshot.rented_most;
    nobody_waits(snapshot).unwrap_or_else(|| match rented >= most {
        true => format!("{rented} hosts are rented, and {most} may be at once"),
        false => "more may be rented at the next look".to_owned(),
    })
}

pub(super) fn no_offers(snapshot: &Snapshot) -> String {
    let all = snapshot.offers.len();
    if all == 0 {
        return "no provider says that it has a kind to rent".to_owned();
    }
    let unknown = snapshot.offers.iter().filter(|offer| offer.price.per_hour_micros.is_none());
    let unknown = unknown.count();
    let refused = snapshot.offers.iter().filter(|offer| snapshot.is_refused(offer)).count();
    format!(
        "none of {all} offers can be had: {unknown} have no known price, {refused} were refused lately, and no job that waits can run at the others"
    )
}

fn named(offer: &Offer) -> String {
    let spot = if offer.spot { "spot " } else { "" };
    format!("a {spot}{} in {}", offer.kind, offer.zone)
}

/// `left` is what is left of the budget if it is too little for the jobs.
pub(super) fn no_job_goes(offer: &Offer, left: Option<Money>) -> String {
    let named = named(offer);
    left.map_or_else(
        || format!("no job that waits would end for less at {named}"),
        |left| format!("{left} of the budget are left, which does not pay for a job at {named}"),
    )
}

pub(super) fn too_dear(offer: &Offer, saves: Money, machine: Money) -> String {
    let named = named(offer);
    format!("{named} would save {saves} of waiting and egress, and cost {machine}")
}

pub(super) fn over_budget(
    offer: &Offer,
    saves: Money,
    machine: Money,
    reserve: Money,
    left: Money,
) -> String {
    let too_dear = too_dear(offer, saves, machine);
    format!("{too_dear}, but {reserve} have to be reserved, and {left} of the budget are left")
}
