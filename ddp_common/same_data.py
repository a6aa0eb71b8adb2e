"""Whether the data are the same on all ranks: two samples, which each of them fetches.

The random state of a sample follows from (seed, epoch, index). So a sample is the same on every
rank, and whenever it is fetched, or something is wrong: a list that each rank has shuffled for
itself, a folder's own order, a generator that the data set makes itself. Numbers with a point are
compared up to rounding, as kinds of processors differ; other numbers, text, bytes and containers
exactly; objects of one's own are left out.
"""

from typing import Any

import numpy as np
import torch
from dask.tokenize import tokenize
from torch.utils._pytree import keystr, tree_flatten_with_path

from ddp_common import exchange, replicas
from ddp_common.errors import Error

ADVICE = (
    "Have all ranks make the same list: sorted(os.listdir(…)), random.Random(0).shuffle(paths), "
    "random_split(…, generator=torch.Generator().manual_seed(0)). What a data set draws from "
    "torch, np.random and random follows from the sample; seed a generator of its own at the head "
    "of __getitem__, from torch.initial_seed() (docs/recipes.md, 'Small ones'). "
    "Where it is on purpose: ddp.DataLoader(…, compare=False)."
)
EXACT = (bool, int, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)

Found = list[replicas.Fingerprint]  # of each sample that was chosen


def chosen(seed: int, length: int) -> list[int]:
    """Indices of the samples that are compared: two, and the first of them once more."""
    first, second = np.random.default_rng([seed, length]).integers(length, size=2).tolist()
    return [first, second, first]


def fingerprints(indices: list[int], samples: list[Any]) -> Found:
    """What is compared of these samples, by the place in each, such as `sample 17['image']`."""
    return [_fingerprint(f"sample {index}", each) for index, each in zip(indices, samples)]


def _fingerprint(name: str, sample: Any) -> replicas.Fingerprint:
    exact: replicas.Fingerprint = {}
    tensors: list[tuple[str, torch.Tensor]] = []
    for path, value in tree_flatten_with_path(sample)[0]:
        place = name + keystr(path)
        is_numpy = isinstance(value, float | np.ndarray | np.generic)
        if is_numpy and np.asarray(value).dtype.kind == "f":
            value = torch.tensor(np.asarray(value, dtype=np.float64))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            tensors.append((place, value.to_dense()))
        elif isinstance(value, EXACT):
            exact[place] = tokenize(value)
    return exact | replicas.projections("", tensors, turn=0)


def compare(settings: dict[str, Any], found: Found | None, earlier: Found | None) -> Found | None:
    """Compare a sampler's settings, and what was found of its samples, between all ranks.

    A collective. `earlier` is what a checkpoint says of these samples. Returns rank 0's, and
    `earlier` where nothing was fetched. Raises `Error` for what differs.
    """
    settings_of_ranks, found_by_ranks = zip(*exchange.gather([settings, found]))
    for rank, theirs in enumerate(settings_of_ranks):
        for key, value in settings_of_ranks[0].items():
            if theirs[key] != value:
                raise Error(
                    f"The ElasticSampler of rank {rank} has {key} {theirs[key]}, and rank 0's has "
                    f"{value}: a step would be made of samples that do not belong together. Give "
                    f"all ranks the same.\n{ADVICE}"
                )
    if None in found_by_ranks:
        return earlier
    problem = None
    for rank, (first, _, again) in enumerate(found_by_ranks):
        if replicas.difference({rank: first, rank + 1: again}) is not None:
            name = f"sample {chosen(settings['seed'], settings['length'])[0]}"
            problem = f"on rank {rank} {name} is another one when it is fetched again"
    for number, fingerprint in enumerate(found_by_ranks[0]):
        of_ranks = {rank: each[number] for rank, each in enumerate(found_by_ranks)}
        problem = problem or replicas.difference(of_ranks)
        now = replicas.difference({0: earlier[number], 1: fingerprint}) if earlier else None
        if not problem and now is not None:
            name, _, _ = now.partition(" is ")
            raise Error(
                "The checkpoint was written with other data, or with the same in another order: "
                f"{name} is not what it was. Resume with the same. To train on others is a new "
                f"run from these weights (docs/recipes.md, 'Small ones').\n{ADVICE}"
            )
    if problem is not None:
        raise Error(f"All ranks are to have the same data, and {problem}.\n{ADVICE}")
    return found_by_ranks[0]
