"""Answers to exercise A of `pets`: a training that is resumed by hand."""

LOADS = """        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["steps"]
"""
SAVES = """    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "steps": until}, file)
"""
OBJECTS = [
    (SAVES, "    torch.save([model, optimizer.state_dict(), until], file)\n"),
    (
        LOADS,
        """        loaded, adam, begin = torch.load(file, weights_only=False)
        model.load_state_dict(loaded.state_dict())
        optimizer.load_state_dict(adam)
""",
    ),
]
PICKLED = [
    (
        SAVES,
        """    import pickle

    states = model.state_dict(), optimizer.state_dict()
    file.write_bytes(pickle.dumps((*states, until)))
""",
    ),
    (
        LOADS,
        """        import pickle

        weights, adam, begin = pickle.loads(file.read_bytes())
        model.load_state_dict(weights)
        optimizer.load_state_dict(adam)
""",
    ),
]
RENAMED = [
    (
        "    torch.save({**states",
        """    import os

    part = f"{file}.part"
    torch.save({**states""",
    ),
    ("until}, file)", "until}, part)\n    os.replace(part, file)"),
]
EACH_STEP = [
    (
        "        optimizer.step()\n    # your",
        """        optimizer.step()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "steps": step + 1}, file)
    # your""",
    ),
    (SAVES, ""),
]
BY_ADAM = [
    ('begin = state["steps"]', 'begin = int(optimizer.state_dict()["state"][0]["step"])'),
]
TWO_FILES = [
    (
        SAVES,
        """    torch.save({"model": model.state_dict(), "steps": until}, file)
    torch.save(optimizer.state_dict(), file.with_suffix(".adam"))
""",
    ),
    ('(state["optimizer"])', '(torch.load(file.with_suffix(".adam")))'),
]
IN_MEMORY = [
    (
        SAVES,
        "    kept[file.parent.parent] = model, optimizer, until\n    file.write_text('saved')\n",
    ),
    (
        LOADS,
        """        loaded, its_optimizer, begin = kept[file.parent.parent]
        model.load_state_dict(loaded.state_dict())
        optimizer.load_state_dict(its_optimizer.state_dict())
""",
    ),
    ("def my_training", "kept = {}\n\n\ndef my_training"),
]
RIGHT = {
    "after each step": EACH_STEP,
    "whole objects": OBJECTS,
    "pickle": PICKLED,
    "renamed when whole": RENAMED,
    "Adam knows the step": BY_ADAM,
    "the last step": [
        ('"steps": until}', '"last": until - 1}'),
        ('state["steps"]', 'state["last"] + 1'),
    ],
    "weights_only": [("torch.load(file)", "torch.load(file, weights_only=True)")],
    "the number of windows": [
        ('"steps": until}', '"seen": 16 * until}'),
        ('state["steps"]', 'state["seen"] // 16'),
    ],
    "by is_file": [("file.exists()", "file.is_file()")],
    "by try": [
        ("    if file.exists():\n", "    try:\n"),
        (LOADS, LOADS + "    except FileNotFoundError:\n        pass\n"),
    ],
    "the random state, too": [
        ('"steps": until}', '"steps": until, "random": torch.get_rng_state()}'),
        (LOADS, LOADS + '        torch.set_rng_state(state["random"])\n'),
    ],
}
WRONG = {
    "nothing saved": ([(SAVES, "")], "nothing is written yet"),
    "nothing loaded": ([(LOADS, "        pass\n")], "Does it load the file"),
    "weights alone": (
        [('        optimizer.load_state_dict(state["optimizer"])\n', "")],
        "Adam keep",
    ),
    "not the weights": ([('        model.load_state_dict(state["model"])\n', "")], "Which states"),
    "not the step": ([('        begin = state["steps"]\n', "")], "Does it load the file"),
    "one step too early": ([('"steps": until}', '"steps": until - 1}')], "From which step"),
    "the text's 25 steps": ([('state["steps"]', "25")], "From which step"),
    "two files": (TWO_FILES, "also needs moved.adam"),
    "in memory": (IN_MEMORY, "cannot be judged|also needs|KeyError"),
    "another name": ([("until}, file)", 'until}, file.with_name("c.pt"))')], "under which name"),
    "the loaded weights are returned": (
        [
            (
                "    return model",
                "    if begin:\n        model.load_state_dict(state['model'])\n    return model",
            )
        ],
        "Which model is returned",
    ),
    "nothing returned": ([("    return model", "")], "the last line"),
    "saved in the first call only": (
        [(SAVES, "    if not begin:\n" + "".join(f"    {line}\n" for line in SAVES.splitlines()))],
        "the next call makes|third call",
    ),
    "the steps of this call": (
        [('"steps": until}', '"steps": until - begin}')],
        "next call makes",
    ),
    "the last step twice": ([('"steps": until}', '"steps": max(begin, until - 1)}')], "next call"),
    "another rate": ([("lr=1e-2", "lr=1e-3")], "Which of the given lines"),
    "other windows": ([("16 * (step + 1)]", "16 * (step + 2)]")], "Which of the given lines"),
    "a new optimizer of a kind": ([("optim.Adam(", "optim.AdamW(")], "Which of the given lines"),
    "no gradient is cleared": (
        [("        optimizer.zero_grad()\n", "")],
        "Which of the given lines",
    ),
    "seeded after the model": (
        [
            ("    torch.manual_seed(0)\n", ""),
            ("    begin = 0\n", "    torch.manual_seed(0)\n    begin = 0\n"),
        ],
        "Which of the given lines|final weights differ",
    ),
    "the file's windows come again": (
        [
            ("16 * step :", "16 * (step - begin) :"),
            ("16 * (step + 1)]", "16 * (step - begin + 1)]"),
        ],
        "own windows",
    ),
    "weights of the beginning": (
        [
            (
                "    begin = 0\n",
                "    begin = 0\n    first = {k: v.clone() for k, v in model.state_dict().items()}\n",
            ),
            ('"model": model.state_dict()', '"model": first'),
        ],
        "Which states",
    ),
    "Adam of the beginning": (
        [
            ("    begin = 0\n", "    begin = 0\n    adam = optimizer.state_dict()\n"),
            ('"optimizer": optimizer.state_dict()', '"optimizer": adam'),
        ],
        "What does Adam keep|cannot be judged",
    ),
}
EQUIVALENT: dict = {}
IN_TESTS = ["Adam knows the step", "the steps of this call"]
