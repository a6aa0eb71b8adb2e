"""What `connect` does in a notebook: a cell that is run again goes on with its cluster.

Relies on what IPython's kernel knows of the cell that runs. Promises: nothing of this happens in
a program that is no notebook, and a cluster with a launch in it is never closed here.
"""

import os
import sys
import weakref
from typing import Any, NamedTuple

from distributed import Client

from ddp_common.run.progress import a_person_watches

open_clients: weakref.WeakSet[Client] = weakref.WeakSet()  # that `connect` has returned


class Cell(NamedTuple):
    """A cell of a notebook that runs."""

    name: str  # its id, or its code where the notebook gives it none
    execution: str  # different each time that it is run


def is_watched() -> bool:
    """Whether somebody sees what is said now: on a terminal, at a front end such as JupyterLab.

    Not where outputs are kept and compared.
    """
    is_seen = sys.stderr.isatty() or a_person_watches()
    return (os.environ.get("DDP_PROGRESS") or ("bar" if is_seen else "off")) == "bar"


def cell_that_runs() -> Cell | None:
    """The cell of a notebook that runs; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    if not hasattr(ipython, "get_ipython"):
        return None
    shell = ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    message = shell.kernel.get_parent("shell")
    if not message:
        return None
    name = message.get("metadata", {}).get("cellId") or message["content"].get("code")
    return Cell(name, message["header"]["msg_id"])


def earlier_in_notebook(*request):
    """The client that this cell of a notebook made when it was run before.

    None unless it is still open and the request is the same. With another request that cluster is
    closed, unless a launch runs there. For other open clusters of the notebook one line says that
    they are there: they need the same cores.
    """
    cell = cell_that_runs()
    if cell is None:
        return None
    for client in list(open_clients):
        if client.cluster is None or client.status != "running" or client.cell is None:
            continue
        if client.cell.execution == cell.execution:
            continue
        workers = len(client.workers())
        is_again = client.cell.name == cell.name
        if is_again and client.request == request and workers >= client.expected:
            print(
                f"This cell has started its cluster before: going on with its {client.ranks} "
                "workers. For a new one, close() the client first.",
                file=sys.stderr,
            )
            return client
        has_launch = bool(client.__dict__.get("ddp_inboxes"))
        if is_again and not has_launch:
            print(
                f"The cluster that this cell has started before ({workers} workers) "
                "is closed first.",
                file=sys.stderr,
            )
            client.close()
        else:
            print(
                f"Another cluster of this notebook is open ({workers} workers, "
                f"{client.request[0]}) and needs the same cores: "
                "close() its client, or restart the kernel.",
                file=sys.stderr,
            )
    return None
