"""`make marks`: answers of a class are judged apart, rightly, and none of them changes anything.

A class is marked once, with bubblewrap, and the tests look at its table.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import nbformat
import psutil
import pytest
from patience import PATIENCE
from processes import finished, wait_until
from tutorials_here import ROOT

from tutorials import marks
from tutorials.hand_ins import exercises, hand_ins
from tutorials.kit.cli import tutorials

SANDBOX = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--proc", "/proc", "true"]
pytestmark = pytest.mark.skipif(
    not shutil.which("bwrap") or subprocess.run(SANDBOX, capture_output=True).returncode != 0,
    reason="bubblewrap makes no sandbox here: apt install bubblewrap",
)
PORT = "def my_port():\n    return '{}'"
SOLUTION_OF_B = ROOT / "tutorials" / "scripts" / "solutions" / "plain_loop.py"


def hand_in(folder, student, lesson, solved=False, **written):
    """A notebook of a student: for each exercise what is `written`, else the solution or a gap."""
    notebook = nbformat.read(ROOT / "tutorials" / "student" / f"{lesson}.ipynb", 4)
    solutions = nbformat.read(ROOT / "tutorials" / f"{lesson}.ipynb", 4)
    for cell, solution in zip(notebook.cells, solutions.cells):
        if "solution" in cell.metadata.get("tags", []):
            name = re.search(r"(?m)^def (\w+)", cell.source)[1]
            cell.source = written.get(name, solution.source if solved else cell.source)
    folder.mkdir(exist_ok=True)
    nbformat.write(notebook, folder / f"{student}-{lesson}.ipynb")


def rate(*lines, top=()):
    """An answer of exercise A of `dogs`, wrong: it returns `base`."""
    begin = "def my_rate(seen, base, ranks, rule, warm_up):"
    return "\n".join([*top, begin, *(f"    {line}" for line in lines), "    return base"])


RIGHT = """    end = base * {"kept": 1, "square root": math.sqrt(ranks), "linear": ranks}[rule]
    return base + (min(seen / warm_up, 1) if warm_up else 1) * (end - base)"""
OTHERS = "from pathlib import Path\nfrom contextlib import suppress\n"
HOSTILE = {  # the answer, its mark, and what its sentence has
    "exits at once": (rate(top=["import os", "os._exit(0)"]), "not right", "exit code 0"),
    "exits when called": (rate("import os", "os._exit(0)"), "not right", "exit code 0"),
    "leaves at once": (rate(top=["import sys", "sys.exit(3)"]), "not right", "SystemExit: 3"),
    "prints, and has a judge of its own": (
        rate("print('x' * 80)", top=["for judge in [print] * 10**6:", "    judge('right')"]),
        "not right",
        "what is the rule",
    ),
    "replaces the check": (
        rate(top=["checks.rate = lambda answer: 'well done'"]),
        "not right",
        "it replaces tutorials.checks.dogs.rate",
    ),
    "writes outside": (
        OTHERS + "for path in {places!r}:\n    with suppress(OSError):\n"
        "        Path(path).write_text('mine')\n" + rate().replace("    return base", RIGHT),
        "right",
        "three rules",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The hand-ins of a class."""
    folder = tmp_path_factory.mktemp("class") / "hand-ins"
    for lesson in tutorials():
        hand_in(folder, "solved", lesson, solved=True, my_port=PORT.format("my_port.py"))
        hand_in(folder, "empty", lesson)
    shutil.copy(SOLUTION_OF_B, folder / "solved-my_port.py")
    hand_in(folder, "copies", "mnist", my_port=PORT.format(SOLUTION_OF_B))
    hand_in(folder, "half", "dogs", my_rate=rate(), my_comparison="def my_comparison(:")
    hand_in(folder, "half", "ucmerced", my_reading="def my_reading():\n    return {1: ('T', 20)}")
    hand_in(folder, "runs", "pets", my_run="def my_run():\n    return 'runs/pets/7'")
    (folder / "runs").mkdir()
    (folder / "runs-pets.ipynb").rename(folder / "runs" / "pets.ipynb")
    run = folder / "runs" / "runs" / "pets" / "7"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"settings": {}}))
    (run / "log.txt").write_text("interrupted from the keyboard\n")
    places = [folder / "solved-dogs.ipynb", folder / "marks.csv"]
    places += [ROOT / "tutorials" / "checks" / "dogs.py", ROOT / "written.txt"]
    places.append(ROOT / "docs" / "instructors.md")
    for name, (source, _, _) in HOSTILE.items():
        written = source.replace("{places!r}", repr([*map(str, places)]))
        hand_in(folder, name, "dogs", my_rate=written)
    empties = "def my_reading():\n    checks.READINGS.clear()\n    return {}"
    hand_in(folder, "empties the check", "ucmerced", my_reading=empties)
    (folder / "broken-pets.ipynb").write_text("{")
    (folder / "dora-cats.ipynb").write_text("{}")
    for name in ("double/gpt.ipynb", "double-gpt.ipynb"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "empty-gpt.ipynb", folder / name)
    return folder


def state_of(folder):
    """What is in a folder: sizes and times of its files."""
    kept = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in kept
        if path.is_file() and not path.name.startswith("marks.")
    }


def mark(folder, **variables):
    environment = {**os.environ, "FOLDER": str(folder), "PYTHONPATH": str(ROOT), **variables}
    return finished("-m", "tutorials.marks", within=15 * PATIENCE, env=environment).stdout


def rows_in(folder):
    return {(row.student, row.exercise): row for row in marks.read_rows(folder / "marks.csv")}


@pytest.fixture(scope="module")
def rows(folder):
    """The table of the class, when nothing else has changed."""
    places = folder, ROOT / "tutorials" / "checks", ROOT / "docs"
    before = [state_of(place) for place in places]
    mark(folder)
    assert [state_of(place) for place in places] == before
    assert not (ROOT / "written.txt").exists()
    assert not processes_of(folder)
    return rows_in(folder)


def processes_of(folder):
    """Processes that have this folder on their command line, but not this one."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in (process.info["cmdline"] or ()) and process.pid != os.getpid()
    ]


@pytest.mark.timeout(15 * PATIENCE)
@pytest.mark.parametrize("lesson", tutorials())
def test_every_solution_is_right_and_every_gap_is_empty(lesson, rows):
    for each in exercises(lesson):
        assert rows["solved", each.name].mark == "right", rows["solved", each.name]
        assert rows["empty", each.name].mark == "nothing written"


@pytest.mark.parametrize("student", HOSTILE)
def test_an_answer_that_is_hostile_ends_as_its_own_row(student, rows):
    _, mark, said = HOSTILE[student]
    assert rows[student, "my_rate"].mark == mark
    assert said in rows[student, "my_rate"].sentence


@pytest.mark.parametrize(
    ("student", "exercise", "said"),
    [
        ("half", "my_rate", "what is the rule"),
        ("half", "my_comparison", "no my_comparison is defined: SyntaxError"),
        ("half", "my_reading", "log 2: None"),
        ("copies", "my_port", "the path of a file"),  # our solution is out of sight
        ("runs", "my_run", "a log without this event: a rank was killed"),  # its log is in sight
        ("empties the check", "my_reading", "it replaces tutorials.checks.ucmerced.READINGS"),
    ],
)
def test_an_answer_that_is_half_right_is_told_what_the_check_says(student, exercise, said, rows):
    assert rows[student, exercise].mark == "not right"
    assert said in rows[student, exercise].sentence


@pytest.mark.parametrize(
    ("student", "said"),
    [
        ("broken", "broken-pets.ipynb is no notebook"),
        ("dora", "its name must end in one of"),
        ("double", "two notebooks of this lesson"),
    ],
)
def test_what_cannot_be_judged_is_a_row_with_a_sentence(student, said, rows):
    assert rows[student, ""].mark == "not judged" and said in rows[student, ""].sentence


def test_what_has_not_changed_is_not_judged_again(folder, rows):
    page = (folder / "marks.html").read_text()
    hand_in(folder, "half", "dogs", my_rate=rate().replace("    return base", RIGHT))
    began = time.monotonic()
    assert "not judged: 3" in mark(folder)
    assert time.monotonic() - began < PATIENCE
    again = rows_in(folder)
    assert again["half", "my_rate"].mark == "right"
    assert again["half", "my_comparison"].mark == "nothing written"
    changed = {("half", "my_rate"), ("half", "my_comparison")}
    assert {key for key in rows if rows[key] != again[key]} == changed
    assert (folder / "marks.html").read_text() != page


def test_after_a_kill_the_same_command_goes_on_and_no_process_stays(tmp_path):
    for student in ("ann", "bob", "carl"):
        hand_in(tmp_path, student, "dogs", my_rate=rate())
    environment = {**os.environ, "FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "tutorials.marks"], env=environment)
    table = tmp_path / "marks.csv"
    wait_until(lambda: [key for key in rows_in(tmp_path) if key[1] == "my_rate"])
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not processes_of(tmp_path))
    there = rows_in(tmp_path)
    ((student, _),) = {key for key in there if key[1] == "my_rate"}
    text = table.read_text().replace("what is the rule", "As it was judged before the kill")
    table.write_text(text + 'carl,dogs,my_rate,right,"half wri')
    mark(tmp_path, TUTORIAL="dogs")
    rows = rows_in(tmp_path)
    assert len(rows) == 9
    assert "As it was judged" in rows[student, "my_rate"].sentence
    assert {rows[name, "my_rate"].mark for name in ("ann", "bob", "carl")} == {"not right"}


def test_an_answer_that_never_ends_is_ended_with_all_that_it_has_started(tmp_path, monkeypatch):
    loop = ["import signal, subprocess", "subprocess.Popen(['sleep', '4321'])"]
    loop += ["signal.signal(signal.SIGALRM, signal.SIG_IGN)", "while True: pass"]
    hand_in(tmp_path, "ann", "dogs", my_rate=rate(*loop))
    (ann,) = hand_ins(tmp_path)
    found = [each for each in marks.answers(tmp_path, "dogs") if not each[0].mark]
    ((row, _, exercise, cells),) = found
    waiting = [(row, ann, replace(exercise, timeout=PATIENCE / 3 - marks.START), cells)]
    (row,) = marks.judge_all(waiting, tmp_path)
    assert (row.mark, row.sentence) == ("did not end", f"it was ended after {PATIENCE / 3:g} s")
    assert not processes_of("4321")


def test_a_folder_without_hand_ins_is_refused_and_stays_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    with pytest.raises(SystemExit, match="has no hand-in. It takes a folder for each student"):
        marks.main()
    assert not list(tmp_path.iterdir())
