//! A host that a lab rents out joins the lab's cluster, hears that it is taken back, and ends itself when the controller is gone. Real
//! daemons, no guests.

#[path = "rented/kept.rs"]
mod kept;
mod patience;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use patience::{Checked, PATIENCE, failed, until};
use perigee_http::Client;
use perigee_lab::wan::{LinkSettings, Rate};
use perigee_lab::{Definition, Lab, LabId, Options, Steps};
use perigee_model::HostId;
use perigee_model::enrol::{MadeToken, NewToken};
use perigee_model::job::{Host, HostState};
use perigee_model::measurement::{HostMeasurement, MeasurementState};
use perigee_model::rental::states::RentalState;
use perigee_model::rental::{Instance, InstanceState, NewInstance, ProviderOffers, Rental};
use serde_json::{Value, json};

const CLUSTER: &str = "cluster-1";
/// Of the WAN over which a host is measured.
const WAN_BYTES_PER_S: u64 = 25_000_000;
const WAN_RTT_US: u64 = 8000;
const LEASE_S: u64 = 30;

/// As a cloud's image would start the daemons, with what `perigee host token` has printed.
fn user_data(token: &str, lab: &Lab) -> String {
    let controller = lab.definition.controller_address();
    format!(
        r#"#!/bin/sh
set -eu
ip=$(ip -o -4 addr show dev eth0 | sed 's/.* inet \([0-9.]*\).*/\1/')
test ! -e /run/systemd/system
install -d -m 0755 /run/perigee
install -d -m 0711 /var/lib/perigee
install -d -m 0700 /var/lib/perigee/pool
echo '{token}' | perigee host join --identity-only
perigee volume serve --pool /var/lib/perigee/pool --nbd unix:/run/perigee/volume.sock --nbd $ip:10809 \
  --control unix:/run/perigee/volume-control.sock --control $ip:7001 &
exec perigee agent run --host rented1 --site home --listen $ip:7002 --controller https://{controller}:7000 \
  --volume-url https://$ip:7001 --nbd-addr $ip:10809 --leased {LEASE_S}s
"#
    )
}

/// What the provider's program answers.
fn provider(lab: &Lab, verb: &str, asked: &Value) -> Checked<Value> {
    let program = lab.provider();
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string()).arg(program).arg(verb);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let mut input = child.stdin.take().ok_or_else(|| failed("no standard input"))?;
    input.write_all(asked.to_string().as_bytes()).map_err(failed)?;
    drop(input);
    let output = child.wait_with_output().map_err(failed)?;
    if !output.status.success() {
        return Err(failed(format!("the provider's {verb}: {output:?}")));
    }
    serde_json::from_slice(&output.stdout).map_err(failed)
}

fn create(lab: &Lab, token: &str) -> Checked<Instance> {
    let new = NewInstance {
        rental: "rental-1".to_owned(),
        cluster: CLUSTER.to_owned(),
        kind: "lab.small".to_owned(),
        zone: "home".to_owned(),
        spot: true,
        max_per_hour_micros: None,
        kvm: false,
        image: String::new(),
        disk_bytes: 1 << 30,
        pool: None,
        user_data: user_data(token, lab),
    };
    let mut answer = provider(lab, "create", &serde_json::to_value(new).map_err(failed)?)?;
    serde_json::from_value(answer["instance"].take()).map_err(failed)
}

fn state(lab: &Lab) -> Checked<InstanceState> {
    let mut answer = provider(lab, "list", &json!({"cluster": CLUSTER}))?;
    let all: Vec<Instance> = serde_json::from_value(answer["instances"].take()).map_err(failed)?;
    all.first().map(|instance| instance.state).ok_or_else(|| failed("no instance is listed"))
}

async fn test(lab: Lab) -> Checked<()> {
    let client = lab.client(Duration::from_secs(60))?;
    let url = format!("https://{}:7000", lab.definition.controller_address());
    let ask = NewToken { controller_url: Some(url) };
    let made: MadeToken = client.post("/v1/hosts/rented1/token", &ask).await?;
    let instance = create(&lab, &made.token)?;
    let root = lab.dir().join("rented").join(&instance.id);
    let console = || std::fs::read_to_string(root.join("console.log")).unwrap_or_default();

    let joined = until("the rented host to join", async || host(&client).await).await;
    let joined = joined.map_err(|problem| failed(format!("{problem}\n{}", console())))?;
    let lease = joined.lease.as_ref().ok_or_else(|| failed("the host has no lease"))?;
    if (lease.length_s, lease.end.as_str(), joined.cpus) != (LEASE_S, "systemctl poweroff", 1) {
        return Err(failed(format!("{joined:?}")));
    }
    is_renewed(&client).await.map_err(|problem| failed(format!("{problem}\n{}", console())))?;
    info_shows_the_lease(&lab)?;
    is_taken_back(&lab, &client, &instance).await?;
    ends_itself(&lab).await
}

/// More is left than if the lease had not been renewed since the host was seen first.
async fn is_renewed(client: &Client) -> Checked<()> {
    let seen = Instant::now();
    until("the lease to be renewed", async || {
        let left_s =
            host(client).await?.and_then(|host| host.lease).map_or(0, |lease| lease.left_s);
        // What the controller last heard may be some seconds old.
        let is_late = seen.elapsed() > Duration::from_secs(10);
        Ok((is_late && left_s > LEASE_S - 5).then_some(()))
    })
    .await
}

/// The host when it is up and has told about itself: it counts as up from the moment on when it registers.
async fn host(client: &Client) -> Checked<Option<Host>> {
    let host: Host = client.get("/v1/hosts/rented1").await?;
    let has_reported = host.cpus > 0;
    Ok((host.state == HostState::Up && has_reported).then_some(host))
}

fn info_shows_the_lease(lab: &Lab) -> Checked<()> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
    command.args(["host", "info", "rented1"]).env("PERIGEE_API", &lab.api);
    let output = command.output().map_err(failed)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let shown = text.contains("without the controller are left; then the host runs");
    if shown { Ok(()) } else { Err(failed(format!("{output:?}"))) }
}

/// The agent hears it at the metadata address, and the controller drains the host.
async fn is_taken_back(lab: &Lab, client: &Client, instance: &Instance) -> Checked<()> {
    let notice = lab.dir().join("rented").join(&instance.id).join("notice");
    std::fs::write(&notice, "4102444800").map_err(failed)?;
    let told = provider(lab, "notices", &json!({"cluster": CLUSTER}))?;
    if told["notices"][0]["instance"] != json!(instance.id) {
        return Err(failed(told));
    }
    let drained = until("the host to be drained", async || {
        let host = host(client).await?;
        Ok(host.filter(|h| h.drain.as_ref().is_some_and(|drain| drain.is_drained())))
    })
    .await?;
    let ends = drained.notice.map(|notice| notice.ends_unix_s);
    if ends == Some(4_102_444_800) { Ok(()) } else { Err(failed(format!("it ends at {ends:?}"))) }
}

/// The controller is killed and stays away.
async fn ends_itself(lab: &Lab) -> Checked<()> {
    let away = lab.dir().join("away");
    std::fs::create_dir_all(&away).map_err(failed)?;
    std::fs::write(away.join("ctl"), "").map_err(failed)?;
    kill(Pid::from_raw(lab.controller_pid()?), Signal::SIGKILL).map_err(failed)?;
    until("the end of the lease", async || Ok((state(lab)? == InstanceState::Gone).then_some(())))
        .await
}

/// What is measured of a host, when that is over.
async fn measured(client: &Client, host: &str) -> Checked<Option<HostMeasurement>> {
    let now: HostMeasurement = client.get(&format!("/v1/hosts/{host}/measure")).await?;
    Ok((now.state != MeasurementState::Measuring).then_some(now))
}

/// An own host is measured against its neighbour and against a host at the other end of a WAN.
async fn measure(lab: Lab) -> Checked<()> {
    let client = lab.client(Duration::from_secs(60))?;
    let begun: HostMeasurement = until("all hosts to be up", async || {
        let up: Vec<Host> = client.get("/v1/hosts").await?;
        if up.iter().filter(|host| host.state == HostState::Up).count() < 3 {
            return Ok(None);
        }
        client.post("/v1/hosts/home1/measure", &json!({"length_s": 1})).await.map(Some)
    })
    .await?;
    let with: Vec<&str> = begun.networks.iter().map(|link| link.with.as_str()).collect();
    if with != ["cloud1", "home2"] {
        return Err(failed(format!("{begun:?}")));
    }
    let done =
        until("the end of the measurement", async || measured(&client, "home1").await).await?;
    is_plausible(&done)?;
    let info = Command::new(env!("CARGO_BIN_EXE_perigee"))
        .args(["host", "info", "home1"])
        .env("PERIGEE_API", &lab.api)
        .output()
        .map_err(failed)?;
    let text = String::from_utf8_lossy(&info.stdout);
    if !text.contains("disk over iSCSI: reads (cloud1)") || !text.contains("own disk: writes") {
        return Err(failed(format!("{info:?}")));
    }
    nothing_is_left(&lab).await
}

/// All figures are there. Nothing is asserted about speed, but that the link does not carry many times what it is set to.
fn is_plausible(done: &HostMeasurement) -> Checked<()> {
    let is_whole = done.state == MeasurementState::Done
        && done.networks.iter().all(|link| link.problem.is_empty())
        && done.disks.len() == 5;
    if !is_whole {
        return Err(failed(format!("{done:?}")));
    }
    let far = &done.networks[0];
    let rates = [
        far.to_bytes_per_s,
        far.from_bytes_per_s,
        far.to_streams_bytes_per_s,
        far.from_streams_bytes_per_s,
    ];
    let bounded =
        |rate: Option<u64>| rate.is_some_and(|rate| (1..3 * WAN_BYTES_PER_S).contains(&rate));
    if !rates.into_iter().all(bounded)
        || far.rtt_ms.is_none_or(|rtt| rtt * 2000.0 < WAN_RTT_US as f64)
    {
        return Err(failed(format!("{far:?}")));
    }
    for disk in &done.disks {
        let Some(figures) = disk.figures else { return Err(failed(format!("{disk:?}"))) };
        let all = [
            figures.read_bytes_per_s,
            figures.write_bytes_per_s,
            figures.random_reads_per_s,
            figures.random_writes_per_s,
        ];
        let is_far = disk.at.as_str() == "cloud1";
        let bound = if is_far { 3.0 * WAN_BYTES_PER_S as f64 } else { f64::INFINITY };
        let sequential = figures.read_bytes_per_s.max(figures.write_bytes_per_s);
        if all.iter().any(|figure| *figure <= 0.0) || sequential > bound {
            return Err(failed(format!("{disk:?}")));
        }
    }
    Ok(())
}

/// No volume of a measurement is at any host, and no file.
async fn nothing_is_left(lab: &Lab) -> Checked<()> {
    until("no volume of the measurement to be left", async || {
        for host in ["home1", "home2", "cloud1"] {
            let dir = lab.dir().join("hosts").join(host);
            let socket = dir.join("volume-control.sock");
            let server = Client::new(&format!("unix:{}", socket.display()), PATIENCE)?;
            let volumes: Vec<Value> = server.get("/v1/volumes").await?;
            let attached: Vec<Value> = server.get("/v1/attachments").await?;
            let files = std::fs::read_dir(dir.join("pool")).map_err(failed)?;
            let mut files = files.flatten().map(|file| file.file_name());
            if !volumes.is_empty()
                || !attached.is_empty()
                || files.any(|name| name.to_string_lossy().starts_with("measured"))
            {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
    .await
}

/// The first host of a kind is measured without being asked to; that ends when somebody calls it off.
async fn is_measured_by_itself(client: &Client, host: &HostId) -> Checked<()> {
    let path = format!("/v1/hosts/{host}/measure");
    let begun: HostMeasurement =
        until("the host to be measured by itself", async || client.get(&path).await.map(Some))
            .await?;
    if begun.kind.is_none() || !begun.by.starts_with("Perigee") {
        return Err(failed(format!("{begun:?}")));
    }
    // It may be over by now.
    drop(client.delete_answered::<HostMeasurement>(&path).await);
    let ended = until("its end", async || measured(client, host.as_str()).await).await?;
    if ended.ended_ms.is_none() { Err(failed(format!("{ended:?}"))) } else { Ok(()) }
}

/// The lab's controller rents a host of the lab, has it join, and gives it back.
async fn rent(lab: Lab) -> Checked<()> {
    let client = lab.client(Duration::from_secs(60))?;
    let offers: Vec<ProviderOffers> = client.get("/v1/providers").await?;
    if offers.len() != 1 || !offers[0].problem.is_empty() {
        return Err(failed(format!("{offers:?}")));
    }
    let ask = json!({"provider": "lab", "kind": "lab.small", "zone": "home", "site": "home"});
    let rental: Rental = client.post("/v1/rentals", &ask).await?;
    let path = format!("/v1/rentals/{}", rental.id);
    let in_state = async |state: RentalState| {
        let rental: Rental = client.get(&path).await?;
        match rental.state {
            now if now == state => Ok(Some(rental)),
            RentalState::Ending | RentalState::Gone if state == RentalState::Joined => {
                Err(failed(format!("it did not join: {rental:?}")))
            }
            _ => Ok(None),
        }
    };
    let joined = until("the rented host to join", async || in_state(RentalState::Joined).await);
    let joined = joined.await.map_err(|problem| {
        let rented = lab.dir().join("rented");
        let logs = std::fs::read_dir(rented).into_iter().flatten().flatten();
        let logs =
            logs.filter_map(|at| std::fs::read_to_string(at.path().join("console.log")).ok());
        failed(format!("{problem}\n{}", logs.collect::<String>()))
    })?;
    let lease = until("its lease", async || {
        let host: Host = client.get(&format!("/v1/hosts/{}", joined.host)).await?;
        Ok(host.lease)
    })
    .await?;
    if lease.length_s != 600 || joined.spent.is_none_or(|spent| spent > joined.reserved) {
        return Err(failed(format!("{lease:?} {joined:?}")));
    }
    is_measured_by_itself(&client, &joined.host).await?;
    let _: Rental = client.post(&format!("{path}/end"), &json!({})).await?;
    let gone = until("the end of the rental", async || in_state(RentalState::Gone).await).await?;
    let left: Vec<Host> = client.get("/v1/hosts").await?;
    let is_forgotten = left.iter().all(|host| host.id != gone.host);
    if is_forgotten && gone.asks == 1 { Ok(()) } else { Err(failed(format!("{gone:?} {left:?}"))) }
}

#[test]
fn a_controller_rents_a_host_of_its_lab_and_gives_it_back() {
    in_lab(rent);
}

#[test]
fn a_replica_is_kept_while_no_host_is_rented_and_the_next_host_ships_only_what_changed() {
    in_lab(kept::test);
}

#[test]
fn a_rented_host_joins_is_drained_when_it_is_taken_back_and_ends_itself_without_its_controller() {
    in_lab(test);
}

#[test]
fn a_host_is_measured_against_its_neighbour_and_over_a_wan_and_leaves_nothing() {
    let rate = Rate(Some(8 * WAN_BYTES_PER_S));
    let wan = LinkSettings { rate, ..LinkSettings::of_rtt_us(WAN_RTT_US) };
    in_lab_of(Definition::new(LabId::random(), Definition::default_sites(), wan), measure);
}

fn in_lab<F: Future<Output = Checked<()>>>(test: impl FnOnce(Lab) -> F) {
    let one_site = perigee_lab::SiteDef {
        name: "home".parse().expect("a name"),
        hosts: vec![HostId::new("home1").expect("a name")],
    };
    let settings = LinkSettings::of_rtt_us(0);
    in_lab_of(Definition::new(LabId::random(), vec![one_site], settings), test);
}

fn in_lab_of<F: Future<Output = Checked<()>>>(
    mut definition: Definition,
    test: impl FnOnce(Lab) -> F,
) {
    // KVM is not needed, and nothing is booted to find out whether it works.
    definition.probe_kernel = Some(PathBuf::from("/dev/null"));
    definition.rent.boot_s = 0;
    let id = definition.id.clone();
    let options = Options {
        program: PathBuf::from(env!("CARGO_BIN_EXE_perigee")),
        ..Options::new().expect("this test has a path")
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let steps = Steps::default();
    let outcome = runtime.block_on(perigee_lab::with_lab(definition, &options, &steps, test));
    if let Err(problem) = outcome {
        panic!("{problem}");
    }
    assert_eq!(perigee_lab::remains(&options.base, &id), Vec::<String>::new());
}
