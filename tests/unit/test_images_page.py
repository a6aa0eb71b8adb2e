"""The page on reading images: its blocks of code run, in the order in which they stand."""

import re
import shutil
import warnings
from pathlib import Path

import pytest

from ddp_common.data import datasets

PAGE = Path(__file__).parents[2] / "docs" / "images.md"


@pytest.fixture
def folder(tmp_path):
    """Eight drawn dogs of each of two breeds."""
    drawn = Path(datasets.fetch("dogs").path)
    for breed in ("beagle", "pug"):
        (tmp_path / "dogs" / breed).mkdir(parents=True)
        for path in sorted((drawn / breed).iterdir())[:8]:
            shutil.copy(path, tmp_path / "dogs" / breed)
    return tmp_path / "dogs"


def test_what_the_page_on_images_shows_is_so(folder, tmp_path, s3, capsys):
    s3.mkdir("kennel")
    s3.put(str(folder), "kennel/", recursive=True)
    names = {"folder": str(folder), "cache": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for block in blocks:
            exec(block, names)
    said = capsys.readouterr().out
    assert "beagle (3, 64, 64) 16" in said
    assert "the images from the bucket are those from the disk, bit for bit" in said
    assert f"{names['broken'].parent.name}/{names['broken'].name} is no image" in said
    assert "1 image was left out" in said
    assert any("left out" in str(warning.message) for warning in caught)
