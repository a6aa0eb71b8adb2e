"""Draws the map of a run: `python docs/pictures/draw_map.py` writes who-talks-to-whom.svg.

One box is one process, and so is the dashed frame around client and scheduler. Where boxes and
arrows stand is written down here, and nothing else draws: the picture is text, and a change of it
can be read.
"""

from pathlib import Path

from svg_parts import arrow, picture, text

FILE = Path(__file__).with_name("who-talks-to-whom.svg")
TITLE = "Who talks to whom in a run on two workers"
DESCRIPTION = (
    "Your notebook, the client, sends a function through the scheduler to two workers. Each "
    "worker starts a rank, a process of its own. The ranks exchange gradients with each other "
    "in every step. Reports flow back from the ranks through workers and scheduler to the "
    "client. A dashed frame says that client and scheduler share a process on one machine."
)
WIDTH, HEIGHT = 860, 330
FUNCTION, REPORTS, GRADIENTS = "#1f5fa8", "#2b7a3d", "#b3471d"
# name, what it does, left, top, width, height
BOXES = [
    ("client", ["your notebook:", "launch(train)"], 20, 120, 140, 90),
    ("scheduler", ["Dask: knows the", "workers, passes on"], 240, 120, 150, 90),
    ("worker 0", ["Dask: starts", "and watches rank 0"], 480, 40, 150, 90),
    ("worker 1", ["Dask: starts", "and watches rank 1"], 480, 200, 150, 90),
    ("rank 0", ["train(): the whole", "model, half the batch"], 690, 40, 155, 90),
    ("rank 1", ["train(): the whole", "model, half the batch"], 690, 200, 155, 90),
]
# colour, from, to
ARROWS = [
    (FUNCTION, (160, 150), (240, 150)),
    (FUNCTION, (390, 145), (480, 75)),
    (FUNCTION, (390, 165), (480, 225)),
    (FUNCTION, (630, 70), (690, 70)),
    (FUNCTION, (630, 230), (690, 230)),
    (REPORTS, (240, 185), (160, 185)),
    (REPORTS, (480, 110), (390, 172)),
    (REPORTS, (480, 262), (390, 192)),
    (REPORTS, (690, 105), (630, 105)),
    (REPORTS, (690, 265), (630, 265)),
]
# Around client and scheduler: left, top, width, height
FRAME = (8, 100, 394, 142)
LABELS = [
    (FUNCTION, "function", 200, 140),
    (REPORTS, "reports", 200, 203),
    (GRADIENTS, "gradients", 725, 170),
]


def box(name, does, left, top, width, height):
    middle = left + width / 2
    return [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" '
        'fill="#f4f6f8" stroke="#333333" stroke-width="1.5"/>',
        text(middle, top + 26, name, size=16, weight="bold"),
        *[text(middle, top + 50 + 18 * line, words) for line, words in enumerate(does)],
    ]


def frame(left, top, width, height):
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="12" fill="none" '
        'stroke="#888888" stroke-dasharray="6 5"/>'
    )


def drawing():
    parts = [
        frame(*FRAME),
        text(205, 234, "on one machine: one process", colour="#666666"),
        *[line for each in BOXES for line in box(*each)],
        *[arrow(*each) for each in ARROWS],
        arrow(GRADIENTS, (768, 130), (768, 200), both_ways=True),
        *[text(x, y, words, colour=colour, weight="bold") for colour, words, x, y in LABELS],
        text(20, 310, "One box is one process: see the frame.", anchor="start"),
        text(300, 310, "Without Dask, torchrun or srun starts the ranks alone.", anchor="start"),
    ]
    return picture(WIDTH, HEIGHT, TITLE, DESCRIPTION, (FUNCTION, REPORTS, GRADIENTS), parts)


if __name__ == "__main__":
    FILE.write_text(drawing())
