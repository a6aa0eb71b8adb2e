"""CLUSTER=slurm and CLUSTER=pbs: Dask workers that are jobs of a real Slurm.

For PBS it stands behind its own qsub, qstat and qdel.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from distributed import Client
from distributed.security import Security
from slurm_here import why_not, without_controller

import ddp_common as ddp
from ddp_common import Error
from ddp_common.ranks.checkpoint_files import checkpoints, newest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("train_on_table.py")
NO_HURRY = ROOT / "tests" / "train_in_no_hurry.py"
PATIENCE = 240  # seconds for what takes a few on an idle machine
JOB = "cores=1 memory=1GiB"
NAMES = {"slurm": "Slurm", "pbs": "PBS"}
OPTIONS = {"slurm": JOB, "pbs": f"{JOB} resource_spec=nodes=1:ppn=1"}

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture(params=["slurm", "pbs"])
def system(request):
    """A batch system of which all three commands are here."""
    if request.param == "pbs" and shutil.which("qsub") is None:
        pytest.skip("no qsub here (Debian: apt install slurm-wlm-torque)")
    return request.param


@pytest.fixture
def here(slurm, monkeypatch, tmp_path):
    """This process can submit jobs, from an empty folder; what it submits is small."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm[name])
    monkeypatch.setenv("OPTIONS", JOB)
    monkeypatch.chdir(tmp_path)


def start(command, slurm, folder, system, variables, cwd=None):
    """Start a program of ours, on two workers by default; its output is in `folder`/output."""
    folder.mkdir(exist_ok=True)
    variables = {
        "CLUSTER": system,
        "WORKERS": "2",
        "OPTIONS": OPTIONS[system],
        "CHECKPOINT": str(folder / "run"),
        "RUNS": str(folder / "runs"),
        **variables,
    }
    with open(folder / "output", "w") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd or folder,
            env={**slurm, **variables},
            stdout=output,
            stderr=output,
        )


def make_run(slurm, folder, system="slurm", **variables):
    """Start the command behind `make run`: a short training."""
    return start(["-m", "ddp_common", "run", "pets"], slurm, folder, system, variables)


def in_no_hurry(slurm, folder, system="slurm", pause=1, command=(NO_HURRY,), cwd=None, **more):
    """Start a training that takes 200 s, unless it is resumed before: then it hurries."""
    return start(command, slurm, folder, system, {"SET": f"pause={pause}", **more}, cwd)


def finish(process, folder, within=PATIENCE):
    """(exit code, what it said)."""
    process.wait(within)
    return process.returncode, (folder / "output").read_text()


def jobs(slurm):
    """The numbers of the jobs that wait or run."""
    squeue = ["squeue", "--noheader", "--format=%i"]
    return subprocess.run(squeue, env=slurm, capture_output=True, text=True).stdout.split()


def wait_until(condition, within=PATIENCE):
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


@contextlib.contextmanager
def partition_down(slurm):
    """Meanwhile no job starts."""
    update = ["scontrol", "update", "PartitionName=main"]
    subprocess.run([*update, "State=DOWN"], env=slurm, check=True)
    try:
        yield
    finally:
        subprocess.run([*update, "State=UP"], env=slurm, check=True)


def weights(directory):
    return torch.load(newest(directory / "checkpoints"))["model"]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """The run directory of two ranks on this machine, without a batch system."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = finish(make_run(slurm, folder, CLUSTER="local", OPTIONS=""), folder)
    assert code == 0, said
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed_in_a_hurry(slurm, tmp_path_factory):
    """The same of the run that has time, without its pauses."""
    folder = tmp_path_factory.mktemp("in-a-hurry")
    here = {"CLUSTER": "local", "OPTIONS": ""}
    code, said = finish(in_no_hurry(slurm, folder, pause=0, **here), folder)
    assert code == 0, said
    return folder / "run"


def test_two_jobs_train_and_leave_nothing_but_logs(slurm, system, undisturbed, tmp_path):
    code, said = finish(make_run(slurm, tmp_path, system), tmp_path)
    assert code == 0, said
    assert equal(weights(tmp_path / "run"), weights(undisturbed))
    (cluster,) = (tmp_path / "runs" / "clusters").iterdir()
    assert cluster.stat().st_mode & 0o777 == 0o700
    logs = [path.read_text() for path in cluster.iterdir()]
    assert sum("Starting Worker plugin ddp-preload" in log for log in logs) == 2
    assert not list(cluster.glob("*.pem"))
    wait_until(lambda: not jobs(slurm))


@pytest.mark.timeout(900)  # six workers and three clients on the cores that there are
def test_three_runs_at_once_do_not_meet(slurm, undisturbed_in_a_hurry, tmp_path):
    """They train for 4 s at least, so that they do so at once."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    processes = [in_no_hurry(slurm, folder, pause=0.02) for folder in folders]
    for process, folder in zip(processes, folders):
        code, said = finish(process, folder, within=700)
        assert code == 0, said
        assert equal(weights(folder / "run"), weights(undisturbed_in_a_hurry))


def test_a_job_that_is_cancelled_in_the_middle_is_submitted_again_and_the_weights_are_the_same(
    slurm, system, undisturbed_in_a_hurry, tmp_path
):
    process = in_no_hurry(slurm, tmp_path, system, RESTARTS="2")
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    cancel = "scancel" if system == "slurm" else "qdel"
    subprocess.run([cancel, jobs(slurm)[0]], env=slurm, check=True)
    code, said = finish(process, tmp_path)
    assert code == 0, said
    why = r"(Rank \d of 2 on \S+ failed|The run was told to stop)"
    restarted = rf"Restart 1 on 2 rank\(s\) from step [1-9]\d*\. Why: {why}"
    assert re.search(restarted, said), said
    assert re.search(r"Job \d+ makes room for a new one: ", said), said
    assert equal(weights(tmp_path / "run"), weights(undisturbed_in_a_hurry))


# Jobs of three minutes, whose ranks are told to leave 60 s after the job's start. On a busy
# machine it takes 30 s of them until they train.
WARNING = 120  # seconds before the limit
LIMIT = f"walltime=00:03:00 warning={WARNING}"


@pytest.mark.timeout(2_400)  # as many jobs as it takes
def test_near_the_time_limit_ranks_save_and_the_run_goes_on_in_new_jobs(
    slurm, system, undisturbed_in_a_hurry, tmp_path
):
    options = f"{OPTIONS[system]} {LIMIT}"
    process = in_no_hurry(slurm, tmp_path, system, OPTIONS=options, RESTARTS="40")
    code, said = finish(process, tmp_path, within=1_700)
    assert code == 0, said
    assert re.search(r"Job \d+ makes room for a new one: its time limit is near", said), said
    why = r"The run was told to stop: rank [01, ]+ on \S+ got SIGTERM"
    restarted = rf"Restart \d+ on 2 rank\(s\) from step [1-9]\d*\. Why: {why}"
    assert re.search(restarted, said), said
    log = "".join(path.read_text() for path in (tmp_path / "runs" / "clusters").glob("*/*"))
    told = r"(\d+) s before this job's time limit: the rank is told to save and leave"
    seconds = [int(each) for each in re.findall(told, log)]
    assert seconds and all(WARNING - 60 < each <= WARNING for each in seconds)
    assert equal(weights(tmp_path / "run"), weights(undisturbed_in_a_hurry))


@pytest.mark.timeout(600)
def test_where_no_new_job_starts_in_time_the_run_goes_on_with_those_there_are(slurm, tmp_path):
    timeout = 100  # seconds: also for the first two workers, on a busy machine
    options = f"{JOB} timeout={timeout}"
    process = in_no_hurry(slurm, tmp_path, RESTARTS="1", OPTIONS=options)
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    with partition_down(slurm):
        subprocess.run(["scancel", jobs(slurm)[0]], env=slurm, check=True)
        code, said = finish(process, tmp_path)
    assert code == 0, said
    waited = f"Going on with 1 of 2 workers: the others did not come within {timeout} s."
    assert waited in said
    assert re.search(r"Restart 1 on 1 rank\(s\) from step [1-9]", said), said


def test_a_run_begins_in_the_first_job_and_goes_on_with_the_second_when_the_queue_lets_it(
    slurm, undisturbed_in_a_hurry, tmp_path
):
    with partition_down(slurm):
        process = in_no_hurry(slurm, tmp_path, GROW="1")
        _, second = wait_until(lambda: jobs(slurm) if len(jobs(slurm)) == 2 else None)
        subprocess.run(["scontrol", "hold", second], env=slurm, check=True)
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    subprocess.run(["scontrol", "release", second], env=slurm, check=True)
    code, said = finish(process, tmp_path)
    assert code == 0, said
    assert re.search(r"Going on with 2 rank\(s\) from step [1-9]\d*: more workers", said), said
    reached, expected = weights(tmp_path / "run"), weights(undisturbed_in_a_hurry)
    for name in expected:  # not bit for bit: a part of it was trained on one rank
        torch.testing.assert_close(reached[name], expected[name], rtol=1e-5, atol=1e-6)


def test_without_restarts_the_time_limit_ends_the_run_with_the_command_to_go_on(
    slurm, repository, tmp_path
):
    command = ["-m", "ddp_common", "run", "in_no_hurry"]
    options = f"{JOB} {LIMIT}"
    process = in_no_hurry(slurm, tmp_path, command=command, cwd=repository, OPTIONS=options)
    code, said = finish(process, tmp_path)
    assert code == 143, said
    newest_is_named = re.search(r"the newest checkpoint is step-\d+\.\w+\.pt", said)
    assert "make run TUTORIAL=in_no_hurry RESUME=" in said or newest_is_named, said


# What goes wrong before there is a worker


def refusal(slurm, tmp_path, system="slurm", **variables):
    code, said = finish(make_run(slurm, tmp_path, system, **variables), tmp_path)
    assert code == 1, said
    assert "Traceback" not in said
    wait_until(lambda: not jobs(slurm))
    assert not list((tmp_path / "runs").rglob("*.pem"))
    return said


def test_a_partition_that_does_not_exist_is_named_in_slurms_words(slurm, tmp_path):
    said = refusal(slurm, tmp_path, OPTIONS=f"{JOB} queue=nowhere")
    assert "Slurm refused the job: sbatch: error: invalid partition specified: nowhere" in said
    assert 'Change the profile, or for once OPTIONS="queue=… account=… walltime=…".' in said


def test_a_queue_that_does_not_exist_is_named_by_pbs_too(slurm, tmp_path):
    if shutil.which("qsub") is None:
        pytest.skip("no qsub here (Debian: apt install slurm-wlm-torque)")
    said = refusal(slurm, tmp_path, "pbs", OPTIONS=f"{OPTIONS['pbs']} queue=nowhere")
    assert "PBS refused the job" in said and "nowhere" in said, said


def test_a_batch_system_that_does_not_answer_is_called_so(slurm, tmp_path, system):
    silent = without_controller(slurm, tmp_path)
    code, said = finish(make_run(silent, tmp_path, system), tmp_path)
    assert code == 1 and "Traceback" not in said, said
    assert f"{NAMES[system]} does not answer: " in said
    assert f"{NAMES[system]} is down or cannot be reached from here. Try `" in said
    assert "OPTIONS" not in said
    assert "Job logs" not in said and not list((tmp_path / "runs" / "clusters").iterdir())


def test_a_request_that_no_node_can_fulfil_is_refused_at_once(slurm, tmp_path):
    said = refusal(slurm, tmp_path, OPTIONS="cores=1 memory=900GiB")
    assert "Slurm refused the job: sbatch: error:" in said


def test_jobs_that_never_start_end_the_wait_with_the_queues_own_reason(slurm, system, tmp_path):
    with partition_down(slurm):
        said = refusal(slurm, tmp_path, system, OPTIONS=f"{OPTIONS[system]} timeout=12")
    name, reason = ("Slurm", "PartitionDown") if system == "slurm" else ("PBS", "state Q")
    assert f"Waiting for workers: 0 of 2. Jobs: 2 pending ({reason})" in said
    words = (
        f"0 of 2 workers came within 12 s. {name} says of the jobs: 2 pending ({reason}). "
        "They were cancelled."
    )
    assert words in said
    advice = (
        'Wait longer (OPTIONS="timeout=3600"), ask for fewer (WORKERS=1) or for another queue '
        '(OPTIONS="queue=…").'
    )
    assert advice in said


def test_jobs_that_run_without_their_worker_coming_end_the_wait_with_what_they_have_printed(
    slurm, tmp_path
):
    prologue = "job_script_prologue='[echo loading the module, sleep 300]'"
    said = refusal(slurm, tmp_path, OPTIONS=f"{JOB} timeout=60 {prologue}")
    assert "0 of 2 workers came within 60 s. Slurm says of the jobs: 2 running." in said
    assert re.search(r"dask-worker-\d+\.out:\nloading the module", said), said


def test_a_job_that_dies_at_start_is_noticed_within_seconds_with_its_log(slurm, system, tmp_path):
    began = time.monotonic()
    said = refusal(slurm, tmp_path, system, OPTIONS=f"{OPTIONS[system]} python=/no/such/python")
    assert time.monotonic() - began < 120  # the profile would wait for ten minutes
    assert re.search(r"Job \d+ ended before its worker came \(", said), said
    assert "/no/such/python: No such file or directory" in said


def test_a_misspelt_option_is_named(slurm, tmp_path):
    said = refusal(slurm, tmp_path, OPTIONS=f"{JOB} quue=main")
    assert "there is no option 'quue'. Did you mean queue?" in said


def test_without_the_commands_of_the_batch_system_it_says_so(slurm, system, tmp_path):
    said = refusal(slurm, tmp_path, system, PATH=str(tmp_path))
    command = "sbatch" if system == "slurm" else "qsub"
    assert f"There is no {command} here" in said and "DRY=1" in said


def test_ctrl_c_while_jobs_wait_leaves_none_in_the_queue(slurm, tmp_path):
    with partition_down(slurm):
        process = make_run(slurm, tmp_path)
        wait_until(lambda: "2 pending" in (tmp_path / "output").read_text())
        process.send_signal(signal.SIGINT)
        code, said = finish(process, tmp_path)
        assert code == 130 and "Stopped." in said and "Traceback" not in said
        wait_until(lambda: not jobs(slurm))
    assert not list((tmp_path / "runs").rglob("*.pem"))


def test_jobs_end_by_themselves_when_the_program_that_submitted_them_is_killed(slurm, tmp_path):
    process = in_no_hurry(slurm, tmp_path)
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    process.kill()
    process.wait()
    wait_until(lambda: not jobs(slurm), within=120)


# Who may connect


def test_a_client_without_the_credentials_of_the_run_is_refused(slurm, here, monkeypatch):
    with ddp.connect("slurm", workers=1) as client:
        address = client.scheduler.address
        assert address.startswith("tls://")
        for name in ("cert.pem", "key.pem"):
            assert (client.jobs.directory / name).stat().st_mode & 0o777 == 0o600
        without_tls = (address.replace("tls://", "tcp://"), None)
        with_another_key = (address, Security.temporary())
        for stranger, security in (without_tls, with_another_key):
            with pytest.raises(OSError):
                Client(stranger, security=security, timeout=3)
        (worker,) = client.workers()
        with pytest.raises(OSError):  # a worker runs code, too
            Client(worker.replace("tls://", "tcp://"), timeout=3)
        monkeypatch.delenv("OPTIONS")
        with pytest.raises(Error, match="no Dask scheduler could be reached"):
            ddp.connect(address)
        assert ddp.launch(client, ddp.world_size).result == 1


def test_web_pages_of_scheduler_and_workers_listen_on_loopback_only(slurm, here):
    with ddp.connect("slurm", workers=1) as client:
        assert "://127.0.0.1:" in client.dashboard_link

        def places(dask_worker):
            return [each.getsockname() for each in dask_worker.http_server._sockets.values()]

        ports = client.run(places)
        assert all(host == "127.0.0.1" for sockets in ports.values() for host, *_ in sockets)


def test_workers_of_jobs_import_torch_as_soon_as_they_are_made(slurm, here):
    def preloaded(dask_worker):
        from ddp_common.worker import forkserver

        (early,) = dask_worker.preloads
        return early.module.dask_teardown.__module__, forkserver.guard() is not None

    with ddp.connect("slurm", workers=1) as client:
        assert list(client.run(preloaded).values()) == [("ddp_common.worker.early", True)]
        assert ddp.launch(client, ddp.world_size).result == 1


def trained_on_table(environment, folder):
    """What the script says that trains on a table of Dask's."""
    done = subprocess.run(
        [sys.executable, str(TABLE)],
        cwd=folder,
        env=environment | {"WORKERS": "2", "RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_table_is_trained_where_it_lies_in_two_jobs(slurm, tmp_path):
    here = trained_on_table({**os.environ, "CLUSTER": "local"}, tmp_path)
    in_jobs = trained_on_table({**slurm, "CLUSTER": "slurm", "OPTIONS": JOB}, tmp_path)
    assert in_jobs["moved"] == 0 and len(in_jobs["losses"][0]) == 3 * 16
    for losses in (*in_jobs["losses"], here["losses"][1]):
        assert losses == pytest.approx(here["losses"][0], rel=1e-6)
    assert here["losses"][0][-1] < here["losses"][0][0]
    wait_until(lambda: not jobs(slurm))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_reads_no_page_of_scheduler_or_workers_and_finds_no_file(slurm, here):
    with ddp.connect("slurm", workers=1) as client:
        ports = client.run(lambda dask_worker: dask_worker.http_server.port).values()
        dashboard = urlsplit(client.dashboard_link)
        paths = (
            "/",
            "/status",
            "/sitemap.json",
            "/info/main/workers.html",
            "/json/identity.json",
            "/metrics",
        )
        hosts = [f"http://127.0.0.1:{port}" for port in (dashboard.port, *ports)]
        pages = [f"{host}{path}" for host in hosts for path in paths]
        as_nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups".split()
        curl = ["curl", "--noproxy", "*", "-s", "-o", "/dev/null", "-w", "%{http_code} "]
        each_to_nowhere = [part for page in pages for part in (page, "-o", "/dev/null")]
        command = [*as_nobody, *curl, *each_to_nowhere]
        seen = subprocess.run(command, capture_output=True, text=True).stdout.split()
        assert len(seen) == len(pages)
        shown = [page for page, code in zip(pages, seen) if code != "404"]
        assert shown == [f"http://127.0.0.1:{port}/sitemap.json" for port in ports]
        assert urllib.request.urlopen(client.dashboard_link).status == 200
        (folder,) = client.run(lambda dask_worker: dask_worker.local_directory).values()
        assert any(part.stat().st_mode & 0o777 == 0o700 for part in Path(folder).parents[1:3])
        assert client.jobs.directory.stat().st_mode & 0o777 == 0o700


def test_a_second_launch_finds_the_same_jobs_and_a_cancelled_one_is_replaced_before_it(
    slurm, here
):
    with ddp.connect("slurm", workers=2) as client:
        before = set(jobs(slurm))
        assert ddp.launch(client, ddp.world_size).result == 2
        assert set(jobs(slurm)) == before
        subprocess.run(["scancel", min(before)], env=slurm, check=True)
        wait_until(lambda: len(client.workers()) == 1)
        assert ddp.launch(client, ddp.world_size).result == 2
        assert set(jobs(slurm)) != before


# The client as a job


def test_the_job_script_submits_the_client_which_submits_the_workers(
    slurm, system, undisturbed, tmp_path
):
    (tmp_path / "clusters").symlink_to(ROOT / "clusters")
    if system == "slurm":
        submit = ["sbatch", "clusters/batch/pets.sbatch"]
    else:
        submit = ["qsub", "clusters/batch/pets.pbs"]
    places = {"CHECKPOINT": str(tmp_path / "run"), "RUNS": str(tmp_path / "runs")}
    subprocess.run(
        submit,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={**slurm, "OPTIONS": OPTIONS[system], **places},
    )
    wait_until(lambda: len(jobs(slurm)) == 3)  # the client and two workers
    wait_until(lambda: not jobs(slurm))
    logs = "".join(path.read_text() for path in tmp_path.glob("pets-*.log"))
    assert "Done in" in logs, logs
    assert equal(weights(tmp_path / "run"), weights(undisturbed))
