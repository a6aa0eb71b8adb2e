"""What may be reported, which names a file may have, and what the client writes; without ranks."""

import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from ddp_common import Error, report, save_file
from ddp_common.messages import Report
from ddp_common.ranks.reporting import start
from ddp_common.run.places import new_directory
from ddp_common.run.run_directory import RunDirectory

SCALARS = {
    "int": 3,
    "float": 3.0,
    "bool": True,
    "numpy_float32": np.float32(3),
    "numpy_int64": np.int64(3),
    "tensor": torch.tensor(3.0),
    "tensor_of_one": torch.tensor([[3]]),
    "tensor_with_gradient": torch.tensor(3.0, requires_grad=True),
    "bfloat16": torch.tensor(3, dtype=torch.bfloat16),
}
NO_SCALARS = {
    "list": [1.0],
    "string": "1.0",
    "none": None,
    "tensor_of_two": torch.zeros(2),
    "empty_tensor": torch.zeros(0),
    "complex": 1j,
    "complex_tensor": torch.tensor(1j),
    "numpy_complex64": np.complex64(1j),
    "array": np.zeros(3),
    "dict": {"loss": 1.0},
}
OUTSIDE = [
    "../x",
    "/etc/x",
    "a/../../x",
    "C:\\x",
    "c:/x",
    "",
    "a//b",
    "..",
    ".",
    "a/./b",
    "a/",
    "..\\x",
    "\\\\host\\share",
    "a\0b",
    "a/b\0",
]


def delivered(**values):
    """What an agent would get from `report(**values)`."""
    messages = []
    finish = start(messages.append)
    report(**values)
    finish()
    return next(message.values for message in messages if isinstance(message, Report))


@pytest.fixture(autouse=True)
def no_outbox(monkeypatch):
    monkeypatch.setattr("ddp_common.ranks.reporting._outbox", None)


@pytest.mark.parametrize("value", SCALARS.values(), ids=SCALARS.keys())
def test_scalars_arrive_as_plain_numbers(value):
    arrived = delivered(loss=value)["loss"]
    assert type(arrived) in (int, float, bool) and arrived == value


@pytest.mark.parametrize(
    "value", [Fraction(1, 4), Decimal("0.25"), 2**70], ids=["fraction", "decimal", "large_int"]
)
def test_an_unusual_number_is_refused_or_arrives_as_one_that_can_travel(value):
    try:
        arrived = delivered(loss=value)["loss"]
    except Error:
        return
    assert type(arrived) in (int, float) and arrived == value
    assert type(arrived) is float or -(2**63) <= arrived < 2**64  # what a message of Dask can hold


@pytest.mark.parametrize("value", NO_SCALARS.values(), ids=NO_SCALARS.keys())
def test_what_is_no_scalar_is_refused_at_once_and_named(value):
    with pytest.raises(Error, match=r"report\(loss=…\)"):
        report(loss=value)


def test_alone_reports_and_files_are_checked_and_dropped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(loss=1.0) is None
    assert save_file("samples/one.txt", "text") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_a_name_that_would_leave_the_run_directory_is_refused(tmp_path, name):
    for attempt in (
        lambda: save_file(name, b"x"),
        lambda: RunDirectory(tmp_path / "run").save(name, b"x"),
    ):
        with pytest.raises(Error, match="would leave the run directory"):
            attempt()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step-00000099.pt"])
def test_a_name_that_the_run_itself_uses_is_refused(name):
    with pytest.raises(Error, match=f"{name}.* would overwrite what the run itself keeps"):
        save_file(name, b"x")


def test_a_file_through_a_link_out_of_the_run_directory_is_refused(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(Error, match="link"):
        directory.save("link/x", b"x")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_link_in_the_place_of_a_file_does_not_lead_out_of_the_run_directory(tmp_path):
    directory, victim = RunDirectory(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run" / "x").symlink_to(victim)
    with pytest.raises(Error, match="link"):
        directory.save("x", b"theirs")
    assert victim.read_text() == "mine"


def test_a_file_is_replaced_as_a_whole(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.save("plots/a b.txt", b"one, long")
    directory.save("plots/a b.txt", b"two")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "run" / "plots").iterdir()] == [
        ("a b.txt", b"two")
    ]


def test_a_resumed_run_keeps_its_records_also_those_that_are_not_finite(tmp_path):
    first = RunDirectory(tmp_path)
    for value in (0.5, math.nan, math.inf, -math.inf):
        first.record(0, {"loss": value})
    first.close()
    losses = [record["loss"] for record in RunDirectory(tmp_path).records]
    assert all(isinstance(loss, float) for loss in losses)
    assert losses[0] == 0.5 and math.isnan(losses[1]) and losses[2:] == [math.inf, -math.inf]


def test_the_metrics_file_is_strict_json(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.record(0, {"loss": math.nan})
    directory.record(1, {"loss": -math.inf})
    directory.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["rank"] for line in lines] == [0, 1]


def test_a_metrics_file_whose_last_line_was_cut_does_not_stop_a_resumed_run(tmp_path):
    first = RunDirectory(tmp_path)
    first.record(0, {"loss": 0.5})
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"rank": 0, "lo')  # its client was killed while it wrote
    second = RunDirectory(tmp_path)
    second.record(0, {"loss": 0.25})
    second.close()
    assert [record["loss"] for record in RunDirectory(tmp_path).records] == [0.5, 0.25]


def test_no_two_runs_share_a_directory():
    assert len({new_directory("demo") for _ in range(5)}) == 5


def test_a_place_where_no_directory_can_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNS", str(tmp_path / "file"))
    with pytest.raises(Error, match="RUNS="):
        new_directory("demo")


def test_a_mirror_makes_the_folders_it_needs_and_takes_only_checkpoints_away(tmp_path):
    """file:// stands for file systems with folders; object storage has a real server elsewhere."""
    from ddp_common.run import places

    url = f"file://{tmp_path}/there/run"
    directory = RunDirectory(url)
    directory.save("notes/a.txt", b"1")
    directory.save("mine.tmp", b"2")
    (directory.path / "checkpoints" / "step-00000001.pt").write_bytes(b"3")
    directory.mirror.push()
    (directory.path / "checkpoints" / "step-00000001.pt").unlink()
    (directory.path / "notes" / "a.txt").unlink()  # by something that tidies /tmp
    directory.close()
    there = tmp_path / "there" / "run"
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()) == [
        "log.txt",
        "metrics.jsonl",
        "mine.tmp",
        "notes/a.txt",
    ]
    places.mirrors.pop(url).finish()


def test_a_full_disk_of_the_client_is_said_once_and_records_are_kept(tmp_path, capsys):
    import resource

    directory, limits = RunDirectory(tmp_path / "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for step in range(1000):
            directory.record(0, {"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(directory.records) == 1000
    assert (
        capsys.readouterr().err.count(
            "metrics.jsonl cannot be written: File too large. Training goes on."
        )
        == 1
    )


@pytest.mark.parametrize("place", ["a_file", "/proc/run"])
def test_a_place_that_cannot_be_a_run_directory_is_an_error_in_words(tmp_path, place):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(Error, match="cannot be a run directory"):
        RunDirectory(tmp_path / place)
