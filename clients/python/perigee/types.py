"""The things of the API. Made by ./generate from the OpenAPI document; do not edit."""

from __future__ import annotations

from typing import Any, Dict, List, Literal, NotRequired, TypedDict, Union

# How QEMU runs a guest's instructions.
Accelerator = Literal["kvm", "tcg"]

# How a job uses a volume.
Access = Literal["write", "read", "clone"]


class AccessToken(TypedDict):
    """A user's token, without its secret."""

    # Unix time.
    created_ms: int
    # Unix time.
    expires_ms: int
    # The part of it that is no secret.
    id: str


class AdoptVm(TypedDict):
    """Makes the record of a VM that a host has and no record names there."""

    # The host at which it runs.
    host: HostId
    # The image of which its root disk is a clone; `None`: that whose layer the disk stands on.
    image: NotRequired[Union[ImageName, None]]


class AdoptVolume(TypedDict):
    """Makes a volume known to the controller that was made at a host without it."""

    # The host that has it.
    host: HostId


class AttachVolume(TypedDict):
    """Gives a VM a further volume."""

    # The guest can't write it.
    read_only: NotRequired[bool]
    # The volume's name in the cluster.
    volume: VolumeName


class AuditEntry(TypedDict):
    """An entry of the audit log."""

    # Unix time.
    at_ms: int
    # The method and the path of the request.
    request: str
    # The status of the HTTP answer; 499 if the client did not wait for it.
    status: int
    # The full name of what was made or meant, where the path does not say it.
    thing: NotRequired[str]
    # `TENANT/USER`, or what is known of who has no token: `an operator` has a certificate, `a
    # process of this host` uses the controller's unix socket.
    who: str

# How far the cluster goes by itself.
AutoMode = Literal["off", "advise", "on"]


class Backup(TypedDict):
    """A backup, as the controller knows it."""

    # Where it is.
    at: BackupTarget
    # When it was asked for; Unix time.
    begun_ms: int
    # The user who has it made; `None`: an admin.
    by: NotRequired[Union[BackupUser, None]]
    # The data of all its layers.
    data_bytes: NotRequired[Union[int, None]]
    # It is encrypted at the target with the key of the tenant of the volume, VM or image.
    encrypted: NotRequired[bool]
    # When it was complete or failed; Unix time.
    ended_ms: NotRequired[Union[int, None]]
    # The volume's home, or a host that has the image, which ships it; `None`: not asked yet.
    host: NotRequired[Union[HostId, None]]
    # The image that it is of.
    image: NotRequired[Union[ImageName, None]]
    # The name of what it is of, and the time.
    name: BackupName
    # The backup of a VM of which this one is a part.
    part_of: NotRequired[Union[BackupName, None]]
    # Of a VM: the backups of its other disks, which are made, restored and deleted with this one.
    parts: NotRequired[List[BackupName]]
    # Why it failed, or what it waits for; else empty.
    problem: str
    # How far it is, while it is shipped.
    progress: NotRequired[Union[BackupProgress, None]]
    # The schedule that has begun it; `None`: a person has.
    schedule: NotRequired[Union[ScheduleName, None]]
    # What was sent to the target for it.
    shipped_bytes: int
    # The size of the volume's disk.
    size_bytes: NotRequired[Union[int, None]]
    # How far it is.
    state: BackupState
    # When the volume was sealed for it; Unix time. It has what was written until then.
    taken_ms: NotRequired[Union[int, None]]
    # The VM that it is of.
    vm: NotRequired[Union[VmId, None]]
    # The volume; of a VM its root disk, and of an image the image's name.
    volume: VolumeName


class BackupFailure(TypedDict):
    """A backup that has failed."""

    # When; Unix time.
    at_ms: int
    # Why.
    why: str

# A backup: the full name of what it is of, and the time.
BackupName = str


class BackupProgress(TypedDict):
    """How far a backup is."""

    # The volume's data that were put at the target in this try.
    done_bytes: int
    # The data of the layers that are shipped, as far as they are known. What the target has of them
    # already is not put again.
    total_bytes: int


class BackupSchedule(TypedDict):
    """A schedule of backups."""

    # The user who has asked for it; `None`: an admin.
    by: NotRequired[Union[BackupUser, None]]
    # Its backups are encrypted.
    encrypted: NotRequired[bool]
    # Why it has ended; empty: it goes on.
    ended: str
    # The time from one backup to the next, in seconds.
    every_s: int
    # The image; `None`: it is of a volume or a VM.
    image: NotRequired[Union[ImageName, None]]
    # Which complete backups are kept, beside the newest one; none: all are.
    keep: List[KeepRule]
    # How many complete backups it has.
    kept: int
    # The last backup that has failed, also before a later one that has not.
    last_failure: NotRequired[Union[BackupFailure, None]]
    # When the disks were sealed for the newest complete backup; Unix time.
    last_success_ms: NotRequired[Union[int, None]]
    # When it was asked for first; Unix time.
    made_ms: int
    # The name of what it is of, and a number if there are several.
    name: ScheduleName
    # When the next backup is due; Unix time. `None`: it has ended.
    next_ms: NotRequired[Union[int, None]]
    # What is wrong: why the last backup has failed, what the present one waits for, or why old ones
    # can't be deleted. Empty: nothing.
    problem: str
    # Where its backups are.
    to: BackupTarget
    # The backup that is being shipped. No other one begins meanwhile.
    under_way: NotRequired[Union[BackupName, None]]
    # The VM; `None`: it is of a volume or an image.
    vm: NotRequired[Union[VmId, None]]
    # The volume; `None`: it is of a VM or an image.
    volume: NotRequired[Union[VolumeName, None]]

# The state of a backup.
BackupState = Literal["shipping", "completed", "failed", "deleting"]


class BackupTarget(TypedDict):
    """Where backups are: a directory of the host that writes or reads them, or an S3 store."""

    # An absolute path, or `s3://BUCKET/PREFIX`.
    address: str
    # The address of the S3 store, if it is not AWS's.
    endpoint: NotRequired[Union[str, None]]


class BackupUser(TypedDict):
    """The user of a tenant who has a backup made. The backup is that tenant's, and counts in its
    quota.
    """

    # The tenant.
    tenant: TenantName
    # The user.
    user: UserName


class BalanceTarget(TypedDict):
    """Another host, and what being there would have saved a VM."""

    # In how many seconds.
    for_s: float
    # Which host.
    host: HostId
    # The saving in seconds at which the VM moves: the price with the surcharge.
    needed_s: NotRequired[Union[float, None]]
    # What a move there costs, in seconds; `None` if that is not known.
    price_s: NotRequired[Union[float, None]]
    # What being there would have saved so far, in seconds: the VM's own and its neighbours'.
    saved_s: float
    # Why the VM does not go there whatever it would save; empty if it may.
    why_not: str

# What a prediction of the job's work rests on.
Basis = Literal["history", "one_pass", "running"]


class BlockProbe(TypedDict):
    """The latency and the rate of reads from an export."""

    # The median latency, with one read in flight at a time.
    latency_median_us: int
    # The 95th percentile of the latencies, with one read in flight at a time.
    latency_p95_us: int
    # The rate with 16 reads in flight.
    rate_bytes_per_s: int


class CheckBackup(TypedDict):
    """Has a backup read, and compared with its checksums."""

    # Where the backup is; `None`: where the controller knows it.
    at: NotRequired[Union[BackupTarget, None]]
    # The host that reads it; `None`: the host that has shipped it, or for an S3 store any.
    host: NotRequired[Union[HostId, None]]


class CheckHost(TypedDict):
    """`POST /v1/hosts/{host}/check`: a host asks how the controller sees it."""

    # The addresses of the host at which somebody listens: the controller tries to connect to each
    # that is at an address of the host's certificate. Before there is one, it tries those at the
    # address for which the token is, or from which the host asks.
    reach: List[str]

# A machine that runs an agent and a volume server.
HostId = str


class CheckToken(CheckHost):
    """`POST /v1/enrol/check`: a host that has a token asks, before it joins, how the controller
    sees it. The token stays good.
    """

    # The host that will join.
    host: HostId
    # The token's secret.
    secret: str


class CloudInit(TypedDict):
    """How cloud-init configures a guest, where its image has that."""

    # The user's SSH keys, each a line of a public key file.
    ssh_keys: NotRequired[List[str]]
    # The name of its first user; `None`: the image's own, for example `debian`.
    user: NotRequired[Union[str, None]]
    # The user-data: a cloud-config, a script, or whatever else cloud-init takes. It comes before
    # all that Perigee says.
    user_data: NotRequired[Union[str, None]]


class ClusterImage(TypedDict):
    """An image as the cluster knows it."""

    # Data in its layers, as one complete copy has it.
    allocated_bytes: int
    # Hosts that can use it.
    hosts: List[HostId]
    # Whether it may leave its site.
    leave_site: LeaveSite
    # What the hosts' copies together have not fetched yet.
    missing_bytes: int
    # Stands for one layer in the whole cluster.
    name: ImageName
    # In the answer to a snapshot of a VM that runs: why it is only what a power cut would have
    # left. In the answer to an import: what its user is to know about it. Otherwise empty, as of
    # every image that is only shown.
    note: NotRequired[str]
    # Whether every tenant may use it.
    shared: bool
    # The size of the disk that it is an image of.
    size_bytes: int


class ClusterNetwork(TypedDict):
    """A network as people see it."""

    # Where its VMs find names and the way out.
    gateway: str
    # The host that has this address now; `None` while no VM needs it.
    gateway_host: NotRequired[Union[HostId, None]]
    # The largest packet of its VMs.
    mtu: int
    # Its full name.
    name: NetworkName
    # Whether its VMs reach the world outside.
    nat: bool
    # Its addresses.
    subnet: str
    # Its VMs.
    vms: List[NetworkVm]
    # Its number, unique in the cluster.
    vni: int


class ClusterVolume(TypedDict):
    """A volume as the cluster knows it."""

    # Data of the volume in head and chain, as last seen at its home; 0 when it was never seen.
    allocated_bytes: int
    # Who may write it now, as last seen at its home.
    epoch: Epoch
    # The host whose pool has the writable head.
    home: HostId
    # Whether it may leave its site, as last seen at its home.
    leave_site: LeaveSite
    # Its move to another home, while one is under way.
    moving: NotRequired[Union[VolumeMove, None]]
    # Unique in the cluster.
    name: VolumeName
    # Its replicas at other sites.
    replicas: List[Replica]
    # The backup from which bytes of it are still to come, while some are.
    restoring: NotRequired[Union[Restoring, None]]
    # The size of the disk that a VM sees.
    size_bytes: int
    # The job that has it open for writing.
    used_by: NotRequired[Union[JobId, None]]
    # Its home does not answer: what is shown is as last seen there.
    waits: List[Waiting]


class CommandEnd(TypedDict):
    """How a command ended, beside its code."""

    # A process did not end within the job's `stop-grace`, and was killed.
    outlived_grace: bool
    # The signal that ended it; `None`: it has exited.
    signal: NotRequired[Union[int, None]]
    # Why it was stopped; `None`: it ended by itself.
    stopped: NotRequired[Union[Stopped, None]]


class CopiedFile(TypedDict):
    """A file that was copied into a guest."""

    # Its length.
    bytes: int


class CopyRound(TypedDict):
    """One pass over the memory that has changed, or several passes that were made one."""

    # Sent in it.
    bytes: int
    # How fast the guest changed its memory, as QEMU saw it at the end of the round.
    dirty_bytes_per_s: int
    # From the begin of its first pass to the end of its last.
    duration_ms: int
    # The numbers of the first and last pass in it, from 1.
    first: int
    # The number of the last pass in it.
    last: int


class CostItem(TypedDict):
    """A part of what a way would cost."""

    # `None` if it is not known.
    cost: NotRequired[Union[MoneyRange, None]]
    # To whose price it belongs.
    host: HostId
    # What is paid for.
    of: CostOf
    # What was reckoned, or why it is not known, in plain words.
    why: str

# What is paid for.
CostOf = Literal["machine", "disk", "egress"]


class CpuAmount(TypedDict):
    """The vCPUs of a VM that has more of them than it always has the time of."""

    # So many vCPUs it always has the time of.
    least: int
    # So many it has.
    most: int
    # Why it has no more time of its host's CPUs, in plain words.
    reason: str
    # So many ran in the last minute; `None` if that is not known.
    used_1m: NotRequired[Union[float, None]]


class DaemonVersion(TypedDict):
    """Which program a daemon is."""

    # The commit of its sources; `None` if whoever has built it did not say the commit.
    commit: NotRequired[Union[str, None]]
    # The newest format level that it knows.
    format_level: int
    # The product's version, as `0.1.0`.
    product: str


class Decision(TypedDict):
    """One decision. Of each job the first one and the last 100 are kept."""

    # Unix time of the controller.
    at_ms: int
    # The job that was decided on.
    job: JobId
    # Where the whole job's time went; of a job that succeeded, once it has ended.
    measured: NotRequired[Union[Seconds, None]]
    # Filled in when the job or the migration has ended.
    measured_s: NotRequired[Union[float, None]]
    # What of it was not carried out, and why; empty if nothing is known of that kind.
    outcome: str
    # What it weighed; empty where a person decided.
    plan: Plan
    # The choice and its reason in one sentence.
    summary: str
    # Why the planner was asked.
    trigger: Trigger


class DeletedImage(TypedDict):
    """What became of an image that was deleted: its name is free."""

    # The volumes and images that stand on its layer, for example `volume web-root`. The layer stays
    # until it is merged into the only one that needs it, in the background.
    stands_on_it: List[str]


class DetachVolume(TypedDict):
    """Takes a volume from a VM."""

    # The volume's name in the cluster.
    volume: VolumeName


class DiskFigures(TypedDict):
    """The figures of a disk. Sequential requests have 1 MiB, 4 at a time. Random ones have 4
    KiB, one after another; each random write is followed by a flush.
    """

    # Whether the page cache was passed by. A volume of another host may be in the memory of that
    # host.
    direct: bool
    # Random reads per second.
    random_reads_per_s: float
    # Random writes per second.
    random_writes_per_s: float
    # Sequential reads; bytes per second.
    read_bytes_per_s: float
    # The size of what was read and written.
    size_bytes: int
    # Sequential writes; bytes per second.
    write_bytes_per_s: float


class DiskMeasurement(TypedDict):
    """A disk that was measured."""

    # The host that has it.
    at: HostId
    # Its figures; `None` if it was not measured.
    figures: NotRequired[Union[DiskFigures, None]]
    # How it was reached.
    path: DiskPath
    # Why it was not measured; empty if it was.
    problem: str

# How a disk is reached.
DiskPath = Literal["pool", "nbd", "iscsi"]


class Drain(TypedDict):
    """That a host is to be drained."""

    # When that was asked for; Unix time.
    asked_ms: int
    # The boot of the host for which it holds: it is called off when the host has booted again.
    # `None`: until somebody calls it off.
    boot_id: NotRequired[Union[str, None]]
    # Who asked, as the audit log names them.
    by: str

# What becomes of a thing at a host that is drained.
DrainFate = Literal["moving", "moves", "waits", "stays"]


class DrainHost(TypedDict):
    """Drains a host."""

    # Only say what would happen.
    dry_run: NotRequired[bool]


class DrainStep(TypedDict):
    """What is at a host that is drained, and what becomes of it."""

    # What its move is predicted to send.
    bytes: NotRequired[Union[int, None]]
    # What becomes of it.
    fate: DrainFate
    # What it is.
    kind: DrainedKind
    # Its name.
    name: str
    # How long its move is predicted to take, with the disks that come after a VM.
    takes_s: NotRequired[Union[float, None]]
    # Where it goes. A job with several VMs has one host for each of them, in the order of their
    # ranks.
    to: List[HostId]
    # Why it waits or can't leave; may be empty.
    why: str

# What can be at a host.
DrainedKind = Literal["vm", "job", "volume", "network"]


class EndRental(TypedDict):
    """`POST /v1/rentals/{rental}/end`: gives a host back."""

    # Do not wait until all has left the host: its VMs end with it.
    now: NotRequired[bool]


class EndUnknownVm(TypedDict):
    """Ends a VM that a host has and no record names there."""

    # At once, as a power cut does. Else its guest is asked to power off, and one that is off is
    # removed.
    force: NotRequired[bool]
    # The host that has it.
    host: HostId

# Who or what has ended a rental. `Rental::ends_because` says it in words.
EndedBy = Literal["person", "rule", "time", "money", "provider", "refused", "not_allowed", "other_kind", "never_came", "silent", "not_asked", "not_owned"]


class Enrol(TypedDict):
    """`POST /v1/enrol`: a host joins. It has no certificate yet."""

    # The addresses at which the other hosts and the controller reach this host.
    addresses: List[str]
    # The host that joins.
    host: HostId
    # The public half of the host's new key: a point of P-256 in hexadecimal.
    public_key: str
    # The token's secret.
    secret: str


class Enrolled(TypedDict):
    """A new certificate."""

    # The authority's certificate, PEM.
    ca: str
    # PEM.
    certificate: str

# Who may write a volume: a session writes only while its epoch is the volume's. The number has the
# volume's incarnation in front, and then counts from 1: what was meant for a volume that was
# deleted does not fit the next one of its name. (It has 52 bits, which JSON's readers take as they
# are.)
Epoch = int


class Estimate(TypedDict):
    """A predicted time. The truth is meant to be between `low_s` and `high_s` 9 times of 10."""

    # The most likely time.
    expected_s: float
    # The longest time that is expected.
    high_s: float
    # The shortest time that is expected.
    low_s: float


class ExecBegun(TypedDict):
    """A program that runs in a guest."""

    # The guest's number of it.
    pid: int


class ExecInVm(TypedDict):
    """A program to be run in a guest, as root."""

    # The program and its arguments.
    command: List[str]
    # It is ended when nobody has asked for its status for a minute and a half.
    end_unwatched: NotRequired[bool]
    # What it reads from its standard input, in base64.
    input_base64: NotRequired[Union[str, None]]


class ExecStatus(TypedDict):
    """How far a program in a guest is. It is told once that it has ended."""

    # With which code.
    exit_code: NotRequired[Union[int, None]]
    # Whether it has ended.
    exited: bool
    # By which signal, instead of a code.
    signal: NotRequired[Union[int, None]]
    # What it has printed to standard error.
    stderr_base64: str
    # What it has printed.
    stdout_base64: str
    # The guest agent has dropped a part of that.
    truncated: bool


class FinishUpgrade(TypedDict):
    """`POST /v1/upgrade/finish`: ends the upgrade of the cluster. From then on no daemon can go
    back to the version of before.
    """

    # Hosts that are given up: nobody looks at their versions.
    without: NotRequired[List[HostId]]

# What a VM's machine begins with.
Firmware = Literal["bios", "uefi", "uefi_secure"]


class FoundBackup(TypedDict):
    """A backup that was found at a target."""

    # The data of all its layers.
    data_bytes: int
    # The image that it is of; `None`: it is of none.
    image: NotRequired[Union[ImageName, None]]
    # Its name.
    name: BackupName
    # Why it can't be read; else empty.
    problem: str
    # The size of the volume's disk.
    size_bytes: int
    # When the volume was sealed; Unix time.
    taken_ms: int
    # The VM that it is of, without what may be secret; `None`: it is of a volume, or of one of a
    # VM's other disks.
    vm: NotRequired[Union[VmBackup, None]]
    # The volume that it is of, as in `Backup`; `None`: that can't be read.
    volume: NotRequired[Union[VolumeName, None]]


class GangMove(TypedDict):
    """A move of all VMs of a job."""

    # The request that it carries out; `None`: the planner wants it.
    asked: NotRequired[Union[int, None]]
    # All VMs are there, or all are where they were; Unix time.
    ended_ms: NotRequired[Union[int, None]]
    # One for each VM, in the order of their ranks.
    legs: List[Leg]
    # Which of the job's moves it is, from 1 on.
    number: int
    # Why the VMs move.
    reason: str
    # Unix time.
    started_ms: int
    # Why a VM that is to go back can't do so now.
    trouble: str
    # Why the VMs go back, or did not move at all; empty: they do not.
    undone: str
    # Whether the disks of a VM come after it, and go back with it.
    volumes: NotRequired[VolumesOnMove]

# A group of VMs of a tenant that share a host, or never do (`host_rules`).
GroupName = str


class Hardware(TypedDict):
    """What a person may ask for of a VM's machine."""

    # What its CPU is like.
    cpu: NotRequired[str]
    # It has a TPM 2.0, whose state is on a disk `DiskRole::Tpm`.
    tpm: NotRequired[bool]
    # It has a screen, a keyboard and a pointer, which are reached by VNC.
    vnc: NotRequired[bool]


class Host(TypedDict):
    """A host as the controller knows it."""

    # What its VMs run with; `None` until it has reported.
    accelerator: NotRequired[Union[Accelerator, None]]
    # Where its daemons listen.
    addresses: HostAddresses
    # As the processor names itself: under KVM a VM moves only between hosts with equal ones.
    cpu_model: str
    # The host's own CPUs, as last reported; 0 until it has reported.
    cpus: int
    # How many of its CPUs are in use, mean of the last minute, as last reported; `None` if that is
    # not known.
    cpus_used_1m: NotRequired[Union[float, None]]
    # How far its drain is; `None` if it is not drained.
    drain: NotRequired[Union[HostDrain, None]]
    # Unique in the cluster; its agent was started with this name.
    id: HostId
    # When its agent answered last; Unix time of the controller.
    last_seen_ms: int
    # That it ends itself without its controller, as last reported; `None` if it does not.
    lease: NotRequired[Union[HostLease, None]]
    # Tasks that run or wait there, mean of a minute, as last reported; `None` if that is not known.
    load_1min: NotRequired[Union[float, None]]
    # What was measured of it, or else of another host of its kind; `None` in lists, and if nothing
    # was.
    measurement: NotRequired[Union[HostMeasurement, None]]
    # What can be used of its memory without swapping, as last reported; `None` if that is not
    # known.
    memory_available_bytes: NotRequired[Union[int, None]]
    # The host's own memory, as last reported; 0 until it has reported.
    memory_bytes: int
    # Memory of the VMs placed there.
    memory_used_bytes: int
    # That its provider takes it back, as last reported; `None` if no such thing was heard there.
    notice: NotRequired[Union[HostNotice, None]]
    # Free bytes of its pool, as last reported; `None` if that is not known.
    pool_free_bytes: NotRequired[Union[int, None]]
    # The size of the filesystem that its pool is on, as last reported; `None` if that is not known.
    pool_size_bytes: NotRequired[Union[int, None]]
    # What its tasks wait for, as last reported.
    pressure: HostPressure
    # Whether it answers.
    state: HostState
    # What the VMs there do with its CPUs, those together whose figures are known; `None` if those
    # of no VM are, or if none is there.
    vcpus_1m: NotRequired[Union[VcpuUse, None]]
    # Its parts that do not answer, its agent and its volume server, each by itself.
    waits: List[Waiting]
    # What this host cannot do, in plain words; see `vm::HostReport::warnings`.
    warnings: List[str]


class HostAddresses(TypedDict):
    """How a host makes itself known to the controller (`PUT /v1/hosts/{host}` there)."""

    # `https://IP:PORT`, or `http://IP:PORT` in a cluster without TLS
    agent_url: str
    # `IP:PORT` of the volume server's NBD listener.
    nbd_addr: str
    # The host's site; a host is at one.
    site: SiteId
    # Its end of the tunnels between hosts; `None` if it can't have tenants' networks.
    tunnel: NotRequired[Union[TunnelEnd, None]]
    # The same of the volume server's control API.
    volume_url: str


class HostDaemon(TypedDict):
    """A daemon of a host."""

    # Whether that is another version than the controller's; `None` while it is not known.
    differs: NotRequired[Union[bool, None]]
    # Why it does not answer; `None`: it has answered just now.
    silent: NotRequired[Union[str, None]]
    # As the daemon last said it; `None`: not known, because the daemon does not say it, as older
    # ones, or was never heard.
    version: NotRequired[Union[DaemonVersion, None]]


class HostDrain(TypedDict):
    """How far the drain of a host is."""

    # `None` if it was not asked for: this says what would happen.
    asked: NotRequired[Union[Drain, None]]
    # What stays there, because nothing needs it elsewhere: replicas, and copies of images, in plain
    # words. Only in the answer to a request to drain.
    keeps: NotRequired[List[str]]
    # What is still there, in the order in which it leaves. Empty: the host is drained. `None`: this
    # controller has just been started, and has not looked yet.
    left: NotRequired[Union[List[DrainStep], None]]


class HostFound(TypedDict):
    """What a rented host has shown to be, whatever its offer says."""

    # Its CPUs.
    cpus: int
    # Whether its VMs can use KVM.
    kvm: bool
    # Its memory.
    memory_bytes: int


class HostLease(TypedDict):
    """That a rented host ends itself when its controller is not heard for too long, as its agent
    says.
    """

    # The command that ends the host.
    end: str
    # Was that command carried out? While the host still runs, it is repeated every 10 minutes.
    is_over: bool
    # How much of that was left when the agent reported.
    left_s: int
    # How long the controller may be silent.
    length_s: int


class HostMeasurement(TypedDict):
    """What was measured of one host."""

    # When it began; Unix time of the controller.
    begun_ms: int
    # Who has asked for it.
    by: str
    # Its own pool's disk, and volumes of other hosts.
    disks: List[DiskMeasurement]
    # When it ended; `None` while it is under way.
    ended_ms: NotRequired[Union[int, None]]
    # The host.
    host: HostId
    # What was rented, if the host was.
    kind: NotRequired[Union[RentedKind, None]]
    # For how long each figure was measured; seconds. A slow disk took longer.
    length_s: int
    # The links to other hosts.
    networks: List[NetworkFigures]
    # What is measured now; when it is over, why it ended before its end. Empty if there is nothing
    # to say.
    now: str
    # How far it is.
    state: MeasurementState


class HostNotice(TypedDict):
    """A provider's word that it will take the machine of a host back, as the machine itself has
    heard it.
    """

    # What becomes of the machine, in the provider's word: `terminate`, `stop` or `hibernate` on
    # EC2.
    action: str
    # When, in seconds since 1970.
    ends_unix_s: int


class HostPressure(TypedDict):
    """What the tasks of a host wait for, by the kernel's pressure stall information
    (/proc/pressure; Documentation/accounting/psi.rst). All of it is `None` where the kernel
    does not tell.
    """

    # Tasks that wait for a CPU.
    cpu: NotRequired[Union[Pressure, None]]
    # Tasks that wait for a disk.
    io: NotRequired[Union[Pressure, None]]
    # Tasks that wait for memory: for pages that were taken from them, or until others' pages are
    # written.
    memory: NotRequired[Union[Pressure, None]]


class HostRemoval(TypedDict):
    """What `host remove --force` gave up."""

    # Jobs that fail, because their VM or their data was there.
    failed_jobs: List[JobId]
    # Volumes that were moving away from it: what their new home had not copied yet is lost.
    incomplete_volumes: List[VolumeName]
    # Volumes whose home it was: their data is lost to the cluster.
    lost_volumes: List[VolumeName]
    # Jobs whose VM was on its way from or to it: each goes on where its VM is found to run, or is
    # treated as its `restart` says.
    moving_jobs: List[JobId]
    # Jobs that are placed again.
    placed_again: List[JobId]
    # Volumes that it had become the home of: each is what it was when its move began, at its old
    # home.
    returned_volumes: List[VolumeName]


class HostRevoked(TypedDict):
    """The answer to `POST /v1/hosts/{host}/revoke`."""

    # Whether a host with this name had joined. If not, its name may be wrong.
    was_enrolled: bool


class HostRules(TypedDict):
    """The rules of a VM, or of each VM of a job."""

    # It is at no host that has another VM of this group.
    apart: NotRequired[Union[GroupName, None]]
    # It is at one host with the other VMs of this group.
    together: NotRequired[Union[GroupName, None]]


class HostSeen(TypedDict):
    """How the controller sees a host."""

    # The controller's clock; Unix time.
    now_ms: int
    # The site where the host is, if it was there before; else the controller's own, or the only one
    # that there is. None: the cluster has none yet, or several.
    site: NotRequired[Union[SiteId, None]]
    # The sites that the cluster has.
    sites: List[SiteId]
    # The addresses to which the controller could not connect.
    unreached: List[Unreached]
    # The addresses to which it did not try to connect, because it does not know them as the host's.
    untried: NotRequired[List[str]]

# Whether a host's agent answers.
HostState = Literal["up", "unreachable"]


class HostUpgrade(TypedDict):
    """A host with its daemons."""

    # Its agent.
    agent: HostDaemon
    # The host.
    host: HostId
    # Its volume server.
    volume_server: HostDaemon


class HostWait(TypedDict):
    """When a job could start at a host that has no room for it now."""

    # Which host.
    host: HostId
    # The seconds until then; `None` if that is not known.
    wait: NotRequired[Union[Estimate, None]]
    # What it waits for, or why that is not known.
    why: str

# A format of disk images.
ImageFormat = Literal["raw", "qcow2", "vmdk", "vhdx", "vhd", "vdi"]

# The full name of a sealed layer: an imported image or a snapshot.
ImageName = str


class IoStats(TypedDict):
    """Counters of one export since the volume server started; they only grow.

    `busy_ns` is the time during which at least one request was in flight; with the sum of
    latencies it gives the mean queue depth while busy. The `network_*` half counts the same
    for requests this server sent to another host on behalf of the export.
    """

    # Time in which at least one request of a client was in flight.
    busy_ns: int
    # Writes refused because the session's epoch was not the volume's.
    fenced: int
    # Sum of their latencies.
    flush_ns: int
    # Flush requests.
    flushes: int
    # Time in which at least one of them was in flight.
    network_busy_ns: int
    # Data that they carried, before compression.
    network_bytes: int
    # Sum of their latencies.
    network_ns: int
    # Requests that were sent to another host.
    network_requests: int
    # How much of that data compression kept off the network.
    network_saved_bytes: int
    # Bytes that were read.
    read_bytes: int
    # Sum of the reads' latencies, from the request to its answer.
    read_ns: int
    # Read requests that were answered, with or without an error.
    reads: int
    # Reads of another host's volume that were answered from a replica or another layer here.
    replica_reads: int
    # Bytes that came with them; write-zeroes and trims carry none.
    write_bytes: int
    # Sum of their latencies.
    write_ns: int
    # Requests that change data: writes, write-zeroes and trims.
    writes: int


class Job(TypedDict):
    """A job as the API shows it."""

    # What it was predicted to cost, and what it cost; `None` if nobody has to be paid for it.
    cost: NotRequired[Union[JobCost, None]]
    # While its VM runs: what that uses of its vCPUs, as in `Vm`.
    cpu_time: NotRequired[Union[CpuAmount, None]]
    # What the code does not say of the command's end.
    end: NotRequired[Union[CommandEnd, None]]
    # When the job reached its last state; Unix time.
    ended_ms: NotRequired[Union[int, None]]
    # The code with which the command ended, 0 to 255.
    exit_code: NotRequired[Union[int, None]]
    # The last move of all VMs of a gang.
    gang_move: NotRequired[Union[GangMove, None]]
    # Where its VM is now.
    host: NotRequired[Union[HostId, None]]
    # Unique among all jobs that the controller ever had.
    id: JobId
    # How many files of its VM are not among them. `GET /v1/jobs/JOB/left-out` names them.
    left_out: int
    # From VM start to the command's end.
    measured_s: NotRequired[Union[float, None]]
    # The VMs of a gang, in the order of their ranks; empty for a job with one VM.
    members: List[Member]
    # While its VM runs: what that has of its memory, where it may have more or less.
    memory: NotRequired[Union[MemoryAmount, None]]
    # Every migration of its VM, in their order, failed ones too.
    migrations: List[Migration]
    # The processes that its guest's kernel has killed because no memory was left, if any.
    oom_kills: NotRequired[Union[OomKills, None]]
    # What it has in the repository; `None` until all of it is there, and after it was deleted.
    outputs: NotRequired[Union[JobOutputs, None]]
    # The planner's prediction for the way chosen at submission, from VM start to the command's end.
    predicted: NotRequired[Union[Estimate, None]]
    # While the command runs: when it ends, predicted anew from its progress and its figures.
    predicted_end: NotRequired[Union[PredictedEnd, None]]
    # What the command said last of its progress.
    progress: NotRequired[Union[Progress, None]]
    # While it is queued: its place among its tenant's jobs in the queue, from 1 on.
    queue_place: NotRequired[Union[int, None]]
    # Why it waits or failed, in plain words.
    reason: str
    # The command started.
    running_ms: NotRequired[Union[int, None]]
    # As it was submitted.
    spec: JobSpec
    # When the VM was started; Unix time.
    started_ms: NotRequired[Union[int, None]]
    # How far it is.
    state: JobState
    # Unix time.
    submitted_ms: int
    # Its VM, from placement on.
    vm: NotRequired[Union[VmId, None]]
    # What its VM, or the controller for it, waits for.
    waits: List[Waiting]


class JobCost(TypedDict):
    """What a job costs, as its record says it."""

    # As its plan said; its high end was reserved before its VM was asked for.
    predicted: MoneyRange
    # In millionths of a dollar; `None` before its end.
    spent_micros: NotRequired[Union[Money, None]]

# A job, `NAME-NNNN`: the full name of the job file's job and a number.
JobId = str


class JobMoveAsked(TypedDict):
    """A move of all VMs of a gang was asked for."""

    # Where each rank goes.
    hosts: List[HostId]
    # `GangMove::asked` of the move that carries it out.
    request: int


class JobOutputs(TypedDict):
    """A job's outputs in the repository."""

    # `repo://TENANT/PATH`, the directory in which they are.
    at: str
    # Their lengths together.
    bytes: int
    # How many files.
    files: int
    # When they will be deleted; Unix time. `None`: not by itself.
    kept_until_ms: NotRequired[Union[int, None]]


class Plan(TypedDict):
    """All that the planner weighed for one decision."""

    # Where what it knows of the job's work comes from.
    basis: Basis
    # The measurements used, in plain words with units ("RTT home1-cloud1 16.2 ms").
    figures: List[str]
    # Whether the chosen option moves a running VM or places it away from where it would start.
    moves: bool
    # The best first.
    options: List[PlanOption]


class NotConsidered(TypedDict):
    """What was not looked at for a job."""

    # The kind of machine; `None`: nothing of this provider.
    kind: NotRequired[Union[str, None]]
    # The provider's name in `providers.yaml`.
    provider: str
    # Whether the provider may take it back at any time.
    spot: bool
    # Why, in a few words.
    why: str


class RentOption(TypedDict):
    """One way to run a job at a host that would be rented for it."""

    # What it would cost if the host were rented for this job alone: from the request to the
    # command's end, with the host's whole disk.
    cost: OptionCost
    # What the fields below call the host, which is not there.
    host: HostId
    # The provider's name of the kind of machine.
    kind: str
    # Whether it keeps the budgets, and the job may run so.
    possible: bool
    # The expected seconds from the VM's start, part by part.
    predicted: Seconds
    # The provider's name in `providers.yaml`.
    provider: str
    # Why not, or how it differs from the way that was chosen.
    reason: str
    # The bytes that it would send between hosts; `None` if that is not known.
    shipped_bytes: NotRequired[Union[int, None]]
    # The site that such a host would belong to if nobody names one.
    site: SiteId
    # May the provider take the host back at any time?
    spot: bool
    # Their sum, and how far from it the truth may be.
    total: Estimate
    # Parts of it that are guessed.
    unknown: List[UnmeasuredPart]
    # The seconds from the request to the VM's start.
    wait: Estimate
    # How the job would get to its data.
    way: Way
    # The provider's name of the place: the cheapest one.
    zone: str


class JobPlan(Plan):
    """What a job would take and cost. It rents nothing: `plan` has the choice among the hosts
    that are there.
    """

    # What was not looked at, and why.
    not_considered: NotRequired[List[NotConsidered]]
    # The ways at hosts that could be rented, the soonest first: the best trades, the soonest one of
    # each way, and what is over a budget.
    rented: NotRequired[List[RentOption]]
    # Of those hosts, the ones that have no room for the job now, and when they do. The others have
    # room now.
    waits: NotRequired[List[HostWait]]


class JobSpec(TypedDict):
    """A job as it is submitted."""

    # The program and its arguments, run in `/job` as root; the program's name is looked up in
    # `PATH`. See `limits::COMMAND_BYTES`.
    command: List[str]
    # How many VMs it has (`gang`).
    count: NotRequired[int]
    # vCPUs of the VM, as many as `limits::CPUS` allows.
    cpus: int
    # The VM has so many vCPUs. While others want its host's CPUs, they have the part of `cpus` of
    # them; `None`: no more than `cpus`.
    cpus_max: NotRequired[Union[int, None]]
    # The environment of the command. A name has letters, digits and `_`, and no digit first.
    env: Dict[str, str]
    # What boots its root disk.
    firmware: NotRequired[Firmware]
    # `/output` in the VM is to have room for as much. Where `root_bytes` says nothing, the root
    # disk is so much larger than its image.
    has_output_room: NotRequired[bool]
    # What the root disk is a clone of.
    image: ImageName
    # SHA-256 of the list of its inputs (`inputs::InputList` in JSON), which is the file
    # `.inputs/SHA256` of the job's tenant in the data repository. Uploaded files that it names are
    # `.inputs/SHA256` too, each under its own hash.
    inputs: NotRequired[Union[str, None]]
    # After so many seconds from the job's end what it has in `jobs/JOB` is deleted; `None`: as the
    # controller is told, which keeps it until somebody deletes it.
    keep_outputs_s: NotRequired[Union[int, None]]
    # Whether the planner may migrate the running VM.
    may_migrate: bool
    # Memory of the VM, as much as `limits::MEMORY_BYTES` allows.
    memory_bytes: int
    # While it runs and its host and its tenant's quota have it, the VM gets up to so much memory;
    # `None`: no more than `memory_bytes`.
    memory_max_bytes: NotRequired[Union[int, None]]
    # What it may cost, and by when it is to end.
    money: NotRequired[MoneyRules]
    # Only the first of its VMs runs the command. The others are there, with an SSH server, until it
    # has ended.
    mpi: NotRequired[bool]
    # Jobs of one name, image, command and volumes share a history: the planner learns from it.
    name: str
    # Its VM's network card. A job with one uses no data that may not leave its site.
    network: NotRequired[str]
    # Whether it fails when one of its processes is killed because no memory is left.
    oom_kill: NotRequired[OomKill]
    # The size of the output disk: as much as the tar of all outputs can take.
    output_bytes: int
    # Files and directories in the VM that go into the repository at the end; none: `/output`. A
    # path is absolute, or relative to the job's directory, and may be a pattern with `*`, `?`,
    # `[…]` and `**`.
    outputs: List[str]
    # Where they go: `repo://TENANT/PATH` of the job's own tenant, or a path in its files; `None`:
    # `jobs/JOB`.
    outputs_to: NotRequired[Union[str, None]]
    # Who submitted it: the user, where a token says that. Tenants share the cluster equally, and
    # their users share their tenant's part.
    owner: NotRequired[str]
    # The higher, the sooner it starts; within a priority, owners take turns.
    priority: NotRequired[int]
    # Ports of its VM that are reached from outside, as `8080:80`, at the host that has its
    # network's gateway. The network has a way out.
    publish: NotRequired[List[str]]
    # Whether VMs of a job with several VMs may be at other sites than the confined data that they
    # use. They read the data there without keeping any, and say to each other what they say through
    # the encrypted tunnels between hosts.
    ranks: NotRequired[LeaveSite]
    # What becomes of it when its host is lost.
    restart: NotRequired[Restart]
    # The size of the root disk, at least the image's; `None`: the image's.
    root_bytes: NotRequired[Union[int, None]]
    # Beside which other VMs of its tenant its VMs are, and beside which never. Those of a job with
    # several ones keep the rules among themselves too.
    rules: NotRequired[HostRules]
    # Where the VM may start.
    start: Start
    # A process that is to end, for whatever reason, gets SIGTERM, and SIGKILL so many seconds
    # later.
    stop_grace_s: NotRequired[int]
    # The command is ended after so many seconds from its start, so without the VM's boot; `None`:
    # never.
    timeout_s: NotRequired[Union[int, None]]
    # Its VM has a TPM 2.0, which is new at each start and goes with the VM's disks.
    tpm: NotRequired[bool]
    # The job's data disks, at most `limits::JOB_VOLUMES`.
    volumes: List[JobVolume]
    # Whether what the job writes may leave the site of confined data that it uses. If not, its root
    # disk and its output are confined to that site.
    writes: NotRequired[LeaveSite]

# ```text queued -> staging -> starting -> running -> collecting -> succeeded | failed
# <-________\__________\__________/ (its host is gone: placed again)
# \_________\__________\__________\____________\-> failed | cancelled ```
JobState = Literal["queued", "staging", "starting", "running", "collecting", "succeeded", "failed", "cancelled"]


class JobVolume(TypedDict):
    """A volume that a job uses."""

    # Whether the job changes it.
    access: Access
    # Where the job finds it.
    mount: str
    # Which VMs of a job with several ones have it, by their ranks; empty: all of them. A volume
    # that is written is in one VM.
    ranks: NotRequired[List[int]]
    # The volume's name in the cluster. A job names each volume once.
    volume: VolumeName


class KeepRule(TypedDict):
    """For each of the last so many periods that have a backup, the newest one in it is kept."""

    # How many periods.
    count: int
    # What kind of period.
    unit: KeepUnit

# A period of the calendar, in UTC. A week begins on Monday.
KeepUnit = Literal["hour", "day", "week", "month", "year"]


class KeptDisk(TypedDict):
    """The disk of a rented host's pool, kept at the provider while no host is rented at its
    site.
    """

    # When the provider was asked for the snapshot; Unix time.
    asked_ms: NotRequired[Union[int, None]]
    # The size of the disk: what is reserved for, and what a disk made of the snapshot has at least.
    disk_bytes: int
    # When it was over; Unix time.
    ended_ms: NotRequired[Union[int, None]]
    # The host that had the disk.
    host: HostId
    # The rental whose disk it is; the tag `rental::RENTAL_TAG` of the snapshot.
    id: RentalId
    # The provider's id of the host's instance.
    instance: str
    # Since when the snapshot is complete; Unix time.
    kept_ms: NotRequired[Union[int, None]]
    # The price for each GiB and month when the provider was asked; nothing before.
    per_gib_month: Money
    # The provider's name in `providers.yaml`.
    provider: str
    # What the ledger has reserved for it. A record does not say it.
    reserved: NotRequired[Money]
    # What shipping the replicas again would cost. If keeping has cost as much, it ends.
    shipping: Money
    # The site of the host.
    site: SiteId
    # The provider's id of the snapshot; `None` while that is not known.
    snapshot: NotRequired[Union[str, None]]
    # What it has cost until now. A record does not say it until it is over.
    spent: NotRequired[Union[Money, None]]
    # How far it is.
    state: KeptState
    # What is paid for, as far as that is known.
    stored_bytes: int
    # The rental whose host has a disk made of the snapshot, or is about to. A record does not say
    # it.
    used_by: NotRequired[Union[RentalId, None]]
    # The volumes whose replicas are there.
    volumes: List[VolumeName]
    # Since when it is wanted; Unix time.
    wanted_ms: int
    # Why, or what it waits for; empty when there is nothing to say.
    why: str


class KeptReplica(TypedDict):
    """A replica whose host is given back, and whose disk is kept."""

    # What keeping the whole disk costs in a month.
    monthly: Money
    # The provider's name in `providers.yaml`.
    provider: str
    # Since when the snapshot is complete; Unix time. `None`: it is being made.
    since_ms: NotRequired[Union[int, None]]

# How far a kept disk is.
KeptState = Literal["wanted", "asked", "kept", "ending", "gone"]


class KnownPrice(TypedDict):
    """What is known of the prices at one place."""

    # The host, of an entry for one host, and of a rented one.
    host: NotRequired[Union[HostId, None]]
    # What counts now.
    price: Price
    # The site, of an entry for all of its hosts that have none of their own.
    site: NotRequired[Union[SiteId, None]]
    # What is not known, and why; empty if all is known.
    unknown: List[str]


class KnownPrices(TypedDict):
    """What is known of the prices: `GET /v1/prices`."""

    # The file; `None` if the controller was not told one: nothing but rented hosts costs anything
    # then.
    file: NotRequired[Union[str, None]]
    # One for each entry, sites first, and then one for each rented host that no entry is for.
    prices: List[KnownPrice]
    # Why the file as it is now can't be used; empty if it can. The last good one counts.
    problem: str

# The labels of a VM: a value for each key.
Labels = Dict[str, str]

# A layer's UUID: the same on every host that holds a copy of that sealed layer.
LayerId = str


class LearnedStart(TypedDict):
    """What was learned of the starts of a kind."""

    # The seconds from the request to the first job, or until the host joined, that are expected.
    expected_s: float
    # 9 of 10 starts take at most so many seconds.
    high_s: float
    # As in `rental::Offer::kind`.
    kind: str
    # The provider's name in `providers.yaml`.
    provider: str
    # From how many starts.
    starts: int
    # The mean seconds until the provider takes a spot host back; `None` if that was never seen.
    taken_back_every_s: NotRequired[Union[float, None]]

# Whether data may leave its site.
LeaveSite = Literal["allowed", "never"]


class LeaveSiteSet(TypedDict):
    """What a change of `LeaveSite` did."""

    # Volumes and images of this pool that have the same policy now, because they stand on these
    # layers: `volume NAME`, `image NAME`.
    also: List[str]
    # The policy before.
    before: LeaveSite
    # The layers that are marked now, or that are not marked any more.
    layers: List[LayerId]
    # The policy now.
    leave_site: LeaveSite
    # Volumes and images that share data with it and may still leave, because the shared data is not
    # confined.
    may_leave: List[str]


class LeftOut(TypedDict):
    """A file of a job that is not among its outputs in the repository."""

    # It had content, which is lost: the job has failed. Without: a device, a FIFO, a link that
    # leads nowhere and the like.
    is_lost: bool
    # Where it was in the guest. Bytes that are no UTF-8 are shown as `\xe9`.
    path: str
    # Why it was left out.
    why: str


class LeftOutFiles(TypedDict):
    """The files of a job's VM that are not among its outputs."""

    # By their paths. For a job with several VMs, `rank-N:` stands before them.
    files: List[LeftOut]
    # How many there are beside them.
    more: int

# What one VM of a job does when all of them move.
Leg = TypedDict(
    "Leg",
    {
        # The number of its last migration before the present direction was taken.
        "after": "int",
        # Where it was.
        "from": "HostId",
        # Where it goes. A VM that is there already stays.
        "to": "HostId",
    },
)



class LinkProbe(TypedDict):
    """A link as TCP sees it, measured from one agent to another."""

    # Of all TCP streams together, from the peer to the host that asked.
    rate_bytes_per_s: int
    # Median of several TCP connects.
    rtt_ms: float

# What was measured from one host to another.
Link = TypedDict(
    "Link",
    {
        # Block reads at `from` of an export whose home is `to`.
        "blocks": "NotRequired[Union[BlockProbe, None]]",
        # The host that measured.
        "from": "HostId",
        # When; Unix time of the controller.
        "measured_ms": "int",
        # Round trip and rate of TCP between the two agents.
        "probe": "LinkProbe",
        # The host that answered.
        "to": "HostId",
    },
)



class LoadNotKnown(TypedDict):
    """A host whose load is not known."""

    # Which host.
    host: HostId
    # What is not known, in plain words.
    why: str


class LogLine(TypedDict):
    """One line of a job's log."""

    # When its host's agent got it, by the controller's clock; 0 if that is not known.
    arrived_ms: int
    # The line goes on in the next one of this stream (and rank): it is longer than 8 KiB, or its
    # end had not come after a second.
    continues: NotRequired[bool]
    # Without the end of the line.
    line: str
    # Of a job with several VMs, where the lines of all are asked for: the rank of the VM that wrote
    # it.
    rank: NotRequired[Union[int, None]]
    # The number of the guest's message it came in: lines are in this order, with gaps.
    seq: int
    # Where the command wrote it.
    stream: LogStream
    # Since the guest booted.
    uptime_ms: int

# Which of its two outputs a command wrote to.
LogStream = Literal["stdout", "stderr"]


class LookForBackups(TypedDict):
    """Asks for the backups at a target."""

    # The target.
    at: BackupTarget
    # The host that looks; `None`: any, which is for S3 stores.
    host: NotRequired[Union[HostId, None]]
    # With whose key encrypted ones are read; `None`: of the tenant that may use the target, or else
    # of one's own. Another one than one's own is for admins.
    tenant: NotRequired[Union[TenantName, None]]


class MadeAccessToken(TypedDict):
    """A new token. It is shown this once."""

    # `https://HOST:PORT`, where other machines reach the controller, as far as the controller knows
    # it.
    controller_url: NotRequired[Union[str, None]]
    # Unix time.
    expires_ms: int
    # Of the cluster's authority: `perigee login` asks for it. None if the controller runs with
    # `--insecure`.
    fingerprint: NotRequired[Union[str, None]]
    # By which it is listed and revoked.
    id: str
    # The secret, in one word.
    token: str


class MadeToken(TypedDict):
    """The answer to `NewToken`."""

    # One word for `perigee host join`.
    token: str


class Me(TypedDict):
    """`GET /v1/me`: who asks, as the controller sees it."""

    # What it may do.
    role: Role
    # Whose things short names are.
    tenant: TenantName
    # `None` for an operator's certificate and for the controller's unix socket.
    user: NotRequired[Union[UserName, None]]


class MeasureHost(TypedDict):
    """Has a host measured."""

    # The other hosts. Default: another one of its site, and one of each other site.
    against: NotRequired[List[HostId]]
    # Also while VMs run there, which disturb the measurement and are disturbed by it.
    beside_vms: NotRequired[bool]
    # For how long each figure is measured; seconds. A slow disk takes longer.
    length_s: NotRequired[int]

# How far a measurement is.
MeasurementState = Literal["measuring", "done", "called_off"]


class Member(TypedDict):
    """One VM of a gang."""

    # Its address in the gang's network.
    address: NotRequired[Union[str, None]]
    # The code with which its command ended.
    exit_code: NotRequired[Union[int, None]]
    # Where its VM is now.
    host: NotRequired[Union[HostId, None]]
    # From 0 on.
    rank: int
    # Why it waits or failed, in plain words.
    reason: str
    # Bytes that it has sent to each rank over the gang's network, as last read. Empty if they were
    # not counted.
    sent_bytes: List[int]
    # How far it is.
    state: JobState
    # Its VM.
    vm: VmId


class MemoryAmount(TypedDict):
    """The memory of a VM that has more or less of it while it runs."""

    # What its guest has now; `None` if that is not known.
    has_bytes: NotRequired[Union[int, None]]
    # What it always has.
    least_bytes: int
    # What it may have.
    most_bytes: int
    # Why it has what it has, in plain words; empty until it was looked at.
    reason: str
    # What its guest's programs use of that; `None` if its guest does not say.
    used_bytes: NotRequired[Union[int, None]]


class MemoryUse(TypedDict):
    """What a VM's guest has of its host's memory, and does with it."""

    # How much of that its programs can still get without swapping (`MemAvailable` of the guest);
    # `None` if the guest has not said it lately.
    available_bytes: NotRequired[Union[int, None]]
    # What the guest has: all but what it has given back (`query-balloon`), and more where more than
    # that is in RAM.
    has_bytes: int

# One attempt to move a VM.
MigrationId = str


class Phases(TypedDict):
    """The phases of one migration, as far as it has come."""

    # While the guest stands still; filled in by the source's agent when it is over.
    pause: NotRequired[Union[Pause, None]]
    # Before the first byte of memory; filled in by the controller.
    prepare: NotRequired[Union[Prepare, None]]
    # In their order; at most `ROUNDS_MAX`.
    rounds: List[CopyRound]


class PredictedPhases(TypedDict):
    """How long the planner said that the phases would take."""

    # All rounds, with the last one, which is sent in the pause.
    copy_ms: int
    # The pause without that round.
    pause_ms: int
    # Until the first byte of memory is sent.
    prepare_ms: int

# ```text preparing -> copying -> switching -> completed \___________\___________\-> aborted (the VM
# runs at the source) ```
MigrationState = Literal["preparing", "copying", "switching", "completed", "aborted"]

# A virtual machine.
VmId = str

# What becomes of a VM's volumes when it moves.
VolumesOnMove = Literal["stay", "follow"]

# One attempt to move a VM, as the API shows it.
Migration = TypedDict(
    "Migration",
    {
        # Memory and device state sent so far.
        "bytes": "int",
        # Whether the memory is sent compressed. `Self::bytes` and the rates are those before
        # compression.
        "compressed": "bool",
        # How fast the guest changes its memory now.
        "dirty_bytes_per_s": "int",
        # How long the guest stood still: QEMU's figure, and the time until the destination's agent
        # let it run.
        "downtime_ms": "int",
        # When it completed or was aborted; Unix time.
        "ended_ms": "NotRequired[Union[int, None]]",
        # Why it was aborted; while it is under way, what hinders it.
        "error": "str",
        # The host it was at.
        "from": "HostId",
        # `VM-mN`: the VM's name and the migration's number, from 1.
        "id": "MigrationId",
        # The job's progress when the migration began, 0 to 1.
        "job_progress": "NotRequired[Union[float, None]]",
        # How long it still takes, with the wait for other moves; `None` if it is over, or if this
        # is not known.
        "left_ms": "NotRequired[Union[int, None]]",
        # The link to the destination, as last measured when the migration was asked for.
        "link": "NotRequired[Union[LinkProbe, None]]",
        # The rate that it may have on the link, because other VMs use their disks over it; `None`
        # if none do.
        "max_bytes_per_s": "NotRequired[Union[int, None]]",
        # Why the memory is sent in this way, with the times of the other ways.
        "mode_reason": "str",
        # The number of other VMs' moves over the same link that it waits for.
        "moves_ahead": "int",
        # Where the time went, as far as it has come.
        "phases": "Phases",
        # What makes up `predicted_total_ms`; `None` if it could not be predicted.
        "predicted_phases": "NotRequired[Union[PredictedPhases, None]]",
        # What the planner said that preparation, copying and pause would take; `None` if it could
        # not predict that.
        "predicted_total_ms": "NotRequired[Union[int, None]]",
        # How long the planner said that it would wait for other VMs' moves over the same link;
        # `None` if that was not known.
        "predicted_wait_ms": "NotRequired[Union[int, None]]",
        # How fast memory is sent now.
        "rate_bytes_per_s": "int",
        # Why the VM was moved.
        "reason": "str",
        # Memory that is not sent yet, the rate of sending, and how fast the guest changes its
        # memory.
        "remaining_bytes": "int",
        # When it was asked for; Unix time.
        "started_ms": "int",
        # How far it is.
        "state": "MigrationState",
        # For how many percent of the time the vCPUs are stopped while memory is copied, because the
        # VM would change more than half of what can be sent meanwhile; `None` if the VM is not
        # slowed down.
        "throttle_percent": "NotRequired[Union[int, None]]",
        # The host it moves to.
        "to": "HostId",
        # Preparation, copying and pause together, as far as it has come; without the wait.
        "total_ms": "int",
        # The VM that moves.
        "vm": "VmId",
        # Whether the volumes that the VM writes come after it.
        "volumes": "VolumesOnMove",
        # How long it waited for other VMs' moves.
        "waited_ms": "int",
    },
)


# An amount of money in millionths of a dollar.
Money = int


class MoneyRange(TypedDict):
    """An amount that is not known exactly. The truth is meant to be between `low` and `high` 9
    times of 10.
    """

    # The most likely amount, in millionths of a dollar.
    expected_micros: Money
    # The largest amount that is expected, in millionths of a dollar. This much is reserved.
    high_micros: Money
    # The least amount that is expected, in millionths of a dollar.
    low_micros: Money


class MoneyRules(TypedDict):
    """What a job's file says about money and about the time by which the job is to end. Without
    any of it the planner chooses by time alone.
    """

    # The most that the job may cost, in millionths of a dollar. It starts only where the high end
    # of its predicted price is not above that.
    budget_micros: NotRequired[Union[Money, None]]
    # By when it is to end, as `18:00` (the next such time after its submission, UTC) or `in 2h`. It
    # is not ended for being late.
    deadline: NotRequired[Union[str, None]]
    # What an hour until its end is worth, in millionths of a dollar: more is paid only for as much
    # time as is worth it.
    waiting_costs_per_hour_micros: NotRequired[Union[Money, None]]


class MoveJob(TypedDict):
    """Asks for a move of all VMs of a gang."""

    # They come although a replica of one is at the destination's site, and no other site has a copy
    # of it then.
    confirmed: NotRequired[bool]
    # Where to: a host for each rank, or one for all of them. Empty if a site is named.
    hosts: NotRequired[List[HostId]]
    # To this site, to whichever of its hosts have room.
    site: NotRequired[Union[SiteId, None]]
    # Whether the VMs' own disks and the volumes that they write come after them.
    volumes: NotRequired[VolumesOnMove]

# A move by itself whose gain is judged for some time.
MoveTrial = TypedDict(
    "MoveTrial",
    {
        # The host that the VM has left.
        "from": "HostId",
        # What being away from the old host has saved since, in seconds.
        "gained_s": "float",
        # For how many seconds it is judged still; 0 or less if that is over.
        "left_s": "float",
        # What the move was predicted to cost, in seconds.
        "price_s": "float",
    },
)



class MoveVm(TypedDict):
    """Asks for a migration."""

    # They come although a replica of one is at the destination's site, and no other site has a copy
    # of it then.
    confirmed: NotRequired[bool]
    # Where to.
    host: HostId
    # Whether the volumes that it writes come after it.
    volumes: NotRequired[VolumesOnMove]


class MoveVolume(TypedDict):
    """Asks for a volume's move."""

    # Move it even if the new home's site has its replica, and no other site has a copy of it then.
    confirmed: NotRequired[bool]
    # The new home.
    to: HostId

# A move of a VM.
Moved = TypedDict(
    "Moved",
    {
        # When it began, Unix time.
        "at_ms": "int",
        # From where.
        "from": "HostId",
        # Why, in plain words.
        "reason": "str",
        # How far it has come.
        "state": "MigrationState",
        # To where.
        "to": "HostId",
    },
)


# A group of hosts with fast links between them.
SiteId = str

# The link with another host, over the connections that hosts have with each other: HTTP, with TLS
# unless the cluster has none.
NetworkFigures = TypedDict(
    "NetworkFigures",
    {
        # From the other one, with one stream; bytes per second.
        "from_bytes_per_s": "NotRequired[Union[int, None]]",
        # From the other one, with `STREAMS` streams; bytes per second.
        "from_streams_bytes_per_s": "NotRequired[Union[int, None]]",
        # Why something of it was not measured; empty if all was.
        "problem": "str",
        # Median of several TCP connects; milliseconds.
        "rtt_ms": "NotRequired[Union[float, None]]",
        # Its site.
        "site": "SiteId",
        # From the host to the other one, with one stream; bytes per second.
        "to_bytes_per_s": "NotRequired[Union[int, None]]",
        # To the other one, with `STREAMS` streams; bytes per second.
        "to_streams_bytes_per_s": "NotRequired[Union[int, None]]",
        # The other host.
        "with": "HostId",
    },
)


# The full name of a network.
NetworkName = str


class NetworkVm(TypedDict):
    """A VM in a network."""

    # `None` before it is staged first.
    address: NotRequired[Union[str, None]]
    # Where it is now.
    host: NotRequired[Union[HostId, None]]
    # The same, of its card.
    mac: NotRequired[Union[str, None]]
    # Its ports that are reached at the gateway's host.
    publish: List[str]
    # The VM.
    vm: VmId


class NewAccessToken(TypedDict):
    """`POST /v1/tenants/{tenant}/users/{user}/tokens`: makes a token."""

    # How long it is good for; see `limits::ACCESS_TOKEN_S`.
    life_s: int


class NewBackup(TypedDict):
    """Asks for a backup of a volume, of a VM or of an image."""

    # It is encrypted at the target with the tenant's key. All backups at a target are, or none is.
    encrypted: NotRequired[bool]
    # The image.
    image: NotRequired[Union[ImageName, None]]
    # A directory of the home of each disk or of the host that has made the image, or an S3 store.
    to: BackupTarget
    # The VM, which has no job. It may run.
    vm: NotRequired[Union[VmId, None]]
    # The volume. It may be in use. Either this, a VM or an image is named.
    volume: NotRequired[Union[VolumeName, None]]
    # Also what the target has already is shipped, for example because it was damaged there.
    whole: NotRequired[bool]


class NewBackupSchedule(TypedDict):
    """Asks for backups of a volume, VM or image again and again. The same thing with the same
    target changes the schedule that is there.
    """

    # As in `backup::NewBackup`.
    encrypted: NotRequired[bool]
    # The time from one backup to the next, in seconds.
    every_s: int
    # The image: at each time the one that has this name then.
    image: NotRequired[Union[ImageName, None]]
    # Which complete backups of the schedule are kept, beside the newest one; none: all are.
    keep: NotRequired[List[KeepRule]]
    # As in `backup::NewBackup`.
    to: BackupTarget
    # The VM, which has no job. It may run.
    vm: NotRequired[Union[VmId, None]]
    # The volume. It may be in use. Either this, a VM or an image is named.
    volume: NotRequired[Union[VolumeName, None]]


class NewImage(TypedDict):
    """An image to be imported."""

    # The source's format. Default: it is found out.
    format: NotRequired[Union[ImageFormat, None]]
    # Where to import it first; every other host gets a copy. Default: any host.
    host: NotRequired[Union[HostId, None]]
    # Whether it may leave its site. If not, only hosts of the site get copies.
    leave_site: NotRequired[LeaveSite]
    # Must not stand for another image in the cluster.
    name: ImageName
    # What an upload to that host was answered with, or a path below a directory that its operator
    # allows for this (`--image-dir`).
    source: str


class NewNetwork(TypedDict):
    """`POST /v1/networks`"""

    # Unique in its tenant.
    name: NetworkName
    # Its VMs reach what its gateway's host reaches, but not the cluster's hosts.
    nat: NotRequired[bool]
    # Its addresses, private ones. Networks may have the same: they don't reach each other.
    subnet: str


class NewTenant(TypedDict):
    """`POST /v1/tenants`: makes a tenant."""

    # At most `limits::TENANT_NAME_BYTES` long.
    name: TenantName
    # The most that it may have.
    quota: NotRequired[Quota]


class NewToken(TypedDict):
    """`POST /v1/hosts/{host}/token`: asks for a token with which the host joins once."""

    # `https://HOST:PORT`, where the host reaches the controller. None: the address that the
    # controller knows of itself.
    controller_url: NotRequired[Union[str, None]]


class NewUser(TypedDict):
    """`PUT /v1/tenants/{tenant}/users/{user}`: adds a user, or changes its role."""

    # What it may do.
    role: Role


class NewVm(TypedDict):
    """A VM to be made, without a job."""

    # How cloud-init in its guest configures it.
    cloud_init: NotRequired[CloudInit]
    # vCPUs, as many as `limits::CPUS` allows.
    cpus: int
    # As `job::JobSpec::cpus_max`.
    cpus_max: NotRequired[Union[int, None]]
    # The size of its root disk, at least the image's; `None`: the image's.
    disk_bytes: NotRequired[Union[int, None]]
    # What boots its root disk.
    firmware: NotRequired[Firmware]
    # What its machine is to have.
    hardware: NotRequired[Hardware]
    # What its root disk is a clone of.
    image: ImageName
    # By which its makers find it again.
    labels: NotRequired[Labels]
    # Whether it moves by itself: away from an overloaded host or one that is drained, or to its
    # data. A person moves it either way.
    may_migrate: NotRequired[bool]
    # Memory, as much as `limits::MEMORY_BYTES` allows.
    memory_bytes: int
    # While it runs and its host and its tenant's quota have it, it gets up to so much memory;
    # `None`: no more than `memory_bytes`.
    memory_max_bytes: NotRequired[Union[int, None]]
    # Unique in the cluster.
    name: VmId
    # Its network card.
    network: NotRequired[str]
    # Its ports that are reached from outside, as `8080:80`, at the host that has its network's
    # gateway.
    publish: NotRequired[List[str]]
    # Whether it starts again elsewhere if its host does not answer any more and all its disks are
    # at other hosts.
    restart_elsewhere: NotRequired[bool]
    # Beside which other VMs of its tenant it is, and beside which never.
    rules: NotRequired[HostRules]
    # Where it may start.
    start: NotRequired[Start]
    # It is made and not started.
    stopped: NotRequired[bool]
    # Its other disks, in their order: `data0` and so on.
    volumes: NotRequired[List[NewVmVolume]]


class NewVmVolume(TypedDict):
    """A volume of a VM without a job."""

    # Where cloud-init mounts it; `None`: nowhere.
    mount: NotRequired[Union[str, None]]
    # The guest can't write it.
    read_only: NotRequired[bool]
    # The volume's name in the cluster.
    volume: VolumeName


class NewVolume(TypedDict):
    """A volume to be made."""

    # Its home; default: the source's home, else the host with the most room.
    host: NotRequired[Union[HostId, None]]
    # Whether it may leave its site. If its source may not, it may not either, whatever this says.
    leave_site: NotRequired[LeaveSite]
    # Unique in the cluster.
    name: VolumeName
    # At least the source's size, which is the default. See `limits::VOLUME_BYTES`.
    size_bytes: NotRequired[Union[int, None]]
    # What it starts with.
    source: VolumeSource


class Noise(TypedDict):
    """How much runs of the same job in the same placement differ from their own mean, as shares
    of it.
    """

    # Half of them differ by at most this share.
    median: float
    # 9 of 10 of them differ by at most this share.
    nine_of_ten: float
    # Runs that were compared.
    runs: int


class Offer(TypedDict):
    """One kind of machine that a provider has at one place, and its price."""

    # Its CPUs.
    cpus: int
    # The provider's name of the kind, such as `c8i.2xlarge`.
    kind: str
    # Can VMs on it use KVM? `None`: the provider does not say so, which is not a yes.
    kvm: NotRequired[Union[bool, None]]
    # Its memory.
    memory_bytes: int
    # What it costs.
    price: Price
    # May the provider take the machine back at any time, for a lower price?
    spot: bool
    # The provider's name of the place, such as `eu-central-1a`.
    zone: str


class OfferRefused(TypedDict):
    """What a provider has refused, and why."""

    # When; Unix time.
    at_ms: int
    # The CPUs of what was refused; 0: not known.
    cpus: NotRequired[int]
    # As in `Offer::kind`.
    kind: str
    # The quota of the account that is used up, if the provider can tell which other kinds count in
    # it: they are refused too, in all zones, if they have as many CPUs at least.
    quota: NotRequired[Union[str, None]]
    # As in `Offer::spot`.
    spot: bool
    # What the provider said.
    why: str
    # As in `Offer::zone`.
    zone: str

# What becomes of a job if the guest's kernel has killed one of its processes because no memory was
# left, and the command goes on without it.
OomKill = Literal["fail", "ignore"]


class OomKills(TypedDict):
    """Processes of a job that the guest's kernel has killed because no memory was left."""

    # The memory that all programs of the guest have together.
    memory_bytes: int
    # How many.
    processes: int


class OptionCost(TypedDict):
    """What one way to run a job would cost."""

    # No other option that is possible is both as soon and as cheap, and better in one of the two.
    is_best_trade: bool
    # What it is made of. What costs nothing is not among them.
    items: List[CostItem]
    # Their sum; `None` if one of them is not known.
    total: NotRequired[Union[MoneyRange, None]]

# A part of a job's time.
Part = Literal["boot", "cpu", "local_io", "network", "other", "migration"]


class Pause(TypedDict):
    """The parts of the pause, in the order in which they happen. Together they are the time in
    which the guest does not run.
    """

    # The destination's QEMU loads the state and says so.
    arrival_us: int
    # The state of the devices is saved and sent.
    device_us: int
    # The writer epochs are raised at the disks' homes, and QEMU is told to go on.
    epochs_us: int
    # Requests in flight end, and the disks are flushed.
    flush_us: int
    # The agent writes down that the switch begins.
    record_us: int
    # How much memory was left to send in the pause.
    remainder_bytes: int
    # The memory that was left to send. QEMU sends it in one go with the state of the devices, so
    # this is worked out from its bytes and the rate.
    remainder_us: int
    # The destination's agent stores that the VM is there and lets it run.
    resume_us: int

# Which of the hosts of a site that are as good for a VM gets it.
PlacePolicy = Literal["spread", "pack"]


class PlanOption(TypedDict):
    """One way to run the job, with its prediction."""

    # At most one option of a plan is.
    chosen: bool
    # What it would cost; `None` if no host that the plan knows costs anything.
    cost: NotRequired[Union[OptionCost, None]]
    # Where the VM ends: the same host, but for `migrate`.
    end: HostId
    # Where each of them ends, if that is another host for one of them.
    end_hosts: NotRequired[List[HostId]]
    # Of a job with several VMs: where each of them would start, in the order of their ranks.
    # `predicted` has the parts of the slowest one.
    hosts: NotRequired[List[HostId]]
    # How much longer it takes than the chosen option. What both have in common cancels out, so this
    # is known better than either total. None for the chosen one.
    longer: NotRequired[Union[Estimate, None]]
    # The expected seconds, part by part.
    predicted: Seconds
    # Why it was chosen, or why not.
    reason: str
    # The bytes that it would send between hosts; `None` if that is not known.
    shipped_bytes: NotRequired[Union[int, None]]
    # Where the VM would start.
    start: HostId
    # Their sum, and how far from it the truth may be.
    total: Estimate
    # Parts of it that are guessed.
    unknown: List[UnmeasuredPart]
    # How the job would get to its data.
    way: Way


class PredictedEnd(TypedDict):
    """When a running job's command is predicted to end, as its figures of this moment say."""

    # The seconds until then, if its VM and its data stay where they are, or where a migration takes
    # the VM; `None` if that is not known.
    left: NotRequired[Union[Estimate, None]]
    # What they are predicted from, or why they are not known, in plain words.
    why: str


class Prepare(TypedDict):
    """What is done before the first byte of memory is sent. The VM runs meanwhile."""

    # Making the disks reachable at the destination: so much longer than issuing the epochs, which
    # is done at the same time.
    attach_ms: int
    # From then until the source's QEMU was told to send.
    begin_ms: int
    # Issuing a new writer epoch for each disk, at the disks' homes.
    epochs_ms: int
    # From asking for the destination's QEMU until it listens.
    qemu_ms: int


class Pressure(TypedDict):
    """The pressure on one resource of a host."""

    # The time in which all tasks that had something to do waited for the resource; `None` where the
    # kernel does not tell. The kernel gives 0 for the CPU.
    full: NotRequired[Union[StalledTime, None]]
    # The time in which at least one task waited for the resource.
    some: StalledTime


class Price(TypedDict):
    """What a machine, its disk and its traffic cost. Each figure is `None` if it is not known,
    which a 0 is taken for: it is never free.
    """

    # When that was so, in seconds since 1970.
    as_of_unix_s: int
    # Its disk, in millionths of a dollar for each GiB and month (`MONTH_S`).
    disk_per_gib_month_micros: NotRequired[Union[int, None]]
    # What leaves the provider's site, in millionths of a dollar for each GiB.
    egress_per_gib_micros: NotRequired[Union[int, None]]
    # The least time that is paid for.
    minimum_s: int
    # The machine, in millionths of a dollar for an hour. An hour, because a cheap machine costs 3
    # millionths a second.
    per_hour_micros: NotRequired[Union[int, None]]
    # Who says so, as in `prices.yaml` or `ec2 spot history`.
    source: str


class Problem(TypedDict):
    """An error as users and programs see it."""

    # Programs go by this, people by the texts.
    kind: ProblemKind
    # What to do next; empty where there is nothing to say.
    next: NotRequired[str]
    # What could not be done.
    what: str
    # Why not.
    why: str

# The class of a problem; each has one HTTP status and one exit code.
ProblemKind = Literal["invalid", "forbidden", "not_found", "conflict", "no_space", "unavailable", "unsupported", "superseded", "internal"]


class Progress(TypedDict):
    """How far a command is, as it says itself."""

    # How many of `total` are done, in whatever the command counts.
    done: int
    # What the command does now, in its own words; may be empty.
    label: str
    # What `done` will be at the end; the command may correct it.
    total: int


class PromoteVolume(TypedDict):
    """Makes a replica the volume, because its home is lost."""

    # Call off a promotion that is not done, because its host does not answer. The volume stays what
    # it was.
    cancel: NotRequired[bool]
    # Only say what would be lost.
    dry_run: NotRequired[bool]
    # Do it although the home answers.
    force: NotRequired[bool]
    # The host whose replica is taken [default: the one with the newest].
    host: NotRequired[Union[HostId, None]]
    # The point of the replica that is taken, as a dry run has named it [default: the newest
    # complete one].
    layer: NotRequired[Union[LayerId, None]]

# A volume's full name, unique in the cluster. It is also the NBD export name.
VolumeName = str

# What a promotion does, or would do.
Promotion = TypedDict(
    "Promotion",
    {
        # How long that is before the home last answered. What a home that is cut off still takes is
        # lost too.
        "age_s": "int",
        # What was known to be written since, when the home last answered; `None` if that is not
        # known.
        "behind_bytes": "NotRequired[Union[int, None]]",
        # The home that is lost.
        "from": "HostId",
        # Whether the volume had sessions at its home when that last answered; `None` if that is not
        # known.
        "in_use": "NotRequired[Union[bool, None]]",
        # The point of the replica there.
        "layer": "LayerId",
        # How long ago the home last answered; 0 if it answers.
        "silent_s": "int",
        # Everything that was written after this is lost; Unix time.
        "taken_ms": "int",
        # The new home.
        "to": "HostId",
        # The volume.
        "volume": "VolumeName",
    },
)



class ProviderOffers(TypedDict):
    """`GET /v1/providers`: a provider and what it offers."""

    # What can be rented; `None` if the provider does not say.
    offers: NotRequired[Union[List[Offer], None]]
    # Why it does not; empty if it does.
    problem: str
    # Its name in `providers.yaml`.
    provider: str
    # What it has refused lately for want of capacity or quota.
    refused: List[OfferRefused]


class Quota(TypedDict):
    """The most that a tenant may have at the same time; `None`: as much as there is."""

    # Bytes that its backups hold at the targets that it may use.
    backup_bytes: NotRequired[Union[int, None]]
    # What its jobs may cost in a month (UTC), with what is reserved for those that have not ended,
    # in millionths of a dollar.
    budget_month_micros: NotRequired[Union[Money, None]]
    # Their vCPUs together.
    cpus: NotRequired[Union[int, None]]
    # Bytes of its files in the data repository.
    file_bytes: NotRequired[Union[int, None]]
    # These files and their directories; `None`: a million.
    files: NotRequired[Union[int, None]]
    # Their memory together.
    memory_bytes: NotRequired[Union[int, None]]
    # VMs of its jobs that have begun.
    vms: NotRequired[Union[int, None]]
    # The sizes of its volumes and images together, as a VM sees them.
    volume_bytes: NotRequired[Union[int, None]]


class RenewCertificate(TypedDict):
    """`POST /v1/hosts/{host}/certificate`: a host asks for another certificate, before its own
    one expires.
    """

    # The public half of the host's next key: a point of P-256 in hexadecimal.
    public_key: str

# What is decided about a host.
RentAction = Literal["rent", "keep", "give_back"]


class RentDecision(TypedDict):
    """A decision, with its figures."""

    # What is done.
    action: RentAction
    # When; Unix time.
    at_ms: int
    # Whether it was carried out, or would only be.
    done: bool
    # As in `rental::Offer::kind`.
    kind: str
    # The provider's name in `providers.yaml`.
    provider: str
    # The rental; `None` if a host would be rented.
    rental: NotRequired[Union[RentalId, None]]
    # For which jobs, of a host that is rented.
    rented_for: NotRequired[Union[RentedFor, None]]
    # As in `rental::Offer::spot`.
    spot: bool
    # The figures, in words.
    why: str
    # As in `rental::Offer::zone`.
    zone: str


class RentHost(TypedDict):
    """`POST /v1/rentals`: rents a host."""

    # Where the host reaches the controller, `https://HOST:PORT`; `None`: the address that the
    # controller knows of itself.
    controller_url: NotRequired[Union[str, None]]
    # The size of its disk; `None`: `RENT_DISK_DEFAULT_BYTES`.
    disk_bytes: NotRequired[Union[int, None]]
    # After so many seconds the host is given back; `None`: when somebody says so.
    for_s: NotRequired[Union[int, None]]
    # The id of the new rental, so that a request whose answer was lost can be repeated. `None`: the
    # controller makes one.
    id: NotRequired[Union[RentalId, None]]
    # The provider's name of the machine image; `None`: the one that `providers.yaml` names, or the
    # provider's own.
    image: NotRequired[Union[str, None]]
    # As in `Offer::kind`.
    kind: str
    # The provider's name in `providers.yaml`.
    provider: str
    # The site that the host belongs to; `None`: that of the provider's newest rental in the zone,
    # else the one with the zone's name if own hosts are there, else one with the provider's name.
    site: NotRequired[Union[SiteId, None]]
    # As in `Offer::spot`.
    spot: NotRequired[bool]
    # As in `Offer::zone`; `None`: where it is cheapest.
    zone: NotRequired[Union[str, None]]


class RentSettings(TypedDict):
    """What an admin has said."""

    # Whether the cluster rents by itself.
    mode: AutoMode
    # How many hosts may be rented at once, with those that people rent.
    most: int
    # What an hour of waiting costs a job whose file says nothing of money; `None`: such a job is no
    # reason to rent.
    waiting_costs_per_hour: NotRequired[Union[Money, None]]


class Rental(TypedDict):
    """A rented host."""

    # The instance's address inside the provider's network; `None` while that is not known.
    address: NotRequired[Union[str, None]]
    # When the provider was asked last; Unix time.
    asked_ms: NotRequired[Union[int, None]]
    # How often the provider was asked for it.
    asks: int
    # Who asked for it, as the audit log names them.
    by: str
    # The size of its disk.
    disk_bytes: int
    # Who or what has said so; `None` also for one that ended before this was recorded.
    ended_by: NotRequired[Union[EndedBy, None]]
    # Why it is to end, once that is so.
    ends_because: NotRequired[Union[str, None]]
    # When the first job ran there; Unix time.
    first_job_ms: NotRequired[Union[int, None]]
    # What its host has shown to be; `None` if it has not joined.
    found: NotRequired[Union[HostFound, None]]
    # The host's name in the cluster.
    host: HostId
    # The idempotency token of its requests, and the tag `RENTAL_TAG` of its instance.
    id: RentalId
    # The provider's name of the machine image; empty: the provider's own.
    image: str
    # The provider's id of its instance; `None` while that is not known.
    instance: NotRequired[Union[str, None]]
    # When its host was first seen in the cluster; Unix time.
    joined_ms: NotRequired[Union[int, None]]
    # What has left its site, as far as that was counted. A record does not say it.
    left_bytes: int
    # When the provider takes it back; Unix time.
    notice_ms: NotRequired[Union[int, None]]
    # What was rented, for the price that held then.
    offer: Offer
    # What it was predicted to cost when it was asked for; `None` if nobody said for how long it is
    # rented.
    predicted: NotRequired[Union[MoneyRange, None]]
    # The provider's name in `providers.yaml`.
    provider: str
    # Why the provider has refused it, if it did so for want of capacity or quota.
    refused: NotRequired[Union[OfferRefused, None]]
    # For which jobs the cluster has rented it by itself, and why; `None` if a person has rented it.
    rented_for: NotRequired[Union[RentedFor, None]]
    # What the requests to the provider may have made.
    requested: Requested
    # What the ledger has reserved for it in all: the most that it costs until
    # `Rental::reserved_until_ms`. A record does not say it.
    reserved: Money
    # Until when that is enough, if nothing more leaves its site; Unix time. A record does not say
    # it.
    reserved_until_ms: NotRequired[Union[int, None]]
    # The site that the host belongs to.
    site: SiteId
    # What its machine, its disk, and what has left its site have cost until now, by the price of
    # the offer; `None`: not known. If only the price of what has left is not known, this is the
    # rest: see `Rental::is_spent_at_least`. A record does not say it.
    spent: NotRequired[Union[Money, None]]
    # How far it is.
    state: RentalState
    # The states that it was in, the present one last.
    steps: List[RentalStep]
    # When it is given back; Unix time. `None`: when somebody says so.
    until_ms: NotRequired[Union[int, None]]
    # What it waits for, or why it ended; empty when there is nothing to say.
    why: str

# A rented host's rental.
RentalId = str

# How far a rental is.
RentalState = Literal["wanted", "asked", "starting", "joined", "draining", "ending", "gone"]


class RentalStep(TypedDict):
    """A rental in a state since when, and why."""

    # Since when; Unix time.
    at_ms: int
    # The state.
    state: RentalState
    # Why; empty where the state says all.
    why: str


class RentedFor(TypedDict):
    """For which jobs the rule has rented a host, and why."""

    # What the machine is expected to cost.
    costs: Money
    # The first ones of the jobs that are to run there.
    jobs: List[JobId]
    # How many those are.
    jobs_count: int
    # For so many seconds the machine is paid before more is reserved.
    reserve_s: int
    # What the whole queue's waiting and traffic cost less.
    saves: Money
    # The figures, in words.
    why: str


class RentedKind(TypedDict):
    """A kind of machine of a provider."""

    # Its name of the kind.
    kind: str
    # The provider's name.
    provider: str


class Renting(TypedDict):
    """`GET /v1/renting`: what an admin has said, and what the last look has decided."""

    # What of the budget for rented hosts nobody had reserved; `None` without a budget.
    budget_left: NotRequired[Union[Money, None]]
    # The decisions of the last look.
    decisions: List[RentDecision]
    # The last decisions that were carried out, and what would have been, the newest last: at most
    # 200.
    last: List[RentDecision]
    # When the cluster last looked; Unix time. `None` if it has not, or does not.
    looked_ms: NotRequired[Union[int, None]]
    # What is not known, and what is assumed instead.
    not_known: List[str]
    # Why no host is rented; empty if one is, or would be.
    nothing_because: str
    # What an admin has said.
    settings: RentSettings
    # What was learned of the kinds that were rented.
    starts: List[LearnedStart]


class Replica(TypedDict):
    """A volume's replica at a site, as the controller knows it."""

    # What was written to the volume since the newest complete point; `None` while that is not
    # known.
    behind_bytes: NotRequired[Union[int, None]]
    # When the volume was sealed for the newest complete point; Unix time. `None`: no round is
    # complete yet.
    complete_ms: NotRequired[Union[int, None]]
    # Seconds between two rounds.
    every_s: int
    # The host that has it.
    host: HostId
    # How many complete points are kept.
    keep: int
    # Its host is given back, and its disk is kept at the provider: no round is made meanwhile.
    kept: NotRequired[Union[KeptReplica, None]]
    # What the present round still has to ship; `None` while none is under way.
    missing_bytes: NotRequired[Union[int, None]]
    # The number of complete points.
    points: int
    # Why the last round failed, or what it waits for; empty when there is no trouble.
    problem: str
    # The site.
    site: SiteId
    # It is being dropped.
    stopping: bool
    # The volume.
    volume: VolumeName


class ReplicateImage(TypedDict):
    """Asks for copies of an image at a site."""

    # Each of its hosts that is up gets one.
    to: SiteId


class ReplicateVolume(TypedDict):
    """Asks for a replica of a volume at a site, or changes how it is made."""

    # Seconds between two rounds.
    every_s: int
    # How many complete points are kept.
    keep: int
    # Where the replica is to be.
    to: SiteId

# What the requests for an instance, all of them together, may have made.
Requested = Literal["nothing", "refused", "perhaps"]


class ResizeVm(TypedDict):
    """Another size for a VM."""

    # vCPUs; `None`: as many as before. While the VM runs they can only become more.
    cpus: NotRequired[Union[int, None]]
    # With `cpus`: as in `NewVm`. Such a range is given to a VM that is stopped.
    cpus_max: NotRequired[Union[int, None]]
    # The size of its root disk, which can only grow; `None`: as before.
    disk_bytes: NotRequired[Union[int, None]]
    # Memory; `None`: as much as before. While the VM runs it is at most what the VM was started
    # with.
    memory_bytes: NotRequired[Union[int, None]]
    # With `memory_bytes`: as in `NewVm`. Such a range is given to a VM that is stopped.
    memory_max_bytes: NotRequired[Union[int, None]]

# What becomes of a job whose host is gone after its VM was started.
Restart = Literal["never", "on_host_failure"]

# Asks for a new volume with what a backup has.
RestoreBackup = TypedDict(
    "RestoreBackup",
    {
        # Where the backup is; `None`: where the controller knows it.
        "from": "NotRequired[Union[BackupTarget, None]]",
        # Its home; `None`: the host that has shipped the backup, or for an S3 store the host with
        # the most room.
        "host": "NotRequired[Union[HostId, None]]",
        # The new volume.
        "volume": "VolumeName",
        # All bytes are read and checked before the volume is made. Otherwise the volume can be used
        # at once, and its bytes come afterwards: see `restoring` of the volume.
        "whole": "NotRequired[bool]",
    },
)


# Asks for a new image with what the backup of an image has. The image is there when all bytes were
# read and checked.
RestoreImageBackup = TypedDict(
    "RestoreImageBackup",
    {
        # Where the backup is; `None`: where the controller knows it.
        "from": "NotRequired[Union[BackupTarget, None]]",
        # The host that makes it; `None`: as for a volume.
        "host": "NotRequired[Union[HostId, None]]",
        # The new image.
        "image": "ImageName",
    },
)



class RestoreVm(TypedDict):
    """Makes the root disk of a VM that is off a clone of an image."""

    # For example a snapshot of this VM.
    image: ImageName

# Asks for a new VM with what the backup of a VM has.
RestoreVmBackup = TypedDict(
    "RestoreVmBackup",
    {
        # Where the backup is; `None`: where the controller knows it.
        "from": "NotRequired[Union[BackupTarget, None]]",
        # The home of its disks; `None`: as for a volume.
        "host": "NotRequired[Union[HostId, None]]",
        # The new VM.
        "vm": "VmId",
        # All bytes are read and checked before the VM is made. Otherwise the VM can be started at
        # once, and bytes of its disks come afterwards.
        "whole": "NotRequired[bool]",
    },
)



class Restoring(TypedDict):
    """A volume can be used, and bytes of it are still to come from a backup."""

    # The backup. It can't be deleted meanwhile.
    backup: BackupName
    # All bytes have come, except those that are damaged at the target. Reads of these give I/O
    # errors.
    is_damaged: bool
    # What is still to come.
    missing_bytes: int
    # Why nothing comes now; else empty.
    problem: str
    # What had to come.
    total_bytes: int

# What a user may do.
Role = Literal["member", "operator", "admin"]


class Running(TypedDict):
    """What a tenant's jobs, or one job, take of its quota."""

    # Their vCPUs together.
    cpus: int
    # Their memory together.
    memory_bytes: int
    # VMs.
    vms: int


class Sample(TypedDict):
    """One point of a job's time series.

    `io` and `vcpu_ms` are sums over the whole job, over all its disks and over all hosts it
    was on; they only grow. `io` counts at the volume server of the host where the VM is.
    """

    # Unix time.
    at_ms: int
    # Where the VM was.
    host: HostId
    # What its disks' clients asked for.
    io: IoStats
    # 0 to 1.
    progress: NotRequired[Union[float, None]]
    # CPU time of all its vCPUs.
    vcpu_ms: int

# A schedule of backups: the full name of what it is of, and a number if there are several.
ScheduleName = str


class Score(TypedDict):
    """How well the predictions with which jobs began came true."""

    # All of them together.
    all: ScoreOf
    # By what was chosen, and what the prediction rested on.
    by_option: List[ScoreOfOption]
    # Those of them that had several VMs.
    gangs: NotRequired[ScoreOf]
    # Of what the jobs that cost something were predicted to cost, against what was spent. Jobs that
    # began anew do not count.
    money: ScoreOf
    # How much equal runs differ: no prediction can be better. `None` if no job has run twice in one
    # placement.
    noise: NotRequired[Union[Noise, None]]
    # The same of rented hosts that are over, as they were predicted when they were asked for. Only
    # admins are told.
    rentals: ScoreOf


class ScoreOf(TypedDict):
    """How well some predictions came true: of the time of jobs, or of money, where what was
    spent stands for the measured time.
    """

    # Those of them whose time was in the stated range; the goal is 9 of 10.
    in_range: int
    # The mean of `Estimate::interval_score_s` as a share of the measured time: wide ranges count as
    # bad ones. None without jobs.
    interval_score: NotRequired[Union[float, None]]
    # Jobs that succeeded, or hosts that were given back.
    jobs: int
    # Of the differences between expected and measured time, as shares of the measured one. None
    # without jobs.
    median_error: NotRequired[Union[float, None]]
    # The widths of the ranges as shares of the measured times, in the median. None without jobs.
    median_width: NotRequired[Union[float, None]]
    # The difference that 9 of 10 of them do not exceed.
    nine_of_ten: NotRequired[Union[float, None]]

# How a job gets to its data.
Way = Literal["remote", "migrate", "follow", "copy", "replica", "beside"]


class ScoreOfOption(ScoreOf):
    """The score of the predictions of one kind."""

    # What the predictions rested on.
    basis: Basis
    # What was chosen.
    way: Way


class Seconds(TypedDict):
    """Where a time's seconds go. They add up to `total_s`."""

    # From VM start to the command's start.
    boot_s: float
    # vCPU time of the command.
    cpu_s: float
    # Waiting for blocks as if they were local.
    local_io_s: float
    # Slow-down and pause by the migration.
    migration_s: float
    # Waiting for the network on top of that.
    network_s: float
    # Waiting for anything else, as in the measured runs: the root disk, timers, the host's CPU.
    other_s: float
    # From VM start to the command's end: the sum of the others.
    total_s: float


class SetBackupKey(TypedDict):
    """`PUT /v1/tenants/{tenant}/backup-key`: the key with which the tenant's backups are
    encrypted.
    """

    # The key, as in a key file; `None`: a new one.
    key: NotRequired[Union[str, None]]


class SetBalance(TypedDict):
    """Sets the mode of a site."""

    # The new mode.
    mode: AutoMode


class SetLeaveSite(TypedDict):
    """Changes whether a volume or an image may leave its site, at its volume server."""

    # Confirms that data which was confined may leave from now on. It is needed for that only.
    confirmed: NotRequired[bool]
    # The policy from now on.
    leave_site: LeaveSite


class SetPlace(TypedDict):
    """Sets in which order the hosts of a site get VMs."""

    # From now on.
    place: PlacePolicy


class SetRenting(TypedDict):
    """`PUT /v1/renting`: what is left out stays as it is."""

    # Whether the cluster rents by itself.
    mode: NotRequired[Union[AutoMode, None]]
    # How many hosts may be rented at once.
    most: NotRequired[Union[int, None]]
    # What an hour of waiting costs a job whose file says nothing of money; 0: it is no reason to
    # rent.
    waiting_costs_per_hour: NotRequired[Union[Money, None]]


class SetSite(TypedDict):
    """`PUT /v1/hosts/{host}/site`: an admin says at which site a host is from now on."""

    # The host's agent has to say the same (`perigee agent run --site`).
    site: SiteId


class SetVm(TypedDict):
    """Says anew what was said of a VM when it was made; what is `None` stays as it is."""

    # As `NewVm::may_migrate`.
    may_migrate: NotRequired[Union[bool, None]]
    # As `NewVm::rules`. They hold at once and in place of all rules before, and no VM moves for
    # them.
    rules: NotRequired[Union[HostRules, None]]


class ShareImage(TypedDict):
    """`PUT /v1/images/{image}/shared`: whether every tenant may use an image."""

    # Whether they may.
    shared: bool


class Site(TypedDict):
    """Hosts with fast links between them."""

    # The hosts that registered with this site.
    hosts: List[HostId]
    # Unique in the cluster.
    id: SiteId
    # Which of these gets a VM, where several are as good for it.
    place: NotRequired[PlacePolicy]


class SiteBalance(TypedDict):
    """What the last look at the loads of a site has shown."""

    # When it looked last, Unix time; `None` if it has not looked since it was started, or since the
    # mode was set.
    looked_ms: NotRequired[Union[int, None]]
    # What the controller does there.
    mode: AutoMode
    # The hosts whose loads are not known. No VM comes to them or leaves them by itself.
    not_known: List[LoadNotKnown]
    # Which site.
    site: SiteId
    # The VMs that would lose less at another host, of the site or of another one that has their
    # data: those that move first.
    vms: List[VmBalance]


class Snapshot(TypedDict):
    """Seals the head under a name and puts a new head on it."""

    # The name to seal it under, unique in the pool.
    image: ImageName


class Spending(TypedDict):
    """What a tenant has spent in this month (UTC), and what is reserved beside that."""

    # For what has begun and is not settled, in millionths of a dollar.
    reserved_micros: Money
    # In millionths of a dollar.
    spent_micros: Money


class SshKey(TypedDict):
    """A user's SSH key."""

    # The id of the user's token with which it was added. It ends when that token is revoked.
    by_token: NotRequired[Union[str, None]]
    # Kind and key, as in an OpenSSH public key file, without the comment.
    key: str
    # Unique among the user's keys.
    name: UserName


class StalledTime(TypedDict):
    """A time in which tasks waited."""

    # As a share of the last 10 s, from 0 to 1. The kernel lets older times count less and less.
    share_10s: float
    # The same of the last 60 s.
    share_60s: float
    # Since the host's kernel started.
    total_us: int


class StartSite(TypedDict):
    """At whichever host of the site the planner predicts the earliest end."""

    # At whichever host of the site the planner predicts the earliest end.
    site: SiteId


class StartHost(TypedDict):
    """At this host and no other: the job waits until it has room."""

    # At this host and no other: the job waits until it has room.
    host: HostId

# Where the VM starts.
Start = Union[Literal["anywhere"], StartSite, StartHost]


class StopReplica(TypedDict):
    """Ends a replica and drops what it has."""

    # Where the replica is.
    to: SiteId


class StopVm(TypedDict):
    """Whether a stop asks the guest."""

    # The VM is stopped at once, as by a power cut. Otherwise the guest is asked to power off.
    force: NotRequired[bool]

# Why a command was stopped.
Stopped = Literal["timed_out", "cancelled"]


class Target(TypedDict):
    """Where a page of figures is, as Prometheus' HTTP service discovery wants it
    (<https://prometheus.io/docs/prometheus/latest/http_sd/>).
    """

    labels: Dict[str, str]
    targets: List[str]


class TaskFailure(TypedDict):
    """A round of a task that failed."""

    # When it ended. Unix time.
    at_ms: int
    # Why.
    why: str


class TaskStatus(TypedDict):
    """What an endless task of the controller did last. A task works in rounds, as long as the
    controller runs.
    """

    # When the round began that is under way; `None` between two rounds. Unix time.
    busy_since_ms: NotRequired[Union[int, None]]
    # What the last round did, in words; empty if it failed.
    did: str
    # When the last round ended; `None` before the first one has. Unix time.
    ended_ms: NotRequired[Union[int, None]]
    # Those that have failed, also by a panic.
    failures: int
    # The last round that failed, also if later ones did not.
    last_failure: NotRequired[Union[TaskFailure, None]]
    # What the task does.
    name: str
    # Why the last round failed; empty if it did not.
    problem: str
    # Rounds that have ended since the controller started.
    rounds: int
    # How long the last round took.
    took_ms: int


class Tenant(TypedDict):
    """A tenant, with what it may have and what it has."""

    # Bytes that its backups hold, as they were last counted at each target.
    backup_bytes: NotRequired[int]
    # Where its users may have backups made.
    backup_targets: NotRequired[List[BackupTarget]]
    # Bytes of its files in the data repository, with unfinished uploads.
    file_bytes: int
    # The number of these files and their directories.
    files: int
    # Unique in the cluster.
    name: TenantName
    # The most that it may have.
    quota: Quota
    # What its jobs use.
    running: Running
    # What it has spent in this month, and what is reserved.
    spending: NotRequired[Spending]
    # The number of its users.
    users: int
    # The sizes of its volumes and images together.
    volume_bytes: int


class TenantBackupKey(TypedDict):
    """A tenant's key for backups that are encrypted."""

    # The key, as in a key file.
    key: str
    # The tenant.
    tenant: TenantName


class TenantBackupTargets(TypedDict):
    """`PUT /v1/tenants/{tenant}/backup-targets`: where a tenant's users may have backups made.
    No other tenant's may be there.
    """

    # At most `limits::TENANT_BACKUP_TARGETS`.
    targets: List[BackupTarget]

# People who share their volumes, images, VMs and jobs, and whose space and share of the cluster are
# counted together.
TenantName = str

# Why the planner was asked.
Trigger = Literal["submitted", "time_lost", "asked", "drained", "balanced"]


class TunnelEnd(TypedDict):
    """One end of the tunnels between hosts, as its host says it."""

    # `IP:PORT` (UDP)
    endpoint: str
    # The largest packet of the host's interface with that address.
    mtu: int
    # WireGuard's, in base64.
    public_key: str


class Unknown(TypedDict):
    """Something that a host says it has, and that no record of the controller names there.
    Nothing is done with it until somebody says so.
    """

    # The data of a volume or an image.
    allocated_bytes: int
    # The host.
    host: HostId
    # What it is.
    kind: UnknownKind
    # Its name there.
    name: str
    # What can be done with it.
    next: str
    # A VM's memory, or the size of the disk that a client sees.
    size_bytes: int
    # What a VM does.
    status: NotRequired[Union[VmStatus, None]]
    # Why it is unknown.
    why: str

# What a host may have.
UnknownKind = Literal["vm", "volume", "image"]


class UnmeasuredPart(TypedDict):
    """A part that nothing was measured of yet: its seconds are a guess, and the range is wide."""

    # The part that is guessed.
    part: Part
    # What would have to be measured, in plain words.
    why: str


class Unreached(TypedDict):
    """An address to which the controller could not connect."""

    # One of those that were asked for.
    address: str
    # Why not.
    why: str


class Upgrade(TypedDict):
    """`GET /v1/upgrade`: where an upgrade of the cluster stands."""

    # Why the upgrade can't be ended now; empty if it can.
    blocks: List[str]
    # The version of the controller.
    controller: DaemonVersion
    # The format level in force.
    format_level: int
    # The level to which the end of the upgrade raises it: what is new in that level is held back
    # until then; `None`: nothing is held back.
    held_back_level: NotRequired[Union[int, None]]
    # Sorted by name.
    hosts: List[HostUpgrade]


class Upload(TypedDict):
    """A file that was uploaded."""

    # Its length.
    bytes: int
    # The host that has it. `None`: the volume server that answers.
    host: NotRequired[Union[HostId, None]]
    # The source of an image that is made of it, at this host. It is removed when the import has
    # ended, or after an hour without one.
    source: str


class User(TypedDict):
    """A user of a tenant."""

    # Unix time.
    created_ms: int
    # The SSH keys with which it logs in at the data repository.
    keys: List[SshKey]
    # Unique in the tenant.
    name: UserName
    # What it may do.
    role: Role
    # Its tenant.
    tenant: TenantName

# A person or program of a tenant.
UserName = str


class VcpuUse(TypedDict):
    """How many vCPUs had a CPU and how many waited for one, as means over the last minute: over
    the last 60 to 70 s, or since the QEMU started if that is shorter.
    """

    # vCPUs that ran on a CPU.
    running_vcpus: float
    # vCPUs that were ready to run and had no CPU. This is also the time lost, in seconds of vCPUs
    # for each second.
    waiting_vcpus: float


class VerifiedBackup(TypedDict):
    """A backup that was read."""

    # What is missing or damaged; none if the backup is sound.
    problems: List[str]
    # What was read.
    read_bytes: int


class Vm(TypedDict):
    """A VM as the API shows it."""

    # Its address in a network of its tenant, and the addresses that the guest says it has, if it
    # runs qemu-guest-agent; only in the answer for one VM.
    addresses: List[str]
    # What it uses of its vCPUs, where it has more of them than it always has the time of.
    cpu_time: NotRequired[Union[CpuAmount, None]]
    # Its vCPUs; where it may have more, those of which it always has the time.
    cpus: int
    # What makes such a VM as it is now, without the cloud-init data, which may have secrets; only
    # in the answer for one VM that lives without a job.
    declared: NotRequired[Union[NewVm, None]]
    # Where it is now; `None` for one that is stopped or waits for a host.
    host: NotRequired[Union[HostId, None]]
    # Unique in the cluster; a job's VM has the job's id for its name.
    id: VmId
    # The image of its root disk; `None` for one that the controller knows nothing of.
    image: NotRequired[Union[ImageName, None]]
    # What all its disks together were asked for at its present host, since its volume server was
    # started.
    io: IoStats
    # The job it runs; `None` for one that lives without a job.
    job: NotRequired[Union[JobId, None]]
    # As it was made with; none for a job's VM.
    labels: NotRequired[Labels]
    # What its vCPUs had of its host's CPUs, as last reported.
    load: VmLoad
    # When it was made: two VMs of one name, one after the other, differ in this. 0 for one that the
    # controller knows nothing of.
    made_ms: int
    # Whether it moves by itself; `None` for one that the controller knows nothing of.
    may_migrate: NotRequired[Union[bool, None]]
    # What it has of its memory, where it may have more or less; `None`: it has all.
    memory: NotRequired[Union[MemoryAmount, None]]
    # Its memory, as asked for; the least, where it may have more.
    memory_bytes: int
    # The migration that is under way, or its last one.
    migration: NotRequired[Union[MigrationId, None]]
    # As `Job::predicted_end` of its job.
    predicted_end: NotRequired[Union[PredictedEnd, None]]
    # Why the status is what it is, where that needs words.
    reason: str
    # Beside which other VMs of its tenant it is, and beside which never.
    rules: NotRequired[HostRules]
    # Which of its runs this is, from 0: it ends when the VM is off, also for a restart.
    run: int
    # What it does, as last heard.
    status: VmState
    # Since its present QEMU was started: a migration begins anew.
    uptime_ms: int
    # CPU time of all its vCPUs since its present QEMU was started.
    vcpu_ms: int
    # Its volumes, in the order of its disks.
    volumes: List[VmVolume]
    # What it waits for: its guest, or a part of it, stands still.
    waits: List[Waiting]


class VmBackup(TypedDict):
    """What the backup of a VM has, beside the bytes of its root disk."""

    # Its other disks, as far as they are in the backup.
    parts: List[VmBackupPart]
    # What makes such a VM.
    vm: NewVm


class VmBackupPart(TypedDict):
    """One of a VM's other disks: a volume that it writes, the variables of its firmware, or the
    state of its TPM.
    """

    # The backup of the volume, at the same target.
    backup: BackupName
    # The volume. One that is not among the VM's volumes is a disk of its own, and its name says
    # which (`VM-nvram`, `VM-tpm`).
    volume: VolumeName


class VmBalance(TypedDict):
    """A VM that would lose less elsewhere."""

    # Where the VM runs.
    host: HostId
    # Whether the VM moves there, or would with `AutoMode::On` at both hosts' sites.
    moves: bool
    # The saving in seconds at which the VM moves.
    needed_s: float
    # The figures in plain words.
    reason: str
    # What would have been saved there so far, in seconds: the VM's own and its neighbours'.
    saved_s: float
    # The host where it would lose least.
    to: HostId
    # Which VM.
    vm: VmId


class VmFigures(TypedDict):
    """What the last look has measured of a VM, and its accounts."""

    # The move whose gain was judged last.
    judged: NotRequired[Union[MoveTrial, None]]
    # What was measured; `None` if it was not looked at.
    measured: NotRequired[Union[VmMeasured, None]]
    # The last move, whose gain is being judged.
    on_trial: NotRequired[Union[MoveTrial, None]]
    # So many times its cost the next move must save: each move doubles that, and it halves with
    # time.
    price_factor: float
    # The other hosts that count for it, the best first.
    targets: List[BalanceTarget]


class VmLoad(TypedDict):
    """What a VM has of its host: its vCPU threads of the CPUs, and its guest of the memory."""

    # How fast its guest changed its memory in the second that was sampled last, once a minute,
    # rounded down to MiB. `None` until then, and while it moves or stands still.
    dirty_bytes_per_s: NotRequired[Union[int, None]]
    # The run delay of the vCPU thread that has most of it. The threads wait at the same time, so a
    # program in the guest has lost about this much.
    longest_run_delay_ms: NotRequired[Union[int, None]]
    # Of a VM that may have more or less memory while it runs: what it has. `None` also until its
    # QEMU has said it.
    memory: NotRequired[Union[MemoryUse, None]]
    # How long the vCPU threads were ready to run and had no CPU, all threads together, since this
    # QEMU started. This is the kernel's run delay (second field of /proc/PID/task/TID/schedstat;
    # Documentation/scheduler/sched-stats.rst).
    run_delay_ms: NotRequired[Union[int, None]]
    # What the vCPUs did in the last minute; `None` also in the first 10 s of a QEMU.
    vcpus_1m: NotRequired[Union[VcpuUse, None]]


class VmMeasured(TypedDict):
    """What was measured of a VM and its host, as means of a minute."""

    # The other hosts that have its data.
    data_at: List[HostId]
    # The share of its time that it lost to the network between itself and its data, 0 to 1; `None`
    # if that is not known.
    data_lost: NotRequired[Union[float, None]]
    # The host's CPUs.
    host_cpus: float
    # The share of the time in which something at the host waited for memory, 0 to 1; `None` if that
    # is not known.
    host_memory_stalled: NotRequired[Union[float, None]]
    # The CPUs that are wanted at the host, by the VM too; `None` if that is not known.
    host_wanted_cpus: NotRequired[Union[float, None]]
    # How many other VMs are at its host.
    neighbours: int
    # The CPUs that its vCPUs used; `None` if that is not known.
    used_cpus: NotRequired[Union[float, None]]
    # Its vCPUs that wanted a CPU and got none; `None` if that is not known.
    waited_cpus: NotRequired[Union[float, None]]


class VmStanding(TypedDict):
    """Where a VM stands: what it loses at its host, what it would have saved at others, and what
    comes next.
    """

    # What was measured, and its accounts.
    figures: VmFigures
    # Where it is; `None` for one that is off.
    host: NotRequired[Union[HostId, None]]
    # The job whose VM it is.
    job: NotRequired[Union[JobId, None]]
    # When it has looked there last, Unix time.
    looked_ms: NotRequired[Union[int, None]]
    # Whether the VM may move by itself.
    may_migrate: bool
    # What the controller does about overloaded hosts of the site.
    mode: NotRequired[Union[AutoMode, None]]
    # Its last moves, the newest first; at most `MOVES_SHOWN`.
    moves: List[Moved]
    # What would happen next, and why, in plain words.
    next: str
    # The host's site.
    site: NotRequired[Union[SiteId, None]]
    # Which VM.
    vm: VmId

# What a VM does, as people see it.
VmState = Literal["stopped", "waiting", "starting", "stopping", "incoming", "running", "paused", "io_error", "migrated", "shutdown", "gone"]

# What QEMU says of the VM; `Gone` when its process has ended.
VmStatus = Literal["starting", "incoming", "running", "paused", "io_error", "migrated", "shutdown", "gone"]


class VmVolume(TypedDict):
    """A volume of a VM."""

    # Whether it is still to come after its VM.
    follows: bool
    # Where its home is.
    home: HostId
    # Its last move, as far as it is known.
    last_move: NotRequired[Union[VolumeMove, None]]
    # The volume.
    volume: VolumeName


class VolumeMoveCauseFollows(TypedDict):
    """It comes after the VM that uses it."""

    # It comes after the VM that uses it.
    follows: VmId


class VolumeMoveCauseDrains(TypedDict):
    """Its home is drained."""

    # Its home is drained.
    drains: HostId

# Who wants a volume to move.
VolumeMoveCause = Union[Literal["asked"], VolumeMoveCauseFollows, VolumeMoveCauseDrains]

# How far a volume's move is.
VolumeMoveState = Literal["taking", "calling_off", "redirecting", "filling", "completed", "called_off", "lost"]

# A volume's move to another home.
VolumeMove = TypedDict(
    "VolumeMove",
    {
        # Who wants it.
        "cause": "VolumeMoveCause",
        # When it was over; Unix time.
        "ended_ms": "NotRequired[Union[int, None]]",
        # Its old home.
        "from": "HostId",
        # How long that still takes at the rate of the last seconds; `None` while it is not known.
        "left_ms": "NotRequired[Union[int, None]]",
        # The most that the new home still has to copy. The whole size counts until it is known
        # which parts hold data. `None` while nothing is known.
        "missing_bytes": "NotRequired[Union[int, None]]",
        # What it waits for, or why it was called off; empty when there is no trouble.
        "problem": "str",
        # When it was asked for; Unix time.
        "started_ms": "int",
        # How far it is.
        "state": "VolumeMoveState",
        # When the new home was known to have the volume; Unix time.
        "taken_ms": "NotRequired[Union[int, None]]",
        # Its new home.
        "to": "HostId",
        # The volume that moves.
        "volume": "VolumeName",
    },
)



class VolumeSourceImage(TypedDict):
    """A copy-on-write clone of an image or a snapshot in this pool."""

    # A copy-on-write clone of an image or a snapshot in this pool.
    image: ImageName


class VolumeSourceVolume(TypedDict):
    """A copy-on-write clone of another volume in this pool, as it is at this moment."""

    # A copy-on-write clone of another volume in this pool, as it is at this moment.
    volume: VolumeName


class VolumeSourceRemoteRemote(TypedDict):
    """A head over a remote parent: an NBD export of another host that nobody writes
    (`image:NAME`), read through and not kept.
    """

    # The export's name there.
    export: str
    # `HOST:PORT` of the other host's NBD server.
    nbd_addr: str


class VolumeSourceRemote(TypedDict):
    """A head over a remote parent: an NBD export of another host that nobody writes
    (`image:NAME`), read through and not kept.
    """

    # A head over a remote parent: an NBD export of another host that nobody writes (`image:NAME`),
    # read through and not kept.
    remote: VolumeSourceRemoteRemote

# What a new volume starts from.
VolumeSource = Union[Literal["empty"], VolumeSourceImage, VolumeSourceVolume, VolumeSourceRemote]

# The agent of a host does not answer the controller.
WaitsForAgent = TypedDict(
    "WaitsForAgent",
    {
        "for": "Literal['agent']",
        # The host.
        "host": "HostId",
    },
)


# The agent of a host was stopped in order. Its VMs go on.
WaitsForStoppedAgent = TypedDict(
    "WaitsForStoppedAgent",
    {
        "for": "Literal['stopped_agent']",
        # The host.
        "host": "HostId",
    },
)


# The volume server of a host does not answer: its VMs' disks stand still.
WaitsForVolumeServer = TypedDict(
    "WaitsForVolumeServer",
    {
        "for": "Literal['volume_server']",
        # The host.
        "host": "HostId",
    },
)


# The home of a volume does not answer the volume server of the VM's host.
WaitsForHome = TypedDict(
    "WaitsForHome",
    {
        "for": "Literal['home']",
        # The home's name; where that is not known, the address of its volume server.
        "home": "str",
        # The volume.
        "volume": "VolumeName",
    },
)


# A disk answers with an error. The guest stands still, and the disk is tried again and again.
WaitsForDisk = TypedDict(
    "WaitsForDisk",
    {
        "for": "Literal['disk']",
        # What failed.
        "why": "str",
    },
)


# QEMU does not answer the agent of its host.
WaitsForQemu = TypedDict(
    "WaitsForQemu",
    {
        "for": "Literal['qemu']",
    },
)


# What something waits for. It goes on by itself when that is there.
WaitsFor = Union[WaitsForAgent, WaitsForStoppedAgent, WaitsForVolumeServer, WaitsForHome, WaitsForDisk, WaitsForQemu]

# What something waits for, and from when on.
Waiting = Dict[str, Any]
