#!/usr/bin/env python3
"""The answers of TPC-H's power test by SQLite, and the comparison of PostgreSQL's with them.

  reference.py answers TABLES [STEP...]  prints what the power test answers over the *.tbl files in a directory, or only these steps
  reference.py compare RIGHT GOT         fails if two files of answers differ

SQLite has no dates and no decimals: dates are text, and prices are floating-point numbers. So numbers are equal if they differ by less
than 1e-9 of their size.
"""
import pathlib
import re
import sqlite3
import sys

HERE = pathlib.Path(__file__).parent
RELATIVE = 1e-9


def order():
    """The steps of the power test, as power.py makes them."""
    return (HERE / "order").read_text().split()


def sql(step):
    text = (HERE / f"{step}.sql").read_text()
    text = re.sub(r"date ('\d{4}-\d\d-\d\d')", r"\1", text)
    return re.sub(r"extract\(year from (\w+)\)", r"cast(substr(\1, 1, 4) as integer)", text)


def load(db, directory, table, like):
    db.execute(f"create table if not exists {table} as select * from {like} limit 0")
    columns = len(db.execute(f"select * from {table} limit 0").description)
    with open(directory / f"{table}.tbl") as file:
        rows = (line.rstrip("\n").split("|") for line in file)
        db.executemany(f"insert into {table} values ({','.join('?' * columns)})", rows)


def tables():
    return re.findall(r"create table (\w+)", sql("schema"))


def database(directory):
    db = sqlite3.connect(":memory:")
    # Unlike PostgreSQL's, its `like` takes upper and lower case as the same.
    db.execute("pragma case_sensitive_like = on")
    db.executescript(sql("schema"))
    db.execute("create table old_orders (old_key integer)")
    for table in tables():
        load(db, directory, table, table)
    for table, like in [("new_orders", "orders"), ("new_lineitem", "lineitem"), ("old_orders", "old_orders")]:
        load(db, directory, table, like)
    db.executescript(sql("indexes"))
    return db


def rows(db, step):
    for row in db.execute(sql(step)):
        yield "|".join("NULL" if cell is None else str(cell) for cell in row)


def answers(directory, steps):
    db = database(pathlib.Path(directory))
    for step in steps:
        print(f"-- {step}")
        if step.startswith("refresh"):
            db.executescript(sql(step))
            step = "refreshed"
        for row in rows(db, step):
            print(row)


def read(path):
    """Rows by step. The length of a char(n) means nothing."""
    found = {}
    for line in pathlib.Path(path).read_text().splitlines():
        if line.startswith("-- "):
            found[line[3:]] = []
        elif line:
            list(found.values())[-1].append([cell.strip() for cell in line.split("|")])
    return found


def is_same(one, other):
    try:
        a, b = float(one), float(other)
    except ValueError:
        return one == other
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b))


def compare(right, got):
    right, got = read(right), read(got)
    if list(right) != list(got):
        sys.exit(f"reference.py: the steps are {' '.join(got)}, and not {' '.join(right)}")
    for step, wanted in right.items():
        given = got[step]
        same = len(wanted) == len(given) and all(
            len(a) == len(b) and all(map(is_same, a, b)) for a, b in zip(wanted, given))
        if not same:
            sys.exit(f"reference.py: the answer of {step} is {given[:5]}, and not {wanted[:5]}")
    print(f"{len(right)} steps, {sum(map(len, right.values()))} rows: the same")


if __name__ == "__main__":
    if len(sys.argv) >= 3 and sys.argv[1] == "answers":
        answers(sys.argv[2], sys.argv[3:] or order())
    elif len(sys.argv) == 4 and sys.argv[1] == "compare":
        compare(sys.argv[2], sys.argv[3])
    else:
        sys.exit(__doc__)
