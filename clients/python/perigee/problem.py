"""The one error of the API."""

from __future__ import annotations

from typing import Optional


class Problem(Exception):
    """What could not be done, why, and what to do next.

    `kind` is for programs: invalid, forbidden, not_found, conflict, no_space, unavailable, unsupported, superseded or
    internal. `status` is that of the HTTP answer; it is None where there was no answer.
    """

    def __init__(self, kind: str, what: str, why: str, next: str = "", status: Optional[int] = None) -> None:
        super().__init__(what, why)
        self.kind = kind
        self.what = what
        self.why = why
        self.next = next
        self.status = status

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}"
        return f"{text}\n  {self.next}" if self.next else text


class Gone(Problem):
    """No answer has come. `was_sent`: the request may have been carried out."""

    def __init__(self, address: str, why: object, was_sent: bool) -> None:
        next = "" if was_sent else "check that the controller runs, or name another one"
        super().__init__("unavailable", f"no answer from {address}", str(why), next)
        self.was_sent = was_sent
