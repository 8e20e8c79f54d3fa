//! Runs a workload on a pool, beside the reference.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use futures_util::future::join_all;
use perigee_model::home::{
    CallOff, Depart, Departed, HomeState, ServerAddresses, TakeVolume, Tenure,
};
use perigee_model::switchover::WriterEpochs;
use perigee_model::volume::{CopyImage, Keep, Resize, Snapshot, VolumeSource};
use perigee_model::{Epoch, Incarnation, Problem, ProblemKind};

use crate::copies::fill::Pace;
use crate::sim::{Cut, Faults, Op, SECTOR_BYTES, Sector, scratch_dir};
use crate::tests::power::check;
use crate::tests::power::expect::{Event, Expected, Fill, Presence, Twin, What};
use crate::tests::power::steps::{Io, Step};
use crate::tests::*;

const BLOCK: u64 = 4096;
/// Blocks that one page of a durable map has states of.
const MAP_PAGE_BLOCKS: u64 = 16256;

/// What happened, with the number of operations of the disk that came before.
pub(super) type History = Vec<(usize, Event)>;

/// A pool with five volumes: `small`, `remote` over another host's export, which it outgrows,
/// `wide`, whose map has three pages, `yonder`, a clone of the image `yonder`, which is a copy of
/// another host's, and `zmoved` over copies of the own blocks of another host's layers.
pub(super) struct World {
    dir: tempfile::TempDir,
    pub(super) files: Arc<SimFiles>,
    pool: Option<Arc<Pool>>,
    expected: RefCell<Expected>,
    history: RefCell<History>,
    devices: HashMap<String, Arc<dyn Device>>,
    requests: RefCell<u64>,
    names: u64,
    /// Failures are expected.
    faulty: bool,
}

fn first_twins() -> BTreeMap<String, Twin> {
    let wide_blocks = 2 * MAP_PAGE_BLOCKS + 8;
    let around = |block: u64| (block - 2) * BLOCK..(block + 2) * BLOCK;
    let wide = vec![
        0..2 * BLOCK,
        around(MAP_PAGE_BLOCKS),
        around(2 * MAP_PAGE_BLOCKS),
        (wide_blocks - 2) * BLOCK..wide_blocks * BLOCK,
    ];
    let whole = |blocks: u64| std::iter::once(0..blocks * BLOCK).collect::<Vec<Range<u64>>>();
    BTreeMap::from([
        ("small".to_owned(), Twin::new(6 * BLOCK, whole(6), &[])),
        ("remote".to_owned(), Twin::new(8 * BLOCK, whole(8), &remote_bytes())),
        ("wide".to_owned(), Twin::new(wide_blocks * BLOCK, wide, &[])),
        ("yonder".to_owned(), Twin::new(6 * BLOCK, whole(6), &remote_bytes())),
        ("zmoved".to_owned(), Twin::new(8 * BLOCK, whole(8), &FakeOwn::shown())),
        ("image:yonder".to_owned(), Twin::new(6 * BLOCK, whole(6), &remote_bytes())),
    ])
}

impl World {
    pub(super) async fn new() -> Self {
        let (dir, files) = (scratch_dir(), Arc::default());
        let pool = open_sim(dir.path(), &files, 1);
        let twins = first_twins();
        let nbd_addr = || "there:1".to_owned();
        let copy = CopyImage {
            content: None,
            nbd_addr: nbd_addr(),
            export: None,
            keep: Keep::Read,
            layer: None,
        };
        pool.copy_image(&image_name("yonder"), copy).await.unwrap();
        for (name, twin) in twins.iter().filter(|(name, _)| !name.starts_with("image:")) {
            let source = match name.as_str() {
                "zmoved" => {
                    pool.stage_layers(&volume_name(name), &nbd_addr(), &FakeOwn::chain())
                        .await
                        .unwrap();
                    put_head(&pool, name, twin.size_bytes, Some(FAKE_OWN[0].layer));
                    continue;
                }
                "remote" => VolumeSource::Remote { nbd_addr: nbd_addr(), export: "x".to_owned() },
                "yonder" => VolumeSource::Image(image_name("yonder")),
                _ => VolumeSource::Empty,
            };
            pool.create_volume(create(name, Some(twin.size_bytes), source)).await.unwrap();
        }
        Self {
            dir,
            files,
            pool: Some(pool),
            expected: RefCell::new(Expected::new(twins)),
            history: RefCell::default(),
            devices: HashMap::new(),
            requests: RefCell::new(0),
            names: 0,
            faulty: false,
        }
    }

    /// From now on each operation is recorded.
    pub(super) fn record(&self) {
        self.files.record(self.dir.path());
    }

    /// The recorded operations, and what happened between them.
    pub(super) fn take_history(&self) -> (Vec<Op>, History) {
        (self.files.take_log(), self.history.borrow().clone())
    }

    /// From now on some operation fails.
    pub(super) fn fail(&mut self, faults: Faults) {
        self.faulty = true;
        self.files.fail(Some(faults));
    }

    /// What happened, for the message of a failed test.
    pub(super) fn story(&self) -> String {
        let history = self.history.borrow();
        let events = history.iter().map(|(at, event)| match event {
            Event::Found { volume, .. } => format!("{at}: found {volume}"),
            event => format!("{at}: {event:?}"),
        });
        events.collect::<Vec<_>>().join("\n")
    }

    /// The reference as of now.
    pub(super) fn expected(&self) -> Expected {
        self.expected.borrow().clone()
    }

    pub(super) fn pool(&self) -> Arc<Pool> {
        Arc::clone(self.pool.as_ref().expect("open between steps"))
    }

    fn happened(&self, event: Event) {
        self.expected.borrow_mut().apply(&event);
        self.history.borrow_mut().push((self.files.recorded(), event));
    }

    fn start(&self, what: What) -> u64 {
        let request = self.requests.replace_with(|last| *last + 1) + 1;
        self.happened(Event::Start { request, what });
        request
    }

    fn end<E: std::fmt::Display>(&self, request: u64, result: &Result<(), E>) {
        match result {
            Ok(()) => self.happened(Event::Done { request }),
            Err(_) if self.faulty => self.happened(Event::Failed { request }),
            Err(error) => panic!("request {request} failed: {error}"),
        }
    }

    /// The `n`th of what is surely there, images or volumes.
    fn choose(&self, n: usize, images: bool) -> Option<String> {
        let expected = self.expected.borrow();
        let there = expected.twins.iter().filter(|(name, twin)| {
            twin.presence == Presence::Certain && name.starts_with("image:") == images
        });
        let names: Vec<&String> = there.map(|(name, _)| name).collect();
        (!names.is_empty()).then(|| names[n % names.len()].clone())
    }

    pub(super) async fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.apply(step).await;
        }
        // What was read is written in the background.
        self.pool().settle_copies().await;
    }

    async fn apply(&mut self, step: &Step) {
        match step {
            Step::Io { volume, io } => {
                let Some(name) = self.choose(*volume, false) else { return };
                let Some(device) = self.device(&name).await else { return };
                self.io(&name, &device, io).await;
            }
            Step::Together { volume, ios } => {
                let Some(name) = self.choose(*volume, false) else { return };
                self.together(&name, ios).await;
            }
            Step::Snapshot { volume } => {
                let Some(name) = self.choose(*volume, false) else { return };
                let image = self.next_name("s");
                self.snapshot(&name, &image).await;
            }
            Step::SnapshotUnder { volume, ios } => {
                let Some(name) = self.choose(*volume, false) else { return };
                let image = self.next_name("s");
                // The session is opened first: nothing else borrows the world then.
                if self.device(&name).await.is_none() {
                    return;
                }
                let this = &*self;
                tokio::join!(this.together_now(&name, ios), this.snapshot(&name, &image));
            }
            Step::Clone { volume, grow_blocks } => {
                let Some(of) = self.choose(*volume, false) else { return };
                let source = VolumeSource::Volume(volume_name(&of));
                self.clone_of(of, source, *grow_blocks).await;
            }
            Step::CloneImage { image } => {
                let Some(of) = self.choose(*image, true) else { return };
                let source = VolumeSource::Image(image_name(of.trim_start_matches("image:")));
                self.clone_of(of, source, 0).await;
            }
            Step::Resize { volume, blocks } => {
                let Some(name) = self.choose(*volume, false) else { return };
                self.resize(name, blocks * BLOCK).await;
            }
            Step::Compact { volume, ios } => {
                let Some(name) = self.choose(*volume, false) else { return };
                if self.device(&name).await.is_none() {
                    return;
                }
                let this = &*self;
                tokio::join!(this.together_now(&name, ios), this.compact(&name));
            }
            Step::Merge { volume, ios } => {
                let Some(name) = self.choose(*volume, false) else { return };
                if self.device(&name).await.is_none() {
                    return;
                }
                let this = &*self;
                tokio::join!(this.together_now(&name, ios), this.merge());
            }
            Step::CallOff { volume } => {
                let Some(name) = self.choose(*volume, false) else { return };
                self.call_off(&name).await;
            }
            Step::Arrive { fill } => self.arrive(*fill).await,
            Step::Fill => self.fill().await,
            Step::FillOwn => self.fill_own().await,
            Step::Delete { volume } => {
                let Some(name) = self.choose(*volume, false) else { return };
                self.devices.remove(&name);
                self.delete(name).await;
            }
            Step::DeleteImage { image } => {
                let Some(name) = self.choose(*image, true) else { return };
                self.delete(name).await;
            }
            Step::Kill => self.restart(None).await,
            Step::PowerCut { seed } => self.restart(Some(*seed)).await,
        }
    }

    fn next_name(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names)
    }

    async fn device(&mut self, name: &str) -> Option<Arc<dyn Device>> {
        if !self.devices.contains_key(name) {
            match self.pool().volume(&volume_name(name)).await {
                Ok(volume) => drop(self.devices.insert(name.to_owned(), volume.session(None))),
                Err(_) if self.faulty => {}
                Err(problem) => panic!("{problem}"),
            }
        }
        self.devices.get(name).map(Arc::clone)
    }

    /// Requests that share no sector, all in flight at once.
    async fn together(&mut self, name: &str, ios: &[Io]) {
        if self.device(name).await.is_some() {
            self.together_now(name, ios).await;
        }
    }

    async fn together_now(&self, name: &str, ios: &[Io]) {
        let mut taken: Vec<Range<u64>> = Vec::new();
        let mut chosen = Vec::new();
        for io in ios {
            if let Io::Write { at, length, .. } | Io::Zero { at, length, .. } = io {
                let range = self.place(name, *at, *length);
                let range = range.start / 512 * 512..range.end.next_multiple_of(512);
                if taken.iter().any(|other| other.start < range.end && range.start < other.end) {
                    continue;
                }
                taken.push(range);
            }
            chosen.push(self.io(name, &self.devices[name], io));
        }
        join_all(chosen).await;
    }

    /// Where a request lies: in one of the volume's windows.
    fn place(&self, name: &str, at: usize, length: usize) -> Range<u64> {
        let expected = self.expected.borrow();
        let windows = &expected.twins[name].windows;
        let total: u64 = windows.iter().map(|window| window.end - window.start).sum();
        let mut at = at as u64 % total;
        for window in windows {
            let bytes = window.end - window.start;
            if at < bytes {
                let start = window.start + at;
                return start..(start + length as u64).min(window.end);
            }
            at -= bytes;
        }
        unreachable!("the windows are that long together")
    }

    async fn io(&self, name: &str, device: &Arc<dyn Device>, io: &Io) {
        if let Io::Read { at, length } = *io {
            return self.read(name, device, self.place(name, at, length)).await;
        }
        let volume = name.to_owned();
        let (request, result) = match *io {
            Io::Write { at, length, fua } => {
                let range = self.place(name, at, length);
                let fill = Fill::Unique(*self.requests.borrow() + 1);
                let data = Bytes::from(fill.bytes(range.clone()));
                let what = What::Write { volume, range: range.clone(), fill, fua };
                let request = self.start(what);
                // As the NBD server does: at once if that can be, else with a wait.
                let at_once = if fua { None } else { device.try_write(range.start, &data) };
                let result = match at_once {
                    Some(result) => result,
                    None => device.write(range.start, data, fua).await,
                };
                (request, result)
            }
            Io::Zero { at, length, how, fua } => {
                let range = self.place(name, at, length);
                let fill = Fill::Zeros;
                let request = self.start(What::Write { volume, range: range.clone(), fill, fua });
                (request, device.zero(range.start, range.end - range.start, how, fua).await)
            }
            Io::Read { .. } => unreachable!("it returned"),
            Io::Flush => (self.start(What::Flush { volume }), device.flush().await),
        };
        self.end(request, &result);
    }

    /// Each whole sector is as last written, or as a request in flight makes it.
    async fn read(&self, name: &str, device: &Arc<dyn Device>, range: Range<u64>) {
        let length_bytes = u32::try_from(range.end - range.start).unwrap();
        let mut buffer = vec![0; usize::try_from(length_bytes).unwrap()];
        let before = self.expected.borrow().twins[name].clone();
        let found = match device.try_read(range.start, &mut buffer) {
            Some(result) => result.map(|()| buffer.into()),
            None => device.read(range.start, length_bytes).await,
        };
        let found: Bytes = match found {
            Ok(found) => found,
            Err(_) if self.faulty => return,
            Err(error) => panic!("a read failed: {error}"),
        };
        let after = &self.expected.borrow().twins[name];
        for sector in range.start.div_ceil(512)..range.end / 512 {
            let from = usize::try_from(sector * 512 - range.start).unwrap();
            let now: Sector = Arc::new(found[from..from + SECTOR_BYTES].try_into().unwrap());
            let known =
                [&before, after].iter().any(|twin| twin.allowed(sector, false).contains(&now));
            assert!(known, "{name}: sector {sector} was never {:?}…", &now[..8]);
        }
    }

    async fn snapshot(&self, of: &str, image: &str) {
        let name = format!("image:{image}");
        let size_bytes = self.expected.borrow().twins[of].size_bytes;
        let request = self.start(What::Copy { of: of.to_owned(), name, size_bytes });
        let ask = Snapshot { image: image_name(image) };
        let result = self.pool().snapshot(&volume_name(of), ask).await.map(drop);
        self.end(request, &result);
    }

    async fn clone_of(&mut self, of: String, source: VolumeSource, grow_blocks: u64) {
        let name = self.next_name("c");
        let size_bytes = self.expected.borrow().twins[&of].size_bytes + grow_blocks * BLOCK;
        let request = self.start(What::Copy { of, name: name.clone(), size_bytes });
        let ask = create(&name, Some(size_bytes), source);
        let result = self.pool().create_volume(ask).await.map(drop);
        self.end(request, &result);
    }

    async fn resize(&mut self, name: String, size_bytes: u64) {
        if self.expected.borrow().twins[&name].windows.len() > 1 {
            return;
        }
        // A volume in use does not shrink.
        self.devices.remove(&name);
        let request = self.start(What::Resize { volume: name.clone(), size_bytes });
        let ask = Resize { size_bytes, shrink: true };
        let result = self.pool().resize_volume(&volume_name(&name), ask).await.map(drop);
        self.end(request, &result);
    }

    /// Changes nothing that anybody sees.
    async fn compact(&self, name: &str) {
        let request = self.start(What::Merge { volumes: vec![name.to_owned()] });
        let done = self.pool().compact_volume(&volume_name(name), Arc::default()).await;
        self.end(request, &done.map(drop));
    }

    /// What the keeper does. It changes nothing that anybody sees, either.
    async fn merge(&self) {
        let pool = self.pool();
        let twins = self.expected().twins;
        let volumes = twins.into_keys().filter(|name| !name.starts_with("image:")).collect();
        let request = self.start(What::Merge { volumes });
        let mut merged = Ok(());
        for layer in pool.catalog.released().unwrap_or_default() {
            let done = pool.merge_released(layer, Arc::default()).await;
            merged = merged.and(done);
        }
        self.end(request, &merged);
    }

    /// Changes nothing that anybody sees, either.
    async fn fill_own(&self) {
        for copy in self.pool().copies_to_fill() {
            let filled = self.pool().fill(&copy, &Arc::default(), &Pace::new(u64::MAX)).await;
            assert!(filled.is_ok() || self.faulty, "{filled:?}");
        }
    }

    async fn fill(&self) {
        let image = self.expected.borrow().twins.get("image:yonder").map(|twin| twin.presence);
        if image != Some(Presence::Certain) {
            return;
        }
        match self.pool().fill_image(&image_name("yonder"), Arc::default()).await {
            Err(_) if self.faulty => {}
            result => drop(result.unwrap()),
        }
    }

    /// The volume departs, which flushes it, and is taken back.
    async fn call_off(&mut self, name: &str) {
        let (pool, volume) = (self.pool(), volume_name(name));
        let home = pool.home(&volume).await.unwrap().home;
        let HomeState::Here { tenure, missing_bytes } = home else { panic!("{name}: {home:?}") };
        if missing_bytes > 0 && name.starts_with('m') {
            return;
        }
        self.devices.remove(name);
        let request = self.start(What::Flush { volume: name.to_owned() });
        let (nbd_addr, control_url) = ("there:1".to_owned(), "http://there:2".to_owned());
        let ask = Depart { tenure, to: ServerAddresses { nbd_addr, control_url } };
        let departed = pool.move_step(&volume).await.unwrap().depart(&ask).await.map(drop);
        self.end(request, &departed);
        pool.move_step(&volume).await.unwrap().return_home(CallOff { tenure }).await.unwrap();
    }

    /// The volume is over the layers over which `zmoved` is.
    async fn arrive(&mut self, fill: bool) {
        let (name, content) = (self.next_name("m"), FakeOwn::shown());
        let size_bytes = content.len() as u64;
        let (epoch, tenure) = (Epoch::first(Incarnation(77)), Tenure::first(Incarnation(77)));
        let (nbd_addr, control_url) = ("there:1".to_owned(), "http://there:2".to_owned());
        let from = ServerAddresses { nbd_addr, control_url };
        let take = TakeVolume { from: from.clone(), to: from, tenure, grant: None };
        let departed = Departed {
            tenure: tenure.next(),
            size_bytes,
            epochs: WriterEpochs { current: epoch, issued_max: epoch, returned_max: Epoch(0) },
            chain: FakeOwn::chain(),
            tenant: Default::default(),
            cache: Default::default(),
            owner: None,
            leave_site: Default::default(),
        };
        let request = self.start(What::Arrive { name: name.clone(), content });
        let result = self
            .pool()
            .move_step(&volume_name(&name))
            .await
            .unwrap()
            .arrive(&take, departed)
            .await
            .map(drop);
        self.end(request, &result);
        if fill {
            self.fill_own().await;
        }
    }

    async fn delete(&self, name: String) {
        let request = self.start(What::Delete { name: name.clone() });
        let result: Result<(), Problem> = match name.strip_prefix("image:") {
            Some(image) => self.pool().delete_image(&image_name(image)).await.map(drop),
            None => self.pool().delete_volume(&volume_name(&name)).await,
        };
        match &result {
            Err(problem) if problem.kind == ProblemKind::Conflict && name.starts_with("image:") => {
                self.happened(Event::Refused { request });
            }
            _ => self.end(request, &result),
        }
    }

    /// Kills the server, or cuts the power, and looks at what is there.
    async fn restart(&mut self, power_cut: Option<u64>) {
        self.devices.clear();
        self.pool().settle_copies().await;
        self.pool = None;
        if let Some(seed) = power_cut {
            self.files.cut(Cut::BySector(seed));
            let boot = self.expected.borrow().boot + 1;
            self.happened(Event::Boot(boot));
        }
        let boot = self.expected.borrow().boot;
        let config =
            || PoolConfig { private: None, dir: self.dir.path().to_owned(), connect: connector() };
        let open =
            || Pool::open_with(config(), Arc::clone(&self.files) as _, Uuid::from_u128(boot));
        let first = open();
        // Whoever looks at what is there meets no fault.
        let faults = self.files.fail(None);
        let opened = if first.is_err() && self.faulty { open() } else { first };
        self.pool = Some(opened.unwrap());
        let found = check::check(&self.pool(), &self.expected(), power_cut.is_some()).await;
        for (volume, sectors) in found {
            let power_cut = power_cut.is_some();
            self.happened(Event::Found { volume, power_cut, sectors });
        }
        self.happened(Event::Settled);
        self.files.fail(faults);
    }
}
