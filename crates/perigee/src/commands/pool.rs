//! `perigee pool`

use std::path::PathBuf;

use clap::Subcommand;
use perigee_model::Problem;
use perigee_model::volume::{PoolInfo, TenantSpace};
use perigee_volume::Offline;

use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::pool_server;

/// `perigee pool VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Create an empty pool
    Create {
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
    /// Show a pool: its space, and the space that each tenant uses
    Info {
        /// The pool's directory
        #[arg(long, value_name = "DIR")]
        pool: PathBuf,
    },
}

const POOL: &[Column<PoolInfo>] = &[
    ("path", |p| p.path.clone()),
    ("format", |p| p.format_version.to_string()),
    ("disk", |p| output::bytes(p.total_bytes)),
    ("free", |p| output::bytes(p.free_bytes)),
    ("data", |p| output::bytes(p.data_bytes)),
    ("shared", |p| output::bytes(p.shared_bytes)),
    ("images", |p| p.images.to_string()),
    ("volumes", |p| p.volumes.to_string()),
];

const TENANTS: &[Column<TenantSpace>] = &[
    ("tenant", |t| t.tenant.to_string()),
    ("volumes", |t| t.volumes.to_string()),
    ("virtual", |t| output::bytes(t.virtual_bytes)),
    ("own", |t| output::bytes(t.own_bytes)),
];

/// Asks the pool's volume server, or opens the pool if no server runs.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let info: PoolInfo = match verb {
        Verb::Create { pool } => {
            drop(Offline::open_or_make(&pool).await?);
            return Ok(());
        }
        Verb::Info { pool } => pool_server(&pool).await?.get("/v1/pool").await?,
    };
    output::one(context.format, &info, POOL)?;
    if context.format == Format::Table && !info.tenants.is_empty() {
        output::text("");
        output::list(context.format, &info.tenants, TENANTS)?;
    }
    Ok(())
}
