"""The licences of all that the package needs: `python docs/licences.py` writes docs/licences.md.

The list is made by pip-licenses (extra `release`), of what is installed and needed to run, with
what that needs in turn. Tools for tests and the site are left out: nobody gets them with us.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).with_name("licences.md")
HEAD = """# Licences of what is installed

What `make setup` installs because training needs it, with the licence that each package declares.
Made by [pip-licenses](https://pypi.org/project/pip-licenses/) with `python docs/licences.py`, in
the versions of `constraints.txt`; `UNKNOWN` stands where a package declares none. Wheels of torch
for GPUs bring libraries of NVIDIA, under terms of its own. Data have theirs:
[data/README.md](../data/README.md).

"""


def needed(package, found=None):
    """The names of a package and of all that it needs where this runs."""
    found = set() if found is None else found
    name = canonicalize_name(package)
    if name in found:
        return found
    found.add(name)
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed(requirement.name, found)
    return found


def main():
    names = sorted(needed("ddp-common") - {"ddp-common"})
    columns = ["--format=markdown", "--with-urls", "--from=mixed"]
    listed = subprocess.run(
        [sys.executable, "-m", "piplicenses", *columns, "--packages", *names],
        check=True,
        capture_output=True,
        text=True,
    )
    rows = listed.stdout.splitlines()
    table = "\n".join(" ".join(row.split()) for row in [rows[0], "|---|---|---|---|", *rows[2:]])
    PAGE.write_text(f"{HEAD}{table}\n")
    print(f"{PAGE.name}: {len(names)} packages")


if __name__ == "__main__":
    main()
