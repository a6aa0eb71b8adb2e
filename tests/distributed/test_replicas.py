"""Ranks that do not have the same: each trains something else, and only rank 0's is kept."""

import copy
import os
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

import ddp_common as ddp
from ddp_common import exchange, replicas

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Training:
    """A network with batch normalisation, its wrapper, an optimizer, and what is saved."""

    def __init__(self, prepare=lambda net: None, **options):
        torch.manual_seed(0)
        self.data = torch.randn(96, 6)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        prepare(self.net)
        self.model = DistributedDataParallel(self.net, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.sampler = ddp.ElasticSampler(96, 32)
        self.parts = {"optimizer": self.optimizer, "sampler": self.sampler}

    def run(self, epochs=2, forward=None, after_step=lambda: None, after_epoch=lambda loss: None):
        forward = forward or self.model
        checkpoint = ddp.Checkpoint(model=self.model, **self.parts)
        checkpoint.restore()
        for _ in self.sampler.epochs(epochs):
            for rows in self.sampler.batches():
                loss = mse_loss(forward(self.data[rows]), self.data[rows].sum(1, keepdim=True))
                self.optimizer.zero_grad()
                (loss * self.sampler.weight).backward()
                self.optimizer.step()
                checkpoint.step()
                after_step()
            after_epoch(loss.item())
            checkpoint.save()


def unfrozen_after_ddp():
    training = Training(lambda net: net[0].requires_grad_(False))
    training.net.requires_grad_(True)
    training.run()


def the_model_inside():
    training = Training()
    training.run(forward=training.model.module)


def a_head_replaced_after_ddp():
    training = Training(find_unused_parameters=True)
    training.net[3] = torch.nn.Linear(8, 1)
    training.optimizer.param_groups[0]["params"] = [*training.net.parameters()]
    training.run()


def buffers_that_ddp_does_not_send():
    Training(broadcast_buffers=False).run()


def a_plateau_of_each_rank_s_own_loss():
    training = Training()
    plateau = ReduceLROnPlateau(training.optimizer, patience=0)
    training.parts["plateau"] = plateau
    training.run(after_epoch=plateau.step)


def a_little_by_little():
    """At the rate of fine-tuning; what is tuned has a norm that hardly changes."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 2))
    DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    for step in range(20):
        optimizer.zero_grad()
        net(
            torch.randn(4, 512, generator=torch.Generator().manual_seed(ddp.rank()))
        ).sum().backward()
        optimizer.step()
    ddp.Checkpoint(model=net).save()


def a_part_that_one_rank_lacks():
    optimizers = {} if ddp.rank() else {"extra": Position()}
    ddp.Checkpoint(model=torch.nn.Linear(1, 1).requires_grad_(False), **optimizers).save()


class Position:
    """Where each rank is in its own stream."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def a_part_of_which_each_rank_has_its_own():
    training = Training()
    training.parts["stream"] = position = Position()
    position.at = 100 * ddp.rank()
    training.run()


APART = {
    unfrozen_after_ddp: r"model.0.weight is not the same on rank 1 as on rank 0",
    the_model_inside: r"model.0.weight is not the same",
    a_head_replaced_after_ddp: r"model.3.weight is not the same",
    a_little_by_little: r"model.0.weight is not the same",
    a_part_that_one_rank_lacks: r"(model.weight|extra\['at'\]) is",
    buffers_that_ddp_does_not_send: "model.1.running_mean is another one on rank 1 than on rank 0",
    a_plateau_of_each_rank_s_own_loss: r"plateau\['best'\] is another one on rank 1",
    a_part_of_which_each_rank_has_its_own: r"stream\['at'\] is another one on rank 1",
}


@pytest.mark.parametrize("function", APART, ids=lambda function: function.__name__)
def test_what_the_ranks_do_not_have_in_common_is_refused_when_it_is_saved(client, function):
    with pytest.raises(ddp.RankFailed, match=f"do not have the same: {APART[function]}") as caught:
        ddp.launch(client, function, workers=2)
    assert "Only rank 0's would be saved" in str(caught.value)


def what_is_right():
    """Buffers under DDP, averages of them, a scaler, a plateau of a common loss."""
    training = Training()
    average = AveragedModel(training.net, use_buffers=True)
    copied = copy.deepcopy(training.net).requires_grad_(False)
    plateau = ReduceLROnPlateau(training.optimizer, patience=0)
    training.parts |= dict(average=average, copied=copied, plateau=plateau)
    training.parts["scaler"] = torch.amp.GradScaler("cpu")

    def after_step():
        average.update_parameters(training.net)
        with torch.no_grad():
            for mine, new in zip(copied.state_dict().values(), training.net.state_dict().values()):
                mine.copy_(new)

    def after_epoch(loss):
        common = torch.tensor(loss)
        dist.all_reduce(common)
        plateau.step(common.item())

    training.run(after_step=after_step, after_epoch=after_epoch)
    ddp.check_replicas(training.model)
    return training.model


def test_what_is_right_is_saved_and_a_model_of_ddp_is_returned_as_a_plain_one(client):
    run = ddp.launch(client, what_is_right, workers=2)
    assert not run.problems
    assert isinstance(run.result, torch.nn.Sequential)


def saves_nothing(returns, asks=False):
    """Only the model inside is trained; there is no Checkpoint."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(ddp.rank()))
    for _ in range(3):
        optimizer.zero_grad()
        model.module(data).square().mean().backward()
        optimizer.step()
    if asks:
        ddp.check_replicas(model)
    return returns(model)


def of_rank_0(model):
    return model if ddp.rank() == 0 else None


def statistics_alone_differ(model):
    """Each rank's running mean is of its own batches, and its loss is its own: all is well."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model.module.state_dict()


def test_models_that_ranks_return_are_compared_where_nothing_is_saved(client, capfd):
    for returns in (lambda model: model, lambda model: model.module.state_dict()):
        run = ddp.launch(client, saves_nothing, returns=returns, workers=2)
        (problem,) = run.problems
        assert "ranks have returned have drifted apart: 0.weight is not the same" in problem
        assert "is model(x) called, not model.module(x)? Within no_sync() nothing is" in problem
        assert capfd.readouterr().err.count("have drifted apart") == 1
    for returns in (of_rank_0, statistics_alone_differ, lambda model: {"loss": ddp.rank()}):
        assert not ddp.launch(client, saves_nothing, returns=returns, workers=2).problems
    with pytest.raises(ddp.RankFailed, match="do not have the same: model.0.weight is not"):
        ddp.launch(client, saves_nothing, returns=of_rank_0, asks=True, workers=2)


def rank_0_alone_saves_the_best():
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    best = ddp.Checkpoint(model=model, directory="best")
    checkpoint = ddp.Checkpoint(optimizer=torch.optim.SGD(model.parameters()), model=model)
    if ddp.rank() == 0:
        best.save()
    checkpoint.save()


def test_a_save_under_rank_0_is_told_by_its_cause(client):
    cause = (
        r"alone\. Only rank 0's would be saved\.\nEvery rank calls save\(\) of the same Checkpoint"
    )
    with pytest.raises(ddp.RankFailed, match=cause):
        ddp.launch(client, rank_0_alone_saves_the_best, workers=2)


def rank_1_is_done_long_before(folder):
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    model(torch.ones(1, 6)).sum().backward()
    while ddp.rank() == 0 and not os.path.exists(folder):
        pass
    return True


def test_a_rank_that_has_returned_waits_for_no_comparison(client, tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    run = ddp.launch(client, rank_1_is_done_long_before, folder=str(mark), workers=2)
    assert run.result and not run.problems


def with_power_sgd():
    training = Training()
    del training.parts["optimizer"]
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    training.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    training.run()


def save_the_best():
    ddp.Checkpoint(model=DistributedDataParallel(torch.nn.Linear(1, 1)), directory="best").save()


def test_what_a_resume_would_lack_is_named(client):
    assert not ddp.launch(client, save_the_best, workers=2).problems
    optimizer, hook = ddp.launch(client, with_power_sgd, workers=2).problems
    assert "No optimizer is a part of the Checkpoint" in optimizer
    assert "model has the communication hook powerSGD_hook, whose state is in no check" in hook


def large_values_of_each_rank():
    """JSON that is cut at a blank, where ranks send each other their first 16,384 bytes."""
    mine = ["a" * 16379, str(ddp.rank())]
    return exchange.gather(mine) == [[mine[0], "0"], [mine[0], "1"]]


def test_a_value_that_is_cut_at_a_blank_arrives_whole(client):
    assert ddp.launch(client, large_values_of_each_rank, workers=2).result


def difference(*of_ranks):
    return replicas.difference(dict(enumerate(of_ranks)))


def test_rounding_and_models_that_diverged_together_are_no_difference():
    nan = [float("nan")] * 2
    first = {"a": [1.0, 0.1], "b": nan}
    assert difference(first, {"a": [1.000001, 0.100001], "b": nan}) is None
    for other in ([1.0, 0.1], [0.0, 0.0]):
        apart = difference(first, {"a": [1.0, 0.1], "b": other})
        assert apart.startswith("b is not the same on rank 1 as on rank 0")
    turned = difference(first, {"a": [1.0, 0.2], "b": nan})
    assert turned.startswith("a is not the same on rank 1")
    assert difference({"a": [1.0, 1.0]}, {"b": [1.0, 1.0]}) == "a is on rank 0 alone"
