"""How often a finished run is reported as failed because one of its ranks was held up at the end.

    python tests/benchmarks/endings.py [--launches 200] [--rank 1]

Two ranks; when the function returns, threads of one rank keep its interpreter busy with
`json.dumps` of a long list. Prints the launches, the failures, and the seconds that a launch took:
quartiles.
"""

import argparse
import collections
import json
import statistics
import threading
import time

import ddp_common as ddp


def held_up(rank):
    numbers = list(range(1_000_000))
    if ddp.rank() == rank:
        threading.Thread(target=json.dumps, args=(numbers,), daemon=True).start()
    return ddp.rank()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--rank", type=int, default=1)
    options = parser.parse_args()
    failures, seconds = collections.Counter(), []
    with ddp.connect("local", workers=2) as client:
        for _ in range(options.launches):
            began = time.monotonic()
            try:
                ddp.launch(client, held_up, rank=options.rank)
            except ddp.RankFailed as failure:
                failures[str(failure).splitlines()[0]] += 1
            seconds.append(time.monotonic() - began)
    quartiles = ", ".join(f"{each:.2f}" for each in statistics.quantiles(seconds))
    print(f"{options.launches} launches, {failures.total()} failed", end="; ")
    print(f"seconds each (quartiles): {quartiles}")
    for message, count in failures.most_common():
        print(f"{count:5} {message}")


if __name__ == "__main__":
    main()
