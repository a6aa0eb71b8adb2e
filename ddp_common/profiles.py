"""Cluster profiles: YAML files that say which cluster class, how many workers, and its keyword arguments.

`CLUSTER=` takes a name in `clusters/` or the path of a file; one that `extends` another says only what differs; `OPTIONS=` has the last
word. Promises: what is wrong in a profile is named, with what may stand there, before anything is started.
"""

import importlib.util
import os
import re
import shlex
from pathlib import Path

import psutil
import yaml
from dask.system import CPU_COUNT

from ddp_common.errors import Error

PROFILES = Path(__file__).parent.parent / "clusters"
DEFAULTS = {
    "workers": "auto",
    "timeout": 60,  # seconds that workers have to appear
    "warning": 60,  # seconds before the end of its job that a rank is told to save and leave
    "gpu_cluster": None,  # the cluster class where there are GPUs and dask-cuda
}
TIME = re.compile(r"(\d+-)?\d+(:\d+)+")  # YAML would make a number of 12:00:00


def read_profile(name, overrides=None):
    """The content of a profile: a dict with cluster, workers, timeout, warning, gpu_cluster, options. That of an address has no more to say than `timeout`.

    `overrides` (default: OPTIONS from the environment) is text such as 'queue=gpu walltime=02:00:00 workers=3'. Raises `Error` with the
    names that there are, or with what is wrong in the file.
    """
    profile = {**DEFAULTS, "options": {}, **_load(name)}
    if "cluster" not in profile:
        raise Error(f"The profile {name} names no cluster class. It needs a line such as 'cluster: distributed.LocalCluster'.")
    if not isinstance(profile["cluster"], str) or not isinstance(profile["options"], dict):
        raise Error(f"The profile {name} has cluster: {profile['cluster']!r} and options: {profile['options']!r}. 'cluster' is the name of "
                    "a class, 'options' maps its keyword arguments to values.")
    text = os.environ.get("OPTIONS", "") if overrides is None else overrides
    _override(profile, text)
    if "://" in name and {**profile, "timeout": DEFAULTS["timeout"]} != {**DEFAULTS, "cluster": name, "options": {}}:
        raise Error(f"OPTIONS={text}: nothing is started at an address, so only timeout=… (seconds that workers have to appear) is of use there.")
    for key in ("timeout", "warning"):
        if isinstance(profile[key], bool) or not isinstance(profile[key], (int, float)) or profile[key] < 0:
            raise Error(f"The profile {name} has {key}: {profile[key]!r}. It is a number of seconds, such as {DEFAULTS[key]}.")
    if isinstance(seconds := profile["options"].get("walltime"), int):  # 12:00:00 without quotes
        profile["options"]["walltime"] = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return profile


def _load(name, extended_by=()):
    """The dict in a profile's file, on top of those that it extends."""
    if "://" in name:
        return {"cluster": name}
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    if not path.is_file() and extended_by:
        path = extended_by[-1].parent / path
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise Error(f"There is no cluster profile {name!r}{f', which {extended_by[-1]} extends' if extended_by else ''}. CLUSTER takes one of "
                    f"{known}, torchrun, srun, the path of a .yaml file, or the address of a Dask scheduler (tcp://…, tls://…).")
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Error(f"The profile {path} is no valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise Error(f"The profile {path} names no cluster class: it is no list of 'key: value' lines. clusters/slurm.yaml shows how one looks.")
    if unknown := set(content) - {"cluster", "extends", "options", *DEFAULTS}:
        raise Error(f"The profile {path} has unknown keys: {', '.join(map(str, sorted(unknown, key=str)))}. There are cluster, extends, options, "
                    f"{', '.join(DEFAULTS)}; what belongs to the cluster class stands below 'options:'.")
    if path in extended_by:
        raise Error(f"The profile {path} extends itself, by way of {', '.join(str(p) for p in extended_by)}.")
    content["options"] = content.get("options") or {}
    if base := content.pop("extends", None):
        base = _load(str(base), (*extended_by, path))
        if isinstance(content["options"], dict):
            content["options"] = {**base["options"], **content["options"]}
        content = {**base, **content}
    return content


def _override(profile, text):
    """Put 'key=value' pairs into a profile: its own keys, else options; a dot leads into an option that is itself a mapping."""
    try:
        pairs = [each.split("=", 1) for each in shlex.split(text)]
    except ValueError as error:
        raise Error(f"OPTIONS={text}: {error}. Write OPTIONS=\"queue=gpu account=abc\", quotes around values with spaces.") from None
    for pair in pairs:
        if len(pair) != 2 or not pair[0]:
            raise Error(f"OPTIONS={text}: {pair[0]!r} is no key=value. Write OPTIONS=\"queue=gpu account=abc walltime=02:00:00\".")
        key, value = pair[0], pair[1] if TIME.fullmatch(pair[1]) else yaml.safe_load(pair[1])
        if key in DEFAULTS:
            profile[key] = value
            continue
        target, *inner = key.split(".")
        if inner:
            profile["options"][target] = {**profile["options"].get(target, {}), ".".join(inner): value}
        else:
            profile["options"][target] = value


def number_of_workers(wanted):
    """An int of at least 1. 'auto': the number of GPUs if dask-cuda can use them, else of physical cores, from 2 to 4."""
    if wanted == "auto":
        return gpus() or max(2, min(4, psutil.cpu_count(logical=False) or 1, CPU_COUNT))
    try:
        count = int(wanted)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise Error(f"WORKERS={wanted}: the number of workers is a whole number of at least 1. Each of them trains one rank.")
    return count


def gpus():
    """The number of GPUs that a local cluster can use: 0 without dask-cuda."""
    if importlib.util.find_spec("dask_cuda") is None:
        return 0
    import torch

    return torch.cuda.device_count()
