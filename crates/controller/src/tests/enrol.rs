//! Hosts that join over real TLS, and what those may do who have joined, and those who have not.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use perigee_http::authority::NewKey;
use perigee_http::certificate::Credentials;
use perigee_http::identity::Strangers;
use perigee_http::trust::{Revoked, list_id};
use perigee_http::{Client, Expected, Identity, Listen, Network, Peer, PeerIdentity};
use perigee_model::enrol::{
    CheckHost, CheckToken, Enrol, Enrolled, HostSeen, JoinToken, RenewCertificate, SetSite,
};
use perigee_model::tenant::{Me, NewTenant, Quota, Role};
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, Problem, ProblemKind, SiteId, TenantName, UserName};

use crate::api::{Caller, Sender, TABLE};

use super::{PATIENCE, TIMING, Traffic, wait_for};
use crate::cluster::{Settings, Timing};
use crate::supervisor::Supervisor;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

struct Secure {
    dir: tempfile::TempDir,
    supervisor: Arc<Supervisor>,
    url: String,
}

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

impl Secure {
    async fn up() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (supervisor, url) = serve(&dir).await;
        Self { dir, supervisor, url }
    }

    async fn restart(&mut self) {
        self.supervisor.stop().await;
        (self.supervisor, self.url) = serve(&self.dir).await;
    }

    async fn token(&self, name: &str) -> JoinToken {
        let made = crate::hosts::enrol::token(
            &self.supervisor.cluster,
            host(name),
            Some(self.url.clone()),
        );
        made.await.expect("a token")
    }

    async fn join(&self, token: &JoinToken, address: IpAddr) -> Result<Credentials, Problem> {
        let client = Client::to_enrol(&token.controller_url, &token.fingerprint, PATIENCE)?;
        let key = NewKey::generate()?;
        let (host, secret) = (token.host.clone(), token.secret.clone());
        let (public_key, addresses) = (key.public().to_hex(), vec![address]);
        let ask = Enrol { host, secret, public_key, addresses };
        let enrolled: Enrolled = client.post("/v1/enrol", &ask).await?;
        Ok(key.credentials(&enrolled.certificate, &enrolled.ca))
    }

    /// A host that has joined.
    async fn joined(&self, name: &str) -> Client {
        let own = self.join(&self.token(name).await, HERE).await.expect("it joins");
        self.client(&own)
    }

    fn client(&self, own: &Credentials) -> Client {
        let network = Network::Tls(Identity::new(own, Strangers::Refused).expect("an identity"));
        let expected = Expected::Identity(PeerIdentity::Controller);
        network.client(&self.url, expected, PATIENCE).expect("a client")
    }
}

/// A controller with its API. Returns where it is.
async fn serve(dir: &tempfile::TempDir) -> (Arc<Supervisor>, String) {
    let supervisor =
        Supervisor::start(dir.path(), TIMING, Traffic::Tls(Vec::new())).await.expect("start");
    let listen = format!("127.0.0.1:{}", perigee_http::unused_port());
    let (router, address) = (crate::api::router(supervisor.cluster.clone()), listen.clone());
    let network = supervisor.cluster.network.clone();
    supervisor.spawn(async move {
        perigee_http::serve(router, &[Listen::Tcp(address)], &network).await.expect("serve");
    });
    wait_for("the API", async || tokio::net::TcpStream::connect(&listen).await.ok()).await;
    (supervisor, format!("https://{listen}"))
}

fn forbidden<T: std::fmt::Debug>(result: Result<T, Problem>) {
    let problem = result.expect_err("it must be refused");
    assert_eq!(problem.kind, ProblemKind::Forbidden, "{problem}");
}

fn addresses() -> HostAddresses {
    let url = "https://127.0.0.1:1".to_owned();
    let site = SiteId::new("here").expect("a name");
    HostAddresses {
        tunnel: None,
        site,
        agent_url: url.clone(),
        volume_url: url,
        nbd_addr: "127.0.0.1:1".to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_has_joined_reports_as_itself_and_as_nobody_else() {
    let secure = Secure::up().await;
    let client = secure.joined("home1").await;
    client.put::<()>("/v1/hosts/home1", &addresses()).await.expect("it is home1");
    a_host_does_not_choose_another_site(&secure, &client).await;
    forbidden(client.put::<()>("/v1/hosts/cloud1", &addresses()).await);
    forbidden(client.get::<serde_json::Value>("/v1/jobs").await);
    forbidden(client.post::<serde_json::Value>("/v1/hosts/cloud1/token", &()).await);
    // Addresses that are not encrypted are not taken.
    let plain = HostAddresses { agent_url: "http://127.0.0.1:1".to_owned(), ..addresses() };
    client.put::<()>("/v1/hosts/home1", &plain).await.expect_err("plain HTTP");
    // Without a certificate only joining is possible.
    let token = secure.token("cloud1").await;
    let stranger = Client::to_enrol(&secure.url, &token.fingerprint, PATIENCE).expect("a client");
    forbidden(stranger.put::<()>("/v1/hosts/home1", &addresses()).await);
    forbidden(stranger.get::<serde_json::Value>("/v1/hosts").await);
    secure.supervisor.stop().await;
}

/// Its site says what data it may have.
async fn a_host_does_not_choose_another_site(secure: &Secure, client: &Client) {
    let site = SiteId::new("there").expect("a name");
    let moved = HostAddresses { site: site.clone(), ..addresses() };
    let refused = client.put::<()>("/v1/hosts/home1", &moved).await.expect_err("nobody agreed");
    assert!(refused.next.contains("perigee host site home1 there"), "{refused}");
    forbidden(client.put::<()>("/v1/hosts/home1/site", &SetSite { site: site.clone() }).await);
    let cluster = &secure.supervisor.cluster;
    let agreed = async |site| crate::hosts::set_site(cluster, &host("home1"), site).await;
    agreed(site).await.expect("an admin agrees");
    client.put::<()>("/v1/hosts/home1", &moved).await.expect("an admin has agreed");
    client.put::<()>("/v1/hosts/home1", &addresses()).await.expect_err("it is elsewhere now");
    agreed(addresses().site).await.expect("an admin agrees");
    client.put::<()>("/v1/hosts/home1", &addresses()).await.expect("back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_good_for_one_host_and_one_time() {
    let secure = Secure::up().await;
    let token = secure.token("home1").await;
    let other = JoinToken { host: host("cloud1"), ..token.clone() };
    forbidden(secure.join(&other, HERE).await.map(drop));
    let wrong = JoinToken { secret: "0".repeat(token.secret.len()), ..token.clone() };
    forbidden(secure.join(&wrong, HERE).await.map(drop));
    secure.join(&token, HERE).await.expect("the first time");
    forbidden(secure.join(&token, HERE).await.map(drop));
    // An address has one host, and the token is still good for another address.
    let token = secure.token("cloud1").await;
    let taken = secure.join(&token, HERE).await.map(drop).expect_err("home1 has it");
    assert_eq!(taken.kind, ProblemKind::Conflict, "{taken}");
    secure.join(&token, [127, 0, 0, 2].into()).await.expect("its own address");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_hears_how_the_controller_sees_it_before_it_joins_and_after() {
    let secure = Secure::up().await;
    let token = secure.token("home1").await;
    let listener = std::net::TcpListener::bind((HERE, 0)).expect("a port");
    let (open, unreached) = (listener.local_addr().expect("its address"), (HERE, 1).into());
    let others = (IpAddr::from([127, 0, 0, 3]), open.port()).into();
    let check = CheckHost { reach: vec![open, unreached, others] };
    let stranger = Client::to_enrol(&token.controller_url, &token.fingerprint, PATIENCE);
    let stranger = stranger.expect("a client");
    let ask = async |secret: &str| {
        let (host, secret, check) = (host("home1"), secret.to_owned(), check.clone());
        stranger.post::<HostSeen>("/v1/enrol/check", &CheckToken { host, secret, check }).await
    };
    forbidden(ask("5e").await);
    let seen = ask(&token.secret).await.expect("its token counts");
    let not: Vec<_> = seen.unreached.iter().map(|one| one.address).collect();
    assert_eq!((not, seen.site, seen.sites), (vec![unreached], None, vec![]));
    assert_eq!(seen.untried, [others], "a token lets nobody look at other machines");
    assert_eq!(seen.unreached[0].why, "no connection");
    let cluster = &secure.supervisor.cluster;
    let bind = async |address: &str| {
        crate::hosts::enrol::bind_token(cluster, &host("home1"), address).await.expect("bound");
    };
    bind("127.0.0.3").await;
    let seen = ask(&token.secret).await.expect("its token counts");
    assert_eq!(seen.untried, [open, unreached], "the token is for another address");
    bind("127.0.0.1").await;
    let own = secure.join(&token, HERE).await.expect("the token is still good");
    forbidden(ask(&token.secret).await);
    let client = secure.client(&own);
    client.put::<()>("/v1/hosts/home1", &addresses()).await.expect("it registers");
    let seen: HostSeen = client.post("/v1/hosts/home1/check", &check).await.expect("it is a host");
    assert_eq!((seen.unreached.len(), seen.site), (1, Some(addresses().site)));
    assert_eq!(seen.untried, [others], "it is not at an address of its certificate");
    client.get::<serde_json::Value>("/v1/hosts/home1").await.expect("a host sees itself");
    forbidden(client.post::<HostSeen>("/v1/hosts/home2/check", &check).await);
    forbidden(client.get::<serde_json::Value>("/v1/hosts/home2").await);
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_by_its_host_until_it_is_revoked() {
    let secure = Secure::up().await;
    let client = secure.joined("home1").await;
    let key = NewKey::generate().expect("a key");
    let ask = RenewCertificate { public_key: key.public().to_hex() };
    forbidden(client.post::<Enrolled>("/v1/hosts/cloud1/certificate", &ask).await);
    let renewed = client.post::<Enrolled>("/v1/hosts/home1/certificate", &ask).await;
    let renewed = renewed.expect("the next one");
    let renewed = secure.client(&key.credentials(&renewed.certificate, &renewed.ca));
    assert_eq!(renewed.get::<Revoked>("/v1/revoked").await.expect("none"), Revoked::new());
    let revoked = crate::hosts::enrol::revoke_host(&secure.supervisor.cluster, host("home1")).await;
    assert!(revoked.expect("revoked").was_enrolled);
    forbidden(renewed.get::<Revoked>("/v1/revoked").await);
    forbidden(client.post::<Enrolled>("/v1/hosts/home1/certificate", &ask).await);
    // The host may join again.
    let again = secure.joined("home1").await;
    let revoked = again.get::<Revoked>("/v1/revoked").await.expect("it counts");
    assert!(revoked.contains_key("perigee:host:home1"), "{revoked:?}");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_knows_the_list_of_revoked_certificates_is_not_sent_it_again() {
    let secure = Secure::up().await;
    let client = secure.joined("home1").await;
    let revoke = async |name: &str| {
        let done = crate::hosts::enrol::revoke_host(&secure.supervisor.cluster, host(name)).await;
        done.expect("revoked");
    };
    revoke("gone1").await;
    let all = client.get::<Revoked>("/v1/revoked").await.expect("the list");
    assert_eq!(all.len(), 1, "{all:?}");
    let path = format!("/v1/revoked?known={}", list_id(&all));
    let news = client.get::<Revoked>(&path).await.expect("nothing");
    assert_eq!(news, Revoked::new(), "it is the same list");
    revoke("gone2").await;
    let all = client.get::<Revoked>(&path).await.expect("the new list");
    assert_eq!(all.len(), 2, "{all:?}");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_joins_again_ends_what_had_joined_under_its_name() {
    let secure = Secure::up().await;
    let thief = secure.joined("home1").await;
    thief.get::<Revoked>("/v1/revoked").await.expect("it has joined");
    let own = secure.joined("home1").await;
    forbidden(thief.get::<Revoked>("/v1/revoked").await);
    own.put::<()>("/v1/hosts/home1", &addresses()).await.expect("the one that joined last");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_reports_only_addresses_of_its_certificate() {
    let secure = Secure::up().await;
    let client = secure.joined("home1").await;
    let elsewhere = "https://127.0.0.9:1".to_owned();
    for wrong in [
        HostAddresses { agent_url: elsewhere.clone(), ..addresses() },
        HostAddresses { volume_url: "https://home1.example:1".to_owned(), ..addresses() },
        HostAddresses { nbd_addr: "127.0.0.9:1".to_owned(), ..addresses() },
    ] {
        let refused = client.put::<()>("/v1/hosts/home1", &wrong).await.expect_err("not its own");
        assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
    }
    client.put::<()>("/v1/hosts/home1", &addresses()).await.expect("its own");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_that_has_lost_its_store_still_refuses_what_was_revoked() {
    let mut secure = Secure::up().await;
    let home = secure.join(&secure.token("home1").await, HERE).await.expect("it joins");
    crate::hosts::enrol::revoke_host(&secure.supervisor.cluster, host("home1"))
        .await
        .expect("revoked");
    secure.supervisor.stop().await;
    for entry in std::fs::read_dir(secure.dir.path()).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            std::fs::remove_file(path).expect("the store is lost");
        }
    }
    (secure.supervisor, secure.url) = serve(&secure.dir).await;
    forbidden(secure.client(&home).put::<()>("/v1/hosts/home1", &addresses()).await);
    let again = secure.joined("home1").await;
    again.put::<()>("/v1/hosts/home1", &addresses()).await.expect("it has joined again");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_hosts_with_one_token_one_joins() {
    let secure = Secure::up().await;
    let token = secure.token("home1").await;
    let both = [secure.join(&token, HERE), secure.join(&token, HERE)];
    let joined = futures_util::future::join_all(both).await;
    assert_eq!(joined.iter().filter(|joined| joined.is_ok()).count(), 1);
    // A new token makes the earlier one useless.
    let (first, second) = (secure.token("cloud1").await, secure.token("cloud1").await);
    let elsewhere = [127, 0, 0, 2].into();
    forbidden(secure.join(&first, elsewhere).await.map(drop));
    secure.join(&second, elsewhere).await.expect("the newest");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_that_starts_again_knows_its_hosts_and_who_is_revoked() {
    let mut secure = Secure::up().await;
    let home = secure.join(&secure.token("home1").await, HERE).await.expect("it joins");
    let elsewhere = secure.token("cloud1").await;
    let cloud = secure.join(&elsewhere, [127, 0, 0, 2].into()).await.expect("it joins");
    let unused = secure.token("home2").await;
    crate::hosts::enrol::revoke_host(&secure.supervisor.cluster, host("cloud1"))
        .await
        .expect("revoked");
    secure.restart().await;
    secure.client(&home).put::<()>("/v1/hosts/home1", &addresses()).await.expect("it is known");
    forbidden(secure.client(&cloud).get::<Revoked>("/v1/revoked").await);
    let unused = JoinToken { controller_url: secure.url.clone(), ..unused };
    secure.join(&unused, [127, 0, 0, 3].into()).await.expect("the token is still good");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_renews_its_own_certificate_by_itself() {
    let dir = tempfile::tempdir().expect("a directory");
    let timing = Timing { own_renewal: std::time::Duration::from_millis(10), ..TIMING };
    let started = Supervisor::start(dir.path(), timing, Traffic::Tls(Vec::new())).await;
    let supervisor = started.expect("start");
    let own = supervisor.cluster.network.identity().expect("it has one");
    let first_ms = own.own().issued_ms;
    let is_newer = async || (own.own().issued_ms > first_ms).then_some(());
    wait_for("a newer certificate", is_newer).await;
    supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_does_everything_until_operators_are_revoked() {
    let secure = Secure::up().await;
    let cluster = &secure.supervisor.cluster;
    let own = cluster.authority.credentials(&PeerIdentity::Operator, &[]);
    let operator = secure.client(&own.expect("credentials"));
    operator.get::<serde_json::Value>("/v1/jobs").await.expect("an operator may");
    operator.post::<()>("/v1/operators/revoke", &()).await.expect("an operator may");
    forbidden(operator.get::<serde_json::Value>("/v1/jobs").await);
    secure.supervisor.stop().await;
}

/// The authority's key may be there from a time with TLS.
#[tokio::test]
async fn a_controller_without_tls_gives_no_certificates() {
    let dir = tempfile::tempdir().expect("a directory");
    let supervisor = Supervisor::start(dir.path(), TIMING, Traffic::Plain).await.expect("start");
    let (cluster, home1) = (&supervisor.cluster, host("home1"));
    let key = NewKey::generate().expect("a key").public().to_hex();
    forbidden(crate::hosts::enrol::renew(cluster, &home1, &key).await);
    forbidden(
        crate::hosts::enrol::token(cluster, home1, Some("https://127.0.0.1:1".to_owned())).await,
    );
    supervisor.stop().await;
}

/// A route that is added later is closed for all but admins until the table names it, and what the table names is a route.
#[test]
fn the_table_of_callers_has_every_operation_once() {
    let routes = crate::api::operations();
    // These are not in the document, which describes the API; the last ones are the doors of the repository.
    let others = [
        "GET /v1/openapi.json",
        "GET /metrics",
        "* /v1/data",
        "* /v1/data/{tenant}",
        "* /v1/data/{tenant}/{*path}",
        "* /dav",
        "* /dav/{*path}",
    ];
    let pages = crate::web::routes();
    let others = others.map(str::to_owned).into_iter().chain(pages);
    let mut served: Vec<String> =
        routes.iter().map(|(method, path)| format!("{} {path}", method.to_uppercase())).collect();
    served.extend(others);
    served.sort();
    let named = TABLE.iter().map(|(_, method, path)| format!("{method} {path}"));
    let mut named: Vec<String> = named.collect();
    named.sort();
    assert_eq!(named, served);
}

#[test]
fn hosts_and_strangers_get_nothing_of_the_api_but_what_the_table_names() {
    let a_host = Sender::Host(host("home1"));
    let operator = Sender::User(Caller::admin(&Peer::Local));
    let mut open = Vec::new();
    for (method, path) in crate::api::operations() {
        let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("a method");
        // Every parameter is the host's own name: the most that it could ask for.
        let path = path.replace("{host}", "home1");
        let may = |sender: &Sender| crate::api::may(sender, &method, &path);
        assert!(may(&operator), "{method} {path}");
        assert!(!may(&Sender::Controller), "{method} {path}");
        assert_eq!(may(&Sender::Stranger), path.starts_with("/v1/enrol"), "{method} {path}");
        if may(&a_host) {
            open.push(format!("{method} {path}"));
        }
    }
    open.sort();
    let table = [
        "GET /v1/hosts/home1",
        "GET /v1/revoked",
        "POST /v1/hosts/home1/certificate",
        "POST /v1/hosts/home1/check",
        "POST /v1/hosts/home1/shuts-down",
        "POST /v1/hosts/home1/stops",
        "PUT /v1/hosts/home1",
    ];
    assert_eq!(open, table);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_is_known_by_its_token_and_the_controller_by_its_fingerprint() {
    let secure = Secure::up().await;
    let cluster = &secure.supervisor.cluster;
    let tenant = TenantName::new("acme").expect("a name");
    let user = UserName::new("ann").expect("a name");
    let new = NewTenant { name: tenant.clone(), quota: Quota::default() };
    crate::tenants::create_tenant(cluster, new).await.expect("a tenant");
    crate::accounts::put_user(cluster, &tenant, &user, Role::Member).await.expect("a user");
    let made =
        crate::accounts::make_token(cluster, &tenant, &user, 3600, None).await.expect("a token");
    let client = |fingerprint: &str| {
        let client = Client::to_enrol(&secure.url, fingerprint, PATIENCE).expect("a client");
        client.with_token(&made.token).expect("a token")
    };
    let known = client(cluster.authority.fingerprint());
    assert_eq!(known.get::<Me>("/v1/me").await.expect("it is known").tenant, tenant);
    forbidden(known.get::<serde_json::Value>("/v1/hosts").await);
    let other = client(&"0".repeat(64)).get::<Me>("/v1/me").await.expect_err("another cluster");
    assert_eq!(other.kind, ProblemKind::Unavailable, "{other}");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_host_has_no_certificate_any_more() {
    let secure = Secure::up().await;
    let client = secure.joined("home1").await;
    client.put::<()>("/v1/hosts/home1", &addresses()).await.expect("it is home1");
    let cluster = &secure.supervisor.cluster;
    let removed = async || crate::hosts::remove(cluster, &host("home1"), true).await.ok();
    wait_for("the removal", removed).await;
    forbidden(client.put::<()>("/v1/hosts/home1", &addresses()).await);
    let again = secure.joined("home1").await;
    again.put::<()>("/v1/hosts/home1", &addresses()).await.expect("with a new token");
    secure.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_was_enrolled_beside_the_controller_gets_its_next_certificate() {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = crate::authority(dir.path()).expect("an authority");
    let own = authority.enrol(&host("home1"), &[HERE]).expect("credentials");
    let (supervisor, url) = serve(&dir).await;
    let mut secure = Secure { dir, supervisor, url };
    let ask = RenewCertificate { public_key: NewKey::generate().expect("a key").public().to_hex() };
    let path = "/v1/hosts/home1/certificate";
    secure.client(&own).post::<Enrolled>(path, &ask).await.expect("the next certificate");
    crate::hosts::enrol::revoke_host(&secure.supervisor.cluster, host("home1"))
        .await
        .expect("revoked");
    secure.restart().await;
    let later = authority.enrol(&host("home1"), &[HERE]).expect("credentials");
    forbidden(secure.client(&later).post::<Enrolled>(path, &ask).await);
    secure.supervisor.stop().await;
}

/// An operator who has a console open does not keep it when the certificate is revoked.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_operator_has_open_ends_with_the_certificate() {
    let secure = Secure::up().await;
    let cluster = Arc::clone(&secure.supervisor.cluster);
    let now_ms = perigee_http::certificate::now_ms();
    let of = |issued_ms| {
        Peer::Known(perigee_http::Certified { identity: PeerIdentity::Operator, issued_ms })
    };
    let life_ms =
        u64::try_from(perigee_http::certificate::CERTIFICATE_LIFE.as_millis()).expect("small");
    let ends = |peer| {
        let cluster = Arc::clone(&cluster);
        tokio::spawn(async move { crate::vms::certificate_ends(&cluster, peer).await })
    };
    tokio::time::timeout(PATIENCE, ends(of(now_ms - life_ms - 1)))
        .await
        .expect("it is too old")
        .expect("no panic");
    let (open, local) = (ends(of(now_ms)), ends(Peer::Local));
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert!(!open.is_finished(), "the certificate is good");
    let own = cluster.authority.credentials(&PeerIdentity::Operator, &[]).expect("credentials");
    let operator = secure.client(&own);
    operator.post::<()>("/v1/operators/revoke", &()).await.expect("revoked");
    tokio::time::timeout(PATIENCE, open).await.expect("it ends").expect("no panic");
    assert!(!local.is_finished(), "who needs no certificate loses none");
    local.abort();
    secure.supervisor.stop().await;
}

#[tokio::test]
async fn a_token_for_a_host_has_the_controllers_own_address_unless_another_one_is_named() {
    let secure = Secure::up().await;
    let cluster = &secure.supervisor.cluster;
    let asked = crate::hosts::enrol::token(cluster, host("home9"), None).await;
    let problem = asked.expect_err("no other machine reaches it");
    assert!(problem.next.contains("host token home9 --controller https://"), "{problem}");
    secure.supervisor.stop().await;
    let own_url = Some("https://10.0.0.1:7000".to_owned());
    let (settings, traffic) =
        (Settings { own_url, ..Settings::default() }, Traffic::Tls(Vec::new()));
    let started = Supervisor::start_with(secure.dir.path(), TIMING, traffic, settings, None).await;
    let told = started.expect("start again");
    let token = crate::hosts::enrol::token(&told.cluster, host("home9"), None).await;
    assert_eq!(token.expect("a token").controller_url, "https://10.0.0.1:7000");
    told.stop().await;
}

#[test]
fn the_controllers_own_address_is_its_name_or_one_that_other_machines_reach() {
    let url = |listen: &[&str], names: &[&str]| {
        let config = crate::Config {
            providers: None,
            web_certificate: None,
            rent_budget: Default::default(),
            state: "state".into(),
            listen: listen.iter().map(|address| address.parse().expect("an address")).collect(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            site: None,
            insecure: false,
            doors: crate::Doors::default(),
            data: None,
            keep_outputs_s: Default::default(),
            publish_ports: Default::default(),
            prices: None,
        };
        crate::own_url(&config).expect("this machine's addresses")
    };
    let unix = "unix:/run/c.sock";
    assert_eq!(url(&[unix, "127.0.0.1:7000"], &[]), None);
    let listen = [unix, "127.0.0.1:7000", "[fd00::1]:7000", "10.0.0.1:7000"];
    assert_eq!(url(&listen, &[]).as_deref(), Some("https://10.0.0.1:7000"));
    assert_eq!(url(&listen, &["c.example"]).as_deref(), Some("https://c.example:7000"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_of_a_rented_host_is_good_for_one_time_its_time_and_its_address() {
    let secure = Secure::up().await;
    let cluster = &secure.supervisor.cluster;
    let make = async |life: Duration| {
        let secret = crate::hosts::enrol::new_secret();
        let url = secure.url.clone();
        let made = crate::hosts::enrol::token_of(cluster, host("rent-1"), secret, url, life);
        made.await.expect("a token")
    };
    forbidden(secure.join(&make(Duration::ZERO).await, HERE).await.map(drop));
    let token = make(Duration::from_secs(600)).await;
    let bind = async |address: &str| {
        let bound = crate::hosts::enrol::bind_token(cluster, &host("rent-1"), address).await;
        bound.expect("it is bound");
    };
    bind("127.0.0.9").await;
    forbidden(secure.join(&token, HERE).await.map(drop));
    bind("127.0.0.1").await;
    secure.join(&token, HERE).await.expect("it joins");
    forbidden(secure.join(&token, HERE).await.map(drop));
    let again = make(Duration::from_secs(600)).await;
    assert!(crate::hosts::enrol::shut_out(cluster, &host("rent-1")).await.expect("a store"));
    forbidden(secure.join(&again, HERE).await.map(drop));
    let expired = make(Duration::from_secs(600)).await;
    cluster.clock.pretend_passed(Duration::from_secs(601));
    let problem = secure.join(&expired, HERE).await.map(drop).expect_err("its time is over");
    assert!(problem.why.contains("time is over"), "{problem}");
    cluster.clock.pretend_set(-3_600_000);
    forbidden(secure.join(&expired, HERE).await.map(drop));
    secure.supervisor.stop().await;
}
