"""What config.json says of a run that goes on, and which file all ranks load."""

import json
import shutil
import socket

import pytest
import torch

import ddp_common as ddp
from ddp_common import exchange
from ddp_common.checkpoint_files import checkpoints


def train(steps):
    sampler = ddp.ElasticSampler(steps, 1)
    checkpoint = ddp.Checkpoint(sampler=sampler)
    begun = checkpoint.restore()
    for epoch in sampler.epochs(1):
        for batch in sampler.batches():
            ddp.report(loss=1.0)
            checkpoint.step()
    checkpoint.save()
    return begun is not None


def look():
    return ddp.rank()


def config_of(run):
    return json.loads((run.directory / "config.json").read_text())


def test_config_json_says_what_the_program_has_said_also_after_another_launch_there(
    client, tmp_path
):
    about = {"settings": {"steps": 3}}
    run = ddp.launch(client, train, workers=1, steps=3, run_name="mine", run_config=about)
    assert run.directory.parent == tmp_path / "runs" / "mine"
    assert config_of(run)["settings"] == {"steps": 3} and config_of(run)["function"] == "train"
    ddp.launch(client, look, workers=2, directory=run.directory)
    assert config_of(run)["settings"] == {"steps": 3} and len(config_of(run)["workers"]) == 2


def test_a_resume_that_fails_before_it_trains_leaves_the_settings_of_the_run(client, tmp_path):
    place = {"workers": 1, "directory": tmp_path / "run"}
    run = ddp.launch(client, train, steps=3, run_config={"settings": {"steps": 3}}, **place)
    before = (run.directory / "config.json").read_bytes()
    with pytest.raises(ddp.RankFailed, match="length 3 there, 4 here"):
        ddp.launch(client, train, steps=4, run_config={"settings": {"steps": 4}}, **place)
    assert (run.directory / "config.json").read_bytes() == before


def resume_in(cases):
    """What each rank resumes from or is told, in each case: a folder for each rank."""
    said = []
    for folders in cases:
        checkpoint = ddp.Checkpoint(directory=folders[ddp.rank()], model=torch.nn.Linear(1, 1))
        try:
            mine = checkpoint.restore().name
        except ddp.Error as error:
            mine = str(error)
        said.append(exchange.gather(mine))
    return said


def test_every_rank_loads_the_file_that_rank_0_has_chosen_or_says_that_it_cannot(client, tmp_path):
    first, same, newer, without, damaged = (tmp_path / name for name in "abcde")
    checkpoint = ddp.Checkpoint(directory=first, model=torch.nn.Linear(1, 1), keep=9)
    checkpoint.save()
    checkpoint.wait()
    (chosen,) = checkpoints(first)
    for folder in (same, newer, damaged):
        shutil.copytree(first, folder)
    later = ddp.Checkpoint(directory=newer, model=torch.nn.Linear(1, 1), keep=9)
    later.save()
    later.wait()
    without.mkdir()
    (damaged / chosen.name).write_bytes(b"not that content")

    cases = [[first, second] for second in (same, newer, without, damaged)]
    cases.append([damaged, first])
    *found, of_none = ddp.launch(client, resume_in, cases=cases, workers=2).result
    assert [rank_0 for rank_0, _ in found] == [chosen.name] * 4
    assert found[0][1] == found[1][1] == chosen.name
    for _, told in found[2:]:
        assert told.startswith(f"Rank 1 on {socket.gethostname()} cannot resume from ")
    assert f"{without / chosen.name}, which rank 0 has chosen: it does not see" in found[2][1]
    assert "its SHA-256 is not the one" in found[3][1]
    assert all("all 1 are damaged" in told for told in of_none)


def test_a_damaged_newest_checkpoint_is_named_once_in_all_that_is_printed(client, tmp_path, capfd):
    ddp.launch(client, train, workers=1, directory=tmp_path, steps=2)
    damaged = tmp_path / "checkpoints" / "step-00000009.0123456789abcdef.pt"
    damaged.write_bytes(b"not that content")
    capfd.readouterr()
    assert ddp.launch(client, train, workers=2, directory=tmp_path, steps=2).result
    said = capfd.readouterr()
    assert (said.out + said.err).count(f"{damaged} is damaged") == 1
