"""What `launch` is given is looked at before anything starts: no cluster is needed to be told."""

import dataclasses
import functools
import sqlite3
from typing import Any

import dask.array
import pytest

import ddp_common as ddp
from dask_ranks import handover
from dask_ranks.client import payload
from dask_ranks.rank import last_word


def train(epochs, rate=0.1):
    return epochs * rate


def test_an_argument_that_nobody_takes_is_told_with_those_of_launch():
    with pytest.raises(ddp.Error) as refused:
        ddp.launch(None, train, epochs=1, restart=3)
    assert str(refused.value) == (
        "train(epochs, rate) cannot be called with the arguments of launch: got an "
        "unexpected keyword argument 'restart'.\nlaunch itself takes workers, restarts, "
        "stall_timeout, directory, timeout, on_report, run_name, run_config."
    )


def test_an_argument_that_the_function_needs_is_told():
    with pytest.raises(ddp.Error, match="missing a required argument: 'epochs'"):
        ddp.launch(None, train)


def test_a_parameter_that_launch_would_take_for_itself_is_refused():
    def write_into(directory, epochs=1):
        return directory

    with pytest.raises(ddp.Error, match="write_into has a parameter 'directory', which launch"):
        ddp.launch(None, write_into, directory="my-data")


def test_what_is_no_function_is_refused():
    with pytest.raises(ddp.Error, match="runs a function on every rank, and 3 is none"):
        ddp.launch(None, 3)


WRONG = [
    *({"timeout": value} for value in (None, float("nan"), "60")),
    *({"stall_timeout": value} for value in (-1, 0, float("nan"), "600")),
    *({"workers": value} for value in (0, 1.5)),
    {"restarts": -1},
]


@pytest.mark.parametrize("option", WRONG, ids=str)
def test_a_wrong_option_of_launch_is_refused_before_anything_else(option):
    with pytest.raises(ddp.Error, match=f"{[*option][0]}.* is (to be|a whole number)"):
        ddp.launch(None, train, epochs=1, **option)


def test_a_place_where_no_run_can_be_is_refused_before_anything_else(tmp_path, monkeypatch):
    (tmp_path / "a_file").touch()
    with pytest.raises(ddp.Error, match="a_file: it is no folder"):
        ddp.launch(None, train, epochs=1, directory=tmp_path / "a_file" / "run")
    monkeypatch.setenv("RUNS", str(tmp_path / "a_file"))
    with pytest.raises(ddp.Error, match="a_file: it is no folder"):
        ddp.launch(None, train, epochs=1)


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
        (lambda **anything: anything, {"restart": 3}),
        (functools.partial(train, 3), {"rate": 0.2}),
        (with_a_seed(train), {"rate": 0.2}),
        (Trainer(0.1).train, {"epochs": 1}),
    ],
)
def test_what_can_be_called_goes_on_to_the_client(function, arguments):
    with pytest.raises(ddp.Error, match="takes a distributed.Client first, not NoneType"):
        ddp.launch(None, function, **arguments)


def test_what_cannot_travel_is_told_with_what_to_do():
    history = sqlite3.connect(":memory:")  # as IPython has it
    with pytest.raises(ddp.Error, match="sqlite3.Connection.*\nTake %magics"):
        payload.pickled(lambda: history, {})


@dataclasses.dataclass
class Data:
    table: Any


@pytest.mark.parametrize("hidden", ["closure", "partial", "object"])
def test_a_collection_that_is_no_argument_is_refused_with_how_to_give_it(hidden):
    table = dask.array.ones(4)
    function, arguments = {
        "closure": (lambda: len(table), {}),
        "partial": (functools.partial(len, table), {}),
        "object": (len, {"obj": Data(table)}),
    }[hidden]
    with pytest.raises(ddp.Error) as refused:
        payload.pickled(function, arguments)
    assert str(refused.value) == (
        "The function, or an argument, holds a Dask Array in a closure, a partial, an object or a "
        "global variable.\n"
        "Make it an argument of the function: launch(client, train, table=table)."
    )


def test_code_keeps_the_name_of_its_file():
    """Cloudpickle calls it `<dynamic-code>` since 3.1.3, and a hang would name no line."""

    def outer():
        return lambda: None

    arrived, *_ = handover.loads(payload.pickled(outer, {}))
    assert arrived.__code__.co_filename == arrived().__code__.co_filename == __file__


@pytest.mark.parametrize("said", ["received 0 items of ancdata", "BdbQuit", "No module named 'x'"])
def test_an_error_of_a_library_is_told_with_what_to_do(said):
    ended = last_word.raised(RuntimeError(said))
    assert ended.message.startswith(f"RuntimeError: {said}. ")
    assert ended.message.endswith(
        next(hint for part, hint in last_word.HINTS.items() if part in said)
    )


def test_a_fault_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(ddp.Error) as refused:
        ddp.inject(train, "SIGKILL")
    assert str(refused.value) == (
        "'SIGKILL' is not a fault.\n"
        "Give one of 'raise', 'kill', 'stop', 'hang', or a function for the rank to call."
    )
