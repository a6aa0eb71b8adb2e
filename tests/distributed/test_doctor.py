"""The doctor: a sound cluster is ready to train; what is wrong is named with what to do."""

from dask_ranks.clusters.doctor import examine
from tutorials.kit.classroom import is_ready


def test_this_machine_is_ready_for_a_class_and_nothing_is_left(tmp_path):
    lines = []
    assert is_ready(lines.append)
    text = "\n".join(lines)
    assert "The data are here for pets, mnist" in text and "A notebook's kernel answers." in text
    for check in ("queue", "workers", "versions", "addresses"):
        assert f" {check} " in text
    assert "all workers see it" in text and "the sum over all ranks is right" in text
    assert "Ready to train" in text
    assert not any((tmp_path / "runs").iterdir())


def test_after_a_check_that_failed_nothing_is_tried():
    lines = []
    assert not examine("mars", 1, lines.append)
    text = "\n".join(lines)
    assert "FAILED     queue          There is no cluster profile 'mars'" in text
    assert "workers  " not in text and "put queue right first" in lines[-1]
