//! `/enrol`, `/revoked`, and the certificates below `/hosts`

use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use perigee_http::trust::Revoked;
use perigee_http::{ClientAddress, Json, Reply};
use perigee_model::enrol::{
    CheckHost, CheckToken, Enrol, Enrolled, HostRevoked, HostSeen, MadeToken, NewToken,
    RenewCertificate,
};
use perigee_model::{HostId, Problem};

use super::{Name, Shared, json, to_its_end};
use crate::hosts::{enrol, look_back};

/// Makes a token with which the host joins the cluster. It is good for one time and one hour, and replaces an earlier one.
#[utoipa::path(post, path = "/hosts/{host}/token", tag = "hosts", params(("host" = String, Path)),
    request_body = NewToken, responses((status = 200, body = MadeToken)))]
pub async fn token(
    State(cluster): Shared,
    Name(host): Name<HostId>,
    Json(ask): Json<NewToken>,
) -> Reply<MadeToken> {
    let token = enrol::token(&cluster, host, ask.controller_url).await?.to_string();
    json(MadeToken { token })
}

/// Gives a host that has a token its first certificate.
#[utoipa::path(post, path = "/enrol", tag = "hosts", request_body = Enrol,
    responses((status = 200, body = Enrolled)))]
pub async fn enrol(State(cluster): Shared, Json(ask): Json<Enrol>) -> Reply<Enrolled> {
    json(enrol::enrol(&cluster, ask).await?)
}

/// Says to a host that has a token how the controller sees it. The token stays good.
#[utoipa::path(post, path = "/enrol/check", tag = "hosts", request_body = CheckToken,
    responses((status = 200, body = HostSeen)))]
pub async fn check_token(
    State(cluster): Shared,
    Extension(ClientAddress(from)): Extension<ClientAddress>,
    Json(CheckToken { host, secret, check }): Json<CheckToken>,
) -> Reply<HostSeen> {
    json(look_back::with_token(&cluster, (&host, &secret), (check, from)).await?)
}

/// Says to a host how the controller sees it. Only the host itself may ask.
#[utoipa::path(post, path = "/hosts/{host}/check", tag = "hosts", params(("host" = String, Path)),
    request_body = CheckHost, responses((status = 200, body = HostSeen)))]
pub async fn check(
    State(cluster): Shared,
    Name(host): Name<HostId>,
    Extension(ClientAddress(from)): Extension<ClientAddress>,
    Json(ask): Json<CheckHost>,
) -> Reply<HostSeen> {
    json(look_back::at_host(&cluster, &host, (ask, from)).await?)
}

/// Gives a host its next certificate. Only the host itself may ask.
#[utoipa::path(post, path = "/hosts/{host}/certificate", tag = "hosts", params(("host" = String, Path)),
    request_body = RenewCertificate, responses((status = 200, body = Enrolled)))]
pub async fn renew(
    State(cluster): Shared,
    Name(host): Name<HostId>,
    Json(ask): Json<RenewCertificate>,
) -> Reply<Enrolled> {
    json(enrol::renew(&cluster, &host, &ask.public_key).await?)
}

/// The certificates that the host has do not count any more.
#[utoipa::path(post, path = "/hosts/{host}/revoke", tag = "hosts", params(("host" = String, Path)),
    responses((status = 200, body = HostRevoked)))]
pub async fn revoke_host(State(cluster): Shared, Name(host): Name<HostId>) -> Reply<HostRevoked> {
    json(to_its_end(async move { enrol::revoke_host(&cluster, host).await }).await?)
}

/// The certificates that operators have do not count any more.
#[utoipa::path(post, path = "/operators/revoke", tag = "hosts", responses((status = 200)))]
pub async fn revoke_operators(State(cluster): Shared) -> Reply<()> {
    json(to_its_end(async move { enrol::revoke_operators(&cluster).await }).await?)
}

/// The query of [`revoked`].
#[derive(serde::Deserialize)]
pub struct KnownList {
    known: Option<String>,
}

/// For each identity whose certificates are revoked, the time in ms up to which they are; nothing if the list is the one that is `known`.
#[utoipa::path(get, path = "/revoked", tag = "hosts",
    params(("known" = Option<String>, Query)),
    responses((status = 200, body = std::collections::BTreeMap<String, u64>)))]
pub async fn revoked(
    State(cluster): Shared,
    query: Result<Query<KnownList>, QueryRejection>,
) -> Reply<Revoked> {
    let Query(KnownList { known }) =
        query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    json(enrol::revoked_but(&cluster, known.as_deref()).await?)
}
