//! `/upgrade`

use axum::extract::State;
use perigee_http::{Json, Reply};
use perigee_model::upgrade::{FinishUpgrade, Upgrade};

use super::{Shared, json, to_its_end};
use crate::upgrade;

/// The versions of the controller and of each host's daemons, which are asked for them now; what of an upgrade is held back, and why it can't
/// be ended.
#[utoipa::path(get, path = "/upgrade", tag = "controller",
    responses((status = 200, body = Upgrade)))]
pub async fn upgrade_status(State(cluster): Shared) -> Reply<Upgrade> {
    json(upgrade::status(&cluster).await?)
}

/// Ends an upgrade: from now on the controller may write what the version of before can't read. Refused while a daemon is older, off or of a
/// version that is not known.
#[utoipa::path(post, path = "/upgrade/finish", tag = "controller", request_body = FinishUpgrade,
    responses((status = 200, body = Upgrade)))]
pub async fn finish_upgrade(
    State(cluster): Shared,
    Json(ask): Json<FinishUpgrade>,
) -> Reply<Upgrade> {
    json(to_its_end(async move { upgrade::finish(&cluster, ask).await }).await?)
}
