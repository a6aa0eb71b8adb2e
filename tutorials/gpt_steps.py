"""What `gpt` uses and does not teach: names, traces of steps, a slow network, pictures.

What is in it travels to the ranks with the functions of the notebook, so that workers
of a distant cluster do not need this file. Times are seconds. A span is (what, begin,
end), on the clock of its machine: spans of ranks on one machine can be drawn together.
"""

import contextlib
import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import cloudpickle
import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp
from tutorials import helpers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# The names, as pets has them

ALPHABET = helpers.ALPHABET  # its value travels to the ranks, as helpers does not


class Names:
    """The names of pets. `windows` are to learn from, in random order, or `held_out`.

    Both are rows (n, width + 1) of tokens.
    """

    def __init__(self, path, width, seed):
        table = helpers.read_names(path)
        learned, held_out = ddp.split(len(table), [0.1], seed=seed)
        self._learned = table["name"].iloc[learned].sample(frac=1, random_state=seed)
        self._held_out = table["name"].iloc[held_out]
        self.windows = windows_of(self._learned, width)
        self.held_out = windows_of(self._held_out, width)

    def loss_of_5_gram(self):
        """Nats per held-out character, for who counts what follows four characters."""
        return helpers.n_gram(self._learned, self._held_out, n=5, prior=10)


def windows_of(names, width):
    """Rows (n, width + 1) of bytes. The last of each is the first of the next one."""
    return helpers.encode(names).unfold(0, width + 1, width)


# A step, measured

PARTS = "loading", "forward", "optimizer", "logging"
CALLS = {  # the profiler's name, and ours
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
LAST_OF_BACKWARD = "autograd::engine::evaluate_function"


class Trace:
    """Times the steps of a loop on this rank; `torch.profiler` records the last one.

        trace = Trace()
        for _ in trace.steps(5):
            …  # one step, in blocks of `record_function("forward")` and so on
        trace.seconds, trace.spans, trace.calls

    `seconds` is the quickest step that was not recorded, without the first. `calls`
    says how often the recorded one made which collective call. The ranks begin each
    step together. On a GPU, the spans are those of the CPU, which submits the work.
    """

    def __init__(self, network=None):
        self.network = network  # a SlowNetwork has spans of its own
        self.seconds, self.spans, self.calls = None, [], {}

    def steps(self, count):
        seconds = []
        for number in range(count - 1):
            began = _begin_together()
            yield number
            _finish_work()
            seconds.append(time.perf_counter() - began)
        self.seconds = min(seconds[1:])
        _begin_together()
        if self.network is not None:
            self.network.spans.clear()
        with self:
            yield count - 1

    def of_all_ranks(self, model=None, optimizer=None, **more):
        """Of each rank what it has measured, and `more`. All ranks call it.

        With a model and its optimizer also `held`, their bytes on the rank, by kind.
        """
        mine = {"seconds": self.seconds, "spans": self.spans, "calls": self.calls}
        mine |= {"waiting": _share(self.spans, "waiting"), **more}
        if model is not None:
            mine["held"] = bytes_held(model, optimizer)
        return [SimpleNamespace(**each) for each in of_all_ranks(mine)]

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU])
        with _standard_error_closed():
            self._profile.start()
        return self

    def __exit__(self, *_):
        _finish_work()
        with _standard_error_closed():
            self._profile.stop()
        self.spans = list(_spans(self._profile))
        names = [CALLS.get(event.name) for event in self._profile.events()]
        self.calls = {name: names.count(name) for name in sorted(set(names) - {None})}
        if self.network is not None:
            self.spans = [span for span in self.spans if span[0] != "sending"]
            self.spans += self.network.spans


def _begin_together():
    _finish_work()
    dist.barrier()
    return time.perf_counter()


def _finish_work():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _standard_error_closed():
    """The profiler writes two lines to it, past Python, which nobody needs."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _spans(profiled):
    start = profiled.profiler.kineto_results.trace_start_ns() / 1e9
    events = [
        (
            event.name,
            start + event.time_range.start / 1e6,
            start + event.time_range.end / 1e6,
        )
        for event in profiled.events()
    ]
    computed = [end for name, _, end in events if name.startswith(LAST_OF_BACKWARD)]
    for name, begin, end in events:
        if name.startswith(("gloo:", "nccl:")):
            yield "sending", begin, end
        elif name == "backward":
            last = max((each for each in computed if begin < each < end), default=end)
            yield "backward", begin, last
            yield "waiting", last, end
        elif name in PARTS:
            yield name, begin, end


def _share(spans, what):
    """Which share of a step such spans take, 0 to 1."""
    whole = max(end for *_, end in spans) - min(begin for _, begin, _ in spans)
    return sum(end - begin for name, begin, end in spans if name == what) / whole


def of_all_ranks(value):
    """A list: what each rank has given. All ranks call it."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def save_curve(run):
    """Draw the loss of a run into its directory."""
    figure = helpers.curve(run.metrics, label="loss (nats per character)")
    figure.savefig(run.directory / "loss.png", bbox_inches="tight")
    plt.close(figure)


# Each bar has a pattern of its own, so that nobody needs its colour
BARS = {
    "loading": {"facecolor": "grey", "hatch": "xx", "edgecolor": "white"},
    "forward": {"facecolor": "tab:blue", "hatch": "", "edgecolor": "white"},
    "backward": {"facecolor": "#d95f02", "hatch": "//", "edgecolor": "white"},
    "waiting": {"facecolor": "white", "hatch": "..", "edgecolor": "grey"},
    "optimizer": {"facecolor": "tab:purple", "hatch": "\\\\", "edgecolor": "white"},
    "logging": {"facecolor": "tab:brown", "hatch": "++", "edgecolor": "white"},
    "sending": {"facecolor": "tab:green", "hatch": "--", "edgecolor": "white"},
}


def picture(steps, most=None):
    """A figure: for each title in `steps` what `Trace.of_all_ranks` has given.

    A rank has a lane for what it computes, and below it one for what it sends. `most`
    is the milliseconds that are drawn; None draws all.
    """
    figure, rows = plt.subplots(
        len(steps),
        sharex=True,
        squeeze=False,
        figsize=(8, 0.7 + 1.35 * len(steps)),
        layout="constrained",
    )
    shown = set()
    for axes, (title, ranks) in zip(rows[:, 0], steps.items()):
        start, _ = _first_and_last(ranks)
        for rank, trace in enumerate(ranks):
            for what, begin, end in trace.spans:
                shown.add(what)
                lane = rank + (0.2 if what == "sending" else -0.2)
                left, width = 1_000 * (begin - start), 1_000 * (end - begin)
                axes.barh(lane, width, 0.36, left, **BARS[what])
        axes.set(yticks=range(len(ranks)), ylim=(len(ranks) - 0.5, -0.5))
        axes.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
        axes.set_title(title, loc="left", fontsize=10)
    names = [name for name in BARS if name in shown]
    bars = [plt.Rectangle((0, 0), 1, 1, **BARS[name]) for name in names]
    figure.legend(bars, names, ncols=len(names), loc="outside upper center", fontsize=9)
    durations = [end - start for start, end in map(_first_and_last, steps.values())]
    rows[-1, 0].set_xlim(0, most or 1_000 * max(durations))
    rows[-1, 0].set_xlabel("time since the step began (ms)")
    return figure


def _first_and_last(ranks):
    spans = [span for rank in ranks for span in rank.spans]
    return min(begin for _, begin, _ in spans), max(end for *_, end in spans)


# What DDP sends, and bytes


class SlowNetwork:
    """A communication hook: averages one bucket after the other, and waits after each.

    It waits `latency` seconds, and `per_mib` more for each MiB. Waiting needs no
    processor. So computing and sending overlap on a CPU too.
    """

    def __init__(self, latency=0.002, per_mib=0.003):
        self.latency, self.per_mib = latency, per_mib
        self.spans = []
        self._thread = None

    def average(self, _, bucket):
        buffer = bucket.buffer()
        if self._thread is None:  # made on the rank, as a thread does not travel
            self._thread = ThreadPoolExecutor(1)
        devices = [buffer.device] if buffer.is_cuda else None
        future = torch.futures.Future(devices=devices)
        self._thread.submit(self._average_and_wait, buffer, future)
        return future

    def _average_and_wait(self, buffer, future):
        began = time.time()
        try:
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
            if buffer.is_cuda:  # else the network would be slow before it has sent
                torch.cuda.current_stream(buffer.device).synchronize()
            time.sleep(self.latency + self.per_mib * buffer.nbytes / 2**20)
        except Exception as error:  # of any kind: backward() waits for it
            future.set_exception(error)
        else:
            self.spans.append(("sending", began, time.time()))
            future.set_result(buffer)


class Buckets:
    """A communication hook: averages, and keeps the buckets of the latest step."""

    def __init__(self):
        self.buffers = []

    def average(self, _, bucket):
        if bucket.index() == 0:
            self.buffers = []
        self.buffers.append(bucket.buffer())
        averaged = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(averaged, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


def nbytes(tensors):
    """The bytes of tensors in this rank's memory. What two share counts once."""
    sizes = {}
    for tensor in tensors:
        # Of a DTensor the part that this rank has
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = own.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def bytes_held(model, optimizer):
    """What stays on this rank between two steps: bytes by kind."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    means = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": nbytes(model.parameters()),
        "gradients": nbytes(gradients),
        "Adam": nbytes(means),
    }


def memory_of_a_step(make_model, rows, forward, **options):
    """On a rank: MB by kind, as text, and seconds of the second step of `make_model()`.

    `forward(model, rows, **options)` returns the loss, and the tensors that it saved.
    """
    model, buckets = DDP(make_model().to(ddp.device())), Buckets()
    model.register_comm_hook(None, buckets.average)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    for _ in range(2):
        began = _begin_together()
        optimizer.zero_grad()
        loss, saved = forward(model, rows.to(ddp.device()), **options)
        activations = nbytes(each for each in saved if each.data_ptr() not in weights)
        del saved  # else it would live as long as backward
        loss.backward()
        optimizer.step()
        _finish_work()
        seconds = time.perf_counter() - began
    held = {**bytes_held(model, optimizer), "buckets": nbytes(buckets.buffers)}
    held["activations"] = activations
    return [f"{kind} {size / 1e6:.0f}" for kind, size in held.items()], seconds


# Exercise B: four runs of one program

PROGRAM = {"batch_size": 4, "num_workers": 0, "average_every": 1, "log_rows": True}
ROWS = 64  # of a rank, in a run
CLUSTERS = {  # what is wrong there; seconds
    "A": {"storage": 0.01},
    "B": {"per_mib": 0.1},
    "C": {"log_of_rank_1": 0.01},
    "D": {"features": 16},
}


class Stored(Dataset):
    """Rows in a storage that needs `seconds` for each."""

    def __init__(self, rows, seconds):
        self.rows, self.seconds = rows, seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.rows[index]


class SmallModel(nn.Module):
    """Its output is a loss, of a row of characters."""

    def __init__(self, features):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), features)
        self.layers = nn.Sequential(
            nn.Linear(features, 4 * features),
            nn.GELU(),
            nn.Linear(4 * features, features),
            nn.Linear(features, len(ALPHABET)),
        )

    def forward(self, rows):
        scores = self.layers(self.embedding(rows[:, :-1].long()))
        return nn.functional.cross_entropy(
            scores.flatten(0, 1), rows[:, 1:].long().flatten()
        )


def run_on(cluster, windows, program, traced=False):
    """Run `program` on the cluster "A", "B", "C" or "D".

    Returns seconds, and a Trace of the run if `traced`. Each rank trains on the same
    number of rows, whatever the program.
    """
    here = {"storage": 0.0, "per_mib": 0.003, "log_of_rank_1": 0.0, "features": 128}
    here |= CLUSTERS[cluster]
    device, network = ddp.device(), SlowNetwork(per_mib=here["per_mib"])
    model = DDP(SmallModel(here["features"]).to(device))
    model.register_comm_hook(None, network.average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    size, workers = program["batch_size"], program["num_workers"]
    rows = windows[ddp.rank() :: ddp.world_size()][: size + ROWS]
    for _ in range(2):  # DDP lays out its buckets anew after the first step
        model(rows[:4].to(device)).backward()
    network.spans.clear()
    with warnings.catch_warnings():  # of more processes than cores: these only sleep
        warnings.simplefilter("ignore")
        batches = iter(
            DataLoader(Stored(rows, here["storage"]), size, num_workers=workers)
        )
    next(batches)  # the loader's processes have begun. What they have loaded is free
    trace, passes = Trace(network), 0
    began = _begin_together()
    with trace if traced else contextlib.nullcontext():
        while True:
            with record_function("loading"):
                batch = next(batches, None)
            if batch is None:
                break
            passes += 1
            is_last = passes % program["average_every"] == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with record_function("forward"):
                    loss = model(batch.to(device)) / program["average_every"]
                with record_function("backward"):
                    loss.backward()
            if is_last:
                with record_function("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
            if program["log_rows"] and ddp.rank() == 1:
                with record_function("logging"):
                    time.sleep(here["log_of_rank_1"] * len(batch))
    _begin_together()
    return time.perf_counter() - began, trace
