//! `perigee data`: files of the repository.

pub mod get;
pub mod put;

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::pin::Pin;

use clap::Subcommand;
use indicatif::ProgressBar;
use perigee_http::Client;
use perigee_model::data::{CutUpload, FileAddress, FileEntry, FileList, FileShare};
use perigee_model::{Problem, TenantName};
use sha2::{Digest, Sha256};

use crate::Context;
use crate::commands::controller_client;
use crate::output;

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Send a file or a directory. What an earlier try has sent of a large file is not sent again
    Put {
        /// The file or directory here
        from: PathBuf,
        /// `repo://TENANT/PATH`, or a path in your own tenant
        to: FileAddress,
    },
    /// Fetch a file or a directory. What an earlier try has fetched of a file is not fetched again
    Get {
        /// `repo://TENANT/PATH`, or a path in your own tenant
        from: FileAddress,
        /// The file or directory here [default: its name in the current directory]
        to: Option<PathBuf>,
    },
    /// List a directory, or show a file
    #[command(visible_alias = "ls")]
    List {
        /// `repo://TENANT/PATH`, or a path in your own tenant [default: all of your tenant's files]
        #[arg(default_value = "", hide_default_value = true)]
        address: FileAddress,
        /// List the uploads to this path and below it that were cut. They are in no directory, and count for the quota
        #[arg(long)]
        uploads: bool,
    },
    /// Delete a file or an empty directory, and what there is of uploads there that were cut
    #[command(visible_alias = "rm")]
    Delete {
        /// `repo://TENANT/PATH`, or a path in your own tenant
        address: FileAddress,
        /// Delete a directory with all that is in it
        #[arg(long)]
        recursive: bool,
    },
    /// Let another tenant read a file or a directory; without --with, show who may
    Share {
        /// `repo://TENANT/PATH`, or a path in your own tenant
        address: FileAddress,
        /// The other tenant
        #[arg(long, value_name = "TENANT")]
        with: Option<TenantName>,
        /// End it
        #[arg(long, requires = "with")]
        stop: bool,
    },
}

/// How much of a large file one request carries.
const PART_BYTES: u64 = 16 << 20;
/// How many requests are under way at the same time. Over a distance, one connection does not fill a link.
pub const AT_ONCE: usize = 4;
/// How often a transfer that is cut goes on by itself.
const TRIES: u32 = 5;

pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Put { from, to } => {
            let bar = bar(&to);
            let put = put::put(&client, &from, &to, &bar).await;
            bar.finish_and_clear();
            put
        }
        Verb::Get { from, to } => {
            let bar = bar(&from);
            let got = get::get(&client, &from, to, &bar).await;
            bar.finish_and_clear();
            got
        }
        Verb::List { address, uploads: true } => {
            let cut: Vec<CutUpload> = client.get(&format!("{}?uploads", address.url())).await?;
            output::list(
                context.format,
                &cut,
                &[
                    ("path", |row| row.path.clone()),
                    ("size", |row| output::bytes(row.size_bytes)),
                    ("kept_until", |row| output::time(row.kept_until_ms)),
                ],
            )
        }
        Verb::List { address, uploads: false } => {
            let entry: FileEntry = client.get(&format!("{}?stat", address.url())).await?;
            let rows =
                if entry.is_directory() { list(&client, &address).await? } else { vec![entry] };
            output::list(
                context.format,
                &rows,
                &[
                    ("name", |row| {
                        let slash = if row.is_directory() { "/" } else { "" };
                        format!("{}{slash}", row.name)
                    }),
                    ("size", |row| match row.is_directory() {
                        true => "-".to_owned(),
                        false => output::bytes(row.size_bytes),
                    }),
                    ("sha256", |row| output::or_dash(row.sha256.as_ref())),
                ],
            )
        }
        Verb::Delete { address, recursive: false } => client.delete(&address.url()).await,
        Verb::Delete { address, recursive: true } => delete_all(&client, address).await,
        Verb::Share { address, with: None, .. } => {
            let shares: Vec<FileShare> = client.get(&format!("{}?shares", address.url())).await?;
            output::list(
                context.format,
                &shares,
                &[("path", |row| row.path.clone()), ("with", |row| row.with.to_string())],
            )
        }
        Verb::Share { address, with: Some(with), stop } => {
            let url = format!("{}?share={with}", address.url());
            if stop { client.delete(&url).await } else { client.put(&url, &()).await }
        }
    }
}

fn bar(address: &FileAddress) -> ProgressBar {
    output::progress_bar(address, "{binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}")
}

/// All of a directory.
pub async fn list(client: &Client, address: &FileAddress) -> Result<Vec<FileEntry>, Problem> {
    let mut entries = Vec::new();
    let mut page = format!("{}?limit=10000", address.url());
    loop {
        let list: FileList = client.get(&page).await?;
        entries.extend(list.entries);
        let Some(after) = list.after else { return Ok(entries) };
        let after = FileAddress { tenant: None, path: after }.url();
        let after = after.rsplit('/').next().unwrap_or_default();
        page = format!("{}?limit=10000&after={after}", address.url());
    }
}

/// Boxed, because it calls itself. Directories are at most 64 deep.
fn delete_all(
    client: &Client,
    address: FileAddress,
) -> Pin<Box<dyn Future<Output = Result<(), Problem>> + Send + '_>> {
    Box::pin(async move {
        let entry = client.get::<FileEntry>(&format!("{}?stat", address.url())).await;
        // Of a file there may be only an upload that was cut.
        if entry.is_ok_and(|entry| entry.is_directory()) {
            for entry in list(client, &address).await? {
                delete_all(client, address.join(&entry.name)).await?;
            }
        }
        client.delete(&address.url()).await
    })
}

/// Whether a transfer that failed may go on.
fn may_go_on(problem: &Problem) -> bool {
    problem.kind == perigee_model::ProblemKind::Unavailable
}

/// The SHA-256 of a file, read from where it is.
pub fn hash(mut file: &File) -> std::io::Result<String> {
    Ok(hex(&hashed(&mut file)?.finalize()))
}

/// All that can be read, hashed; more may follow.
fn hashed(from: &mut impl Read) -> std::io::Result<Sha256> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(hasher),
            length => hasher.update(&piece[..length]),
        }
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
