//! The driver of a rental: gathers what is known, and does the one thing that [`decide`] names, until the rental is over.

use std::sync::Arc;
use std::time::Instant;

use perigee_model::drain::{DrainFate, DrainHost, HostDrain};
use perigee_model::rental::states::{RentalEvent, RentalState, RentedHost, Step, decide};
use perigee_model::rental::{EndedBy, Instance, InstanceState, Rental};
use perigee_model::{Problem, ProblemKind, RentalId};

use super::facts::{self, rented_host, why_ends, why_late};
use super::{ask, kept, money, within};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::drain;
use crate::hosts::{self, enrol};
use crate::records::{Owned, RentalIntent, RentalRecord, rental_intent_key};

/// What a driver remembers between two steps. All of it may be lost.
#[derive(Default)]
struct Memory {
    /// When the provider was last asked to end the instance.
    ended: Option<Instant>,
    /// The same, of others that have its tag.
    ended_others: Option<Instant>,
}

/// Drives a rental until it is over.
///
/// # Errors
/// If the store can't be used. The driver is started again then.
pub async fn drive(cluster: Arc<Cluster>, id: RentalId) -> Result<(), Problem> {
    // A request may have been under way when the last driver ended.
    if !cluster.rentals.is_watched(&id) {
        cluster.rentals.look_anew(&id);
    }
    let Some(mut record) = cluster.own_rental(&id).await? else { return Ok(()) };
    let mut memory = Memory::default();
    loop {
        let intent_key = rental_intent_key(&id);
        let intent: RentalIntent = cluster.records.read(&intent_key).await?.unwrap_or_default();
        observe(&cluster, &mut record, &intent).await?;
        let known = facts::known(&cluster, &record.value.view, &intent).await?;
        end_others(&cluster, &record.value.view, known.host, &mut memory).await;
        let step = decide(&known);
        match step {
            Step::Wait if known.state.is_over() => {
                cluster.records.remove(&intent_key).await?;
                return Ok(());
            }
            Step::Wait => {
                let why = waits_for(&cluster, &record.value.view, known.host);
                say(&mut record, &why).await?;
            }
            Step::Ask => ask_or_give_up(&cluster, &mut record).await?,
            Step::Event(event) => take(&cluster, &mut record, event).await?,
            Step::Drain => empty(&cluster, &mut record).await?,
            Step::End => end(&cluster, &mut record, &mut memory).await?,
            Step::Forget => forget(&cluster, &mut record).await?,
        }
        if !matches!(step, Step::Event(_)) {
            tokio::select! {
                () = cluster.rentals.changed.notified() => {}
                () = tokio::time::sleep(cluster.timing.monitor) => {}
            }
        }
    }
}

/// Takes note of what the provider shows, of why the rental is to end, and of the money that it needs next.
async fn observe(
    cluster: &Arc<Cluster>,
    record: &mut Owned<RentalRecord>,
    intent: &RentalIntent,
) -> Result<(), Problem> {
    let before = record.value.view.clone();
    if let Some(instance) = chosen(cluster, record) {
        ask::note_instance(&mut record.value.view, &instance);
    }
    let view = &mut record.value.view;
    if !view.state.is_over() {
        view.notice_ms = view.notice_ms.or_else(|| notice_ms(cluster, view));
        if view.joined_ms.is_none() && cluster.hosts.get(&view.host).is_ok() {
            view.joined_ms = Some(now_ms());
        }
        if let Some((by, why)) = why_ends(cluster, view, intent) {
            view.end(by, why);
        }
        if view.joined_ms.is_some() && view.found.is_none() {
            view.found = facts::found(cluster, view);
        }
        if view.state == RentalState::Joined && view.first_job_ms.is_none() {
            view.first_job_ms = facts::first_job_ms(cluster, view);
        }
    }
    if let (true, Some(address)) = (view.address != before.address, view.address.clone()) {
        enrol::bind_token(cluster, &view.host, &address).await?;
    }
    if *view != before {
        record.save().await?;
    }
    let view = &record.value.view;
    let may_cost = match view.state {
        RentalState::Starting | RentalState::Joined | RentalState::Draining => true,
        // No list shows its instance, and its host has joined.
        RentalState::Asked => view.joined_ms.is_some(),
        RentalState::Wanted | RentalState::Ending | RentalState::Gone => false,
    };
    if may_cost {
        reserve_more(cluster, record, intent).await?;
    }
    Ok(())
}

/// When the provider takes the instance back, as the provider or the host itself says; Unix time.
fn notice_ms(cluster: &Cluster, rental: &Rental) -> Option<u64> {
    let heard_there = || {
        let report = cluster.hosts.report(&rental.host)?;
        Some(report.notice.as_ref()?.ends_unix_s.saturating_mul(1000))
    };
    cluster.rentals.notice_ms(rental).or_else(heard_there)
}

/// A rental whose money can't be reserved any longer is given back.
async fn reserve_more(
    cluster: &Cluster,
    record: &mut Owned<RentalRecord>,
    intent: &RentalIntent,
) -> Result<(), Problem> {
    let view = &record.value.view;
    // What nobody has asked for was not reserved for either.
    if view.since_ms(RentalState::Asked).is_none() {
        return Ok(());
    }
    let needs_s = money::reserve_for_s(cluster, view, None);
    let wanted_s = money::reserve_for_s(cluster, view, intent.reserve_until_ms);
    // What its jobs would like to have is no reason to give it back: the renting rule decides about that.
    if let Some(wanted_s) = wanted_s.filter(|_| wanted_s > needs_s) {
        match money::reserve(cluster, view, wanted_s).await {
            Err(problem) if is_no(&problem) => {}
            other => return other,
        }
    }
    let Some(for_s) = needs_s else { return Ok(()) };
    match money::reserve(cluster, view, for_s).await {
        Err(problem) if !is_no(&problem) => Err(problem),
        Err(problem) if view.ends_because.is_none() => {
            record.value.view.end(EndedBy::Money, problem.why);
            record.save().await
        }
        _ => Ok(()),
    }
}

/// Whether the money can't be reserved, and the ledger has not failed.
fn is_no(problem: &Problem) -> bool {
    matches!(problem.kind, ProblemKind::Conflict | ProblemKind::Invalid)
}

/// The instance that is the rental's, of those that the provider shows: the one whose host has joined, else the one that is known, else the
/// first one. A list that lacks the known one says nothing.
fn chosen(cluster: &Cluster, record: &Owned<RentalRecord>) -> Option<Instance> {
    let view = &record.value.view;
    let all = cluster.rentals.listed(view);
    let lacks = |id: &String| !all.iter().any(|one| one.id == *id);
    if view.instance.as_ref().is_some_and(lacks) {
        return None;
    }
    let is_there = |one: &&Instance| one.state != InstanceState::Gone && ask::is_sane(one);
    let mut there: Vec<&Instance> = all.iter().filter(is_there).collect();
    there.sort_by_cached_key(|one| {
        let is_known = view.instance.as_ref() == Some(&one.id);
        (!is_of_host(cluster, view, one), !is_known, one.started_unix_s, one.id.clone())
    });
    there.first().copied().cloned()
}

/// Whether the rental's host, which has joined, is at the instance's address.
fn is_of_host(cluster: &Cluster, rental: &Rental, instance: &Instance) -> bool {
    let Ok(link) = cluster.hosts.get(&rental.host) else { return false };
    let url = &link.addresses.agent_url;
    let authority = perigee_http::authority_of(url).unwrap_or(url);
    let ip = authority.rsplit_once(':').map_or(authority, |(ip, _)| ip);
    instance.address.as_deref() == Some(ip.trim_matches(['[', ']']))
}

/// Ends what a provider has made besides the rental's instance, where that can't be what the rental's host runs on.
async fn end_others(cluster: &Cluster, rental: &Rental, host: RentedHost, memory: &mut Memory) {
    let Some(own) = rental.instance.as_ref() else { return };
    let (all, hurry) = (cluster.rentals.listed(rental), cluster.timing.rentals.hurry);
    let is_sure = host == RentedHost::Unknown
        || all.iter().any(|one| one.id == *own && is_of_host(cluster, rental, one));
    let others = all.iter().filter(|one| one.id != *own && one.state != InstanceState::Gone);
    let others: Vec<&Instance> = others.collect();
    let is_listed = all.iter().any(|one| one.id == *own);
    let is_soon = memory.ended_others.is_some_and(|at| at.elapsed() < hurry);
    if !is_sure || !is_listed || is_soon || others.is_empty() {
        return;
    }
    memory.ended_others = Some(Instant::now());
    let Ok(provider) = cluster.settings.renting.provider(&rental.provider) else { return };
    for other in others {
        tracing::warn!(rental = %rental.id, "the provider made instance {} beside {own}; it is ended", other.id);
        if let Err(error) = within(cluster.timing.rentals.answer, provider.end(&other.id)).await {
            tracing::warn!(rental = %rental.id, "instance {} is not ended: {error}", other.id);
        }
    }
}

async fn ask_or_give_up(
    cluster: &Arc<Cluster>,
    record: &mut Owned<RentalRecord>,
) -> Result<(), Problem> {
    let Err(problem) = ask::ask(cluster, record).await else { return Ok(()) };
    let is_final = matches!(
        problem.kind,
        ProblemKind::Conflict
            | ProblemKind::Invalid
            | ProblemKind::NotFound
            | ProblemKind::Forbidden
    );
    if !is_final {
        return Err(problem);
    }
    let view = &mut record.value.view;
    view.why = problem.to_string();
    view.end(EndedBy::NotAsked, problem.why);
    record.save().await
}

/// Records an event. A host that has not joined never joins once its rental ends.
async fn take(
    cluster: &Arc<Cluster>,
    record: &mut Owned<RentalRecord>,
    event: RentalEvent,
) -> Result<(), Problem> {
    let (before, host) = (record.value.view.state, record.value.view.host.clone());
    let next = before.next(event)?;
    let is_end = |state| matches!(state, RentalState::Ending | RentalState::Gone);
    if is_end(next) && !is_end(before) {
        record.value.secret = None;
        let is_out = enrol::shut_out(cluster, &host).await?;
        let is_given_up = matches!(before, RentalState::Asked | RentalState::Starting);
        if is_given_up && !is_out && rented_host(cluster, &host).await? == RentedHost::Up {
            // It has joined just before, and may have VMs.
            return Ok(());
        }
    }
    let view = &mut record.value.view;
    match event {
        RentalEvent::GivenBack => {
            let (by, why) = why_late(cluster, view);
            view.end(by, why);
        }
        RentalEvent::Vanished => {
            view.end(EndedBy::Provider, "the provider has no such instance any more");
        }
        _ => {}
    }
    let why = why_of(event, view.ends_because.as_deref());
    if next.is_over() {
        money::settle(cluster, view).await?;
    }
    view.take(event, now_ms(), why)?;
    view.why = view.ends_because.clone().unwrap_or_default();
    if next == RentalState::Joined {
        record.value.secret = None;
    }
    record.save().await?;
    let view = &record.value.view;
    tracing::info!(rental = %view.id, "rented host {} is {}: {}", view.host, view.state, view.why);
    cluster.rentals.changed.notify_waiters();
    if view.state == RentalState::Joined {
        // Jobs that wait may wait for it.
        cluster.index.changed.notify_one();
    }
    Ok(())
}

fn why_of(event: RentalEvent, ends_because: Option<&str>) -> String {
    match (event, ends_because) {
        (RentalEvent::GivenBack, Some(why)) => why.to_owned(),
        (RentalEvent::Vanished, _) => "the provider shows no instance of it".to_owned(),
        (RentalEvent::Emptied, _) => "nothing that is kept is there any more".to_owned(),
        _ => String::new(),
    }
}

/// Saves what it waits for, if that is something else than before.
async fn say(record: &mut Owned<RentalRecord>, why: &str) -> Result<(), Problem> {
    if why.is_empty() || record.value.view.why == why {
        return Ok(());
    }
    record.value.view.why = why.to_owned();
    record.save().await
}

fn waits_for(cluster: &Cluster, rental: &Rental, host: RentedHost) -> String {
    let provider = &rental.provider;
    match (rental.state, host) {
        (RentalState::Starting, _) => "its host starts".to_owned(),
        (RentalState::Joined, RentedHost::Up) => "its host is up".to_owned(),
        (RentalState::Joined, _) => "its host does not answer".to_owned(),
        (RentalState::Wanted, _) if !cluster.rentals.has_listed(provider) => {
            let why = cluster.rentals.no_list(provider).unwrap_or_default();
            format!("{provider} is asked when it has listed its instances once; {why}")
        }
        // What the provider said stands there.
        _ => String::new(),
    }
}

/// Has its host drained, and says what is still there.
async fn empty(cluster: &Arc<Cluster>, record: &mut Owned<RentalRecord>) -> Result<(), Problem> {
    let host = record.value.view.host.clone();
    let by = format!("rental {}", record.value.view.id);
    let dry_run = cluster.hosts.drain(&host).is_some();
    let why = match drain::drain(cluster, &host, by, DrainHost { dry_run }).await {
        Ok(drain) => left_in_words(&drain),
        Err(problem) => problem.to_string(),
    };
    let silent = rented_host(cluster, &host).await? != RentedHost::Up;
    let why = match silent {
        true => format!("{}; what is there is not known", cluster.hosts.silence(&host)),
        false if why.is_empty() => kept::why_waits(cluster, &record.value.view).await?,
        false => why,
    };
    say(record, &why.chars().take(2000).collect::<String>()).await
}

fn left_in_words(drain: &HostDrain) -> String {
    let left = drain.left.as_deref().unwrap_or_default();
    let stays = |fate| left.iter().filter(move |step| step.fate == fate);
    let stuck: Vec<String> = stays(DrainFate::Stays)
        .take(5)
        .map(|step| format!("{} {} can't leave: {}", step.kind, step.name, step.why))
        .collect();
    match (left.len(), stuck.is_empty()) {
        (0, _) => String::new(),
        (all, true) => format!("{all} things leave its host first"),
        (all, false) => format!(
            "{all} things are at its host: {}; `perigee rent end --now` gives them up",
            stuck.join("; ")
        ),
    }
}

/// Has the provider end all that it shows of the rental.
async fn end(
    cluster: &Arc<Cluster>,
    record: &mut Owned<RentalRecord>,
    memory: &mut Memory,
) -> Result<(), Problem> {
    if memory.ended.is_some_and(|at| at.elapsed() < cluster.timing.rentals.hurry) {
        return Ok(());
    }
    memory.ended = Some(Instant::now());
    let view = &record.value.view;
    let provider = match cluster.settings.renting.provider(&view.provider) {
        Ok(provider) => Arc::clone(provider),
        Err(problem) => return say(record, &format!("it can't be ended: {problem}")).await,
    };
    let mut ids: Vec<String> = cluster
        .rentals
        .listed(view)
        .into_iter()
        .filter(|one| one.state != InstanceState::Gone)
        .map(|one| one.id)
        .collect();
    ids.extend(view.instance.clone().filter(|id| !ids.contains(id)));
    let mut because = view.ends_because.clone().unwrap_or_default();
    if let Some(why) = cluster.rentals.no_list(&view.provider) {
        because = format!("{because}; whether it is gone is not known: {why}");
    }
    for id in ids {
        let ended = within(cluster.timing.rentals.answer, provider.end(&id)).await;
        let why = match ended {
            Ok(()) => because.clone(),
            Err(error) => format!("{because}; the provider does not end {id}: {error}"),
        };
        say(record, &why).await?;
    }
    Ok(())
}

/// Its instance is gone, so its host never comes back.
async fn forget(cluster: &Arc<Cluster>, record: &mut Owned<RentalRecord>) -> Result<(), Problem> {
    let host = record.value.view.host.clone();
    match hosts::remove(cluster, &host, true).await {
        Ok(_) => Ok(()),
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        Err(problem) => {
            say(record, &format!("its host can't be removed yet: {}", problem.why)).await
        }
    }
}
