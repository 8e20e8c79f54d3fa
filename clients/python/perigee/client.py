"""A cluster's controller, and what is pleasant to do with it."""

from __future__ import annotations

import json
import os
import re
import tarfile
import time
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Union

from . import operations, types
from .problem import Gone, Problem
from .transport import Content, Stream, Transport, default_login

DEFAULT_ADDRESS = "unix:/run/perigee/controller.sock"
PAUSE_S = 0.5
# Since 3.11.4; Debian 12 has 3.11.2.
HAS_FILTER = hasattr(tarfile, "data_filter")
# Where `perigee controller init` puts an operator's certificate.
OPERATOR = "/etc/perigee/operator"
# As long as one request may wait for the end of a job.
WAIT_S = 30
FINAL = ("succeeded", "failed", "cancelled")

# A job file as text, as a file, or as a dictionary with its fields.
JobFile = Union[str, Path, Mapping[str, Any]]


class Client:
    """Asks one controller.

    Without an address, the client asks where `perigee` would: at PERIGEE_API, else where `perigee login` has logged in, else at the
    socket of this machine's controller. An address is `unix:PATH` or `https://HOST:PORT`. An https address needs either
    `fingerprint` (of the cluster's authority) and `token`, or `operator`, the directory with an operator's certificate.

    A request that changes nothing, and one that creates something, is sent again for `patience_s` when its answer is lost. A creation has a
    key of its own, so that only one thing is made.
    """

    def __init__(
        self,
        address: Optional[str] = None,
        *,
        token: Optional[str] = None,
        fingerprint: Optional[str] = None,
        operator: Union[str, Path, None] = None,
        timeout_s: float = 120.0,
        patience_s: float = 60.0,
    ) -> None:
        address = address or os.environ.get("PERIGEE_API")
        kept = default_login() if token is None and operator is None and fingerprint is None else None
        if kept and address in (None, kept["controller"]):
            address, token, fingerprint = kept["controller"], kept["token"], kept["fingerprint"]
        if (address or "").startswith("https:") and fingerprint is None and operator is None:
            given = os.environ.get("PERIGEE_OPERATOR")
            operator = given or (OPERATOR if os.path.isdir(OPERATOR) else None)
        self.transport = Transport(
            address or DEFAULT_ADDRESS, token, fingerprint, Path(operator) if operator is not None else None, timeout_s
        )
        self.patience_s = patience_s
        self.backups = operations.Backups(self)
        self.controller = operations.Controller(self)
        self.hosts = operations.Hosts(self)
        self.images = Images(self)
        self.jobs = Jobs(self)
        self.links = operations.Links(self)
        self.networks = operations.Networks(self)
        self.rentals = operations.Rentals(self)
        self.tenants = operations.Tenants(self)
        self.vms = Vms(self)
        self.volumes = operations.Volumes(self)

    def _ask(self, method: str, path: str, **how: Any) -> Any:
        """The answer, as JSON."""
        body = self._whole(method, path, **how)
        return json.loads(body) if body else None

    def _ask_text(self, method: str, path: str, **how: Any) -> str:
        return self._whole(method, path, **how).decode(errors="replace")

    def _whole(self, method: str, path: str, **how: Any) -> bytes:
        if how.get("creates"):
            how["request_key"] = how.get("request_key") or str(uuid.uuid4())
        may_be_repeated = method == "GET" or bool(how.get("creates"))
        lost, was_sent = None, False
        while True:
            try:
                return self._read(method, path, **how)
            except Problem as problem:
                # Patience begins with the first loss: the request itself may have taken long.
                lost = lost or time.monotonic()
                if isinstance(problem, Gone):
                    # A controller that was never reached is not waited for.
                    was_sent = was_sent or problem.was_sent
                    again = was_sent
                else:
                    # The first request with this key is still being carried out.
                    again = problem.status == 409 and problem.kind == "unavailable"
                    if again:
                        # The controller lives, and may be started again before the next answer.
                        lost, was_sent = time.monotonic(), True
                if not (again and may_be_repeated) or time.monotonic() - lost >= self.patience_s:
                    raise
            time.sleep(PAUSE_S)

    def _read(self, method: str, path: str, **how: Any) -> bytes:
        with self._ask_stream(method, path, **how) as stream:
            return stream.read()

    def _ask_stream(
        self,
        method: str,
        path: str,
        *,
        query: Optional[Dict[str, Any]] = None,
        body: Any = None,
        content: Optional[Content] = None,
        content_type: Optional[str] = None,
        creates: bool = False,
        request_key: Optional[str] = None,
    ) -> Stream:
        headers: Dict[str, str] = {}
        if body is not None:
            content, content_type = json.dumps(body).encode(), "application/json"
        if content is not None:
            headers["Content-Type"] = content_type or "application/octet-stream"
        if creates and request_key is not None:
            headers["Idempotency-Key"] = request_key
        connection, answer = self.transport.send(method, path, query or {}, content, headers)
        return self.transport.stream(connection, answer)

    def _patiently(self, ask: Any) -> Any:
        """Asks about work that goes on. A controller that is being started again is waited for."""
        begun = time.monotonic()
        while True:
            try:
                return ask()
            except Gone:
                if time.monotonic() - begun >= self.patience_s:
                    raise
            time.sleep(PAUSE_S)


class Jobs(operations.Jobs):
    """Jobs: submit them, wait for them, read their logs and fetch their outputs."""

    def submit(self, job: JobFile, *, name: Optional[str] = None, request_key: Optional[str] = None) -> types.Job:
        """Submits a job file: its text, its path, or its fields as a dictionary. The format is that of `perigee job submit`, without `inputs` of
        the own machine. `name` is the job's name if the file has none; by default the file's own.

        With the same `request_key`, a repeated submission within 24 hours is answered with the same job.
        """
        text = _job_text(job, name)
        made: types.Job = self._client._ask(
            "POST",
            "/v1/jobs",
            content=text.encode(),
            content_type="application/yaml",
            creates=True,
            request_key=request_key,
        )
        return made

    def predict(self, job: JobFile, *, name: Optional[str] = None) -> types.JobPlan:
        """What the ways to run a job file would take and cost. Nothing is run."""
        text = _job_text(job, name)
        plan: types.JobPlan = self._client._ask(
            "POST", "/v1/jobs/plan", content=text.encode(), content_type="application/yaml"
        )
        return plan

    def wait(self, job: str, *, timeout_s: Optional[float] = None) -> types.Job:
        """The job when it has ended. A controller that is started again meanwhile is waited for.

        Raises TimeoutError when the job has not ended within `timeout_s`; the job goes on.
        """
        begun = time.monotonic()
        while True:
            left_s = WAIT_S if timeout_s is None else min(WAIT_S, timeout_s - (time.monotonic() - begun))
            wait = f"{max(0, round(left_s))}s"
            found: types.Job = self._client._patiently(lambda: self.info(job, wait=wait))
            if found["state"] in FINAL:
                return found
            if timeout_s is not None and time.monotonic() - begun >= timeout_s:
                reason = found["reason"] or found["state"]
                raise TimeoutError(f"job {job} has not ended within {timeout_s} s: {reason}")

    def follow_log(self, job: str, *, rank: Optional[int] = None) -> Iterator[types.LogLine]:
        """The lines of the log as they come, until the job has ended. `rank` is the VM of a job with several ones."""
        after, started = 0, None
        while True:
            # The state is read before the lines. If it is final, the lines are complete.
            found: types.Job = self._client._patiently(lambda: self.info(job))
            if found.get("started_ms") != started:
                # The job has begun anew, and its log too.
                after, started = 0, found.get("started_ms")
            lines: List[types.LogLine] = self._client._patiently(lambda: self.log(job, after=after, rank=rank))
            for line in lines:
                after = max(after, line["seq"])
                yield line
            if not lines:
                if found["state"] in FINAL:
                    return
                time.sleep(PAUSE_S)

    def download(self, job: str, to: Union[str, Path]) -> List[Path]:
        """Fetches the outputs of an ended job into a directory, which is made if it is not there. Returns the files."""
        directory = Path(to)
        directory.mkdir(parents=True, exist_ok=True)
        with self.output(job) as stream, tarfile.open(fileobj=_Readable(stream), mode="r|") as tar:
            files = []
            for member in tar:
                if _extract(tar, member, directory) and member.isfile():
                    files.append(directory / member.name)
        return files


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> bool:
    """Writes one entry, and nothing outside of the directory. Without Python's own filter, links are left out."""
    if HAS_FILTER:
        tar.extract(member, directory, filter="data")
        return True
    path = Path(member.name)
    is_safe = not path.is_absolute() and ".." not in path.parts and (member.isfile() or member.isdir())
    if is_safe:
        # A guest decides them: no owner, no setuid, and writable by this user alone.
        member.mode = (member.mode & 0o755) | (0o700 if member.isdir() else 0o600)
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        tar.extract(member, directory)
    return is_safe


class _Readable:
    """What tarfile reads of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        parts, left = [], size
        while size < 0 or left > 0:
            part = self._stream.read(left if size >= 0 else -1)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


class Images(operations.Images):
    """Images: send their files."""

    def import_file(self, name: str, file: Union[str, Path], **more: Any) -> types.ClusterImage:
        """Sends a disk image's file (raw or qcow2), and makes an image of it. `more` are further fields of `NewImage`."""
        with open(file, "rb") as content:
            sent = self.upload(content)
        new: Any = {"name": name, "source": sent["source"], "host": sent.get("host"), **more}
        return self.import_image(new)


class Vms(operations.Vms):
    """VMs without a job."""

    def wait(self, vm: str, status: str = "running", *, timeout_s: float = 300.0) -> types.Vm:
        """The VM when it has this status.

        Raises TimeoutError when it has not within `timeout_s`.
        """
        begun = time.monotonic()
        while True:
            found: types.Vm = self._client._patiently(lambda: self.info(vm))
            if found["status"] == status:
                return found
            if time.monotonic() - begun >= timeout_s:
                raise TimeoutError(f"VM {vm} is {found['status']}, and not {status}, after {timeout_s} s")
            time.sleep(PAUSE_S)


def _job_text(job: JobFile, name: Optional[str]) -> str:
    if isinstance(job, Path):
        text, name = job.read_text(), name or job.stem
    elif isinstance(job, str):
        text = job
    else:
        # A document in JSON is one in YAML.
        return json.dumps({**({"name": name} if name else {}), **job}, ensure_ascii=False)
    has_name = re.search(r"^name\s*:", text, re.MULTILINE)
    return text if has_name or not name else f"name: {json.dumps(name)}\n{text}"
