"""Run the README's command, and draw what a terminal shows of it: docs/pictures/terminal.svg.

    .venv/bin/python docs/pictures/record_terminal.py

Nothing is typed in: the lines are those that the command printed here, and a run that fails leaves
the picture as it is.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "make run TUTORIAL=pets"
COLUMNS = 96
LINE = 19  # pixels from one line to the next
CHARACTER = 7.83  # pixels, of a monospaced font of 13 pixels
MARGIN = 20
BAR = 34  # the window's bar
ALT = (
    f"A terminal: {COMMAND} starts two workers, prints the loss of each epoch, "
    "twenty invented names, and how well the network does beside an n-gram model, then where the "
    "run lies."
)


def main():
    done = subprocess.run(
        COMMAND.split(), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"{COMMAND} failed, and nothing was drawn:\n{done.stdout}")
    lines = [f"$ {COMMAND}"]
    for line in done.stdout.rstrip().splitlines():
        lines += textwrap.wrap(
            line, COLUMNS, subsequent_indent="  ", replace_whitespace=False
        ) or [""]
    (ROOT / "docs" / "pictures" / "terminal.svg").write_text(terminal(lines))


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
            "font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\" "
            f'xml:space="preserve">{escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
