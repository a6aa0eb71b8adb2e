"""Answers to exercise C of `pets`: a training without its two faults."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import ddp_common as ddp


def training(
    data,
    seed,
    *,
    tell=lambda sampler, epoch: sampler.set_epoch(epoch),
    wrap=DDP,
    steps=lambda: True,
    result=lambda model: model.module.state_dict(),
    batches=None,
    loader=None,
):
    """The training of exercise C. What may be right or wrong in it is an argument."""
    torch.manual_seed(seed)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler, **(loader or {}))
    model = wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        tell(sampler, epoch)
        for x, y in loader if batches is None else batches(data, seed, epoch):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if steps():
                optimizer.step()
    return result(model)


def own_permutation(data, seed, epoch):
    generator = torch.Generator().manual_seed(1_000 * seed + epoch)
    mine = torch.randperm(len(data), generator=generator)[ddp.rank() :: 2].tolist()
    return DataLoader(Subset(data, mine), batch_size=4)


def rows_at_once(data, seed, epoch):
    generator = torch.Generator().manual_seed(1_000 * seed + epoch)
    mine = torch.randperm(len(data), generator=generator)[ddp.rank() :: 2]
    return [data[rows] for rows in mine.split(4)]


def with_elastic_sampler(data, seed):
    torch.manual_seed(seed)
    sampler = ddp.ElasticSampler(len(data), batch_size=8, seed=seed)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in sampler.epochs(3):
        for x, y in ddp.DataLoader(data, batch_sampler=sampler):
            loss = F.mse_loss(model(x), y) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.module.state_dict()


class Averaging(nn.Module):
    """A layer whose gradients are averaged by hand, in place of DDP."""

    def __init__(self, module, ranks=None):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_hook(partial(self.average, ranks=ranks))

    def average(self, gradient, ranks):
        dist.all_reduce(gradient)
        return gradient / (ranks or dist.get_world_size())

    def forward(self, x):
        return self.module(x)


def averaged_once_at_the_end(model):
    weights = model.state_dict()
    for value in weights.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return weights


def averaged_weights(data, seed):
    """The weights are averaged after each step: for SGD without momentum that is the same."""
    torch.manual_seed(seed)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            averaged_once_at_the_end(model)
    return model.state_dict()


def names_stripped(model):
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def names_cut(model):
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(
        state := model.state_dict(), "module."
    )
    return state


def not_told(sampler, epoch):
    pass


def plain(model):
    return model.state_dict()


RIGHT = {
    "as told": training,
    "another epoch number": partial(training, tell=lambda s, epoch: s.set_epoch(7 - epoch)),
    "names stripped": partial(training, result=names_stripped),
    "the plain model kept": partial(training, result=lambda m: dict(m.module.state_dict())),
    "own order": partial(training, batches=own_permutation),
    "rows at once": partial(training, batches=rows_at_once),
    "ElasticSampler": with_elastic_sampler,
    "averaged by hand": partial(training, wrap=Averaging),
    "averaged weights": averaged_weights,
    "a loader worker": partial(training, loader={"num_workers": 1}),
    "loader workers": partial(training, loader={"num_workers": 2, "persistent_workers": True}),
    "an update of names": partial(training, result=names_cut),
    "an own class": partial(
        training, result=lambda m: {k: v.clone() for k, v in m.module.state_dict().items()}
    ),
}
ALONE = {"wrap": lambda model: model, "result": plain}
WRONG = {
    "nothing repaired": (partial(training, tell=not_told, result=plain), "Whose state"),
    "the wrapper's state": (partial(training, result=plain), "Whose state"),
    "no epoch told": (partial(training, tell=not_told), "told, and when"),
    "another seed than the argument": (
        lambda data, seed: training(data, 0),
        "leave out or change",
    ),
    "one epoch told": (partial(training, tell=lambda s, _: s.set_epoch(1)), "told, and when"),
    "the seed of torch in its place": (
        partial(training, tell=lambda s, epoch: torch.manual_seed(epoch)),
        "told, and when",
    ),
    "an order for each rank": (
        partial(training, tell=lambda s, epoch: s.set_epoch(2 * epoch + ddp.rank())),
        "out of the same order",
    ),
    "all samples on both ranks": (
        partial(training, batches=lambda data, *_: DataLoader(data, batch_size=4, shuffle=True)),
        "out of the same order",
    ),
    "no shuffle": (
        partial(
            training,
            batches=lambda data, seed, epoch: DataLoader(
                Subset(data, range(ddp.rank(), len(data), 2)), batch_size=4
            ),
        ),
        "told, and when",
    ),
    "DDP removed": (partial(training, **ALONE), "averaged"),
    "DDP removed, no step": (
        partial(training, steps=lambda: False, **ALONE),
        "leave out or change",
    ),
    "summed by hand": (partial(training, wrap=partial(Averaging, ranks=1)), "leave out or change"),
    "averaged once in the end": (
        partial(training, wrap=lambda model: model, result=averaged_once_at_the_end),
        "leave out or change",
    ),
    "no rank steps": (partial(training, steps=lambda: False), "leave out or change"),
    "rank 0 alone steps": (partial(training, steps=lambda: ddp.rank() == 0), "take each step"),
    "a new model": (
        partial(training, result=lambda _: {"weight": torch.ones(1, 1), "bias": torch.ones(1)}),
        "that you trained",
    ),
    "the model": (partial(training, result=lambda model: model.module), "your function return"),
    "rank 0 alone returns": (
        partial(
            training, result=lambda model: model.module.state_dict() if ddp.rank() == 0 else None
        ),
        "rank 1 returns None",
    ),
    "no seed": ([("    torch.manual_seed(seed)\n", "")], "leave out or change"),
    "the seed 0": ([("torch.manual_seed(seed)", "torch.manual_seed(0)")], "leave out or change"),
    "a seed for each rank": (
        [
            ("torch.manual_seed(seed)", "torch.manual_seed(seed + dist.get_rank())"),
            ("    # your code\n", "    import torch.distributed as dist\n"),
        ],
        "",
    ),
    "seeded after the model": (
        [
            ("    torch.manual_seed(seed)\n", ""),
            ("    optimizer =", "    torch.manual_seed(seed)\n    optimizer ="),
        ],
        "leave out or change",
    ),
}
EQUIVALENT = {
    "line 12: F.mse_loss(model(x), y) → F.mse_loss(y, model(x))": "a squared difference has no order",
    "a seed for each rank": "DDP begins with the weights of rank 0, whose seed is the same",
}
IN_TESTS = ["averaged by hand", "DDP removed, no step", "no seed"]
