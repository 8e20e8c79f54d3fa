//! `perigee controller init`: from a bare machine to a controller, and to the line with which the first host joins.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Command};
use perigee_http::Client;
use perigee_model::enrol::{JoinToken, MadeToken, NewToken};
use perigee_model::job::Host;
use perigee_model::{HostId, Problem, SiteId};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::commands::owner::{self, AsOwner, SOCKET};
use crate::commands::units;
use crate::config::{self, Daemon, Wanted};
use crate::context::Context;
use crate::output::{self, Column, Format};

/// The controller's directory.
pub const STATE: &str = "/var/lib/perigee/controller";
const FILE: &str = "/etc/perigee/controller.yaml";
const PORT: u16 = 7000;

/// How long a controller may take until it answers.
const START_MAX: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// What `perigee controller init` takes.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// The address at which hosts and people reach the controller. Without a port it is port 7000
    #[arg(long, value_name = "IP[:PORT]", value_parser = address)]
    listen: Option<SocketAddr>,
    /// A DNS name at which people and programs call the controller over https; may be given more than once
    #[arg(long = "name", value_name = "NAME", requires = "listen")]
    names: Vec<String>,
    /// The site where the controller is: outputs that may not leave their site come to it only if it is there
    #[arg(long, requires = "listen")]
    site: Option<SiteId>,
    /// The first host's name [default: host1, or the site's name with 1, or the next number that no host has]
    #[arg(long, requires = "listen")]
    host: Option<HostId>,
    /// The controller's directory
    #[arg(long, default_value = STATE, value_name = "DIR", value_parser = config::absolute)]
    state: PathBuf,
    /// The file that is written for `perigee controller run`
    #[arg(long, default_value = FILE, value_name = "FILE", requires = "listen", value_parser = config::absolute)]
    config: PathBuf,
    /// Do not start the controller
    #[arg(long, requires = "listen")]
    no_start: bool,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let ip = || text.trim_matches(['[', ']']).parse::<IpAddr>().ok();
    let parsed = text.parse().ok().or_else(|| Some(SocketAddr::new(ip()?, PORT)));
    parsed.filter(|address| address.port() != 0).ok_or_else(|| {
        format!(
            "{text:?} is neither IP nor IP:PORT, as 10.0.0.1 or 10.0.0.1:7000 or [fd00::1]:7000"
        )
    })
}

/// What there is after the command.
#[derive(Debug, Serialize)]
struct Made {
    /// Where hosts and people reach the controller.
    url: String,
    /// Of the cluster's authority.
    fingerprint: String,
    /// The controller's file.
    config: PathBuf,
    /// Whether the controller answers.
    is_up: bool,
    /// What the first host runs; none while the controller does not answer.
    join: Option<String>,
}

const MADE: &[Column<Made>] = &[
    ("url", |made| made.url.clone()),
    ("fingerprint", |made| made.fingerprint.clone()),
    ("config", |made| made.config.display().to_string()),
    ("is up", |made| made.is_up.to_string()),
    ("join", |made| output::or_dash(made.join.as_ref())),
];

/// Makes what is not there yet.
pub async fn run(args: InitArgs, context: &Context, root: &Command) -> Result<(), Problem> {
    let Some(listen) = args.listen else {
        let _owner = AsOwner::of(&args.state)?;
        output::text(perigee_controller::authority(&args.state)?.fingerprint());
        return Ok(());
    };
    let socket = context.api.as_deref().filter(|api| api.starts_with("unix:")).unwrap_or(SOCKET);
    let file = wanted(&args, listen, socket);
    let is_missing = file.is_missing(root)?;
    // This directory is the one that the package's unit uses.
    if args.state == Path::new(STATE) {
        owner::make_for_unit(&args.state)?;
    }
    if is_missing {
        file.write()?;
    }
    let fingerprint = {
        let _owner = AsOwner::of(&args.state)?;
        perigee_controller::authority(&args.state)?.fingerprint().to_owned()
    };
    config::of_file(root.clone(), Daemon::Controller, &args.config)?;
    let client = Client::new(socket, ANSWER_MAX)?;
    // A controller that runs has the settings of before.
    let not_started = start(&args, if is_missing { "restart" } else { "start" }).await?;
    let is_up = match not_started {
        None => wait(&client).await.map(|()| true)?,
        Some(_) => hosts(&client).await.is_ok(),
    };
    let url = args.names.first().map_or_else(
        || format!("https://{listen}"),
        |name| format!("https://{name}:{}", listen.port()),
    );
    let token = match is_up {
        true => Some(token(&args, &client, &url, listen).await?),
        false => None,
    };
    let url = token.as_ref().map_or(url, |token| token.controller_url.clone());
    let join = token.map(|token| format!("perigee host join {token}"));
    let made = Made { url, fingerprint, config: args.config, is_up, join };
    match context.format {
        Format::Table => tell(&made, not_started.as_deref(), socket),
        format => output::one(format, &made, MADE)?,
    }
    Ok(())
}

/// What the controller's file is to say.
fn wanted(args: &InitArgs, listen: SocketAddr, socket: &str) -> Wanted {
    let mut settings = vec![("listen", vec![socket.to_owned(), listen.to_string()])];
    if !args.names.is_empty() {
        settings.push(("name", args.names.clone()));
    }
    settings.extend(args.site.iter().map(|site| ("site", vec![site.to_string()])));
    if args.state != Path::new(STATE) {
        settings.push(("state", vec![args.state.display().to_string()]));
    }
    Wanted { daemon: Daemon::Controller, file: args.config.clone(), settings }
}

/// Starts the unit, with the word of systemctl for it; else says why it was not.
async fn start(args: &InitArgs, verb: &str) -> Result<Option<String>, Problem> {
    if args.no_start {
        return Ok(Some("--no-start was said".to_owned()));
    }
    if args.config != Path::new(FILE) {
        return Ok(Some(format!("the unit reads {FILE}, and no other file")));
    }
    let missing = units::missing(&[Daemon::Controller]).await?;
    if missing.is_none() {
        units::start(&[Daemon::Controller], verb).await?;
    }
    Ok(missing)
}

async fn hosts(client: &Client) -> Result<Vec<Host>, Problem> {
    client.get("/v1/hosts").await
}

async fn wait(client: &Client) -> Result<(), Problem> {
    let deadline = Instant::now() + START_MAX;
    loop {
        let Err(problem) = hosts(client).await else { return Ok(()) };
        if Instant::now() >= deadline {
            let what = format!("the controller does not answer at {}", client.address());
            let why = format!("{} after {} s", problem.why, START_MAX.as_secs());
            let unit = Daemon::Controller.unit();
            return Err(Problem::unavailable(what, why)
                .next(format!("see what it says: journalctl -u {unit} -n 30")));
        }
        sleep(LOOK_EVERY).await;
    }
}

/// A token for the first host.
async fn token(
    args: &InitArgs,
    client: &Client,
    url: &str,
    listen: SocketAddr,
) -> Result<JoinToken, Problem> {
    let host = match &args.host {
        Some(host) => host.clone(),
        None => free_name(args.site.as_ref(), &hosts(client).await?)?,
    };
    // The controller knows at which of its addresses others reach it.
    let is_any = listen.ip().is_unspecified() && args.names.is_empty();
    let ask = NewToken { controller_url: (!is_any).then(|| url.to_owned()) };
    let made: MadeToken = client.post(&format!("/v1/hosts/{host}/token"), &ask).await?;
    made.token.parse().map_err(|why| Problem::internal("can't read the controller's token", why))
}

/// The first of `home1`, `home2` and so on that no host has.
fn free_name(site: Option<&SiteId>, known: &[Host]) -> Result<HostId, Problem> {
    let known: BTreeSet<&str> = known.iter().map(|host| host.id.as_str()).collect();
    let base = site.map_or("host", SiteId::as_str);
    let mut names = (1_u32..).map(|number| format!("{base}{number}"));
    let name = names.find(|name| !known.contains(name.as_str())).unwrap_or_default();
    HostId::new(name).map_err(|why| {
        Problem::invalid("can't choose a name for the first host", why).next("name it: --host NAME")
    })
}

/// For people.
fn tell(made: &Made, not_started: Option<&str>, socket: &str) {
    let (file, url) = (made.config.display(), &made.url);
    output::text(&format!("The controller's settings are in {file}."));
    output::text(&format!("Its address: {url}"));
    output::text(&format!("The fingerprint of the cluster's authority: {}", made.fingerprint));
    if let Some(why) = not_started.filter(|_| !made.is_up) {
        output::text(&format!("\nThe controller was not started: {why}. Start it:"));
        let dir = Path::new(socket.trim_start_matches("unix:")).parent();
        for dir in dir.into_iter().filter(|dir| !dir.is_dir()) {
            output::text(&format!("    install -d -m 0755 {}", dir.display()));
        }
        let config = match made.config == Path::new(FILE) {
            true => String::new(),
            false => format!(" --config {file}"),
        };
        output::text(&format!("    perigee controller run{config}"));
        output::text("Then run this command again, for the line with which the first host joins.");
        return;
    }
    if let Some(join) = &made.join {
        output::text("\nAt the first host, within an hour:");
        output::text(&format!("    {join}"));
        output::text("For each further host, here, another line like it: perigee host token NAME");
        output::text(
            "Then, here: perigee host list; perigee image import NAME FILE; perigee job submit --wait FILE",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_port_7000_unless_it_says_another_one() {
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1:7000"),
            ("10.0.0.1:8000", "10.0.0.1:8000"),
            ("fd00::1", "[fd00::1]:7000"),
            ("[fd00::1]", "[fd00::1]:7000"),
            ("[fd00::1]:8000", "[fd00::1]:8000"),
        ] {
            assert_eq!(address(text).map(|address| address.to_string()), Ok(expected.to_owned()));
        }
        for bad in ["", "home", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "https://10.0.0.1"] {
            assert!(address(bad).is_err(), "{bad:?}");
        }
    }
}
