"""What the notebook `dogs` teaches by functions.

Its exercises judge rightly, its museum's faults are caught, bad input is said in a line.
"""

import ast
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from tutorials_here import ROOT, clean_environment, names_of, script

import ddp_common as ddp


@pytest.fixture(scope="module")
def dogs(tmp_path_factory):
    with names_of("dogs", tmp_path_factory.mktemp("runs")) as names:
        for cell in script("dogs").cells:  # what is studied is said before section 5
            if "def parts_of" in cell.source or "def studied" in cell.source:
                tree = ast.parse(cell.source)
                tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
                exec(compile(tree, "<cell>", "exec"), names)
        yield names


@pytest.fixture(scope="module")
def table(dogs):
    """Ten classes that a linear head can learn, in the shape of features."""
    torch.manual_seed(0)
    labels = torch.arange(1_000) % 10
    features = torch.randn(10, 64)[labels] + 3 * torch.randn(1_000, 64)
    training, held_out = ddp.split(len(labels), [0.2], by=labels)
    return {"features": features, "labels": labels, "training": training, "held_out": held_out}


@pytest.fixture
def by_value():
    """Functions of this file travel as if they were defined in a notebook."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def on_two_ranks(dogs, function, **arguments):
    return ddp.launch(dogs["client"], function, **arguments, workers=2).result


# Exercises

CHECKS = ["check_learning_rate", "check_eight_ranks", "check_study", "check_predictions"]


@pytest.fixture
def judged(dogs, monkeypatch):
    """What the stretch exercise finds in the notebook: a model, and what it says alone."""
    torch.manual_seed(0)
    net = dogs["Classifier"]("efficientnet-lite0", 10, dogs["weights"]).eval()
    torch.nn.init.normal_(net.head[1].weight)
    pictures = torch.stack(
        [image for image, _ in dogs["images"].__getitems__(dogs["held_out"].tolist())]
    )
    with torch.no_grad():
        monkeypatch.setitem(dogs, "guesses", net(pictures).argmax(1))
    monkeypatch.setitem(dogs, "run", type("Run", (), {"result": net.state_dict()}))


def test_the_checks_of_dogs_accept_the_solutions(dogs, judged, capsys):
    for check in CHECKS:
        assert dogs[check](dogs[check.replace("check", "my")])
    assert capsys.readouterr().out.count("right") == len(CHECKS)


TIMES = {"kept": lambda k: 1, "square root": math.sqrt, "linear": lambda k: k}


def grows_from_0(seen, base, batch, rule, warm_up):
    done = min(seen / warm_up, 1) if warm_up else 1
    return base * TIMES[rule](batch / 32) * done


def goes_on_growing(seen, base, batch, rule, warm_up):
    full = base * TIMES[rule](batch / 32)
    return base + (full - base) * seen / warm_up if warm_up else full


def full_rate_at_once(seen, base, batch, rule, warm_up):
    return base * TIMES[rule](batch / 32)


def square_root_taken_for_linear(seen, base, batch, rule, warm_up):
    rule = "linear" if rule == "square root" else rule
    done = min(seen / warm_up, 1) if warm_up else 1
    return base + (full_rate_at_once(seen, base, batch, rule, warm_up) - base) * done


def never_warm_where_there_is_no_warm_up(seen, base, batch, rule, warm_up):
    full = base * TIMES[rule](batch / 32)
    return base + (full - base) * min(seen / max(warm_up, 1), 1)


def step_of(n, compute, transfer, latency):
    return compute / n, 2 * (n - 1) / n * transfer, latency * (n > 1)


def eight_ranks(step=step_of, largest_on=8, is_worth=None):
    """An answer to exercise 2 that may be wrong in one thing."""

    def is_efficient(alone, seconds, n):
        return alone / (n * seconds) >= 0.5

    def answer(compute, transfer, latency):
        def seconds(n):
            return sum(step(n, compute, transfer, latency))

        terms = step(largest_on, compute, transfer, latency)
        name = ("compute", "transfer", "latency")[terms.index(max(terms))]
        worth = is_worth or is_efficient
        ranks = [n for n in range(1, 65) if worth(seconds(1), seconds(n), n)]
        return seconds(8), name, max(ranks)

    return answer


def bytes_sent_once(n, compute, transfer, latency):
    return compute / n, transfer * (n > 1), latency * (n > 1)


def bytes_not_shared_out(n, compute, transfer, latency):
    return compute / n, 2 * (n - 1) * transfer, latency * (n > 1)


def latency_shared_out(n, compute, transfer, latency):
    return compute / n, 2 * (n - 1) / n * transfer, latency / n * (n > 1)


def one_rank_pays_latency(n, compute, transfer, latency):
    return compute / n, 2 * (n - 1) / n * transfer, latency


def study_of(letters="ACD", batches=((32, 60), (128, 15)), choose="validation loss", sign=1):
    """An answer to exercise 3 that may be wrong in one thing."""

    def answer(trial, seeds):
        differences = []
        for seed in seeds:
            best = []
            for batch, steps in batches:
                runs = [trial(batch, rate, steps, seed) for rate in (0.01, 0.03, 0.1)]
                best.append(min(runs, key=lambda run: sign * run[choose])["test accuracy"])
            differences.append(best[1] - best[0])
        return letters, differences

    return answer


def first_seed_only(trial, seeds):
    letters, differences = study_of()(trial, seeds[:1])
    return letters, differences * len(seeds)


def one_difference_for_all_seeds(trial, seeds):
    letters, differences = study_of()(trial, seeds)
    return letters, [sum(differences) / len(differences)]


def mean_over_rates(trial, seeds):
    differences = []
    for seed in seeds:
        small, large = (
            np.mean([trial(*of, seed)["test accuracy"] for of in runs])
            for runs in (
                [(32, rate, 60) for rate in (0.01, 0.03, 0.1)],
                [(128, rate, 15) for rate in (0.01, 0.03, 0.1)],
            )
        )
        differences.append(large - small)
    return "ACD", differences


def rate_of_the_first_seed(trial, seeds):
    chosen, differences = {}, []
    for seed in seeds:
        best = []
        for batch, steps in ((32, 60), (128, 15)):
            runs = [trial(batch, rate, steps, seed) for rate in (0.01, 0.03, 0.1)]
            losses = [run["validation loss"] for run in runs]
            place = chosen.setdefault(batch, losses.index(min(losses)))
            best.append(runs[place]["test accuracy"])
        differences.append(best[1] - best[0])
    return "ACD", differences


def at_most_63_ranks(compute, transfer, latency):
    seconds, name, ranks = eight_ranks()(compute, transfer, latency)
    return seconds, name, min(ranks, 63)


def in_training_mode(dogs):
    classifier = dogs["Classifier"]

    def answer(rows, reading, backbone, weights):
        net = classifier(backbone, len(weights["head.1.bias"])).train()
        net.load_state_dict(weights)
        found = ddp.ImageFolder(**reading).__getitems__(rows)
        with torch.no_grad():
            return net(torch.stack([image for image, _ in found])).argmax(1).tolist()

    return answer


def sorted_rows(dogs):
    right = dogs["my_predictions"]

    def answer(rows, reading, backbone, weights):
        return right(sorted(rows), reading, backbone, weights)

    return answer


WRONG = [
    ("check_learning_rate", grows_from_0),
    ("check_learning_rate", goes_on_growing),
    ("check_learning_rate", full_rate_at_once),
    ("check_learning_rate", square_root_taken_for_linear),
    ("check_learning_rate", never_warm_where_there_is_no_warm_up),
    ("check_learning_rate", lambda seen, base, batch, rule, warm_up: None),
    ("check_eight_ranks", eight_ranks(bytes_sent_once)),
    ("check_eight_ranks", eight_ranks(bytes_not_shared_out)),
    ("check_eight_ranks", eight_ranks(latency_shared_out)),
    ("check_eight_ranks", eight_ranks(one_rank_pays_latency)),
    ("check_eight_ranks", eight_ranks(largest_on=1)),
    ("check_eight_ranks", eight_ranks(is_worth=lambda one, seconds, n: one / seconds >= 0.5)),
    ("check_eight_ranks", at_most_63_ranks),
    ("check_eight_ranks", lambda compute, transfer, latency: ...),
    ("check_eight_ranks", lambda *terms: list(eight_ranks()(*terms))),
    ("check_study", study_of(batches=((32, 60), (128, 60)))),
    ("check_study", study_of(batches=((32, 240), (128, 60)))),
    ("check_study", study_of(choose="test accuracy", sign=-1)),
    ("check_study", study_of(sign=-1)),
    ("check_study", study_of(batches=((128, 15), (32, 60)))),
    ("check_study", study_of(letters="A")),
    ("check_study", study_of(letters="ABCD")),
    ("check_study", first_seed_only),
    ("check_study", one_difference_for_all_seeds),
    ("check_study", mean_over_rates),
    ("check_study", rate_of_the_first_seed),
    ("check_study", study_of(letters="A, C, D")),
    ("check_study", lambda trial, seeds: ...),
    ("check_predictions", lambda rows, reading, backbone, weights: None),
    ("check_predictions", lambda rows, reading, backbone, weights: [0] * len(rows)),
]


@pytest.mark.parametrize("check, wrong", WRONG)
def test_the_checks_of_dogs_refuse_wrong_answers(dogs, judged, by_value, capsys, check, wrong):
    assert not dogs[check](wrong)
    assert "not yet" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [in_training_mode, sorted_rows])
def test_predictions_that_depend_on_neighbours_or_change_their_order_are_refused(
    dogs, judged, by_value, capsys, wrong
):
    assert not dogs["check_predictions"](wrong(dogs))
    assert "Is the order kept? In which mode is the model?" in capsys.readouterr().out


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_to_dogs_that_raises_is_shown_in_words(dogs, judged, capsys, check):
    ddp.judge(dogs[check], dogs["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


# The study


@pytest.mark.parametrize("warm_up", ["at once", "warmed up", "lower"])
def test_a_warm_up_and_its_control_have_the_same_mean_rate(dogs, warm_up):
    rates = dogs["learning_rates"](0.1, warm_up, 10)
    assert rates.shape == (10,)
    if warm_up == "at once":
        assert rates.tolist() == pytest.approx([0.1] * 10)
    else:
        assert rates.mean().item() == pytest.approx(0.1 * 9 / 10)
    if warm_up == "warmed up":
        assert rates[:4].tolist() == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1])


def test_heads_that_train_side_by_side_do_not_touch_each_other(dogs, table):
    parts = ddp.split(len(table["labels"]), [0.2], by=table["labels"])
    rates = torch.tensor([[0.003, 0.03]]).expand(12, -1)

    def accuracy(columns):
        given = (table["features"], table["labels"], parts, 200, rates[:, columns], 7)
        (judged,), seconds = dogs["train_heads"](*given)
        assert len(seconds) == len(judged) == 3 and seconds == sorted(seconds)
        return judged

    assert torch.allclose(accuracy([0, 1])[:, 1:], accuracy([1]), atol=0.006)


def test_a_head_of_the_study_trains_as_torchs_own_optimizer_does(dogs, table):
    features, labels = table["features"], table["labels"]
    parts = ddp.split(len(labels), [0.2], by=labels)
    (judged,), _ = dogs["train_heads"](
        features, labels, parts, 200, torch.full((8, 1), 0.003), seed=3
    )
    learn, judge = map(torch.from_numpy, parts)
    head = torch.nn.Linear(64, 10, bias=False)
    torch.nn.init.zeros_(head.weight)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.003, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        for batch in learn[torch.randperm(len(learn), generator=generator)].split(200):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(features[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        right = (head(features[judge]).argmax(1) == labels[judge]).float().mean()
    assert judged[-1, 0].item() == pytest.approx(right.item(), abs=0.006)


def test_a_trial_has_a_row_for_every_setting(dogs, table):
    given = (table["features"], table["labels"], 0.01, ["at once"])
    rows = dogs["trial"](5, *given, epochs=1)
    assert [row[:3] for row in rows] == [
        [5, batch, times] for batch in (32, 128, 512) for times in (1, 4, 8, 16)
    ]
    assert rows != dogs["trial"](6, *given, epochs=1)
    assert rows == dogs["trial"](5, *given, epochs=1)


def test_a_trial_is_chosen_by_some_images_and_judged_by_others(dogs, table):
    features, labels = table["features"], table["labels"]
    _, choose, judge = dogs["parts_of"](labels, 5)

    def columns(*changed):
        seen = features.clone()
        for rows in changed:
            seen[rows] = 0
        rows = dogs["trial"](5, seen, labels, 0.01, ["at once"], epochs=1)
        return [row[4] for row in rows], [row[5] for row in rows]

    chosen, judged = columns()
    assert columns(choose)[1] == judged and columns(choose)[0] != chosen
    assert columns(judge)[0] == chosen and columns(judge)[1] != judged


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


def test_the_rate_is_chosen_without_the_images_that_judge(dogs, table):
    labels = table["labels"]
    _, choose, judge = dogs["parts_of"](labels, 5)

    def tried(*changed):
        features = table["features"].clone()
        for rows in changed:
            features[rows] = torch.nan
        return dogs["tried"](5, features, labels, candidates=(0.001, 0.03), epochs=1)

    assert tried(judge) == tried() != tried(choose)


def study_with(difference, seeds=10, noise=0.01):
    """Two settings whose accuracies differ by so much, with some noise for each seed."""
    draw = np.random.default_rng(1)
    rows = []
    for seed in range(seeds):
        level = draw.normal(0.7, 0.05)  # a seed's images are easy or hard for both
        rows.append([seed, 32, 1, "at once", level])
        rows.append([seed, 512, 1, "at once", level + difference + draw.normal(0, noise)])
    return pd.DataFrame(rows, columns=["seed", "batch", "times", "warm_up", "accuracy"])


@pytest.mark.parametrize(
    "difference, verdict", [(0.2, "higher"), (-0.2, "lower"), (0.002, "not told apart")]
)
def test_differences_are_told_by_pairs_and_called_as_they_are(dogs, difference, verdict):
    names = {"large - small": ((512, 1, "at once"), (32, 1, "at once"))}
    (row,) = dogs["compare"](study_with(difference), names, 1 / 3).itertuples()
    assert row.verdict == verdict and row.low < row.points < row.high
    assert row.points == pytest.approx(100 * difference, abs=1.5)


def test_an_interval_grows_with_shared_images_and_with_the_number_of_comparisons(dogs):
    differences = np.random.default_rng(0).normal(0, 1, 10)

    def width(overlap, comparisons):
        low, high = dogs["interval"](differences, overlap, comparisons)
        return high - low

    plain = 2 * 2.262 * differences.std(ddof=1) / np.sqrt(10)  # Student's t, 9 degrees
    assert width(0, 1) == pytest.approx(plain, rel=0.02)
    assert width(1 / 3, 1) > 1.9 * width(0, 1)
    assert width(0, 8) > 1.4 * width(0, 1)


def test_an_interval_misses_no_difference_as_rarely_as_it_says(dogs):
    draw, missed = np.random.default_rng(0), 0
    for _ in range(100):
        low, high = dogs["interval"](draw.normal(0, 1, 10), 0, 1)
        missed += not low <= 0 <= high
    assert 1 <= missed <= 12


@pytest.mark.parametrize(
    "per_class, classes, said, unsaid",
    [
        (3, 2, ["learns from 2 images", "50.0 points", "32 or 128 or 512 is all 2"], []),
        (150, 10, ["learns from 900 images", "With a batch of 512"], ["points", "is all"]),
        (25, 7, ["2.9 points", "A batch of 128 or 512 is all 105 images"], []),
        (2_000, 10, ["12,000"], ["points", "is all", "With a batch of"]),
    ],
)
def test_what_a_study_cannot_find_is_said(dogs, per_class, classes, said, unsaid):
    words = " ".join(dogs["what_can_be_said"](list(range(classes)) * per_class))
    assert all(each in words for each in said), words
    assert not any(each in words for each in unsaid), words


@pytest.mark.parametrize("per_class, kept", [(3, 30), (150, 1_500), (2_000, 1_500)])
def test_a_study_takes_all_images_or_as_many_of_each_breed(dogs, per_class, kept):
    targets = np.arange(10 * per_class) % 10
    counts = np.bincount(targets[dogs["studied"](targets.tolist())])
    assert counts.tolist() == [kept // 10] * 10


def test_classes_of_three_images_can_be_studied_to_the_end(dogs):
    labels = torch.arange(12) % 4
    features = torch.randn(4, 8)[labels] + torch.randn(12, 8)
    rows = dogs["trial"](0, features, labels, 0.01, ["at once", "lower"], epochs=2)
    assert len(rows) == 3 * 4 * 2 and all(0 <= row[-1] <= 1 for row in rows)


@pytest.mark.parametrize("backbone", ["efficientnet-lite0", "resnet50"])
def test_early_and_late_layers_together_are_the_backbone(dogs, backbone):
    torch.manual_seed(0)
    whole = dogs["Backbone"](backbone).eval()
    early, late = dogs["early_and_late"](whole)
    pictures = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(late(early(whole.scaled(pictures))), whole(pictures))
    kept = sum(each.numel() for each in late.parameters())
    assert kept > 0.9 * sum(each.numel() for each in whole.parameters())


@pytest.mark.parametrize("warm_up", ["at once", "warmed up"])
def test_all_later_layers_are_trained_by_the_small_study(dogs, warm_up):
    torch.manual_seed(0)
    pictures = torch.randint(256, (90, 3, 64, 64), dtype=torch.uint8)
    labels = torch.arange(90) % 3
    for number, rows in enumerate(labels == label for label in range(3)):
        pictures[rows, number] //= 4  # each class lacks another colour
    backbone = dogs["Backbone"]("efficientnet-lite0").eval()
    backbone.layers.load_state_dict(dogs["weights"])
    early, late = dogs["early_and_late"](backbone)
    with torch.no_grad():
        maps = early(backbone.scaled(pictures))
        features = late(maps)
    given = (maps, features, labels, dogs["weights"], "efficientnet-lite0")
    few = {"few": 48, "epochs": 1}

    def found(rate):
        run = (0, rate, 8, warm_up)
        return [dogs["train_deep"](run, by, *given, **few) for by in ("choosing", "judging")]

    usual = found(0.001)
    assert min(usual) > 0.5, usual
    assert found(0.001) == usual
    # a rate at which the later layers are spoilt: they are trained, not the head alone
    assert found(10.0) != usual


def test_wilsons_interval_covers_as_often_as_it_says(dogs):
    draw = np.random.default_rng(0)
    for share in (0.75, 0.99):
        right = draw.binomial(315, share, 500)
        intervals = [dogs["wilson"](each, 315) for each in right]
        covered = np.mean([low <= share <= high for low, high in intervals])
        assert 0.91 < covered < 0.99
    low, high = dogs["wilson"](315, 315)
    assert 0.98 < low < 1 and high == pytest.approx(1)


# The time of a step


def test_steps_are_measured_in_every_way_and_their_buckets_are_counted(dogs):
    pictures = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    ways = ("1 rank", "2, not averaging", "2, DDP", "2, DDP, small buckets")
    rows, (spans, small) = on_two_ranks(
        dogs,
        dogs["measured_steps"],
        pictures=pictures,
        labels=torch.arange(4) % 3,
        backbone="efficientnet-lite0",
        weights=dogs["weights"],
        ways=ways,
        batches=[2, 4],
        repeats=2,
    )
    assert len(rows) == 2 * 2 * 4 and all(row[-1] > 0 for row in rows)
    net = dogs["Classifier"]("efficientnet-lite0", 3)
    expected = sum(each.numel() * 4 for each in net.parameters())
    for everyones in (spans, small):
        for parts in everyones:
            assert sum(size for *_, size in parts) == expected
            assert {"forward", "backward", "update"} <= {what for what, *_ in parts}
            assert all(begin <= end for _, begin, end, _ in parts)
    assert len(small[0]) > len(spans[0]) > 3


# The museum, and the proofs


@pytest.mark.parametrize("batch_norm_learns", [True, False])
def test_a_frozen_backbone_whose_batch_norm_learns_is_caught(dogs, batch_norm_learns):
    pictures = torch.stack(
        [image for image, _ in dogs["images"].__getitems__(range(0, 1_500, 100))]
    )
    features = on_two_ranks(
        dogs,
        dogs["train_on_frozen"],
        weights=dogs["weights"],
        pictures=pictures,
        labels=torch.arange(15) % 10,
        batch_norm_learns=batch_norm_learns,
    )
    with (
        pytest.raises(AssertionError, match="features moved")
        if batch_norm_learns
        else contextlib.nullcontext()
    ):
        dogs["check_frozen"](*features)


@pytest.mark.parametrize("judge_by", ["validation_loss", "loss_of_all_ranks"])
def test_a_plateau_of_the_local_loss_is_caught(dogs, table, judge_by):
    everyones = on_two_ranks(dogs, dogs["train_head"], **table, epochs=20, judge_by=dogs[judge_by])
    assert everyones[0][0][-1] < 0.05, "the learning rate should have been lowered"
    with (
        pytest.raises(AssertionError, match="other rates|replicas differ")
        if judge_by == "validation_loss"
        else contextlib.nullcontext()
    ):
        dogs["check_one_model"](everyones)


@pytest.mark.parametrize("seeded", [True, False])
def test_a_split_that_every_rank_draws_for_itself_is_caught(dogs, seeded):
    everyones = on_two_ranks(dogs, dogs["splits"], targets=dogs["images"].targets, seeded=seeded)
    with (
        contextlib.nullcontext()
        if seeded
        else pytest.raises(AssertionError, match="are trained on by some rank")
    ):
        dogs["check_split"](everyones)


def test_a_comparison_at_equal_steps_is_caught(dogs):
    dogs["check_comparable"]({"1 rank": 640, "2 ranks": 640})
    with pytest.raises(AssertionError, match="1 rank: 640, 2 ranks: 1,280"):
        dogs["check_comparable"]({"1 rank": 640, "2 ranks": 1_280})


# The training function


def test_learning_rates_start_at_that_of_one_rank_and_grow_with_the_batch(dogs):
    optimizer, ramp = dogs["optimizer_and_ramp"](
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1}], scale=4, steps=3
    )
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        ramp.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_a_division_takes_a_fifth_of_each_breed_and_no_more_images_than_asked_for(dogs):
    targets = [0] * 50 + [1] * 10 + [2] * 7
    training, held_out = dogs["divide"](targets, 10, 0)
    assert not set(training) & set(held_out)
    assert np.bincount(np.array(targets)[training]).tolist() == [8, 8, 6]
    assert np.bincount(np.array(targets)[held_out]).tolist() == [2, 2, 1]
    assert sorted(np.concatenate(dogs["divide"](targets, 0, 0))) == list(range(67))


def evaluate_by_table(evaluate, scores, labels):
    samples = torch.utils.data.TensorDataset(scores, labels)
    return evaluate(lambda batch: batch, samples, torch.device("cpu"))


@pytest.mark.parametrize("count", [1, 7, 203])
def test_an_evaluation_on_two_ranks_is_that_of_one_process(dogs, by_value, count):
    scores, labels = torch.randn(count, 5), torch.arange(count) % 5
    loss, accuracy = on_two_ranks(
        dogs, evaluate_by_table, evaluate=dogs["evaluate"], scores=scores, labels=labels
    )
    assert loss == pytest.approx(
        torch.nn.functional.cross_entropy(scores, labels).item(), rel=1e-5
    )
    assert accuracy == pytest.approx((scores.argmax(1) == labels).float().mean().item())


@pytest.fixture(scope="module")
def kennel(dogs, tmp_path_factory):
    """A folder of 60 drawn dogs of three breeds."""
    folder = tmp_path_factory.mktemp("kennel")
    for path in [
        path
        for breed in ("beagle", "poodle", "pug")
        for path in sorted((Path(dogs["dataset"].path) / breed).iterdir())[:20]
    ]:
        (folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, folder / path.parent.name)
    return folder


def arguments(dogs, kennel, **changes):
    return {
        "reading": {"url": str(kennel), "size": 64, "cache": "memory"},
        "images_per_breed": 0,
        "backbone": "efficientnet-lite0",
        "weights": dogs["weights"],
        "head_epochs": 2,
        "epochs": 1,
        "batch_size": 8,
        "grow_batch": False,
        "learning_rate": 0.003,
        "warm_up": 0,
        "seed": 0,
        **changes,
    }


def test_the_best_weights_survive_a_kill_in_either_phase(dogs, kennel, tmp_path):
    undisturbed = ddp.launch(dogs["client"], dogs["train"], **arguments(dogs, kennel), workers=2)
    for step in (8, 15):  # of 6 an epoch: the head phase has 12
        dies = ddp.inject(
            dogs["train"], "SIGKILL", rank=1, step=step, mark=tmp_path / f"struck-{step}"
        )
        killed = ddp.launch(dogs["client"], dies, **arguments(dogs, kennel), workers=2, restarts=1)
        assert killed.failures[0].rank == 1
        for name, weights in undisturbed.result.items():
            assert torch.equal(weights, killed.result[name]), (
                f"killed at step {step}: {name} differs"
            )


def test_the_best_weights_are_those_with_the_lowest_validation_loss(dogs):
    best, model = dogs["Best"](), torch.nn.Linear(1, 1)
    for loss, value in ((3.0, 1.0), (1.0, 2.0), (2.0, 3.0)):
        torch.nn.init.constant_(model.weight, value)
        best.keep(loss, model)
    restored = dogs["Best"]()
    restored.load_state_dict(best.state_dict())
    assert (restored.loss, restored.weights["weight"].item()) == (1.0, 2.0)


def test_a_growing_batch_takes_fewer_steps_for_the_same_samples(dogs, kennel):
    steps = {}
    for grow in (False, True):
        metrics = ddp.launch(
            dogs["client"],
            dogs["train"],
            **arguments(dogs, kennel, epochs=0, grow_batch=grow),
            workers=2,
        ).metrics
        assert metrics["samples"].max() == 2 * 48
        steps[grow] = metrics["step"].max()
    assert steps == {False: 12, True: 6}


# From the command line


def make_run(tmp_path, words, **variables):
    command = [sys.executable, "-m", "ddp_common", "run", "dogs", "--workers", "2", "--set", words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(tmp_path / "runs") | variables,
        capture_output=True,
        text=True,
    )


def metrics_of(tmp_path):
    (path,) = (tmp_path / "runs" / "dogs").glob("*/metrics.jsonl")
    return pd.DataFrame(map(json.loads, path.read_text().splitlines())).sort_values(
        ["step", "rank"]
    )


def test_a_run_on_a_folder_of_ones_own_leaves_the_best_model(dogs, kennel, tmp_path):
    done = make_run(tmp_path, f"data={kennel} head_epochs=1 epochs=1 batch_size=8")
    assert done.returncode == 0, done.stderr
    assert "backbone efficientnet-lite0, weights from ImageNet" in done.stdout
    (folder,) = (tmp_path / "runs" / "dogs").iterdir()
    assert {"best.pt", "curves.png", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    net = dogs["Classifier"]("efficientnet-lite0", 3)
    net.load_state_dict(torch.load(folder / "best.pt", weights_only=True))


def test_a_run_reads_from_object_storage(dogs, kennel, tmp_path, endpoint, monkeypatch):
    access = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for key, value in access.items():
        monkeypatch.setenv(key, value)
    import boto3

    store = boto3.client("s3")
    store.create_bucket(Bucket="kennel")
    for path in kennel.glob("*/*"):
        store.upload_file(str(path), "kennel", f"dogs/{path.parent.name}/{path.name}")
    losses = []
    for place in (kennel, "s3://kennel/dogs"):
        folder = tmp_path / str(len(losses))
        done = make_run(folder, f"data={place} head_epochs=2 epochs=0 batch_size=8", **access)
        assert done.returncode == 0, done.stderr
        losses.append(metrics_of(folder)["head_loss"].dropna().tolist())
    assert len(losses[0]) == 2 * 12 and losses[0] == losses[1]


def one_class(folder, kennel):
    shutil.copytree(kennel / "pug", folder / "pug")


def no_image(folder, kennel):
    (folder / "pug").mkdir()
    (folder / "pug" / "notes.txt").write_text("good dog")


@pytest.mark.parametrize(
    "fill, said", [(one_class, "holds only the class 'pug'"), (no_image, "holds no image")]
)
def test_a_folder_that_is_no_data_set_is_refused_in_one_message(kennel, tmp_path, fill, said):
    folder = tmp_path / "folder"
    folder.mkdir()
    fill(folder, kennel)
    done = make_run(tmp_path, f"data={folder}")
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "backbone=resnet5",
            "There is no backbone 'resnet5'. There is: efficientnet-lite0, resnet50.",
        ),
        ("backbone=resnet50", "are not in torch's cache"),
        ("backbone=resnet50 download=True", "did not come from https://download.pytorch.org"),
        ("data=/nowhere", "There is no file /nowhere"),
        ("epochs=0 pretrained=False", "Nothing to train"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_message(tmp_path, words, said):
    nowhere = {
        "TORCH_HOME": str(tmp_path / "torch"),
        "https_proxy": "http://127.0.0.1:9",
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    done = make_run(tmp_path, words, **nowhere)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )


def test_weights_that_are_damaged_are_refused(dogs, tmp_path, monkeypatch):
    monkeypatch.setitem(dogs["WEIGHTS"], "resnet50", (tmp_path / "resnet50.pth", "11ad3fa6", None))
    (tmp_path / "resnet50.pth").write_bytes(b"half a file")
    with pytest.raises(ddp.Error, match="is damaged"):
        dogs["imagenet_weights"]("resnet50")


def test_resnet50_gives_features_of_its_width(dogs):
    backbone = dogs["Backbone"]("resnet50").eval()
    with torch.no_grad():
        assert (
            backbone(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape
            == (2, backbone.width)
            == (2, 2_048)
        )


# Photographs

PHOTOS = Path(os.environ.get("DDP_DATA", "/nowhere"), "dogs", "tiny-imagenet-64px")


@pytest.mark.skipif(
    not PHOTOS.is_dir(), reason="DDP_DATA names no folder with photographs of dogs"
)
def test_photographs_of_six_breeds_are_told_apart_with_a_pretrained_backbone(tmp_path):
    """On frozen features; all 3,000 photographs take longer.

    Of the 600 here, 120 are held out. With this seed 87 % of them were right, with two others 75
    and 78 %; from scratch 17 %, as by chance.
    """
    accuracy = {}
    for name, words in {
        "ImageNet": "size=160 head_epochs=5 epochs=0",
        "scratch": "pretrained=False epochs=2",
    }.items():
        done = make_run(tmp_path / name, f"data={PHOTOS} {words}")
        assert done.returncode == 0, done.stderr
        accuracy[name] = metrics_of(tmp_path / name)["validation_accuracy"].max()
    assert accuracy["ImageNet"] >= 0.75 and accuracy["scratch"] < 0.45, accuracy


AERIAL = Path(os.environ.get("DDP_DATA", "/nowhere"), "ucmerced", "rsscn7_subset")


@pytest.mark.skipif(
    not AERIAL.is_dir(),
    reason="DDP_DATA names no folder with ucmerced/rsscn7_subset, real aerial scenes",
)
def test_real_aerial_scenes_of_seven_classes_are_told_apart_by_a_head_on_features_of_imagenet(
    tmp_path,
):
    """140 photographs to learn from, 35 held out.

    Over three seeds 77 % were right, from 66 to 86 %. From scratch it is about 60 %.
    """
    done = make_run(
        tmp_path / "aerial",
        f"data={AERIAL} size=160 head_epochs=15 epochs=0 images_per_breed=0 seed=1",
    )
    assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path / "aerial")["validation_accuracy"].max() > 0.6
