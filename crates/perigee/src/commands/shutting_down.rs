//! `perigee host shutdown --move`: this machine goes down when all has left it. `perigee-leave.service` has systemd wait for the same whenever
//! it takes the machine down.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Command};
use perigee_http::{Client, Expected, Identity, Network, PeerIdentity};
use perigee_model::drain::HostDrain;
use perigee_model::units::{format_seconds, parse_duration};
use perigee_model::{HostId, Problem, ProblemKind};
use tokio::time::{Instant, sleep, timeout};

use crate::commands::network::IDENTITY_DIR;
use crate::commands::{asking, draining, units};
use crate::config::{self, DIR, Daemon};
use crate::output;

const ANSWER_MAX: Duration = Duration::from_secs(30);
/// A controller that is started again answers within seconds. Where all machines go down, none answers.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_secs(1);

/// What `perigee host shutdown` takes.
#[derive(Debug, Args)]
pub struct ShutdownArgs {
    /// Have VMs and volumes move away first, while they are used. The host is used again when it has booted
    #[arg(long = "move", required = true)]
    moves: bool,
    /// Start the machine again
    #[arg(long)]
    reboot: bool,
    /// How long to wait at most
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "15m")]
    within: u64,
    /// Only hold the shutdown that systemd has begun. Without one, nothing happens. For perigee-leave.service
    #[arg(long, conflicts_with = "reboot")]
    held: bool,
    /// The directory with agent.yaml
    #[arg(long, value_name = "DIR", default_value = DIR)]
    config_dir: PathBuf,
}

/// Waits until all has left this host, and takes the machine down.
///
/// # Errors
/// `Conflict` if something can't leave, `Unavailable` if that takes too long. Then the machine stays up, unless it is systemd that takes the machine
/// down.
pub async fn run(args: ShutdownArgs, root: &Command) -> Result<(), Problem> {
    if args.held && !perigee_agent::machine_goes_down().await {
        output::note("systemd does not take this machine down, so nothing leaves it");
        return Ok(());
    }
    let (host, client) = controller(&args.config_dir, root)?;
    ask(&client, &host).await?;
    let goes_on = format!(
        "the drain goes on; `perigee host info {host}` shows what is left, `perigee host undrain {host}` calls it off"
    );
    let watching =
        timeout(Duration::from_secs(args.within), draining::watch(&client, &host, &goes_on));
    let waited = async { Ok(watching.await) };
    let Some(waited) = asking::until_interrupted(waited, &goes_on).await? else { return Ok(()) };
    let late = |_| {
        let why = format!("not all has left it after {}", format_seconds(args.within as f64));
        Err(Problem::unavailable(format!("can't empty host {host}"), why).next(goes_on.as_str()))
    };
    let ended = waited.unwrap_or_else(late)?;
    check(&host, &ended)?;
    output::note(&format!("all has left host {host}"));
    match args.held {
        true => Ok(()),
        false => units::power(if args.reboot { "reboot" } else { "poweroff" }).await,
    }
}

/// # Errors
/// `Conflict` if something can't leave.
fn check(host: &HostId, ended: &HostDrain) -> Result<(), Problem> {
    let left = ended.left.as_deref().unwrap_or_default();
    if left.is_empty() {
        return Ok(());
    }
    let why: Vec<String> = left.iter().map(draining::line).collect();
    Err(Problem::conflict(format!("can't empty host {host}"), why.join("; ")).next(format!(
        "end or move what is named, and run this again; or take the machine down with it: systemctl poweroff; `perigee host undrain {host}` calls \
         the drain off"
    )))
}

/// Tells the controller that the host shuts down.
async fn ask(client: &Client, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/hosts/{host}/shuts-down");
    let begun = Instant::now();
    loop {
        let problem = match client.post::<()>(&path, &serde_json::json!({})).await {
            Err(problem) if problem.kind == ProblemKind::Unavailable => problem,
            answered => return answered,
        };
        if begun.elapsed() >= PATIENCE {
            return Err(problem);
        }
        sleep(PAUSE).await;
    }
}

/// This host, and the controller as the host's own certificate reaches it.
fn controller(dir: &Path, root: &Command) -> Result<(HostId, Client), Problem> {
    let file = Daemon::Agent.file_in(dir);
    let what = "can't empty this host";
    if !file.exists() {
        let why = format!("{} is not there: this machine is no host", file.display());
        return Err(Problem::invalid(what, why)
            .next("where daemons are started with flags: perigee host drain HOST --wait"));
    }
    let agent = config::of_file(root.clone(), Daemon::Agent, &file)?;
    let identity = agent.value("identity").unwrap_or_else(|| PathBuf::from(IDENTITY_DIR));
    let (Some(host), Some(url)) =
        (agent.value::<HostId>("host"), agent.value::<String>("controller"))
    else {
        let why = format!("{} names no host or no controller", file.display());
        return Err(Problem::invalid(what, why).next("see perigee host doctor"));
    };
    let expected = Expected::Identity(PeerIdentity::Controller);
    let client = Network::Tls(Identity::load(&identity)?).client(&url, expected, ANSWER_MAX)?;
    Ok((host, client.hint("check that the controller runs, and that this machine reaches it")))
}

#[cfg(test)]
mod tests {
    use perigee_model::drain::{DrainFate, DrainStep, DrainedKind};

    use super::*;

    #[test]
    fn a_machine_stays_up_while_something_can_t_leave() {
        let host = HostId::new("home1").expect("a name");
        let step = DrainStep {
            kind: DrainedKind::Vm,
            name: "web".to_owned(),
            fate: DrainFate::Stays,
            to: Vec::new(),
            why: "no other host has room".to_owned(),
            takes_s: None,
            bytes: None,
        };
        let of = |left| HostDrain { asked: None, left: Some(left), keeps: Vec::new() };
        check(&host, &of(Vec::new())).expect("all has left");
        let problem = check(&host, &of(vec![step])).expect_err("the VM stays");
        assert_eq!(problem.why, "VM web stays: no other host has room");
    }

    #[test]
    fn a_machine_without_agent_yaml_is_no_host() {
        let dir = tempfile::tempdir().expect("a directory");
        let problem = controller(dir.path(), &Command::new("perigee")).expect_err("no host");
        assert!(problem.why.contains("agent.yaml"), "{problem:?}");
    }
}
