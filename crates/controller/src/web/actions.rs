//! What can be done on a page: first a question, then, if it is answered, the same request that the command line sends to the API.

use axum::extract::Query;
use axum::http::header::LOCATION;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use perigee_http::{Failure, Json};
use perigee_model::drain::DrainHost;
use perigee_model::persistent_vm::StopVm;
use perigee_model::{HostId, JobId, Problem, VmId};
use perigee_web::parts::{Confirm, Page, Section};

use super::Shared;
use super::ask::Ask;
use crate::api::caller::{Caller, Full};
use crate::api::{self, Name};

/// Where questions are asked and answered.
pub const PATHS: [&str; 5] = [
    "/jobs/{job}/cancel",
    "/vms/{vm}/start",
    "/vms/{vm}/stop",
    "/hosts/{host}/drain",
    "/hosts/{host}/undrain",
];

/// What is asked.
struct Question {
    title: String,
    button: &'static str,
    command: String,
    /// What follows from it.
    follows: &'static str,
}

/// Whether this is the path of a question.
pub fn is_question(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    asked(&parts).is_some()
}

fn asked(parts: &[&str]) -> Option<Question> {
    let question =
        |title, button, command, follows| Some(Question { title, button, command, follows });
    match *parts {
        ["jobs", job, "cancel"] => question(
            format!("Cancel job {job}?"),
            "Cancel the job",
            format!("perigee job cancel {job}"),
            "Its command is ended, and the outputs that it has are fetched.",
        ),
        ["vms", vm, "start"] => question(
            format!("Start VM {vm}?"),
            "Start the VM",
            format!("perigee vm start {vm}"),
            "It starts at a host with room for it.",
        ),
        ["vms", vm, "stop"] => question(
            format!("Stop VM {vm}?"),
            "Stop the VM",
            format!("perigee vm stop {vm}"),
            "Its guest is asked to power off. The VM keeps its disks.",
        ),
        ["hosts", host, "drain"] => question(
            format!("Drain host {host}?"),
            "Drain the host",
            format!("perigee host drain {host}"),
            "Nothing new comes to it, and what it has moves away while it runs.",
        ),
        ["hosts", host, "undrain"] => question(
            format!("Call the drain of host {host} off?"),
            "Call it off",
            format!("perigee host undrain {host}"),
            "What has left stays where it is.",
        ),
        _ => None,
    }
}

/// The page of a question, if this is the path of one. The thing has to be one that the caller sees.
pub async fn question(ask: &Ask<'_>, parts: &[&str]) -> Option<Result<Page, Problem>> {
    let Question { title, button, command, follows } = asked(parts)?;
    let [kind, name, _] = *parts else { return None };
    let seen = match kind {
        "jobs" => ask.job(name).await.map(drop),
        "vms" => match ask.full::<VmId>(name).await {
            Ok(full) => {
                let path = format!("/v1/vms/{name}");
                ask.get(&path, api::vms::info(ask.state(), full)).await.map(drop)
            }
            Err(problem) => Err(problem),
        },
        _ => match ask.word::<HostId>(name) {
            Ok(host) => {
                let path = format!("/v1/hosts/{name}");
                ask.get(&path, api::hosts::info(ask.state(), host)).await.map(drop)
            }
            Err(problem) => Err(problem),
        },
    };
    let action = format!("/{}", parts.join("/"));
    let confirm = Confirm { action, button: button.to_owned(), back: format!("/{kind}/{name}") };
    let section = Section::new("question", "What it does", "");
    let section = Section { texts: vec![follows.to_owned()], confirm: Some(confirm), ..section };
    Some(seen.map(|()| Page::new(title, command, vec![section])))
}

/// Does what a question has asked, and shows the thing.
pub async fn act(
    axum::extract::State(web): Shared,
    caller: Caller,
    uri: Uri,
) -> Result<Response, Failure> {
    let ask = Ask::new(&web.cluster, &caller);
    let parts: Vec<&str> = uri.path().split('/').skip(1).collect();
    let path = format!("/v1{}", uri.path());
    let post = &Method::POST;
    match parts[..] {
        ["jobs", job, "cancel"] => {
            let full: Full<JobId> = ask.full(job).await?;
            let how = Ok(Query(api::jobs::Cancelling { now: false }));
            ask.send(post, &path, api::jobs::cancel(ask.state(), full, how)).await.map(drop)?;
        }
        ["vms", vm, "start"] => {
            let full: Full<VmId> = ask.full(vm).await?;
            ask.send(post, &path, api::vms::start(ask.state(), full)).await.map(drop)?;
        }
        ["vms", vm, "stop"] => {
            let full: Full<VmId> = ask.full(vm).await?;
            let how = Json(StopVm::default());
            ask.send(post, &path, api::vms::stop(ask.state(), full, how)).await?;
        }
        ["hosts", host, "drain"] => {
            let host: Name<HostId> = ask.word(host)?;
            let how = Json(DrainHost::default());
            let done = api::hosts::drain(ask.state(), caller.clone(), host, how);
            ask.send(post, &path, done).await.map(drop)?;
        }
        ["hosts", host, "undrain"] => {
            let host: Name<HostId> = ask.word(host)?;
            ask.send(post, &path, api::hosts::undrain(ask.state(), host)).await?;
        }
        _ => {
            let what = format!("POST {}", uri.path());
            return Err(Problem::not_found(what, "nothing can be done there").into());
        }
    }
    let back = format!("/{}", parts[..2].join("/"));
    Ok((StatusCode::SEE_OTHER, [(LOCATION, back)]).into_response())
}
