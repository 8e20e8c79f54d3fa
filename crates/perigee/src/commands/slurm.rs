//! `perigee slurm`: the programs that Slurm calls for nodes that come and go. Each such node is a VM without a job of the same name.
//!
//! ```text
//! Slurm's node:  powered down ── resume ──> powering up ── slurmd registers ──> idle, allocated ── suspend ──> powered down
//!                                                └── ResumeTimeout ──> down ── resume-fail ──> powered down
//! ```
//!
//! A VM that a node is has the label `slurm=CLUSTER`. A VM without it is never touched, whatever its name. What Slurm or Perigee
//! does not say is not known, and ends nothing.

mod config;
mod log;
mod reconcile;
mod scontrol;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use futures_util::StreamExt as _;
use nix::fcntl::{Flock, FlockArg};
use perigee_http::Client;
use perigee_model::job::Vm;
use perigee_model::persistent_vm::{NewVm, VmState};
use perigee_model::tenant::{Me, SEPARATOR};
use perigee_model::{Problem, ProblemKind, TenantName, VmId};
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::config::{Config, LABEL, Log};
use self::log::now_ms;
use self::reconcile::Looks;
use self::scontrol::{Node, PowerSaving};
use crate::commands::persistent;
use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee slurm VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make the VMs of nodes and start them: Slurm's ResumeProgram. A VM that is there already is fine
    Resume(Asked),
    /// End the VMs of nodes: Slurm's SuspendProgram. A guest that may write a volume is asked to power off first
    Suspend(Asked),
    /// End the VMs of nodes that were not up in time, and let Slurm use the nodes again: Slurm's ResumeFailProgram
    ResumeFail(Asked),
    /// End the VMs that no node of Slurm needs, and reset the nodes that Slurm has given up; for a timer.
    ///
    /// Something is done about a node only when an earlier run has seen it so, at least a grace period ago
    Reconcile {
        /// Only these nodes, as cloud[1-3,7] [default: all that the configuration names]
        nodes: Option<String>,
        #[command(flatten)]
        file: ConfigFile,
    },
}

/// Which nodes.
#[derive(Debug, clap::Args)]
pub struct Asked {
    /// The nodes, as Slurm lists them: cloud[1-3,7]
    nodes: String,
    #[command(flatten)]
    file: ConfigFile,
}

/// The option of all these commands.
#[derive(Debug, clap::Args)]
pub struct ConfigFile {
    /// What the nodes are
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/perigee/slurm.yaml",
        env = "PERIGEE_SLURM"
    )]
    config: PathBuf,
}

/// What came of one node.
#[derive(Debug, Serialize)]
struct Done {
    node: String,
    result: Outcome,
    /// Details, or why it has failed.
    what: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    /// Its VM was made and runs.
    Made,
    /// Its VM was there.
    There,
    /// Its VM was ended.
    Ended,
    /// It had no VM any more.
    Gone,
    /// Slurm may use it again.
    Reset,
    /// It is watched until the grace period is over.
    Waits,
    /// See the reason.
    Failed,
}

const COLUMNS: &[Column<Done>] = &[
    ("node", |d| d.node.clone()),
    ("result", |d| output::word(&d.result)),
    ("what", |d| d.what.clone()),
];

type Result<T> = std::result::Result<T, Problem>;

/// So many nodes are ended at once.
const AT_ONCE: usize = 16;
/// So many requests of a resume are under way at once. Its nodes are all waited for at once, however many they are.
const REQUESTS_MAX: usize = 64;
/// How long the end of a VM is waited for. The controller goes on with it afterwards.
const END_MAX: Duration = Duration::from_secs(300);
/// A guest that does not power off within its time runs on, and the stop says so before this.
const POWER_OFF_MAX: Duration =
    Duration::from_millis(perigee_model::persistent_vm::POWER_OFF_MS + 30_000);
/// Where Slurm does not say how long a node may take.
const RESUME_MAX_S: u64 = 300;
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a reconcile waits for the end of another one.
const OTHER_MAX: Duration = Duration::from_secs(300);

/// Does what a verb asks for, and says for each node what was done. The exit code is 1 if a node has failed.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode> {
    let (name, file, list) = match &verb {
        Verb::Resume(asked) => ("resume", &asked.file, Some(&asked.nodes)),
        Verb::Suspend(asked) => ("suspend", &asked.file, Some(&asked.nodes)),
        Verb::ResumeFail(asked) => ("resume-fail", &asked.file, Some(&asked.nodes)),
        Verb::Reconcile { nodes, file } => ("reconcile", file, nodes.as_ref()),
    };
    let config =
        Config::read(&file.config).inspect_err(|problem| say(&Log::Syslog, name, problem))?;
    let done = act(&verb, list, &config, context).await;
    let done = done.inspect_err(|problem| say(&config.log, name, problem))?;
    for Done { node, result, what } in &done {
        let line = format!("{name}: {node} {}: {what}", output::word(result));
        log::write(&config.log, &line, *result == Outcome::Failed);
    }
    output::list(context.format, &done, COLUMNS)?;
    let has_failed = done.iter().any(|done| done.result == Outcome::Failed);
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn say(log: &Log, name: &str, problem: &Problem) {
    log::write(log, &format!("{name}: {problem}"), true);
}

async fn act(
    verb: &Verb,
    list: Option<&String>,
    config: &Config,
    context: &Context,
) -> Result<Vec<Done>> {
    let nodes = match list {
        Some(list) => Some(scontrol::names(list).await?),
        None => None,
    };
    let client = controller_client(context)?;
    let tenant = match &config.tenant {
        Some(tenant) => tenant.clone(),
        None => client.get::<Me>("/v1/me").await?.tenant,
    };
    let requests = Semaphore::new(REQUESTS_MAX);
    let cluster = Cluster { config, client, tenant, requests };
    let all = nodes.as_deref().unwrap_or_default();
    match verb {
        Verb::Resume(_) => {
            let slurm = Slurm::ask().await;
            if let Ok(power) = &slurm.power {
                power.check_cluster(&config.cluster)?;
            }
            Ok(each(all, all.len(), |node| cluster.resume(node, &slurm)).await)
        }
        Verb::Suspend(_) => {
            let vms = cluster.vms().await?;
            Ok(each(all, AT_ONCE, |node| cluster.suspend(node, &vms)).await)
        }
        Verb::ResumeFail(_) => {
            scontrol::power_saving().await?.check_cluster(&config.cluster)?;
            let vms = cluster.vms().await?;
            let mut done = each(all, AT_ONCE, |node| cluster.resume_fails(node, &vms)).await;
            match cluster.reconcile(None).await {
                Ok(more) => done.extend(more),
                Err(problem) => done.push(Done {
                    node: "-".to_owned(),
                    result: Outcome::Failed,
                    what: format!("the other nodes were not reconciled: {problem}"),
                }),
            }
            Ok(done)
        }
        Verb::Reconcile { .. } => cluster.reconcile(nodes.as_deref()).await,
    }
}

/// Does the same for each node, so many at once; the answers are in the order of the nodes.
async fn each<'n, F>(
    nodes: &'n [String],
    at_once: usize,
    work: impl Fn(&'n String) -> F,
) -> Vec<Done>
where
    F: Future<Output = Result<(Outcome, String)>>,
{
    let working = nodes.iter().map(|node| {
        let working = work(node);
        async move { done(node, working.await) }
    });
    futures_util::stream::iter(working).buffered(at_once.max(1)).collect().await
}

fn done(node: &str, result: Result<(Outcome, String)>) -> Done {
    let (result, what) = result.unwrap_or_else(|problem| (Outcome::Failed, problem.to_string()));
    Done { node: node.to_owned(), result, what }
}

/// What Slurm said when it was asked; an error if it did not.
struct Slurm {
    power: Result<PowerSaving>,
    nodes: Result<BTreeMap<String, Node>>,
    /// When it was asked, which is after it has called.
    asked: Instant,
}

impl Slurm {
    async fn ask() -> Self {
        let asked = Instant::now();
        Self { power: scontrol::power_saving().await, nodes: scontrol::nodes().await, asked }
    }

    fn resume_max_s(&self) -> u64 {
        self.power.as_ref().map_or(RESUME_MAX_S, |power| power.resume_timeout_s)
    }

    /// The same for all nodes: Slurm gives them up then.
    fn deadline(&self) -> Instant {
        self.asked + Duration::from_secs(self.resume_max_s())
    }

    /// Whether a VM that runs is one of an earlier life of its node: Slurm waits for a boot that is later than its request, so the
    /// node would never be up. A VM that this request has made does not run for as long as a node may take to be up. Its host counts
    /// that time, so no two machines' clocks are compared.
    fn is_stale(&self, node: &str, vm: &Vm) -> bool {
        let waits = self
            .nodes
            .as_ref()
            .is_ok_and(|nodes| nodes.get(node).is_some_and(|node| node.is("POWERING_UP")));
        waits && self.power.is_ok() && vm.uptime_ms / 1000 > self.resume_max_s()
    }
}

/// Perigee's side.
struct Cluster<'a> {
    config: &'a Config,
    client: Client,
    tenant: TenantName,
    requests: Semaphore,
}

impl Cluster<'_> {
    fn vm_of(&self, node: &str) -> Result<VmId> {
        VmId::new(self.tenant.full(node))
            .map_err(|why| Problem::invalid(format!("can't find the VM of node {node}"), why))
    }

    /// The VMs of the tenant, of Slurm or not. In a list no guest is asked for its addresses, which takes seconds where none answers.
    async fn vms(&self) -> Result<Vec<Vm>> {
        let all: Vec<Vm> = self.client.get("/v1/vms").await?;
        Ok(all.into_iter().filter(|vm| self.tenant.owns(vm.id.as_str())).collect())
    }

    async fn find(&self, vm: &VmId) -> Result<Option<Vm>> {
        let _turn = self.requests.acquire().await;
        Ok(self.vms().await?.into_iter().find(|found| found.id == *vm))
    }

    fn is_ours(&self, vm: &Vm) -> bool {
        vm.job.is_none() && vm.labels.get(LABEL) == Some(&self.config.cluster)
    }

    fn check_ours(&self, vm: &Vm) -> Result<()> {
        if self.is_ours(vm) {
            return Ok(());
        }
        let label = format!("{LABEL}={}", self.config.cluster);
        let why =
            format!("VM {} has no label {label}, so it is no node of this Slurm cluster", vm.id);
        Err(Problem::conflict("can't use the VM of this name", why)
            .next("rename the node, or delete the VM if nobody needs it"))
    }

    async fn resume(&self, node: &str, slurm: &Slurm) -> Result<(Outcome, String)> {
        let vm = self.vm_of(node)?;
        let mut last = None;
        let up = self.until_up(node, &vm, slurm, &mut last);
        let (outcome, vm) = match tokio::time::timeout_at(slurm.deadline(), up).await {
            Ok(up) => up?,
            Err(_) => {
                let shown = self.find(&vm).await?;
                let now =
                    shown.map(|vm| format!("it is {}: {}", output::word(&vm.status), vm.reason));
                let said = now.or(last.map(|problem| problem.to_string())).unwrap_or_default();
                let max_s = slurm.resume_max_s();
                let why = format!("its VM does not run after {max_s} s; {said}");
                return Err(Problem::unavailable(format!("can't start node {node}"), why));
            }
        };
        let at = output::or_dash(vm.host.as_ref());
        if slurm.power.as_ref().map_err(Problem::clone)?.takes_addresses {
            return Ok((outcome, format!("VM {} runs at {at}", vm.id)));
        }
        let address = self.address(node, &vm.id, slurm).await?;
        let fields = [format!("nodeaddr={address}"), format!("nodehostname={node}")];
        let _turn = self.requests.acquire().await;
        scontrol::update(node, &fields).await?;
        Ok((outcome, format!("VM {} runs at {at}, with the address {address}", vm.id)))
    }

    /// Makes the node's VM, or takes the one that is there. Returns when it runs; `last` is what has kept it from that.
    async fn until_up(
        &self,
        node: &str,
        vm: &VmId,
        slurm: &Slurm,
        last: &mut Option<Problem>,
    ) -> Result<(Outcome, Vm)> {
        let new = self.config.vm(node, vm.as_str())?;
        loop {
            match self.make(&new).await {
                Ok(made) => return Ok((Outcome::Made, self.until_it_runs(&made.id, last).await?)),
                Err(problem) if problem.kind == ProblemKind::Conflict => *last = Some(problem),
                Err(problem) => return Err(problem),
            }
            if let Some(found) = self.find(vm).await? {
                self.check_ours(&found)?;
                // One that is off is of an earlier life, and whoever has stopped it may be about to end it.
                if found.status == VmState::Stopped || slurm.is_stale(node, &found) {
                    self.delete(&found).await?;
                    continue;
                }
                // It is on its way to be off, or to be no more.
                if found.status != VmState::Stopping {
                    return Ok((Outcome::There, self.until_it_runs(vm, last).await?));
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn make(&self, new: &NewVm) -> Result<Vm> {
        let _turn = self.requests.acquire().await;
        self.client.create("/v1/vms", new).await
    }

    /// As `perigee vm create` waits, but in turn with the other nodes' requests. A controller that does not answer may do so later.
    async fn until_it_runs(&self, vm: &VmId, last: &mut Option<Problem>) -> Result<Vm> {
        let what = || format!("can't start VM {vm}");
        loop {
            match self.find(vm).await {
                Ok(Some(found)) if found.status == VmState::Running => return Ok(found),
                Ok(Some(found)) if found.status == VmState::Stopped => {
                    let why = format!("it was stopped meanwhile; {}", found.reason);
                    return Err(Problem::conflict(what(), why));
                }
                Ok(Some(_)) => {}
                Ok(None) => return Err(Problem::conflict(what(), "it was deleted meanwhile")),
                Err(problem) if problem.kind == ProblemKind::Unavailable => *last = Some(problem),
                Err(problem) => return Err(problem),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The first address of IPv4 that the VM says it has.
    async fn address(&self, node: &str, vm: &VmId, slurm: &Slurm) -> Result<Ipv4Addr> {
        let looking = async {
            loop {
                let found: Vm = self.client.get(&format!("/v1/vms/{vm}")).await?;
                if let Some(address) = found.addresses.iter().find_map(|text| usable(text)) {
                    return Ok(address);
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::time::timeout_at(slurm.deadline(), looking).await.unwrap_or_else(|_| {
            let max_s = slurm.resume_max_s();
            let why = format!("its VM has said no address within {max_s} s of Slurm's request");
            Err(Problem::unavailable(format!("can't tell Slurm the address of node {node}"), why).next(
                "put cloud_reg_addrs into SlurmctldParameters, or qemu-guest-agent into the image",
            ))
        })
    }

    async fn suspend(&self, node: &str, vms: &[Vm]) -> Result<(Outcome, String)> {
        let vm = self.vm_of(node)?;
        let Some(found) = vms.iter().find(|found| found.id == vm) else {
            return Ok((Outcome::Gone, format!("there is no VM {vm}")));
        };
        self.check_ours(found)?;
        let mut how = String::new();
        if found.status.is_up() && self.config.may_write_volumes(node) {
            let stop = persistent::stop(&self.client, &vm, false);
            match tokio::time::timeout(POWER_OFF_MAX, stop).await {
                Ok(Ok(())) => how.push_str(", after its guest had powered off"),
                Ok(Err(problem)) => how = format!(", by force: {problem}"),
                Err(_) => how.push_str(", by force: its guest did not power off"),
            }
        }
        // Slurm may have resumed the node meanwhile.
        let Some(now) = self.find(&vm).await? else {
            return Ok((Outcome::Gone, format!("VM {vm} was deleted meanwhile{how}")));
        };
        self.check_ours(&now)?;
        if !is_same_or_off(found, &now) {
            let why = "somebody has started it again";
            return Err(Problem::conflict(format!("can't end VM {vm}"), why));
        }
        self.end(found).await?;
        Ok((Outcome::Ended, format!("{}{how}", was(found))))
    }

    /// Whoever deletes a VM at the same time may be faster.
    async fn delete(&self, vm: &Vm) -> Result<()> {
        match persistent::delete_known(&self.client, vm, true).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
            other => other,
        }
    }

    async fn end(&self, vm: &Vm) -> Result<()> {
        let ending = self.delete(vm);
        tokio::time::timeout(END_MAX, ending).await.unwrap_or_else(|_| {
            let why =
                format!("it is not gone after {} s; the controller goes on", END_MAX.as_secs());
            Err(Problem::unavailable(format!("can't end VM {}", vm.id), why))
        })
    }

    /// Without its VM the node can't come up late any more, so it is reset only then.
    async fn resume_fails(&self, node: &str, vms: &[Vm]) -> Result<(Outcome, String)> {
        let vm = self.vm_of(node)?;
        let said = match vms.iter().find(|found| found.id == vm) {
            None => format!("there was no VM {vm}"),
            Some(found) => {
                self.check_ours(found)?;
                self.end(found).await?;
                format!("ended: {}", was(found))
            }
        };
        reset(node).await?;
        Ok((Outcome::Reset, said))
    }

    /// `only` are the nodes to look at; `None`: all.
    async fn reconcile(&self, only: Option<&[String]>) -> Result<Vec<Done>> {
        scontrol::power_saving().await?.check_cluster(&self.config.cluster)?;
        let _alone = alone(&self.config.state).await?;
        // First the VMs, then Slurm: a VM that was made for a node since Slurm was asked is not among them.
        let own = self.vms().await?.into_iter().filter(|vm| self.is_ours(vm));
        let vms: BTreeMap<String, Vm> = own.map(|vm| (node_of(&vm.id), vm)).collect();
        let nodes = scontrol::nodes().await?;
        let is_looked_at = |node: &&String| only.is_none_or(|only| only.contains(node));
        let names: BTreeSet<&String> = vms
            .keys()
            .chain(nodes.keys().filter(|node| self.config.has(node)))
            .filter(is_looked_at)
            .collect();
        let path = self.config.state.join("looks.json");
        let mut looks = Looks::read(&path)?;
        if only.is_none() {
            looks.keep_only(|node| names.iter().any(|name| *name == node));
        }
        let (mut due, mut result) = (Vec::new(), Vec::new());
        for node in names {
            let vm = vms.get(node);
            let Some(action) = reconcile::action(vm.is_some(), nodes.get(node)) else {
                looks.forget(node);
                continue;
            };
            let state = nodes.get(node).map_or("no state".to_owned(), Node::state);
            let says = format!("Slurm says {state}: {}", action.why);
            let seen_s = looks.found(node, vm.map_or(0, |vm| vm.made_ms), now_ms());
            if seen_s >= self.config.grace_s {
                due.push((node, vm, action, says));
            } else {
                let what = format!("{says}; for {seen_s} of {} s", self.config.grace_s);
                result.push(Done { node: node.clone(), result: Outcome::Waits, what });
            }
        }
        // Before anything is done: a look that is not kept would end VMs with no grace.
        looks.write(&path)?;
        let acting = due.into_iter().map(async |(node, vm, action, says)| {
            done(node, self.carry_out(node, vm, action, says).await)
        });
        result
            .extend(futures_util::stream::iter(acting).buffered(AT_ONCE).collect::<Vec<_>>().await);
        Ok(result)
    }

    async fn carry_out(
        &self,
        node: &str,
        vm: Option<&Vm>,
        action: reconcile::Action,
        mut said: String,
    ) -> Result<(Outcome, String)> {
        // Others were acted on before, and what was seen may be minutes old. First the VM, then Slurm, as before.
        let now = self.find(&self.vm_of(node)?).await?;
        let shown = scontrol::node(node).await?;
        if !is_unchanged(vm, now.as_ref())
            || reconcile::action(now.is_some(), shown.as_ref()) != Some(action)
        {
            return Ok((Outcome::Waits, format!("{said}; it has changed since")));
        }
        if let Some(vm) = vm.filter(|_| action.ends_vm) {
            self.end(vm).await?;
            said = format!("{said}; {}", was(vm));
        }
        if action.resets_node {
            reset(node).await?;
            return Ok((Outcome::Reset, said));
        }
        Ok((Outcome::Ended, said))
    }
}

/// Whether a VM that was looked at is still there in the same run, or there is still none.
fn is_unchanged(before: Option<&Vm>, now: Option<&Vm>) -> bool {
    let life = |vm: &Vm| (vm.made_ms, vm.run);
    before.map(life) == now.map(life)
}

/// Whether nobody has started a VM again since it was looked at. Its run has ended once it is off.
fn is_same_or_off(before: &Vm, now: &Vm) -> bool {
    let is_off = now.status == VmState::Stopped && now.run == before.run + 1;
    is_unchanged(Some(before), Some(now)) || (is_off && now.made_ms == before.made_ms)
}

/// Two reconciles at once would each write what only one has seen. The lock is held until the answer is dropped.
async fn alone(state: &Path) -> Result<Flock<File>> {
    let path = state.join("lock");
    let fail = |error: std::io::Error| {
        Problem::invalid(format!("can't use the state directory {}", state.display()), error)
            .next("let the user that runs this write there, or name another directory: state: DIR")
    };
    DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(fail)?;
    let deadline = Instant::now() + OTHER_MAX;
    loop {
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        match Flock::lock(file.map_err(fail)?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::Error::EWOULDBLOCK)) if Instant::now() < deadline => {}
            Err((_, nix::Error::EWOULDBLOCK)) => {
                let why = format!("another one is still at work after {} s", OTHER_MAX.as_secs());
                return Err(Problem::unavailable("can't reconcile", why));
            }
            Err((_, error)) => return Err(fail(error.into())),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// From whatever state, Slurm takes the node for powered down and idle. Its SuspendProgram is called once more, and finds no VM.
async fn reset(node: &str) -> Result<()> {
    scontrol::update(
        node,
        &["state=power_down_force".to_owned(), "reason=reset by perigee".to_owned()],
    )
    .await
}

/// What a VM was that has ended.
fn was(vm: &Vm) -> String {
    let reason = if vm.reason.is_empty() { String::new() } else { format!(": {}", vm.reason) };
    let up_s = vm.uptime_ms / 1000;
    format!(
        "VM {} was {} at {} for {up_s} s{reason}",
        vm.id,
        output::word(&vm.status),
        output::or_dash(vm.host.as_ref())
    )
}

/// The node that the VM of a tenant is.
fn node_of(vm: &VmId) -> String {
    vm.as_str().rsplit(SEPARATOR).next().unwrap_or_default().to_owned()
}

/// Of `192.0.2.7/24`; others reach a guest neither at its loopback nor at a link-local address.
fn usable(text: &str) -> Option<Ipv4Addr> {
    let address: Ipv4Addr = text.split('/').next()?.parse().ok()?;
    let is_usable = !(address.is_loopback() || address.is_link_local() || address.is_unspecified());
    is_usable.then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_reach_is_told() {
        let said = ["fe80::1/64", "127.0.0.1/8", "169.254.3.4/16", "192.0.2.7/24", "198.51.100.1"];
        assert_eq!(said.iter().find_map(|text| usable(text)), Some(Ipv4Addr::new(192, 0, 2, 7)));
        assert_eq!(usable("web"), None);
    }

    fn vm(made_ms: u64, run: u32, status: &str) -> Vm {
        let io = serde_json::json!(perigee_model::volume::IoStats::default());
        let vm = serde_json::json!({
            "id": "cloud1", "job": null, "host": "home1", "status": status, "reason": "", "cpus": 1, "memory_bytes": 1,
            "uptime_ms": 1, "vcpu_ms": 1, "load": {}, "migration": null, "waits": [], "run": run, "made_ms": made_ms,
            "io": io, "volumes": [], "addresses": []
        });
        serde_json::from_value(vm).expect("a VM")
    }

    #[test]
    fn a_vm_that_somebody_has_started_again_is_not_the_one_that_was_looked_at() {
        let before = vm(5, 1, "running");
        assert!(is_same_or_off(&before, &vm(5, 1, "running")), "its guest runs on");
        assert!(is_same_or_off(&before, &vm(5, 2, "stopped")), "it has powered off");
        assert!(!is_same_or_off(&before, &vm(5, 2, "waiting")), "started again");
        assert!(!is_same_or_off(&before, &vm(5, 3, "stopped")), "started again, and off again");
        assert!(!is_same_or_off(&before, &vm(9, 0, "running")), "another one of the name");
        assert!(!is_same_or_off(&before, &vm(9, 1, "running")), "another one of the name");
        assert!(is_unchanged(Some(&before), Some(&vm(5, 1, "stopping"))));
        assert!(!is_unchanged(Some(&before), Some(&vm(5, 2, "stopped"))));
        assert!(!is_unchanged(Some(&before), None) && !is_unchanged(None, Some(&before)));
        assert!(is_unchanged(None, None));
    }

    #[test]
    fn a_vm_is_of_an_earlier_life_by_the_time_for_which_it_runs() {
        let power =
            PowerSaving { cluster: "test".into(), resume_timeout_s: 300, takes_addresses: true };
        let slurm = |state: &str| Slurm {
            power: Ok(power.clone()),
            nodes: Ok([(
                "cloud1".to_owned(),
                Node { flags: vec![state.into()], reason: String::new() },
            )]
            .into()),
            asked: Instant::now(),
        };
        let up = |uptime_ms| Vm { uptime_ms, ..vm(5, 0, "running") };
        assert!(slurm("POWERING_UP").is_stale("cloud1", &up(301_000)));
        assert!(
            !slurm("POWERING_UP").is_stale("cloud1", &up(300_000)),
            "made long ago by its clock"
        );
        assert!(!slurm("IDLE").is_stale("cloud1", &up(301_000)), "nobody waits for it");
        let unknown = Slurm { nodes: Err(Problem::unavailable("a", "b")), ..slurm("POWERING_UP") };
        assert!(!unknown.is_stale("cloud1", &up(301_000)), "Slurm does not say it");
    }

    #[tokio::test]
    async fn a_reconcile_waits_for_the_end_of_another_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let state = dir.path().join("state");
        let first = alone(&state).await.expect("nobody else is there");
        let mut second = std::pin::pin!(alone(&state));
        tokio::select! {
            biased;
            _ = &mut second => unreachable!("two at once"),
            () = tokio::task::yield_now() => drop(first),
        }
        second.await.expect("the other one has ended");
    }

    #[test]
    fn a_node_has_the_name_of_its_vm_without_the_tenant() {
        let node = |name: &str| node_of(&VmId::new(name).expect("a name"));
        assert_eq!(
            (node("acme~cloud1"), node("cloud1")),
            ("cloud1".to_owned(), "cloud1".to_owned())
        );
    }
}
