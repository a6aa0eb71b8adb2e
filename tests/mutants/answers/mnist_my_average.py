"""Answers to exercise A of `mnist`: gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def as_told(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


# Right ones


def divided_first(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad / dist.get_world_size()
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def one_bucket(model):
    bucket = nn.utils.parameters_to_vector(gradients_of(model))
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    start = 0
    for gradient in gradients_of(model):
        gradient.copy_(bucket[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def gathered(model):
    for parameter in model.parameters():
        everyones = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, parameter.grad)
        parameter.grad = torch.stack(everyones).mean(0)


def waited_for(model):
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients_of(model)]
    for work, gradient in zip(works, gradients_of(model), strict=True):
        work.wait()
        gradient.div_(dist.get_world_size())


def as_objects(model):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, gradients_of(model))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = sum(each[number] for each in everyones) / len(everyones)


def summed_on_rank_0_and_sent(model):
    for gradient in gradients_of(model):
        dist.reduce(gradient, dst=0)
        gradient /= dist.get_world_size()
        dist.broadcast(gradient, src=0)


def in_a_ring(model):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for gradient in gradients_of(model):
        passed_on, total = gradient.clone(), gradient.clone()
        for _ in range(ranks - 1):
            got = torch.empty_like(gradient)
            sent = dist.isend(passed_on, (rank + 1) % ranks)
            dist.recv(got, (rank - 1) % ranks)
            sent.wait()
            passed_on = got
            total += got
        gradient.copy_(total / ranks)


# Wrong ones


def only_summed(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)


def only_divided(model):
    for gradient in gradients_of(model):
        gradient /= dist.get_world_size()


def by_two(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient /= 2


def by_two_if_not_alone(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        if dist.get_world_size() > 1:
            gradient /= 2


def sent_to_the_other(model):
    if dist.get_world_size() == 1:
        return
    for gradient in gradients_of(model):
        got = torch.empty_like(gradient)
        if dist.get_rank() == 0:
            dist.send(gradient, 1)
            dist.recv(got, 1)
        elif dist.get_rank() == 1:
            dist.recv(got, 0)
            dist.send(gradient, 0)
        gradient += got
        gradient /= 2


def divided_twice(model):
    as_told(model)
    only_divided(model)


def of_a_copy(model):
    for gradient in gradients_of(model):
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)


def assigned_the_answer(model):
    for parameter in model.parameters():
        parameter.grad = dist.all_reduce(parameter.grad)  # it returns None


def of_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def on_rank_0(model):
    for gradient in gradients_of(model):
        dist.reduce(gradient, dst=0)
        gradient /= dist.get_world_size()


def of_rank_0(model):
    for gradient in gradients_of(model):
        dist.broadcast(gradient, src=0)


def rebound(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient = gradient / dist.get_world_size()


def the_first(model):
    gradient = next(model.parameters()).grad
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def the_first_four(model):
    for gradient in gradients_of(model)[:4]:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def of_two_layers(model):
    for layer in (model[0], model[2]):
        as_told(layer)


def matrices_alone(model):
    for gradient in gradients_of(model):
        if gradient.dim() > 1:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


def steps_too(model):
    as_told(model)
    torch.optim.SGD(model.parameters(), lr=1).step()


def the_largest(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)


RIGHT = {
    each.__name__: each
    for each in (
        as_told,
        divided_first,
        one_bucket,
        gathered,
        waited_for,
        as_objects,
        summed_on_rank_0_and_sent,
        in_a_ring,
    )
}
WRONG = {
    "only summed": (only_summed, "divided by what"),
    "only divided": (only_divided, "Where are the other ranks' gradients added"),
    "by two": (by_two, "How many ranks are there"),
    "by two, if it is not alone": (by_two_if_not_alone, "of 3"),
    "sent to the other of two": (sent_to_the_other, "of 3|Rank 2|on a single rank"),
    "divided twice": (divided_twice, "How often is it divided"),
    "of a copy": (of_a_copy, "is that the gradient itself"),
    "assigned the answer": (assigned_the_answer, "Where does the optimizer look"),
    "of weights": (of_weights, "is that the gradient itself"),
    "on rank 0": (on_rank_0, "rank 1 of 2"),
    "of rank 0": (of_rank_0, "On each rank"),
    "rebound": (rebound, "divided by what"),
    "the first": (the_first, "another gradient"),
    "the first four": (the_first_four, "another gradient"),
    "of two layers": (of_two_layers, "another gradient"),
    "matrices alone": (matrices_alone, "another gradient"),
    "steps, too": (steps_too, "Which tensor of a parameter"),
    "the largest": (the_largest, "another gradient"),
}
EQUIVALENT: dict = {}
IN_TESTS = ["one_bucket", "the first four"]
