"""What `connect` does in a notebook: a cell that is run again goes on with its cluster."""

import os
import sys
import weakref

open_clients = weakref.WeakSet()


def is_watched():
    """Whether somebody sees what is said now: on a terminal, in a notebook of `make lab`; not where outputs are kept and compared."""
    return (os.environ.get("DDP_PROGRESS") or ("bar" if sys.stderr.isatty() else "off")) == "bar"


def cell_that_runs():
    """Of a notebook: (the cell that runs, this execution of it). None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    message = shell.kernel.get_parent("shell") if hasattr(shell, "kernel") else None
    if not message:
        return None
    return message.get("metadata", {}).get("cellId") or message["content"].get("code"), message[
        "header"
    ]["msg_id"]


def earlier_in_notebook(*request):
    """The client that this cell of a notebook has made when it was run before, if it is still open and the request the same.

    With another request that cluster is closed, unless a launch runs there. Of other open clusters in the notebook one line says
    that they are there: they need the same cores. Nothing of this in a program that is no notebook.
    """
    cell = cell_that_runs()
    if cell is None:
        return None
    for client in list(open_clients):
        if client.cluster is None or client.status != "running" or client.cell is None:
            continue
        again = client.cell[0] == cell[0] and client.cell[1] != cell[1]
        if again and client.request == request and len(client.workers()) >= client.expected:
            print(
                f"This cell has started its cluster before: going on with its {client.ranks} workers. For a new one, close() the client first.",
                file=sys.stderr,
            )
            return client
        if again and not client.__dict__.get("ddp_inboxes"):
            print(
                f"The cluster that this cell has started before ({len(client.workers())} workers) is closed first.",
                file=sys.stderr,
            )
            client.close()
        elif client.cell[1] != cell[1]:
            print(
                f"Another cluster of this notebook is open ({len(client.workers())} workers, {client.request[0]}) and needs the same cores: "
                "close() its client, or restart the kernel.",
                file=sys.stderr,
            )
    return None
