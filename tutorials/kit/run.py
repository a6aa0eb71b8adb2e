"""`python -m tutorials run`: a tutorial's job in this process, and what is printed about it.

A tutorial is executed cell by cell as in a notebook, but for the cells tagged as part of the
lesson (proofs, exercises, demonstrations): what is left is the job itself. Relies on the
environment variables, which `cli` has set. Promises: a run that ends early says how to go on.
"""

import math
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from dask_ranks.client import signals
from dask_ranks.clusters.profiles import number_of_workers
from dask_ranks.run.folders import local, new_directory, shown
from dask_ranks.run.job import RunStopped, whole_number
from dask_ranks.run.progress import is_terminal
from dask_ranks.without_dask.launchers import LAUNCHERS, started_by
from dask_ranks.worker.fork_server import import_ahead
from ddp_common.checkpoint_files import newest, step_of
from ddp_common.errors import Error
from tutorials.kit import launchers, parameters
from tutorials.kit.beforehand import check_choices, check_cluster, check_resumable
from tutorials.kit.cells import job_source


def run_tutorial(tutorial: str, path: Path, choices: dict, dry: bool):
    """Train `tutorial`, whose file is `path`.

    `choices` maps options of the command line (cluster, workers, resume, checkpoint, restarts …)
    to their texts, None where there is none. With `dry` the batch job is printed and nothing is
    started.
    """
    cluster = choices["cluster"]
    is_rank = _is_rank(cluster)
    # Else torch prints a stack of C++ for each connection to a store that ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Whoever has started the ranks has checked, and each rank checks its settings again.
    count = None if is_rank else check_choices(path, choices["workers"])
    if dry:
        click.echo(what_would_start(tutorial, choices))
        return
    if is_rank:
        check_resumable(choices["resume"])
    else:
        check_cluster(cluster or "local")
        announce(tutorial, choices, count)
    os.environ.setdefault("DDP_PROGRESS", "bar" if is_terminal(sys.stderr) else "lines")
    if cluster in LAUNCHERS and not is_rank:
        start_launcher(cluster, tutorial, choices)
    else:
        execute(tutorial, path)


def what_would_start(tutorial: str, choices: dict) -> str:
    """A job script, a call, an address, or the command of a launcher."""
    cluster = choices["cluster"] or "local"
    if cluster in LAUNCHERS:
        workers = number_of_workers(choices["workers"] or "auto")
        line = launchers.command(cluster, tutorial, workers, restarts=0)
        return f"# No Dask: {cluster} starts the ranks.\n{shlex.join(line)}"
    from dask_ranks.clusters.connect import describe  # not above: it imports distributed

    return describe(cluster, choices["workers"])


def _is_rank(cluster):
    """Whether this process is a rank that torchrun, srun or the like has started."""
    launcher = started_by()
    return launcher is not None and cluster in (None, launcher)


def announce(tutorial: str, choices: dict, count: int | None):
    """Print at once what is going to happen, and where a run goes on."""

    def say(text):
        if os.environ.get("DDP_PROGRESS") != "off":
            click.echo(text)

    directory = choices["resume"] or choices["checkpoint"]
    if directory:
        say(f"{tutorial}: the run is in {shown(local(directory))}")
        check_resumable(choices["resume"])
        chosen = parameters.chosen
        say(f"{tutorial}: {where_it_goes_on(directory, chosen)}")
        if chosen is not None and chosen.changed:
            changes = [f"{name}={new} (was {was})" for name, (was, new) in chosen.changed.items()]
            say(f"{tutorial}: changed since then: {', '.join(changes)}")
    cluster = choices["cluster"] or "local"
    workers = "1 worker" if count == 1 else f"{count or 'the'} workers"
    if cluster == "local":
        say(f"{tutorial}: starting {workers} on this machine")
    elif "://" in cluster:
        say(f"{tutorial}: connecting to the workers of {cluster}")
    else:
        say(f"{tutorial}: starting {workers} with CLUSTER={cluster}")


def where_it_goes_on(directory: str, chosen: parameters.Chosen | None) -> str:
    """From which step, and in which epoch, a run goes on; or that it begins."""
    path = local(directory)
    checkpoint = newest(path / "checkpoints")
    if checkpoint is None:
        return "it begins there: no checkpoint yet"
    step = step_of(checkpoint)
    words = f"it goes on from step {step} ({checkpoint.name})"
    if parameters.has_finished(path):
        words += ", where its training had finished"
        if chosen is not None and "epochs" in chosen.values and not chosen.changed:
            epochs = chosen.values["epochs"]
            words += f'; to train more, give for example SET="epochs={2 * epochs}"'
    return words


def start_launcher(launcher: str, tutorial: str, choices: dict):
    """Let torchrun or srun start the ranks, each of which is this command again."""
    if not choices["resume"] and not choices["checkpoint"]:
        os.environ["CHECKPOINT"] = str(new_directory(tutorial))  # a restarted rank must find it
    restarts = whole_number("RESTARTS", choices["restarts"] or 0, least=0)
    try:
        workers = number_of_workers(choices["workers"] or "auto")
        launchers.start_ranks(launcher, tutorial, workers, restarts)
    except (Error, SystemExit) as end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would interrupt the exit
        hint = resume_hint(tutorial, os.environ.get("CHECKPOINT") or choices["resume"])
        click.echo(f"Stopped.{hint}" if isinstance(end, SystemExit) else hint.lstrip(), err=True)
        raise


def execute(tutorial: str, path: Path):
    """Run the job of a tutorial in this process.

    SIGTERM, which a batch system sends, is passed on to the ranks if any are training. Raises what
    the job raises; an `Error` says how to go on.
    """
    signal.signal(signal.SIGTERM, signals.pass_on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note_interrupt)
        sys.unraisablehook = print_unless_noted
    os.environ.setdefault("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    began = time.monotonic()
    try:
        source = job_source(path.read_text())
        import_ahead(re.findall(r"^(?:import|from) ([\w.]+)", source, flags=re.M))
        exec(compile(source, path, "exec"), namespace)
    except KeyboardInterrupt as interrupt:
        hint = resume_hint(tutorial, getattr(interrupt, "directory", None))
        click.echo(f"\nStopped{when_it_was(namespace)}.{hint}", err=True)
        sys.exit(130)
    except Error as error:
        is_said = isinstance(error, RunStopped) and "DDP_LAUNCHER" in os.environ  # by its parent
        hint = "" if is_said else resume_hint(tutorial, getattr(error, "directory", None))
        if "\n" in str(error):  # its last line is no sentence, but the path of a log
            hint = f"\n{hint.lstrip()}" if hint else ""
        error.args = (f"{error}{hint}",)
        raise
    except Exception as error:
        if diverged := where_it_diverged(namespace.get("run")):
            raise Error(
                f"{diverged} So this failed afterwards: {type(error).__name__}: {error}"
            ) from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what closes now is not left half closed
        client = namespace.get("client")
        if client is not None:
            client.__exit__(*sys.exc_info())
        # torchrun sends it to the peers of a rank that failed: while Python ends, a handler that
        # raises would print a traceback.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    seconds = time.monotonic() - began
    words = closing_words(namespace["run"]) if "run" in namespace else ""
    click.echo(f"\nDone in {seconds:.0f} s. {words}")


def note_interrupt(number, frame):
    """Also before a launch, which then hears of it. A second one, while the job ends, is idle."""
    signals.interrupted = True
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    if error is None:
        raise KeyboardInterrupt


def print_unless_noted(unraisable):
    """Python loses a Ctrl-C that comes in a callback: `note_interrupt` has heard it."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def when_it_was(namespace: dict) -> str:
    """In which part of the job Ctrl-C came, as far as the launch itself does not say."""
    if "run" in namespace:
        return f" after training: the run is whole, in {shown(namespace['run'].directory)}"
    return ""


def where_it_diverged(run) -> str | None:
    """A sentence if the last loss that `run` (a `Run` or None) reported is not finite, or None."""
    losses = [
        (record.get("step"), record["loss"])
        for record in getattr(run, "records", ())
        if isinstance(record.get("loss"), float)
    ]
    if not losses or math.isfinite(losses[-1][1]):
        return None
    step, loss = next((step, loss) for step, loss in losses if not math.isfinite(loss))
    return (
        f"Training diverged: the loss is {loss} from step {step} on. "
        "Lower the learning rate, and train again."
    )


def resume_hint(tutorial: str, directory: Path | str | None) -> str:
    """How to go on with the run in `directory`, to be put after a message; '' if there is none."""
    if directory is None:
        return ""
    if not list(Path(directory, "checkpoints").glob("*.pt")):
        return f" There is no checkpoint yet; what there is lies in {shown(directory)}."
    in_a_job = {"SLURM_JOB_ID", "PBS_JOBID"} & os.environ.keys()
    if in_a_job and os.environ.get("CHECKPOINT") and "DDP_LAUNCHER" not in os.environ:
        return " The batch script, submitted again, goes on from the newest checkpoint."
    words = f"make run TUTORIAL={tutorial} RESUME={shlex.quote(shown(directory))}"
    try:
        command = parameters.config_of(directory).get("command", {})
    except Error:  # why the run ended matters more
        command = {}
    for name, value in command.items():
        words += f" {name}={shlex.quote(value)}"
    return f" Go on from the newest checkpoint with:\n  {words}"


def closing_words(run) -> str:
    """Where a run (a `Run`) lies, and what went wrong beside training.

    Training has finished, so that is no failure, but a person must know.
    """
    words = listing(run.directory)
    if run.problems:
        words += "\n\nTraining finished, but not without problems:"
        for problem in run.problems:
            words += f"\n  - {problem}"
    return words


def listing(directory: Path) -> str:
    """The place of a run directory and what is in it."""
    paths = Path(directory).glob("[!.]*")
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths]
    return f"Run directory: {shown(directory)}\n  {', '.join(sorted(names))}"
