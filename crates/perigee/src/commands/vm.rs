//! `perigee vm`

use clap::{Subcommand, ValueEnum};
use perigee_model::job::{Migration, MoveVm, Vm};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem, VmId};
use serde::Serialize;

use crate::Context;
use crate::commands::{controller_client, moving, moving_volumes};
use crate::output::{self, Column};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List virtual machines
    #[command(visible_alias = "ls")]
    List,
    /// Show one virtual machine
    Info {
        /// The VM's name, as `perigee vm list` shows it
        vm: VmId,
    },
    /// Stop a virtual machine at once
    Stop {
        /// The VM's name; its job fails
        vm: VmId,
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
    /// Show the end of the serial console
    Console {
        /// The VM's name
        vm: VmId,
    },
}

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
    ("host", |v| v.host.to_string()),
    ("status", |v| output::word(&v.status)),
    ("cpus", |v| v.cpus.to_string()),
    ("memory", |v| output::bytes(v.memory_bytes)),
    ("up", |v| format!("{} s", v.uptime_ms / 1000)),
    ("job", |v| output::or_dash(v.job.as_ref())),
    ("migration", |v| output::or_dash(v.migration.as_ref())),
    ("reason", |v| v.reason.clone()),
];

/// A VM with its migrations.
#[derive(Debug, Serialize)]
struct Info {
    #[serde(flatten)]
    vm: Vm,
    migrations: Vec<Migration>,
}

const INFO: &[Column<Info>] = &[
    ("vm", |i| i.vm.id.to_string()),
    ("host", |i| i.vm.host.to_string()),
    ("status", |i| output::word(&i.vm.status)),
    ("cpus", |i| i.vm.cpus.to_string()),
    ("memory", |i| output::bytes(i.vm.memory_bytes)),
    ("up", |i| format!("{} s", i.vm.uptime_ms / 1000)),
    ("job", |i| output::or_dash(i.vm.job.as_ref())),
    ("job's end", |i| output::or_dash(i.vm.predicted_end.as_ref())),
    ("reason", |i| i.vm.reason.clone()),
    ("volumes", |i| i.vm.volumes.iter().map(moving_volumes::of_vm).collect::<Vec<_>>().join("\n")),
    ("migrations", |i| i.migrations.iter().map(moving::summary).collect::<Vec<_>>().join("\n")),
    ("last migration", |i| {
        i.migrations.last().map_or_else(String::new, |m| moving::lines(m).join("\n"))
    }),
];

pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::List => {
            let vms: Vec<Vm> = client.get("/v1/vms").await?;
            output::list(context.format, &vms, COLUMNS)
        }
        Verb::Info { vm } => {
            let found: Vm = client.get(&format!("/v1/vms/{vm}")).await?;
            let moves: Vec<Migration> = client.get(&format!("/v1/vms/{vm}/migrations")).await?;
            output::one(context.format, &Info { vm: found, migrations: moves }, INFO)
        }
        Verb::Stop { vm } => {
            let _: serde_json::Value =
                client.post(&format!("/v1/vms/{vm}/stop"), &serde_json::json!({})).await?;
            Ok(())
        }
        Verb::Move { vm, host: Some(host), volumes, yes: confirmed, .. } => {
            let ask = MoveVm { host, volumes: volumes.into(), confirmed };
            moving::begin(&client, &vm, &ask, context.format).await
        }
        Verb::Move { vm, host: None, .. } => moving::cancel(&client, &vm, context.format).await,
        Verb::Console { vm } => {
            let text = client.get_bytes(&format!("/v1/vms/{vm}/console")).await?;
            output::text(&String::from_utf8_lossy(&text));
            Ok(())
        }
    }
}
