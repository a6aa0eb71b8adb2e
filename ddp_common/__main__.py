"""`python -m ddp_common doctor`: look at a cluster before a training needs it."""

import sys

import click

from ddp_common.errors import Error


@click.group(context_settings={"show_default": True})
def main():
    """Training with DistributedDataParallel on Dask clusters."""


@main.command()
@click.option(
    "--cluster",
    envvar="CLUSTER",
    help="profile in clusters/, a .yaml file, or the address of a scheduler  [default: local]",
)
@click.option("--workers", envvar="WORKERS", help="number of workers to look at  [default: 2]")
def doctor(cluster, workers):
    """Check what usually goes wrong on a cluster, and say what to do."""
    from ddp_common.clusters.doctor import examine  # not above: `--help` is quick

    try:
        is_ready = examine(cluster, workers, click.echo)
    except Error as error:
        sys.exit(f"\nError: {error}")
    sys.exit(not is_ready)


if __name__ == "__main__":
    main()
