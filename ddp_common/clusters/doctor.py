"""What usually goes wrong on a cluster, from the bottom up: `python -m ddp_common doctor`.

Profile, batch system, queue, cluster; then, in `checks`, its workers up to an all-reduce over one
rank on each. Relies on `connect` for the cluster. Promises: every finding is told as soon as it
is made; when a check fails, only those that need it are skipped, and these are named; the cluster
is closed afterwards.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dask
from distributed import Client

from ddp_common.clusters import checks
from ddp_common.clusters.checks import FAILED, SKIPPED, WARNING, Finding
from ddp_common.clusters.connect import connect
from ddp_common.clusters.job_script import is_batch, system_of
from ddp_common.clusters.profiles import read_profile
from ddp_common.errors import Error
from ddp_common.values import whole_number
from ddp_common.without_dask.launchers import LAUNCHERS

QUERY_TIMEOUT = 30  # seconds for the batch system to answer
WIDTH = 90  # characters of the table's middle column
ROW = "{:<16} {:<90} {}"

BETWEEN, DIRECTORY, TWO = "between workers", "run directory", "two workers"
LOOK_AT_LOG = "Look at the worker's log."
WORKER_LOST = "A worker has been lost meanwhile: look at its log."


class Check(NamedTuple):
    """A check of workers, in `checks`."""

    run: Callable[[Client, list[dict]], Iterator[Finding]]
    if_impossible: str  # what to do if it cannot even be made
    needs: tuple[str, ...] = ()  # titles of other checks that must not fail, or TWO


CHECKS = {  # in this order
    "versions": Check(checks.check_versions, LOOK_AT_LOG),
    "cores": Check(checks.check_cores, LOOK_AT_LOG),
    "time left": Check(
        checks.check_time_left,
        "DDP_JOB_END is the end of the job in seconds since 1970: put right what sets it.",
    ),
    "clocks": Check(checks.check_clocks, WORKER_LOST),
    "addresses": Check(checks.check_addresses, LOOK_AT_LOG),
    BETWEEN: Check(checks.check_between_workers, WORKER_LOST, needs=(TWO,)),
    DIRECTORY: Check(
        checks.check_run_directory,
        "Choose a place where you may write: RUNS=/a/folder, or a URL such as s3://bucket/runs.",
    ),
    "ranks": Check(
        checks.check_ranks,
        "What the message names comes first. Ranks that stall: interface: in the profile, "
        "and a firewall between hosts; ranks that cannot start: the worker's log.",
        needs=(BETWEEN, DIRECTORY),
    ),
}


def examine(
    profile: str | None = None,
    workers: int | str | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Check the cluster of `profile` with `workers` workers.

    They default to CLUSTER from the environment, else local, and to WORKERS, else 2. `say` gets
    the table line by line, as it is made, then the advice and a verdict. Returns whether nothing
    has failed. Raises `Error` for a number of workers that is none, and for torchrun and srun,
    which start no cluster.
    """
    name = profile or os.environ.get("CLUSTER") or "local"
    count = whole_number("WORKERS", workers or os.environ.get("WORKERS") or 2, least=1)
    if name in LAUNCHERS:
        raise Error(
            f"CLUSTER={name} starts ranks without Dask, so there is no cluster to look at. "
            "Name the profile of one: CLUSTER=slurm, pbs, local."
        )
    say(
        f"Looking at CLUSTER={name} with {_plural(count, 'worker')}. "
        "A queue may keep them waiting.\n"
    )
    say(ROW.format("check", "what was found", "state"))
    findings = []
    for finding in _findings(name, count):
        findings.append(finding)
        tell(finding, say)
    return conclude(findings, say)


def _plural(number, word):
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def tell(finding: Finding, say: Callable[[str], None]) -> None:
    """Say what one check has found, as a row of the table."""
    first, *rest = textwrap.wrap(finding.found, WIDTH) or [""]
    say(ROW.format(finding.check, first, finding.state))
    for line in rest:
        say(ROW.format("", line, "").rstrip())


def conclude(
    findings: list[Finding],
    say: Callable[[str], None],
    ready: str = "Fit to train",
    not_ready: str = "Not fit to train",
) -> bool:
    """Say each piece of advice once, then the verdict. Returns whether nothing has failed."""
    bad = [finding for finding in findings if finding.state in (WARNING, FAILED)]
    for check, advice in dict.fromkeys((finding.check, finding.advice) for finding in bad):
        say("\n" + textwrap.fill(f"{check}: {advice}", WIDTH + 26, subsequent_indent="  "))
    failed = sum(finding.state == FAILED for finding in bad)
    warnings = _plural(len(bad) - failed, "warning")
    if failed:
        say(
            f"\n{not_ready}: {failed} failed, {warnings}. "
            "Put the first failure right, then look again."
        )
    elif bad:
        say(f"\n{ready}, with {warnings}.")
    else:
        say(f"\n{ready}.")
    return not failed


def _findings(name, count):
    """Everything from the profile to the ranks, one finding after the other."""
    is_broken = False
    advice = "Put it right, or take one of those in clusters/."
    for finding in guarded("profile", advice, _before_the_cluster, name):
        is_broken = is_broken or finding.state == FAILED
        yield finding
    if is_broken:
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


def check_workers(client: Client) -> Iterator[Finding]:
    """The findings of a connected client: of its workers and what lies between them."""
    try:
        workers = list(client.run(checks.facts).values())
    except Exception as error:  # whatever it was, it is what was looked for
        addresses = ", ".join(client.scheduler_info(n_workers=-1)["workers"])
        yield Finding(
            "workers",
            f"{_headline(error)} (workers say that they are at {addresses})",
            FAILED,
            f"The scheduler connects to workers at these addresses. {checks.LOOPBACK} "
            "If they are right, a firewall may lie between, or a worker has died: "
            "look at its log.",
        )
        yield from _skip(CHECKS, "the workers do not answer")
        return
    failed = set()
    for title, check in CHECKS.items():
        if TWO in check.needs and len(workers) < 2:
            yield from _skip([title], f"needs {TWO}: WORKERS=2")
            continue
        missing = [need for need in check.needs if need in failed]
        if missing:
            yield from _skip([title], f"needs what has failed: {', '.join(missing)}")
            continue
        for finding in guarded(title, check.if_impossible, check.run, client, workers):
            if finding.state == FAILED:
                failed.add(title)
            yield finding


def guarded(title: str, advice: str, check: Callable, *arguments: Any) -> Iterator[Finding]:
    """The findings of `check(*arguments)`; if it raises, that is one, with `advice`."""
    try:
        yield from check(*arguments)
    except Exception as error:  # whatever it was, the other checks are still to be made
        yield Finding(title, _headline(error), FAILED, advice)


def _headline(error):
    """The first line of an error, and of one that a rank has raised the last of its traceback."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    traceback = getattr(error, "traceback", "").strip().splitlines()
    return f"{first} {traceback[-1]}" if traceback else first


def _skip(titles, reason):
    return [Finding(title, reason, SKIPPED) for title in titles]


def slurm_partitions(said: str) -> dict[str, tuple[bool, bool]]:
    """Partition -> (whether it is up, whether it is the default), from `sinfo -h -o "%P %a"`."""
    partitions = {}
    for line in said.splitlines():
        name, state = line.split()
        partitions[name.rstrip("*")] = (state == "up", name.endswith("*"))
    return partitions


def pbs_queues(said: str) -> dict[str, tuple[bool, bool]]:
    """Queue -> (whether it is up, False), from `qstat -Q -f`.

    Unlike `qstat -Q` this never shortens a name. The default is not in it.
    """
    queues = {}
    for text in re.split(r"^Queue:", said, flags=re.M)[1:]:
        settings = dict(re.findall(r"^\s+(enabled|started) = (\w+)", text, flags=re.M))
        is_up = all(_is_true(settings.get(name, "")) for name in ("enabled", "started"))
        queues[text.split()[0]] = (is_up, False)
    return queues


def _is_true(text):
    return text.lower() in ("true", "yes")


class Query(NamedTuple):
    """How to ask a batch system for its queues."""

    command: list[str]
    read: Callable[[str], dict[str, tuple[bool, bool]]]  # what it prints
    word: str  # what a queue is called there


QUERIES = {
    "Slurm": Query(["sinfo", "-a", "-h", "-o", "%P %a"], slurm_partitions, "partition"),
    "PBS": Query(["qstat", "-Q", "-f"], pbs_queues, "queue"),
}


def _before_the_cluster(name):
    if "://" in name:
        yield Finding("profile", f"none: {name} is the address of a scheduler that runs already")
        return
    profile = read_profile(name)
    yield Finding("profile", f"{name}: {profile['cluster']}")
    if is_batch(profile) and system_of(profile).name in QUERIES:
        yield from _batch_system(name, profile)


def _batch_system(name, profile):
    """Whether its commands are there, whether it answers, and whether the queue is up."""
    system = system_of(profile).name
    query = QUERIES[system]
    commands = system_of(profile).commands
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        yield Finding(
            system,
            f"not on PATH: {', '.join(missing)}",
            FAILED,
            f"Run this where {system} is: on a login node, perhaps after "
            f"`module load {system.lower()}`. To train on this machine alone, take CLUSTER=local.",
        )
        return
    try:
        done = subprocess.run(
            query.command, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT
        )
        queues = query.read(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", None) or str(error)
        last_line = "".join(said.strip().splitlines()[-1:])
        yield Finding(
            system,
            f"`{query.command[0]}` gave no answer: {last_line}",
            FAILED,
            f"{system} is down or cannot be reached from here. "
            f"Try `{' '.join(query.command[:2])}` by hand; "
            "if it fails too, ask those who run the cluster.",
        )
        return
    yield Finding(system, f"it answers, and has {_plural(len(queues), query.word)}")
    from_dask = dask.config.get(f"jobqueue.{system.lower()}.queue", None)
    wanted = profile["options"].get("queue") or from_dask
    yield _queue(query.word, wanted, queues, name)


def _queue(word, wanted, queues, profile):
    """The finding about the queue of the profile.

    `wanted` may be None, or several with commas, of which one is enough.
    """
    asked = str(wanted).split(",") if wanted else _default_queues(queues)
    states = [f"{name} ({'up' if is_up else 'down'})" for name, (is_up, _) in queues.items()]
    listing = ", ".join(states) or "none"
    unknown = [name for name in asked if name not in queues]
    if unknown:
        return Finding(
            word,
            f"{', '.join(unknown)} does not exist; there is: {listing}",
            FAILED,
            f"Change `queue:` in the profile {profile} to one that exists and that you may use.",
        )
    names = ", ".join(name for name in asked if queues[name][0])
    if not names:
        return Finding(
            word,
            f"{wanted or 'the default'} is not up: jobs wait in it for ever; there is: {listing}",
            FAILED,
            f"Change `queue:` in the profile {profile} to one that is up, "
            "or wait until the cluster's staff opens it.",
        )
    if wanted:
        return Finding(word, f"{names} is up")
    return Finding(word, f"none in the profile; the default ({names}) is up")


def _default_queues(queues):
    """The names of the default queues; all where the batch system does not say which they are."""
    defaults = [name for name, (_, is_default) in queues.items() if is_default]
    return defaults or list(queues)


def _why_no_workers(name):
    """What to do when a cluster did not start, or its workers did not come."""
    if "://" in name:
        return (
            "Is the scheduler running, do its workers run, and does a firewall lie between here "
            "and it? For tls:// the certificates must be the same."
        )
    profile = read_profile(name)
    if not is_batch(profile):
        return (
            "The message names the cause. Close other clusters on this machine, "
            "or ask for fewer workers: WORKERS=1."
        )
    python = profile["options"].get("python") or sys.executable
    return (
        "The message names the cause, and the job's log if there is one. "
        f"A job starts {python}: this file must exist on the compute nodes, so the environment "
        "belongs on a disk that they see, not into /tmp. "
        "A job that runs without its worker coming cannot reach the scheduler here: "
        "set `interface:` (and scheduler_options: interface) in the profile to the network that "
        "login and compute nodes share."
    )
