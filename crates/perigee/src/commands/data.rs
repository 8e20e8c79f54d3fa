//! `perigee data`: files of the repository.

pub mod get;
pub mod put;
pub mod transfer;

use std::path::PathBuf;
use std::pin::Pin;

use clap::Subcommand;
use indicatif::ProgressBar;
use perigee_http::Client;
use perigee_model::data::{CutUpload, FileAddress, FileEntry, FileShare};
use perigee_model::{Problem, TenantName};

use crate::commands::data::transfer::list;
use crate::context::Context;
use crate::output;
use crate::servers::controller_client;

/// `perigee data VERB`. What stands at a variant and its fields is their help.
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

/// Asks the controller. Files go in parts of 16 MiB, several at a time, and a bar shows how far they are.
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
