//! What runs in an instance: it takes a while to boot, answers at the metadata address, and runs the user-data once, as cloud-init does.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::Problem;
use perigee_model::rental::InstanceState;

use super::records::{Record, Records};
use super::{instance, metadata};
use crate::definition::{Definition, LabId};
use crate::state::LabDir;

const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Gives the script directories of its own where a machine has the files of its daemons, and hides this machine's systemd. All of that is in
/// a mount namespace, and goes with its last process.
///
/// What else is written below `/etc`, `/run` and `/var/lib` is in memory. The root of the instance may be below one of these, and stays
/// what it is.
const MOUNTS: &str = r#"
set -eu
umask 022
root=$1
mkdir -p "$root/mounts"
mount -t tmpfs perigee-lab "$root/mounts"
cd "$root/mounts"
mkdir root
mount --bind "$root" root
for dir in etc run var/lib; do
  mkdir -p "upper/$dir" "work/$dir"
  mount -t overlay -o "lowerdir=/$dir,upperdir=upper/$dir,workdir=work/$dir" perigee-lab "/$dir"
done
mount --no-canonicalize --bind root "$root"
cd "$root"
for dir in etc run var/lib; do
  (umask 066; mkdir -p "machine/$dir/perigee")
  mkdir -p "/$dir/perigee"
  mount --bind "$root/machine/$dir/perigee" "/$dir/perigee"
done
if [ -d "$root/disk" ]; then
  mkdir -p /var/lib/perigee/pool
  mount --bind "$root/disk" /var/lib/perigee/pool
fi
rm -rf /run/systemd/system /run/systemd/private /run/dbus
mount --bind "$root/boot-id" /proc/sys/kernel/random/boot_id
exec "$root/user-data"
"#;

/// Runs until the instance ends. This is the command `perigee lab instance`.
///
/// # Errors
/// The lab or the instance does not exist, or the metadata address can't be used.
pub async fn machine(base: &Path, lab: &LabId, id: &str) -> Result<(), Problem> {
    // This fails only if the process leads a session already, which is just as good.
    let _ = nix::unistd::setsid();
    perigee_http::prepare_daemon();
    let dir = LabDir::new(base, lab);
    let definition = dir.load()?.definition;
    let records = Records::new(&dir);
    tokio::time::sleep(Duration::from_secs(definition.rent.boot_s)).await;
    let Some(record) = has_booted(&records, id).await? else { return Ok(()) };
    let served = metadata::serve(records.clone(), record.clone());
    let root = records.root(id);
    let run = run_user_data(&root);
    tokio::select! {
        problem = served => Err(problem),
        () = run => Ok(()),
        ended = until_end(&definition, &records, id) => ended,
    }
}

/// `None` if the instance was ended meanwhile.
async fn has_booted(records: &Records, id: &str) -> Result<Option<Record>, Problem> {
    let _lock = records.lock().await?;
    let Some(mut record) = records.get(id)?.filter(|r| r.state == InstanceState::Pending) else {
        return Ok(None);
    };
    record.state = InstanceState::Running;
    record.started_unix_s = Some(now_unix_s());
    records.put(&record)?;
    Ok(Some(record))
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// What the script starts in the background goes on after it. This never returns.
async fn run_user_data(root: &Path) {
    let mut command = tokio::process::Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--", "/bin/sh", "-c", MOUNTS, "mounts"]);
    match command.arg(root).stdin(Stdio::null()).status().await {
        Ok(status) => tracing::info!("the user-data have ended: {status}"),
        Err(error) => tracing::error!("can't run the user-data: {error}"),
    }
    std::future::pending().await
}

/// Ends the instance when it powers itself off, or when its provider takes it back.
async fn until_end(definition: &Definition, records: &Records, id: &str) -> Result<(), Problem> {
    let power_off = records.root(id).join("power-off");
    loop {
        let ends = records.ends_unix_s(id).unwrap_or_else(|problem| {
            tracing::warn!(%problem, "the notice is not known");
            None
        });
        if power_off.exists() || ends.is_some_and(|ends_unix_s| ends_unix_s <= now_unix_s()) {
            let _lock = records.lock().await?;
            return match records.get(id)?.filter(Record::is_there) {
                Some(record) => instance::end(definition, records, record).await,
                None => Ok(()),
            };
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
