"""The minutes of a lesson by a strict clock, section by section, and its size.

The clock is that of somebody who reads a foreign language and each line of code: so many words a
minute, so many seconds for a line and for a cell. What is done besides stands in a tag of its
cell: `minutes-28` for an exercise of 28 minutes. It looks at a student's copy, where an exercise
is still a gap. What is folded (`<details>`) and a section called 'If you have time' take no time.

`docs/instructors.md` shows these numbers; `tutorials/sync.py` writes them there.
"""

import ast
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

WORDS_A_MINUTE = 150
SECONDS_A_LINE = 8
SECONDS_A_CELL = 9
OPTIONAL = "if you have time"
COMMON = "tutorials.checks.common"

FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
QUESTION = re.compile(r"<details>\s*<summary>(?!Hint)")  # or an answer, to a question above it
HEADING = re.compile(r"(?m)^(?=##\s|### Exercise\s)")  # the text is cut before it
EXERCISE = re.compile(r"### Exercise (\w+)")
SECTION = re.compile(r"##\s+(\d*)")


@dataclass
class Section:
    """A section of a lesson, or one of its exercises, without what is folded."""

    number: str  # "6"; "10 A" for the exercise A of section 10; empty before the first
    heading: str
    words: int = 0  # of text
    lines: int = 0  # of code, without empty ones
    cells: int = 0  # of code
    tagged: int = 0  # minutes, by the tags of its cells

    @property
    def minutes(self) -> float:
        """How long it takes; 0 for a section that is done only if there is time."""
        if OPTIONAL in self.heading.lower():
            return 0.0
        seconds = SECONDS_A_LINE * self.lines + SECONDS_A_CELL * self.cells
        return self.words / WORDS_A_MINUTE + seconds / 60 + self.tagged


@dataclass
class Lesson:
    """All sections of a lesson, and what is limited besides their minutes."""

    sections: list[Section] = field(default_factory=list)
    before_own_code: float | None = None  # minutes before the first gap; None: there is none
    acts: list[float] = field(default_factory=list)  # `reading` before each thing to do
    helper_names: set[str] = field(default_factory=set)  # names of this course in its code

    @property
    def minutes(self) -> float:
        """The sum over all sections."""
        return sum(section.minutes for section in self.sections)

    @property
    def reading(self) -> float:
        """The minutes without what is done besides."""
        return self.minutes - self.total("tagged")

    @property
    def longest_without_doing(self) -> float:
        """Minutes of reading from one tagged cell or folded question to the next, at most."""
        ends = [0.0, *self.acts, self.reading]
        return max(end - begin for begin, end in pairwise(ends))

    def total(self, what: str) -> int:
        """The sum of `words`, `lines`, `cells` or `tagged`, without optional sections."""
        taken = [each for each in self.sections if OPTIONAL not in each.heading.lower()]
        return sum(getattr(section, what) for section in taken)


def of_lesson(student: Any) -> Lesson:
    """Time and size of a notebook without solutions, a student's copy as nbformat reads it."""
    lesson = Lesson(sections=[Section("", "")])
    code = []
    for cell in student.cells:
        if cell.cell_type == "markdown":
            begin = 0
            for folded in FOLDED.finditer(cell.source):
                _add_text(lesson.sections, cell.source[begin : folded.start()])
                begin = folded.end()
                if QUESTION.match(folded[0]):
                    lesson.acts.append(lesson.reading)
            _add_text(lesson.sections, cell.source[begin:])
            continue
        tags = cell.metadata.get("tags", [])
        if "solution" in tags and lesson.before_own_code is None:
            lesson.before_own_code = lesson.minutes
        if tagged := sum(map(_minutes_in, tags)):
            lesson.acts.append(lesson.reading)
        section = lesson.sections[-1]
        section.cells += 1
        section.lines += sum(bool(line.strip()) for line in cell.source.splitlines())
        section.tagged += tagged
        if OPTIONAL not in section.heading.lower():
            code.append(cell.source)
    lesson.helper_names = _helper_names("\n".join(code))
    return lesson


def _add_text(sections, text):
    """Count words into the last section, and begin another one at each heading."""
    for piece in HEADING.split(text):
        first_line = piece.partition("\n")[0]
        if found := EXERCISE.match(first_line):
            whole = sections[-1].number.partition(" ")[0]
            sections.append(Section(f"{whole} {found[1]}", first_line))
        elif found := SECTION.match(first_line):
            sections.append(Section(found[1], first_line))
        sections[-1].words += sum(any(map(str.isalnum, word)) for word in piece.split())


def _minutes_in(tag):
    found = re.fullmatch(r"minutes-(\d+)", tag)
    return int(found[1]) if found else 0


def _helper_names(code):
    """What the code uses of `tutorials`: `helpers.curve`, `checks.port`.

    Without what all lessons have, `kit` and `tutorials.checks.common`.
    """
    modules: set[str] = set()
    names: set[str] = set()
    nodes = list(ast.walk(ast.parse(code)))
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or node.module in (None, COMMON):
            continue
        if node.module.partition(".")[0] == "tutorials":
            for alias in node.names:
                called = alias.asname or alias.name
                is_module = node.module == "tutorials" or alias.asname is not None
                (modules if is_module else names).add(called)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules - {"kit"}:
                names.add(f"{node.value.id}.{node.attr}")
    return names


def written_into(page: str, name: str, lesson: Lesson) -> str:
    """The page for instructors with the minutes of the lesson `name`.

    They stand in the title (`## mnist, 78 minutes`), in each row of its table (`| 1–3 Question,
    set-up (7) |`) and in plans (`mnist` (78)). A row takes the sections that it names: `4`, `1–3`,
    or `10 A`. Raises ValueError if a section has no row, or a row no section.
    """
    total = round(lesson.minutes)
    title = re.compile(rf"(?m)^## {name}, [\d to]+ minutes$")
    begin = title.search(page)
    if begin is None:
        raise ValueError(f"the page has no heading '## {name}, … minutes'")
    page = title.sub(f"## {name}, {total} minutes", page)
    page = re.sub(rf"`{name}` \([\d to]+\)", f"`{name}` ({total})", page)
    start = page.index(f"## {name}, {total} minutes")
    end = page.find("\n## ", start + 1)
    table, left = page[start : end if end > 0 else None], list(lesson.sections)
    row = re.compile(r"(?m)^\| (\d+)(?:–(\d+))?( [A-Z](?= ))? (.*?) \(\d+\) \|")
    known = {section.number for section in lesson.sections}

    def with_minutes(found):
        first, last, letter, words = found.groups()
        numbers = [str(number) for number in range(int(first), int(last or first) + 1)]
        if letter and (letter != " A" or f"{first} A" in known):  # else a title with 'A'
            numbers = [f"{first}{letter}"]
        taken = [section for section in left if section.number in numbers]
        if not taken:
            raise ValueError(f"{name} has no section for the row of {', '.join(numbers)}")
        for section in taken:
            left.remove(section)
        minutes = round(sum(section.minutes for section in taken))
        until = f"–{last}" if last else ""
        return f"| {first}{until}{letter or ''} {words} ({minutes}) |"

    table = row.sub(with_minutes, table)
    if missing := [section.number for section in left if section.minutes >= 0.5]:
        raise ValueError(f"the table of {name} has no row for the sections {', '.join(missing)}")
    return page[:start] + table + (page[end:] if end > 0 else "")
