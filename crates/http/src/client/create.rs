//! Requests that make something, and make it once although they are repeated.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, Method, StatusCode};
use perigee_model::{Problem, ProblemKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{Client, Lost, answered, json};

/// A controller that starts again reads its records within seconds.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);

/// The header with the key by which a controller knows a request again.
const REQUEST_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Why one try has no result.
enum Failed {
    /// It may have been carried out, or is being carried out.
    Unclear(Problem),
    /// It was not carried out.
    Not(Problem),
}

impl Client {
    /// Has the controller make something. If the answer is lost, the request is repeated for a while, with the same key: the controller
    /// makes one thing.
    ///
    /// # Errors
    /// As [`Client::get`]; `Unavailable` at once if nothing could be sent.
    pub async fn create<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Problem> {
        let (key, body) = (Uuid::new_v4().to_string(), self.to_json(body)?);
        let begun = Instant::now();
        let mut may_be_made = false;
        loop {
            let problem = match self.try_create(path, &key, body.clone()).await {
                Ok(answer) => return self.parse(&answer),
                Err(Failed::Not(problem)) if !may_be_made => return Err(problem),
                // What could not be sent now may have been carried out before.
                Err(Failed::Not(problem)) if problem.kind != ProblemKind::Unavailable => {
                    return Err(problem);
                }
                Err(Failed::Not(problem) | Failed::Unclear(problem)) => problem,
            };
            may_be_made = true;
            if begun.elapsed() >= PATIENCE {
                return Err(problem.next("look whether it was made before you ask again"));
            }
            tracing::debug!("{problem}; the request is sent again");
            sleep(PAUSE).await;
        }
    }

    async fn try_create(
        &self,
        path: &str,
        key: &str,
        body: Vec<u8>,
    ) -> Result<bytes::Bytes, Failed> {
        let until = Instant::now() + self.answer_max;
        let headers = [json(), (REQUEST_KEY, key.to_owned())];
        let request = self.request(Method::POST, path, headers, Body::from(body));
        let answer = self.try_send(request.map_err(Failed::Not)?, until).await;
        let answer = answer.map_err(|Lost { was_sent, problem }| match was_sent {
            true => Failed::Unclear(problem),
            false => Failed::Not(problem),
        })?;
        let is_under_way = answer.status() == StatusCode::CONFLICT;
        let checked = self.check(answered(answer, until)).await;
        let response = checked.map_err(|problem| {
            match is_under_way && problem.kind == ProblemKind::Unavailable {
                true => Failed::Unclear(problem),
                false => Failed::Not(problem),
            }
        })?;
        response.whole().await.map_err(|e| Failed::Unclear(self.broken(&e)))
    }
}
