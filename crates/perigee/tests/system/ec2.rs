//! EC2 end to end: the lab's controller rents from EC2 through its own client. moto answers as EC2 does, and `scripts/moto-bridge` makes a host of the lab of
//! each instance that moto runs. A proxy between them loses answers.

#[path = "../../../cloud/tests/whole/faults.rs"]
#[expect(dead_code, reason = "the tests of crates/cloud use the rest")]
mod faults;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use perigee_lab::netns::within;
use perigee_model::ProblemKind;
use perigee_model::job::{Host, Job, JobState};
use perigee_model::rental::states::RentalState;
use perigee_model::rental::{ProviderOffers, Rental};
use perigee_model::units::format_time;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

use super::{Checked, System, ensure, failed, until, with_system, writer_job};
use crate::patience::PATIENCE;
use faults::{Fault, Faults};

const MIB: u64 = 1 << 20;
/// A machine image that moto has from the start.
const IMAGE: &str = "ami-12c6146b";
const REGION: &str = "eu-central-1";
/// Prints the state of each instance.
const STATES: &str = "
import boto3, sys
ec2 = boto3.client('ec2', region_name=sys.argv[2], endpoint_url=sys.argv[1], aws_access_key_id='test', aws_secret_access_key='test')
print(*[one['State']['Name'] for all in ec2.describe_instances()['Reservations'] for one in all['Instances']])
";

/// EC2 in the network of the lab's controller. What the bridge starts there ends with the lab.
struct Ec2 {
    namespace: String,
    python: String,
    /// Where the bridge answers.
    bridge: String,
    proxy: Proxy,
    /// Killed by its id when this is dropped.
    _bridge: Child,
    _keys: tempfile::TempDir,
}

/// The fault proxy, in a thread that is in a network namespace.
struct Proxy {
    faults: Faults,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Checked<()>>>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Ok(Err(problem))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the proxy: {problem}");
        }
    }
}

impl Proxy {
    async fn before(port: u16, namespace: String) -> Checked<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = oneshot::channel();
        let serve = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map_err(failed)?.block_on(async {
                // Nobody asks for it any more if the test has ended.
                let _ = tell.send(Faults::before(port).await);
                let _ = stopped.await;
            });
            Ok(())
        };
        let thread = std::thread::spawn(move || within(&namespace, serve));
        let faults = told.await.map_err(|_| failed("the proxy has ended".to_owned()))?;
        Ok(Self { faults, stop: Some(stop), thread: Some(thread) })
    }
}

/// One instance in `rented/moto.json`.
#[derive(Debug, Deserialize)]
struct Bridged {
    /// The lab's own name of the host.
    host: String,
    address: String,
}

impl Ec2 {
    /// The lab's controller is started again, with this provider alone.
    async fn begin(system: &System) -> Checked<Self> {
        let programs = std::env::var("PERIGEE_TEST_MOTO")
            .expect("PERIGEE_TEST_MOTO names the directory of moto's programs; make test sets it");
        let python = format!("{programs}/python");
        let namespace = system.lab.definition.controller_namespace();
        let mut command = in_namespace(&namespace, &python);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/moto-bridge"));
        command.arg(system.lab.dir()).arg("cloud").stdout(Stdio::piped());
        let mut process = command.spawn().map_err(failed)?;
        let bridge = first_line(&mut process).await?;
        let port = bridge.rsplit(':').next().and_then(|port| port.parse().ok());
        let port = port.ok_or_else(|| failed(format!("the bridge is at {bridge:?}")))?;
        let proxy = Proxy::before(port, namespace.clone()).await?;
        let keys = tempfile::tempdir().map_err(failed)?;
        let file = keys.path().join("keys");
        let lines = "[default]\naws_access_key_id = test\naws_secret_access_key = test\n";
        std::fs::write(&file, lines).map_err(failed)?;
        let named = providers(&proxy.faults.endpoint, &file);
        std::fs::write(system.lab.dir().join("providers.yaml"), named).map_err(failed)?;
        system.kill_daemon("controller", None).await?;
        until("EC2's offers", async || {
            let all: Vec<ProviderOffers> = system.get("/v1/providers").await?;
            let of_ec2 = all.into_iter().find(|one| one.provider == "ec2");
            ensure!(of_ec2.as_ref().is_none_or(|one| one.problem.is_empty()), "{of_ec2:?}");
            Ok(of_ec2)
        })
        .await?;
        Ok(Self { namespace, python, bridge, proxy, _bridge: process, _keys: keys })
    }

    /// The state of each instance that moto knows, as Amazon's own library reads it.
    async fn states(&self) -> Checked<String> {
        let mut command = in_namespace(&self.namespace, &self.python);
        let ask = command.args(["-c", STATES, &self.bridge, REGION]).output();
        let output = tokio::time::timeout(PATIENCE, ask).await;
        let output = output.map_err(|_| failed("moto does not answer".to_owned()))?;
        let output = output.map_err(failed)?;
        ensure!(output.status.success(), "boto3: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

fn in_namespace(namespace: &str, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{namespace}")).arg(program);
    // No proxy, no region and no keys of whoever runs the tests.
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn first_line(process: &mut Child) -> Checked<String> {
    let says = process.stdout.take().expect("it is piped");
    let mut line = String::new();
    let mut says = BufReader::new(says);
    let read = tokio::time::timeout(PATIENCE, says.read_line(&mut line)).await;
    read.map_err(|_| failed("the bridge does not say where it is".to_owned()))?.map_err(failed)?;
    ensure!(line.ends_with('\n'), "the bridge has ended: {line:?}");
    Ok(line.trim().to_owned())
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

fn providers(endpoint: &str, keys: &Path) -> String {
    let today: String = format_time(now_s() * 1000).chars().take(10).collect();
    format!(
        "ec2:\n  ec2:\n    region: {REGION}\n    kinds: [m5.large]\n    prices: {{m5.large: $0.115/h}}\n    \
         egress: $0.09/GiB\n    disk: $0.0952/GiB-month\n    as-of: {today}\n    image: {IMAGE}\n    \
         credentials: {}\n    endpoint: {endpoint}\n",
        keys.display()
    )
}

impl System {
    async fn rental_is(&self, id: &str, wanted: RentalState) -> Checked<Rental> {
        let found = until(&format!("rental {id} to be {wanted}"), async || {
            let rental: Rental = self.get(&format!("/v1/rentals/{id}")).await?;
            let is_over = matches!(rental.state, RentalState::Ending | RentalState::Gone);
            if is_over && wanted == RentalState::Joined {
                return Ok(Some(Err(rental)));
            }
            Ok((rental.state == wanted).then_some(Ok(rental)))
        })
        .await;
        let found = found.map_err(|problem| failed(format!("{problem}\n{}", self.consoles())))?;
        found.map_err(|rental| failed(format!("it ended: {rental:?}\n{}", self.consoles())))
    }

    /// What rented hosts have printed.
    fn consoles(&self) -> String {
        let logs = std::fs::read_dir(self.lab.dir().join("rented")).into_iter().flatten().flatten();
        let logs =
            logs.filter_map(|at| std::fs::read_to_string(at.path().join("console.log")).ok());
        logs.collect()
    }

    /// The hosts of the lab by moto's names of its instances.
    fn bridged(&self) -> Checked<BTreeMap<String, Bridged>> {
        let text = std::fs::read(self.lab.dir().join("rented/moto.json")).map_err(failed)?;
        serde_json::from_slice(&text).map_err(failed)
    }

    /// Network namespaces, and directories of hosts that the lab has rented out.
    fn left_of_rented(&self) -> Checked<Vec<PathBuf>> {
        let namespace = self.lab.definition.rented_namespace("");
        let begins = |path: &PathBuf, with: &str| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(with))
        };
        let all = |dir: &Path| -> Checked<Vec<PathBuf>> {
            let entries = std::fs::read_dir(dir).map_err(failed)?;
            entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect()
        };
        let mut left = all(Path::new("/run/netns"))?;
        left.retain(|path| begins(path, &namespace));
        let rented = all(&self.lab.dir().join("rented"))?;
        left.extend(rented.into_iter().filter(|path| path.is_dir() && begins(path, "i-")));
        Ok(left)
    }
}

/// Rents a host. EC2 has no time at first, and then its answer is lost.
async fn rent(system: &System, ec2: &Ec2) -> Checked<Rental> {
    ec2.proxy
        .faults
        .next("RunInstances", &[Fault::Refuse(503, "RequestLimitExceeded"), Fault::LoseAnswer]);
    let ask = ["rent", "host", "--provider", "ec2", "--kind", "m5.large", "--site", "cloud"];
    let said = system.does(&[&["-f", "json"][..], &ask].concat())?;
    let rental: Rental =
        serde_json::from_str(&said).map_err(|error| failed(format!("{error}: {said}")))?;
    let joined = system.rental_is(rental.id.as_str(), RentalState::Joined).await?;
    ensure!(ec2.proxy.faults.all_happened(), "not all faults have happened: {joined:?}");
    ensure!(joined.asks == 1, "the instance was not found by its tag: {joined:?}");
    let bridged = system.bridged()?;
    let own = joined.instance.as_ref().and_then(|instance| bridged.get(instance));
    ensure!(bridged.len() == 1 && own.is_some(), "{bridged:?}, but {joined:?}");
    let at = own.map(|own| own.address.as_str());
    ensure!(joined.address.as_deref() == at, "{bridged:?}, but {joined:?}");
    ensure!(ec2.states().await? == "running", "{}", ec2.states().await?);
    Ok(joined)
}

/// The job's VM leaves the host that EC2 takes back, and goes on elsewhere.
async fn is_taken_back(system: &System, rental: &Rental, job: &Job) -> Checked<Rental> {
    let bridged = system.bridged()?;
    let own = rental.instance.as_ref().and_then(|instance| bridged.get(instance));
    let own = own.ok_or_else(|| failed(format!("{bridged:?}")))?;
    let notice = system.lab.dir().join("rented").join(&own.host).join("notice");
    // EC2 says it two minutes before. A busy machine has more time.
    let ends_s = now_s() + 3600;
    std::fs::write(notice, ends_s.to_string()).map_err(failed)?;
    let gone = system.rental_is(rental.id.as_str(), RentalState::Gone).await?;
    ensure!(gone.notice_ms == Some(ends_s * 1000), "{gone:?}");
    let why = gone.ends_because.as_deref().unwrap_or_default();
    ensure!(why == "the provider takes it back", "it ended because {why}");
    ensure!(gone.spent.is_some_and(|spent| spent.micros > 0), "{gone:?}");
    ensure!(gone.spent.is_none_or(|spent| spent <= gone.reserved), "{gone:?}");
    system.progresses(&job.id, 1).await?;
    let now = system.job(&job.id).await?;
    ensure!(now.host.as_ref().is_some_and(|at| *at != rental.host), "the job is there still");
    ensure!(!now.migrations.is_empty(), "the job has begun anew: {now:?}");
    Ok(gone)
}

#[test]
fn a_host_of_ec2_joins_runs_a_job_is_taken_back_and_nothing_of_it_is_left() {
    with_system(async |system| {
        let ec2 = Ec2::begin(&system).await?;
        let rental = rent(&system, &ec2).await?;
        eprintln!("it has joined after {:.1} s", system.begun.elapsed().as_secs_f64());
        // What it has must leave with the VM.
        system.volume("data", rental.host.as_str(), 64 * MIB).await?;
        let file = writer_job(rental.host.as_str()).replace("move: never", "move: auto");
        let job = system.submit(&file).await?;
        system.progresses(&job.id, 2).await?;
        eprintln!("its job runs after {:.1} s", system.begun.elapsed().as_secs_f64());
        let gone = is_taken_back(&system, &rental, &job).await?;
        eprintln!("it is gone after {:.1} s", system.begun.elapsed().as_secs_f64());

        let asked = ec2.proxy.faults.seen("RunInstances");
        let token = format!("ClientToken={}&", gone.id);
        ensure!(asked.len() == 2 && asked.iter().all(|form| form.contains(&token)), "{asked:?}");
        ensure!(ec2.states().await? == "terminated", "{}", ec2.states().await?);
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        ensure!(hosts.iter().all(|host| host.id != gone.host), "{hosts:?}");
        let forgotten = system.get::<Host>(&format!("/v1/hosts/{}", gone.host)).await;
        let is_unknown = forgotten.as_ref().is_err_and(|e| e.kind == ProblemKind::NotFound);
        ensure!(is_unknown, "{forgotten:?}");
        let left = system.left_of_rented()?;
        ensure!(left.is_empty(), "{left:?}");

        system.stop_writer(&job.id).await?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        ensure!(log.iter().any(|line| line.starts_with("checked ")), "{log:?}");
        Ok(())
    });
}
