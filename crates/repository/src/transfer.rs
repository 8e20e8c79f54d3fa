//! Files for the doors: the next pieces are read, and the last one is hashed and written, while the network has another
//! one. Each open file needs 512 KiB of memory, however long it is.

use std::convert::identity;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use perigee_model::Problem;
use perigee_model::data::FileEntry;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinHandle};

use crate::http::headers::Expected;
use crate::path::DataPath;
use crate::properties::Property;
use crate::reader::FileReader;
use crate::upload::{Begin, Upload};

/// Larger pieces need more memory for each client and are not faster.
const PIECE_BYTES: usize = 256 << 10;

fn lost(error: JoinError) -> Problem {
    Problem::internal("can't use the repository", error)
}

/// Pieces that are read, and were not taken yet. Smaller ones than those that are written, and more of them, so that the disk and the
/// network seldom wait for each other.
const READ_BYTES: usize = PIECE_BYTES / 2;
const AHEAD: usize = 3;

/// What is being read ahead.
#[derive(Debug)]
struct Ahead {
    /// It gives the reader back when nobody takes the pieces any more.
    task: JoinHandle<Result<FileReader, JoinError>>,
    pieces: mpsc::Receiver<Result<Bytes, Problem>>,
    /// The offset of the first of them.
    next: u64,
}

/// Reads on, to the file's end or an error. A client that is slow keeps no thread.
async fn read_ahead(
    mut reader: FileReader,
    mut offset: u64,
    mut to: mpsc::Sender<Result<Bytes, Problem>>,
) -> Result<FileReader, JoinError> {
    let mut is_over = false;
    while !is_over && to.reserve().await.is_ok() {
        if reader.is_remote() {
            let piece = reader.read_async(offset, READ_BYTES).await;
            is_over = !hand_on(&to, &mut offset, piece);
            continue;
        }
        let reads = move || {
            while !is_over && to.capacity() > 0 && !to.is_closed() {
                let piece = reader.read(offset, READ_BYTES);
                is_over = !hand_on(&to, &mut offset, piece);
            }
            (reader, offset, to, is_over)
        };
        (reader, offset, to, is_over) = tokio::task::spawn_blocking(reads).await?;
    }
    Ok(reader)
}

/// Returns whether there may be more. There is room for the piece.
fn hand_on(
    to: &mpsc::Sender<Result<Bytes, Problem>>,
    offset: &mut u64,
    piece: Result<Bytes, Problem>,
) -> bool {
    let length = piece.as_ref().map(Bytes::len);
    if length == Ok(0) {
        return false;
    }
    *offset += length.as_ref().map_or(0, |length| *length as u64);
    let may_go_on = length.is_ok();
    to.try_send(piece).is_ok() && may_go_on
}

/// A file that is read.
#[derive(Debug)]
pub struct Reading {
    entry: FileEntry,
    /// `None` while something is read ahead.
    reader: Option<FileReader>,
    ahead: Option<Ahead>,
    /// The last piece, and its offset.
    piece: (u64, Bytes),
}

impl Reading {
    pub(crate) fn new(reader: FileReader) -> Self {
        let entry = reader.entry().clone();
        Self { entry, reader: Some(reader), ahead: None, piece: (0, Bytes::new()) }
    }

    /// What is read.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// Reads at most `max` bytes; none at the end of the file.
    ///
    /// # Errors
    /// If the disk fails, or the content is not what was written.
    pub async fn read(&mut self, offset: u64, max: usize) -> Result<Bytes, Problem> {
        if offset >= self.entry.size_bytes {
            return Ok(Bytes::new());
        }
        if self.in_piece(offset).is_none() {
            self.fetch(offset).await?;
        }
        let from = self.in_piece(offset).unwrap_or(self.piece.1.len());
        let until = from.saturating_add(max).min(self.piece.1.len());
        Ok(self.piece.1.slice(from..until))
    }

    fn in_piece(&self, offset: u64) -> Option<usize> {
        let within = usize::try_from(offset.checked_sub(self.piece.0)?).ok()?;
        (within < self.piece.1.len()).then_some(within)
    }

    async fn fetch(&mut self, offset: u64) -> Result<(), Problem> {
        if self.take_next(offset).await? {
            return Ok(());
        }
        // Another place in the file, or what was read ahead has ended.
        if let Some(Ahead { task, pieces, .. }) = self.ahead.take() {
            drop(pieces);
            self.reader = Some(task.await.and_then(identity).map_err(lost)?);
        }
        let closed = || Problem::internal("can't read a file", "it is closed");
        let reader = self.reader.take().ok_or_else(closed)?;
        let (to, pieces) = mpsc::channel(AHEAD);
        let task = tokio::spawn(read_ahead(reader, offset, to));
        self.ahead = Some(Ahead { task, pieces, next: offset });
        match self.take_next(offset).await? {
            true => Ok(()),
            false => Err(Problem::internal("can't read a file", "its reader has ended")),
        }
    }

    /// Takes the piece with this offset, if it is the one that comes next.
    async fn take_next(&mut self, offset: u64) -> Result<bool, Problem> {
        let Some(ahead) = self.ahead.as_mut().filter(|ahead| ahead.next == offset) else {
            return Ok(false);
        };
        let Some(piece) = ahead.pieces.recv().await else { return Ok(false) };
        let piece = piece?;
        ahead.next += piece.len() as u64;
        self.piece = (offset, piece);
        Ok(true)
    }
}

/// The upload, and whether the work with it was done; or nothing, because a thread has panicked.
type Worked<T = ()> = Result<(Upload, Result<T, Problem>), JoinError>;

/// Works with an upload on a thread that may block. It ends what it has begun also if nobody waits for it any more.
async fn worked<T: Send + 'static>(
    mut upload: Upload,
    act: impl FnOnce(&mut Upload) -> Result<T, Problem> + Send + 'static,
) -> Worked<T> {
    tokio::task::spawn_blocking(move || {
        let done = act(&mut upload);
        (upload, done)
    })
    .await
}

/// Writes to the disk, and to the store if contents are kept there.
async fn written(upload: Upload, offset: u64, piece: Vec<u8>) -> Worked {
    let (mut upload, mut done) = worked(upload, move |upload| upload.write(offset, &piece)).await?;
    if done.is_ok() && upload.is_remote() {
        done = upload.send().await;
    }
    Ok((upload, done))
}

/// Gives a file its name, unless nobody waits for it any more who has to. What has arrived is kept if the store fails.
async fn committed(
    mut upload: Upload,
    expected: Option<String>,
    waiter: Option<Weak<()>>,
) -> Result<FileEntry, Problem> {
    let space = upload.space().filter(|_| !upload.is_hashed());
    let turn = match space {
        Some(space) => Some(space.hash_turn().await),
        None => None,
    };
    let is_wanted = move || match waiter.is_none_or(|waiter| waiter.strong_count() > 0) {
        true => Ok(()),
        false => {
            Err(Problem::unavailable("can't write a file", "whoever wrote it has given it up"))
        }
    };
    if !upload.is_remote() {
        let committed = move || {
            let sums = upload.whole(expected.as_deref())?;
            is_wanted()?;
            upload.publish(&sums, None)
        };
        return tokio::task::spawn_blocking(committed).await.map_err(lost)?;
    }
    let whole = tokio::task::spawn_blocking(move || {
        let sums = upload.whole(expected.as_deref())?;
        Ok::<_, Problem>((upload, sums))
    });
    let (mut upload, sums) = whole.await.map_err(lost)??;
    // A store may take long.
    drop(turn);
    let sent = upload.send_all(&sums.sha256).await;
    let published = move || match sent {
        Ok(key) => {
            is_wanted()?;
            upload.publish(&sums, key.as_deref())
        }
        Err(problem) => {
            drop(upload);
            Err(problem)
        }
    };
    tokio::task::spawn_blocking(published).await.map_err(lost)?
}

/// A file that is written.
#[derive(Debug)]
pub struct Writing {
    /// `None` while a piece is written.
    upload: Option<Upload>,
    busy: Option<JoinHandle<Worked>>,
    /// What is not written yet, and its offset.
    offset: u64,
    piece: Vec<u8>,
    length: u64,
    failed: Option<Problem>,
    /// Who does not wait for the end of [`Writing::commit`] gets no file.
    is_once: bool,
}

impl Writing {
    pub(crate) fn new(upload: Upload, how: Begin) -> Self {
        let length = upload.length();
        let (upload, piece, is_once) = (Some(upload), Vec::new(), how == Begin::Once);
        Self { upload, busy: None, offset: length, piece, length, failed: None, is_once }
    }

    /// What is committed ends, also if nobody waits for it.
    pub(crate) fn end_also_alone(&mut self) {
        self.is_once = false;
    }

    /// How long the file is, with what is still to be written.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Takes bytes for an offset. A failure may show at the next call.
    ///
    /// # Errors
    /// `NoSpace` if the quota or the disk has no room for them.
    pub async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        if offset != self.offset.saturating_add(self.piece.len() as u64) {
            self.hand_over().await?;
            self.offset = offset;
        }
        self.piece.extend_from_slice(bytes);
        self.length = self.length.max(offset.saturating_add(bytes.len() as u64));
        if self.piece.len() >= PIECE_BYTES {
            self.hand_over().await?;
        }
        Ok(())
    }

    /// Waits for the last piece, and begins to write the next one.
    async fn hand_over(&mut self) -> Result<(), Problem> {
        self.settle().await?;
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.piece);
        let offset = self.offset;
        self.offset = offset.saturating_add(piece.len() as u64);
        let upload = self.take_upload()?;
        self.busy = Some(tokio::spawn(written(upload, offset, piece)));
        Ok(())
    }

    async fn settle(&mut self) -> Result<(), Problem> {
        if let Some(problem) = &self.failed {
            return Err(problem.clone());
        }
        if let Some(busy) = self.busy.take() {
            let (upload, written) = busy.await.and_then(identity).map_err(lost)?;
            self.upload = Some(upload);
            self.failed = written.as_ref().err().cloned();
            return written;
        }
        Ok(())
    }

    fn take_upload(&mut self) -> Result<Upload, Problem> {
        let closed = || Problem::conflict("can't write a file", "it is closed already");
        self.upload.take().ok_or_else(closed)
    }

    /// Cuts or extends the file.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub async fn set_length(&mut self, length: u64) -> Result<(), Problem> {
        self.settled(move |upload| upload.set_length(length)).await?;
        (self.length, self.offset) = (length, length);
        Ok(())
    }

    /// Works with all that was written so far.
    async fn settled<T: Send + 'static>(
        &mut self,
        act: impl FnOnce(&mut Upload) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        self.hand_over().await?;
        self.settle().await?;
        let upload = self.take_upload()?;
        let (upload, done) = worked(upload, act).await.map_err(lost)?;
        self.upload = Some(upload);
        done
    }

    /// Reads at most `max` bytes of what was written; none at the end.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub async fn read(&mut self, offset: u64, max: usize) -> Result<Vec<u8>, Problem> {
        self.settled(move |upload| upload.read(offset, max)).await
    }

    /// When the file was last changed, as its client says. Otherwise that is when it was written.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub async fn set_modified(&mut self, modified_ms: u64) -> Result<(), Problem> {
        self.settled(move |upload| upload.set_modified(modified_ms)).await
    }

    /// What is to have its name until it gets it: otherwise it gets none.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub(crate) async fn expect(&mut self, expected: Expected) -> Result<(), Problem> {
        self.settled(move |upload| upload.expect(expected)).await
    }

    /// What clients have noted about it, instead of what was noted about a file that it replaces.
    ///
    /// # Errors
    /// As [`Writing::write`], and `NoSpace` if it is too much.
    pub(crate) async fn set_properties(&mut self, noted: Vec<Property>) -> Result<(), Problem> {
        self.settled(move |upload| upload.set_properties(&noted)).await
    }

    /// The file is to have another name, in the same tenant's tree.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub(crate) async fn move_to(&mut self, path: DataPath) -> Result<(), Problem> {
        self.settled(move |upload| upload.move_to(path)).await
    }

    /// Nobody will continue it, whatever becomes of its client.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub(crate) async fn end_resuming(&mut self) -> Result<(), Problem> {
        self.settled(|upload| {
            upload.end_resuming();
            Ok(())
        })
        .await
    }

    /// The file is complete: it gets its name.
    ///
    /// # Errors
    /// `Invalid` if it does not have the SHA-256 that is expected.
    pub async fn commit(mut self, expected: Option<String>) -> Result<FileEntry, Problem> {
        self.hand_over().await?;
        self.settle().await?;
        let upload = self.take_upload()?;
        // A client may go away: what has begun ends.
        let waiter = Arc::new(());
        let left = self.is_once.then(|| Arc::downgrade(&waiter));
        let committed = tokio::spawn(committed(upload, expected, left)).await;
        drop(waiter);
        committed.map_err(lost)?
    }

    /// Copies what is there of another file, from its beginning.
    ///
    /// # Errors
    /// As [`Reading::read`] and [`Writing::write`].
    pub(crate) async fn copy_from(&mut self, reading: &mut Reading) -> Result<(), Problem> {
        let mut at = 0;
        while at < reading.entry().size_bytes {
            let piece = reading.read(at, PIECE_BYTES).await?;
            if piece.is_empty() {
                break;
            }
            self.write(at, &piece).await?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// The client goes away: what has arrived is kept, so that the upload can be continued.
    ///
    /// # Errors
    /// As [`Writing::write`].
    pub async fn leave(mut self) -> Result<u64, Problem> {
        self.hand_over().await?;
        self.settle().await?;
        let upload = self.take_upload()?;
        let length = upload.length();
        tokio::task::spawn_blocking(move || drop(upload)).await.map_err(lost)?;
        Ok(length)
    }
}
