"""Random changes of images that are the same on any number of ranks.

Promises: what an image looks like depends on the seed, the epoch and its index alone; the random
numbers of the training itself, such as those of dropout, are left as they are.
"""

from collections.abc import Callable

import numpy as np
import torch


class Augmented(torch.utils.data.Dataset):
    """`dataset` with `transform` (torchvision.transforms.v2) applied to each image.

    `dataset` gives (image, label). The same image in the same epoch looks the same on any number
    of ranks and in any worker. `position` has the number of the epoch as its attribute `epoch`, as
    an `ElasticSampler` does. A `DataLoader` with persistent_workers, whose copy would stay in its
    epoch, is refused with an `Error`.
    """

    changes_with_epoch = True  # a loader's workers must not outlive an epoch

    def __init__(
        self, dataset: torch.utils.data.Dataset, transform: Callable, position, *, seed: int = 0
    ):
        self.dataset = dataset
        self.transform = transform
        self.position = position
        self.seed = seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """The (image, label) at `indices` (list of int); this is what a `DataLoader` calls."""
        samples = []
        # The CPU's generator: that of a GPU, which dropout uses there, stays as it is.
        generator = torch.random.default_generator
        with torch.random.fork_rng(devices=[]):
            for index, (image, label) in zip(indices, self._fetch(indices)):
                sequence = np.random.SeedSequence([self.seed, self.position.epoch, index])
                words = sequence.generate_state(2, np.uint32)
                generator.manual_seed(int(words[0]) << 31 ^ int(words[1]))
                samples.append((self.transform(image), label))
        return samples

    def _fetch(self, indices):
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch:
            return fetch(indices)
        return [self.dataset[index] for index in indices]
