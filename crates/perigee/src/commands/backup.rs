//! `perigee backup`

use std::time::Duration;

use clap::{Args, Subcommand};
use perigee_http::Client;
use perigee_model::backup::{
    Backup, BackupState, BackupTarget, CheckBackup, FoundBackup, LookForBackups, NewBackup,
    RestoreBackup, Restoring, VerifiedBackup,
};
use perigee_model::job::ClusterVolume;
use perigee_model::{BackupName, HostId, Problem, VolumeName};

use crate::commands::asking;
use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::{controller_client, controller_client_within};

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A restore ends when all bytes have come, and the check of a backup when all were read.
const READ_MAX: Duration = Duration::from_secs(24 * 3600);

/// A target, unless the controller knows it.
#[derive(Debug, Args)]
pub struct Place {
    /// The directory or S3 store with the backup [default: where the controller knows it]
    #[arg(long = "from", value_name = "DIR|s3://BUCKET/PREFIX")]
    address: Option<String>,
    /// The address of the S3 store, if it is not AWS's
    #[arg(long, value_name = "URL", requires = "address")]
    endpoint: Option<String>,
    /// The host that reads it. A directory is one of this host [default: the host that has shipped the backup]
    #[arg(long)]
    host: Option<HostId>,
}

impl Place {
    fn target(self) -> (Option<BackupTarget>, Option<HostId>) {
        let endpoint = self.endpoint;
        (self.address.map(|address| BackupTarget { address, endpoint }), self.host)
    }
}

/// `perigee backup VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Back up a volume, which may be in use. Only what the target does not have is shipped
    Create {
        /// The volume
        volume: VolumeName,
        /// A directory of the volume's home, or an S3 store
        #[arg(long, value_name = "DIR|s3://BUCKET/PREFIX")]
        to: String,
        /// The address of the S3 store, if it is not AWS's
        #[arg(long, value_name = "URL")]
        endpoint: Option<String>,
        /// Ship also what the target has, for example because it was damaged there
        #[arg(long)]
        whole: bool,
    },
    /// List the backups that the controller knows, or those at a target
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        place: Place,
    },
    /// Show a backup
    Info {
        /// The backup's name
        backup: BackupName,
    },
    /// Read all of a backup, and compare it with its checksums
    Verify {
        /// The backup's name
        backup: BackupName,
        #[command(flatten)]
        place: Place,
    },
    /// Make a new volume of a backup
    Restore {
        /// The backup's name
        backup: BackupName,
        /// The new volume
        #[arg(long = "as", value_name = "VOLUME")]
        volume: VolumeName,
        /// Read and check all bytes before the volume is made. Otherwise the volume can be used at once, and its bytes arrive afterwards
        #[arg(long)]
        whole: bool,
        #[command(flatten)]
        place: Place,
    },
    /// Delete a backup, with what no other one at its target needs
    #[command(visible_alias = "rm")]
    Delete {
        /// The backup's name
        backup: BackupName,
        /// Only forget it: what is at the target stays
        #[arg(long)]
        forget: bool,
    },
}

const BACKUP: &[Column<Backup>] = &[
    ("name", |b| b.name.to_string()),
    ("volume", |b| b.volume.to_string()),
    ("at", |b| b.at.address.clone()),
    ("host", |b| output::or_dash(b.host.as_ref())),
    ("state", state),
    ("taken", |b| b.taken_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("size", |b| b.size_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("data", |b| b.data_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("shipped", |b| output::bytes(b.shipped_bytes)),
    ("problem", |b| b.problem.clone()),
];

const FOUND: &[Column<FoundBackup>] = &[
    ("name", |b| b.name.to_string()),
    ("volume", |b| output::or_dash(b.volume.as_ref())),
    ("taken", |b| output::time(b.taken_ms)),
    ("size", |b| output::bytes(b.size_bytes)),
    ("data", |b| output::bytes(b.data_bytes)),
    ("problem", |b| b.problem.clone()),
];

const VERIFIED: &[Column<VerifiedBackup>] =
    &[("read", |v| output::bytes(v.read_bytes)), ("problems", |v| v.problems.len().to_string())];

const RESTORED: &[Column<ClusterVolume>] = &[
    ("volume", |v| v.name.to_string()),
    ("home", |v| v.home.to_string()),
    ("size", |v| output::bytes(v.size_bytes)),
];

fn state(backup: &Backup) -> String {
    match backup.progress {
        Some(progress) => format!(
            "{}, {} of {} read",
            output::word(&backup.state),
            output::bytes(progress.done_bytes),
            output::bytes(progress.total_bytes)
        ),
        None => output::word(&backup.state),
    }
}

/// What is still to come of a volume, and why it does not come.
pub fn summary(restoring: &Restoring) -> String {
    let bytes = output::bytes(restoring.missing_bytes);
    let words = format!("{bytes} to come from {}", restoring.backup);
    if restoring.problem.is_empty() { words } else { format!("{words}: {}", restoring.problem) }
}

/// Carries out the command.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Create { volume, to, endpoint, whole } => {
            let to = BackupTarget { address: to, endpoint };
            create(&client, &NewBackup { volume, to, whole }, context.format).await
        }
        Verb::List { place } => match place.target() {
            (None, _) => {
                let all: Vec<Backup> = client.get("/v1/backups").await?;
                output::list(context.format, &all, BACKUP)
            }
            (Some(at), host) => {
                let ask = LookForBackups { at, host };
                let all: Vec<FoundBackup> = client.post("/v1/look-for-backups", &ask).await?;
                output::list(context.format, &all, FOUND)
            }
        },
        Verb::Info { backup } => {
            let known: Backup = client.get(&format!("/v1/backups/{backup}")).await?;
            output::one(context.format, &known, BACKUP)
        }
        Verb::Verify { backup, place } => verify(&backup, place, context).await,
        Verb::Restore { backup, volume, whole, place } => {
            let (from, host) = place.target();
            let ask = RestoreBackup { volume, host, from, whole };
            restore(&client, &backup, &ask, context).await
        }
        Verb::Delete { backup, forget } => {
            client.delete(&format!("/v1/backups/{backup}?forget={forget}")).await
        }
    }
}

/// Begins a backup and waits until it is complete. Ctrl-C ends only the waiting.
async fn create(client: &Client, ask: &NewBackup, format: Format) -> Result<(), Problem> {
    let begun: Backup = client.create("/v1/backups", ask).await?;
    let goes_on =
        format!("the backup goes on; `perigee backup info {}` shows how far it is", begun.name);
    let watching = watch(client, &begun, &goes_on);
    let Some(ended) = asking::until_interrupted(watching, &goes_on).await? else { return Ok(()) };
    output::one(format, &ended, BACKUP)?;
    match ended.state {
        BackupState::Failed => {
            let what = format!("can't back up volume {} to {}", ended.volume, ended.at.address);
            Err(Problem::conflict(what, ended.problem))
        }
        _ => Ok(()),
    }
}

async fn watch(client: &Client, begun: &Backup, goes_on: &str) -> Result<Backup, Problem> {
    let bar = output::progress_bar(&begun.volume, "{msg}");
    let (path, mut said) = (format!("/v1/backups/{}", begun.name), asking::Said::default());
    loop {
        let now: Backup = asking::get(client, &path, goes_on).await?;
        if let Some(progress) = now.progress {
            bar.set_length(progress.total_bytes.max(progress.done_bytes));
            bar.set_position(progress.done_bytes);
        }
        bar.set_message(now.problem.clone());
        if bar.is_hidden() && !now.problem.is_empty() && said.is_news(&now.problem) {
            output::note(&now.problem);
        }
        if now.state != BackupState::Shipping {
            bar.finish_and_clear();
            return Ok(now);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Makes a volume of a backup, and waits until all its bytes have arrived. Once the volume can be used, Ctrl-C ends only the waiting.
async fn restore(
    client: &Client,
    backup: &BackupName,
    ask: &RestoreBackup,
    context: &Context,
) -> Result<(), Problem> {
    let asked = controller_client_within(context, READ_MAX)?;
    let mut made: ClusterVolume = asked.post(&format!("/v1/backups/{backup}/restore"), ask).await?;
    let volume = made.name.clone();
    if made.restoring.is_some() {
        output::note(&format!("volume {volume} can be used; its bytes are still arriving"));
        let goes_on = format!(
            "the restore goes on; `perigee volume info {volume}` shows how many bytes are missing"
        );
        let watching = watch_restore(client, made, &goes_on);
        let Some(ended) = asking::until_interrupted(watching, &goes_on).await? else {
            return Ok(());
        };
        made = ended;
    }
    output::one(context.format, &made, RESTORED)?;
    let Some(left) = made.restoring else {
        output::note(&format!("all bytes of volume {volume} have arrived and were right"));
        return Ok(());
    };
    let what = format!("volume {volume} lacks {}", output::bytes(left.missing_bytes));
    Err(Problem::conflict(what, format!("the backup is damaged: {}", left.problem)).next(
        "reads of what is missing give I/O errors; use another backup, or have the volume of which it is shipped again: `perigee backup create --whole`",
    ))
}

/// Until nothing is to come any more, or only what is damaged.
async fn watch_restore(
    client: &Client,
    mut now: ClusterVolume,
    goes_on: &str,
) -> Result<ClusterVolume, Problem> {
    let bar = output::progress_bar(&now.name, "{msg}");
    let (path, mut said) = (format!("/v1/volumes/{}", now.name), asking::Said::default());
    while let Some(restoring) = now.restoring.as_ref().filter(|restoring| !restoring.is_damaged) {
        bar.set_length(restoring.total_bytes);
        bar.set_position(restoring.total_bytes.saturating_sub(restoring.missing_bytes));
        let problem = &restoring.problem;
        bar.set_message(problem.clone());
        if bar.is_hidden() && !problem.is_empty() && said.is_news(problem) {
            output::note(problem);
        }
        tokio::time::sleep(LOOK_EVERY).await;
        now = asking::get(client, &path, goes_on).await?;
    }
    bar.finish_and_clear();
    Ok(now)
}

/// Damage is an error that names it.
async fn verify(backup: &BackupName, place: Place, context: &Context) -> Result<(), Problem> {
    let client = controller_client_within(context, READ_MAX)?;
    let (at, host) = place.target();
    let path = format!("/v1/backups/{backup}/verify");
    let read: VerifiedBackup = client.post(&path, &CheckBackup { at, host }).await?;
    output::one(context.format, &read, VERIFIED)?;
    match read.problems.is_empty() {
        true => Ok(()),
        false => Err(Problem::conflict(format!("backup {backup} is damaged"), read.problems.join("; "))
            .next("use another backup; `perigee backup create --whole` ships everything again while the volume is there")),
    }
}
