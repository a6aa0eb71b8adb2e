"""A script of a student's ends in time, with all that it has started, whatever it does."""

import os
import re
import signal
import textwrap
import threading

import pytest
from processes import assert_gone, is_alive, wait_until

import ddp_common as ddp
from ddp_common.teaching import scripts

JOINS = """
import os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} {sys.argv[1:]}")
dist.barrier()  # a rank that leaves at once may break the group that its peer is still joining
"""


def test_it_runs_on_two_ranks_in_a_folder_of_its_own():
    run = ddp.run_script(JOINS + "open(f'{dist.get_rank()}.txt', 'w')\n", "--epochs", "3")
    assert run.ok and run.exit_code == 0 and not run.timed_out, run.output
    for rank in range(2):
        assert f"[rank{rank}]:rank {rank} of 2 ['--epochs', '3']" in run.output
    assert sorted(path.name for path in run.folder.glob("*.txt")) == ["0.txt", "1.txt"]
    folder = run.folder
    del run
    assert not folder.exists()


def test_a_path_is_taken_as_a_file_that_is_left_where_it_is(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import os; print(f'{os.path.basename(__file__)} {os.getcwd()}')")
    run = ddp.run_script(script, ranks=1)
    assert f"mine.py {run.folder}" in run.output and run.folder != tmp_path


def test_an_error_of_one_rank_is_in_the_output():
    run = ddp.run_script(JOINS + "if dist.get_rank() == 1: raise ValueError('no such digit')\n")
    assert not run.ok and not run.timed_out
    assert re.search(r"\[rank1\]:.* ValueError: no such digit", run.output)
    said = "".join(re.findall(r"^\[rank1\].*", run.output, flags=re.M))
    assert "whole_lines.py" not in said and "runpy" not in said  # calls that lead to the script


SLOW_LINES = """
import time

class Slow:
    def __str__(self):
        time.sleep(0.05)
        return "word"

for _ in range(3):
    print("line", *[Slow()] * 10, "ends")
"""


def test_lines_arrive_whole_though_torchrun_looks_while_they_are_written():
    run = ddp.run_script(SLOW_LINES, ranks=2)
    for rank in range(2):
        whole = f"[rank{rank}]:line{' word' * 10} ends"
        assert run.output.splitlines().count(whole) == 3, run.output


PORTS = """
import os, psutil

def connections_of(process):
    try:
        return process.net_connections()
    except psutil.NoSuchProcess:  # the other rank has ended
        return []

first = psutil.Process(os.getppid())  # which has forked torchrun and the ranks
others = [first, *(each for each in first.children(True) if each.pid != os.getpid())]
connections = [each for process in others for each in connections_of(process)]
ports = {each.laddr.port for each in connections if each.status == "LISTEN"}
store = int(os.environ["MASTER_PORT"])
print("with a store:", store in ports, "others:", ports - {store})
"""


def test_what_starts_the_ranks_opens_no_port_at_which_others_would_be_unpickled():
    """None but that of the ranks' store. What torchrun unpickles is in a file."""
    run = ddp.run_script(PORTS, ranks=2)
    assert run.output.count("with a store: True others: set()") == 2, run.output


ENDS_AT_ONCE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(1, 1))
    model(torch.ones(2, 1)).sum().backward()
    dist.destroy_process_group()

main()
"""
AT_THE_TOP = ENDS_AT_ONCE.replace("def main()", "if True").replace("\nmain()", "")


@pytest.mark.parametrize("script", [ENDS_AT_ONCE, AT_THE_TOP], ids=["in main", "at the top"])
def test_a_script_that_ends_right_after_its_last_backward_has_not_failed(script):
    """torch's gloo group may hang or abort there, where Python takes the model apart."""
    runs = [ddp.run_script(script, timeout=120) for _ in range(4)]
    assert all(run.ok for run in runs), [run.output for run in runs]


ENDS = """
import atexit, ctypes, sys

last_of_c = ctypes.CFUNCTYPE(None)(lambda: print("C took it apart"))
ctypes.CDLL(None).__cxa_atexit(last_of_c, None, None)
atexit.register(print, "last words")
"""


@pytest.mark.parametrize(
    "how, code",
    [("", 0), ("sys.exit()", 0), ("sys.exit('why')", 1), ("sys.exit(7)", 1), ("1 / 0", 1)],
)
def test_pythons_own_last_acts_are_done_and_no_others(how, code):
    run = ddp.run_script(ENDS + how, ranks=1)
    assert run.exit_code == code and "[rank0]:last words" in run.output, run.output
    assert "C took it apart" not in run.output
    assert ("why" in run.output) == ("why" in how)
    assert ("exitcode  : 7" in run.output) == ("7" in how)


def test_a_signal_that_ends_a_rank_is_what_torchrun_says_of_it():
    run = ddp.run_script("import os; os.kill(os.getpid(), 11)", ranks=2)
    assert run.exit_code == 1 and "Signal 11 (SIGSEGV)" in run.output, run.output


LEAVES = """
import os, signal, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
    sys.exit(3)

def leave(*_):
    print("asked to leave", flush=True)
    time.sleep(0.3)  # in which it could be asked once more
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
dist.barrier()
time.sleep(600)
"""


def test_when_a_rank_fails_the_other_one_is_asked_to_leave():
    run = ddp.run_script(LEAVES, timeout=120)
    assert run.exit_code == 1 and run.output.count("[rank1]:asked to leave") == 1, run.output


OWN_MODULE = """
import pickle, random, sys
import numpy

class Mine:
    pass

assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
assert sys.modules["__main__"].Mine is Mine and __name__ == "__main__"
print("drawn:", random.random(), numpy.random.random())
"""


def test_a_script_is_the_main_module_and_draws_other_numbers_on_each_rank():
    run = ddp.run_script(OWN_MODULE, ranks=2)
    drawn = [line.split()[1:] for line in run.output.splitlines() if "drawn:" in line]
    assert run.ok and len(drawn) == 2, run.output
    assert all(one != other for one, other in zip(*drawn))


@pytest.mark.parametrize("script", [JOINS, "import sys; sys.exit(3)"])
def test_without_pidfds_torchrun_starts_the_ranks_itself(script, monkeypatch):
    monkeypatch.setattr(scripts, "has_pidfds", lambda: False)
    run = ddp.run_script(script)
    assert run.ok == (script == JOINS) and ("rank 1 of 2" in run.output) == run.ok


HELD_OPEN = """
import os, socket

port = int(os.environ["MASTER_PORT"])
try:
    socket.create_server(("127.0.0.1", port))
except OSError as error:
    print("held already:", error)
"""


def test_the_port_of_the_store_is_held_before_the_ranks_start():
    """A number that is only chosen beforehand may be another program's by then."""
    run = ddp.run_script(HELD_OPEN, ranks=1)
    assert "held already:" in run.output, run.output


def test_sys_exit_is_seen():
    run = ddp.run_script("import sys; sys.exit(3)", ranks=1)
    assert not run.ok and not run.timed_out


LEAVES_CHILDREN = textwrap.dedent("""
    import subprocess, sys, time
    pids = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (0, 1)]
    print("started {} {}".format(*pids))
    print("x" * 2**20)
""")


@pytest.mark.parametrize("then", ["", "time.sleep(1000)\n"])
def test_nothing_that_it_has_started_is_left_when_it_ends_or_is_ended(then):
    run = ddp.run_script(LEAVES_CHILDREN + then, ranks=1, timeout=60 if then else 120)
    assert run.timed_out == bool(then)
    started = re.search(r"started (\d+) (\d+)", run.output)
    assert started, run.output
    pids = [int(pid) for pid in started.groups()]
    assert_gone(lambda: [pid for pid in pids if is_alive(pid)])
    assert "characters left out" in run.output and len(run.output) < 21_000


def test_its_temporary_files_and_those_of_torchrun_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for what it starts
    run = ddp.run_script("import tempfile; print(tempfile.mkstemp()[1])", ranks=2)
    assert run.ok and run.output.count(f"]:{tmp_path}/ddp-") == 2, run.output
    assert not list(tmp_path.iterdir())


def test_a_loop_that_prints_for_ever_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = ddp.run_script("while True: print('x' * 10**6)", ranks=1, timeout=200)
    assert not run.ok and not run.timed_out
    # its traceback may stand in the middle, which is left out
    last = run.output.splitlines()[-1]
    assert "has printed 1 GiB" in last and "a loop that prints for ever?" in last, run.output
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_it(tmp_path, monkeypatch):
    """As the stop button of a notebook does."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    pid_file = tmp_path / "pid"
    script = f"""
import os, time
with open({str(tmp_path / "part")!r}, "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, {str(pid_file)!r})
time.sleep(600)
"""

    def interrupt():
        wait_until(pid_file.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        ddp.run_script(script, ranks=1, timeout=300)
    pid = int(pid_file.read_text())
    assert_gone(lambda: [pid] if is_alive(pid) else [])
    assert not list(temporary.iterdir())
