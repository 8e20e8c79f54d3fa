//! The VMs of the host made of memory: what an agent answers about them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_http::{Failure, Json, Reply};
use perigee_model::guest::GuestEvent;
use perigee_model::load::{MemoryUse, VmLoad};
use perigee_model::starts::{OnDelete, OnStart, Starts};
use perigee_model::switchover::{Arrival, Fate, fate, may_begin};
use perigee_model::vm::{
    AskGuestAgent, CancelMigration, ChangeVm, EndUnlessRan, MigrateOut, MigrationPhase,
    MigrationReport, VmChanged, VmChanges, VmReport, VmSpec, VmStatus,
};
use perigee_model::volume::IoStats;
use perigee_model::{Problem, VmId, VmStart};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{FakeVm, Inside, Shared, while_held};

/// In one answer: as a real agent, it does not give everything at once.
const EVENTS_MAX: usize = 3;

fn no_vm() -> Failure {
    Problem::not_found("VM", "there is none").into()
}

pub(super) async fn press_power_button(State(inside): Shared, Path(vm): Path<VmId>) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    inside.pressed += 1;
    let heeds = !inside.guests_are_deaf;
    let vm = inside.vms.get_mut(&vm).ok_or_else(no_vm)?;
    if heeds {
        vm.report.status = VmStatus::Shutdown;
    }
    Ok(Json(()))
}

/// Its guests have no driver with which they give memory back, but for those of which a test says what they have.
pub(super) async fn change_vm(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Query(start): Query<VmStart>,
    Json(ask): Json<ChangeVm>,
) -> Reply<VmChanged> {
    {
        let mut inside = inside.lock().expect("lock");
        if inside.refuses_changes {
            return Err(Problem::conflict("change the VM", "the test wants it so").into());
        }
        let report = &inside.vms.get(&vm).ok_or_else(no_vm)?.report;
        if !report.spec.start.is_in_run_of(start) {
            return Err(Problem::conflict("change the VM", "another start is meant").into());
        }
        inside.changed.push(ask.clone());
    }
    while_held(&inside, |inside| inside.holds_changes).await;
    let mut inside = inside.lock().expect("lock");
    let report = &mut inside.vms.get_mut(&vm).ok_or_else(no_vm)?.report;
    let mut changed = VmChanged::default();
    match ask {
        ChangeVm::Cpus { count } => report.spec.cpus = count,
        ChangeVm::Memory { bytes } => {
            changed.memory_bytes = Some(report.spec.memory_bytes);
            if let Some(memory) = &mut report.load.memory {
                let used = memory.has_bytes - memory.available_bytes.unwrap_or(0);
                *memory = MemoryUse {
                    has_bytes: bytes,
                    available_bytes: Some(bytes.saturating_sub(used)),
                };
                changed.memory_bytes = Some(bytes);
            }
        }
        ChangeVm::GrowDisk { .. } => {}
        ChangeVm::Plug(disk) => report.spec.disks.push(disk),
        ChangeVm::Unplug { role } => report.spec.disks.retain(|disk| disk.role != role),
    }
    Ok(Json(changed))
}

/// As qemu-guest-agent does, on this machine.
fn run(inside: &mut Inside, arguments: &Value) -> Value {
    let path = arguments["path"].as_str().expect("a program");
    let words = arguments["arg"].as_array().expect("its arguments");
    let child = std::process::Command::new(path)
        .args(words.iter().filter_map(Value::as_str))
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let pid = child.id();
    inside.programs.insert(pid, child);
    json!({"pid": pid})
}

/// A guest agent with one file, of which it gives and takes a little at a time.
pub(super) async fn ask_guest_agent(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Json(ask): Json<AskGuestAgent>,
) -> Reply<Value> {
    const PART: usize = 1000;
    let mut inside = inside.lock().expect("lock");
    if !inside.vms.contains_key(&vm) {
        return Err(no_vm());
    }
    match ask.execute.as_str() {
        "guest-fsfreeze-freeze" if inside.still > 0 => {
            return Err(Problem::conflict("ask the guest", "it is frozen").into());
        }
        "guest-fsfreeze-freeze" => {
            inside.still = 2;
            return Ok(Json(json!(2)));
        }
        "guest-exec" => return Ok(Json(run(&mut inside, &ask.arguments))),
        "guest-exec-status" => {
            let pid = ask.arguments["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
            let program = pid.and_then(|pid| inside.programs.get_mut(&pid));
            let program = program.ok_or_else(|| Problem::conflict("ask the guest", "no PID"))?;
            let ended = program.try_wait().expect("its state");
            return Ok(Json(
                json!({"exited": ended.is_some(), "exitcode": ended.and_then(|e| e.code())}),
            ));
        }
        "guest-fsfreeze-thaw" => return Ok(Json(json!(std::mem::take(&mut inside.still)))),
        _ => {}
    }
    let file = &mut inside.guest_file;
    let asked = |name: &str| ask.arguments[name].as_str().unwrap_or_default().to_owned();
    Ok(Json(match ask.execute.as_str() {
        "guest-file-open" => {
            if asked("mode") == "w" {
                file.content.clear();
            }
            file.at = 0;
            file.open += 1;
            json!(1000)
        }
        "guest-file-read" => {
            let end = file.content.len().min(file.at + PART);
            let part = &file.content[file.at..end];
            let eof = end == file.content.len();
            file.at = end;
            json!({"buf-b64": BASE64_STANDARD.encode(part), "eof": eof, "count": part.len()})
        }
        "guest-file-write" => {
            let part = BASE64_STANDARD.decode(asked("buf-b64")).expect("base64");
            let count = part.len().min(PART);
            file.content.extend(&part[..count]);
            json!({"count": count, "eof": false})
        }
        "guest-file-close" => {
            file.open -= 1;
            json!({})
        }
        _ => json!({}),
    }))
}

/// Its guests send back what is typed.
pub(super) async fn attach_console(request: Request) -> Result<Response, Failure> {
    echo(request)
}

/// Their screens are all green (RFC 6143).
pub(super) async fn view_screen(request: Request) -> Result<Response, Failure> {
    let (answer, begun) = perigee_http::accept(request)?;
    let (mut ours, mut viewer) = tokio::io::duplex(1 << 10);
    tokio::spawn(async move { begun.carry(&mut ours).await });
    tokio::spawn(async move {
        viewer.write_all(b"RFB 003.008\n").await?;
        viewer.read_exact(&mut [0; 12]).await?;
        // It asks for no password; the viewer chooses that, and is let in.
        viewer.write_all(&[1, 1]).await?;
        viewer.read_exact(&mut [0; 1]).await?;
        viewer.write_all(&[0; 4]).await?;
        viewer.read_exact(&mut [0; 1]).await?;
        let [width, height] = [64_u16, 48];
        viewer.write_all(&[width.to_be_bytes(), height.to_be_bytes()].concat()).await?;
        // 32 bits for each pixel, 8 for each of red, green and blue; and a name.
        let format = [32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 0, 8, 16, 0, 0, 0];
        viewer.write_all(&[&format[..], &4_u32.to_be_bytes(), b"fake"].concat()).await?;
        // What the viewer wants next is said first.
        viewer.read_exact(&mut [0; 1]).await?;
        let area = [0, 0, width, height].map(u16::to_be_bytes).concat();
        viewer.write_all(&[&[0, 0, 0, 1][..], &area, &[0; 4]].concat()).await?;
        viewer.write_all(&[0, 255, 0, 0].repeat(64 * 48)).await?;
        let mut rest = [0; 256];
        while viewer.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    });
    Ok(answer)
}

fn echo(request: Request) -> Result<Response, Failure> {
    let (answer, begun) = perigee_http::accept(request)?;
    let (mut ours, theirs) = tokio::io::duplex(1 << 10);
    tokio::spawn(async move { begun.carry(&mut ours).await });
    tokio::spawn(async move {
        let (mut reads, mut writes) = tokio::io::split(theirs);
        tokio::io::copy(&mut reads, &mut writes).await
    });
    Ok(answer)
}

pub(super) async fn vms(State(inside): Shared) -> Reply<Vec<VmReport>> {
    let mut inside = inside.lock().expect("lock");
    inside.vms_listed += 1;
    Ok(Json(inside.vms.values().map(|vm| vm.report.clone()).collect()))
}

/// As a real agent: an answer comes when something changed, and what did not is left out.
pub(super) async fn changes(
    State(inside): Shared,
    Query(query): Query<BTreeMap<String, u64>>,
) -> Reply<VmChanges> {
    let (after, wait) = (query["after"], Duration::from_millis(query["wait_ms"]));
    let begun = Instant::now();
    loop {
        let changes = inside.lock().expect("lock").unless_down()?.changes(after);
        if changes.revision > after || begun.elapsed() >= wait {
            return Ok(Json(changes));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

impl Inside {
    pub(super) fn unless_down(&mut self) -> Result<&mut Self, Problem> {
        match self.down {
            true => Err(Problem::unavailable("answer", "this host is down")),
            false => Ok(self),
        }
    }

    pub(super) fn boot_id(&self) -> String {
        format!("boot-{}", self.reboots)
    }

    fn numbered(&mut self, vm: &VmId) -> Option<VmReport> {
        self.changes(0);
        let revision = self.told.get(vm)?.0;
        Some(VmReport { revision, ..self.vms.get(vm)?.report.clone() })
    }

    fn changes(&mut self, after: u64) -> VmChanges {
        let present: Vec<VmId> = self.vms.keys().cloned().collect();
        for vm in &present {
            let report = &self.vms[vm].report;
            let phase = report.migration.as_ref().map(|migration| migration.phase);
            let news = format!("{:?} {:?} {}", report.status, phase, report.last_seq);
            if self.told.get(vm).is_none_or(|(_, told)| *told != news) {
                self.revision += 1;
                self.told.insert(vm.clone(), (self.revision, news));
            }
        }
        let gone = self.told.len();
        self.told.retain(|vm, _| present.contains(vm));
        self.revision += u64::from(self.told.len() < gone);
        let changed = present.iter().filter(|vm| self.told[*vm].0 > after);
        let changed = changed.map(|vm| self.vms[vm].report.clone()).collect();
        VmChanges { revision: self.revision, present, changed }
    }
}

/// As a real agent: with a wait, the answer comes when the VM has news.
pub(super) async fn vm(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Query(query): Query<BTreeMap<String, u64>>,
) -> Reply<VmReport> {
    let of = |name: &str| query.get(name).copied().unwrap_or(0);
    let (after, wait) = (of("after"), Duration::from_millis(of("wait_ms")));
    let begun = Instant::now();
    loop {
        let report = inside.lock().expect("lock").unless_down()?.numbered(&vm).ok_or_else(no_vm)?;
        if report.revision > after || begun.elapsed() >= wait {
            return Ok(Json(report));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(super) async fn put_vm(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Json(spec): Json<VmSpec>,
) -> Reply<VmReport> {
    let mut inside = inside.lock().expect("lock");
    let decided = inside.starts_of(&vm).on_start(spec.start);
    if let OnStart::EndFirst(older) = decided.map_err(|e| e.problem("start the VM"))? {
        inside.delete(&vm, older)?;
    }
    if let Some(present) = inside.vms.get(&vm) {
        assert_eq!(present.report.spec, spec, "the same start is asked for with another spec");
        if inside.loses_answers {
            return Err(Problem::unavailable("start the VM", "the answer is lost").into());
        }
        return Ok(Json(present.report.clone()));
    }
    if inside.refuses_cards && spec.network == perigee_model::vm::VmNetwork::User {
        return Err(Problem::unsupported("connect the card", "passt ended").into());
    }
    if inside.fails_starts {
        inside.failed_starts += 1;
        return Err(Problem::internal("start the VM", "QEMU ended, and said nothing").into());
    }
    if inside.starts_no_vm {
        return Err(Problem::unsupported("start the VM", "QEMU ended: invalid accelerator").into());
    }
    for disk in &spec.disks {
        let here = inside.volumes.get(&disk.volume);
        assert!(
            here.is_some() || inside.attachments.contains_key(&disk.volume),
            "{} is not reachable on the VM's host",
            disk.volume
        );
        let own = here.filter(|_| spec.arrives_by.is_none() && !disk.read_only);
        assert!(own.is_none_or(|v| v.info.epoch == disk.epoch), "{} has an old epoch", disk.volume);
    }
    let report = VmReport { boot_id: inside.boot_id(), ..report_of(spec) };
    *inside.starts.entry(vm.clone()).or_default() += 1;
    inside.vms.insert(vm, FakeVm::new(report.clone()));
    if inside.loses_answers {
        return Err(Problem::unavailable("start the VM", "the answer is lost").into());
    }
    Ok(Json(report))
}

/// A VM that has just started.
pub fn report_of(spec: VmSpec) -> VmReport {
    VmReport {
        status: if spec.arrives_by.is_some() { VmStatus::Incoming } else { VmStatus::Running },
        reason: String::new(),
        boot_id: String::new(),
        qemu_pid: 1,
        uptime_ms: 0,
        vcpu_ms: 0,
        load: VmLoad::default(),
        incoming_uri: spec.arrives_by.as_ref().map(|_| "tcp:127.0.0.1:1".to_owned()),
        migration: None,
        resume_us: None,
        last_seq: 0,
        waits: Vec::new(),
        revision: 0,
        io: spec.disks.iter().map(|_| IoStats::default()).collect(),
        sent: Vec::new(),
        spec,
    }
}

pub(super) async fn delete_vm(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Query(start): Query<VmStart>,
) -> Reply<()> {
    inside.lock().expect("lock").delete(&vm, start)?;
    Ok(Json(()))
}

impl Inside {
    fn starts_of(&self, vm: &VmId) -> Starts {
        let here = self.vms.get(vm).map(|vm| vm.report.spec.start);
        Starts { here, ended: self.ended.get(vm).copied() }
    }

    fn delete(&mut self, vm: &VmId, start: VmStart) -> Result<(), Problem> {
        let (act, ended) = self.starts_of(vm).on_delete(start);
        self.ended.insert(vm.clone(), ended);
        match act {
            OnDelete::Nothing => {}
            OnDelete::End => drop(self.vms.remove(vm)),
            OnDelete::Leave(refused) => return Err(Problem::conflict("delete the VM", refused)),
        }
        Ok(())
    }
}

pub(super) async fn events(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Query(query): Query<BTreeMap<String, u64>>,
) -> Reply<Vec<GuestEvent>> {
    let inside = inside.lock().expect("lock");
    let vm = inside.vms.get(&vm).ok_or_else(no_vm)?;
    let new = vm.events.iter().filter(|m| m.seq > query["after"]).take(EVENTS_MAX);
    Ok(Json(new.map(|message| GuestEvent { age_ms: 0, message: message.clone() }).collect()))
}

pub(super) async fn migrate(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Json(order): Json<MigrateOut>,
) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    if std::mem::take(&mut inside.forbids_migration_once) {
        return Err(Problem::forbidden("migrate", "its certificate was replaced").into());
    }
    if inside.refuse_migration {
        return Err(Problem::invalid("migrate", "this QEMU cannot").into());
    }
    let vm = inside.vms.get_mut(&vm).ok_or_else(no_vm)?;
    let last = vm.report.migration.as_ref().map(|last| (last.number, last.phase));
    if let Err(not_begun) = may_begin(vm.report.status, last, order.number) {
        return Err(Problem::conflict("can't migrate the VM", not_begun).into());
    }
    let is_other = |before: &MigrateOut| before.migration != order.migration;
    assert!(vm.asked.as_ref().is_none_or(is_other), "the source is asked once");
    vm.report.migration =
        Some(MigrationReport::new(order.migration.clone(), order.number, MigrationPhase::Copying));
    vm.asked = Some(order);
    Ok(Json(()))
}

/// The source's QEMU stops sending at once; a migration that has not begun never will.
pub(super) async fn cancel_migration(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Json(asked): Json<CancelMigration>,
) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    let vm = inside.vms.get_mut(&vm).ok_or_else(no_vm)?;
    let mut report = vm.report.migration.take().unwrap_or_else(|| {
        MigrationReport::new(asked.migration, asked.number, MigrationPhase::Cancelled)
    });
    report.phase = MigrationPhase::Cancelled;
    report.reason = asked.reason;
    vm.report.migration = Some(report);
    Ok(Json(()))
}

pub(super) async fn end_unless_ran(
    State(inside): Shared,
    Path(vm): Path<VmId>,
    Json(asked): Json<EndUnlessRan>,
) -> Reply<Fate> {
    let mut inside = inside.lock().expect("lock");
    let Some(present) = inside.vms.get(&vm) else { return Ok(Json(Fate::NotKnown)) };
    let arrival = match present.report.status {
        VmStatus::Incoming => Arrival::Waits,
        _ => Arrival::Ran,
    };
    let kept = present.report.spec.arrives_by.as_ref().map(|by| (by, arrival));
    let fate = fate(kept, &asked.migration);
    if fate == Fate::DidNotRun {
        let start = present.report.spec.start;
        inside.delete(&vm, start)?;
    }
    Ok(Json(fate))
}

pub(super) async fn end_command(
    State(inside): Shared,
    Path(vm): Path<VmId>,
) -> Result<StatusCode, Failure> {
    let mut inside = inside.lock().expect("lock");
    let Some(guest) = inside.vms.get_mut(&vm) else { return Err(no_vm()) };
    guest.is_to_end = true;
    inside.ended_commands.insert(vm);
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn begin_command(
    State(inside): Shared,
    Path(vm): Path<VmId>,
) -> Result<StatusCode, Failure> {
    let mut inside = inside.lock().expect("lock");
    if inside.lets_nothing_begin {
        return Err(Problem::not_found("POST begin-command", "there is no such route").into());
    }
    inside.vms.get_mut(&vm).ok_or_else(no_vm)?.may_begin = true;
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn sync(State(inside): Shared, Path(vm): Path<VmId>) -> Reply<()> {
    let mut inside = inside.lock().expect("lock");
    if !inside.vms.contains_key(&vm) {
        return Err(no_vm());
    }
    inside.synced += 1;
    Ok(Json(()))
}
