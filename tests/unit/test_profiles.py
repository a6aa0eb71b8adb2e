"""Profiles and numbers of workers that are wrong; clusters that start are in tests/distributed."""

import textwrap

import pytest
import torch
from children import children

from ddp_common import Error, connect
from ddp_common.clusters.profiles import PROFILES, number_of_workers, read_profile


@pytest.fixture
def profile(tmp_path):
    """Write a profile; returns its path."""

    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def refusal(*args, **kwargs):
    with pytest.raises(Error) as caught:
        connect(*args, **kwargs).close()
    return str(caught.value)


def test_an_unknown_profile_lists_the_known_ones():
    message = refusal("nowhere")
    assert "'nowhere'" in message
    assert all(path.stem in message for path in PROFILES.glob("*.yaml"))


def test_an_unknown_profile_from_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("CLUSTER", "elsewhere")
    assert "'elsewhere'" in refusal()


def test_the_path_of_a_profile_that_is_not_there_is_named(tmp_path):
    assert "absent.yaml" in refusal(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "invalid_yaml": ("cluster: [unclosed", "valid YAML"),
        "no_cluster_key": ("workers: 2", "no cluster class"),
        "empty": ("", "no cluster class"),
        "list": ("- cluster", "no cluster class"),
        "unknown_module": ("cluster: no_such_package.Cluster", "no_such_package"),
        "unknown_class": ("cluster: distributed.NoSuchCluster", "NoSuchCluster"),
        "class_without_module": ("cluster: LocalCluster", "LocalCluster"),
        "cluster_is_a_number": ("cluster: 5", "5"),
        "options_are_a_list": ("cluster: distributed.LocalCluster\noptions: [1, 2]", "options"),
        "unknown_option": (
            "cluster: distributed.LocalCluster\n"
            "options: {no_such_option: 1, dashboard_address: '127.0.0.1:0'}",
            "no_such_option",
        ),
        "workers_left_blank": ("cluster: distributed.LocalCluster\nworkers:", "workers"),
        "workers_is_a_list": ("cluster: distributed.LocalCluster\nworkers: [1]", "workers"),
    }.values(),
    ids=[
        "invalid_yaml",
        "no_cluster_key",
        "empty",
        "list",
        "unknown_module",
        "unknown_class",
        "class_without_module",
        "cluster_is_a_number",
        "options_are_a_list",
        "unknown_option",
        "workers_left_blank",
        "workers_is_a_list",
    ],
)
def test_a_faulty_profile_is_refused_with_the_reason(profile, text, reason):
    before = children()
    assert reason in refusal(profile(text))
    assert children() <= before


def test_the_packaged_profiles_can_be_read():
    for path in PROFILES.glob("*.yaml"):
        assert "." in read_profile(path.stem)["cluster"]


@pytest.mark.parametrize("number", ["0", "abc", "-1", "1.5", ""])
def test_a_number_of_workers_that_is_none_is_refused(number):
    with pytest.raises(Error, match="whole number of at least 1"):
        number_of_workers(number)


@pytest.mark.parametrize("number", ["0", "abc"])
def test_workers_from_the_environment_is_checked_before_a_cluster_starts(monkeypatch, number):
    monkeypatch.setenv("WORKERS", number)
    before = children()
    assert f"WORKERS={number}" in refusal()
    assert children() <= before


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it is their number")
def test_by_default_there_are_two_to_four_workers():
    assert 2 <= number_of_workers("auto") <= 4
    assert number_of_workers("3") == 3


@pytest.mark.parametrize(
    "options",
    [
        "threads_per_worker=two",
        "memory_limit=lots",
        "host=5",
        "n_workers=3",
        "security=5",
        "protocol=5",
        "scheduler_port=x",
        "worker_class=x",
        "preload=5",
    ],
)
def test_options_of_the_wrong_kind_are_one_error_and_leave_no_process(monkeypatch, options):
    monkeypatch.setenv("OPTIONS", options)
    before = children()
    said = refusal()
    assert (
        "LocalCluster could not be started with the profile's options: " in said
        or "The profile local has the option" in said
    )
    assert children() <= before


def test_a_profile_is_read_without_running_what_is_in_it(profile, tmp_path):
    trap = tmp_path / "it-ran"
    with pytest.raises(Error, match="valid YAML"):
        read_profile(profile(f"cluster: !!python/object/apply:os.mkdir ['{trap}']"), "")
    assert not trap.exists()
