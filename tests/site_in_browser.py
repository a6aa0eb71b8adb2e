"""The site in a real browser: pictures of pages, and what axe-core finds in them.

    python tests/site_in_browser.py FOLDER [PAGE …]     # pictures of pages, wide and narrow

It talks to Chromium without a window, over the DevTools protocol. axe-core is fetched by npm in
one fixed version, once, into docs/_build. Nothing else is loaded from the network: a page that
asks for something there does not get it, and is found out.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

import websocket

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "_build" / "html"
PLACE_OF_AXE = ROOT / "docs" / "_build" / "axe"
AXE = "axe-core@4.14.1"
AXE_SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = 1280, 400  # pixels
START_TIMEOUT = 60  # seconds
ANSWER_TIMEOUT = 120


class NotHere(Exception):
    """A program that is not on this machine; the text says which."""


def program():
    """The path of Chromium. Raises `NotHere`."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise NotHere("no Chromium was found (Debian, Ubuntu: apt install chromium)")


def axe():
    """The text of axe-core. Raises `NotHere` if npm cannot fetch it."""
    file = PLACE_OF_AXE / f"{AXE}.tgz"
    if not file.exists():
        if not shutil.which("npm"):
            raise NotHere("npm, which fetches axe-core, was not found")
        PLACE_OF_AXE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", AXE, "--silent", "--pack-destination", str(PLACE_OF_AXE)]
        done = subprocess.run(
            command, cwd=PLACE_OF_AXE, capture_output=True, text=True, timeout=120
        )
        if done.returncode != 0:
            raise NotHere(f"npm could not fetch {AXE}: {done.stderr.strip()[:300]}")
        (PLACE_OF_AXE / done.stdout.split()[-1]).rename(file)
    if hashlib.sha256(file.read_bytes()).hexdigest() != AXE_SHA256:
        file.unlink()
        raise ValueError(f"{file.name} is not what it was: its SHA-256 differs")
    with tarfile.open(file) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


class Browser:
    """One page of a running Chromium."""

    def __init__(self, connection, site):
        self.connection = connection
        self.site = site
        self.sent = 0
        self.asked_outside = []  # addresses that are not files

    def call(self, method, **parameters):
        """Call a method of the protocol and return its result."""
        self.sent += 1
        self.connection.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv())
            if message.get("id") == self.sent:
                assert "error" not in message, message
                return message["result"]
            self.take(message)

    def take(self, event):
        if event.get("method") == "Network.requestWillBeSent":
            address = event["params"]["request"]["url"]
            if not address.startswith(("file:", "data:", "blob:")):
                self.asked_outside.append(address)

    def evaluate(self, expression):
        """The value of an expression of JavaScript, awaited if it is a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, page, width=WIDE, dark=False):
        """Show a page of the site, `page` is its path there."""
        assert (self.site / page).exists(), f"{self.site} has no page {page}: run make docs"
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])
        address = (self.site / page).as_uri()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while self.evaluate("`${location.href} ${document.readyState}`") != f"{address} complete":
            assert time.monotonic() < deadline, f"{page} is not shown"
            time.sleep(0.02)
        self.evaluate("document.fonts.ready.then(() => null)")

    def picture(self, full=False):
        """What is shown, as the bytes of a PNG; with `full` the whole page."""
        clip = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {
                "clip": {**size, "height": min(size["height"], 12_000), "scale": 1},
                "captureBeyondViewport": True,
            }
        return base64.b64decode(self.call("Page.captureScreenshot", **clip)["data"])

    def overflow(self):
        """By how many pixels the page is wider than its window."""
        return self.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def findings(self, source):
        """What axe-core, given as text, finds on the page: (rule, impact, place) of each."""
        self.evaluate(f"{source}; null")
        text = self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify("
            "found.violations.map(each => [each.id, each.impact, each.nodes[0].html])))"
        )
        return [tuple(each) for each in json.loads(text)]


@contextlib.contextmanager
def browser(site=SITE):
    """A Chromium without a window, which shows pages of `site`. Raises `NotHere`."""
    path = program()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            path,
            "--headless=new",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
            f"--user-data-dir={folder}",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            port = debugging_port(process, Path(folder) / "DevToolsActivePort")
            connection = websocket.create_connection(
                page_address(port), timeout=ANSWER_TIMEOUT, suppress_origin=True
            )
            page = Browser(connection, site)
            page.call("Page.enable")
            page.call("Network.enable")
            yield page
            connection.close()
        finally:
            process.terminate()
            process.communicate(timeout=30)


def debugging_port(process, file):
    """The port on which Chromium listens; it writes it into a file."""
    deadline = time.monotonic() + START_TIMEOUT
    while not (file.exists() and file.read_text()):
        assert process.poll() is None, f"Chromium has ended: {process.communicate()[1][-500:]}"
        assert time.monotonic() < deadline, "Chromium did not start in time"
        time.sleep(0.05)
    return int(file.read_text().split()[0])


def page_address(port):
    """Where the one page of a Chromium takes commands."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            pages = [each for each in json.load(answer) if each["type"] == "page"]
        if pages:
            return pages[0]["webSocketDebuggerUrl"]
        assert time.monotonic() < deadline, "Chromium shows no page"
        time.sleep(0.05)


def main(folder, *pages):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as page:
        for name in pages or ["docs/index.html", "tutorials/mnist.html"]:
            for width in (WIDE, NARROW):
                for dark in (False, True):
                    page.open(name, width, dark)
                    kind = f"{'wide' if width == WIDE else 'narrow'}-{'dark' if dark else 'light'}"
                    stem = re.sub(r"\W", "-", name.removesuffix(".html"))
                    file = folder / f"{stem}-{kind}.png"
                    file.write_bytes(page.picture(full=True))
                    print(file, f"{page.overflow()} pixels too wide")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"{__doc__}\nName a folder for the pictures.")
    try:
        main(*sys.argv[1:])
    except NotHere as missing:
        sys.exit(f"Error: {missing}.")
