//! `perigee image`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use perigee_http::Client;
use perigee_model::job::{AdoptVolume, ClusterImage, NewImage, ReplicateImage};
use perigee_model::tenant::ShareImage;
use perigee_model::volume::{
    CheckScope, CopyImage, DeletedImage, ImageFormat, ImageInfo, ImportImage, Keep, Snapshot,
    Upload,
};
use perigee_model::{HostId, ImageName, LeaveSite, Problem, SiteId, VmId};

use crate::commands::host::note_silent;
use crate::commands::image_build::Build;
use crate::commands::leave_site::LeaveSiteChange;
use crate::commands::{check, download};
use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::{
    PoolOption, controller_client, controller_client_within, info, list, pool_server, server,
};

/// An import takes as long as it needs. The controller ends one that makes no progress.
const IMPORT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// A guest may have much to write to its disk.
const SAVE_MAX: Duration = Duration::from_secs(300);

/// `perigee image VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Import a disk image (qcow2, raw, vmdk, vhdx, vhd, vdi) as a golden image
    Import(Box<Import>),
    /// Build a golden image from Debian's packages, and import it. It takes some minutes, and needs root and the packages that it names
    Build(Box<Build>),
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

/// What [`Verb::Import`] takes.
#[derive(Debug, clap::Args)]
pub struct Import {
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
}

/// What a table shows of an image of the cluster. Sizes are in bytes with a unit.
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

/// Does what a verb asks for, and prints the result. Exit code 1: `image check` has found faults.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    match verb {
        Verb::Check { name, pool } => {
            return check::run(CheckScope::Image(name), pool, context).await;
        }
        Verb::Import(ask) => import(*ask, context).await?,
        Verb::Build(ask) => build(*ask, context).await?,
        Verb::Update { name, change, pool } => {
            change.apply(context, pool, &format!("/v1/images/{name}")).await?;
        }
        Verb::Copy { name, from, export, keep, pool } => {
            let ask = CopyImage { content: None, nbd_addr: from, export, keep, layer: None };
            let path = format!("/v1/images/{name}/copy");
            show_local(context, &pool_server(&pool).await?.post(&path, &ask).await?)?;
        }
        Verb::Replicate { name, to } => {
            let path = format!("/v1/images/{name}/replicate");
            let client = controller_client(context)?;
            show(context, &client.post(&path, &ReplicateImage { to }).await?)?;
        }
        Verb::Save { vm, name } => {
            let client = controller_client_within(context, SAVE_MAX)?;
            let path = format!("/v1/vms/{vm}/snapshot");
            show(context, &client.post(&path, &Snapshot { image: name }).await?)?;
        }
        Verb::Share { name, stop } => {
            let (path, ask) = (format!("/v1/images/{name}/shared"), ShareImage { shared: !stop });
            show(context, &controller_client(context)?.put(&path, &ask).await?)?;
        }
        Verb::Fill { name, pool } => {
            let path = format!("/v1/images/{name}/fill");
            let server = pool_server(&pool).await?;
            let filled = output::with_progress(|tell| server.post_long(&path, &(), tell)).await?;
            show_local(context, &filled)?;
        }
        Verb::Keep { name, keep, pool } => {
            let path = format!("/v1/images/{name}/keep");
            show_local(context, &pool_server(&pool).await?.put(&path, &keep).await?)?;
        }
        Verb::List { all, pool } => list_all(context, pool, all).await?,
        Verb::Info { name, pool } => {
            info(context, pool, &format!("/v1/images/{name}"), LOCAL, CLUSTER).await?;
        }
        Verb::Adopt { name, host } => {
            let (client, path) = (controller_client(context)?, format!("/v1/images/{name}/adopt"));
            show(context, &client.post(&path, &AdoptVolume { host }).await?)?;
        }
        Verb::Delete { name, pool } => delete(context, pool, &name).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints an image of the cluster, and on standard error what the controller has to say about the image.
fn show(context: &Context, image: &ClusterImage) -> Result<(), Problem> {
    say(&image.note);
    output::one(context.format, image, CLUSTER)
}

/// Prints an image of a pool, and on standard error what the volume server has to say about the image.
fn show_local(context: &Context, image: &ImageInfo) -> Result<(), Problem> {
    say(&image.note);
    output::one(context.format, image, LOCAL)
}

async fn import(ask: Import, context: &Context) -> Result<(), Problem> {
    let Import { name, file, sha256, on_host, image_format: format, host, leave_site, pool } = ask;
    if let Some(pool) = pool.pool {
        let source = absolute(&file)?;
        let body = ImportImage { name, source, format, layer: None, leave_site };
        let server = pool_server(&pool).await?;
        let image =
            output::with_progress(|tell| server.post_long("/v1/images", &body, tell)).await?;
        return show_local(context, &image);
    }
    let client = controller_client_within(context, IMPORT_MAX)?;
    let (source, host) = source(&client, file, sha256, on_host, host).await?;
    let body = NewImage { name, source, format, host, leave_site };
    show(context, &client.create("/v1/images", &body).await?)
}

/// Builds an image and imports it.
async fn build(ask: Build, context: &Context) -> Result<(), Problem> {
    let file = ask.disk().await?.display().to_string();
    let (name, leave_site, pool) = (ask.name, LeaveSite::default(), ask.pool);
    let (sha256, on_host, image_format, host) = (None, false, None, None);
    import(Import { name, file, sha256, on_host, image_format, host, leave_site, pool }, context)
        .await
}

/// What the host that imports a file is told to read, and that host if it is settled. A file that is here is sent there
/// first, and so is one that a web server has.
async fn source(
    client: &Client,
    file: String,
    sha256: Option<String>,
    on_host: bool,
    host: Option<HostId>,
) -> Result<(String, Option<HostId>), Problem> {
    if !on_host && download::is_address(&file) {
        let sent = download::send_on(client, &file, sha256, host.as_ref()).await?;
        return Ok((sent.source, sent.host.or(host)));
    }
    if sha256.is_some() {
        let why = "it is compared with what comes from a web server";
        return Err(Problem::invalid("can't use --sha256", why));
    }
    if on_host || file.contains("://") {
        return Ok((file, host));
    }
    send(client, Path::new(&file), host).await
}

async fn list_all(context: &Context, pool: PoolOption, all: bool) -> Result<(), Problem> {
    let path = if all { "/v1/images?all=true" } else { "/v1/images" };
    if pool.pool.is_none() {
        note_silent(&controller_client(context)?).await;
    }
    list(context, pool, path, LOCAL, CLUSTER).await
}

async fn delete(context: &Context, pool: PoolOption, name: &ImageName) -> Result<(), Problem> {
    let server = server(context, pool).await?;
    let deleted: DeletedImage = server.delete_answered(&format!("/v1/images/{name}")).await?;
    if let [_, ..] = &deleted.stands_on_it[..] {
        let on_it = deleted.stands_on_it.join(", ");
        output::note(&format!(
            "its space is shared with {on_it}: what is not needed is freed in the background"
        ));
    }
    Ok(())
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

/// A file's absolute path, because the server has another working directory. An NBD address stays unchanged.
fn absolute(file: &str) -> Result<String, Problem> {
    if file.contains("://") {
        return Ok(file.to_owned());
    }
    std::path::absolute(file)
        .map(|path| path.display().to_string())
        .map_err(|e| Problem::invalid(format!("can't import {file:?}"), e))
}
