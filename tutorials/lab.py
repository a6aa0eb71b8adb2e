"""Opens the notebooks in JupyterLab: `make lab`.

Or `python tutorials/lab.py [OPTION …]`, with options of JupyterLab.

Students work in `my-work/`, which git ignores: there each finds a copy of every student notebook,
and a page that says where to begin, on which JupyterLab opens. A copy in which something was done
is never overwritten; one that nobody has touched follows its original. The folder of the originals
is not listed in the browser.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager

HERE = Path(__file__).resolve().parent
FIRST_PAGE = "start-here.ipynb"
# Of this clone's own kernel, which `make kernel` makes: each clone has other modules
KERNEL = "ddp-tutorials-" + hashlib.sha256(bytes(HERE)).hexdigest()[:8]
HIDDEN = [
    "student",
    "solutions",
    "__pycache__",
    "*.pyc",
    "*~",
    ".DS_Store",
    "*.so",
    "*.dylib",
]  # the first two are ours, the others are Jupyter's own


def page(text):
    """A notebook of one cell of text: JupyterLab shows a Markdown file as its source."""
    cell = nbformat.v4.new_markdown_cell(text, id="page")
    return nbformat.v4.new_notebook(cells=[cell])


def kernel():
    """The kernel of the notebooks, as their metadata name it: this clone's own, if it has one.

    Else `python3`, which is the environment of the JupyterLab that opens them.
    """
    kernels = KernelSpecManager()
    if KERNEL not in kernels.find_kernel_specs():
        return {"name": "python3", "display_name": "Python 3", "language": "python"}
    shown = kernels.get_kernel_spec(KERNEL).display_name
    return {"name": KERNEL, "display_name": shown, "language": "python"}


def originals():
    """What every student finds in `my-work/`: the bytes of each file, by its name."""
    copies = {path.name: nbformat.read(path, 4) for path in (HERE / "student").glob("*.ipynb")}
    copies[FIRST_PAGE] = page((HERE / "start-here.md").read_text())
    copies["glossary.ipynb"] = page((HERE.parent / "docs" / "glossary.md").read_text())
    kernelspec = kernel()
    for notebook in copies.values():
        notebook.metadata["kernelspec"] = kernelspec
    return {name: nbformat.writes(notebook).encode() for name, notebook in copies.items()}


def cells_of(content):
    """The cells of a notebook's bytes: whether another kernel is named there is no matter."""
    return json.loads(content)["cells"]


def prepare(originals, mine):
    """Put each of `originals` (a dict, name to bytes) into the folder `mine`, unless it is there.

    Returns what a person must know, a list of lines. `mine/.originals/` keeps what each copy was
    made from: who compares the two sees whether somebody has worked in the copy.
    """
    said, kept = [], mine / ".originals"
    kept.mkdir(parents=True, exist_ok=True)
    for name, new in sorted(originals.items()):
        copy, made_from = mine / name, kept / name
        untouched = (
            copy.exists() and made_from.exists() and copy.read_bytes() == made_from.read_bytes()
        )
        if not copy.exists() or (untouched and copy.read_bytes() != new):
            copy.write_bytes(new)
            made_from.write_bytes(new)
        elif (
            not untouched
            and made_from.exists()
            and cells_of(made_from.read_bytes()) != cells_of(new)
        ):
            said.append(
                f"There is a newer {name} than the one you work on. Yours stays as it "
                "is: rename it, and the next "
                "start brings the new one."
            )
    return said


def options(environment, arguments):
    """What JupyterLab is told beside `arguments`, and the lines that say why."""
    shell = [environment.get("SHELL", "sh")]
    told = [
        f"--ServerApp.root_dir={HERE}",
        f"--ContentsManager.hide_globs={HIDDEN}",
        f"--LabApp.default_url=/lab/tree/my-work/{FIRST_PAGE}",
        # No login shell, as it is where the output is a file: /etc/profile may set another PATH
        f"--ServerApp.terminado_settings={ {'shell_command': shell} }",
    ]
    said = []
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments:
        told.append("--allow-root")
        said.append(
            "You are root, as one usually is in a container: what notebooks do, they do as root."
        )
    no_screen = sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & set(
        environment
    )
    if no_screen and "--no-browser" not in arguments:
        told.append("--no-browser")
        said.append(
            "No browser can be opened from here: copy the address with the token, below, into "
            "yours. If this is another machine than the one"
        )
        said.append(
            "you sit at, first run there: ssh -N -L 8888:127.0.0.1:8888 THIS-MACHINE (with the "
            "port of the address, if it is not 8888)."
        )
    return told, said


def my_copies():
    """Put the student's copies into `my-work/`; returns what a person must know, a list of lines.

    Ends the program with a message where that folder cannot be written.
    """
    mine = HERE / "my-work"
    try:
        return prepare(originals(), mine)
    except OSError as error:
        sys.exit(
            f"Your copies of the notebooks cannot be put into {mine}: {error.strerror}. Is this "
            "folder yours? Clone the repository to a place where you may write."
        )


def main(arguments):
    said = my_copies()
    told, why = options(os.environ, arguments)
    for line in [
        "The first page says where to begin. Your notebooks lie in tutorials/my-work/, "
        "which git ignores.",
        *said,
        *why,
    ]:
        print(line, flush=True)
    # the notebooks' shell commands and terminals shall find the Python that the kernel runs
    os.environ["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    )
    os.chdir(HERE)
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *told, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
