"""Saturn Cloud: dask-saturn's cluster, with what it leaves open.

Relies on SATURN_BASE_URL and SATURN_TOKEN, as Saturn shows them. Promises: workers are counted,
not instances; what dask-saturn says is one `Error`; a cluster that could not be used or is closed
does not go on running unnoticed.
"""

import inspect
import logging
import math
import sys
from typing import Any

from ddp_common.errors import Error

# Before the import of dask_saturn, which else configures the logging of the whole program.
if logging.getLogger("dask-saturn").level == logging.NOTSET:
    logging.getLogger("dask-saturn").setLevel(logging.WARNING)

import dask_saturn


class SaturnCluster(dask_saturn.SaturnCluster):
    """`dask_saturn.SaturnCluster` for `n_workers` Dask workers.

    It takes as many instances as these need with `nprocs` workers on each.
    """

    def __init__(
        self,
        *,
        n_workers: int,
        nprocs: int | None = 1,
        shutdown_on_close: bool = True,
        **options: Any,
    ):
        """Start it. Raises `Error` for unknown options, and if Saturn does not start it."""
        self.cluster_url = None
        self._workers_each = nprocs or 1
        _refuse_unknown(options)
        instances = self._instances_for(n_workers)
        size = options.get("worker_size") or "its default size"
        print(
            f"Saturn starts a scheduler and {instances} instance(s) of {size}; "
            "that may take minutes.",
            file=sys.stderr,
            flush=True,
        )
        try:
            super().__init__(
                n_workers=instances, nprocs=nprocs, shutdown_on_close=shutdown_on_close, **options
            )
        except (ValueError, RuntimeError, LookupError, OSError) as error:
            if self.cluster_url is not None and shutdown_on_close:
                self.close()
            raise Error(
                f"Saturn did not start the cluster: {str(error).rstrip('.')}.\n"
                "Saturn's page on connecting from outside has SATURN_BASE_URL and SATURN_TOKEN; "
                'sizes are chosen with OPTIONS="worker_size=… scheduler_size=…".'
            ) from None

    def _instances_for(self, workers: int) -> int:
        return math.ceil(workers / self._workers_each)

    def scale(self, n: int) -> None:
        """Have `n` workers."""
        super().scale(self._instances_for(n))

    def register_default_plugin(self) -> None:
        """Nothing: the plugin is not needed here.

        dask-saturn registers it with a method that distributed no longer has.
        """

    def close(self, timeout: float | None = None) -> None:
        """Stop the cluster, once. If Saturn does not do so, say it: it goes on, and costs."""
        if self.cluster_url is None:
            return
        try:
            super().close()
        except (ValueError, LookupError, OSError) as error:
            print(
                f"Saturn did not close the cluster {self.dask_cluster_id}: {error}\n"
                "It may go on, and cost. Stop it on Saturn's page.",
                file=sys.stderr,
            )
        self.cluster_url = None

    def __del__(self) -> None:
        """Nothing: Dask's would ask Saturn for a status once more, over the network."""


def _refuse_unknown(options: dict) -> None:
    """Raise `Error` for options that dask-saturn would ignore."""
    parameters = inspect.signature(dask_saturn.SaturnCluster).parameters
    known = [name for name, each in parameters.items() if each.kind == each.KEYWORD_ONLY]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise Error(
            f"Saturn's cluster has no option {', '.join(unknown)}.\nIt has: {', '.join(known)}."
        )
