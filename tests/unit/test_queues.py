"""What batch systems say of jobs, read from what their commands print.

The texts are as `qstat -f` of OpenPBS, Torque and Slurm's front end writes them: long lines are
broken, and go on after a tab.
"""

from ddp_common.clusters.jobs import WholeIds, told
from ddp_common.clusters.profiles import cluster_class
from ddp_common.clusters.queues import JobState, read_qstat, summary

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

Job Id: 14.head
    job_state = Q
    comment = Can Never Run: Insufficient amount of resource: mem (R: 900gb A:
\t 64gb T: 64gb)

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


def test_a_job_that_can_never_run_is_no_pending_one():
    state, why = read_qstat(OPENPBS)["14"]
    assert state is JobState.NEVER and why.endswith("mem (R: 900gb A: 64gb T: 64gb)")


def test_where_a_job_ran_is_no_reason_for_its_end():
    states = read_qstat(OPENPBS)
    assert states["12"][0] is JobState.RUNNING
    assert states["15"][0] is states["16"][0] is JobState.ENDED
    assert "SIGTERM" in states["15"][1] and states["16"][1] == "its time limit"
    assert "Job run at" not in summary(states)


def test_torque_says_it_in_other_words():
    states = read_qstat(TORQUE)
    assert states["7"] == (JobState.ENDED, "its exit status is 1")
    assert states["8"] == (JobState.PENDING, "state H")
    assert read_qstat(OF_SLURM) == {"18": (JobState.RUNNING, "it runs")}


def test_an_id_of_pbs_keeps_the_name_of_its_server():
    class PBSJob(WholeIds, cluster_class("dask_jobqueue.PBSCluster").job_cls):
        pass

    job = PBSJob("tls://here:1", name="one", cores=1, memory="1GiB")
    assert (
        job._job_id_from_submit_output("12.other-server.site.org\n") == "12.other-server.site.org"
    )


def test_the_line_of_a_log_that_names_the_cause_is_shown_before_its_end():
    log = ["starts", "ValueError: 'ib0' is not a valid network interface", *"abcdefghijklmnopq"]
    shown = told("\n".join(log)).splitlines()
    assert shown[0].startswith("ValueError: 'ib0'") and shown[-1] == "q" and len(shown) == 16
