//! `perigee login`, `perigee logout`, `perigee whoami`

use std::io::Read as _;
use std::time::Duration;

use clap::Args;
use perigee_http::{Client, write_private};
use perigee_model::Problem;
use perigee_model::secret::Secret;
use perigee_model::tenant::Me;

use crate::context::Context;
use crate::kept_login::{Kept, path};
use crate::output::{self, Column};
use crate::servers::controller_client;

const ANSWER_MAX: Duration = Duration::from_secs(30);
/// No token is so long.
const TOKEN_BYTES_MAX: u64 = 1024;

/// Which controller, and how its authority is recognized. The token itself comes on standard input.
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

/// Keeps the token in a file that only this user can read, if the controller takes it.
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

/// Deletes the file. The token stays valid until it expires or is revoked.
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

/// Prints the tenant, user and role that the controller sees.
pub async fn whoami(context: &Context) -> Result<(), Problem> {
    let me: Me = controller_client(context)?.get("/v1/me").await?;
    output::one(context.format, &me, ME)
}

/// Who asks, where a command is about the user itself.
pub async fn me(client: &Client) -> Result<Me, Problem> {
    client.get("/v1/me").await
}
