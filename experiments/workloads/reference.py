#!/usr/bin/env python3
"""Frequent itemsets in one process, by counting depth first which transactions have each set. Shares nothing with HPA and PFP."""
import itemsets


def mine(prefix, having, least, found):
    """`having`: for each item that may follow the prefix, the set of the transactions that have both."""
    items = sorted(having)
    for index, item in enumerate(items):
        itemset = (*prefix, item)
        found[itemset] = len(having[item])
        both = {other: having[item] & having[other] for other in items[index + 1:]}
        mine(itemset, {other: rows for other, rows in both.items() if len(rows) >= least}, least, found)


def main():
    ask = itemsets.arguments(__doc__)
    transactions = itemsets.read(ask.transactions)
    least = itemsets.least_count(ask.support, len(transactions))
    having = {}
    for row, transaction in enumerate(transactions):
        for item in transaction:
            having.setdefault(item, set()).add(row)
    found = {}
    mine((), {item: rows for item, rows in having.items() if len(rows) >= least}, least, found)
    itemsets.show(found)


if __name__ == "__main__":
    main()
