"""The package's commands.

`ddprun train.py`, or `python -m ddp_common run train.py`, runs a script on a cluster as torchrun
would. `python -m ddp_common doctor` looks at a cluster before a training needs it.
"""

import signal
import sys
from typing import NoReturn

import click

from ddp_common.errors import Error, RunStopped

CLUSTER = "profile in clusters/, a .yaml file, or the address of a scheduler  [default: local]"


@click.group(context_settings={"show_default": True})
def main():
    """Training with DistributedDataParallel on Dask clusters."""


@main.command()
@click.option("--cluster", envvar="CLUSTER", help=CLUSTER)
@click.option("--workers", envvar="WORKERS", help="number of workers to look at  [default: 2]")
def doctor(cluster, workers):
    """Check what usually goes wrong on a cluster, and say what to do."""
    from ddp_common.clusters.doctor import examine  # not above: `--help` is quick

    try:
        is_ready = examine(cluster, workers, click.echo)
    except Error as error:
        sys.exit(f"\nError: {error}")
    sys.exit(not is_ready)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers",
    "--nproc-per-node",
    "--nproc_per_node",
    envvar="WORKERS",
    help="number of ranks  [default: physical cores, 2 to 4, or GPUs; or those of the profile]",
)
@click.option("--cluster", envvar="CLUSTER", help=CLUSTER)
@click.option(
    "--restarts",
    "--max-restarts",
    "--max_restarts",
    envvar="RESTARTS",
    default="0",
    help="after a failure, start again, so many times",
)
@click.option("--standalone", is_flag=True, help="for who has typed a line of torchrun: no effect")
@click.option("-m", "--module", is_flag=True, help="the script is the name of a module")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(workers, cluster, restarts, standalone, module, script, arguments):
    """Run a script on a cluster, on each rank, as torchrun would: its lines stay as they are.

    Each rank has torchrun's environment, and the folder and the arguments of this command. Its
    lines, and those of the other ranks, are in log.txt in the folder of the run. It exits with 1
    where a rank has failed, with 130 after Ctrl-C, with 143 after SIGTERM.
    """
    from ddp_common.client.launch import launch
    from ddp_common.clusters.connect import connect
    from ddp_common.ranks import scripts
    from ddp_common.values import whole_number

    signal.signal(signal.SIGTERM, _leave)
    try:
        program = scripts.script(script, *arguments, module=module)
        tries = whole_number("restarts", restarts, least=0)
        with connect(cluster, workers) as client:
            launch(client, program, restarts=tries, run_name=program.__name__)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except Error as error:
        sys.exit(f"\nError: {error}")


def _leave(number: int, frame: object) -> NoReturn:
    """What the `with` blocks hold is ended."""
    sys.exit(128 + number)


def ddprun():
    """`ddprun`, as it is installed."""
    run(prog_name="ddprun")


if __name__ == "__main__":
    main()
