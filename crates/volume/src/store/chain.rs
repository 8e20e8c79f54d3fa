//! Layers on top of each other: which one answers for a block, and reading from it.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{BoxFuture, try_join, try_join_all};
use perigee_model::volume::BLOCK_BYTES;
use tokio::sync::OnceCell;

use super::blocks::{BlockState, blocks_of, index, overlap};
use super::layer::Layer;
use crate::device::{Device, Extent, IoError};

/// Opens an export of another host: its `HOST:PORT`, its name.
pub type Connector = Arc<
    dyn Fn(String, String) -> BoxFuture<'static, Result<Arc<dyn Device>, IoError>> + Send + Sync,
>;

/// An export of another host that nobody writes, below the local layers. Connected when a read
/// first needs it, so that a volume opens while the other host is away.
pub(super) struct RemoteParent {
    pub(super) nbd_addr: String,
    pub(super) export: String,
    pub(super) size_bytes: u64,
    pub(super) connect: Connector,
    pub(super) device: OnceCell<Arc<dyn Device>>,
}

impl RemoteParent {
    async fn device(&self) -> Result<&Arc<dyn Device>, IoError> {
        self.device
            .get_or_try_init(|| (self.connect)(self.nbd_addr.clone(), self.export.clone()))
            .await
    }

    fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(BLOCK_BYTES)
    }
}

/// Who answers for a run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Zeros,
    /// The layer at this place in the chain.
    Layer(usize),
    Remote,
}

/// Layers from the top down, and perhaps an export of another host below them.
pub(super) struct Chain {
    pub(super) layers: Vec<Arc<Layer>>,
    pub(super) remote: Option<Arc<RemoteParent>>,
}

/// A part of a request: bytes of the device.
type Span = Range<u64>;

impl Chain {
    /// Runs of blocks in order, each with the topmost layer that has it. What lies beyond the
    /// end of a layer reads as zeros: nothing below it shows through.
    fn resolve(&self, blocks: Range<u64>) -> Vec<(Range<u64>, Owner)> {
        let mut found = Vec::new();
        self.resolve_below(0, blocks, &mut found);
        found
    }

    fn resolve_below(
        &self,
        depth: usize,
        blocks: Range<u64>,
        found: &mut Vec<(Range<u64>, Owner)>,
    ) {
        if blocks.is_empty() {
            return;
        }
        let end = match (self.layers.get(depth), &self.remote) {
            (Some(layer), _) => layer.blocks(),
            (None, Some(remote)) => remote.blocks(),
            (None, None) => 0,
        };
        let inside = overlap(&blocks, &(0..end));
        match self.layers.get(depth) {
            Some(layer) => {
                for (run, state) in layer.runs(inside.clone()) {
                    match state {
                        BlockState::Data => push(found, run, Owner::Layer(depth)),
                        BlockState::Zero => push(found, run, Owner::Zeros),
                        BlockState::Absent => self.resolve_below(depth + 1, run, found),
                    }
                }
            }
            None => push(found, inside.clone(), Owner::Remote),
        }
        push(found, inside.end.max(blocks.start)..blocks.end, Owner::Zeros);
    }

    /// The request's bytes by who answers for them.
    fn spans(&self, offset: u64, length_bytes: u64) -> Vec<(Span, Owner)> {
        let request = offset..offset + length_bytes;
        self.resolve(blocks_of(offset, length_bytes))
            .into_iter()
            .map(|(run, owner)| {
                (overlap(&(run.start * BLOCK_BYTES..run.end * BLOCK_BYTES), &request), owner)
            })
            .collect()
    }

    pub(super) async fn read(&self, offset: u64, length_bytes: u32) -> Result<Bytes, IoError> {
        let spans = self.spans(offset, length_bytes.into());
        let local = self.read_local(offset, length_bytes, &spans);
        if !spans.iter().any(|(_, owner)| *owner == Owner::Remote) {
            return Ok(local.await?.into());
        }
        let (mut buffer, remote) = try_join(local, self.read_remote(&spans)).await?;
        for (at, bytes) in remote {
            let from = index(at - offset);
            buffer[from..from + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(buffer.into())
    }

    /// A buffer of the whole request with the local layers' bytes in place.
    async fn read_local(
        &self,
        offset: u64,
        length_bytes: u32,
        spans: &[(Span, Owner)],
    ) -> Result<Vec<u8>, IoError> {
        let mut buffer = vec![0; index(length_bytes.into())];
        let parts: Vec<_> = spans
            .iter()
            .filter_map(|(span, owner)| match owner {
                Owner::Layer(depth) => Some((span.clone(), Arc::clone(&self.layers[*depth].data))),
                Owner::Zeros | Owner::Remote => None,
            })
            .collect();
        if parts.is_empty() {
            return Ok(buffer);
        }
        super::blocking(move || {
            for (span, data) in parts {
                let part = index(span.start - offset)..index(span.end - offset);
                data.read_at(span.start, &mut buffer[part])?;
            }
            Ok(buffer)
        })
        .await
    }

    async fn read_remote(&self, spans: &[(Span, Owner)]) -> Result<Vec<(u64, Bytes)>, IoError> {
        let Some(remote) = &self.remote else { return Ok(Vec::new()) };
        let device = remote.device().await?;
        let remote_spans = spans.iter().filter(|(_, owner)| *owner == Owner::Remote);
        // The last block of the remote may be a partial one; the rest of it reads as zeros.
        let within = remote_spans.map(|(span, _)| overlap(span, &(0..remote.size_bytes)));
        let reads = within.filter(|span| !span.is_empty()).map(|span| async move {
            let length_bytes =
                u32::try_from(span.end - span.start).expect("within a request of 32 bits");
            Ok((span.start, device.read(span.start, length_bytes).await?))
        });
        try_join_all(reads).await
    }

    /// Extents from `offset` on, as [`Device::extents`] says.
    pub(super) async fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> Result<Vec<Extent>, IoError> {
        let mut extents = Vec::new();
        for (span, owner) in self.spans(offset, length_bytes) {
            let length_bytes = span.end - span.start;
            match (owner, &self.remote) {
                (Owner::Zeros, _) => {
                    join(&mut extents, Extent { length_bytes, hole: true, zero: true });
                }
                (Owner::Remote, Some(remote)) => {
                    remote_extents(remote, span, &mut extents).await?;
                }
                (Owner::Layer(_) | Owner::Remote, _) => {
                    join(&mut extents, Extent { length_bytes, hole: false, zero: false });
                }
            }
        }
        Ok(extents)
    }
}

/// Adds a run, as part of the last one if it goes on.
fn push(found: &mut Vec<(Range<u64>, Owner)>, run: Range<u64>, owner: Owner) {
    match found.last_mut() {
        _ if run.is_empty() => {}
        Some((last, same)) if *same == owner && last.end == run.start => last.end = run.end,
        _ => found.push((run, owner)),
    }
}

/// Adds an extent, as part of the last one if it is of the same kind.
fn join(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last) if (last.hole, last.zero) == (next.hole, next.zero) => {
            last.length_bytes += next.length_bytes;
        }
        _ => extents.push(next),
    }
}

/// The other host's extents for a span, asked until they cover it.
async fn remote_extents(
    remote: &RemoteParent,
    span: Span,
    extents: &mut Vec<Extent>,
) -> Result<(), IoError> {
    let device = remote.device().await?;
    let mut at = span.start;
    while at < span.end.min(remote.size_bytes) {
        let (before, wanted_bytes) = (at, span.end.min(remote.size_bytes) - at);
        for extent in device.extents(at, wanted_bytes).await? {
            let length_bytes = extent.length_bytes.min(span.end.min(remote.size_bytes) - at);
            if length_bytes > 0 {
                join(extents, Extent { length_bytes, ..extent });
            }
            at += length_bytes;
        }
        if at == before {
            let why = format!("{} told no extents of {}", remote.nbd_addr, remote.export);
            return Err(std::io::Error::other(why).into());
        }
    }
    if at < span.end {
        join(extents, Extent { length_bytes: span.end - at, hole: true, zero: true });
    }
    Ok(())
}
