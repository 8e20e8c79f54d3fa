//! The VMs of this host: lists them, starts one, and finds all of them again after a restart.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use perigee_http::Peer;
use perigee_http::memory::keep_off_disks;
use perigee_model::starts::{OnDelete, OnStart, Starts};
use perigee_model::switchover::{Fate, Switchover, fate};
use perigee_model::vm::{Machine, VmSpec, VmStatus};
use perigee_model::{MigrationId, Problem, VmId, VmStart};
use tokio::sync::oneshot;

use crate::callers::check_source;
use crate::files::{VmDir, read_json};
use crate::guest::GuestLog;
use crate::host::Host;
use crate::vm::migrate::Record;
use crate::vm::owner::{Farewell, Owner};
use crate::vm::since::Since;
use crate::vm::{Request, Vm};

/// How often a delete looks whether the VM is still there.
const DELETE_TRIES: u32 = 100;
const DELETE_AGAIN: Duration = Duration::from_millis(20);

/// All VMs of this host.
#[derive(Debug)]
pub struct Vms {
    pub host: Arc<Host>,
    all: Mutex<BTreeMap<VmId, Arc<Vm>>>,
    /// VMs whose stored spec cannot be read, or how they were changed since, or their guests' messages. Their state is not known, and nothing is done with them.
    unreadable: BTreeMap<VmId, Problem>,
}

impl Vms {
    /// Takes over the VMs of the agent that ran before with this state directory.
    pub async fn adopt(host: Arc<Host>) -> Result<Arc<Self>, Problem> {
        let dir = host.state.join("vms");
        let (mut found, mut unreadable) = (Vec::new(), BTreeMap::new());
        let fail = |e| Problem::internal(format!("can't read {}", dir.display()), e);
        for entry in std::fs::read_dir(&dir).map_err(fail)? {
            let name = entry.map_err(fail)?.file_name();
            let Some(id) = name.to_str().and_then(|name| VmId::new(name).ok()) else { continue };
            let paths = VmDir::new(&host.state, &id);
            match stored(&paths) {
                Ok(Some(stored)) => found.push((id, paths, stored)),
                // Its start was interrupted before QEMU was started.
                Ok(None) => paths.remove()?,
                Err(problem) => {
                    tracing::error!(vm = %id, %problem, "nothing is done with this VM");
                    unreadable.insert(id, problem);
                }
            }
        }
        let vms =
            Arc::new(Self { host: host.clone(), all: Mutex::new(BTreeMap::new()), unreadable });
        for (id, paths, (spec, since, log)) in found {
            let record = Record::load(&paths);
            if spec.locks_memory || spec.hides_output {
                let kept = keep_off_disks(&format!("what the VM {id} prints may be swapped"));
                kept.unwrap_or_else(|problem| tracing::error!(%problem, "a VM is found"));
            }
            let (vm, requests) =
                Vm::new(spec, paths, since, log, status_of(&record), &host.changes);
            let mut owner = Owner::new(host.clone(), vm.clone(), requests);
            owner.adopt(record).await;
            if owner.was_never_started() {
                match owner.undo_start().await {
                    Ok(()) => continue,
                    Err(problem) => {
                        tracing::error!(vm = %id, %problem, "what is left of its start stays")
                    }
                }
            }
            vms.with(|all| all.insert(id, vm.clone()));
            if vm.spec.machine.persistent {
                // The agent of before may have ended while the guest's filesystems stood still.
                let frozen = vm.clone();
                tokio::spawn(async move { frozen.thaw().await });
            }
            tokio::spawn(vms.clone().look_after(vm, owner));
        }
        Ok(vms)
    }

    fn with<T>(&self, act: impl FnOnce(&mut BTreeMap<VmId, Arc<Vm>>) -> T) -> T {
        act(&mut self.all.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The VMs that are known here, by name.
    pub fn list(&self) -> Vec<Arc<Vm>> {
        self.with(|all| all.values().cloned().collect())
    }

    /// Whether it is known of all VMs here what they have.
    pub fn are_readable(&self) -> bool {
        self.unreadable.is_empty()
    }

    /// # Errors
    /// If what is stored of this VM cannot be read. Then it is not known whether the VM runs.
    fn check_readable(&self, id: &VmId) -> Result<(), Problem> {
        let Some(problem) = self.unreadable.get(id) else { return Ok(()) };
        let what = format!("the state of the VM {id} is not known");
        let why = format!("{}: {}", problem.what, problem.why);
        Err(Problem::internal(what, why).next(format!(
            "repair that file at {host}, or end the VM's QEMU there and delete the VM's directory; then \
             start the agent again",
            host = self.host.name
        )))
    }

    /// # Errors
    /// `NotFound` if there is no VM with this name.
    pub fn get(&self, id: &VmId) -> Result<Arc<Vm>, Problem> {
        self.check_readable(id)?;
        self.with(|all| all.get(id).cloned()).ok_or_else(|| {
            Problem::not_found(
                format!("can't find the VM {id}"),
                format!("{} has none", self.host.name),
            )
        })
    }

    /// Starts a VM, or finds that it was started with this spec before. An older start of it is ended first.
    pub async fn put(self: &Arc<Self>, spec: VmSpec) -> Result<Arc<Vm>, Problem> {
        let what = format!("can't start the VM {}", spec.vm);
        spec.check()?;
        self.check_readable(&spec.vm)?;
        let (vm, owner) = loop {
            match self.enlist(&spec)? {
                Enlisted::New(vm, owner) => break (vm, owner),
                Enlisted::Same(vm) => return same(vm, &spec, what).await,
                // Each turn ends a start for good, so that there is an end to them.
                Enlisted::Older(start) => self.delete(&spec.vm, start).await?,
            }
        };
        let (started, outcome) = oneshot::channel();
        // In a task of its own, because a client that disconnects must not interrupt a start.
        tokio::spawn(self.clone().start(vm.clone(), owner, started));
        outcome.await.map_err(|e| Problem::internal(what, e))??;
        Ok(vm)
    }

    /// Takes the name for a new VM, where its start may begin here.
    fn enlist(&self, spec: &VmSpec) -> Result<Enlisted, Problem> {
        let held = self.host.ends.hold(&spec.vm);
        let ended = held.get()?.map(|ended| ended.start);
        self.with(|all| {
            let here = all.get(&spec.vm);
            let starts = Starts { here: here.map(|vm| vm.spec.start), ended };
            let what = || format!("can't start the VM {}", spec.vm);
            let decided = starts.on_start(spec.start).map_err(|e| e.problem(what()))?;
            match (decided, here) {
                (OnStart::EndFirst(start), _) => return Ok(Enlisted::Older(start)),
                (OnStart::Same, Some(vm)) => return Ok(Enlisted::Same(Arc::clone(vm))),
                (OnStart::Begin | OnStart::Same, _) => {}
            }
            let paths = VmDir::new(&self.host.state, &spec.vm);
            self.host.create(&paths)?;
            let log = GuestLog::open(&paths.events(), spec.hides_output)?;
            let (changes, spec) = (&self.host.changes, spec.clone());
            let (vm, requests) =
                Vm::new(spec, paths, Since::default(), log, VmStatus::Starting, changes);
            all.insert(vm.id().clone(), vm.clone());
            let owner = Owner::new(self.host.clone(), vm.clone(), requests);
            Ok(Enlisted::New(vm, Box::new(owner)))
        })
    }

    async fn start(
        self: Arc<Self>,
        vm: Arc<Vm>,
        mut owner: Box<Owner>,
        started: oneshot::Sender<Result<(), Problem>>,
    ) {
        let result = owner.start().await;
        let failed = result.is_err();
        if failed {
            self.with(|all| all.remove(vm.id()));
            vm.is_no_more();
        }
        // The caller may no longer wait.
        let _ = started.send(result);
        if !failed {
            self.look_after(vm, *owner).await;
        }
    }

    async fn look_after(self: Arc<Self>, vm: Arc<Vm>, owner: Owner) {
        let farewell = owner.run().await;
        self.with(|all| all.remove(vm.id()));
        vm.is_no_more();
        // The caller may no longer wait.
        match farewell {
            Farewell::Nobody => {}
            Farewell::Deleted(answer) => drop(answer.send(Ok(()))),
            Farewell::DidNotRun(answer) => drop(answer.send(Ok(Fate::DidNotRun))),
        }
    }

    /// Stops and forgets a VM, unless a later start of it is here. No start up to this one begins here any
    /// more. What is not there is deleted already.
    pub async fn delete(&self, id: &VmId, start: VmStart) -> Result<(), Problem> {
        self.check_readable(id)?;
        for _ in 0..DELETE_TRIES {
            let (vm, kept) = self.keep_end(id, start)?;
            let Some(vm) = vm else { return kept };
            match vm.ask(Request::Delete).await {
                // On a full disk this makes room; the next try stores the end.
                Some(deleted) => deleted?,
                // It is about to be taken from the list.
                None => tokio::time::sleep(DELETE_AGAIN).await,
            }
        }
        let why = "its owner does not answer, and it is still there";
        Err(Problem::unavailable(format!("can't delete the VM {id}"), why).next(format!(
            "look at the log of the agent at {}, and start the agent again; the VM goes on meanwhile",
            self.host.name
        )))
    }

    /// Stores that these starts are ended. Gives the VM that is to be ended, and whether that was stored.
    fn keep_end(&self, id: &VmId, start: VmStart) -> Result<(Option<Arc<Vm>>, Stored), Problem> {
        let mut held = self.host.ends.hold(id);
        // What cannot be read is replaced.
        let before = held.get().ok().flatten().map(|ended| ended.start);
        let vm = self.with(|all| all.get(id).cloned());
        let starts = Starts { here: vm.as_ref().map(|vm| vm.spec.start), ended: before };
        let (act, ended) = starts.on_delete(start);
        let kept = held.add(ended, None);
        match act {
            OnDelete::Nothing => Ok((None, kept)),
            OnDelete::End => Ok((vm, kept)),
            OnDelete::Leave(refused) => {
                kept?;
                Err(Problem::conflict(format!("can't delete the VM {id}"), refused))
            }
        }
    }

    /// From now on frames for a VM that comes to this host wait at its card here: it is paused at its source.
    ///
    /// # Errors
    /// `NotFound`; `Forbidden` unless the host tells from which this migration comes; `Unavailable` if the kernel is not told.
    pub async fn expect_frames(
        &self,
        peer: &Peer,
        id: &VmId,
        migration: &MigrationId,
    ) -> Result<(), Problem> {
        let vm = self.get(id)?;
        let what = || format!("can't take frames for the VM {id}");
        if vm.spec.arrives_by.as_ref() != Some(migration) {
            return Err(Problem::conflict(what(), "it does not come by this migration"));
        }
        check_source(peer, id, vm.spec.arrives_from.as_ref())?;
        let Some(card) = vm.spec.network.card() else { return Ok(()) };
        vm.send_frames_to(self.host.name.clone());
        let sent = self.host.networks.send_to(card, &self.host.name).await;
        sent.map_err(|why| Problem::unavailable(what(), why))
    }

    /// The fate of the VM that a migration was to bring to this host. A host may ask for those that come from it.
    pub async fn end_unless_ran(
        &self,
        peer: &Peer,
        id: &VmId,
        migration: &MigrationId,
    ) -> Result<Fate, Problem> {
        self.check_readable(id)?;
        if let Ok(vm) = self.get(id) {
            if vm.spec.arrives_by.as_ref() == Some(migration) {
                check_source(peer, id, vm.spec.arrives_from.as_ref())?;
            }
            let asked = vm.ask(|answer| Request::EndUnlessRan(migration.clone(), answer)).await;
            if let Some(answer) = asked {
                return answer;
            }
        }
        let held = self.host.ends.hold(id);
        let last = held.get()?.and_then(|ended| ended.arrived.as_ref());
        if let Some(from) = last.and_then(|last| last.from.as_ref()) {
            check_source(peer, id, Some(from))?;
        }
        Ok(fate(last.map(|last| (&last.migration, last.arrival)), migration))
    }
}

/// What an agent of before has stored of a VM; `None` if it has not started it.
fn stored(paths: &VmDir) -> Result<Option<(VmSpec, Since, GuestLog)>, Problem> {
    let Some(spec) = read_json::<VmSpec>(&paths.spec())? else { return Ok(None) };
    let log = GuestLog::open(&paths.events(), spec.hides_output)?;
    Ok(Some((spec, Since::load(paths)?, log)))
}

/// Whether something was written to the disk.
type Stored = Result<(), Problem>;

/// A VM whose name is to be taken.
enum Enlisted {
    New(Arc<Vm>, Box<Owner>),
    /// This start is here.
    Same(Arc<Vm>),
    /// An older start is here.
    Older(VmStart),
}

/// The answer where this start is here already.
async fn same(vm: Arc<Vm>, spec: &VmSpec, what: String) -> Result<Arc<Vm>, Problem> {
    // A controller of the version before does not say this.
    let keeps_free_memory = vm.spec.machine.keeps_free_memory;
    let machine = Machine { keeps_free_memory, ..spec.machine.clone() };
    if vm.spec != (VmSpec { machine, ..spec.clone() }) {
        return Err(Problem::conflict(what, "this start of it is here with another spec"));
    }
    match vm.ask(Request::Started).await {
        Some(started) => started.map(|()| vm),
        None => Err(Problem::unavailable(what, "an earlier try has just failed")),
    }
}

/// The status of a VM that was found. The disk shows whether it moved away; QEMU is asked for the rest.
fn status_of(record: &Result<Option<Record>, Problem>) -> VmStatus {
    match record {
        Ok(Some(record)) if record.switchover == Switchover::Destination => VmStatus::Migrated,
        _ => VmStatus::Starting,
    }
}
