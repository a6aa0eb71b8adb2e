"""An S3 server on this machine, for the tests."""

import subprocess
import sys
from contextlib import contextmanager

S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server(log_path):
    """An S3 server (moto), a process of its own, which ends with the block. Yields its URL.

    It is ended, not asked to end: a closed standard input is seen only once all who have it
    have closed it, and a worker that a loader has forked meanwhile has it too. The standard
    input is there so that the server ends also with a test process that is killed.
    """
    with (
        open(log_path, "w") as log,
        subprocess.Popen(
            [sys.executable, "-c", S3_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            # it introduces itself first
            line = next(line for line in server.stdout if line.startswith("127.0.0.1"))
            yield "http://{}:{}".format(*line.split())
        finally:
            server.kill()
