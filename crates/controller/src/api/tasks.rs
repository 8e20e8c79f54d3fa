//! `/tasks`

use axum::extract::State;
use perigee_http::Reply;
use perigee_model::tasks::TaskStatus;

use super::{Shared, json};

/// What each endless task of the controller did last, when, how long that took, and at what it failed.
#[utoipa::path(get, path = "/tasks", tag = "controller",
    responses((status = 200, body = Vec<TaskStatus>)))]
pub async fn list(State(cluster): Shared) -> Reply<Vec<TaskStatus>> {
    json(cluster.tasks.all())
}
