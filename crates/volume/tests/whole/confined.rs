//! Data that may not leave its site: tries each way out of the site, between servers whose connections come from an
//! address that the home knows as another site's.

use std::path::Path;

use perigee_http::Client;
use perigee_model::home::{HomeState, ServerAddresses, TakeVolume, VolumeHome};
use perigee_model::leave_site::{
    FindLayers, FoundLayers, LeaveSite, LeaveSiteAsker, LeaveSiteSet, SetLayersLeaveSite,
    SetLeaveSite, SetLeaveSiteAs, SiteAddress, SiteMap,
};
use perigee_model::volume::{
    Attach, Attachment, CopyImage, CreateVolume, ImageInfo, Keep, Snapshot, VolumeInfo,
    VolumeSource,
};
use perigee_model::{ImageName, Problem, ProblemKind, SiteId, VolumeName};

use crate::copies::certificates;
use crate::server::{MIB, Server, assert_io, said, until};

/// Stands in no other file.
const MARKER: &str = "the-held-marker-4711";

fn site(name: &str) -> SiteId {
    SiteId::new(name).expect("a name")
}

fn volume_name(name: &str) -> VolumeName {
    VolumeName::new(name).expect("a name")
}

fn image_name(name: &str) -> ImageName {
    ImageName::new(name).expect("a name")
}

/// From now on the home takes what comes over TCP for another site's, or for its own.
async fn tell_sites(home: &Server, of_tcp: &str) {
    let address = "127.0.0.1".parse().expect("an address");
    let hosts = vec![SiteAddress { address, site: site(of_tcp) }];
    let map = SiteMap { here: site("home"), hosts, teller: None };
    home.control.put::<()>("/v1/sites", &map).await.expect("that it is told");
}

/// A volume with the marker in it.
async fn make_confined(home: &Server, name: &str, leave_site: LeaveSite) {
    let new = CreateVolume::new(volume_name(name), Some(8 * MIB), VolumeSource::Empty);
    let new = CreateVolume { leave_site, ..new };
    let made: VolumeInfo = home.control.post("/v1/volumes", &new).await.expect("a volume");
    assert_eq!(made.leave_site, leave_site);
    let marker = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(marker.path(), MARKER.repeat(4096)).expect("the marker");
    let write = format!("write -s {} 1M 64k", marker.path().display());
    assert_io(&home.qemu_io(name, &[&write, "flush"]));
}

async fn snapshot(home: &Server, volume: &str, image: &str) -> ImageInfo {
    let ask = Snapshot { image: image_name(image) };
    home.control.post(&format!("/v1/volumes/{volume}/snapshot"), &ask).await.expect("an image")
}

async fn copy(
    from: &Server,
    to: &Server,
    image: &str,
    export: Option<String>,
) -> Result<ImageInfo, Problem> {
    let nbd_addr = from.nbd_addr.clone();
    let ask = CopyImage { content: None, nbd_addr, export, keep: Keep::All, layer: None };
    to.control.post(&format!("/v1/images/{image}/copy"), &ask).await
}

async fn attach(to: &Server, home: &Server, volume: &str) {
    let attach = Attach { nbd_addr: home.nbd_addr.clone() };
    let path = format!("/v1/attachments/{volume}");
    let _: Attachment = to.control.put(&path, &attach).await.expect("an attachment");
}

async fn take(from: &Server, to: &Server, volume: &str) -> Result<VolumeHome, Problem> {
    let path = format!("/v1/volumes/{volume}/home");
    let home = from.control.get::<VolumeHome>(&path).await.expect("its home").home;
    let HomeState::Here { tenure, .. } = home else { panic!("{home:?}") };
    let addresses = |server: &Server| ServerAddresses {
        nbd_addr: server.nbd_addr.clone(),
        control_url: format!("http://{}", server.control_addr),
    };
    let ask = TakeVolume { from: addresses(from), to: addresses(to), tenure, grant: None };
    to.control.post(&format!("/v1/volumes/{volume}/take"), &ask).await
}

async fn set(
    home: &Server,
    of: &str,
    leave_site: LeaveSite,
    confirmed: bool,
) -> Result<LeaveSiteSet, Problem> {
    let ask = SetLeaveSite { leave_site, confirmed };
    home.control.put(&format!("/v1/{of}/leave-site"), &ask).await
}

/// The files below a directory that have the marker.
fn marked(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(marked(&path));
        } else if path.is_file() {
            let bytes = std::fs::read(&path).expect("a file");
            if bytes.windows(MARKER.len()).any(|window| window == MARKER.as_bytes()) {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

fn is_refusal(refused: &str) -> bool {
    refused.contains("leave-site: never") && refused.contains("site cloud")
}

#[tokio::test(flavor = "multi_thread")]
async fn confined_data_leave_no_trace_at_another_site() {
    let certificates = certificates();
    let home = Server::start().await.with_tls(certificates.path()).await;
    let host = Server::start().await.with_tls(certificates.path()).await;
    tell_sites(&home, "cloud").await;
    make_confined(&home, "data", LeaveSite::Never).await;
    let sealed = snapshot(&home, "data", "seen").await;
    assert_eq!(sealed.leave_site, LeaveSite::Never, "a snapshot of it is confined");
    let clone = home.clone_image("clone", "seen").await;
    assert_eq!(clone.leave_site, LeaveSite::Never, "and a clone of that");

    // A layer has checksums a moment after it is sealed.
    until("the checksums to be there", async || {
        let export = Some(format!("layer:{}@sums", sealed.layer));
        let refused = copy(&home, &host, "seen", export).await.expect_err("a copy");
        !refused.to_string().contains("there is none of that name")
    })
    .await;
    for export in [
        None,
        Some(format!("layer:{}", sealed.layer)),
        Some(format!("layer:{}@sums", sealed.layer)),
        Some(format!("layer:{}@visible@sums", sealed.layer)),
        Some("data".to_owned()),
    ] {
        let refused = copy(&home, &host, "seen", export.clone()).await.expect_err("a copy");
        assert!(is_refusal(&refused.to_string()), "{export:?}: {refused}");
    }
    let nbd_addr = home.nbd_addr.clone();
    for export in ["data".to_owned(), format!("layer:{}@own", sealed.layer)] {
        let source = VolumeSource::Remote { nbd_addr: nbd_addr.clone(), export };
        let new = CreateVolume::new(volume_name("over"), None, source);
        let refused = host.control.post::<VolumeInfo>("/v1/volumes", &new).await;
        let refused = refused.expect_err("a head over it").to_string();
        assert!(is_refusal(&refused), "{refused}");
    }
    for volume in ["data", "clone"] {
        let refused = take(&home, &host, volume).await.expect_err("a move");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        assert!(is_refusal(&refused.to_string()), "{refused}");
    }
    let http =
        Client::new(&format!("http://{}", home.control_addr), std::time::Duration::from_secs(60));
    let refused = http.expect("a client").get_response("/v1/volumes/data/data").await;
    assert!(is_refusal(&refused.expect_err("its content").to_string()));

    attach(&host, &home, "data").await;
    let marker = MARKER.repeat(4096);
    let dump = tempfile::tempdir().expect("a directory");
    let copied = dump.path().join("data.raw").display().to_string();
    crate::server::run(&["nbdcopy", &host.uri("data"), &copied]);
    let read = std::fs::read(&copied).expect("what was read");
    let (start, end) = (1 << 20, (1 << 20) + (64 << 10));
    assert_eq!(&read[start..end], &marker.as_bytes()[..end - start], "it is read remotely");
    assert_io(&host.qemu_io("data", &["write -P 7 2M 4k", "flush", "read -P 7 2M 4k"]));
    let outside = crate::server::try_run(&[
        "nbdinfo",
        &format!(
            "nbds://{}/data?tls-certificates={}",
            host.nbd_addr,
            certificates.path().display()
        ),
    ]);
    assert!(!outside.status.success(), "it goes on from there to no third host");

    let dir = host.pool.parent().expect("a directory").to_owned();
    assert_eq!(marked(&dir), Vec::<String>::new());

    // The scan finds what is there: without the policy a copy is.
    make_confined(&home, "free", LeaveSite::Allowed).await;
    snapshot(&home, "free", "public").await;
    copy(&home, &host, "public", None).await.expect("a copy");
    until("the copy to be complete", async || {
        let info = host.control.get::<ImageInfo>("/v1/images/public").await.expect("the copy");
        info.remote.is_none()
    })
    .await;
    assert!(!marked(&dir).is_empty(), "the scan finds a copy");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_site_opens_confined_data_over_no_plain_link() {
    let (mut home, host) = (Server::start().await, Server::start().await);
    tell_sites(&home, "cloud").await;
    make_confined(&home, "data", LeaveSite::Never).await;
    attach(&host, &home, "data").await;
    let refused = said(&host.qemu_io("data", &["read 0 4k"]));
    for part in ["leave-site: never", "site cloud", "--tls-cert"] {
        assert!(refused.contains(part), "{refused}");
    }
    // The home keeps what it was told, and what it has to hold.
    home.kill();
    home.start_process().await;
    let refused = said(&host.qemu_io("data", &["read 0 4k"]));
    assert!(is_refusal(&refused), "{refused}");
    tell_sites(&home, "home").await;
    assert_io(&host.qemu_io("data", &["read 0 4k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_changes_counts_for_what_is_open_and_for_copies_within_the_site() {
    let (home, host) = (Server::start().await, Server::start().await);
    tell_sites(&home, "home").await;
    make_confined(&home, "data", LeaveSite::Allowed).await;
    let image = snapshot(&home, "data", "seen").await;
    attach(&host, &home, "data").await;
    copy(&home, &host, "seen", None).await.expect("a copy");
    let layers = vec![image.layer];
    let find = FindLayers { layers: layers.clone(), volume: None };
    let found: FoundLayers = host.control.post("/v1/layers/find", &find).await.expect("them");
    assert_eq!((found.layers, found.users), (layers, vec!["image seen".to_owned()]));

    let done = set(&home, "images/seen", LeaveSite::Never, false).await.expect("it is confined");
    assert_eq!(done.also, ["volume data"], "it stands on what is confined now");
    let never = LeaveSite::Never;
    let info: VolumeInfo = home.control.get("/v1/volumes/data").await.expect("the volume");
    assert_eq!(info.leave_site, never);
    // What is copied within the site from now on is confined there, too.
    let other = Server::start().await;
    let info = copy(&home, &other, "seen", None).await.expect("a copy within the site");
    assert_eq!(info.leave_site, never);
    carry_within_the_site(&home, &other).await;

    let refused = set(&home, "images/seen", LeaveSite::Allowed, false).await;
    let refused = refused.expect_err("nobody confirmed it");
    assert!(refused.to_string().contains("--yes"), "{refused}");
    set(&home, "images/seen", LeaveSite::Allowed, true).await.expect("it may leave");
    let info: ImageInfo = home.control.get("/v1/images/seen").await.expect("the image");
    assert_eq!(info.leave_site, LeaveSite::Allowed);
}

/// The volume is confined at its new home, and what is made of it there.
async fn carry_within_the_site(home: &Server, other: &Server) {
    tell_sites(other, "cloud").await;
    take(home, other, "data").await.expect("a move within the site");
    let info: VolumeInfo = other.control.get("/v1/volumes/data").await.expect("the volume");
    assert_eq!(info.leave_site, LeaveSite::Never);
    let clone = VolumeSource::Volume(volume_name("data"));
    let clone = other.create_from("clone", clone, None).await;
    assert_eq!(clone.leave_site, LeaveSite::Never);
    let refused = take(other, home, "clone").await.expect_err("a move to another site");
    assert!(is_refusal(&refused.to_string()), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_move_has_left_at_the_home_is_confined_with_the_volume() {
    let (home, other) = (Server::start().await, Server::start().await);
    for server in [&home, &other] {
        tell_sites(server, "home").await;
    }
    make_confined(&home, "data", LeaveSite::Allowed).await;
    take(&home, &other, "data").await.expect("a move");
    let find = FindLayers { layers: Vec::new(), volume: Some(volume_name("data")) };
    let found: FoundLayers = home.control.post("/v1/layers/find", &find).await.expect("them");
    assert_eq!(found.users, ["volume data, which departed,"], "it is found by its name");
    take(&other, &home, "data").await.expect("and back");
    let found: FoundLayers = home.control.post("/v1/layers/find", &find).await.expect("them");
    assert_eq!(found.layers.len(), 1, "nobody has said yet that it is needed no longer");
    let done = set(&home, "volumes/data", LeaveSite::Never, false).await.expect("it is confined");
    assert!(done.layers.contains(&found.layers[0]), "{done:?}");
    assert!(done.may_leave.is_empty(), "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_site_has_open_is_closed_when_the_policy_becomes_never() {
    let (home, host) = (Server::start().await, Server::start().await);
    tell_sites(&home, "cloud").await;
    make_confined(&home, "data", LeaveSite::Allowed).await;
    let image = snapshot(&home, "data", "seen").await;
    let uri = home.tcp_uri(&format!("layer:{}", image.layer));
    let mut reader = std::process::Command::new("qemu-io")
        .args(["-r", "-f", "raw", &uri])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("qemu-io");
    let mut stdin = reader.stdin.take().expect("a pipe");
    use std::io::{BufRead as _, Write as _};
    let mut stdout = std::io::BufReader::new(reader.stdout.take().expect("a pipe"));
    writeln!(stdin, "read 0 4k").expect("a request");
    let mut line = String::new();
    stdout.read_line(&mut line).expect("an answer");
    assert!(line.contains("read 4096/4096"), "{line}");
    set(&home, "volumes/data", LeaveSite::Never, false).await.expect("it is confined");
    set(&home, "images/seen", LeaveSite::Never, false).await.expect("it is confined");
    writeln!(stdin, "read 1M 4k").expect("a request");
    drop(stdin);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut stdout, &mut rest).expect("an answer");
    let mut error = String::new();
    let mut stderr = reader.stderr.take().expect("a pipe");
    std::io::Read::read_to_string(&mut stderr, &mut error).expect("an answer");
    reader.wait().expect("its end");
    assert!(format!("{rest}{error}").contains("failed"), "{rest}{error}");
    drop(host);
}

/// Two tenants have clones of an image that an admin has confined and shared.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_does_not_release_what_others_use() {
    let home = Server::start().await;
    tell_sites(&home, "home").await;
    make_confined(&home, "base", LeaveSite::Never).await;
    let image = snapshot(&home, "base", "debian").await;
    for clone in ["acme~v", "blue~v"] {
        home.clone_image(clone, "debian").await;
    }
    snapshot(&home, "acme~v", "acme~snap").await;
    let tenant = perigee_model::TenantName::new("acme").expect("a name");
    let asker = Some(LeaveSiteAsker { tenant, shared: Vec::new() });
    let set = async |of: &str, leave_site, confirmed| {
        let set = SetLeaveSite { leave_site, confirmed };
        let ask = SetLeaveSiteAs { set, asker: asker.clone() };
        home.control.put::<LeaveSiteSet>(&format!("/v1/{of}/leave-site"), &ask).await
    };
    let policy =
        async || home.control.get::<ImageInfo>("/v1/images/debian").await.expect("it").leave_site;
    for of in ["volumes/acme~v", "images/acme~snap"] {
        for confirmed in [false, true] {
            let refused = set(of, LeaveSite::Allowed, confirmed).await.expect_err("others use it");
            assert_eq!(refused.kind, ProblemKind::Forbidden, "{refused}");
            let said = refused.to_string();
            assert!(!said.contains("blue") && !said.contains("debian"), "{said}");
        }
        set(of, LeaveSite::Never, false).await.expect("its own part");
    }
    let ask = SetLayersLeaveSite {
        of: FindLayers { layers: vec![image.layer], volume: None },
        leave_site: LeaveSite::Allowed,
        asker: asker.clone(),
    };
    home.control.put::<()>("/v1/layers/leave-site", &ask).await.expect("nothing is its own");
    assert_eq!(policy().await, LeaveSite::Never);

    // What nobody else uses it may release.
    make_confined(&home, "acme~own", LeaveSite::Never).await;
    snapshot(&home, "acme~own", "acme~kept").await;
    let done = set("volumes/acme~own", LeaveSite::Allowed, true).await.expect("its own");
    assert_eq!(done.also, ["image acme~kept"]);
    let info: VolumeInfo = home.control.get("/v1/volumes/acme~own").await.expect("it");
    assert_eq!(info.leave_site, LeaveSite::Allowed);
}
