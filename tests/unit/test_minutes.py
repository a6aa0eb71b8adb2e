"""The strict clock counts what a student reads and does, and writes the page for instructors."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tutorials.kit import minutes

PAGE = """# For instructors

| half a day | `pets` (82 to 97), a break, `mnist` (5) |

## pets, 82 to 97 minutes

| section (minutes) | ask or reply |
|---|---|
| 1–2 Question, a rule (3) | Why? (17) |
| 3 A simple rule (9) | - |
| 4 A By hand (16) | - |
| 4 B Repair (9) | - |

## mnist, 5 minutes

| 1 Question (4) | - |
"""


def lesson(*cells):
    """A lesson of (markdown) or (code, tags)."""
    made = [
        new_markdown_cell(cell)
        if isinstance(cell, str)
        else new_code_cell(cell[0], metadata={"tags": cell[1]})
        for cell in cells
    ]
    return minutes.of_lesson(new_notebook(cells=made))


def test_words_lines_cells_and_tags_make_the_minutes_of_a_section():
    timed = lesson("## 1. One\n" + "word " * 148, ("a = 1\n\nb = 2", ["lesson"]), "## 2. Two")
    one = timed.sections[1]
    assert (one.number, one.words, one.lines, one.cells) == ("1", 150, 2, 1)
    assert one.minutes == pytest.approx(1 + (2 * 8 + 9) / 60)


def test_an_exercise_is_a_part_of_its_own_and_its_tag_has_its_minutes():
    text = "## 10. Exercises\n### Exercise A · First\nx"
    timed = lesson(text, ("...", ["solution", "minutes-28"]), "### Exercise B · Second")
    assert [part.number for part in timed.sections] == ["", "10", "10 A", "10 B"]
    assert timed.sections[2].tagged == 28


def test_what_is_folded_and_what_is_done_if_there_is_time_take_none():
    folded = "## 1. One\n<details><summary>Why?</summary>\n\n" + "word " * 100 + "</details>"
    optional = "## 2. If you have time: more\n" + "word " * 100
    timed = lesson(folded, optional, ("from tutorials import helpers\nhelpers.late()", []))
    assert timed.minutes == pytest.approx(2 / 150)
    assert (timed.total("words"), timed.total("cells")) == (2, 0)
    assert timed.helper_names == set()


def test_minutes_before_the_first_gap():
    timed = lesson("## 1. One " + "word " * 148, ("a = 1", []), ("...", ["solution", "minutes-5"]))
    assert timed.before_own_code == pytest.approx(1 + 17 / 60)
    assert lesson("## 1. One").before_own_code is None


def test_the_longest_reading_between_two_things_to_do():
    asked = "<details><summary>A question</summary>x</details>"
    hint = "<details>\n<summary>Hint</summary>x</details>"
    text = "## 1. One " + "word " * 448 + asked + " word" * 300 + hint + " word" * 300
    timed = lesson(text, ("mine = None", ["minutes-2"]), "word " * 150)
    assert timed.longest_without_doing == pytest.approx(4)
    assert timed.reading == pytest.approx(8 + 17 / 60)


def test_names_of_the_course_are_counted_once_without_what_all_lessons_have():
    code = """
from tutorials import dogs_study as ready, helpers, kit
from tutorials.checks import pets as checks
from tutorials.checks.common import judge
from tutorials.helpers import show
from torch.nn import functional as F
show(helpers.curve(helpers.curve(ready.photos)), kit.settings(), F.relu, judge(checks.watched))
"""
    names = {"show", "helpers.curve", "ready.photos", "checks.watched"}
    assert lesson((code, [])).helper_names == names


def rewritten(*cells):
    return minutes.written_into(PAGE, "pets", lesson(*cells))


SECTIONS = [
    ("## 1. Question\n" + "word " * 300, ("a", [])),
    ("## 2. A rule", ("a", ["minutes-3"])),
    ("## 3. A simple rule", ("a", ["minutes-4"])),
    ("## 4. Exercises\n### Exercise A", ("...", ["minutes-20"])),
    ("### Exercise B", ("...", ["minutes-10"])),
]
CELLS = [cell for section in SECTIONS for cell in section]


def test_the_page_for_instructors_gets_the_minutes_and_nothing_else_changes():
    page = rewritten(*CELLS)
    for old, new in [
        ("`pets` (82 to 97)", "`pets` (41)"),
        ("## pets, 82 to 97 minutes", "## pets, 41 minutes"),
        ("| 1–2 Question, a rule (3) |", "| 1–2 Question, a rule (6) |"),
        ("| 3 A simple rule (9) |", "| 3 A simple rule (4) |"),
        ("| 4 A By hand (16) |", "| 4 A By hand (20) |"),
        ("| 4 B Repair (9) |", "| 4 B Repair (10) |"),
    ]:
        page = page.replace(new, old)
    assert page == PAGE
    assert minutes.written_into(rewritten(*CELLS), "pets", lesson(*CELLS)) == rewritten(*CELLS)


def test_a_section_without_a_row_and_a_row_without_a_section_are_refused():
    with pytest.raises(ValueError, match="no row for the sections 5"):
        rewritten(*CELLS, "## 5. Recap", ("a", ["minutes-3"]))
    with pytest.raises(ValueError, match="no section for the row of 4 B"):
        rewritten(*CELLS[:-2])
    with pytest.raises(ValueError, match="no heading"):
        minutes.written_into("# For instructors", "pets", lesson(*CELLS))
