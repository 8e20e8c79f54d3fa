//! Server and client against each other, over a device in memory.

mod cluster;
mod compression;
mod qemu;
mod tls;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::exports::{Export, Exports, Opener, Peer};
use perigee_block::lease::{LeaseAnswer, LeaseAsk, LeaseRequest};
use perigee_block::sessions::ProxyKey;
use perigee_block::stats::Counters;
use perigee_block::switch::Switch;
use perigee_http::Listen;
use perigee_model::{Incarnation, Problem, ProblemKind};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::client::{NbdDevice, RemoteExport};
use super::server::{Listener, Server, ServerOptions};
use super::wire::{self, Dialect, GoOption, Request, command, option};

const SIZE_BYTES: usize = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(120);

/// A device in memory. Its writes, and its answers about a lease, wait for a permit of `gate`.
struct Memory {
    bytes: Mutex<Vec<u8>>,
    gate: Semaphore,
    incarnation: Option<Incarnation>,
    /// How many connections have opened it.
    opened: Arc<AtomicUsize>,
}

impl Memory {
    fn new(permits: usize) -> Arc<Self> {
        Arc::new(Self::of(permits, None))
    }

    /// A volume; its writes never wait.
    fn volume(incarnation: u32) -> Arc<Self> {
        Arc::new(Self::of(1000, Some(Incarnation(incarnation))))
    }

    fn of(permits: usize, incarnation: Option<Incarnation>) -> Self {
        let (bytes, gate) = (Mutex::new(vec![0; SIZE_BYTES]), Semaphore::new(permits));
        Self { bytes, gate, incarnation, opened: Arc::default() }
    }
}

impl Device for Memory {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES as u64
    }

    fn incarnation(&self) -> Option<Incarnation> {
        self.incarnation
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let start = usize::try_from(offset).expect("an offset in memory");
        let end = start + length_bytes as usize;
        let bytes = self.bytes.lock().expect("no holder panics");
        let data = Bytes::copy_from_slice(&bytes[start..end]);
        Box::pin(async { Ok(data) })
    }

    fn write(&self, offset: u64, data: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.gate.acquire().await.expect("the gate is never closed").forget();
            let start = usize::try_from(offset).expect("an offset in memory");
            let mut bytes = self.bytes.lock().expect("no holder panics");
            bytes[start..start + data.len()].copy_from_slice(&data);
            Ok(())
        })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::NoSpace) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async { Ok(vec![Extent { length_bytes: 4096, hole: true, zero: true }]) })
    }

    fn lease(&self, _: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        Box::pin(async {
            self.gate.acquire().await.expect("the gate is never closed").forget();
            Ok(LeaseAnswer::Still)
        })
    }
}

/// One export, and how many connections have opened it.
struct One(Arc<dyn Device>, Arc<AtomicUsize>);

impl One {
    fn memory(memory: &Arc<Memory>) -> Arc<Self> {
        Arc::new(Self(memory.clone(), memory.opened.clone()))
    }
}

impl Exports for One {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        Box::pin(async { Ok(vec!["data".to_owned()]) })
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        _: Opener,
        _: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(async move {
            if name == "data" {
                self.1.fetch_add(1, Ordering::SeqCst);
                let device = Switch::new(self.0.clone());
                Ok(Export {
                    device,
                    read_only: false,
                    counters: Arc::default(),
                    home: None,
                    confined: false,
                })
            } else {
                Err(Problem::not_found(format!("export {name:?}"), "this server has: data"))
            }
        })
    }
}

struct Running {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn start(memory: &Arc<Memory>, path: &Path) -> Self {
        let address = Listen::Unix(path.into());
        Self::start_with(memory, &address, ServerOptions::default()).await
    }

    async fn start_with(memory: &Arc<Memory>, address: &Listen, options: ServerOptions) -> Self {
        Self::serve(One::memory(memory), address, options).await
    }

    async fn serve(exports: Arc<dyn Exports>, address: &Listen, options: ServerOptions) -> Self {
        let listener = Listener::bind(address).await.expect("a listener");
        let stop = CancellationToken::new();
        let server = Server::new(exports, options).expect("a server");
        let task = tokio::spawn(server.serve(vec![listener], stop.clone()));
        Self { stop, task }
    }

    async fn stop(self) {
        self.stop.cancel();
        within("the server to stop", self.task).await.expect("the server");
    }
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited {DEADLINE:?} for {what}"),
    }
}

fn socket() -> (TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("nbd.sock");
    (dir, path)
}

async fn open(path: &Path, session: Option<Arc<ProxyKey>>) -> NbdDevice {
    let remote = RemoteExport { session, ..RemoteExport::new(Listen::Unix(path.into()), "data") };
    within("the export to open", NbdDevice::open(remote)).await.expect("the export")
}

#[tokio::test]
async fn many_writes_at_once_are_read_back() {
    let (_dir, path) = socket();
    let memory = Memory::new(1000);
    let server = Running::start(&memory, &path).await;
    let device = open(&path, None).await;
    let writes = (0..200u64).map(|i| {
        let data = Bytes::from(vec![u8::try_from(i).expect("below 200"); 512]);
        device.write(i * 512, data, i % 7 == 0)
    });
    for result in within("200 writes", futures_util::future::join_all(writes)).await {
        result.expect("a write");
    }
    let data = within("a read", device.read(199 * 512, 512)).await.expect("a read");
    assert_eq!(data, vec![199; 512]);
    server.stop().await;
}

#[tokio::test]
async fn errors_keep_their_kind_across_the_wire() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(1000), &path).await;
    let device = open(&path, None).await;
    let zero = within("a zero", device.zero(0, 4096, Zeroing::FreeSpace, false)).await;
    assert!(matches!(zero, Err(IoError::NoSpace)), "{zero:?}");
    let beyond = within("a read", device.read(SIZE_BYTES as u64, 1)).await;
    assert!(matches!(beyond, Err(IoError::Invalid(_))), "{beyond:?}");
    server.stop().await;
}

#[tokio::test]
async fn an_unknown_export_is_not_found_and_the_text_says_what_there_is() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(0), &path).await;
    let remote = RemoteExport::new(Listen::Unix(path), "nothing");
    let problem = within("a refusal", NbdDevice::open(remote)).await.err().expect("a refusal");
    assert_eq!(problem.kind, ProblemKind::NotFound);
    assert!(problem.why.contains("this server has: data"), "{problem}");
    server.stop().await;
}

#[tokio::test]
async fn no_server_is_unavailable() {
    let (_dir, path) = socket();
    let remote = RemoteExport::new(Listen::Unix(path), "data");
    let problem = within("a refusal", NbdDevice::open(remote)).await.err().expect("a refusal");
    assert_eq!(problem.kind, ProblemKind::Unavailable);
}

#[tokio::test]
async fn requests_in_flight_survive_a_restart_of_the_server() {
    let (_dir, path) = socket();
    let memory = Memory::new(0);
    let server = Running::start(&memory, &path).await;
    let device = Arc::new(open(&path, None).await);
    let writer = {
        let device = device.clone();
        tokio::spawn(async move { device.write(0, Bytes::from_static(b"kept"), false).await })
    };
    // The write waits at the gate: the server can't drain it and leaves it unanswered.
    server.task.abort();
    let ended = within("the server to end", server.task).await;
    assert!(ended.is_err(), "it was aborted");
    memory.gate.add_permits(10);
    let server = Running::start(&memory, &path).await;
    within("the write", writer).await.expect("the task").expect("the write");
    let data = within("a read", device.read(0, 4)).await.expect("a read");
    assert_eq!(&data[..], b"kept");
    server.stop().await;
}

#[tokio::test]
async fn a_host_that_stays_away_fails_requests_after_the_patience() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(1), &path).await;
    let mut remote = RemoteExport::new(Listen::Unix(path), "data");
    remote.patience = Duration::from_millis(50);
    let device = NbdDevice::open(remote).await.expect("the export");
    server.stop().await;
    let result = within("the patience to end", device.flush()).await;
    assert!(matches!(result, Err(IoError::Unreachable(_))), "{result:?}");
}

#[tokio::test]
async fn a_session_s_second_connection_drains_the_first() {
    let (_dir, path) = socket();
    let memory = Memory::new(0);
    let server = Running::start(&memory, &path).await;
    let session = Arc::new(ProxyKey::new("server", "data", "start", 0));
    let first = Arc::new(open(&path, Some(session.clone())).await);
    let stale = {
        let first = first.clone();
        tokio::spawn(async move { first.write(0, Bytes::from_static(b"old"), false).await })
    };
    // One connection's requests are read in order: once this is answered, the write runs.
    within("a flush", first.flush()).await.expect("a flush");
    let second = tokio::spawn({
        let path = path.clone();
        async move { open(&path, Some(session)).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!second.is_finished(), "the first connection's write still runs");
    first.hang_up();
    memory.gate.add_permits(1);
    let second = within("the second connection", second).await.expect("the task");
    within("the first write", stale).await.expect("the task").ok();
    memory.gate.add_permits(1);
    within("a write", second.write(0, Bytes::from_static(b"new"), false)).await.expect("a write");
    let data = within("a read", second.read(0, 3)).await.expect("a read");
    assert_eq!(&data[..], b"new");
    server.stop().await;
}

/// Passes connections on to `to`; what comes on the first one stays here from `stalls` on.
async fn stalling(from: &Path, to: &Path, stalls: CancellationToken) {
    let listener = tokio::net::UnixListener::bind(from).expect("a socket");
    let to = to.to_owned();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        let mut stalls = Some(stalls);
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = UnixStream::connect(&to).await.expect("a server");
            let stalls = stalls.take();
            kept.push(tokio::spawn(async move {
                let passing = tokio::io::copy_bidirectional(&mut client, &mut server);
                match stalls {
                    Some(stalls) => drop(stalls.run_until_cancelled(passing).await),
                    None => drop(passing.await),
                }
                // Nobody hangs up.
                std::future::pending::<()>().await;
                drop((client, server));
            }));
        }
    });
}

#[tokio::test]
async fn a_server_that_stays_connected_and_says_nothing_is_taken_for_lost() {
    let (_dir, path) = socket();
    let memory = Memory::new(1000);
    let server = Running::start(&memory, &path).await;
    let (front, stalls) = (path.with_extension("front"), CancellationToken::new());
    stalling(&front, &path, stalls.clone()).await;
    let mut remote = RemoteExport::new(Listen::Unix(front), "data");
    remote.silence_max = Duration::from_millis(200);
    let device = within("the export to open", NbdDevice::open(remote)).await.expect("the export");
    within("a write", device.write(0, vec![7; 512].into(), false)).await.expect("a write");
    stalls.cancel();
    let read = device.read(0, 512);
    let write = device.write(512, vec![8; 512].into(), false);
    let (read, write) = within("answers", async { tokio::join!(read, write) }).await;
    assert_eq!(read.expect("a read"), vec![7; 512]);
    write.expect("a write");
    server.stop().await;
}

#[tokio::test]
async fn a_request_that_takes_longer_than_a_server_may_be_silent_is_waited_for() {
    let (_dir, path) = socket();
    let memory = Memory::new(0);
    let server = Running::start(&memory, &path).await;
    let mut remote = RemoteExport::new(Listen::Unix(path), "data");
    remote.silence_max = Duration::from_secs(6);
    let waits = remote.silence_max + Duration::from_secs(2);
    let device = within("the export to open", NbdDevice::open(remote)).await.expect("the export");
    let write = device.write(0, vec![7; 512].into(), false);
    let release = async {
        tokio::time::sleep(waits).await;
        let opened = memory.opened.load(Ordering::SeqCst);
        memory.gate.add_permits(100);
        opened
    };
    let (write, opened) = within("the write", async { tokio::join!(write, release) }).await;
    write.expect("a write");
    assert_eq!(opened, 1, "connections");
    server.stop().await;
}

#[tokio::test]
async fn a_lease_whose_answer_the_home_holds_back_is_no_request_that_waits_for_the_network() {
    let (_dir, path) = socket();
    let memory = Memory::new(0);
    let server = Running::start(&memory, &path).await;
    let counters = Arc::new(Counters::default());
    let mut remote = RemoteExport::new(Listen::Unix(path), "data");
    remote.counters = Some(Arc::clone(&counters));
    let device = within("the export to open", NbdDevice::open(remote)).await.expect("the export");
    let ask = LeaseAsk { request: LeaseRequest::Keep, number: 1 };
    let read = async {
        within("a read", device.read(0, 512)).await.expect("a read");
        let read = counters.snapshot();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let later = counters.snapshot();
        memory.gate.add_permits(1);
        (read, later)
    };
    let (answer, (read, later)) =
        within("the lease", async { tokio::join!(device.lease(ask), read) }).await;
    assert_eq!(answer.expect("an answer"), LeaseAnswer::Still);
    assert_eq!(read.network_requests, 1);
    assert_eq!(later, read, "while only the lease waits");
    assert_eq!(counters.snapshot().network_requests, 1);
    server.stop().await;
}

#[tokio::test]
async fn a_session_on_several_connections_flushes_on_one_what_was_written_on_others() {
    let (_dir, path) = socket();
    let memory = Memory::new(1 << 20);
    let server = Running::start(&memory, &path).await;
    let mut remote = RemoteExport::new(Listen::Unix(path.clone()), "data");
    remote.session = Some(Arc::new(ProxyKey::new("server", "data", "start", 0)));
    remote.connections = 4;
    let device = Arc::new(within("the export", NbdDevice::open(remote)).await.expect("the export"));
    let stopped = {
        let device = device.clone();
        tokio::spawn(async move {
            for round in 0..40_u64 {
                let writes = (0..32_u64).map(|i| {
                    let value = u8::try_from(round).expect("below 40");
                    device.write(i * 512, vec![value; 512].into(), false)
                });
                for done in futures_util::future::join_all(writes).await {
                    done.expect("a write");
                }
                device.flush().await.expect("a flush");
                let data = device.read(0, 32 * 512).await.expect("a read");
                assert!(data.iter().all(|byte| u64::from(*byte) == round), "round {round}");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
    };
    // What is on its way when the connections end is sent again, and in no wrong order.
    tokio::time::sleep(Duration::from_millis(30)).await;
    server.stop().await;
    let server = Running::start(&memory, &path).await;
    within("the rounds", stopped).await.expect("every round");
    server.stop().await;
}

/// Greets, and returns the connection ready for options.
async fn greeted(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).await.expect("a connection");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).await.expect("the greeting");
    stream.write_u32(3).await.expect("the flags");
    stream
}

/// Everything until the server hangs up.
async fn rest(mut stream: UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match within("the server to hang up", stream.read_to_end(&mut rest)).await {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}"),
        _ => rest,
    }
}

#[tokio::test]
async fn bytes_that_are_no_option_drop_the_connection() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(0), &path).await;
    let mut stream = greeted(&path).await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("a write");
    assert!(rest(stream).await.is_empty());
    server.stop().await;
}

#[tokio::test]
async fn bytes_that_are_no_request_drop_the_connection_and_only_that() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(0), &path).await;
    let other = open(&path, None).await;
    let mut stream = greeted(&path).await;
    let go = GoOption { name: "data".into(), infos: Vec::new() };
    stream.write_all(&wire::encode_option(option::GO, &go.encode())).await.expect("GO");
    let mut replies = [0; 20 + 12 + 20];
    stream.read_exact(&mut replies).await.expect("an info and an acknowledgement");
    let too_long = Request {
        flags: 0,
        command: command::WRITE,
        cookie: 1,
        offset: 0,
        length_bytes: u32::MAX.into(),
    };
    stream.write_all(&too_long.encode(Dialect::Structured)).await.expect("a request");
    assert!(rest(stream).await.is_empty());
    within("a flush of another client", other.flush()).await.expect("a flush");
    server.stop().await;
}

#[tokio::test]
async fn an_old_client_gets_simple_replies() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(0), &path).await;
    let mut stream = greeted(&path).await;
    stream.write_all(&wire::encode_option(option::EXPORT_NAME, b"data")).await.expect("a name");
    assert_eq!(stream.read_u64().await.expect("the size"), SIZE_BYTES as u64);
    stream.read_u16().await.expect("the flags");
    let read =
        Request { flags: 0, command: command::READ, cookie: 5, offset: 0, length_bytes: 512 };
    stream.write_all(&read.encode(Dialect::Simple)).await.expect("a read");
    let mut reply = [0; 16 + 512];
    within("the reply", stream.read_exact(&mut reply)).await.expect("the reply");
    assert_eq!(&reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    server.stop().await;
}

#[tokio::test]
async fn an_unknown_option_is_unsupported_and_the_handshake_goes_on() {
    let (_dir, path) = socket();
    let server = Running::start(&Memory::new(0), &path).await;
    let mut stream = greeted(&path).await;
    stream.write_all(&wire::encode_option(0x1234, b"x")).await.expect("an option");
    stream.write_all(&wire::encode_option(option::ABORT, b"")).await.expect("an option");
    let replies = rest(stream).await;
    assert_eq!(replies[12..16], [0x80, 0, 0, 1], "ERR_UNSUP");
    server.stop().await;
}

#[tokio::test]
async fn what_waits_for_a_volume_never_reaches_another_one_of_its_name() {
    let (_dir, path) = socket();
    let (old, new) = (Memory::volume(1), Memory::volume(2));
    let server = Running::start(&old, &path).await;
    let patience = Duration::from_secs(2);
    let remote = RemoteExport { patience, ..RemoteExport::new(Listen::Unix(path.clone()), "data") };
    let device = within("the export to open", NbdDevice::open(remote)).await.expect("the export");
    server.stop().await;
    let server = Running::start(&new, &path).await;
    let refused = within("a refusal", device.write(0, vec![7; 512].into(), false)).await;
    let refused = refused.expect_err("it is another volume").to_string();
    assert!(refused.contains("another one now"), "{refused}");
    assert!(new.bytes.lock().expect("no holder panics").iter().all(|byte| *byte == 0));
    server.stop().await;
    let server = Running::start(&old, &path).await;
    within("a write", device.write(0, vec![7; 512].into(), false)).await.expect("it is back");
    server.stop().await;
}

/// A server on a unix socket and a TCP port, with few places.
async fn crowded(path: &Path, negotiation_max: Option<Duration>) -> (Running, String) {
    let tcp = format!("127.0.0.1:{}", perigee_http::unused_port());
    let mut listeners = Vec::new();
    for address in [Listen::Tcp(tcp.clone()), Listen::Unix(path.into())] {
        listeners.push(Listener::bind(&address).await.expect("a listener"));
    }
    let options = ServerOptions { clients_max: 2, ..ServerOptions::default() };
    let mut server = Server::new(One::memory(&Memory::new(0)), options).expect("a server");
    if let Some(max) = negotiation_max {
        server.set_negotiation_max(max);
    }
    let stop = CancellationToken::new();
    let task = tokio::spawn(server.serve(listeners, stop.clone()));
    (Running { stop, task }, tcp)
}

/// A client that takes the greeting and says nothing. `None`: it was hung up on at once.
async fn silent(tcp: &str) -> Option<tokio::net::TcpStream> {
    let mut stream = tokio::net::TcpStream::connect(tcp).await.expect("a connection");
    let mut greeting = [0; 18];
    let greeted = within("a greeting", stream.read_exact(&mut greeting)).await;
    greeted.is_ok().then_some(stream)
}

#[tokio::test]
async fn silent_strangers_do_not_lock_out_clients_of_this_host() {
    let (_dir, path) = socket();
    let (server, tcp) = crowded(&path, None).await;
    let _silent = [silent(&tcp).await.expect("a place"), silent(&tcp).await.expect("a place")];
    assert!(silent(&tcp).await.is_none(), "there are no more places");
    let device = open(&path, None).await;
    within("a read", device.read(0, 512)).await.expect("a read");
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_handshake_is_dropped() {
    let (_dir, path) = socket();
    let (server, tcp) = crowded(&path, Some(Duration::from_millis(100))).await;
    let mut first = silent(&tcp).await.expect("a place");
    let ended = within("the server to hang up", first.read(&mut [0; 1])).await;
    assert_eq!(ended.expect("an end in order"), 0);
    server.stop().await;
}

/// Passes on what a client and a server say, and counts how often the client goes on after an answer.
async fn count_turns(listener: UnixListener, to: std::path::PathBuf, turns: Arc<AtomicUsize>) {
    let (mut client, _) = listener.accept().await.expect("a client");
    let mut server = UnixStream::connect(&to).await.expect("a server");
    let (mut from_client, mut from_server) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut is_answered = true;
    loop {
        tokio::select! {
            Ok(length @ 1..) = client.read(&mut from_client) => {
                server.write_all(&from_client[..length]).await.expect("passed on");
                turns.fetch_add(usize::from(is_answered), Ordering::SeqCst);
                is_answered = false;
            }
            Ok(length @ 1..) = server.read(&mut from_server) => {
                client.write_all(&from_server[..length]).await.expect("passed on");
                is_answered = true;
            }
            else => return,
        }
    }
}

#[tokio::test]
async fn an_export_is_opened_in_one_round_trip_over_a_connection_that_was_made_ahead() {
    let (dir, path) = socket();
    let server = Running::start(&Memory::volume(1), &path).await;
    let (relayed, turns) = (dir.path().join("relay.sock"), Arc::<AtomicUsize>::default());
    let listener = UnixListener::bind(&relayed).expect("a socket");
    let relay = tokio::spawn(count_turns(listener, path.clone(), Arc::clone(&turns)));
    let remote = || RemoteExport::new(Listen::Unix(relayed.clone()), "data");
    let prepared = within("a connection", NbdDevice::prepare(remote())).await.expect("it");
    let before = turns.load(Ordering::SeqCst);
    let session = Some(Arc::new(ProxyKey::new("server", "data", "start", 0)));
    let opening = RemoteExport { prepared: Some(prepared), session, ..remote() };
    let device = within("the export", NbdDevice::open(opening)).await.expect("the export");
    assert_eq!(turns.load(Ordering::SeqCst), before + 1);
    within("a read", device.read(0, 512)).await.expect("a read");
    drop(device);
    relay.abort();
    server.stop().await;
}

#[tokio::test]
async fn a_connection_that_was_made_ahead_and_is_lost_is_made_anew() {
    let (_dir, path) = socket();
    let memory = Memory::new(0);
    let server = Running::start(&memory, &path).await;
    let remote = || RemoteExport::new(Listen::Unix(path.clone()), "data");
    let prepared = within("a connection", NbdDevice::prepare(remote())).await.expect("it");
    server.stop().await;
    let server = Running::start(&memory, &path).await;
    let opening = RemoteExport { prepared: Some(prepared), ..remote() };
    let device = within("the export", NbdDevice::open(opening)).await.expect("the export");
    within("a read", device.read(0, 512)).await.expect("a read");
    drop(device);
    server.stop().await;
}

/// A client sends both at once. Its requests ran beside those of the session's newer connection, which had waited for the
/// end of the older ones.
#[tokio::test]
async fn a_connection_whose_session_was_refused_opens_nothing() {
    let (_dir, path) = socket();
    let memory = Memory::volume(1);
    let server = Running::start(&memory, &path).await;
    let session = ProxyKey::new("server", "data", "start", 0);
    let mut newer = UnixStream::connect(&path).await.expect("a server");
    let answers = open_by_hand(&mut newer, &session.told(2, 0)).await;
    assert_eq!(answers, [wire::reply::ACK, wire::reply::ACK]);
    let mut older = UnixStream::connect(&path).await.expect("a server");
    let answers = open_by_hand(&mut older, &session.told(1, 0)).await;
    assert_eq!(answers, [wire::reply::ERR_SHUTDOWN, wire::reply::ERR_SHUTDOWN]);
    assert_eq!(memory.opened.load(Ordering::SeqCst), 1);
    drop((newer, older));
    server.stop().await;
}

/// Names a session and chooses the export in one go. Returns the kind of the last answer to each.
async fn open_by_hand(stream: &mut UnixStream, session: &Bytes) -> [u32; 2] {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).await.expect("a greeting");
    let go = GoOption { name: "data".to_owned(), infos: Vec::new() };
    let mut sent = bytes::BytesMut::from(&3_u32.to_be_bytes()[..]);
    sent.extend(wire::encode_option(option::PERIGEE_SESSION, session));
    sent.extend(wire::encode_option(option::GO, &go.encode()));
    stream.write_all(&sent).await.expect("the options");
    let mut last = [0; 2];
    for (place, asked) in [option::PERIGEE_SESSION, option::GO].into_iter().enumerate() {
        while last[place] != wire::reply::ACK && last[place] & (1 << 31) == 0 {
            let mut head = [0; 20];
            within("an answer", stream.read_exact(&mut head)).await.expect("an answer");
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4"));
            assert_eq!(number(8), asked);
            last[place] = number(12);
            let mut data = vec![0; number(16) as usize];
            stream.read_exact(&mut data).await.expect("its data");
        }
    }
    last
}
