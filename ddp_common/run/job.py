"""What `launch` is asked for, and who can do it: ranks on Dask's workers, or those of torchrun."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_common.run.result import Run


@dataclass
class Job:
    """The arguments of `launch`, which explains them."""

    function: Callable
    arguments: dict[str, Any]  # of the function, with stand-ins for tables
    tables: list[Any]  # the Dask collections among them, each with its `name`
    workers: int | None
    restarts: int | None
    stall_timeout: float | None
    directory: str | Path | Literal[False] | None
    timeout: float
    on_report: Callable[[dict], Any] | None
    run_name: str | None
    run_config: dict

    @property
    def function_name(self) -> str:
        """That of the training function; 'run' for a callable without one."""
        return getattr(self.function, "__name__", "run")


class Launcher(ABC):
    """Runs a function on ranks."""

    @abstractmethod
    def launch(self, job: Job) -> Run:
        """What `launch` does; it has looked at function and arguments."""
