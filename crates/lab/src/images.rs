//! Imports images before measurements begin, so that no copy crosses the WAN during them.

use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::Problem;
use perigee_model::job::{ClusterImage, NewImage};

const COPY_DEADLINE: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// Imports an image and waits until every host has all of it.
///
/// # Errors
/// When the import fails, or a copy is not complete in time.
pub async fn import_everywhere(client: &Client, new: &NewImage) -> Result<ClusterImage, Problem> {
    let mut image: ClusterImage = client.post("/v1/images", new).await?;
    let deadline = Instant::now() + COPY_DEADLINE;
    while image.missing_bytes > 0 {
        if Instant::now() > deadline {
            let limit_s = COPY_DEADLINE.as_secs();
            let why = format!("{} bytes are missing after {limit_s} s", image.missing_bytes);
            let what = format!("can't copy image {} to all hosts", new.name);
            return Err(Problem::unavailable(what, why));
        }
        tokio::time::sleep(LOOK_EVERY).await;
        image = client.get(&format!("/v1/images/{}", new.name)).await?;
    }
    Ok(image)
}
