//! The part of a fake volume server that says which hosts may open its volumes.

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{get, put};
use perigee_http::{Json, Reply};
use perigee_model::volume::{AdmittedHosts, AllAdmittedHosts};
use perigee_model::{HostId, VolumeName};

use super::Shared;

pub fn routes() -> Router<std::sync::Arc<std::sync::Mutex<super::Inside>>> {
    Router::new()
        .route("/v1/admissions", get(all_admitted_hosts).put(admit_all))
        .route("/v1/volumes/{volume}/hosts", get(admitted_hosts).put(set_admitted_hosts))
        .route("/v1/volumes/{volume}/hosts/{host}", put(admit_one).delete(end_admission))
}

async fn admitted_hosts(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
) -> Reply<AdmittedHosts> {
    let inside = inside.lock().expect("lock");
    let hosts = inside.admissions.get(&name).into_iter().flatten().cloned().collect();
    Ok(Json(AdmittedHosts { hosts }))
}

async fn set_admitted_hosts(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(ask): Json<AdmittedHosts>,
) -> Reply<()> {
    inside.lock().expect("lock").admissions.entry(name).or_default().extend(ask.hosts);
    Ok(Json(()))
}

async fn all_admitted_hosts(State(inside): Shared) -> Reply<AllAdmittedHosts> {
    if inside.lock().expect("lock").admissions_hang {
        std::future::pending::<()>().await;
    }
    let inside = inside.lock().expect("lock");
    let here = inside.admissions.iter();
    let volumes = here.map(|(name, hosts)| (name.clone(), hosts.iter().cloned().collect()));
    Ok(Json(AllAdmittedHosts { volumes: volumes.collect() }))
}

async fn admit_all(State(inside): Shared, Json(ask): Json<AllAdmittedHosts>) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    inside.told_of_admissions += 1;
    for (name, hosts) in ask.volumes {
        inside.admissions.entry(name).or_default().extend(hosts);
    }
    Ok(Json(()))
}

async fn admit_one(
    State(inside): Shared,
    Path((name, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    inside.lock().expect("lock").admissions.entry(name).or_default().insert(host);
    Ok(Json(()))
}

async fn end_admission(
    State(inside): Shared,
    Path((name, host)): Path<(VolumeName, HostId)>,
) -> Reply<()> {
    inside.lock().expect("lock").admissions.entry(name).or_default().remove(&host);
    Ok(Json(()))
}
