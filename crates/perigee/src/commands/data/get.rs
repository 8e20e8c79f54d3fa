//! Fetching files from the repository.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use indicatif::ProgressBar;
use perigee_http::Client;
use perigee_http::certificate::hex;
use perigee_model::data::{FileAddress, FileEntry};
use perigee_model::{Problem, ProblemKind};
use sha2::Digest as _;
use tokio::sync::mpsc;

use crate::commands::data::transfer::{AT_ONCE, PART_BYTES, TRIES, hashed, list, may_go_on};

/// Fetches a file or a directory with all that is in it. What is there of a file from an earlier try is not fetched
/// again. `to` defaults to the name in the current directory.
pub async fn get(
    client: &Client,
    from: &FileAddress,
    to: Option<PathBuf>,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    let entry: FileEntry = client.get(&format!("{}?stat", from.url())).await?;
    let to = to.unwrap_or_else(|| PathBuf::from(&entry.name));
    if to.as_os_str().is_empty() {
        let what = format!("can't fetch {from}");
        return Err(Problem::invalid(what, "it has no name").next("say where it is to be put"));
    }
    let to = match !entry.is_directory() && to.is_dir() {
        true => to.join(check_name(&entry.name)?),
        false => to,
    };
    get_entry(client, from.clone(), entry, to, bar).await
}

/// Boxed, because it calls itself. Directories are at most 64 deep.
fn get_entry<'a>(
    client: &'a Client,
    from: FileAddress,
    entry: FileEntry,
    to: PathBuf,
    bar: &'a ProgressBar,
) -> Pin<Box<dyn Future<Output = Result<(), Problem>> + Send + 'a>> {
    Box::pin(async move {
        if !entry.is_directory() {
            bar.inc_length(entry.size_bytes);
            return get_file(client, &from, &entry, &to, bar).await;
        }
        std::fs::create_dir_all(&to).map_err(|e| unwritable(&to, &e))?;
        for entry in list(client, &from).await? {
            let name = check_name(&entry.name)?;
            let (from, to) = (from.join(name), to.join(name));
            get_entry(client, from, entry, to, bar).await?;
        }
        Ok(())
    })
}

/// A name that a server sends becomes a part of a path here.
fn check_name(name: &str) -> Result<&str, Problem> {
    let is_one = !name.is_empty() && !name.contains('/') && name != "." && name != "..";
    is_one.then_some(name).ok_or_else(|| {
        Problem::internal("can't fetch a directory", format!("{name:?} is not the name of a file"))
    })
}

fn unwritable(path: &Path, error: &std::io::Error) -> Problem {
    Problem::of_io(ProblemKind::Invalid, format!("can't write {}", path.display()), error)
}

/// A file gets its name when all of it is here. A device or a pipe would be replaced by it.
pub fn check_replaceable(to: &Path) -> Result<(), Problem> {
    if std::fs::metadata(to).is_ok_and(|found| !found.is_file()) {
        let what = format!("can't write {}", to.display());
        return Err(
            Problem::invalid(what, "it is there, and is no regular file").next("name another file")
        );
    }
    Ok(())
}

/// What has arrived of a file is beside it, under a name with the beginning of its hash: it is not used for another
/// version of the file.
async fn get_file(
    client: &Client,
    from: &FileAddress,
    entry: &FileEntry,
    to: &Path,
    bar: &ProgressBar,
) -> Result<(), Problem> {
    check_replaceable(to)?;
    let sha256 = entry.sha256.as_deref().unwrap_or("unknown");
    let mut part = to.as_os_str().to_owned();
    part.push(format!(".part-{}", sha256.get(..12).unwrap_or(sha256)));
    let part = PathBuf::from(part);
    let before = bar.position();
    let mut tries = 1;
    let found = loop {
        bar.set_position(before);
        match fetch(client, from, entry.size_bytes, &part, bar).await {
            Err(problem) if may_go_on(&problem) && tries < TRIES => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                tries += 1;
            }
            fetched => break fetched?,
        }
    };
    if entry.sha256.as_ref().is_some_and(|expected| *expected != found) {
        std::fs::remove_file(&part).map_err(|e| unwritable(&part, &e))?;
        let what = format!("can't fetch {from}");
        let why = format!("what has arrived has the SHA-256 {found}, and not {sha256}");
        return Err(
            Problem::unavailable(what, why).next("fetch it again: it may have been replaced")
        );
    }
    std::fs::rename(&part, to).map_err(|e| unwritable(to, &e))
}

/// Pieces that wait until they are written.
const WAITING_MAX: usize = 2;

/// Fetches what is not there yet, and returns the hash of all.
async fn fetch(
    client: &Client,
    from: &FileAddress,
    size: u64,
    part: &Path,
    bar: &ProgressBar,
) -> Result<String, Problem> {
    let fault = |e: std::io::Error| unwritable(part, &e);
    let file = File::options().read(true).append(true).create(true).open(part).map_err(fault)?;
    let there = file.metadata().map_err(fault)?.len().min(size);
    file.set_len(there).map_err(fault)?;
    bar.inc(there);
    let url = from.url();
    let starts = (there..size).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
    let ranges = starts.map(|start| (start, size.min(start + PART_BYTES)));
    // Pieces arrive at the same time, and are written in order: the file's length says what has arrived.
    let pieces = stream::iter(ranges).map(|(start, end)| get_piece(client, &url, start, end));
    let mut pieces = pieces.buffered(AT_ONCE);
    // The next ones arrive meanwhile.
    let (to_write, arriving) = mpsc::channel(WAITING_MAX);
    let writing = tokio::task::spawn_blocking(move || write(file, there, arriving));
    let mut failed = Ok(());
    while let Some(piece) = pieces.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(problem) => {
                failed = Err(problem);
                break;
            }
        };
        bar.inc(piece.len() as u64);
        if to_write.send(piece).await.is_err() {
            break;
        }
    }
    drop(to_write);
    // What has arrived is written also if no more does.
    let written = writing.await.map_err(|e| Problem::internal("can't write a file", e))?;
    failed?;
    written.map_err(fault)
}

/// Writes pieces behind what a file has already, and returns the hash of all.
fn write(
    mut file: File,
    there: u64,
    mut pieces: mpsc::Receiver<Vec<u8>>,
) -> std::io::Result<String> {
    let mut hasher = hashed(&mut (&file).take(there))?;
    while let Some(piece) = pieces.blocking_recv() {
        file.write_all(&piece)?;
        hasher.update(&piece);
    }
    file.sync_all()?;
    Ok(hex(&hasher.finalize()))
}

async fn get_piece(client: &Client, url: &str, from: u64, until: u64) -> Result<Vec<u8>, Problem> {
    let cut = |e: &dyn std::fmt::Display| Problem::unavailable("can't fetch a file", e);
    let mut response = client.get_range(url, from, until).await?;
    let length = usize::try_from(until - from).map_err(|e| cut(&e))?;
    let mut piece = Vec::with_capacity(length);
    while let Some(bytes) = response.chunk().await.map_err(|e| cut(&e))? {
        piece.extend_from_slice(&bytes);
        if piece.len() > length {
            return Err(cut(&"the server sends more than was asked for"));
        }
    }
    (piece.len() == length).then_some(piece).ok_or_else(|| cut(&"the answer ended too early"))
}
