//! Hosts that know each other by the certificates of their cluster.

use perigee_http::identity::{Credentials, Strangers};
use perigee_http::{Authority, Identity, PeerIdentity};

use super::*;
use crate::ServerTls;

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
        let dir = tempfile::tempdir().expect("a directory");
        let authority = Authority::open(dir.path()).expect("an authority");
        let server = Identity::new(&issued(&authority, "home1"), Strangers::Refused);
        let server = server.expect("an identity");
        let address = Listen::Tcp(format!("127.0.0.1:{}", perigee_http::unused_port()));
        let tls = Some(ServerTls::Cluster(Arc::clone(&server)));
        let options = ServerOptions { tls, ..ServerOptions::default() };
        let running = Running::start_with(&Memory::new(1000), &address, options).await;
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
    cluster.server.revoke([(who, perigee_http::authority::now_ms())].into());
    let lost = async { while device.read(0, 10).await.is_ok() {} };
    within("the end of the connection", lost).await;
    assert!(NbdDevice::open(cluster.remote(&own)).await.is_err(), "no new connection");
    cluster.running.stop().await;
}
