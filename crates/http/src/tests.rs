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

use crate::certificate::Credentials;
use crate::identity::Strangers;
use crate::trust::Revoked;
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

    fn issued(&self, to: &PeerIdentity, now: SystemTime, issued_ms: u64) -> Credentials {
        let key = authority::NewKey::generate().expect("a key");
        let pem = self.authority.issue(to, &[HERE], &key.public(), now, issued_ms);
        key.credentials(&pem.expect("a certificate"), self.authority.ca_pem())
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
    start_with(network, Router::new().route("/", get(async |peer: Peer| Json(peer.to_string()))))
        .await
}

async fn start_with(network: Network, router: Router) -> String {
    let listen = format!("127.0.0.1:{}", unused_port());
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
    let now_ms = certificate::now_ms();
    server.revoke(Revoked::from([(host("cloud1").to_string(), now_ms)]));
    let refused = open.get::<String>("/").await.expect_err("revoked");
    assert_eq!(refused.kind, ProblemKind::Forbidden, "{refused}");
    let refused = ask(&network, &address, Expected::Address).await.expect_err("revoked");
    assert_eq!(refused.kind, ProblemKind::Forbidden, "a new connection is told so too: {refused}");
    // A list without it, of somebody who has lost his, changes nothing.
    server.revoke(Revoked::new());
    open.get::<String>("/").await.expect_err("it stays revoked");
    // One that is issued later counts.
    let new = cluster.issued(&host("cloud1"), SystemTime::now(), now_ms + 1);
    client.replace(&new).expect("a new certificate");
    ask(&network, &address, Expected::Address).await.expect("it is enrolled again");
    open.get::<String>("/").await.expect("the open client shows the new one too");
    client.revoke(Revoked::from([(host("home1").to_string(), now_ms)]));
    let refused = ask(&network, &address, Expected::Address).await.expect_err("a revoked server");
    assert!(refused.why.contains("revoked"), "{refused}");
    open.get::<String>("/").await.expect_err("its connection to the revoked server has ended");
}

#[tokio::test]
async fn a_certificate_whose_time_has_passed_since_the_handshake_counts_no_more() {
    let cluster = Cluster::new();
    let (address, _) = cluster.serve(&host("home1")).await;
    let life_ms = u64::try_from(certificate::CERTIFICATE_LIFE.as_millis()).expect("it is short");
    let issued_ms = certificate::now_ms() - life_ms - 1;
    // Its time as the handshake sees it is not over.
    let own = cluster.issued(&host("cloud1"), SystemTime::now(), issued_ms);
    let network = Network::Tls(Identity::new(&own, Strangers::Refused).expect("an identity"));
    let refused = ask(&network, &address, Expected::Address).await.expect_err("expired");
    assert_eq!(refused.kind, ProblemKind::Forbidden, "{refused}");
}

#[tokio::test]
async fn a_stranger_may_call_a_server_by_any_name() {
    let cluster = Cluster::new();
    let identity = cluster.identity(&PeerIdentity::Controller, Strangers::Heard);
    let address = start(Network::Tls(identity)).await;
    let named = address.replace("127.0.0.1", "localhost.localdomain");
    let request = format!("GET / HTTP/1.1\r\nhost: {named}\r\nconnection: close\r\n\r\n");
    let stream = TcpStream::connect(authority_of(&address).expect("an address")).await;
    let fingerprint = cluster.authority.fingerprint().to_owned();
    let stream = identity::connect_to_enrol(
        authority_of(&address).expect("an address"),
        fingerprint,
        stream.expect("a connection"),
    );
    let mut stream = stream.await.expect("a handshake");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn a_certificate_outside_of_its_time_counts_on_neither_side() {
    let cluster = Cluster::new();
    let day = Duration::from_secs(24 * 3600);
    let (address, _) = cluster.serve(&host("home1")).await;
    let network = cluster.network(&PeerIdentity::Controller);
    let long_ago = SystemTime::now() - certificate::CERTIFICATE_LIFE - day;
    for then in [long_ago, SystemTime::now() + day] {
        let wrong = cluster.issued(&host("cloud1"), then, certificate::now_ms());
        let wrong = Identity::new(&wrong, Strangers::Refused).expect("an identity");
        let client = Network::Tls(Arc::clone(&wrong));
        ask(&client, &address, Expected::Address).await.expect_err("the client's");
        let server = start(Network::Tls(wrong)).await;
        let refused = ask(&network, &server, Expected::Address).await.expect_err("the server's");
        assert!(refused.why.contains("certificate"), "{refused}");
    }
}

/// The host could not ask for another one, and had to join again.
#[tokio::test]
async fn a_certificate_of_an_authority_whose_clock_is_wrong_replaces_none() {
    let cluster = Cluster::new();
    let (address, home1) = cluster.serve(&host("home1")).await;
    let network = cluster.network(&PeerIdentity::Controller);
    let (now, day) = (SystemTime::now(), Duration::from_secs(24 * 3600));
    for then in [now - certificate::CERTIFICATE_LIFE - day, now + day] {
        let wrong = cluster.issued(&host("home1"), then, certificate::now_ms());
        let refused = home1.renew(&wrong).expect_err("it does not count now");
        assert!(refused.next.contains("clocks"), "{refused}");
        ask(&network, &address, Expected::Address).await.expect("the former one is used");
    }
    let right = cluster.issued(&host("home1"), now, certificate::now_ms() + 1);
    home1.renew(&right).expect("it counts");
    ask(&network, &address, Expected::Address).await.expect("the new one is used");
}

/// It refused each new one, and had to join again when its own one had ended.
#[test]
fn a_host_whose_own_clock_is_wrong_has_a_new_certificate_before_the_former_one_ends() {
    let (cluster, hour) = (Cluster::new(), Duration::from_secs(3600));
    let ms = |time: Duration| u64::try_from(time.as_millis()).expect("a short time");
    let renew_after = |days: u32| {
        let age = 24 * hour * days;
        let issued_ms = certificate::now_ms() - ms(age);
        let former = cluster.issued(&host("home1"), SystemTime::now() - age, issued_ms);
        let home1 = Identity::new(&former, Strangers::Refused).expect("an identity");
        let new_ms = certificate::now_ms() + ms(2 * hour);
        // Its clock is two hours behind.
        let new = cluster.issued(&host("home1"), SystemTime::now() + 2 * hour, new_ms);
        home1.renew(&new).map(|()| assert_eq!(home1.own().issued_ms, new_ms))
    };
    renew_after(19).expect_err("the controller's clock may be wrong");
    renew_after(21).expect("the former one ends soon");
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
    for path in [&dir, &dir.join(certificate::CA_FILE), &dir.join(certificate::IDENTITY_FILE)] {
        let mode = std::fs::metadata(path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{}", path.display());
    }
    let identity = Identity::load(&dir).expect("an identity");
    let first = identity.own();
    assert_eq!(first.identity, host("home1"));
    let renewed = async |earlier: &Certified| {
        let used = async {
            while identity.own().issued_ms == earlier.issued_ms {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, used).await.expect("the new certificate is used");
    };
    // The time of a file's change is the kernel's, whose clock ticks slowly.
    let tick = || tokio::time::sleep(Duration::from_millis(50));
    tick().await;
    save(&host("home1"));
    // A server that opens its pool looks at the files late.
    tick().await;
    let follow = tokio::spawn(Arc::clone(&identity).follow());
    renewed(&first).await;
    let second = identity.own();
    tick().await;
    save(&host("home1"));
    renewed(&second).await;
    follow.abort();
}

#[test]
fn a_key_that_others_may_read_is_not_used() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("authority");
    let authority = Authority::open(&dir).expect("a new one");
    authority.credentials(&host("home1"), &[HERE]).expect("credentials").save(&dir).expect("saved");
    for file in [authority::CA_KEY_FILE, certificate::IDENTITY_FILE] {
        let mode = std::fs::metadata(dir.join(file)).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
        let open = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(dir.join(file), open).expect("a mode");
    }
    let refused = Authority::open(&dir).err().expect("the key is open");
    assert!(refused.why.contains("640"), "{refused}");
    let refused = Identity::load(&dir).expect_err("the key is open");
    assert!(refused.why.contains("640"), "{refused}");
}

#[test]
fn the_fingerprint_of_an_authority_is_known_without_its_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let made = Authority::open(dir.path()).expect("a new one");
    std::fs::remove_file(dir.path().join(authority::CA_KEY_FILE)).expect("the key");
    let found = Authority::fingerprint_in(dir.path()).expect("a certificate");
    assert_eq!(found, made.fingerprint());
    Authority::fingerprint_in(&dir.path().join("none")).expect_err("there is none");
}

#[test]
fn a_certificate_names_the_addresses_for_which_it_was_made() {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = Authority::open(dir.path()).expect("a new one");
    let at = |last: u8| IpAddr::from([10, 0, 0, last]);
    let own = authority.credentials(&host("home1"), &[at(1), at(2)]).expect("a certificate");
    let own = Identity::new(&own, Strangers::Refused).expect("an identity");
    assert!(own.names(&[at(1)]) && own.names(&[at(2), at(1)]));
    assert!(!own.names(&[at(1), at(3)]));
}

#[test]
fn an_authority_without_its_own_key_is_no_authority() {
    let base = tempfile::tempdir().expect("a directory");
    let dirs = ["a", "b"].map(|name| base.path().join(name));
    for dir in &dirs {
        Authority::open(dir).expect("a new one");
    }
    let key = |dir: &std::path::Path| dir.join(authority::CA_KEY_FILE);
    std::fs::copy(key(&dirs[1]), key(&dirs[0])).expect("the other one's key");
    let refused = Authority::open(&dirs[0]).err().expect("another key");
    assert!(refused.why.contains("not the one of the certificate"), "{refused}");
    std::fs::remove_file(key(&dirs[0])).expect("removed");
    Authority::open(&dirs[0]).err().expect("a lost key is not replaced by another one");
}

#[test]
fn those_who_make_an_authority_together_have_one() {
    let base = tempfile::tempdir().expect("a directory");
    let dir = base.path().join("authority");
    let made: Vec<String> = std::thread::scope(|scope| {
        let open = || Authority::open(&dir).map(|made| made.fingerprint().to_owned());
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|t| t.join().expect("a thread").expect("an authority")).collect()
    });
    assert!(made.iter().all(|fingerprint| *fingerprint == made[0]), "{made:?}");
}

/// It had a name that a host may have, and the controller did not start any more.
#[test]
fn a_note_of_a_host_that_was_not_written_to_its_end_is_no_host() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("authority");
    let authority = Authority::open(&dir).expect("an authority");
    let home1 = HostId::new("home1").expect("a name");
    authority.enrol(&home1, &[HERE]).expect("credentials");
    let note = dir.join("hosts").join("home1");
    std::fs::write(crate::files::unfinished(&note), b"[\"127.").expect("the machine stops");
    assert_eq!(authority.enrolled_here().expect("a list"), [(home1, vec![HERE])]);
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

/// A browser may have an operator's certificate, or a user's password, which it sends with what any page asks for.
#[tokio::test]
async fn a_web_page_does_not_reach_a_server_with_tls_either() {
    let cluster = Cluster::new();
    let server = cluster.identity(&PeerIdentity::Controller, Strangers::Heard);
    let address = start(Network::Tls(server)).await;
    let listen = authority_of(&address).expect("an address");
    let operator = cluster.identity(&PeerIdentity::Operator, Strangers::Refused);
    for has_certificate in [true, false] {
        for (header, is_answered) in [
            ("accept: */*", true),
            ("origin: https://any.example:7", true),
            ("origin: https://evil.example", false),
            ("origin: null", false),
            ("sec-fetch-site: cross-site", false),
        ] {
            let stream = TcpStream::connect(listen).await.expect("connect");
            let expected = Expected::Identity(PeerIdentity::Controller);
            let stream = if has_certificate {
                operator.connect(listen, expected, stream).await
            } else {
                let fingerprint = cluster.authority.fingerprint().to_owned();
                identity::connect_to_enrol(listen, fingerprint, stream).await
            };
            let mut stream = stream.expect("TLS");
            let request = format!(
                "GET / HTTP/1.1\r\nhost: any.example:7\r\nauthorization: Bearer x\r\n{header}\r\n\
                 connection: close\r\n\r\n"
            );
            stream.write_all(request.as_bytes()).await.expect("send");
            let mut answer = Vec::new();
            // How the server hangs up does not matter.
            drop(stream.read_to_end(&mut answer).await);
            let answer = String::from_utf8_lossy(&answer);
            let status = if is_answered { "HTTP/1.1 200" } else { "HTTP/1.1 403" };
            assert!(answer.starts_with(status), "{header}: {answer}");
        }
    }
}

#[tokio::test]
async fn who_joins_talks_to_no_controller_but_the_one_of_its_token() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let identity = cluster.identity(&PeerIdentity::Controller, Strangers::Heard);
    let address = start(Network::Tls(identity)).await;
    let client =
        |fingerprint: &str| Client::to_enrol(&address, fingerprint, PATIENCE).expect("a client");
    let heard = client(cluster.authority.fingerprint()).get::<String>("/").await;
    assert_eq!(heard.as_deref(), Ok("a client without a certificate"));
    let refused = client(other.authority.fingerprint()).get::<String>("/").await;
    let refused = refused.expect_err("another cluster").why;
    assert!(refused.contains("not one of the cluster"), "{refused}");
    // A host of the cluster is no controller.
    let identity = cluster.identity(&host("home1"), Strangers::Heard);
    let address = start(Network::Tls(identity)).await;
    let impostor = Client::to_enrol(&address, cluster.authority.fingerprint(), PATIENCE);
    impostor.expect("a client").get::<String>("/").await.expect_err("it is home1");
}

/// A client that knows nothing of Perigee, trusts this authority, and offers these protocols.
async fn asked_by_others(
    url: &str,
    ca: &[u8],
    name: &str,
    protocols: &[&str],
) -> Result<(), String> {
    use tokio_rustls::rustls::pki_types::pem::PemObject as _;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(ca) {
        roots.add(certificate.expect("PEM")).expect("a certificate");
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|one| one.as_bytes().to_vec()).collect();
    let stream = TcpStream::connect(url.trim_start_matches("https://")).await.expect("connect");
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    connector.connect(name, stream).await.map(drop).map_err(|error| error.to_string())
}

#[tokio::test]
async fn people_s_programs_know_the_controller_by_its_addresses_and_names() {
    let cluster = Cluster::new();
    let called = ["127.0.0.1".to_owned(), "perigee.example".to_owned()];
    let credentials = cluster.authority.controller(&called).expect("a certificate");
    let identity = Identity::new(&credentials, Strangers::Heard).expect("an identity");
    let url = start(Network::Tls(identity)).await;
    for name in ["127.0.0.1", "perigee.example"] {
        asked_by_others(&url, &credentials.ca, name, &[]).await.expect("it is called so");
    }
    let refused =
        asked_by_others(&url, &credentials.ca, "other.example", &[]).await.expect_err("another");
    assert!(refused.contains("not valid for name"), "{refused}");
    let refused = cluster.authority.controller(&["no name".to_owned()]).err().expect("spaces");
    assert_eq!(refused.kind, ProblemKind::Invalid);
}

/// What browsers offer.
const OF_BROWSERS: [&str; 2] = ["h2", "http/1.1"];

/// A certificate for browsers with this name, of an authority of its own, in one file with its key. Also that authority.
fn of_operator(file: &std::path::Path, name: &str) -> Vec<u8> {
    let made = Cluster::new().authority.controller(&[name.to_owned()]).expect("a certificate");
    write_private(file, &made.identity).expect("a file");
    made.ca
}

#[tokio::test]
async fn browsers_see_the_operator_s_certificate_by_its_name_and_hosts_never() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("pages.pem");
    let issuer = of_operator(&file, "pages.example");
    let cluster = Cluster::new();
    // The controller may be called by that name too.
    let called = ["127.0.0.1".to_owned(), "pages.example".to_owned()];
    let own = cluster.authority.controller(&called).expect("a certificate");
    let identity = Identity::new(&own, Strangers::Heard).expect("an identity");
    let url = start(Network::Tls(Arc::clone(&identity))).await;
    let certificate = BrowserCertificate::load(file.clone(), file.clone()).expect("it is good");
    identity.show_besides(Arc::clone(&certificate));
    let browser = async |ca: &[u8], name: &str| asked_by_others(&url, ca, name, &OF_BROWSERS).await;
    browser(&issuer, "pages.example").await.expect("the operator's");
    browser(&own.ca, "127.0.0.1").await.expect("the cluster's, as it has no such name");
    let hosts_own = cluster.identity(&host("home1"), Strangers::Refused);
    let listen = authority_of(&url).expect("an address");
    for name in ["pages.example:1", "127.0.0.1:1"] {
        let stream = TcpStream::connect(listen).await.expect("connect");
        let expected = Expected::Identity(PeerIdentity::Controller);
        hosts_own.connect(name, expected, stream).await.expect("the cluster's");
    }
    asked_by_others(&url, &own.ca, "pages.example", &[]).await.expect("the cluster's");
    // A new certificate of the cluster changes nothing.
    identity.replace(&own).expect("it is used");
    browser(&issuer, "pages.example").await.expect("the operator's");
    std::fs::remove_file(&file).expect("removed");
    let later = of_operator(&file, "pages.example");
    browser(&issuer, "pages.example").await.expect("the one that was read");
    certificate.read_again().expect("it is good");
    browser(&later, "pages.example").await.expect("the new one");
    std::fs::write(&file, "no certificate").expect("written");
    let refused = certificate.read_again().expect_err("it is no certificate");
    assert!(refused.why.contains("there is no certificate"), "{refused}");
    browser(&later, "pages.example").await.expect("the last good one");
}

#[test]
fn what_is_wrong_with_a_certificate_for_browsers_is_said_with_its_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    of_operator(&at("a.pem"), "pages.example");
    of_operator(&at("b.pem"), "pages.example");
    of_operator(&at("address.pem"), "127.0.0.1");
    let pem = std::fs::read_to_string(at("a.pem")).expect("text");
    let (certificate, key) = pem.split_at(pem.rfind("-----BEGIN").expect("a key"));
    write_private(&at("certificate.pem"), certificate.as_bytes()).expect("a file");
    std::fs::write(at("open.key"), key).expect("a file");
    for (certificate, key, why) in [
        ("none.pem", "a.pem", "none.pem"),
        ("open.key", "a.pem", "open.key for browsers: there is no certificate"),
        ("address.pem", "address.pem", "no DNS name"),
        ("a.pem", "none.pem", "none.pem"),
        ("a.pem", "certificate.pem", "certificate.pem for browsers: there is no private key"),
        ("a.pem", "b.pem", "not the key of the first certificate in"),
        ("a.pem", "open.key", "other users may use the key"),
    ] {
        let refused = BrowserCertificate::load(at(certificate), at(key)).expect_err(why);
        assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
        assert!(refused.to_string().contains(why), "{why}: {refused}");
    }
}

/// Sends back what comes over its WebSocket.
async fn echo(request: axum::extract::Request) -> Result<axum::response::Response, Failure> {
    let (answer, opening) = websocket::asked(request)?.answer();
    let (mut other, echo) = tokio::io::duplex(1 << 10);
    tokio::spawn(async move {
        let (mut reads, mut writes) = tokio::io::split(echo);
        tokio::io::copy(&mut reads, &mut writes).await
    });
    tokio::spawn(async move { opening.carry(&mut other, std::future::pending()).await });
    Ok(answer)
}

#[tokio::test]
async fn a_websocket_goes_over_tls_and_other_requests_are_none() {
    let cluster = Cluster::new();
    let controller = cluster.network(&PeerIdentity::Controller);
    let address = start_with(controller, Router::new().route("/", get(echo))).await;
    let network = cluster.network(&host("a"));
    let expected = Expected::Identity(PeerIdentity::Controller);
    let client = network.client(&address, expected, PATIENCE).expect("a client");
    let refused = client.get::<String>("/").await.expect_err("it asks for no WebSocket");
    assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
    let mut socket = client.websocket("/").await.expect("a WebSocket");
    socket.write_all(b"hello").await.expect("it is taken");
    socket.flush().await.expect("it is taken");
    let mut came = [0; 5];
    let read = tokio::time::timeout(PATIENCE, socket.read_exact(&mut came)).await;
    read.expect("in time").expect("it comes back");
    assert_eq!(&came, b"hello");
}
