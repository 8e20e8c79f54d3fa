//! `perigee vm`

use clap::Subcommand;
use perigee_model::job::{Migration, MoveVm, Vm};
use perigee_model::{HostId, Problem, VmId};

use crate::Context;
use crate::commands::controller_client;
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
    /// Migrate a running virtual machine to another host
    Move {
        /// The VM's name
        vm: VmId,
        /// Where it goes
        host: HostId,
    },
    /// Show the end of the serial console
    Console {
        /// The VM's name
        vm: VmId,
    },
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

const MIGRATION: &[Column<Migration>] = &[
    ("migration", |m| m.id.to_string()),
    ("vm", |m| m.vm.to_string()),
    ("from", |m| m.from.to_string()),
    ("to", |m| m.to.to_string()),
    ("state", |m| output::word(&m.state)),
];

pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::List => {
            let vms: Vec<Vm> = client.get("/v1/vms").await?;
            output::list(context.format, &vms, COLUMNS)
        }
        Verb::Info { vm } => {
            let vm: Vm = client.get(&format!("/v1/vms/{vm}")).await?;
            output::one(context.format, &vm, COLUMNS)
        }
        Verb::Stop { vm } => {
            let _: serde_json::Value =
                client.post(&format!("/v1/vms/{vm}/stop"), &serde_json::json!({})).await?;
            Ok(())
        }
        Verb::Move { vm, host } => {
            let migration: Migration =
                client.post(&format!("/v1/vms/{vm}/move"), &MoveVm { host }).await?;
            output::one(context.format, &migration, MIGRATION)
        }
        Verb::Console { vm } => {
            let text = client.get_bytes(&format!("/v1/vms/{vm}/console")).await?;
            output::text(&String::from_utf8_lossy(&text));
            Ok(())
        }
    }
}
