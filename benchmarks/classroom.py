"""A class on one machine: users who have a clone each, and one environment that is nobody's.

    python benchmarks/classroom.py --venv /shared/env [--students 30] [--at-once 8]

As root. Each student is a new Unix user, clones this repository (shallow), and opens mnist's
notebook in a kernel. When all have it open, so many at once go on to the first `right`: connect,
train in one process, exercise A with two ranks. Nobody closes anything before the last is there.
Prints seconds, memory and disk of each, in the median and at most, and what one student can read
of another's. The users and their folders are removed in the end.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
READS = """
import os, pathlib, sys
paths = pathlib.Path(sys.argv[1]).rglob("*")
print(sum(path.is_file() and os.access(path, os.R_OK) for path in paths))
"""


# A student, in the clone


def walk() -> None:
    """Run mnist's notebook, with its solutions, to the first `right`; say what was reached."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "tutorials" / "mnist.ipynb", 4)
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": ROOT / "tutorials"}}
    )
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if "ddp.connect()" in cell.source and cell.cell_type == "code":
                print("open", flush=True)
                input()  # until it is this student's turn
            client.execute_cell(cell, index)
            if cell.source.startswith("judge("):
                print(cell.outputs[0]["text"].partition(":")[0], flush=True)
                notebook.cells[index] = nbformat.v4.new_code_cell("ddp.launch(client, print)")
                client.execute_cell(notebook.cells[index], index)  # it leaves a run's folder
                print("run", flush=True)
                break
        input()  # until the class is over


# The class


class Student:
    """A Unix user with a clone. `times` has the seconds of each part, from its own beginning."""

    def __init__(self, number: int, venv: str, place: Path):
        self.name = f"ddp-class-{number}"
        self.home = place / self.name
        subprocess.run(
            ["useradd", "--create-home", "--home-dir", self.home, "--key", "UMASK=022", self.name],
            check=True,
        )
        self.home.chmod(0o755)  # what protects a run is its own mode
        # The repository is somebody else's, as that of an instructor is
        (self.home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
        self.clone = self.home / "ddp"
        self.python = f"{venv}/bin/python"
        self.times: dict[str, float] = {}
        self.program: subprocess.Popen | None = None

    def command(self, *words: str) -> list[str]:
        """The words as a command of this user, whose environment is that of `make … VENV=`."""
        variables = {"HOME": self.home, "PATH": os.environ["PATH"], "PYTHONPATH": self.clone}
        changed = ["setpriv", f"--reuid={self.name}", f"--regid={self.name}", "--init-groups"]
        return [*changed, "env", "-i", *(f"{k}={v}" for k, v in variables.items()), *words]

    def open_notebook(self) -> None:
        began = time.monotonic()
        address = f"file://{ROOT}"
        clone = ["git", "clone", "-q", "--depth=1", address]
        subprocess.run(self.command(*clone, str(self.clone)), check=True)
        self.times["clone"] = time.monotonic() - began
        began = time.monotonic()
        program = self.command(self.python, f"{self.clone}/benchmarks/classroom.py", "--walk")
        self.program = subprocess.Popen(
            program,
            cwd=self.clone,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.hear("open")
        self.times["notebook open"] = time.monotonic() - began

    def answer(self) -> None:
        began = time.monotonic()
        self.say()
        self.hear("right")
        self.times["first right"] = time.monotonic() - began
        self.hear("run")

    def say(self) -> None:
        self.program.stdin.write("\n")
        self.program.stdin.flush()

    def hear(self, word: str) -> None:
        said = self.program.stdout.readline().strip()
        if said != word:
            raise SystemExit(f"{self.name}: expected {word!r}, and heard {said!r}")

    def memory(self) -> float:
        """GB of all processes of this user; what several share counts in parts (PSS)."""
        total = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.username() == self.name:
                    total += process.memory_full_info().pss
        return total / 1e9

    def disk(self) -> float:
        """MB of the clone and all else at home."""
        blocks = (path.lstat().st_blocks for path in self.home.rglob("*"))
        return 512 * sum(blocks) / 1e6

    def readable(self, other: "Student") -> int:
        """How many files of another student's runs this one can read."""
        words = self.command(self.python, "-c", READS, str(other.clone / "runs"))
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    def leave(self) -> None:
        if self.program is not None:
            with contextlib.suppress(BrokenPipeError):
                self.say()
            self.program.wait(60)
        subprocess.run(["pkill", "-KILL", "-u", self.name], check=False)
        subprocess.run(["userdel", self.name], check=False)
        shutil.rmtree(self.home, ignore_errors=True)


def side_by_side(actions, at_once: int) -> None:
    """Call each in a thread of its own, at most so many at a time. A failure is raised here."""
    room = threading.Semaphore(at_once)
    failures: list[BaseException] = []

    def act(action):
        with room:
            try:
                action()
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=act, args=[action]) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--walk", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--venv", default=sys.prefix, help="an environment that all can read")
    parser.add_argument("--students", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=8)
    asked = parser.parse_args()
    if asked.walk:
        return walk()
    if os.geteuid() != 0:
        raise SystemExit("Only root can make the users of a class.")
    students: list[Student] = []
    with tempfile.TemporaryDirectory(prefix="ddp-class-") as folder:
        Path(folder).chmod(0o755)
        try:
            for number in range(asked.students):
                students.append(Student(number, asked.venv, Path(folder)))
            side_by_side([student.open_notebook for student in students], asked.at_once)
            side_by_side([student.answer for student in students], asked.at_once)
            figures = {
                "memory (GB)": [student.memory() for student in students],
                "disk (MB)": [student.disk() for student in students],
                **{
                    f"{part} (s)": [each.times[part] for each in students]
                    for part in students[0].times
                },
            }
            for name, values in figures.items():
                print(f"{name:20} {statistics.median(values):7.1f} {max(values):7.1f} at most")
            print("memory in use (GB) ", psutil.virtual_memory().used / 1e9)
            runs = students[0].clone / "runs"
            there = sum(path.is_file() for path in runs.rglob("*"))
            read = students[-1].readable(students[0])
            print(f"{read} of {there} files of another's runs can be read")
        finally:
            side_by_side([student.leave for student in students], asked.students)


if __name__ == "__main__":
    main()
