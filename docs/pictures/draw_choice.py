"""Draws a flowchart: `python docs/pictures/draw_choice.py` writes which-way-to-train.svg.

Questions stand in rounded boxes on the left, what to do in square ones on the right. Where boxes
stand is written down here, and nothing else draws: the picture is text, and a change of it can be
read.
"""

from pathlib import Path
from typing import NamedTuple

from svg_parts import arrow, picture, text

FILE = Path(__file__).with_name("which-way-to-train.svg")
TITLE = "Which way to train when memory is short"
ALT = (
    "A flowchart. If a step with batches of the size you want fits into the memory of one rank, "
    "take DDP. Else, if it fits with a batch of one row, activations fill the memory: smaller "
    "batches with accumulation, bfloat16, checkpointing. Else, if parameters and gradients fit "
    "with a share of the optimizer's state, take DDP with gradients as views and ZeRO-1. Else, if "
    "the largest block fits, take FSDP. Otherwise the block itself must be cut: tensor "
    "parallelism."
)
WIDTH, HEIGHT = 800, 500
LINE = 19  # from one line of text to the next
QUESTION, ANSWER, YES, NO = "#eef3fa", "#eef7ee", "#2b7a3d", "#b3471d"
EDGE = "#333333"


class Box(NamedTuple):
    lines: list
    left: int
    top: int
    width: int = 320
    height: int = 64


QUESTIONS = [
    Box(["Does a step with the batch you want", "fit into the memory of one rank?"], 20, 20),
    Box(["Does it fit with a batch of one row?", "Then activations fill the memory."], 20, 120),
    Box(["Do parameters and gradients fit, with", "a share of the optimizer's state?"], 20, 220),
    Box(["Does the largest block fit,", "beside a share of all the rest?"], 20, 320),
]
ANSWERS = [
    Box(["DDP"], 440, 20, 340),
    Box(["DDP; smaller batches, accumulated;", "bfloat16; checkpointing"], 440, 120, 340),
    Box(["DDP with gradients as views, and ZeRO-1", "for the optimizer's state"], 440, 220, 340),
    Box(["FSDP: fully_shard() on every block"], 440, 320, 340),
]
LAST = Box(["Cut the block itself:", "tensor parallelism"], 20, 420)
BOXES = [*QUESTIONS, *ANSWERS, LAST]


def box(each, fill, corner):
    middle = each.left + each.width / 2
    first = each.top + each.height / 2 - LINE * (len(each.lines) - 1) / 2 + 5
    return [
        f'<rect x="{each.left}" y="{each.top}" width="{each.width}" height="{each.height}" '
        f'rx="{corner}" fill="{fill}" stroke="{EDGE}" stroke-width="1.5"/>',
        *[text(middle, first + LINE * number, line) for number, line in enumerate(each.lines)],
    ]


def to_the_right(question, answer):
    y = question.top + question.height / 2
    end = question.left + question.width
    return [
        arrow(EDGE, (end, y), (answer.left, y)),
        text((end + answer.left) / 2, y - 8, "yes", colour=YES, weight="bold"),
    ]


def downwards(question, below):
    x = question.left + question.width / 2
    end = question.top + question.height
    return [
        arrow(EDGE, (x, end), (x, below.top)),
        text(x + 18, (end + below.top) / 2 + 3, "no", colour=NO, weight="bold"),
    ]


def drawing():
    ways_down = zip(QUESTIONS, [*QUESTIONS[1:], LAST])
    parts = [
        *[line for each in QUESTIONS for line in box(each, QUESTION, 20)],
        *[line for each in [*ANSWERS, LAST] for line in box(each, ANSWER, 3)],
        *[line for pair in zip(QUESTIONS, ANSWERS) for line in to_the_right(*pair)],
        *[line for pair in ways_down for line in downwards(*pair)],
    ]
    return picture(WIDTH, HEIGHT, TITLE, ALT, [EDGE], parts)


if __name__ == "__main__":
    FILE.write_text(drawing())
