"""Random changes of images that are the same on any number of ranks."""

import numpy as np
import torch


class Augmented(torch.utils.data.Dataset):
    """`dataset` with `transform` (torchvision.transforms.v2) applied to each image, at random by (seed, epoch, index) alone.

    The same image in the same epoch looks the same on any number of ranks and in any worker. `position` is whatever has the number of
    the epoch as its attribute `epoch`: an `ElasticSampler`. Not for a `DataLoader` with persistent_workers, whose copy stays in its epoch.
    """

    def __init__(self, dataset, transform, position, *, seed=0):
        self.dataset, self.transform, self.position, self.seed = dataset, transform, position, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        fetch = getattr(self.dataset, "__getitems__", None) or (
            lambda indices: [self.dataset[index] for index in indices]
        )
        samples, generator = (
            [],
            torch.random.default_generator,
        )  # the CPU's: that of a GPU, which dropout uses, stays as it is
        with torch.random.fork_rng(devices=[]):
            for index, (image, label) in zip(indices, fetch(indices)):
                words = np.random.SeedSequence(
                    [self.seed, self.position.epoch, index]
                ).generate_state(2, np.uint32)
                generator.manual_seed(int(words[0]) << 31 ^ int(words[1]))
                samples.append((self.transform(image), label))
        return samples
