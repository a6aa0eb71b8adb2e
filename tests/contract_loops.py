"""Loops as people write them, that say by `checkpoint.step()` when a batch is done.

Each trains to the end, by `train(name)`, and gives all weights. Whatever ends it on the way, it
ends with the same weights, bit for bit, when it was started again.
"""

import contextlib
import random
import sys

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_common as ddp

SAMPLES, BATCH, EPOCHS = 70, 10, 3  # 7 steps an epoch
EVERY = 2  # calls of `step()` after which it is saved

LOOPS = {}


def loop(function):
    LOOPS[function.__name__] = function
    return function


class Training:
    """Data, and models that DDP wraps where there are ranks. `strike` is called in each batch."""

    def __init__(self, directory, strike):
        torch.manual_seed(0)
        self.x = torch.randn(SAMPLES, 4)
        self.y = self.x.square().sum(1, keepdim=True)
        self.directory = directory
        self.strike = strike
        self.sampler = ddp.ElasticSampler(SAMPLES, BATCH, seed=1)
        self.nets = []
        self.checkpoints = []

    def model(self):
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        self.nets.append(net)
        return DistributedDataParallel(net) if dist.is_initialized() else net

    def checkpoint(self, **parts):
        directory = None if dist.is_initialized() else self.directory
        made = ddp.Checkpoint(directory=directory, every_steps=EVERY, **parts)
        made.restore()
        self.checkpoints.append(made)
        return made

    def loss(self, model, rows, sampler=None, noise=0):
        weight = (sampler or self.sampler).weight
        return mse_loss(model(self.x[rows] + noise), self.y[rows]) * weight

    def loader(self, sampler, **options):
        return ddp.DataLoader(range(SAMPLES), batch_sampler=sampler, **options)


@loop
def gradients_added_up(training):
    """By three, with a leftover at the end of each epoch; with no_sync where there are ranks."""
    model = training.model()
    sampler = training.sampler
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint = training.checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    for epoch in sampler.epochs(EPOCHS):
        for rows in sampler.batches():
            is_last = sampler.step % 3 == 0 or sampler.step == len(sampler)
            holds_back = hasattr(model, "no_sync") and not is_last
            with model.no_sync() if holds_back else contextlib.nullcontext():
                training.loss(model, rows).backward()
            training.strike(sampler)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
        checkpoint.save()


@loop
def enumerated_batches_added_up(training):
    """The same as many scripts have it: by the number of the batch in its pass."""
    model = training.model()
    loader = training.loader(training.sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpoint = training.checkpoint(model=model, optimizer=optimizer, sampler=training.sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for number, rows in enumerate(loader):
            training.loss(model, rows).backward()
            training.strike(training.sampler)
            if (number + 1) % 3 == 0 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
        checkpoint.save()


@loop
def scaler_that_skips(training):
    """Every fifth batch has infinite gradients, which the scaler passes over."""
    model = training.model()
    sampler = training.sampler
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
    parts = dict(model=model, optimizer=optimizer, scaler=scaler, sampler=sampler)
    checkpoint = training.checkpoint(**parts)
    for epoch in sampler.epochs(EPOCHS):
        for rows in sampler.batches():
            bad = torch.inf if sampler.steps_done % 5 == 0 else 1
            optimizer.zero_grad()
            scaler.scale(training.loss(model, rows) * bad).backward()
            training.strike(sampler)
            scaler.step(optimizer)
            scaler.update()
            checkpoint.step()


@loop
def sharpness_aware(training):
    """SAM: two backward passes, and a step there and back, for each batch."""
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpoint = training.checkpoint(model=model, optimizer=optimizer, sampler=training.sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in training.sampler.batches():
            training.loss(model, rows).backward()
            with torch.no_grad():
                away = [0.05 * each.grad for each in model.parameters()]
                for each, step in zip(model.parameters(), away):
                    each += step
            optimizer.zero_grad()
            training.loss(model, rows).backward()
            with torch.no_grad():
                for each, step in zip(model.parameters(), away):
                    each -= step
            training.strike(training.sampler)
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()


@loop
def two_optimizers_in_turns(training):
    """As a GAN's: the loss of one goes through the other's model, whose gradients are left."""
    one, other = training.model(), training.model()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (one, other)]
    parts = dict(one=one, other=other, first=optimizers[0], second=optimizers[1])
    checkpoint = training.checkpoint(**parts, sampler=training.sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in training.sampler.batches():
            turn = training.sampler.step % 2
            optimizers[turn].zero_grad()
            both = one(training.x[rows]) - other(training.x[rows])
            ((both - training.y[rows]).square().mean() * training.sampler.weight).backward()
            training.strike(training.sampler)
            optimizers[turn].step()
            checkpoint.step()


@loop
def lbfgs(training):
    """Its step evaluates the loss several times; a loss of all ranks ends its search."""
    model = training.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    checkpoint = training.checkpoint(model=model, optimizer=optimizer, sampler=training.sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in training.sampler.batches():

            def closure():
                optimizer.zero_grad()
                loss = training.loss(model, rows)
                loss.backward()
                common = loss.detach().clone()
                if dist.is_initialized():
                    dist.all_reduce(common)
                return common / ddp.world_size()

            training.strike(training.sampler)
            optimizer.step(closure)
            checkpoint.step()


@loop
def two_samplers_in_turns(training):
    """A batch of one, then of the other: two steps of the optimizer, and one word."""
    model = training.model()
    other = ddp.ElasticSampler(SAMPLES, BATCH, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parts = dict(model=model, optimizer=optimizer, other=other, sampler=training.sampler)
    checkpoint = training.checkpoint(**parts)
    for epoch in zip(other.epochs(EPOCHS), training.sampler.epochs(EPOCHS)):
        others = other.batches()
        for rows in training.sampler.batches():
            optimizer.zero_grad()
            training.loss(model, rows).backward()
            optimizer.step()
            training.strike(training.sampler)
            optimizer.zero_grad()
            training.loss(model, next(others), other).backward()
            training.strike(other)
            optimizer.step()
            checkpoint.step()


@loop
def zip_of_two_loaders(training):
    model = training.model()
    other = ddp.ElasticSampler(SAMPLES, BATCH, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parts = dict(model=model, optimizer=optimizer, other=other, sampler=training.sampler)
    checkpoint = training.checkpoint(**parts)
    loaders = [training.loader(training.sampler), training.loader(other)]
    for epoch in zip(training.sampler.epochs(EPOCHS), other.epochs(EPOCHS)):
        for rows, more in zip(*loaders):
            optimizer.zero_grad()
            both = training.loss(model, rows) + training.loss(model, more, other)
            both.backward()
            training.strike(training.sampler)
            optimizer.step()
            checkpoint.step()
        checkpoint.save()


@loop
def loader_workers(training):
    model = training.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = training.loader(training.sampler, num_workers=2, prefetch_factor=3)
    checkpoint = training.checkpoint(model=model, optimizer=optimizer, sampler=training.sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in loader:
            optimizer.zero_grad()
            training.loss(model, rows).backward()
            training.strike(training.sampler)
            optimizer.step()
            checkpoint.step()


class Augmented(torch.utils.data.Dataset):
    """Each sample is its index, with noise that is drawn when it is fetched."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, torch.randn(4) * np.random.rand() + random.random()


@loop
def augmentation_in_loader_workers(training):
    """The noise of a sample is the same in whatever worker, and after whatever resume."""
    model = training.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = ddp.DataLoader(Augmented(), batch_sampler=training.sampler, num_workers=2)
    checkpoint = training.checkpoint(model=model, optimizer=optimizer, sampler=training.sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for rows, noise in loader:
            optimizer.zero_grad()
            training.loss(model, rows, noise=noise).backward()
            training.strike(training.sampler)
            optimizer.step()
            checkpoint.step()


@loop
def schedule_and_average_below_the_call(training):
    """A schedule of each step, an average of weights, and a schedule of each epoch."""
    model = training.model()
    average = AveragedModel(training.nets[0], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedules = torch.optim.lr_scheduler
    schedule = schedules.CosineAnnealingLR(optimizer, EPOCHS * len(training.sampler))
    plateau = schedules.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    parts = dict(model=model, average=average, optimizer=optimizer)
    parts |= dict(schedule=schedule, plateau=plateau, sampler=training.sampler)
    checkpoint = training.checkpoint(**parts)
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in training.sampler.batches():
            optimizer.zero_grad()
            training.loss(model, rows).backward()
            training.strike(training.sampler)
            optimizer.step()
            checkpoint.step()
            schedule.step()
            average.update_parameters(training.nets[0])
            training.strike(training.sampler)
        plateau.step(1.0)
    training.nets.append(average)


def train(name, folder=None, strike=lambda sampler: None):
    """Returns all weights, as one tensor."""
    training = Training(folder, strike)
    try:
        LOOPS[name](training)
    finally:  # of an attempt that ends here, nothing is written while the next one begins
        for checkpoint in training.checkpoints:
            checkpoint.wait()
    weights = [each.detach().flatten() for net in training.nets for each in net.parameters()]
    return torch.cat(weights)


cloudpickle.register_pickle_by_value(sys.modules[__name__])
