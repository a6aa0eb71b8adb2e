"""The site: what its pages must have, what is said of bad input, and how it looks in a browser.

What needs Sphinx is skipped where `make docs` has not installed it, what needs a browser where
there is none.
"""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import check_pages  # in docs/
import draw_launch  # in docs/pictures/
import pytest

import ddp_common as ddp
from ddp_common import messages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [*check_pages.pages(), *check_pages.notebooks()]


def names(paths):
    return [path.relative_to(ROOT).as_posix() for path in paths]


# What pages and notebooks must have


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_every_link_within_the_repository_leads_somewhere(path):
    assert list(check_pages.broken_links(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_every_picture_has_a_sentence_for_those_who_cannot_see_it(path):
    assert list(check_pages.pictures_without_words(path)) == []


@pytest.mark.parametrize("path", check_pages.notebooks(), ids=names(check_pages.notebooks()))
def test_every_notebook_is_executed(path):
    assert list(check_pages.why_not_executed(path)) == []


PNG = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo="}, "metadata": {}}


def notebook(*outputs, count=1, source="1 + 1"):
    cell = {
        "cell_type": "code",
        "source": [source],
        "outputs": list(outputs),
        "execution_count": count,
        "metadata": {},
    }
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def with_alt(alt):
    return {**PNG, "metadata": {"image/png": {"alt": alt}}}


BAD_PAGES = {
    "a link to nothing": ("[there](gone.md)", "page.md:1 links to gone.md, which is not there"),
    "a heading that is not there": ("# Some\n\n[up](#sone)", "no such heading. Is it some?"),
    "one on another page": ("[x](other.md#thing)", "other.md has no such heading"),
    "a picture without words": ("\n![](p.png)", "page.md:2: the picture p.png has no alt text"),
    "a picture with a word": ("![a map](p.png)", "'a map', which is no sentence"),
    "a tag without words": ('<img src="p.png">', "the picture p.png has no alt text"),
}
BAD_NOTEBOOKS = {
    "not executed": (notebook(count=None), "is not executed from top to bottom (cell 1)"),
    "out of order": (notebook(count=2), "is not executed from top to bottom (cell 1)"),
    "an error": (
        notebook({"output_type": "error", "ename": "KeyError"}),
        "cell 1 ended with KeyError",
    ),
    "a picture without words": (notebook(PNG), "cell 1: a picture (image/png) has no alt text"),
    "a picture with a word": (notebook(with_alt("loss")), "'loss', which is no sentence"),
}


def complaints(folder, name, text, *checks):
    (folder / "p.png").write_bytes(b"")
    (folder / "other.md").write_text("# Other\n")
    page = folder / name
    page.write_text(text)
    return [line for check in checks for line in check(page)]


@pytest.mark.parametrize("kind", BAD_PAGES)
def test_what_is_wrong_on_a_page_is_one_line_that_says_where(kind, tmp_path):
    text, said = BAD_PAGES[kind]
    checks = (check_pages.broken_links, check_pages.pictures_without_words)
    (line,) = complaints(tmp_path, "page.md", text, *checks)
    assert said in line and line.endswith(".") and "\n" not in line


@pytest.mark.parametrize("kind", BAD_NOTEBOOKS)
def test_what_is_wrong_in_a_notebook_is_one_line_that_says_what_to_do(kind, tmp_path):
    text, said = BAD_NOTEBOOKS[kind]
    checks = (check_pages.why_not_executed, check_pages.pictures_without_words)
    (line,) = complaints(tmp_path, "page.ipynb", text, *checks)
    assert said in line and "make sync" in line


RIGHT = (
    "# One\n\n## One\n\n[a](#one-1) [b](other.md#other) [c](https://example.org/x)\n"
    "![Two boxes, and an arrow between them.](p.png)\n\n"
    "`[no](link.md)`\n\n```md\n[no](link.md)\n# no heading\n```\n"
)


def test_a_page_that_is_right_gives_no_line(tmp_path):
    checks = (check_pages.broken_links, check_pages.pictures_without_words)
    assert complaints(tmp_path, "page.md", RIGHT, *checks) == []
    executed = notebook(with_alt("A curve falls from left to right."))
    checks += (check_pages.why_not_executed,)
    assert complaints(tmp_path, "page.ipynb", executed, *checks) == []


@pytest.fixture
def copy(tmp_path):
    """A copy of what the site is made of."""
    folder = tmp_path / "repository"
    for path in [*SOURCES, *DOCS.rglob("*.py"), *DOCS.rglob("*.svg"), *DOCS.rglob("*.png")]:
        if "_build" not in path.parts:
            place = folder / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    return folder


def spoil(text_of, old, new):
    assert old in text_of.read_text(), old
    text_of.write_text(text_of.read_text().replace(old, new, 1))


def break_a_link(folder):
    spoil(folder / "docs" / "index.md", "(course.md)", "(curse.md)")


def forget_an_alt_text(folder):
    page = folder / "docs" / "how-a-launch-works.md"
    page.write_text(re.sub(r"!\[[^\]]*\]", "![]", page.read_text()))


def do_not_execute(folder):
    spoil(folder / "tutorials" / "pets.ipynb", '"execution_count": 1', '"execution_count": null')


def cut_a_notebook(folder):
    path = folder / "tutorials" / "mnist.ipynb"
    path.write_text(path.read_text()[:5_000])


SPOILT = {
    break_a_link: "links to curse.md, which is not there. Is it course.md",
    forget_an_alt_text: "the picture pictures/a-launch.svg has no alt text",
    do_not_execute: "tutorials/pets.ipynb is not executed from top to bottom (cell 4)",
    cut_a_notebook: "tutorials/mnist.ipynb cannot be read",
}


@pytest.mark.parametrize("spoiling", SPOILT, ids=lambda each: each.__name__)
def test_make_docs_says_what_is_wrong_and_builds_nothing(spoiling, copy):
    spoiling(copy)
    done = subprocess.run(
        [sys.executable, copy / "docs" / "build_site.py"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert sum(SPOILT[spoiling] in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert "the site was not built" in done.stderr and "Traceback" not in done.stderr
    assert not (copy / "docs" / "_build").exists()


def test_links_that_lead_out_are_listed_and_not_followed():
    done = subprocess.run(
        [sys.executable, DOCS / "check_pages.py", "--outside"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 10 and all(re.match(r"\w+:\S+  \S+", line) for line in lines)


# The reference, and the picture of a launch


def test_the_reference_has_every_public_name_once():
    page = (DOCS / "reference" / "names.md").read_text()
    documented = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", page, flags=re.M)
    assert sorted(documented) == sorted(ddp.__all__)


def test_the_picture_of_a_launch_is_what_its_program_draws():
    assert draw_launch.FILE.read_text() == draw_launch.drawing()


def test_the_messages_in_the_picture_of_a_launch_are_those_that_are_sent():
    words = " ".join(words for *_, words in draw_launch.STEPS)
    page = (DOCS / "how-a-launch-works.md").read_text()
    for name in ("RankSpec", "Report", "Done", "Ended"):
        assert name in words and name in page and hasattr(messages, name)


def test_the_words_of_the_picture_stay_within_it():
    """A character of 13 points is at most 7.5 wide on average, in the fonts of browsers."""
    columns = draw_launch.COLUMNS
    for _, sender, receiver, words in draw_launch.STEPS:
        distance = abs(columns[sender] - columns[receiver]) or draw_launch.WIDTH / 3
        assert len(words) * 7.5 <= distance + 8, words


def test_the_page_on_a_runs_files_names_all_that_a_run_leaves(client, tmp_path):
    def train():
        sampler = ddp.ElasticSampler(8, batch_size=4)
        checkpoint = ddp.Checkpoint(sampler=sampler)
        for epoch in sampler.epochs(1):
            for rows in sampler:
                ddp.report(loss=1.0)
            checkpoint.save()

    run = ddp.launch(client, train, workers=2, directory=tmp_path / "run")
    page = (DOCS / "reference" / "run-directory.md").read_text()
    files = {path.relative_to(run.directory).as_posix() for path in run.directory.rglob("*.*")}
    for name in files:
        assert re.sub(r"\d{8}", "00000120", name) in page, name
    assert {"config.json", "metrics.jsonl", "log.txt"} < files
    for key in [*json.loads((run.directory / "config.json").read_text()), *run.records[0]]:
        assert f"`{key}`" in page or key == "loss", key


# The site itself


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site: that of `make docs` if nothing has changed since, else built anew."""
    pytest.importorskip("sphinx_book_theme", reason="`make docs` installs what the site needs")
    import build_site

    built = build_site.SITE / "index.html"
    sources = [*SOURCES, *DOCS.glob("*.py"), *(DOCS / "static").iterdir()]
    sources += (ROOT / "ddp_common").rglob("*.py")
    if built.exists() and all(each.stat().st_mtime < built.stat().st_mtime for each in sources):
        return build_site.SITE
    folder = tmp_path_factory.mktemp("site")
    assert build_site.build(folder / "html", folder / "doctrees") == []
    return folder / "html"


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], text
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def read(site, page):
    return Page((site / page).read_text())


def pages_of(site):
    found = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return [path.relative_to(site).as_posix() for path in found]


def test_every_page_shows_its_pictures_with_words_and_loads_nothing_from_elsewhere(site):
    for name in pages_of(site):
        for tag, has in read(site, name).tags:
            if tag == "img":
                assert check_pages.is_sentence(has.get("alt") or ""), (name, has.get("src"))
            if tag in ("img", "script", "iframe", "source"):
                assert "//" not in (has.get("src") or ""), (name, has)
            if tag == "link" and has.get("rel") != "canonical":
                assert "//" not in has["href"], (name, has)


def test_every_link_of_the_site_leads_to_a_page_that_is_there(site):
    for name in pages_of(site):
        for tag, has in read(site, name).tags:
            target = (has.get("href") or "").partition("#")[0]
            if tag == "a" and target and not check_pages.OUTSIDE.match(target):
                assert ((site / name).parent / target).exists(), (name, target)


def test_the_first_page_is_found_at_the_address_of_the_site(site):
    assert 'url=docs/index.html"' in (site / "index.html").read_text()
    assert "Start here" in (site / "docs" / "index.html").read_text()


@pytest.mark.parametrize("name", [path.stem for path in check_pages.notebooks()])
def test_a_notebooks_page_can_be_downloaded_and_keeps_the_instructors_notes_apart(site, name):
    page = read(site, f"tutorials/{name}.html")
    offered = [has["href"] for tag, has in page.tags if "download" in has]
    original = (ROOT / "tutorials" / f"{name}.ipynb").read_bytes()
    copy = (ROOT / "tutorials" / "student" / f"{name}.ipynb").read_bytes()
    found = [(site / "tutorials" / href).read_bytes() for href in offered]
    assert found == [original, copy]
    assert "<strong>Instructor" not in page.text
    assert "<strong>Instructor" in (site / "docs" / "instructors.html").read_text()
    cells = check_pages.read_notebook(ROOT / "tutorials" / f"{name}.ipynb")
    solutions = sum("solution" in cell["metadata"].get("tags", []) for cell in cells)
    assert page.text.count("Show the solution") == solutions


def test_public_names_have_their_signature_their_words_and_their_source(site):
    page = read(site, "docs/reference/names.html")
    places = {has.get("id") for _, has in page.tags}
    assert {f"ddp_common.{name}" for name in ddp.__all__} <= places
    sources = [has["href"] for tag, has in page.tags if "/files/" in (has.get("href") or "")]
    assert len(sources) >= len(ddp.__all__)
    for href in sources:
        file, _, line = href.partition("#")
        shown = ((site / "docs" / "reference") / file).resolve()
        assert f'id="{line}"' in shown.read_text(), href


def test_the_settings_of_every_tutorial_are_listed_with_their_defaults(site):
    text = re.sub(r"<[^>]+>", "", (site / "docs" / "reference" / "settings.html").read_text())
    for path in check_pages.notebooks():
        script = path.with_suffix(".py").read_text()
        call = script.partition("ddp.settings(")[2].partition("\n)")[0]
        for key in re.findall(r"^    (\w+)=", call, flags=re.M):
            assert key in text or key in ("presets", "limits"), (path.name, key)


# In a browser

LOOKED_AT = (
    "docs/index.html",
    "docs/course.html",
    "docs/faults.html",
    "docs/how-a-launch-works.html",
    "docs/reference/names.html",
    "files/ddp_common/client/launch.py.html",
    "tutorials/mnist.html",
)


@pytest.fixture(scope="module")
def page(site):
    """A page of a browser. It shows the site wherever that lies."""
    import site_in_browser

    try:
        with site_in_browser.browser(site) as page:
            yield page
    except site_in_browser.NotHere as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_no_page_is_wider_than_a_narrow_window_or_asks_the_network_for_anything(page, site):
    names = [name for name in pages_of(site) if not name.startswith(("files/", "index."))]
    for name in names:
        page.open(name, width=400)
        assert page.overflow() <= 0, f"{name} is {page.overflow()} pixels too wide"
    assert page.asked_outside == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(page, dark):
    import site_in_browser

    try:
        source = site_in_browser.axe()
    except site_in_browser.NotHere as missing:
        pytest.skip(str(missing))
    for name in LOOKED_AT:
        page.open(name, width=400 if dark else 1280, dark=dark)
        found = [each for each in page.findings(source) if each[1] in ("serious", "critical")]
        assert not found, (name, found)


@pytest.mark.slow
def test_axe_would_find_something(page):
    import site_in_browser

    try:
        source = site_in_browser.axe()
    except site_in_browser.NotHere as missing:
        pytest.skip(str(missing))
    page.open("docs/index.html")
    page.evaluate("document.querySelector('article h1').style.color = '#eeeeee'; null")
    assert ("color-contrast", "serious") in [each[:2] for each in page.findings(source)]
    page.evaluate("document.body.style.width = '3000px'; null")
    assert page.overflow() > 0


# The container


def test_the_dockerfile_is_linted_and_its_programs_run_as_nobody_special():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM \S+:\S+@sha256:[0-9a-f]{64} AS base$", text, flags=re.M)
    assert re.findall(r"^USER (\S+)", text, flags=re.M) == ["1000"]
    linter = shutil.which("hadolint") or Path(sys.executable).parent / "hadolint"
    if not Path(linter).exists():
        pytest.skip("hadolint is not here; `make docs` installs it")
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_the_devcontainer_names_a_stage_and_a_target_that_are_there():
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    stages = re.findall(r" AS (\w+)$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    assert settings["build"]["target"] in stages
    command = settings["postCreateCommand"].removeprefix("make ")
    assert f"\n{command}: " in (ROOT / "Makefile").read_text()
