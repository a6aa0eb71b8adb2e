"""The exercises of `mnist` judge rightly, and digits of one's own are checked."""

import gzip

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tutorials_here import ROOT, assert_judged, judged, names_of

import ddp_common as ddp

SOLUTIONS = ROOT / "tutorials" / "scripts" / "solutions"


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    with names_of("mnist", tmp_path_factory.mktemp("runs")) as names:
        yield names


# The weights of rank 0


def broadcast_of_a_whole_vector(model):
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.broadcast(weights, src=0)
    torch.nn.utils.vector_to_parameters(weights, model.parameters())


def only_rank_0_calls(model):
    if ddp.rank() == 0:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def divides_by_zero(model):
    return 1 / (ddp.rank() - ddp.rank())


def test_an_answer_that_raises_on_a_rank_is_shown_in_words(mnist, capsys):
    said = judged(mnist, "check_broadcast", divides_by_zero, capsys)
    assert said.startswith("not yet") and "ZeroDivisionError" in said
    assert "Traceback" not in said


# The port of a script, and the repair of one

SET_EPOCH = "        sampler.set_epoch(epoch)\n"
SAVE = """    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
"""
SAVE_OTHERWISE = """    if dist.get_rank() == 0:
        with open("model.pt", "wb") as file:
            torch.save(obj=model.module.state_dict(), f=file)
"""
SUM = """        dist.all_reduce(total)  # all ranks call it
        if rank == 0:
            print(f"epoch {epoch}: mean loss {total / STEPS / world_size:.4f}")
"""
SUM_OTHERWISE = """        everyones = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(everyones, total / STEPS)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {torch.stack(everyones).mean():.4f}")
"""
NOT_REPAIRED = SUM.replace(
    "        dist.all_reduce(total)  # all ranks call it\n        if rank == 0:\n",
    "        if rank == 0:\n            dist.all_reduce(total)\n",
)


def changed(solution, path, old, new):
    """Write a solution in which something is replaced, and return its path."""
    source = (SOLUTIONS / solution).read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    return path


def test_the_port_and_the_repair_of_a_script_are_judged(mnist, tmp_path, capsys):
    port = changed("plain_loop.py", tmp_path / "port.py", SAVE, SAVE_OTHERWISE)
    same_order = changed("plain_loop.py", tmp_path / "same.py", SET_EPOCH, "")
    question = "Who tells it the epoch"
    assert_judged(mnist, capsys, "check_port", lambda: str(port), lambda: same_order, question)
    repair = changed("broken_loop.py", tmp_path / "repair.py", SUM, SUM_OTHERWISE)
    broken = changed("broken_loop.py", tmp_path / "broken.py", SUM, NOT_REPAIRED)
    answers = [lambda: ("B", repair), lambda: ("B", broken)]
    assert_judged(mnist, capsys, "check_diagnosis", *answers, "Under which `if`")


# One averaging for several parts


def switch_by_hand(model, parts):
    """DDP averages where `require_backward_grad_sync` is true, which `no_sync` switches."""
    for number, part in enumerate(parts):
        model.require_backward_grad_sync = number == len(parts) - 1
        (F.mse_loss(model(part), part) / len(parts)).backward()


def average_after_every_part(model, parts):
    for part in parts:
        (F.mse_loss(model(part), part) / len(parts)).backward()


@pytest.mark.parametrize(
    ("check", "right", "wrong", "question"),
    [
        (
            "check_broadcast",
            broadcast_of_a_whole_vector,
            only_rank_0_calls,
            "Does every rank make the same calls",
        ),
        ("check_accumulation", switch_by_hand, average_after_every_part, "outside of no_sync()"),
    ],
)
def test_calls_on_ranks_are_judged(mnist, capsys, check, right, wrong, question):
    assert_judged(mnist, capsys, check, right, wrong, question)


# Digits of one's own


def write_idx(path, array):
    sizes = b"".join(length.to_bytes(4) for length in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


@pytest.mark.parametrize(
    ("parts", "read"),
    [({"digits": 50}, [45, 45, 5, 5]), ({"train": 30, "t10k": 20}, [30, 30, 20, 20])],
)
def test_digits_of_ones_own_come_with_a_test_set_or_a_tenth_is_held_out(
    mnist, tmp_path, parts, read
):
    for part, count in parts.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    assert [len(tensor) for tensor in mnist["read_digits"](tmp_path)] == read


def test_digits_without_a_label_each_are_refused(mnist, tmp_path):
    write_idx(tmp_path / "digits-images-idx3-ubyte.gz", np.zeros((5, 28, 28), np.uint8))
    write_idx(tmp_path / "digits-labels-idx1-ubyte.gz", np.zeros(4, np.uint8))
    with pytest.raises(ddp.Error, match="not digits of 28 x 28 with one label each"):
        mnist["read_digits"](tmp_path)
