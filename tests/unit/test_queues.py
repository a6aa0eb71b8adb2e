"""What batch systems say of jobs, read from what their commands print.

The texts are as `qstat -f` of OpenPBS, Torque and Slurm's front end writes them: long lines are
broken, and go on after a tab.
"""

from types import SimpleNamespace

import pytest

from dask_ranks.clusters.jobs import Jobs
from dask_ranks.clusters.queues import JobState, job_number, read_qstat, slurm_states, summary
from ddp_common import Error

OPENPBS = """\
Job Id: 12.head
    Job_Name = dask-worker
    Job_Owner = ada@login
    job_state = R
    queue = workq
    comment = Job run at Thu Nov 26 at 10:00 on (n1:ncpus=2:mem=4194304kb)
    Variable_List = PBS_O_HOME=/home/ada,PBS_O_LANG=C.UTF-8,PBS_O_LOGNAME=ada,
\tPBS_O_PATH=/usr/bin:/bin,PBS_O_QUEUE=workq,PBS_O_HOST=login

Job Id: 13.head
    Job_Name = dask-worker
    job_state = Q
    comment = Not Running: Insufficient amount of resource: ncpus (R: 99 A: 1
\t6 T: 16)
    etime = Thu Nov 26 10:00:01 2026

Job Id: 15.head
    job_state = E
    comment = Job run at Thu Nov 26 at 10:00 on (n1:ncpus=2:mem=4194304kb)
    Exit_status = 271

Job Id: 16.head
    job_state = F
    comment = Job run at Thu Nov 26 at 09:00 on (n1:ncpus=2) and failed
    Exit_status = -29

"""

TORQUE = """\
Job Id: 7.server.site.org
    Job_Name = dask-worker
    job_state = C
    exit_status = 1

Job Id: 8.server.site.org
    job_state = H
"""


OF_SLURM = """\
Job Id:\t18
\tJob_Name = dask-worker
\tjob_state = R
\tqueue = main
\tResource_List.walltime = 01:00:00

"""


def test_a_reason_that_qstat_has_broken_in_two_is_whole():
    states = read_qstat(OPENPBS)
    resources = "Not Running: Insufficient amount of resource: ncpus (R: 99 A: 16 T: 16)"
    assert states["13"] == (JobState.PENDING, resources)
    assert summary({"13": states["13"]}) == f"1 pending ({resources})"


def test_where_a_job_ran_is_no_reason_for_its_end():
    states = read_qstat(OPENPBS)
    assert states["12"][0] is JobState.RUNNING
    assert states["15"][0] is states["16"][0] is JobState.ENDED
    assert (states["15"][1], states["16"][1]) == ("exit status 271", "exit status -29")
    assert "Job run at" not in summary(states)


def test_torque_says_it_in_other_words():
    states = read_qstat(TORQUE)
    assert states["7"] == (JobState.ENDED, "exit status 1")
    assert states["8"] == (JobState.PENDING, "state H")
    assert read_qstat(OF_SLURM) == {"18": (JobState.RUNNING, "state R")}


GREETING = "Welcome to Lynx 3. Maintenance on 12 December 2026.\nLynx 3.1: 850 core hours left\n"


@pytest.mark.parametrize(
    "line",
    ["Submitted batch job 4711", "Submitted batch job 4711 on cluster lynx3", "4711"]
    + ["4711;lynx3", "4711.pbs-1.site.org", "4711[].server", "4711.1node "],
)
def test_the_number_of_a_job_is_what_a_command_says_in_its_own_form(line):
    assert job_number(f"{line}\n") == job_number(f"{GREETING}{line}\nHave fun.\n") == "4711"


@pytest.mark.parametrize("said", ["", GREETING, "12.5\n", "1\n2\n", "job 5 is submitted\n"])
def test_other_numbers_are_not_taken_for_that_of_a_job(said):
    with pytest.raises(Error, match="The batch system has not named one job. It said: "):
        job_number(said)


def test_an_end_is_told_in_words_with_slurms_own(tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho '5|CANCELLED|None\n6|TIMEOUT|TimeLimit\n7|SPECIAL_EXIT|None'"
        "\necho '8|PENDING|Priority'\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = ["it was cancelled (CANCELLED)", "its time limit was reached (TimeLimit)"]
    whys = [why for _, why in slurm_states("5678").values()]
    assert whys == [*words, "SPECIAL_EXIT", "Priority"]


def test_only_a_jobs_own_log_is_shown(tmp_path):
    (tmp_path / "credentials").mkdir()
    for name in ("credentials/worker-3.log", "key.3", ".key.a3b", "worker-13.log", "3", "3.txt"):
        (tmp_path / name).write_text("secret")
    jobs = SimpleNamespace(directory=tmp_path, _ids=lambda: {"worker-0": "3"})
    assert Jobs.log(jobs, "worker-0").startswith("Job 3 has left no log in ")
    for name in ("worker-3.log", "worker-3.pbs.org.log", "3.pbs.org.OU", "dask-worker.e3"):
        (tmp_path / name).write_text(f"from {name}")
    said = Jobs.log(jobs, "worker-0")
    assert said.count("from ") == 4 and "secret" not in said
