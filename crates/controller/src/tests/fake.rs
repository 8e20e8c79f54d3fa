//! A host made of memory: answers as an agent and a volume server do, and does what a test says.

#[path = "fake/admissions.rs"]
mod admissions;
#[path = "fake/backups.rs"]
pub mod backups;
#[path = "fake/homes.rs"]
mod homes;
#[path = "fake/images.rs"]
mod images;
#[path = "fake/measure.rs"]
pub mod measure;
#[path = "fake/replicas.rs"]
pub mod replicas;
#[path = "fake/restoring.rs"]
pub mod restoring;
#[path = "fake/vms.rs"]
pub mod vms;
#[path = "fake/volumes.rs"]
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use perigee_http::terms::{Terms, obey};
use perigee_http::{Failure, Json, Listen, Network, Reply};
use perigee_model::guest::{GuestBody, GuestMessage, RUNNER_MARK, RUNNER_MARK_AT};
use perigee_model::lease::HostNotice;
use perigee_model::leave_site::{
    FindLayers, FoundLayers, LeaveSiteAsker, LeaveSiteSet, SetLayersLeaveSite, SetLeaveSiteAs,
};
use perigee_model::load::HostPressure;
use perigee_model::network::{HostNetworks, NetworksKnown, TunnelEnd};
use perigee_model::switchover::WriterEpochs;
use perigee_model::upgrade::DaemonVersion;
use perigee_model::vm::{
    Accelerator, ChangeVm, HostAddresses, HostReport, LinkProbe, MigrateOut, MigrationPhase,
    VmReport, VmStatus,
};
use perigee_model::volume::{
    Attach, Attachment, BlockProbe, CachePolicy, CollectTrace, CopyImage, CreateVolume,
    EpochChange, EpochIssued, ExportStats, ImageInfo, IoStats, PoolInfo, ProbeBlocks, Resize,
    Snapshot, Upload, VmSocket, VmSocketSeen, VolumeHealth, VolumeInfo, VolumeSource,
};
use perigee_model::{
    Epoch, HostId, ImageName, LayerId, OwnerName, Problem, SiteId, TenantName, VmId, VmStart,
    VolumeName,
};
use tokio::task::JoinHandle;

pub use images::image;
use images::{
    copy_image, delete_image, delete_tree, images, import_image, one_image, receive_tree,
};
use vms::{
    ask_guest_agent, attach_console, begin_command, cancel_migration, change_vm, changes,
    delete_vm, end_command, end_unless_ran, events, migrate, press_power_button, put_vm, sync,
    view_screen, vm, vms as list_vms,
};
use volumes::volume_info;

pub struct Volume {
    pub info: VolumeInfo,
    issued: u64,
    returned: u64,
    pub data: Vec<u8>,
    pub stats: IoStats,
}

pub struct FakeVm {
    pub report: VmReport,
    pub events: Vec<GuestMessage>,
    pub asked: Option<MigrateOut>,
    /// Its guest, of a gang's member, may start its command.
    pub may_begin: bool,
    /// Its guest was asked to end its command.
    pub is_to_end: bool,
}

impl FakeVm {
    fn new(report: VmReport) -> Self {
        Self { report, events: Vec::new(), asked: None, may_begin: false, is_to_end: false }
    }
}

/// A file in a guest.
#[derive(Default)]
pub struct GuestFile {
    pub content: Vec<u8>,
    pub at: usize,
    /// How often it is open.
    pub open: u32,
}

/// Everything a test looks at or changes.
#[derive(Default)]
pub struct Inside {
    /// Nothing answers.
    pub down: bool,
    /// Only its agent, or only its volume server, does not answer.
    pub agent_down: bool,
    pub server_down: bool,
    /// Its QEMUs have ended, and its volume server sees no connections of them.
    pub sees_no_vms: bool,
    pub refuse_migration: bool,
    /// The next connection that asks for a migration shows a replaced certificate.
    pub forbids_migration_once: bool,
    /// It has not what its VMs need.
    pub starts_no_vm: bool,
    /// What its daemons say of their version. One of an older version says nothing.
    pub version: Option<DaemonVersion>,
    /// Its agent is of an older version, and does not know that guests wait.
    pub lets_nothing_begin: bool,
    /// What stands on its images.
    pub image_children: u64,
    /// Volumes that read images of other hosts, and keep nothing.
    pub readers: Vec<String>,
    pub images: BTreeMap<ImageName, ImageInfo>,
    /// The next image that a volume is made of is deleted just before.
    pub image_vanishes: bool,
    /// How often its images were listed.
    pub lists_of_images: u32,
    /// Why VMs can't be in networks here.
    pub no_networks: Option<String>,
    /// The numbers of networks whose gateways do not start here.
    pub failing_gateways: Vec<u16>,
    /// Why VMs have no user networks here.
    pub no_user_networks: Option<String>,
    /// Why VMs have no TPM here.
    pub no_tpm: Option<String>,
    pub tunnels_moves: bool,
    pub notice: Option<HostNotice>,
    /// What its tasks wait for.
    pub cpus_used_1m: Option<f64>,
    pub pressure: HostPressure,
    /// It has passt, which does not start.
    pub refuses_cards: bool,
    /// Its QEMUs end when they start; so many have.
    pub fails_starts: bool,
    pub failed_starts: u32,
    /// Those of its operator.
    pub bridges: Vec<perigee_model::network::BridgeName>,
    /// Of its interfaces.
    pub addresses: Vec<std::net::Ipv4Addr>,
    /// What it was told of networks last.
    pub networks: HostNetworks,
    /// It can't copy from this address.
    pub refuses_source: Option<String>,
    /// What it was asked to copy.
    pub copied: Vec<CopyImage>,
    pub no_new_volumes: bool,
    /// What its pool says; without it, the pool does not answer.
    pub pool_free_bytes: Option<u64>,
    /// The data in its pool.
    pub pool_data_bytes: u64,
    /// Imports are made and VMs are started, and the answers are lost.
    pub loses_answers: bool,
    /// Every import is refused.
    pub refuses_imports: bool,
    /// Every import is under way and does not end.
    pub imports_hang: bool,
    /// It never answers who has it copy an image.
    pub copies_hang: bool,
    /// The sources of imports do not answer.
    pub has_silent_sources: bool,
    /// The files of the trees that were sent, by their paths.
    pub trees: Vec<BTreeMap<String, Vec<u8>>>,
    /// What of them no image was made of yet, by what they are called as a source.
    pub whole_trees: BTreeSet<String>,
    /// Trees that were sent are not taken yet.
    pub trees_hang: bool,
    /// The answers to trees that were sent are lost.
    pub loses_trees: bool,
    /// How many imports have ended.
    pub imports: u32,
    /// It can't read other hosts' images.
    pub reads_no_images: bool,
    /// It can't read anything for a probe.
    pub reads_no_blocks: bool,
    /// How often it has measured a link.
    pub link_probes: u32,
    /// Probes of links and removals of attachments are never answered.
    pub hangs: bool,
    /// It never answers who may open its volumes.
    pub admissions_hang: bool,
    /// How often a power button was pressed.
    pub pressed: u32,
    /// How VMs were changed while they ran.
    pub changed: Vec<ChangeVm>,
    /// Changes of VMs wait.
    pub holds_changes: bool,
    /// Epochs are given out later; so many were asked for.
    pub holds_epochs: bool,
    pub epochs_asked: u32,
    /// It makes volumes larger later; so often it was asked to.
    pub holds_resizes: bool,
    pub resizes_asked: u32,
    /// Snapshots are made later.
    pub holds_snapshots: bool,
    /// What its volumes are is told later; so many wait for it now, and waited at once.
    pub holds_infos: bool,
    pub infos_open: u32,
    pub infos_open_max: u32,
    /// What is attached is there later; so many attachments were asked for.
    pub holds_attachments: bool,
    pub attachments_asked: u32,
    /// VMs can't be changed.
    pub refuses_changes: bool,
    /// Its images have no runner.
    pub has_cloud_images: bool,
    /// What its guests' agents know.
    pub guest_file: GuestFile,
    /// Programs that its guests' agents have started: processes of this machine.
    pub programs: BTreeMap<u32, std::process::Child>,
    /// How many filesystems of a guest stand still.
    pub still: u64,
    /// They go on by themselves when an image is made.
    pub goes_on: bool,
    /// Guests do not listen to their power buttons.
    pub guests_are_deaf: bool,
    /// How often its kernel was booted before.
    pub reboots: u32,
    /// It has 64 CPUs and 256 GiB of memory; otherwise 2 and 1 GiB.
    pub is_large: bool,
    /// KVM on such a processor; otherwise TCG.
    pub kvm_on: Option<String>,
    pub volumes: BTreeMap<VolumeName, Volume>,
    /// The other hosts that may open each.
    pub admissions: BTreeMap<VolumeName, BTreeSet<HostId>>,
    /// How often it was told them all.
    pub told_of_admissions: u32,
    /// What has layers here that somebody looks for.
    pub copies: Vec<String>,
    /// Volumes that stand on its images.
    pub stand_on_images: Vec<VolumeName>,
    /// What stands on the layers of its volumes.
    pub users_of_layers: Vec<String>,
    /// For whom a policy was last changed here.
    pub leave_site_asker: Option<LeaveSiteAsker>,
    pub attachments: BTreeMap<VolumeName, String>,
    /// By their names, the volumes that are traced.
    pub traces: BTreeMap<String, Vec<VolumeName>>,
    /// What each of them holds.
    pub trace: Vec<u8>,
    pub vms: BTreeMap<VmId, FakeVm>,
    /// How often it was asked for all of them.
    pub vms_listed: u32,
    /// VMs whose guest was asked to end its command.
    pub ended_commands: BTreeSet<VmId>,
    /// How often a guest has written everything to its disks.
    pub synced: u32,
    /// How often a volume's data were asked for as a file.
    pub data_reads: u32,
    pub moves: homes::Moves,
    pub replicas: replicas::Replicas,
    pub backups: backups::Backups,
    pub restores: restoring::Restores,
    pub measured: measure::Measured,
    revision: u64,
    /// What was last told of each VM, and with which number.
    told: BTreeMap<VmId, (u64, String)>,
    /// How often each VM was started, over all time.
    pub starts: BTreeMap<VmId, u32>,
    /// Up to which start each VM was ended.
    ended: BTreeMap<VmId, VmStart>,
}

pub struct FakeHost {
    pub id: HostId,
    pub addresses: HostAddresses,
    inside: Arc<Mutex<Inside>>,
    /// Which controller its agent and its volume server obey.
    pub terms: [Arc<Terms>; 2],
    servers: Vec<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

type Shared = State<Arc<Mutex<Inside>>>;

impl Drop for FakeHost {
    fn drop(&mut self) {
        for server in &self.servers {
            server.abort();
        }
    }
}

impl FakeHost {
    pub async fn start(id: &str, site: &str) -> Self {
        Self::start_in(id, site, &Network::Plain).await
    }

    /// In a network with TLS, its address is 127.0.0.1.
    pub async fn start_in(id: &str, site: &str, network: &Network) -> Self {
        let images = BTreeMap::from([(image().name, image())]);
        let inside = Arc::new(Mutex::new(Inside { images, ..Inside::default() }));
        let dir = tempfile::tempdir().expect("a directory");
        let terms = ["agent", "pool"].map(|daemon| {
            let own = dir.path().join(daemon);
            std::fs::create_dir(&own).expect("a directory");
            Terms::open(&own, network)
        });
        let [of_agent, of_volumes] = terms.clone();
        let (agent_url, agent) = serve(obey(agent_routes(inside.clone()), of_agent), network).await;
        let (volume_url, volume) =
            serve(obey(volume_routes(inside.clone()), of_volumes), network).await;
        let addresses = HostAddresses {
            tunnel: Some(tunnel_end(id)),
            site: SiteId::new(site).expect("name"),
            agent_url,
            nbd_addr: format!("{id}:10809"),
            volume_url,
        };
        let id = HostId::new(id).expect("name");
        Self { id, addresses, inside, terms, servers: vec![agent, volume], _dir: dir }
    }

    pub fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("no test panics with the lock")
    }

    /// A volume that no job of this controller made.
    pub fn make_volume(&self, name: &VolumeName) {
        self.inside().put_volume(name);
    }

    /// The guest of a VM says something.
    pub fn say(&self, vm: &VmId, body: GuestBody) {
        let mut inside = self.inside();
        let vm = inside.vms.get_mut(vm).expect("the VM is here");
        let seq = vm.events.last().map_or(vm.report.last_seq, |m| m.seq) + 1;
        vm.events.push(GuestMessage { seq, uptime_ms: seq * 10, body });
        vm.report.last_seq = seq;
    }

    pub fn set_phase(&self, vm: &VmId, phase: MigrationPhase, status: VmStatus) {
        let mut inside = self.inside();
        let report = &mut inside.vms.get_mut(vm).expect("the VM is here").report;
        report.status = status;
        let migration = report.migration.as_mut().expect("it migrates");
        migration.phase = phase;
        (migration.total_ms, migration.downtime_ms) = (1500, 200);
        migration.transferred_bytes = 1 << 20;
    }

    /// Its kernel boots once more. Without its files the agent does not know the VMs of before.
    pub fn reboot(&self, keeps_files: bool) {
        let mut inside = self.inside();
        inside.reboots += 1;
        let boot_id = inside.boot_id();
        if !keeps_files {
            inside.vms.clear();
        }
        for vm in inside.vms.values_mut() {
            vm.report.status = VmStatus::Gone;
            vm.report.boot_id.clone_from(&boot_id);
        }
    }

    /// The VM's state comes in; the guest's next message has this number.
    pub fn arrive(&self, vm: &VmId, last_seq: u64) {
        let mut inside = self.inside();
        let vm = inside.vms.get_mut(vm).expect("the VM is expected here");
        vm.report.status = VmStatus::Running;
        vm.report.last_seq = last_seq;
    }
}

fn tunnel_end(host: &str) -> TunnelEnd {
    let key = host.bytes().map(char::from).filter(char::is_ascii_alphanumeric);
    let public_key = key.chain("A".repeat(43).chars()).take(43).chain(['=']).collect();
    TunnelEnd { public_key, endpoint: "127.0.0.1:51871".to_owned(), mtu: 1500 }
}

/// What was made earlier changes nothing.
async fn take_networks(
    State(inside): Shared,
    Json(wanted): Json<HostNetworks>,
) -> Reply<NetworksKnown> {
    let mut inside = inside.lock().expect("lock");
    if wanted.made_ms >= inside.networks.made_ms {
        inside.networks = wanted;
    }
    Ok(Json(NetworksKnown { made_ms: inside.networks.made_ms }))
}

async fn serve(router: Router, network: &Network) -> (String, JoinHandle<()>) {
    if network.identity().is_some() {
        let address = format!("127.0.0.1:{}", perigee_http::unused_port());
        let listens = [Listen::Tcp(address.clone())];
        let bound = perigee_http::bind(router, &listens, network).await.expect("bind");
        let server = tokio::spawn(async move { bound.serve().await.expect("serve") });
        return (format!("{}{address}", network.scheme()), server);
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let server = tokio::spawn(async move { axum::serve(listener, router).await.expect("serve") });
    (url, server)
}

async fn unless_down(State(inside): Shared, request: Request, next: Next) -> Response {
    if let Err(problem) = inside.lock().expect("lock").unless_down() {
        return Failure(problem).into_response();
    }
    next.run(request).await
}

fn part_is_down() -> Response {
    Failure(Problem::unavailable("answer", "this part of the host is down")).into_response()
}

async fn unless_agent_down(State(inside): Shared, request: Request, next: Next) -> Response {
    let down = inside.lock().expect("lock").agent_down;
    if down { part_is_down() } else { next.run(request).await }
}

async fn unless_server_down(State(inside): Shared, request: Request, next: Next) -> Response {
    let down = inside.lock().expect("lock").server_down;
    if down { part_is_down() } else { next.run(request).await }
}

/// The VMs' sockets at the volume server.
async fn sockets(State(inside): Shared) -> Reply<Vec<VmSocketSeen>> {
    let inside = inside.lock().expect("lock");
    let seen = inside.vms.values().map(|vm| {
        let spec = &vm.report.spec;
        let exports = spec.disks.iter().map(|disk| format!("{}@{}", disk.volume, disk.epoch));
        let socket = VmSocket { vm: spec.vm.clone(), uid: 1, exports: exports.collect() };
        let connections = if inside.sees_no_vms { 0 } else { spec.disks.len() };
        VmSocketSeen { socket, connections, unanswered: Vec::new() }
    });
    Ok(Json(seen.collect()))
}

fn agent_routes(inside: Arc<Mutex<Inside>>) -> Router {
    Router::new()
        .route("/v1/host", get(host))
        .route("/v1/vms", get(list_vms))
        .route("/v1/changes", get(changes))
        .route("/v1/vms/{vm}", get(vm).put(put_vm).delete(delete_vm))
        .route("/v1/vms/{vm}/events", get(events))
        .route("/v1/vms/{vm}/console", get(async || "panic: no root"))
        .route("/v1/vms/{vm}/console/attach", get(attach_console))
        .route("/v1/vms/{vm}/vnc", get(view_screen))
        .route("/v1/vms/{vm}/power-button", post(press_power_button))
        .route("/v1/vms/{vm}/change", post(change_vm))
        .route("/v1/vms/{vm}/guest-agent", post(ask_guest_agent))
        .route("/v1/vms/{vm}/begin-command", post(begin_command))
        .route("/v1/vms/{vm}/end-command", post(end_command))
        .route("/v1/vms/{vm}/sync", post(sync))
        .route("/v1/vms/{vm}/migrate", post(migrate))
        .route("/v1/vms/{vm}/migrate/cancel", post(cancel_migration))
        .route("/v1/vms/{vm}/end-unless-ran", post(end_unless_ran))
        .route("/v1/probe", post(probe_link))
        .route("/v1/networks", put(take_networks))
        .layer(from_fn_with_state(inside.clone(), unless_agent_down))
        .layer(from_fn_with_state(inside.clone(), unless_down))
        .with_state(inside)
}

fn volume_routes(inside: Arc<Mutex<Inside>>) -> Router {
    Router::new()
        .route("/v1/images", get(images).post(import_image))
        .route("/v1/trees/{id}", put(receive_tree).delete(delete_tree))
        .route("/v1/images/{image}", get(one_image).delete(delete_image))
        .route("/v1/images/{image}/copy", post(copy_image))
        .route("/v1/uploads", post(receive))
        .route("/v1/traces/{name}", put(collect_trace).get(trace).delete(end_trace))
        .route("/v1/stats", get(stats))
        .route("/v1/vms", get(sockets))
        .route("/v1/pool", get(pool))
        .route("/v1/probe", post(probe_blocks))
        .merge(volumes::routes())
        .merge(homes::routes())
        .merge(admissions::routes())
        .merge(backups::routes())
        .merge(replicas::routes())
        .merge(measure::routes())
        .merge(restoring::routes())
        .layer(from_fn_with_state(inside.clone(), unless_server_down))
        .layer(from_fn_with_state(inside.clone(), unless_down))
        .with_state(inside)
}

async fn host(State(inside): Shared) -> Reply<HostReport> {
    let inside = inside.lock().expect("lock");
    let (cpus, memory_bytes) = if inside.is_large { (64, 256 << 30) } else { (2, 1 << 30) };
    Ok(Json(HostReport {
        host: HostId::new("any").expect("name"),
        site: SiteId::new("any").expect("name"),
        cpus,
        memory_bytes,
        memory_available_bytes: Some(memory_bytes),
        load_1min: Some(0.0),
        cpus_used_1m: inside.cpus_used_1m,
        pressure: inside.pressure,
        accelerator: if inside.kvm_on.is_some() { Accelerator::Kvm } else { Accelerator::Tcg },
        cpu_model: inside.kvm_on.clone().unwrap_or_default(),
        qemu_version: "7.2".into(),
        boot_id: inside.boot_id(),
        warnings: Vec::new(),
        no_networks: inside.no_networks.clone(),
        failing_gateways: inside.failing_gateways.clone(),
        no_user_networks: inside.no_user_networks.clone(),
        no_tpm: inside.no_tpm.clone(),
        tunnels_moves: inside.tunnels_moves,
        bridges: inside.bridges.clone(),
        addresses: inside.addresses.clone(),
        lease: None,
        notice: inside.notice.clone(),
        version: inside.version.clone(),
    }))
}

impl Inside {
    /// A volume with no data.
    fn put_volume(&mut self, name: &VolumeName) {
        let new = CreateVolume::new(name.clone(), Some(1 << 20), VolumeSource::Empty);
        let info = volume_info(&new);
        let volume =
            Volume { info, issued: 1, returned: 0, data: Vec::new(), stats: IoStats::default() };
        self.volumes.insert(name.clone(), volume);
    }
}

/// It takes whatever comes, and forgets it.
async fn receive(body: axum::body::Body) -> Reply<Upload> {
    let all = axum::body::to_bytes(body, 1 << 30).await;
    let bytes = all.map_err(|e| Problem::unavailable("can't take an upload", e))?.len() as u64;
    Ok(Json(Upload { host: None, source: format!("upload:{bytes}"), bytes }))
}

/// Until the test does not want it so any more.
async fn while_held(inside: &Mutex<Inside>, holds: impl Fn(&Inside) -> bool) {
    while holds(&inside.lock().expect("lock")) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn hang(inside: &Mutex<Inside>) {
    while inside.lock().expect("lock").hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn probe_link(State(inside): Shared) -> Reply<LinkProbe> {
    hang(&inside).await;
    inside.lock().expect("lock").link_probes += 1;
    Ok(Json(LinkProbe { rtt_ms: 16.0, rate_bytes_per_s: 50 << 20 }))
}

async fn collect_trace(
    State(inside): Shared,
    Path(name): Path<String>,
    Json(ask): Json<CollectTrace>,
) -> Reply<()> {
    inside.lock().expect("lock").traces.insert(name, ask.volumes);
    Ok(Json(()))
}

async fn trace(State(inside): Shared, Path(name): Path<String>) -> Result<Vec<u8>, Failure> {
    let inside = inside.lock().expect("lock");
    match inside.traces.contains_key(&name) {
        true => Ok(inside.trace.clone()),
        false => Err(Problem::not_found(name, "no such trace").into()),
    }
}

async fn end_trace(State(inside): Shared, Path(name): Path<String>) -> Reply<()> {
    inside.lock().expect("lock").traces.remove(&name);
    Ok(Json(()))
}

async fn stats(State(inside): Shared) -> Reply<Vec<ExportStats>> {
    let inside = inside.lock().expect("lock");
    let stats = inside.volumes.iter();
    Ok(Json(stats.map(|(n, v)| ExportStats { volume: n.clone(), stats: v.stats }).collect()))
}

async fn pool(State(inside): Shared) -> Reply<PoolInfo> {
    let (free_bytes, data_bytes, version) = {
        let inside = inside.lock().expect("lock");
        (inside.pool_free_bytes, inside.pool_data_bytes, inside.version.clone())
    };
    let Some(free_bytes) = free_bytes else {
        return Err(Problem::unavailable("read the state of the pool", "it is busy").into());
    };
    Ok(Json(PoolInfo {
        path: "/pool".to_owned(),
        total_bytes: 1 << 40,
        free_bytes,
        images: 0,
        volumes: 0,
        format_version: 1,
        data_bytes,
        shared_bytes: 0,
        tenants: Vec::new(),
        version,
    }))
}

async fn probe_blocks(State(inside): Shared, Json(ask): Json<ProbeBlocks>) -> Reply<BlockProbe> {
    let (no_images, no_blocks) = {
        let inside = inside.lock().expect("lock");
        (inside.reads_no_images, inside.reads_no_blocks)
    };
    if no_blocks || no_images && ask.export.starts_with("layer:") {
        return Err(Problem::unavailable("probe", "it may not leave its site").into());
    }
    Ok(Json(BlockProbe { latency_median_us: 100, latency_p95_us: 200, rate_bytes_per_s: 1 << 28 }))
}
