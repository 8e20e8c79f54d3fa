//! An object that is sent in pieces, while its bytes arrive.

use std::collections::VecDeque;
use std::sync::Arc;

use object_store::multipart::{MultipartStore as _, PartId};
use object_store::{PutMultipartOptions, PutPayload};
use perigee_model::Problem;
use tokio::task::JoinHandle;

use super::{Objects, PIECES_OF_ONE_MAX, REQUEST_MAX, about, within};

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
    pub fn begin(objects: &Arc<Objects>, target: Target) -> Result<Self, Problem> {
        let options = PutMultipartOptions { attributes: about(&target), ..Default::default() };
        let at = objects.at(&target.key);
        let begun = objects.s3.create_multipart_opts(&at, options);
        let id = objects.block(within(&target.what, REQUEST_MAX, begun))?;
        let (done, under_way) = (Vec::new(), VecDeque::new());
        Ok(Self { objects: Arc::clone(objects), target, id, sent: 0, done, under_way })
    }

    pub fn key(&self) -> &str {
        &self.target.key
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// How many bytes were handed over.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends the next piece. Waits until there is room for it in memory; a failure may show at a later call.
    pub fn send(&mut self, bytes: Vec<u8>) -> Result<(), Problem> {
        while self.under_way.len() >= PIECES_OF_ONE_MAX {
            self.settle()?;
        }
        self.sent += bytes.len() as u64;
        let number = self.done.len() + self.under_way.len();
        let (objects, target, id) =
            (Arc::clone(&self.objects), self.target.clone(), self.id.clone());
        let places = Arc::clone(&self.objects.pieces);
        let place = self.objects.block(places.acquire_owned());
        self.under_way.push_back(self.objects.runtime.spawn(async move {
            let _place = place;
            let at = objects.at(&target.key);
            let put = objects.s3.put_part(&at, &id, number, PutPayload::from(bytes));
            within(&target.what, REQUEST_MAX, put).await
        }));
        Ok(())
    }

    fn settle(&mut self) -> Result<(), Problem> {
        let Some(first) = self.under_way.pop_front() else { return Ok(()) };
        let sent = self.objects.block(first);
        let part = sent.map_err(|e| Problem::internal(&self.target.what, e))??;
        self.done.push(part);
        Ok(())
    }

    /// All pieces were handed over: the object is complete when the store has them.
    pub fn complete(&mut self) -> Result<(), Problem> {
        while !self.under_way.is_empty() {
            self.settle()?;
        }
        let at = self.objects.at(&self.target.key);
        let done = std::mem::take(&mut self.done);
        let completed = self.objects.s3.complete_multipart(&at, &self.id, done);
        self.objects.block(within(&self.target.what, REQUEST_MAX, completed)).map(drop)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.under_way.iter().for_each(JoinHandle::abort);
    }
}
