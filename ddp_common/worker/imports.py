"""What is imported once, ahead of the ranks that are forked from the process that did."""

import contextlib
import gc
import importlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from ddp_common.worker.descendants import RANK

NEEDED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "ddp_common.ranks.process",
    "ddp_common.ranks.rendezvous",
    "ddp_common.ranks.sampling",
    "ddp_common.ranks.checkpoint",
    "ddp_common.ranks.stopping",
    "ddp_common.ranks.trace",
]


def import_what_ranks_need() -> None:
    """Import torch and ours; what cannot be imported is left to the rank, which tells why."""
    private: Any = spawn  # what is replaced is private to multiprocessing
    private._fixup_main_from_path = _not_in_ranks(private._fixup_main_from_path)
    private._fixup_main_from_name = _not_in_ranks(private._fixup_main_from_name)
    import_ahead(NEEDED)


def import_ahead(names: list[str]) -> None:
    """Import modules ahead of those who need them; what fails is left to these.

    No garbage is collected meanwhile: imports leave hardly any, and looking for it takes a quarter
    of their time. What they have made is then left out of all later collections (`gc.freeze`): a
    forked process does not go through it, and goes on sharing its memory.
    """
    # Else torch prints a stack of C++ for each connection to a store that ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _not_in_ranks(import_main: Callable) -> Callable:
    """Let a rank not import the program's main module, which holds the user's script.

    `multiprocessing` would do so. What a training function needs of it travels with the function,
    by value.
    """

    def unless_rank(main: Any) -> None:
        if not multiprocessing.current_process().name.startswith(RANK):
            import_main(main)

    return unless_rank
