"""Cluster profiles: YAML files that say which cluster class, how many workers, and its keyword arguments.

`CLUSTER=` takes a name in `clusters/` or the path of a file; one that `extends` another says only what differs; `OPTIONS=` has the last
word. Promises: what is wrong in a profile is named, with what may stand there, before anything is started.
"""

import importlib.util
import math
import os
import re
import shlex
from pathlib import Path

import psutil
import yaml
from dask.system import CPU_COUNT
from dask.utils import parse_bytes

from ddp_common.errors import Error
from ddp_common.files import is_file

PROFILES = Path(__file__).parents[2] / "clusters"
DEFAULTS = {
    "workers": "auto",
    "timeout": 60,  # seconds that workers have to appear
    "warning": 60,  # seconds before the end of its job that a rank is told to save and leave
    "gpu_cluster": None,  # the cluster class where there are GPUs and dask-cuda
}
MOST_WORKERS = 10_000
TIME = re.compile(r"(\d+-)?\d+(:\d+)+")  # YAML would make a number of 12:00:00


def read_profile(name, overrides=None):
    """The content of a profile: a dict with cluster, workers, timeout, warning, gpu_cluster, options. That of an address has no more to say than `timeout`.

    `overrides` (default: OPTIONS from the environment) is text such as 'queue=gpu walltime=02:00:00 workers=3'. Raises `Error` with the
    names that there are, or with what is wrong in the file.
    """
    profile = {**DEFAULTS, "options": {}, **_load(name)}
    if "cluster" not in profile:
        raise Error(
            f"The profile {name} names no cluster class. It needs a line such as 'cluster: distributed.LocalCluster'."
        )
    if not isinstance(profile["cluster"], str) or not isinstance(profile["options"], dict):
        raise Error(
            f"The profile {name} has cluster: {profile['cluster']!r} and options: {profile['options']!r}. 'cluster' is the name of "
            "a class, 'options' maps its keyword arguments to values."
        )
    text = os.environ.get("OPTIONS", "") if overrides is None else overrides
    _override(profile, text)
    if "://" in name and {**profile, "timeout": DEFAULTS["timeout"]} != {
        **DEFAULTS,
        "cluster": name,
        "options": {},
    }:
        raise Error(
            f"OPTIONS={text}: nothing is started at an address, so only timeout=… (seconds that workers have to appear) is of use there."
        )
    for key in ("timeout", "warning"):
        if not is_number(profile[key]) or not (
            0 <= profile[key] <= LONGEST or profile[key] == math.inf
        ):
            raise Error(
                f"The profile {name} has {key}: {profile[key]!r}. It is a number of seconds, such as {DEFAULTS[key]}."
            )
    if not isinstance(profile["gpu_cluster"], (str, type(None))):
        raise Error(
            f"The profile {name} has gpu_cluster: {profile['gpu_cluster']!r}. It is the name of a class, or left out."
        )
    _check_options(name, profile)
    if isinstance(seconds := profile["options"].get("walltime"), int):  # 12:00:00 without quotes
        profile["options"]["walltime"] = (
            f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        )
    return profile


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_options(name, profile):
    """Raise `Error` for an option of a known name that cannot be right; the cluster's class judges the others."""
    expected = dict(WORKER_OPTIONS)
    if profile["cluster"].startswith("dask_jobqueue."):
        expected |= JOB_OPTIONS
    for option, (fits, wanted) in expected.items():
        value = profile["options"].get(option)
        if value is not None and not fits(value):
            raise Error(f"The profile {name} has the option {option}: {value!r}; it is {wanted}.")


def _counts(value):
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST


def _is_memory(value):
    try:
        return not isinstance(value, bool) and 0 < parse_bytes(value) < math.inf
    except (ValueError, TypeError, AttributeError, OverflowError):
        return False


def _is_walltime(value):
    return _counts(value) or (
        isinstance(value, str) and re.fullmatch(r"(\d+-)?\d+(:\d+)*", value) is not None
    )


def _is_list(value):
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


LONGEST = 10**9  # seconds, and more than any count here
COUNT = (_counts, "a whole number of at least 1")
LINES = (_is_list, 'a list of texts, such as ["module load gcc/12"]')
WORKER_OPTIONS = {"threads_per_worker": COUNT}
JOB_OPTIONS = {
    "cores": COUNT,
    "processes": COUNT,
    "memory": (_is_memory, "a number of bytes, such as 4GiB"),
    "walltime": (_is_walltime, "written hours:minutes:seconds, such as 02:00:00"),
    "job_script_prologue": LINES,
    "job_extra_directives": LINES,
    "worker_extra_args": LINES,
    "scheduler_options": (
        lambda value: isinstance(value, dict),
        "a mapping, such as {interface: eth0}",
    ),
}


def _load(name, extended_by=()):
    """The dict in a profile's file, on top of those that it extends."""
    if "://" in name:
        return {"cluster": name}
    path = (
        Path(os.path.expanduser(name))
        if name.endswith((".yaml", ".yml"))
        else PROFILES / f"{name}.yaml"
    )
    if not is_file(path) and extended_by:
        path = extended_by[-1].parent / path
    if not is_file(path):
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise Error(
            f"There is no cluster profile {name!r}{f', which {extended_by[-1]} extends' if extended_by else ''}. CLUSTER takes one of "
            f"{known}, torchrun, srun, the path of a .yaml file, or the address of a Dask scheduler (tcp://…, tls://…)."
        )
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise Error(f"The profile {path} cannot be read: {error.strerror}.") from None
    except (
        Exception
    ) as error:  # YAML's constructors raise all kinds for what they cannot construct
        raise Error(f"The profile {path} is no valid YAML: {error or repr(error)}") from None
    if not isinstance(content, dict):
        raise Error(
            f"The profile {path} names no cluster class: it is no list of 'key: value' lines. clusters/slurm.yaml shows how one looks."
        )
    if unknown := set(content) - {"cluster", "extends", "options", *DEFAULTS}:
        raise Error(
            f"The profile {path} has unknown keys: {', '.join(map(str, sorted(unknown, key=str)))}. There are cluster, extends, options, "
            f"{', '.join(DEFAULTS)}; what belongs to the cluster class stands below 'options:'."
        )
    if path in extended_by:
        raise Error(
            f"The profile {path} extends itself, by way of {', '.join(str(p) for p in extended_by)}."
        )
    content["options"] = content.get("options") or {}
    if base := content.pop("extends", None):
        base = _load(str(base), (*extended_by, path))
        if isinstance(content["options"], dict) and isinstance(base["options"], dict):
            content["options"] = {**base["options"], **content["options"]}
        content = {**base, **content}
    return content


def _override(profile, text):
    """Put 'key=value' pairs into a profile: its own keys, else options; a dot leads into an option that is itself a mapping."""
    try:
        pairs = [each.split("=", 1) for each in shlex.split(text)]
    except ValueError as error:
        raise Error(
            f'OPTIONS={text}: {error}. Write OPTIONS="queue=gpu account=abc", quotes around values with spaces.'
        ) from None
    for pair in pairs:
        if len(pair) != 2 or not pair[0]:
            raise Error(
                f'OPTIONS={text}: {pair[0]!r} is no key=value. Write OPTIONS="queue=gpu account=abc walltime=02:00:00".'
            )
        key, value = pair[0], _value(*pair)
        if key in DEFAULTS:
            profile[key] = value
            continue
        target, *inner = key.split(".")
        if not target.isidentifier() or "" in inner:
            raise Error(
                f'OPTIONS={text}: {key!r} is no name of an option. Write OPTIONS="queue=gpu account=abc walltime=02:00:00".'
            )
        if inner:
            present = profile["options"].get(target) or {}
            if not isinstance(present, dict):
                raise Error(
                    f"OPTIONS={text}: {key} leads into {target}, which is {present!r} in this profile and has no parts. "
                    f"Write {target}=… to replace it."
                )
            profile["options"][target] = {**present, ".".join(inner): value}
        else:
            profile["options"][target] = value


def _value(key, text):
    """What `text` says in YAML: a number, true, a list, a text…; times of day stay texts."""
    if TIME.fullmatch(text):
        return text
    try:
        return yaml.safe_load(text)
    except Exception as error:  # as above
        why = (
            getattr(error, "problem", None)
            or str(error).partition("\n")[0]
            or type(error).__name__
        )
        raise Error(
            f"OPTIONS: {key}={text} is no valid YAML: {why}. Put text with brackets, braces or colons into two pairs of quotes: "
            f'OPTIONS="{key}=\'\\"text\\"\'".'
        ) from None


def number_of_workers(wanted):
    """An int of at least 1. 'auto': the number of GPUs if dask-cuda can use them, else of physical cores, from 2 to 4."""
    if wanted == "auto":
        return gpus() or max(2, min(4, psutil.cpu_count(logical=False) or 1, CPU_COUNT))
    try:
        count = 0 if isinstance(wanted, bool) else int(wanted)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise Error(
            f"WORKERS={wanted}: the number of workers is a whole number of at least 1. Each of them trains one rank."
        )
    if count > MOST_WORKERS:
        raise Error(
            f"WORKERS={wanted}: more than {MOST_WORKERS:,} workers are not possible. Each of them is a process that trains one rank."
        )
    return count


def may_have_gpus():
    """Whether a local cluster might use GPUs; unlike `gpus` it does not import torch to count them."""
    return importlib.util.find_spec("dask_cuda") is not None


def gpus():
    """The number of GPUs that a local cluster can use: 0 without dask-cuda."""
    if not may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count()
