"""What needs no host, against a real controller: PERIGEE_API names its unix socket. It listens over TLS too, at PERIGEE_TEST_URL;
PERIGEE_TEST_TOKEN, PERIGEE_TEST_FINGERPRINT and PERIGEE_TEST_OPERATOR are for that."""

import io
import os
import socket
import tarfile
import tempfile
import threading
import unittest
import unittest.mock
import uuid
from pathlib import Path

from perigee import Client, Problem
from perigee.client import _extract


def fresh(kind: str) -> str:
    """A name that nothing has."""
    return f"{kind}-{uuid.uuid4().hex[:8]}x"


class Api(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.client = Client()

    def test_a_refusal_says_what_why_and_what_to_do_next(self) -> None:
        with self.assertRaises(Problem) as refused:
            self.client.volumes.info("nothing-has-this-name")
        problem = refused.exception
        self.assertEqual((problem.kind, problem.status), ("not_found", 404))
        self.assertTrue(problem.what and problem.why and problem.next)
        with self.assertRaises(Problem) as refused:
            self.client.jobs.submit("image: debian\ncommand: true\ncpu: 1\n")
        self.assertIn("cpu", str(refused.exception))

    def test_the_same_key_makes_one_thing(self) -> None:
        new = {"name": fresh("network"), "subnet": "10.99.0.0/24"}
        key = str(uuid.uuid4())
        for _ in range(2):
            self.assertEqual(self.client.networks.create(new, request_key=key)["name"], new["name"])
        with self.assertRaises(Problem) as refused:
            self.client.networks.create({**new, "name": fresh("network")}, request_key=key)
        self.assertEqual(refused.exception.status, 422)
        self.client.networks.delete(new["name"])

    def test_a_lost_answer_is_asked_for_again(self) -> None:
        with Losing(os.environ["PERIGEE_API"]) as address:
            made = Client(address).networks.create({"name": fresh("network"), "subnet": "10.98.0.0/24"})
        self.client.networks.delete(made["name"])

    def test_a_controller_that_is_not_there_is_not_waited_for(self) -> None:
        with self.assertRaises(Problem) as refused:
            Client("unix:/nothing/is/here.sock").jobs.list()
        self.assertEqual((refused.exception.kind, refused.exception.status), ("unavailable", None))


class Tls(unittest.TestCase):
    url = os.environ["PERIGEE_TEST_URL"]
    token = os.environ["PERIGEE_TEST_TOKEN"]
    fingerprint = os.environ["PERIGEE_TEST_FINGERPRINT"]

    def test_a_user_asks_with_a_token(self) -> None:
        client = Client(self.url, token=self.token, fingerprint=self.fingerprint)
        self.assertEqual(client.tenants.me()["user"], "py")
        self.assertEqual(client.jobs.list(), [])

    def test_an_operator_asks_with_a_certificate(self) -> None:
        client = Client(self.url, operator=os.environ["PERIGEE_TEST_OPERATOR"])
        self.assertEqual(client.tenants.me()["role"], "admin")

    def test_a_controller_of_another_cluster_gets_no_token(self) -> None:
        with self.assertRaises(Problem) as refused:
            Client(self.url, token=self.token, fingerprint="0" * 64)
        self.assertEqual(refused.exception.kind, "forbidden")
        self.assertIn(self.fingerprint, refused.exception.why)

    def test_a_wrong_token_is_refused(self) -> None:
        with self.assertRaises(Problem) as refused:
            Client(self.url, token="perigee_0_0", fingerprint=self.fingerprint).jobs.list()
        self.assertEqual((refused.exception.kind, refused.exception.status), ("forbidden", 401))

    def test_an_address_without_a_way_to_trust_it_is_refused(self) -> None:
        with self.assertRaises(Problem) as refused:
            Client(self.url, token=self.token)
        self.assertEqual(refused.exception.kind, "invalid")


class Outputs(unittest.TestCase):
    def test_a_guest_decides_no_owner_and_no_setuid_also_without_python_s_filter(self) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, mode in (("output/tool", 0o4777), ("../outside", 0o644)):
                member = tarfile.TarInfo(name)
                member.mode, member.uid, member.size = mode, 1234, 2
                tar.addfile(member, io.BytesIO(b"hi"))
        packed.seek(0)
        with tempfile.TemporaryDirectory() as directory, tarfile.open(fileobj=packed) as tar:
            kept, unsafe = tar.getmembers()
            with unittest.mock.patch("perigee.client.HAS_FILTER", False):
                self.assertTrue(_extract(tar, kept, Path(directory)))
                self.assertFalse(_extract(tar, unsafe, Path(directory)))
            made = (Path(directory) / "output/tool").stat()
            self.assertEqual((made.st_mode & 0o7777, made.st_uid), (0o755, os.geteuid()))


class Losing:
    """A way to a controller on which the first answer is lost: the request arrives."""

    def __init__(self, to: str) -> None:
        self._to = to[len("unix:") :]
        self._directory = tempfile.TemporaryDirectory()
        self._path = os.path.join(self._directory.name, "api.sock")

    def __enter__(self) -> str:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        return f"unix:{self._path}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._directory.cleanup()

    def _serve(self) -> None:
        for number in range(2):
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._to)
            # The head and the body may come apart; each is small.
            client.settimeout(0.5)
            try:
                while part := client.recv(1 << 16):
                    server.sendall(part)
            except TimeoutError:
                pass
            answer = server.recv(1 << 20)
            if number > 0:
                client.sendall(answer)
            client.close()
            server.close()


if __name__ == "__main__":
    unittest.main()
