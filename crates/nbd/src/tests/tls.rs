//! Encrypted clients, and who may see what: with other people's programs as clients.

use std::path::PathBuf;
use std::process::Output;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::net::TcpStream;

use super::*;
use crate::wire::{OptionReplyHead, reply};
use crate::{ClientTls, RemoteTlsFiles, ServerTls, TlsFiles};

/// A directory of certificates as QEMU and libnbd want it, and a free port.
struct Site {
    dir: TempDir,
    port: u16,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "the test's authority");
        let ca = params.self_signed(&key).expect("a certificate");
        std::fs::write(dir.path().join("ca-cert.pem"), ca.pem()).expect("a file");
        let issuer = Issuer::new(params, key);
        for (file, name) in [("server", "localhost"), ("client", "host-a")] {
            let key = KeyPair::generate().expect("a key");
            let mut params =
                CertificateParams::new(vec![name.to_owned()]).expect("a certificate's content");
            params.distinguished_name.push(DnType::CommonName, name);
            let certificate = params.signed_by(&key, &issuer).expect("a certificate");
            let path = |kind: &str| dir.path().join(format!("{file}-{kind}.pem"));
            std::fs::write(path("cert"), certificate.pem()).expect("a file");
            std::fs::write(path("key"), key.serialize_pem()).expect("a file");
        }
        Self { dir, port: perigee_http::unused_port() }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn options(&self, clients_need_certificates: bool) -> ServerOptions {
        let files = TlsFiles {
            cert: self.path("server-cert.pem"),
            key: self.path("server-key.pem"),
            ca: clients_need_certificates.then(|| self.path("ca-cert.pem")),
            required: true,
        };
        ServerOptions { tls: Some(ServerTls::Files(files)), ..ServerOptions::default() }
    }

    async fn serve(&self, options: ServerOptions) -> Running {
        let address = Listen::Tcp(format!("127.0.0.1:{}", self.port));
        Running::start_with(&Memory::new(1000), &address, options).await
    }

    /// As a client that has the authority's certificate and, if `own`, one of its own.
    fn uri(&self, export: &str, own: bool) -> String {
        let dir = self.dir.path().join(if own { "with" } else { "without" });
        std::fs::create_dir_all(&dir).expect("a directory");
        let files: &[&str] = if own {
            &["ca-cert.pem", "client-cert.pem", "client-key.pem"]
        } else {
            &["ca-cert.pem"]
        };
        for file in files {
            std::fs::copy(self.path(file), dir.join(file)).expect("a copy");
        }
        let (port, dir) = (self.port, dir.display());
        format!("nbds://localhost:{port}/{export}?tls-certificates={dir}")
    }
}

/// Our own client's way to the site.
fn remote(site: &Site, ca: &str, own: bool) -> RemoteExport {
    let own = own.then(|| (site.path("client-cert.pem"), site.path("client-key.pem")));
    let tls = ClientTls::load(&RemoteTlsFiles { ca: site.path(ca), own }).expect("the files");
    let address = Listen::Tcp(format!("localhost:{}", site.port));
    RemoteExport { tls: Some(tls), ..RemoteExport::new(address, "data") }
}

async fn refusal(remote: RemoteExport) -> String {
    let opened = within("a refusal", NbdDevice::open(remote)).await;
    opened.err().expect("a refusal").to_string()
}

#[tokio::test]
async fn our_client_reads_and_writes_through_tls_and_connects_again() {
    let site = Site::new();
    let server = site.serve(site.options(true)).await;
    let device = NbdDevice::open(remote(&site, "ca-cert.pem", true)).await.expect("an export");
    let data = Bytes::from(vec![7; 100_000]);
    device.write(5000, data.clone(), true).await.expect("a write");
    assert_eq!(device.read(5000, 100_000).await.expect("a read"), data);
    server.stop().await;
    let waiting = tokio::spawn(async move { device.read(5000, 10).await });
    let server = site.serve(site.options(true)).await;
    within("the read", waiting).await.expect("no panic").expect("a read of the new server");
    server.stop().await;
}

#[tokio::test]
async fn our_client_wants_a_certificate_that_fits_and_never_falls_back() {
    let site = Site::new();
    let server = site.serve(site.options(true)).await;
    let other = Site::new();
    std::fs::copy(other.path("ca-cert.pem"), site.path("other-ca.pem")).expect("a copy");
    let wrong_ca = refusal(remote(&site, "other-ca.pem", true)).await;
    assert!(wrong_ca.contains("TLS"), "{wrong_ca}");
    let mut wrong_host = remote(&site, "ca-cert.pem", true);
    wrong_host.address = Listen::Tcp(format!("127.0.0.1:{}", site.port));
    let wrong_host = refusal(wrong_host).await;
    assert!(wrong_host.contains("TLS"), "{wrong_host}");
    let nobody = NbdDevice::open(remote(&site, "ca-cert.pem", false)).await;
    assert!(nobody.is_err(), "it has to show a certificate");
    let plain = RemoteExport::new(Listen::Tcp(format!("localhost:{}", site.port)), "data");
    let plain = refusal(plain).await;
    assert!(plain.contains("it wants TLS") && plain.contains("--remote-tls-ca"), "{plain}");
    server.stop().await;
    let open = site.serve(ServerOptions::default()).await;
    let downgraded = refusal(remote(&site, "ca-cert.pem", true)).await;
    assert!(downgraded.contains("does not speak TLS"), "{downgraded}");
    open.stop().await;
}

/// An operator renews a certificate in its place. Until now it counted only after a restart.
#[tokio::test]
async fn renewed_certificates_count_without_a_restart() {
    let site = Site::new();
    let server = site.serve(site.options(true)).await;
    let mut old = remote(&site, "ca-cert.pem", true);
    let open = NbdDevice::open(remote(&site, "ca-cert.pem", true)).await.expect("an export");
    let next = Site::new();
    for of in ["server-key", "server-cert", "client-key", "client-cert", "ca-cert"] {
        let file = format!("{of}.pem");
        std::fs::copy(next.path(&file), site.path(&file)).expect("a copy");
    }
    NbdDevice::open(remote(&site, "ca-cert.pem", true)).await.expect("with the next ones");
    old.patience = Duration::from_secs(60);
    NbdDevice::open(old).await.expect("the client reads its own again too");
    open.read(0, 10).await.expect("what is open stays open");
    std::fs::write(site.path("server-cert.pem"), "half of a certifi").expect("a file");
    NbdDevice::open(remote(&site, "ca-cert.pem", true))
        .await
        .expect("what was read before goes on");
    server.stop().await;
}

async fn program(args: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(args[0]);
    let ran = command.args(&args[1..]).kill_on_drop(true).output();
    within(&format!("{args:?}"), ran).await.expect("the program")
}

fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

#[tokio::test(flavor = "multi_thread")]
async fn libnbd_and_qemu_speak_tls_and_copy_through_it() {
    let site = Site::new();
    let server = site.serve(site.options(false)).await;
    let info = program(&["nbdinfo", &site.uri("data", false)]).await;
    assert!(info.status.success() && said(&info).contains("TLS"), "{info:?}");
    let (sent, back) = (site.path("sent"), site.path("back"));
    let bytes: Vec<u8> = (0..SIZE_BYTES).map(|i| u8::try_from(i % 251).expect("a byte")).collect();
    std::fs::write(&sent, &bytes).expect("a file");
    let (sent, back) = (sent.display().to_string(), back.display().to_string());
    let uri = site.uri("data", false);
    for copy in [[sent.as_str(), uri.as_str()], [uri.as_str(), back.as_str()]] {
        let copied = program(&["nbdcopy", "--no-extents", copy[0], copy[1]]).await;
        assert!(copied.status.success(), "{copied:?}");
    }
    assert!(std::fs::read(&back).expect("the copy") == bytes);
    let creds = format!(
        "tls-creds-x509,id=t,endpoint=client,dir={},verify-peer=on",
        site.path("without").display()
    );
    let image = format!("driver=nbd,host=localhost,port={},export=data,tls-creds=t", site.port);
    let qemu =
        program(&["qemu-io", "--object", &creds, "--image-opts", &image, "-c", "read 0 1M"]).await;
    assert!(said(&qemu).contains("read 1048576/1048576"), "{qemu:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_wants_tls_gives_a_plain_client_nothing() {
    let site = Site::new();
    let server = site.serve(site.options(false)).await;
    let plain = program(&["nbdinfo", &format!("nbd://localhost:{}/data", site.port)]).await;
    assert!(!plain.status.success(), "{plain:?}");
    let mut stream = TcpStream::connect(("127.0.0.1", site.port)).await.expect("a connection");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).await.expect("the greeting");
    stream.write_u32(3).await.expect("the flags");
    let go = GoOption { name: "data".into(), infos: Vec::new() }.encode();
    for (option, data) in
        [(option::LIST, &[][..]), (option::STRUCTURED_REPLY, &[]), (option::GO, &go)]
    {
        stream.write_all(&wire::encode_option(option, data)).await.expect("an option");
        let mut head = [0; OptionReplyHead::BYTES];
        within("a refusal", stream.read_exact(&mut head)).await.expect("a refusal");
        let head = OptionReplyHead::parse(&head).expect("a reply");
        assert_eq!((head.option, head.kind), (option, reply::ERR_TLS_REQD));
        let mut text = vec![0; head.length_bytes as usize];
        stream.read_exact(&mut text).await.expect("the text");
    }
    stream.write_all(&wire::encode_option(option::EXPORT_NAME, b"data")).await.expect("a name");
    let mut rest = Vec::new();
    within("the server to hang up", stream.read_to_end(&mut rest)).await.ok();
    assert!(rest.is_empty(), "{rest:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_sees_the_exports_of_its_certificate_and_no_others() {
    let site = Site::new();
    let list = site.path("access");
    std::fs::write(&list, "data host-a\n").expect("a file");
    let options = ServerOptions { access_list: Some(list.clone()), ..site.options(true) };
    let server = site.serve(options).await;
    let stranger = program(&["nbdinfo", &site.uri("data", false)]).await;
    assert!(!stranger.status.success(), "it has no certificate: {stranger:?}");
    let known = program(&["nbdinfo", "--list", &site.uri("", true)]).await;
    assert!(known.status.success() && said(&known).contains("export=\"data\""), "{known:?}");
    // It counts at once.
    std::fs::write(&list, "data host-b\n").expect("a file");
    let hidden = program(&["nbdinfo", &site.uri("data", true)]).await;
    assert!(!hidden.status.success(), "{hidden:?}");
    assert!(!said(&hidden).contains("this server has"), "{hidden:?}");
    let list = program(&["nbdinfo", "--list", &site.uri("", true)]).await;
    assert!(!said(&list).contains("export=\"data\""), "{list:?}");
    server.stop().await;
}

/// `data` under the name of a layer, which an image is.
struct OfImage(Arc<One>);

impl Exports for OfImage {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        self.0.names()
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        opener: Opener,
        peer: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        let name = if name.starts_with("layer:") { "data" } else { name };
        self.0.open(name, opener, peer)
    }

    fn also_named<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Vec<String>, Problem>> {
        let is_image = name == "layer:7";
        let names = is_image.then(|| "image:debian".to_owned()).into_iter().collect();
        Box::pin(async { Ok(names) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_for_an_image_means_its_layer_too() {
    let site = Site::new();
    let list = site.path("access");
    std::fs::write(&list, "image:* *\n").expect("a file");
    let options = ServerOptions { access_list: Some(list), ..site.options(true) };
    let address = Listen::Tcp(format!("127.0.0.1:{}", site.port));
    let exports = Arc::new(OfImage(One::memory(&Memory::new(1000))));
    let server = Running::serve(exports, &address, options).await;
    let shown = program(&["nbdinfo", &site.uri("layer:7", true)]).await;
    assert!(shown.status.success(), "{shown:?}");
    for hidden in ["layer:8", "data"] {
        let hidden = program(&["nbdinfo", &site.uri(hidden, true)]).await;
        assert!(!hidden.status.success(), "{hidden:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn bytes_in_the_clear_after_starttls_are_not_taken_for_encrypted_ones() {
    let site = Site::new();
    let server = site.serve(site.options(false)).await;
    let mut stream = TcpStream::connect(("127.0.0.1", site.port)).await.expect("a connection");
    let mut sent = 3_u32.to_be_bytes().to_vec();
    sent.extend(wire::encode_option(option::STARTTLS, b""));
    sent.extend(wire::encode_option(option::LIST, b""));
    stream.write_all(&sent).await.expect("all at once");
    let mut rest = Vec::new();
    within("the server to hang up", stream.read_to_end(&mut rest)).await.ok();
    let answers = rest.get(18 + OptionReplyHead::BYTES..).unwrap_or_default();
    assert!(!answers.windows(4).any(|text| text == b"data"), "{answers:?}");
    server.stop().await;
}

#[tokio::test]
async fn certificates_that_do_not_fit_are_refused_at_the_start() {
    let site = Site::new();
    let mut options = site.options(false);
    if let Some(ServerTls::Files(files)) = &mut options.tls {
        files.key = site.path("client-key.pem");
    }
    let exports = One::memory(&Memory::new(0));
    let problem = Server::new(exports, options).err().expect("a refusal");
    assert_eq!(problem.kind, ProblemKind::Invalid);
    assert!(problem.to_string().contains("server-cert.pem"), "{problem}");
}

#[tokio::test]
async fn a_client_beyond_the_limit_is_hung_up_on_and_finds_room_later() {
    let (_dir, path) = socket();
    let options = ServerOptions { clients_max: 1, ..ServerOptions::default() };
    let server = Running::start_with(&Memory::new(0), &Listen::Unix(path.clone()), options).await;
    let first = open(&path, None).await;
    let second = UnixStream::connect(&path).await.expect("a connection");
    assert!(rest(second).await.is_empty());
    drop(first);
    within("room", async {
        while NbdDevice::open(RemoteExport::new(Listen::Unix(path.clone()), "data")).await.is_err()
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn a_server_that_does_not_list_does_not_tell_names_in_errors_either() {
    let (_dir, path) = socket();
    let options = ServerOptions { listing: false, ..ServerOptions::default() };
    let server = Running::start_with(&Memory::new(0), &Listen::Unix(path.clone()), options).await;
    let remote = RemoteExport::new(Listen::Unix(path.clone()), "nothing");
    let problem = within("a refusal", NbdDevice::open(remote)).await.err().expect("a refusal");
    assert!(!problem.why.contains("this server has"), "{problem}");
    let mut stream = greeted(&path).await;
    stream.write_all(&wire::encode_option(option::LIST, b"")).await.expect("an option");
    stream.write_all(&wire::encode_option(option::ABORT, b"")).await.expect("an option");
    let replies = rest(stream).await;
    assert_eq!(replies[12..16], [0x80, 0, 0, 2], "ERR_POLICY");
    server.stop().await;
}

#[test]
fn an_rsa_key_of_an_odd_size_is_refused_with_what_is_wrong_and_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |file: &str| dir.path().join(file);
    let text = |file: &str| path(file).display().to_string();
    let made = std::process::Command::new("timeout")
        .args(["120", "openssl", "req", "-x509", "-newkey", "rsa:2432", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=localhost", "-keyout", &text("key.pem"), "-out", &text("cert.pem")])
        .output()
        .expect("openssl");
    assert!(made.status.success(), "{made:?}");
    let (cert, key) = (path("cert.pem"), path("key.pem"));
    let files = TlsFiles { cert: cert.clone(), key: key.clone(), ca: None, required: true };
    let tls = Some(ServerTls::Files(files));
    let options = ServerOptions { tls, ..ServerOptions::default() };
    let server = Server::new(One::memory(&Memory::new(0)), options).err();
    let files = RemoteTlsFiles { ca: cert.clone(), own: Some((cert, key)) };
    for refused in [server, ClientTls::load(&files).err()] {
        let said = refused.expect("a refusal").to_string();
        assert!(said.contains("key.pem") && said.contains("2432 bits"), "{said}");
        assert!(said.contains("3072"), "{said}");
    }
}

#[tokio::test]
async fn one_address_does_not_lock_the_others_out() {
    let address = format!("127.0.0.1:{}", perigee_http::unused_port());
    let listen = Listen::Tcp(address.clone());
    let options = ServerOptions { clients_max: 8, ..ServerOptions::default() };
    let server = Running::start_with(&Memory::new(0), &listen, options).await;
    let greeted = async |from: [u8; 4]| {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        let mut stream = socket.connect(address.parse().expect("an address")).await?;
        stream.read_exact(&mut [0; 18]).await.map(|_| stream)
    };
    let mut greedy = Vec::new();
    within("seven clients", async {
        while greedy.len() < 7 {
            greedy.extend(greeted([127, 0, 0, 1]).await.ok());
        }
    })
    .await;
    assert!(greeted([127, 0, 0, 1]).await.is_err(), "the limit of one address");
    within("another client", async { while greeted([127, 0, 0, 2]).await.is_err() {} }).await;
    drop(greedy);
    server.stop().await;
}
