"""What one rank of the benchmark does, under `ddp.launch` and, run as a script, under torchrun.

    torchrun --nproc-per-node 2 ranks.py FUNCTION FOLDER [STEPS]
    python ranks.py --connect FUNCTION FOLDER                       # on a local cluster of two

Every rank leaves what it measured in FOLDER/<rank>.json: all ranks are on this host, so their
files and clocks are the benchmark's too. The model is that of the pets tutorial in its laptop
size, the batches are random characters.
"""

import json
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from ddp_common.ranks import rendezvous

LETTERS, WIDTH, GLOBAL_BATCH = 31, 8, 512
WARM_UP = 20  # steps before the clock starts


class NextLetter(nn.Module):
    """An LSTM that reads WIDTH characters, int64 (batch, WIDTH), and scores the next one.

    The scores have the shape (batch, LETTERS).
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.scores = nn.Linear(64, LETTERS)

    def forward(self, contexts):
        return self.scores(self.lstm(self.embedding(contexts))[0][:, -1])


def first_backward(folder):
    """The time (s since 1970) at which this rank has finished its first backward."""
    _one_backward()
    _leave(folder, finished=time.time())


def memory(folder, bare):
    """The memory (bytes) after the first backward.

    Of this rank, of its forkserver, and of the process with the id `bare`.
    """
    _one_backward()
    # between the two barriers all ranks are there, and share what they share
    torch.distributed.barrier()
    processes = {
        "rank": psutil.Process(),
        "forkserver": psutil.Process().parent(),
        "bare": psutil.Process(bare),
    }
    _leave(folder, **{name: _memory_of(process) for name, process in processes.items()})
    torch.distributed.barrier()


def steps(folder, count):
    """The mean time and processor time (s) of `count` training steps, each with a report."""
    torch.set_num_threads(1)
    contexts = torch.randint(LETTERS, (GLOBAL_BATCH * 50, WIDTH))
    targets = torch.randint(LETTERS, (GLOBAL_BATCH * 50,))
    sampler = ddp.ElasticSampler(len(contexts), GLOBAL_BATCH)
    model = DDP(NextLetter())
    optimizer = torch.optim.Adam(model.parameters())
    done = 0
    for _ in sampler.epochs(WARM_UP + count):
        for batch in sampler:
            if done == WARM_UP:
                began, cpu_began = time.perf_counter(), time.process_time()
            loss = nn.functional.cross_entropy(model(contexts[batch]), targets[batch])
            loss = loss * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)
            done += 1
            if done == WARM_UP + count:
                _leave(
                    folder,
                    seconds=(time.perf_counter() - began) / count,
                    cpu=(time.process_time() - cpu_began) / count,
                )
                return


def _one_backward():
    torch.set_num_threads(1)
    share = GLOBAL_BATCH // ddp.world_size()
    model = DDP(NextLetter())
    scores = model(torch.randint(LETTERS, (share, WIDTH)))
    targets = torch.randint(LETTERS, (share,))
    nn.functional.cross_entropy(scores, targets).backward()


def _memory_of(process):
    memory = process.memory_full_info()
    return {"uss": memory.uss, "pss": memory.pss}


def _leave(folder, **values):
    (Path(folder) / f"{ddp.rank()}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    if sys.argv[1] == "--connect":
        _, _, name, folder = sys.argv
        with ddp.connect("local", workers=2) as client:
            ddp.launch(client, globals()[name], folder=folder, directory=f"{folder}/run")
    else:
        name, folder, *numbers = sys.argv[1:]
        with rendezvous.process_group():
            globals()[name](folder, *map(int, numbers))
