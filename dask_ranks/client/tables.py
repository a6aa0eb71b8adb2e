"""Dask collections among the arguments of `launch`, and how their partitions get to the ranks.

They are found, computed if they were not, counted, given to ranks, and handed over on the workers
(`dask_ranks.handover`). Dask moves what has to move: a partition is an argument of the task
that hands it over. Relies on the scheduler, which knows where partitions are. Promises: what is
computed for a launch is let go of once the ranks have it; a partition that cannot be computed, or
that is no table, is an error before any rank starts.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
from dask.core import flatten
from dask.typing import Key
from distributed import CancelledError, Client, Future, wait

from dask_ranks import handover
from dask_ranks.client.claims import no_answer
from dask_ranks.client.rpc import CONNECTION_LOST, ask_all, known_workers, submit, why_cancelled
from dask_ranks.handover import Look, StandIn, Table
from ddp_common.errors import Error, first_line

KINDS = {"DataFrame", "Series", "Array", "Bag"}  # of collections that have rows
TABLES_INTERVAL = 0.2  # seconds
NEARLY = 1.1  # times the mean: so many rows on a rank are still its share


@dataclass
class Given:
    """A collection among the arguments."""

    name: str  # such as `table`, or `data[1]`
    collection: Any
    futures: list[Future] = field(default_factory=list)  # of its partitions, in order
    is_ours: bool = False  # computed for this launch
    lengths: list[int] = field(default_factory=list)  # rows of each partition


# Finding them


def find(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Given]]:
    """The arguments with stand-ins for collections, and the collections.

    They are looked for in lists, tuples and dicts as well. Raises `Error` for a collection that
    has no rows to train on.
    """
    found: list[Given] = []

    def replaced(value: Any, name: str) -> Any:
        if _is_table(value, name):
            found.append(Given(name, value))
            return StandIn(len(found) - 1)
        if type(value) in (list, tuple):
            return type(value)(
                replaced(each, f"{name}[{number}]") for number, each in enumerate(value)
            )
        if type(value) is dict:
            return {key: replaced(each, f"{name}[{key!r}]") for key, each in value.items()}
        return value

    return {name: replaced(value, name) for name, value in arguments.items()}, found


def _is_table(value: Any, name: str) -> bool:
    if isinstance(value, Future):
        raise Error(
            f"The argument {name} is a single future.\n"
            f"Give its value, {name}=future.result(), or a list of partitions: {name}=[future]."
        )
    if type(value) is list and value and all(isinstance(each, Future) for each in value):
        return True
    if not dask.is_dask_collection(value):
        return False
    if not KINDS & {base.__name__ for base in type(value).__mro__}:
        raise Error(
            f"The argument {name} is a Dask {type(value).__name__}, which has no rows.\n"
            f"Give its value, {name}={name}.compute(), or a DataFrame, Series, Array or Bag; of "
            f"xarray's DataArray that is {name}.data."
        )
    blocks = getattr(value, "numblocks", (1,))  # of an Array, along its axes
    if blocks == () or any(count > 1 for count in blocks[1:]):
        raise Error(
            f"The array {name} has {blocks} chunks along its axes, and a rank gets whole rows.\n"
            f"Chunk it along the first: {name}.rechunk({('auto', *[-1] * (value.ndim - 1))})."
        )
    return True


# Their partitions


class Tables:
    """The collections of one launch.

    For each attempt: `ready`, `rows_held` and `hand_over`, and `handed_over` when that is done.
    """

    def __init__(self, client: Client, found: list[Given]):
        self.client = client
        self.given = found
        self.holders: dict[Key, Sequence[str]] = {}  # addresses of workers, by partition

    def ready(self, timeout: float) -> None:
        """Have every partition in the memory of some worker, and counted.

        Waits while Dask computes them, for the first time or after a worker was lost. Raises
        `Error` if it cannot; so it does where no worker has run tasks for `timeout` seconds.
        """
        if not self.given:
            return
        try:
            self._persist()
            self._wait(timeout)
            while not self._count(timeout):
                time.sleep(TABLES_INTERVAL)
                self._wait(timeout)
        except OSError as error:
            raise no_answer(self.client, error) from None

    def rows_held(self) -> dict[str, int]:
        """How many rows each worker holds, by its address."""
        rows: dict[str, int] = {}
        for given in self.given:
            for future, length in zip(given.futures, given.lengths):
                address = self.holders[future.key][0]
                rows[address] = rows.get(address, 0) + length
        return rows

    def close(self) -> None:
        """Let go of everything: an exception may keep this object for long."""
        for given in self.given:
            given.collection, given.futures = None, []

    def _futures(self) -> list[Future]:
        return [future for given in self.given for future in given.futures]

    # Computing

    def _persist(self) -> None:
        """Have Dask compute what it has not."""
        lacking = []
        for given in self.given:
            if type(given.collection) is list:
                given.futures = given.collection
            elif not given.futures:
                given.futures = _futures_of(given.collection)
            if not given.futures:
                lacking.append(given)
        # Dask computes what several have in common once, and warns where frames are among others.
        for are_frames in (True, False):
            together = [each for each in lacking if hasattr(each.collection, "expr") is are_frames]
            if not together:
                continue
            persisted = self.client.persist([given.collection for given in together])
            for given, collection in zip(together, persisted):
                given.futures = _futures_of(collection)
                given.is_ours = True

    def _wait(self, timeout: float) -> None:
        """Until every partition is computed."""
        futures = self._futures()
        could_work = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError, CancelledError):
                wait(futures, timeout=TABLES_INTERVAL)
            self._raise_for_failed()
            if all(future.status == "finished" for future in futures):
                return
            workers = known_workers(self.client).values()
            if any(worker["status"] == "running" for worker in workers):
                could_work = time.monotonic()
            elif time.monotonic() - could_work > timeout:
                raise Error(
                    f"{self.given[0].name!r} cannot be computed: for {timeout:g} s none of the "
                    f"cluster's {len(workers)} workers has taken tasks.\n"
                    "Start some (cluster.scale(2)), or give more memory to those that Dask has "
                    "paused, as theirs is full."
                )

    def _raise_for_failed(self) -> None:
        for given in self.given:
            for number, future in enumerate(given.futures):
                partition = f"Partition {number} of {given.name!r}"
                if future.status == "error":
                    error = future.exception()
                    assert error is not None, "it has failed"
                    raise Error(
                        f"{partition} could not be computed: {type(error).__name__}: "
                        f"{first_line(error)}.\nIts own error is shown above."
                    ) from error.with_traceback(future.traceback())
                reason = why_cancelled(future)
                if reason == CONNECTION_LOST or self.client.status != "running":
                    raise no_answer(self.client, ConnectionError("the connection was lost"))
                if future.status == "cancelled":  # 'lost' is one that is computed again
                    raise Error(
                        f"{partition} is lost. Dask cannot compute it again: it was scattered, "
                        "or its futures were cancelled.\n"
                        "Make the collection from what can be read again, and persist that."
                    )

    # Counting

    def _count(self, timeout: float) -> bool:
        """Learn where partitions are and how long; False if a worker was lost meanwhile.

        Raises `Error` for a worker that does not answer.
        """
        self.holders = self.client.who_has(self._futures())
        keys = list(self.holders)
        workers = list({address for held in self.holders.values() for address in held})
        try:
            answers = ask_all(
                self.client, handover.look_at, keys, workers=workers, timeout=timeout
            )
        except OSError:  # of a worker that was lost
            return False
        looks = {key: look for answer in answers.values() for key, look in answer.items()}
        if any(key not in looks or not self.holders[key] for key in keys):
            return False
        columns = [
            _take_in(given, [looks[future.key] for future in given.futures])
            for given in self.given
        ]
        _refuse_other_values(self.given, columns)
        return True

    # Handing over

    def hand_over(self, addresses: list[str], attempt_id: str) -> list[Future]:
        """A task for each rank, on its worker, whose result is what `agent.run_rank` takes.

        Raises `Error` if a rank would have no rows.
        """
        goes_to = self._assign(addresses)
        futures = []
        for rank, address in enumerate(addresses):
            tables, partitions = [], []
            for given in self.given:
                mine = [number for number, to in enumerate(goes_to[given.name]) if to == rank]
                tables.append(Table(given.name, given.lengths, dict.fromkeys(mine)))
                partitions.append([given.futures[number] for number in mine])
            key = f"ddp-tables-{attempt_id}-{rank}"
            task = submit(self.client, key, address, handover.hand_over, tables, partitions)
            futures.append(task)
        return futures

    def _assign(self, addresses: list[str]) -> dict[str, list[int]]:
        """For each collection, by its name, the rank that gets each of its partitions."""
        holders = self.client.who_has(self._futures())
        ranks = {address: rank for rank, address in enumerate(addresses)}
        goes_to: dict[str, list[int]] = {}
        # Collections belong together whose partitions are equally long
        groups: dict[tuple[int, ...], list[Given]] = {}
        for given in self.given:
            groups.setdefault(tuple(given.lengths), []).append(given)
        for lengths, group in groups.items():
            lies_on = []
            for parts in zip(*(given.futures for given in group)):
                places = [
                    ranks[address]
                    for part in parts
                    for address in holders.get(part.key, ())
                    if address in ranks
                ]
                lies_on.append(statistics.mode(places) if places else None)
            assigned = assign(lengths, lies_on, len(addresses))
            with_rows = {rank for rank, length in zip(assigned, lengths) if length}
            if len(with_rows) < len(addresses):
                raise Error(
                    f"{group[0].name!r} cannot be shared by {len(addresses)} ranks: "
                    f"{len(addresses) - len(with_rows)} would have no rows. It has {len(lengths)} "
                    f"partition(s), the longest with {max(lengths):,} of {sum(lengths):,} rows.\n"
                    "Make more and smaller ones, with repartition (an Array: rechunk), or start "
                    "fewer ranks: workers=…"
                )
            goes_to.update((given.name, assigned) for given in group)
        return goes_to

    def handed_over(self, tasks: list[Future]) -> None:
        """Once these tasks are done: let go of what was computed for the ranks.

        Raises `Error` if one has failed.
        """
        for rank, task in enumerate(tasks):
            if task.status == "error":
                error = task.exception()
                raise Error(
                    f"The partitions of rank {rank} could not be handed over to it: "
                    f"{type(error).__name__}: {error}.\nGive partitions that can be pickled."
                )
        for given in self.given:
            if given.is_ours:
                given.futures = []


def assign(lengths: Sequence[int], lies_on: Sequence[int | None], ranks: int) -> list[int]:
    """The rank that gets each partition: where it lies, if that one gets no more than its share.

    The others, and those that lie elsewhere, go to the rank with fewest rows. `lengths` are rows,
    `lies_on` the rank on whose worker a partition lies (None: elsewhere).
    """
    share = NEARLY * sum(lengths) / ranks
    rows = [0] * ranks
    goes_to = [-1] * len(lengths)
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for number in longest_first:
        rank = lies_on[number]
        if rank is not None and (rows[rank] == 0 or rows[rank] + lengths[number] <= share):
            goes_to[number] = rank
            rows[rank] += lengths[number]
    for number in longest_first:
        if goes_to[number] == -1:
            # Among those with equally few, the one where it lies
            rank = min(range(ranks), key=lambda rank: (rows[rank], rank != lies_on[number]))
            goes_to[number] = rank
            rows[rank] += lengths[number]
    return goes_to


def _futures_of(collection: Any) -> list[Future]:
    """Of a persisted collection, the future of each partition, in order; none of another."""
    graph = collection.__dask_graph__()
    futures = []
    for key in flatten(collection.__dask_keys__()):
        value = graph.get(key)
        while hasattr(value, "target"):  # another name for a partition
            value = graph.get(value.target)
        if not isinstance(value, Future):
            return []
        futures.append(value)
    return futures


def _take_in(given: Given, looks: list[Look | str]) -> list[tuple[str, str]]:
    """Learn the lengths of a collection's partitions; returns its columns.

    Raises `Error` for what is no partition, and for columns that differ in name, order or type.
    """
    given.lengths = []
    columns: list[tuple[str, str]] = []  # of the first partition that has rows
    for number, look in enumerate(looks):
        partition = f"Partition {number} of {given.name!r}"
        if isinstance(look, str):
            raise Error(
                f"{partition} is of type {look}.\n"
                "Give DataFrames, Series, arrays or lists of samples. Of a sparse block that is "
                "block.toarray(), by map_blocks or client.map."
            )
        rows, columns_here = look
        given.lengths.append(rows)
        columns = columns or (columns_here if rows else [])
        if rows and columns_here != columns:
            both = itertools.zip_longest(columns_here, columns, fillvalue=("nothing", ""))
            found, expected = next(pair for pair in both if pair[0] != pair[1])
            raise Error(
                f"{partition} has other columns or types than those before it: "
                f"{' '.join(found).strip()}, not {' '.join(expected).strip()}.\n"
                "Give all the same columns in one order (frame[names]), of one type (astype)."
            )
    return columns


def _refuse_other_values(given: list[Given], columns: list[list[tuple[str, str]]]) -> None:
    """Raise `Error` where categories have other codes in another table, times another unit."""
    first: dict[str, tuple[str, str]] = {}  # by the column: a table's name, and the type
    for table, its_columns in zip(given, columns):
        for column, kind in its_columns:
            if " categories (" not in kind and not kind.startswith(("date", "time", "dur")):
                continue
            other, its_kind = first.setdefault(column, (table.name, kind))
            if kind != its_kind:
                raise Error(
                    f"The column {column!r} is {kind} in {table.name!r}, and {its_kind} in "
                    f"{other!r}: a model would take one value for another.\nGive both one type "
                    "before launch: .cat.set_categories(names), or, of times, .astype(…)."
                )
