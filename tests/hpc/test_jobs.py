"""Jobs of a real Slurm beyond the main path: PBS's commands, time limits, refusals, strangers.

PBS's commands are those of slurm-wlm-torque: qsub, qstat and qdel in front of the same Slurm.
"""

import math
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pandas as pd
import psutil
import pytest
import torch
from distributed import Client, wait
from distributed.security import Security
from patience import PATIENCE
from runs_here import ROOT, finish, same_weights, wait_until, wait_until_saved
from slurm_here import (
    JOB,
    jobs,
    partition_down,
    running_jobs,
    said_by,
    state,
    submit,
    train,
    why_not,
)

import ddp_common as ddp
from ddp_common import Error

OPTIONS = {"slurm": JOB, "pbs": f"{JOB} resource_spec=nodes=1:ppn=1"}
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups".split()

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture(params=["slurm", "pbs"])
def system(request):
    """A batch system whose commands are here."""
    if request.param == "pbs" and shutil.which("qsub") is None:
        pytest.skip("no qsub here (Debian: apt install slurm-wlm-torque)")
    return request.param


@pytest.fixture(scope="module")
def undisturbed(slurm, repository, tmp_path_factory):
    """The folder of a run on this machine to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(train(slurm, folder, "in_no_hurry", repository, OPTIONS=""), folder)
    return folder


@pytest.fixture
def in_jobs(slurm, repository, tmp_path):
    """Start a training that takes its time in jobs, with `tmp_path` as its folder."""

    def start(system="slurm", options="", **variables):
        options = f"{OPTIONS[system]} {options}"
        variables = {"CLUSTER": system, "OPTIONS": options, "SET": "pause=1", **variables}
        return train(slurm, tmp_path, "in_no_hurry", repository, **variables)

    return start


def test_a_job_that_qdel_ends_in_mid_run_is_replaced_and_the_weights_are_the_same(
    slurm, in_jobs, undisturbed, tmp_path
):
    if shutil.which("qsub") is None:
        pytest.skip("no qsub here (Debian: apt install slurm-wlm-torque)")
    process = in_jobs("pbs", RESTARTS="2")
    wait_until_saved(tmp_path)
    said_by(slurm, "qdel", min(running_jobs(slurm)))
    said = finish(process, tmp_path)
    assert re.search(r"Restart 1 on 2 rank\(s\) from step [1-9]", said), said
    assert same_weights(tmp_path, undisturbed)


def test_the_client_is_a_job_too_and_submits_those_of_the_workers(slurm, system, tmp_path):
    (tmp_path / "clusters").symlink_to(ROOT / "clusters")
    command = {"slurm": ["sbatch", "pets.sbatch"], "pbs": ["qsub", "pets.pbs"]}[system]
    variables = {
        "OPTIONS": OPTIONS[system],
        "SET": "epochs=1 hidden=16 batch_size=8",
        "CHECKPOINT": str(tmp_path / "run"),
        "RUNS": str(tmp_path / "runs"),
    }
    command[1] = f"clusters/batch/{command[1]}"
    submitted = slurm.login.start(
        command, cwd=tmp_path, env={**slurm.environment, **variables}, stdout=subprocess.DEVNULL
    )
    assert submitted.wait() == 0
    wait_until(lambda: not jobs(slurm))
    log = "".join(path.read_text() for path in tmp_path.glob("pets-*.log"))
    assert re.search(r"(?s)held out\n.*The run begins.*Done in", log), log
    assert len(list((tmp_path / "runs" / "clusters").glob("*/*"))) >= 2  # the workers' logs


def test_near_the_time_limit_ranks_save_and_the_run_goes_on_in_new_jobs(
    slurm, in_jobs, undisturbed, tmp_path
):
    """The first jobs may be over before training has begun, on a slow machine: others follow."""
    minutes = math.ceil(PATIENCE / 60) + 2
    warning = minutes * 60 - math.ceil(0.7 * PATIENCE)
    process = in_jobs(options=f"walltime=00:{minutes:02}:00 warning={warning}", RESTARTS="20")
    said = finish(process, tmp_path)
    assert len(list((tmp_path / "runs" / "clusters").glob("*/*.log"))) > 2, "no new job"
    assert re.search(
        r"Restart \d+ on 2 rank\(s\) from step [1-9].*got SIGTERM near the time", said
    ), said
    assert same_weights(tmp_path, undisturbed)


def test_where_no_new_job_starts_in_time_the_run_goes_on_with_those_there_are(
    slurm, in_jobs, tmp_path
):
    process = in_jobs(options=f"timeout={PATIENCE:.0f}", RESTARTS="1")
    wait_until_saved(tmp_path)
    with partition_down(slurm):
        said_by(slurm, "scancel", min(running_jobs(slurm)))
        said = finish(process, tmp_path)
    assert "Going on with 1 of 2 workers: the others did not come within" in said
    assert re.search(r"Restart 1 on 1 rank\(s\) from step [1-9]", said), said
    lost = r"its worker (died or cannot be reached|was closed)"
    job = r"job \d+: (it was cancelled \(CANCELLED|it is ending \(COMPLETING)\)"
    assert re.search(rf"{lost} \({job}\)", said), said


def test_jobs_end_by_themselves_when_the_program_that_submitted_them_is_killed(
    slurm, in_jobs, tmp_path
):
    process = in_jobs()
    wait_until_saved(tmp_path)
    process.kill()
    process.wait()
    wait_until(lambda: not jobs(slurm))


def test_a_killed_task_ends_the_job_of_srun_and_the_log_names_it(slurm, repository, tmp_path):
    chosen = {"TUTORIAL": "in_no_hurry", "SET": "pause=1", "CHECKPOINT": str(tmp_path / "run")}
    job = submit(slurm, tmp_path, "clusters/batch/mnist.sbatch", repository, **chosen)
    wait_until_saved(tmp_path)
    tasks = [psutil.Process(pid) for node in slurm.nodes for pid in node.pids()]
    rank_1 = next(task for task in tasks if task.environ().get("SLURM_PROCID") == "1")
    rank_1.kill()
    wait_until(lambda: state(slurm, job) == "FAILED")
    assert "task 1: Killed" in (tmp_path / f"{job}.log").read_text()


# What goes wrong before there is a worker


def refusal(slurm, process, folder):
    said = finish(process, folder, code=1)
    assert not list((folder / "runs").rglob("credentials"))
    wait_until(lambda: not jobs(slurm))
    return said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("queue=nowhere", "Slurm refused the job: sbatch: error: invalid partition .*: nowhere"),
        ("python=/no/such/python", r"(?s)Job \d+ ended before .*/no/such/python: No such file"),
    ],
    ids=["refused", "dies_at_its_start"],
)
def test_a_job_that_cannot_run_is_one_error_with_the_batch_systems_words(
    slurm, in_jobs, tmp_path, options, words
):
    said = refusal(slurm, in_jobs(options=options), tmp_path)
    assert re.search(words, said), said


def test_jobs_that_never_start_end_the_wait_with_the_queues_own_reason(
    slurm, system, in_jobs, tmp_path
):
    with partition_down(slurm):
        said = refusal(slurm, in_jobs(system, f"timeout={PATIENCE / 5:.0f}"), tmp_path)
    name, reason = {"slurm": ("Slurm", "PartitionDown"), "pbs": ("PBS", "state Q")}[system]
    assert f"{name} says of the jobs: 2 pending ({reason}). They were cancelled." in said


def site_wrapper(slurm, folder, lines):
    """PATH with an `sbatch` of a site's own, of these lines of bash."""
    (folder / "sbatch").write_text(f"#!/bin/bash\n{lines}\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}:{slurm.environment['PATH']}"


GREETING = "Welcome to Lynx 3. Maintenance on 12 December 2026. You have 850 core hours."


def test_the_numbers_in_a_sites_greeting_are_not_taken_for_jobs(slurm, in_jobs, tmp_path):
    real = shutil.which("sbatch", path=slurm.environment["PATH"])
    path = site_wrapper(slurm, tmp_path, f'echo "{GREETING}"\n{real} "$@"')
    with partition_down(slurm):
        said = refusal(slurm, in_jobs(options=f"timeout={PATIENCE / 5:.0f}", PATH=path), tmp_path)
    assert "Slurm says of the jobs: 2 pending (PartitionDown). They were cancelled." in said


def test_a_command_that_names_no_job_is_an_error_with_what_it_has_said(slurm, in_jobs, tmp_path):
    process = in_jobs(PATH=site_wrapper(slurm, tmp_path, f'echo "{GREETING}"'))
    said = refusal(slurm, process, tmp_path)
    assert f"The batch system has not named one job. It said: {GREETING}\n" in said, said


def test_a_scheduler_that_other_hosts_cannot_reach_is_refused_before_a_job_is_submitted(
    slurm, repository, tmp_path
):
    """The login host's own name leads to 127.0.1.1, and it has no default route."""

    def start(**variables):
        return train(slurm, tmp_path, "in_no_hurry", repository, CLUSTER="slurm", **variables)

    before = jobs(slurm, "--states=all")
    said = refusal(slurm, start(OPTIONS="cores=1 memory=1GiB"), tmp_path)
    assert "cannot reach a scheduler at 127.0.1.1" in said, said
    assert 'OPTIONS="interface=…", one of lo, link0, link1.' in said
    assert jobs(slurm, "--states=all") == before
    assert not list((tmp_path / "runs" / "clusters").iterdir())
    with partition_down(slurm):
        on_purpose = start(OPTIONS="cores=1 memory=1GiB interface=lo timeout=1")
        assert "2 pending" in refusal(slurm, on_purpose, tmp_path)


def test_a_sites_settings_are_said_and_the_log_of_a_job_stays_where_it_is_looked_for(
    slurm, in_jobs, tmp_path
):
    (tmp_path / "jobqueue.yaml").write_text(
        f"jobqueue:\n  slurm:\n    queue: main\n    log-directory: {tmp_path / 'theirs'}\n"
    )
    process = in_jobs(options="python=/no/python", DASK_CONFIG=str(tmp_path))
    said = refusal(slurm, process, tmp_path)
    replaced = f"Replaced here: log_directory={tmp_path / 'theirs'}.\nJob logs and credentials"
    assert f"From jobqueue.yaml, Dask's settings: queue=main. {replaced}" in said, said
    assert re.search(r"(?s)Job \d+ ended before .*/no/python: No such file", said), said


def test_without_the_commands_of_the_batch_system_it_says_so(slurm, in_jobs, tmp_path):
    said = refusal(slurm, in_jobs(PATH=str(tmp_path)), tmp_path)
    assert "There is no sbatch here" in said and "DRY=1" in said


def test_a_batch_system_that_does_not_answer_is_called_so(slurm, in_jobs, tmp_path):
    right = Path(slurm.environment["SLURM_CONF"]).read_text()
    wrong = f"{right}SlurmctldPort=1\n"  # nobody listens there
    path = tmp_path / "wrong.conf"
    path.write_text(re.sub(r"MessageTimeout=\d+", "MessageTimeout=2", wrong))
    said = refusal(slurm, in_jobs(SLURM_CONF=str(path)), tmp_path)
    assert "Unable to contact slurm controller" in said, said


def test_ctrl_c_while_jobs_wait_leaves_none_in_the_queue(slurm, in_jobs, tmp_path):
    with partition_down(slurm):
        process = in_jobs()
        wait_until(lambda: "2 pending" in (tmp_path / "output").read_text())
        process.send_signal(signal.SIGINT)
        assert "Stopped." in finish(process, tmp_path, code=130)
        wait_until(lambda: not jobs(slurm))


# One cluster of two jobs for what follows


@pytest.fixture(scope="module")
def client(slurm, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, slurm.login.network():
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, slurm.environment[name])
        patch.setenv("OPTIONS", JOB)
        patch.setenv("RUNS", str(tmp_path_factory.mktemp("client") / "runs"))
        with ddp.connect("slurm", workers=2) as client:
            yield client
    wait_until(lambda: not jobs(slurm))


def test_ranks_in_jobs_read_the_partitions_of_a_table_where_they_lie(client):
    def partition(number):
        return pd.DataFrame({"x": [float(number)] * 100})

    def values_seen(table):
        data = table.tensors(lambda frame: torch.tensor(frame.x.to_numpy()))
        sampler = ddp.ElasticSampler(data, 40, seed=1)
        loader = ddp.DataLoader(data, batch_sampler=sampler)
        batches = [x for _ in sampler.epochs(1) for x in loader]
        return sorted({value.item() for x in batches for value in x})

    def fetched(dask_worker):
        return sum(each["total"] for each in dask_worker.transfer_incoming_log)

    workers = sorted(client.workers())
    table = [client.submit(partition, n, workers=[workers[n % 2]]) for n in range(4)]
    wait(table)
    before = client.run(fetched)
    run = ddp.launch(client, values_seen, workers=2, table=table)
    assert client.run(fetched) == before
    assert run.result in ([0, 2], [1, 3])


def test_a_client_without_the_credentials_of_the_run_is_refused(client, monkeypatch):
    address = client.scheduler.address
    assert address.startswith("tls://")
    folder = client.jobs.directory / "credentials"
    modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes == [0o700, 0o600, 0o600, 0o600]
    plain = address.replace("tls://", "tcp://")
    for stranger, security in ((plain, None), (address, Security.temporary())):
        with pytest.raises(OSError):
            Client(stranger, security=security, timeout=3)
    worker = next(iter(client.workers()))  # it runs code, too
    with pytest.raises(OSError):
        Client(worker.replace("tls://", "tcp://"), timeout=3)
    with pytest.raises(Error, match="no Dask scheduler could be reached"):
        ddp.connect(address)


def test_another_user_reads_no_page_of_scheduler_or_workers_and_finds_no_file(slurm, client):
    dashboard = urlsplit(client.dashboard_link)
    ports = client.run(lambda dask_worker: dask_worker.http_server.port)
    named = {node.address: node for node in slurm.nodes}
    servers = [(named[urlsplit(at).hostname], port) for at, port in ports.items()]
    for host, port in ((slurm.login, dashboard.port), *servers):
        for path in ("/", "/status", "/info/main/workers.html", "/json/identity.json"):
            curl = ["curl", "--noproxy", "*", "-s", f"http://127.0.0.1:{port}{path}"]
            curl += ["-o", "/dev/null", "-w", "%{http_code}"]
            assert host.run(*NOBODY, *curl) == "404", path
    assert dashboard.hostname == "127.0.0.1"
    assert urllib.request.urlopen(client.dashboard_link).status == 200
    assert client.jobs.directory.stat().st_mode & 0o777 == 0o700
    for folder in client.run(lambda dask_worker: dask_worker.local_directory).values():
        parents = Path(folder).parents
        assert any(part.stat().st_mode & 0o777 == 0o700 for part in parents[1:3])


def test_a_second_launch_finds_the_same_jobs_and_a_cancelled_one_is_replaced_before_it(
    slurm, client
):
    before = set(running_jobs(slurm))
    assert ddp.launch(client, ddp.world_size).result == 2
    assert set(running_jobs(slurm)) == before
    said_by(slurm, "scancel", min(before))
    wait_until(lambda: len(client.workers()) == 1)
    assert ddp.launch(client, ddp.world_size).result == 2
    assert set(running_jobs(slurm)) != before
