"""Clusters that `connect` starts, and what is left of them after they were closed."""

import sys

import cloudpickle
from children import children
from processes import Background, assert_gone, is_alive

import ddp_common as ddp
from ddp_common.client.asking import known_workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_the_number_of_workers_comes_from_the_environment_and_closing_leaves_no_process(
    monkeypatch, capfd
):
    monkeypatch.setenv("WORKERS", "2")
    monkeypatch.setenv("DDP_PROGRESS", "bar")
    before = children()
    with ddp.connect() as client:
        assert len(known_workers(client)) == 2
        run = ddp.launch(client, ddp.world_size)
        started = children() - before
        assert f"Dask's dashboard: {client.dashboard_link}" in capfd.readouterr().err
    assert (run.result, run.world_size) == (2, 2)
    assert len(started) >= 3  # each worker, and the process that has torch imported
    assert_gone(lambda: [pid for pid in started if is_alive(pid)])


def test_no_worker_is_missed_while_dask_asks_for_something_else(client):
    async def as_dasks_timer_does():
        while not is_over:
            await client._update_scheduler_info()

    is_over = False
    asking = Background(client.sync, as_dasks_timer_does)
    assert {len(known_workers(client)) for _ in range(300)} == {4}
    is_over = True
    asking.outcome()
