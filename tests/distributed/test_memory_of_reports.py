"""What many reports leave in memory, once they are in the run directory."""

import sys
import time

import cloudpickle

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])
REPORTS = 5_000


def messages_of(stream):
    return sum(len(str(message)) for message in stream.recent_message_log)


def kept_by_worker(dask_worker):
    return messages_of(dask_worker.batched_stream)


def kept_by_scheduler(client, dask_scheduler):
    topic = dask_scheduler._broker._topics["ddp_common"]
    return messages_of(dask_scheduler.client_comms[client]) + len(str(list(topic.events)))


def test_neither_dask_nor_the_client_keeps_what_ranks_have_reported(client):
    def train():
        for step in range(REPORTS):
            ddp.report(step=step, loss=step / 3)
            if step % 100 == 0:
                time.sleep(0.1)  # as training would: what is said at once travels in one message

    run = ddp.launch(client, train, workers=2)
    assert len(run.records) == len(run.metrics) == 2 * REPORTS
    assert isinstance(run.records[0], dict) and run.records[-1]["step"] == REPORTS - 1
    written = (run.directory / "metrics.jsonl").stat().st_size
    assert client.run_on_scheduler(kept_by_scheduler, client.id) < written / 2
    assert all(kept < written / 2 for kept in client.run(kept_by_worker).values())
