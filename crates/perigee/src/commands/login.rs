//! `perigee login`: keeps a token, with the address of the controller and the fingerprint of its authority.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use perigee_http::{Client, read_private, write_private};
use perigee_model::Problem;
use perigee_model::secret::Secret;
use perigee_model::tenant::Me;
use serde::{Deserialize, Serialize};

use crate::Context;
use crate::commands::controller_client;
use crate::output::{self, Column};

const ANSWER_MAX: Duration = Duration::from_secs(30);
/// No token is so long.
const TOKEN_BYTES_MAX: u64 = 1024;

#[derive(Debug, Args)]
pub struct Login {
    /// `https://HOST:PORT` of the controller
    #[arg(value_name = "URL")]
    controller: String,
    /// The fingerprint of the cluster's authority, as `perigee token create` prints it: it says which controller is the
    /// right one
    #[arg(long)]
    fingerprint: String,
}

/// What is kept.
#[derive(Serialize, Deserialize)]
pub struct Kept {
    controller: String,
    fingerprint: String,
    token: String,
}

impl Kept {
    /// Of the controller.
    pub fn url(&self) -> &str {
        &self.controller
    }

    /// A client of the controller that sends the token.
    pub fn client(&self, wait: Duration) -> Result<Client, Problem> {
        Client::to_enrol(&self.controller, &self.fingerprint, wait)?.with_token(&self.token)
    }
}

/// `$XDG_CONFIG_HOME/perigee/login.json`
fn path() -> Result<PathBuf, Problem> {
    Ok(directory()?.join("login.json"))
}

/// `$XDG_CONFIG_HOME/perigee`
pub fn directory() -> Result<PathBuf, Problem> {
    let dir = |name| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let config = dir("XDG_CONFIG_HOME").or_else(|| dir("HOME").map(|home| home.join(".config")));
    let config = config.ok_or_else(|| {
        Problem::invalid(
            "can't find the file of the login",
            "neither HOME nor XDG_CONFIG_HOME is set",
        )
    })?;
    Ok(config.join("perigee"))
}

/// The login to use: if the user names a controller, that one's only.
pub fn kept(context: &Context) -> Result<Option<Kept>, Problem> {
    let path = match path() {
        Ok(path) if path.exists() => path,
        _ => return Ok(None),
    };
    let kept: Kept = serde_json::from_slice(&read_private(&path)?).map_err(|e| {
        Problem::invalid(format!("can't read {}", path.display()), e)
            .next("log in again: perigee login")
    })?;
    let is_meant = context.api.as_ref().is_none_or(|api| *api == kept.controller);
    Ok(is_meant.then_some(kept))
}

/// The address at which this machine reaches the controller, if other machines may reach it there too.
pub fn https_url(context: &Context) -> Result<Option<String>, Problem> {
    let kept = kept(context)?.map(|kept| kept.controller);
    Ok(kept.or_else(|| context.api.clone()).filter(|url| url.starts_with("https://")))
}

pub async fn login(ask: Login, context: &Context) -> Result<(), Problem> {
    if let Some(secret) =
        [&ask.controller, &ask.fingerprint].into_iter().find_map(|text| Secret::of(text))
    {
        let why = format!(
            "{secret} stands among the arguments, where other users of this machine see it"
        );
        return Err(Problem::invalid("can't log in", why)
            .next("give it on standard input: perigee login URL --fingerprint HEX < FILE; and revoke it if others may have seen it"));
    }
    let mut token = String::new();
    if std::io::IsTerminal::is_terminal(&std::io::stdin()) {
        output::note("paste the token, and press Enter and Ctrl-D");
    }
    let read = std::io::stdin().take(TOKEN_BYTES_MAX).read_to_string(&mut token);
    read.map_err(|e| Problem::invalid("can't read the token from standard input", e))?;
    let (controller, fingerprint) = (ask.controller, ask.fingerprint);
    let kept = Kept { controller, fingerprint, token: token.trim().to_owned() };
    let me: Me = kept.client(ANSWER_MAX)?.get("/v1/me").await?;
    let path = path()?;
    let bytes = serde_json::to_vec(&kept).map_err(|e| Problem::internal("can't log in", e))?;
    write_private(&path, &bytes)?;
    output::one(context.format, &me, ME)
}

pub fn logout() -> Result<(), Problem> {
    let path = path()?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Problem::invalid(format!("can't delete {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

const ME: &[Column<Me>] = &[
    ("tenant", |m| m.tenant.to_string()),
    ("user", |m| output::or_dash(m.user.as_ref())),
    ("role", |m| output::word(&m.role)),
];

pub async fn whoami(context: &Context) -> Result<(), Problem> {
    let me: Me = controller_client(context)?.get("/v1/me").await?;
    output::one(context.format, &me, ME)
}

/// Who asks, where a command is about the user itself.
pub async fn me(client: &Client) -> Result<Me, Problem> {
    client.get("/v1/me").await
}
