//! The reference: for every volume and image a plain array of sectors, and beside each sector
//! what else it may be after a kill or a power cut.
//!
//! It follows a history of events: a request starts, it is answered, it fails. What was answered
//! must survive a kill; what a flush or FUA covered must survive a power cut; of what else was
//! started, each sector is as before or as written.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::sim::{SECTOR_BYTES, Sector};

/// What a sector may be.
#[derive(Clone)]
struct Versions {
    /// While the page cache lives: one, but for requests that are in flight or have failed.
    live: Vec<Sector>,
    /// After a power cut: these, each with the event that brought it, or `live` if there is none.
    kept: Vec<(u64, Sector)>,
    /// The start of the last request that has made it durable.
    durable_at: u64,
}

impl Versions {
    fn of(sector: Sector) -> Self {
        Self { live: vec![sector], kept: Vec::new(), durable_at: 0 }
    }

    /// A request that will make it one of `new` has started.
    fn start(&mut self, now: u64, new: &[Sector]) {
        if self.kept.is_empty() {
            self.kept.extend(self.live.iter().map(|old| (0, Arc::clone(old))));
        }
        self.kept.extend(new.iter().map(|new| (now, Arc::clone(new))));
        self.live.extend(new.iter().map(Arc::clone));
    }

    fn after(&self, power_cut: bool) -> Vec<Sector> {
        if power_cut && !self.kept.is_empty() {
            self.kept.iter().map(|(_, sector)| Arc::clone(sector)).collect()
        } else {
            self.live.clone()
        }
    }
}

/// The bytes of a request: zeros, or some that no other request has.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fill {
    Zeros,
    Unique(u64),
}

impl Fill {
    fn byte(self, at: u64) -> u8 {
        match self {
            Self::Zeros => 0,
            Self::Unique(id) => {
                let mixed = ((id << 32) | (at / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                mixed.to_le_bytes()[4 + usize::try_from(at % 4).unwrap()] | 1
            }
        }
    }

    pub(super) fn bytes(self, range: Range<u64>) -> Vec<u8> {
        range.map(|at| self.byte(at)).collect()
    }
}

fn sectors_of(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR_BYTES as u64..range.end.div_ceil(SECTOR_BYTES as u64)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Maybe,
    Certain,
}

/// A volume or an image.
#[derive(Clone)]
pub(super) struct Twin {
    pub(super) presence: Presence,
    pub(super) size_bytes: u64,
    /// What it is being resized to.
    pub(super) next_size_bytes: Option<u64>,
    /// Where its requests and what is checked lie: all of a small one.
    pub(super) windows: Vec<Range<u64>>,
    /// Sectors that are not simply zeros.
    sectors: BTreeMap<u64, Versions>,
    /// A sync of it may have failed.
    pub(super) may_be_poisoned: bool,
    /// Images and clones that are being made of it.
    pending_copies: Vec<String>,
}

impl Twin {
    pub(super) fn new(size_bytes: u64, windows: Vec<Range<u64>>, content: &[u8]) -> Self {
        let sectors = content
            .chunks(SECTOR_BYTES)
            .enumerate()
            .map(|(at, chunk)| {
                let mut sector = [0; SECTOR_BYTES];
                sector[..chunk.len()].copy_from_slice(chunk);
                (at as u64, Versions::of(Arc::new(sector)))
            })
            .collect();
        let presence = Presence::Certain;
        let pending_copies = Vec::new();
        Self {
            presence,
            size_bytes,
            next_size_bytes: None,
            windows,
            sectors,
            may_be_poisoned: false,
            pending_copies,
        }
    }

    fn versions(&mut self, sector: u64) -> &mut Versions {
        let zeros = || Versions::of(Arc::new([0; SECTOR_BYTES]));
        self.sectors.entry(sector).or_insert_with(zeros)
    }

    /// What a sector may be, each version once or more.
    pub(super) fn allowed(&self, sector: u64, power_cut: bool) -> Vec<Sector> {
        match self.sectors.get(&sector) {
            Some(versions) => versions.after(power_cut),
            None => vec![Arc::new([0; SECTOR_BYTES])],
        }
    }

    fn settle(&mut self, sector: u64, found: &Sector, power_cut: bool) {
        let versions = self.versions(sector);
        if power_cut {
            versions.kept.clear();
        } else {
            // Which of several is durable is as open as before.
            let live = std::mem::take(&mut versions.live);
            if versions.kept.is_empty() && live.len() > 1 {
                versions.kept.extend(live.into_iter().map(|sector| (0, sector)));
            }
        }
        versions.live = vec![Arc::clone(found)];
    }

    /// Only volumes of one window are resized.
    fn resized(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.windows = std::iter::once(0..size_bytes).collect();
        self.sectors.retain(|sector, _| sector * (SECTOR_BYTES as u64) < size_bytes);
    }

    /// A copy that is as this one is now.
    fn copy(&self, presence: Presence) -> Self {
        let mut copy = self.clone();
        copy.presence = presence;
        copy.pending_copies.clear();
        copy.may_be_poisoned = false;
        for versions in copy.sectors.values_mut() {
            versions.kept.clear();
        }
        copy
    }
}

#[derive(Debug, Clone)]
pub(super) enum Event {
    Start {
        request: u64,
        what: What,
    },
    Done {
        request: u64,
    },
    /// It failed half-way, perhaps.
    Failed {
        request: u64,
    },
    /// It was not even begun.
    Refused {
        request: u64,
    },
    /// The power was cut: nobody has looked yet at what is there.
    Boot(u128),
    /// All that is there was looked at.
    Settled,
    /// What a volume was found to be after a restart.
    Found {
        volume: String,
        power_cut: bool,
        sectors: Vec<(u64, Sector)>,
    },
}

#[derive(Debug, Clone)]
pub(super) enum What {
    Write {
        volume: String,
        range: Range<u64>,
        fill: Fill,
        fua: bool,
    },
    Flush {
        volume: String,
    },
    /// An image or a volume that is as `of` is, which is flushed by it.
    Copy {
        of: String,
        name: String,
        size_bytes: u64,
    },
    /// A volume that comes from another host with these bytes.
    Arrive {
        name: String,
        content: Vec<u8>,
    },
    Resize {
        volume: String,
        size_bytes: u64,
    },
    Delete {
        name: String,
    },
    /// Layers are merged, and some of these volumes flushed for it, perhaps.
    Merge {
        volumes: Vec<String>,
    },
}

impl What {
    /// The volumes that it flushes, or may have to.
    fn flushes(&self) -> Vec<String> {
        match self {
            Self::Write { volume, .. } | Self::Flush { volume } | Self::Resize { volume, .. } => {
                vec![volume.clone()]
            }
            Self::Copy { of, .. } => vec![of.clone()],
            Self::Merge { volumes } => volumes.clone(),
            Self::Arrive { .. } | Self::Delete { .. } => Vec::new(),
        }
    }
}

#[derive(Clone)]
struct Running {
    started: u64,
    what: What,
    /// What each sector of it will be.
    new: Vec<(u64, Vec<Sector>)>,
    /// What a flush covers: sectors as they were when it started.
    covered: Vec<(u64, Vec<Sector>)>,
}

/// Volumes and images by export name: an image's is `image:NAME`.
#[derive(Clone, Default)]
pub(super) struct Expected {
    pub(super) twins: BTreeMap<String, Twin>,
    pub(super) boot: u128,
    /// A power cut has left one of several contents, and which one is not known.
    pub(super) unsettled: bool,
    running: BTreeMap<u64, Running>,
    now: u64,
}

impl Expected {
    pub(super) fn new(twins: BTreeMap<String, Twin>) -> Self {
        Self { twins, boot: 1, ..Self::default() }
    }

    fn twin(&mut self, name: &str) -> &mut Twin {
        self.twins.get_mut(name).expect("workloads name what there is")
    }

    pub(super) fn apply(&mut self, event: &Event) {
        self.now += 1;
        match event {
            Event::Start { request, what } => self.start(*request, what.clone()),
            Event::Done { request } => self.end(*request, true),
            Event::Failed { request } => self.end(*request, false),
            Event::Refused { request } => self.refused(*request),
            Event::Boot(boot) => {
                self.boot = *boot;
                self.unsettled = true;
            }
            Event::Settled => self.unsettled = false,
            Event::Found { volume, power_cut, sectors } => {
                for (sector, found) in sectors {
                    self.twin(volume).settle(*sector, found, *power_cut);
                }
            }
        }
    }

    fn start(&mut self, request: u64, what: What) {
        let now = self.now;
        let (mut new, mut covered) = (Vec::new(), Vec::new());
        match &what {
            What::Write { volume, range, fill, .. } => {
                let copies = self.twin(volume).pending_copies.clone();
                for sector in sectors_of(range) {
                    let versions = self.twin(volume).versions(sector);
                    let written: Vec<Sector> = versions
                        .live
                        .iter()
                        .map(|old| patched(old, sector, range, *fill))
                        .collect();
                    versions.start(now, &written);
                    for copy in &copies {
                        self.twin(copy).versions(sector).live.extend(written.iter().cloned());
                    }
                    new.push((sector, written));
                }
            }
            What::Flush { volume } => covered = self.cover(volume),
            What::Copy { of, name, size_bytes } => {
                covered = self.cover(of);
                let mut copy = self.twin(of).copy(Presence::Maybe);
                copy.size_bytes = *size_bytes;
                if let [window] = &mut copy.windows[..] {
                    window.end = *size_bytes;
                }
                self.twin(of).pending_copies.push(name.clone());
                self.twins.insert(name.clone(), copy);
            }
            What::Arrive { name, content } => {
                let size_bytes = content.len() as u64;
                let windows = std::iter::once(0..size_bytes).collect();
                let mut twin = Twin::new(size_bytes, windows, content);
                twin.presence = Presence::Maybe;
                self.twins.insert(name.clone(), twin);
            }
            What::Resize { volume, size_bytes } => {
                covered = self.cover(volume);
                self.twin(volume).next_size_bytes = Some(*size_bytes);
            }
            What::Delete { name } => self.twin(name).presence = Presence::Maybe,
            What::Merge { .. } => {}
        }
        self.running.insert(request, Running { started: now, what, new, covered });
    }

    /// Only deletions are refused while nothing fails: something stands on the image.
    fn refused(&mut self, request: u64) {
        let running = self.running.remove(&request).expect("it was started");
        let What::Delete { name } = running.what else { panic!("{:?} was refused", running.what) };
        self.twin(&name).presence = Presence::Certain;
    }

    fn cover(&mut self, volume: &str) -> Vec<(u64, Vec<Sector>)> {
        let sectors = self.twin(volume).sectors.iter();
        let dirty = sectors.filter(|(_, versions)| !versions.kept.is_empty());
        dirty.map(|(sector, versions)| (*sector, versions.live.clone())).collect()
    }

    fn end(&mut self, request: u64, well: bool) {
        let now = self.now;
        let Running { started, what, new, covered } =
            self.running.remove(&request).expect("it was started");
        match &what {
            What::Write { volume, fua, .. } => {
                for (sector, new) in new.into_iter().filter(|_| well) {
                    let versions = self.twin(volume).versions(sector);
                    if *fua {
                        versions.kept.clear();
                        versions.durable_at = now;
                    }
                    versions.live = new;
                }
            }
            What::Flush { volume } => self.flushed(volume, started, covered, well),
            What::Copy { of, name, .. } => {
                self.flushed(of, started, covered, well);
                self.twin(of).pending_copies.retain(|pending| pending != name);
                if well {
                    self.twin(name).presence = Presence::Certain;
                }
            }
            What::Resize { volume, size_bytes } => {
                self.flushed(volume, started, covered, well);
                let twin = self.twin(volume);
                if well {
                    twin.next_size_bytes = None;
                    twin.resized(*size_bytes);
                } else {
                    // Either size; nobody works with it any more.
                    twin.presence = Presence::Maybe;
                }
            }
            What::Arrive { name, .. } if well => self.twin(name).presence = Presence::Certain,
            What::Arrive { .. } => {}
            What::Delete { name } if well => drop(self.twins.remove(name)),
            What::Delete { .. } | What::Merge { .. } => {}
        }
        for volume in what.flushes().into_iter().filter(|_| !well) {
            self.twin(&volume).may_be_poisoned = true;
        }
    }

    fn flushed(
        &mut self,
        volume: &str,
        started: u64,
        covered: Vec<(u64, Vec<Sector>)>,
        well: bool,
    ) {
        for (sector, durable) in covered.into_iter().filter(|_| well) {
            let versions = self.twin(volume).versions(sector);
            if versions.durable_at > started {
                continue;
            }
            versions.durable_at = started;
            versions.kept.retain(|(at, _)| *at > started);
            let open = durable.len() > 1 || durable != versions.live;
            if open || !versions.kept.is_empty() {
                versions.kept.extend(durable.into_iter().map(|sector| (started, sector)));
            }
        }
    }
}

fn patched(old: &Sector, sector: u64, range: &Range<u64>, fill: Fill) -> Sector {
    let mut new = **old;
    let first = sector * SECTOR_BYTES as u64;
    for (at, byte) in (first..).zip(&mut new) {
        if range.contains(&at) {
            *byte = fill.byte(at);
        }
    }
    Arc::new(new)
}
