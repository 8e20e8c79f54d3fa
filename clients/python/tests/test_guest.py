"""Jobs and volumes, with a real guest. PERIGEE_API names a `perigee dev` that has the image `debian`."""

import contextlib
import tempfile
import unittest
import uuid
from pathlib import Path

from perigee import Client, Problem

HELLO = """
image: debian
command: echo on the log; echo hello > /output/hello.txt
memory: 256MiB
"""


class Guest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.client = Client()

    def test_a_job_is_submitted_followed_and_fetched(self) -> None:
        jobs = self.client.jobs
        job = jobs.submit(HELLO, name="python")
        self.assertTrue(job["id"].startswith("python-"))
        lines = [line["line"] for line in jobs.follow_log(job["id"])]
        self.assertIn("on the log", lines)
        ended = jobs.wait(job["id"])
        self.assertEqual((ended["state"], ended.get("exit_code")), ("succeeded", 0))
        with tempfile.TemporaryDirectory() as directory:
            files = jobs.download(job["id"], directory)
            hello = [file for file in files if file.name == "hello.txt"]
            self.assertEqual([file.read_text() for file in hello], ["hello\n"])
        jobs.delete(job["id"])

    def test_a_file_names_its_job_and_a_wait_has_an_end(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "from-file.yaml")
            file.write_text("image: debian\ncommand: sleep 1000\nmemory: 256MiB\n")
            job = self.client.jobs.submit(file)
        self.assertTrue(job["id"].startswith("from-file-"), job["id"])
        with self.assertRaises(TimeoutError):
            self.client.jobs.wait(job["id"], timeout_s=1)
        self.client.jobs.cancel(job["id"], now=True)
        # The second request does not wait for outputs. The job may have ended before.
        with contextlib.suppress(Problem):
            self.client.jobs.cancel(job["id"], now=True)
        self.assertEqual(self.client.jobs.wait(job["id"])["state"], "cancelled")

    def test_a_volume_is_made_read_and_deleted_by_name(self) -> None:
        name = f"volume-{uuid.uuid4().hex[:8]}x"
        made = self.client.volumes.create({"name": name, "size_bytes": 1 << 20, "source": "empty"})
        self.assertEqual((made["name"], made["size_bytes"]), (name, 1 << 20))
        self.assertIn(name, [volume["name"] for volume in self.client.volumes.list()])
        self.client.volumes.delete(name)
        with self.assertRaises(Problem):
            self.client.volumes.info(name)


if __name__ == "__main__":
    unittest.main()
