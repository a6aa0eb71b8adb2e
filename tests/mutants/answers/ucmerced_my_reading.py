"""Answers to exercise B of `ucmerced`: four logs."""

READING = {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}


def says(given):
    return lambda: given


def forms():
    pairs = READING.values()
    yield "a list", list(pairs)
    yield (
        "small letters",
        {str(n): [letter.lower(), lost] for n, (letter, lost) in READING.items()},
    )
    yield "brackets and floats", [(f"({letter})", float(lost)) for letter, lost in pairs]
    yield "quoted", [(letter, str(lost)) for letter, lost in pairs]
    yield "with a unit", [(letter, f"{lost} steps") for letter, lost in pairs]
    yield "one step", [(letter, f"{lost} step") for letter, lost in pairs]
    yield "a colon", {number: f"{letter}: {lost}" for number, (letter, lost) in READING.items()}
    yield "a dash", {number: f"{letter} - {lost}" for number, (letter, lost) in READING.items()}
    yield (
        "a long dash",
        {number: f"{letter} – {lost}" for number, (letter, lost) in READING.items()},
    )
    yield "a comma", [f"{letter}, {lost} steps" for letter, lost in pairs]
    yield "words", {n: (f"{letter}: see the table", lost) for n, (letter, lost) in READING.items()}
    yield "tuples of tuples", tuple(pairs)


RIGHT = {name: says(given) for name, given in forms()}
WRONG = {
    "1 by a person": (says(READING | {1: ("P", 20)}), "beside CANCELLED"),
    "1 warned": (says(READING | {1: ("W", 20)}), "beside CANCELLED"),
    "1 memory, as it nearly was": (says(READING | {1: ("M", 20)}), "beside CANCELLED"),
    "2 by a person": (says(READING | {2: ("P", 17)}), "Which state has sacct"),
    "2 at its limit": (says(READING | {2: ("T", 17)}), "Which state has sacct"),
    "3 at its limit": (says(READING | {3: ("T", 0)}), "what had the ranks done then"),
    "3 by a person": (says(READING | {3: ("P", 0)}), "what had the ranks done then"),
    "4 at its limit": (says(READING | {4: ("T", 42)}), "Who stands beside CANCELLED"),
    "4 warned": (says(READING | {4: ("W", 42)}), "Who stands beside CANCELLED"),
    "1 all steps": (says(READING | {1: ("T", 260)}), "Which step was the last"),
    "1 none": (says(READING | {1: ("T", 0)}), "Which step was the last"),
    "2 from the first save": (says(READING | {2: ("M", 77)}), "Which step was the last"),
    "2 the step": (says(READING | {2: ("M", 197)}), "Which step was the last"),
    "3 since the epoch": (says(READING | {3: ("W", 42)}), "Which step was the last"),
    "3 since the resume": (says(READING | {3: ("W", 162)}), "Which step was the last"),
    "4 an epoch more": (says(READING | {4: ("P", 102)}), "Which step was the last"),
    "4 none": (says(READING | {4: ("P", 0)}), "Which step was the last"),
    "two letters": (says(READING | {2: ("T M", 17)}), "Which state"),
    "no number": (says(READING | {4: "P"}), "What did you read"),
    "the number first": (says(READING | {1: (20, "T")}), "Which of both comes first"),
    "counted from 0": (says(dict(enumerate(READING.values()))), "Which numbers have the logs"),
    "one log": (says({1: ("T", 20)}), "What did you read"),
    "letters alone": (says("TMWP"), "What did you read"),
    "an empty dict": (says({}), "What did you read"),
    "less than none": (says(READING | {1: ("T", -20)}), "Which step was the last"),
    "all at the limit": (says([("T", lost) for _, lost in READING.values()]), "sacct"),
}
EQUIVALENT: dict = {}
IN_TESTS = ["a dash", "a comma", "2 at its limit", "3 since the epoch"]
