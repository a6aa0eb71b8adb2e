"""Cluster profiles: YAML files that say which cluster class to start, with which arguments.

`CLUSTER=` takes a name in `clusters/` or the path of a file; one that `extends` another says only
what differs; `OPTIONS=` has the last word. Promises: what is wrong in a profile is named, with
what may stand there, before anything is started.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import yaml
from dask.system import CPU_COUNT

from ddp_common.errors import Error, first_line
from ddp_common.files import is_file
from ddp_common.run.folders import REPOSITORY
from ddp_common.values import of_kind, pairs, whole_number


def _folder_of_profiles() -> Path:
    """`clusters/` of the repository, or, where a wheel was installed, the copy that it brought."""
    in_repository = REPOSITORY / "clusters"
    if in_repository.is_dir():
        return in_repository
    for file in importlib.metadata.files("ddp-common") or ():
        if file.match("ddp-common/clusters/local.yaml"):
            return Path(str(file.locate())).parent
    return in_repository


PROFILES = _folder_of_profiles()
DEFAULTS = {
    "workers": "auto",
    "timeout": 60.0,  # seconds that workers have to appear
    "warning": 60.0,  # seconds before the end of its job that a rank is told to save and leave
    "gpu_cluster": None,  # the cluster class where there are GPUs and dask-cuda
}
KEYS = {"cluster", "extends", "options", *DEFAULTS}
COUNTS = ("cores", "processes", "threads_per_worker")  # options that are whole numbers
CLOCK = re.compile(r"(\d+-)?\d+(:\d+)+")  # YAML would make a number of 12:00:00


def read_profile(name: str, overrides: str | None = None) -> dict:
    """The content of a profile: cluster, workers, timeout, warning, gpu_cluster, options.

    `overrides` (default: OPTIONS from the environment) is text such as 'queue=gpu
    walltime=02:00:00 workers=3'; at an address only `timeout` makes sense. Raises `Error` with
    the names that there are, or with what is wrong in the file.
    """
    profile = {**DEFAULTS, "options": {}, **_load(name)}
    if not isinstance(profile.get("cluster"), str) or not isinstance(profile["options"], dict):
        raise Error(
            f"The profile {name} names no cluster class, or its options are no mapping. "
            "It needs a line such as 'cluster: distributed.LocalCluster'; "
            "'options' maps that class's keyword arguments to values."
        )
    text = os.environ.get("OPTIONS", "") if overrides is None else overrides
    _override(profile, text)
    if "://" in name:
        _refuse_all_but_timeout(name, profile, text)
    for key in ("timeout", "warning"):
        source = f" It stands in OPTIONS, or in the profile {name}."
        profile[key] = of_kind(key, profile[key], DEFAULTS[key], {key: (0, None)}, source)
    options = profile["options"]
    for key in COUNTS:
        if options.get(key) is not None:
            options[key] = whole_number(key, options[key], least=1)
    if isinstance(options.get("walltime"), int):  # YAML has read 12:00:00 without quotes so
        minutes, seconds = divmod(options["walltime"], 60)
        hours, minutes = divmod(minutes, 60)
        options["walltime"] = f"{hours}:{minutes:02}:{seconds:02}"
    return profile


def _refuse_all_but_timeout(address: str, profile: dict, text: str) -> None:
    without_timeout = {**profile, "timeout": DEFAULTS["timeout"]}
    if without_timeout != {**DEFAULTS, "cluster": address, "options": {}}:
        raise Error(
            f"OPTIONS={text}: nothing is started at an address, "
            "so only timeout=… (seconds that workers have to appear) is of use there."
        )


def _load(name: str, extended_by: tuple[Path, ...] = ()) -> dict:
    """The dict in a profile's file, on top of those that it extends."""
    if "://" in name:
        return {"cluster": name}
    path = _path_of(name, extended_by)
    content = _read_yaml(path)
    if path in extended_by:
        by_way_of = ", ".join(str(other) for other in extended_by)
        raise Error(f"The profile {path} extends itself, by way of {by_way_of}.")
    content["options"] = content.get("options") or {}
    extended = content.pop("extends", None)
    if not extended:
        return content
    base = _load(str(extended), (*extended_by, path))
    if isinstance(content["options"], dict) and isinstance(base["options"], dict):
        content["options"] = {**base["options"], **content["options"]}
    return {**base, **content}


def _path_of(name: str, extended_by: tuple[Path, ...]) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(os.path.expanduser(name))
    else:
        path = PROFILES / f"{name}.yaml"
    if not is_file(path) and extended_by:
        path = extended_by[-1].parent / path
    if is_file(path):
        return path
    extending = f", which {extended_by[-1]} extends" if extended_by else ""
    if name.endswith((".yaml", ".yml")):
        raise Error(
            f"CLUSTER={name}{extending}: no such file, {path.absolute()}. "
            "Give the path of a profile, or the name of one in clusters/."
        )
    known = sorted(each.stem for each in PROFILES.glob("*.yaml"))
    if not known:
        raise Error(
            f"The package has no cluster profiles: there is no {PROFILES}. Install it from its "
            "wheel, or from a clone with pip install -e."
        )
    raise Error(
        f"There is no cluster profile {name!r}{extending}. "
        f"CLUSTER takes one of {', '.join([*known, 'torchrun', 'srun'])}, the path of a .yaml "
        "file, or the address of a Dask scheduler (tcp://…, tls://…)."
    )


def _read_yaml(path: Path) -> dict:
    """The dict in one file. Raises `Error` unless it can be read and has only known keys."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise Error(f"The profile {path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # YAML's constructors raise anything for what they cannot make
        raise Error(f"The profile {path} is no valid YAML: {error or repr(error)}") from None
    if not isinstance(content, dict):
        raise Error(
            f"The profile {path} names no cluster class: it is no list of 'key: value' lines. "
            "clusters/slurm.yaml shows how one looks."
        )
    unknown = sorted(set(content) - KEYS, key=str)
    if unknown:
        raise Error(
            f"The profile {path} has unknown keys: {', '.join(map(str, unknown))}. "
            f"There are cluster, extends, options, {', '.join(DEFAULTS)}; "
            "what belongs to the cluster class stands below 'options:'."
        )
    return content


def _override(profile: dict, text: str) -> None:
    """Put 'key=value' pairs into a profile: its own keys, else options.

    A dot leads into an option that is itself a mapping.
    """
    options = profile["options"]
    for key, value in pairs("OPTIONS", text, "queue=gpu walltime=02:00:00"):
        option, dot, inner = key.partition(".")
        if not option.isidentifier() or bool(dot) != bool(inner):
            raise Error(
                f"OPTIONS={text}: {key!r} can be the name of no option. "
                'Write OPTIONS="queue=gpu scheduler_options.interface=ib0".'
            )
        content = _parsed(key, value)
        if key in DEFAULTS:
            profile[key] = content
        elif not inner:
            options[option] = content
        elif isinstance(options.get(option) or {}, dict):
            options[option] = {**(options.get(option) or {}), inner: content}
        else:
            raise Error(
                f"OPTIONS={text}: {key} leads into {option}, which is {options[option]!r} in this "
                f"profile and has no parts. Write {option}=… to replace it."
            )


def _parsed(key: str, text: str) -> Any:
    """What `text` says in YAML: a number, true, a list, a text…; clock times stay texts."""
    if CLOCK.fullmatch(text):
        return text
    try:
        return yaml.safe_load(text)
    except Exception as error:  # as in `_read_yaml`
        why = getattr(error, "problem", None) or first_line(error)
        raise Error(
            f"OPTIONS: {key}={text} is no valid YAML: {why}. "
            "Put text with brackets, braces or colons into two pairs of quotes: "
            f'OPTIONS="{key}=\'\\"text\\"\'".'
        ) from None


def is_batch(profile: dict) -> bool:
    """Whether the workers are jobs of a batch system."""
    return profile["cluster"].startswith("dask_jobqueue.")


def cluster_class(name: str) -> type[Any]:
    """The class that a profile names. Raises `Error` if it cannot be imported."""
    module, _, attribute = name.rpartition(".")
    handler = signal.getsignal(signal.SIGINT)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Error(
            f"The profile's cluster class {name} cannot be imported: {error}. "
            "Is its package installed?"
        ) from None
    finally:
        # To import dask-jobqueue 0.9 has Ctrl-C end the program
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def names_of_options(*classes: type) -> set[str]:
    """The names of all arguments that these classes, and those that they extend, take."""
    return {
        parameter.name
        for each in classes
        for cls in each.__mro__
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def meant(option: str, known: set[str]) -> str:
    """What an option that does not exist may be called, in brackets."""
    near = difflib.get_close_matches(option, sorted(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def number_of_workers(wanted: int | str) -> int:
    """An int of at least 1.

    'auto': the number of GPUs if dask-cuda can use them, else of physical cores, from 2 to 4.
    Raises `Error` for what is no such number.
    """
    if wanted == "auto":
        return gpus() or _default_for_cpus()
    return whole_number("WORKERS", wanted, least=1)


def _default_for_cpus() -> int:
    cores = min(psutil.cpu_count(logical=False) or 1, CPU_COUNT)
    return max(2, min(4, cores))


def may_have_gpus() -> bool:
    """Whether a local cluster might use GPUs; unlike `gpus` it does not import torch to count."""
    return importlib.util.find_spec("dask_cuda") is not None


def gpus() -> int:
    """The number of GPUs that a local cluster can use: 0 without dask-cuda."""
    if not may_have_gpus():
        return 0
    import torch  # not above: the command line starts without it

    return torch.cuda.device_count()
