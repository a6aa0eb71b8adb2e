"""Answers to exercise B of `dogs`: a fair comparison."""

import math

import numpy as np
import pandas as pd


def by(step_of, form=dict, of=None):
    """An answer that takes the step `step_of(workers, images, samples)` of each list."""

    def answer(log, images, samples):
        found = {}
        for workers, right in log.items():
            step = step_of(workers, images, samples)
            found[workers] = of(right[:step]) if of else right[step - 1]
        return form(found)

    return answer


def whole(workers, images, samples):
    return samples // (workers * images)


def a_loop(log, images, samples):
    found = {}
    for workers, right in log.items():
        seen = 0
        for answers in right:
            seen += workers * images
            if seen > samples:
                break
            found[workers] = answers
    return found


def with_an_array(log, images, samples):
    found = {}
    for workers, right in log.items():
        ends = np.arange(1, len(right) + 1) * workers * images
        found[workers] = right[np.searchsorted(ends, samples, side="right") - 1]
    return found


RIGHT = {
    "as told": by(whole),
    "a series": by(whole, pd.Series),
    "pairs": by(whole, lambda found: list(found.items())),
    "arrays": by(whole, lambda found: {key: np.float32(each) for key, each in found.items()}),
    "by int": by(lambda w, images, samples: int(samples / (w * images))),
    "by floor": by(lambda w, images, samples: math.floor(samples / images / w)),
    "a loop": a_loop,
    "an array": with_an_array,
}
WRONG = {
    "steps, not samples": (
        by(lambda w, images, samples: samples // images),
        "How many images has a step of several workers",
    ),
    "counts from 0": (
        by(lambda w, images, samples: whole(w, images, samples) + 1),
        "At which place of the list",
    ),
    "the next step": (
        by(lambda w, images, samples: math.ceil(samples / (w * images))),
        "Is that step finished",
    ),
    "the nearest step": (
        by(lambda w, images, samples: int(samples / (w * images) + 0.5)),
        "only the nearest one|finished by then",
    ),
    "rounded": (by(lambda w, images, samples: round(samples / (w * images))), "finished by then"),
    "until before samples": (
        by(lambda w, images, samples: (samples - 1) // (w * images)),
        "After how many steps",
    ),
    "the best so far": (by(whole, of=max), "last finished step alone"),
    "the sum so far": (by(whole, of=sum), "last finished step alone"),
    "the mean so far": (by(whole, of=np.mean), "After how many steps"),
    "one step for all": (
        by(lambda w, images, samples: samples // (4 * images)),
        "steps of its own",
    ),
    "the last": (by(lambda *_: 40), "After how many steps"),
    "the first": (by(lambda *_: 1), "After how many steps"),
    "some workers": (
        by(whole, lambda found: {key: found[key] for key in (1, 4)}),
        "keys of `log`",
    ),
    "a list": (by(whole, lambda found: list(found.values())), "Is it a dict"),
    "nothing": (by(whole, lambda found: None), "Is it a dict"),
}
EQUIVALENT: dict = {}
IN_TESTS = ["by int", "the next step"]
