//! Who may use which socket of the server, and for what.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::volume::{
    CreateVolume, EpochChange, EpochIssued, VmSocket, VmSocketAt, VolumeInfo, VolumeSource,
};
use perigee_model::{Epoch, ProblemKind};

use crate::server::{MIB, Server, assert_io, said, try_run};

/// Nobody has these.
const VM_UID: u32 = 1_777_100_001;
const OTHER_UID: u32 = 1_777_100_002;

fn is_root() -> bool {
    std::fs::metadata("/proc/self").expect("this process").uid() == 0
}

/// A server whose sockets other users can reach if the sockets let them.
async fn reachable() -> Server {
    let server = Server::start().await;
    for dir in server.socket().ancestors().skip(1).take(2) {
        std::fs::set_permissions(dir, PermissionsExt::from_mode(0o711)).expect("a mode");
    }
    server
}

fn vm_socket(uid: u32, exports: &[String]) -> VmSocket {
    VmSocket { vm: "vm-1".parse().expect("a name"), uid, exports: exports.to_vec() }
}

async fn open(server: &Server, socket: &VmSocket) -> VmSocketAt {
    let path = format!("/v1/vms/{}/socket", socket.vm);
    server.control.put(&path, socket).await.expect("a socket")
}

fn qemu_io_as(uid: u32, socket: &Path, export: &str, command: &str) -> Output {
    let (uid, uri) = (uid.to_string(), format!("nbd+unix:///{export}?socket={}", socket.display()));
    let user = ["setpriv", "--reuid", &uid, "--regid", &uid, "--clear-groups"];
    try_run(&[&user[..], &["qemu-io", "-f", "raw", "-c", command, &uri]].concat())
}

fn assert_refused(output: &Output, word: &str) {
    assert!(!output.status.success() && said(output).contains(word), "{word}: {output:?}");
}

async fn raise(server: &Server, volume: &str) -> Epoch {
    let one = server.control.get::<VolumeInfo>(&format!("/v1/volumes/{volume}")).await;
    let from = one.expect("a volume").epoch;
    let path = format!("/v1/volumes/{volume}/epoch");
    let issued = server.control.post::<EpochIssued>(&format!("{path}/issue"), &()).await;
    let to = issued.expect("an epoch").epoch;
    let changed = server.control.post::<VolumeInfo>(&path, &EpochChange { from, to }).await;
    changed.expect("the change").epoch
}

#[tokio::test(flavor = "multi_thread")]
async fn other_users_do_not_reach_the_server_s_own_socket() {
    if !is_root() {
        return;
    }
    let server = reachable().await;
    server.create("data", MIB).await;
    assert_refused(
        &qemu_io_as(OTHER_UID, &server.socket(), "data", "read 0 4k"),
        "Permission denied",
    );
    assert_io(&server.qemu_io("data", &["write 0 4k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_s_socket_serves_only_this_vm_and_only_its_sessions() {
    if !is_root() {
        return;
    }
    let mut server = reachable().await;
    let epoch = server.create("data", MIB).await.epoch;
    let other = server.create("other", MIB).await.epoch;
    let own = format!("data@{epoch}");
    let at = open(&server, &vm_socket(VM_UID, std::slice::from_ref(&own))).await.path;
    assert_io(&qemu_io_as(VM_UID, &at, &own, "write -P 7 0 4k"));
    assert_refused(&qemu_io_as(OTHER_UID, &at, &own, "read 0 4k"), "Permission denied");
    // The permissions of the file are not all that protects it.
    std::fs::set_permissions(&at, PermissionsExt::from_mode(0o666)).expect("a mode");
    assert!(!qemu_io_as(OTHER_UID, &at, &own, "read 0 4k").status.success());
    let next = epoch.next().expect("an epoch");
    for name in ["data", "other", &format!("other@{other}"), &format!("data@{next}")] {
        assert_refused(&qemu_io_as(VM_UID, &at, name, "read 0 4k"), &own);
    }
    server.kill();
    server.start_process().await;
    assert_io(&qemu_io_as(VM_UID, &at, &own, "read -P 7 0 4k"));
    // A later VM with this user ends the socket of the earlier one.
    let later = VmSocket { vm: "vm-2".parse().expect("a name"), ..vm_socket(VM_UID, &[]) };
    open(&server, &later).await;
    assert!(!at.exists());
    let end = format!("/v1/vms/vm-2/socket?uid={OTHER_UID}&exports=");
    server.control.delete(&end).await.expect("of another VM: nothing to do");
    // The agent has seen the socket of an earlier start with the same user.
    let end = format!("/v1/vms/vm-2/socket?uid={VM_UID}&exports={own}");
    server.control.delete(&end).await.expect("of an earlier start: nothing to do");
    assert_eq!(server.control.get::<Vec<VmSocket>>("/v1/vms").await.expect("a list"), [later]);
    let end = format!("/v1/vms/vm-2/socket?uid={VM_UID}&exports=");
    server.control.delete(&end).await.expect("its end");
    assert!(server.control.get::<Vec<VmSocket>>("/v1/vms").await.expect("a list").is_empty());
}

/// A session that opens its export, and then reads what it is told to.
struct Session {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Session {
    fn open(socket: &Path, export: &str) -> Self {
        let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", &uri]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("qemu-io runs");
        let said = BufReader::new(child.stdout.take().expect("it was asked for"));
        let mut session = Self { child, said };
        assert!(session.reads(), "it has opened {export}");
        session
    }

    fn reads(&mut self) -> bool {
        let stdin = self.child.stdin.as_mut().expect("it was asked for");
        writeln!(stdin, "read 0 4k").and_then(|()| stdin.flush()).expect("it runs");
        let mut line = String::new();
        while self.said.read_line(&mut line).expect("it says something") > 0 {
            // What comes before the number is the prompt.
            if line.contains("read failed") || line.contains("ops; ") {
                return !line.contains("read failed");
            }
            line.clear();
        }
        false
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disks_that_a_vm_keeps_are_served_on_while_others_come_and_go() {
    let mut server = Server::start().await;
    let mut exports = Vec::new();
    for volume in ["one", "two", "three"] {
        exports.push(format!("{volume}@{}", server.create(volume, MIB).await.epoch));
    }
    let uid = std::fs::metadata("/proc/self").expect("this process").uid();
    let at = open(&server, &vm_socket(uid, &exports[..2])).await.path;
    let [mut one, mut two] = [0, 1].map(|index| Session::open(&at, &exports[index]));
    // `three` comes.
    open(&server, &vm_socket(uid, &exports)).await;
    let mut three = Session::open(&at, &exports[2]);
    assert!(one.reads() && two.reads(), "their sessions are those that they were");
    // `two` goes.
    let rest = vm_socket(uid, &[exports[0].clone(), exports[2].clone()]);
    open(&server, &rest).await;
    assert!(one.reads() && three.reads());
    // A request that came first may be answered still.
    let begun = Instant::now();
    while two.reads() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is not the VM's any more");
    }
    assert_eq!(server.control.get::<Vec<VmSocket>>("/v1/vms").await.expect("a list"), [rest]);
    // A server that starts anew knows it so.
    server.kill();
    server.start_process().await;
    Session::open(&at, &exports[2]);
    let uri = format!("nbd+unix:///{}?socket={}", exports[1], at.display());
    assert_refused(&try_run(&["qemu-io", "-f", "raw", "-c", "read 0 4k", &uri]), "does not serve");
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_of_an_agent_that_is_not_root_do_not_end_each_other_s_sockets() {
    let server = Server::start().await;
    // Such VMs all have the agent's user, which is the server's.
    let uid = std::fs::metadata("/proc/self").expect("this process").uid();
    let [one, other] = ["vm-1", "vm-2"].map(|vm| {
        let vm = vm.parse().expect("a name");
        VmSocket { vm, ..vm_socket(uid, &[]) }
    });
    let [first, second] = [open(&server, &one).await, open(&server, &other).await];
    assert!(first.path.exists() && second.path.exists());
    let listed = server.control.get::<Vec<VmSocket>>("/v1/vms").await.expect("a list");
    assert_eq!(listed, [one, other]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_network_asks_for_no_vm_s_socket_and_nobody_for_one_that_joins_a_writer() {
    let server = Server::start().await;
    let uid = std::fs::metadata("/proc/self").expect("this process").uid();
    let over_tcp = Client::new(&format!("http://{}", server.control_addr), Duration::from_secs(60));
    let asked: Result<VmSocketAt, _> =
        over_tcp.expect("a client").put("/v1/vms/vm-1/socket", &vm_socket(uid, &[])).await;
    let refused = asked.expect_err("not through the network");
    assert!(refused.next.contains("--volume-control unix:"), "{refused}");
    let joins = vm_socket(uid, &["data".to_owned()]);
    let refused = server.control.put::<VmSocketAt>("/v1/vms/vm-1/socket", &joins).await;
    assert_eq!(refused.expect_err("no epoch").kind, ProblemKind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_in_the_network_does_not_join_the_writer_of_a_volume() {
    let server = Server::start().await;
    server.create("data", MIB).await;
    let over_tcp = |export: &str| {
        try_run(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &server.tcp_uri(export)])
    };
    assert_io(&over_tcp("data"));
    let epoch = raise(&server, "data").await;
    assert_refused(&over_tcp("data"), "data@N");
    assert_io(&over_tcp(&format!("data@{epoch}")));
    assert_io(&server.qemu_io("data", &["write 0 4k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_in_the_network_does_not_join_the_vm_of_a_job_that_has_not_moved() {
    let server = Server::start().await;
    let name = "job-1.root".parse().expect("a name");
    let owner = Some("job-1".parse().expect("an owner"));
    let new = CreateVolume::new(name, Some(MIB), VolumeSource::Empty);
    let new = CreateVolume { owner, ..new };
    let made = server.control.post::<VolumeInfo>("/v1/volumes", &new).await;
    let epoch = made.expect("a volume").epoch;
    let over_tcp = |export: &str| {
        try_run(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &server.tcp_uri(export)])
    };
    assert_refused(&over_tcp("job-1.root"), "job-1.root@N");
    assert_io(&over_tcp(&format!("job-1.root@{epoch}")));
    assert_io(&server.qemu_io("job-1.root", &["write 0 4k"]));
}

/// Somebody may have opened the control socket for another user.
#[tokio::test(flavor = "multi_thread")]
async fn the_control_socket_answers_no_other_user_whatever_its_mode() {
    if !is_root() {
        return;
    }
    let server = reachable().await;
    server.create("data", MIB).await;
    let socket = server.socket().with_file_name("control.sock");
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o666)).expect("a mode");
    let ask = |uid: u32| {
        let (uid, socket) = (uid.to_string(), socket.display().to_string());
        let user = ["setpriv", "--reuid", &uid, "--regid", &uid, "--clear-groups"];
        let curl = ["curl", "-sS", "--unix-socket", &socket, "http://localhost/v1/volumes"];
        said(&try_run(&[&user[..], &curl].concat()))
    };
    assert!(ask(0).contains("\"data\""));
    let refused = ask(OTHER_UID);
    assert!(refused.contains("forbidden") && !refused.contains("\"data\""), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_goes_to_no_file_but_a_new_one_of_the_server_s_own() {
    let server = Server::start().await;
    for name in ["../x", "/etc/x", "a/b", "..", ""] {
        let ask = serde_json::json!({"name": name});
        let refused = server.control.post::<serde_json::Value>("/v1/trace/start", &ask).await;
        assert_eq!(refused.expect_err("no name").kind, ProblemKind::Invalid, "{name:?}");
    }
    let ask = serde_json::json!({"name": "own-0001"});
    server.control.post::<serde_json::Value>("/v1/trace/start", &ask).await.expect("a name");
    server.control.post::<serde_json::Value>("/v1/trace/stop", &()).await.expect("its end");
    let again = server.control.post::<serde_json::Value>("/v1/trace/start", &ask).await;
    again.expect_err("what is there is not replaced");
}
