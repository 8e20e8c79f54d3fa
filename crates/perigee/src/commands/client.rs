//! `perigee client`

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Subcommand};
use perigee_model::client::{
    Binding, Chap, ClientInfo, InitiatorName, Lifetime, MacAddress, NewClient, Over, Secret,
    Service,
};
use perigee_model::{ClientName, ImageName, Problem, VolumeName};

use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::pool_server;

/// Longer than any secret.
const SECRET_FILE_BYTES_MAX: u64 = 4096;

/// `perigee client VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Add a machine that boots from this pool
    Add {
        /// The client's name
        name: ClientName,
        /// MAC address of the network card over which it boots, for example 52:54:00:12:34:56
        #[arg(long)]
        mac: Option<MacAddress>,
        /// The initiator name by which it logs in over iSCSI [default: made from the client's name]
        #[arg(long, value_name = "IQN")]
        initiator: Option<InitiatorName>,
        #[command(flatten)]
        chap: ChapOptions,
        #[command(flatten)]
        pool: Pool,
    },
    /// List clients: their bindings, what they booted, and their sessions
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        pool: Pool,
    },
    /// Choose what a client boots, from its next boot on
    #[command(group = ArgGroup::new("service").required(true).args(["volume", "image"]))]
    Bind {
        /// The client's name
        name: ClientName,
        /// Boot this volume itself
        #[arg(long)]
        volume: Option<VolumeName>,
        /// Boot a clone of this image or snapshot
        #[arg(long)]
        image: Option<ImageName>,
        /// Keep the clone from one boot to the next (the default)
        #[arg(long, conflicts_with_all = ["ephemeral", "volume"])]
        persistent: bool,
        /// Make a fresh clone at each boot
        #[arg(long, conflicts_with = "volume")]
        ephemeral: bool,
        /// Protocol by which it reaches its disk: `iscsi` or `nbd`
        #[arg(long, default_value = "iscsi", value_parser = over)]
        over: Over,
        #[command(flatten)]
        pool: Pool,
    },
    /// Remove a client's binding: from its next boot on, it boots nothing
    Unbind {
        /// The client's name
        name: ClientName,
        #[command(flatten)]
        pool: Pool,
    },
    /// Remove a client; the clone that it keeps stays as a volume
    #[command(visible_alias = "rm")]
    Remove {
        /// The client's name
        name: ClientName,
        #[command(flatten)]
        pool: Pool,
    },
}

/// The pool whose clients are meant: they are not known to a controller.
#[derive(Debug, clap::Args)]
pub struct Pool {
    /// The pool's directory
    #[arg(long = "pool", value_name = "DIR")]
    dir: PathBuf,
}

/// Names and secrets for CHAP (RFC 1994), in one direction or both. Secrets stand in files, so that no list of
/// processes shows them.
#[derive(Debug, clap::Args)]
pub struct ChapOptions {
    /// CHAP user name by which the client must log in
    #[arg(long, value_name = "USER", requires = "chap_secret")]
    chap_user: Option<ClientName>,
    /// The file with the client's CHAP secret, `-` for standard input
    #[arg(long, value_name = "FILE", requires = "chap_user")]
    chap_secret: Option<PathBuf>,
    /// CHAP user name by which the server proves itself to the client (mutual CHAP)
    #[arg(long, value_name = "USER", requires_all = ["chap_user", "target_chap_secret"])]
    target_chap_user: Option<ClientName>,
    /// The file with the server's CHAP secret, `-` for standard input
    #[arg(long, value_name = "FILE", requires = "target_chap_user")]
    target_chap_secret: Option<PathBuf>,
}

/// Parses what a client uses to reach its disk.
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
    ("boot count", |c| c.boots.to_string()),
    ("logged in", |c| {
        let peers: Vec<_> =
            c.sessions.iter().map(|s| format!("{} from {}", s.over, s.peer)).collect();
        if peers.is_empty() { "-".to_owned() } else { peers.join(", ") }
    }),
    ("chap", |c| output::or_dash(c.chap_user.as_ref())),
    ("initiator", |c| c.initiator.to_string()),
];

/// Asks the pool's volume server, or opens the pool if no server runs.
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
                let what = format!("can't bind client {name}");
                Problem::invalid(what, "neither volume nor image is named")
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
    /// The client's CHAP user and secret, and the server's.
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
    let next = "write the secret into the first line of the file, or give `-` to read it from standard input";
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
