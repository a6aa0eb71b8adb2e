"""The checks of `gpt` judge rightly, its traces and counts are right, and it runs as a job."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from tutorials_here import make_run, names_of

import ddp_common as ddp
from tutorials import gpt_steps as steps
from tutorials.checks import gpt as checks
from tutorials.checks.common import Wrong

ON_TWO = {"workers": 2, "directory": False}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    with names_of("gpt", tmp_path_factory.mktemp("runs")) as names:
        yield names


def untouched(*_):
    """A student's copy before anything is written."""
    ...


# Exercise A: buckets


@pytest.fixture(scope="module")
def counted(gpt):
    """What the ranks of `checks.buckets` count: once, for all answers."""
    given = {"model": gpt["GPT"], "rows": gpt["windows"][:2]}
    cases = {"caps": (1, 5, 25), "chains": checks.CHAINS}
    return ddp.launch(gpt["client"], checks._count_buckets, **given, **cases, **ON_TWO)


@pytest.fixture
def judged_buckets(gpt, counted, monkeypatch):
    monkeypatch.setattr(ddp, "launch", lambda *_, **__: counted)
    return partial(checks.buckets, client=None, model=gpt["GPT"], rows=None)


def with_a_list(sizes, bucket_cap_mb):
    buckets = [[]]
    for size in sizes[::-1]:
        buckets[-1].append(size)
        if sum(buckets[-1]) >= bucket_cap_mb * 1024 * 1024:
            buckets.append([])
    return len([bucket for bucket in buckets if bucket])


def that_pops(sizes, bucket_cap_mb):
    buckets = 0
    while sizes:
        room = bucket_cap_mb * 2**20
        while sizes and room > 0:
            room -= sizes.pop()
        buckets += 1
    return buckets


def with_numpy(sizes, bucket_cap_mb):
    filled = np.float64(0)
    count = np.int64(0)
    for size in np.array(sizes)[::-1]:
        filled += size / 2**20
        if filled >= bucket_cap_mb:
            count, filled = count + 1, 0
    return count + int(filled > 0)


@pytest.mark.parametrize(
    "answer",
    [with_a_list, that_pops, with_numpy, lambda *given: torch.tensor(with_a_list(*given))],
    ids=["a list", "it empties its list", "numpy", "a tensor"],
)
def test_a_right_number_of_buckets_is_accepted_in_any_form(judged_buckets, answer):
    assert "13 with 1, 3 with 5, 1 with 25" in judged_buckets(answer)


def greedy(sizes, limit, *, last=True, strict=False):
    count, filled = 0, 0
    for size in sizes:
        filled += size
        if filled > limit or (filled == limit and not strict):
            count, filled = count + 1, 0
    return count + (last and filled > 0)


def with_a_rest(rest):
    """Buckets of which the next one does not begin empty."""

    def answer(sizes, cap):
        count, filled = 0, 0
        for size in reversed(sizes):
            filled += size
            if filled >= cap * 2**20:
                count, filled = count + 1, rest(filled, size, cap * 2**20)
        return count + (filled > 0)

    return answer


def closed_before(sizes, cap):
    count, filled = 1, 0
    for size in reversed(sizes):
        if filled and filled + size > cap * 2**20:
            count, filled = count + 1, 0
        filled += size
    return count


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (untouched, checks.NOTHING),
        (lambda sizes, cap: ..., checks.NOTHING),
        (lambda sizes, cap: "13", "What does your function return"),
        (lambda sizes, cap: [1, 2, 3], "What does your function return"),
        (lambda sizes, cap: True, "What does your function return"),
        (lambda sizes, cap: math.nan, "What does your function return"),
        (lambda sizes, cap: math.ceil(sum(sizes) / cap / 2**20), "middle of a parameter"),
        (lambda sizes, cap: greedy(sizes, cap * 2**20), "ready first"),
        (lambda sizes, cap: greedy(sizes[::-1], cap * 2**20, last=False), "last full bucket"),
        (lambda sizes, cap: greedy(sizes[::-1], cap * 2**20, last=False) + 1, "is left"),
        (with_a_rest(lambda filled, size, limit: filled - limit), "that has just begun"),
        (with_a_rest(lambda filled, size, limit: size), "that has just begun"),
        (closed_before, "before it would be too large"),
        (lambda sizes, cap: greedy(sizes[::-1], cap * 10**6), "How many bytes has a MiB"),
        (lambda sizes, cap: greedy(sizes[::-1], cap * 2**20, strict=True), "full exactly"),
        (lambda sizes, cap: {1: 13, 2: 7, 5: 3, 25: 1}[cap], "buckets of parameters"),
        (lambda sizes, cap: len(sizes), "close a bucket"),
    ],
)
def test_a_wrong_number_of_buckets_is_refused_with_a_question(judged_buckets, answer, question):
    with pytest.raises(Wrong, match=question):
        judged_buckets(answer)


# Exercise B: four slow runs


def changes(**other):
    right = {
        "A": {"num_workers": 2},
        "B": {"average_every": 4},
        "C": {"log_rows": False},
        "D": {"batch_size": 32},
    }
    return lambda: {**right, **other}


@pytest.mark.parametrize(
    "answer",
    [
        changes(),
        changes(A={"num_workers": 4}, B={"batch_size": 64}, C={"log_rows": 0}),
        changes(B={"average_every": 16, "batch_size": 4}, D={"batch_size": 64}),
        changes(C={"log_rows": None}, A={**steps.PROGRAM, "num_workers": 3}),
        changes(A={"num_workers": np.int64(4)}, D={"batch_size": np.int64(32)}),
    ],
    ids=["as told", "other values", "a value that stays", "whole programs", "numpy"],
)
def test_each_remedy_of_a_slow_run_is_accepted(gpt, answer):
    said = checks.four_runs(answer, client=gpt["client"], windows=gpt["windows"])
    assert "times as fast" in said


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (untouched, checks.NOTHING),
        (lambda: [1, 2, 3, 4], "name of a setting"),
        (lambda: {"A": {"num_workers": 2}}, "no change of run B"),
        (lambda: changes()() | {"A": "num_workers=2"}, "run A: 'num_workers=2'"),
        (lambda: changes()() | {"A": ("num_workers", 2)}, "What does your function return"),
        (changes(A={"workers": 2}), "'workers'"),
        (changes(A={"num_workers": -1}), "whole number from 0"),
        (changes(A={"num_workers": 10**6}), "whole number from 0"),
        (changes(B={"average_every": 0}), "whole number from 1"),
        (changes(B={"average_every": 2.5}), "whole number from 1"),
        (changes(B={"average_every": 64}), "before DDP averages"),
        (changes(A={}), "0 changed settings"),
        (changes(C={"log_rows": True}), "0 changed settings"),
        (changes(C={"log_rows": False, "num_workers": 2}), "2 changed settings"),
        (changes(D={"batch_size": 64, "average_every": 4}), "2 changed settings"),
    ],
)
def test_what_is_not_one_change_is_refused_before_anything_runs(answer, question):
    with pytest.raises(Wrong) as refused:
        checks.four_runs(answer, client=None, windows=None)
    assert question in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (changes(A={"batch_size": 32}), "same time"),
        (changes(A={"average_every": 16}), "same time"),
        (changes(A={"num_workers": 1}), "same time"),
        (changes(B={"num_workers": 2}), "fewer of them"),
        (changes(C={"batch_size": 32}), "What does rank 1 do"),
        (changes(C={"average_every": 8}), "What does rank 1 do"),
        (changes(D={"log_rows": False}), "fewer steps"),
    ],
)
def test_a_change_that_leaves_the_reason_is_refused(gpt, answer, question):
    with pytest.raises(Wrong, match=question):
        checks.four_runs(answer, client=gpt["client"], windows=gpt["windows"])


# Exercise C: the bytes of a rank


def by_kind(parameters, ranks, way):
    kinds = {"parameter": 4, "gradient": 4, "mean": 4, "mean of squares": 4}
    if way == "DDP":
        kinds["bucket"] = 4
    return sum(kinds.values()) * parameters // (ranks if "FSDP" in way else 1)


def with_steps_of_adam(parameters, ranks, way):
    return by_kind(parameters, ranks, way) + 4 * 10  # a count for each tensor


@pytest.mark.parametrize(
    "answer",
    [
        by_kind,
        with_steps_of_adam,
        lambda n, ranks, way: n * {"DDP": 20, "DDP view": 16, "FSDP2": 16 / ranks}[way],
        lambda n, ranks, way: torch.tensor(float(by_kind(n, ranks, way))),
        lambda n, ranks, way: np.float32(by_kind(n, ranks, way)),
    ],
    ids=["by kind", "with Adam's counts", "a table", "a tensor", "numpy"],
)
def test_right_bytes_are_accepted_in_any_form(gpt, answer):
    said = checks.bytes_of_a_rank(answer, client=gpt["client"])
    assert "FSDP2    1.5, 12.0, 96.0" in said and "DDP      1.2, 1.2, 1.2" in said


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (untouched, checks.NOTHING),
        (lambda n, ranks, way: None, checks.NOTHING),
        (lambda n, ranks, way: f"{20 * n}", "What does your function return"),
        (lambda n, ranks, way: 16 * n, "four kinds"),  # no buckets
        (lambda n, ranks, way: 4 * n, "four kinds"),  # no optimizer
        (lambda n, ranks, way: by_kind(n, ranks, way) / 2**20, "four kinds"),  # MiB
        (lambda n, ranks, way: by_kind(n, ranks, "DDP") / ranks, "four kinds"),  # all sharded
        (lambda n, ranks, way: 20 * n if "DDP" in way else 16 * n / ranks, "counted twice"),
        (lambda n, ranks, way: by_kind(n, 1, way), "each rank hold"),  # nothing sharded
        (lambda n, ranks, way: by_kind(n, 2, way), "each rank hold"),  # always two ranks
        (
            lambda n, ranks, way: 4 * n + 12 * n / ranks if way == "FSDP2" else by_kind(n, 1, way),
            "each rank hold",
        ),  # parameters are whole
        (
            lambda n, ranks, way: 20 * n / ranks if way == "FSDP2" else by_kind(n, 1, way),
            "each rank hold",
        ),  # buckets too
    ],
)
def test_wrong_bytes_are_refused_with_a_question(gpt, answer, question):
    with pytest.raises(Wrong, match=question):
        checks.bytes_of_a_rank(answer, client=gpt["client"])


# Predictions


@pytest.mark.parametrize(
    ("said", "measured", "kind", "reply"),
    [
        (None, 1.4, "strong", "made no prediction"),
        (1.4, 1.41, "strong", "right"),
        ("1,4 times", 1.41, "strong", "right"),
        ((1, 4), 1.41, "strong", "right"),  # 1,4 without quotes
        ("140 %", 1.41, "strong", "right"),
        (np.float64(1.5), 1.41, "weak", "right"),
        (2, 1.4, "strong", "does not become half"),
        (2, 1.6, "weak", "on top of it"),
        (4, 1.6, "weak", "at most twice"),
        (0.5, 1.6, "weak", "beside computing"),
        (1.2, 1.8, "weak", "Behind what"),
        ("twice", 1.4, "strong", "as a number"),
    ],
)
def test_each_prediction_of_a_speed_up_has_its_reply(said, measured, kind, reply):
    assert reply in checks.prediction(f"{kind} scaling", said, measured)


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (None, "no prediction"),
        ("activations", "right"),
        (" Activation ", "right"),
        ("Adam", "does not depend on the batch"),
        ("adam's means", "does not depend on the batch"),
        ("Parameters", "no other kind is smaller"),
        ("gradients", "two numbers"),
        ("buckets", "second copy"),
        ("gradients and buckets", "which one"),
        (7, "which one"),
    ],
)
def test_each_prediction_of_the_largest_kind_has_its_reply(said, reply):
    assert reply in checks.prediction("memory", said)


# What the lesson measures


def test_a_trace_has_the_parts_of_a_step_in_their_order_and_counts_calls(gpt):
    options = {"windows": gpt["windows"], "batch_size": 4, **ON_TWO}
    ranks = ddp.launch(gpt["client"], gpt["measure"], bucket_cap_mb=5, **options).result
    for rank in ranks:
        computing = [span for span in rank.spans if span[0] != "sending"]
        computing.sort(key=lambda span: span[1])
        names = [what for what, *_ in computing]
        assert names == ["forward", "backward", "waiting", "optimizer"]
        ends = [end for *_, end in computing]
        assert all(begin < end for _, begin, end in rank.spans) and ends == sorted(ends)
        assert rank.calls == {"all_reduce": 3} and 0 <= rank.waiting < 1
    figure = steps.picture({"a step": ranks})
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_a_slow_network_averages_as_ddp_does_and_takes_its_time(gpt):
    options = {"windows": gpt["windows"], "batch_size": 4, **ON_TWO}
    network = steps.SlowNetwork(latency=0.02, per_mib=0.01)
    (slow, _), (own, _) = (
        ddp.launch(gpt["client"], gpt["measure"], **options, **more).result
        for more in ({"network": network, "bucket_cap_mb": 25}, {})
    )
    assert slow.loss == pytest.approx(own.loss, rel=1e-5)
    ((_, begin, end),) = [span for span in slow.spans if span[0] == "sending"]
    assert end - begin >= 0.02 + 0.01 * slow.held["parameters"] / 2**20


def test_accumulated_parts_are_averaged_once_and_give_the_same_loss(gpt):
    options = {"windows": gpt["windows"], "batch_size": 8, **ON_TWO}
    (once, _), (parts, _) = (
        ddp.launch(gpt["client"], gpt["measure"], parts=count, **options).result
        for count in (1, 2)
    )
    assert once.calls == parts.calls == {"all_reduce": 2}  # the first bucket has 1 MiB
    assert [what for what, *_ in parts.spans].count("backward") == 2


def test_sharded_ranks_hold_half_and_have_the_loss_of_ddp(gpt):
    options = {"windows": gpt["windows"], "batch_size": 4, **ON_TWO}
    whole, half = (
        ddp.launch(gpt["client"], gpt["measure"], wrap=wrap, **options).result
        for wrap in (nn.parallel.DistributedDataParallel, gpt["sharded"])
    )
    for kind, size in whole[0].held.items():
        assert [rank.held[kind] / size for rank in half] == pytest.approx([0.5] * 2, abs=1e-3)
    losses = [np.mean([rank.loss for rank in ranks]) for ranks in (whole, half)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bytes_that_two_tensors_share_count_once():
    tensor = torch.zeros(100)
    assert steps.nbytes([tensor, tensor[:10], tensor.view(10, 10)]) == 400
    assert steps.nbytes([tensor, torch.zeros(5)]) == 420


def test_a_name_that_the_model_cannot_read_is_refused(tmp_path):
    path = tmp_path / "names.csv"
    path.write_text("name,count\n" + "zoë,1\n" * 20)
    with pytest.raises(ddp.Error, match="'ë'.*alphabet"):
        steps.Names(path, 48, seed=0)


def test_windows_hold_every_token_once_and_the_one_before_them():
    windows = steps.windows_of(["luna"] * 20, 16)
    text = "".join(steps.ALPHABET[code] for code in windows[:, :-1].flatten())
    assert text == ("+luna" * 20)[: len(text)] and windows.shape == (6, 17)
    assert torch.equal(windows[1:, 0], windows[:-1, -1])


# `make run`


@pytest.mark.parametrize("cluster", ["local", "torchrun"])
def test_it_runs_on_the_command_line(cluster, tmp_path):
    done = make_run("gpt", tmp_path, "epochs=1 layers=1 batch_size=128", CLUSTER=cluster)
    assert done.returncode == 0, done.stderr
    assert "GPT 2." in done.stdout and "5-gram 2.26" in done.stdout
    (run,) = (tmp_path / "gpt").iterdir()
    assert (run / "loss.png").exists() and list((run / "checkpoints").glob("step-*.pt"))
