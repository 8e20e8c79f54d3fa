#!/usr/bin/env python3
"""The power test of TPC-H (clause 5.3.3), as DBT-3 runs it: the first refresh function, the 22 queries in the order of stream 0, and the second
refresh function, one after the other. A throughput test may follow (clause 5.3.4): several streams of queries at once, and one of refreshes.

  power.py DATABASE OUT     writes OUT/tpch-answers and OUT/tpch-times. Runs as root, with the directory that load.sh has made
"""
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
BIN = "/usr/lib/postgresql/15/bin"
# Smaller files are the catalog's.
TABLE_BYTES = 256 << 10
# The refreshes beside the streams take the new sales away, bring them in again, and are rolled back, so that each answer of a stream is known.
NEW = "in (select o_orderkey from new_orders)"
REFRESHES = f"begin;\ndelete from lineitem where l_orderkey {NEW};\ndelete from orders where o_orderkey {NEW};\n\\i {HERE}/refresh-1.sql\nrollback;\n"


def server(database, *words):
    subprocess.run(["runuser", "-u", "postgres", "--", f"{BIN}/pg_ctl", "-D", database, "-s", "-w", *words], check=True)


def psql(database, *words, **more):
    line = ["psql", "-h", str(database), "-U", "postgres", "-X", "-q", "-At", "-P", "null=NULL", "-v", "ON_ERROR_STOP=1"]
    subprocess.run([*line, *words], check=True, **more)


def ask(database, step, answers):
    print(f"-- {step}", file=answers, flush=True)
    psql(database, "-f", str(HERE / f"{step}.sql"), stdout=answers)


def forget_tables(database):
    """Each step finds its tables cold, as it would where they are larger than the memory."""
    for path in (database / "base").rglob("*"):
        if path.is_file() and path.stat().st_size > TABLE_BYTES:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def power(database, steps, answers, times):
    for step in steps:
        forget_tables(database)
        began = time.monotonic()
        ask(database, step, answers)
        print(step, f"{began:.3f}", f"{time.monotonic():.3f}", file=times)
        if step.startswith("refresh-"):
            psql(database, "-f", str(HERE / "refreshed.sql"), stdout=answers)


def throughput(database, streams, path):
    """All streams at once. Each has its own answers: PATH-0, PATH-1 …"""
    failed = []

    def go_through(work):
        try:
            work()
        except Exception as error:
            failed.append(error)

    def stream(number, steps):
        with open(f"{path}-{number}", "w") as answers:
            for step in steps:
                ask(database, step, answers)

    works = [lambda number=number, steps=steps: stream(number, steps) for number, steps in enumerate(streams)]
    works.append(lambda: psql(database, input=REFRESHES, text=True, stdout=subprocess.DEVNULL))
    threads = [threading.Thread(target=go_through, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def run(database, out, name, steps, streams, options="", place=contextlib.nullcontext):
    """Both tests; no streams are no throughput test. The server has these options and begins in this place. Writes OUT/NAME-answers, OUT/NAME-times
    and OUT/NAME-stream-0 …"""
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o777)
        try:
            with place():
                server(database, "-t", "300", "-l", f"{scratch}/log", "-o", f"-k '{database}' {options}", "start")
        except subprocess.CalledProcessError:
            print(pathlib.Path(f"{scratch}/log").read_text(errors="replace"), file=sys.stderr)
            raise
        with open(out / f"{name}-answers", "w") as answers, open(out / f"{name}-times", "w") as times:
            power(database, steps or (HERE / "order").read_text().split(), answers, times)
            if streams:
                forget_tables(database)
                began = time.monotonic()
                throughput(database, streams, out / f"{name}-stream")
                print("throughput", f"{began:.3f}", f"{time.monotonic():.3f}", file=times)
        # Nobody needs this database any more.
        server(database, "-t", "60", "-m", "immediate", "stop")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    run(*(pathlib.Path(word).resolve() for word in sys.argv[1:]), "tpch", [], [])
