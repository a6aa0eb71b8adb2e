"""Run the README's command in a terminal, and draw what that shows: docs/pictures/terminal.svg.

    .venv/bin/python docs/pictures/record_terminal.py

The terminal is a real one of 100 columns, after `make setup`. A run that fails leaves the
picture as it is.
"""

import os
import pty
import re
import subprocess
import sys
import tty
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "make run TUTORIAL=pets"
ROWS, COLUMNS = 40, 100
LINE = 19  # pixels from one line to the next
CHARACTER = 7.83  # pixels, of a monospaced font of 13 pixels
MARGIN = 20
BAR = 34  # the window's bar
ALT = (
    f"A terminal: {COMMAND} starts two workers, draws a progress bar, prints invented names and "
    "two scores, and says where the run is."
)
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def main():
    subprocess.run(["make", "setup"], cwd=ROOT, check=True)
    code, printed = run_in_a_terminal(COMMAND.split())
    if code:
        sys.exit(f"{COMMAND} failed, and nothing was drawn:\n{printed}")
    lines = [f"$ {COMMAND}"]
    for line in map(last_state, printed.rstrip().split("\n")):
        lines += [line[at : at + COLUMNS] for at in range(0, max(len(line), 1), COLUMNS)]
    (ROOT / "docs" / "pictures" / "terminal.svg").write_text(terminal(lines))


def run_in_a_terminal(command):
    """The exit code of a command, and all that it has sent to its terminal."""
    process, terminal = pty.fork()
    if process == 0:
        tty.setraw(1)  # a new line is a new line
        ioctl(1, TIOCSWINSZ, pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(ROOT)
        os.execvp(command[0], command)
    printed = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if not piece:
            break
        printed += piece
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), printed.decode()


def last_state(line):
    """What is left of a line that a progress bar has written again and again."""
    return re.sub(r"\x1b\[\w*", "", line).rstrip("\r").rpartition("\r")[2].rstrip()


def terminal(lines):
    """An SVG file that shows these lines, the first of which was typed."""
    width = round(COLUMNS * CHARACTER) + 2 * MARGIN
    height = BAR + LINE * len(lines) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(COMMAND)}</title>',
        f'<desc id="description">{escape(ALT)}</desc>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f24"/>',
    ]
    for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        parts.append(f'<circle cx="{MARGIN + 18 * number}" cy="17" r="5.5" fill="{colour}"/>')
    for number, line in enumerate(lines):
        colour = "#ffffff" if number == 0 else "#d0d7de"
        weight = "bold" if number == 0 else "normal"
        y = BAR + LINE * number + 13
        parts.append(
            f'<text x="{MARGIN}" y="{y}" fill="{colour}" font-weight="{weight}" font-size="13" '
            f'font-family="{FONT}" xml:space="preserve">{escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
