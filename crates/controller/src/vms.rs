//! Lists and moves VMs. VMs of a host that does not answer are shown as they were last seen.

pub mod adopt;
pub mod attachments;
pub mod change;
pub mod console;
pub mod exec;
pub mod from_backup;
pub mod guest;
pub mod guest_files;
pub mod live;
pub mod persistent;
mod save;
pub mod set;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::response::Response;
use futures_util::future::join_all;
use perigee_http::certificate::CERTIFICATE_LIFE;
use perigee_http::websocket::{self, Asked};
use perigee_http::{Peer, Tunnel};
use perigee_model::job::{Migration, Vm, VmVolume};
use perigee_model::load::VmLoad;
use perigee_model::persistent_vm::{PersistentVm, PowerRequest, StopVm, VmState};
use perigee_model::plan::Trigger;
use perigee_model::vm::{VmNetwork, VmReport};
use perigee_model::volume::IoStats;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::waiting::in_words;
use perigee_model::{HostId, JobId, MigrationId, Problem, ProblemKind, VmId};

use crate::clock::now_ms;
use crate::cluster::accounts::UsedToken;
use crate::cluster::amounts;
use crate::cluster::{Cluster, HostLink};
use crate::meter::plus;
use crate::records::{JobRecord, MigrationRecord, vm_of};
use crate::storage::{leave_site, replicas, unknown, volumes};
use crate::{jobs, migration, networks, planning};

pub use save::save;

/// All VMs: of hosts that answer, as they say now; of others, as they said last. Sorted by id.
pub async fn list(cluster: &Cluster) -> Result<Vec<Vm>, Problem> {
    Ok(all(cluster, Duration::ZERO).await)
}

/// The same as the hosts have said between the last figures and now. A host that has not is asked.
pub async fn list_lately(cluster: &Cluster) -> Result<Vec<Vm>, Problem> {
    Ok(all(cluster, 2 * cluster.timing.figures).await)
}

/// What was said no longer ago than this counts.
async fn all(cluster: &Cluster, age_max: Duration) -> Vec<Vm> {
    let mut vms = list_at(cluster, &cluster.hosts.all(), age_max, |_| true).await;
    vms.sort_by(|one, other| one.id.cmp(&other.id));
    vms
}

/// The wanted ones of the VMs that these hosts have, and of those without a job that none of the hosts has.
async fn list_at(
    cluster: &Cluster,
    hosts: &[Arc<HostLink>],
    age_max: Duration,
    is_wanted: impl Fn(&VmId) -> bool,
) -> Vec<Vm> {
    let jobs = cluster.unfinished_jobs();
    let moves = cluster.unfinished_migrations();
    let asked = hosts.iter().map(|host| reports_of(cluster, &host.id, age_max));
    let answers = join_all(asked).await;
    let by_vm: BTreeMap<&VmId, &JobRecord> =
        jobs.iter().filter_map(|record| Some((record.job.vm.as_ref()?, &**record))).collect();
    let mut vms = Vec::new();
    let mut seen = BTreeSet::new();
    for (host, (reports, silence)) in hosts.iter().zip(answers) {
        for report in reports.into_iter().filter(|report| is_wanted(&report.spec.vm)) {
            let job = by_vm.get(&report.spec.vm).copied();
            seen.insert((report.spec.vm.clone(), host.id.clone()));
            vms.push(view(cluster, &host.id, report, silence.as_deref(), (job, &moves)));
        }
    }
    let is_seen = |record: &JobRecord| {
        let at = cluster.index.host_of(record);
        record.job.vm.clone().zip(at).is_some_and(|at| seen.contains(&at))
    };
    for record in &jobs {
        if let Some(persistent) = record.kind.persistent_vm()
            && is_wanted(&vm_of(&record.job.id))
            && !is_seen(record)
        {
            vms.push(unseen(cluster, record, persistent));
        }
    }
    vms
}

/// A host's VMs, as it says now or has said no longer ago than this; and if the host does not answer, the reason.
async fn reports_of(
    cluster: &Cluster,
    host: &HostId,
    age_max: Duration,
) -> (Vec<VmReport>, Option<String>) {
    if let Some(reports) = cluster.hosts.fresh_vms(host, age_max) {
        return (reports, None);
    }
    let fresh = match volumes::reachable(cluster, host) {
        Ok(link) => link.agent.get::<Vec<VmReport>>("/v1/vms").await,
        Err(problem) => Err(problem),
    };
    match fresh {
        Ok(reports) => {
            cluster.hosts.remember_vms(host, &reports);
            (reports, None)
        }
        Err(problem) => {
            let why = format!("as last seen: {}", problem.why);
            (cluster.hosts.remembered_vms(host), Some(why))
        }
    }
}

/// A VM without a job that no host has reported.
fn unseen(cluster: &Cluster, record: &JobRecord, persistent: &PersistentVm) -> Vm {
    let job = &record.job;
    let mut status = VmState::unseen(persistent, job.state);
    if record.ending.is_some() {
        status = VmState::Stopping;
    }
    let mut reason = job.reason.clone();
    if status == VmState::Waiting
        && let Some((_, why)) = cluster.index.wait_of(&job.id)
    {
        let separator = if reason.is_empty() { "" } else { "; " };
        reason = format!("{reason}{separator}{why}");
    }
    Vm {
        id: vm_of(&job.id),
        job: None,
        host: cluster.index.host_of(record),
        status,
        reason,
        waits: job.waits.clone(),
        cpus: job.spec.cpus,
        cpu_time: amounts::cpu_time(record, None),
        memory_bytes: job.spec.memory_bytes,
        memory: amounts::shown(cluster, record, None),
        uptime_ms: 0,
        run: record.restarts,
        made_ms: job.submitted_ms,
        vcpu_ms: 0,
        load: VmLoad::default(),
        io: IoStats::default(),
        migration: None,
        may_migrate: Some(job.spec.may_migrate),
        predicted_end: None,
        volumes: volumes(cluster, record),
        image: Some(job.spec.image.clone()),
        addresses: Vec::new(),
        rules: job.spec.rules.clone(),
        labels: persistent.labels.clone(),
        declared: None,
    }
}

fn view(
    cluster: &Cluster,
    host: &HostId,
    report: VmReport,
    silence: Option<&str>,
    (job, moves): (Option<&JobRecord>, &[Arc<MigrationRecord>]),
) -> Vm {
    let vm = report.spec.vm.clone();
    let persistent = job.and_then(|record| record.kind.persistent_vm());
    let mut reason = silence.map_or_else(|| cluster.hosts.named(&report.reason), str::to_owned);
    if persistent.is_some() && reason.is_empty() {
        reason = job.map(|record| record.job.reason.clone()).unwrap_or_default();
    }
    let waits = match silence {
        Some(_) => cluster.hosts.waits(host),
        None => cluster.hosts.named_waits(&report.waits),
    };
    if !waits.is_empty() {
        let said = [in_words(&waits), reason].into_iter().filter(|said| !said.is_empty());
        reason = said.collect::<Vec<_>>().join("; ");
    }
    let stops = persistent.is_some_and(|persistent| persistent.down.is_some());
    let status = VmState::from(report.status);
    Vm {
        job: job.and_then(|record| record.kind.job_of(&record.job.id)).cloned(),
        host: Some(host.clone()),
        status: if stops && status.is_up() { VmState::Stopping } else { status },
        reason,
        waits,
        cpus: report.spec.machine.cpus_least.unwrap_or(report.spec.cpus),
        cpu_time: job.and_then(|record| amounts::cpu_time(record, Some(&report))),
        memory_bytes: persistent
            .and_then(|persistent| persistent.memory_next)
            .or(report.spec.machine.memory_least_bytes)
            .unwrap_or(report.spec.memory_bytes),
        memory: job.and_then(|record| amounts::shown(cluster, record, Some(&report))),
        uptime_ms: report.uptime_ms,
        run: report.spec.start.run,
        made_ms: job.map_or(0, |record| record.job.submitted_ms),
        vcpu_ms: report.vcpu_ms,
        load: report.load,
        io: report.io.iter().copied().fold(IoStats::default(), plus),
        migration: migration_of(moves, &vm),
        may_migrate: job.map(|record| may_migrate(cluster, record)),
        predicted_end: job
            .filter(|_| persistent.is_none())
            .and_then(|record| jobs::predicted_end(cluster, &record.job)),
        image: job.map(|record| record.job.spec.image.clone()),
        addresses: Vec::new(),
        rules: job.map(|record| record.job.spec.rules.clone()).unwrap_or_default(),
        labels: persistent.map(|persistent| persistent.labels.clone()).unwrap_or_default(),
        declared: None,
        volumes: job.map(|record| volumes(cluster, record)).unwrap_or_default(),
        id: vm,
    }
}

fn volumes(cluster: &Cluster, record: &JobRecord) -> Vec<VmVolume> {
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    let volumes = disks.map(|disk| VmVolume {
        volume: disk.volume.clone(),
        home: disk.home.clone(),
        follows: record.to_follow.contains(&disk.volume),
        last_move: cluster.index.volume_move(&disk.volume).map(|last| last.view.clone()),
    });
    volumes.collect()
}

/// Whether the VM moves by itself; of a gang's the gang's file says that.
fn may_migrate(cluster: &Cluster, record: &JobRecord) -> bool {
    let gang = record.kind.member().and_then(|member| cluster.index.job(&member.gang));
    gang.as_deref().unwrap_or(record).job.spec.may_migrate
}

fn migration_of(moves: &[Arc<MigrationRecord>], vm: &VmId) -> Option<MigrationId> {
    moves.iter().find(|m| m.migration.vm == *vm).map(|m| m.migration.id.clone())
}

/// During a migration a VM exists at two hosts. Its job's record says which one counts. Other hosts are asked only if it is at
/// none of its own.
pub async fn get(cluster: &Cluster, vm: &VmId) -> Result<Vm, Problem> {
    let record = JobId::new(vm.as_str()).ok().and_then(|id| cluster.index.job(&id));
    let at = record.as_ref().and_then(|record| cluster.index.host_of(record));
    let mut own: BTreeSet<HostId> = at.iter().cloned().collect();
    for moved in cluster.unfinished_migrations().iter().filter(|m| m.migration.vm == *vm) {
        own.extend([moved.migration.from.clone(), moved.migration.to.clone()]);
    }
    let own: Vec<_> = own.iter().filter_map(|host| cluster.hosts.get(host).ok()).collect();
    let mut found = match record {
        Some(_) => list_at(cluster, &own, Duration::ZERO, |found| found == vm).await,
        None => Vec::new(),
    };
    if found.is_empty() {
        found = list_at(cluster, &cluster.hosts.all(), Duration::ZERO, |found| found == vm).await;
    }
    // It may have arrived while the hosts were asked.
    let at = cluster.index.of_vm(vm).and_then(|record| cluster.index.host_of(&record)).or(at);
    let found = found.into_iter().max_by_key(|found| found.host == at);
    found.ok_or_else(|| unknown(vm))
}

/// The problem of a VM that does not exist, or that somebody may not know of.
pub fn unknown(vm: &VmId) -> Problem {
    Problem::not_found(format!("VM {vm}"), "no host has a VM with this name")
        .next("`perigee vm list` shows the VMs")
}

/// The host of a VM that is at one.
pub(crate) async fn host_of(cluster: &Cluster, vm: &VmId) -> Result<HostId, Problem> {
    host_in(&get(cluster, vm).await?)
}

fn host_in(found: &Vm) -> Result<HostId, Problem> {
    let vm = &found.id;
    found.host.clone().ok_or_else(|| {
        Problem::conflict(format!("VM {vm}"), "it does not run")
            .next(format!("`perigee vm start {vm}` starts it"))
    })
}

/// Stops a VM: one without a job as `ask` says, and a job's at once.
pub async fn stop(cluster: &Arc<Cluster>, vm: &VmId, ask: StopVm) -> Result<(), Problem> {
    if let Some(record) = cluster.index.of_vm(vm) {
        // Of a gang, this ends all.
        let Some(job) = record.kind.job_of(&record.job.id) else {
            let request = PowerRequest::Stop { force: ask.force };
            return persistent::request_power(cluster, vm, request).await.map(drop);
        };
        jobs::intend(cluster, job, |intent| intent.stop_vm = true).await?;
        return Ok(());
    }
    unknown::check_untouched(cluster, vm).await?;
    Err(unknown(vm))
}

/// Refuses a move of a VM if a volume would follow it to a site with its replica.
///
/// # Errors
/// As [`replicas::check_far`].
pub async fn check_far(cluster: &Cluster, vm: &VmId, to: &HostId) -> Result<(), Problem> {
    let Some(record) = cluster.index.of_vm(vm) else { return Ok(()) };
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    for disk in disks.filter(|disk| !disk.read_only && disk.home != *to) {
        replicas::check_far(cluster, &disk.volume, to).await.map_err(|problem| {
            let anyway = format!("perigee vm move {vm} {to} --volumes follow --yes");
            let next = format!("move the VM alone, or move the volume too anyway ({anyway})");
            if problem.kind == ProblemKind::Conflict { problem.next(next) } else { problem }
        })?;
    }
    Ok(())
}

/// Starts a migration that a person requested.
pub async fn move_to(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    to: HostId,
    volumes: VolumesOnMove,
) -> Result<Migration, Problem> {
    let Some(record) = cluster.index.of_vm(vm) else {
        return Err(Problem::not_found(format!("VM {vm}"), "no running job has such a VM")
            .next("`perigee vm list` shows the VMs"));
    };
    cluster.hosts.get(&to)?;
    if let Some(member) = record.kind.member() {
        return Err(migration::not_alone(vm, member, &to));
    }
    let cost = match &record.job.host {
        Some(from) => Some(planning::move_cost(cluster, &record, from, &to).await?),
        None => None,
    };
    let request = migration::Request {
        to: to.clone(),
        reason: migration::ASKED.to_owned(),
        job_progress: record.job.progress_part(),
        volumes,
    };
    let moved = migration::request(cluster, &record, request).await?;
    let summary = format!("move from {} to {to}, as requested by a user", moved.from);
    let figures =
        cost.map(|cost| cost.map_or_else(|why| vec![why.to_string()], |cost| cost.figures));
    let plan = planning::asked_plan(figures.unwrap_or_default());
    planning::record(cluster, &record.job.id, Trigger::Asked, plan, summary).await?;
    Ok(moved)
}

/// Carries bytes between a client's WebSocket and a VM's serial console, until one side has closed or the client's token or
/// certificate is no longer good.
///
/// # Errors
/// `Conflict` if the VM does not run, or if somebody else is attached.
pub async fn attach_console(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    token: Option<UsedToken>,
    peer: Peer,
    request: Request,
) -> Result<Response, Problem> {
    let found = get(cluster, vm).await?;
    host_in(&found)?;
    let asked = websocket::asked(request)?;
    Ok(carry(cluster, open(cluster, &found, CONSOLE).await?, (token, peer), asked))
}

/// What stands after a VM's path where its serial console is.
pub const CONSOLE: &str = "console/attach";
/// The same of its screen.
pub const SCREEN: &str = "vnc";

/// Opens a VM's [`CONSOLE`] or [`SCREEN`] at its host.
///
/// # Errors
/// As [`attach_console`] and [`view_screen`].
pub async fn open(cluster: &Cluster, found: &Vm, end: &str) -> Result<Tunnel, Problem> {
    let host = volumes::reachable(cluster, &host_in(found)?)?;
    host.agent.tunnel(&format!("/v1/vms/{}/{end}", found.id)).await
}

/// Carries bytes between a VNC viewer and a VM's screen, as [`attach_console`] does.
///
/// # Errors
/// `Conflict` if the VM does not run, `Unsupported` if it has no screen.
pub async fn view_screen(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    (token, peer): (Option<UsedToken>, Peer),
    request: Request,
) -> Result<Response, Problem> {
    let found = get(cluster, vm).await?;
    host_in(&found)?;
    let asked = websocket::asked(request)?;
    Ok(carry(cluster, open(cluster, &found, SCREEN).await?, (token, peer), asked))
}

/// Carries bytes between a client and port 22 of a guest, as [`attach_console`] does. A VM's host reaches a card in a user network, and the
/// host with a tenant's network's gateway the cards in that.
///
/// # Errors
/// `Conflict` if the VM does not run, `Unsupported` if it has no card that is reached from here, `Unavailable` if nothing
/// listens there.
pub async fn ssh(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    (token, peer): (Option<UsedToken>, Peer),
    request: Request,
) -> Result<Response, Problem> {
    let what = || format!("can't log in to VM {vm}");
    let host = host_of(cluster, vm).await?;
    let record = cluster
        .index
        .of_vm(vm)
        .ok_or_else(|| Problem::not_found(what(), "nothing is known of its network card"))?;
    leave_site::check_way_in(vm, &record)?;
    let (at, path) = match networks::of_vm(&record)? {
        VmNetwork::User => (host, format!("/v1/vms/{vm}/ssh")),
        VmNetwork::Cluster(card) => {
            let gateway = networks::find(cluster, &card.network).await?.gateway;
            let gateway = gateway.ok_or_else(|| {
                Problem::unavailable(what(), format!("network {} has no gateway now", card.network))
            })?;
            (gateway, format!("/v1/networks/{}/ssh/{}", card.vni, card.address))
        }
        VmNetwork::Bridge(card) => {
            let why = format!("it is in the bridge {} of the hosts' operator", card.bridge);
            return Err(Problem::unsupported(what(), why)
                .next("use `ssh` with its address there, or `perigee vm console`"));
        }
        VmNetwork::None => {
            return Err(Problem::unsupported(what(), "it has no network card")
                .next("use `perigee vm console` or `perigee vm exec`"));
        }
    };
    let asked = websocket::asked(request)?;
    let tunnel = volumes::reachable(cluster, &at)?.agent_slow.tunnel(&path).await?;
    Ok(carry(cluster, tunnel, (token, peer), asked))
}

/// Carries bytes between a client's WebSocket and this tunnel, until one side has closed or the client may have it no more.
pub fn carry(
    cluster: &Arc<Cluster>,
    mut tunnel: Tunnel,
    (token, peer): (Option<UsedToken>, Peer),
    asked: Asked,
) -> Response {
    let (answer, opening) = asked.answer();
    let cluster = Arc::clone(cluster);
    tokio::spawn(async move {
        let over = async {
            tokio::select! {
                () = token_ends(&cluster, token) => "the token is not good any more",
                () = certificate_ends(&cluster, peer) => "the certificate is not good any more",
            }
        };
        // What ends it is the guest's or the client's business.
        drop(opening.carry(&mut tunnel, over).await);
    });
    answer
}

/// Returns when the client's certificate is no longer good; never if it has shown none.
pub async fn certificate_ends(cluster: &Cluster, peer: Peer) {
    match (peer, cluster.network.identity()) {
        (Peer::Known(certified), Some(identity)) => {
            let age = Duration::from_millis(now_ms().saturating_sub(certified.issued_ms));
            tokio::select! {
                () = identity.until_revoked(&certified) => {}
                () = tokio::time::sleep(CERTIFICATE_LIFE.saturating_sub(age)) => {}
            }
        }
        _ => std::future::pending().await,
    }
}

/// Returns when the token is no longer good, or its user has got another role; never if there is none.
async fn token_ends(cluster: &Cluster, token: Option<UsedToken>) {
    let Some(token) = token else { return std::future::pending().await };
    let role = || cluster.accounts.by_token_id(&token.id).map(|user| user.role);
    let at_first = role();
    while at_first.is_some() && role() == at_first {
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}
