"""The user's script is not run again in the ranks; what it defines is known there all the same."""

import logging

import torch
from processes import environment_for, finished

import ddp_common as ddp

SCRIPT = """
import multiprocessing
import os
import sys

with open({effects!r}, "a") as file:
    file.write(multiprocessing.current_process().name + "\\n")

from torch.utils.data import DataLoader

import ddp_common as ddp
from distributed import Client


class Sample:
    def __init__(self, number):
        self.number = number


class Stop(Exception):
    pass


def train(samples):
    loader = DataLoader(samples, batch_size=4, num_workers=2, collate_fn=list)
    return sum(sample.number for batch in loader for sample in batch if isinstance(sample, Sample))


def first(samples):
    return samples[0], lambda: samples[0].number


def stop():
    raise Stop("enough")


if __name__ == "__main__":
    samples = [Sample(number) for number in range(1, 13)]
    with Client(sys.argv[1]) as client:
        assert ddp.launch(client, train, workers=2, samples=samples).result == 78
        with open(__file__, "a") as file:
            file.write("def half(:\\n")
        sample, number = ddp.launch(client, first, workers=2, samples=samples).result
        assert type(sample) is Sample and number() == 1
        try:
            ddp.launch(client, stop, workers=2)
        except ddp.RankFailed as failed:
            cause = failed.__cause__
            assert isinstance(cause, Stop) and cause.args == ("enough",), cause
            assert "raise Stop" in failed.traceback
"""


def test_a_script_is_run_once_however_often_it_launches_and_may_be_edited_meanwhile(
    client, tmp_path
):
    script, effects = tmp_path / "script.py", tmp_path / "effects"
    script.write_text(SCRIPT.format(effects=str(effects)))
    finished(script, client.scheduler.address, env=environment_for(client, tmp_path))
    assert effects.read_text() == "MainProcess\n"


BEGINNER = """
from dataclasses import dataclass

import torch
import ddp_common as ddp

print("top level")


@dataclass
class Answer:
    number: int


def train(answer):
    total = torch.tensor([answer.number * (ddp.rank() + 1)])
    torch.distributed.all_reduce(total)
    return total.item()

client = ddp.connect("local", workers=2)
print("result", ddp.launch(client, train, answer=Answer(7)).result)
print("task", client.submit(lambda answer: Answer(answer.number + 1), Answer(1)).result())
client.close()
"""


def test_a_script_without_a_guard_trains_and_its_top_level_runs_once(tmp_path):
    (tmp_path / "beginner.py").write_text(BEGINNER)
    done = finished("beginner.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["top level", "result 21", "task Answer(number=2)"]
    assert "Traceback" not in done.stderr


def test_what_the_program_has_set_for_torch_and_logging_is_set_in_the_ranks(client):
    def what_is_set():
        return str(torch.get_default_dtype()), logging.getLogger().level

    earlier = logging.getLogger().level
    torch.set_default_dtype(torch.float64)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        run = ddp.launch(client, what_is_set, workers=1)
    finally:
        torch.set_default_dtype(torch.float32)
        logging.getLogger().setLevel(earlier)
    assert run.result == ("torch.float64", logging.ERROR)
