"""Dask collections among the arguments of `launch`, and how their partitions get to the ranks.

They are found, computed if they were not, counted, given to ranks (`balance`), and handed over on
the workers (`ddp_common.worker.handover`). Dask moves what has to move: a partition is an argument
of the task that hands it over. Relies on the scheduler, which knows where partitions are.
Promises: what is computed for a launch is let go of once the ranks have it; a partition that
cannot be computed, and partitions that do not fit together, are errors before any rank starts.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import dask
from dask.typing import Key
from distributed import Client, Future, Scheduler
from distributed.comm import get_address_host

from ddp_common.client.balance import assign, is_balanced
from ddp_common.client.placement import no_answer
from ddp_common.errors import Error, first_line
from ddp_common.ranks.handover import StandIn, Table
from ddp_common.worker import handover

SHORTEST_LOOK, LONGEST_LOOK = 0.01, 0.2  # seconds between two looks at what is computed
PAUSED_TIMEOUT = 5  # seconds in which all workers are paused, and nothing gets done
MEMORY_SHARE = 0.8  # of its limit: a worker that uses more runs no tasks
NAMED = 5  # partitions in a message


@dataclass
class Given:
    """A collection among the arguments."""

    name: str  # such as `table`, or `data[1]`
    collection: Any
    group: str  # those of a group belong together, partition by partition
    futures: list[Future] = field(default_factory=list)  # of its partitions, in order
    is_ours: bool = False  # computed for this launch
    lengths: list[int] = field(default_factory=list)  # rows of each partition
    uneven: dict[str, str] = field(default_factory=dict)  # columns that differ, and how


# Finding them


def find(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Given]]:
    """The arguments with stand-ins for collections, and the collections.

    They are looked for in lists, tuples and dicts as well. Raises `Error` for a collection that
    has no rows to train on.
    """
    found: list[Given] = []

    def replaced(value: Any, name: str, group: str) -> Any:
        if _is_table(value, name):
            found.append(Given(name, value, group))
            return StandIn(len(found) - 1)
        if type(value) in (list, tuple):
            return type(value)(
                replaced(each, f"{name}[{number}]", name) for number, each in enumerate(value)
            )
        if type(value) is dict:
            return {key: replaced(each, f"{name}[{key!r}]", name) for key, each in value.items()}
        return value

    return {name: replaced(value, name, "") for name, value in arguments.items()}, found


def refuse_without_dask(found: list[Given]) -> None:
    """Raise `Error` for collections where torchrun or srun has started the ranks."""
    if found:
        raise Error(
            f"The argument {found[0].name} is a Dask collection, and torchrun or srun has started "
            "these ranks: no Dask worker holds its partitions. Start with Dask (CLUSTER=local, or "
            "the profile of your cluster). Or write it once, with to_parquet, and let each rank "
            "read its files in the training function."
        )


def _is_table(value: Any, name: str) -> bool:
    if isinstance(value, Future):
        raise Error(
            f"The argument {name} is a single future. Give launch what it stands for, "
            f"{name}=future.result(); or, for a table of one partition, a list: {name}=[future]."
        )
    if type(value) is list and value and all(isinstance(each, Future) for each in value):
        return True
    if not dask.is_dask_collection(value):
        return False
    if _is_a(value, "dask.array", "Array"):
        if value.ndim == 0 or any(blocks > 1 for blocks in value.numblocks[1:]):
            raise Error(
                f"The array {name} has chunks of {value.numblocks} along its axes. A rank gets "
                "whole rows: chunk it along the first axis only, "
                f"{name}.rechunk({{0: 'auto', **dict.fromkeys(range(1, {value.ndim}), -1)}})."
            )
        return True
    if _is_a(value, "dask.dataframe", "DataFrame", "Series") or _is_a(value, "dask.bag", "Bag"):
        return True
    raise Error(
        f"The argument {name} is a Dask {type(value).__name__}, which has no rows to train on. "
        f"launch takes DataFrames, Series, Arrays, Bags and lists of futures. Give it the "
        f"value: {name}={name}.compute()."
    )


def _is_a(value: Any, module: str, *names: str) -> bool:
    """Whether it is of a class of a module, which is not imported for that."""
    known = sys.modules.get(module)
    return known is not None and isinstance(value, tuple(getattr(known, name) for name in names))


# Their partitions


class Tables:
    """The collections of one launch."""

    def __init__(self, client: Client, found: list[Given]):
        self.client = client
        self.given = found
        self.bytes: dict[Key, int] = {}  # of each partition that is in memory
        self.holders: dict[Key, list[str]] = {}  # addresses of workers

    def ready(self, timeout: float) -> None:
        """Have every partition in the memory of some worker, and counted.

        Waits while Dask computes them, for the first time or after a worker was lost. Raises
        `Error` if it cannot.
        """
        if not self.given:
            return
        try:
            self._compute()
            self._wait(timeout)
            while not self._count():
                self._wait(timeout)
        except OSError as error:
            raise no_answer(self.client, error) from None
        self._check_groups()

    def rows_held(self) -> dict[str, int]:
        """How many rows each worker holds, by its address."""
        rows: dict[str, int] = {}
        for given in self.given:
            for future, length in zip(given.futures, given.lengths):
                for address in self.holders.get(future.key, [])[:1]:
                    rows[address] = rows.get(address, 0) + length
        return rows

    def close(self) -> None:
        """Let go of everything: an exception may keep this object for long."""
        self._let_go_of_ours()
        for given in self.given:
            given.collection, given.futures = None, []

    def _let_go_of_ours(self) -> None:
        """Have Dask forget what was computed for this launch."""
        for given in self.given:
            if given.is_ours:
                for future in given.futures:
                    future.release()
                given.futures = []

    # Computing

    def _compute(self) -> None:
        """Have Dask compute what it has not."""
        lacking = []
        for given in self.given:
            if type(given.collection) is list:
                given.futures = given.collection
            if not given.futures:
                given.futures = _futures_of(given.collection) or []
            if not given.futures:
                lacking.append(given)
        if not lacking:
            return
        # Dask computes what several have in common once, and warns where frames are among others.
        for are_frames in (True, False):
            together = [each for each in lacking if hasattr(each.collection, "expr") is are_frames]
            if not together:
                continue
            persisted = self.client.persist([given.collection for given in together])
            for given, collection in zip(together, persisted):
                futures = _futures_of(collection)
                assert futures, "a persisted collection has a future for each partition"
                given.futures = futures
                given.is_ours = True

    def _wait(self, timeout: float) -> None:
        keys = [future.key for given in self.given for future in given.futures]
        pause = SHORTEST_LOOK
        in_memory = -1
        moved = time.monotonic()  # when something last got done
        while True:
            look = self.client.run_on_scheduler(_look, keys)
            self._raise_for_failed()
            self._learn(look)
            if len(look["there"]) == len(set(keys)):
                return
            now = time.monotonic()
            if len(look["there"]) != in_memory or look["busy"]:
                in_memory = len(look["there"])
                moved = now
            if not look["workers"] and now - moved > timeout:
                raise Error(
                    f"{self._names()} cannot be computed: the cluster has had no worker for "
                    f"{timeout:g} s. Start some: cluster.scale(2), or `dask worker` with the "
                    f"address {self.client.scheduler.address}."
                )
            all_are_paused = look["workers"] and look["paused"] == look["workers"]
            if all_are_paused and now - moved > PAUSED_TIMEOUT:
                raise Error(self._too_large(look))
            time.sleep(pause)
            pause = min(LONGEST_LOOK, 1.5 * pause)

    def _learn(self, look: dict[str, Any]) -> None:
        self.holders = {}
        for key, (size, addresses) in look["there"].items():
            self.bytes[key] = size
            self.holders[key] = addresses

    def _raise_for_failed(self) -> None:
        for given in self.given:
            for number, future in enumerate(given.futures):
                if future.status == "error":
                    self._raise_failed(given, number, future)
                if future.status == "cancelled":  # 'lost' is one that is computed again
                    raise Error(
                        f"Partition {number} of {given.name!r} is lost, and Dask cannot compute "
                        "it again: it was scattered or its futures were cancelled. Make the "
                        "collection from something that can be read again, and persist it."
                    )

    def _raise_failed(self, given: Given, number: int, future: Future) -> None:
        error = future.exception()
        assert error is not None, "it has failed"
        raise Error(
            f"Partition {number} of {given.name!r} could not be computed: "
            f"{type(error).__name__}: {first_line(error)}. No rank was started. The error of that "
            "partition stands above; put right what it is made from."
        ) from error.with_traceback(future.traceback())

    def _names(self) -> str:
        return " and ".join(repr(given.name) for given in self.given)

    def _too_large(self, look: dict[str, Any]) -> str:
        held = sum(size for size, _ in look["there"].values())
        return (
            f"{self._names()} cannot be computed: the memory of all {look['workers']} workers is "
            f"full, and Dask has paused them. {len(look['there'])} partitions are there, "
            f"{_size(held)}; the workers may use {_size(look['limit'])} in all. Take more workers "
            "or a higher memory_limit, or fewer columns and smaller types."
        )

    # Counting

    def _count(self) -> bool:
        """Count the rows; False if a partition got lost meanwhile."""
        wanted = [given for given in self.given if not given.lengths]
        keys = [future.key for given in wanted for future in given.futures]
        if not keys:
            return True
        holders = sorted({address for key in keys for address in self.holders[key]})
        answers = self.client.run(
            handover.look_at, keys, workers=holders, on_error="ignore"
        ).values()
        seen = {key: found for answer in answers for key, found in answer.items()}
        if any(key not in seen for key in keys):
            return False
        for given in wanted:
            looks = [seen[future.key] for future in given.futures]
            for number, look in enumerate(looks):
                if isinstance(look, str):
                    raise Error(
                        f"Partition {number} of {given.name!r} is {look}. A partition is a "
                        "DataFrame, a Series, an array or a list of samples."
                    )
            given.lengths = [rows for rows, _ in looks]
            if not sum(given.lengths):
                raise Error(
                    f"{given.name!r} has no rows in any of its {len(looks)} partitions. Look at "
                    "what it is filtered by."
                )
            given.uneven = _uneven(looks)
        return True

    # Together

    def _check_groups(self) -> None:
        """Raise `Error` for collections that belong together and have other partitions."""
        for group in self.groups():
            first, *others = group
            for other in others:
                if other.lengths != first.lengths:
                    raise Error(_differ(first, other))

    def groups(self) -> list[list[Given]]:
        """Collections that belong together: those of one argument, and of equal length."""
        groups: dict[tuple, list[Given]] = {}
        for given in self.given:
            total = None if given.group else sum(given.lengths)
            groups.setdefault((given.group, total), []).append(given)
        return list(groups.values())

    # Handing over

    def assign(self, addresses: list[str]) -> list[list[int]]:
        """For each collection, the rank that gets each of its partitions."""
        keys = [future.key for given in self.given for future in given.futures]
        self._learn(self.client.run_on_scheduler(_look, keys))
        ranks = {address: rank for rank, address in enumerate(addresses)}
        assigned: dict[str, list[int]] = {}
        for group in self.groups():
            lies_on = [
                self._where(group, number, ranks) for number in range(len(group[0].lengths))
            ]
            goes_to = assign(group[0].lengths, lies_on, len(addresses))
            assigned.update((given.name, goes_to) for given in group)
        return [assigned[given.name] for given in self.given]

    def _where(self, group: list[Given], number: int, ranks: dict[str, int]) -> int | None:
        """The rank on whose worker most of a partition lies, of all collections of a group."""
        held: dict[int, int] = {}
        for given in group:
            key = given.futures[number].key
            for address in self.holders.get(key, []):
                if address in ranks:
                    rank = ranks[address]
                    held[rank] = held.get(rank, 0) + self.bytes.get(key, 0)
        return max(held, key=lambda rank: held[rank]) if held else None

    def remarks(self, assigned: list[list[int]], ranks: int) -> list[str]:
        """A line for each group of collections that cannot be balanced."""
        lines = []
        for group in self.groups():
            first = group[0]
            goes_to = assigned[self.given.index(first)]
            rows = [0] * ranks
            for length, rank in zip(first.lengths, goes_to):
                rows[rank] += length
            if is_balanced(rows):
                continue
            fullest = rows.index(max(rows))
            share = max(rows) / sum(rows)
            line = (
                f"{first.name}: rank {fullest} holds {share:.0%} of the rows: a step takes as "
                "long as its share."
            )
            without = [str(rank) for rank, count in enumerate(rows) if not count]
            if without:
                line += f" Without any: rank {', '.join(without)}."
            lines.append(f"{line} More and smaller partitions can be balanced (repartition).")
        return lines

    def check_memory(self, addresses: list[str], assigned: list[list[int]]) -> None:
        """Raise `Error` if what a rank gets does not fit into its worker or its host."""
        shares = [0] * len(addresses)
        for given, goes_to in zip(self.given, assigned):
            for future, rank in zip(given.futures, goes_to):
                shares[rank] += self.bytes.get(future.key, 0)
        rooms = self.client.run(handover.room, workers=addresses, on_error="ignore")
        on_host: dict[str, int] = {}
        for rank, (address, share) in enumerate(zip(addresses, shares)):
            if address not in rooms:
                continue  # it has died, which is found out elsewhere
            limit, left = rooms[address]
            if limit and share > MEMORY_SHARE * limit:
                raise Error(
                    f"Rank {rank} gets {_size(share)} of {self._names()}, and its worker's memory "
                    f"limit is {_size(limit)}: the worker would be paused or killed, and so would "
                    "the rank, which has them as well. Take more workers or a higher "
                    "memory_limit, or fewer columns and smaller types."
                )
            host = get_address_host(address)
            on_host[host] = on_host.get(host, 0) + share
            if on_host[host] > left:
                raise Error(
                    f"The ranks on {host} get {_size(on_host[host])} of {self._names()} in all, "
                    f"and the host has {_size(left)} of memory left. Use more hosts, or fewer "
                    "columns and smaller types."
                )

    def hand_over(
        self, addresses: list[str], assigned: list[list[int]], attempt_id: str
    ) -> list[Future]:
        """A task for each rank, on its worker, whose result is a `Handover`."""
        return [
            self._hand_over(rank, address, assigned, attempt_id)
            for rank, address in enumerate(addresses)
        ]

    def _hand_over(
        self, rank: int, address: str, assigned: list[list[int]], attempt_id: str
    ) -> Future:
        tables, partitions, borrowed = [], [], []
        groups = self.groups()
        for given, goes_to in zip(self.given, assigned):
            mine = [number for number, place in enumerate(goes_to) if place == rank]
            (group,) = [number for number, each in enumerate(groups) if given in each]
            table = Table(given.name, given.lengths, dict.fromkeys(mine), group, given.uneven)
            piece = None
            if not any(given.lengths[number] for number in mine):
                lender = next(number for number, rows in enumerate(given.lengths) if rows)
                table.borrowed = sum(given.lengths[:lender]), None
                piece = self.client.submit(
                    handover.first_row, given.futures[lender], pure=False, retries=0
                )
            tables.append(table)
            partitions.append([given.futures[number] for number in mine])
            borrowed.append(piece)
        return self.client.submit(
            handover.hand_over,
            tables,
            partitions,
            borrowed,
            workers=[address],
            pure=False,
            retries=0,
            key=f"ddp-tables-{attempt_id}-{rank}",
            priority=10,
        )

    def handed_over(
        self, addresses: list[str], assigned: list[list[int]], attempt_id: str
    ) -> None:
        """Once all ranks have theirs: let go of what was computed for them.

        Of what somebody else holds, a partition that had to move is where it moved to.
        """
        moved = {}
        for given, goes_to in zip(self.given, assigned):
            if given.is_ours:
                continue
            for future, rank in zip(given.futures, goes_to):
                before = self.holders.get(future.key, [])
                if len(before) == 1 and before[0] != addresses[rank]:
                    moved[future.key] = before[0], addresses[rank]
        self._let_go_of_ours()
        if moved:
            self.client.run_on_scheduler(_drop_copies, moved, attempt_id)


def _futures_of(collection: Any) -> list[Future] | None:
    """Of a persisted collection, the future of each partition, in order; None of another."""
    graph = collection.__dask_graph__()
    futures = []
    for key in _flat(collection.__dask_keys__()):
        value = graph.get(key)
        while hasattr(value, "target"):  # another name for a partition
            value = graph.get(value.target)
        if not isinstance(value, Future):
            return None
        futures.append(value)
    return futures


def _flat(keys: list) -> Iterator[Key]:
    for key in keys:
        if isinstance(key, list):
            yield from _flat(key)
        else:
            yield key


def _uneven(looks: list[tuple[int, dict[str, str]]]) -> dict[str, str]:
    """Columns that are not of the same kind in all partitions that have rows, and how."""
    filled = [(number, kinds) for number, (rows, kinds) in enumerate(looks) if rows]
    first, kinds_of_first = filled[0]
    uneven: dict[str, str] = {}
    for number, kinds in filled[1:]:
        for name in {**kinds_of_first, **kinds}:
            here, there = kinds.get(name, "missing"), kinds_of_first.get(name, "missing")
            if here != there:
                uneven.setdefault(
                    name, f"{there} in partition {first}, {here} in partition {number}"
                )
    return uneven


def _differ(first: Given, other: Given) -> str:
    names = f"{first.name!r} and {other.name!r}"
    if len(first.lengths) != len(other.lengths):
        what = f"{len(first.lengths)} and {len(other.lengths)} partitions"
    else:
        differing = [
            f"{mine:,} and {theirs:,} rows in partition {number}"
            for number, (mine, theirs) in enumerate(zip(first.lengths, other.lengths))
            if mine != theirs
        ]
        what = ", ".join(differing[:NAMED])
    return (
        f"{names} belong together, row by row, and have {what}. Compute them from one collection, "
        "so that their partitions are the same, or keep them as columns of one table. If they "
        f"have nothing to do with each other, give one in a list of its own: {other.name}=["
        f"{other.name}]."
    )


def _size(number: float) -> str:
    unit, name = (2**30, "GiB") if number >= 2**29 else (2**20, "MiB")
    return f"{number / unit:,.1f} {name}"


# On the scheduler


def _look(keys: list[Key], dask_scheduler: Scheduler) -> dict[str, Any]:
    """Which of the partitions are there, and what workers do."""
    workers = dask_scheduler.workers.values()
    there = {}
    for key in keys:
        task = dask_scheduler.tasks.get(key)
        if task is not None and task.state == "memory":
            holders = [worker.address for worker in task.who_has or ()]
            there[key] = max(0, task.nbytes), holders
    return {
        "there": there,
        "workers": len(workers),
        "paused": sum(worker.status.name == "paused" for worker in workers),
        "busy": sum(len(worker.executing) for worker in workers),
        "limit": sum(worker.memory_limit for worker in workers),
    }


def _drop_copies(
    moved: dict[Key, tuple[str, str]], attempt_id: str, dask_scheduler: Scheduler
) -> None:
    """Have workers forget partitions that have moved, unless another launch needs them there."""
    claims = dask_scheduler.__dict__.get("ddp_claims", {})
    for key, (before, now) in moved.items():
        task = dask_scheduler.tasks.get(key)
        if task is None:
            continue
        holders = {worker.address for worker in task.who_has or ()}
        _, owner = claims.get(before, (None, attempt_id))
        if holders == {before, now} and owner == attempt_id:
            dask_scheduler.request_remove_replicas(
                before, [key], stimulus_id=f"ddp-moved-{attempt_id}"
            )
