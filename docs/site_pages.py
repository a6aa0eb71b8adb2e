"""What the site has beyond its pages: an extension of Sphinx.

- A notebook's page: no instructor's cells, solutions folded, links to download it, and the alt
  texts that its pictures have in their metadata.
- Text that is made of other files, where a page has `<!-- made: NAME -->`: the course's
  notebooks, the instructor's cells, the tutorials' settings.
- A link to a file of the repository leads to a page that shows it, and so does [source] beside
  a public name.
- Formulas as MathML, which browsers draw without a script.

Relies on `docs/check_pages.py` having found nothing.
"""

import ast
import base64
import hashlib
import html
import importlib
import inspect
import json
import os
import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"
ORDER = ["mnist", "pets", "ucmerced", "dogs", "flights"]  # of the course
SHOWN_FILES = "files"  # the folder of the site that shows files of the repository
PLACE_TO_FILL = re.compile(r"^<!-- made: ([\w-]+) -->$", flags=re.M)


def setup(app):
    app.connect("source-read", change_source)
    app.connect("doctree-read", use_alt_texts)
    app.add_transform(LinksToShownFiles)
    app.connect("autodoc-process-docstring", set_examples_apart)
    app.connect("html-page-context", mend_body)
    app.connect("html-collect-pages", pages_of_files)
    app.connect("build-finished", write_front_door)
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    return {"parallel_read_safe": False, "parallel_write_safe": True}


# Notebooks


def tutorials():
    """The names of the notebooks, in the order of the course."""
    found = [path.stem for path in sorted(TUTORIALS.glob("*.ipynb"))]
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def read_notebook(name):
    notebook = json.loads((TUTORIALS / f"{name}.ipynb").read_text())
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def tags_of(cell):
    return cell["metadata"].get("tags", [])


def change_source(app, docname, content):
    """What is parsed in place of a file: a notebook's page, or a page with its gaps filled."""
    folder, _, name = docname.rpartition("/")
    if folder == "tutorials":
        content[0] = page_of_notebook(name)
        return
    for gap in PLACE_TO_FILL.findall(content[0]):
        content[0] = content[0].replace(f"<!-- made: {gap} -->", MADE[gap]())


def page_of_notebook(name):
    notebook = read_notebook(name)
    notebook["cells"] = [cell for cell in notebook["cells"] if "instructor" not in tags_of(cell)]
    for cell in notebook["cells"]:
        if "solution" in tags_of(cell):
            cell["metadata"]["tags"] = [*tags_of(cell), "hide-input"]
    title, _, rest = notebook["cells"][0]["source"].partition("\n")
    notebook["cells"][0]["source"] = f"{title}\n\n{downloads(name)}\n\n{rest}"
    return json.dumps(notebook)


def downloads(name, folder=""):
    """Links to a tutorial's files, for a page in tutorials/."""
    return (
        f"{{download}}`Download the notebook <{folder}{name}.ipynb>` · "
        f"{{download}}`student copy, with gaps <{folder}student/{name}.ipynb>` · "
        f"[as a script]({folder}{name}.py)"
    )


def use_alt_texts(app, doctree):
    """Give pictures in outputs the alt texts and widths that a notebook has for them.

    MyST-NB names the file of a picture after its content, and so they are found again.
    """
    folder, _, name = app.env.docname.rpartition("/")
    if folder != "tutorials":
        return
    alts = {}
    for cell in read_notebook(name)["cells"]:
        for output in cell.get("outputs", []):
            for kind, content in output.get("data", {}).items():
                if kind.startswith("image/"):
                    alt = output.get("metadata", {}).get(kind, {}).get("alt")
                    alts[digest_of_picture(kind, "".join(content))] = alt
    for picture in doctree.findall(nodes.image):
        alt = alts.get(Path(picture["uri"]).stem)
        if alt:
            picture["alt"] = alt


def digest_of_picture(kind, content):
    if kind == "image/svg+xml":
        data = os.linesep.join(content.splitlines()).encode()
    else:
        data = base64.b64decode(content)
    return hashlib.sha256(data).hexdigest()


# Text that is made of other files


def course():
    """A section for each tutorial: its question, its time, its files."""
    parts = []
    for number, name in enumerate(tutorials(), 1):
        card = read_notebook(name)["cells"][0]["source"]
        title = card.partition("\n")[0].lstrip("# ")
        question = paragraph(card, "Question")
        time = paragraph(card, "Time")
        parts += [
            f"## {number}. [{title}](../tutorials/{name}.ipynb)",
            question,
            f"**Time:** {time}" if time else "",
            downloads(name, "../tutorials/"),
        ]
    return "\n\n".join(parts)


def paragraph(card, word):
    """The first sentence behind a bold word that begins a paragraph of a notebook's card."""
    match = re.search(rf"^\*\*{word}[.:](.*?)(?:\n\n|\Z)", card, flags=re.S | re.M)
    text = match.group(1).replace("**", "", 1) if match else ""
    return re.split(r"(?<=[.?])\s", text.strip())[0]


def instructors_cells():
    """The instructor's cells of each notebook, below the titles of their sections."""
    parts = []
    for name in tutorials():
        parts.append(f"## {name}")
        section = printed = ""
        for cell in read_notebook(name)["cells"]:
            if cell["cell_type"] != "markdown":
                continue
            for heading in re.findall(r"^#{1,2} +(.+)$", cell["source"], flags=re.M):
                section = heading
            if "instructor" in tags_of(cell):
                if section != printed:
                    parts.append(f"### {section}")
                    printed = section
                parts.append(cell["source"])
    return "\n\n".join(parts)


def settings():
    """A table for each tutorial: name, default, what it means, and the presets' values."""
    parts = []
    for name in tutorials():
        call, lines = call_of_settings((TUTORIALS / f"{name}.py").read_text())
        values = {each.arg: each.value for each in call.keywords}
        presets = as_written(values.pop("presets", None))
        limits = as_written(values.pop("limits", None))
        names = [f"`PRESET={each}`" for each in presets]
        head = ["setting", "default", *names, ""]
        rows = [head, ["---"] * len(head)]
        for key, value in values.items():
            remark = lines[value.end_lineno - 1].partition("  # ")[2]
            if key in limits:
                least, greatest = limits[key]
                remark += f" ({least} to {greatest})" if greatest else f" ({least} or more)"
            others = [f"`{each[key]!r}`" if key in each else "" for each in presets.values()]
            rows.append([f"`{key}`", f"`{ast.unparse(value)}`", *others, remark.strip()])
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
        parts += [f"## {name}", table]
    return "\n\n".join(parts)


def as_written(node):
    """The value of an expression of constants in a script of the repository; {} for none."""
    return eval(compile(ast.Expression(node), "settings", "eval")) if node else {}


def call_of_settings(script):
    """The call of `ddp.settings` in a script, and the script's lines."""
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ddp.settings":
            return node, script.splitlines()
    raise ValueError("the script does not call ddp.settings")


def profiles():
    """The profiles that are shipped, each as it is."""
    parts = []
    for path in sorted((ROOT / "clusters").glob("*.yaml")):
        parts += [f"## {path.stem}", f"```yaml\n{path.read_text().strip()}\n```"]
    return "\n\n".join(parts)


MADE = {
    "course": course,
    "instructors-cells": instructors_cells,
    "profiles": profiles,
    "settings": settings,
}


# Docstrings


ADDRESS = re.compile(r"(?<![\w/])((?:tcp|tls|s3)://[\w.:/]*\w)")


def set_examples_apart(app, what, name, thing, options, lines):
    """An indented block in a docstring is code, as in Markdown; for Sphinx it needs a `::`."""
    out = []
    for line in lines:
        begins = line.startswith("    ") and (not out or not out[-1].strip())
        if begins and not any(each.startswith("::") for each in out[-2:]):
            in_block = len(out) > 1 and out[-2].startswith("    ")
            if not in_block:
                out += ["::", ""]
        if not line.startswith("    "):  # an address in a sentence is no link
            parts = line.split("`")
            parts[::2] = [ADDRESS.sub(r"``\1``", part) for part in parts[::2]]
            line = "`".join(parts)
        out.append(line)
    lines[:] = out


LINES_OF_SIGNATURE = re.compile(r'<dl>\n((?:<dd><em class="sig-param">.*</dd>\n)+)</dl>')


PICTURE = re.compile(r'(?<!">)(<img [^>]*src="([^"]*_images/[^"]+)"[^>]*>)')


def mend_body(app, pagename, template, context, doctree):
    """Three things that Sphinx and MyST-NB do not do.

    Arguments in lines of their own are no list of definitions. What folds a solution is called by
    the words that one sees, and not by another label. A picture leads to itself, so that one can
    enlarge it where the window is narrow.
    """

    def lines(match):
        inner = match.group(1).replace("<dd>", "<span>").replace("</dd>", "</span>")
        return f'<span class="sig-lines">{inner}</span>'

    body = LINES_OF_SIGNATURE.sub(lines, context.get("body") or "")
    body = re.sub(r'<summary aria-label="[^"]*">', "<summary>", body)
    context["body"] = PICTURE.sub(r'<a href="\2">\1</a>', body)


# Files of the repository


def shown_file(path):
    """The name of the page that shows a file, or what a folder has; `path` is a str."""
    return f"{SHOWN_FILES}/{path}" if path else SHOWN_FILES


def repository_path(docname, target):
    """Where in the repository a page's link leads: a str, or None if that is elsewhere."""
    path = (ROOT / docname).parent / target.partition("#")[0]
    path = Path(os.path.normpath(path))
    if not path.exists() or not path.is_relative_to(ROOT):
        return None
    return path.relative_to(ROOT).as_posix()


class LinksToShownFiles(SphinxTransform):
    """What would be the download of a source file becomes a link to a page that shows it.

    So does a link to a folder, for which MyST knows nothing.
    """

    default_priority = 800

    def apply(self, **options):
        docname = self.env.docname
        for link in list(self.document.findall(addnodes.download_reference)):
            path = repository_path(docname, link["reftarget"])
            if path and not path.endswith(".ipynb"):  # a notebook is to be downloaded
                show_instead(self.app, docname, link, path)
        for link in list(self.document.findall(addnodes.pending_xref)):
            path = repository_path(docname, link["reftarget"])
            if link["reftype"] == "myst" and path is not None and (ROOT / path).is_dir():
                show_instead(self.app, docname, link, path)


def show_instead(app, docname, link, path):
    app.env.files_to_show = getattr(app.env, "files_to_show", set()) | {path}
    here = app.builder.get_target_uri(docname)
    uri = relative_uri(here, f"{shown_file(path)}.html")
    uri += line_of_definition(path, link.astext())
    words = link.children[0].children  # without the looks of a download
    link.replace_self(nodes.reference("", "", *words, refuri=uri, internal=True))


def line_of_definition(path, name):
    """`#line-N` if a file of Python defines `name`, a dotted name; else nothing."""
    if not path.endswith(".py"):
        return ""
    body = ast.parse((ROOT / path).read_text()).body
    line = ""
    for part in name.split("."):
        found = [each for each in body if getattr(each, "name", None) == part]
        if not found:
            return line
        line = f"#line-{found[0].lineno}"
        body = getattr(found[0], "body", [])
    return line


def source_of(module, name):
    """The page and line of a public name, for a page in docs/reference/."""
    thing = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part, None)
    thing = getattr(thing, "fget", thing)  # of a property
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(thing)))
        line = inspect.getsourcelines(inspect.unwrap(thing))[1]
    except (TypeError, OSError):
        return None  # a plain value
    path = file.resolve().relative_to(ROOT).as_posix()
    NAMED_BY_REFERENCE.add(path)
    return f"../../{shown_file(path)}.html#line-{line}"


NAMED_BY_REFERENCE = set()


def pages_of_files(app):
    """A page for each file and folder that something leads to."""
    wanted = getattr(app.env, "files_to_show", set()) | NAMED_BY_REFERENCE
    for path in sorted(wanted):
        place = ROOT / path
        body = listing(place) if place.is_dir() else highlighted(app, place)
        title = path or "The repository"
        context = {
            "title": title,
            "body": f'<h1 class="whole-file">{html.escape(title)}</h1>\n{body}',
            "parents": [],
        }
        yield shown_file(path), context, "page.html"


def highlighted(app, file):
    text = file.read_text()
    try:
        language = get_lexer_for_filename(file.name).aliases[0]
    except ClassNotFound:
        language = "text"
    return app.builder.highlighter.highlight_block(text, language, linespans="line")


def listing(folder):
    """The files of a folder, with the first line that each has to say."""
    rows = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        says = ""
        if path.suffix == ".py":
            says = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        elif path.suffix in (".yaml", ".sbatch", ".pbs"):
            comments = re.findall(r"^# (.+)$", path.read_text(), flags=re.M)
            says = comments[0] if comments else ""
        name = path.name + ("/" if path.is_dir() else "")
        rows.append(f"<dt><code>{html.escape(name)}</code></dt><dd>{html.escape(says)}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


# The front door, and formulas


def write_front_door(app, error):
    """The address of the site itself leads to its first page."""
    if error is None and app.builder.format == "html":
        front = app.builder.get_target_uri(app.config.root_doc)
        (Path(app.outdir) / "index.html").write_text(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<title>{app.config.project}</title><meta http-equiv="refresh" '
            f'content="0; url={front}"></head><body><a href="{front}">'
            f"{app.config.project}</a></body></html>\n"
        )


def inline_formula(self, node):
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def formula(self, node):
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode
