//! The outputs of a job as a tar, made of the repository's files while it is sent.

use std::io;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::poll_fn;
use perigee_model::data::FileEntry;
use perigee_model::{Problem, ProblemKind};
use perigee_repository::{DataPath, Location, View};
use tokio::sync::mpsc;

use super::{OutputPlace, PAGE};
use crate::guest::tars;

/// Pieces that wait until the client takes them.
const PIECES_MAX: usize = 4;

/// A piece of a file.
const PIECE_BYTES: usize = 256 << 10;

type Pieces = mpsc::Sender<Result<Bytes, io::Error>>;

/// Starts to make the archive. A file that changes meanwhile, or can't be read, ends the stream with an error.
///
/// # Errors
/// `NotFound` if there are no outputs any more.
pub async fn archive(
    view: View,
    place: OutputPlace,
) -> Result<impl Stream<Item = Result<Bytes, io::Error>> + Send, Problem> {
    let entry = view.entry(place.location()).await;
    if !entry.is_ok_and(|entry| entry.is_directory()) {
        let why = format!("there is nothing in {place} any more");
        return Err(Problem::not_found("can't fetch the output", why));
    }
    let (pieces, mut waiting) = mpsc::channel(PIECES_MAX);
    tokio::spawn(async move {
        let made = Archive { view, place, pieces: pieces.clone() }.make().await;
        if let Err(problem) = made {
            tracing::warn!("can't send the outputs of a job: {problem}");
            // The client has gone, or learns of it now.
            let _ = pieces.send(Err(io::Error::other(problem.why))).await;
        }
    });
    Ok(poll_fn(move |context| waiting.poll_recv(context)))
}

struct Archive {
    view: View,
    place: OutputPlace,
    pieces: Pieces,
}

impl Archive {
    fn at(&self, path: &DataPath) -> Result<(DataPath, Location), Problem> {
        let whole = DataPath::parse(&format!("{}/{path}", self.place.path))?;
        Ok((whole.clone(), Location::In(self.place.tenant.clone(), whole)))
    }

    async fn make(&self) -> Result<(), Problem> {
        let mut left = vec![DataPath::default()];
        while let Some(directory) = left.pop() {
            let (_, location) = self.at(&directory)?;
            let mut after = None;
            loop {
                let page = match self.view.list(location.clone(), after, PAGE).await {
                    // It was deleted meanwhile.
                    Err(problem) if problem.kind == ProblemKind::NotFound => break,
                    page => page?,
                };
                for entry in &page.entries {
                    let path = directory.join(&entry.name)?;
                    self.put(&path, entry).await?;
                    if entry.is_directory() {
                        left.push(path);
                    }
                }
                after = page.after;
                if after.is_none() {
                    break;
                }
            }
        }
        self.send(tars::end()).await
    }

    async fn send(&self, bytes: Bytes) -> Result<(), Problem> {
        let sent = self.pieces.send(Ok(bytes)).await;
        sent.map_err(|_| Problem::unavailable("can't send outputs", "the client has gone"))
    }

    async fn put(&self, path: &DataPath, entry: &FileEntry) -> Result<(), Problem> {
        if entry.is_directory() {
            return self.send(header(path, entry)?).await;
        }
        let (_, location) = self.at(path)?;
        let mut reading = self.view.read(location).await?;
        // What is read is what was opened, whatever the list has said.
        let size_bytes = reading.entry().size_bytes;
        self.send(header(path, reading.entry())?).await?;
        let mut sent = 0;
        while sent < size_bytes {
            let piece = reading.read(sent, PIECE_BYTES).await?;
            if piece.is_empty() {
                return Err(Problem::internal(
                    format!("can't read {path}"),
                    "it has become shorter",
                ));
            }
            sent += piece.len() as u64;
            self.send(piece).await?;
        }
        self.send(tars::padding(sent)).await
    }
}

fn header(path: &DataPath, entry: &FileEntry) -> Result<Bytes, Problem> {
    let is_directory = entry.is_directory();
    let made = tars::headers(
        &path.to_string(),
        &tars::Entry {
            is_directory,
            mode: if is_directory { 0o755 } else { 0o644 },
            modified_s: entry.modified_ms / 1000,
            size_bytes: entry.size_bytes,
        },
    );
    made.map_err(|e| Problem::internal(format!("can't make a tar with {path}"), e))
}
