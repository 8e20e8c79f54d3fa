//! `perigee client`

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Subcommand};
use perigee_model::client::{
    Binding, Chap, ClientInfo, InitiatorName, Lifetime, MacAddress, NewClient, Over, Secret,
    Service,
};
use perigee_model::{ClientName, ImageName, Problem, VolumeName};

use crate::Context;
use crate::commands::pool_server;
use crate::output::{self, Column};

/// More than any secret has.
const SECRET_FILE_BYTES_MAX: u64 = 4096;

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Add a machine that boots from this pool
    Add {
        /// The client's name
        name: ClientName,
        /// The address of the network card that it boots over, for example 52:54:00:12:34:56
        #[arg(long)]
        mac: Option<MacAddress>,
        /// The name by which it logs in over iSCSI [default: made of the client's name]
        #[arg(long, value_name = "IQN")]
        initiator: Option<InitiatorName>,
        #[command(flatten)]
        chap: ChapOptions,
        #[command(flatten)]
        pool: Pool,
    },
    /// List clients: what they are bound to, what they booted, and who is logged in there
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        pool: Pool,
    },
    /// Say what a client boots, from its next boot on
    #[command(group = ArgGroup::new("service").required(true).args(["volume", "image"]))]
    Bind {
        /// The client's name
        name: ClientName,
        /// This volume itself
        #[arg(long)]
        volume: Option<VolumeName>,
        /// A clone of its own of this image or snapshot
        #[arg(long)]
        image: Option<ImageName>,
        /// Keep the clone from one boot to the next (the default)
        #[arg(long, conflicts_with_all = ["ephemeral", "volume"])]
        persistent: bool,
        /// A fresh clone at each boot
        #[arg(long, conflicts_with = "volume")]
        ephemeral: bool,
        /// How it reaches its disk: `iscsi` or `nbd`
        #[arg(long, default_value = "iscsi", value_parser = over)]
        over: Over,
        #[command(flatten)]
        pool: Pool,
    },
    /// From its next boot on the client boots nothing
    Unbind {
        /// The client's name
        name: ClientName,
        #[command(flatten)]
        pool: Pool,
    },
    /// Forget a client; a clone that it keeps stays as a volume
    #[command(visible_alias = "rm")]
    Remove {
        /// The client's name
        name: ClientName,
        #[command(flatten)]
        pool: Pool,
    },
}

#[derive(Debug, clap::Args)]
pub struct Pool {
    /// The pool's directory
    #[arg(long = "pool", value_name = "DIR")]
    dir: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct ChapOptions {
    /// It has to prove by CHAP that it is this user
    #[arg(long, value_name = "USER", requires = "chap_secret")]
    chap_user: Option<ClientName>,
    /// The file with its CHAP secret, `-` for standard input
    #[arg(long, value_name = "FILE", requires = "chap_user")]
    chap_secret: Option<PathBuf>,
    /// The server proves to it by CHAP that it is this user
    #[arg(long, value_name = "USER", requires_all = ["chap_user", "target_chap_secret"])]
    target_chap_user: Option<ClientName>,
    /// The file with the server's CHAP secret, `-` for standard input
    #[arg(long, value_name = "FILE", requires = "target_chap_user")]
    target_chap_secret: Option<PathBuf>,
}

pub fn over(text: &str) -> Result<Over, String> {
    match text {
        "iscsi" => Ok(Over::Iscsi),
        "nbd" => Ok(Over::Nbd),
        _ => Err(format!("{text:?} is neither iscsi nor nbd")),
    }
}

const CLIENTS: &[Column<ClientInfo>] = &[
    ("name", |c| c.name.to_string()),
    ("mac", |c| output::or_dash(c.mac.as_ref())),
    ("boots", |c| output::or_dash(c.binding.as_ref().map(|b| &b.service))),
    ("over", |c| output::or_dash(c.binding.as_ref().map(|b| &b.over))),
    ("booted", |c| output::or_dash(c.volume.as_ref())),
    ("count", |c| c.boots.to_string()),
    ("logged in", |c| {
        let peers: Vec<_> =
            c.sessions.iter().map(|s| format!("{} from {}", s.over, s.peer)).collect();
        if peers.is_empty() { "-".to_owned() } else { peers.join(", ") }
    }),
    ("chap", |c| output::or_dash(c.chap_user.as_ref())),
    ("initiator", |c| c.initiator.to_string()),
];

pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let format = context.format;
    let show = |client: &ClientInfo| output::one(format, client, CLIENTS);
    match verb {
        Verb::Add { name, mac, initiator, chap, pool } => {
            let (chap, target_chap) = chap.read()?;
            let new = NewClient { name, mac, initiator, chap, target_chap };
            let client: ClientInfo =
                pool_server(&pool.dir).await?.post("/v1/clients", &new).await?;
            show(&client)
        }
        Verb::List { pool } => {
            let clients: Vec<ClientInfo> = pool_server(&pool.dir).await?.get("/v1/clients").await?;
            output::list(format, &clients, CLIENTS)
        }
        Verb::Bind { name, volume, image, ephemeral, over, pool, .. } => {
            let lifetime = if ephemeral { Lifetime::Ephemeral } else { Lifetime::Persistent };
            let image = image.map(|image| Service::Image { image, lifetime });
            let service = volume.map(Service::Volume).or(image).ok_or_else(|| {
                Problem::invalid(format!("bind client {name}"), "neither volume nor image is named")
            })?;
            let path = format!("/v1/clients/{name}/binding");
            let binding = Binding { service, over };
            let client: ClientInfo = pool_server(&pool.dir).await?.put(&path, &binding).await?;
            show(&client)
        }
        Verb::Unbind { name, pool } => {
            let path = format!("/v1/clients/{name}/binding");
            pool_server(&pool.dir).await?.delete(&path).await
        }
        Verb::Remove { name, pool } => {
            pool_server(&pool.dir).await?.delete(&format!("/v1/clients/{name}")).await
        }
    }
}

impl ChapOptions {
    /// What the client proves, and what is proved to it.
    fn read(self) -> Result<(Option<Chap>, Option<Chap>), Problem> {
        let own = read_chap(self.chap_user.zip(self.chap_secret))?;
        Ok((own, read_chap(self.target_chap_user.zip(self.target_chap_secret))?))
    }
}

fn read_chap(given: Option<(ClientName, PathBuf)>) -> Result<Option<Chap>, Problem> {
    let Some((user, file)) = given else { return Ok(None) };
    Ok(Some(Chap { user, secret: read_secret(&file)? }))
}

/// The first line of a file.
fn read_secret(file: &Path) -> Result<Secret, Problem> {
    let what = format!("can't use the CHAP secret in {}", file.display());
    let next = "a file has the secret in its first line; `-` reads it from standard input";
    let mut text = String::new();
    let read = if file == Path::new("-") {
        std::io::stdin().take(SECRET_FILE_BYTES_MAX).read_to_string(&mut text)
    } else {
        std::fs::File::open(file)
            .and_then(|file| file.take(SECRET_FILE_BYTES_MAX).read_to_string(&mut text))
    };
    read.map_err(|error| Problem::invalid(&what, error).next(next))?;
    let line = text.lines().next().unwrap_or_default();
    line.parse().map_err(|error| Problem::invalid(what, error).next(next))
}
