//! Hosts that know each other by the certificates of their cluster.

use perigee_http::certificate::Credentials;
use perigee_http::identity::Strangers;
use perigee_http::{Authority, Identity, PeerIdentity};

use super::*;
use crate::ServerTls;
use perigee_block::exports::Admission;
use perigee_model::HostId;

/// The authority of a cluster, and a server of its host `home1`.
struct OfCluster {
    authority: Authority,
    _dir: TempDir,
    server: Arc<Identity>,
    address: Listen,
    running: Running,
}

impl OfCluster {
    async fn up() -> Self {
        Self::serving(One::memory(&Memory::new(1000))).await
    }

    async fn serving(exports: Arc<dyn Exports>) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let authority = Authority::open(dir.path()).expect("an authority");
        let server = Identity::new(&issued(&authority, "home1"), Strangers::Refused);
        let server = server.expect("an identity");
        let address = Listen::Tcp(format!("127.0.0.1:{}", perigee_http::unused_port()));
        let tls = Some(ServerTls::Cluster(Arc::clone(&server)));
        let options = ServerOptions { tls, ..ServerOptions::default() };
        let running = Running::serve(exports, &address, options).await;
        Self { authority, _dir: dir, server, address, running }
    }

    fn remote(&self, own: &Credentials) -> RemoteExport {
        let own = Identity::new(own, Strangers::Refused).expect("an identity");
        let remote = RemoteExport::new(self.address.clone(), "data");
        RemoteExport { tls: Some(own.into()), patience: Duration::from_secs(1), ..remote }
    }
}

fn issued(authority: &Authority, host: &str) -> Credentials {
    let identity = PeerIdentity::Host(host.parse().expect("a name"));
    authority.credentials(&identity, &[[127, 0, 0, 1].into()]).expect("credentials")
}

#[tokio::test]
async fn hosts_of_a_cluster_know_each_other_and_nobody_else() {
    let cluster = OfCluster::up().await;
    let own = issued(&cluster.authority, "cloud1");
    let device = NbdDevice::open(cluster.remote(&own)).await.expect("an export");
    device.write(0, Bytes::from_static(b"data"), false).await.expect("a write");
    let other = OfCluster::up().await;
    let operator = cluster.authority.credentials(&PeerIdentity::Operator, &[]);
    for stranger in [issued(&other.authority, "cloud1"), operator.expect("credentials")] {
        let opened = within("a refusal", NbdDevice::open(cluster.remote(&stranger))).await;
        assert!(opened.is_err(), "it is no host of the cluster");
    }
    let plain = RemoteExport::new(cluster.address.clone(), "data");
    assert!(NbdDevice::open(plain).await.is_err(), "it wants TLS");
    cluster.running.stop().await;
    other.running.stop().await;
}

#[tokio::test]
async fn a_server_goes_on_with_its_next_certificate() {
    let cluster = OfCluster::up().await;
    let own = issued(&cluster.authority, "cloud1");
    let before = NbdDevice::open(cluster.remote(&own)).await.expect("an export");
    cluster.server.replace(&issued(&cluster.authority, "home1")).expect("the next one");
    before.read(0, 10).await.expect("an open connection stays open");
    NbdDevice::open(cluster.remote(&own)).await.expect("a new connection");
    cluster.running.stop().await;
}

#[tokio::test]
async fn a_revoked_host_loses_its_open_connection_too() {
    let cluster = OfCluster::up().await;
    let own = issued(&cluster.authority, "cloud1");
    let device = NbdDevice::open(cluster.remote(&own)).await.expect("an export");
    device.read(0, 10).await.expect("not revoked yet");
    let who = PeerIdentity::Host("cloud1".parse().expect("a name")).to_string();
    cluster.server.revoke([(who, perigee_http::certificate::now_ms())].into());
    let lost = async { while device.read(0, 10).await.is_ok() {} };
    within("the end of the connection", lost).await;
    assert!(NbdDevice::open(cluster.remote(&own)).await.is_err(), "no new connection");
    cluster.running.stop().await;
}

/// Host `cloud1` may open its export as long as there is an admission.
struct Strict {
    one: Arc<One>,
    admission: Mutex<Option<Arc<Admission>>>,
}

impl Strict {
    fn admitting(admission: Option<Arc<Admission>>) -> Arc<Self> {
        let one = One::memory(&Memory::new(1000));
        Arc::new(Self { one, admission: Mutex::new(admission) })
    }

    fn opened(&self) -> usize {
        self.one.1.load(Ordering::SeqCst)
    }
}

impl Exports for Strict {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        self.one.names()
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        opener: Opener,
        peer: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        self.one.open(name, opener, peer)
    }

    fn admits<'a>(
        &'a self,
        _: &'a str,
        host: &'a HostId,
    ) -> BoxFuture<'a, Result<Option<Arc<Admission>>, Problem>> {
        assert_eq!(host.as_str(), "cloud1");
        let admission = self.admission.lock().expect("no holder panics").clone();
        Box::pin(async { admission.map(Some).ok_or_else(|| Problem::forbidden("no", "not you")) })
    }
}

#[tokio::test]
async fn a_host_that_may_not_have_an_export_is_refused_before_it_is_opened() {
    let exports = Strict::admitting(None);
    let cluster = OfCluster::serving(exports.clone()).await;
    let own = issued(&cluster.authority, "cloud1");
    let session = Some(Arc::new(ProxyKey::new("server", "data", "start", 0)));
    for session in [None, session] {
        let remote = RemoteExport { session, ..cluster.remote(&own) };
        let refused = within("a refusal", NbdDevice::open(remote)).await;
        let refused = refused.err().expect("a refusal").to_string();
        assert!(refused.contains("not you"), "{refused}");
    }
    assert_eq!(exports.opened(), 0, "it has cost the volume nothing");
    cluster.running.stop().await;
}

#[tokio::test]
async fn a_host_that_is_let_out_loses_what_it_has_open() {
    let admission = Arc::new(Admission::default());
    let exports = Strict::admitting(Some(Arc::clone(&admission)));
    let cluster = OfCluster::serving(exports.clone()).await;
    let own = issued(&cluster.authority, "cloud1");
    let device = NbdDevice::open(cluster.remote(&own)).await.expect("an export");
    device.write(0, Bytes::from_static(b"data"), false).await.expect("a write");
    *exports.admission.lock().expect("no holder panics") = None;
    admission.end();
    let lost = async { while device.read(0, 10).await.is_ok() {} };
    within("the end of the connection", lost).await;
    // Let in again, it opens it anew.
    *exports.admission.lock().expect("no holder panics") = Some(Arc::default());
    let again = NbdDevice::open(cluster.remote(&own)).await.expect("an export");
    assert_eq!(&again.read(0, 4).await.expect("a read")[..], b"data");
    cluster.running.stop().await;
}
