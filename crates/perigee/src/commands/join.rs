//! `perigee host join`: this machine becomes a host. It is looked at first, gets its certificate and the files of its daemons, and its daemons are
//! started.
//!
//! The token can be used once, so all that can fail without it comes before. A join that was cut short after that goes on when it is run again with the
//! same token: the certificate is there.

mod plan;

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Command};
use perigee_http::authority::NewKey;
use perigee_http::identity::Strangers;
use perigee_http::{
    Client, Expected, Identity, Network, PeerIdentity, authority_of, private_directory,
};
use perigee_model::enrol::{CheckHost, CheckToken, Enrol, Enrolled, HostSeen, JoinToken};
use perigee_model::finding::Verdict;
use perigee_model::job::{Host, HostState};
use perigee_model::waiting::in_words;
use perigee_model::{Problem, SiteId};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::commands::doctor::{self, Listening};
use crate::commands::network::IDENTITY_DIR;
use crate::commands::{owner, units};
use crate::config::{self, DIR, Daemon};
use crate::output;
use plan::Plan;

const ANSWER_MAX: Duration = Duration::from_secs(30);
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How long a host may take until the controller has seen both of its daemons. The agent boots a kernel once, to see whether KVM works.
const UP_MAX: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The directory of the daemons' sockets.
const RUN: &str = "/run/perigee";
const DAEMONS: [Daemon; 2] = [Daemon::Volume, Daemon::Agent];

/// What `perigee host join` takes.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// What `perigee host token` has printed at the controller [default: it is read from the standard input, where
    /// other users of this host do not see it]
    token: Option<JoinToken>,
    /// Where this host's certificate and key are put
    #[arg(long, value_name = "DIR", default_value = IDENTITY_DIR, value_parser = config::absolute)]
    identity: PathBuf,
    /// An address of this host for the others; may be given more than once, and the daemons listen at the first one [default: the one that
    /// reaches the controller]
    #[arg(long, value_name = "IP")]
    address: Vec<IpAddr>,
    /// The site where this host is [default: the controller's site, or the only one that there is; `home` for a cluster's first host]
    #[arg(long)]
    site: Option<SiteId>,
    /// The directory for volumes and images; it is made
    #[arg(long, value_name = "DIR", default_value = "/var/lib/perigee/pool", value_parser = config::absolute)]
    pool: PathBuf,
    /// The directory in which volume.yaml and agent.yaml are written
    #[arg(long, value_name = "DIR", default_value = DIR, value_parser = config::absolute)]
    config_dir: PathBuf,
    /// Do not start the daemons
    #[arg(long)]
    no_start: bool,
    /// Only get the certificate: look at nothing else, write no other file, start nothing
    #[arg(long, conflicts_with_all = ["site", "pool", "config_dir", "no_start"])]
    identity_only: bool,
}

/// Joins, and says what comes next. `root` is the whole command line.
pub async fn run(args: JoinArgs, root: &Command) -> Result<(), Problem> {
    let token = match args.token.clone() {
        Some(token) => token,
        None => read_token()?,
    };
    if args.identity_only {
        return enrol(token, &args.identity, args.address).await;
    }
    let addresses = match args.address.is_empty() {
        true => vec![own_address(&token).await?],
        false => args.address.clone(),
    };
    let not_started = why_not_started(&args).await?;
    if not_started.is_none() {
        plan::check_identity_dir(&args.identity)?;
    }
    let plan = Plan::new(&args, &token, addresses[0]);
    let joined = joined_before(&token, &args.identity, &addresses).await;
    let seen = look(&plan, &token, joined.as_ref()).await?;
    let files = plan.files(&plan::site(args.site.as_ref(), &seen, &token)?);
    let missing = files.each_ref().map(|file| file.is_missing(root));
    let [first, second] = missing;
    let missing = [first?, second?];
    make_directories(&args)?;
    let is_new = joined.is_none();
    match is_new {
        true => enrol(token.clone(), &args.identity, addresses).await?,
        false => output::text(&format!("host {} has joined before", token.host)),
    }
    for (file, is_missing) in files.iter().zip(&missing) {
        if *is_missing {
            file.write()?;
        }
        config::of_file(root.clone(), file.daemon, &file.file)?;
    }
    output::text(&format!("the settings of its daemons are in {}", args.config_dir.display()));
    if let Some(why) = not_started {
        by_hand(&args, &why);
        return Ok(());
    }
    // Daemons that run have the certificate and the settings of before.
    let verb = if is_new || missing.contains(&true) { "restart" } else { "start" };
    units::start(&DAEMONS, verb).await?;
    tell(&wait(&args, &token).await?);
    Ok(())
}

/// A client with the certificate that an earlier join of the same host with these addresses has got, if that still counts.
async fn joined_before(token: &JoinToken, identity: &Path, addresses: &[IpAddr]) -> Option<Client> {
    let client = client_of(token, identity).ok()?;
    Identity::load(identity).ok().filter(|own| own.names(addresses))?;
    let check = CheckHost { reach: Vec::new() };
    let path = format!("/v1/hosts/{}/check", token.host);
    client.post::<HostSeen>(&path, &check).await.ok().map(|_| client)
}

/// # Errors
/// If the certificate is not there, or is for another host or cluster.
fn client_of(token: &JoinToken, identity: &Path) -> Result<Client, Problem> {
    let own = Identity::load(identity)?;
    let is_own = own.own().identity == PeerIdentity::Host(token.host.clone());
    if !is_own || own.authority_fingerprint() != token.fingerprint {
        let what = format!("can't use the certificate in {}", identity.display());
        return Err(Problem::conflict(what, "it is for another host, or of another cluster"));
    }
    let expected = Expected::Identity(PeerIdentity::Controller);
    Network::Tls(own).client(&token.controller_url, expected, ANSWER_MAX)
}

/// Looks at this machine, and has the controller look at it. Nothing is changed.
///
/// # Errors
/// What keeps the machine from being a host.
async fn look(
    plan: &Plan,
    token: &JoinToken,
    joined: Option<&Client>,
) -> Result<HostSeen, Problem> {
    let daemons = plan.listening();
    let is_there = plan.is_there() || units::is_any_active(&DAEMONS).await?;
    let listening = Listening::at(&daemons, is_there).await;
    let (host, check) = (token.host.clone(), CheckHost { reach: daemons.to_vec() });
    let seen: HostSeen = match joined {
        Some(client) => client.post(&format!("/v1/hosts/{host}/check"), &check).await?,
        None => {
            let client = Client::to_enrol(&token.controller_url, &token.fingerprint, ANSWER_MAX)?;
            let ask = CheckToken { host, secret: token.secret.clone(), check };
            client.post("/v1/enrol/check", &ask).await?
        }
    };
    let findings =
        [plan.machine().examine().await, listening.findings, doctor::of_seen(&seen)].concat();
    findings.iter().filter(|one| one.verdict == Verdict::Warning).for_each(doctor::note);
    match doctor::problem(&findings) {
        Some(problem) => {
            let next =
                format!("{}\n  then run this command again: the token stays good", problem.next);
            Err(problem.next(next))
        }
        None => Ok(seen),
    }
}

fn make_directories(args: &JoinArgs) -> Result<(), Problem> {
    config::make_directory(&args.config_dir)?;
    if let Some(above) = args.pool.parent() {
        owner::make_passable(above)?;
    }
    private_directory(&args.pool)
}

/// Why the units will not be started, if they will not be.
async fn why_not_started(args: &JoinArgs) -> Result<Option<String>, Problem> {
    if args.no_start {
        return Ok(Some("--no-start was said".to_owned()));
    }
    if args.config_dir != Path::new(DIR) {
        return Ok(Some(format!("the units read the files in {DIR}")));
    }
    units::missing(&DAEMONS).await
}

fn by_hand(args: &JoinArgs, why: &str) {
    output::text(&format!("\nThe daemons were not started: {why}. Start them:"));
    if !Path::new(RUN).is_dir() {
        output::text(&format!("    install -d -m 0755 {RUN}"));
    }
    for daemon in DAEMONS {
        let config = match args.config_dir == Path::new(DIR) {
            true => String::new(),
            false => format!(" --config {}", daemon.file_in(&args.config_dir).display()),
        };
        output::text(&format!("    perigee {}{config} &", daemon.words().join(" ")));
    }
    output::text("Then `perigee host list` at the controller shows this host.");
}

/// Waits until the controller has seen both daemons.
async fn wait(args: &JoinArgs, token: &JoinToken) -> Result<Host, Problem> {
    let deadline = Instant::now() + UP_MAX;
    let client = client_of(token, &args.identity)?;
    loop {
        let why = match client.get::<Host>(&format!("/v1/hosts/{}", token.host)).await {
            Ok(host) if host.state == HostState::Up && host.waits.is_empty() => return Ok(host),
            Ok(host) if host.state == HostState::Up => in_words(&host.waits),
            Ok(_) => "its agent does not answer".to_owned(),
            Err(problem) => problem.why,
        };
        if Instant::now() >= deadline {
            let what = format!("the controller does not see host {} as up", token.host);
            let why = format!("{why} after {} s", UP_MAX.as_secs());
            return Err(Problem::unavailable(what, why).next(
                "look what is wrong: perigee host doctor; journalctl -u perigee-volume -u perigee-agent -n 30",
            ));
        }
        sleep(LOOK_EVERY).await;
    }
}

fn tell(host: &Host) {
    let accelerator = host.accelerator.map_or_else(|| "-".to_owned(), |a| output::word(&a));
    let free = host.pool_free_bytes.map_or_else(|| "-".to_owned(), output::bytes);
    output::text(&format!(
        "host {} is up at site {}: {} CPUs, {} of memory, {accelerator}, {free} free in its pool",
        host.id,
        host.addresses.site,
        host.cpus,
        output::bytes(host.memory_bytes)
    ));
    host.warnings.iter().for_each(|warning| output::note(&format!("warning: {warning}")));
}

/// Gets a certificate, and keeps what the controller gives. The token's fingerprint says which controller is the right one.
async fn enrol(token: JoinToken, dir: &Path, addresses: Vec<IpAddr>) -> Result<(), Problem> {
    // The token can't be used again, so what may fail here comes first.
    private_directory(dir)?;
    let addresses = match addresses.is_empty() {
        true => vec![own_address(&token).await?],
        false => addresses,
    };
    let client = Client::to_enrol(&token.controller_url, &token.fingerprint, ANSWER_MAX)?;
    let key = NewKey::generate()?;
    let host = token.host.clone();
    let public_key = key.public().to_hex();
    let ask = Enrol { host, secret: token.secret, public_key, addresses };
    let enrolled: Enrolled = client.post("/v1/enrol", &ask).await?;
    let own = key.credentials(&enrolled.certificate, &enrolled.ca);
    Identity::new(&own, Strangers::Refused)?;
    own.save(dir)?;
    let (host, dir) = (token.host, dir.display());
    output::text(&format!("host {host} has joined; its certificate is in {dir}"));
    Ok(())
}

/// A token is at most this long; the limit is only for what is not a token.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// The token from the standard input.
///
/// # Errors
/// `Invalid` when it is none.
fn read_token() -> Result<JoinToken, Problem> {
    let what = "can't read the token from the standard input";
    let mut text = String::new();
    let read = BufReader::new(std::io::stdin().lock().take(TOKEN_BYTES_MAX)).read_line(&mut text);
    read.map_err(|error| Problem::invalid(what, error))?;
    text.trim().parse().map_err(|why| {
        Problem::invalid(what, why).next("give it the line that `perigee host token` has printed")
    })
}

/// The address from which this host reaches the controller.
async fn own_address(token: &JoinToken) -> Result<IpAddr, Problem> {
    let (host, url) = (&token.host, &token.controller_url);
    let unknown = |why: &dyn std::fmt::Display| {
        Problem::unavailable(format!("can't enrol host {host}: no connection to {url}"), why)
            .next("check the address in the token, or name this host's own one with --address")
    };
    let connect = TcpStream::connect(authority_of(url).unwrap_or_default());
    let connected = timeout(CONNECT_MAX, connect).await.map_err(|late| unknown(&late))?;
    let local = connected.and_then(|stream| stream.local_addr()).map_err(|e| unknown(&e))?;
    Ok(local.ip())
}
