//! What people and other processes may ask for, in numbers: one table, one check.
//!
//! The CLI, the controller and the agent check with the same [`Limit`], so that what one of them
//! takes, the next one does not refuse. What an error says is made of the table too.
//!
//! A limit stands here when it holds for what comes from outside, in a file, an option or a
//! request. Sizes of buffers, deadlines and the like stand where they are used.

use std::fmt;

use crate::money::MICROS_MAX;
use crate::units::{format_bytes, format_duration, parse_bytes};
use crate::volume::BLOCK_BYTES;
use crate::{Problem, ProblemKind};

const MIB: i128 = 1 << 20;
const GIB: i128 = 1 << 30;
const TIB: i128 = 1 << 40;

/// What a limit's numbers count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Bytes of a size, shown with IEC units.
    Bytes,
    /// Bytes of a text, in UTF-8.
    TextBytes,
    /// Seconds, shown as a duration.
    Seconds,
}

/// The smallest and the largest value of one quantity.
#[derive(Debug, PartialEq, Eq)]
pub struct Limit {
    /// The quantity in words that can begin a sentence: `a VM's number of CPUs`.
    pub name: &'static str,
    /// What the numbers count.
    pub unit: Unit,
    /// The smallest value that is possible.
    pub min: i128,
    /// The largest value that is possible.
    pub max: i128,
}

/// vCPUs of a VM. QEMU's q35 without an interrupt remapper starts with 255 and refuses 256: an
/// APIC has an id of 8 bits, and 255 means all of them (tried with QEMU 7.2).
pub static CPUS: Limit = Limit::new("a VM's number of CPUs", Unit::Count, 1, 255);

/// Memory of a VM. Less than 64 MiB does not boot a Linux kernel with an initramfs. More than
/// 512 GiB may not fit into the 40 bits of a physical address that QEMU's CPUs have under TCG,
/// beside the window for PCI (960 GiB start with QEMU 7.2, 984 GiB do not).
pub static MEMORY_BYTES: Limit = Limit::new("a VM's memory", Unit::Bytes, 64 * MIB, 512 * GIB);

/// Disks of a VM. Each takes one of the 32 slots of q35's PCIe root bus, beside its bridges, the
/// job's channel and the random numbers.
pub static VM_DISKS: Limit = Limit::new("a VM's number of disks", Unit::Count, 1, 20);

/// Addresses in a host's certificate.
pub static HOST_ADDRESSES: Limit = Limit::new("a host's number of addresses", Unit::Count, 1, 64);

/// Addresses of a host to which the controller tries to connect because the host asks for that.
pub static CHECKED_ADDRESSES: Limit =
    Limit::new("the number of addresses to look at", Unit::Count, 0, 8);

/// Volumes of a job: a VM's disks without root, seed and output. A job with inputs has one less.
pub static JOB_VOLUMES: Limit =
    Limit::new("a job's number of volumes", Unit::Count, 0, VM_DISKS.max - 3);

/// The size of a job's root or output disk. Less than 1 MiB has no room for a filesystem or a tar.
pub static JOB_DISK_BYTES: Limit =
    Limit::new("the size of a job's disk", Unit::Bytes, MIB, VOLUME_BYTES.max);

/// The size of a volume or an image. It has at least one block, so that clients never see a smaller disk as a larger one. A
/// layer is one file, and a file of ext4 with blocks of 4 KiB is smaller than 16 TiB.
pub static VOLUME_BYTES: Limit = Limit::new(
    "the size of a volume",
    Unit::Bytes,
    BLOCK_BYTES as i128,
    16 * TIB - BLOCK_BYTES as i128,
);

/// How long a job's command may run. A year: what is longer is a mistake in the unit.
pub static TIMEOUT_S: Limit = Limit::new("a job's timeout", Unit::Seconds, 1, 365 * 86_400);

/// How long a process of a job has between SIGTERM and SIGKILL. A day: what is longer is a mistake in the unit.
pub static STOP_GRACE_S: Limit = Limit::new("a job's stop-grace", Unit::Seconds, 0, 86_400);

/// Files of a job that are named because they are not among its outputs. More of them are counted.
pub static LEFT_OUT: Limit =
    Limit::new("the number of files that are named as left out", Unit::Count, 0, 10_000);

/// A job's priority, the higher the sooner.
pub static PRIORITY: Limit = Limit::new("a job's priority", Unit::Count, -100, 100);

/// Names of hosts, sites, volumes, images, users, clients, VMs and migrations, and ids of jobs:
/// as long as one label of a host's name (RFC 1035, 2.3.4).
pub static NAME_BYTES: Limit = Limit::new("the length of a name", Unit::TextBytes, 1, 63);

/// A tenant's name. It is a part of the names of its things, and leaves them at least 46 of [`NAME_BYTES`].
pub static TENANT_NAME_BYTES: Limit =
    Limit::new("the length of a tenant's name", Unit::TextBytes, 1, 16);

/// Backups that the controller knows. They are listed at once.
pub static BACKUPS: Limit = Limit::new("the number of backups", Unit::Count, 0, 10_000);

/// Backups of a tenant's users. They leave room for those of others.
pub static TENANT_BACKUPS: Limit = Limit::new("a tenant's number of backups", Unit::Count, 0, 1000);

/// Schedules of a tenant's users.
pub static TENANT_BACKUP_SCHEDULES: Limit =
    Limit::new("a tenant's number of schedules of backups", Unit::Count, 0, 100);

/// Places where a tenant's users may have backups made.
pub static TENANT_BACKUP_TARGETS: Limit =
    Limit::new("a tenant's number of targets for backups", Unit::Count, 0, 8);

/// Schedules of backups. They are looked at all the time.
pub static BACKUP_SCHEDULES: Limit =
    Limit::new("the number of schedules of backups", Unit::Count, 0, 1000);

/// Time between two backups of a schedule. Each seals the volume's head.
pub static BACKUP_EVERY_S: Limit =
    Limit::new("the time between two backups of a schedule", Unit::Seconds, 60, 366 * 24 * 3600);

/// Periods of one kind for each of which a schedule keeps a backup.
pub static BACKUP_PERIODS: Limit =
    Limit::new("the number of periods for which backups are kept", Unit::Count, 1, 10_000);

/// The key that a client gives a request (`Idempotency-Key`).
pub static REQUEST_KEY_BYTES: Limit =
    Limit::new("the length of an Idempotency-Key", Unit::TextBytes, 1, 255);

/// Requests with such a key that have made something, of one caller. Each is remembered for 24 hours.
pub static KEYED_REQUESTS: Limit = Limit::new(
    "a caller's number of requests with an Idempotency-Key within 24 hours",
    Unit::Count,
    0,
    20_000,
);

/// How long one request waits for the end of a job.
pub static WAIT_S: Limit =
    Limit::new("how long one request waits for a job's end", Unit::Seconds, 0, 60);

/// Tenants of a cluster, which are all in the controller's memory.
pub static TENANTS: Limit = Limit::new("the number of tenants", Unit::Count, 0, 1000);

/// Users of a tenant, which are all in the controller's memory.
pub static USERS: Limit = Limit::new("a tenant's number of users", Unit::Count, 0, 1000);

/// Tokens of a user that are not revoked, and have not expired.
pub static ACCESS_TOKENS: Limit = Limit::new("a user's number of tokens", Unit::Count, 0, 20);

/// Pages that the controller keeps fresh: each is an open connection, and is looked at every few seconds.
pub static LIVE_PAGES: Limit =
    Limit::new("the number of pages that are kept fresh", Unit::Count, 0, 100);

/// The same of all who are no admins: the other places are the admins'.
pub static LIVE_PAGES_OF_USERS: Limit = Limit::new(
    "the number of pages that are kept fresh for users who are no admins",
    Unit::Count,
    0,
    80,
);

/// The same of one user, so that one leaves room for the others.
pub static LIVE_PAGES_OF_ONE: Limit =
    Limit::new("a user's number of pages that are kept fresh", Unit::Count, 0, 20);

/// How long a user's token is good for.
pub static ACCESS_TOKEN_S: Limit =
    Limit::new("how long a token is good for", Unit::Seconds, 60, 365 * 86_400);

/// SSH keys of a user.
pub static SSH_KEYS: Limit = Limit::new("a user's number of SSH keys", Unit::Count, 0, 20);

/// A job's name. What is made of it is a name too: `NAME-0000001-r8-data16` is the longest.
pub static JOB_NAME_BYTES: Limit = Limit::new(
    "the length of a job's name",
    Unit::TextBytes,
    1,
    NAME_BYTES.max - "-0000001-r8-data16".len() as i128,
);

/// The VMs of a gang. Each has an address in a network of 254.
pub static MEMBERS: Limit = Limit::new("a job's number of VMs", Unit::Count, 1, 128);

/// The name of a gang: `NAME-0000001-n127-r8-data16` is the longest that is made of it.
pub static GANG_NAME_BYTES: Limit = Limit::new(
    "the length of the name of a job with several VMs",
    Unit::TextBytes,
    1,
    JOB_NAME_BYTES.max - "-n127".len() as i128,
);

/// Jobs of one name that were ever submitted: the number in a job's id has at most 7 digits.
pub static JOB_NUMBER: Limit =
    Limit::new("the number of jobs of one name", Unit::Count, 1, 9_999_999);

/// Jobs of a tenant that have not ended: the controller has all of them in its memory.
pub static UNFINISHED_JOBS: Limit =
    Limit::new("a tenant's number of jobs that have not ended", Unit::Count, 0, 10_000);

/// Jobs of a tenant, with those that have ended and were not deleted.
pub static JOBS: Limit = Limit::new("a tenant's number of jobs", Unit::Count, 0, 100_000);

/// Names that a tenant's jobs ever had: each has the number of its last job.
pub static JOB_NAMES: Limit =
    Limit::new("a tenant's number of names of jobs", Unit::Count, 0, 100_000);

/// Volumes and images of a tenant: each has a record at the controller, and files at a host.
pub static VOLUMES: Limit =
    Limit::new("a tenant's number of volumes and images", Unit::Count, 0, 10_000);

/// How often a job starts again after its host was lost.
pub static RESTARTS: Limit = Limit::new("a job's number of restarts", Unit::Count, 0, 3);

/// Hosts that could not start a job's VM before it is tried at no other. With [`RESTARTS`] this
/// makes a number of one digit, as a job's name allows for.
pub static REFUSALS: Limit =
    Limit::new("the number of hosts that could not start a VM", Unit::Count, 0, 5);

/// The name of the person a job belongs to: as Linux bounds the name of a user (`LOGIN_NAME_MAX`
/// in limits.h, with a zero byte at its end).
pub static OWNER_BYTES: Limit =
    Limit::new("the length of an owner's name", Unit::TextBytes, 1, 255);

/// One word of a command, or one variable of its environment: Linux has 128 KiB for each, with a
/// zero byte at its end (execve(2)).
pub static ARGUMENT_BYTES: Limit =
    Limit::new("the length of a word of the command", Unit::TextBytes, 0, 128 * 1024 - 1);

/// Command and environment together. Linux takes up to a quarter of the stack's limit of 8 MiB
/// (execve(2)); the shell that runs the command adds its own.
pub static COMMAND_BYTES: Limit =
    Limit::new("the length of command and environment", Unit::TextBytes, 1, MIB);

/// A path in the guest: Linux's `PATH_MAX` without the zero byte at its end.
pub static PATH_BYTES: Limit = Limit::new("the length of a path", Unit::TextBytes, 1, 4095);

/// The name of a file or a directory of the repository: as Linux bounds it (`NAME_MAX` in limits.h).
pub static FILE_NAME_BYTES: Limit =
    Limit::new("the length of a file's name", Unit::TextBytes, 1, 255);

/// What clients of WebDAV note about a file. It is an extended attribute: ext4 has one block for all of a file.
pub static FILE_PROPERTIES_BYTES: Limit =
    Limit::new("the length of a file's WebDAV properties", Unit::Bytes, 0, 2048);

/// Locks of clients of WebDAV. Each request looks at all of them.
pub static DAV_LOCKS: Limit = Limit::new("a tenant's number of WebDAV locks", Unit::Count, 0, 1000);

/// How deep the repository's directories go.
pub static PATH_NAMES: Limit = Limit::new("the number of names in a path", Unit::Count, 0, 64);

/// Uploads of one tenant at the same time, with those that can be continued.
pub static UPLOADS: Limit =
    Limit::new("a tenant's number of unfinished uploads", Unit::Count, 0, 1000);

/// The length of a file whose content is in an S3 store: 10,000 pieces of 16 MiB.
pub static OBJECT_BYTES: Limit =
    Limit::new("the length of a file in an S3 store", Unit::Bytes, 0, 10_000 << 24);

/// Parts of one upload that arrive apart from each other.
pub static UPLOAD_PARTS: Limit =
    Limit::new("an upload's number of separate parts", Unit::Count, 0, 10_000);

/// Paths that a tenant shares with others.
pub static FILE_SHARES: Limit =
    Limit::new("a tenant's number of shared paths", Unit::Count, 0, 1000);

/// Entries of a directory in one answer.
pub static FILE_LIST: Limit =
    Limit::new("the number of entries in one answer", Unit::Count, 1, 10_000);

/// Files and directories that a list of a job's inputs names. More are read from a directory of the repository.
pub static INPUT_ENTRIES: Limit =
    Limit::new("the number of entries in a list of inputs", Unit::Count, 0, 100_000);

/// Files and directories that a job is given, with all that is in the directories.
pub static INPUT_FILES: Limit =
    Limit::new("a job's number of input files and directories", Unit::Count, 0, 200_000);

/// A job's inputs together. What is larger belongs on a volume.
pub static INPUT_BYTES: Limit = Limit::new("the size of a job's inputs", Unit::Bytes, 0, 64 * GIB);

/// The path of an input below the directory of the inputs. With that directory, at whatever host, it is shorter than
/// Linux's `PATH_MAX`.
pub static INPUT_PATH_BYTES: Limit =
    Limit::new("the length of an input's path", Unit::TextBytes, 1, 2048);

/// A list of a job's inputs, as a file.
pub static INPUT_LIST_BYTES: Limit =
    Limit::new("the length of a list of inputs", Unit::Bytes, 0, 64 * MIB);

/// Files and directories that a job names as its output.
pub static OUTPUTS: Limit = Limit::new("a job's number of outputs", Unit::Count, 0, 256);

/// The user's part of what cloud-init reads, unpacked: more than clouds take (EC2: 16 KiB, OpenStack: 64 KiB), because people
/// compress what is longer. It is a part of the VM's record.
pub static USER_DATA_BYTES: Limit =
    Limit::new("the length of user-data", Unit::TextBytes, 1, 256 * 1024);

/// Labels of a VM. They are a part of the VM's record.
pub static LABELS: Limit = Limit::new("a VM's number of labels", Unit::Count, 0, 16);

/// The key of a label, or its value.
pub static LABEL_BYTES: Limit =
    Limit::new("the length of a label's key or value", Unit::TextBytes, 1, 63);

/// VMs of a tenant that live without a job, also those that are off: each has a record and a disk.
pub static PERSISTENT_VMS: Limit =
    Limit::new("a tenant's number of VMs without a job", Unit::Count, 0, 1000);

/// A file that is copied into a guest or out of it through its guest agent, which takes a small part at a time.
pub static GUEST_FILE_BYTES: Limit = Limit::new(
    "the size of a file that is copied through the guest agent",
    Unit::Bytes,
    0,
    4 * GIB,
);

/// How long a job's outputs are kept.
pub static KEEP_OUTPUTS_S: Limit =
    Limit::new("the time for which outputs are kept", Unit::Seconds, 60, 100 * 365 * 24 * 3600);

/// Volumes in one request about several that are there: more than a VM has disks.
pub static BATCH_VOLUMES: Limit =
    Limit::new("the number of volumes in one request", Unit::Count, 0, 64);

/// Volumes that one request makes, in one transaction of the catalog.
pub static NEW_VOLUMES: Limit =
    Limit::new("the number of volumes that one request makes", Unit::Count, 1, 10_000);

/// Layers that one request looks for: more than a chain has.
pub static FOUND_LAYERS: Limit =
    Limit::new("the number of layers that one request looks for", Unit::Count, 0, 100_000);

/// Addresses of hosts of which a volume server is told the site.
pub static SITE_ADDRESSES: Limit =
    Limit::new("the number of addresses in a map of sites", Unit::Count, 0, 100_000);

/// Hosts that may open one volume at its home.
pub static ADMITTED_HOSTS: Limit =
    Limit::new("the number of hosts that may open a volume", Unit::Count, 0, 10_000);

/// Points of a replica. Each keeps a layer apart from the others, and every layer slows reads.
pub static REPLICA_POINTS: Limit =
    Limit::new("the number of points that a replica keeps", Unit::Count, 1, 100);

/// Time between two rounds of a replica. Each round seals the volume's head.
pub static REPLICA_EVERY_S: Limit =
    Limit::new("the time between two rounds of a replica", Unit::Seconds, 10, 30 * 24 * 3600);

/// Volumes that departed from a pool and whose layers it keeps for their new homes, or for a while.
pub static DEPARTED_VOLUMES: Limit = Limit::new(
    "the number of volumes that departed from a pool and whose layers it keeps",
    Unit::Count,
    0,
    4096,
);

/// How many bits of a network's addresses are the same: 5 to 65,533 VMs.
pub static NETWORK_PREFIX_BITS: Limit =
    Limit::new("the number of bits of a network", Unit::Count, 16, 29);

/// Networks of a tenant.
pub static NETWORKS: Limit = Limit::new("a tenant's number of networks", Unit::Count, 0, 100);

/// Networks of a cluster: each has a number of 16 bits, which is not 0.
pub static VNIS: Limit = Limit::new("the cluster's number of networks", Unit::Count, 0, 65_535);

/// Hosts that ever had a tunnel: each has a number of 16 bits, which is neither the first nor the last one.
pub static TUNNELS: Limit =
    Limit::new("the cluster's number of hosts with tunnels", Unit::Count, 0, 65_534);

/// Ports that all VMs and unfinished jobs of a tenant publish. All tenants share the ports of the cluster.
pub static PUBLISHED_OF_TENANT: Limit =
    Limit::new("a tenant's number of published ports", Unit::Count, 0, 256);

/// Ports that a VM publishes.
pub static PUBLISHED: Limit = Limit::new("a VM's number of published ports", Unit::Count, 0, 32);

/// Bytes that one probe of a link reads.
pub static PROBE_BYTES: Limit = Limit::new("a probe's length", Unit::Bytes, 1, 64 * MIB);

/// TCP streams of one probe of a link.
pub static PROBE_STREAMS: Limit = Limit::new("a probe's number of streams", Unit::Count, 1, 16);

/// Reads of one probe of an export.
pub static PROBE_REQUESTS: Limit = Limit::new("a probe's number of reads", Unit::Count, 1, 1000);

/// Bytes of one read of such a probe.
pub static PROBE_REQUEST_BYTES: Limit =
    Limit::new("the length of a probe's read", Unit::Bytes, 512, MIB);

/// For how long each figure of a host is measured.
pub static MEASURE_S: Limit =
    Limit::new("how long a figure of a host is measured", Unit::Seconds, 1, 60);

/// Other hosts that a host is measured against.
pub static MEASURED_AGAINST: Limit =
    Limit::new("the number of hosts that a host is measured against", Unit::Count, 0, 16);

/// Kinds of rented machines whose figures are kept. The oldest are dropped beyond that.
pub static MEASURED_KINDS: Limit =
    Limit::new("the number of measured kinds of machines", Unit::Count, 0, 500);

/// How long the requests of a volume are followed.
pub static TRACE_S: Limit = Limit::new("how long a trace lasts", Unit::Seconds, 1, 3600);

/// How long the controller of a rented host may be silent before the host ends itself. The controller asks each host every few seconds, and
/// may be started anew in between.
pub static LEASE_S: Limit = Limit::new("the length of a lease", Unit::Seconds, 10, 7 * 86_400);
/// From a job's submission to its deadline. A year: what is longer is a mistake in the unit.
pub static DEADLINE_S: Limit =
    Limit::new("the time to a job's deadline", Unit::Seconds, 1, 365 * 86_400);

/// An amount of money that somebody names, as a budget: what the API's integers have room for.
pub static MONEY_MICROS: Limit =
    Limit::new("an amount of money in millionths of a dollar", Unit::Count, 0, MICROS_MAX as i128);

/// Sites and hosts with a price of their own.
pub static PRICES: Limit = Limit::new("the number of entries with prices", Unit::Count, 0, 1000);

/// How old a price may be that still counts.
pub static PRICE_AGE_S: Limit =
    Limit::new("how old a price may be", Unit::Seconds, 3600, 3650 * 86_400);

/// The least time that is paid for.
pub static MINIMUM_S: Limit =
    Limit::new("the least time that is paid for", Unit::Seconds, 0, 31 * 86_400);

/// Lines of the controller's ledger that stand one by one. Older ones are summed up.
pub static LEDGER_LINES: Limit = Limit::new("the ledger's number of lines", Unit::Count, 0, 20_000);

/// Entries of the ledger that are not settled: those of jobs that were placed and have not ended, and of hosts that are rented.
pub static LEDGER_OPEN: Limit =
    Limit::new("the ledger's number of entries that are not settled", Unit::Count, 0, 200_000);
/// Rentals of hosts, also those that were over lately. All are in the controller's memory.
pub static RENTALS: Limit = Limit::new("the number of rented hosts", Unit::Count, 0, 10_000);
/// Disks of rented hosts that are kept, also those that were kept lately.
pub static KEPT_DISKS: Limit =
    Limit::new("the number of kept disks of rented hosts", Unit::Count, 0, 1000);
/// Until a rented host is given back.
pub static RENT_FOR_S: Limit =
    Limit::new("how long a host is rented for", Unit::Seconds, 60, 365 * 86_400);
/// How many hosts the cluster may have rented at once when it rents by itself.
pub static RENTED_MOST: Limit =
    Limit::new("how many hosts may be rented at once", Unit::Count, 0, 100);
/// The disk of a rented host.
pub static RENT_DISK_BYTES: Limit =
    Limit::new("the disk of a rented host", Unit::Bytes, GIB, 64 * TIB);

/// A job file, or a lab's definition.
pub static DOCUMENT_BYTES: Limit = Limit::new("the file's length", Unit::Bytes, 0, MIB);

/// A value that a [`Limit`] does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is {}; possible is {}", limit.name, limit.shown(*value), limit.range())]
pub struct OutOfLimits {
    /// What was exceeded, or not reached.
    pub limit: &'static Limit,
    /// What was asked for; a number beyond 127 bits is shown as the largest of them.
    pub value: i128,
}

impl OutOfLimits {
    /// The error for people, where `what` could not be done.
    pub fn problem(self, what: impl Into<String>) -> Problem {
        Problem::new(ProblemKind::Invalid, what, self)
    }
}

impl Limit {
    const fn new(name: &'static str, unit: Unit, min: i128, max: i128) -> Self {
        Self { name, unit, min, max }
    }

    /// The value itself, if it is possible.
    ///
    /// # Errors
    /// [`OutOfLimits`], which names the limit and the range.
    pub fn check<T: Copy + TryInto<i128>>(&'static self, value: T) -> Result<T, OutOfLimits> {
        let number = value.try_into().unwrap_or(i128::MAX);
        if (self.min..=self.max).contains(&number) {
            Ok(value)
        } else {
            Err(OutOfLimits { limit: self, value: number })
        }
    }

    /// `1 to 255`, `64 MiB to 512 GiB`, `1 to 63 bytes`.
    pub fn range(&self) -> String {
        match self.unit {
            Unit::TextBytes => format!("{} to {} bytes", self.min, self.max),
            _ => format!("{} to {}", self.shown(self.min), self.shown(self.max)),
        }
    }

    /// As exact as it is needed to see on which side of a limit it is.
    fn shown(&self, value: i128) -> String {
        match (self.unit, u64::try_from(value)) {
            (Unit::Bytes, Ok(bytes)) => {
                let shown = format_bytes(bytes);
                let exact = parse_bytes(&shown) == Ok(bytes);
                if exact { shown } else { format!("{bytes} bytes") }
            }
            (Unit::Seconds, Ok(seconds)) => format_duration(seconds),
            (Unit::TextBytes, _) => format!("{value} bytes"),
            _ => value.to_string(),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.range())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&Limit; 85] = [
        &CPUS,
        &MEMORY_BYTES,
        &VM_DISKS,
        &HOST_ADDRESSES,
        &CHECKED_ADDRESSES,
        &JOB_VOLUMES,
        &JOB_DISK_BYTES,
        &VOLUME_BYTES,
        &TIMEOUT_S,
        &PRIORITY,
        &NAME_BYTES,
        &TENANT_NAME_BYTES,
        &REQUEST_KEY_BYTES,
        &KEYED_REQUESTS,
        &WAIT_S,
        &TENANTS,
        &USERS,
        &ACCESS_TOKENS,
        &LIVE_PAGES,
        &LIVE_PAGES_OF_USERS,
        &LIVE_PAGES_OF_ONE,
        &ACCESS_TOKEN_S,
        &SSH_KEYS,
        &JOB_NAME_BYTES,
        &GANG_NAME_BYTES,
        &MEMBERS,
        &JOB_NUMBER,
        &RESTARTS,
        &REFUSALS,
        &OWNER_BYTES,
        &ARGUMENT_BYTES,
        &COMMAND_BYTES,
        &PATH_BYTES,
        &FILE_NAME_BYTES,
        &FILE_PROPERTIES_BYTES,
        &DAV_LOCKS,
        &PATH_NAMES,
        &UPLOADS,
        &OBJECT_BYTES,
        &UPLOAD_PARTS,
        &FILE_SHARES,
        &FILE_LIST,
        &INPUT_ENTRIES,
        &INPUT_FILES,
        &INPUT_BYTES,
        &INPUT_PATH_BYTES,
        &INPUT_LIST_BYTES,
        &OUTPUTS,
        &USER_DATA_BYTES,
        &LABELS,
        &LABEL_BYTES,
        &PERSISTENT_VMS,
        &UNFINISHED_JOBS,
        &JOBS,
        &JOB_NAMES,
        &VOLUMES,
        &GUEST_FILE_BYTES,
        &BATCH_VOLUMES,
        &NEW_VOLUMES,
        &FOUND_LAYERS,
        &SITE_ADDRESSES,
        &ADMITTED_HOSTS,
        &NETWORK_PREFIX_BITS,
        &NETWORKS,
        &VNIS,
        &TUNNELS,
        &PUBLISHED,
        &PROBE_BYTES,
        &PROBE_STREAMS,
        &PROBE_REQUESTS,
        &PROBE_REQUEST_BYTES,
        &MEASURE_S,
        &MEASURED_AGAINST,
        &MEASURED_KINDS,
        &TRACE_S,
        &LEASE_S,
        &DEADLINE_S,
        &MONEY_MICROS,
        &LEDGER_LINES,
        &LEDGER_OPEN,
        &KEPT_DISKS,
        &PRICES,
        &PRICE_AGE_S,
        &MINIMUM_S,
        &DOCUMENT_BYTES,
    ];

    #[test]
    fn every_limit_holds_at_both_of_its_ends() {
        for limit in ALL {
            for value in [limit.min, limit.max] {
                assert_eq!(limit.check(value), Ok(value), "{limit}");
            }
            for value in [limit.min - 1, limit.max + 1] {
                assert_eq!(limit.check(value), Err(OutOfLimits { limit, value }), "{limit}");
            }
        }
    }

    #[test]
    fn an_error_names_the_quantity_the_value_and_the_limit() {
        let problem = CPUS.check(256).unwrap_err().problem("start the VM a");
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert_eq!(problem.why, "a VM's number of CPUs is 256; possible is 1 to 255");
        let error = MEMORY_BYTES.check((64_u64 << 20) - 1).unwrap_err();
        let said = "a VM's memory is 67108863 bytes; possible is 64 MiB to 512 GiB";
        assert_eq!(error.to_string(), said, "a rounded size would look like the limit");
        let error = TIMEOUT_S.check(0_u64).unwrap_err();
        assert_eq!(error.to_string(), "a job's timeout is 0s; possible is 1s to 365d");
    }

    #[test]
    fn a_number_that_no_limit_has_room_for_is_refused() {
        assert!(VOLUME_BYTES.check(u128::MAX).is_err());
        assert!(VOLUME_BYTES.check(u64::MAX).is_err());
        assert!(PRIORITY.check(i64::MIN).is_err());
    }
}
