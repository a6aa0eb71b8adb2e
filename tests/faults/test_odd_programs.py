"""The user's script is not run again in the ranks; what it defines is known there all the same."""

import subprocess
import sys
import textwrap

import pytest
from patience import PATIENCE
from processes import environment_for, wait_until

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
        timeout=4 * PATIENCE,
        cwd=tmp_path,
        env=environment_for(client, tmp_path),
    )
    assert "failed: ModuleNotFoundError: No module named 'gone'" in done.stdout, done.stderr
    assert "A package: install it in the environment of the workers." in done.stdout
    assert "put that on their PYTHONPATH" in done.stdout


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
    subprocess.run(
        ["sh", "-c", command], timeout=2 * PATIENCE, env=environment_for(client, tmp_path)
    )
    wait_until((tmp_path / "survived").exists)
