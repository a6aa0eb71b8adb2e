"""What protects a local cluster: a key in no file, closed folders, no settings of others."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client

import ddp_common as ddp

NOBODY = 65534


@pytest.fixture(scope="module")
def local():
    with ddp.connect("local", workers=1) as client:
        yield client


def test_two_clusters_have_different_secrets(local):
    with ddp.connect("local", workers=2) as other:
        assert other.dashboard_link.split("/")[3] != local.dashboard_link.split("/")[3]
        assert other.security.tls_client_key != local.security.tls_client_key
        with pytest.raises(OSError):
            Client(other.scheduler.address, security=local.security, timeout=3)


def test_the_key_is_no_argument_or_variable_of_any_process_and_in_no_file(local, tmp_path):
    key = local.security.tls_client_key.splitlines()[1].encode()
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    read = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            for file in ("cmdline", "environ"):
                assert key not in Path(f"/proc/{pid}/{file}").read_bytes()
                read += 1
    assert read > 2  # this process, the workers and what they have started


def test_folders_and_files_of_a_local_cluster_are_closed_to_others(local):
    def is_closed(path):
        return path.stat().st_mode & 0o077 == 0 and path.stat().st_uid == os.getuid()

    folders = local.run(lambda dask_worker: dask_worker.local_directory).values()
    sockets = local.run(lambda: __import__("multiprocessing").util.get_temp_dir()).values()
    for path in map(Path, {*folders, *sockets}):
        assert any(is_closed(each) for each in (path, *path.parents[:2])), path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_that_somebody_else_has_made_is_no_place_for_temporary_files_and_modules(
    tmp_path, monkeypatch
):
    tmp_path.chmod(0o777)
    traps = [tmp_path / "dask-scratch-space", tmp_path / f"ddp-{os.getuid()}"]
    for trap in traps:
        trap.mkdir()
        trap.chmod(0o777)
        os.chown(trap, NOBODY, NOBODY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    forgotten = dask.config.set({"temporary-directory": None})  # where the first cluster is
    with forgotten, ddp.connect("local", workers=2) as client:
        of_worker, _ = client.run(lambda: __import__("sys").path).values()
        paths = [Path(path) for path in [*sys.path, *of_worker]]
        assert [path for path in paths if tmp_path in path.parents]
        assert not [path for path in paths if {path, *path.parents} & set(traps)]
    assert not [file for trap in traps for file in trap.iterdir()]


def test_dasks_own_settings_of_tls_do_not_reach_a_local_cluster():
    """They are for clusters of somebody else's, with ciphers and files that would not fit ours."""
    theirs = {
        "distributed.comm.require-encryption": True,
        "distributed.comm.tls.ciphers": "AES256-SHA",
        "distributed.comm.tls.max-version": 1.2,
        "distributed.comm.tls.ca-file": "/no/such/file",
        "distributed.comm.tls.worker.cert": "/no/such/file",
    }
    with dask.config.set(theirs), ddp.connect("local", workers=2) as client:
        assert ddp.launch(client, ddp.world_size).result == 2
