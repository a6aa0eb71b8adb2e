"""Dask collections as arguments of `launch`: every rank gets the partitions on its worker."""

import functools
import gc
import os
import sys
import threading
import time

import cloudpickle
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy
import torch
import torch.distributed as dist
from distributed import wait
from processes import Background, held_back, log_of, saved_steps, wait_until, workers_of
from tables_here import everyone, on_ranks, placed
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from dask_ranks.client.rpc import known_workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# Twelve partitions: one is empty, one has 60 % of the rows
LENGTHS = [13, 7, 0, 25, 180, 9, 11, 3, 17, 12, 8, 15]
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


def train(table, use_loader=False, epochs=EPOCHS):
    """Loss of each step, rows of each step, and the weights, of a linear model."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = ddp.ElasticSampler(table, BATCH, seed=1)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=3)
    checkpoint.restore()
    loader = ddp.DataLoader(table, batch_sampler=sampler)
    losses, dealt = [], []
    for _ in sampler.epochs(epochs):
        for batch in loader if use_loader else sampler.batches():
            frame = batch if use_loader else table.take(batch)
            x = torch.from_numpy(frame[FEATURES].to_numpy())
            y = torch.from_numpy(frame["y"].to_numpy())
            loss = ((model(x)[:, 0] - y) ** 2).mean() * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            mean = loss.detach() / ddp.world_size()
            dist.all_reduce(mean)
            losses.append(float(mean))
            ddp.report(loss=float(mean))
            dealt.append(frame.row.to_list() if sampler.weight else [])
    steps = [sorted(sum(rows, [])) for rows in zip(*everyone(dealt))]
    weights = torch.cat([each.detach().flatten() for each in model.module.parameters()])
    return losses, steps, weights


@pytest.fixture(scope="module")
def alone(client, tmp_path_factory):
    """What training on one rank gives."""
    return on_ranks(client, 1, train, directory=tmp_path_factory.mktemp("run"), table=frame_of())


@pytest.mark.parametrize("size", [2, 3])
def test_losses_do_not_depend_on_the_number_of_ranks_or_where_partitions_lie(client, alone, size):
    places = np.random.default_rng(size).integers(4, size=len(LENGTHS))
    futures = placed(client, places, part)
    losses, steps, weights = on_ranks(client, size, train, table=futures, use_loader=size > 2)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    assert steps == alone[1]
    torch.testing.assert_close(weights, alone[2], rtol=1e-6, atol=1e-9)


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
    for size in (1, 2):
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
    sampler = ddp.ElasticSampler(x, 8)
    rows = [rows for _ in sampler.epochs(1) for rows in sampler.batches()][0]
    together = (x.take(rows)[:, 0] == y.take(rows).to_numpy()).all()
    return everyone((bool(together), len(extra), plain))


def test_collections_are_found_in_lists_tuples_and_dicts(client):
    frame = dd.from_pandas(pd.DataFrame({"a": range(20)}), npartitions=4)
    x = frame.to_dask_array(lengths=True)
    data = {"pair": (x, frame.a), "extra": [frame.partitions[:2]]}
    assert on_ranks(client, 2, nested, data=data, plain={"a": [1]}) == [(True, 10, {"a": [1]})] * 2


def held_in_launch(table):
    return everyone([part.row.iloc[0] if len(part) else None for part in table.parts])


def test_ranks_start_where_the_partitions_lie_and_nothing_moves(client):
    def sent():
        return client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total)

    lengths = [500, 500, 500, 500]
    function = functools.partial(part, lengths=lengths)
    futures = placed(client, [3, 1, 1, 3], function)
    before = sent()
    run = ddp.launch(client, held_in_launch, workers=2, table=futures)
    addresses = list(known_workers(client))
    by_worker = dict(zip(workers_of(run.directory), run.result))
    assert by_worker == {addresses[3]: [0, 1500], addresses[1]: [500, 1000]}
    moved = {address: count - before[address] for address, count in sent().items()}
    assert max(moved.values()) < 500 * 6 * 8, "less than a partition: rank 0's result alone"


def test_partitions_move_where_a_rank_would_have_none(client):
    futures = placed(client, [0] * 4, functools.partial(part, lengths=[50] * 4))
    held = on_ranks(client, 2, held_in_launch, table=futures)
    assert sorted(map(len, held)) == [2, 2]


def test_a_run_goes_on_at_another_number_of_ranks_and_in_another_placement(
    client, alone, tmp_path
):
    first = ddp.launch(
        client, train, workers=3, directory=tmp_path / "run", table=frame_of(), epochs=1
    )
    assert len(first.result[0]) == len(alone[0]) // 2
    futures = placed(client, [1, 0, 2, 3] * 3, part)
    losses, steps, weights = ddp.launch(
        client, train, workers=2, directory=tmp_path / "run", table=futures
    ).result
    left = len(losses)
    assert 0 < left < len(alone[0])
    np.testing.assert_allclose(losses, alone[0][-left:], rtol=1e-6)
    assert steps == alone[1][-left:]
    torch.testing.assert_close(weights, alone[2], rtol=1e-6, atol=1e-9)


def test_a_killed_worker_s_partitions_are_computed_again(client, alone, tmp_path):
    table = client.persist(frame_of())
    wait(table)
    directory = tmp_path / "run"
    gate = tmp_path / "gate"
    with held_back(train, gate) as waits:
        launching = Background(
            ddp.launch, client, waits, workers=2, restarts=1, directory=directory, table=table
        )
        wait_until(lambda: 6 in saved_steps(directory))
        victim = workers_of(directory)[1]
        client.run(os._exit, 1, workers=[victim], on_error="ignore")
    run = launching.outcome()
    assert len(run.failures) == 1
    torch.testing.assert_close(run.result[2], alone[2], rtol=1e-6, atol=1e-9)


def state_of(client):
    gc.collect()  # an exception that a test has caught may hold futures
    held = {key for keys in client.has_what().values() for key in keys}
    return set(client.futures), held


def test_nothing_is_left(client):
    before = state_of(client)
    on_ranks(client, 2, held_in_launch, table=frame_of())
    with pytest.raises(ddp.RankFailed):
        ddp.launch(client, fail, workers=2, table=frame_of())
    with pytest.raises(ddp.Error):
        ddp.launch(client, held_in_launch, workers=2, table=frame_of([0, 0]))
    # What earlier tests held may have gone meanwhile.
    wait_until(lambda: all(set(now) <= set(then) for now, then in zip(state_of(client), before)))


def fail(table):
    raise ValueError("on purpose")


def test_two_launches_use_one_table_at_once(client):
    table = client.persist(frame_of())
    both = [Background(on_ranks, client, 2, train, table=table) for _ in range(2)]
    first, second = [each.outcome() for each in both]
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)


def broken(number):
    if number == 2:
        raise ZeroDivisionError("the third is broken")
    return part(number)


def frame(rows, partitions):
    return dd.from_pandas(pd.DataFrame({"a": range(rows)}), npartitions=partitions)


BAD = {
    "an array in columns": (
        lambda: {"x": da.ones((20, 4), chunks=(5, 2))},
        r"array x has \(4, 2\) chunks(?s:.*)x.rechunk\(\('auto', -1\)\)",
    ),
    "a future in a set": (
        lambda: {"x": {ddp_client().submit(part, 0)}},
        "an argument, holds a Dask Future",
    ),
    "a single future": (lambda: {"x": ddp_client().submit(part, 0)}, "x is a single future"),
    "no rows": (lambda: {"x": frame_of([0, 0])}, "'x' cannot be shared by 2 ranks: 2 would have"),
    "no rows for a rank": (
        lambda: {"x": frame(20, 1)},
        r"'x' cannot be shared by 2 ranks: 1 would have no rows",
    ),
    "other types per partition": (
        lambda: {"x": [ddp_client().submit(np.ones, 4, kind) for kind in ("f4", "i4")]},
        "Partition 1 of 'x' has other columns or types.*: int32, not float32",
    ),
    "another order of columns": (
        lambda: {"x": ddp_client().map(columns, ["ab", "ab", "ba"], pure=False)},
        "Partition 2 of 'x' has other columns.*: b int64, not a int64",
    ),
    "categories of two tables": (
        lambda: {"x": cities("abcd"), "held_out": cities("acd")},
        "column 'city' is 3 categories .*in 'held_out', and 4 cat.* in 'x'(?s:.*)set_categories",
    ),
    "times of two tables": (
        lambda: {"x": times("ns"), "held_out": times("us")},
        r"'at' is datetime64\[us\] in 'held_out', and datetime64\[ns\] in 'x'(?s:.*)astype",
    ),
    "not to be pickled": (
        lambda: {"x": ddp_client().map(lambda _: [threading.Lock()], range(2))},
        "partitions of rank [01] could not be handed over.*TypeError",
    ),
    "no partitions": (lambda: {"x": [ddp_client().submit(dict)]}, "of 'x' is of type dict"),
    "sparse blocks": (
        lambda: {"x": da.ones((8, 3), chunks=(4, 3)).map_blocks(scipy.sparse.csr_matrix)},
        r"of type csr_matrix(?s:.*)block.toarray\(\), by map_blocks",
    ),
}


def cities(names):
    table = pd.DataFrame({"city": [*names] * 5})
    return dd.from_pandas(table, npartitions=2).categorize(["city"])


def times(unit):
    table = pd.DataFrame({"at": pd.date_range("2026", periods=8).astype(f"datetime64[{unit}]")})
    return dd.from_pandas(table, npartitions=2)


def columns(names):
    return pd.DataFrame({name: range(4) for name in names})


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


def normalise(table):
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    sampler = ddp.ElasticSampler(table, 4)
    checkpoint = ddp.Checkpoint(model=DDP(net), sampler=sampler)
    checkpoint.restore()
    checkpoint.save()


def test_batch_normalisation_of_partitions_is_a_problem_that_is_named(client):
    _no_optimizer, problem = ddp.launch(client, normalise, workers=2, table=frame(20, 4)).problems
    assert "model normalises batches" in problem and "LayerNorm" in problem


def test_a_partition_that_fails_is_named_with_its_traceback(client):
    with pytest.raises(ddp.Error, match="Partition 2 of 'x' could not be computed") as caught:
        ddp.launch(client, describe, x=dd.from_map(broken, range(4), meta=part(0)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    names = []
    traceback = caught.value.__cause__.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "broken" in names
