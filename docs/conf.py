"""Settings of the site, for Sphinx. `make docs` builds it into docs/_build/html.

The whole repository is the source: a page has the same place on the site as in the repository,
so its links work in both. Nothing is executed: notebooks show the outputs that they have.
"""

import json

project = html_title = "Data-parallel PyTorch on Dask"
author = copyright = "The ddp-common developers"

extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "clusters/*.md", "data/*.md", "tests/*.md", "docs/*.md"]
include_patterns += ["tutorials/*.ipynb"]
exclude_patterns = [".*", "docs/_build"]

nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a notebook's section may begin below the level of its cell
default_role = "code"  # docstrings are written with `single` backticks
autodoc_member_order = "bysource"

html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["static/index.html"]  # leads from the site's own address to docs/index.html


def setup(app):
    """Change notebooks before they are parsed."""
    app.connect("source-read", fold_solutions)
    app.connect("source-read", name_pictures)


def fold_solutions(app, name, content):
    """Fold the cells that hold solutions: a reader opens them with a click."""
    content[0] = content[0].replace('"solution"', '"solution", "hide-input"')


def name_pictures(app, name, content):
    """Give the pictures of a notebook the words that they have, which MyST looks for elsewhere."""
    if not content[0].startswith("{"):  # no notebook
        return
    notebook = json.loads(content[0])
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            for kind in output.get("metadata", {}):
                if kind.startswith("image/"):
                    image = {"alt": output["metadata"][kind]["alt"]}
                    cell["metadata"]["mystnb"] = {"image": image}
    content[0] = json.dumps(notebook)
