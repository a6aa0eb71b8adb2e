"""Makes a kernel for a JupyterLab that is not ours, such as a JupyterHub's: `make kernel`.

A Hub's JupyterLab has an environment of its own, and `python3` there does not know this course.
The kernel is the Python that runs this program, with the modules of this clone. Jupyter's own
`KernelSpecManager` puts it where a user's kernels are. The student's copies of the notebooks come
into `my-work/`, as with `make lab`, and name this kernel.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager

from tutorials import lab

CLONE = lab.HERE.parent
PROGRAMS = os.path.dirname(sys.executable)


def specification():
    """What stands in kernel.json, a dict. Jupyter fills in PATH when it starts the kernel."""
    home = Path.home()
    place = f"~/{CLONE.relative_to(home)}" if CLONE.is_relative_to(home) else CLONE
    return {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": f"DDP tutorials ({place})",
        "language": "python",
        "metadata": {"debugger": True},
        "env": {"PYTHONPATH": str(CLONE), "PATH": f"{PROGRAMS}{os.pathsep}${{PATH}}"},
    }


def install():
    """Write kernel.json; returns its folder. Ends the program where it cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(specification(), indent=1))
        kernels = KernelSpecManager()
        try:
            return kernels.install_kernel_spec(folder, lab.KERNEL, user=True)
        except OSError as error:
            sys.exit(
                f"The kernel cannot be put into {kernels.user_kernel_dir}: {error.strerror}. "
                "Jupyter looks for your kernels there. Make that folder yours, or name another "
                "one: JUPYTER_DATA_DIR=/a/folder, for the JupyterLab too."
            )


def main():
    print(f"The kernel is {install()}")
    for line in [
        *lab.my_copies(),
        f"The first page is {lab.HERE / 'my-work' / lab.FIRST_PAGE}",
        "A notebook that you had begun before keeps its kernel: choose this one there "
        f'(Kernel, Change Kernel), "{specification()["display_name"]}".',
        "Terminals of the Hub need this line, for example in ~/.bashrc:",
        f'export VENV="{sys.prefix}" PATH="{PROGRAMS}:$PATH" PYTHONPATH="{CLONE}" '
        f'JUPYTER_SERVER_ROOT="{lab.HERE}"',
    ]:
        print(line)


if __name__ == "__main__":
    main()
