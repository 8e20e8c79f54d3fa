//! Copies a file into the guest of a VM without a job, or out of it, through its guest agent. Each part is a question of its own,
//! so it is slow, and it needs no network in the guest.

use std::sync::Arc;

use axum::body::Body;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use perigee_model::guest_agent::{FILE_PART_BYTES, FilePart, FileWritten};
use perigee_model::limits::GUEST_FILE_BYTES;
use perigee_model::persistent_vm::CopiedFile;
use perigee_model::spec::check_guest_path;
use perigee_model::{Problem, VmId};
use serde_json::{Value, json};

use super::guest::{ask, check_lasts};
use crate::cluster::Cluster;

/// A file that is open in a guest. It is closed there when this is dropped.
struct Open {
    cluster: Arc<Cluster>,
    vm: VmId,
    handle: i64,
}

impl Open {
    async fn new(
        cluster: &Arc<Cluster>,
        vm: &VmId,
        path: &str,
        mode: &str,
    ) -> Result<Self, Problem> {
        check_lasts(cluster, vm)?;
        check_guest_path(path)
            .map_err(|why| Problem::invalid(format!("can't copy a file of VM {vm}"), why))?;
        let arguments = json!({"path": path, "mode": mode});
        let handle = ask(cluster, vm, "guest-file-open", arguments).await?;
        Ok(Self { cluster: Arc::clone(cluster), vm: vm.clone(), handle })
    }

    async fn read(&self) -> Result<(Bytes, bool), Problem> {
        let arguments = json!({"handle": self.handle, "count": FILE_PART_BYTES});
        let part: FilePart = ask(&self.cluster, &self.vm, "guest-file-read", arguments).await?;
        let bytes = BASE64_STANDARD.decode(&part.buf_b64).map_err(|_| self.odd("no base64"))?;
        if bytes.len() > FILE_PART_BYTES || (bytes.is_empty() && !part.eof) {
            return Err(self.odd("not as long as was asked for"));
        }
        Ok((bytes.into(), part.eof))
    }

    async fn write(&self, mut bytes: &[u8]) -> Result<(), Problem> {
        while !bytes.is_empty() {
            let part = &bytes[..bytes.len().min(FILE_PART_BYTES)];
            let arguments = json!({"handle": self.handle, "buf-b64": BASE64_STANDARD.encode(part)});
            let written: FileWritten =
                ask(&self.cluster, &self.vm, "guest-file-write", arguments).await?;
            if written.count == 0 || written.count > part.len() {
                return Err(self.odd("not what a file takes"));
            }
            bytes = &bytes[written.count..];
        }
        Ok(())
    }

    fn odd(&self, how: &str) -> Problem {
        let what = format!("can't understand the guest agent of {}", self.vm);
        Problem::unsupported(what, format!("a part of a file is {how}"))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let (cluster, vm, handle) = (Arc::clone(&self.cluster), self.vm.clone(), self.handle);
        tokio::spawn(async move {
            let closed = ask::<Value>(&cluster, &vm, "guest-file-close", json!({"handle": handle}));
            if let Err(problem) = closed.await {
                tracing::debug!("a file in VM {vm} stays open: {problem}");
            }
        });
    }
}

/// A file's content, part by part.
///
/// # Errors
/// `Conflict` with the guest's words if it has no such file, `Unavailable` if no guest agent answers.
pub async fn read(cluster: &Arc<Cluster>, vm: &VmId, path: &str) -> Result<Body, Problem> {
    let open = Open::new(cluster, vm, path, "r").await?;
    let parts =
        stream::try_unfold((Some(open), 0), async |(open, before): (Option<Open>, usize)| {
            let Some(open) = open else { return Ok::<_, std::io::Error>(None) };
            let (bytes, at_end) = open.read().await.map_err(std::io::Error::other)?;
            let length = before + bytes.len();
            GUEST_FILE_BYTES.check(length).map_err(std::io::Error::other)?;
            Ok(Some((bytes, ((!at_end).then_some(open), length))))
        });
    Ok(Body::from_stream(parts))
}

/// Writes a file, and replaces one that is there. Returns how long it is.
///
/// # Errors
/// As [`read`]; `Invalid` if it is too long. Then the guest has the beginning of it.
pub async fn write(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    path: &str,
    content: impl Stream<Item = Result<Bytes, axum::Error>>,
) -> Result<CopiedFile, Problem> {
    let what = || format!("can't copy a file to VM {vm}");
    let open = Open::new(cluster, vm, path, "w").await?;
    let mut content = std::pin::pin!(content);
    let (mut copied, mut waiting) = (CopiedFile { bytes: 0 }, Vec::new());
    while let Some(bytes) = content.next().await {
        let bytes = bytes.map_err(|e| Problem::invalid(what(), e))?;
        copied.bytes += bytes.len() as u64;
        GUEST_FILE_BYTES.check(copied.bytes).map_err(|error| error.problem(what()))?;
        waiting.extend_from_slice(&bytes);
        let whole = waiting.len() - waiting.len() % FILE_PART_BYTES;
        open.write(&waiting[..whole]).await?;
        waiting.drain(..whole);
    }
    open.write(&waiting).await?;
    // What the guest's disk refuses is said here, and not when the file is closed.
    ask::<Value>(cluster, vm, "guest-file-flush", json!({"handle": open.handle})).await?;
    Ok(copied)
}
