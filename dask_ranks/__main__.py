"""The package's commands.

`ddprun train.py`, or `python -m dask_ranks run train.py`, runs a script on a cluster as torchrun
would. `python -m dask_ranks doctor` looks at a cluster before a training needs it.
"""

import signal
import sys

import click

from ddp_common.errors import Error

# Seconds without progress that a script may take: torch's own limit for a collective of gloo
STALL_TIMEOUT = 1800.0
CLUSTER = "profile in clusters/, a .yaml file, or the address of a scheduler  [default: local]"


@click.group(context_settings={"show_default": True})
def main():
    """Training with DistributedDataParallel on Dask clusters."""


@main.command()
@click.option("--cluster", envvar="CLUSTER", help=CLUSTER)
@click.option("--workers", envvar="WORKERS", help="number of workers to look at  [default: 2]")
def doctor(cluster, workers):
    """Check what usually goes wrong on a cluster, and say what to do."""
    from dask_ranks.clusters.doctor import examine  # not above: `--help` is quick

    try:
        is_ready = examine(cluster, workers, click.echo)
    except Error as error:
        sys.exit(f"\nError: {error}")
    sys.exit(not is_ready)


NO_EFFECT = """
    node-rank master-addr master-port local-addr rdzv-backend rdzv-endpoint rdzv-id rdzv-conf
    log-dir redirects tee local-ranks-filter role start-method monitor-interval
"""
FLAGS = {
    "standalone": "",
    "no-python": "Write a Python script that calls the program with subprocess.run, and name it.",
    "run-path": "Leave it out: the script runs inside of a process that is there in any case.",
}


def of_torchrun(command):
    """Give `command` torchrun's options that mean nothing here, and those that are refused."""
    for name in (*NO_EFFECT.split(), *FLAGS):
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        if name in ("redirects", "tee"):
            spellings.add(f"-{name[0]}")
        command = click.option(
            *spellings, is_flag=name in FLAGS, callback=refuse, expose_value=False, hidden=True
        )(command)
    return command


def refuse(context, option, is_given):
    advice = FLAGS.get(option.name.replace("_", "-"))
    if is_given and advice:
        raise click.UsageError(f"ddprun has no --{option.name}. {advice}")


@main.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@click.option(
    "--workers",
    "--nproc-per-node",
    "--nproc_per_node",
    envvar="WORKERS",
    help="number of ranks  [default: physical cores, 2 to 4, or GPUs; or those of the profile]",
)
@click.option("--nnodes", default="1", help="1: --workers counts the ranks of all hosts")
@click.option("--cluster", envvar="CLUSTER", help=CLUSTER)
@click.option(
    "--restarts",
    "--max-restarts",
    "--max_restarts",
    envvar="RESTARTS",
    default="0",
    help="after a failure, start again, so many times",
)
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=0),
    default=STALL_TIMEOUT,
    help="seconds without progress after which the ranks are ended; 0: never",
)
@click.option("-m", "--module", is_flag=True, help="the script is the name of a module")
@of_torchrun
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(workers, nnodes, cluster, restarts, stall_timeout, module, script, arguments):
    """Run a script on a cluster, on each rank, as torchrun would: its lines stay as they are.

    Each rank has torchrun's environment, and the folder and the arguments of this command. Its
    lines, and those of the other ranks, are in log.txt in the folder of the run. It exits with 1
    where a rank has failed, with 130 after Ctrl-C, with 143 after SIGTERM. Of torchrun's options,
    those on rendezvous, logs and the start of processes are taken and have no effect.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, and without a traceback
    from dask_ranks.client import signals
    from dask_ranks.client.launch import launch
    from dask_ranks.clusters.connect import connect
    from dask_ranks.rank import scripts
    from dask_ranks.run.job import whole_number

    signal.signal(signal.SIGTERM, signals.pass_on_sigterm)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if nnodes not in ("1", "1:1"):
            raise Error(
                f"--nnodes={nnodes}: ddprun counts the ranks of all hosts. Write --workers with "
                "their number, and --cluster with a profile that starts workers on several hosts."
            )
        program = scripts.script(script, *arguments, module=module)
        tries = whole_number("--restarts", restarts, least=0)
        count = None if workers in ("auto", "gpu", "cpu") else workers
        with connect(cluster, count) as client:
            launch(
                client,
                program,
                restarts=tries,
                stall_timeout=stall_timeout or None,
                run_name=program.__name__,
            )
    except KeyboardInterrupt as interrupt:
        folder = getattr(interrupt, "directory", None)
        if folder is not None:
            print(f"\nStopped. The log: {folder / 'log.txt'}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Error as error:
        print(f"\nError: {error}", file=sys.stderr)
        if not signals.stop_requested:
            sys.exit(1)
    if signals.stop_requested:
        sys.exit(128 + signal.SIGTERM)


def ddprun():
    """`ddprun`, as it is installed."""
    run(prog_name="ddprun")


if __name__ == "__main__":
    main()
