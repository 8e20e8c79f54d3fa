//! `perigee image`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use perigee_http::Client;
use perigee_model::job::{AdoptVolume, ClusterImage, NewImage, ReplicateImage};
use perigee_model::leave_site::{LeaveSiteSet, SetLeaveSite};
use perigee_model::tenant::ShareImage;
use perigee_model::volume::{
    CheckScope, CopyImage, DeletedImage, ImageFormat, ImageInfo, ImportImage, Keep, Snapshot,
    Upload,
};
use perigee_model::{HostId, ImageName, LeaveSite, Problem, SiteId, VmId};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Context;
use crate::commands::host::note_silent;
use crate::commands::{
    Server, check, controller_client, controller_client_within, download, pool_server,
};
use crate::output::{self, Column};

/// An import takes as long as it needs. The controller ends one that makes no progress.
const IMPORT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// A guest may have much to write to its disk.
const SAVE_MAX: Duration = Duration::from_secs(300);

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Import a disk image (qcow2, raw, vmdk, vhdx, vhd, vdi) as a golden image
    Import {
        /// The new image's name
        name: ImageName,
        /// The file, or an https:// address, which this command fetches and sends on; with --pool also an nbd:// address
        file: String,
        /// What the SHA-256 of a fetched file has to be, as `sha256sum` prints it. An http:// address needs it
        #[arg(long, value_name = "HEX", value_parser = download::sha256, conflicts_with_all = ["pool", "on_host"])]
        sha256: Option<String>,
        /// FILE is a path on the host that imports it, below a directory that its volume server allows
        /// (--image-dir); otherwise the file is sent there
        #[arg(long, conflicts_with = "pool")]
        on_host: bool,
        /// The file's format: raw, qcow2, vmdk, vhdx, vhd or vdi [default: it is found out]
        #[arg(long, value_name = "FORMAT")]
        image_format: Option<ImageFormat>,
        /// The host that imports it; the others read from there [default: the host with the most free
        /// space]
        #[arg(long, conflicts_with = "pool")]
        host: Option<HostId>,
        /// Whether it may leave its site: `never` or `allowed`
        #[arg(long, default_value_t)]
        leave_site: LeaveSite,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Change whether an image may leave its site
    Update {
        /// The image's name
        name: ImageName,
        #[command(flatten)]
        change: LeaveSiteChange,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Copy an image of another host. The copy can be used at once: blocks that are still missing
    /// are read from that host. If it is copied again from another host, they are read from there from then on
    Copy {
        /// The image's name
        name: ImageName,
        /// NBD address of the other host's volume server
        #[arg(long, value_name = "HOST:PORT")]
        from: String,
        /// The export to copy; nothing may write to it [default: the image with the same name]
        #[arg(long)]
        export: Option<String>,
        /// What to keep here: `all` fetches everything in the background, `read` keeps what is
        /// read, and `never` keeps nothing, for data that may not leave its site
        #[arg(long, default_value_t = Keep::All)]
        keep: Keep,
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Copy an image to all hosts of a site. An import does this for all sites by itself. Use this for snapshots, and for
    /// hosts that were down then; otherwise they get their copies when a job first needs them
    Replicate {
        /// The image's name
        name: ImageName,
        /// The site
        #[arg(long, value_name = "SITE")]
        to: SiteId,
    },
    /// Make an image of the root disk of a running job's VM: what the disk would have after a power cut now. The guest
    /// first writes what it has in memory to the disk
    Save {
        /// The job, or its VM
        vm: VmId,
        /// The new image's name
        name: ImageName,
    },
    /// Let every tenant use an image of the tenant default. A tenant's own image of the same name comes first
    Share {
        /// The image's name
        name: ImageName,
        /// Don't let other tenants use it any more. What they have made of it stays
        #[arg(long)]
        stop: bool,
    },
    /// Fetch all missing blocks of a copy now, without a rate limit
    Fill {
        /// The image's name
        name: ImageName,
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Change what a copy keeps: `all` resumes fetching in the background, `read` stops it
    Keep {
        /// The image's name
        name: ImageName,
        /// `all` or `read`
        keep: Keep,
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// List images and snapshots
    #[command(visible_alias = "ls")]
    List {
        /// Also those that were made of jobs' inputs
        #[arg(long, conflicts_with = "pool")]
        all: bool,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Show one image
    Info {
        /// The image's name
        name: ImageName,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Look for damage in the layers of an image. Exit code 0: no faults; 1: faults
    Check {
        /// The image's name
        name: ImageName,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// Make an image of the cluster of one that a host has and no record names
    Adopt {
        /// The image's name, as `perigee host unknown` shows it
        name: ImageName,
        /// The host that has it
        #[arg(long)]
        host: HostId,
    },
    /// Delete an image or a snapshot. Volumes that stand on it go on, also while they are in use: what they need of it is
    /// merged into them in the background
    #[command(visible_alias = "rm")]
    Delete {
        /// The image's name
        name: ImageName,
        #[command(flatten)]
        pool: PoolOption,
    },
}

/// A change of whether data may leave its site.
#[derive(Debug, clap::Args)]
pub struct LeaveSiteChange {
    /// `never`: other sites get no copy, and read it into memory only, over encrypted links. `allowed`: copies
    /// may be made anywhere
    #[arg(long)]
    leave_site: LeaveSite,
    /// Confirm that what could not leave its site may be copied to any site from now on
    #[arg(long)]
    yes: bool,
}

impl LeaveSiteChange {
    /// Makes the change, and says what else it applies to.
    pub async fn apply(self, context: &Context, pool: PoolOption, of: &str) -> Result<(), Problem> {
        let ask = SetLeaveSite { leave_site: self.leave_site, confirmed: self.yes };
        let path = format!("{of}/leave-site");
        let set: LeaveSiteSet = server(context, pool).await?.put(&path, &ask).await?;
        output::one(context.format, &set, CHANGED)
    }
}

const CHANGED: &[Column<LeaveSiteSet>] = &[
    ("leave site", |set| set.leave_site.to_string()),
    ("layers", |set| set.layers.len().to_string()),
    ("also", |set| output::or_dash(some(&set.also).as_ref())),
    ("shares data, may leave", |set| output::or_dash(some(&set.may_leave).as_ref())),
];

fn some(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(", "))
}

/// The option of commands that also work without a controller.
#[derive(Debug, clap::Args)]
pub struct PoolOption {
    /// Use this pool instead of a controller, through its volume server if one runs
    #[arg(long, value_name = "DIR")]
    pub pool: Option<PathBuf>,
}

pub const CLUSTER: &[Column<ClusterImage>] = &[
    ("name", |i| i.name.to_string()),
    ("size", |i| output::bytes(i.size_bytes)),
    ("allocated", |i| output::bytes(i.allocated_bytes)),
    ("hosts", |i| i.hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
    ("missing", |i| output::bytes(i.missing_bytes)),
    ("leave site", |i| i.leave_site.to_string()),
    ("shared", |i| if i.shared { "yes" } else { "no" }.to_owned()),
];

const LOCAL: &[Column<ImageInfo>] = &[
    ("name", |i| i.name.to_string()),
    ("size", |i| output::bytes(i.size_bytes)),
    ("allocated", |i| output::bytes(i.allocated_bytes)),
    ("layers", |i| i.chain.len().to_string()),
    ("children", |i| i.children.to_string()),
    ("missing", |i| {
        let missing = i.remote.as_ref().map(|remote| {
            let bytes = output::bytes(remote.missing_bytes);
            remote.failed.as_ref().map_or(bytes.clone(), |why| format!("{bytes}: {why}"))
        });
        output::or_dash(missing.as_ref())
    }),
    ("keeps", |i| output::or_dash(i.remote.as_ref().map(|r| &r.keep))),
    ("leave site", |i| i.leave_site.to_string()),
    ("layer", |i| i.layer.to_string()),
];

pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    let format = context.format;
    let done = match verb {
        Verb::Check { name, pool } => {
            return check::run(CheckScope::Image(name), pool, context).await;
        }
        Verb::Import {
            name,
            file,
            sha256,
            on_host,
            image_format: format,
            host,
            leave_site,
            pool,
        } => match pool.pool {
            Some(pool) => {
                let source = absolute(&file)?;
                let body = ImportImage { name, source, format, layer: None, leave_site };
                let server = pool_server(&pool).await?;
                let image: ImageInfo =
                    output::with_progress(|tell| server.post_long("/v1/images", &body, tell))
                        .await?;
                say(&image.note);
                output::one(context.format, &image, LOCAL)
            }
            None => {
                let client = controller_client_within(context, IMPORT_MAX)?;
                let (source, host) = if !on_host && download::is_address(&file) {
                    let sent = download::send_on(&client, &file, sha256, host.as_ref()).await?;
                    (sent.source, sent.host.or(host))
                } else if sha256.is_some() {
                    let why = "it is compared with what comes from a web server";
                    return Err(Problem::invalid("can't use --sha256", why));
                } else if on_host || file.contains("://") {
                    (file, host)
                } else {
                    send(&client, Path::new(&file), host).await?
                };
                let body = NewImage { name, source, format, host, leave_site };
                let image: ClusterImage = client.post("/v1/images", &body).await?;
                say(&image.note);
                output::one(context.format, &image, CLUSTER)
            }
        },
        Verb::Update { name, change, pool } => {
            change.apply(context, pool, &format!("/v1/images/{name}")).await
        }
        Verb::Copy { name, from, export, keep, pool } => {
            let body = CopyImage { content: None, nbd_addr: from, export, keep, layer: None };
            let path = format!("/v1/images/{name}/copy");
            let image: ImageInfo = pool_server(&pool).await?.post(&path, &body).await?;
            output::one(format, &image, LOCAL)
        }
        Verb::Replicate { name, to } => {
            let path = format!("/v1/images/{name}/replicate");
            let client = controller_client(context)?;
            let image: ClusterImage = client.post(&path, &ReplicateImage { to }).await?;
            output::one(format, &image, CLUSTER)
        }
        Verb::Save { vm, name } => {
            let client = controller_client_within(context, SAVE_MAX)?;
            let path = format!("/v1/vms/{vm}/snapshot");
            let image: ClusterImage = client.post(&path, &Snapshot { image: name }).await?;
            say(&image.note);
            output::one(format, &image, CLUSTER)
        }
        Verb::Share { name, stop } => {
            let (path, ask) = (format!("/v1/images/{name}/shared"), ShareImage { shared: !stop });
            let image: ClusterImage = controller_client(context)?.put(&path, &ask).await?;
            output::one(format, &image, CLUSTER)
        }
        Verb::Fill { name, pool } => {
            let path = format!("/v1/images/{name}/fill");
            let server = pool_server(&pool).await?;
            let image: ImageInfo =
                output::with_progress(|tell| server.post_long(&path, &(), tell)).await?;
            output::one(format, &image, LOCAL)
        }
        Verb::Keep { name, keep, pool } => {
            let path = format!("/v1/images/{name}/keep");
            let image: ImageInfo = pool_server(&pool).await?.put(&path, &keep).await?;
            output::one(format, &image, LOCAL)
        }
        Verb::List { all, pool } => {
            let path = if all { "/v1/images?all=true" } else { "/v1/images" };
            if pool.pool.is_none() {
                note_silent(&controller_client(context)?).await;
            }
            list(context, pool, path, LOCAL, CLUSTER).await
        }
        Verb::Info { name, pool } => {
            info(context, pool, &format!("/v1/images/{name}"), LOCAL, CLUSTER).await
        }
        Verb::Adopt { name, host } => {
            let (client, path) = (controller_client(context)?, format!("/v1/images/{name}/adopt"));
            let image: ClusterImage = client.post(&path, &AdoptVolume { host }).await?;
            output::one(format, &image, CLUSTER)
        }
        Verb::Delete { name, pool } => {
            let server = server(context, pool).await?;
            let deleted: DeletedImage =
                server.delete_answered(&format!("/v1/images/{name}")).await?;
            if let [_, ..] = &deleted.stands_on_it[..] {
                let on_it = deleted.stands_on_it.join(", ");
                output::note(&format!(
                    "its space is shared with {on_it}: what is not needed is freed in the background"
                ));
            }
            Ok(())
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn say(note: &str) {
    if !note.is_empty() {
        output::note(note);
    }
}

/// Sends a file to the host that is to make an image of it.
async fn send(
    client: &Client,
    file: &Path,
    host: Option<HostId>,
) -> Result<(String, Option<HostId>), Problem> {
    let path = match &host {
        Some(host) => format!("/v1/uploads?host={host}"),
        None => "/v1/uploads".to_owned(),
    };
    let upload: Upload = client.send_file(&path, file).await?;
    Ok((upload.source, upload.host.or(host)))
}

/// A client of the pool's server if a pool is given, else of the controller.
pub async fn server(context: &Context, pool: PoolOption) -> Result<Server, Problem> {
    match pool.pool {
        Some(pool) => pool_server(&pool).await,
        None => Ok(controller_client(context)?.into()),
    }
}

/// A file's absolute path, because the server has another working directory. An NBD address stays unchanged.
fn absolute(file: &str) -> Result<String, Problem> {
    if file.contains("://") {
        return Ok(file.to_owned());
    }
    std::path::absolute(file)
        .map(|path| path.display().to_string())
        .map_err(|e| Problem::invalid(format!("can't import {file:?}"), e))
}

/// Lists what a pool has, or without a pool what the cluster has.
pub async fn list<L, C>(
    context: &Context,
    pool: PoolOption,
    path: &str,
    local: &[Column<L>],
    cluster: &[Column<C>],
) -> Result<(), Problem>
where
    L: Serialize + DeserializeOwned,
    C: Serialize + DeserializeOwned,
{
    match pool.pool {
        Some(pool) => {
            let all: Vec<L> = pool_server(&pool).await?.get(path).await?;
            output::list(context.format, &all, local)
        }
        None => {
            let all: Vec<C> = controller_client(context)?.get(path).await?;
            output::list(context.format, &all, cluster)
        }
    }
}

/// Shows one thing of a pool, or without a pool one of the cluster.
pub async fn info<L, C>(
    context: &Context,
    pool: PoolOption,
    path: &str,
    local: &[Column<L>],
    cluster: &[Column<C>],
) -> Result<(), Problem>
where
    L: Serialize + DeserializeOwned,
    C: Serialize + DeserializeOwned,
{
    match pool.pool {
        Some(pool) => {
            let found: L = pool_server(&pool).await?.get(path).await?;
            output::one(context.format, &found, local)
        }
        None => {
            let found: C = controller_client(context)?.get(path).await?;
            output::one(context.format, &found, cluster)
        }
    }
}
