//! How tests wait for what real daemons do.

use std::time::{Duration, Instant};

use perigee_model::Problem;

pub type Checked<T> = Result<T, Problem>;

/// How long any one thing may take on a busy machine before the test gives up.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// Asks until the answer is there.
pub async fn until<T>(what: &str, ask: impl AsyncFnMut() -> Checked<Option<T>>) -> Checked<T> {
    until_within(PATIENCE, what, ask).await
}

/// The same, for what takes longer than most.
pub async fn until_within<T>(
    patience: Duration,
    what: &str,
    mut ask: impl AsyncFnMut() -> Checked<Option<T>>,
) -> Checked<T> {
    let deadline = Instant::now() + patience;
    let mut last = String::new();
    while Instant::now() < deadline {
        match ask().await {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => last.clear(),
            // A daemon that was killed does not answer for a while.
            Err(problem) => last = problem.to_string(),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(failed(format!("waited {patience:?} for {what}; {last}")))
}

/// An error and not a panic, so that the lab is taken down.
pub fn failed(why: impl std::fmt::Display) -> Problem {
    Problem::internal("test", why)
}
