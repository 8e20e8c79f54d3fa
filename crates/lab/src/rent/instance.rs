//! How an instance begins and ends.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Stdio;

use perigee_model::Problem;
use perigee_model::rental::{InstanceState, NewInstance};

use super::records::{Record, Records, make_passable};
use super::snapshots;
use crate::command::{cannot_start, run};
use crate::definition::Definition;
use crate::process::{Process, own_cpus};
use crate::state::{LabFile, open_log};
use crate::{down, net, wan};

/// The programs that power an instance off. Without these, what runs in it would power this machine off.
const POWER: [&str; 5] = ["systemctl", "poweroff", "shutdown", "halt", "reboot"];

/// There is no systemd in an instance. The agent asks whether the machine goes down.
const SYSTEMCTL: &str = r#"#!/bin/sh
case "${0##*/} $*" in
  systemctl\ *is-system-running*) echo running ;;
  systemctl\ *poweroff* | systemctl\ *halt* | systemctl\ *reboot*) : > "$PERIGEE_INSTANCE/power-off" ;;
  systemctl\ *) echo "an instance of a lab has no systemd: $*" >&2; exit 1 ;;
  *) : > "$PERIGEE_INSTANCE/power-off" ;;
esac
"#;

/// Makes an instance whose record is written, and starts its machine. What an earlier try has left is removed before.
///
/// # Errors
/// The step that failed. The instance is then removed again, as far as that works.
pub async fn begin(
    file: &LabFile,
    records: &Records,
    record: Record,
    new: &NewInstance,
) -> Result<Record, Problem> {
    remove(&file.definition, records, &record).await?;
    match make(file, records, record.clone(), new).await {
        Ok(made) => Ok(made),
        Err(problem) => {
            end(&file.definition, records, record).await?;
            Err(problem)
        }
    }
}

async fn make(
    file: &LabFile,
    records: &Records,
    mut record: Record,
    new: &NewInstance,
) -> Result<Record, Problem> {
    let definition = &file.definition;
    let root = records.root(&record.id);
    make_passable(&root)?;
    write(&root.join("user-data"), &new.user_data, 0o700)?;
    write(&root.join("boot-id"), &format!("{}\n", uuid::Uuid::new_v4()), 0o600)?;
    make_bin(&root, &file.program)?;
    if let Some(pool) = &new.pool {
        snapshots::make_disk(records, &root, pool.snapshot.as_deref()).await?;
    }
    let namespace = definition.rented_namespace(&record.id);
    connect(definition, records, &record, &namespace).await?;
    record.machine = Some(start(file, records, &record, &namespace)?);
    records.put(&record)?;
    Ok(record)
}

fn make_bin(root: &Path, program: &Path) -> Result<(), Problem> {
    let bin = root.join("bin");
    make_passable(&bin)?;
    POWER.iter().try_for_each(|name| write(&bin.join(name), SYSTEMCTL, 0o700))?;
    let link = bin.join("perigee");
    std::os::unix::fs::symlink(program, &link)
        .map_err(|e| Problem::internal(format!("can't make {}", link.display()), e))
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), Problem> {
    let file = std::fs::File::options().write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|e| Problem::internal(format!("can't write {}", path.display()), e))
}

/// A namespace at the bridge of the site, as each host of the lab has one.
async fn connect(
    definition: &Definition,
    records: &Records,
    record: &Record,
    namespace: &str,
) -> Result<(), Problem> {
    let site = super::zone(definition, &record.zone).ok_or_else(|| {
        Problem::not_found(format!("can't connect instance {}", record.id), "its site is not known")
    })?;
    let address = definition.rented_addresses().find(|(number, _)| *number == record.number);
    let (number, address) = address.ok_or_else(|| {
        Problem::internal(format!("can't connect instance {}", record.id), "it has no address")
    })?;
    let bridge = definition.site_namespace(&site);
    net::attach(&bridge, &format!("rent{number}"), namespace, address).await?;
    wan::prepare_host(records.lab(), namespace).await?;
    let metadata = format!("{}/32", super::metadata::ADDRESS);
    run("ip", &["-n", namespace, "addr", "add", &metadata, "dev", "lo"]).await.map(drop)
}

fn start(
    file: &LabFile,
    records: &Records,
    record: &Record,
    namespace: &str,
) -> Result<Process, Problem> {
    let root = records.root(&record.id);
    let definition = &file.definition;
    let cpus = cpus(definition, record);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path =
        std::env::join_paths([root.join("bin")].into_iter().chain(std::env::split_paths(&path)))
            .map_err(|e| Problem::invalid("can't put programs into the PATH of an instance", e))?;
    let mut command = net::in_namespace(namespace, Path::new("taskset"));
    command.args(["--cpu-list", &cpus]).arg(&file.program);
    // `remains` finds it by these words.
    command.args(["lab", "instance", &definition.id.to_string(), &record.id, "--base"]);
    // Whoever runs the provider's program may end all that is in its group.
    command.process_group(0);
    command
        .arg(records.base())
        .current_dir(&root)
        .env("PATH", path)
        .env("PERIGEE_INSTANCE", &root)
        .env("PERIGEE_VM_UIDS", definition.rented_vm_uids(record.number))
        .env_remove("PERIGEE_API")
        .stdin(Stdio::null())
        .stdout(open_log(&root.join("console.log"))?)
        .stderr(open_log(&root.join("console.log"))?);
    if let Some(kernel) = &definition.probe_kernel {
        command.env("PERIGEE_PROBE_KERNEL", kernel);
    }
    let child = command.spawn().map_err(|e| cannot_start("nsenter", &e))?;
    let process = child.id().and_then(|pid| Process::of(i32::try_from(pid).ok()?));
    process.ok_or_else(|| Problem::internal("can't start an instance", "its machine ended at once"))
}

/// So many CPUs as its kind has, others for each instance.
fn cpus(definition: &Definition, record: &Record) -> String {
    let own = own_cpus();
    let count = definition.rent.kind(&record.kind).map_or(1, |kind| kind.cpus);
    let count = usize::try_from(count).unwrap_or(1);
    let chosen = own.iter().cycle().skip(usize::from(record.number) * count % own.len().max(1));
    let mut cpus: Vec<String> =
        chosen.take(count.min(own.len())).map(ToString::to_string).collect();
    cpus.sort();
    cpus.join(",")
}

/// Kills what runs in an instance, but for the process that does so, and removes the namespace and all files.
///
/// # Errors
/// What could not be removed. The record then says that the instance is ending, and this can be repeated.
pub async fn end(
    definition: &Definition,
    records: &Records,
    mut record: Record,
) -> Result<(), Problem> {
    record.state = InstanceState::Ending;
    records.put(&record)?;
    remove(definition, records, &record).await?;
    record.state = InstanceState::Gone;
    records.put(&record)
}

async fn remove(
    definition: &Definition,
    records: &Records,
    record: &Record,
) -> Result<(), Problem> {
    let root = records.root(&record.id);
    let namespace = definition.rented_namespace(&record.id);
    down::remove_host(&namespace, &root).await
}
