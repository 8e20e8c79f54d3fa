//! `perigee vm`

use std::process::ExitCode;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use perigee_http::Client;
use perigee_model::amounts::{MemoryAmount, Range};
use perigee_model::job::{AdoptVm, ClusterImage, Migration, MoveVm, UnknownKind, Vm};
use perigee_model::load::{VcpuUse, VmLoad};
use perigee_model::persistent_vm::{AttachVolume, DetachVolume, ResizeVm, RestoreVm, SetVm};
use perigee_model::units::{format_rate, format_seconds};
use perigee_model::volume::Snapshot;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{GroupName, HostId, HostRules, ImageName, Problem, VmId, VolumeName};
use serde::Serialize;

use crate::arguments::{count_range, size, size_range};
use crate::commands::image::CLUSTER;
use crate::commands::persistent::{self, Create, Moves};
use crate::commands::{
    balancing, console, exec, guest_files, moving, moving_volumes, ssh, unknown, vnc,
};
use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// `perigee vm VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List virtual machines
    #[command(visible_alias = "ls")]
    List {
        /// Show instead those of hosts that no record of the controller names there
        #[arg(long)]
        unknown: bool,
    },
    /// End a virtual machine that a host has and no record of the controller names there. Its guest is asked to power off, and its disks stay
    End {
        /// The VM's name, as `perigee vm list --unknown` shows it
        vm: VmId,
        /// The host that has it
        #[arg(long)]
        host: HostId,
        /// At once, as a power cut does
        #[arg(long)]
        force: bool,
    },
    /// Go on with a virtual machine that a host has and no record of the controller names there, as after a restore of an older copy of the state
    Adopt {
        /// The VM's name, as `perigee vm list --unknown` shows it
        vm: VmId,
        /// The host at which it runs
        #[arg(long)]
        host: HostId,
        /// The image of which its root disk is a clone [default: that whose layer the disk stands on]
        #[arg(long)]
        image: Option<ImageName>,
    },
    /// Show one virtual machine
    Info {
        /// The VM's name, as `perigee vm list` shows it
        vm: VmId,
    },
    /// Say where a virtual machine stands: what it loses at its host, what it would have saved at others, and whether it moves and why
    Explain {
        /// The VM's name
        vm: VmId,
    },
    /// Create a virtual machine that lives without a job, and start it
    Create(Box<Create>),
    /// Start a virtual machine that is stopped
    Start {
        /// The VM's name
        vm: VmId,
    },
    /// Stop a virtual machine: its guest is asked to power off, and its disks are kept
    Stop {
        /// The VM's name. A job's VM is stopped at once, and its job fails
        vm: VmId,
        /// Stop it at once, as a power cut does
        #[arg(long)]
        force: bool,
    },
    /// Stop a virtual machine and start it again
    Restart {
        /// The VM's name
        vm: VmId,
        /// Stop it at once, as a power cut does
        #[arg(long)]
        force: bool,
    },
    /// Delete a virtual machine that is stopped, with its own disks. Its volumes stay
    #[command(visible_alias = "rm")]
    Delete {
        /// The VM's name
        vm: VmId,
        /// Also one that runs: it is stopped at once
        #[arg(long)]
        force: bool,
    },
    /// Migrate a running virtual machine to another host, and show the progress.
    ///
    /// Ctrl-C does not stop the migration; --cancel does.
    Move {
        /// The VM's name
        vm: VmId,
        /// The destination host
        #[arg(required_unless_present = "cancel", conflicts_with = "cancel")]
        host: Option<HostId>,
        /// Cancel the running migration; the VM stays on its host. If it has arrived, its volumes stay
        /// where they are
        #[arg(long)]
        cancel: bool,
        /// What becomes of the VM's volumes
        #[arg(long, value_enum, default_value_t = Volumes::Stay, conflicts_with = "cancel")]
        volumes: Volumes,
        /// Let the volumes follow although a replica of one is at the destination's site
        #[arg(long, conflicts_with = "cancel")]
        yes: bool,
    },
    /// Run a program in a running virtual machine, as root, and show what it prints. The guest needs qemu-guest-agent
    Exec {
        /// The VM's name
        vm: VmId,
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Save a virtual machine's root disk as an image, also while it runs
    Snapshot {
        /// The VM's name
        vm: VmId,
        /// The new image's name
        image: ImageName,
    },
    /// Make the root disk of a stopped virtual machine a clone of an image, for example of a snapshot of it. What was on the disk
    /// is lost
    Restore {
        /// The VM's name
        vm: VmId,
        /// The image
        image: ImageName,
    },
    /// Give a virtual machine another number of CPUs, another amount of memory, or a larger root disk.
    ///
    /// One that runs gets more vCPUs and a larger disk at once, and gives memory back; for the rest stop it first
    Resize {
        /// The VM's name
        vm: VmId,
        #[command(flatten)]
        to: Size,
    },
    /// Say anew whether a virtual machine without a job moves by itself, and beside which others it is or never is, also while it runs.
    ///
    /// VMs of a tenant that name one group are a group. Of its rules those that are not said hold no longer. Nothing moves for them.
    /// `perigee vm info` shows both
    Set {
        /// The VM's name
        vm: VmId,
        #[command(flatten)]
        to: Anew,
    },
    /// Give a virtual machine a volume as a further disk, also while it runs.
    ///
    /// Its guest finds it as /dev/disk/by-id/virtio-data0, or the next number that is free
    Attach {
        /// The VM's name
        vm: VmId,
        /// The volume
        volume: VolumeName,
        /// The guest can't write it
        #[arg(long)]
        read_only: bool,
    },
    /// Take a volume from a virtual machine. While it runs, unmount the volume in its guest first. The volume stays
    Detach {
        /// The VM's name
        vm: VmId,
        /// The volume
        volume: VolumeName,
    },
    /// Copy a file into a running virtual machine, or out of it. The guest needs qemu-guest-agent, and no network
    Cp {
        /// What is copied: a file, `VM:PATH` for one in a guest
        from: String,
        /// Where it goes, in the same form. A directory gets a file of the same name
        to: String,
    },
    /// Log in to a guest with `ssh`, or run a command there, through the controller.
    ///
    /// It works from wherever the controller is reached. The VM's card is in a network of its tenant, or the default one, and the guest has
    /// an SSH server. `rsync -e "perigee vm ssh"` works too
    Ssh(ssh::Ssh),
    /// Carry the bytes of an SSH connection between standard input and output, and the guest
    #[command(hide = true)]
    SshTunnel {
        /// The VM's name
        vm: VmId,
    },
    /// Open a port of this machine for a VNC viewer, which then shows the screen of a virtual machine that was made with `--vnc`.
    ///
    /// The port is open only for your own user's programs, until Ctrl-C. A viewer that connects again after the VM has moved finds it there
    Vnc {
        /// The VM's name
        vm: VmId,
        /// The port, on 127.0.0.1 [default: any that is free]
        #[arg(long, default_value_t = 0, hide_default_value = true)]
        port: u16,
    },
    /// Attach this terminal to the serial console of a running virtual machine; Ctrl-] leaves it.
    ///
    /// The terminal obeys what the guest prints, escape sequences too. With --log it does not.
    Console {
        /// The VM's name
        vm: VmId,
        /// Show the end of what the guest has printed, and don't attach
        #[arg(long)]
        log: bool,
    },
}

/// What is changed; at least one of them.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(required = true, multiple = true)]
pub struct Size {
    /// vCPUs. A range, as 1..4, is given to a VM that is stopped
    #[arg(long, value_name = "CPUS[..CPUS]", value_parser = count_range)]
    cpus: Option<Range<u32>>,
    /// Memory. A range, as 1GiB..4GiB, is given to a VM that is stopped
    #[arg(long, value_name = "SIZE[..SIZE]", value_parser = size_range)]
    memory: Option<Range<u64>>,
    /// The size of its root disk. The guest makes its filesystem larger at once, if it has qemu-guest-agent and cloud-init, or when it boots
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk: Option<u64>,
}

/// What is said anew of a VM; at least one of them.
#[derive(Debug, Clone, clap::Args)]
#[group(required = true, multiple = true)]
pub struct Anew {
    /// auto: away from an overloaded host or one that is drained, or to its data; never: only `perigee vm move` moves it
    #[arg(long = "move", value_enum)]
    moves: Option<Moves>,
    /// Keep it on one host with the other VMs that name this group
    #[arg(long, value_name = "GROUP")]
    together: Option<GroupName>,
    /// Keep it off each host that has another VM that names this group
    #[arg(long, value_name = "GROUP")]
    apart: Option<GroupName>,
    /// It may be at any host
    #[arg(long, conflicts_with_all = ["together", "apart"])]
    no_rules: bool,
}

impl From<Anew> for SetVm {
    fn from(Anew { moves, together, apart, no_rules }: Anew) -> Self {
        let is_ruled = no_rules || together.is_some() || apart.is_some();
        Self {
            may_migrate: moves.map(Moves::may_migrate),
            rules: is_ruled.then_some(HostRules { together, apart }),
        }
    }
}

/// The values of `--volumes`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Volumes {
    /// They stay, and the VM reaches them over the network
    Stay,
    /// The VM's own disks and the data that it writes come after it, one by one, when it runs at the
    /// destination. Data that it only reads stays
    Follow,
}

impl From<Volumes> for VolumesOnMove {
    fn from(volumes: Volumes) -> Self {
        match volumes {
            Volumes::Stay => Self::Stay,
            Volumes::Follow => Self::Follow,
        }
    }
}

const COLUMNS: &[Column<Vm>] = &[
    ("vm", |v| v.id.to_string()),
    ("host", |v| output::or_dash(v.host.as_ref())),
    ("status", |v| output::word(&v.status)),
    ("cpus", cpus),
    ("memory", memory),
    ("up", |v| format!("{} s", v.uptime_ms / 1000)),
    ("job", |v| output::or_dash(v.job.as_ref())),
    ("migration", |v| output::or_dash(v.migration.as_ref())),
    ("reason", |v| v.reason.clone()),
];

/// Its vCPUs, or the range of them.
fn cpus(vm: &Vm) -> String {
    let most = vm.cpu_time.as_ref().map(|amount| format!("..{}", amount.most));
    format!("{}{}", vm.cpus, most.unwrap_or_default())
}

/// What it has, and its range, where it may have more or less.
fn memory(vm: &Vm) -> String {
    match &vm.memory {
        Some(amount) => MemoryAmount { reason: String::new(), ..amount.clone() }.to_string(),
        None => output::bytes(vm.memory_bytes),
    }
}

/// What is shown of a VM that was just started.
const SHOWN: &[Column<Vm>] = &[
    ("vm", |v| v.id.to_string()),
    ("host", |v| output::or_dash(v.host.as_ref())),
    ("status", |v| output::word(&v.status)),
    ("reason", |v| v.reason.clone()),
];

/// What is shown of a VM that was resized.
const SIZED: &[Column<Vm>] = &[
    ("vm", |v| v.id.to_string()),
    ("cpus", cpus),
    ("memory", memory),
    ("status", |v| output::word(&v.status)),
];

/// What is shown of a VM of which something was said anew.
const SET: &[Column<Vm>] = &[
    ("vm", |v| v.id.to_string()),
    ("host", |v| output::or_dash(v.host.as_ref())),
    ("move", |v| moves_by_itself(v.may_migrate).to_owned()),
    ("together", |v| output::or_dash(v.rules.together.as_ref())),
    ("apart", |v| output::or_dash(v.rules.apart.as_ref())),
];

/// A VM with its migrations.
#[derive(Debug, Serialize)]
struct Info {
    #[serde(flatten)]
    vm: Vm,
    migrations: Vec<Migration>,
}

/// How long its vCPUs were ready to run and had no CPU; a dash if that is not known.
fn waited_for_cpu(load: &VmLoad) -> String {
    let Some(total_ms) = load.run_delay_ms else { return "-".to_owned() };
    let total = format_seconds(Duration::from_millis(total_ms).as_secs_f64());
    let share = output::percent(load.vcpus_1m.map(VcpuUse::run_delay_share));
    format!("{total} at this host; {share} of the last minute's time in which it wanted one")
}

/// In the words of `--move` and of a job file.
fn moves_by_itself(may_migrate: Option<bool>) -> &'static str {
    match may_migrate {
        Some(true) => "auto",
        Some(false) => "never",
        None => "-",
    }
}

const INFO: &[Column<Info>] = &[
    ("vm", |i| i.vm.id.to_string()),
    ("image", |i| output::or_dash(i.vm.image.as_ref())),
    ("host", |i| output::or_dash(i.vm.host.as_ref())),
    ("status", |i| output::word(&i.vm.status)),
    ("cpus", |i| match &i.vm.cpu_time {
        Some(amount) => amount.to_string(),
        None => i.vm.cpus.to_string(),
    }),
    ("memory", |i| match &i.vm.memory {
        Some(amount) => amount.to_string(),
        None => output::bytes(i.vm.memory_bytes),
    }),
    ("memory changes at", |i| {
        i.vm.load.dirty_bytes_per_s.map_or_else(|| "-".to_owned(), format_rate)
    }),
    ("up", |i| format!("{} s", i.vm.uptime_ms / 1000)),
    ("waited for a cpu", |i| waited_for_cpu(&i.vm.load)),
    ("job", |i| output::or_dash(i.vm.job.as_ref())),
    ("move", |i| moves_by_itself(i.vm.may_migrate).to_owned()),
    ("job's end", |i| output::or_dash(i.vm.predicted_end.as_ref())),
    ("addresses", |i| i.vm.addresses.join(", ")),
    ("rules", |i| i.vm.rules.to_string()),
    ("labels", |i| i.vm.labels.to_string()),
    ("reason", |i| i.vm.reason.clone()),
    ("volumes", |i| i.vm.volumes.iter().map(moving_volumes::of_vm).collect::<Vec<_>>().join("\n")),
    ("migrations", |i| i.migrations.iter().map(moving::summary).collect::<Vec<_>>().join("\n")),
    ("last migration", |i| {
        i.migrations.last().map_or_else(String::new, |m| moving::lines(m).join("\n"))
    }),
];

/// Does what a verb asks for, and prints the result. The exit code is 0, or for `vm exec` that of the guest's program.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    match verb {
        // What is wrong with these two is said also if no controller runs.
        Verb::Ssh(ask) => match ssh::run(ask, context)? {},
        Verb::Create(ask) => {
            let new = persistent::wanted(*ask)?;
            let made = persistent::create(&controller_client(context)?, &new).await?;
            output::one(context.format, &made, SHOWN)?;
        }
        Verb::Exec { vm, command } => {
            return exec::run(&controller_client(context)?, &vm, command).await;
        }
        other => ask_controller(other, context).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The verbs that need nothing but a controller.
async fn ask_controller(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    let show = |vm: Vm| output::one(context.format, &vm, SHOWN);
    match verb {
        Verb::Ssh(_) | Verb::Create(_) | Verb::Exec { .. } => unreachable!("`run` does these"),
        Verb::Snapshot { vm, image } => save(&client, &vm, image, context).await,
        Verb::Restore { vm, image } => {
            show(client.post(&format!("/v1/vms/{vm}/restore"), &RestoreVm { image }).await?)
        }
        Verb::Resize { vm, to } => resize(&client, &vm, &to, context).await,
        Verb::Set { vm, to } => {
            let set: Vm = client.put(&format!("/v1/vms/{vm}/set"), &SetVm::from(to)).await?;
            output::one(context.format, &set, SET)
        }
        Verb::Attach { vm, volume, read_only } => {
            let ask = AttachVolume { volume, read_only };
            show(client.post(&format!("/v1/vms/{vm}/attach"), &ask).await?)
        }
        Verb::Detach { vm, volume } => {
            show(client.post(&format!("/v1/vms/{vm}/detach"), &DetachVolume { volume }).await?)
        }
        Verb::SshTunnel { vm } => ssh::tunnel(&client, &vm).await,
        Verb::Cp { from, to } => guest_files::copy(&client, &from, &to).await,
        Verb::List { unknown: true } => unknown::list(context, Some(UnknownKind::Vm)).await,
        Verb::List { unknown: false } => {
            let vms: Vec<Vm> = client.get("/v1/vms").await?;
            output::list(context.format, &vms, COLUMNS)
        }
        Verb::Info { vm } => {
            let found: Vm = client.get(&format!("/v1/vms/{vm}")).await?;
            let moves: Vec<Migration> = client.get(&format!("/v1/vms/{vm}/migrations")).await?;
            output::one(context.format, &Info { vm: found, migrations: moves }, INFO)
        }
        Verb::Explain { vm } => balancing::explain(&client, &vm, context.format).await,
        Verb::Start { vm } => show(persistent::start(&client, &vm).await?),
        Verb::Stop { vm, force } => persistent::stop(&client, &vm, force).await,
        Verb::Restart { vm, force } => show(persistent::restart(&client, &vm, force).await?),
        Verb::Delete { vm, force } => persistent::delete(&client, &vm, force).await,
        Verb::Adopt { vm, host, image } => {
            let path = format!("/v1/vms/{vm}/adopt");
            show(client.post(&path, &AdoptVm { host, image }).await?)
        }
        Verb::End { vm, host, force } => unknown::end_vm(context, &vm, host, force).await,
        Verb::Move { vm, host: Some(host), volumes, yes: confirmed, .. } => {
            let ask = MoveVm { host, volumes: volumes.into(), confirmed };
            moving::begin(&client, &vm, &ask, context.format).await
        }
        Verb::Move { vm, host: None, .. } => moving::cancel(&client, &vm, context.format).await,
        Verb::Vnc { vm, port } => vnc::serve(&client, &vm, port).await,
        Verb::Console { vm, log: false } => console::attach(&client, &vm).await,
        Verb::Console { vm, log: true } => {
            let text = client.get_bytes(&format!("/v1/vms/{vm}/console")).await?;
            output::text(&String::from_utf8_lossy(&text));
            Ok(())
        }
    }
}

/// Makes an image of the VM's root disk.
async fn save(
    client: &Client,
    vm: &VmId,
    image: ImageName,
    context: &Context,
) -> Result<(), Problem> {
    let path = format!("/v1/vms/{vm}/snapshot");
    let made: ClusterImage = client.post(&path, &Snapshot { image }).await?;
    if !made.note.is_empty() {
        output::note(&made.note);
    }
    output::one(context.format, &made, CLUSTER)
}

async fn resize(client: &Client, vm: &VmId, to: &Size, context: &Context) -> Result<(), Problem> {
    let ask = ResizeVm {
        cpus: to.cpus.map(|cpus| cpus.least),
        cpus_max: to.cpus.and_then(|cpus| cpus.most),
        memory_bytes: to.memory.map(|memory| memory.least),
        memory_max_bytes: to.memory.and_then(|memory| memory.most),
        disk_bytes: to.disk,
    };
    let resized: Vm = client.post(&format!("/v1/vms/{vm}/resize"), &ask).await?;
    if !resized.reason.is_empty() {
        output::note(&resized.reason);
    }
    output::one(context.format, &resized, SIZED)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(subcommand)]
        verb: Verb,
    }

    fn parsed(words: &str) -> Result<Verb, clap::Error> {
        let words = std::iter::once("vm").chain(words.split(' '));
        Command::try_parse_from(words).map(|command| command.verb)
    }

    /// What `vm set` sends: whether the VM moves, and its rules.
    fn said(words: &str) -> Result<(Option<bool>, Option<String>), clap::Error> {
        parsed(words).map(|verb| match verb {
            Verb::Set { to, .. } => {
                let SetVm { may_migrate, rules } = to.into();
                (may_migrate, rules.map(|rules| rules.to_string()))
            }
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn rules_are_said_whole_and_what_is_not_said_stays() {
        let rules = |words| said(words).expect("a command").1.expect("rules");
        assert_eq!(rules("set web --apart db"), "apart db");
        assert_eq!(rules("set web --apart db --together front"), "together front, apart db");
        assert_eq!(rules("set web --no-rules"), "-");
        assert_eq!(said("set web --move never").expect("a command"), (Some(false), None));
        let both = said("set web --move auto --apart db").expect("a command");
        assert_eq!(both, (Some(true), Some("apart db".to_owned())));
        assert!(said("set web").is_err() && said("set web --no-rules --apart db").is_err());
        assert!(said("set web --apart Bad~Name").is_err());
    }

    #[test]
    fn a_new_vm_has_the_rules_that_are_said() {
        let wanted = |words: &str| match parsed(words).expect("a command") {
            Verb::Create(ask) => persistent::wanted(*ask),
            other => panic!("{other:?}"),
        };
        let new = wanted("create web --image debian --apart db").expect("a VM");
        assert_eq!(new.rules.to_string(), "apart db");
        let same = wanted("create web --image debian --apart db --together db");
        assert!(same.expect_err("they contradict each other").why.contains("can't both name db"));
    }
}
