"""Whether this machine is ready for a class: `make check`.

A class needs the data of every tutorial, a notebook's kernel, and what `make doctor` looks at.
Promises: nothing is downloaded; what is drawn is drawn now, so that a class need not wait for it.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dask_ranks.clusters.doctor import examine
from ddp_common.errors import Error
from tutorials.kit.datasets import fetch, registry

KERNEL_TIMEOUT = 60  # seconds for a notebook's cell


def is_ready(say: Callable[[str], None]) -> bool:
    """Check everything; `say` gets each line as soon as it is known.

    Raises `Error` if the data or the kernel are not right.
    """
    say(f"The data are here for {check_data()}.")
    check_notebook()
    say("A notebook's kernel answers.")
    return examine("local", say=say)


def check_data() -> str:
    """Find the data of every tutorial, or draw them; returns their names."""
    names = list(registry())
    for name in names:
        fetch(name)
    return ", ".join(names)


def check_notebook() -> None:
    """Raise `Error` unless a notebook's kernel starts, in this environment."""
    import nbformat  # these take their time, and the data come first
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient

    cell = nbformat.v4.new_code_cell("import ddp_common, sys\nprint(sys.prefix)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    kernel = KernelManager(kernel_name="python3", transport="ipc")  # through no port
    with tempfile.TemporaryDirectory() as folder:
        kernel.connection_file = f"{folder}/kernel.json"
        try:
            NotebookClient(notebook, timeout=KERNEL_TIMEOUT, km=kernel).execute()
        except Exception as error:  # whatever it was, the kernel is not as it should be
            raise Error(
                f"No notebook's kernel answers: {type(error).__name__}: {error}\n"
                "Run `make setup` again."
            ) from None
        finally:
            kernel.shutdown_kernel(now=True)
    prefix = notebook.cells[0].outputs[0].text.strip()
    if Path(prefix).resolve() != Path(sys.prefix).resolve():
        raise Error(
            f"The notebook's kernel runs in {prefix}. "
            "Start notebooks with `make lab`, or choose the kernel of this environment."
        )
