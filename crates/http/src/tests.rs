//! Daemons that know each other by the certificates of one authority, and what strangers and impostors get.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::routing::get;
use perigee_model::{HostId, Problem, ProblemKind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::identity::{Revoked, Strangers, revocation};
use crate::*;

/// Whatever a slow machine does meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn host(name: &str) -> PeerIdentity {
    PeerIdentity::Host(HostId::new(name).expect("a name"))
}

struct Cluster {
    authority: Authority,
    _dir: tempfile::TempDir,
}

impl Cluster {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        Self { authority: Authority::open(dir.path()).expect("an authority"), _dir: dir }
    }

    fn identity(&self, of: &PeerIdentity, strangers: Strangers) -> Arc<Identity> {
        let credentials = self.authority.credentials(of, &[HERE]).expect("credentials");
        Identity::new(&credentials, strangers).expect("an identity")
    }

    fn network(&self, of: &PeerIdentity) -> Network {
        Network::Tls(self.identity(of, Strangers::Refused))
    }

    /// Starts a server of this identity that says who asks. Returns its address, `https://HOST:PORT`.
    async fn serve(&self, as_: &PeerIdentity) -> (String, Arc<Identity>) {
        let identity = self.identity(as_, Strangers::Refused);
        (start(Network::Tls(Arc::clone(&identity))).await, identity)
    }
}

/// A server that says who asks.
async fn start(network: Network) -> String {
    let listen = format!("127.0.0.1:{}", unused_port());
    let router = Router::new().route("/", get(async |peer: Peer| Json(peer.to_string())));
    let address = format!("{}{listen}", network.scheme());
    let listens = [Listen::Tcp(listen.clone())];
    tokio::spawn(async move { serve(router, &listens, &network).await });
    let up = async {
        while TcpStream::connect(&listen).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, up).await.expect("the server listens");
    address
}

async fn ask(network: &Network, address: &str, expected: Expected) -> Result<String, Problem> {
    network.client(address, expected, PATIENCE)?.get("/").await
}

#[tokio::test]
async fn both_sides_know_whom_they_talk_to() {
    let cluster = Cluster::new();
    let (address, _) = cluster.serve(&host("home1")).await;
    for (asker, name) in [
        (host("cloud1"), "host cloud1"),
        (PeerIdentity::Controller, "the controller"),
        (PeerIdentity::Operator, "an operator"),
    ] {
        let network = cluster.network(&asker);
        for expected in [Expected::Address, Expected::Identity(host("home1"))] {
            assert_eq!(ask(&network, &address, expected).await.as_deref(), Ok(name));
        }
    }
}

#[tokio::test]
async fn a_server_that_is_somebody_else_is_not_talked_to() {
    let cluster = Cluster::new();
    let network = cluster.network(&PeerIdentity::Controller);
    let (address, _) = cluster.serve(&host("cloud1")).await;
    let refused = ask(&network, &address, Expected::Identity(host("home1"))).await;
    let why = refused.expect_err("it is cloud1").why;
    assert!(why.contains("perigee:host:cloud1") && why.contains("perigee:host:home1"), "{why}");
    // An address that the authority has not given to this host.
    let elsewhere = cluster.authority.credentials(&host("cloud1"), &[[10, 0, 0, 9].into()]);
    let elsewhere = Identity::new(&elsewhere.expect("credentials"), Strangers::Refused);
    let address = start(Network::Tls(elsewhere.expect("an identity"))).await;
    ask(&network, &address, Expected::Address).await.expect_err("not its address");
    ask(&network, &address, Expected::Identity(host("cloud1"))).await.expect("it is cloud1");
    // An operator's certificate does not make a host.
    let (address, _) = cluster.serve(&PeerIdentity::Operator).await;
    ask(&network, &address, Expected::Address).await.expect_err("no host");
}

#[tokio::test]
async fn another_authoritys_certificates_count_nothing() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let (address, _) = cluster.serve(&host("home1")).await;
    let foreign = other.network(&PeerIdentity::Controller);
    ask(&foreign, &address, Expected::Address).await.expect_err("the client does not trust it");
    // A client that trusts this authority and shows a certificate of the other one.
    let mut mixed = other.authority.credentials(&PeerIdentity::Controller, &[]).expect("made");
    mixed.ca = cluster.authority.ca_pem().as_bytes().to_vec();
    let mixed = Network::Tls(Identity::new(&mixed, Strangers::Refused).expect("an identity"));
    ask(&mixed, &address, Expected::Address).await.expect_err("the server does not trust it");
}

/// A request over a plain connection.
async fn plainly(address: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(authority_of(address).expect("an authority")).await?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn a_server_with_tls_does_not_speak_plain_http() {
    let cluster = Cluster::new();
    let (address, _) = cluster.serve(&host("home1")).await;
    let answer = tokio::time::timeout(PATIENCE, plainly(&address)).await.expect("it hangs up");
    assert!(!answer.unwrap_or_default().contains("HTTP"));
    let network = cluster.network(&host("cloud1"));
    let plain = address.replace("https", "http");
    ask(&network, &plain, Expected::Address).await.expect_err("this client speaks TLS only");
}

#[tokio::test]
async fn a_revoked_certificate_counts_on_neither_side_also_on_open_connections() {
    let cluster = Cluster::new();
    let (address, server) = cluster.serve(&host("home1")).await;
    let client = cluster.identity(&host("cloud1"), Strangers::Refused);
    let network = Network::Tls(Arc::clone(&client));
    let open = network.client(&address, Expected::Address, PATIENCE).expect("a client");
    open.get::<String>("/").await.expect("not revoked yet");
    let now_ms = authority::now_ms();
    server.revoke(Revoked::from([revocation(&host("cloud1"), now_ms)]));
    let refused = open.get::<String>("/").await.expect_err("revoked");
    assert_eq!(refused.kind, ProblemKind::Forbidden, "{refused}");
    ask(&network, &address, Expected::Address).await.expect_err("no new connection");
    // One that is issued later counts.
    let later = SystemTime::now() + Duration::from_secs(1);
    let key = authority::NewKey::generate().expect("a key");
    let pem = cluster.authority.issue(&host("cloud1"), &[HERE], &key.public(), later);
    let new = key.credentials(&pem.expect("a certificate"), cluster.authority.ca_pem());
    client.replace(&new, Strangers::Refused).expect("a new certificate");
    ask(&network, &address, Expected::Address).await.expect("it is enrolled again");
    client.revoke(Revoked::from([revocation(&host("home1"), now_ms)]));
    let refused = ask(&network, &address, Expected::Address).await.expect_err("a revoked server");
    assert!(refused.why.contains("revoked"), "{refused}");
}

#[tokio::test]
async fn an_identity_is_kept_in_files_that_only_its_owner_reads_and_followed_there() {
    use std::os::unix::fs::PermissionsExt as _;
    let (cluster, dir) = (Cluster::new(), tempfile::tempdir().expect("a directory"));
    let dir = dir.path().join("identity");
    let missing = Identity::load(&dir).expect_err("nothing is there");
    assert!(missing.next.contains("perigee host join"), "{missing}");
    let save = |of: &PeerIdentity| {
        let credentials = cluster.authority.credentials(of, &[HERE]).expect("credentials");
        credentials.save(&dir).expect("saved");
    };
    save(&host("home1"));
    for path in [&dir, &dir.join(identity::CA_FILE), &dir.join(identity::IDENTITY_FILE)] {
        let mode = std::fs::metadata(path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{}", path.display());
    }
    let identity = Identity::load(&dir).expect("an identity");
    let first = identity.own();
    assert_eq!(first.identity, host("home1"));
    let follow = tokio::spawn(Arc::clone(&identity).follow(dir.clone()));
    // The time of a file's change is the kernel's, whose clock ticks slowly.
    tokio::time::sleep(Duration::from_millis(50)).await;
    save(&host("home1"));
    let renewed = async {
        while identity.own().issued_ms == first.issued_ms {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, renewed).await.expect("the new certificate is used");
    follow.abort();
}

#[tokio::test]
async fn an_authority_that_is_opened_again_is_the_same() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = Authority::open(dir.path()).expect("a new one");
    let again = Authority::open(dir.path()).expect("the same");
    assert_eq!(first.fingerprint(), again.fingerprint());
    let address = {
        let credentials = first.credentials(&host("home1"), &[HERE]).expect("credentials");
        let identity = Identity::new(&credentials, Strangers::Refused).expect("an identity");
        start(Network::Tls(identity)).await
    };
    let credentials = again.credentials(&PeerIdentity::Controller, &[]).expect("credentials");
    let identity = Identity::new(&credentials, Strangers::Refused).expect("an identity");
    ask(&Network::Tls(identity), &address, Expected::Address).await.expect("one authority");
}

#[tokio::test]
async fn a_web_page_does_not_reach_a_plain_server() {
    let address = start(Network::Plain).await;
    let mut stream =
        TcpStream::connect(authority_of(&address).expect("an address")).await.expect("connect");
    let request = b"GET / HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.expect("send");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("evil.example"), "{answer}");
    let asked = ask(&Network::Plain, &address, Expected::Address).await;
    assert_eq!(asked.as_deref(), Ok("a client over plain TCP"));
}
