//! The entry for the fuzz target: a connection with bytes that a client could send.

use axum::Router;
use axum::routing::{post, put};
use perigee_model::job::{JobSpec, NewImage, NewVolume};
use perigee_model::vm::VmSpec;
use perigee_model::volume::{CopyImage, CreateVolumes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::connections::{Limits, converse};
use crate::peer::{ClientAddress, Peer};
use crate::reply::Json;

const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A connection whose client sends these bytes and then nothing more.
pub fn requests(input: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let router = Router::new()
        .route("/v1/jobs", post(async |Json(spec): Json<JobSpec>| Json(spec)))
        .route("/v1/images", post(async |Json(new): Json<NewImage>| Json(new)))
        .route("/v1/volumes", post(async |Json(new): Json<NewVolume>| Json(new)))
        .route("/v1/batch", post(async |Json(new): Json<CreateVolumes>| Json(new)))
        .route("/v1/copy", post(async |Json(new): Json<CopyImage>| Json(new)))
        .route("/v1/vms/{vm}", put(async |Json(spec): Json<VmSpec>| Json(spec)));
    runtime.expect("a runtime").block_on(async {
        let (client, server) = tokio::io::duplex(64 << 10);
        let (mut reader, mut writer) = tokio::io::split(client);
        let talk = async move {
            // The server may close the connection before it has read everything.
            drop(writer.write_all(input).await);
            drop(writer.shutdown().await);
        };
        let mut answer = Vec::new();
        tokio::join!(
            converse(server, (ClientAddress(None), Peer::Local, None), router, Limits::default()),
            talk,
            async {
                drop(reader.read_to_end(&mut answer).await);
            }
        );
        assert!(answer.len() <= ANSWER_BYTES_MAX + 2 * input.len());
    });
}
