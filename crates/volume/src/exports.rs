//! Export name to device.
//!
//! | name | export |
//! |---|---|
//! | `VOLUME` | a volume, with the writer epoch it has at this moment |
//! | `VOLUME@N` | the same, as a session of writer epoch N |
//! | `image:NAME` | a sealed layer, read-only |
//! | `layer:UUID` | the same, by what it is; never listed |
//! | `layer:UUID@own` | only what the layer itself has, for a host that has the layers below it; never listed |
//! | `image:NAME@sums`, `layer:UUID@sums` | the checksums of a layer without layers below it, for a host that copies it; never listed |
//! | `image:NAME@visible@sums`, `layer:UUID@visible@sums` | the checksums of all that a layer shows, computed as they are read; never listed |
//! | `layer:UUID@own@sums` | the checksums of any layer, for a host that copies what it has itself; never listed |
//! | `VOLUME@layers` | the ids of the sealed layers below a volume, for a host that may have some of them; never listed |
//! | `VOLUME@since:UUID` | which blocks a volume has above one of them; only extents; never listed |
//!
//! A volume that is not in this pool but attached is proxied. The same export name is sent to its home, so the home
//! enforces the epoch.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use futures_util::future::BoxFuture;
use perigee_block::device::Device;
use perigee_block::exports::{
    Admission, CHECKSUMS_SUFFIX, Export, Exports, LAYER_PREFIX, LAYERS_SUFFIX, OWN_SUFFIX, Opener,
    Peer, SINCE_INFIX, SessionHome, VISIBLE_CHECKSUMS_SUFFIX,
};
use perigee_block::lease::NO_HOST;
use perigee_block::locking;
use perigee_block::logins::{LoginGuard, Logins};
use perigee_block::sessions::ProxyKey;
use perigee_block::stats::StatsTable;
use perigee_block::switch::Switch;
use perigee_http::PeerIdentity;
use perigee_http::certificate::now_ms;
use perigee_http::memory::keep_off_disks;
use perigee_model::client::Over;
use perigee_model::volume::Unanswered;
use perigee_model::{Epoch, HostId, ImageName, LayerId, Problem, ProblemKind, VolumeName};
use perigee_nbd::{Durability, NbdDevice, Opened};
use perigee_store::{Data, Pool};
use uuid::Uuid;

use crate::admissions::Admissions;
use crate::ahead::Ahead;
use crate::boot_secrets::BootSecrets;
use crate::preconnected::{Arriving, Preconnected};
use crate::proxies::{Proxies, ProxySlot};
use crate::proxy::ProxySession;
use crate::remotes::Remotes;
use crate::reopen::LocalSessions;
use crate::shared_layers;
use crate::sites::{Sites, Want};
use crate::turns::Turns;

/// The number of connections to a volume's home for each session. A long write or a lost packet delays only the
/// requests on its own connection.
const PROXY_CONNECTIONS: u64 = 4;

/// The most names that an error lists.
const NAMES_IN_ERROR: usize = 20;

/// The parts of an export's name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Wanted {
    Volume(VolumeName, Option<Epoch>),
    Image(ImageName),
    Layer(LayerId),
    /// Only what a layer itself has.
    Own(LayerId),
    /// The checksums of an image or a layer.
    Checksums(Box<Self>),
    /// Those of all that it shows.
    ShownChecksums(Box<Self>),
    /// The sealed layers below a volume.
    Layers(VolumeName),
    /// What a volume has above one of them.
    Since(VolumeName, LayerId),
}

impl Wanted {
    fn parse(text: &str) -> Option<Self> {
        if let Some(sealed) = text.strip_suffix(VISIBLE_CHECKSUMS_SUFFIX) {
            let of = Self::parse(sealed)?;
            let sealed = matches!(of, Self::Image(_) | Self::Layer(_));
            return sealed.then(|| Self::ShownChecksums(Box::new(of)));
        }
        if let Some(sealed) = text.strip_suffix(CHECKSUMS_SUFFIX) {
            let of = Self::parse(sealed)?;
            let sealed = matches!(of, Self::Image(_) | Self::Layer(_) | Self::Own(_));
            return sealed.then(|| Self::Checksums(Box::new(of)));
        }
        if let Some(image) = text.strip_prefix("image:") {
            return image.parse().ok().map(Self::Image);
        }
        if let Some(layer) = text.strip_prefix(LAYER_PREFIX) {
            return match layer.strip_suffix(OWN_SUFFIX) {
                Some(layer) => layer.parse().ok().map(Self::Own),
                None => layer.parse().ok().map(Self::Layer),
            };
        }
        if let Some(volume) = text.strip_suffix(LAYERS_SUFFIX) {
            return volume.parse().ok().map(Self::Layers);
        }
        if let Some((volume, layer)) = text.split_once(SINCE_INFIX) {
            return Some(Self::Since(volume.parse().ok()?, layer.parse().ok()?));
        }
        match text.split_once('@') {
            Some((volume, epoch)) => {
                Some(Self::Volume(volume.parse().ok()?, Some(Epoch(epoch.parse().ok()?))))
            }
            None => text.parse().ok().map(|volume| Self::Volume(volume, None)),
        }
    }
}

impl Wanted {
    /// What a policy is about.
    fn data(&self) -> Option<Data> {
        match self {
            Self::Volume(volume, _) | Self::Layers(volume) | Self::Since(volume, _) => {
                Some(Data::Volume(volume.clone()))
            }
            Self::Image(image) => Some(Data::Image(image.clone())),
            Self::Layer(layer) | Self::Own(layer) => Some(Data::Layer(*layer)),
            Self::Checksums(of) | Self::ShownChecksums(of) => of.data(),
        }
    }
}

/// How this server identifies itself to other hosts' servers.
pub struct Here {
    /// The id of this server and its pool. It stays the same over a restart.
    pub server_id: Uuid,
    /// The id of the host's boot. Empty if it is not known.
    pub boot: String,
}

/// Finds the exports of one pool.
pub struct PoolExports {
    pub(crate) stats: Arc<StatsTable>,
    pub(crate) proxies: Arc<Proxies>,
    /// Volumes that have been attached since before this server started: clients may have had sessions on them.
    attached_before: Mutex<HashSet<VolumeName>>,
    /// Volumes whose homes did not answer when a session was to be opened: since when, and where.
    unopened: Mutex<HashMap<VolumeName, (Instant, String)>>,
    pub(crate) ahead: Arc<Ahead>,
    here: Here,
    /// Identifies this start of the server to the homes, so that they first drain what an earlier start has left.
    start: Uuid,
    pub(crate) remotes: Remotes,
    pub logins: Arc<Logins>,
    pub(crate) boot_secrets: BootSecrets,
    pub(crate) pool: Arc<Pool>,
    pub(crate) local: LocalSessions,
    pub(crate) turns: Turns,
    pub(crate) preconnected: Arc<Preconnected>,
    pub(crate) arriving: Arc<Arriving>,
    pub(crate) sites: Sites,
    pub(crate) admissions: Admissions,
    pub(crate) this: Weak<Self>,
}

impl PoolExports {
    /// The exports of a pool. No session is open.
    pub fn new(pool: Arc<Pool>, stats: Arc<StatsTable>, here: Here, remotes: Remotes) -> Arc<Self> {
        let proxies = Proxies::new(Arc::clone(&stats), remotes.cache_bytes);
        let (start, proxies, ahead) = (Uuid::new_v4(), Arc::new(proxies), Arc::default());
        let (logins, boot_secrets, local, turns, sites) = Default::default();
        let (preconnected, arriving, admissions, attached_before, unopened) = Default::default();
        Arc::new_cyclic(|this| Self {
            stats,
            proxies,
            attached_before,
            unopened,
            ahead,
            here,
            start,
            remotes,
            logins,
            boot_secrets,
            pool,
            local,
            turns,
            preconnected,
            arriving,
            sites,
            admissions,
            this: this.clone(),
        })
    }

    /// The number of open sessions of an attached volume.
    pub fn proxied_sessions(&self, volume: &VolumeName) -> u64 {
        self.proxies.count(volume)
    }

    /// Since when the home of an attached volume has not answered one of the sessions here, or has not let one be opened.
    pub fn unanswered(&self, volume: VolumeName) -> Option<Unanswered> {
        let sessions = self.proxies.sessions(&volume);
        let since = |session: &ProxySession| session.upstream.unanswered_since();
        let open = sessions.iter().map(|(_, session)| session);
        let silent = open.filter_map(|session| Some((since(session)?, session.nbd_addr.clone())));
        let (since, nbd_addr) = if sessions.is_empty() {
            locking::lock(&self.unopened).get(&volume).cloned()?
        } else {
            silent.min_by_key(|(since, _)| *since)?
        };
        let for_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(Unanswered { volume, nbd_addr, since_ms: now_ms().saturating_sub(for_ms) })
    }

    fn note_opening<T>(&self, volume: &VolumeName, nbd_addr: String, opened: &Result<T, Problem>) {
        let is_silent =
            opened.as_ref().is_err_and(|problem| problem.kind == ProblemKind::Unavailable);
        let mut unopened = locking::lock(&self.unopened);
        if !is_silent {
            unopened.remove(volume);
        } else {
            unopened.entry(volume.clone()).or_insert_with(|| (Instant::now(), nbd_addr));
        }
    }

    /// To be called when the server starts, before it has clients.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn know_attached_before(&self) -> Result<(), Problem> {
        let attached = self.pool.attachments().await?.into_iter().map(|(volume, _)| volume);
        locking::lock(&self.attached_before).extend(attached);
        Ok(())
    }

    /// To be called when a volume was attached, perhaps at another home than before.
    pub fn attached(&self, volume: &VolumeName) {
        self.ahead.forget(volume);
        self.proxies.attached(volume);
    }

    /// To be called when a volume was detached. Its figures are removed when the last of its sessions has ended.
    pub fn detached(&self, volume: &VolumeName) {
        self.ahead.forget(volume);
        locking::lock(&self.attached_before).remove(volume);
        locking::lock(&self.unopened).remove(volume);
        self.proxies.detached(volume);
    }

    /// Begins to open sessions on attached volumes, all at once, for a client that will soon open these exports.
    /// It does not wait for them. A session that could not be opened is opened when the client comes.
    pub async fn open_ahead(self: &Arc<Self>, names: &[String]) -> Result<(), Problem> {
        let attached = self.pool.attachments().await?;
        for name in names {
            let Some(Wanted::Volume(volume, _)) = Wanted::parse(name) else { continue };
            let Some((_, nbd_addr)) = attached.iter().find(|(at, _)| *at == volume) else {
                continue;
            };
            let (key, slot) = self.new_key(&volume, name);
            if slot.number() == 0 {
                let (exports, of) = (Arc::clone(self), volume.clone());
                let (export, nbd_addr) = (name.clone(), nbd_addr.clone());
                Ahead::open(&self.ahead, &volume, name, async move {
                    exports.open_proxy(&of, &export, nbd_addr, (key, slot), None).await
                });
            }
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<String>, Problem> {
        let (volumes, images) = self.pool.names().await?;
        let volumes = volumes.iter().map(ToString::to_string);
        Ok(volumes.chain(images.iter().map(|image| format!("image:{image}"))).collect())
    }

    async fn find(&self, name: &str, opener: Opener, peer: Peer) -> Result<Export, Problem> {
        let found = match Wanted::parse(name) {
            Some(Wanted::Volume(volume, epoch)) => {
                self.find_volume(&volume, name, epoch, (opener, peer)).await
            }
            Some(sealed) => self.find_sealed(name, &sealed, peer).await,
            None => return Err(self.unknown(name, peer).await?),
        };
        match found {
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                Err(self.unknown(name, peer).await?)
            }
            found => found,
        }
    }

    /// The problem of an export that is not here. Only processes of this host are told what is: what another host hears gets
    /// into the answers that its users see.
    async fn unknown(&self, name: &str, peer: Peer) -> Result<Problem, Problem> {
        let names = if peer.address.is_none() { Some(self.list().await?) } else { None };
        Ok(unknown(name, names.as_deref()))
    }

    async fn find_volume(
        &self,
        volume: &VolumeName,
        name: &str,
        epoch: Option<Epoch>,
        (opener, peer): (Opener, Peer),
    ) -> Result<Export, Problem> {
        if !peer.is_authenticated {
            self.check_no_secret(volume).await?;
        }
        let (of, want) = (Data::Volume(volume.clone()), Want::Session(opener));
        let confined = self.check_leaving(&of, want, peer).await?;
        if matches!(opener, Opener::Proxy(_)) {
            // The old home's sessions come here before the volume is stored here.
            self.arriving.wait(volume).await;
        }
        let may_join = peer.is_own && opener == Opener::Client;
        let found = match self.local(volume, name, epoch, (opener, may_join)).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                // What is here by now has come back in the meantime.
                let is_known =
                    self.attachment(volume).await?.is_some() || self.pool.is_here(volume).await?;
                if opener != Opener::Client || !is_known {
                    return Err(problem);
                }
                self.proxy(volume, name, epoch, peer).await?
            }
            found => Export { confined, ..found? },
        };
        self.note_foreign(of, want, peer, confined, &found.device).await?;
        Ok(found)
    }

    /// A disk that a client's secret protects over iSCSI is not served to whoever reaches the NBD port.
    async fn check_no_secret(&self, volume: &VolumeName) -> Result<(), Problem> {
        if !self.pool.has_secret(volume).await? {
            return Ok(());
        }
        let what = format!("can't open export {:?}", volume.as_str());
        let why =
            "it is the disk of a client with a CHAP secret, and NBD without TLS asks for no proof";
        Err(Problem::conflict(what, why).next(
            "use iSCSI with the secret, NBD over TLS with a certificate, or the volume server's unix socket",
        ))
    }

    /// The epoch of a session that was asked for with this one or without one. `None` joins the present writer.
    ///
    /// # Errors
    /// A conflict if the volume is written with epochs, and the client may not join.
    async fn epoch_of_session(
        &self,
        volume: &VolumeName,
        epoch: Option<Epoch>,
        may_join: bool,
    ) -> Result<Option<Epoch>, Problem> {
        if epoch.is_some() || may_join {
            return Ok(epoch);
        }
        let current = self.pool.volume(volume).await?.epoch();
        let is_first = current == Epoch::first(current.incarnation());
        // A job's VM writes its own volumes with their first epoch.
        if is_first && self.pool.volume_info(volume).await?.owner.is_none() {
            return Ok(Some(current));
        }
        let what = format!("can't open export {:?}", volume.as_str());
        let why =
            "the volume is written with epochs, and a session without one would join its writer";
        Err(Problem::conflict(what, why).next(format!(
            "open {volume}@N, where N is the epoch that `perigee volume info {volume}` shows, or connect at the \
             volume's home through the volume server's unix socket"
        )))
    }

    /// Another host has of this one's volumes those that the controller has let it open, and what is below and above them;
    /// and each layer whose id it was told. By their names it has no images: everybody can guess those.
    async fn check_admission(
        &self,
        name: &str,
        host: &HostId,
    ) -> Result<Option<Arc<Admission>>, Problem> {
        let what = format!("can't open export {name:?}");
        let own = self.remotes.identity().map(|identity| identity.own().identity);
        let is_own = own.is_some_and(|own| own == PeerIdentity::Host(host.clone()));
        let of = Wanted::parse(name).and_then(|wanted| wanted.data());
        let volume = match of {
            Some(Data::Volume(volume)) if !is_own => volume,
            Some(Data::Image(_)) if !is_own => {
                let why = "another host reads an image by the id of its layer, which the controller tells it";
                return Err(Problem::forbidden(what, why)
                    .next("let the controller copy it: perigee image replicate"));
            }
            _ => return Ok(None),
        };
        let admission = self.admissions.of(&volume, host);
        if self.pool.may_open(&volume, host).await? {
            return Ok(Some(admission));
        }
        let why = format!("the controller has not let host {host} open volume {volume}");
        Err(Problem::forbidden(what, why)
            .next("let the controller attach it: a job or VM there that uses it does so"))
    }

    async fn find_sealed(&self, name: &str, of: &Wanted, peer: Peer) -> Result<Export, Problem> {
        // Nobody guesses the id of a layer, so whoever has one was told of it.
        if let (Wanted::Layers(volume) | Wanted::Since(volume, _), false) =
            (of, peer.is_authenticated)
        {
            self.check_no_secret(volume).await?;
        }
        let device = match of {
            Wanted::Image(image) => self.pool.open_image(image).await?,
            Wanted::Layer(layer) => self.pool.open_layer(*layer).await?,
            Wanted::Own(layer) => self.pool.open_own(*layer).await?,
            Wanted::Checksums(of) => self.checksums(name, of, false).await?,
            Wanted::ShownChecksums(of) => self.checksums(name, of, true).await?,
            Wanted::Layers(volume) => self.pool.open_layers_of(volume).await?,
            Wanted::Since(volume, layer) => self.pool.open_since(volume, *layer).await?,
            Wanted::Volume(..) => return Err(unknown(name, None)),
        };
        let Some(data) = of.data() else { return Ok(sealed(device, false)) };
        let confined = self.check_leaving(&data, Want::Copy, peer).await?;
        let export = sealed(device, confined);
        self.note_foreign(data, Want::Copy, peer, confined, &export.device).await?;
        Ok(export)
    }

    async fn checksums(
        &self,
        name: &str,
        of: &Wanted,
        shown: bool,
    ) -> Result<Arc<dyn Device>, Problem> {
        let layer = match of {
            Wanted::Layer(layer) => Some((*layer, false)),
            Wanted::Own(layer) => Some((*layer, true)),
            Wanted::Image(image) => Some((self.pool.image_info(image).await?.layer, false)),
            Wanted::Volume(..)
            | Wanted::Checksums(_)
            | Wanted::ShownChecksums(_)
            | Wanted::Layers(_)
            | Wanted::Since(..) => None,
        };
        match layer {
            Some((layer, _)) if shown => self.pool.open_visible_checksums(layer).await,
            Some((layer, own)) => self.pool.open_checksums(layer, own).await,
            None => {
                Err(Problem::not_found(format!("export {name:?}"), "only images have checksums"))
            }
        }
    }

    /// A session on a volume of this pool. `may_join` says whether a session without an epoch may join the present
    /// writer. That is decided within the turn, so that the volume that was looked at is the one that is opened.
    pub(crate) async fn local(
        &self,
        volume: &VolumeName,
        name: &str,
        epoch: Option<Epoch>,
        (opener, may_join): (Opener, bool),
    ) -> Result<Export, Problem> {
        let host = match opener {
            Opener::Proxy(host) => host,
            Opener::Client => NO_HOST,
        };
        let _turn = self.turns.opening(volume).await?;
        let epoch = self.epoch_of_session(volume, epoch, may_join).await?;
        let session = self.pool.open_session(volume, epoch, host).await?;
        let home = session.epoch().map(|epoch| self.home(epoch));
        let device = Switch::new(session);
        if opener == Opener::Client {
            // The session keeps its epoch when the volume moves.
            let export = home.as_ref().map(|home| format!("{volume}@{}", home.epoch));
            self.local.enter(volume, export.as_deref().unwrap_or(name), &device);
        }
        let counters = self.stats.of(volume);
        Ok(Export { device, read_only: false, counters, home, confined: false })
    }

    pub(crate) async fn attachment(&self, volume: &VolumeName) -> Result<Option<String>, Problem> {
        let attachments = self.pool.attachments().await?;
        Ok(attachments.into_iter().find(|(name, _)| name == volume).map(|(_, addr)| addr))
    }

    /// What a session on a volume of this pool sends to the other host about its home.
    fn home(&self, epoch: Epoch) -> SessionHome {
        SessionHome { server: self.here.server_id, boot: self.here.boot.clone(), epoch }
    }

    /// A session at a volume's home. `before` is the session that it replaces.
    pub(crate) async fn open_proxy(
        &self,
        volume: &VolumeName,
        export: &str,
        nbd_addr: String,
        key: (Arc<ProxyKey>, Arc<ProxySlot>),
        before: Option<&ProxySession>,
    ) -> Result<Arc<ProxySession>, Problem> {
        let opened = self.try_open_proxy(volume, export, nbd_addr.clone(), key, before).await?;
        opened.map_err(|at| {
            let what = format!("can't open volume {volume} at {nbd_addr}");
            let why = format!("it has another home now, at {at}");
            Problem::conflict(what, why).next("attach it at its home")
        })
    }

    /// As [`Self::open_proxy`]. If the volume has another home now, returns its address.
    pub(crate) async fn try_open_proxy(
        &self,
        volume: &VolumeName,
        export: &str,
        nbd_addr: String,
        own: (Arc<ProxyKey>, Arc<ProxySlot>),
        before: Option<&ProxySession>,
    ) -> Result<Result<Arc<ProxySession>, String>, Problem> {
        let opened = self.open_proxy_at(volume, export, nbd_addr.clone(), own, before).await;
        self.note_opening(volume, nbd_addr, &opened);
        opened
    }

    async fn open_proxy_at(
        &self,
        volume: &VolumeName,
        export: &str,
        nbd_addr: String,
        (key, slot): (Arc<ProxyKey>, Arc<ProxySlot>),
        before: Option<&ProxySession>,
    ) -> Result<Result<Arc<ProxySession>, String>, Problem> {
        // An earlier start of this server may have left unflushed writes of the same client.
        let may_go_on = before.is_none() && locking::lock(&self.attached_before).contains(volume);
        let durability = match before {
            Some(before) => before.upstream.durability(),
            None if may_go_on => Arc::new(Durability::of_unknown()),
            None => Arc::default(),
        };
        let open = async |export: &str, connections| {
            let mut remote = self.remotes.export_of_home(nbd_addr.clone(), export);
            remote.session = Some(Arc::clone(&key));
            remote.counters = Some(self.stats.of(volume));
            remote.durability = Arc::clone(&durability);
            remote.connections = connections;
            remote.prepared = self.preconnected.take(&nbd_addr);
            NbdDevice::open_or_moved(remote).await
        };
        let (mut export, mut connections) = (export.to_owned(), PROXY_CONNECTIONS);
        if !export.contains('@') {
            // Without an epoch each connection would get the volume's present one, and a fenced session could
            // write again after a reconnect. So the first connection asks the home for the epoch, which then stays.
            match open(&export, 1).await? {
                Opened::Device(first) => match first.home() {
                    Some(home) => export = format!("{volume}@{}", home.epoch),
                    None => connections = 1,
                },
                Opened::Moved { nbd_addr } => return Ok(Err(nbd_addr)),
            }
        }
        let upstream = match open(&export, connections).await? {
            Opened::Device(upstream) => upstream,
            Opened::Moved { nbd_addr } => return Ok(Err(nbd_addr)),
        };
        if upstream.is_confined() {
            keep_off_disks(&format!("can't open volume {volume}"))?;
        }
        let cached = upstream.incarnation().map(|which| self.proxies.cached(volume, which));
        let learning = cached.clone().filter(|_| !upstream.is_confined()).map(|cached| {
            shared_layers::keep(Arc::clone(&self.pool), volume.clone(), nbd_addr.clone(), cached)
        });
        let counters = self.stats.of(volume);
        let session = ProxySession::new(&export, nbd_addr, upstream, (key, slot), cached, counters);
        if may_go_on {
            let (upstream, volume) = (Arc::clone(&session.upstream), volume.clone());
            session.run_while_open(async move {
                // Until the client flushes, a reboot of the home's host then counts as a loss.
                if let Err(error) = upstream.flush().await {
                    tracing::info!(%volume, %error, "can't flush what an earlier session may have written");
                }
            });
        }
        if let Some(learning) = learning {
            session.run_while_open(learning);
        }
        Ok(Ok(Arc::new(session)))
    }

    /// Makes a key that no open session of an export has.
    pub(crate) fn new_key(
        &self,
        volume: &VolumeName,
        export: &str,
    ) -> (Arc<ProxyKey>, Arc<ProxySlot>) {
        let slot = Proxies::take(&self.proxies, volume, export);
        let key = ProxyKey::new(self.here.server_id, export, self.start, slot.number());
        (Arc::new(key), Arc::new(slot))
    }
}

/// The writer epoch in an export's name.
pub(crate) fn epoch_of(export: &str) -> Option<Epoch> {
    match Wanted::parse(export) {
        Some(Wanted::Volume(_, epoch)) => epoch,
        _ => None,
    }
}

fn sealed(device: Arc<dyn Device>, confined: bool) -> Export {
    let (device, counters) = (Switch::new(device), Arc::default());
    Export { device, read_only: true, counters, home: None, confined }
}

fn unknown(name: &str, names: Option<&[String]>) -> Problem {
    let why = match names {
        None => "there is none of that name".to_owned(),
        Some([]) => "this server has no exports yet".to_owned(),
        Some(names) if names.len() > NAMES_IN_ERROR => {
            let some = names[..NAMES_IN_ERROR].join(", ");
            format!(
                "there is none of that name; this server has {} exports: {some}, …",
                names.len()
            )
        }
        Some(names) => {
            format!("there is none of that name; this server has: {}", names.join(", "))
        }
    };
    Problem::not_found(format!("export {name:?}"), why)
        .next("an export is VOLUME, VOLUME@EPOCH or image:IMAGE; `nbdinfo --list` shows them")
}

impl Exports for PoolExports {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        Box::pin(self.list())
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        opener: Opener,
        peer: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(self.find(name, opener, peer))
    }

    fn admits<'a>(
        &'a self,
        name: &'a str,
        host: &'a HostId,
    ) -> BoxFuture<'a, Result<Option<Arc<Admission>>, Problem>> {
        Box::pin(self.check_admission(name, host))
    }

    fn also_named<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Vec<String>, Problem>> {
        Box::pin(async move {
            let Some(Data::Layer(layer)) = Wanted::parse(name).and_then(|wanted| wanted.data())
            else {
                return Ok(Vec::new());
            };
            let images = self.pool.images_of(layer).await?;
            Ok(images.iter().map(|image| format!("image:{image}")).collect())
        })
    }

    fn moved_to<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Option<String>> {
        Box::pin(async move {
            let Some(Wanted::Volume(volume, _)) = Wanted::parse(name) else { return None };
            self.pool.moved_to(&volume).await.ok().flatten()
        })
    }

    fn is_replaced<'a>(&'a self, name: &'a str) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let Some(Wanted::Volume(volume, Some(epoch))) = Wanted::parse(name) else {
                return false;
            };
            let here = self.pool.volume(&volume).await;
            here.is_ok_and(|here| here.epoch().incarnation() != epoch.incarnation())
        })
    }

    fn log_in(&self, name: &str, over: Over, peer: &str) -> Option<LoginGuard> {
        match Wanted::parse(name) {
            Some(Wanted::Volume(volume, _)) => {
                if over == Over::Iscsi {
                    self.boot_secrets.logged_in(&volume);
                }
                Some(self.logins.enter(volume, over, peer.to_owned()))
            }
            _ => None,
        }
    }
}

/// The id of this pool's server. It is made at the first start and kept in the pool's directory. It is durable
/// when this returns, and a power cut leaves the whole id or none.
///
/// # Errors
/// When the file can't be read or written.
pub fn server_id(pool: &Path) -> Result<Uuid, Problem> {
    let path = pool.join("server-id");
    let failed = |error: std::io::Error| {
        Problem::internal(format!("the server's id in {}", path.display()), error)
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(|e| failed(std::io::Error::other(e))),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(error)),
        Err(_) => make_server_id(pool, &path).map_err(failed),
    }
}

fn make_server_id(pool: &Path, path: &Path) -> std::io::Result<Uuid> {
    let id = Uuid::new_v4();
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(format!("{id}\n").as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    File::open(pool)?.sync_all()?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str) -> VolumeName {
        VolumeName::new(name).expect("a name")
    }

    #[test]
    fn export_names_are_volumes_sessions_and_images() {
        assert_eq!(Wanted::parse("data"), Some(Wanted::Volume(volume("data"), None)));
        assert_eq!(Wanted::parse("data@12"), Some(Wanted::Volume(volume("data"), Some(Epoch(12)))));
        let image = ImageName::new("debian").expect("a name");
        assert_eq!(Wanted::parse("image:debian"), Some(Wanted::Image(image)));
        let checksums =
            Wanted::Checksums(Box::new(Wanted::Image(ImageName::new("debian").expect("a name"))));
        assert_eq!(Wanted::parse("image:debian@sums"), Some(checksums));
        let layer = LayerId(Uuid::from_u128(7));
        assert_eq!(Wanted::parse(&format!("layer:{layer}")), Some(Wanted::Layer(layer)));
        let own = || Wanted::Own(layer);
        assert_eq!(Wanted::parse(&format!("layer:{layer}@own")), Some(own()));
        let sums = Some(Wanted::Checksums(Box::new(own())));
        assert_eq!(Wanted::parse(&format!("layer:{layer}@own@sums")), sums);
        let shown = Some(Wanted::ShownChecksums(Box::new(Wanted::Layer(layer))));
        assert_eq!(Wanted::parse(&format!("layer:{layer}@visible@sums")), shown);
        assert_eq!(Wanted::parse("data@layers"), Some(Wanted::Layers(volume("data"))));
        let since = Some(Wanted::Since(volume("data"), layer));
        assert_eq!(Wanted::parse(&format!("data@since:{layer}")), since);
        for bad in [
            "",
            "data@",
            "data@x",
            "data@-1",
            "image:",
            "layer:7",
            "layer:7@own",
            "image:debian@own",
            "data@own",
            "data@sums",
            "data@visible@sums",
            "image:debian@visible",
            "data@since:7",
            "data@1@layers",
            "other:data",
            "../data",
        ] {
            assert_eq!(Wanted::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_server_keeps_its_id() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = server_id(dir.path()).expect("an id");
        assert_eq!(server_id(dir.path()).expect("an id"), first);
        std::fs::write(dir.path().join("server-id"), "").expect("damage");
        server_id(dir.path()).expect_err("whoever knows the server would take it for another one");
    }
}
