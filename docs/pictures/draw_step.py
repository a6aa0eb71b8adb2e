"""Records a training step of two ranks and draws it: writes a-step.png.

    python docs/pictures/draw_step.py

Gradients are averaged in three ways, and in the fourth row rank 1 is late. The network is slow on
purpose: each message waits 2 ms, and 3 ms more for each MiB. Waiting needs no processor, so that
computing and sending overlap on a CPU too. In each row it is the quickest of many steps, which
other programs have disturbed least: run this on a machine that does nothing else.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import gpt_steps

FILE = Path(__file__).with_name("a-step.png")
STEPS, WARM_UP = 40, 2  # DDP lays out its buckets anew after the first step
ROWS = {
    "1. One by one: a message for each gradient, after backward": {"way": "one by one"},
    "2. One bucket: one message, after backward": {"way": "one bucket"},
    "3. DDP: a message for each small bucket, during backward": {"way": "DDP"},
    "4. DDP, rank 1 is late: rank 0 waits in its first averaging": {"way": "DDP", "late": 0.05},
}
BARS = {  # they look as those of the lesson gpt
    "late": gpt_steps.BARS["waiting"],
    "forward": gpt_steps.BARS["forward"],
    "backward": gpt_steps.BARS["backward"],
    "averaging": gpt_steps.BARS["sending"],
}


class SlowNetwork:
    """Averages tensors over the ranks, one after the other, and notes when."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)
        self.marks = []  # (what, begin, end), in seconds

    def send(self, tensor):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        time.sleep(0.002 + 0.003 * tensor.nbytes / 2**20)
        self.marks.append(("averaging", began, time.perf_counter()))
        return tensor

    def send_later(self, _, bucket):
        """What DDP calls with each full bucket: a communication hook."""
        future = torch.futures.Future()
        self.thread.submit(lambda: future.set_result(self.send(bucket.buffer())))
        return future

    def note_ready(self, parameter):
        now = time.perf_counter()
        self.marks.append(("gradient ready", now, now))


def record_step(way, late=0.0):
    """The marks of the quickest step: a list for each rank."""
    torch.set_num_threads(1)
    network = SlowNetwork()
    model = nn.Sequential(*[nn.Linear(784, 784) for _ in range(6)])
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(network.note_ready)
    if way == "DDP":
        model = DDP(model, bucket_cap_mb=2)
        model.register_comm_hook(None, network.send_later)
    steps = []
    for _ in range(WARM_UP + STEPS):
        model.zero_grad()
        network.marks = []
        dist.barrier()
        times = [time.perf_counter()]
        if late and dist.get_rank() == 1:
            time.sleep(late)
            times.append(time.perf_counter())
        loss = model(torch.rand(256, 784)).square().mean()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        if way == "one by one":
            for parameter in parameters:
                network.send(parameter.grad)
        if way == "one bucket":
            network.send(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        names = ["late", "forward", "backward"][-len(times) + 1 :]
        steps.append([*zip(names, times, times[1:]), *network.marks])
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, steps[WARM_UP:])
    return min(zip(*everyones), key=seconds_of)


def seconds_of(ranks):
    """From the first begin to the last end of a step, over all ranks."""
    marks = [mark for of_rank in ranks for mark in of_rank]
    return max(end for *_, end in marks) - min(begin for _, begin, _ in marks)


def draw(axes, title, ranks):
    """For each rank a lane of computing, and below it one of averaging."""
    start = min(begin for marks in ranks for _, begin, _ in marks)
    for rank, marks in enumerate(ranks):
        for what, begin, end in marks:
            left, width = 1_000 * (begin - start), 1_000 * (end - begin)
            lane = rank + (0.2 if what == "averaging" else -0.2)
            if what == "gradient ready":
                axes.plot(left, lane, "|", color="black", markersize=9)
            else:
                axes.barh(lane, width, 0.36, left, **BARS[what])
    axes.set(yticks=[0, 1], yticklabels=["rank 0", "rank 1"], ylim=(1.5, -0.5), xlim=0)
    axes.set_title(title, loc="left", fontsize=10)


def main():
    with ddp.connect("local", workers=2) as client:
        recorded = {
            title: ddp.launch(client, record_step, **row, workers=2, directory=False).result
            for title, row in ROWS.items()
        }
    figure, rows = plt.subplots(4, sharex=True, figsize=(8, 6), layout="constrained")
    for axes, (title, ranks) in zip(rows, recorded.items()):
        finding = f"{title}. The step lasts {1_000 * seconds_of(ranks):.0f} ms"
        draw(axes, finding, ranks)
        print(finding)
    bars = [plt.Rectangle((0, 0), 1, 1, **look) for look in BARS.values()]
    ticks = plt.Line2D([], [], color="black", marker="|", linestyle="none", markersize=9)
    names = [*BARS, "gradient ready"]
    figure.legend([*bars, ticks], names, ncols=5, loc="outside upper center")
    rows[-1].set_xlabel("time since the step began (ms)")
    figure.savefig(FILE)


if __name__ == "__main__":
    main()
