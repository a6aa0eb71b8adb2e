"""The user's script is not run again in the ranks; what it defines is known there all the same."""

import os
import subprocess
import sys
import textwrap

import pytest
from fault_lab import environment_for

SCRIPT = """
import multiprocessing
import os
import sys

with open({effects!r}, "a") as file:
    file.write(multiprocessing.current_process().name + "\\n")

import collections

import torch
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp
from distributed import Client

Sample = collections.namedtuple("Sample", "number square")
SUM = sum(number ** 2 for number in range(12))


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, number):
        return Sample(number, number ** 2)


class Stop(Exception):
    pass


def train():
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, collate_fn=list)
    return sum(sample.square for batch in loader for sample in batch if isinstance(sample, Sample))


def stop():
    raise Stop("enough")


if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        assert ddp.launch(client, train, workers=2).result == SUM
        with open(__file__, "a") as file:
            file.write("def half(:\\n")
        assert ddp.launch(client, train, workers=2).result == SUM
        try:
            ddp.launch(client, stop, workers=2)
        except ddp.RankFailed as failed:
            cause = failed.__cause__
            assert isinstance(cause, Stop) and cause.args == ("enough",), cause
            assert "raise Stop" in failed.traceback
"""


def test_a_script_is_run_once_however_often_it_launches_and_may_be_edited_meanwhile(
    client, tmp_path
):
    script, effects = tmp_path / "script.py", tmp_path / "effects"
    script.write_text(SCRIPT.format(effects=str(effects)))
    done = subprocess.run(
        [sys.executable, script, client.scheduler.address],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment_for(client, tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert effects.read_text() == "MainProcess\n"


BY_CONNECT = 'ddp.connect("local", workers=2)'
BY_DASK = "Client(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None))"


@pytest.mark.parametrize("cluster", [BY_CONNECT, BY_DASK], ids=["connect", "LocalCluster"])
def test_a_script_with_a_cluster_of_its_own_is_run_once_by_each_worker_and_never_by_a_rank(
    tmp_path, cluster
):
    script, effects = tmp_path / "script.py", tmp_path / "effects"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing

        with open({str(effects)!r}, "a") as file:
            file.write(multiprocessing.current_process().name + "\\n")

        from distributed import Client, LocalCluster

        import ddp_common as ddp

        if __name__ == "__main__":
            with {cluster} as client:
                for _ in range(3):
                    ddp.launch(client, ddp.rank)
                    with open(__file__, "a") as file:  # somebody edits it meanwhile
                        file.write("def half(:\\n")
                assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        """)
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "RUNS": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    ran = effects.read_text().splitlines()
    assert ran.count("MainProcess") == 1
    assert len(ran) <= 3 and not [name for name in ran if "rank" in name]


UNIMPORTABLE = """
import sys
from distributed import Client
import ddp_common as ddp
import gone

def train():
    return gone.value

if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        try:
            ddp.launch(client, train, workers=2)
        except ddp.RankFailed as failed:
            print(failed)
"""


def test_what_cannot_be_imported_in_a_rank_reaches_the_caller_with_its_traceback(client, tmp_path):
    (tmp_path / "gone.py").write_text("value = 1\n")
    (tmp_path / "script.py").write_text(UNIMPORTABLE)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", client.scheduler.address],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=environment_for(client, tmp_path),
    )
    assert "failed: ModuleNotFoundError: No module named 'gone'" in done.stdout, done.stderr
    assert "main_module.loads(payload)" in done.stdout
    assert "exit code" not in done.stdout.partition("\n")[0]


def test_a_torch_that_cannot_be_imported_is_named_by_the_rank(tmp_path):
    """The fork server survives it, and what the rank says reaches the caller."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import sys

        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "torch" and "nursery import main" in " ".join(sys.orig_argv):
                    raise OSError("libcublas.so.12: cannot open shared object file")

        sys.meta_path.insert(0, Broken())
        """)
    )
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import ddp_common as ddp

        if __name__ == "__main__":
            with ddp.connect("local", workers=1) as client:
                try:
                    ddp.launch(client, ddp.rank)
                except ddp.RankFailed as failed:
                    print(failed)
        """)
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "RUNS": str(tmp_path)},
    )
    assert "failed: OSError: libcublas.so.12: cannot open shared object file" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for an orphan")
def test_a_program_that_launches_survives_the_shell_that_started_it(client, tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import os, sys, time
        from distributed import Client
        import ddp_common as ddp

        if __name__ == "__main__":
            with Client(sys.argv[1]) as client:
                ddp.launch(client, ddp.rank, workers=1)
                shell = os.getppid()
                open({str(tmp_path / "launched")!r}, "w").close()
                while os.getppid() == shell:
                    time.sleep(0.05)
                ddp.launch(client, ddp.rank, workers=1)
                open({str(tmp_path / "survived")!r}, "w").close()
        """)
    )
    program = f'"{sys.executable}" "{tmp_path}/script.py" {client.scheduler.address}'
    wait = f'while [ ! -e "{tmp_path}/launched" ]; do sleep 0.1; done'
    command = f"{program} & {wait}"
    subprocess.run(["sh", "-c", command], timeout=120, env=environment_for(client, tmp_path))
    from processes import wait_until

    wait_until((tmp_path / "survived").exists)
