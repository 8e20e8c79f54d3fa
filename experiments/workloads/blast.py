#!/usr/bin/env python3
"""BLAST over a partitioned database, as mpiBLAST does (Darling, Carey and Feng, 2003), with Debian's ncbi-blast+.

The database is split into fragments, one for each rank, which formats its own. The queries are split into chunks. Each rank searches
each chunk in its fragment, and rank 0 merges the hits, the best first. With one rank this is the search of the whole database.

How sure a hit is depends on the size of the whole database, and not of a fragment. So all ranks are told the same search space.
"""
import argparse
import subprocess
import tempfile
from pathlib import Path

from mpi4py import MPI

FIELDS = "qseqid sseqid pident length mismatch gapopen qstart qend sstart send evalue bitscore"


def read(path):
    """Sequences of a FASTA file: the text of each, with its name."""
    return [">" + part for part in Path(path).read_text().split(">") if part.strip()]


def bases(sequence):
    return sum(len(line) for line in sequence.splitlines()[1:])


def run(*line):
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def search(fragment, queries, space, limit):
    """The hits of some queries in a fragment, as rows of text."""
    options = ["-searchsp", str(space), "-max_target_seqs", str(limit), "-evalue", "1e-5", "-outfmt", f"6 {FIELDS}"]
    with tempfile.NamedTemporaryFile("w", suffix=".fa") as file:
        file.write("".join(queries))
        file.flush()
        return run("blastn", "-db", str(fragment), "-query", file.name, *options).splitlines()


def rank_of(row):
    """The order of hits of one query: the surest first. Equal ones have an order too, so that every run prints the same."""
    columns = row.split("\t")
    return (float(columns[10]), -float(columns[11]), columns[1:])


def merge(queries, rows):
    """All hits in the order of the queries."""
    by_query = {}
    for row in rows:
        by_query.setdefault(row.split("\t")[0], []).append(row)
    for query in queries:
        yield from sorted(by_query.get(query.split()[0][1:], []), key=rank_of)


def main():
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("database")
    parser.add_argument("queries")
    parser.add_argument("--chunk", type=int, default=20, help="queries that are searched at once")
    ask = parser.parse_args()
    database, queries = read(ask.database), read(ask.queries)
    space = sum(map(bases, database)) * max(map(bases, queries))
    with tempfile.TemporaryDirectory() as scratch:
        fragment = Path(scratch) / "fragment"
        own = Path(scratch) / "fragment.fa"
        own.write_text("".join(database[rank::size]))
        run("makeblastdb", "-in", str(own), "-dbtype", "nucl", "-out", str(fragment))
        for at in range(0, len(queries), ask.chunk):
            chunk = queries[at:at + ask.chunk]
            found = comm.gather(search(fragment, chunk, space, len(database)))
            if rank == 0:
                print(*merge(chunk, [row for part in found for row in part]), sep="\n")


if __name__ == "__main__":
    main()
