"""What ranks of `ucmerced` need and it does not teach: a small ResNet, views.

It imports nothing that takes long to start: every rank is a new process.
"""

import torch
from torch import nn
from torch.nn.functional import relu
from torch.utils.data import Dataset


class Block(nn.Module):
    """A residual block: it adds what it computes to its input, and halves the size."""

    def __init__(self, before, after):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(3))

    def forward(self, x):
        computed = self.norms[1](self.second(relu(self.norms[0](self.first(x)))))
        return relu(computed + self.norms[2](self.shortcut(x)))


def make_network(name, classes):
    """A ResNet with random weights: `small`, or the one of torchvision of this name.

    It takes floats (n, 3, size, size), and returns scores (n, classes).
    """
    if name != "small":
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=classes)
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers += [Block(16, 32), Block(32, 64)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return nn.Sequential(*layers)


class Views(Dataset):
    """Scenes (3, size, size) and labels; if `turn`, a random one of each scene's views.

    There are eight: flipped or not in two directions, transposed or not.
    """

    def __init__(self, scenes, turn):
        self.scenes, self.turn = scenes, turn

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        scene, label = self.scenes[index]
        if self.turn:
            view = int(torch.randint(8, ()))
            scene = scene.flip(2) if view & 1 else scene
            scene = scene.flip(1) if view & 2 else scene
            scene = scene.mT if view & 4 else scene
        return scene, label
