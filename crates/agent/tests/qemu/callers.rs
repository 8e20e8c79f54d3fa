//! Who is answered by an agent that has a certificate, over TLS. The table of callers is in `src/callers.rs`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use perigee_agent::{Config, VmUids};
use perigee_http::identity::Strangers;
use perigee_http::{
    Authority, Client, Expected, Identity, Listen, Method, Network, PeerIdentity, unused_port,
};
use perigee_model::{HostId, Problem, ProblemKind, SiteId};
use tokio::runtime::Runtime;

use super::support::{directory, wait_for};

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PATIENCE: Duration = Duration::from_secs(60);

fn host(name: &str) -> PeerIdentity {
    PeerIdentity::Host(HostId::new(name).unwrap())
}

/// As `perigee agent run --identity DIR` does.
fn config(dir: &Path, identity: &Path, port: u16) -> Config {
    Config {
        host: HostId::new("home1").unwrap(),
        site: SiteId::new("here").unwrap(),
        listen: vec![Listen::Tcp(format!("127.0.0.1:{port}"))],
        state: dir.join("agent"),
        vm_uids: VmUids::default(),
        guests_reach: Vec::new(),
        outside_addresses: Vec::new(),
        bridges: Vec::new(),
        volume_control: format!("unix:{}", dir.join("no-volume-server.sock").display()),
        volume_url: "https://127.0.0.1:1".into(),
        nbd_addr: "127.0.0.1:1".into(),
        agent_url: format!("https://127.0.0.1:{port}"),
        controller: None,
        probe_kernel: Some(PathBuf::from("/dev/null")),
        boot_id: dir.join("boot-id"),
        network: Network::Tls(Identity::load(identity).unwrap()),
        leased: None,
    }
}

#[test]
fn an_agent_with_a_certificate_answers_the_controller_and_nobody_else() {
    let dir = directory();
    let authority = Authority::open(&dir.path().join("authority")).unwrap();
    let issue = |who: &PeerIdentity| authority.credentials(who, &[LOCAL]).unwrap();
    let identity = dir.path().join("identity");
    issue(&host("home1")).save(&identity).unwrap();
    std::fs::write(dir.path().join("boot-id"), "boot-1\n").unwrap();
    let port = unused_port();
    let url = format!("https://127.0.0.1:{port}");
    let runtime = Runtime::new().unwrap();
    let agent = runtime.spawn(perigee_agent::serve(config(dir.path(), &identity, port)));
    let with = |own: Arc<Identity>| Network::Tls(own).client(&url, Expected::Address, PATIENCE);
    let known =
        |who: PeerIdentity| with(Identity::new(&issue(&who), Strangers::Refused).unwrap()).unwrap();
    let ask = |asker: &Client, method: &Method, path: &str| -> Result<(), Problem> {
        let asked = asker.send_body::<serde_json::Value>(method.clone(), path, "{}");
        runtime.block_on(asked).map(drop)
    };
    let controller = known(PeerIdentity::Controller);
    wait_for("the agent", || ask(&controller, &Method::GET, "/v1/host").map_err(|e| e.to_string()));
    let other_cluster = Authority::open(&dir.path().join("other")).unwrap();
    let foreign = other_cluster.credentials(&PeerIdentity::Controller, &[LOCAL]).unwrap();
    let askers = [
        ("another host", known(host("cloud1"))),
        ("the host itself", known(host("home1"))),
        ("an operator", known(PeerIdentity::Operator)),
        ("another cluster's controller", {
            with(Identity::new(&foreign, Strangers::Refused).unwrap()).unwrap()
        }),
        ("nobody", Client::to_enrol(&url, authority.fingerprint(), PATIENCE).unwrap()),
        ("plain HTTP", Client::new(&url.replace("https", "http"), PATIENCE).unwrap()),
    ];
    for (method, path) in [
        (Method::GET, "/v1/host"),
        (Method::GET, "/v1/vms"),
        (Method::PUT, "/v1/vms/vm-1"),
        (Method::DELETE, "/v1/vms/vm-1?submitted_ms=1&run=0&migration=0"),
        (Method::GET, "/v1/vms/vm-1/console"),
        (Method::GET, "/v1/vms/vm-1/events"),
        (Method::POST, "/v1/vms/vm-1/migrate"),
        (Method::POST, "/v1/vms/vm-1/migrate/cancel"),
        (Method::POST, "/v1/vms/vm-1/guest-agent"),
        (Method::PUT, "/v1/networks"),
        (Method::GET, "/v1/changes"),
        (Method::GET, "/metrics"),
    ] {
        for (who, asker) in &askers {
            let problem = ask(asker, &method, path).expect_err(who);
            // Who shows no certificate of this cluster does not get through the handshake.
            let is_known =
                !matches!(*who, "another cluster's controller" | "nobody" | "plain HTTP");
            let is_refused = problem.kind == ProblemKind::Forbidden;
            assert!(is_refused || !is_known, "{who} {method} {path}: {problem}");
        }
    }
    ask(&controller, &Method::GET, "/v1/vms").expect("the controller is answered all the time");
    agent.abort();
    // Blocking work of the agent is not waited for.
    runtime.shutdown_timeout(Duration::from_secs(10));
}
