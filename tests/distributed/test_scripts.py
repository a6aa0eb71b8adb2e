"""Scripts as others write them, unchanged: `ddprun` ends with the numbers of torchrun."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE
from processes import wait_until
from script_runs import DDPRUN, SCRIPTS, result, results_of_both, said, started

import ddp_common as ddp


@pytest.mark.parametrize(
    "words", [["trainer_class.py", "3", "."], ["launches.py"]], ids=lambda words: words[0]
)
def test_a_script_ends_with_the_numbers_that_it_has_under_torchrun(tmp_path, joining, words):
    ours, theirs = results_of_both(words, tmp_path, **joining)
    assert ours and ours == theirs


def test_what_a_script_writes_lies_where_it_was_started_and_its_log_in_the_run(tmp_path):
    """The words are torchrun's, as somebody has typed them."""
    words = ["--standalone", "--nnodes=1", "--nproc_per_node=2", "--master_port=29500"]
    words += (
        "--rdzv_conf=a=1 --local-addr=a --role=a --start-method=fork --tee 3 -r 3 -t 3".split()
    )
    words += ["--monitor-interval=1", "--local-ranks-filter=0", SCRIPTS / "rank_at_the_top.py"]
    output = said([*DDPRUN, *words], tmp_path / "place")
    assert (tmp_path / "place" / "out.txt").read_text() == result(output)[0]
    (run,) = (tmp_path / "place" / "runs" / "rank_at_the_top").iterdir()
    assert f"[rank 0] RESULT {result(output)[0]}" in (run / "log.txt").read_text()


def test_a_module_is_run_by_its_name(tmp_path, joining):
    (tmp_path / "place" / "package").mkdir(parents=True)
    module = tmp_path / "place" / "package" / "train.py"
    module.write_text(SCRIPTS.joinpath("accumulates.py").read_text())
    output = said([*DDPRUN, "--workers=2", "-m", "package.train"], tmp_path / "place", **joining)
    assert len(result(output)) == 1


def test_a_script_with_a_snapshot_goes_on_after_its_rank_was_killed(tmp_path, joining):
    words = [SCRIPTS / "trainer_class.py", "4", "."]
    whole = said([*DDPRUN, "--workers=2", *words], tmp_path / "whole", **joining)
    hurt = [*DDPRUN, "--workers=2", "--max-restarts=1", *words, "--dies-once"]
    output = said(hurt, tmp_path / "hurt", **joining)
    assert "Restart 1 on 2 rank(s)" in output and "goes on in epoch 2" in output
    assert result(output) == result(whole)


FAILS = """
import os, sys
def fail():
    raise ValueError("no data")
print("hello from", os.environ["RANK"], os.environ["PYTHONHASHSEED"], flush=True)
if os.environ["RANK"] == "1":
    fail()
"""
WAITS = """
import os, time
open("started-" + os.environ["RANK"], "w").close()
time.sleep(1000)
"""


def test_a_script_that_fails_names_the_rank_and_its_lines_alone(tmp_path):
    """Hashes have the seed of the user."""
    (tmp_path / "fails.py").write_text(FAILS)
    output = said([*DDPRUN, "--workers=2", "fails.py"], tmp_path, code=1, PYTHONHASHSEED="7")
    assert "Error: Rank 1 of 2 on" in output and "failed: ValueError: no data" in output
    traceback = output[output.index("Traceback") :]
    assert [*re.findall(r'File "(.*)", line', traceback)] == [str(tmp_path / "fails.py")] * 2
    assert "hello from 0 7\n" in output and "[rank 1] hello from 1 7\n" in output
    assert "There is no script none.py" in said([*DDPRUN, "none.py"], tmp_path, code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_script_and_leaves_nothing(tmp_path, number):
    (tmp_path / "waits.py").write_text(WAITS)
    process = started([*DDPRUN, "--workers=2", "waits.py"], tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    others = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert len(others) > 4 and not psutil.wait_procs(others, PATIENCE)[1]


SAVES_AT_SIGTERM = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(2)
    open("saved-" + os.environ["RANK"], "w").close()
    sys.exit(0)
if os.environ["RANK"] != "2":
    signal.signal(signal.SIGTERM, save)
open("started-" + os.environ["RANK"], "w").close()
time.sleep(1000)
"""


def test_sigterm_goes_to_the_handlers_of_a_script_which_have_time_to_end(tmp_path):
    """Also where another rank, without a handler, ends at once."""
    (tmp_path / "saves.py").write_text(SAVES_AT_SIGTERM)
    process = started([*DDPRUN, "--workers=3", "saves.py"], tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 3)
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_script_ends_well_by_os_exit_0_whichever_rank_ends_so_first(tmp_path, joining):
    line = "import os, sys, time; os.environ['RANK'] == sys.argv[1] and os._exit(0); time.sleep(2)"
    (tmp_path / "leaves.py").write_text(line + "; os.mkdir('ended')")
    for rank in (0, 1):
        said([*DDPRUN, "--workers=2", "leaves.py", rank], tmp_path, **joining)
        (tmp_path / "ended").rmdir()  # of the other one


WORDS = "import argparse; argparse.ArgumentParser().parse_args()"
SPAWNS = "import torch.multiprocessing as mp\ndef main(rank): ...\nmp.spawn(main, nprocs=2)"


def test_a_wrong_line_is_refused_in_a_few_words(tmp_path, joining):
    """Of ddprun itself, before anything is started; and of the script."""
    assert "no module nosuch" in said([*DDPRUN, "-m", "nosuch.train"], tmp_path, code=1)
    assert "subprocess" in said([*DDPRUN, "--no-python", "train.py"], tmp_path, code=2)
    assert "Write --workers" in said([*DDPRUN, "--nnodes=2", "train.py"], tmp_path, code=1)
    (tmp_path / "words.py").write_text(WORDS)
    output = said([*DDPRUN, "--workers=2", "words.py", "--falt=1"], tmp_path, code=1, **joining)
    assert "unrecognized arguments: --falt=1" in output and "exit code 2" in output
    assert "Traceback" not in output
    (tmp_path / "spawns.py").write_text(SPAWNS)
    output = said([*DDPRUN, "--workers=2", "spawns.py"], tmp_path, code=1, **joining)
    assert 'write main(rank, …), with rank = int(os.environ["RANK"])' in output


def torchruns_environment():
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("GROUP_", "ROLE_", "LOCAL_", "TORCHELASTIC_"))
    }


def test_a_function_too_has_the_environment_that_torchrun_gives(client):
    found = ddp.launch(client, torchruns_environment, workers=2, restarts=3).result
    run_id = found.pop("TORCHELASTIC_RUN_ID")
    assert run_id and found == {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


LEFT_OPEN = """
import atexit, logging.handlers, signal, sys, tempfile, threading, weakref
class Saver:
    def __del__(self):
        results.write("deleted ")
results, saver, folder = open("results", "w"), Saver(), tempfile.TemporaryDirectory()
results.write(folder.name + " ")
in_memory = logging.handlers.MemoryHandler(9, target=logging.FileHandler("log"))
logging.getLogger().addHandler(in_memory)
logging.warning("kept in memory")
signal.signal(signal.SIGHUP, lambda *_: results)
sys.own = open("kept", "w")
sys.own.write("not in __main__")
atexit.register(results.write, "atexit ")
threading.Timer(1, results.write, ["thread "]).start()
"""


def test_what_a_script_has_left_open_is_ended_as_python_ends_it(tmp_path, joining):
    (tmp_path / "leaves.py").write_text(LEFT_OPEN)
    said([*DDPRUN, "--workers=1", "leaves.py"], tmp_path, **joining)
    folder, *words = (tmp_path / "results").read_text().split()
    assert words == ["thread", "atexit", "deleted"] and not Path(folder).exists()
    assert (tmp_path / "log").read_text() == "kept in memory\n"
    assert (tmp_path / "kept").read_text() == "not in __main__"


OF_ITS_MAIN = """
import dataclasses
import torch
from torch.utils.data import DataLoader
import beside_the_target

@dataclasses.dataclass
class Batch:
    x: torch.Tensor

def collate(rows):
    return Batch(torch.tensor(rows))

if __name__ == "__main__":
    __builtins__.greet = lambda: "hello"
    how = dict(num_workers=1, collate_fn=collate, multiprocessing_context="spawn")
    (batch,) = DataLoader(range(2), batch_size=2, **how)
    print("RESULT", greet(), batch.x.tolist(), beside_the_target.x)
"""


def test_a_script_behind_a_link_has_its_builtins_and_classes_in_spawned_workers(tmp_path, joining):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/script.py").write_text(OF_ITS_MAIN)
    (tmp_path / "target/beside_the_target.py").write_text("x = 1")
    (tmp_path / "link.py").symlink_to(tmp_path / "target/script.py")
    output = said([*DDPRUN, "--workers=1", "link.py"], tmp_path, **joining)
    assert "RESULT hello [0, 1] 1\n" in output
