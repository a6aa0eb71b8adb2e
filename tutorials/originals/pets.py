"""The names of Saturn Cloud's article on pets: `make run TUTORIAL=pets PRESET=original`.

It trained an LSTM to continue the names of pets in Seattle, for 25 epochs, on three workers with
a GPU each, and drew 50 new names.

Corrected: each sample is used once in an epoch. A comment at the place says so.
"""

# %%
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import helpers, kit

# %% tags=["parameters"]
settings = kit.original(
    "pets",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or your own names.csv
    repeat=True,  # a name counts as often as it was registered; False: once
    steps=0,  # at most so many in an epoch; 0: all
    seed=0,
    limits={"dropout": (0, 1)},
)

# %%
ALPHABET = "_" + helpers.ALPHABET  # '_' is the blank in front of a name, '+' the stop sign
BLANK, STOP = ALPHABET.index("_"), ALPHABET.index("+")
LONGEST = 30  # characters of a name that is drawn


def prefixes(names, window):
    """Bytes (n, window + 1): the last characters of each prefix of each name with its stop sign.

    Blanks stand in front of a short one.
    """
    rows = []
    for name in names:
        codes = [BLANK] * window + [ALPHABET.index(character) for character in name + "+"]
        rows += [codes[end - window : end + 1] for end in range(window, len(codes))]
    return torch.tensor(rows, dtype=torch.uint8)


class NameModel(nn.Module):
    """From codes (n, window) to scores (n, window, 31) of the characters that follow."""

    def __init__(self, layers, hidden, dropout):
        super().__init__()
        characters = len(ALPHABET)
        self.lstm = nn.LSTM(characters, hidden, layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, codes):
        one_hot = F.one_hot(codes.long(), len(ALPHABET)).float()
        return self.head(self.lstm(one_hot)[0])


def train(samples, settings):
    """Train on this rank's share of each batch; returns the weights."""
    device = ddp.device()
    torch.manual_seed(settings.seed)  # the same initial weights on all ranks

    # All ranks draw one order, from the seed and the epoch, and each takes its share. In theirs
    # each worker shuffled the data by itself, without a seed, so that the shares overlapped.
    sampler = ddp.ElasticSampler(
        samples,
        settings.batch_per_rank * ddp.world_size(),
        steps=settings.steps or None,
        seed=settings.seed,
    )
    samples = samples.to(device)  # all of them fit on a GPU
    model = DDP(NameModel(settings.layers, settings.hidden, settings.dropout).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    checkpoint.restore()
    for epoch in sampler.epochs(settings.epochs):
        for rows in sampler.batches():
            batch = samples[rows]
            scores = model(batch[:, :-1])
            targets = batch[:, 1:].long()  # every position counts, blanks too
            loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten()) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)  # beside it are rank, time, epoch, step: metrics.jsonl
        record = {"loss": loss.item(), "time": time.time(), "epoch": epoch, "worker": ddp.rank()}
        ddp.save_file(f"epochs/epoch-{epoch}-rank-{ddp.rank()}.json", json.dumps(record))
        if ddp.rank() == 0:
            print(f"epoch {epoch + 1} of {settings.epochs}: loss {loss.item():.3f}", flush=True)
        checkpoint.save()
    return {name: each.cpu() for name, each in model.module.state_dict().items()}


@torch.no_grad()
def draw(model, window, count, generator):
    """Names, drawn character by character, each up to its stop sign or LONGEST."""
    device = next(model.parameters()).device
    texts, ended = torch.full((count, window), BLANK), []
    for _ in range(LONGEST):
        scores = model(texts[:, -window:].to(device))[:, -1].cpu()
        scores[:, BLANK] = -torch.inf  # a blank is never drawn
        drawn = torch.multinomial(scores.softmax(1), 1, generator=generator)
        texts = torch.cat([texts, drawn], 1)
        ended += texts[texts[:, -1] == STOP].tolist()
        texts = texts[texts[:, -1] != STOP]
        if len(texts) == 0:
            break
    rows = ended + texts.tolist()
    return ["".join(ALPHABET[code] for code in row[window:]).removesuffix("+") for row in rows]


# %%
dataset = kit.fetch("pets", settings.data)
table = helpers.read_names(dataset.path)
names = table["name"].repeat(table["count"] if settings.repeat else 1)
samples = prefixes(names, settings.window)
client = ddp.connect()
print(f"{client.ranks} ranks · {len(names):,} names, {len(samples):,} prefixes: {dataset.origin}")
run = ddp.launch(client, train, **kit.launch_options(), samples=samples, settings=settings)

# %%
# The article dropped the names of its training data. We print a selection: a strict filter also
# drops what may not be tame, since a model can spell rude words. A few in a thousand pass it.
torch.set_num_threads(1)  # one core, as a rank has: more are slow where others are busy
model = NameModel(settings.layers, settings.hidden, settings.dropout).eval()
model.load_state_dict(run.result)
model.to(ddp.device())
is_tame = helpers.name_filter(table["name"])
generator = torch.Generator().manual_seed(settings.seed)
invented, tries = [], 0
while len(invented) < settings.names and tries < 400 * settings.names:
    names = draw(model, settings.window, 20 * settings.names, generator)
    tries += len(names)
    invented += [name.title() for name in names if is_tame(name)]
    invented = list(dict.fromkeys(invented))  # each once
invented = invented[: settings.names]
print(f"{len(invented)} names, of {tries:,} that were drawn, passed the filter:")
print(", ".join(invented) or "none: the model has learned too little")
(run.directory / "names.txt").write_text("".join(f"{name}\n" for name in invented))
client.close()
