"""The loops of docs/loops.md, a row each.

Two ranks end with the weights of one process, or the loop is refused with a reason.
"""

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_common as ddp
from ddp_common.ranks.checkpoint_files import step_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES, BATCH, EPOCHS = (
    105,
    20,
    3,
)  # 6 steps an epoch; of the last batch's 5 samples rank 0 gets 3
LOOPS, REFUSED = {}, {}


class Training:
    """What all loops share: data, a model, a sampler, and what one step is."""

    def __init__(self, samples=SAMPLES, **options):
        torch.manual_seed(0)
        inputs = torch.randn(samples, 4)
        self.data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
        network = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        alone = not torch.distributed.is_initialized()
        self.model = network if alone else DistributedDataParallel(network)
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        self.sampler = ddp.ElasticSampler(samples, BATCH, seed=1)
        self.checkpoint = ddp.Checkpoint(
            model=self.model, optimizer=self.optimizer, sampler=self.sampler
        )

    def loader(self, **options):
        return DataLoader(self.data, batch_sampler=self.sampler, **options)

    def loss(self, batch, weight=None):
        inputs, targets = batch
        weight = self.sampler.weight if weight is None else weight
        return torch.nn.functional.mse_loss(self.model(inputs), targets) * weight

    def step(self, batch, weight=None):
        loss = self.loss(batch, weight)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        ddp.report(loss=loss)


def loop(function):
    LOOPS[function.__name__] = function
    return function


def refused(message):
    def note(function):
        REFUSED[function.__name__] = (function, message)
        return function

    return note


@loop
def epochs_of_the_sampler(training):
    loader = training.loader()
    for epoch in training.sampler.epochs(EPOCHS):
        for batch in loader:
            training.step(batch)


@loop
def a_plain_range(training):
    loader = training.loader()
    for epoch in range(EPOCHS):
        for batch in loader:
            training.step(batch)


@loop
def a_loader_made_new_each_epoch(training):
    for epoch in range(EPOCHS):
        for number, batch in enumerate(training.loader()):
            training.step(batch)


@loop
def workers(training):
    loader = training.loader(num_workers=2)
    for epoch in range(EPOCHS):
        for batch in loader:
            training.step(batch)


@loop
def four_workers_that_fetch_three_each(training):
    loader = training.loader(num_workers=4, prefetch_factor=3)
    for epoch in training.sampler.epochs(EPOCHS):
        for batch in loader:
            training.step(batch)


@loop
def persistent_workers(training):
    loader = training.loader(num_workers=2, persistent_workers=True)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            training.step(batch)
            if number == 3:
                break


@loop
def follow(training):
    loader = training.loader(num_workers=2)
    for epoch in training.sampler.epochs(EPOCHS):
        for batch in training.sampler.follow(loader):
            training.step(batch)


@loop
def break_in_each_epoch(training):
    loader = training.loader(num_workers=2)
    for epoch in training.sampler.epochs(EPOCHS):
        for number, batch in enumerate(loader):
            if number == 3:
                break
            training.step(batch)


@loop
def islice_of_a_loader(training):
    loader = training.loader()
    for epoch in range(EPOCHS):
        for batch in itertools.islice(loader, 4):
            training.step(batch)


@loop
def zip_with_another_loader(training):
    other = DataLoader(range(SAMPLES), batch_size=7)
    for epoch in range(EPOCHS):
        for batch, _ in zip(training.loader(), other):
            training.step(batch)


@loop
def iter_and_next_by_hand(training):
    batches = iter(training.loader(num_workers=2))
    for step in range(15):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(training.loader(num_workers=2))
            batch = next(batches)
        training.step(batch)


@loop
def a_look_at_the_first_batch(training):
    look = iter(training.loader())
    next(look)
    if ddp.rank() == 0:
        next(iter(training.loader()))
    for epoch in range(EPOCHS):
        for batch in training.loader():
            training.step(batch)


@loop
def validation_within_an_epoch(training):
    for epoch in range(EPOCHS):
        for number, batch in enumerate(training.loader()):
            training.step(batch)
            if number == 2:
                whole = getattr(training.model, "module", training.model)
                for sampler in (ddp.EvalSampler(SAMPLES, 8), [range(8), range(8, 16)]):
                    for inputs, _ in DataLoader(
                        training.data, batch_sampler=sampler, num_workers=1
                    ):
                        with torch.no_grad():
                            whole(inputs)


@loop
def return_in_the_middle(training):
    def train_an_epoch():
        for number, batch in enumerate(training.loader(num_workers=2)):
            if number == 2:
                return
            training.step(batch)

    for epoch in range(EPOCHS):
        train_an_epoch()


@loop
def set_epoch_as_for_a_distributed_sampler(training):
    for epoch in range(EPOCHS):
        training.sampler.set_epoch(epoch)
        for batch in training.loader():
            training.step(batch)


@loop
def two_loaders_over_one_sampler_one_after_the_other(training):
    one, other = training.loader(), training.loader(num_workers=1)
    for epoch in range(EPOCHS):
        for loader in (one, other):
            for batch in loader:
                training.step(batch)


@loop
def two_samplers_in_turns(training):
    other = ddp.ElasticSampler(50, 9, seed=2)
    loader = DataLoader(
        torch.utils.data.Subset(training.data, range(50)), batch_sampler=other, num_workers=1
    )
    for epoch in range(EPOCHS):
        for batch, second in zip(training.loader(num_workers=2), loader):
            training.step(batch)
            training.step(second, other.weight)


@loop
def gradients_of_two_batches_added_up(training):
    loader = training.loader(num_workers=2)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            (training.loss(batch) / 2).backward()
            if number % 2:
                training.optimizer.step()
                training.optimizer.zero_grad()


@loop
def the_sampler_without_a_loader(training):
    for epoch in range(EPOCHS):
        for indices in training.sampler:
            training.step(training.data[indices])


@loop
def distributed_sampler_of_torch(training):
    ranks = dict(num_replicas=ddp.world_size(), rank=ddp.rank())
    data = torch.utils.data.Subset(
        training.data, range(100)
    )  # it pads, so let there be nothing to pad
    sampler = DistributedSampler(data, seed=3, **ranks)
    loader = DataLoader(data, batch_size=20 // ddp.world_size(), sampler=sampler, num_workers=1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            training.step(batch, weight=1.0)


@refused("deals whole batches")
def as_sampler_instead_of_batch_sampler(training):
    for batch in DataLoader(training.data, sampler=training.sampler, batch_size=4):
        training.step(batch)


@refused("begins while another one is in step 1 of 6")
def nested_passes(training):
    for batch in training.loader():
        training.step(batch)
        for second in training.loader():
            training.step(second)


@refused("can't go on")
def two_loaders_at_once(training):
    for batch, second in zip(training.loader(), training.loader()):
        training.step(batch)


@refused("A second pass within epoch 0")
def two_passes_in_one_epoch_of_the_sampler(training):
    for epoch in training.sampler.epochs(EPOCHS):
        for _ in range(2):
            for batch in training.loader(num_workers=1):
                training.step(batch)


@refused("A second pass within epoch 0")
def a_broken_off_pass_and_another_in_one_epoch_of_the_sampler(training):
    for epoch in training.sampler.epochs(EPOCHS):
        for number, batch in enumerate(training.loader()):
            training.step(batch)
            if number == 2:
                break
        for batch in training.loader():
            training.step(batch)


@refused("no batch of the sampler was in training")
def batches_kept_in_a_list(training):
    batches = list(training.loader(num_workers=1))
    for epoch in range(EPOCHS):
        for batch in batches:
            training.step(batch)


@refused("no batch of the sampler was in training")
def cycle(training):
    for batch in itertools.islice(itertools.cycle(training.loader()), 10):
        training.step(batch)


@refused("in any order")
def a_loader_without_order(training):
    for batch in training.loader(num_workers=2, in_order=False):
        training.step(batch)


@refused("within the pass over epoch 0, after step 3 of 6")
def saved_in_a_loop_that_is_left_at_once(training):
    for epoch in range(EPOCHS):
        for number, batch in enumerate(training.loader()):
            training.step(batch)
            if number == 2:
                training.checkpoint.save()
                break


@refused("0 or more, not -1")
def a_negative_number_of_epochs(training):
    for epoch in training.sampler.epochs(-1):
        pass


def train(name):
    training = Training()
    function = LOOPS.get(name) or REFUSED[name][0]
    function(training)
    whole = getattr(training.model, "module", training.model)
    return torch.cat([parameter.detach().flatten() for parameter in whole.parameters()])


def initial():
    return torch.cat([parameter.detach().flatten() for parameter in Training().model.parameters()])


@pytest.mark.parametrize("name", LOOPS)
def test_two_ranks_end_with_the_weights_of_one_process(client, name):
    alone = train(name)
    run = ddp.launch(client, train, workers=2, name=name)
    assert (run.result - alone).norm() / alone.norm() < 1e-6
    assert (alone - initial()).norm() > 0.01  # it trained
    steps = [record["step"] for record in run.records if record["rank"] == 1 and "step" in record]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_could_not_be_right_is_refused(client, name):
    with pytest.raises(ddp.RankFailed, match=REFUSED[name][1]):
        ddp.launch(client, train, workers=2, name=name)


# The same loop, ended in its middle or after an epoch, and gone on with.

ENDS = {"in_an_epoch": (1, 3), "after_an_epoch": (1, 6), "in_the_first_epoch": (0, 2)}
RESUMED = {
    "epochs_of_the_sampler": lambda sampler: sampler.epochs(EPOCHS),
    "range_from_the_samplers_epoch": lambda sampler: counted(
        sampler, range(sampler.epoch, EPOCHS)
    ),
}


def counted(sampler, numbers):
    for epoch in numbers:
        sampler.set_epoch(epoch)
        yield epoch


def train_in_two_attempts(epochs, end, options):
    training = Training()
    resumed = training.checkpoint.restore()
    loader = training.loader(**options)
    for epoch in epochs(training.sampler) if resumed else range(EPOCHS):
        for batch in loader:
            training.step(batch)
            if not resumed and (epoch, training.sampler.step) == end != (
                epoch,
                len(training.sampler),
            ):
                training.checkpoint.save()
                return "ended"
        if not resumed and end == (epoch, len(training.sampler)):
            training.checkpoint.save()
            return "ended"
    whole = getattr(training.model, "module", training.model)
    return torch.cat([parameter.detach().flatten() for parameter in whole.parameters()])


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["alone", "workers"]
)
@pytest.mark.parametrize("resumed", RESUMED)
@pytest.mark.parametrize("end", ENDS)
def test_a_plain_loop_is_resumed_where_it_was(client, tmp_path, end, resumed, options):
    arguments = dict(
        workers=2,
        directory=tmp_path / "run",
        end=ENDS[end],
        epochs=RESUMED[resumed],
        options=options,
    )
    assert ddp.launch(client, train_in_two_attempts, **arguments).result == "ended"
    run = ddp.launch(client, train_in_two_attempts, **arguments)
    alone = train("a_plain_range")
    assert (run.result - alone).norm() / alone.norm() < 1e-6


def test_a_plain_range_after_a_restored_epoch_is_refused_before_it_trains_too_much(
    client, tmp_path
):
    arguments = dict(
        workers=2,
        directory=tmp_path / "run",
        end=(1, 3),
        epochs=lambda sampler: range(EPOCHS),
        options={},
    )
    assert ddp.launch(client, train_in_two_attempts, **arguments).result == "ended"
    with pytest.raises(
        ddp.RankFailed, match=r"epoch 1, step 3.*`for epoch in sampler.epochs\(n\)`"
    ):
        ddp.launch(client, train_in_two_attempts, **arguments)


def train_and_be_told_to_stop():
    training = Training()
    resumed = training.checkpoint.restore()
    loader = training.loader(num_workers=2, prefetch_factor=3)
    for epoch in training.sampler.epochs(EPOCHS) if resumed else range(EPOCHS):
        for batch in loader:
            training.step(batch)
            if not resumed and ddp.rank() == 1 and (epoch, training.sampler.step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(
                0.05 if epoch else 0
            )  # ranks look every half second whether one of them was told
    whole = getattr(training.model, "module", training.model)
    return torch.cat([parameter.detach().flatten() for parameter in whole.parameters()])


def test_a_plain_loop_with_workers_stops_between_two_steps_and_goes_on_there(client, tmp_path):
    with pytest.raises(ddp.RunStopped) as caught:
        ddp.launch(client, train_and_be_told_to_stop, workers=2, directory=tmp_path / "run")
    saved = max((tmp_path / "run" / "checkpoints").glob("*.pt"))
    assert caught.value.step == step_of(saved) >= 8
    run = ddp.launch(client, train_and_be_told_to_stop, workers=2, directory=tmp_path / "run")
    alone = train("a_plain_range")
    assert (run.result - alone).norm() / alone.norm() < 1e-6


def test_every_row_of_the_table_is_a_test_and_every_loop_a_row():
    rows = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    names = set(re.findall(r"\| `(\w+)` \|$", rows, flags=re.M))
    assert names >= {*LOOPS, *REFUSED}
    assert names <= {*LOOPS, *REFUSED, *globals()}
