//! Images that are copies of another host's.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

use perigee_model::volume::{
    Attach, Attachment, CheckReport, CheckScope, CopyImage, ExportStats, ImageInfo, ImportImage,
    IoStats, Keep, Snapshot,
};
use perigee_model::{ImageName, LayerId, ProblemKind};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::server::{MIB, Server, assert_io, run, said, sample, try_run, until};

const SIZE: u64 = 48 * MIB;

/// A file and an image of it at the home.
struct Source {
    file: String,
    image: ImageInfo,
    _dir: tempfile::TempDir,
}

impl Source {
    async fn at(home: &Server) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("sample.raw").display().to_string();
        std::fs::write(&file, sample(SIZE)).expect("a file");
        let name = ImageName::new("golden").expect("a name");
        let request = ImportImage {
            name,
            source: file.clone(),
            layer: None,
            leave_site: Default::default(),
            format: None,
        };
        let image = home.control.post_long("/v1/images", &request, |_| {}).await.expect("an image");
        Self { file, image, _dir: dir }
    }

    fn equals(&self, uri: &str) {
        run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &self.file, uri]);
    }
}

async fn copy(host: &Server, home: &Server, export: Option<&str>, keep: Keep) -> ImageInfo {
    let nbd_addr = home.nbd_addr.clone();
    let request =
        CopyImage { content: None, nbd_addr, export: export.map(str::to_owned), keep, layer: None };
    host.control.post("/v1/images/golden/copy", &request).await.expect("a copy")
}

async fn info(host: &Server) -> ImageInfo {
    host.control.get("/v1/images/golden").await.expect("an image")
}

async fn stats(server: &Server, volume: &str) -> IoStats {
    let all: Vec<ExportStats> = server.control.get("/v1/stats").await.expect("figures");
    all.iter().find(|s| s.volume.as_str() == volume).map(|s| s.stats).unwrap_or_default()
}

async fn check(host: &Server) -> CheckReport {
    host.control.post_long("/v1/check", &CheckScope::Pool, |_| {}).await.expect("a report")
}

async fn no_faults(host: &Server) {
    let report = check(host).await;
    assert!(report.faults.is_empty() && report.leftovers.is_empty(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_read_a_block_from_its_home_once() {
    let (home, host) = (Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    home.clone_image("data", "golden").await;
    let made = copy(&host, &home, Some("data"), Keep::Read).await;
    assert!(made.layer != source.image.layer, "a volume is no sealed layer");
    let mut clients: Vec<Child> = Vec::new();
    for n in 0..8 {
        let name = format!("c{n}");
        host.clone_image(&name, "golden").await;
        let compare = ["60", "qemu-img", "compare", "-f", "raw", "-F", "raw", &source.file];
        let client = Command::new("timeout")
            .args(compare)
            .arg(host.uri(&name))
            .stdout(Stdio::null())
            .spawn()
            .expect("qemu-img");
        clients.push(client);
    }
    for mut client in clients {
        until("the clients to end", async || client.try_wait().expect("its state").is_some()).await;
        assert!(client.wait().expect("its end").success(), "all read the same");
    }
    let figures = stats(&home, "data").await;
    assert!(figures.read_bytes <= SIZE && figures.read_bytes >= SIZE / 4 * 3, "{figures:?}");
    host.clone_image("late", "golden").await;
    source.equals(&host.uri("late"));
    assert_eq!(stats(&home, "data").await.read_bytes, figures.read_bytes, "nothing twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_of_either_server_loses_nothing_of_a_clone_over_a_copy() {
    let (mut home, mut host) = (Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    let made = copy(&host, &home, None, Keep::Read).await;
    assert_eq!(made.layer, source.image.layer, "it is the same layer");
    host.clone_image("c", "golden").await;
    assert_io(&host.qemu_io("c", &["write -P 7 1M 64k", "write -P 8 30000000 1000", "flush"]));
    assert_io(&host.qemu_io("c", &["read 40M 4M"]));
    // A read is answered before the copy has its blocks: these, and the one around the short write.
    until("what was read to be kept", async || {
        let remote = info(&host).await.remote.expect("it is not complete");
        remote.missing_bytes < SIZE - 4 * MIB
    })
    .await;
    host.kill();
    home.kill();
    host.start_process().await;
    assert_io(&host.qemu_io("c", &["read -P 7 1M 64k", "read 40M 4M"]));
    let away = host.qemu_io("c", &["read 4M 4k"]);
    assert!(said(&away).contains("failed"), "nobody has it: {away:?}");
    home.start_process().await;
    assert_io(&host.qemu_io("c", &["read 4M 4k", "write -P 9 5M 64k"]));
    let path = "/v1/images/golden/keep";
    let _: ImageInfo = host.control.put(path, &Keep::All).await.expect("it goes on");
    until("some of it", async || {
        info(&host).await.remote.is_none_or(|remote| remote.missing_bytes < 40 * MIB)
    })
    .await;
    host.kill();
    host.start_process().await;
    until("all of it", async || info(&host).await.remote.is_none()).await;
    home.kill();
    source.equals(&host.uri("image:golden"));
    assert_io(&host.qemu_io("c", &["read -P 7 1M 64k", "read -P 8 30000000 1000"]));
    assert_io(&host.qemu_io("c", &["read -P 9 5M 64k"]));
    no_faults(&host).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_source_is_gone_goes_on_from_another_host_under_an_open_session() {
    let (mut home, other, host) =
        (Server::start().await, Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    copy(&other, &home, None, Keep::All).await;
    until("another whole image", async || info(&other).await.remote.is_none()).await;
    copy(&host, &home, None, Keep::Read).await;
    host.clone_image("c", "golden").await;
    assert_io(&host.qemu_io("c", &["read 1M 4M", "write -P 7 2M 64k", "flush"]));
    home.kill();
    let reads_all = Command::new("nbdcopy").args([&host.uri("c"), "null:"]).spawn();
    let mut reads_all = reads_all.expect("nbdcopy is there");
    let moved = copy(&host, &other, None, Keep::Read).await;
    let remote = moved.remote.expect("it is not complete");
    assert_eq!(remote.nbd_addr, other.nbd_addr);
    assert!(reads_all.wait().expect("its end").success(), "a session saw the change");
    let _: ImageInfo =
        host.control.put("/v1/images/golden/keep", &Keep::All).await.expect("it goes on");
    until("all of it", async || info(&host).await.remote.is_none()).await;
    source.equals(&host.uri("image:golden"));
    assert_io(&host.qemu_io("c", &["read -P 7 2M 64k"]));
    no_faults(&host).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_the_source_of_the_next_one() {
    let (home, middle, host) =
        (Server::start().await, Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    copy(&middle, &home, None, Keep::Read).await;
    let made = copy(&host, &middle, None, Keep::Never).await;
    assert_eq!(made.layer, source.image.layer);
    host.clone_image("c", "golden").await;
    run(&["nbdcopy", &host.uri("c"), "null:"]);
    source.equals(&host.uri("c"));
    source.equals(&host.tcp_uri(&format!("layer:{}", made.layer)));
    let remote = info(&middle).await.remote.expect("it is not complete");
    assert!(remote.missing_bytes < SIZE / 2, "what went through was kept: {remote:?}");
    assert_eq!(info(&host).await.allocated_bytes, 0, "here nothing is");
    let listed = run(&["nbdinfo", "--list", &host.uri("")]);
    assert!(!listed.contains("export=\"layer:"), "{listed}");
    let unknown = try_run(&["nbdinfo", &host.uri("layer:00000000-0000-0000-0000-000000000001")]);
    assert!(!unknown.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_what_is_not_what_was_sealed_is_never_complete() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    until("its checksums", async || check(&home).await.without_checksums.is_empty()).await;
    let fill = async || {
        let done = host.control.post_long::<ImageInfo>("/v1/images/golden/fill", &(), |_| {});
        done.await
    };
    let flip = |home: &Server| {
        let path = home.pool.join(format!("layers/{}.data", source.image.layer));
        let file = File::options().read(true).write(true).open(path).expect("the layer's data");
        let mut byte = [0];
        file.read_exact_at(&mut byte, 5_000_000).expect("a byte");
        file.write_all_at(&[!byte[0]], 5_000_000).expect("another one");
    };
    flip(&home);
    copy(&host, &home, None, Keep::Read).await;
    let damaged = fill().await.expect_err("its bytes are others");
    assert_eq!(damaged.kind, ProblemKind::Conflict, "{damaged}");
    assert!(damaged.why.contains("4980736"), "the chunk of 64 KiB: {damaged}");
    assert!(info(&host).await.remote.is_some());
    flip(&home);
    home.kill();
    home.start_process().await;
    let only_bad = format!("/v1/images/golden?bad_copy_of={}", source.image.layer);
    let kept = host.control.delete(&only_bad).await.expect_err("nobody has refused its source");
    assert_eq!(kept.kind, ProblemKind::Conflict, "{kept}");
    host.control.delete("/v1/images/golden").await.expect("its deletion");
    copy(&host, &home, None, Keep::Read).await;
    assert_eq!(fill().await.expect("they are the same").remote, None);
    source.equals(&host.uri("image:golden"));
    assert!(!try_run(&["nbdinfo", &home.uri("data@sums")]).status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_image_of_the_same_name_is_not_taken_for_the_one_that_was_there() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    copy(&host, &home, None, Keep::Read).await;
    host.clone_image("c", "golden").await;
    assert_io(&host.qemu_io("c", &["read 0 1M"]));
    home.control.delete("/v1/images/golden").await.expect("its deletion");
    let other = Source::at(&home).await;
    assert!(other.image.layer != source.image.layer);
    // The host connects again by itself.
    home.kill();
    home.start_process().await;
    assert_io(&host.qemu_io("c", &["read 0 1M"]));
    let refused = host.qemu_io("c", &["read 4M 1M"]);
    assert!(said(&refused).contains("failed"), "{refused:?}");
}

/// An authority, and a certificate of it for this machine.
pub fn certificates() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, pem: String| {
        std::fs::write(dir.path().join(name), pem).expect("a file");
    };
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write("ca.pem", params.self_signed(&key).expect("a certificate").pem());
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
    write("cert.pem", params.signed_by(&key, &issuer).expect("a certificate").pem());
    write("key.pem", key.serialize_pem());
    dir
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_wants_tls_is_copied_from_and_proxied() {
    let certificates = certificates();
    let home = Server::start().await.with_tls(certificates.path()).await;
    let host = Server::start().await;
    let source = Source::at(&home).await;
    home.clone_image("data", "golden").await;
    let nbd_addr = home.nbd_addr.clone();
    let request = CopyImage {
        content: None,
        nbd_addr: nbd_addr.clone(),
        export: None,
        keep: Keep::Read,
        layer: None,
    };
    let plain = host.control.post::<ImageInfo>("/v1/images/golden/copy", &request).await;
    let plain = plain.expect_err("it wants TLS").to_string();
    assert!(plain.contains("it wants TLS"), "{plain}");
    let host = host.with_tls(certificates.path()).await;
    copy(&host, &home, None, Keep::Read).await;
    source.equals(&host.uri("image:golden"));
    let attach = Attach { nbd_addr };
    let _: Attachment = host.control.put("/v1/attachments/data", &attach).await.expect("attached");
    assert_io(&host.qemu_io("data", &["write -P 7 1M 64k", "flush", "read -P 7 1M 64k"]));
    assert_io(&home.qemu_io("data", &["read -P 7 1M 64k"]));
}

/// An image of this file, with the layer's id that the controller has chosen.
async fn imported(server: &Server, file: &std::path::Path, layer: LayerId) -> ImageInfo {
    let request = ImportImage {
        name: ImageName::new("golden").expect("a name"),
        source: file.display().to_string(),
        layer: Some(layer),
        leave_site: Default::default(),
        format: None,
    };
    server.control.post_long("/v1/images", &request, |_| {}).await.expect("an image")
}

/// What the controller asks for.
fn copy_by_layer(from: &Server, image: &ImageInfo) -> CopyImage {
    CopyImage {
        content: image.content,
        nbd_addr: from.nbd_addr.clone(),
        export: Some(format!("layer:{}", image.layer)),
        keep: Keep::All,
        layer: Some(image.layer),
    }
}

/// The checksums of a host that serves an image fit what it serves, whatever that is.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_serves_a_changed_image_is_refused_and_the_copy_goes_on_from_another_one() {
    let (home, liar, host) = (Server::start().await, Server::start().await, Server::start().await);
    let dir = tempfile::tempdir().expect("a directory");
    let (right, changed) = (dir.path().join("right.raw"), dir.path().join("changed.raw"));
    let mut bytes = sample(SIZE);
    std::fs::write(&right, &bytes).expect("a file");
    bytes[30 << 20] ^= 1;
    std::fs::write(&changed, &bytes).expect("a file");
    let layer = LayerId(uuid::Uuid::new_v4());
    let image = imported(&home, &right, layer).await;
    let there = imported(&liar, &changed, layer).await;
    assert!(image.content.is_some() && there.content.is_some());
    assert_ne!(image.content, there.content, "one bit is enough");

    let ask = copy_by_layer(&liar, &image);
    let path = "/v1/images/golden/copy";
    let made: ImageInfo = host.control.post(path, &ask).await.expect("it can be used at once");
    assert_eq!(made.content, image.content, "what it has to show");
    host.clone_image("c", "golden").await;
    assert_io(&host.qemu_io("c", &["write -P 7 1M 64k", "flush"]));
    until("the copy to be refused, and nothing to be kept of what came", async || {
        let now = info(&host).await.remote.expect("it is not complete");
        now.refused && now.missing_bytes > SIZE / 2
    })
    .await;
    let again = host.control.post_long::<ImageInfo>("/v1/images/golden/fill", &(), |_| {}).await;
    assert_eq!(again.expect_err("not from there").kind, ProblemKind::Conflict);

    let _: ImageInfo =
        host.control.post(path, &copy_by_layer(&home, &image)).await.expect("another source");
    until("the copy to be complete", async || info(&host).await.remote.is_none()).await;
    assert_eq!(info(&host).await.content, image.content);
    host.clone_image("late", "golden").await;
    let right = right.display().to_string();
    run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &right, &host.uri("late")]);
    assert_io(&host.qemu_io("c", &["read -P 7 1M 64k"]));
    no_faults(&host).await;
    let refused: ProblemKind = host
        .control
        .post::<ImageInfo>(path, &copy_by_layer(&liar, &there))
        .await
        .expect_err("the same layer with other content")
        .kind;
    assert_eq!(refused, ProblemKind::Conflict);
}

/// A snapshot has several layers, and its content is known a little later.
#[tokio::test(flavor = "multi_thread")]
async fn the_content_of_a_snapshot_is_that_of_an_import_with_the_same_bytes() {
    let (home, other) = (Server::start().await, Server::start().await);
    let source = Source::at(&home).await;
    home.clone_image("data", "golden").await;
    assert_io(&home.qemu_io("data", &["write -P 9 3M 1M", "write -z 40M 1M", "flush"]));
    let snapshot = Snapshot { image: ImageName::new("later").expect("a name") };
    let made: ImageInfo =
        home.control.post("/v1/volumes/data/snapshot", &snapshot).await.expect("an image");
    assert!(made.chain.len() > 1, "{made:?}");
    until("its content to be known", async || {
        let now: ImageInfo = home.control.get("/v1/images/later").await.expect("it");
        now.content.is_some()
    })
    .await;
    let now: ImageInfo = home.control.get("/v1/images/later").await.expect("it");
    let mut bytes = std::fs::read(&source.file).expect("the file");
    bytes[3 << 20..4 << 20].fill(9);
    bytes[40 << 20..41 << 20].fill(0);
    let file = source._dir.path().join("later.raw");
    std::fs::write(&file, bytes).expect("a file");
    let same = imported(&other, &file, LayerId(uuid::Uuid::new_v4())).await;
    assert_eq!(now.content, same.content);
}
