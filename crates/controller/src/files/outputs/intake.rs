//! Writes the entries of an output tar into the repository while the tar arrives.
//!
//! A thread reads the tar and hands its parts over; the job's driver writes them. So a driver that is dropped (by a
//! cancel, or at the controller's end) writes nothing more.

use std::io::{self, Read};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use perigee_model::data::FileKind;
use perigee_model::guest::HOLES_FACTOR;
use perigee_model::units::format_bytes;
use perigee_model::{Problem, ProblemKind};
use perigee_repository::{Begin, DataPath, Location, View, Writing};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::entries::{self, Part};
use super::links::Links;
use super::{LeftOutList, OutputPlace, put_in_place, remove_tree};
use crate::hash::hex;

/// The stream of a tar without new bytes for this long is given up.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Parts that wait until they are written. Each is a piece of a file at most.
const PARTS_MAX: usize = 8;

/// Files up to this length are written several at a time, because each waits for the disk.
const SMALL_BYTES: u64 = 128 << 10;

/// How many of them.
const SMALL_AT_ONCE: usize = 16;

/// What the guest says of its tar.
#[derive(Debug, Clone)]
pub struct Expected {
    pub bytes: u64,
    pub sha256: String,
    /// The files may have so many bytes together, with the copies that links become.
    pub room_bytes: u64,
}

/// What came into the repository.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputsTaken {
    pub files: u64,
    pub bytes: u64,
    pub left_out: LeftOutList,
    /// Why what was read is not what the guest has written.
    pub damaged: Option<String>,
}

/// Reads a job's output tar and writes what is in it below a place of the repository.
///
/// # Errors
/// If the stream is cut, or the repository can't take a file now. Then all of it is to be done again.
pub async fn take<S, E>(
    view: &View,
    place: &OutputPlace,
    body: S,
    expected: &Expected,
) -> Result<OutputsTaken, Problem>
where
    S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    E: std::fmt::Display,
{
    let in_work = place.in_work()?;
    let begun = Intake::begin(view, &in_work, expected.room_bytes).await;
    let mut intake = begun.map_err(to_wait_for)?;
    let (parts, mut arriving) = mpsc::channel(PARTS_MAX);
    let (runtime, bytes_max) = (Handle::current(), expected.bytes);
    let holes_max = expected.room_bytes.saturating_mul(HOLES_FACTOR);
    let reader = tokio::task::spawn_blocking(move || {
        let mut arrived = Arrived::new(body, runtime, bytes_max);
        entries::read(&mut arrived, holes_max, |part| parts.blocking_send(part).is_ok());
        arrived.end(|| parts.is_closed())
    });
    while let Some(part) = arriving.recv().await {
        if let Err(problem) = intake.part(part).await {
            intake.give_up().await;
            return Err(to_wait_for(problem));
        }
    }
    let (bytes, sha256) =
        reader.await.map_err(|e| Problem::internal("can't read a job's outputs", e))??;
    let mut taken = intake.end().await.map_err(to_wait_for)?;
    if place.is_own {
        put_in_place(view, &in_work, place).await.map_err(to_wait_for)?;
    }
    if bytes != expected.bytes || sha256 != expected.sha256 {
        taken.damaged = Some(format!(
            "the output disk has {bytes} bytes with SHA-256 {sha256}, but the guest wrote {} with {}",
            expected.bytes, expected.sha256
        ));
    }
    Ok(taken)
}

/// A repository that can't take the outputs ends no job: the job waits until a person has made room for them.
fn to_wait_for(problem: Problem) -> Problem {
    let kind = match problem.kind {
        kind @ (ProblemKind::NoSpace | ProblemKind::Internal) => kind,
        _ => ProblemKind::Unavailable,
    };
    Problem { kind, ..problem }
}

/// The bytes of a tar as they arrive, counted and hashed.
struct Arrived<S> {
    stream: S,
    runtime: Handle,
    piece: Bytes,
    hash: Sha256,
    bytes: u64,
    bytes_max: u64,
    cut: Option<Problem>,
}

impl<S, E> Arrived<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    fn new(stream: S, runtime: Handle, bytes_max: u64) -> Self {
        let (piece, hash) = (Bytes::new(), Sha256::new());
        Self { stream, runtime, piece, hash, bytes: 0, bytes_max, cut: None }
    }

    /// Waits for the next piece; an empty one is the end.
    fn next(&mut self) -> Result<(), Problem> {
        let what = "can't read a job's outputs";
        let next = async { tokio::time::timeout(SILENCE_MAX, self.stream.next()).await };
        let next = self.runtime.block_on(next).map_err(|_| {
            let why = format!("no bytes arrived for {} s", SILENCE_MAX.as_secs());
            Problem::unavailable(what, why)
        })?;
        let Some(piece) = next else { return Ok(()) };
        self.piece = piece.map_err(|e| Problem::unavailable(what, e))?;
        self.bytes += self.piece.len() as u64;
        if self.bytes > self.bytes_max {
            let why = format!("the answer is longer than the {} bytes asked for", self.bytes_max);
            return Err(Problem::internal(what, why));
        }
        self.hash.update(&self.piece);
        Ok(())
    }

    /// Reads what follows the archive, until somebody wants nothing more. Returns the length and the hash of all.
    fn end(mut self, is_unwanted: impl Fn() -> bool) -> Result<(u64, String), Problem> {
        loop {
            if let Some(problem) = self.cut {
                return Err(problem);
            }
            if is_unwanted() {
                return Err(Problem::unavailable(
                    "can't read a job's outputs",
                    "nobody waits for them",
                ));
            }
            let before = self.bytes;
            self.next()?;
            if self.bytes == before {
                return Ok((self.bytes, hex(&self.hash.finalize())));
            }
        }
    }
}

impl<S, E> Read for Arrived<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            let before = self.bytes;
            if let Err(problem) = self.next() {
                let error = io::Error::other(problem.why.clone());
                self.cut = Some(problem);
                return Err(error);
            }
            if self.bytes == before {
                return Ok(0);
            }
        }
        let length = self.piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}

/// A file of which a part has arrived.
enum Begun {
    /// It is written when all of it is there.
    Small {
        path: DataPath,
        size_bytes: u64,
        content: Vec<u8>,
    },
    Large {
        path: DataPath,
        size_bytes: u64,
        writing: Box<Writing>,
    },
    /// The repository does not take its name.
    Refused,
}

type Written = (String, u64, Result<(), Problem>);

struct Intake<'a> {
    view: &'a View,
    place: &'a OutputPlace,
    room_bytes: u64,
    begun: Option<Begun>,
    small: JoinSet<Written>,
    links: Links,
    taken: OutputsTaken,
}

impl<'a> Intake<'a> {
    async fn begin(
        view: &'a View,
        place: &'a OutputPlace,
        room_bytes: u64,
    ) -> Result<Self, Problem> {
        if place.is_own {
            // What an earlier try has left.
            remove_tree(view, &place.tenant, &place.path).await?;
        }
        let intake = Self {
            view,
            place,
            room_bytes,
            begun: None,
            small: JoinSet::new(),
            links: Links::default(),
            taken: OutputsTaken::default(),
        };
        // From here on, a name that is not taken is the guest's fault.
        intake.make_directory(&place.path).await?;
        Ok(intake)
    }

    fn at(&self, path: &DataPath) -> Location {
        Location::In(self.place.tenant.clone(), path.clone())
    }

    /// The path in the repository of one below the outputs' directory.
    fn below(&self, path: &str) -> Result<DataPath, Problem> {
        DataPath::parse(&format!("{}/{path}", self.place.path))
    }

    async fn make_directory(&self, path: &DataPath) -> Result<(), Problem> {
        let mut missing = vec![path.clone()];
        while let Some(path) = missing.pop() {
            if path.is_root() {
                continue;
            }
            match self.view.make_directory(self.at(&path)).await {
                Err(problem) if problem.kind == ProblemKind::NotFound => {
                    let Some((above, _)) = path.split() else { return Err(problem) };
                    missing.extend([path, above]);
                }
                Err(problem) => {
                    let found = self.view.entry(self.at(&path)).await;
                    if !found.is_ok_and(|entry| entry.is_directory()) {
                        return Err(problem);
                    }
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    async fn part(&mut self, part: Part) -> Result<(), Problem> {
        if !matches!(part, Part::Content(_)) {
            // It is not all of the file before, which was told.
            self.begun = None;
        }
        match part {
            Part::LeftOut { name, why, is_lost } => self.taken.left_out.add(&name, &why, is_lost),
            Part::Directory(path) => {
                let made = match self.below(&path.to_string()) {
                    Ok(below) => {
                        // A file that is still being written may have the name of a directory above.
                        self.make_directory(&below).await
                    }
                    Err(problem) => Err(problem),
                };
                self.unless_refused(&path.to_string(), FileKind::Directory, made).await?;
            }
            Part::Link { path, to } => {
                let name = path.to_string();
                if !self.links.add(name.clone(), to) {
                    self.taken.left_out.add(&name, "there are too many links", false);
                }
            }
            Part::File { path, size_bytes, holes_bytes } => {
                // They take nothing from the room for copies of what links lead to.
                self.room_bytes = self.room_bytes.saturating_add(holes_bytes);
                let begun = self.begin_file(&path, size_bytes).await;
                self.begun = Some(match begun {
                    Ok(begun) => begun,
                    refused => {
                        let name = path.to_string();
                        self.unless_refused(&name, FileKind::File, refused.map(drop)).await?;
                        Begun::Refused
                    }
                });
                self.end_file_if_whole().await?;
            }
            Part::Content(bytes) => {
                match &mut self.begun {
                    Some(Begun::Small { content, .. }) => content.extend_from_slice(&bytes),
                    Some(Begun::Large { writing, .. }) => {
                        writing.write(writing.length(), &bytes).await?;
                    }
                    Some(Begun::Refused) | None => {}
                }
                self.end_file_if_whole().await?;
            }
        }
        Ok(())
    }

    async fn begin_file(&self, path: &DataPath, size_bytes: u64) -> Result<Begun, Problem> {
        let path = self.below(&path.to_string())?;
        if size_bytes <= SMALL_BYTES {
            return Ok(Begun::Small { path, size_bytes, content: Vec::new() });
        }
        let writing = self.view.write(self.at(&path), Begin::Once, true).await?;
        Ok(Begun::Large { path, size_bytes, writing: Box::new(writing) })
    }

    async fn end_file_if_whole(&mut self) -> Result<(), Problem> {
        let is_whole = match &self.begun {
            Some(Begun::Small { size_bytes, content, .. }) => content.len() as u64 == *size_bytes,
            Some(Begun::Large { size_bytes, writing, .. }) => writing.length() == *size_bytes,
            Some(Begun::Refused) | None => false,
        };
        if !is_whole {
            return Ok(());
        }
        match self.begun.take() {
            Some(Begun::Large { path, size_bytes, writing }) => {
                let committed = writing.commit(None).await.map(drop);
                self.count((self.name(&path), size_bytes, committed)).await
            }
            Some(Begun::Small { path, size_bytes, content }) => {
                while self.small.len() >= SMALL_AT_ONCE {
                    self.await_small().await?;
                }
                let (view, at, name) = (self.view.clone(), self.at(&path), self.name(&path));
                self.small.spawn(async move {
                    (name, size_bytes, write_small(&view, at, &content).await)
                });
                Ok(())
            }
            Some(Begun::Refused) | None => Ok(()),
        }
    }

    /// The name of a path of the repository as the guest has it.
    fn name(&self, path: &DataPath) -> String {
        path.names()[self.place.path.names().len()..].join("/")
    }

    async fn await_small(&mut self) -> Result<(), Problem> {
        match self.small.join_next().await {
            Some(Ok(written)) => self.count(written).await,
            Some(Err(error)) => Err(Problem::internal("can't write a job's outputs", error)),
            None => Ok(()),
        }
    }

    async fn count(&mut self, (name, bytes, written): Written) -> Result<(), Problem> {
        if written.is_ok() {
            self.taken.files += 1;
            self.taken.bytes += bytes;
        }
        self.unless_refused(&name, FileKind::File, written).await
    }

    /// A name that the repository does not take, or that another entry has, is left out. Any other problem ends this try:
    /// it may be over at the next one.
    async fn unless_refused(
        &mut self,
        name: &str,
        wanted: FileKind,
        done: Result<(), Problem>,
    ) -> Result<(), Problem> {
        match done {
            Err(problem)
                if problem.kind == ProblemKind::Invalid
                    || (problem.kind == ProblemKind::Conflict
                        && self.is_taken(name, wanted).await) =>
            {
                self.taken.left_out.add(name, &problem.why, wanted == FileKind::File);
                Ok(())
            }
            done => done,
        }
    }

    /// Whether something of another kind has the name, or a file has that of a directory above it.
    async fn is_taken(&self, name: &str, wanted: FileKind) -> bool {
        let Ok(path) = self.below(name) else { return true };
        let mut wanted = wanted;
        let mut next = Some(path);
        while let Some(path) = next.filter(|path| *path != self.place.path) {
            match self.view.entry(self.at(&path)).await {
                Ok(entry) if entry.kind != wanted => return true,
                _ => {}
            }
            wanted = FileKind::Directory;
            next = path.split().map(|(above, _)| above);
        }
        false
    }

    /// What is there of the outputs takes no room from others while the job waits.
    async fn give_up(mut self) {
        self.small.shutdown().await;
        if self.place.is_own
            && let Err(problem) = remove_tree(self.view, &self.place.tenant, &self.place.path).await
        {
            tracing::warn!("a part of a job's outputs stays: {problem}");
        }
    }

    /// All parts have come.
    async fn end(mut self) -> Result<OutputsTaken, Problem> {
        self.begun = None;
        while !self.small.is_empty() {
            self.await_small().await?;
        }
        let links = std::mem::take(&mut self.links);
        for name in links.paths() {
            self.copy_linked(name, links.follow(name).as_deref()).await?;
        }
        Ok(self.taken)
    }

    /// Makes a copy of what a link leads to.
    async fn copy_linked(&mut self, name: &str, to: Option<&str>) -> Result<(), Problem> {
        let leave_out = |intake: &mut Self, why: &str| {
            intake.taken.left_out.add(name, why, false);
            Ok(())
        };
        let Some(to) = to else {
            return leave_out(self, "a link that leads around in a circle, or too far");
        };
        let no_file = format!("a link to {to:?}, which is no file of the outputs");
        let (Ok(from), Ok(path)) = (self.below(to), self.below(name)) else {
            return leave_out(self, &no_file);
        };
        let entry = match self.view.entry(self.at(&from)).await {
            Ok(entry) if !entry.is_directory() => entry,
            Ok(_) => return leave_out(self, "a link to a directory"),
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                return leave_out(self, &no_file);
            }
            Err(problem) if problem.kind == ProblemKind::Conflict => {
                return leave_out(self, &no_file);
            }
            Err(problem) => return Err(problem),
        };
        if self.taken.bytes.saturating_add(entry.size_bytes) > self.room_bytes {
            let room = format_bytes(self.room_bytes);
            let why = format!("with a copy of what it leads to, it would be more than {room}");
            return leave_out(self, &why);
        }
        let made = match path.split() {
            Some((above, _)) => self.make_directory(&above).await,
            None => Ok(()),
        };
        let copied = match made {
            Ok(()) => self.view.copy(self.at(&from), self.at(&path), None).await,
            refused => refused,
        };
        self.count((name.to_owned(), entry.size_bytes, copied)).await
    }
}

async fn write_small(view: &View, at: Location, content: &[u8]) -> Result<(), Problem> {
    let mut writing = view.write(at, Begin::Once, true).await?;
    writing.write(0, content).await?;
    writing.commit(None).await.map(drop)
}
