//! What a host may do at the volume server of another one: only what the controller has allowed it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use perigee_block::device::Device as _;
use perigee_http::certificate::Credentials;
use perigee_http::certificate::now_ms;
use perigee_http::identity::Strangers;
use perigee_http::{Authority, Client, Expected, Identity, Listen, Network, PeerIdentity};
use perigee_model::grant::{Allowed, Grant, SignedGrant};
use perigee_model::home::{
    Depart, Departed, DepartedLayer, ServerAddresses, TakeVolume, VolumeHome,
};
use perigee_model::home::{HomeState, Tenure};
use perigee_model::replica::{PinReplica, SealReplica, SealedReplica};
use perigee_model::volume::{
    AdmittedHosts, AllAdmittedHosts, CopyImage, EpochChange, EpochChanges, EpochIssued, ImageInfo,
    Keep, Snapshot, VolumeEpochChange, VolumeInfo,
};
use perigee_model::{HostId, Problem, ProblemKind, SiteId, VolumeName};
use perigee_nbd::{ClientTls, NbdDevice, RemoteExport};
use tempfile::TempDir;

use crate::handover::take;
use crate::server::{MIB, Server, assert_io, until};

const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

fn data() -> VolumeName {
    VolumeName::new("data").expect("a name")
}

fn cloud() -> SiteId {
    SiteId::new("cloud").expect("a name")
}

/// A volume server of host `home1` with the volume `data`, and what host `cloud1` of its cluster has.
struct Hosts {
    _dir: TempDir,
    authority: Authority,
    home: Server,
    other: Network,
}

impl Hosts {
    async fn up() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let authority = Authority::open(&dir.path().join("authority")).expect("an authority");
        let issue = |name: &str| authority.credentials(&PeerIdentity::Host(host(name)), &[LOCAL]);
        let own = dir.path().join("identity");
        issue("home1").expect("credentials").save(&own).expect("files");
        let other = Identity::new(&issue("cloud1").expect("credentials"), Strangers::Refused);
        let other = Network::Tls(other.expect("an identity"));
        let home = Server::start().await.with_tls(&own).await;
        home.create("data", 4 * MIB).await;
        Self { _dir: dir, authority, home, other }
    }

    fn credentials(&self, name: &str) -> Credentials {
        self.authority.credentials(&PeerIdentity::Host(host(name)), &[LOCAL]).expect("credentials")
    }

    /// Opens an export of a server as this host does.
    async fn open(&self, name: &str, at: &Server, export: &str) -> Result<NbdDevice, Problem> {
        let identity = Identity::new(&self.credentials(name), Strangers::Refused);
        let mut remote = RemoteExport::new(Listen::Tcp(at.nbd_addr.clone()), export.to_owned());
        remote.tls = Some(ClientTls::from(identity.expect("an identity")));
        remote.patience = Duration::from_secs(1);
        NbdDevice::open(remote).await
    }

    /// As host `cloud1` asks.
    fn asker(&self, grant: Option<&SignedGrant>) -> Client {
        let url = format!("https://{}", self.home.control_addr);
        let client = self.other.client(&url, Expected::Address, Duration::from_secs(60));
        client.expect("a client").granted(grant)
    }

    fn grant(&self, to: &str, allows: Allowed) -> SignedGrant {
        let grant = Grant { host: host(to), allows, until_ms: now_ms() + 3_600_000 };
        self.authority.sign(&grant).expect("a grant")
    }

    async fn issued(&self) -> EpochChange {
        let info: VolumeInfo = self.home.control.get("/v1/volumes/data").await.expect("a volume");
        let to: EpochIssued =
            self.home.control.post("/v1/volumes/data/epoch/issue", &()).await.expect("an epoch");
        EpochChange { from: info.epoch, to: to.epoch }
    }

    async fn tenure(&self) -> Tenure {
        let home: VolumeHome =
            self.home.control.get("/v1/volumes/data/home").await.expect("its home");
        match home.home {
            HomeState::Here { tenure, .. } => tenure,
            other => panic!("{other:?}"),
        }
    }
}

fn refused<T>(asked: Result<T, Problem>) -> Problem {
    let problem = asked.err().expect("a refusal");
    assert_eq!(problem.kind, ProblemKind::Forbidden, "{problem}");
    problem
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_changes_the_writer_only_where_the_controller_has_allowed_it() {
    let hosts = Hosts::up().await;
    let change = hosts.issued().await;
    let back = EpochChange { from: change.to, to: change.from };
    let all = vec![VolumeEpochChange { volume: data(), change }];
    let batch = EpochChanges { changes: all.clone() };
    let own = hosts.grant("cloud1", Allowed::Epochs(all.clone()));
    let of_another = hosts.grant("cloud2", Allowed::Epochs(all));
    let of_nothing = hosts.grant("cloud1", Allowed::Epochs(Vec::new()));
    for grant in [None, Some(&of_another), Some(&of_nothing)] {
        let asker = hosts.asker(grant);
        refused(asker.post::<VolumeInfo>("/v1/volumes/data/epoch", &change).await);
        refused(asker.post::<()>("/v1/batch/epochs", &batch).await);
    }
    let asker = hosts.asker(Some(&own));
    asker.post::<()>("/v1/batch/epochs", &batch).await.expect("the controller has allowed it");
    let now: VolumeInfo =
        asker.post("/v1/volumes/data/epoch", &back).await.expect("and the way back");
    assert_eq!(now.epoch, change.from);
    let next = hosts.issued().await;
    refused(asker.post::<VolumeInfo>("/v1/volumes/data/epoch", &next).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_takes_a_volume_only_where_the_controller_has_allowed_it() {
    let hosts = Hosts::up().await;
    let tenure = hosts.tenure().await;
    let to = ServerAddresses {
        nbd_addr: "127.0.0.1:1".to_owned(),
        control_url: "https://127.0.0.1:2".to_owned(),
    };
    let depart = Depart { tenure, to };
    let (seal, go) = ("/v1/volumes/data/seal", "/v1/volumes/data/depart");
    let of_another = hosts.grant("cloud2", Allowed::Home { volume: data(), tenure });
    let other = VolumeName::new("other").expect("a name");
    let of_other = hosts.grant("cloud1", Allowed::Home { volume: other, tenure });
    let replica = hosts.grant("cloud1", Allowed::Replica { volume: data(), site: cloud() });
    for grant in [None, Some(&of_another), Some(&of_other), Some(&replica)] {
        let asker = hosts.asker(grant);
        refused(asker.post::<Vec<DepartedLayer>>(seal, &()).await);
        refused(asker.post::<Departed>(go, &depart).await);
    }
    let later = hosts.grant("cloud1", Allowed::Home { volume: data(), tenure: tenure.next() });
    refused(hosts.asker(Some(&later)).post::<Departed>(go, &depart).await);
    assert_eq!(hosts.tenure().await, tenure, "it is still there");
    let own = hosts.grant("cloud1", Allowed::Home { volume: data(), tenure });
    let asker = hosts.asker(Some(&own));
    asker.post::<Vec<DepartedLayer>>(seal, &()).await.expect("the controller has allowed it");
    asker.post::<Departed>(go, &depart).await.expect("the controller has allowed it");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_makes_a_replica_only_where_the_controller_has_allowed_it() {
    let hosts = Hosts::up().await;
    let (seal, pins) = ("/v1/volumes/data/replica/seal", "/v1/volumes/data/replica/pins");
    let ask = SealReplica { replica: cloud() };
    let pin = PinReplica { replica: cloud(), layer: None };
    let edge = SiteId::new("edge").expect("a name");
    let elsewhere = hosts.grant("cloud1", Allowed::Replica { volume: data(), site: edge });
    for grant in [None, Some(&elsewhere)] {
        let asker = hosts.asker(grant);
        refused(asker.post::<SealedReplica>(seal, &ask).await);
        refused(asker.post::<()>(pins, &pin).await);
    }
    let own = hosts.grant("cloud1", Allowed::Replica { volume: data(), site: cloud() });
    let asker = hosts.asker(Some(&own));
    asker.post::<SealedReplica>(seal, &ask).await.expect("the controller has allowed it");
    asker.post::<()>(pins, &pin).await.expect("the controller has allowed it");
}

/// Over TLS, at a real server. The table of callers is `control/callers.rs`.
#[tokio::test(flavor = "multi_thread")]
async fn the_control_port_is_closed_to_hosts_operators_and_strangers() {
    let hosts = Hosts::up().await;
    let url = format!("https://{}", hosts.home.control_addr);
    let operator = hosts.authority.credentials(&PeerIdentity::Operator, &[]).expect("credentials");
    let operator = Identity::new(&operator, Strangers::Refused).expect("an identity");
    let patience = Duration::from_secs(60);
    let operator = Network::Tls(operator).client(&url, Expected::Address, patience);
    let stranger = Client::to_enrol(&url, hosts.authority.fingerprint(), patience);
    for (who, asker) in [
        ("a host", hosts.asker(None)),
        ("an operator", operator.expect("a client")),
        ("nobody", stranger.expect("a client")),
    ] {
        for (method, path) in [
            ("GET", "/v1/volumes/data/data?length_bytes=4096"),
            ("PUT", "/v1/volumes/data/data"),
            ("DELETE", "/v1/volumes/data"),
            ("GET", "/v1/volumes"),
            ("GET", "/v1/clients"),
            ("GET", "/v1/logins"),
            ("POST", "/v1/boot"),
            ("GET", "/v1/attachments"),
            ("PUT", "/v1/attachments/data"),
            ("DELETE", "/v1/attachments/data"),
            ("POST", "/v1/trace/start"),
            ("PUT", "/v1/sites"),
        ] {
            let method = perigee_http::Method::from_bytes(method.as_bytes()).expect("a method");
            let asked = asker.send_body::<serde_json::Value>(method.clone(), path, "").await;
            let problem = asked.expect_err("a refusal");
            // A server that wants a certificate ends the handshake of a client without one.
            let is_refused = problem.kind == ProblemKind::Forbidden
                || who == "nobody" && problem.kind == ProblemKind::Unavailable;
            assert!(is_refused, "{who} {method} {path}: {problem}");
        }
    }
    let plain = Client::new(&format!("http://{}", hosts.home.control_addr), patience);
    plain.expect("a client").get::<VolumeInfo>("/v1/volumes/data").await.expect_err("no TLS");
    let still: VolumeInfo = hosts.home.control.get("/v1/volumes/data").await.expect("it is there");
    assert_eq!(still.size_bytes, 4 * MIB);
}

/// Over NBD with certificates: a host that was broken into knows the name and the epoch of every volume.
#[tokio::test(flavor = "multi_thread")]
async fn another_host_opens_only_the_volumes_that_the_controller_has_let_it_open() {
    let hosts = Hosts::up().await;
    let made = hosts.home.create("other", 4 * MIB).await;
    let identity = hosts.other.identity().expect("it has one");
    let open = async |export: &str| {
        let mut remote =
            RemoteExport::new(Listen::Tcp(hosts.home.nbd_addr.clone()), export.to_owned());
        remote.tls = Some(ClientTls::from(Arc::clone(identity)));
        remote.patience = Duration::from_secs(1);
        NbdDevice::open(remote).await
    };
    let image = Snapshot { image: "seen".parse().expect("a name") };
    let seen: ImageInfo =
        hosts.home.control.post("/v1/volumes/other/snapshot", &image).await.expect("an image");
    let layer = seen.layer;
    let of_other = [
        "other".to_owned(),
        format!("other@{}", made.epoch),
        "other@layers".to_owned(),
        format!("other@since:{layer}"),
    ];
    for export in &of_other {
        let refused = open(export).await.err().expect("nobody has let it").to_string();
        assert!(refused.contains("has not let host cloud1"), "{export}: {refused}");
    }
    let allow = |host: &str| format!("/v1/volumes/other/hosts/{host}");
    let hosts_of = async || {
        hosts
            .home
            .control
            .get::<AdmittedHosts>("/v1/volumes/other/hosts")
            .await
            .expect("a list")
            .hosts
    };
    hosts.home.control.put::<()>(&allow("cloud2"), &()).await.expect("another host may");
    open("other").await.err().expect("that is not this one");
    hosts.home.control.put::<()>(&allow("cloud1"), &()).await.expect("this one may");
    assert_eq!(hosts_of().await, [host("cloud1"), host("cloud2")]);
    let device = open(&format!("other@{}", made.epoch)).await.expect("it may");
    device.read(0, 4096).await.expect("a read");
    open("other@layers").await.expect("and what is below it");
    open("data").await.err().expect("it is still not for other volumes");
    // It can't let itself open one.
    let asker = hosts.asker(None);
    refused(asker.put::<()>("/v1/volumes/data/hosts/cloud1", &()).await);
    refused(asker.get::<AdmittedHosts>("/v1/volumes/data/hosts").await);
    drop(device);
    hosts.home.control.delete(&allow("cloud1")).await.expect("not any more");
    open("other").await.err().expect("not any more");
    hosts.home.control.delete("/v1/volumes/other").await.expect("deleted");
    assert!(hosts_of().await.is_empty(), "the next volume of this name is another one");
}

/// The name of a tenant's image is easy to guess, and the ids of layers are not.
#[tokio::test(flavor = "multi_thread")]
async fn another_host_reads_an_image_only_if_it_was_told_its_layer_and_nobody_tells_it_by_mistake()
{
    let hosts = Hosts::up().await;
    assert_io(&hosts.home.qemu_io("data", &["write -P 7 0 4k"]));
    let ask = Snapshot { image: "acme~base".parse().expect("a name") };
    let image: ImageInfo =
        hosts.home.control.post("/v1/volumes/data/snapshot", &ask).await.expect("an image");
    for export in ["image:acme~base", "image:acme~base@sums", "image:acme~base@visible@sums"] {
        let refused = hosts.open("cloud1", &hosts.home, export).await.err().expect("a refusal");
        assert!(refused.to_string().contains("by the id of its layer"), "{export}: {refused}");
    }
    let asker = hosts.asker(None);
    let seen: VolumeInfo = asker.get("/v1/volumes/data").await.expect("a host may look at it");
    assert!(seen.chain.is_empty(), "{seen:?}");
    let own: VolumeInfo = hosts.home.control.get("/v1/volumes/data").await.expect("a volume");
    assert!(own.chain.contains(&image.layer));
    refused(asker.get::<ImageInfo>("/v1/images/acme~base").await);
    // The controller tells it.
    let export = format!("layer:{}", image.layer);
    let device = hosts.open("cloud1", &hosts.home, &export).await.expect("it was told");
    assert_eq!(device.read(0, 1).await.expect("a read")[..], [7]);
    let dir = tempfile::tempdir().expect("a directory");
    hosts.credentials("cloud1").save(dir.path()).expect("files");
    let other = Server::start().await.with_tls(dir.path()).await;
    let nbd_addr = hosts.home.nbd_addr.clone();
    let ask = CopyImage {
        content: None,
        nbd_addr,
        export: Some(export),
        keep: Keep::All,
        layer: Some(image.layer),
    };
    let copy = "/v1/images/acme~base";
    other.control.post::<ImageInfo>(&format!("{copy}/copy"), &ask).await.expect("a copy");
    until("the copy to be complete", async || {
        other.control.get::<ImageInfo>(copy).await.expect("the copy").remote.is_none()
    })
    .await;
}

fn forbidden(opened: Result<NbdDevice, Problem>) {
    let problem = opened.err().expect("a refusal").to_string();
    assert!(problem.contains("has not let host"), "{problem}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_let_in_stays_so_over_a_restart_and_loses_its_open_session_when_it_is_let_out() {
    let mut hosts = Hosts::up().await;
    let path = "/v1/volumes/data/hosts/cloud1";
    hosts.home.control.put::<()>(path, &()).await.expect("it may");
    hosts.home.kill();
    hosts.home.start_process().await;
    let device = hosts.open("cloud1", &hosts.home, "data").await.expect("it still may");
    device.read(0, 4096).await.expect("a read");
    hosts.home.control.delete("/v1/volumes/data/hosts/cloud2").await.expect("another host");
    device.read(0, 4096).await.expect("that is not this one");
    hosts.home.control.delete(path).await.expect("not any more");
    until("the session to end", async || device.read(0, 4096).await.is_err()).await;
    until("no session to be left", async || {
        let info: VolumeInfo = hosts.home.control.get("/v1/volumes/data").await.expect("a volume");
        info.sessions == 0
    })
    .await;
    forbidden(hosts.open("cloud1", &hosts.home, "data").await);
    // Whoever is at the host itself goes on.
    assert_io(&hosts.home.qemu_io("data", &["read 0 4k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_admits_no_host_until_the_controller_has_told_it_and_knows_the_list_after_a_restart()
{
    let mut hosts = Hosts::up().await;
    hosts.home.create("other", 4 * MIB).await;
    forbidden(hosts.open("cloud1", &hosts.home, "data").await);
    let control = &hosts.home.control;
    // Many volumes are beyond the 2 MiB that a request has otherwise.
    let name = |number| VolumeName::new(format!("{number}-{}", "v".repeat(50))).expect("a name");
    let mut all = AllAdmittedHosts::default();
    all.volumes.extend((0..30_000).map(|number| (name(number), vec![host("cloud1")])));
    all.volumes.insert(data(), vec![host("cloud1")]);
    control.put::<()>("/v1/admissions", &all).await.expect("who needs what");
    assert_eq!(control.get::<AllAdmittedHosts>("/v1/admissions").await.expect("the list"), all);
    let device = hosts.open("cloud1", &hosts.home, "data").await.expect("it may");
    device.read(0, 4096).await.expect("a read");
    forbidden(hosts.open("cloud2", &hosts.home, "data").await);
    forbidden(hosts.open("cloud1", &hosts.home, "other").await);
    hosts.home.kill();
    hosts.home.start_process().await;
    forbidden(hosts.open("cloud2", &hosts.home, "data").await);
    hosts.open("cloud1", &hosts.home, "data").await.expect("it may");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_has_moved_is_opened_by_the_hosts_that_its_new_home_was_told_of() {
    let hosts = Hosts::up().await;
    let dir = tempfile::tempdir().expect("a directory");
    hosts.credentials("cloud1").save(dir.path()).expect("files");
    let new = Server::start().await.with_tls(dir.path()).await;
    let addresses = |server: &Server| ServerAddresses {
        nbd_addr: server.nbd_addr.clone(),
        control_url: format!("https://{}", server.control_addr),
    };
    let path = "/v1/volumes/data/hosts";
    let far = AdmittedHosts { hosts: vec![host("far1")] };
    hosts.home.control.put::<()>(path, &far).await.expect("it may");
    let both = AdmittedHosts { hosts: vec![host("far1"), host("home1")] };
    new.control.put::<()>(path, &both).await.expect("before it comes");
    assert_io(&hosts.home.qemu_io("data", &["write -P 7 0 4k"]));
    let (from, to) = (addresses(&hosts.home), addresses(&new));
    let tenure = hosts.tenure().await;
    let grant = Some(hosts.grant("cloud1", Allowed::Home { volume: data(), tenure }));
    let ask = TakeVolume { from, to, tenure, grant };
    until("the volume to be taken", async || match take(&new, &ask).await {
        Ok(_) => true,
        Err(problem) => {
            assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
            false
        }
    })
    .await;
    let info: VolumeInfo = new.control.get("/v1/volumes/data").await.expect("the volume");
    let export = format!("data@{}", info.epoch);
    let device = hosts.open("far1", &new, &export).await.expect("it may");
    assert_eq!(device.read(0, 1).await.expect("a read")[..], [7]);
    forbidden(hosts.open("far2", &new, &export).await);
    // The old home has it attached and serves it on: for its own clients, and for those who do not know the new home yet.
    assert_io(&hosts.home.qemu_io(&export, &["read -P 7 0 4k"]));
    forbidden(hosts.open("far2", &hosts.home, &export).await);
    let device = hosts.open("far1", &hosts.home, &export).await.expect("it may");
    assert_eq!(device.read(0, 1).await.expect("a read")[..], [7]);
}
