#!/usr/bin/env python3
"""Parallel FP-growth over MPI (Pramudiono and Kitsuregawa, 2003).

Each rank builds an FP-tree of its own transactions. For each frequent item, the paths above it in all of these trees are sent to
one rank, which mines the sets that end with this item without asking anybody.
"""
from collections import Counter

from mpi4py import MPI

import itemsets


class Tree:
    """Transactions with a common beginning share nodes. Items are in the order of their frequency."""

    def __init__(self):
        self.root = (None, None, {})  # item, parent, children
        self.counts = {}  # by the ids of nodes
        self.nodes = {}  # by item

    def add(self, items, count):
        node = self.root
        for item in items:
            child = node[2].get(item)
            if child is None:
                child = node[2][item] = (item, node, {})
                self.nodes.setdefault(item, []).append(child)
                self.counts[id(child)] = 0
            self.counts[id(child)] += count
            node = child

    def paths_above(self, item):
        """What is bought together with the item, and how often: from the root down."""
        paths = Counter()
        for node in self.nodes.get(item, []):
            path, above = [], node[1]
            while above[0] is not None:
                path.append(above[0])
                above = above[1]
            paths[tuple(reversed(path))] += self.counts[id(node)]
        return paths


def grow(suffix, paths, least, found):
    """Finds all frequent sets that end with the suffix. `paths`: how often each path comes before it."""
    counts = Counter()
    for path, count in paths.items():
        for item in path:
            counts[item] += count
    frequent = {item for item, count in counts.items() if count >= least}
    if not frequent:
        return
    tree = Tree()
    for path, count in paths.items():
        tree.add([item for item in path if item in frequent], count)
    for item in frequent:
        itemset = (item, *suffix)
        found[tuple(sorted(itemset))] = counts[item]
        grow(itemset, tree.paths_above(item), least, found)


def main():
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    ask = itemsets.arguments(__doc__.split("\n")[0])
    transactions = itemsets.read(ask.transactions, rank, size)
    least = itemsets.least_count(ask.support, comm.allreduce(len(transactions)))

    singles = comm.allreduce(Counter(item for transaction in transactions for item in transaction))
    order = sorted((item for item, count in singles.items() if count >= least), key=lambda item: (-singles[item], item))
    place = {item: number for number, item in enumerate(order)}
    tree = Tree()
    for transaction in transactions:
        tree.add(sorted((item for item in transaction if item in place), key=place.get), 1)

    # Neighbours in the order have much the same work, so they go to different ranks.
    outgoing = [{item: tree.paths_above(item) for item in order[to::size]} for to in range(size)]
    found = {(item,): singles[item] for item in order[rank::size]}
    incoming = comm.alltoall(outgoing)
    for item in order[rank::size]:
        paths = Counter()
        for part in incoming:
            paths.update(part[item])
        grow((item,), paths, least, found)
    everything = comm.gather(found)
    if rank == 0:
        itemsets.show({itemset: count for part in everything for itemset, count in part.items()})


if __name__ == "__main__":
    main()
