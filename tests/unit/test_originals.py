"""What the articles trained: `PRESET=original`, with the numbers of originals.yaml."""

import pytest
import yaml
from command_line import ROOT

from ddp_common import Error
from tutorials.kit import launch_options
from tutorials.kit.beforehand import check_settings

PROGRAMS = {path.stem: path for path in (ROOT / "tutorials" / "originals").glob("*.py")}
NUMBERS = yaml.safe_load((ROOT / "tutorials" / "originals.yaml").read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_takes_the_numbers_of_its_article_and_no_setting_of_the_lesson(monkeypatch, name):
    monkeypatch.setenv("PRESET", "original")
    check_settings(PROGRAMS[name])
    settings = launch_options()["run_config"]["settings"]
    assert NUMBERS[name].items() <= settings.items() and settings["data"] == "shipped"
    monkeypatch.setenv("SET", "split_seed=8")
    with pytest.raises(Error, match=f"^{name} has no setting 'split_seed'. It has: "):
        check_settings(PROGRAMS[name])
