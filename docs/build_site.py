"""Builds the site: `make docs` runs this file. It needs no network.

What `docs/check_pages.py` looks at is looked at first, so that a broken link, a picture without
words or a notebook that is not executed is one clear line each. Then Sphinx writes
docs/_build/html; each of its warnings is an error. On an error what was there before stays.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import check_pages

ROOT = check_pages.ROOT
SITE = ROOT / "docs" / "_build" / "html"
NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme")


def main():
    found = check_pages.findings()
    if found:
        print(*found, sep="\n", file=sys.stderr)
        sys.exit(f"Error: the site was not built: {len(found)} finding(s), see above.")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"Error: the site needs {', '.join(missing)}, which this environment lacks. "
            "`make docs` installs them; by hand: pip install -c constraints.txt -e '.[docs]'"
        )
    SITE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SITE.parent) as folder:
        new = Path(folder) / "html"
        complaints = build(new, Path(folder) / "doctrees")
        if complaints:
            print(*complaints, sep="\n", file=sys.stderr)
            sys.exit("Error: the site was not built, see above.")
        shutil.rmtree(SITE, ignore_errors=True)
        new.rename(SITE)
    print(f"The site is built: open {SITE / 'index.html'}")


def build(site, doctrees):
    """Let Sphinx write the site; returns a line for each thing that it complains of."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-N"]
    command += ["-c", "docs", "-d", str(doctrees), "-b", "html", ".", str(site)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stderr.replace(f"{ROOT}/", "")
    lines = [line for line in said.splitlines() if re.search(r"WARNING:|ERROR:|[Ee]rror", line)]
    if done.returncode and not lines:
        lines = said.splitlines()[-3:]
    return lines if done.returncode else []


if __name__ == "__main__":
    main()
