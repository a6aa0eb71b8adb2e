"""Saturn Cloud: dask-saturn's cluster, with what it leaves open.

Relies on SATURN_BASE_URL and SATURN_TOKEN, as Saturn shows them. Promises: workers are counted,
not instances; what is wrong is said in one `Error` before anything is paid for, where that can be
known; a cluster that could not be used or is closed does not go on running unnoticed.
"""

import inspect
import logging
import math
import os
import sys
from urllib.parse import urljoin

import requests

from ddp_common.errors import Error, first_line

# Before the import of dask_saturn, which else configures the logging of the whole program.
if logging.getLogger("dask-saturn").level == logging.NOTSET:
    logging.getLogger("dask-saturn").setLevel(logging.WARNING)

import dask_saturn

# Seconds that Saturn has to answer the first question; dask-saturn would wait forever.
ANSWER_TIMEOUT = 10
BOTH_VARIABLES = (
    "Inside Saturn both are set; "
    "elsewhere take them from Saturn's page on connecting from outside."
)


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
        **options,
    ):
        """Start it. Raises `Error` for unknown options, and if Saturn does not start it."""
        self.cluster_url = None
        self._workers_each = nprocs or 1
        _refuse_unknown(options)
        check_access()
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
                f"Saturn did not start the cluster: {str(error).rstrip('.')}. "
                'Sizes are chosen with OPTIONS="worker_size=… scheduler_size=…". '
                "Saturn's page shows what runs, and what it costs."
            ) from None

    def _instances_for(self, workers):
        return math.ceil(workers / self._workers_each)

    def scale(self, n: int) -> None:
        """Have `n` workers."""
        super().scale(self._instances_for(n))

    def register_default_plugin(self):
        """Nothing: the plugin is not needed here.

        dask-saturn registers it with a method that distributed no longer has.
        """

    def close(self, timeout=None) -> None:
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

    def __del__(self):
        """Nothing: Dask's would ask Saturn for a status once more, over the network."""


def _refuse_unknown(options):
    """Raise `Error` for options that dask-saturn would ignore."""
    parameters = inspect.signature(dask_saturn.SaturnCluster).parameters
    known = [name for name, each in parameters.items() if each.kind == each.KEYWORD_ONLY]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise Error(
            f"Saturn's cluster has no option {', '.join(unknown)}. There are: {', '.join(known)}."
        )


def check_access() -> None:
    """Raise `Error` unless Saturn answers at SATURN_BASE_URL and takes SATURN_TOKEN."""
    for name in ("SATURN_BASE_URL", "SATURN_TOKEN"):
        if not os.environ.get(name):
            raise Error(
                f"CLUSTER=saturn needs {name}, which is not set. SATURN_BASE_URL is the address "
                f"of your Saturn and SATURN_TOKEN opens it. {BOTH_VARIABLES}"
            )
    url = os.environ["SATURN_BASE_URL"]
    try:
        answer = requests.get(
            urljoin(url, "api/dask_clusters/info"),
            headers=dask_saturn.settings.Settings().headers,
            timeout=ANSWER_TIMEOUT,
        )
        is_saturn = answer.status_code in (401, 403) or "server_options" in answer.json()
        said = f"{answer.status_code} {answer.reason}"
    except (OSError, ValueError) as error:  # nobody, no address, or a page for people
        is_saturn, said = False, first_line(error)
    if not is_saturn:
        raise Error(
            f"SATURN_BASE_URL={url}: no Saturn answers there ({said}). Is the address right, "
            "without a path behind the host's name, and does this host have a way to it? "
            f"{BOTH_VARIABLES}"
        )
    if not answer.ok:
        raise Error(
            f"Saturn at {url} refuses SATURN_TOKEN ({said}). Tokens expire; get a new one. "
            f"{BOTH_VARIABLES}"
        )
