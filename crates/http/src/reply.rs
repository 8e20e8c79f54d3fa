//! What a handler answers: JSON, or a [`Problem`] with its HTTP status.

use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use perigee_model::Problem;
use serde::Serialize;
use serde::de::DeserializeOwned;

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

/// JSON in requests and answers. A wrong body is answered with a [`Problem`].
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
        axum::Json::<T>::from_request(request, state).await.map(|body| Self(body.0)).map_err(
            |e: JsonRejection| {
                Failure(Problem::invalid("can't read the request's body", e.body_text()))
            },
        )
    }
}
