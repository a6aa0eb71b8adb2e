"""The plot of docs/watching.md grows in a real JupyterLab, in a real browser."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time

import nbformat
import pytest
from site_in_browser import NotHere, browser
from tutorials_here import ROOT

PATIENCE = 240  # seconds, for JupyterLab, a kernel and a cluster on a busy machine
PAGE = (ROOT / "docs" / "watching.md").read_text()
BLOCKS = re.findall(r"^```python ?\w*\n(.*?)^```$", PAGE, flags=re.M | re.S)

# What the browser is asked, in JavaScript
PICTURES = "[...document.querySelectorAll('.jp-OutputArea-output img')].map(each => each.src)"
PICTURE = "document.querySelector('.jp-OutputArea-output img')"
NOTEBOOK = "[...(window.jupyterapp?.shell.widgets('main') ?? [])][0]"
STATUS = "sessionContext?.session?.kernel?.status"
LAST_PROMPT = "[...document.querySelectorAll('.jp-InputPrompt')].at(-1)?.textContent"


def pages_notebook():
    """What somebody who follows the page has in a notebook, and a training of a few seconds."""
    training, plot = (
        next(code for code in BLOCKS if each in code) for each in ("def train", "live_plot")
    )
    training = training.partition("seen = []")[0].replace('"pause": 0.02', '"pause": 1.0')
    cells = [
        "import ddp_common as ddp\nclient = ddp.connect('local', workers=2)",
        training,
        plot,
    ]
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text.strip()) for text in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )


@contextlib.contextmanager
def jupyterlab(folder, folder_for_sockets):
    """The address of a JupyterLab that serves a folder, with its token; `%s` is the page's."""
    own = {
        "JUPYTER_RUNTIME_DIR": folder_for_sockets,
        "JUPYTER_CONFIG_DIR": str(folder / ".config"),
        "IPYTHONDIR": str(folder / ".ipython"),
        "RUNS": str(folder / "runs"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port=0"]
    command += ["--LabApp.expose_app_in_browser=True", "--allow-root"]
    command += ["--KernelManager.transport=ipc"]  # no ports that others may take (`kernels`)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **own},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()
    link = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\?(token=\w+)")
    try:
        wait_for(lambda: process.poll() is not None or link.search("".join(said)), said)
        address, token = link.search("".join(said)).groups()
        yield f"{address}/lab/tree/%s?{token}"
    finally:
        process.terminate()
        process.wait(timeout=60)
        reader.join(timeout=60)
        process.stdout.close()


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return value


def screen_where_the_picture_is(page):
    """What Chromium shows at the place of the plot, as the text of a PNG.

    None in the moment in which JupyterLab replaces it.
    """
    page.evaluate(f"{PICTURE}?.scrollIntoView()")
    place = page.evaluate(f"{PICTURE}?.getBoundingClientRect().toJSON()")
    if not place or not place["width"] or not place["height"]:
        return None
    clip = {name: place[name] for name in ("x", "y", "width", "height")}
    return page.call("Page.captureScreenshot", clip={**clip, "scale": 1})["data"]


@pytest.mark.timeout(600)
def test_the_plot_changes_while_training_runs_and_one_picture_remains(
    tmp_path, folder_for_sockets
):
    nbformat.write(pages_notebook(), tmp_path / "watch.ipynb")
    try:
        with jupyterlab(tmp_path, folder_for_sockets) as address, browser() as page:
            page.call("Page.navigate", url=address % "watch.ipynb")
            wait_for(lambda: page.evaluate(f"{NOTEBOOK}?.{STATUS}") == "idle", "a kernel starts")
            page.evaluate(f"window.jupyterapp.shell.activateById({NOTEBOOK}.id)")
            # Not awaited: it ends when the last cell has
            page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
            seen, screens = [], set()

            def has_ended():
                pictures = page.evaluate(PICTURES)
                if pictures[-1:] != seen[-1:]:
                    seen.extend(pictures[-1:])
                    screens.add(screen_where_the_picture_is(page))
                return re.search(r"\[\d+\]", page.evaluate(LAST_PROMPT) or "")

            wait_for(has_ended, "the last cell ends")
            assert len(seen) >= 3, "the picture does not change while training runs"
            assert len(screens - {None}) >= 3, "what is on the screen does not change"
            assert len(page.evaluate(PICTURES)) == 1
            page.evaluate(f"{NOTEBOOK}.sessionContext.shutdown().then(() => null)")
    except NotHere as reason:
        pytest.skip(str(reason))
