"""The exercises of `dogs` judge rightly, its studies choose and judge by different images."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tutorials_here import DATA, assert_judged, make_run, names_of

import ddp_common as ddp

PHOTOS = DATA / "dogs" / "tiny-imagenet-64px"


@pytest.fixture(scope="module")
def dogs(tmp_path_factory):
    with names_of("dogs", tmp_path_factory.mktemp("runs")) as names:
        yield names


# A learning rate that grows

POWER = {"kept": 0.0, "square root": 0.5, "linear": 1.0}


def interpolated(seen, base, batch, rule, warm_up):
    full = base * (batch / 32) ** POWER[rule]
    return float(np.interp(seen, [0, warm_up], [base, full])) if warm_up else full


def grows_from_0(seen, base, batch, rule, warm_up):
    full = base * (batch / 32) ** POWER[rule]
    return full * (min(seen / warm_up, 1) if warm_up else 1)


# Eight ranks


def eight_ranks(sent):
    """An answer to the exercise; `sent(n)` is how often each rank sends the gradient."""

    def answer(compute, transfer, latency):
        def terms(n):
            return [compute / n, sent(n) * transfer, latency * (n > 1)]

        largest = terms(8).index(max(terms(8)))
        worth = [n for n in range(1, 65) if compute >= 0.5 * n * sum(terms(n))]
        return sum(terms(8)), ("compute", "transfer", "latency")[largest], worth[-1]

    return answer


def by_a_ring(n):
    return 2 - 2 / n


def to_each(n):
    return 2 * (n - 1)


# A study with faults


def study_of(steps_of_large, key, sign):
    """An answer to the exercise that may be wrong in one thing."""

    def answer(trial, seeds):
        differences = []
        for seed in seeds:
            best = []
            for batch, steps in ((128, steps_of_large), (32, 60)):
                runs = [trial(batch, rate, steps, seed) for rate in (0.1, 0.03, 0.01)]
                runs.sort(key=lambda run: sign * run[key])
                best.append(runs[0]["test accuracy"])
            differences.append(best[0] - best[1])
        return "DCA", np.array(differences)

    return answer


FAIR_STUDY = study_of(15, "validation loss", 1)


@pytest.mark.parametrize(
    ("check", "right", "wrong", "question"),
    [
        ("learning_rate", interpolated, grows_from_0, "at the start, and in the end"),
        ("eight_ranks", eight_ranks(by_a_ring), eight_ranks(to_each), "Which term shrinks"),
        ("study", FAIR_STUDY, study_of(60, "validation loss", 1), "How many samples"),
        ("study", FAIR_STUDY, study_of(15, "test accuracy", -1), "who has chosen it"),
    ],
)
def test_the_exercises_of_dogs_are_judged(dogs, capsys, check, right, wrong, question):
    assert_judged(dogs, capsys, f"check_{check}", right, wrong, question)


# Predictions on workers


@pytest.fixture
def judging(dogs, monkeypatch):
    """What this exercise finds in the notebook: a model, and what it says alone."""
    torch.manual_seed(0)
    net = dogs["Classifier"]("efficientnet-lite0", 10, dogs["weights"]).eval()
    torch.nn.init.normal_(net.head[1].weight)
    pictures = torch.stack(
        [image for image, _ in dogs["images"].__getitems__(dogs["held_out"].tolist())]
    )
    with torch.no_grad():
        monkeypatch.setitem(dogs, "guesses", net(pictures).argmax(1))
    monkeypatch.setitem(dogs, "run", type("Run", (), {"result": net.state_dict()}))


def test_predictions_image_by_image_are_accepted_and_those_in_training_mode_refused(
    dogs, judging, capsys
):
    classifier = dogs["Classifier"]

    def predictions(rows, reading, backbone, weights, training=False):
        net = classifier(backbone, len(weights["head.1.bias"])).train(training)
        net.load_state_dict(weights)
        found = ddp.ImageFolder(**reading)
        pictures = [found[row][0][None] for row in rows]
        groups = [torch.cat(pictures)] if training else pictures
        with torch.no_grad():
            return [guess for group in groups for guess in net(group).argmax(1).tolist()]

    def in_training_mode(rows, reading, backbone, weights):
        return predictions(rows, reading, backbone, weights, training=True)

    answers = [predictions, in_training_mode]
    assert_judged(dogs, capsys, "check_predictions", *answers, "In which mode is the model")


# What its conclusions rest on


@pytest.mark.parametrize("targets", [torch.arange(100) % 10, [0, 1, 2] * 3])
def test_no_image_that_judges_has_chosen_or_was_learned_from(dogs, targets):
    choosing = set()
    for seed in range(5):
        parts = dogs["parts_of"](targets, seed)
        assert sorted(np.concatenate(parts)) == list(range(len(targets)))
        learn, choose, judge = map(set, parts)
        choosing |= choose
        assert not judge & choosing and not learn & choosing
        assert len(choosing) == len(choose), "another seed chooses by other images"


def test_the_rate_is_chosen_without_the_images_that_judge(dogs):
    torch.manual_seed(0)
    labels = torch.arange(1_000) % 10
    table = torch.randn(10, 64)[labels] + 3 * torch.randn(1_000, 64)
    _, choose, judge = dogs["parts_of"](labels, 5)

    def tried(*changed):
        features = table.clone()
        for rows in changed:
            features[rows] = torch.nan
        return dogs["tried"](5, features, labels, candidates=(0.001, 0.03), epochs=1)

    assert tried(judge) == tried() != tried(choose)


def test_intervals_over_seeds_and_over_images_miss_the_truth_as_rarely_as_they_say(dogs):
    draw, missed = np.random.default_rng(0), 0
    for _ in range(100):
        low, high = dogs["interval"](draw.normal(0, 1, 10), 0, 1)
        missed += not low <= 0 <= high
    assert 1 <= missed <= 12
    for share in (0.75, 0.99):
        intervals = [dogs["wilson"](each, 315) for each in draw.binomial(315, share, 500)]
        covered = np.mean([low <= share <= high for low, high in intervals])
        assert 0.91 < covered < 0.99


def evaluate_by_table(evaluate, scores, labels):
    samples = torch.utils.data.TensorDataset(scores, labels)
    return evaluate(lambda batch: batch, samples, torch.device("cpu"))


@pytest.mark.parametrize("count", [1, 203])
def test_an_evaluation_on_two_ranks_is_that_of_one_process(dogs, count):
    scores, labels = torch.randn(count, 5), torch.arange(count) % 5
    given = {"evaluate": dogs["evaluate"], "scores": scores, "labels": labels}
    loss, accuracy = ddp.launch(dogs["client"], evaluate_by_table, **given, workers=2).result
    alone = torch.nn.functional.cross_entropy(scores, labels).item()
    assert math.isclose(loss, alone, rel_tol=1e-5)
    assert math.isclose(accuracy, (scores.argmax(1) == labels).float().mean().item(), rel_tol=1e-6)


def test_the_best_weights_are_those_with_the_lowest_validation_loss_also_after_a_resume(dogs):
    best, model = dogs["Best"](), torch.nn.Linear(1, 1)
    for loss, value in ((3.0, 1.0), (1.0, 2.0), (2.0, 3.0)):
        torch.nn.init.constant_(model.weight, value)
        best.keep(loss, model)
    restored = dogs["Best"]()
    restored.load_state_dict(best.state_dict())
    assert (restored.loss, restored.weights["weight"].item()) == (1.0, 2.0)


# A folder of one's own


@pytest.fixture(scope="module")
def kennel(dogs, tmp_path_factory):
    """A folder of 60 drawn dogs of three breeds."""
    folder = tmp_path_factory.mktemp("kennel")
    for breed in ("beagle", "poodle", "pug"):
        (folder / breed).mkdir()
        for path in sorted((Path(dogs["dataset"].path) / breed).iterdir())[:20]:
            shutil.copy(path, folder / breed)
    return folder


def test_a_run_on_a_folder_of_ones_own_leaves_the_best_model(dogs, kennel, tmp_path):
    done = make_run("dogs", tmp_path, f"data={kennel} head_epochs=1 epochs=1 batch_size=8")
    assert done.returncode == 0, done.stderr
    assert "backbone efficientnet-lite0, weights from ImageNet" in done.stdout
    (folder,) = (tmp_path / "dogs").iterdir()
    assert {"best.pt", "curves.png", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    net = dogs["Classifier"]("efficientnet-lite0", 3)
    net.load_state_dict(torch.load(folder / "best.pt", weights_only=True))


def test_a_folder_of_one_class_is_refused_in_one_message(kennel, tmp_path):
    shutil.copytree(kennel / "pug", tmp_path / "mine" / "pug")
    done = make_run("dogs", tmp_path / "runs", f"data={tmp_path / 'mine'}")
    assert done.returncode == 1 and "holds only the class 'pug'" in done.stderr
    assert "Traceback" not in done.stderr


def test_weights_that_are_damaged_are_refused(dogs, tmp_path, monkeypatch):
    monkeypatch.setitem(dogs["WEIGHTS"], "resnet50", (tmp_path / "resnet50.pth", "11ad3fa6", None))
    (tmp_path / "resnet50.pth").write_bytes(b"half a file")
    with pytest.raises(ddp.Error, match="is damaged"):
        dogs["imagenet_weights"]("resnet50")


@pytest.mark.skipif(
    not PHOTOS.is_dir(), reason="DDP_DATA names no folder with photographs of dogs"
)
def test_photographs_of_six_breeds_are_told_apart_with_a_pretrained_backbone(tmp_path):
    """On frozen features; all 3,000 photographs take longer.

    Of the 600 here, 120 are held out. With this seed 87 % of them were right, with two others 75
    and 78 %; from scratch 17 %, as by chance.
    """
    done = make_run("dogs", tmp_path, f"data={PHOTOS} size=160 head_epochs=5 epochs=0")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "dogs").glob("*/metrics.jsonl")
    metrics = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    assert metrics["validation_accuracy"].max() >= 0.75
