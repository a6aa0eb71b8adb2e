"""Draws the course of a launch: `python docs/pictures/draw_launch.py` writes a-launch.svg.

Each column is a process, and time goes down. Where a step stands follows from its place in the
list, and nothing else draws: the picture is text, and a change of it can be read.
"""

from pathlib import Path

from svg_parts import arrow, picture, text

FILE = Path(__file__).with_name("a-launch.svg")
TITLE = "The course of a launch on two workers"
DESCRIPTION = (
    "A sequence diagram with six columns: client, scheduler, agents 0 and 1, ranks 0 and 1. The "
    "client claims two workers from the scheduler, and sends each agent a RankSpec and the "
    "function. Each agent has its nursery fork a rank. The ranks meet at rank 0's store. While "
    "they train they average gradients and report; reports go by the agents and the scheduler to "
    "the client. Rank 0 sends its result, which its agent's task returns; both processes end, the "
    "workers are free, and launch returns a Run."
)
COLUMNS = {
    "client": 80,
    "scheduler": 225,
    "agent 0": 370,
    "agent 1": 515,
    "rank 0": 660,
    "rank 1": 805,
}
WHERE = {
    "client": "your program",
    "scheduler": "Dask",
    "agent 0": "on worker 0",
    "agent 1": "on worker 1",
    "rank 0": "process of its own",
    "rank 1": "process of its own",
}
WIDTH, TOP, LINE = 890, 78, 38
COMMAND, REPORTS, GRADIENTS = "#1f5fa8", "#2b7a3d", "#b3471d"
NOTE = "#333333"
# colour, from, to (the same: a note beside the column), words
STEPS = [
    (NOTE, "client", "client", "packs train and its arguments"),
    (COMMAND, "client", "scheduler", "claims two workers"),
    (COMMAND, "client", "agent 0", "listen: a port for rank 0"),
    (COMMAND, "client", "agent 0", "RankSpec 0, train"),
    (COMMAND, "client", "agent 1", "RankSpec 1, train"),
    (COMMAND, "agent 0", "rank 0", "its nursery forks it"),
    (COMMAND, "agent 1", "rank 1", "its nursery forks it"),
    (GRADIENTS, "rank 1", "rank 0", "meet at the store"),
    (NOTE, "rank 0", "rank 0", "train()"),
    (NOTE, "rank 1", "rank 1", "train()"),
    (GRADIENTS, "rank 0", "rank 1", "gradients"),
    (REPORTS, "rank 0", "agent 0", "Report"),
    (REPORTS, "rank 1", "agent 1", "Report"),
    (REPORTS, "agent 0", "client", "the same, as an event of Dask"),
    (REPORTS, "agent 1", "client", "the same, as an event of Dask"),
    (REPORTS, "rank 0", "agent 0", "Done, with the result"),
    (REPORTS, "rank 1", "agent 1", "Done"),
    (REPORTS, "agent 0", "client", "Ended; its task returns the result"),
    (REPORTS, "agent 1", "client", "Ended"),
    (COMMAND, "client", "scheduler", "gives them back"),
    (NOTE, "client", "client", "launch returns a Run"),
]
LOOP = (10, 14)  # these steps happen again and again, until train() returns
BOTH_WAYS = {"gradients"}


def column(name, bottom):
    x = COLUMNS[name]
    return [
        f'<rect x="{x - 66}" y="10" width="132" height="46" rx="8" fill="#f4f6f8" '
        'stroke="#333333" stroke-width="1.5"/>',
        text(x, 29, name, size=15, weight="bold"),
        text(x, 48, WHERE[name], size=12),
        f'<line x1="{x}" y1="56" x2="{x}" y2="{bottom}" stroke="#999999" stroke-dasharray="3 4"/>',
    ]


def label(x, y, words, colour):
    """Words on a white ground, so that no line goes through them."""
    width = 7 * len(words) + 8
    return [
        f'<rect x="{x - width / 2:g}" y="{y - 13}" width="{width}" height="17" fill="white"/>',
        text(x, y, words, colour=colour),
    ]


def step(number, colour, sender, receiver, words):
    y = TOP + LINE * number + 22
    begin, end = COLUMNS[sender], COLUMNS[receiver]
    if sender == receiver:
        left = begin - 66 if begin < WIDTH / 2 else begin - 40
        width = max(80, 7 * len(words) + 16)
        return [
            f'<rect x="{left}" y="{y - 17}" width="{width}" height="24" rx="4" '
            'fill="#fff7e0" stroke="#333333"/>',
            text(left + width / 2, y, words),
        ]
    return [
        *label((begin + end) / 2, y - 5, words, colour),
        arrow(colour, (begin, y + 3), (end, y + 3), both_ways=words in BOTH_WAYS),
    ]


def frame(first, last):
    y = TOP + LINE * first - 4
    height = LINE * (last - first + 1) + 4
    return [
        f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{height}" rx="8" fill="none" '
        'stroke="#888888" stroke-dasharray="6 5"/>',
        text(
            18,
            y + 16,
            "while they train",
            colour="#555555",
            anchor="start",
            weight="bold",
        ),
    ]


def drawing():
    height = TOP + LINE * len(STEPS) + 20
    parts = [
        *[line for name in COLUMNS for line in column(name, height - 10)],
        *frame(*LOOP),
        *[line for number, each in enumerate(STEPS) for line in step(number, *each)],
    ]
    colours = (COMMAND, REPORTS, GRADIENTS)
    return picture(WIDTH, height, TITLE, DESCRIPTION, colours, parts)


if __name__ == "__main__":
    FILE.write_text(drawing())
