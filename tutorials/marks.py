"""Marks the hand-ins of a class: `make marks FOLDER=hand-ins [TUTORIAL=pets]`.

Each answer is judged by the check of its lesson, in a process of its own
(`tutorials/checks/as_answer.py`), in a sandbox of bubblewrap: without a network, with a time
limit, and without a view of other hand-ins, of solutions and of the user's files. What it writes
is gone afterwards. A student's files are seen where they were in the clone: in
`tutorials/my-work`, and a folder `runs` in the clone's `runs`.

Leaves marks.csv and marks.html in FOLDER. A row is written when its answer has been judged: after
a stop the same command goes on, and what has not changed is not judged again.
"""

import csv
import hashlib
import html
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas
from tqdm import tqdm

from ddp_common.errors import Error
from tutorials.hand_ins import Exercise, answer_in, digest_of, exercises, hand_ins, read
from tutorials.kit.cli import tutorial_path, tutorials
from tutorials.kit.datasets import fetch, registry
from tutorials.kit.launchers import available_cores

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
MY_WORK = HERE / "my-work"  # where students work
NOT_SHOWN = {".git", "runs", "tutorials", "my-work", "scripts", "student"}
SYSTEM = (
    "/usr /bin /sbin /lib /lib32 /lib64 /opt /sys/devices/system/cpu /etc/alternatives "
    "/etc/fonts /etc/group /etc/hosts /etc/ld.so.cache /etc/localtime /etc/nsswitch.conf "
    "/etc/passwd /etc/ssl"
).split()
ROOM = 10**9  # bytes in each place where a sandbox may write
MOST_SAID = 100_000  # bytes of a verdict
START = 90.0  # seconds for imports, the lesson's cells and a cluster, beside the check's time
NO_DIGEST = "0" * 64
SYMBOLS = {
    "right": "✓",
    "not right": "✗",
    "nothing written": "–",
    "did not end": "⏱",
    "not judged": "!",
}


@dataclass
class Row:
    """A line of marks.csv."""

    student: str
    lesson: str
    exercise: str
    mark: str
    sentence: str
    digest: str  # of all that was judged

    @property
    def key(self):
        """What there is one row of."""
        return self.student, self.lesson, self.exercise


# A sandbox


def sandbox(files: dict[str, Path], folder: Path) -> list[str]:
    """The beginning of a command that sees the system, the course and a student's files.

    `folder` is that of all hand-ins. Each place where the command can write is its own, in memory.
    """
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in SYSTEM:
        words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/dev/shm", "/tmp", str(REPOSITORY)):
        words += ["--size", str(ROOM), "--tmpfs", place]
    shown = [sys.prefix, sys.base_prefix, HERE / "scripts" / "plain_loop.py"]
    lessons = {path.name for path in tutorials().values()}
    for path in [*REPOSITORY.iterdir(), *HERE.iterdir()]:
        if path.name not in NOT_SHOWN | lessons and path.suffix != ".ipynb":
            shown.append(path)
    for path in map(str, shown):
        words += ["--ro-bind-try", path, path]
    words += ["--dir", str(MY_WORK), "--tmpfs", str(folder)]
    for name, path in files.items():
        words += ["--ro-bind", str(path), str(MY_WORK / name)]
    if "runs" in files:
        words += ["--ro-bind", str(files["runs"]), str(REPOSITORY / "runs")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "WORKERS": "2"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg", "DDP_PROGRESS": "off"}
    words.append("--clearenv")
    for name, value in environment.items():
        words += ["--setenv", name, value]
    return [*words, "--chdir", str(MY_WORK)]


class Judging:
    """An answer that is being judged, and the row that it gives."""

    def __init__(self, row: Row, command: list[str], exercise: Exercise, cells: list[str]):
        self.row = row
        self.limit, self.began = exercise.timeout + START, time.monotonic()
        self.token = secrets.token_hex(16)
        self.said, theirs = socket.socketpair()  # unlike a file or a pipe, /proc does not open it
        task = {**asdict(exercise), "cells": cells, "token": self.token}
        with tempfile.TemporaryFile() as given, theirs:
            given.write(json.dumps(task).encode())
            given.seek(0)
            self.process = subprocess.Popen(
                [*command, sys.executable, "-m", "tutorials.checks.as_answer"],
                stdin=given,
                stdout=theirs,
                stderr=subprocess.DEVNULL,
            )

    def has_ended(self) -> bool:
        """Whether the row has its mark. After the time limit it is ended."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.began < self.limit:
            return False
        self.end()
        self.row.mark, said = self.verdict(code)
        self.row.sentence = in_a_cell(said)
        return True

    def verdict(self, code: int | None) -> tuple[str, str]:
        """The mark and the sentence; `code` is the exit code, None if it was ended."""
        with self.said:
            said = self.said.recv(MOST_SAID).decode(errors="replace")
        for line in said.splitlines():
            if line.startswith(self.token):
                mark, words = json.loads(line.removeprefix(self.token))
                return mark, re.sub(r"^(right: |not yet:? ?)", "", " ".join(words.split()))
        if code is None:
            return "did not end", f"it was ended after {self.limit:g} s"
        return "not right", f"its process ended before it was judged, with exit code {code}"

    def end(self) -> None:
        """End the sandbox, and with it all processes in it."""
        self.process.kill()
        self.process.wait()


def judge_all(waiting: list[tuple], folder: Path) -> Iterator[Row]:
    """The rows with their marks, as they come: as many at a time as there are cores.

    `waiting` has rows, hand-ins, exercises and cells. Where the check measures time, an answer is
    judged alone.
    """
    waiting = sorted(waiting, key=lambda each: each[2].timed)
    running: list[Judging] = []
    try:
        while waiting or running:
            at_once = 1 if waiting and waiting[0][2].timed else available_cores()
            if waiting and len(running) < at_once:
                row, hand_in, exercise, cells = waiting.pop(0)
                command = sandbox(hand_in.files, folder)
                running.append(Judging(row, command, exercise, cells))
                continue
            for judging in [each for each in running if each.has_ended()]:
                running.remove(judging)
                yield judging.row
            time.sleep(0.05)
    finally:
        for judging in running:
            judging.end()


# The table


def in_a_cell(text: str) -> str:
    """`text` as one line that no spreadsheet takes for a formula."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[:1_000])
    return f"'{line}" if line.lstrip().startswith(("=", "+", "-", "@", "'")) else line


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of an earlier marks.csv; not one that was half written."""
    if path.exists():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for words in csv.reader(file):
                if len(words) == len(Row.__annotations__) and len(words[-1]) == len(NO_DIGEST):
                    yield Row(*words)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write marks.csv anew; who opens it sees the old one or the new one."""
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(Row.__annotations__)
        csv.writer(file).writerows(asdict(row).values() for row in rows)
    new.replace(path)


def page_of(rows: list[Row]) -> str:
    """The table of the class: a line for each student, a column for each exercise."""
    cells = [
        {
            "student": html.escape(row.student),
            "exercise": html.escape(f"{row.lesson} {row.exercise}"),
            "mark": f"<details><summary>{SYMBOLS[row.mark]} {row.mark}</summary>"
            f"{html.escape(row.sentence)}</details>",
        }
        for row in rows
    ]
    table = pandas.DataFrame(cells).pivot(index="student", columns="exercise", values="mark")
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Marks</title>'
    return f"{head}\n{table.to_html(escape=False, na_rep='', justify='left')}\n</html>\n"


# All of it


def answers(folder: Path, only: str) -> Iterator[tuple]:
    """For each answer its row, hand-in, exercise and cells; the row has a mark if all is said.

    Raises `Error` if there is none.
    """
    found = [each for each in hand_ins(folder) if only in ("", each.lesson)]
    if not found:
        raise Error(
            f"FOLDER={folder} has no hand-in{f' of {only}' if only else ''}. It takes a folder "
            "for each student (ann/pets.ipynb), or flat files (ann-pets.ipynb)."
        )
    counts = Counter((in_a_cell(each.student), each.lesson) for each in found)
    checks = b"".join(path.read_bytes() for path in sorted((HERE / "checks").glob("*.py")))
    for hand_in in found:
        whose = in_a_cell(hand_in.student), in_a_cell(hand_in.lesson)
        try:
            if hand_in.lesson not in tutorials():
                ends = ", ".join(f"{name}.ipynb" for name in tutorials())
                raise Error(f"{hand_in.notebook.name}: its name must end in one of {ends}")
            if counts[whose] > 1:
                raise Error("this student has handed in two notebooks of this lesson")
            cells, files = read(hand_in.notebook), digest_of(hand_in.files)
        except (Error, OSError) as error:
            yield (
                Row(*whose, "", "not judged", in_a_cell(str(error)), NO_DIGEST),
                hand_in,
                None,
                [],
            )
            continue
        for exercise in exercises(hand_in.lesson):
            answer = answer_in(cells, exercise)
            judged = json.dumps([answer, files, asdict(exercise)]).encode() + checks
            row = Row(*whose, exercise.name, "", "", hashlib.sha256(judged).hexdigest())
            if not answer:
                row.mark, row.sentence = "nothing written", "its cell is not in the notebook"
            elif all(source.strip() in ("", exercise.stub.strip()) for source in answer):
                row.mark, row.sentence = "nothing written", "its cell is as it was"
            yield row, hand_in, exercise, answer


def mark(folder: Path, only: str) -> list[Row]:
    """Judge what has not been judged yet, and write marks.csv; returns its rows.

    `only` names a lesson; "" is all of them. Raises `Error` if there is no hand-in.
    """
    table = folder / "marks.csv"
    earlier = {row.key: row for row in read_rows(table)}
    rows = [row for row in earlier.values() if only not in ("", row.lesson)]
    waiting = []
    for row, *rest in answers(folder, only):
        before = earlier.get(row.key)
        if row.mark:
            rows.append(row)
        elif before and before.digest == row.digest and before.mark != "not judged":
            rows.append(before)
        else:
            waiting.append((row, *rest))
    for lesson in registry().keys() & {exercise.lesson for _, _, exercise, _ in waiting}:
        fetch(lesson)  # what is drawn is drawn here, and seen in all sandboxes
    write_rows(table, rows)
    with table.open("a", newline="", encoding="utf-8") as file:
        bar = tqdm(judge_all(waiting, folder), total=len(waiting), unit=" answers", disable=None)
        for row in bar:
            rows.append(row)
            csv.writer(file).writerow(asdict(row).values())
            file.flush()
    each_once = {row.key: row for row in rows}
    rows = [each_once[key] for key in sorted(each_once)]
    write_rows(table, rows)
    return rows


def chosen_folder() -> Path:
    """FOLDER. Raises `Error` if it is none for hand-ins, or if nothing can be judged here."""
    name = os.environ.get("FOLDER", "")
    folder = Path(name).expanduser().resolve()
    if not name or not folder.is_dir():
        raise Error(f"FOLDER={name}: there is no such folder. It takes that of the hand-ins.")
    if any(Path(each).is_relative_to(folder) for each in (HERE, sys.prefix, sys.base_prefix)):
        raise Error(f"FOLDER={name} also holds this course. Give the hand-ins a folder apart.")
    why = "A hand-in is a program of somebody else: it is run in a sandbox of bubblewrap only."
    if shutil.which("bwrap") is None:
        raise Error(f"{why} There is no bwrap here. On Debian and Ubuntu: apt install bubblewrap")
    tried = subprocess.run([*sandbox({}, folder), "true"], capture_output=True, text=True)
    if tried.returncode:
        raise Error(f"{why} It cannot make one here: {tried.stderr.strip()}")
    return folder


def main() -> None:
    """Take everything from the environment, where make puts it."""
    try:
        only = os.environ.get("TUTORIAL", "")
        if only:
            tutorial_path(only)
        folder = chosen_folder()
        rows = mark(folder, only)
        (folder / "marks.html").write_text(page_of(rows), encoding="utf-8")
    except Error as error:
        sys.exit(f"\nError: {error}")
    except OSError as error:
        sys.exit(f"\nError: {error.filename}: {error.strerror}. Marks are written into FOLDER.")
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command goes on.")
    counts = Counter(row.mark for row in rows)
    print(", ".join(f"{word}: {counts[word]}" for word in SYMBOLS if counts[word]))
    print(f"The table is in {folder}/marks.html, and in marks.csv beside it.")


if __name__ == "__main__":
    main()
