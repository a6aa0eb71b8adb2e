"""The doctor on clusters that are sound, and on clusters of which one thing is really broken."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from dask.system import CPU_COUNT
from distributed import Client
from fault_lab import separate_cluster
from processes import PATIENCE, wait_until

from ddp_common import Error
from ddp_common.clusters import checks
from ddp_common.clusters.checks import FAILED, OK, SKIPPED, WARNING
from ddp_common.clusters.doctor import check_workers, examine, pbs_queues, slurm_partitions

ROOT = Path(__file__).parents[2]


def may(*command):
    return (
        shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0
    )


def doctor(runs, **variables):
    """Run the command; returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "doctor"],
        cwd=ROOT,
        env={**os.environ, "RUNS": str(runs), **variables},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def states(text, check):
    """The states of the rows of `check` in a printed table."""
    return [
        line.split()[-1]
        for line in text.splitlines()
        if line.startswith(check) and line.split()[-1] in (OK, WARNING, FAILED, SKIPPED)
    ]


@pytest.fixture
def look(tmp_path):
    """Examine a local cluster with options of its own; returns whether it is fit, and the text."""

    def examined(workers=1, **options):
        base = {
            "host": "127.0.0.1",
            "dashboard_address": "127.0.0.1:0",
            "memory_limit": 0,
            "silence_logs": 40,
        }
        profile = tmp_path / "mine.yaml"
        content = {"cluster": "distributed.LocalCluster", "options": base | options}
        profile.write_text(yaml.safe_dump(content))
        lines = []
        fit = examine(str(profile), workers, lines.append)
        return fit, "\n".join(lines)

    return examined


def test_a_sound_cluster_is_fit_to_train_and_nothing_is_left(tmp_path):
    code, text = doctor(tmp_path / "runs", WORKERS="2")
    assert code == 0 and "\nFit to train" in text
    rows = {
        "profile": 1,
        "cluster": 1,
        "versions": 1,
        "cores": 2,
        "time left": 1,
        "round trip": 1,
        "clocks": 1,
        "addresses": 3,
        "between workers": 2,
        "run directory": 1,
        "ranks": 2,
        "all-reduce": 1,
    }
    for check, number in rows.items():
        found = states(text, check)
        assert len(found) == number and not {FAILED, SKIPPED} & set(found), check
    assert "64 MiB over 2 ranks" in text and "the sum is right" in text and "interface lo" in text
    assert not list((tmp_path / "runs").iterdir())


def test_with_one_worker_what_needs_two_is_skipped_with_the_reason(look):
    fit, text = look(workers=1)
    assert fit and len(states(text, "ranks")) == 1
    assert states(text, "between workers") == states(text, "all-reduce") == [SKIPPED]
    assert text.count("needs two workers: WORKERS=2") == 2


@pytest.mark.parametrize(
    "cluster, system, missing",
    [
        ("SLURMCluster", "Slurm", "sbatch, squeue, scancel, sinfo"),
        ("PBSCluster", "PBS", "qsub, qstat, qdel"),
    ],
)
def test_without_the_commands_of_the_batch_system_nothing_is_started(
    tmp_path, cluster, system, missing
):
    profile = tmp_path / "mine.yaml"
    options = {"queue": "main", "cores": 1, "memory": "1GiB"}
    profile.write_text(yaml.safe_dump({"cluster": f"dask_jobqueue.{cluster}", "options": options}))
    code, text = doctor(tmp_path, CLUSTER=str(profile), PATH=str(tmp_path))
    assert code == 1 and f"not on PATH: {missing}" in text
    assert states(text, "profile") == [OK] and states(text, system) == [FAILED]
    assert states(text, "cluster") == states(text, "ranks") == [SKIPPED]
    assert "on a login node" in text and "Not fit to train: 1 failed, 0 warnings" in text


def test_a_profile_that_does_not_exist_is_the_finding(tmp_path):
    code, text = doctor(tmp_path, CLUSTER="mars")
    assert code == 1 and "There is no cluster profile 'mars'" in text
    assert states(text, "profile") == [FAILED] and states(text, "cluster") == [SKIPPED]


def test_a_cluster_that_does_not_start_is_the_finding(look):
    fit, text = look(no_such_option=1)
    assert not fit and "no_such_option" in text
    assert states(text, "cluster") == [FAILED] and states(text, "versions") == [SKIPPED]


@pytest.mark.parametrize(
    "profile, workers, message",
    [
        ("torchrun", 2, "starts ranks without Dask"),
        ("local", "many", "whole number of at least 1"),
    ],
)
def test_what_cannot_be_looked_at_is_an_error_in_words(profile, workers, message):
    with pytest.raises(Error, match=message):
        examine(profile, workers)


@pytest.mark.parametrize("seconds, state", [(300, WARNING), (7200, OK)])
def test_the_end_of_the_job_is_told_and_warned_of(look, seconds, state):
    fit, text = look(env={"DDP_JOB_END": str(int(time.time()) + seconds)})
    assert fit and states(text, "time left") == [state]
    assert ("RESUME=" in text) == (state == WARNING)


def test_a_check_that_cannot_be_made_does_not_keep_the_others(look):
    fit, text = look(env={"DDP_JOB_END": "soon"})
    assert not fit and states(text, "time left") == [FAILED]
    assert "'soon'" in text and "in seconds since 1970" in text
    assert states(text, "clocks") == states(text, "run directory") == states(text, "ranks") == [OK]


@pytest.mark.parametrize("seconds, state", [(90, WARNING), (-5, WARNING), (0.2, OK)])
def test_a_clock_that_is_wrong_is_a_warning(look, tmp_path, seconds, state):
    """The worker's own clock is moved before it starts."""
    (tmp_path / "clock.py").write_text(
        "import time\n"
        "time.right = getattr(time, 'right', time.time)  # Dask runs this twice\n"
        f"time.time = lambda: time.right() + {seconds}\n"
    )
    fit, text = look(preload=[str(tmp_path / "clock.py")])
    assert fit and states(text, "clocks") == [state]
    found = re.search(r"largest difference from here: ([+-]\d+\.\d+) s", text)
    assert float(found[1]) == pytest.approx(seconds, abs=0.5)


def test_more_threads_than_cores_are_a_warning(look):
    fit, text = look(workers=2, threads_per_worker=CPU_COUNT)
    assert fit and states(text, "cores") == [WARNING] * 2
    assert f"{2 * CPU_COUNT} threads share {CPU_COUNT} cores" in text
    assert text.count("slow each other down") == 1


def test_where_runs_cannot_be_written_ranks_are_not_started(look, monkeypatch):
    monkeypatch.setenv("RUNS", "/proc/nowhere")
    fit, text = look()
    assert not fit and states(text, "run directory") == [FAILED]
    assert "Cannot make the run directory" in text
    assert states(text, "ranks") == [SKIPPED] and "needs what has failed: run directory" in text


def test_a_url_that_cannot_be_written_fails_and_one_that_can_does_not(look, monkeypatch, tmp_path):
    monkeypatch.setenv("RUNS", f"file://{tmp_path}/runs")
    (tmp_path / "runs").mkdir()
    assert look()[0] and not list((tmp_path / "runs").iterdir())
    monkeypatch.setenv("RUNS", "file:///proc/nowhere")
    fit, text = look()
    assert not fit and states(text, "run directory") == [FAILED]


def test_workers_that_are_threads_fail_where_ranks_start(tmp_path):
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "cluster: distributed.LocalCluster\n"
        "options: {processes: false, dashboard_address: '127.0.0.1:0'}"
    )
    code, text = doctor(tmp_path / "runs", CLUSTER=str(profile))
    assert code == 1 and states(text, "ranks") == [FAILED] and "threads of one process" in text


@contextlib.contextmanager
def connected(folder, *prefix, workers=2):
    """A client of workers that were started by hand with the command `prefix`."""
    with (
        separate_cluster(folder, *prefix, workers=workers) as (_, address),
        Client(address) as client,
    ):
        client.wait_for_workers(workers, timeout=120)
        yield client


@pytest.mark.skipif(
    not may("unshare", "--mount", "true"),
    reason="needs the right to make a mount namespace (root)",
)
def test_a_run_directory_that_workers_do_not_share_is_a_warning(tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    monkeypatch.setenv("RUNS", str(hidden))
    hide = f'mount -t tmpfs -o ro,size=4k tmpfs {hidden} && exec "$@"'
    with connected(tmp_path, "unshare", "--mount", "sh", "-c", hide, "sh") as client:
        found = list(check_workers(client))
    (directory,) = [finding for finding in found if finding.check == "run directory"]
    assert directory.state == WARNING
    assert "worker 0" in directory.found and "worker 1" in directory.found
    assert "through Dask" in directory.advice
    assert [finding.state for finding in found if finding.check == "all-reduce"] == [OK]
    assert not list(hidden.iterdir())


def test_a_worker_with_another_ddp_common_is_found_even_without_the_doctor_in_it(tmp_path):
    shutil.copytree(
        ROOT / "ddp_common",
        tmp_path / "ddp_common",
        ignore=shutil.ignore_patterns("checks.py", "doctor.py", "__pycache__"),
    )
    there = ["env", "-C", str(tmp_path), f"PYTHONPATH={tmp_path}"]
    with connected(tmp_path, *there, workers=1) as client:
        workers = list(client.run(checks.facts).values())
        (finding,) = checks.check_versions(client, workers)
    assert finding.state == FAILED
    assert "has ddp_common" in finding.found and "torch" not in finding.found
    assert "one environment" in finding.advice


@contextlib.contextmanager
def network_namespaces(*names):
    """Network namespaces, each with a cable to this one: 10.77.<number>.1 here, .2 there.

    They have no way to each other.
    """

    def ip(*words, check=True):
        subprocess.run(["ip", *words], check=check, capture_output=True)

    try:
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip(*f"link add {name}-out type veth peer name inside netns {name}".split())
            ip("address", "add", f"10.77.{number}.1/24", "dev", f"{name}-out")
            ip("link", "set", f"{name}-out", "up")
            ip("-n", name, "address", "add", f"10.77.{number}.2/24", "dev", "inside")
            for device in ("inside", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
            ip("link", "del", f"{name}-out", check=False)


@contextlib.contextmanager
def dask_programs(*commands):
    """Dask's own programs, ended with the block. The first is a scheduler."""
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def can_make_network_namespaces():
    name = f"ddp{os.getpid()}"
    return may("ip", "netns", "add", name) and may("ip", "netns", "del", name)


needs_namespaces = pytest.mark.skipif(
    not can_make_network_namespaces(), reason="needs the right to make network namespaces (root)"
)
DASK = [sys.executable, "-m", "dask"]
# alone in its namespaces, so the port is free
SCHEDULER = [*DASK, *"scheduler --no-dashboard --port 28786".split()]
WORKER = [*DASK, *"worker --nthreads 1 --no-dashboard --memory-limit 0 --local-directory".split()]


@needs_namespaces
def test_workers_that_do_not_reach_each_other_are_found_and_no_rank_waits_for_them(
    tmp_path, monkeypatch
):
    first, second = f"ddp{os.getpid()}a", f"ddp{os.getpid()}b"
    with network_namespaces(first, second):
        where = tmp_path / "scheduler.json"
        scheduler = [*DASK, *"scheduler --no-dashboard --host 0.0.0.0 --port 0".split()]
        scheduler += ["--scheduler-file", str(where)]
        with dask_programs(scheduler):
            wait_until(lambda: where.exists() and where.read_text().endswith("}"))
            port = yaml.safe_load(where.read_text())["address"].rpartition(":")[2]
            workers = []
            for number, name in enumerate((first, second), 1):
                address = f"tcp://10.77.{number}.1:{port}"
                inside = ["ip", "netns", "exec", name]
                workers.append([*inside, *WORKER, str(tmp_path / name), address])
            with dask_programs(*workers), Client(f"tcp://127.0.0.1:{port}") as client:
                client.wait_for_workers(2, timeout=120)
                found = list(check_workers(client))
    between = [finding for finding in found if finding.check == "between workers"]
    assert [finding.state for finding in between] == [FAILED] * 2
    assert "unreachable" in between[0].found
    assert "firewall" in between[0].advice and "1024" in between[0].advice
    assert [(finding.state, finding.found) for finding in found if finding.check == "ranks"] == [
        (SKIPPED, "needs what has failed: between workers")
    ]
    others = ("addresses", "run directory", "clocks")
    assert {finding.state for finding in found if finding.check in others} == {OK}


@needs_namespaces
def test_a_worker_on_loopback_of_another_host_is_a_failure(tmp_path):
    name = f"ddp{os.getpid()}"
    with network_namespaces(name):
        inside = ["ip", "netns", "exec", name]
        worker = [*inside, *WORKER, str(tmp_path), "--host", "127.0.0.1", "tcp://10.77.1.2:28786"]
        with (
            dask_programs([*inside, *SCHEDULER, "--host", "10.77.1.2"], worker),
            Client("tcp://10.77.1.2:28786", timeout=120) as client,
        ):
            client.wait_for_workers(1, timeout=120)
            workers = list(client.run(checks.facts).values())
            findings = list(checks.check_addresses(client, workers))
    assert [finding.state for finding in findings] == [OK, FAILED]
    assert "127.0.0.1" in findings[1].found and "interface:" in findings[1].advice


def test_a_connection_that_nobody_answers_is_an_error_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        began = time.monotonic()
        with pytest.raises(OSError):
            checks.ping(*silent.getsockname())
        assert time.monotonic() - began < PATIENCE  # it gives up after CONNECT_TIMEOUT


def test_the_queues_of_a_batch_system_are_read():
    assert slurm_partitions("main* up\ngpu down\nbig drain\n") == {
        "main": (True, True),
        "gpu": (False, False),
        "big": (False, False),
    }
    openpbs = textwrap.dedent("""\
        Queue: a_name_of_more_than_16_letters
            queue_type = Execution
            total_jobs = 0
            enabled = True
            started = True

        Queue: closed
            queue_type = Execution
            enabled = True
            started = False
        """)
    assert pbs_queues(openpbs) == {
        "a_name_of_more_than_16_letters": (True, False),
        "closed": (False, False),
    }
    assert pbs_queues(
        "Queue:\tmain\n\tqueue_type = Execution\n\tenabled = yes\n\tstarted = yes\n\n"
    ) == {"main": (True, False)}
