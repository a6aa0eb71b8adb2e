"""The checks of `pets`: a run that was stopped, killed and resumed; a script with two faults."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tutorials.checks.common import Wrong, run_script

REPOSITORY = Path(__file__).parents[2]

# Variables that would change what `make run` does
CHOICES = {"CLUSTER", "OPTIONS", "PRESET", "SET", "RESUME", "CHECKPOINT", "RESTARTS", "WORKERS"}


# Exercise A: a run that was stopped, killed and resumed


def resumed_by_hand(answer):
    """`answer()` is the directory of a run of `make run TUTORIAL=pets`, a str or a Path."""
    given = answer()
    folder = REPOSITORY / str(given)  # an absolute path stays itself
    if not (folder / "config.json").is_file() or not (folder / "log.txt").is_file():
        question = "After 'Run directory:', what did `make run` print?"
        raise Wrong(repr(given), "a run directory with config.json and log.txt", question)
    log = (folder / "log.txt").read_text()
    for event, happened, question in events_in(log):
        if not happened:
            raise Wrong(f"a log without this event: {event}", "all events", question)
    config = json.loads((folder / "config.json").read_text())
    yours = final_weights(folder)
    expected = undisturbed(config["settings"], len(config["workers"]))
    if set(yours) != set(expected) or not all(
        torch.equal(yours[name], expected[name]) for name in expected
    ):
        question = "Did you change a setting, or the number of ranks, when you resumed?"
        raise Wrong("other final weights", "those of an undisturbed run", question)
    return "stopped, killed, resumed, and the weights of an undisturbed run, bit for bit"


def events_in(log):
    """What must be in a log, in words; whether it is there; what to ask if not."""
    stopped = log.rfind("interrupted from the keyboard")
    killed = log.rfind("was killed by SIGKILL")
    resumed = log.rfind("Resumed from step")
    was_resumed_between = "Resumed from step" in log[min(stopped, killed) : max(stopped, killed)]
    return [
        ("interrupted by Ctrl-C", stopped >= 0, "Did the run finish before you came?"),
        (
            "a rank was killed",
            killed >= 0,
            "Which process did you kill, and how? `kill` without -9 only asks it to leave. Or had "
            "the run finished already?",
        ),
        (
            "resumed after the first of the two",
            was_resumed_between,
            "Was there a checkpoint? Which command did the terminal print?",
        ),
        (
            "resumed after the second",
            resumed > max(stopped, killed),
            "Which command did the terminal print after the run had failed?",
        ),
        ("finished", log.rfind("finished:") > resumed, "Is it still training?"),
    ]


def final_weights(folder):
    """The weights in the newest checkpoint of a run directory: {name: tensor}."""
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    return torch.load(newest, map_location="cpu", weights_only=True)["model"]


def undisturbed(settings, workers):
    """The final weights of a new run with these settings, which nobody disturbs."""
    environment = {name: text for name, text in os.environ.items() if name not in CHOICES}
    values = " ".join(f"{name}={value}" for name, value in settings.items())
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "pets", "--workers", str(workers), "--checkpoint", folder, "--set", values]
        done = subprocess.run(
            [sys.executable, "-m", "ddp_common", *words],
            env={**environment, "MPLBACKEND": "agg"},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"training once more, undisturbed, has failed: {done.stderr}")
        return final_weights(Path(folder))


# Exercise B: a script with two faults


def script_repaired(answer):
    """`answer()` is the letters of the two faults, in any form, and the repaired script."""
    given = answer()
    parts = list(given) if isinstance(given, (tuple, list)) else [given]
    script = next((part for part in parts if isinstance(part, str) and "\n" in part), None)
    if script is None:
        expected = "the letters, and the script as text"
        raise Wrong(f"{given!r:.100}", expected, "What does your function return?")
    others = " ".join(str(part) for part in parts if part is not script)
    letters = letters_in(others)

    random = np.random.default_rng()
    samples, seed = 2 * int(random.integers(8, 14)), int(random.integers(1, 1_000))
    first = "from tutorials.checks import pets; pets.say_who_saves()\n"
    done = run_script(first + script.lstrip("\n"), str(samples), str(seed))
    if not done.ok:
        said = done.ended_because or done.output[-600:]
        question = "Which line of yours does the traceback name?"
        raise Wrong(f"a script that fails:\n{said}", "one that ends without an error", question)
    look_at_order(done.output, samples)
    look_at_replicas(done.output)
    look_at_file(done.output, done.folder)
    if letters != {"B", "E"}:
        yours = f"a repaired script, and the letters {', '.join(sorted(letters)) or 'none'}"
        expected = "the letters of the two faults, as capital letters"
        raise Wrong(yours, expected, "What did each change mend?")
    return "each epoch has its own order, the replicas agree, and anybody can load the file"


def letters_in(text):
    """The letters A to F that a text names: alone, in any form, or as words of a sentence.

    In a sentence only capital letters count, and only those that are a word.
    """
    words = re.findall(r"\w+", text)
    if len(words) == 1 or all(len(word) == 1 for word in words):
        text = text.upper()
    return set("".join(re.findall(r"\b[A-F]+\b", text)))


def say_who_saves():
    """Have each rank print that it saves. A repaired script calls this before its first line."""
    save = torch.save

    def say_and_save(*arguments, **named):
        print("rank", os.environ["RANK"], "saves", flush=True)
        save(*arguments, **named)

    torch.save = say_and_save


def look_at_order(output, samples):
    """Raise Wrong unless each epoch deals each sample once, in an order of its own."""
    found = re.findall(r"epoch (\d) rank (\d) saw([ \d]*)", output)
    seen = {(int(epoch), int(rank)): text.split() for epoch, rank, text in found}
    if set(seen) != {(epoch, rank) for epoch in range(3) for rank in range(2)}:
        expected = "'epoch … rank … saw …' for each epoch and rank"
        raise Wrong(f"{len(seen)} such lines", expected, "Is a line that prints missing?")
    orders = [seen[epoch, 0] + seen[epoch, 1] for epoch in range(3)]
    every = sorted(map(str, range(samples)))
    if any(sorted(order) != every for order in orders):
        question = "Do both ranks cut their shares out of the same order?"
        raise Wrong("samples that no rank saw, or both", "each sample once per epoch", question)
    different = len(set(map(tuple, orders)))
    if different < 3:
        question = "What must the sampler be told, and when?"
        raise Wrong(f"{different} different order(s) in 3 epochs", "3", question)
    if seen[0, 0] == sorted(seen[0, 0], key=int):
        raise Wrong("samples in rising order", "a shuffled order", "What shuffles them?")


def ends_in(output):
    """{rank: its final weight and bias}, as the script has printed them."""
    found = re.findall(r"rank (\d) ends with (\S+) (\S+)", output)
    return {int(rank): (float(weight), float(bias)) for rank, weight, bias in found}


def look_at_replicas(output):
    """Raise Wrong unless both ranks end with the same weights."""
    ends = ends_in(output)
    if set(ends) != {0, 1}:
        expected = "'rank … ends with …' of each rank"
        raise Wrong(f"{len(ends)} such lines", expected, "Is a line that prints missing?")
    if not are_close(ends[0], ends[1]):
        yours = f"rank 0 ends with {ends[0]}, rank 1 with {ends[1]}"
        question = "Are the gradients averaged, and does each rank take each step?"
        raise Wrong(yours, "the same weights on both ranks", question)


def are_close(one, other):
    return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(one, other))


def look_at_file(output, folder):
    """Raise Wrong unless one rank has saved the final weights, under the model's own names."""
    ranks = set(re.findall(r"rank (\d) saves", output))
    if len(ranks) > 1:
        question = "Two processes write one file. Whose is it in the end?"
        raise Wrong("both ranks save model.pt", "one of them", question)
    if not (folder / "model.pt").is_file():
        raise Wrong("no file model.pt", "one", "Who saves, and when?")
    saved = torch.load(folder / "model.pt", weights_only=True)
    if set(saved) != {"weight", "bias"}:
        yours = f"a file with the names {', '.join(map(str, saved))}"
        raise Wrong(yours, "weight, bias", "Whose state do you save?")
    if not are_close((saved["weight"].item(), saved["bias"].item()), ends_in(output)[0]):
        question = "Is the model that you save the one that you trained?"
        raise Wrong("a file with other weights", "those after the training", question)
