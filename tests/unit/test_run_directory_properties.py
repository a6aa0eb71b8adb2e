"""Names of run directories and of files in them, as odd as a file system takes them."""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_common import Error
from ddp_common.files import check_name, save_whole
from ddp_common.run.places import new_directory, shown
from ddp_common.run.run_directory import RunDirectory

QUIET = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
# all of Unicode takes a test library many seconds to list
LETTERS = "ab .~:\\-$'\n\t\0\x1fä名\u2028\udc80\ud800"
ODD = [
    "a b",
    " ",
    "ä",
    "名前",
    "a\nb",
    "-rf",
    "~",
    "~nobody-of-that-name",
    "$(touch x)",
    "`x`",
    "'",
    '"',
    "*",
    "a" * 255,
    "a" * 256,
    "#",
    "%20",
    "\u202e",
    "\udc80",
    "a\0b",
    ".hidden",
    "...",
    "a:b",
    "file:",
    "\\",
    "a\\b",
    "CON",
    "\x1b[2J",
]
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


@settings(QUIET, max_examples=60)
@given(st.lists(PARTS, min_size=1, max_size=3))
def test_a_run_directory_of_any_name_works_or_is_refused_in_words(parts):
    with folder() as root:
        location = str(root) + "/" + "/".join(parts)
        try:
            directory = RunDirectory(location)
        except Error as error:
            assert "cannot be a run directory" in str(error) or "cannot be reached" in str(error)
            return
        assert directory.path.is_absolute() and directory.path.is_relative_to(root)
        directory.record(0, {"loss": 0.5})
        directory.log("\udc80 ä 名")
        directory.save("a/b.txt", b"x")
        directory.close()
        assert sorted(os.listdir(directory.path)) == [
            "a",
            "checkpoints",
            "log.txt",
            "metrics.jsonl",
        ]
        assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
        again = RunDirectory(Path(location))
        assert again.records == [{"rank": 0, "loss": 0.5}] and again.problems == []
        again.close()
        assert isinstance(shown(directory.path), str)


@settings(QUIET, max_examples=150)
@given(NAMES, st.binary(max_size=20))
def test_a_file_is_whole_in_the_folder_or_refused_and_nothing_is_anywhere_else(name, content):
    with folder() as root:
        try:
            check_name(name)
        except Error:
            with pytest.raises(Error, match="The file name"):
                save_whole(root, name, content)
            assert os.listdir(root) == []
            return
        try:
            save_whole(root, name, content)
        except (
            OSError,
            Error,
        ) as error:  # too long for a file system, or no name that it can have
            assert str(error)
            assert [path for path in root.rglob("*") if path.is_file()] == []
            return
        (path,) = [path for path in root.rglob("*") if path.is_file()]
        assert path == root / name and path.read_bytes() == content


@pytest.mark.parametrize("name", ["a_file", "a_file/below", "a" * 300, "a\0b", "\ud800"])
def test_runs_in_a_place_that_cannot_be_is_refused_in_words(tmp_path, monkeypatch, name):
    (tmp_path / "a_file").write_text("")
    place = str(tmp_path / name)
    with pytest.raises(Error, match="cannot be a run directory"):
        RunDirectory(place)
    if "\0" not in name and "\ud800" not in name:  # no variable of the environment can hold it
        monkeypatch.setenv("RUNS", place)
        with pytest.raises(Error, match="Choose another place with RUNS="):
            new_directory("demo")


@pytest.mark.parametrize("location", [5, ["a"], "~nobody-of-that-name/run"], ids=repr)
def test_what_is_no_path_is_refused_in_words(location):
    with pytest.raises(Error, match="cannot be a run directory.*full path"):
        RunDirectory(location)


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = RunDirectory("~/run")
    directory.close()
    assert directory.path == tmp_path / "run"


def test_without_a_working_directory_a_relative_place_is_refused_in_words(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    shutil.rmtree(gone)
    with pytest.raises(Error, match="cannot be a run directory"):
        RunDirectory("run")
    directory = RunDirectory(tmp_path / "run")
    directory.close()
    assert shown(directory.path) == str(tmp_path / "run")
    os.chdir(tmp_path)


def test_lines_of_metrics_that_are_damaged_are_left_out_and_the_others_stay(tmp_path, capsys):
    good = [
        '{"rank": 0, "loss": 0.5}',
        '{"rank": 1, "loss": [1, 2]}',
        '{"rank": 0, "loss": "nan-ish"}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(
        "\n".join([good[0], '{"rank": 0, "lo{"rank"', good[1], "5", "\xff", good[2]]).encode(
            "latin-1"
        )
    )
    directory = RunDirectory(tmp_path)
    assert [record["loss"] for record in directory.records] == [0.5, [1, 2], "nan-ish"]
    assert "3 lines of" in directory.problems[0] and "3 lines of" in capsys.readouterr().err
    directory.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == good


def test_a_run_directory_that_cannot_be_opened_is_free_again_at_once(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(Error, match="cannot be a run directory") as refused:
        RunDirectory(tmp_path)
    (tmp_path / "metrics.jsonl").rmdir()
    RunDirectory(tmp_path).close()
    assert refused.tb is not None  # a notebook keeps it, and with it whatever was being made


def test_metrics_of_a_disk_that_was_full_for_a_while_are_whole_in_the_end(tmp_path, capsys):
    import resource

    directory, limits = RunDirectory(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for step in range(1000):
            directory.record(0, {"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "metrics.jsonl cannot be written" in directory.problems[0]
    directory.close()
    assert (
        len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1000
        and directory.problems == []
    )
    assert capsys.readouterr().err.count("cannot be written") == 1
