#!/usr/bin/env python3
"""The power test of TPC-H (clause 5.3.3), as DBT-3 runs it: the first refresh function, the 22 queries in the order of stream 0, and the second
refresh function, one after the other.

  power.py DATABASE OUT     writes OUT/tpch-answers and OUT/tpch-times. Runs as root, with the directory that load.sh has made
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
BIN = "/usr/lib/postgresql/15/bin"
# Smaller files are the catalog's.
TABLE_BYTES = 256 << 10


def server(database, *words):
    subprocess.run(["runuser", "-u", "postgres", "--", f"{BIN}/pg_ctl", "-D", database, "-s", "-w", *words], check=True)


def ask(database, step, answers):
    line = ["psql", "-h", str(database), "-U", "postgres", "-X", "-q", "-At", "-P", "null=NULL", "-v", "ON_ERROR_STOP=1"]
    subprocess.run([*line, "-f", str(HERE / f"{step}.sql")], check=True, stdout=answers)


def forget_tables(database):
    """Each step finds its tables cold, as it would where they are larger than the memory."""
    for path in (database / "base").rglob("*"):
        if path.is_file() and path.stat().st_size > TABLE_BYTES:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def main():
    database, out = (pathlib.Path(word).resolve() for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o777)
        server(database, "-t", "300", "-l", f"{scratch}/log", "-o", f"-k '{database}'", "start")
        with open(out / "tpch-answers", "w") as answers, open(out / "tpch-times", "w") as times:
            for step in (HERE / "order").read_text().split():
                forget_tables(database)
                began = time.monotonic()
                print(f"-- {step}", file=answers, flush=True)
                ask(database, step, answers)
                print(step, f"{began:.3f}", f"{time.monotonic():.3f}", file=times)
                if step.startswith("refresh-"):
                    ask(database, "refreshed", answers)
        # Nobody needs this database any more.
        server(database, "-t", "60", "-m", "immediate", "stop")


if __name__ == "__main__":
    main()
