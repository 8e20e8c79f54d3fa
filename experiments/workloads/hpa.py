#!/usr/bin/env python3
"""Hash Partitioned Apriori over MPI (Shintani and Kitsuregawa, PDIS 1996).

Each rank has a part of the transactions. In pass k, each candidate of k items belongs to the rank that its hash names. Each rank
makes the k-subsets of its transactions and sends each one to its rank, which counts it. Nothing but counts of frequent sets is
known to all.
"""
import itertools
import zlib
from collections import Counter

from mpi4py import MPI

import itemsets

# Transactions between two exchanges: it bounds the memory for subsets on their way.
BATCH = 2000


def owner(itemset, size):
    """The same on all ranks, unlike Python's own hash."""
    return zlib.crc32(repr(itemset).encode()) % size


def candidates(frequent):
    """Sets of one item more, all of whose subsets of one item less are frequent."""
    by_prefix = {}
    for itemset in sorted(frequent):
        by_prefix.setdefault(itemset[:-1], []).append(itemset[-1])
    for prefix, last in by_prefix.items():
        for pair in itertools.combinations(last, 2):
            candidate = prefix + pair
            if all(candidate[:out] + candidate[out + 1:] in frequent for out in range(len(candidate) - 2)):
                yield candidate


def count_pass(comm, transactions, wanted, length):
    """Counts this rank's candidates, `wanted`, over the transactions of all ranks."""
    size = comm.Get_size()
    counts = Counter()
    batches = comm.allreduce(-(-len(transactions) // BATCH), MPI.MAX)
    for batch in range(batches):
        outgoing = [Counter() for _ in range(size)]
        for transaction in transactions[batch * BATCH:(batch + 1) * BATCH]:
            for subset in itertools.combinations(transaction, length):
                outgoing[owner(subset, size)][subset] += 1
        for incoming in comm.alltoall(outgoing):
            for subset, count in incoming.items():
                if subset in wanted:
                    counts[subset] += count
    return counts


def main():
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    ask = itemsets.arguments(__doc__.split("\n")[0])
    transactions = itemsets.read(ask.transactions, rank, size)
    least = itemsets.least_count(ask.support, comm.allreduce(len(transactions)))

    singles = comm.allreduce(Counter(item for transaction in transactions for item in transaction))
    frequent = {(item,): count for item, count in singles.items() if count >= least}
    found, length = dict(frequent), 1
    while frequent:
        length += 1
        # An item that is in no frequent set of the last pass is in none of the next ones.
        useful = {item for itemset in frequent for item in itemset}
        transactions = [kept for kept in ([item for item in t if item in useful] for t in transactions) if len(kept) >= length]
        own = {candidate for candidate in candidates(frequent) if owner(candidate, size) == rank}
        counts = count_pass(comm, transactions, own, length)
        large = {itemset: count for itemset, count in counts.items() if count >= least}
        frequent = {itemset: count for part in comm.allgather(large) for itemset, count in part.items()}
        found.update(frequent)
    if rank == 0:
        itemsets.show(found)


if __name__ == "__main__":
    main()
