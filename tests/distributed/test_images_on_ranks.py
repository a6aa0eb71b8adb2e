"""Folders of images as several ranks see them.

Listed once, the same for all, each of them seen once.
"""

import os
import sys

import cloudpickle
import numpy as np
import pytest
from PIL import Image
from tables_here import everyone

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE = 8


@pytest.fixture
def folder(tmp_path):
    """Seven images in each of two classes."""
    for label in ("cat", "dog"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(7):
            pixels = np.random.default_rng([ord(label[0]), number]).integers(
                0, 256, (20, 20, 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(tmp_path / "set" / label / f"{number}.png")
    return tmp_path / "set"


def look(url, environment=None, feeders=0):
    """Per rank: classes, targets, labels evaluated."""
    os.environ.update(environment or {})
    images = ddp.ImageFolder(url, SIZE, cache="memory")
    share = ddp.EvalSampler(len(images), 3)
    loader = ddp.DataLoader(images, batch_sampler=share, num_workers=feeders)
    evaluated = [label for _, labels in loader for label in labels.tolist()]
    return everyone((images.classes, images.targets, evaluated))


def launched(client, size, directory, **arguments):
    return ddp.launch(client, look, workers=size, directory=directory, **arguments).result


def test_any_number_of_ranks_has_the_same_list_and_sees_every_image_once(client, folder, tmp_path):
    for size, feeders in ((1, 0), (2, 2), (3, 0)):
        run = tmp_path / f"run-{size}"
        ranks = launched(client, size, run, url=str(folder), feeders=feeders)
        assert sorted(label for rank in ranks for label in rank[2]) == [0] * 7 + [1] * 7
        assert all(rank[:2] == (["cat", "dog"], [0] * 7 + [1] * 7) for rank in ranks)


def test_one_rank_asks_object_storage_for_the_list_and_each_image_is_read_once(
    client, s3, s3_log, folder, tmp_path
):
    s3.mkdir("photos")
    s3.put(f"{folder}/", "s3://photos/set/", recursive=True)
    before = len(s3_log.read_text().splitlines())
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    ranks = launched(client, 3, tmp_path / "run", url="s3://photos/set", environment=environment)
    lines = s3_log.read_text().splitlines()[before:]
    asked = [line.split('"')[1] for line in lines if '"' in line]
    assert len(asked) == 1 + 14 and sum("list-type=2" in line for line in asked) == 1, asked
    assert all(rank[1] == [0] * 7 + [1] * 7 for rank in ranks)


def test_what_rank_0_finds_wrong_is_said_by_the_run(client, tmp_path):
    words = "/nowhere cannot be read: .*No such file"
    with pytest.raises(ddp.RankFailed, match=words):
        launched(client, 3, tmp_path / "run", url=str(tmp_path / "nowhere"))
