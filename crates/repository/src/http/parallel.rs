//! Uploads in parts that come in any order and at the same time, over several connections.
//!
//! `POST ?upload` with the file's length and SHA-256 begins one, or finds the unfinished one of the same content, and
//! answers with its id and what has arrived. `PUT ?upload=ID` with a `Content-Range` sends a part. `POST ?upload=ID`
//! completes it: the content is hashed, and the file gets its name if the hash is right. That goes on when the client goes
//! away, and whoever asks for it meanwhile waits for the same end. An upload that nobody uses for an hour is dropped, and
//! so are all when the server stops; the client begins anew then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use futures_util::StreamExt;
use perigee_model::data::{BeginUpload, CutUpload, FileEntry, UploadState};
use perigee_model::limits::UPLOAD_PARTS;
use perigee_model::{Problem, TenantName};

use super::headers::ContentRange;
use crate::listing::{is_sha256, unix_ms};
use crate::path::{DataPath, Location};
use crate::space::lock;
use crate::sums::Summer;
use crate::upload::Part;
use crate::view::View;

/// An upload that nobody uses is dropped after this.
const IDLE_MAX: Duration = Duration::from_secs(3600);

/// How many bytes of a part are written at once.
const PIECE_BYTES: usize = 256 << 10;

/// All uploads in parts.
#[derive(Debug, Default)]
pub struct Uploads(Mutex<BTreeMap<String, Arc<Parallel>>>);

/// One upload in parts.
#[derive(Debug)]
struct Parallel {
    location: Location,
    begin: BeginUpload,
    /// `None` while it is completed, and afterwards.
    part: RwLock<Option<Part>>,
    /// Held while it is completed. The file, when it is.
    completed: tokio::sync::Mutex<Option<FileEntry>>,
    /// The first byte and the one after the last of what is written, sorted and not adjacent.
    arrived: Mutex<Vec<(u64, u64)>>,
    last_used: Mutex<Instant>,
}

impl Uploads {
    /// # Errors
    /// `NotFound` if there is no such upload of this file.
    fn find(&self, location: &Location, id: &str) -> Result<Arc<Parallel>, Problem> {
        let found = lock(&self.0).get(id).filter(|upload| upload.location == *location).cloned();
        let upload = found.ok_or_else(|| {
            let what = format!("can't continue the upload {id:.64}");
            Problem::not_found(what, "there is no such upload of this file").next("begin it again")
        })?;
        *lock(&upload.last_used) = Instant::now();
        Ok(upload)
    }

    fn of_same_content(&self, location: &Location, begin: &BeginUpload) -> Option<UploadState> {
        let uploads = lock(&self.0);
        let same = uploads.iter().find(|(_, u)| u.location == *location && u.begin == *begin);
        same.map(|(id, upload)| upload.state(id))
    }

    /// Drops those of a tenant's files.
    pub fn forget(&self, tenant: &TenantName) {
        let is_of =
            |upload: &Parallel| matches!(&upload.location, Location::In(of, _) if of == tenant);
        let all: Vec<_> = lock(&self.0).extract_if(.., |_, upload| is_of(upload)).collect();
        drop(all);
    }

    /// Drops those to which nobody has sent anything for a while.
    pub fn drop_idle(&self) {
        let is_idle = |upload: &Parallel| lock(&upload.last_used).elapsed() > IDLE_MAX;
        let idle: Vec<_> = lock(&self.0).extract_if(.., |_, upload| is_idle(upload)).collect();
        drop(idle);
    }

    /// Drops those to a path and below it to which nobody sends anything at this moment. Whether there were any.
    pub(crate) fn drop_cut(&self, tenant: &TenantName, path: &DataPath) -> bool {
        let mut uploads = lock(&self.0);
        let cut = uploads.extract_if(.., |_, upload| Parallel::is_cut(upload, tenant, path));
        let cut: Vec<_> = cut.collect();
        drop(uploads);
        !cut.is_empty()
    }

    /// Shows those.
    pub(crate) fn cut(&self, tenant: &TenantName, path: &DataPath) -> Vec<CutUpload> {
        let uploads = lock(&self.0);
        let cut = uploads.values().filter(|upload| Parallel::is_cut(upload, tenant, path));
        let shown = cut.filter_map(|upload| {
            let Location::In(_, path) = &upload.location else { return None };
            let left = IDLE_MAX.saturating_sub(lock(&upload.last_used).elapsed());
            Some(CutUpload {
                path: path.to_string(),
                size_bytes: upload.begin.size_bytes,
                kept_until_ms: unix_ms(SystemTime::now() + left),
            })
        });
        shown.collect()
    }
}

impl Parallel {
    /// Whoever sends something, or completes it, holds it too.
    fn is_cut(upload: &Arc<Self>, tenant: &TenantName, path: &DataPath) -> bool {
        let is_meant =
            matches!(&upload.location, Location::In(of, to) if of == tenant && to.is_within(path));
        is_meant && Arc::strong_count(upload) == 1
    }

    fn state(&self, id: &str) -> UploadState {
        UploadState { upload: id.to_owned(), parts: lock(&self.arrived).clone() }
    }

    /// # Errors
    /// `Conflict` if there are too many parts apart from each other.
    fn add(&self, from: u64, until: u64) -> Result<(), Problem> {
        let mut arrived = lock(&self.arrived);
        let merged = merge(&arrived, from, until);
        UPLOAD_PARTS.check(merged.len()).map_err(|e| {
            Problem::conflict("can't receive a part", e).next("send parts that are adjacent")
        })?;
        *arrived = merged;
        Ok(())
    }
}

/// Adds a range to others.
fn merge(ranges: &[(u64, u64)], from: u64, until: u64) -> Vec<(u64, u64)> {
    let mut new = (from, until);
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len() + 1);
    for range in ranges {
        if range.1 < new.0 || range.0 > new.1 {
            merged.push(*range);
        } else {
            new = (new.0.min(range.0), new.1.max(range.1));
        }
    }
    let place = merged.partition_point(|range| range.0 < new.0);
    merged.insert(place, new);
    merged
}

/// Begins an upload whose parts may come at the same time and in any order. The SHA-256 of the whole has to be said
/// at once.
///
/// # Errors
/// `Invalid` for a SHA-256 or a size that no file has; `NoSpace` beyond the tenant's quota.
pub async fn begin(
    view: &View,
    location: &Location,
    begin: BeginUpload,
) -> Result<UploadState, Problem> {
    if !is_sha256(&begin.sha256) {
        let why = "sha256 is not 64 hexadecimal digits in lower case";
        return Err(Problem::invalid("can't begin an upload", why));
    }
    if i64::try_from(begin.size_bytes).is_err() {
        let why = format!("no file has {} bytes", begin.size_bytes);
        return Err(Problem::invalid("can't begin an upload", why));
    }
    let location = location.clone();
    view.blocking(move |view| {
        let (space, path) = view.to_write(&location, "write")?;
        let uploads = &view.repository.uploads;
        uploads.drop_idle();
        if let Some(state) = uploads.of_same_content(&location, &begin) {
            return Ok(state);
        }
        space.make_directories_above(path)?;
        let mut part = Part::new(&space, path)?;
        part.reserve(begin.size_bytes)?;
        let id = uuid::Uuid::new_v4().to_string();
        let (location, part) = (location.clone(), RwLock::new(Some(part)));
        let (arrived, last_used) = (Mutex::default(), Mutex::new(Instant::now()));
        let completed = tokio::sync::Mutex::default();
        let upload = Parallel { location, begin, part, completed, arrived, last_used };
        let state = upload.state(&id);
        lock(&uploads.0).insert(id, Arc::new(upload));
        Ok(state)
    })
    .await
}

/// The upload, if the account may write the file. The first question about a tenant's files counts them, so it is asked
/// off the async threads.
async fn find(view: &View, location: &Location, id: &str) -> Result<Arc<Parallel>, Problem> {
    let (location, id) = (location.clone(), id.to_owned());
    view.blocking(move |view| {
        view.to_write(&location, "write")?;
        view.repository.uploads.find(&location, &id)
    })
    .await
}

/// Which parts have come.
///
/// # Errors
/// `NotFound` if there is no such upload at this path.
pub async fn state(view: &View, location: &Location, id: &str) -> Result<UploadState, Problem> {
    Ok(find(view, location, id).await?.state(id))
}

/// Ends an upload, and deletes what has come.
pub async fn drop_upload(view: &View, location: &Location, id: &str) -> Result<(), Problem> {
    find(view, location, id).await?;
    let taken = lock(&view.repository.uploads.0).remove(id);
    // Its part is deleted with it.
    view.blocking(move |_| {
        drop(taken);
        Ok(())
    })
    .await
}

/// Takes one part. A part that is cut has not come.
pub async fn part(
    view: &View,
    location: &Location,
    id: &str,
    range: Option<ContentRange>,
    body: Body,
) -> Result<UploadState, Problem> {
    let upload = find(view, location, id).await?;
    let what = "can't receive a part";
    let range = range.ok_or_else(|| Problem::invalid(what, "it has no Content-Range"))?;
    if range.until > upload.begin.size_bytes {
        let why =
            format!("it ends at {}, and the file at {}", range.until, upload.begin.size_bytes);
        return Err(Problem::invalid(what, why));
    }
    let mut at = range.from;
    let mut pieces = body.into_data_stream();
    let mut piece = Vec::new();
    loop {
        let next = pieces.next().await.transpose();
        let next = next.map_err(|e| Problem::unavailable(what, e))?;
        let is_end = next.is_none();
        piece.extend_from_slice(&next.unwrap_or_default());
        if at + piece.len() as u64 > range.until {
            return Err(Problem::invalid(what, "it is longer than its Content-Range"));
        }
        if (is_end && !piece.is_empty()) || piece.len() >= PIECE_BYTES {
            at = write(view, &upload, at, std::mem::take(&mut piece)).await?;
        }
        if is_end {
            break;
        }
    }
    if at != range.until {
        return Err(Problem::invalid(what, "it is shorter than its Content-Range"));
    }
    *lock(&upload.last_used) = Instant::now();
    Ok(upload.state(id))
}

/// What is written counts at once: after a cut, the client sends only the rest.
async fn write(
    view: &View,
    upload: &Arc<Parallel>,
    at: u64,
    piece: Vec<u8>,
) -> Result<u64, Problem> {
    let upload = Arc::clone(upload);
    view.blocking(move |_| {
        let part = upload.part.read().unwrap_or_else(PoisonError::into_inner);
        let part = part.as_ref().ok_or_else(|| {
            let why = "the upload is being completed";
            Problem::conflict("can't receive a part", why).next("wait for its end")
        })?;
        part.write(at, &piece)?;
        let until = at + piece.len() as u64;
        upload.add(at, until)?;
        Ok(until)
    })
    .await
}

/// Puts the file in its place when all parts have come and their SHA-256 is right. Asked again, it answers as it did.
pub async fn complete(view: &View, location: &Location, id: &str) -> Result<FileEntry, Problem> {
    let upload = find(view, location, id).await?;
    let (view, id) = (view.clone(), id.to_owned());
    let completed = tokio::spawn(async move {
        let mut completed = upload.completed.lock().await;
        if let Some(entry) = &*completed {
            return Ok(entry.clone());
        }
        let done = publish(&view, &upload).await;
        // What has only not reached the store stays, to be tried again.
        if upload.part.read().unwrap_or_else(PoisonError::into_inner).is_none() {
            lock(&view.repository.uploads.0).remove(&id);
        }
        *completed = done.as_ref().ok().cloned();
        done
    });
    completed.await.map_err(|e| Problem::internal("can't complete an upload", e))?
}

async fn publish(view: &View, upload: &Arc<Parallel>) -> Result<FileEntry, Problem> {
    let what = "can't complete an upload";
    let size = upload.begin.size_bytes;
    if size > 0 && *lock(&upload.arrived) != [(0, size)] {
        return Err(Problem::conflict(what, "some of its parts have not arrived")
            .next("ask which ones have, and send the others"));
    }
    let turn = view.hash_turn(upload.location.clone()).await;
    let whole = Arc::clone(upload);
    let whole = view.blocking(move |_| {
        // A part that is still being written would change what is hashed: it is waited for.
        let taken = whole.part.write().unwrap_or_else(PoisonError::into_inner).take();
        let part = taken.ok_or_else(|| {
            Problem::not_found(what, "its content was not what was announced")
                .next("begin it again")
        })?;
        let mut summer = Summer::new();
        part.sum(&mut summer, 0, size)?;
        let sums = summer.sums();
        part.check(&sums.sha256, Some(&whole.begin.sha256))?;
        Ok((part, sums))
    });
    let (mut part, sums) = whole.await?;
    // A store may take long.
    drop(turn);
    match part.send_all(&sums.sha256).await {
        Ok(key) => view.blocking(move |_| part.publish(&sums, key.as_deref())).await,
        Err(problem) => {
            *upload.part.write().unwrap_or_else(PoisonError::into_inner) = Some(part);
            *lock(&upload.last_used) = Instant::now();
            Err(problem)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::merge;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut ranges = Vec::new();
        for (from, until) in [(10, 20), (30, 40), (0, 5), (20, 30)] {
            ranges = merge(&ranges, from, until);
        }
        assert_eq!(ranges, [(0, 5), (10, 40)]);
        assert_eq!(merge(&ranges, 3, 50), [(0, 50)]);
        assert_eq!(merge(&ranges, 12, 13), ranges);
    }
}
