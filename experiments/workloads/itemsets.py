"""What the programs that look for frequent itemsets share: their input, and how they print what they found."""
import argparse


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("transactions", help="a file with one transaction in each line")
    parser.add_argument("--support", type=float, default=0.01, help="the share of the transactions that have a frequent set")
    return parser.parse_args()


def read(path, rank=0, size=1):
    """The part of the transactions that belongs to a rank: each `size`-th line."""
    with open(path) as file:
        return [sorted({int(item) for item in line.split()}) for number, line in enumerate(file) if number % size == rank]


def least_count(support, transactions):
    """How many transactions must have a set."""
    return max(1, -int(-support * transactions // 1))


def show(found):
    """`found`: counts by itemsets, which are sorted tuples. The same sets are always printed in the same order."""
    for itemset, count in sorted(found.items(), key=lambda one: (len(one[0]), one[0])):
        print(*itemset, f"({count})")
