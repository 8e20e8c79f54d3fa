#!/usr/bin/env python3
"""What blastn itself finds in the whole database, in one process. Shares nothing with blast.py."""
import argparse
import subprocess
import tempfile


def lengths(path):
    """How many bases each sequence of a FASTA file has."""
    found = []
    with open(path) as file:
        for line in file:
            if line.startswith(">"):
                found.append(0)
            else:
                found[-1] += len(line.strip())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database")
    parser.add_argument("queries")
    ask = parser.parse_args()
    database, queries = lengths(ask.database), lengths(ask.queries)
    fields = "qseqid sseqid pident length mismatch gapopen qstart qend sstart send evalue bitscore"
    options = ["-searchsp", str(sum(database) * max(queries)), "-max_target_seqs", str(len(database)), "-evalue", "1e-5"]
    with tempfile.TemporaryDirectory() as scratch:
        whole = f"{scratch}/whole"
        make = ["makeblastdb", "-in", ask.database, "-dbtype", "nucl", "-out", whole]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["blastn", "-db", whole, "-query", ask.queries, *options, "-outfmt", f"6 {fields}"], check=True)


if __name__ == "__main__":
    main()
