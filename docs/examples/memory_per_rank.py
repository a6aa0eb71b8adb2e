"""How much memory a rank needs to train a model: DDP, ZeRO-1 and FSDP, beside a formula.

    torchrun --standalone --nproc-per-node 2 docs/examples/memory_per_rank.py

It needs no GPU, and no package but torch. It adds up the tensors that a rank holds after a step,
each storage once. These bytes are exact, and the same on every machine. On Linux it also shows by
how much the process has grown. `--json FILE` writes all of it down.
docs/when-ddp-is-not-enough.md discusses the table.
"""

import argparse
import copy
import ctypes
import gc
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

FLOAT = 4  # bytes of a float32
MIB = 2**20
STATUS = Path("/proc/self/status")  # Linux
M_MMAP_THRESHOLD = -3  # mallopt(3)
STEPS = 3  # DDP deals its buckets anew after the first
ROWS = 64  # of a batch in these steps


class Block(nn.Module):
    """The feed-forward half of a transformer's layer: (rows, width) in, (rows, width) out."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[1:]))))


class Network(nn.Sequential):
    """Blocks, one after the other. With `checkpointed` each keeps only its input for backward."""

    def __init__(self, width, blocks):
        super().__init__(*[Block(width) for _ in range(blocks)])
        self.checkpointed = False

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


# Four ways to train. Each returns the wrapped model, its optimizer, and a list that receives DDP's
# buckets in each step.


def ddp(model, **options):
    model = DDP(model, **options)
    buckets = []
    model.register_comm_hook(buckets, average)
    return model, torch.optim.Adam(model.parameters()), buckets


def average(buckets, bucket):
    """What DDP does with a bucket by itself; and note the bucket."""
    tensor = bucket.buffer()
    buckets.append(tensor)
    summed = dist.all_reduce(tensor.div_(dist.get_world_size()), async_op=True)
    return summed.get_future().then(lambda done: done.value()[0])


def ddp_with_views(model):
    return ddp(model, gradient_as_bucket_view=True)


def zero_1(model):
    model, _, buckets = ddp_with_views(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)
    return model, optimizer, buckets


def fsdp(model):
    # On the CPU even where there is a GPU: the figures are the same.
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:  # the pieces in which parameters are gathered
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters()), []


WAYS = {
    "DDP": ddp,
    "DDP, gradients as views": ddp_with_views,
    "DDP, views and ZeRO-1": zero_1,
    "FSDP": fsdp,
}


def formula(way, parameters, tensors, ranks):
    """The bytes of parameters, gradients and Adam's state on one rank.

    For so many `parameters`, float32, in so many `tensors`, each of which can be cut into `ranks`
    equal parts, and which can be dealt out evenly. Adam keeps two numbers for each parameter, and
    for each tensor one that counts its steps.
    """
    weights = FLOAT * parameters
    counters = FLOAT * tensors
    if way == "DDP":  # each gradient twice: in .grad and in a bucket
        return weights, 2 * weights, 2 * weights + counters
    if way == "DDP, gradients as views":
        return weights, weights, 2 * weights + counters
    if way == "DDP, views and ZeRO-1":  # a rank has the state of its share of the tensors
        return weights, weights, (2 * weights + counters) // ranks
    return weights // ranks, weights // ranks, 2 * weights // ranks + counters


# Measure


def size(tensors):
    """The bytes of the storages of `tensors` on this rank. Views of one storage count once."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = [part.untyped_storage() for part in parts]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def states(optimizer):
    """The tensors that an optimizer keeps on this rank."""
    own = getattr(optimizer, "optim", optimizer)  # within ZeroRedundancyOptimizer: of this rank
    return [value for state in own.state.values() for value in state.values()]


def train(way, model, batch):
    """A few steps of a copy of `model`: what this rank holds then, and the mean loss of all ranks.

    'process' and 'peak' are the growth of this process after and during the last step, None where
    the system does not tell.
    """
    gc.collect()  # what is left of an earlier way
    before, _ = resident()
    model, optimizer, buckets = WAYS[way](copy.deepcopy(model))
    for _ in range(STEPS):
        forget_peak()
        optimizer.zero_grad()
        buckets.clear()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    after, peak = resident()
    gradients = [parameter.grad for parameter in model.parameters()]
    held = {
        "parameters": size(model.parameters()),
        "gradients": size(gradients + buckets),
        "optimizer": size(states(optimizer)),
    }
    growth = {"process": after and after - before, "peak": peak and peak - before}
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return held, growth, mean.item()


def resident():
    """Bytes of this process that are in memory: (now, the most since `forget_peak`)."""
    if not STATUS.exists():
        return None, None
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return tuple(1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))


def forget_peak():
    if STATUS.exists():
        (STATUS.parent / "clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def give_memory_back_at_once():
    """Have malloc return what is freed to the system; else a process only grows (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)


def kept_for_backward(model, batch, bf16=False):
    """The bytes that a forward pass keeps for the backward pass, beside the parameters.

    Two numbers: activations, and copies of the parameters in another type (known by their shape,
    which must not be that of an activation).
    """
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    shapes = {each.shape for each in model.parameters()}
    kept = []

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            model(batch)
    copies = [tensor for tensor in kept if tensor.shape in shapes]
    return size(kept) - size(copies), size(copies)


def activations(model, batch):
    """Bytes for one batch: as it is, under autocast, and with every block checkpointed."""
    found = {"float32": kept_for_backward(model, batch)[0]}
    in_bf16 = kept_for_backward(model, batch, bf16=True)
    found["bfloat16"], found["  and copies of parameters"] = in_bf16
    model.checkpointed = True
    found["float32, checkpointed"] = kept_for_backward(model, batch)[0]
    model.checkpointed = False
    return found


def main():
    options = arguments()
    give_memory_back_at_once()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for way in WAYS:  # imports what it needs, so that the process does not grow by it later
        train(way, Network(ranks, ranks), torch.randn(1, ranks))
    torch.manual_seed(0)
    model = Network(options.width, options.blocks)
    shape = (sum(each.numel() for each in model.parameters()), len(list(model.parameters())))
    torch.manual_seed(1 + rank)
    batch = torch.randn(options.rows, options.width)
    results = {}
    for way in WAYS:
        held, growth, loss = train(way, model, batch[:ROWS])
        everybody = [None] * ranks
        dist.all_gather_object(everybody, held)
        expected = dict(zip(held, formula(way, *shape, ranks)))
        results[way] = {"ranks": everybody, "formula": expected, "rank 0": growth, "loss": loss}
    if rank == 0:
        found = {"parameters": shape[0], "ways": results, "activations": activations(model, batch)}
        print_tables(found, options.rows)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--blocks", type=int, default=6, help="default %(default)s")
    parser.add_argument(
        "--rows", type=int, default=512, help="whose activations are counted; default %(default)s"
    )
    parser.add_argument("--json", type=Path, help="also write the bytes to this file")
    return parser.parse_args()


def print_tables(found, rows):
    ranks = len(next(iter(found["ways"].values()))["ranks"])
    print(f"{found['parameters']:,} parameters, {ranks} ranks: MiB on rank 0 after a step")
    columns = "| {:24} | {:>10} | {:>9} | {:>9} | {:>6} | {:>7} | {:>7} | {:>6} | {:>6} |"
    names = "parameters gradients optimizer sum formula process peak loss".split()
    print(columns.format("", *names))
    for way, result in found["ways"].items():
        held = [*result["ranks"][0].values()]
        exact = [
            f"{each / MIB:.1f}" for each in (*held, sum(held), sum(result["formula"].values()))
        ]
        process = [
            "" if each is None else f"{each / MIB:.0f}" for each in result["rank 0"].values()
        ]
        print(columns.format(way, *exact, *process, f"{result['loss']:.4f}"))
    print(f"Kept for the backward pass, {rows} rows: MiB")
    for name, number in found["activations"].items():
        print(f"| {name:26} | {number / MIB:6.2f} |")


if __name__ == "__main__":
    main()
