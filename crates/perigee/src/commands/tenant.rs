//! `perigee tenant`, `perigee audit`

use clap::{Args, Subcommand};
use perigee_model::backup::BackupTarget;
use perigee_model::budget::Spending;
use perigee_model::money::Money;
use perigee_model::tenant::{AuditEntry, NewTenant, Quota, Tenant, TenantBackupTargets};
use perigee_model::units::{format_bytes, parse_duration};
use perigee_model::{Problem, TenantName};

use crate::arguments::size;
use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee tenant VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make a tenant
    Create {
        /// Its name, at most 16 letters
        name: TenantName,
        #[command(flatten)]
        quota: QuotaFlags,
    },
    /// List tenants, with what they use and what they may use
    #[command(visible_alias = "ls")]
    List,
    /// Show one tenant
    Info {
        /// The tenant's name
        name: TenantName,
    },
    /// Replace what a tenant may use; without an option it may use as much as there is, and have a million files
    #[command(visible_alias = "set")]
    Quota {
        /// The tenant's name
        name: TenantName,
        #[command(flatten)]
        quota: QuotaFlags,
    },
    /// Say where a tenant's users may have backups made; without --to nowhere. No backups of others may be there
    Backups {
        /// The tenant's name
        name: TenantName,
        /// A directory of the hosts, or an S3 store; for several, again
        #[arg(long = "to", value_name = "DIR|s3://BUCKET/PREFIX")]
        targets: Vec<String>,
        /// The address of the S3 stores, if they are not AWS's
        #[arg(long, value_name = "URL", requires = "targets")]
        endpoint: Option<String>,
    },
    /// Delete a tenant that has no volumes, images, networks, files, backups, jobs and VMs any more, with its users
    #[command(visible_alias = "rm")]
    Delete {
        /// The tenant's name
        name: TenantName,
    },
}

/// The limits of a tenant. One that is left out is not changed.
#[derive(Debug, Clone, Copy, Args)]
pub struct QuotaFlags {
    /// VMs that run at the same time
    #[arg(long, value_name = "N")]
    vms: Option<u32>,
    /// Their vCPUs together
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// Their memory together
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// The sizes of volumes and images together
    #[arg(long, value_name = "SIZE", value_parser = size)]
    volumes: Option<u64>,
    /// Files in the data repository together
    #[arg(long, value_name = "SIZE", value_parser = size)]
    files: Option<u64>,
    /// The number of these files and their directories [default: 1000000]
    #[arg(long, value_name = "N")]
    file_count: Option<u64>,
    /// What its backups hold at their targets together
    #[arg(long, value_name = "SIZE", value_parser = size)]
    backups: Option<u64>,
    /// What its jobs may cost in a month (UTC), with what is reserved for those that have not ended, such as `$20`
    #[arg(long, value_name = "MONEY")]
    budget_month: Option<Money>,
}

impl From<QuotaFlags> for Quota {
    fn from(flags: QuotaFlags) -> Self {
        Self {
            vms: flags.vms,
            cpus: flags.cpus,
            memory_bytes: flags.memory,
            volume_bytes: flags.volumes,
            file_bytes: flags.files,
            files: flags.file_count,
            backup_bytes: flags.backups,
            budget_month: flags.budget_month,
        }
    }
}

/// Which entries of the audit log are shown.
#[derive(Debug, Args)]
pub struct Audit {
    /// Only what was asked for in this time until now, such as `1h`
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    since: Option<u64>,
    /// Of this tenant [default: one's own]
    #[arg(long)]
    tenant: Option<TenantName>,
}

fn of<T: std::fmt::Display>(used: T, limit: Option<T>) -> String {
    limit.map_or_else(|| used.to_string(), |limit| format!("{used} of {limit}"))
}

fn bytes_of(used: u64, limit: Option<u64>) -> String {
    of(format_bytes(used), limit.map(format_bytes))
}

/// Whether money says anything of the tenant.
fn pays(tenant: &Tenant) -> bool {
    tenant.quota.budget_month.is_some() || tenant.spending != Spending::default()
}

const TENANT: &[Column<Tenant>] = &[
    ("tenant", |t| t.name.to_string()),
    ("users", |t| t.users.to_string()),
    ("vms", |t| of(t.running.vms, t.quota.vms)),
    ("cpus", |t| of(t.running.cpus, t.quota.cpus)),
    ("memory", |t| bytes_of(t.running.memory_bytes, t.quota.memory_bytes)),
    ("volumes", |t| bytes_of(t.volume_bytes, t.quota.volume_bytes)),
    ("files", |t| bytes_of(t.file_bytes, t.quota.file_bytes)),
    ("file count", |t| of(t.files, t.quota.files)),
    ("backups", |t| bytes_of(t.backup_bytes, t.quota.backup_bytes)),
    ("backups to", |t| {
        let targets = t.backup_targets.iter().map(|target| target.address.as_str());
        targets.collect::<Vec<_>>().join(" ")
    }),
    ("spent", |t| {
        let spent = of(t.spending.spent, t.quota.budget_month);
        if pays(t) { format!("{spent} this month") } else { String::new() }
    }),
    ("reserved", |t| if pays(t) { t.spending.reserved.to_string() } else { String::new() }),
];

const AUDIT: &[Column<AuditEntry>] = &[
    ("at", |e| output::time(e.at_ms)),
    ("who", |e| e.who.clone()),
    ("request", |e| e.request.clone()),
    ("thing", |e| e.thing.clone()),
    ("status", |e| e.status.to_string()),
];

/// Asks the controller, and prints tenants with their quota and use.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Create { name, quota } => {
            let new = NewTenant { name, quota: quota.into() };
            let made: Tenant = client.create("/v1/tenants", &new).await?;
            output::one(context.format, &made, TENANT)
        }
        Verb::List => {
            let all: Vec<Tenant> = client.get("/v1/tenants").await?;
            output::list(context.format, &all, TENANT)
        }
        Verb::Info { name } => {
            let found: Tenant = client.get(&format!("/v1/tenants/{name}")).await?;
            output::one(context.format, &found, TENANT)
        }
        Verb::Quota { name, quota } => {
            let path = format!("/v1/tenants/{name}/quota");
            let changed: Tenant = client.put(&path, &Quota::from(quota)).await?;
            output::one(context.format, &changed, TENANT)
        }
        Verb::Backups { name, targets, endpoint } => {
            let target = |address: String| {
                let target = BackupTarget { address, endpoint: None };
                let endpoint = endpoint.clone().filter(|_| target.is_s3());
                BackupTarget { endpoint, ..target }
            };
            let ask = TenantBackupTargets { targets: targets.into_iter().map(target).collect() };
            let path = format!("/v1/tenants/{name}/backup-targets");
            let changed: Tenant = client.put(&path, &ask).await?;
            output::one(context.format, &changed, TENANT)
        }
        Verb::Delete { name } => client.delete(&format!("/v1/tenants/{name}")).await,
    }
}

/// Prints entries of the audit log, by default those of the own tenant.
pub async fn audit(ask: Audit, context: &Context) -> Result<(), Problem> {
    let now_ms = perigee_http::certificate::now_ms();
    let since_ms = ask.since.map_or(0, |since_s| now_ms.saturating_sub(since_s * 1000));
    let tenant = ask.tenant.map_or_else(String::new, |tenant| format!("&tenant={tenant}"));
    let path = format!("/v1/audit?since_ms={since_ms}{tenant}");
    let entries: Vec<AuditEntry> = controller_client(context)?.get(&path).await?;
    output::list(context.format, &entries, AUDIT)
}
