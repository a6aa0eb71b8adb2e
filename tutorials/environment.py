"""Whether somebody else's environment fits this clone: `make run VENV=/shared/env`.

    /shared/env/bin/python tutorials/environment.py course

It fits if it has what this extra of pyproject.toml asks for, and if no version of these, and of
what they need, differs from the one in constraints.txt. Then nothing is printed; else one sentence
names the first package, and the exit code is 1. Promises: nothing is written, and only the
standard library is imported, since any other package may be the one that is missing.
"""

import os
import re
import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def normalised(name: str) -> str:
    """The name of a distribution as it is compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def asked_for(project: dict, extra: str) -> list[str]:
    """The names that the package needs, and its `extra` with the extras that this one names."""
    names = []
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    for requirement in wanted:
        name, others = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if normalised(name) != project["name"]:
            names.append(name)
            continue
        for other in others.split(","):
            names += asked_for(project, other)
    return names


def pinned(constraints: str) -> dict[str, str]:
    """The version of each distribution, by its normalised name."""
    lines = re.findall(r"(?m)^([\w.-]+)==(\S+)", constraints)
    return {normalised(name): version for name, version in lines}


def installed() -> dict[str, Distribution]:
    """The distributions that this Python imports, by their normalised names."""
    there = {}
    for each in distributions():
        there.setdefault(normalised(each.name), each)
    return there


def misfit(asked: list[str], pins: dict[str, str], there: dict[str, Distribution]) -> str:
    """What does not fit, in words about the first package; empty if all do.

    What the packages need in turn is followed, but for their extras.
    """
    for name in asked:
        if normalised(name) not in there:
            return f"it lacks {name}"
    ahead, seen = [normalised(name) for name in asked], set()
    while ahead:
        name = ahead.pop(0)
        if name in seen or name not in there:  # some are for other systems
            continue
        seen.add(name)
        version = there[name].version.partition("+")[0]  # without the build, as in 2.13.0+cpu
        if version != pins.get(name, version):
            return f"it has {name} {version}, and this clone was tested with {pins[name]}"
        needed = [each for each in there[name].requires or [] if "extra ==" not in each]
        ahead += [normalised(re.match(r"[\w.-]+", each)[0]) for each in needed]
    return ""


def main(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = pinned((ROOT / "constraints.txt").read_text())
    if why := misfit(asked_for(project, extra), pins, installed()):
        venv = os.environ.get("VENV", sys.prefix)
        sys.exit(
            f"VENV={venv} does not fit this clone: {why}. Whoever made it can run "
            f"`make setup{'' if extra == 'course' else '-all'} VENV={venv}` in a clone of this "
            "version. Without VENV=, the clone makes an environment of its own."
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
