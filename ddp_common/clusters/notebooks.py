"""What `connect` does in a notebook, which has one cluster: it goes on with that which is open.

Relies on what IPython's kernel knows of the cell that runs. Promises: nothing of this happens in
a program that is no notebook, and a cluster with a launch in it is never closed here.
"""

import sys

from ddp_common.client.inbox import is_launching
from ddp_common.clusters.client import ClusterClient, open_clients
from ddp_common.run.progress import kernel


def cell_that_runs() -> str | None:
    """What the execution of a notebook's cell is called, each time anew; None elsewhere."""
    if not hasattr(kernel(), "get_parent"):
        return None
    message = kernel().get_parent("shell")
    return message["header"]["msg_id"] if message else None


def earlier_in_notebook(*request) -> ClusterClient | None:
    """The client that an earlier cell of this notebook has made, if it is as this request.

    None elsewhere, and if there is none. One that is not as this request is closed, unless a
    launch runs there: then a line says that it needs the same cores.
    """
    cell = cell_that_runs()
    if cell is None:
        return None
    for client in list(open_clients):
        if client.cluster is None or client.status != "running" or client.cell in (None, cell):
            continue
        workers = len(client.workers())
        if client.request == request and workers >= client.expected:
            print(
                f"This notebook has started its cluster before: going on with its {client.ranks} "
                "workers. For a new one, close() the client first.",
                file=sys.stderr,
            )
            return client
        if is_launching(client):
            print(
                f"Another cluster of this notebook is open ({workers} workers), a launch runs "
                "there, and it needs the same cores.",
                file=sys.stderr,
            )
        else:
            print(
                f"The cluster that this notebook has started before ({workers} workers) "
                "is closed first.",
                file=sys.stderr,
            )
            client.close()
    return None
