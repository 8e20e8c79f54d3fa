#!/usr/bin/env python3
"""Runs programs one after the other in all VMs of a job: `mpirun works.py`, or in VMs that are jobs of their own.

The words of $WORKS say what runs, each as WORK:SIDE. A side is one of two copies of the data, `near` and `far`. All VMs begin and end a program
together. Each VM writes, beside what the program found, what it uses meanwhile: WORK-SIDE-usage-RANK, with seconds since boot, ticks that its CPU
worked, waited for disks and rested, and kibibytes of its memory, while TPC-H runs of the database's: all, free, and cached. At the end it writes marks-RANK: when each program
began and ended by its own clock.

`wait:N` waits until the first byte of the seed disk is the N-th letter. `fixed:x` is a computation that is always the same.

Elsewhere than in a VM, $RANKS is a directory in which each process has one of its own.
"""
import contextlib
import mmap
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path[:0] = [str(HERE), str(HERE / "tpch")]
POLITE_S = 0.05
SEEN_S = 2
DISK_WAIT_S = 120
# The kernel's own timers are too short where time is dilated: after 5 s without an answer to a ping it gives the connection up, and iscsistart leaves nobody
# behind who would connect again.
PATIENCE = ["node.conn[0].timeo.noop_out_interval=0", "node.conn[0].timeo.noop_out_timeout=0", "node.session.timeo.replacement_timeout=3600"]
COMMAND_S = 3600
# In a guest, PostgreSQL and the disk cache of its files have $DATABASE_MEMORY bytes, less than the files have.
DATABASE_MEMORY = os.environ.get("DATABASE_MEMORY")
DATABASE_GROUP = pathlib.Path("/sys/fs/cgroup/database")
SHARED_BUFFERS = "-c shared_buffers=4MB"


class Alone:
    """A VM that is a job of its own. Whoever listens at $CONTROL lets all such VMs go on at the same time."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        address, gateway = os.environ["CARD"].split(",")
        subprocess.run(["modprobe", "virtio_net"], check=True)
        for line in ["link set eth0 up", f"address add {address} dev eth0", f"route add default via {gateway}"]:
            subprocess.run(["busybox", "ip", *line.split()], check=True)
        host, port = os.environ["CONTROL"].split(",")
        self.lines = socket.create_connection((host, int(port)), timeout=3600).makefile("rw")

    def together(self):
        self.lines.write("ready\n")
        self.lines.flush()
        if not self.lines.readline():
            raise RuntimeError("whoever lets the VMs go on has gone")

    def end(self):
        os._exit(1)


class Ranks:
    """The processes of mpirun."""

    def __init__(self):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank = self.comm.Get_rank()

    def together(self):
        # Open MPI's own barrier would take the CPU from those that still work.
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(POLITE_S)

    def end(self):
        self.comm.Abort(1)


@contextlib.contextmanager
def database_memory():
    """What is started here has the database's memory."""
    DATABASE_GROUP.mkdir(exist_ok=True)
    (DATABASE_GROUP / "memory.max").write_text(DATABASE_MEMORY)
    before = pathlib.Path("/proc/self/cgroup").read_text().split("::/")[1].strip()
    (DATABASE_GROUP / "cgroup.procs").write_text("0")
    try:
        yield
    finally:
        (DATABASE_GROUP.parent / before / "cgroup.procs").write_text("0")


def memory_kib(work):
    """All, free and cached: the database's while it is asked, else the VM's."""
    group = DATABASE_GROUP if work == "tpch" and DATABASE_MEMORY else None
    if group and group.exists():
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        limit = int(DATABASE_MEMORY)
        return limit >> 10, max(limit - used, 0) >> 10, int(stat["file"]) >> 10
    memory = {}
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines()[:5]:
        name, value = line.split()[:2]
        memory[name] = int(value)
    return memory["MemTotal:"], memory["MemFree:"], memory["Buffers:"] + memory["Cached:"]


def sample(work):
    """One line of what this VM has used so far."""
    up = pathlib.Path("/proc/uptime").read_text().split()[0]
    user, nice, system, idle, waits, interrupts, soft = map(int, pathlib.Path("/proc/stat").read_text().split()[1:8])
    total, free, cached = memory_kib(work)
    return f"{up} {user + nice + system + interrupts + soft} {waits} {idle} {total} {free} {cached}\n"


@contextlib.contextmanager
def sampled(path, work):
    """Samples each second until the block ends."""
    is_over = threading.Event()
    with open(path, "w") as file:
        file.write(sample(work))

        def go_on():
            while not is_over.wait(1):
                file.write(sample(work))

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            file.write(sample(work))


def fixed(count):
    """Integers, hashes and dictionaries, as the programs in Python have them."""
    import zlib

    seen = {}
    for number in range(count):
        key = zlib.crc32(number.to_bytes(4, "little")) & 1023
        seen[key] = seen.get(key, 0) + number % 7
    return sum(seen.values())


def wait(letter):
    """Until the seed disk begins with this letter. The kernel's cache is not asked."""
    serials = pathlib.Path("/sys/block").glob("*/serial")
    seed = next(path.parent.name for path in serials if path.read_text().strip() == "seed")
    page = mmap.mmap(-1, 4096)
    while True:
        disk = os.open(f"/dev/{seed}", os.O_RDONLY | os.O_DIRECT)
        os.preadv(disk, [page], 0)
        os.close(disk)
        if page[:1] == letter:
            return
        time.sleep(0.3)


def program(work, side, rank, out):
    """Runs one program; what rank 0 prints is what it found."""
    mine, database = (os.environ.get(name, default) for name, default in [("MINE", "/mine"), ("DATABASE", "/data")])
    if work == "fixed":
        fixed(int(os.environ["FIXED"]))
        return
    if work == "wait":
        wait(bytes([ord("A") + int(side)]))
        return
    if work == "tpch":
        import power

        words = os.environ.get("STEPS", "").split()
        streams = [stream.split() for stream in os.environ.get("STREAMS", "").split(";") if stream.strip()]
        path = pathlib.Path(f"{database}-{side}/pg").resolve()
        place = database_memory if DATABASE_MEMORY else contextlib.nullcontext
        power.run(path, out, f"tpch-{side}", words, streams, SHARED_BUFFERS, place)
        return
    lines = {
        "blast": [f"{mine}-{side}/database.fa", f"{mine}-{side}/queries.fa"],
        "hpa": [f"{mine}-{side}/transactions-hpa", "--support", os.environ["SUPPORT"]],
        "pfp": [f"{mine}-{side}/transactions-pfp", "--support", os.environ["SUPPORT"]],
    }
    sys.argv = [work, *lines[work]]
    with open(out / f"{work}-{side}-found" if rank == 0 else os.devnull, "w") as found, contextlib.redirect_stdout(found):
        runpy.run_path(str(HERE / f"{work}.py"), run_name="__main__")


def disks():
    return {path.name for path in pathlib.Path("/sys/block").glob("sd*")}


def attach(side, address, port, target):
    """Logs in to an iSCSI target with Linux' own initiator, and mounts its disk."""
    before = disks()
    initiator = f"iqn.2026-11.org.perigee.experiment:{side}"
    # iscsistart needs the directory of its database.
    os.makedirs("/etc/iscsi", exist_ok=True)
    patience = [word for setting in PATIENCE for word in ("-P", setting)]
    subprocess.run(["iscsistart", "-i", initiator, "-t", target, "-g", "1", "-a", address, "-p", port, *patience], check=True)
    end = time.monotonic() + DISK_WAIT_S
    while not disks() - before:
        if time.monotonic() > end:
            raise RuntimeError(f"no disk of {target} after {DISK_WAIT_S} s")
        time.sleep(0.2)
    disk = (disks() - before).pop()
    pathlib.Path(f"/sys/block/{disk}/device/timeout").write_text(str(COMMAND_S))
    where = f"/data-{side}"
    os.makedirs(where, exist_ok=True)
    subprocess.run(["mount", "-t", "ext4", f"/dev/{disk}", where], check=True)


def attach_all():
    wanted = os.environ.get("ISCSI", "").split()
    if wanted:
        subprocess.run(["modprobe", "-a", "iscsi_tcp", "sd_mod"], check=True)
    for word in wanted:
        attach(*word.split(","))


def main():
    here = Ranks() if "OMPI_COMM_WORLD_SIZE" in os.environ else Alone()
    ranks = os.environ.get("RANKS")
    if ranks:
        os.chdir(pathlib.Path(ranks) / str(here.rank))
    out = pathlib.Path("." if ranks else os.environ["PERIGEE_OUTPUT"]).resolve()
    progress = os.environ.get("PERIGEE_PROGRESS") if here.rank == 0 else None
    # The programs say nothing of their own progress.
    os.environ["PERIGEE_PROGRESS"] = os.devnull
    try:
        attach_all()
        words = os.environ["WORKS"].split()
        with open(out / f"marks-{here.rank}", "w") as marks:
            for number, word in enumerate([*words, "done"]):
                work, _, side = word.partition(":")
                label = f"{work}-{side}" if side else work
                if not ranks:
                    # Each program finds its data cold. Elsewhere other programs keep their caches.
                    os.sync()
                    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
                here.together()
                if progress:
                    pathlib.Path(progress).write_text(f"{number}/{len(words)} {label}\n")
                began = time.monotonic()
                if word == "done":
                    print(label, f"{began:.3f}", f"{began:.3f}", file=marks, flush=True)
                    # Whoever looks at the progress sees this too.
                    time.sleep(SEEN_S)
                    break
                with sampled(out / f"{label}-usage-{here.rank}", work):
                    program(work, side, here.rank, out)
                    here.together()
                print(label, f"{began:.3f}", f"{time.monotonic():.3f}", file=marks, flush=True)
    except BaseException:
        traceback.print_exc()
        if os.environ.get("ISCSI"):
            print(subprocess.run(["dmesg"], capture_output=True, text=True).stdout[-3000:], file=sys.stderr)
        sys.stderr.flush()
        here.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["fixed"]:
        BEGAN = time.monotonic()
        fixed(int(sys.argv[2]))
        print(time.monotonic() - BEGAN)
    else:
        main()
