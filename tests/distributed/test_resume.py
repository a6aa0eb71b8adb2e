"""RESUME in a program with several launches: it is for the function whose run it was."""

import pytest

import ddp_common as ddp


def train(steps):
    sampler = ddp.ElasticSampler(steps, 1)
    checkpoint = ddp.Checkpoint(sampler=sampler)
    begun = checkpoint.restore()
    for epoch in sampler.epochs(1):
        for batch in sampler.batches():
            ddp.report(loss=1.0)
    checkpoint.save()
    return begun is not None


def lesson():
    return ddp.rank()


def test_resume_is_for_the_launch_of_the_function_that_the_run_was_one_of(client, monkeypatch):
    ddp.settings("demo", steps=3)
    first = ddp.launch(client, train, workers=1, steps=3)
    before = (first.directory / "config.json").read_bytes()
    monkeypatch.setenv("RESUME", str(first.directory))
    ddp.settings("demo", steps=3)
    assert ddp.launch(client, lesson, workers=1).directory != first.directory
    assert (first.directory / "config.json").read_bytes() == before
    resumed = ddp.launch(client, train, workers=1, steps=3)
    assert resumed.directory == first.directory and resumed.result is True
    assert ddp.launch(client, train, workers=1, steps=3).directory != first.directory, (
        "RESUME is for one launch"
    )


def test_a_resume_that_fails_before_it_trains_leaves_the_settings_of_the_run(client, tmp_path):
    ddp.settings("demo", steps=3)
    run = ddp.launch(client, train, workers=1, steps=3, directory=tmp_path / "run")
    before = (run.directory / "config.json").read_bytes()
    ddp.settings("demo", steps=4)
    with pytest.raises(ddp.RankFailed, match="length 3 there, 4 here"):
        ddp.launch(client, train, workers=1, steps=4, directory=run.directory)
    assert (run.directory / "config.json").read_bytes() == before
