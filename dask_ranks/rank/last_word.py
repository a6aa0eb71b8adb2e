"""The last word of a rank: how its result, or its exception, travels to the client.

Promises: an exception of any kind is told in words, with its traceback from the training function
on; it comes as an object too, if it can be pickled in `LARGEST_EXCEPTION` bytes.
"""

import base64
import contextlib
import io
import pickle
import re
import sys
import traceback
from types import TracebackType
from typing import Any

from dask_ranks.messages import Ended
from dask_ranks.rank import scripts, whereabouts
from ddp_common.errors import Error

# Words of gloo, NCCL and torch's store for a peer that is gone
LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe"
    r"|remote process exited|ncclRemoteError|Failed to recv|Socket closed|failed to connect"
)
OF_GLOO = re.compile(r"\[\S*/gloo/\S+:\d+\] ")  # the line of its source that has raised it
LONGEST_MESSAGE = 10_000  # characters of an exception's own message
LONGEST_TRACEBACK = 100_000  # characters
# Bytes of a pickled exception; a larger one does not travel, its message does
LARGEST_EXCEPTION = 2**20
GROUP_TWICE = "default process group twice"
HINTS = {  # what to do about an error of torch or Python, by a part of its text
    "No module named": (
        "A rank can import what its worker can. A package: install it in the environment of the "
        "workers. A module beside your script: start the workers in its folder, put that on their "
        "PYTHONPATH, or send it with client.upload_file."
    ),
    "received 0 items of ancdata": (
        "The rank has too many open files, as its loader workers send many tensors: raise `ulimit "
        "-n`, or call torch.multiprocessing.set_sharing_strategy('file_system') in the function."
    ),
    "unable to allocate shared memory": (
        "/dev/shm is full: give the container more (docker run --shm-size=2g), or use fewer "
        "loader workers."
    ),
    "BdbQuit": (
        "A rank has no keyboard, so breakpoint() and pdb cannot ask. Print instead, or run the "
        "program under torchrun with one rank."
    ),
    "Expected more than 1 value per channel when training": (
        "Batch normalisation got one sample: this rank's share of a small last batch. Leave that "
        "batch out, with ddp.ElasticSampler(…, drop_last=True)."
    ),
    GROUP_TWICE: (
        "The process group is there already: every rank is in it when the function begins. Remove "
        "that line; docs/coming-from-elsewhere.md has a table."
    ),
    "has no attribute 'set_epoch'": (
        "Remove that line: `for epoch in sampler.epochs(n)` gives each epoch an order of its own."
    ),
    "Torch not compiled with CUDA enabled": (
        "This torch knows no GPU. Write .to(ddp.device()): it is this rank's GPU, or the CPU."
    ),
    "context has already been set": (
        "A rank has set its start method already. Set that of loader workers in the loader: "
        "ddp.DataLoader(…, multiprocessing_context='spawn')."
    ),
}


def flush() -> None:
    """Write what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the training function has closed or replaced it
            stream.flush()


def pickled_result(result: Any) -> bytes:
    """The result as torch.save writes it: the client can load a GPU's tensors without a GPU.

    Models come without DDP around them. What pickle refuses, such as a function made in a
    function, cloudpickle may take. Raises TypeError for what cannot be pickled.
    """
    # Not at the top: the client imports this module too, and torch takes a second.
    import cloudpickle
    import torch

    result = _without_ddp(result)
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(result, buffer)
        return buffer.getvalue()
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer, pickle_module=cloudpickle)
    except Exception as error:
        raise TypeError(
            "The training function returned something that cannot be pickled "
            f"({type(result).__name__}: {error}). Return tensors, numbers or a state_dict."
        ) from None
    return buffer.getvalue()


def _without_ddp(result: Any) -> Any:
    """What a function returns, with plain models in place of those that DDP has wrapped."""
    from torch.nn.parallel import DistributedDataParallel

    if type(result) is dict:
        return {key: _without_ddp(each) for key, each in result.items()}
    if type(result) in (list, tuple):
        return type(result)(map(_without_ddp, result))
    return result.module if isinstance(result, DistributedDataParallel) else result


def raised(error: BaseException) -> Ended:
    """The last word of a rank that ended with an exception.

    The message of an `Error` is enough to read.
    """
    last_lines = "".join(traceback.format_exception_only(error))
    headline = str(error) if isinstance(error, Error) else last_lines.strip()
    headline = _shortened(headline, LONGEST_MESSAGE)
    for part, hint in HINTS.items():
        if part in headline:
            headline = f"{headline}. {hint}"
    code = exit_code(error)
    if isinstance(error, SystemExit):
        headline = f"it left with exit code {code} before it had finished: {headline}"
    frames = _from_the_function_on(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, Error):  # its message can be long, and is the headline
        text = text.removesuffix(last_lines)
    text = _shortened(text, LONGEST_TRACEBACK)
    return Ended("raised", code, headline, text, _pickle_exception(error), has_lost_peer(error))


def has_lost_peer(error: BaseException) -> bool:
    """Whether an exception, or one that it came from, says no more than that a peer is gone.

    Only torch's own are asked for their words: a program may lose another connection.
    """
    each: BaseException | None = error
    seen: list[int] = []
    while each is not None and id(each) not in seen:
        seen.append(id(each))
        # gloo's have no class of their own, and `work.wait()` raises them in the program itself
        is_gloos = type(each) is RuntimeError and OF_GLOO.search(str(each))
        is_torchs = is_gloos or type(each).__module__ == "torch.distributed"
        if is_torchs and LOST_PEER.search(str(each)):
            return True
        each = each.__cause__ or each.__context__
    return False


def _from_the_function_on(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames before the training function; all if it was not called."""
    first = each = frames
    while each is not None:
        code = each.tb_frame.f_code
        if whereabouts.is_call(code.co_filename, code.co_name):
            first = each.tb_next  # of several the last: a script is called by two
        each = each.tb_next
    while first is not None and first.tb_frame.f_code.co_filename == scripts.__file__:
        first = first.tb_next
    return first


def _shortened(text: str, length: int) -> str:
    """`text`, or its head, how much is left out, and its tail."""
    left_out = len(text) - length
    if left_out <= 0:
        return text
    head = text[: length // 2]
    tail = text[-length // 2 :]
    return f"{head}\n… [{left_out:,} characters left out] …\n{tail}"


def exit_code(error: BaseException | None) -> int:
    """The exit code that Python would give a process which ends with this exception."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF
    return 0 if error.code is None else 1


def _pickle_exception(error: BaseException) -> str | None:
    """The exception for the caller's `RankFailed.__cause__`, as base64.

    None if it cannot travel.
    """
    import cloudpickle  # not at the top: only a rank that fails needs it

    with contextlib.suppress(Exception):  # its classes can do anything here
        pickled = cloudpickle.dumps(error)
        if len(pickled) <= LARGEST_EXCEPTION and isinstance(pickle.loads(pickled), BaseException):
            return base64.b64encode(pickled).decode()
    return None
