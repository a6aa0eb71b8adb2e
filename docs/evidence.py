"""Measured figures come from files, and not from a keyboard.

    python docs/evidence.py take      # take over what `make bench` has left in runs/, and fill
    python docs/evidence.py fill      # write the tables of the pages from docs/evidence/*.json
    python docs/evidence.py check     # is every table what its file says? (in `make lint`)

A page says where a table goes and what is in it; what stands between the two lines is made here:

    <!-- evidence: launch, faults/notice -->
    <!-- end of evidence -->

A part names a file of docs/evidence and, after a stroke, one of its measures. With `by ranks:`,
`by launcher:` or `by tutorial:` before the parts the table has a row for each number of ranks,
each launcher or tutorial, and a column for what was measured. It needs nothing but Python.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "docs" / "evidence"
PAGES = ("README.md", "docs/*.md", "clusters/README.md")
BLOCK = re.compile(r"<!-- evidence: (?P<wanted>[^\n]*?) -->\n.*?<!-- end of evidence -->", re.S)
BY = re.compile(r"by (ranks|launcher|tutorial): ")
ENOUGH_DIGITS = 3


class Wrong(Exception):
    """What is wrong with a page or a file, in one sentence that says what to do."""


# What was measured


def read(name):
    """The file of a benchmark: a dict of `machine` and `results`."""
    path = FILES / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except OSError:
        there = ", ".join(sorted(each.stem for each in FILES.glob("*.json"))) or "none"
        raise Wrong(
            f"There is no docs/evidence/{name}.json (there: {there}). Measure it with make bench, "
            "then python docs/evidence.py take."
        ) from None


def selected(wanted):
    """The files and results that a page asks for, such as `launch, faults/notice`."""
    files, results = {}, []
    for part in wanted.split(", "):
        name, _, measure = part.partition("/")
        files[name] = read(name)
        found = [each for each in files[name]["results"] if measure in ("", each["name"])]
        if not found:
            raise Wrong(f"docs/evidence/{name}.json has no measure {measure!r}.")
        results += found
    return files, results


# Tables


def number(value):
    """A figure as a person would say it: three digits, and words as they are."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 10**ENOUGH_DIGITS:
        return f"{round(value):,}"
    return f"{value:.{ENOUGH_DIGITS}g}"


def table(results):
    lines = ["| | here | alternative | ratio | goal |", "|---|---|---|---|---|"]
    for result in results:
        alternative = ratio = ""
        if result["alternative"]:
            alternative = f"{result['alternative']}: {number(result['other'])}"
            ratio = number(result["ratio"])
            if result["quartiles"]:
                low, high = map(number, result["quartiles"])
                ratio += f" ({low} to {high})"
        cells = [result["what"], number(result["ours"]), alternative, ratio, _goal(result)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _goal(result):
    if not result["goal"]:
        return ""
    sign, limit = result["goal"].split()
    words = {">=": "at least", "<=": "at most"}[sign]
    return f"{words} {limit}: {'met' if result['met'] else '**missed**'}"


def table_by(row, results):
    """A row for each word before the colon, of results such as `8: launch returns, s`."""
    rows, columns = {}, []
    for result in results:
        name, found, what = result["what"].partition(": ")
        if found:
            rows.setdefault(name, {})[what] = number(result["ours"])
            columns += [what] if what not in columns else []
    lines = [f"| {row} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in rows.items():
        lines.append(f"| {name} | {' | '.join(cells.get(what, '') for what in columns)} |")
    return lines


def filled(text, page):
    """The text of a page with its tables as the files have them."""

    def block(match):
        wanted = match["wanted"]
        by = BY.match(wanted)
        files, results = selected(BY.sub("", wanted, count=1))
        lines = table_by(by[1], results) if by else table(results)
        below = _below(files)
        inside = "\n".join(["", *lines, "", below, ""])
        return f"<!-- evidence: {wanted} -->\n{inside}\n<!-- end of evidence -->"

    opened, closed = text.count("<!-- evidence: "), text.count("<!-- end of evidence -->")
    if opened != closed:
        raise Wrong(
            f"{page} has {opened} lines `<!-- evidence: … -->` and {closed} of "
            "`<!-- end of evidence -->`: each table needs both."
        )
    return BLOCK.sub(block, text)


def _below(files):
    """Where and when it was measured, once for each machine and day."""
    groups = {}
    for name, file in files.items():
        machine = file["machine"]
        where = (
            f"{machine['date'][:10]}, {machine['cores']} cores ({machine['processor']}), "
            f"Python {machine['python']}, torch {machine['torch']}"
        )
        groups.setdefault(where, []).append(f"`{name}` (load {machine['load'][0]:.1f})")
    return (
        "*Measured: "
        + "; ".join(f"{', '.join(names)} on {where}" for where, names in groups.items())
        + ".*"
    )


# The command line


def pages():
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def take(folder):
    """Copy what benchmarks have left in `folder` to docs/evidence; returns the names."""
    FILES.mkdir(exist_ok=True)
    taken = []
    for path in sorted(folder.glob("bench-*.json")):
        name = path.stem.removeprefix("bench-")
        shutil.copyfile(path, FILES / f"{name}.json")
        taken.append(name)
    if not taken:
        raise Wrong(f"{folder} has no bench-*.json. Measure first: make bench.")
    return taken


def outdated():
    """Of each page that has another table than its file gives: its path, and what it should be."""
    for path in pages():
        text = path.read_text()
        new = filled(text, path.relative_to(ROOT))
        if new != text:
            yield path, new


def fill():
    """Write all tables anew; returns the pages that have changed."""
    changed = []
    for path, new in outdated():
        path.write_text(new)
        changed.append(path.relative_to(ROOT))
    return changed


def check():
    """Raise `Wrong` if a page has another table than its file gives."""
    for path, _ in outdated():
        raise Wrong(
            f"A table of {path.relative_to(ROOT)} is not what docs/evidence says: "
            "python docs/evidence.py fill."
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["take", "fill", "check"])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "runs")
    options = parser.parse_args()
    try:
        if options.what == "take":
            print(f"taken: {', '.join(take(options.folder))}")
        if options.what == "check":
            check()
        else:
            print(*(f"filled: {path}" for path in fill()), sep="\n")
    except Wrong as wrong:
        sys.exit(str(wrong))


if __name__ == "__main__":
    main()
