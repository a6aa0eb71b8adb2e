"""What comes back from the ranks: large results quickly and with a word, many reports.

Neither makes the workers grow.
"""

import os
import sys

import cloudpickle
import torch
from processes import wait_until

import ddp_common as ddp
from ddp_common.worker import sender

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def grown_since(client, before):
    after = client.run(memory)
    return {address: after[address] - before[address] for address in before}


def memory():
    import psutil

    return psutil.Process().memory_info().rss


def large(mebibytes):
    return {"weights": torch.arange(mebibytes * 2**18, dtype=torch.int32), "words": ["kept", None]}


def test_a_large_result_arrives_whole_is_announced_and_leaves_the_worker(client):
    before = client.run(memory)
    run = ddp.launch(client, large, workers=2, mebibytes=200)
    assert torch.equal(run.result["weights"], torch.arange(200 * 2**18, dtype=torch.int32))
    assert run.result["words"] == ["kept", None]
    assert "fetching the result of rank 0: 200 MiB" in (run.directory / "log.txt").read_text()
    assert max(grown_since(client, before).values()) < 100 * 2**20  # not even for a moment
    wait_until(lambda: not any(client.run(open_results).values()))


def open_results():
    return [link for fd in os.listdir("/proc/self/fd") if "ddp-result" in (link := _link(fd))]


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_result_that_the_client_cannot_read_from_memory_comes_through_dask(client, monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda path: "a file of another machine")
    run = ddp.launch(client, large, workers=2, mebibytes=40)
    assert torch.equal(run.result["weights"], torch.arange(40 * 2**18, dtype=torch.int32))


def test_a_result_arrives_where_files_have_a_greatest_size(client):
    def limited():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return large(1)

    assert len(ddp.launch(client, limited, workers=1).result["weights"]) == 2**18


def test_a_result_of_none_is_no_trouble(client):
    assert ddp.launch(client, lambda: None, workers=2).result is None


def many_reports(number):
    for step in range(number):
        ddp.report(loss=float(step), learning_rate=0.1)


def test_many_reports_do_not_stay_in_the_workers(client):
    before = client.run(memory)
    run = ddp.launch(client, many_reports, workers=2, number=60_000)
    assert len(run.records) == 120_000
    assert max(grown_since(client, before).values()) < 30 * 2**20


def test_events_are_packed(client):
    ddp.launch(client, many_reports, workers=1, number=10)
    packed = [event for _, event in client.get_events(sender.TOPIC) if "attempt" in event]
    assert sum(len(sender.messages_of(event)) for event in packed) > 10
    assert all(set(event) == {"attempt", "rank", "packed", "worker"} for event in packed)
