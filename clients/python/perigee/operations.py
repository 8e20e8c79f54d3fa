"""What can be asked for, one class for each kind of thing. Made by ./generate from the OpenAPI document; do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Optional
from urllib.parse import quote

from . import types

if TYPE_CHECKING:
    from .client import Client
    from .transport import Content, Stream


def _part(text: str) -> str:
    return quote(text, safe="~")


class Operations:
    """Asks through a client."""

    def __init__(self, client: Client) -> None:
        self._client = client


class Backups(Operations):
    """`/v1` of the API: backups."""

    def list_schedules(self) -> List[types.BackupSchedule]:
        """The schedules of backups."""
        return self._client._ask("GET", "/v1/backup-schedules")

    def set_schedule(self, body: types.NewBackupSchedule) -> types.BackupSchedule:
        """Backs up a volume, a VM or an image again and again, from now on; the answer comes at
        once. The same thing with the same target changes the schedule that is there.
        """
        return self._client._ask("POST", "/v1/backup-schedules", body=body)

    def end_schedule(self, schedule: str) -> None:
        """Ends a schedule. Its backups stay, and one that is under way goes on."""
        self._client._ask("DELETE", f"/v1/backup-schedules/{_part(schedule)}")

    def list(self) -> List[types.Backup]:
        """The backups that the controller knows, complete or not."""
        return self._client._ask("GET", "/v1/backups")

    def create(self, body: types.NewBackup, *, request_key: Optional[str] = None) -> types.Backup:
        """Begins a backup of a volume or of a VM, which may be in use, or of an image; the
        answer comes at once. Only what the target does not have is shipped.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/backups",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, backup: str) -> types.Backup:
        """A backup, with how far it is."""
        return self._client._ask("GET", f"/v1/backups/{_part(backup)}")

    def delete(self, backup: str, *, forget: Optional[bool] = None) -> None:
        """Deletes a backup, with what no other one at its target needs; the answer comes at
        once. With `forget` what is at the target stays.
        """
        self._client._ask("DELETE", f"/v1/backups/{_part(backup)}", query={"forget": forget})

    def restore(
        self,
        backup: str,
        body: types.RestoreBackup,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterVolume:
        """Makes a new volume of a backup. The answer comes when the volume is there. Bytes of
        the volume come afterwards, unless `whole` is asked for.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            f"/v1/backups/{_part(backup)}/restore",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def restore_image(
        self,
        backup: str,
        body: types.RestoreImageBackup,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterImage:
        """Makes a new image of the backup of an image. The image is there when all bytes were
        read and checked.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            f"/v1/backups/{_part(backup)}/restore-image",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def restore_vm(
        self,
        backup: str,
        body: types.RestoreVmBackup,
        *,
        request_key: Optional[str] = None,
    ) -> types.Vm:
        """Makes a new VM of a backup of one, which can be started. The answer comes when its
        disks are there. Their bytes come afterwards, unless `whole` is asked for.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            f"/v1/backups/{_part(backup)}/restore-vm",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def verify(self, backup: str, body: types.CheckBackup) -> types.VerifiedBackup:
        """Reads all of a backup, and says what is missing or damaged. Without a target in the
        request, where the controller knows the backup.
        """
        return self._client._ask("POST", f"/v1/backups/{_part(backup)}/verify", body=body)

    def look(self, body: types.LookForBackups) -> List[types.FoundBackup]:
        """The backups that a host finds at a target, also those that this controller does not
        know.
        """
        return self._client._ask("POST", "/v1/look-for-backups", body=body)


class Controller(Operations):
    """`/v1` of the API: controller."""

    def prices(self) -> types.KnownPrices:
        """What hosts, disks and traffic cost, as far as it is known, and what is not known and
        why. Hosts that are not named cost nothing, but for rented ones, which cost what their
        providers have said.
        """
        return self._client._ask("GET", "/v1/prices")

    def list(self) -> List[types.TaskStatus]:
        """What each endless task of the controller did last, when, how long that took, and at
        what it failed.
        """
        return self._client._ask("GET", "/v1/tasks")

    def upgrade_status(self) -> types.Upgrade:
        """The versions of the controller and of each host's daemons, which are asked for them
        now; what of an upgrade is held back, and why it can't be ended.
        """
        return self._client._ask("GET", "/v1/upgrade")

    def finish_upgrade(self, body: types.FinishUpgrade) -> types.Upgrade:
        """Ends an upgrade: from now on the controller may write what the version of before can't
        read. Refused while a daemon is older, off or of a version that is not known.
        """
        return self._client._ask("POST", "/v1/upgrade/finish", body=body)


class Hosts(Operations):
    """`/v1` of the API: hosts."""

    def balance(self) -> List[types.SiteBalance]:
        """Which VMs would lose less at another host of their site, why they move or stay, and
        which hosts' loads are not known.
        """
        return self._client._ask("GET", "/v1/balance")

    def enrol(self, body: types.Enrol) -> types.Enrolled:
        """Gives a host that has a token its first certificate."""
        return self._client._ask("POST", "/v1/enrol", body=body)

    def check_token(self, body: types.CheckToken) -> types.HostSeen:
        """Says to a host that has a token how the controller sees it. The token stays good."""
        return self._client._ask("POST", "/v1/enrol/check", body=body)

    def list(self) -> List[types.Host]:
        """The hosts, each with its state, its figures and its warnings."""
        return self._client._ask("GET", "/v1/hosts")

    def info(self, host: str) -> types.Host:
        """A host, with its state, its figures and its warnings."""
        return self._client._ask("GET", f"/v1/hosts/{_part(host)}")

    def register(self, host: str, body: types.HostAddresses) -> None:
        """Registers a host. The host repeats this every few seconds as a heartbeat."""
        self._client._ask("PUT", f"/v1/hosts/{_part(host)}", body=body)

    def remove(self, host: str, *, force: Optional[bool] = None) -> types.HostRemoval:
        """Removes a host that is unreachable. If volumes or VMs are lost with it, `force` is
        required.
        """
        return self._client._ask("DELETE", f"/v1/hosts/{_part(host)}", query={"force": force})

    def renew(self, host: str, body: types.RenewCertificate) -> types.Enrolled:
        """Gives a host its next certificate. Only the host itself may ask."""
        return self._client._ask("POST", f"/v1/hosts/{_part(host)}/certificate", body=body)

    def check(self, host: str, body: types.CheckHost) -> types.HostSeen:
        """Says to a host how the controller sees it. Only the host itself may ask."""
        return self._client._ask("POST", f"/v1/hosts/{_part(host)}/check", body=body)

    def drain(self, host: str, body: types.DrainHost) -> types.HostDrain:
        """Has a host drained: nothing new comes to it, and what it has moves away while it runs.
        Or only says what would happen. The answer comes at once; what is left is shown at the
        host.
        """
        return self._client._ask("POST", f"/v1/hosts/{_part(host)}/drain", body=body)

    def give_up(self, host: str) -> None:
        """After a restore of the controller: the host is not waited for any more. What it has
        since the backup is not known.
        """
        self._client._ask("POST", f"/v1/hosts/{_part(host)}/give-up")

    def measured(self, host: str) -> types.HostMeasurement:
        """The last measurement of a host, also while it is under way; of a host that was not
        measured, that of another one of its kind.
        """
        return self._client._ask("GET", f"/v1/hosts/{_part(host)}/measure")

    def measure(self, host: str, body: types.MeasureHost) -> types.HostMeasurement:
        """Has a host measured: its links, its pool's disk, and disks of other hosts. The answer
        comes at once.
        """
        return self._client._ask("POST", f"/v1/hosts/{_part(host)}/measure", body=body)

    def cancel_measurement(self, host: str) -> types.HostMeasurement:
        """Calls the measurement of a host off. What was measured is kept."""
        return self._client._ask("DELETE", f"/v1/hosts/{_part(host)}/measure")

    def metrics(self, host: str) -> str:
        """The figures of a host, its VMs and its volumes."""
        return self._client._ask_text("GET", f"/v1/hosts/{_part(host)}/metrics")

    def revoke(self, host: str) -> types.HostRevoked:
        """The certificates that the host has do not count any more."""
        return self._client._ask("POST", f"/v1/hosts/{_part(host)}/revoke")

    def shuts_down(self, host: str) -> None:
        """The machine is about to go down: what is there leaves first, as in a drain. It is
        called off when the host has booted again.
        """
        self._client._ask("POST", f"/v1/hosts/{_part(host)}/shuts-down")

    def set_site(self, host: str, body: types.SetSite) -> None:
        """Says at which site a host is from now on. Its agent has to say the same."""
        self._client._ask("PUT", f"/v1/hosts/{_part(host)}/site", body=body)

    def stops(self, host: str) -> None:
        """The host's agent stops in order, for an upgrade: its VMs go on, and no job is lost
        with it.
        """
        self._client._ask("POST", f"/v1/hosts/{_part(host)}/stops")

    def token(self, host: str, body: types.NewToken) -> types.MadeToken:
        """Makes a token with which the host joins the cluster. It is good for one time and one
        hour, and replaces an earlier one.
        """
        return self._client._ask("POST", f"/v1/hosts/{_part(host)}/token", body=body)

    def undrain(self, host: str) -> None:
        """Calls the drain of a host off. What has left stays where it is."""
        self._client._ask("POST", f"/v1/hosts/{_part(host)}/undrain")

    def targets(self) -> List[types.Target]:
        """The pages of the controller and of all hosts. Their address is the one that this
        request was sent to.
        """
        return self._client._ask("GET", "/v1/metrics/targets")

    def revoke_operators(self) -> None:
        """The certificates that operators have do not count any more."""
        self._client._ask("POST", "/v1/operators/revoke")

    def revoked(self, *, known: Optional[str] = None) -> Dict[str, int]:
        """For each identity whose certificates are revoked, the time in ms up to which they are;
        nothing if the list is the one that is `known`.
        """
        return self._client._ask("GET", "/v1/revoked", query={"known": known})

    def sites(self) -> List[types.Site]:
        """The sites, each with its hosts."""
        return self._client._ask("GET", "/v1/sites")

    def set_balance(self, site: str, body: types.SetBalance) -> types.SiteBalance:
        """Sets what is done about overloaded hosts of a site: nothing, advice, or moves."""
        return self._client._ask("PUT", f"/v1/sites/{_part(site)}/balance", body=body)

    def set_place(self, site: str, body: types.SetPlace) -> types.Site:
        """Says which of the hosts of a site that are as good for a VM gets it: the least busy
        one, or the fullest one.
        """
        return self._client._ask("PUT", f"/v1/sites/{_part(site)}/place", body=body)

    def unknown(self) -> List[types.Unknown]:
        """What hosts have and no record names there: VMs, volumes and images, with what can be
        done with each. Nothing is done by itself.
        """
        return self._client._ask("GET", "/v1/unknown")


class Images(Operations):
    """`/v1` of the API: images."""

    def list(self, *, all: Optional[bool] = None) -> List[types.ClusterImage]:
        """The images; with `all` also those that were made of jobs' inputs."""
        return self._client._ask("GET", "/v1/images", query={"all": all})

    def import_image(
        self,
        body: types.NewImage,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterImage:
        """Imports an image at one host. The other hosts get copies, which can be used at once
        and are completed in the background. `missing_bytes` is the number of bytes that are
        still missing in them.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/images",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, image: str) -> types.ClusterImage:
        """An image: the tenant's own of this name, or else the shared one. The answer has the
        hosts with a copy, and the bytes that copies lack.
        """
        return self._client._ask("GET", f"/v1/images/{_part(image)}")

    def delete(self, image: str) -> types.DeletedImage:
        """Frees an image's name at once, also of a snapshot of a volume that is in use. The
        answer says what stands on its layer: the layer is merged into that in the background,
        as soon as only one chain needs it.
        """
        return self._client._ask("DELETE", f"/v1/images/{_part(image)}")

    def adopt(self, image: str, body: types.AdoptVolume) -> types.ClusterImage:
        """Makes an image known that a host has and no record names."""
        return self._client._ask("POST", f"/v1/images/{_part(image)}/adopt", body=body)

    def set_leave_site(self, image: str, body: types.SetLeaveSite) -> types.LeaveSiteSet:
        """The same for an image."""
        return self._client._ask("PUT", f"/v1/images/{_part(image)}/leave-site", body=body)

    def replicate(self, image: str, body: types.ReplicateImage) -> types.ClusterImage:
        """Copies an image to all hosts of a site. The copies can be used at once, and get their
        blocks in the background.
        """
        return self._client._ask("POST", f"/v1/images/{_part(image)}/replicate", body=body)

    def share(self, image: str, body: types.ShareImage) -> types.ClusterImage:
        """Lets every tenant use an image of the tenant `default`, or ends that. A tenant's own
        image of the same name comes first. Jobs and volumes that use it already go on.
        """
        return self._client._ask("PUT", f"/v1/images/{_part(image)}/shared", body=body)

    def upload(self, content: Content, *, host: Optional[str] = None) -> types.Upload:
        """Takes a disk image's file, for an import. It goes to the host that is named, or to the
        one with the most free space; the answer says which. Import it there: the answer's
        `source` and `host` are fields of `NewImage`. It counts for the tenant's quota of
        volumes until an image is made of it, or for an hour.
        """
        return self._client._ask("POST", "/v1/uploads", content=content, query={"host": host})


class Jobs(Operations):
    """`/v1` of the API: jobs."""

    def list(self) -> List[types.Job]:
        """All jobs, the oldest first."""
        return self._client._ask("GET", "/v1/jobs")

    def submit_spec(self, body: types.JobSpec, *, request_key: Optional[str] = None) -> types.Job:
        """Submits a job. It is checked and recorded at once, and starts when the scheduler finds
        hosts for it. The job may also be a job file without inputs.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/jobs",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def plan(self, body: types.JobSpec) -> types.JobPlan:
        """Predicts the ways to run a job without running it, at the hosts that are there and at
        hosts that could be rented. Links that the plan needs are measured first. Nothing is
        rented. The job may also be a job file without inputs.
        """
        return self._client._ask("POST", "/v1/jobs/plan", body=body)

    def info(self, job: str, *, wait: Optional[str] = None) -> types.Job:
        """A job, with its state, its measured times, its migrations and, of a job with several
        VMs, its VMs. With `wait`, a duration such as `30s`, the answer comes when the job has
        ended or this time is over, whichever is first.
        """
        return self._client._ask("GET", f"/v1/jobs/{_part(job)}", query={"wait": wait})

    def delete(self, job: str, *, keep_outputs: Optional[bool] = None) -> None:
        """Deletes an ended job with its log, and what it has in `jobs/JOB` of the repository.
        What went to its `outputs-to` stays.
        """
        self._client._ask("DELETE", f"/v1/jobs/{_part(job)}", query={"keep_outputs": keep_outputs})

    def cancel(self, job: str, *, now: Optional[bool] = None) -> types.Job:
        """Cancels a job. The answer comes at once. A command that runs is ended, and the outputs
        that it has are fetched. After 5 minutes, or with `now` at once, the VM is stopped as
        it is, and started once more only to write what is on its disks. A second request with
        `now` ends the job without its outputs.
        """
        return self._client._ask("POST", f"/v1/jobs/{_part(job)}/cancel", query={"now": now})

    def decisions(self, job: str) -> List[types.Decision]:
        """The decisions about a job's placement and moves, the oldest first: the options, their
        predicted times, and why one was chosen.
        """
        return self._client._ask("GET", f"/v1/jobs/{_part(job)}/decisions")

    def left_out(self, job: str) -> types.LeftOutFiles:
        """The files of the job's VM that are not among its outputs, with the reasons."""
        return self._client._ask("GET", f"/v1/jobs/{_part(job)}/left-out")

    def log(
        self,
        job: str,
        *,
        after: Optional[int] = None,
        limit: Optional[int] = None,
        rank: Optional[int] = None,
        after_each: Optional[str] = None,
    ) -> List[types.LogLine]:
        """The first log lines with a number higher than `after`, at most `limit`. An empty
        answer means that there are no more. Only the end of a long log is kept; then the
        first line says how much is missing. Each VM of a job with several ones has a log:
        `rank` says which, and without it it is the first one's. With `after_each` it is the
        log of all of them, in the order in which their lines arrived, each line with its
        `rank`: it has the number of the last line that is known of each rank, separated by
        commas, and is empty at first.
        """
        return self._client._ask(
            "GET",
            f"/v1/jobs/{_part(job)}/log",
            query={"after": after, "limit": limit, "rank": rank, "after_each": after_each},
        )

    def move(self, job: str, body: types.MoveJob) -> types.JobMoveAsked:
        """Moves all VMs of a job with several ones while they run, or none: if one can't, those
        that were moved go back. The answer comes at once. `gang_move` of the job shows how
        far it is.
        """
        return self._client._ask("POST", f"/v1/jobs/{_part(job)}/move", body=body)

    def cancel_move(self, job: str) -> types.JobMoveAsked:
        """Calls such a move off: the VMs that were moved go back. The answer comes at once."""
        return self._client._ask("POST", f"/v1/jobs/{_part(job)}/move/cancel")

    def output(self, job: str) -> Stream:
        """The outputs of an ended job as a tar, made of its files in the repository."""
        return self._client._ask_stream("GET", f"/v1/jobs/{_part(job)}/output")

    def samples(self, job: str) -> List[types.Sample]:
        """The job's time series."""
        return self._client._ask("GET", f"/v1/jobs/{_part(job)}/samples")

    def score(self) -> types.Score:
        """Compares the predictions for all stored jobs with their measured times and with what
        was spent; for admins also those for rented hosts.
        """
        return self._client._ask("GET", "/v1/planner/score")


class Links(Operations):
    """`/v1` of the API: links."""

    def list(self) -> List[types.Link]:
        """The measurements of the links between hosts."""
        return self._client._ask("GET", "/v1/links")

    def probe(self) -> List[types.Link]:
        """Measures every ordered pair of sites now."""
        return self._client._ask("POST", "/v1/links/probe")


class Networks(Operations):
    """`/v1` of the API: networks."""

    def list(self) -> List[types.ClusterNetwork]:
        """The tenant's networks, with the VMs that the caller sees."""
        return self._client._ask("GET", "/v1/networks")

    def create(
        self,
        body: types.NewNetwork,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterNetwork:
        """Makes a network. VMs of the tenant can be in it, at whichever hosts they are.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/networks",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, network: str) -> types.ClusterNetwork:
        """A network, with those of its VMs that the caller sees."""
        return self._client._ask("GET", f"/v1/networks/{_part(network)}")

    def delete(self, network: str) -> None:
        """Deletes a network that no VM uses."""
        self._client._ask("DELETE", f"/v1/networks/{_part(network)}")


class Rentals(Operations):
    """`/v1` of the API: rentals."""

    def kept_disks(self) -> List[types.KeptDisk]:
        """The disks of rented hosts that are kept at their providers, because replicas are
        there, also those that were kept in the last month.
        """
        return self._client._ask("GET", "/v1/kept-disks")

    def offers(self) -> List[types.ProviderOffers]:
        """Who has machines for rent, for how much, and what was refused lately for want of
        capacity or quota.
        """
        return self._client._ask("GET", "/v1/providers")

    def list(self) -> List[types.Rental]:
        """The rented hosts, also those that were given back in the last month."""
        return self._client._ask("GET", "/v1/rentals")

    def rent(self, body: types.RentHost, *, request_key: Optional[str] = None) -> types.Rental:
        """Rents a host. The answer comes before the provider is asked; the rental shows what
        becomes of it. With the id of a rental that is known, the answer is that rental.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/rentals",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, rental: str) -> types.Rental:
        """A rented host: how far it is, since when and why, and what it costs."""
        return self._client._ask("GET", f"/v1/rentals/{_part(rental)}")

    def end(self, rental: str, body: types.EndRental) -> types.Rental:
        """Gives a rented host back: what it has leaves it first, or ends with it."""
        return self._client._ask("POST", f"/v1/rentals/{_part(rental)}/end", body=body)

    def show(self) -> types.Renting:
        """Whether the cluster rents hosts by itself, what the last look has decided or would do,
        and why.
        """
        return self._client._ask("GET", "/v1/renting")

    def set(self, body: types.SetRenting) -> types.Renting:
        """Sets whether the cluster rents hosts by itself, what waiting costs a job that does not
        say it, and how many hosts may be rented at once. What is left out stays as it is.
        """
        return self._client._ask("PUT", "/v1/renting", body=body)


class Tenants(Operations):
    """`/v1` of the API: tenants."""

    def audit(
        self,
        *,
        since_ms: Optional[int] = None,
        tenant: Optional[str] = None,
    ) -> List[types.AuditEntry]:
        """The last entries of a tenant's audit log, the oldest first, at most 1000. The log has
        what was asked for but reading, and what was refused, and keeps the newest 8 to 16
        MiB.
        """
        return self._client._ask("GET", "/v1/audit", query={"since_ms": since_ms, "tenant": tenant})

    def me(self) -> types.Me:
        """Who asks: the user of the token, or an admin."""
        return self._client._ask("GET", "/v1/me")

    def list(self) -> List[types.Tenant]:
        """The tenants, each with what it may use and what it uses."""
        return self._client._ask("GET", "/v1/tenants")

    def create(self, body: types.NewTenant, *, request_key: Optional[str] = None) -> types.Tenant:
        """Makes a tenant. It has no users yet.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/tenants",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, tenant: str) -> types.Tenant:
        """A tenant, with what it may use and what it uses."""
        return self._client._ask("GET", f"/v1/tenants/{_part(tenant)}")

    def delete(self, tenant: str) -> None:
        """Deletes a tenant that has no volumes, images and jobs any more, with its users."""
        self._client._ask("DELETE", f"/v1/tenants/{_part(tenant)}")

    def backup_key(self, tenant: str) -> types.TenantBackupKey:
        """A tenant's key, with which its backups are encrypted where that is asked for. Keep a
        copy where the loss of the cluster does not reach: nobody reads them without it.
        """
        return self._client._ask("GET", f"/v1/tenants/{_part(tenant)}/backup-key")

    def set_backup_key(self, tenant: str, body: types.SetBackupKey) -> types.TenantBackupKey:
        """Gives a tenant its key: a new one, or one that backups of another cluster were
        encrypted with. It is never changed.
        """
        return self._client._ask("PUT", f"/v1/tenants/{_part(tenant)}/backup-key", body=body)

    def set_backup_targets(self, tenant: str, body: types.TenantBackupTargets) -> types.Tenant:
        """Says where a tenant's users may have backups made. No backups of others may be there:
        those that the controller knows are named. What is at a target that is left out stays
        there, and counts no more.
        """
        return self._client._ask("PUT", f"/v1/tenants/{_part(tenant)}/backup-targets", body=body)

    def set_quota(self, tenant: str, body: types.Quota) -> types.Tenant:
        """Changes what a tenant may use. What it has already stays."""
        return self._client._ask("PUT", f"/v1/tenants/{_part(tenant)}/quota", body=body)

    def users(self, tenant: str) -> List[types.User]:
        """The users of a tenant, with their roles."""
        return self._client._ask("GET", f"/v1/tenants/{_part(tenant)}/users")

    def user(self, tenant: str, user: str) -> types.User:
        """A user, with its SSH keys."""
        return self._client._ask("GET", f"/v1/tenants/{_part(tenant)}/users/{_part(user)}")

    def put_user(self, tenant: str, user: str, body: types.NewUser) -> types.User:
        """Adds a user, or changes its role."""
        return self._client._ask(
            "PUT",
            f"/v1/tenants/{_part(tenant)}/users/{_part(user)}",
            body=body,
        )

    def remove_user(self, tenant: str, user: str) -> None:
        """Removes a user with its tokens and SSH keys. What it has made is its tenant's, and
        stays.
        """
        self._client._ask("DELETE", f"/v1/tenants/{_part(tenant)}/users/{_part(user)}")

    def put_key(self, tenant: str, user: str, body: types.SshKey) -> types.User:
        """Adds an SSH key. One of the same name is replaced."""
        return self._client._ask(
            "PUT",
            f"/v1/tenants/{_part(tenant)}/users/{_part(user)}/keys",
            body=body,
        )

    def remove_key(self, tenant: str, user: str, key: str) -> None:
        """Removes an SSH key."""
        self._client._ask(
            "DELETE",
            f"/v1/tenants/{_part(tenant)}/users/{_part(user)}/keys/{_part(key)}",
        )

    def tokens(self, tenant: str, user: str) -> List[types.AccessToken]:
        """A user's tokens, without their secrets."""
        return self._client._ask("GET", f"/v1/tenants/{_part(tenant)}/users/{_part(user)}/tokens")

    def make_token(
        self,
        tenant: str,
        user: str,
        body: types.NewAccessToken,
    ) -> types.MadeAccessToken:
        """Makes a token with which the user is known. It is shown this once. One that the user
        asks for with a token ends with that one at the latest.
        """
        return self._client._ask(
            "POST",
            f"/v1/tenants/{_part(tenant)}/users/{_part(user)}/tokens",
            body=body,
        )

    def revoke_token(self, tenant: str, user: str, token: str) -> None:
        """Revokes a token, and the tokens and SSH keys that the user has made with it."""
        self._client._ask(
            "DELETE",
            f"/v1/tenants/{_part(tenant)}/users/{_part(user)}/tokens/{_part(token)}",
        )


class Vms(Operations):
    """`/v1` of the API: vms."""

    def list(self) -> List[types.Vm]:
        """All VMs. A VM whose host does not answer is shown as it was last seen, with the
        reason.
        """
        return self._client._ask("GET", "/v1/vms")

    def create(self, body: types.NewVm, *, request_key: Optional[str] = None) -> types.Vm:
        """Makes a VM that lives without a job, and starts it unless it is to be stopped at
        first. The answer comes at once.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/vms",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, vm: str) -> types.Vm:
        """A VM, with its state and its addresses: of a running VM without a job those that its
        guest says, and before them the one that a network of the cluster has given it.
        """
        return self._client._ask("GET", f"/v1/vms/{_part(vm)}")

    def delete(self, vm: str, *, force: Optional[bool] = None) -> None:
        """Deletes a VM that lives without a job, and its own disks. The answer comes at once."""
        self._client._ask("DELETE", f"/v1/vms/{_part(vm)}", query={"force": force})

    def adopt(self, vm: str, body: types.AdoptVm) -> types.Vm:
        """Makes the record of a VM without a job that runs at a host and that no record names
        there: it goes on.
        """
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/adopt", body=body)

    def attach(self, vm: str, body: types.AttachVolume) -> types.Vm:
        """Gives a VM that lives without a job a further volume, also while it runs."""
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/attach", body=body)

    def balance(self, vm: str) -> types.VmStanding:
        """Where a VM stands: what it loses at its host, what it would have saved at others, its
        last moves, and what would happen next.
        """
        return self._client._ask("GET", f"/v1/vms/{_part(vm)}/balance")

    def console(self, vm: str) -> str:
        """The end of the serial console."""
        return self._client._ask_text("GET", f"/v1/vms/{_part(vm)}/console")

    def detach(self, vm: str, body: types.DetachVolume) -> types.Vm:
        """Takes a volume from a VM that lives without a job. While it runs its guest has to let
        the volume go. The volume stays.
        """
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/detach", body=body)

    def end_unknown(self, vm: str, body: types.EndUnknownVm) -> None:
        """Ends a VM that a host has and no record names there: its guest is asked to power off,
        or it is ended at once. One that is off is removed. Its disks stay.
        """
        self._client._ask("POST", f"/v1/vms/{_part(vm)}/end-unknown", body=body)

    def exec_status(self, vm: str, *, pid: int) -> types.ExecStatus:
        """How far such a program is, and what it has printed. It is told once that it has ended."""
        return self._client._ask("GET", f"/v1/vms/{_part(vm)}/exec", query={"pid": pid})

    def exec(self, vm: str, body: types.ExecInVm) -> types.ExecBegun:
        """Starts a program in a VM that lives without a job, as root. The guest has to run qemu-
        guest-agent.
        """
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/exec", body=body)

    def exec_end(self, vm: str, *, pid: int) -> types.ExecStatus:
        """Ends such a program, with all that it has started: it is asked to, and killed when it
        does not follow within seconds. Says what it has printed.
        """
        return self._client._ask("DELETE", f"/v1/vms/{_part(vm)}/exec", query={"pid": pid})

    def read_file(self, vm: str, *, path: str) -> Stream:
        """Reads a file in the guest of a VM that lives without a job. The guest has to run qemu-
        guest-agent.
        """
        return self._client._ask_stream("GET", f"/v1/vms/{_part(vm)}/file", query={"path": path})

    def write_file(self, vm: str, content: Content, *, path: str) -> types.CopiedFile:
        """Writes a file in the guest of a VM that lives without a job, also in the place of one
        that is there.
        """
        return self._client._ask(
            "PUT",
            f"/v1/vms/{_part(vm)}/file",
            content=content,
            query={"path": path},
        )

    def migrations(self, vm: str) -> List[types.Migration]:
        """A VM's migrations with their phases, the oldest first."""
        return self._client._ask("GET", f"/v1/vms/{_part(vm)}/migrations")

    def move(self, vm: str, body: types.MoveVm) -> types.Migration:
        """Starts a live migration. The answer comes at once."""
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/move", body=body)

    def cancel_move(self, vm: str) -> types.Migration:
        """Cancels a live migration that is running. The answer comes at once."""
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/move/cancel")

    def resize(self, vm: str, body: types.ResizeVm) -> types.Vm:
        """Gives a VM other numbers of CPUs, another amount of memory, or a larger root disk.
        While it runs it can get more vCPUs, a larger disk, and give memory back; `reason`
        says what the guest has not done for that.
        """
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/resize", body=body)

    def restart(self, vm: str, body: types.StopVm) -> types.Vm:
        """Stops a VM that lives without a job, and starts it again. The answer comes at once."""
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/restart", body=body)

    def restore(self, vm: str, body: types.RestoreVm) -> types.Vm:
        """Makes the root disk of a VM that is off a clone of an image; what was on it is lost.
        It is made when the VM starts next.
        """
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/restore", body=body)

    def set(self, vm: str, body: types.SetVm) -> types.Vm:
        """Says anew whether a VM that lives without a job moves by itself, and beside which
        other VMs of its tenant it is or never is, also while it runs.
        """
        return self._client._ask("PUT", f"/v1/vms/{_part(vm)}/set", body=body)

    def snapshot(
        self,
        vm: str,
        body: types.Snapshot,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterImage:
        """Makes an image of the root disk of a VM that lives without a job, also while it runs.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            f"/v1/vms/{_part(vm)}/snapshot",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def start(self, vm: str) -> types.Vm:
        """Starts a VM that lives without a job. The answer comes at once; one that runs already
        goes on.
        """
        return self._client._ask("POST", f"/v1/vms/{_part(vm)}/start")

    def stop(self, vm: str, body: types.StopVm) -> None:
        """Stops a VM, which keeps its disks. Its guest is asked to power off, unless `force` is
        said. A job's VM is stopped at once, and its job fails. The answer comes at once.
        """
        self._client._ask("POST", f"/v1/vms/{_part(vm)}/stop", body=body)


class Volumes(Operations):
    """`/v1` of the API: volumes."""

    def list(self) -> List[types.ClusterVolume]:
        """The volumes that the caller sees, with their homes and replicas. The figures of a home
        that does not answer are its last ones.
        """
        return self._client._ask("GET", "/v1/volumes")

    def create(
        self,
        body: types.NewVolume,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterVolume:
        """Makes a volume: empty, a clone of an image or of another volume, or, for an admin, a
        volume of another host's export. It can be used at once.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            "/v1/volumes",
            body=body,
            creates=True,
            request_key=request_key,
        )

    def info(self, volume: str) -> types.ClusterVolume:
        """A volume, with its home, its replicas and its size."""
        return self._client._ask("GET", f"/v1/volumes/{_part(volume)}")

    def delete(self, volume: str) -> None:
        """Deletes a volume and its data. Refused while a job or VM uses it, while it moves, and
        while it has a replica.
        """
        self._client._ask("DELETE", f"/v1/volumes/{_part(volume)}")

    def adopt(self, volume: str, body: types.AdoptVolume) -> types.ClusterVolume:
        """Makes a volume known that was made at a host without the controller. A host that
        reports a volume does not do that by itself.
        """
        return self._client._ask("POST", f"/v1/volumes/{_part(volume)}/adopt", body=body)

    def set_leave_site(self, volume: str, body: types.SetLeaveSite) -> types.LeaveSiteSet:
        """Changes whether a volume may leave its site. `never` is refused while other sites have
        copies; `allowed` has to be confirmed.
        """
        return self._client._ask("PUT", f"/v1/volumes/{_part(volume)}/leave-site", body=body)

    def last_move(self, volume: str) -> types.VolumeMove:
        """The volume's last move, ended or not."""
        return self._client._ask("GET", f"/v1/volumes/{_part(volume)}/move")

    def move(self, volume: str, body: types.MoveVolume) -> types.VolumeMove:
        """Moves a volume to another home, also while it is in use; the answer comes at once. The
        volume is used at its new home as soon as that has taken it; what it holds is copied
        in the background.
        """
        return self._client._ask("POST", f"/v1/volumes/{_part(volume)}/move", body=body)

    def cancel_move(self, volume: str) -> types.VolumeMove:
        """Calls off a volume's move while the new home has not taken the volume; the answer
        comes at once.
        """
        return self._client._ask("POST", f"/v1/volumes/{_part(volume)}/move/cancel")

    def promote(self, volume: str, body: types.PromoteVolume) -> types.Promotion:
        """Makes the newest complete replica the volume, because the volume's home is lost. What
        was written since then is lost.
        """
        return self._client._ask("POST", f"/v1/volumes/{_part(volume)}/promote", body=body)

    def replicate(self, volume: str, body: types.ReplicateVolume) -> types.Replica:
        """Keeps a replica of a volume at another site, or changes how often it is made; the
        answer comes at once.
        """
        return self._client._ask("POST", f"/v1/volumes/{_part(volume)}/replicas", body=body)

    def stop_replica(self, volume: str, body: types.StopReplica) -> types.Replica:
        """Ends a replica. The answer comes at once; the replica's data is dropped in the
        background.
        """
        return self._client._ask("POST", f"/v1/volumes/{_part(volume)}/replicas/stop", body=body)

    def snapshot(
        self,
        volume: str,
        body: types.Snapshot,
        *,
        request_key: Optional[str] = None,
    ) -> types.ClusterImage:
        """Seals the current content of a volume under an image's name, at the volume's home.

        A lost answer is asked for again, with the same key: one thing is made.
        """
        return self._client._ask(
            "POST",
            f"/v1/volumes/{_part(volume)}/snapshot",
            body=body,
            creates=True,
            request_key=request_key,
        )
