//! The part of the API with which the host's agent asks for the NBD sockets of its VMs.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, State};
use axum::routing::{get, put};
use perigee_http::{Json, Reply};
use perigee_model::volume::{VmSocket, VmSocketAt, VmSocketSeen};
use perigee_model::{Problem, VmId};
use serde::Deserialize;

use super::{Asker, Control, Named, Shared};
use crate::vm_sockets::VmSockets;

/// The routes for the NBD sockets of VMs.
pub fn routes() -> Router<Arc<Control>> {
    Router::new().route("/vms", get(list)).route("/vms/{vm}/socket", put(make).delete(end))
}

fn sockets<'a>(control: &'a Control, Asker(peer): &Asker) -> Result<&'a VmSockets, Problem> {
    let what = "can't change the NBD sockets of VMs";
    if !peer.is_own {
        return Err(Problem::conflict(what, "only this host's agent may ask for them")
            .next("give the agent the volume server's unix socket: --volume-control unix:PATH"));
    }
    control.vm_sockets.as_deref().ok_or_else(|| {
        Problem::conflict(what, "no volume server runs").next("start one: perigee volume serve")
    })
}

async fn list(State(control): Shared) -> Reply<Vec<VmSocketSeen>> {
    let Some(sockets) = &control.vm_sockets else { return Ok(Json(Vec::new())) };
    let seen = sockets.list().await.into_iter().map(|(socket, connections)| {
        let volumes = socket.exports.iter().filter_map(|export| export.split('@').next());
        let volumes = volumes.filter_map(|volume| volume.parse().ok());
        let unanswered = volumes.filter_map(|volume| control.exports.unanswered(volume)).collect();
        VmSocketSeen { socket, connections, unanswered }
    });
    Ok(Json(seen.collect()))
}

async fn make(
    State(control): Shared,
    Named(vm): Named<VmId>,
    asker: Asker,
    Json(socket): Json<VmSocket>,
) -> Reply<VmSocketAt> {
    if socket.vm != vm {
        let what = format!("can't make the NBD socket of VM {vm}");
        return Err(Problem::invalid(what, format!("the request is about {}", socket.vm)).into());
    }
    Ok(Json(sockets(&control, &asker)?.put(socket).await?))
}

#[derive(Deserialize)]
struct Of {
    uid: u32,
    /// Those that it had when it was looked at, with commas between them.
    exports: String,
}

async fn end(
    State(control): Shared,
    Named(vm): Named<VmId>,
    asker: Asker,
    Query(Of { uid, exports }): Query<Of>,
) -> Reply<()> {
    sockets(&control, &asker)?.delete(&vm, uid, &exports).await;
    Ok(Json(()))
}
