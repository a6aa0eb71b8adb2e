"""The doctor: a sound cluster is fit to train; what is wrong is named with what to do."""

from ddp_common.clusters.doctor import examine


def test_a_sound_cluster_is_fit_to_train_and_nothing_is_left(tmp_path):
    lines = []
    assert examine("local", 2, lines.append)
    text = "\n".join(lines)
    assert "Fit to train" in text and "the sum is right" in text
    assert not any((tmp_path / "runs").iterdir())


def test_a_profile_that_does_not_exist_is_the_finding():
    lines = []
    assert not examine("mars", 1, lines.append)
    assert "There is no cluster profile 'mars'" in "\n".join(lines)
