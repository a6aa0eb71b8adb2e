"""Whether the exercises' checks refuse what is wrong and accept what is right: `make mutants`.

Answers are the solution's mutants, and those in `answers/`. `survivors.md` in the folder of the
results has each that was judged wrongly. A mutant that is another way to write the solution is no
hole if the exercise's file explains it under EQUIVALENT. What was judged stays in the folder, and
is judged again only if the check, the lesson or the answer has changed since.
"""

import datetime
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from tests.mutants.judging import HERE, TUTORIALS, Answer, answers_to
from tutorials import hand_ins
from tutorials.hand_ins import Exercise

RESULTS = HERE.parents[1] / "runs" / "mutants"
PAGE = HERE.parents[1] / "docs" / "instructors.md"
AT_A_TIME = 40  # answers to a process
LESSONS = ("mnist", "pets", "gpt", "ucmerced", "dogs", "flights")


@dataclass
class Judged:
    """An exercise, its answers, and what was said of them: by their keys (mark, sentence)."""

    exercise: Exercise
    answers: list[Answer]
    equivalent: dict[str, str]
    said: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def lesson(self) -> str:
        return self.exercise.lesson

    @property
    def name(self) -> str:
        return self.exercise.name

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.lesson}-{self.name}.jsonl"

    def digests(self) -> dict[str, str]:
        """For each answer a digest of it and of all that judges it."""
        names = [self.lesson, "common"]
        if self.name == "my_port":
            names += ["as_rank", "simulated_gpus"]
        judges = [TUTORIALS / "checks" / f"{name}.py" for name in names]
        cells = [*self.exercise.context, self.exercise.judge]
        base = hashlib.sha256("\n".join(cells).encode())
        for path in judges:
            base.update(path.read_bytes())
        of_answers = (HERE / "answers" / f"{self.lesson}_{self.name}.py").read_bytes()
        found = {}
        for each in self.answers:
            whole = base.copy()
            whole.update(of_answers if callable(each.what) else each.what.encode())
            found[each.key] = whole.hexdigest()[:16]
        return found

    def wrongly(self) -> list[tuple[Answer, str]]:
        """Answers that were judged wrongly, and why."""
        found = []
        for each in self.answers:
            mark, said = self.said[each.key]
            if each.is_right and mark != "right":
                found.append((each, f"refused: {said}"))
            elif not each.is_right and mark == "right" and each.key not in self.equivalent:
                found.append((each, "accepted"))
            elif not each.is_right and not re.search(each.asks, said):
                found.append((each, f"not asked {each.asks!r}: {said}"))
        return found


def judge(lesson: str, wanted: list[tuple[Judged, Answer]]) -> Iterator[tuple[Judged, str]]:
    """Judge answers of one lesson, and yield the exercise and the key of each that is done."""
    left = {(judged.name, each.key): judged for judged, each in wanted}
    while left:
        some = list(left)[:AT_A_TIME]
        command = [sys.executable, "-m", "tests.mutants.judging", lesson, *sum(some, ())]
        # Dask fixes the seed of hashes in its workers, and may leave that to this process
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        variables |= {"WORKERS": "3", "DDP_PROGRESS": "off", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command,
                cwd=HERE.parents[1],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdout
            before, ready = len(left), set()
            for line in process.stdout:
                name, *rest = json.loads(line)
                ready.add(name)
                if rest:
                    key, mark, said = rest
                    judged = left.pop((name, key))
                    judged.said[key] = mark, said
                    yield judged, key
            process.wait()
            if some[0][0] not in ready:
                errors.seek(0)
                raise RuntimeError(f"{lesson}'s cells do not run: {errors.read()[-2000:]}")
        if len(left) == before:  # it has ended with the first
            judged = left.pop(some[0])
            judged.said[some[0][1]] = "did not end", "the process of the notebook has ended"
            yield judged, some[0][1]


def exercises() -> list[Judged]:
    """All exercises with their answers; of functions, without the lesson's names."""
    found = [each for lesson in LESSONS for each in hand_ins.exercises(lesson)]
    return [Judged(each, *answers_to(each.lesson, each.name, {})) for each in found]


def earlier(judged: Judged) -> None:
    """Take what was said before of answers that are still the same."""
    digests = judged.digests()
    if judged.file.exists():
        for line in judged.file.read_text().splitlines():
            key, digest, mark, said = json.loads(line)
            if digests.get(key) == digest:
                judged.said[key] = mark, said


def judge_all(all_of_them: list[Judged]) -> None:
    """Judge what is not judged yet: two exercises at a time, then those that measure time."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for each in all_of_them:
        earlier(each)
    missing = sum(len(each.answers) - len(each.said) for each in all_of_them)
    bar = tqdm(total=missing, unit=" answers", disable=None)
    lock, failed = threading.Lock(), []

    def work(waiting):
        try:
            while True:
                judged = waiting.get_nowait()
                digests = judged.digests()
                wanted = [(judged, each) for each in judged.answers if each.key not in judged.said]
                for _, key in judge(judged.lesson, wanted):
                    record = [key, digests[key], *judged.said[key]]
                    with lock, judged.file.open("a") as file:
                        print(json.dumps(record), file=file)
                        bar.update()
        except queue.Empty:
            return
        except Exception as error:  # told by the main thread, when all have ended
            failed.append(error)

    for is_timed, at_once in ((False, 2), (True, 1)):
        waiting: queue.Queue = queue.Queue()
        for each in all_of_them:
            if each.exercise.timed == is_timed:
                waiting.put(each)
        threads = [threading.Thread(target=work, args=[waiting]) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    bar.close()
    if failed:
        raise failed[0]


def table(all_of_them: list[Judged]) -> str:
    """The table of the page: one row for each exercise."""
    lines = [
        "| exercise | wrong answers | refused | equivalent | holes | right answers | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    sums = [0] * 6
    for judged in all_of_them:
        wrong = [each for each in judged.answers if not each.is_right]
        right = [each for each in judged.answers if each.is_right]
        accepted = [each.key for each in wrong if judged.said[each.key][0] == "right"]
        same = [key for key in accepted if key in judged.equivalent]
        refused = sum(judged.said[each.key][0] != "right" for each in right)
        numbers = [len(wrong), len(wrong) - len(accepted), len(same), len(accepted) - len(same)]
        numbers += [len(right), refused]
        sums = [one + other for one, other in zip(sums, numbers)]
        lines.append(f"| {judged.lesson} `{judged.name}` | {' | '.join(map(str, numbers))} |")
    lines.append(f"| **all** | {' | '.join(f'**{number}**' for number in sums)} |")
    today = datetime.date.today().isoformat()
    return "\n".join([*lines, "", f"(`make mutants`, {today}, checks {digest_of_checks()})"])


def digest_of_checks() -> str:
    """A short name for the content of all checks: the table is that of these, and no others."""
    files = sorted((TUTORIALS / "checks").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def write_page(text: str) -> None:
    """Put the table where the page has it, between two comments."""
    page = PAGE.read_text()
    begin, end = "<!-- mutants -->\n", "<!-- end of mutants -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}{text}\n{end}{after}")


def main() -> None:
    """Judge all, write the table and what survived; the exit code is 1 if there is a hole."""
    all_of_them = exercises()
    only = os.environ.get("TUTORIAL")
    chosen = [each for each in all_of_them if not only or each.lesson == only]
    judge_all(chosen)
    told = []
    for judged in chosen:
        for each, why in judged.wrongly():
            text = each.what if isinstance(each.what, str) else f"({each.key}, in answers/)"
            about = f"## {judged.lesson} {judged.name}: {each.key}\n\n{why}"
            told.append(f"{about}\n\n```python\n{text}\n```\n")
    (RESULTS / "survivors.md").write_text("\n".join(told))
    print(table(chosen))
    if not only:
        write_page(table(chosen))
    if told:
        sys.exit(f"{len(told)} answers were judged wrongly: {RESULTS / 'survivors.md'}")


if __name__ == "__main__":
    main()
