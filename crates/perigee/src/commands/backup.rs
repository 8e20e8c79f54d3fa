//! `perigee backup`

use std::collections::BTreeSet;
use std::io::Read as _;
use std::time::Duration;

use clap::{Args, Subcommand};
use perigee_http::Client;
use perigee_model::backup::{
    Backup, BackupOf, BackupState, BackupTarget, CheckBackup, FoundBackup, LookForBackups,
    NewBackup, RestoreBackup, RestoreImageBackup, RestoreVmBackup, Restoring, VerifiedBackup,
};
use perigee_model::backup_key::BackupKey;
use perigee_model::backup_schedule::{BackupSchedule, Keep, NewBackupSchedule};
use perigee_model::job::{ClusterImage, ClusterVolume, Vm};
use perigee_model::tenant::{Me, Role, SEPARATOR, SetBackupKey, TenantBackupKey};
use perigee_model::units::{format_duration, parse_duration};
use perigee_model::{
    BackupName, HostId, ImageName, Problem, ScheduleName, TenantName, VmId, VolumeName,
};

use crate::commands::asking;
use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::{controller_client, controller_client_within};

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// What stands in a key file is shorter.
const KEY_BYTES_MAX: u64 = 4096;
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
    /// Back up a volume or a VM, which may be in use, or an image. Only what the target does not have is shipped.
    ///
    /// With --every this is done again and again; `perigee backup schedules` shows how it goes.
    Create {
        /// The volume
        #[arg(required_unless_present_any = ["vm", "image"], conflicts_with_all = ["vm", "image"])]
        volume: Option<VolumeName>,
        /// The VM: its own disks and the volumes that it writes, as they are at one moment
        #[arg(long, conflicts_with = "image")]
        vm: Option<VmId>,
        /// The image, with all that it stands on
        #[arg(long)]
        image: Option<ImageName>,
        /// A directory of the home of each disk, or of the host that has made the image; or an S3 store
        #[arg(long, value_name = "DIR|s3://BUCKET/PREFIX")]
        to: String,
        /// The address of the S3 store, if it is not AWS's
        #[arg(long, value_name = "URL")]
        endpoint: Option<String>,
        /// Ship also what the target has, for example because it was damaged there
        #[arg(long)]
        whole: bool,
        /// Encrypt it at the target with the tenant's key (perigee backup key). All backups at a target are encrypted, or none is
        #[arg(long)]
        encrypt: bool,
        /// Back up now, and then again after each such time. The same thing with the same target again changes the schedule
        #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "whole")]
        every: Option<u64>,
        /// Of the schedule's backups, keep the newest one, and one for each of the last hours (h), days (d), weeks (w), months (mo) or years (y) that have one.
        /// Others are deleted when a newer one is complete [default: keep all]
        #[arg(long, value_name = "24h,7d,4w", requires = "every")]
        keep: Option<Keep>,
    },
    /// List the schedules of backups: how the last ones went, and when the next one is due
    Schedules,
    /// End a schedule. Its backups stay
    Unschedule {
        /// The schedule's name
        schedule: ScheduleName,
    },
    /// List the backups that the controller knows, or those at a target
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        place: Place,
        /// For admins: the tenant with whose key encrypted backups at a target are read [default: the tenant that may use the target, or else one's own]
        #[arg(long, requires = "address")]
        tenant: Option<TenantName>,
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
    /// Make a new volume of a backup; of a VM's backup a new VM, which can be started; of an image's backup a new image
    Restore {
        /// The backup's name
        backup: BackupName,
        /// The new volume, VM or image
        #[arg(long = "as", value_name = "NAME")]
        volume: VolumeName,
        /// Make only a volume: of a VM's backup, of its root disk
        #[arg(long)]
        disk: bool,
        /// Read and check all bytes before the volume or VM is made, as is always done for an image. Otherwise it can be used at once, and its bytes arrive afterwards
        #[arg(long)]
        whole: bool,
        #[command(flatten)]
        place: Place,
    },
    /// The key with which a tenant's backups are encrypted. Keep a copy where the loss of the cluster does not reach: nobody reads them without it
    Key {
        /// The tenant [default: one's own; an admin who imports a key has to name the tenant]
        #[arg(long, global = true)]
        tenant: Option<TenantName>,
        #[command(subcommand)]
        verb: KeyVerb,
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

/// `perigee backup key VERB`.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum KeyVerb {
    /// Make the key, and print it
    Make,
    /// Print the key
    Show,
    /// Take a key from standard input, with which backups of another cluster were encrypted
    Import,
}

/// Prints the key as one line, and nothing else: it becomes a file.
async fn key(client: &Client, tenant: Option<TenantName>, verb: KeyVerb) -> Result<(), Problem> {
    let tenant = match tenant {
        Some(tenant) => tenant,
        None => own_tenant(&client.get::<Me>("/v1/me").await?, verb)?,
    };
    let path = format!("/v1/tenants/{tenant}/backup-key");
    let set = async |key| client.put::<TenantBackupKey>(&path, &SetBackupKey { key }).await;
    let found = match verb {
        KeyVerb::Show => client.get::<TenantBackupKey>(&path).await?,
        KeyVerb::Make => set(None).await?,
        KeyVerb::Import => {
            let what = "can't import a key for backups";
            let line = std::io::read_to_string(std::io::stdin().take(KEY_BYTES_MAX))
                .map_err(|error| Problem::invalid(what, error))?;
            let key: BackupKey = line.parse().map_err(|error| Problem::invalid(what, error))?;
            set(Some(key)).await?;
            output::note(&format!("tenant {tenant} has this key now"));
            return Ok(());
        }
    };
    output::text(&found.key.to_line());
    Ok(())
}

/// Whose key is meant where no tenant is named. A key is never changed, so an admin's tenant gets none of others by mistake.
fn own_tenant(me: &Me, verb: KeyVerb) -> Result<TenantName, Problem> {
    match verb {
        KeyVerb::Import if me.role == Role::Admin => {
            let why = format!(
                "no tenant is named: without one, tenant {} would have this key for good",
                me.tenant
            );
            Err(Problem::invalid("can't import a key for backups", why).next(format!(
                "name the tenant whose backups were encrypted with it: --tenant NAME (what admins back up of their own: --tenant {})",
                me.tenant
            )))
        }
        KeyVerb::Make | KeyVerb::Show | KeyVerb::Import => Ok(me.tenant.clone()),
    }
}

const BACKUP: &[Column<Backup>] = &[
    ("name", |b| b.name.to_string()),
    ("of", |b| b.of().to_string()),
    ("at", |b| b.at.address.clone()),
    ("host", |b| output::or_dash(b.host.as_ref())),
    ("state", state),
    ("taken", |b| b.taken_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("size", |b| b.size_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("data", |b| b.data_bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("shipped", |b| output::bytes(b.shipped_bytes)),
    ("problem", |b| b.problem.clone()),
];

const SCHEDULE: &[Column<BackupSchedule>] = &[
    ("name", |s| s.name.to_string()),
    ("of", BackupSchedule::of_in_words),
    ("to", |s| s.to.address.clone()),
    ("every", |s| format_duration(s.every_s)),
    (
        "keep",
        |s| if s.keep.is_empty() { "all".to_owned() } else { Keep(s.keep.clone()).to_string() },
    ),
    ("kept", |s| s.kept.to_string()),
    ("newest", |s| s.last_success_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("failed", |s| {
        s.last_failure.as_ref().map_or_else(|| "-".to_owned(), |f| output::time(f.at_ms))
    }),
    ("next", next),
    ("problem", |s| if s.ended.is_empty() { s.problem.clone() } else { s.ended.clone() }),
];

const FOUND: &[Column<FoundBackup>] = &[
    ("name", |b| b.name.to_string()),
    ("of", found_of),
    ("taken", |b| output::time(b.taken_ms)),
    ("size", |b| output::bytes(b.size_bytes)),
    ("data", |b| output::bytes(b.data_bytes)),
    ("problem", |b| b.problem.clone()),
];

fn found_of(found: &FoundBackup) -> String {
    let vm = found.vm.as_ref().map(|of| BackupOf::Vm(of.vm.name.clone()));
    let of = vm.or_else(|| found.image.clone().map(BackupOf::Image));
    output::or_dash(of.or_else(|| found.volume.clone().map(BackupOf::Volume)).as_ref())
}

const VERIFIED: &[Column<VerifiedBackup>] =
    &[("read", |v| output::bytes(v.read_bytes)), ("problems", |v| v.problems.len().to_string())];

const RESTORED: &[Column<ClusterVolume>] = &[
    ("volume", |v| v.name.to_string()),
    ("home", |v| v.home.to_string()),
    ("size", |v| output::bytes(v.size_bytes)),
];

const RESTORED_VM: &[Column<Vm>] =
    &[("vm", |vm| vm.id.to_string()), ("status", |vm| output::word(&vm.status))];

const RESTORED_IMAGE: &[Column<ClusterImage>] =
    &[("image", |image| image.name.to_string()), ("size", |image| output::bytes(image.size_bytes))];

fn next(schedule: &BackupSchedule) -> String {
    match (&schedule.under_way, schedule.next_ms) {
        (Some(backup), _) => format!("{backup} is shipped"),
        (None, Some(next_ms)) => output::time(next_ms),
        (None, None) => "ended".to_owned(),
    }
}

fn state(backup: &Backup) -> String {
    match backup.progress {
        Some(progress) => format!(
            "{}, {} of {} shipped",
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
        Verb::Key { tenant, verb } => key(&client, tenant, verb).await,
        Verb::Create {
            volume,
            vm,
            image,
            to,
            endpoint,
            encrypt,
            every: Some(every_s),
            keep,
            ..
        } => {
            let (to, keep) = (BackupTarget { address: to, endpoint }, keep.unwrap_or_default().0);
            let encrypted = encrypt;
            let ask = NewBackupSchedule { volume, vm, image, to, every_s, keep, encrypted };
            let set: BackupSchedule = client.post("/v1/backup-schedules", &ask).await?;
            output::one(context.format, &set, SCHEDULE)
        }
        Verb::Schedules => {
            let all: Vec<BackupSchedule> = client.get("/v1/backup-schedules").await?;
            output::list(context.format, &all, SCHEDULE)
        }
        Verb::Unschedule { schedule } => {
            client.delete(&format!("/v1/backup-schedules/{schedule}")).await
        }
        Verb::Create { volume, vm, image, to, endpoint, whole, encrypt: encrypted, .. } => {
            let to = BackupTarget { address: to, endpoint };
            let ask = NewBackup { volume, vm, image, to, whole, encrypted };
            create(&client, &ask, context.format).await
        }
        Verb::List { place, tenant } => list(&client, place, tenant, context.format).await,
        Verb::Info { backup } => {
            let known: Backup = client.get(&format!("/v1/backups/{backup}")).await?;
            output::one(context.format, &known, BACKUP)
        }
        Verb::Verify { backup, place } => verify(&backup, place, context).await,
        Verb::Restore { backup, volume, disk, whole, place } => {
            restore(&backup, volume, (disk, whole), place, context).await
        }
        Verb::Delete { backup, forget } => {
            client.delete(&format!("/v1/backups/{backup}?forget={forget}")).await
        }
    }
}

async fn list(
    client: &Client,
    place: Place,
    tenant: Option<TenantName>,
    format: Format,
) -> Result<(), Problem> {
    let (Some(at), host) = place.target() else {
        let mut all: Vec<Backup> = client.get("/v1/backups").await?;
        if format == Format::Table {
            hide_parts(&mut all);
        }
        return output::list(format, &all, BACKUP);
    };
    let ask = LookForBackups { at, host, tenant };
    let all: Vec<FoundBackup> = client.post("/v1/look-for-backups", &ask).await?;
    output::list(format, &all, FOUND)
}

/// Makes a VM of a VM's backup, an image of an image's, and a volume of another one or if only the disk is wanted.
async fn restore(
    backup: &BackupName,
    volume: VolumeName,
    (disk, whole): (bool, bool),
    place: Place,
    context: &Context,
) -> Result<(), Problem> {
    let client = controller_client_within(context, READ_MAX)?;
    let (from, host) = place.target();
    let makes = match disk {
        true => Makes::Volume,
        false => made_of(&client, backup, from.as_ref(), host.as_ref()).await?,
    };
    match makes {
        Makes::Vm => {
            let vm = VmId::new(volume.as_str())
                .map_err(|error| Problem::invalid("can't name the VM", error))?;
            let ask = RestoreVmBackup { vm, host, from, whole };
            restore_vm(&client, backup, &ask, context).await
        }
        Makes::Image => {
            let image = ImageName::new(volume.as_str())
                .map_err(|error| Problem::invalid("can't name the image", error))?;
            let ask = RestoreImageBackup { image, host, from };
            restore_image(&client, backup, &ask, context).await
        }
        Makes::Volume => {
            let ask = RestoreBackup { volume, host, from, whole };
            restore_volume(&client, backup, &ask, context).await
        }
    }
}

/// What a restore makes of a backup.
enum Makes {
    Volume,
    Vm,
    Image,
}

/// The disks of a VM's backup are not shown beside it.
fn hide_parts(all: &mut Vec<Backup>) {
    let names: BTreeSet<BackupName> = all.iter().map(|backup| backup.name.clone()).collect();
    all.retain(|backup| backup.part_of.as_ref().is_none_or(|root| !names.contains(root)));
}

async fn made_of(
    client: &Client,
    backup: &BackupName,
    from: Option<&BackupTarget>,
    host: Option<&HostId>,
) -> Result<Makes, Problem> {
    let (is_of_vm, is_of_image) = match from.cloned() {
        None => {
            let known: Backup = client.get(&format!("/v1/backups/{backup}")).await?;
            (known.vm.is_some() && known.part_of.is_none(), known.image.is_some())
        }
        Some(at) => {
            // An admin writes the tenant before the name, and that tenant has the key.
            let name = backup.as_str();
            let tenant = name.contains(SEPARATOR).then(|| TenantName::of(name));
            let ask = LookForBackups { at, host: host.cloned(), tenant };
            let all: Vec<FoundBackup> = client.post("/v1/look-for-backups", &ask).await?;
            let its = || all.iter().filter(|found| found.name == *backup);
            (its().any(|found| found.vm.is_some()), its().any(|found| found.image.is_some()))
        }
    };
    Ok(match (is_of_vm, is_of_image) {
        (true, _) => Makes::Vm,
        (false, true) => Makes::Image,
        (false, false) => Makes::Volume,
    })
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
            let what = format!("can't make backup {} at {}", ended.name, ended.at.address);
            Err(Problem::conflict(what, ended.problem))
        }
        _ => Ok(()),
    }
}

async fn watch(client: &Client, begun: &Backup, goes_on: &str) -> Result<Backup, Problem> {
    let bar = output::progress_bar(&begun.name, "{msg}");
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
async fn restore_volume(
    client: &Client,
    backup: &BackupName,
    ask: &RestoreBackup,
    context: &Context,
) -> Result<(), Problem> {
    let mut made: ClusterVolume =
        client.post(&format!("/v1/backups/{backup}/restore"), ask).await?;
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
    has_arrived(&made)
}

/// # Errors
/// `Conflict` if bytes are damaged in the backup.
fn has_arrived(volume: &ClusterVolume) -> Result<(), Problem> {
    let name = &volume.name;
    let Some(left) = &volume.restoring else {
        output::note(&format!("all bytes of volume {name} have arrived and were right"));
        return Ok(());
    };
    let what = format!("volume {name} lacks {}", output::bytes(left.missing_bytes));
    Err(Problem::conflict(what, format!("the backup is damaged: {}", left.problem)).next(
        "reads of what is missing give I/O errors; use another backup, or have the volume of which it is shipped again: `perigee backup create --whole`",
    ))
}

/// Makes a VM of a backup, and waits until all bytes of its disks have arrived. Once the VM can be started, Ctrl-C ends only the waiting.
async fn restore_vm(
    client: &Client,
    backup: &BackupName,
    ask: &RestoreVmBackup,
    context: &Context,
) -> Result<(), Problem> {
    let made: Vm = client.post(&format!("/v1/backups/{backup}/restore-vm"), ask).await?;
    output::one(context.format, &made, RESTORED_VM)?;
    if ask.whole {
        return Ok(());
    }
    let vm = &made.id;
    output::note(&format!(
        "VM {vm} can be started (perigee vm start {vm}); the bytes of its disks are still arriving"
    ));
    let goes_on = format!(
        "the restore goes on; `perigee volume info {vm}-root` shows how many bytes are missing"
    );
    let watching = async {
        let mut all = Ok(());
        for disk in &made.volumes {
            let path = format!("/v1/volumes/{}", disk.volume);
            let now: ClusterVolume = asking::get(client, &path, &goes_on).await?;
            let ended = watch_restore(client, now, &goes_on).await?;
            all = all.and(has_arrived(&ended));
        }
        all
    };
    asking::until_interrupted(watching, &goes_on).await.map(|_| ())
}

/// Makes an image of a backup, and waits until it is there.
async fn restore_image(
    client: &Client,
    backup: &BackupName,
    ask: &RestoreImageBackup,
    context: &Context,
) -> Result<(), Problem> {
    let path = format!("/v1/backups/{backup}/restore-image");
    let made: ClusterImage = client.post(&path, ask).await?;
    output::one(context.format, &made, RESTORED_IMAGE)?;
    output::note(&format!("all bytes of image {} have arrived and were right", made.name));
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_names_the_tenant_that_gets_a_key_for_good() {
        let me = |role| Me { tenant: TenantName::default(), user: None, role };
        for verb in [KeyVerb::Make, KeyVerb::Show] {
            own_tenant(&me(Role::Admin), verb).expect("the own one");
        }
        own_tenant(&me(Role::Operator), KeyVerb::Import).expect("the only one");
        let refused = own_tenant(&me(Role::Admin), KeyVerb::Import).expect_err("which one?");
        assert!(refused.next.contains("--tenant NAME"), "{refused}");
    }
}
