//! An object that is sent in pieces, while its bytes arrive.

use std::collections::VecDeque;
use std::sync::Arc;

use object_store::multipart::{MultipartStore as _, PartId};
use object_store::{PutMultipartOptions, PutPayload};
use perigee_model::Problem;
use tokio::task::JoinHandle;

use super::{Objects, PIECES_OF_ONE_MAX, Place, about, within};

/// What is sent, and where.
#[derive(Debug, Clone)]
pub struct Target {
    /// The object's key.
    pub key: String,
    /// The file's path, for people who have lost the tree.
    pub path: String,
    /// `can't write repo://…`
    pub what: String,
}

/// An object that is being sent. If it is dropped, what the store has of it is garbage.
#[derive(Debug)]
pub struct Sending {
    objects: Arc<Objects>,
    target: Target,
    id: String,
    sent: u64,
    done: Vec<PartId>,
    under_way: VecDeque<JoinHandle<Result<PartId, Problem>>>,
}

impl Sending {
    /// Begins an object in pieces. The store's id of it must be noted before a piece is sent.
    pub async fn begin(objects: &Arc<Objects>, target: Target) -> Result<Self, Problem> {
        let options = PutMultipartOptions { attributes: about(&target), ..Default::default() };
        let at = objects.at(&target.key);
        let begun = objects.s3.create_multipart_opts(&at, options);
        let id = within(&target.what, objects.waits.request, begun).await?;
        let (done, under_way) = (Vec::new(), VecDeque::new());
        Ok(Self { objects: Arc::clone(objects), target, id, sent: 0, done, under_way })
    }

    /// The object's key in the bucket.
    pub fn key(&self) -> &str {
        &self.target.key
    }

    /// The bucket's id of this multipart upload.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// How many bytes were handed over.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Waits for a place in memory for the next piece.
    pub async fn place(&mut self) -> Result<Place, Problem> {
        while self.under_way.len() >= PIECES_OF_ONE_MAX {
            self.settle().await?;
        }
        self.objects.place(&self.target.what).await
    }

    /// Begins to send the next piece. A failure shows at a later call.
    pub fn send(&mut self, place: Place, bytes: Vec<u8>) {
        self.sent += bytes.len() as u64;
        let number = self.done.len() + self.under_way.len();
        let (objects, target, id) =
            (Arc::clone(&self.objects), self.target.clone(), self.id.clone());
        self.under_way.push_back(tokio::spawn(async move {
            let at = objects.at(&target.key);
            let put = objects.s3.put_part(&at, &id, number, PutPayload::from(bytes));
            let sent = within(&target.what, objects.waits.request, put).await;
            place.end(sent).map_err(Problem::from)
        }));
    }

    async fn settle(&mut self) -> Result<(), Problem> {
        let Some(first) = self.under_way.front_mut() else { return Ok(()) };
        let sent = first.await;
        self.under_way.pop_front();
        let part = sent.map_err(|e| Problem::internal(&self.target.what, e))??;
        self.done.push(part);
        Ok(())
    }

    /// All pieces were handed over: the object is complete when the store has them.
    pub async fn complete(&mut self) -> Result<(), Problem> {
        while !self.under_way.is_empty() {
            self.settle().await?;
        }
        let at = self.objects.at(&self.target.key);
        let done = std::mem::take(&mut self.done);
        let completed = self.objects.s3.complete_multipart(&at, &self.id, done);
        let completed = within(&self.target.what, self.objects.waits.request, completed).await;
        match completed {
            Ok(_) => Ok(()),
            // The store may have done it, and its answer was lost: then it knows no such upload any more. The key is
            // this object's alone.
            Err(not_done) => match self.objects.length_of(&self.target).await {
                Ok(length) if length == self.sent => Ok(()),
                _ => Err(not_done.into()),
            },
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.under_way.iter().for_each(JoinHandle::abort);
    }
}
