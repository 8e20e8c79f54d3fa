//! `perigee volume`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use perigee_http::{Listen, Network};
use perigee_model::job::{AdoptVolume, ClusterVolume, NewVolume, UnknownKind};
use perigee_model::limits::NEW_VOLUMES;
use perigee_model::replica::{PromoteVolume, ReplicateVolume};
use perigee_model::volume::{
    CachePolicy, CheckScope, Compacted, CreateVolume, CreateVolumes, Resize, Snapshot, VolumeInfo,
    VolumeSource,
};
use perigee_model::volume_move::MoveVolume;
use perigee_model::waiting::in_words;
use perigee_model::{HostId, ImageName, LeaveSite, Problem, SiteId, TenantName, VolumeName};

use crate::arguments::size;
use crate::commands::daemon::{self, Live};
use crate::commands::host::note_silent;
use crate::commands::iscsi_clients::IscsiClientOptions;
use crate::commands::leave_site::LeaveSiteChange;
use crate::commands::nbd_clients::ClientOptions;
use crate::commands::network::NetworkFlags;
use crate::commands::remotes::RemoteFlags;
use crate::commands::trace::{self, TraceVerb};
use crate::commands::{backup, check, moving_volumes, replicas, unknown};
use crate::config::{DaemonOptions, Told};
use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::{
    CONTROL_SOCKET, PoolOption, controller_client, info, list, pool_server, server,
};

/// `perigee volume VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Create an empty volume, or a copy-on-write clone of an image
    Create(Box<Create>),
    /// Create a copy-on-write clone of a volume's current content
    Clone {
        /// The volume to clone
        source: VolumeName,
        /// The new volume's name
        name: VolumeName,
        /// Create N volumes, NAME-0001 and so on: either all of them or none
        #[arg(long, value_name = "N", requires = "pool", value_parser = clap::value_parser!(u32).range(1..))]
        count: Option<u32>,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Save a volume's current content as an image
    Snapshot {
        /// The volume
        volume: VolumeName,
        /// The new image's name
        image: ImageName,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Change the size of a volume, also while it is in use
    Resize {
        /// The volume's name
        name: VolumeName,
        /// The new size, for example 20GiB; added space reads as zeros
        #[arg(long, value_parser = size)]
        size: u64,
        /// Allow a smaller size. The data beyond it is lost; nothing may be using the volume
        #[arg(long)]
        shrink: bool,
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Change whether a volume may leave its site
    Update {
        /// The volume's name
        name: VolumeName,
        #[command(flatten)]
        change: LeaveSiteChange,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// List volumes
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        pool: PoolOption,
        /// Show instead what hosts have that the cluster does not know: an admin may adopt it
        #[arg(long, conflicts_with = "pool")]
        unknown: bool,
    },
    /// Show one volume
    Info {
        /// The volume's name
        name: VolumeName,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Move a volume to another host, also while it is in use, and show the progress.
    ///
    /// The volume is used at its new host at once; what it holds is copied there in the background. Ctrl-C
    /// does not stop the move; --cancel does, until the new host has taken the volume.
    Move {
        /// The volume's name
        name: VolumeName,
        /// The new host
        #[arg(required_unless_present = "cancel", conflicts_with = "cancel")]
        host: Option<HostId>,
        /// Cancel the move; the volume stays at its host
        #[arg(long)]
        cancel: bool,
        /// Move it even if the new host's site has its replica, and no other site has a copy of it then
        #[arg(long)]
        yes: bool,
    },
    /// Keep a replica of a volume at another site.
    ///
    /// It is made in rounds while the volume is in use, and each round ships only what changed. `perigee volume
    /// info` shows how old a replica is; `perigee volume promote` makes it the volume when the volume's home is
    /// lost.
    Replicate {
        /// The volume's name
        name: VolumeName,
        /// The site of the replica. The host with the most free space there gets it
        #[arg(long, value_name = "SITE")]
        to: SiteId,
        /// The time between two rounds
        #[arg(long, value_name = "TIME", default_value = "15m", value_parser = perigee_model::units::parse_duration)]
        every: u64,
        /// How many complete rounds are kept
        #[arg(long, value_name = "N", default_value_t = 3)]
        keep: u32,
        /// End the replica, and drop what it has
        #[arg(long, conflicts_with_all = ["every", "keep"])]
        stop: bool,
    },
    /// Make a replica the volume, because the volume's host is lost.
    ///
    /// What was written since the replica was made is lost. The command says how much that is, and then asks.
    Promote {
        /// The volume's name
        name: VolumeName,
        /// The host whose replica becomes the volume [default: the host with the newest one]
        #[arg(long)]
        host: Option<HostId>,
        /// Do it although the volume's host answers
        #[arg(long)]
        force: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        /// Call off a promotion that is not done
        #[arg(long, conflicts_with_all = ["host", "force", "yes"])]
        cancel: bool,
    },
    /// Use a volume in the cluster that was made at a host with --pool
    Adopt {
        /// The volume's name, as `perigee volume list --unknown` shows it
        name: VolumeName,
        /// The host whose pool has it
        #[arg(long)]
        host: HostId,
    },
    /// Delete a volume that is not in use
    #[command(visible_alias = "rm")]
    Delete {
        /// The volume's name
        name: VolumeName,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Merge the layers that only this volume needs, also while it is in use
    Compact {
        /// The volume's name
        name: VolumeName,
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Look for damage in the layers of a volume, or of the whole pool. Exit code 0: no faults; 1:
    /// faults
    Check {
        /// The volume [default: the whole pool]
        name: Option<VolumeName>,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Watch the requests of clients, or record them in a file
    #[command(subcommand)]
    Trace(TraceVerb),
    /// Serve a pool's volumes and images over NBD and iSCSI
    Serve(Box<Serve>),
}

/// What [`Verb::Create`] takes.
#[derive(Debug, clap::Args)]
pub struct Create {
    /// The new volume's name
    name: VolumeName,
    /// Create N volumes, NAME-0001 and so on: either all of them or none
    #[arg(long, value_name = "N", requires = "pool", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Size, for example 10GiB; with --image at least the image's size, which is then the default
    #[arg(long, value_parser = size)]
    size: Option<u64>,
    /// Clone this image or snapshot
    #[arg(long)]
    image: Option<ImageName>,
    /// The host whose pool holds the volume [default: the host with the most free space]
    #[arg(long, conflicts_with = "pool")]
    host: Option<HostId>,
    /// The tenant to whom the volume belongs, for accounting [default: default]
    #[arg(long, requires = "pool")]
    tenant: Option<TenantName>,
    /// Whether the volume's own data goes through the page cache (`shared`) or past it (`direct`)
    /// [default: shared]
    #[arg(long, requires = "pool")]
    cache: Option<CachePolicy>,
    /// Whether it may leave its site: `never` or `allowed`. If the image may not, it may not either
    #[arg(long, default_value_t)]
    leave_site: LeaveSite,
    #[command(flatten)]
    pool: PoolOption,
}

/// What [`Verb::Serve`] takes.
#[derive(Debug, clap::Args)]
pub struct Serve {
    /// The pool's directory; it is created if it does not exist
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// Keep the volumes' own data in this directory, and only images in the pool's. Existing
    /// files are not moved
    #[arg(long, value_name = "DIR")]
    private: Option<PathBuf>,
    /// Address for NBD clients: `unix:PATH` or `HOST:PORT`; may be given more than once
    #[arg(long, required_unless_present = "iscsi", value_name = "ADDRESS")]
    nbd: Vec<Listen>,
    /// Address of the control API [default: unix:DIR/control.sock]
    #[arg(long, value_name = "ADDRESS")]
    control: Vec<Listen>,
    #[command(flatten)]
    clients: Box<ClientOptions>,
    #[command(flatten)]
    iscsi: IscsiClientOptions,
    #[command(flatten)]
    remotes: Box<RemoteFlags>,
    #[command(flatten)]
    network: NetworkFlags,
    /// A directory from which whoever reaches the control API may import images; may be given more than once.
    /// Without it, images are uploaded
    #[arg(long, value_name = "DIR")]
    image_dir: Vec<PathBuf>,
    /// Directory for the NBD sockets of this host's VMs, one for each. QEMU's users must be able to enter
    /// the directories above it
    #[arg(long, default_value = "/run/perigee/vms", value_name = "DIR")]
    vm_sockets: PathBuf,
    /// What says that this host has booted anew; hosts that share a kernel need a file each
    #[arg(long, default_value = perigee_http::BOOT_ID, value_name = "FILE")]
    boot_id: PathBuf,
    #[command(flatten)]
    daemon: DaemonOptions,
}

const CLUSTER: &[Column<ClusterVolume>] = &[
    ("name", |v| v.name.to_string()),
    ("home", |v| v.home.to_string()),
    ("size", |v| seen(v, output::bytes(v.size_bytes))),
    ("allocated", |v| seen(v, output::bytes(v.allocated_bytes))),
    ("epoch", |v| seen(v, v.epoch.to_string())),
    ("used by", |v| output::or_dash(v.used_by.as_ref())),
    ("leave site", |v| v.leave_site.to_string()),
    ("replicas", |v| replicas::summary(&v.replicas)),
    ("moving", |v| v.moving.as_ref().map_or_else(|| "-".to_owned(), moving_volumes::summary)),
    ("restoring", |v| v.restoring.as_ref().map_or_else(|| "-".to_owned(), backup::summary)),
    ("waits", |v| in_words(&v.waits)),
];

/// What is not known is not shown as 0.
fn seen(volume: &ClusterVolume, text: String) -> String {
    if volume.size_bytes == 0 && !volume.waits.is_empty() { "?".to_owned() } else { text }
}

const LOCAL: &[Column<VolumeInfo>] = &[
    ("name", |v| v.name.to_string()),
    ("virtual", |v| output::bytes(v.size_bytes)),
    ("own", |v| output::bytes(v.own_bytes)),
    ("shared", |v| output::bytes(v.shared_bytes)),
    ("remote", |v| output::bytes(v.remote_bytes)),
    ("layers", |v| v.chain.len().to_string()),
    ("tenant", |v| v.tenant.to_string()),
    ("cache", |v| v.cache.to_string()),
    ("epoch", |v| v.epoch.to_string()),
    ("leave site", |v| v.leave_site.to_string()),
    ("health", |v| output::word(&v.health)),
    ("sessions", |v| v.sessions.to_string()),
];

/// The names `NAME-0001` and so on, with at least four digits.
fn numbered(name: &VolumeName, count: u32) -> Result<Vec<VolumeName>, Problem> {
    let what = format!("can't name {count} volumes after {name}");
    NEW_VOLUMES.check(count).map_err(|error| error.problem(&what))?;
    let digits = count.to_string().len().max(4);
    (1..=count)
        .map(|number| VolumeName::new(format!("{name}-{number:0digits$}")))
        .collect::<Result<_, _>>()
        .map_err(|error| Problem::invalid(what, error))
}

const COMPACTED: &[Column<Compacted>] = &[
    ("layers before", |c| c.layers_before.to_string()),
    ("layers after", |c| c.layers_after.to_string()),
    ("copied", |c| output::bytes(c.copied_bytes)),
];

/// Does what a verb asks for, and prints the result. Exit code 1: `volume check` has found faults.
pub async fn run(verb: Verb, context: &Context, told: Option<Told>) -> Result<ExitCode, Problem> {
    let format = context.format;
    match verb {
        Verb::Check { name, pool } => {
            let scope = name.map_or(CheckScope::Pool, CheckScope::Volume);
            return check::run(scope, pool, context).await;
        }
        Verb::Create(ask) => create(*ask, context).await?,
        Verb::Clone { source, name, count, pool } => {
            let new = CreateVolume::new(name, None, VolumeSource::Volume(source));
            make(context, pool, None, new, count).await?;
        }
        Verb::Snapshot { volume, image, pool } => {
            let (path, ask) = (format!("/v1/volumes/{volume}/snapshot"), Snapshot { image });
            let _: serde_json::Value = server(context, pool).await?.post(&path, &ask).await?;
        }
        Verb::Resize { name, size, shrink, pool } => {
            let ask = Resize { size_bytes: size, shrink };
            let path = format!("/v1/volumes/{name}/resize");
            let volume = pool_server(&pool).await?.post(&path, &ask).await?;
            output::one(format, &volume, LOCAL)?;
        }
        Verb::Update { name, change, pool } => {
            change.apply(context, pool, &format!("/v1/volumes/{name}")).await?;
        }
        Verb::List { unknown: true, .. } => {
            note_silent(&controller_client(context)?).await;
            unknown::list(context, Some(UnknownKind::Volume)).await?;
        }
        Verb::List { pool, .. } => list(context, pool, "/v1/volumes", LOCAL, CLUSTER).await?,
        Verb::Info { name, pool } => {
            info(context, pool, &format!("/v1/volumes/{name}"), LOCAL, CLUSTER).await?;
        }
        Verb::Move { name, host: Some(to), yes: confirmed, .. } => {
            let ask = MoveVolume { to, confirmed };
            moving_volumes::begin(&controller_client(context)?, &name, &ask, format).await?;
        }
        Verb::Move { name, host: None, .. } => {
            moving_volumes::cancel(&controller_client(context)?, &name, format).await?;
        }
        Verb::Replicate { name, to, stop: true, .. } => {
            replicas::stop(&controller_client(context)?, &name, to, format).await?;
        }
        Verb::Replicate { name, to, every: every_s, keep, .. } => {
            let ask = ReplicateVolume { to, every_s, keep };
            replicas::replicate(&controller_client(context)?, &name, &ask, format).await?;
        }
        Verb::Promote { name, host, force, yes, cancel } => {
            let ask = PromoteVolume { host, force, dry_run: !cancel, layer: None, cancel };
            replicas::promote(&controller_client(context)?, &name, ask, yes, format).await?;
        }
        Verb::Adopt { name, host } => {
            let (client, path) = (controller_client(context)?, format!("/v1/volumes/{name}/adopt"));
            output::one(format, &client.post(&path, &AdoptVolume { host }).await?, CLUSTER)?;
        }
        Verb::Delete { name, pool } => {
            server(context, pool).await?.delete(&format!("/v1/volumes/{name}")).await?;
        }
        Verb::Compact { name, pool } => compact(context, &pool, &name).await?,
        Verb::Trace(verb) => trace::run(verb, format).await?,
        Verb::Serve(ask) => {
            let log = ask.daemon.log.clone();
            daemon::run(told, log, Live::log_only(), serve(*ask)).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn compact(context: &Context, pool: &Path, name: &VolumeName) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{name}/compact");
    let server = pool_server(pool).await?;
    let done = output::with_progress(|tell| server.post_long(&path, &(), tell)).await?;
    output::one(context.format, &done, COMPACTED)
}

/// Serves a pool until the process is asked to end.
async fn serve(ask: Serve) -> Result<(), Problem> {
    let control = match ask.control {
        none if none.is_empty() => vec![Listen::Unix(ask.pool.join(CONTROL_SOCKET))],
        control => control,
    };
    let network = may_listen(&ask.network, &control, &ask.nbd, &ask.clients, &ask.iscsi)?;
    perigee_volume::serve(perigee_volume::Config {
        pool: ask.pool,
        private: ask.private,
        nbd: ask.nbd,
        clients: (*ask.clients).into(),
        iscsi: ask.iscsi.into(),
        remotes: ask.remotes.options(network),
        control,
        image_dirs: ask.image_dir,
        vm_sockets: ask.vm_sockets,
        boot_id: ask.boot_id,
    })
    .await
}

/// What is not encrypted is served only with `--insecure`.
fn may_listen(
    flags: &NetworkFlags,
    control: &[Listen],
    nbd: &[Listen],
    clients: &ClientOptions,
    iscsi: &IscsiClientOptions,
) -> Result<Network, Problem> {
    let on_tcp = |listen: &[Listen]| listen.iter().any(|one| matches!(one, Listen::Tcp(_)));
    let network = flags.network_if(on_tcp(control) || on_tcp(nbd) && !clients.has_certificate())?;
    let plain = [
        ("iSCSI", iscsi.listens()),
        ("NBD with --tls optional", on_tcp(nbd) && clients.may_be_plain()),
    ];
    for (what, _) in plain.into_iter().filter(|(_, listens)| *listens) {
        if !flags.insecure {
            let why = format!("{what} is not encrypted, and nobody has allowed that");
            return Err(Problem::invalid("can't start the volume server", why)
                .next("on a network that you trust: --insecure; with --identity DIR the rest stays encrypted"));
        }
        tracing::warn!("--insecure: {what} is not encrypted");
    }
    Ok(network)
}

async fn create(ask: Create, context: &Context) -> Result<(), Problem> {
    let source = ask.image.map_or(VolumeSource::Empty, VolumeSource::Image);
    let mut new = CreateVolume::new(ask.name, ask.size, source);
    new.tenant = ask.tenant.unwrap_or_default();
    new.cache = ask.cache.unwrap_or_default();
    new.leave_site = ask.leave_site;
    make(context, ask.pool, ask.host, new, ask.count).await
}

/// Makes one volume, or `count` of them with numbers after the name of `new`.
async fn make(
    context: &Context,
    pool: PoolOption,
    host: Option<HostId>,
    new: CreateVolume,
    count: Option<u32>,
) -> Result<(), Problem> {
    match pool.pool {
        Some(pool) if count.is_some() => {
            let names = numbered(&new.name, count.unwrap_or(1))?;
            let many = CreateVolumes { names, ..new.into() };
            let server = pool_server(&pool).await?;
            let volumes: Vec<VolumeInfo> = server.post("/v1/batch/volumes", &many).await?;
            output::list(context.format, &volumes, LOCAL)
        }
        Some(pool) => {
            let volume: VolumeInfo = pool_server(&pool).await?.post("/v1/volumes", &new).await?;
            output::one(context.format, &volume, LOCAL)
        }
        None => {
            let CreateVolume { name, size_bytes, source, leave_site, .. } = new;
            let new = NewVolume { name, host, size_bytes, source, leave_site };
            let volume: ClusterVolume =
                controller_client(context)?.create("/v1/volumes", &new).await?;
            output::one(context.format, &volume, CLUSTER)
        }
    }
}
