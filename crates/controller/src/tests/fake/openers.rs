//! The part of a fake volume server that says which hosts may open its volumes.

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{get, put};
use perigee_http::{Json, Reply};
use perigee_model::volume::{AllOpeners, Openers};
use perigee_model::{HostId, VolumeName};

use super::Shared;

pub fn routes() -> Router<std::sync::Arc<std::sync::Mutex<super::Inside>>> {
    Router::new()
        .route("/v1/openers", get(all_openers).put(add_all_openers))
        .route("/v1/volumes/{volume}/hosts", get(openers).put(set_openers))
        .route("/v1/volumes/{volume}/hosts/{host}", put(add_opener).delete(remove_opener))
}

async fn openers(State(inside): Shared, Path(name): Path<VolumeName>) -> Reply<Openers> {
    let inside = inside.lock().expect("lock");
    let hosts = inside.openers.get(&name).into_iter().flatten().cloned().collect();
    Ok(Json(Openers { hosts }))
}

async fn set_openers(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(ask): Json<Openers>,
) -> Reply<()> {
    inside.lock().expect("lock").openers.entry(name).or_default().extend(ask.hosts);
    Ok(Json(()))
}

async fn all_openers(State(inside): Shared) -> Reply<AllOpeners> {
    if inside.lock().expect("lock").openers_hang {
        std::future::pending::<()>().await;
    }
    let inside = inside.lock().expect("lock");
    let here = inside.openers.iter();
    let volumes = here.map(|(name, hosts)| (name.clone(), hosts.iter().cloned().collect()));
    Ok(Json(AllOpeners { volumes: volumes.collect() }))
}

async fn add_all_openers(State(inside): Shared, Json(ask): Json<AllOpeners>) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    inside.told_of_openers += 1;
    for (name, hosts) in ask.volumes {
        inside.openers.entry(name).or_default().extend(hosts);
    }
    Ok(Json(()))
}

async fn add_opener(
    State(inside): Shared,
    Path((name, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    inside.lock().expect("lock").openers.entry(name).or_default().insert(host);
    Ok(Json(()))
}

async fn remove_opener(
    State(inside): Shared,
    Path((name, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    inside.lock().expect("lock").openers.entry(name).or_default().remove(&host);
    Ok(Json(()))
}
