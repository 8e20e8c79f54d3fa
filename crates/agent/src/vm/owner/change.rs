//! Changes of a VM while it runs.
//!
//! **A disk that has grown.** QEMU's NBD client keeps the size that an export had when it was opened, so the disk's node is opened anew. Its
//! device is switched to a second node and back to one with the disk's own name. Whatever of this an agent has left that was ended meanwhile, the
//! same request goes on from there. Both sessions have the disk's epoch, and QEMU waits for requests in flight before it switches.
//!
//! **A disk that comes or goes.** It is behind a port of its own. The volume server serves what the VM has from then on; the sessions of its
//! other disks go on. A disk goes when the guest has let it go, which may be much later than it was asked.

use std::time::Duration;

use perigee_model::vm::{ChangeVm, Disk, VmStatus};
use perigee_model::{DiskRole, Problem, ProblemKind};
use serde::Deserialize;
use serde_json::{Value, json};

use tokio::time::{Instant, sleep};

use super::super::socket;
use super::Owner;
use crate::cgroup;
use crate::command::{block_device, block_node_as};
use crate::qmp::{Event, Qmp, QmpError, named_size};

/// How long QEMU may have a node after its device has gone.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);
const CLOSE_AGAIN: Duration = Duration::from_millis(20);
/// How long QEMU may take to flush and close a node before its session is ended. The guest stands still meanwhile.
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);

/// One of `query-hotpluggable-cpus`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Slot {
    r#type: String,
    props: Props,
    /// It has a vCPU.
    #[serde(default)]
    qom_path: Option<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Props {
    socket_id: u32,
    core_id: u32,
    thread_id: u32,
}

/// One of `query-block`.
#[derive(Debug, Deserialize)]
struct Drive {
    #[serde(default)]
    qdev: String,
    #[serde(default)]
    inserted: Option<Inserted>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Inserted {
    node_name: String,
    image: Image,
}

/// Closes a node that no device has, or does nothing.
///
/// QEMU 7.2 flushes it first, and the guest stands still meanwhile. A volume's home that is away may not answer that for a long time, so
/// then the node's session is ended under it. What the guest had written is at the volume server; what it had flushed is kept. The
/// caller has just seen that no device has the node: one that is in use would get errors from then on.
async fn close(qmp: &Qmp, node: &str) -> Result<(), QmpError> {
    let command = qmp.execute("blockdev-del", json!({"node-name": node}));
    let mut command = std::pin::pin!(command);
    let closed = match tokio::time::timeout(FLUSH_PATIENCE, &mut command).await {
        Ok(closed) => closed,
        Err(_) => {
            tracing::warn!(node, "QEMU can't flush a disk that goes: its session is ended");
            let of = json!({"instances": [{"type": "block-node", "node-name": node}]});
            match qmp.execute_oob("yank", of).await {
                // It has been closed just now.
                Ok(_) | Err(QmpError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
            command.await
        }
    };
    match closed {
        // There is no such node, or a device has it.
        Ok(_) | Err(QmpError::Refused { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// One of `query-named-block-nodes`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Node {
    node_name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Image {
    virtual_size: u64,
}

/// The device behind a disk's `virtio-blk-pci`, which has its drive.
fn device(role: DiskRole) -> String {
    format!("/machine/peripheral/disk-{role}/virtio-backend")
}

/// `None` if QEMU says that it has no such disk.
async fn drive(qmp: &Qmp, role: DiskRole) -> Result<Option<Inserted>, QmpError> {
    let all: Vec<Drive> = qmp.query("query-block").await?;
    let own = all.into_iter().find(|drive| drive.qdev == device(role));
    Ok(own.and_then(|drive| drive.inserted))
}

impl Owner {
    pub(super) async fn change(&mut self, ask: ChangeVm) -> Result<(), Problem> {
        let what = || format!("can't change the VM {}", self.vm.id());
        if self.is_migrating() || self.vm.status() != VmStatus::Running {
            let why = "it does not run here, or is being moved";
            return Err(Problem::conflict(what(), why));
        }
        let qmp = self.vm.observed(|seen| seen.qmp.clone());
        let qmp = qmp.ok_or_else(|| Problem::unavailable(what(), "its QEMU does not answer"))?;
        match ask {
            ChangeVm::GrowDisk { role, size_bytes } => self.grow(&qmp, role, size_bytes).await,
            ChangeVm::Cpus { count } => self.add_cpus(&qmp, count).await,
            ChangeVm::Plug(disk) => self.plug(&qmp, disk).await,
            ChangeVm::Unplug { role } => self.unplug(&qmp, role).await,
            ChangeVm::Memory { bytes } => {
                let asked = qmp.execute("balloon", json!({"value": bytes})).await;
                asked.map(drop).map_err(|error| Problem::unavailable(what(), error))
            }
        }
    }

    async fn grow(&self, qmp: &Qmp, role: DiskRole, size_bytes: u64) -> Result<(), Problem> {
        let what =
            || format!("can't show disk {role} of the VM {} with its new size", self.vm.id());
        let told = |error: QmpError| Problem::unavailable(what(), error);
        let odd = |why: String| Problem::unavailable(what(), why);
        let spec = self.vm.now();
        let disk = spec.disks.iter().find(|disk| disk.role == role && role.is_disk_of_guest());
        let disk = disk.ok_or_else(|| Problem::not_found(what(), "it has no such disk"))?;
        let before = drive(qmp, role).await.map_err(told)?;
        let before = before.ok_or_else(|| odd(format!("it has no disk {role}")))?;
        let (own, second) = (role.to_string(), format!("{role}-2"));
        // Nothing changes at the home: this tells the guest.
        let tell_guest = async |size_bytes: u64| {
            let resize = json!({"node-name": own, "size": size_bytes});
            qmp.execute("block_resize", resize).await.map(drop).map_err(told)
        };
        if before.node_name == own && before.image.virtual_size >= size_bytes {
            // An earlier try may have come to this point and not further.
            return tell_guest(before.image.virtual_size).await;
        }
        let socket = socket::open(&self.host, &self.vm).await?;
        let add = async |name: &str| {
            let node = block_node_as(name, disk, &socket.path);
            qmp.execute("blockdev-add", node).await.map(drop)
        };
        let switch = async |name: &str| {
            let to = json!({"path": device(role), "property": "drive", "value": name});
            qmp.execute("qom-set", to).await.map(drop)
        };
        if before.node_name == own {
            // One that an earlier try has left, or none.
            let _ = close(qmp, &second).await;
            add(&second).await.map_err(told)?;
            let size_there = named_size(qmp, &second).await.map_err(told)?;
            if size_there < size_bytes {
                let _ = close(qmp, &second).await;
                let why = format!("its host's volume server says that it has {size_there} bytes");
                return Err(odd(why));
            }
            switch(&second).await.map_err(told)?;
        }
        let _ = close(qmp, &own).await;
        add(&own).await.map_err(told)?;
        switch(&own).await.map_err(told)?;
        let _ = close(qmp, &second).await;
        tell_guest(named_size(qmp, &own).await.map_err(told)?).await
    }

    async fn plug(&mut self, qmp: &Qmp, disk: Disk) -> Result<(), Problem> {
        let what = || format!("can't give the VM {} the disk {}", self.vm.id(), disk.role);
        let now = self.vm.now();
        if now.machine.port_of(disk.role).is_none() {
            let why = format!("it was started with {} ports for such disks", now.machine.ports);
            return Err(Problem::unsupported(what(), why).next("stop the VM first"));
        }
        let has = now.disks.iter().find(|other| other.role == disk.role);
        if has.is_some_and(|has| *has != disk) {
            return Err(Problem::conflict(what(), "it has another one there"));
        }
        let is_there = async || {
            let found = drive(qmp, disk.role).await.map(|found| found.is_some());
            found.map_err(|error| Problem::unavailable(what(), error))
        };
        if has.is_some() && is_there().await? {
            return Ok(());
        }
        self.vm.note_change(|since| since.has_come(disk.clone()))?;
        let plugged = async {
            let socket = socket::open(&self.host, &self.vm).await?;
            let node = disk.role.to_string();
            // One that an earlier try has left, or none.
            let _ = close(qmp, &node).await;
            let told = |error: QmpError| Problem::unavailable(what(), error);
            let add = block_node_as(&node, &disk, &socket.path);
            qmp.execute("blockdev-add", add).await.map_err(told)?;
            let mut device = block_device(&now, &disk, now.disks.len());
            if let Some(device) = device.as_object_mut() {
                // It is for the firmware, which has booted.
                device.remove("bootindex");
            }
            qmp.execute("device_add", device).await.map(drop).map_err(told)
        };
        let Err(problem) = plugged.await else { return Ok(()) };
        // QEMU may have done it after all, and only have answered late.
        if is_there().await? {
            return Ok(());
        }
        if self.forget_disk(qmp, disk.role).await.is_err() {
            self.leaving.insert(disk.role);
        }
        Err(problem)
    }

    async fn unplug(&self, qmp: &Qmp, role: DiskRole) -> Result<(), Problem> {
        let what = || format!("can't take the disk {role} from the VM {}", self.vm.id());
        let now = self.vm.now();
        if !now.disks.iter().any(|disk| disk.role == role) {
            // The volume server may have been away when it went.
            return socket::open(&self.host, &self.vm).await.map(drop);
        }
        if now.machine.port_of(role).is_none() {
            let why = "it was there when the VM started, and is behind no port of its own";
            return Err(Problem::unsupported(what(), why).next("stop the VM first"));
        }
        let there = drive(qmp, role).await.map_err(|error| Problem::unavailable(what(), error))?;
        if there.is_none() {
            return self.forget_disk(qmp, role).await;
        }
        // QEMU refuses this while the guest is asked already.
        let _ = qmp.execute("device_del", json!({"id": format!("disk-{role}")})).await;
        let why = "its guest has not let it go";
        Err(Problem::conflict(what(), why).next("unmount it in the guest, and try again"))
    }

    /// The guest may let a disk go when nobody waits for that any more.
    pub(super) async fn on_device_gone(&mut self, event: &Event) {
        let device = event.data.get("device").and_then(Value::as_str).unwrap_or_default();
        let role = device.strip_prefix("disk-").and_then(|role| role.parse::<DiskRole>().ok());
        let qmp = self.vm.observed(|seen| seen.qmp.clone());
        if let (Some(role), Some(qmp)) = (role, qmp)
            && let Err(problem) = self.forget_disk(&qmp, role).await
        {
            tracing::warn!(vm = %self.vm.id(), %problem, "a disk that has gone is not forgotten yet");
            self.leaving.insert(role);
        }
    }

    /// Tries again to forget what has gone. One that has come again stays.
    pub(super) async fn forget_leaving(&mut self, qmp: &Qmp) {
        for role in self.leaving.clone() {
            // If QEMU does not answer, each further question may take as long, and a request to delete the VM waits meanwhile.
            let is_over = match drive(qmp, role).await {
                Ok(Some(_)) => true,
                Ok(None) => match self.forget_disk_within(qmp, role, Duration::ZERO).await {
                    Ok(()) => true,
                    Err(problem) if problem.kind == ProblemKind::Unavailable => return,
                    Err(_) => false,
                },
                Err(_) => return,
            };
            if is_over {
                self.leaving.remove(&role);
            }
        }
    }

    /// A disk without a device: its session ends, and the volume server serves it no more.
    ///
    /// QEMU has a device for a moment longer than its guest. The node is closed before its session ends: QEMU 7.2 flushes what it closes,
    /// and stands still with its guest until there is a session.
    pub(super) async fn forget_disk(&self, qmp: &Qmp, role: DiskRole) -> Result<(), Problem> {
        self.forget_disk_within(qmp, role, CLOSE_PATIENCE).await
    }

    async fn forget_disk_within(
        &self,
        qmp: &Qmp,
        role: DiskRole,
        patience: Duration,
    ) -> Result<(), Problem> {
        let what = || format!("can't take the disk {role} from the VM {}", self.vm.id());
        let told = |error: QmpError| Problem::unavailable(what(), error);
        let names = [role.to_string(), format!("{role}-2")];
        // Without the volume server a node's session can't even be ended: QEMU waits for a new one.
        socket::open(&self.host, &self.vm).await?;
        let begun = Instant::now();
        loop {
            // One that has come again, or that QEMU did not answer for in time, is not closed.
            if drive(qmp, role).await.map_err(told)?.is_some() {
                return Err(Problem::unavailable(what(), "its guest has it"));
            }
            for node in &names {
                close(qmp, node).await.map_err(told)?;
            }
            let nodes: Vec<Node> = qmp.query("query-named-block-nodes").await.map_err(told)?;
            if nodes.iter().all(|node| !names.contains(&node.node_name)) {
                break;
            }
            if begun.elapsed() >= patience {
                return Err(Problem::conflict(what(), "QEMU has not closed it yet"));
            }
            sleep(CLOSE_AGAIN).await;
        }
        self.vm.note_change(|since| since.has_gone(&self.vm.spec, role))?;
        socket::open(&self.host, &self.vm).await.map(drop)
    }

    async fn add_cpus(&self, qmp: &Qmp, count: u32) -> Result<(), Problem> {
        let what = || format!("can't give the VM {} more vCPUs", self.vm.id());
        let told = |error: QmpError| Problem::unavailable(what(), error);
        let mut slots: Vec<Slot> = qmp.query("query-hotpluggable-cpus").await.map_err(told)?;
        let has = slots.iter().filter(|slot| slot.qom_path.is_some()).count();
        let wanted = usize::try_from(count).unwrap_or(usize::MAX);
        if wanted > slots.len() {
            let why = format!("it was started for at most {} of them", slots.len());
            return Err(Problem::unsupported(what(), why).next("stop it first"));
        }
        if wanted < has {
            let why = format!("it has {has}, and a guest that runs keeps its vCPUs");
            return Err(Problem::unsupported(what(), why).next("stop it first"));
        }
        slots.retain(|slot| slot.qom_path.is_none());
        // A migration's destination gives its vCPUs the lowest numbers.
        slots.sort_by_key(|slot| slot.props.socket_id);
        let process = self.vm.observed(|seen| seen.process);
        if let Some(process) = process.filter(|_| self.host.has_cgroups)
            && let Err(error) = cgroup::allow_cpus(&process, count)
        {
            tracing::warn!(vm = %self.vm.id(), %error, "its vCPUs share the time of fewer");
        }
        let mut added = Ok(());
        for slot in slots.iter().take(wanted - has) {
            let Props { socket_id, core_id, thread_id } = slot.props;
            let add = json!({
                "driver": slot.r#type, "id": format!("cpu-{socket_id}"),
                "socket-id": socket_id, "core-id": core_id, "thread-id": thread_id,
            });
            added = qmp.execute("device_add", add).await.map(drop);
            if added.is_err() {
                break;
            }
        }
        // A migration's destination gets as many as there are, also if not all have come.
        let there: Vec<Slot> = qmp.query("query-hotpluggable-cpus").await.map_err(told)?;
        let there = there.iter().filter(|slot| slot.qom_path.is_some()).count();
        self.vm.note_change(|since| since.cpus = u32::try_from(there).ok())?;
        added.map_err(told)
    }
}
