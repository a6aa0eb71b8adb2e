"""What usually goes wrong on a cluster, looked at from the bottom up: `python -m ddp_common doctor`.

Profile, batch system, queue, cluster; then, in `checks`, its workers up to an all-reduce over one rank on each. Relies on
`clusters.connect` for the cluster. Promises: every finding is told as soon as it is made; a check that fails keeps only those from being made
that need it, and these are named; the cluster is closed afterwards.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time

import dask

from ddp_common.client.launch import whole_number
from ddp_common.clusters import batch, checks
from ddp_common.clusters.checks import FAILED, SKIPPED, WARNING, Finding
from ddp_common.clusters.connect import connect
from ddp_common.clusters.profiles import read_profile
from ddp_common.errors import Error

QUERY_TIMEOUT = 30  # seconds for the batch system to answer
ROW, WIDTH = "{:<16} {:<90} {}", 90

BETWEEN, DIRECTORY, TWO = "between workers", "run directory", "two workers"
CHECKS = {  # in this order: the check, what it needs, what to do if it cannot even be made
    "versions": (checks.check_versions, (), "Look at the worker's log."),
    "cores": (checks.check_cores, (), "Look at the worker's log."),
    "time left": (
        checks.check_time_left,
        (),
        "DDP_JOB_END is the end of the job in seconds since 1970: put right what sets it.",
    ),
    "clocks": (checks.check_clocks, (), "A worker has been lost meanwhile: look at its log."),
    "addresses": (checks.check_addresses, (), "Look at the worker's log."),
    BETWEEN: (
        checks.check_between_workers,
        (TWO,),
        "A worker has been lost meanwhile: look at its log.",
    ),
    DIRECTORY: (
        checks.check_run_directory,
        (),
        "Choose a place where you may write: RUNS=/a/folder, or a URL such as s3://bucket/runs.",
    ),
    "ranks": (
        checks.check_ranks,
        (BETWEEN, DIRECTORY),
        "What the message names comes first. Ranks that stall: interface: in the profile, "
        "and a firewall between hosts; ranks that cannot start: the worker's log.",
    ),
}


def examine(profile=None, workers=None, say=print):
    """Check the cluster of `profile` (default: CLUSTER, else local) with `workers` workers (default: WORKERS, else 2).

    `say` gets the table line by line, as it is made, then the advice and a verdict. Returns whether nothing has failed. Raises `Error`
    for a number of workers that is none, and for torchrun and srun, which start no cluster.
    """
    from ddp_common.without_dask.launchers import LAUNCHERS

    name, count = (
        profile or os.environ.get("CLUSTER") or "local",
        whole_number("WORKERS", workers or os.environ.get("WORKERS") or 2, least=1),
    )
    if name in LAUNCHERS:
        raise Error(
            f"CLUSTER={name} starts ranks without Dask, so there is no cluster to look at. Name the profile of one: CLUSTER=slurm, pbs, local."
        )
    say(
        f"Looking at CLUSTER={name} with {_plural(count, 'worker')}. A queue may keep them waiting.\n"
    )
    say(ROW.format("check", "what was found", "state"))
    findings = []
    for finding in _findings(name, count):
        findings.append(finding)
        first, *rest = textwrap.wrap(finding.found, WIDTH) or [""]
        say(ROW.format(finding.check, first, finding.state))
        for line in rest:
            say(ROW.format("", line, "").rstrip())
    return _conclude(findings, say)


def _plural(number, word):
    return f"{number} {word}{'s' * (number != 1)}"


def _conclude(findings, say):
    for check, advice in dict.fromkeys(
        (finding.check, finding.advice)
        for finding in findings
        if finding.state in (WARNING, FAILED)
    ):
        say("\n" + textwrap.fill(f"{check}: {advice}", WIDTH + 26, subsequent_indent="  "))
    failed, warnings = (
        sum(finding.state == state for finding in findings) for state in (FAILED, WARNING)
    )
    if failed:
        say(
            f"\nNot fit to train: {failed} failed, {_plural(warnings, 'warning')}. Put the first failure right, then look again."
        )
    else:
        say(
            f"\nFit to train, with {_plural(warnings, 'warning')}."
            if warnings
            else "\nFit to train."
        )
    return not failed


def _findings(name, count):
    """Everything from the profile to the ranks, one finding after the other."""
    broken = False
    for finding in _guarded(
        "profile", "Put it right, or take one of those in clusters/.", _before_the_cluster, name
    ):
        broken = broken or finding.state == FAILED
        yield finding
    if broken:
        yield from _skip(["cluster", *CHECKS], "the checks above come first")
        return
    began = time.monotonic()
    try:
        client = connect(name, count)
    except Exception as error:  # whatever a cluster class raises: it is what was looked for
        yield Finding("cluster", _headline(error), FAILED, _why_no_workers(name))
        yield from _skip(CHECKS, "there is no cluster")
        return
    with client:
        yield Finding(
            "cluster",
            f"{_plural(client.ranks, 'worker')} came within {time.monotonic() - began:.1f} s",
        )
        yield from check_workers(client)


def check_workers(client):
    """The findings of a connected client: of its workers and what lies between them."""
    try:
        workers = list(client.run(checks.facts).values())
    except Exception as error:  # as above
        addresses = ", ".join(client.scheduler_info(n_workers=-1)["workers"])
        yield Finding(
            "workers",
            f"{_headline(error)} (workers say that they are at {addresses})",
            FAILED,
            "The scheduler connects to workers at these "
            f"addresses. {checks.LOOPBACK} If they are right, a firewall may lie between, or a worker has died: look at its log.",
        )
        yield from _skip(CHECKS, "the workers do not answer")
        return
    failed = set()
    for title, (check, needs, advice) in CHECKS.items():
        if TWO in needs and len(workers) < 2:
            yield from _skip([title], f"needs {TWO}: WORKERS=2")
        elif missing := [need for need in needs if need in failed]:
            yield from _skip([title], f"needs what has failed: {', '.join(missing)}")
        else:
            for finding in _guarded(title, advice, check, client, workers):
                failed |= {title} if finding.state == FAILED else set()
                yield finding


def _guarded(title, advice, check, *arguments):
    try:
        yield from check(*arguments)
    except Exception as error:  # whatever it was, the other checks are still to be made
        yield Finding(title, _headline(error), FAILED, advice)


def _headline(error):
    """The first line of an error, and of one that a rank has raised the last of its traceback."""
    last = getattr(error, "traceback", "").strip().splitlines()[-1:]
    return " ".join([*(str(error).strip().splitlines()[:1] or [type(error).__name__]), *last])


def _skip(titles, reason):
    return [Finding(title, reason, SKIPPED) for title in titles]


def slurm_partitions(said):
    """Partition -> (whether it is up, whether it is the default), from `sinfo -h -o "%P %a"`."""
    return {
        name.rstrip("*"): (state == "up", name.endswith("*"))
        for name, state in (line.split() for line in said.splitlines())
    }


def pbs_queues(said):
    """Queue -> (whether it is up, False), from `qstat -Q -f`, which unlike `qstat -Q` never shortens a name. The default is not in it."""
    queues = {}
    for text in re.split(r"^Queue:", said, flags=re.M)[1:]:
        settings = dict(re.findall(r"^\s+(enabled|started) = (\w+)", text, flags=re.M))
        queues[text.split()[0]] = (
            all(
                settings.get(name, "").lower() in ("true", "yes")
                for name in ("enabled", "started")
            ),
            False,
        )
    return queues


QUEUES = {  # batch system -> question about its queues, who reads the answer, what a queue is called there
    "Slurm": (["sinfo", "-a", "-h", "-o", "%P %a"], slurm_partitions, "partition"),
    "PBS": (["qstat", "-Q", "-f"], pbs_queues, "queue"),
}


def _before_the_cluster(name):
    if "://" in name:
        yield Finding("profile", f"none: {name} is the address of a scheduler that runs already")
        return
    settings = read_profile(name)
    yield Finding("profile", f"{name}: {settings['cluster']}")
    if not batch.is_batch(settings) or (system := batch.system_of(settings).name) not in QUEUES:
        return
    question, read, queue_word = QUEUES[system]
    if missing := [
        command for command in batch.system_of(settings).commands if shutil.which(command) is None
    ]:
        yield Finding(
            system,
            f"not on PATH: {', '.join(missing)}",
            FAILED,
            f"Run this where {system} is: on a login node, perhaps after "
            f"`module load {system.lower()}`. To train on this machine alone, take CLUSTER=local.",
        )
        return
    try:
        queues = read(
            subprocess.run(
                question, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT
            ).stdout
        )
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        yield Finding(
            system,
            f"`{question[0]}` gave no answer: {' '.join(said)}",
            FAILED,
            f"{system} is down or cannot be reached from here. "
            f"Try `{' '.join(question[:2])}` by hand; if it fails too, ask those who run the cluster.",
        )
        return
    yield Finding(system, f"it answers, and has {_plural(len(queues), queue_word)}")
    wanted = settings["options"].get("queue") or dask.config.get(
        f"jobqueue.{system.lower()}.queue", None
    )
    yield _queue(queue_word, wanted, queues, name)


def _queue(word, wanted, queues, profile):
    """The finding about the queue of the profile: `wanted` may be None, or several with commas, of which one is enough."""
    asked = (
        str(wanted).split(",")
        if wanted
        else [name for name, (_, is_default) in queues.items() if is_default] or list(queues)
    )
    listing = (
        ", ".join(f"{name} ({'up' if up else 'down'})" for name, (up, _) in queues.items())
        or "none"
    )
    if unknown := [name for name in asked if name not in queues]:
        return Finding(
            word,
            f"{', '.join(unknown)} does not exist; there is: {listing}",
            FAILED,
            f"Change `queue:` in the profile {profile} to one that exists and that you may use.",
        )
    if not any(queues[name][0] for name in asked):
        return Finding(
            word,
            f"{wanted or 'the default'} is not up: jobs wait in it for ever; there is: {listing}",
            FAILED,
            f"Change `queue:` in the profile {profile} to one that is up, or wait until the cluster's staff opens it.",
        )
    names = ", ".join(name for name in asked if queues[name][0])
    return Finding(
        word, f"{names} is up" if wanted else f"none in the profile; the default ({names}) is up"
    )


def _why_no_workers(name):
    """What to do when a cluster did not start, or its workers did not come."""
    if "://" in name:
        return "Is the scheduler running, do its workers run, and does a firewall lie between here and it? For tls:// the certificates must be the same."
    settings = read_profile(name)
    if not batch.is_batch(settings):
        return "The message names the cause. Close other clusters on this machine, or ask for fewer workers: WORKERS=1."
    return (
        f"The message names the cause, and the job's log if there is one. A job starts {settings['options'].get('python') or sys.executable}: this file must "
        "exist on the compute nodes, so the environment belongs on a disk that they see, not into /tmp. A job that runs without its worker "
        "coming cannot reach the scheduler here: set `interface:` (and scheduler_options: interface) in the profile to the network that "
        "login and compute nodes share."
    )
