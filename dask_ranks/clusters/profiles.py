"""Cluster profiles: YAML files that say which cluster class to start, with which arguments.

`CLUSTER=` takes a name in `clusters/` or the path of a file; one that `extends` another says only
what differs; `OPTIONS=` has the last word. Promises: what is wrong in a profile is named, with
what may stand there, before anything is started; what a cluster class says of its options is
passed on in its words.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import yaml
from dask.system import CPU_COUNT

from dask_ranks.clusters.queues import SYSTEMS
from dask_ranks.run.folders import REPOSITORY
from dask_ranks.run.job import whole_number
from ddp_common.errors import Error


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
# Options of which a text would be taken for the list of its characters
LISTS = ("job_extra_directives", "job_script_prologue", "worker_extra_args")


def read_profile(name: str, overrides: str | None = None) -> dict:
    """The content of a profile: cluster, workers, timeout, warning, gpu_cluster, options; `file`.

    `overrides` (default: OPTIONS from the environment) is text such as 'queue=gpu
    walltime=02:00:00 workers=3'; at an address only `timeout` makes sense. Raises `Error` with
    the names that there are, or with what is wrong in the file.
    """
    profile = {**DEFAULTS, "options": {}, **_load(name, ())}
    options = profile["options"]
    if not isinstance(profile.get("cluster"), str) or not isinstance(options, dict):
        raise Error(
            f"The profile {name} names no cluster class, or its options are no mapping. "
            "It needs a line such as 'cluster: distributed.LocalCluster'; "
            "'options' maps that class's keyword arguments to values."
        )
    text = os.environ.get("OPTIONS", "") if overrides is None else overrides
    given = pairs("OPTIONS", text, "queue=gpu walltime=02:00:00")
    if "://" in name and {key for key, _ in given} - {"timeout"}:
        raise Error(
            f"OPTIONS={text}: nothing is started at an address, "
            "so only timeout=… (seconds that workers have to appear) is of use there."
        )
    _override(profile, given)
    for key in ("timeout", "warning"):
        if type(profile[key]) not in (int, float) or not profile[key] >= 0:  # NaN is not
            where = f"It stands in OPTIONS, or in the profile {name}."
            raise Error(f"{key} takes a number of at least 0, not {profile[key]!r}. {where}")
    for key in LISTS:
        if isinstance(options.get(key), str):
            raise Error(f"{key}={options[key]} is no list. Write [{options[key]}].")
    if isinstance(options.get("walltime"), int):  # YAML reads 12:00:00 without quotes so
        minutes, seconds = divmod(options["walltime"], 60)
        hours, minutes = divmod(minutes, 60)
        options["walltime"] = f"{hours}:{minutes:02}:{seconds:02}"
    return profile


def _load(name: str, extended_by: tuple[str, ...]) -> dict:
    """The dict in a profile's file, on top of those that it extends."""
    if "://" in name:
        return {"cluster": name}
    path = _path_of(name, extended_by)
    if str(path) in extended_by:
        raise Error(f"The profile {path} extends itself, by way of {', '.join(extended_by)}.")
    content = _read_yaml(path)
    content["file"] = str(path)
    content["options"] = content.get("options") or {}
    extended = content.pop("extends", None)
    if not extended:
        return content
    base = _load(str(extended), (*extended_by, str(path)))
    if isinstance(content["options"], dict) and isinstance(base["options"], dict):
        content["options"] = {**base["options"], **content["options"]}
    return {**base, **content}


def _path_of(name: str, extended_by: tuple[str, ...]) -> Path:
    is_a_path = name.endswith((".yaml", ".yml"))
    path = Path(os.path.expanduser(name)) if is_a_path else PROFILES / f"{name}.yaml"
    if not os.path.isfile(path) and extended_by:
        path = Path(extended_by[-1]).parent / path
    if os.path.isfile(path):
        return path
    extending = f", which {extended_by[-1]} extends" if extended_by else ""
    what = path.absolute() if is_a_path else repr(name)
    known = sorted(each.stem for each in PROFILES.glob("*.yaml"))
    raise Error(
        f"There is no cluster profile {what}{extending}. "
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
        return {}  # it names no cluster class
    unknown = sorted(set(content) - KEYS, key=str)
    if unknown:
        raise Error(
            f"The profile {path} has unknown keys: {', '.join(map(str, unknown))}. "
            f"There are cluster, extends, options, {', '.join(DEFAULTS)}; "
            "what belongs to the cluster class stands below 'options:'."
        )
    return content


def _override(profile: dict, given: list[tuple[str, str]]) -> None:
    """Put keys and the texts of their values into a profile: its own keys, else options.

    A dot leads into an option that is itself a mapping.
    """
    options = profile["options"]
    for key, value in given:
        option, _, inner = key.partition(".")
        content: Any = value
        with contextlib.suppress(Exception):  # as in `_read_yaml`: then it is a text
            content = yaml.safe_load(value)
        if key in DEFAULTS:
            profile[key] = content
        elif inner and isinstance(options.get(option), dict):
            options[option] = {**options[option], inner: content}
        else:
            options[option] = {inner: content} if inner else content


def pairs(variable: str, text: str, example: str) -> list[tuple[str, str]]:
    """The words name=value of SET or OPTIONS, quoted as in a shell, as (name, value).

    Raises `Error`, which shows the `example`, for a word without '=' and a quote that is not
    closed.
    """
    example = f'Write {variable}="{example}", quotes around values with spaces.'
    try:
        words = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise Error(f"{variable}={text}: {error}. {example}") from None
    for name, equals, _ in words:
        if not equals:
            raise Error(f"{variable}={text}: {name!r} is no name=value. {example}")
    return [(name, value) for name, _, value in words]


def is_batch(profile: dict) -> bool:
    """Whether the workers are jobs of a batch system."""
    return profile["cluster"] in SYSTEMS


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


def refused(profile: dict, error: BaseException) -> Error:
    """What to raise where the profile's cluster class has raised an error."""
    words = f"{type(error).__name__}: {error}"
    if error.__cause__:
        words += f" ({type(error.__cause__).__name__}: {error.__cause__})"
    return Error(
        f"The profile {profile['file']}: {profile['cluster']} could not be started: {words}\n"
        "If that names an option, it stands in this file, in one that it extends, or in OPTIONS. "
        "If not, look at what the cluster's processes have printed, and whether one was killed."
    )


def number_of_workers(wanted: int | str) -> int:
    """An int of at least 1.

    'auto': the number of GPUs if dask-cuda can use them, else of physical cores, from 2 to 4.
    Raises `Error` for what is no such number.
    """
    if wanted == "auto":
        cores = min(psutil.cpu_count(logical=False) or 1, CPU_COUNT)
        return gpus() or max(2, min(4, cores))
    return whole_number("WORKERS", wanted, least=1)


def may_have_gpus() -> bool:
    """Whether a local cluster might use GPUs; unlike `gpus` it does not import torch to count."""
    return importlib.util.find_spec("dask_cuda") is not None


def gpus() -> int:
    """The number of GPUs that a local cluster can use: 0 without dask-cuda."""
    if not may_have_gpus():
        return 0
    import torch  # not above: the command line starts without it

    return torch.cuda.device_count()
