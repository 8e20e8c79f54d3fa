//! `perigee user`, `perigee token`

use std::path::{Path, PathBuf};

use clap::Subcommand;
use perigee_http::Client;
use perigee_model::secret::{Secret, id_of_token};
use perigee_model::tenant::{
    AccessToken, MadeAccessToken, NewAccessToken, NewUser, Role, SshKey, User,
};
use perigee_model::units::parse_duration;
use perigee_model::{Problem, TenantName, UserName};

use crate::commands::{login, public_keys};
use crate::context::Context;
use crate::kept_login;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `TENANT/USER`
#[derive(Debug, Clone)]
pub struct UserPath {
    tenant: TenantName,
    user: UserName,
}

impl std::str::FromStr for UserPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (tenant, user) =
            text.split_once('/').ok_or_else(|| format!("{text:?} is not TENANT/USER"))?;
        let tenant = TenantName::new(tenant).map_err(|e| e.to_string())?;
        Ok(Self { tenant, user: UserName::new(user).map_err(|e| e.to_string())? })
    }
}

impl UserPath {
    fn url(&self) -> String {
        format!("/v1/tenants/{}/users/{}", self.tenant, self.user)
    }

    /// The user that is named, or the one who asks.
    async fn or_me(named: Option<Self>, client: &Client) -> Result<Self, Problem> {
        if let Some(named) = named {
            return Ok(named);
        }
        let me = login::me(client).await?;
        let user = me.user.ok_or_else(|| {
            Problem::invalid("can't say which user is meant", "you are not logged in as one")
                .next("name it with --user TENANT/USER")
        })?;
        Ok(Self { tenant: me.tenant, user })
    }
}

/// `perigee user VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Add a user, or change its role
    Add {
        /// `TENANT/USER`
        user: UserPath,
        /// `member` uses the tenant's things and its own jobs, `operator` sees all of the tenant, and `admin`, which is
        /// for users of the tenant default, does everything for all tenants
        #[arg(long)]
        role: Role,
    },
    /// List a tenant's users
    #[command(visible_alias = "ls")]
    List {
        /// The tenant
        tenant: TenantName,
    },
    /// Remove a user with its tokens and SSH keys. What it has made is its tenant's, and stays
    #[command(visible_alias = "rm")]
    Remove {
        /// `TENANT/USER`
        user: UserPath,
    },
    /// SSH keys, for the data repository
    #[command(subcommand)]
    Key(KeyVerb),
}

/// `perigee user key VERB`.
#[derive(Debug, Subcommand)]
pub enum KeyVerb {
    /// Add a key
    Add {
        /// A name for the key
        name: UserName,
        /// The public key's file
        file: PathBuf,
        /// `TENANT/USER` [default: yourself]
        #[arg(long)]
        user: Option<UserPath>,
    },
    /// List keys
    #[command(visible_alias = "ls")]
    List {
        /// `TENANT/USER` [default: yourself]
        #[arg(long)]
        user: Option<UserPath>,
    },
    /// Remove a key
    #[command(visible_alias = "rm")]
    Remove {
        /// The key's name
        name: UserName,
        /// `TENANT/USER` [default: yourself]
        #[arg(long)]
        user: Option<UserPath>,
    },
}

/// `perigee token VERB`. A token is shown once, when it is made.
#[derive(Debug, Subcommand)]
pub enum TokenVerb {
    /// Make a token, and print it this once
    Create {
        /// How long it is good for
        #[arg(long, value_name = "TIME", default_value = "30d", value_parser = parse_duration)]
        life: u64,
        /// `TENANT/USER` [default: yourself]
        #[arg(long)]
        user: Option<UserPath>,
    },
    /// List tokens, without their secrets
    #[command(visible_alias = "ls")]
    List {
        /// `TENANT/USER` [default: yourself]
        #[arg(long)]
        user: Option<UserPath>,
    },
    /// Revoke a token
    Revoke {
        /// The token's id, as `perigee token list` shows it, or the token itself
        id: String,
        /// `TENANT/USER` [default: yourself]
        #[arg(long)]
        user: Option<UserPath>,
    },
}

const USERS: &[Column<User>] = &[
    ("user", |u| format!("{}/{}", u.tenant, u.name)),
    ("role", |u| output::word(&u.role)),
    ("since", |u| output::time(u.created_ms)),
    ("keys", |u| u.keys.len().to_string()),
];

const KEYS: &[Column<SshKey>] = &[("key", |k| k.name.to_string()), ("public", |k| k.key.clone())];

const TOKENS: &[Column<AccessToken>] = &[
    ("id", |t| t.id.clone()),
    ("since", |t| output::time(t.created_ms)),
    ("expires", |t| output::time(t.expires_ms)),
];

/// The key of a file that has one.
fn public_key(name: UserName, file: &Path) -> Result<SshKey, Problem> {
    let what = || format!("can't use {} as a public key", file.display());
    match public_keys::read(file)?.as_slice() {
        [line] => SshKey::new(name, line).map_err(|e| Problem::invalid(what(), e)),
        lines => {
            let why = format!("it has {} keys, and a name is for one", lines.len());
            Err(Problem::invalid(what(), why).next("put each into a file of its own"))
        }
    }
}

/// Asks the controller, and prints users or their keys.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Add { user, role } => {
            let added: User = client.put(&user.url(), &NewUser { role }).await?;
            output::one(context.format, &added, USERS)
        }
        Verb::List { tenant } => {
            let users: Vec<User> = client.get(&format!("/v1/tenants/{tenant}/users")).await?;
            output::list(context.format, &users, USERS)
        }
        Verb::Remove { user } => client.delete(&user.url()).await,
        Verb::Key(verb) => run_key(verb, &client, context).await,
    }
}

async fn run_key(verb: KeyVerb, client: &Client, context: &Context) -> Result<(), Problem> {
    match verb {
        KeyVerb::Add { name, file, user } => {
            let key = public_key(name, &file)?;
            let user = UserPath::or_me(user, client).await?;
            let changed: User = client.put(&format!("{}/keys", user.url()), &key).await?;
            output::list(context.format, &changed.keys, KEYS)
        }
        KeyVerb::List { user } => {
            let user = UserPath::or_me(user, client).await?;
            let found: User = client.get(&user.url()).await?;
            output::list(context.format, &found.keys, KEYS)
        }
        KeyVerb::Remove { name, user } => {
            let user = UserPath::or_me(user, client).await?;
            client.delete(&format!("{}/keys/{name}", user.url())).await
        }
    }
}

/// Whether standard output is a file that other users may read.
fn others_read_stdout() -> bool {
    let stdout = nix::sys::stat::fstat(std::io::stdout());
    stdout.is_ok_and(|meta| {
        let is_file = meta.st_mode & nix::libc::S_IFMT == nix::libc::S_IFREG;
        is_file && meta.st_mode & 0o044 != 0
    })
}

/// Asks the controller. A new token goes to standard output, alone on its line, in every format.
pub async fn run_token(verb: TokenVerb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        TokenVerb::Create { life, user } => {
            let path = format!("{}/tokens", UserPath::or_me(user, &client).await?.url());
            let made: MadeAccessToken =
                client.post(&path, &NewAccessToken { life_s: life }).await?;
            let until = output::time(made.expires_ms);
            output::note(&format!(
                "token {} is good until {until}; it is not shown again",
                made.id
            ));
            if let Some(fingerprint) = &made.fingerprint {
                let known = kept_login::https_url(context)?.or(made.controller_url);
                let url = known.unwrap_or_else(|| "https://HOST:PORT".to_owned());
                output::note(&format!(
                    "to use it: perigee login {url} --fingerprint {fingerprint}"
                ));
            }
            output::text(&made.token);
            if others_read_stdout() {
                output::note(
                    "other users of this machine may read the file with the token: chmod 600 it",
                );
            }
            Ok(())
        }
        TokenVerb::List { user } => {
            let path = format!("{}/tokens", UserPath::or_me(user, &client).await?.url());
            let tokens: Vec<AccessToken> = client.get(&path).await?;
            output::list(context.format, &tokens, TOKENS)
        }
        TokenVerb::Revoke { id, user } => {
            // The secret of a token that is given whole stays here.
            let id = id_of_token(&id).unwrap_or(&id);
            if let Some(secret) = Secret::of(id) {
                let why = format!("there is {secret} in what was given as its id");
                return Err(Problem::invalid("can't revoke the token", why)
                    .next("`perigee token list` shows the ids"));
            }
            let user = UserPath::or_me(user, &client).await?;
            client.delete(&format!("{}/tokens/{id}", user.url())).await
        }
    }
}
