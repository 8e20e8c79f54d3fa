#!/usr/bin/env python3
"""Makes transactions as the Quest generator does (Agrawal and Srikant, VLDB 1994, section 2.4.3).

There are patterns, sets of items that people buy together. Each pattern has a weight, shares some items with the one before it,
and is often bought in part. A transaction is filled with patterns until it is long enough. One line is one transaction.
"""
import argparse
import random


def poisson(chance, mean):
    """Knuth's method: means here are small."""
    limit, count, product = 2.718281828459045 ** -mean, 0, chance.random()
    while product > limit:
        count += 1
        product *= chance.random()
    return count


def make_patterns(chance, count, items, mean_length, correlation=0.5):
    patterns, before = [], []
    for _ in range(count):
        length = max(1, min(items, poisson(chance, mean_length)))
        shared = min(len(before), length, int(chance.expovariate(1 / correlation) * length))
        chosen = set(chance.sample(before, shared))
        while len(chosen) < length:
            chosen.add(chance.randrange(items))
        before = sorted(chosen)
        corruption = min(1.0, max(0.0, chance.gauss(0.5, 0.1)))
        patterns.append((before, corruption))
    weights = [chance.expovariate(1) for _ in patterns]
    return patterns, weights


def transactions(seed, count, items, mean_length, patterns, pattern_length):
    chance = random.Random(seed)
    patterns, weights = make_patterns(chance, patterns, items, pattern_length)
    left_over = None
    for _ in range(count):
        length = max(1, min(items, poisson(chance, mean_length)))
        bought = set()
        while len(bought) < length:
            pattern = left_over or chance.choices(patterns, weights)[0]
            left_over = None
            part = list(pattern[0])
            while part and chance.random() < pattern[1]:
                part.pop(chance.randrange(len(part)))
            # What does not fit goes into the next transaction in half of the cases.
            if bought and len(bought) + len(part) > length and chance.random() < 0.5:
                left_over = pattern
                break
            bought.update(part or [chance.randrange(items)])
        yield sorted(bought)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transactions", type=int, default=10_000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--length", type=float, default=10, help="mean length of a transaction")
    parser.add_argument("--patterns", type=int, default=200)
    parser.add_argument("--pattern-length", type=float, default=4)
    ask = parser.parse_args()
    made = transactions(ask.seed, ask.transactions, ask.items, ask.length, ask.patterns, ask.pattern_length)
    for transaction in made:
        print(*transaction)


if __name__ == "__main__":
    main()
