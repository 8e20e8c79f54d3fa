//! The server side, for axum.

use std::path::PathBuf;

use axum::Router;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use perigee_model::Problem;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{TcpListener, UnixListener};

/// A [`Problem`] as an HTTP answer.
#[derive(Debug)]
pub struct Failure(pub Problem);

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(self.0)).into_response()
    }
}

/// What a handler returns.
pub type Reply<T> = Result<Json<T>, Failure>;

/// JSON in and out; a body that does not fit is answered with a [`Problem`].
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        axum::Json::<T>::from_request(request, state)
            .await
            .map(|body| Self(body.0))
            .map_err(|e: JsonRejection| Failure(Problem::invalid("request body", e.body_text())))
    }
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// `HOST:PORT`
    Tcp(String),
    /// A socket file of an earlier run is replaced.
    Unix(PathBuf),
}

impl std::str::FromStr for Listen {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.strip_prefix("unix:") {
            Some(path) => Self::Unix(path.into()),
            None => Self::Tcp(text.to_owned()),
        })
    }
}

/// Serves on every address until the future is dropped or a listener fails.
///
/// # Errors
/// `Conflict` when an address is taken; `Internal` when a listener fails later.
pub async fn serve(router: Router, addresses: &[Listen]) -> Result<(), Problem> {
    let mut servers = tokio::task::JoinSet::new();
    for address in addresses {
        let router = router.clone();
        match address {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await.map_err(|e| {
                    Problem::conflict(format!("listen on {address}"), e)
                        .next("choose another address, or stop what listens there")
                })?;
                servers.spawn(async move { axum::serve(listener, router).await });
            }
            Listen::Unix(path) => {
                if path.exists() {
                    std::fs::remove_file(path).map_err(|e| {
                        Problem::conflict(format!("replace socket {}", path.display()), e)
                    })?;
                }
                let listener = UnixListener::bind(path)
                    .map_err(|e| Problem::conflict(format!("listen on {}", path.display()), e))?;
                servers.spawn(async move { axum::serve(listener, router).await });
            }
        }
    }
    match servers.join_next().await {
        Some(Ok(Err(error))) => Err(Problem::internal("HTTP listener", error)),
        Some(Err(error)) => Err(Problem::internal("HTTP listener", error)),
        Some(Ok(Ok(()))) | None => Ok(()),
    }
}
