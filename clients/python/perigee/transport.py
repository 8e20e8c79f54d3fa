"""HTTP over a unix socket, or over TLS with a cluster's own authority."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import ssl
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Dict, Iterable, Optional, Tuple, Type, Union
from urllib.parse import urlencode, urlsplit

from .problem import Gone, Problem

Content = Union[bytes, IO[bytes], Iterable[bytes]]

CONTROLLER = "perigee:controller"
CONNECT_S = 10.0
PART_BYTES = 1 << 20


class Stream:
    """The bytes of an answer as they come. Use it in a `with` statement."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, address: str) -> None:
        self._connection = connection
        self._answer = answer
        self._address = address

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes; all that are left if it is negative; none at the end."""
        try:
            return self._answer.read(None if size < 0 else size)
        except (OSError, http.client.HTTPException) as error:
            raise Gone(self._address, error or type(error).__name__, True) from error

    def copy_to(self, file: IO[bytes]) -> int:
        """Writes all to a file; returns how many bytes that were."""
        total = 0
        while part := self.read(PART_BYTES):
            file.write(part)
            total += len(part)
        return total

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_S)
        self.sock.connect(self._path)
        self.sock.settimeout(self.timeout)


class _TlsConnection(http.client.HTTPConnection):
    """The server has to show the certificate of the cluster's controller, at whatever address."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._context = context

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), CONNECT_S)
        try:
            secured = self._context.wrap_socket(plain, server_hostname=self.host)
            names = (secured.getpeercert() or {}).get("subjectAltName", ())
            if ("URI", CONTROLLER) not in names:
                raise ssl.SSLError(f"it is not the cluster's controller; its certificate is for {names}")
        except BaseException:
            plain.close()
            raise
        secured.settimeout(self.timeout)
        self.sock = secured


def _context(authority: Union[str, bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The name in the certificate is the controller's identity, and not its address.
    context.check_hostname = False
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
    context.load_verify_locations(cadata=authority if isinstance(authority, str) else authority.decode())
    return context


def _authority_of(host: str, port: int, fingerprint: str) -> str:
    """The certificate of the cluster's authority, which the controller tells everybody. It is the right one if it has this fingerprint; no token
    was sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
    try:
        connection.request("GET", "/authority.pem")
        text = connection.getresponse().read().decode()
        der = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN") :].split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n")
    except (OSError, http.client.HTTPException) as error:
        raise Gone(f"https://{host}:{port}", error, False) from error
    except ValueError as error:
        raise Problem("invalid", f"can't trust https://{host}:{port}", "it does not tell its cluster's authority") from error
    finally:
        connection.close()
    found = hashlib.sha256(der).hexdigest()
    if found != fingerprint.replace(":", "").lower():
        why = f"its cluster's authority has the fingerprint {found}, and not {fingerprint}"
        next = "check the address and the fingerprint: `perigee token create` prints it"
        raise Problem("forbidden", f"can't trust https://{host}:{port}", why, next)
    return ssl.DER_cert_to_PEM_cert(der)


class Transport:
    """Sends requests to one controller. Each request has a connection of its own, so threads can share this."""

    def __init__(
        self, address: str, token: Optional[str], fingerprint: Optional[str], operator: Optional[Path], timeout_s: float
    ) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._context: Optional[ssl.SSLContext] = None
        if address.startswith("unix:"):
            return
        parts = urlsplit(address)
        if parts.scheme not in ("https", "http") or not parts.hostname or not parts.port:
            why = "it is none of unix:PATH, https://HOST:PORT and http://HOST:PORT"
            raise Problem("invalid", f"can't use the address {address!r}", why)
        self._host, self._port = parts.hostname, parts.port
        if parts.scheme == "https":
            self._context = self._trust(fingerprint, operator)

    def _trust(self, fingerprint: Optional[str], operator: Optional[Path]) -> ssl.SSLContext:
        if operator is not None:
            context = _context((operator / "ca.pem").read_text())
            context.load_cert_chain(operator / "identity.pem")
            return context
        if fingerprint is None:
            why = "neither the fingerprint of its authority nor an operator's certificate is given"
            next = "give fingerprint= and token=, or operator=; or log in first: perigee login"
            raise Problem("invalid", f"can't trust {self.address}", why, next)
        return _context(_authority_of(self._host, self._port, fingerprint))

    def _connection(self) -> http.client.HTTPConnection:
        if self.address.startswith("unix:"):
            return _UnixConnection(self.address[len("unix:") :], self._timeout_s)
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return _TlsConnection(self._host, self._port, self._context, self._timeout_s)

    def send(
        self, method: str, path: str, query: Dict[str, Any], content: Optional[Content], headers: Dict[str, str]
    ) -> Tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request; the answer's body is unread."""
        given = {name: _text(value) for name, value in query.items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        if self._token is not None:
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        connection = self._connection()
        try:
            connection.connect()
        except ssl.SSLError as error:
            connection.close()
            why = f"it does not prove to be this cluster's controller: {error}"
            raise Problem("forbidden", f"can't use {self.address}", why, "check the address and the fingerprint") from error
        except OSError as error:
            connection.close()
            raise Gone(self.address, error, False) from error
        try:
            connection.request(method, target, body=content, headers=headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Gone(self.address, error or type(error).__name__, True) from error

    def stream(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> Stream:
        """The body of an answer, if it is none of an error's."""
        stream = Stream(connection, answer, self.address)
        if 200 <= answer.status < 300:
            return stream
        with stream:
            raise problem_of(stream.read(), answer.status, self.address)


def problem_of(body: bytes, status: int, address: str) -> Problem:
    """The problem that an answer has."""
    try:
        said = json.loads(body)
        return Problem(said["kind"], said["what"], said["why"], said.get("next", ""), status)
    except (ValueError, KeyError, TypeError):
        text = body[:4096].decode(errors="replace")
        return Problem("internal", f"a request to {address} failed", f"HTTP {status}: {text}", status=status)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def default_login() -> Optional[Dict[str, str]]:
    """What `perigee login` has kept: controller, fingerprint and token."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.environ.get("HOME", ""), ".config")
    path = Path(config, "perigee", "login.json")
    if not path.is_file():
        return None
    kept: Dict[str, str] = json.loads(path.read_text())
    return kept
