//! The metadata address of an instance, as far as agents ask there: EC2's Instance Metadata Service, version 2, in which each question
//! carries a token.

use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, put};
use perigee_model::Problem;
use perigee_model::units::format_time;
use serde_json::json;
use tokio::net::TcpListener;

use super::records::{Record, Records};

/// EC2's. It is at the loopback interface of the instance's namespace, so each instance has its own.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const TTL_HEADER: &str = "x-aws-ec2-metadata-token-ttl-seconds";
const TOKEN_HEADER: &str = "x-aws-ec2-metadata-token";
/// The longest life of a token.
const TTL_MAX_S: u32 = 21_600;

#[derive(Debug)]
struct Metadata {
    records: Records,
    record: Record,
    token: String,
}

type Shared = State<Arc<Metadata>>;
type Answer = Result<String, StatusCode>;

/// Serves the metadata of an instance from inside its namespace. Returns only why that does not work.
pub async fn serve(records: Records, record: Record) -> Problem {
    let listen = async {
        let listener = TcpListener::bind((ADDRESS, 80)).await?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        axum::serve(listener, router(Arc::new(Metadata { records, record, token }))).await
    };
    let why = listen.await.err().unwrap_or_else(|| std::io::Error::other("its listener has ended"));
    Problem::internal("can't serve the metadata of an instance", why)
}

fn router(metadata: Arc<Metadata>) -> Router {
    Router::new()
        .route("/latest/api/token", put(token))
        .route("/latest/meta-data/instance-id", get(instance_id))
        .route("/latest/meta-data/local-ipv4", get(address))
        .route("/latest/meta-data/spot/instance-action", get(instance_action))
        .with_state(metadata)
}

async fn token(State(metadata): Shared, headers: HeaderMap) -> Answer {
    let ttl_s = headers.get(TTL_HEADER).and_then(|ttl| ttl.to_str().ok()?.parse::<u32>().ok());
    match ttl_s {
        Some(1..=TTL_MAX_S) => Ok(metadata.token.clone()),
        Some(_) | None => Err(StatusCode::BAD_REQUEST),
    }
}

impl Metadata {
    fn check(&self, headers: &HeaderMap) -> Result<(), StatusCode> {
        let shown = headers.get(TOKEN_HEADER).and_then(|token| token.to_str().ok());
        if shown == Some(&self.token) { Ok(()) } else { Err(StatusCode::UNAUTHORIZED) }
    }
}

async fn instance_id(State(metadata): Shared, headers: HeaderMap) -> Answer {
    metadata.check(&headers)?;
    Ok(metadata.record.id.clone())
}

async fn address(State(metadata): Shared, headers: HeaderMap) -> Answer {
    metadata.check(&headers)?;
    Ok(metadata.record.address.clone())
}

async fn instance_action(State(metadata): Shared, headers: HeaderMap) -> Answer {
    metadata.check(&headers)?;
    let ends_unix_s = metadata.records.ends_unix_s(&metadata.record.id).map_err(|problem| {
        tracing::warn!(%problem, "the notice is not known");
        StatusCode::INTERNAL_SERVER_ERROR
    })?;
    let ends_unix_s = ends_unix_s.ok_or(StatusCode::NOT_FOUND)?;
    // As in RFC 3339.
    let time = format_time(ends_unix_s.saturating_mul(1000)).replace(" UTC", "Z").replace(' ', "T");
    Ok(json!({ "action": "terminate", "time": time }).to_string())
}
