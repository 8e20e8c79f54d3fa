//! A file as the body of a request.

use std::path::Path;

use axum::body::Body;
use axum::http::Method;
use bytes::BytesMut;
use futures_util::stream;
use perigee_model::Problem;
use serde::de::DeserializeOwned;
use tokio::io::AsyncReadExt;

use crate::client::Client;

const PIECE_BYTES: usize = 256 << 10;

impl Client {
    /// Sends a file's content. The time of the whole request is not limited.
    ///
    /// # Errors
    /// `NotFound` or `Invalid` if the file can't be read, else as [`Client::get`].
    pub async fn send_file<T: DeserializeOwned>(
        &self,
        path: &str,
        file: &Path,
    ) -> Result<T, Problem> {
        let what = || format!("can't read {}", file.display());
        let opened = tokio::fs::File::open(file).await.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Problem::not_found(what(), error),
            _ => Problem::invalid(what(), error),
        })?;
        if opened.metadata().await.is_ok_and(|meta| meta.is_dir()) {
            return Err(Problem::invalid(what(), "it is a directory"));
        }
        let pieces = stream::try_unfold(opened, async |mut opened| {
            let mut piece = BytesMut::with_capacity(PIECE_BYTES);
            let length = opened.read_buf(&mut piece).await?;
            Ok::<_, std::io::Error>((length > 0).then(|| (piece.freeze(), opened)))
        });
        self.send_body(Method::POST, path, Body::from_stream(pieces)).await
    }
}
