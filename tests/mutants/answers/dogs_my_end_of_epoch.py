"""Answers to exercise C of `dogs`: the end of an epoch, repaired."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_common as ddp


def totals_of(model, inputs, labels, rows):
    """The sum of the loss, of right answers, and the number of rows."""
    with torch.no_grad():
        scores = model(inputs[rows])
    loss = F.cross_entropy(scores, labels[rows], reduction="sum")
    return torch.stack([loss, (scores.argmax(1) == labels[rows]).sum(), torch.tensor(len(rows))])


def own_rows(held_out):
    return held_out[dist.get_rank() :: dist.get_world_size()]


def repaired(*, rows=own_rows, used=None, net=lambda model: model, form=tuple, local=False):
    """An end of an epoch that may be wrong in one thing."""

    def answer(model, inputs, labels, training, held_out, plateau):
        mine = rows(held_out if used is None else training)
        totals = totals_of(net(model), inputs, labels, mine)
        if not local:
            dist.all_reduce(totals)
        loss, accuracy = totals[0] / totals[2], totals[1] / totals[2]
        plateau.step(loss)
        return form((loss.item(), accuracy.item()))

    return answer


def image_by_image(model):
    return lambda images: torch.stack([*map(model, images)])


def with_a_loader(model, inputs, labels, training, held_out, plateau):
    """A sampler of torch repeats images; their number is cut off."""
    ours = own_rows(held_out)
    totals = torch.zeros(3)
    for (rows,) in DataLoader(TensorDataset(ours), batch_size=32):
        totals += totals_of(model, inputs, labels, rows)
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    plateau.step(loss / count)
    return loss / count, right / count


def with_objects(model, inputs, labels, training, held_out, plateau):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, totals_of(model, inputs, labels, own_rows(held_out)))
    loss, right, count = sum(every).tolist()
    plateau.step(loss / count)
    return {"loss": loss / count, "accuracy": right / count}


def in_blocks(model, inputs, labels, training, held_out, plateau):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    begin, end = len(held_out) * rank // ranks, len(held_out) * (rank + 1) // ranks
    totals = totals_of(model, inputs, labels, held_out[begin:end])
    dist.all_reduce(totals)
    plateau.step((totals[0] / totals[2]).item())
    return totals[0] / totals[2], totals[1] / totals[2]


def mean_of_means(model, inputs, labels, training, held_out, plateau):
    totals = totals_of(model, inputs, labels, own_rows(held_out))
    means = totals / totals[2]
    dist.all_reduce(means)
    loss, accuracy = (means[:2] / dist.get_world_size()).tolist()
    plateau.step(loss)
    return loss, accuracy


def mean_of_accuracies(model, inputs, labels, training, held_out, plateau):
    totals = totals_of(model, inputs, labels, own_rows(held_out))
    share = totals[1] / totals[2]
    dist.all_reduce(totals)
    dist.all_reduce(share)
    plateau.step((totals[0] / totals[2]).item())
    return (totals[0] / totals[2]).item(), share.item() / dist.get_world_size()


def mean_of_the_batches(model, inputs, labels, training, held_out, plateau):
    means = [
        totals_of(model, inputs, labels, held_out[b]) for b in ddp.EvalSampler(len(held_out), 100)
    ]
    means = torch.stack([each / each[2] for each in means]).mean(0)
    counts = torch.tensor(len(own_rows(held_out)))
    totals = means * counts
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    plateau.step(loss / count)
    return loss / count, right / count


def own_loss_for_the_rate(model, inputs, labels, training, held_out, plateau):
    totals = totals_of(model, inputs, labels, own_rows(held_out))
    plateau.step((totals[0] / totals[2]).item())
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def stepped_twice(model, inputs, labels, training, held_out, plateau):
    found = repaired()(model, inputs, labels, training, held_out, plateau)
    plateau.step(found[0])
    return found


def stepped_on_rank_0(model, inputs, labels, training, held_out, plateau):
    totals = totals_of(model, inputs, labels, own_rows(held_out))
    dist.all_reduce(totals)
    loss, accuracy = (totals[:2] / totals[2]).tolist()
    if dist.get_rank() == 0:
        plateau.step(loss)
    return loss, accuracy


def with_the_accuracy(model, inputs, labels, training, held_out, plateau):
    totals = totals_of(model, inputs, labels, own_rows(held_out))
    dist.all_reduce(totals)
    loss, accuracy = (totals[:2] / totals[2]).tolist()
    plateau.step(accuracy)
    return loss, accuracy


def rank_0_returns(model, *given):
    found = repaired()(model, *given)
    return found if dist.get_rank() == 0 else None


def padded(held_out):
    rest = -len(held_out) % dist.get_world_size()
    return own_rows(torch.cat([held_out, held_out[:rest]]))


def rank_0_all_others_a_share(model, inputs, labels, training, held_out, plateau):
    mine = held_out if dist.get_rank() == 0 else own_rows(held_out)
    totals = totals_of(model, inputs, labels, mine) * (dist.get_rank() == 0)
    dist.all_reduce(totals)
    plateau.step((totals[0] / totals[2]).item())
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def trains_on_them(model, inputs, labels, training, held_out, plateau):
    found = repaired()(model, inputs, labels, training, held_out, plateau)
    with torch.no_grad():
        model.weight += 0.01
    return found


def evaluates(model, inputs, labels, training, held_out, plateau):
    loss, accuracy = evaluate(model, inputs, labels, held_out)  # noqa: F821
    plateau.step(loss)
    return loss, accuracy


def with_torchs_sampler(model, inputs, labels, training, held_out, plateau):
    sampler = DistributedSampler(TensorDataset(held_out), shuffle=False)
    totals = totals_of(model, inputs, labels, held_out[list(sampler)])
    dist.all_reduce(totals)
    plateau.step((totals[0] / totals[2]).item())
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


REDUCE = "    dist.all_reduce(totals)\n"
COUNT = "        totals[2] += len(rows)\n"
RIGHT_LINE = "        totals[1] += (scores.argmax(1) == labels[rows]).sum()\n"
LOSS_LINE = 'totals[0] += F.cross_entropy(scores, labels[rows], reduction="sum")'
LOOP = "    for batch in ddp.EvalSampler(len(held_out), 100):\n"
RETURN = "    return loss / count, right / count"
RIGHT = {
    "own rows": repaired(),
    "a list, rounded": repaired(form=lambda pair: [round(each, 3) for each in pair]),
    "a tensor": repaired(form=torch.tensor),
    "a dict": repaired(form=lambda pair: {"accuracy": pair[1], "loss": pair[0]}),
    "image by image": repaired(net=image_by_image),
    "a loader": with_a_loader,
    "objects": with_objects,
    "blocks": in_blocks,
    "batches of 7": [("(len(held_out), 100)", "(len(held_out), 7)")],
    "one batch": [("(len(held_out), 100)", "(len(held_out), len(held_out))")],
    "the mean, times the rows": [
        (LOSS_LINE, "totals[0] += len(rows) * F.cross_entropy(scores, labels[rows])")
    ],
}
ALL = "Which of them count|mean over all held-out|several batches|counts twice|weigh|speak of|each rank"
WRONG = {
    "training rows": (repaired(used="training"), "Which images does your loop see"),
    "own sums": (repaired(local=True), "What is the rate of each rank"),
    "all rows on each": (repaired(rows=lambda held_out: held_out, local=True), "more than once"),
    "all rows on each, summed": (repaired(rows=lambda held_out: held_out), "more than once"),
    "every second": (
        repaired(rows=lambda held_out: held_out[dist.get_rank() % 2 :: 2]),
        "more than once|mean over|count|weigh",
    ),
    "halves": (
        repaired(rows=lambda h: h[: len(h) // 2] if dist.get_rank() == 0 else h[len(h) // 2 :]),
        "more than once|mean over|count|twice|weigh",
    ),
    "padded": (repaired(rows=padded), "counts twice"),
    "torch's sampler": (with_torchs_sampler, "counts twice"),
    "own loss for the rate": (own_loss_for_the_rate, "What is the rate of each rank"),
    "mean of means": (mean_of_means, "What does each image weigh"),
    "mean of accuracies": (mean_of_accuracies, "mean over all held-out images"),
    "mean of the batches": (mean_of_the_batches, ALL),
    "stepped twice": (stepped_twice, "When may the rate be lowered"),
    "stepped on rank 0": (stepped_on_rank_0, "When may the rate be lowered"),
    "the accuracy for the rate": (with_the_accuracy, "decides whether the rate"),
    "rank 0 returns": (rank_0_returns, "Does every rank return two numbers"),
    "rank 0 all, others a share": (rank_0_all_others_a_share, "more than once"),
    "trains on them": (trains_on_them, "Does validation train"),
    "evaluate": (evaluates, "How does `evaluate` end"),
    "the first batch": ([(COUNT, COUNT + "        break\n")], ALL),
    "reduced in the loop": ([(REDUCE, ""), (COUNT, COUNT + "    " + REDUCE)], r"\?"),
    "= for += in the loss": ([("totals[0] +=", "totals[0] =")], ALL),
    "= for += in the count": ([("totals[2] +=", "totals[2] =")], ALL),
    "= for += in the right ones": ([("totals[1] +=", "totals[1] =")], ALL),
    "counted after the loop": (
        [(COUNT, ""), (REDUCE, "    totals[2] += len(rows)\n" + REDUCE)],
        ALL,
    ),
    "right ones after the loop": (
        [(RIGHT_LINE, ""), (REDUCE, RIGHT_LINE[4:] + REDUCE)],
        ALL,
    ),
    "sums begin again": (
        [
            ("    totals = torch.zeros(3, device=inputs.device)\n", ""),
            (LOOP, LOOP + "        totals = torch.zeros(3)\n"),
        ],
        ALL,
    ),
    "returned in the loop": (
        [
            (REDUCE, ""),
            (
                "    loss, right, count",
                "        dist.all_reduce(totals)\n        loss, right, count",
            ),
            ("    plateau.step", "        plateau.step"),
            (RETURN, "    " + RETURN),
        ],
        ALL,
    ),
    "the means summed": ([(', reduction="sum")', ")")], ALL),
    "the largest": (
        [("dist.all_reduce(totals)", "dist.all_reduce(totals, op=dist.ReduceOp.MAX)")],
        ALL,
    ),
    "averaged for two": ([(REDUCE, REDUCE + "    totals[2] *= dist.get_world_size() / 2\n")], ALL),
    "the count of all": ([(COUNT, ""), (REDUCE, REDUCE + "    totals[2] = 7\n")], ALL),
    "the sum for the rate": (
        [("plateau.step(loss / count)", "plateau.step(loss)")],
        "decides whether",
    ),
    "the other way round": ([(RETURN, "    return right / count, loss / count")], r"\?"),
}
EQUIVALENT = {
    "line 4: torch.zeros(3, device=inputs.device) → torch.zeros(3)": "the same where there is no GPU",
    "line 5: 100 → 101": "another size of the batches",
}
IN_TESTS = ["blocks", "= for += in the loss", "mean of the batches", "halves"]
