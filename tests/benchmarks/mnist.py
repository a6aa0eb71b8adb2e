"""What the mnist tutorial shows, measured: ways to average gradients, launchers, the pipeline.

    python tests/benchmarks/mnist.py [--output FILE.json] [--only NAME]

| name      | what                                                                              |
|-----------|-----------------------------------------------------------------------------------|
| averaging | a training step of two ranks: an all_reduce per gradient by hand, one for all in  |
|           | a bucket, DDP (ms)                                                                |
| launchers | from the command to both ranks' first backward: Dask (warm), torchrun, srun and   |
|           | sbatch (a real Slurm, where installed)                                            |
| pipeline  | one epoch of batches of 128: digits as one uint8 tensor, against torchvision's    |
|           | MNIST with four loader workers                                                    |
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import measuring
from measuring import REPOSITORY, compared, single, take_turns, timed

import ddp_common as ddp

RANKS = Path(__file__).with_name("ranks.py")
REPEATS = 5
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "hpc")]


def averaging(steps=200):
    """Median seconds of a step for each way, on this rank.

    It is the autoencoder of the tutorial, 64 digits on each of two ranks.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def one_by_one(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def in_a_bucket(model):
        gradients = [parameter.grad for parameter in model.parameters()]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket)
        bucket /= dist.get_world_size()
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, bucket.split(sizes)):
            gradient.copy_(part.view_as(gradient))

    torch.set_num_threads(1)
    digits = torch.rand(64, 784)
    seconds = {"one by one": [], "bucket": [], "DDP": []}
    by_hand = {"one by one": one_by_one, "bucket": in_a_bucket}
    models = {}
    for name in seconds:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(784, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 784),
        )
        model = DistributedDataParallel(network) if name == "DDP" else network
        average = by_hand.get(name, lambda model: None)
        models[name] = (model, torch.optim.Adam(model.parameters()), average)
    for step in range(20 + steps):
        for name, (model, optimizer, average) in models.items():
            dist.barrier()
            began = time.perf_counter()
            loss = nn.functional.mse_loss(model(digits), digits)
            optimizer.zero_grad()
            loss.backward()
            average(model)
            optimizer.step()
            if step >= 20:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_averaging():
    with ddp.connect("local", workers=2) as client:
        found = ddp.launch(client, averaging, workers=2).result
    return [
        single("averaging", f"a step, {name}, ms", seconds * 1e3)
        for name, seconds in found.items()
    ] + [
        single("averaging", f"{name}, as a multiple of DDP's step", found[name] / found["DDP"])
        for name in ("one by one", "bucket")
    ]


def measure_launchers():
    import ranks
    from slurm_here import running_slurm, why_not

    results = []

    def seconds(start):
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            start(folder)
            left = [(Path(folder) / f"{rank}.json").read_text() for rank in range(2)]
            return max(json.loads(text)["finished"] for text in left) - began

    def measure(name, start):
        median = statistics.median(seconds(start) for _ in range(REPEATS))
        results.append(single("launchers", f"{name}, until both ranks' first backward, s", median))

    def with_torchrun(folder):
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
        command = [sys.executable, *torchrun, RANKS, "first_backward", folder]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    with ddp.connect("local", workers=2) as client:

        def with_dask(folder):
            ddp.launch(client, ranks.first_backward, directory=f"{folder}/run", folder=folder)

        ddp.launch(client, ddp.rank)
        measure("Dask, warm", with_dask)
    measure("torchrun", with_torchrun)
    if why_not():
        return [*results, single("launchers", "srun and sbatch", f"not measured: {why_not()}")]
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        with running_slurm(Path(place) / "slurm") as variables:
            environment = {**os.environ, **variables}
            command = f"srun --ntasks=2 {sys.executable} {RANKS} first_backward"

            def with_srun(folder):
                subprocess.run([*command.split(), folder], check=True, env=environment)

            def with_sbatch(folder):
                sbatch = ["sbatch", "--wait", "--ntasks=2", f"--output={place}/log"]
                subprocess.run(
                    [*sbatch, f"--wrap={command} {folder}"],
                    check=True,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                )

            measure("srun", with_srun)
            measure("sbatch", with_sbatch)
    return results


def measure_pipeline():
    import torchvision
    from torch.utils.data import DataLoader, Dataset

    from ddp_common.data.datasets import fetch, read_idx

    folder = fetch("mnist").path
    images = read_idx(folder / "digits-images-idx3-ubyte.gz")
    labels = read_idx(folder / "digits-labels-idx1-ubyte.gz")

    class Digits(Dataset):
        def __len__(self):
            return len(images)

        def __getitems__(self, indices):
            return images[indices].float() / 255, labels[indices]

    def ours():
        sampler = ddp.ElasticSampler(len(images), 128)
        loader = DataLoader(Digits(), batch_sampler=sampler, collate_fn=lambda batch: batch)
        return sum(len(digits) for digits, _ in loader)

    with tempfile.TemporaryDirectory() as root:
        raw = Path(root) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            for kind, magic, tensor in (
                ("images-idx3", b"\0\0\x08\x03", images),
                ("labels-idx1", b"\0\0\x08\x01", labels),
            ):
                header = magic + b"".join(size.to_bytes(4, "big") for size in tensor.shape)
                (raw / f"{part}-{kind}-ubyte").write_bytes(header + tensor.numpy().tobytes())
        theirs = torchvision.datasets.MNIST(
            root, train=True, transform=torchvision.transforms.ToTensor()
        )

        # more workers than cores: that is what is measured
        warnings.filterwarnings("ignore", message="This DataLoader will create")

        def original():
            loader = DataLoader(theirs, batch_size=128, shuffle=True, num_workers=4)
            return sum(len(digits) for digits, _ in loader)

        assert ours() == original() == len(images)
        seconds = take_turns(lambda: timed(ours), lambda: timed(original), turns=3)
    return [
        compared(
            "pipeline",
            f"an epoch of {len(images):,} digits as one uint8 tensor, s",
            *seconds,
            alternative="torchvision, 4 loader workers",
            at_least=10,
            is_speed_up=True,
        )
    ]


MEASURES = {
    "averaging": measure_averaging,
    "launchers": measure_launchers,
    "pipeline": measure_pipeline,
}


if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "mnist")
