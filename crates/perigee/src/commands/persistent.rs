//! VMs that live without a job: `perigee vm create`, `start`, `stop`, `restart` and `delete`.
//!
//! Each command waits until what it asked for has come true; Ctrl-C ends only the wait.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use perigee_controller::user_data;
use perigee_http::Client;
use perigee_model::amounts::Range;
use perigee_model::job::{Start, Vm};
use perigee_model::labels::Labels;
use perigee_model::network::Publish;
use perigee_model::persistent_vm::{CloudInit, NewVm, NewVmVolume, StopVm, VmState};
use perigee_model::vm::{Cpu, Firmware, Hardware, NetworkKind};
use perigee_model::{GroupName, HostId, HostRules, ImageName, Problem, ProblemKind, SiteId, VmId};

use crate::arguments::{count_range, size, size_range};
use crate::commands::asking::{self, Said};
use crate::commands::public_keys;
use crate::output;
use crate::terminal;

const LOOK_EVERY: Duration = Duration::from_millis(300);
/// How long a command waits for a VM whose state and reason stay the same.
const NO_CHANGE_MAX: Duration = Duration::from_secs(15 * 60);

/// What `perigee vm create` takes.
#[derive(Debug, clap::Args)]
pub struct Create {
    /// The new VM's name
    name: VmId,
    /// The image that its root disk is a clone of
    #[arg(long)]
    image: ImageName,
    /// vCPUs. With a range, as 1..4, it has the most, and while others want its host's CPUs the part of the least
    #[arg(long, value_name = "CPUS[..CPUS]", value_parser = count_range, default_value = "1")]
    cpus: Range<u32>,
    /// Memory. With a range, as 1GiB..4GiB, it always has the least, and while it runs up to the most, if its host and its tenant's quota
    /// have it
    #[arg(long, value_name = "SIZE[..SIZE]", value_parser = size_range, default_value = "1GiB")]
    memory: Range<u64>,
    /// The size of its root disk [default: the image's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk: Option<u64>,
    /// Its network card: the name of a network (`perigee network create`), `bridge:NAME`: a bridge that the operator has made and allowed at
    /// the hosts (only for admins), `user`: a network of its own behind its host, `none`, or `default`: `user`, where the host can and its data may leave its site
    #[arg(long, default_value = "default")]
    network: NetworkKind,
    /// A port that is reached from outside at the host of its network's gateway, and the VM's own port. May be given several
    /// times
    #[arg(long, value_name = "PORT:PORT[/udp]", requires = "network")]
    publish: Vec<Publish>,
    /// What boots its root disk: bios: its boot record; uefi: the boot loader on its EFI system partition; uefi-secure: only one that
    /// is signed (Secure Boot)
    #[arg(long, value_name = "FIRMWARE", default_value = "bios")]
    firmware: Firmware,
    /// Its CPU under KVM: `common`: such a VM moves between all hosts with processors of one maker; `host`: all that the host has; or a model by its
    /// name in QEMU, for example EPYC-Milan
    #[arg(long, value_name = "CPU", default_value = "common")]
    cpu: Cpu,
    /// Give it a screen, a keyboard and a pointer, for `perigee vm vnc`
    #[arg(long)]
    vnc: bool,
    /// Give it a TPM 2.0. Its state is a small volume of the VM's own, which stays when the VM is stopped and goes with it when it moves
    #[arg(long)]
    tpm: bool,
    /// A volume of the cluster as a further disk. With a PATH cloud-init mounts it there; with `ro` the guest can't
    /// write it. May be given several times
    #[arg(long = "volume", value_name = "VOLUME[:PATH][:ro]", value_parser = volume)]
    volumes: Vec<NewVmVolume>,
    /// The guest's first user [default: the image's own, for example debian]
    #[arg(long)]
    user: Option<String>,
    /// A file with public SSH keys of the guest's first user; may be given several times
    #[arg(long = "ssh-key", value_name = "FILE")]
    ssh_keys: Vec<PathBuf>,
    /// A file with user-data for cloud-init, which may be compressed with gzip
    #[arg(long, value_name = "FILE")]
    user_data: Option<PathBuf>,
    /// Run it at this host and no other
    #[arg(long, conflicts_with = "site")]
    host: Option<HostId>,
    /// Run it at a host of this site
    #[arg(long)]
    site: Option<SiteId>,
    /// Whether it moves by itself: away from an overloaded host or one that is drained, or to its data. `perigee vm move` moves it either way
    #[arg(long = "move", value_enum, default_value_t = Moves::Auto)]
    moves: Moves,
    /// Keep it on one host with the other VMs that name this group
    #[arg(long, value_name = "GROUP")]
    together: Option<GroupName>,
    /// Keep it off each host that has another VM that names this group
    #[arg(long, value_name = "GROUP")]
    apart: Option<GroupName>,
    /// Start it at another host if its host does not answer any more and all its disks are at others
    #[arg(long)]
    restart_elsewhere: bool,
    /// Make it, and don't start it
    #[arg(long)]
    stopped: bool,
    /// A word by which you find it again; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = Labels::parse_one)]
    labels: Vec<(String, String)>,
}

/// The values of `--move`, as in a job file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Moves {
    /// It moves by itself where that pays
    Auto,
    /// It moves only when a person moves it
    Never,
}

impl Moves {
    pub fn may_migrate(self) -> bool {
        self == Self::Auto
    }
}

/// A volume as a person writes it: `VOLUME[:PATH][:ro]`.
pub fn volume(text: &str) -> Result<NewVmVolume, String> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let volume = name.parse().map_err(|e: perigee_model::BadName| e.to_string())?;
    let mut made = NewVmVolume { volume, read_only: false, mount: None };
    for part in parts {
        match part {
            "ro" if !made.read_only => made.read_only = true,
            path if path.starts_with('/') && made.mount.is_none() => made.mount = Some(path.into()),
            other => return Err(format!("{other:?} is neither a path nor `ro`")),
        }
    }
    Ok(made)
}

/// The bytes of a file that the user names.
pub fn read(file: &Path) -> Result<Vec<u8>, Problem> {
    let what = || format!("can't read {}", file.display());
    std::fs::read(file).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Problem::not_found(what(), "there is no such file"),
        _ => Problem::invalid(what(), e),
    })
}

/// What is asked for. Faults in it are found before anything is sent.
pub fn wanted(ask: Create) -> Result<NewVm, Problem> {
    let start = match (ask.host, ask.site) {
        (Some(host), _) => Start::Host(host),
        (None, Some(site)) => Start::Site(site),
        (None, None) => Start::Anywhere,
    };
    let what = format!("can't make VM {}", ask.name);
    let rules = HostRules { together: ask.together, apart: ask.apart };
    rules.check(1).map_err(|why| Problem::invalid(&what, why.to_string()))?;
    let mut cloud_init = CloudInit { user: ask.user, ..CloudInit::default() };
    for file in &ask.ssh_keys {
        cloud_init.ssh_keys.extend(public_keys::read(file)?);
    }
    if let Some(file) = &ask.user_data {
        let text = user_data::text_of(&read(file)?)?;
        user_data::check(&text)?;
        cloud_init.user_data = Some(text);
    }
    cloud_init.check(&what)?;
    Ok(NewVm {
        name: ask.name,
        image: ask.image,
        cpus: ask.cpus.least,
        cpus_max: ask.cpus.most,
        memory_bytes: ask.memory.least,
        memory_max_bytes: ask.memory.most,
        disk_bytes: ask.disk,
        network: ask.network,
        publish: ask.publish,
        volumes: ask.volumes,
        start,
        may_migrate: ask.moves.may_migrate(),
        restart_elsewhere: ask.restart_elsewhere,
        stopped: ask.stopped,
        cloud_init,
        firmware: ask.firmware,
        hardware: Hardware { vnc: ask.vnc, tpm: ask.tpm, cpu: ask.cpu },
        rules,
        labels: ask.labels.into_iter().collect(),
    })
}

/// Makes the VM, and waits until it runs, unless it is made stopped.
pub async fn create(client: &Client, new: &NewVm) -> Result<Vm, Problem> {
    let made: Vm = client.create("/v1/vms", new).await?;
    if new.stopped { Ok(made) } else { until_it_runs(client, &made.id).await }
}

/// Starts a stopped VM, and waits until it runs.
pub async fn start(client: &Client, vm: &VmId) -> Result<Vm, Problem> {
    let _: Vm = client.post(&format!("/v1/vms/{vm}/start"), &serde_json::json!({})).await?;
    until_it_runs(client, vm).await
}

/// Returns when the VM is off. A job's VM is off at once.
///
/// # Errors
/// If the guest does not follow, with the way to stop it by force.
pub async fn stop(client: &Client, vm: &VmId, force: bool) -> Result<(), Problem> {
    let before: Vm = client.get(&format!("/v1/vms/{vm}")).await?;
    let _: serde_json::Value =
        client.post(&format!("/v1/vms/{vm}/stop"), &StopVm { force }).await?;
    if before.job.is_some() {
        return Ok(());
    }
    let what = format!("stop VM {vm}");
    follow(client, vm, &what, stopped).await.map(drop)
}

/// What came of a stop that the VM's driver has begun. While it lasts, the VM is shown as being stopped.
fn stopped(shown: &Vm) -> Option<Result<(), String>> {
    let reason = &shown.reason;
    match shown.status {
        VmState::Stopped => Some(Ok(())),
        VmState::Running if reason.is_empty() => {
            Some(Err("somebody has started it again".to_owned()))
        }
        VmState::Running => Some(Err(reason.clone())),
        status if status.is_up() => Some(Err(format!(
            "it stands still ({}: {reason}); `perigee vm stop {} --force` stops it at once",
            output::word(&status),
            shown.id
        ))),
        _ => None,
    }
}

/// Waits for another run.
pub async fn restart(client: &Client, vm: &VmId, force: bool) -> Result<Vm, Problem> {
    let before: Vm = client.get(&format!("/v1/vms/{vm}")).await?;
    let asked: Vm = client.post(&format!("/v1/vms/{vm}/restart"), &StopVm { force }).await?;
    let mut was_down = asked.status == VmState::Waiting;
    let what = format!("restart VM {vm}");
    follow(client, vm, &what, |shown| {
        was_down |= shown.run > before.run;
        match shown.status {
            VmState::Running if was_down => Some(Ok(())),
            // The stop is over, and the guest has not followed it.
            status if !was_down && status.is_up() && !shown.reason.is_empty() => {
                Some(Err(shown.reason.clone()))
            }
            VmState::Stopped => Some(Err(or_unknown(shown))),
            _ => None,
        }
    })
    .await
}

/// Returns when the VM's name is free again.
pub async fn delete(client: &Client, vm: &VmId, force: bool) -> Result<(), Problem> {
    let before: Vm = client.get(&format!("/v1/vms/{vm}")).await?;
    delete_known(client, &before, force).await
}

/// The same for a VM that was asked for just before.
pub async fn delete_known(client: &Client, before: &Vm, force: bool) -> Result<(), Problem> {
    let vm = &before.id;
    client.delete(&format!("/v1/vms/{vm}?force={force}")).await?;
    let is_over = |shown: &Vm| is_another(before, shown).then_some(Ok(()));
    let gone = follow(client, vm, &format!("delete VM {vm}"), is_over).await;
    match gone {
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        other => other.map(drop),
    }
}

/// Whether somebody has made another VM of this name meanwhile. When it was made is not known of one whose record is gone.
fn is_another(before: &Vm, shown: &Vm) -> bool {
    before.made_ms > 0 && shown.made_ms > 0 && shown.made_ms != before.made_ms
}

/// Returns when it runs; an error if it is off instead.
async fn until_it_runs(client: &Client, vm: &VmId) -> Result<Vm, Problem> {
    follow(client, vm, &format!("start VM {vm}"), |shown| match shown.status {
        VmState::Running => Some(Ok(())),
        VmState::Stopped => Some(Err(or_unknown(shown))),
        _ => None,
    })
    .await
}

fn or_unknown(vm: &Vm) -> String {
    if vm.reason.is_empty() { "it was stopped meanwhile".to_owned() } else { vm.reason.clone() }
}

/// Looks at a VM until it is as wanted, or can't be.
async fn follow(
    client: &Client,
    vm: &VmId,
    what: &str,
    mut is_over: impl FnMut(&Vm) -> Option<Result<(), String>>,
) -> Result<Vm, Problem> {
    let bar = output::progress_bar(vm, "{msg}");
    let (mut said, mut changed) = (Said::default(), Instant::now());
    let goes_on = format!("it goes on; `perigee vm info {vm}` shows how far it is");
    let looking = async {
        loop {
            let shown: Vm = asking::get(client, &format!("/v1/vms/{vm}"), &goes_on).await?;
            match is_over(&shown) {
                Some(Ok(())) => return Ok(shown),
                Some(Err(why)) => return Err(Problem::conflict(format!("can't {what}"), why)),
                None => {}
            }
            let colon = if shown.reason.is_empty() { "" } else { ": " };
            let now = format!("{}{colon}{}", output::word(&shown.status), shown.reason);
            bar.set_message(terminal::for_stderr(&now));
            bar.tick();
            if said.is_news(&now) {
                changed = Instant::now();
                if bar.is_hidden() {
                    output::note(&format!("{vm} {now}"));
                }
            }
            if changed.elapsed() >= NO_CHANGE_MAX {
                let minutes = NO_CHANGE_MAX.as_secs() / 60;
                let why = format!("it is {now}, and nothing has changed for {minutes} minutes");
                return Err(Problem::unavailable(format!("can't {what}"), why).next(&goes_on));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let found = asking::until_interrupted(looking, &goes_on).await;
    bar.finish_and_clear();
    match found? {
        Some(shown) => Ok(shown),
        None => client.get(&format!("/v1/vms/{vm}")).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_may_be_read_only() {
        let read = volume("data:ro").expect("a volume");
        assert!(read.read_only && read.volume.as_str() == "data");
        assert!(!volume("data").expect("a volume").read_only);
        let mounted = volume("data:/srv:ro").expect("a volume");
        assert!(mounted.read_only && mounted.mount.as_deref() == Some("/srv"));
        assert!(volume("data:rw").is_err() && volume(":ro").is_err());
    }

    fn shown(status: &str, reason: &str) -> Vm {
        let io = serde_json::json!(perigee_model::volume::IoStats::default());
        let text = format!(
            r#"{{"id":"web","job":null,"host":"home1","status":"{status}","reason":"{reason}","cpus":1,
            "memory_bytes":1,"uptime_ms":1,"vcpu_ms":1,"load":{{}},"migration":null,"waits":[],"run":0,"made_ms":0,"io":{io},"volumes":[],"addresses":[]}}"#
        );
        serde_json::from_str(&text).expect("a VM")
    }

    #[test]
    fn a_delete_does_not_wait_for_the_end_of_another_vm_of_the_same_name() {
        let made = |made_ms| Vm { made_ms, ..shown("running", "") };
        assert!(!is_another(&made(5), &made(5)));
        assert!(is_another(&made(5), &made(9)));
        assert!(!is_another(&made(5), &made(0)), "its record is gone, and its host still has it");
    }

    #[test]
    fn a_stop_is_not_waited_for_when_it_is_over_and_the_vm_is_up() {
        assert_eq!(stopped(&shown("stopping", "")), None);
        assert_eq!(stopped(&shown("stopped", "")), Some(Ok(())));
        let why = |vm: &Vm| stopped(vm).expect("it is over").expect_err("it is up");
        assert_eq!(why(&shown("running", "its guest runs on")), "its guest runs on");
        assert_eq!(why(&shown("running", "")), "somebody has started it again");
        let stands = why(&shown("io_error", "disk root: no space"));
        assert!(stands.contains("disk root: no space") && stands.contains("--force"), "{stands}");
    }
}
