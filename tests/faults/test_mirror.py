"""The local copy of a run directory in object storage; real storage is in tests/distributed."""

import tempfile

import fsspec
import pytest

from ddp_common import Error
from ddp_common.run import places
from ddp_common.run.mirror import Mirror
from ddp_common.run.run_directory import RunDirectory


@pytest.fixture
def memory():
    """fsspec's file system in memory, with one file of a run in it."""
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/runs/one/log.txt", b"begun\n")
    yield filesystem
    filesystem.rm("/runs", recursive=True)


def test_a_network_that_fails_in_the_first_download_is_said_and_leaves_no_folder(
    memory, tmp_path, monkeypatch
):
    def fail(*arguments, **options):
        raise ConnectionResetError("the network has gone")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(Error, match="memory://runs/one cannot be reached: the network has gone"):
        Mirror("memory://runs/one")
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_failed_is_a_problem_of_the_run_and_is_made_up_for_at_the_end(tmp_path):
    url = f"file://{tmp_path}/there/run"
    directory = RunDirectory(url)
    (tmp_path / "there").write_text("a file in the way")
    directory.save("notes.txt", b"1")
    directory.close()
    (problem,) = directory.problems
    assert f"{url} cannot be written" in problem and str(directory.path) in problem
    assert (directory.path / "notes.txt").read_bytes() == b"1"
    (tmp_path / "there").unlink()
    places.mirrors.pop(url).finish()  # when the program ends
    assert (tmp_path / "there" / "run" / "notes.txt").read_bytes() == b"1"
    assert not directory.path.exists()
