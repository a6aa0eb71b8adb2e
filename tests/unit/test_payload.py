"""What `launch` is given is looked at before anything starts: no cluster is needed to be told."""

import functools

import pytest

import ddp_common as ddp


def train(epochs, rate=0.1):
    return epochs * rate


def test_a_misspelt_option_of_launch_is_told_with_the_right_one():
    with pytest.raises(ddp.Error) as refused:
        ddp.launch(None, train, epochs=1, restart=3)
    assert str(refused.value) == (
        "train(epochs, rate) cannot be called with the arguments of this launch: got an "
        "unexpected keyword argument 'restart'. Did you mean launch's own restarts?"
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({}, "missing a required argument: 'epochs'."),
        ({"epochs": 1, "momentum": 0.9}, "got an unexpected keyword argument 'momentum'."),
    ],
)
def test_arguments_that_the_function_does_not_take_are_told(arguments, said):
    with pytest.raises(ddp.Error) as refused:
        ddp.launch(None, train, **arguments)
    assert str(refused.value).endswith(said)


def test_what_is_no_function_is_refused():
    with pytest.raises(ddp.Error, match="runs a function on every rank, and 3 is none"):
        ddp.launch(None, 3)


def with_a_seed(function):
    @functools.wraps(function)
    def wrapper(**arguments):
        return function(epochs=2, **arguments)

    return wrapper


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    def train(self, epochs):
        return epochs * self.rate


@pytest.mark.parametrize(
    "function, arguments",
    [
        (train, {"epochs": 1}),
        (lambda **anything: anything, {"restart": 3}),
        (functools.partial(train, 3), {"rate": 0.2}),
        (with_a_seed(train), {"rate": 0.2}),
        (Trainer(0.1).train, {"epochs": 1}),
        (Trainer, {"rate": 0.1}),
        (dict, {"restart": 3}),
    ],
)
def test_what_can_be_called_goes_on_to_the_client(function, arguments):
    with pytest.raises(ddp.Error, match="takes a distributed.Client first, not NoneType"):
        ddp.launch(None, function, **arguments)
