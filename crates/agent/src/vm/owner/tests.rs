use std::path::{Path, PathBuf};
use std::process::Child;

use perigee_http::{Json, Listen, Network};
use perigee_model::vm::{
    AskGuestAgent, CancelMigration, ChangeVm, Disk, MigrateOut, MigrationPhase, VmSpec,
};
use perigee_model::volume::{VmSocket, VmSocketAt};
use perigee_model::waiting::WaitsFor;
use perigee_model::{DiskRole, Epoch, HostId, MigrationId, ProblemKind, SiteId, VmId, VmStart};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use super::*;
use crate::Config;
use crate::changes::Changes;
use crate::files::VmDir;
use crate::guest::GuestLog;
use crate::process::Process;
use crate::qmp::Qmp;
use crate::vm::since::Since;

/// A process that stands for a QEMU without a monitor.
struct Qemu(Child);

impl Qemu {
    fn start() -> Self {
        Self(std::process::Command::new("sleep").arg("600").spawn().unwrap())
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o711))
        .tempdir()
        .unwrap()
}

async fn owner(dir: &Path, qemu: &Qemu) -> Owner {
    owner_beside(dir, qemu, "http://127.0.0.1:1".into()).await
}

async fn owner_beside(dir: &Path, qemu: &Qemu, volume_control: String) -> Owner {
    let config = Config {
        host: HostId::new("a").unwrap(),
        site: SiteId::new("here").unwrap(),
        listen: vec![Listen::Tcp("127.0.0.1:1".into())],
        state: dir.to_path_buf(),
        vm_uids: crate::VmUids::default(),
        guests_reach: Vec::new(),
        outside_addresses: Vec::new(),
        bridges: Vec::new(),
        volume_control,
        volume_url: "http://127.0.0.1:1".into(),
        nbd_addr: "127.0.0.1:1".into(),
        agent_url: "http://127.0.0.1:1".into(),
        controller: None,
        probe_kernel: Some(PathBuf::from("/dev/null")),
        boot_id: dir.join("boot-id"),
        network: Network::Plain,
        leased: None,
    };
    let spec = VmSpec {
        vm: VmId::new("vm-1").unwrap(),
        start: VmStart::default(),
        cpus: 1,
        memory_bytes: 64 << 20,
        disks: Vec::new(),
        arrives_by: None,
        arrives_from: None,
        arrives_compressed: false,
        arrives_tunnelled: false,
        locks_memory: false,
        hides_output: false,
        network: Default::default(),
        machine: Default::default(),
    };
    let vm_dir = VmDir::new(&config.state, &spec.vm);
    std::fs::create_dir_all(vm_dir.run()).unwrap();
    let log = GuestLog::open(&vm_dir.events(), false).unwrap();
    let changes = Arc::new(Changes::new());
    let (vm, requests) = Vm::new(spec, vm_dir, Since::default(), log, VmStatus::Running, &changes);
    vm.observed(|seen| seen.process = Some(Process::of_pid(qemu.0.id()).unwrap()));
    Owner::new(Arc::new(Host::find_out(&config).await.unwrap()), vm, requests)
}

#[tokio::test]
async fn a_change_that_means_another_run_of_the_vm_is_refused() {
    let dir = directory();
    let qemu = Qemu::start();
    let owner = owner(dir.path(), &qemu).await;
    let other = VmStart { run: 1, ..VmStart::default() };
    let refused = owner.vm.change(other, ChangeVm::Memory { bytes: 1 }).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
}

/// A guest that answers no question but the second one to thaw. Returns what it is asked.
fn busy_guest(socket: UnixListener) -> mpsc::UnboundedReceiver<String> {
    let (asked, questions) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut thaws = 0;
        loop {
            let (stream, _) = socket.accept().await.unwrap();
            let (reader, mut writer) = stream.into_split();
            let mut lines = tokio::io::BufReader::new(reader).split(b'\n');
            let sync = lines.next_segment().await.unwrap().unwrap();
            let sync: Value = serde_json::from_slice(&sync[1..]).unwrap();
            let id = &sync["arguments"]["id"];
            writer.write_all(b"\xff").await.unwrap();
            writer.write_all(format!("{{\"return\": {id}}}\n").as_bytes()).await.unwrap();
            let question = lines.next_segment().await.unwrap().unwrap();
            let question: Value = serde_json::from_slice(&question).unwrap();
            let question = question["execute"].as_str().unwrap().to_owned();
            thaws += u32::from(question.ends_with("thaw"));
            asked.send(question).unwrap();
            if thaws == 2 {
                writer.write_all(b"{\"return\": 1}\n").await.unwrap();
            }
            // Until the other side has had enough.
            assert!(lines.next_segment().await.unwrap().is_none());
        }
    });
    questions
}

#[tokio::test]
async fn a_busy_guest_whose_filesystems_stand_still_is_asked_to_thaw_them_until_it_answers() {
    let dir = directory();
    let qemu = Qemu::start();
    let owner = owner(dir.path(), &qemu).await;
    let mut questions = busy_guest(UnixListener::bind(owner.vm.dir.guest_agent()).unwrap());
    let freeze = AskGuestAgent { execute: "guest-fsfreeze-freeze".into(), arguments: json!({}) };
    let late = owner.vm.ask_guest_agent(freeze).await.unwrap_err();
    assert_eq!(late.kind, ProblemKind::Unavailable, "{late}");
    for question in ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw", "guest-fsfreeze-thaw"] {
        let asked = tokio::time::timeout(Duration::from_secs(120), questions.recv()).await;
        assert_eq!(asked.expect("it is asked").unwrap(), question);
    }
    let more = tokio::time::timeout(Duration::from_secs(5), questions.recv()).await;
    assert!(more.is_err(), "it has answered: {more:?}");
}

#[tokio::test]
async fn filesystems_go_on_though_who_has_asked_them_to_stand_still_went_away() {
    let dir = directory();
    let qemu = Qemu::start();
    let owner = owner(dir.path(), &qemu).await;
    let mut questions = busy_guest(UnixListener::bind(owner.vm.dir.guest_agent()).unwrap());
    let freeze = AskGuestAgent { execute: "guest-fsfreeze-freeze".into(), arguments: json!({}) };
    let asked = owner.vm.ask_guest_agent(freeze);
    tokio::time::timeout(Duration::from_millis(50), asked).await.unwrap_err();
    for question in ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"] {
        let asked = tokio::time::timeout(Duration::from_secs(120), questions.recv()).await;
        assert_eq!(asked.expect("it is asked").unwrap(), question);
    }
}

fn order() -> MigrateOut {
    MigrateOut {
        migration: MigrationId::new("m-1").unwrap(),
        number: 1,
        uri: "tcp:127.0.0.1:1".into(),
        destination_agent_url: "http://127.0.0.1:2".into(),
        destination: None,
        epochs: Vec::new(),
        downtime_limit_ms: 100,
        compressed: false,
        max_bytes_per_s: None,
        throttle_percent: None,
        grant: None,
    }
}

#[tokio::test]
async fn a_migration_whose_task_has_panicked_continues() {
    let dir = directory();
    let qemu = Qemu::start();
    let mut owner = owner(dir.path(), &qemu).await;
    owner.migrate(order()).unwrap();
    // An aborted task ends like one that panics.
    owner.migration.as_ref().unwrap().task.abort();
    assert!(next_request_of_migration(&mut owner.migration).await.is_none());
    owner.migration = None;
    owner.on_tick().await;
    assert!(owner.migration.is_some());
    assert!(
        owner
            .vm
            .observed(|seen| seen.migration.clone())
            .is_some_and(|m| m.phase == MigrationPhase::Setup)
    );
    owner.migration.take().unwrap().task.abort();
}

/// The order to send the VM to a destination that waits for it.
async fn order_to_one_that_waits(vm: &Vm) -> MigrateOut {
    let mut there = vm.report("boot", &[]);
    there.spec.arrives_by = Some(order().migration);
    there.incoming_uri = Some(order().uri);
    let destination = axum::routing::get(async || Json(there));
    let destination_agent_url = serve(axum::Router::new().route("/v1/vms/{vm}", destination)).await;
    MigrateOut { destination_agent_url, ..order() }
}

/// A monitor of a QEMU that sends its VM until it is told to stop.
async fn serve_sending(listener: UnixListener) {
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    let mut lines = tokio::io::BufReader::new(reader).lines();
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    let mut status = "active";
    while let Some(line) = lines.next_line().await.unwrap() {
        let request: Value = serde_json::from_str(&line).unwrap();
        let answer = match request["execute"].as_str().unwrap() {
            "migrate_cancel" => {
                status = "cancelled";
                json!({})
            }
            "query-migrate" => json!({"status": status}),
            "query-status" => json!({"status": "running"}),
            _ => json!({}),
        };
        let answer = json!({"return": answer, "id": request["id"]});
        writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
    }
}

/// A monitor of a QEMU that sends its VM, says once how far it is, and then nothing any more.
async fn serve_silent(listener: UnixListener) {
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    let mut lines = tokio::io::BufReader::new(reader).lines();
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    let mut looks = 0;
    while let Some(line) = lines.next_line().await.unwrap() {
        let request: Value = serde_json::from_str(&line).unwrap();
        let ram = json!({"transferred": 1_u64 << 30, "page-size": 4096});
        let answer = match request["execute"].as_str().unwrap() {
            "query-migrate" if looks > 0 => return,
            "query-migrate" => {
                looks += 1;
                json!({"status": "active", "total-time": 1000, "ram": ram})
            }
            "query-status" => json!({"status": "running"}),
            _ => json!({}),
        };
        let answer = json!({"return": answer, "id": request["id"]});
        writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
    }
}

/// A VM that is being sent, whose monitor is served so; and what calls that off for this reason.
async fn is_sent<F: Future<Output = ()> + Send + 'static>(
    dir: &Path,
    qemu: &Qemu,
    serve: fn(UnixListener) -> F,
    reason: &str,
) -> (Arc<Vm>, CancelMigration) {
    let mut owner = owner(dir, qemu).await;
    let path = dir.join("monitor.sock");
    tokio::spawn(serve(UnixListener::bind(&path).unwrap()));
    let (qmp, events) = Qmp::connect(&path).await.unwrap();
    owner.events = Some(events);
    let vm = Arc::clone(&owner.vm);
    vm.observed(|seen| seen.qmp = Some(qmp));
    let order = order_to_one_that_waits(&vm).await;
    let MigrateOut { migration, number, .. } = order.clone();
    let cancel = CancelMigration { migration, number, reason: reason.to_owned() };
    tokio::spawn(owner.run());
    let asked = vm.ask(|answer| Request::Migrate(Box::new(order), answer)).await;
    asked.expect("an owner").expect("it begins");
    (vm, cancel)
}

/// A cancel was heard only when QEMU had answered again, and nobody was told why the move stood still.
#[tokio::test]
async fn a_cancel_is_heard_while_qemu_does_not_answer() {
    let (dir, qemu) = (directory(), Qemu::start());
    let (vm, cancel) = is_sent(dir.path(), &qemu, serve_silent, "somebody wants it to stay").await;
    let reason = cancel.reason.clone();
    let until = async |what: &str, is: &dyn Fn() -> bool| {
        let begun = tokio::time::Instant::now();
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(120), "waited 120 s for {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    until("QEMU to be silent", &|| vm.observed(|seen| seen.qmp.is_none())).await;
    let asked = vm.ask(|answer| Request::CancelMigration(cancel, answer)).await;
    asked.expect("an owner").expect("it is taken down");
    let said = || vm.observed(|seen| seen.migration.clone()).expect("it has begun");
    until("the cancel to be heard", &|| said().reason.starts_with(&reason)).await;
    until("the silence to be told", &|| said().reason.contains("QEMU has not answered")).await;
    assert!(!said().phase.is_final(), "QEMU may still send: {:?}", said());
}

/// Whatever the reason was, people were told "cancelled".
#[tokio::test]
async fn a_migration_that_is_called_off_says_why() {
    let (dir, qemu) = (directory(), Qemu::start());
    let (vm, cancel) =
        is_sent(dir.path(), &qemu, serve_sending, "it took longer than 15 minutes").await;
    let reason = cancel.reason.clone();
    let asked = vm.ask(|answer| Request::CancelMigration(cancel, answer)).await;
    asked.expect("an owner").expect("it ends");
    let begun = tokio::time::Instant::now();
    let ended = loop {
        let seen = vm.observed(|seen| seen.migration.clone()).expect("it has begun");
        if seen.phase.is_final() {
            break seen;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "it does not end: {seen:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!((ended.phase, ended.reason), (MigrationPhase::Cancelled, reason));
}

/// A monitor of a QEMU that stops its guest for an error of a disk, and then flushes its disks for two minutes. Says when it
/// was told to let the guest run.
async fn serve_flushing(listener: UnixListener, resumed: mpsc::UnboundedSender<()>) {
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    let mut lines = tokio::io::BufReader::new(reader).lines();
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    let mut status = "io-error";
    let error =
        json!({"event": "BLOCK_IO_ERROR", "data": {"action": "stop", "operation": "write"}});
    let mut events = vec![error, json!({"event": "STOP"})];
    while let Some(line) = lines.next_line().await.unwrap() {
        let request: Value = serde_json::from_str(&line).unwrap();
        let answer = match request["execute"].as_str().unwrap() {
            "query-status" => {
                let flushes = status == "io-error" && events.is_empty();
                tokio::time::sleep(Duration::from_secs(if flushes { 120 } else { 0 })).await;
                json!({"status": status})
            }
            "cont" => {
                status = "running";
                resumed.send(()).unwrap();
                json!({})
            }
            _ => json!({}),
        };
        let answer = json!({"return": answer, "id": request["id"]});
        let said = std::iter::once(answer).chain(std::mem::take(&mut events));
        let said: String = said.map(|line| format!("{line}\n")).collect();
        writer.write_all(said.as_bytes()).await.unwrap();
    }
}

/// Its first question was given up after 30 s, and nobody asked QEMU again: the guest stood still until somebody started the
/// agent anew.
#[tokio::test]
async fn a_vm_goes_on_though_qemu_flushes_for_longer_than_a_command_may_take() {
    let (dir, qemu) = (directory(), Qemu::start());
    let mut owner = owner(dir.path(), &qemu).await;
    let path = dir.path().join("monitor.sock");
    let (resumed_tx, mut resumed) = mpsc::unbounded_channel();
    tokio::spawn(serve_flushing(UnixListener::bind(&path).unwrap(), resumed_tx));
    let (qmp, events) = Qmp::connect(&path).await.unwrap();
    owner.events = Some(events);
    let vm = Arc::clone(&owner.vm);
    vm.observed(|seen| seen.qmp = Some(qmp));
    // From now on time passes as soon as all wait for it.
    tokio::time::pause();
    tokio::spawn(owner.run());
    tokio::time::sleep(Duration::from_secs(60)).await;
    let told = vm.report("boot", &[]).waits;
    assert_eq!(told.first().map(|waiting| &waiting.waits_for), Some(&WaitsFor::Qemu), "{told:?}");
    let resumed = tokio::time::timeout(Duration::from_secs(300), resumed.recv()).await;
    resumed.expect("the guest is let run").expect("its QEMU is there");
    tokio::time::sleep(Duration::from_secs(10)).await;
    let report = vm.report("boot", &[]);
    assert_eq!((report.status, report.waits), (VmStatus::Running, Vec::new()));
}

/// A monitor of a QEMU that has the node `data0`, which can't be removed before the `refused`-th try. `has_device`: its guest has it.
async fn serve_data0(listener: UnixListener, has_device: bool, mut refused: u32) {
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    let mut lines = tokio::io::BufReader::new(reader).lines();
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    while let Some(line) = lines.next_line().await.unwrap() {
        let request: Value = serde_json::from_str(&line).unwrap();
        let id = &request["id"];
        let answer = match request["execute"].as_str().unwrap() {
            "blockdev-del" if refused > 0 => {
                refused -= u32::from(request["arguments"]["node-name"] == "data0");
                json!({"error": {"desc": "Node is in use"}, "id": id})
            }
            "query-named-block-nodes" if refused > 0 => {
                json!({"return": [{"node-name": "data0"}], "id": id})
            }
            "query-block" if !has_device => json!({"return": [], "id": id}),
            "query-named-block-nodes" => json!({"return": [], "id": id}),
            "query-block" => {
                let inserted = json!({"node-name": "data0", "image": {"virtual-size": 1}});
                let qdev = "/machine/peripheral/disk-data0/virtio-backend";
                json!({"return": [{"qdev": qdev, "inserted": inserted}], "id": id})
            }
            _ => json!({"return": {}, "id": id}),
        };
        writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
    }
}

/// A volume server that has a socket for each VM.
async fn volume_server() -> String {
    let at = VmSocketAt { path: PathBuf::from("/dev/null") };
    let socket = axum::routing::put(async |_: Json<VmSocket>| Json(at));
    serve(axum::Router::new().route("/v1/vms/{vm}/socket", socket)).await
}

async fn serve(router: axum::Router) -> String {
    let port = perigee_http::unused_port();
    let listen = [Listen::Tcp(format!("127.0.0.1:{port}"))];
    tokio::spawn(async move { perigee_http::serve(router, &listen, &Network::Plain).await });
    let begun = tokio::time::Instant::now();
    while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        assert!(begun.elapsed() < Duration::from_secs(120), "it does not listen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    format!("http://127.0.0.1:{port}")
}

fn further_disk() -> (DiskRole, Disk) {
    let role = DiskRole::Data(0);
    let volume = "further".parse().unwrap();
    (role, Disk { role, volume, epoch: Epoch(1), read_only: false })
}

/// QEMU would stand still until it has a session again.
#[tokio::test]
async fn a_disk_is_not_closed_while_the_volume_server_is_away() {
    let dir = directory();
    let qemu = Qemu::start();
    let owner = owner(dir.path(), &qemu).await;
    let (role, disk) = further_disk();
    owner.vm.note_change(|since| since.has_come(disk.clone())).unwrap();
    let path = dir.path().join("monitor.sock");
    let server = tokio::spawn(serve_data0(UnixListener::bind(&path).unwrap(), false, 0));
    let (qmp, _events) = Qmp::connect(&path).await.unwrap();
    let refused = owner.forget_disk(&qmp, role).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Unavailable, "{refused}");
    assert_eq!(owner.vm.now().disks, [disk]);
    server.abort();
}

#[tokio::test]
async fn a_long_log_of_a_vm_s_network_is_cut() {
    let dir = directory();
    let qemu = Qemu::start();
    let mut owner = owner(dir.path(), &qemu).await;
    let log = owner.vm.dir.network_log();
    std::fs::write(&log, vec![b'x'; 6 << 20]).unwrap();
    owner.on_tick().await;
    let kept = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&log).unwrap()) * 512;
    assert!(kept < 6 << 20, "{kept} bytes");
}

#[tokio::test]
async fn a_disk_whose_node_is_in_use_is_not_taken_for_gone() {
    let dir = directory();
    let qemu = Qemu::start();
    let mut owner = owner_beside(dir.path(), &qemu, volume_server().await).await;
    let (role, disk) = further_disk();
    owner.vm.note_change(|since| since.has_come(disk.clone())).unwrap();
    let path = dir.path().join("monitor.sock");
    for (has_device, why) in [(true, "its guest has it"), (false, "has not closed it")] {
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(serve_data0(listener, has_device, u32::MAX));
        let (qmp, _events) = Qmp::connect(&path).await.unwrap();
        let refused = owner.forget_disk(&qmp, role).await.unwrap_err();
        assert!(refused.why.contains(why), "{refused}");
        assert_eq!(owner.vm.now().disks, std::slice::from_ref(&disk), "its export stays");
        server.abort();
        std::fs::remove_file(&path).unwrap();
    }
    // The device has gone, and QEMU has it for a moment longer.
    let server = tokio::spawn(serve_data0(UnixListener::bind(&path).unwrap(), false, 3));
    let (qmp, _events) = Qmp::connect(&path).await.unwrap();
    owner.forget_disk(&qmp, role).await.unwrap();
    assert_eq!(owner.vm.now().disks, []);
    server.abort();
    std::fs::remove_file(&path).unwrap();
    // It may take QEMU longer than anybody waits.
    owner.vm.note_change(|since| since.has_come(disk.clone())).unwrap();
    let server = tokio::spawn(serve_data0(UnixListener::bind(&path).unwrap(), false, 2));
    let (qmp, _events) = Qmp::connect(&path).await.unwrap();
    owner.leaving.insert(role);
    owner.forget_leaving(&qmp).await;
    assert_eq!((owner.leaving.len(), owner.vm.now().disks), (1, vec![disk]));
    owner.forget_leaving(&qmp).await;
    assert_eq!((owner.leaving.len(), owner.vm.now().disks), (0, vec![]));
    server.abort();
}
