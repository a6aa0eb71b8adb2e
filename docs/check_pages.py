"""What must hold before a site is made of the pages: `python docs/check_pages.py`, in `make lint`.

Links from page to page lead somewhere, to the heading too. Every picture has a sentence for
those who cannot see it. Notebooks are executed. Each finding is one line: where, what, and
what to do. It needs nothing but Python, and changes nothing.

    python docs/check_pages.py --outside     # list the links that lead out; they are not followed
"""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = ("clusters", "data", "docs", "tests", "tutorials")
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", flags=re.M | re.S)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", flags=re.S)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(<?([^()\s>]+)>?\)")
IMAGE_TAG = re.compile(r"<img\b[^>]*>", flags=re.I)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", flags=re.M)
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:", flags=re.I)
FEWEST_WORDS = 4  # of a sentence that says what a picture shows


class Text(NamedTuple):
    """Markdown: where it stands, and what it says."""

    path: Path
    place: str  # within the file, for a person
    first_line: int  # 0: lines are not counted
    text: str

    def at(self, position):
        """Where in the repository the character at `position` stands."""
        if not self.first_line:
            return f"{shown(self.path)}, {self.place}"
        return f"{shown(self.path)}:{self.first_line + self.text.count(chr(10), 0, position)}"


def shown(path):
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def pages():
    """The Markdown files of the site, and those that are read beside it."""
    found = [ROOT / name for name in AT_THE_TOP]
    for folder in FOLDERS:
        found += sorted((ROOT / folder).rglob("*.md"))
    apart = {"_build", "my-work", "cache"}
    return [path for path in found if path.exists() and not apart & {*path.parts}]


def notebooks():
    """The tutorials as they were executed."""
    return sorted((ROOT / "tutorials").glob("*.ipynb"))


def read_notebook(path):
    """The cells of a notebook. Raises ValueError if it is none."""
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def texts(path):
    """The pieces of Markdown in a page or a notebook."""
    if path.suffix != ".ipynb":
        return [Text(path, "", 1, path.read_text())]
    return [
        Text(path, f"cell {number}", 0, cell["source"])
        for number, cell in enumerate(read_notebook(path), 1)
        if cell["cell_type"] == "markdown"
    ]


def without_code(text):
    """`text` with blanks for all that is code; every other character stays in its place."""

    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())

    return SPAN.sub(blank, FENCE.sub(blank, text))


def anchors(path):
    """The names by which a link reaches the headings of a page, as GitHub makes them."""
    found = []
    for piece in texts(path):
        bare = FENCE.sub(lambda match: "\n" * match.group().count("\n"), piece.text)
        for heading in HEADING.findall(bare):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found.append(name if name not in found else f"{name}-{found.count(name)}")
    return found


def near(word, words):
    close = difflib.get_close_matches(word, words, n=2, cutoff=0.5)
    return f" Is it {' or '.join(close)}?" if close else ""


def broken_links(path):
    """A line for each link of a page that leads nowhere in the repository."""
    for piece in texts(path):
        for match in LINK.finditer(without_code(piece.text)):
            target = match.group(3)
            if OUTSIDE.match(target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            where = piece.at(match.start())
            if not file.exists():
                siblings = [each.name for each in file.parent.glob("*")]
                yield (
                    f"{where} links to {target}, which is not there."
                    f"{near(file.name, siblings)} Mend the link, or bring the file back."
                )
            elif anchor and file.suffix in (".md", ".ipynb"):
                there = anchors(file)
                if anchor not in there:
                    yield (
                        f"{where} links to {target}, but {shown(file)} has no such heading."
                        f"{near(anchor, there)} Mend the link."
                    )


def is_sentence(words):
    return len(words.split()) >= FEWEST_WORDS and words.strip().endswith((".", "!", "?"))


def why_not(alt):
    """What is wrong with the alt text of a picture; None if it is a sentence."""
    if not (alt or "").strip():
        return "has no alt text"
    if not is_sentence(alt):
        return f"has the alt text {alt!r}, which is no sentence"
    return None


HOW_ON_A_PAGE = "Say what one sees: ![A sentence.](file)."
HOW_IN_A_NOTEBOOK = 'Say what one sees, with show(figure, "A sentence."), and run make sync.'


def pictures_without_words(path):
    """A line for each picture of a page or notebook that has no sentence beside it."""
    for piece in texts(path):
        bare = without_code(piece.text)
        found = [
            (match.start(), match.group(2), match.group(3))
            for match in LINK.finditer(bare)
            if match.group(1)
        ]
        for match in IMAGE_TAG.finditer(bare):
            attributes = dict(re.findall(r'(\w+)="([^"]*)"', match.group()))
            found.append((match.start(), attributes.get("alt"), attributes.get("src")))
        for position, alt, source in found:
            if why_not(alt):
                yield f"{piece.at(position)}: the picture {source} {why_not(alt)}. {HOW_ON_A_PAGE}"
    if path.suffix == ".ipynb":
        for number, cell in enumerate(read_notebook(path), 1):
            for output in cell.get("outputs", []):
                for kind, alt in alt_texts(output):
                    if why_not(alt):
                        yield (
                            f"{shown(path)}, cell {number}: a picture ({kind}) "
                            f"{why_not(alt)}. {HOW_IN_A_NOTEBOOK}"
                        )


def alt_texts(output):
    """(type, alt text or None) of each picture in an output of a cell."""
    for kind in output.get("data", {}):
        if kind.startswith("image/"):
            yield kind, output.get("metadata", {}).get(kind, {}).get("alt")


def why_not_executed(path):
    """A line if a notebook has no outputs to show, or those of an error."""
    name = path.stem
    remedy = f"The site shows stored outputs: run make sync TUTORIAL={name}."
    expected = 0
    for number, cell in enumerate(read_notebook(path), 1):
        if cell["cell_type"] != "code":
            continue
        expected += 1
        if cell.get("execution_count") != expected:
            yield f"{shown(path)} is not executed from top to bottom (cell {number}). {remedy}"
            return
        errors = [out for out in cell["outputs"] if out["output_type"] == "error"]
        if errors:
            what = errors[0].get("ename", "an error")
            yield f"{shown(path)}, cell {number} ended with {what}. {remedy}"
            return


def findings():
    """All that is wrong, a line each."""
    found = []
    checks = [(path, (broken_links, pictures_without_words)) for path in pages()]
    checks += [
        (path, (why_not_executed, broken_links, pictures_without_words)) for path in notebooks()
    ]
    if not notebooks():
        found.append("tutorials/ has no notebook. Write them with make sync.")
    for path, of_this in checks:
        try:
            found += [line for check in of_this for line in check(path)]
        except (ValueError, KeyError, TypeError, OSError) as error:
            found.append(
                f"{shown(path)} cannot be read: {type(error).__name__}: {error}. "
                "Bring it back with git, or write it anew (a notebook: make sync)."
            )
    return found


def outside_links():
    """(address, where) of each link that leads out of the repository."""
    for path in [*pages(), *notebooks()]:
        for piece in texts(path):
            for match in LINK.finditer(without_code(piece.text)):
                if OUTSIDE.match(match.group(3)):
                    yield match.group(3), piece.at(match.start())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--outside", action="store_true", help="list the links that lead out, and end"
    )
    if parser.parse_args().outside:
        for address, where in sorted(outside_links()):
            print(f"{address}  {where}")
        return
    found = findings()
    for line in found:
        print(line, file=sys.stderr)
    if found:
        sys.exit(f"Error: {len(found)} finding(s) in the pages and notebooks. See above.")
    print(f"{len(pages())} pages and {len(notebooks())} notebooks: links and pictures are right")


if __name__ == "__main__":
    main()
