//! The part of the control API for machines without disks: the table in [`perigee_model::client`], route by
//! route.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::{get, post, put};
use perigee_http::{Json, Reply};
use perigee_model::ClientName;
use perigee_model::client::{Binding, Boot, BootRequest, ClientInfo, Login, NewClient};

use super::{Control, Named, Shared};

/// The routes for clients of other protocols.
pub fn routes() -> Router<Arc<Control>> {
    Router::new()
        .route("/clients", get(list).post(add))
        .route("/clients/{client}", get(info).delete(remove))
        .route("/clients/{client}/binding", put(bind).delete(unbind))
        .route("/boot", post(boot))
        .route("/logins", get(logins))
}

/// Adds the open sessions of the client's volume.
fn with_logins(control: &Control, mut client: ClientInfo) -> ClientInfo {
    if let Some(volume) = &client.volume {
        client.sessions = control.exports.logins.list();
        client.sessions.retain(|login| login.volume == *volume);
    }
    client
}

async fn list(State(control): Shared) -> Reply<Vec<ClientInfo>> {
    let clients = control.pool.clients().await?.into_iter();
    Ok(Json(clients.map(|client| with_logins(&control, client)).collect()))
}

async fn add(State(control): Shared, Json(new): Json<NewClient>) -> Reply<ClientInfo> {
    Ok(Json(control.pool.add_client(new).await?))
}

async fn info(State(control): Shared, Named(client): Named<ClientName>) -> Reply<ClientInfo> {
    Ok(Json(with_logins(&control, control.pool.client(&client).await?)))
}

async fn remove(State(control): Shared, Named(client): Named<ClientName>) -> Reply<()> {
    control.pool.remove_client(&client).await?;
    control.exports.boot_secrets.expect(&client);
    Ok(Json(()))
}

async fn bind(
    State(control): Shared,
    Named(client): Named<ClientName>,
    Json(binding): Json<Binding>,
) -> Reply<ClientInfo> {
    let bound = control.pool.bind_client(&client, Some(binding)).await?;
    control.exports.boot_secrets.expect(&client);
    Ok(Json(with_logins(&control, bound)))
}

async fn unbind(State(control): Shared, Named(client): Named<ClientName>) -> Reply<ClientInfo> {
    Ok(Json(with_logins(&control, control.pool.bind_client(&client, None).await?)))
}

async fn boot(State(control): Shared, Json(request): Json<BootRequest>) -> Reply<Boot> {
    let BootRequest { mac, address } = request;
    let secrets = &control.exports.boot_secrets;
    let client = control.pool.clients().await?.into_iter().find(|client| client.mac == Some(mac));
    let _turn = match client.filter(|client| client.chap_user.is_some()) {
        None => None,
        Some(client) => {
            let turn = secrets.turn().await;
            let client = with_logins(&control, client);
            secrets.check(&client.name, client.sessions.len(), address)?;
            Some(turn)
        }
    };
    let boot = control.pool.boot(&mac).await?;
    if boot.chap.is_some() {
        secrets.given(boot.client.clone(), boot.volume.clone(), address);
    }
    Ok(Json(boot))
}

async fn logins(State(control): Shared) -> Reply<Vec<Login>> {
    Ok(Json(control.exports.logins.list()))
}
