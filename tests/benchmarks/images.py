"""Folders of images, and what two ranks make of them, measured.

    python tests/benchmarks/images.py [--output FILE.json] [--only NAME]

| name       | what                                                                             |
|------------|----------------------------------------------------------------------------------|
| s3         | images/s from object storage (moto, 20 ms added to each request): `ImageFolder`  |
|            | as a share of what the server hands out to the best client that we could write,  |
|            | and against one boto3 request per item; 2 loader workers, their second epoch     |
| local      | images/s from a folder: `ImageFolder`, undecoded and kept, against torchvision's |
|            | with its `DataLoader`; the better of 0 and 2 workers                             |
| scaling    | ResNet18 on 64 x 64 pixels, global batch 64: two ranks with DDP against two that |
|            | do not average their gradients, and both against one; a core each                |
| evaluation | the same network judges 1,024 images with `EvalSampler`: two ranks against one   |
"""

import contextlib
import http.client
import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measuring
import psutil
import torch
from measuring import compared, single
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp
from ddp_common.data import datasets

REPEATS, SIZE, BATCH, WORKERS = 3, 64, 64, 2
CONNECTIONS = (8, 16, 32, 64)  # of the best client: which number is best, the run says
SERVER = """
import time
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


def photographs(folder, of_each=40):
    """A folder of JPEG files of 256 x 256 pixels in ten classes, with `of_each` in each.

    They are the drawn dogs, enlarged, so that decoding costs what it usually does.
    """
    source = Path(datasets.fetch("dogs").path)
    for label in sorted(path for path in source.iterdir() if path.is_dir()):
        (folder / label.name).mkdir(parents=True)
        for path in sorted(label.iterdir())[:of_each]:
            drawn = Image.open(path).convert("RGB")
            photograph = drawn.resize((256, 256), Image.Resampling.BICUBIC)
            photograph.save(folder / label.name / f"{path.stem}.jpg", quality=92)
    return folder


class OneRequestPerItem(Dataset):
    """What a data set on S3 usually is: `__getitem__` asks for one object, and waits."""

    def __init__(self, bucket, prefix):
        self.bucket, self.client = bucket, None
        pages = self._own().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        self.keys = sorted(each["Key"] for page in pages for each in page["Contents"])
        self.client = None

    def _own(self):
        import boto3

        self.client = self.client or boto3.client("s3")
        return self.client

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        content = self._own().get_object(Bucket=self.bucket, Key=self.keys[index])["Body"].read()
        image = ImageOps.fit(Image.open(io.BytesIO(content)).convert("RGB"), (SIZE, SIZE))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.reshape(SIZE, SIZE, 3).permute(2, 0, 1), 0


def rate(dataset, workers):
    """Images per second of an epoch of batches: the second, for which all workers are there.

    Starting them takes as long for 400 images as for a million.
    """
    loader = DataLoader(
        dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
    )
    for _ in range(2):
        began = time.perf_counter()
        seen = sum(len(images) for images, _ in loader)
        seconds = time.perf_counter() - began
    return seen / seconds


@contextlib.contextmanager
def slow_s3():
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        port = server.stdout.readline().strip()
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1",
        )
        try:
            yield psutil.Process(server.pid)
        finally:
            server.terminate()


def handed_out(keys, connections):
    """Objects per second that the server hands out to so many connections that stay open.

    Nothing is signed, decoded or kept: no reader of images can be faster.
    """
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    own = threading.local()

    def read(key):
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection(host)
        own.connection.request("GET", f"/bench/{key}")
        answer = own.connection.getresponse()
        content = answer.read()
        assert answer.status == 200, (answer.status, content[:200])

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(read, keys))
    return len(keys) / (time.perf_counter() - began)


def measure_s3():
    import fsspec

    with tempfile.TemporaryDirectory() as folder, slow_s3() as server:
        # The best client does not sign: anybody may read
        filesystem = fsspec.filesystem("s3", s3_additional_kwargs={"ACL": "public-read"})
        filesystem.mkdir("bench")
        # so many that it does not matter how the last batches of an epoch come out
        dogs = photographs(Path(folder) / "dogs", of_each=150)
        filesystem.put(str(dogs), "bench/", recursive=True)
        ours = ddp.ImageFolder("s3://bench/dogs", SIZE)
        theirs = OneRequestPerItem("bench", "dogs/")
        assert len(ours) == len(theirs) == 1_500
        before = sum(server.cpu_times()[:2])
        found = [
            (rate(ours, WORKERS), rate(theirs, WORKERS), rate(ours, 0)) for _ in range(REPEATS)
        ]
        work = (sum(server.cpu_times()[:2]) - before) / (3 * 2 * REPEATS * len(ours))
        best = {connections: [] for connections in CONNECTIONS}
        again = []
        for _ in range(REPEATS):  # in turns: what else the machine does disturbs both
            for connections, speeds in best.items():
                speeds.append(handed_out(theirs.keys, connections))
            again.append(rate(ours, WORKERS))
    batch, item, alone = zip(*found)
    fastest = max(best, key=lambda connections: statistics.median(best[connections]))
    return [
        compared(
            "s3",
            "ImageFolder, 2 loader workers, images/s",
            again,
            best[fastest],
            alternative=f"the server, to {fastest} connections that only fetch",
            at_least=0.4,
        ),
        compared(
            "s3",
            "ImageFolder, 2 loader workers, images/s",
            batch,
            item,
            alternative="a boto3 request per item",
        ),
        single("s3", "ImageFolder without workers, images/s", statistics.median(alone)),
        single("s3", "the server takes for a request, ms of a core", work * 1e3),
    ]


def measure_local():
    import torchvision
    from torchvision.transforms import v2

    with tempfile.TemporaryDirectory() as folder:
        folder = photographs(Path(folder) / "dogs")
        transform = v2.Compose([v2.Resize(SIZE), v2.CenterCrop(SIZE), v2.PILToTensor()])
        theirs = torchvision.datasets.ImageFolder(folder, transform)
        ours = ddp.ImageFolder(folder, SIZE)
        kept = ddp.ImageFolder(folder, SIZE, cache="memory")
        rate(kept, 0)
        found = [
            [max(rate(dataset, 0), rate(dataset, WORKERS)) for dataset in (ours, kept, theirs)]
            for _ in range(REPEATS)
        ]
    cold, cached, torchvisions = zip(*found)
    alternative = "torchvision's ImageFolder"
    return [
        compared(
            "local",
            "ImageFolder, images/s",
            cold,
            torchvisions,
            alternative=alternative,
            at_least=1.3,
        ),
        compared(
            "local",
            "ImageFolder kept in memory, images/s",
            cached,
            torchvisions,
            alternative=alternative,
            at_least=5,
        ),
    ]


def train(steps, together=True):
    """Seconds that `steps` steps of ResNet18 take on this rank, at a global batch of 64.

    `together`: the ranks average their gradients.
    """
    import torchvision
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=21)
    model = DistributedDataParallel(model) if together else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    share = 64 // ddp.world_size()
    images = torch.rand(share, 3, SIZE, SIZE)
    labels = torch.arange(share) % 21
    for step in range(2 + steps):
        if step == 2:
            began = time.perf_counter()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


def judge(count):
    """Seconds until `count` images are classified and the right ones counted, over all ranks."""
    import torch.distributed as dist
    import torchvision

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=21).eval()
    images = torch.rand(BATCH, 3, SIZE, SIZE)
    if ddp.world_size() > 1:
        dist.barrier()
    began, right = time.perf_counter(), torch.zeros(1)
    with torch.no_grad():
        for indices in ddp.EvalSampler(count, BATCH):
            right += (model(images[: len(indices)]).argmax(1) == 0).sum()
    if ddp.world_size() > 1:
        dist.all_reduce(right)
    return time.perf_counter() - began


def measure_scaling():
    with ddp.connect("local", workers=2) as client:

        def seconds(ranks, **arguments):
            return ddp.launch(client, train, workers=ranks, steps=12, **arguments).result

        seconds(2)
        found = [(seconds(1), seconds(2), seconds(2, together=False)) for _ in range(REPEATS)]
    one, two, apart = zip(*found)
    what = "12 steps of ResNet18, two ranks, s"
    return [
        compared("scaling", what, two, one, alternative="one rank", is_speed_up=True),
        compared(
            "scaling",
            "12 steps, two ranks that do not average, s",
            apart,
            one,
            alternative="one rank",
            is_speed_up=True,
        ),
        compared(
            "scaling",
            what,
            two,
            apart,
            alternative="two ranks that do not average",
            at_least=0.85,
            is_speed_up=True,
        ),
    ]


def measure_evaluation():
    with ddp.connect("local", workers=2) as client:
        ddp.launch(client, ddp.rank)
        pairs = [
            [ddp.launch(client, judge, workers=ranks, count=1_024).result for ranks in (1, 2)]
            for _ in range(REPEATS)
        ]
    one, two = zip(*pairs)
    what = "two ranks judge 1,024 images, s"
    return [compared("evaluation", what, two, one, alternative="one rank", is_speed_up=True)]


MEASURES = {
    "s3": measure_s3,
    "local": measure_local,
    "scaling": measure_scaling,
    "evaluation": measure_evaluation,
}


if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "images")
