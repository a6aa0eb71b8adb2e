"""Call a peer's `main` from a program, as a notebook would, and write down what the caller learns.

    python call.py with_ray 2        # two launches, one after the other; writes called.json

Every launch after the first has a folder of its own, so that it finds no checkpoint. What the
launches share, a Dask cluster or Ray's session, stays up between them.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path

import task

OBJECT_STORE = 100 * 2**20  # bytes of shared memory, of which this training needs none


@contextlib.contextmanager
def session(name):
    """What a program has once for all its launches; gives the arguments of `main`."""
    if name == "with_ddp_common":
        import ddp_common as ddp

        with ddp.connect("local", workers=task.RANKS) as client:
            yield [client]
    elif name == "with_ray":
        import ray

        # As many processors as ranks, or Ray would wait for them. The rest keeps it small.
        ray.init(
            num_cpus=task.RANKS,
            object_store_memory=OBJECT_STORE,
            _temp_dir=os.environ["PEERS_RAY"],
        )
        try:
            yield []
        finally:
            ray.shutdown()
    else:
        yield []


def messages(error):
    """What an exception says, and what those say that it was raised from."""
    said = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__
    return "\n".join(said)


def called(function, arguments):
    """When a call began and ended (s since 1970), and what it raised."""
    launch = {"began": time.time(), "error": None}
    try:
        function(*arguments)
    except BaseException as error:
        launch["ended"] = time.time()
        launch["error"] = {"type": type(error).__name__, "text": messages(error)}
    launch.setdefault("ended", time.time())
    return launch


def main(name, launches):
    home = Path.cwd()
    script = importlib.import_module(name)
    said = []
    with session(name) as arguments:
        for number in range(launches):
            if number > 0:
                folder = home / f"launch-{number}"
                folder.mkdir()
                os.chdir(folder)
            said.append(called(script.main, arguments))
            (home / "called.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
