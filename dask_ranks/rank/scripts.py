"""A script as it is: each rank runs it as torchrun would, without a change.

The script runs as `__main__`, with its own `sys.argv`, in the folder in which the client's program
runs. It makes its process group itself: `init_process_group()` joins the store that is there
(`rendezvous`). Imports no torch: the client makes a `Script` too.
"""

import builtins
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from ddp_common.errors import Error


class Script:
    """What `launch` calls in each rank in place of a function. `script` makes one."""

    def __init__(self, path: str, argv: list[str], is_module: bool, folder: str):
        self.path = path  # as it was typed, below `folder` or absolute; or the name of a module
        self.argv = argv
        self.is_module = is_module
        self.folder = folder  # in which it runs
        self.__name__ = path.rpartition(".")[2] if is_module else Path(path).stem

    def __call__(self) -> None:
        """Run the script. What it raises is raised, but for an exit with code 0.

        Raises `Error` where the worker's host has not its folder or the script.
        """
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise Error(
                f"The script's folder {self.folder} is not on this worker's host: "
                f"{error.strerror}. Start the program in a folder that all hosts see."
            ) from None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if os.environ.get("DDP_OWN_GPU_FIRST") and visible:
            ordered = own_gpu_at(int(os.environ["LOCAL_RANK"]), visible.split(","))
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ordered)
        _refuse_spawn()
        try:
            self._run()
        except SystemExit as left:
            if left.code not in (None, 0):
                raise left.with_traceback(None) from None  # not through argparse

    def _run(self) -> None:
        if self.is_module:
            sys.argv[:] = [self.path, *self.argv]
            sys.path.insert(0, self.folder)
            runpy.run_module(self.path, run_name="__main__", alter_sys=True)
            return
        path = os.path.abspath(self.path)
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            raise Error(
                f"The script {path} cannot be read on this worker's host: {error.strerror}. "
                "Put it where all hosts see it."
            ) from None
        sys.argv[:] = [self.path, *self.argv]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # as Python does
        main = ModuleType("__main__")
        vars(main).update(__file__=path, __builtins__=builtins)
        # It stays: workers of its loaders, and pickle, look for its classes there
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        _call(source, path, vars(main))


def own_gpu_at(local_rank: int, devices: list[str]) -> list[str]:
    """The GPUs of a host in the order in which a script for torchrun looks for its own.

    dask-cuda lists the worker's own first, then the others in a circle; the script takes GPU
    number LOCAL_RANK.
    """
    shift = local_rank % len(devices)
    return devices[-shift:] + devices[:-shift] if shift else devices


def _refuse_spawn() -> None:
    """Ranks that a script spawns would wait for ever: these are the ranks that are there."""
    import torch.multiprocessing as mp

    def spawn(function: Callable, *_: object, **__: object) -> None:
        raise Error(
            "torch.multiprocessing.spawn starts ranks, and this process is one of ddprun's.\n"
            f"In place of mp.spawn({function.__name__}, …) write {function.__name__}(rank, …), "
            'with rank = int(os.environ["RANK"]) and world_size = int(os.environ["WORLD_SIZE"]). '
            "Remove lines that set MASTER_ADDR and MASTER_PORT. Or run the script with python."
        )

    mp.spawn = sys.modules["torch.multiprocessing.spawn"].spawn = spawn  # type: ignore


def _call(source: bytes, path: str, names: dict[str, object]) -> None:
    """`whereabouts.is_call` finds this frame by its name: what is above it is the script's."""
    exec(compile(source, path, "exec"), names)


def script(path: str | Path, *argv: object, module: bool = False) -> Script:
    """A script for `launch`, to be run in each rank as torchrun would run it.

        run = ddp.launch(client, ddp.script("train.py", "--lr", "0.1"), restarts=2)

    `argv` are its arguments. With `module`, `path` is the name of a module, as for `python -m`.
    It runs in the folder in which this program is now. Raises `Error` if there is no such file or
    module.
    """
    folder = os.getcwd()
    words = [str(word) for word in argv]
    if module:
        top = str(path).partition(".")[0]
        if PathFinder.find_spec(top, [folder, *sys.path]) is None:
            raise Error(
                f"There is no module {top}, neither in {folder} nor on Python's path. Go to the "
                "folder that contains it."
            )
    elif not os.path.isfile(path):
        raise Error(f"There is no script {path} in {folder}. Give the path of a Python file.")
    return Script(str(path), words, module, folder)
