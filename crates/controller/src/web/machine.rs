//! The console and the screen of a VM in its page. The API's own functions carry the bytes; what is other here is that the cookie counts, for
//! a WebSocket that a page of this server has opened (`http/src/guard.rs`), and that a page is told why it gets none: a browser keeps any other answer
//! to itself.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::Method;
use axum::response::Response;
use perigee_http::{Failure, Json, Peer, Tunnel, websocket};
use perigee_model::job::Vm;
use perigee_model::{Problem, ProblemKind, VmId};
use perigee_web::parts::{Log, LoggedLine, Page};
use perigee_web::words;

use super::Shared;
use super::ask::{self, Ask};
use crate::api;
use crate::api::caller::{Caller, Full};
use crate::cluster::Cluster;
use crate::vms;

/// So many of the last lines that a VM has printed are shown for reading.
const PRINTED_LINES: usize = 200;

/// Whether this is the path of a page with a console or a screen.
pub fn is_machine(path: &str) -> bool {
    console_of(path).is_some() || (path.starts_with("/vms/") && path.ends_with("/screen"))
}

/// The VM whose console a page shows.
pub fn console_of(path: &str) -> Option<&str> {
    path.strip_prefix("/vms/")?.strip_suffix("/console")
}

/// The page of a console or a screen. The VM has to be one that the caller sees.
///
/// # Errors
/// As the API.
pub async fn page(ask: &Ask<'_>, name: &str, of: fn(&VmId) -> Page) -> Result<Page, Problem> {
    let Full(id): Full<VmId> = ask.full(name).await?;
    // The guest is not asked for anything here.
    let found = async { vms::get(ask.cluster, &id).await.map(Json).map_err(Failure) };
    ask.get(&format!("/v1/vms/{name}"), found).await?;
    Ok(of(&id))
}

/// The end of what a VM has printed, for those who can only read.
///
/// # Errors
/// As the API.
pub async fn printed(ask: &Ask<'_>, name: &str) -> Result<Log, Problem> {
    let full: Full<VmId> = ask.full(name).await?;
    let id = full.0.clone();
    let text = match ask.may_get(&format!("/v1/vms/{name}/console")) {
        true => api::vms::console(ask.state(), full).await.map_err(|Failure(why)| why),
        false => Ok(String::new()),
    };
    let (lines, note) = match text {
        Ok(text) => (words::plain_lines(&text, PRINTED_LINES), String::new()),
        Err(problem) => (Vec::new(), problem.why),
    };
    Ok(Log {
        label: format!("The end of what VM {id} has printed"),
        command: format!("perigee vm console {id} --log"),
        live: String::new(),
        note,
        lines: lines.into_iter().map(|text| LoggedLine { text, is_error: false }).collect(),
    })
}

/// The WebSocket of a VM's console.
///
/// # Errors
/// `Invalid` for what is no WebSocket; else the WebSocket says what is wrong.
pub async fn attach_console(
    State(web): Shared,
    caller: Caller,
    peer: Peer,
    Path(vm): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    attach(&web.cluster, (caller, peer), &vm, request, vms::CONSOLE).await
}

/// The WebSocket of a VM's screen.
///
/// # Errors
/// As [`attach_console`].
pub async fn view_screen(
    State(web): Shared,
    caller: Caller,
    peer: Peer,
    Path(vm): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    attach(&web.cluster, (caller, peer), &vm, request, vms::SCREEN).await
}

async fn attach(
    cluster: &Arc<Cluster>,
    (caller, peer): (Caller, Peer),
    vm: &str,
    request: Request,
    end: &str,
) -> Result<Response, Failure> {
    let found = may_open(cluster, &caller, vm, &format!("/v1/vms/{vm}/{end}")).await?;
    carry(cluster, (caller, peer), request, vms::open(cluster, &found, end)).await
}

/// The VM that the caller means, if the API opens this path to the caller.
async fn may_open(
    cluster: &Arc<Cluster>,
    caller: &Caller,
    vm: &str,
    path: &str,
) -> Result<Vm, Problem> {
    if !ask::may(caller, &Method::GET, path) {
        let why = format!("{} may not ask for this", caller.who);
        return Err(Problem::forbidden(format!("can't answer GET {path}"), why));
    }
    let Full(id): Full<VmId> = Ask::new(cluster, caller).full(vm).await?;
    // What does not exist answers as everywhere, and not as a WebSocket.
    vms::get(cluster, &id).await
}

async fn carry(
    cluster: &Arc<Cluster>,
    (caller, peer): (Caller, Peer),
    request: Request,
    opened: impl Future<Output = Result<Tunnel, Problem>> + Send,
) -> Result<Response, Failure> {
    // A VM that starts may not be at its host yet.
    use ProblemKind::{Forbidden, Invalid, Unsupported};
    let asked = websocket::asked(request)?;
    Ok(match opened.await {
        Ok(tunnel) => vms::carry(cluster, tunnel, (caller.token, peer), asked),
        Err(problem) => {
            let is_final = matches!(problem.kind, Unsupported | Forbidden | Invalid);
            asked.refuse(is_final, format!("{}: {}", problem.what, problem.why))
        }
    })
}
