//! Reading an object from any offset. In order, it is one request.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::{GetOptions, GetRange, ObjectStore as _};
use perigee_model::Problem;

use super::{Held, Objects, RETRY_MAX, SILENCE_MAX, not_done, within};

/// How often a read goes on with another request, when the store has ended the one before.
const AGAIN_MAX: u32 = 5;

/// An open object.
pub struct ObjectReader {
    held: Held,
    what: String,
    /// The offset of what comes next.
    at: u64,
    /// In a lock because it can't be shared, which readers must be; nobody waits for it.
    coming: Option<Mutex<BoxStream<'static, object_store::Result<Bytes>>>>,
    /// What has come and was not read.
    left: Bytes,
}

impl fmt::Debug for ObjectReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectReader").field("key", &self.held.key).finish_non_exhaustive()
    }
}

impl ObjectReader {
    /// Reads an object of the bucket from its start; `what` is for errors. The object is not deleted while the reader
    /// lives.
    pub fn new(objects: &Arc<Objects>, key: &str, what: String) -> Self {
        Self { held: objects.hold(key), what, at: 0, coming: None, left: Bytes::new() }
    }

    /// Reads this many bytes, which the object has.
    pub async fn read(&mut self, offset: u64, length: usize) -> Result<Bytes, Problem> {
        if offset != self.at {
            (self.at, self.coming, self.left) = (offset, None, Bytes::new());
        }
        let mut bytes = BytesMut::with_capacity(length);
        let mut again = 0;
        while bytes.len() < length {
            if self.left.is_empty() {
                match self.next().await {
                    Ok(next) => self.left = next,
                    // A client that reads slowly, or a store that was restarted.
                    Err(problem) if again >= AGAIN_MAX => return Err(problem),
                    Err(problem) => {
                        tracing::info!(%problem, "the store is asked again");
                        again += 1;
                        self.coming = None;
                        tokio::time::sleep(std::time::Duration::from_millis(200) * again).await;
                        continue;
                    }
                }
            }
            let piece = self.left.split_to(self.left.len().min(length - bytes.len()));
            self.at += piece.len() as u64;
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.freeze())
    }

    /// The next bytes; never none.
    async fn next(&mut self) -> Result<Bytes, Problem> {
        let coming = match &mut self.coming {
            Some(coming) => coming,
            None => {
                let objects = &self.held.objects;
                let range = Some(GetRange::Offset(self.at));
                let at = objects.at(&self.held.key);
                let got = objects.s3.get_opts(&at, GetOptions { range, ..Default::default() });
                let got = within(&self.what, RETRY_MAX + SILENCE_MAX, got).await?;
                self.coming.insert(Mutex::new(got.into_stream()))
            }
        };
        let coming = coming.get_mut().unwrap_or_else(PoisonError::into_inner);
        loop {
            let next = tokio::time::timeout(RETRY_MAX + SILENCE_MAX, coming.next()).await;
            match next {
                Ok(Some(Ok(bytes))) if bytes.is_empty() => {}
                Ok(Some(next)) => return next.map_err(|e| not_done(&self.what, e).into()),
                Ok(None) => {
                    let why = "the object in the store is shorter than the file";
                    return Err(Problem::internal(&self.what, why));
                }
                Err(_) => {
                    return Err(Problem::unavailable(&self.what, "the store sends nothing more"));
                }
            }
        }
    }
}
