"""Answers to exercise B of `pets`: a run that was stopped, killed and resumed.

All are made from one run, that of the solution; a change is made in a copy of its folder.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

from tests.mutants.judging import solution_of

MADE: list = []
WORK = Path(tempfile.gettempdir())


def made():
    """The folder of the solution's run: it is made once."""
    if not MADE:
        names = globals()
        exec(solution_of("pets", "my_run"), names)
        MADE.append(Path(names["my_run"]()))
    return MADE[0]


def copied(change):
    """An answer: a copy of the run in which `change(folder)` has changed something."""

    def answer():
        folder = Path(tempfile.mkdtemp()) / "run"
        shutil.copytree(made(), folder)
        return change(folder) or str(folder)

    return answer


def log_without(*patterns):
    def change(folder):
        log = (folder / "log.txt").read_text().splitlines(keepends=True)
        kept = [line for line in log if not any(re.search(each, line) for each in patterns)]
        (folder / "log.txt").write_text("".join(kept))

    return change


def typed_log(folder):
    """A run that nobody disturbed, and four lines that are typed into its log."""
    log_without("interrupted", "SIGKILL", "Resumed", "started: process")(folder)
    reports = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({**each, "restart": 0}) + "\n" for each in reports)
    )
    with (folder / "log.txt").open("r+") as file:
        rest = file.read()
        file.seek(0)
        for what in ("interrupted from the keyboard", "Resumed from step-00000050.pt"):
            file.write(f"10:00:00 {what}\n")
        for what in ("rank 1 was killed by SIGKILL", "Resumed from step-00000100.pt"):
            file.write(f"10:00:09 {what}\n")
        file.write(rest)


def resumed_at_once(folder):
    """Each event is there, in another order."""
    log = (folder / "log.txt").read_text().splitlines(keepends=True)
    late = [line for line in log if "Resumed" in line]
    (folder / "log.txt").write_text("".join([*late, *(each for each in log if each not in late)]))


def with_setting(**changed):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        config["settings"] |= changed
        (folder / "config.json").write_text(json.dumps(config))

    return change


def without_its_newest_checkpoint(folder):
    max((folder / "checkpoints").glob("step-*.pt")).unlink()


def without(name):
    return lambda folder: (folder / name).unlink()


RIGHT = {
    "a path": copied(lambda folder: folder),
    "blanks around it": copied(lambda folder: f" {folder}\n"),
    "a slash behind it": copied(lambda folder: f"{folder}/"),
    "other lines in its log": copied(
        lambda folder: (folder / "log.txt").open("a").write("somebody was here\n") and None
    ),
}
WRONG = {
    "nothing": (lambda: None, "nothing is written yet"),
    "the example": (lambda: "runs/pets/…", "Run directory"),
    "a number": (lambda: 3, "Run directory"),
    "the folder of all runs": (lambda: str(made().parent), "Run directory"),
    "no log": (copied(without("log.txt")), "Run directory"),
    "not stopped": (copied(log_without("interrupted")), "before you came"),
    "not killed": (copied(log_without("SIGKILL")), "`kill` without -9"),
    "not resumed": (copied(log_without("Resumed")), "a checkpoint"),
    "not finished": (copied(log_without("finished:")), "still training"),
    "resumed before it was stopped": (copied(resumed_at_once), "a checkpoint|after the run"),
    "a typed log": (copied(typed_log), "all that the run wrote"),
    "another rate on the way": (
        copied(with_setting(learning_rate=0.5)),
        "Did you change a setting",
    ),
    "another size of a batch": (copied(with_setting(batch_size=256)), "Did you change a setting"),
    "other data": (copied(with_setting(seed=1)), "What else did you set"),
    "its newest checkpoint is gone": (
        copied(without_its_newest_checkpoint),
        "Did you change a setting",
    ),
}
EVERY = 0  # the solution is a program that does by itself what students do by hand
EQUIVALENT: dict = {}
IN_TESTS = ["a path", "a typed log", "not killed"]
