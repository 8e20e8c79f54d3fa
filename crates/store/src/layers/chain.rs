//! A chain of layers: finds the layer that has a block, and reads the block from it.
//!
//! The sealed layers below a head are one object, [`Sealed`], which all volumes over the same layer
//! share. It has an index of the owner of every block, which is built for a region when a read first
//! touches it, so that 32 layers are read as fast as one. A head is looked up first, in its own states,
//! because only the head changes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{try_join, try_join_all};
use perigee_block::device::{Extent, IoError, Origin, OriginRun};
use perigee_block::trace::{self, Stage};
use perigee_model::LayerId;
use perigee_model::volume::BLOCK_BYTES;

use crate::disk::blocks::{BlockState, PAGE_BLOCKS, blocks_of, index, join, overlap, page_count};
use crate::disk::files::BlockFile;
use crate::disk::sparse::Sparse;
use crate::layers::cold;
use crate::layers::copy::LayerCopy;
use crate::layers::layer::Layer;
use crate::layers::remote::RemoteParent;

/// Blocks whose owners are indexed together: 16 MiB.
const REGION_BLOCKS: u64 = 4096;

/// A layer of a chain.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) layer: Arc<Layer>,
    /// Set if it still gets blocks from another host.
    pub(crate) copy: Option<Arc<LayerCopy>>,
}

impl Link {
    /// A layer that has all its blocks.
    pub(crate) fn whole(layer: &Arc<Layer>) -> Self {
        Self { layer: Arc::clone(layer), copy: None }
    }

    /// Runs of blocks in order, and whether the layer has them. Neighbouring runs may be alike.
    fn has(&self, blocks: Range<u64>) -> Vec<(Range<u64>, Has)> {
        if self.copy.as_ref().is_some_and(|copy| !copy.is_own()) {
            return vec![(blocks, Has::Block)];
        }
        let has = |state| match state {
            BlockState::Absent => Has::Nothing,
            BlockState::Zero => Has::Zeros,
            BlockState::Data | BlockState::Remote => Has::Block,
        };
        self.layer.states.runs(blocks).map(|(run, state)| (run, has(state))).collect()
    }
}

/// What a sealed layer has of a block. This never changes, also while a copy gets its blocks.
enum Has {
    Nothing,
    Zeros,
    Block,
}

/// What gets its bytes from another host.
#[derive(Clone)]
enum Far {
    /// An export of which nothing is kept.
    Export(Arc<RemoteParent>),
    Copy(Arc<LayerCopy>),
}

impl Far {
    async fn read(&self, span: &Span) -> Result<Bytes, IoError> {
        match self {
            Self::Export(remote) => remote.read(span).await,
            Self::Copy(copy) => copy.read(span).await,
        }
    }

    async fn extents(&self, span: &Span) -> Result<Vec<Extent>, IoError> {
        match self {
            Self::Export(remote) => remote.extents(span).await,
            Self::Copy(copy) => copy.extents(span).await,
        }
    }
}

/// The owner of a run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Zeros,
    /// The layer at this index of the chain. If it is a copy, it must be asked for each block, because it gets
    /// blocks while it is read.
    Layer(u16),
    /// The export below all layers.
    Export,
}

/// The owners of the blocks of one region.
enum Region {
    Uniform(Owner),
    /// The start of each run in the region, in order. The first run starts at 0.
    Runs(Box<[(u16, Owner)]>),
}

/// Sealed layers from the top down, and perhaps another host's export below them.
pub(crate) struct Sealed {
    links: Vec<Link>,
    export: Option<Arc<RemoteParent>>,
    owners: Sparse<Region>,
}

/// The source from which a run of blocks is read.
enum Source<'a> {
    Zeros,
    Layer(&'a Layer),
    /// Another host.
    Far(Far),
}

/// A part of a request, as a range of the device's bytes.
type Span = Range<u64>;

impl Sealed {
    pub(crate) fn new(links: Vec<Link>, export: Option<Arc<RemoteParent>>) -> Self {
        assert!(links.len() <= usize::from(u16::MAX), "a chain of less than 65536 layers");
        let mut new = Self { links, export, owners: Sparse::new(0) };
        new.owners = Sparse::new(index(new.end(0).div_ceil(REGION_BLOCKS)));
        new
    }

    /// These layers with another one on top.
    pub(crate) fn under(&self, top: &Arc<Layer>) -> Self {
        let links = std::iter::once(Link::whole(top)).chain(self.links.iter().cloned()).collect();
        Self::new(links, self.export.clone())
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Arc<Layer>> {
        self.links.iter().map(|link| &link.layer)
    }

    /// The layers that have all their blocks here.
    pub(crate) fn complete_layers(&self) -> impl Iterator<Item = &Arc<Layer>> {
        self.links.iter().filter(|link| link.copy.is_none()).map(|link| &link.layer)
    }

    /// The export below this layer, if it is the lowest one.
    pub(crate) fn export_of(&self, layer: LayerId) -> Option<Arc<RemoteParent>> {
        let lowest = self.links.last().is_some_and(|link| link.layer.id == layer);
        self.export.as_ref().filter(|_| lowest).map(Arc::clone)
    }

    pub(crate) fn has_any(&self, layers: &[LayerId]) -> bool {
        self.layers().any(|layer| layers.contains(&layer.id))
    }

    /// The end of the layer at `depth`, or of the export.
    fn end(&self, depth: usize) -> u64 {
        match (self.links.get(depth), &self.export) {
            (Some(link), _) => link.layer.blocks(),
            (None, Some(export)) => export.blocks(),
            (None, None) => 0,
        }
    }

    /// Runs of blocks in order, each with the topmost layer that has it. The range beyond a layer's end
    /// reads as zeros, even if a layer below has data there.
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
        let inside = overlap(&blocks, &(0..self.end(depth)));
        match self.links.get(depth) {
            Some(link) => {
                let place = u16::try_from(depth).expect("checked when it was made");
                for (run, has) in link.has(inside.clone()) {
                    match has {
                        Has::Block => push(found, run, Owner::Layer(place)),
                        Has::Zeros => push(found, run, Owner::Zeros),
                        Has::Nothing => self.resolve_below(depth + 1, run, found),
                    }
                }
            }
            None => push(found, inside.clone(), Owner::Export),
        }
        push(found, inside.end.max(blocks.start)..blocks.end, Owner::Zeros);
    }

    /// The extents of the topmost layer alone. A run that it does not have is a hole that is not known to be
    /// zeros.
    pub(crate) fn own_extents(&self, offset: u64, length_bytes: u64) -> Vec<Extent> {
        let request = offset..offset + length_bytes;
        let mut extents = Vec::new();
        for (run, has) in self.links[0].has(blocks_of(offset, length_bytes)) {
            let span = overlap(&(run.start * BLOCK_BYTES..run.end * BLOCK_BYTES), &request);
            let (hole, zero) = match has {
                Has::Block => (false, false),
                Has::Zeros => (true, true),
                Has::Nothing => (true, false),
            };
            join(&mut extents, Extent { length_bytes: span.end - span.start, hole, zero });
        }
        extents
    }

    fn make_region(&self, region: u64) -> Region {
        let first = region * REGION_BLOCKS;
        let runs = self.resolve(first..first + REGION_BLOCKS);
        match runs[..] {
            [(_, owner)] => Region::Uniform(owner),
            _ => {
                let start = |run: &Range<u64>| {
                    u16::try_from(run.start - first).expect("a region has 4096 blocks")
                };
                Region::Runs(runs.iter().map(|(run, owner)| (start(run), *owner)).collect())
            }
        }
    }

    /// The owner of the block at `range.start`, and the end of the blocks of `range` that it is known to
    /// own.
    fn owner(&self, range: &Range<u64>) -> (Owner, u64) {
        if range.start >= self.end(0) {
            return (Owner::Zeros, range.end);
        }
        let number = range.start / REGION_BLOCKS;
        let first = number * REGION_BLOCKS;
        let region = self.owners.get_or_init(index(number), || self.make_region(number));
        match region {
            Region::Uniform(owner) => (*owner, range.end.min(first + REGION_BLOCKS)),
            Region::Runs(runs) => {
                let at = range.start - first;
                let next = runs.partition_point(|(start, _)| u64::from(*start) <= at);
                let end = runs.get(next).map_or(REGION_BLOCKS, |(start, _)| u64::from(*start));
                (runs[next - 1].1, range.end.min(first + end))
            }
        }
    }

    /// The source of the block at `run.start`, and the end of the blocks with that source. The run has one
    /// owner.
    fn source(&self, owner: Owner, run: &Range<u64>) -> (Source<'_>, u64) {
        let place = match (owner, &self.export) {
            (Owner::Layer(place), _) => usize::from(place),
            (Owner::Export, Some(export)) => {
                return (Source::Far(Far::Export(Arc::clone(export))), run.end);
            }
            (Owner::Export, None) | (Owner::Zeros, _) => return (Source::Zeros, run.end),
        };
        let Link { layer, copy } = &self.links[place];
        let Some(copy) = copy else { return (Source::Layer(layer), run.end) };
        let (state, end) = copy.run(run);
        let source = match state {
            BlockState::Data => Source::Layer(layer),
            BlockState::Zero | BlockState::Absent => Source::Zeros,
            BlockState::Remote => Source::Far(Far::Copy(Arc::clone(copy))),
        };
        (source, end)
    }
}

/// A head, if there is one, over sealed layers.
#[derive(Clone, Copy)]
pub(crate) struct Chain<'a> {
    pub(crate) head: Option<&'a Layer>,
    pub(crate) below: &'a Sealed,
}

impl<'a> Chain<'a> {
    /// The source of the block at `range.start`, and the end of the blocks of `range` with that source.
    fn source(&self, range: &Range<u64>) -> (Source<'a>, u64) {
        let mut absent = range.clone();
        if let Some(head) = self.head {
            let (state, end) = head.states.run(range);
            // The block may have changed between the two lookups.
            let end = end.max(range.start + 1);
            match state {
                BlockState::Data => return (Source::Layer(head), end),
                BlockState::Zero => return (Source::Zeros, end),
                BlockState::Absent => absent.end = end,
                BlockState::Remote => unreachable!("a head has all its blocks here"),
            }
        }
        let (owner, end) = self.below.owner(&absent);
        self.below.source(owner, &(absent.start..end))
    }

    /// Splits a request by the sources of its bytes.
    fn spans(&self, offset: u64, length_bytes: u64) -> impl Iterator<Item = (Span, Source<'a>)> {
        let request = offset..offset + length_bytes;
        let mut blocks = blocks_of(offset, length_bytes);
        std::iter::from_fn(move || {
            (!blocks.is_empty()).then(|| {
                let (source, end) = self.source(&blocks);
                let span = overlap(&(blocks.start * BLOCK_BYTES..end * BLOCK_BYTES), &request);
                blocks.start = end;
                (span, source)
            })
        })
    }

    /// The size, in blocks, of the smallest layer from the head down to this one. Below that size, a block that no layer
    /// above this one has is as this one shows it. `None` if the layer is not below the head.
    pub(crate) fn blocks_since(&self, layer: LayerId) -> Option<u64> {
        let depth = self.below.layers().position(|below| below.id == layer)?;
        let above = self.below.layers().take(depth + 1).map(|below| below.blocks());
        self.head.map(Layer::blocks).into_iter().chain(above).min()
    }

    /// The extents of what the layers above this one have. The rest is a hole that is not known to be zeros.
    pub(crate) fn extents_since(
        &self,
        layer: LayerId,
        offset: u64,
        length_bytes: u64,
    ) -> Vec<Extent> {
        let request = offset..offset + length_bytes;
        let blocks = blocks_of(offset, length_bytes);
        let mut runs: Vec<(Range<u64>, bool)> = match self.head {
            Some(head) => {
                let runs = head.states.runs(blocks);
                runs.map(|(run, state)| (run, state != BlockState::Absent)).collect()
            }
            None => vec![(blocks, false)],
        };
        for link in self.below.links.iter().take_while(|link| link.layer.id != layer) {
            let look = |(run, is_there)| match is_there {
                true => vec![(run, true)],
                false => link
                    .has(run)
                    .into_iter()
                    .map(|(run, has)| (run, !matches!(has, Has::Nothing)))
                    .collect(),
            };
            runs = runs.into_iter().flat_map(look).collect();
        }
        let mut extents = Vec::new();
        for (run, is_there) in runs {
            let span = overlap(&(run.start * BLOCK_BYTES..run.end * BLOCK_BYTES), &request);
            let length_bytes = span.end - span.start;
            join(&mut extents, Extent { length_bytes, hole: !is_there, zero: false });
        }
        extents
    }

    fn is_head(&self, layer: &Layer) -> bool {
        self.head.is_some_and(|head| std::ptr::eq(head, layer))
    }

    fn stage(&self, layer: &Layer) -> Stage {
        if self.is_head(layer) { Stage::HeadRead } else { Stage::SourceRead }
    }

    /// Fills the buffer if that needs no waiting.
    pub(crate) fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        let length_bytes = buffer.len() as u64;
        let mut rest = buffer;
        for (span, source) in self.spans(offset, length_bytes) {
            let (part, after) = rest.split_at_mut(index(span.end - span.start));
            match source {
                Source::Zeros => part.fill(0),
                Source::Layer(layer) => {
                    let _stage = trace::stage(self.stage(layer));
                    match layer.data().try_read_at(span.start, part)? {
                        Ok(()) => {}
                        Err(error) => return Some(Err(error.into())),
                    }
                }
                Source::Far(_) => return None,
            }
            rest = after;
        }
        Some(Ok(()))
    }

    /// The plan of a read: what to fetch from which file, and from the other host. The rest is zeros.
    pub(crate) fn plan(&self, offset: u64, length_bytes: u32) -> Plan {
        let mut plan = Plan { offset, length_bytes, local: Vec::new(), far: Vec::new() };
        for (span, source) in self.spans(offset, length_bytes.into()) {
            match source {
                Source::Zeros => {}
                Source::Layer(layer) => {
                    plan.local.push((span, self.stage(layer), Arc::clone(layer.data())));
                }
                Source::Far(far) => plan.far.push((span, far)),
            }
        }
        plan
    }

    /// Implements [`perigee_block::device::Device::extents`].
    pub(crate) async fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> Result<Vec<Extent>, IoError> {
        let request = offset..offset + length_bytes;
        let mut extents = Vec::new();
        for (run, source) in self.runs(blocks_of(offset, length_bytes)) {
            let span = overlap(&(run.start * BLOCK_BYTES..run.end * BLOCK_BYTES), &request);
            let length_bytes = span.end - span.start;
            match source {
                Source::Zeros => {
                    join(&mut extents, Extent { length_bytes, hole: true, zero: true });
                }
                Source::Layer(_) => {
                    join(&mut extents, Extent { length_bytes, hole: false, zero: false });
                }
                Source::Far(far) => {
                    for extent in far.extents(&span).await? {
                        join(&mut extents, extent);
                    }
                }
            }
        }
        Ok(extents)
    }

    /// Implements [`perigee_block::device::Device::origins`].
    pub(crate) fn origins(&self, offset: u64, length_bytes: u64) -> Vec<OriginRun> {
        let request = offset..offset + length_bytes;
        let origin = |source| match source {
            Source::Zeros => Origin::Nobody,
            Source::Layer(layer) if self.is_head(layer) => Origin::Head,
            Source::Layer(_) => Origin::Source,
            Source::Far(_) => Origin::Remote,
        };
        self.runs(blocks_of(offset, length_bytes))
            .into_iter()
            .map(|(run, source)| {
                let span = overlap(&(run.start * BLOCK_BYTES..run.end * BLOCK_BYTES), &request);
                OriginRun { length_bytes: span.end - span.start, origin: origin(source) }
            })
            .collect()
    }

    /// The pages of states in which a block of `blocks` has data, or is zero in the head. The other pages
    /// already read as zeros.
    pub(crate) fn pages_in_use(&self, blocks: &Range<u64>) -> BTreeSet<usize> {
        let pages = |run: &Range<u64>| index(run.start / PAGE_BLOCKS)..page_count(run.end);
        let within = pages(blocks);
        let own = self.head.into_iter().flat_map(|head| head.states.pages_in_use());
        let mut used: BTreeSet<_> = own.filter(|page| within.contains(page)).collect();
        for (run, source) in self.runs(blocks.clone()) {
            if !matches!(source, Source::Zeros) {
                used.extend(pages(&run));
            }
        }
        used
    }

    /// All runs of a range that may be long. This does not use the index, which would grow too large.
    fn runs(&self, blocks: Range<u64>) -> Vec<(Range<u64>, Source<'a>)> {
        let mut found = Vec::new();
        let below = |run, found: &mut Vec<_>| {
            for (mut run, owner) in self.below.resolve(run) {
                while !run.is_empty() {
                    let (source, end) = self.below.source(owner, &run);
                    found.push((run.start..end, source));
                    run.start = end;
                }
            }
        };
        let Some(head) = self.head else {
            below(blocks, &mut found);
            return found;
        };
        for (run, state) in head.states.runs(blocks) {
            match state {
                BlockState::Data => found.push((run, Source::Layer(head))),
                BlockState::Zero => found.push((run, Source::Zeros)),
                BlockState::Absent => below(run, &mut found),
                BlockState::Remote => unreachable!("a head has all its blocks here"),
            }
        }
        found
    }
}

/// A read, split by its sources.
pub(crate) struct Plan {
    offset: u64,
    length_bytes: u32,
    local: Vec<(Span, Stage, Arc<dyn BlockFile>)>,
    far: Vec<(Span, Far)>,
}

impl Plan {
    pub(crate) async fn read(self) -> Result<Bytes, IoError> {
        let Self { offset, length_bytes, local, far } = self;
        let local = read_local(offset, length_bytes, local);
        if far.is_empty() {
            return Ok(local.await?.into());
        }
        let fetched = far.into_iter().map(|(span, far)| async move {
            Ok::<_, IoError>((span.start, far.read(&span).await?))
        });
        let (mut buffer, fetched) = try_join(local, try_join_all(fetched)).await?;
        for (at, bytes) in fetched {
            let from = index(at - offset);
            buffer[from..from + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(buffer.into())
    }
}

/// Reads the local layers' bytes into a buffer for the whole request.
async fn read_local(
    offset: u64,
    length_bytes: u32,
    mut parts: Vec<(Span, Stage, Arc<dyn BlockFile>)>,
) -> Result<Vec<u8>, IoError> {
    let length = index(length_bytes.into());
    let part_length = |span: &Span| index(span.end - span.start);
    if let [(span, ..)] = &parts[..]
        && part_length(span) == length
        && let Some((_, stage, file)) = parts.pop()
    {
        let _stage = trace::stage(stage);
        return Ok(cold::read(file, offset, length).await?);
    }
    let mut buffer = vec![0; length];
    let reads = parts.into_iter().map(|(span, stage, file)| async move {
        let _stage = trace::stage(stage);
        Ok::<_, IoError>((span.start, cold::read(file, span.start, part_length(&span)).await?))
    });
    for (at, bytes) in try_join_all(reads).await? {
        let from = index(at - offset);
        buffer[from..from + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(buffer)
}

/// Adds a run, and merges it with the last one if they have the same owner.
fn push(found: &mut Vec<(Range<u64>, Owner)>, run: Range<u64>, owner: Owner) {
    match found.last_mut() {
        _ if run.is_empty() => {}
        Some((last, same)) if *same == owner && last.end == run.start => last.end = run.end,
        _ => found.push((run, owner)),
    }
}
