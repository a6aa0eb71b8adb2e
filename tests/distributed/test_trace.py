"""`ddp.trace` and TRACE=…: some steps of all ranks on one time axis, as a picture and a file."""

import contextlib
import gzip
import json
import subprocess
import sys
import time

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_common as ddp
from ddp_common.commands.run import where_the_time_went
from ddp_common.run import timeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CLOCKS = 5000.0  # microseconds by which the clocks of two processes may be read differently
SLOW = 0.6  # seconds that a slowed rank takes longer for a step


def train(
    steps=10, record=5, skip=2, slow_rank=None, loader_workers=0, profiles=False, fails=False
):
    """Steps of a small network; `record` None: without a call of `ddp.trace`."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(4 * steps, 8))
    if profiles:
        torch.autograd.profiler.profile().__enter__()
    if record is not None:
        ddp.trace(steps=record, skip=skip)
    for (batch,) in DataLoader(rows, batch_size=4, num_workers=loader_workers):
        loss = model(batch).square().mean()
        if ddp.rank() == slow_rank:
            time.sleep(SLOW)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fails:
            raise ValueError("in the middle of a recording")
    return torch.autograd._profiler_enabled()


def log_of(run):
    return (run.directory / "log.txt").read_text()


@pytest.fixture(scope="module")
def recorded(client, tmp_path_factory):
    return ddp.launch(client, train, workers=2, directory=tmp_path_factory.mktemp("run") / "run")


def test_every_rank_has_the_steps_that_were_asked_for_and_all_lanes(recorded):
    drawn = recorded.timeline()
    assert list(drawn.frame.index) == [0, 1]
    assert list(drawn.frame.columns) == list(timeline.LANES)
    assert (drawn.frame[["data", "forward", "backward", "communication", "optimizer"]] > 0).all(
        axis=None
    )
    assert "5 steps of 2 rank(s)" in drawn.figure.axes[0].get_title()
    assert recorded.result is False  # the profiler was stopped


def test_the_picture_is_in_the_run_directory(recorded):
    drawn = recorded.timeline()
    assert drawn.picture.read_bytes().startswith(b"\x89PNG")
    assert drawn._repr_png_().startswith(b"\x89PNG")


def test_on_a_full_disk_the_figure_is_there_and_what_was_not_written_is_said(
    client, small_disk, capsys
):
    run = ddp.launch(client, train, workers=2, directory=small_disk / "run")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as filler:
        while True:
            filler.write(bytes(1000))
    drawn = run.timeline()
    assert drawn._repr_png_().startswith(b"\x89PNG") and list(drawn.frame.index) == [0, 1]
    assert [problem.split()[2] for problem in run.problems] == [timeline.PICTURE, timeline.FILE]
    assert "timeline.png was not saved" in capsys.readouterr().err
    words = where_the_time_went(run)
    assert "ms on each rank:" in words and "perfetto" not in words
    assert not drawn.picture.exists() and not drawn.file.exists()


def test_the_file_has_all_ranks_in_the_trace_event_format(recorded):
    content = json.loads(gzip.decompress(recorded.timeline().file.read_bytes()))
    events = content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert [name.split(" on ")[0] for name in names] == ["rank 0", "rank 1"]
    for rank in (0, 1):
        of_rank = [event for event in events if event["pid"] == rank]
        assert any(event["name"] == "gloo:all_reduce" for event in of_rank)


def test_ranks_are_on_one_time_axis(recorded):
    """No rank can finish an all_reduce before another one has begun it."""
    content = json.loads(gzip.decompress(recorded.timeline().file.read_bytes()))
    spans = [
        [
            (event["ts"], event["ts"] + event["dur"])
            for event in content["traceEvents"]
            if event["name"] == "gloo:all_reduce" and event["pid"] == rank
        ]
        for rank in (0, 1)
    ]
    assert len(spans[0]) >= 5
    for one, other in zip(*map(sorted, spans)):
        assert one[0] < other[1] + CLOCKS and other[0] < one[1] + CLOCKS


def test_the_peers_of_a_slow_rank_are_seen_to_wait(client, tmp_path):
    run = ddp.launch(client, train, workers=2, slow_rank=1)
    waiting = run.timeline().frame["waiting"]
    assert waiting[0] - waiting[1] > 0.2 * SLOW * 1000


def test_the_environment_may_ask_for_it(client, monkeypatch):
    monkeypatch.setenv("DDP_TRACE", "3")
    run = ddp.launch(client, train, workers=2, record=None)
    assert "3 steps of 2 rank(s)" in run.timeline().figure.axes[0].get_title()
    monkeypatch.setenv("DDP_TRACE", "many")
    with pytest.raises(ddp.RankFailed, match="TRACE"):
        ddp.launch(client, train, workers=2, record=None)
    monkeypatch.setenv("DDP_TRACE", "0")
    with pytest.raises(ddp.Error, match="No steps were recorded"):
        ddp.launch(client, train, workers=2, record=None).timeline()


@pytest.mark.parametrize("arguments", [{"record": 0}, {"record": -1}, {"skip": -1}], ids=str)
def test_numbers_that_are_none_are_refused(client, arguments):
    with pytest.raises(ddp.RankFailed, match="trace"):
        ddp.launch(client, train, workers=1, **arguments)


def test_of_fewer_steps_than_asked_for_those_there_are_are_drawn(client):
    run = ddp.launch(client, train, workers=2, steps=6, record=50)
    assert "4 of 50 steps recorded: training was over then" in log_of(run)
    assert "4 steps of 2 rank(s)" in run.timeline().figure.axes[0].get_title()


def test_without_a_single_step_it_says_so(client):
    run = ddp.launch(client, train, workers=1, steps=2, skip=9)
    assert "training was over before" in log_of(run)
    with pytest.raises(ddp.Error, match="No steps were recorded"):
        run.timeline()


def test_a_second_call_begins_anew(client):
    def twice():
        train(steps=4, record=50)
        return train(record=2)

    run = ddp.launch(client, twice, workers=1)
    assert "2 steps of 1 rank(s)" in run.timeline().figure.axes[0].get_title()
    assert run.result is False


def test_another_profiler_is_left_alone(client):
    run = ddp.launch(client, train, workers=1, profiles=True)
    assert "another profiler is at work" in log_of(run)
    assert run.result is True  # it still records


def test_loader_workers_do_not_disturb_it(client):
    run = ddp.launch(client, train, workers=2, loader_workers=2)
    assert (run.timeline().frame["data"] > 0).all()


def test_a_failure_in_the_middle_of_a_recording_is_told_as_always(client):
    with pytest.raises(ddp.RankFailed, match="in the middle of a recording"):
        ddp.launch(client, train, workers=2, skip=0, fails=True)


def test_a_recording_of_fewer_ranks_does_not_mix_with_an_older_one(client, tmp_path):
    ddp.launch(client, train, workers=3, directory=tmp_path / "run")
    run = ddp.launch(client, train, workers=2, directory=tmp_path / "run")
    assert list(run.timeline().frame.index) == [0, 1]


def test_a_damaged_recording_is_named(client, tmp_path):
    run = ddp.launch(client, train, workers=1, directory=tmp_path / "run")
    file = run.directory / "trace" / "rank-0.json.gz"
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    for damaged in (good[:200], bytes(flipped), gzip.compress(b"[1]")):
        file.write_bytes(damaged)
        with pytest.raises(ddp.Error, match="rank-0.json.gz is no recording of steps"):
            run.timeline()


def test_each_backward_of_a_step_counts_alone_where_gradients_are_accumulated():
    def event(name, begin, end):
        return {"name": name, "ts": float(begin), "dur": float(end - begin)}

    lanes = timeline._lanes(
        [
            event(timeline.FORWARD, 0, 10),
            event(timeline.BACKWARD, 10, 20),
            event(timeline.BACKWARD, 22, 30),
            event(timeline.FORWARD, 40, 50),
            event(timeline.BACKWARD, 50, 60),
            event("gloo:all_reduce", 55, 90),
            event(timeline.OPTIMIZER, 80, 100),
        ]
    )
    assert lanes["backward"] == [(10.0, 30.0), (50.0, 60.0)]
    assert lanes["waiting"] == [(60.0, 80.0)]


def test_the_clocks_of_hosts_are_made_one_by_the_ends_of_collectives():
    def recording(rank, host, late):
        return timeline.Recorded(
            rank=rank,
            host=host,
            attempt=("4711", 2),
            events=[
                {"name": "gloo:all_reduce", "ts": begin + late, "dur": 20.0}
                for begin in (100.0, 110.0, 200.0)
            ],
            lanes={"optimizer": [(140.0 + late, 150.0 + late), (230.0 + late, 240.0 + late)]},
            ends=[150.0 + late, 240.0 + late],
        )

    one, other = timeline._aligned([recording(0, "n01", 0.0), recording(1, "n02", 5000.0)])
    assert other.lanes == one.lanes and other.ends == one.ends
    same_host = timeline._aligned([recording(0, "n01", 0.0), recording(1, "n01", 7.0)])
    assert same_host[1].ends == [157.0, 247.0]


def test_under_torchrun_the_same(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(__file__.rpartition('/')[0])!r})\n"
        "import ddp_common as ddp\n"
        "from test_trace import train\n"
        "with ddp.connect('torchrun') as client:\n"
        f"    run = ddp.launch(client, train, directory={str(tmp_path / 'run')!r})\n"
        "print(list(run.timeline().frame.index), flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0, 1]") == 1  # what other ranks print is not shown


def test_what_make_run_says_of_it(recorded, client):
    said = where_the_time_went(recorded)
    assert "timeline.png; " in said and "all-ranks.json.gz opens in https://ui.perfetto" in said
    assert all(lane in said for lane in timeline.LANES)
    without = ddp.launch(client, train, workers=1, record=None)
    assert "TRACE: No steps were recorded" in where_the_time_went(without)
