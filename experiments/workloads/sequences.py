#!/usr/bin/env python3
"""Makes a database of DNA sequences and queries, some of which are changed pieces of it."""
import argparse
import random

BASES = "ACGT"


def changed(chance, piece):
    """A piece as it may be after some generations: one base in twenty replaced, one in a hundred lost or doubled."""
    out = []
    for base in piece:
        roll = chance.random()
        if roll < 0.05:
            out.append(chance.choice(BASES))
        elif roll < 0.06:
            out.append(chance.choice(["", base * 2]))
        else:
            out.append(base)
    return "".join(out)


def write(path, sequences):
    with open(path, "w") as file:
        for name, bases in sequences:
            file.write(f">{name}\n")
            file.writelines(f"{bases[at:at + 70]}\n" for at in range(0, len(bases), 70))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=400)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--query-length", type=int, default=250)
    parser.add_argument("database")
    parser.add_argument("queries_file")
    ask = parser.parse_args()
    chance = random.Random(ask.seed)
    make = lambda length: "".join(chance.choices(BASES, k=length))
    # Families: each sequence but the first of ten is a changed copy of the first, so a query hits several fragments.
    database = []
    for number in range(ask.sequences):
        is_first = number % 10 == 0
        bases = make(ask.length) if is_first else changed(chance, database[number - number % 10][1])
        database.append((f"s{number:05}", bases))
    queries = []
    for number in range(ask.queries):
        if number % 5 == 4:
            bases = make(ask.query_length)
        else:
            source = chance.choice(database)[1]
            at = chance.randrange(max(1, len(source) - ask.query_length))
            bases = changed(chance, source[at:at + ask.query_length])
        queries.append((f"q{number:04}", bases))
    write(ask.database, database)
    write(ask.queries_file, queries)


if __name__ == "__main__":
    main()
