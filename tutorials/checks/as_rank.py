"""Runs a student's script as a rank of torchrun: `python -m tutorials.checks.as_rank SCRIPT …`.

torch 2.13 may hang or abort where the last reference to a gloo group goes right after a backward.
A script that is right would not end. So the group is kept, and the process ends without taking
the script's objects apart.
"""

import functools
import os
import runpy
import sys
import traceback

import torch.distributed as dist


def keep_process_groups() -> None:
    """Keep a reference to every process group that the script makes, also if it destroys it."""
    make, kept = dist.init_process_group, []

    @functools.wraps(make)
    def init_process_group(*arguments, **named):
        make(*arguments, **named)
        kept.append(dist.group.WORLD)

    dist.init_process_group = init_process_group


def run(script: str, arguments: list[str]) -> int:
    """Run the script as its own program would be run. Returns its exit code."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        inside = error.__traceback__
        while inside is not None and inside.tb_frame.f_code.co_filename != script:
            inside = inside.tb_next
        traceback.print_exception(type(error), error, inside)
        return 1
    return 0


if __name__ == "__main__":
    keep_process_groups()
    code = run(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)
