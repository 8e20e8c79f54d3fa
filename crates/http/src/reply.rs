//! What a handler answers: JSON, or a [`Problem`] with its HTTP status.

use axum::body::Bytes;
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

/// JSON in requests and answers. A wrong body is answered with a [`Problem`]. No request has a list as its body: without the names of the
/// fields an empty list would stand for an order in which nothing need be said.
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
        let refused = |why: String| Failure(Problem::invalid("can't read the request's body", why));
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts.clone(), body);
        let bytes =
            Bytes::from_request(request, state).await.map_err(|e| refused(e.body_text()))?;
        if bytes.trim_ascii_start().starts_with(b"[") {
            return Err(refused("it is a list, and an object is expected".to_owned()));
        }
        let request = Request::from_parts(parts, bytes.into());
        let read = axum::Json::<T>::from_request(request, state).await;
        read.map(|body| Self(body.0)).map_err(|e: JsonRejection| refused(e.body_text()))
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use serde::Deserialize;

    use super::*;

    /// An order in which nothing need be said.
    #[derive(Debug, Deserialize)]
    struct Order {
        #[serde(default)]
        dry_run: bool,
    }

    async fn read(body: &'static str) -> Result<bool, String> {
        let request = Request::post("/").header("content-type", "application/json");
        let request = request.body(Body::from(body)).expect("a request");
        let order = Json::<Order>::from_request(request, &()).await;
        order.map(|order| order.0.dry_run).map_err(|failure| failure.0.why)
    }

    #[tokio::test]
    async fn a_list_is_no_order() {
        assert_eq!(read("{}").await, Ok(false));
        assert_eq!(read(" {\"dry_run\": true}").await, Ok(true));
        for list in ["[]", " \n[true]"] {
            let why = read(list).await.expect_err(list);
            assert!(why.contains("an object is expected"), "{why}");
        }
    }
}
