"""Pictures for all readers: words beside each, large letters, contrast, nothing by colour alone.

Each picture of the lessons, of `make scaling` and of `make study` is drawn here from a few
numbers, and what matplotlib was told to draw is measured. Contrasts are those of WCAG 2: 4.5:1 for
text, 3:1 for lines and bars.
"""

import importlib.util
import itertools
import json
import re
import types
from collections import Counter
from pathlib import Path

import dogs_study  # this and the next ones in tutorials/
import flights_tables
import gpt_steps
import helpers
import matplotlib
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import scaling
import study
import sync
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

ROOT = Path(__file__).parents[2]
TEXT, SHAPE = 4.5, 3.0  # least contrast with what is behind
POINTS = 9  # least size of a letter


def luminance(colour):
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(colour)
    ]
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def contrast(colour, other="white"):
    darker, brighter = sorted(map(luminance, (colour, other)))
    return (brighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast("black") == pytest.approx(21)
    assert contrast("#767676") == pytest.approx(4.54, abs=0.01)  # the grey that just suffices


def behind(text):
    """The colour behind a letter: of the image that it stands on, or white."""
    if text.axes is None or not text.axes.images or text not in text.axes.texts:
        return "white"
    (image,) = text.axes.images
    column, row = text.get_position()
    return image.to_rgba(image.get_array())[row, column, :3]


def faults(figure):
    """What is too small, too faint, or told apart by its colour alone in a figure."""
    figure.canvas.draw()
    for text in figure.findobj(Text):
        if not (text.get_text().strip() and text.get_visible()):
            continue
        if text.get_fontsize() < POINTS:
            yield f"{text.get_text()!r} has {text.get_fontsize()} points"
        if contrast(text.get_color(), behind(text)) < TEXT:
            yield f"{text.get_text()!r} is faint"
    for axes in figure.axes:
        yield from faults_of_lines(axes)
        yield from faults_of_bars(axes)


def faults_of_lines(axes):
    named = {}
    for line in axes.lines:
        if contrast(line.get_color()) < SHAPE or line.get_alpha() not in (None, 1):
            yield f"line {line.get_label()!r} is faint"
        if not line.get_label().startswith("_"):
            look = (str(line.get_linestyle()), line.get_marker(), line.get_linewidth())
            named[line.get_label()] = (look, line._dash_pattern)
    for container in axes.containers:  # error bars: their lines have no labels of their own
        if isinstance(container, matplotlib.container.ErrorbarContainer):
            line = container.lines[0]
            named[container.get_label()] = (line.get_marker(), line._dash_pattern)
    yield from the_same("lines", named)


def faults_of_bars(axes):
    by_colour = {}
    for bar in axes.patches:
        if contrast(bar.get_facecolor()) < SHAPE and contrast(bar.get_edgecolor()) < SHAPE:
            yield f"a bar of {to_hex(bar.get_facecolor())} is faint"
        by_colour[to_hex(bar.get_facecolor())] = bar.get_hatch() or "plain"
    yield from the_same("bars", by_colour)


def the_same(what, looks):
    for (one, look), (other, another) in itertools.combinations(looks.items(), 2):
        if look == another:
            yield f"{what} {one!r} and {other!r} differ in their colour alone"


def spans(*names):
    return [(name, place, place + 1) for place, name in enumerate(names)]


def digits():
    return helpers.pictures(np.ones((4, 8, 8)), titles=["a", "b", "c", "d"])


def curve():
    return helpers.curve(pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0]}))


def live_loss():
    watch = helpers.LiveLoss()
    watch.line.set_data([1, 2], [2.0, 1.0])
    return watch.figure


def matrix():
    """Every count that a cell can have: the letters in it stand on every blue."""
    return helpers.matrix(np.arange(100).reshape(10, 10), [str(each) for each in range(10)])


def lines_of_digits():
    return helpers.lines_of_digits({"true": torch.ones(12, 784), "drawn": torch.ones(12, 784)})


def killed_and_resumed(tmp_path, monkeypatch):
    rows = [{"step": step, "restart": step // 70, "loss": 1.0} for step in range(60, 80)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "log.txt").write_text("Resumed from step-000065")

    shown = []
    monkeypatch.setattr(helpers, "show", lambda *figure_and_alt: shown.append(figure_and_alt))
    table = pd.DataFrame(rows)
    helpers.show_twice(table, table, tmp_path, killed_at=68)
    return shown[0]


class Photos:
    """Two of each of ten breeds, as an ImageFolder gives them."""

    classes = [f"breed_{letter}" for letter in "abcdefghij"]
    targets = [number // 2 for number in range(20)]

    def __getitem__(self, row):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), self.targets[row]


def breeds():
    return dogs_study.draw_breeds(Photos())[0]


def rates():
    rows = itertools.product((0, 1), (8, 32, 128, 512), (0.1, 0.2))
    table = pd.DataFrame(rows, columns=["seed", "batch", "rate"])
    return dogs_study.draw_study(table.assign(chosen_by=1.0, judged=0.9))[0]


def epochs():
    return dogs_study.draw_epochs({f"batch {size}": [[1.0, 2.0]] * 2 for size in range(6)})[0]


def many_epochs():
    lines = {"batch 8": [[2.0] * 80] * 3, "batch 128": [[1.0] * 80] * 3}
    return dogs_study.draw_epochs(lines, label="judged accuracy (%)")[0]


def one_run():
    return dogs_study.draw_epochs({"all ranks": [[0.1, 0.1, 0.01]]})[0]


def original():
    return dogs_study.draw_original()[0]


def batches():
    places = [np.linspace(0, 1, 20), np.linspace(0, 1, 30)]
    return flights_tables.batches_picture([20, 30], places, batch_size=16)


def trace():
    rank = types.SimpleNamespace(spans=spans(*gpt_steps.BARS))
    return gpt_steps.picture({"a step": [rank, rank]})


def program(path):
    """A program of the site, which is in no package, as a module."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def a_step():
    module = program(ROOT / "docs" / "pictures" / "draw_step.py")
    figure, axes = plt.subplots()
    module.draw(axes, "DDP", [spans(*module.BARS), spans(*module.BARS, "gradient ready")])
    return figure


def more_ranks():
    columns = {"samples": [1, 2], "seconds": [1.0, 2.0], "loss": [2.0, 1.0]}
    frames = {ranks: pd.DataFrame(columns) for ranks in (1, 2, 4, 8)}
    table = pd.DataFrame({"samples/s": 1.0, "slowest": 0.5, "fastest": 1.5}, index=list(frames))
    return scaling.draw("pets", frames, table)


def article_and_fair():
    columns = dict.fromkeys(["step", "samples", *study.PANELS], [1, 2])
    runs = {}
    for design, ranks in itertools.product(("article", "fair"), (1, 2, 4)):
        run = study.Training(design, ranks, 8 * ranks, 0.1, ROOT)
        runs[f"{design} {ranks}"] = (run, pd.DataFrame(columns))
    return study.draw(runs, "step", "a title")


DRAWN = [digits, curve, live_loss, matrix, lines_of_digits, breeds, rates, epochs, original]
DRAWN += [many_epochs, one_run, batches, trace, a_step, more_ranks, article_and_fair]


@pytest.fixture(autouse=True)
def without_a_screen():
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_a_picture_is_readable_and_needs_no_colour(draw):
    assert list(faults(draw())) == []


def test_so_is_the_picture_of_a_run_that_was_killed(tmp_path, monkeypatch):
    figure, alt = killed_and_resumed(tmp_path, monkeypatch)
    assert list(faults(figure)) == []
    finding = "Steps 66 to 68 are done twice, with the same loss each time"
    assert figure.get_suptitle() == finding and finding in alt
    for axes in figure.axes:
        (marked,) = [line for line in axes.lines if line.get_label() == "done twice"]
        assert list(marked.get_xdata()) == [66, 67, 68]


def test_the_title_of_a_picture_says_what_it_shows():
    assert many_epochs().axes[0].get_title() == (
        "batch 128 minus batch 8: -1.0 points after 5 epochs, -1.0 after 80"
    )
    assert one_run().axes[0].get_title() == "Times that the rate falls: 1"
    assert one_run().axes[0].get_legend() is None
    assert "does not always have a larger" in rates().axes[0].get_title()


def test_the_title_of_a_confusion_matrix_names_the_largest_of_its_framed_mistakes():
    counts = torch.tensor([[9, 1, 0], [3, 7, 0], [2, 0, 8]])
    figure = helpers.matrix(counts, ["a", "b", "c"])
    assert figure.get_suptitle() == "Confused most often: b taken for a, 3 of 10"
    assert [frame.get_xy() for frame in figure.axes[0].patches] == [
        (-0.5, 0.5),
        (-0.5, 1.5),
        (0.5, -0.5),
    ]
    assert not helpers.matrix(torch.eye(3, dtype=torch.long), ["a", "b", "c"]).axes[0].patches


def test_what_only_colour_tells_apart_or_is_faint_or_small_is_found():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], label="one", color="tab:orange")
    axes.plot([2, 1], label="two", color="tab:blue")
    axes.bar([1, 2], [1, 2], color=["tab:blue", "tab:red"])
    axes.set_title("small", fontsize=6, color="silver")
    found = Counter(fault.rpartition(" ")[2] for fault in faults(figure))
    assert found == {"faint": 2, "points": 1, "alone": 2}


def test_every_picture_of_a_notebook_has_words_for_those_who_cannot_see_it():
    pictures = 0
    for path in sync.HERE.glob("*.ipynb"):
        for cell in nbformat.read(path, 4).cells:
            for output in cell.get("outputs", []):
                for kind in filter(re.compile("image/").match, output.get("data", {})):
                    alt = output.metadata.get(kind, {}).get("alt", "")
                    assert len(alt.split()) >= 5, f"{path.name}, cell {cell.id}: {alt!r}"
                    pictures += 1
    assert pictures >= 15


def test_the_site_has_these_words_where_its_builder_looks_for_them():
    content = [(sync.HERE / "flights.ipynb").read_text()]
    program(ROOT / "docs" / "conf.py").name_pictures(None, "flights", content)
    found = [cell["metadata"].get("mystnb") for cell in json.loads(content[0])["cells"]]
    (named,) = filter(None, found)
    assert named["image"]["alt"].startswith("Four rows of squares")


def test_every_picture_of_a_page_has_words_for_those_who_cannot_see_it():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("clusters/*.md")]
    words = "".join(path.read_text() for path in pages)
    shown = re.findall(r"!\[(.*?)\]\((.*?)\)", words)
    assert shown and all(len(alt.split()) >= 5 for alt, _ in shown)
    for path in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert re.search(r"<desc id=.*?>[^<]{40,}</desc>", path.read_text()), path.name


@pytest.mark.parametrize("path", [*ROOT.glob("docs/pictures/*.svg")], ids=lambda path: path.stem)
def test_letters_and_arrows_of_a_drawn_page_are_readable(path):
    text = path.read_text()
    letters = re.findall(r"<text [^>]*font-size=\"([\d.]+)\"[^>]*fill=\"(#?\w+)\"", text)
    assert letters or "font:" in text or "font-size" in text
    backgrounds = ["white", *set(re.findall(r"<rect [^>]*fill=\"(#\w+)\"", text))]
    for size, colour in letters:
        assert float(size) >= POINTS * 4 / 3, f"{size} pixels"
        on_white = contrast(colour) >= TEXT
        assert on_white or any(contrast(colour, each) >= TEXT for each in backgrounds), colour
