"""The local copy of a run directory in object storage; real storage is in tests/distributed."""

import tempfile

import fsspec
import pytest

from ddp_common import Error
from ddp_common.run.mirror import Mirror


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
