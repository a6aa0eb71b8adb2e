"""Images per second from object storage: a real S3 server on this machine that is slow to answer.

The best client knows the names, does not sign, keeps its connections open and only fetches:
nothing is decoded. The server takes a good part of a core itself.
"""

import contextlib
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
from measuring import compared, take_turns
from PIL import Image
from torch.utils.data import DataLoader

import ddp_common as ddp

SIZE, BATCH, WORKERS = 64, 64, 2
CONNECTIONS = (16, 32)  # of the best client; the better one counts
SERVER = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

application = DomainDispatcherApplication(create_backend_app)


def slow(environment, start_response):
    time.sleep(0.020)
    return application(environment, start_response)


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as those of S3 do

    def log_request(self, *_):
        return None


server = make_server("127.0.0.1", 0, slow, threaded=True, request_handler=Quiet)
print(server.port, flush=True)
server.serve_forever()
"""


def measure(quick):
    with tempfile.TemporaryDirectory() as folder, slow_s3() as host:
        photographs = write_photographs(Path(folder) / "photographs", 100 if quick else 500)
        # the best client does not sign: anybody may read
        storage = fsspec.filesystem("s3", s3_additional_kwargs={"ACL": "public-read"})
        storage.mkdir("bench")
        storage.put(str(photographs), "bench/", recursive=True)
        paths = storage.find("bench/photographs")
        ours = ddp.ImageFolder("s3://bench/photographs", SIZE)
        assert len(ours) == len(paths)
        speeds = take_turns(
            lambda: rate(ours),
            lambda: max(fetched(host, paths, connections) for connections in CONNECTIONS),
            turns=2 if quick else 4,
        )
    what = "images per second from S3, 20 ms away, 2 loader workers"
    yield compared(what, *speeds, beside="the best client, only fetching", at_least=0.5)


@contextlib.contextmanager
def slow_s3():
    """An S3 server, a process of its own, and the variables by which clients find it.

    It adds 20 ms to each request. Yields its host and port.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        host = f"127.0.0.1:{server.stdout.readline().strip()}"
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://{host}",
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1",
        )
        try:
            yield host
        finally:
            server.terminate()


def write_photographs(folder, count):
    """JPEG files of 256 x 256 pixels in two classes; they compress as photographs do."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class {number % 2}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=92)
    return folder


def rate(dataset):
    """Images per second in the second epoch: in the first one the loader workers start."""
    loader = DataLoader(dataset, BATCH, num_workers=WORKERS, persistent_workers=True)
    for _ in range(2):
        began = time.perf_counter()
        seen = sum(len(images) for images, _ in loader)
        seconds = time.perf_counter() - began
    return seen / seconds


def fetched(host, paths, connections):
    """Objects per second over so many connections that stay open."""
    own = threading.local()

    def fetch(path):
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection(host)
        own.connection.request("GET", f"/{path.replace(' ', '%20')}")
        answer = own.connection.getresponse()
        content = answer.read()
        assert answer.status == 200, (answer.status, content[:200])

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(fetch, paths))
    return len(paths) / (time.perf_counter() - began)
