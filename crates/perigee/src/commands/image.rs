//! `perigee image`

use std::path::PathBuf;

use clap::Subcommand;
use perigee_model::job::{ClusterImage, NewImage};
use perigee_model::volume::{ImageInfo, ImportImage};
use perigee_model::{HostId, ImageName, Problem};

use crate::Context;
use crate::commands::{controller_client, pool_client};
use crate::output::{self, Column};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Import a disk image (qcow2, raw, vmdk, vhdx) as a golden image, on every host
    Import {
        name: ImageName,
        /// The file; with a controller, a path on the host that imports it
        file: String,
        /// Import on this host first [default: the one with the most room]
        #[arg(long, conflicts_with = "pool")]
        host: Option<HostId>,
        #[command(flatten)]
        pool: PoolOption,
    },
    /// List images and snapshots
    #[command(visible_alias = "ls")]
    List {
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
    /// Delete an image that no volume stands on
    #[command(visible_alias = "rm")]
    Delete {
        /// The image's name
        name: ImageName,
        #[command(flatten)]
        pool: PoolOption,
    },
}

/// For use without a controller.
#[derive(Debug, clap::Args)]
pub struct PoolOption {
    /// Talk to the volume server of this pool, without a controller
    #[arg(long, value_name = "DIR")]
    pub pool: Option<PathBuf>,
}

const CLUSTER: &[Column<ClusterImage>] = &[
    ("name", |i| i.name.to_string()),
    ("size", |i| output::bytes(i.size_bytes)),
    ("allocated", |i| output::bytes(i.allocated_bytes)),
    ("hosts", |i| i.hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
];

const LOCAL: &[Column<ImageInfo>] = &[
    ("name", |i| i.name.to_string()),
    ("size", |i| output::bytes(i.size_bytes)),
    ("allocated", |i| output::bytes(i.allocated_bytes)),
    ("layers", |i| i.chain.len().to_string()),
    ("children", |i| i.children.to_string()),
    ("layer", |i| i.layer.to_string()),
];

pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let format = context.format;
    match verb {
        Verb::Import { name, file, host, pool } => {
            let source = absolute(&file)?;
            match pool.pool {
                Some(pool) => {
                    let body = ImportImage { name, source, layer: None };
                    let image: ImageInfo = pool_client(&pool)?.post("/v1/images", &body).await?;
                    output::one(format, &image, LOCAL)
                }
                None => {
                    let body = NewImage { name, source, host };
                    let image: ClusterImage =
                        controller_client(context)?.post("/v1/images", &body).await?;
                    output::one(format, &image, CLUSTER)
                }
            }
        }
        Verb::List { pool: PoolOption { pool: Some(pool) } } => {
            let images: Vec<ImageInfo> = pool_client(&pool)?.get("/v1/images").await?;
            output::list(format, &images, LOCAL)
        }
        Verb::List { .. } => {
            let images: Vec<ClusterImage> = controller_client(context)?.get("/v1/images").await?;
            output::list(format, &images, CLUSTER)
        }
        Verb::Info { name, pool: PoolOption { pool: Some(pool) } } => {
            let image: ImageInfo = pool_client(&pool)?.get(&format!("/v1/images/{name}")).await?;
            output::one(format, &image, LOCAL)
        }
        Verb::Info { name, .. } => {
            let image: ClusterImage =
                controller_client(context)?.get(&format!("/v1/images/{name}")).await?;
            output::one(format, &image, CLUSTER)
        }
        Verb::Delete { name, pool } => {
            let client = match pool.pool {
                Some(pool) => pool_client(&pool)?,
                None => controller_client(context)?,
            };
            client.delete(&format!("/v1/images/{name}")).await
        }
    }
}

/// A file's absolute path, since the server has another working directory; an NBD address as it is.
fn absolute(file: &str) -> Result<String, Problem> {
    if file.contains("://") {
        return Ok(file.to_owned());
    }
    std::path::absolute(file)
        .map(|path| path.display().to_string())
        .map_err(|e| Problem::invalid(format!("image file {file:?}"), e))
}
