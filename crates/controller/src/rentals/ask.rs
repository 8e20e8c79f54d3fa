//! Asks a provider for an instance: first the record, then the provider.

use std::sync::Arc;

use perigee_cloud::{CloudError, CloudErrorKind};
use perigee_model::Problem;
use perigee_model::kept::PoolDisk;
use perigee_model::rental::states::{RentalEvent, Requested};
use perigee_model::rental::{
    EndedBy, Instance, KIND_UNKNOWN, NewInstance, Offer, OfferRefused, Rental,
};

use super::{cluster_id, kept, money, user_data, within};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::hosts::enrol;
use crate::records::{Owned, RentalRecord};

/// Ids, addresses, kinds and zones of a provider are short.
pub const TEXT_MAX: usize = 256;

/// Reserves the money, records that the provider is asked, asks it, and records the answer.
///
/// # Errors
/// `Conflict` or `Invalid` if nothing may be asked for; if the store can't be used.
pub async fn ask(cluster: &Arc<Cluster>, record: &mut Owned<RentalRecord>) -> Result<(), Problem> {
    let view = &record.value.view;
    let provider = Arc::clone(cluster.settings.renting.provider(&view.provider)?);
    let pool = kept::disk(cluster, provider.as_ref(), view).await?;
    let new = new_instance(cluster, &mut record.value, pool).await?;
    let id = record.value.view.id.clone();
    let before = record.value.view.requested;
    let view = &mut record.value.view;
    // RESERVED HERE, before the provider is asked.
    if let Some(for_s) = money::reserve_for_s(cluster, view, None) {
        money::reserve(cluster, view, for_s).await?;
    }
    let (asked_ms, reserved) = (now_ms(), cluster.rentals.with_money(view.clone()).reserved);
    view.take(RentalEvent::Asks, asked_ms, format!("reserved {reserved}"))?;
    view.requested = Requested::Perhaps;
    view.asks += 1;
    view.asked_ms = Some(asked_ms);
    view.why = "the provider was asked".to_owned();
    cluster.rentals.request_begins(&id);
    record.save().await?;
    let answer = within(cluster.timing.rentals.answer, provider.create(&new)).await;
    cluster.rentals.look_anew(&id);
    let view = &mut record.value.view;
    let is_anothers = |instance: &Instance| cluster.rentals.is_anothers(view, instance);
    match answer.and_then(|instance| sane(instance, is_anothers)) {
        Ok(instance) => {
            note_instance(view, &instance);
            if let Some(address) = &instance.address {
                enrol::bind_token(cluster, &view.host, address).await?;
            }
            view.take(RentalEvent::Shown, now_ms(), "")?;
            view.why = "its host starts".to_owned();
        }
        Err(error) => {
            let quota = provider.quota_of(&view.offer.kind);
            note_error(view, before, &error, quota);
        }
    }
    record.save().await?;
    cluster.rentals.changed.notify_waiters();
    Ok(())
}

/// An answer that makes no sense says nothing of what was done.
fn sane(
    instance: Instance,
    is_anothers: impl Fn(&Instance) -> bool,
) -> Result<Instance, CloudError> {
    let message = match (is_sane(&instance), is_anothers(&instance)) {
        (true, false) => return Ok(instance),
        (true, true) => {
            format!("the provider gives instance {}, which another rental has", instance.id)
        }
        (false, _) => format!(
            "the provider gives an instance without an id, or one with an id, address, kind or zone of more than {TEXT_MAX} bytes"
        ),
    };
    Err(CloudError { kind: CloudErrorKind::Unclear, message })
}

/// Whether what a provider says of an instance can be kept.
pub fn is_sane(instance: &Instance) -> bool {
    let Instance { id, address, kind, zone, .. } = instance;
    let address = address.as_deref().unwrap_or_default();
    !id.is_empty() && [id, address, kind, zone].iter().all(|text| text.len() <= TEXT_MAX)
}

/// What the provider says of the instance. One that is not what was rented has another price, and is given back.
pub fn note_instance(view: &mut Rental, instance: &Instance) {
    view.instance = Some(instance.id.clone());
    if instance.address.is_some() {
        view.address.clone_from(&instance.address);
    }
    if let Some(why) = not_as_rented(&view.offer, instance) {
        view.end(EndedBy::OtherKind, why);
    }
}

/// Why an instance is not the one that was rented. A kind that the provider does not say is not known, and no other one.
fn not_as_rented(offer: &Offer, instance: &Instance) -> Option<String> {
    let is_said = !["", KIND_UNKNOWN].contains(&instance.kind.as_str());
    let spot = |is_spot| if is_spot { "spot" } else { "on demand" };
    let is_other = (is_said && instance.kind != offer.kind) || instance.spot != offer.spot;
    is_other.then(|| {
        format!(
            "the provider has made a {} ({}), and a {} ({}) was rented: what it costs is not known",
            instance.kind,
            spot(instance.spot),
            offer.kind,
            spot(offer.spot)
        )
    })
}

/// A refusal says that this request made nothing, and nothing of the requests before. `quota`: that in which the kind counts.
fn note_error(view: &mut Rental, before: Requested, error: &CloudError, quota: Option<String>) {
    let why: String = format!("{}: {}", error.kind, error.message).chars().take(1000).collect();
    let ended_by = match error.kind {
        CloudErrorKind::Unclear => return view.why = why,
        CloudErrorKind::Throttled => None,
        CloudErrorKind::NoCapacity | CloudErrorKind::Quota => {
            view.refused = Some(OfferRefused {
                kind: view.offer.kind.clone(),
                zone: view.offer.zone.clone(),
                spot: view.offer.spot,
                why: why.clone(),
                at_ms: now_ms(),
                quota: quota.filter(|_| error.kind == CloudErrorKind::Quota),
                cpus: view.offer.cpus,
            });
            Some(EndedBy::Refused)
        }
        CloudErrorKind::NotAllowed => Some(EndedBy::NotAllowed),
        CloudErrorKind::Refused => Some(EndedBy::Refused),
    };
    if before == Requested::Nothing {
        let is_final = ended_by.is_some();
        view.requested = if is_final { Requested::Refused } else { Requested::Nothing };
    }
    if let Some(ended_by) = ended_by {
        view.end(ended_by, why.clone());
    }
    view.why = why;
}

/// What the provider is asked for: the same each time, so that a provider that honours the request's token gives the same instance.
async fn new_instance(
    cluster: &Cluster,
    record: &mut RentalRecord,
    pool: Option<PoolDisk>,
) -> Result<NewInstance, Problem> {
    let (host, url) = (record.view.host.clone(), record.controller_url.clone());
    let url = url.ok_or_else(|| {
        let why = "the controller listens at no address that other machines reach";
        Problem::invalid(format!("can't rent host {host}"), why)
            .next("name the address at which the host reaches the controller: --controller URL")
    })?;
    let token = match cluster.network.identity() {
        None => None,
        Some(_) => {
            let secret = record.secret.get_or_insert_with(enrol::new_secret).clone();
            let life = cluster.timing.rentals.join;
            Some(enrol::token_of(cluster, host, secret, url.clone(), life).await?)
        }
    };
    let (view, lease) = (&record.view, cluster.timing.rentals.lease);
    Ok(NewInstance {
        rental: view.id.to_string(),
        cluster: cluster_id(cluster),
        kind: view.offer.kind.clone(),
        zone: view.offer.zone.clone(),
        spot: view.offer.spot,
        max_per_hour_micros: view.offer.price.per_hour_micros.filter(|_| view.offer.spot),
        kvm: view.offer.kvm == Some(true),
        image: view.image.clone(),
        disk_bytes: view.disk_bytes,
        user_data: user_data::script(view, &url, token.as_ref(), lease, pool.as_ref()),
        pool,
    })
}
