//! Imports images before measurements begin, so that no copy crosses the WAN during them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::job::{ClusterImage, NewImage};
use perigee_model::volume::Upload;
use perigee_model::{ImageName, Problem};

const COPY_DEADLINE: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// Where `scripts/golden-image` keeps what it has built. A lab's hosts take images from there; others are uploaded.
pub fn cache() -> Option<PathBuf> {
    let dir = std::env::var_os("PERIGEE_CACHE").map_or("/var/cache/perigee".into(), PathBuf::from);
    dir.canonicalize().ok()
}

/// What to import: a file of the cache as it is, or an upload of another one.
///
/// # Errors
/// When the file can't be read or sent.
pub async fn image_of(client: &Client, name: ImageName, file: &Path) -> Result<NewImage, Problem> {
    let what = || format!("can't import {}", file.display());
    let real = file.canonicalize().map_err(|error| Problem::invalid(what(), error))?;
    let is_cached = cache().is_some_and(|cache| real.starts_with(cache));
    let (source, host) = if is_cached {
        (real.to_string_lossy().into_owned(), None)
    } else {
        let upload: Upload = client.send_file("/v1/uploads", &real).await?;
        (upload.source, upload.host)
    };
    Ok(NewImage { name, source, format: None, host, leave_site: Default::default() })
}

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
