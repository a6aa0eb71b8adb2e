"""How often a finished run is reported as failed because one of its ranks was held up at the end.

    python tests/benchmarks/endings.py [--output FILE.json] [--launches 200] [--rank 1]

Two ranks; when the function returns, threads of one rank keep its interpreter busy with
`json.dumps` of a long list. Counts the failures.
"""

import collections
import json
import statistics
import threading
import time

import measuring
from measuring import single

import ddp_common as ddp


def held_up(rank):
    numbers = list(range(1_000_000))
    if ddp.rank() == rank:
        threading.Thread(target=json.dumps, args=(numbers,), daemon=True).start()
    return ddp.rank()


def main():
    parser = measuring.command_line(__doc__, [], "endings")
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--rank", type=int, default=1)
    options = parser.parse_args()
    machine = measuring.describe_machine()
    measuring.show_head(machine)
    failures, seconds = collections.Counter(), []
    with ddp.connect("local", workers=2) as client:
        for _ in range(options.launches):
            began = time.monotonic()
            try:
                ddp.launch(client, held_up, rank=options.rank)
            except ddp.RankFailed as failure:
                failures[str(failure).splitlines()[0]] += 1
            seconds.append(time.monotonic() - began)
    what = f"failures in {options.launches} launches, a rank held up at the end"
    results = [
        single("endings", what, failures.total(), at_most=0),
        single("endings", "such a launch, s", statistics.median(seconds)),
    ]
    measuring.show(results)
    for message, count in failures.most_common():
        print(f"{count:5} {message}")
    measuring.write(options.output, machine, results)


if __name__ == "__main__":
    main()
