"""Profiles of clusters and their options: extended, overridden, and refused with what is wrong."""

import pytest
from children import children

from dask_ranks.clusters.connect import describe
from dask_ranks.clusters.jobs import seconds_of
from dask_ranks.clusters.profiles import PROFILES, read_profile
from ddp_common import Error, connect


@pytest.fixture
def write(tmp_path):
    """Write a profile; returns its path."""

    def write(text, name="mine.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_profile_may_extend_one_beside_it(write):
    write("cluster: a.Cluster\ntimeout: 5\noptions: {cores: 3, memory: 1GiB}", "base.yaml")
    profile = read_profile(write("extends: base.yaml\noptions: {memory: 2GiB}"), "")
    assert profile["timeout"] == 5 and profile["options"] == {"cores": 3, "memory": "2GiB"}


def test_options_reach_the_profile_and_into_its_mappings():
    profile = read_profile(
        "slurm",
        "timeout=5 workers=7 cores=12 walltime=12:00:00 scheduler_options.interface=eth1 "
        "job_extra_directives='[--exclusive, -C x]'",
    )
    assert (profile["timeout"], profile["workers"]) == (5, 7)
    assert profile["options"]["walltime"] == "12:00:00" and profile["options"]["cores"] == 12
    assert profile["options"]["scheduler_options"] == {"interface": "eth1"}
    assert profile["options"]["job_extra_directives"] == ["--exclusive", "-C x"]


@pytest.mark.parametrize("options", ["workers=3", "queue=gpu"])
def test_an_option_at_an_address_is_refused(options):
    with pytest.raises(Error, match="nothing is started at an address"):
        read_profile("tcp://127.0.0.1:9", options)


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("00:01:00", 60), ("1-00:00:00", 86400), ("30:00", 1800), ("2-12", 216000), ("0-1:30", 5400)],
)
def test_walltimes_are_understood_as_the_batch_systems_do(walltime, seconds):
    assert seconds_of(walltime) == seconds


# What is refused


def refusal(*arguments):
    """What `connect` says; it has started no process."""
    before = children()
    with pytest.raises(Error) as caught:
        connect(*arguments).close()
    assert children() <= before
    return str(caught.value)


FAULTS = {
    "yaml": ("cluster: [unclosed", "valid YAML"),
    "no_cluster": ("workers: 2", "no cluster class"),
    "unknown_module": ("cluster: no_such_package.Cluster", "no_such_package"),
    "unknown_key": ("cluster: a.B\nwalltime: 5", "unknown keys: walltime"),
    "extends_nothing": ("extends: no-such-profile", "no cluster profile 'no-such-profile'"),
    "extends_itself": ("extends: mine.yaml", "extends itself"),
    "walltime": ("extends: slurm\noptions: {walltime: two hours}", "hours:minutes:seconds"),
}


@pytest.mark.parametrize("text, reason", FAULTS.values(), ids=FAULTS)
def test_a_faulty_profile_is_refused_before_its_batch_system_is_looked_for(
    write, monkeypatch, text, reason
):
    monkeypatch.setenv("PATH", "")
    assert reason in refusal(write(text))


WRONG = {
    "processes=two": "whole number of at least 1",
    "timeout=-1": "timeout takes a number of at least 0",
    "cores=two": "slurm.yaml: dask_jobqueue.SLURMCluster could not be started: TypeError: uns",
    "memory=lots": "could not be started: ValueError: Could not interpret 'lots'",
    "job_extra_directives=--exclusive": "is no list. Write [--exclusive].",
    "scheduler_options=eth0": "object is not a mapping\nIf that names an option",
    "quue=gpu": "unexpected keyword argument 'quue'\nIf that names an option",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_option_is_one_error_before_anything_starts(monkeypatch, options):
    monkeypatch.setenv("OPTIONS", options)
    with pytest.raises(Error) as refused:
        describe("slurm")
    assert WRONG[options] in str(refused.value)


@pytest.mark.parametrize("option", ["protocol", "queue"])
def test_an_option_that_a_local_cluster_refuses_is_told_in_its_words_and_leaves_no_process(
    monkeypatch, caplog, option
):
    monkeypatch.setenv("OPTIONS", f"{option}=5")
    said = refusal()
    assert f"{PROFILES / 'local.yaml'}: distributed.LocalCluster could not be started: " in said
    assert option != "queue" or "got an unexpected keyword argument 'queue'" in said
    assert "Traceback" not in caplog.text


def test_a_profile_is_read_without_running_what_is_in_it(write, tmp_path):
    trap = tmp_path / "it-ran"
    with pytest.raises(Error, match="valid YAML"):
        read_profile(write(f"cluster: !!python/object/apply:os.mkdir ['{trap}']"), "")
    assert not trap.exists()


def test_a_local_cluster_speaks_tls():
    assert "security=True" in describe("local", 2)
