//! The data repository's doors of this cluster, and what its users may do there.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use perigee_http::Failure;
use perigee_model::Problem;
use perigee_repository::{Account, Quota};

use crate::api::Caller;
use crate::cluster::Cluster;

/// The HTTP doors of the repository.
pub fn router(cluster: &Arc<Cluster>) -> Router {
    let doors = perigee_repository::router(Arc::clone(&cluster.repository));
    doors.layer(from_fn_with_state(Arc::clone(cluster), with_account))
}

async fn with_account(
    State(cluster): State<Arc<Cluster>>,
    mut request: Request,
    next: Next,
) -> Response {
    match request.extensions().get::<Caller>().map(|caller| account_of(&cluster, caller)) {
        Some(account) => {
            request.extensions_mut().insert(account);
            next.run(request).await
        }
        None => {
            let why = "only users and operators have files";
            Failure(Problem::forbidden("can't use the repository", why)).into_response()
        }
    }
}

fn account_of(cluster: &Cluster, caller: &Caller) -> Account {
    let quota = cluster.accounts.quota_of(&caller.tenant.full("files"));
    let default = Quota::default();
    Account {
        tenant: caller.tenant.clone(),
        user: caller.who.clone(),
        may_write: true,
        is_admin: caller.is_admin(),
        quota: Quota { bytes: quota.file_bytes.unwrap_or(default.bytes), ..default },
    }
}
