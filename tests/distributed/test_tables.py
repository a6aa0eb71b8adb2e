"""Dask collections as arguments of `launch`: every rank gets the partitions on its worker."""

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from children import children
from dask import delayed
from distributed import Status, wait
from processes import Background, held_back, log_of, wait_until, workers_of
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Twelve partitions: one is empty, one has 60 % of the rows
LENGTHS = [13, 7, 0, 25, 180, 9, 11, 3, 17, 12, 8, 15]
ROWS = sum(LENGTHS)
BATCH, EPOCHS = 32, 2
FEATURES = ["a", "b", "c"]


def part(number, pause=0.0, lengths=LENGTHS):
    """Partition `number`: the same whenever and wherever it is computed."""
    time.sleep(pause)
    generator = np.random.default_rng(number)
    length = lengths[number]
    start = sum(lengths[:number])
    frame = pd.DataFrame(generator.normal(size=(length, 3)), columns=FEATURES)
    frame["y"] = frame.sum(axis=1) + generator.normal(size=length) / 10
    frame["row"] = np.arange(start, start + length)
    frame.index = frame.row.to_numpy()
    return frame


def frame_of(lengths=LENGTHS):
    return dd.from_map(functools.partial(part, lengths=lengths), range(len(lengths)))


def whole():
    return pd.concat([part(number) for number in range(len(LENGTHS))])


def everyone(mine):
    found = [None] * ddp.world_size()
    dist.all_gather_object(found, mine)
    return found


def train(table, use_loader=False, epochs=EPOCHS):
    """Loss of each step, rows of each step, and the weights, of a linear model."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = ddp.ElasticSampler(table, BATCH, seed=1)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=3)
    checkpoint.restore()
    loader = DataLoader(table, batch_sampler=sampler)
    losses, dealt = [], []
    for _ in sampler.epochs(epochs):
        for batch in loader if use_loader else sampler:
            frame = batch if use_loader else table.take(batch)
            x = torch.from_numpy(frame[FEATURES].to_numpy())
            y = torch.from_numpy(frame["y"].to_numpy())
            loss = ((model(x)[:, 0] - y) ** 2).mean() * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / ddp.world_size()
            dist.all_reduce(mean)
            losses.append(float(mean))
            ddp.report(loss=float(mean))
            dealt.append(frame.row.to_list() if sampler.weight else [])
    steps = [sorted(sum(rows, [])) for rows in zip(*everyone(dealt))]
    weights = torch.cat([each.detach().flatten() for each in model.module.parameters()])
    return losses, steps, weights


def on_ranks(client, size, function, **arguments):
    return ddp.launch(client, function, workers=size, **arguments).result


def addresses_of(client):
    return list(client.scheduler_info(n_workers=-1)["workers"])


def placed(client, places, function=part, **options):
    """The partitions as futures, each on the worker that `places` names by its number.

    One after the other: of tasks that wait on a worker, idle ones would steal some. Others are
    allowed, since the partitions of a worker that is lost are computed elsewhere.
    """
    addresses = addresses_of(client)
    futures = []
    for number, place in enumerate(places):
        future = client.submit(
            function, number, workers=[addresses[place]], pure=False, allow_other_workers=True
        )
        wait(future)
        futures.append(future)
    return futures


@pytest.fixture(scope="module")
def alone(client, tmp_path_factory):
    """What training on one rank gives."""
    return on_ranks(client, 1, train, directory=tmp_path_factory.mktemp("run"), table=frame_of())


def test_each_row_is_trained_on_once_per_epoch(alone):
    _, steps, _ = alone
    per_epoch = -(-ROWS // BATCH)
    assert len(steps) == EPOCHS * per_epoch
    for epoch in range(EPOCHS):
        rows = sum(steps[epoch * per_epoch : (epoch + 1) * per_epoch], [])
        assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_losses_do_not_depend_on_the_number_of_ranks_or_where_partitions_lie(client, alone, size):
    places = np.random.default_rng(size).integers(4, size=len(LENGTHS))
    futures = placed(client, places)
    losses, steps, weights = on_ranks(client, size, train, table=futures, use_loader=size > 2)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    assert steps == alone[1]
    torch.testing.assert_close(weights, alone[2], rtol=1e-6, atol=1e-9)


# What arrives


def describe(**tables):
    return everyone(
        {
            name: (type(table).__name__, len(table), table.rows.tolist(), table.parts)
            for name, table in tables.items()
        }
    )


def test_each_kind_of_collection_arrives_as_it_was(client):
    array = da.from_array(np.arange(40).reshape(20, 2), chunks=(5, 2))
    frame = dd.from_pandas(pd.DataFrame({"a": range(20)}), npartitions=4)
    bag = db.from_sequence([f"sample {number}" for number in range(20)], npartitions=4)
    futures = client.map(np.ones, [5, 5, 5, 5], pure=False)
    for size in (1, 3):
        ranks = on_ranks(
            client, size, describe, array=array, frame=frame, series=frame.a, bag=bag, many=futures
        )
        for name, kind in (
            ("array", np.ndarray),
            ("frame", pd.DataFrame),
            ("series", pd.Series),
            ("bag", list),
            ("many", np.ndarray),
        ):
            held = [rank[name] for rank in ranks]
            assert {(table, length) for table, length, _, _ in held} == {("Rows", 20)}
            assert sorted(row for _, _, rows, _ in held for row in rows) == list(range(20))
            assert {type(each) for _, _, _, parts in held for each in parts} == {kind}
            # Of one length: they belong together, and lie together
            assert [rows for _, _, rows, _ in held] == [rank["frame"][2] for rank in ranks]
    (first,) = on_ranks(client, 1, describe, array=array)
    np.testing.assert_array_equal(np.concatenate(first["array"][3]), array.compute())


def nested(data, plain):
    (x, y), extra = data["pair"], data["extra"][0]
    rows = next(iter(ddp.ElasticSampler(x, 8)))
    together = (x.take(rows)[:, 0] == y.take(rows).to_numpy()).all()
    return everyone((bool(together), len(extra), plain))


def test_collections_are_found_in_lists_tuples_and_dicts(client):
    frame = dd.from_pandas(pd.DataFrame({"a": range(20)}), npartitions=4)
    x = frame.to_dask_array(lengths=True)
    data = {"pair": (x, frame.a), "extra": [frame.partitions[:1]]}
    assert on_ranks(client, 2, nested, data=data, plain={"a": [1]}) == [(True, 5, {"a": [1]})] * 2


def held_in_launch(table):
    return everyone([part.row.iloc[0] if len(part) else None for part in table.parts])


def test_ranks_start_where_the_partitions_lie_and_nothing_moves(client):
    def sent():
        return client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total)

    lengths = [500, 500, 500, 500]
    function = functools.partial(part, lengths=lengths)
    futures = placed(client, [3, 1, 1, 3], function=function)
    before = sent()
    run = ddp.launch(client, held_in_launch, workers=2, table=futures)
    addresses = addresses_of(client)
    by_worker = dict(zip(workers_of(run.directory), run.result))
    assert by_worker == {addresses[3]: [0, 1500], addresses[1]: [500, 1000]}
    assert sent() == before


def test_partitions_move_once_to_where_they_are_needed(client):
    futures = placed(client, [0] * 4, function=functools.partial(part, lengths=[50] * 4))
    run = ddp.launch(client, held_in_launch, workers=2, table=futures)
    assert sorted(map(len, run.result)) == [2, 2]
    holders = client.who_has(futures)
    wait_until(lambda: all(len(held) == 1 for held in client.who_has(futures).values()))
    holders = {address for held in client.who_has(futures).values() for address in held}
    assert holders == set(workers_of(run.directory))


def test_what_cannot_be_balanced_is_said(client):
    run = ddp.launch(client, held_in_launch, workers=3, table=frame_of())
    assert "holds 60% of the rows: a step takes as long as its share" in log_of(run.directory)


def test_more_ranks_than_partitions(client):
    lengths = [40, 0, 30]
    losses, steps, _ = on_ranks(client, 1, train, table=frame_of(lengths))
    run = ddp.launch(client, train, workers=4, table=frame_of(lengths))
    np.testing.assert_allclose(run.result[0], losses, rtol=1e-6)
    assert run.result[1] == steps
    assert "Without any: rank" in log_of(run.directory)


def evaluate(table):
    seen = []
    for rows in ddp.EvalSampler(table, 10):
        seen += table.take(rows).row.to_list()
    return everyone(seen)


@pytest.mark.parametrize("size", [1, 3])
def test_evaluation_counts_each_row_once(client, size):
    seen = sum(on_ranks(client, size, evaluate, table=frame_of()), [])
    assert sorted(seen) == list(range(ROWS))


def test_a_run_goes_on_at_another_number_of_ranks_and_in_another_placement(
    client, alone, tmp_path
):
    first = ddp.launch(
        client, train, workers=3, directory=tmp_path / "run", table=frame_of(), epochs=1
    )
    assert len(first.result[0]) == len(alone[0]) // 2
    futures = placed(client, [1, 0, 2, 3] * 3)
    losses, steps, weights = ddp.launch(
        client, train, workers=2, directory=tmp_path / "run", table=futures
    ).result
    left = len(losses)
    assert 0 < left < len(alone[0])
    np.testing.assert_allclose(losses, alone[0][-left:], rtol=1e-6)
    assert steps == alone[1][-left:]
    torch.testing.assert_close(weights, alone[2], rtol=1e-6, atol=1e-9)


# Losses


@pytest.mark.parametrize("is_persisted", [True, False], ids=["persisted", "not_persisted"])
def test_a_killed_worker_s_partitions_are_computed_again(client, alone, tmp_path, is_persisted):
    table = frame_of()
    if is_persisted:
        table = client.persist(table)
        wait(table)
    directory = tmp_path / "run"
    gate = tmp_path / "gate"
    with held_back(train, gate) as waits:
        launching = Background(
            ddp.launch, client, waits, workers=2, restarts=1, directory=directory, table=table
        )
        wait_until(lambda: "step-00000006" in str(list(directory.rglob("*.pt"))))
        victim = workers_of(directory)[1]
        client.run(os._exit, 1, workers=[victim], on_error="ignore")
    run = launching.outcome()
    assert len(run.failures) == 1
    torch.testing.assert_close(run.result[2], alone[2], rtol=1e-6, atol=1e-9)


class SlowToMove(list):
    """Samples that say when they move to another worker, and wait for the file `gate` there."""

    def __init__(self, samples, folder):
        super().__init__(samples)
        self.folder = folder

    def __reduce__(self):
        is_in_a_task = threading.current_thread().name.startswith("Dask-Default-Threads")
        if not is_in_a_task:  # but in what sends it
            (self.folder / "moving").touch()
            while not (self.folder / "gate").exists():
                time.sleep(0.02)
        return SlowToMove, (list(self), self.folder)


def samples_of(number, folder):
    return SlowToMove(range(10 * number, 10 * number + 10), folder)


def seen_by_all(table):
    return sorted(sum(everyone([sample for part in table.parts for sample in part]), []))


def test_a_worker_lost_while_partitions_move_costs_one_restart(client, tmp_path):
    futures = placed(client, [0] * 4, functools.partial(samples_of, folder=tmp_path))
    (holder,) = {address for where in client.who_has(futures).values() for address in where}
    (pid,) = client.run(os.getpid, workers=[holder]).values()
    launching = Background(
        ddp.launch,
        client,
        seen_by_all,
        workers=2,
        restarts=1,
        directory=tmp_path / "run",
        table=futures,
    )
    wait_until((tmp_path / "moving").exists)
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "gate").touch()
    run = launching.outcome()
    assert len(run.failures) == 1 and "worker" in str(run.failures[0])
    assert run.result == list(range(40))


def changing(number, mark):
    """Partition 1 has a row less once `mark` is there."""
    return part(number).iloc[: 5 if number == 1 and mark.exists() else 6]


def test_a_partition_that_has_another_length_after_a_loss_is_refused(client, tmp_path):
    mark = tmp_path / "mark"
    futures = placed(client, [0, 1, 2, 3], functools.partial(changing, mark=mark))
    directory = tmp_path / "run"
    gate = tmp_path / "gate"
    with held_back(train, gate) as waits:
        launching = Background(
            ddp.launch,
            client,
            waits,
            workers=4,
            restarts=1,
            directory=directory,
            table=futures,
            epochs=20,
        )
        wait_until(lambda: "step-00000006" in str(list(directory.rglob("*.pt"))))
        mark.touch()
        (holder,) = client.who_has(futures[1:2])[futures[1].key]
        client.run(os._exit, 1, workers=[holder], on_error="ignore")
    with pytest.raises(ddp.Error, match="Partition 1 of 'table' had 6 rows and has 5 now"):
        launching.outcome()


# Nothing is left


def shared_memory():
    """Processes of this test that have the memory of tables open or mapped.

    It is in no folder: when nobody has it, it is gone.
    """
    found = []
    for pid in children():
        with contextlib.suppress(OSError):  # it has just ended
            links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
            if any(
                "ddp-tables" in text for text in (*links, Path(f"/proc/{pid}/maps").read_text())
            ):
                found.append(pid)
    return found


def state_of(client):
    gc.collect()  # an exception that a test has caught may hold futures
    held = {key for keys in client.has_what().values() for key in keys}
    return set(client.futures), held, shared_memory()


def look_for_memory(table):
    path = Path("/proc/self/maps")
    return everyone("ddp-tables" in path.read_text() and bool(table.parts))


def test_nothing_is_left(client):
    wait_until(lambda: not shared_memory())  # what earlier tests have handed over
    before = state_of(client)
    assert on_ranks(client, 2, look_for_memory, table=frame_of()) == [True, True]
    with pytest.raises(ddp.RankFailed):
        ddp.launch(client, fail, workers=2, table=frame_of())
    with pytest.raises(ddp.Error):
        ddp.launch(client, held_in_launch, workers=2, table=frame_of([0, 0]))
    # What earlier tests held may have gone meanwhile.
    wait_until(lambda: all(set(now) <= set(then) for now, then in zip(state_of(client), before)))


def fail(table):
    raise ValueError("on purpose")


def memory_of_workers(gate, table):
    if ddp.rank() == 0:
        gate.with_name("there").touch()
        while not gate.exists():
            time.sleep(0.02)
    dist.barrier()


def test_what_was_computed_for_a_launch_is_let_go_of_once_the_ranks_have_it(client, tmp_path):
    def left():
        """What workers hold of this launch, beside its ranks."""
        held = {str(key) for keys in client.has_what().values() for key in keys}
        return sorted(key for key in held - before if "ddp-" not in key)

    before = {str(key) for keys in client.has_what().values() for key in keys}
    gate = tmp_path / "gate"
    launching = Background(
        ddp.launch, client, memory_of_workers, workers=2, gate=gate, table=frame_of()
    )
    try:
        wait_until((tmp_path / "there").exists)
        wait_until(lambda: not any("from_map" in str(key) for key in client.futures))
        wait_until(lambda: len(shared_memory()) == 2)  # that of the ranks
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left())
        assert left() == []
    finally:
        gate.touch()
        launching.outcome()


def test_two_launches_use_one_table_at_once(client):
    table = client.persist(frame_of())
    both = [Background(on_ranks, client, 2, train, table=table) for _ in range(2)]
    first, second = [each.outcome() for each in both]
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)


# Bad input


def broken(number):
    if number == 2:
        raise ZeroDivisionError("the third is broken")
    return part(number)


def frame(rows, partitions, start=0):
    return dd.from_pandas(
        pd.DataFrame({"a": range(rows)}, index=range(start, start + rows)), npartitions=partitions
    )


BAD = {
    "an array in columns": (
        lambda: {"x": da.ones((20, 4), chunks=(5, 2))},
        r"array x has chunks of \(4, 2\).*rechunk",
    ),
    "a single future": (lambda: {"x": ddp_client().submit(part, 0)}, "x is a single future"),
    "delayed": (lambda: {"x": delayed(part)(0)}, "Dask Delayed, which has no rows"),
    "no rows": (lambda: {"x": frame_of([0, 0])}, "'x' has no rows in any of its 2 partitions"),
    "no partition": (
        lambda: {"x": ddp_client().map(str, [1, 2], pure=False)},
        "Partition 0 of 'x' is a str",
    ),
    "other partitions": (
        lambda: {"x": frame(20, 4), "y": frame(20, 2)},
        "'x' and 'y' belong together.* 4 and 2 partitions",
    ),
    "other lengths": (
        lambda: {"data": (frame(20, 4), frame(24, 4))},
        r"'data\[0\]' and 'data\[1\]' belong together.*5 and 6 rows in partition 0",
    ),
    "other index": (
        lambda: {"x": frame(20, 4), "y": frame(20, 4, start=1)},
        "index of 'x' and that of 'y' differ in partition",
    ),
    "a partition that fails": (
        lambda: {"x": dd.from_map(broken, range(4), meta=part(0))},
        "Partition 2 of 'x' could not be computed: ZeroDivisionError: the third is broken",
    ),
}


def ddp_client():
    from distributed import default_client

    return default_client()


@pytest.mark.parametrize("case", BAD)
def test_bad_collections_are_refused_before_a_rank_starts(client, case, tmp_path):
    make, words = BAD[case]
    with client.as_current(), pytest.raises(ddp.Error, match=words) as caught:
        ddp.launch(client, describe, workers=2, directory=tmp_path / "run", **make())
    assert not isinstance(caught.value, ddp.RankFailed)
    assert "started: process" not in log_of(tmp_path / "run")


def test_the_traceback_of_a_partition_that_fails_is_kept(client):
    with pytest.raises(ddp.Error) as caught:
        ddp.launch(client, describe, x=dd.from_map(broken, range(4), meta=part(0)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    names = []
    traceback = caught.value.__cause__.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "broken" in names


def test_a_list_of_its_own_says_that_tables_do_not_belong_together(client):
    x, y = frame(20, 4), frame(20, 2, start=1)
    assert on_ranks(client, 2, lengths_of, x=x, y=[y]) == [(20, 20)] * 2


def lengths_of(x, y):
    return everyone((len(x), len(y[0])))


def test_texts_among_the_numbers_are_named_by_the_rank(client):
    table = dd.from_pandas(pd.DataFrame({"a": range(8), "s": ["x"] * 8}), npartitions=2)
    with pytest.raises(ddp.RankFailed, match=r"columns that are no numbers: s \("):
        ddp.launch(client, tensors_of, workers=2, table=table)


def tensors_of(table):
    return table.tensors(["a", "s"])


def test_scattered_partitions_that_are_lost_cannot_come_back(client):
    futures = client.scatter([part(0), part(1)], hash=False)
    (holder,) = client.who_has(futures[:1])[futures[0].key]
    client.run(os._exit, 1, workers=[holder], on_error="ignore")
    wait_until(lambda: futures[0].status != "finished")
    with pytest.raises(ddp.Error, match="Partition [01] of 'x' is lost"):
        ddp.launch(client, describe, workers=1, x=futures)


def test_too_little_memory_is_found_before_a_rank_starts(client, tmp_path):
    table = client.map(np.ones, [(2**20, 2)] * 2, pure=False)
    wait(table)

    def limit_memory(limit, dask_worker):
        was = dask_worker.memory_manager.memory_limit
        dask_worker.memory_manager.memory_limit = limit
        return was

    was = client.run(limit_memory, 2**24)
    try:
        with pytest.raises(ddp.Error, match=r"gets 32.0 MiB of 'x', .* limit is 16.0 MiB"):
            ddp.launch(client, describe, workers=1, directory=tmp_path / "run", x=table)
    finally:
        for address, limit in was.items():
            client.run(limit_memory, limit, workers=[address])
    assert "started: process" not in log_of(tmp_path / "run")


def test_where_all_workers_are_paused_it_says_so_instead_of_waiting_for_ever(client, tmp_path):
    def set_status(status, dask_worker):  # as a worker's memory monitor does
        dask_worker.status = status

    def statuses(dask_scheduler):
        return {worker.status for worker in dask_scheduler.workers.values()}

    table = frame_of()  # now: Dask computes a little of it to know its columns
    client.run(set_status, Status.paused)
    try:
        wait_until(lambda: client.run_on_scheduler(statuses) == {Status.paused})
        with pytest.raises(
            ddp.Error, match="memory of all 4 workers is full, and Dask has paused"
        ):
            ddp.launch(client, describe, workers=1, directory=tmp_path / "run", x=table)
    finally:
        client.run(set_status, Status.running)
    wait_until(lambda: client.run_on_scheduler(statuses) == {Status.running})
    assert "started: process" not in log_of(tmp_path / "run")


def test_under_torchrun_a_collection_is_refused_with_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import dask.array as da
            import ddp_common as ddp

            with ddp.connect() as client:
                ddp.launch(client, lambda x: x, x=da.ones(4))
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "x is a Dask collection, and torchrun or srun has started these ranks" in done.stderr
    assert "to_parquet" in done.stderr
