//! `perigee dev`: the three daemons of one host in one process, for a newcomer.
//!
//! Everything is in one directory. The cluster's authority and the host's certificate are made there at each start. Ctrl-C
//! cancels the jobs, which stops their VMs, stops the VMs without a job, and then ends the daemons: the controller, the agent and the
//! volume server.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_agent::VmUids;
use perigee_http::{Client, Identity, Listen, Network, unused_port};
use perigee_model::job::{ClusterImage, Host, HostState, Job, Vm};
use perigee_model::persistent_vm::{StopVm, VmState};
use perigee_model::{HostId, Problem, ProblemKind, SiteId, VmId};
use perigee_volume::{IscsiOptions, RemoteOptions, ServerOptions};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::context::Context;
use crate::output;
use crate::servers::api;

/// The host, and its site.
const NAME: &str = "dev";
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// The volume server's control API, in the directory.
const VOLUME_CONTROL: &str = "volume-control.sock";
/// As in the documents.
const SFTP_PORT: u16 = 7022;
/// How long the start may take. A new machine boots a kernel once to find out whether KVM works.
const START_MAX: Duration = Duration::from_secs(180);
/// How long the end of the jobs and VMs may take, and how long the guest of a VM without a job may take to power off.
const JOBS_END_MAX: Duration = Duration::from_secs(60);
const POWER_OFF_MAX: Duration = Duration::from_secs(30);
/// How long a daemon may take to end. The volume server flushes its volumes.
const DAEMON_END_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What `perigee dev` takes.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Directory for everything that is kept [default: /var/lib/perigee-dev, or ~/.local/share/perigee-dev if you are
    /// not root]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The kernel to boot for a test of KVM [default: the newest in /boot]
    #[arg(long, value_name = "FILE")]
    probe_kernel: Option<PathBuf>,
}

/// Runs until Ctrl-C or SIGTERM.
pub async fn run(options: Options, context: &Context) -> Result<(), Problem> {
    output::outlive_reader();
    let dir = match options.dir {
        Some(dir) => dir,
        None => default_dir()?,
    };
    let dir = prepare(&dir)?;
    let address = api(context);
    let api: Listen = address.parse().map_err(|why| {
        Problem::invalid("can't run perigee dev", why).next("name a socket: --api unix:PATH")
    })?;
    let Listen::Unix(socket) = &api else {
        let why = format!("{api} is no unix socket");
        return Err(Problem::invalid("can't run perigee dev", why)
            .next("name one: --api unix:PATH, or unset PERIGEE_API"));
    };
    if let Some(above) = socket.parent() {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(above);
        made.map_err(|e| {
            Problem::invalid(format!("can't make {}", above.display()), e).next(
                "choose a socket that you may make: --api unix:PATH, in the other terminal too",
            )
        })?;
    }
    // What ends here must not be another cluster's jobs.
    if std::os::unix::net::UnixStream::connect(socket).is_ok() {
        let why = format!("a controller answers at {} already", socket.display());
        return Err(Problem::conflict("can't run perigee dev", why)
            .next("use that one, stop it, or choose another socket: --api unix:PATH"));
    }
    let mut stop = perigee_http::stopped()?;
    let client = Client::new(&address, ANSWER_MAX)?;
    let sftp = sftp_address();
    let mut daemons = Daemons::start(&dir, api, options.probe_kernel, &sftp)?;
    let ended = tokio::select! {
        biased;
        problem = daemons.one_ends() => Err(problem),
        started = say_when_up(&client, &dir, &sftp) => match started {
            Err(problem) => Err(problem),
            Ok(()) => tokio::select! {
                biased;
                problem = daemons.one_ends() => Err(problem),
                () = &mut stop => Ok(()),
            },
        },
        () = &mut stop => Ok(()),
    };
    if ended.is_ok() {
        output::note("stopping; Ctrl-C once more does not wait for the jobs and VMs");
        tokio::select! {
            ended = end_jobs(&client) => if let Err(problem) = ended {
                output::note(&format!(
                    "not all jobs and VMs have ended: {problem}\nVMs may go on; `perigee dev` finds them again"
                ));
            },
            () = perigee_http::stopped()? => output::note(
                "VMs that have not ended go on; `perigee dev` finds them again, and stops them at its end",
            ),
        }
    }
    daemons.stop().await;
    if ended.is_err() && has_vms(&dir) {
        output::note("VMs may go on; `perigee dev` finds them again, and stops them at its end");
    }
    ended
}

/// Where files are served over SFTP: always at the same port, where that is free, because clients remember its key.
fn sftp_address() -> String {
    let is_free = std::net::TcpListener::bind((LOCAL, SFTP_PORT)).is_ok();
    format!("{LOCAL}:{}", if is_free { SFTP_PORT } else { unused_port() })
}

/// Whether the agent has not ended all of its VMs.
fn has_vms(dir: &Path) -> bool {
    std::fs::read_dir(dir.join("agent/vms")).is_ok_and(|mut vms| vms.next().is_some())
}

fn default_dir() -> Result<PathBuf, Problem> {
    if nix::unistd::geteuid().is_root() {
        return Ok(PathBuf::from("/var/lib/perigee-dev"));
    }
    let home = std::env::var_os("HOME").ok_or_else(|| {
        Problem::invalid("can't choose a directory", "HOME is not set").next("name one: --dir DIR")
    })?;
    Ok(Path::new(&home).join(".local/share/perigee-dev"))
}

/// QEMU's users pass through it to the directories of their VMs.
fn prepare(dir: &Path) -> Result<PathBuf, Problem> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o711).create(dir);
    let dir = made.and_then(|()| dir.canonicalize()).map_err(|e| {
        Problem::invalid(format!("can't use the directory {}", dir.display()), e)
            .next("choose another one: --dir DIR")
    })?;
    perigee_http::ours::check(&dir)
        .map_err(|problem| problem.next("choose another one: --dir DIR"))?;
    Ok(dir)
}

struct Daemons {
    /// In the order in which they are stopped: the volume server last, because the others use it.
    stops: Vec<oneshot::Sender<()>>,
    running: JoinSet<(&'static str, Result<(), Problem>)>,
}

impl Daemons {
    fn start(
        dir: &Path,
        api: Listen,
        probe_kernel: Option<PathBuf>,
        sftp: &str,
    ) -> Result<Self, Problem> {
        let host = HostId::new(NAME).map_err(|e| Problem::internal("perigee dev", e))?;
        let site = SiteId::new(NAME).map_err(|e| Problem::internal("perigee dev", e))?;
        perigee_http::prepare_daemon();
        let state = dir.join("controller");
        let identity = dir.join("identity");
        perigee_http::private_directory(&state)?;
        perigee_controller::authority(&state)?.enrol(&host, &[LOCAL])?.save(&identity)?;
        let network = Network::Tls(Identity::load(&identity)?);
        let [at_controller, at_agent, at_volumes, at_nbd] =
            [(); 4].map(|()| format!("{LOCAL}:{}", unused_port()));
        let control = dir.join(VOLUME_CONTROL);
        let controller = perigee_controller::Config {
            providers: None,
            web_certificate: None,
            rent_budget: Default::default(),
            keep_outputs_s: Default::default(),
            publish_ports: Default::default(),
            prices: None,
            state,
            listen: vec![api, Listen::Tcp(at_controller.clone())],
            names: Vec::new(),
            site: Some(site.clone()),
            insecure: false,
            doors: perigee_controller::Doors { sftp: Some(sftp.to_owned()) },
            data: None,
        };
        let volumes = perigee_volume::Config {
            pool: dir.join("pool"),
            private: None,
            nbd: vec![Listen::Unix(dir.join("volume.sock")), Listen::Tcp(at_nbd.clone())],
            control: vec![Listen::Unix(control.clone()), Listen::Tcp(at_volumes.clone())],
            clients: ServerOptions::default(),
            iscsi: IscsiOptions::default(),
            remotes: RemoteOptions { network: network.clone(), ..RemoteOptions::default() },
            vm_sockets: dir.join("vms"),
            image_dirs: Vec::new(),
            boot_id: PathBuf::from(perigee_http::BOOT_ID),
        };
        let agent = perigee_agent::Config {
            host,
            site,
            listen: vec![Listen::Tcp(at_agent.clone())],
            state: dir.join("agent"),
            vm_uids: VmUids::default(),
            guests_reach: Vec::new(),
            outside_addresses: Vec::new(),
            bridges: Vec::new(),
            volume_control: format!("unix:{}", control.display()),
            volume_url: format!("https://{at_volumes}"),
            nbd_addr: at_nbd,
            agent_url: format!("https://{at_agent}"),
            controller: Some(format!("https://{at_controller}")),
            probe_kernel,
            boot_id: PathBuf::from(perigee_http::BOOT_ID),
            network,
            leased: None,
        };
        Ok(Self::spawn(controller, agent, volumes))
    }

    fn spawn(
        controller: perigee_controller::Config,
        agent: perigee_agent::Config,
        volumes: perigee_volume::Config,
    ) -> Self {
        let [(stop_1, end_1), (stop_2, end_2), (stop_3, end_3)] =
            [(); 3].map(|()| oneshot::channel());
        let until = |asked: oneshot::Receiver<()>| Box::pin(async move { drop(asked.await) });
        let mut running = JoinSet::new();
        let controller = perigee_controller::run_until(controller, until(end_1));
        running.spawn(async move { ("controller", controller.await) });
        running.spawn(async move {
            let ended = tokio::select! {
                ended = perigee_agent::serve(agent) => ended,
                () = until(end_2) => Ok(()),
            };
            ("agent", ended)
        });
        let volumes = perigee_volume::serve_until(volumes, until(end_3));
        running.spawn(async move { ("volume server", volumes.await) });
        Self { stops: vec![stop_1, stop_2, stop_3], running }
    }

    /// Waits until a daemon ends that should go on.
    async fn one_ends(&mut self) -> Problem {
        match self.running.join_next().await {
            Some(Ok((_, Err(problem)))) => problem,
            Some(Ok((name, Ok(())))) => {
                Problem::internal(format!("the {name} ended"), "nobody has asked it to")
            }
            Some(Err(error)) => Problem::internal("a daemon ended", error),
            None => Problem::internal("the daemons ended", "nobody has asked them to"),
        }
    }

    async fn stop(mut self) {
        for stop in self.stops {
            if stop.send(()).is_err() {
                // It has ended already.
                continue;
            }
            match timeout(DAEMON_END_MAX, self.running.join_next()).await {
                Ok(Some(Ok((name, Err(problem))))) => {
                    output::note(&format!("the {name}: {problem}"))
                }
                Ok(Some(Err(error))) => output::note(&format!("a daemon has failed: {error}")),
                Ok(Some(Ok((_, Ok(())))) | None) => {}
                Err(_) => output::note("a daemon did not end within a minute"),
            }
        }
    }
}

/// Waits until the host is up, and says how to go on.
async fn say_when_up(client: &Client, dir: &Path, sftp: &str) -> Result<(), Problem> {
    let deadline = Instant::now() + START_MAX;
    loop {
        let why = match client.get::<Vec<Host>>("/v1/hosts").await {
            Ok(hosts) if hosts.iter().any(|host| host.state == HostState::Up) => {
                // The agent is up, and the volume server may still be opening its pool.
                match std::os::unix::net::UnixStream::connect(dir.join(VOLUME_CONTROL)) {
                    Ok(_) => break,
                    Err(error) => format!("the volume server does not answer: {error}"),
                }
            }
            Ok(_) => "the host is not up".to_owned(),
            Err(problem) => problem.why,
        };
        if Instant::now() >= deadline {
            let limit_s = START_MAX.as_secs();
            let why = format!("{why} after {limit_s} s");
            return Err(Problem::unavailable("can't start perigee dev", why)
                .next("PERIGEE_LOG=info perigee dev says what it does"));
        }
        sleep(LOOK_EVERY).await;
    }
    let images: Vec<ClusterImage> = client.get("/v1/images").await?;
    output::text(&format!("perigee dev runs, and keeps everything in {}", dir.display()));
    output::text("In another terminal:");
    output::text(&format!("    export PERIGEE_API={}", client.address()));
    if images.is_empty() {
        output::text(
            "    perigee image import debian \"$(scripts/golden-image)/debian-pg.raw\"    # once",
        );
    }
    output::text("    perigee job submit --wait examples/hello.yaml");
    if let Some((host, port)) = sftp.rsplit_once(':') {
        output::text("Files, after `perigee user add default/me --role member` and");
        output::text("`perigee user key add mine ~/.ssh/id_ed25519.pub --user default/me`:");
        output::text(&format!("    sftp -P {port} me@{host}"));
    }
    output::text(
        "Ctrl-C ends it, with its jobs and all VMs. Images, volumes and the disks of VMs stay.",
    );
    Ok(())
}

/// Cancels all jobs, stops the VMs that have none, and waits until no VM runs.
async fn end_jobs(client: &Client) -> Result<(), Problem> {
    let begun = Instant::now();
    let mut asked: BTreeSet<(VmId, bool)> = BTreeSet::new();
    loop {
        let jobs: Vec<Job> = client.get("/v1/jobs").await?;
        let unfinished: Vec<Job> = jobs.into_iter().filter(|job| !job.state.is_final()).collect();
        let vms: Vec<Vm> = client.get("/v1/vms").await?;
        let runs = |vm: &Vm| vm.job.is_none() && vm.status != VmState::Stopped;
        let vms: Vec<Vm> = vms.into_iter().filter(runs).collect();
        if unfinished.is_empty() && vms.is_empty() {
            return Ok(());
        }
        for job in &unfinished {
            // The second time, nobody waits for its outputs. It may have ended by then.
            let path = format!("/v1/jobs/{}/cancel?now=true", job.id);
            match client.post::<serde_json::Value>(&path, &serde_json::json!({})).await {
                Err(problem) if problem.kind == ProblemKind::Conflict => {}
                cancelled => drop(cancelled?),
            }
        }
        let force = begun.elapsed() > POWER_OFF_MAX;
        for vm in &vms {
            let once = (vm.id.clone(), force);
            if asked.contains(&once) {
                continue;
            }
            let path = format!("/v1/vms/{}/stop", vm.id);
            match client.post::<serde_json::Value>(&path, &StopVm { force }).await {
                // It was deleted, or is just being deleted.
                Err(problem)
                    if matches!(problem.kind, ProblemKind::Conflict | ProblemKind::NotFound) => {}
                // It is asked again.
                Err(problem) if problem.kind == ProblemKind::Unavailable => continue,
                stopped => drop(stopped?),
            }
            asked.insert(once);
        }
        if begun.elapsed() >= JOBS_END_MAX {
            let jobs = unfinished.iter().map(|job| job.id.to_string());
            let names: Vec<String> = jobs.chain(vms.iter().map(|vm| vm.id.to_string())).collect();
            let limit_s = JOBS_END_MAX.as_secs();
            let why = format!("{} did not end within {limit_s} s", names.join(", "));
            return Err(Problem::unavailable("can't stop the jobs and VMs", why));
        }
        sleep(LOOK_EVERY).await;
    }
}
