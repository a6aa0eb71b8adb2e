"""The checks of `gpt` judge rightly, its traces and counts are right, and it runs as a job."""

import numpy as np
import pytest
import torch
from torch import nn
from tutorials_here import make_run, names_of

import ddp_common as ddp
from tutorials import gpt_steps as steps
from tutorials.checks import gpt as checks

ON_TWO = {"workers": 2, "directory": False}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    with names_of("gpt", tmp_path_factory.mktemp("runs")) as names:
        yield names


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
