"""Clusters that `connect` starts, and what is left of them after they were closed."""

import sys

import cloudpickle
from children import children
from processes import assert_gone, is_alive

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_the_number_of_workers_comes_from_the_environment_and_closing_leaves_no_process(
    monkeypatch, capfd
):
    monkeypatch.setenv("WORKERS", "2")
    monkeypatch.setenv("DDP_PROGRESS", "bar")
    before = children()
    with ddp.connect() as client:
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        run = ddp.launch(client, ddp.world_size)
        started = children() - before
        assert f"Dask's dashboard: {client.dashboard_link}" in capfd.readouterr().err
    assert (run.result, run.world_size) == (2, 2)
    assert len(started) >= 3  # each worker, and the process that has torch imported
    assert_gone(lambda: [pid for pid in started if is_alive(pid)])
