//! What the agent speaks: the host, its VMs and their migrations.
//!
//! HTTP/JSON on TCP, every path below `/v1`:
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /host` | | [`HostReport`] |
//! | `GET /vms`, `GET /vms/{vm}` | | [`VmReport`] |
//! | `GET /vms/{vm}?after=N&wait_ms=MS` | | [`VmReport`], as soon as it has a [`VmReport::revision`] above N or the VM is gone, at the latest after that time |
//! | `GET /changes?after=N&wait_ms=MS` | | [`VmChanges`], as soon as there are any, at the latest after that time |
//! | `PUT /vms/{vm}` | [`VmSpec`] | [`VmReport`]; the same spec again changes nothing; a start that was ended before, or that is older than the one here, is a conflict |
//! | `DELETE /vms/{vm}?submitted_ms=MS&run=N&migration=N` | | stops QEMU at once and forgets the VM, if its start is this [`VmStart`] or an earlier one; no such start begins here again; deleting what is not there succeeds; a later start goes on, and the answer is a conflict |
//! | `POST /vms/{vm}/end-unless-ran` | [`EndUnlessRan`] | [`Fate`]: how a source learns what became of a migration that broke |
//! | `POST /vms/{vm}/expect-frames` | [`ExpectFrames`] | frames for the VM wait at its card here, for [`VmSpec::arrives_from`] only |
//! | `POST /vms/{vm}/migration-key` | [`AskMigrationKey`] | [`MigrationKey`], for [`VmSpec::arrives_from`] only |
//! | `GET /vms/{vm}/events?after=SEQ` | | [`crate::guest::GuestEvent`] list; what comes up to `SEQ` may be forgotten |
//! | `GET /vms/{vm}/console` | | text: the end of the serial console |
//! | `GET /vms/{vm}/console/attach` | | 101: bytes of both directions, for one client at a time |
//! | `GET /vms/{vm}/vnc` | | 101: bytes of both directions, between the VM's screen and a VNC viewer |
//! | `POST /vms/{vm}/guest-agent` | [`AskGuestAgent`] | what qemu-guest-agent in the guest answers |
//! | `POST /vms/{vm}/change` | [`ChangeVm`] | [`VmChanged`]; the same again changes nothing |
//! | `POST /vms/{vm}/power-button` | | tells the guest by ACPI to power off, which it may not heed |
//! | `POST /vms/{vm}/begin-command` | | 202; the guest of a gang's member starts its command; forgotten in the same way |
//! | `POST /vms/{vm}/end-command` | | 202; the guest ends its command and collects the outputs; the agent forgets this when it is started again, or the VM moves |
//! | `POST /vms/{vm}/sync` | | when the guest has written everything to its disks |
//! | `POST /vms/{vm}/migrate` | [`MigrateOut`] | 202; watch [`VmReport::migration`] |
//! | `POST /vms/{vm}/migrate/cancel` | [`CancelMigration`] | 202; one that has not begun never will |
//! | `PUT /networks` | [`crate::network::HostNetworks`] | when the host is as it says, as far as it could be done |
//! | `POST /probe` | [`ProbeLink`] | [`LinkProbe`] |
//! | `GET /blob?length_bytes=N` | | N bytes, for a peer's probe |

mod firmware;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::grant::SignedGrant;
use crate::lease::{HostLease, HostNotice};
use crate::load::{HostPressure, VmLoad};
use crate::network::{BridgeCard, BridgeName, Card, TunnelEnd};
use crate::phases::Phases;
#[cfg(doc)]
use crate::switchover::Fate;
use crate::upgrade::DaemonVersion;
use crate::volume::{EpochChange, IoStats, VolumeEpochChange};
use crate::waiting::Waiting;
use crate::{
    BadName, DiskRole, Epoch, HostId, MigrationId, NetworkName, SiteId, VmId, VmStart, VolumeName,
};

pub use self::firmware::Firmware;

/// A question to the program qemu-guest-agent in a guest, as its protocol has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskGuestAgent {
    /// One of the commands that an agent passes on.
    pub execute: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: serde_json::Value,
}

/// How QEMU runs a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// The host's processor runs them.
    Kvm,
    /// QEMU translates them: much slower, and possible on every host.
    Tcg,
}

/// As many addresses of a host's interfaces are known.
pub const HOST_ADDRESSES_MAX: usize = 64;

/// As many gateways that do not start are said; the others when these are elsewhere.
pub const FAILING_GATEWAYS_MAX: usize = 256;

/// What a host's agent says of its host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostReport {
    /// The name that the agent was started with.
    pub host: HostId,
    /// The site that the agent was started with.
    pub site: SiteId,
    /// CPUs that the agent may use: those of its cgroup and affinity.
    pub cpus: u32,
    /// The machine's memory (`MemTotal` in /proc/meminfo).
    pub memory_bytes: u64,
    /// What can be used without swapping (`MemAvailable`, proc(5)); `None` if the kernel does not tell.
    pub memory_available_bytes: Option<u64>,
    /// Tasks that run or wait for a CPU or disk, mean of a minute (proc(5), loadavg); `None` if the kernel does not tell.
    pub load_1min: Option<f64>,
    /// How many of these CPUs all programs of the machine use, a mean over the last minute; `None` if that is not known.
    pub cpus_used_1m: Option<f64>,
    /// What its tasks wait for.
    pub pressure: HostPressure,
    /// What VMs run with here; found out by booting one.
    pub accelerator: Accelerator,
    /// As the processor names itself; empty when it does not.
    pub cpu_model: String,
    /// As QEMU gives it, for example `7.2.22`.
    pub qemu_version: String,
    /// Another one after each boot of the host's kernel; empty when it is not known.
    pub boot_id: String,
    /// Plain words on what this host cannot do, for example "no cgroup v2 controllers: …".
    pub warnings: Vec<String>,
    /// Why VMs can't start here in networks of tenants now; `None` if they can.
    pub no_networks: Option<String>,
    /// The numbers of the networks whose gateways are to be here and do not start, at most [`FAILING_GATEWAYS_MAX`].
    pub failing_gateways: Vec<u16>,
    /// Why VMs here can't have a user network; `None` if they can.
    pub no_user_networks: Option<String>,
    /// Why VMs here can't have a TPM; `None` if they can.
    pub no_tpm: Option<String>,
    /// The bridges in which its operator allows VMs.
    #[schema(value_type = Vec<String>)]
    pub bridges: Vec<BridgeName>,
    /// The addresses of its interfaces, at most [`HOST_ADDRESSES_MAX`]. VMs in networks of tenants don't reach them.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<std::net::Ipv4Addr>,
    /// That the host ends itself without its controller; `None` if it does not.
    #[serde(default)]
    pub lease: Option<HostLease>,
    /// That its provider takes it back; `None` if the agent has heard no such thing. That it can't hear is a warning.
    #[serde(default)]
    pub notice: Option<HostNotice>,
    /// The agent has the tunnel through which moves of VMs go encrypted. Older agents don't say it.
    #[serde(default)]
    pub tunnels_moves: bool,
    /// The version of the agent; `None` if the agent is older than this field.
    #[serde(default)]
    pub version: Option<DaemonVersion>,
}

/// How a host makes itself known to the controller (`PUT /v1/hosts/{host}` there).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostAddresses {
    /// The host's site; a host is at one.
    pub site: SiteId,
    /// `https://IP:PORT`, or `http://IP:PORT` in a cluster without TLS
    pub agent_url: String,
    /// The same of the volume server's control API.
    pub volume_url: String,
    /// `IP:PORT` of the volume server's NBD listener.
    pub nbd_addr: String,
    /// Its end of the tunnels between hosts; `None` if it can't have tenants' networks.
    pub tunnel: Option<TunnelEnd>,
}

/// What an agent says of a QEMU that has ended and left no message, as one that was killed.
pub const ENDED_SILENTLY: &str = "QEMU has ended without a message";

/// One disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// What it is for: its serial number in the guest, its node's name in QEMU. A VM has each once.
    #[serde(rename = "serial")]
    #[schema(value_type = String)]
    pub role: DiskRole,
    /// The volume on it.
    pub volume: VolumeName,
    /// The session's epoch; the disk's export name is `VOLUME@EPOCH`.
    pub epoch: Epoch,
    /// The guest can't write it, whatever the epoch allows.
    pub read_only: bool,
}

/// What a VM's network card is to be connected to: `default`, `none`, `user`, the name of a network, or `bridge:` and
/// the name of a bridge.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum NetworkKind {
    /// Nothing is said: as `User`, where its host can and the VM has no data that may not leave its site. Else it has no card.
    #[default]
    Default,
    /// The VM has no card.
    None,
    /// A network of its own, behind its host: it reaches public addresses and those that its host's operator allows, by IPv4, and
    /// nobody reaches it. Its connections end when it moves to another host.
    User,
    /// A network of its tenant. It keeps its address and its connections when it moves to another host.
    Cluster(NetworkName),
    /// A bridge that the operator of each of its hosts has made and allowed: `bridge:br0`.
    Bridge(BridgeName),
}

/// Before the name of a bridge.
const BRIDGE: &str = "bridge:";

impl NetworkKind {
    /// The words that are no names of networks.
    pub const WORDS: [&str; 3] = ["default", "none", "user"];

    /// The network, if it is one of a tenant.
    pub fn name(&self) -> Option<&NetworkName> {
        match self {
            Self::Cluster(name) => Some(name),
            Self::Default | Self::None | Self::User | Self::Bridge(_) => None,
        }
    }
}

impl std::str::FromStr for NetworkKind {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        match text {
            "default" => Ok(Self::Default),
            "none" => Ok(Self::None),
            "user" => Ok(Self::User),
            name => match name.strip_prefix(BRIDGE).and_then(|name| name.parse().ok()) {
                Some(bridge) => Ok(Self::Bridge(bridge)),
                None => NetworkName::new(name).map(Self::Cluster),
            },
        }
    }
}

impl TryFrom<String> for NetworkKind {
    type Error = BadName;

    fn try_from(text: String) -> Result<Self, BadName> {
        text.parse()
    }
}

impl From<NetworkKind> for String {
    fn from(kind: NetworkKind) -> String {
        match kind {
            NetworkKind::Default => "default".to_owned(),
            NetworkKind::None => "none".to_owned(),
            NetworkKind::User => "user".to_owned(),
            NetworkKind::Cluster(name) => name.to_string(),
            NetworkKind::Bridge(bridge) => format!("{BRIDGE}{bridge}"),
        }
    }
}

/// What a VM's network card is connected to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmNetwork {
    /// The VM has no card.
    #[default]
    None,
    /// As [`NetworkKind::User`].
    User,
    /// A network of its tenant.
    Cluster(Card),
    /// As [`NetworkKind::Bridge`].
    Bridge(BridgeCard),
}

impl VmNetwork {
    /// The card, if it is in a network of a tenant.
    pub fn card(&self) -> Option<&Card> {
        match self {
            Self::Cluster(card) => Some(card),
            Self::None | Self::User | Self::Bridge(_) => None,
        }
    }
}

/// What QEMU is started with. Of what a host's agent says, it is what QEMU has now ([`ChangeVm`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSpec {
    /// Unique in the cluster.
    pub vm: VmId,
    /// Which of the VM's starts this is.
    pub start: VmStart,
    /// vCPUs, as many as [`crate::limits::CPUS`] allows.
    pub cpus: u32,
    /// Memory, as much as [`crate::limits::MEMORY_BYTES`] allows. Under TCG the guest gets 8 KiB
    /// less. The most that it may have, where it has a range.
    pub memory_bytes: u64,
    /// The first one boots.
    pub disks: Vec<Disk>,
    /// The VM does not boot: it waits for this migration to come in.
    pub arrives_by: Option<MigrationId>,
    /// The host from which that migration comes: only it gets the key with which the memory is encrypted.
    pub arrives_from: Option<HostId>,
    /// That migration sends the memory compressed ([`MigrateOut::compressed`]).
    pub arrives_compressed: bool,
    /// Both hosts of that migration have said that they have the tunnel ([`HostReport::tunnels_moves`]).
    #[serde(default)]
    pub arrives_tunnelled: bool,
    /// QEMU's memory is never written to a disk of its host, because it has data that may not leave another site.
    pub locks_memory: bool,
    /// What its job prints is kept nowhere: it may not leave a site, and the agent or the controller is not there.
    pub hides_output: bool,
    /// Both sides of a migration have the same card.
    pub network: VmNetwork,
    /// Both sides of a migration build the same machine.
    pub machine: Machine,
}

/// How a VM's machine differs from that of a job's VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    /// The VM lives without a job: its guest may reboot, and its CPU is as `hardware` says.
    pub persistent: bool,
    /// What boots its root disk. With UEFI it has a disk [`DiskRole::Nvram`].
    pub firmware: Firmware,
    /// What was asked for.
    pub hardware: Hardware,
    /// While others want the host's CPUs too, its vCPUs together get the part of so many; `None`: that of all.
    pub cpus_least: Option<u32>,
    /// The guest gives back at first what it has above this, and gets it again while its host has it ([`crate::amounts`]); `None`: it keeps
    /// all of its memory.
    pub memory_least_bytes: Option<u64>,
    /// As many vCPUs the VM can get while it runs; 0: as many as it has.
    pub cpus_max: u32,
    /// So many of its volumes, `data0` and so on, can come and go while it runs.
    pub ports: u8,
    /// The guest does not give its free memory back to the host, because the VM's memory may have to be locked at another host. The guest
    /// sees this, so it is so at all hosts. Older agents don't say it.
    #[serde(default)]
    pub keeps_free_memory: bool,
}

/// A change of a VM while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeVm {
    /// A disk has grown at its home: the guest is to see that.
    GrowDisk {
        /// Which.
        role: DiskRole,
        /// At least so large it is now.
        size_bytes: u64,
    },
    /// It gets vCPUs until it has so many.
    Cpus {
        /// At most [`Machine::cpus_max`].
        count: u32,
    },
    /// It gets another volume. The VM's host has it attached.
    Plug(Disk),
    /// It gives a volume up. Its guest has to let it go.
    Unplug {
        /// Which.
        role: DiskRole,
    },
    /// Its guest is asked to give memory back, or to take it again, until it has this much.
    Memory {
        /// At most what the VM was started with.
        bytes: u64,
    },
}

/// What a [`ChangeVm`] came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmChanged {
    /// The memory that the guest has, if it was asked to give some back; a guest without a driver for that keeps all.
    pub memory_bytes: Option<u64>,
}

impl VmSpec {
    /// The disk with the state of its TPM, if it has one.
    pub fn tpm(&self) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.role == DiskRole::Tpm)
    }
}

impl Machine {
    /// As many as one slot of a PCI Express bus has functions.
    pub const PORTS: u8 = 8;

    /// The port behind which a disk of such a machine is.
    pub fn port_of(&self, role: DiskRole) -> Option<u8> {
        match role {
            DiskRole::Data(number) if number < self.ports => Some(number),
            _ => None,
        }
    }

    /// How many vCPUs a VM that starts with so many can get while it runs.
    pub fn cpus_max_of(cpus: u32) -> u32 {
        const LEAST: u32 = 8;
        let most = u32::try_from(crate::limits::CPUS.max).unwrap_or(u32::MAX);
        cpus.saturating_mul(4).max(LEAST).min(most)
    }
}

/// What a person may ask for of a VM's machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hardware {
    /// It has a screen, a keyboard and a pointer, which are reached by VNC.
    #[serde(default)]
    pub vnc: bool,
    /// It has a TPM 2.0, whose state is on a disk [`DiskRole::Tpm`].
    #[serde(default)]
    pub tpm: bool,
    /// What its CPU is like.
    #[serde(default)]
    #[schema(value_type = String)]
    pub cpu: Cpu,
}

/// Which CPU a guest sees: `common`, `host`, or a model of QEMU's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Cpu {
    /// What x86-64-v2 asks for, and AES: such a VM moves between all hosts with processors of one maker.
    #[default]
    Common,
    /// All that its host has: such a VM moves only between hosts with the same processor.
    Host,
    /// A model by its name in QEMU, for example `EPYC-Milan` or `Skylake-Server-v4`. Only hosts that have all of it run the VM.
    Model(CpuModel),
}

/// The name of one of QEMU's models of CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuModel(String);

/// It is no name of a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no CPU: `common`, `host`, or a model of QEMU's as `qemu-system-x86_64 -cpu help` names them"
)]
pub struct BadCpu(String);

impl Cpu {
    /// Words that mean something else to QEMU than one model that is the same at each host.
    const NO_MODELS: [&str; 3] = ["base", "help", "max"];

    /// Whether the guest sees all that its host's processor has.
    pub fn is_as_the_host(&self) -> bool {
        *self == Self::Host
    }
}

impl std::fmt::Display for CpuModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for Cpu {
    type Err = BadCpu;

    fn from_str(text: &str) -> Result<Self, BadCpu> {
        let bad = || BadCpu(text.chars().take(80).collect());
        let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        let is_word = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        match text {
            "common" => Ok(Self::Common),
            "host" => Ok(Self::Host),
            _ if !begins || !is_word || text.len() > 63 || Self::NO_MODELS.contains(&text) => {
                Err(bad())
            }
            name => Ok(Self::Model(CpuModel(name.to_owned()))),
        }
    }
}

impl TryFrom<String> for Cpu {
    type Error = BadCpu;

    fn try_from(text: String) -> Result<Self, BadCpu> {
        text.parse()
    }
}

impl From<Cpu> for String {
    fn from(cpu: Cpu) -> String {
        match cpu {
            Cpu::Common => "common".to_owned(),
            Cpu::Host => "host".to_owned(),
            Cpu::Model(model) => model.0,
        }
    }
}

/// What QEMU says of the VM; `Gone` when its process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmStatus {
    /// Its QEMU is being started and has not answered yet.
    Starting,
    /// Waiting for a migration to come in.
    Incoming,
    /// The guest runs.
    Running,
    /// The guest stands still and can go on: it has arrived, or is in the pause of a migration.
    Paused,
    /// Stopped by QEMU because a disk answered with an error; it goes on when the disk does.
    IoError,
    /// Its state went to another host; this QEMU must not run it again.
    Migrated,
    /// The guest powered off, rebooted or panicked; QEMU is there still, to be looked at.
    Shutdown,
    /// Its QEMU has ended.
    Gone,
}

/// A VM as its host's agent sees it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmReport {
    /// As it was asked for, with the epochs that its disks were opened with.
    pub spec: VmSpec,
    /// What QEMU says; see [`crate::states`].
    pub status: VmStatus,
    /// Why the status is what it is, where that needs words.
    pub reason: String,
    /// What it waits for: its guest, or a part of it, stands still.
    pub waits: Vec<Waiting>,
    /// The host's, as in [`HostReport::boot_id`].
    pub boot_id: String,
    /// 0 when there is no process.
    pub qemu_pid: u32,
    /// Since this QEMU started.
    pub uptime_ms: u64,
    /// CPU time of all vCPU threads since this QEMU started.
    pub vcpu_ms: u64,
    /// What its vCPUs had of the host's CPUs.
    pub load: VmLoad,
    /// Where an incoming migration can connect, `tcp:IP:PORT`, once it listens.
    pub incoming_uri: Option<String>,
    /// The current or last outgoing migration.
    pub migration: Option<MigrationReport>,
    /// Of a VM that came by migration: from the arrival of its state until it ran here.
    pub resume_us: Option<u64>,
    /// The highest guest message stored here, 0 for none.
    pub last_seq: u64,
    /// The number of its last change, for the next question's `after`; what only grows, like bytes
    /// and times, is no change.
    pub revision: u64,
    /// Figures of this host's volume server for the VM's disks, in the order of the spec.
    pub io: Vec<IoStats>,
    /// Of a VM of a job with several ones: what it has sent to the others since its card was made at this host.
    pub sent: Vec<SentTo>,
}

/// What one VM has sent to another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SentTo {
    /// The other one.
    pub to: VmId,
    /// Of IPv4 packets, with their headers.
    pub bytes: u64,
}

/// What changed on a host. A first question has `after` 0 and is answered at once with everything.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmChanges {
    /// The next question's `after`. Numbers of an agent that was started again are higher.
    pub revision: u64,
    /// All VMs there are.
    pub present: Vec<VmId>,
    /// Those with a new state, a new message of their guest or a new phase of their migration.
    pub changed: Vec<VmReport>,
}

/// Moves one volume's writer epoch in the pause of a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EpochRaise {
    /// The volume whose epoch is raised.
    pub volume: VolumeName,
    /// Control API of the volume server at the volume's home.
    pub volume_url: String,
    /// The source's epoch, to which a migration that fails goes back.
    pub from: Epoch,
    /// The destination's, issued at the home for this migration.
    pub to: Epoch,
}

impl EpochRaise {
    /// What is asked of the volume's home.
    pub fn change(&self) -> VolumeEpochChange {
        let change = EpochChange { from: self.from, to: self.to };
        VolumeEpochChange { volume: self.volume.clone(), change }
    }
}

/// Has a source's agent send its VM away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrateOut {
    /// Its id, by which the agents speak of it.
    pub migration: MigrationId,
    /// The migrations of a VM are numbered; an order or a cancel that comes late is known by it.
    pub number: u32,
    /// `tunnel:IP:PORT` of a tunnel at the destination, or `tcp:IP:PORT` of QEMU itself
    pub uri: String,
    /// Control of the destination: it is asked before an epoch is flipped back.
    pub destination_agent_url: String,
    /// The destination. In the pause frames for the VM are sent there. `None` from a controller of a version before.
    #[serde(default)]
    pub destination: Option<HostId>,
    /// One for each disk that the VM writes.
    pub epochs: Vec<EpochRaise>,
    /// The pause that QEMU aims at, at first; the agent raises it where copying does not end
    /// ([`crate::phases::DOWNTIME_LIMIT_MAX_MS`]).
    pub downtime_limit_ms: u64,
    /// The memory is compressed with zstd on its way. The destination's QEMU must expect that
    /// ([`VmSpec::arrives_compressed`]). QEMU 7.2 counts the bytes before compression.
    pub compressed: bool,
    /// The most memory that QEMU may send in a second, before compression; `None`: no limit but the link's.
    pub max_bytes_per_s: Option<u64>,
    /// For how many percent of the time QEMU stops the vCPUs at first, if the guest changes its memory so fast that
    /// copying does not end; `None`: QEMU's default.
    pub throttle_percent: Option<u8>,
    /// For the homes of `epochs`; `None` in a cluster without certificates.
    pub grant: Option<SignedGrant>,
}

/// `POST /v1/vms/{vm}/migrate/grant`: gives the source of a migration a newer grant. A VM whose migration broke stays
/// paused until it has its disks back, which may take longer than a grant counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RenewGrant {
    /// The migration.
    pub migration: MigrationId,
    /// What its source may show to the homes from now on.
    pub grant: SignedGrant,
}

/// One outgoing migration as its source sees it.
///
/// ```text
/// setup -> copying -> switching (paused, epochs raised) -> completed
///   \________\___________\-> failed | cancelled   (epochs as before, VM runs here)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// QEMU connects to the destination.
    Setup,
    /// Memory is sent while the guest runs.
    Copying,
    /// The guest stands still; the switch is under way or to be undone.
    Switching,
    /// The VM is at the destination.
    Completed,
    /// It went wrong: the VM runs here, or its QEMU has ended.
    Failed,
    /// Somebody called it off; the VM runs here.
    Cancelled,
}

impl MigrationPhase {
    /// Nothing follows this phase.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// Ends a migration that is under way, or makes sure that it never begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CancelMigration {
    /// The migration to end.
    pub migration: MigrationId,
    /// Its number, as in [`MigrateOut::number`].
    pub number: u32,
    /// Why, for the report.
    pub reason: String,
}

/// Asks the destination of a migration what became of the VM. Unless the VM has run there, its
/// QEMU is ended, so that the answer stays true.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndUnlessRan {
    /// The migration that was to bring the VM.
    pub migration: MigrationId,
}

/// Tells the destination of a migration that the VM is paused at its source: frames for the VM wait at the destination from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectFrames {
    /// The migration that brings the VM.
    pub migration: MigrationId,
}

/// Asks the destination of a migration for its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskMigrationKey {
    /// The migration that is to bring the VM.
    pub migration: MigrationId,
}

/// The key with which the two QEMUs of a migration encrypt what they send. It is used once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationKey {
    /// [`MigrationKey::DIGITS`] hexadecimal digits.
    pub hex: String,
}

impl MigrationKey {
    /// 256 bits.
    pub const DIGITS: usize = 64;

    /// Whether it has the form of a key.
    pub fn is_one(&self) -> bool {
        self.hex.len() == Self::DIGITS && self.hex.bytes().all(|digit| digit.is_ascii_hexdigit())
    }
}

/// How far an outgoing migration is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationReport {
    /// The id it was ordered with.
    pub migration: MigrationId,
    /// The number it was ordered with.
    pub number: u32,
    /// How far it is.
    pub phase: MigrationPhase,
    /// Why it failed or was cancelled.
    pub reason: String,
    /// Since QEMU began to send (`total-time` of query-migrate).
    pub total_ms: u64,
    /// How long the guest stood still at the source (`downtime` of query-migrate).
    pub downtime_ms: u64,
    /// Sent so far, with what was sent twice.
    pub transferred_bytes: u64,
    /// Memory that is not sent yet; it grows when the guest changes what was sent.
    pub remaining_bytes: u64,
    /// How fast the guest changes its memory, as of QEMU's last pass.
    pub dirty_bytes_per_s: u64,
    /// How fast memory is sent.
    pub rate_bytes_per_s: u64,
    /// Rounds and pause, as far as it has come.
    pub phases: Phases,
}

impl MigrationReport {
    /// Nothing is sent yet.
    pub fn new(migration: MigrationId, number: u32, phase: MigrationPhase) -> Self {
        Self {
            migration,
            number,
            phase,
            reason: String::new(),
            total_ms: 0,
            downtime_ms: 0,
            transferred_bytes: 0,
            remaining_bytes: 0,
            dirty_bytes_per_s: 0,
            rate_bytes_per_s: 0,
            phases: Phases::default(),
        }
    }
}

/// Has an agent measure the link to another host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ProbeLink {
    /// The other host's agent, `https://IP:PORT`.
    pub peer_agent_url: String,
    /// Bytes to read for the rate; at most 64 MiB.
    pub length_bytes: u64,
    /// Reads so many bytes again and again for this time; seconds. `None`: once.
    #[serde(default)]
    pub for_s: Option<u64>,
    /// With so many streams at once.
    #[serde(default = "one")]
    pub streams: u32,
}

fn one() -> u32 {
    1
}

/// A link as TCP sees it, measured from one agent to another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LinkProbe {
    /// Median of several TCP connects.
    pub rtt_ms: f64,
    /// Of all TCP streams together, from the peer to the host that asked.
    pub rate_bytes_per_s: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_one_word_that_is_the_same_model_everywhere() {
        for text in ["common", "host", "EPYC-Milan", "Skylake-Server-v4", "qemu64"] {
            let cpu: Cpu = text.parse().expect("a CPU");
            assert_eq!(String::from(cpu), text);
        }
        for text in ["", "help", "max", "base", "-x", "qemu64,+vmx", "a b", "?"] {
            let refused = text.parse::<Cpu>().expect_err("it is no model");
            assert!(refused.to_string().contains("-cpu help"), "{refused}");
        }
    }
}
