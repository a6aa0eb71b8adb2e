"""Settings of the site: Sphinx reads this file. `make docs` builds it, into docs/_build/html.

The whole repository is the source, so a page lies on the site where it lies in the repository,
and its links work in both places. Nothing is executed: notebooks show the outputs they have.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

project = "Data-parallel PyTorch on Dask"
author = "The ddp-common developers"
copyright = f"{author}, BSD-3-Clause"
html_title = project
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.linkcode", "site_pages"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "clusters/README.md",
    "tests/README.md",
    "data/README.md",
    "docs/*.md",
    "docs/reference/*.md",
    "tutorials/*.ipynb",
]
# Folders that need not be searched. What `include_patterns` does not name is left out anyway.
exclude_patterns = [
    ".*",
    "build",
    "data/cache",
    "data/*/**",
    "ddp_common",
    "dist",
    "docs/_build",
    "runs",
    "tests/*/**",
    "tutorials/my-work",
    "tutorials/student",
    "tutorials/scripts",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # there are none, and their script would come from the network
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False
myst_dmath_allow_digits = False  # 5$ is no formula
myst_heading_anchors = 6
suppress_warnings = [
    "config.cache",  # a function in the settings is not kept, and need not be
    "myst.header",  # in mnist a box between sections has a smaller heading
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 70
add_module_names = False
default_role = "code"  # docstrings are written with `single` backticks

html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,  # a notebook's first lines have links of their own
    "use_fullscreen_button": False,
    "navbar_start": [],  # the search stands in the sidebar
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_math_renderer = "mathml"  # of site_pages: a browser draws it by itself
html_sidebars = {  # there are many of these, and the whole menu takes time to make
    "files/**": ["navbar-logo.html", "search-button-field.html"],
}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_domain_indices = False
html_use_index = False


def linkcode_resolve(domain, information):
    """Where on the site the source of a public name is."""
    import site_pages

    return site_pages.source_of(information["module"], information["fullname"])
