"""What a run leaves behind: names as odd as a file system takes them, whole files, a full disk."""

import contextlib
import os
import resource
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_ranks.run.folders import new_directory
from dask_ranks.run.recorder import describe
from dask_ranks.run.run_directory import RunDirectory, save_whole
from ddp_common import Error, save_file
from ddp_common.checkpoint import write
from ddp_common.files import check_name

FEW = settings(max_examples=40, database=None, suppress_health_check=[HealthCheck.too_slow])
# all of Unicode takes a test library many seconds to list
LETTERS = "ab .~:\\-$'\n\t\0\x1fä名\u2028\udc80\ud800"
ODD = ["a b", " ", "ä", "名前", "a\nb", "-rf", "~", "$(touch x)", "'", "*", "a" * 255, "a" * 256]
ODD += ["#", "%20", "\u202e", "\udc80", "a\0b", ".hidden", "...", "file:", "\\", "CON", "\x1b[2J"]
PARTS = st.one_of(
    st.sampled_from(ODD),
    st.text(LETTERS, min_size=1, max_size=20).filter(lambda text: text not in (".", "..")),
)
NAMES = st.one_of(
    st.text(LETTERS + "/", max_size=30),
    st.lists(st.sampled_from([*ODD, "..", ".", "", "x"]), max_size=4).map("/".join),
)


@contextlib.contextmanager
def folder():
    """An empty folder; afterwards nothing lies beside it."""
    with tempfile.TemporaryDirectory() as root:
        inner = Path(root) / "inner"
        inner.mkdir()
        yield inner
        assert os.listdir(root) == ["inner"]


@FEW
@given(st.lists(PARTS, min_size=1, max_size=3))
def test_a_run_directory_of_any_name_works_or_is_refused_in_words(parts):
    with folder() as root:
        location = str(root) + "/" + "/".join(parts)
        try:
            directory = RunDirectory(location)
        except Error as error:
            assert "cannot be a run directory" in str(error) or "not an address" in str(error)
            return
        assert directory.path.is_absolute() and directory.path.is_relative_to(root)
        directory.record(0, {"loss": 0.5})
        directory.log("\udc80 ä 名")
        directory.save("a/b.txt", b"x")
        directory.close()
        there = [".lock", "a", "checkpoints", "log.txt", "metrics.jsonl"]
        assert sorted(os.listdir(directory.path)) == there
        assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
        again = RunDirectory(Path(location))
        assert again.records == [{"restart": 0, "rank": 0, "loss": 0.5}] and again.problems == []
        again.close()


@FEW
@given(NAMES, st.binary(max_size=20))
def test_a_file_is_whole_in_the_folder_or_refused_and_nothing_is_anywhere_else(name, content):
    with folder() as root:
        try:
            check_name(name)
            save_whole(root, name, content)
        except (OSError, Error) as error:  # OSError: too long for a file system
            assert str(error)
            assert [path for path in root.rglob("*") if path.is_file()] == []
            return
        (path,) = [path for path in root.rglob("*") if path.is_file()]
        assert path == root / name and path.read_bytes() == content


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..\\x", "a\0b", ""], ids=repr)
def test_a_name_that_would_leave_the_run_directory_is_refused(tmp_path, name):
    with pytest.raises(Error, match="would leave the run directory"):
        save_file(name, b"x")
    directory = RunDirectory(tmp_path / "run")
    directory.save(name, b"x")
    assert "would leave the run directory" in directory.problems[0]


def test_a_link_does_not_lead_out_of_the_run_directory(tmp_path):
    directory, victim = RunDirectory(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run" / "folder").symlink_to(tmp_path)
    (tmp_path / "run" / "x").symlink_to(victim)
    for name in ("folder/victim", "x"):
        directory.save(name, b"theirs")
        assert f"{name!r} leads out of the run directory" in directory.problems[-1]
    assert victim.read_text() == "mine"


def test_a_file_is_replaced_as_a_whole(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.save("plots/a b.txt", b"one, long")
    directory.save("plots/a b.txt", b"two")
    (path,) = (tmp_path / "plots").iterdir()
    assert path.read_bytes() == b"two"


def test_a_place_that_cannot_be_is_refused_in_words(tmp_path, monkeypatch):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(Error, match="cannot be a run directory"):
        RunDirectory(str(tmp_path / "a_file/below"))
    monkeypatch.setenv("RUNS", str(tmp_path / "a_file"))
    with pytest.raises(Error, match="Choose another place with RUNS="):
        new_directory("demo")
    monkeypatch.setenv("RUNS", "s3://bucket/runs")
    with pytest.raises(Error, match="s3://bucket/runs: a run directory is a folder on a disk"):
        new_directory("demo")


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "log.txt", "config.json", "checkpoints/saving.tmp"]
)
def test_a_link_where_a_run_keeps_a_file_is_named_and_not_followed(tmp_path, name):
    link, private = tmp_path / "run" / name, tmp_path / "private"
    private.write_text("mine")
    link.parent.mkdir(parents=True)
    link.symlink_to(private)
    with pytest.raises(Error, match=f"{link} is a link"):
        with contextlib.closing(RunDirectory(tmp_path / "run")) as run:
            describe(run.path, {}, [], None)
            write({}, run.path / "checkpoints", 1, read_back=False)
    assert private.read_text() == "mine" and link.is_symlink()


def test_no_two_runs_share_a_directory():
    assert len({new_directory("demo") for _ in range(5)}) == 5


def test_lines_of_metrics_that_are_damaged_are_left_out_and_the_others_stay(tmp_path):
    good = ['{"restart": 0, "rank": 0, "loss": 0.5}', '{"restart": 0, "rank": 1, "loss": 0.25}']
    bad = ['{"rank": 0, "lo{"rank"', "5", "\xff", '{"rank": 0, "lo']  # its client was killed
    text = "\n".join([good[0], *bad[:3], good[1], bad[3]])
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    directory = RunDirectory(tmp_path)
    assert [record["loss"] for record in directory.records] == [0.5, 0.25]
    directory.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == good


def test_metrics_of_a_disk_that_was_full_for_a_while_are_whole_in_the_end(tmp_path, capsys):
    directory, limits = RunDirectory(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for step in range(1000):
            directory.record(0, {"step": step})
        for number in range(3):
            directory.save(f"{number}.bin", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    of_metrics, of_others = directory.problems
    assert "metrics.jsonl cannot be written: File too large" in of_metrics
    directory.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1000
    assert directory.problems == [of_others] and "2.bin cannot be written" in of_others
    logged = (tmp_path / "log.txt").read_text()
    assert all(f"{number}.bin cannot be written" in logged for number in range(3))
    assert capsys.readouterr().err.count("cannot be written") == 2
