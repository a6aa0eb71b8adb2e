"""Saturn Cloud: dask-saturn's cluster, with what it leaves open.

Relies on SATURN_BASE_URL and SATURN_TOKEN, as Saturn shows them. Promises: workers are counted, not instances; what is wrong is said in one
`Error` before anything is paid for, where that can be known; a cluster that could not be used or is closed does not go on running
unnoticed.
"""

import inspect
import logging
import math
import os
import sys
from urllib.parse import urljoin

import requests

from ddp_common.errors import Error

if logging.getLogger("dask-saturn").level == logging.NOTSET:
    logging.getLogger("dask-saturn").setLevel(
        logging.WARNING
    )  # before the import, which else configures the logging of the whole program

import dask_saturn

ANSWER_TIMEOUT = (
    10  # seconds that Saturn has to answer the first question; dask-saturn would wait for ever
)


class SaturnCluster(dask_saturn.SaturnCluster):
    """`dask_saturn.SaturnCluster` for `n_workers` Dask workers, on as many instances as these need with `nprocs` on each."""

    def __init__(self, *, n_workers, nprocs=1, shutdown_on_close=True, **options):
        self.cluster_url, self._each = None, nprocs or 1
        known = [
            name
            for name, each in inspect.signature(dask_saturn.SaturnCluster).parameters.items()
            if each.kind == each.KEYWORD_ONLY
        ]
        if unknown := set(options) - set(known):  # which dask-saturn would ignore
            raise Error(
                f"Saturn's cluster has no option {', '.join(sorted(unknown))}. There are: {', '.join(known)}."
            )
        check_access()
        instances = self._instances_for(n_workers)
        print(
            f"Saturn starts a scheduler and {instances} instance(s) of {options.get('worker_size') or 'its default size'}; that may take minutes.",
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
                f'Saturn did not start the cluster: {str(error).rstrip(".")}. Sizes are chosen with OPTIONS="worker_size=… '
                "scheduler_size=…\". Saturn's page shows what runs, and what it costs."
            ) from None

    def _instances_for(self, workers):
        return math.ceil(workers / self._each)

    def scale(self, n):
        """Have `n` workers."""
        super().scale(self._instances_for(n))

    def register_default_plugin(self):
        """Nothing: it does so with a method that distributed no longer has, and what the plugin does is not needed here."""

    def close(self, timeout=None):
        """Stop the cluster, once. If Saturn does not do so, say it: it goes on, and costs."""
        if self.cluster_url is None:
            return
        try:
            super().close()
        except (ValueError, LookupError, OSError) as error:
            print(
                f"Saturn did not close the cluster {self.dask_cluster_id}: {error}\nIt may go on, and cost. Stop it on Saturn's page.",
                file=sys.stderr,
            )
        self.cluster_url = None

    def __del__(self):
        """Nothing: Dask's would ask Saturn for a status once more, over the network."""


def check_access():
    """Raise `Error` unless Saturn answers at SATURN_BASE_URL and takes SATURN_TOKEN."""
    where = "Inside Saturn both are set; elsewhere take them from Saturn's page on connecting from outside."
    for name in ("SATURN_BASE_URL", "SATURN_TOKEN"):
        if not os.environ.get(name):
            raise Error(
                f"CLUSTER=saturn needs {name}, which is not set. SATURN_BASE_URL is the address of your Saturn and SATURN_TOKEN opens it. {where}"
            )
    url = os.environ["SATURN_BASE_URL"]
    try:
        answer = requests.get(
            urljoin(url, "api/dask_clusters/info"),
            headers=dask_saturn.settings.Settings().headers,
            timeout=ANSWER_TIMEOUT,
        )
    except (OSError, ValueError) as error:
        why = (
            f"no answer within {ANSWER_TIMEOUT} s"
            if isinstance(error, requests.Timeout)
            else _innermost(error)
        )
        raise Error(
            f"SATURN_BASE_URL={url}: no Saturn answers there ({why}). Is the address right, and does this host have a way to it? {where}"
        ) from None
    try:
        content = answer.json()
        said = content.get("message", answer.reason)
    except (ValueError, AttributeError):  # a page for people
        content, said = {}, answer.reason
    if answer.status_code in (401, 403):
        raise Error(
            f"Saturn at {url} refuses SATURN_TOKEN ({said}). Tokens end; get a new one. {where}"
        )
    if "server_options" not in content:
        raise Error(
            f"SATURN_BASE_URL={url}: what answers there is no Saturn that starts Dask clusters ({answer.status_code} {said}). Is the address right, "
            f"without a path behind the host's name? {where}"
        )


def _innermost(error):
    """What went wrong, without the layers of libraries around it: 'Connection refused'."""
    while isinstance(inner := getattr(error, "reason", None) or error.__context__, BaseException):
        error = inner
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
