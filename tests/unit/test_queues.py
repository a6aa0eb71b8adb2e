"""What batch systems say of jobs, read from what their commands print.

The texts are as `qstat -f` of OpenPBS, Torque and Slurm's front end writes them: long lines are
broken, and go on after a tab.
"""

from dask_ranks.clusters.queues import JobState, read_qstat, summary

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
