"""More scripts as others write them, unchanged: `ddprun` ends with the numbers of torchrun."""

import pytest
from script_runs import results_of_both

SCRIPTS = [
    ["rank_at_the_top.py", "--config", "config.yaml"],
    ["with_a_library.py"],
    ["accumulates.py"],
    ["shards.py", "saved"],
]


@pytest.mark.parametrize("words", SCRIPTS, ids=lambda words: words[0])
def test_another_script_ends_with_the_numbers_that_it_has_under_torchrun(tmp_path, words):
    ours, theirs = results_of_both(words, tmp_path)
    assert ours and ours == theirs
