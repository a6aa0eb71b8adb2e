"""The cells of a tutorial: which of them are the job, and which are the lesson around it.

A tutorial is a percent script, one file for the notebook and the command line. A cell begins with
a line `# %%`, which may name tags. Promises: what is left out is blanked, so that line numbers
stay those of the file.
"""

import re
from collections.abc import Callable

LESSON_TAGS = {"lesson", "proof", "exercise", "solution"}


def job_source(text: str) -> str:
    """The percent script `text` without its markdown and lesson cells: the job itself."""
    return _keep_cells(text, _belongs_to_job, before_first_cell=True)


def cells_with_tag(text: str, tag: str) -> str:
    """The cells of the percent script `text` that have this tag."""

    def has_tag(header):
        return re.search(rf'tags=\[.*"{tag}".*\]', header) is not None

    return _keep_cells(text, has_tag, before_first_cell=False)


def _keep_cells(text: str, is_wanted: Callable[[str], bool], before_first_cell: bool) -> str:
    """Keep the cells whose header `is_wanted`, and what stands before the first if told so."""
    lines = []
    keep = before_first_cell
    for line in text.splitlines():
        if line.startswith("# %%"):
            keep = is_wanted(line)
        lines.append(line if keep else "")
    return "\n".join(lines)


def _belongs_to_job(header):
    if "[markdown]" in header:
        return False
    listed = re.search(r"tags=\[(.*?)\]", header)
    tags = re.findall(r'"([^"]+)"', listed[1]) if listed else []
    return not LESSON_TAGS.intersection(tags)
