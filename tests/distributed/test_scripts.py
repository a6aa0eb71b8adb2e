"""Scripts that connect at their top level, as a beginner writes them: without a guard."""

import subprocess
import sys

SCRIPT = """
import sys
from dataclasses import dataclass

import torch
import ddp_common as ddp

print("top level")


@dataclass
class Answer:
    number: int


def train(answer):
    total = torch.tensor([answer.number * (ddp.rank() + 1)])
    torch.distributed.all_reduce(total)
    return total.item()

{connect}
"""
UNGUARDED = """
client = ddp.connect("local", workers=2)
print("result", ddp.launch(client, train, answer=Answer(7)).result)
print("task", client.submit(lambda answer: Answer(answer.number + 1), Answer(1)).result())
client.close()
"""
GUARDED = 'if __name__ == "__main__":\n' + "\n".join(
    "    " + line for line in UNGUARDED.strip().splitlines()
)


def run(tmp_path, connect, *command):
    (tmp_path / "beginner.py").write_text(SCRIPT.format(connect=connect))
    return subprocess.run(
        [sys.executable, *(command or ["beginner.py"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )


def assert_ran_once(done):
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["top level", "result 21", "task Answer(number=2)"]
    assert "Traceback" not in done.stderr


def test_a_script_without_a_guard_trains_and_its_top_level_runs_once(tmp_path):
    assert_ran_once(run(tmp_path, UNGUARDED))


def test_a_script_with_a_guard_trains_and_its_top_level_runs_once(tmp_path):
    assert_ran_once(run(tmp_path, GUARDED))


def test_a_module_without_a_guard_that_is_run_by_its_name_does_too(tmp_path):
    assert_ran_once(run(tmp_path, UNGUARDED, "-m", "beginner"))


def test_the_users_own_processes_still_find_what_the_script_defines(tmp_path):
    done = run(
        tmp_path,
        GUARDED
        + """
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(Answer, (5,)))
""",
    )
    assert done.returncode == 0, done.stderr
    assert "Answer(number=5)" in done.stdout
