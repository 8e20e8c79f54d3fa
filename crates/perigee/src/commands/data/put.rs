//! Sending files to the repository.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use indicatif::ProgressBar;
use perigee_http::{Body, Client, Method};
use perigee_model::data::{BeginUpload, FileAddress, FileEntry, UploadState};
use perigee_model::{Problem, ProblemKind};

use crate::commands::data::transfer::{AT_ONCE, PART_BYTES, TRIES, hash, may_go_on};

/// Links can lead in a circle.
const DEPTH_MAX: usize = 64;

/// A file that is to be sent.
pub struct Source {
    pub path: PathBuf,
    pub to: FileAddress,
    pub size_bytes: u64,
}

/// Sends a file or a directory with all that is in it, [`AT_ONCE`] files at the same time.
///
/// # Errors
/// The first one; what was sent before stays.
pub async fn put(
    client: &Client,
    from: &Path,
    to: &FileAddress,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    let mut sources = Vec::new();
    collect(from, to.clone(), 0, &mut sources)?;
    bar.set_length(sources.iter().map(|source| source.size_bytes).sum());
    let sent = stream::iter(sources).map(|source| put_file(client, source, bar));
    sent.buffer_unordered(AT_ONCE).try_collect::<Vec<()>>().await.map(drop)
}

fn unreadable(path: &Path, error: &std::io::Error) -> Problem {
    let what = format!("can't read {}", path.display());
    match error.kind() {
        std::io::ErrorKind::NotFound => Problem::not_found(what, error),
        _ => Problem::invalid(what, error),
    }
}

fn collect(
    from: &Path,
    to: FileAddress,
    depth: usize,
    sources: &mut Vec<Source>,
) -> Result<(), Problem> {
    let fault = |e| unreadable(from, &e);
    let metadata = from.metadata().map_err(fault)?;
    if !metadata.is_dir() && !metadata.is_file() {
        let what = format!("can't send {}", from.display());
        return Err(Problem::invalid(what, "it is neither a file nor a directory")
            .next("write what it gives to a file first"));
    }
    if metadata.is_file() {
        sources.push(Source { path: from.to_owned(), to, size_bytes: metadata.len() });
        return Ok(());
    }
    if depth == DEPTH_MAX {
        let what = format!("can't send {}", from.display());
        return Err(Problem::invalid(what, format!("it is {DEPTH_MAX} directories deep")));
    }
    for entry in from.read_dir().map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let name = entry.file_name().into_string().map_err(|name| {
            let what = format!("can't send {name:?}");
            Problem::invalid(what, "its name is not UTF-8").next("give it another name")
        })?;
        collect(&entry.path(), to.join(&name), depth + 1, sources)?;
    }
    Ok(())
}

/// A transfer that is cut goes on: what has arrived is not sent again.
async fn put_file(client: &Client, source: Source, bar: &ProgressBar) -> Result<(), Problem> {
    let path = source.path.clone();
    let hashed = tokio::task::spawn_blocking(move || {
        let file = File::open(&path).map_err(|e| unreadable(&path, &e))?;
        let sha256 = hash(&file).map_err(|e| unreadable(&path, &e))?;
        Ok::<_, Problem>((Arc::new(file), sha256))
    });
    let (file, sha256) = hashed.await.map_err(|e| Problem::internal("can't read a file", e))??;
    put_opened(client, &source, &file, &sha256, bar).await
}

/// Sends an open file whose hash is known.
pub async fn put_opened(
    client: &Client,
    source: &Source,
    file: &Arc<File>,
    sha256: &str,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    let mut tries = 1;
    loop {
        let sent = if source.size_bytes <= PART_BYTES {
            put_whole(client, source, file, sha256, bar).await
        } else {
            put_parts(client, source, file, sha256, bar).await
        };
        match sent {
            Err(problem) if may_go_on(&problem) && tries < TRIES => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                tries += 1;
            }
            sent => return sent,
        }
    }
}

async fn read(file: &Arc<File>, from: u64, until: u64) -> Result<Vec<u8>, Problem> {
    let file = Arc::clone(file);
    let read = tokio::task::spawn_blocking(move || {
        let mut part = vec![0; usize::try_from(until - from).unwrap_or(0)];
        file.read_exact_at(&mut part, from).map(|()| part)
    });
    let fault = |e: &dyn std::fmt::Display| {
        Problem::invalid("can't send a file", e)
            .next("it may have been changed meanwhile: try again")
    };
    read.await.map_err(|e| fault(&e))?.map_err(|e| fault(&e))
}

async fn put_whole(
    client: &Client,
    source: &Source,
    file: &Arc<File>,
    sha256: &str,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    let content = read(file, 0, source.size_bytes).await?;
    let url = source.to.url();
    let _: FileEntry = client.put_checked(&url, sha256, Body::from(content)).await?;
    bar.inc(source.size_bytes);
    Ok(())
}

/// A server that was started again has forgotten the upload, which then begins anew.
fn begins_anew(problem: Problem) -> Problem {
    match problem.kind {
        ProblemKind::NotFound => Problem { kind: ProblemKind::Unavailable, ..problem },
        _ => problem,
    }
}

async fn put_parts(
    client: &Client,
    source: &Source,
    file: &Arc<File>,
    sha256: &str,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    let size = source.size_bytes;
    let url = source.to.url();
    let begin = BeginUpload { size_bytes: size, sha256: sha256.to_owned() };
    let state: UploadState = client.post(&format!("{url}?upload"), &begin).await?;
    let url = format!("{url}?upload={}", state.upload);
    let parts = missing(&state.parts, size);
    let left: u64 = parts.iter().map(|(from, until)| until - from).sum();
    let before = bar.position();
    bar.inc(size - left);
    let sent = stream::iter(parts).map(|(from, until)| {
        let (url, file) = (&url, file);
        async move {
            let part = Body::from(read(file, from, until).await?);
            let put = client.put_range::<UploadState>(url, (from, until, size), part).await;
            put.map_err(begins_anew)?;
            bar.inc(until - from);
            Ok::<_, Problem>(())
        }
    });
    let sent = sent.buffer_unordered(AT_ONCE).try_collect::<Vec<()>>().await;
    if let Err(problem) = sent {
        bar.set_position(before);
        return Err(problem);
    }
    // The server hashes all of it, and may have to send it on to a store: that takes as long as it takes.
    match client.send_body::<FileEntry>(Method::POST, &url, Body::empty()).await {
        // An answer that was lost: the upload is complete already.
        Err(problem) if problem.kind == ProblemKind::NotFound => {
            let found = client.get::<FileEntry>(&format!("{}?stat", source.to.url())).await;
            let is_there = found.is_ok_and(|entry| entry.sha256.as_deref() == Some(sha256));
            if is_there { Ok(()) } else { Err(begins_anew(problem)) }
        }
        completed => completed.map(drop),
    }
}

/// What lies between the parts that have arrived, cut into requests.
fn missing(parts: &[(u64, u64)], size: u64) -> Vec<(u64, u64)> {
    let mut missing = Vec::new();
    let mut at = 0;
    for (from, until) in parts.iter().copied().chain([(size, size)]) {
        while at < from {
            let end = from.min(at + PART_BYTES);
            missing.push((at, end));
            at = end;
        }
        at = at.max(until);
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_not_arrived_is_sent() {
        let size = 3 * PART_BYTES + 5;
        assert_eq!(missing(&[(0, size)], size), []);
        assert_eq!(missing(&[(10, size)], size), [(0, 10)]);
        let all = missing(&[], size);
        assert_eq!(all.len(), 4);
        assert_eq!((all[0].0, all[3]), (0, (3 * PART_BYTES, size)));
    }
}
