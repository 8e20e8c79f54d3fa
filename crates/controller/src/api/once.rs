//! A request that makes something makes it once, however often it is repeated, if it has a key of its client's: the header
//! `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header; Stripe's API has the same header).
//!
//! ```text
//! the key is new                       the request is carried out
//! it was refused, or has made nothing  the request is carried out, as if it was new
//! it has made something                the answer is that, as it is now, with the status of the first answer
//! it is being carried out              409, Retry-After
//! it was for something else            422
//! ```
//!
//! What is remembered, and why no kill of the controller makes two of one: [`asked`].

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use perigee_http::{Failure, Json};
use perigee_model::limits::REQUEST_KEY_BYTES;
use perigee_model::{Problem, ProblemKind};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::callers::matched;
use super::{Caller, backups as of_backups, networks as of_networks};
use crate::cluster::Cluster;
use crate::hash::hex;
use crate::records::asked::{self, Ask, Begun};
use crate::records::{ImageRecord, VolumeRecord, image_key, vm_of, volume_key};
use crate::storage::{images, volumes};
use crate::{accounts, jobs, rentals, vms};

/// The header with the key.
pub const HEADER: &str = "Idempotency-Key";

/// The paths of POST requests that take a key. Each answers with what it has made.
pub const ROUTES: [&str; 13] = [
    "/v1/backups",
    "/v1/backups/{backup}/restore",
    "/v1/backups/{backup}/restore-image",
    "/v1/backups/{backup}/restore-vm",
    "/v1/images",
    "/v1/jobs",
    "/v1/networks",
    "/v1/rentals",
    "/v1/tenants",
    "/v1/vms",
    "/v1/vms/{vm}/snapshot",
    "/v1/volumes",
    "/v1/volumes/{volume}/snapshot",
];

/// As long as a body of JSON may be anywhere.
const BODY_BYTES_MAX: usize = 2 << 20;
/// When a client may ask again while the first request is carried out.
const RETRY_AFTER_S: &str = "1";

/// Whether such a request takes a key.
fn takes_key(path: &str) -> bool {
    ROUTES.iter().any(|route| matched(route, path).is_some())
}

/// Carries a request with a key out, or answers with what it has made before.
pub async fn once(State(cluster): State<Arc<Cluster>>, request: Request, next: Next) -> Response {
    let is_post = request.method() == Method::POST && request.uri().path().starts_with("/v1/");
    match (request.headers().get(HEADER), request.extensions().get::<Caller>()) {
        (Some(key), Some(caller)) if is_post => {
            let (key, caller) = (key.clone(), caller.clone());
            answer(&cluster, &caller, &key, request, next).await.unwrap_or_else(Refusal::response)
        }
        _ => next.run(request).await,
    }
}

/// Why a request is not carried out, and the status of that if it is another than the problem's.
struct Refusal(Problem, Option<StatusCode>);

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self(problem, None)
    }
}

impl Refusal {
    /// The first request with this key is being carried out.
    fn under_way(what: String) -> Self {
        let why = "the first request with this Idempotency-Key is still being carried out";
        let next = "send it again in some seconds; the answer is then what the first one has made";
        Self(Problem::unavailable(what, why).next(next), Some(StatusCode::CONFLICT))
    }

    /// The key was used for another request.
    fn of_another(what: String) -> Self {
        let why = "this Idempotency-Key was used for another request: another path or another body";
        let next = "use a new key for each thing that is to be made, and the same key only to repeat a request";
        Self(Problem::invalid(what, why).next(next), Some(StatusCode::UNPROCESSABLE_ENTITY))
    }

    fn response(self) -> Response {
        let mut answer = Failure(self.0).into_response();
        if let Some(status) = self.1 {
            *answer.status_mut() = status;
            if status == StatusCode::CONFLICT {
                let after = HeaderValue::from_static(RETRY_AFTER_S);
                answer.headers_mut().insert(RETRY_AFTER, after);
            }
        }
        answer
    }
}

async fn answer(
    cluster: &Arc<Cluster>,
    caller: &Caller,
    key: &HeaderValue,
    request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let path = request.uri().path().to_owned();
    let what = || format!("can't answer POST {path}");
    if request.headers().get_all(HEADER).iter().count() > 1 {
        let why = format!("the request has several headers {HEADER}");
        return Err(Problem::invalid(what(), why).next("send one").into());
    }
    if !takes_key(&path) {
        let why = format!("this request takes no {HEADER}");
        let next = "leave the header out; /v1/openapi.json says which requests take one";
        return Err(Problem::invalid(what(), why).next(next).into());
    }
    REQUEST_KEY_BYTES.check(key.len()).map_err(|error| error.problem(what()))?;
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, BODY_BYTES_MAX).await.map_err(|error| {
        Problem::invalid(what(), format!("the body can't be read: {error}"))
            .next(format!("it has at most {} MiB", BODY_BYTES_MAX >> 20))
    })?;
    let asks_for = parts.uri.path_and_query().map_or(path.as_str(), |all| all.as_str());
    let ask = Ask {
        who: who(caller),
        key: digest(&[key.as_bytes()]),
        digest: digest(&[asks_for.as_bytes(), b"\n", &body[..]]),
    };
    let (asked, before) =
        match cluster.requests.begin(&cluster.records, &cluster.clock, ask).await? {
            Begun::Now(asked, before) => (asked, before),
            Begun::UnderWay => return Err(Refusal::under_way(what())),
            Begun::OfAnother => return Err(Refusal::of_another(what())),
        };
    if let Some(before) = before {
        match again(cluster, caller, &before.made).await {
            Ok(Again::Is(answer)) => return Ok(answer),
            Ok(Again::IsMade) => return Err(Refusal::under_way(what())),
            Ok(Again::IsNot) => {}
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                return Err(gone(what(), &before.made).into());
            }
            Err(problem) => return Err(problem.into()),
        }
    }
    let request = Request::from_parts(parts, Body::from(body));
    let cluster = Arc::clone(cluster);
    // In a task of its own: what a client that disconnects has asked for goes to its end, and the next request finds it.
    let carried = tokio::spawn(asked::carry(Arc::clone(&asked), async move {
        let answer = next.run(request).await;
        if !answer.status().is_success()
            && let Err(problem) = asked.forget_undone(&cluster.records).await
        {
            tracing::warn!("a request that has made nothing is still remembered: {problem}");
        }
        answer
    }));
    let answer = carried.await;
    Ok(answer.map_err(|error| Problem::internal(what(), error))?)
}

/// Whose key it is. Whoever is an admin without being a user is one caller.
fn who(caller: &Caller) -> String {
    match &caller.user {
        Some(user) => format!("{}/{user}", caller.tenant),
        None => "-".to_owned(),
    }
}

fn digest(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hex(&hash.finalize())
}

/// What has become of what a request has made.
enum Again {
    /// It is there.
    Is(Response),
    /// It is still being made, without a request.
    IsMade,
    /// Its making was broken off, and the request makes it to its end.
    IsNot,
}

/// What a request has made, as it is now.
///
/// # Errors
/// `NotFound` if it is gone.
async fn again(cluster: &Arc<Cluster>, caller: &Caller, made: &str) -> Result<Again, Problem> {
    let (kind, name) = made.split_once('/').unwrap_or_default();
    caller.did(name);
    match kind {
        "jobs" => {
            let id = named(name)?;
            let record = jobs::any_record(cluster, &id).await?;
            // It may be gone, and somebody else have made one with its name.
            if !caller.sees_this_job(&record.job) {
                return Err(jobs::unknown(&id));
            }
            match record.kind.persistent_vm() {
                Some(vm) if vm.from_backup.is_some() => Ok(Again::IsMade),
                Some(_) => is(vms::get(cluster, &vm_of(&id)).await?),
                None => is(jobs::get(cluster, &id).await?),
            }
        }
        "volumes" => {
            let name = named(name)?;
            cluster
                .records
                .read::<VolumeRecord>(&volume_key(&name))
                .await?
                .ok_or_else(|| volumes::unknown(&name))?;
            match volumes::find(cluster, &name).await?.seen {
                Some(_) => is(volumes::volume(cluster, &name).await?),
                None => Ok(Again::IsNot),
            }
        }
        "images" => image_again(cluster, name).await,
        "networks" => is(of_networks::shown(cluster, caller, &named(name)?).await?),
        "rentals" => is(rentals::get(cluster, &named(name)?)?),
        "backups" => is(of_backups::seen(cluster, caller, &named(name)?).await?),
        "tenants" => is(accounts::tenant(cluster, &named(name)?).await?),
        _ => Err(Problem::internal("can't answer again", format!("a request has made {made:?}"))),
    }
}

async fn image_again(cluster: &Arc<Cluster>, name: &str) -> Result<Again, Problem> {
    let name = named(name)?;
    let record: Option<ImageRecord> = cluster.records.read(&image_key(&name)).await?;
    let shown = images::image(cluster, &name).await;
    match (record, shown) {
        (None, shown) => is(shown?),
        (Some(record), _) if record.import.is_some() => Ok(Again::IsMade),
        (Some(record), Err(problem)) if problem.kind == ProblemKind::NotFound => {
            match record.layer {
                None => Ok(Again::IsNot),
                Some(_) => {
                    let why = "it is made, and no host that answers has it";
                    Err(Problem::unavailable(format!("image {name}"), why).next(problem.next))
                }
            }
        }
        (Some(_), shown) => is(shown?),
    }
}

fn is(thing: impl Serialize) -> Result<Again, Problem> {
    Ok(Again::Is(Json(thing).into_response()))
}

/// A name in a record's key.
fn named<N: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<N, Problem> {
    text.parse().map_err(|e| Problem::internal("can't read a record's key", e))
}

fn gone(what: String, made: &str) -> Problem {
    let made = made.replacen("s/", " ", 1);
    let why = format!(
        "the first request with this {HEADER} has made {made}, which is not there any more: it was deleted, or its making has failed"
    );
    Problem::not_found(what, why).next("to make another one, use another key")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{document, operations};

    #[test]
    fn the_document_says_which_requests_take_a_key() {
        let document = document();
        let mut all = 0;
        for (method, path) in operations() {
            let parameters = &document["paths"][&path][&method]["parameters"];
            let mut named = parameters.as_array().into_iter().flatten();
            let has_key = named.any(|one| one["name"] == HEADER);
            let takes = method == "post" && ROUTES.contains(&path.as_str());
            assert_eq!(has_key, takes, "{method} {path}");
            all += usize::from(takes);
        }
        assert_eq!(all, ROUTES.len());
    }

    #[test]
    fn a_path_with_a_name_takes_a_key_only_where_it_makes_something() {
        assert!(takes_key("/v1/jobs") && takes_key("/v1/vms/web/snapshot"));
        assert!(!takes_key("/v1/jobs/hello-0001/cancel") && !takes_key("/v1/jobs/"));
    }
}
