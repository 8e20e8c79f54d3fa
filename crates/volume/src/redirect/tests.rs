//! Servers within one process, so that the order of events can be forced.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::IoError;
use perigee_block::exports::{Exports, Opener, Peer};
use perigee_http::{Listen, Network};
use perigee_model::SiteId;
use perigee_model::home::{CallOff, Depart, ServerAddresses, TakeVolume, Tenure};
use perigee_model::leave_site::{LeaveSite, SetLeaveSite, SiteAddress, SiteMap};
use perigee_model::replica::Supersede;
use perigee_model::volume::{CreateVolume, VolumeSource};
use perigee_nbd::ServerOptions;
use perigee_nbd::server::{Listener, Server};
use perigee_store::{Data, Pool, PoolConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::*;
use crate::control::{self, Control};
use crate::exports::Here;
use crate::remotes::{RemoteOptions, Remotes};
use crate::sources::Sources;

const DEADLINE: Duration = Duration::from_secs(120);
const BYTES: u64 = 1 << 20;

fn data() -> VolumeName {
    VolumeName::new("data").expect("a name")
}

async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(DEADLINE, work).await;
    done.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for {what}"))
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    within(what, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

async fn serve_nbd(exports: Arc<dyn Exports>, nbd_addr: &str, stop: &CancellationToken) {
    let server = Server::new(exports, ServerOptions::default()).expect("a server");
    let listener = Listener::bind(&Listen::Tcp(nbd_addr.to_owned())).await.expect("a port");
    tokio::spawn(server.serve(vec![listener], stop.clone()));
}

fn unused_address() -> String {
    format!("127.0.0.1:{}", perigee_http::unused_port())
}

/// A volume server, but for its process.
struct Host {
    exports: Arc<PoolExports>,
    addresses: ServerAddresses,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Host {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let remotes = Remotes::load(&RemoteOptions::default()).expect("no files");
        let config =
            PoolConfig { private: None, dir: dir.path().into(), connect: remotes.connector() };
        let pool = Pool::open(config).await.expect("a pool");
        let here = Here { server_id: Uuid::new_v4(), boot: String::new() };
        let exports = PoolExports::new(Arc::clone(&pool), Arc::default(), here, remotes.clone());
        let (nbd_addr, stop) = (unused_address(), CancellationToken::new());
        serve_nbd(exports.clone(), &nbd_addr, &stop).await;
        let stats = Arc::clone(&exports.stats);
        let filling = Arc::clone(&pool).fill_copies(1 << 30);
        tokio::spawn(stop.clone().run_until_cancelled_owned(filling));
        let sources = Arc::new(Sources::new(&[], dir.path()).expect("directories"));
        let control = Control {
            pool,
            exports: Arc::clone(&exports),
            stats,
            remotes,
            vm_sockets: None,
            sources,
            measuring: None,
        };
        let listen = unused_address();
        let control_url = format!("http://{listen}");
        let api = [Listen::Tcp(listen)];
        let stopped = stop.clone();
        tokio::spawn(async move {
            let api =
                perigee_http::serve(control::router(Arc::new(control)), &api, &Network::Plain);
            stopped.run_until_cancelled(api).await
        });
        let addresses = ServerAddresses { nbd_addr, control_url };
        Self { exports, addresses, stop, _dir: dir }
    }

    fn nbd_addr(&self) -> &str {
        &self.addresses.nbd_addr
    }

    async fn with_a_volume() -> Self {
        let host = Self::start().await;
        let create = CreateVolume::new(data(), Some(BYTES), VolumeSource::Empty);
        host.exports.pool.create_volume(create).await.expect("a volume");
        host
    }

    async fn attach(&self, home: &Self) {
        self.exports.pool.attach(&data(), home.nbd_addr()).await.expect("an attachment");
    }

    async fn open(&self) -> Arc<Switch> {
        self.exports.open("data", Opener::Client, Peer::LOCAL).await.expect("a session").device
    }

    async fn tenure(&self) -> Tenure {
        match self.exports.pool.home(&data()).await.expect("what it knows").home {
            HomeState::Here { tenure, .. } => tenure,
            other => panic!("{other:?}"),
        }
    }

    async fn take_from(&self, from: &Self) {
        let tenure = from.tenure().await;
        let (from, to) = (from.addresses.clone(), self.addresses.clone());
        let take = TakeVolume { from, to, tenure, grant: None };
        until("the volume", async || self.exports.take(&data(), &take).await.is_ok()).await;
        until("all of it", async || {
            let home = self.exports.pool.home(&data()).await.expect("what it knows").home;
            matches!(home, HomeState::Here { missing_bytes: 0, .. })
        })
        .await;
    }
}

async fn write(disk: &Switch, byte: u8) {
    let block = Bytes::from(vec![byte; 4096]);
    let written = disk.run(|device| device.write(0, block.clone(), true));
    within("a write", written).await.expect("a write");
}

async fn read(disk: &Switch) -> u8 {
    let read = disk.run(|device| device.read(0, 4096));
    within("a read", read).await.expect("a read")[0]
}

/// A server that has no volume and says that it went to this address.
struct Elsewhere {
    to: Option<String>,
    asked: AtomicBool,
    /// Before it answers, a step of a move has to come about here.
    steps: Option<Arc<PoolExports>>,
}

impl Elsewhere {
    async fn start(
        to: Option<&str>,
        steps: Option<&Arc<PoolExports>>,
        stop: &CancellationToken,
    ) -> (Arc<Self>, ServerAddresses) {
        let (to, steps) = (to.map(str::to_owned), steps.map(Arc::clone));
        let this = Arc::new(Self { to, asked: AtomicBool::new(false), steps });
        let nbd_addr = unused_address();
        serve_nbd(this.clone(), &nbd_addr, stop).await;
        (this, ServerAddresses { nbd_addr, control_url: "http://127.0.0.1:1".into() })
    }
}

impl Exports for Elsewhere {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        _: Opener,
        _: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(async move {
            if let Some(exports) = &self.steps {
                drop(exports.turns.moving(&data()).await?);
            }
            self.asked.store(true, Ordering::SeqCst);
            Err(Problem::not_found(name, "it is elsewhere"))
        })
    }

    fn moved_to<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Option<String>> {
        Box::pin(async { self.to.clone() })
    }
}

/// A home to which the volume comes back while it is looked for there.
struct ComesBack {
    home: Arc<PoolExports>,
    off: Mutex<Option<CallOff>>,
}

impl Exports for ComesBack {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        self.home.names()
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        opener: Opener,
        peer: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(async move {
            let found = self.home.open(name, opener, peer).await;
            let off = self.off.lock().expect("no holder panics").take_if(|_| found.is_err());
            if let Some(off) = off {
                self.home.return_home(&data(), off).await.expect("its return");
            }
            found
        })
    }

    fn moved_to<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Option<String>> {
        self.home.moved_to(name)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_comes_while_the_volume_comes_back_finds_it() {
    let (home, third) = (Host::with_a_volume().await, Host::start().await);
    let (_, to) = Elsewhere::start(None, None, &home.stop).await;
    let depart = Depart { tenure: home.tenure().await, to };
    home.exports.depart(&data(), &depart).await.expect("a departure");
    let off = Mutex::new(Some(CallOff { tenure: depart.tenure }));
    let nbd_addr = unused_address();
    let comes_back = ComesBack { home: Arc::clone(&home.exports), off };
    serve_nbd(Arc::new(comes_back), &nbd_addr, &home.stop).await;
    third.exports.pool.attach(&data(), &nbd_addr).await.expect("an attachment");
    write(&*third.open().await, 7).await;
    assert_eq!(read(&*home.open().await).await, 7);
}

/// Else the step waits for the session's question, and the question for the step: both to their deadlines.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_looks_for_its_volume_holds_up_no_step_of_a_move() {
    let home = Host::with_a_volume().await;
    let disk = home.open().await;
    let (last, at) = Elsewhere::start(None, None, &home.stop).await;
    let (_, to) = Elsewhere::start(Some(&at.nbd_addr), Some(&home.exports), &home.stop).await;
    let depart = Depart { tenure: home.tenure().await, to };
    home.exports.depart(&data(), &depart).await.expect("a departure");
    until("the question at the last address", async || last.asked.load(Ordering::SeqCst)).await;
    let off = CallOff { tenure: depart.tenure };
    home.exports.return_home(&data(), off).await.expect("its return");
    write(&disk, 7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_a_take_did_not_see_finds_the_volume_here() {
    let (one, two) = (Host::with_a_volume().await, Host::start().await);
    two.attach(&one).await;
    let disk = two.open().await;
    write(&disk, 7).await;
    let (tenure, to) = (one.tenure().await, two.addresses.clone());
    let departed = one.exports.depart(&data(), &Depart { tenure, to: to.clone() }).await;
    let take = TakeVolume { from: one.addresses.clone(), to, tenure, grant: None };
    // It arrives, and nobody holds the session.
    let departed = departed.expect("a departure");
    two.exports
        .pool
        .move_step(&data())
        .await
        .unwrap()
        .arrive(&take, departed)
        .await
        .expect("its arrival");
    write(&disk, 8).await;
    assert_eq!(read(&*two.open().await).await, 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_finds_the_volume_from_an_attachment_that_is_old_too() {
    let (one, two) = (Host::with_a_volume().await, Host::start().await);
    let (three, third) = (Host::start().await, Host::start().await);
    third.attach(&one).await;
    let disk = third.open().await;
    write(&disk, 7).await;
    // The session's home has forgotten everything, and the attachment is neither old nor right.
    third.attach(&two).await;
    two.take_from(&one).await;
    let tenure = two.tenure().await;
    one.exports.pool.forget_departed(&data(), tenure).await.expect("that it is forgotten");
    one.exports.pool.detach(&data()).await.expect("its end");
    three.take_from(&two).await;
    write(&disk, 8).await;
    assert_eq!(read(&*three.open().await).await, 8);
    let attached = third.exports.attachment(&data()).await.expect("a list");
    assert_eq!(attached.as_deref(), Some(three.nbd_addr()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_on_a_volume_that_is_not_attached_any_more_follows_it() {
    let (one, two, third) = (Host::with_a_volume().await, Host::start().await, Host::start().await);
    third.attach(&one).await;
    let disk = third.open().await;
    write(&disk, 7).await;
    third.exports.pool.detach(&data()).await.expect("its end");
    two.take_from(&one).await;
    write(&disk, 8).await;
    assert_eq!(read(&*two.open().await).await, 8);
    assert_eq!(third.exports.attachment(&data()).await.expect("a list"), None);
}

/// The lost home says where the volume is, and a new home may not be ready yet: but this one is, and says no.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_a_volume_in_whose_place_there_is_another_one_is_refused_for_good() {
    let (lost, home) = (Host::with_a_volume().await, Host::with_a_volume().await);
    let third = Host::start().await;
    third.attach(&lost).await;
    let epoch = lost.exports.pool.volume(&data()).await.expect("the lost one").epoch();
    let old = third.open().await;
    write(&old, 5).await;
    let (tenure, to) = (home.tenure().await, home.addresses.clone());
    let ask = Supersede { lost: lost.tenure().await, tenure, to };
    lost.exports.supersede(&data(), &ask).await.expect("that it is given up");
    let export = format!("data@{epoch}");
    let opened = third.exports.open(&export, Opener::Client, Peer::LOCAL);
    let refused = within("an answer", opened).await.err().expect("another volume has its name");
    assert_eq!(refused.kind, ProblemKind::Conflict, "nobody waits for it: {refused}");
    let says_why = refused.to_string().contains("another volume was created with its name");
    assert!(says_why, "{refused}");
    let ends = old.run(|device| device.write(0, Bytes::from(vec![6; 4096]), true));
    within("the end of its session", ends).await.expect_err("its volume is gone");
    third.attach(&home).await;
    third.exports.repoint(&data(), None).await.expect("the ended session holds up nobody");
    let disk = third.open().await;
    write(&disk, 7).await;
    assert_eq!(read(&*home.open().await).await, 7, "sessions of the new one are opened");
    let next = Host::start().await;
    next.take_from(&home).await;
    write(&disk, 8).await;
    assert_eq!(read(&*next.open().await).await, 8, "they follow it");
}

/// Whoever asks while the volume comes here is answered when it is here.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_network_that_comes_before_the_volume_does_not_join_its_writer() {
    let host = Host::start().await;
    let turn = host.exports.turns.moving(&data()).await.expect("a turn");
    let exports = Arc::clone(&host.exports);
    let address = Some([10, 0, 0, 9].into());
    let foreign = Peer { address, encrypted: false, is_own: false, is_authenticated: false };
    let asks =
        tokio::spawn(async move { exports.open("data", Opener::Client, foreign).await.map(drop) });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let owner = perigee_model::OwnerName::new("job-1").expect("a name");
    let create = CreateVolume {
        owner: Some(owner),
        ..CreateVolume::new(data(), Some(BYTES), VolumeSource::Empty)
    };
    host.exports.pool.create_volume(create).await.expect("a volume");
    drop(turn);
    let refused = within("an answer", asks).await.expect("no panic").expect_err("a job writes it");
    assert!(refused.why.contains("written with epochs"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_may_not_have_its_data_any_more_gets_them_by_no_move_of_the_volume() {
    let (one, two) = (Host::with_a_volume().await, Host::start().await);
    let site = |name| SiteId::new(name).expect("a name");
    let cloud = SiteAddress { address: [10, 0, 1, 1].into(), site: site("cloud") };
    let map = SiteMap { here: site("home"), hosts: vec![cloud], teller: None };
    one.exports.set_sites(map).await.expect("that it is told");
    let address = Some([10, 0, 1, 1].into());
    let foreign = Peer { address, encrypted: false, is_own: false, is_authenticated: false };
    let opened = one.exports.open("data", Opener::Client, foreign).await;
    let session = opened.expect("the data may leave").device;
    let never = SetLeaveSite { leave_site: LeaveSite::Never, confirmed: false };
    one.exports.set_leave_site(&Data::Volume(data()), never.into()).await.expect("a policy");
    two.take_from(&one).await;
    let answer = within("an answer", session.run(|device| device.read(0, 4096))).await;
    assert!(matches!(answer, Err(IoError::Moved)), "{answer:?}");
}

/// A volume at the first host, and what a client from another site and one of this site have open at the second one when it
/// becomes confined.
async fn confined_while_open_at_a_third_host() -> ([Host; 2], [Arc<Switch>; 2]) {
    let (home, between) = (Host::with_a_volume().await, Host::start().await);
    let site = |name| SiteId::new(name).expect("a name");
    let cloud = SiteAddress { address: [10, 0, 1, 1].into(), site: site("cloud") };
    let map = SiteMap { here: site("home"), hosts: vec![cloud], teller: None };
    between.exports.set_sites(map).await.expect("that it is told");
    between.attach(&home).await;
    let address = Some([10, 0, 1, 1].into());
    let foreign = Peer { address, encrypted: false, is_own: false, is_authenticated: false };
    let opened = between.exports.open("data", Opener::Client, foreign).await;
    let foreign = opened.expect("the data may leave").device;
    let own = between.open().await;
    write(&own, 5).await;
    assert_eq!((read(&foreign).await, read(&own).await), (5, 5));
    let never = SetLeaveSite { leave_site: LeaveSite::Never, confirmed: false };
    home.exports.set_leave_site(&Data::Volume(data()), never.into()).await.expect("a policy");
    ([home, between], [foreign, own])
}

/// Until now its home did not know of it: the host in between is at the home's site.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_from_elsewhere_loses_confined_data_at_a_third_host_and_others_there_go_on() {
    let ([home, _between], [foreign, own]) = confined_while_open_at_a_third_host().await;
    // What it has in memory it may read until it asks the home again.
    until("the end of its session", async || {
        foreign.run(|device| device.read(0, 4096)).await.is_err()
    })
    .await;
    write(&own, 6).await;
    assert_eq!(read(&own).await, 6);
    assert_eq!(read(&*home.open().await).await, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confined_volume_that_comes_to_a_host_is_not_given_to_its_clients_from_elsewhere() {
    let ([home, between], [foreign, own]) = confined_while_open_at_a_third_host().await;
    between.take_from(&home).await;
    until("the end of its session", async || {
        foreign.run(|device| device.read(0, 4096)).await.is_err()
    })
    .await;
    write(&own, 6).await;
    assert_eq!(read(&*between.open().await).await, 6);
}

/// What was in flight failed, and QEMU pauses a guest for that. A client that is hung up on connects again, and sends it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_may_open_confined_data_again_is_hung_up_on_and_gets_no_error() {
    let (home, away) = (Host::with_a_volume().await, Host::start().await);
    let site = |name| SiteId::new(name).expect("a name");
    let address = SiteAddress { address: [127, 0, 0, 1].into(), site: site("home") };
    let map = SiteMap { here: site("cloud"), hosts: vec![address], teller: None };
    away.exports.set_sites(map).await.expect("that it is told");
    away.attach(&home).await;
    let disk = away.open().await;
    write(&disk, 5).await;
    let never = SetLeaveSite { leave_site: LeaveSite::Never, confirmed: false };
    home.exports.set_leave_site(&Data::Volume(data()), never.into()).await.expect("a policy");
    let written = disk.run(|device| device.write(0, Bytes::from(vec![6; 4096]), true));
    let written = within("the end of its session", written).await;
    assert!(matches!(written, Err(IoError::Moved)), "{written:?}");
    let disk = away.open().await;
    write(&disk, 6).await;
    assert_eq!(read(&*home.open().await).await, 6);
}

/// A link to a server that counts for each connection how often the client waits for an answer and goes on.
struct Counted {
    nbd_addr: String,
    turns: Arc<Mutex<Vec<Arc<AtomicUsize>>>>,
}

impl Counted {
    async fn start(to: &str) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let nbd_addr = listener.local_addr().expect("an address").to_string();
        let (to, turns) = (to.to_owned(), Arc::<Mutex<Vec<Arc<AtomicUsize>>>>::default());
        let all = Arc::clone(&turns);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = tokio::net::TcpStream::connect(&to).await else { return };
                let counted = Arc::<AtomicUsize>::default();
                all.lock().expect("no holder panics").push(Arc::clone(&counted));
                tokio::spawn(relay(client, server, counted));
            }
        });
        Self { nbd_addr, turns }
    }

    fn turns(&self) -> Vec<usize> {
        let turns = self.turns.lock().expect("no holder panics");
        turns.iter().map(|turns| turns.load(Ordering::SeqCst)).collect()
    }
}

async fn relay(
    mut client: tokio::net::TcpStream,
    mut server: tokio::net::TcpStream,
    turns: Arc<AtomicUsize>,
) {
    let (mut from_client, mut from_server) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut is_answered = true;
    loop {
        tokio::select! {
            Ok(length) = client.read(&mut from_client) => {
                if length == 0 || server.write_all(&from_client[..length]).await.is_err() {
                    return;
                }
                turns.fetch_add(usize::from(is_answered), Ordering::SeqCst);
                is_answered = false;
            }
            Ok(length) = server.read(&mut from_server) => {
                if length == 0 || client.write_all(&from_server[..length]).await.is_err() {
                    return;
                }
                is_answered = true;
            }
            else => return,
        }
    }
}

/// The connection is made before. When the volume has gone, one round trip opens it at the new home, and the next one
/// answers the request that waited.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_at_the_old_home_is_open_at_the_new_one_after_one_round_trip() {
    let (one, mut two) = (Host::with_a_volume().await, Host::start().await);
    let link = Counted::start(two.nbd_addr()).await;
    two.addresses.nbd_addr.clone_from(&link.nbd_addr);
    let disk = one.open().await;
    write(&disk, 1).await;
    two.take_from(&one).await;
    write(&disk, 2).await;
    assert_eq!(read(&disk).await, 2);
    let turns = link.turns();
    // Greeting, choice of the export, and the write. A connection on which the export is refused ends.
    assert!(turns[0] >= 3, "the first connection was made for nothing: {turns:?}");
}
